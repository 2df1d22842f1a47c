"""
The README's figure, of SmolLM2-135M: a solution with its verdicts before and after RL, and how accuracy grew with the
sampled tokens.

    python dev/make_figure.py    # from dev/results/tango.md and dev/curves/smol/smol.csv to dev/curves/readme.png
"""
import csv
import os
import re
from statistics import mean

import matplotlib
from matplotlib.figure import Figure

DEV = os.path.dirname(os.path.abspath(__file__))
ARMS = {"longer": ("GRPO, Tango's tokens", "#7F7F7F"), "tango": ("Tango: both trained", "#0072B2"),
        "fixed_verifier": ("untrained verifier", "#009E73"), "grpo_tenth": ("GRPO, 60 steps", "#D55E00")}
ANSWER = "204"  # of the solution that is shown
SHOWN = {"before RL": 1, "after RL": 3}  # column of the page's table of solutions
VERDICTS = {"right": ("✓", "#009E73"), "wrong": ("✗", "#D55E00")}


def solutions() -> dict[str, list[tuple[str, bool, str]]]:
    """Of each time of SHOWN the steps of the solution: text, whether it is right, the verifier's verdict."""
    with open(os.path.join(DEV, "results", "tango.md"), encoding="utf-8") as f:
        cells = next(line for line in f if line.startswith(f"| {ANSWER} |")).split("|")[1:]
    return {when: [(text, not star, verdict) for text, star, verdict
                   in re.findall(r"([\d+*/.=-]+?)(\*?) \((right|wrong)\)", cells[column])]
            for when, column in SHOWN.items()}


def points() -> dict[str, list[list[tuple[float, float]]]]:
    """Of each arm and seed, (sampled tokens in millions, sampled accuracy in percent) at its evaluations."""
    found: dict[str, dict[str, list]] = {}
    with open(os.path.join(DEV, "curves", "smol", "smol.csv"), encoding="utf-8") as f:
        for row in csv.DictReader(f):
            if row["metric"] == "gen/sampled_in" and row["arm"] in ARMS:
                point = float(row["sampled_tokens"]) / 1e6, 100 * float(row["value"])
                found.setdefault(row["arm"], {}).setdefault(row["seed"], []).append(point)
    return {arm: [sorted(of_seed) for of_seed in seeds.values()] for arm, seeds in found.items()}


def draw_solutions(axis) -> None:
    """The steps below each other on the colour of the verifier's verdict, with a note where that is mistaken."""
    axis.axis("off")
    axis.set(title="a held-out problem, solved greedily", xlim=(0, 1), ylim=(0, 1))
    height, first = 0.99, None
    for when, steps in solutions().items():
        first = first or steps
        axis.text(0, height, when, weight="bold", va="top")
        for (text, is_right, verdict), (asked, _, _) in zip(steps, first, strict=True):
            height -= 0.125
            whole = text if "=" in text else f"{asked.partition('=')[0]}={text}"  # the page repeats no calculation
            mark, colour = VERDICTS[verdict]
            axis.text(0.03, height, f"{mark} {whole:12s}", va="top", family="DejaVu Sans Mono",
                      bbox={"facecolor": colour, "alpha": 0.25, "edgecolor": "none", "pad": 2})
            is_mistaken = is_right != (verdict == "right")
            axis.text(0.36, height, f"verdict: {verdict}" + f", mistaken: {text} is not" * is_mistaken, va="top")
        height -= 0.135
        axis.text(0.03, height, f"answer {whole.partition('=')[2]}, and {ANSWER} is right", va="top", color="#555555")
        height -= 0.14


def draw_points(axis) -> None:
    """The mean over seeds from start to end, and each seed's points."""
    for (label, colour), seeds in ((ARMS[arm], seeds) for arm, seeds in points().items()):
        xs, ys = ([mean(values) for values in zip(*([point[i] for point in seed] for seed in seeds), strict=True)]
                  for i in (0, 1))
        axis.plot(xs, ys, color=colour, label=label)
        axis.plot(*zip(*(point for seed in seeds for point in seed), strict=True), ".", color=colour, alpha=0.7)
    axis.set(title="held-out problems, sampled: % right", xlabel="sampled tokens, millions")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="upper left")


def main() -> None:
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.6, 3.1), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_solutions(left)
        draw_points(right)
        figure.savefig(os.path.join(DEV, "curves", "readme.png"), dpi=110)


if __name__ == "__main__":
    main()
