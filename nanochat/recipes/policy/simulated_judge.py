"""Simulated judge: GRPO rewarded by a judge that is as accurate as one says, and in the way one says. arXiv 2503.15477.

What makes a reward a good teacher (Razin et al. 2025): not accuracy alone, but also how far it tells apart what the
policy samples. A judge here knows the outcome of a solution, and is spoiled in two ways. With --judge-ties q it gives
.5 to all solutions of a share q of the problems: it says nothing false. With --judge-flips e it says the opposite of a
share e of the solutions. What it ties and flips is a function of the seed, the problem and the text.

Of a right and a wrong solution of one problem it ranks the right one higher with chance (1 - q)(1 - e) + q / 2, a tie
counting half. So q = 2e gives two judges that are equally accurate; the one with ties varies less, by 1 - q.

Departures:
1. In the paper reward models of different accuracy and variance are trained or made; here the flaws are planted.
2. The advantage is divided by the group's standard deviation (not by --advantage dr_grpo): so a reward that is
   only scaled down, the paper's first example, would teach as before. Whole groups that are alike cannot.
"""
import random

from nanochat.cli import SHARE
from nanochat.recipes.policy.grpo import ROLES, draws, evaluate  # noqa: F401
from nanochat.rl.credit.rewards import terminal_rewards
from nanochat.rl.measure.observe import log_rewards, log_variances
from nanochat.rl.measure.voting import auroc
from nanochat.rl.play.play import Play, Update

STATUS = ("runs: at equal accuracy a judge with ties taught 9.8 ± 6.3 better than one that flips, where worse was "
          "expected")
SHOWN = {"generator": ["judge_auc", "zero_variance/judge"]}


def add_args(group) -> None:
    group.add_argument("--judge-ties", type=SHARE, default=0.0, help="q: share of the problems without a difference")
    group.add_argument("--judge-flips", type=SHARE, default=0.0, help="e: share of the solutions paid for the opposite")


def judged(outcome: bool | None, seed: int, problem: str, text: str, ties: float, flips: float) -> float | None:
    """The reward of a solution: its outcome, spoiled; None where that is not known."""
    happens = lambda share, *what: random.Random(repr((seed, *what))).random() < share
    if outcome is None:
        return None
    if happens(ties, "tie", problem):
        return 0.5
    return float(outcome != happens(flips, "flip", problem, text))


def group_auc(rewards: list[float | None], outcomes: list[bool | None], num_samples: int) -> list[float | None]:
    """Of each group the chance that a right solution has more reward than a wrong one, a tie counting half."""
    scored = list(zip(rewards, outcomes, strict=True))
    groups = [[row for row in scored[i: i + num_samples] if row[1] is not None]
              for i in range(0, len(scored), num_samples)]
    return [auroc([reward for reward, _ in group], [outcome for _, outcome in group]) for group in groups]


def play(t: Play):
    solutions = t.solve("solutions", t.problems())
    outcomes = solutions.columns["outcome"] = t.check(solutions)
    rewards = [judged(outcome, t.args.seed, problem.prompt, text, t.args.judge_ties, t.args.judge_flips)
               for outcome, problem, text in zip(outcomes, solutions.problems(), solutions.texts, strict=True)]
    log_rewards(t, "generator", solutions, rewards)
    log_variances(t, "generator", solutions, {"judge": terminal_rewards(rewards, solutions.lengths)})
    t.log("generator", t.mean({"judge_auc": group_auc(rewards, outcomes, t.args.num_samples),
                               "rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes]}))
    yield Update("generator", [(solutions, t.advantages(solutions, rewards))])
