"""TTRL: votes, rewards and logged metrics by hand, what is trained on, gold answers that change nothing."""
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_dpo import random_play, writing

from nanochat import recipes
from nanochat.recipes.self_play.ttrl import majority_rewards, pseudo_labels

ttrl = recipes.load("ttrl")


def test_a_vote_earns_1_for_the_majority_answer():
    for answers, label, rewards in (
            (["2", "1", "2", "0"], "2", [1, 0, 1, 0]),
            (["1", "2", "2", "1"], "1", [1, 0, 0, 1]), (["2", "1", "1", "2"], "2", [1, 0, 0, 1]),  # a tie: the first
            (["0", "1", "2", "3"], "0", [1, 0, 0, 0]), (["1", "1", "1", "1"], "1", [1, 1, 1, 1]),
            ([None, None, None, "1"], "1", [0, 0, 0, 1]),    # what cannot be read has no vote, however much there is
            ([None] * 4, None, [0, 0, 0, 0])):               # no label: nothing agrees with nothing
        assert pseudo_labels(answers, 4) == [label] and majority_rewards(answers, [label]) == rewards
    answers = ["1", "2", "2", "1", "1", None]  # of two problems; as one list, "1" would have 3 votes of 6
    assert pseudo_labels(answers, 3) == ["2", "1"]
    assert majority_rewards(answers, ["2", "1"]) == [0, 1, 1, 1, 1, 0]
    assert pseudo_labels([], 3) == [] and majority_rewards([], []) == []


# 2 problems of 4 votes each. {} stands for the gold answer.
WRONG_MAJORITY = ["=9", "=9", "={}", "=9"]   # label 9, rewards 1 1 0 1; outcomes 0 0 1 0
SPLIT_VOTE = ["={}", "", "=9", "={}"]        # label gold, rewards 1 0 0 1; outcomes 1 0 0 1


def play_with(votes: list[list[str]], *flags: str, gold: str = "1", check=None):
    """A step of which the problems have the gold answer and the solutions are these texts, {} standing for 1."""
    t = random_play("ttrl", "--examples-per-step", str(len(votes)), "--num-votes", str(len(votes[0])),
                    "--num-samples", "2", *flags)
    problem_of = t.task.problem
    t.task.problem = lambda split, index: replace(problem_of(split, index), answer=gold)
    t.task.check = check or (lambda problem, text: t.task.fmt.answer(text) == problem.answer)
    return writing(t, {"votes": [x.format("1") for row in votes for x in row]})


def test_the_metrics_of_a_step_by_hand(base):
    t = play_with([WRONG_MAJORITY, SPLIT_VOTE])
    list(ttrl.play(t))
    found = {name: t.metrics[f"gen/{name}"] for name in ("majority_ratio", "label_accuracy", "reward_accuracy",
                                                         "ground_truth_ratio", "unreadable", "unscorable")}
    # Majority: (3 + 2) / 8. Rewards that are the true ones: none of the first problem's, all of the second's.
    # Right votes: (1 + 2) / 8. Unreadable: one text of 8.
    assert found == {"majority_ratio": 5 / 8, "label_accuracy": 1 / 2, "reward_accuracy": 4 / 8,
                     "ground_truth_ratio": 3 / 8, "unreadable": 1 / 8, "unscorable": 0}


def test_votes_without_an_outcome_are_left_out_and_a_label_is_right_or_wrong_of_its_problem(base):
    unknown = lambda problem, text: None if "9" in text else text == "=1"
    t = play_with([WRONG_MAJORITY, SPLIT_VOTE], check=unknown)
    list(ttrl.play(t))
    # Of the first problem only its third vote has an outcome, right and without reward; its label has none.
    # The second one's are right, wrong and right, and so are its rewards.
    assert t.metrics["gen/label_accuracy"] == 1 and t.metrics["gen/unscorable"] == 4 / 8
    assert t.metrics["gen/reward_accuracy"] == 3 / 4 and t.metrics["gen/ground_truth_ratio"] == 3 / 4
    assert t.metrics["gen/majority_ratio"] == 5 / 8
    t = play_with([["=1", "=1"], ["=9", "=1"], ["=1", "=1"]], check=lambda problem, text: problem.index == 2)
    list(ttrl.play(t))
    assert t.metrics["gen/label_accuracy"] == pytest.approx(1 / 3)  # the last one's, the same text as the first one's


def test_without_a_readable_vote_the_label_is_wrong_and_nothing_is_learned(base):
    t = play_with([["", ""], ["1+1:2;", "+"]])
    update, = ttrl.play(t)
    assert not update.parts[0][1].any()
    names = ("majority_ratio", "label_accuracy", "ground_truth_ratio", "reward")
    assert {t.metrics[f"gen/{name}"] for name in names} == {0} and t.metrics["gen/unreadable"] == 1
    assert t.metrics["gen/reward_accuracy"] == 1  # 0 is what the gold answer would have given


def test_the_majority_is_rewarded_where_it_is_wrong(base):
    """Negative control: with every vote trained on, the right one is pushed down and the wrong ones up."""
    t = play_with([WRONG_MAJORITY], "--num-samples", "4")
    (rollouts, advantages), = next(ttrl.play(t)).parts
    assert rollouts.columns["majority_reward"] == [1, 1, 0, 1] and rollouts.columns["pseudo_label"] == ["9"] * 4
    assert rollouts.columns["outcome"] == [False, False, True, False]
    # Mean .75, unbiased standard deviation sqrt((3 * .25^2 + .75^2) / 3) = .5: .5 and -1.5.
    assert advantages[:, 0].tolist() == pytest.approx([0.5, 0.5, -1.5, 0.5], rel=1e-5)


def test_all_votes_decide_and_the_first_ones_are_trained_on(base):
    """The first two votes alone would have tied in favour of 9."""
    t = play_with([["=9", "={}", "={}", "=8"], ["=9", "={}", "=8", "=8"]])
    (rollouts, advantages), = next(ttrl.play(t)).parts
    assert rollouts.columns["answer"] == ["9", "1", "9", "1"]
    assert rollouts.columns["pseudo_label"] == ["1", "1", "8", "8"]
    # Rewards 0, 1: mean .5, unbiased standard deviation sqrt(.5). The second problem's two earn nothing.
    assert advantages[:, 0].tolist() == pytest.approx([-(0.5 ** 0.5), 0.5 ** 0.5, 0, 0], rel=1e-5)
    assert t.metrics["gen/reward"] == 1 / 4 and t.metrics["gen/num_rollouts"] == 4  # of those that are trained on
    assert t.metrics["gen/frac_reward_zero_std"] == 1 / 2 and t.metrics["gen/majority_ratio"] == 4 / 8


def test_twice_as_many_vote_as_are_trained_on_unless_told_otherwise(base):
    for flags, N in (([], 16), (["--num-votes", "0"], 16), (["--num-votes", "8"], 8), (["--num-votes", "9"], 9)):
        t = random_play("ttrl", *flags)
        votes, trained = ttrl.draws(t.args).values()
        assert votes.num_samples == N and (trained.num_samples, trained.trained, trained.teacher_forced) == (8, 1, 1)
        ttrl.check(t.args, t.task)
    asked, solve = [], t.solve
    t.solve = lambda *args: asked.append(args[::2]) or solve(*args)
    (rollouts, _), = next(ttrl.play(t)).parts
    assert asked == [("votes", 9)] and torch.bincount(rollouts.group_id).tolist() == [8] * 4


def assert_gold_answers_change_nothing(played) -> None:
    """played(change) -> the updates of a step after change(its task). Another gold answer, and a check that finds all
    right, all wrong or nothing scorable, leave what is learned as it is."""
    def gold(task):
        problem_of = task.problem
        task.problem = lambda split, index: replace(problem_of(split, index), answer="77")

    def checked(task, outcome):
        task.check = lambda problem, text: outcome
    learned = []
    for change in (lambda task: None, gold, *(partial(checked, outcome=outcome) for outcome in (True, False, None))):
        learned.append([part for update in played(change) for part in update.parts])
    assert all(advantages.any() for _, advantages in learned[0])  # there is something to learn
    for other in learned[1:]:
        for (one, A), (two, B) in zip(learned[0], other, strict=True):
            assert torch.equal(one.tokens, two.tokens) and torch.equal(A, B)


def test_no_gold_answer_enters_an_update(base):
    """Where no answer is read the text's length is one."""
    def played(change):
        t = random_play("ttrl")
        read = lambda text: None if len(text) % 5 == 0 else str(len(text) % 3)
        t.answers = lambda votes, group: list(map(read, votes.texts))  # of random weights hardly a text ends
        change(t.task)
        return list(ttrl.play(t))
    assert_gold_answers_change_nothing(played)
