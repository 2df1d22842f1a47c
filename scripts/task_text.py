"""
Writes text for rehearsing pretraining without a download: documents made of a task's problems, solutions and
verifications, in jsonl shards.

    python -m scripts.task_text --task chain --out text --num-documents 20000
"""
import argparse
import json
import os

from nanochat.common import (BadInput, check_least, check_most, check_writable, make_folder, print0, script_main,
                             whole_file)
from tasks import add_task_args, make_task, task_texts


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    add_task_args(parser)
    parser.add_argument("--out", required=True,
                        help="folder for shard_<n>.jsonl; the last shard is meant for validation")
    parser.add_argument("--num-documents", type=int, default=20000)
    parser.add_argument("--num-shards", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(args) -> None:
    check_least(args, {"num_documents": 1, "num_shards": 2})
    check_most(args, {"num_documents": 10 ** 9, "num_shards": 10 ** 5})  # five digits number the shards
    if args.num_documents < args.num_shards:
        raise BadInput(f"--num-documents {args.num_documents}: is below --num-shards {args.num_shards}")
    task = make_task(args)
    check_writable(args.out)
    make_folder(args.out)
    texts, num_chars = task_texts(task, args.num_documents, args.seed), 0
    for shard in range(args.num_shards):
        path = os.path.join(args.out, f"shard_{shard:05d}.jsonl")
        with whole_file(path) as f:
            for _ in range(shard, args.num_documents, args.num_shards):
                read, _, verification = next(texts)
                text = read + verification
                num_chars += len(text)
                f.write(json.dumps({"text": text}) + "\n")
    print0(f"{args.num_documents} documents, {num_chars:,} characters in {args.num_shards} files in {args.out}")


if __name__ == "__main__":
    script_main(main, make_parser())
