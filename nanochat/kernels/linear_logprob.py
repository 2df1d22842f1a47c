"""
Hidden states x LM head -> logprobs and entropy of target tokens, without the (N, V) logits.

Logits are made by the BLAS, a chunk of rows at a time, and reduced at once: on CUDA by a Triton kernel with one program
per row, on CPU in fp32 by a kernel in C, elsewhere by their PyTorch counterpart. R rows of a chunk, V vocabulary, C
width.
"""
import torch

from nanochat.kernels import cpu, tiles
from nanochat.kernels.launch import jit, power_of_two, round_up, takes_triton, tl
from nanochat.kernels.ops import matmul, mkl_is_slow


def rows_of_chunk(num_rows: int, num_columns: int, dtype: torch.dtype, on_cuda: bool, narrow: bool = False) -> int:
    """How many rows of logits to hold at a time. On CUDA enough to keep it busy, at most about 2 GiB, in chunks of
    about one size. Elsewhere what stays in a core's cache (1 MiB of fp32), but 128 rows for the matrix products'
    sake; with narrow products, which are so fast that reading the weight's gradient for each chunk counts, 256 MiB."""
    if narrow:
        return max(128, 2 ** 26 // num_columns)
    if not on_cuda:
        return max(128, 2 ** 18 // num_columns)
    most = max(128, min(8192, 2 ** 31 // (num_columns * dtype.itemsize)))
    num_chunks = max(1, -(-num_rows // most))
    return round_up(max(1, -(-num_rows // num_chunks)), 128)


class Matrix:
    """The LM head (V, C) in hidden's dtype, as tiles.NarrowMatrix."""

    def __init__(self, weight, dtype: torch.dtype):
        self.weight = weight.to(dtype)

    def product(self, x):
        """(R, C) -> raw logits (R, V)."""
        return matmul(x, self.weight.t())

    def back(self, dz):
        """Gradients (R, V) of logits -> of hidden (R, C)."""
        return matmul(dz.to(self.weight.dtype), self.weight)

    def add_gradient(self, total, dz, x) -> None:
        """total (V, C) += the weight's gradient."""
        add_product(total, dz.t(), x)


def add_product(total, a, b) -> None:
    """total += a @ b, where total may be of a wider dtype than b, and a of either; summed in total's."""
    if not b.is_cuda and mkl_is_slow():
        total += matmul(a.to(total.dtype), b.to(total.dtype))
    elif not b.is_cuda or b.dtype == total.dtype:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif torch.__version__ < "2.10":  # whose addmm wants total in b's dtype
        total += torch.mm(a.to(b.dtype), b, out_dtype=total.dtype)
    else:
        torch.addmm(total, a.to(b.dtype), b, out_dtype=total.dtype, out=total)


def logit_chunks(hidden, weight, vocab_size: int, rows_per_chunk: int | None, use_triton: bool, narrow: bool = False):
    """Yields (rows, z, matrix) per chunk: a slice of N, its raw logits z, and the LM head that made them.

    A z may be written over. For Triton all z lie in one buffer, so each is gone when the next is asked for, and have
    all of weight's columns; the buffer's rows are padded to 64: products and loads stay aligned whatever the
    vocabulary. For PyTorch z (R, vocab_size) is at least fp32.
    """
    V = len(weight) if use_triton else vocab_size
    matrix = tiles.NarrowMatrix(weight[:V].detach()) if narrow else Matrix(weight[:V], hidden.dtype)
    R = rows_per_chunk or rows_of_chunk(len(hidden), V, hidden.dtype if use_triton else wide_dtype_of(hidden),
                                        hidden.is_cuda, narrow)
    buffer = (torch.empty(min(R, len(hidden)), round_up(V, 64), dtype=hidden.dtype, device=hidden.device)
              if use_triton else None)
    for start in range(0, len(hidden), R):
        x = hidden[start: start + R]
        rows = slice(start, start + len(x))
        if use_triton:
            yield rows, torch.mm(x, matrix.weight.t(), out=buffer[: len(x), :V]), matrix  # (R, V)
        else:
            yield rows, matrix.product(x).to(wide_dtype_of(hidden)), matrix


def wide_dtype_of(tensor) -> torch.dtype:
    """The dtype to compute losses and gradients in: fp32, or fp64 where the tensor is."""
    return torch.promote_types(tensor.dtype, torch.float32)


# PyTorch

def soften(z, softcap: float | None, temperature: float):
    """Raw logits to logits, up to a constant per row, in place: S tanh(z/S) / T + S/T = (2S/T) sigmoid(2z/S), ten times
    as fast as tanh on CPUs."""
    if softcap is None:
        return z.div_(temperature)
    return z.mul_(2 / softcap).sigmoid_().mul_(2 * softcap / temperature)


def torch_statistics(u, targets):
    """Logits u (R, V) -> logprobs (R,) of the targets (R,), entropy (R,), logsumexp (R,), probabilities (R, V)."""
    p = torch.softmax(u, dim=1)
    lse = u.amax(dim=1) - p.amax(dim=1).log()
    logprobs = u.gather(1, targets[:, None]).squeeze(1) - lse
    return logprobs, lse - torch.linalg.vecdot(p, u), lse, p


# C

def takes_c(z, *tokens) -> bool:
    """Whether the CPU kernel serves these logits (R, V) and vectors (R,), of which some may be None."""
    return cpu.takes_rows(z) and all(x is None or x.dtype in (torch.float32, torch.long) for x in tokens)


# Triton

@jit
def logit_and_slope(z, softcap, temperature, HAS_SOFTCAP: tl.constexpr):
    """The logit u = softcap * tanh(z / softcap) / temperature, and du/dz; exp(-2|x|) cannot overflow."""
    inverse_temperature = 1.0 / temperature
    u = z * inverse_temperature
    slope = inverse_temperature
    if HAS_SOFTCAP:
        decay = tl.exp(tl.abs(z) * (-2.0 / softcap))
        tanh = (1.0 - decay) / (1.0 + decay)
        tanh = tl.where(z < 0, -tanh, tanh)
        u = tanh * (softcap * inverse_temperature)
        slope = (1.0 - tanh * tanh) * inverse_temperature
    return u, slope


@jit
def row_statistics(z_row, stride, vocab_size, softcap, temperature, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """logsumexp and entropy of a row of raw logits in one sweep. Columns from vocab_size on are left out after the
    softcap: before it, -inf would become -softcap."""
    largest = float("-inf")
    total = tl.zeros([BLOCK], tl.float32)     # sum of exp(u - largest), lane by lane
    weighted = tl.zeros([BLOCK], tl.float32)  # sum of exp(u - largest) * u
    for start in range(0, stride, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab_size
        z = tl.load(z_row + columns, mask=columns < stride, other=0.0).to(tl.float32)
        u, _ = logit_and_slope(z, softcap, temperature, HAS_SOFTCAP)
        new_largest = tl.maximum(largest, tl.max(tl.where(inside, u, float("-inf")), axis=0))
        p = tl.exp(tl.where(inside, u - new_largest, float("-inf")))
        rescale = tl.exp(largest - new_largest)
        total = total * rescale + p
        weighted = weighted * rescale + p * tl.where(inside, u, 0.0)
        largest = new_largest
    all_total = tl.sum(total, axis=0)
    lse = largest + tl.log(all_total)
    return lse, lse - tl.sum(weighted, axis=0) / all_total


@jit(do_not_specialize=["vocab_size"], do_not_specialize_on_alignment=["targets", "logprobs", "entropies"])
def logprob_rows(z_pointer, stride, vocab_size, targets, logprobs, entropies, softcap, temperature,
                 HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row: its target's logprob and its entropy."""
    row = tl.program_id(0)
    z_row = z_pointer + row.to(tl.int64) * stride
    z = tl.load(z_row + tl.load(targets + row)).to(tl.float32)
    u, _ = logit_and_slope(z, softcap, temperature, HAS_SOFTCAP)
    lse, entropy = row_statistics(z_row, stride, vocab_size, softcap, temperature, HAS_SOFTCAP, BLOCK)
    tl.store(logprobs + row, u - lse)
    tl.store(entropies + row, entropy)


def head_arguments(z, softcap: float | None, temperature: float) -> dict:
    """What all row kernels must know of the LM head. Blocks of 4096 columns, eight a thread."""
    block = min(4096, power_of_two(z.stride(0)))
    return dict(softcap=float(softcap or 1.0), temperature=float(temperature), HAS_SOFTCAP=softcap is not None,
                BLOCK=block, num_warps=max(1, block // 256))


@torch.no_grad()
def linear_logprob(hidden, weight, targets, *, vocab_size: int, softcap: float | None, temperature: float = 1.0,
                   rows_per_chunk: int | None = None, use_triton: bool | None = None, narrow: bool = False):
    """Logprobs of targets and entropies, without gradient, and without more than a chunk of logits at a time.

    hidden (N, C), any strides; weight (rows >= vocab_size, C), whose padding rows take no part; targets (N,) int64
    below vocab_size -> two of (N,) fp32. Logits are softcapped (None: not), then divided by the temperature, in fp32 or
    in hidden's fp64. use_triton None: by device; True on CPU tensors needs TRITON_INTERPRET=1. narrow: on CPU, products
    of operands rounded to bf16.
    """
    use_triton = takes_triton(hidden) if use_triton is None else use_triton
    logprobs, entropies = torch.empty(2, len(hidden), device=hidden.device)
    targets = targets.contiguous()
    for rows, z, _ in logit_chunks(hidden, weight, vocab_size, rows_per_chunk, use_triton, narrow):
        if use_triton:
            logprob_rows[(len(z),)](z, z.stride(0), vocab_size, targets[rows], logprobs[rows], entropies[rows],
                                    **head_arguments(z, softcap, temperature))
        elif takes_c(z, targets):
            spec = cpu.struct("Loss", softcap=softcap or 0, temperature=temperature)
            cpu.call("policy_rows", spec, z, z.stride(0), *z.shape, targets[rows], *[None] * 5, logprobs[rows],
                     entropies[rows])
        else:
            logprobs[rows], entropies[rows], *_ = torch_statistics(soften(z, softcap, temperature), targets[rows])
    return logprobs, entropies
