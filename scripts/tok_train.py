"""
Trains the tokenizer on the text of a task: demonstrations of both roles.

    python -m scripts.tok_train --task chain                  # 265 ids: bytes without merges
    python -m scripts.tok_train --task last_letter --vocab-size 512
"""
import argparse
import random

from nanochat.common import add_run_args, check_writable, path_of, print0, rank_and_world, script_main
from nanochat.tokenizer import MIN_VOCAB_SIZE, Tokenizer
from tasks import add_task_args, make_task


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_run_args(parser)
    add_task_args(parser)
    parser.add_argument("--vocab-size", type=int, default=MIN_VOCAB_SIZE, help=f"ids, special tokens included; {MIN_VOCAB_SIZE} = no merges")
    parser.add_argument("--num-texts", type=int, default=5000, help="demonstrations to train on")
    return parser


def task_texts(task, num_texts: int, seed: int):
    """Text as the models will meet it: prompts, solutions and verifications."""
    for index in range(num_texts):
        rng = random.Random(f"tok-{seed}-{index}")
        problem = task.problem("sft", index)
        solution = task.solution_demo(problem, rng)
        yield task.fmt.verifier_prompt.format(problem=problem.prompt, solution=solution, num_steps=len(task.fmt.step_spans(solution)))
        yield solution
        yield task.verification_demo(problem, solution, rng)


def main(args) -> None:
    task = make_task(args)
    folder = path_of("tokenizer")
    check_writable(folder)
    tokenizer = Tokenizer.train(task_texts(task, args.num_texts, args.seed), args.vocab_size)
    if rank_and_world()[0] == 0:
        tokenizer.save(folder)
    example = task.solution_demo(task.problem("sft", 0), random.Random(0))
    print0(f"tokenizer: {tokenizer.vocab_size} ids in {folder}; {example!r} is {len(tokenizer.encode(example))} tokens")


if __name__ == "__main__":
    script_main(main, make_parser())
