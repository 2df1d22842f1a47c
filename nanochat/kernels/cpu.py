"""
The CPU kernels of the C files in this folder: compiled by the machine's C compiler when first needed, called by
address.

Their counterparts in PyTorch stand where they are called from (that of decode_step.py in gpt.py), and serve where there
is no compiler, for other dtypes and devices, and under NANOCHAT_CPU_KERNELS=0. The compiled library is kept in
nanochat/kernels of $XDG_CACHE_HOME or ~/.cache, under a name made of all that went into it; where that folder is not
ours alone, each process compiles for itself.
"""
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile

import torch

FOLDER = os.path.dirname(os.path.abspath(__file__))
SOURCES = [os.path.join(FOLDER, f"cpu_{name}.c")
           for name in ("attention", "block", "decode", "decoder", "layer", "loss", "tiles")]
HEADERS = [os.path.join(FOLDER, name) for name in ("cpu.h", "cpu_heads.h", "cpu_product.h", "cpu_tiles.h")]
NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = ["-O3", NATIVE, "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC", "-w"]
MULTIPLE = 32  # of heads' sizes and rows' widths that the kernels take


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels serve this tensor: fp32 on the CPU, its last dimension a multiple of 32, and a compiler was
    there. Not while torch.compile reads the code: it makes kernels of its own of PyTorch's operations."""
    return (x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()
            and x.shape[-1] % MULTIPLE == 0 and x.numel() > 0 and library() is not None)


def takes_rows(x: torch.Tensor) -> bool:
    """The same for a matrix of rows of any length and stride, each without gaps."""
    return (x.device.type == "cpu" and x.dtype == torch.float32
            and x.stride(-1) == 1 and x.numel() > 0 and library() is not None)


def call(name: str, *arguments) -> None:
    """Runs a kernel on PyTorch's number of threads (its last argument). Tensors go by address, None as no address,
    structs by reference."""
    passed = [x.data_ptr() if isinstance(x, torch.Tensor) else
              ctypes.byref(x) if isinstance(x, ctypes.Structure) else x for x in arguments]
    getattr(library(), name)(*passed, torch.get_num_threads())


@functools.cache
def library():
    """The compiled kernels, None where they are switched off or cannot be compiled (said once, on stderr)."""
    if os.environ.get("NANOCHAT_CPU_KERNELS") == "0":
        return None
    wanted = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, filter(None, [wanted, "cc", "gcc", "clang"]))), None)
    if wanted and compiler and not shutil.which(wanted):
        print(f"CPU kernels: CC={wanted} is not a program: compiled by {compiler}", file=sys.stderr)
    problem = "no C compiler (cc, gcc or clang) was found" if compiler is None else None
    # With threads if the compiler has OpenMP: gcc's library for it is the one that PyTorch has loaded.
    for flags in ([*FLAGS, "-fopenmp"], FLAGS) if compiler else ():
        try:
            kernels = load(compiler, flags)
        except (OSError, subprocess.SubprocessError) as error:
            lines = f"{getattr(error, 'stderr', None) or ''}\n{error}".splitlines()
            problem = f"{compiler}: {next(filter(None, map(str.strip, lines)))}"
            continue
        if flags is FLAGS:
            print(f"CPU kernels run on one thread, without OpenMP: {problem}", file=sys.stderr)
        for name, types in signatures().items():
            getattr(kernels, name).argtypes = types
            getattr(kernels, name).restype = ctypes.c_long if name == "has_bf16" else None
        return kernels
    print(f"CPU kernels run as PyTorch operations, which is slower: {problem}", file=sys.stderr)
    return None


def kind_of(declaration: str, declarator: str) -> type:
    """The type of a name that C declares as a pointer, a long or a float."""
    return ctypes.c_void_p if "*" in declarator else getattr(ctypes, f"c_{declaration.split()[0]}")


def signatures() -> dict[str, list]:
    """The types of each kernel's arguments, as the C files have them; the last one is the number of threads."""
    found = re.findall(r"^(?:void|long) (\w+)\(([^)]*)\)$", text_of(SOURCES), re.MULTILINE)
    return {name: [kind_of(argument, argument) for argument in arguments.split(",")] for name, arguments in found}


def struct(name: str, *values, **fields) -> ctypes.Structure:
    """A struct of the C files with these values of its fields, in their order there or by name."""
    return struct_type(name)(*values, **fields)


@functools.cache
def struct_type(name: str) -> type[ctypes.Structure]:
    """The type of such structs, with the fields that C says."""
    body, fields = re.search(rf"typedef struct {{([^}}]*)}} {name};", text_of([*HEADERS, *SOURCES]))[1], []
    for declaration in body.split(";")[:-1]:
        for declarator in declaration.split(","):
            field, size = re.search(r"(\w+)(?:\[(\d+)\])?$", declarator).groups()
            kind = kind_of(declaration, declarator)
            fields.append((field, kind * int(size) if size else kind))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def text_of(paths: list[str]) -> str:
    """The C in these files, without comments."""
    return re.sub(r"/\*.*?\*/", "", "".join(open(path).read() for path in paths), flags=re.DOTALL)


def load(compiler: str, flags: list[str]) -> ctypes.CDLL:
    """The library from the cache folder, or from a temporary one that goes at once."""
    with tempfile.TemporaryDirectory() as temporary:
        return ctypes.CDLL(compiled(compiler, flags, cache_folder() or temporary))


def cache_folder() -> str | None:
    """Where compiled libraries are kept; None where others could put theirs."""
    folder = os.path.expanduser(os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "nanochat", "kernels"))
    if not os.path.isabs(folder):
        return None
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        safe = only_ours(folder, 0o022) and only_ours(os.path.dirname(folder), 0o002)
    except OSError:
        return None
    return folder if safe and os.access(folder, os.W_OK) else None


def only_ours(path: str, forbidden: int) -> bool:
    """Whether a path (no link) is this user's and has none of these permissions."""
    status = os.lstat(path)
    return status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode) and not status.st_mode & forbidden


def compiled(compiler: str, flags: list[str], folder: str) -> str:
    """The path of the shared library; compiles it unless it is there. Written whole or not at all. Raises OSError,
    SubprocessError."""
    texts = [open(path).read() for path in (*SOURCES, *HEADERS)]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    key = hashlib.blake2b("\0".join([*texts, version, processor(), *flags]).encode(), digest_size=12).hexdigest()
    path = os.path.join(folder, f"cpu-{key}.so")
    if os.path.exists(path) and only_ours(path, 0o022):
        return path
    handle, temporary = tempfile.mkstemp(dir=folder)
    os.close(handle)
    try:
        subprocess.run([compiler, *flags, *SOURCES, "-o", temporary, "-lm"], capture_output=True, text=True,
                       check=True, timeout=300)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.chmod(temporary, 0o700)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    return path


def processor() -> str:
    """What tells this kind of CPU from others, for folders that several machines share: the code is made for one
    kind."""
    try:
        with open("/proc/cpuinfo") as f:
            return "".join(sorted({line for line in f
                                   if line.startswith(("flags", "Features", "model name", "CPU implementer",
                                                       "CPU part"))}))
    except OSError:
        return f"{platform.platform()} {platform.processor()}"
