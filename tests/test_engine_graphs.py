"""Sampling by CUDA graphs, emulated without CUDA and on a GPU: the rows of plain steps."""
from types import SimpleNamespace

import pytest
import torch
from test_engine import (FAMILIES, PROMPT_LENGTHS, assert_same, keys_for, random_prompts, refilled, related_prompts,
                         sampled, tiny_model, together as all_at_once)

from nanochat import engine
from nanochat.engine import Graphs

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


def test_on_the_path_of_cuda_graphs_prompts_begin_after_what_they_share(monkeypatch):
    prompts, options = related_prompts()[0], dict(max_new_tokens=20, max_rows=4)
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


@pytest.mark.gpu
def test_cuda_graphs_sample_what_plain_steps_do(monkeypatch):
    model = tiny_model().float().cuda()
    model.compute_dtype = torch.float32
    prompts, keys, stop = random_prompts(6, 2, 130), keys_for(24), list(range(20))
    graphs = [sampled(model, prompts, 8, keys, max_new_tokens=100, stop_tokens=stop, max_rows=n) for n in (1024, 10)]
    monkeypatch.setattr(engine, "uses_graphs", lambda device: False)
    for out in graphs:
        assert_same(sampled(model, prompts, 8, keys, max_new_tokens=100, stop_tokens=stop), out)
