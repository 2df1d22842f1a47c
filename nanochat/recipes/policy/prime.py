"""PRIME (Cui et al. 2025): a generator and an implicit process reward model, trained together. arXiv 2502.01456.

The process reward of a token is beta times the log-ratio of the PRM to its own SFT start, so outcomes alone train it.
The advantage is that of RLOO on outcomes plus that of RLOO on process rewards. The defaults are those that work here.
The released settings are --accuracy-filter 0.2 0.8 --process-norm batch, 256 problems with 4 rollouts each, and rates
of 5e-7 (generator) and 1e-6 (PRM).

Departures:
1. Every problem with right and wrong solutions is trained on. With the paper's 4 rollouts its filter, .2 to .8, keeps
   just these. With 8 it leaves out problems of one or seven right solutions.
2. --prm-lr is 3e-5, beside a generator's 1e-4. In the released settings it is twice the generator's. From 1e-4 on the
   PRM is gamed here (dev/tuning.md).
3. Process rewards count as they are. The released code divides them by their largest return, which makes the small ones
   of a PRM that has hardly moved as large as outcomes. --process-norm batch does that, with one maximum over all ranks
   instead of one for each.
4. One optimizer step of each role per batch; the released code takes several on parts of it.
5. Problems that are left out are counted; the batch is not filled up with others.
6. The mean of the other rollouts' mean process rewards is subtracted, as in the paper's equation. The released code
   also adds (r_t - the rollout's own mean) / (K - 1).
7. The last token keeps its process reward, as in the released code; the later recipe in verl drops it.
8. Rollouts that cannot be scored are left out, so K is the number of those that are.
9. Gradients of both roles are clipped at --max-grad-norm; the released settings clip the PRM's at 10.
"""
from dataclasses import replace

import torch

from nanochat.cli import SHARE, above, at_least
from nanochat.common import BadInput
from nanochat.kernels.losses import PolicyLoss
from nanochat.rl.credit.advantages import SparseRewards, to_go, whiten
from nanochat.rl.credit.aggregation import check_one_update
from nanochat.rl.credit.rewards import keep_groups, terminal_rewards
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.measure.observe import log_odds_scores, log_rewards, log_variances
from nanochat.rl.play.play import Draw, Play, Update, solution_draws
from nanochat.rl.records.rollouts import Rollouts

STATUS = "runs: process rewards are not shown to add to outcomes (-0.1 ± 2.4)"
ROLES = {"generator": RoleSpec("--model-tag"), "prm": RoleSpec("--model-tag", lr="--prm-lr", reference=True)}
SHOWN = {"prm": ["bce", "pair_accuracy", "step_auc"]}
evaluate = pass_at_1
EPSILON = 1e-6  # added to divisors


def add_args(group) -> None:
    group.add_argument("--prm-beta", type=above(0), default=0.05, help="beta: process reward per log-ratio")
    group.add_argument("--prm-update", default="after", choices=["before", "after", "none"],
                       help="whether the PRM is updated before or after it scores a batch")
    group.add_argument("--prm-freeze-after", type=at_least(-1), default=-1,
                       help="updates of the PRM, which then stays as it is; -1 = never. With 0 (or --prm-update none) "
                       "it equals its reference, and outcomes alone reward")
    group.add_argument("--accuracy-filter", type=SHARE, nargs=2, default=None, metavar=("LOW", "HIGH"),
                       help="accuracies of the problems that are trained on; 0 1 = all; default: those with right and "
                       "wrong solutions")
    group.add_argument("--process-norm", default="none", choices=["none", "batch"],
                       help="batch: process rewards are divided by their largest return")
    group.set_defaults(advantage="rloo", kl_coef=0.0, aggregation="token", prm_lr=3e-5)


def accuracies(args) -> tuple[float, float]:
    """The lowest and the highest share of right solutions of a problem that is trained on."""
    G = args.num_samples
    return tuple(args.accuracy_filter or (1 / G, (G - 1) / G))


def check(args, task) -> None:
    low, high = accuracies(args)
    if low > high:
        raise BadInput(f"--accuracy-filter {low} {high}: must be two shares, the lower one first")
    if args.advantage != "rloo":
        raise BadInput(f"--advantage {args.advantage}: PRIME's is rloo")
    check_one_update(args)


def updates(args) -> dict[str, int]:
    most = 0 if args.prm_update == "none" else args.prm_freeze_after
    return {"generator": args.num_steps, "prm": args.num_steps if most < 0 else min(args.num_steps, most)}


def draws(args) -> dict[str, Draw]:
    return solution_draws(args) | {
        "scored": Draw("prm", args.examples_per_step, args.num_samples, args.max_new_tokens, updates(args)["prm"],
                       trained=True, teacher_forced=True, scored=2 if args.prm_update == "before" else 1)}


def prm_coefficients(q: torch.Tensor, outcomes: list[bool], mask: torch.Tensor, beta: float) -> torch.Tensor:
    """Minus the gradient of BCE(sigma(beta sum_t q_t), outcome) in each token's logprob. q, mask (N, T) -> (N, T)"""
    right = torch.tensor(outcomes, dtype=q.dtype, device=q.device)
    return beta * (right - torch.sigmoid(beta * q.sum(dim=1)))[:, None] * mask


def process_rloo(rewards: torch.Tensor, mask: torch.Tensor, group_id: torch.Tensor) -> torch.Tensor:
    """Process rewards less the mean, over the group's K - 1 other rollouts, of their mean reward; 0 in a group of one.
    rewards, mask (N, T), group_id (N,) -> (N, T)"""
    means = rewards.sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # (N,)
    total = torch.zeros_like(means).index_add_(0, group_id, means)[group_id]
    K = torch.bincount(group_id)[group_id]
    centred = rewards - ((total - means) / (K - 1).clamp(min=1))[:, None]
    return centred * mask * (K > 1)[:, None]


def largest_return(rewards: torch.Tensor, reduce) -> torch.Tensor:
    """The largest return in size over all rollouts of all ranks. rewards (N, T) -> ()"""
    sizes = to_go(rewards).abs().flatten()
    return reduce(torch.cat([sizes, sizes.new_zeros(1)]).max(), "max")  # a rank may have no rollouts


def play(t: Play):
    solutions = t.solve("solutions", t.problems())
    solutions.columns = {"outcome": t.check(solutions)}
    rollouts = filtered(t, solutions)
    if not t.total(len(rollouts)):
        return  # on no rank a problem that is trained on
    ref_logprobs = t.logprobs("prm", rollouts, reference=True)
    q = t.logprobs("prm", rollouts) - ref_logprobs                                           # (N, T)
    log_odds_scores(t, "prm", rollouts, t.args.prm_beta * q)  # it has not yet learned from these rollouts
    learn = prm_update(rollouts, q, t.args.prm_beta)                                         # L_CE
    when = t.args.prm_update if t.steps["prm"] < t.totals["prm"] else "none"
    if when == "before":
        yield learn
        q = t.logprobs("prm", rollouts) - ref_logprobs
        log_odds_scores(t, "prm", rollouts, t.args.prm_beta * q, "rescored/")
    places = torch.arange(q.shape[1], device=t.device).expand(q.shape)
    log_variances(t, "generator", rollouts, {
        "outcome": terminal_rewards(rollouts.columns["outcome"], rollouts.lengths),
        "process": SparseRewards(t.args.prm_beta * q, places, rollouts.mask)})
    yield Update("generator", [(rollouts, advantages_of(t, rollouts, q))])                   # L_CLIP
    if when == "after":
        yield learn


def prm_update(rollouts: Rollouts, q: torch.Tensor, beta: float) -> Update:
    """A step on the mean over rollouts of the PRM's cross-entropy. q (N, T): of the PRM as it is."""
    coefficients = prm_coefficients(q, rollouts.columns["outcome"], rollouts.mask, beta)
    not_its_own = replace(rollouts, sampler_logprobs=torch.full_like(rollouts.sampler_logprobs, float("nan")))
    return Update("prm", [(not_its_own, coefficients)], PolicyLoss("reinforce"), aggregation="rollout")


def filtered(t: Play, solutions: Rollouts) -> Rollouts:
    """Those of problems that are trained on; logs all, and the share of problems that are left out."""
    outcomes, group_id = solutions.columns["outcome"], solutions.group_id.tolist()
    rows = keep_groups(outcomes, group_id, *accuracies(t.args))
    left = {group_id[n] for n in rows}
    log_rewards(t, "generator", solutions, outcomes)
    t.log("generator", t.mean({"rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes],
                               "filtered": [g not in left for g in range(len(solutions.prompts))]}))
    return solutions.select(rows)


def advantages_of(t: Play, rollouts: Rollouts, q: torch.Tensor) -> torch.Tensor:
    """RLOO on process rewards plus RLOO on outcomes, as returns, whitened over the batch. q (N, T) -> (N, T)"""
    rewards = t.args.prm_beta * q                                                            # r(y_t)
    largest = largest_return(rewards, t.reduce)
    if t.args.process_norm == "batch":
        rewards = rewards / (largest + EPSILON)                                              # dp_prime.py: prime_norm
    process = to_go(process_rloo(rewards, rollouts.mask, rollouts.group_id))
    outcome = t.advantages(rollouts, rollouts.columns["outcome"], preset="rloo")
    t.log("generator", {"largest_process_return": largest.item()})
    return whiten(process + outcome, rollouts.mask, t.reduce)                                # core_algos.py
