"""
What a generative verifier shares with the generator: nothing, a trunk, or all but its prompt.

--verifier-head names it. Take `own` where generator and verifier are different checkpoints, and `trunk` where one
checkpoint (chat_sft --role both) can be both: it halves the memory. Memory is that of weights and AdamW as a share of
two models', with the moments of what both roles train shared (--verifier-optimizer), or with a set for each.

    own     a model of its own (the paper)                                                           100%
    frozen  the generator's lowest blocks, which only the generator trains                           50 to 100%
    trunk   the same blocks, trained by both; an LM head of its own, and the blocks above, if any    52%, 84%
    prompt  the generator's model; nothing but the prompt says which role speaks                     50%, 83%
"""
from dataclasses import dataclass, replace

import torch

from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder, DecoderConfig


@dataclass(frozen=True)
class Head:
    """How much of a verifier is the generator's."""
    shares: bool = True   # its lowest layers
    trains: bool = True   # its updates move these too
    is_one: bool = False  # all of it

    @property
    def is_joint(self) -> bool:
        """Whether both roles train the same weights."""
        return self.shares and self.trains


HEADS = {"own": Head(shares=False), "frozen": Head(trains=False), "trunk": Head(), "prompt": Head(is_one=True)}
ALL = -1  # layers


def add_head_args(group, role: str, owner: str) -> None:
    """The flags of a role that may share weights with another."""
    group.add_argument("--verifier-head", default="own", choices=list(HEADS),
                       help=f"what the {role} shares with the {owner}. own: nothing; "
                       f"frozen: its lowest layers, which the {owner} alone trains; trunk: these, trained by both, "
                       f"with an LM head of its own; prompt: the whole model. trunk and prompt start from one "
                       f"checkpoint, that of chat_sft --role both")
    group.add_argument("--verifier-shared-layers", type=at_least(1, also=ALL), default=ALL,
                       help=f"frozen and trunk: how many of the lowest layers are the {owner}'s; -1 = all")
    group.add_argument("--verifier-optimizer", default="shared", choices=["own", "shared"],
                       help="trunk and prompt: AdamW's moments of what both roles train; own: a set for each role, "
                       "which is a third more memory")


def check_head(args) -> None:
    """Raises BadInput for flags of add_head_args that do not go together."""
    explicit = getattr(args, "explicit", set())
    if args.verifier_shared_layers != ALL and args.verifier_head not in ("frozen", "trunk"):
        raise BadInput(f"--verifier-shared-layers {args.verifier_shared_layers}: --verifier-head {args.verifier_head} "
                       f"has no number of layers; frozen and trunk have")
    if "verifier_optimizer" in explicit and not HEADS[args.verifier_head].is_joint:
        raise BadInput(f"--verifier-optimizer {args.verifier_optimizer}: with --verifier-head {args.verifier_head} no "
                       f"weights are trained by both roles")


def num_shared(args, config) -> int:
    """How many layers of a model of this shape are shared; args: those of add_head_args."""
    head = HEADS[args.verifier_head]
    if not head.shares:
        return 0
    return config.n_layer if head.is_one or args.verifier_shared_layers == ALL else args.verifier_shared_layers


def shared_names(model: GPT | Decoder, num_layers: int) -> list[str]:
    """The parameters shared whole: embedding, a GPT's smear, the lowest blocks and value embeddings."""
    starts = ("transformer.wte.", "smear_") if isinstance(model, GPT) else ("model.embed_tokens.",)
    names = [name for name, _ in model.named_parameters() if num_layers and name.startswith(starts)]
    for name, _ in model.named_parameters():
        part, _, rest = name.removeprefix("transformer.").removeprefix("model.").partition(".")
        if part in ("h", "value_embeds", "layers") and int(rest.split(".")[0]) < num_layers:
            names.append(name)
    return names


def check_shapes(generator: GPTConfig | DecoderConfig, verifier: GPTConfig | DecoderConfig, num_layers: int) -> None:
    """Raises BadInput unless a verifier of this shape can share `num_layers` layers with the generator."""
    if not 0 <= num_layers <= verifier.n_layer:
        raise BadInput(f"--verifier-shared-layers {num_layers}: the verifier has {verifier.n_layer} layers")
    if num_layers and untied(generator) != untied(verifier):
        raise BadInput(f"--verifier-shared-layers {num_layers}: generator and verifier differ in shape: "
                       f"{generator} and {verifier}")


def untied(config: GPTConfig | DecoderConfig) -> GPTConfig | DecoderConfig:
    """The shape with an LM head of its own, which a verifier on a trunk has."""
    return replace(config, tied=False) if isinstance(config, DecoderConfig) else config


def share_layers(generator: GPT | Decoder, verifier: GPT | Decoder, num_layers: int) -> list[torch.nn.Parameter]:
    """Makes the verifier's lowest blocks, embedding and smear be the generator's; returns its private parameters: of
    n_layer layers the LM head, a GPT's backout, a decoder's last norm. Raises BadInput, see `check_shapes`.

    The entries of a GPT's resid_lambdas and x0_lambdas below num_layers follow the generator's (`copy_shared_lambdas`)
    and take no gradient. An LM head that was tied to the embedding is untied.
    """
    check_shapes(generator.config, verifier.config, num_layers)
    names = alias_layers(generator, verifier, num_layers)
    if names:  # an LM head that was tied still is the embedding that it had
        verifier.config = untied(verifier.config)
    copy_shared_lambdas(generator, verifier, num_layers)
    verifier.frozen_layers = num_layers
    shared = {id(generator.get_parameter(name)) for name in names}
    return [p for p in verifier.parameters() if id(p) not in shared]


def alias_layers(theirs: GPT | Decoder, ours: GPT | Decoder, num_layers: int) -> list[str]:
    """Puts one model's shared parameters in the place of another's, also of references and copies. -> their names"""
    names = shared_names(ours, num_layers)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(ours.get_submodule(owner), leaf, theirs.get_parameter(name))
    return names


@torch.no_grad()
def copy_shared_lambdas(generator: GPT | Decoder, verifier: GPT | Decoder, num_layers: int) -> None:
    """Brings a GPT verifier's per-layer scalars of the shared layers to the generator's values."""
    for name in ("resid_lambdas", "x0_lambdas") if num_layers and isinstance(verifier, GPT) else ():
        verifier.get_parameter(name)[:num_layers] = generator.get_parameter(name)[:num_layers]


def check_shared(generator: GPT | Decoder, verifier: GPT | Decoder, num_layers: int, tag: str) -> None:
    """Raises BadInput unless the verifier's shared weights equal the generator's: it was trained on that trunk."""
    check_shapes(generator.config, verifier.config, num_layers)
    for name in shared_names(verifier, num_layers):
        if not torch.equal(generator.get_parameter(name), verifier.get_parameter(name)):
            raise BadInput(f"--verifier-shared-layers {num_layers}: {name} of verifier {tag} is not the generator's; "
                           f"train both with chat_sft --role both, or the verifier with --verifier-shared-layers")
