"""Sampling by CUDA graphs, emulated without CUDA and on a GPU: the rows of plain steps."""
from types import SimpleNamespace

import pytest
import torch
from conftest import randomized
from test_engine import (FAMILIES, PROMPT_LENGTHS, assert_same, keys_for, random_prompts, refilled, related_prompts,
                         sampled, tiny_model, together as all_at_once)

from nanochat import decode_cache, engine
from nanochat.engine import Decoding, Graphs
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder, DecoderConfig
from nanochat.kernels import cpu, ops

together = all_at_once  # the fixture


class Emulated(Graphs):
    """CUDA graphs without CUDA: a replay runs the step on what the graph reads. It checks that all that the step has
    from outside is where it was at the capture."""

    captured: list[int] = []

    def capture(self, places):
        self.captured.append(len(places))
        before = addresses(self.step)

        def replay():
            assert addresses(self.step) == before
            self.step(places)
        return SimpleNamespace(replay=replay)


def addresses(step) -> dict:
    """Where in memory the tensors are that a step of engine.Decoding reads."""
    batch = step.__self__
    held = {"": batch, "cache": batch.cache, "queue": batch.queue}
    return {(owner, name, i): x.data_ptr() for owner, value in held.items() if value is not None
            for name, part in vars(value).items() if name != "places"  # which the step itself sets
            for i, x in enumerate(part if isinstance(part, list) else [part]) if isinstance(x, torch.Tensor)}


def emulate(monkeypatch, check_every=4, least_rows=2):
    monkeypatch.setattr(Emulated, "captured", [])
    for name, value in [("uses_graphs", lambda device: True), ("Graphs", Emulated), ("CHECK_EVERY_CUDA", check_every),
                        ("LEAST_ROWS_CUDA", least_rows)]:
        monkeypatch.setattr(engine, name, value)


@pytest.mark.parametrize("check_every, least_rows, max_new",
                         [(4, 2, 20), (3, 1, 20), (1, 8, 5), (16, 8, 1), (16, 1, 2), (16, 100, 20)])
@pytest.mark.parametrize("max_rows", [1024, 9])
def test_the_path_of_cuda_graphs_samples_the_same(monkeypatch, check_every, least_rows, max_new, max_rows):
    prompts, keys, stop = random_prompts(6, 2, 130), keys_for(24), list(range(20))
    reference = sampled(tiny_model(), prompts, 8, keys, max_new_tokens=max_new, stop_tokens=stop)
    emulate(monkeypatch, check_every, least_rows)
    model = tiny_model()
    assert_same(sampled(model, prompts, 8, keys, max_new_tokens=max_new, stop_tokens=stop, max_rows=max_rows),
                reference)
    places = min(24, max_rows)
    sizes = {places >> i for i in range(6) if i == 0 or places >> i >= least_rows}
    assert set(model.decoding) <= sizes and len(Emulated.captured) == len(set(Emulated.captured))
    assert set(Emulated.captured) <= set(model.decoding) and len(model.decoding) % check_every == 0
    if max_new == 20 and least_rows < 8:
        assert len(Emulated.captured) > 1  # rows have left
    if max_rows == 9:
        assert sorted(model.prompts) == sorted(prompts)


def test_a_graph_is_captured_once_for_each_size_and_reads_the_places_of_each_call():
    ran, captured = [], []

    class Noted(Graphs):
        def capture(self, places):
            captured.append(len(places))
            return SimpleNamespace(replay=lambda: self.step(places))

    graphs, calls = Noted(lambda places: ran.append(places.tolist())), [[3, 1], [1, 2], [0, 5], [4], [3, 1], [6], [7]]
    for places in calls:
        graphs(torch.tensor(places))
    assert ran == calls and captured == [2, 1]


def test_on_the_path_of_cuda_graphs_places_are_refilled(monkeypatch, together):
    emulate(monkeypatch, check_every=2, least_rows=1)
    out, model = refilled(16)
    assert_same(out, together[0])
    assert sorted(model.prompts) == sorted(random_prompts(*PROMPT_LENGTHS))
    # At a look an eighth of the places may be free; up to the next one, rows that have ended are kept.
    ended_in_between = 64 * 2
    tokens, longest = (out.lengths - 1).sum().item(), int(out.lengths.max()) - 1
    assert sum(model.decoding) >= tokens
    assert len(model.decoding) <= (tokens + ended_in_between) / (16 - 2 + 1) + longest + 2


@pytest.mark.parametrize("max_new", [20, 1])
def test_on_the_path_of_cuda_graphs_prompts_begin_after_what_they_share(monkeypatch, max_new):
    prompts, options = related_prompts()[0], dict(max_new_tokens=max_new, max_rows=4)
    reference = sampled(tiny_model(), prompts, 1, keys_for(10), **options)
    emulate(monkeypatch)
    assert_same(sampled(tiny_model(), prompts, 1, keys_for(10), families=FAMILIES, **options), reference)
    assert Emulated.captured


def test_a_tool_on_the_path_of_cuda_graphs(monkeypatch):
    heard = []

    def tool(rows, tokens):
        heard.append(len(rows))
        return {row: 200 + row for row, token in zip(rows, tokens, strict=True) if token % 3 == 0}

    outs = [sampled(tiny_model(), random_prompts(3, 5), 4, keys_for(8), max_rows=5, max_new_tokens=15, tool=tool)]
    emulate(monkeypatch)
    outs.append(sampled(tiny_model(), random_prompts(3, 5), 4, keys_for(8), max_rows=5, max_new_tokens=15, tool=tool))
    assert_same(*outs)
    assert torch.equal(outs[0].forced, outs[1].forced) and outs[0].forced.sum() > 5 and max(heard) <= 5


def test_should_stop_is_asked_between_graphs(monkeypatch):
    emulate(monkeypatch, check_every=4)
    model, answers = tiny_model(), iter([False] * 3 + [True] * 50)
    out = sampled(model, random_prompts(3), 2, keys_for(2), max_new_tokens=100, stop_tokens=[],
                  should_stop=lambda: next(answers))
    assert len(model.decoding) == 12 and out.lengths.tolist() == [13, 13]


INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="there the last test runs the kernels")


@INTERPRETED
@pytest.mark.parametrize("model", [
    GPT(GPTConfig(64, 70, 2, 2, 1, 32, "SL")),
    Decoder(DecoderConfig("qwen3", 64, 70, 2, 2, 1, 32, 16, 48, 1e-6, 1e4, None, True, False, False, True, True))],
    ids=["gpt", "decoder"])
def test_the_kernels_of_cuda_sample_the_same_in_their_interpreter(monkeypatch, model):
    """Whole steps in fp32, of rows that end and places that are refilled, against what a CPU does."""
    pytest.importorskip("triton", minversion="3.7")
    randomized(model)
    work = lambda: sampled(model, [[3, 1], [9]], 2, keys_for(15)[11:], max_new_tokens=4, stop_tokens=[*range(16)],
                           max_rows=3)
    with torch.no_grad():
        reference = work()
        emulate(monkeypatch, check_every=1)
        monkeypatch.setattr(cpu, "library", lambda: None)
        for module in (engine, decode_cache, ops):
            monkeypatch.setattr(module, "takes_triton", lambda x: True)
        assert_same(work(), reference)
    assert reference.lengths.tolist() == [2, 2, 4, 2]


@INTERPRETED
def test_the_kernels_around_trunk_and_draw_do_what_pytorch_does(monkeypatch):
    """130 of 150 rows, in 130 of 140 places, with 0 to 4 tokens of 5: two programs of each kernel."""
    pytest.importorskip("triton", minversion="3.7")
    generator = torch.Generator().manual_seed(0)
    some = lambda high, n: torch.randint(high, (n,), generator=generator)
    places, rows = (torch.randperm(n, generator=generator)[:130] for n in (140, 150))
    t, new, logprobs = some(5, 130), some(12, 130), torch.rand(130, generator=generator)
    slots, prefix_lengths, rests = some(50, 140), some(30, 50), some(9, 140)
    monkeypatch.setattr(engine, "pick_after", lambda *args: (new, logprobs))
    after = []
    for by_kernel in (False, True):
        for module in (engine, decode_cache):
            monkeypatch.setattr(module, "takes_triton", lambda x, by_kernel=by_kernel: by_kernel)
        batch = Decoding(tiny_model(), [[1]] * 50, 3, 5, [7, 9], keys_for(150), 1.0, 0, 140, None)
        batch.cache.slots.copy_(slots)
        batch.cache.rests.copy_(rests)
        batch.cache.prefix_lengths[:50] = prefix_lengths
        positions = batch.cache.advance(places, t)
        batch.draw_next(None, places, rows, t)
        after.append([positions, batch.cache.lengths, batch.tokens, batch.logprobs, batch.of_places])
    assert all(map(torch.equal, *after))
    assert (batch.row[places] == 150).tolist() == ((new == 7) | (new == 9) | (t == 4)).tolist()


@pytest.mark.gpu
def test_cuda_graphs_sample_what_plain_steps_do(monkeypatch):
    model = tiny_model().float().cuda()
    model.compute_dtype = torch.float32
    prompts, keys, stop = random_prompts(6, 2, 130), keys_for(24), list(range(20))
    graphs = [sampled(model, prompts, 8, keys, max_new_tokens=100, stop_tokens=stop, max_rows=n) for n in (1024, 10)]
    monkeypatch.setattr(engine, "uses_graphs", lambda device: False)
    for out in graphs:
        assert_same(sampled(model, prompts, 8, keys, max_new_tokens=100, stop_tokens=stop), out)
