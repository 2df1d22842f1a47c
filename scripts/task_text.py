"""
Writes text for rehearsing pretraining without a download: documents made of a task's problems, solutions and
verifications, in jsonl shards.

    python -m scripts.task_text --task chain --out text --num-documents 20000
"""
import json
import os
import re
import shutil

from nanochat.cli import at_least, script_main, script_parser
from nanochat.common import BadInput, CannotWrite, print0
from nanochat.hf.files import PARTIAL
from nanochat.storage.files import check_writable, is_alone, make_folder, whole_file, writing
from tasks import add_task_args, make_task, task_texts


def make_parser():
    parser = script_parser(__doc__)
    add_task_args(parser)
    parser.add_argument("--out", required=True,
                        help="folder for shard_<n>.jsonl; the last shard is meant for validation")
    parser.add_argument("--num-documents", type=at_least(1, int, 10 ** 9), default=20000)
    parser.add_argument("--num-shards", type=at_least(2, int, 10 ** 5), default=4)  # five digits number them
    parser.add_argument("--seed", type=int, default=0)
    return parser


def check_folders(out: str, partial: str) -> None:
    """Raises BadInput where the folder of the text holds anything, or the one that it is written in anything but what a
    call that was killed left there."""
    for folder, leftover in ((out, ""), (partial, r"shard_\d{5}\.jsonl(\.tmp)?")):
        check_writable(folder)
        there = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        if others := [name for name in there if not re.fullmatch(leftover, name)]:
            raise BadInput(f"{folder} holds {others[0]}: give --out a folder that is empty or not there yet")


def take(partial: str, out: str) -> None:
    """Makes the folder that the text is written in, or empties what a killed call left there, and locks it until this
    process ends. Raises CannotWrite where another call is at work."""
    make_folder(partial)
    if not is_alone(os.open(partial, os.O_RDONLY), partial):
        raise CannotWrite(f"{out} cannot be written: another process is writing it")
    for name in os.listdir(partial):
        os.remove(os.path.join(partial, name))


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


def main(args) -> None:
    if args.num_documents < args.num_shards:
        raise BadInput(f"--num-documents {args.num_documents}: is below --num-shards {args.num_shards}")
    task = make_task(args)
    check_writable(args.out)
    out = os.path.realpath(args.out)  # what a link names can be renamed over
    partial = out + PARTIAL
    check_folders(out, partial)
    take(partial, out)
    try:
        num_chars = write_shards(partial, task_texts(task, args.num_documents, args.seed), args.num_documents,
                                 args.num_shards)
        with writing(out):
            os.rename(partial, out)  # all shards at once: some of them would be taken for the whole text
    except CannotWrite as error:  # the other folder is gone when this is read
        raise CannotWrite(str(error).replace(partial, out)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print0(f"{args.num_documents} documents, {num_chars:,} characters in {args.num_shards} files in {args.out}")


if __name__ == "__main__":
    script_main(main, make_parser())
