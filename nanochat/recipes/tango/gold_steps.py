"""Gold steps: RL Tango's generator with the task's step labels as its verifier, an upper bound. arXiv 2505.15034.

The generator is rewarded as in recipe tango, but for labels that are always right in place of verdicts.

Departures: 2 of recipe tango, and --credit and --negative-weight of 4.
"""
from nanochat.common import BadInput
from nanochat.recipes.tango import tango
from nanochat.recipes.tango._judged import gold
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.play.play import solution_draws

STATUS = ("works: 37.7 ± 9.4 above GRPO with the same weight of wrong answers at equal steps: what verdicts are worth "
          "that are always right")
ROLES = {"generator": RoleSpec("--model-tag")}
SHOWN = {"generator": ["alpha"]}
draws, evaluate = solution_draws, pass_at_1


def add_args(group):
    tango.add_alpha_args(group)
    tango.add_credit_args(group)
    group.set_defaults(step_rewards="verdicts", weigh_by_j=False)


def check(args, task):
    tango.check_alpha(args, task)
    if not getattr(task, "has_step_labels", True):
        raise BadInput(f"--recipe gold_steps: task {task.name} has no gold labels of steps")


def play(t):
    yield from tango.generator_step(t, gold)
