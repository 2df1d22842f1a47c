"""
Compares verifiers of every kind, seed by seed: each is trained from the same SFT checkpoints, judges the same
solutions, and rewards a generator from the same start. dev/experiments/verifier_arms.py says which there are, and
dev/experiments/verifiers.sh starts it.

    bash dev/experiments/verifiers.sh --seeds "1" --verifiers "grpo sft orm prm_gold"

A run is one process, JOBS of them at a time. What is finished is reused, what was interrupted goes on. Writes
verifiers.md, with a table of the verifiers as judges and as rewards, and the curves and page of the rewarded runs.
"""
import argparse
import json
import os
import shlex
import sys

from dev.experiments.arms import words_of
from dev.experiments.run_arms import (Job, carry_out_all, check_made_alike, cpu_name, jobs_at_once, log_of,
                                      make_tokenizer, num_cores, report, seeds_of, sft_job)
from dev.experiments.verifier_arms import (E, OF_SEVERAL, STEPS, STRONG, TASK, VERIFIERS, kind_of, label_flags,
                                           reward_flags, reward_name, training_flags)
from nanochat.common import BadInput, print0, script_main
from nanochat.rl.report.report import mean, paired, spread
from nanochat.rl.verify.forms import FORMS
from nanochat.storage.files import check_writable, make_folder, path_of, whole_file

# name in a summary, title, factor
JUDGED = [("step_f1", "step F1", 100), ("step_auc", "step AUC", 100), ("first_error_f1", "first-error F1", 100),
          ("first_error_auc", "first-error AUC", 100), ("outcome_auc", "outcome AUC", 100), ("ece", "ECE", 100),
          ("maj", "majority of 8", 100), ("bon", "best of 8", 100), ("weighted", "weighted vote", 100),
          ("tokens", "tokens per judgment", 1)]
# metric of a summary: what it measures
CHOOSING = {"ver/pair_acc_in": "pairs judged rightly", "ver/acc_k1_in": "right solution scored highest"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--seeds", default="1 2 3")
    parser.add_argument("--verifiers", default=" ".join(VERIFIERS), help="default: %(default)s")
    parser.add_argument("--list", action="store_true", help="print what each verifier is, and stop")
    parser.add_argument("--out", default="dev/curves/verifiers", help="folder of the report (default: %(default)s)")
    return parser


# Jobs

def labels_file(seed: str, labels: str) -> str:
    return path_of("labels", f"{TASK}-{labels}-s{seed}", "labels.jsonl")


def one_spaced(flags: str) -> str:
    return " ".join(flags.split())


def label_job(seed: str, labels: str) -> Job:
    """Gold labels come with the solutions, which the others label."""
    given = "" if labels == "gold" else labels_file(seed, "gold")
    path = labels_file(seed, labels)
    return Job(f"labels-{labels}-s{seed}", "scripts.label_steps", os.path.dirname(path), "labels.summary.json",
               one_spaced(label_flags(seed, labels, given, path)))


def training_job(seed: str, name: str) -> Job:
    run, labels = f"{E.name}-train_{name}-s{seed}", VERIFIERS[name].labels
    return Job(run, "scripts.tango_rl", path_of("runs", run), "summary.json",
               one_spaced(training_flags(seed, name, labels and labels_file(seed, labels))))


def reward_job(seed: str, name: str) -> Job:
    run = reward_name(seed, name)
    return Job(run, "scripts.tango_rl", path_of("runs", run), "summary.json",
               one_spaced(reward_flags(seed, name, f"{training_job(seed, name).name}-ver")))


def stages_of(seeds: list[str], names: list[str]) -> list[list[Job]]:
    """What must be done before what: generators' SFT, verifiers' SFT, that of judges of several solutions, solutions
    with gold labels, the oracle's generator where it completes for others, other labels, training, rewarded runs."""
    used = dict.fromkeys(VERIFIERS[name].labels for name in names if VERIFIERS[name].labels)
    judged = [name for name in names if VERIFIERS[name].judge]
    kinds = dict.fromkeys(kind_of(VERIFIERS[name].start) for name in judged)
    several = [kind for kind in kinds if kind in FORMS]
    single = [kind for kind in kinds if kind != "sft" and kind not in several] + ["long"] * bool(several)
    return [[sft_job(E, seed, "sft") for seed in seeds],
            [sft_job(E, seed, kind) for seed in seeds for kind in single],
            [sft_job(E, seed, kind) for seed in seeds for kind in several],
            [label_job(seed, "gold") for seed in seeds if used],
            [reward_job(seed, "oracle") for seed in seeds if any(labels.endswith(STRONG) for labels in used)],
            [label_job(seed, labels) for seed in seeds for labels in used if labels != "gold"],
            [training_job(seed, name) for seed in seeds for name in judged if VERIFIERS[name].recipe],
            [reward_job(seed, name) for seed in seeds for name in names]]


# The tables

def read_summary(job: Job) -> dict:
    with open(os.path.join(job.folder, job.done), encoding="utf-8") as f:
        return json.load(f)


def training_cost(seed: str, name: str) -> float | None:
    """Tokens sampled for a verifier's training, in thousands: its labels' solutions and completions, the training of
    the generator that completes if it is the oracle's, and its own."""
    v = VERIFIERS[name]
    if not v.recipe:
        return None
    tokens = read_summary(reward_job(seed, "oracle"))["sampled_tokens"] if v.labels.endswith(STRONG) else 0
    for labels in dict.fromkeys(["gold", v.labels]) if v.labels else ():
        found = read_summary(label_job(seed, labels))
        tokens += found["cost"]["tokens"] + (found["solution_tokens"] if labels == "gold" else 0)
    return (tokens + read_summary(training_job(seed, name))["sampled_tokens"]) / 1000


def by_seed(values: dict[str, float], seeds: list[str]) -> str:
    """Shares in percent, in the order of the seeds; - for one that has none."""
    return " ".join(f"{100 * values[seed]:.1f}" if seed in values else "-" for seed in seeds)


def row_of(name: str, seeds: list[str], baseline: dict[str, float]) -> list[str]:
    """A verifier's line, over the seeds that are finished: as a judge, what it cost, and as a reward. baseline: GRPO's
    final accuracy by seed."""
    done = [seed for seed in seeds if reward_job(seed, name).is_done()]
    summaries = {seed: read_summary(reward_job(seed, name)) for seed in done}
    final = {seed: found["after"]["gen/pass1_in"] for seed, found in summaries.items()}
    cells = [name, VERIFIERS[name].words]
    for key, _, factor in JUDGED:
        values = [found["before"].get(f"ver/{key}_fixed") for found in summaries.values()]
        cells.append("-" if None in values else spread([v * factor / 100 for v in values]))
    costs = [training_cost(seed, name) for seed in done]
    cells.append("-" if None in costs else f"{mean(costs):.0f}k")
    gains = [final[seed] - baseline[seed] for seed in done if seed in baseline]
    longer = [found["after"]["gen/pass1_out"] for found in summaries.values()]
    tokens = mean([found["sampled_tokens"] for found in summaries.values()])
    return [*cells, by_seed(final, seeds), spread(list(final.values())),
            paired(gains, {"arm": name, "seeds": len(done)}), spread(longer), f"{tokens / 1e6:.2f}M"]


def table_of(seeds: list[str], names: list[str]) -> str:
    """All verifiers of which a seed is finished in one table."""
    done = [name for name in names if any(reward_job(seed, name).is_done() for seed in seeds)]
    baseline = {seed: read_summary(reward_job(seed, "grpo"))["after"]["gen/pass1_in"] for seed in seeds
                if "grpo" in done and reward_job(seed, "grpo").is_done()}
    titles = ["verifier", "what it is", *(title for _, title, _ in JUDGED), "tokens of its training",
              f"final, seeds {', '.join(seeds)}", "final", "minus GRPO", "longer", "tokens"]
    rows = [row_of(name, seeds, baseline) for name in done]
    return "\n".join(f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows])


def training_table(seeds: list[str], names: list[str]) -> str:
    """What training made of the verifiers that choose among several solutions, on held-out ones."""
    rows = [["verifier", "measured", f"before, seeds {', '.join(seeds)}", "after", "after minus before"], ["---"] * 5]
    for name in names:
        jobs = {seed: training_job(seed, name) for seed in seeds if VERIFIERS[name].recipe}
        found = {seed: read_summary(job) for seed, job in jobs.items() if job.is_done()}
        for metric, words in CHOOSING.items():
            before, after = ({seed: summary[when][metric] for seed, summary in found.items() if metric in summary[when]}
                             for when in ("before", "after"))
            if before:
                gains = paired([after[seed] - before[seed] for seed in before], {"arm": name, "seeds": len(before)})
                rows.append([name, words, by_seed(before, seeds), by_seed(after, seeds), gains])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) if rows[2:] else ""


# All of it

def main(args) -> None:
    if args.list:
        print0("\n".join(f"{name:14s} {v.words}" for name, v in VERIFIERS.items()))
        return
    names, seeds, at_once = words_of("verifiers", args.verifiers), seeds_of(args.seeds), jobs_at_once()
    for name in names:
        if name not in VERIFIERS:
            raise BadInput(f"--verifiers {name}: there are {' '.join(VERIFIERS)}")
    stages = stages_of(seeds, names)
    for job in (job for stage in stages for job in stage):
        check_made_alike(job)
    for folder in (args.out, log_of("")):
        check_writable(folder)
        make_folder(folder)
    if not (make_tokenizer(at_once) and all(carry_out_all(stage, at_once) for stage in stages[:-1])):
        sys.exit(1)  # what comes next starts from it
    is_whole = carry_out_all(stages[-1], at_once)
    command = shlex.join(["bash", "dev/experiments/verifiers.sh", *sys.argv[1:]])
    first_line = (f"`{command}`, {num_cores()} cores of {cpu_name()}, {at_once} runs of one thread at a time, task "
                  f"{TASK}, {STEPS} generator steps.")
    alike = [reward_job(seed, name) for seed in seeds for name in names if not OF_SEVERAL.get(VERIFIERS[name].judge)]
    is_whole &= not alike or report("rewards", alike, args.out, first_line)  # runs with other flags are not compared
    tables = table_of(seeds, names), training_table(seeds, names)
    text = "\n\n".join(filter(None, [first_line, *tables])) + "\n"
    with whole_file(os.path.join(args.out, "verifiers.md")) as f:
        f.write(text)
    print0(text)
    if not is_whole:
        sys.exit(1)


if __name__ == "__main__":
    script_main(main, make_parser())
