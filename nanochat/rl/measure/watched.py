"""
What a run watches in every step of a role. The step's line warns of it, and the report's first screen says how it is.
"""
from collections.abc import Callable
from typing import NamedTuple

from nanochat.rl.learn.roles import short_name

LENIENT = 0.3  # a run warns while more than this share of the generator's wrong steps passes
LITTLE_SIGNAL = 0.9  # while more than this share of the groups has equal rewards
DETERMINISTIC = 0.001  # nats per token: while the entropy is below this
MOST = 0.5  # while more than this share of completions is cut, of solutions has no steps, of verdicts cannot be read
APART_BY = "it is likely sampled from other weights, or what was sampled was changed after it"


class Watched(NamedTuple):
    """A metric that a run watches."""
    name: str     # after a role's prefix
    fine: str     # what is so while it is within its bound
    warning: str  # what a step's line says else
    is_bad: Callable[[float | None], bool]
    bound: str
    remedy: str


def above(bar: float) -> Callable[[float | None], bool]:
    """Whether a value is above the bar; None, which could not be told, is not."""
    return lambda value: value is not None and value > bar


WATCHED = (
    Watched("skipped", "updates are finite", "not finite, skipped", above(0), "no update left out",
            "lower its learning rate; three in a row stop the run"),
    Watched("rollout_apart", "sampler and trainer agree", "sampler and trainer differ", above(0),
            "no update further apart than the dtype explains", APART_BY),
    Watched("reward", "rollouts can be scored", "no rollout could be scored", lambda value: value is None,
            "a reward in every step", "does the task's check() give None, or can no judgment be read?"),
    Watched("frac_reward_zero_std", "groups give signal", "little signal", above(LITTLE_SIGNAL),
            f"at most {LITTLE_SIGNAL:.0%} of the groups have equal rewards",
            "problems are too hard (reward near 0) or too easy: change them, or raise --num-samples"),
    Watched("entropy", "sampling explores", "sampling is deterministic",
            lambda value: value is not None and value < DETERMINISTIC, f"at least {DETERMINISTIC} nats per token",
            "the signal ends: lower the learning rate, or raise --entropy-coef or --kl-coef"),
    Watched("completions/clipped_ratio", "completions end", "completions are cut", above(MOST),
            f"at most {MOST:.0%} are cut at their limit", "raise their limit, or give SFT longer"),
    Watched("stepless", "solutions have steps", "answers without steps", above(MOST),
            f"at most {MOST:.0%} have no step",
            "answers are guessed: raise --negative-weight, or give SFT more steps"),
    Watched("wrong_passed", "wrong steps are found", "lenient verifier", above(LENIENT),
            f"at most {LENIENT:.0%} of the wrong steps pass, as moving average",
            "trust no step reward: train the verifier on more mistakes, lower --alpha-start, or raise --kl-coef"),
    Watched("parse_fail", "verifications can be read", "verifications cannot be read", above(MOST),
            f"at most {MOST:.0%} miss the format", "raise --gamma or --verifier-max-new-tokens, or give SFT longer"),
    Watched("pred_pos_rate", "verdicts differ", "constant verifier", lambda value: value in (0.0, 1.0),
            "some solutions called right, some wrong", "try --verifier-balance, or SFT on balanced solutions"),
)


def watched_in(record: dict, role: str) -> list[tuple[Watched, float | None]]:
    """What a step's record has of a role's watched metrics, each with its value. A role without rollouts has no
    rewards to watch."""
    prefix = short_name(role)
    return [(watched, record[name]) for watched in WATCHED if (name := f"{prefix}/{watched.name}") in record
            and (watched.name != "reward" or record.get(f"{prefix}/num_rollouts"))]


def warnings_in(record: dict, role: str) -> list[Watched]:
    """What a step's line warns of."""
    return [watched for watched, value in watched_in(record, role) if watched.is_bad(value)]
