"""
Where a model's weights live: allocated without being initialised, sharded over ranks (PyTorch's FSDP2), copied whole to
sample from, gathered for checkpoints.

A sharded model keeps 1/world of each parameter, its gradient and its optimizer state; a block's weights are gathered
while it runs. Everything that gathers is a collective: all ranks must call it at the same point.
"""
from collections.abc import Callable

import torch
import torch.distributed as dist

from nanochat.common import Diverged, all_reduce


def allocate(kind, config, compute_dtype: torch.dtype, device, dtype: torch.dtype = torch.float32,
             sharded: bool = False):
    """A model of class `kind` with parameters of `dtype` that hold nothing yet; sharded: this rank's part alone."""
    with torch.device("meta"):
        model = kind(config, compute_dtype).to(dtype)
    if sharded:
        shard(model, torch.device(device).type)
    model.to_empty(device=device)
    if getattr(config, "tied", False):
        model.tie()
    return model


def shard(model, device_type: str) -> None:
    """Makes FSDP2 shard a model's parameters over all ranks, block by block, in place. Gradients are summed, as
    optim.all_reduce_gradients does for models that are not sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    narrow = model.compute_dtype if model.compute_dtype != model.lm_head.weight.dtype else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow and torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    for method in ("trunk", "trunk_after"):
        register_fsdp_forward_method(model, method)


def is_sharded(x) -> bool:
    """Whether a model or parameter is sharded, by FSDP2's methods: importing its classes takes a second."""
    return hasattr(x, "reshard") or hasattr(x, "full_tensor")


@torch.no_grad()
def inference_model(model):
    """The model to sample from: itself, or where its weights are sharded or wider than its activations, a whole copy
    with weights of the dtype of products.

    The copy stays with the model. Each call gives it the model's weights anew: nobody has to say, and nothing has to
    notice, that they have changed. That reads the weights once, as a decoded token does. A sharded model's copy takes
    all ranks, so it has the weights of the last `refresh`.
    """
    if is_sharded(model):
        assert "inference_copy" in model.__dict__, "refresh makes it"
        return model.__dict__["inference_copy"]
    if model.lm_head.weight.dtype in (model.compute_dtype, model.activation_dtype):
        return model
    return renewed_copy(model)


def refresh(model) -> None:
    """Renews the copy that a sharded model is sampled from, after each change of its weights. A collective."""
    if is_sharded(model):
        renewed_copy(model)


def renewed_copy(model):
    """The copy to sample from, with the model's weights as they are now. A collective for a sharded model."""
    if "inference_copy" in model.__dict__:  # not a submodule: state_dict does not see it
        copy_weights(model.__dict__["inference_copy"], model)
    else:
        copied = model.__dict__["inference_copy"] = copy_of(model)
        if copied.lm_head.weight.is_cuda and hasattr(copied, "join_weights"):
            copied.join_weights()
    return model.__dict__["inference_copy"]


def copy_of(model, sharded: bool = False):
    """A copy that is not trained, with weights of the dtype of products: what a forward of `model` casts them to. A
    collective for a sharded model, unless the copy is sharded too."""
    # FSDP2 puts a class of its own before the model's
    kind = type(model).__bases__[-1] if is_sharded(model) else type(model)
    device = model.lm_head.weight.device
    copied = allocate(kind, model.config, model.compute_dtype, device, model.compute_dtype,
                      sharded).requires_grad_(False)
    copy_weights(copied, model)
    return copied


@torch.no_grad()
def copy_weights(copied, model) -> None:
    """Gives a copy the model's weights. A collective where only the model is sharded."""
    free_gathered(model)
    for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        if is_sharded(ours):
            ours.to_local().copy_(theirs.to_local())
        else:
            ours.copy_(theirs.to(ours.dtype).full_tensor() if is_sharded(theirs) else theirs)


def free_gathered(model) -> None:
    """Gives back what a forward without a backward leaves gathered: the weights outside of the blocks."""
    if is_sharded(model):
        model.reshard()


@torch.no_grad()
def whole_state(model, keep: bool = True, to_host: Callable = torch.Tensor.cpu) -> dict[str, torch.Tensor]:
    """The state dict of a model with whole tensors on the host, empty on ranks that do not keep it; of a sharded model
    a collective. A tied weight is gathered, and copied, once: both of its names have one tensor. to_host: what makes a
    tensor one of the host's."""
    free_gathered(model)
    once, state = {}, {}
    for name, p in model.state_dict(keep_vars=True).items():
        if id(p) not in once:
            whole = p.full_tensor() if is_sharded(p) else p.detach()
            once[id(p)] = to_host(whole) if keep else None
        if keep:
            state[name] = once[id(p)]
    return state


@torch.no_grad()
def fill(model, state: dict[str, torch.Tensor]) -> None:
    """Gives a model's parameters the values of whole tensors of these names; of a sharded one, each rank its part."""
    free_gathered(model)
    for name, p in model.named_parameters():
        if is_sharded(p):
            p.to_local().copy_(part_of(state[name], p))
        else:
            p.copy_(state[name])


def part_of(whole: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a whole tensor, cut as FSDP2 cuts a parameter."""
    parts, rank = whole.chunk(p.device_mesh.size(), dim=0), p.device_mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else whole[:0]


def local_optimizer_state(optimizer, to_host: Callable = torch.Tensor.cpu) -> dict:
    """An optimizer's state dict on the host, with this rank's part of what is sharded. to_host: as in whole_state."""
    saved = optimizer.state_dict()
    local = lambda x: to_host(x.to_local() if is_sharded(x) else x) if isinstance(x, torch.Tensor) else x
    return {"state": {i: {key: local(x) for key, x in entry.items()} for i, entry in saved["state"].items()},
            "param_groups": [dict(group) for group in saved["param_groups"]]}


def with_shards(saved: dict, optimizer) -> dict:
    """The inverse of local_optimizer_state. Raises ValueError when a part is not of the shape of this rank's."""
    if not any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        return saved
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return saved | {"state": {i: {key: as_part_of(parameters[i], x) for key, x in entry.items()}
                              for i, entry in saved["state"].items()}}


def as_part_of(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x as this rank's part of a tensor that is sharded as p is; x itself where p is whole, or x a counter."""
    if not is_sharded(p) or not x.dim():
        return x
    if x.shape != p.to_local().shape:
        raise ValueError("it was saved by another number of ranks, or for another model")
    from torch.distributed.tensor import DTensor
    return DTensor.from_local(x.to(p.device), p.device_mesh, p.placements, run_check=False, shape=p.shape,
                              stride=p.stride())


@torch.no_grad()
def not_finite(model) -> str | None:
    """The name of the first parameter, in this rank's part, that holds a number that is not finite; or None."""
    for name, p in model.named_parameters():
        part = p.to_local() if is_sharded(p) else p
        if part.numel() and not torch.stack(part.aminmax()).isfinite().all():  # both are NaN where any number is
            return name
    return None


def check_weights(model, name: str) -> None:
    """Raises Diverged on all ranks where a model has weights that are not finite on any. A collective."""
    found = not_finite(model)
    flag = torch.tensor(int(found is not None), device=model.lm_head.weight.device)
    if all_reduce(flag, "max").item():
        raise Diverged(f"the {name} has weights that are not finite ({found or 'on another rank'}); they are not "
                       f"saved: lower its learning rate, and go on from an earlier checkpoint")
