"""
The pictures of a report: its curves, and report.html, one file that opens offline.
"""
import json
import os
from importlib.resources import files
from statistics import mean, stdev

from nanochat.rl.report import ACCURACY, COLUMNS, EVALS, INDICATORS, Run, arm_order, cells

# Okabe and Ito's colours, which colour-blind readers can tell apart; arms beyond them start over with dashes, then with dots.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B59F00")
DASHES = {"none": "-", "6 3": "--", "2 2": ":"}  # SVG's and matplotlib's
PANELS = [(ACCURACY, "gen_step"), ("gen/pass1_out", "gen_step"), (ACCURACY, "sampled_tokens"),
          *((name, "ver_step") for name in EVALS if name.endswith(("_fixed", "_fixed_out"))), ("ver/step_f1_current", "gen_step"),
          *((name, "gen_step") for name in INDICATORS)]
AXES = {"gen_step": "generator step", "ver_step": "verifier step", "sampled_tokens": "sampled tokens"}
TITLES = EVALS | INDICATORS
HEALTH = ("frac_reward_zero_std", "completions/clipped_ratio", "step_abstained", "unscorable", "entropy", "grad_norm", "kl", "skipped",
          "parse_fail", "pred_pos_rate", "label_pos_rate", "balanced_acc", "verdicts/parse_fail", "verdicts/pred_pos_rate", "rollout_logprobs_diff_max")


def mean_curve(runs: list[Run], metric: str, x: str) -> list[tuple[float, float, float, int]]:
    """(mean x, mean, standard deviation, number of seeds) of an arm's runs, wherever any of them was evaluated: runs meet at equal (gen_step, ver_step)."""
    at: dict[tuple, list[dict]] = {}
    for point in (point for run in runs for point in run.points if point.get(metric) is not None):
        at.setdefault((point["gen_step"], point["ver_step"]), []).append(point)
    rows = []
    for _, here in sorted(at.items()):
        values = [point[metric] for point in here]
        rows.append((mean(point[x] for point in here), mean(values), stdev(values) if len(values) > 1 else 0.0, len(values)))
    return rows


def arms_of(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs by arm."""
    return {arm: [run for run in runs if run.arm == arm] for arm in sorted({run.arm for run in runs}, key=arm_order)}


def panels_of(runs: list[Run]) -> list[tuple]:
    """(metric, x, mean_curve by arm) of every panel that has a curve. runs: of one task."""
    panels = [(metric, x, {arm: mean_curve(of_arm, metric, x) for arm, of_arm in arms_of(runs).items()}) for metric, x in PANELS]
    return [panel for panel in panels if any(panel[2].values())]


def draw_curves(runs: list[Run], path: str) -> None:
    """One panel per metric: mean and standard deviation over seeds, one line per arm. runs: of one task."""
    import matplotlib  # here, since importing it makes its cache folder
    from matplotlib.figure import Figure
    panels, width = panels_of(runs), 4
    with matplotlib.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4 * width, 2.6 * -(-len(panels) // width)), layout="constrained")
        axes = figure.subplots(-(-len(panels) // width), width, squeeze=False).flatten()
        for axis, (metric, x, curves) in zip(axes, panels, strict=False):
            for i, (arm, points) in enumerate(curves.items()):
                if points:
                    xs, ys, spread, _ = zip(*points, strict=True)
                    style = dict(color=COLOURS[i % len(COLOURS)], linestyle=list(DASHES.values())[i // len(COLOURS) % len(DASHES)])
                    axis.plot(xs, ys, label=arm, linewidth=1.6, marker=".", markersize=4, **style)
                    axis.fill_between(xs, [y - s for y, s in zip(ys, spread, strict=True)], [y + s for y, s in zip(ys, spread, strict=True)],
                                      color=style["color"], alpha=0.15, linewidth=0)
            axis.set_title(TITLES[metric], fontsize=9)
            axis.set_xlabel(AXES[x])
            axis.grid(alpha=0.25)
        for axis in axes[len(panels):]:
            axis.set_visible(False)
        handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=8, frameon=False)
        figure.suptitle(f"{runs[0].task}: mean and standard deviation over up to {len({run.seed for run in runs})} seed(s)", fontsize=10)
        figure.savefig(path, dpi=90)


def marked_solution(rollout: dict) -> dict:
    """A logged rollout as the page shows it: the solution cut at its steps, each with verdict, gold label and mean advantage per token."""
    spans, ends, text = rollout["step_spans"], rollout["step_ends"], rollout["solution"]
    on_generator = rollout["role"] == "generator"
    verdicts = rollout.get("step_verdicts") or []
    steps, at = [], 0
    for k, (start, end) in enumerate(spans):
        first, last = (ends[k - 1] + 1 if k else 0), ends[k] + 1
        inside = rollout["advantages"][first:last] if on_generator else []
        steps.append({"before": text[at:start], "text": text[start:end], "label": rollout["step_labels"][k] if k < len(rollout["step_labels"]) else None,
                      "verdict": verdicts[k] if k < len(verdicts) else None, "advantage": round(mean(inside), 3) if inside else None})
        at = end
    tail = rollout["advantages"][ends[-1] + 1 if on_generator and ends else 0:]  # of a verification: all of it
    return {"role": rollout["role"], "step": rollout["step"], "problem": rollout["problem"], "gold": rollout["gold"], "steps": steps, "answer": text[at:],
            ("answer_advantage" if on_generator else "verification_advantage"): round(mean(tail), 3) if tail else None,
            "outcome": rollout["outcome"], "verdict": rollout.get("verdict"),
            "verification": rollout.get("verification"), "unmet": rollout.get("unmet") or [], "finish_reason": rollout["finish_reason"],
            "judged": rollout.get("verification") is not None}


def evenly(items: list, most: int) -> list:
    """At most `most` of the items, evenly spread."""
    return items if len(items) <= most else [items[i * len(items) // most] for i in range(most)]


def health(run: Run) -> list[dict]:
    """Health indicators of a run: the mean over the first and the last tenth of each role's steps."""
    rows = []
    for role, prefix in (("generator", "gen"), ("verifier", "ver")):
        records = [r for r in run.records if r["role"] == role]
        tenth = max(1, len(records) // 10)
        for name in (*HEALTH, *(n.removeprefix("gen/") for n in INDICATORS)):
            early, late = ([r[f"{prefix}/{name}"] for r in part if r.get(f"{prefix}/{name}") is not None] for part in (records[:tenth], records[-tenth:]))
            if early and late:
                rows.append({"name": f"{prefix}/{name}", "early": round(mean(early), 4), "late": round(mean(late), 4)})
    return rows


def write_page(runs: list[Run], rows: list[dict], path: str, most_rollouts: int) -> None:
    """report.html: curves, the comparison, settings, health indicators and rollouts of all runs; no file or address outside itself.

    rows: of `report.compare`. At most `most_rollouts` are shown, evenly spread over runs and steps; the page says of how many.
    """
    tasks = []
    for task in dict.fromkeys(run.task for run in runs):
        of_task = [run for run in runs if run.task == task]
        tasks.append({"name": task, "arms": list(arms_of(of_task)),
                      "panels": [{"title": TITLES[metric], "x": AXES[x], "curves": curves} for metric, x, curves in panels_of(of_task)],
                      "table": [cells(row) for row in rows if row["task"] == task]})
    data = {"columns": COLUMNS, "colours": COLOURS, "dashes": list(DASHES), "tasks": tasks, "runs": []}
    for run in runs:
        chosen = evenly(run.rollouts, most_rollouts // len(runs))
        data["runs"].append({"name": run.name, "settings": run.config["args"], "versions": {k: v for k, v in run.config.items() if k != "args"},
                             "minutes": run.summary["minutes"], "health": health(run),
                             "num_rollouts": len(run.rollouts), "rollouts": [marked_solution(r) for r in chosen]})
    # "<" never appears in the data: no text of a model can close the script element that holds it.
    text = json.dumps(rounded(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = files("nanochat.rl").joinpath("page.html").read_text(encoding="utf-8")
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write(template.replace("{{data}}", text))
    os.replace(path + ".tmp", path)


def rounded(value):
    """Floats to 5 significant digits, all the way down."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, (list, tuple)) else value
