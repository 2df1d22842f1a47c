"""
The league's table, made from its store. A row is a system at a task: its runs with one budget and one learning rate, on
the seeds that count. ± after a mean is the standard deviation over seeds, after a difference half of its 95% interval
(Student's t, paired by seed).
"""
import csv
import json
import math
import os
import re
from statistics import mean
from typing import NamedTuple

from dev.experiments.league_systems import BASELINE, SYSTEMS, TASKS, TUNING_SEEDS, WEIGHTED
from nanochat.common import BadInput
from nanochat.own_code import is_file
from nanochat.rl.report.report import change, height_at, interval, paired, spread

FELL, RISEN = 0.10, 0.05  # of what is solved, below the best evaluation; of a reward
CURVES = {"gen/pass1_in": "solved", "gen/pass1_out": "solved, longer problems", "ver/step_f1_fixed": "step F1",
          "ver/balanced_acc_fixed": "balanced accuracy of verdicts"}
GRID = 40  # parts of the axis of tokens at whose ends a mean over seeds is taken
SAMPLED = ", ".join(name for name, task in TASKS.items() if task.scoring)  # tasks whose scores are by sampling
COLUMNS = {
    "task": "", "system": "", "learns from": "", "seeds": "",
    "start": "what is solved before the run, in percent: mean over seeds",
    "solved": "held-out problems after the run, in percent: mean ± standard deviation over seeds. Greedy; at "
              f"{SAMPLED} the mean of samples",
    "minus GRPO": "points, paired by seed, ± half of the 95% interval; bold where that, unrounded, leaves out zero",
    f"minus {WEIGHTED}": "the same. Step rewards come with this weight of wrong answers, so their own lead is over it",
    "longer problems minus GRPO": "points, on problems that are longer than any in RL; at words on unseen templates",
    f"longer problems minus {WEIGHTED}": "the same",
    "step F1": "of the verifier on fixed solutions, before -> after, in percent",
    "wrong steps passed": "by the verifier in training, in percent: first -> last third of the steps",
    "tokens (k)": "sampled by all roles and in the training of a judge: mean over seeds, in thousands",
    "minutes": "of the run on one core, and of a judge's training: mean over seeds",
    "gaming": f"on how many seeds. 'fell': its curve of three points or more ends {100 * FELL:.0f} points or more "
              f"below its best. 'reward up, solved down': its reward rises by {RISEN} or more, and it solves less than "
              "before",
    "rate": "the generator's learning rate"}


# The store

WORDS = {"task", "system", "rate", "commit", "torch", "flags", "metric"}  # columns of the csvs that are no numbers


def read_rows(path: str) -> list[dict]:
    """The lines of a file of the store; none where it is not there. Raises BadInput where one is not as it was
    written."""
    if not os.path.exists(path):
        return []
    rows = []
    try:
        with open(path, encoding="utf-8", newline="") as f:
            for row in csv.DictReader(f) if path.endswith(".csv") else map(json.loads, f):
                if path.endswith(".csv"):
                    check_row(row)
                rows.append(row)
    except ValueError as error:
        raise BadInput(f"{path}, after {len(rows)} lines that can be read: {error}") from None
    return rows


def check_row(row: dict) -> None:
    """Raises ValueError for a line of a csv that is not as it was written."""
    if None in row or None in row.values() or not {"task", "system", "seed"} <= row.keys():
        raise ValueError("columns are missing, or too many")
    if not row["seed"].isdecimal():
        raise ValueError(f"seed {row['seed']}")
    for name, value in row.items():
        if value and name not in WORDS and not math.isfinite(float(value)):
            raise ValueError(f"{name} is {value}")


def best_of(tries: dict[str, list[dict]]) -> str:
    """The rate of runs on the tuning seeds that solves most on its worst seed, since one that is best in the mean may
    collapse on the next; of equal ones the best in the mean."""
    solved = {rate: [float(row["gen/pass1_in after"]) for row in rows] for rate, rows in tries.items()}
    return max(solved, key=lambda rate: (min(solved[rate]), mean(solved[rate])))


class Place(NamedTuple):
    """A system at a task. runs: those that count, by seed, of the rate that tuning chose, or without it of the one that
    has most; others: another rate -> seeds; is_tuned: whether tuning chose it."""
    task: str
    system: str
    rate: str
    runs: dict[str, dict]
    others: dict[str, int]
    is_tuned: bool


def places_of(rows: list[dict]) -> dict[tuple[str, str], Place]:
    """By task and system. rows: of one budget."""
    found: dict[tuple, dict[str, dict]] = {}
    tried: dict[tuple, dict[str, list[dict]]] = {}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        key = row["task"], row["system"]
        if row["seed"] in TUNING_SEEDS:
            tried.setdefault(key, {}).setdefault(row["rate"], []).append(row)
        else:
            found.setdefault(key, {}).setdefault(row["rate"], {})[row["seed"]] = row
    places = {}
    for key, rates in found.items():
        tries = {rate: runs for rate, runs in tried.get(key, {}).items() if len(runs) == len(TUNING_SEEDS)}
        rate = chosen = best_of(tries) if tries else None
        if rate not in rates:
            rate = max(sorted(rates), key=lambda rate: len(rates[rate]))
        others = {r: len(runs) for r, runs in rates.items() if r != rate}
        places[key] = Place(*key, rate, rates[rate], others, rate == chosen)
    return places


def is_of(row: dict, run: dict) -> bool:
    """Whether a line of a curve or a solution is of this run, by all that it says of its own."""
    return all(str(row.get(name, run[name])) == run[name] for name in ("task", "system", "rate", "seed", "budget"))


def number(row: dict, name: str) -> float | None:
    return float(row[name]) if row.get(name) else None


def flags_alike(rows: list[dict]) -> bool:
    """Whether runs differ in their seed alone."""
    return len({re.sub(rf"(?<=-s){row['seed']}\b|(?<=--seed ){row['seed']}\b", "", row.get("flags") or "")
                for row in rows}) == 1


def known(rows: list[dict], *names: str) -> list[tuple[float, ...]]:
    """The numbers of those rows that have them all."""
    found = [tuple(number(row, name) for name in names) for row in rows]
    return [values for values in found if None not in values]


# Curves

def mean_curve(curves: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """The mean of curves over tokens, up to where the first of them ends."""
    end, axes = min(curve[-1][0] for curve in curves), [list(zip(*curve, strict=True)) for curve in curves]
    grid = sorted({end * i // GRID for i in range(GRID + 1)})
    return [(x, mean(height_at(xs, ys, x) for xs, ys in axes)) for x in grid]


def curves_of(place: Place, points: list[dict]) -> dict[str, dict]:
    """Metric -> its curves in percent over tokens: of each seed, and their mean."""
    found = {}
    for metric in CURVES:
        of_seeds = {seed: [(int(p["tokens"]), 100 * float(p["value"])) for p in points
                           if p["metric"] == metric and is_of(p, run)] for seed, run in place.runs.items()}
        if kept := {seed: curve for seed, curve in of_seeds.items() if curve}:
            found[metric] = {"seeds": kept, "mean": mean_curve(list(kept.values()))}
    return found


# The table

class Cell(NamedTuple):
    """What stands in a column. key: what it is sorted by, None comes last; is_clear: its interval leaves out zero."""
    text: str
    key: float | str | None
    is_clear: bool = False


def difference(place: Place, baseline: Place | None, name: str) -> Cell:
    """Of a score from a baseline's of the same seed."""
    if baseline is place:
        return Cell("-", 0.0)
    of_baseline = baseline.runs if baseline else {}
    both = [(number(run, name), number(of_baseline[seed], name)) for seed, run in place.runs.items()
            if seed in of_baseline]
    gains = [value - other for value, other in both if None not in (value, other)]
    if not gains:
        return Cell("-", None)
    middle, half = interval(gains)
    return Cell(paired(gains, len(place.runs)), middle, half is not None and abs(middle) > half)


def signs_of_gaming(runs: list[dict], curves: dict[str, dict]) -> Cell:
    of_seeds = curves.get("gen/pass1_in", {"seeds": {}})["seeds"].values()
    heights = [[y for _, y in curve] for curve in of_seeds if len(curve) > 2]  # two are a start and an end
    rewarded = known(runs, "gen/reward before", "gen/reward after", "gen/pass1_in before", "gen/pass1_in after")
    counts = {"fell": [round(max(ys) - ys[-1], 3) >= 100 * FELL for ys in heights],
              "reward up, solved down": [round(last - first, 5) >= RISEN and after < before
                                         for first, last, before, after in rewarded]}
    told = [f"{words} {sum(found)}/{len(found)}" for words, found in counts.items() if any(found)]
    return Cell("; ".join(told) or "-", sum(map(sum, counts.values())))


def given_of(system: str) -> str:
    return "see the file" if is_file(system) else SYSTEMS[system].given if system in SYSTEMS else "-"


def cells_of(place: Place, places: dict[tuple[str, str], Place], curves: dict[str, dict]) -> dict[str, Cell]:
    """The cells of COLUMNS. curves: of `curves_of`."""
    baseline, weighted = (places.get((place.task, name)) for name in (BASELINE, WEIGHTED))
    runs = list(place.runs.values())

    def mean_of(name: str, unit: int, digits: int) -> Cell:
        values = [value / unit for value, in known(runs, name)]
        return Cell(f"{mean(values):.{digits}f}", mean(values)) if values else Cell("-", None)

    def ends(name: str) -> Cell:
        pairs = known(runs, f"{name} before", f"{name} after")
        return Cell(change(pairs), mean(last for _, last in pairs) if pairs else None)

    solved = [value for value, in known(runs, "gen/pass1_in after")]
    cells = [Cell(place.task, place.task), Cell(place.system, place.system), Cell(*[given_of(place.system)] * 2),
             Cell(str(len(runs)), len(runs)), mean_of("gen/pass1_in before", 0.01, 1),
             Cell(spread(solved), mean(solved) if solved else None),
             difference(place, baseline, "gen/pass1_in after"), difference(place, weighted, "gen/pass1_in after"),
             difference(place, baseline, "gen/pass1_out after"), difference(place, weighted, "gen/pass1_out after"),
             ends("ver/step_f1_fixed"), ends("gen/verdicts/wrong_steps_passed"), mean_of("tokens", 1000, 0),
             mean_of("minutes", 1, 1), signs_of_gaming(runs, curves), Cell(place.rate, float(place.rate))]
    return dict(zip(COLUMNS, cells, strict=True))


class Row(NamedTuple):
    """A place with its curves and cells."""
    place: Place
    curves: dict[str, dict]
    cells: dict[str, Cell]


def table_of(places: dict[tuple[str, str], Place], points: list[dict]) -> list[Row]:
    """Rows in the order of tasks, then by their gain, those without one last."""
    rows, tasks, of_places = [], list(TASKS), {key: [] for key in places}
    for point in points:
        of_places.get((point["task"], point["system"]), []).append(point)
    for key, place in places.items():
        curves = curves_of(place, of_places[key])
        rows.append(Row(place, curves, cells_of(place, places, curves)))
    at = lambda task: tasks.index(task) if task in tasks else len(tasks)
    gain = lambda row: row.cells["minus GRPO"].key
    return sorted(rows, key=lambda row: (at(row.place.task), row.place.task, gain(row) is None, -(gain(row) or 0),
                                         row.place.system))
