"""
Imports a Llama 2/3, Qwen2/2.5 or Qwen3 model as an SFT checkpoint, with its tokenizer: what chat_sft, tango_rl,
chat_eval and chat_cli start from.

One base directory has one tokenizer: generator and verifier must share theirs. Weights keep the dtype they have in the
folder; the quantised ones of a GGUF file become float32.

    python -m scripts.hf_import --source Qwen/Qwen2.5-Math-7B --model-tag qwen7b              # from the hub
    python -m scripts.hf_import --source ~/models/Qwen2.5-7B --model-tag qwen7b-ver           # from a folder
    python -m scripts.hf_import --source ~/models/SmolLM2.gguf --model-tag smol               # from a GGUF file
"""
import os
from dataclasses import replace

import torch

from nanochat.checkpoint import check_loaded, list_steps, save_model
from nanochat.cli import at_least, check_name, new_parser, script_main
from nanochat.common import BadInput, print0
from nanochat.hf.card import licence_text
from nanochat.hf.decoder import Decoder
from nanochat.hf.files import find_folder, origin_of_folder, read_model
from nanochat.hf.gguf import origin_of_file, read_gguf
from nanochat.hf.tokenizer import HFTokenizer, load_tokenizer
from nanochat.storage.files import check_writable, path_of


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("--source", required=True,
                        help="a model folder (config.json, safetensors, tokenizer.json), a GGUF file, or the name of "
                             "a model on the hub")
    parser.add_argument("--model-tag", required=True,
                        help="tag of the checkpoint; tango_rl takes <tag>-ver for the verifier")
    parser.add_argument("--num-layers", type=at_least(0), default=0,
                        help="its lowest layers alone, for a smaller model, which then needs SFT; 0 = all")
    return parser


def keep_tokenizer(tokenizer: HFTokenizer, source: str) -> HFTokenizer:
    """Makes it the base directory's tokenizer, unless that has one that gives texts the same ids; what that one does
    otherwise is told. -> the one that is there now. Raises BadInput where it has another."""
    folder = path_of("tokenizer")
    if not any(os.path.exists(os.path.join(folder, name)) for name in ("tokenizer.pkl", "tokenizer.json")):
        tokenizer.save(folder)
        return tokenizer
    kept = load_tokenizer(folder)
    if not tokenizer.equals(kept):
        raise BadInput(f"--source {source}: its tokenizer is not the one in {folder}; "
                       f"give NANOCHAT_BASE_DIR another folder")
    if differences := tokenizer.tells_apart(kept):
        print0(f"WARNING: --source {source}: the tokenizer in {folder} is kept, which gives texts the same ids; the "
               f"source's own has {' and '.join(differences)}")
    return kept


def read_source(source: str) -> tuple[HFTokenizer, Decoder, dict]:
    """The tokenizer and the model of a GGUF file, a folder or a name on the hub, and what is known of the model's
    origin (files.origin_of_folder). Raises BadInput."""
    path = os.path.expanduser(source)
    if not os.path.isdir(path) and (path.endswith(".gguf") or os.path.isfile(path)):
        return *read_gguf(path), origin_of_file(path)
    folder, name = find_folder(source), None if os.path.isdir(path) else source
    model = read_model(folder, torch.device("cpu"), torch.float32)
    return HFTokenizer.load(folder), model, origin_of_folder(folder, name)


def keep_layers(model: Decoder, num: int) -> None:
    """Leaves a model its lowest layers alone. Raises BadInput where it has fewer."""
    if num > model.config.n_layer:
        raise BadInput(f"--num-layers {num}: the model has {model.config.n_layer}")
    model.config = replace(model.config, n_layer=num)
    model.windows, model.model.layers = model.windows[:num], model.model.layers[:num]


def main(args) -> None:
    check_name("--model-tag", args.model_tag)
    if list_steps("sft", args.model_tag):
        raise BadInput(f"--model-tag {args.model_tag}: {path_of('sft', args.model_tag)} has a checkpoint already")
    check_writable(path_of("sft", args.model_tag))
    tokenizer, model, origin = read_source(args.source)
    tokenizer.check_model("model", model)
    check_loaded(model, args.source)
    if args.num_layers:
        keep_layers(model, args.num_layers)
    kept = keep_tokenizer(tokenizer, args.source)
    save_model("sft", args.model_tag, 0, model,
               {"imported_from": args.source, "origin": origin, "tokenizer": kept.mark()})
    number = sum(p.numel() for p in model.parameters())
    print0(f"{args.source}: {model.config.architecture}, {number / 1e9:.3f}B parameters in "
           f"{next(model.parameters()).dtype}, context {model.config.sequence_len}"
           + ("" if tokenizer.has_template else "; its tokenizer has no chat template: prompts are plain text"))
    print0(f"its licence: {licence_text(origin)}")
    print0(f"checkpoint: {path_of('sft', args.model_tag)}")


if __name__ == "__main__":
    script_main(main, make_parser())
