"""MedVLSynther (Huang et al. 2025), its text-only core: RL on problems that a verifier has passed. arXiv 2510.25867.

A proposer writes problems and answers them, a verifier scores each by a rubric, and problems with all essentials and a
score of at least 0.90 are learned by GRPO. Proposer and verifier are the starting models and stay as they are.
--min-score 0 is the control without a verifier.

The essentials are that the text is a problem (the task reads it) and that its answer can be read. The score is read
from a verification of the solution that the answer comes from. The proposer's answer, the key, is what solutions are
rewarded by, as in the paper: where it is wrong and passes, the generator learns it. Gold answers are for the log alone.

Departures:
1. No images, and no options to choose from: nothing is said here about multimodal data.
2. The key is of a second completion. The authors' proposer writes question, options and key at once, from a figure and
   its text; here it is shown a reference problem.
3. Their rubric has 7 essentials, 4 to 8 bonus items and penalties. Here a verdict that is not right costs all points,
   and each step is one.
4. Problems are made anew in every step, of which few or none may pass; theirs are made once (13,087 problems).
"""
from dataclasses import replace

from nanochat.cli import SHARE, at_least
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.play.proposals import Proposals, check, log_proposals, propose, propose_prompt  # noqa: F401
from nanochat.rl.records.prompts import Verification, empty_verifier_prompt

STATUS = "runs: its text-only core; the filter keeps better keys, and its gain of 6.0 ± 15.5 is not shown"
ROLES = {"generator": RoleSpec("--model-tag"), "proposer": RoleSpec("--model-tag", trained=False),
         "verifier": RoleSpec("--verifier-tag", "-ver", trained=False)}
SHOWN = {"generator": ["passed", "key_right", "rewards/outcome/mean"]}
evaluate = pass_at_1


def add_args(group) -> None:
    group.add_argument("--min-score", type=SHARE, default=0.9, help="of a problem that is learned; 0 passes all")
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=112)


def draws(args) -> dict[str, Draw]:
    P, G, limit = args.examples_per_step, args.num_samples, args.max_new_tokens
    return {"propose": Draw("proposer", P, 1, limit, wrap=propose_prompt),
            "keys": Draw("proposer", P, 1, limit),
            "verdicts": Draw("verifier", P, 1, args.verifier_max_new_tokens, wrap=empty_verifier_prompt,
                             quoted=limit),
            "solutions": Draw("generator", P, G, limit, trained=True)}


def rubric_score(verification: Verification) -> float:
    """The share of the steps that pass where the verdict is right, else 0; 0 too where it cannot be read."""
    said = verification.usable_steps
    return sum(said) / max(1, len(said)) if verification.verdict and said is not None else 0.0


def play(t: Play):
    proposals = propose(t, "proposer", t.problems(), 1, "propose")
    problems = [problem for problem in proposals.problems if problem]
    keys = t.solve("keys", problems)
    answers = t.answers(keys)
    scores = [rubric_score(v) for v in t.read_verifications(t.verify("verdicts", keys))]
    passed = [answer is not None and score >= t.args.min_score for answer, score in zip(answers, scores, strict=True)]
    learned = [replace(problem, answer=answer)
               for problem, answer, is_in in zip(problems, answers, passed, strict=True) if is_in]
    log_problems(t, proposals, scores, passed, t.check(keys))

    solutions = t.solve("solutions", learned)
    rewards = t.check(solutions)
    gold = {problem.index: problem for problem in problems}
    outcomes = t.check(solutions.with_prompts([replace(prompt, problem=gold[prompt.problem.index])
                                               for prompt in solutions.prompt_of()]))
    solutions.columns = {"outcome": outcomes, "key": [problem.answer for problem in solutions.problems()]}
    log_rewards(t, "generator", solutions, rewards)
    t.log("generator", t.mean({"rewards/outcome/mean": outcomes, "unscorable": [r is None for r in rewards]}))
    if t.total(len(solutions)):  # something passed, on some rank
        yield Update("generator", [(solutions, t.advantages(solutions, rewards))])


def log_problems(t: Play, proposals: Proposals, scores: list[float], passed: list[bool],
                 right: list[bool | None]) -> None:
    """Logs what the verifier passes, and how often an answer that it passes, or does not, is right by gold."""
    log_proposals(t, "proposer", proposals)
    pairs = list(zip(right, passed, strict=True))
    t.log("generator", t.mean({
        "passed": passed, "score": scores, "key_right": [o for o, is_in in pairs if is_in],
        "key_right_of_others": [o for o, is_in in pairs if not is_in]}))
