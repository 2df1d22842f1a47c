"""
What fits where: the memory per rank of a co-training run, by the number of ranks, with and without sharding and
recomputing. Nothing is loaded.

A model is a name below, a folder or hub name with a config.json, or the tag of an SFT checkpoint. The other flags are
tango_rl's; its --dry-run shows the same plan for a run's own settings. Left out: about 1 GB of CUDA context and
libraries, fragmentation, and buffers of the collectives.

    python -m scripts.plan_memory --generator qwen2.5-math-7b --verifier qwen2.5-7b --examples-per-step 256 \\
        --num-samples 5 --max-new-tokens 2048
"""
import argparse

from nanochat.checkpoint import find_step, list_steps, load_meta
from nanochat.cli import at_least, new_parser, script_main
from nanochat.common import BadInput, print0
from nanochat.hf.files import DTYPES, find_folder, read_config
from nanochat.hf.shapes import SHAPES, shape_of
from nanochat.recipes.policy import grpo
from nanochat.recipes.tango import tango
from nanochat.rl.learn.heads import add_head_args, check_head, check_shapes, num_shared
from nanochat.rl.run.flags import with_times
from nanochat.rl.run.memory import Config, Setting, memory_plan
from nanochat.rl.run.plan import Speed, describe_stop, held_by, planned, show_plan, variants
from nanochat.storage.files import found_at


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("--generator", required=True,
                        help=f"one of: {', '.join(SHAPES)}; or a folder, a hub name, the tag of an SFT checkpoint")
    parser.add_argument("--verifier", default="", help="the same; default: as the generator; none = no verifier")
    add_head_args(parser, "verifier", "generator")
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2, 4, 8], help="GPUs")
    parser.add_argument("--memory", type=at_least(0, float), default=80.0, help="of one, in GB (10^9 bytes)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of activations")
    parser.add_argument("--prompt-tokens", type=at_least(1), default=300, help="longest problem")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=1024)
    parser.add_argument("--verifier-max-new-tokens", type=at_least(1), default=1024)
    parser.add_argument("--examples-per-step", type=at_least(1), default=256)
    parser.add_argument("--num-samples", type=at_least(1), default=5)
    parser.add_argument("--micro-batch-tokens", type=at_least(1), default=8192)
    parser.add_argument("--max-rows", type=at_least(1), default=1024, help="rows that decode together")
    parser.add_argument("--kl-coef", type=at_least(0, float), default=1e-3, help="0 = no reference")
    return parser


def config_named(name: str) -> Config:
    """The shape of a model that a flag names. Raises BadInput."""
    if name in SHAPES:
        return shape_of(name)
    if "/" not in name and list_steps("sft", name):
        return load_meta(found_at("sft", name, f"meta_{find_step('sft', name):06d}.json"))[1]
    try:
        return read_config(find_folder(name))
    except BadInput as error:
        raise BadInput(f"{name}: no known shape ({', '.join(SHAPES)}), no SFT checkpoint, and as a folder or hub "
                       f"name: {error}") from None


def main(args) -> None:
    check_head(args)
    configs = {"generator": config_named(args.generator)}
    if args.verifier != "none":
        configs["verifier"] = config_named(args.verifier or args.generator)
        check_shapes(configs["generator"], configs["verifier"], num_shared(args, configs["verifier"]))
    recipe = tango if "verifier" in configs else grpo
    plan_args = argparse.Namespace(**vars(args), num_steps=1, warmup_steps=0, verifier_steps=1, generator_steps=1,
                                   verify_relabelled=False)
    draws = planned(with_times(plan_args, recipe.draws(plan_args)), lambda wrap: args.prompt_tokens)
    held = held_by(args, recipe.ROLES, configs)
    setting = Setting(dtype=DTYPES[args.dtype], micro_batch_tokens=args.micro_batch_tokens, max_rows=args.max_rows)
    print0(f"{'ranks':>5s} {'--shard':>8s} {'--recompute':>12s} {'stays':>9s} {'sampling':>9s} {'update':>9s} "
           f"{'peak':>9s}  GB per rank")
    best = None
    for variant in variants(setting, sorted(set(args.ranks))):
        plan = memory_plan(configs, held, draws, variant)
        phases = {kind: max((size for name, size in plan["phases"].items() if name.startswith(kind)), default=0)
                  for kind in ("sampling", "updating")}
        resident, fits = plan["peak"] - max(plan["phases"].values()), plan["peak"] / 1e9 <= args.memory
        best = best or (variant, plan) if fits else best
        yes = lambda flag: "yes" if flag else "no"
        print0(f"{variant.ranks:5d} {yes(variant.shard):>8s} {yes(variant.recompute):>12s} {resident / 1e9:9.2f} "
               f"{phases['sampling'] / 1e9:9.2f} {phases['updating'] / 1e9:9.2f} {plan['peak'] / 1e9:9.2f}  "
               f"{'fits' if fits else 'does not fit'} {args.memory:g} GB")
    if best:
        chosen, plan = best
        print0(f"\nthe first that fits, {chosen.ranks} "
               f"rank(s){' --shard' * chosen.shard}{' --recompute' * chosen.recompute}:")
        print0("\n".join([*show_plan(plan, args.memory), describe_stop(configs, held, draws, chosen, Speed())]))
    else:
        print0("\nnothing fits: lower --max-rows (sampling), --micro-batch-tokens (update), the lengths, or take "
               "more ranks with --shard")


if __name__ == "__main__":
    script_main(main, make_parser(), is_shown=True)
