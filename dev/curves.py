"""
Draws learning curves of finished runs of one set-up, one line per seed and their mean, and writes the numbers beside them.

    python dev/curves.py dev/curves/chain chain-s0 chain-s1 chain-s2      # -> chain.csv, chain.png
"""
import argparse
import csv
import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from nanochat.common import path_of

CURVES = {"gen_pass1_in": "generator pass@1, in distribution", "gen_pass1_out": "generator pass@1, longer problems",
          "ver_step_f1_fixed": "verifier step F1, fixed solutions", "ver_outcome_f1": "verifier outcome F1, fixed solutions"}


def read_run(name: str) -> list[dict]:
    """A run's evaluations, the last one from its summary."""
    with open(path_of("runs", name, "metrics.jsonl")) as f:
        records = [json.loads(line) for line in f]
    points = [{"run": name, "gen_step": r["gen_step"], "ver_step": r["ver_step"], **{c: r[f"eval/{c}"] for c in CURVES}}
              for r in records if "eval/gen_pass1_in" in r]
    with open(path_of("runs", name, "summary.json")) as f:
        summary = json.load(f)
    last = {"run": name, "gen_step": summary["gen_steps"], "ver_step": summary["ver_steps"], **{c: summary["after"][c] for c in CURVES}}
    return [*points, last]


def main(args) -> None:
    runs = [read_run(name) for name in args.runs]
    with open(args.out + ".csv", "w", newline="") as f:
        writer = csv.DictWriter(f, ["run", "gen_step", "ver_step", *CURVES])
        writer.writeheader()
        writer.writerows(point for run in runs for point in run)
    figure, axes = plt.subplots(1, len(CURVES), figsize=(4 * len(CURVES), 3.2), sharey=True)
    for axis, (name, title) in zip(axes, CURVES.items(), strict=True):
        step = "gen_step" if name.startswith("gen") else "ver_step"
        for run in runs:
            axis.plot([p[step] for p in run], [p[name] for p in run], color="tab:blue", alpha=0.35, marker=".")
        mean = [sum(run[i][name] for run in runs) / len(runs) for i in range(len(runs[0]))]
        axis.plot([p[step] for p in runs[0]], mean, color="tab:blue", linewidth=2)
        axis.set(title=title, xlabel="generator step" if step == "gen_step" else "verifier step", ylim=(0, 1))
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(args.out + ".png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="path without ending")
    parser.add_argument("runs", nargs="+", help="names of runs")
    main(parser.parse_args())
