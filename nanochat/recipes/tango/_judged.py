"""
Who says which steps are right, and what a step earns by it: the tables of RL Tango's dials.
"""
from dataclasses import asdict, dataclass

from nanochat.common import wide_dtype
from nanochat.rl.credit.advantages import SparseRewards
from nanochat.rl.credit.rewards import VerdictTrust, terminal_rewards, step_rewards
from nanochat.rl.measure.observe import verification_columns
from nanochat.rl.play.play import Play
from nanochat.rl.records.outcomes import answers_of, labels_of
from nanochat.rl.records.prompts import Verification
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.judges import JUDGES, Judgment


@dataclass
class Judged:
    """What is said of N solutions."""
    steps: list[list | None]             # a verdict, or the chance to be right, of each step; None where none is said
    finals: list[float | None]           # of the whole
    verifications: list[Verification] | None = None  # where they are written
    judgments: list[Judgment] | None = None          # where the verifier is asked for chances
    chances: list[list | None] | None = None         # how likely each step is right, by which it is rewarded


# Judges: (t, solutions) -> Judged

def written(t: Play, solutions: Rollouts) -> Judged:
    """One verification of each; with --verify-distinct solutions of a problem that are alike share one."""
    keys, first = list(range(len(solutions))), {}
    if t.args.verify_distinct:
        keys = list(zip(solutions.group_id.tolist(), solutions.texts, strict=True))
    for n, key in enumerate(keys):
        first.setdefault(key, n)
    said = t.read_verifications(t.verify("verdicts", solutions.select(list(first.values()))))
    of_key = dict(zip(first, said, strict=True))
    t.log("generator", t.mean({"verified": [first[key] == n for n, key in enumerate(keys)]}))
    verifications = [of_key[key] for key in keys]
    solutions.columns |= verification_columns(verifications)
    return Judged([v.usable_steps for v in verifications], [v.verdict for v in verifications], verifications)


def asked(t: Play, solutions: Rollouts) -> Judged:
    """The chances that a verifier gives by --judge."""
    judgments = JUDGES[t.args.judge](t, "verifier", solutions)
    steps, finals = [j.steps for j in judgments], [j.final for j in judgments]
    solutions.columns |= {"step_chances": steps, "chance": finals}
    return Judged(steps, finals, judgments=judgments)


def gold(t: Play, solutions: Rollouts) -> Judged:
    """The task's labels of steps: an oracle."""
    labels = [labels_of(t.task, problem, text)
              for problem, text in zip(solutions.problems(), solutions.texts, strict=True)]
    return Judged(labels, [None] * len(labels))


# What verdicts make of steps: (t, solutions with their outcomes, step verdicts) -> chances

def posterior(t: Play, solutions: Rollouts, verdicts: list[list[bool] | None]) -> list[list[float] | None]:
    """The chance given all verdicts on the solution and its outcome, and how far verdicts could be believed before. In
    a wrong solution of which nothing is blamed every step is doubted. Blame in a right one counts for less. A solution
    without an answer may lack steps and have no wrong one, so its outcome says nothing."""
    answers = answers_of(t.task, solutions.texts)
    outcomes = [None if answer is None else outcome
                for outcome, answer in zip(solutions.columns["outcome"], answers, strict=True)]
    trust = VerdictTrust(**t.memory.get("trust", {}))
    trust.observe(verdicts, outcomes, lambda x: t.reduce(x.to(t.device, wide_dtype(t.device))))
    t.memory["trust"] = asdict(trust)
    t.log("generator", {f"trust/{name}": getattr(trust, name) for name in ("right_if_right", "right_if_wrong", "luck")})
    chances = [row and trust.chances(row, outcome) for row, outcome in zip(verdicts, outcomes, strict=True)]
    solutions.columns["step_chances"] = chances
    return chances


STEP_REWARDS = {"verdicts": lambda t, solutions, verdicts: verdicts, "posterior": posterior}  # eq. 3, and ours


# What a judge's word is worth beside the outcome: (t, solutions, judged) -> rewards

def steps_earn(t: Play, solutions: Rollouts, judged: Judged) -> SparseRewards:
    """A reward for each step (eq. 3 with --credit to_go)."""
    judged.chances = STEP_REWARDS[t.args.step_rewards](t, solutions, judged.steps)
    return step_rewards([s.step_ends for s in t.read_solutions(solutions)], judged.chances, t.device, t.args.credit)


def verdict_earns(t: Play, solutions: Rollouts, judged: Judged) -> SparseRewards:
    """A reward for the final verdict alone."""
    judged.chances = judged.steps
    return terminal_rewards(judged.finals, solutions.lengths)


EARN = {"steps": steps_earn, "verdict": verdict_earns}
