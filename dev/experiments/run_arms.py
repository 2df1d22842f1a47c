"""
Runs a controlled experiment: arms that start from the same SFT checkpoints and see the same problems, seed by seed.
Then curves and a paired comparison. arms.py says what there is; fig4.sh and pays.sh start it.

    bash dev/experiments/fig4.sh --task last_letter --seeds "1 2" --steps 20 --arms "tango grpo"
    bash dev/experiments/pays.sh --dial pressure --settings kl0

A run is one process, JOBS of them at a time. What is finished is reused, what was interrupted goes on. The settings of
a dial share what they can, and are reported together.
"""
import argparse
import glob
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from dev.experiments.arms import (DIALS, LISTS, ONE_CHECKPOINT, PARTNERS, TASKS, Experiment, all_arms, arms_of,
                                  experiments_of, has_verifier, rl_flags, sft, without_kl, words_of)
from nanochat import recipes
from nanochat.common import BadInput, StopRequested, check_unchanged, flag_defaults, parse_flags, print0, script_main
from nanochat.rl.report.report import compare, dial_table, read_run
from nanochat.rl.run.flags import complete_args
from nanochat.storage.files import base_dir, check_writable, make_folder, path_of, whole_file, writing
from nanochat.storage.run import is_at_work
from scripts import chat_sft, tango_rl


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--task", help=f"one of: {', '.join(TASKS)}; default: chain, or the dial's")
    parser.add_argument("--seeds", default="1 2 3")
    parser.add_argument("--start", default="sft", help="sft, or refine: behind it a second SFT, of second attempts")
    parser.add_argument("--steps", help="of the generator; default: the task's, or the setting's")
    parser.add_argument("--arms", help="default: the main ones, or the dial's")
    parser.add_argument("--dial", help=f"one or more of: {', '.join(DIALS)}; default: none")
    parser.add_argument("--settings", help="of one dial; default: all")
    parser.add_argument("--out", default="dev/curves",
                        help="folder of the report; a dial's is in a folder of its name there (default: %(default)s)")
    parser.add_argument("--list", help=f"print one of the lists of arms ({', '.join(LISTS)}), or the flags of "
                        "every arm (of seed 0), and stop")
    flags = [flag for flag in parser._option_string_actions if flag not in ("-h", "--help")]
    parser.explain = lambda message: f"{message} (there are {', '.join(flags)})"
    return parser


# Jobs

RESUMABLE = ("scripts.chat_sft", "scripts.tango_rl")


@dataclass(frozen=True)
class Job:
    """One process. done: the pattern of the file in its folder that tells that it came to its end."""
    name: str
    module: str
    folder: str
    done: str
    flags: str

    @property
    def command(self) -> list[str]:
        run = ["--run", self.name] if self.module == "scripts.tango_rl" else []
        resume = ["--resume-from-step", "auto"] if self.module in RESUMABLE else []
        return [sys.executable, "-m", self.module, *run, *resume, *self.flags.split()]

    def is_done(self) -> bool:
        return bool(glob.glob(os.path.join(glob.escape(self.folder), self.done)))


def log_of(name: str) -> str:
    return os.path.join(base_dir(), "logs", name)


def sft_job(e: Experiment, seed: str, kind: str) -> Job:
    return sft_job_of(*sft(e, seed, kind))


def sft_job_of(tag: str, flags: str) -> Job:
    """The SFT with these flags, whose checkpoint has this tag."""
    steps = re.findall(r"--num-steps (\d+)", flags) or [chat_sft.make_parser().get_default("num_steps")]
    done = f"meta_{int(steps[-1]):06d}.json"  # one that was stopped has another step's
    return Job(f"sft-{tag}", "scripts.chat_sft", path_of("sft", tag), done, " ".join(flags.split()))


def rl_job(e: Experiment, seed: str, arm: str) -> Job:
    name = f"{e.name}-{arm}-s{seed}"
    return Job(name, "scripts.tango_rl", path_of("runs", name), "summary.json", rl_flags(e, seed, arm))


def stages_of(experiments: list[Experiment], seeds: list[str], arms: list[list[str]]) -> list[list[Job]]:
    """The SFTs of the generators, the SFTs that need them, and the runs; each job once. arms: of each experiment."""
    stages = [], [], []
    for e, names in zip(experiments, arms, strict=True):
        for arm in names:
            for seed in seeds:
                stages[0].append(sft_job(e, seed, "sft"))
                verifier = ["both"] if without_kl(arm) in ONE_CHECKPOINT else [arm] if has_verifier(arm) else []
                kinds = (["refine"] if e.start == "refine" else []) + verifier
                stages[1].extend(sft_job(e, seed, kind) for kind in kinds)
                stages[2].append(rl_job(e, seed, arm))
    return [list(dict.fromkeys(stage)) for stage in stages]


def keep_flags(job: Job) -> None:
    """Writes down what a job's folder is made with."""
    with whole_file(log_of(f"{job.name}.flags")) as f:
        f.write(job.flags + "\n")


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
    if not os.path.isdir(job.folder):
        return
    is_noted = os.path.isfile(path)
    if is_noted:
        with open(path) as f:
            if f.read().strip() != job.flags:
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
        print(f"failed: {shlex.join(job.command)} (see {log})\n{end}", end="", file=sys.stderr, flush=True)
    elif code == 0 and job.module == "scripts.tango_rl":
        print0(f"{time.strftime('%H:%M')} {job.name}")
    return code == 0


def carry_out_all(jobs: list[Job], num_at_once: int) -> bool:
    """Whether all jobs are done; one that fails does not keep the others. One whose flags are those of another, at
    another setting of a dial that does not concern it, is its copy. Raises StopRequested."""
    children, first = Children(), {}
    for job in sorted(jobs, key=lambda job: not job.is_done()):
        first.setdefault((job.module, job.flags), job)
    with children.stopped_by_signals(), ThreadPoolExecutor(num_at_once) as pool:
        futures = [pool.submit(carry_out, job, children) for job in sorted(first.values(), key=jobs.index)]
        while wait(futures, timeout=1).not_done:  # a signal that reached another thread is served when this one wakes
            pass
    if children.is_stopped:
        raise StopRequested("stopped; the same command goes on from here")
    are_done, num_copies = [future.result() for future in futures], 0
    for job in jobs:
        model = first[job.module, job.flags]
        if model.is_done() and not job.is_done():
            if is_at_work(job.folder):
                raise BadInput(f"{job.folder}: another process is at work on this run")
            part = f"{job.folder}.part"
            for old in (part, job.folder):
                shutil.rmtree(old, ignore_errors=True)
            with writing(job.folder):
                shutil.copytree(model.folder, part)
                keep_flags(job)
                os.rename(part, job.folder)
            num_copies += 1
    if num_copies:
        print0(f"{num_copies} runs are copies of others that have the same flags")
    return all(are_done)


# Reports

def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def cpu_name() -> str:
    lines = subprocess.run(["lscpu"], capture_output=True, text=True).stdout if shutil.which("lscpu") else ""
    found = re.search("^Model name: *(.+)$", lines, re.MULTILINE)
    return found[1] if found else platform.machine()


def report(name: str, runs: list[Job], out: str, first_line: str, partners: dict | None = None) -> bool:
    """Writes the report of the finished runs as <name>.md; whether there is one. partners: those of a dial's arms."""
    for run in runs:
        if not run.is_done():
            print(f"not finished, left out: {run.name}", file=sys.stderr, flush=True)
    finished = [run for run in runs if run.is_done()]
    if not finished:
        return False
    done = subprocess.run([sys.executable, "-m", "scripts.report", "--out", out, *(run.name for run in finished)],
                          stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return False
    make_folder(out)
    table = dial_table(compare([read_run(run.folder) for run in finished], partners)) if partners else ""
    text = "\n\n".join(filter(None, [first_line, table.strip(), done.stdout]))
    with whole_file(os.path.join(out, f"{name}.md")) as f:
        f.write(text)
    print0(text.removesuffix("\n"))
    return True


# The experiment

def jobs_at_once() -> int:
    """JOBS, or the number of cores. Raises BadInput."""
    given = os.environ.get("JOBS") or str(num_cores())
    if not re.fullmatch("[1-9][0-9]*", given):
        raise BadInput(f"JOBS {given}: must be a number from 1")
    return int(given)


def seeds_of(text: str) -> list[str]:
    """The seeds that --seeds names. Raises BadInput."""
    seeds = words_of("seeds", text)
    for seed in seeds:
        if not re.fullmatch("0|[1-9][0-9]{0,8}", seed):
            raise BadInput(f"--seeds {seed}: must be numbers from 0")
    return seeds


def make_tokenizer(at_once: int) -> bool:
    """Whether there is a tokenizer now."""
    return carry_out_all([Job("tokenizer", "scripts.tok_train", path_of("tokenizer"), "tokenizer.pkl",
                              "--task chain")], at_once)


def listed(args, experiments: list[Experiment]) -> list[str]:
    """The lines of --list."""
    if args.list in LISTS:
        return [" ".join(LISTS[args.list])]
    return [f"{f'{e.name}-{arm}' if args.dial else arm} {rl_flags(e, '0', arm)}"
            for e in experiments for arm in all_arms(e)]


def main(args) -> None:
    dials, at_once = experiments_of(args), jobs_at_once()
    experiments = list({e.name: e for group in dials.values() for e in group}.values())  # dials share a setting
    arms, seeds = [arms_of(e, args.arms) for e in experiments], seeds_of(args.seeds)
    if args.list:
        print0("\n".join(listed(args, experiments)))
        return
    stages = stages_of(experiments, seeds, arms)
    for job in itertools.chain(*stages):
        check_made_alike(job)
    folders = args.out, log_of("")
    for folder in folders:
        check_writable(folder)
    for folder in folders:
        make_folder(folder)
    if not (make_tokenizer(at_once) and all(carry_out_all(stage, at_once) for stage in stages[:2])):
        sys.exit(1)  # what comes next starts from it
    started = time.time()
    is_whole = carry_out_all(stages[2], at_once)
    command = shlex.join(["bash", f"runs/{'pays' if args.dial else 'fig4'}.sh", *sys.argv[1:]])
    first_line = (f"`{command}`, {num_cores()} cores of {cpu_name()}, {at_once} runs of one thread at a time; this "
                  f"call's RL took {(time.time() - started) // 60:.0f} minutes (finished runs are not run again).")
    for dial, group in dials.items():
        runs = [run for e in group for run in stages[2] if run.name.startswith(f"{e.name}-")]
        is_whole &= report(dial or group[0].name, runs, os.path.join(args.out, dial), first_line,
                           PARTNERS if dial else None)
    if not is_whole:
        sys.exit(1)


if __name__ == "__main__":
    script_main(main, make_parser())
