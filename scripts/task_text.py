"""
Shows a task's prompts as a model sees them, one of each role, with the special tokens of its chat template; or writes
text for rehearsing pretraining without a download: documents made of problems, solutions and verifications, in jsonl
shards.

    python -m scripts.task_text --task chain
    python -m scripts.task_text --task rows --data train.jsonl --system-prompt "Think." --generator-prompt mine.txt
    python -m scripts.task_text --task chain --out text --num-documents 20000
"""
import contextlib
import json
import os
import random

from nanochat.cli import at_least, new_parser, script_main
from nanochat.common import BadInput, print0
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.records.prompts import generator_prompt, verifier_prompt
from nanochat.storage.files import check_writable, path_of, whole_file, whole_folder
from tasks import add_task_args, make_task, task_texts
from tasks.common import Problem, demo_of


def make_parser():
    parser = new_parser(__doc__)
    add_task_args(parser)
    parser.add_argument("--out", default="",
                        help="folder for shard_<n>.jsonl, the last of which is meant for validation; without it "
                             "prompts are shown")
    parser.add_argument("--num-documents", type=at_least(1, int, 10 ** 9), default=20000)
    parser.add_argument("--num-shards", type=at_least(2, int, 10 ** 5), default=4)  # five digits number them
    parser.add_argument("--seed", type=int, default=0)
    return parser


def write_shards(folder: str, texts, num_documents: int, num_shards: int) -> int:
    """Deals the documents out to the shards; the number of their characters. Raises CannotWrite."""
    num_chars = 0
    for shard in range(num_shards):
        with whole_file(os.path.join(folder, f"shard_{shard:05d}.jsonl")) as f:
            for _ in range(shard, num_documents, num_shards):
                read, _, verification = next(texts)
                text = read + verification
                num_chars += len(text)
                f.write(json.dumps({"text": text}) + "\n")
    return num_chars


def first_problem(task) -> Problem:
    """The first problem that there is. Raises BadInput where no split has one."""
    for split in ("sft", "rl", "test_in"):
        with contextlib.suppress(BadInput):
            return task.problem(split, 0)
    return task.problem("test_out", 0)


def shown_texts(task, tokenizer) -> dict[str, str]:
    """Of the first problem, by title: the prompt of each role, and what SFT teaches it to write, if the task shows
    that."""
    problem, rng, fmt = first_problem(task), random.Random(0), task.fmt
    solution, said = fmt.render_solution(["..."], problem.answer), ""
    with contextlib.suppress(BadInput):  # nothing to demonstrate
        solution = said = demo_of(task, "solution_demo", problem, rng)
    asked = {"generator": (generator_prompt(tokenizer, fmt, problem.prompt), said)}
    said = said and demo_of(task, "verification_demo", problem, solution, rng)
    asked["verifier"] = verifier_prompt(tokenizer, fmt, problem.prompt, solution), said
    shown = {}
    for role, (ids, said) in asked.items():
        shown[f"the {role}'s prompt, {len(ids)} tokens"] = tokenizer.spell(ids)
        if said:
            shown[f"what its SFT teaches it to answer, {len(tokenizer.encode(said)) + 1} tokens with the end token"] = (
                said + tokenizer.spell([tokenizer.assistant_end]))
    return shown


def main(args) -> None:
    if not args.out:
        for title, text in shown_texts(make_task(args), load_tokenizer(path_of("tokenizer"))).items():
            print0(f"--- {title}:\n{text}")
        return
    if args.num_documents < args.num_shards:
        raise BadInput(f"--num-documents {args.num_documents}: is below --num-shards {args.num_shards}")
    task, out = make_task(args), os.path.realpath(args.out)  # what a link names can be renamed over
    check_writable(args.out)
    if there := sorted(os.listdir(out)) if os.path.isdir(out) else []:
        raise BadInput(f"{out} holds {there[0]}: give --out a folder that is empty or not there yet")
    with whole_folder(out) as partial:  # all shards at once: some of them would be taken for the whole text
        num_chars = write_shards(partial, task_texts(task, args.num_documents, args.seed), args.num_documents,
                                 args.num_shards)
    print0(f"{args.num_documents} documents, {num_chars:,} characters in {args.num_shards} files in {args.out}")


if __name__ == "__main__":
    script_main(main, make_parser())
