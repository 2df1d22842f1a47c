"""
GRPO of one role alone: the loop of tango_rl without the other player.

--role generator: rewarded by its answers (no verifier). --role verifier: rewarded by its verdicts on the solutions of a generator that stays as it is.
All other flags are tango_rl's.

    python -m scripts.chat_rl --model-tag d4 --run grpo
    torchrun --standalone --nproc_per_node=8 scripts/chat_rl.py -- --model-tag d24 --task gsm8k --calculator --run grpo
"""
import argparse

from nanochat.common import BadInput, script_main
from scripts import tango_rl

ROLES = {"generator": "grpo", "verifier": "fixed_generator"}  # role -> recipe of tango_rl


def make_parser() -> argparse.ArgumentParser:
    parser = tango_rl.make_parser()
    parser.description = __doc__
    parser.add_argument("--role", choices=list(ROLES), default="generator", help="the one that is trained")
    parser.set_defaults(recipe=None)
    return parser


def main(args) -> None:
    if args.recipe is not None:
        raise BadInput(f"--recipe {args.recipe}: chat_rl trains one role, which --role names; recipes are tango_rl's")
    args.recipe = ROLES[args.role]
    tango_rl.main(args)


if __name__ == "__main__":
    script_main(main, make_parser())
