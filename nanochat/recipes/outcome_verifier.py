"""Outcome verifier: RL Tango (arXiv 2505.15034) in which the final verdict is the verifier's reward, and no step's."""
from nanochat.recipes import tango
from nanochat.recipes.tango import ROLES, SHOWN, TABLE, add_args, calls, check, eval_step, evaluate, updates  # noqa: F401

TAGS = dict(family="generator-verifier", verifier="generative, RL on outcomes", reward="outcome + verdict",
            credit="z-score per source")


def play(t):
    yield from tango.play(t, reward="verdict")
