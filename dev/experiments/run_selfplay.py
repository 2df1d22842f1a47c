"""
Compares systems of self-play, teams, own judges, missing labels and tools, family by family and seed by seed. The arms
of a family start from the same SFT checkpoints. selfplay_arms.py says which there are, and selfplay.sh starts it.

    bash dev/experiments/selfplay.sh --families "no_labels tools" --seeds "1"

A run is one process, JOBS of them at a time. What is finished is reused, what was interrupted goes on. Writes
<family>.md, <family>.csv and <family>.png: a table, all evaluations, and the curves of what is watched.
"""
import argparse
import os
import shlex
import sys
import time

from dev.experiments.arms import words_of
from dev.experiments.run_arms import (Job, carry_out_all, check_made_alike, cpu_name, jobs_at_once, log_of,
                                      make_tokenizer, num_cores, seeds_of, sft_job_of)
from dev.experiments.selfplay_arms import FAMILIES, RL, flags_of, needed
from nanochat.common import BadInput, print0, script_main
from nanochat.rl.report.page import draw_curves
from nanochat.rl.report.report import (Run, at_equal_tokens, change, curve, mean, paired, provenance, read_run, spread,
                                       tidy, write_csv)
from nanochat.storage.files import check_writable, make_folder, path_of, whole_file


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--seeds", default="1 2 3")
    parser.add_argument("--families", default=" ".join(FAMILIES), help="default: %(default)s")
    parser.add_argument("--arms", help="of one family; default: all. The baseline comes along")
    parser.add_argument("--list", action="store_true", help="print the families, their arms and flags, and stop")
    parser.add_argument("--out", default="dev/curves/selfplay", help="folder of the reports (default: %(default)s)")
    return parser


# Jobs

def run_job(name: str, arm: str, seed: str) -> Job:
    run = f"{name}-{arm}-s{seed}"
    return Job(run, "scripts.tango_rl", path_of("runs", run), "summary.json",
               flags_of(name, seed, f"{RL} {FAMILIES[name].arms[arm]}"))


def start_job(name: str, start: str, seed: str) -> Job:
    tag, flags = f"{name}-{start}-s{seed}", FAMILIES[name].starts[start]
    saved_as = "--verifier-tag" if "--role verifier" in flags else "--model-tag"
    return sft_job_of(tag, flags_of(name, seed, f"{saved_as} {tag} {flags}"))


def stages_of(arms: dict[str, list[str]], seeds: list[str]) -> list[list[Job]]:
    """What must be done before what: the SFTs, each behind those that it starts from, and the runs. arms: of each
    family."""
    starts = {name: needed(FAMILIES[name], chosen) for name, chosen in arms.items()}
    depth = max(map(len, starts.values()), default=0)
    stages = [[start_job(name, start, seed) for name, of_family in starts.items() for start in of_family[i: i + 1]
               for seed in seeds] for i in range(depth)]
    return [*stages, [run_job(name, arm, seed) for name, chosen in arms.items() for arm in chosen for seed in seeds]]


def arms_of(args) -> dict[str, list[str]]:
    """The arms of each family that is asked for. Raises BadInput for what there is not."""
    names = words_of("families", args.families)
    for name in names:
        if name not in FAMILIES:
            raise BadInput(f"--families {name}: there are {' '.join(FAMILIES)}")
    if args.arms is None:
        return {name: list(FAMILIES[name].arms) for name in names}
    if len(names) != 1:
        raise BadInput(f"--arms {args.arms}: of which family? Name one with --families")
    family = FAMILIES[names[0]]
    for arm in (asked := words_of("arms", args.arms)):
        if arm not in family.arms:
            raise BadInput(f"--arms {arm}: there are {' '.join(family.arms)}")
    return {names[0]: list(dict.fromkeys([family.baseline, *asked]))}


# The table

def row_of(arm: str, runs: dict[int, Run], baseline: dict[int, Run], watched: dict[str, str]) -> list[str]:
    """An arm's line: what is watched, first to last, and how the first of it compares with the baseline's, at the end
    and at as many sampled tokens as the baseline has in all. By seed."""
    first = next(iter(watched))
    ends = {seed: run.points[-1].get(first) for seed, run in runs.items()}
    cells = [arm, " ".join("-" if value is None else f"{100 * value:.1f}" for value in ends.values()),
             spread(list(ends.values()))]
    row, gains, equal = {"arm": arm, "seeds": len(runs)}, [], []
    for seed in runs.keys() & baseline.keys() if runs is not baseline else ():
        final = baseline[seed].points[-1].get(first)
        at = at_equal_tokens(runs[seed], baseline[seed], first)
        gains += [] if None in (ends[seed], final) else [ends[seed] - final]
        equal += [] if None in (at, final) else [at - final]
    cells += [paired(gains, row), paired(equal, row)]
    for metric in watched:  # what is shown per step has no value before the first one
        values = [curve(run, metric, "sampled_tokens")[1] for run in runs.values()]
        cells.append(change([(found[0], found[-1]) for found in values if found]))
    tokens = mean([run.points[-1]["sampled_tokens"] for run in runs.values()])
    return [*cells, f"{tokens / 1e6:.2f}M"]


def table_of(name: str, runs: list[Run]) -> str:
    """The finished runs of a family, one line per arm."""
    family = FAMILIES[name]
    of_arm = {arm: {run.seed: run for run in runs if run.arm == arm} for arm in family.arms}
    words = next(iter(family.watched.values()))
    titles = ["arm", f"{words}, by seed", words, f"minus {family.baseline}", f"at {family.baseline}'s tokens",
              *(f"{words}, first -> last" for words in family.watched.values()), "tokens"]
    baseline = of_arm[family.baseline]
    rows = [row_of(arm, found, baseline, family.watched) for arm, found in of_arm.items() if found]
    return "\n".join(f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows])


def report(name: str, jobs: list[Job], out: str, first_line: str) -> bool:
    """Writes a family's report of its finished runs; whether all are."""
    for job in jobs:
        if not job.is_done():
            print(f"not finished, left out: {job.name}", file=sys.stderr, flush=True)
    runs = [read_run(job.folder, watched=list(FAMILIES[name].watched)) for job in jobs if job.is_done()]
    if runs:
        text = "\n\n".join([first_line, f"{name}: {FAMILIES[name].words}", table_of(name, runs),
                            provenance(runs)]) + "\n"
        path = os.path.join(out, name)
        write_csv([row for row in tidy(runs) if row["metric"] in FAMILIES[name].watched], f"{path}.csv")
        draw_curves(runs, f"{path}.png", FAMILIES[name].watched)
        with whole_file(f"{path}.md") as f:
            f.write(text)
        print0(text)
    return len(runs) == len(jobs)


def main(args) -> None:
    arms, seeds, at_once = arms_of(args), seeds_of(args.seeds), jobs_at_once()
    if args.list:
        print0("\n".join(f"{job.name.removesuffix(f'-s{seeds[0]}')} {job.flags}"
                         for stage in stages_of(arms, seeds[:1]) for job in stage))
        return
    stages = stages_of(arms, seeds)
    for job in (job for stage in stages for job in stage):
        check_made_alike(job)
    for folder in (args.out, log_of("")):
        check_writable(folder)
        make_folder(folder)
    started = time.time()
    if not (make_tokenizer(at_once) and all(carry_out_all(stage, at_once) for stage in stages[:-1])):
        sys.exit(1)  # what comes next starts from it
    is_whole = carry_out_all(stages[-1], at_once)
    first_line = (f"`{shlex.join(['bash', 'dev/experiments/selfplay.sh', *sys.argv[1:]])}`, {num_cores()} cores of "
                  f"{cpu_name()}, {at_once} runs of one thread at a time; this call took "
                  f"{(time.time() - started) // 60:.0f} minutes (finished runs are not run again).")
    for name in arms:
        is_whole &= report(name, [job for job in stages[-1] if job.name.startswith(f"{name}-")], args.out, first_line)
    if not is_whole:
        sys.exit(1)


if __name__ == "__main__":
    script_main(main, make_parser())
