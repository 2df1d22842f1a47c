"""
What the loop makes of an Update that a recipe yields: it is checked, and applied in one optimizer step, or in several.
"""
import json
import math
import time
from dataclasses import replace

import torch

from nanochat.common import BadInput
from nanochat.kernels.losses import KL_ESTIMATORS, POLICY_LOSSES, PolicyLoss
from nanochat.rl.credit.aggregation import AGGREGATIONS
from nanochat.rl.credit.schedules import LR_SCHEDULES
from nanochat.rl.learn.heads import copy_shared_lambdas
from nanochat.rl.learn.packing import batch_sizes
from nanochat.rl.learn.roles import Role
from nanochat.rl.learn.trainer import GAPS, score, update
from nanochat.rl.play.play import Play, Update, ids_of
from nanochat.rl.records.rollouts import Rollouts


def check_column(name: str, values, num: int) -> None:
    """Raises BadInput where a column of rollouts cannot be logged: one value of json for each of `num`."""
    try:
        if not isinstance(name, str):
            raise TypeError(f"its name is a {type(name).__name__}")
        if not isinstance(values, list | tuple) or len(values) != num:
            raise TypeError(f"it is a {type(values).__name__} of {len(values)}")
        json.dumps(values)
    except (RecursionError, TypeError, ValueError) as error:
        raise BadInput(f"column {name!r} of {num} rollouts must be a list with one value for each, of numbers, text, "
                       f"True, False, None or lists of these: {error}") from None


def check_loss(role: str, loss: PolicyLoss, has_reference: bool) -> None:
    """Raises BadInput where a role cannot learn from a loss."""
    if not isinstance(loss, PolicyLoss):
        raise BadInput(f"the loss of an Update of {role} is a {type(loss).__name__}, not a PolicyLoss")
    for word, table in ((loss.name, POLICY_LOSSES), (loss.kl, KL_ESTIMATORS)):
        if word not in table:
            raise BadInput(f"the loss of an Update of {role} names {word!r}; there are {', '.join(table)}")
    numbers = loss.clip_low, loss.clip_high, loss.dual_clip or 0.0, loss.kl_coef, loss.entropy_coef
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise BadInput(f"the loss of an Update of {role} has what is no number: {loss}")
    if loss.kl_coef and not has_reference:
        raise BadInput(f"the loss of an Update of {role} has a KL to its start, which is not kept: give the role's "
                       f"RoleSpec reference=True")


def check_update(t: Play, wanted: Update) -> None:
    """Raises BadInput for what a recipe yields and no step can be made of."""
    if not isinstance(wanted, Update):
        raise BadInput(f"play yields a {type(wanted).__name__}, not an Update")
    if wanted.role not in t.roles or t.roles[wanted.role].optimizer is None:
        trained = ", ".join(name for name, role in t.roles.items() if role.optimizer is not None)
        raise BadInput(f"play yields an Update of {wanted.role!r}; the roles that are trained are {trained}")
    if not isinstance(wanted.parts, list) or not wanted.parts:
        raise BadInput(f"the parts of an Update of {wanted.role} must be a list of (rollouts, advantages)")
    for part in wanted.parts:
        rollouts, advantages = part if isinstance(part, tuple) and len(part) == 2 else (None, None)
        if not isinstance(rollouts, Rollouts) or not isinstance(advantages, torch.Tensor):
            raise BadInput(f"the parts of an Update of {wanted.role} must be pairs of Rollouts and a tensor")
        if not advantages.is_floating_point() or advantages.device != rollouts.tokens.device:
            raise BadInput(f"the advantages of an Update of {wanted.role} are {advantages.dtype} on "
                             f"{advantages.device}: they must be floats on {rollouts.tokens.device}")
        if {"step", "role"} & rollouts.columns.keys():
            raise BadInput("columns of rollouts cannot be called step or role: the loop writes these")
        for name, values in rollouts.columns.items():
            check_column(name, values, len(rollouts.lengths))
    check_loss(wanted.role, wanted.loss or t.loss, t.roles[wanted.role].reference is not None)
    if not (wanted.aggregation is None or wanted.aggregation in AGGREGATIONS):
        raise BadInput(f"an Update of {wanted.role} is averaged by {wanted.aggregation!r}; there are "
                       f"{', '.join(AGGREGATIONS)}")
    if not (wanted.lr is None or isinstance(wanted.lr, int | float) and 0 <= wanted.lr < math.inf):
        raise BadInput(f"the rate of an Update of {wanted.role} is {wanted.lr!r}: it must be a number from 0")
    if not (wanted.num_updates is None or isinstance(wanted.num_updates, int) and wanted.num_updates > 0):
        raise BadInput(f"an Update of {wanted.role} is to be made {wanted.num_updates!r} times: it must be a number "
                       f"from 1")


def comparable(t: Play, role: Role, rollouts: Rollouts) -> Rollouts:
    """The rollouts, with the sampler's logprobs of those alone that were drawn from the role's model, by the
    distribution that the trainer scores: neither greedily nor with --top-k."""
    foreign = [draw != "" and t.drawn.get(draw) is not role.model for draw in rollouts.draws]
    if not any(foreign):
        return rollouts
    rows = torch.tensor(foreign, device=rollouts.tokens.device)
    return replace(rollouts, sampler_logprobs=rollouts.sampler_logprobs.masked_fill(rows[:, None], float("nan")))


def apply_update(t: Play, wanted: Update) -> dict:
    """The optimizer step(s) of an update; their metrics. Where there are several the last one's, and how many of
    them were skipped. How far sampler and trainer are apart is the first one's, and left out where the role's weights
    had moved before it in this step."""
    check_update(t, wanted)
    args, role, loss, started = t.args, t.roles[wanted.role], wanted.loss or t.loss, time.time()
    sizes = batch_sizes(torch.cat([rollouts.num_trained() for rollouts, _ in wanted.parts]), t.reduce)
    keep_idle = loss.kl_coef > 0 or loss.entropy_coef > 0
    batches = []
    for rollouts, advantages in wanted.parts:
        lengths = rollouts.num_trained().float()
        weights = AGGREGATIONS[wanted.aggregation or args.aggregation](lengths, *sizes, rollouts.limit)
        batches += t.micro_batches(comparable(t, role, rollouts), advantages, weights, keep_idle)
    batches, times = t.even(batches), args.updates_per_batch if wanted.num_updates is None else wanted.num_updates
    if times > 1:
        for batch in batches:
            batch.old_logprobs = score(role.model, batch, args.temperature)
    base_lr = role.lr if wanted.lr is None else wanted.lr
    lr, num_skipped = base_lr * LR_SCHEDULES[args.lr_schedule](t.progress(role.name)), 0
    gaps = {} if t.moved & ids_of(role.model.parameters()) else None
    for _ in range(times):
        metrics = update(role, batches, loss, lr=lr, max_grad_norm=args.max_grad_norm, temperature=args.temperature,
                         device=t.device, check_stop=t.check_stop, breaks_off=t.breaks_off)
        t.has_moved = True  # until the state has moved too, nothing may stop this step
        found = {name: metrics.pop(name) for name in GAPS}
        gaps = found if gaps is None else gaps
        num_skipped += metrics["skipped"]
    t.moved |= ids_of(role.parameters)
    for other in t.roles.values():
        if other.trunk_of == role.name:
            copy_shared_lambdas(role.model, other.model, other.num_shared)
    t.steps[role.name] += 1
    in_a_row = t.state.skipped_in_a_row
    in_a_row[role.name] = in_a_row.get(role.name, 0) + 1 if num_skipped else 0
    t.add_seconds("update", started)
    return metrics | gaps | {"skipped": num_skipped}
