"""
The state of a co-training run, and its complete set of checkpoints.
"""
import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch

from nanochat.checkpoint import (begin_set, checksum, drop_old_sets, load_file, load_meta, load_optimizer, load_state,
                                 restore_model, save_model, save_optimizer, save_state, saved_steps, spared_steps,
                                 weights_in)
from nanochat.common import BadInput, all_reduce, print0, rank_and_world
from nanochat.rl.learn.roles import short_name
from nanochat.storage.files import path_of
from nanochat.weights import check_weights, local_optimizer_state, refresh, whole_state



@dataclass
class RunState:
    """Everything a step depends on besides weights, optimizers and flags. Sampling noise is a function of (seed, step):
    no generator state is needed for it, the global one is kept all the same."""
    step: int = 0  # how often the recipe's `play` was run
    role_steps: dict[str, int] = field(default_factory=dict)        # updates of each role
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)  # of these the last ones that were not finite
    apart_in_a_row: dict[str, int] = field(default_factory=dict)    # and those of progress.LARGEST_GAP
    cursor: int = 0                # the next problem of the rl split
    sampled_tokens: int = 0
    last_eval: int | None = None
    start_seconds: float = 0.0     # of the evaluation at step 0, `before`
    step_seconds: float = 0.0      # of all steps
    eval_seconds: float = 0.0      # of the evaluations between them
    memory: dict = field(default_factory=dict)  # the recipe's
    before: dict = field(default_factory=dict)

    def snapshot(self) -> "RunState":
        """A copy that shares nothing with it."""
        return copy.deepcopy(self)

    def restore(self, other: "RunState") -> None:
        """Takes over all values of another state."""
        for f in fields(self):
            setattr(self, f.name, getattr(other, f.name))


def check_memory(value, where: str = "memory") -> None:
    """Raises BadInput for what a recipe keeps in its memory and a saved run could not give back as it is."""
    if type(value) is dict:
        for name, inner in value.items():
            check_memory(name, f"{where}: key {name!r}")
            check_memory(inner, f"{where}[{name!r}]")
    elif type(value) in (list, tuple):
        for i, inner in enumerate(value):
            check_memory(inner, f"{where}[{i}]")
    elif type(value) is torch.Tensor:
        if value.device.type != "cpu" or value.requires_grad:
            raise BadInput(f"{where} is a tensor on {value.device}{' with a gradient' * value.requires_grad}: keep "
                           f"it on the CPU, where it comes back to, and detached")
    elif type(value) not in (type(None), bool, int, float, str):
        raise BadInput(f"{where} is a {type(value).__name__}: a run's memory holds plain values and tensors")


def tag_of(run_name: str, role: str) -> str:
    """The tag of a role's checkpoints."""
    return f"{run_name}-{short_name(role)}"


def save_set(run, state: RunState, roles: dict, args) -> None:
    """Copies the set of this step to the host, unless it is there already, and has it written in the background: rank
    0, of sharded optimizers each rank its part. Then sets older than the last --keep are removed. A collective."""
    with run.writer.saving():  # which waits for the set before
        is_new = run.rank == 0 and state.step not in saved_steps(run.name)
        if not all_reduce(torch.tensor(int(is_new), device=run.device), "max").item():
            return
        for name, role in roles.items():
            check_weights(role.model, name)
        to_host, rank, step, held = run.writer.to_host, run.rank, state.step, []
        for name, role in roles.items():
            weights, is_mine = weights_to_save(role, rank == 0, to_host), rank == 0 or args.shard
            moments = local_optimizer_state(role.optimizer, to_host) if role.optimizer and is_mine else None
            held.append((name, role, weights, moments))
        meta = {"run": run.name, "user_config": dict(vars(args)), "tokenizer": run.tokenizer, "commit": run.commit}
        copied = state.snapshot()
        # not asdict: it would make two of what stands in the memory twice
        saved = {f.name: getattr(copied, f.name) for f in fields(state)}
        saved |= {"torch_rng": torch.get_rng_state(), "roles": sorted(roles), "world": run.world}

        def write() -> list:
            """This rank's files. -> (name in the set, checksum) of each"""
            written = []
            if rank == 0:
                begin_set(run.name, step)
            for name, role, weights, moments in held:
                tag = tag_of(run.name, name)
                if rank == 0:
                    own = meta | {"role": name, "history": role.history}
                    written.append((name, save_model("rl", tag, step, role.model, own, weights)))
                if moments is not None:
                    written.append((name, save_optimizer("rl", tag, step, moments, rank)))
            return [[name_in_set(role, path), checksum(path)] for role, path in written]

        def mark(checksums: list) -> None:
            if rank == 0:
                save_state(run.name, step, saved | {"checksums": dict(checksums)})
                tags = [tag_of(run.name, name) for name in roles]
                drop_old_sets(run, path_of("runs", run.name, "state_{}.pt"), [path_of("rl", tag) for tag in tags],
                              args.keep, step, spared_steps(run, args.resume_from_step, "rl", tags))
        run.writer.start(write, mark)


def weights_to_save(role, keep: bool, to_host: Callable = torch.Tensor.cpu) -> dict[str, torch.Tensor]:
    """The whole state dict of a role (weights.whole_state). One that is not trained may have narrower weights than the
    checkpoint that it started from; where it still is that, its tensors are taken, so that nothing is lost."""
    state = whole_state(role.model, keep, to_host)
    if role.optimizer is not None or not keep or not os.path.exists(role.start.path("model.pt")):
        return state
    start = weights_in(role.start.path("model.pt"), role.model.config)
    is_wider = any(start[name].element_size() > p.element_size() for name, p in state.items())
    is_start = is_wider and all(torch.equal(p.cpu(), start[name].to(p.dtype)) for name, p in state.items())
    return start if is_start else state


def name_in_set(role: str, path: str) -> str:
    """What a role's file is called among the checksums of a set, whatever the run's name."""
    return f"{role}/{os.path.basename(path)}"


def check_checksum(checksums: dict[str, int] | None, role: str, path: str) -> None:
    """Raises BadInput unless a file was saved with the run's state. checksums: None of older runs."""
    if checksums is not None and checksum(path) != checksums.get(name_in_set(role, path)):
        raise BadInput(f"{path} is not the file that was saved with the run's state of this step")


def load_set(run_name: str, step: int, roles: dict, device, sharded: bool) -> RunState:
    """Restores all roles and the state of a step, bit for bit. Raises BadInput for anything that is missing."""
    saved = load_state(run_name, step)
    rank, world = rank_and_world()
    if not isinstance(saved, dict) or "memory" not in saved:
        raise BadInput(f"run {run_name} was made before recipes were files, or its state of step {step} is of another "
                       f"kind; continue it with the version that made it")
    if saved.pop("roles", None) != sorted(roles):
        raise BadInput(f"run {run_name} was saved with other roles than {', '.join(sorted(roles))}")
    saved_world, checksums = saved.pop("world", None), saved.pop("checksums", None)
    if sharded and saved_world != world:
        raise BadInput(f"run {run_name} has optimizers sharded over {saved_world} ranks and can be continued by as "
                       f"many, not by {world}")
    try:
        torch.set_rng_state(saved.pop("torch_rng"))
        state = RunState(**saved)
    except (KeyError, TypeError, RuntimeError) as error:
        raise BadInput(f"run {run_name}: its state of step {step} is of another version: {error}") from None
    if checksums is None:
        print0(f"run {run_name} was saved without checksums: nothing tells whether its files belong together")
    for name, role in roles.items():
        tag = tag_of(run_name, name)
        path = path_of("rl", tag, f"meta_{step:06d}.json")
        meta, config = load_meta(path)
        if (config, meta["step"], meta.get("role", name)) != (role.model.config, step, name):
            raise BadInput(f"{path}: is of step {meta['step']} of a {meta.get('role', name)} of {config}, and this "
                           f"is step {step} of the {name} of {role.model.config}")
        path = path_of("rl", tag, f"model_{step:06d}.pt")
        restore_model(role.model, load_file(path, mmap=True), path)
        check_checksum(checksums, name, path)
        refresh(role.model)
        if role.optimizer is not None:
            path = load_optimizer("rl", tag, step, role.optimizer, rank if sharded else 0)
            check_checksum(checksums, name, path)
    return state


def drop_sets_after(run, step: int, roles: dict) -> None:
    """Removes a run's checkpoints of later steps: a run that goes on from an earlier step writes another history. Rank
    0. A set's state goes first, so that no half of a set is ever valid."""
    if run.rank != 0:
        return
    for folder in [path_of("runs", run.name), *(path_of("rl", tag_of(run.name, role)) for role in roles)]:
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            match = re.fullmatch(r"(state|model|meta|optim|begun)_(\d+)(_rank\d+)?(\.pt|\.json|)", name)
            if match and int(match[2]) > step:
                print0(f"removing {os.path.join(folder, name)}: the run goes on from step {step}")
                os.remove(os.path.join(folder, name))
