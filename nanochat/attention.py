"""
The one attention call: causal, behind a shared prefix, and cached.

Rows come as U units of R rows; the rows of a unit continue one prefix (a prompt), whose keys exist once. In a row,
columns stand at consecutive positions, so that one causal mask serves all rows. Only prefixes are ragged: padding
behind a short one stands at PADDING_POSITION, where no query looks.
"""
import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanochat.kernels import cpu
from nanochat.ops import run

PADDING_POSITION = 1 << 30  # position of a padding column
RECENT = 16    # columns of a cache's buffer for new ones
RECENT_KERNEL = 64  # the same where CPU kernels read it
QUERIES = 64   # queries whose scores are computed together on CPU


class KVCache:
    """Keys and values of the tokens run so far.

    k[i], v[i]: (U, Hkv, R, T, D) of layer i; positions (U, T) int64 of a prefix (R = 1); last_embedding (U*R, 1, C):
    what the smear of the next token looks back at. Columns that come one by one are first put into `recent`, buffers of
    a few columns, and moved behind the others when these are full: without kernels, reading a tensor is three times as
    fast while it has no gaps. With `capacity`, buffers of that many columns are written in place, one at a time, at a
    column that is read on the device (CUDA graphs).
    """

    def __init__(self, num_layers: int, capacity: int | None = None):
        self.k: list = [None] * num_layers
        self.v: list = [None] * num_layers
        self.recent: list = [None] * num_layers  # keys and values, each (U, Hkv, R, columns, D)
        self.filled = [0] * num_layers           # columns of it in use
        self.positions = None
        self.last_embedding = None
        self.length = 0  # columns filled before the current forward (with capacity: whether there are any)
        self.capacity = capacity
        self.column = None  # with capacity: `length` as a tensor (1,) int64 on the device

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Stores the keys and values (U, Hkv, R, T, D) of new columns; returns those of all columns, in one piece or
        two."""
        if self.capacity is not None:
            return self._write(layer, k, v)
        columns = RECENT_KERNEL if cpu.takes(k) else RECENT
        if k.shape[3] > 1 or self.k[layer] is None or self.filled[layer] == columns:
            before = self.parts(layer)
            self.k[layer] = torch.cat([*(part for part, _ in before), k], dim=3) if before else k
            self.v[layer] = torch.cat([*(part for _, part in before), v], dim=3) if before else v
            self.filled[layer] = 0
        else:
            if self.recent[layer] is None:
                self.recent[layer] = [k.new_empty(*k.shape[:3], columns, k.shape[4]) for _ in range(2)]
            for buffer, new in zip(self.recent[layer], (k, v), strict=True):
                buffer.narrow(3, self.filled[layer], 1).copy_(new)
            self.filled[layer] += 1
        return self.parts(layer)

    def parts(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of a layer: the moved columns, and the recent ones if there are."""
        if self.k[layer] is None:
            return []
        moved, filled = [(self.k[layer], self.v[layer])], self.filled[layer]
        return moved + [tuple(x.narrow(3, 0, filled) for x in self.recent[layer])] if filled else moved

    def _write(self, layer, k, v):
        if self.k[layer] is None:
            shape = (*k.shape[:3], self.capacity, k.shape[4])
            self.k[layer], self.v[layer] = k.new_zeros(shape), v.new_zeros(shape)
        self.k[layer].index_copy_(3, self.column, k)
        self.v[layer].index_copy_(3, self.column, v)
        return [(self.k[layer], self.v[layer])]

    def reserve(self, columns: int) -> None:
        """Makes room for so many more columns, with capacity."""
        self.capacity += columns
        for side in (self.k, self.v):
            for layer, x in enumerate(side):
                side[layer] = F.pad(x, (0, 0, 0, columns))

    def select(self, rows: torch.Tensor) -> "KVCache":
        """A cache of the rows (U', R') int64, each the place u * R + r of an old one; they may repeat. Itself when it
        is empty or nothing moves."""
        if (not self.length
                or rows.shape[1] == self.k[0].shape[2]
                and torch.equal(rows.flatten(), torch.arange(len(self.last_embedding)))):
            return self
        rows = rows.to(self.last_embedding.device)
        cache = KVCache(len(self.k), self.capacity)
        cache.length, cache.column = self.length, self.column
        for i in range(len(self.k)):
            columns = (torch.cat(part, dim=3) for part in zip(*self.parts(i), strict=True))
            cache.k[i], cache.v[i] = (x.transpose(1, 2).flatten(0, 1)[rows].transpose(1, 2).contiguous()
                                      for x in columns)  # (U', Hkv, R', T, D)
        cache.last_embedding = self.last_embedding[rows.flatten()]
        cache.positions = None if self.positions is None else self.positions[rows.flatten()]
        return cache


@dataclass
class Mask:
    """What queries may see, as numbers added to scores: 0, or -inf where they may not look. None: all of it (own: for a
    single query).

    own (T, Tk) over the row's own columns; prefix (U, 1 or T, Tp) over the unit's prefix. causal: own is the plain
    lower triangle.
    """
    own: torch.Tensor | None = None
    prefix: torch.Tensor | None = None
    causal: bool = False


def bias(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where allowed, -inf elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def make_mask(T: int, window: int, context: int, cache: KVCache | None, prefix: KVCache | None,
              positions: torch.Tensor, dtype: torch.dtype) -> Mask:
    """The mask of T new columns whose queries see themselves and `window` tokens before.

    context: no row is longer than that. positions (B, T) of the new tokens, the same for all rows of a unit.
    """
    mask = Mask()
    start = cache.length if cache is not None else 0
    moving = cache is not None and cache.column is not None
    end = cache.capacity if moving else start + T
    if T > 1 or moving or end - 1 > window:
        columns = torch.arange(end, device=positions.device)
        queries = cache.column + torch.arange(T, device=positions.device) if moving else columns[start:]
        distance = queries[:, None] - columns  # (T, Tk)
        mask.own = bias((distance >= 0) & (distance <= window), dtype)
        mask.causal = T == end <= window + 1
    if prefix is not None:
        keys = prefix.positions[:, None]  # (U, 1, Tp)
        if window < context:
            queries = positions.view(len(keys), -1, T)[:, 0, :, None]  # (U, T, 1)
            mask.prefix = bias((keys <= queries) & (queries - keys <= window), dtype)
        else:
            mask.prefix = bias(keys < PADDING_POSITION, dtype)
    return mask


def attend(q, parts, mask: Mask, prefix_k=None, prefix_v=None):
    """Attention of queries over their own keys and, with a prefix, over those that the rows of a unit share.

    q (U, Hkv, R, group, T, D): `group` query heads read each key head; parts: own keys and values, pairs of (U, Hkv, R,
    T', D) whose columns follow one another; prefix_k, prefix_v (U, Hkv, Tp, D). -> (U, Hkv, R, group, T, D). Scores are
    scaled by 1/sqrt(D).
    """
    one = q.shape[4] == 1 and not torch.is_grad_enabled()
    if cpu.takes(q):
        return (_decode_kernel(q, parts, mask, prefix_k, prefix_v) if one
                else _attend_kernel(q, parts, mask, prefix_k, prefix_v))
    if one:
        return _attend_one(q, parts, mask, prefix_k, prefix_v)
    k, v = parts[0] if len(parts) == 1 else (torch.cat(part, dim=3) for part in zip(*parts, strict=True))
    if q.device.type != "cpu":
        return _attend_sdpa(q, k, v, mask, prefix_k, prefix_v)
    y, before = [], k.shape[3] - q.shape[4]
    for start in range(0, q.shape[4], QUERIES):
        # Queries see no later keys: a block of them needs the keys up to its end.
        block = slice(start, min(start + QUERIES, q.shape[4]))
        seen = slice(0, before + block.stop)
        prefix_bias = mask.prefix if mask.prefix is None or mask.prefix.shape[1] == 1 else mask.prefix[:, block]
        y.append(run(_Attend, q[..., block, :].contiguous(), k[..., seen, :].contiguous(), v[..., seen, :].contiguous(),
                     None if mask.own is None else mask.own[block, seen], prefix_k, prefix_v, prefix_bias))
    return y[0] if len(y) == 1 else torch.cat(y, dim=4)


def _attend_one(q, parts, mask, prefix_k, prefix_v):
    """One query per row, without gradients: decoding. Bound by reading keys and values, those of a prefix once per
    unit."""
    q = q * q.shape[5] ** -0.5
    scores = [(_rows(q) @ _rows(k).mT).view(*q.shape[:5], k.shape[3]) for k, _ in parts]
    if mask.own is not None:
        for part, own in zip(scores, mask.own.split([part.shape[-1] for part in scores], dim=-1), strict=True):
            part += own
    if prefix_k is not None:
        shared = (_units(q) @ prefix_k.flatten(0, 1).mT).view(*q.shape[:5], -1)
        if mask.prefix is not None:
            shared += mask.prefix[:, None, None, None]
        scores.append(shared)
    sizes = [part.shape[-1] for part in scores]
    probs = [part.contiguous() for part in torch.softmax(torch.cat(scores, dim=-1), dim=-1).split(sizes, dim=-1)]
    y = torch.zeros_like(q) if prefix_k is None else (_units(probs.pop()) @ prefix_v.flatten(0, 1)).view_as(q)
    for weights, (_, v) in zip(probs, parts, strict=True):
        if v.shape[3] <= RECENT and weights.shape[3] == 1:  # too small for a batched product
            y += (weights.transpose(-1, -2) * v.unsqueeze(3)).sum(dim=-2, keepdim=True)
        else:
            y += (_rows(weights) @ _rows(v)).view_as(q)
    return y


def _attend_sdpa(q, k, v, mask, prefix_k, prefix_v):
    """By scaled_dot_product_attention; the prefix is repeated for each row. With a mask, keys are repeated for each
    query head too: the kernel that takes masks without holding scores wants it."""
    U, Hkv, R, group, T, D = q.shape
    q = q.transpose(1, 2).reshape(U * R, Hkv * group, T, D)
    k, v = (x.transpose(1, 2).reshape(U * R, Hkv, -1, D) for x in (k, v))
    if prefix_k is None:
        options = dict(is_causal=True) if mask.causal else dict(attn_mask=mask.own)
    else:
        own = torch.zeros(T, k.shape[2], dtype=q.dtype, device=q.device) if mask.own is None else mask.own
        before = q.new_zeros(U, 1, prefix_k.shape[2]) if mask.prefix is None else mask.prefix
        before = before.expand(U, T, -1).repeat_interleave(R, dim=0)  # (U*R, T, Tp)
        options = dict(attn_mask=torch.cat([before, own.expand(U * R, -1, -1)], dim=-1).unsqueeze(1))
        k, v = (torch.cat([x.repeat_interleave(R, dim=0), y], dim=2) for x, y in ((prefix_k, k), (prefix_v, v)))
    if "attn_mask" in options and group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] < q.shape[1], **options)  # (U*R, H, T, D)
    return y.view(U, R, Hkv, group, T, D).transpose(1, 2)


class _Attend(torch.autograd.Function):
    """Explicit matrix products, which beat scaled_dot_product_attention on CPU, in the backward pass and with a single
    query most of all.

    Scores of prefix and own keys are written side by side into one buffer: one softmax, no copies. The prefix takes one
    product per unit for all its rows, so its gradients come summed.
    """

    @staticmethod
    def forward(ctx, q, k, v, own_bias, prefix_k, prefix_v, prefix_bias):
        U, Hkv, R, group, T, D = q.shape
        Tp = 0 if prefix_k is None else prefix_k.shape[2]
        scores = q.new_empty(U, Hkv, R, group, T, Tp + k.shape[3])
        shared, own = _parts(scores, Tp)
        _multiply(own, _rows(q), _rows(k).mT, D ** -0.5)
        if own_bias is not None:
            scores[..., Tp:] += own_bias
        if Tp:
            _multiply(shared, _units(q), prefix_k.flatten(0, 1).mT, D ** -0.5)
            if prefix_bias is not None:
                scores[..., :Tp] += prefix_bias[:, None, None, None]
        probs = torch.softmax(scores, dim=-1)
        shared, own = _parts(probs, Tp)
        y = torch.empty_like(q)
        _multiply(_rows(y), own, _rows(v))
        if Tp:
            _units(y).baddbmm_(shared, prefix_v.flatten(0, 1))
        ctx.save_for_backward(q, k, v, prefix_k, prefix_v, probs)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, prefix_k, prefix_v, probs = ctx.saved_tensors
        grad, scale = grad.contiguous(), q.shape[5] ** -0.5
        Tp = 0 if prefix_k is None else prefix_k.shape[2]
        shared, own = _parts(probs, Tp)
        grad_probs = torch.empty_like(probs)
        shared_grad, own_grad = _parts(grad_probs, Tp)
        _multiply(own_grad, _rows(grad), _rows(v).mT)
        grad_v = (own.mT @ _rows(grad)).view_as(v)
        if Tp:
            _multiply(shared_grad, _units(grad), prefix_v.flatten(0, 1).mT)
            grad_prefix_v = (shared.mT @ _units(grad)).view_as(prefix_v)
        grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
        shared_grad, own_grad = _parts(grad_scores, Tp)
        grad_q, grad_k = torch.empty_like(q), torch.empty(k.shape, dtype=k.dtype, device=k.device)
        _multiply(_rows(grad_q), own_grad, _rows(k), scale)
        _multiply(_rows(grad_k), own_grad.mT, _rows(q), scale)
        if not Tp:
            return grad_q, grad_k, grad_v, None, None, None, None
        _units(grad_q).baddbmm_(shared_grad, prefix_k.flatten(0, 1), alpha=scale)
        grad_prefix_k = torch.empty(prefix_k.shape, dtype=k.dtype, device=k.device)
        _multiply(grad_prefix_k.flatten(0, 1), shared_grad.mT, _units(q), scale)
        return grad_q, grad_k, grad_v, None, grad_prefix_k, grad_prefix_v, None


class _Spec(ctypes.Structure):
    """`Attention` of cpu_attention.c."""
    _fields_ = ([(name, ctypes.c_void_p)
                 for name in ("q", "k", "v", "prefix_k", "prefix_v", "own_bias", "prefix_bias", "recent_k", "recent_v")]
                + [(name, ctypes.c_long)
                   for name in ("U", "H", "R", "G", "T", "Tk", "Tp", "D", "prefix_bias_rows", "recent")]
                + [("q_strides", ctypes.c_long * 5), ("k_strides", ctypes.c_long * 4),
                   ("recent_strides", ctypes.c_long * 4)])


def _spec(q, parts, prefix_k, prefix_v, own_bias, prefix_bias) -> _Spec:
    """The struct of tensors that are laid out as the kernels want them. The caller keeps them alive."""
    assert len(parts) <= 2 and all(x is None or x.dtype == torch.float32
                                   for x in (*sum(parts, ()), prefix_k, prefix_v, own_bias, prefix_bias))
    (k, v), (recent_k, recent_v) = parts[0], parts[1] if len(parts) > 1 else (None, None)
    addresses = (None if x is None else x.data_ptr()
                 for x in (q, k, v, prefix_k, prefix_v, own_bias, prefix_bias, recent_k, recent_v))
    Tp, bias_rows = 0 if prefix_k is None else prefix_k.shape[2], 1 if prefix_bias is None else prefix_bias.shape[1]
    recent, strides = (0, (0, 0, 0, 0)) if recent_k is None else (recent_k.shape[3], recent_k.stride()[:4])
    return _Spec(*addresses, *q.shape[:5], k.shape[3], Tp, q.shape[5], bias_rows, recent, q.stride()[:5],
                 k.stride()[:4], strides)


def _dense(q):
    """q with heads in one piece each, and such that an empty_like has its strides: itself, or a copy."""
    return q if q.stride(5) == 1 and torch.empty_like(q).stride() == q.stride() else q.contiguous()


def _like_each_other(k, v):
    """Keys and values of equal strides, the last one 1."""
    return (k, v) if k.stride() == v.stride() and k.stride(-1) == 1 else (k.contiguous(), v.contiguous())


def _contiguous(*tensors):
    return [None if x is None else x.contiguous() for x in tensors]


def _decode_kernel(q, parts, mask, prefix_k, prefix_v):
    """As _attend_one."""
    q, parts = _dense(q), [_like_each_other(*part) for part in parts]
    shared = _contiguous(prefix_k, prefix_v, mask.own, mask.prefix)
    y = torch.empty_like(q)
    cpu.call("attend_one", ctypes.byref(_spec(q, parts, *shared)), y)
    return y


def _attend_kernel(q, parts, mask, prefix_k, prefix_v):
    """As _Attend, all queries at once."""
    k, v = parts[0] if len(parts) == 1 else (torch.cat(part, dim=3) for part in zip(*parts, strict=True))
    return run(_AttendKernel, q, k, v, prefix_k, prefix_v, None if mask.causal else mask.own, mask.prefix)


class _AttendKernel(torch.autograd.Function):
    """Holds the scores of a few queries at a time, and computes them again in the backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, prefix_k, prefix_v, own_bias, prefix_bias):
        q, (k, v), shared = _dense(q), _like_each_other(k, v), _contiguous(prefix_k, prefix_v, own_bias, prefix_bias)
        y, lse = torch.empty_like(q), q.new_empty(q.shape[:5])
        cpu.call("attend_forward", ctypes.byref(_spec(q, [(k, v)], *shared)), y, lse)
        ctx.save_for_backward(q, k, v, *shared, y, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, *shared, y, lse = ctx.saved_tensors
        if grad.stride() != q.stride():
            grad = torch.empty_like(q).copy_(grad)
        grads = [torch.empty_like(q), *(None if x is None else x.new_empty(x.shape) for x in (k, v, *shared[:2]))]
        cpu.call("attend_backward", ctypes.byref(_spec(q, [(k, v)], *shared)), y, lse, grad, *grads)
        return *grads, None, None


def _rows(x):
    """(U, Hkv, R, [group,] T, D) -> (U*Hkv*R, [group*]T, D): one matrix per row and key head."""
    return x.flatten(0, 2) if x.dim() == 5 else x.flatten(3, 4).flatten(0, 2)


def _units(x):
    """(U, Hkv, R, group, T, D) -> (U*Hkv, R*group*T, D): one matrix per unit and key head."""
    return x.flatten(2, 4).flatten(0, 1)


def _parts(scores, Tp: int):
    """Columns of the prefix and own ones: (U*Hkv, R*group*T, Tp) and (U*Hkv*R, group*T, Tk), views."""
    return _units(scores)[..., :Tp], _rows(scores)[..., Tp:]


def _multiply(out, a, b, scale: float = 1.0) -> None:
    """out = scale * a @ b, batched, in place also where `out` is a slice of columns."""
    out.baddbmm_(a, b, beta=0, alpha=scale)
