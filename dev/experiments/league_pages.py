"""
The league's pages: LEAGUE.md, one table amid text of ours, and league.html, one file that opens offline.
"""
import os
import shlex
import textwrap
from pathlib import Path

from dev.experiments.league_systems import BASELINE, RATES, SYSTEMS, TASKS, TUNING_SEEDS, family_of, recipe_of
from dev.experiments.league_table import (COLUMNS, CURVES, Place, Row, flags_alike, is_of, known, number, places_of,
                                          read_rows, table_of)
from nanochat import recipes
from nanochat.common import BadInput
from nanochat.own_code import is_file
from nanochat.rl.report.page import COLOURS, embedded
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
UNTUNED = ", ".join(name for name, task in TASKS.items() if task.rates)
OF_SEED = {  # of a seed, in the page: name -> column of the store, in percent or not, and digits
    "solved before": ("gen/pass1_in before", 100, 1), "after": ("gen/pass1_in after", 100, 1),
    "best, greedy": ("best", 100, 1), "longer after": ("gen/pass1_out after", 100, 1),
    "step F1 before": ("ver/step_f1_fixed before", 100, 1), "step F1 after": ("ver/step_f1_fixed after", 100, 1),
    "reward first": ("gen/reward before", 1, 3), "reward last": ("gen/reward after", 1, 3), "steps": ("steps", 1, 0),
    "tokens": ("tokens", 1, 0), "minutes": ("minutes", 1, 1)}


# LEAGUE.md

def is_default(out: str) -> bool:
    return os.path.normpath(out) == OUT


def rerun_of(place: Place, budget: int, out: str) -> str:
    words = ["bash", "runs/league.sh", "--tasks", place.task, "--systems", place.system,
             "--seeds", " ".join(place.runs), "--budget", str(budget)]
    return shlex.join([*words, *([] if is_default(out) else ["--out", out]), "--again"])


def facts_of(rows: list[dict], table: list[Row], budget: int, command: str) -> dict[str, str]:
    tries, tried = [row for row in rows if row["seed"] in TUNING_SEEDS], {}
    for row in tries:
        tried.setdefault((row["task"], row["system"]), set()).add(float(row["rate"]))
    chosen = [(float(row.place.rate), tried[key]) for row in table
              if len(tried.get(key := (row.place.task, row.place.system), ())) > 1]
    at_edge = sum(rate in (min(rates), max(rates)) for rate, rates in chosen)
    intervals = sum("±" in cell.text for row in table for name, cell in row.cells.items() if "minus" in name)
    commits = sorted({row["commit"] for row in rows if row.get("commit")})
    return {"budget": f"{budget:,} sampled tokens a run, over all roles; a run's last step may go over it",
            "tuning": f"{len(RATES)} learning rates of each system on seeds {', '.join(TUNING_SEEDS)}; the one that "
                      f"solves most held-out problems on its worst seed counts. At {UNTUNED} all have one, untuned. "
                      f"All else is set by hand. {at_edge} of {len(chosen)} rows have the lowest or the highest rate "
                      "of theirs, so a better one may lie outside",
            "chance": f"of {intervals} intervals of differences about {intervals / 20:.0f} would leave out zero by "
                      "chance",
            "runs": f"{len(rows)}, of which {len(tries)} to tune; {sum(v for v, in known(rows, 'minutes')) / 60:.1f} "
                    "hours, one after the other", "commits": ", ".join(commits) or "-", "command": command}


def notes_of(places: dict[tuple[str, str], Place]) -> list[str]:
    """Systems whose rate was not chosen at the task, that have finished runs of two rates, or with different flags."""
    told = lambda others: ", ".join(f"{rate} (seeds: {num_seeds})" for rate, num_seeds in others.items())
    rates = [f"{place.system} on {place.task}: shown with rate {place.rate}, not {told(place.others)}"
             for place in places.values() if place.others]
    untuned: dict[str, list[str]] = {}
    for place in places.values():
        if not place.is_tuned and not (place.task in TASKS and TASKS[place.task].rates):
            untuned.setdefault(place.task, []).append(place.system)
    rates += [f"{task}: not tuned there, so not to be compared with those that are: {', '.join(names)}"
              for task, names in untuned.items()]
    return rates + [f"{place.system} on {place.task}: its runs were not made alike; runs.csv has their flags"
                    for place in places.values() if not flags_alike(list(place.runs.values()))]


def linked(system: str, folder: str) -> str:
    """A system's name as Markdown, with a link to its recipe where the repository has that."""
    if system not in SYSTEMS:
        return f"`{system}`".replace("|", "\\|")
    path = os.path.join(recipes.__path__[0], family_of(system), f"{recipe_of(system)}.py")
    return f"[{system}]({link_to(path, folder)})"


def link_to(path: str, folder: str) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def markdown_of(table: list[Row], facts: dict[str, str], notes: list[str], out: str, folder: str) -> str:
    """What stands between BEGIN and END."""
    item = lambda text: textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False,
                                      break_on_hyphens=False)
    bold = lambda cell: f"**{cell.text}**" if cell.is_clear else cell.text
    files = [f"[{name}]({link_to(path, folder)})" for name in ("runs.csv", "points.csv")
             if os.path.exists(path := os.path.join(out, name))]
    lines = [item(f"*{name}*: " + (f"`{text}`" if name == "command" else text)) for name, text in facts.items()]
    lines += [item(f"*more*: {', '.join(['[league.html](league.html), which opens offline', *files])}"), ""]
    rows = [[linked(cell.text, folder) if name == "system" else bold(cell) for name, cell in row.cells.items()]
            for row in table]
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

def solution_of(row: dict) -> dict:
    """A held-out problem as solved, cut at its steps; they have labels where there is one of each."""
    spans, text, labels = row.get("step_spans") or COMPACT.step_spans(row["solution"]), row["solution"], row["labels"]
    ends = [0, *(end for _, end in spans)]
    labels = labels if len(labels or []) == len(spans) else [None] * len(spans)
    steps = [[text[start:end], label] for start, end, label in zip(ends, ends[1:], labels, strict=False)]
    return {"step": row["step"], "problem": row["problem"], "gold": row["gold"], "steps": steps,
            "answer": text[ends[-1]:], "verification": row.get("verification")}


def of_page(row: Row, rollouts: list[dict], rerun: str) -> dict:
    place, runs = row.place, list(row.place.runs.values())
    seeds = [[run["seed"], *("-" if (value := number(run, name)) is None else f"{scale * value:.{digits}f}"
                             for name, scale, digits in OF_SEED.values()), run.get("commit") or "-"] for run in runs]
    family = "outside" if is_file(place.system) else family_of(place.system) if place.system in SYSTEMS else "-"
    return {"task": place.task, "system": place.system, "family": family, "cells": list(row.cells.values()),
            "rerun": rerun, "flags": runs[0].get("flags"), "seeds": seeds, "curves": row.curves,
            "rollouts": [solution_of(rollout) for rollout in rollouts if any(is_of(rollout, run) for run in runs)]}


# Both

def write_pages(out: str, budget: int, command: str) -> str:
    """Writes LEAGUE.md and league.html from what the store in `out` has of runs with this budget; a short table to
    print. command: what made it. Raises BadInput where LEAGUE.md has no place for its table, and CannotWrite."""
    rows = [row for row in read_rows(os.path.join(out, "runs.csv")) if row["budget"] == str(budget)]
    points, rollouts = (read_rows(os.path.join(out, name)) for name in ("points.csv", "rollouts.jsonl"))
    places, folder = places_of(rows), "dev" if is_default(out) else out
    table, notes = table_of(places, points), notes_of(places)
    facts = facts_of(rows, table, budget, command)
    page, picture = os.path.join(folder, "LEAGUE.md"), os.path.join(folder, "league.html")
    before = Path(page).read_text(encoding="utf-8") if os.path.exists(page) else f"{HEAD}\n{BEGIN}{END}\n"
    after = with_table(before, markdown_of(table, facts, notes, out, folder), page)
    data = {"facts": facts, "notes": notes, "columns": COLUMNS, "titles": CURVES, "baseline": BASELINE,
            "of_seed": ["seed", *OF_SEED, "commit"], "colours": COLOURS,
            "rows": [of_page(row, rollouts, rerun_of(row.place, budget, out)) for row in table]}
    template = Path(__file__).with_name("league.html").read_text(encoding="utf-8")
    for path, text in ((page, after), (picture, template.replace("{{data}}", embedded(data)))):
        with whole_file(path) as f:
            f.write(text)
    shown = [[row.cells[name].text for name in ("task", "system", "seeds", "solved", "minus GRPO", "gaming")]
             for row in table]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return "\n".join([*lines, *notes, f"{len(rows)} runs, {len(table)} rows: {page}, {picture}"])
