"""
Credit assignment: sparse rewards -> one advantage per token.

Per reward source: centre and scale within the group, spread over tokens; or spread, and centre and scale over all
tokens of the batch. Then a weighted sum of the sources. Nothing but `filtered` waits for the device.
N rollouts, K reward entries per rollout, T tokens.
"""
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from nanochat.common import BadInput

EPSILON = 1e-6  # added to standard deviations, as the paper's trainer did


@dataclass
class SparseRewards:
    """The rewards of one source: values[n, j] at token token_index[n, j] of rollout n, where valid[n, j]. A rollout
    without valid entries abstains: it is left out of every baseline and its advantage is 0."""
    values: torch.Tensor       # (N, K) fp32
    token_index: torch.Tensor  # (N, K) int64
    valid: torch.Tensor        # (N, K) bool
    spread: str = "to_go"      # which tokens an entry moves: a key of SPREAD
    negative_weight: float = 1.0  # factor on an entry below the baseline


@dataclass(frozen=True)
class Preset:
    """scope: group, of the entries, or tokens, of the whole batch after they are spread; center, scale: keys of the
    tables below."""
    scope: str
    center: str
    scale: str


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


# Spreads: (rewards, num_tokens) -> (N, T)

def to_go(rewards: torch.Tensor) -> torch.Tensor:
    """What each token still earns: the sum of the rewards at and after it. (N, T) -> (N, T)"""
    return rewards.flip(1).cumsum(1).flip(1)


def spread_to_go(rewards: SparseRewards, num_tokens: int) -> torch.Tensor:
    """A token gets the sum of the entries that stand at or after it (Tango eq. 6)."""
    values = rewards.values.masked_fill(~rewards.valid, 0.0)
    per_token = torch.zeros(len(values), num_tokens, dtype=values.dtype, device=values.device)
    return to_go(per_token.scatter_add_(1, rewards.token_index, values))


def spread_own_step(rewards: SparseRewards, num_tokens: int) -> torch.Tensor:
    """A token gets the first entry that stands at or after it, 0 after the last: the one of the step that it is part of
    (PAV eq. 5). A rollout's valid entries come first, in order."""
    values = rewards.values.masked_fill(~rewards.valid, 0.0)
    ends = rewards.token_index.masked_fill(~rewards.valid, num_tokens).contiguous()                  # (N, K)
    tokens = torch.arange(num_tokens, device=ends.device).expand(len(ends), num_tokens).contiguous()
    none = torch.zeros_like(values[:, :1])
    return torch.cat([values, none], dim=1).gather(1, torch.searchsorted(ends, tokens))              # (N, T)


SPREAD: dict[str, Callable] = {"to_go": spread_to_go, "own_step": spread_own_step}


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


PRESETS = {
    "grpo": Preset("group", "mean", "std"),          # Tango eq. 4-6, DeepSeekMath
    "rloo": Preset("group", "loo", "none"),          # Ahmadian et al. 2024
    "reinforce++": Preset("tokens", "mean", "std"),  # Hu 2025: returns, normalised over all tokens of the batch
    "dr_grpo": Preset("group", "mean", "none"),      # Liu et al. 2025; with --aggregation constant
    "reinforce": Preset("group", "none", "none"),    # the raw reward
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


def source_advantages(rewards: SparseRewards, group_id: torch.Tensor, mask: torch.Tensor, preset: Preset,
                      reduce: Callable = alone) -> torch.Tensor:
    """Advantages (N, T) of one source. group_id (N,) int64 names groups by any numbers, in any order; mask (N, T) bool:
    the rollouts' own tokens. Groups never straddle ranks, so reduce is called for scope "tokens" alone."""
    if preset.scope == "tokens":
        moved = SPREAD[rewards.spread](rewards, mask.shape[1]), mask & reached(rewards, mask.shape[1])
        return weighted(whiten(*moved, reduce), rewards)
    groups = first_of_group(group_id), max(1, len(group_id))
    values = normalised(rewards.values, rewards.valid, *groups, preset, alone)
    return SPREAD[rewards.spread](replace(rewards, values=weighted(values, rewards)), mask.shape[1])


def reached(rewards: SparseRewards, num_tokens: int) -> torch.Tensor:
    """The tokens up to a rollout's last entry, which alone it moves. -> (N, T) bool"""
    last = rewards.token_index.masked_fill(~rewards.valid, -1).amax(dim=1, keepdim=True)  # (N, 1)
    return torch.arange(num_tokens, device=last.device) <= last


def weighted(advantages: torch.Tensor, rewards: SparseRewards) -> torch.Tensor:
    """Advantages of a source with its weight of negative ones. Any shape -> the same."""
    return torch.where(advantages < 0, rewards.negative_weight * advantages, advantages)


def blend(sources: list[tuple[float, SparseRewards]], group_id: torch.Tensor, mask: torch.Tensor, preset: Preset,
          reduce: Callable = alone) -> torch.Tensor:
    """The weighted sum of the sources' advantages (N, T), for Tango (1 - alpha) * A_out + alpha * A_step (eq. 7)."""
    return sum(weight * source_advantages(rewards, group_id, mask, preset, reduce) for weight, rewards in sources)


def merge(sources: list[tuple[float, SparseRewards]], group_id: torch.Tensor, mask: torch.Tensor, preset: Preset,
          reduce: Callable = alone) -> torch.Tensor:
    """Advantages (N, T) of the sources' weighted rewards normalised together: Tango section 2 found it worse. It can
    pay for a wrong answer, also for one that is not judged: where the steps' rewards draw the mean below 0. Over tokens
    it has no weight of negative advantages."""
    sources = [(weight, rewards) for weight, rewards in sources if weight]  # else it would still move the baseline
    if preset.scope == "tokens":
        total = sum(weight * SPREAD[rewards.spread](rewards, mask.shape[1]) for weight, rewards in sources)
        moved = torch.stack([reached(rewards, mask.shape[1]) for _, rewards in sources]).any(dim=0)
        return whiten(total, mask & moved, reduce)
    values = torch.cat([weight * rewards.values for weight, rewards in sources], dim=1)  # (N, K1 + K2)
    valid = torch.cat([rewards.valid for _, rewards in sources], dim=1)
    values = normalised(values, valid, first_of_group(group_id), max(1, len(group_id)), preset, alone)
    parts = values.split([rewards.values.shape[1] for _, rewards in sources], dim=1)
    return sum(SPREAD[rewards.spread](replace(rewards, values=weighted(part, rewards)), mask.shape[1])
               for (_, rewards), part in zip(sources, parts, strict=True))


def stratified(sources: list[tuple[float, SparseRewards]], group_id: torch.Tensor, mask: torch.Tensor, preset: Preset,
               reduce: Callable = alone) -> torch.Tensor:
    """As `blend` of an outcome and steps, but the steps are compared among the right and among the wrong solutions of a
    group alone, so that they never say which of a right and a wrong one is better (after HERO, arXiv 2510.07242, which
    maps them to ranges that do not overlap, and weighs prompts; here blame can outweigh a right answer)."""
    (first, outcome), (second, steps) = sources
    A_out = source_advantages(outcome, group_id, mask, preset, reduce)
    is_right = (outcome.values == 1).any(dim=1)                                                      # (N,)
    return first * A_out + second * source_advantages(steps, 2 * group_id + is_right, mask, preset, reduce)


def filtered(sources: list[tuple[float, SparseRewards]], group_id: torch.Tensor, mask: torch.Tensor, preset: Preset,
             reduce: Callable = alone) -> torch.Tensor:
    """The outcome's advantages, steps only choose who has one: of a group's right solutions the half with the highest
    mean step reward, of its wrong ones the half with the lowest (PROF, arXiv 2509.03403, which also balances them).
    One without verdicts has the lowest of all: it is no example to follow, and stays one to avoid."""
    (_, outcome), (_, steps) = sources
    sums = steps.values.masked_fill(~steps.valid, 0.0).sum(dim=1)
    means = (sums / steps.valid.sum(dim=1)).nan_to_num(nan=float("-inf")).tolist()
    is_right, group, sides = (outcome.values == 1).any(dim=1).tolist(), group_id.tolist(), {}
    for n in outcome.valid.any(dim=1).nonzero().flatten().tolist():
        sides.setdefault((group[n], is_right[n]), []).append(n)
    kept = [n for (_, right), rows in sides.items()
            for n in sorted(rows, key=means.__getitem__, reverse=right)[: (len(rows) + 1) // 2]]
    chosen = torch.zeros(len(means), 1, dtype=torch.bool)
    chosen[kept] = True
    known = outcome.valid & chosen.to(outcome.valid.device)
    return source_advantages(replace(outcome, valid=known), group_id, mask, preset, reduce)


COMBINE: dict[str, Callable] = {"advantages": blend, "rewards": merge, "stratified": stratified, "filtered": filtered}


def check_combine(args) -> None:
    """Raises BadInput for --combine stratified where advantages are not compared within groups, and for filtered with
    what it has no use for."""
    if args.combine == "stratified":
        preset = PRESETS[args.advantage]
        if preset.scope != "group" or preset.center == "none":
            raise BadInput(f"--combine stratified: compares within groups, and --advantage {args.advantage} does not")
    if args.combine == "filtered" and (credit := getattr(args, "credit", "own_step")) != "own_step":
        raise BadInput(f"--credit {credit}: with --combine filtered steps earn nothing; leave it at own_step")
    if args.combine == "filtered" and getattr(args, "weigh_by_j", False):
        raise BadInput("--weigh-by-j: is a factor on alpha, of which --combine filtered makes no use")


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
