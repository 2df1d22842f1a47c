"""Ungrounded verifier (ours): Tango whose verifier is rewarded for agreeing with itself. After arXiv 2505.15034.

A verification earns 1 where its final verdict is that of most of its group, in place of the outcome: what TTRL
(2504.16084) does with answers. It earns nothing for a tie or where none can be read, but for its form. So no gold
answer enters the verifier's updates. The generator is rewarded as in recipe tango. The log tells how right verdicts
are, by gold.
"""
from nanochat.common import BadInput
from nanochat.recipes.tango import tango
from nanochat.recipes.tango._observe import observe_verifier
from nanochat.recipes.tango._phases import begin_phase, eval_step  # noqa: F401
from nanochat.recipes.tango._pool import solutions_to_judge
from nanochat.recipes.tango.tango import ROLES, SHOWN, TABLE, add_args, draws, evaluate, updates  # noqa: F401
from nanochat.rl.credit.rewards import format_reward
from nanochat.rl.play.play import Update


def check(args, task) -> None:
    tango.check(args, task)
    if args.class_weights or args.verifier_balance:
        raise BadInput("--no-class-weights --no-verifier-balance: are needed here, as both know the outcomes")


def play(t):
    if begin_phase(t) == "generator":
        yield from tango.generator_turn(t, "steps")
    else:
        yield from verifier_step(t)


def verifier_step(t):
    G = t.args.num_samples
    solutions, outcomes, copies = solutions_to_judge(t)
    rollouts = t.verify("verifications", solutions, copies=copies)
    verifications = t.read_verifications(rollouts)
    verdicts = [v.verdict for v in verifications]
    said = [most(verdicts[i: i + G]) for i in range(0, len(verdicts), G) for _ in range(G)]
    rewards = [float(v.verdict == verdict and verdict is not None) + t.args.gamma * format_reward(v.unmet)
               for v, verdict in zip(verifications, said, strict=True)]
    observe_verifier(t, solutions, rollouts, verifications, [o for o in outcomes for _ in range(G)], rewards)
    yield Update("verifier", [(rollouts, t.advantages(rollouts, rewards, preset=t.args.advantage))])


def most(verdicts: list[bool | None]) -> bool | None:
    """What most of those say that can be read; None for a tie, and where none can."""
    right, wrong = verdicts.count(True), verdicts.count(False)
    return None if right == wrong else right > wrong
