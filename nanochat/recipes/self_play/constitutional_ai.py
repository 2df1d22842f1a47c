"""Constitutional AI (Bai et al. 2022): a model revises by principles, then judges by them. arXiv 2212.08073.

A constitution is a list of principles, here the task's: rules of a solution that can be checked. For --sl-steps updates
(SL-CAI) the starting model solves a problem, criticises the solution by a principle drawn at random, and revises it,
--revisions times in a row. The generator learns the revisions after the problem alone. Then (RL-CAI) the starting
model is asked which of two solutions is better. The probabilities of its answer are the reward of RL. No gold answer
and no rule has a say: broken principles and pass@1 are for the log. The start is a checkpoint of both roles that can
revise (chat_sft --role both --demo-shares revise:0.3). The paper has 16 principles and 4 revisions of each response.

Departures:
1. A critique is a verification, of which the first step counts that is blamed for the drawn principle. The model has
   learned by SFT what the principles mean; in the paper their text is in the prompt.
2. The preference between two solutions comes from a final verdict on each, by all principles at once: p(T) / (p(T) +
   p(F)) after a written analysis. In the paper both are in one prompt, with one principle.
3. A solution's reward is the mean preference for it over the others of its group, normalised as --advantage says. The
   paper trains a preference model on these labels, with people's for helpfulness among them, and runs PPO on it.
4. The generator of SL-CAI goes on from the starting model. In the paper it is a pretrained model, and learns samples of
   the helpful model too. Only revisions are learned that are ended, of a critique that can be read.
5. The KL of stage RL, with --kl-coef, is to the weights before SL-CAI.
6. Revisions are taught by SFT, worked by the verifier's beliefs. In the measured runs these are right of 90% of the
   facts (--chain-verifier-share 0.1), the generator's of 55%. So what SL-CAI gains is knowledge of that SFT, which it
   passes on to first solutions. The paper's model revises by instruction and a few examples.
"""
import random

from nanochat.cli import at_least
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import SPLITS, are_right
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.measure.scores import share_of
from nanochat.rl.play.pairs import check as check_pairs
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.outcomes import check_task
from nanochat.rl.records.prompts import Verification, empty_verifier_prompt, refine_prompt
from nanochat.rl.records.rollouts import Rollouts, join
from nanochat.rl.verify.log_odds import learn_likelihood
from nanochat.rl.verify.spots import written_chances
from tasks.common import Problem

STATUS = ("works: broken principles fall by 60.8 ± 20.5 without an answer; SFT taught it to revise, by beliefs that "
          "are 90% right")
ROLES = {"generator": RoleSpec("--model-tag"), "start": RoleSpec("--model-tag", trained=False)}
SHOWN = {"generator": ["responses/violated", "revisions/violated", "violated"]}
TABLE = {"gen/pass1_in": "greedy pass@1, in distribution",
         "gen/violated_in": "greedy solutions that break a principle, in distribution",
         "gen/pass1_out": "greedy pass@1, out of distribution",
         "gen/violated_out": "greedy solutions that break a principle, out of distribution"}
CRITIQUE_TOKENS = 4  # the number of a step
MOST_SURE = 0.6  # the highest preference for a solution over another, and 1 less it the lowest


def add_args(group) -> None:
    group.set_defaults(kl_coef=0.0)
    group.add_argument("--sl-steps", type=at_least(0), default=50, help="updates on revisions, out of --num-steps")
    group.add_argument("--revisions", type=at_least(1, int, 1000), default=2, help="in a row, of a solution")
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=112)


def check(args, task) -> None:
    check_pairs(args, task)
    check_task(task, "principles", "violations")


def draws(args) -> dict[str, Draw]:
    P, G, limit, R, sl = args.examples_per_step, args.num_samples, args.max_new_tokens, args.revisions, args.sl_steps
    verify = dict(wrap=empty_verifier_prompt, quoted=limit)
    rl = max(0, args.num_steps - sl)
    return {"responses": Draw("start", P, 1, limit, sl),
            **{f"critiques_{r}": Draw("start", P, 1, args.verifier_max_new_tokens, sl, **verify) for r in range(R)},
            **{f"revisions_{r}": Draw("start", P, 1, limit, sl, wrap=refine_prompt, quoted=limit + CRITIQUE_TOKENS)
               for r in range(R)},
            "learned": Draw("generator", P, R, limit, sl, trained=True, teacher_forced=True),
            "solutions": Draw("generator", P, G, limit, rl, trained=True),
            "feedback": Draw("start", P * G, 1, args.verifier_max_new_tokens, rl, scored=2, **verify)}


def critique(task, principle: str, verification: Verification) -> str | None:
    """Where a solution first breaks a principle, by a verification of it: the number of the step; "" where it does not;
    None where the verification cannot be read. A whole that is wrong without a wrong step lacks the next one."""
    if verification.usable_steps is None or verification.verdict is None:
        return None
    analyses = task.fmt.judgment_steps(verification.text)
    broken = ["" if is_right else task.principle_of(analysis)
              for analysis, is_right in zip(analyses, verification.step_verdicts, strict=True)]
    if not verification.verdict and not any(broken):
        broken.append("complete")
    return str(broken.index(principle) + 1) if principle in broken else ""


def preference(one: float, other: float, most: float) -> float:
    """The chance that a solution is better than another, from the chances that each is right: the first is and the
    second is not, of that and the opposite. From 1 - `most` to `most`; .5 where both are surely right, or wrong."""
    better, worse = one * (1 - other), other * (1 - one)
    chance = better / (better + worse) if better + worse else 0.5
    return min(most, max(1 - most, chance))


def preference_rewards(chances: list[float | None], num_samples: int, most: float) -> list[float | None]:
    """The mean preference for each solution over the others of its group; None where there is no chance of any."""
    rewards = []
    for n, chance in enumerate(chances):
        first = n - n % num_samples
        others = [chances[m] for m in range(first, first + num_samples) if m != n and chances[m] is not None]
        rewards.append(share_of([preference(chance, other, most) for other in others if chance is not None]))
    return rewards


def play(t: Play):
    yield from learn_revisions(t) if t.steps["generator"] < t.args.sl_steps else learn_preferences(t)


def learn_revisions(t: Play):
    """SL-CAI: responses, each criticised and revised several times, and SFT on the revisions."""
    responses = current = t.solve("responses", t.problems())
    responses.columns["outcome"] = t.check(responses)
    critiques, learned = [], []
    for number in range(t.args.revisions):
        current, said = revise(t, current, number)
        kept = [n for n, c in enumerate(said) if c is not None and current.stopped[n]]
        learned.append(current.with_prompts(responses.prompt_of()).select(kept))  # the problem alone
        critiques += said
    log_revisions(t, responses, critiques, current)
    yield from learn_likelihood(t, "generator", join(learned))


def revise(t: Play, solutions: Rollouts, number: int) -> tuple[Rollouts, list[str | None]]:
    """Revisions of solutions, each after a critique by its own principle, and these critiques."""
    problems = solutions.problems()
    principles = [drawn_principle(t, problem, number) for problem in problems]
    said = t.read_verifications(t.verify(f"critiques_{number}", solutions))
    critiques = [critique(t.task, *pair) for pair in zip(principles, said, strict=True)]
    prompts = t.prompts("refine_prompt", problems, solution=solutions.texts, critique=[c or "" for c in critiques])
    revised = t.sample(f"revisions_{number}", prompts, tool=t.sampler.calculator_tool())
    turns = [[["before", text], [f"critique: {principle}", c or ""]]
             for text, principle, c in zip(solutions.texts, principles, critiques, strict=True)]
    revised.columns = {"turns": turns, "outcome": t.check(revised)}
    return revised, critiques


def log_revisions(t: Play, responses: Rollouts, critiques: list[str | None], revisions: Rollouts) -> None:
    """Logs what the last revisions have made of the responses, and what all critiques say."""
    for name, rollouts in (("responses", responses), ("revisions", revisions)):
        t.log("generator", t.mean({f"{name}/violated": [bool(row) for row in violations_of(t, rollouts)],
                                   f"{name}/accuracy": rollouts.columns["outcome"]}))
    t.log(None, {"phase": "revisions"})
    t.log("generator", t.mean({
        "critiques/unread": [c is None for c in critiques], "critiques/blamed": [bool(c) for c in critiques],
        "revisions/cut": (~revisions.stopped).tolist(),
        "revisions/copied": [a == b for a, b in zip(responses.texts, revisions.texts, strict=True)]}))


def drawn_principle(t: Play, problem: Problem, number: int) -> str:
    """The principle by which a solution is revised: the same on any number of ranks."""
    return random.Random(f"{t.args.seed}-{t.step}-{number}-{problem.index}").choice(t.task.principles)


def learn_preferences(t: Play):
    """RL-CAI: a group of solutions of each problem, rewarded by the starting model's preferences among them."""
    solutions = t.solve("solutions", t.problems())
    # that of the final verdict, after the analysis; None where it cannot be read
    chances = [row[-1] for row in written_chances(t, "start", t.verify("feedback", solutions))]
    rewards = preference_rewards(chances, t.args.num_samples, MOST_SURE)
    outcomes, found = t.check(solutions), violations_of(t, solutions)
    solutions.columns = {"outcome": outcomes, "chance": chances, "violations": found}
    log_rewards(t, "generator", solutions, rewards)
    t.log(None, {"phase": "preferences"})
    t.log("generator", t.mean({
        "violated": [bool(row) for row in found],
        **{f"violations/{principle}": [principle in row for row in found] for principle in t.task.principles},
        "rewards/outcome/mean": outcomes, "feedback/unread": [chance is None for chance in chances],
        "feedback/right": [c for c, o in zip(chances, outcomes, strict=True) if o is True],
        "feedback/wrong": [c for c, o in zip(chances, outcomes, strict=True) if o is False]}))
    yield Update("generator", [(solutions, t.advantages(solutions, rewards))])


def violations_of(t: Play, rollouts: Rollouts) -> list[list[str]]:
    """The principles that each solution breaks, by the task's rules."""
    return [t.task.violations(*pair) for pair in zip(rollouts.problems(), rollouts.texts, strict=True)]


def evaluate(t: Play) -> dict:
    """Greedy pass@1, the share of the solutions that break a principle, and of each principle."""
    scores = {}
    for split, name in SPLITS.items():
        solutions = t.solve("eval", t.problems(t.args.eval_examples, split), 1, role="generator", greedy=True)
        right, found = are_right(t.gather(t.check(solutions)), split), t.gather(violations_of(t, solutions))
        kinds = {"pass1": right, "violated": [bool(row) for row in found],
                 **{f"violations/{p}": [p in row for row in found] for p in t.task.principles}}
        scores |= {f"gen/{kind}_{name}": share_of(row) for kind, row in kinds.items()}
    return scores
