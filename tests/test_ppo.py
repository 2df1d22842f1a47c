"""PPO: the critic's update against autograd, the policy's advantages, VAPO's parts."""
from types import SimpleNamespace

import pytest
import torch
from test_dpo import (assert_close, assert_learns, gradient_of, log_likelihoods, moved_by, parsed, random_play,
                      verdict_odds)
from torch.nn.functional import binary_cross_entropy_with_logits

from nanochat.recipes.policy import ppo
from nanochat.rl.credit.advantages import alone, whiten


@pytest.mark.parametrize("times", ["1", "3"])
def test_with_lambda_1_the_critic_takes_the_gradient_of_the_cross_entropy_of_outcomes(base, times):
    """At every token, in one optimizer step also where the policy makes several."""
    t = random_play("ppo", "--gae-lambda", "1", "--updates-per-batch", times)
    policy, critic = ppo.play(t)
    rollouts, advantages = policy.parts[0]
    outcomes = rollouts.columns["outcome"]
    assert policy.num_updates is None and None not in outcomes and {True, False} == set(outcomes)
    s = verdict_odds(t, "critic", rollouts)
    returns = [torch.full_like(row, float(outcome)) for row, outcome in zip(s, outcomes, strict=True)]
    loss = binary_cross_entropy_with_logits(torch.cat(s), torch.cat(returns))
    assert t.metrics["cri/bce"] == pytest.approx(loss.item(), rel=1e-4)

    raw = torch.zeros(advantages.shape)
    for n, (row, outcome) in enumerate(zip(s, outcomes, strict=True)):
        raw[n, : len(row)] = (float(outcome) - torch.sigmoid(row.detach())).float()
    torch.testing.assert_close(advantages, whiten(raw, rollouts.mask, alone), rtol=1e-3, atol=1e-3)
    assert_learns(t, critic, loss, 1e-4)


def test_with_lambda_0_the_critic_learns_what_it_says_of_the_next_token(base):
    t = random_play("ppo", "--gae-lambda", "0")
    policy, critic = ppo.play(t)
    rollouts, _ = policy.parts[0]
    s = verdict_odds(t, "critic", rollouts)
    returns = [torch.cat([torch.sigmoid(row[1:]).detach(), torch.tensor([float(outcome)])])
               for row, outcome in zip(s, rollouts.columns["outcome"], strict=True)]
    assert_learns(t, critic, binary_cross_entropy_with_logits(torch.cat(s), torch.cat(returns)), 1e-4)


def test_the_adaptive_lambda_by_hand_and_a_rate_of_the_critics_own():
    """alpha 0.05: 0 up to 20 tokens, 1/2 at 40, 0.9 at 200. alpha 1: 0, 1/2 and 3/4 at 1, 2 and 4 tokens."""
    assert ppo.adaptive_lambda(torch.tensor([1.0, 20, 40, 200]), 0.05).tolist() == pytest.approx([0, 0, 0.5, 0.9])
    assert ppo.adaptive_lambda(torch.tensor([1.0, 2, 4]), 1.0).tolist() == [0, 0.5, 0.75]
    assert parsed("ppo", "--critic-lr", "0").critic_lr == 0 and ppo.ROLES["critic"].lr == "--critic-lr"


def test_each_solution_has_a_lambda_of_its_own_and_the_critic_keeps_its(base):
    t, other = (random_play("ppo", "--gae-lambda", "1", *more) for more in (["--gae-alpha", "0.1"], []))
    (policy, critic), (_, same) = ppo.play(t), ppo.play(other)
    rollouts, advantages = policy.parts[0]
    raw, rows = torch.zeros(advantages.shape), verdict_odds(t, "critic", rollouts)
    for n, (s, outcome) in enumerate(zip(rows, rollouts.columns["outcome"], strict=True)):
        V, later, l = torch.sigmoid(s.detach()).tolist(), 0.0, len(s)
        for k in reversed(range(l)):
            error = (float(outcome) if k == l - 1 else V[k + 1]) - V[k]
            raw[n, k] = later = error + max(0, 1 - 1 / (0.1 * l)) * later
    torch.testing.assert_close(advantages, whiten(raw, rollouts.mask, alone), rtol=1e-3, atol=1e-3)
    assert torch.equal(critic.parts[0][1], same.parts[0][1])


def test_the_critic_is_pretrained_alone_on_outcomes(base):
    t = random_play("ppo", "--gae-lambda", "0", "--value-pretrain", "1")
    first, = ppo.play(t)
    outcomes = random_play("ppo", "--gae-lambda", "1")
    assert torch.equal(first.parts[0][1], list(ppo.play(outcomes))[1].parts[0][1])
    t.steps["critic"] = 1
    t.done.clear()
    assert [update.role for update in ppo.play(t)] == ["generator", "critic"]
    assert ppo.updates(t.args) == {"generator": 4, "critic": 5}


def test_right_solutions_become_likelier_by_the_mean_over_their_tokens(base):
    """The update of both losses less that of the policy's alone is the gradient of coef * mean(-log pi)."""
    flags = ["--aggregation", "token", "--kl-coef", "0"]
    grads = []
    for coef in ("0", "0.5"):
        t = random_play("ppo", "--lm-coef", coef, *flags)
        grads.append(moved_by(t, next(ppo.play(t))))
    t = random_play("ppo", *flags)
    rollouts, _ = next(ppo.play(t)).parts[0]
    right, model = rollouts.columns["outcome"], t.roles["generator"].model
    num_tokens = int(rollouts.lengths[torch.tensor(right)].sum())
    rows = [row for row, is_right in zip(log_likelihoods(model, rollouts), right, strict=True) if is_right]
    expected = gradient_of(-0.5 * torch.stack(rows).sum() / num_tokens, model)
    assert_close({name: grads[1][name] - grads[0][name] for name in expected}, expected, 1e-4)


def test_without_a_right_solution_there_is_no_bonus_and_without_an_outcome_no_update(base):
    t = random_play("ppo")
    t.task.check = lambda problem, text: None
    assert list(ppo.play(t)) == [] and t.metrics["gen/unscorable"] == 1
    assert ppo.likelihood_bonus(torch.zeros(2), torch.tensor([3.0, 5.0]), 0.1, alone).tolist() == [0, 0]
    # 2 of 8 tokens are right: 0.1 * 8 / 2
    assert ppo.likelihood_bonus(torch.tensor([0.0, 1]), torch.tensor([6.0, 2]), 0.1, alone).tolist() == (
        pytest.approx([0, 0.4]))



def test_explained_variance_by_hand():
    """Returns 0, 0, 1, 1 have the variance 1/4; errors -.5, 0, 0, .5 that of 1/8."""
    t = SimpleNamespace(reduce=lambda x: x, device=torch.device("cpu"))
    returns = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert ppo.explained_variance(t, returns, torch.tensor([0.5, 0.0, 1.0, 0.5])) == pytest.approx(0.5)
    assert ppo.explained_variance(t, returns, returns) == 1
    assert ppo.explained_variance(t, returns, torch.full((4,), 0.25)) == pytest.approx(0)
    assert ppo.explained_variance(t, torch.ones(4), returns) is None
    assert ppo.explained_variance(t, returns[:0], returns[:0]) is None
