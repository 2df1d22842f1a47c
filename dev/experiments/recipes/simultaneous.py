"""Simultaneous updates (ours): Tango whose two models are updated in the same step. After arXiv 2505.15034.

After the warm-up every step samples for both roles from the models as they are, and then updates both. So there are as
many verifier steps as generator steps, as with --generator-steps 1 in recipe tango, where each role meets the other as
the step before has left it. --generator-steps and --verifier-steps have no say.
"""
from nanochat.recipes.tango import tango
from nanochat.recipes.tango.tango import ROLES, SHOWN, TABLE, add_args, check, evaluate  # noqa: F401


def updates(args) -> dict[str, int]:
    return {"generator": args.num_steps, "verifier": args.warmup_steps + args.num_steps}


def draws(args):
    return tango.draws(args) | tango.verifier_draws(args, updates(args)["verifier"])


def eval_step(t) -> int:
    return t.steps["generator"] or min(0, t.steps["verifier"] - t.args.warmup_steps)


def play(t):
    is_warm = t.steps["verifier"] >= t.args.warmup_steps
    t.log(None, {"phase": "both" if is_warm else "warmup"})
    if is_warm:
        yield from [*tango.verifier_step(t), *tango.generator_turn(t, "steps")]  # all is sampled before any update
    else:
        yield from tango.verifier_step(t)
