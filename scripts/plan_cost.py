"""
Hours and dollars of the stages of runs/speedrun.sh on a node, computed from FLOPs and bytes before anything runs.

The flags are those of the scripts themselves. Nothing here was measured: training is taken to run at --mfu of the GPUs'
peak, decoding at --decode-efficiency of what memory bandwidth and FLOPs allow at best.

    python -m scripts.plan_cost --base "--depth 24 --target-param-data-ratio 8" --generator-sft "--num-steps 1500" \\
        --verifier-sft "" --rl "--num-steps 200"
"""
import shlex
from dataclasses import replace

import torch

from nanochat.cli import at_least, new_parser, script_main
from nanochat.common import BadInput, print0
from nanochat.flops import PEAK_FLOPS, flops_per_token, muon_flops
from nanochat.gpt import config_of
from nanochat.recipes.policy import grpo
from nanochat.recipes.tango import tango
from nanochat.rl.records.prompts import empty_verifier_prompt
from nanochat.rl.run.flags import with_times
from nanochat.rl.run.memory import Held, PlannedDraw, Setting, model_of
from nanochat.rl.run.plan import BANDWIDTH, DISK_SPEED, Speed, describe_stop, draw_seconds, planned, sampling_seconds
from nanochat.tokenizer import MIN_VOCAB_SIZE
from scripts import base_eval, base_train, chat_sft, tango_rl

GSM8K_TEST, QUESTIONS = 1319, 2376 + 1172 + 14042  # problems; questions of ARC-Easy, ARC-Challenge and MMLU
LENGTH = at_least(1, int, 10 ** 6)
ASSUMED = """counted: 6 FLOPs per token and weight of the matrices and the LM head, attention to the tokens that causal
windows let see, Muon's products; not embeddings, which are looked up, nor what is computed and masked
from NVIDIA's data sheets: peak FLOP/s (dense bf16) and bandwidth
assumed, not measured: --mfu, which makes up for all that is not counted, --decode-efficiency, --dollars, lengths"""


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("--base", default="",
                        help="flags of base_train, in one string; this and the next three as in runs/speedrun.sh")
    parser.add_argument("--generator-sft", default="", help="flags of chat_sft")
    parser.add_argument("--verifier-sft", default="")
    parser.add_argument("--rl", default="", help="flags of tango_rl")
    parser.add_argument("--base-eval", default="", help="flags of base_eval")
    parser.add_argument("--vocab-size", type=at_least(MIN_VOCAB_SIZE, int, 2 ** 24), default=32768)
    parser.add_argument("--gpus", type=at_least(1, int, 10 ** 6), default=8)
    parser.add_argument("--gpu", choices=list(BANDWIDTH), default="H100")
    parser.add_argument("--dollars", type=at_least(0, float), default=3.0, help="per GPU and hour")
    parser.add_argument("--mfu", type=at_least(0.01, float, 1), default=0.35,
                        help="share of the peak FLOPs that training reaches")
    parser.add_argument("--decode-efficiency", type=at_least(0.01, float, 1), default=0.2,
                        help="share of the speed of decoding that the memory's bandwidth allows")
    parser.add_argument("--disk-speed", type=at_least(0.001, float), default=DISK_SPEED / 1e9,
                        help="GB/s (10^9 bytes) at which checkpoints are written, by all GPUs' processes together")
    parser.add_argument("--example-tokens", type=LENGTH, default=500, help="mean length of an SFT example")
    parser.add_argument("--prompt-tokens", type=LENGTH, default=150, help="mean length of a problem")
    parser.add_argument("--completion-tokens", type=LENGTH, default=180,
                        help="mean length of a solution and of a verification")
    return parser


def parse(script, flags: str, *required: str):
    """The flags as the script itself would read them. Raises BadInput."""
    parser = script.make_parser()

    def refuse(message: str):
        raise BadInput(f"{script.__name__} {flags}: {message}")

    parser.error = refuse
    try:
        args = parser.parse_args([*shlex.split(flags), *required])
    except ValueError as error:  # a quotation that is not closed
        refuse(str(error))
    if getattr(args, "recipe", "tango") != "tango":
        refuse(f"the figures are those of RL Tango, and of GRPO beside it, not of {args.recipe}")
    return args


def pretraining_flops(args, base, model) -> tuple[float, str]:
    rules = base_train.apply_rules(base, model, args.gpus)
    tokens = rules["num_steps"] * rules["batch"]
    # The GPUs share Muon's matrices, and wait for the one that has most.
    muon = args.gpus * muon_flops([p.shape for p in model.blocks.parameters()], args.gpus)
    total = tokens * flops_per_token(model) + rules["num_steps"] * muon
    return total, f"{rules['num_steps']:,} steps of {rules['batch']:,} tokens, {tokens / 1e9:.2f}B"


def sft_flops(args, sft, model) -> tuple[float, str]:
    tokens = sft.num_steps * sft.examples_per_step * args.example_tokens
    return (tokens * flops_per_token(model),
            f"{sft.num_steps:,} steps of {sft.examples_per_step} examples, {tokens / 1e6:.0f}M tokens")


def setting_of(args, rl) -> Setting:
    return Setting(ranks=args.gpus, updates_per_batch=rl.updates_per_batch, micro_batch_tokens=rl.micro_batch_tokens,
                   max_rows=rl.max_rows)


def draws_in(args, rl, recipe) -> list[PlannedDraw]:
    """What a recipe draws, of mean lengths."""
    quoted = {empty_verifier_prompt: args.completion_tokens}
    draws = with_times(rl, recipe.draws(rl))
    return [replace(sized, prompt_tokens=args.prompt_tokens + quoted.get(draw.wrap, 0),
                    new_tokens=args.completion_tokens)
            for sized, draw in zip(planned(draws, lambda wrap: 0), draws.values(), strict=True)]


def rl_rows(args, rl, model, speed: Speed) -> list[tuple[str, float, str]]:
    """RL Tango, and GRPO alone."""
    setting, rows = setting_of(args, rl), []
    for name, recipe in (("RL Tango", tango), ("chat_rl in its place", grpo)):
        draws = draws_in(args, rl, recipe)
        seconds = {draw.name: sum(draw_seconds(model.config, draw, Held(), setting, speed).values()) for draw in draws}
        total = sum(draw.times * seconds[draw.name] for draw in draws)
        rows.append((name, total,
                     ", ".join(f"{draw.name} {seconds[draw.name]:.1f}s x {draw.times}" for draw in draws)))
    return rows


def evaluation_rows(args, base_eval_args, model, speed: Speed) -> list[tuple[str, float, str]]:
    """Bits per byte; GSM8K's test problems, greedy, and the questions of ARC and MMLU."""
    forward = flops_per_token(model) / 3 / (args.gpus * speed.limits[0] * args.mfu)  # seconds per token
    problems = GSM8K_TEST / args.gpus
    return [("base_eval, bits per byte", base_eval_args.split_tokens * forward,
             f"{base_eval_args.split_tokens / 1e6:.0f}M tokens"),
            ("chat_eval", sampling_seconds(model, problems, problems, args.prompt_tokens, args.completion_tokens, speed)
             + QUESTIONS * args.prompt_tokens * forward, f"{GSM8K_TEST:,} solutions, {QUESTIONS:,} questions")]


def main(args) -> None:
    base = parse(base_train, args.base, "--data", "none")
    model = model_of(config_of(base, args.vocab_size), torch.bfloat16)
    rl, text_eval = parse(tango_rl, args.rl), parse(base_eval, args.base_eval)
    peak = PEAK_FLOPS[args.gpu]
    stages = [("pretraining", *pretraining_flops(args, base, model)),
              *((f"SFT of the {role}", *sft_flops(args, parse(chat_sft, flags, "--role", role), model))
                for role, flags in (("generator", args.generator_sft), ("verifier", args.verifier_sft)))]
    rows = [(name, flops / (args.gpus * peak * args.mfu), f"{flops:.2e} FLOPs: {what}") for name, flops, what in stages]
    speed = Speed(args.gpu, args.mfu, args.decode_efficiency)
    of_tango, of_grpo = rl_rows(args, rl, model, speed)
    text, chat = evaluation_rows(args, text_eval, model, speed)
    rows += [of_tango, text, chat]
    total = sum(seconds for _, seconds, _ in rows) + chat[1]  # after SFT and after RL
    print0(f"computed for {args.gpus} x {args.gpu} at {100 * args.mfu:.0f}% of {peak / 1e12:.0f} TFLOP/s in training "
           f"and {100 * args.decode_efficiency:.0f}% of the bandwidth's speed in decoding, "
           f"${args.dollars:.2f} per GPU and hour; not measured, and without CORE, evaluations in training, and the "
           f"solutions that the verifier's SFT samples")
    for name, seconds, what in [*rows, ("in all, of these", total, ""), of_grpo]:
        print0(f"{name:28s} {seconds / 3600:6.3f} h  ${seconds / 3600 * args.gpus * args.dollars:7.2f}  {what}")
    roles = ("generator", "verifier")
    print0("RL Tango: " + describe_stop(dict.fromkeys(roles, model.config), dict.fromkeys(roles, Held()),
                                        draws_in(args, rl, tango), setting_of(args, rl), speed,
                                        1e9 * args.disk_speed))
    print0(ASSUMED)


if __name__ == "__main__":
    script_main(main, make_parser(), is_shown=True)
