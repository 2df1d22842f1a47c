"""
Sparse rewards of groups of rollouts -> one advantage per token: Tango eq. 4-7, GRPO's normalisation.

On CUDA one Triton program per rollout goes over its group for mean and standard deviation and spreads its own rewards over its tokens;
elsewhere PyTorch does, from parts that nanochat.rl.advantages combines to other presets too. No loop over rollouts, no waiting for the device.
N rollouts, K reward entries per rollout, T tokens.
"""
from collections.abc import Callable

import torch

from nanochat.kernels.launch import jit, power_of_two, takes_triton, tl

EPSILON = 1e-6  # added to standard deviations, as the paper's trainer did


def first_of_group(group_id, right: bool = False):
    """Where the group of each rollout begins when rollouts are sorted by group_id (right: where it ends): a name of the group below N. (N,) int64"""
    return torch.searchsorted(group_id.sort().values, group_id, right=right)


# PyTorch. Baselines and divisors: (values, valid, group_id, num_groups, reduce) -> (N, K); reduce sums or maximises over ranks.

def alone(tensor, op: str = "sum"):
    """The reduce of one rank."""
    return tensor


def group_sum(x, group_id, num_groups, reduce):
    """The sum over each group's entries. -> (num_groups,)"""
    return reduce(torch.zeros(num_groups, dtype=x.dtype, device=x.device).index_add_(0, group_id, x.sum(dim=1)))


def group_max(x, group_id, num_groups, reduce):
    """The largest of each group's entries. -> (num_groups,)"""
    lowest = torch.full((num_groups,), float("-inf"), dtype=x.dtype, device=x.device)
    return reduce(lowest.scatter_reduce_(0, group_id, x.amax(dim=1), "amax"), "max")


def center_mean(values, valid, group_id, num_groups, reduce):
    """The mean over all entries of the group."""
    total, count = (group_sum(x, group_id, num_groups, reduce) for x in (values, valid.to(values.dtype)))
    return (total / count)[group_id][:, None].expand_as(values)


def scale_std(values, valid, group_id, num_groups, reduce):
    """The unbiased standard deviation over all entries of the group, plus EPSILON; values are centred."""
    count = group_sum(valid.to(values.dtype), group_id, num_groups, reduce)
    squares = group_sum(values ** 2, group_id, num_groups, reduce)
    return ((squares / (count - 1)).sqrt() + EPSILON)[group_id][:, None].expand_as(values)


def spread_return_to_go(values, token_index, num_tokens: int):
    """A token gets the sum of the entries that stand at or behind it (Tango eq. 6). -> (N, T)"""
    per_token = torch.zeros(len(values), num_tokens, dtype=values.dtype, device=values.device).scatter_add_(1, token_index, values)
    return per_token.flip(1).cumsum(1).flip(1)


def normalised(rewards, group_id, num_groups: int, center: Callable = center_mean, scale: Callable = scale_std, reduce: Callable = alone,
               zero_if_equal: bool = True):
    """Entries less their centre, over their scale; 0 where invalid and, if wanted, in groups whose entries are all equal. -> (N, K)"""
    valid = rewards.valid
    values = rewards.values.masked_fill(~valid, 0.0)
    where = (valid, group_id, num_groups, reduce)
    centred = (values - center(values, *where)).masked_fill(~valid, 0.0)
    result = (centred / scale(centred, *where)).masked_fill(~valid, 0.0)
    if not zero_if_equal:
        return result
    largest, smallest = (sign * group_max((sign * values).masked_fill(~valid, float("-inf")), group_id, num_groups, reduce) for sign in (1, -1))
    return result.masked_fill((largest <= smallest)[group_id][:, None], 0.0)


# Triton

@jit
def load_entries(values, valid, row, K, BLOCK_K: tl.constexpr):
    """The entries of a rollout and whether they count."""
    k = tl.arange(0, BLOCK_K)
    ok = tl.load(valid + row * K + k, mask=k < K, other=0) != 0
    return tl.load(values + row * K + k, mask=ok, other=0.0).to(tl.float32), ok


@jit(do_not_specialize=["K", "T"], do_not_specialize_on_alignment=["values", "token_index", "valid", "order", "first", "last", "out"])
def rollout_rows(values, token_index, valid, order, first, last, out, weight, K, T, EPS: tl.constexpr, BLOCK_K: tl.constexpr,
                 BLOCK_T: tl.constexpr):
    """One program per rollout, which adds to out; order[first: last] are the rollouts of its group."""
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(first + row).to(tl.int32), tl.load(last + row).to(tl.int32)
    count = tl.zeros([BLOCK_K], tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    smallest = tl.full([BLOCK_K], float("inf"), tl.float32)
    largest = tl.full([BLOCK_K], float("-inf"), tl.float32)
    for i in range(start, end):
        x, ok = load_entries(values, valid, tl.load(order + i), K, BLOCK_K)
        count += tl.where(ok, 1.0, 0.0)
        total += x
        smallest = tl.minimum(smallest, tl.where(ok, x, float("inf")))
        largest = tl.maximum(largest, tl.where(ok, x, float("-inf")))
    num_entries = tl.sum(count, axis=0)
    mean = tl.sum(total, axis=0) / tl.maximum(num_entries, 1.0)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for i in range(start, end):
        x, ok = load_entries(values, valid, tl.load(order + i), K, BLOCK_K)
        squares += tl.where(ok, (x - mean) * (x - mean), 0.0)
    std = tl.sqrt(tl.sum(squares, axis=0) / tl.maximum(num_entries - 1.0, 1.0)) + EPS
    x, ok = load_entries(values, valid, row, K, BLOCK_K)
    equal = tl.max(largest, axis=0) <= tl.min(smallest, axis=0)
    scaled = tl.where(equal, mean - mean, weight * (x - mean) / std)  # 0, but NaN where the mean is
    scaled = tl.where(ok, scaled, 0.0)
    k = tl.arange(0, BLOCK_K)
    at = tl.load(token_index + row * K + k, mask=k < K, other=0)
    for t_start in range(0, T, BLOCK_T):
        t = t_start + tl.arange(0, BLOCK_T)
        advantage = tl.sum(tl.where(at[None, :] >= t[:, None], scaled[None, :], 0.0), axis=1)  # (BLOCK_T,)
        before = tl.load(out + row * T + t, mask=t < T, other=0.0)
        tl.store(out + row * T + t, before + advantage, mask=t < T)


def triton_group_advantages(sources, group_id, num_tokens: int):
    out = torch.zeros(len(group_id), num_tokens, device=group_id.device)
    order, first, last = group_id.argsort(stable=True), first_of_group(group_id), first_of_group(group_id, right=True)
    for weight, rewards in sources:
        K = rewards.values.shape[1]
        block = max(16, power_of_two(K))  # few sizes, so that few kernels are compiled
        rollout_rows[(len(group_id),)](
            rewards.values.contiguous(), rewards.token_index.contiguous(), rewards.valid.contiguous().view(torch.uint8), order, first, last, out,
            float(weight), K, num_tokens, EPS=EPSILON, BLOCK_K=block, BLOCK_T=max(16, 2048 // block))
    return out


def group_advantages(sources: list, group_id, num_tokens: int, use_triton: bool | None = None):
    """Advantages (N, T): the weighted sum over reward sources of normalised, spread rewards (Tango eq. 4-7).

    sources: (weight, rewards) pairs, for Tango (1 - alpha, outcomes) and (alpha, steps), with rewards a nanochat.rl.advantages.SparseRewards:
    values (N, K) fp32, token_index (N, K) int64, valid (N, K) bool. group_id (N,) int64 names groups by any numbers, in any order. An entry
    is normalised by the mean and the unbiased standard deviation (+ 1e-6) over all valid entries of its source and group; a token gets the sum of
    the entries that stand at or behind it. Rollouts without valid entries take no part and get 0; so do, exactly, groups whose entries are all
    equal or one. use_triton None: by device; True on CPU tensors needs TRITON_INTERPRET=1.
    """
    if use_triton is None:
        use_triton = all(takes_triton(rewards.values) for _, rewards in sources)
    if use_triton and len(group_id):
        return triton_group_advantages(sources, group_id, num_tokens)
    group, num_groups = first_of_group(group_id), max(1, len(group_id))
    return sum(weight * spread_return_to_go(normalised(rewards, group, num_groups), rewards.token_index, num_tokens) for weight, rewards in sources)
