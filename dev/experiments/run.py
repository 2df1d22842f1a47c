"""
Runs an experiment: arms that start from the same SFT checkpoints, seed by seed; then a table, a csv and curves.

    bash dev/experiments/run.sh                                                     # fig4: on chain, the main arms
    bash dev/experiments/run.sh fig4 --task last_letter --seeds "1 2" --steps 20 --arms "tango grpo"
    bash dev/experiments/run.sh pays --dial pressure --settings kl0
    bash dev/experiments/run.sh selfplay --families "no_labels tools"
    bash dev/experiments/run.sh verifiers --arms "grpo sft orm prm_gold"
    bash dev/experiments/run.sh smol --arms "grpo tango fixed_verifier"
    bash dev/experiments/run.sh questions --questions "transfer gaming" --seeds "41 42 43 44 45"

fig4: arms that differ in one thing. pays: when does co-training pay? The same arms at the settings of a dial. selfplay:
self-play, teams, own judges, missing labels, tools, each beside the baseline of its family. verifiers: each is trained,
judges the same solutions, and rewards the same generator. smol: SmolLM2-135M on word problems. arms.py and arms_*.py
say what there is. A run is one process, JOBS of them at a time (default: the number of cores). What is finished is
reused, what was interrupted goes on.
"""
import argparse
import itertools
import os
import re
import shlex
import sys
import time
from dataclasses import replace
from statistics import mean

from dev.experiments import arms_questions, arms_selfplay, arms_smol, arms_verifiers
from dev.experiments.arms import (DIALS, LISTS, PARTNERS, TASKS, Experiment, all_arms, arms_of, check_steps, chosen,
                                  experiment, setups_of)
from dev.experiments.arms_questions import QUESTIONS
from dev.experiments.arms_selfplay import FAMILIES
from dev.experiments.arms_verifiers import VERIFIERS
from dev.experiments.jobs import (Job, carry_out_all, check_made_alike, check_one_word, job_of, log_of, models_of,
                                  needed, runs_of, stages_of, starts_of_jobs)
from dev.experiments.table import WATCHED, Table, write_all
from nanochat.cli import at_least, check_choices, script_main
from nanochat.common import BadInput, StopRequested, check_device, print0
from nanochat.hf.files import read_json
from nanochat.rl.report.report import (Run, change, check_comparable, paired, read_run, spread, tidy,
                                       write_csv)
from nanochat.storage.files import base_dir, check_writable, make_folder, path_of

OF_ARMS = ("task", "start", "steps", "dial", "settings")
OF_SMOL = ("sft_steps", "examples", "gsm8k_data", "device_type")
# name: the flags that it has beside those of all, and the folder of its reports
EXPERIMENTS = {"fig4": (OF_ARMS, "dev/curves"), "pays": (OF_ARMS, "dev/curves"),
               "selfplay": (("families",), "dev/curves/selfplay"), "verifiers": ((), "dev/curves/verifiers"),
               "smol": (("steps", *OF_SMOL), "dev/curves/smol"),
               "questions": (("questions",), "dev/curves/questions")}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("experiment", nargs="?", default="fig4",
                        help=f"one of: {', '.join(EXPERIMENTS)}; stands before all flags (default: %(default)s)")
    parser.add_argument("--seeds", default="1 2 3")
    parser.add_argument("--arms", help="default: the main ones of fig4 and pays, all of one family or question, of "
                        "verifiers or of smol; a family's baseline comes along")
    parser.add_argument("--task", help=f"of fig4, one of: {', '.join(TASKS)}; default: chain")
    parser.add_argument("--start", help="of fig4: sft (default), or refine: after it a second SFT, of second attempts")
    parser.add_argument("--steps", help="of the generator, in fig4, pays and smol; default: the task's, the setting's, "
                        f"of smol {arms_smol.STEPS}; smol's GRPO goes on for {arms_smol.LONGER} times as many")
    parser.add_argument("--dial", help=f"of pays, one or more of: {', '.join(DIALS)}; default: all")
    parser.add_argument("--settings", help="of one dial; default: all")
    parser.add_argument("--families", help=f"of selfplay, one or more of: {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--questions", help=f"of questions, one or more of: {', '.join(QUESTIONS)}; default: all")
    parser.add_argument("--sft-steps", type=at_least(1), help=f"of smol, of each SFT; default: {arms_smol.SFT_STEPS}")
    parser.add_argument("--examples", type=at_least(1), help=f"of smol: problems a step; default: {arms_smol.EXAMPLES}")
    parser.add_argument("--gsm8k-data", help="of smol: a folder with train.jsonl and test.jsonl in GSM8K's form, on "
                        "whose test every run is scored too")
    parser.add_argument("--device-type", choices=["cpu", "cuda"], help="of smol; default: cpu")
    parser.add_argument("--out", help="folder of the reports; a dial's is in a folder of its name there; default: "
                        "dev/curves, of selfplay, verifiers and smol a folder of that name there")
    parser.add_argument("--list", nargs="?", const="flags", help="print the flags of every arm of fig4 or pays, or of "
                        f"every process of the others, or a list of arms ({', '.join(LISTS)}), and stop")
    flags = [flag for flag in parser._option_string_actions if flag not in ("-h", "--help")]
    parser.explain = lambda message: f"{message} (there are {', '.join(flags)})"
    return parser


# What is asked for

def tables_of_arms(args) -> list[Table]:
    if args.experiment == "pays" and args.dial is None:
        args.dial = " ".join(DIALS)
    tables = []
    for dial, setups in setups_of(args).items():
        arms = [all_arms(e) if args.list and args.arms is None else arms_of(e, args.arms) for e in setups]
        tables.append(Table(dial or setups[0].name, list(map(experiment, setups, arms)), dial, partners=PARTNERS,
                            alike=tuple(itertools.chain(*arms))))
    return tables


def tables_of_families(args) -> list[Table]:
    names = list(FAMILIES) if args.families is None else chosen("families", args.families, FAMILIES)
    arms = {name: list(FAMILIES[name].arms) for name in names}
    if args.arms is not None:
        if len(names) != 1:
            raise BadInput(f"--arms {args.arms}: of which family? Name one with --families")
        asked = chosen("arms", args.arms, arms[names[0]])
        arms = {names[0]: list(dict.fromkeys([FAMILIES[names[0]].baseline, *asked]))}
    return [Table(name, [arms_selfplay.experiment(name, arms[name])], words=family.words, baseline=family.baseline,
                  watched=family.watched, all_metrics=False) for name, family in FAMILIES.items() if name in arms]


def tables_of_questions(args) -> list[Table]:
    names = list(QUESTIONS) if args.questions is None else chosen("questions", args.questions, QUESTIONS)
    arms = {name: list(QUESTIONS[name].arms) for name in names}
    if args.arms is not None:
        if len(names) != 1:
            raise BadInput(f"--arms {args.arms}: of which question? Name one with --questions")
        arms = {names[0]: chosen("arms", args.arms, arms[names[0]])}
    return [table_of_question(name, arms[name]) for name in names]


def table_of_question(name: str, arms: list[str]) -> Table:
    of = QUESTIONS[name]
    return Table(name, [arms_questions.experiment(arms)], words=of.words, baseline=of.baseline,
                 watched=arms_questions.WATCHED, all_metrics=False, kept=(arms_questions.COST,),
                 partners={arm: partner for arm, partner in of.arms.items() if partner},
                 rows=lambda run: [arms_questions.row_of(name, run)])


def tables_of_verifiers(args) -> list[Table]:
    names = list(VERIFIERS) if args.arms is None else chosen("arms", args.arms, VERIFIERS)
    e = arms_verifiers.experiment(names)
    # runs of judges with longer texts, and a supervisor's, have other flags than the others
    alike = tuple(name for name in names
                  if name != "supervisor" and not arms_verifiers.OF_SEVERAL.get(VERIFIERS[name].judge))
    return [Table(e.name, [e], words=f"on {arms_verifiers.TASK}; as judges: before RL",
                  watched={name: WATCHED[name] for name in ("gen/pass1_in", "gen/pass1_out")}, titles=TITLES,
                  own=lambda name, seeds: columns_of_verifier(e, name, seeds), alike=alike,
                  training=lambda seeds: training_runs(e, seeds))]


def tables_of_smol(args) -> list[Table]:
    check_steps(args)
    args.steps, args.sft_steps = int(args.steps or arms_smol.STEPS), args.sft_steps or arms_smol.SFT_STEPS
    args.examples, args.device_type = args.examples or arms_smol.EXAMPLES, args.device_type or "cpu"
    if args.gsm8k_data is not None:
        args.gsm8k_data = args.gsm8k_data and os.path.abspath(args.gsm8k_data)
        arms_smol.check_data(args.gsm8k_data)
    names = list(arms_smol.ARMS) if args.arms is None else chosen("arms", args.arms, arms_smol.ARMS)
    e = arms_smol.experiment(args, names)
    alike = tuple(name for name in names if arms_smol.start_of(name) == arms_smol.start_of(arms_smol.LONG))
    return [Table(e.name, [e], words="on SmolLM2-135M, two-step word problems", watched=arms_smol.WATCHED,
                  compared={metric: words for metric, (words, *_) in arms_smol.SCORED.items()},
                  partners=arms_smol.PARTNERS, longer="longer", alike=alike,
                  apart=tuple(set(names) - set(alike)),
                  scorings=lambda run: arms_smol.scorings(args, run),
                  rows=lambda run: arms_smol.with_scores(args, run))]


TABLES = {"fig4": tables_of_arms, "pays": tables_of_arms, "selfplay": tables_of_families,
          "verifiers": tables_of_verifiers, "smol": tables_of_smol, "questions": tables_of_questions}


def jobs_at_once() -> int:
    """JOBS, or the number of cores. Raises BadInput."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    given = os.environ.get("JOBS") or str(cores)
    if not re.fullmatch("[1-9][0-9]*", given):
        raise BadInput(f"JOBS {given}: must be a number from 1")
    return int(given)


def seeds_of(text: str) -> list[str]:
    """The seeds that --seeds names. Raises BadInput."""
    seeds = chosen("seeds", text)
    for seed in seeds:
        if not re.fullmatch("0|[1-9][0-9]{0,8}", seed):
            raise BadInput(f"--seeds {seed}: must be numbers from 0")
    return seeds


def check_flags(args) -> None:
    """Raises BadInput for an experiment or list that there is not, and for a flag of another experiment."""
    if args.experiment not in EXPERIMENTS:
        raise BadInput(f"{args.experiment}: there are {', '.join(EXPERIMENTS)}")
    if args.experiment in sys.argv[2:] and sys.argv[1] != args.experiment:
        raise BadInput(f"{args.experiment}: stands before all flags")
    if args.out == "":
        raise BadInput("--out: names no folder")
    check_one_word("NANOCHAT_BASE_DIR", base_dir())
    if args.list is not None:
        check_choices(args, {"list": (*LISTS, "flags")})
    for flag in (*OF_ARMS, "families", "questions", *OF_SMOL):
        if getattr(args, flag) is not None and flag not in EXPERIMENTS[args.experiment][0]:
            raise BadInput(f"--{flag.replace('_', '-')}: {args.experiment} has no such flag")


# What a verifier's line also tells

# name in a summary, title, factor
JUDGED = [("step_f1", "step F1", 100), ("step_auc", "step AUC", 100), ("first_error_f1", "first-error F1", 100),
          ("first_error_auc", "first-error AUC", 100), ("outcome_auc", "outcome AUC", 100), ("ece", "ECE", 100),
          ("maj", "majority of 8", 100), ("bon", "best of 8", 100), ("weighted", "weighted vote", 100),
          ("tokens", "tokens per judgment", 1)]
CHOOSING = {"ver/pair_acc_in": "pairs", "ver/acc_k1_in": "right solution highest"}  # of judges of several solutions
TITLES = ("what it is", *(title for _, title, _ in JUDGED), "choosing, before -> after its training",
          "tokens of its training")


def read_summary(job: Job) -> dict:
    return read_json(os.path.join(job.folder, job.done))


def training_cost(e: Experiment, name: str, seed: str) -> float:
    """Tokens sampled for a verifier's training, in thousands: solutions and completions of its labels, the training of
    a generator that completes, and its own."""
    tokens = 0
    for start in needed(e, e.arms[name]):
        if e.starts[start].kind != "sft":
            found = read_summary(job_of(e, e.starts[start], seed))
            tokens += found["cost"]["tokens"] if e.starts[start].kind == "labels" else found["sampled_tokens"]
            tokens += found["solution_tokens"] if start.startswith("gold") else 0
    return tokens / 1000


def training_runs(e: Experiment, seeds: list[str]) -> list[Run]:
    """The finished runs that trained the verifiers, each under the name of its arm."""
    jobs = [(name, job_of(e, e.starts[f"train_{name}"], seed)) for name in e.arms if VERIFIERS[name].recipe
            for seed in seeds]
    return [replace(read_run(job.folder), task=e.name, arm=name) for name, job in jobs if job.is_done()]


def columns_of_verifier(e: Experiment, name: str, seeds: list[int]) -> list[str]:
    """The texts of TITLES."""
    judged = [read_summary(run)["before"] for run in runs_of(e._replace(arms={name: e.arms[name]}), seeds)]
    columns, is_trained = [VERIFIERS[name].words], bool(VERIFIERS[name].recipe)
    for key, _, factor in JUDGED:
        values = [found.get(f"ver/{key}_fixed") for found in judged]
        columns.append("-" if None in values else spread([value * factor / 100 for value in values]))
    trained = [read_summary(job_of(e, e.starts[f"train_{name}"], seed)) for seed in seeds] if is_trained else []
    choosing = []
    for metric, words in CHOOSING.items():
        if pairs := [(run["before"][metric], run["after"][metric]) for run in trained if metric in run["before"]]:
            gain = paired([after - before for before, after in pairs], len(seeds))
            choosing.append(f"{words} {change(pairs)} ({gain})")
    costs = [training_cost(e, name, seed) for seed in seeds]
    return [*columns, ", ".join(choosing) or "-", f"{mean(costs):.0f}k" if is_trained else "-"]


# All of it

def listed(args, stages: list[list[Job]], seed: str) -> list[str]:
    """The lines of --list flags: of arms what they are called, of others each process."""
    if TABLES[args.experiment] is tables_of_arms:
        names = {job: job.name if args.dial else job.name.partition("-")[2] for job in stages[-1]}
    else:
        names = {job: job.name for job in itertools.chain(*stages)}
    return [f"{name.removesuffix(f'-s{seed}')} {job.flags}" for job, name in names.items()]


def named(run: Run, name: str) -> Run:
    """A run that stands for one of this name."""
    task, arm = re.fullmatch(r"(\w+)-(.+)-s\d+", name).groups()
    return replace(run, name=name, task=task, arm=arm)


def report(table: Table, seeds: list[str], models: dict[Job, Job], out: str, first_line: str) -> bool:
    """Writes the report of the finished runs; whether all are. Raises BadInput where they cannot be compared."""
    jobs = [job for e in table.experiments for job in runs_of(e, seeds)]
    finished = [job for job in jobs if models[job].is_done()]
    for job in jobs:
        if job not in finished:
            print(f"not finished, left out: {job.name}", file=sys.stderr, flush=True)
    if finished:
        runs = [row for job in finished for row in table.rows(
            named(read_run(models[job].folder, watched=list(table.watched)), job.name))]
        for setting in {run.task for run in runs}:
            check_comparable([run for run in runs if run.task == setting and run.arm in table.alike])
        make_folder(out)
        print0(write_all(table, runs, out, first_line))
        if trained := table.training(seeds):
            write_csv(tidy(trained), os.path.join(out, f"{table.name}_training.csv"))
    return len(finished) == len(jobs)


def main(args) -> None:
    check_flags(args)
    if args.list in LISTS:
        print0(" ".join(LISTS[args.list]))
        return
    seeds, at_once, tables = seeds_of(args.seeds), jobs_at_once(), TABLES[args.experiment](args)
    experiments = [e for table in tables for e in table.experiments]  # what several share is made once
    stages = stages_of(experiments, seeds[:1] if args.list else seeds)
    if args.list:
        print0("\n".join(listed(args, stages, seeds[0])))
        return
    if args.device_type:
        check_device(args.device_type)
    scorings = {job: [score for table in tables for score in table.scorings(job.name)] for job in stages[-1]}
    for job in itertools.chain(*stages, *scorings.values()):
        check_made_alike(job)
    folders = args.out or EXPERIMENTS[args.experiment][1], log_of("")
    for folder in folders:
        check_writable(folder)
    for folder in folders:
        make_folder(folder)
    tokenizer = Job("tokenizer", "scripts.tok_train", path_of("tokenizer"), "tokenizer.pkl", "--task chain")
    first = [tokenizer] if args.experiment != "smol" else []  # that of SmolLM2 is imported with it
    started = time.time()
    if not carry_out_all(first, at_once):
        sys.exit(1)
    before = {job: starts for e in experiments for job, starts in starts_of_jobs(e, seeds).items()}
    can_start = lambda job: all(start.is_done() for start in before.get(job, []))
    models, stop = models_of(stages[-1]), None
    of_run = {score: job for job, scores in reversed(scorings.items()) for score in scores}  # the first that has it
    after = {models[job]: [score for score in scores if of_run[score] is job] for job, scores in scorings.items()}
    try:
        for stage in stages:  # what needs a start that failed is left out
            is_whole = carry_out_all(list(filter(can_start, stage)), at_once, after)
    except StopRequested as error:  # the tables of what is finished are written all the same
        is_whole, stop = False, error
    command = shlex.join(["bash", "dev/experiments/run.sh", *sys.argv[1:]])
    minutes = (time.time() - started) // 60
    first_line = f"`{command}`: {minutes:.0f} minutes, {at_once} runs at a time; what was finished was not run again."
    for table in tables:
        is_whole &= report(table, seeds, models, os.path.join(folders[0], table.folder), first_line)
    if stop:
        raise stop
    if not is_whole:
        sys.exit(1)


if __name__ == "__main__":
    script_main(main, make_parser())
