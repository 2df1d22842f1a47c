"""
What every script needs: bad input, device and ranks, the run and its folder, collectives. Importing it does nothing.
"""
import argparse
import contextlib
import ctypes
import datetime
import fcntl
import functools
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nanochat import __version__

NUM_WAITING = 8  # threads of in_threads
STAGE_FOLDERS = {"base": "base_checkpoints", "sft": "chatsft_checkpoints", "rl": "chatrl_checkpoints"}


class BadInput(ValueError):
    """Something the user gave cannot work. Its text is one line that names what and where; scripts exit with code 2."""


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived; raised on all ranks at the same point."""


class Diverged(Exception):
    """Training cannot go on; scripts print its text and exit with code 1."""


def script_main(main, parser, argv: list[str] | None = None) -> None:
    """Runs main(args), turning BadInput into one line on stderr and exit code 2, Diverged into code 1. A leading `--`
    is dropped. parser: an ArgumentParser, or a function that makes it from the arguments."""
    argv = sys.argv[1:] if argv is None else argv
    argv = argv[1:] if argv[:1] == ["--"] else argv
    code = 0
    try:
        parser = parser(argv) if callable(parser) else parser
        parser.error = functools.partial(refuse, getattr(parser, "explain", str))  # one line instead of the usage
        main(parser.parse_args(argv))
    except BadInput as error:
        complain(f"error: {' '.join(str(error).splitlines())}")
        code = 2
    except Diverged as error:
        if rank_and_world()[0] == 0:
            print(f"stopped: {error}", file=sys.stderr)
        code = 1
    except StopRequested as stop:
        print0(stop)
        code = 143  # 128 + SIGTERM
    if dist.is_initialized():
        # Gloo's threads may still hold tensors and abort the interpreter's shutdown (pytorch/pytorch #179291): leave
        # without it.
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def refuse(explain, message: str) -> None:
    """Raises BadInput with argparse's message, as `explain` puts it."""
    raise BadInput(explain(message))


def complain(line: str) -> None:
    """Says what is wrong, once: of several ranks with the same complaint the first, and any rank that is alone with
    its."""
    _, world = rank_and_world()
    is_first = True
    if world > 1 and "MASTER_PORT" in os.environ:
        with contextlib.suppress(RuntimeError, ValueError, KeyError):  # nobody to ask: say it
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                                  timeout=datetime.timedelta(seconds=10))
            key = f"complaint/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{zlib.crc32(line.encode())}"
            is_first = store.add(key, 1) == 1
    if is_first:
        print(line, file=sys.stderr, flush=True)


def check_least(args, least: dict[str, float]) -> None:
    """Raises BadInput for the first flag whose value is below its least one, or not a number. A flag left at None is
    not looked at."""
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and not value >= low:
            raise BadInput(f"--{name.replace('_', '-')} {value}: must be at least {low}")


def check_choices(args, tables: dict[str, Iterable[str]]) -> None:
    """Raises BadInput for the first flag whose value is not in its table."""
    for name, table in tables.items():
        if getattr(args, name) not in table:
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: there are {', '.join(table)}")


def flag_defaults(parser) -> dict:
    """The flags of a parser and their defaults."""
    return {action.dest: action.default for action in parser._actions}


def check_unchanged(what: str, before: dict, args, may_change: set[str], defaults: dict) -> list[str]:
    """Raises BadInput for the first flag that differs from what a run or checkpoint was made with; the allowed changes,
    in words. A flag that did not exist then counts as its default; --tensorboard may always change."""
    before = defaults | before
    changed = {name: value for name, value in vars(args).items() if before.get(name) != value}
    for name, value in changed.items():
        if name not in may_change | {"tensorboard"}:
            raise BadInput(f"--{name.replace('_', '-')} {value}: {what} was started with {before.get(name)}; "
                           f"a continued run cannot change it")
    return [f"--{name.replace('_', '-')} {before.get(name)} -> {value}" for name, value in changed.items()]


def check_name(flag: str, name: str) -> None:
    """Raises BadInput unless the name of a run or a tag is a plain folder name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise BadInput(f"{flag} {name}: use letters, digits, '.', '_' and '-'")


def base_dir() -> str:
    """Where tokenizer, checkpoints and runs live: $NANOCHAT_BASE_DIR or ~/.cache/nanochat."""
    return os.path.expanduser(os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat")


def path_of(kind: str, *names: str) -> str:
    """The one place that knows the layout on disk. kind: tokenizer, runs, or a stage (base, sft, rl), whose first name
    is a tag.

    Today's: <base>/<stage's folder>/<tag>/... With NANOCHAT_EXPERIMENT=<name> upstream's announced one (its PR 800):
    <$NANOCHAT_EXPERIMENTS_DIR or base/experiments>/<name>/<tag>/<stage>/..., tokenizer and runs beside the tags.
    """
    name = os.environ.get("NANOCHAT_EXPERIMENT", "")
    if not name:
        return os.path.join(base_dir(), STAGE_FOLDERS.get(kind, kind), *names)
    check_name("NANOCHAT_EXPERIMENT", name)
    root = os.path.expanduser(os.environ.get("NANOCHAT_EXPERIMENTS_DIR") or os.path.join(base_dir(), "experiments"))
    if kind not in STAGE_FOLDERS:
        return os.path.join(root, name, kind, *names)
    return os.path.join(root, name, *(names and (names[0], kind, *names[1:])))


def rank_and_world() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def print0(*args) -> None:
    """Prints on rank 0."""
    if rank_and_world()[0] == 0:
        print(*args, flush=True)


def init_device(device_type: str) -> torch.device:
    """The device of this rank ("" picks cuda, mps or cpu), and the process group when launched by torchrun. Raises
    BadInput."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device_type == "":
        device_type = next(name for name, there in available.items() if there)
    if not available.get(device_type):
        raise BadInput(f"--device-type {device_type}: available are "
                       f"{', '.join(name for name, there in available.items() if there)}")
    if device_type == "cpu":
        keep_freed_memory()
    device = (torch.device(device_type, int(os.environ.get("LOCAL_RANK", 0))) if device_type == "cuda"
              else torch.device(device_type))
    if device_type == "cuda":
        torch.cuda.set_device(device)
        # it plans for half a second at every new shape, and micro-batches have many
        torch.backends.cuda.enable_cudnn_sdp(False)
    if rank_and_world()[1] > 1 and not dist.is_initialized():
        # One rank may write checkpoints of many GB, or wait for graders, while the others are in a collective.
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=datetime.timedelta(hours=1))
    return device


def keep_freed_memory() -> None:
    """Makes glibc keep memory that tensors on CPU have freed: handing it back means 100K page faults in a step of 32 x
    8 rows. Resident memory then stays at its peak."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 2 ** 30) or libc.mallopt(-3, 2 ** 25)  # M_MMAP_THRESHOLD; before glibc 2.35 at most 32 MiB
        libc.mallopt(-1, 2 ** 31 - 1)                           # M_TRIM_THRESHOLD


def compute_dtype(device: torch.device) -> torch.dtype:
    """dtype of activations: $NANOCHAT_DTYPE, else bfloat16 on GPUs that have it and float32 elsewhere. Refuses
    float16."""
    name = os.environ.get("NANOCHAT_DTYPE", "")
    if name in ("float16", "fp16", "half"):
        raise BadInput(f"NANOCHAT_DTYPE={name}: float16 overflows in training; use bfloat16 or float32")
    names = {"": None, "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16,
             "bf16": torch.bfloat16}
    if name not in names:
        raise BadInput(f"NANOCHAT_DTYPE={name}: use bfloat16 or float32")
    default = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return names[name] or default


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has no float64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """The sum or max of a tensor over ranks, in place; itself when there is one rank. Every rank must call it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()))
    return tensor


def barrier() -> None:
    """Waits, on the host too, until every rank is here; nothing where there is one rank."""
    if dist.is_initialized():
        dist.barrier()


def gather_tensor(x: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks joined in rank order, on every rank: x (n, ...), n may differ between ranks, the rest
    not."""
    if not dist.is_initialized():
        return x
    size = torch.tensor([len(x)], device=x.device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(s) for s in sizes)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(s)] for part, s in zip(parts, sizes, strict=True)])


def mean_over_ranks(values: dict[str, list], device) -> dict[str, float | None]:
    """The mean of each list of numbers over all ranks, None entries left out; None where nothing is left. One
    collective; the ranks must have the same keys."""
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
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(s) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    parts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [item for part, s in zip(parts, sizes, strict=True) for item in json.loads(bytes(part[: int(s)].tolist()))]


def in_threads(function, *columns: list) -> list:
    """function(*row) of every row of these columns, in order, in a few threads: for what waits for other processes."""
    rows = list(zip(*columns, strict=True))
    with ThreadPoolExecutor(NUM_WAITING) as threads:
        return list(threads.map(lambda row: function(*row), rows))


def write_json(path: str, record: dict) -> None:
    """Writes a json file whole or not at all."""
    with open(path + ".tmp", "w") as f:
        json.dump(record, f, indent=2)
        f.write("\n")
    os.replace(path + ".tmp", path)


def finite(value):
    """The value with None for every number in it that is not finite."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Run:
    """One run of a script: its device and ranks, its folder, its log, and the request to stop."""
    name: str
    device: torch.device
    rank: int
    world: int
    folder: str
    lock: object = None  # rank 0's open lock file
    wandb: object = None
    wants_events: bool = False  # --tensorboard
    events: object = None  # rank 0's writer of event files, from trim on
    stop_signal: bool = False
    started: float = field(default_factory=time.time)

    def on_signal(self, *_) -> None:
        self.stop_signal = True

    def should_stop(self) -> bool:
        """Whether this rank was told to stop; no collective, safe anywhere."""
        return self.stop_signal

    def check_stop(self) -> None:
        """Raises StopRequested on every rank if any was told to stop. A collective: all ranks call it at the same
        points."""
        if all_reduce(torch.tensor(int(self.stop_signal), device=self.device), "max").item():
            raise StopRequested

    def log(self, record: dict) -> None:
        """Appends one record to metrics.jsonl and shows it to wandb and TensorBoard; rank 0."""
        if self.rank == 0:
            self.append("metrics.jsonl", record)
            if self.wandb:
                self.wandb.log(record, step=record["step"])
            if self.events:
                self.add_events([record])

    def add_events(self, records: Iterable[dict]) -> None:
        """Adds the finite numbers of records to TensorBoard's event files."""
        for record in records:
            for name, value in finite(record).items():
                if isinstance(value, int | float) and name != "step":
                    self.events.add_scalar(name, value, record["step"])
        self.events.flush()

    def append(self, name: str, record: dict) -> None:
        """Appends a line of json to a file of the run; numbers that are not finite become null, as json has none."""
        with open(os.path.join(self.folder, name), "a") as f:
            f.write(json.dumps(finite(record), allow_nan=False) + "\n")

    def trim(self, name: str, step: int) -> None:
        """Drops the records of steps from `step` on: what was logged after the checkpoint that a run resumes from.
        Event files are written afresh from metrics.jsonl, so no step is in them twice; trim it before the first log."""
        path, kept = os.path.join(self.folder, name), []
        if self.rank == 0 and os.path.exists(path):
            with open(path) as f:
                kept = [line for line in f if line.endswith("\n") and json.loads(line)["step"] < step]
            with open(path + ".tmp", "w") as f:
                f.writelines(kept)
            os.replace(path + ".tmp", path)
        if self.rank == 0 and self.wants_events and name == "metrics.jsonl":
            folder = os.path.join(self.folder, "tensorboard")
            shutil.rmtree(folder, ignore_errors=True)
            self.events = summary_writer()(folder)
            self.add_events(map(json.loads, kept))

    def remove(self, name: str) -> None:
        """Removes a file of the run's folder, if it is there; rank 0."""
        path = os.path.join(self.folder, name)
        if self.rank == 0 and os.path.exists(path):
            os.remove(path)

    def finish(self) -> None:
        if self.lock:
            self.lock.close()
        if self.wandb:
            self.wandb.finish()
        if self.events:
            self.events.close()


def add_run_args(parser) -> None:
    """The flags that all training scripts share."""
    group = parser.add_argument_group("run")
    group.add_argument("--run", default="dummy",
                       help="name of the run, its folder and its checkpoints; 'dummy' = a numbered name and no wandb")
    group.add_argument("--seed", type=int, default=0, help="seed of weights, problems and sampling noise")
    group.add_argument("--device-type", default="", choices=["", "cuda", "mps", "cpu"],
                       help="default: the best there is")
    group.add_argument("--tensorboard", action=AskTensorboard, nargs=0, default=False,
                       help="also write the metrics as TensorBoard event files, in the folder tensorboard of the run's")


class AskTensorboard(argparse.Action):
    """A flag without a value. Raises BadInput where event files cannot be written."""
    def __call__(self, parser, namespace, *_) -> None:
        summary_writer()
        setattr(namespace, self.dest, True)


def summary_writer():
    """The class that writes TensorBoard's event files. Raises BadInput where its package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise BadInput(f"--tensorboard: {error}; run `pip install tensorboard`") from None
    return SummaryWriter


def choose_run_name(name: str) -> str:
    """The run's name: for "dummy" the first free dummy-<n>. Raises BadInput for one that is no folder name."""
    check_name("--run", name)
    if name != "dummy":
        return name
    n = 1
    while os.path.exists(path_of("runs", f"dummy-{n}")):
        n += 1
    return f"dummy-{n}"


def check_writable(path: str) -> None:
    """Raises BadInput unless `path`, or its nearest parent that exists, can be written to. Leaves nothing behind."""
    parent = os.path.abspath(path)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise BadInput(f"cannot write to {path} ({parent}: {error.strerror})") from None


def uses_wandb(run_name: str) -> bool:
    """A run goes to wandb unless it is a dummy or WANDB_MODE=disabled. Raises BadInput when it should and cannot."""
    mode = os.environ.get("WANDB_MODE", "online")
    if run_name.startswith("dummy") or mode == "disabled":
        return False
    if mode == "online":
        import wandb
        if not wandb.login(prompt=False, verify=False):
            raise BadInput(f"--run {run_name}: wandb has no API key; "
                           f"run `wandb login`, or set WANDB_MODE=offline or WANDB_MODE=disabled")
    return True


def lock_run(folder: str):
    """Takes a run's lock, held while the returned file is open. Raises BadInput when another process has it."""
    lock = open(os.path.join(folder, "lock"), "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise BadInput(f"{folder}: another process is at work on this run") from None
    return lock


def start_run(args, device: torch.device, config: dict, resumed: bool, folder: str = "") -> Run:
    """Opens and locks the run's folder (by default the one of --run), writes config.json, catches SIGTERM and SIGINT,
    and starts wandb where it is wanted."""
    rank, world = rank_and_world()
    run = Run(args.run, device, rank, world, folder or path_of("runs", args.run), wants_events=args.tensorboard)
    if rank == 0:
        try:
            os.makedirs(run.folder, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot write to {run.folder} ({error.strerror})") from None
        run.lock = lock_run(run.folder)
        if not resumed:
            write_json(os.path.join(run.folder, "config.json"), config)
        if uses_wandb(args.run):
            import wandb
            run.wandb = wandb.init(project="nanochat-tango", name=args.run, id=args.run, resume="allow",
                                   dir=run.folder, config=config)
    signal.signal(signal.SIGTERM, run.on_signal)
    signal.signal(signal.SIGINT, run.on_signal)
    return run


def quiet_datasets():
    """The `datasets` library, without progress bars and without its calls home, which make opening local files wait for
    a network."""
    import datasets
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # what fails is raised too, and told in one line
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.disable_progress_bars()
    return datasets


def describe_versions() -> dict:
    """Versions and commit, for config.json. The commit is None where git does not keep this file: an installed package
    may lie inside another repository."""
    import subprocess
    here, name = os.path.split(os.path.abspath(__file__))
    ask = lambda *words: subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
    try:
        is_tracked = ask("ls-files", "--error-unmatch", name).returncode == 0
        commit = ask("rev-parse", "HEAD").stdout.strip() if is_tracked else ""
    except FileNotFoundError:  # no git on this machine
        commit = ""
    return {"version": __version__, "python": sys.version.split()[0], "torch": torch.__version__,
            "commit": commit or None, "started": datetime.datetime.now().isoformat(timespec="seconds")}
