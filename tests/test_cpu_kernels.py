"""The CPU kernels of attention and drawing against their PyTorch versions in fp64; whole models with and without
kernels."""
import contextlib
import math
import weakref

import pytest
import torch
from conftest import randomized
from test_decode_cache import called as names_of_kernels, decoded

from nanochat import engine, gpt
from nanochat.attention import PADDING_POSITION, KVCache, Mask, attend, make_mask
from nanochat.decode_cache import DecodeCache
from nanochat.engine import generate, pick, run_prompts
from nanochat.gpt import GPT, GPTConfig
from nanochat.kernels import cpu
from nanochat.kernels.layer import LEAST_ROWS, after_attention, before_attention, packed_layer

KERNELS = pytest.mark.skipif(cpu.library() is None, reason="no C compiler")
called = names_of_kernels  # the fixture
NO_END = 10 ** 6  # a window or context that no row here reaches
SHAPES = [  # U, Hkv, R, group, T, tokens of the prefix, D
    (2, 2, 3, 2, 5, 7, 32), (1, 1, 1, 1, 70, 0, 32), (2, 2, 3, 1, 33, 64, 64), (2, 1, 2, 3, 1, 19, 32),
    (3, 2, 1, 2, 1, 0, 96), (2, 2, 5, 1, 64, 1, 32),
    (1, 2, 9, 4, 2, 35, 32), (1, 1, 2, 1, 16, 16, 128), (2, 1, 2, 2, 1, 3, 128)]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(U, Hkv, R, group, T, Tp, D, window=NO_END, context=NO_END, own=None):
    """q (heads innermost, as the model has them), `own` keys and values, those of a prefix; the mask. Prompts are
    shorter by one token each."""
    own = T if own is None else own
    q = random(U, R, T, Hkv, group, D).permute(0, 3, 1, 4, 2, 5)
    inputs = [q, *(random(U, Hkv, R, own, D, seed=s) for s in (1, 2)),
              *(random(U, Hkv, Tp, D, seed=s) for s in (3, 4) if Tp)]
    prefix, cache, lengths = None, KVCache(1), torch.tensor([max(1, Tp - u) for u in range(U)])
    if Tp:
        prefix = KVCache(1)
        columns = torch.arange(Tp).expand(U, Tp)
        prefix.positions = torch.where(columns < lengths[:, None], columns, PADDING_POSITION)
    cache.length = max(0, own - T)
    positions = lengths.repeat_interleave(R)[:, None] + own - T + torch.arange(T)
    return inputs, make_mask(T, window, context, cache, prefix, positions, torch.float32)


def wide(mask):
    return Mask(*(None if x is None else x.double() for x in (mask.own, mask.prefix)), mask.causal)


def call(inputs, mask):
    q, k, v, *prefix = inputs
    return attend(q, k, v, mask, *prefix)


def assert_close(a, b, tolerance=3e-6):
    assert a.shape == b.shape and a.isfinite().all()
    assert a.numel() == 0 or (a - b).abs().max() <= tolerance * max(1, b.abs().max())


def assert_agrees(inputs, mask, grad=None):
    """Outputs and gradients of the kernels, against the counterpart in fp64."""
    inputs, exact = ([x.detach().requires_grad_() for x in inputs],
                     [x.detach().double().requires_grad_() for x in inputs])
    out, expected = call(inputs, mask), call(exact, wide(mask))
    assert "Kernel" in out.grad_fn.name() and "Kernel" not in expected.grad_fn.name()
    grad = random(*out.shape, seed=9) if grad is None else grad(out)
    for a, b in zip((out, *torch.autograd.grad(out, inputs, grad)),
                    (expected, *torch.autograd.grad(expected, exact, grad.double())), strict=True):
        assert_close(a, b)
    with torch.no_grad():
        assert_close(call(inputs, mask), expected)


@KERNELS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window, context",
                         [(NO_END, NO_END), (NO_END, 2 * NO_END), (3, NO_END), (40, NO_END), (0, NO_END)])
def test_attention_equals_the_pytorch_version(shape, window, context):
    assert_agrees(*case(*shape, window=window, context=context))


@KERNELS
def test_scores_of_ten_thousand_are_right_to_their_rounding():
    inputs, mask = case(2, 2, 2, 1, 40, 20, 32)
    inputs = [x.requires_grad_() for x in (3e3 * inputs[0], *inputs[1:])]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = call(inputs, mask), call(exact, wide(mask))
    for a, b in zip((out, *torch.autograd.grad(out.sum(), inputs)),
                    (expected, *torch.autograd.grad(expected.sum(), exact)), strict=True):
        assert a.isfinite().all() and (a - b).abs().max() <= 3e-3 * b.abs().max()  # scores of 1e4 are known to 1e-3


@KERNELS
@pytest.mark.parametrize("shape, own",
                         [((2, 2, 2, 2, 5, 7, 32), 14), ((1, 1, 2, 1, 33, 0, 32), 40), ((2, 1, 3, 2, 1, 19, 64), 34),
                          ((1, 2, 1, 1, 64, 3, 32), 65), ((3, 2, 1, 2, 1, 20, 32), 0), ((2, 1, 3, 1, 1, 64, 64), 0)])
@pytest.mark.parametrize("window", [NO_END, 12])
def test_queries_may_have_more_own_keys_than_queries_or_none(shape, own, window):
    # More: columns of a cache. None: the last layer of a prompt, whose last token alone has a query.
    assert_agrees(*case(*shape, own=own, window=window))


@KERNELS
@pytest.mark.parametrize("T", [5, 1])
@pytest.mark.parametrize("turn",
                         [lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT,
                          lambda x: torch.stack([x, x], dim=-2)[..., 0, :],
                          lambda x: torch.stack([x, x], dim=-1)[..., 0],
                          lambda x: x.flip(0)[:1].expand_as(x)],
                         ids=["rows first", "channels first", "gaps", "channels apart", "one for all"])
def test_memory_may_lie_in_any_order(T, turn):
    inputs, mask = case(2, 2, 3, 2, T, 9, 32, own=21, window=24)  # which ends inside of the prefix
    assert_agrees([turn(x) for x in inputs], mask)
    assert_agrees([inputs[0], turn(inputs[1]), *inputs[2:]], mask)  # keys and values that lie differently
    assert_agrees(inputs, mask, lambda out: turn(random(*out.shape)))  # the gradient


@KERNELS
def test_a_second_backward_pass_gives_the_same_and_no_input_changes():
    """And a gradient of a gradient is refused."""
    inputs, mask = case(2, 2, 3, 2, 35, 7, 32)
    inputs = [x.requires_grad_() for x in inputs]
    before, out = [x.detach().clone() for x in (*inputs, mask.prefix)], call(inputs, mask)
    grad, value = random(*out.shape), out.detach().clone()
    kept = grad.clone()
    first, second = (torch.autograd.grad(out, inputs, grad, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second)) and torch.equal(grad, kept) and torch.equal(out, value)
    assert all(torch.equal(a, b) for a, b in zip(before, (*inputs, mask.prefix), strict=True))
    for given, seen in ((inputs, mask), ([x.detach().double().requires_grad_() for x in inputs], wide(mask))):
        grads = torch.autograd.grad(call(given, seen).square().sum(), given, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grads[0].sum().backward()


@KERNELS
@pytest.mark.parametrize("T", [1, 40])
def test_the_number_of_threads_changes_nothing(monkeypatch, T):
    inputs, mask = case(3, 2, 3, 2, T, 20, 32)
    inputs, logits, results = [x.requires_grad_() for x in inputs], random(50, 100), []
    for count in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        out = call(inputs, mask)
        with torch.no_grad():
            results.append((out, call(inputs, mask), *torch.autograd.grad(out, inputs, torch.ones_like(out)),
                            *pick(logits, torch.arange(50), 0, 1.0, 0)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@KERNELS
@pytest.mark.parametrize("V", [1, 5, 16, 33, 265, 1000])
@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.7, 0), (1.0, 3), (1.7, 2000), (0.0, 0), (0.0, 3)])
def test_the_same_tokens_are_drawn(called, V, temperature, top_k):
    logits = (3 * random(400, V + 20))[:, 3: 3 + V]
    logits[:, V // 2] = float("-inf") if V > 1 else 0.0
    keys, kept = torch.arange(400) * 7919, logits.clone()
    tokens, logprobs = pick(logits, keys, 5, temperature, top_k)
    assert called == ["uniform_noise", "draw"][temperature == 0:] and torch.equal(logits, kept)
    expected, expected_logprobs = pick(logits.double(), keys, 5, temperature, top_k)
    same = tokens == expected
    assert ((~same).sum() <= 1  # one noise may fall onto a boundary, by rounding
            and (logprobs - expected_logprobs)[same].abs().max() < 2e-6)
    assert tokens.dtype == torch.long and logprobs.dtype == torch.float32
    assert V == 1 or (tokens != V // 2).all() and tokens.unique().numel() >= 2


@KERNELS
@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.6, 0), (0.0, 0), (1.0, 3)])
@pytest.mark.parametrize("softcap", [15.0, None])
def test_tokens_are_drawn_from_the_outputs_of_a_head(monkeypatch, called, softcap, temperature, top_k):
    model, keys = model_of(), torch.arange(300) * 7919
    monkeypatch.setattr(model, "softcap", softcap)
    hidden = 8 * random(300, 128)
    with torch.no_grad():
        tokens, logprobs = engine.pick_after(model, hidden, keys, 5, temperature, top_k)
        assert called == ["uniform_noise", "draw"][temperature == 0:]  # with a top-k too
        z = model.double().lm_head(hidden.double())[:, :265]
        logits = z if softcap is None else softcap * torch.tanh(z / softcap)
        expected, expected_logprobs = pick(logits, keys, 5, temperature, top_k)
    same = tokens == expected  # where the softcap bends logits
    assert (~same).sum() <= 1 and (logprobs - expected_logprobs)[same].abs().max() < 1e-4
    assert tokens.unique().numel() > 50


@KERNELS
def test_the_first_of_equal_logits_is_the_greedy_token():
    logits = torch.zeros(3, 40)
    logits[1, [17, 30]], logits[2] = 1.0, float("nan")
    tokens, logprobs = pick(logits, torch.arange(3), 0, 0.0, 0)
    assert tokens.tolist()[:2] == [0, 17] and 0 <= tokens[2] < 40 and logprobs.isnan().tolist() == [False, False, True]


@KERNELS
def test_the_ends_of_the_noise_draw_the_first_and_the_last_possible_token(monkeypatch):
    """A token takes the noise from its lower boundary on: of 4 equal weights token n has [n / 4, (n + 1) / 4). All is
    exact in floating point. In the second row they are in different vectors."""
    of_noise = lambda noise: monkeypatch.setattr(engine, "uniform_noise", lambda keys, position: noise)
    for noise, first in ((0.0, True), (1 - 2 ** -53, False)):
        of_noise(torch.full((50,), noise, dtype=torch.float64))
        for possible in (range(2, 38), range(16, 32), range(69, 70), range(0, 1), (5, 64)):
            logits = torch.full((50, 70), float("-inf"))
            logits[:, list(possible)] = 2 * random(50, len(possible))
            drawn = pick(logits, torch.arange(50), 0, 1.0, 0)[0]
            assert drawn.tolist() == [min(possible) if first else max(possible)] * 50
    noise = torch.tensor([0, .25, .5, .75]).double()
    of_noise(torch.cat([noise, noise, noise - 2 ** -53 * (noise > 0)]))
    logits, places = torch.full((12, 100), float("-inf")), ([3, 4, 5, 6], [0, 15, 16, 99], [0, 15, 16, 99])
    for i, columns in enumerate(places):
        logits[4 * i: 4 * i + 4, columns] = 7.0
    tokens, logprobs = pick(logits, torch.arange(12), 0, 1.0, 0)
    assert tokens.tolist() == [3, 4, 5, 6, 0, 15, 16, 99, 0, 0, 15, 16] and (logprobs + math.log(4)).abs().max() < 1e-6


@KERNELS
def test_noise_is_the_same_by_the_kernel(monkeypatch):
    keys = torch.randint(-2 ** 63, 2 ** 63 - 1, (3000, 2), generator=torch.Generator().manual_seed(0))[:, 0]
    for position in (0, 7, 2 ** 40, torch.arange(3000), torch.arange(6000)[::2]):
        ours = engine.uniform_noise(keys, position)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "library", lambda: None)
            assert torch.equal(ours, engine.uniform_noise(keys, position)) and ours.dtype == torch.float64


def model_of(n_layer=2, n_kv_head=4, pattern="L", dtype=torch.float32):
    """A model in which everything takes part; its short window is 128."""
    return randomized(GPT(GPTConfig(256, 265, n_layer, 4, n_kv_head, 128, pattern), dtype).to(dtype))


IDS = torch.randint(265, (3, 140), generator=torch.Generator().manual_seed(1))


@KERNELS
@pytest.mark.parametrize("n_layer, n_kv_head, pattern", [(1, 4, "L"), (2, 4, "L"), (3, 2, "SL")])
def test_a_model_is_the_same_with_kernels(monkeypatch, called, n_layer, n_kv_head, pattern):
    model, prompts = model_of(n_layer, n_kv_head, pattern), [IDS[0, :5].tolist(), IDS[1, :120].tolist()]

    def run():
        model.zero_grad()
        logits = model(IDS)
        logits.square().mean().backward()
        samples = [generate(model, prompts, 3, max_new_tokens=20, stop_tokens=[7], keys=list(range(6)), temperature=t)
                   for t in (1.0, 0.0)]
        return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}, *samples

    ours = run()
    assert {"before_backward", "after_backward", "attend_forward", "attend_backward", "decode_trunk",
            "draw"} <= set(called)
    monkeypatch.setattr(cpu, "library", lambda: None)
    called.clear()
    theirs = run()
    assert not called
    assert_close(ours[0], theirs[0], 1e-5)
    for name, grad in ours[1].items():
        assert (grad - theirs[1][name]).abs().max() <= 2e-5 * max(5e-3, theirs[1][name].abs().max()), name
    for a, b in zip(ours[2:], theirs[2:], strict=True):
        assert torch.equal(a.tokens, b.tokens) and (a.logprobs - b.logprobs).abs().max() < 1e-5


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 3e-5)])
@pytest.mark.parametrize("n_layer, n_kv_head, pattern", [(1, 4, "L"), (1, 2, "SL"), (2, 4, "SL"), (3, 2, "S")])
def test_last_only_and_kept_give_tokens_of_the_whole(dtype, tolerance, n_layer, n_kv_head, pattern):
    model, lengths, columns = (model_of(n_layer, n_kv_head, pattern, dtype),
                               torch.tensor([140, 1, 131]), torch.arange(140))
    positions, results = torch.where(columns < lengths[:, None], columns, PADDING_POSITION), []
    for last_only in (False, True):
        cache = KVCache(n_layer)
        hidden = model.trunk(IDS, positions=positions, cache=cache, last_only=last_only)
        hidden = hidden[:, 0] if last_only else hidden[torch.arange(3), lengths - 1]
        assert hidden.shape == (3, 128) and cache.length == 140
        # The keys are used too: as a group's prompt they take gradients.
        real = (positions < PADDING_POSITION).repeat_interleave(n_kv_head, dim=0)[..., None]
        keys = sum((x.flatten(0, 2) * real).square().sum() for x in (*cache.k, *cache.v))
        grads = torch.autograd.grad(hidden.sin().sum() + 1e-2 * keys, list(model.parameters()), materialize_grads=True)
        results.append([hidden.detach(), cache.last_embedding.detach(), *grads])
    kept = torch.tensor([3, 139, 140, 300, 3])
    for i, hidden in enumerate((model.trunk(IDS).flatten(0, 1)[kept], model.trunk(IDS, kept=kept))):
        grads = torch.autograd.grad(hidden.sin().sum(), list(model.parameters()), materialize_grads=True)
        results[i] += [hidden.detach(), *grads]
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= tolerance * max(1, a.abs().max())
    with torch.no_grad():
        again = model.trunk(IDS, positions=positions, cache=KVCache(n_layer), last_only=True)[:, 0]
    assert (again - results[0][0]).abs().max() <= tolerance


def test_joined_projections_go_when_sampling_ends(monkeypatch):
    model = model_of()
    with pytest.raises(KeyError), model.joined_projections():
        assert torch.equal(model.transformer.h[0].attn.c_qkv[128:256], model.transformer.h[0].attn.c_k.weight)
        with torch.no_grad():
            model.trunk(IDS)
        assert cpu.library() is None or len(model.transformer.h[0].ready) == 2
        raise KeyError
    monkeypatch.setattr(model.transformer.h[1].attn, "joined_weight", lambda: 1 / 0)  # half way
    with pytest.raises(ZeroDivisionError), model.joined_projections():
        pass
    assert all(block.attn.c_qkv is None and "c_qkv" not in vars(block.attn) and block.ready is None
               for block in model.transformer.h)


@KERNELS
@pytest.mark.parametrize("narrow", [128, 127])
def test_a_token_is_one_call_and_weights_are_packed_once(monkeypatch, called, narrow):
    monkeypatch.setattr(gpt, "NARROW", narrow)
    keys, layers = list(range(LEAST_ROWS * torch.get_num_threads())), len(model_of().transformer.h)
    out = generate(model_of(), [[1, 2, 3]], len(keys), max_new_tokens=5, stop_tokens=[], keys=keys)
    assert (called.count("pack_weight"), called.count("decode_trunk")) == (6 * layers, 4)
    assert "before_forward" not in called and "decode" not in called
    assert {"split_heads", "relu_squared"} < set(called)  # the prompt has too few tokens
    called.clear()
    fewer = generate(model_of(), [[1, 2, 3]], len(keys) - 1, max_new_tokens=5, stop_tokens=[], keys=keys[:-1])
    assert (called.count("decode_trunk"), called.count("decode")) == ((4, 0) if narrow == 128 else (0, 4 * layers))
    assert torch.equal(out.tokens[:-1], fewer.tokens) and (out.logprobs[:-1] - fewer.logprobs).abs().max() < 1e-5


def one_token(model, cache, places, **options):
    """Hidden states of a first token after the prompt in slot 0."""
    cache.begin(places, torch.zeros_like(places))
    positions = cache.advance(places, torch.ones_like(places))[:, None]
    return model.trunk(places[:, None], positions=positions, cache=cache, **options)


def small_cache(model):
    cache = DecodeCache(model.config, 2, 1, 2, 3, 4, torch.float32, torch.device("cpu"))
    cache.put(torch.tensor([0]), run_prompts(model, [[1, 2, 3]])[0])
    return cache


@KERNELS
def test_a_kernel_of_earlier_weights_is_made_again_and_the_memory_of_a_cache_goes_with_it(called):
    model, places, found = model_of(), torch.arange(2), []
    with torch.inference_mode():
        cache = small_cache(model)
        for _ in range(2):  # what the cache has of the prompt stays as it was
            with model.joined_projections():
                found += [one_token(model, cache, places), one_token(model, cache, places)]
            for p in model.parameters():
                p.data *= 0.5
    assert called.count("decode_trunk") == 4 and torch.equal(*found[:2]) and torch.equal(*found[2:])
    assert not torch.equal(found[0], found[2]) and cache.step is not None
    keys = weakref.ref(cache.k[0])
    del cache
    assert keys() is None  # at once: nothing that waits for the garbage collector holds it


@KERNELS
@pytest.mark.parametrize("joined", [True, False])
def test_kept_rows_of_a_decoding_step(joined):
    model, places = model_of(), torch.arange(2)
    with torch.inference_mode(), model.joined_projections() if joined else contextlib.nullcontext():
        every = one_token(model, small_cache(model), places)[:, 0]
        kept = one_token(model, small_cache(model), places, kept=torch.tensor([1]))
    assert kept.shape == (1, 128) and (kept - every[1:]).abs().max() < 1e-5


@KERNELS
@pytest.mark.parametrize("n_kv_head, pattern", [(4, "L"), (2, "SL")])
def test_a_token_by_one_kernel_is_what_it_is_by_those_of_layers(monkeypatch, called, n_kv_head, pattern):
    monkeypatch.setattr(gpt, "NARROW", 0)  # so that few rows go another way with both
    model, count = model_of(2, n_kv_head, pattern), LEAST_ROWS * torch.get_num_threads()
    rows = [(n % 3, [5 + n, 7, 9 + n]) for n in range(count + 2)]
    prompts, starts = [[1, 2, 3], IDS[0].tolist(), [6]], [0] * count + [1, 1]  # two rows begin late
    with torch.no_grad():
        apart = decoded(model, prompts, rows, starts)
        assert "decode_trunk" not in called and "before_forward" in called
        with model.joined_projections():
            together = decoded(model, prompts, rows, starts)
    assert "decode_trunk" in called
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


@KERNELS
@pytest.mark.parametrize("heads, kv_heads", [(4, 1), (4, 2), (4, 4)])  # 16, 32 and 64 rows of keys, in heads of 16
def test_heads_that_no_kernel_takes_decode_all_the_same(called, heads, kv_heads):
    model = randomized(GPT(GPTConfig(64, 50, 2, heads, kv_heads, 64, "L")))
    rows = [(0, [1, 2, 3 + n]) for n in range(LEAST_ROWS * torch.get_num_threads())]
    with torch.no_grad():
        with model.joined_projections():
            ours = decoded(model, [[5, 6]], rows, [0] * len(rows))
        model.double().compute_dtype = torch.float64
        expected = decoded(model, [[5, 6]], rows, [0] * len(rows))
    assert not {"decode", "decode_trunk", "before_forward"} & set(called) and "after_forward" in called
    assert all((a - b).abs().max() < 3e-5 for a, b in zip(ours, expected, strict=True))


@KERNELS
def test_weights_of_another_dtype_are_cast(called):
    for dtype in (torch.bfloat16, torch.float64):
        model = model_of().to(dtype)
        ours = model(IDS)
        assert "after_forward" in called and ours.dtype == torch.float32
        assert torch.equal(ours, model.float()(IDS))
        called.clear()


@KERNELS
def test_a_row_of_a_layer_depends_on_no_other_row():
    x, x0, y = (random(77, 1, 64, seed=s) for s in range(3))
    w_q, w_k, w_v, w_o, w_up, w_down = (random(n, m, seed=s) / 8 for s, (n, m) in enumerate(
        ((64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (64, 96))))
    a, b = torch.tensor(0.7), torch.tensor(-0.3)
    angles = random(77, 1, 1, 16)
    before, after = packed_layer((w_q, w_k, w_v), (w_o, w_up, w_down))

    def layer(rows, *ready):
        heads = before_attention(x[rows], x0[rows], a, b, w_q, w_k, w_v, None, None,
                                 (angles[rows].cos(), angles[rows].sin()), 1.2, len(x[rows]), *ready[:1])
        return [*heads, after_attention(x[rows], y[rows], w_o, w_up, w_down, *ready[1:])]

    with torch.no_grad():
        whole = layer(slice(None))
        for rows in (slice(0, 1), slice(5, 18), slice(60, 77)):
            for part, ready in zip(layer(rows), layer(rows, before, after), strict=True):
                assert torch.equal(part, ready)
            for part, of_all in zip(layer(rows), whole, strict=True):
                assert torch.equal(part, of_all[rows])
