"""
How the cost of an RL step grows: seconds and memory against completion length, prompt length, group size, vocabulary,
depth and number of roles, one at a time, from one base workload.

Each point is a process of its own (dev/bench/step.py), so that its memory is its own; points take turns, --rounds
times over, and medians are written to --out .csv and .png. The table says by how much cost grows where the quantity
doubles: 1.00 would be a straight line through zero, between 0 and 1 is a straight line with a fixed cost.

    OMP_NUM_THREADS=1 python dev/bench/growth.py --out dev/curves/growth/cpu
    python dev/bench/growth.py --device-type cuda --dtype bfloat16 --scale 8 --out dev/curves/growth/h100
"""
import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys

BASE = {"prompt-len": 64, "completion-len": 64, "num-samples": 8, "vocab-size": 512, "depth": 4, "num-roles": 1}
AXES = {"completion-len": (32, 64, 128, 256, 512), "prompt-len": (32, 64, 128, 256, 512, 1024),
        "num-samples": (2, 4, 8, 16, 32), "vocab-size": (512, 2048, 8192, 32768), "depth": (2, 4, 8, 16),
        "num-roles": (1, 2, 4)}
SCALED = {"prompt-len", "completion-len"}  # by --scale
COLUMNS = ("s_per_step", "gen_s", "update_s", "peak_mem_mb")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def measure(point: dict, args) -> dict:
    """The figures of one process. Raises CalledProcessError."""
    flags = [text for name, value in point.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "dev.bench.step", *flags, "--steps", "3", "--examples-per-step", "8",
               "--device-type", args.device_type, "--dtype", args.dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: found[name] for name in COLUMNS}


def growth(xs: list[float], ys: list[float]) -> float:
    """By which power of x y grows over the last doubling."""
    return math.log(ys[-1] / ys[-2]) / math.log(xs[-1] / xs[-2])


def draw(rows: list[dict], path: str) -> None:
    """A panel per quantity: seconds of sampling and update, and memory on an axis of its own."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, panels = plt.subplots(2, 3, figsize=(12, 6))
    for panel, axis in zip(panels.flat, AXES, strict=True):
        of_axis = [row for row in rows if row["axis"] == axis]
        xs = [row["value"] for row in of_axis]
        for name in ("gen_s", "update_s"):
            panel.plot(xs, [row[name] for row in of_axis], "o-", label=name)
        memory = panel.twinx()
        memory.plot(xs, [row["peak_mem_mb"] for row in of_axis], "s--", color="gray", label="MB")
        panel.set(xlabel=axis, ylabel="seconds", ylim=(0, None), xlim=(0, None))
        memory.set_ylim(0, None)
    panels[0, 0].legend(loc="upper left")
    figure.suptitle("an RL step; dashed, right: peak memory beyond the models, MB")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="path without ending")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1, help="multiplies the lengths")
    parser.add_argument("--device-type", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    scale = lambda name, value: value * args.scale if name in SCALED else value
    base = {name: scale(name, value) for name, value in BASE.items()}
    points = [(axis, scale(axis, value)) for axis, values in AXES.items() for value in values]
    found = {point: [] for point in points}
    for _ in range(args.rounds):
        for axis, value in points:
            found[axis, value].append(measure(base | {axis: value}, args))
    rows = [dict(axis=axis, value=value, **{name: statistics.median(one[name] for one in found[axis, value])
                                            for name in COLUMNS}) for axis, value in points]
    os.makedirs(os.path.dirname(os.path.abspath(args.out)), exist_ok=True)
    with open(f"{args.out}.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, f"{args.out}.png")
    print("| quantity | from - to | s per step | growth of sampling | of the update | of memory |")
    print("| --- | --- | --- | --- | --- | --- |")
    for axis in AXES:
        of_axis = [row for row in rows if row["axis"] == axis]
        xs, first, last = [row["value"] for row in of_axis], of_axis[0], of_axis[-1]
        powers = (f"{growth(xs, [row[name] for row in of_axis]):.2f}" for name in ("gen_s", "update_s", "peak_mem_mb"))
        print(f"| {axis} | {xs[0]} - {xs[-1]} | {first['s_per_step']:.2f} - {last['s_per_step']:.2f} | "
              f"{' | '.join(powers)} |")


if __name__ == "__main__":
    main()
