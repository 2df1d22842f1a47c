"""
A layer of a GPT on CPU in fp32, before its attention and after it, by the kernels of cpu_layer.c.
"""
import torch
from torch.autograd.function import once_differentiable

from nanochat.kernels import cpu
from nanochat.kernels.ops import (add_norm, contiguous, linear, mix, norm, relu_squared, run, split_heads, to_units,
                                  value_gate)

LAYER_ROWS = 64  # tokens that the kernels take at a time (ROWS in cpu_layer.c)
LEAST_ROWS = 8   # tokens for each thread from which these are faster than single operations


def fuses_layers(x: torch.Tensor) -> bool:
    """Whether these kernels are faster than single operations: in training, or with some tokens for each thread."""
    return cpu.takes(x) and (torch.is_grad_enabled()
                             or x.shape[0] * x.shape[1] >= LEAST_ROWS * torch.get_num_threads())


def packed(*weights: torch.Tensor) -> torch.Tensor:
    """Weights (n, k), one below the other, as forward kernels of a layer read them; n and k multiples of 32."""
    assert all(n % cpu.MULTIPLE == 0 for weight in weights for n in weight.shape)
    out = weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1])
    for weight, place in zip(weights, out.split([len(weight) for weight in weights]), strict=True):
        cpu.call("pack_weight", weight.contiguous(), place, *weight.shape)
    return out


def packed_layer(before: list, after: list) -> tuple[torch.Tensor, tuple] | None:
    """What before_attention and after_attention take as `ready`; None for weights that the kernels do not take."""
    if not all(cpu.takes(weight) and len(weight) % cpu.MULTIPLE == 0 for weight in (*before, *after)):
        return None
    return packed(*before), tuple(map(packed, after))


def before_attention(x, x0, a, b, w_q, w_k, w_v, gate_weight, embedding, cos_sin, scale: float, units: int,
                     ready=None):
    """A layer up to its attention: x mixed with x0, and the queries, keys and values of its norm.

    x, x0 (B, T, C); a, b scalars; w_q (Hq * D, C), w_k, w_v (Hkv * D, C): of queries, keys and values;
    gate_weight (Hkv, channels) and embedding (B, T, Hkv * D), or two None; cos, sin (B, T, 1, D/2).
    -> mixed (B, T, C), and q, k, v as of split_heads.
    """
    D = 2 * cos_sin[0].shape[-1]
    heads, kv_heads = len(w_q) // D, len(w_k) // D
    if cpu.takes(x) and D % cpu.MULTIPLE == 0:
        mixed, q, k, v = run(_Before, x, x0, a, b, w_q, w_k, w_v, gate_weight, embedding, *cos_sin, scale, units,
                             ready)
        return mixed, to_units(q, units, kv_heads), k, v
    mixed = mix(x, x0, a, b)
    normed, gate = norm(mixed), None
    if embedding is not None:
        gate = value_gate(normed, gate_weight)  # (B, T, Hkv)
    qkv = linear(normed, torch.cat([w_q, w_k, w_v]))
    return mixed, *split_heads(qkv, cos_sin, gate, embedding, scale, units, heads, kv_heads)


def after_attention(x, y, w_o, w_up, w_down, ready=None):
    """A layer from its attention on: added = x + y @ w_o.T, and the MLP of its norm on top of that.

    x, y (..., C), w_o (C, C), w_up (F, C), w_down (C, F).
    """
    assert x.shape == y.shape and x.dtype == y.dtype
    if cpu.takes(x) and len(w_up) % cpu.MULTIPLE == 0:
        return run(_After, x, y, w_o, w_up, w_down, ready)
    added, normed = add_norm(x, linear(y, w_o))
    return added + linear(relu_squared(linear(normed, w_up)), w_down)


class _Before(torch.autograd.Function):
    """Saves no norm and no row of heads: they are made again from `mixed`, q and k."""

    @staticmethod
    def forward(ctx, x, x0, a, b, w_q, w_k, w_v, w_gate, embedding, cos, sin, scale, units, ready):
        (B, T, C), D = x.shape, 2 * cos.shape[-1]
        heads, kv_heads = len(w_q) // D, len(w_k) // D
        shape = cpu.struct("Heads", units, B // units, T, heads, kv_heads, D, scale, torch.finfo(x.dtype).eps)
        channels = 0 if w_gate is None else w_gate.shape[1]
        given = contiguous(x, x0, a, b, w_q, w_k, w_v, w_gate, embedding, cos, sin)
        ready = packed(w_q, w_k, w_v) if ready is None else ready
        mixed, inverse = torch.empty_like(given[0]), x.new_empty(B, T)
        gate = None if w_gate is None else x.new_empty(B, T, kv_heads)
        q, k = x.new_empty(B, T, heads, D), x.new_empty(units, kv_heads, B // units, T, D)
        v, factors = torch.empty_like(k), x.new_empty(B, T, heads + kv_heads)
        cpu.call("before_forward", shape, C, channels, *given[:4], ready, *given[7:], mixed, inverse, gate, q, k, v,
                 factors)
        ctx.save_for_backward(*given, mixed, inverse, gate, q, k, factors)
        ctx.shape = shape
        return mixed, q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        x, x0, _, _, w_q, w_k, w_v, w_gate, embedding, *_ = saved
        C, trained = x.shape[-1], any(ctx.needs_input_grad[4:7])
        grad_x, grad_x0 = torch.empty_like(x), torch.empty_like(x0)
        sums = x.new_empty(-(-x.numel() // C // LAYER_ROWS), 2)
        weights = ([w_q, w_k, w_v] if trained else []) + ([] if w_gate is None else [w_gate])
        flat, of_weights = _flat_gradients(x, weights)
        grad_embedding = None if w_gate is None else torch.empty_like(embedding)
        cpu.call("before_backward", ctx.shape, C, 0 if w_gate is None else w_gate.shape[1], *saved,
                 *contiguous(*grads), grad_x, grad_x0, sums, flat, grad_embedding, trained)
        projections = of_weights[:3] if trained else [None] * 3
        return (grad_x, grad_x0, *sums.sum(dim=0), *projections, None if w_gate is None else of_weights[-1],
                grad_embedding, *[None] * 5)


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, w_o, w_up, w_down, ready):
        x, y, w_o, w_up, w_down = contiguous(x, y, w_o, w_up, w_down)
        C, F = x.shape[-1], len(w_up)
        added, inverse, up, out = (torch.empty_like(x), x.new_empty(x.shape[:-1]), x.new_empty(*x.shape[:-1], F),
                                   torch.empty_like(x))
        ready = tuple(map(packed, (w_o, w_up, w_down))) if ready is None else ready
        cpu.call("after_forward", x, y, *ready, added, inverse, up, out, inverse.numel(), C, F,
                 torch.finfo(x.dtype).eps)
        ctx.save_for_backward(y, w_o, w_up, w_down, added, inverse, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, w_o, w_up, w_down, added, inverse, up = ctx.saved_tensors
        grad_x, grad_y = torch.empty_like(y), torch.empty_like(y)
        trained = any(ctx.needs_input_grad[2:5])
        flat, of_weights = _flat_gradients(y, [w_o, w_up, w_down] if trained else [])
        cpu.call("after_backward", grad.contiguous(), y, w_o, w_up, w_down, added, inverse, up, grad_x, grad_y, flat,
                 trained, inverse.numel(), y.shape[-1], len(w_up))
        return grad_x, grad_y, *(of_weights if trained else [None] * 3), None


def _flat_gradients(x, weights: list):
    """Room for the gradients of weights, one after the other, and each as a view."""
    sizes = [w.numel() for w in weights]
    flat = x.new_empty(sum(sizes))
    return flat, [part.view(w.shape) for part, w in zip(flat.split(sizes), weights, strict=True)] if weights else []
