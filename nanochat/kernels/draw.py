"""
Drawing tokens from rows of logits: temperature, top-k, softmax, noise, draw and logprob in two launches, with one
reading of the rows.

The first launch has one program per row and segment of columns: the segment's largest logit and its sum of
exponentials. The second has one program per row: it finds the segment that the noise falls into, and the column in it.
The PyTorch version is engine.pick, whose rule this is: the first column where the cumulative weight exceeds noise times
total, and where rounding leaves none, the last column that has any weight. A row that holds no number or +inf gets some
token of the vocabulary and the logprob NaN.
"""
import torch

from nanochat.kernels.launch import jit, power_of_two, tl
from nanochat.kernels.linear_logprob import logit_and_slope

SEGMENT = 4096  # columns of a segment


@jit
def segment_logits(z_row, width, vocab_size, segment, kth, softcap, temperature, HAS_SOFTCAP: tl.constexpr,
                   HAS_TOP_K: tl.constexpr, SEGMENT: tl.constexpr):
    """Columns of a segment and their logits, -inf where nothing is to be drawn. kth: the smallest raw logit to keep.
    Loads are masked by the width of a row, most often a multiple of 16, so that they are of 16 bytes a thread."""
    columns = segment * SEGMENT + tl.arange(0, SEGMENT)
    z = tl.load(z_row + columns, mask=columns < width, other=0.0).to(tl.float32)
    u, _ = logit_and_slope(z, softcap, temperature, HAS_SOFTCAP)
    inside = columns < vocab_size
    if HAS_TOP_K:
        inside = inside & (z >= kth)
    return columns, tl.where(inside, u, float("-inf"))


@jit
def exponentials(u, largest):
    """exp(u - largest), 0 for logits of -inf also where the largest is."""
    return tl.exp(tl.where(u == float("-inf"), u, u - largest))


@jit
def uniform(key, position):
    """engine.uniform_noise: 53 bits of splitmix64 of a key and a position, as a number in [0, 1). fp64."""
    x = key + (position + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15; wraps modulo 2^64
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * (1.0 / 9007199254740992)


@jit
def first_above(weights, target, places):
    """The first place whose cumulative weight exceeds the target, else the last that has weight; the weight before."""
    wide = weights.to(tl.float64)
    cumulative = tl.cumsum(wide, axis=0)
    last = tl.max(tl.where(weights > 0, places, 0), axis=0)
    place = tl.min(tl.where((weights > 0) & (cumulative > target), places, last), axis=0)
    return place, tl.sum(tl.where(places < place, wide, 0.0), axis=0)


@jit(do_not_specialize=["vocab_size"])
def segment_statistics(z_pointer, stride, width, vocab_size, kth, largest, totals, softcap, temperature,
                       HAS_SOFTCAP: tl.constexpr, HAS_TOP_K: tl.constexpr, SEGMENT: tl.constexpr):
    """One program per row and segment: its largest logit, and its sum of exp(logit - largest)."""
    row, segment = tl.program_id(0), tl.program_id(1)
    smallest = 0.0
    if HAS_TOP_K:
        smallest = tl.load(kth + row).to(tl.float32)
    _, u = segment_logits(z_pointer + row.to(tl.int64) * stride, width, vocab_size, segment, smallest, softcap,
                          temperature, HAS_SOFTCAP, HAS_TOP_K, SEGMENT)
    highest = tl.max(u, axis=0)
    at = row * tl.num_programs(1) + segment
    tl.store(largest + at, highest)
    tl.store(totals + at, tl.sum(exponentials(u, highest), axis=0))


@jit(do_not_specialize=["vocab_size", "num_segments", "position_stride"],
     do_not_specialize_on_alignment=["keys", "positions"])
def draw_rows(z_pointer, stride, width, vocab_size, kth, largest, totals, num_segments, keys, positions,
              position_stride, tokens, logprobs, softcap, temperature, GREEDY: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
              HAS_TOP_K: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr):
    """One program per row: its token and the token's logprob."""
    row = tl.program_id(0)
    segments = tl.arange(0, SEGMENTS)
    there = segments < num_segments
    highs = tl.load(largest + row * num_segments + segments, mask=there, other=float("-inf"))
    highest = tl.max(highs, axis=0)
    scales = exponentials(highs, highest)
    masses = scales * tl.load(totals + row * num_segments + segments, mask=there, other=0.0)
    total = tl.sum(masses.to(tl.float64), axis=0)
    smallest = 0.0
    if HAS_TOP_K:
        smallest = tl.load(kth + row).to(tl.float32)
    if GREEDY:
        segment = tl.min(tl.where(highs == highest, segments, SEGMENTS), axis=0) % num_segments
    else:
        noise = uniform(tl.load(keys + row), tl.load(positions + row * position_stride))
        segment, before = first_above(masses, noise * total, segments)
    columns, u = segment_logits(z_pointer + row.to(tl.int64) * stride, width, vocab_size, segment, smallest, softcap,
                                temperature, HAS_SOFTCAP, HAS_TOP_K, SEGMENT)
    if GREEDY:
        column = tl.min(tl.where(u == tl.max(u, axis=0), columns, segment * SEGMENT + SEGMENT), axis=0)
        column = tl.where(column < vocab_size, column, 0)  # no column equals a maximum of NaNs
    else:
        column, _ = first_above(exponentials(u, highest), noise * total - before, columns)
    logit = tl.sum(tl.where(columns == column, u, 0.0), axis=0)
    tl.store(tokens + row, column.to(tl.int64))
    tl.store(logprobs + row, logit - highest - tl.log(total.to(tl.float32)))


def draw(z, keys, position, *, vocab_size: int, softcap: float | None, temperature: float, top_k: int = 0):
    """Next tokens and their logprobs, from the raw outputs of an LM head.

    z (B, columns >= vocab_size) bf16, fp16 or fp32, rows of any stride: logits are softcap * tanh(z / softcap) (None: z
    itself) over the temperature. keys (B,) int64; position: an int, or an int64 tensor of one element or B. temperature
    0 takes the largest logit, the first of equal ones, with its logprob at temperature 1. top_k > 0 keeps logits that
    are not below the k-th largest, which torch.topk finds. -> tokens (B,) int64, logprobs (B,) fp32. On CPU tensors
    needs TRITON_INTERPRET=1.
    """
    B, greedy = len(z), temperature == 0
    assert z.stride(1) == 1 and z.shape[1] >= vocab_size and keys.shape == (B,)
    positions = position if isinstance(position, torch.Tensor) else keys.new_full((1,), position)
    tokens, logprobs = torch.empty_like(keys), torch.empty(B, device=z.device)
    if not B:
        return tokens, logprobs
    top_k = 0 if greedy or top_k >= vocab_size else top_k
    kth = z[:, :vocab_size].topk(top_k, dim=1).values[:, -1].contiguous() if top_k else logprobs
    segment = min(SEGMENT, power_of_two(vocab_size))
    num_segments = -(-vocab_size // segment)
    largest, totals = torch.empty(2, B, num_segments, device=z.device)
    sizes = z.stride(0), z.shape[1], vocab_size
    head = dict(softcap=float(softcap or 1.0), temperature=float(temperature or 1.0), HAS_SOFTCAP=softcap is not None,
                HAS_TOP_K=top_k > 0, SEGMENT=segment, num_warps=max(1, segment // 512))
    segment_statistics[(B, num_segments)](z, *sizes, kth, largest, totals, **head)
    draw_rows[(B,)](z, *sizes, kth, largest, totals, num_segments, keys.contiguous(),
                    positions.contiguous(), int(positions.numel() > 1), tokens, logprobs, GREEDY=greedy,
                    SEGMENTS=power_of_two(num_segments), **head)
    return tokens, logprobs
