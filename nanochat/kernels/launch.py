"""
Triton where it is installed, and which tensors its kernels take. Everywhere else their PyTorch versions do the work.
"""
import torch

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:
    from types import SimpleNamespace
    triton, tl = None, SimpleNamespace(constexpr=None)
    jit = lambda kernel=None, **options: kernel or jit


def takes_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton works on this tensor: on CUDA, of at most 32 bits. Raises ImportError where it is missing."""
    wanted = tensor.is_cuda and tensor.dtype != torch.float64
    if wanted and triton is None:
        raise ImportError("tensors on CUDA need the package triton")
    return wanted


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()
