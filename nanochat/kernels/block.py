"""
The small operations of a transformer block on CUDA without gradients, each in one launch: decoding is made of them.

Called from ops.py, whose PyTorch versions are what training runs. Sums are in fp32, and results are rounded to the
activations' dtype wherever PyTorch's operations round: sampling sees the numbers of training but for the order of sums.
On CPU tensors all of them need TRITON_INTERPRET=1.
"""
import torch

from nanochat.kernels.launch import jit, power_of_two, tl

EPSILON = torch.finfo(torch.float32).eps  # of a norm that is given none: PyTorch's, for bf16 too
ELEMENTS = 1024                           # of a program of an elementwise kernel
# Without this the compiler makes a product and a sum of bf16 one instruction, which leaves out a rounding.
AS_WRITTEN = dict(enable_fp_fusion=False)


def warps_of(size: int) -> int:
    """Warps of a program whose largest tensor has so many elements: 16 a thread, which are two loads."""
    return min(16, max(1, size // 512))


@jit
def rounded(x, pointer):
    """fp32 as what the pointer points to would keep it."""
    return x.to(pointer.dtype.element_ty).to(tl.float32)


@jit
def norm_rows(x_pointer, delta, x0, a, b, weight, sums, normed, C, epsilon, HAS_DELTA: tl.constexpr,
              HAS_MIX: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row of C: x + delta, then a * that + b * x0, stored as `sums`; and its norm."""
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    at = tl.program_id(0).to(tl.int64) * C + columns
    x = tl.load(x_pointer + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x = rounded(x + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32), x_pointer)
    if HAS_MIX:
        first = tl.load(x0 + at, mask=inside, other=0.0).to(tl.float32)
        x = rounded(tl.load(a).to(tl.float32) * x, x_pointer) + rounded(tl.load(b).to(tl.float32) * first, x_pointer)
        x = rounded(x, x_pointer)
    if HAS_DELTA or HAS_MIX:
        tl.store(sums + at, x.to(sums.dtype.element_ty), mask=inside)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / C + epsilon)
    if HAS_WEIGHT:
        y *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=inside)


def norm(x, delta=None, mixed=None, weight=None, epsilon: float | None = None):
    """x (..., C), plus delta (..., C) if given; with mixed = (x0, a, b), of one shape with x and two scalar tensors,
    a * x + b * x0 of that. -> the sum (x itself where nothing is added) and its RMSNorm, times weight (C,) if given."""
    x = x.contiguous()
    normed, C = torch.empty_like(x), x.shape[-1]
    sums = x if delta is None and mixed is None else torch.empty_like(x)
    x0, a, b = (x, x, x) if mixed is None else (mixed[0].contiguous(), *mixed[1:])
    block = power_of_two(C)
    if x.numel():
        norm_rows[(x.numel() // C,)](
            x, x if delta is None else delta.contiguous(), x0, a, b, x if weight is None else weight, sums, normed, C,
            EPSILON if epsilon is None else epsilon, HAS_DELTA=delta is not None, HAS_MIX=mixed is not None,
            HAS_WEIGHT=weight is not None, BLOCK=block, num_warps=warps_of(block), **AS_WRITTEN)
    return sums, normed


@jit
def elements(x_pointer, y_pointer, out, x_stride, y_stride, width, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    """max(x, 0)^2, or silu(x) * y, of rows of `width`; one program per row and block of it."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
    if FUNCTION == "relu_squared":
        result = tl.where(x < 0, 0.0, x)
        result *= result
    else:
        y = tl.load(y_pointer + row * y_stride + at, mask=at < width, other=0.0).to(tl.float32)
        result = rounded(x / (1.0 + tl.exp(-x)), x_pointer) * y
    tl.store(out + row * width + at, result.to(out.dtype.element_ty), mask=at < width)


def _elements(function: str, x, y):
    width, out = x.shape[-1], x.new_empty(x.shape)
    x, y = x.reshape(-1, width), y.reshape(-1, width)  # views, also of parts of wider rows
    if x.numel():
        elements[(len(x), -(-width // ELEMENTS))](x, y, out, x.stride(0), y.stride(0), width, FUNCTION=function,
                                                  BLOCK=ELEMENTS, num_warps=4, **AS_WRITTEN)
    return out


def relu_squared(x):
    """max(x, 0)^2."""
    return _elements("relu_squared", x, x)


def swiglu(gate, x):
    """silu(gate) * x, of one shape."""
    return _elements("swiglu", gate, x)


@jit
def gate_rows(x_pointer, stride, weight, gates, num_channels, kv_heads, CHANNELS: tl.constexpr, HEADS: tl.constexpr):
    """One program per token: 3 sigmoid(weight @ its first channels)."""
    token = tl.program_id(0)
    channels, heads = tl.arange(0, CHANNELS), tl.arange(0, HEADS)
    x = tl.load(x_pointer + token.to(tl.int64) * stride + channels, mask=channels < num_channels, other=0.0)
    inside = (heads[:, None] < kv_heads) & (channels[None, :] < num_channels)
    w = tl.load(weight + heads[:, None] * num_channels + channels[None, :], mask=inside, other=0.0)
    z = rounded(tl.sum(x.to(tl.float32)[None, :] * w.to(tl.float32), axis=1), gates)
    gate = 3.0 * rounded(1.0 / (1.0 + tl.exp(-z)), gates)
    tl.store(gates + token * kv_heads + heads, gate.to(gates.dtype.element_ty), mask=heads < kv_heads)


def value_gate(x, weight):
    """3 sigmoid(x[..., :n] @ weight.T). x (B, T, C), weight (Hkv, n) of the same dtype -> (B, T, Hkv)."""
    x, weight = x.contiguous(), weight.contiguous()
    gates = x.new_empty(*x.shape[:-1], len(weight))
    if gates.numel():
        gate_rows[(x.numel() // x.shape[-1],)](
            x, x.shape[-1], weight, gates, weight.shape[1], len(weight), CHANNELS=power_of_two(weight.shape[1]),
            HEADS=power_of_two(len(weight)), num_warps=1, **AS_WRITTEN)
    return gates


@jit
def turned(x_row, bias, weight, heads, inside, at, cos, sin, scale, epsilon, HALF: tl.constexpr, NORM: tl.constexpr,
           HAS_BIAS: tl.constexpr):
    """Heads (N, D) of a row, normed and rotated by minus the angle, times the scale: two halves (N, D/2)."""
    places = heads[:, None] * (2 * HALF) + at[None, :]
    x1 = tl.load(x_row + places, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_row + places + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x1 = rounded(x1 + tl.load(bias + places, mask=inside, other=0.0).to(tl.float32), x_row)
        x2 = rounded(x2 + tl.load(bias + places + HALF, mask=inside, other=0.0).to(tl.float32), x_row)
    if NORM == "before":
        factor = tl.rsqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / (2 * HALF) + epsilon)[:, None]
        w1 = tl.load(weight + at, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(weight + at + HALF, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
        x1, x2 = rounded(x1 * factor * w1, x_row), rounded(x2 * factor * w2, x_row)
    y1 = rounded(rounded(x1 * cos, x_row) + rounded(x2 * sin, x_row), x_row)
    y2 = rounded(rounded(x2 * cos, x_row) - rounded(x1 * sin, x_row), x_row)
    if NORM == "after":
        factor = tl.rsqrt((tl.sum(y1 * y1, axis=1) + tl.sum(y2 * y2, axis=1)) / (2 * HALF) + epsilon)[:, None]
        y1, y2 = rounded(y1 * factor, x_row), rounded(y2 * factor, x_row)
    return y1 * scale, y2 * scale


@jit(do_not_specialize=["R", "T", "capacity"], do_not_specialize_on_alignment=["places", "lengths"])
def head_rows(q_pointer, k_pointer, v_pointer, q_stride, k_stride, v_stride, cos_pointer, sin_pointer, q_bias, k_bias,
              v_bias, q_weight, k_weight, gate, embedding, q_out, k_out, v_out, places, lengths, R, T, capacity,
              kv_heads, group, scale, epsilon, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, GROUP: tl.constexpr,
              NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr, INTO_CACHE: tl.constexpr):
    """One program per token and key head: that head of the keys and values, and the query heads that read it."""
    token, head = tl.program_id(0), tl.program_id(1)
    b, t = token // T, token % T
    place = ((b // R * kv_heads + head) * R + b % R).to(tl.int64)  # of the row's head in (U, Hkv, R)
    column = place * T + t                                         # where its key goes, and its value
    if INTO_CACHE:
        row = tl.load(places + token)
        column = (row * kv_heads + head) * capacity + tl.load(lengths + row) - 1
    at, one = tl.arange(0, HALF_BLOCK), tl.arange(0, 1)
    cos = tl.load(cos_pointer + token * HALF + at, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_pointer + token * HALF + at, mask=at < HALF, other=0.0).to(tl.float32)[None, :]

    members = tl.arange(0, GROUP)
    inside = (members[:, None] < group) & (at[None, :] < HALF)
    y1, y2 = turned(q_pointer + token.to(tl.int64) * q_stride, q_bias, q_weight, head * group + members, inside, at,
                    cos, sin, scale, epsilon, HALF, NORM, HAS_BIAS)
    out = q_out + ((place * group + members[:, None]) * T + t) * (2 * HALF) + at[None, :]
    tl.store(out, y1.to(q_out.dtype.element_ty), mask=inside)
    tl.store(out + HALF, y2.to(q_out.dtype.element_ty), mask=inside)

    inside = (one[:, None] < 1) & (at[None, :] < HALF)
    y1, y2 = turned(k_pointer + token.to(tl.int64) * k_stride, k_bias, k_weight, head + one, inside, at, cos, sin,
                    scale, epsilon, HALF, NORM, HAS_BIAS)
    out = column * (2 * HALF) + at[None, :] + one[:, None]
    tl.store(k_out + out, y1.to(k_out.dtype.element_ty), mask=inside)
    tl.store(k_out + out + HALF, y2.to(k_out.dtype.element_ty), mask=inside)

    columns = tl.arange(0, 2 * HALF_BLOCK)
    here = columns < 2 * HALF
    v = tl.load(v_pointer + token.to(tl.int64) * v_stride + head * 2 * HALF + columns, mask=here).to(tl.float32)
    if HAS_BIAS:
        v = rounded(v + tl.load(v_bias + head * 2 * HALF + columns, mask=here).to(tl.float32), v_pointer)
    if HAS_GATE:
        slot = token.to(tl.int64) * kv_heads + head
        more = tl.load(embedding + slot * 2 * HALF + columns, mask=here).to(tl.float32)
        v += rounded(tl.load(gate + slot).to(tl.float32) * more, v_pointer)
    tl.store(v_out + column * (2 * HALF) + columns, v.to(v_out.dtype.element_ty), mask=here)


def split_heads(q, k, v, cos, sin, units: int, kv_heads: int, *, scale: float = 1.0, norm: str = "",
                epsilon: float | None = None, biases=None, weights=None, gate=None, embedding=None, into=None):
    """Queries, keys and values as attention wants them, from the products of a layer's input with their weights.

    q (B, T, H*D), k and v (B, T, Hkv*D), each token's heads without gaps; cos, sin (B, T, 1, D/2). biases: of q, k and
    v, or None. norm: "after" the rotation, "before" it, times weights = (of q, of k) (D,), or "" for none. gate
    (B, T, Hkv) times embedding (B, T, Hkv*D) is added to v, or None. -> q (U, Hkv, R, group, T, D), k and v
    (U, Hkv, R, T, D); q and k times the scale. into (DecodeCache.columns, with T = R = 1): there k and v are written,
    and are None in the result.
    """
    B, T, width = k.shape
    D, R, tokens = width // kv_heads, B // units, B * T
    group, half = q.shape[2] // width, power_of_two(D // 2)
    q, k, v = (x.reshape(tokens, x.shape[-1]) for x in (q, k, v))
    queries = q.new_empty(units, kv_heads, R, group, T, D)
    if into is None:
        keys, values = q.new_empty(units, kv_heads, R, T, D), q.new_empty(units, kv_heads, R, T, D)
        places = lengths = q
    else:
        keys, values, places, lengths = into
        assert T == R == 1 and keys.is_contiguous() and values.is_contiguous() and len(places) == B
    kept = (keys, values) if into is None else (None, None)
    if not tokens:
        return queries, *kept
    gate, embedding, has_gate = (q, q, False) if gate is None else (gate.contiguous(), embedding.contiguous(), True)
    head_rows[(tokens, kv_heads)](
        q, k, v, q.stride(0), k.stride(0), v.stride(0), cos.contiguous(), sin.contiguous(), *(biases or (q, k, v)),
        *(weights or (q, k)), gate, embedding, queries, keys, values, places, lengths, R, T, keys.shape[-2], kv_heads,
        group, float(scale), EPSILON if epsilon is None else epsilon, HALF=D // 2, HALF_BLOCK=half,
        GROUP=power_of_two(group), NORM=norm, HAS_BIAS=biases is not None, HAS_GATE=has_gate,
        INTO_CACHE=into is not None, num_warps=warps_of(power_of_two(group) * half), **AS_WRITTEN)
    return queries, *kept
