"""
One step of a run: the evaluation that is due before it, what the recipe does, and what is counted, logged and shown.
"""
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanochat.common import BadInput, Diverged, described, finite, print0, process_size
from nanochat.rl.learn.roles import short_name
from nanochat.rl.learn.state import check_memory
from nanochat.rl.measure.theory import theory_scores
from nanochat.rl.play.play import Play, Update, is_number, warn_once
from nanochat.rl.play.updates import apply_update
from nanochat.rl.report.page import write_run_page
from nanochat.rl.run.progress import (check_apart, count_apart, health_check, print_step, warn_of_apart,
                                      warn_of_no_signal)
from nanochat.rl.run.rollout_log import example_records, rollout_records
from nanochat.weights import check_weights

PAGE_SECONDS = 60.0  # after which the page of a run is written anew, also without an evaluation


def make_step(t: Play, recipe, counted: str, most: int) -> None:
    """One step of the recipe. counted: the role whose updates --num-steps counts; most: Updates that no step has. A
    request to stop before the first update throws the step away; after it the step is carried through."""
    t.check_stop()
    before, random_state = t.state.snapshot(), torch.get_rng_state()
    # the step has the copy: what its memory shared with weights, a continued run would not share either
    t.state.memory, before.memory = before.memory, t.state.memory
    t.begin_step()
    started = time.time()
    try:
        scores = evaluate_if_due(t, recipe, counted)
        evaluated = time.time()
        updated = play(t, recipe, most)
    except Exception:
        if not t.has_moved:  # the step is thrown away
            t.state.restore(before)
            torch.set_rng_state(random_state)
        raise
    seconds = {"eval": evaluated - started, "step": time.time() - evaluated}
    finish_step(t, recipe, counted, before, scores, updated, seconds)


def play(t: Play, recipe, most: int) -> list[Update]:
    """What the recipe yields, each applied before the next is asked for."""
    updates, updated = recipe.play(t), []
    if not isinstance(updates, Iterator):
        raise BadInput(f"--recipe {t.args.recipe}: play gives a {type(updates).__name__}: it must yield an Update for "
                       f"each optimizer step")
    for update in updates:
        metrics = apply_update(t, update)
        t.log(update.role, metrics)
        updated.append(update)
        if len(updated) > most:
            raise BadInput(f"--recipe {t.args.recipe}: play has yielded {len(updated)} Updates in one step and does "
                           f"not end; the recipe planned {sum(t.totals.values())} in all")
    return updated


def finish_step(t: Play, recipe, counted: str, before, scores: dict, updated: list[Update], seconds: dict) -> None:
    """Counts, logs and shows a step. before: the state that it began with; seconds: of evaluation and step."""
    state, roles = t.state, list(dict.fromkeys(update.role for update in updated))
    check_memory(state.memory)
    tokens = int(t.reduce(torch.tensor(t.sampled, device=t.device)))
    if not updated:  # nothing in it to learn from
        state.role_steps[counted] += 1
        t.log(None, {"without_update": 1})
    record = scores | record_of(t, roles, counted, before, tokens, seconds)
    state.step += 1
    state.cursor += t.num_drawn
    state.sampled_tokens += tokens
    state.step_seconds += seconds["step"]
    state.eval_seconds += seconds["eval"]
    t.run.log(record)
    for update in updated if t.run.rank == 0 else []:
        for rollout in rollout_records(t, update):
            t.run.append("rollouts.jsonl", {"step": record["step"], **rollout})
    warn_of_no_signal(t, record)
    warn_of_apart(t, record)
    print_step(record, roles, getattr(recipe, "SHOWN", {}), seconds_left(t))
    if scores or time.time() >= t.page_due:
        show_page(t, f"under way, after step {t.step}")
    t.has_moved = False
    for role, in_a_row in state.skipped_in_a_row.items():
        if in_a_row >= 3:
            raise Diverged(f"step {record['step']}: loss or gradient of the {role} was not finite three times in a "
                           f"row; look at its learning rate and at the last records of metrics.jsonl")
    check_apart(t, record)


def record_of(t: Play, roles: list[str], counted: str, before, tokens: int, seconds: dict) -> dict:
    """A step's line in metrics.jsonl, without its evaluation. tokens: sampled in it, over all ranks."""
    state, first = t.state, roles[0] if len(roles) == 1 else counted
    record = {"step": state.step, "role": "+".join(roles) or counted, "phase": first,
              **{f"{short_name(role)}_step": before.role_steps[role] for role in t.roles},
              "sampled_tokens": state.sampled_tokens}
    record |= t.metrics | count_apart(t, roles, t.metrics) | {f"{short_name(first)}/sampled_tokens": tokens}
    record |= {"timing_s/eval": seconds["eval"], **t.seconds, "timing_s/step": seconds["step"],
               **t.run.writer.take_record(), "tokens_per_s": tokens / max(seconds["step"], 1e-9), **process_size()}
    if t.device.type == "cuda":
        record["peak_memory_gb"] = torch.cuda.max_memory_allocated(t.device) / 1e9
    return record


def evaluate_if_due(t: Play, recipe, counted: str) -> dict:
    """The held-out scores, where --eval-every says that they are due and they were not just taken."""
    now = recipe.eval_step(t) if hasattr(recipe, "eval_step") else t.steps[counted]
    if not t.args.eval_every or now % t.args.eval_every or now == t.state.last_eval:
        return {}
    scores = dict(held_out(t, recipe) if t.step else t.state.before)
    t.state.last_eval = now
    return scores


@contextmanager
def evaluating(t: Play):
    """What is drawn here belongs to no step."""
    t.evaluating = True
    try:
        yield
    finally:
        t.evaluating = False


def held_out(t: Play, recipe) -> dict:
    """The recipe's held-out scores. Rank 0 writes its examples down."""
    for name, role in t.roles.items():
        check_weights(role.model, name)
    t.examples = None
    with evaluating(t):
        scores = recipe.evaluate(t)
    examples = example_records(t)
    t.run.trim("examples.jsonl", t.step)
    for example in examples if t.run.rank == 0 else []:
        t.run.append("examples.jsonl", {"step": t.step, **example})
    if not isinstance(scores, dict):
        raise BadInput(f"--recipe {t.args.recipe}: evaluate gives a {type(scores).__name__}, not a dict of scores")
    if t.args.log_theory:
        with evaluating(t):
            scores = scores | theory_scores(t)
    t.check_names(scores)
    for name, value in scores.items():
        if not isinstance(name, str) or not is_number(value):
            raise BadInput(f"--recipe {t.args.recipe}: evaluate gives {name!r} as {described(value)}: scores are "
                           f"numbers or None, by name")
        if value is not None and not math.isfinite(value):
            warn_once(t, f"evaluate gives {name} as {value}, which is logged as null; one that cannot be told is None")
    return scores


def seconds_left(t: Play) -> float:
    """Estimate of the steps to come, without evaluations."""
    counted = list(t.totals)[:1] if t.args.token_budget else t.totals  # tokens are all roles', updates each one's
    positions = [t.position(role) for role in counted]
    left = sum(max(0, total - made) for made, total, _ in positions)
    return t.state.step_seconds / max(1, sum(made for made, *_ in positions)) * left


def show_page(t: Play, state: str | None, is_alive: bool = True) -> None:
    """Writes the run's report.html; rank 0. state: what the run is doing, None once it is finished; is_alive: whether
    it goes on. It is due again after PAGE_SECONDS, or later where that would take over a fiftieth of the time. A report
    that fails is told and stops no run."""
    if t.run.rank != 0:
        return
    seconds = t.state.start_seconds + t.state.step_seconds + t.state.eval_seconds
    so_far = state and {"minutes": round(seconds / 60, 2), "before": finite(t.state.before)}
    left = state and {"state": state, "minutes_left": seconds_left(t) / 60 if t.step and is_alive else None,
                      "is_alive": is_alive}
    started = time.time()
    try:
        write_run_page(t.run.folder, so_far, left)
    except Exception as error:
        print0(f"report.html was not written: {type(error).__name__}: {error}")
    t.page_due = time.time() + max(PAGE_SECONDS, 50 * (time.time() - started))


def start_state(t: Play, recipe) -> None:
    """The evaluation before RL and the health check of the first role that samples."""
    started = time.time()
    t.state.before = held_out(t, recipe)
    sampling = {draw.role for draw in t.draws.values() if not draw.teacher_forced}
    solver = next((role for role in ("generator", *t.roles) if role in sampling), None)
    if solver:
        with evaluating(t):
            health_check(t, solver)
    t.state.start_seconds = time.time() - started
