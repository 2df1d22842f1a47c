"""Scores of generators and verifiers by hand and by enumeration; which solutions a verifier step judges."""
import random
from itertools import combinations
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanochat.common import BadInput
from nanochat.recipes.tango._pool import choose_solutions
from nanochat.rl.credit.rewards import terminal_rewards, step_rewards
from nanochat.rl.measure.evals import are_right
from nanochat.rl.measure.observe import log_rewards, log_variances, passed_by_error
from nanochat.rl.measure.scores import (balanced_accuracy, first_error, first_error_f1, macro_f1, majority, pass_at_k,
                                        ranking_reversed, verdict_scores)
from nanochat.rl.records.prompts import Verification

T, F = True, False
SETTINGS = settings(max_examples=100, deadline=None)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            choices = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(any(choice) for choice in choices) / len(choices),
                                                       rel=1e-12, abs=1e-12), (n, c, k)
    with pytest.raises(ZeroDivisionError):
        pass_at_k(n, 1, n + 1)


@pytest.mark.parametrize("answers, vote", [
    (["6", "8", "6"], "6"), (["8", "6", "6"], "6"),
    (["8", "6", "6", "8"], "8"), (["6", "8", "8", "6"], "6"),  # ties go to the earliest
    ([None, None, "6"], "6"), (["8", None, None], "8"),        # what could not be read does not vote
    ([None, None], None), ([], None),
    (["", "", "6"], ""),                                       # an empty answer is an answer
])
def test_the_majority_of_the_readable_answers(answers, vote):
    assert majority(answers) == vote


LABELS = [T, T, T, F, F, F, F, F]


@pytest.mark.parametrize("labels, verdicts, f1, accuracy", [
    # True: 2 hits, 3 actual, 3 said: F1 = 4/6. False: 4 hits, 5 actual, 5 said: 8/10. Mean (2/3 + 4/5) / 2 = 11/15.
    (LABELS, [T, T, F, T, F, F, F, F], 11 / 15, (2 / 3 + 4 / 5) / 2),
    # With two verdicts missing, which are wrong. True: 1 hit, 3 actual, 2 said: 2/5. False: 3 hits, 5 actual, 4 said.
    (LABELS, [T, None, F, T, None, F, F, F], 8 / 15, (1 / 3 + 3 / 5) / 2),
    (LABELS, LABELS, 1.0, 1.0), (LABELS, [not l for l in LABELS], 0.0, 0.0), (LABELS, [None] * 8, 0.0, 0.0),
    (LABELS, [T] * 8, 3 / 11, 0.5), (LABELS, [F] * 8, 5 / 13, 0.5),  # a constant judge: 6/11 or 10/13, and 0
    # A class that nobody has does not count, and has no accuracy. Then True: 2/3; False: said once, never right: 0.
    ([T, T], [T, T], 1.0, None), ([F], [F], 1.0, None), ([], [], None, None), ([T, T], [T, F], 1 / 3, None),
    ([T, T], [T, None], 2 / 3, None)])
def test_macro_f1_and_balanced_accuracy_by_hand(labels, verdicts, f1, accuracy):
    for score, expected in ((macro_f1, f1), (balanced_accuracy, accuracy)):
        assert score(labels, verdicts) == (expected if expected is None else pytest.approx(expected, rel=1e-12))
        with pytest.raises(ValueError):  # there is a verdict for each label
            score([*LABELS, T], LABELS)


RIGHT, WRONG_AT_1 = [T, T, T], [T, F, T]


@pytest.mark.parametrize("labels, verdicts, score", [
    # Two right solutions, one passed: 1/2. Three erroneous ones, two found: 2/3.
    # Harmonic mean 2 * 1/2 * 2/3 / (7/6) = 4/7.
    ([RIGHT, RIGHT, WRONG_AT_1, WRONG_AT_1, [F]], [RIGHT, [T, T, F], [T, F, F], [T, T, F], [F]], 4 / 7),
    ([RIGHT, WRONG_AT_1], [RIGHT, WRONG_AT_1], 1.0),
    ([RIGHT, WRONG_AT_1], [RIGHT, [F, F, T]], 0.0),      # too early an error is not found
    ([RIGHT, WRONG_AT_1], [RIGHT, RIGHT], 0.0),          # always "no error": 1 and 0
    ([RIGHT, WRONG_AT_1], [[F] * 3, [F] * 3], 0.0),      # always "at once": 0 and 0
    ([RIGHT, WRONG_AT_1], [RIGHT, [None] * 3], 0.0),     # a missing verdict counts as wrong
    ([RIGHT, WRONG_AT_1], [[None] * 3, WRONG_AT_1], 0.0), ([RIGHT, WRONG_AT_1], [[T, None, T], WRONG_AT_1], 0.0),
    ([RIGHT, RIGHT], [RIGHT, RIGHT], None), ([WRONG_AT_1], [WRONG_AT_1], None), ([], [], None)])
def test_first_errors_and_their_f1_by_hand(labels, verdicts, score):
    assert [first_error(row) for row in ([T, F, F], [F], [T, T], [], [None, F])] == [1, 0, -1, -1, 1]
    assert first_error_f1(labels, verdicts) == (score if score is None else pytest.approx(score, rel=1e-12))


def test_verdict_scores_by_hand():
    """Rows: outcome, gold step labels, final verdict, step verdicts, unmet criteria."""
    rows = [
        [T, [T, T], T, [T, T], []],
        [T, [T, T], F, [T, F], []],
        [F, [T, F], F, [T, F], []],
        [F, [F, F], None, [], ["missing_tags", "step_count_mismatch", "no_final_verdict"]],
        # no outcome: counts for its steps alone; verdicts of steps that are none fall away
        [None, [T], T, [F, F, F], ["step_count_mismatch"]],
    ]
    scores = verdict_scores(rows)
    # Final verdicts T F F - against T T F F. True: 1 hit, 2 actual, 1 said: 2/3. False: 1 hit, 2 actual, 2 said: 1/2.
    assert scores["outcome_f1"] == pytest.approx((2 / 3 + 1 / 2) / 2, rel=1e-12)
    assert scores["balanced_acc"] == pytest.approx((1 / 2 + 1 / 2) / 2, rel=1e-12)
    # Step labels T T | T T | T F | F F | T, verdicts T T | T F | T F | - - | F. True: 4 hits, 6 actual, 4 said: 8/10.
    # False: 1 hit, 3 actual, 3 said: 2/6.
    assert scores["step_f1"] == pytest.approx((8 / 10 + 1 / 3) / 2, rel=1e-12)
    # Of the 3 wrong steps one is judged wrong and two are not judged; of the 6 right ones two are judged wrong.
    assert scores["wrong_steps_passed"] == 0.0 and scores["right_steps_blamed"] == pytest.approx(2 / 6)
    # Right ones are rows 1, 2, 5: one of three is passed. Erroneous ones are rows 3, 4: one of two is found.
    # 2 * 1/3 * 1/2 / (5/6) = 2/5.
    assert scores["first_error_f1"] == pytest.approx(2 / 5, rel=1e-12)
    assert scores["parse_fail"] == pytest.approx(2 / 5) and scores["step_count_mismatch"] == pytest.approx(2 / 5)
    assert scores["pred_pos_rate"] == pytest.approx(1 / 4) and scores["label_pos_rate"] == pytest.approx(2 / 4)
    # Wrong solutions are rows 3 and 4, none is judged right. Mean step verdicts and outcomes (1, 1), (1/2, 1), (1/2,
    # 0): r = 1/2 (row 4 has no verdicts).
    assert scores["pos_rate_wrong"] == 0.0 and scores["step_outcome_corr"] == pytest.approx(1 / 2)
    scores = verdict_scores([[F, [F, F, F, F, T], F, [T, F, None, T, F], []], [T, [T], T, [T], []]])
    assert scores["wrong_steps_passed"] == 2 / 4 and scores["right_steps_blamed"] == 1 / 2
    right, wrong = verdict_scores([[T, [T], T, [T], []]]), verdict_scores([[F, [F], F, [F], []]])
    assert right["wrong_steps_passed"] is wrong["right_steps_blamed"] is right["pos_rate_wrong"] is None
    rows = [[F, [F], verdict, [F], []] for verdict in (T, T, F, None)] + [[T, [T], T, [T], []]]
    assert verdict_scores(rows)["pos_rate_wrong"] == 1 / 2
    unknown = verdict_scores([[None, [T], T, [T], []]])  # says nothing of outcomes
    assert unknown["balanced_acc"] is None and unknown["step_f1"] == 1.0
    rows = [[T, [T], T, [T], []], [F, [F], F, [F], []]]  # step verdicts of the wrong number say nothing of correlation
    for more in ([], [[F, [F, F], F, [T], ["step_count_mismatch"]]]):
        assert verdict_scores([*rows, *more])["step_outcome_corr"] == pytest.approx(1.0)
    assert verdict_scores(rows[:1])["step_outcome_corr"] is None
    # As those of gsm8k: they change no score of steps, and have their correlation all the same.
    labelled = [[T, [T, T], T, [T, T], []], [F, [T, F], F, [F, F], []]]  # the first error of the second is missed
    unlabelled = [[T, [], T, [T, T, T], []], [F, [], F, [F], []], [F, [], T, [T, F], []]]
    both, alone = verdict_scores(labelled + unlabelled), verdict_scores(labelled)
    assert both["first_error_f1"] == alone["first_error_f1"] == 0.0 and both["step_f1"] == alone["step_f1"]
    assert both["pos_rate_wrong"] == pytest.approx(1 / 3)
    only = verdict_scores(unlabelled)
    assert only["first_error_f1"] is None and only["step_f1"] is None
    # Mean step verdicts and outcomes (1, 1), (0, 0), (1/2, 0): covariance 1/6, spreads sqrt(1/6) and sqrt(2/9)
    assert only["step_outcome_corr"] == pytest.approx((1 / 6) / ((1 / 6) ** 0.5 * (2 / 9) ** 0.5))


def test_a_ranking_is_reversed_where_a_wrong_rollout_is_above_a_right_one():
    outcomes = [T, F, F] + [T, T, F] + [T, T, T] + [T, F, None]
    advantages = [0.2, -1.0, 0.3] + [0.5, 0.1, 0.1] + [0.0, 1.0, 2.0] + [0.0, -0.5, 9.0]
    # the third group has no wrong one and is not counted
    assert ranking_reversed(outcomes, advantages, 3) == [True, False, False]


def entries(outcomes: list[bool], first: int = 0) -> list[tuple]:
    return [(first + i, outcome) for i, outcome in enumerate(outcomes)]


def choose(fresh, pool, num, replay=0.0, balance=False, rng=None):
    outcomes = ([outcome for _, outcome in part] for part in (fresh, pool))
    return [(fresh + pool)[place] for place in choose_solutions(*outcomes, num, replay, balance,
                                                                rng or random.Random(0))]


def num_right(chosen) -> int:
    return sum(outcome for _, outcome in chosen)


def test_replay_takes_its_share_from_the_pool_and_balance_prefers_fresh_solutions():
    """replay 0.25 of 8: 2 past, 6 fresh. Which ones is chance that the seed decides; a short pool is filled up."""
    fresh, pool, rng = entries([F] * 8), entries([T] * 20, first=100), random.Random(0)
    before = rng.getstate()
    assert choose(fresh, pool, 4, rng=rng) == fresh[:4] and rng.getstate() == before  # plain Tango: no chance in it
    chosen, again, other = (choose(fresh, pool, 8, 0.25, rng=random.Random(seed)) for seed in (0, 0, 1))
    assert chosen[:6] == fresh[:6] and all(entry in pool for entry in chosen[6:])
    assert len({entry[0] for entry in chosen}) == 8 and chosen == again != other
    assert choose(fresh, pool[:1], 8, replay=0.5) == fresh[:7] + pool[:1] and choose(fresh, [], 8, 0.5) == fresh
    # Without replay the pool lends only what fresh ones lack.
    fresh, pool = entries([T, T, F, F]), entries([T, F] * 10, first=100)
    assert choose(fresh, pool, 4, balance=True) == fresh
    assert [entry[1] for entry in choose(entries([T, F] * 5), [], 5, balance=True)] == [T, F, T, F, F]  # an odd number
    lacking = choose(entries([T, F, F, F]), pool, 4, balance=True)
    assert sum(entry[0] >= 100 for entry in lacking) == 1 and num_right(lacking) == 2
    for seed in range(20):  # 6 fresh ones come first, T F T F T F, and leave room for one past one of each kind
        chosen = choose(entries([T, F] * 4), pool, 8, 0.25, True, random.Random(seed))
        assert num_right(chosen) == 4 and sum(entry[0] >= 100 for entry in chosen) == 2


@pytest.mark.parametrize("fresh, pool, right, wrong", [
    ([T, F, F, F, F, T], [], 2, 2),             # fresh ones have both
    ([F, F, F, F], [T, T, F], 2, 2),            # the pool lends the class that is missing
    ([T, T, T, T], [F], 3, 1),                  # as far as it has it
    ([F, F, F, F], [], 0, 4),                   # nobody has it: the others take the places
    ([T, T, T, T], [T], 4, 0),
    ([T], [F], 1, 1), ([], [T, F, T, F, T], 2, 2), ([], [], 0, 0)])
@pytest.mark.parametrize("replay", [0.0, 0.5])
def test_balance_makes_half_right_and_half_wrong_as_far_as_there_are(fresh, pool, right, wrong, replay):
    chosen = choose(entries(fresh), entries(pool, first=100), 4, replay, balance=True)
    assert (num_right(chosen), len(chosen) - num_right(chosen)) == (right, wrong)


@SETTINGS
@given(fresh=st.lists(st.booleans(), max_size=8), pool=st.lists(st.booleans(), max_size=8), num=st.integers(0, 8),
       replay=st.sampled_from([0.0, 0.25, 0.5, 1.0]), seed=st.integers(0, 3))
def test_balance_takes_as_many_as_there_are_none_twice_and_as_even_as_can_be(fresh, pool, num, replay, seed):
    chosen = choose(entries(fresh), entries(pool, first=100), num, replay, True, random.Random(seed))
    all_there = fresh + pool
    assert len(chosen) == min(num, len(all_there)) == len({entry[0] for entry in chosen})
    assert num_right(chosen) >= min(num // 2, sum(all_there))
    assert len(chosen) - num_right(chosen) >= min(num - num // 2, all_there.count(False))


def test_steps_that_pass_are_counted_by_kind_of_error():
    """A wrong result that passes, a slip that does not and a right step; a slip that is not judged."""
    kinds = {"a": ["result", "slip", None], "b": ["slip"]}
    task = SimpleNamespace(step_errors=lambda problem, text: kinds[text])
    play = SimpleNamespace(task=task, gather=lambda rows: rows)
    solutions = SimpleNamespace(problems=lambda: [None, None], texts=["a", "b"])
    said = [Verification([True, False, True, True], True, ()), Verification([], None, ())]
    assert passed_by_error(play, solutions, said) == {
        "errors/result": 1 / 4, "errors/slip": 2 / 4, "passed/result": 1.0, "passed/slip": 0.0}
    play.task = SimpleNamespace()
    assert passed_by_error(play, solutions, said) == {}


def test_what_cannot_be_scored_counts_as_wrong_and_is_told(capsys):
    assert are_right([True, None, False, None], "test_out") == [True, False, False, False]
    assert "WARNING: 2 of 4 solutions of test_out cannot be scored and count as wrong" in capsys.readouterr().out
    assert are_right([True, False], "test_in") == [True, False] and capsys.readouterr().out == ""


def logging(logged: dict) -> SimpleNamespace:
    return SimpleNamespace(device="cpu", reduce=lambda x: x, log=lambda role, values: logged.update(values),
                           mean=lambda values: values)


def test_rewards_are_logged_by_group_with_the_variance_of_each_source_and_none_may_be_nan():
    """Group 7: 1, 0, 0, 0: variance (9/16 + 3/16) / 3 = 1/4; group 5 earns 1 and 1 of the outcome, and .2 and .6 of
    its steps: (.2^2 + .2^2) / 1 = .08. Of some True and False are left, of group 1 one: nothing varies."""
    found: dict = {}
    steps = step_rewards([[1, 2]] * 6, [[0.5, 0.5]] * 4 + [[0.6, 0.6], [0.8, 0.8]], "cpu")  # (2p - 1) / 2 each
    for group_id, sources in (
            ([7, 7, 7, 7, 5, 5],
             {"outcome": terminal_rewards([T, F, F, F, T, T], torch.full((6,), 9)), "steps": steps}),
            ([0, 0, 0, 1, 1], {"some": terminal_rewards([T, None, F, T, None], torch.full((5,), 9))})):
        log_variances(logging(found), "generator", SimpleNamespace(group_id=torch.tensor(group_id)), sources)
    assert [found[f"variance/{name}"] for name in ("outcome", "some")] == [[0.25, 0.0], [0.5, 0.0]]
    assert found["variance/steps"] == pytest.approx([0.0, 0.08]) and found["zero_variance/steps"] == [T, F]
    assert found["zero_variance/outcome"] == found["zero_variance/some"] == [F, T]
    # Groups 1, 0 and 1, 1 and one that cannot be told: spread .5 and 0; the last two say nothing.
    logged: dict = {}
    t = logging(logged)
    rollouts = SimpleNamespace(columns={}, group_id=torch.tensor([4, 4, 2, 2, 3]), lengths=torch.arange(5),
                               stopped=torch.tensor([True] * 4 + [False]))
    log_rewards(t, "generator", rollouts, [1, False, 1.0, True, None])
    assert rollouts.columns["reward"] == [1.0, 0.0, 1.0, 1.0, None] and logged["num_rollouts"] == 5
    assert logged["reward_std"] == [0.5, 0.0] and logged["frac_reward_zero_std"] == [False, True, True]
    assert logged["completions/clipped_ratio"] == [False] * 4 + [True]
    # A difference that float32 does not hold gives no advantage, so no signal.
    log_rewards(t, "generator", rollouts, [torch.tensor(1e8), 1e8 + 1, 1.0, numpy.False_, None])
    assert logged["frac_reward_zero_std"] == [True, False, True]


@pytest.mark.parametrize("reward, words", [
    (float("nan"), "nan"), (float("inf"), "inf"), (1e38, "1e+38"), (-10 ** 400, "a number of 1329 bits"),
    ("1", "a str"), (1j, "a complex"), (torch.zeros(2), "a Tensor")])
def test_what_is_no_reward_is_refused_where_it_is_used_and_where_it_is_logged(reward, words):
    for use, whose in ((lambda rewards: terminal_rewards(rewards, torch.ones(2)), ""),
                       (lambda rewards: log_rewards(None, "generator", None, rewards), " of the generator")):
        with pytest.raises(BadInput) as error:
            use([None, reward])
        assert str(error.value) == (f"a reward{whose} is {words}: it must be a number from -1e+15 to 1e+15, or None "
                                    f"where it cannot be told")
