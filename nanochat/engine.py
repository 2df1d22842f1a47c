"""
Sampling: many ragged prompts x G rows in one batch.

Each prompt is run once and its cache is shared out to its rows; rows that end leave the batch; the logprobs of exactly the
distribution that was sampled are recorded. Noise is a function of (row key, position) alone, so that the rows of a batch may be
split over ranks, reordered or resumed without changing what they draw.
"""
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanochat.attention import FAR, KVCache
from nanochat.common import BadInput, wide_dtype

COMPACT_BELOW = 0.8  # drop finished rows once less than this share of the batch is alive


@dataclass
class Samples:
    """N sampled completions. Rows are prompt-major: row p*G + g is sample g of prompt p.

    tokens (N, T) int64, the end token included, 0 behind it; logprobs (N, T) fp32, 0 behind the end; lengths (N,) int64;
    stopped (N,) bool: True where the row ended itself (finish reason "stop"), False where it ran out of tokens ("length").
    """
    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor
    stopped: torch.Tensor


def row_key(*parts) -> int:
    """A 64-bit key from any printable parts, for example (seed, step, role, problem index, sample index)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform_noise(keys: torch.Tensor, position: int) -> torch.Tensor:
    """One uniform number in [0, 1) per row, a hash (splitmix64) of its key and the position. keys (B,) int64 -> (B,)."""
    offset = ((position + 1) * 0x9E3779B97F4A7C15 + 2 ** 63) % 2 ** 64 - 2 ** 63  # as a signed 64-bit number
    x = keys + offset  # wraps modulo 2^64, as all arithmetic here
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    dtype = wide_dtype(keys.device)
    bits = 53 if dtype == torch.float64 else 24
    return ((x >> (64 - bits)) & ((1 << bits) - 1)).to(dtype) / (1 << bits)


def pick(logits: torch.Tensor, keys: torch.Tensor, position: int, temperature: float, top_k: int):
    """Next tokens and their logprobs under the distribution drawn from.

    logits (B, V) fp32, keys (B,) int64 -> tokens (B,) int64, logprobs (B,) fp32. temperature 0 is greedy (logprobs at temperature
    1); top_k 0 is the full softmax.
    """
    if temperature == 0:
        logprobs, tokens = torch.log_softmax(logits, dim=-1).max(dim=-1)
        return tokens, logprobs
    logits = logits / temperature
    if top_k > 0:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    logprobs = torch.log_softmax(logits, dim=-1)  # (B, V)
    noise = uniform_noise(keys, position)
    cumulative = logprobs.to(noise.dtype).exp().cumsum(dim=-1)
    # The first column whose cumulative probability exceeds the noise; scaled by the last, so that rounding cannot miss.
    tokens = torch.searchsorted(cumulative, (noise[:, None] * cumulative[:, -1:]), right=True).squeeze(1)
    # A rounding up to the total would land behind the last possible token.
    last = (logprobs > float("-inf")).long().cumsum(dim=-1).argmax(dim=-1)
    tokens = torch.minimum(tokens, last)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


@torch.no_grad()
def generate(model, prompts: list[list[int]], num_samples: int, *, max_new_tokens: int, stop_tokens: list[int], keys: list[int],
             temperature: float = 1.0, top_k: int = 0, max_rows: int = 1024,
             should_stop: Callable[[], bool] = lambda: False) -> Samples:
    """Samples `num_samples` completions of each of P prompts.

    keys: one int64 per row (P * num_samples), see `row_key`. max_rows bounds the rows that decode together. When should_stop() turns
    true the call returns at once with unfinished rows, for the caller to throw away.
    Raises BadInput for an empty prompt and for one that does not fit the context with its completion.
    """
    context = model.config.sequence_len
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= context - max_new_tokens:
            raise BadInput(f"prompt {i} has {len(prompt)} tokens: with {max_new_tokens} new ones it must have 1 to {context - max_new_tokens} "
                             f"(context {context})")
    assert len(keys) == len(prompts) * num_samples
    device = model.lm_head.weight.device
    N = len(keys)
    out = Samples(torch.zeros(N, max_new_tokens, dtype=torch.long, device=device), torch.zeros(N, max_new_tokens, device=device),
                  torch.zeros(N, dtype=torch.long, device=device), torch.zeros(N, dtype=torch.bool, device=device))
    keys = torch.tensor(keys, dtype=torch.long, device=device)
    stop_tokens = torch.tensor(stop_tokens, dtype=torch.long, device=device)
    # Prompts of like length go together, so that little is padding.
    order = sorted(range(N), key=lambda n: len(prompts[n // num_samples]))
    for start in range(0, N, max_rows):
        if should_stop():
            break
        rows = order[start: start + max_rows]
        chosen = {p: i for i, p in enumerate(dict.fromkeys(n // num_samples for n in rows))}  # prompt -> its place in the batch
        share = torch.tensor([chosen[n // num_samples] for n in rows], device=device)
        _generate_batch(model, [prompts[p] for p in chosen], share, torch.tensor(rows, device=device), out, keys, stop_tokens, temperature, top_k,
                        should_stop)
    width = max(int(out.lengths.max()), 1) if N else 0
    return Samples(out.tokens[:, :width].contiguous(), out.logprobs[:, :width].contiguous(), out.lengths, out.stopped)


def _generate_batch(model, prompts, share, rows, out, keys, stop_tokens, temperature, top_k, should_stop):
    """Fills the given rows of `out` with completions of these prompts; share (B,) is the prompt of each row."""
    device, max_new_tokens = rows.device, out.tokens.shape[1]
    ids, positions = pad_prompts(prompts, device)
    cache = KVCache(model.config.n_layer, capacity=ids.shape[1] + max_new_tokens)
    hidden = model.trunk(ids, positions=positions, cache=cache)  # (P, Tp, C)
    ends = (positions < FAR).sum(dim=1) - 1
    hidden = hidden[torch.arange(len(prompts), device=device), ends]  # (P, C)
    cache.select(share)
    logits = model.head(hidden)[share]  # (B, V)
    next_position = (ends + 1)[share]   # (B,)
    finished = torch.zeros(len(rows), dtype=torch.bool, device=device)
    for t in range(max_new_tokens):
        tokens, logprobs = pick(logits, keys[rows], t, temperature, top_k)
        live = rows[~finished]
        out.tokens[live, t], out.logprobs[live, t] = tokens[~finished], logprobs[~finished]
        out.lengths[live] = t + 1
        ended = torch.isin(tokens, stop_tokens) & ~finished
        out.stopped[rows[ended]] = True
        finished = finished | ended
        alive = len(rows) - int(finished.sum())
        if alive == 0 or t + 1 == max_new_tokens or should_stop():
            return
        if alive < COMPACT_BELOW * len(rows):
            keep = (~finished).nonzero().squeeze(1)
            cache.select(keep)
            rows, tokens, next_position, finished = rows[keep], tokens[keep], next_position[keep], finished[keep]
        hidden = model.trunk(tokens[:, None], positions=next_position[:, None], cache=cache)  # (B, 1, C)
        logits = model.head(hidden[:, 0])
        next_position = next_position + 1


def pad_prompts(prompts: list[list[int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and their positions (FAR on padding). -> two of (P, Tp) int64."""
    width = max(map(len, prompts))
    ids = torch.tensor([p + [0] * (width - len(p)) for p in prompts], device=device)
    positions = torch.tensor([list(range(len(p))) + [FAR] * (width - len(p)) for p in prompts], device=device)
    return ids, positions
