"""
Products in bf16 on CPU, and an imported model's layer made of them.

There weights and what they are multiplied with are rounded to bf16. Sums, attention and all else are fp32; what the
backward pass keeps of a gated MLP is bf16 too. So sampling and training compute the same but for the order of sums.
Processors with AMX multiply bf16 several times as fast as fp32, those with AVX512-BF16 twice as fast; others run the
same kernels without that gain. What the kernels do not take runs in PyTorch, as `linear` has it.
"""
import functools

import torch
from torch.autograd.function import once_differentiable

from nanochat.kernels import cpu
from nanochat.kernels.ops import contiguous, run

ROWS = 256  # tokens whose part of the gradients of norms and biases is one sum (cpu_decoder.c)


def has_bf16() -> bool:
    """Whether this CPU multiplies bf16 faster than fp32 (AMX, AVX512-BF16)."""
    return asked_for_bf16() == 1


@functools.cache
def asked_for_bf16() -> int:
    """has_bf16 of cpu_tiles.c, before threads start; -1: the kernels have tiles, Linux does not grant them."""
    return -1 if cpu.library() is None else cpu.library().has_bf16(1)


def takes(*sizes: int) -> bool:
    """Whether the kernels serve rows and weights of these sizes: multiples of 32, and a compiler was there."""
    return not torch.compiler.is_compiling() and all(n % cpu.MULTIPLE == 0 for n in sizes) and has_kernels()


def has_kernels() -> bool:
    return asked_for_bf16() >= 0


def weight_of(w: torch.Tensor):
    """A weight (n, k), fp32 or bf16 and in one piece."""
    assert w.is_contiguous() and w.dtype in (torch.float32, torch.bfloat16)
    return cpu.struct("Weight", w.data_ptr(), w.dtype == torch.float32)


def packed(*weights: torch.Tensor, turns: bool = False) -> torch.Tensor:
    """The panels of weights (n, k), one below the other, for x @ w.T; turns: their panels of 32 rows take turns."""
    k, n = weights[0].shape[1], sum(map(len, weights))
    out, first = torch.empty(n * k, dtype=torch.bfloat16), 0
    for i, w in enumerate(weights):
        cpu.call("pack_tiles", weight_of(w), out, len(w), k, i if turns else first, len(weights) if turns else 1)
        first += len(w) // cpu.MULTIPLE
    return out


def packed_back(*weights: torch.Tensor) -> torch.Tensor:
    """The panels of the same for x @ w."""
    k, n = weights[0].shape[1], sum(map(len, weights))
    out, first = torch.empty(n * k, dtype=torch.bfloat16), 0
    for w in weights:
        cpu.call("pack_tiles_back", weight_of(w), out, len(w), k, first, n)
        first += len(w)
    return out


def product(x: torch.Tensor, panels: torch.Tensor) -> torch.Tensor:
    """x (..., k) fp32 @ panels of n * k numbers -> (..., n) fp32."""
    x, k = x.contiguous(), x.shape[-1]
    out = x.new_empty(*x.shape[:-1], panels.numel() // k)
    if out.numel():
        cpu.call("tiles_product", x, panels, out, x.numel() // k, out.shape[-1], k)
    return out


def add_gradient(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total (n, k) += a.T @ b, a (N, n), b (N, k), all fp32."""
    a, b = a.contiguous(), b.contiguous()
    assert total.is_contiguous() and total.shape == (a.shape[1], b.shape[1])
    cpu.call("tiles_gradient", a, b, total, len(a), *total.shape)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


class NarrowMatrix:
    """A weight (n, k), fp32 or bf16, for products in fp32 of operands rounded to bf16."""

    def __init__(self, weight: torch.Tensor):
        self.weight, self.by_kernel = weight, takes(*weight.shape)

    @functools.cached_property
    def panels(self) -> torch.Tensor:
        return packed(self.weight)

    @functools.cached_property
    def panels_back(self) -> torch.Tensor:
        return packed_back(self.weight)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., k) -> x @ weight.T (..., n)."""
        return product(x, self.panels) if self.by_kernel else rounded(x) @ rounded(self.weight).T

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of x (N, k) from that of the product (N, n)."""
        return product(grad, self.panels_back) if self.by_kernel else rounded(grad) @ rounded(self.weight)

    def add_gradient(self, total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
        """total (n, k) += the weight's gradient, from that of the product (N, n) and x (N, k)."""
        if self.by_kernel:
            add_gradient(total, grad, x)
        else:
            total.addmm_(rounded(grad).T, rounded(x))


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (..., k) @ weight.T, operands rounded to bf16, also in the backward pass; weight (n, k) fp32 or bf16."""
    return run(_Linear, x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return NarrowMatrix(weight).product(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        matrix, grad, rows = NarrowMatrix(weight), grad.reshape(-1, len(weight)), x.reshape(-1, x.shape[-1])
        grad_x = matrix.back(grad).view(x.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        grad_weight = torch.zeros(weight.shape)
        matrix.add_gradient(grad_weight, grad, rows)
        return grad_x, grad_weight


class Layer:
    """The weights of an imported model's layer, in panels: made when they are first asked for, and good as long as the
    weights do not change: for one forward pass or one backward pass, or for one sampling.

    before: of queries, keys and values; after: of the output, gate, up and down projections; norms: of both norms;
    bias: of queries, keys and values, or None. epsilon: of the norms.
    """

    def __init__(self, before: list, after: list, norms: tuple, bias: torch.Tensor | None, epsilon: float):
        self.before, self.after, self.norms, self.bias, self.epsilon = before, after, norms, bias, epsilon

    @functools.cached_property
    def forward(self) -> tuple:
        """Panels of queries, keys and values; of output, gate and up, and down."""
        o, gate, up, down = self.after
        return packed(*self.before), (packed(o), packed(gate, up, turns=True), packed(down))

    def without_panels(self) -> "Layer":
        return Layer(self.before, self.after, self.norms, self.bias, self.epsilon)

    def drop_forward(self) -> None:
        """Gives up the panels of the forward pass: autograd keeps the layer for the backward pass, which has others."""
        self.__dict__.pop("forward", None)

    @functools.cached_property
    def back_before(self) -> torch.Tensor:
        return packed_back(*self.before)

    @functools.cached_property
    def back_after(self) -> tuple:
        o, gate, up, down = self.after
        return packed_back(o), packed_back(gate, up), packed_back(down)


def before_attention(layer: Layer, x, cos_sin, units: int, heads: int, kv_heads: int, places=None):
    """Queries, keys and values of a layer's normed input. x (B, T, C) fp32; cos, sin (B, T, 1, D/2) -> q (B, T, H, D),
    k and v (U, Hkv, R, T, D). places (N,) int64: the tokens of the B * T that are run; others are zero."""
    return run(_Before, x, layer.norms[0], layer.bias, *layer.before, layer, *cos_sin, units, heads, kv_heads, places)


def after_attention(layer: Layer, x, y, places=None):
    """A layer from its attention on: added = x + y @ w_o.T, plus the gated MLP of its norm. x (..., C), y (..., Q).
    places: as above."""
    return run(_After, x, y, layer.norms[1], *layer.after, layer, torch.is_grad_enabled(), places)


def blank(x: torch.Tensor, places: torch.Tensor | None, *shape: int) -> torch.Tensor:
    """Of x's dtype, for tokens to be written: zero where some are not."""
    return x.new_empty(shape) if places is None else x.new_zeros(shape)


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm, bias, w_q, w_k, w_v, layer, cos, sin, units, heads, kv_heads, places):
        (B, T, C), D, N = x.shape, 2 * cos.shape[-1], x.shape[:2].numel() if places is None else len(places)
        shape = cpu.struct("Heads", units, B // units, T, heads, kv_heads, D, 1.0, layer.epsilon)
        x, norm, bias, cos, sin = contiguous(x, rounded(norm), None if bias is None else rounded(bias), cos, sin)
        q, inverse = blank(x, places, B, T, heads, D), x.new_empty(N)
        k, v = (blank(x, places, units, kv_heads, B // units, T, D) for _ in range(2))
        cpu.call("decoder_before", shape, C, x, norm, layer.forward[0], bias, cos, sin, inverse, q, k, v, places, N)
        ctx.save_for_backward(x, norm, cos, sin, inverse, w_q, w_k, w_v, places)
        ctx.layer, ctx.shape = layer, shape
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_q, grad_k, grad_v):
        x, norm, cos, sin, inverse, *weights, places = ctx.saved_tensors
        sizes, C, N = [len(w) for w in weights], x.shape[-1], len(inverse)
        sums, grad_x = x.new_empty(-(-N // ROWS), C + sum(sizes)), blank(x, places, *x.shape)
        grads = x.new_empty(sum(sizes), C) if any(ctx.needs_input_grad[3:6]) else None
        layer, ctx.layer = ctx.layer, ctx.layer.without_panels()  # which the graph would keep
        cpu.call("decoder_before_back", ctx.shape, C, x, norm, layer.back_before, cos, sin, inverse,
                 *contiguous(grad_q, grad_k, grad_v), grad_x, sums, grads, places, N)
        of_norm, of_bias = sums.sum(dim=0).split([C, sum(sizes)])
        of_weights = [None] * 3 if grads is None else grads.split(sizes)
        return grad_x, of_norm, of_bias if ctx.needs_input_grad[2] else None, *of_weights, *[None] * 7


class _After(torch.autograd.Function):
    """Saves gate and up in bf16, and no norm: it is made again from `added`."""

    @staticmethod
    def forward(ctx, x, y, norm, w_o, w_gate, w_up, w_down, layer, has_gradient, places):
        x, y, norm = contiguous(x, y, rounded(norm))
        (C, Q), F, N = w_o.shape, len(w_gate), x.numel() // x.shape[-1] if places is None else len(places)
        added = x.new_empty(N, C) if has_gradient else None
        inner = torch.empty(N, 2 * F, dtype=torch.bfloat16) if has_gradient else None
        out, inverse = blank(x, places, *x.shape), x.new_empty(N)
        o, gate_up, down = layer.forward[1]
        cpu.call("decoder_after", x, y, o, norm, gate_up, down, added, inverse, inner, out, places, N, C, Q, F,
                 layer.epsilon)
        ctx.save_for_backward(y, norm, w_o, w_gate, w_up, w_down, added, inverse, inner, places)
        ctx.layer = layer
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, norm, *weights, added, inverse, inner, places = ctx.saved_tensors
        (C, Q), F, N = weights[0].shape, len(weights[1]), len(inverse)
        grad_x, grad_y = blank(y, places, *grad.shape), blank(y, places, *y.shape)
        sums = y.new_empty(-(-N // ROWS), C)
        trained = any(ctx.needs_input_grad[3:7])
        grads = [y.new_empty(C, Q), y.new_empty(2 * F, C), y.new_empty(C, F)] if trained else [None] * 3
        layer, ctx.layer = ctx.layer, ctx.layer.without_panels()  # as above
        o, *others = layer.back_after
        cpu.call("decoder_after_back", grad.contiguous(), y, o, norm, *others, added, inverse, inner, grad_x, grad_y,
                 sums, *grads, places, N, C, Q, F, layer.epsilon)
        of_o, of_gate_up, of_down = grads
        of_gate, of_up = of_gate_up.split(F) if trained else (None, None)
        return grad_x, grad_y, sums.sum(dim=0), of_o, of_gate, of_up, of_down, *[None] * 3
