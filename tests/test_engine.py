"""Sampling: greedy and sampled rows against naive full forwards, and that batching changes nothing."""
import functools

import pytest
import torch
from conftest import randomized
from hypothesis import given, settings, strategies as st

from nanochat import engine, slots
from nanochat.attention import PADDING_POSITION
from nanochat.common import BadInput
from nanochat.decode_cache import DecodeCache
from nanochat.engine import generate, in_pieces, row_key, run_prompts
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder, DecoderConfig
from nanochat.kernels import cpu

class Recorder(GPT):
    """A model that remembers the (rows, columns) of every forward, the prompts it has run, and the rows of every
    decoding step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.shapes, self.prompts, self.decoding = [], [], []

    def trunk(self, ids, **options):
        self.shapes.append(tuple(ids.shape))
        if isinstance(options.get("cache"), DecodeCache):
            self.decoding.append(len(ids))
        elif "cache" in options:
            self.prompts += [row[at < PADDING_POSITION].tolist()
                             for row, at in zip(ids, options["positions"], strict=True)]
        return super().trunk(ids, **options)


def tiny_model(seed=0, sequence_len=256, n_embd=48, dtype=torch.float64):
    """Random weights everywhere, float64 activations: batching then changes logits by less than any draw can notice."""
    model = Recorder(GPTConfig(sequence_len, 265, 2, 2, 1, n_embd, "SL"), dtype)
    return randomized(model.double(), seed).to(dtype)  # the same weights in every dtype


def random_prompts(*lengths):
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(265, (n,), generator=draw).tolist() for n in lengths]


def keys_for(num):
    return [row_key("test", i) for i in range(num)]


def sampled(model, prompts, num_samples, keys, **options):
    options = {"max_new_tokens": 8, "stop_tokens": list(range(40)), "temperature": 1.0} | options
    return generate(model, prompts, num_samples, keys=keys, **options)


def completions(out):
    return [row[:n] for row, n in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)]


def assert_same(a, b):
    assert completions(a) == completions(b) and a.stopped.tolist() == b.stopped.tolist()
    torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_greedy_rows_equal_argmax_of_full_forwards():
    # A prompt of 126 tokens: its completion crosses the short window of 128.
    model, prompts, stop = tiny_model(), random_prompts(3, 126, 1, 9), [5, 17, 80]
    out = generate(model, prompts, 1, max_new_tokens=12, stop_tokens=stop, keys=keys_for(4), temperature=0)
    for prompt, completion in zip(prompts, completions(out), strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and (len(ids) == len(prompt) or ids[-1] not in stop):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert completion == ids[len(prompt):]
    assert len(set(map(tuple, completions(out)))) == 4


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.6, 0), (1.7, 0), (1.0, 5), (0.6, 20)])
@torch.no_grad()
def test_recorded_logprobs_are_those_of_the_distribution_drawn_from(temperature, top_k):
    model, prompts = tiny_model(), random_prompts(6, 2)
    out = sampled(model, prompts, 3, keys_for(6), temperature=temperature, top_k=top_k)
    for n, completion in enumerate(completions(out)):
        prompt = prompts[n // 3]  # rows are prompt-major
        logits = model(torch.tensor([prompt + completion]))[0, len(prompt) - 1: -1] / temperature  # (T, V)
        if top_k:
            allowed = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(top_k).indices, True)
            logits = logits.masked_fill(~allowed, float("-inf"))
        expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(out.logprobs[n, : len(completion)], expected, rtol=0, atol=1e-4)


def test_rows_do_not_depend_on_their_batch():
    model, prompts, keys = tiny_model(), random_prompts(6, 2, 11), keys_for(9)
    whole = sampled(model, prompts, 3, keys)
    assert len(set(map(tuple, completions(whole)))) == 9  # so that a mixed-up row shows
    for max_rows in (1, 3, 6, 7):
        assert_same(sampled(model, prompts, 3, keys, max_rows=max_rows), whole)
    parts = [sampled(model, prompts[:1], 3, keys[:3]), sampled(model, prompts[1:], 3, keys[3:])]
    assert completions(parts[0]) + completions(parts[1]) == completions(whole)
    turned = sampled(model, prompts[::-1], 3, keys[6:] + keys[3:6] + keys[:3])
    assert completions(turned) == completions(whole)[6:] + completions(whole)[3:6] + completions(whole)[:3]
    single = sampled(model, [p for p in prompts for _ in range(3)], 1, keys)
    assert_same(single, whole)


def test_rows_depend_on_their_keys():
    model, prompts = tiny_model(), random_prompts(6)
    first, same, other = (completions(sampled(model, prompts, 2, keys)) for keys in ([1, 2], [1, 1], [3, 2]))
    assert same[0] == same[1] == first[0] and first[0] != first[1]
    assert other[1] == first[1] and other[0] != first[0]


@pytest.mark.parametrize("max_rows, num_samples", [(1, 2), (4, 2), (7, 3), (4, 8), (19, 10), (100, 3)])
def test_at_most_max_rows_decode_together(max_rows, num_samples):
    model = tiny_model()
    sampled(model, random_prompts(3, 4, 5, 6), num_samples, keys_for(4 * num_samples), max_rows=max_rows)
    assert 0 < max(model.decoding) <= min(max_rows, 4 * num_samples)
    assert max(rows for rows, _ in model.shapes) <= max(max_rows, 1)


PROMPT_LENGTHS = [1 + 7 * i % 31 for i in range(16)]


def refilled(max_rows, model=None, **options):
    """16 prompts x 4 rows of geometric lengths, at most `max_rows` together. -> the samples, the model"""
    model = model or tiny_model()
    options = {"max_new_tokens": 40, "stop_tokens": list(range(26))} | options
    return sampled(model, random_prompts(*PROMPT_LENGTHS), 4, keys_for(64), max_rows=max_rows, **options), model


@pytest.fixture(scope="module")
def together():
    """All rows at once."""
    return refilled(10 ** 6)


FAMILIES = [f for f, n in enumerate((4, 3, 2, 1)) for _ in range(n)]


def related_prompts():
    """Prompts of four families, one of them with a single prompt, and what the families begin with."""
    starts, rests = random_prompts(20, 33, 7, 140), random_prompts(3, 9, 1, 5, 30, 12, 2, 8, 6, 6)
    return [starts[f] + rest for f, rest in zip(FAMILIES, rests, strict=True)], starts


@pytest.mark.parametrize("options", [dict(), dict(max_rows=3), dict(max_new_tokens=1), dict(temperature=0, max_rows=1)],
                         ids=str)
def test_what_a_family_of_prompts_begins_with_is_run_once(options):
    (prompts, starts), model = related_prompts(), tiny_model()
    options = {"max_new_tokens": 20} | options
    out = sampled(model, prompts, 1, keys_for(10), families=FAMILIES, **options)
    assert_same(out, sampled(tiny_model(), prompts, 1, keys_for(10), **options))
    # The last token of a prompt is run with the others that decode. The prompt that is alone is cut like the longest.
    cut = [start[:33] for start in starts]
    assert sorted(model.prompts) == sorted(cut + [rest for f, prompt in zip(FAMILIES, prompts, strict=True)
                                                  for rest in [prompt[len(cut[f]): -1]] if rest])


@pytest.mark.parametrize("make", [
    lambda: tiny_model(dtype=torch.float32, n_embd=128),  # by the CPU kernels, if a compiler is there
    lambda: randomized(Decoder(DecoderConfig("qwen2", 256, 265, 2, 4, 2, 128, 32, 256, 1e-6, 1e4, None, True, False,
                                             False, False, True)).double(), 0)], ids=["GPT", "Decoder"])
def test_families_change_no_row_of_other_models(make):
    model, (prompts, _) = make(), related_prompts()
    out = sampled(model, prompts, 1, keys_for(10), families=FAMILIES, max_rows=4, max_new_tokens=20)
    assert_same(out, sampled(model, prompts, 1, keys_for(10), max_new_tokens=20))


def test_families_change_nothing_where_several_rows_share_a_prompt():
    (prompts, _), model = related_prompts(), tiny_model()
    sampled(model, prompts, 2, keys_for(20), families=FAMILIES)
    assert sorted(model.prompts) == sorted(prompts)


@functools.cache
def with_places(max_rows: int):
    """What several tests look at."""
    return refilled(max_rows)


@pytest.mark.parametrize("max_rows", [3, 17])  # one place: test_the_tokens_that_are_held_are_bounded
def test_refilled_places_change_no_row(together, max_rows):
    (whole, _), (out, model) = together, with_places(max_rows)
    assert_same(out, whole)
    assert len(set(whole.lengths.tolist())) > 15 and 0 < int(whole.stopped.sum()) < 64
    # each prompt goes through the model once, whatever max_rows
    assert sorted(model.prompts) == sorted(random_prompts(*PROMPT_LENGTHS))


def test_each_prompt_is_run_once_with_all_rows_together(together):
    assert sorted(together[1].prompts) == sorted(random_prompts(*PROMPT_LENGTHS))
    assert len(together[1].decoding) == int(together[0].lengths.max()) - 1


@pytest.mark.parametrize("max_rows", [3, 17, 40])
def test_places_are_full_as_long_as_rows_wait(together, max_rows):
    (whole, _), (_, model) = together, with_places(max_rows)
    tokens, longest = (whole.lengths - 1).sum().item(), int(whole.lengths.max()) - 1
    # Waiting rows sit down when an eighth of the places is free; in the end the last ones have no successors.
    least_live = max_rows - max(1, -(-max_rows // 8)) + 1
    assert len(model.decoding) <= tokens / least_live + longest
    # rows in order of their prompts' lengths, each batch run to its longest row
    order = sorted(range(64), key=lambda n: (-PROMPT_LENGTHS[n // 4], n))
    in_turn = sum(int(whole.lengths[order[i: i + max_rows]].max()) - 1 for i in range(0, 64, max_rows))
    assert max_rows == 40 or len(model.decoding) < 0.65 * in_turn


@pytest.mark.parametrize("options", [dict(temperature=0), dict(temperature=0.7, top_k=9), dict(max_new_tokens=1),
                                     dict(stop_tokens=[]), dict(stop_tokens=list(range(265))), dict(max_new_tokens=2)],
                         ids=str)
def test_refilled_places_change_no_row_under_other_options(options):
    options = {"max_new_tokens": 12} | options
    (whole, _), (out, model) = refilled(10 ** 6, **options), refilled(5, **options)
    assert_same(out, whole)
    assert sorted(model.prompts) == sorted(random_prompts(*PROMPT_LENGTHS))
    if options["max_new_tokens"] == 1 or options.get("stop_tokens") == list(range(265)):
        assert model.decoding == [] and whole.lengths.eq(1).all()


@pytest.mark.skipif(cpu.library() is None, reason="no C compiler")
@pytest.mark.parametrize("max_rows", [3, 17])
def test_refilled_places_change_no_row_by_the_kernel(max_rows):
    # Logits are off by rounding, which moves no draw here.
    make = lambda: tiny_model(n_embd=64, dtype=torch.float32)
    (whole, _), (out, _), (exact, _) = (refilled(10 ** 6, make()), refilled(max_rows, make()),
                                        refilled(10 ** 6, tiny_model(n_embd=64)))
    assert_same(out, whole)
    assert completions(whole) == completions(exact)


@pytest.mark.parametrize("most", [1, 300, 600])
def test_the_tokens_that_are_held_are_bounded(monkeypatch, together, most):
    caches, make = [], engine.DecodeCache
    monkeypatch.setattr(engine, "DecodeCache", lambda *args: (caches.append(make(*args)), caches[-1])[1])
    out, model = refilled(10 ** 6, max_cached_tokens=most)
    assert_same(out, together[0])
    assert sorted(model.prompts) == sorted(random_prompts(*PROMPT_LENGTHS))
    held = caches[0].k[0].shape[0] * caches[0].k[0].shape[2] + caches[0].prefix_k[0].shape[0] * max(PROMPT_LENGTHS)
    places = len(caches[0].lengths)
    assert max(model.decoding) <= places and (places == 1 if most == 1 else 0.75 * most < held <= most)


def test_a_slot_serves_one_prompt_after_another(monkeypatch, together):
    # Few slots: prompts wait for a slot, not for a place.
    whole = together[0]
    monkeypatch.setattr(slots, "SLOTS", 1)
    caches, make = [], engine.DecodeCache
    monkeypatch.setattr(engine, "DecodeCache", lambda *args: (caches.append(make(*args)), caches[-1])[1])
    out, model = refilled(9)
    assert len(caches) == 1 and caches[0].prefix_lengths.shape == (3,) and caches[0].lengths.shape == (9,)
    assert_same(out, whole)
    assert sorted(model.prompts) == sorted(random_prompts(*PROMPT_LENGTHS))


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), samples=st.integers(1, 5),
       max_rows=st.integers(1, 12), new=st.integers(1, 12), stops=st.integers(0, 120))
def test_any_number_of_places_gives_the_same_rows(lengths, samples, max_rows, new, stops):
    prompts, keys = random_prompts(*lengths), keys_for(len(lengths) * samples)
    options = dict(max_new_tokens=new, stop_tokens=list(range(stops)))
    model = tiny_model()
    out = sampled(model, prompts, samples, keys, max_rows=max_rows, **options)
    assert sorted(model.prompts) == sorted(prompts) and max(model.decoding, default=0) <= max_rows
    assert_same(out, sampled(tiny_model(), prompts, samples, keys, **options))


@pytest.mark.parametrize("new, stops, stopped, lengths", [(1, 265, True, {1}), (8, 0, False, {8}),
                                                          (50, 200, True, None)])
def test_rows_end_by_an_end_token_or_run_out_of_tokens(new, stops, stopped, lengths):
    out = sampled(tiny_model(), random_prompts(3), 4, keys_for(4), max_new_tokens=new, stop_tokens=list(range(stops)))
    assert set(out.stopped.tolist()) == {stopped} and lengths in (None, set(out.lengths.tolist()))
    assert out.tokens.shape == out.logprobs.shape == (4, int(out.lengths.max()))


def test_an_end_token_is_included_and_nothing_follows_it():
    model, stop = tiny_model(), set(range(40))
    out = sampled(model, random_prompts(6, 2), 12, keys_for(24))
    for row, completion in enumerate(completions(out)):
        assert not stop & set(completion[:-1])
        assert bool(out.stopped[row]) == (completion[-1] in stop)
        assert out.stopped[row] or len(completion) == 8
        assert out.tokens[row, len(completion):].eq(0).all() and out.logprobs[row, len(completion):].eq(0).all()
        assert out.logprobs[row, : len(completion)].lt(0).all()
    assert 0 < int(out.stopped.sum()) < 24  # both finish reasons occur


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_finished_rows_leave_without_changing_the_others(monkeypatch, share):
    reference = sampled(tiny_model(), random_prompts(6, 2), 8, keys_for(16), max_new_tokens=20)
    model = tiny_model()
    monkeypatch.setattr(engine, "COMPACT_BELOW", share)
    out = sampled(model, random_prompts(6, 2), 8, keys_for(16), max_new_tokens=20)
    assert_same(out, reference)
    decoding = model.decoding
    alive = [int((out.lengths > t + 1).sum()) for t in range(len(decoding))]
    if share == 0.0:
        assert set(decoding) == {alive[0]}  # all that have not ended with their first token
    elif share == 1.0:
        assert decoding == alive and len(set(alive)) > 3
    else:
        assert all(rows <= 2 * live for rows, live in zip(decoding, alive, strict=True)) and min(decoding) < 16


@pytest.mark.parametrize("share", [0.8, 1.0])
def test_groups_that_shrink_unevenly_change_no_row(monkeypatch, share):
    prompts, keys, options = (random_prompts(6, 2, 9, 2, 30), keys_for(40),
                              dict(max_new_tokens=24, stop_tokens=list(range(60))))
    reference = sampled(tiny_model(), [prompt for prompt in prompts for _ in range(8)], 1, keys, **options)
    monkeypatch.setattr(engine, "COMPACT_BELOW", share)
    model = tiny_model()
    out = sampled(model, prompts, 8, keys, **options)
    assert_same(out, reference)
    alive = [(out.lengths.view(5, 8) > t + 1).sum(dim=1).tolist() for t in range(int(out.lengths.max()) - 1)]
    # some groups are gone, others of unlike size
    assert any(0 in groups and 0 < max(groups) != min(n for n in groups if n) for groups in alive)
    assert all(sum(groups) <= rows <= sum(groups) / share for rows, groups in zip(model.decoding, alive, strict=True))


PIECES = [(1, [(1, 1), (1, 2), (1, 2), (1, 5), (1, 9), (1, 130)]), (10, [(3, 2), (1, 5), (1, 9), (1, 130)]),
          (19, [(3, 2), (2, 9), (1, 130)]), (780, [(6, 130)]), (779, [(5, 9), (1, 130)])]


@pytest.mark.parametrize("tokens, shapes", PIECES)
@torch.no_grad()
def test_prompts_in_pieces_give_the_same_states(monkeypatch, tokens, shapes):
    model, prompts = tiny_model(), random_prompts(1, 2, 2, 5, 9, 130)
    monkeypatch.setattr(engine, "PREFILL_TOKENS", tokens)
    hidden = []
    for piece in in_pieces(prompts, [len(prompt) for prompt in prompts]):
        cache, states = run_prompts(model, piece)
        hidden += states
        assert cache.length == max(map(len, piece)) and states.shape == (len(piece), 48)
        assert (cache.positions < PADDING_POSITION).sum(dim=1).tolist() == [len(prompt) for prompt in piece]
    assert model.shapes == shapes and model.prompts == prompts
    for state, prompt in zip(hidden, prompts, strict=True):
        assert (state - model.trunk(torch.tensor([prompt]))[0, -1]).abs().max() < 1e-12


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), max_size=20).map(sorted), tokens=st.integers(1, 200))
def test_pieces_are_as_large_as_they_may_be(lengths, tokens):
    items = [(i, length) for i, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "PREFILL_TOKENS", tokens)
        pieces = in_pieces(items, lengths)
    assert [item for piece in pieces for item in piece] == items
    padded = lambda piece: len(piece) * piece[-1][1]
    assert all(len(piece) == 1 or padded(piece) <= tokens for piece in pieces)
    assert all(padded([*piece, following[0]]) > tokens for piece, following in zip(pieces, pieces[1:], strict=False))


@pytest.mark.parametrize("tokens", [1, 10])
@pytest.mark.parametrize("max_rows", [4, 1024])
def test_prompts_in_pieces_change_no_row(monkeypatch, tokens, max_rows):
    # The prompt of 126 tokens is longer than a piece.
    prompts, keys = random_prompts(9, 1, 126, 2, 5), keys_for(15)
    reference = sampled(tiny_model(), prompts, 3, keys)
    monkeypatch.setattr(engine, "PREFILL_TOKENS", tokens)
    model = tiny_model()
    assert_same(sampled(model, prompts, 3, keys, max_rows=max_rows), reference)
    in_pieces = sorted(prompts, key=len)  # of those that sit down together; those with the longest prompts do so first
    assert model.prompts == (in_pieces if max_rows == 1024 else in_pieces[3:] + in_pieces[2::-1])


@pytest.mark.parametrize("length, new", [(13, 4), (17, 1), (0, 4)])
def test_a_prompt_that_does_not_fit_is_refused_by_name(length, new):
    fits = generate(tiny_model(sequence_len=16), [[1] * 12], 1, max_new_tokens=4, stop_tokens=[], keys=[1])
    assert fits.lengths.tolist() == [4]
    model = tiny_model(sequence_len=16)
    with pytest.raises(ValueError) as error:
        generate(model, [[1, 2], [1] * length], 1, max_new_tokens=new, stop_tokens=[], keys=[1, 2])
    assert all(part in str(error.value) for part in ("prompt 1", f"{length} tokens", str(16 - new), "16"))
    assert model.shapes == []  # before anything has run


@pytest.mark.parametrize("options, problem", [
    (dict(max_new_tokens=0), "max_new_tokens 0: must be at least 1"),
    *((dict(temperature=float(t)), f"temperature {float(t)}: must be 0") for t in ("-1", "1e-42", "nan", "inf"))])
def test_options_that_give_no_numbers_are_refused(options, problem):
    with pytest.raises(BadInput, match=problem):
        generate(tiny_model(), [[1]], 1, **dict(max_new_tokens=2, stop_tokens=[], keys=[0]) | options)


@pytest.mark.parametrize("max_rows", [2, 1024])
def test_should_stop_returns_at_once(max_rows):
    model = tiny_model()
    out = sampled(model, random_prompts(3, 4, 5), 2, keys_for(6), max_new_tokens=100, stop_tokens=[],
                  max_rows=max_rows, should_stop=lambda: True)
    assert model.shapes == [] and out.lengths.max() == 0 and not out.stopped.any()


@pytest.mark.parametrize("max_rows", [1, 1024])
def test_should_stop_is_asked_at_every_token(max_rows):
    model = tiny_model()
    answers = iter([False] * 5 + [True] * 50)
    out = sampled(model, random_prompts(3), 2, keys_for(2), max_new_tokens=100, stop_tokens=[], max_rows=max_rows,
                  should_stop=lambda: next(answers))
    assert len(model.prompts) == 1 and len(model.decoding) == 5
    assert out.lengths.tolist() == ([6, 6] if max_rows == 1024 else [6, 0])


def test_narrow_activations_sample_from_a_copy_that_follows_the_weights():
    model = GPT(GPTConfig(64, 265, 2, 2, 1, 48, "L"), torch.bfloat16)
    model.init_weights(torch.Generator().manual_seed(0))
    counterpart = engine.inference_model(model)
    assert ({p.dtype for p in counterpart.parameters()} == {torch.bfloat16}
            and engine.inference_model(model) is counterpart)
    assert ({p.dtype for p in model.parameters()} == {torch.float32}
            and not any("inference" in name for name in model.state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(5)[None]
    model(ids).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(counterpart(ids), model(ids))
        assert engine.inference_model(model) is counterpart and torch.equal(counterpart(ids), model(ids))
    out = sampled(model, [[1, 2, 3]], 2, [1, 2])
    assert out.tokens.shape[0] == 2


def test_weights_as_wide_as_activations_are_sampled_from_directly():
    model = tiny_model()
    assert engine.inference_model(model) is model


@pytest.mark.parametrize("prompts, num_samples", [([], 2), ([[1, 2]], 0)])
@pytest.mark.parametrize("tool", [None, lambda rows, tokens: {}])
def test_no_rows(prompts, num_samples, tool):
    model = tiny_model()
    out = sampled(model, prompts, num_samples, [], tool=tool)
    assert out.tokens.shape[0] == 0 and out.lengths.tolist() == [] and model.shapes == []
    assert (out.forced is None) == (tool is None)
