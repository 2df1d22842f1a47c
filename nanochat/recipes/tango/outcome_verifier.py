"""Outcome verifier: RL Tango in which the verifier's final verdict is rewarded, no step's. arXiv 2505.15034.

Both roles are trained as in recipe tango. To the generator a verdict is worth 1 or 0 for the whole solution.

Departures: 1 to 3 and 5 of recipe tango, and --verify-distinct and --negative-weight of 4.
"""
from nanochat.recipes.tango import tango
from nanochat.recipes.tango.tango import ROLES, SHOWN, TABLE, check, draws, eval_step, evaluate, updates  # noqa: F401

STATUS = "runs: no gain over GRPO is shown (+1.3 ± 11.5)"


def add_args(group):
    tango.add_pair_args(group)
    group.set_defaults(step_rewards="verdicts")


def play(t):
    yield from tango.play(t, earn="verdict")
