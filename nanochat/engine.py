"""
Sampling: many ragged prompts x G rows in one batch.

Each prompt is run once, and its rows read its keys where they are; a row that ends leaves its place to the next one
that waits; the logprobs of exactly the distribution that was sampled are recorded. Noise is a function of (row key,
position) alone, so that the rows of a batch may be split over ranks, reordered or resumed without changing what they
draw.
"""
import hashlib
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.attention import PADDING_POSITION, KVCache
from nanochat.common import BadInput, wide_dtype
from nanochat.decode_cache import DecodeCache
from nanochat.kernels import cpu
from nanochat.kernels.draw import draw
from nanochat.kernels.launch import takes_triton
from nanochat.kernels.steps import record
from nanochat.slots import Slots, common_starts, num_places
from nanochat.weights import inference_model

COMPACT_BELOW = 0.9    # drop places whose row has ended once less than this share of a batch is alive
CHECK_EVERY_CUDA = 16  # there, tokens between looks at which rows have ended; on CPU looking is free
LEAST_ROWS_CUDA = 8    # there a batch has all places or a half, a quarter, ... of them, as each size is a graph
PREFILL_TOKENS = 4096  # prompt tokens that go through the model at once
NO_TOKEN = -1          # where a row has no token yet
LEAST_TEMPERATURE = 1e-6  # fp32 logits divided by less lose their last digits, and become infinite at last
BLOCK = 64             # columns of the vocabulary that `pick` sums before it looks closer

# rows, the tokens they just got -> row: the token it must get next
Tool = Callable[[list[int], list[int]], dict[int, int]]


@dataclass
class Samples:
    """N sampled completions. Rows are prompt-major: row p*G + g is sample g of prompt p.

    tokens (N, T) int64, the end token included, 0 after it; logprobs (N, T) fp32, 0 after the end; lengths (N,)
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
    """A number in [0, 1) per row, a hash (splitmix64) of its key (B,) int64 and the position. -> (B,)"""
    position = torch.as_tensor(position, device=keys.device)
    if keys.device.type == "cpu" and cpu.library() is not None:
        noise = torch.empty(len(keys), dtype=torch.float64)
        cpu.call("uniform_noise", keys.contiguous(), position.expand(len(keys)).contiguous(), noise, len(keys))
        return noise
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
    if cpu.takes_rows(logits):
        return _draw_kernel(logits, keys, position, top_k, vocab_size=logits.shape[1], softcap=None,
                            temperature=temperature)
    if temperature == 0:
        logprobs, tokens = torch.log_softmax(logits, dim=-1).max(dim=-1)
        return tokens, logprobs
    if top_k > 0:
        logits = logits.masked_fill(logits < kth_largest(logits, top_k), float("-inf"))
    if temperature != 1:
        logits = logits / temperature
    noise = uniform_noise(keys, position)
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


def pick_after(model, hidden: torch.Tensor, keys, position, temperature: float, top_k: int):
    """As pick of model.head(hidden). Kernels read the LM head's outputs: no other logits are made."""
    if takes_triton(hidden):
        return draw(model.lm_head(hidden), keys, position, top_k=top_k, **model.head_options(temperature))
    if cpu.takes_rows(hidden):
        return _draw_kernel(model.lm_head(hidden), keys, position, top_k, **model.head_options(temperature))
    return pick(model.head(hidden), keys, position, temperature, top_k)


def kth_largest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th largest logit of each row; the smallest, where a row has fewer. (B, V) -> (B, 1)"""
    return logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]


def _draw_kernel(z, keys, position, top_k: int, *, vocab_size: int, softcap: float | None, temperature: float,
                 narrow: bool = False):
    """pick, from the raw outputs z (B, at least vocab_size) of an LM head, however it has multiplied (narrow)."""
    noise = kth = None
    if temperature > 0:
        noise = uniform_noise(keys, position)
        kth = kth_largest(z[:, :vocab_size], top_k).contiguous() if top_k else None
    assert noise is None or noise.shape == z.shape[:1] and noise.dtype == torch.float64
    assert z.dtype == torch.float32 and z.stride(1) == 1 and z.shape[1] >= vocab_size
    tokens, logprobs = torch.empty(len(z), dtype=torch.long), torch.empty(len(z))
    cpu.call("draw", z, z.stride(0), len(z), vocab_size, kth, softcap or 0, temperature, noise, tokens, logprobs)
    return tokens, logprobs


def _first_above(cumulative, target):
    """The first column (B, 1) above the target (B, 1), or that reaches the total where rounding leaves none."""
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def check_temperature(name: str, temperature: float) -> None:
    """Raises BadInput, with the flag's or argument's name, for a temperature at which nothing can be drawn."""
    if not (temperature == 0 or LEAST_TEMPERATURE <= temperature < math.inf):
        raise BadInput(f"{name} {temperature}: must be 0 (greedy), or finite and at least {LEAST_TEMPERATURE}")


def generate(model, prompts: list[list[int]], num_samples: int, *, max_new_tokens: int, stop_tokens: list[int],
             keys: list[int], temperature: float = 1.0, top_k: int = 0, max_rows: int = 1024,
             max_cached_tokens: int = 0, should_stop: Callable[[], bool] = lambda: False,
             tool: Tool | None = None, families: list[Hashable] | None = None) -> Samples:
    """Samples `num_samples` completions of each of P prompts.

    keys: one int64 per row (P * num_samples), see `row_key`. max_rows and max_cached_tokens bound the rows that decode
    together (slots.num_places). When should_stop() turns true the call returns at once with unfinished rows, for the
    caller to throw away. tool: told the tokens that rows got, one after the other, it says which token they must get
    next (calculator.Calculator). families: of each prompt, say its problem: with one sample of each prompt, what those
    of a family begin with is run once (slots.common_starts). Raises BadInput for a prompt that is empty or does not fit
    the context with its completion, and for numbers that nothing can be drawn with.
    """
    if max_new_tokens < 1:
        raise BadInput(f"max_new_tokens {max_new_tokens}: must be at least 1")
    check_temperature("temperature", temperature)
    context = model.config.sequence_len
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= context - max_new_tokens:
            raise BadInput(f"prompt {i} has {len(prompt)} tokens: with {max_new_tokens} new ones "
                           f"it must have 1 to {context - max_new_tokens} (context {context})")
    assert len(keys) == len(prompts) * num_samples
    if not keys:
        none = lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=model.lm_head.weight.device)
        return Samples(none((0, 1), torch.long), none((0, 1), torch.float32), none(0, torch.long), none(0, torch.bool),
                       none((0, 1), torch.bool) if tool else None)
    model = inference_model(model)
    max_rows = num_places(len(prompts), num_samples, max(map(len, prompts)), max_new_tokens, max_rows,
                          max_cached_tokens)
    with torch.inference_mode(), model.joined_projections():
        batch = Decoding(model, prompts, num_samples, max_new_tokens, stop_tokens, keys, temperature, top_k, max_rows,
                         tool, families)
        batch.run(should_stop)
        tokens, logprobs, forced = (x[: len(keys)] for x in (batch.tokens, batch.logprobs, batch.forced))
        logprobs = logprobs.masked_fill(forced, 0.0)
    # Copies, made outside of inference mode: ordinary tensors, that training may keep.
    lengths = (tokens != NO_TOKEN).sum(dim=1)
    width = max(int(lengths.max()), 1)
    tokens = tokens[:, :width].clamp(min=0)
    last = tokens.gather(1, (lengths - 1).clamp(min=0)[:, None])
    stopped = (last == torch.tensor(stop_tokens, device=last.device)).any(dim=1) & (lengths > 0)
    return Samples(tokens, logprobs[:, :width].clone(), lengths, stopped, forced[:, :width].clone() if tool else None)


class Decoding:
    """The rows that decode together, until all are done. N rows, T tokens at most, n places of a batch."""

    def __init__(self, model, prompts: list[list[int]], num_samples: int, max_new_tokens: int, stop_tokens: list[int],
                 keys: list[int], temperature: float, top_k: int, max_rows: int, tool: Tool | None,
                 families: list[Hashable] | None = None):
        self.model, self.num_rows, self.max_new_tokens = model, len(keys), max_new_tokens
        self.temperature, self.top_k = temperature, top_k
        self.device = device = model.lm_head.weight.device
        # One row more than there are is where places write whose row has ended.
        self.tokens, self.logprobs, self.forced = (torch.full((len(keys) + 1, max_new_tokens), value, device=device)
                                                   for value in (NO_TOKEN, 0.0, False))
        self.keys = torch.tensor(keys + [0], dtype=torch.long, device=device)
        self.stop_tokens = torch.tensor(stop_tokens, dtype=torch.long, device=device)
        # What has a slot, with its rows: prompts, or starts that several have (row p is then prompt p).
        starts = common_starts(prompts, families, max_rows) if families and num_samples == 1 else []
        units = starts or [(p, range(i * num_samples, (i + 1) * num_samples)) for i, p in enumerate(prompts)]
        self.prompts = [start for start, _ in units]
        self.rests = {p: prompts[p][len(start):] for start, its in starts for p in its}
        # Those of like length sit down together, so that little is padding when they are run; the longest first: what
        # follows them tends to be long too, and is best not begun last.
        longest = [max(len(prompts[row // num_samples]) for row in rows) for _, rows in units]
        order = sorted(range(len(units)), key=lambda u: (-longest[u], u))
        slots = Slots([(u, units[u][1]) for u in order], max_rows)
        self.slots, self.capacity = slots, max(1, max_new_tokens - 1)  # the last token's keys are never read
        self.cache = DecodeCache(model.config, slots.num_places, slots.num_slots, max(len(rows) for _, rows in units),
                                 max(map(len, self.prompts)),
                                 self.capacity + max(map(len, self.rests.values()), default=0),
                                 model.activation_dtype, device)
        # Of each slot: the hidden state of the last token of its prompt or start. Of each place: its row (N when that
        # has ended, or never was), the token that it runs next, how many it has drawn.
        self.last_hidden = torch.zeros(slots.num_slots, model.config.n_embd, dtype=model.activation_dtype,
                                       device=device)
        of_none = torch.tensor([[len(keys)], [0], [min(1, max_new_tokens - 1)]], device=device)
        self.of_places = of_none.repeat(1, slots.num_places)
        self.row, self.token, self.drawn = self.of_places
        self.queue = ToolQueue(tool, slots.num_places, model.vocab_size, max_new_tokens, device) if tool else None

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Decodes until all rows have ended, or should_stop() turns true."""
        slots, graphs = self.slots, Graphs(self.step) if uses_graphs(self.device) else None
        batch = None  # the places that decode together
        while not should_stop():
            if slots.may_fill():
                self.fill()
                batch = None
            rows = self.row.tolist()
            slots.release([place for place in slots.live if rows[place] == self.num_rows])
            if slots.may_fill():  # rows have ended with their first token
                continue
            if not slots.live:
                break
            size = size_of_batch(slots, len(batch) if batch is not None else None, graphs)
            if batch is None or size < len(batch):
                batch = torch.tensor(slots.batch(size), device=self.device)
            if self.queue:
                self.queue.ask(self.row, self.drawn, self.tokens)
            for _ in range(CHECK_EVERY_CUDA if graphs else 1):
                (graphs or self.step)(batch)

    def fill(self) -> None:
        """Gives free places to waiting rows, and draws their first tokens, which after starts is left to the next
        step."""
        rows, places, filled, new = self.slots.fill()
        new.sort(key=lambda one: len(self.prompts[one[0]]))
        for some in in_pieces(new, [len(self.prompts[p]) for p, _ in new]):
            at = torch.tensor([slot for _, slot in some], device=self.device)
            cached, self.last_hidden[at] = run_prompts(self.model, [self.prompts[p] for p, _ in some])
            self.cache.put(at, cached)
        rests = [self.rests[row] for row in rows] if self.rests else None
        rows, places, filled = (torch.tensor(x, device=self.device) for x in (rows, places, filled))
        if self.queue:
            self.queue.begin(places)
        if rests:
            return self.begin_after_starts(rests, rows, places, filled)
        self.cache.begin(places, filled)
        self.draw_next(self.last_hidden[filled], places, rows, torch.zeros_like(rows))

    def begin_after_starts(self, rests: list[list[int]], rows, places, filled) -> None:
        """Runs what follows the starts in these slots (n,) but for the last tokens, which are left to the next step: it
        draws the rows' first ones."""
        whole = lambda numbers: torch.tensor(numbers, device=self.device)
        self.cache.begin(places, filled, whole([len(rest) for rest in rests]))
        order = sorted((i for i, rest in enumerate(rests) if len(rest) > 1), key=lambda i: len(rests[i]))
        longest = max(map(len, self.prompts))
        for some in in_pieces(order, [longest + len(rests[i]) for i in order]):
            at = whole(some)
            cached, _ = run_prompts(self.model, [rests[i][:-1] for i in some], self.cache.started(filled[at]))
            self.cache.put_rests(places[at], cached)
        self.row[places], self.token[places], self.drawn[places] = rows, whole([rest[-1] for rest in rests]), 0

    def step(self, places: torch.Tensor) -> None:
        """One more token for the rows in these places (n,). All that it reads and writes is on the device, in place."""
        row, token, drawn, cache = self.row, self.token, self.drawn, self.cache
        rows, before, t = self.of_places.index_select(1, places)
        embedding = cache.last_embedding[places] if self.queue else None
        hidden = self.model.trunk(before[:, None], positions=cache.advance(places, t)[:, None],
                                  cache=cache)[:, 0]  # (n, C)
        if not self.queue:
            return self.draw_next(hidden, places, rows, t)
        waits = self.queue.waits[places]  # such a row is to run the same token again, and goes on as it was
        cache.last_embedding[places] = torch.where(waits[:, None, None], embedding, cache.last_embedding[places])
        self.draw_next(hidden, places, rows.masked_fill(waits, self.num_rows), t)
        token[places], drawn[places] = torch.where(waits, before, token[places]), torch.where(waits, t, drawn[places])
        row[places] = torch.where(waits, rows, row[places])

    def draw_next(self, hidden: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, t: torch.Tensor) -> None:
        """Draws and writes down the next token of the rows in these places, which have t (n,). hidden (n, C). A row
        that ends leaves N in its place."""
        new, logprobs = pick_after(self.model, hidden, self.keys[rows], t, self.temperature, self.top_k)
        if self.queue:
            new, self.forced[rows, t] = self.queue.force(places, new)
        if takes_triton(new):
            return record(places, rows, t, new, logprobs, self.stop_tokens, self.tokens, self.logprobs, *self.of_places)
        self.logprobs[rows, t] = logprobs
        self.tokens[rows, t] = self.token[places] = new
        self.drawn[places] = (t + 1).clamp(max=self.max_new_tokens - 1)  # of a row that has ended, too
        ends = (new[:, None] == self.stop_tokens).any(dim=1) | (t == self.max_new_tokens - 1)
        self.row[places] = rows.masked_fill(ends, self.num_rows)


def size_of_batch(slots: Slots, size: int | None, graphs) -> int:
    """How many places should decode together, of `size` that do (None: not yet)."""
    alive = len(slots.live)
    if not graphs:
        return alive if size is None or alive < COMPACT_BELOW * size else size
    size = size or slots.num_places
    while size // 2 >= max(alive, LEAST_ROWS_CUDA):
        size //= 2
    return size


class ToolQueue:
    """Where rows wait for a tool, so that the device need not wait for the host at every token.

    A row that draws a token at which the tool may act (tool.triggers; any token, where the tool does not say) stands
    still until the host has asked the tool. What the tool then puts after it, token by token, is queued here.
    """

    def __init__(self, tool: Tool, num_places: int, vocab_size: int, max_new_tokens: int, device):
        self.tool, self.num_told = tool, {}  # of each row: tokens that the tool has heard of
        triggers = getattr(tool, "triggers", None)
        self.is_trigger = torch.full((vocab_size,), triggers is None, device=device)
        if triggers:
            self.is_trigger[torch.tensor(triggers, device=device)] = True
        # Of each place: whether its row waits, the tokens that it must get, and how many of these it has got.
        self.waits = torch.zeros(num_places, dtype=torch.bool, device=device)
        self.queue = torch.full((num_places, max_new_tokens + 1), -1, device=device)
        self.num_got = torch.zeros(num_places, dtype=torch.long, device=device)

    def begin(self, places: torch.Tensor) -> None:
        """New rows have these places."""
        self.waits[places], self.queue[places], self.num_got[places] = False, -1, 0

    def force(self, places: torch.Tensor, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What rows get that have drawn these tokens (n,), and where that is not what they drew."""
        waits, num_got = self.waits[places], self.num_got[places]
        queued = self.queue[places, num_got]
        is_forced = (queued >= 0) & ~waits
        self.num_got[places] = num_got + is_forced
        tokens = torch.where(is_forced, queued, drawn)
        self.waits[places] = waits | (self.is_trigger[tokens] & ~is_forced)
        return tokens, is_forced

    def ask(self, row: torch.Tensor, drawn: torch.Tensor, tokens: torch.Tensor) -> None:
        """Tells the tool what waiting rows have got, queues what it puts after that, and lets them go on. row, drawn
        (B,) of each place; tokens (N + 1, T) of each row, the last of no row."""
        places = self.waits.nonzero()[:, 0].tolist()
        for place, n, length in zip(places, row[places].tolist(), drawn[places].tolist(), strict=True):
            if n == len(tokens) - 1:
                continue  # it has ended
            due, queue = None, []
            for token in tokens[n, self.num_told.get(n, 0): length].tolist():
                due = self.tool([n], [token]).get(n)
            while due is not None and len(queue) < self.queue.shape[1] - 1:
                queue.append(due)
                due = self.tool([n], [due]).get(n)
            self.num_told[n] = length + len(queue)
            self.queue[place] = -1
            self.queue[place, : len(queue)] = torch.tensor(queue, dtype=torch.long, device=self.queue.device)
            self.num_got[place] = 0
        self.waits[places] = False


def uses_graphs(device) -> bool:
    return device.type == "cuda"


class Graphs:
    """A step on CUDA, whose thousand launches cost one: for each size of a batch it runs once as it is, then is
    captured as a CUDA graph and replayed. The graphs share one pool of memory."""

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


def run_prompts(model, prompts: list[list[int]], prefix: KVCache | None = None) -> tuple[KVCache, torch.Tensor]:
    """Runs prompts at once. -> their cache, the hidden state (P, C) of each prompt's last token. After a prefix of P
    rows the cache alone counts."""
    ids, positions = pad_prompts(prompts, model.lm_head.weight.device)
    if prefix is not None:
        before = (prefix.positions < PADDING_POSITION).sum(dim=1, keepdim=True)
        positions = (positions + before).clamp(max=PADDING_POSITION)
    cache = KVCache(model.config.n_layer)
    return cache, model.trunk(ids, positions=positions, cache=cache, prefix=prefix, last_only=True)[:, 0]


def pad_prompts(prompts: list[list[int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and their positions (PADDING_POSITION on padding). -> two of (P, Tp) int64."""
    width = max(map(len, prompts))
    ids = torch.tensor([p + [0] * (width - len(p)) for p in prompts], device=device)
    positions = torch.tensor([list(range(len(p))) + [PADDING_POSITION] * (width - len(p)) for p in prompts],
                             device=device)
    return ids, positions
