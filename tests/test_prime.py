"""
PRIME: its formulas by hand, the PRM's update against autograd of the paper's loss, and short runs.

    python -m pytest tests/test_prime.py -q
"""
import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import TASK_FLAGS
from torch.nn.functional import binary_cross_entropy

from nanochat.common import BadInput
from nanochat.gpt import GPT, GPTConfig
from nanochat.recipes.policy import prime
from nanochat.rl.credit.advantages import PRESETS, source_advantages, to_go, whiten
from nanochat.rl.credit.rewards import keep_groups, outcome_rewards
from nanochat.rl.learn.packing import pack, token_weights
from nanochat.rl.learn.roles import Role
from nanochat.rl.learn.trainer import update
from nanochat.rl.measure.scores import judgments, pair_wins, step_sums
from nanochat.rl.play.play import Play
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts
from scripts import tango_rl

FLAGS = [*TASK_FLAGS, "--recipe", "prime", "--device-type", "cpu", "--model-tag", "tiny", "--max-new-tokens", "28",
         "--examples-per-step", "4", "--num-samples", "4", "--eval-examples", "4", "--lr", "1e-3", "--num-steps", "2",
         "--save-every", "1"]


def rollouts_of(lengths, outcomes, num_prompts=1, seed=0):
    """Random rollouts: `num_prompts` groups of equal size, a prompt of three tokens each."""
    draw = torch.Generator().manual_seed(seed)
    N, T = len(lengths), max(lengths, default=4)
    prompts = [Prompt(torch.randint(265, (3,), generator=draw).tolist()) for _ in range(num_prompts)]
    tokens, group_id = torch.randint(265, (N, T), generator=draw), torch.arange(num_prompts)
    return Rollouts(prompts, group_id.repeat_interleave(N // max(1, num_prompts)), tokens, torch.zeros(N, T),
                    torch.tensor(lengths, dtype=torch.long), torch.ones(N, dtype=torch.bool),
                    columns={"outcome": outcomes})


def play_of(**flags):
    """A Play without models, enough for formulas that log and go over ranks."""
    flags = {"prm_beta": 0.5, "process_norm": "batch", "process_baseline": "paper"} | flags
    return Play(SimpleNamespace(**flags), None, None, {"generator": None}, {}, {}, None, None)


def close(a, b):
    torch.testing.assert_close(a, torch.tensor(b), rtol=1e-5, atol=1e-5)


# Process rewards: three rollouts with the means 2, 4 and 1

REWARDS = torch.tensor([[1.0, 3.0, 0.0], [4.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
GROUP = torch.zeros(3, dtype=torch.long)


def test_the_papers_baseline_is_the_mean_of_the_others_mean_rewards():
    # (4 + 1) / 2 = 2.5, (2 + 1) / 2 = 1.5, (2 + 4) / 2 = 3
    expected = [[1 - 2.5, 3 - 2.5, 0.0], [4 - 1.5, 0.0, 0.0], [0.0 - 3, 0.0 - 3, 3.0 - 3]]
    close(prime.process_rloo(REWARDS, MASK, GROUP, "paper"), expected)


def test_the_codes_baseline_is_r_k_over_k_minus_1_less_the_sum_of_means_over_k_minus_1():
    # r * 3/2 - (2 + 4 + 1) / 2: 1.5 - 3.5, 4.5 - 3.5; 6 - 3.5; 0 - 3.5, 0 - 3.5, 4.5 - 3.5
    expected = [[-2.0, 1.0, 0.0], [2.5, 0.0, 0.0], [-3.5, -3.5, 1.0]]
    close(prime.process_rloo(REWARDS, MASK, GROUP, "code"), expected)


def test_baselines_stay_within_groups_and_a_group_of_one_gets_nothing():
    group_id = torch.tensor([0, 0, 1])
    for baseline in ("paper", "code"):
        both = prime.process_rloo(REWARDS, MASK, group_id, baseline)
        assert torch.equal(both[:2], prime.process_rloo(REWARDS[:2], MASK[:2], group_id[:2], baseline))
        assert (both[2] == 0).all()


def test_forced_tokens_are_no_part_of_a_mean_and_get_no_reward():
    rewards, mask = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0]]), torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()
    # the first one's mean is (1 + 3) / 2 = 2
    close(prime.process_rloo(rewards, mask, GROUP[:2], "paper"), [[1.0, 0.0, 3.0], [-2.0, -2.0, -2.0]])


def test_a_return_is_the_sum_of_the_rewards_from_its_token_on():
    close(to_go(torch.tensor([[1.0, -2.0, 4.0]])), [[3.0, 2.0, 4.0]])


def test_the_largest_return_is_taken_over_all_ranks():
    seen = []

    def other_rank(tensor, op):
        seen.append(op)
        return torch.maximum(tensor, torch.tensor(7.0))

    rewards = torch.tensor([[1.0, -9.0], [2.0, 2.0]])  # returns -8, -9 and 4, 2
    assert prime.largest_return(rewards, lambda tensor, op: tensor) == 9
    assert prime.largest_return(rewards[1:], other_rank) == 7 and prime.largest_return(rewards[:0], other_rank) == 7
    assert seen == ["max", "max"]


# The advantage

Q = torch.tensor([[2.0, -1.0], [1.0, 0.0]])


@pytest.mark.parametrize("baseline, expected", [
    # beta q = 1, -.5 | .5; returns .5, -.5 | .5; over .5: 2, -1 | 1 with the means .5 | 1.
    # Less the other's mean: 1, -2 | .5; returns -1, -2 | .5; outcomes add 1, 1 | -1: 0, -1 | -.5, mean -.5, std .5.
    ("paper", [[1.0, -1.0], [0.0, 0.0]]),
    # Plus (r - own mean) / 1: 2.5, -3.5 | .5; returns -1, -3.5 | .5; outcomes: 0, -2.5 | -.5, mean -1, variance 1.75.
    ("code", [[1 / math.sqrt(1.75), -1.5 / math.sqrt(1.75)], [0.5 / math.sqrt(1.75), 0.0]])])
def test_the_advantage_is_the_sum_of_both_returns_whitened(baseline, expected):
    t = play_of(process_baseline=baseline)
    close(prime.advantages_of(t, rollouts_of([2, 1], [True, False]), Q), expected)
    assert t.metrics["gen/largest_process_return"] == 0.5


def test_without_the_norm_process_rewards_count_as_they_are():
    # 1, -.5 | .5 with the means .25 | .5: .5, -1 | .25; returns -.5, -1 | .25; outcomes add 1, 1 | -1: .5, 0 | -.75
    raw = torch.tensor([[0.5, 0.0], [-0.75, 0.0]])
    expected = whiten(raw, torch.tensor([[1, 1], [1, 0]]).bool())
    advantages = prime.advantages_of(play_of(process_norm="none"), rollouts_of([2, 1], [True, False]), Q)
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("baseline", ["paper", "code"])
@pytest.mark.parametrize("norm", ["batch", "none"])
def test_a_prm_that_equals_its_reference_leaves_rloo_on_outcomes(baseline, norm):
    outcomes = [True, False, False, True, True, False]
    rollouts = rollouts_of([3, 5, 2, 1, 4, 5], outcomes, num_prompts=2)
    rloo = source_advantages(outcome_rewards(outcomes, rollouts.lengths), rollouts.group_id, 5, PRESETS["rloo"])
    advantages = prime.advantages_of(play_of(process_baseline=baseline, process_norm=norm), rollouts, torch.zeros(6, 5))
    assert torch.equal(advantages, whiten(rloo, rollouts.mask)) and advantages.any()


def test_a_rank_without_rollouts_has_empty_advantages():
    nothing = rollouts_of([], [], num_prompts=0)
    assert prime.advantages_of(play_of(), nothing, torch.zeros(0, 4)).shape == (0, 4)
    assert prime.prm_coefficients(torch.zeros(0, 4), [], nothing.mask, 0.05).shape == (0, 4)


# Who takes part

def test_problems_that_are_too_easy_too_hard_or_not_scorable_are_left_out():
    groups = {0: [True] * 5, 1: [True] * 4 + [False], 2: [True] + [False] * 4, 3: [False] * 5,  # 1, .8, .2, 0
              4: [None] * 5, 5: [True, False, None, None, None]}
    outcomes, group_id = [o for known in groups.values() for o in known], [g for g in groups for _ in range(5)]
    assert keep_groups(outcomes, group_id, 0.2, 0.8) == [*range(5, 15), 25, 26]
    assert keep_groups(outcomes, group_id, 0.0, 1.0) == [*range(20), 25, 26]
    assert keep_groups(outcomes, group_id, 0.3, 0.7) == [25, 26]


# The PRM

def test_the_coefficient_is_beta_times_outcome_less_probability():
    q, mask = torch.tensor([[0.0, 0.0], [30.0, 10.0], [30.0, 10.0]]), torch.tensor([[1, 1], [1, 0], [1, 1]]).bool()
    # sigma(0) = .5; sigma(.05 * 40) = 1 / (1 + e^-2) = .880797
    expected = [[0.025, 0.025], [0.05 * (1 - 0.880797), 0.0], [-0.05 * 0.880797] * 2]
    close(prime.prm_coefficients(q, [True, True, False], mask, 0.05), expected)


def random_model(seed: int) -> GPT:
    """In float64, every parameter random."""
    model = GPT(GPTConfig(64, 265, 2, 2, 1, 32, "L"), torch.float64).double()
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        scale = p.shape[1] ** -0.5 if p.dim() == 2 else 0.5
        p.data = scale * torch.randn(p.shape, generator=draw, dtype=torch.float64)
    return model


def token_logprobs(model, rollouts, n):
    """Of one rollout, by a plain forward over prompt and completion."""
    prompt, completion = rollouts.prompts[int(rollouts.group_id[n])].ids, rollouts.completions()[n]
    logits = model.head(model.trunk(torch.tensor([prompt + completion]))[0, len(prompt) - 1: -1])
    return torch.log_softmax(logits.double(), dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_the_prms_update_is_the_gradient_of_its_cross_entropy():
    beta, outcomes = 0.3, [True, False, True, True]
    rollouts, prm, reference = rollouts_of([5, 2, 4, 3], outcomes, num_prompts=2), random_model(0), random_model(1)
    q = [token_logprobs(prm, rollouts, n) - token_logprobs(reference, rollouts, n).detach() for n in range(4)]
    probabilities = torch.stack([torch.sigmoid(beta * values.sum()) for values in q])
    loss = binary_cross_entropy(probabilities, torch.tensor(outcomes, dtype=torch.float64))
    parameters = list(prm.parameters())
    expected = torch.autograd.grad(loss, parameters)
    padded = torch.nn.utils.rnn.pad_sequence([values.detach() for values in q], batch_first=True)  # (N, T)
    wanted = prime.prm_update(rollouts, padded, beta)
    weights = token_weights(rollouts.lengths, wanted.aggregation, 5, lambda x: x)
    batches = pack(*wanted.parts[0], weights, 20, keep_idle=False)
    before = [p.detach().clone() for p in parameters]
    update(Role("prm", prm, parameters, torch.optim.SGD(parameters, lr=1.0)), batches, wanted.loss, lr=1.0,
           max_grad_norm=0.0, temperature=1.0, device=torch.device("cpu"))
    scale = max(float(g.abs().max()) for g in expected)
    assert scale > 1e-3
    for old, new, gradient in zip(before, parameters, expected, strict=True):
        assert (old - new - gradient).abs().max() < 1e-5 * scale


# How well it judges

def test_pairs_are_of_right_and_wrong_rollouts_of_one_problem():
    # problem 0: right 2, wrong 1 and 3; problem 1: right 5, wrong 5; problem 2: two right ones make no pair
    outcomes, scores = [True, False, False, False, True, True, True], [2.0, 1.0, 3.0, 5.0, 5.0, 0.0, 1.0]
    assert pair_wins(outcomes, scores, [0, 0, 0, 1, 1, 2, 2]) == [1.0, 0.0, 0.5]


def test_a_rollout_is_judged_right_when_its_log_odds_are_positive():
    q = torch.tensor([[50.0, -10.0], [-50.0, 10.0], [0.0, 0.0], [30.0, 10.0]])  # beta sum q = 2, -2, 0, 2
    judged = judgments(0.05 * q, [True, False, True, False], [0, 0, 0, 0])
    # -log sigma(2) = .126928 for a right one and, of -2, for a wrong one; log 2; -log sigma(-2) = 2.126928
    assert judged["bce"] == pytest.approx([0.126928, 0.126928, math.log(2), 2.126928], rel=1e-5)
    assert judged["accuracy"] == [True, True, False, False]  # .5 is not above .5
    assert judged["pair_accuracy"] == [1.0, 0.5, 1.0, 0.0]   # 40 against -40 and 40; 0 against -40 and 40


def test_a_steps_score_is_the_sum_over_its_tokens():
    q = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert step_sums([True, False], [1, 3], q) == [[True, 3.0], [False, 12.0]]  # the last token is of no step
    assert step_sums([], [1, 3], q) == []  # nobody labelled them


# Runs

def run(*flags):
    flags = [*FLAGS, *flags]
    tango_rl.main(tango_rl.make_parser(flags).parse_args(flags))


def records(base, name):
    with open(base / "runs" / name / "metrics.jsonl") as f:
        return [json.loads(line) for line in f]


def model(base, folder, step):
    return torch.load(base / folder / f"model_{step:06d}.pt", weights_only=True)


def moved(a, b):
    return any(not torch.equal(a[name], b[name]) for name in a)


def test_the_prm_scores_before_it_learns_and_both_roles_move(base):
    run("--run", "r", "--prm-update", "after", "--accuracy-filter", "0", "1")
    run("--run", "frozen", "--prm-update", "none", "--accuracy-filter", "0", "1", "--num-steps", "1")
    first, second = records(base, "r")
    assert first["role"] == second["role"] == "generator+prm"
    # At first the PRM is its reference: q is 0, beta q is no process reward, sigma(0) = .5 says "wrong" of everything.
    assert first["gen/largest_process_return"] == 0 and first["prm/bce"] == pytest.approx(math.log(2))
    assert first["prm/accuracy"] == pytest.approx(1 - first["gen/reward"])
    assert {first["prm/pair_accuracy"], first["prm/step_auc"]} <= {0.5, None}
    assert second["gen/largest_process_return"] > 0 and second["prm/bce"] != first["prm/bce"]
    assert first["gen/filtered"] == first["gen/unscorable"] == 0 and first["prm/rollout_logprobs_diff_max"] is None
    sft = model(base, "chatsft_checkpoints/tiny", 200)
    gen, prm = (model(base, f"chatrl_checkpoints/r-{role}", 2) for role in ("gen", "prm"))
    assert moved(sft, gen) and moved(sft, prm) and moved(gen, prm)
    # So the first update of the generator is that of outcomes alone.
    assert not moved(model(base, "chatrl_checkpoints/r-gen", 1), model(base, "chatrl_checkpoints/frozen-gen", 1))
    assert not moved(sft, model(base, "chatrl_checkpoints/frozen-prm", 1))


def test_the_prm_can_learn_before_it_scores_and_then_be_frozen(base):
    run("--run", "r", "--prm-update", "before", "--prm-freeze-after", "1", "--accuracy-filter", "0", "1")
    first, second = records(base, "r")
    assert (first["role"], second["role"]) == ("prm+generator", "generator")
    assert first["prm/bce"] == pytest.approx(math.log(2)) and first["prm/rescored/bce"] != first["prm/bce"]
    assert first["gen/largest_process_return"] > 0 and second["gen/largest_process_return"] > 0
    assert "prm/rescored/bce" not in second
    assert not moved(*(model(base, "chatrl_checkpoints/r-prm", step) for step in (1, 2)))


def test_a_step_whose_problems_are_all_left_out_moves_nobody(base):
    run("--run", "r", "--accuracy-filter", "0.51", "0.52", "--num-steps", "1")  # no share of four rollouts
    record, = records(base, "r")
    assert record["gen/filtered"] == 1 and record["without_update"] == 1 and "gen/grad_norm" not in record
    sft = model(base, "chatsft_checkpoints/tiny", 200)
    assert not any(moved(sft, model(base, f"chatrl_checkpoints/r-{role}", 1)) for role in ("gen", "prm"))


@pytest.mark.parametrize("flags, complaint", [
    (["--prm-update", "never"], "--prm-update never: there are before, after, none"),
    (["--process-baseline", "mean"], "--process-baseline mean: there are"),
    (["--process-norm", "max"], "--process-norm max: there are"),
    (["--accuracy-filter", "0.8", "0.2"], "--accuracy-filter 0.8 0.2"),
    (["--accuracy-filter", "20", "80"], "--accuracy-filter 20.0 80.0"),
    (["--prm-beta", "0"], "--prm-beta 0.0: must be above 0"),
    (["--prm-lr", "-1"], "--prm-lr -1.0: must be at least 0"),
    (["--advantage", "grpo"], "--advantage grpo"),
    (["--updates-per-batch", "2"], "--updates-per-batch 2")])
def test_settings_that_cannot_work_are_refused(base, flags, complaint):
    with pytest.raises(BadInput, match=complaint):
        run(*flags)
