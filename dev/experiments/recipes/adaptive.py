"""Adaptive turns (ours): Tango whose verifier has a step when its verdicts get worse. After arXiv 2505.15034.

A verifier step follows a generator step whose final verdicts tell right solutions from wrong ones worse than those of
the generator steps before it do on average: by balanced accuracy against the outcomes, so that no step label is used.
There are at most as many verifier steps as generator steps. --generator-steps and --verifier-steps have no say.
"""
from nanochat.recipes.tango import tango
from nanochat.recipes.tango.tango import ROLES, SHOWN, TABLE, add_args, check, evaluate  # noqa: F401


def updates(args) -> dict[str, int]:
    return {"generator": args.num_steps, "verifier": args.warmup_steps + args.num_steps - 1}  # the most


def draws(args):
    return tango.draws(args) | tango.verifier_draws(args, updates(args)["verifier"])


def phase_of(t) -> str:
    if t.steps["verifier"] < t.args.warmup_steps:
        return "warmup"
    return "verifier" if t.memory.get("is_due") else "generator"


def eval_step(t) -> int:
    return t.steps["verifier"] - t.args.warmup_steps if phase_of(t) == "warmup" else t.steps["generator"]


def play(t):
    phase = phase_of(t)
    t.log(None, {"phase": phase})
    if phase == "generator":
        update, = tango.generator_turn(t, "steps")
        observe_skill(t, t.metrics["gen/verdicts/balanced_acc"])
        yield update
    else:
        t.memory["is_due"] = False
        yield from tango.verifier_step(t)


def observe_skill(t, skill: float | None) -> None:
    """Notes the skill of a generator step's verdicts, None where all solutions are right or all wrong, and whether it
    is below the mean of those before."""
    if skill is not None:
        before = t.memory.get("skills", [])
        t.memory["is_due"] = bool(before) and skill < sum(before) / len(before)
        t.memory["skills"] = [*before, skill]
