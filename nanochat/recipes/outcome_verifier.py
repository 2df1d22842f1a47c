"""Outcome verifier: RL Tango in which the verifier's final verdict is rewarded, no step's. arXiv 2505.15034."""
from nanochat.recipes import tango
from nanochat.recipes.tango import ROLES, SHOWN, TABLE, calls, check, eval_step, evaluate, updates  # noqa: F401

TAGS = dict(family="generator-verifier", verifier="generative, RL on outcomes", reward="outcome + verdict",
            credit="z-score per source")


def add_args(group):
    tango.add_pair_args(group)
    group.set_defaults(combine="advantages")  # what was measured; merged was not


def play(t):
    yield from tango.play(t, reward="verdict")
