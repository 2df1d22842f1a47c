"""
What the loop makes of an Update that a recipe yields: it is checked, and applied in one optimizer step, or in several.
"""
import json
import math
import time
from dataclasses import replace

import torch

from nanochat.common import BadInput
from nanochat.kernels.losses import KL_ESTIMATORS, POLICY_LOSSES
from nanochat.rl.credit.aggregation import AGGREGATIONS
from nanochat.rl.credit.schedules import lr_factor
from nanochat.rl.learn.heads import copy_shared_lambdas
from nanochat.rl.learn.packing import batch_sizes
from nanochat.rl.learn.roles import Role
from nanochat.rl.learn.trainer import GAPS, score, update
from nanochat.rl.play.play import Play, Update, ids_of
from nanochat.rl.records.rollouts import Rollouts


def check_columns(columns: dict[str, list], num: int) -> None:
    """Raises BadInput where columns of `num` rollouts cannot be logged: one value of json for each."""
    for name, values in columns.items():
        try:
            if name in ("step", "role") or len(values) != num:
                raise ValueError(f"it has {len(values)}, and the loop itself writes step and role")
            json.dumps({name: values})
        except (TypeError, ValueError) as error:
            raise BadInput(f"column {name!r} of {num} rollouts must have one value of json for each: {error}") from None


def is_part(part) -> bool:
    """Whether this is a pair of rollouts and their advantages."""
    rollouts, advantages = part if isinstance(part, tuple) and len(part) == 2 else (None, None)
    if not isinstance(rollouts, Rollouts) or not isinstance(advantages, torch.Tensor):
        return False
    return advantages.is_floating_point() and advantages.device == rollouts.tokens.device


def check_update(t: Play, wanted: Update) -> None:
    """Raises BadInput for what a recipe yields and no step can be made of."""
    if not isinstance(wanted, Update):
        raise BadInput(f"play yields a {type(wanted).__name__}, not an Update")
    what, trained = f"an Update of {wanted.role!r}", [name for name, role in t.roles.items() if role.optimizer]
    if wanted.role not in trained:
        raise BadInput(f"play yields {what}; the roles that are trained are {', '.join(trained)}")
    if not (isinstance(wanted.parts, list) and wanted.parts and all(map(is_part, wanted.parts))):
        raise BadInput(f"the parts of {what} must be a list of pairs of Rollouts and their advantages, a tensor of "
                       f"floats on the same device")
    for rollouts, _ in wanted.parts:
        check_columns(rollouts.columns, len(rollouts))
    lr, times = 0.0 if wanted.lr is None else wanted.lr, 1 if wanted.num_updates is None else wanted.num_updates
    if not (isinstance(lr, int | float) and 0 <= lr < math.inf and isinstance(times, int) and times >= 1):
        raise BadInput(f"{what} has lr {lr} and num_updates {times}: they must be at least 0 and at least 1")
    loss = wanted.loss or t.loss
    for word, table in ((loss.name, POLICY_LOSSES), (loss.kl, KL_ESTIMATORS),
                        (wanted.aggregation or t.args.aggregation, AGGREGATIONS)):
        if word not in table:
            raise BadInput(f"{what} names {word!r}; there are {', '.join(table)}")
    if loss.kl_coef and t.roles[wanted.role].reference is None:
        raise BadInput(f"the loss of {what} has a KL to its start, which is not kept: give the role's RoleSpec "
                       f"reference=True")


def comparable(t: Play, role: Role, rollouts: Rollouts) -> Rollouts:
    """The rollouts, with the sampler's logprobs of those alone that were drawn from the role's model, by the
    distribution that the trainer scores: neither greedily nor with --top-k."""
    foreign = [draw != "" and t.drawn.get(draw) is not role.model for draw in rollouts.draws]
    if not any(foreign):
        return rollouts
    rows = torch.tensor(foreign, device=rollouts.tokens.device)
    return replace(rollouts, sampler_logprobs=rollouts.sampler_logprobs.masked_fill(rows[:, None], float("nan")))


def apply_update(t: Play, wanted: Update) -> dict:
    """The optimizer step(s) of an update; the metrics of the last one, and how many were skipped. How far sampler and
    trainer are apart is the first one's, and left out where the role's weights had moved before it in this step."""
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
    lr = role.lr if wanted.lr is None else wanted.lr
    lr *= lr_factor(args.lr_schedule, args.warmup_ratio, *t.position(role.name))
    gaps, num_skipped = {} if t.moved & ids_of(role.model.parameters()) else None, 0
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
