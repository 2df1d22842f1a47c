"""
Labels the reasoning steps of solutions that a generator samples, or of those in a file, and says what the labels cost
and how they agree with gold ones.

    gold                the task's own labels
    math_shepherd       1 where any of N completions after the step is right; math_shepherd_soft: their share
    omega_prm           the same for the first error alone, found by binary search: log2(K + 1) prefixes and not K
    rpe                 1 where the share of right completions falls to no less than 0.8 of that before the step
    pav                 what the step adds to the chance of a prover, who keeps the best of --best-of completions
    information_gain    what the step adds to a supervisor's log-probability of the gold answer

Each line of FILE.jsonl is a solution: split, index, prompt, solution, ids (its tokens), outcome, labels (one for each
step), gold, generator, method, values (after each prefix, from none to all of its steps: what was measured there, null
where nothing was), rollouts and tokens (what its labels cost; prefixes that solutions share are paid for once). Numbers
about all of them are in FILE.summary.json. Completions are sampled at temperature 1, with noise that belongs to the
problem and to what the prefix says. So methods, and numbers of completions, are compared on common noise.

Departures (of pav and information_gain: recipes prm and supervisor):
1. What follows the last step is completed too, as the answer stands there. In Math-Shepherd and OmegaPRM the last step
   has the answer, and its label is the solution's outcome.
2. omega_prm is OmegaPRM's search without its tree: each solution is searched once. There the completions are searched
   in their turn, the highest Q + U first (alpha 0.5, beta 0.9, L 500, c_puct 0.125), 100 searches for each problem.
   What is kept of the tree is that equal prefixes have their value once.
3. omega_prm labels all steps: 1 before the first error, 0 from it on. OmegaPRM labels the prefixes that were visited,
   each with its share of right completions (here in `values`), and its PRM learns these shares.
4. omega_prm searches every solution. OmegaPRM searches wrong ones, from prefixes after which some completions are right
   and others wrong, and leaves out problems that are always or never solved.
5. Steps are the task's format's. OmegaPRM cuts a solution into about 16 pieces, wherever they end.

    python -m scripts.label_steps --generator-tag d4 --method math_shepherd --out soft.jsonl
    python -m scripts.label_steps --generator-tag d4 --solutions soft.jsonl --method omega_prm --out omega.jsonl
    torchrun --standalone --nproc_per_node=8 scripts/label_steps.py -- --generator-tag d4 --method rpe --out rpe.jsonl
"""
import argparse
import functools
import json
import os
import time

import torch

from nanochat.cli import add_device_arg, at_least, check_name, new_parser, script_main
from nanochat.common import BadInput, all_reduce, gather_lists, init_device, on_all_ranks, print0, rank_and_world
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.measure.scores import share_of
from nanochat.rl.measure.step_labels import METHODS, agreement, run_plans, until_error
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records.outcomes import labels_of, num_problems_of, outcomes_of
from nanochat.rl.records.prompts import check_fit, generator_prompt, longest_problem, read_solution
from nanochat.rl.verify.labelled import solution_rows
from nanochat.rl.verify.prefixes import VALUES, Cut, Meter, forced_answer
from nanochat.storage.files import check_writable, found_at, make_folder, whole_file, write_json
from scripts.verifier_eval import load, load_generator
from tasks import add_task_args, make_task, task_flags
from tasks.common import SPLIT_BUCKETS, Problem, check_problem

OF_SAMPLED = {"split", "first", "num_problems", "num_samples"}
ROLES = {"best_of": "prover", "logprob": "supervisor"}  # who is asked for a value; else the generator


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("--generator-tag", required=True, help="checkpoint that samples the solutions; with "
                        "--generator-source rl a run's name and -gen")
    parser.add_argument("--generator-source", choices=["sft", "rl"], default="sft", help="stage of its checkpoint")
    parser.add_argument("--step", type=at_least(-1), default=-1, help="of the generator's checkpoint; -1 = the last")
    parser.add_argument("--method", default="math_shepherd", choices=list(METHODS))
    parser.add_argument("--out", required=True, metavar="FILE.jsonl")
    parser.add_argument("--num-completions", type=at_least(1, int, 10 ** 5), default=8,
                        help="N, after each prefix (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=at_least(1, also=-1), default=-1,
                        help="of a solution, and of a completion; -1 = as in the checkpoint's training, else 256")
    parser.add_argument("--calculator", action=argparse.BooleanOptionalAction, default=False,
                        help="solutions and completions may call the calculator")
    parser.add_argument("--seed", type=int, default=None,
                        help="of problems and sampling noise; default: the checkpoint's")
    parser.add_argument("--max-rows", type=at_least(1), default=256,
                        help="rows that decode together; changes memory, no result")
    add_device_arg(parser)
    group = parser.add_argument_group("solutions")
    group.add_argument("--solutions", default="", metavar="FILE.jsonl",
                       help="labels these, which an earlier call wrote; default: samples new ones")
    group.add_argument("--split", choices=list(SPLIT_BUCKETS), default="rl",
                       help="which the problems are from (default: %(default)s)")
    group.add_argument("--first", type=at_least(0), default=0,
                       help="number of the first problem in the split; RL begins with number 0 (default: %(default)s)")
    group.add_argument("--num-problems", type=at_least(1, int, 10 ** 6), default=100,
                       help="that are solved (default: %(default)s)")
    group.add_argument("--num-samples", type=at_least(1, int, 10 ** 5), default=4,
                       help="solutions per problem, at temperature 1 (default: %(default)s)")
    group = parser.add_argument_group("pav and information_gain")
    group.add_argument("--best-of", type=at_least(1, int, 10 ** 5), default=4,
                       help="K: the prover keeps the best of so many")
    for role, what in (("prover", "completes the prefixes, for pav"), ("supervisor", "is asked for the answer, for "
                                                                        "information_gain")):
        group.add_argument(f"--{role}-tag", default="", help=f"{what}; default: the generator")
        group.add_argument(f"--{role}-source", choices=["sft", "rl"], default="sft")
        group.add_argument(f"--{role}-step", type=at_least(-1), default=-1)
    add_task_args(parser)
    parser.set_defaults(**dict.fromkeys(task_flags()))
    return parser


def summary_path(out: str) -> str:
    return out.removesuffix(".jsonl") + ".summary.json"


def check_args(args) -> None:
    if args.solutions and (ignored := OF_SAMPLED & getattr(args, "explicit", set())):
        raise BadInput(f"--{min(ignored).replace('_', '-')}: is of solutions that are sampled, and all of --solutions "
                       f"are labelled")
    check_name("--generator-tag", args.generator_tag)
    value = METHODS[args.method].value
    for wanted, role in ROLES.items():
        if tag := getattr(args, f"{role}_tag"):
            check_name(f"--{role}-tag", tag)
            if value != wanted:
                raise BadInput(f"--{role}-tag {tag}: method {args.method} asks no {role}")
        elif (getattr(args, f"{role}_source"), getattr(args, f"{role}_step")) != ("sft", -1):
            raise BadInput(f"--{role}-source, --{role}-step: are for --{role}-tag")
    if value == "best_of" and args.best_of > args.num_completions:
        raise BadInput(f"--best-of {args.best_of}: needs as many completions, and --num-completions is "
                       f"{args.num_completions}")
    if not args.out.endswith(".jsonl"):
        raise BadInput(f"--out {args.out}: its name must end in .jsonl")
    for path in (args.out, summary_path(args.out)):
        if os.path.lexists(path):
            raise BadInput(f"--out {args.out}: {path} is there; take another name")
        check_writable(path)


def load_judge(args, tokenizer, device) -> tuple:
    """The task, the generator's model, and the one that is asked about prefixes, by flags and the checkpoint."""
    generator, args.step = load_generator(args, args.step, tokenizer, device)
    value, task, judge = METHODS[args.method].value, make_task(args), generator
    role = ROLES.get(value)
    if value == "gold" and not getattr(task, "has_step_labels", True):
        raise BadInput(f"--method {args.method}: task {task.name} has no gold step labels")
    if role and getattr(args, f"{role}_tag"):
        names = [getattr(args, f"{role}_{part}") for part in ("source", "tag", "step")]
        judge, _, _, step = load(*names, tokenizer, device, "generator")
        setattr(args, f"{role}_step", step)
    return task, generator, judge


# Solutions

def read_rows(path: str, task, tokenizer) -> list[dict]:
    """The lines of a file of solutions, each with its `problem` and `ids`: those in the file, else those of its text.
    Raises BadInput for the first that is no solution of the task."""
    rows = []
    for where, row in solution_rows("--solutions", path, task):
        ids = row["ids"] if "ids" in row else tokenizer.encode(row["solution"])
        if not is_text(ids, row["solution"], tokenizer):
            raise BadInput(f"{where}: ids are not the tokens of the solution")
        rows.append(row | {"ids": ids})
    return rows


def is_text(ids, text: str, tokenizer) -> bool:
    """Whether a value is a list of token ids that say the text, with an end token or without."""
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids):
        return False
    ended = bool(ids) and ids[-1] in tokenizer.stop_tokens
    return tokenizer.decode(ids[: len(ids) - ended]) == text


def problems_asked(args, task) -> list[Problem]:
    """The problems that --split, --first and --num-problems name."""
    end = args.first + args.num_problems
    if hasattr(task, "num_problems") and end > (size := num_problems_of(task, args.split, -1)):
        raise BadInput(f"--first {args.first} --num-problems {args.num_problems}: split {args.split} has {size}")
    return [check_problem(f"task {task.name}", task.problem(args.split, i), args.split, i)
            for i in range(args.first, end)]


def sampled(args, problems: list[Problem], generator, sampler: Sampler) -> list[tuple[int, Cut]]:
    """This rank's share of the sampled solutions, each with its place in the whole."""
    rank, world = rank_and_world()
    mine, S = problems[rank::world], args.num_samples
    rollouts, solutions = sampler.solve(generator, mine, S, ("solutions",))
    places = [p * S + s for p in range(rank, len(problems), world) for s in range(S)]
    return [(place, Cut(prompt.problem, prompt.ids, ids, solution.text, solution.step_ends)) for place, prompt, ids,
            solution in zip(places, rollouts.prompt_of(), rollouts.completions(), solutions, strict=True)]


def from_rows(rows: list[dict], sampler: Sampler) -> list[tuple[int, Cut]]:
    """This rank's share of a file's solutions, each with its place in the file; those of a problem stay together."""
    rank, world = rank_and_world()
    groups: dict[Problem, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row["problem"], []).append(place)
    cuts = []
    for place in (place for places in list(groups.values())[rank::world] for place in places):
        problem, ids = rows[place]["problem"], rows[place]["ids"]
        solution = read_solution(sampler.tokenizer, sampler.task.fmt, ids)
        prompt = generator_prompt(sampler.tokenizer, sampler.task.fmt, problem.prompt)
        cuts.append((place, Cut(problem, prompt, ids, solution.text, solution.step_ends)))
    return cuts


def check_lengths(args, problems: list[Problem], longest_solution: int, generator, judge, task, tokenizer) -> None:
    """Raises BadInput where the longest problem and solution, with what is put after, do not fit a context."""
    longest = longest_problem(tokenizer, [problem.prompt for problem in problems])
    value, after = METHODS[args.method].value, args.max_new_tokens
    if not args.solutions:
        check_fit("generator", generator_prompt, 0, after, generator.config.sequence_len, tokenizer, task.fmt, longest)
    if value == "logprob":
        after = max(sum(map(len, forced_answer(tokenizer, task.fmt, problem.answer))) for problem in problems)
    if value != "gold":
        check_fit(ROLES.get(value, "generator"), generator_prompt, longest_solution, after, judge.config.sequence_len,
                  tokenizer, task.fmt, longest)


# The work

def label(args, cuts: list[Cut], judge, sampler: Sampler) -> tuple[list[list[float] | None], Meter]:
    """The labels of each solution, and what they cost."""
    method = METHODS[args.method]
    outcomes = outcomes_of(sampler.task, [cut.problem for cut in cuts], [cut.text for cut in cuts])
    for cut, outcome in zip(cuts, outcomes, strict=True):
        cut.outcome, cut.gold = outcome, labels_of(sampler.task, cut.problem, cut.text)
        cut.values = [None] * (len(cut.step_ends) + 1)
    meter = Meter(functools.partial(VALUES[method.value], model=judge, sampler=sampler, num=args.num_completions,
                                    best_of=args.best_of))
    plans = [method.plan(len(cut.step_ends)) for cut in cuts]
    return run_plans(plans, lambda asked: meter([(cuts[n], k) for n, k in asked])), meter


def written_rows(args, placed: list[tuple[int, Cut]], labels: list, given: list[dict], device) -> list[dict]:
    """What is written of each solution, over all ranks, in the order of the whole. given: the rows of --solutions."""
    author = f"{args.generator_tag}@{args.step}"
    rows = [{"place": place, "split": cut.problem.split, "index": cut.problem.index, "prompt": cut.problem.prompt,
             "solution": cut.text, "ids": cut.ids, "outcome": cut.outcome, "labels": found, "gold": cut.gold,
             "generator": given[place].get("generator", "") if given else author, "method": args.method,
             "values": cut.values, "rollouts": cut.rollouts, "tokens": cut.tokens}
            for (place, cut), found in zip(placed, labels, strict=True)]
    return sorted(gather_lists(rows, device), key=lambda row: row.pop("place"))


def summarize(rows: list[dict], least: float) -> dict:
    """What is known of all labelled solutions: how many, how good, and how the labels agree with gold."""
    known = [row for row in rows if row["gold"]]
    gold, labels = [row["gold"] for row in known], [row["labels"] for row in known]
    return {"solutions": len(rows), "steps": sum(len(row["labels"]) for row in rows),
            "right": share_of([row["outcome"] for row in rows if row["outcome"] is not None]),
            "label_mean": share_of([label for row in rows for label in row["labels"]]),
            "agreement": agreement(gold, labels, least) if known else None,
            "agreement_until_error": agreement(until_error(gold, gold), until_error(labels, gold), least)
            if known else None}


def print_summary(args, found: dict) -> None:
    cost, shown = found["cost"], lambda x: "-" if x is None else f"{100 * x:.1f}"
    print0(f"{found['solutions']} solutions with {found['steps']} steps, {shown(found['right'])}% right, "
           f"{found['unlabelled']} left out whose labels cannot be told")
    print0(f"{args.method}: {cost['rollouts']} rollouts ({cost['rollouts_without_reuse']} without reuse), "
           f"{cost['tokens']} tokens, {cost['prompt_tokens']} prompt tokens "
           f"({cost['prompt_tokens_if_shared']} if they shared keys), {cost['seconds']:.1f} s")
    if found["agreement"] is None:
        print0("the task has no gold step labels to compare with")
        return
    names = ("steps", "accuracy", "macro_f1", "first_error_f1", "rescued", "failed", "auc")
    print0(f"{'against gold, percent':24s}" + "".join(f"{name:>16s}" for name in names))
    for title, scores in (("all steps", found["agreement"]), ("up to the first error", found["agreement_until_error"])):
        print0(f"{title:24s}{scores['steps']:>16d}" + "".join(f"{shown(scores[name]):>16s}" for name in names[1:]))


def main(args) -> None:
    check_args(args)
    tokenizer = load_tokenizer(found_at("tokenizer"))
    device = init_device(args.device_type)
    task, generator, judge = load_judge(args, tokenizer, device)
    sampler = Sampler(task, tokenizer, args.seed, args.max_new_tokens, max_rows=args.max_rows,
                      calculator=args.calculator)
    given = read_rows(args.solutions, task, tokenizer) if args.solutions else []
    problems = list(dict.fromkeys(row["problem"] for row in given)) if given else problems_asked(args, task)
    longest = max(len(row["ids"]) for row in given) if given else args.max_new_tokens
    check_lengths(args, problems, longest, generator, judge, task, tokenizer)
    placed = from_rows(given, sampler) if given else sampled(args, problems, generator, sampler)
    started = time.time()
    labels, meter = on_all_ranks(lambda: label(args, [cut for _, cut in placed], judge, sampler), device)
    seconds = all_reduce(torch.tensor(time.time() - started, device=device), "max").item()
    rows = written_rows(args, placed, labels, given, device)
    kept = [row for row in rows if row["labels"] is not None]
    asked, prompt_tokens, own_tokens = all_reduce(torch.tensor(meter.costs(), device=device)).tolist()
    cost = {"rollouts": sum(row["rollouts"] for row in rows), "rollouts_without_reuse": asked,
            "tokens": sum(row["tokens"] for row in rows), "prompt_tokens": prompt_tokens,
            "prompt_tokens_if_shared": own_tokens, "seconds": seconds}
    summary = {"args": vars(args), **summarize(kept, METHODS[args.method].least), "unlabelled": len(rows) - len(kept),
               "solution_tokens": sum(len(row["ids"]) for row in rows), "cost": cost}
    if rank_and_world()[0] == 0:
        make_folder(os.path.dirname(args.out) or ".")
        with whole_file(args.out) as f:
            f.writelines(json.dumps(row) + "\n" for row in kept)
        write_json(summary_path(args.out), summary)
    print_summary(args, summary)


if __name__ == "__main__":
    script_main(main, make_parser())
