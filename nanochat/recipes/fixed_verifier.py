"""Fixed verifier: RL Tango's generator with a verifier as SFT left it. arXiv 2505.15034, section 4.3.

The generator is rewarded as in recipe tango. The verifier judges and does not learn. Beside recipe tango this shows
what training it adds.

Departures: 3, 5 and 6 of recipe tango.
"""
from nanochat.recipes import tango
from nanochat.recipes.tango import TABLE, check, evaluate  # noqa: F401
from nanochat.rl.roles import RoleSpec

TAGS = dict(family="generator-verifier", verifier="generative, frozen", reward="outcome + process",
            credit="z-score of the sum")
ROLES = {"generator": RoleSpec("--model-tag"), "verifier": RoleSpec("--verifier-tag", "-ver", trained=False)}
SHOWN = {"generator": ["alpha", "wrong_passed"]}


def add_args(group):
    tango.add_label_args(group)
    tango.add_alpha_args(group)
    tango.add_verdict_args(group)
    tango.add_distinct_args(group)
    tango.add_step_args(group)


def calls(args):
    return tango.generator_calls(args)


def play(t):
    yield from tango.generator_step(t, judge="verifier")
