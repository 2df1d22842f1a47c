"""
GRPO of a chat model alone: tango_rl with --recipe grpo, under upstream's name. Its defaults are not upstream's: see
dev/stack.md.

    python -m scripts.chat_rl --model-tag d4 --run grpo
    torchrun --standalone --nproc_per_node=8 scripts/chat_rl.py -- --model-tag d24 --task gsm8k --calculator --run grpo
"""
from functools import partial

from nanochat.cli import script_main
from scripts.tango_rl import main, make_parser as parser_of_recipe

make_parser = partial(parser_of_recipe, recipe="grpo")

if __name__ == "__main__":
    script_main(main, make_parser)
