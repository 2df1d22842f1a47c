"""
How long ranks of a real run wait for each other, and what the lengths alone say: the check of dev.bench.ranks on CPU.

Run by torchrun this is tango_rl, and notes what each rank samples and trains, and its CPU seconds between collectives.
Cores may be fewer than ranks, or shared: at each collective a rank waits for as many CPU seconds as the slowest one
took more. The seconds that lengths say are fitted to the run with one rank: steps and rows of decoding (by
dev.bench.clock) and prompt tokens, tokens of updates with their padding.

    export OMP_NUM_THREADS=1
    for n in 1 2 4; do
        torchrun --standalone --nproc_per_node=$n dev/bench/waits.py -- notes$n --run waits$n --seed $n \\
            --model-tag pair --device-type cpu --num-steps 12 --warmup-steps 1 --eval-every 0 --eval-examples 8
    done
    python -m dev.bench.waits notes1 notes2 notes4
"""
import glob
import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np
import torch.distributed as dist

from dev.bench.clock import Policy, Steps, sampling
from nanochat.cli import script_main
from nanochat.common import print0, rank_and_world
from nanochat.rl.play import sampling as rl_sampling, updates as rl_updates
from scripts import tango_rl

ON_CPU = Policy(every=1, graphs=False)
PHASES = ("sampling", "update", "other")


# Noting

def sampling_costs(samples, model, prompts: list, num_samples: int, *, max_rows: int, **options) -> list[int]:
    """Of a call of engine.generate: steps, rows of all steps, tokens of prompts."""
    lengths, widths = samples.lengths.tolist(), list(map(len, prompts))
    groups = [lengths[i: i + num_samples] for i in range(0, len(lengths), num_samples)]
    steps = [event for event in sampling(groups, widths, max_rows, ON_CPU) if isinstance(event, Steps)]
    return [len(steps), sum(event.size for event in steps), sum(widths)]


def update_costs(metrics, role, batches: list, *given, **options) -> list[int]:
    """Of an update: tokens that go through the blocks."""
    return [sum(b.prompt_ids.numel() + b.tokens.numel() for b in batches)]


def noted(notes: list, phase: str, function: Callable, costs: Callable = lambda *given, **options: []) -> Callable:
    """The function, whose calls are noted: the phase, CPU seconds at start and end, costs."""
    def call(*given, **options):
        started = time.process_time()
        result = function(*given, **options)
        notes.append([phase, started, time.process_time(), costs(result, *given, **options)])
        return result
    return call


def main(args) -> None:
    """A run of tango_rl, and its notes."""
    notes: list[list] = []
    dist.all_reduce, dist.all_gather = (noted(notes, "wait", f) for f in (dist.all_reduce, dist.all_gather))
    rl_sampling.generate = noted(notes, "sampling", rl_sampling.generate, sampling_costs)
    rl_updates.update = noted(notes, "update", rl_updates.update, update_costs)
    tango_rl.make_step = noted(notes, "step", tango_rl.make_step)
    tango_rl.main(args)
    with open(f"{NOTES}.{rank_and_world()[0]}", "w") as f:
        json.dump(notes, f)


# Reading

def between_waits(notes: list[list]) -> list[tuple[str, float, list]]:
    """Of a rank, in its steps: each stretch between two collectives, by its phase, CPU seconds and costs."""
    found = []
    for _, first, last, _ in (note for note in notes if note[0] == "step"):
        waits = sorted(note[1:3] for note in notes if note[0] == "wait" and first <= note[1] and note[2] <= last)
        for start, end in zip([first, *(end for _, end in waits)], [*(start for start, _ in waits), last], strict=True):
            work = [note for note in notes if note[0] in PHASES and start <= note[1] < end]
            found.append((work[0][0] if work else "other", end - start, work[0][3] if work else []))
    return found


def fitted(notes: list[list]) -> dict[str, np.ndarray]:
    """Seconds per unit of each cost, from a run with one rank."""
    of = lambda phase: [note for note in notes if note[0] == phase and any(note[3])]
    return {phase: np.linalg.lstsq(np.array([note[3] for note in of(phase)], float),
                                   np.array([note[2] - note[1] for note in of(phase)]), rcond=None)[0]
            for phase in PHASES[:2]}


def waiting(ranks: list[list[tuple]], rates: dict) -> dict[str, list[float]]:
    """By phase: seconds of the slowest rank and seconds that a rank waits in the mean, measured; and as lengths say."""
    found = {phase: [0.0] * 4 for phase in PHASES}
    for stretches in zip(*ranks, strict=True):
        phase = min((phase for phase, _, _ in stretches), key=PHASES.index)
        measured = [seconds for _, seconds, _ in stretches]
        said = [float(np.dot(costs, rates[phase])) if costs else 0.0 for _, _, costs in stretches]
        for i, seconds in ((0, measured), (2, said)):
            found[phase][i] += max(seconds)
            found[phase][i + 1] += max(seconds) - sum(seconds) / len(seconds)
    return found


def read(path: str) -> list[list]:
    """The notes of all ranks."""
    files = sorted(glob.glob(f"{path}.*"), key=lambda name: int(name.rsplit(".", 1)[1]))
    return [json.load(open(name)) for name in files]


def compare(one: str, *others: str) -> None:
    rates = fitted(read(one)[0])
    for path in others:
        ranks = [between_waits(notes) for notes in read(path)]
        found = waiting(ranks, rates)
        found["sampling and update"] = [sum(x) for x in zip(found["sampling"], found["update"], strict=True)]
        for phase, (took, waited, said, said_waited) in found.items():
            by_lengths = f"; by lengths {said:.2f} s, {100 * said_waited / said:.1f}%" if said else ""
            print0(f"{path}, {len(ranks)} ranks, {phase}: {took:.2f} s, of which a rank waits "
                   f"{100 * waited / took:.1f}%{by_lengths}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        NOTES = sys.argv.pop(1)
        script_main(main, tango_rl.make_parser)
    elif glob.glob(f"{(sys.argv[1:] or [''])[0]}.[0-9]*"):
        compare(*sys.argv[1:])
    else:
        print("name the notes of runs, that with one rank first: see the docstring", file=sys.stderr)
        sys.exit(2)
