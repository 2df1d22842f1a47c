"""
Writes a model folder with random weights, in the shape of a known model or smaller, and a small tokenizer: to rehearse
a run without a download.

    python -m scripts.hf_random --shape qwen2.5-1.5b --to /tmp/random-1.5b --texts gsm8k/train.jsonl
    python -m scripts.hf_random --shape qwen2.5-0.5b --n-layer 2 --n-embd 64 --vocab-size 512 --to /tmp/random-tiny
"""
import json
import os
from dataclasses import replace

import tokenizers
import torch

from nanochat.cli import at_least, new_parser, script_main
from nanochat.common import BadInput, print0
from nanochat.gpt import MOST_LAYERS
from nanochat.hf.decoder import Decoder
from nanochat.hf.files import DTYPES, new_path, write_model
from nanochat.hf.gguf import WORDS
from nanochat.hf.shapes import SHAPES, shape_of
from nanochat.hf.tokenizer import HFTokenizer
from nanochat.weights import allocate

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=list(SHAPES))
    parser.add_argument("--to", required=True, help="the folder to make")
    parser.add_argument("--texts", nargs="*", default=[],
                        help="files that the tokenizer learns its merges from; without any a token is a byte")
    parser.add_argument("--n-layer", type=at_least(1, int, MOST_LAYERS), default=None, help="default: the shape's")
    parser.add_argument("--n-embd", type=at_least(1, int, 2 ** 17), default=None,
                        help="default: the shape's; another keeps the heads' size 16 and the MLP four times as wide")
    parser.add_argument("--vocab-size", type=at_least(256 + len(SPECIALS), int, 2 ** 24), default=None,
                        help="rows of the embedding; default: the shape's")
    parser.add_argument("--sequence-len", type=at_least(1, int, 2 ** 24), default=None,
                        help="context; default: the shape's")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--std", type=at_least(0, float, 1000), default=0.02, help="standard deviation of the weights")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def make_tokenizer(files: list[str], vocab_size: int) -> HFTokenizer:
    """A byte-level BPE in Qwen2's form with ChatML turns, of at most 4096 tokens, its merges learnt from the files."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORDS.replace("DIGITS", r"\p{N}")), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=min(vocab_size, 4096) - len(SPECIALS), show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    try:
        tokenizer.train(files, trainer)
    except Exception as error:  # the library raises nothing more exact
        raise BadInput(f"--texts: {error}") from None
    tokenizer.add_special_tokens(SPECIALS)
    config = {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHATML,
              "tokenizer_class": "PreTrainedTokenizerFast"}
    eos = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
    texts = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(config),
             "generation_config.json": json.dumps({"eos_token_id": eos})}
    return HFTokenizer({name: text.encode() for name, text in texts.items()}, "made")


def main(args) -> None:
    config = shape_of(args.shape)
    changes = {"n_layer": args.n_layer, "vocab_size": args.vocab_size, "sequence_len": args.sequence_len}
    if args.n_embd:
        if args.n_embd % 32:
            raise BadInput(f"--n-embd {args.n_embd}: must be a multiple of 32")
        changes |= {"n_embd": args.n_embd, "head_dim": 16, "n_head": args.n_embd // 16, "n_kv_head": args.n_embd // 32,
                    "intermediate_size": 4 * args.n_embd}
    config = replace(config, **{name: value for name, value in changes.items() if value})
    missing = [path for path in args.texts if not os.path.isfile(path)]
    if missing:
        raise BadInput(f"--texts {missing[0]}: no such file")
    folder = new_path("--to", args.to)
    tokenizer = make_tokenizer(args.texts, config.vocab_size)
    model = allocate(Decoder, config, torch.float32, "cpu", DTYPES[args.dtype])
    model.init_weights(torch.Generator().manual_seed(args.seed), args.std)
    write_model(folder, config, model.state_dict(), DTYPES[args.dtype], tokenizer)
    print0(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e9:.3f}B random parameters, "
           f"{tokenizer.vocab_size} tokens")


if __name__ == "__main__":
    script_main(main, make_parser())
