"""
Evaluates a chat model: generative tasks by their answers, multiple choice by the letter the model finds likeliest.

A task's flags and seed are those the checkpoint was trained with, unless given. A mixture is also shown part by part.
HumanEval is not here: it runs what a model wrote.

    python -m scripts.chat_eval -i sft -g d4                              # the task it was trained on
    python -m scripts.chat_eval -i rl -g chain-s0-gen -a chain -x 800
    python -m scripts.chat_eval -i sft -g smollm2 -a gsm8k --show 3      # and what it writes
    torchrun --standalone --nproc_per_node=8 scripts/chat_eval.py -- -i sft -a "gsm8k|ARC-Easy|MMLU"
"""
import argparse
import os
from collections import Counter

import torch

from nanochat.checkpoint import default_tag
from nanochat.cli import add_device_arg, at_least, check_name, new_parser, script_main
from nanochat.common import BadInput, all_reduce, gather_lists, init_device, print0, rank_and_world
from nanochat.dataloader import length_batches
from nanochat.engine import check_temperature, pad_prompts
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.measure.scores import majority, outcome_of, pass_at_k, share_of
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records.outcomes import ENDLESS, answers_of, counted_outcomes, labels_of, lenient_outcomes, problems_of
from nanochat.rl.records.prompts import check_prompts_fit
from nanochat.storage.files import check_writable, found_at, make_folder, read_json, write_json
from scripts.verifier_eval import load_generator
from tasks import TASKS, add_task_args, is_task, make_task, task_flags
from tasks.multiple_choice import CHOICE_SETS, RANDOM_BASELINE, choice_prompt, load_choices

SPLITS = {"test_in": "", "test_out": ", test_out"}
PROMPT_END = 400  # characters of a prompt that --show shows


def make_parser():
    parser = new_parser(__doc__)
    add_generation_args(parser)
    parser.add_argument("-a", "--task-name", default="",
                        help=f"tasks, separated by |, of {', '.join([*TASKS, *CHOICE_SETS])}; "
                             f"default: the checkpoint's")
    parser.add_argument("--split", choices=list(SPLITS), help="of tasks; default: all that there are")
    parser.add_argument("--choices", default="",
                        help="file of the multiple-choice set, in place of the one that datasets loads")
    parser.add_argument("--show", type=at_least(0, int, 10 ** 6), default=0,
                        help="problems per task and split of which the end of the prompt, the first completion, the "
                             "answer that is read from it and the gold one are printed")
    return parser


def add_generation_args(parser) -> None:
    """Flags of a checkpoint that solves problems of tasks, and of how. Those of tasks are None unless given."""
    parser.add_argument("-i", "--source", choices=["sft", "rl"], required=True, dest="generator_source",
                        help="stage of the checkpoint")
    parser.add_argument("-g", "--model-tag", default="", dest="generator_tag", help="default: the largest d<N>")
    parser.add_argument("-s", "--step", type=at_least(-1), default=-1, help="-1 = the last")
    parser.add_argument("-x", "--max-problems", type=at_least(1, int, 10 ** 6, also=-1), default=-1,
                        help=f"problems per task and split; -1 = all there are, {ENDLESS} of tasks that make their own")
    parser.add_argument("-t", "--temperature", type=float, default=0.0, help="0 = greedy")
    parser.add_argument("-m", "--max-new-tokens", type=at_least(1, also=-1), default=-1,
                        help="-1 = as in the checkpoint's training, else 256")
    parser.add_argument("-n", "--num-samples", type=at_least(1, int, 10 ** 5), default=1,
                        help="per problem; pass@k and maj@k are shown from 2 on")
    parser.add_argument("-k", "--top-k", type=at_least(0), default=0, help="0 = the full softmax")
    parser.add_argument("--calculator", action=argparse.BooleanOptionalAction, default=True,
                        help="solutions may call the calculator")
    parser.add_argument("--max-rows", type=at_least(1), default=256,
                        help="rows that decode together; changes memory, no result")
    parser.add_argument("--out", default="", metavar="FILE.json", help="file for the scores, as JSON")
    add_device_arg(parser)
    parser.add_argument("--seed", type=int, default=None, help="default: the checkpoint's")
    add_task_args(parser)
    parser.set_defaults(**dict.fromkeys(task_flags()))


def sampler_of(args, task, tokenizer) -> Sampler:
    """What samples solutions of a task as these flags say."""
    return Sampler(task, tokenizer, args.seed, args.max_new_tokens, 0, args.temperature or 1.0, args.top_k,
                   calculator=args.calculator and tokenizer.has_calculator, max_rows=args.max_rows)


def solve(args, task, split: str, model, sampler, device) -> list[dict]:
    """A row per problem of a split, over all ranks and in order: its part of a mixture; how many of the samples are
    right, how many right in every step (None where the task has no labels of steps), whether the most frequent answer
    is right; how many ended, cannot be scored, are right and do not count, have no answer that can be read; of each
    whether its last number is the gold one ([] without numbers); and of the first --show problems what is shown."""
    rank, world = rank_and_world()
    n = args.num_samples
    problems = problems_of(task, split, args.max_problems)
    if not problems:
        return []
    # On all ranks before any work: a rank that failed alone would leave the others waiting, and only rank 0 speaks.
    check_prompts_fit(sampler.tokenizer, task.fmt, [p.prompt for p in problems],
                      {"generator": model.config.sequence_len}, args.max_new_tokens, 0)
    problems = problems[rank::world]
    rollouts, solutions = sampler.solve(model, problems, n, ("chat_eval", split), greedy=args.temperature == 0)
    stopped, rows, has_labels = rollouts.stopped.tolist(), [], getattr(task, "has_step_labels", True)
    outcomes, reasons = counted_outcomes(task, rollouts.problems(), rollouts.texts, stopped)
    for i, problem in enumerate(problems):
        mine = solutions[i * n: (i + 1) * n]
        found = outcomes[i * n: (i + 1) * n]
        right = [outcome is True for outcome in found]
        labels = [labels_of(task, problem, s.text) for s in mine]
        all_right = (sum(r and bool(steps) and all(steps) for r, steps in zip(right, labels, strict=True))
                     if has_labels else None)
        answers = answers_of(task, [s.text for s in mine], n)
        part = task.part(problem) if hasattr(task, "part") else task
        rows.append({"at": i * world + rank, "part": part.name, "right": sum(right), "all_right": all_right,
                     "vote": outcome_of(majority(answers), answers, right),
                     "ended": sum(stopped[i * n: (i + 1) * n]), "unscorable": found.count(None),
                     "uncounted": sum(reason is not None for reason in reasons[i * n: (i + 1) * n]),
                     "unread": answers.count(None),
                     "lenient": lenient_outcomes(part, [problem] * n, [s.text for s in mine])})
        if rows[-1]["at"] < args.show:
            prompt = sampler.tokenizer.spell(rollouts.prompts[i].ids)
            rows[-1]["shown"] = {"outcome": found[0], "completion": mine[0].text, "read": answers[0],
                                 "prompt": "..." * (len(prompt) > PROMPT_END) + prompt[-PROMPT_END:],
                                 "gold": problem.answer}
    return sorted(gather_lists(rows, device), key=lambda row: row["at"])


def scores_of(rows: list[dict], n: int) -> dict[str, float]:
    """Scores by name of these rows of `solve`, with n samples of each problem."""
    samples, lenient = n * max(1, len(rows)), [hit for row in rows for hit in row["lenient"]]
    scores = {"pass@1": sum(row["right"] for row in rows) / samples}
    if lenient:
        scores["lenient"] = share_of(lenient)
    if n > 1:
        scores[f"pass@{n}"] = share_of([pass_at_k(n, row["right"], n) for row in rows])
        scores[f"maj@{n}"] = share_of([row["vote"] for row in rows])
    if rows and rows[0]["all_right"] is not None:
        scores["right in every step"] = sum(row["all_right"] for row in rows) / samples
    return scores | {"ended": sum(row["ended"] for row in rows) / samples}


def print_rows(name: str, rows: list[dict], n: int) -> dict[str, float]:
    """Prints a line of these rows' scores. -> `scores_of`, and how many problems, and samples without a score or an
    answer, there are"""
    scores, counts = scores_of(rows, n), {"problems": len(rows)}
    counts |= {count: sum(row[count] for row in rows) for count in ("unscorable", "uncounted", "unread")}
    known = sum(len(row["lenient"]) for row in rows)  # samples that the lenient score is of
    shown = {title: f"{title} {100 * value:5.1f}%" for title, value in scores.items()}
    if 0 < known < n * len(rows):
        shown["lenient"] += f" of {known}"
    parts = list(shown.values())
    if counts["unread"]:
        parts.append(f"no answer read in {counts['unread']} of {n * len(rows)}")
    if counts["uncounted"]:
        parts.append(f"{counts['uncounted']} are right but cut, or copied from the problem, and count as wrong")
    if counts["unscorable"]:
        parts.append(f"{counts['unscorable']} cannot be scored and count as wrong")
    print0(f"{name:40s} {len(rows):5d} problems | {' | '.join(parts)}")
    return scores | counts


def hint_of(scores: dict[str, float], n: int) -> str:
    """What to do where next to nothing is right (pass@1, the strict score) for want of the task's form: hardly an
    answer is read, or the last number alone (lenient) is right much more often. "" elsewhere."""
    unread = scores["unread"] / max(1, n * scores["problems"])
    if scores["pass@1"] > 0.02 or unread < 0.5 and scores.get("lenient", 0.0) < 0.05 + scores["pass@1"]:
        return ""
    cut = f"; {100 - 100 * scores['ended']:.0f}% were cut, which -m may spare" if scores["ended"] < 0.9 else ""
    return (f"pass@1 asks for the task's form, and in {100 * unread:.0f}% of the samples no answer can be read: SFT "
            f"teaches the form (scripts.chat_sft --role generator){cut}; --show 3 shows what is written")


def print_shown(number: int, outcome: bool | None, prompt: str, completion: str, read: str | None, gold: str) -> None:
    """Prints what --show asks for of a problem."""
    print0(f"  problem {number}, {'right' if outcome else 'wrong' if outcome is False else 'cannot be scored'}")
    texts = {"prompt": prompt, "completion": completion,
             "answer read": "none can be read" if read is None else read, "gold answer": gold}
    for title, text in texts.items():
        first, *rest = text.split("\n")
        print0("\n".join([f"    {title:11s} | {first}", *(f"    {'':11s} | {line}" for line in rest)]))


def load_tasks(args) -> dict:
    """The tasks and the choices that are asked for, by name. Raises BadInput."""
    found = {}
    for name in args.task.split("|"):
        if is_task(name):
            found[name] = make_task(argparse.Namespace(**{**vars(args), "task": name}))
            found[name].problem(args.split or "test_in", 0)  # there must be some
        else:
            found[name] = load_choices(name, args.choices, args.max_problems)
    return found


def evaluate_task(args, name: str, task, model, tokenizer, device) -> dict[str, dict]:
    """Prints a generative task's scores on --split or both, a mixture's also by part. -> those of each split"""
    sampler, scores = sampler_of(args, task, tokenizer), {}
    for split, words in SPLITS.items():
        if args.split not in (None, split):
            continue
        rows = solve(args, task, split, model, sampler, device)
        if rows:  # a finite task may have no test_out
            scores[split] = print_rows(name + words, rows, args.num_samples)
        for row in rows[:args.show]:
            print_shown(row["at"] + 1, **row["shown"])
        parts = list(dict.fromkeys(row["part"] for row in rows))
        for part in parts if len(parts) > 1 else []:
            print_rows(f"  {part}{words}", [row for row in rows if row["part"] == part], args.num_samples)
    hints = [hint for found in scores.values() if (hint := hint_of(found, args.num_samples))]
    for hint in hints[:1]:
        print0(f"hint: {hint}")
    return scores


@torch.no_grad()
def letter_accuracy(model, tokenizer, choices: list, device, max_tokens: int = 16384) -> tuple[float, int]:
    """The share of questions whose right letter is the likeliest, and how many are beyond the context, so wrong."""
    rank, world = rank_and_world()
    tokens = {letter: letter_token(tokenizer, letter) for choice in choices for letter in choice.letters}
    mine = [(tokenizer.render_prompt(choice_prompt(c)), c) for c in choices[rank::world]]
    fitting, num_right = [pair for pair in mine if len(pair[0]) <= model.config.sequence_len], 0
    for batch in length_batches(fitting, max_tokens):
        ids, _ = pad_prompts([prompt for prompt, _ in batch], device)
        last = torch.tensor([len(prompt) - 1 for prompt, _ in batch], device=device)
        logits = model.head(model.trunk(ids)[torch.arange(len(batch), device=device), last])  # (B, V)
        for row, (_, choice) in zip(logits.tolist(), batch, strict=True):
            num_right += max(choice.letters, key=lambda letter: row[tokens[letter]]) == choice.answer
    counts = torch.tensor([num_right, len(mine) - len(fitting), len(mine)], device=device)
    num_right, num_long, total = all_reduce(counts).tolist()
    return num_right / max(1, total), num_long


def letter_token(tokenizer, letter: str) -> int:
    tokens = tokenizer.encode(letter)
    if len(tokens) != 1:
        raise BadInput(f"the letter {letter!r} is {len(tokens)} tokens: multiple choice needs one")
    return tokens[0]


def check_generation(args) -> None:
    """Raises BadInput for what a generator cannot be asked."""
    if 0 <= args.max_problems < rank_and_world()[1]:
        raise BadInput(f"-x {args.max_problems}: must be at least 1 per rank, or -1")
    check_temperature("--temperature", args.temperature)
    if args.temperature == 0 and args.num_samples > 1:
        raise BadInput(f"-n {args.num_samples}: greedy samples are all the same; give -t above 0")


def check_out(path: str, keys: set[str]) -> None:
    """Raises BadInput unless scores can be written there: a new file, or one that has just these keys, as an earlier
    result has."""
    check_writable(os.path.dirname(os.path.abspath(path)))
    if os.path.isdir(path):
        raise BadInput(f"--out {path}: is a folder")
    if os.path.exists(path) and not has_keys(path, keys):
        raise BadInput(f"--out {path}: is there, and no earlier result of this script; take another name")


def has_keys(path: str, keys: set[str]) -> bool:
    try:
        return read_json(path).keys() == keys
    except BadInput:
        return False


def check_args(args) -> None:
    check_generation(args)
    if args.task_name and args.task:
        raise BadInput(f"--task {args.task}: -a {args.task_name} names what is evaluated")
    asked = args.task_name or args.task or ""
    if twice := [name for name, count in Counter(asked.split("|")).items() if count > 1]:
        raise BadInput(f"-a {asked}: names {twice[0]} twice")
    unknown = [name for name in asked.split("|") if asked and not is_task(name) and name not in CHOICE_SETS]
    if unknown:
        raise BadInput(f"-a {asked}: {unknown[0]!r} is not a task; there are {', '.join([*TASKS, *CHOICE_SETS])}")
    if args.out:
        check_out(args.out, {"tag", "step", "seed", "tasks"})
    for flag in ("split", "show"):
        if (value := getattr(args, flag)) and asked and not any(map(is_task, asked.split("|"))):
            raise BadInput(f"--{flag} {value}: is of tasks, and -a {asked} names none")
    if args.choices and not set(asked.split("|")) & set(CHOICE_SETS):
        raise BadInput(f"--choices {args.choices}: is for {', '.join(CHOICE_SETS)}, and -a names none of them")


def main(args) -> None:
    check_args(args)
    args.generator_tag = args.generator_tag or default_tag(args.generator_source)
    check_name("-g", args.generator_tag)
    args.task = args.task_name or args.task or None
    tokenizer = load_tokenizer(found_at("tokenizer"))
    device = init_device(args.device_type)
    model, step = load_generator(args, args.step, tokenizer, device)
    scores = {}
    for name, asked in load_tasks(args).items():
        if is_task(name):
            scores[name] = evaluate_task(args, name, asked, model, tokenizer, device)
            continue
        accuracy, num_long = letter_accuracy(model, tokenizer, asked, device)
        left_out = f" | {num_long} longer than the context" if num_long else ""
        print0(f"{name:40s} {len(asked):5d} questions | accuracy {100 * accuracy:5.1f}% "
               f"(chance {100 * RANDOM_BASELINE:.0f}%){left_out}")
        scores[name] = {"accuracy": accuracy, "questions": len(asked)}
    if args.out and rank_and_world()[0] == 0:
        make_folder(os.path.dirname(os.path.abspath(args.out)))
        write_json(args.out, {"tag": args.generator_tag, "step": step, "seed": args.seed, "tasks": scores})


if __name__ == "__main__":
    script_main(main, make_parser(), is_shown=True)
