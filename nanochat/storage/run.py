"""
A run of a script: its name, folder and lock, its log, and the request to stop.
"""
import argparse
import contextlib
import datetime
import fcntl
import glob
import json
import os
import shutil
import signal
import sys
import time
import weakref
from dataclasses import dataclass, field

import torch

from nanochat import __version__
from nanochat.cli import add_device_arg, at_least, check_name
from nanochat.common import BadInput, CannotWrite, StopRequested, all_reduce, finite, print0, rank_and_world
from nanochat.storage.files import base_dir, path_of, read_json, read_records, whole_file, write_json, writing
from nanochat.storage.writer import Writer

PROJECT = "nanochat-tango"  # in trackers
WANDB_MODES = ("online", "offline", "disabled", "dryrun", "shared")  # that wandb knows
# The beginnings of names in metrics.jsonl that tell of the machine: in two runs of the same flags all else is equal.
TELL_EVERY = 10.0  # seconds
MEASURED = ("timing_s/", "tokens_per_s", "peak_memory_gb", "resident_gb", "open_files")


@dataclass
class Run:
    """One run of a script."""
    name: str
    device: torch.device
    rank: int
    world: int
    folder: str  # which it locks
    logs: str = ""  # the folder of its logs, by default the same
    tokenizer: int | None = None  # mark of the one that it began with, for the metas of its models
    lock: object = None  # rank 0's open lock file
    wandb: object = None
    trackio: object = None
    wants_events: bool = False  # --tensorboard
    events: object = None  # rank 0's writer of event files, from trim on
    is_forked: bool = False
    stop_signal: bool = False
    resumed_from: int | None = None  # the step that this process goes on from
    started: float = field(default_factory=time.time)
    told: float = field(default_factory=time.time)  # when `tell` last printed

    def __post_init__(self) -> None:
        self.writer, self.logs = Writer(self.device), self.logs or self.folder
        leave = weakref.WeakMethod(self.leave)  # what is registered stays for good, and the run need not
        os.register_at_fork(after_in_child=lambda: (method := leave()) and method())

    def leave(self) -> None:
        """In a forked child: the run, and its lock, are the parent's; a child that stays would hold it."""
        self.is_forked = True
        if self.lock:
            self.lock.close()
            self.lock = None

    def tell(self, line: str, is_due: bool = False) -> None:
        """Prints a line that is due; any, where none was printed for TELL_EVERY seconds. Rank 0."""
        if is_due or time.time() - self.told >= TELL_EVERY:
            print0(line)
            self.told = time.time()

    def on_signal(self, *_) -> None:
        self.stop_signal = True

    def should_stop(self) -> bool:
        """Whether this rank was told to stop; no collective, safe anywhere."""
        return self.stop_signal

    def check_stop(self) -> None:
        """Raises StopRequested on every rank if any was told to stop; makes a checkpoint count that all ranks have
        written by now. A collective: all ranks call it at the same points."""
        flags = torch.tensor([int(self.stop_signal), int(self.writer.is_busy())], device=self.device)
        is_told, is_busy = all_reduce(flags, "max").tolist()
        if not is_busy:
            self.writer.finish()
        if is_told:
            raise StopRequested

    def log(self, record: dict) -> None:
        """Appends one record to metrics.jsonl and shows it to the trackers that are wanted; rank 0."""
        if self.rank == 0:
            self.keep_lock()
            self.append("metrics.jsonl", record)
            self.tell_tracker("wandb", "log", record, step=record["step"])
            self.show([record])

    def show(self, records: list[dict]) -> None:
        """Shows the finite numbers of records to TensorBoard and trackio. Raises CannotWrite."""
        if self.events:
            self.add_events(records)
        for record in records:
            self.tell_tracker("trackio", "log", numbers_of(record), step=record["step"])

    def keep_lock(self) -> None:
        """Takes the run's lock again where its file was removed. Raises BadInput where another process has it by now,
        and in a forked child."""
        if self.is_forked:
            raise BadInput(f"{self.folder}: a forked process went on with this run, which is its parent's: it must end "
                           f"by itself, as with os._exit")
        path = os.path.join(self.folder, "lock")
        is_there = os.path.exists(path) and self.lock and os.path.samestat(os.stat(path), os.fstat(self.lock.fileno()))
        if self.lock and not is_there and os.path.isdir(self.folder):
            self.lock = lock_run(self.folder)

    def tell_tracker(self, name: str, what: str, *args, **options) -> None:
        """Calls a method of the run of wandb or trackio, if there is one. One that fails is told, and was the last:
        metrics.jsonl has it all."""
        if tracker := getattr(self, name):
            try:
                getattr(tracker, what)(*args, **options)
            except Exception as error:  # of many types: its process was killed, its disk is full
                print0(f"WARNING: {name} is told nothing more: {type(error).__name__}: {error}")
                setattr(self, name, None)

    def add_events(self, records: list[dict]) -> None:
        """Adds the finite numbers of records to TensorBoard's event files. Raises CannotWrite."""
        with writing(os.path.join(self.logs, "tensorboard")):
            for record in records:
                for name, value in numbers_of(record).items():
                    self.events.add_scalar(name, value, record["step"])
            self.events.flush()

    def append(self, name: str, record: dict) -> None:
        """Appends a line of json to a file of the run; numbers that are not finite become null, as json has none."""
        path = os.path.join(self.logs, name)
        with writing(path), open(path, "a") as f:
            f.write(json.dumps(finite(record), allow_nan=False) + "\n")

    def trim(self, name: str, step: int) -> None:
        """Drops the records of steps from `step` on: what was logged after the checkpoint that a run resumes from.
        Event files and trackio's run are filled afresh from metrics.jsonl, so no step is in them twice; trim it before
        the first log."""
        if self.rank != 0:
            return
        path, is_log = os.path.join(self.logs, name), name == "metrics.jsonl"
        is_there = os.path.exists(path)
        kept = [line for line, record in read_records(path) if record["step"] < step] if is_there else []
        if is_log and self.wants_events:
            folder = os.path.join(self.logs, "tensorboard")
            shutil.rmtree(folder, ignore_errors=True)
            self.events = summary_writer()(folder)
        if is_there:
            with whole_file(path) as f:
                f.writelines(kept)
        if is_log:
            self.show([json.loads(line) for line in kept])

    def remove(self, name: str) -> None:
        """Removes a file of the run's folder, if it is there; rank 0."""
        path = os.path.join(self.logs, name)
        if self.rank == 0 and os.path.exists(path):
            os.remove(path)

    def finish(self) -> None:
        if self.lock:
            self.lock.close()
        for name in ("wandb", "trackio"):
            self.tell_tracker(name, "finish")
        if self.events:
            self.events.close()


def add_run_args(parser) -> None:
    """The flags that all training scripts share."""
    group = parser.add_argument_group("run")
    group.add_argument("--run", default="dummy",
                       help="name of the run, of the folder of its logs, and in RL of its checkpoints; 'dummy' = no "
                            "wandb; in RL a numbered name, elsewhere logs in the model's folder")
    group.add_argument("--seed", type=int, default=0, help="seed of weights, problems and sampling noise")
    add_device_arg(group)
    group.add_argument("--tensorboard", action=AskTracker, const=summary_writer, nargs=0, default=False,
                       help="also write the metrics as TensorBoard event files, in the folder tensorboard of the run's")
    group.add_argument("--trackio", action=AskTracker, const=trackio_package, nargs=0, default=False,
                       help="also show the metrics to trackio, which keeps them on this machine, in TRACKIO_DIR")


def add_keep_arg(parser) -> None:
    """The flag of scripts that save several checkpoints."""
    parser.add_argument("--keep", type=at_least(0), default=1,
                        help="how many checkpoints to keep: older ones are removed once a newer one is whole on the "
                             "disk, but not the one that --resume-from-step names by its number, nor any that another "
                             "run started from; 0 = all")


class AskTracker(argparse.Action):
    """A flag without a value. const: a function that imports its package. Raises BadInput where that is missing."""

    def __call__(self, parser, namespace, *_) -> None:
        self.const()
        setattr(namespace, self.dest, True)


def summary_writer():
    """The class that writes TensorBoard's event files. Raises BadInput where its package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise BadInput(f"--tensorboard: {error}; run `pip install tensorboard`") from None
    return SummaryWriter


def trackio_package():
    """The module trackio. Raises BadInput where its package is missing."""
    try:
        import trackio
    except ImportError as error:
        raise BadInput(f"--trackio: {error}; run `pip install trackio`") from None
    return trackio


def start_trackio(name: str, config: dict):
    """A new run of trackio. One of that name that began when this one first did is what it showed before it was
    continued, and is removed: trackio cannot take back single steps. Raises BadInput."""
    trackio = trackio_package()
    try:
        with contextlib.suppress(ValueError):  # no run was ever shown
            for old in trackio.Api().runs(PROJECT):
                if old.name == name and (old.config or {}).get("started") == config["started"]:
                    old.delete()
        return trackio.init(PROJECT, name, config=config, resume="never", embed=False, auto_log_gpu=False,
                            auto_log_cpu=False)
    except Exception as error:  # of many types: a Space without a login, a server that does not answer
        raise BadInput(f"--trackio: it does not start: {error}") from None


def numbers_of(record: dict) -> dict[str, int | float]:
    """The finite numbers of a record but its step."""
    return {name: value for name, value in finite(record).items()
            if isinstance(value, int | float) and name != "step"}


def choose_run_name(name: str) -> str:
    """The run's name: for "dummy" the first dummy-<n> that no run and no model has. Raises BadInput."""
    check_name("--run", name)
    if name != "dummy":
        return name
    n = 1
    while os.path.exists(path_of("runs", f"dummy-{n}")) or glob.glob(path_of("rl", f"dummy-{n}-*")):
        n += 1
    return f"dummy-{n}"


def claim_run_name(name: str) -> str:
    """The run's name, for "dummy" with its folder made: another process then chooses another."""
    while (chosen := choose_run_name(name)) != name:
        with contextlib.suppress(FileExistsError):
            os.makedirs(path_of("runs", chosen))
            return chosen
    return name


def uses_wandb(run_name: str) -> bool:
    """A run goes to wandb unless it is a dummy or WANDB_MODE=disabled. Raises BadInput when it should and cannot."""
    mode = os.environ.get("WANDB_MODE", "online")
    if run_name.startswith("dummy") or mode == "disabled":
        return False
    if mode not in WANDB_MODES:
        raise BadInput(f"WANDB_MODE={mode}: must be one of {', '.join(WANDB_MODES)}")
    if mode == "online":
        import wandb
        try:
            has_key = wandb.login(prompt=False, verify=False)
        except Exception:  # a key that cannot be one
            has_key = False
        if not has_key:
            raise BadInput(f"--run {run_name}: wandb has no API key, or a wrong one; "
                           f"run `wandb login`, or set WANDB_MODE=offline or WANDB_MODE=disabled")
    return True


def lock_run(folder: str):
    """Takes a run's lock, held while the file is open. Raises BadInput when another process has it, CannotWrite."""
    path = os.path.join(folder, "lock")
    with writing(path):
        lock = open(path, "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise BadInput(f"{folder}: another process is at work on this run") from None
    return lock


def is_at_work(folder: str) -> bool:
    """Whether a process holds the lock of a run's folder. Leaves nothing after."""
    if not os.path.exists(os.path.join(folder, "lock")):
        return False
    try:
        lock_run(folder).close()
    except (BadInput, CannotWrite):
        return True
    return False


def look_at(folder: str) -> dict[str, int]:
    """What tells how far a run has come: its files of numbers, with the time of their last change in nanoseconds."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
        return {file.name: file.stat().st_mtime_ns for file in files if file.name.endswith((".pt", ".json", ".jsonl"))}
    return {}


def check_logs(run_name: str, logs: str, model: str) -> None:
    """Raises BadInput where the logs of --run are those of another model's training (its folder; "" in RL)."""
    other = model
    with contextlib.suppress(BadInput):  # there is none, or none that is whole
        other = read_json(os.path.join(logs, "config.json")).get("model", "")
    if other != model:
        raise BadInput(f"--run {run_name}: {logs} has the logs of {other or 'a run of RL'}: take another name")


def start_run(args, device: torch.device, config: dict, seen: dict[str, int], resumed: bool, model: str = "") -> Run:
    """Opens and locks the run's folder, writes config.json, catches SIGTERM, SIGINT and SIGHUP, and starts wandb where
    it is wanted. model: the folder of the one model that is trained, whose run this is: its logs are there too, unless
    --run names another place. seen: look_at(folder) from before it was decided where the run goes on. Raises BadInput
    where another process is at work on the run, or was since then, and for the logs of another one."""
    (rank, world), named = rank_and_world(), path_of("runs", args.run)
    about = model and os.path.relpath(model, base_dir())
    run = Run(args.run, device, rank, world, model or named, model if args.run == "dummy" else named,
              wants_events=args.tensorboard)
    if rank == 0:
        check_logs(args.run, run.logs, about)
        for folder in (run.folder, run.logs):
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise BadInput(f"cannot write to {folder} ({error.strerror})") from None
        run.lock = lock_run(run.folder)
        if look_at(run.folder) != seen:
            raise BadInput(f"{run.folder}: another process was at work on this run until just now; start this again")
        if uses_wandb(args.run):
            import wandb
            try:
                run.wandb = wandb.init(project=PROJECT, name=args.run, id=args.run, resume="allow",
                                       dir=run.logs, config=config)
            except Exception as error:  # of many types: a key that is none, a service that does not answer
                raise BadInput(f"--run {args.run}: wandb does not start: {error}; set WANDB_MODE=offline or "
                               f"WANDB_MODE=disabled") from None
        path = os.path.join(run.logs, "config.json")
        is_there = resumed and os.path.exists(path)
        config = read_json(path) if is_there else config | ({"model": about} if model else {})
        if args.trackio:
            run.trackio = start_trackio(os.path.relpath(run.logs, base_dir()), config)
        if not is_there:
            write_json(path, config)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the last one of a terminal that is closed
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's
            signal.signal(number, run.on_signal)
    return run


def describe_versions() -> dict:
    """Versions and commit, for config.json. The commit ends in -dirty where the files are not quite its; it is None
    where git does not keep this file: an installed package may lie inside another repository."""
    import subprocess
    here, name = os.path.split(os.path.abspath(__file__))
    ask = lambda *words: subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
    try:
        is_tracked = ask("ls-files", "--error-unmatch", name).returncode == 0
        commit = ask("rev-parse", "HEAD").stdout.strip() if is_tracked else ""
        status = ["--no-optional-locks", "status", "--porcelain", "--untracked-files=no"]
        commit += "-dirty" * bool(commit and ask(*status).stdout)
    except FileNotFoundError:  # no git on this machine
        commit = ""
    return {"version": __version__, "python": sys.version.split()[0], "torch": torch.__version__,
            "commit": commit or None, "started": datetime.datetime.now().isoformat(timespec="seconds")}
