"""
The pictures of a report: its curves, and report.html, one file that opens offline.
"""
import json
import os
import textwrap
import time
from importlib.resources import files
from statistics import mean, stdev

from nanochat.rl.learn.roles import short_name
from nanochat.rl.report.cards import card, cards
from nanochat.rl.report.fields import as_written, is_number
from nanochat.rl.report.first_screen import latest, progress, records_of, well_and_ill
from nanochat.rl.report.report import (ACCURACY, EVALS, INDICATORS, Run, arms_of, compare, comparison, is_count,
                                       provenance, read_run, steps_of)
from nanochat.rl.report.titles import axis_of, difference_of, scale_of, scores_in, title_of, unit_of, value_of
from nanochat.storage.files import whole_file
from tasks import flags_of_others

# Those of Okabe and Ito's colours, which colour-blind readers can tell apart, that stand out on white and on black;
# arms beyond them start over with dashes, then with dots.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7F7F7F")
DASHES = {"none": "-", "6 3": "--", "2 2": ":"}  # SVG's and matplotlib's
PANELS = [(ACCURACY, "gen_step"), ("gen/pass1_out", "gen_step"), (ACCURACY, "sampled_tokens"),
          *((name, "ver_step") for name in EVALS if name.endswith(("_fixed", "_fixed_out"))),
          ("ver/step_f1_current", "gen_step"), *((name, "gen_step") for name in INDICATORS)]
# Where a generator that games its verifier shows it, beside its verdicts.
GAMED = {"gen/reasoning_steps", "gen/step_length", "gen/frac_ranking_reversed", "gen/step_label_mean",
         "gen/rewards/step/mean", "gen/wrong_passed"}
# What every role logs that tells whether it is well.
HEALTH = ("frac_reward_zero_std", "completions/clipped_ratio", "step_abstained", "unscorable", "entropy", "grad_norm",
          "kl", "skipped", "parse_fail", "pred_pos_rate", "label_pos_rate", "balanced_acc", "verdicts/parse_fail",
          "verdicts/pred_pos_rate", "rollout_logprobs_diff_max")
RELOAD_SECONDS = 20  # how often the page of a run that is under way reloads itself
MOST_ROLLOUTS = 600


def mean_curve(runs: list[Run], metric: str, x: str, in_order: bool = False) -> list[tuple]:
    """(mean x, mean, standard deviation, number of seeds, the first run's record) of an arm's runs at each evaluation:
    where all roles have made as many steps, or in_order at each one's n-th, as a role may have skipped updates."""
    at: dict[tuple, list[dict]] = {}
    for n, point in ((n, point) for run in runs for n, point in enumerate(run.points)
                     if point.get(metric) is not None and x in point):
        steps = tuple(count for name, count in point.items() if is_count(name) and name.endswith("_step"))
        at.setdefault((n,) if in_order else steps, []).append(point)
    rows = []
    for _, here in sorted(at.items()):
        values = [point[metric] for point in here]
        rows.append((mean(point[x] for point in here), mean(values),
                     stdev(values) if len(values) > 1 else 0.0, len(values), here[0]["record"]))
    return rows


def panels_of(runs: list[Run]) -> list[tuple]:
    """(metric, x, mean_curve by arm) of every panel that has a curve: PANELS, then the metrics that have no place
    there, over the steps of their role. Over the solving role's, where no run has moved theirs. runs: of one task."""
    moved, panels = {name for run in runs for name in run.moved}, []
    others = {name: steps_of(name, moved) for run in runs for name in run.points[-1]
              if not is_count(name) and name not in EVALS | INDICATORS}
    for metric, x in (*PANELS, *others.items()):
        x = x if x in moved | {"sampled_tokens"} else "gen_step"
        panels.append((metric, x, {arm: mean_curve(of_arm, metric, x) for arm, of_arm in arms_of(runs).items()}))
    return [panel for panel in panels if any(panel[2].values())]


def group_of(metric: str, runs: list[Run]) -> str:
    """The title of the group of panels that a metric stands in. runs: of one task."""
    if metric in EVALS or any(metric in scores_in(run) for run in runs):
        return "Held-out scores"
    if metric in GAMED or metric.startswith("gen/verdicts/"):
        return "Is the verifier being gamed?"
    roles = {short_name(role): role for run in runs for role in run.roles}
    return f"In training: {roles.get(metric.partition('/')[0], 'other')}"


def axes_of(runs: list[Run]) -> dict[str, str]:
    """What the counts of steps and tokens are called."""
    axes = {f"{short_name(role)}_step": f"{role} step" for run in runs for role in run.roles}
    solvers = " or ".join(dict.fromkeys(run.solver for run in runs))
    return axes | {"gen_step": f"{solvers} step", "sampled_tokens": "sampled tokens"}


def in_percent(metric: str, points: list[tuple]) -> list[tuple]:
    """Points of mean_curve as they are shown."""
    scale = scale_of(metric)
    return [(x, scale * y, scale * spread, *rest) for x, y, spread, *rest in points]


def draw_curves(runs: list[Run], path: str, watched: dict[str, str] | None = None) -> None:
    """One panel per metric: mean and standard deviation over seeds, one line per arm. runs: of one task; watched: the
    metrics to draw, over sampled tokens, and their titles. Raises CannotWrite."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook names its own, which need not be there
    import matplotlib  # here, since importing it makes its cache folder
    from matplotlib.figure import Figure
    panels, titles, labels, width = panels_of(runs), {}, axes_of(runs), 4
    if watched is not None:
        titles, width = watched, min(4, len(watched))
        panels = [(metric, "sampled_tokens", {arm: mean_curve(of_arm, metric, "sampled_tokens", in_order=True)
                                              for arm, of_arm in arms_of(runs).items()}) for metric in watched]
    with matplotlib.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        num_rows = max(1, -(-len(panels) // width))
        figure = Figure(figsize=(4 * width, 2.6 * num_rows), layout="constrained")
        axes = figure.subplots(num_rows, width, squeeze=False).flatten()
        for axis, (metric, x, curves) in zip(axes, panels, strict=False):
            for i, (arm, points) in enumerate(curves.items()):
                if points:
                    xs, ys, spread, _, _ = zip(*in_percent(metric, points), strict=True)
                    style = dict(color=COLOURS[i % len(COLOURS)],
                                 linestyle=list(DASHES.values())[i // len(COLOURS) % len(DASHES)])
                    axis.plot(xs, ys, label=arm, linewidth=1.6, marker=".", markersize=4, **style)
                    axis.fill_between(xs, [y - s for y, s in zip(ys, spread, strict=True)],
                                      [y + s for y, s in zip(ys, spread, strict=True)],
                                      color=style["color"], alpha=0.15, linewidth=0)
            axis.set_title(textwrap.fill(titles.get(metric) or title_of(metric, runs[0]), 48), fontsize=9)
            axis.set_ylabel(unit_of(metric))
            if axis_of(metric):
                axis.set_ylim(*(scale_of(metric) * end for end in axis_of(metric)))
            axis.set_xlabel(labels[x])
            axis.locator_params(axis="x", nbins=5)
            axis.grid(alpha=0.25)
        for axis in axes[len(panels):]:
            axis.set_visible(False)
        handles = {label: handle for axis in axes
                   for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=8, frameon=False)
        figure.suptitle(f"{runs[0].task}: mean and standard deviation over up to "
                        f"{len({run.seed for run in runs})} seed(s)", fontsize=10)
        with whole_file(path, "wb") as f:
            figure.savefig(f, format="png", dpi=90)


def health(run: Run) -> list[dict]:
    """Health indicators of a run: means over the first and the last tenth of each role's steps, or of all steps."""
    scores = {**run.summary["before"], **run.summary.get("after", {})}  # no after yet: it is under way
    indicators = [name for name in run.points[-1] if not is_count(name) and name not in scores]
    rows = []

    def add(name: str, records: list[dict]) -> None:
        tenth = max(1, len(records) // 10)
        early, late = ([r[name] for r in part if is_number(r.get(name))]
                       for part in (records[:tenth], records[-tenth:]))
        if early and late:
            rows.append({"name": name, "early": round(mean(early), 4), "late": round(mean(late), 4)})

    for role in run.roles:
        records, prefix = records_of(run, role), short_name(role) + "/"
        names = [prefix + name for name in (*HEALTH, *(n.removeprefix("gen/") for n in INDICATORS))]
        for name in dict.fromkeys([*names, *(n for n in indicators if n.startswith(prefix))]):
            add(name, records)
    if any(r.get("without_update") for r in run.records):
        add("without_update", [{"without_update": r.get("without_update", 0)} for r in run.records])
    return rows


def scores_of(run: Run) -> list[list[str]]:
    """What the held-out evaluations of a run say: name, first, last and change, as texts."""
    rows = []
    for name in scores_in(run):
        values = [point[name] for point in run.points if point.get(name) is not None]
        rows.append([title_of(name, run), value_of(name, float(values[0])), value_of(name, float(values[-1])),
                     difference_of(name, values[-1] - values[0])])
    return rows


def task_of_page(of_task: list[Run], rows: list[dict]) -> dict:
    """The curves and the comparison of the runs of one task; a single run has none to be compared with."""
    labels, groups = axes_of(of_task), {}
    for metric, x, curves in panels_of(of_task):
        groups.setdefault(group_of(metric, of_task), []).append(
            {"title": title_of(metric, of_task[0]) + ", by tokens" * (x == "sampled_tokens"),
             "x": labels[x], "unit": unit_of(metric),
             "range": axis_of(metric) and [scale_of(metric) * end for end in axis_of(metric)],
             "curves": {arm: in_percent(metric, points) for arm, points in curves.items()}})
    columns, table = comparison([row for row in rows if row["task"] == of_task[0].task])
    return {"name": of_task[0].task, "arms": list(arms_of(of_task)), "progress": progress(of_task), "groups": groups,
            "columns": columns, "table": table if len(of_task) > 1 else []}


def run_of_page(run: Run, most_rollouts: int) -> dict:
    """What the page shows of one run."""
    args = run.config["args"]
    settings = {name: value for name, value in args.items() if not name.startswith(flags_of_others(args["task"]))}
    with as_written(f"{run.name}: rollouts.jsonl"):
        rollouts = cards(run.rollouts, run.solver, most_rollouts)
    with as_written(f"{run.name}: examples.jsonl"):
        examples = [card(example, run.solver) for example in run.examples]
    with as_written(f"{run.name}: {'examples' if run.examples else 'rollouts'}.jsonl"):
        now = latest(run)
    return {"name": run.name, "task": run.task, "arm": run.arm, "settings": settings, "latest": now,
            "versions": {k: v for k, v in run.config.items() if k != "args"}, "minutes": run.summary["minutes"],
            "scores": scores_of(run), "health": health(run), "num_rollouts": len(run.rollouts),
            "rollouts": rollouts, "examples": examples}


def write_page(runs: list[Run], rows: list[dict], path: str, most_rollouts: int = MOST_ROLLOUTS,
               live: dict | None = None) -> None:
    """report.html, whole or not at all, without any address outside itself: the first screen, curves, scores or a
    comparison, settings, health indicators and about `most_rollouts` rollouts. rows: of `report.compare`; live: of a
    run that is under way, {"state": what it is doing, "minutes_left", "is_alive"}: then the page reloads itself."""
    tasks = [task_of_page([run for run in runs if run.task == task], rows)
             for task in dict.fromkeys(run.task for run in runs)]
    title = ", ".join(run.name for run in runs[:3]) + (f" and {len(runs) - 3} more" if runs[3:] else "")
    data = {"title": title, "made": provenance(runs), "about": runs[0].config.get("about"),
            "live": live and {**live, "every": RELOAD_SECONDS, "written": int(time.time())},
            "colours": COLOURS, "dashes": list(DASHES), "tasks": tasks, "health": well_and_ill(runs),
            "runs": [run_of_page(run, most_rollouts // len(runs)) for run in runs]}
    template = files("nanochat.rl.report").joinpath("page.html").read_text(encoding="utf-8")
    with whole_file(path) as f:
        f.write(template.replace("{{data}}", embedded(data)))


def embedded(data) -> str:
    """Data as JSON for a page's script element. "<" never appears in it: no text of a model can close the element."""
    return json.dumps(rounded(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def write_run_page(folder: str, so_far: dict | None, live: dict | None = None) -> str:
    """report.html in a run's folder, which it returns. so_far: of `report.read_run`, None once it is finished."""
    run, path = read_run(folder, so_far), os.path.join(folder, "report.html")
    write_page([run], compare([run]), path, live=live)
    return path


def rounded(value):
    """Floats to 5 significant digits, all the way down."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, (list, tuple)) else value
