"""PRIME: its formulas by hand, the PRM's update against autograd of the paper's loss, which role learns when."""
import math
from types import SimpleNamespace

import pytest
import torch
from test_dpo import assert_learns, random_play, token_logprobs
from torch.nn.functional import binary_cross_entropy

from nanochat.recipes.policy import prime
from nanochat.rl.credit.advantages import PRESETS, source_advantages, whiten
from nanochat.rl.credit.rewards import keep_groups, terminal_rewards
from nanochat.rl.measure.scores import judgments, pair_wins, step_sums
from nanochat.rl.play.play import Play
from nanochat.rl.play.updates import apply_update
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts


def rollouts_of(lengths, outcomes):
    """A group of rollouts of these lengths."""
    N, T = len(lengths), max(lengths, default=4)
    return Rollouts([Prompt([1, 2])] * min(N, 1), torch.zeros(N, dtype=torch.long), torch.ones(N, T, dtype=torch.long),
                    torch.zeros(N, T), torch.tensor(lengths, dtype=torch.long), torch.ones(N, dtype=torch.bool),
                    columns={"outcome": outcomes})


def play_of(**flags):
    """A Play without models, enough for formulas that log and go over ranks."""
    flags = {"prm_beta": 0.5, "process_norm": "batch"} | flags
    return Play(SimpleNamespace(**flags), None, None, {"generator": None}, {}, {}, None, None)


def close(a, b):
    torch.testing.assert_close(a, torch.tensor(b), rtol=1e-5, atol=1e-5)


REWARDS = torch.tensor([[1.0, 3.0, 0.0], [4.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
GROUP = torch.zeros(3, dtype=torch.long)


def test_baselines_by_hand():
    """The mean of the others' mean rewards."""
    # (4 + 1) / 2 = 2.5, (2 + 1) / 2 = 1.5, (2 + 4) / 2 = 3
    close(prime.process_rloo(REWARDS, MASK, GROUP),
          [[1 - 2.5, 3 - 2.5, 0.0], [4 - 1.5, 0.0, 0.0], [0.0 - 3, 0.0 - 3, 3.0 - 3]])
    both = prime.process_rloo(REWARDS, MASK, torch.tensor([0, 0, 1]))  # within groups, and one alone gets nothing
    assert torch.equal(both[:2], prime.process_rloo(REWARDS[:2], MASK[:2], GROUP[:2])) and (both[2] == 0).all()
    # Forced tokens are no part of a mean, (1 + 3) / 2 = 2, and get no reward
    rewards, mask = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0]]), torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()
    close(prime.process_rloo(rewards, mask, GROUP[:2]), [[1.0, 0.0, 3.0], [-2.0, -2.0, -2.0]])


def test_the_largest_return_is_taken_over_all_ranks():
    def other_rank(tensor, op):
        assert op == "max"
        return torch.maximum(tensor, torch.tensor(7.0))
    rewards = torch.tensor([[1.0, -9.0], [2.0, 2.0]])  # returns -8, -9 and 4, 2
    assert [prime.largest_return(rewards[rows], other_rank) for rows in ([0, 1], [1], [])] == [9, 7, 7]


Q = torch.tensor([[2.0, -1.0], [1.0, 0.0]])


def test_the_advantage_is_the_sum_of_both_returns_whitened():
    # beta q = 1, -.5 | .5; returns .5, -.5 | .5; over .5: 2, -1 | 1 with the means .5 | 1.
    # Less the other's mean: 1, -2 | .5; returns -1, -2 | .5; outcomes add 1, 1 | -1: 0, -1 | -.5, mean -.5, std .5.
    t = play_of()
    close(prime.advantages_of(t, rollouts_of([2, 1], [True, False]), Q), [[1.0, -1.0], [0.0, 0.0]])
    assert t.metrics["gen/largest_process_return"] == 0.5


def test_without_the_norm_process_rewards_count_as_they_are_and_without_rollouts_nothing_does():
    # 1, -.5 | .5 with the means .25 | .5: .5, -1 | .25; returns -.5, -1 | .25; outcomes add 1, 1 | -1: .5, 0 | -.75
    raw = torch.tensor([[0.5, 0.0], [-0.75, 0.0]])
    expected = whiten(raw, torch.tensor([[1, 1], [1, 0]]).bool())
    advantages = prime.advantages_of(play_of(process_norm="none"), rollouts_of([2, 1], [True, False]), Q)
    torch.testing.assert_close(advantages, expected)
    nothing = rollouts_of([], [])
    assert prime.advantages_of(play_of(), nothing, torch.zeros(0, 4)).shape == (0, 4)
    assert prime.prm_coefficients(torch.zeros(0, 4), [], nothing.mask, 0.05).shape == (0, 4)


def test_problems_that_are_too_easy_too_hard_or_not_scorable_are_left_out():
    groups = {0: [True] * 5, 1: [True] * 4 + [False], 2: [True] + [False] * 4, 3: [False] * 5,  # 1, .8, .2, 0
              4: [None] * 5, 5: [True, False, None, None, None]}
    outcomes, group_id = [o for known in groups.values() for o in known], [g for g in groups for _ in range(5)]
    assert keep_groups(outcomes, group_id, 0.2, 0.8) == [*range(5, 15), 25, 26]
    assert keep_groups(outcomes, group_id, 0.0, 1.0) == [*range(20), 25, 26]
    assert keep_groups(outcomes, group_id, 0.3, 0.7) == [25, 26]


def test_by_default_every_problem_with_right_and_wrong_solutions_is_trained_on(base):
    """Of 8 solutions 0, 1, 7 and 8 are right. Of two that can be scored one is."""
    t = random_play("prime", "--examples-per-step", "5")
    right = [*[False] * 8, True, *[False] * 7, *[True] * 7, False, *[True] * 8, True, False, *[None] * 6]
    outcomes = iter(right)
    t.task.check = lambda problem, text: next(outcomes)
    policy, _ = prime.play(t)
    rollouts = policy.parts[0][0]
    assert rollouts.columns["outcome"] == right[8:24] + [True, False] and t.metrics["gen/filtered"] == 2 / 5
    assert t.args.prm_lr == 3e-5 and t.args.process_norm == "none"


def test_the_coefficient_is_beta_times_outcome_less_probability():
    q, mask = torch.tensor([[0.0, 0.0], [30.0, 10.0], [30.0, 10.0]]), torch.tensor([[1, 1], [1, 0], [1, 1]]).bool()
    # sigma(0) = .5; sigma(.05 * 40) = 1 / (1 + e^-2) = .880797
    expected = [[0.025, 0.025], [0.05 * (1 - 0.880797), 0.0], [-0.05 * 0.880797] * 2]
    close(prime.prm_coefficients(q, [True, True, False], mask, 0.05), expected)


def step(*flags: str):
    return random_play("prime", "--accuracy-filter", "0", "1", "--prm-beta", "0.3", *flags)


def process_values(t, rollouts) -> list[torch.Tensor]:
    """q of each token: log pi of the PRM less that of its reference."""
    rows = (token_logprobs(model, rollouts) for model in (t.roles["prm"].model, t.roles["prm"].reference))
    return [now - start.detach() for now, start in zip(*rows, strict=True)]


def advantages_by_hand(t, rollouts) -> torch.Tensor:
    q = torch.nn.utils.rnn.pad_sequence([row.detach() for row in process_values(t, rollouts)], batch_first=True)
    return prime.advantages_of(t, rollouts, q.float())


def test_the_policy_learns_from_the_process_rewards_and_then_the_prm_by_the_gradient_of_its_cross_entropy(base):
    t = step()
    policy, prm = prime.play(t)
    (rollouts, advantages), = policy.parts
    torch.testing.assert_close(advantages, advantages_by_hand(t, rollouts), rtol=1e-3, atol=1e-3)
    probabilities = torch.stack([torch.sigmoid(0.3 * row.sum().double()) for row in process_values(t, rollouts)])
    outcomes = torch.tensor([float(o) for o in rollouts.columns["outcome"]], dtype=torch.float64)
    assert 0 < outcomes.mean() < 1 and prm.parts[0][0].sampler_logprobs.isnan().all()
    loss = binary_cross_entropy(probabilities, outcomes)
    assert t.metrics["prm/bce"] == pytest.approx(loss.item(), rel=1e-4)
    assert_learns(t, prm, loss)


def test_a_prm_that_equals_its_reference_leaves_rloo_on_outcomes(base):
    t = step("--prm-update", "none")
    t.roles["prm"].reference = t.roles["prm"].model
    policy, = prime.play(t)
    (rollouts, advantages), = policy.parts
    outcomes = rollouts.columns["outcome"]
    rloo = source_advantages(terminal_rewards(outcomes, rollouts.lengths), rollouts.group_id, rollouts.mask,
                             PRESETS["rloo"])
    assert torch.equal(advantages, whiten(rloo, rollouts.mask)) and advantages.any()
    assert t.metrics["gen/largest_process_return"] == 0 and t.metrics["prm/bce"] == pytest.approx(math.log(2))
    assert t.metrics["prm/accuracy"] == pytest.approx(outcomes.count(False) / len(outcomes))  # .5 says "wrong" of all


def test_the_prm_can_learn_before_it_scores_and_then_be_frozen(base):
    t, found = step("--prm-update", "before", "--prm-freeze-after", "1"), []
    for update in prime.play(t):
        found.append(update)
        apply_update(t, update)
    assert [update.role for update in found] == ["prm", "generator"] and t.totals["prm"] == 1
    rollouts, advantages = found[1].parts[0]
    torch.testing.assert_close(advantages, advantages_by_hand(t, rollouts), rtol=1e-3, atol=1e-3)
    assert t.metrics["prm/rescored/bce"] < t.metrics["prm/bce"]
    t.state.step, t.done, t.metrics = 1, set(), {}
    assert [update.role for update in prime.play(t)] == ["generator"] and "prm/rescored/bce" not in t.metrics


def test_a_step_whose_problems_are_all_left_out_moves_nobody(base):
    t = step("--accuracy-filter", "0.501", "0.502")
    assert list(prime.play(t)) == [] and t.metrics["gen/filtered"] == 1


def test_how_well_log_odds_judge_rollouts_pairs_and_steps():
    # problem 0: right 2, wrong 1 and 3; problem 1: right 5, wrong 5; problem 2: two right ones make no pair
    outcomes, scores = [True, False, False, False, True, True, True], [2.0, 1.0, 3.0, 5.0, 5.0, 0.0, 1.0]
    assert pair_wins(outcomes, scores, [0, 0, 0, 1, 1, 2, 2]) == [1.0, 0.0, 0.5]
    q = torch.tensor([[50.0, -10.0], [-50.0, 10.0], [0.0, 0.0], [30.0, 10.0]])  # beta sum q = 2, -2, 0, 2
    judged = judgments(0.05 * q, [True, False, True, False], [0, 0, 0, 0])
    # -log sigma(2) = .126928 for a right one and, of -2, for a wrong one; log 2; -log sigma(-2) = 2.126928
    assert judged["bce"] == pytest.approx([0.126928, 0.126928, math.log(2), 2.126928], rel=1e-5)
    assert judged["accuracy"] == [True, True, False, False]  # .5 is not above .5
    assert judged["pair_accuracy"] == [1.0, 0.5, 1.0, 0.0]   # 40 against -40 and 40; 0 against -40 and 40
    assert step_sums([True, False], [1, 3], [1.0, 2.0, 4.0, 8.0, 16.0]) == [[True, 3.0], [False, 12.0]]
    assert step_sums([], [1, 3], [1.0, 2.0, 4.0, 8.0, 16.0]) == []  # nobody labelled them
