"""
Trains the tokenizer: on the text of a task (demonstrations of both roles), or with --data on any text.

    python -m scripts.tok_train --task chain                  # 265 ids: bytes without merges
    python -m scripts.tok_train --task last_letter --vocab-size 512
    python -m scripts.tok_train --data shards/*.parquet --vocab-size 32768
"""
import glob
import os
import random
import time
from itertools import chain

from nanochat.checkpoint import list_tags
from nanochat.cli import at_least, new_parser, not_empty, script_main
from nanochat.common import BadInput, print0, rank_and_world
from nanochat.dataloader import Documents
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.storage.files import check_writable, path_of
from nanochat.storage.run import add_run_args, is_at_work
from nanochat.tokenizer import MIN_VOCAB_SIZE, Tokenizer
from tasks import add_task_args, make_task, task_texts
from tasks.common import demo_of


def make_parser():
    parser = new_parser(__doc__)
    add_run_args(parser)
    parser.add_argument("--vocab-size", type=at_least(MIN_VOCAB_SIZE, int, 2 ** 24), default=MIN_VOCAB_SIZE,
                        help=f"ids, special tokens included; {MIN_VOCAB_SIZE} = no merges")
    parser.add_argument("--num-texts", type=at_least(1, int, 10 ** 7), default=5000,
                        help="demonstrations of the task to train on")
    parser.add_argument("--data", nargs="+", type=not_empty, default=[],
                        help="train on text instead: .txt, .jsonl or .parquet files, folders, patterns, or one "
                             "datasets name")
    parser.add_argument("--max-chars", type=at_least(1), default=2_000_000_000,
                        help="with --data: characters to train on, of one pass over it")
    parser.add_argument("--doc-cap", type=at_least(1), default=10_000,
                        help="with --data: characters of a document that count")
    parser.add_argument("--if-missing", action="store_true", help="leave a tokenizer that is there as it is")
    add_task_args(parser)
    return parser


def capped_texts(sources: list[str], max_chars: int, doc_cap: int):
    """The beginnings of documents, one pass over them at most, until max_chars characters are reached."""
    documents, num_chars = Documents(sources), 0
    for text in documents:
        if documents.epoch or num_chars >= max_chars:
            return
        yield text[:doc_cap]
        num_chars += min(len(text), doc_cap)


def check_models(folder: str, tokenizer: Tokenizer) -> None:
    """Raises BadInput when another tokenizer is there that models were made for, or are being: with this one they would
    read and write nonsense."""
    tags = [f"{stage} {tag}" for stage in ("base", "sft", "rl") for tag in list_tags(stage)]
    tags += [f"{path}, which is being made" for stage in ("base", "sft") for path in glob.glob(path_of(stage, "*"))
             if is_at_work(path)]
    if tags and os.path.exists(os.path.join(folder, "tokenizer.pkl")) and not Tokenizer.load(folder).equals(tokenizer):
        raise BadInput(f"{folder} holds the tokenizer of {', '.join(tags)}, and this would be another: use it "
                       f"(--if-missing) or set NANOCHAT_BASE_DIR to a new folder")


def main(args) -> None:
    folder, started = path_of("tokenizer"), time.time()
    imported = os.path.exists(os.path.join(folder, "tokenizer.json"))
    if args.if_missing and (imported or os.path.exists(os.path.join(folder, "tokenizer.pkl"))):
        print0(f"tokenizer: {load_tokenizer(folder).vocab_size} ids in {folder}, as it was")
        return
    if imported:
        raise BadInput(f"{folder} holds an imported tokenizer: set NANOCHAT_BASE_DIR to a new folder")
    task = make_task(args)
    check_writable(folder)
    texts = (capped_texts(args.data, args.max_chars, args.doc_cap) if args.data
             else chain.from_iterable(task_texts(task, args.num_texts, args.seed)))
    if args.data and args.vocab_size == MIN_VOCAB_SIZE:
        next(texts)  # text that cannot be read is told all the same
        print0(f"--vocab-size {args.vocab_size} has no merges: nothing is learnt from the text")
    tokenizer = Tokenizer.train(texts, args.vocab_size)
    check_models(folder, tokenizer)
    if rank_and_world()[0] == 0:
        tokenizer.save(folder)
    example = demo_of(task, "solution_demo", task.problem("sft", 0), random.Random(0))
    print0(f"tokenizer: {tokenizer.vocab_size} ids in {folder}, {time.time() - started:.0f}s; {example!r} is "
           f"{len(tokenizer.encode(example))} tokens")


if __name__ == "__main__":
    script_main(main, make_parser())
