"""
Learning from pairs of rollouts, the one of which is preferred: the update that DPO and its relatives make.

Q pairs among N rollouts, which may be in several.
"""
import torch
from torch.nn.functional import logsigmoid

from nanochat.cli import above
from nanochat.common import BadInput
from nanochat.kernels.losses import PolicyLoss
from nanochat.rl.credit.aggregation import check_one_update
from nanochat.rl.play.play import Play, Update
from nanochat.rl.records.rollouts import Rollouts, grouped


def add_pair_args(group) -> None:
    group.add_argument("--beta", type=above(0), default=0.1,
                       help="factor on the log ratios in a pair's loss; a larger one keeps closer to the reference")


def check(args, task) -> None:
    """A recipe's `check`: raises BadInput where one update of samples that are compared cannot be made."""
    check_one_update(args)
    if args.num_samples < 2:
        raise BadInput(f"--num-samples {args.num_samples}: must be at least 2, to compare them")


def best_and_worst(rewards: list[float | None], group_id: list[int]) -> tuple[list[int], list[int]]:
    """Of each group the rollouts with the highest and with the lowest reward, of equal ones the first. None is neither,
    and a group of equal rewards has no pair. -> the indices of the chosen, those of the rejected"""
    known = [None if reward is None else n for n, reward in enumerate(rewards)]
    pairs = [(max(group, key=rewards.__getitem__), min(group, key=rewards.__getitem__))
             for group in grouped(group_id, known).values() if group]
    pairs = [(w, l) for w, l in pairs if rewards[w] > rewards[l]]
    return [w for w, _ in pairs], [l for _, l in pairs]


def margins(log_ratios: torch.Tensor, chosen: list[int], rejected: list[int], beta: float) -> torch.Tensor:
    """u of each pair. log_ratios (N,): log pi - log ref, summed over a rollout's tokens -> (Q,)"""
    return beta * (log_ratios[chosen] - log_ratios[rejected])


def pair_losses(u: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-P log sigma(u) - (1 - P) log sigma(-u), with targets P that the chosen one is better, in DPO 1. All (Q,)."""
    return -targets * logsigmoid(u) - (1 - targets) * logsigmoid(-u)


def pair_coefficients(u: torch.Tensor, weights: torch.Tensor, chosen: list[int], rejected: list[int], num_rollouts: int,
                      beta: float, targets: torch.Tensor) -> torch.Tensor:
    """The derivative of -sum_q weights_q * pair_losses_q in each rollout's log pi. u, weights, targets (Q,) -> (N,)"""
    # P - sigma(u). With P = 1 sigma(-u), the paper's section 4: large where the pair is ranked wrongly
    pull = weights * beta * (targets * torch.sigmoid(-u) - (1 - targets) * torch.sigmoid(u))  # (Q,)
    index = torch.tensor(chosen + rejected, dtype=torch.long)
    return u.new_zeros(num_rollouts).index_add(0, index, torch.cat([pull, -pull]))


def learn_from_pairs(t: Play, role: str, rollouts: Rollouts, chosen: list[int], rejected: list[int],
                     ref_logprobs: torch.Tensor, *, targets: list[float] | None = None, sft_coef: float = 0.0):
    """The update of a role that is to prefer rollout chosen[q] to rejected[q]: the mean loss over the pairs of all
    ranks, if there are any. Two equal completions count in the mean and pull nothing.

    ref_logprobs (N, T): under the model that the role is compared with. Each rollout is in a pair. targets: P of each
    pair (see `pair_losses`), by default 1; sft_coef: weight of -log pi of the chosen, beside.
    """
    check_one_update(t.args)  # also where another recipe has borrowed this update
    # One number per rollout: in fp64 on the CPU, where the order of additions is always the same.
    log_ratios = (t.logprobs(role, rollouts) - ref_logprobs).sum(dim=1).cpu().double()  # (N,)
    u = margins(log_ratios, chosen, rejected, t.args.beta)  # (Q,)
    P = torch.ones_like(u) if targets is None else torch.tensor(targets, dtype=u.dtype)  # (Q,)
    tokens, texts = rollouts.completions(), rollouts.texts
    pairs = list(zip(chosen, rejected, strict=True))
    equal = torch.tensor([tokens[w] == tokens[l] for w, l in pairs], dtype=torch.bool)  # (Q,)
    partner = dict(pairs) | {l: w for w, l in pairs}
    rollouts.columns["paired_with"] = [texts[partner[n]] for n in range(len(rollouts))]
    num_pairs, num_rollouts = t.reduce(torch.tensor([len(chosen), len(rollouts)], device=t.device)).tolist()
    t.log(role, {"num_pairs": num_pairs} | t.mean({
        "pair_loss": pair_losses(u, P).tolist(), "pair_accuracy": (u > 0).tolist(), "margin": u.tolist(),
        "frac_equal": equal.tolist(), "log_ratio/chosen": log_ratios[chosen].tolist(),
        "log_ratio/rejected": log_ratios[rejected].tolist()}))
    if num_pairs == 0:
        return
    weights = (~equal) * num_rollouts / num_pairs  # from the update's mean over rollouts to one over pairs
    coefficients = pair_coefficients(u, weights, chosen, rejected, len(rollouts), t.args.beta, P)  # (N,)
    coefficients.index_add_(0, torch.tensor(chosen, dtype=torch.long), sft_coef * weights.double())
    advantages = coefficients.float().to(t.device)[:, None].expand(-1, rollouts.tokens.shape[1])  # (N, T)
    yield Update(role, [(rollouts, advantages)], PolicyLoss("reinforce"), aggregation="rollout")
