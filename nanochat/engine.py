"""
Sampling: many ragged prompts x G rows in one batch.

Each prompt is run once (twice where max_rows splits its rows), and its rows read its keys where they are; rows that end
leave the batch; the logprobs of exactly the distribution that was sampled are recorded. Noise is a function of (row
key, position) alone, so that the rows of a batch may be split over ranks, reordered or resumed without changing what
they draw.
"""
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.attention import PADDING_POSITION, KVCache
from nanochat.common import BadInput, wide_dtype
from nanochat.kernels import cpu
from nanochat.kernels.draw import draw
from nanochat.kernels.launch import takes_triton
from nanochat.weights import inference_model

COMPACT_BELOW = 0.8    # drop finished rows once less than this share of the batch is alive
MAX_FILLED = 1.1       # rows of a batch per live one that sharing prompts may cost
CHECK_EVERY_CUDA = 16  # there, tokens between looks at which rows have ended; on CPU looking is free
COMPACT_BELOW_CUDA = 0.5
COLUMNS_CUDA = 256     # columns by which a cache grows there; each growth costs a new graph
PREFILL_TOKENS = 4096  # prompt tokens that go through the model at once
BLOCK = 64             # columns of the vocabulary that `pick` sums before it looks closer


# rows, the tokens they just got -> row: the token it must get next
Tool = Callable[[list[int], list[int]], dict[int, int]]


@dataclass
class Samples:
    """N sampled completions. Rows are prompt-major: row p*G + g is sample g of prompt p.

    tokens (N, T) int64, the end token included, 0 behind it; logprobs (N, T) fp32, 0 behind the end; lengths (N,)
    int64; stopped (N,) bool: True where the row ended itself (finish reason "stop"), False where it ran out of tokens
    ("length"); forced (N, T) bool: tokens that a tool put there (their logprobs are 0), None without a tool.
    """
    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor
    stopped: torch.Tensor
    forced: torch.Tensor | None = None


def row_key(*parts) -> int:
    """A 64-bit key from any printable parts, for example (seed, step, role, problem index, sample index)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform_noise(keys: torch.Tensor, position: torch.Tensor | int) -> torch.Tensor:
    """One uniform number in [0, 1) per row, a hash (splitmix64) of its key and the position. keys (B,) int64 ->
    (B,)."""
    position = torch.as_tensor(position, device=keys.device)
    x = keys + (position + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15; wraps modulo 2^64, as all arithmetic here
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    dtype = wide_dtype(keys.device)
    bits = 53 if dtype == torch.float64 else 24
    return ((x >> (64 - bits)) & ((1 << bits) - 1)).to(dtype) / (1 << bits)


def pick(logits: torch.Tensor, keys: torch.Tensor, position: torch.Tensor | int, temperature: float, top_k: int):
    """Next tokens and their logprobs under the distribution drawn from.

    logits (B, V) fp32, keys (B,) int64 -> tokens (B,) int64, logprobs (B,) fp32. temperature 0 is greedy (logprobs at
    temperature 1); top_k 0 is the full softmax.
    """
    if takes_triton(logits):
        return draw(logits, keys, position, vocab_size=logits.shape[1], softcap=None, temperature=temperature,
                    top_k=top_k)
    if temperature == 0:
        logprobs, tokens = torch.log_softmax(logits, dim=-1).max(dim=-1)
        return tokens, logprobs
    if temperature != 1:
        logits = logits / temperature
    if top_k > 0:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    noise = uniform_noise(keys, position)
    if cpu.takes_rows(logits):
        return _draw_kernel(logits, noise)
    highest = logits.amax(dim=-1, keepdim=True)
    weights = (logits - highest).exp_()  # (B, V)
    if weights.shape[1] % BLOCK:
        weights = F.pad(weights, (0, -weights.shape[1] % BLOCK))
    blocks = weights.view(len(weights), -1, BLOCK)
    # Where the cumulative weight first exceeds noise * total: the block, then the column in it.
    totals = blocks.sum(dim=-1).to(wide_dtype(logits.device)).cumsum(dim=-1)  # (B, V / BLOCK)
    target = noise[:, None] * totals[:, -1:]
    block = _first_above(totals, target)  # (B, 1)
    target = target - F.pad(totals, (1, 0)).gather(1, block)
    inside = (blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
              .to(totals.dtype).cumsum(dim=-1))  # (B, BLOCK)
    tokens = block * BLOCK + _first_above(inside, target)
    logprobs = logits.gather(1, tokens) - highest - totals[:, -1:].log().float()
    return tokens[:, 0], logprobs[:, 0]


def pick_behind(model, hidden: torch.Tensor, keys, position, temperature: float, top_k: int):
    """As pick of model.head(hidden). On CUDA the kernel reads the LM head's outputs: no fp32 logits are made."""
    if takes_triton(hidden):
        return draw(model.lm_head(hidden), keys, position, top_k=top_k, **model.head_options(temperature))
    return pick(model.head(hidden), keys, position, temperature, top_k)


def _draw_kernel(logits, noise):
    assert noise.shape == logits.shape[:1] and noise.dtype == torch.float64
    tokens, logprobs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
    cpu.call("draw", logits, logits.stride(0), *logits.shape, noise, tokens, logprobs)
    return tokens, logprobs


def _first_above(cumulative, target):
    """The first column above the target, the one that reaches the total where rounding leaves none. (B, n), (B, 1) ->
    (B, 1)."""
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def generate(model, prompts: list[list[int]], num_samples: int, *, max_new_tokens: int, stop_tokens: list[int],
             keys: list[int], temperature: float = 1.0, top_k: int = 0, max_rows: int = 1024,
             should_stop: Callable[[], bool] = lambda: False, tool: Tool | None = None) -> Samples:
    """Samples `num_samples` completions of each of P prompts.

    keys: one int64 per row (P * num_samples), see `row_key`. max_rows bounds the rows that decode together. When
    should_stop() turns true the call returns at once with unfinished rows, for the caller to throw away. tool: told the
    tokens that rows just got, it says which rows must get which token next (calculator.Calculator); the device then
    waits for it at every token. Raises BadInput for an empty prompt and for one that does not fit the context with its
    completion.
    """
    context = model.config.sequence_len
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= context - max_new_tokens:
            raise BadInput(f"prompt {i} has {len(prompt)} tokens: with {max_new_tokens} new ones "
                           f"it must have 1 to {context - max_new_tokens} (context {context})")
    assert len(keys) == len(prompts) * num_samples
    model = inference_model(model)
    with torch.inference_mode(), model.joined_projections():
        out = _generate(model, prompts, num_samples, max_new_tokens, stop_tokens, keys, temperature, top_k, max_rows,
                        should_stop, tool)
    N = len(keys)
    width = max(int(out.lengths[:N].max()), 1) if N else 1
    # Copies, made outside of inference mode: ordinary tensors, that training may keep.
    return Samples(out.tokens[:N, :width].clone(), out.logprobs[:N, :width].clone(), out.lengths[:N].clone(),
                   out.stopped[:N].clone(), out.forced[:N, :width].clone() if tool else None)


def _generate(model, prompts, num_samples, max_new_tokens, stop_tokens, keys, temperature, top_k, max_rows,
              should_stop, tool) -> Samples:
    """As generate, with one row more than there are: where rows write that have ended."""
    device = model.lm_head.weight.device
    N = len(keys)
    out = Samples(torch.zeros(N + 1, max_new_tokens, dtype=torch.long, device=device),
                  torch.zeros(N + 1, max_new_tokens, device=device),
                  torch.zeros(N + 1, dtype=torch.long, device=device),
                  torch.zeros(N + 1, dtype=torch.bool, device=device))
    if tool:
        out.forced = torch.zeros(N + 1, max_new_tokens, dtype=torch.bool, device=device)
    keys = torch.tensor(keys + [0], dtype=torch.long, device=device)
    stop_tokens = torch.tensor(stop_tokens, dtype=torch.long, device=device)
    # Prompts of like length go together, so that little is padding.
    order = sorted(range(N), key=lambda n: (len(prompts[n // num_samples]), n))
    for start in range(0, N, max_rows):
        if should_stop():
            break
        units: dict[int, list[int]] = {}  # prompt -> its rows
        for n in order[start: start + max_rows]:
            units.setdefault(n // num_samples, []).append(n)
        _decode(model, [prompts[p] for p in units], list(units.values()), out, keys, stop_tokens, temperature, top_k,
                max_rows, should_stop, tool)
    return out


def _decode(model, prompts, units, out, keys, stop_tokens, temperature, top_k, max_rows, should_stop, tool):
    """Fills rows of `out` with completions of these prompts; units[i] are the rows of prompt i."""
    ended, max_new_tokens = len(out.lengths) - 1, out.tokens.shape[1]
    graphs = uses_graphs(out.tokens.device)
    check_every, compact_below = (CHECK_EVERY_CUDA, COMPACT_BELOW_CUDA) if graphs else (1, COMPACT_BELOW)
    prefix, hidden = prefill(model, prompts)
    unit, table = arrange(units, ended, max_rows)
    prefix, rows = prefix.select(unit), table.flatten().to(hidden.device)  # (U, 1), (U * R,)
    unit = unit.repeat_interleave(table.shape[1]).to(hidden.device)        # (U * R,)
    positions = torch.tensor([[len(prompt)] for prompt in prompts], device=hidden.device)[unit]  # (B, 1)
    cache = KVCache(model.config.n_layer, capacity=min(COLUMNS_CUDA, max_new_tokens) if graphs else None)
    # the token that a row must get next, -1 for none
    due = torch.full((ended + 1,), -1, device=hidden.device) if tool else None

    def record(logits, rows, t):
        """Draws the next token of every row, writes it down and sends rows that have ended to the spare one. -> tokens,
        rows"""
        tokens, logprobs = pick(logits, keys[rows], t, temperature, top_k)
        if tool:
            out.forced[rows, t] = is_forced = due[rows] >= 0
            tokens, logprobs = torch.where(is_forced, due[rows], tokens), logprobs.masked_fill(is_forced, 0.0)
        out.tokens[rows, t], out.logprobs[rows, t] = tokens, logprobs
        out.lengths[rows] = t + 1
        stopped = (tokens[:, None] == stop_tokens).any(dim=1)
        out.stopped[rows] = stopped
        return tokens, rows.masked_fill(stopped, ended)

    def step(tokens, rows, positions, t, last_embedding):
        """One more token for every row; t (1,) tokens have been drawn. A function of device tensors alone."""
        cache.last_embedding = last_embedding
        if cache.capacity is not None:
            cache.column = t - 1
        hidden = model.trunk(tokens[:, None], positions=positions, cache=cache, prefix=prefix)  # (B, 1, C)
        return *record(model.head(hidden[:, 0]), rows, t), positions + 1, t + 1, cache.last_embedding

    state = (*record(model.head(hidden)[unit], rows, torch.zeros(1, dtype=torch.long, device=rows.device)), positions,
             torch.ones(1, dtype=torch.long, device=rows.device), None)
    replay = Replay(step) if graphs else step
    for drawn in range(1, max_new_tokens):
        if drawn % check_every == 0:
            is_live = state[1] < ended
            alive = int(is_live.sum())
            if alive == 0 or should_stop():
                return
            if alive < compact_below * len(is_live):
                is_live = is_live.tolist()
                R = len(is_live) // len(prefix.positions)
                live = [[p for p in range(u, u + R) if is_live[p]] for u in range(0, len(is_live), R)]
                unit, table = arrange(live, is_live.index(False), len(is_live))
                cache.last_embedding = state[4]
                prefix, cache = prefix.select(unit), cache.select(table)
                kept = table.flatten().to(state[0].device)
                state = (*(x[kept] for x in state[:3]), state[3], cache.last_embedding)
                replay = Replay(step) if graphs else step
        if cache.capacity is not None and drawn > cache.capacity:
            cache.reserve(min(COLUMNS_CUDA, max_new_tokens - cache.capacity))
            replay = Replay(step)
        if tool:
            ask_tool(tool, *state[:2], due)
        state = replay(*state)


def ask_tool(tool: Tool, tokens: torch.Tensor, rows: torch.Tensor, due: torch.Tensor) -> None:
    """Tells a tool what the live rows got, and leaves in `due` what they must get next. tokens, rows (B,); due has a
    place per row, the last for ended ones."""
    live = [(row, token) for row, token in zip(rows.tolist(), tokens.tolist(), strict=True) if row < len(due) - 1]
    forced = tool([row for row, _ in live], [token for _, token in live])
    due.fill_(-1)
    for row, token in forced.items():
        due[row] = token


def uses_graphs(device) -> bool:
    return device.type == "cuda"


class Replay:
    """A step on CUDA: run once as it is, then captured as a CUDA graph and replayed, so that its thousand launches cost
    one.

    The tensors that the second call gets are the graph's: every replay reads them and writes the results over them.
    """

    def __init__(self, step: Callable):
        self.step, self.calls, self.graph = step, 0, None

    def __call__(self, *state):
        self.calls += 1
        if self.calls == 1:
            return tuple(x.clone() for x in self.step(*state))  # the graph's tensors, shared with nothing
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                for old, new in zip(state, self.step(*state), strict=True):
                    old.copy_(new)
        self.graph.replay()
        return state


def prefill(model, prompts: list[list[int]]) -> tuple[KVCache, torch.Tensor]:
    """Runs prompts, sorted by length, in pieces of PREFILL_TOKENS. -> their cache, the hidden state (P, C) of each
    prompt's last token."""
    device, whole, hidden = model.lm_head.weight.device, KVCache(model.config.n_layer), []
    whole.length = width = max(map(len, prompts))
    start = 0
    while start < len(prompts):
        end = start + 1
        while end < len(prompts) and (end + 1 - start) * len(prompts[end]) <= PREFILL_TOKENS:
            end += 1
        ids, positions = pad_prompts(prompts[start:end], device)
        piece = KVCache(model.config.n_layer)
        states = model.trunk(ids, positions=positions, cache=piece, last_only=True)  # (p, 1, C)
        hidden.append(states[:, 0])
        if end - start == len(prompts):
            return piece, hidden[0]
        for name in ("k", "v"):
            for i, part in enumerate(getattr(piece, name)):
                if start == 0:
                    getattr(whole, name)[i] = part.new_zeros(len(prompts), *part.shape[1:3], width, part.shape[4])
                getattr(whole, name)[i][start:end, ..., : ids.shape[1], :] = part
        if start == 0:
            whole.positions = positions.new_full((len(prompts), width), PADDING_POSITION)
            whole.last_embedding = states.new_zeros(len(prompts), *piece.last_embedding.shape[1:])
        whole.positions[start:end, : ids.shape[1]] = positions
        whole.last_embedding[start:end] = piece.last_embedding
        start = end
    return whole, torch.cat(hidden)


def arrange(units: list[list[int]], filler: int, max_places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lays out the members of units as a table, all rows of a line from one unit; units may take several lines, or
    none.

    The lines are as long as they can be (so that keys of a prefix are read once for many rows) with at most MAX_FILLED
    places per member and `max_places` in all; places to spare hold `filler`. -> the unit of each line (U', 1) int64,
    the table (U', R) int64, both on CPU.
    """
    total = sum(map(len, units))
    widths = range(max(map(len, units)), 0, -1)
    R = next(r for r in widths if r * sum(-(-len(unit) // r) for unit in units) <= min(MAX_FILLED * total, max_places))
    lines = [(u, unit[i: i + R]) for u, unit in enumerate(units) for i in range(0, len(unit), R)]
    return torch.tensor([[u] for u, _ in lines]), torch.tensor([members + [filler] * (R - len(members))
                                                                for _, members in lines])


def pad_prompts(prompts: list[list[int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and their positions (PADDING_POSITION on padding). -> two of (P, Tp) int64."""
    width = max(map(len, prompts))
    ids = torch.tensor([p + [0] * (width - len(p)) for p in prompts], device=device)
    positions = torch.tensor([list(range(len(p))) + [PADDING_POSITION] * (width - len(p)) for p in prompts],
                             device=device)
    return ids, positions
