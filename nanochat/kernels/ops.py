"""
The operations of a transformer block.

On CPU, passes over memory take half of a training step: there one kernel of kernels/cpu_block.c makes what are many
passes in PyTorch, with backward passes written by hand where training does not run whole layers (layer.py). On CUDA,
decoding is bound by launches: there, without gradients, one Triton kernel of kernels/block.py makes what are several
launches. Each function has a plain counterpart, which runs everywhere else, and which tests compare with.
"""
import functools

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanochat.kernels import block, cpu
from nanochat.kernels.launch import takes_triton

ONEDNN_FROM = 2 ** 20  # multiplications from which a product makes up for its longer call


@functools.cache
def mkl_is_slow() -> bool:
    """Whether this is an AMD CPU, where PyTorch's fp32 products (MKL) run at less than half of its oneDNN's speed."""
    try:
        with open("/proc/cpuinfo") as f:
            amd = "AuthenticAMD" in f.read()
    except OSError:
        amd = False
    return (amd and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_linear_pointwise"))


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of two matrices, without gradient, by the faster library. Strided operands are taken as they are."""
    return matmul_t(a, b.t())


def matmul_t(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b.T, the same."""
    large = a.numel() * b.shape[0] >= ONEDNN_FROM
    if large and a.device.type == "cpu" and a.dtype == b.dtype == torch.float32 and mkl_is_slow():
        return torch.ops.mkldnn._linear_pointwise.default(a, b, None, "none", [], "")
    return a @ b.t()


def transposed(x: torch.Tensor) -> torch.Tensor:
    """x.T of a matrix, without gradient; contiguous where that is cheap."""
    if not (cpu.takes(x) and x.is_contiguous()):
        return x.t()
    out = x.new_empty(x.shape[1], len(x))
    cpu.call("transpose_matrix", x, out, *x.shape)
    return out


class _NoContext:
    """Stands in for autograd's context where no gradient is asked for: `apply` costs more than a small operation."""

    def save_for_backward(self, *tensors):
        pass


def run(function, *arguments):
    """function.apply(*arguments), or its forward pass alone without gradients."""
    return function.apply(*arguments) if torch.is_grad_enabled() else function.forward(_NoContext(), *arguments)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T. x (..., C), weight (D, C) of the same dtype -> (..., D)."""
    is_ours = (x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
               and not torch.compiler.is_compiling())
    return run(_Linear, x, weight) if is_ours else F.linear(x, weight)


def takes_block(x: torch.Tensor) -> bool:
    """Whether the kernels of kernels/block.py serve this tensor: on CUDA, where no gradient is asked for."""
    return not torch.is_grad_enabled() and takes_triton(x)


def takes_without_gradient(x: torch.Tensor) -> bool:
    """Whether this tensor is one for kernels on CPU that have no backward pass."""
    return not torch.is_grad_enabled() and cpu.takes(x)


def norm(x: torch.Tensor, weight: torch.Tensor | None = None, epsilon: float | None = None) -> torch.Tensor:
    """RMSNorm over the last dimension, times weight (C,) of the same dtype if given. x (..., C)."""
    if takes_block(x):
        return block.norm(x, weight=weight, epsilon=epsilon)[1]
    if weight is None and epsilon is None and cpu.takes(x):
        return run(_Norm, x)
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def add_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor | None = None,
             epsilon: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x + delta, and its norm. Both (..., C)."""
    assert x.shape == delta.shape and x.dtype == delta.dtype
    if takes_block(x):
        return block.norm(x, delta, weight=weight, epsilon=epsilon)
    if weight is None and epsilon is None and takes_without_gradient(x):
        return _norm_forward(x.contiguous(), delta.contiguous())[:2]
    x = x + delta
    return x, norm(x, weight, epsilon)


def mix_norm(x: torch.Tensor, delta: torch.Tensor | None, x0: torch.Tensor, a: torch.Tensor,
             b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """mix(x + delta, x0, a, b), and its norm. delta None: mix(x, x0, a, b)."""
    assert x.shape == x0.shape and x.dtype == x0.dtype == a.dtype == b.dtype and a.dim() == b.dim() == 0
    if takes_block(x):
        return block.norm(x, delta, mixed=(x0, a, b))
    x = mix(x if delta is None else x + delta, x0, a, b)
    return x, norm(x)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2."""
    if takes_block(x):
        return block.relu_squared(x)
    if not takes_without_gradient(x):
        return F.relu(x).square()
    x = x.contiguous()
    y = torch.empty_like(x)
    cpu.call("relu_squared", x, y, x.numel())
    return y


def swiglu(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * x, of one shape."""
    return block.swiglu(gate, x) if takes_block(x) else F.silu(gate) * x


def value_gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """3 sigmoid(x[..., :n] @ weight.T). x (B, T, C), weight (Hkv, n) of the same dtype -> (B, T, Hkv)."""
    if takes_block(x):
        return block.value_gate(x, weight)
    return 3 * torch.sigmoid(linear(x[..., : weight.shape[1]], weight))


def mix(x: torch.Tensor, x0: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * x + b * x0, with scalar tensors a and b. x, x0 of one shape."""
    assert x.shape == x0.shape and x.dtype == x0.dtype == a.dtype == b.dtype and a.dim() == b.dim() == 0
    return run(_Mix, x, x0, a, b) if cpu.takes(x) else a * x + b * x0


def smear(x: torch.Tensor, first: torch.Tensor | None, weight: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    """x + strength * sigmoid(x[..., :n] @ weight.T) * the token before. x (B, T, C); first (B, 1, C): what stands
    before each row, None: nothing; weight (1, n), strength (1,)."""
    assert first is None or first.shape == (x.shape[0], 1, x.shape[2]) and first.dtype == x.dtype
    if cpu.takes(x):
        return run(_Smear, x, first, weight, strength)
    first = torch.zeros_like(x[:, :1]) if first is None else first
    before = first if x.shape[1] == 1 else torch.cat([first, x[:, :-1]], dim=1)
    return x + strength * torch.sigmoid(linear(x[..., : weight.shape[1]], weight)) * before


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of each head by minus the angle. x (B, T, H, D), cos and sin (B, T, 1, D/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)


def to_units(x: torch.Tensor, units: int, kv_heads: int) -> torch.Tensor:
    """(B, T, H, D) -> (U, Hkv, R, group, T, D), a view: the order in which attention wants heads."""
    B, T, H, D = x.shape
    return x.view(units, B // units, T, kv_heads, H // kv_heads, D).permute(0, 3, 1, 4, 2, 5)


def split_heads(qkv: torch.Tensor, cos_sin, gate, embedding, scale: float, units: int, heads: int, kv_heads: int,
                into: tuple | None = None):
    """Queries, keys and values as attention wants them, from rows that hold the heads of all three side by side.

    qkv (B, T, (H + 2 Hkv) * D); cos, sin (B, T, 1, D/2); gate (B, T, Hkv) and embedding (B, T, Hkv * D), or two None.
    -> q (U, Hkv, R, group, T, D) = scale * norm(rotate(q)), k (U, Hkv, R, T, D) likewise, v (U, Hkv, R, T, D) = v +
    gate * embedding. into (DecodeCache.columns): where the kernel on CUDA writes k and v, which then are None.
    """
    B, T, width = qkv.shape
    D = width // (heads + 2 * kv_heads)
    assert all(x.shape == (B, T, 1, D // 2) and x.dtype == qkv.dtype for x in cos_sin)
    assert (gate is None
            or gate.shape == (B, T, kv_heads) and embedding.shape == (B, T, kv_heads * D)
            and gate.dtype == embedding.dtype == qkv.dtype)
    if takes_block(qkv):
        return block.split_heads(*qkv.split([heads * D, kv_heads * D, kv_heads * D], dim=-1), *cos_sin, units, kv_heads,
                                 scale=scale, norm="after", gate=gate, embedding=embedding, into=into)
    if takes_without_gradient(qkv) and D % cpu.MULTIPLE == 0:
        q, k = qkv.new_empty(B, T, heads, D), qkv.new_empty(units, kv_heads, B // units, T, D)
        v, factors = torch.empty_like(k), qkv.new_empty(B, T, heads + kv_heads)
        shape = cpu.struct("Heads", units, B // units, T, heads, kv_heads, D, scale, torch.finfo(qkv.dtype).eps)
        cpu.call("split_heads", shape, *contiguous(qkv, *cos_sin, gate, embedding), q, k, v, factors)
        return to_units(q, units, kv_heads), k, v
    q, k, v = (x.view(B, T, -1, D) for x in qkv.split([heads * D, kv_heads * D, kv_heads * D], dim=-1))
    if gate is not None:
        v = v + gate.unsqueeze(-1) * embedding.view(v.shape)
    q, k = (to_units(scale * norm(rotate(x, *cos_sin)), units, kv_heads) for x in (q, k))
    return q.contiguous(), k[:, :, :, 0].contiguous(), to_units(v, units, kv_heads)[:, :, :, 0].contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return matmul_t(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.reshape(-1, len(weight))
        grad_x = matmul(grad, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        x = x.reshape(-1, x.shape[-1])
        # oneDNN copies the transposed left operand: let that be the narrow one.
        return grad_x, matmul(transposed(x), grad).t() if len(weight) > x.shape[1] else matmul(transposed(grad), x)


def _norm_forward(x, delta):
    C = x.shape[-1]
    rows, inverse = x.numel() // C, x.new_empty(x.numel() // C)
    added, y = None if delta is None else torch.empty_like(x), torch.empty_like(x)
    cpu.call("norm_forward", x, delta, added, y, inverse, rows, C, torch.finfo(x.dtype).eps)
    return added, y, inverse


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        _, y, inverse = _norm_forward(x.contiguous(), None)
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, inverse = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), torch.empty_like(y)
        cpu.call("norm_backward", grad, y, inverse, grad_x, len(inverse), y.shape[-1])
        return grad_x


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, x0, a, b):
        x, x0 = x.contiguous(), x0.contiguous()
        y = torch.empty_like(x)
        cpu.call("mix_forward", x, x0, a, b, y, x.numel())
        ctx.save_for_backward(x, x0, a, b)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, x0, a, b = ctx.saved_tensors
        grad, grad_x, grad_x0, sums = (grad.contiguous(), torch.empty_like(x), torch.empty_like(x),
                                       x.new_empty(-(-x.numel() // 1024), 2))
        cpu.call("mix_backward", grad, x, x0, a, b, grad_x, grad_x0, sums, x.numel())
        return grad_x, grad_x0, *sums.sum(dim=0)


class _Smear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, first, weight, strength):
        x, first, weight, strength = contiguous(x, first, weight, strength)
        y, gates = torch.empty_like(x), x.new_empty(x.shape[:2])
        cpu.call("smear_forward", x, first, weight, strength, y, gates, *x.shape, weight.shape[1])
        ctx.save_for_backward(x, first, weight, strength, gates)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, first, weight, strength, gates = ctx.saved_tensors
        grad_x, grad_first = torch.empty_like(x), None if first is None else torch.empty_like(first)
        sums = x.new_empty(len(x), weight.shape[1] + 1)
        cpu.call("smear_backward", grad.contiguous(), x, first, weight, strength, gates, grad_x, grad_first, sums,
                 *x.shape, weight.shape[1])
        of_weight, of_strength = sums.sum(dim=0).split([weight.shape[1], 1])
        return grad_x, grad_first, of_weight[None], of_strength


def contiguous(*tensors):
    """Each tensor in one piece, None as it is."""
    return [None if x is None else x.contiguous() for x in tensors]
