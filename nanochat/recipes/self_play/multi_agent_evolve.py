"""Multi-Agent Evolve (Chen et al. 2025): one model proposes problems, solves them and judges both. arXiv 2510.23595.

The proposer writes a problem after a reference problem, the solver solves problems of the pool, the judge writes a
verification and so gives a score s from 1 to 10, worth (s - 1) / 9, or 0.5 where it cannot be read. The proposer earns
(quality + difficulty + format) / 3 with difficulty = 1 - the mean score of n = 3 solutions; with a quality below 0.7 no
difficulty, and the problem stays out of the pool; 0 for what is no problem. The solver earns half its score and half
its format, the judge its format alone. Advantages are whitened within the batch of each role, then all roles share one
update with an entropy bonus of 1e-3: --advantage has no say. These rewards and settings are those of the authors' code
(reward_managers.py, azr_ppo_trainer_general.yaml) but for the departures; its script samples n = 5.

No gold answer enters an update by default. Nothing then holds the judge's scores to the truth, and the log shows how
far they part: judge/score beside rewards/outcome/mean. Variants use gold answers: --judge-reward grounded pays the
judge as Tango does, --proposer-reward one_minus, azr and parabola pay the proposer by the share of right solutions.

Departures:
1. A score comes from a written verification of a solution: 10 where its verdict is right; else below 3, by the share of
   right steps, of which one fewer than all is the most. The authors ask for a number, by a rubric that allows a
   solution with an error 1 to 3, an incomplete one 4 to 7 and a right one 8 to 10.
2. A solution has one verification. Theirs has n, of which those without a number are left out of the mean.
3. The quality of a problem is the highest score of its n solutions, so it is kept if a solution is judged right. The
   authors ask the judge about the problem itself n times, which no demonstration teaches here.
4. The judge is trained on this step's solutions, theirs on pairs of problem and solution out of all steps.
5. The format is read by the task. Of a problem it is 1, or the proposal earns 0; of a solution 1 or 0; of a
   verification as in recipe tango. Theirs counts tags, and gives 0.5 for too many.
6. G proposals after each reference, and G solutions of each problem. Theirs has one, half of the proposals without a
   reference.
7. The pool starts empty, and reference problems stand in for what it lacks. Theirs starts with 1000 of these.
8. One optimizer step for all rollouts. Theirs has one for every 64, so its clip (0.2, 0.28 and 3) has a say.
9. A proposal that is a text of a test split takes no part.
"""
import torch

from nanochat.cli import at_least
from nanochat.rl.credit.advantages import whiten
from nanochat.rl.credit.rewards import format_reward, terminal_rewards, verdict_reward
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import scores_of_pair
from nanochat.rl.measure.observe import gathered_verdict_scores, log_rewards, verification_columns
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.play.proposals import (BY_ACCURACY, Proposals, accuracies, check, drawn, earns,  # noqa: F401
                                        gathered, log_proposals, propose, propose_prompt, spread)
from nanochat.rl.records.outcomes import answers_of
from nanochat.rl.records.prompts import Verification, empty_verifier_prompt
from nanochat.rl.records.rollouts import Rollouts

STATUS = "runs: without an answer it is shown to gain for 20 steps (+18.3 ± 17.9), not at the end (+24.0 ± 34.6)"
ROLES = {"generator": RoleSpec("--model-tag")}
SHOWN = {"generator": ["proposals/valid", "proposals/difficulty", "judge/score", "rewards/outcome/mean"]}
TABLE = {"gen/pass1_in": "solver greedy pass@1, in distribution",
         "gen/pass1_out": "solver greedy pass@1, out of distribution",
         "gen/balanced_acc_fixed": "judge balanced accuracy, fixed solutions",
         "gen/pred_pos_rate_current": "solutions that the judge calls right, current solver",
         "gen/label_pos_rate_current": "solutions that are right, current solver"}
NEUTRAL = 0.5        # the score of what cannot be read
LEAST_QUALITY = 0.7  # of a problem that is kept
JUDGE_REWARDS = {
    "format": lambda verification, outcome: format_reward(verification.unmet),
    "grounded": lambda verification, outcome: verdict_reward(verification.verdict, outcome, verification.unmet, 1.0)}


def add_args(group) -> None:
    group.set_defaults(kl_coef=0.0, entropy_coef=1e-3, advantage="reinforce++", aggregation="token")
    group.add_argument("--proposer-reward", default="judge", choices=["judge", *BY_ACCURACY],
                       help="judge: (quality + difficulty + format) / 3; the others: by the share of right solutions")
    group.add_argument("--judge-reward", default="format", choices=list(JUDGE_REWARDS))
    group.add_argument("--num-attempts", type=at_least(1), default=3, help="n: solutions that reward a proposal")
    group.add_argument("--pool-size", type=at_least(1), default=1024, help="proposed problems that are kept")
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=96, help="of a judge's verification")


def draws(args) -> dict[str, Draw]:
    P, G, n = args.examples_per_step, args.num_samples, args.num_attempts
    limit, judged = args.max_new_tokens, args.verifier_max_new_tokens
    verify = dict(wrap=empty_verifier_prompt, quoted=limit)
    return {"propose": Draw("generator", P, G, limit, trained=True, wrap=propose_prompt),
            "attempts": Draw("generator", P * G, n, limit),
            "attempt_scores": Draw("generator", P * G * n, 1, judged, **verify),
            "solutions": Draw("generator", P, G, limit, trained=True),
            "judge": Draw("generator", P * G, 1, judged, trained=True, **verify)}


def judge_score(verification: Verification) -> float:
    """(s - 1) / 9 of the score s from 1 to 10 that a verification comes to, 0.5 where it cannot be read."""
    said = verification.usable_steps
    if verification.verdict is None or said is None:
        return NEUTRAL
    right = min(sum(said), len(said) - 1)  # a wrong whole has a wrong step, also where none is blamed
    s = 10 if verification.verdict else 1 + 2 * max(0, right) / max(1, len(said))
    return (s - 1) / 9


def proposer_reward(scores: list[float]) -> float:
    """What a problem earns whose solutions have these scores; its format is 1."""
    quality, difficulty = max(scores), 1 - sum(scores) / len(scores)
    return (quality + difficulty * (quality >= LEAST_QUALITY) + 1) / 3


def role_advantages(rewards: list[float | None], rollouts: Rollouts, reduce) -> torch.Tensor:
    """Each token's later rewards, whitened over all tokens of a role (Task-Relative REINFORCE++); None takes no part.
    -> (N, T)"""
    earned = terminal_rewards(rewards, rollouts.lengths)  # (N, 1)
    return whiten(earned.values.expand(rollouts.tokens.shape), rollouts.mask & earned.valid, reduce)


def play(t: Play):
    G, pool, references = t.args.num_samples, t.memory.get("pool", []), t.problems()
    proposals = propose(t, "generator", references, G, "propose")
    earned, kept = rewarded(t, proposals)

    problems = [old or reference for old, reference in zip(drawn(t, pool), references, strict=True)]
    solutions = t.solve("solutions", problems)
    outcomes = t.check(solutions)  # for the log, and for --judge-reward grounded
    judgments = t.verify("judge", solutions)
    verifications = t.read_verifications(judgments)
    scores = [judge_score(v) for v in verifications]
    forms = [float(stopped and answer is not None) for stopped, answer
             in zip(solutions.stopped.tolist(), answers_of(t.task, solutions.texts), strict=True)]
    solved = [0.5 * score + 0.5 * form for score, form in zip(scores, forms, strict=True)]
    judged = [JUDGE_REWARDS[t.args.judge_reward](v, o) for v, o in zip(verifications, outcomes, strict=True)]

    solutions.columns = {"outcome": outcomes, "judge_score": scores}
    judgments.columns = {"outcome": outcomes, "reward": judged} | verification_columns(verifications)
    log_rewards(t, "generator", solutions, solved)
    log_judge(t, solutions, judgments, verifications)
    t.memory["pool"] = (pool + gathered(t, proposals, kept, G))[-t.args.pool_size:]
    t.log("generator", {"pool_size": len(pool)})
    parts = [(proposals.rollouts, earned), (solutions, solved), (judgments, judged)]
    yield Update("generator", [(rollouts, role_advantages(rewards, rollouts, t.reduce)) for rollouts, rewards in parts])


def rewarded(t: Play, proposals: Proposals) -> tuple[list[float | None], list[int]]:
    """What each proposal earns, and the places of those that are kept."""
    n, by_accuracy = t.args.num_attempts, BY_ACCURACY.get(t.args.proposer_reward)
    attempts = t.solve("attempts", [problem for problem in proposals.problems if problem], n)
    scores = [judge_score(v) for v in t.read_verifications(t.verify("attempt_scores", attempts))]
    by_problem = [scores[i: i + n] for i in range(0, len(scores), n)]
    shares = accuracies(t.check(attempts), n)
    kept = [place for place, row in zip(proposals.valid, by_problem, strict=True)
            if by_accuracy or max(row) >= LEAST_QUALITY]
    values = spread(shares if by_accuracy else by_problem, proposals.problems)
    earned = [earns(why, value, by_accuracy or proposer_reward)
              for why, value in zip(proposals.refusals, values, strict=True)]
    proposals.rollouts.columns |= {"reward": earned, "scores": spread(by_problem, proposals.problems),
                                   "solved": spread(shares, proposals.problems)}
    log_proposals(t, "generator", proposals, reward=earned, solved=shares, quality=[max(row) for row in by_problem],
                  difficulty=[1 - sum(row) / n for row in by_problem],
                  kept=[place in kept for place in proposals.valid])
    return earned, kept


def log_judge(t: Play, solutions: Rollouts, judgments: Rollouts, verifications: list[Verification]) -> None:
    """Logs how right the solutions are by gold, and how right the judge is about them."""
    outcomes = solutions.columns["outcome"]
    found = gathered_verdict_scores(t, solutions, outcomes, verifications) | t.mean({
        "score": solutions.columns["judge_score"], "reward": judgments.columns["reward"],
        "accuracy": [v.verdict == o for v, o in zip(verifications, outcomes, strict=True) if o is not None]})
    t.log("generator", {f"judge/{name}": value for name, value in found.items()})
    t.log("generator", t.mean({"rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes]}))


def evaluate(t: Play) -> dict:
    """pass@1, and how well the same model judges."""
    return scores_of_pair(t, "generator", "generator")
