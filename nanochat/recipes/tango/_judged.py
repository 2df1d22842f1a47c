"""
Who says which steps are right, and what a step earns by it: the tables of RL Tango's dials.
"""
import random
from dataclasses import asdict, dataclass, replace

from nanochat.common import wide_dtype
from nanochat.rl.credit.advantages import SparseRewards
from nanochat.rl.credit.rewards import VerdictSkill, VerdictTrust, step_rewards, terminal_rewards
from nanochat.rl.measure.observe import verification_columns
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.records.outcomes import labels_of
from nanochat.rl.records.prompts import Prompt, Verification, empty_verifier_prompt, verify_prompts
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
    said = verified(t, solutions.select(list(first.values())))
    of_key = dict(zip(first, said, strict=True))
    t.log("generator", t.mean({"verified": [first[key] == n for n, key in enumerate(keys)]}))
    verifications = [of_key[key] for key in keys]
    solutions.columns |= verification_columns(verifications)
    return Judged([v.usable_steps for v in verifications], [v.verdict for v in verifications], verifications)


def verified(t: Play, solutions: Rollouts) -> list[Verification]:
    """A verification of each solution, with --verify-relabelled the stricter one of it and of the same relabelled."""
    said = t.read_verifications(t.verify("verdicts", solutions))
    if not t.args.verify_relabelled:
        return said
    others = t.sample("verdicts_relabelled", relabelled(t, solutions), wrap=empty_verifier_prompt)
    return list(map(stricter, said, t.read_verifications(others)))


def stricter(*verifications: Verification) -> Verification:
    """What verifications of a solution say as one: a step, and the whole, is right only if all that can be read say so.
    Its text is that of the most readable one."""
    first = min(verifications, key=lambda v: (v.usable_steps is None, len(v.unmet)))
    steps = [v.usable_steps for v in verifications if v.usable_steps is not None]
    finals = [v.verdict for v in verifications if v.verdict is not None]
    unmet = [name for name in first.unmet if name != "no_final_verdict"] + ["no_final_verdict"] * (not finals)
    return replace(first, step_verdicts=list(map(all, zip(*steps, strict=True))) if steps else first.step_verdicts,
                   verdict=all(finals) if finals else None, unmet=tuple(unmet))


def relabelled(t: Play, solutions: Rollouts) -> list[Prompt]:
    """The verifier's prompts about the same solutions with other facts, which must pass too (arXiv 2604.15149). Those
    of a problem have the same others in a step."""
    read, name = t.read_solutions(solutions), f"relabelled-{t.args.seed}-{t.step}"
    others = [t.task.relabelled(problem, solution.text, random.Random(f"{name}-{problem.index}"))
              for problem, solution in zip(solutions.problems(), read, strict=True)]
    texts = [replace(solution, text=text) for solution, (_, text) in zip(read, others, strict=True)]
    return verify_prompts(t.tokenizer, t.task.fmt, [problem for problem, _ in others], texts)


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
    without an answer may lack steps and have no wrong one, so nothing is learned from it of verdicts; its own steps
    earn what those of a wrong answer do, or leaving the answer out would pay."""
    outcomes, answers = solutions.columns["outcome"], t.answers(solutions)
    told = [None if answer is None else outcome for outcome, answer in zip(outcomes, answers, strict=True)]
    trust = VerdictTrust(**t.memory.get("trust", {}))
    trust.observe(verdicts, told, summed_by(t))
    t.memory["trust"] = asdict(trust)
    t.log("generator", {f"trust/{name}": getattr(trust, name) for name in ("right_if_right", "right_if_wrong", "luck")})
    chances = [row and trust.chances(row, outcome) for row, outcome in zip(verdicts, outcomes, strict=True)]
    solutions.columns["step_chances"] = chances
    return chances


def summed_by(t: Play):
    """The sum over ranks of a tensor on CPU."""
    return lambda x: t.reduce(x.to(t.device, wide_dtype(t.device)))


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


# What else a judge's word changes: alpha

def verdict_skill(t: Play, solutions: Rollouts, judged: Judged) -> float:
    """J of the judge's final verdicts, over this batch and those before."""
    skill, finals = VerdictSkill(**t.memory.get("skill", {})), [None if f is None else f > 0.5 for f in judged.finals]
    j = skill.observe(finals, solutions.columns["outcome"], summed_by(t))
    t.memory["skill"] = asdict(skill)
    t.log("generator", {"verdict_skill": j})
    return j


# What a step samples for this

def verdict_draws(args, verdict: Draw) -> dict[str, Draw]:
    """The verdicts on a step's solutions, and with --verify-relabelled those on them relabelled."""
    return {"verdicts": verdict} | ({"verdicts_relabelled": verdict} if args.verify_relabelled else {})
