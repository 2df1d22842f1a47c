"""
The bookkeeping of a decoding step on CUDA, a launch before the trunk and one after the draw.

Integers alone are computed, and numbers are copied: results are those of the PyTorch versions, which stand where these
are called, DecodeCache.advance and engine.Decoding. On CPU tensors both need TRITON_INTERPRET=1.

n rows in some of B places, of N rows in all.
"""
import torch

from nanochat.kernels.launch import jit, tl

ROWS = 128  # of a program


@jit(do_not_specialize=["n"],
     do_not_specialize_on_alignment=["places", "num_own", "rests", "lengths", "slots", "prefix_lengths", "positions"])
def advance_rows(places, num_own, rests, lengths, slots, prefix_lengths, positions, n, ROWS: tl.constexpr):
    """ROWS rows of each program: the length of their places, and their positions."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = at < n
    place = tl.load(places + at, mask=here, other=0)
    length = tl.maximum(tl.load(num_own + at, mask=here, other=0) + tl.load(rests + place, mask=here, other=0), 1)
    before = tl.load(prefix_lengths + tl.load(slots + place, mask=here, other=0), mask=here, other=0)
    tl.store(lengths + place, length, mask=here)
    tl.store(positions + at, before + length - 1, mask=here)


def advance(places, num_own, rests, lengths, slots, prefix_lengths) -> torch.Tensor:
    """Makes num_own (n,) and the place's rests (B,) the lengths (B,) of these places (n,). -> the positions (n,) of the
    last of so many tokens after what is in the place's slot; slots (B,), prefix_lengths (S,). All int64."""
    positions, n = torch.empty_like(places), len(places)
    advance_rows[(-(-n // ROWS),)](places, num_own, rests, lengths, slots, prefix_lengths, positions, n, ROWS=ROWS,
                                   num_warps=4)
    return positions


@jit(do_not_specialize=["n", "N", "T", "num_stop"],
     do_not_specialize_on_alignment=["places", "rows", "t", "new", "new_logprobs", "stop_tokens", "row", "token",
                                     "drawn"])
def record_rows(places, rows, t, new, new_logprobs, stop_tokens, tokens, logprobs, row, token, drawn, n, N, T, num_stop,
                ROWS: tl.constexpr):
    """ROWS rows of each program: what they have drawn, and whether that ends them."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = at < n
    place = tl.load(places + at, mask=here, other=0)
    which = tl.load(rows + at, mask=here, other=0)
    when = tl.load(t + at, mask=here, other=0)
    got = tl.load(new + at, mask=here, other=0)
    tl.store(tokens + which * T + when, got, mask=here)
    tl.store(logprobs + which * T + when, tl.load(new_logprobs + at, mask=here, other=0.0), mask=here)
    tl.store(token + place, got, mask=here)
    tl.store(drawn + place, tl.minimum(when + 1, T - 1), mask=here)
    ends = when == T - 1
    for i in range(0, num_stop):
        ends = ends | (got == tl.load(stop_tokens + i))
    tl.store(row + place, tl.where(ends, N, which), mask=here)


def record(places, rows, t, new, new_logprobs, stop_tokens, tokens, logprobs, row, token, drawn) -> None:
    """Writes down what rows (n,) in these places (n,), which had t (n,) tokens, have drawn: new (n,), with logprobs
    (n,) fp32; all else is int64.

    tokens, logprobs (N + 1, T): of each row, the last of no row. Of each place (B,): row becomes N where the row ends,
    by a stop token or as it has T; token the new one, drawn t + 1, at most T - 1.
    """
    N, T, n = len(tokens) - 1, tokens.shape[1], len(places)
    assert tokens.is_contiguous() and logprobs.is_contiguous()
    record_rows[(-(-n // ROWS),)](places, rows, t, new, new_logprobs, stop_tokens, tokens, logprobs, row, token, drawn,
                                  n, N, T, len(stop_tokens), ROWS=ROWS, num_warps=4)
