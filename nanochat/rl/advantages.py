"""
Credit assignment: sparse rewards -> one advantage per token.

Per reward source: centre and scale within a scope (the group, or the whole batch), spread over tokens; then a weighted sum of the sources.
N rollouts, K reward entries per rollout, T tokens.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanochat.kernels.group_advantages import (alone, center_mean, first_of_group, group_advantages, group_sum, normalised, scale_std,
                                               spread_return_to_go)


@dataclass
class SparseRewards:
    """The rewards of one source. Entry (n, j) gives rollout n `values[n, j]` at token `token_index[n, j]` where `valid[n, j]`.

    values (N, K) fp32, token_index (N, K) int64, valid (N, K) bool. A rollout without valid entries abstains: it is left out of every
    baseline and its advantage is 0.
    """
    values: torch.Tensor
    token_index: torch.Tensor
    valid: torch.Tensor


@dataclass(frozen=True)
class Preset:
    """scope: group | batch; center, scale, spread: keys of the tables below."""
    scope: str
    center: str
    scale: str
    spread: str


# Baselines: (values, valid, group_id, num_groups, reduce) -> (N, K)

def center_none(values, valid, group_id, num_groups, reduce):
    return torch.zeros_like(values)


def center_loo(values, valid, group_id, num_groups, reduce):
    """Leave one out (RLOO): the mean over the entries of the group's other rollouts; the entry itself where there are none."""
    valid = valid.to(values.dtype)
    total, count = (group_sum(x, group_id, num_groups, reduce)[group_id] - x.sum(dim=1) for x in (values, valid))
    return torch.where(count[:, None] > 0, (total / count)[:, None], values)


CENTER: dict[str, Callable] = {"none": center_none, "mean": center_mean, "loo": center_loo}


# Divisors: the same signature, of the centred values

def scale_none(values, valid, group_id, num_groups, reduce):
    return torch.ones_like(values)


SCALE: dict[str, Callable] = {"none": scale_none, "std": scale_std}


# Spreads: (values, token_index, num_tokens) -> (N, T)

def spread_terminal(values, token_index, num_tokens):
    """Every token gets the sum of the rollout's entries."""
    return values.sum(dim=1, keepdim=True).expand(-1, num_tokens)


SPREAD: dict[str, Callable] = {"terminal": spread_terminal, "return_to_go": spread_return_to_go}

PRESETS = {
    "grpo": Preset("group", "mean", "std", "return_to_go"),         # Tango eq. 4-6, DeepSeekMath
    "rloo": Preset("group", "loo", "none", "return_to_go"),         # Ahmadian et al. 2024
    "reinforce++": Preset("batch", "mean", "std", "return_to_go"),  # Hu 2025: normalised over the global batch
    "dr_grpo": Preset("group", "mean", "none", "return_to_go"),     # Liu et al. 2025; with --aggregation constant
    "reinforce": Preset("group", "none", "none", "terminal"),       # the raw reward
}


def source_advantages(rewards: SparseRewards, group_id: torch.Tensor, num_tokens: int, preset: Preset, reduce: Callable = alone) -> torch.Tensor:
    """Advantages (N, T) of one source. group_id (N,) int64 names the group of each rollout, in any order.

    A group whose entries are all equal gets exactly 0, so does one with a single entry (except with center none). reduce(tensor, op) sums
    ("sum") or maximises ("max") over ranks; it is called only for scope "batch".
    """
    if preset == PRESETS["grpo"]:
        return group_advantages([(1.0, rewards)], group_id, num_tokens)
    groups = (torch.zeros_like(group_id), 1) if preset.scope == "batch" else (first_of_group(group_id), max(1, len(group_id)))
    reduce = reduce if preset.scope == "batch" else alone  # groups never straddle ranks
    values = normalised(rewards, *groups, CENTER[preset.center], SCALE[preset.scale], reduce, zero_if_equal=preset.center != "none")
    return SPREAD[preset.spread](values, rewards.token_index, num_tokens)


def blend(sources: list[tuple[float, SparseRewards]], group_id: torch.Tensor, num_tokens: int, preset: Preset, reduce: Callable = alone) -> torch.Tensor:
    """The weighted sum of the sources' advantages (N, T), for Tango (1 - alpha) * A_out + alpha * A_step (eq. 7)."""
    if preset == PRESETS["grpo"]:
        return group_advantages(sources, group_id, num_tokens)
    return sum(weight * source_advantages(rewards, group_id, num_tokens, preset, reduce) for weight, rewards in sources)


def merge(sources: list[tuple[float, SparseRewards]], group_id: torch.Tensor, num_tokens: int, preset: Preset, reduce: Callable = alone) -> torch.Tensor:
    """Advantages (N, T) of the weighted rewards of all sources normalised together: what Tango section 2 found worse than eq. 7."""
    sources = [(weight, rewards) for weight, rewards in sources if weight]  # one without weight must not move the baseline either
    values = torch.cat([weight * rewards.values for weight, rewards in sources], dim=1)  # (N, K1 + K2)
    merged = SparseRewards(values, *(torch.cat([getattr(rewards, name) for _, rewards in sources], dim=1) for name in ("token_index", "valid")))
    return source_advantages(merged, group_id, num_tokens, preset, reduce)


COMBINE: dict[str, Callable] = {"advantages": blend, "rewards": merge}
