"""Refit (ours): a policy, and a verifier that is fitted again on its samples every k steps. After arXiv 2110.14168.

The middle between a frozen verifier and one that RL trains. The verifier gives the chance that a solution is right, as
the log-odds of the verdict token. It learns the outcomes of the policy's own solutions by cross-entropy, at each place
where it is asked (Cobbe et al. 2021). Every --refit-every steps it makes one update on each batch since the last time,
so that any k makes as many. The policy is rewarded as in recipe tango: its outcomes, and with weight alpha the chances.

Departures:
1. Cobbe et al. train the verifier once, on samples of one generator. The rewards, alpha and its decay are RL Tango's
   (arXiv 2505.15034), with chances in place of verdicts, and --credit and --negative-weight of recipe tango's 4.
"""
import torch

from nanochat.cli import at_least
from nanochat.recipes.tango import tango
from nanochat.recipes.tango._judged import asked
from nanochat.recipes.tango._pool import completions_of, scored_solutions
from nanochat.rl.credit.aggregation import check_one_update
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.play.play import Draw, Play, solution_draws
from nanochat.rl.records.prompts import solve_prompt
from nanochat.rl.verify.judge_evals import add_judged_args, scores_as_judge
from nanochat.rl.verify.judges import OF_THE_WHOLE, judge_draws
from nanochat.rl.verify.log_odds import (PLACES, bce_coefficients, ended, learn_verdicts, log_judgments, log_odds,
                                         verdict_parts)

STATUS = "runs: no gain over GRPO is shown (-3.8 ± 5.0)"
ROLES = {"generator": RoleSpec("--model-tag"), "verifier": RoleSpec("--verifier-tag", "-ver", lr="--verifier-lr")}
SHOWN = {"generator": ["alpha", "verdicts/outcome_auc"], "verifier": ["bce"]}


def add_args(group) -> None:
    tango.add_alpha_args(group)
    tango.add_credit_args(group)
    group.add_argument("--refit-every", type=at_least(0), default=1,
                       help="k: steps between the verifier's refits, each on all batches since the last; 0 = never")
    group.add_argument("--judge", default="steps", choices=list(PLACES), help="where the verifier is asked")
    group.set_defaults(step_rewards="verdicts", weigh_by_j=False)
    add_judged_args(group)


def check(args, task) -> None:
    tango.check_alpha(args, task)
    if args.refit_every:
        check_one_update(args)


def updates(args) -> dict[str, int]:
    k = args.refit_every
    return {"generator": args.num_steps, "verifier": args.num_steps // k * k if k else 0}


def draws(args) -> dict[str, Draw]:
    size = (args.examples_per_step, args.num_samples)
    refitted = Draw("verifier", *size, args.max_new_tokens + 1, updates(args)["verifier"], trained=True,
                    teacher_forced=True, scored=2)
    return solution_draws(args) | judge_draws(args, args.judge, *size) | {"refitted": refitted}


def play(t: Play):
    policy, = tango.generator_step(t, asked, "verdict" if t.args.judge in OF_THE_WHOLE else "steps")
    solutions, _ = policy.parts[0]
    samples = scored_solutions(t, solutions, solutions.columns["outcome"])
    yield policy
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
    places = PLACES[t.args.judge](rollouts, t.read_solutions(rollouts))                   # (N, T)
    labels = places * batch["outcome"][mine].to(t.device).float()[:, None]
    s = log_odds(t, "verifier", rollouts)
    log_judgments(t, "verifier", s, labels, places)
    parts = verdict_parts(t, rollouts, bce_coefficients(s, labels, places))                     # y - V
    yield from learn_verdicts(t, "verifier", (parts, places.sum().item()))


def evaluate(t: Play) -> dict:
    return pass_at_1(t, "generator") | scores_as_judge(t, t.args.judge)
