"""
What finished runs say together, as numbers: their points, tidy rows, and a table that compares arms seed by seed.

An arm is what is compared (tango, grpo, ...), a run is one arm with one seed. Runs named <task>-<arm>-s<seed> are
compared within their task. Roles and scores are those that a run declares and logs, whatever its recipe; accuracy and
steps of a recipe's first role, where none is called generator, stand under gen/pass1_in, gen/pass1_out and gen_step.
"""
import csv
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import NormalDist, mean, stdev

from nanochat.common import BadInput, print0
from nanochat.hf.files import read_json
from nanochat.own_code import short
from nanochat.rl.learn.roles import short_name
from nanochat.rl.measure.scores import verdict_scores
from nanochat.rl.records.outcomes import reworded
from nanochat.rl.report.fields import as_written, is_number, number
from nanochat.storage.files import found_at, read_records, whole_file
from tasks import TASKS

BASELINE, ORACLE = "grpo", "gold_steps"
ACCURACY = "gen/pass1_in"
# metric: title of its panel. Evaluations are points in time; indicators are means over the steps since the evaluation
# before. Evaluations of other names, and what a recipe shows per step, get panels after these, under their names.
EVALS = {
    "gen/pass1_in": "generator pass@1, in distribution",
    "gen/pass1_out": "generator pass@1, out of distribution",
    "ver/step_f1_fixed": "verifier step F1, fixed solutions",
    "ver/step_f1_fixed_out": "verifier step F1, fixed, out of distribution",
    "ver/outcome_f1_fixed": "verifier outcome F1, fixed solutions",
    "ver/outcome_f1_fixed_out": "verifier outcome F1, fixed, out of distribution",
    "ver/balanced_acc_fixed": "verifier balanced accuracy, fixed solutions",
    "ver/step_f1_current": "verifier step F1, current solutions",
}
INDICATORS = {
    "gen/reward": "mean reward of the generator (each recipe's own)",
    "gen/completions/mean_length": "tokens per solution",
    "gen/entropy": "entropy of the generator, per token",
    "gen/verdicts/wrong_steps_passed": "wrong steps passed",
    "gen/verdicts/right_steps_blamed": "right steps blamed",
    "gen/verdicts/pos_rate_wrong": "wrong solutions judged right",
    "gen/verdicts/step_outcome_corr": "correlation of step verdicts with outcome",
    "gen/reasoning_steps": "steps per solution",
    "gen/step_length": "tokens per step",
    "gen/frac_ranking_reversed": "groups that step rewards reverse",
    "gen/step_label_mean": "right steps (gold labels)",
    "gen/rewards/step/mean": "right steps (as rewarded)",
}
# A verifier's other scores, which only summary.json and metrics.jsonl have, under any role's prefix.
NOT_DRAWN = ({f"{name}_{kind}" for name in verdict_scores([]) for kind in ("fixed", "fixed_out", "current")}
             - {name.partition("/")[2] for name in EVALS})
# 97.5% quantiles of Student's t, 1 to 10 degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass
class Run:
    """A run."""
    name: str
    task: str
    arm: str
    seed: int
    config: dict
    summary: dict
    points: list[dict]    # evaluations: <short>_step of every role, sampled_tokens, record: the run's step, metrics
    records: list[dict]   # one per step
    rollouts: list[dict]  # as sampled for the log
    examples: list[dict]  # the same held-out problems at every evaluation
    roles: list[str]

    @property
    def solver(self) -> str:
        """The role whose accuracy and steps the comparison is about."""
        return "generator" if "generator" in self.roles else self.roles[0]

    @property
    def words(self) -> dict[str, str]:
        """What its task says in place of general words; {} of an older run."""
        return self.config.get("words", {})

    @property
    def moved(self) -> set[str]:
        """The counts of roles' steps that are above 0 at its last point."""
        return {name for name, count in self.points[-1].items()
                if name.endswith("_step") and is_count(name) and count}


def run_folder(run: str) -> str:
    """The folder of a run, given by its name or as the folder. Raises BadInput where there is none."""
    folder = run if os.path.isdir(run) else found_at("runs", run)
    if not os.path.isdir(folder):
        raise BadInput(f"{run}: neither a folder nor a run ({folder})")
    return folder


def check_finished(folder: str) -> None:
    """Raises BadInput where a folder is no run's, or its run has not come to its end."""
    of_config, of_summary, of_records = (os.path.join(folder, file)
                                         for file in ("config.json", "summary.json", "metrics.jsonl"))
    if not os.path.exists(of_config):
        raise BadInput(f"{folder}: no config.json; is it the folder of a run?")
    if "model" in read_json(of_config):
        raise BadInput(f"{folder}: has the log of SFT or pretraining; there are reports of RL alone")
    if not os.path.exists(of_summary):
        num_steps = len(read_records(of_records)) if os.path.exists(of_records) else 0
        raise BadInput(f"{folder}: the run has not finished, it is at step {num_steps}")


def read_run(folder: str, so_far: dict | None = None, watched: list[str] | tuple = ()) -> Run:
    """Reads a run's folder. so_far: of a run that is under way, minutes and the evaluation `before`; watched: metrics
    that its points have beside those of every report. Raises BadInput where it is no finished run."""
    name = os.path.basename(os.path.abspath(folder))
    of_config, of_summary, *of_logs = (os.path.join(folder, file) for file in (
        "config.json", "summary.json", "metrics.jsonl", "rollouts.jsonl", "examples.jsonl"))
    of_records = of_logs[0]
    if so_far is None:
        check_finished(folder)
    config, summary = read_json(of_config), so_far or read_json(of_summary)
    records, rollouts, examples = ([record for _, record in read_records(path)] if os.path.exists(path) else []
                                   for path in of_logs)
    with as_written(of_config):
        task, seed, shown = short(config["args"]["task"]), number(config["args"], "seed"), config.get("shown") or ()
        starts = config.get("starts") or {"generator": {}, "verifier": {}}  # older runs do not name them
        for start in starts.values():
            for field in start.keys() & {"step", "fingerprint"}:
                number(start, field)
        of_files = [task, *(start["tag"] for start in starts.values() if "tag" in start)]
        texts = [*shown, *(text for pair in config.get("words", {}).items() for text in pair)]
        if not (all(re.fullmatch(r"[\w.-]+", name) for name in of_files)
                and all(isinstance(text, str) for text in texts)):
            raise ValueError
    found = set(summary).union(*records)  # a role that these flags have no use for was not loaded, and counts nothing
    roles = [role for role in starts
             if {f"{short_name(role)}_step", f"{short_name(role)}_steps"} & found] or list(starts)
    counts = {f"{short_name(role)}_step": f"{short_name(role)}_steps" for role in roles}
    counts["sampled_tokens"] = "sampled_tokens"
    for line, record in enumerate(records, 1):
        with as_written(f"{of_records}, line {line}"):
            record["role"].split("+")  # which `health` does
            for count in {"without_update", *counts} & record.keys():
                number(record, count)
    with as_written(of_summary):
        number(summary, "minutes")
        first, last = {**dict.fromkeys(counts, 0), **summary["before"]}, None
        if so_far is None:
            last = {**{name: number(summary, total) for name, total in counts.items()}, **summary["after"]}
            # older runs do not name their number of steps
            totals = ["steps"] if "steps" in summary else ["gen_steps", "ver_steps"]
            num_steps = sum(number(summary, total) for total in totals)
    if so_far is None and len(records) != num_steps:
        raise BadInput(f"{of_records}: {len(records)} records, but the run made {num_steps} steps")
    match, arm = re.fullmatch(r"(?P<task>\w+)-(?P<arm>.+)-s(?P<seed>\d+)", name), name
    if match and int(match["seed"]) == seed:
        task, arm = match["task"], match["arm"]
    points = evaluated(records, first, last, shown, watched)
    return Run(name, task, arm, seed, config, summary, points, records, rollouts, examples, roles)


def is_count(name: str) -> bool:
    """Whether a point has under this name how far the run is, not a metric."""
    return name in ("sampled_tokens", "record") or (name.endswith("_step") and "/" not in name)


def evaluated(records: list[dict], first: dict, last: dict | None,
              indicators: list[str] | tuple = (), watched: list[str] | tuple = ()) -> list[dict]:
    """The points of a run: its first evaluation, those among its records, its last one (None: it is under way), each
    with the means of indicators since the one before. first, last: counts and scores; watched: further metrics."""
    counts = [name for name in first if is_count(name) and name != "sampled_tokens"]
    solver = "gen" if "gen_step" in counts else counts[0].removesuffix("_step")
    known_as = {f"{solver}/pass1_{split}": f"gen/pass1_{split}" for split in ("in", "out")}
    end = first if last is None else last
    scores = [name for name in {**first, **end}
              if not is_count(name) and (is_number(first.get(name)) or is_number(end.get(name)))]
    always = [name for name in scores if name in first and name in end]
    marks = [f"{solver}/pass1_in"] if f"{solver}/pass1_in" in always else always  # what only evaluations have
    drawn = {name: name for name in EVALS}  # -> its name in the records
    drawn |= {known_as.get(name, name): name for name in scores
              if name in watched or name.partition("/")[2] not in NOT_DRAWN}
    indicators = [name for name in dict.fromkeys((*INDICATORS, *indicators, *watched)) if name not in drawn]
    points, since = [], []
    for record in [first, *records, *([] if last is None else [last])]:
        is_end = record is first or record is last  # the first record repeats the first evaluation
        if is_end or (record["step"] > 0 and marks and all(name in record for name in marks)):
            point = {"gen_step": record.get(f"{solver}_step", 0), "ver_step": 0}
            point |= {name: record.get(name, 0) for name in (*counts, "sampled_tokens")}
            point["record"] = 0 if record is first else record.get("step", len(records))
            point |= {name: record[logged] if is_number(record.get(logged)) else None for name, logged in drawn.items()}
            for name in indicators:
                values = [r[name] for r in since if is_number(r.get(name))]
                point[name] = mean(values) if values else None
            points.append(point)
            since = []
        since.append(record)
    return points


def steps_of(metric: str, moved: set[str]) -> str:
    """The count of the role that a metric is about; the solving role's where that one makes no updates: it is frozen,
    or one model with the solving role, whose updates are counted. moved: `Run.moved`."""
    name = f"{metric.partition('/')[0]}_step"
    return name if name in moved else "gen_step"


def tidy(runs: list[Run]) -> list[dict]:
    """One row per number: task, arm, seed, step (`steps_of`), sampled_tokens, metric, value."""
    return [{"task": run.task, "arm": run.arm, "seed": run.seed, "step": point[steps_of(metric, run.moved)],
             "sampled_tokens": point["sampled_tokens"], "metric": metric, "value": round(value, 5)}
            for run in runs for point in run.points for metric, value in point.items()
            if not is_count(metric) and value is not None]


def write_csv(rows: list[dict], path: str) -> None:
    """Writes rows of `tidy`. Raises CannotWrite."""
    with whole_file(path) as f:
        writer = csv.DictWriter(f, list(rows[0]) if rows else [])  # no rows: nothing was evaluated
        writer.writeheader()
        writer.writerows(rows)


def curve(run: Run, metric: str, x: str) -> tuple[list[float], list[float]]:
    """A metric's points over the steps of a role or sampled_tokens."""
    points = [(point[x], point[metric]) for point in run.points if point.get(metric) is not None]
    return [a for a, _ in points], [b for _, b in points]


def first_reach(xs: list[float], ys: list[float], level: float) -> float | None:
    """Where the line through the points first is at `level`; None where it never is."""
    if ys and ys[0] >= level:
        return xs[0]
    return next((x0 + (level - y0) / (y1 - y0) * (x1 - x0)
                 for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)) if y1 >= level), None)


def area_under(xs: list[float], ys: list[float]) -> float | None:
    """The mean height of the line through the points (trapezoids); None without points."""
    if not xs or xs[0] == xs[-1]:  # a generator that never moves
        return mean(ys) if ys else None
    areas = ((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)))
    return sum(areas) / (xs[-1] - xs[0])


def height_at(xs: list[float], ys: list[float], x: float) -> float | None:
    """The height of the line through the points at x; None where it ends before."""
    if not xs or x > xs[-1]:
        return None
    for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)):
        if x <= x1:
            return y0 + (x - x0) / (x1 - x0) * (y1 - y0) if x1 > x0 else y1
    return ys[-1]


def interval(values: list[float]) -> tuple[float, float | None]:
    """Mean and half-width of its 95% interval (Student's t); no width for a single value."""
    if len(values) < 2:
        return values[0], None
    degrees, z = len(values) - 1, NormalDist().inv_cdf(0.975)
    t = (STUDENT[degrees - 1] if degrees <= len(STUDENT)
         else z + (z ** 3 + z) / (4 * degrees) + (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96 * degrees ** 2))
    return mean(values), t * stdev(values) / len(values) ** 0.5


def recovered(gains: dict[int, float], oracle_gains: dict[int, float]) -> float | None:
    """The share of the oracle's mean gain over the baseline that an arm has, over the seeds that have both; None where
    the oracle's gain is not above two standard errors. gains: by seed."""
    seeds = sorted(gains.keys() & oracle_gains.keys())
    if len(seeds) < 2:
        return None
    oracle = [oracle_gains[s] for s in seeds]
    measurable = mean(oracle) > 2 * stdev(oracle) / len(seeds) ** 0.5
    return mean(gains[s] for s in seeds) / mean(oracle) if measurable and mean(oracle) > 0 else None


# Flags that may differ between the seeds of one arm.
PER_RUN = {"run", "seed", "resume_from_step", "save_every", "keep", "log_rollouts", "device_type",
           "micro_batch_tokens", "prefix_sharing", "tensorboard", "trackio"}


def counts_solver(run: Run) -> bool:
    """Whether --num-steps counts updates of the role that solves: not where that one stays as it was."""
    return run.config["args"].get("recipe") != "fixed_generator" and (not run.moved or "gen_step" in run.moved)


def check_comparable(runs: list[Run]) -> None:
    """Raises BadInput unless runs of one task have the same problems, evaluation and number of generator steps, those
    of one seed also the same starting generator, and those of one arm all flags that both know but PER_RUN and roles'
    checkpoints. Two texts of one arm's recipe are told."""
    for other, run in combinations(runs, 2):
        flags, others, apart = run.config["args"], other.config["args"], f"runs {run.name} and {other.name}"
        tasks = TASKS if flags["task"] == "mixture" else (flags["task"],)  # other tasks' flags change nothing
        same = {"task", "model_step", "eval_examples", "eval_every", "max_new_tokens"}
        same |= {"verifier_max_new_tokens"} & flags.keys() & others.keys()
        same |= {name for name in flags if name.startswith(tuple(f"{task}_" for task in tasks))}
        if counts_solver(run) and counts_solver(other):
            same.add("num_steps")
        if run.seed == other.seed:
            same.add("model_tag")
        if run.arm == other.arm:
            same |= {name for name in flags.keys() & others.keys() - PER_RUN if not name.endswith("_tag")}
        for name in sorted(same):
            if flags.get(name) != others.get(name):
                raise BadInput(f"{apart} cannot be compared: --{name.replace('_', '-')} {flags.get(name)} and "
                               f"{others.get(name)}")
        if run.arm == other.arm and differ(run.config.get("recipe_mark"), other.config.get("recipe_mark")):
            print0(f"WARNING: {apart} of one arm are of two texts of recipe {run.arm}")
        for what, value in unseen(run).items() if run.seed == other.seed else ():
            if differ(value, unseen(other)[what]):
                raise BadInput(f"{apart} cannot be compared: their {what} differ, under the same flags")


def differ(mark, other) -> bool:
    """Whether two marks are not the same; None, of an older version, says nothing."""
    return None not in (mark, other) and mark != other


def unseen(run: Run) -> dict:
    """What flags do not tell of a run: marks of its problems, their texts and its starting model."""
    start = (run.config.get("starts") or {}).get(run.solver) or {}
    return {"problems": run.config.get("problems"), "texts of problems": run.config.get("texts"),
            "starting models": start.get("fingerprint")}


def compare(runs: list[Run]) -> list[dict]:
    """One row per task and arm: what the table shows, each a list over seeds or a number. Differences are paired: same
    seed, problems and SFT checkpoint of the generator. Raises BadInput for runs that are not comparable."""
    rows = []
    for task in dict.fromkeys(run.task for run in runs):
        of_task = {(run.arm, run.seed): run for run in runs if run.task == task}
        if len(of_task) < sum(run.task == task for run in runs):
            raise BadInput(f"task {task}: two runs have the same arm and seed, or one is named twice")
        check_comparable(list(of_task.values()))
        finals = {key: {"final": run.points[-1][ACCURACY], "area": area_under(*curve(run, ACCURACY, "gen_step"))}
                  for key, run in of_task.items()}
        gains = {}  # (arm, kind) -> seed -> difference to the baseline
        for (arm, seed), numbers in finals.items():
            for kind, of_baseline in finals.get((BASELINE, seed), {}).items():
                if None not in (numbers[kind], of_baseline):
                    gains.setdefault((arm, kind), {})[seed] = numbers[kind] - of_baseline
        for arm in sorted({arm for arm, _ in of_task}, key=arm_order):
            mine = {seed: run for (a, seed), run in of_task.items() if a == arm}
            row = {"task": task, "words": next(iter(mine.values())).words, "arm": arm, "seeds": len(mine),
                   "final": [finals[arm, s]["final"] for s in mine],
                   "final_out": [run.points[-1]["gen/pass1_out"] for run in mine.values()],
                   "area": [finals[arm, s]["area"] for s in mine], "has_oracle": any(a == ORACLE for a, _ in of_task)}
            for kind in ("final", "area"):
                row[f"{kind}_gain"] = list(gains.get((arm, kind), {}).values())
                row[f"{kind}_recovered"] = recovered(gains.get((arm, kind), {}), gains.get((ORACLE, kind), {}))
            for unit, x in (("steps", "gen_step"), ("tokens", "sampled_tokens")):
                row[f"{unit}_ratio"] = [reach_ratio(mine[s], of_task[BASELINE, s], x) for s in mine
                                        if learned(of_task.get((BASELINE, s)))]
            row["at_equal_tokens"] = [at_equal_tokens(run, of_task[BASELINE, s]) for s, run in mine.items()
                                      if (BASELINE, s) in of_task]
            for name in ("ver/step_f1_fixed", "ver/outcome_f1_fixed"):
                row[name] = [(run.points[0][name], run.points[-1][name]) for run in mine.values()
                             if None not in (run.points[0][name], run.points[-1][name])]
            rows.append(row)
    return rows


def arm_order(arm: str) -> tuple:
    """Sorts arms: tango, the baseline, the others by name."""
    return arm != "tango", arm != BASELINE, arm


def arms_of(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs by arm."""
    return {arm: [run for run in runs if run.arm == arm] for arm in sorted({run.arm for run in runs}, key=arm_order)}


def learned(baseline: Run | None) -> bool:
    """Whether there is a baseline that ends above where it began: otherwise there is nothing to reach."""
    return baseline is not None and (baseline.points[-1][ACCURACY] or 0) > (baseline.points[0][ACCURACY] or 0)


def reach_ratio(run: Run, baseline: Run, x: str) -> float | None:
    """Where the run reaches the baseline's final accuracy, over where the baseline ends; None where it never does."""
    reached = first_reach(*curve(run, ACCURACY, x), baseline.points[-1][ACCURACY])
    return None if reached is None else reached / max(1, baseline.points[-1][x])


def at_equal_tokens(run: Run, baseline: Run, metric: str = ACCURACY) -> float | None:
    """A metric of the run when it had sampled as many tokens as the baseline in all; None where it ended before."""
    return height_at(*curve(run, metric, "sampled_tokens"), baseline.points[-1]["sampled_tokens"])


COLUMNS = ("arm", "seeds", "final", "out of distribution", "mean height", "final - GRPO", "height - GRPO",
           "steps / GRPO's", "tokens / GRPO's", "final at GRPO's tokens", "oracle's final gain", "oracle's height gain",
           "step F1", "outcome F1")


def spread(values: list[float | None]) -> str:
    """Mean and standard deviation in percent, None left out."""
    values = [v for v in values if v is not None]
    deviation = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return "-" if not values else f"{100 * mean(values):.1f}" + deviation


def paired(values: list[float], num_seeds: int) -> str:
    """Mean of paired differences and half of its 95% interval, in points; how many pairs, where a seed has none."""
    if not values:
        return "-"
    middle, half = interval(values)
    pairs = f" ({len(values)} pairs)" if len(values) < num_seeds else ""
    return f"{100 * middle:+.1f}" + (f" ± {100 * half:.1f}" if half is not None else "") + pairs


def missed(values: list[float | None], words: str) -> str:
    count = sum(v is None for v in values)
    return f" ({count} of {len(values)} {words})" if count else ""


def change(pairs: list[tuple[float, float]]) -> str:
    """First and last mean, in percent."""
    return "-" if not pairs else f"{100 * mean(a for a, _ in pairs):.1f} -> {100 * mean(b for _, b in pairs):.1f}"


def share(value: float | None, row: dict) -> str:
    """Of the oracle's gain, where there is an oracle."""
    if row["arm"] == BASELINE or not row["has_oracle"]:
        return "-"
    return "not measurable" if value is None else f"{100 * value:.0f}%"


def filled(columns: Sequence[str], table: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The columns that say something in some row, and the table of these."""
    kept = [i for i in range(len(columns)) if any(row[i] not in ("-", "not measurable") for row in table)]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in table]


def comparison(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """The `filled` COLUMNS of rows of one task, in its words."""
    return filled([reworded(column, rows[0]["words"]) for column in COLUMNS], [cells(row) for row in rows])


def cells(row: dict) -> list[str]:
    """A row of `compare` as the texts of COLUMNS, in percent and points."""
    def ratio(values):
        reached = [v for v in values if v is not None]
        return (f"{mean(reached):.2f}" if reached else "-") + missed(values, "never")

    def gain(values):
        return "-" if row["arm"] == BASELINE else paired(values, row["seeds"])

    return [row["arm"], str(row["seeds"]), spread(row["final"]), spread(row["final_out"]), spread(row["area"]),
            gain(row["final_gain"]), gain(row["area_gain"]), ratio(row["steps_ratio"]), ratio(row["tokens_ratio"]),
            spread(row["at_equal_tokens"]) + missed(row["at_equal_tokens"], "ended before"),
            share(row["final_recovered"], row), share(row["area_recovered"], row), change(row["ver/step_f1_fixed"]),
            change(row["ver/outcome_f1_fixed"])]


def provenance(runs: list[Run]) -> str:
    """One line: how many runs, how long they took together, of which commits and versions. A copy of a run, which says
    the other's name in its config, is not counted."""
    made = list({str(run.config["args"].get("run") or run.name): run for run in runs}.values())
    facts = [f"{name} {', '.join(sorted({str(run.config.get(name))[:46] for run in made}))}"
             for name in ("commit", "torch", "world")]
    minutes = sum(run.summary["minutes"] for run in made)
    count = (f"1 run, {minutes:.1f} minutes" if len(made) == 1 else
             f"{len(made)} runs, {minutes:.0f} minutes one after the other")
    return "; ".join([count, *facts])


def markdown_table(rows: list[dict]) -> str:
    """The comparison, one table per task, without columns that say nothing."""
    text = ""
    for task in dict.fromkeys(row["task"] for row in rows):
        columns, table = comparison([row for row in rows if row["task"] == task])
        text += f"\n{task}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n"
        text += "".join(f"| {' | '.join(row)} |\n" for row in table)
        if all(row["seeds"] == 1 for row in rows if row["task"] == task):
            text += "\nOne seed: differences have no interval, and show no order.\n"
    return text.lstrip("\n")
