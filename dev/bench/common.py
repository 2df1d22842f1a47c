"""
What the benchmarks share: their flags and random models.
"""
import torch

from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder
from nanochat.hf.shapes import SHAPES, shape_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COUNT = at_least(1, int, 10 ** 6)


def add_model_args(parser) -> None:
    parser.add_argument("--shape", default="", choices=["", *SHAPES],
                        help="a pretrained model's shape, in place of the five flags that follow")
    parser.add_argument("--vocab-size", type=at_least(2, int, 2 ** 24), default=512)
    parser.add_argument("--depth", type=at_least(1, int, 1000), default=4)
    parser.add_argument("--n-embd", type=at_least(24, int, 2 ** 17), default=128)
    parser.add_argument("--n-head", type=at_least(1), default=4)
    parser.add_argument("--n-kv-head", type=at_least(0), default=0, help="0: as many as --n-head")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES),
                        help="of products and activations, on CPU with --shape of products alone; weights are kept in "
                             "float32")
    parser.add_argument("--device-type", default="", choices=["", "cuda", "mps", "cpu"])
    parser.add_argument("--seed", type=at_least(0), default=0)


def random_model(args, context: int, device) -> GPT | Decoder:
    """A model of the flags' shape whose every weight acts: projections do not start at 0 as in training. Raises
    BadInput."""
    generator = torch.Generator(device).manual_seed(args.seed)
    if args.shape:
        config = shape_of(args.shape)
        args.vocab_size, args.depth, args.n_embd = config.vocab_size, config.n_layer, config.n_embd
        args.n_head, args.n_kv_head = config.n_head, config.n_kv_head
        if context > config.sequence_len:
            raise BadInput(f"--shape {args.shape}: {context} tokens, its context is {config.sequence_len}")
        with torch.device(device):
            model = Decoder(config, DTYPES[args.dtype])
        model.init_weights(generator)
        return model
    args.n_kv_head = args.n_kv_head or args.n_head
    if args.n_embd % (2 * args.n_head) or args.n_head % args.n_kv_head:
        raise BadInput(f"--n-embd {args.n_embd} --n-head {args.n_head} --n-kv-head {args.n_kv_head}: the width must "
                       f"be a multiple of twice the heads, "
                       f"the heads a multiple of the key/value heads")
    with torch.device(device):
        model = GPT(GPTConfig(context, args.vocab_size, args.depth, args.n_head, args.n_kv_head, args.n_embd, "L"),
                    DTYPES[args.dtype])
    model.init_weights(generator)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("c_proj.weight"):
                p.normal_(0.0, args.n_embd ** -0.5, generator=generator)
    return model
