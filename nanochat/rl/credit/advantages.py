"""
Credit assignment: sparse rewards -> one advantage per token.

Per reward source: centre and scale within a scope (the group, or the whole batch), spread over tokens; then a weighted
sum of the sources. Nothing waits for the device. N rollouts, K reward entries per rollout, T tokens.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

EPSILON = 1e-6  # added to standard deviations, as the paper's trainer did


@dataclass
class SparseRewards:
    """The rewards of one source: values[n, j] at token token_index[n, j] of rollout n, where valid[n, j]. A rollout
    without valid entries abstains: it is left out of every baseline and its advantage is 0."""
    values: torch.Tensor       # (N, K) fp32
    token_index: torch.Tensor  # (N, K) int64
    valid: torch.Tensor        # (N, K) bool


@dataclass(frozen=True)
class Preset:
    """scope: group | batch; center, scale, spread: keys of the tables below."""
    scope: str
    center: str
    scale: str
    spread: str


# Groups, and sums over ranks. reduce(tensor, op) sums ("sum") or maximises ("max") over ranks.

def alone(tensor, op: str = "sum"):
    """The reduce of one rank."""
    return tensor


def first_of_group(group_id):
    """Where the group of each rollout begins when rollouts are sorted by group_id: a name of the group below N. (N,)"""
    return torch.searchsorted(group_id.sort().values, group_id)


def group_sum(x, group_id, num_groups, reduce):
    """The sum over each group's entries. x (N, K) -> (num_groups,)"""
    return reduce(torch.zeros(num_groups, dtype=x.dtype, device=x.device).index_add_(0, group_id, x.sum(dim=1)))


def group_max(x, group_id, num_groups, reduce):
    """The largest of each group's entries. x (N, K) -> (num_groups,)"""
    lowest = torch.full((num_groups,), float("-inf"), dtype=x.dtype, device=x.device)
    return reduce(lowest.scatter_reduce_(0, group_id, x.amax(dim=1), "amax"), "max")


# Baselines: (values, valid, group_id, num_groups, reduce) -> (N, K)

def center_none(values, valid, group_id, num_groups, reduce):
    return torch.zeros_like(values)


def center_mean(values, valid, group_id, num_groups, reduce):
    """The mean over all entries of the group."""
    total, count = (group_sum(x, group_id, num_groups, reduce) for x in (values, valid.to(values.dtype)))
    return (total / count)[group_id][:, None].expand_as(values)


def center_loo(values, valid, group_id, num_groups, reduce):
    """Leave one out (RLOO): the mean over entries of the group's other rollouts; the entry itself without any."""
    valid = valid.to(values.dtype)
    total, count = (group_sum(x, group_id, num_groups, reduce)[group_id] - x.sum(dim=1) for x in (values, valid))
    return torch.where(count[:, None] > 0, (total / count)[:, None], values)


CENTER: dict[str, Callable] = {"none": center_none, "mean": center_mean, "loo": center_loo}


# Divisors: the same signature, of the centred values

def scale_none(values, valid, group_id, num_groups, reduce):
    return torch.ones_like(values)


def scale_std(values, valid, group_id, num_groups, reduce):
    """The unbiased standard deviation over all entries of the group, plus EPSILON."""
    count = group_sum(valid.to(values.dtype), group_id, num_groups, reduce)
    squares = group_sum(values ** 2, group_id, num_groups, reduce)
    return ((squares / (count - 1)).sqrt() + EPSILON)[group_id][:, None].expand_as(values)


SCALE: dict[str, Callable] = {"none": scale_none, "std": scale_std}


# Spreads: (values, token_index, num_tokens) -> (N, T)

def spread_terminal(values, token_index, num_tokens):
    """Every token gets the sum of the rollout's entries."""
    return values.sum(dim=1, keepdim=True).expand(-1, num_tokens)


def to_go(rewards: torch.Tensor) -> torch.Tensor:
    """What each token still earns: the sum of the rewards at and after it. (N, T) -> (N, T)"""
    return rewards.flip(1).cumsum(1).flip(1)


def spread_return_to_go(values, token_index, num_tokens):
    """A token gets the sum of the entries that stand at or after it (Tango eq. 6)."""
    per_token = torch.zeros(len(values), num_tokens, dtype=values.dtype, device=values.device)
    return to_go(per_token.scatter_add_(1, token_index, values))


def gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float,
        lam: float | torch.Tensor) -> torch.Tensor:
    """Generalised advantage estimates (Schulman et al. 2016, eq. 16): A_t = d_t + gamma lam A_{t+1} with
    d_t = r_t + gamma V_{t+1} - V_t, where t + 1 is the next token of the mask and V is 0 after the last.

    lam: one, or one for each rollout (N,). values: V_t, of the state before token t is drawn. A reward off the mask is
    the token's before it. With gamma 1, lam 1 and values 0 this is `to_go`. All others (N, T) -> (N, T), 0 off the mask
    """
    advantages = torch.zeros_like(rewards)
    later = torch.zeros_like(rewards[:, 0])  # rewards after the token that are not yet another one's
    after, value = later, later              # A and V of the token after
    for t in reversed(range(rewards.shape[1])):
        here, later = mask[:, t], later + rewards[:, t]
        estimate = later + gamma * value - values[:, t] + gamma * lam * after
        advantages[:, t] = estimate.masked_fill(~here, 0.0)
        after, value = torch.where(here, estimate, after), torch.where(here, values[:, t], value)
        later = later.masked_fill(here, 0.0)
    return advantages


SPREAD: dict[str, Callable] = {"terminal": spread_terminal, "return_to_go": spread_return_to_go}

PRESETS = {
    "grpo": Preset("group", "mean", "std", "return_to_go"),         # Tango eq. 4-6, DeepSeekMath
    "rloo": Preset("group", "loo", "none", "return_to_go"),         # Ahmadian et al. 2024
    "reinforce++": Preset("batch", "mean", "std", "return_to_go"),  # Hu 2025: normalised over the global batch
    "dr_grpo": Preset("group", "mean", "none", "return_to_go"),     # Liu et al. 2025; with --aggregation constant
    "reinforce": Preset("group", "none", "none", "terminal"),       # the raw reward
}


def normalised(values, valid, group_id, num_groups: int, preset: Preset, reduce: Callable):
    """Entries less the preset's centre, over its scale. -> (N, K), 0 where invalid and, except with center none, in
    groups whose entries are all equal or a single one."""
    values = values.masked_fill(~valid, 0.0)
    where = (valid, group_id, num_groups, reduce)
    centred = (values - CENTER[preset.center](values, *where)).masked_fill(~valid, 0.0)
    result = (centred / SCALE[preset.scale](centred, *where)).masked_fill(~valid, 0.0)
    if preset.center == "none":
        return result
    largest, smallest = (sign * group_max((sign * values).masked_fill(~valid, float("-inf")), *where[1:])
                         for sign in (1, -1))
    return result.masked_fill((largest <= smallest)[group_id][:, None], 0.0)


def source_advantages(rewards: SparseRewards, group_id: torch.Tensor, num_tokens: int, preset: Preset,
                      reduce: Callable = alone) -> torch.Tensor:
    """Advantages (N, T) of one source. group_id (N,) int64 names groups by any numbers, in any order. Groups never
    straddle ranks, so reduce is called for scope "batch" alone."""
    if preset.scope == "batch":
        groups = torch.zeros_like(group_id), 1
    else:
        groups, reduce = (first_of_group(group_id), max(1, len(group_id))), alone
    values = normalised(rewards.values, rewards.valid, *groups, preset, reduce)
    return SPREAD[preset.spread](values, rewards.token_index, num_tokens)


def blend(sources: list[tuple[float, SparseRewards]], group_id: torch.Tensor, num_tokens: int,
          preset: Preset | Sequence[Preset], reduce: Callable = alone) -> torch.Tensor:
    """The weighted sum of the sources' advantages (N, T), for Tango (1 - alpha) * A_out + alpha * A_step (eq. 7).
    preset: one for all sources, or one per source."""
    presets = [preset] * len(sources) if isinstance(preset, Preset) else preset
    return sum(weight * source_advantages(rewards, group_id, num_tokens, own, reduce)
               for (weight, rewards), own in zip(sources, presets, strict=True))


def merge(sources: list[tuple[float, SparseRewards]], group_id: torch.Tensor, num_tokens: int, preset: Preset,
          reduce: Callable = alone) -> torch.Tensor:
    """Advantages (N, T) of the sources' weighted rewards normalised together: Tango section 2 found it worse."""
    sources = [(weight, rewards) for weight, rewards in sources if weight]  # else it would still move the baseline
    joined = lambda parts: torch.cat(list(parts), dim=1)  # (N, K1 + K2)
    merged = SparseRewards(joined(weight * rewards.values for weight, rewards in sources),
                           joined(rewards.token_index for _, rewards in sources),
                           joined(rewards.valid for _, rewards in sources))
    return source_advantages(merged, group_id, num_tokens, preset, reduce)


COMBINE: dict[str, Callable] = {"advantages": blend, "rewards": merge}


def whiten(advantages: torch.Tensor, mask: torch.Tensor, reduce: Callable = alone) -> torch.Tensor:
    """Advantages (N, T) less their mean, over their unbiased standard deviation plus EPSILON, over the masked tokens of
    all ranks, which all must call it: REINFORCE++ (Hu 2025). -> 0 off the mask, and where all are equal."""
    wide = advantages.to(torch.float32 if advantages.device.type == "mps" else torch.float64)  # MPS has no float64
    one_group = torch.zeros(len(advantages), dtype=torch.int64, device=advantages.device)
    return normalised(wide, mask.bool(), one_group, 1, PRESETS["reinforce++"], reduce).to(advantages.dtype)


def difference_advantages(differences: torch.Tensor, eps: float = EPSILON) -> torch.Tensor:
    """Advantages (G,) of a group from how much better each is judged than each other: Think-RM (arXiv 2505.16265).

    A_i = (sum_j d_ij / G) / sqrt(sum_jk d_jk^2 / (2 G (G - 1)) + eps). With d_ij = r_i - r_j that is GRPO's
    (r_i - mean) / std, the standard deviation unbiased. differences (G, G), fp32 or wider.
    """
    G = len(differences)
    variance = (differences ** 2).sum() / max(1, 2 * G * (G - 1))
    return differences.mean(dim=1) / (variance + eps).sqrt()
