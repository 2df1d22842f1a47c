"""
One policy-gradient update. It sees tokens, mask, advantages and weights; it knows no roles, rewards or schedules.
"""
import math
from dataclasses import replace

import torch

from nanochat.attention import PADDING_POSITION, columns_up_to
from nanochat.common import all_reduce, wide_dtype
from nanochat.kernels.linear_logprob import linear_logprob
from nanochat.kernels.linear_policy_loss import linear_policy_loss
from nanochat.kernels.losses import KL_ESTIMATORS, PolicyLoss, importance_ratio, sequence_old_logprobs
from nanochat.optim import all_reduce_gradients, clip_gradients
from nanochat.rl.learn.packing import MicroBatch
from nanochat.rl.learn.roles import Role, trainable_only
from nanochat.weights import free_gathered, refresh


def completion_hidden(model, batch: MicroBatch) -> torch.Tensor:
    """Hidden states that predict the completion tokens, each prompt run once for its rows; those after the last trained
    token of a row mean nothing. -> (U*R, T, C)"""
    U, T = len(batch.prompt_ids), batch.tokens.shape[1]
    R = len(batch.tokens) // U
    # The last token predicts nothing; where it is alone it is run all the same: ranks gather sharded weights equally
    # often.
    inputs = batch.tokens[:, : max(1, T - 1)]
    prompt_lengths = (batch.prompt_positions < PADDING_POSITION).sum(dim=1)
    positions = (prompt_lengths.repeat_interleave(R)[:, None]
                 + torch.arange(inputs.shape[1], device=prompt_lengths.device))
    lengths = (columns_up_to(batch.index, U * R, T) - 1).clamp(min=0)
    prompt_hidden, rest = model.trunk_after(batch.prompt_ids, batch.prompt_positions, inputs, positions, lengths)
    first = prompt_hidden.repeat_interleave(R, dim=0)  # (U*R, 1, C): predicts token 0
    return torch.cat([first, rest[:, : T - 1]], dim=1)


@torch.no_grad()
def score(model, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """Logprobs of the targets at trained tokens under a model, row by row. -> (M,) fp32"""
    hidden = batch.at_trained(completion_hidden(model, batch))
    targets = batch.at_trained(batch.targets)
    logprobs = linear_logprob(hidden, model.lm_head.weight, targets, **model.head_options(temperature))[0]
    free_gathered(model)
    return logprobs


def batch_loss(model, batch: MicroBatch, loss: PolicyLoss, temperature: float) -> tuple[torch.Tensor, ...]:
    """A micro-batch's share of the loss, a scalar whose backward pass adds its gradients. -> it, and the logprobs and
    entropies (M,) of its trained tokens without gradient"""
    hidden = batch.at_trained(completion_hidden(model, batch))  # (M, C)
    targets, advantages, weights = (batch.at_trained(x) for x in (batch.targets, batch.advantages, batch.weights))
    return linear_policy_loss(hidden, model.lm_head.weight, targets, advantages, weights, loss=loss,
                              old_logprobs=batch.old_logprobs, ref_logprobs=batch.ref_logprobs,
                              **model.head_options(temperature))


@torch.enable_grad()  # a recipe may have left it off
def update(role: Role, batches: list[MicroBatch], loss: PolicyLoss, *, lr: float, max_grad_norm: float,
           temperature: float, device, check_stop=lambda: None, breaks_off=lambda: False) -> dict:
    """One optimizer step on all micro-batches of all ranks; returns its metrics. Means over tokens are None of none.

    Gradients are summed: the denominators are in the weights. When the loss or the gradient is not finite on any rank,
    no rank steps and the metrics say skipped = 1. check_stop is called on all ranks before the step; breaks_off, before
    each micro-batch, says whether the rest is left out since check_stop will raise.
    """
    trainable_only(role.model, role.parameters)
    role.optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(len(SUMS), dtype=wide_dtype(device), device=device)
    gap = torch.zeros((), device=device)
    for batch in batches:
        if breaks_off():
            break
        if loss.kl_coef and batch.ref_logprobs is None:
            batch.ref_logprobs = score(role.reference, batch, temperature)
        if loss.sequence_ratio and batch.old_logprobs is not None:
            B, T = batch.tokens.shape
            logprobs = score(role.model, batch, temperature)
            batch = replace(batch, old_logprobs=sequence_old_logprobs(  # by which a token's ratio is its row's
                logprobs, batch.old_logprobs, batch.index // T, B))
        total, logprobs, entropy = batch_loss(role.model, batch, loss, temperature)
        total.backward()
        sums += token_sums(batch, loss, total.detach(), logprobs, entropy)
        if len(batch.index):
            gap = torch.maximum(gap, (logprobs - sampler_logprobs(batch, logprobs)).abs().max())
    all_reduce_gradients(role.parameters)
    all_reduce(sums)
    all_reduce(gap, "max")
    check_stop()
    grad_norm = clip_gradients(role.parameters, max_grad_norm)
    values = dict(zip(SUMS, sums.tolist(), strict=True))
    num_tokens, num_drawn = values.pop("num_tokens"), values.pop("num_drawn")
    loss_sum, diff_sum = values.pop("loss"), values.pop("rollout_probs_diff_mean")
    is_finite = math.isfinite(grad_norm) and math.isfinite(loss_sum)
    if is_finite:
        for group in role.optimizer.param_groups:
            group["lr"] = lr
        role.optimizer.step()
    role.optimizer.zero_grad(set_to_none=True)
    refresh(role.model)
    return {"loss": loss_sum, **{name: value / num_tokens if num_tokens else None for name, value in values.items()},
            "rollout_probs_diff_mean": diff_sum / num_drawn if num_drawn else None,
            "rollout_logprobs_diff_max": float(gap) if num_drawn else None,
            **({} if loss.kl_coef else {"kl": None}),  # not measured without a reference
            "grad_norm": grad_norm, "lr": lr, "skipped": int(not is_finite)}


SUMS = ("num_tokens", "num_drawn", "loss", "entropy", "kl", "clip_ratio/low", "clip_ratio/high",
        "rollout_probs_diff_mean")
GAPS = ("rollout_probs_diff_mean", "rollout_logprobs_diff_max")  # of sampler and trainer


def sampler_logprobs(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """The sampler's logprobs of trained tokens; `logprobs` itself for tokens that were not drawn from this prompt or
    that are not what their position is asked to predict, so that they show no difference. -> (M,)"""
    drawn = batch.at_trained(batch.sampler_logprobs)
    comparable = ~drawn.isnan() & (batch.at_trained(batch.targets) == batch.at_trained(batch.tokens))
    return torch.where(comparable, drawn, logprobs)


def token_sums(batch, loss, total, logprobs, entropy) -> torch.Tensor:
    """Sums over a micro-batch's tokens of what is logged as a mean, in the order of SUMS. -> (len(SUMS),) wide"""
    zero = torch.zeros((), device=logprobs.device)
    advantages, low, high = batch.at_trained(batch.advantages), zero, zero
    if batch.old_logprobs is not None:
        ratio = importance_ratio(logprobs, batch.old_logprobs)
        low = ((ratio < 1 - loss.clip_low) & (advantages < 0)).sum()
        high = ((ratio > 1 + loss.clip_high) & (advantages > 0)).sum()
    kl = zero if batch.ref_logprobs is None else KL_ESTIMATORS["k3"](logprobs, batch.ref_logprobs).sum()
    probs_diff = (logprobs.exp() - sampler_logprobs(batch, logprobs).exp()).abs().sum()
    num_tokens = torch.full((), logprobs.numel(), dtype=wide_dtype(logprobs.device), device=logprobs.device)
    num_drawn = num_tokens - batch.at_trained(batch.sampler_logprobs).isnan().sum()
    return torch.stack([x.to(wide_dtype(x.device))
                        for x in (num_tokens, num_drawn, total, entropy.sum(), kl, low, high, probs_diff)])
