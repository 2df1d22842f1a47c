"""
TTRL: votes, rewards and logged metrics by hand, what is trained on, gold answers that change nothing, flags.

    python -m pytest tests/test_ttrl.py -q
"""
from dataclasses import replace

import pytest
import torch
from conftest import on_two_ranks
from test_dpo import parsed, random_play, records, weights_of

from nanochat import recipes
from nanochat.common import BadInput
from nanochat.recipes.self_play.ttrl import majority_rewards, pseudo_labels
from nanochat.rl.play.updates import apply_update
from nanochat.rl.records.rollouts import Rollouts
from scripts import tango_rl
from tasks import make_task

ttrl = recipes.load("ttrl")


# By hand

@pytest.mark.parametrize("answers, label, rewards", [
    (["2", "1", "2", "0"], "2", [1, 0, 1, 0]),
    (["1", "2", "2", "1"], "1", [1, 0, 0, 1]),          # a tie: the first to come
    (["2", "1", "1", "2"], "2", [1, 0, 0, 1]),
    (["0", "1", "2", "3"], "0", [1, 0, 0, 0]),          # all apart: a tie of one each
    ([None, None, None, "1"], "1", [0, 0, 0, 1]),       # what cannot be read has no vote, however much of it there is
    ([None, "2", None, "2"], "2", [0, 1, 0, 1]),
    ([None, None, None, None], None, [0, 0, 0, 0]),     # no label: nothing agrees with nothing
    (["1", "1", "1", "1"], "1", [1, 1, 1, 1])])
def test_a_vote_earns_1_for_the_majority_answer(answers, label, rewards):
    assert pseudo_labels(answers, 4) == [label]
    assert majority_rewards(answers, [label]) == rewards


def test_each_problem_has_its_own_label():
    # As one list, "1" would have 3 votes of 6.
    answers = ["1", "2", "2", "1", "1", None]
    assert pseudo_labels(answers, 3) == ["2", "1"]
    assert majority_rewards(answers, ["2", "1"]) == [0, 1, 1, 1, 1, 0]
    assert pseudo_labels([], 3) == [] and majority_rewards([], []) == []


# A step

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
    t.solve = lambda draw, problems, num: written(t, problems, [x.format("1") for row in votes for x in row])
    return t


def written(t, problems, texts: list[str]) -> Rollouts:
    """Solutions as sampling gives them: a group for each problem, in its order."""
    prompts = [prompt for prompt in t.solve_prompts(problems) for _ in range(len(texts) // len(problems))]
    return t.written("generator", prompts, texts).with_prompts(prompts)


def test_the_metrics_of_a_step_by_hand(base):
    t = play_with([WRONG_MAJORITY, SPLIT_VOTE])
    list(ttrl.play(t))
    found = {name: t.metrics[f"gen/{name}"] for name in ("majority_ratio", "label_accuracy", "reward_accuracy",
                                                         "ground_truth_ratio", "unreadable", "unscorable")}
    # Majority: (3 + 2) / 8. Rewards that are the true ones: none of the first problem's, all of the second's.
    # Right votes: (1 + 2) / 8. Unreadable: one text of 8.
    assert found == {"majority_ratio": 5 / 8, "label_accuracy": 1 / 2, "reward_accuracy": 4 / 8,
                     "ground_truth_ratio": 3 / 8, "unreadable": 1 / 8, "unscorable": 0}


def test_a_wrong_vote_that_differs_from_a_wrong_label_has_the_right_reward(base):
    """The paper's "Lucky Hit" (figure 9): the label is wrong, and 3 of 6 rewards are right."""
    t = play_with([["=9", "=9", "=8", "=7", "=6", "={}"]])
    list(ttrl.play(t))
    assert t.metrics["gen/label_accuracy"] == 0
    assert t.metrics["gen/reward_accuracy"] == pytest.approx(3 / 6)  # 8, 7 and 6 earn 0; 9 twice 1, and 1 nothing


def test_the_label_of_a_problem_is_right_or_wrong_there(base):
    t = play_with([["=1", "=1"], ["=9", "=1"], ["=1", "=1"]], check=lambda problem, text: problem.index == 2)
    list(ttrl.play(t))
    assert t.metrics["gen/label_accuracy"] == pytest.approx(1 / 3)  # the last one's, the same text as the first one's


def test_votes_without_an_outcome_are_left_out_of_what_the_gold_answer_says(base):
    unknown = lambda problem, text: None if "9" in text else text == "=1"
    t = play_with([WRONG_MAJORITY, SPLIT_VOTE], check=unknown)
    list(ttrl.play(t))
    # Of the first problem only its third vote has an outcome, right and without reward; its label has none.
    # The second one's are right, wrong and right, and so are its rewards.
    assert t.metrics["gen/label_accuracy"] == 1 and t.metrics["gen/unscorable"] == 4 / 8
    assert t.metrics["gen/reward_accuracy"] == 3 / 4 and t.metrics["gen/ground_truth_ratio"] == 3 / 4
    assert t.metrics["gen/majority_ratio"] == 5 / 8


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
    assert rollouts.texts == ["=9", "=1", "=9", "=1"] and rollouts.columns["pseudo_label"] == ["1", "1", "8", "8"]
    # Rewards 0, 1: mean .5, unbiased standard deviation sqrt(.5). The second problem's two earn nothing.
    assert advantages[:, 0].tolist() == pytest.approx([-(0.5 ** 0.5), 0.5 ** 0.5, 0, 0], rel=1e-5)
    assert t.metrics["gen/reward"] == 1 / 4 and t.metrics["gen/num_rollouts"] == 4  # of those that are trained on
    assert t.metrics["gen/frac_reward_zero_std"] == 1 / 2 and t.metrics["gen/majority_ratio"] == 4 / 8


# Sampling

def sampled(*flags: str, step: int = 0):
    """The rollouts that a step trains on, sampled from a random model."""
    t = random_play("ttrl", *flags)
    t.state.step = step
    (rollouts, advantages), = next(ttrl.play(t)).parts
    return rollouts, advantages


def test_twice_as_many_vote_as_are_trained_on_unless_told_otherwise(base):
    for flags, N in (([], 16), (["--num-votes", "0"], 16), (["--num-votes", "8"], 8), (["--num-votes", "9"], 9)):
        t, drawn = random_play("ttrl", *flags), []
        t.check = lambda rollouts, drawn=drawn: drawn.append(len(rollouts)) or [None] * len(rollouts)
        (rollouts, _), = next(ttrl.play(t)).parts
        assert drawn == [4 * N] and torch.bincount(rollouts.group_id).tolist() == [8] * 4
        votes, trained = ttrl.draws(t.args).values()
        assert votes.num_samples == N and (trained.num_samples, trained.trained, trained.teacher_forced) == (8, True, True)


def test_what_is_trained_on_follows_from_the_seed_and_the_step(base):
    """More votes leave it as it is, so the first votes are these."""
    rollouts, advantages = sampled()
    again, same_advantages = sampled()
    assert again.texts == rollouts.texts and torch.equal(same_advantages, advantages)
    assert sampled("--num-votes", "24")[0].texts == rollouts.texts
    assert sampled(step=1)[0].texts != rollouts.texts != sampled("--seed", "1")[0].texts


def moved_by_a_step(gold=None, check=None) -> dict[str, torch.Tensor]:
    """The generator after a step on random models' solutions; where no answer is read, the text's length is one."""
    t = random_play("ttrl")
    t.task.read_answer = lambda text: None if len(text) % 5 == 0 else str(len(text) % 3)
    problem_of = t.task.problem
    if gold:
        t.task.problem = lambda split, index: replace(problem_of(split, index), answer=gold)
    t.task.check = check or t.task.check
    before = weights_of(t.roles["generator"].model)
    update, = ttrl.play(t)
    assert update.parts[0][1].any()  # there is something to learn
    assert apply_update(t, update)["skipped"] == 0
    after = weights_of(t.roles["generator"].model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return after


def assert_gold_answers_change_nothing(moved_by_a_step) -> None:
    """Another gold answer, and a check that finds all right, all wrong or nothing scorable, give the same weights."""
    plain = moved_by_a_step()
    others = [moved_by_a_step(gold="77"), *(moved_by_a_step(check=lambda problem, text, outcome=outcome: outcome)
                                            for outcome in (True, False, None))]
    for other in others:
        assert all(torch.equal(other[name], plain[name]) for name in plain)


def test_no_gold_answer_enters_an_update(base):
    assert_gold_answers_change_nothing(moved_by_a_step)


# Ranks

def play_share(folder: str) -> None:
    """One step on this rank's problems."""
    t = random_play("ttrl")
    t.task.read_answer = lambda text: None if len(text) % 5 == 0 else str(len(text) % 3)
    update, = ttrl.play(t)
    (rollouts, advantages), = update.parts
    rows = {f"{problem.index}": [] for problem in rollouts.problems()}
    for problem, text, label, advantage in zip(rollouts.problems(), rollouts.texts, rollouts.columns["pseudo_label"],
                                               advantages[:, 0].tolist(), strict=True):
        rows[f"{problem.index}"].append([text, label, advantage])
    torch.save({"rows": rows, "metrics": t.metrics}, f"{folder}/rank{t.run.rank}of{t.run.world}.pt")


def test_two_ranks_vote_as_one_does(base, tmp_path):
    play_share(str(tmp_path))
    on_two_ranks(play_share, str(tmp_path))
    one, first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True)
                          for name in ("rank0of1", "rank0of2", "rank1of2"))
    assert len(first["rows"]) == len(second["rows"]) == 2 and first["rows"] | second["rows"] == one["rows"]
    assert any(advantage for rows in one["rows"].values() for _, _, advantage in rows)
    for found in (first, second):
        assert found["metrics"] == pytest.approx(one["metrics"], rel=1e-9)


# A run

@pytest.mark.parametrize("flags", [["--num-votes", "3"], ["--num-votes", "-1"],
                                   ["--num-votes", "1", "--num-samples", "1", "--advantage", "reinforce"]])
def test_settings_that_cannot_work_are_refused_in_one_line(flags):
    args = parsed("ttrl", *flags)
    with pytest.raises(BadInput, match=f"^--num-votes {flags[1]}: must be at least 2[^\n]*$"):
        ttrl.check(args, make_task(args))


def test_as_many_votes_as_are_trained_on_are_allowed():
    for flags in (["--num-votes", "4"], ["--num-votes", "0"], []):
        args = parsed("ttrl", *flags)
        ttrl.check(args, make_task(args))


def test_a_run_logs_its_votes_and_what_they_earned(base):
    tango_rl.main(parsed("ttrl", "--run", "r", "--num-votes", "6"))
    names = {"majority_ratio", "label_accuracy", "reward_accuracy", "ground_truth_ratio", "unreadable", "unscorable"}
    log = records(base, "metrics.jsonl")
    assert len(log) == 4
    for record in log:
        assert {f"gen/{name}" for name in names} | {"gen/reward"} <= record.keys()
        assert record["gen/num_rollouts"] == 4 * 4 and record["gen/skipped"] == 0
        assert record["gen/rollout_logprobs_diff_max"] < 1e-4
    assert 0 < log[0]["gen/majority_ratio"] < 1  # of the start
    rollouts, read = records(base, "rollouts.jsonl"), make_task(parsed("ttrl")).fmt.answer
    assert len(rollouts) == 4 * 2 * 4
    for rollout in rollouts:
        assert rollout["answer"] == read(rollout["solution"])
        assert rollout["majority_reward"] == (rollout["answer"] == rollout["pseudo_label"] is not None)
