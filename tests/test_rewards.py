"""Reward sources and class weights by hand: Tango eq. 2, 3, 8, 9."""
import itertools
import math
from dataclasses import asdict

import pytest
import torch

from nanochat.rl.credit import rewards
from nanochat.rl.credit.rewards import (ClassWeights, VerdictTrust, format_reward, step_rewards,
                                        terminal_rewards, verdict_reward)
from nanochat.rl.records.prompts import UNMET

T, F = True, False


def test_rewards_by_hand():
    """An empty completion is rewarded at token 0."""
    rewards = terminal_rewards([True, False, None], torch.tensor([4, 1, 7]))
    assert rewards.values.tolist() == [[1.0], [0.0], [0.0]] and rewards.values.dtype == torch.float32
    assert rewards.token_index.tolist() == [[3], [0], [6]] and rewards.valid.tolist() == [[True], [True], [False]]
    rewards = terminal_rewards([0.0, 1.8], torch.tensor([0, 3]))
    assert rewards.valid.all() and rewards.values.flatten().tolist() == pytest.approx([0.0, 1.8])
    assert rewards.token_index.tolist() == [[0], [2]]
    # None and no steps abstain. A chance between right and wrong is a reward between.
    rewards = step_rewards([[2, 5, 6, 9], [3], [1, 2], []], [[True, False, False, True], [False], None, []], "cpu")
    assert rewards.values.tolist() == [[0.25, -0.25, -0.25, 0.25], [-1.0, 0.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4]
    assert rewards.valid.tolist() == [[True] * 4, [True, False, False, False], [False] * 4, [False] * 4]
    assert rewards.token_index[0].tolist() == [2, 5, 6, 9] and rewards.token_index[1, 0] == 3
    rewards = step_rewards([[1, 4], [2]], [[0.75, 0.0], [True]], "cpu")
    assert rewards.values.tolist() == [[0.25, -0.5], [1.0, 0.0]] and rewards.valid.tolist() == [[T, T], [T, F]]
    for verdicts in ([True], [True, False], [True] * 4):  # one verdict must not be spread over three steps
        with pytest.raises((RuntimeError, ValueError)):
            step_rewards([[1, 2, 3]], [verdicts], "cpu")
    nobody = step_rewards([[], []], [None, None], "cpu")
    assert nobody.values.shape == nobody.token_index.shape == (2, 1) and not nobody.valid.any()
    assert [format_reward(UNMET[:n]) for n in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
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
    (True, True, UNMET[:2], 0.0, 1.0)])
def test_the_verdict_reward_is_agreement_plus_gamma_times_format(verdict, outcome, unmet, gamma, expected):
    assert verdict_reward(verdict, outcome, unmet, gamma) == pytest.approx(expected, rel=1e-12)
    assert verdict_reward(verdict, None, unmet, gamma) is None  # never 0, also without a verdict


@pytest.mark.parametrize("batches, of_right, of_wrong", [
    ([(8, 8)], 1.0, 1.0),                            # sqrt(16 / (2 * 8))
    ([(2, 18)], 5 ** 0.5, (5 / 9) ** 0.5),           # sqrt(20 / 4), sqrt(20 / 36)
    ([(1, 99)], 4.0, (100 / 198) ** 0.5),            # sqrt(100 / 2) = 7.07: at most 4
    ([(1, 31)], 4.0, (32 / 62) ** 0.5),              # sqrt(32 / 2): just the cap
    ([(0, 16)], 4.0, 0.5 ** 0.5),                    # a class never met
    ([(0, 10), (10, 0)], 2.5 ** 0.5, 0.625 ** 0.5)])  # 0.8 * 0 + 0.2 * 10 = 2 and 0.8 * 10 = 8
def test_class_weights_by_hand(batches, of_right, of_wrong):
    weights, turned, low = ClassWeights(), ClassWeights(), ClassWeights(cap=2.0)
    for right, wrong in batches:
        weights.observe(right, wrong)
        turned.observe(wrong, right)
        low.observe(right, wrong)
    assert (weights.weight(True), weights.weight(False)) == pytest.approx((of_right, of_wrong), rel=1e-12)
    assert (turned.weight(False), turned.weight(True)) == pytest.approx((of_right, of_wrong), rel=1e-12)
    assert low.weight(True) == pytest.approx(min(2.0, of_right))


def test_the_counts_are_moving_averages_with_decay_four_fifths():
    """(2, 18), then (10, 10): right 0.8 * 2 + 0.2 * 10 = 3.6, wrong 0.8 * 18 + 0.2 * 10; then (0, 0)."""
    weights = ClassWeights()
    for batch, counts in (((2, 18), (2, 18)), ((10, 10), (3.6, 16.4)), ((0, 0), (2.88, 13.12))):
        weights.observe(*batch)
        assert (weights.right, weights.wrong) == pytest.approx(counts, rel=1e-12)  # the first batch sets them
    assert weights.weight(True) == pytest.approx((20 / 7.2) ** 0.5, rel=1e-12)


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


def test_trust_by_hand_in_rounds_and_on_ranks(monkeypatch):
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
    # Two rounds on a batch count it once: the second replaces what the first had made of it.
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
    alone, shared = VerdictTrust(), VerdictTrust()
    alone.observe([[T, F], [T, F]], [F, F])
    shared.observe([[T, F]], [F], lambda x: 2 * x)  # another rank has just the same
    assert asdict(shared) == asdict(alone)
    assert VerdictTrust().chances([T], F) == [0.0] and VerdictTrust(luck=0.0).chances([F], T) == [1.0]
    assert VerdictTrust().chances([], F) == []
