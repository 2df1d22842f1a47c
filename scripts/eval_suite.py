"""
The benchmarks of RL Tango's paper, and GSM8K and last_letter, on one checkpoint: one table, with 95% intervals, beside
the paper's figures.

Sampling, grading and flags are those of chat_eval; ProcessBench is verifier_eval's, with one greedy verification, and
asks the verifier of --verifier-tag. Data come from the hub, unless flags name files. What cannot be run is a row that
says why: nothing on the hub, a context that is too short, no verifier. A file that a flag names must be there.

    python -m scripts.eval_suite -i rl -g tango-gen --verifier-tag tango-ver --verifier-source rl -m 2048 --out t.json
    python -m scripts.eval_suite -i sft -g smol --benchmarks gsm8k math500 -n 8 -t 1 -x 100 \\
        --gsm8k-data ~/data/gsm8k --math500-data ~/data/test500.jsonl
    python -m scripts.eval_suite -i sft -g smol --benchmarks aime24 aime25 --aime-data aime24.jsonl aime25.jsonl
    torchrun --standalone --nproc_per_node=8 scripts/eval_suite.py -- -i rl -g tango-gen -m 2048

The table is Markdown. --out FILE.json keeps all numbers, written after each benchmark.
"""
import argparse
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

from nanochat.checkpoint import default_tag, find_step, load_meta
from nanochat.cli import check_name, new_parser, parse_flags, script_main
from nanochat.common import BadInput, init_device, on_all_ranks, print0, rank_and_world
from nanochat.hf.card import table
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.measure.intervals import bootstrap_f1, of_mean, wilson
from nanochat.rl.records.outcomes import problems_of
from nanochat.rl.records.prompts import check_prompts_fit
from nanochat.storage.files import found_at, make_folder, write_json
from scripts import chat_eval, verifier_eval
from tasks import TASKS, format_of, make_task
from tasks.competition import SETS
from tasks.formats import FORMATS, PAPER, PROMPTS, with_prompts
from tasks.processbench import HUB, load_processbench


class Benchmark(NamedTuple):
    """A task's splits, scored together. paper: what RL Tango's paper has, in percent; None where it gives no figure."""
    task: str
    splits: tuple[str, ...] = ("test_in",)
    paper: float | None = None

    @property
    def source(self) -> str:
        """The flag that names its data, "" of a task that makes its own."""
        return {"processbench": "processbench", "last_letter": ""}.get(self.task, f"{self.task}_data")


BENCHMARKS = {
    "math500": Benchmark("math500", paper=81.4), "aime24": Benchmark("aime", paper=20.0),
    "aime25": Benchmark("aime", ("test_out",), 20.0), "amc": Benchmark("amc", paper=65.0),
    "olympiad": Benchmark("olympiad", paper=43.9), "gsm8k": Benchmark("gsm8k", ("test_in", "test_out")),
    "last_letter": Benchmark("last_letter"), "last_letter_longer": Benchmark("last_letter", ("test_out",)),
    "processbench": Benchmark("processbench", paper=43.9)}
AVERAGED, PAPER_AVERAGE = ("math500", "aime24", "aime25", "amc", "olympiad"), 46.1
PAPER_OF = {**dict.fromkeys((*AVERAGED, "average"), "GRPO + Tango, Qwen2.5-Math-7B, 200 steps; greedy pass@1"),
            "processbench": "its verifier, Qwen2.5-7B; F1, mean of four subsets"}
NOTES = ("Percent, with 95% intervals over problems: Wilson's, the samples of a problem as a cluster; of F1 the",
         "bootstrap. Last number: of samples whose answer is a number, those whose last number it is. Cut:",
         "completions that did not end; they count as wrong. Paper: RL Tango, arXiv 2505.15034.")
OF_VERIFIER = {"processbench", "verifier_tag", "verifier_source", "verifier_prompt", "format"}  # flags


class NotRun(NamedTuple):
    """Why a benchmark is not run: in two words, and in a line."""
    kind: str
    reason: str


def make_parser():
    parser = new_parser(__doc__)
    chat_eval.add_generation_args(parser)
    parser.add_argument("--benchmarks", nargs="+", default=list(BENCHMARKS), choices=list(BENCHMARKS), metavar="NAME",
                        help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--processbench", default=HUB, metavar="SOURCE",
                        help="a .jsonl, .json or .parquet file, a folder of them, or a hub name; -x is per subset")
    parser.add_argument("--verifier-tag", default="", help="the verifier's checkpoint; default: no ProcessBench")
    parser.add_argument("--verifier-source", choices=["sft", "rl"], default="sft", help="stage of its checkpoint")
    parser.add_argument("--format", choices=list(FORMATS), help="of ProcessBench; default: the verifier's own")
    parser.set_defaults(show=0)
    return parser


def check_args(args) -> None:
    chat_eval.check_generation(args)
    if "task" in args.explicit:
        raise BadInput(f"--task {args.task}: --benchmarks names what is evaluated")
    args.benchmarks = list(dict.fromkeys(args.benchmarks))
    others = TASKS.keys() - {benchmark.task for benchmark in BENCHMARKS.values()}
    if lost := [flag for flag in args.explicit for task in others if flag.startswith(f"{task}_")]:
        raise BadInput(f"--{min(lost).replace('_', '-')}: is of no benchmark; there are {', '.join(BENCHMARKS)}")
    if args.explicit & OF_VERIFIER and not args.verifier_tag:
        raise BadInput(f"--{min(args.explicit & OF_VERIFIER).replace('_', '-')}: needs --verifier-tag")
    if args.out:
        chat_eval.check_out(args.out, {"tag", "step", "seed", "flags", "benchmarks"})


# What is run, and what cannot be

def prepared(args, name: str, device, load):
    """load(), what a benchmark is run on; NotRun where its data are not there and no flag has named them, on all ranks
    alike. Raises BadInput where one has."""
    source = BENCHMARKS[name].source
    try:
        return on_all_ranks(load, device)
    except BadInput as error:
        if not source or source in args.explicit:
            raise
        return NotRun("no data", str(error))


def prepare_task(args, name: str, model, tokenizer, device):
    """A benchmark's task, or NotRun, also where a problem does not fit the model's context. Raises BadInput."""
    benchmark = BENCHMARKS[name]
    task = prepared(args, name, device, partial(make_task, argparse.Namespace(**vars(args) | {"task": benchmark.task})))
    if isinstance(task, NotRun):
        return task
    problems = [p.prompt for split in benchmark.splits for p in problems_of(task, split, args.max_problems)]
    if not problems:
        return NotRun("no data", f"--{benchmark.source.replace('_', '-')} names no file of it; their order is "
                                 f"{' '.join(SETS[benchmark.task].files)}")
    try:
        check_prompts_fit(tokenizer, task.fmt, problems, {"generator": model.config.sequence_len}, args.max_new_tokens,
                          0)
    except BadInput as error:
        return NotRun("too long", str(error))
    return task


class Judge(NamedTuple):
    """What ProcessBench is run on: verifier_eval's flags, the samples, the verifier, its sampler."""
    args: argparse.Namespace
    samples: list
    verifier: object
    sampler: object


def prepare_judge(args, tokenizer, device):
    """The judge, or NotRun. Its format is that of the task that it was trained on. Raises BadInput."""
    if not args.verifier_tag:
        return NotRun("no verifier", "ProcessBench asks a verifier; name it with --verifier-tag")
    samples = prepared(args, "processbench", device, partial(load_processbench, args.processbench, "",
                                                             args.max_problems))
    if isinstance(samples, NotRun):
        return samples
    where = found_at(args.verifier_source, args.verifier_tag,
                     f"meta_{find_step(args.verifier_source, args.verifier_tag):06d}.json")
    fmt = FORMATS[args.format] if args.format else format_of(load_meta(where)[0]["user_config"], where) or PAPER
    asked = parse_flags(verifier_eval.make_parser(), [
        "--verifier-tag", args.verifier_tag, "--verifier-source", args.verifier_source, "--processbench",
        args.processbench, "--max-examples", str(args.max_problems), "--max-rows", str(args.max_rows),
        "--device-type", args.device_type, "--seed", str(args.seed), "--format", fmt.name])
    vars(asked).update({prompt: getattr(args, prompt) for prompt in PROMPTS.keys() & args.explicit})
    verifier, _, _, sampler = verifier_eval.load_players(asked, tokenizer, device)
    reader = SimpleNamespace(fmt=with_prompts(fmt, vars(asked)))
    return Judge(asked, samples, verifier, replace(sampler, task=reader))


# Rows of the table

def solved_row(args, name: str, task, model, tokenizer, device) -> dict:
    """A benchmark's scores, as chat_eval prints them, with intervals, and how many completions were cut."""
    sampler, n = chat_eval.sampler_of(args, task, tokenizer), args.num_samples
    rows = [row for split in BENCHMARKS[name].splits
            for row in chat_eval.solve(args, task, split, model, sampler, device)]
    scores = chat_eval.print_rows(name, rows, n)
    intervals = {"pass@1": wilson([row["right"] / n for row in rows], n)}
    if n > 1:
        intervals[f"maj@{n}"] = wilson([float(row["vote"]) for row in rows])
    return scores | {"intervals": intervals, "cut": n * len(rows) - sum(row["ended"] for row in rows),
                     "lenient_of": sum(len(row["lenient"]) for row in rows)}


def judged_row(judge: Judge, device) -> dict:
    """ProcessBench's scores with the interval of the mean F1, which is None where a subset has solutions of one kind
    alone."""
    found = verifier_eval.evaluate_processbench(*judge, device)
    subsets = {name: {key: scores[key] for key in ("n", "error_acc", "correct_acc", "f1")}
               for name, scores in found["subsets"].items()}
    for name, scores in subsets.items():
        scores["num_error"] = sum(row["subset"] == name and row["label"] >= 0 for row in found["samples"])
    f1 = found["average"]["f1"]
    return {"problems": len(found["samples"]), "f1": f1, "subsets": subsets,
            "intervals": {"f1": None if f1 is None else bootstrap_f1(list(subsets.values()), judge.args.seed)},
            "too_long": sum(row["too_long"] for row in found["samples"])}


def average_row(rows: dict[str, dict]) -> dict:
    """The mean of the five benchmarks of the paper's table; {} unless all of them were run."""
    if any("pass@1" not in rows.get(name, {}) for name in AVERAGED):
        return {}
    parts = [rows[name] for name in AVERAGED]
    scores = {score: [row[score] for row in parts] for score in parts[0]["intervals"]}
    return {"average": {"problems": sum(row["problems"] for row in parts), "cut": sum(row["cut"] for row in parts),
                        **{score: sum(values) / len(values) for score, values in scores.items()},
                        "intervals": {score: of_mean(values, [row["intervals"][score] for row in parts])
                                      for score, values in scores.items()},
                        "paper": PAPER_AVERAGE, "paper_of": PAPER_OF["average"]}}


def cell(row: dict, name: str) -> str:
    """A score in percent with its interval: "12.5 [9.1, 17.0]"."""
    if row.get(name) is None:
        return "-"
    interval = row["intervals"].get(name)
    bounds = " [" + ", ".join(f"{100 * bound:.1f}" for bound in interval) + "]" if interval else ""
    some = f" of {row['lenient_of']}" if name == "lenient" else ""  # samples; others' answers are no numbers
    return f"{100 * row[name]:.1f}{some}{bounds}"


def table_lines(args, rows: dict[str, dict], heading: str) -> list[str]:
    """The table, and below it what it is of and what was not run."""
    maj = [f"maj@{args.num_samples}"] if args.num_samples > 1 else []
    scored = lambda row: row.get("not_run") or (f"F1 {cell(row, 'f1')}" if "f1" in row else cell(row, "pass@1"))
    cells = [[name, str(row.get("problems", "-")), scored(row), *(cell(row, score) for score in (*maj, "lenient")),
              str(row.get("cut", "-")), f"{row['paper'] or '-'}", row["paper_of"]] for name, row in rows.items()]
    missing = {name: row for name, row in rows.items() if "not_run" in row}
    return [heading, *table(["benchmark", "problems", "pass@1", *maj, "last number", "cut", "paper", "which is of"],
                            cells), "", *NOTES, "",
            f"{len(args.benchmarks) - len(missing)} of {len(args.benchmarks)} benchmarks were run.",
            *(f"- {name}, {row['not_run']}: {row['reason']}" for name, row in missing.items())]


def keep(args, step: int, rows: dict[str, dict]) -> None:
    """Writes what --out asks for: the rows so far."""
    if args.out and rank_and_world()[0] == 0:
        make_folder(os.path.dirname(os.path.abspath(args.out)))
        write_json(args.out, {"tag": args.generator_tag, "step": step, "seed": args.seed, "flags": vars(args),
                              "benchmarks": rows})


def main(args) -> None:
    check_args(args)
    args.generator_tag = args.generator_tag or default_tag(args.generator_source)
    check_name("-g", args.generator_tag)
    if args.verifier_tag:
        check_name("--verifier-tag", args.verifier_tag)
        find_step(args.verifier_source, args.verifier_tag)
    args.task = next((BENCHMARKS[name].task for name in args.benchmarks if name != "processbench"), AVERAGED[0])
    tokenizer, device = load_tokenizer(found_at("tokenizer")), init_device(args.device_type)
    model, step = chat_eval.load_generator(args, args.step, tokenizer, device)
    found = {name: prepare_judge(args, tokenizer, device) if name == "processbench" else
             prepare_task(args, name, model, tokenizer, device) for name in args.benchmarks}
    if all(isinstance(what, NotRun) for what in found.values()):
        name, what = next(iter(found.items()))
        raise BadInput(f"--benchmarks {' '.join(found)}: none can be run; {name}, {what.kind}: {what.reason}")
    how = f"{args.num_samples} samples at temperature {args.temperature}" if args.temperature else "greedy"
    heading = (f"\n{args.generator_tag} at step {step}, seed {args.seed}: {how}, at most {args.max_new_tokens} new "
               f"tokens")
    rows = {}
    for name, what in found.items():
        row = ({"not_run": what.kind, "reason": what.reason} if isinstance(what, NotRun) else
               judged_row(what, device) if isinstance(what, Judge) else
               solved_row(args, name, what, model, tokenizer, device))
        rows[name] = row | {"paper": BENCHMARKS[name].paper, "paper_of": PAPER_OF.get(name, "-")}
        keep(args, step, rows | average_row(rows))
    print0("\n".join(table_lines(args, rows | average_row(rows), heading)))


if __name__ == "__main__":
    script_main(main, make_parser(), is_shown=True)
