"""
Attention of one new query per row over the row's own keys and over those of the prompt that it continues.

Decoding is bound by reading keys and values. A program reads a range of one row's keys for all query heads that share
them. Where rows and key heads are too few to fill the GPU, a row's keys are split over several programs, whose results
a second kernel joins (flash-decoding, Dao et al. 2023). Everything that changes from token to token is read on the
device, so that a CUDA graph can replay the call.

n rows in some of B places, S prompts, Hkv key heads, `group` query heads of each, D head size.
"""
import functools

import torch

from nanochat.kernels.launch import jit, power_of_two, tl

LOG2_E = 1.4426950408889634  # exp(x) = 2^(x log2 e): the GPU has an instruction for 2^x
LEAST_KEYS = 256             # keys from which another split of a row pays


# Triton

@jit
def softmax_step(scores, v, largest, total, out):
    """One step of the online softmax, over a block of keys. scores (rows, keys) in units of log 2, -inf where a row may
    not look; v (keys, D).

    largest, total (rows,): the maximum of the scores and the sum of 2^(score - largest); out (rows, D): the sum of
    these times the values. All fp32; the factors of the product with the values are rounded to the values' dtype once.
    """
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # nothing seen as yet
    p = tl.exp2(scores - finite[:, None])
    rescale = tl.exp2(largest - finite)
    out = out * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new_largest, total * rescale + tl.sum(p, axis=1), out


@jit
def decode_block(q, k, v, k_column, v_column, start, first, last, largest, total, out, scale, D: tl.constexpr,
                 BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """softmax_step over BLOCK keys from `start` on, of which first .. last - 1 are seen. scale: to units of log 2."""
    columns, channels = start + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    seen = (columns >= first) & (columns < last)
    inside = seen[:, None] & (channels < D)[None, :]
    k_block = tl.load(k + columns[:, None].to(tl.int64) * k_column + channels[None, :], mask=inside, other=0.0)
    v_block = tl.load(v + columns[:, None].to(tl.int64) * v_column + channels[None, :], mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k_block), input_precision="ieee") * scale
    return softmax_step(tl.where(seen[None, :], scores, float("-inf")), v_block, largest, total, out)


@jit(do_not_specialize=["window", "splits"],
     do_not_specialize_on_alignment=["places", "lengths", "prefix_lengths", "slots", "out", "partial", "partial_lse"])
def decode_rows(q, k, v, places, lengths, prefix_k, prefix_v, prefix_lengths, slots, out, partial, partial_lse,
                q_row, q_head, q_member, k_row, k_head, k_column, v_row, v_head, v_column,
                prefix_k_row, prefix_k_head, prefix_k_column, prefix_v_row, prefix_v_head, prefix_v_column,
                window, scale, splits, Hkv: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
                BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and key head (axis 0) and split of its keys (axis 1). Blocks of keys start at multiples of
    BLOCK in the prompt and among own keys, from the first block that the window reaches; each split takes as many."""
    row = (tl.program_id(0) // Hkv).to(tl.int64)
    head = (tl.program_id(0) % Hkv).to(tl.int64)
    split = tl.program_id(1)
    place = tl.load(places + row)
    length = tl.load(lengths + place).to(tl.int32)
    slot = tl.load(slots + place)
    before = tl.load(prefix_lengths + slot, mask=length > 0, other=0).to(tl.int32)
    first = before + length - 1 - window  # the earliest position that is seen
    prefix_start = tl.minimum(tl.maximum(first, 0), before) // BLOCK
    own_start = tl.minimum(tl.maximum(first - before, 0), length) // BLOCK
    prefix_blocks = tl.cdiv(before, BLOCK) - prefix_start
    if first >= before:
        prefix_blocks = 0
    blocks = prefix_blocks + tl.cdiv(length, BLOCK) - own_start
    share = tl.cdiv(blocks, splits)
    start = tl.minimum(split * share, blocks)
    end = tl.minimum(start + share, blocks)

    members, channels = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    inside = (members < GROUP)[:, None] & (channels < D)[None, :]
    q = tl.load(q + row * q_row + head * q_head + members[:, None] * q_member + channels[None, :], mask=inside,
                other=0.0)
    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    prefix_k += slot * prefix_k_row + head * prefix_k_head
    prefix_v += slot * prefix_v_row + head * prefix_v_head
    for block in range(start, tl.minimum(end, prefix_blocks)):
        largest, total, sums = decode_block(q, prefix_k, prefix_v, prefix_k_column, prefix_v_column,
                                            (prefix_start + block) * BLOCK, first, before, largest, total, sums, scale,
                                            D, BLOCK, BLOCK_D)
    k += place * k_row + head * k_head
    v += place * v_row + head * v_head
    for block in range(tl.maximum(start, prefix_blocks), end):
        largest, total, sums = decode_block(q, k, v, k_column, v_column, (own_start + block - prefix_blocks) * BLOCK,
                                            first - before, length, largest, total, sums, scale, D, BLOCK, BLOCK_D)
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]  # no keys: zeros
    to = tl.program_id(0).to(tl.int64) * GROUP + members
    if SPLIT:
        to += split.to(tl.int64) * tl.num_programs(0) * GROUP
        tl.store(partial + to[:, None] * D + channels[None, :], sums, mask=inside)
        tl.store(partial_lse + to, largest + tl.log2(total), mask=members < GROUP)
    else:
        tl.store(out + to[:, None] * D + channels[None, :], sums.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["splits", "rows"], do_not_specialize_on_alignment=["partial", "partial_lse", "out"])
def join_splits(partial, partial_lse, out, splits, rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program per row and query head: the results of the splits, weighted by their shares of the softmax."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK_D)
    largest = float("-inf")
    for split in range(0, splits):
        largest = tl.maximum(largest, tl.load(partial_lse + row + split * rows))
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # no keys: zeros
    total = 0.0
    sums = tl.zeros([BLOCK_D], tl.float32)
    for split in range(0, splits):
        place = row + split * rows
        weight = tl.exp2(tl.load(partial_lse + place) - largest)
        sums += weight * tl.load(partial + place * D + channels, mask=channels < D, other=0.0)
        total += weight
    sums = sums / tl.where(total > 0, total, 1.0)
    tl.store(out + row * D + channels, sums.to(out.dtype.element_ty), mask=channels < D)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def num_splits(programs: int, columns: int, multiprocessors: int) -> int:
    """Into how many parts to split the keys of a row, so that each multiprocessor gets about four programs, but none
    less than LEAST_KEYS of a full row. By sizes alone: a graph keeps it whatever the lengths."""
    return max(1, min(4 * multiprocessors // max(1, programs), columns // LEAST_KEYS))


def keys_of_block(D: int, dtype: torch.dtype) -> int:
    """How many keys a program reads at a time; as in training, so that rounding is the same."""
    return 64 if dtype != torch.float32 and D <= 128 else 32


def warps_of(dtype: torch.dtype) -> int:
    """Of a program. fp32 has no matrix instructions: its products hold more in registers."""
    return 8 if dtype == torch.float32 else 4


def decode_attention(q, k, v, places, lengths, prefix_k, prefix_v, prefix_lengths, slots, window: int,
                     splits: int | None = None):
    """Attention of one query per row, the newest of its tokens.

    q (n, Hkv, group, D); places (n,) int64: where among B places a row's own keys and values are. k, v (B, Hkv,
    capacity, D): of these, lengths (B,) int64 columns are filled, the query's own included; 0: an idle place, whose
    output is 0. prefix_k, prefix_v (S, Hkv, Tp, D), of which prefix_lengths (S,) int64 columns are filled; slots (B,)
    int64: the prompt that a place's row continues. Any strides, the last one 1. The query sees itself and the `window`
    positions before it. splits None: by sizes. -> (n, Hkv, group, D) of q's dtype. Scores are scaled by 1/sqrt(D).

    `group` is padded to 16, the least that a matrix instruction takes. Its work is still below what the GPU does in the
    time of reading the keys: 16 multiplications a byte in bf16.
    """
    n, Hkv, group, D = q.shape
    assert all(x.stride(-1) == 1 for x in (q, k, v, prefix_k, prefix_v))
    out = torch.empty(n, Hkv, group, D, dtype=q.dtype, device=q.device)
    if splits is None:
        splits = num_splits(n * Hkv, k.shape[2] + prefix_k.shape[2], num_multiprocessors(q.device))
    partial, partial_lse = out, out
    if splits > 1:
        partial = torch.empty(splits, n, Hkv, group, D, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(splits, n, Hkv, group, dtype=torch.float32, device=q.device)
    BLOCK_D = max(16, power_of_two(D))
    strides = (stride for x in (q, k, v, prefix_k, prefix_v) for stride in x.stride()[:3])
    decode_rows[(n * Hkv, splits)](q, k, v, places, lengths, prefix_k, prefix_v, prefix_lengths, slots, out, partial,
                                   partial_lse, *strides, window, D ** -0.5 * LOG2_E, splits, Hkv=Hkv, GROUP=group,
                                   D=D, SPLIT=splits > 1, BLOCK_G=max(16, power_of_two(group)), BLOCK_D=BLOCK_D,
                                   BLOCK=keys_of_block(D, k.dtype), num_warps=warps_of(k.dtype), num_stages=3)
    if splits > 1:
        join_splits[(n * Hkv * group,)](partial, partial_lse, out, splits, n * Hkv * group, D=D,
                                        BLOCK_D=BLOCK_D, num_warps=1)
    return out


# PyTorch

def decode_attention_plain(q, k, v, places, lengths, prefix_k, prefix_v, prefix_lengths, slots, window: int):
    """As decode_attention, in a few products. Rows of one prompt that follow one another read it together. Columns that
    are not filled are read too: they must be numbers."""
    if not k.is_cuda:  # there it would wait
        k, v = (x[:, :, : max(1, int(lengths[places].max()))] for x in (k, v))
    k, v, lengths, slots = (x[places] for x in (k, v, lengths, slots))
    before = prefix_lengths[slots]
    first = before + lengths - 1 - window  # the earliest position that each row sees
    prefix, own = (torch.arange(x.shape[2], device=q.device) for x in (prefix_k, k))
    seen = torch.cat([(prefix >= first[:, None]) & (prefix < before[:, None]),
                      (own >= (first - before)[:, None]) & (own < lengths[:, None])], dim=1)
    seen = (seen & (lengths > 0)[:, None])[:, None, None]                         # (n, 1, 1, Tp + columns)
    units, unit, counts = slots.unique_consecutive(return_inverse=True, return_counts=True)
    member = torch.arange(len(q), device=q.device) - (counts.cumsum(0) - counts)[unit]
    table = q.new_zeros(len(units), int(counts.max()), *q.shape[1:])              # (U, R, Hkv, group, D)
    table[unit, member] = q
    queries = table.transpose(1, 2)
    of_prefix = queries.flatten(2, 3) @ prefix_k[units].mT                        # (U, Hkv, R * group, Tp)
    of_prefix = of_prefix.unflatten(2, queries.shape[2:4]).transpose(1, 2)[unit, member]
    scores = torch.cat([of_prefix, q @ k.mT], dim=-1).to(torch.promote_types(q.dtype, torch.float32))
    scores = (scores * q.shape[3] ** -0.5).masked_fill(~seen, float("-inf"))      # (n, Hkv, group, Tp + columns)
    p = torch.softmax(scores, dim=-1).masked_fill(~seen, 0.0).to(q.dtype)         # zeros, not NaN, of idle places
    table = p.new_zeros(len(units), queries.shape[2], *p.shape[1:3], len(prefix))
    table[unit, member] = p[..., : len(prefix)]
    y = table.transpose(1, 2).flatten(2, 3) @ prefix_v[units]                     # (U, Hkv, R * group, D)
    return y.unflatten(2, queries.shape[2:4]).transpose(1, 2)[unit, member] + p[..., len(prefix):] @ v
