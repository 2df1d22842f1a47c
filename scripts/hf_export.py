"""
Exports a checkpoint of an imported model, generator or verifier, to a folder that transformers opens.

    python -m scripts.hf_export --model-tag tango-gen --to ~/models/tango-generator
"""

import torch

from nanochat.checkpoint import find_step, load_meta, load_model, load_state_dict
from nanochat.cli import check_name, new_parser, script_main
from nanochat.common import BadInput, dtype_name, print0
from nanochat.hf.decoder import DecoderConfig
from nanochat.hf.files import DTYPES, new_folder, write_model
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.storage.files import path_of


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("--stage", choices=["sft", "rl"], default="rl", help="stage of the checkpoint")
    parser.add_argument("--model-tag", required=True, help="its tag; of a run: <run>-gen or <run>-ver")
    parser.add_argument("--step", type=int, default=-1, help="-1 = the last")
    parser.add_argument("--to", required=True, help="the folder to make")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of the weights")
    return parser


def main(args) -> None:
    check_name("--model-tag", args.model_tag)
    folder = new_folder("--to", args.to)
    step = find_step(args.stage, args.model_tag, None if args.step < 0 else args.step)
    _, config = load_meta(path_of(args.stage, args.model_tag, f"meta_{step:06d}.json"))
    if not isinstance(config, DecoderConfig):
        raise BadInput(f"--model-tag {args.model_tag}: is nanochat's own model, which transformers does not know; "
                       f"only imported ones can be exported")
    tokenizer = load_tokenizer(path_of("tokenizer"))
    model, _ = load_model(args.stage, args.model_tag, torch.device("cpu"), torch.float32, step)
    write_model(folder, model.config, model.state_dict(), DTYPES[args.dtype], tokenizer)
    held = load_state_dict(path_of(args.stage, args.model_tag, f"model_{step:06d}.pt")).values()
    kinds = " and ".join(sorted({dtype_name(tensor.dtype) for tensor in held}))
    print0(f"{path_of(args.stage, args.model_tag)} at step {step}, {kinds} -> {folder}, {args.dtype}")


if __name__ == "__main__":
    script_main(main, make_parser())
