"""
What every module may need: errors, the device, ranks and their collectives. Importing it does nothing.
"""
import contextlib
import ctypes
import datetime
import inspect
import json
import math
import os
import signal
import socket
import sys
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

NUM_WAITING = 8  # threads of in_threads
PASSED = "\n\t\u200c\u200d"  # what Python calls not printable and Persian, Hindi and emoji are written with


class BadInput(ValueError):
    """Something the user gave cannot work. Its text is one line that names what and where; scripts exit with code 2."""


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived; raised on all ranks at the same point."""


class Diverged(Exception):
    """Training cannot go on; scripts print its text and exit with code 1."""


class CannotWrite(Exception):
    """A file cannot be written, as on a full disk; scripts print its text, one line, and exit with code 1."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the machine, or its GPU, has too little memory."""
    return (isinstance(error, MemoryError | torch.OutOfMemoryError)
            or "DefaultCPUAllocator: can't allocate memory" in str(error))


def printable(text: str) -> str:
    """Text that others wrote without control characters, which would steer the terminal. All kinds of spaces and
    joiners pass."""
    return "".join(c if c.isprintable() or c in PASSED or unicodedata.category(c) == "Zs" else "?" for c in text)


def one_line(text: str | Exception) -> str:
    """`printable` text on one line: it cannot forge lines either."""
    return " ".join(printable(str(text)).split())


def takes(function, number: int) -> bool:
    """Whether a function can be called with so many arguments; what cannot be told is taken for a yes."""
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError:
        return False
    except ValueError:  # of a builtin
        return True
    return True


def check_defaults() -> None:
    """Raises BadInput where a file of the user's has changed what torch makes tensors of: kernels are given fp32 on the
    CPU, and would read something else as that."""
    found = torch.get_default_dtype(), torch.get_default_device()
    if found != (torch.float32, torch.device("cpu")):
        raise BadInput(f"torch's defaults have been set to {dtype_name(found[0])} and {found[1]}: they must stay "
                       f"float32 and cpu; name another dtype or device where a tensor is made")


def rank_and_world() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def print0(*args) -> None:
    """Prints on rank 0 what is `printable`. A stdout that is closed or on a full disk stops nothing: from then on
    nothing is shown."""
    if rank_and_world()[0] != 0:
        return
    try:
        print(printable(" ".join(map(str, args))) + "\n", end="", flush=True)  # one write: two threads' stay apart
    except (OSError, ValueError) as error:  # ValueError: closed by Python
        sys.stdout = open(os.devnull, "w")
        with contextlib.suppress(OSError):
            why = getattr(error, "strerror", error)
            print(f"WARNING: nothing more is shown: stdout: {why}", file=sys.stderr, flush=True)


def available_devices() -> list[str]:
    """Types of devices that are there, the best one first."""
    return ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available() + ["cpu"]


def check_device(device_type: str) -> None:
    """Raises BadInput for a type of device that is not there."""
    if device_type not in available_devices():
        raise BadInput(f"--device-type {device_type}: available are {', '.join(available_devices())}")


def init_device(device_type: str) -> torch.device:
    """The device of this rank ("" picks the best), and the process group when launched by torchrun. Raises BadInput."""
    device_type = device_type or available_devices()[0]
    check_device(device_type)
    if os.environ.keys() & {"TORCHELASTIC_RUN_ID", "NANOCHAT_STOP_WITH_PARENT"}:
        stop_with_parent()
    if device_type == "cpu":
        hold_memory()
    device = (torch.device(device_type, int(os.environ.get("LOCAL_RANK", 0))) if device_type == "cuda"
              else torch.device(device_type))
    if device_type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for half a second at every new shape: there are many
    if rank_and_world()[1] > 1 and not dist.is_initialized():
        check_agent()
        # One rank may write checkpoints of many GB, or wait for graders, while the others are in a collective.
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=datetime.timedelta(hours=1))
    return device


def stop_with_parent() -> None:
    """Makes Linux send this process SIGTERM when its parent ends: torchrun or dev/experiments, killed, cannot stop its
    processes, and they would go on and keep the run's lock. A parent that names itself may have ended by now."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        parent = os.environ.get("NANOCHAT_STOP_WITH_PARENT")
        if parent and parent != str(os.getppid()):
            os.kill(os.getpid(), signal.SIGTERM)


def check_agent() -> None:
    """Raises StopRequested where torchrun, at whose store ranks meet, has ended too soon for stop_with_parent."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=60).close()
        except OSError as error:
            raise StopRequested(f"stopped: torchrun, which started this rank, does not answer: "
                                f"{error.strerror or error}") from None


def hold_memory() -> None:
    """How memory is held on a CPU; before the first tensor and product there. A user's own settings stand."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # keeps what is freed: handing it back means 100K page faults in a step of 32 x 8 rows
        libc.mallopt(-3, 2 ** 30) or libc.mallopt(-3, 2 ** 25)  # M_MMAP_THRESHOLD; before glibc 2.35 at most 32 MiB
        libc.mallopt(-1, 2 ** 31 - 1)                           # M_TRIM_THRESHOLD
    # Huge pages for tensors of 2 MiB or more take a tenth off decoding and a twentieth off an update (dev/BENCH.md).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Prepared products are cached, by default 1024 of a quarter of a megabyte, one for each shape; those that stay keep
    # the heap from being used again, so that resident memory grows by gigabytes.
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")


def process_size() -> dict[str, float | int | None]:
    """What this process holds: resident memory in 10^9 bytes, open files; None where /proc does not tell."""
    try:
        with open("/proc/self/statm") as f:
            num_pages = int(f.read().split()[1])
        num_files = len(os.listdir("/proc/self/fd")) - 1  # the listing itself is open too
    except OSError:  # not Linux
        return {"resident_gb": None, "open_files": None}
    return {"resident_gb": num_pages * os.sysconf("SC_PAGE_SIZE") / 1e9, "open_files": num_files}


def compute_dtype(device: torch.device) -> torch.dtype:
    """dtype of products and activations: $NANOCHAT_DTYPE, else bfloat16 on GPUs that have it. Raises BadInput."""
    name = os.environ.get("NANOCHAT_DTYPE", "")
    names = {"": None, "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16,
             "bf16": torch.bfloat16}
    if name not in names:
        raise BadInput(f"NANOCHAT_DTYPE={name}: use bfloat16 or float32; float16 overflows in training")
    default = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return names[name] or default


def dtype_name(dtype: torch.dtype) -> str:
    """As files have it: float32."""
    return str(dtype).removeprefix("torch.")


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has no float64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """The sum or max of a tensor over ranks, in place; itself when there is one rank. Every rank must call it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()))
    return tensor


def gather_parts(x: torch.Tensor) -> list[torch.Tensor]:
    """The x (n, ...) of each rank, on every rank; n may differ between ranks, the rest not."""
    size = torch.tensor([len(x)], device=x.device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(s) for s in sizes)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [part[: int(s)] for part, s in zip(parts, sizes, strict=True)]


def gather_tensor(x: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks joined in rank order, on every rank. x as in gather_parts."""
    return torch.cat(gather_parts(x)) if dist.is_initialized() else x


def mean_over_ranks(values: dict[str, list], device) -> dict[str, float | None]:
    """The mean of each list over all ranks, without None; None where nothing is left. All have the same keys."""
    kept = {name: [float(x) for x in numbers if x is not None] for name, numbers in values.items()}
    sums = torch.tensor([[sum(numbers), len(numbers)] for numbers in kept.values()], dtype=wide_dtype(device),
                        device=device)
    totals = all_reduce(sums).tolist()
    return {name: total / count if count else None for name, (total, count) in zip(kept, totals, strict=True)}


def gather_lists(items: list, device) -> list:
    """The lists of all ranks joined in rank order, on every rank. Items must be json values; nothing is pickled."""
    if not dist.is_initialized():
        return items
    mine = torch.frombuffer(bytearray(json.dumps(items).encode()), dtype=torch.uint8).to(device)
    return [item for part in gather_parts(mine) for item in json.loads(bytes(part.tolist()))]


def on_all_ranks(make: Callable, device):
    """make() of each rank. Raises BadInput on every rank where it did on one: the others would wait for that one."""
    made, said = None, []
    try:
        made = make()
    except BadInput as error:
        said = [str(error)]
    if said := gather_lists(said, device):
        raise BadInput(said[0])
    return made


def in_threads(function, *columns: list, should_stop=lambda: False) -> list:
    """function(*row) of every row of these columns, in order, in threads: for what waits for other processes. Once
    should_stop(), the rest is None."""
    rows = list(zip(*columns, strict=True))
    with ThreadPoolExecutor(NUM_WAITING) as threads:
        return list(threads.map(lambda row: None if should_stop() else function(*row), rows))


def described(value) -> str:
    """In words, a value that is not the number it should be."""
    if isinstance(value, float) or isinstance(value, int) and value.bit_length() < 64:
        return str(value)
    return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def finite(value):
    """The value with None for every number in it that is not finite."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
