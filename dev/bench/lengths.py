"""
How long completions of a real pair are: samples solutions of a task's rl split and a verification of each, and writes
how many tokens they have to a JSON file that dev.bench.ranks reads.

The file: prompts (P,), solutions (P, G), verifier_prompts (P, G), verifications (P, G); known (P,), the mean of G other
solutions of the same problem; and what they are of.

    python -m dev.bench.lengths --generator-tag pair-gen --verifier-tag pair-ver --stage rl --problems 512 \\
        --max-new-tokens 96 --verifier-max-new-tokens 112 --out lengths.json
"""
import os
import statistics

from dev.bench.common import COUNT
from nanochat.checkpoint import load_model
from nanochat.cli import add_device_arg, new_parser, script_main
from nanochat.common import init_device, print0
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records.outcomes import problems_of
from nanochat.storage.files import check_writable, found_at, write_json
from tasks import add_task_args, complete_task_args, make_task, task_flags


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("--generator-tag", required=True)
    parser.add_argument("--verifier-tag", default="", help="default: no verifications, as in a GRPO step")
    parser.add_argument("--stage", choices=["sft", "rl"], default="rl")
    parser.add_argument("--problems", type=COUNT, default=512)
    parser.add_argument("--num-samples", type=COUNT, default=8, help="solutions of each problem")
    parser.add_argument("--max-new-tokens", type=COUNT, default=96)
    parser.add_argument("--verifier-max-new-tokens", type=COUNT, default=112)
    parser.add_argument("--max-rows", type=COUNT, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, metavar="FILE.json")
    add_device_arg(parser)
    add_task_args(parser)
    parser.set_defaults(**dict.fromkeys(task_flags()))
    return parser


def main(args) -> None:
    check_writable(os.path.dirname(os.path.abspath(args.out)))
    device, tokenizer = init_device(args.device_type), load_tokenizer(found_at("tokenizer"))
    load = lambda tag: load_model(args.stage, tag, device, trained=False)
    generator, meta = load(args.generator_tag)
    complete_task_args(args, meta.get("user_config", {}))
    task = make_task(args)
    sampler = Sampler(task, tokenizer, args.seed, args.max_new_tokens, args.verifier_max_new_tokens,
                      max_rows=args.max_rows)
    problems, G = problems_of(task, "rl", args.problems), args.num_samples
    grouped = lambda values, size: [values[i: i + size] for i in range(0, len(values), size)]
    solved, solutions = sampler.solve(generator, problems, 2 * G, ("lengths",))
    lengths = grouped(solved.lengths.tolist(), 2 * G)
    played = [solution for group in grouped(solutions, 2 * G) for solution in group[:G]]
    read = written = [[] for _ in problems]
    if args.verifier_tag:
        judged, _ = sampler.verify(load(args.verifier_tag)[0], [problem for problem in problems for _ in range(G)],
                                   played, 1, ("lengths", "verify"))
        read, written = grouped([len(prompt.ids) for prompt in judged.prompts], G), grouped(judged.lengths.tolist(), G)
    write_json(args.out, {
        "task": args.task, "models": [args.generator_tag, args.verifier_tag],
        "limits": [args.max_new_tokens, args.verifier_max_new_tokens],
        "prompts": [len(prompt.ids) for prompt in solved.prompts], "solutions": [group[:G] for group in lengths],
        "known": [statistics.mean(group[G:]) for group in lengths],
        "verifier_prompts": read, "verifications": written})
    print0(f"{args.out}: {len(problems)} problems x {G}")


if __name__ == "__main__":
    script_main(main, make_parser())
