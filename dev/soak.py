"""
A long run and a run that is killed again and again: `bash runs/soak.sh` starts both.

    python dev/soak.py --minutes 60 kill -- COMMAND       # runs the command, and ends it by SIGTERM or SIGKILL, again
    python dev/soak.py compare chain-long-s0 chain-soak-s0     # whether two runs are the same, bit for bit
    python dev/soak.py plot chain-long-s0 --out dev/curves/soak     # memory, open files and seconds per step
"""
import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import torch

from nanochat.checkpoint import load_file, saved_steps
from nanochat.cli import script_main
from nanochat.common import BadInput
from nanochat.rl.learn.roles import short_name
from nanochat.rl.learn.state import tag_of
from nanochat.rl.run.resume import read_config
from nanochat.storage.files import path_of, read_records
from nanochat.storage.run import MEASURED

# of a state: what tells of the machine, and of how the files were written
CLOCKS = ("start_seconds", "step_seconds", "eval_seconds", "checksums")
SHOWN = {"resident_gb": "resident memory, GB", "open_files": "open files", "timing_s/step": "seconds per step"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("what", choices=["kill", "compare", "plot"])
    parser.add_argument("words", nargs="*", metavar="RUN or COMMAND", help="runs, or after -- a command")
    parser.add_argument("--minutes", type=float, default=60, help="how long a command is killed and started again")
    parser.add_argument("--seed", type=int, default=0, help="of the times and the signals")
    parser.add_argument("--out", default="dev/curves/soak", help="folder of the plot")
    return parser


def kill(command: list[str], minutes: float, seed: int) -> None:
    """Starts a command again and again, and ends it about a minute later by one of two signals, until it comes to its
    end, its flags cannot work, or the time is over. Says what became of each start."""
    rng, until, ends = random.Random(seed), time.time() + 60 * minutes, Counter()
    while time.time() < until:
        child, seconds = subprocess.Popen(command, stdout=subprocess.DEVNULL), rng.uniform(20, 100)
        how = rng.choice([signal.SIGTERM, signal.SIGKILL])
        try:
            child.wait(seconds)
            ends[f"ended by itself with {child.returncode}"] += 1
        except subprocess.TimeoutExpired:
            child.send_signal(how)
            sent = time.time()
            ends[f"{how.name}, code {child.wait()}"] += 1
            print(f"{how.name} after {seconds:.0f} s, gone in {time.time() - sent:.1f} s, code {child.returncode}")
        if child.returncode in (0, 2):  # done, or flags that cannot work
            break
    print("; ".join(f"{count} x {what}" for what, count in ends.items()))


def differences(a, b, where: str) -> list[str]:
    """Where two saved values differ, tensors in any bit."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [line for key in a for line in differences(a[key], b[key], f"{where}[{key!r}]")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [line for i, pair in enumerate(zip(a, b, strict=True)) for line in differences(*pair, f"{where}[{i}]")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8),
                                                                         b.reshape(-1).view(torch.uint8))
        return [] if same else [where]
    return [] if type(a) is type(b) and (a == b or a != a and b != b) else [where]


def compare(one: str, other: str) -> str:
    """Says at how many steps two runs are the same. Raises BadInput that names the first difference: in weights,
    optimizers, states, or what was logged."""
    steps = sorted({*saved_steps(one)} & {*saved_steps(other)})
    if not steps:
        raise BadInput(f"{one} and {other} have saved no step in common")
    for step in steps:
        states = [load_file(path_of("runs", run, f"state_{step:06d}.pt")) for run in (one, other)]
        found = differences(*({k: x for k, x in state.items() if k not in CLOCKS} for state in states),
                            f"state of step {step}")
        for role in read_config(one)["starts"]:
            names = [f"{kind}_{step:06d}{end}.pt" for kind, end in (("model", ""), ("optim", "_rank0"))]
            for name in names:
                paths = [path_of("rl", tag_of(run, role), name) for run in (one, other)]
                if any(map(os.path.exists, paths)):
                    found += differences(*map(load_file, paths), f"{short_name(role)}/{name}")
        if found:
            raise BadInput(f"{one} and {other} differ: {found[0]}")
    logs = [[{name: x for name, x in record.items() if not name.startswith(MEASURED)}
             for _, record in read_records(path_of("runs", run, "metrics.jsonl")) if record["step"] < steps[-1]]
            for run in (one, other)]
    if found := differences(*logs, "metrics.jsonl"):
        raise BadInput(f"{one} and {other} differ: {found[0]}")
    return (f"{one} and {other} are the same, bit for bit, at {len(steps)} saved steps up to {steps[-1]}, and in the "
            f"{len(logs[0])} records of metrics.jsonl before it, but for {', '.join(MEASURED)}")


def plot(run: str, out: str) -> None:
    """A csv and a png of what a run held and how long its steps took."""
    from matplotlib.figure import Figure
    records = [record for _, record in read_records(path_of("runs", run, "metrics.jsonl"))]
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, f"{run}.csv"), "w", newline="") as f:
        table = csv.DictWriter(f, ["step", "role", *SHOWN], extrasaction="ignore")
        table.writeheader()
        table.writerows(records)
    figure = Figure(figsize=(9, 6), layout="constrained")
    for axis, (name, label) in zip(figure.subplots(len(SHOWN), 1, sharex=True), SHOWN.items(), strict=True):
        for role in sorted({record["role"] for record in records}):
            points = [(record["step"], record[name]) for record in records if record["role"] == role]
            axis.plot(*zip(*points, strict=True), ".", markersize=3, label=f"{role} steps")
        axis.set_ylabel(label, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    figure.axes[0].legend(fontsize=8)
    figure.axes[-1].set_xlabel("step")
    figure.savefig(os.path.join(out, f"{run}.png"), dpi=90)


def main(args) -> None:
    if len(args.words) != 2 and args.what == "compare" or not args.words:
        raise BadInput(f"{args.what} needs {'two runs' if args.what == 'compare' else 'a run or a command'}")
    if args.what == "kill":
        kill(args.words, args.minutes, args.seed)
    elif args.what == "compare":
        print(compare(*args.words))
    else:
        for run in args.words:
            plot(run, args.out)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    script_main(main, make_parser())
