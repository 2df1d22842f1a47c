"""
A role: a policy with its reference, its optimizer and which of its weights it trains.
"""
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nanochat.checkpoint import check_tokenizer, find_step, fingerprint, history_of, load_meta, load_model
from nanochat.common import BadInput, Diverged, all_reduce
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder
from nanochat.optim import adamw
from nanochat.rl.learn.heads import HEADS, Head, alias_layers, check_shapes, check_shared, num_shared, share_layers
from nanochat.storage.files import found_at
from nanochat.weights import copy_of, inference_model, is_sharded, refresh


@dataclass(frozen=True)
class RoleSpec:
    """What a recipe says of a role."""
    tag: str = "--model-tag"  # the flag that names its starting checkpoint; default: --model-tag with `ending` after it
    ending: str = ""
    lr: str = "--lr"          # the flag of its learning rate; default: --lr
    trained: bool = True      # it has an optimizer
    reference: bool = False   # its starting weights are kept, also without a KL term
    shares: str | None = None  # the role whose weights can be its own too, as --verifier-head says

    @property
    def source(self) -> str:
        """The flag that says of which stage its starting checkpoint is: --verifier-source of --verifier-tag."""
        return f"{self.tag.removesuffix('-tag')}-source"


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
    """A role of a run. One that is not trained has no optimizer, and weights of the activations' dtype."""
    name: str
    model: GPT | Decoder
    parameters: list[torch.nn.Parameter]  # that its updates move: all, or the private part of a shared trunk
    optimizer: torch.optim.Optimizer | None = None
    reference: GPT | Decoder | None = None  # a frozen copy of the starting weights
    lr: float = 0.0
    trunk_of: str | None = None             # the role that owns its lowest `num_shared` layers, or all of it
    num_shared: int = 0
    start: "Start | None" = None            # the checkpoint that it started from
    history: list = field(default_factory=list)  # how that came about (checkpoint.history_of)


def trainable_only(model: GPT | Decoder, parameters: list[torch.nn.Parameter]) -> None:
    """Makes exactly `parameters` require gradients: shared blocks cost no backward pass in a verifier's phase."""
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


@dataclass(frozen=True)
class Start:
    """The checkpoint that a role starts from."""
    tag: str
    step: int
    fingerprint: int     # of its weights (checkpoint.fingerprint)
    source: str = "sft"  # its stage: sft or rl

    def path(self, part: str) -> str:
        """Of its "meta.json" or "model.pt"."""
        name, _, ending = part.partition(".")
        return found_at(self.source, self.tag, f"{name}_{self.step:06d}.{ending}")


def find_starts(args, specs: dict[str, RoleSpec], recorded: dict | None = None) -> dict[str, Start]:
    """Where each role starts from. recorded: as a continued run wrote it down, whose steps are taken. Raises BadInput
    for a checkpoint that is missing, or no longer what the run started from."""
    starts = {}
    for name, spec in specs.items():
        tag, source = getattr(args, name_of(spec.tag)), getattr(args, name_of(spec.source))
        step = None if args.model_step < 0 else args.model_step
        if recorded:
            if name not in recorded:
                raise BadInput(f"the run's config.json does not say where its {name} started")
            step = recorded[name]["step"]
        step = find_step(source, tag, step)
        starts[name] = Start(tag, step, fingerprint(found_at(source, tag, f"model_{step:06d}.pt")), source)
        if recorded and starts[name].fingerprint != recorded[name]["fingerprint"]:
            raise BadInput(f"{found_at(source, tag)}: step {step} is not what the run started from; its "
                           f"{source.upper()} was done again, so the run cannot go on with it as its reference")
    return starts


def load_configs(starts: dict[str, Start]) -> dict:
    """The shapes of the roles that load_roles would load. Raises BadInput."""
    configs = {}
    for name, start in starts.items():
        path = start.path("meta.json")
        meta, configs[name] = load_meta(path)
        check_tokenizer(meta, path)
    return configs


def head_of(args, spec: RoleSpec) -> Head:
    """What a role shares with another: nothing, unless its recipe lets it."""
    return HEADS[args.verifier_head if spec.shares else "own"]


def check_configs(args, specs: dict[str, RoleSpec], configs: dict) -> None:
    """Raises BadInput for models that cannot do what the flags ask of them, before any is loaded."""
    for name, spec in specs.items():
        head = head_of(args, spec)
        check_recompute(configs[name], args.recompute and spec.trained, name)
        if not head.shares:
            continue
        asked, owner = f"--verifier-head {args.verifier_head}", spec.shares
        if args.shard and not head.is_one:
            raise BadInput(f"{asked}: cannot go with --shard; --verifier-head prompt can")
        if specs[owner].trained and not spec.trained or head.is_joint and spec.trained and not specs[owner].trained:
            fixed, moving = (owner, name) if spec.trained else (name, owner)
            raise BadInput(f"{asked}: this recipe keeps the {fixed} fixed, and what they share moves with the {moving}")
        said = [(getattr(args, name_of(s.source)), getattr(args, name_of(s.tag))) for s in (specs[owner], spec)]
        if head.is_one and said[0] != said[1]:
            raise BadInput(f"{asked}: one model has one checkpoint, and {specs[owner].tag} {said[0][1]} and {spec.tag} "
                           f"{said[1][1]} are two (of {said[0][0]} and {said[1][0]})")
        check_shapes(configs[owner], configs[name], num_shared(args, configs[name]))


def needed(specs: dict[str, RoleSpec], draws: dict) -> dict[str, RoleSpec]:
    """The roles that learn or that a draw of the recipe names: others are not loaded."""
    asked = {draw.role for draw in draws.values()}
    return {name: spec for name, spec in specs.items() if spec.trained or name in asked}


def load_roles(args, specs: dict[str, RoleSpec], starts: dict[str, Start], device,
               dtype: torch.dtype) -> dict[str, Role]:
    """The roles of a run from their starting checkpoints; those that are trained get an optimizer, and a reference
    where there is a KL term or the recipe asks for one. Raises BadInput."""
    roles: dict[str, Role] = {}
    for name, spec in specs.items():
        start, head, owner = starts[name], head_of(args, spec), roles.get(spec.shares)
        sharded, num_layers = args.shard and spec.trained, 0
        if head.is_one:
            model, history = owner.model, owner.history
        else:
            # A trunk's owner and who shares it hold the same tensors, so both have the weights of a trained role.
            is_wide = spec.trained or any(other.shares == name and head_of(args, other).shares
                                          for other in specs.values())
            model, meta = load_model(start.source, start.tag, device, dtype, start.step, sharded, trained=is_wide)
            history = history_of(start.source, start.tag, meta)
        parameters = private = list(model.parameters())
        if head.shares and not head.is_one:
            num_layers = num_shared(args, model.config)
            check_shared(owner.model, model, num_layers, start.tag)
            private = share_layers(owner.model, model, num_layers)
            parameters = list(model.parameters()) if head.trains else private
        set_recompute(model, args.recompute and (spec.trained or head.is_one), name)
        lr = getattr(args, name_of(spec.lr)) if spec.trained else 0.0
        optimizer = adamw(parameters, lr) if spec.trained else None
        if spec.trained and head.is_joint and args.verifier_optimizer == "shared":
            optimizer = owner.optimizer
            if not head.is_one:
                optimizer.add_param_group({"params": private})
        has_reference = spec.reference or (spec.trained and args.kl_coef > 0)
        reference = owner.reference if head.is_one else copy_of(model, sharded=sharded) if has_reference else None
        refresh(model)
        roles[name] = Role(name, model, parameters, optimizer, reference, lr, spec.shares, num_layers, start, history)
        if num_layers:
            share_copies(owner, roles[name])
    return roles


def share_copies(owner: Role, role: Role) -> None:
    """Makes references, and the copies that are sampled from, share what their models do."""
    if owner.reference and role.reference:
        alias_layers(owner.reference, role.reference, role.num_shared)
    copies = inference_model(owner.model), inference_model(role.model)
    if copies[1] is not role.model:
        alias_layers(*copies, role.num_shared)


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
                               f"({parameter}); go on from a checkpoint, and look for a rank that differs")
