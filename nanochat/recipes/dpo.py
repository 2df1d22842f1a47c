"""DPO (Rafailov et al. 2023): learn from pairs without a reward model, here from right against wrong. arXiv 2305.18290.

A pair is a right (chosen, y_w) and a wrong (rejected, y_l) solution of the same problem. Its loss is -log sigma(u) with
u = beta * [(log pi(y_w) - log ref(y_w)) - (log pi(y_l) - log ref(y_l))] (eq. 7): sums over the solutions' tokens, the
starting weights as ref, beta 0.1 as in the paper. A step takes the mean over the pairs of all ranks. Its gradient is
that of a weighted log-likelihood with the coefficients +-beta * sigma(-u), exact for one optimizer step per batch. The
loss is the recipe's own: --advantage, --loss, --aggregation, --kl-coef and --entropy-coef have no say.

Departures:
1. Online: a step's pairs are sampled from the present model. The paper goes several times through a fixed set of pairs.
2. The preferences are the task's gold check, not people's: nothing says that they follow the Bradley-Terry model.
3. A problem gives as many pairs as it can without using a solution twice, so those that are solved half of the time
   weigh most. --pairs-per-problem 1 makes all that have a pair count alike.
4. AdamW at a constant --lr, not RMSprop at 1e-6 with 150 steps of warm-up: the models here are tiny.
"""
import torch
from torch.nn.functional import logsigmoid

from nanochat.common import BadInput, check_least
from nanochat.rl.evals import log_rewards, pass_at_1
from nanochat.rl.flags import check_one_update
from nanochat.rl.losses import PolicyLoss
from nanochat.rl.play import Call, Play, Update
from nanochat.rl.roles import RoleSpec
from nanochat.rl.rollouts import Rollouts

TAGS = dict(family="pairs", verifier="none", reward="outcome", credit="pair loss against the starting weights")
ROLES = {"generator": RoleSpec("--model-tag", reference=True)}
SHOWN = {"generator": ["pair_loss", "pair_accuracy", "margin"]}


def add_args(group) -> None:
    add_pair_args(group)
    group.add_argument("--pairs-per-problem", type=int, default=0, help="at most; 0 = all that use no solution twice")


def add_pair_args(group) -> None:
    group.add_argument("--beta", type=float, default=0.1,
                       help="factor on the log ratios in a pair's loss; a larger one keeps closer to the reference")


def check(args, task) -> None:
    check_pair_args(args)
    check_least(args, {"pairs_per_problem": 0, "num_samples": 2})


def check_pair_args(args) -> None:
    """Raises BadInput for settings that no pair loss can work with."""
    if not args.beta > 0:
        raise BadInput(f"--beta {args.beta}: must be above 0")
    check_one_update(args)


def calls(args) -> list[Call]:
    P, G = args.examples_per_step, args.num_samples
    return [Call("generator", "generator", P, G, args.max_new_tokens, args.num_steps, trained=True, scored=1)]


def play(t: Play):
    solutions = t.solve("generator", t.problems(), t.args.num_samples, "generator")
    outcomes = t.check(solutions)
    solutions.columns = {"outcome": outcomes}
    log_rewards(t, "generator", solutions, outcomes)
    t.log("generator", t.mean({"unscorable": [o is None for o in outcomes]}))
    chosen, rejected = right_and_wrong(outcomes, solutions.group_id.tolist(), t.args.pairs_per_problem)  # y_w > y_l | x
    paired, Q = solutions.select(chosen + rejected), len(chosen)  # no rollouts on a rank without pairs
    ref_logprobs = t.logprobs("generator", paired, reference=True)
    yield from learn_from_pairs(t, "generator", paired, list(range(Q)), list(range(Q, 2 * Q)), ref_logprobs)


def right_and_wrong(outcomes: list[bool | None], group_id: list[int], most: int = 0) -> tuple[list[int], list[int]]:
    """Pairs of a right and a wrong rollout of one group: its first right one with its first wrong one, and so on, at
    most `most` of a group (0: all). None is neither. -> the indices of the chosen, those of the rejected"""
    groups: dict[int, tuple[list[int], list[int]]] = {}  # the right and the wrong rollouts of each
    for n, (g, outcome) in enumerate(zip(group_id, outcomes, strict=True)):
        if outcome is not None:
            groups.setdefault(g, ([], []))[0 if outcome else 1].append(n)
    pairs = [pair for group in groups.values() for pair in list(zip(*group, strict=False))[: most or None]]
    return [w for w, _ in pairs], [l for _, l in pairs]


def best_and_worst(rewards: list[float | None], group_id: list[int]) -> tuple[list[int], list[int]]:
    """Of each group the rollouts with the highest and with the lowest reward, of equal ones the first. None is neither,
    and a group of equal rewards has no pair. -> the indices of the chosen, those of the rejected"""
    groups: dict[int, list[int]] = {}
    for n, (g, reward) in enumerate(zip(group_id, rewards, strict=True)):
        if reward is not None:
            groups.setdefault(g, []).append(n)
    pairs = [(max(group, key=rewards.__getitem__), min(group, key=rewards.__getitem__)) for group in groups.values()]
    pairs = [(w, l) for w, l in pairs if rewards[w] > rewards[l]]
    return [w for w, _ in pairs], [l for _, l in pairs]


# What all pair losses share. Q pairs among N rollouts, which may be in several

def margins(log_ratios: torch.Tensor, chosen: list[int], rejected: list[int], beta: float) -> torch.Tensor:
    """u of each pair. log_ratios (N,): log pi - log ref, summed over a rollout's tokens -> (Q,)"""
    return beta * (log_ratios[chosen] - log_ratios[rejected])


def pair_losses(u: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-P log sigma(u) - (1 - P) log sigma(-u), with targets P: how likely the chosen one is the better one, for sure
    in DPO, where P is 1. All (Q,)."""
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
    ranks, or no update where no rank has a pair. Two equal completions count in the mean and pull nothing.

    ref_logprobs (N, T): the rollouts' under the model that the role is compared with. Each rollout is in a pair.
    targets: P of each pair (see `pair_losses`), by default 1; sft_coef: weight of -log pi of the chosen, beside.
    """
    check_pair_args(t.args)  # also where another recipe has borrowed this update
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
    yield Update(role, [(rollouts, advantages)], PolicyLoss("reinforce"), per="rollout")


def evaluate(t: Play) -> dict:
    return pass_at_1(t, "generator")
