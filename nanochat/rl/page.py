"""
The pictures of a report: its curves, and report.html, one file that opens offline.
"""
import json
import os
from importlib.resources import files
from statistics import mean, stdev

from nanochat.rl.report import ACCURACY, COLUMNS, EVALS, HEALTH, INDICATORS, Run, arm_order, cells, is_count, steps_of
from nanochat.rl.roles import short_name

# Okabe and Ito's colours, which colour-blind readers can tell apart; arms beyond them start over with dashes, then with
# dots.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B59F00")
DASHES = {"none": "-", "6 3": "--", "2 2": ":"}  # SVG's and matplotlib's
PANELS = [(ACCURACY, "gen_step"), ("gen/pass1_out", "gen_step"), (ACCURACY, "sampled_tokens"),
          *((name, "ver_step") for name in EVALS if name.endswith(("_fixed", "_fixed_out"))),
          ("ver/step_f1_current", "gen_step"), *((name, "gen_step") for name in INDICATORS)]
TITLES = EVALS | INDICATORS  # a metric that is not among them is titled by its name
# What the page shows of a rollout in places of its own; other columns are facts.
ROLLOUT_PARTS = {"step", "role", "problem", "gold", "solution", "outcome", "step_labels", "step_spans", "step_ends",
                 "finish_reason", "advantages", "completion", "verification", "step_verdicts", "verdict", "unmet"}


def mean_curve(runs: list[Run], metric: str, x: str) -> list[tuple[float, float, float, int]]:
    """(mean x, mean, standard deviation, number of seeds) of an arm's runs, wherever any of them was evaluated: runs
    meet where all roles have made as many steps."""
    at: dict[tuple, list[dict]] = {}
    for point in (point for run in runs for point in run.points if point.get(metric) is not None and x in point):
        steps = tuple(count for name, count in point.items() if is_count(name) and name != "sampled_tokens")
        at.setdefault(steps, []).append(point)
    rows = []
    for _, here in sorted(at.items()):
        values = [point[metric] for point in here]
        rows.append((mean(point[x] for point in here), mean(values),
                     stdev(values) if len(values) > 1 else 0.0, len(values)))
    return rows


def arms_of(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs by arm."""
    return {arm: [run for run in runs if run.arm == arm] for arm in sorted({run.arm for run in runs}, key=arm_order)}


def panels_of(runs: list[Run]) -> list[tuple]:
    """(metric, x, mean_curve by arm) of every panel that has a curve: PANELS, then the metrics that have no place
    there, over the steps of their role. Over the solving role's, where no run has moved theirs. runs: of one task."""
    lasts = [run.points[-1] for run in runs]
    others = {name: steps_of(name, last) for last in lasts for name in last
              if not is_count(name) and name not in TITLES}
    moved = {name for last in lasts for name, count in last.items() if is_count(name) and count} | {"sampled_tokens"}
    panels = []
    for metric, x in (*PANELS, *others.items()):
        x = x if x in moved else "gen_step"
        panels.append((metric, x, {arm: mean_curve(of_arm, metric, x) for arm, of_arm in arms_of(runs).items()}))
    return [panel for panel in panels if any(panel[2].values())]


def axes_of(runs: list[Run]) -> dict[str, str]:
    """What the counts of steps and tokens are called."""
    axes = {f"{short_name(role)}_step": f"{role} step" for run in runs for role in run.roles}
    solvers = " or ".join(dict.fromkeys(run.solver for run in runs))
    return axes | {"gen_step": f"{solvers} step", "sampled_tokens": "sampled tokens"}


def draw_curves(runs: list[Run], path: str) -> None:
    """One panel per metric: mean and standard deviation over seeds, one line per arm. runs: of one task."""
    import matplotlib  # here, since importing it makes its cache folder
    from matplotlib.figure import Figure
    panels, labels, width = panels_of(runs), axes_of(runs), 4
    with matplotlib.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        num_rows = max(1, -(-len(panels) // width))
        figure = Figure(figsize=(4 * width, 2.6 * num_rows), layout="constrained")
        axes = figure.subplots(num_rows, width, squeeze=False).flatten()
        for axis, (metric, x, curves) in zip(axes, panels, strict=False):
            for i, (arm, points) in enumerate(curves.items()):
                if points:
                    xs, ys, spread, _ = zip(*points, strict=True)
                    style = dict(color=COLOURS[i % len(COLOURS)],
                                 linestyle=list(DASHES.values())[i // len(COLOURS) % len(DASHES)])
                    axis.plot(xs, ys, label=arm, linewidth=1.6, marker=".", markersize=4, **style)
                    axis.fill_between(xs, [y - s for y, s in zip(ys, spread, strict=True)],
                                      [y + s for y, s in zip(ys, spread, strict=True)],
                                      color=style["color"], alpha=0.15, linewidth=0)
            axis.set_title(TITLES.get(metric, metric), fontsize=9)
            axis.set_xlabel(labels[x])
            axis.grid(alpha=0.25)
        for axis in axes[len(panels):]:
            axis.set_visible(False)
        handles = {label: handle for axis in axes
                   for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=8, frameon=False)
        figure.suptitle(f"{runs[0].task}: mean and standard deviation over up to "
                        f"{len({run.seed for run in runs})} seed(s)", fontsize=10)
        figure.savefig(path, dpi=90)


def marked_solution(rollout: dict, solver: str = "generator") -> dict:
    """A logged rollout as the page shows it: the solution cut at its steps, each with verdict and gold label, and the
    mean advantages: of each step where the solution is what was learned from, else one of all of the text that was.
    solver: the role whose verified solutions are its own."""
    spans, ends, text = rollout["step_spans"], rollout["step_ends"], rollout["solution"]
    completion, verification = rollout.get("completion"), rollout.get("verification")
    is_own = completion is None and (rollout["role"] == solver or verification is None)
    verdicts = rollout.get("step_verdicts") or []
    steps, at = [], 0
    for k, (start, end) in enumerate(spans):
        inside = rollout["advantages"][ends[k - 1] + 1 if k else 0: ends[k] + 1] if is_own else []
        steps.append({"before": text[at:start], "text": text[start:end],
                      "label": rollout["step_labels"][k] if k < len(rollout["step_labels"]) else None,
                      "verdict": verdicts[k] if k < len(verdicts) else None,
                      "advantage": round(mean(inside), 3) if inside else None})
        at = end
    tail = rollout["advantages"][ends[-1] + 1 if is_own and ends else 0:]  # of what is not the solution: all of it
    learned = "answer" if is_own else "verification" if completion is None else "completion"
    return {"role": rollout["role"], "step": rollout["step"], "problem": rollout["problem"], "gold": rollout["gold"],
            "steps": steps, "answer": text[at:], "learned": learned,
            f"{learned}_advantage": round(mean(tail), 3) if tail else None, "completion": completion,
            "outcome": rollout["outcome"], "verdict": rollout.get("verdict"), "verification": verification,
            "unmet": rollout.get("unmet") or [], "finish_reason": rollout["finish_reason"],
            "judged": verification is not None,
            "facts": {name: v for name, v in rollout.items() if name not in ROLLOUT_PARTS and v is not None}}


def evenly(items: list, most: int) -> list:
    """At most `most` of the items, evenly spread."""
    return items if len(items) <= most else [items[i * len(items) // most] for i in range(most)]


def health(run: Run) -> list[dict]:
    """Health indicators of a run: the mean over the first and the last tenth of each role's steps; of all steps where
    the role was never updated."""
    scores = {**run.summary["before"], **run.summary["after"]}
    indicators = [name for name in run.points[-1] if not is_count(name) and name not in scores]
    rows = []
    for role in run.roles:
        records = [r for r in run.records if role in r["role"].split("+")] or run.records
        tenth, prefix = max(1, len(records) // 10), short_name(role) + "/"
        names = [prefix + name for name in (*HEALTH, *(n.removeprefix("gen/") for n in INDICATORS))]
        for name in dict.fromkeys([*names, *(n for n in indicators if n.startswith(prefix))]):
            early, late = ([r[name] for r in part if r.get(name) is not None]
                           for part in (records[:tenth], records[-tenth:]))
            if early and late:
                rows.append({"name": name, "early": round(mean(early), 4), "late": round(mean(late), 4)})
    without = [r.get("without_update", 0) for r in run.records]
    if any(without):
        tenth = max(1, len(without) // 10)
        early, late = (round(mean(part), 4) for part in (without[:tenth], without[-tenth:]))
        rows.append({"name": "without_update", "early": early, "late": late})
    return rows


def write_page(runs: list[Run], rows: list[dict], path: str, most_rollouts: int) -> None:
    """report.html: curves, the comparison, settings, health indicators and rollouts of all runs; no file or address
    outside itself.

    rows: of `report.compare`. At most `most_rollouts` are shown, evenly spread over runs and steps; the page says of
    how many.
    """
    tasks = []
    for task in dict.fromkeys(run.task for run in runs):
        of_task = [run for run in runs if run.task == task]
        labels = axes_of(of_task)
        tasks.append({"name": task, "arms": list(arms_of(of_task)),
                      "panels": [{"title": TITLES.get(metric, metric), "x": labels[x], "curves": curves}
                                 for metric, x, curves in panels_of(of_task)],
                      "table": [cells(row) for row in rows if row["task"] == task]})
    data = {"columns": COLUMNS, "colours": COLOURS, "dashes": list(DASHES), "tasks": tasks, "runs": []}
    for run in runs:
        chosen = evenly(run.rollouts, most_rollouts // len(runs))
        data["runs"].append({"name": run.name, "settings": run.config["args"],
                             "versions": {k: v for k, v in run.config.items() if k != "args"},
                             "minutes": run.summary["minutes"], "health": health(run),
                             "num_rollouts": len(run.rollouts),
                             "rollouts": [marked_solution(r, run.solver) for r in chosen]})
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
