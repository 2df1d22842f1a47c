"""
The league: every system from the same checkpoint of a seed, with one budget of sampled tokens, settings by one rule.

    bash runs/league.sh                                        # what is not in the store yet; then pages
    bash runs/league.sh --tasks chain --systems "tango dapo" --seeds "1 2"
    bash runs/league.sh --tasks chain --systems my/few.py      # a recipe of your own, among the others
    bash runs/league.sh --tasks chain --systems dapo --again   # the row again, beside what is stored
    bash runs/league.sh --tasks words --seeds "1 2 3"          # a real model: alone, for it has its own tokenizer
    bash runs/league.sh --report                               # the pages alone

A system's tries run on the tuning seeds; the one that solves most held-out problems on its worst one of them runs on
the seeds that count. Each finished run is a line of runs.csv in --out, with its curve in points.csv and solutions in
rollouts.jsonl; a run that is there, with the same flags, is not made again. league_systems.py says what there is.
"""
import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable
from itertools import product
from statistics import mean
from typing import NamedTuple

from dev.experiments import league_pages
from dev.experiments.arms import chosen
from dev.experiments.jobs import (Job, carry_out_all, check_made_alike, check_one_word, job_of, log_of, noted, runs_of,
                                  stages_of)
from dev.experiments.league_pages import OUT
from dev.experiments.league_systems import (BASELINE, SYSTEMS, TASKS, TUNING_SEEDS, allowances, arm_of, experiment,
                                            check_names, mark_of, rates_of, system_of)
from dev.experiments.league_table import best_of, places_of, read_rows
from dev.experiments.run import jobs_at_once, seeds_of
from nanochat.cli import at_least, script_main
from nanochat.common import BadInput, StopRequested, print0
from nanochat.hf.files import read_json
from nanochat.rl.learn.roles import short_name
from nanochat.rl.report.fields import is_number
from nanochat.rl.report.report import Run, curve, read_run, write_csv
from nanochat.storage.files import base_dir, check_writable, make_folder, path_of, whole_file

BUDGET = 150_000
CURVES = ("gen/pass1_in", "gen/pass1_out", "ver/step_f1_fixed", "ver/balanced_acc_fixed")
SCORES = ("gen/pass1_in", "gen/pass1_out", "ver/step_f1_fixed", "ver/outcome_f1_fixed", "ver/balanced_acc_fixed",
          "gen/verdicts/wrong_steps_passed", "gen/reward")
OVER = 0.05  # of an allowance: how far the last solutions may go over it, as the last step of a run may
EXAMPLES = 3  # held-out problems whose solutions are kept, of the first seed
KEYS = ("task", "system", "rate", "seed", "budget")
GENERATED = [name for name, task in TASKS.items() if not task.source]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--systems", help=f"one or more of: {', '.join(SYSTEMS)}; or paths of recipes; default: all; "
                        f"{BASELINE} comes along")
    parser.add_argument("--tasks", help=f"one or more of: {', '.join(GENERATED)} (default: those that the systems are "
                        f"for); or {' or '.join(name for name in TASKS if name not in GENERATED)}, alone")
    parser.add_argument("--seeds", default="1 2 3 4 5")
    parser.add_argument("--budget", type=at_least(10_000), default=BUDGET,
                        help="tokens that a system may sample, in all roles, its judge's training too "
                             "(default: %(default)s)")
    parser.add_argument("--out", default=OUT, help="folder of the store (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="make stored runs of these rows again, in a folder that "
                        "is removed, and print both; the store stays as it is")
    parser.add_argument("--report", action="store_true", help="collect what is finished, write the pages, and stop")
    return parser


# The store

class Entry(NamedTuple):
    """A run of the league: a system's try at a task, with one seed."""
    task: str
    system: str
    rate: str
    seed: str
    budget: int
    job: Job

    @property
    def key(self) -> tuple:
        return self.task, self.system, self.rate, self.seed, str(self.budget)


def read_store(out: str) -> dict[tuple, dict]:
    """The lines of runs.csv by KEYS. Raises BadInput where it is not as it was written."""
    path = os.path.join(out, "runs.csv")
    rows = read_rows(path)
    try:
        return {tuple(row[name] for name in KEYS): row for row in rows}
    except KeyError as error:
        raise BadInput(f"{path} has no column {error}") from None


def flags_kept(job: Job, name: str) -> str:
    """What a stored run was made with."""
    mark = mark_of(name)
    return noted(job.flags) + (f" # text {mark}" if mark is not None else "")


def judge_jobs(entry: Entry) -> list[Job]:
    """The jobs before a run that its budget or its minutes pay: labelled solutions, and the training of its judge."""
    name, e = entry.system, experiment(entry.task, entry.budget, [(entry.system, entry.rate)])
    taken = ["labels"] * bool(allowances(name, entry.budget)[0]) + [f"train_{name}"] * bool(system_of(name).judge)
    return [job_of(e, e.starts[start], entry.seed) for start in taken]


def cost_before(entry: Entry) -> tuple[int, float]:
    """Tokens that these have sampled, and minutes of a judge's training. Raises BadInput where labelled solutions took
    far more than their allowance."""
    tokens, minutes, allowed = 0, 0.0, allowances(entry.system, entry.budget)[0]
    for job in judge_jobs(entry):
        found = read_json(os.path.join(job.folder, job.done))
        if job.module == "scripts.tango_rl":
            tokens, minutes = tokens + found["sampled_tokens"], minutes + found["minutes"]
        elif found["solution_tokens"] > (1 + OVER) * allowed:
            raise BadInput(f"{job.folder}: {found['solution_tokens']} tokens of labelled solutions, and {entry.system} "
                           f"may take {allowed}: raise solution_tokens of task {entry.task}")
        else:
            tokens += found["solution_tokens"]
    return tokens, minutes


def key_of(entry: Entry) -> dict:
    return {name: getattr(entry, name) for name in KEYS}


def row_of(entry: Entry, run: Run) -> dict:
    """A finished run as a line of runs.csv: scores before and after, the best on the way, rewards and what the verifier
    passes over the first and the last third of the steps."""
    first, last = run.points[0], run.points[-1]
    row = key_of(entry)
    for name in SCORES:
        values = [record[name] for record in run.records if is_number(record.get(name))]
        third = max(1, len(values) // 3)
        ends = (mean(values[:third]), mean(values[-third:])) if values else (first.get(name), last.get(name))
        before, after = ends if name not in first or first[name] is None else (first[name], last.get(name))
        row |= {f"{name} before": rounded(before), f"{name} after": rounded(after)}
    row |= scores_by_sampling(entry)
    best = max(curve(run, "gen/pass1_in", "sampled_tokens")[1], default=None)
    steps = run.summary.get(f"{short_name(run.roles[0])}_steps")
    tokens, minutes = cost_before(entry)
    return row | {"best": rounded(best), "steps": steps, "tokens": run.summary["sampled_tokens"] + tokens,
                  "minutes": round(run.summary["minutes"] + minutes, 2),
                  "commit": run.config.get("commit"), "torch": run.config.get("torch"),
                  "flags": flags_kept(entry.job, entry.system)}


def scorings(entry: Entry) -> list[Job]:
    """The processes that score a run's start and its end by sampling, at a task that wants it."""
    task, start = TASKS[entry.task], entry.job.flags.split("--model-tag ")[1].split()[0]
    places = {"sft": (start, path_of("scores", f"{start}-problems_{entry.seed}")),
              "rl": (f"{entry.job.name}-gen", os.path.join(entry.job.folder, "scores"))}
    return [Job(f"score-{os.path.basename(folder)}-{tag}", "scripts.chat_eval", folder, "scores.json",
                f"-i {stage} -g {tag} --seed {entry.seed} {task.device} {task.scoring} --out {folder}/scores.json")
            for stage, (tag, folder) in places.items() if task.scoring]


def scores_by_sampling(entry: Entry) -> dict[str, float]:
    """Those two, in place of the run's own."""
    found = {}
    for job, when in zip(scorings(entry), ("before", "after"), strict=False):
        of_splits, = read_json(os.path.join(job.folder, job.done))["tasks"].values()
        found |= {f"gen/pass1_{name.removeprefix('test_')} {when}": scores["pass@1"]
                  for name, scores in of_splits.items()}
    return found


def rounded(value: float | None) -> float | str:
    return "" if value is None else round(value, 5)


def points_of(entry: Entry, run: Run) -> list[dict]:
    """The run's curves over sampled tokens, its judge's training before it."""
    before, _ = cost_before(entry)
    return [{**key_of(entry), "metric": metric,
             "tokens": tokens + before * (tokens > 0), "value": round(value, 5)}
            for metric in CURVES for tokens, value in zip(*curve(run, metric, "sampled_tokens"), strict=True)]


def solutions_of(entry: Entry, run: Run) -> list[dict]:
    """The first held-out problems, as solved before and after."""
    kept = [[e for e in run.examples if e["step"] == step][:EXAMPLES]
            for step in ({run.examples[0]["step"], run.examples[-1]["step"]} if run.examples else ())]
    return [{**key_of(entry), "step": e["step"], "problem": e["problem"], "gold": e["gold"],
             "solution": e["solution"], "labels": e["step_labels"], "step_spans": e["step_spans"],
             "verification": e.get("verification")} for e in sum(sorted(kept, key=lambda k: k[0]["step"]), [])]


def collect(entries: list[Entry], out: str) -> None:
    """Takes finished runs that the store has not, or has with other flags, into it. Raises CannotWrite."""
    store, points, kept = read_store(out), read_rows(f"{out}/points.csv"), read_rows(f"{out}/rollouts.jsonl")
    for entry in entries:
        if not all(job.is_done() for job in (entry.job, *scorings(entry))) or not is_missing(entry, store):
            continue
        run = read_run(entry.job.folder)
        store[entry.key] = row_of(entry, run)
        if entry.seed not in TUNING_SEEDS:
            same = lambda row, key=entry.key: tuple(str(row[name]) for name in KEYS) == key
            points = [row for row in points if not same(row)] + points_of(entry, run)
            if entry.seed == "1":
                kept = [row for row in kept if not same(row)] + solutions_of(entry, run)
    order = lambda row: [str(row[name]) for name in ("task", "system", "seed", "rate")]
    make_folder(out)
    write_csv(sorted(store.values(), key=order), os.path.join(out, "runs.csv"))
    write_csv(sorted(points, key=order), os.path.join(out, "points.csv"))
    with whole_file(os.path.join(out, "rollouts.jsonl")) as f:
        f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in sorted(kept, key=order))


def is_missing(entry: Entry, store: dict[tuple, dict]) -> bool:
    """Whether the store lacks a run, or has it with other flags."""
    return store.get(entry.key, {}).get("flags") != flags_kept(entry.job, entry.system)


# What is run

def entries_of(task: str, budget: int, tries: Iterable[tuple[str, str]], seeds: Iterable[str]) -> list[Entry]:
    """Runs, seed by seed."""
    e = experiment(task, budget, list(tries))
    jobs = {(job.name, seed): job for seed in seeds for job in runs_of(e, [seed])}
    return [Entry(task, name, rate, seed, budget, jobs[f"{e.name}-{arm_of(name, rate)}-s{seed}", seed])
            for seed in seeds for name, rate in tries]


def played_at(task: str, systems: list[str]) -> list[str]:
    return [name for name in systems if task in system_of(name).tasks]


def tries_of(task: str, systems: list[str]) -> list[tuple[str, str]]:
    return [(name, rate) for name in played_at(task, systems) for rate in rates_of(name, task)]


def best_rate(task: str, name: str, budget: int, store: dict[tuple, dict]) -> str | None:
    """The rate that its tries choose, by `best_of`; the one where there is no other. None where a try is missing."""
    found, tries = {}, tries_of(task, [name])
    if len(tries) == 1:
        return tries[0][1]
    for entry in entries_of(task, budget, tries, TUNING_SEEDS):
        if is_missing(entry, store):
            return None
        found.setdefault(entry.rate, []).append(store[entry.key])
    return best_of(found)


def carry_out(entries: list[Entry], out: str, at_once: int) -> bool:
    """Runs what the store lacks, and what it starts from; whether all of it is there then."""
    store = read_store(out)
    missing = [entry for entry in entries if is_missing(entry, store)]
    whole = True
    try:
        whole &= make_starts(missing, at_once)
        ready = [entry for entry in missing if all(job.is_done() for job in starts_before(entry))]
        jobs = [entry.job for entry in ready]
        for job in jobs:
            check_made_alike(job)
        first = {score: entry.job for entry in reversed(ready) for score in scorings(entry)}  # a start is scored once
        after = {job: [score for score, of in first.items() if of is job] for job in jobs}
        whole &= carry_out_all(jobs, at_once, after) and len(jobs) == len(missing)
    finally:
        collect(entries, out)
    return whole


def make_starts(missing: list[Entry], at_once: int) -> bool:
    """Makes what runs start from; whether all of it is there then."""
    whole = True
    for stage in stages_before(missing):
        for job in stage:
            check_made_alike(job)
        whole &= carry_out_all(stage, at_once)
    return whole


def starts_before(entry: Entry) -> list[Job]:
    return [job for stage in stages_before([entry]) for job in stage]


def stages_before(entries: list[Entry]) -> list[list[Job]]:
    """What these start from, in the order in which it is made."""
    found: list[dict[Job, None]] = []
    for task, seed in dict.fromkeys((entry.task, entry.seed) for entry in entries):
        of_both = [entry for entry in entries if (entry.task, entry.seed) == (task, seed)]
        e = experiment(task, of_both[0].budget, [(entry.system, entry.rate) for entry in of_both])
        for i, stage in enumerate(stages_of([e], [seed])[:-1]):
            if i == len(found):
                found.append({})
            found[i] |= dict.fromkeys(stage)
    return [list(stage) for stage in found]


def play(tasks: list[str], systems: list[str], seeds: list[str], budget: int, out: str, at_once: int) -> bool:
    """Tuning, then the seeds that count, task by task; whether all is there."""
    whole = True
    for task in tasks:
        if not TASKS[task].rates:
            whole &= carry_out(entries_of(task, budget, tries_of(task, systems), TUNING_SEEDS), out, at_once)
        finals, store = entries_of(task, budget, tuned(task, systems, budget, out), seeds), read_store(out)
        make_starts([entry for entry in finals if is_missing(entry, store)], at_once)
        for seed in seeds:  # one after the other, so that what is cut off has all systems of some seeds
            whole &= carry_out([entry for entry in finals if entry.seed == seed], out, at_once)
    return whole


def tuned(task: str, systems: list[str], budget: int, out: str) -> list[tuple[str, str]]:
    """The systems of a task that have a setting, and their rates."""
    store = read_store(out)
    found = {name: best_rate(task, name, budget, store) for name in played_at(task, systems)}
    return [(name, rate) for name, rate in found.items() if rate is not None]


def run_again(tasks: list[str], systems: list[str], seeds: list[str], budget: int, out: str, at_once: int) -> bool:
    """Makes rows once more, from nothing, and prints them beside what is stored. Raises BadInput where one is not."""
    stored, whole = read_store(out), True
    places = places_of([row for row in stored.values() if row["budget"] == str(budget)])
    for task, seed in product(tasks, seeds):
        for name in played_at(task, systems):
            if (task, name) not in places or (task, name, places[task, name].rate, seed, str(budget)) not in stored:
                raise BadInput(f"--again: {out} has no run of {name} at {task} with seed {seed} and {budget:,} tokens")
    with tempfile.TemporaryDirectory(prefix="league-again-") as fresh:
        os.environ["NANOCHAT_BASE_DIR"] = fresh  # nothing has asked base_dir() yet, which reads it once
        make_folder(log_of(""))
        make_tokenizer(tasks, at_once)
        for task in tasks:
            tries = [(name, places[task, name].rate) for name in played_at(task, systems)]
            entries = entries_of(task, budget, tries, seeds)
            whole &= carry_out(entries, os.path.join(fresh, "store"), at_once)
            made = read_store(os.path.join(fresh, "store"))
            for entry in entries:
                now, then = made.get(entry.key, {}), stored.get(entry.key, {})
                print0(f"{task} {entry.system} seed {entry.seed}: solved {then.get('gen/pass1_in after', '-')} stored, "
                       f"{now.get('gen/pass1_in after', '-')} now; tokens {then.get('tokens', '-')} and "
                       f"{now.get('tokens', '-')}")
    return whole


def make_tokenizer(tasks: list[str], at_once: int) -> None:
    """That of all tasks but those with a real model, which brings its own."""
    jobs = [Job("tokenizer", "scripts.tok_train", path_of("tokenizer"), "tokenizer.pkl", "--task chain")]
    if set(tasks) & set(GENERATED) and not carry_out_all(jobs, at_once):
        sys.exit(1)


def tasks_and_systems(tasks: str | None, systems: str | None) -> tuple[list[str], list[str]]:
    """What two flags choose. Raises BadInput for a name that is not there, for a task that none of the systems is for,
    and for a system that is for none of the tasks."""
    names = list(SYSTEMS) if systems is None else chosen("systems", systems)
    for name in names:
        system_of(name)
    check_names(names)
    if tasks is None:
        return [task for task in GENERATED if played_at(task, names)], names
    found = chosen("tasks", tasks, TASKS)
    for name in names if systems is not None else []:
        if not set(found) & set(system_of(name).tasks):
            raise BadInput(f"--systems {name}: it is for {', '.join(system_of(name).tasks)}, not for {tasks}")
    for task in found:
        if not played_at(task, names):
            raise BadInput(f"--tasks {task}: none of {', '.join(names)} is for it")
    return found, names


def take_own_folder(tasks: list[str]) -> None:
    """A real model has a tokenizer of its own: its task has a base directory of its own, in that of the others. Raises
    BadInput where it is not alone."""
    for name in (name for name in tasks if name not in GENERATED):
        if len(tasks) > 1:
            raise BadInput(f"--tasks {name}: it has a tokenizer of its own, so it is played alone")
        of_all = os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat-tango-league"
        os.environ["NANOCHAT_BASE_DIR"] = os.path.join(of_all, name)  # nothing has asked base_dir() yet


def main(args) -> None:
    tasks, systems = tasks_and_systems(args.tasks, args.systems)
    systems = list(dict.fromkeys([BASELINE, *systems])) if not args.again else systems
    seeds, at_once = seeds_of(args.seeds), jobs_at_once()
    if shared := set(seeds) & set(TUNING_SEEDS):
        raise BadInput(f"--seeds {min(shared)}: settings are tuned on {', '.join(TUNING_SEEDS)}; take others")
    if args.again and args.report:
        raise BadInput("--again, --report: take one of them")
    if not args.again and args.budget != BUDGET and league_pages.is_default(args.out):
        raise BadInput(f"--budget {args.budget}: {OUT} and the pages in dev are of {BUDGET}; give another --out")
    take_own_folder(tasks)
    check_writable(args.out)
    if args.again:
        sys.exit(0 if run_again(tasks, systems, seeds, args.budget, args.out, at_once) else 1)
    check_one_word("NANOCHAT_BASE_DIR", base_dir())
    finished = [entry for task in tasks if args.report
                for entry in entries_of(task, args.budget, tries_of(task, systems), [*TUNING_SEEDS, *seeds])
                if entry.job.is_done()]
    if args.report and not finished and not read_store(args.out):
        raise BadInput(f"--report: no finished run is in {args.out}, and none of these in {base_dir()}")
    make_folder(log_of(""))
    whole, stop = True, None
    if not args.report:
        make_tokenizer(tasks, at_once)
        try:
            whole = play(tasks, systems, seeds, args.budget, args.out, at_once)
        except StopRequested as error:  # the pages of what is finished are written all the same
            stop = error
    else:
        collect(finished, args.out)
    print0(league_pages.write_pages(args.out, args.budget, shlex.join(["bash", "runs/league.sh", *sys.argv[1:]])))
    if stop:
        raise stop
    if not whole:
        sys.exit(1)


if __name__ == "__main__":
    script_main(main, make_parser())
