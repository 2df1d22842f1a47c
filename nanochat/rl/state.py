"""
The state of a co-training run, and its complete set of checkpoints.
"""
import json
import os
import random
import re
from dataclasses import asdict, dataclass, field

import torch

from nanochat.checkpoint import load_file, load_optimizer, load_state, restore_model, save_model, save_optimizer, save_state, saved_steps
from nanochat.common import BadInput, all_reduce, check_unchanged, gather_lists, path_of, print0, rank_and_world
from nanochat.rl.rewards import ClassWeights
from nanochat.rl.schedules import PhaseLengths, next_phase
from nanochat.weights import refresh, whole_state

PREFIX = {"generator": "gen", "verifier": "ver"}
BALANCED_ACC_DECAY = 0.8
# Flags that may differ between a run and its continuation; any other would make it another run.
MAY_CHANGE = {"num_steps", "resume_from_step", "device_type", "save_every", "eval_every", "log_rollouts", "micro_batch_tokens", "lr", "verifier_lr",
              "prefix_sharing", "max_grad_norm", "recompute", "max_rows",
              "dry_run"}


@dataclass
class RunState:
    """Everything a step depends on besides weights, optimizers and flags. Sampling noise is a function of (seed, step): no generator
    state is needed for it, the global one is kept all the same.

    step counts all optimizer steps; cursor is the next problem of the rl split; sampled_tokens counts the tokens of all training rollouts of both
    roles; judged_pool holds [problem index, completion, outcome] of past solutions; fixed_solutions are the starting generator's, per test split;
    before is the evaluation at step 0, which took start_seconds; seconds is the time of all steps.
    """
    step: int = 0
    gen_step: int = 0
    ver_step: int = 0
    phase: str = "warmup"
    phase_steps: int = 0
    cursor: int = 0
    balanced_acc: float | None = None
    skipped_in_a_row: int = 0
    sampled_tokens: int = 0
    last_eval: int | None = None
    start_seconds: float = 0.0
    seconds: float = 0.0
    class_weights: ClassWeights = field(default_factory=ClassWeights)
    judged_pool: list = field(default_factory=list)
    fixed_solutions: dict = field(default_factory=dict)
    before: dict = field(default_factory=dict)

    def enter_phase(self, lengths: PhaseLengths, schedule) -> str:
        """Moves on to the next phase if the present one is over; the role that is trained now."""
        self.phase, self.phase_steps = next_phase(self.phase, self.phase_steps, self.balanced_acc, lengths, schedule)
        return "generator" if self.phase == "generator" else "verifier"

    def advance(self, role: str, num_problems: int, sampled_tokens: int, skipped: bool, seconds: float) -> None:
        """Counts a finished step."""
        self.seconds += seconds
        self.step += 1
        self.phase_steps += 1
        self.cursor += num_problems
        self.sampled_tokens += sampled_tokens
        self.gen_step += role == "generator"
        self.ver_step += role == "verifier"
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def observe_balanced_acc(self, value: float | None) -> None:
        """Moving average of the verifier's balanced accuracy on the solutions it is trained on."""
        if value is not None:
            old = self.balanced_acc
            self.balanced_acc = value if old is None else BALANCED_ACC_DECAY * old + (1 - BALANCED_ACC_DECAY) * value


def save_set(run, state: RunState, roles: dict, args) -> None:
    """Writes the complete set of this step, its state last, unless it is there already: rank 0, of sharded optimizers each rank its part."""
    is_new = run.rank == 0 and state.step not in saved_steps(run.name)
    if not all_reduce(torch.tensor(int(is_new), device=run.device), "max").item():
        return
    for name, role in roles.items():
        tag, weights = f"{run.name}-{PREFIX[name]}", whole_state(role.model, keep=run.rank == 0)
        if run.rank == 0:
            save_model("rl", tag, state.step, role.model, {"run": run.name, "role": name, "user_config": vars(args)}, weights)
        if role.optimizer is not None and (run.rank == 0 or args.shard):
            save_optimizer("rl", tag, state.step, role.optimizer, run.rank)
        del weights  # before the next role's are gathered
    all_reduce(torch.zeros(1, device=run.device))  # every rank has written its part
    if run.rank == 0:
        save_state(run.name, state.step, asdict(state) | {"torch_rng": torch.get_rng_state(), "roles": sorted(roles), "world": run.world})


def resolve_resume(args, defaults: dict) -> int | None:
    """The step that --resume-from-step means for --run: None for a fresh start. defaults: of flags, which a run may not have known.
    Raises BadInput for what cannot be continued."""
    folder, steps = path_of("runs", args.run), saved_steps(args.run)
    if args.resume_from_step == "-1":
        if os.path.exists(os.path.join(folder, "config.json")):
            raise BadInput(f"--run {args.run}: {folder} exists; take another name or continue it with --resume-from-step auto")
        return None
    if args.run == "dummy":
        raise BadInput(f"--resume-from-step {args.resume_from_step}: name the run to continue with --run (a dummy run's is dummy-<n>)")
    if args.resume_from_step != "auto" and not re.fullmatch("[0-9]+", args.resume_from_step):
        raise BadInput(f"--resume-from-step {args.resume_from_step}: must be -1 (off), auto or a step")
    if args.resume_from_step == "auto" and not steps:
        return None
    step = steps[-1] if args.resume_from_step == "auto" else int(args.resume_from_step)
    if step not in steps:
        raise BadInput(f"run {args.run} has no complete checkpoint of step {step}; there are: {', '.join(map(str, steps)) or 'none'}")
    with open(os.path.join(folder, "config.json")) as f:
        before = json.load(f)["args"]
    changed = check_unchanged(f"run {args.run}", before, args, MAY_CHANGE, defaults)
    print0(f"continuing run {args.run} behind step {step}" + (f" with {', '.join(changed)}" if changed else ""))
    return step


def drop_sets_behind(run, step: int) -> None:
    """Removes a run's checkpoints of later steps: a run that goes on from an earlier step writes another history. Rank 0.

    A set's state goes first, so that no half of a set is ever valid.
    """
    if run.rank != 0:
        return
    folders = [path_of("runs", run.name), *(path_of("rl", f"{run.name}-{prefix}") for prefix in PREFIX.values())]
    for folder in folders:
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            match = re.fullmatch(r"(state|model|meta|optim)_(\d+)(_rank\d+)?\.(pt|json)", name)
            if match and int(match[2]) > step:
                print0(f"removing {os.path.join(folder, name)}: the run goes on from step {step}")
                os.remove(os.path.join(folder, name))


def load_set(run_name: str, step: int, roles: dict, device, sharded: bool) -> RunState:
    """Restores both roles and the state of a step, bit for bit. Raises BadInput for anything that is missing."""
    saved = load_state(run_name, step)
    rank, world = rank_and_world()
    if saved.pop("roles") != sorted(roles):
        raise BadInput(f"run {run_name} was saved with other roles than {', '.join(sorted(roles))}")
    saved_world = saved.pop("world", world)
    if sharded and saved_world != world:
        raise BadInput(f"run {run_name} has optimizers sharded over {saved_world} ranks and can be continued by as many, not by {world}")
    torch.set_rng_state(saved.pop("torch_rng"))
    for name, role in roles.items():
        tag = f"{run_name}-{PREFIX[name]}"
        path = path_of("rl", tag, f"model_{step:06d}.pt")
        restore_model(role.model, load_file(path, mmap=True), path)
        refresh(role.model)
        if role.optimizer is not None:
            load_optimizer("rl", tag, step, role.optimizer, rank if sharded else 0)
    return RunState(**{**saved, "class_weights": ClassWeights(**saved["class_weights"])})


def gather_judgeable(entries: list, device) -> list:
    """The entries of all ranks that have an outcome, in the order of their problems: the same however many ranks there are."""
    return sorted((entry for entry in gather_lists(entries, device) if entry[2] is not None), key=lambda entry: entry[0])


def choose_judged(fresh: list, pool: list, num: int, replay: float, balance: bool, rng: random.Random) -> list:
    """Which solutions a verifier step judges: `num` entries [problem index, completion, outcome].

    A share `replay` comes from the pool of past solutions, the rest is fresh. With balance, half are right and half wrong as far as fresh and
    pool have them. Without either this is the first `num` fresh ones (Tango algorithm 1).
    """
    num_replayed = min(round(replay * num), len(pool))
    past = rng.sample(pool, len(pool)) if num_replayed or balance else []
    if not balance:
        return fresh[: num - num_replayed] + past[:num_replayed]
    first, rest = fresh[: num - num_replayed] + past[:num_replayed], past[num_replayed:] + fresh[num - num_replayed:]
    half = {True: num // 2, False: num - num // 2}
    chosen, left_over = [], []
    for entry in first + rest:
        if half[entry[2]] > 0:
            half[entry[2]] -= 1
            chosen.append(entry)
        else:
            left_over.append(entry)
    return chosen + left_over[: num - len(chosen)]
