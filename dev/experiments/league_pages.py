"""
The league's pages, made from its store: LEAGUE.md, one table amid text of ours, and league.html, which opens offline.

A row is a system at a task: its runs with one budget and one learning rate, on the seeds that count. ± after a mean is
the standard deviation over seeds, after a difference half of its 95% interval (Student's t, paired by seed).
"""
import csv
import json
import os
import shlex
import textwrap
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from dev.experiments.league_systems import BASELINE, RATES, SYSTEMS, TASKS, TUNING_SEEDS, family_of, recipe_of
from nanochat import recipes
from nanochat.common import BadInput
from nanochat.own_code import is_file
from nanochat.rl.report.page import COLOURS, embedded
from nanochat.rl.report.report import change, height_at, interval, paired, spread
from nanochat.storage.files import whole_file
from tasks.formats import COMPACT

OUT = "dev/curves/league"  # its pages stand in dev, those of another store in its own folder
BEGIN, END = "<!-- The table: made by league_pages.py, as all up to its end. -->", "<!-- The table's end. -->"
HEAD = """# The league

Every system from the same checkpoint of a seed, with one budget of sampled tokens, and settings by one rule.

## Which system for which problem, and why

Not written yet.

## The table
"""
FELL, RISEN = 0.10, 0.05  # of what is solved, below the best evaluation; of a reward
CURVES = {"gen/pass1_in": "solved", "gen/pass1_out": "solved, longer problems", "ver/step_f1_fixed": "step F1",
          "ver/balanced_acc_fixed": "balanced accuracy of verdicts"}
GRID = 40  # parts of the axis of tokens at whose ends a mean over seeds is taken
COLUMNS = {
    "task": "", "system": "", "learns from": "", "seeds": "",
    "solved": "held-out problems after the run, greedy, in percent: mean ± standard deviation over seeds",
    "minus GRPO": "points, paired by seed, ± half of the 95% interval; bold where that leaves out zero",
    "longer problems minus GRPO": "the same on problems that are longer than any in RL",
    "step F1": "of the verifier on fixed solutions, before -> after, in percent",
    "wrong steps passed": "by the verifier in training, in percent: first -> last third of the steps",
    "tokens (k)": "sampled by all roles and in the training of a judge: mean over seeds, in thousands",
    "minutes": "of the generator's run on one core: mean over seeds",
    "gaming": f"on how many seeds. 'fell': ends more than {100 * FELL:.0f} points below its best evaluation. 'reward "
              f"up, solved down': its reward rises by {RISEN} or more, and it solves fewer problems than before",
    "rate": "the generator's learning rate"}
OF_SEED = {  # of a seed, in the page: name -> column of the store, in percent or not, and digits
    "solved before": ("gen/pass1_in before", 100, 1), "after": ("gen/pass1_in after", 100, 1), "best": ("best", 100, 1),
    "longer after": ("gen/pass1_out after", 100, 1), "step F1 before": ("ver/step_f1_fixed before", 100, 1),
    "step F1 after": ("ver/step_f1_fixed after", 100, 1), "reward first": ("gen/reward before", 1, 3),
    "reward last": ("gen/reward after", 1, 3), "steps": ("steps", 1, 0), "tokens": ("tokens", 1, 0),
    "minutes": ("minutes", 1, 1)}


# The store

def read_rows(path: str) -> list[dict]:
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f)) if path.endswith(".csv") else [json.loads(line) for line in f]


class Place(NamedTuple):
    """A system at a task. runs: those that count, by seed, of the rate that has most; others: another rate -> seeds."""
    task: str
    system: str
    rate: str
    runs: dict[str, dict]
    others: dict[str, int]


def places_of(rows: list[dict]) -> dict[tuple[str, str], Place]:
    """By task and system. rows: of one budget."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in sorted((row for row in rows if row["seed"] not in TUNING_SEEDS), key=lambda row: int(row["seed"])):
        found.setdefault((row["task"], row["system"]), {}).setdefault(row["rate"], {})[row["seed"]] = row
    places = {}
    for key, rates in found.items():
        rate = max(sorted(rates), key=lambda rate: len(rates[rate]))
        places[key] = Place(*key, rate, rates[rate], {r: len(runs) for r, runs in rates.items() if r != rate})
    return places


def is_of(row: dict, run: dict) -> bool:
    """Whether a line of a curve or a solution is of this run, by all that it says of its own."""
    return all(str(row.get(name, run[name])) == run[name] for name in ("task", "system", "rate", "seed", "budget"))


def number(row: dict, name: str) -> float | None:
    return float(row[name]) if row.get(name) else None


def known(rows: list[dict], *names: str) -> list[tuple[float, ...]]:
    """The numbers of those rows that have them all."""
    found = [tuple(number(row, name) for name in names) for row in rows]
    return [values for values in found if None not in values]


# The table

class Cell(NamedTuple):
    """What stands in a column. key: what it is sorted by, None comes last; is_clear: its interval leaves out zero."""
    text: str
    key: float | str | None
    is_clear: bool = False


def difference(place: Place, baseline: Place | None, name: str) -> Cell:
    """Of a score from the baseline's of the same seed."""
    if place.system == BASELINE:
        return Cell("-", 0.0)
    of_baseline = baseline.runs if baseline else {}
    both = [(number(run, name), number(of_baseline[seed], name)) for seed, run in place.runs.items()
            if seed in of_baseline]
    gains = [value - other for value, other in both if None not in (value, other)]
    if not gains:
        return Cell("-", None)
    middle, half = interval(gains)
    return Cell(paired(gains, len(place.runs)), middle, half is not None and abs(middle) > half)


def signs_of_gaming(runs: list[dict]) -> Cell:
    solved, rewarded = known(runs, "best", "gen/pass1_in after"), known(
        runs, "gen/reward before", "gen/reward after", "gen/pass1_in before", "gen/pass1_in after")
    counts = {"fell": [round(best - after, 5) > FELL for best, after in solved],
              "reward up, solved down": [round(last - first, 5) >= RISEN and after < before
                                         for first, last, before, after in rewarded]}
    told = [f"{words} {sum(found)}/{len(found)}" for words, found in counts.items() if any(found)]
    return Cell("; ".join(told) or "-", sum(map(sum, counts.values())))


def given_of(system: str) -> str:
    return "see the file" if is_file(system) else SYSTEMS[system].given if system in SYSTEMS else "-"


def cells_of(place: Place, baseline: Place | None) -> dict[str, Cell]:
    """The cells of COLUMNS."""
    runs = list(place.runs.values())

    def mean_of(name: str, unit: int, digits: int) -> Cell:
        values = [value / unit for value, in known(runs, name)]
        return Cell(f"{mean(values):.{digits}f}", mean(values)) if values else Cell("-", None)

    def ends(name: str) -> Cell:
        pairs = known(runs, f"{name} before", f"{name} after")
        return Cell(change(pairs), mean(last for _, last in pairs) if pairs else None)

    solved = [value for value, in known(runs, "gen/pass1_in after")]
    cells = [Cell(place.task, place.task), Cell(place.system, place.system), Cell(*[given_of(place.system)] * 2),
             Cell(str(len(runs)), len(runs)), Cell(spread(solved), mean(solved) if solved else None),
             difference(place, baseline, "gen/pass1_in after"), difference(place, baseline, "gen/pass1_out after"),
             ends("ver/step_f1_fixed"), ends("gen/verdicts/wrong_steps_passed"), mean_of("tokens", 1000, 0),
             mean_of("minutes", 1, 1), signs_of_gaming(runs), Cell(place.rate, float(place.rate))]
    return dict(zip(COLUMNS, cells, strict=True))


def table_of(places: dict[tuple[str, str], Place]) -> list[tuple[Place, dict[str, Cell]]]:
    """Rows in the order of tasks, then by their gain, those without one last."""
    rows = [(place, cells_of(place, places.get((place.task, BASELINE)))) for place in places.values()]
    tasks = list(TASKS)
    at = lambda task: tasks.index(task) if task in tasks else len(tasks)
    gain = lambda cells: cells["minus GRPO"].key
    return sorted(rows, key=lambda row: (at(row[0].task), row[0].task, gain(row[1]) is None, -(gain(row[1]) or 0),
                                         row[0].system))


def rerun_of(place: Place, budget: int, out: str) -> str:
    words = ["bash", "runs/league.sh", "--tasks", place.task, "--systems", place.system,
             "--seeds", " ".join(place.runs), "--budget", str(budget)]
    return shlex.join([*words, *([] if is_default(out) else ["--out", out]), "--again"])


# LEAGUE.md

def is_default(out: str) -> bool:
    return os.path.normpath(out) == OUT


def facts_of(rows: list[dict], budget: int, command: str) -> dict[str, str]:
    tries = sum(row["seed"] in TUNING_SEEDS for row in rows)
    commits = sorted({row["commit"] for row in rows if row.get("commit")})
    return {"budget": f"{budget:,} sampled tokens a run, over all roles",
            "tuning": f"{len(RATES)} learning rates of each system on seeds {' and '.join(TUNING_SEEDS)}; the one that "
                      f"solves most held-out problems there, in the mean, counts",
            "runs": f"{len(rows)}, of which {tries} to tune; {sum(v for v, in known(rows, 'minutes')) / 60:.1f} hours, "
                    f"one after the other", "commits": ", ".join(commits) or "-", "command": command}


def notes_of(places: dict[tuple[str, str], Place]) -> list[str]:
    """Systems that have finished runs of two rates."""
    told = lambda others: ", ".join(f"{rate} (seeds: {num_seeds})" for rate, num_seeds in others.items())
    return [f"{place.system} on {place.task}: shown with rate {place.rate}, not {told(place.others)}"
            for place in places.values() if place.others]


def linked(system: str, folder: str) -> str:
    """A system's name as Markdown, with a link to its recipe where the repository has that."""
    if system not in SYSTEMS:
        return f"`{system}`".replace("|", "\\|")
    path = os.path.join(recipes.__path__[0], family_of(system), f"{recipe_of(system)}.py")
    return f"[{system}]({link_to(path, folder)})"


def link_to(path: str, folder: str) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def markdown_of(table: list, facts: dict[str, str], notes: list[str], out: str, folder: str) -> str:
    """What stands between BEGIN and END."""
    item = lambda text: textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False,
                                      break_on_hyphens=False)
    bold = lambda cell: f"**{cell.text}**" if cell.is_clear else cell.text
    files = [f"[{name}]({link_to(path, folder)})" for name in ("runs.csv", "points.csv")
             if os.path.exists(path := os.path.join(out, name))]
    lines = [item(f"*{name}*: " + (f"`{text}`" if name == "command" else text)) for name, text in facts.items()]
    lines += [item(f"*more*: {', '.join(['[league.html](league.html), which opens offline', *files])}"), ""]
    rows = [[linked(cell.text, folder) if name == "system" else bold(cell) for name, cell in cells.items()]
            for _, cells in table]
    if rows:
        lines += [f"| {' | '.join(row)} |" for row in [list(COLUMNS), ["---"] * len(COLUMNS), *rows]]
    else:
        lines += ["No run with this budget is finished."]
    lines += ["", *(item(f"*{name}*: {text}") for name, text in COLUMNS.items() if text), *map(item, notes),
              item("A row again, beside what is stored: `bash runs/league.sh --tasks T --systems S --again`")]
    return "\n".join([BEGIN, "", *lines, "", END])


def with_table(text: str, table: str, path: str) -> str:
    """A page with another table, all else as it is. Raises BadInput where it has no place for one."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end) or BEGIN in tail:
        raise BadInput(f"{path} has no place for the table: it needs the lines {BEGIN} and {END}, once each")
    return head + table + tail


# league.html

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


def solution_of(row: dict) -> dict:
    """A held-out problem as solved, cut at its steps; they have labels where there is one of each."""
    spans, text, labels = row.get("step_spans") or COMPACT.step_spans(row["solution"]), row["solution"], row["labels"]
    ends = [0, *(end for _, end in spans)]
    labels = labels if len(labels or []) == len(spans) else [None] * len(spans)
    steps = [[text[start:end], label] for start, end, label in zip(ends, ends[1:], labels, strict=False)]
    return {"step": row["step"], "problem": row["problem"], "gold": row["gold"], "steps": steps,
            "answer": text[ends[-1]:], "verification": row.get("verification")}


def of_page(place: Place, cells: dict[str, Cell], points: list[dict], rollouts: list[dict], rerun: str) -> dict:
    runs = list(place.runs.values())
    seeds = [[run["seed"], *("-" if (value := number(run, name)) is None else f"{scale * value:.{digits}f}"
                             for name, scale, digits in OF_SEED.values()), run.get("commit") or "-"] for run in runs]
    family = "outside" if is_file(place.system) else family_of(place.system) if place.system in SYSTEMS else "-"
    mine = lambda rows: [row for row in rows if (row["task"], row["system"]) == (place.task, place.system)]
    return {"task": place.task, "system": place.system, "family": family, "cells": list(cells.values()), "rerun": rerun,
            "flags": runs[0].get("flags"), "seeds": seeds, "curves": curves_of(place, mine(points)),
            "rollouts": [solution_of(row) for row in mine(rollouts) if any(is_of(row, run) for run in runs)]}


# Both

def write_pages(out: str, budget: int, command: str) -> str:
    """Writes LEAGUE.md and league.html from what the store in `out` has of runs with this budget; a short table to
    print. command: what made it. Raises BadInput where LEAGUE.md has no place for its table, and CannotWrite."""
    rows = [row for row in read_rows(os.path.join(out, "runs.csv")) if row["budget"] == str(budget)]
    points, rollouts = (read_rows(os.path.join(out, name)) for name in ("points.csv", "rollouts.jsonl"))
    places, folder = places_of(rows), "dev" if is_default(out) else out
    table, facts, notes = table_of(places), facts_of(rows, budget, command), notes_of(places)
    page, picture = os.path.join(folder, "LEAGUE.md"), os.path.join(folder, "league.html")
    before = Path(page).read_text(encoding="utf-8") if os.path.exists(page) else f"{HEAD}\n{BEGIN}{END}\n"
    after = with_table(before, markdown_of(table, facts, notes, out, folder), page)
    data = {"facts": facts, "notes": notes, "columns": COLUMNS, "titles": CURVES, "baseline": BASELINE,
            "of_seed": ["seed", *OF_SEED, "commit"], "colours": COLOURS,
            "rows": [of_page(place, cells, points, rollouts, rerun_of(place, budget, out)) for place, cells in table]}
    template = Path(__file__).with_name("league.html").read_text(encoding="utf-8")
    for path, text in ((page, after), (picture, template.replace("{{data}}", embedded(data)))):
        with whole_file(path) as f:
            f.write(text)
    shown = [[cells[name].text for name in ("task", "system", "seeds", "solved", "minus GRPO", "gaming")]
             for _, cells in table]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return "\n".join([*lines, *notes, f"{len(rows)} runs, {len(table)} rows: {page}, {picture}"])
