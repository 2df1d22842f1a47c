"""
Attention for training, forward and backward, after prefixes whose keys exist once.

FlashAttention-2 (Dao 2023) over two ranges of keys, those of the unit's prefix and the row's own, in one softmax. No
scores are held, no keys repeated, no masks built: a query sees the keys whose positions are its own or up to `window`
before, and only the blocks of keys that it sees are read. Gradients of keys are summed in programs, in a fixed order:
over the query heads that share a key head, and for a prefix over the unit's rows. So results repeat bit by bit.

U units of R rows, Hkv key heads, `group` query heads of each, T queries, Tk own keys, Tp prefix keys, D head size.
Positions count from the first own key: query t stands at Tk - T + t, prefix key i of `before` at i - before.
"""
import functools

import torch
from torch.autograd.function import once_differentiable

from nanochat.kernels.decode_attention import LOG2_E, keys_of_block, num_multiprocessors, softmax_step
from nanochat.kernels.launch import jit, power_of_two, tl, triton
from nanochat.kernels.ops import run

SIZES = ["Tp", "Tk", "T", "R", "Hkv", "window", "blocks"]  # not compiled in: other sizes need no other kernel


@jit
def load_rows(matrix, start, end, stride, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows start .. start + BLOCK - 1 of a matrix of D columns, 0 from row `end` on."""
    rows, channels = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = rows < end - start
    if D != BLOCK_D:
        inside &= channels < D
    return tl.load(matrix + start * stride + rows * stride + channels, mask=inside, other=0.0)


@jit
def store_rows(matrix, start, end, stride, values, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, channels = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    tl.store(matrix + start * stride + rows * stride + channels, values.to(matrix.dtype.element_ty),
             mask=(rows < end - start) & (channels < D))


@jit
def seen_blocks(first, last, before, Tk, window, BLOCK: tl.constexpr):
    """What queries at positions first .. last see: the first block and how many, of the prefix and of own keys."""
    prefix_start = tl.maximum(first - window + before, 0) // BLOCK
    own_start = tl.maximum(first - window, 0) // BLOCK
    prefix_blocks = tl.maximum(tl.cdiv(tl.minimum(before, last + 1 + before), BLOCK) - prefix_start, 0)
    own_blocks = tl.maximum(tl.cdiv(tl.minimum(Tk, last + 1), BLOCK) - own_start, 0)
    return prefix_start, prefix_blocks, own_start, own_blocks


@jit
def key_block(i, k, v, prefix_k, prefix_v, prefix_start, prefix_blocks, own_start, before, Tk, D: tl.constexpr,
              BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """The i-th of these blocks, the prefix's first: keys, values, the position of the first, how many are real."""
    of_prefix = i < prefix_blocks
    start = tl.where(of_prefix, prefix_start + i, own_start + i - prefix_blocks) * BLOCK
    end = tl.where(of_prefix, before, Tk)
    k_block = load_rows(tl.where(of_prefix, prefix_k, k), start, end, D, D, BLOCK, BLOCK_D)
    v_block = load_rows(tl.where(of_prefix, prefix_v, v), start, end, D, D, BLOCK, BLOCK_D)
    return k_block, v_block, start - tl.where(of_prefix, before, 0), end - start


@jit
def is_seen(queries, keys, window):
    """By positions, of shapes that broadcast."""
    return (keys <= queries) & (keys >= queries - window)


@jit
def is_partial(first_query, last_query, first_key, num_keys, window, BLOCK: tl.constexpr):
    """Whether some of these queries do not see some of BLOCK keys."""
    return (num_keys < BLOCK) | (first_key + BLOCK - 1 > first_query) | (first_key < last_query - window)


@jit
def query_block(blocks, R, Hkv, GROUP: tl.constexpr):
    """The place of a program over blocks of queries: block, unit, head, row, member of the group. Heads that read the
    same keys run together, late blocks, which see most, first."""
    program = tl.program_id(0)
    row = program // GROUP // blocks
    return blocks - 1 - program // GROUP % blocks, row // R // Hkv, row // R % Hkv, row % R, program % GROUP


@jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["prefix_lengths", "lse"])
def attention_forward(q, k, v, prefix_k, prefix_v, prefix_lengths, out, lse, Tp, Tk, T, R, Hkv, window, blocks, scale,
                      GROUP: tl.constexpr, D: tl.constexpr, HAS_PREFIX: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program per row, query head and block of queries. lse: log2 of the sum of 2^score, with scores in units of
    log 2, as `scale` makes them."""
    block, unit, head, row, member = query_block(blocks, R, Hkv, GROUP)
    pair = (unit * Hkv + head).to(tl.int64)
    matrix = (pair * R + row) * GROUP + member  # of queries
    start = block * BLOCK_M
    first, last = Tk - T + start, Tk - T + tl.minimum(start + BLOCK_M, T) - 1
    queries = first + tl.arange(0, BLOCK_M)
    before = 0
    if HAS_PREFIX:
        before = tl.load(prefix_lengths + unit).to(tl.int32)
    q_block = load_rows(q + matrix * T * D, start, T, D, D, BLOCK_M, BLOCK_D)
    k += (pair * R + row) * Tk * D
    v += (pair * R + row) * Tk * D
    prefix_k += pair * Tp * D
    prefix_v += pair * Tp * D
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    prefix_start, prefix_blocks, own_start, own_blocks = seen_blocks(first, last, before, Tk, window, BLOCK_N)
    for i in range(0, prefix_blocks + own_blocks):
        k_block, v_block, first_key, num_keys = key_block(i, k, v, prefix_k, prefix_v, prefix_start, prefix_blocks,
                                                          own_start, before, Tk, D, BLOCK_N, BLOCK_D)
        scores = tl.dot(q_block, tl.trans(k_block), input_precision="ieee") * scale
        if is_partial(first, last, first_key, num_keys, window, BLOCK_N):
            keys = tl.arange(0, BLOCK_N)
            seen = is_seen(queries[:, None], (first_key + keys)[None, :], window) & (keys < num_keys)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        largest, total, sums = softmax_step(scores, v_block, largest, total, sums)
    stride = Hkv * GROUP * D
    out += (unit * R + row).to(tl.int64) * T * stride + (head * GROUP + member) * D
    store_rows(out, start, T, stride, sums / total[:, None], D, BLOCK_M, BLOCK_D)
    rows = start + tl.arange(0, BLOCK_M)
    tl.store(lse + matrix * T + rows, largest + tl.log2(total), mask=rows < T)


@jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["prefix_lengths", "lse", "delta"])
def query_gradients(q, k, v, prefix_k, prefix_v, prefix_lengths, out, grad, lse, delta, dq, Tp, Tk, T, R, Hkv, window,
                    blocks, scale, slope, GROUP: tl.constexpr, D: tl.constexpr, HAS_PREFIX: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """As attention_forward. Writes delta = sum(grad * out) of each query for key_gradients. slope: 1/sqrt(D)."""
    block, unit, head, row, member = query_block(blocks, R, Hkv, GROUP)
    pair = (unit * Hkv + head).to(tl.int64)
    matrix = (pair * R + row) * GROUP + member
    start = block * BLOCK_M
    first, last = Tk - T + start, Tk - T + tl.minimum(start + BLOCK_M, T) - 1
    queries = first + tl.arange(0, BLOCK_M)
    before = 0
    if HAS_PREFIX:
        before = tl.load(prefix_lengths + unit).to(tl.int32)
    stride = Hkv * GROUP * D
    token = (unit * R + row).to(tl.int64) * T * stride + (head * GROUP + member) * D
    q_block = load_rows(q + matrix * T * D, start, T, D, D, BLOCK_M, BLOCK_D)
    grad_block = load_rows(grad + token, start, T, stride, D, BLOCK_M, BLOCK_D)
    out_block = load_rows(out + token, start, T, stride, D, BLOCK_M, BLOCK_D)
    rows = start + tl.arange(0, BLOCK_M)
    deltas = tl.sum(grad_block.to(tl.float32) * out_block.to(tl.float32), axis=1)
    tl.store(delta + matrix * T + rows, deltas, mask=rows < T)
    lses = tl.load(lse + matrix * T + rows, mask=rows < T, other=float("inf"))
    k += (pair * R + row) * Tk * D
    v += (pair * R + row) * Tk * D
    prefix_k += pair * Tp * D
    prefix_v += pair * Tp * D
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    prefix_start, prefix_blocks, own_start, own_blocks = seen_blocks(first, last, before, Tk, window, BLOCK_N)
    for i in range(0, prefix_blocks + own_blocks):
        k_block, v_block, first_key, num_keys = key_block(i, k, v, prefix_k, prefix_v, prefix_start, prefix_blocks,
                                                          own_start, before, Tk, D, BLOCK_N, BLOCK_D)
        p = tl.exp2(tl.dot(q_block, tl.trans(k_block), input_precision="ieee") * scale - lses[:, None])
        if is_partial(first, last, first_key, num_keys, window, BLOCK_N):
            keys = tl.arange(0, BLOCK_N)
            seen = is_seen(queries[:, None], (first_key + keys)[None, :], window) & (keys < num_keys)[None, :]
            p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(grad_block, tl.trans(v_block), input_precision="ieee") - deltas[:, None])
        sums += tl.dot(ds.to(k_block.dtype), k_block, input_precision="ieee")
    store_rows(dq + matrix * T * D, start, T, D, sums * slope, D, BLOCK_M, BLOCK_D)


@jit(do_not_specialize=["num_keys", "T", "R", "Hkv", "window", "blocks", "parts", "offset"],
     do_not_specialize_on_alignment=["prefix_lengths", "lse", "delta"])
def key_gradients(q, k, v, prefix_lengths, grad, lse, delta, dk, dv, num_keys, T, R, Hkv, window, blocks, parts, offset,
                  scale, slope, GROUP: tl.constexpr, D: tl.constexpr, OF_PREFIX: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program per block of keys: own ones of a row; or, OF_PREFIX, those of a unit, the queries of which are split
    over `parts` programs that each write sums of their own. Products are (keys, queries). offset: the first query's
    position."""
    block = tl.program_id(0) % blocks
    place = tl.program_id(0) // blocks
    if OF_PREFIX:
        part, pair = place % parts, place // parts
        source = pair.to(tl.int64) * num_keys * D
        target = (part * (tl.num_programs(0) // blocks // parts) + pair).to(tl.int64) * num_keys * D
        real_keys = tl.load(prefix_lengths + pair // Hkv).to(tl.int32)
        shift, first_matrix, num_matrices = -real_keys, 0, R * GROUP
    else:
        part, pair = 0, place // R
        source = place.to(tl.int64) * num_keys * D
        target = source
        real_keys = num_keys
        shift, first_matrix, num_matrices = 0, place % R * GROUP, GROUP
    start = block * BLOCK_N
    k_block = load_rows(k + source, start, real_keys, D, D, BLOCK_N, BLOCK_D)
    v_block = load_rows(v + source, start, real_keys, D, D, BLOCK_N, BLOCK_D)
    keys = shift + start + tl.arange(0, BLOCK_N)
    first_key, last_key = shift + start, shift + tl.minimum(start + BLOCK_N, real_keys) - 1
    # Blocks of queries that see some of these keys
    M_first = tl.maximum(first_key - offset, 0) // BLOCK_M
    M_blocks = tl.cdiv(tl.minimum(T, tl.maximum(last_key + window - offset + 1, 0)), BLOCK_M) - M_first
    if (start >= real_keys) | (M_blocks < 0):
        M_blocks = 0
    steps = num_matrices * M_blocks
    share = tl.cdiv(steps, parts)
    stride = Hkv * GROUP * D
    queries = pair.to(tl.int64) * R * GROUP * T
    q += queries * D
    lse += queries
    delta += queries
    grad += (pair // Hkv).to(tl.int64) * R * T * stride + pair % Hkv * GROUP * D
    dk_block = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_block = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(part * share, tl.minimum((part + 1) * share, steps)):
        matrix = first_matrix + i // M_blocks  # row * GROUP + member
        query = (M_first + i % M_blocks) * BLOCK_M
        q_block = load_rows(q + matrix * T * D, query, T, D, D, BLOCK_M, BLOCK_D)
        grad_block = load_rows(grad + matrix // GROUP * T * stride + matrix % GROUP * D, query, T, stride, D, BLOCK_M,
                               BLOCK_D)
        rows = query + tl.arange(0, BLOCK_M)
        lses = tl.load(lse + matrix * T + rows, mask=rows < T, other=float("inf"))  # p = 0 after the last query
        deltas = tl.load(delta + matrix * T + rows, mask=rows < T, other=0.0)
        p = tl.exp2(tl.dot(k_block, tl.trans(q_block), input_precision="ieee") * scale - lses[None, :])
        if is_partial(offset + query, offset + query + BLOCK_M - 1, first_key, BLOCK_N, window, BLOCK_N):
            p = tl.where(is_seen((offset + rows)[None, :], keys[:, None], window), p, 0.0)
        dv_block += tl.dot(p.to(v_block.dtype), grad_block, input_precision="ieee")
        ds = p * (tl.dot(v_block, tl.trans(grad_block), input_precision="ieee") - deltas[None, :])
        dk_block += tl.dot(ds.to(k_block.dtype), q_block, input_precision="ieee")
    real = (start + tl.arange(0, BLOCK_N) < real_keys)[:, None]  # padding of a prefix gets 0
    store_rows(dk + target, start, num_keys, D, tl.where(real, dk_block * slope, 0.0), D, BLOCK_N, BLOCK_D)
    store_rows(dv + target, start, num_keys, D, tl.where(real, dv_block, 0.0), D, BLOCK_N, BLOCK_D)


@functools.cache
def takes_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels work there: on CUDA with Triton and 160 KiB of shared memory a program, not in fp64."""
    return (triton is not None and device.type == "cuda" and dtype != torch.float64
            and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 160 * 1024)


def tiles(D: int, dtype: torch.dtype) -> tuple[dict, dict, dict]:
    """Queries and keys of a block, and warps, of attention_forward, query_gradients and key_gradients: the most whose
    sums fit in registers. D above 128 does not quite."""
    BLOCK_D, keys = max(16, power_of_two(D)), keys_of_block(D, dtype)
    options = lambda M, N, warps, stages: dict(BLOCK_M=M, BLOCK_N=N, BLOCK_D=BLOCK_D, num_warps=warps,
                                               num_stages=stages)
    if dtype == torch.float32 or D > 128:
        return (options(32, keys, 4, 2),) * 3
    return options(128, keys, 8, 3), options(128, keys, 8, 2), options(64 if D <= 64 else 32, 128, 8, 2)


def num_parts(programs: int, steps: int, multiprocessors: int) -> int:
    """Programs that share the queries of a block of prefix keys: about two a multiprocessor, of eight steps."""
    return max(1, min(2 * multiprocessors // max(1, programs), steps // 8))


def forward_of(q, k, v, prefix_k, prefix_v, prefix_lengths, window: int):
    """-> out (U, R, T, Hkv, group, D), as the projection after it wants it: the heads of a token side by side; lse (U,
    Hkv, R, group, T) fp32. q, k, v, prefix_k, prefix_v contiguous."""
    U, Hkv, R, group, T, D = q.shape
    Tk, Tp = k.shape[3], 0 if prefix_k is None else prefix_k.shape[2]
    assert R * T * Hkv * group * D < 2 ** 31 and max(Tk, Tp) * D < 2 ** 31, "offsets within a unit are of 32 bits"
    out = q.new_empty(U, R, T, Hkv, group, D)
    lse = torch.empty(U, Hkv, R, group, T, dtype=torch.float32, device=q.device)
    if out.numel():
        options = tiles(D, q.dtype)[0]
        num = -(-T // options["BLOCK_M"])
        attention_forward[(U * Hkv * R * group * num,)](
            q, k, v, *((prefix_k, prefix_v) if Tp else (k, v)), prefix_lengths, out, lse, Tp, Tk, T, R, Hkv, window,
            num, D ** -0.5 * LOG2_E, GROUP=group, D=D, HAS_PREFIX=Tp > 0, **options)
    return out, lse


def gradients_of(grad, q, k, v, prefix_k, prefix_v, prefix_lengths, out, lse, window: int) -> list:
    """-> gradients of q, k, v, prefix_k, prefix_v. grad as out, all as forward_of has them."""
    (U, Hkv, R, group, T, D), Tk, Tp = q.shape, k.shape[3], 0 if prefix_k is None else prefix_k.shape[2]
    delta, scale, slope = torch.empty_like(lse), D ** -0.5 * LOG2_E, D ** -0.5
    _, of_queries, of_keys = tiles(D, q.dtype)
    grads, num = [torch.empty_like(q)], -(-T // of_queries["BLOCK_M"])
    query_gradients[(U * Hkv * R * group * num,)](
        q, k, v, *((prefix_k, prefix_v) if Tp else (k, v)), prefix_lengths, out, grad, lse, delta, grads[0], Tp, Tk, T,
        R, Hkv, window, num, scale, slope, GROUP=group, D=D, HAS_PREFIX=Tp > 0, **of_queries)
    for keys, values, length, programs, of_prefix in ((k, v, Tk, U * Hkv * R, False),
                                                      (prefix_k, prefix_v, Tp, U * Hkv, True)):
        num, parts = -(-length // of_keys["BLOCK_N"]), 1
        if of_prefix:
            parts = num_parts(programs * num, R * group * -(-T // of_keys["BLOCK_M"]), num_multiprocessors(q.device))
        dtype = q.dtype if parts == 1 else torch.float32
        dk, dv = (None if keys is None else torch.empty(parts, *keys.shape, dtype=dtype, device=q.device)
                  for _ in range(2))
        if length:
            key_gradients[(programs * num * parts,)](
                q, keys, values, prefix_lengths if of_prefix else None, grad, lse, delta, dk, dv, length, T, R, Hkv,
                window, num, parts, Tk - T, scale, slope, GROUP=group, D=D, OF_PREFIX=of_prefix, **of_keys)
        grads += [None if x is None else x[0] if parts == 1 else x.sum(dim=0).to(q.dtype) for x in (dk, dv)]
    return grads


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, prefix_k, prefix_v, prefix_lengths, window):
        inputs = [None if x is None else x.contiguous() for x in (q, k, v, prefix_k, prefix_v, prefix_lengths)]
        out, lse = forward_of(*inputs, window)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.window = window
        return out.permute(0, 3, 1, 4, 2, 5)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad = grad.permute(0, 2, 4, 1, 3, 5).contiguous()  # copies nothing where a view is after the result
        return *gradients_of(grad, *ctx.saved_tensors, ctx.window), None, None


# As an operator that torch.compile does not look into

OPERATOR: list = []  # once it is registered


def register_operator() -> None:
    """Makes `attention` ready for torch.compile; called before compiling. Not done by importing: torch.library and
    torch.compiler take a second."""
    if OPERATOR:
        return
    torch.compiler.assume_constant_result(takes_attention)  # marks it

    tensor, maybe = torch.Tensor, torch.Tensor | None
    contiguous = lambda *given: [None if x is None else x.contiguous() for x in given]

    def forward(q: tensor, k: tensor, v: tensor, prefix_k: maybe, prefix_v: maybe, prefix_lengths: maybe,
                window: int) -> tuple[tensor, tensor]:
        return forward_of(*contiguous(q, k, v, prefix_k, prefix_v, prefix_lengths), window)

    def gradients(grad: tensor, q: tensor, k: tensor, v: tensor, prefix_k: maybe, prefix_v: maybe,
                  prefix_lengths: maybe, out: tensor, lse: tensor, window: int) -> list[tensor]:
        found = gradients_of(*contiguous(grad, q, k, v, prefix_k, prefix_v, prefix_lengths, out, lse), window)
        return [x for x in found if x is not None]

    def shapes(q, k, v, prefix_k, prefix_v, prefix_lengths, window):
        U, Hkv, R, group, T, D = q.shape
        return q.new_empty(U, R, T, Hkv, group, D), q.new_empty(U, Hkv, R, group, T, dtype=torch.float32)

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:6], *output)
        ctx.window = inputs[6]

    def backward(ctx, grad, _):
        found = gradients(grad, *ctx.saved_tensors, ctx.window)
        return *found, *[None] * (7 - len(found))

    forward = torch.library.custom_op("nanochat::attention", forward, mutates_args=())
    gradients = torch.library.custom_op("nanochat::attention_gradients", gradients, mutates_args=())
    forward.register_fake(shapes)
    gradients.register_fake(lambda grad, q, k, v, prefix_k, prefix_v, *_: [
        x.new_empty(x.shape) for x in (q, k, v, prefix_k, prefix_v) if x is not None])
    forward.register_autograd(backward, setup_context=save)
    OPERATOR.append(forward)


def attention(q, k, v, prefix_k, prefix_v, prefix_lengths, window: int):
    """Attention of queries over their own keys and those of a prefix that the rows of a unit share, differentiable in
    all five.

    q (U, Hkv, R, group, T, D); k, v (U, Hkv, R, Tk, D), the last own key standing at the last query's position; Tk may
    be 0 where T is 1: the query then stands at the last key of its prefix. prefix_k, prefix_v (U, Hkv, Tp, D), of which
    prefix_lengths (U,) int64 columns are filled, or three None. A query sees itself and the `window` positions before
    it. -> (U, Hkv, R, group, T, D) of q's dtype, in memory (U, R, T, Hkv, group, D). Scores are scaled by 1/sqrt(D).
    """
    if torch.compiler.is_compiling():
        operator, = OPERATOR
        return operator(q, k, v, prefix_k, prefix_v, prefix_lengths, window)[0].permute(0, 3, 1, 4, 2, 5)
    return run(_Attention, q, k, v, prefix_k, prefix_v, prefix_lengths, window)
