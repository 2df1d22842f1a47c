"""
Times sampling against the bound that memory and matrix products set, and against transformers' generate where it is
installed.

Random-init models, prompts and completions of exactly the asked lengths. Prefill is timed by itself (one new token) and
taken off; providers take turns, medians are shown. transformers gets a Llama with as many block weights, its MLP 8/3
wide, no end token. With --mean-len completions end by themselves, each token with the same probability, so that their
lengths are geometric, cut at --completion-len; more rows than --max-rows wait for a place. transformers, which would
have to wait for each batch's longest row, is left out then. The last line is JSON.

    python -m dev.bench.engine --rows 256 --prompt-len 64 --completion-len 128
    python -m dev.bench.engine --device-type cuda --dtype bfloat16 --depth 28 --n-embd 1536 --n-head 12 \\
        --n-kv-head 2 --vocab-size 151936 --rows 256 --prompt-len 960 --completion-len 128
"""
import argparse
import json
import statistics

import torch

from dev.bench.common import COUNT, DTYPES, add_model_args, random_model
from nanochat.cli import at_least, script_main
from nanochat.common import BadInput, init_device, print0
from nanochat.engine import generate, row_key
from nanochat.flops import decode_floor, machine_speed, seconds_of


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--rows", type=COUNT, default=256, help="completions")
    parser.add_argument("--max-rows", type=at_least(0), default=0, help="completions that decode together; 0: all")
    parser.add_argument("--mean-len", type=at_least(0), default=0,
                        help="mean tokens of a completion; 0: --completion-len, all")
    parser.add_argument("--num-samples", type=at_least(1), default=1, help="rows that share a prompt")
    parser.add_argument("--prompt-len", type=COUNT, default=64)
    parser.add_argument("--completion-len", type=at_least(2, int, 10 ** 6), default=128)
    parser.add_argument("--rounds", type=COUNT, default=3)
    add_model_args(parser)
    return parser


def ours(args, device):
    """-> sample(prompts, length)"""
    model = random_model(args, args.prompt_len + args.completion_len, device)
    keys, stop_tokens = [row_key(args.seed, n) for n in range(args.rows)], []
    if args.mean_len:  # a flat distribution, in which one token in mean_len ends the completion
        with torch.no_grad():
            model.lm_head.weight.mul_(1e-4)
        stop_tokens = list(range(round(args.vocab_size / args.mean_len)))

    def sample(prompts, length):
        lengths = generate(model, prompts, args.num_samples, max_new_tokens=length, stop_tokens=stop_tokens, keys=keys,
                           max_rows=args.max_rows).lengths
        assert args.mean_len or lengths.eq(length).all()
        return int(lengths.sum()) - args.rows  # after the first ones
    return sample


def transformers(args, device):
    """The same from transformers. Raises ImportError where it is not installed."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=args.vocab_size, hidden_size=args.n_embd, intermediate_size=args.n_embd * 8 // 3,
                         num_hidden_layers=args.depth, num_attention_heads=args.n_head,
                         num_key_value_heads=args.n_kv_head, tie_word_embeddings=False, eos_token_id=None,
                         max_position_embeddings=args.prompt_len + args.completion_len)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(DTYPES[args.dtype]).eval()

    def sample(prompts, length):
        ids = torch.tensor(prompts, device=device).repeat_interleave(args.num_samples, dim=0)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                             top_p=1.0, max_new_tokens=length, pad_token_id=0)
        assert out.shape == (args.rows, args.prompt_len + length)
        return args.rows * (length - 1)
    return sample


def main(args) -> None:
    args.max_rows = args.max_rows or args.rows
    if args.mean_len > args.vocab_size:
        raise BadInput(f"--mean-len {args.mean_len}: at most --vocab-size {args.vocab_size}, as one token of so many "
                       f"ends a completion")
    if args.rows % args.num_samples:
        raise BadInput(f"--rows {args.rows}: must be a multiple of --num-samples {args.num_samples}")
    device = init_device(args.device_type)
    generator = torch.Generator().manual_seed(args.seed)
    prompts = torch.randint(args.vocab_size, (args.rows // args.num_samples, args.prompt_len),
                            generator=generator).tolist()
    samplers = {}
    for provider in (ours,) if args.mean_len else (ours, transformers):
        try:
            samplers[provider.__name__] = provider(args, device)
        except ImportError as error:
            print0(f"{provider.__name__} is left out: {error}")
    seconds, decoded = {name: {"prefill": [], "all": []} for name in samplers}, 0
    for timed in [False] + [True] * args.rounds:  # the first round warms up
        for name, sample in samplers.items():
            for part, length in (("prefill", 1), ("all", args.completion_len)):
                counted = []
                elapsed = seconds_of(lambda s=sample, n=length, to=counted: to.append(s(prompts, n)), device)
                decoded = max(decoded, *counted)
                if timed:
                    seconds[name][part].append(elapsed)
    # As if all places were full to the end: so many tokens of places that hold as many prompts as they can.
    steps = -(-decoded // args.max_rows)
    turns = max(1, steps // (args.completion_len - 1))
    floor = turns * decode_floor(
        random_model(args, args.prompt_len + args.completion_len, device), -(-args.max_rows // args.num_samples),
        args.max_rows, args.prompt_len, -(-steps // turns), machine_speed(device, DTYPES[args.dtype]))
    results = {"bound": {"decode_tok_per_s": round(decoded / floor)}}
    for name, parts in seconds.items():
        prefill, whole = (statistics.median(parts[part]) for part in ("prefill", "all"))
        results[name] = {"decode_tok_per_s": round(decoded / (whole - prefill)),
                         "percent_of_bound": round(100 * floor / (whole - prefill), 1),
                         "prefill_s": round(prefill, 4), "whole_s": round(whole, 4)}
    for name, result in results.items():
        print0(f"{name:14} {result}")
    print0(json.dumps({"results": results, "threads": torch.get_num_threads(), "torch": torch.__version__,
                       "device": str(device), **vars(args)}))


if __name__ == "__main__":
    script_main(main, make_parser())
