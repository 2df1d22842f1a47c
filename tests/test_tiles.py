"""Products in bf16 on CPU against fp64 products of the same rounded operands, and an imported model's layer against
PyTorch's operations, in all three kinds of kernels that this machine can run."""
import contextlib
import functools
import math

import pytest
import torch
import torch.nn.functional as F

from nanochat.attention import first_columns
from nanochat.kernels import cpu, tiles
from nanochat.kernels.cpu import library as native_library
from nanochat.kernels.linear_logprob import linear_logprob
from nanochat.kernels.linear_policy_loss import linear_policy_loss
from nanochat.kernels.losses import PolicyLoss
from nanochat.kernels.ops import to_units

# What compilers are told, and what /proc/cpuinfo must say
VARIANTS = {"native": ("", ""), "AVX-512 with bf16": ("-march=x86-64-v4 -mavx512bf16", "avx512_bf16 avx512bw avx512vl"),
            "AVX-512": ("-march=x86-64-v4", "avx512f avx512bw avx512vl avx512dq avx512cd"),
            "AVX2": ("-march=haswell", "avx2 fma bmi2")}
ROWS = (1, 15, 16, 17, 31, 33, 300, 1100)
SIZES = ((32, 32), (96, 64), (64, 160), (2112, 64), (64, 672))  # of weights; 64 panels and 20 are taken at a time
# |a - b| / |b| of vectors. bf16 rounds a number by 1/512 at most, 0.0011 in the root of the mean square: sums in other
# orders let few numbers round differently, and the backward pass of the MLP reads rounded inputs.
OF_SUMS, OF_ROUNDING = 5e-4, 1e-2


@functools.cache
def library_of(variant: str):
    """The kernels as another machine compiles them (-O1 takes a third of the time); None where this one cannot compile
    or run them."""
    march, features = VARIANTS[variant]
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as f, pytest.MonkeyPatch.context() as patch:
        if native_library() is None or not set(f.read().split()).issuperset(features.split()):
            return None
        flags = ["-O1" if flag == "-O3" else flag for flag in cpu.FLAGS if flag != cpu.NATIVE]
        patch.setattr(cpu, "FLAGS", [*march.split(), *flags])
        return native_library.__wrapped__()


@pytest.fixture(params=VARIANTS)
def kernels(request, monkeypatch):
    """One of the kinds of kernels, on one thread."""
    torch.set_num_threads(1)
    if request.param != "native":
        monkeypatch.setattr(cpu, "library", functools.partial(library_of, request.param))
        monkeypatch.setattr(tiles, "asked_for_bf16", lambda: 0)
    if cpu.library() is None or not tiles.has_kernels():
        pytest.skip("this machine cannot run or compile them")


@pytest.fixture
def native():
    torch.set_num_threads(1)
    if not tiles.has_kernels():
        pytest.skip("no C compiler")


@contextlib.contextmanager
def threads(n: int):
    torch.set_num_threads(n)
    yield
    torch.set_num_threads(1)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wide(x):
    """Rounded to bf16, in fp64."""
    return x.bfloat16().double()


def assert_close(a, b, tolerance):
    assert a.shape == b.shape and a.dtype == torch.float32 and a.isfinite().all()
    assert (a - b).norm() <= tolerance * b.norm(), float((a - b).norm() / b.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n, k", SIZES)
def test_products_are_those_of_rounded_operands(kernels, n, k, dtype):
    w = random(n, k).to(dtype)
    panels, back = tiles.packed(w), tiles.packed_back(w)
    for m in ROWS:
        x, grad = random(m, k, seed=1), random(m, n, seed=2)
        ours = tiles.product(x, panels), tiles.product(grad, back)
        assert_close(ours[0], wide(x) @ wide(w).T, 1e-6)
        assert_close(ours[1], wide(grad) @ wide(w), 1e-6)
        total = torch.zeros(n, k)
        tiles.add_gradient(total, grad, x)
        assert_close(total, wide(grad).T @ wide(x), 1e-6)
        before = total.clone()
        tiles.add_gradient(total, 0.5 * grad, x)
        assert_close(total, before + 0.5 * (wide(grad).T @ wide(x)), 1e-6)
        if m in (1, 33, 1100):
            with threads(2):
                again = before.clone()
                tiles.add_gradient(again, 0.5 * grad, x)
                assert torch.equal(again, total) and torch.equal(tiles.packed(w), panels)
                assert all(map(torch.equal, ours, (tiles.product(x, panels), tiles.product(grad, back))))


def test_weights_are_packed_one_below_the_other_or_in_turn(kernels):
    x, weights = random(5, 64), [random(n, 64, seed=n) for n in (96, 32, 64)]
    assert_close(tiles.product(x, tiles.packed(*weights)), wide(x) @ wide(torch.cat(weights)).T, 1e-6)
    grad = random(5, 192)
    assert_close(tiles.product(grad, tiles.packed_back(*weights)), wide(grad) @ wide(torch.cat(weights)), 1e-6)
    gate, up = weights[0], random(96, 64, seed=7).bfloat16()
    in_turn = tiles.product(x, tiles.packed(gate, up, turns=True)).view(5, 3, 2, 32)
    assert_close(in_turn[:, :, 0].flatten(1), wide(x) @ wide(gate).T, 1e-6)
    assert_close(in_turn[:, :, 1].flatten(1), wide(x) @ wide(up).T, 1e-6)


def test_inputs_may_lie_in_any_order_and_have_no_rows(kernels):
    w = random(64, 32)
    x = random(32, 40).T[1:38:2]
    assert_close(tiles.product(x, tiles.packed(w)), wide(x) @ wide(w).T, 1e-6)
    in_two = x[:18].unflatten(0, (2, 9))
    assert_close(tiles.product(in_two, tiles.packed(w)), wide(in_two) @ wide(w).T, 1e-6)
    total, grad = torch.zeros(64, 32), random(64, 19, seed=1).T
    tiles.add_gradient(total, grad, x)
    assert_close(total, wide(grad).T @ wide(x), 1e-6)
    assert tiles.product(x[:0], tiles.packed(w)).shape == (0, 64)
    tiles.add_gradient(total.fill_(3.0), grad[:0], x[:0])
    assert total.eq(3).all()
    x, w = random(17, 64), random(32, 64, seed=1)  # what is not finite reaches what it acts on
    x[3, 5], w[9, 7] = math.nan, math.inf
    y = tiles.product(x, tiles.packed(w))
    assert y[3].isnan().all() and not y[:, 9].isfinite().any() and y.isfinite().sum() == 16 * 31


@pytest.mark.parametrize("takes", [True, False], ids=["kernels", "pytorch"])
def test_linear_has_rounded_operands_in_both_passes(kernels, monkeypatch, takes):
    if not takes:
        monkeypatch.setattr(tiles, "has_kernels", lambda: False)
    x, w, grad = random(3, 7, 96).requires_grad_(), random(64, 96, seed=1).requires_grad_(), random(3, 7, 64, seed=2)
    out = tiles.linear(x, w)
    assert_close(out.detach(), (wide(x) @ wide(w).T).detach(), 1e-6)
    of_x, of_w = torch.autograd.grad(out, (x, w), grad)
    assert_close(of_x, wide(grad) @ wide(w).detach(), 1e-6)
    assert_close(of_w, wide(grad).flatten(0, 1).T @ wide(x).detach().flatten(0, 1), 1e-6)


class Product(torch.autograd.Function):
    """x @ w.T, fp64, of rounded operands in both passes."""
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return wide(x) @ wide(w).T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return wide(grad) @ wide(w), wide(grad).flatten(0, -2).T @ wide(x).flatten(0, -2)


def through(w):
    """w as it is rounded, with a gradient of 1."""
    return w + (wide(w) - w).detach()


def normed(x, weight, epsilon):
    return F.rms_norm(x, x.shape[-1:], through(weight), epsilon)


def turned(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


def expected_before(layer, x, cos_sin, units, heads, kv_heads):
    h = normed(x, layer.norms[0], layer.epsilon)
    q, k, v = (Product.apply(h, w) for w in layer.before)
    if layer.bias is not None:
        q, k, v = (part + b for part, b in zip((q, k, v), through(layer.bias).split([y.shape[-1] for y in (q, k, v)]),
                                               strict=True))
    D = 2 * cos_sin[0].shape[-1]
    q, k, v = (part.unflatten(-1, (-1, D)) for part in (q, k, v))
    k, v = (to_units(part.contiguous(), units, kv_heads)[:, :, :, 0] for part in (turned(k, *cos_sin), v))
    return turned(q, *cos_sin), k, v


def expected_after(layer, x, y):
    o, gate, up, down = layer.after
    added = x + Product.apply(y, o)
    h = normed(added, layer.norms[1], layer.epsilon)
    return added + Product.apply(F.silu(Product.apply(h, gate)) * Product.apply(h, up), down)


def layer_of(C, Q, K, F_, has_bias, frozen=False, dtype=torch.float32):
    shapes = (Q, C), (K, C), (K, C), (C, Q), (F_, C), (F_, C), (C, F_)
    weights = [(random(*shape, seed=s) / shape[1] ** 0.5).to(dtype) for s, shape in enumerate(shapes)]
    norms = tuple(1 + 0.2 * random(C, seed=s) for s in (10, 11))
    bias = random(Q + 2 * K, seed=12) if has_bias else None
    for x in (*weights, *norms, *([] if bias is None else [bias])):
        x.requires_grad_(not frozen)
    return tiles.Layer(weights[:3], weights[3:], norms, bias, 1e-5)


def compare(outputs, expected, inputs, exact, of_forward, of_backward):
    """Outputs, and the gradients of what takes one: of `inputs`, and of the same in fp64."""
    grads = [random(*x.shape, seed=20 + i) for i, x in enumerate(outputs)]
    for a, b in zip(outputs, expected, strict=True):
        assert_close(a.detach(), b.detach(), of_forward)
    trained = [(a, b) for a, b in zip(inputs, exact, strict=True) if a is not None and a.requires_grad]
    ours, theirs = (torch.autograd.grad(y, x, [g.to(y[0].dtype) for g in grads], retain_graph=True)
                    for y, x in zip((outputs, expected), zip(*trained, strict=True), strict=True))
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, of_backward)
    again = torch.autograd.grad(outputs, [a for a, _ in trained], grads)
    assert all(map(torch.equal, ours, again))


def exact_layer(layer):
    copy = lambda x: None if x is None else x.detach().double().requires_grad_(x.requires_grad)
    return tiles.Layer([*map(copy, layer.before)], [*map(copy, layer.after)], tuple(map(copy, layer.norms)),
                       copy(layer.bias), layer.epsilon)


@pytest.mark.parametrize("units, rows, T", [(1, 1, 1), (2, 3, 7), (1, 2, 300)])
@pytest.mark.parametrize("has_bias, frozen", [(True, False), (False, False), (True, True)])
def test_what_is_before_attention_equals_pytorchs_operations(kernels, units, rows, T, has_bias, frozen):
    heads, kv_heads, D, C = 4, 2, 32, 96
    layer = layer_of(C, heads * D, kv_heads * D, 64, has_bias, frozen)
    exact, x = exact_layer(layer), (2 * random(units * rows, T, C, seed=3)).requires_grad_()
    angles = random(units * rows, T, 1, D // 2, seed=4)
    wide_x = x.detach().double().requires_grad_()
    outputs = tiles.before_attention(layer, x, (angles.cos(), angles.sin()), units, heads, kv_heads)
    expected = expected_before(exact, wide_x, (angles.cos().double(), angles.sin().double()), units, heads, kv_heads)
    compare(outputs, expected, [x, layer.norms[0], layer.bias, *layer.before],
            [wide_x, exact.norms[0], exact.bias, *exact.before], OF_SUMS, OF_SUMS)
    with torch.no_grad(), threads(2):
        assert all(map(torch.equal, outputs, tiles.before_attention(
            layer, x, (angles.cos(), angles.sin()), units, heads, kv_heads)))


@pytest.mark.parametrize("rows", [1, 33, 1100])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_after_attention_equals_pytorchs_operations(kernels, rows, frozen):
    C, Q = 96, 128
    layer = layer_of(C, Q, 64, 160, False, frozen)
    exact = exact_layer(layer)
    x, y = (2 * random(1, rows, C, seed=3)).requires_grad_(), random(1, rows, Q, seed=4).requires_grad_()
    both = [z.detach().double().requires_grad_() for z in (x, y)]
    outputs = tiles.after_attention(layer, x, y)
    compare([outputs], [expected_after(exact, *both)], [x, y, layer.norms[1], *layer.after],
            [*both, exact.norms[1], *exact.after], OF_SUMS, OF_ROUNDING)
    with torch.no_grad(), threads(2):
        assert torch.equal(outputs, tiles.after_attention(layer, x, y))


def test_of_some_places_a_layer_computes_what_it_does_of_all(kernels):
    """Each token's numbers to the bit, and nothing of others; of weights the same sums in pieces."""
    units, rows, T, heads, kv_heads, D, C, Q = 3, 2, 150, 4, 2, 32, 96, 128
    layer, x = layer_of(C, Q, kv_heads * D, 160, True), random(units * rows, T, C, seed=3).requires_grad_()
    angles, y = random(units * rows, T, 1, D // 2, seed=4), random(units * rows, T, Q, seed=5).requires_grad_()
    places = first_columns(torch.tensor([150, 3, 0, 97, 149, 31]), T)
    mask = torch.zeros(units * rows * T).index_fill(0, places, 1.0).view(units * rows, T)

    def masked(q, k, v, out):
        by_unit = mask.view(units, 1, rows, T, 1)
        return q * mask[..., None, None], k * by_unit, v * by_unit, out * mask[..., None]

    def results(places, finish):
        before = tiles.before_attention(layer, x, (angles.cos(), angles.sin()), units, heads, kv_heads, places)
        outputs = finish(*before, tiles.after_attention(layer, x, y, places))
        trained = [x, y, *layer.before, *layer.after, *layer.norms, layer.bias]
        return outputs, torch.autograd.grad(outputs, trained, [random(*out.shape, seed=6) for out in outputs])
    (ours, grads), (expected, of_all) = results(places, lambda *out: out), results(None, masked)
    assert all(map(torch.equal, ours, expected)) and all(map(torch.equal, grads[:2], of_all[:2]))
    for a, b in zip(grads[2:], of_all[2:], strict=True):
        assert_close(a, b, OF_SUMS)


def test_a_weight_takes_its_gradient_also_where_others_are_frozen(native):
    layer = layer_of(64, 64, 32, 96, False, frozen=True)
    x, angles = random(1, 5, 64), random(1, 5, 1, 16)
    for i in range(3):
        layer.before[i].requires_grad_()
        out = tiles.before_attention(layer, x, (angles.cos(), angles.sin()), 1, 2, 1)
        assert torch.autograd.grad(sum(y.sum() for y in out), layer.before[i])[0].norm() > 0
        layer.before[i].requires_grad_(False)
    for weight in layer.after:
        weight.requires_grad_()
        assert torch.autograd.grad(tiles.after_attention(layer, x, x).sum(), weight)[0].norm() > 0
        weight.requires_grad_(False)
    layer = layer_of(64, 64, 32, 96, True)  # of no tokens, gradients of zero
    x, angles = torch.empty(0, 5, 64, requires_grad=True), torch.empty(0, 5, 1, 16)
    out = tiles.before_attention(layer, x, (angles, angles), 1, 2, 1)
    assert [len(y.flatten()) for y in out] == [0, 0, 0]
    total = sum(y.sum() for y in out) + tiles.after_attention(layer, x, x).sum()
    for grad in torch.autograd.grad(total, [*layer.before, *layer.after, *layer.norms, layer.bias]):
        assert grad.eq(0).all()


@pytest.mark.parametrize("vocab", [96, 90])
@pytest.mark.parametrize("rows_per_chunk", [None, 7])
def test_a_narrow_head_has_rounded_operands(native, vocab, rows_per_chunk):
    """A vocabulary of 90 is no multiple of 32: it is done in PyTorch."""
    N, C = 37, 64
    hidden, weight = random(N, C).requires_grad_(), (0.3 * random(vocab, C, seed=1)).requires_grad_()
    targets, advantages = torch.arange(N) * 5 % vocab, random(N, seed=2)
    options = dict(vocab_size=vocab, softcap=None, temperature=0.8)
    narrow = options | dict(rows_per_chunk=rows_per_chunk, narrow=True)
    total, logprobs, entropy = linear_policy_loss(hidden, weight, targets, advantages, torch.ones(N),
                                                  loss=PolicyLoss("reinforce", entropy_coef=0.1), **narrow)
    total.backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    all_logprobs = torch.log_softmax(Product.apply(*exact) / 0.8, dim=-1)
    of_targets = all_logprobs.gather(1, targets[:, None])[:, 0]
    entropies = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
    expected = -(advantages * of_targets + 0.1 * entropies).sum()
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(logprobs, of_targets.detach(), 1e-6)
    assert_close(entropy, entropies.detach(), 1e-6)
    assert_close(hidden.grad, exact[0].grad, OF_SUMS)
    assert_close(weight.grad, exact[1].grad, OF_SUMS)
    for a, b in zip(linear_logprob(hidden.detach(), weight.detach(), targets, **narrow), (logprobs, entropy),
                    strict=True):
        assert_close(a, b, 1e-6)


def test_kernels_with_tiles_that_linux_does_not_grant_are_not_called(monkeypatch):
    monkeypatch.setattr(tiles, "asked_for_bf16", lambda: -1)
    assert not tiles.has_bf16() and not tiles.takes(32) and not tiles.has_kernels()
    x, w = random(5, 64), random(32, 64, seed=1)
    assert_close(tiles.linear(x, w), wide(x) @ wide(w).T, 1e-6)
