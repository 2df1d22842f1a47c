"""
The hand-written operations against their plain twins and against differences, in the layouts that the model hands them.

    python -m pytest tests/test_ops.py -q
"""
import io

import pytest
import torch
import torch.nn.functional as F

from nanochat import ops
from nanochat.gpt import rotary
from nanochat.ops import linear, matmul, mix, norm, relu_squared, rotary_norm

EPS = {torch.float32: 2e-6, torch.float64: 1e-13}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotated(units, kv_heads):
    """rotary_norm of rows whose positions all differ, laid out for that many units and key heads."""
    def function(x):
        B, T, _, D = x.shape
        cos_sin = rotary(torch.arange(B * T).view(B, T) * 3, D, x.dtype)
        return rotary_norm(x, *cos_sin, 1.2, units, kv_heads)
    return function


# name -> the function of its tensors, their shapes
CASES = {
    "norm": (norm, [(2, 3, 5)]),
    "norm of a vector": (norm, [(7,)]),
    "relu_squared": (relu_squared, [(2, 3, 5)]),
    "mix": (mix, [(2, 3, 5), (2, 3, 5), (), ()]),
    "rotary_norm": (rotated(2, 3), [(4, 3, 6, 8)]),
    "rotary_norm of keys": (rotated(4, 2), [(4, 3, 2, 4)]),
    "linear that widens": (linear, [(2, 3, 5), (7, 5)]),
    "linear that narrows": (linear, [(2, 3, 5), (4, 5)]),
    "linear to one channel": (linear, [(2, 3, 5), (1, 5)]),
}
ALL = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def twins(monkeypatch):
    """Runs a function by hand and then by its plain twin, in that order."""
    def run(function, *inputs):
        ours = function(*inputs)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "by_hand", lambda x: False)
            return ours, function(*inputs)
    return run


def tensors(shapes, dtype=torch.float64):
    return [random(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]


def assert_agree(ours, theirs, inputs, tolerance):
    """Outputs and gradients of two runs, within a tolerance relative to their size. The incoming gradient has gaps in memory."""
    grad = random(*ours.shape, 2, seed=9).to(ours.dtype)[..., 0]
    trained = [x for x in inputs if x.requires_grad]
    pairs = zip((ours, *torch.autograd.grad(ours, trained, grad)), (theirs, *torch.autograd.grad(theirs, trained, grad)), strict=True)
    for a, b in pairs:
        assert a.shape == b.shape and a.dtype == b.dtype and a.isfinite().all()
        assert (a - b).abs().max() <= tolerance * max(1, b.abs().max())


@ALL
@pytest.mark.parametrize("dtype", EPS)
def test_by_hand_equals_the_plain_twin(twins, name, dtype):
    function, shapes = CASES[name]
    inputs = tensors(shapes, dtype)
    ours, theirs = twins(function, *inputs)
    assert ours.grad_fn.name() != theirs.grad_fn.name() and ours.is_contiguous()
    assert_agree(ours, theirs, inputs, EPS[dtype])


@ALL
def test_gradients_equal_differences(name):
    function, shapes = CASES[name]
    assert torch.autograd.gradcheck(function, tensors(shapes))


@ALL
@pytest.mark.parametrize("dtype", EPS)
def test_inputs_may_have_gaps_in_memory(twins, name, dtype):
    # Pieces of wider tensors, as split gives them, and tensors that lie in another order.
    function, shapes = CASES[name]
    wide = [random(*shape[:-1], 3 * shape[-1], seed=i).to(dtype).requires_grad_() if shape else random(seed=i).to(dtype).requires_grad_()
            for i, shape in enumerate(shapes)]
    inputs = [x.split(shape[-1], dim=-1)[1] if shape else x for x, shape in zip(wide, shapes, strict=True)]
    assert_agree(*twins(function, *inputs), wide, EPS[dtype])
    turned = [random(*shape[::-1], seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]
    assert_agree(*twins(function, *(x.permute(tuple(reversed(range(x.dim())))) for x in turned)), turned, EPS[dtype])


@ALL
def test_a_gradient_may_be_one_number_spread_out(twins, name):
    function, shapes = CASES[name]
    inputs = tensors(shapes)
    grads = [torch.autograd.grad(out.sum(), inputs) for out in twins(function, *inputs)]
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("name", ["mix", "linear that widens", "linear that narrows"])
def test_frozen_inputs_get_no_gradient_and_change_no_other(twins, name):
    function, shapes = CASES[name]
    for frozen in range(2 ** len(shapes) - 1):
        inputs = [x.detach() if frozen >> i & 1 else x for i, x in enumerate(tensors(shapes))]
        assert_agree(*twins(function, *inputs), inputs, 1e-13)
        function(*inputs).sum().backward()
        assert [x.grad is None for x in inputs] == [bool(frozen >> i & 1) for i in range(len(shapes))]


@ALL
def test_without_gradients_the_result_is_the_same(name):
    function, shapes = CASES[name]
    inputs = tensors(shapes)
    with torch.no_grad():
        out = function(*inputs)
    assert not out.requires_grad and torch.equal(out, function(*inputs))


@ALL
def test_a_second_backward_pass_gives_the_same(name):
    function, shapes = CASES[name]
    inputs = tensors(shapes)
    before, out = [x.detach().clone() for x in inputs], function(*inputs)
    grad = random(*out.shape, seed=9)
    kept, value = grad.clone(), out.detach().clone()
    first, second = (torch.autograd.grad(out, inputs, grad, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second)) and torch.equal(grad, kept) and torch.equal(out, value)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@ALL
def test_half_precision_takes_the_plain_path(monkeypatch, name):
    function, shapes = CASES[name]
    for hand_written in (ops._Norm, ops._ReluSquared, ops._Mix, ops._RotaryNorm, ops._Linear):
        monkeypatch.setattr(hand_written, "forward", None)
    inputs = tensors(shapes, torch.bfloat16)
    out = function(*inputs)
    assert out.dtype == torch.bfloat16
    monkeypatch.undo()
    exact = function(*(x.detach().float() for x in inputs))
    assert (out - exact).abs().max() <= 0.04 * exact.abs().max()
    out.sum().backward()
    assert all(x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all() for x in inputs)


def test_norm_by_its_formula():
    x = random(3, 5)
    eps = torch.finfo(torch.float64).eps
    for row, out in zip(x, norm(x), strict=True):
        assert (out - row / (sum(c * c for c in row.tolist()) / 5 + eps) ** 0.5).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", EPS)
def test_norm_of_zeros_has_a_finite_gradient(twins, dtype):
    x = random(3, 5).to(dtype)
    x[1] = 0
    x.requires_grad_()
    ours, theirs = twins(norm, x)
    assert ours[1].eq(0).all()
    grad = torch.ones(3, 5, dtype=dtype)
    (a,), (b,) = torch.autograd.grad(ours, x, grad), torch.autograd.grad(theirs, x, grad)
    torch.testing.assert_close(a, b, rtol=10 * EPS[dtype], atol=EPS[dtype])
    assert a[1].isfinite().all() and a[1].gt(0).all()


def test_rotated_zeros_have_a_finite_gradient():
    x = torch.zeros(1, 2, 2, 4, requires_grad=True)
    out = rotated(1, 2)(x)
    out.sum().backward()
    assert out.eq(0).all() and x.grad.isfinite().all() and x.grad.ne(0).any()


def test_rotary_norm_puts_heads_where_attention_wants_them():
    # Rows 2u and 2u+1 are those of unit u; heads 3h to 3h+2 read key head h.
    x = random(4, 3, 6, 8)
    out = rotated(2, 2)(x)
    assert out.shape == (2, 2, 2, 3, 3, 8)  # U, Hkv, R, group, T, D
    cos, sin = rotary(torch.arange(12).view(4, 3) * 3, 8, x.dtype)
    for row, t, head in torch.cartesian_prod(torch.arange(4), torch.arange(3), torch.arange(6)).tolist():
        turned = torch.view_as_complex(torch.stack(x[row, t, head].chunk(2), dim=1)) * torch.complex(cos, -sin)[row, t, 0]
        expected = 1.2 * F.rms_norm(torch.cat([turned.real, turned.imag]), (8,))
        assert (out[row // 2, head // 3, row % 2, head % 3, t] - expected).abs().max() < 1e-13


def test_mix_of_one_tensor_with_itself(twins):
    x, a, b = tensors([(2, 3), (), ()])
    assert_agree(*twins(lambda x, a, b: mix(x, x, a, b), x, a, b), (x, a, b), 1e-13)


# Matrix products

def operands():
    """name -> a, b: (5, 6) times (6, 4) and others, contiguous or not."""
    a, b, wide = random(5, 6).float(), random(6, 4, seed=1).float(), random(9, 40, seed=2).float()
    return {
        "contiguous": (a, b),
        "left transposed": (random(6, 5).float().t(), b),
        "right transposed": (a, random(4, 6).float().t()),
        "both transposed": (random(6, 5).float().t(), random(4, 6).float().t()),
        "columns of wider ones": (wide[:5, 3:9], wide[:6, 20:24]),
        "columns, transposed": (wide[:6, 3:8].t(), wide[:4, 20:26].t()),
        "every second column": (wide[:5, 1:13:2], wide[:6, 20:28:2]),
        "every second row": (a[::2], b),
        "spread out": (torch.ones(()).expand(5, 6), b[:, :1].expand(6, 4)),
        "one row": (a[:1], b),
        "one column": (a, b[:, :1]),
        "one inner": (a[:, :1], b[:1]),
        "one number": (a[:1, :1], b[:1, :1]),
        "large": (random(130, 70).float(), random(70, 90).float()),
    }


ONEDNN = pytest.mark.parametrize("onednn", [pytest.param(True, marks=pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")),
                                            False])


@ONEDNN
@pytest.mark.parametrize("name", operands())
def test_matmul_is_the_product(monkeypatch, onednn, name):
    monkeypatch.setattr(ops, "mkl_is_slow", lambda: onednn)
    monkeypatch.setattr(ops, "ONEDNN_FROM", 1)
    a, b = operands()[name]
    before = a.clone(), b.clone()
    exact = a.double() @ b.double()
    out = matmul(a, b)
    assert out.shape == exact.shape and out.dtype == torch.float32
    assert (out - exact).abs().max() <= 1e-6 * max(1, exact.abs().max())
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])
    assert (matmul(a.double(), b.double()) - exact).abs().max() < 1e-12


@ONEDNN
@pytest.mark.parametrize("n, c, d", [(0, 5, 3), (4, 5, 0), (4, 0, 3), (0, 0, 3), (0, 5, 0)])
def test_products_of_empty_matrices(monkeypatch, onednn, n, c, d):
    monkeypatch.setattr(ops, "mkl_is_slow", lambda: onednn)
    monkeypatch.setattr(ops, "ONEDNN_FROM", 1)
    assert torch.equal(matmul(torch.ones(n, c), torch.ones(c, d)), torch.zeros(n, d))
    if c and d:
        x, weight = torch.ones(2, n, c, requires_grad=True), torch.ones(d, c, requires_grad=True)
        out = linear(x, weight)
        out.sum().backward()
        assert out.shape == (2, n, d) and torch.equal(x.grad, torch.full((2, n, c), float(d)))
        assert torch.equal(weight.grad, torch.full((d, c), 2.0 * n))


@ONEDNN
@pytest.mark.parametrize("C, D", [(33, 90), (90, 33), (40, 40), (40, 1)])
@pytest.mark.parametrize("spread", [True, False])
def test_linear_by_either_library(monkeypatch, onednn, C, D, spread):
    monkeypatch.setattr(ops, "mkl_is_slow", lambda: onednn)
    monkeypatch.setattr(ops, "ONEDNN_FROM", 1)
    wide = random(3, 21, 2 * C).float()
    x, weight = wide[..., C:].requires_grad_(), random(D, C, seed=1).float().requires_grad_()
    grad = torch.ones(()).expand(3, 21, D) if spread else random(3, 21, 2 * D, seed=2).float()[..., :D]
    exact = [y.detach().double().requires_grad_() for y in (x, weight)]
    expected = F.linear(*exact)
    ours = (linear(x, weight), *torch.autograd.grad(linear(x, weight), (x, weight), grad))
    for a, b in zip(ours, (expected, *torch.autograd.grad(expected, exact, grad.double())), strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape and (a - b).abs().max() < 1e-6 * max(1, b.abs().max())


def test_onednn_serves_amd_processors(monkeypatch):
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    for text, slow in (("vendor_id\t: AuthenticAMD\n", both), ("vendor_id\t: GenuineIntel\n", False)):
        monkeypatch.setattr(ops, "open", lambda path, text=text: io.StringIO(text), raising=False)
        assert ops.mkl_is_slow.__wrapped__() == slow

    def absent(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(ops, "open", absent, raising=False)
    assert ops.mkl_is_slow.__wrapped__() is False
