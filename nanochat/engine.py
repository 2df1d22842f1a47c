"""
Sampling: many ragged prompts x G rows in one batch.

Each prompt is run once, and its rows read its keys where they are; a row that ends leaves its place to the next one
that waits; the logprobs of exactly the distribution that was sampled are recorded. Noise is a function of (row key,
position) alone, so that the rows of a batch may be split over ranks, reordered or resumed without changing what they
draw.
"""
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.attention import PADDING_POSITION, KVCache
from nanochat.common import BadInput, wide_dtype
from nanochat.decode_cache import DecodeCache
from nanochat.kernels import cpu
from nanochat.kernels.draw import draw
from nanochat.kernels.launch import takes_triton
from nanochat.seats import Seats
from nanochat.weights import inference_model

COMPACT_BELOW = 0.9    # drop places whose row has ended once less than this share of a batch is alive
CHECK_EVERY_CUDA = 16  # there, tokens between looks at which rows have ended; on CPU looking is free
LEAST_ROWS_CUDA = 8    # there a batch has all places or a half, a quarter, ... of them, as each size is a graph
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
    """As generate, with one row more than there are: where places write whose row has ended."""
    device, N = model.lm_head.weight.device, len(keys)
    out = Samples(torch.zeros(N + 1, max_new_tokens, dtype=torch.long, device=device),
                  torch.zeros(N + 1, max_new_tokens, device=device),
                  torch.zeros(N + 1, dtype=torch.long, device=device),
                  torch.zeros(N + 1, dtype=torch.bool, device=device))
    if tool:
        out.forced = torch.zeros(N + 1, max_new_tokens, dtype=torch.bool, device=device)
    if N == 0:
        return out
    keys = torch.tensor(keys + [0], dtype=torch.long, device=device)
    stop_tokens = torch.tensor(stop_tokens, dtype=torch.long, device=device)
    # the token that a row must get next, -1 for none
    due = torch.full((N + 1,), -1, device=device) if tool else None
    # Prompts of like length sit down together, so that little is padding when they are run.
    order = sorted(range(len(prompts)), key=lambda p: (len(prompts[p]), p))
    seats = Seats([(p, range(p * num_samples, (p + 1) * num_samples)) for p in order], min(max_rows, N))
    capacity = max(1, max_new_tokens - 1)  # the last token's keys are never read
    cache = DecodeCache(model.config, seats.num_places, seats.num_slots, num_samples, max(map(len, prompts)), capacity,
                        model.compute_dtype, device)
    # Of each slot: the hidden state of its prompt's last token. Of each place: its row (N when that has ended), the
    # last token that it drew, how many it has drawn.
    last_hidden = torch.zeros(seats.num_slots, model.config.n_embd, dtype=model.compute_dtype, device=device)
    row, token, drawn = (torch.full((seats.num_places,), value, device=device) for value in (N, 0, 1))

    def record(hidden, rows, t):
        """Draws the next token of each row, which has t (n,) already, and writes it down. hidden (n, C). -> tokens, rows, with N in
        place of those that have ended"""
        tokens, logprobs = pick_behind(model, hidden, keys[rows], t, temperature, top_k)
        if tool:
            out.forced[rows, t] = is_forced = due[rows] >= 0
            tokens, logprobs = torch.where(is_forced, due[rows], tokens), logprobs.masked_fill(is_forced, 0.0)
        out.tokens[rows, t], out.logprobs[rows, t] = tokens, logprobs
        out.lengths[rows] = t + 1
        stopped = (tokens[:, None] == stop_tokens).any(dim=1)
        out.stopped[rows] = stopped
        return tokens, rows.masked_fill(stopped | (t == max_new_tokens - 1), N)

    def admit():
        """Gives free places to waiting rows, and draws their first tokens."""
        rows, places, slots, new = seats.admit()
        for some in in_pieces(new, [len(prompts[p]) for p, _ in new]):
            at = torch.tensor([slot for _, slot in some], device=device)
            cached, last_hidden[at] = run_prompts(model, [prompts[p] for p, _ in some])
            cache.put(at, cached)
        rows, places, slots = (torch.tensor(x, device=device) for x in (rows, places, slots))
        cache.begin(places, slots)
        drawn[places] = 1
        token[places], row[places] = record(last_hidden[slots], rows, torch.zeros_like(rows))

    def step(places):
        """One more token for the rows in these places (n,). All that it reads and writes is on the device, in place."""
        rows, t = row[places], drawn[places]
        hidden = model.trunk(token[places, None], positions=cache.advance(places, t)[:, None], cache=cache)  # (n, 1, C)
        token[places], row[places] = record(hidden[:, 0], rows, t)
        drawn[places] = (t + 1).clamp_(max=capacity)

    graphs = Graphs(step) if uses_graphs(device) else None
    batch = None  # the places that decode together
    while not should_stop():
        if seats.may_admit():
            admit()
            batch = None
        rows = row.tolist()
        seats.release([place for place in seats.live if rows[place] == N])
        if seats.may_admit():  # rows have ended with their first token
            continue
        if not seats.live:
            break
        size = size_of_batch(seats, len(batch) if batch is not None else None, graphs)
        if batch is None or size < len(batch):
            batch = torch.tensor(seats.batch(size), device=device)
        for _ in range(CHECK_EVERY_CUDA if graphs else 1):
            if tool:
                ask_tool(tool, token[batch], row[batch], due)
            (graphs or step)(batch)
    return out


def size_of_batch(seats: Seats, size: int | None, graphs) -> int:
    """How many places should decode together, of `size` that do (None: not yet)."""
    alive = len(seats.live)
    if not graphs:
        return alive if size is None or alive < COMPACT_BELOW * size else size
    size = size or seats.num_places
    while size // 2 >= max(alive, LEAST_ROWS_CUDA):
        size //= 2
    return size


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


class Graphs:
    """A step on CUDA: for each size of a batch it runs once as it is, then is captured as a CUDA graph and replayed, so
    that its thousand launches cost one. The graphs share one pool of memory."""

    def __init__(self, step: Callable):
        self.step, self.pool = step, None
        self.places: dict[int, torch.Tensor] = {}  # by size: what the graph reads
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, places: torch.Tensor) -> None:
        size = len(places)
        if size not in self.places:
            self.places[size] = places.clone()
            self.step(places)
            return
        self.places[size].copy_(places)
        if size not in self.graphs:
            self.graphs[size] = self.capture(self.places[size])
        self.graphs[size].replay()

    def capture(self, places: torch.Tensor):
        """Records a step, without running it. torch.cuda.graph would give all cached memory back first."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(self.pool)
            try:
                self.step(places)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


def in_pieces(items: list, lengths: list[int]) -> list[list]:
    """Cuts items, sorted by length, so that a piece padded to its longest has at most PREFILL_TOKENS, or one item."""
    cut, start = [], 0
    for end in range(1, len(items) + 1):
        if end == len(items) or (end + 1 - start) * lengths[end] > PREFILL_TOKENS:
            cut.append(items[start:end])
            start = end
    return cut


def run_prompts(model, prompts: list[list[int]]) -> tuple[KVCache, torch.Tensor]:
    """Runs prompts at once. -> their cache, the hidden state (P, C) of each prompt's last token"""
    ids, positions = pad_prompts(prompts, model.lm_head.weight.device)
    cache = KVCache(model.config.n_layer)
    return cache, model.trunk(ids, positions=positions, cache=cache, last_only=True)[:, 0]


def pad_prompts(prompts: list[list[int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and their positions (PADDING_POSITION on padding). -> two of (P, Tp) int64."""
    width = max(map(len, prompts))
    ids = torch.tensor([p + [0] * (width - len(p)) for p in prompts], device=device)
    positions = torch.tensor([list(range(len(p))) + [PADDING_POSITION] * (width - len(p)) for p in prompts],
                             device=device)
    return ids, positions
