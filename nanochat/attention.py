"""
The one attention call of training and of prompts: causal, after a shared prefix, and cached. (Decoding:
decode_cache.py.)

Rows come as U units of R rows; the rows of a unit continue one prefix (a prompt), whose keys exist once. In a row,
columns stand at consecutive positions, so that one causal mask serves all rows. Only prefixes are ragged: padding
after a short one stands at PADDING_POSITION, where no query looks.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanochat.kernels import cpu
from nanochat.kernels.attention import attention, takes_attention
from nanochat.kernels.ops import contiguous, run

PADDING_POSITION = 1 << 30  # position of a padding column
QUERIES = 64   # queries whose scores are computed together on CPU


class KVCache:
    """Keys and values of the tokens run so far: those of prompts, and of rows that go on in pieces.

    kv[i]: keys and values (U, Hkv, R, T, D) of layer i, k and v: those of all layers; positions (U, T) int64 of a
    prefix (R = 1); last_embedding (U*R, 1, C): what the smear of the next token looks back at; length: columns filled
    before the current forward.
    """

    def __init__(self, num_layers: int):
        self.kv: list[list] = [[None, None] for _ in range(num_layers)]
        self.positions = None
        self.last_embedding = None
        self.length = 0

    @property
    def k(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(k for k, _ in self.kv)

    @property
    def v(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(v for _, v in self.kv)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values (U, Hkv, R, T, D) of new columns; returns those of all columns."""
        return extend(self.kv[layer], k, v)


def extend(kv: list, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KVCache.append for kv, the keys and values of one layer: new ones (U, Hkv, R, T, D) are put after them, in place.
    """
    if kv[0] is not None:
        k, v = torch.cat([kv[0], k], dim=3), torch.cat([kv[1], v], dim=3)
    kv[:] = k, v
    return k, v


def columns_up_to(places: torch.Tensor, B: int, T: int) -> torch.Tensor:
    """Columns that each of B rows of T tokens has up to the last of these places (M,) of the B * T. -> (B,) int64"""
    return torch.zeros(B, dtype=torch.long, device=places.device).scatter_reduce(0, places // T, places % T + 1, "amax")


def first_columns(lengths: torch.Tensor, T: int) -> torch.Tensor | None:
    """The places (N,), of all of B rows of T tokens, of each row's first `lengths` (B,); None where they are all."""
    if bool((lengths >= T).all()):
        return None
    return (torch.arange(T, device=lengths.device) < lengths[:, None]).flatten().nonzero()[:, 0]


@dataclass
class Packing:
    """Of B rows of T tokens M alone go through the products of blocks, side by side. places (M,) int64: where they are
    of the B * T."""
    places: torch.Tensor
    B: int
    T: int

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, ...) -> (1, M, ...)"""
        return x.flatten(0, 1).index_select(0, self.places)[None]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """x (1, M, ...) -> (B, T, ...), 0 where no token is"""
        all_tokens = x.new_zeros(self.B * self.T, *x.shape[2:]).index_copy(0, self.places, x[0])
        return all_tokens.unflatten(0, (self.B, self.T))


@dataclass
class Mask:
    """What queries may see, as numbers added to scores: 0, or -inf where they may not look. None: all of it (own: for a
    single query).

    own (T, Tk) over the row's own columns; prefix (U, 1 or T, Tp) over the unit's prefix. causal: own is the plain
    lower triangle. The GPU's kernel takes no such numbers, but `window`, and prefix_lengths (U,) int64 without padding.
    """
    own: torch.Tensor | None = None
    prefix: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None
    prefix_lengths: torch.Tensor | None = None


def bias(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where allowed, -inf elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def make_mask(T: int, window: int, context: int, cache: KVCache | None, prefix: KVCache | None,
              positions: torch.Tensor, dtype: torch.dtype) -> Mask:
    """The mask of T new columns whose queries see themselves and `window` tokens before.

    context: no row is longer than that. positions (B, T) of the new tokens, the same for all rows of a unit.
    """
    start = cache.length if cache is not None else 0
    end = start + T
    if takes_attention(positions.device, dtype):
        lengths = None if prefix is None else (prefix.positions < PADDING_POSITION).sum(dim=1)
        return Mask(causal=T == end <= window + 1, window=window, prefix_lengths=lengths)
    mask = Mask()
    if T > 1 or end - 1 > window:
        columns = torch.arange(end, device=positions.device)
        distance = columns[start:, None] - columns  # (T, Tk)
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


def attend(q, k, v, mask: Mask, prefix_k=None, prefix_v=None):
    """Attention of queries over their own keys and, with a prefix, over those that the rows of a unit share.

    q (U, Hkv, R, group, T, D): `group` query heads read each key head; k, v (U, Hkv, R, Tk, D): the queries' own last;
    prefix_k, prefix_v (U, Hkv, Tp, D). -> as q. Scores are scaled by 1/sqrt(D).
    """
    is_plain = mask.causal and prefix_k is None
    if mask.window is not None and not is_plain:
        return attention(q, k, v, prefix_k, prefix_v, mask.prefix_lengths, mask.window)
    if q.device.type != "cpu" or mask.window is not None or torch.compiler.is_compiling():
        return _attend_sdpa(q, k, v, mask, prefix_k, prefix_v)
    if cpu.takes(q):
        return run(_AttendKernel, q, k, v, prefix_k, prefix_v, None if mask.causal else mask.own, mask.prefix)
    y, before = [], k.shape[3] - q.shape[4]
    for start in range(0, q.shape[4], QUERIES):
        # Queries see no later keys: a block of them needs the keys up to its end.
        block = slice(start, min(start + QUERIES, q.shape[4]))
        seen = slice(0, before + block.stop)
        prefix_bias = mask.prefix if mask.prefix is None or mask.prefix.shape[1] == 1 else mask.prefix[:, block]
        y.append(run(_Attend, q[..., block, :].contiguous(), k[..., seen, :].contiguous(), v[..., seen, :].contiguous(),
                     None if mask.own is None else mask.own[block, seen], prefix_k, prefix_v, prefix_bias))
    return y[0] if len(y) == 1 else torch.cat(y, dim=4)


def _attend_sdpa(q, k, v, mask, prefix_k, prefix_v):
    """By scaled_dot_product_attention, the prefix repeated for each row. With a mask, keys are repeated for each query
    head: the kernel that takes masks without holding scores wants it."""
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


def _spec(q, k, v, prefix_k, prefix_v, own_bias, prefix_bias):
    """`Attention` of cpu_attention.c, of tensors laid out as kernels want them. The caller keeps them alive."""
    tensors = (q, k, v, prefix_k, prefix_v, own_bias, prefix_bias)
    assert all(x is None or x.dtype == torch.float32 for x in tensors)
    addresses = (None if x is None else x.data_ptr() for x in tensors)
    Tp, bias_rows = 0 if prefix_k is None else prefix_k.shape[2], 1 if prefix_bias is None else prefix_bias.shape[1]
    return cpu.struct("Attention", *addresses, *q.shape[:5], k.shape[3], Tp, q.shape[5], bias_rows, q.stride()[:5],
                      k.stride()[:4])


def _dense(q):
    """q with heads in one piece each, and such that an empty_like has its strides: itself, or a copy."""
    return q if q.stride(5) == 1 and torch.empty_like(q).stride() == q.stride() else q.contiguous()


def _like_each_other(k, v):
    """Keys and values of equal strides, the last one 1."""
    return (k, v) if k.stride() == v.stride() and k.stride(-1) == 1 else (k.contiguous(), v.contiguous())


class _AttendKernel(torch.autograd.Function):
    """As _Attend. Holds the scores of a few queries at a time, and computes them again in the backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, prefix_k, prefix_v, own_bias, prefix_bias):
        q, (k, v), shared = _dense(q), _like_each_other(k, v), contiguous(prefix_k, prefix_v, own_bias, prefix_bias)
        y, lse = torch.empty_like(q), q.new_empty(q.shape[:5])
        cpu.call("attend_forward", _spec(q, k, v, *shared), y, lse)
        ctx.save_for_backward(q, k, v, *shared, y, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, *shared, y, lse = ctx.saved_tensors
        if grad.stride() != q.stride():
            grad = torch.empty_like(q).copy_(grad)
        grads = [torch.empty_like(q), *(None if x is None else x.new_empty(x.shape) for x in (k, v, *shared[:2]))]
        cpu.call("attend_backward", _spec(q, k, v, *shared), y, lse, grad, *grads)
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
