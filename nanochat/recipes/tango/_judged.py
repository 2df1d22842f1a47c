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
from nanochat.rl.records.outcomes import answers_of, labels_of
from nanochat.rl.records.prompts import Prompt, Verification, empty_verifier_prompt, verify_prompts
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.judge_evals import fixed_solutions
from nanochat.rl.verify.judges import JUDGES, Judgment, strictest


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
    """What is written of each; with --verify-distinct solutions of a problem that are alike share it."""
    keys, first = list(range(len(solutions))), {}
    if t.args.verify_distinct:
        keys = list(zip(solutions.group_id.tolist(), solutions.texts, strict=True))
    for n, key in enumerate(keys):
        first.setdefault(key, n)
    said = verified(t, "verdicts", solutions.select(list(first.values())))
    of_key = dict(zip(first, said, strict=True))
    t.log("generator", t.mean({"verified": [first[key] == n for n, key in enumerate(keys)]}))
    verifications = [of_key[key] for key in keys]
    solutions.columns |= verification_columns(verifications)
    return Judged([v.usable_steps for v in verifications], [v.verdict for v in verifications], verifications)


def verified(t: Play, draw: str, solutions: Rollouts) -> list[Verification]:
    """What --verifications of each solution say as one; with --verify-relabelled those of it relabelled take part."""
    said, k = [t.read_verifications(t.verify(draw, solutions))], t.args.verifications
    if t.args.verify_relabelled:
        rollouts = t.sample(f"{draw}_relabelled", relabelled(t, solutions), wrap=empty_verifier_prompt)
        said.append(t.read_verifications(rollouts))
    return [strictest([v for part in said for v in part[n * k: n * k + k]]) for n in range(len(solutions))]


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

def posterior(t: Play, solutions: Rollouts, verdicts: list[list[bool] | None],
              calibration: tuple[list, list] | None = None) -> list[list[float] | None]:
    """The chance given all verdicts on the solution and its outcome, and how far verdicts could be believed before. In
    a wrong solution of which nothing is blamed every step is doubted. Blame in a right one counts for less. A solution
    without an answer may lack steps and have no wrong one, so its outcome says nothing. calibration: verdicts and gold
    labels of other solutions' steps, by which verdicts are believed."""
    answers = answers_of(t.task, solutions.texts)
    outcomes = [None if answer is None else outcome
                for outcome, answer in zip(solutions.columns["outcome"], answers, strict=True)]
    trust, reduce = VerdictTrust(**t.memory.get("trust", {})), summed_by(t)
    if calibration:
        trust.calibrate(*calibration, reduce)
    trust.observe(verdicts, outcomes, reduce)
    t.memory["trust"] = asdict(trust)
    t.log("generator", {f"trust/{name}": getattr(trust, name) for name in ("right_if_right", "right_if_wrong", "luck")})
    chances = [row and trust.chances(row, outcome) for row, outcome in zip(verdicts, outcomes, strict=True)]
    solutions.columns["step_chances"] = chances
    return chances


def calibrated(t: Play, solutions: Rollouts, verdicts: list[list[bool] | None]) -> list[list[float] | None]:
    """`posterior`, with the worth of verdicts counted in each step on the same few solutions, whose gold step labels
    are known (ZeroCoder, arXiv 2604.07864: ten labelled ones recalibrate its selector). They are of the generator as it
    was at first, of problems of SFT."""
    known = fixed_solutions(t, "generator", 1, "calibration", "sft", t.args.num_calibration)
    labels = [labels_of(t.task, problem, text) for problem, text in zip(known.problems(), known.texts, strict=True)]
    said = [v.usable_steps for v in verified(t, "calibration_verdicts", known)]
    return posterior(t, solutions, verdicts, (said, labels))


def summed_by(t: Play):
    """The sum over ranks of a tensor on CPU."""
    return lambda x: t.reduce(x.to(t.device, wide_dtype(t.device)))


STEP_REWARDS = {"verdicts": lambda t, solutions, verdicts: verdicts, "posterior": posterior,  # eq. 3, and ours
                "calibrated": calibrated}


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


# What else a judge's word changes: the outcome's reward, and alpha

def less_if_flawed(t: Play, solutions: Rollouts, rewards: list[float | None], judged: Judged) -> list[float | None]:
    """A right solution earns --flawed-reward of its reward where a step of it is blamed, or the whole if nothing is
    said of steps (FAPO, arXiv 2510.22543: 0 between 1 and -1, which is 1/2 here)."""
    outcomes = solutions.columns["outcome"]
    flawed = [bool(outcome) and any(said is not None and said < 0.5 for said in steps or [final])
              for outcome, steps, final in zip(outcomes, judged.steps, judged.finals, strict=True)]
    t.log("generator", t.mean({"flawed": [is_flawed for is_flawed, outcome in zip(flawed, outcomes, strict=True)
                                          if outcome]}))
    return [t.args.flawed_reward * reward if is_flawed else reward
            for reward, is_flawed in zip(rewards, flawed, strict=True)]


def verdict_skill(t: Play, solutions: Rollouts, judged: Judged) -> float:
    """J of the judge's final verdicts, over this batch and those before."""
    skill, finals = VerdictSkill(**t.memory.get("skill", {})), [None if f is None else f > 0.5 for f in judged.finals]
    j = skill.observe(finals, solutions.columns["outcome"], summed_by(t))
    t.memory["skill"] = asdict(skill)
    t.log("generator", {"verdict_skill": j})
    return j


# What a step samples for this

def verdict_draws(args, verdict: Draw) -> dict[str, Draw]:
    """The verdicts on a step's solutions, and what --step-rewards calibrated and --verify-relabelled need beside."""
    found, calibrates = {"verdicts": verdict}, args.step_rewards == "calibrated"
    if calibrates:
        found["calibration_verdicts"] = verdict._replace(num_prompts=args.num_calibration, split="sft")
    if args.verify_relabelled:
        found |= {f"{name}_relabelled": draw for name, draw in found.items()}
    if calibrates:
        found["calibration"] = Draw("generator", args.num_calibration, 1, args.max_new_tokens, times=1, split="sft")
    return found
