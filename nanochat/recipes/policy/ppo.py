"""PPO (Schulman et al. 2017): a policy whose baseline at each token is a critic's estimate. arXiv 1707.06347.

The critic reads the solution as its own completion. Before each token it says how likely the solution will end right:
V_t = p(T) / (p(T) + p(F)), the chance of the verdict token there. The advantages are generalised estimates (Schulman et
al. 2016, arXiv 1506.02438) with gamma 1 and --gae-lambda, whitened over the batch. The critic learns the returns
A_t + V_t, which are from 0 to 1 as the rewards are, by their cross-entropy.

VAPO (Yue et al. 2025, arXiv 2504.05118) adds a lambda by length (--gae-alpha 0.05 there), a critic that first learns
alone on solutions of the fixed policy (--value-pretrain 50), and the likelihood of right solutions (--lm-coef 0.1),
with --clip-high 0.28 and --aggregation token. Its alpha is for long solutions: lambda is 0 up to 1 / alpha tokens.

Departures:
1. The critic is generative: V is the LM head's, sigma of the difference of two of its rows, not a linear head's.
2. Cross-entropy in place of the squared error, and no clipping of the critic's change.
3. The critic is a model of its own, makes one optimizer step per batch, and has a rate of its own (--critic-lr).
4. One batch is one micro-batched gradient, also with --updates-per-batch: no minibatches.
5. The KL to the start is a term of the loss (--kl-coef), not of the reward as in InstructGPT.
6. --lm-coef is part of the advantages, which is exact where the ratio is 1: it needs --updates-per-batch 1.
"""
import torch

from nanochat.cli import SHARE, at_least
from nanochat.common import BadInput, wide_dtype
from nanochat.kernels.losses import PolicyLoss
from nanochat.rl.credit.advantages import gae, whiten
from nanochat.rl.credit.rewards import terminal_rewards
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.measure.observe import log_rewards, log_variances
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.verify.log_odds import bce_coefficients, log_judgments, log_odds, sum_of, verdict_parts

STATUS = "runs: no gain over GRPO is shown in two settings, -12.5 ± 29.4 and -3.5 ± 13.8; its critics explain little"
ROLES = {"generator": RoleSpec("--model-tag"), "critic": RoleSpec("--critic-tag", lr="--critic-lr")}
SHOWN = {"critic": ["bce", "explained"]}
evaluate = pass_at_1


def add_args(group) -> None:
    group.add_argument("--gae-lambda", type=SHARE, default=1.0,
                       help="1: what the outcome says, less V; lower: more of what the critic says of the next tokens")
    group.add_argument("--gae-alpha", type=at_least(0, float), default=0.0,
                       help="above 0: the policy's lambda is 1 - 1 / (alpha l) for l tokens, the critic's --gae-lambda")
    group.add_argument("--value-pretrain", type=at_least(0), default=0,
                       help="steps in which the critic alone learns, with lambda 1, before the others")
    group.add_argument("--lm-coef", type=at_least(0, float), default=0.0,
                       help="weight of the mean -log pi of right solutions' tokens; needs --aggregation token")


def check(args, task) -> None:
    if args.lm_coef and (args.aggregation != "token" or args.updates_per_batch > 1):
        raise BadInput(f"--lm-coef {args.lm_coef}: needs --aggregation token and --updates-per-batch 1")


def updates(args) -> dict[str, int]:
    return {"generator": args.num_steps, "critic": args.value_pretrain + args.num_steps}


def draws(args) -> dict[str, Draw]:
    size = (args.examples_per_step, args.num_samples, args.max_new_tokens, args.value_pretrain + args.num_steps)
    return {"solutions": Draw("generator", *size, trained=True),
            "valued": Draw("critic", *size, trained=True, teacher_forced=True, scored=2)}


def adaptive_lambda(lengths: torch.Tensor, alpha: float) -> torch.Tensor:
    """VAPO: 1 - 1 / (alpha l), not below 0, so the weights of the errors add up to alpha l. lengths (N,) -> (N,)"""
    return (1 - 1 / (alpha * lengths)).clamp(min=0)


def likelihood_bonus(right: torch.Tensor, lengths: torch.Tensor, coef: float, reduce) -> torch.Tensor:
    """What each token's advantage gains by coef * the mean of -log pi over the tokens of right solutions, where the
    policy's own loss is a mean over all tokens. right, lengths (N,) -> (N,)"""
    num_tokens, num_right = reduce(torch.stack([lengths.sum(), (right * lengths).sum()]))
    return coef * right * num_tokens / num_right.clamp(min=1)


def play(t: Play):
    is_pretraining = t.steps["critic"] < t.args.value_pretrain
    solutions = t.solve("solutions", t.problems())
    outcomes = solutions.columns["outcome"] = t.check(solutions)
    known = solutions.select([n for n, outcome in enumerate(outcomes) if outcome is not None])
    log_rewards(t, "generator", solutions, outcomes)
    t.log("generator", t.mean({"rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes]}))
    if not t.total(len(known)):
        return  # no rank has a solution that can be scored
    source, mask = terminal_rewards(known.columns["outcome"], known.lengths), known.mask
    rewards = torch.zeros(known.tokens.shape, device=t.device).scatter_(1, source.token_index, source.values)  # (N, T)
    s = log_odds(t, "critic", known)
    values = torch.sigmoid(s) * mask                                                               # V_t
    estimates = lambda lam: gae(rewards, values, mask, gamma=1.0, lam=lam)
    advantages = estimates(1.0 if is_pretraining else t.args.gae_lambda)
    returns = advantages + values
    log_variances(t, "generator", known, {"outcome": source})
    log_judgments(t, "critic", s, returns, mask)
    t.log("critic", {"explained": explained_variance(t, returns[mask], values[mask])})
    if not is_pretraining:
        lengths, alpha = known.num_trained().float(), t.args.gae_alpha
        if alpha:
            advantages = estimates(adaptive_lambda(lengths, alpha))
        right = torch.tensor(known.columns["outcome"], dtype=torch.float32, device=t.device)
        bonus = likelihood_bonus(right, lengths, t.args.lm_coef, t.reduce)[:, None] * mask         # L_NLL
        yield Update("generator", [(known, whiten(advantages, mask, t.reduce) + bonus)])           # L_CLIP
    parts = verdict_parts(t, known, bce_coefficients(s, returns, mask))                            # L_VF
    parts = sum_of(t, (parts, mask.sum().item()))
    yield Update("critic", parts, PolicyLoss("reinforce"), aggregation="rollout", num_updates=1)


def explained_variance(t: Play, returns: torch.Tensor, values: torch.Tensor) -> float | None:
    """1 - Var(return - V) / Var(return) over all ranks' tokens; None where the returns are all equal."""
    returns, values = (x.to(wide_dtype(t.device)) for x in (returns, values))
    rows = torch.stack([torch.ones_like(returns), returns, returns ** 2, returns - values, (returns - values) ** 2])
    num, *sums = t.reduce(rows.sum(dim=1)).tolist()
    of_returns, of_errors = (squares / max(1, num) - (total / max(1, num)) ** 2
                             for total, squares in zip(sums[::2], sums[1::2], strict=True))
    return 1 - of_errors / of_returns if of_returns > 1e-12 else None
