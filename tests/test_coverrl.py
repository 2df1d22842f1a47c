"""CoVerRL: which votes are verified, the filter and rewards by hand, a step of one model."""
import zlib
from dataclasses import replace

import pytest
from test_dpo import random_play, writing
from test_ttrl import assert_gold_answers_change_nothing

from nanochat import recipes
from nanochat.recipes.self_play.coverrl import is_kept, to_verify, with_form
from nanochat.rl.play.updates import apply_update
from nanochat.rl.records.prompts import refine_prompt

coverrl = recipes.load("coverrl")


@pytest.mark.parametrize("answers, label, agree, others", [
    (["1", "2", "1", "1", "1"], "1", [0, 2], [1, 1]),               # the first ones for the label, at most 2
    (["1", "2", "2", "1", "1", "3"], "1", [0, 3], [5, 5]),          # the rarest of the others
    (["1", "3", "2", "1"], "1", [0, 3], [1, 1]),                    # a tie among them: the earliest
    (["1", None, "1", "2", "2", "1"], "1", [0, 2], [3, 3]),         # one that can be read, although it is less rare
    (["1", None, "1", None], "1", [0, 2], [1, 1]),                  # none of the others can be read
    (["2", "1", "1", "2"], "2", [0, 3], [1, 1]),                    # a tie in the vote: the label came first
    (["1", "1", "1"], "1", [], []),                                 # all agree
    (["1", "2", "3"], "1", [], []),                                 # one vote for the label: no pair
    ([None, None], None, [], []), ([], None, [], [])])              # an empty vote
def test_both_sides_of_a_vote_are_verified_equally_often(answers, label, agree, others):
    assert to_verify(answers, label, 2) == (agree, others)


def test_fewer_than_asked_for_are_an_even_number():
    """Of 5 votes for the label."""
    for most, num in ((2, 2), (3, 3), (4, 4), (5, 5), (6, 4), (8, 4)):
        agree, others = to_verify(["1", "1", "2", "1", "1", "1"], "1", most)
        assert agree == [0, 1, 3, 4, 5][:num] and others == [2] * num


def test_a_label_stays_if_most_verdicts_are_for_it():
    T, F = True, False
    assert all(map(is_kept, ([], [T, T], [T, T, F], [T, T, None])))  # the first was not verified
    assert not any(map(is_kept, ([T, F], [T, F, F], [F, F], [T, None], [None, None])))  # what is unreadable is against


def test_the_form_and_the_agreement_earn_1_each():
    assert with_form(["2", "1", None], [1.0, 0.0, 0.0]) == [2, 1, 0]
    assert with_form([True, False, None], [False, True, False]) == [1, 2, 0]
    assert with_form([], []) == []


def one_model(*flags: str):
    """A step of random weights that are those of both roles."""
    t = random_play("coverrl", "--verifier-max-new-tokens", "24", *flags)
    t.roles["verifier"].model = t.roles["generator"].model
    return t


def play_with(votes: list[list[str]], verdicts: list[str], *flags: str):
    """A step on these votes, {} standing for the gold answer 1, and these verifications, in the order in which they are
    asked for. -> the step, and its updates"""
    t = one_model("--examples-per-step", str(len(votes)), "--num-votes", str(len(votes[0])), "--num-samples", "2",
                  "--verifications", "2", *flags)
    problem_of = t.task.problem
    t.task.problem = lambda split, index: replace(problem_of(split, index), answer="1")
    t.task.check = lambda problem, text: t.task.fmt.answer(text) == problem.answer
    writing(t, {"votes": [x.format("1") for row in votes for x in row], "reviews": verdicts})
    return t, list(coverrl.play(t))


RIGHT, SPLIT = ["={}", "=9", "={}", "={}"], ["=9", "=9", "={}", "=8"]  # labels 1 and 9
FOR, AGAINST = ["=T", "=T", "=F", "=F"], ["=T", "=F", "=T", "=F"]      # verdicts on the label's side, on the other


def test_a_label_that_is_rejected_takes_its_problems_rollouts_with_it(base):
    t, updates = play_with([RIGHT, SPLIT], [*FOR, *AGAINST])
    (update,) = updates
    (solutions, A), (verifications, B) = update.parts
    assert update.role == "generator" and solutions.texts == ["=1", "=9"] and verifications.texts == FOR
    # Rewards 2 and 1: mean 1.5, unbiased standard deviation sqrt(.5). All verdicts are right, and earn 2.
    assert solutions.columns["reward"] == [2, 1] and verifications.columns["reward"] == [2, 2, 2, 2]
    assert A[:, 0].tolist() == pytest.approx([0.5 ** 0.5, -(0.5 ** 0.5)], rel=1e-5) and not B.any()
    found = {"labels_verified": 1, "kept": 0.5, "label_accuracy": 0.5, "kept_label_accuracy": 1,
             "dropped_label_accuracy": 0, "kept_reward_accuracy": 1}
    assert {name: t.metrics[f"gen/{name}"] for name in found} == found
    # Judged: two right solutions and one wrong one twice, two of 9 (T, F) and the right one twice (8 is later; T, F).
    outcomes, said = [1, 1, 0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 1, 0, 1, 0]
    assert t.metrics["ver/verdict_accuracy"] == sum(a == b for a, b in zip(outcomes, said, strict=True)) / 8
    assert t.metrics["ver/reward_accuracy"] == 4 / 8 and t.metrics["ver/agrees_with_label"] == 6 / 8


def test_verifications_of_one_answer_are_a_group(base):
    """Two solutions with the label's answer, one accepted and one not, are compared with each other."""
    t, updates = play_with([["={}", "1+1:2;={}", "={}", "=9"]], ["=T", "=T", "=F", "", "=T", "=F"],
                           "--verifications", "3")
    verifications, A = updates[0].parts[1]
    assert verifications.texts == ["=T", "=T", "=F", "", "=T", "=F"]
    assert verifications.columns["reward"] == [2, 2, 1, 0, 1, 2]
    # Mean 5/3, deviation sqrt(1/3); mean 1, deviation 1.
    assert A[:, 0].tolist() == pytest.approx([3 ** -0.5, 3 ** -0.5, -2 * 3 ** -0.5, -1, 0, 1], rel=1e-4)


def test_votes_that_cannot_be_verified_keep_their_label_and_without_any_there_is_no_update(base):
    """All agree; none can be read."""
    t, updates = play_with([["=9"] * 4, [""] * 4], [])
    (solutions, A), (verifications, _) = updates[0].parts
    assert solutions.texts == ["=9", "=9", "", ""] and len(verifications) == 0 and not A.any()
    assert t.metrics["gen/kept"] == 1 and t.metrics["gen/labels_verified"] == 0
    assert apply_update(t, updates[0])["skipped"] == 0
    t, updates = play_with([RIGHT, SPLIT], [*AGAINST, "=F", "=F", "=F", "=F"])
    assert updates == [] and t.metrics["gen/kept"] == 0 and t.metrics["gen/kept_label_accuracy"] is None


def test_second_attempts_stand_after_verdicts_against_a_solution(base):
    """Two of the kept problem, both of its wrong solution. The dropped one's have none."""
    t, updates = play_with([RIGHT, SPLIT], [*FOR, *AGAINST], "--refinements", "3")
    second, A = updates[0].parts[1]
    assert len(second) == 2 * 3 and second.group_id.tolist() == [0, 0, 0, 1, 1, 1]
    expected = refine_prompt(t.tokenizer, t.task.fmt, second.problems()[0].prompt, "=9", "=F")
    assert [prompt.ids for prompt in second.prompts] == [expected] * 2
    assert second.columns["pseudo_label"] == ["1"] * 6 and A.shape == second.tokens.shape
    assert all(reward == (answer is not None) + (answer == "1") for reward, answer in
               zip(second.columns["reward"], second.columns["answer"], strict=True))


def test_two_models_learn_each_from_its_own_rollouts(base):
    _, updates = play_with([RIGHT, SPLIT], [*FOR, *FOR], "--verifier-head", "own")
    assert [(update.role, len(update.parts)) for update in updates] == [("generator", 1), ("verifier", 1)]


def by_text(t) -> None:
    """Answers and verdicts of the texts that random weights write: by a hash of each."""
    chosen = lambda text, among: among[zlib.crc32(text.encode()) % len(among)]
    t.answers = lambda votes, group=1: [chosen(text, ["0", "1", "1", None]) for text in votes.texts]
    read = t.read_verifications
    t.read_verifications = lambda rollouts: [replace(v, verdict=chosen(v.text, [True, True, True, False, None]))
                                             for v in read(rollouts)]


def test_no_gold_answer_enters_an_update(base):
    def played(change):
        t = one_model("--refinements", "2", "--verifications", "3", "--examples-per-step", "8")
        by_text(t)
        change(t.task)
        updates = list(coverrl.play(t))
        assert len(updates[0].parts) == 3 and 0 < t.metrics["gen/kept"] < 1
        return updates
    assert_gold_answers_change_nothing(played)
