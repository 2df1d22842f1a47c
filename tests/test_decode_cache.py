"""The keys and values of rows that decode together: attention by the CPU kernel and by PyTorch against its definition,
and what is stored where."""
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from conftest import random_model

from nanochat.attention import PADDING_POSITION, KVCache
from nanochat.decode_cache import TRANSPOSED_FROM, DecodeCache
from nanochat.engine import Decoding, run_prompts
from nanochat.kernels import cpu
from nanochat.kernels.decode_attention import decode_attention_plain

KERNELS = pytest.mark.skipif(cpu.library() is None, reason="no C compiler")
FULL = 10 ** 6  # a window that reaches everything here
LAYERS, LAYER = 3, 1


def decoded(model, prompts: list[list[int]], rows: list[tuple[int, list[int]]], starts: list[int],
            rows_per_slot: int = 1) -> list[torch.Tensor]:
    """Hidden states (T, C) of the tokens of rows (prompt, tokens), decoded one by one after their prompts. Row r
    begins at step starts[r]; a place is another row's when its row has ended. Prompts are run one at a time."""
    device, capacity = model.lm_head.weight.device, max(len(tokens) for _, tokens in rows)
    order = sorted(range(len(rows)), key=lambda r: starts[r])
    place_of, last = {}, {}
    for r in order:  # the first place that is free by then
        gone = [place for place, other in last.items() if starts[other] + len(rows[other][1]) <= starts[r]]
        place_of[r] = gone[0] if gone else len(last)
        last[place_of[r]] = r
    slots, num_places = len(prompts) + 1, len(last) + 1
    cache = DecodeCache(model.config, num_places, slots, rows_per_slot, max(map(len, prompts)), capacity,
                        model.compute_dtype, device)
    for p, prompt in enumerate(prompts):  # in the slots from the last one down; slot 0 stays empty
        cache.put(torch.tensor([slots - 1 - p], device=device), run_prompts(model, [prompt])[0])
    hidden = [[] for _ in rows]
    for step in range(max(start + len(tokens) for start, (_, tokens) in zip(starts, rows, strict=True))):
        live = [r for r in order if starts[r] <= step < starts[r] + len(rows[r][1])]
        live.sort(key=lambda r: rows[r][0])
        new = [r for r in live if starts[r] == step]
        if new:
            cache.begin(torch.tensor([place_of[r] for r in new], device=device),
                        torch.tensor([slots - 1 - rows[r][0] for r in new], device=device))
        if not live:
            continue
        places, own = (torch.tensor(x, device=device)
                       for x in ([place_of[r] for r in live], [step - starts[r] + 1 for r in live]))
        positions = cache.advance(places, own)
        assert positions.tolist() == [len(prompts[rows[r][0]]) + step - starts[r] for r in live]
        tokens = torch.tensor([[rows[r][1][step - starts[r]]] for r in live], device=device)
        for r, state in zip(live, model.trunk(tokens, positions=positions[:, None], cache=cache), strict=True):
            hidden[r].append(state[0])
    return [torch.stack(states) for states in hidden]


@dataclass
class Case:
    """A cache whose layer LAYER has keys and values, and the queries, keys and values of a new token of each row."""
    cache: DecodeCache
    places: torch.Tensor
    lengths: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def attend(self, window: int, chosen=None):
        """What rows get, alone or in a batch of some; as (n, Hkv, group, D)."""
        chosen = torch.arange(len(self.places)) if chosen is None else torch.tensor(chosen)
        self.cache.advance(self.places[chosen], self.lengths[chosen])
        y = self.cache.attend(LAYER, self.q[chosen], self.k[chosen], self.v[chosen], window)
        assert y.shape == self.q[chosen].shape and y.dtype == self.q.dtype
        return y[:, :, 0, :, 0]


def random(*shape, seed, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture
def called(monkeypatch):
    """The names of the kernels that have run."""
    names, run = [], cpu.call
    monkeypatch.setattr(cpu, "call", lambda name, *arguments: (names.append(name), run(name, *arguments)))
    return names


def case(sizes, Hkv=2, group=2, D=32, transposed=True, dtype=torch.float32, unread=float("nan")) -> Case:
    """sizes: rows of each prompt. Prompts and rows of unlike lengths; two places and a slot are nobody's. What no row
    has filled is `unread`."""
    n, slots, capacity = sum(sizes), len(sizes) + 1, 70
    config = SimpleNamespace(n_kv_head=Hkv, head_dim=D, n_layer=LAYERS)
    prefixes = torch.tensor([(37 * s + 5) % 51 + 1 for s in range(len(sizes))])  # 6, 43, 29, 15, 1, 38, ...
    cache = DecodeCache(config, n + 2, slots, TRANSPOSED_FROM if transposed else 1, int(prefixes.max()), capacity,
                        dtype, torch.device("cpu"))
    for x in (*cache.k, *cache.v, *cache.prefix_k, *cache.prefix_v):
        x.fill_(unread)
    prompts, width = KVCache(LAYERS), int(prefixes.max())
    columns = torch.arange(width).expand(len(sizes), width)
    prompts.positions = torch.where(columns < prefixes[:, None], columns, PADDING_POSITION)
    prompts.last_embedding = random(len(sizes), 1, 4, seed=6, dtype=dtype)
    for i in range(LAYERS):
        prompts.kv[i][:] = (random(len(sizes), Hkv, 1, width, D, seed=10 * i + s, dtype=dtype) for s in (7, 8))
    draw = torch.Generator().manual_seed(n)
    of_slots = torch.randperm(slots, generator=draw)[: len(sizes)]
    cache.put(of_slots, prompts)
    places = torch.randperm(n + 2, generator=draw)[:n]
    cache.begin(places, of_slots.repeat_interleave(torch.tensor(sizes)))
    lengths = torch.randint(1, capacity + 1, (n,), generator=draw)
    lengths[0] = capacity
    for i in range(LAYERS):
        for place, length in zip(places.tolist(), lengths.tolist(), strict=True):
            cache.k[i][place, :, : length - 1], cache.v[i][place, :, : length - 1] = (
                random(Hkv, length - 1, D, seed=100 * i + place + s, dtype=dtype) for s in (1000, 2000))
    # heads innermost, as models have them
    q = random(n, 1, 1, Hkv, group, D, seed=1, dtype=dtype).permute(0, 3, 1, 4, 2, 5)
    k, v = (random(n, 1, 1, Hkv, D, seed=s, dtype=dtype).permute(0, 3, 1, 2, 4) for s in (2, 3))
    return Case(cache, places, lengths, q, k, v)


def by_definition(case: Case, window: int) -> torch.Tensor:
    """One head of keys of one row at a time, in fp64. -> (n, Hkv, group, D)"""
    cache, out = case.cache, torch.zeros(case.q[:, :, 0, :, 0].shape, dtype=torch.float64)
    for r, (place, length) in enumerate(zip(case.places.tolist(), case.lengths.tolist(), strict=True)):
        slot = int(cache.slots[place])
        before = int(cache.prefix_lengths[slot])
        for h in range(out.shape[1]):
            shared = cache.prefix_k[LAYER][slot, h]
            shared = (shared.mT if cache.transposed else shared)[:before]
            keys = torch.cat([shared, cache.k[LAYER][place, h, : length - 1], case.k[r, h, 0]]).double()
            values = torch.cat([cache.prefix_v[LAYER][slot, h, :before], cache.v[LAYER][place, h, : length - 1],
                                case.v[r, h, 0]]).double()
            first = max(0, before + length - 1 - window)
            scores = case.q[r, h, 0, :, 0].double() @ keys[first:].T / math.sqrt(out.shape[3])
            weights = (scores - scores.amax(1, keepdim=True)).exp()
            out[r, h] = weights @ values[first:] / weights.sum(1, keepdim=True)
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    """A copy that compares what is not a number too."""
    return x.clone().view(torch.int32 if x.element_size() == 4 else torch.int64)


def check(case: Case, window: int, tolerance: float) -> None:
    """The outputs are the definition's; new keys and values are in their column, and nothing else was written."""
    expected, cache = by_definition(case, window), case.cache
    expected_caches = [bits(x) for x in (*cache.k, *cache.v, *cache.prefix_k, *cache.prefix_v)]
    for i, new in ((LAYER, case.k), (LAYERS + LAYER, case.v)):
        expected_caches[i][case.places, :, case.lengths - 1] = bits(new[:, :, 0, 0].contiguous())
    read = [bits(x.contiguous()) for x in (case.q, case.k, case.v)]
    out = case.attend(window)
    assert out.isfinite().all() and (out - expected).abs().max() < tolerance
    assert all(map(torch.equal, expected_caches, map(bits, (*cache.k, *cache.v, *cache.prefix_k, *cache.prefix_v))))
    assert all(map(torch.equal, read, (bits(x.contiguous()) for x in (case.q, case.k, case.v))))


SHAPES = [dict(Hkv=2, group=1, D=32), dict(Hkv=1, group=6, D=64), dict(Hkv=2, group=2, D=96),
          dict(Hkv=1, group=2, D=128), dict(Hkv=4, group=1, D=160)]
ROWS = [[1], [3], [40], [1, 3, 1, 7]]
WINDOWS = [FULL, 50, 6, 0]  # 50 ends among the prompt's keys of some rows, and among own ones of others


@KERNELS
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_the_definition(called, shape, transposed):
    for sizes in ROWS:
        for window in WINDOWS:
            made = case(sizes, transposed=transposed, **shape)
            assert made.cache.transposed == transposed
            check(made, window, 3e-6)
    assert called == ["decode"] * len(ROWS) * len(WINDOWS)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_the_pytorch_version_equals_the_definition(monkeypatch, dtype, tolerance):
    monkeypatch.setattr(cpu, "library", lambda: None)
    for sizes in ROWS:
        for window in WINDOWS:
            made = case(sizes, dtype=dtype, unread=1e3)
            assert not made.cache.by_kernel and not made.cache.transposed
            check(made, window, tolerance)


@KERNELS
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_a_row_gets_is_the_same_in_any_batch_and_by_any_number_of_threads(monkeypatch, shape, transposed):
    made = case([1, 3, 40, 2], transposed=transposed, **shape)
    whole = made.attend(50)
    assert torch.equal(torch.cat([made.attend(50, [r]) for r in range(46)]), whole)
    mixed = torch.randperm(46, generator=torch.Generator().manual_seed(0)).tolist()  # rows of a slot lie apart
    for some in ([0, 2, 5, 9, *range(11, 30), 44], mixed):
        assert torch.equal(made.attend(50, some), whole[some])
    for count in (2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert torch.equal(made.attend(50), whole)


@KERNELS
@pytest.mark.parametrize("transposed", [True, False])
def test_what_is_not_a_number_spoils_its_own_row_alone(transposed):
    made = case([1, 3, 40, 2], transposed=transposed)
    expected = made.attend(50)
    made.q[7, 0, 0, 0, 0, 3] = made.k[9, 1, 0, 0, 3] = made.v[11, 1, 0, 0, 3] = math.nan
    out, spoilt = made.attend(50), torch.zeros(expected.shape, dtype=torch.bool)
    spoilt[7, 0, 0] = spoilt[9, 1] = spoilt[11, 1, :, 3] = True
    assert torch.equal(out.isnan(), spoilt) and torch.equal(out[~spoilt], expected[~spoilt])


@KERNELS
@pytest.mark.parametrize("sizes, Hkv", [([1], 2), ([3], 1), ([2, 1], 2)])
def test_queries_keys_and_values_may_lie_in_any_order(sizes, Hkv):
    made = case(sizes, Hkv=Hkv)
    expected, given = made.attend(50), (made.q, made.k, made.v)
    for turn in (lambda x: x.contiguous(), lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
                 lambda x: torch.stack([x, x], dim=1)[:, 1]):
        made.q, made.k, made.v = map(turn, given)
        assert torch.equal(made.attend(50), expected)


def test_the_kernel_serves_single_precision_and_heads_of_whole_vectors():
    make = lambda D, dtype: DecodeCache(SimpleNamespace(n_kv_head=1, head_dim=D, n_layer=1), 2, 1, 5, 9, 4, dtype,
                                        torch.device("cpu"))
    there = cpu.library() is not None
    assert make(32, torch.float32).by_kernel == there and make(96, torch.float32).transposed == there
    assert not any(make(*other).by_kernel for other in ((24, torch.float32), (32, torch.float64), (32, torch.bfloat16)))
    assert make(24, torch.float32).prefix_k[0].shape == (1, 1, 9, 24)
    if there:
        assert make(32, torch.float32).prefix_k[0].shape == (1, 1, 32, 16)  # keys of 16 columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows_per_slot", [1, TRANSPOSED_FROM])
def test_a_slot_and_a_place_are_given_to_others(dtype, rows_per_slot):
    # A long prompt's row, then in the same slot and place a short prompt's: as in a fresh cache.
    config = SimpleNamespace(n_kv_head=2, head_dim=32, n_layer=1)
    make = lambda: DecodeCache(config, 2, 2, rows_per_slot, 20, 8, dtype, torch.device("cpu"))
    place, slot, outs = torch.tensor([1]), torch.tensor([1]), []

    def use(cache, prompt_tokens, steps, seed):
        prompt = KVCache(1)
        prompt.positions, prompt.last_embedding = torch.arange(prompt_tokens)[None], torch.full((1, 1, 3), float(seed),
                                                                                                dtype=dtype)
        prompt.kv[0][:] = (random(1, 2, 1, prompt_tokens, 32, seed=seed + s, dtype=dtype) for s in (1, 2))
        cache.put(slot, prompt)
        cache.begin(place, slot)
        for t in range(1, steps + 1):
            q = random(1, 2, 1, 3, 1, 32, seed=seed + 10 * t, dtype=dtype)
            k, v = (random(1, 2, 1, 1, 32, seed=seed + 10 * t + s, dtype=dtype) for s in (3, 4))
            assert cache.advance(place, torch.tensor([t])).tolist() == [prompt_tokens + t - 1]
            out = cache.attend(0, q, k, v, FULL)
        return out

    used, fresh = make(), make()
    use(used, 19, 8, 100)
    outs = [use(cache, 3, 2, 500) for cache in (used, fresh)]
    assert torch.equal(*outs) if used.by_kernel else (outs[0] - outs[1]).abs().max() < 1e-12
    assert used.last_embedding[1].unique().tolist() == [500.0] and used.last_embedding[0].eq(0).all()


def test_rows_of_one_prompt_that_lie_apart_read_it_all_the_same():
    # decode_attention_plain takes runs of rows that follow one another together.
    made = case([3, 4, 1], dtype=torch.float64, unread=0.0)
    cache, mixed = made.cache, [3, 0, 4, 7, 1, 2, 5, 6]
    whole = made.attend(FULL)
    out = decode_attention_plain(made.q[mixed][:, :, 0, :, 0], cache.k[LAYER], cache.v[LAYER], made.places[mixed],
                                 cache.lengths, cache.prefix_k[LAYER], cache.prefix_v[LAYER], cache.prefix_lengths,
                                 cache.slots, FULL)
    assert (out - whole[mixed]).abs().max() < 1e-12


def test_a_place_that_never_had_a_row_stays_in_its_first_column():
    """CUDA's batches have such places, too. Of one new token, a row has drawn none when it runs its prompt's last."""
    cache = case([2]).cache
    idle = torch.tensor([place for place in range(4) if cache.slots[place] == 0][:1])
    positions = cache.advance(idle, torch.zeros(1, dtype=torch.long))
    assert cache.lengths[idle].tolist() == [1]
    assert positions.tolist() == cache.prefix_lengths[cache.slots[idle]].tolist()
    model, prompts = random_model(), [[1, 2], [1, 3], [1, 4]]
    decoding = Decoding(model, prompts, 1, 1, [], [1, 2, 3], 1.0, 0, 3, None, [0, 0, 0])
    assert decoding.drawn.tolist() == [0, 0, 0]
