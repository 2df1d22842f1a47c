"""Refit (ours): a policy, and a verifier that is fitted again on its samples every k steps. After arXiv 2110.14168.

The middle between a frozen verifier and one that RL trains. The verifier gives the chance that a solution is right, as
the log-odds of the verdict token: behind each step, at the end or at every token (--refit-judge). It learns the
outcomes of the policy's own solutions by cross-entropy, at each of these places (Cobbe et al. 2021). Every
--refit-every steps it makes one update on each batch since the last time, so that any k makes as many; 0 leaves it
frozen. The policy is rewarded as in recipe tango: its outcomes, and with weight alpha the chances, of steps by eq. 3.

Departures:
1. Cobbe et al. train the verifier once, on samples of one generator. The rewards, alpha and its decay are RL Tango's
   (arXiv 2505.15034), with chances in place of verdicts.
"""
import torch

from nanochat.common import check_choices, check_least
from nanochat.recipes import tango
from nanochat.rl.advantages import COMBINE, PRESETS
from nanochat.rl.evals import log_rewards, log_variances, pass_at_1
from nanochat.rl.judge_evals import scores_of_judgments
from nanochat.rl.judges import AGGREGATES, JUDGES
from nanochat.rl.log_odds import (PLACES, bce_coefficients, ended, learn_verdicts, log_judgments, log_odds,
                                  verdict_parts)
from nanochat.rl.play import Call, Play, Update
from nanochat.rl.pool import completions_of, scored_solutions
from nanochat.rl.prompts import solve_prompt
from nanochat.rl.rewards import outcome_rewards, step_rewards, terminal_rewards
from nanochat.rl.roles import RoleSpec
from nanochat.rl.schedules import exponential_decay

TAGS = dict(family="generator-verifier", verifier="log-odds, refitted on outcomes", reward="outcome + process",
            credit="z-score of the sum")
ROLES = {"generator": RoleSpec("--model-tag"), "verifier": RoleSpec("--verifier-tag", "-ver", lr="--verifier-lr")}
SHOWN = {"generator": ["alpha"], "verifier": ["outcome_auc", "step_auc"]}


def add_args(group) -> None:
    tango.add_alpha_args(group)
    group.add_argument("--refit-every", type=int, default=1,
                       help="k: steps between the verifier's refits, each on all batches since the last; 0 = never")
    group.add_argument("--refit-judge", default="steps",
                       help=f"where the verifier is asked, one of: {', '.join(PLACES)}")
    group.add_argument("--prm-aggregate", default="min",
                       help=f"what the steps' chances make of a solution's, one of: {', '.join(AGGREGATES)}")


def check(args, task) -> None:
    tango.check(args, task)
    check_choices(args, {"refit_judge": PLACES, "prm_aggregate": AGGREGATES})
    check_least(args, {"refit_every": 0})


def updates(args) -> dict[str, int]:
    k = args.refit_every
    return {"generator": args.num_steps, "verifier": args.num_steps // k * k if k else 0}


def calls(args) -> list[Call]:
    size = (args.examples_per_step, args.num_samples, args.max_new_tokens + 1)
    return [Call("generator", "generator", *size[:2], args.max_new_tokens, args.num_steps, trained=True),
            Call("verifier", "judged", *size, args.num_steps, given=True, scored=2),
            Call("verifier", "refitted", *size, updates(args)["verifier"], trained=True, given=True, scored=2)]


def play(t: Play):
    """Solutions, their judgments, an update of the policy, and where it is due the verifier's refit."""
    solutions = t.solve("generator", t.problems(), t.args.num_samples, "generator")
    outcomes, judgments = t.check(solutions), JUDGES[t.args.refit_judge](t, "verifier", solutions)
    alpha = exponential_decay(t.args.alpha_start, t.args.alpha_end, t.progress("generator"))
    sources = {"outcome": outcome_rewards(outcomes, solutions.lengths)}                         # Tango eq. 2
    if t.args.refit_judge == "end":
        sources["final"] = terminal_rewards([j.final for j in judgments], solutions.lengths)
    else:
        step_ends = [s.step_ends for s in t.read_solutions(solutions)]
        sources["steps"] = step_rewards(step_ends, [j.steps for j in judgments], t.device)      # eq. 3, of chances
    weighted = list(zip((1 - alpha, alpha), sources.values(), strict=True))
    advantages = COMBINE[t.args.combine](weighted, solutions.group_id, solutions.tokens.shape[1],
                                         PRESETS[t.args.advantage], t.reduce)
    solutions.columns = {"outcome": outcomes, "chance": [j.final for j in judgments],
                         "step_chances": [j.steps for j in judgments]}
    log_rewards(t, "generator", solutions, outcomes)
    log_variances(t, "generator", solutions, sources)
    t.log("generator", {"alpha": alpha} | t.mean({"rewards/outcome/mean": outcomes,
                                                  "unscorable": [o is None for o in outcomes]}))
    t.log("verifier", scores_of_judgments(t, judgments, solutions, t.args.num_samples))
    samples = scored_solutions(t, solutions, outcomes)
    yield Update("generator", [(solutions, advantages)])
    if t.args.refit_every:
        waiting = [*t.memory.get("samples", []), samples]
        is_due = len(waiting) == t.args.refit_every
        t.memory["samples"] = [] if is_due else waiting
        for batch in waiting if is_due else []:
            yield from refit(t, batch)


def refit(t: Play, batch: dict[str, torch.Tensor]):
    """Cross-entropy of the chance at each place against the solution's outcome, the mean over places."""
    mine = list(range(t.run.rank, len(batch["problem"]), t.run.world))
    problems = [t.task.problem("rl", index) for index in batch["problem"][mine].tolist()]
    prompts = [solve_prompt(t.tokenizer, t.task.fmt, problem) for problem in problems]
    rollouts = ended(t, "verifier", prompts, t.written("verifier", prompts, completions_of(batch, mine)))
    places = PLACES[t.args.refit_judge](rollouts, t.read_solutions(rollouts))                   # (N, T)
    labels = places * batch["outcome"][mine].to(t.device).float()[:, None]
    s = log_odds(t, "verifier", rollouts)
    log_judgments(t, "verifier", s, labels, places)
    parts = verdict_parts(t, rollouts, bce_coefficients(s, labels, places))                     # y - V
    yield from learn_verdicts(t, "verifier", (parts, places.sum().item()))


def evaluate(t: Play) -> dict:
    return pass_at_1(t, "generator")
