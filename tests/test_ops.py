"""The operations of a block: CPU kernels (fp32) against their PyTorch versions (fp64), these against differences, in
the layouts that the model hands them."""
import ctypes
import io
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_decode_cache import called as names_of_kernels

from nanochat.gpt import rotary
from nanochat.kernels import cpu, ops
from nanochat.kernels.layer import after_attention, before_attention
from nanochat.kernels.ops import add_norm, linear, matmul, mix, norm, relu_squared, smear, split_heads, transposed

KERNELS = pytest.mark.skipif(cpu.library() is None, reason="no C compiler")
called = names_of_kernels  # the fixture


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heads(units, num_heads, kv_heads, D, gated=True, T=3):
    """split_heads of rows whose positions all differ, its three results flat in one tensor."""
    def function(qkv, *gate_and_embedding):
        B, T, _ = qkv.shape
        cos_sin = rotary(torch.arange(B * T).view(B, T) * 3, D, qkv.dtype)
        return torch.cat([x.flatten() for x in split_heads(qkv, cos_sin, *(gate_and_embedding or (None, None)), 1.2,
                                                           units, num_heads, kv_heads)])
    return function, ([(4, T, (num_heads + 2 * kv_heads) * D)]
                      + ([(4, T, kv_heads), (4, T, kv_heads * D)] if gated else []))


def before(units, num_heads, kv_heads, D, C, gated=True, T=3, B=4, used=slice(None)):
    """before_attention, its four results, or those used of them, flat in one tensor."""
    def function(x, x0, a, b, w_q, w_k, w_v, *gate_and_embedding):
        cos_sin = rotary(torch.arange(B * x.shape[1]).view(B, -1) * 3, D, x.dtype)
        return torch.cat([y.flatten() for y in before_attention(
            x, x0, a, b, w_q, w_k, w_v, *(gate_and_embedding or (None, None)), cos_sin, 1.2, units)[used]])
    kv = kv_heads * D
    return function, ([(B, T, C), (B, T, C), (), (), (num_heads * D, C), (kv, C), (kv, C)]
                      + ([(kv_heads, 3), (B, T, kv)] if gated else []))


def after(C, F, T=3):
    return after_attention, [(2, T, C), (2, T, C), (C, C), (F, C), (C, F)]


# name -> the function of its tensors, their shapes: widths that kernels take, and widths that they do not
CASES = {
    "norm": (norm, [(2, 3, 64)]),
    "norm of a vector": (norm, [(96,)]),
    "mix": (mix, [(7, 5, 96), (7, 5, 96), (), ()]),  # more than two of the kernel's chunks
    "smear": (smear, [(3, 4, 64), (3, 1, 64), (1, 24), (1,)]),
    "smear of one token": (smear, [(3, 1, 32), (3, 1, 32), (1, 7), (1,)]),
    "smear after nothing": (lambda x, *rest: smear(x, None, *rest), [(2, 4, 32), (1, 5), (1,)]),
    "before_attention": before(2, 2, 1, 32, 64),
    "before_attention without embeddings": before(4, 1, 1, 64, 32, gated=False),
    "after_attention": after(32, 96),
}
WITHOUT_GRADIENT = {
    "add_norm": (lambda x, delta: torch.cat(add_norm(x, delta)), [(2, 3, 64), (2, 3, 64)]),
    "relu_squared": (relu_squared, [(2, 3, 32)]),
    "split_heads": heads(2, 6, 3, 32),
    "split_heads of one unit": heads(1, 2, 2, 64),
    "split_heads of units of one row": heads(4, 4, 1, 32),
    "split_heads of one token": heads(2, 4, 2, 32, T=1),
    "split_heads without embeddings": heads(2, 2, 1, 96, gated=False),
}
TWINS = {
    "norm": (norm, [(2, 3, 5)]),
    "add_norm": (lambda x, delta: torch.cat(add_norm(x, delta)), [(2, 3, 5), (2, 3, 5)]),
    "relu_squared": (relu_squared, [(2, 3, 5)]),
    "mix": (mix, [(2, 3, 5), (2, 3, 5), (), ()]),
    "smear": (smear, [(3, 4, 5), (3, 1, 5), (1, 3), (1,)]),
    "smear after nothing": (lambda x, *rest: smear(x, None, *rest), [(2, 4, 5), (1, 5), (1,)]),
    "split_heads": heads(2, 4, 2, 4),
    "split_heads without embeddings": heads(2, 2, 1, 4, gated=False),
    "before_attention": before(2, 4, 2, 4, 5),
    "before_attention without embeddings": before(2, 1, 1, 4, 5, gated=False),
    "after_attention": after(5, 7),
    "linear that widens": (linear, [(2, 3, 5), (7, 5)]),
    "linear that narrows": (linear, [(2, 3, 5), (4, 5)]),
    "linear to one channel": (linear, [(2, 3, 5), (1, 5)]),
}
ALL = pytest.mark.parametrize("name", CASES)


def tensors(shapes, dtype=torch.float32):
    return [random(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]


def assert_agree(function, inputs, grad=None):
    """Outputs and gradients in fp32 and in fp64, within a tolerance relative to their size."""
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    ours, theirs = function(*inputs), function(*exact)
    grad = random(*ours.shape, 2, seed=9).float()[..., 0] if grad is None else grad.expand(ours.shape)
    grads, exact_grads = (torch.autograd.grad(out, [x for x in xs if x.requires_grad], grad.to(out.dtype),
                                              materialize_grads=True)
                          for out, xs in ((ours, inputs), (theirs, exact)))
    for a, b in zip((ours, *grads), (theirs, *exact_grads), strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape and a.isfinite().all()
        # a scalar's gradient is a sum over everything, in which terms cancel
        assert (a - b).abs().max() <= (3e-6 if a.dim() else 1e-4) * max(1, b.abs().max())


@KERNELS
@ALL
def test_kernels_equal_the_plain_twins(called, name):
    """Also where inputs are pieces of wider tensors or lie in another order, and where the gradient is one number."""
    function, shapes = CASES[name]
    inputs = tensors(shapes)
    assert_agree(function, inputs)
    assert sorted({kernel.rsplit("_", 1)[1] for kernel in called} - {"weight"}) == ["backward", "forward"]
    wide = tensors([(*shape[:-1], 3 * shape[-1]) if shape else shape for shape in shapes])
    assert_agree(lambda *wide: function(*(x.split(shape[-1], dim=-1)[1] if shape else x
                                          for x, shape in zip(wide, shapes, strict=True))), wide)
    assert_agree(function, [x.detach().permute(tuple(reversed(range(x.dim())))).requires_grad_()
                            for x in tensors([shape[::-1] for shape in shapes])])
    assert_agree(function, inputs, torch.ones(()))


@KERNELS
@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_kernels_without_gradients_equal_the_plain_twins(monkeypatch, called, name):
    """In memory of any order, and on any number of threads."""
    function, shapes = WITHOUT_GRADIENT[name]
    wide = [random(*shape[:-1], 3 * shape[-1], seed=i).float() for i, shape in enumerate(shapes)]
    parts = [x.split(shape[-1], dim=-1)[1] for x, shape in zip(wide, shapes, strict=True)]
    turned = [random(*shape[::-1], seed=i).float().permute(2, 1, 0) for i, shape in enumerate(shapes)]
    with torch.no_grad():
        for inputs in (tensors(shapes), parts, turned):
            expected, outs = function(*(x.double() for x in inputs)), []
            for count in (1, 2, 3):
                monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
                outs.append(function(*inputs))
            assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]) and outs[0].dtype == torch.float32
            assert (outs[0] - expected).abs().max() <= 3e-6 * max(1, expected.abs().max())
    assert len(called) == 9 and len(set(called)) == 1


@KERNELS
@ALL
def test_frozen_inputs_change_no_other_gradient(name):
    function, shapes = CASES[name]
    for frozen in range(2 ** len(shapes) - 1):
        inputs = [x.detach() if frozen >> i & 1 else x for i, x in enumerate(tensors(shapes))]
        assert_agree(function, inputs)
        function(*inputs).sum().backward()
        assert [x.grad is None for x in inputs] == [bool(frozen >> i & 1) for i in range(len(shapes))]


@pytest.mark.parametrize("name", CASES | TWINS)
def test_without_gradients_the_result_is_the_same(name):
    for function, shapes in (cases[name] for cases in (CASES, TWINS) if name in cases):
        inputs = tensors(shapes)
        with torch.no_grad():
            out = function(*inputs)
        assert not out.requires_grad and torch.equal(out, function(*inputs))


@KERNELS
@ALL
def test_a_second_backward_pass_gives_the_same_and_a_gradient_of_a_gradient_is_refused(name):
    function, shapes = CASES[name]
    inputs = tensors(shapes)
    before, out = [x.detach().clone() for x in inputs], function(*inputs)
    grad = random(*out.shape, seed=9).float()
    kept, value = grad.clone(), out.detach().clone()
    first, second = (torch.autograd.grad(out, inputs, grad, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second)) and torch.equal(grad, kept) and torch.equal(out, value)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    grads = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grads[0].sum().backward()


@KERNELS
@ALL
def test_the_number_of_threads_changes_nothing(monkeypatch, name):
    function, shapes = CASES[name]
    shapes = [(*shape[:1], 40, *shape[2:]) if len(shape) == 3 and shape[1] > 1 else shape
              for shape in shapes]
    inputs, results = tensors(shapes), []
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        out = function(*inputs)
        results.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            # each thread sums up its share of a weight's gradient
            assert a.dim() == 2 and (a - b).abs().max() <= 3e-6 * a.abs().max() or torch.equal(a, b)


@pytest.mark.parametrize("name", TWINS)
def test_odd_widths_and_other_types_take_the_plain_path(called, name):
    """Whose gradients equal differences."""
    function, shapes = TWINS[name]
    assert torch.autograd.gradcheck(function, tensors(shapes, torch.float64))
    assert function(*tensors(shapes)).dtype == torch.float32
    bf16 = tensors(shapes, torch.bfloat16)
    out, exact = function(*bf16), function(*(x.detach().float() for x in bf16))
    assert out.dtype == torch.bfloat16 and (out - exact).abs().max() <= 0.04 * exact.abs().max()
    out.sum().backward()
    assert all(x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all() for x in bf16) and not called


@pytest.mark.parametrize("C", [5, 64])
def test_norm_by_its_formula_and_of_zeros(C):
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        x = random(3, C).to(dtype)
        for row, out in zip(x, norm(x), strict=True):
            assert ((out - row / (sum(c * c for c in row.tolist()) / C + torch.finfo(dtype).eps) ** 0.5).abs().max()
                    < tolerance)
    x = random(3, C).float()
    x[1] = 0
    x.requires_grad_()
    out = norm(x)
    grad, = torch.autograd.grad(out, x, torch.ones(3, C))
    assert out[1].eq(0).all() and grad.isfinite().all()
    torch.testing.assert_close(grad[1], torch.full((C,), torch.finfo(torch.float32).eps ** -0.5), rtol=1e-5, atol=0)


@KERNELS
def test_what_is_not_a_number_stays_so():
    for function, shapes in (CASES | WITHOUT_GRADIENT).values():
        inputs = [x.detach() for x in tensors(shapes)]
        inputs[0].view(-1)[0] = float("nan")
        with torch.no_grad():
            expected = function(*(x.double() for x in inputs)).isnan()
            assert expected.any() and torch.equal(function(*inputs).isnan(), expected)


@pytest.mark.parametrize("D", [8, 32])
def test_heads_go_where_attention_wants_them(D):
    # Rows 2u and 2u+1 are those of unit u; query heads 3h to 3h+2 read key head h; v takes gate * embedding.
    qkv, gate, embedding = (random(4, 3, 10 * D).float(), random(4, 3, 2, seed=1).float(),
                            random(4, 3, 2 * D, seed=2).float())
    cos, sin = rotary(torch.arange(12).view(4, 3) * 3, D, qkv.dtype)
    with torch.no_grad():  # as the kernel has it
        q, k, v = split_heads(qkv, (cos, sin), gate, embedding, 1.2, 2, 6, 2)
    assert q.shape == (2, 2, 2, 3, 3, D) and k.shape == v.shape == (2, 2, 2, 3, D)  # U, Hkv, R, [group,] T, D

    def turned(x, row, t):
        y = torch.view_as_complex(torch.stack(x.chunk(2), dim=1)) * torch.complex(cos, -sin)[row, t, 0]
        return 1.2 * F.rms_norm(torch.cat([y.real, y.imag]), (D,))

    for row, t, head in torch.cartesian_prod(torch.arange(4), torch.arange(3), torch.arange(10)).tolist():
        x = qkv[row, t, head * D: (head + 1) * D]
        if head < 6:
            gap = q[row // 2, head // 3, row % 2, head % 3, t] - turned(x, row, t)
        elif head < 8:
            gap = k[row // 2, head - 6, row % 2, t] - turned(x, row, t)
        else:
            gap = v[row // 2, head - 8, row % 2, t] - (
                x + gate[row, t, head - 8] * embedding[row, t, (head - 8) * D: (head - 7) * D])
        assert gap.abs().max() < 2e-6


def test_heads_of_zeros_have_a_finite_gradient():
    function, shapes = heads(2, 4, 2, 8, gated=False)
    x = torch.zeros(shapes[0], requires_grad=True)
    out = function(x)
    out.sum().backward()
    assert out.eq(0).all() and x.grad.isfinite().all() and x.grad.view(4, 3, 8, 8).ne(0).any(dim=-1).all()


@KERNELS
def test_results_that_nobody_uses_change_no_gradient_and_mix_takes_one_tensor_twice():
    for i in range(4):
        function, shapes = before(2, 2, 1, 32, 64, used=slice(i, i + 1))
        assert_agree(function, tensors(shapes))
    assert_agree(lambda x, a, b: mix(x, x, a, b), tensors([(2, 3, 32), (), ()]))


@pytest.mark.parametrize("rows, C", [(1, 32), (16, 32), (37, 64), (32, 96), (5, 7)])
def test_transposed_is_the_transpose(called, rows, C):
    x, wide = random(rows, C).float(), random(rows, 2 * C).float()
    assert torch.equal(transposed(x), x.t()) and called == ["transpose_matrix"] * cpu.takes(x)
    assert transposed(x).is_contiguous() or not cpu.takes(x)
    for y in (x.t().contiguous().t(), wide[:, :C], x.double()):
        assert torch.equal(transposed(y), y.t())


@KERNELS
def test_kernels_take_single_precision_on_the_cpu_in_widths_of_32():
    assert cpu.takes(torch.zeros(3, 32)) and cpu.takes(torch.zeros(96)) and cpu.takes(torch.zeros(64, 3).t())
    refused = [torch.zeros(3, 48), torch.zeros(3, 16), torch.zeros(3, 33), torch.zeros(0, 32), torch.zeros(3, 0),
               torch.zeros(3, 32, dtype=torch.float64),
               torch.zeros(3, 32, dtype=torch.bfloat16), torch.zeros(3, 32, device="meta")]
    assert not any(map(cpu.takes, refused))
    assert all(map(cpu.takes_rows, (torch.zeros(3, 5), torch.zeros(3, 9)[:, 2:7], torch.zeros(1, 5).expand(4, 5))))
    assert not any(map(cpu.takes_rows, (torch.zeros(5, 3).t(), torch.zeros(3, 9)[:, ::2], torch.zeros(3, 5).double(),
                                        torch.zeros(0, 5))))


@KERNELS
def test_kernels_run_on_the_number_of_threads_of_pytorch(monkeypatch):
    given = []
    monkeypatch.setattr(cpu, "library",
                        lambda: SimpleNamespace(norm_forward=lambda *arguments: given.append(arguments[-1])))
    for count in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        norm(torch.ones(2, 32))
    assert given == [1, 2]


def test_tensors_that_do_not_fit_each_other_are_refused():
    # Kernels would read after their ends.
    x, a, gate, embedding = torch.ones(2, 3, 128), torch.ones(()), torch.ones(2, 3, 1), torch.ones(2, 3, 32)
    cos_sin = rotary(torch.arange(6).view(2, 3), 32, x.dtype)
    wrong = [(add_norm, x, x[:1]), (add_norm, x, x.double()), (mix, x, x[:1], a, a), (mix, x, x.double(), a, a),
             (mix, x, x, a.double(), a), (mix, x, x, a, a.view(1))]
    wrong += [(split_heads, x, *rest, 1.2, 1, 2, 1) for rest in (
        ([y[:1] for y in cos_sin], gate, embedding), ([y.double() for y in cos_sin], gate, embedding),
        ([y[..., :8] for y in cos_sin], gate, embedding),
        (cos_sin, gate[..., :0], embedding), (cos_sin, gate, embedding[:, :2]), (cos_sin, gate.double(), embedding),
        (cos_sin, gate, embedding.double()))]
    for function, *arguments in wrong:
        with pytest.raises(AssertionError):
            function(*arguments)


def test_signatures_and_structs_are_those_of_the_c_files():
    found = cpu.signatures()
    assert len(found) > 30 and all(types[-1] is ctypes.c_long for types in found.values())
    assert found["norm_forward"] == [ctypes.c_void_p] * 5 + [ctypes.c_long] * 2 + [ctypes.c_float, ctypes.c_long]
    assert cpu.struct_type("Heads")._fields_ == [*((name, ctypes.c_long) for name in ("U", "R", "T", "Hq", "Hkv", "D")),
                                                 ("scale", ctypes.c_float), ("epsilon", ctypes.c_float)]
    assert cpu.struct_type("Weight")._fields_ == [("numbers", ctypes.c_void_p), ("is_wide", ctypes.c_long)]
    assert cpu.struct_type("Attention")._fields_[-1] == ("k_strides", ctypes.c_long * 4)


def operands():
    """a, b: (5, 6) times (6, 4) and others, contiguous or not, wide or spread out."""
    a, b, wide = random(5, 6).float(), random(6, 4, seed=1).float(), random(9, 40, seed=2).float()
    return [(a, b), (random(6, 5).float().t(), b), (a, random(4, 6).float().t()),
            (random(6, 5).float().t(), random(4, 6).float().t()), (wide[:5, 3:9], wide[:6, 20:24]),
            (wide[:6, 3:8].t(), wide[:4, 20:26].t()), (wide[:5, 1:13:2], wide[:6, 20:28:2]), (a[::2], b),
            (torch.ones(()).expand(5, 6), b[:, :1].expand(6, 4)), (a[:1], b), (a, b[:, :1]), (a[:, :1], b[:1]),
            (a[:1, :1], b[:1, :1]), (random(130, 70).float(), random(70, 90).float())]


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.skipif(not torch.backends.mkldnn.is_available(),
                                                                    reason="no oneDNN")), False])
def onednn(request, monkeypatch):
    """Products of any size by oneDNN, or by the other library."""
    monkeypatch.setattr(ops, "mkl_is_slow", lambda: request.param)
    monkeypatch.setattr(ops, "ONEDNN_FROM", 1)


def test_matmul_is_the_product(onednn):
    for a, b in operands():
        before, exact, out = (a.clone(), b.clone()), a.double() @ b.double(), matmul(a, b)
        assert out.shape == exact.shape and out.dtype == torch.float32
        assert (out - exact).abs().max() <= 1e-6 * max(1, exact.abs().max())
        assert torch.equal(a, before[0]) and torch.equal(b, before[1])
        assert (matmul(a.double(), b.double()) - exact).abs().max() < 1e-12
    for n, c, d in ((0, 5, 3), (4, 5, 0), (4, 0, 3), (0, 0, 3), (0, 5, 0)):
        assert torch.equal(matmul(torch.ones(n, c), torch.ones(c, d)), torch.zeros(n, d))
        if c and d:
            x, weight = torch.ones(2, n, c, requires_grad=True), torch.ones(d, c, requires_grad=True)
            out = linear(x, weight)
            out.sum().backward()
            assert out.shape == (2, n, d) and torch.equal(x.grad, torch.full((2, n, c), float(d)))
            assert torch.equal(weight.grad, torch.full((d, c), 2.0 * n))


@pytest.mark.parametrize("C, D", [(33, 90), (90, 33), (40, 40), (40, 1), (64, 96), (96, 64)])
@pytest.mark.parametrize("layout", ["dense", "gaps", "spread"])
def test_linear_by_either_library(called, onednn, C, D, layout):
    wide, weight, grads = (random(3, 21, 2 * C).float()[..., C:],
                           random(D, C, seed=1).float().requires_grad_(),
                           random(3, 21, 2 * D, seed=2).float()[..., :D])
    grad = {"dense": grads.contiguous(), "gaps": grads, "spread": torch.ones(()).expand(3, 21, D)}[layout]
    x = (wide.contiguous() if layout == "dense" else wide).requires_grad_()
    exact = [y.detach().double().requires_grad_() for y in (x, weight)]
    expected = F.linear(*exact)
    ours = (linear(x, weight), *torch.autograd.grad(linear(x, weight), (x, weight), grad))
    for a, b in zip(ours, (expected, *torch.autograd.grad(expected, exact, grad.double())), strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape and (a - b).abs().max() < 1e-6 * max(1, b.abs().max())
    assert bool(called) == (layout == "dense" and min(C, D) == 64 and cpu.library() is not None)


def test_onednn_serves_amd_processors(monkeypatch):
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    for text, slow in (("vendor_id\t: AuthenticAMD\n", both), ("vendor_id\t: GenuineIntel\n", False)):
        monkeypatch.setattr(ops, "open", lambda path, text=text: io.StringIO(text), raising=False)
        assert ops.mkl_is_slow.__wrapped__() == slow

    monkeypatch.setattr(ops, "open", lambda path: open("/no/such/file"), raising=False)
    assert ops.mkl_is_slow.__wrapped__() is False
