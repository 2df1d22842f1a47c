"""
Credit assignment: sparse rewards -> one advantage per token.

Per reward source: centre and scale within a scope (the group, or the whole batch), spread over tokens; then a weighted sum of the sources.
N rollouts, K reward entries per rollout, T tokens.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch

EPSILON = 1e-6  # added to standard deviations, as the paper's trainer did


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


def _group_sum(x, group_id, num_groups, reduce):
    return reduce(torch.zeros(num_groups, dtype=x.dtype, device=x.device).index_add_(0, group_id, x.sum(dim=1)))


# Baselines: (values, valid, group_id, num_groups, reduce) -> (N, K)

def center_none(values, valid, group_id, num_groups, reduce):
    return torch.zeros_like(values)


def center_mean(values, valid, group_id, num_groups, reduce):
    """The mean over all entries of the group."""
    total, count = (_group_sum(x, group_id, num_groups, reduce) for x in (values, valid.to(values.dtype)))
    return (total / count)[group_id][:, None].expand_as(values)


def center_loo(values, valid, group_id, num_groups, reduce):
    """Leave one out (RLOO): the mean over the entries of the group's other rollouts; the entry itself where there are none."""
    valid = valid.to(values.dtype)
    total, count = (_group_sum(x, group_id, num_groups, reduce)[group_id] - x.sum(dim=1) for x in (values, valid))
    return torch.where(count[:, None] > 0, (total / count)[:, None], values)


CENTER: dict[str, Callable] = {"none": center_none, "mean": center_mean, "loo": center_loo}


# Divisors: the same signature, of the centred values

def scale_none(values, valid, group_id, num_groups, reduce):
    return torch.ones_like(values)


def scale_std(values, valid, group_id, num_groups, reduce):
    """The unbiased standard deviation over all entries of the group, plus EPSILON."""
    count = _group_sum(valid.to(values.dtype), group_id, num_groups, reduce)
    squares = _group_sum(values ** 2, group_id, num_groups, reduce)
    return ((squares / (count - 1)).sqrt() + EPSILON)[group_id][:, None].expand_as(values)


SCALE: dict[str, Callable] = {"none": scale_none, "std": scale_std}


# Spreads: (values, token_index, num_tokens) -> (N, T)

def spread_terminal(values, token_index, num_tokens):
    """Every token gets the sum of the rollout's entries."""
    return values.sum(dim=1, keepdim=True).expand(-1, num_tokens)


def spread_return_to_go(values, token_index, num_tokens):
    """A token gets the sum of the entries that stand at or behind it (Tango eq. 6)."""
    per_token = torch.zeros(len(values), num_tokens, dtype=values.dtype, device=values.device).scatter_add_(1, token_index, values)
    return per_token.flip(1).cumsum(1).flip(1)


SPREAD: dict[str, Callable] = {"terminal": spread_terminal, "return_to_go": spread_return_to_go}

PRESETS = {
    "grpo": Preset("group", "mean", "std", "return_to_go"),         # Tango eq. 4-6, DeepSeekMath
    "rloo": Preset("group", "loo", "none", "return_to_go"),         # Ahmadian et al. 2024
    "reinforce++": Preset("batch", "mean", "std", "return_to_go"),  # Hu 2025: normalised over the global batch
    "dr_grpo": Preset("group", "mean", "none", "return_to_go"),     # Liu et al. 2025; with --aggregation constant
    "reinforce": Preset("group", "none", "none", "terminal"),       # the raw reward
}


def source_advantages(rewards: SparseRewards, group_id: torch.Tensor, num_tokens: int, preset: Preset,
                      reduce: Callable = lambda tensor, op="sum": tensor) -> torch.Tensor:
    """Advantages (N, T) of one source. group_id (N,) int64 names the group of each rollout.

    A group whose entries are all equal gets exactly 0, so does one with a single entry (except with center none). reduce(tensor, op) sums
    ("sum") or maximises ("max") over ranks; it is called only for scope "batch".
    """
    valid = rewards.valid
    values = rewards.values.masked_fill(~valid, 0.0)
    num_groups = int(group_id.max()) + 1 if len(group_id) else 1
    if preset.scope == "batch":
        group_id, num_groups = torch.zeros_like(group_id), 1
    else:
        reduce = lambda tensor, op="sum": tensor  # groups never straddle ranks
    where = (valid, group_id, num_groups, reduce)
    centred = (values - CENTER[preset.center](values, *where)).masked_fill(~valid, 0.0)
    result = (centred / SCALE[preset.scale](centred, *where)).masked_fill(~valid, 0.0)
    if preset.center != "none":
        result = result.masked_fill(_all_equal(values, *where)[group_id][:, None], 0.0)
    return SPREAD[preset.spread](result, rewards.token_index, num_tokens)


def _all_equal(values, valid, group_id, num_groups, reduce):
    """Whether each group's valid entries are all the same (or none). -> (num_groups,) bool"""
    lowest = torch.full((num_groups,), float("-inf"), dtype=values.dtype, device=values.device)
    rows = group_id[:, None].expand_as(values)[valid]
    largest = reduce(lowest.clone().scatter_reduce_(0, rows, values[valid], "amax"), "max")
    smallest = -reduce(lowest.clone().scatter_reduce_(0, rows, -values[valid], "amax"), "max")
    return largest <= smallest


def blend(terms: list[tuple[float, torch.Tensor]]) -> torch.Tensor:
    """The weighted sum of the sources' advantages, for Tango (1 - alpha) * A_out + alpha * A_step (eq. 7)."""
    return sum(weight * advantages for weight, advantages in terms)
