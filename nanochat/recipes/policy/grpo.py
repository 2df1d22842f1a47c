"""GRPO (Shao et al. 2024): the generator alone, rewarded by its answers; the baseline of all others. arXiv 2402.03300.

A right solution earns 1, a wrong one 0. The advantage is the reward less the mean over the problem's solutions, divided
by their standard deviation. --advantage names its relatives: rloo (Ahmadian et al. 2024), dr_grpo (Liu et al. 2025),
reinforce++ (Hu 2025).

Departures:
1. The reward is the task's check of the answer. The paper trains a reward model.
2. --kl-coef is 1e-3, not 0.04.
3. Only some problems may have gold answers (--num-labelled).
"""
from nanochat.recipes.tango import tango
from nanochat.recipes.tango.tango import check  # noqa: F401
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1

TAGS = dict(family="single model", verifier="none", reward="outcome", credit="z-score")
ROLES = {"generator": RoleSpec("--model-tag")}
add_args = tango.add_label_args


def draws(args):
    return tango.solution_draws(args)


def play(t):
    yield from tango.generator_step(t, judge=None)


def evaluate(t):
    return pass_at_1(t, "generator")
