"""
The processes of an experiment and how they are run: JOBS at a time, one that fails is told and does not keep the
others. What is finished is reused, what was interrupted goes on, and what was made with other flags is refused.
"""
import argparse
import glob
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from dev.experiments.arms import Experiment, Start
from nanochat import recipes
from nanochat.cli import check_unchanged, flag_defaults, parse_flags
from nanochat.common import BadInput, StopRequested, print0, printable
from nanochat.rl.run.flags import complete_args
from nanochat.storage.files import base_dir, path_of, whole_file, writing
from scripts import chat_sft, tango_rl

RESUMABLE = ("scripts.chat_sft", "scripts.tango_rl")


class Job(NamedTuple):
    """One process, of a module or a shell script. done: the pattern of the file in its folder that tells that it came
    to its end."""
    name: str
    module: str
    folder: str
    done: str
    flags: str

    @property
    def command(self) -> list[str]:
        if self.module.endswith(".sh"):
            return ["bash", self.module, *self.flags.split()]
        run = ["--run", self.name] if self.module == "scripts.tango_rl" else []
        resume = ["--resume-from-step", "auto"] if self.module in RESUMABLE else []
        return [sys.executable, "-m", self.module, *run, *resume, *self.flags.split()]

    def is_done(self) -> bool:
        return bool(glob.glob(os.path.join(glob.escape(self.folder), self.done)))


def check_one_word(what: str, path: str) -> None:
    """Raises BadInput for a path that cannot stand among flags in one string."""
    if len(path.split()) != 1:
        raise BadInput(f"{what} {path}: cannot be a path with spaces here, or none")


def job_of(e: Experiment, start: Start, seed: str) -> Job:
    """The process of a start, or of an arm, with one seed."""
    of_seed = {"seed": seed, "next": str(int(seed) % 3 + 1)}

    def name_of(other: Start) -> str:
        tag = other.tag.format(**of_seed)
        return path_of("labels", tag, "labels.jsonl") if other.kind == "labels" else tag

    tag, names = start.tag.format(**of_seed), {name: name_of(other) for name, other in e.starts.items()}
    flags = " ".join(start.flags.format(**of_seed, tag=name_of(start), **names).split())
    if start.kind == "run":
        return Job(tag, "scripts.tango_rl", path_of("runs", tag), "summary.json", flags)
    if start.kind == "import":
        return Job(f"import-{tag}", "runs/import_smollm2.sh", path_of("sft", tag), "meta_000000.json", flags)
    if start.kind == "labels":
        return Job(f"labels-{tag.partition('-')[2]}", "scripts.label_steps", path_of("labels", tag),
                   "labels.summary.json", flags)
    steps = re.findall(r"--num-steps (\d+)", flags) or [chat_sft.make_parser().get_default("num_steps")]
    done = f"meta_{int(steps[-1]):06d}.json"  # one that was stopped has another step's
    return Job(f"sft-{tag}", "scripts.chat_sft", path_of("sft", tag), done, flags)


def runs_of(e: Experiment, seeds: list[str]) -> list[Job]:
    """The runs of the arms."""
    return [job_of(e, Start("run", f"{e.name}-{arm}-s{{seed}}", flags), seed)
            for arm, flags in e.arms.items() for seed in seeds]


def needed(e: Experiment, flags: str) -> dict[str, int]:
    """Start that flags need, also by way of another -> how many others must be made before it, one after the other."""
    found: dict[str, int] = {}
    for name in re.findall(r"\{(\w+)\}", flags):
        if name not in ("seed", "next", "tag"):
            before = needed(e, e.starts[name].flags)
            found |= before | {name: max(before.values(), default=-1) + 1}
    return found


def stages_of(experiments: list[Experiment], seeds: list[str]) -> list[list[Job]]:
    """What must be done before what, the runs of the arms last; each job once."""
    stages: dict[int, list[Job]] = {}
    for e in experiments:
        for name, stage in needed(e, " ".join(e.arms.values())).items():
            stages.setdefault(stage, []).extend(job_of(e, e.starts[name], seed) for seed in seeds)
    runs = [run for e in experiments for run in runs_of(e, seeds)]
    return [list(dict.fromkeys(jobs)) for jobs in (*(stages[i] for i in sorted(stages)), runs)]


def starts_of_jobs(e: Experiment, seeds: list[str]) -> dict[Job, list[Job]]:
    """Each process of an experiment -> those that must be done before it."""
    found = {}
    for seed in seeds:
        jobs = [(job_of(e, start, seed), start.flags) for start in e.starts.values()]
        jobs += list(zip(runs_of(e, [seed]), e.arms.values(), strict=True))
        found |= {job: [job_of(e, e.starts[name], seed) for name in needed(e, flags)] for job, flags in jobs}
    return found


def log_of(name: str) -> str:
    return os.path.join(base_dir(), "logs", name)


# What a folder was made with

def noted(flags: str) -> str:
    """Flags without the place of NANOCHAT_BASE_DIR, which may be moved with all that is in it."""
    return flags.strip().replace(base_dir(), "{base}")


def keep_flags(job: Job) -> None:
    """Writes down what a job's folder is made with."""
    with whole_file(log_of(f"{job.name}.flags")) as f:
        f.write(noted(job.flags) + "\n")


def flags_of(job: Job) -> tuple[argparse.Namespace, dict]:
    """The flags that a job's script works with, also those that it fills in, and the defaults of all."""
    argv = job.flags.split()
    if job.module == "scripts.chat_sft":
        parser = chat_sft.make_parser()
        args = parse_flags(parser, argv)
        chat_sft.resolve_tags(args)
    else:
        parser = tango_rl.make_parser(argv)
        args = parse_flags(parser, argv)
        complete_args(args, recipes.load(args.recipe).ROLES)
    return args, flag_defaults(parser)


def check_made_alike(job: Job) -> None:
    """Raises BadInput where a job's folder was made with other flags: than were written down, or where that is gone,
    than its config.json has. And where it was continued by hand to another number of steps."""
    path, config = log_of(f"{job.name}.flags"), os.path.join(job.folder, "config.json")
    if not os.path.isdir(job.folder) or job.module.endswith(".sh"):  # smol.sh imports the same
        return
    is_noted = os.path.isfile(path)
    if is_noted:
        with open(path) as f:
            if noted(f.read()) != noted(job.flags):
                raise BadInput(f"{job.folder} was made with other flags (see {path}): set NANOCHAT_BASE_DIR to a new "
                               f"folder")
    try:
        with open(config, encoding="utf-8") as f:
            made = dict(json.load(f)["args"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        if is_noted:
            return
        raise BadInput(f"{path} is gone, and {config} does not tell which flags {job.folder} was made with: move that "
                       f"folder away, or set NANOCHAT_BASE_DIR to a new one") from None
    args, defaults = flags_of(job)
    if is_noted:
        made = vars(args) | {"num_steps": made.get("num_steps", args.num_steps)}
    try:
        check_unchanged("it", made, args, {"run", "resume_from_step"}, defaults)
    except BadInput as error:
        raise BadInput(f"{job.folder} was made with other flags ({config} has them): {error}; set NANOCHAT_BASE_DIR to "
                       f"a new folder") from None


# Processes

@dataclass
class Children:
    """The processes at work. After a signal they are told to stop, and no other starts."""
    running: set = field(default_factory=set)
    is_stopped: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)  # a second signal may come while one is served

    def stop(self, *_) -> None:
        with self.lock:
            self.is_stopped = True
            for child in self.running:
                child.terminate()

    @contextmanager
    def stopped_by_signals(self):
        before = {number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, job: Job) -> int | None:
        """The job's exit code; None where it was stopped or not started."""
        with self.lock:
            if self.is_stopped:
                return None
            keep_flags(job)
            path = log_of(f"{job.name}.log")
            with writing(path), open(path, "a") as log:  # another process may be at work on it
                child = subprocess.Popen(job.command, stdout=log, stderr=subprocess.STDOUT,
                                         env={**os.environ, "NANOCHAT_STOP_WITH_PARENT": str(os.getpid())})
            self.running.add(child)
        code = child.wait()
        with self.lock:
            self.running.remove(child)
            return None if self.is_stopped else code


def carry_out(job: Job, children: Children) -> bool:
    """Runs a job unless it is done; whether it is now."""
    code = 0 if job.is_done() else children.run(job)
    if code:
        log = log_of(f"{job.name}.log")
        with open(log, errors="replace") as f:
            end = "".join(f.readlines()[-3:])
        print(printable(f"failed: {shlex.join(job.command)} (see {log})\n{end}"), end="", file=sys.stderr, flush=True)
    elif code == 0 and job.module == "scripts.tango_rl":
        print0(f"{time.strftime('%H:%M')} {job.name}")
    return code == 0


def models_of(jobs: list[Job]) -> dict[Job, Job]:
    """Job -> the one that stands for all with its flags, as at settings of a dial that do not concern it: one that is
    finished, or begun, where there is one."""
    first: dict[tuple, Job] = {}
    for job in sorted(jobs, key=lambda job: (not job.is_done(), not os.path.isdir(job.folder))):
        first.setdefault((job.module, job.flags), job)
    return {job: first[job.module, job.flags] for job in jobs}


def carry_out_all(jobs: list[Job], num_at_once: int, after: dict[Job, list[Job]] | None = None) -> bool:
    """Whether all jobs are done; one that fails does not keep the others. after: jobs that come right after one, if it
    is done. Raises StopRequested."""
    children = Children()

    def carry_out_both(job: Job) -> bool:
        return carry_out(job, children) and all([carry_out(other, children) for other in (after or {}).get(job, [])])

    with children.stopped_by_signals(), ThreadPoolExecutor(num_at_once) as pool:
        futures = [pool.submit(carry_out_both, job) for job in dict.fromkeys(models_of(jobs).values())]
        while wait(futures, timeout=1).not_done:  # a signal that reached another thread is served when this one wakes
            pass
    if children.is_stopped:
        raise StopRequested("stopped; the same command goes on from here")
    return all([future.result() for future in futures])
