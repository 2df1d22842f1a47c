"""
A role: a policy with its reference, its optimizer and which of its weights it trains.
"""
from dataclasses import dataclass

import torch

from nanochat.checkpoint import find_step, load_meta, load_model
from nanochat.common import BadInput, path_of
from nanochat.gpt import GPT
from nanochat.hf.decoder import Decoder
from nanochat.optim import adamw
from nanochat.weights import copy_of, refresh


@dataclass
class Role:
    """generator or verifier. `parameters` are the ones its updates move: all of the model, or the private part of a shared trunk.

    reference: a frozen copy of the starting weights, None when no KL is asked for. A frozen role has no optimizer.
    """
    name: str
    model: GPT | Decoder
    parameters: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer | None = None
    reference: GPT | Decoder | None = None


def trainable_only(model: GPT | Decoder, parameters: list[torch.nn.Parameter]) -> None:
    """Makes exactly `parameters` require gradients among the model's: shared blocks cost no backward pass in a verifier phase."""
    chosen = {id(p) for p in parameters}
    for p in model.parameters():
        p.requires_grad_(id(p) in chosen)


def set_recompute(model: GPT | Decoder, recompute: bool, name: str) -> None:
    """Makes a model's blocks run again in the backward pass, or not. Raises BadInput for nanochat's own models, which keep their activations."""
    if recompute and not isinstance(model, Decoder):
        raise BadInput(f"--recompute: the {name} is nanochat's own model; only imported ones can do that")
    for block in model.blocks:
        block.recompute = recompute


def shared_names(model: GPT, num_layers: int) -> list[str]:
    """Names of the parameters that `num_layers` shared layers share whole: embedding, smear, and blocks and value embeddings below."""
    names = ["transformer.wte.weight", "smear_gate.weight", "smear_lambda"] if num_layers else []
    for name, _ in model.named_parameters():
        part, _, rest = name.removeprefix("transformer.").partition(".")
        if part in ("h", "value_embeds") and int(rest.split(".")[0]) < num_layers:
            names.append(name)
    return names


def check_shapes(generator: GPT, verifier: GPT, num_layers: int) -> None:
    """Raises BadInput unless the verifier can share `num_layers` layers with the generator."""
    if num_layers and not (isinstance(generator, GPT) and isinstance(verifier, GPT)):
        raise BadInput(f"--verifier-shared-layers {num_layers}: only nanochat's own models share layers, not imported ones")
    if not 0 <= num_layers <= verifier.config.n_layer:
        raise BadInput(f"--verifier-shared-layers {num_layers}: the verifier has {verifier.config.n_layer} layers")
    if num_layers and generator.config != verifier.config:
        raise BadInput(f"--verifier-shared-layers {num_layers}: generator and verifier differ in shape: {generator.config} and {verifier.config}")


def share_layers(generator: GPT, verifier: GPT, num_layers: int) -> list[torch.nn.Parameter]:
    """Makes the verifier's lowest blocks, embedding and smear be the generator's; returns the verifier's private parameters.

    num_layers from 0 (nothing is shared) to n_layer (private: backout and LM head alone). The entries of resid_lambdas and x0_lambdas
    below num_layers follow the generator's (`copy_shared_lambdas`) and take no gradient. Raises BadInput when the shapes differ or num_layers is out of range.
    """
    check_shapes(generator, verifier, num_layers)
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
    check_shapes(generator, verifier, num_layers)
    for name in shared_names(verifier, num_layers):
        if not torch.equal(generator.get_parameter(name), verifier.get_parameter(name)):
            raise BadInput(f"--verifier-shared-layers {num_layers}: {name} of verifier {tag} is not the generator's; "
                           f"train it with chat_sft --role verifier --verifier-shared-layers {num_layers}")


def load_configs(args, needs_verifier: bool) -> dict:
    """The shapes of the roles that load_roles would load. Raises BadInput."""
    tags = {"generator": args.model_tag} | ({"verifier": args.verifier_tag} if needs_verifier else {})
    steps = {name: find_step("sft", tag, None if args.model_step < 0 else args.model_step) for name, tag in tags.items()}
    return {name: load_meta(path_of("sft", tag, f"meta_{steps[name]:06d}.json"))[1] for name, tag in tags.items()}


def load_roles(args, trained: set[str], needs_verifier: bool, device, dtype: torch.dtype) -> dict[str, Role]:
    """The roles of a run from their SFT checkpoints; those in `trained` get an optimizer, and a reference when there is a KL term.

    args: model_tag, verifier_tag, model_step (-1 = the last), verifier_shared_layers, shard, recompute, lr, verifier_lr, kl_coef. Raises BadInput.
    """
    step = None if args.model_step < 0 else args.model_step
    if args.verifier_shared_layers and args.shard:
        raise BadInput(f"--verifier-shared-layers {args.verifier_shared_layers}: cannot go with --shard")
    generator, _ = load_model("sft", args.model_tag, device, dtype, step, args.shard)
    models = {"generator": (generator, list(generator.parameters()), args.lr)}
    if needs_verifier and args.verifier_shared_layers and "generator" in trained and "verifier" not in trained:
        raise BadInput(f"--verifier-shared-layers {args.verifier_shared_layers}: this recipe keeps the verifier fixed, and shared layers move with "
                       f"the generator")
    if needs_verifier:
        verifier, _ = load_model("sft", args.verifier_tag, device, dtype, step, args.shard)
        check_shared(generator, verifier, args.verifier_shared_layers, args.verifier_tag)
        private = share_layers(generator, verifier, args.verifier_shared_layers)
        models["verifier"] = (verifier, private, args.verifier_lr)
    roles = {}
    for name, (model, parameters, lr) in models.items():
        set_recompute(model, args.recompute, name)
        optimizer = adamw(parameters, lr) if name in trained else None
        reference = copy_of(model, sharded=args.shard) if optimizer and args.kl_coef > 0 else None
        refresh(model)
        roles[name] = Role(name, model, parameters, optimizer, reference)
    return roles
