"""
The CPU kernels of cpu_attention.c and cpu_block.c: compiled by the machine's C compiler when first needed, called by address.

Their twins in PyTorch stand where they are called from, in ops.py, attention.py and engine.py, and serve where there is no compiler, for
other dtypes and devices, and under NANOCHAT_CPU_KERNELS=0. The compiled library is kept in ~/.cache/nanochat/kernels, under a name made
of all that went into it.
"""
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile

import torch

FOLDER = os.path.dirname(os.path.abspath(__file__))
SOURCES = [os.path.join(FOLDER, name) for name in ("cpu_attention.c", "cpu_block.c")]
FLAGS = ["-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC", "-w"]
POINTERS, LONG, FLOAT = lambda n: [ctypes.c_void_p] * n, [ctypes.c_long], [ctypes.c_float]
ARGUMENTS = {  # of each kernel, before the number of threads
    "attend_forward": POINTERS(3), "attend_backward": POINTERS(9), "attend_one": POINTERS(2),
    "norm_forward": POINTERS(5) + LONG + LONG + FLOAT, "norm_backward": POINTERS(5) + LONG + LONG,
    "mix_forward": POINTERS(5) + LONG, "mix_backward": POINTERS(8) + LONG,
    "relu_squared_forward": POINTERS(2) + LONG, "relu_squared_backward": POINTERS(3) + LONG,
    "split_heads_forward": POINTERS(10), "split_heads_backward": POINTERS(14),
    "draw": POINTERS(1) + LONG * 3 + POINTERS(3), "transpose_matrix": POINTERS(2) + LONG * 2,
}
MULTIPLE = 32  # of heads' sizes and rows' widths that the kernels take


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels serve this tensor: fp32 on the CPU, its last dimension a multiple of 32, and a compiler was there."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[-1] % MULTIPLE == 0 and x.numel() > 0 and library() is not None


def takes_rows(x: torch.Tensor) -> bool:
    """The same for a matrix of rows of any length and stride, each without gaps."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.stride(-1) == 1 and x.numel() > 0 and library() is not None


def call(name: str, *arguments) -> None:
    """Runs a kernel on PyTorch's number of threads (its last argument). Tensors go by address, None as no address, structs by reference."""
    getattr(library(), name)(*[x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments], torch.get_num_threads())


@functools.cache
def library():
    """The compiled kernels, None where they are switched off or cannot be compiled (said once, on stderr)."""
    if os.environ.get("NANOCHAT_CPU_KERNELS") == "0":
        return None
    compiler = next(filter(None, map(shutil.which, filter(None, [os.environ.get("CC"), "cc", "gcc", "clang"]))), None)
    problem = "no C compiler (cc, gcc or clang) was found" if compiler is None else None
    # With threads if the compiler has OpenMP: libgomp.so.1 is then the one that PyTorch has loaded.
    for flags in ([*FLAGS, "-fopenmp"], FLAGS) if compiler else ():
        try:
            kernels = ctypes.CDLL(compiled(compiler, flags))
        except (OSError, subprocess.SubprocessError) as error:
            lines = f"{getattr(error, 'stderr', None) or ''}\n{error}".splitlines()
            problem = f"{compiler}: {next(filter(None, map(str.strip, lines)))}"
            continue
        for name, types in ARGUMENTS.items():
            getattr(kernels, name).argtypes, getattr(kernels, name).restype = types + LONG, None
        return kernels
    print(f"CPU kernels run as PyTorch operations, which is slower: {problem}", file=sys.stderr)
    return None


def compiled(compiler: str, flags: list[str]) -> str:
    """The path of the shared library; compiles it unless it is there. Written whole or not at all. Raises OSError, SubprocessError."""
    texts = [open(path, "rb").read() for path in (*SOURCES, os.path.join(FOLDER, "cpu.h"))]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    key = hashlib.blake2b(b"\0".join([*texts, version, processor(), " ".join(flags).encode()]), digest_size=12).hexdigest()
    folder = os.path.expanduser(os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "nanochat", "kernels"))
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        writable = os.stat(folder).st_uid == os.getuid() and os.access(folder, os.W_OK)
    except OSError:
        writable = False
    folder = folder if writable else tempfile.mkdtemp()
    path = os.path.join(folder, f"cpu-{key}.so")
    if not os.path.exists(path):
        handle, temporary = tempfile.mkstemp(dir=folder)
        os.close(handle)
        try:
            subprocess.run([compiler, *flags, *SOURCES, "-o", temporary, "-lm"], capture_output=True, text=True, check=True, timeout=300)
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)
    return path


def processor() -> bytes:
    """What tells this kind of CPU from others, for folders that several machines share: the code is made for one kind."""
    try:
        with open("/proc/cpuinfo", "rb") as f:
            return b"".join(sorted({line for line in f if line.startswith((b"flags", b"Features", b"model name"))}))
    except OSError:
        return f"{platform.platform()} {platform.processor()}".encode()
