"""Refit: when the verifier learns and from what, its update against autograd, what the policy is rewarded with."""
import pytest
import torch
from test_dpo import assert_learns, random_play, verdict_odds
from torch.nn.functional import binary_cross_entropy_with_logits

from nanochat.recipes.tango import refit
from nanochat.rl.credit.advantages import PRESETS, blend
from nanochat.rl.credit.rewards import terminal_rewards, step_rewards
from nanochat.rl.verify.judges import JUDGES
from nanochat.rl.verify.log_odds import PLACES


def play_of(*flags: str):
    """A step of random models; see test_dpo."""
    return random_play("refit", "--alpha-start", "0.5", *flags)


@pytest.mark.parametrize("judge", list(PLACES))
def test_the_verifier_takes_the_gradient_of_the_cross_entropy_of_outcomes_at_its_places(base, judge):
    t = play_of("--judge", judge)
    policy, verifier = refit.play(t)
    rollouts = verifier.parts[0][0]
    outcomes = [o for o in policy.parts[0][0].columns["outcome"] if o is not None]
    places = PLACES[judge](rollouts, t.read_solutions(rollouts))
    labels = [torch.full((n,), float(o), dtype=torch.float64)
              for n, o in zip(places.sum(dim=1).tolist(), t.check(rollouts), strict=True)]
    assert len(rollouts) == len(outcomes) and {0.0, 1.0} == set(torch.cat(labels).tolist())
    s = [row[where[: len(row)]] for row, where in zip(verdict_odds(t, "verifier", rollouts), places, strict=True)]
    loss = binary_cross_entropy_with_logits(torch.cat(s), torch.cat(labels))
    assert t.metrics["ver/bce"] == pytest.approx(loss.item(), rel=1e-4)
    assert_learns(t, verifier, loss, 1e-4)


@pytest.mark.parametrize("judge", ["steps", "end"])
def test_the_policy_earns_its_outcomes_and_the_chances(base, judge):
    t = play_of("--judge", judge)
    solutions, advantages = next(refit.play(t)).parts[0]
    judgments = JUDGES[judge](t, "verifier", solutions)
    step_ends = [s.step_ends for s in t.read_solutions(solutions)]
    told = (step_rewards(step_ends, [j.steps for j in judgments], "cpu", "own_step")
            if judge == "steps" else terminal_rewards([j.final for j in judgments], solutions.lengths))
    sources = [(0.5, terminal_rewards(solutions.columns["outcome"], solutions.lengths, 0.1)), (0.5, told)]
    expected = blend(sources, solutions.group_id, solutions.mask, PRESETS["grpo"])
    torch.testing.assert_close(advantages, expected)
    assert {"gen/variance/outcome", f"gen/variance/{'verdict' if judge == 'end' else 'steps'}"} < t.metrics.keys()


def test_each_batch_is_learned_once_every_k_steps(base):
    """Three steps, k = 2: both batches in the second, in the order in which they came; the third waits."""
    t, learned, batches = play_of("--refit-every", "2"), [], []
    for step in range(3):
        t.state.step, t.done = step, set()
        found = list(refit.play(t))
        batches.append(found[0].parts[0][0])
        learned.append([update.parts[0][0].texts for update in found[1:]])
    scorable = [[text for text, o in zip(b.texts, b.columns["outcome"], strict=True) if o is not None] for b in batches]
    assert learned == [[], scorable[:2], []] and len(t.memory["samples"]) == 1


def test_a_frozen_verifier_learns_nothing(base):
    t = play_of("--refit-every", "0")
    assert [update.role for update in refit.play(t)] == ["generator"] and "samples" not in t.memory
    assert [refit.updates(play_of("--num-steps", "5", "--refit-every", k).args)["verifier"] for k in "021"] == [0, 4, 5]
