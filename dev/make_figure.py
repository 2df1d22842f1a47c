"""
The README's figure, from the curves of the controlled experiment on chain with the defaults' step rewards.

    python dev/make_figure.py      # reads dev/curves/merged/chain.csv, writes dev/curves/readme.png
"""
import csv
import os
from statistics import mean, stdev

import matplotlib
from matplotlib.figure import Figure

CURVES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "curves")
ARMS = {"grpo": ("GRPO, no verifier", "#7F7F7F"), "fixed_merged": ("verifier that stays as SFT left it", "#009E73"),
        "tango_merged": ("Tango: generator and verifier trained", "#0072B2"),
        "gold_steps": ("gold step labels (an oracle)", "#E69F00")}
PANELS = {"gen/pass1_in": ("the generator: held-out problems solved, %", "generator step"),
          "ver/step_f1_fixed": ("the verifier: F1 of its step verdicts, %", "verifier step")}


def main() -> None:
    with open(os.path.join(CURVES, "merged", "chain.csv"), encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.6, 3.1), layout="constrained")
        for axis, (metric, (title, x)) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
            for arm, (label, colour) in ARMS.items():
                at: dict[int, list[float]] = {}
                for row in rows:
                    if (row["arm"], row["metric"]) == (arm, metric):
                        at.setdefault(int(row["step"]), []).append(100 * float(row["value"]))
                if len(at) < 2:  # no verifier, or one that makes no steps
                    continue
                middle, spread = ([f(values) for values in at.values()] for f in (mean, stdev))
                axis.plot(list(at), middle, color=colour, label=label, marker=".")
                axis.fill_between(list(at), [m - s for m, s in zip(middle, spread, strict=True)],
                                  [m + s for m, s in zip(middle, spread, strict=True)], color=colour, alpha=0.15, lw=0)
            axis.set(title=title, xlabel=x, ylim=(0, 100))
            axis.grid(alpha=0.25)
        figure.axes[1].legend(*figure.axes[0].get_legend_handles_labels(), frameon=False, loc="lower right")
        figure.savefig(os.path.join(CURVES, "readme.png"), dpi=110)


if __name__ == "__main__":
    main()
