"""
Exports a checkpoint of an imported model, generator or verifier, to a folder that transformers opens. How it is to be
asked is printed, and stands in the folder's README.md.

    python -m scripts.hf_export --model-tag tango-gen --to ~/models/tango-generator
"""
import os

import torch

from nanochat.checkpoint import find_step, load_meta, load_model, load_state_dict
from nanochat.cli import check_name, new_parser, script_main
from nanochat.common import BadInput, dtype_name, print0
from nanochat.hf.decoder import DecoderConfig
from nanochat.hf.files import DTYPES, new_folder, write_model
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.own_code import is_file
from nanochat.storage.files import path_of, whole_file
from tasks import format_of
from tasks.formats import PROMPTS, Format


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("--stage", choices=["sft", "rl"], default="rl", help="stage of the checkpoint")
    parser.add_argument("--model-tag", required=True, help="its tag; of a run: <run>-gen or <run>-ver")
    parser.add_argument("--step", type=int, default=-1, help="-1 = the last")
    parser.add_argument("--to", required=True, help="the folder to make")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of the weights")
    return parser


def model_card(tag: str, step: int, role: str | None, fmt: Format | None) -> str:
    """How a checkpoint is to be asked. role: that it was trained in, None where nobody knows."""
    lines = [f"# {tag}, step {step}", "", "Made with nanochat-tango."]
    if fmt is None:
        return "\n".join([*lines, "It was trained on no task there, so it has no prompt of its own.", ""])
    lines += ["It was trained on these messages, in the chat template of its tokenizer."]
    for name, fields in PROMPTS.items():
        of_others = {"generator": "verifier_prompt", "verifier": "generator_prompt"}.get(role)
        if getattr(fmt, name) and name != of_others:
            text = getattr(fmt, name)
            text = text.format(**{field: f"{{{field}}}" for field in fields}) if fields else text
            lines += ["", f"The user's message, to the {name[:-7]}:" if fields else "The system message:", "",
                      *(f"    {line}".rstrip() for line in text.split("\n"))]
    return "\n".join([*lines, ""])


def main(args) -> None:
    check_name("--model-tag", args.model_tag)
    folder = new_folder("--to", args.to)
    step = find_step(args.stage, args.model_tag, None if args.step < 0 else args.step)
    path = path_of(args.stage, args.model_tag, f"meta_{step:06d}.json")
    meta, config = load_meta(path)
    if not isinstance(config, DecoderConfig):
        raise BadInput(f"--model-tag {args.model_tag}: is nanochat's own model, which transformers does not know; "
                       f"only imported ones can be exported")
    recorded = meta.get("user_config", {})
    if is_file(str(recorded.get("task"))):
        card = f"# {args.model_tag}, step {step}\n\nHow it is asked is in the task's file, {recorded['task']!r}.\n"
    else:
        card = model_card(args.model_tag, step, meta.get("role") or recorded.get("role"), format_of(recorded, path))
    tokenizer = load_tokenizer(path_of("tokenizer"))
    model, _ = load_model(args.stage, args.model_tag, torch.device("cpu"), torch.float32, step)
    write_model(folder, model.config, model.state_dict(), DTYPES[args.dtype], tokenizer)
    with whole_file(os.path.join(folder, "README.md")) as f:
        f.write(card)
    held = load_state_dict(path_of(args.stage, args.model_tag, f"model_{step:06d}.pt")).values()
    kinds = " and ".join(sorted({dtype_name(tensor.dtype) for tensor in held}))
    print0(f"{path_of(args.stage, args.model_tag)} at step {step}, {kinds} -> {folder}, {args.dtype}\n")
    print0(card)


if __name__ == "__main__":
    script_main(main, make_parser())
