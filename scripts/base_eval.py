"""
Evaluates a base model: bits per byte of text, CORE-style tasks from local files, samples. What is not given files for
is left out, and said so.

    python -m scripts.base_eval --model-tag d4 --val-data text/shard_00003.jsonl
    torchrun --standalone --nproc_per_node=8 scripts/base_eval.py -- --core eval_bundle --max-per-task 500
"""
import os

from nanochat.checkpoint import default_tag, load_model
from nanochat.cli import add_device_arg, at_least, check_name, new_parser, script_main
from nanochat.common import BadInput, compute_dtype, init_device, print0, rank_and_world
from nanochat.core_eval import centered, core_metric, evaluate_core_task, load_core
from nanochat.dataloader import Documents, PackedBatches
from nanochat.engine import generate, row_key
from nanochat.hf.tokenizer import load_own_tokenizer
from nanochat.loss_eval import bits_per_byte
from nanochat.storage.files import path_of


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("--model-tag", default="", help="default: the largest d<N>")
    parser.add_argument("--step", type=at_least(-1), default=-1, help="-1 = the last")
    parser.add_argument("--val-data", nargs="+", default=[],
                        help="bits per byte: .txt, .jsonl or .parquet files, folders, patterns, or one datasets name")
    parser.add_argument("--split-tokens", type=at_least(1), default=40 * 2 ** 19,
                        help="tokens of it, over all ranks; read again where it is shorter")
    parser.add_argument("--device-batch-size", type=at_least(1, int, 10 ** 6), default=32,
                        help="rows that go through the model at once, per rank")
    parser.add_argument("--core", default="",
                        help="folder of the tasks (core.yaml, eval_data, eval_meta_data.csv); default: eval_bundle, "
                             "if it is there")
    parser.add_argument("--max-per-task", type=int, default=-1, help="examples per task; -1 = all")
    parser.add_argument("--prompts", nargs="*",
                        default=["The capital of France is", "If yesterday was Friday, then tomorrow will be", "3+5*2"],
                        help="beginnings that the model continues, greedy")
    parser.add_argument("--num-samples", type=at_least(0, int, 10 ** 6), default=2, help="samples from nothing")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=32)
    parser.add_argument("--seed", type=int, default=0)
    add_device_arg(parser)
    return parser


def evaluate_core(args, model, tokenizer, tasks) -> None:
    """Prints accuracy and centered accuracy per task, and their mean: CORE."""
    rank, world = rank_and_world()
    results = []
    for task in tasks:
        accuracy, num_long = evaluate_core_task(model, tokenizer, task, args.max_per_task, rank, world)
        results.append(centered(accuracy, task.baseline))
        print0(f"{task.label:34s} accuracy {accuracy:.4f} | centered {results[-1]:+.4f}"
               + (f" | {num_long} beyond the context" if num_long else ""))
    print0(f"{'CORE':34s} {core_metric(results):.4f}")


def evaluate_text(args, model, tokenizer) -> None:
    """Prints the bits per byte of the validation text."""
    rank, world = rank_and_world()
    batches = PackedBatches(Documents(args.val_data, rank, world), tokenizer, args.device_batch_size,
                            model.config.sequence_len + 1)
    num_batches = max(1, args.split_tokens // (args.device_batch_size * model.config.sequence_len * world))
    bpb = bits_per_byte(model, (batches.next_batch() for _ in range(num_batches)), tokenizer.num_bytes())
    print0(f"bits per byte {bpb:.4f} on {num_batches * args.device_batch_size * model.config.sequence_len * world:,} "
           f"tokens")


def print_continuations(args, model, tokenizer) -> None:
    """Greedy continuations of --prompts, and samples at temperature 1 from bos alone."""
    prompts = [[tokenizer.bos, *tokenizer.encode(text)] for text in args.prompts]
    new = min(args.max_new_tokens, model.config.sequence_len - max(map(len, [*prompts, [0]])))
    if new < 1:
        raise BadInput(f"--prompts: the longest leaves no room in the context of {model.config.sequence_len} tokens")
    for starts, temperature in ((prompts, 0.0), ([[tokenizer.bos]] * args.num_samples, 1.0)):
        keys = [row_key(args.seed, i) for i in range(len(starts))]
        out = generate(model, starts, 1, max_new_tokens=new, stop_tokens=tokenizer.stop_tokens, keys=keys,
                       temperature=temperature)
        for start, row, length, ended in zip(starts, out.tokens.tolist(), out.lengths.tolist(), out.stopped.tolist(),
                                             strict=True):
            print0(f"{tokenizer.decode(start[1:])!r} -> {tokenizer.decode(row[: length - ended])!r}")


def main(args) -> None:
    tag = args.model_tag or default_tag("base")
    check_name("--model-tag", tag)
    folder = args.core or path_of("eval_bundle")
    tasks = load_core(folder) if args.core or os.path.isdir(folder) else []
    tokenizer = load_own_tokenizer(path_of("tokenizer"))
    device = init_device(args.device_type)
    model, meta = load_model("base", tag, device, compute_dtype(device), None if args.step < 0 else args.step)
    tokenizer.check_model("base model", model)
    print0(f"{path_of('base', tag)} at step {meta['step']}")
    if args.val_data:
        evaluate_text(args, model, tokenizer)
    else:
        print0("bits per byte left out: no --val-data")
    if tasks:
        evaluate_core(args, model, tokenizer, tasks)
    else:
        print0(f"CORE left out: no --core, and no folder {folder}")
    print_continuations(args, model, tokenizer)


if __name__ == "__main__":
    script_main(main, make_parser(), is_shown=True)
