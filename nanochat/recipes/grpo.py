"""GRPO (Shao et al. 2024): the generator alone, rewarded by its answers; the baseline of all others. arXiv 2402.03300.

--advantage names its relatives: rloo (Ahmadian et al. 2024), dr_grpo (Liu et al. 2025), reinforce++ (Hu 2025).
"""
from nanochat.recipes import tango
from nanochat.recipes.tango import check  # noqa: F401
from nanochat.rl.evals import pass_at_1
from nanochat.rl.roles import RoleSpec

TAGS = dict(family="single model", verifier="none", reward="outcome", credit="z-score")
ROLES = {"generator": RoleSpec("--model-tag")}
add_args = tango.add_label_args


def calls(args):
    return tango.solution_calls(args)


def play(t):
    yield from tango.generator_step(t, judge=None)


def evaluate(t):
    return pass_at_1(t, "generator")
