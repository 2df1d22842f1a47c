"""
Reward sources and class weights against arithmetic by hand: Tango eq. 2, 3, 8, 9.

    python -m pytest tests/test_rewards.py -q
"""
import itertools
import math
import random
from dataclasses import asdict

import pytest
import torch

from nanochat.rl.credit import rewards
from nanochat.rl.credit.rewards import (ClassWeights, VerdictTrust, format_reward, outcome_rewards, step_rewards,
                                        terminal_rewards, verdict_reward)
from nanochat.rl.records.prompts import UNMET

T, F = True, False


# eq. 2

def test_an_outcome_is_one_or_zero_at_the_last_token_and_none_abstains():
    rewards = outcome_rewards([True, False, None], torch.tensor([4, 1, 7]))
    assert rewards.values.tolist() == [[1.0], [0.0], [0.0]]
    assert rewards.token_index.tolist() == [[3], [0], [6]]
    assert rewards.valid.tolist() == [[True], [True], [False]]


def test_a_terminal_reward_of_zero_is_a_reward():
    rewards = terminal_rewards([0.0, 1.8], torch.tensor([2, 3]))
    assert rewards.valid.all() and rewards.values.flatten().tolist() == pytest.approx([0.0, 1.8])
    assert rewards.values.dtype == torch.float32


def test_an_empty_completion_is_rewarded_at_token_zero():
    assert terminal_rewards([1.0], torch.tensor([0])).token_index.tolist() == [[0]]


# eq. 3

def test_a_step_reward_is_plus_or_minus_one_over_the_number_of_steps():
    """4 steps: +-1/4 at tokens 2, 5, 6, 9; one step: -1; judged None: abstains; no steps: abstains."""
    rewards = step_rewards([[2, 5, 6, 9], [3], [1, 2], []], [[True, False, False, True], [False], None, []], "cpu")
    assert rewards.values.tolist() == [[0.25, -0.25, -0.25, 0.25], [-1.0, 0.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4]
    assert rewards.valid.tolist() == [[True] * 4, [True, False, False, False], [False] * 4, [False] * 4]
    assert rewards.token_index[0].tolist() == [2, 5, 6, 9] and rewards.token_index[1, 0] == 3


@pytest.mark.parametrize("K", [1, 2, 3, 10])
def test_the_steps_of_a_solution_are_worth_one_in_all_however_many_they_are(K):
    all_right = step_rewards([list(range(K))], [[True] * K], "cpu")
    all_wrong = step_rewards([list(range(K))], [[False] * K], "cpu")
    assert (all_right.values.sum().item() == pytest.approx(1.0, rel=1e-6)
            and torch.equal(all_wrong.values, -all_right.values))


def test_step_rewards_of_nobody_have_a_shape():
    rewards = step_rewards([[], []], [None, None], "cpu")
    assert (rewards.values.shape == rewards.token_index.shape == rewards.valid.shape == (2, 1)
            and not rewards.valid.any())


@pytest.mark.parametrize("verdicts", [[True], [True, False], [True] * 4])
def test_a_wrong_number_of_step_verdicts_is_an_error(verdicts):
    """One verdict must not be spread over three steps."""
    with pytest.raises((RuntimeError, ValueError)):
        step_rewards([[1, 2, 3]], [verdicts], "cpu")


# eq. 8

def test_the_format_reward_loses_a_quarter_for_each_unmet_criterion():
    assert [format_reward(UNMET[:n]) for n in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_the_format_reward_is_never_negative():
    assert format_reward(UNMET + UNMET) == 0.0


@pytest.mark.parametrize("verdict, outcome, unmet, gamma, expected", [
    (True, True, (), 0.8, 1.8),                                       # 1 + 0.8 * 1
    (False, False, (), 0.8, 1.8),
    (True, False, (), 0.8, 0.8),                                      # 0 + 0.8 * 1
    (False, True, (), 0.8, 0.8),
    (True, True, ("step_count_mismatch",), 0.8, 1.6),                 # 1 + 0.8 * 0.75
    (None, True, ("no_final_verdict",), 0.8, 0.6),                    # 0 + 0.8 * 0.75: no verdict agrees with nothing
    (None, False, ("no_final_verdict",), 0.8, 0.6),
    (None, False, UNMET, 0.8, 0.0),
    (False, False, UNMET[:2], 0.5, 1.25),                             # 1 + 0.5 * 0.5
    (True, True, UNMET[:2], 0.0, 1.0),
])
def test_the_verdict_reward_is_agreement_plus_gamma_times_format(verdict, outcome, unmet, gamma, expected):
    assert verdict_reward(verdict, outcome, unmet, gamma) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("verdict", [True, False, None])
def test_a_solution_without_an_outcome_gives_its_verifications_no_reward(verdict):
    """None, never 0: also a missing verdict does not agree with a missing outcome."""
    assert verdict_reward(verdict, None, (), 0.8) is None


# eq. 9

def test_balanced_classes_weigh_one():
    weights = ClassWeights()
    weights.observe(8, 8)  # sqrt(16 / (2 * 8)) = 1
    assert weights.weight(True) == weights.weight(False) == 1.0


def test_class_weights_by_hand():
    """2 right and 18 wrong of 20: sqrt(20 / 4) = sqrt(5) = 2.236068 and sqrt(20 / 36) = 0.745356."""
    weights = ClassWeights()
    weights.observe(2, 18)
    assert (weights.weight(True) == pytest.approx(2.236068, rel=1e-6)
            and weights.weight(False) == pytest.approx(0.745356, rel=1e-6))


def test_a_rare_class_weighs_at_most_the_cap():
    """1 right and 99 wrong: sqrt(100 / 2) = 7.07, capped at 4; 1 and 31: sqrt(32 / 2) = 4, just the cap; a class never
    met: the cap."""
    for right, wrong in ((1, 99), (1, 31), (0, 16)):
        weights = ClassWeights()
        weights.observe(right, wrong)
        assert weights.weight(True) == 4.0
    assert weights.weight(False) == pytest.approx(0.5 ** 0.5, rel=1e-12)  # 16 of 16: sqrt(16 / 32)
    weights = ClassWeights(cap=2.0)
    weights.observe(99, 1)
    assert weights.weight(False) == 2.0


def test_the_counts_are_moving_averages_with_decay_four_fifths():
    """(2, 18), then (10, 10): right 0.8 * 2 + 0.2 * 10 = 3.6, wrong 0.8 * 18 + 0.2 * 10 = 16.4; then (0, 0): 2.88 and
    13.12."""
    weights = ClassWeights()
    weights.observe(2, 18)
    assert (weights.right, weights.wrong) == (2, 18)  # the first batch sets them
    weights.observe(10, 10)
    assert (weights.right, weights.wrong) == pytest.approx((3.6, 16.4), rel=1e-12)
    assert weights.weight(True) == pytest.approx((20 / 7.2) ** 0.5, rel=1e-12)
    weights.observe(0, 0)
    assert (weights.right, weights.wrong) == pytest.approx((2.88, 13.12), rel=1e-12)
    assert weights.weight(True) == pytest.approx((20 / 7.2) ** 0.5, rel=1e-12)  # the same shares


def test_a_first_batch_without_one_class_is_averaged_away():
    """(0, 10), then (10, 0): right 0.8 * 0 + 0.2 * 10 = 2, wrong 0.8 * 10 = 8: sqrt(10 / 4) and sqrt(10 / 16)."""
    weights = ClassWeights()
    weights.observe(0, 10)
    weights.observe(10, 0)
    assert (weights.weight(True) == pytest.approx(2.5 ** 0.5, rel=1e-12)
            and weights.weight(False) == pytest.approx(0.625 ** 0.5, rel=1e-12))


def test_the_weights_even_out_what_the_classes_contribute_less_than_fully():
    """eq. 9 takes the root: n_c * s_c^2 is the same for both classes, n_c * s_c is not."""
    weights = ClassWeights()
    weights.observe(4, 12)
    assert 4 * weights.weight(True) ** 2 == pytest.approx(12 * weights.weight(False) ** 2, rel=1e-12)


# How far verdicts can be believed

def by_enumeration(trust: VerdictTrust, verdicts: list[bool], outcome: bool | None) -> list[float]:
    """P(step right | verdicts, outcome), summed over all ways in which the steps can be right or wrong."""
    total, right = 0.0, [0.0] * len(verdicts)
    for state in itertools.product((True, False), repeat=len(verdicts)):
        chance = math.prod((p if is_right else 1 - p) for is_right, p in zip(
            state, [trust.right_if_right if v else trust.right_if_wrong for v in verdicts], strict=True))
        seen = 1.0 if all(state) else trust.luck
        chance *= 1.0 if outcome is None else seen if outcome else 1 - seen
        total += chance
        right = [r + chance * is_right for r, is_right in zip(right, state, strict=True)]
    return [r / total for r in right]


@pytest.mark.parametrize("verdicts", [[T], [F], [T, F, T], [F, F, F, T], [T] * 6])
@pytest.mark.parametrize("outcome", [T, F, None])
def test_chances_are_those_of_bayes(verdicts, outcome):
    trust = VerdictTrust(0.8, 0.3, 0.2)
    assert trust.chances(verdicts, outcome) == pytest.approx(by_enumeration(trust, verdicts, outcome), rel=1e-12)


def test_a_wrong_answer_whose_only_step_passed_was_wrong_there():
    assert VerdictTrust().chances([T], F) == [0.0] and VerdictTrust(luck=0.0).chances([F], T) == [1.0]
    assert VerdictTrust().chances([], F) == []


def test_trust_is_estimated_from_outcomes_alone():
    """Verdicts and outcomes are drawn with known chances; the estimates come near them, and one batch changes them as
    expectation maximisation by hand says."""
    rng, trust, num = random.Random(0), VerdictTrust(decay=1.0), 40
    for _ in range(num):
        verdicts, outcomes = [], []
        for _ in range(100):
            right = [rng.random() < 0.7 for _ in range(rng.randint(1, 6))]
            verdicts.append([rng.random() < (0.8 if r else 0.1) for r in right])
            outcomes.append(all(right) or rng.random() < 0.15)
        trust.observe(verdicts, outcomes)
    assert trust.right_if_right == pytest.approx(0.7 * 0.8 / (0.7 * 0.8 + 0.3 * 0.1), abs=0.05)
    assert trust.right_if_wrong == pytest.approx(0.7 * 0.2 / (0.7 * 0.2 + 0.3 * 0.9), abs=0.08)
    assert trust.luck == pytest.approx(0.15, abs=0.05)


def test_one_batch_of_trust_by_hand(monkeypatch):
    """Two solutions of one step, both judged right: with the right answer its chance is .9 / (.9 + .1 * .1), with a
    wrong one 0. What is believed before counts along. Unknown outcomes and verdicts say nothing."""
    monkeypatch.setattr(rewards, "EM_ROUNDS", 1)
    trust = VerdictTrust()
    trust.observe([[T], [T], [T], None, []], [T, F, None, T, T])
    passed = 0.9 / 0.91
    assert trust.sums == pytest.approx([passed, 2, 0, 0, 0.01 / 0.91, 0.01 / 0.91 + 1])
    assert trust.right_if_right == pytest.approx((passed + 9) / 12) and trust.right_if_wrong == 0.4
    assert trust.luck == pytest.approx((0.01 / 0.91 + 30) / (0.01 / 0.91 + 301))
    again = VerdictTrust(**asdict(trust))
    again.observe([[F]], [F])
    assert again.sums[:4] == pytest.approx([0.9 * passed, 1.8, 0, 1])


def test_rounds_of_trust_go_on_from_the_same_past(monkeypatch):
    """Two rounds on a batch count it once: the second replaces what the first had made of it."""
    batch = [[T, T], [F, T], [T]], [T, F, F]
    monkeypatch.setattr(rewards, "EM_ROUNDS", 1)
    first = VerdictTrust()
    first.observe(*batch)
    second = VerdictTrust(first.right_if_right, first.right_if_wrong, first.luck)
    second.observe(*batch)
    monkeypatch.setattr(rewards, "EM_ROUNDS", 2)
    both = VerdictTrust()
    both.observe(*batch)
    assert asdict(both) == asdict(second) != asdict(first) and both.sums[1] == 4


def test_trust_is_of_all_ranks():
    alone, shared = VerdictTrust(), VerdictTrust()
    alone.observe([[T, F], [T, F]], [F, F])
    shared.observe([[T, F]], [F], lambda x: 2 * x)  # another rank has just the same
    assert asdict(shared) == asdict(alone)


def test_chances_between_right_and_wrong_are_rewards_between():
    rewards = step_rewards([[1, 4], [2]], [[0.75, 0.0], [True]], "cpu")
    assert rewards.values.tolist() == [[0.25, -0.5], [1.0, 0.0]] and rewards.valid.tolist() == [[T, T], [T, F]]
