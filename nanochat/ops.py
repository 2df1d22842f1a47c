"""
The operations of a transformer block, with backward passes written by hand.

On CPU, passes over memory took half of a training step. Each function has a plain twin, which other devices and dtypes run and tests
compare with.
"""
import functools

import torch
import torch.nn.functional as F


ONEDNN_FROM = 2 ** 20  # multiplications from which a product makes up for its longer call


@functools.cache
def mkl_is_slow() -> bool:
    """Whether this is an AMD CPU, where PyTorch's fp32 products (MKL) run at less than half of its oneDNN's speed."""
    try:
        with open("/proc/cpuinfo") as f:
            amd = "AuthenticAMD" in f.read()
    except OSError:
        amd = False
    return amd and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of two matrices, without gradient, by the faster library. Strided operands are taken as they are."""
    large = a.numel() * b.shape[1] >= ONEDNN_FROM
    if large and a.device.type == "cpu" and a.dtype == b.dtype == torch.float32 and mkl_is_slow():
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return a @ b


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T. x (..., C), weight (D, C) of the same dtype -> (..., D)."""
    return run(_Linear, x, weight) if by_hand(x) else F.linear(x, weight)


def by_hand(x: torch.Tensor) -> bool:
    """Whether the hand-written passes serve this tensor."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


class _NoContext:
    """Stands in for autograd's context where no gradient is asked for: `apply` costs more than a small operation."""

    def save_for_backward(self, *tensors):
        pass


def run(function, *arguments):
    """function.apply(*arguments), or its forward pass alone without gradients."""
    return function.apply(*arguments) if torch.is_grad_enabled() else function.forward(_NoContext(), *arguments)


def norm(x: torch.Tensor) -> torch.Tensor:
    """RMSNorm over the last dimension, without parameters. x (..., C)."""
    return run(_Norm, x) if by_hand(x) else F.rms_norm(x, (x.shape[-1],))


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2."""
    return run(_ReluSquared, x) if by_hand(x) else F.relu(x).square()


def mix(x: torch.Tensor, x0: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * x + b * x0, with scalar tensors a and b. x, x0 of one shape."""
    return run(_Mix, x, x0, a, b) if by_hand(x) else a * x + b * x0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of each head by minus the angle. x (B, T, H, D), cos and sin (B, T, 1, D/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)


def to_units(x: torch.Tensor, units: int, kv_heads: int) -> torch.Tensor:
    """(B, T, H, D) -> (U, Hkv, R, group, T, D), a view: the order in which attention wants heads."""
    B, T, H, D = x.shape
    return x.view(units, B // units, T, kv_heads, H // kv_heads, D).permute(0, 3, 1, 4, 2, 5)


def rotary_norm(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float, units: int, kv_heads: int) -> torch.Tensor:
    """scale * norm(rotate(x)), laid out for attention. x (B, T, H, D) -> (U, Hkv, R, group, T, D)."""
    if by_hand(x):
        return run(_RotaryNorm, x, cos, sin, scale, units, kv_heads)
    return to_units(scale * norm(rotate(x, cos, sin)), units, kv_heads).contiguous()


def _inverse_rms(x):
    """1 / sqrt(mean(x^2) + eps) over the last dimension, kept. In few operations: in decoding each costs as much as its work."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_epsilon(x.dtype), norms, norms, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _epsilon(dtype):
    return torch.tensor(torch.finfo(dtype).eps, dtype=dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return matmul(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.reshape(-1, len(weight))
        grad_x = matmul(grad, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        x = x.reshape(-1, x.shape[-1])
        # oneDNN copies the transposed left operand: let that be the narrow one.
        return grad_x, matmul(x.t(), grad).t() if len(weight) > x.shape[1] else matmul(grad.t(), x)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        inverse = _inverse_rms(x)
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, inverse = ctx.saved_tensors
        mean = (grad * y).sum(dim=-1, keepdim=True).div_(-y.shape[-1])
        return torch.addcmul(grad, y, mean).mul_(inverse)


class _ReluSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        positive = torch.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.saved_tensors[0]).mul_(2)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, x0, a, b):
        ctx.save_for_backward(x, x0, a, b)
        return (x * a).addcmul_(x0, b)

    @staticmethod
    def backward(ctx, grad):
        x, x0, a, b = ctx.saved_tensors
        needs = ctx.needs_input_grad
        flat = grad.reshape(-1)
        return (grad * a if needs[0] else None, grad * b if needs[1] else None,
                torch.dot(flat, x.reshape(-1)) if needs[2] else None, torch.dot(flat, x0.reshape(-1)) if needs[3] else None)


class _RotaryNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, scale, units, kv_heads):
        B, T, H, D = x.shape
        out = x.new_empty(units, kv_heads, B // units, H // kv_heads, T, D)
        x, cos, sin = (_by_units(z, units, kv_heads if z is x else 1) for z in (x, cos, sin))
        _rotate_into(_from_units(out), x, cos, sin)
        factor = _inverse_rms(out).mul_(scale)  # (U, Hkv, R, group, T, 1)
        out *= factor
        ctx.save_for_backward(out, factor, cos, sin)
        ctx.shape, ctx.scale = (B, T, H, D), scale
        return out

    @staticmethod
    def backward(ctx, grad):
        out, factor, cos, sin = ctx.saved_tensors
        mean = (grad * out).sum(dim=-1, keepdim=True).div_(-out.shape[-1] * ctx.scale ** 2)
        rotated = _from_units(torch.addcmul(grad, out, mean).mul_(factor))
        grad_x = torch.empty(rotated.shape, dtype=grad.dtype, device=grad.device)
        _rotate_into(grad_x, rotated, cos, -sin)
        return grad_x.view(ctx.shape), None, None, None, None, None


def _rotate_into(out, x, cos, sin):
    (y1, y2), (x1, x2) = out.chunk(2, dim=-1), x.chunk(2, dim=-1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin, value=-1)


def _by_units(x, units, kv_heads):
    """(B, T, H, D) -> (U, R, T, Hkv, group, D), a view."""
    return x.unflatten(2, (kv_heads, -1)).unflatten(0, (units, -1))


def _from_units(x):
    """(U, Hkv, R, group, T, D) -> (U, R, T, Hkv, group, D), a view."""
    return x.permute(0, 2, 4, 1, 3, 5)
