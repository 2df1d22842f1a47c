"""
Writes text for rehearsing pretraining without a download: documents made of a task's problems, solutions and
verifications, in jsonl shards.

    python -m scripts.task_text --task chain --out text --num-documents 20000
"""
import json
import os

from nanochat.cli import at_least, new_parser, script_main
from nanochat.common import BadInput, print0
from nanochat.storage.files import check_writable, whole_file, whole_folder
from tasks import add_task_args, make_task, task_texts


def make_parser():
    parser = new_parser(__doc__)
    add_task_args(parser)
    parser.add_argument("--out", required=True,
                        help="folder for shard_<n>.jsonl; the last shard is meant for validation")
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


def main(args) -> None:
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
