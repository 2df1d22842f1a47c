"""
A role: a policy with its reference, its optimizer and which of its weights it trains.
"""
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanochat.checkpoint import find_step, fingerprint, load_meta, load_model
from nanochat.common import BadInput, Diverged, all_reduce
from nanochat.files import path_of
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder
from nanochat.optim import adamw
from nanochat.weights import copy_of, is_sharded, refresh


@dataclass(frozen=True)
class RoleSpec:
    """What a recipe says of a role.

    tag: the flag that names its SFT checkpoint, whose default is --model-tag with `ending` behind it; lr: the flag of
    its learning rate, by default --lr; trained: it has an optimizer; reference: its starting weights are kept, also
    without a KL term; shares: the role whose lowest layers can be its own too, as many as --verifier-shared-layers
    says.
    """
    tag: str = "--model-tag"
    ending: str = ""
    lr: str = "--lr"
    trained: bool = True
    reference: bool = False
    shares: str | None = None


def short_name(role: str) -> str:
    """A role's prefix in logs and the ending of its checkpoints: generator -> gen."""
    return role[:3]


def name_of(flag: str) -> str:
    """A flag's name among the parsed arguments: --verifier-lr -> verifier_lr."""
    return flag.removeprefix("--").replace("-", "_")


def trained_roles(specs: dict[str, RoleSpec]) -> list[str]:
    """The roles that have an optimizer, in the recipe's order; the steps of the first are what --num-steps counts."""
    return [name for name, spec in specs.items() if spec.trained]


@dataclass
class Role:
    """A role of a run. `parameters` are the ones its updates move: all of the model, or the private part of a shared
    trunk.

    reference: a frozen copy of the starting weights, or None. A role that is not trained has no optimizer, and weights
    of the activations' dtype. trunk_of: the role that owns its lowest `num_shared` layers.
    """
    name: str
    model: GPT | Decoder
    parameters: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer | None = None
    reference: GPT | Decoder | None = None
    lr: float = 0.0
    trunk_of: str | None = None
    num_shared: int = 0


def trainable_only(model: GPT | Decoder, parameters: list[torch.nn.Parameter]) -> None:
    """Makes exactly `parameters` require gradients among the model's: shared blocks cost no backward pass in a verifier
    phase."""
    chosen = {id(p) for p in parameters}
    for p in model.parameters():
        p.requires_grad_(id(p) in chosen)


def check_recompute(config, recompute: bool, name: str) -> None:
    """Raises BadInput for nanochat's own models, which keep their activations."""
    if recompute and isinstance(config, GPTConfig):
        raise BadInput(f"--recompute: the {name} is nanochat's own model; only imported ones can do that")


def set_recompute(model: GPT | Decoder, recompute: bool, name: str) -> None:
    """Makes a model's blocks run again in the backward pass, or not. Raises BadInput where they cannot."""
    check_recompute(model.config, recompute, name)
    for block in model.blocks:
        block.recompute = recompute


def shared_names(model: GPT, num_layers: int) -> list[str]:
    """Names of the parameters that `num_layers` shared layers share whole: embedding, smear, and blocks and value
    embeddings below."""
    names = ["transformer.wte.weight", "smear_gate.weight", "smear_lambda"] if num_layers else []
    for name, _ in model.named_parameters():
        part, _, rest = name.removeprefix("transformer.").partition(".")
        if part in ("h", "value_embeds") and int(rest.split(".")[0]) < num_layers:
            names.append(name)
    return names


def check_shapes(generator: GPTConfig, verifier: GPTConfig, num_layers: int) -> None:
    """Raises BadInput unless a verifier of this shape can share `num_layers` layers with the generator."""
    if num_layers and not (isinstance(generator, GPTConfig) and isinstance(verifier, GPTConfig)):
        raise BadInput(f"--verifier-shared-layers {num_layers}: only nanochat's own models share layers, not "
                       f"imported ones")
    if not 0 <= num_layers <= verifier.n_layer:
        raise BadInput(f"--verifier-shared-layers {num_layers}: the verifier has {verifier.n_layer} layers")
    if num_layers and generator != verifier:
        raise BadInput(f"--verifier-shared-layers {num_layers}: generator and verifier differ in shape: "
                       f"{generator} and {verifier}")


def share_layers(generator: GPT, verifier: GPT, num_layers: int) -> list[torch.nn.Parameter]:
    """Makes the verifier's lowest blocks, embedding and smear be the generator's; returns the verifier's private
    parameters.

    num_layers from 0 (nothing is shared) to n_layer (private: backout and LM head alone). The entries of resid_lambdas
    and x0_lambdas below num_layers follow the generator's (`copy_shared_lambdas`) and take no gradient. Raises BadInput
    when the shapes differ or num_layers is out of range.
    """
    check_shapes(generator.config, verifier.config, num_layers)
    names = shared_names(verifier, num_layers)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(verifier.get_submodule(owner), leaf, generator.get_parameter(name))
    copy_shared_lambdas(generator, verifier, num_layers)
    verifier.frozen_layers = num_layers
    shared = {id(generator.get_parameter(name)) for name in names}
    return [p for p in verifier.parameters() if id(p) not in shared]


@torch.no_grad()
def copy_shared_lambdas(generator: GPT, verifier: GPT, num_layers: int) -> None:
    """Brings the verifier's per-layer scalars of the shared layers to the generator's values."""
    for name in ("resid_lambdas", "x0_lambdas") if num_layers else ():
        verifier.get_parameter(name)[:num_layers] = generator.get_parameter(name)[:num_layers]


def check_shared(generator: GPT, verifier: GPT, num_layers: int, tag: str) -> None:
    """Raises BadInput unless the verifier's shared weights equal the generator's: it was trained on that trunk."""
    check_shapes(generator.config, verifier.config, num_layers)
    for name in shared_names(verifier, num_layers):
        if not torch.equal(generator.get_parameter(name), verifier.get_parameter(name)):
            raise BadInput(f"--verifier-shared-layers {num_layers}: {name} of verifier {tag} is not the generator's; "
                           f"train it with chat_sft --role verifier --verifier-shared-layers {num_layers}")


@dataclass(frozen=True)
class Start:
    """The SFT checkpoint that a role starts from, and the fingerprint of its weights (checkpoint.fingerprint)."""
    tag: str
    step: int
    fingerprint: int


def find_starts(args, specs: dict[str, RoleSpec], recorded: dict | None = None) -> dict[str, Start]:
    """Where each role starts from. recorded: as a run that is continued wrote it down; then those steps are taken.

    Raises BadInput for a checkpoint that is missing, or no longer what the run started from.
    """
    starts = {}
    for name, spec in specs.items():
        tag, step = getattr(args, name_of(spec.tag)), None if args.model_step < 0 else args.model_step
        if recorded:
            if name not in recorded:
                raise BadInput(f"the run's config.json does not say where its {name} started")
            step = recorded[name]["step"]
        step = find_step("sft", tag, step)
        starts[name] = Start(tag, step, fingerprint(path_of("sft", tag, f"model_{step:06d}.pt")))
        if recorded and starts[name].fingerprint != recorded[name]["fingerprint"]:
            raise BadInput(f"{path_of('sft', tag)}: step {step} is not what the run started from; its SFT was done "
                           f"again, so the run cannot go on with it as its reference")
    return starts


def load_configs(starts: dict[str, Start]) -> dict:
    """The shapes of the roles that load_roles would load. Raises BadInput."""
    return {name: load_meta(path_of("sft", start.tag, f"meta_{start.step:06d}.json"))[1]
            for name, start in starts.items()}


def check_configs(args, specs: dict[str, RoleSpec], configs: dict) -> None:
    """Raises BadInput for models that cannot do what the flags ask of them, before any is loaded."""
    for name, spec in specs.items():
        num_shared = args.verifier_shared_layers if spec.shares else 0
        check_recompute(configs[name], args.recompute and spec.trained, name)
        if num_shared and args.shard:
            raise BadInput(f"--verifier-shared-layers {num_shared}: cannot go with --shard")
        if num_shared and specs[spec.shares].trained and not spec.trained:
            raise BadInput(f"--verifier-shared-layers {num_shared}: this recipe keeps the {name} fixed, and shared "
                           f"layers move with the {spec.shares}")
        if spec.shares:
            check_shapes(configs[spec.shares], configs[name], num_shared)


def load_roles(args, specs: dict[str, RoleSpec], starts: dict[str, Start], device,
               dtype: torch.dtype) -> dict[str, Role]:
    """The roles of a run from their SFT checkpoints; those that are trained get an optimizer, and a reference where
    there is a KL term or the recipe asks for one.

    args: shard, recompute, kl_coef, the learning rates, and verifier_shared_layers where a role can share. Raises
    BadInput.
    """
    roles: dict[str, Role] = {}
    for name, spec in specs.items():
        start, num_shared = starts[name], args.verifier_shared_layers if spec.shares else 0
        sharded = args.shard and spec.trained
        # A trunk's owner and who shares it hold the same tensors, so both have the weights of a trained role.
        is_wide = spec.trained or any(other.shares == name and args.verifier_shared_layers for other in specs.values())
        model, _ = load_model("sft", start.tag, device, dtype, start.step, sharded, trained=is_wide)
        parameters = list(model.parameters())
        if spec.shares:
            check_shared(roles[spec.shares].model, model, num_shared, start.tag)
            parameters = share_layers(roles[spec.shares].model, model, num_shared)
        set_recompute(model, args.recompute and spec.trained, name)
        lr = getattr(args, name_of(spec.lr)) if spec.trained else 0.0
        optimizer = adamw(parameters, lr) if spec.trained else None
        has_reference = spec.reference or (spec.trained and args.kl_coef > 0)
        reference = copy_of(model, sharded=sharded) if has_reference else None
        refresh(model)
        roles[name] = Role(name, model, parameters, optimizer, reference, lr, spec.shares, num_shared)
    return roles


@torch.no_grad()
def check_same_weights(roles: dict[str, Role], step: int) -> None:
    """Raises Diverged on every rank where the ranks' weights of a role differ by a bit. A collective; nothing for
    sharded models, of which no rank has another's part."""
    for name, role in roles.items() if dist.is_initialized() else ():
        if is_sharded(role.model):
            continue
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = torch.stack([p.view(bits[p.element_size()]).sum(dtype=torch.int64) for p in role.model.parameters()])
        largest, least = all_reduce(torch.stack([sums, -sums]), "max") * torch.tensor([[1], [-1]], device=sums.device)
        for (parameter, _), differs in zip(role.model.named_parameters(), (largest != least).tolist(), strict=True):
            if differs:
                raise Diverged(f"step {step}: the weights of the {name} are no longer the same on all ranks "
                               f"({parameter}); go on from a checkpoint, and look for a rank whose hardware or "
                               f"libraries differ from the others'")
