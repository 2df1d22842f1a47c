"""Gold steps: RL Tango's generator with the task's step labels as its verifier, an upper bound. arXiv 2505.15034.

The generator is rewarded as in recipe tango, but for labels that are always right in place of verdicts.

Departures: 3 of recipe tango, and --combine of 5.
"""
from nanochat.common import BadInput
from nanochat.recipes.policy.grpo import ROLES, draws, evaluate  # noqa: F401
from nanochat.recipes.tango import tango

TAGS = dict(family="single model", verifier="oracle", reward="outcome + process", credit="z-score of the sum")
SHOWN = {"generator": ["alpha"]}
add_args = tango.add_alpha_args


def check(args, task):
    tango.check(args, task)
    if not getattr(task, "has_step_labels", True):
        raise BadInput(f"--recipe gold_steps: task {task.name} has no gold labels of steps")


def play(t):
    yield from tango.generator_step(t, judge="gold")
