"""
Reward sources: what happened -> sparse (token, value) rewards; and the class weights of the verifier.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real

import torch

from nanochat.common import BadInput, described
from nanochat.rl.credit.advantages import SparseRewards, alone
from nanochat.rl.records.rollouts import grouped

EM_ROUNDS = 10
# What is believed of verdicts without any data, and as how many observations that counts in every estimate. Luck weighs
# much: a right answer after a blamed step is either lucky or blamed wrongly, and outcomes alone hardly tell which.
TRUST_BEFORE = [(0.9, 10), (0.4, 10), (0.1, 300)]
MOST_REWARD = 1e15  # whose square, summed over a batch, is still a float32
FORMAT_PENALTY = 0.25  # taken off the format reward for each unmet criterion


def checked_rewards(rewards: list[float | None], whose: str = "") -> list[float | None]:
    """Rewards as floats, of numbers, torch's and numpy's among them. Raises BadInput for what no advantage can be made
    of. whose: of which role they are, for the message."""
    found = [r.item() if getattr(r, "ndim", None) == 0 else r for r in rewards]
    for reward in found:
        if reward is not None and not (isinstance(reward, Real) and abs(reward) <= MOST_REWARD):
            raise BadInput(f"a reward{whose} is {described(reward)}: it must be a number from -{MOST_REWARD:g} to "
                           f"{MOST_REWARD:g}, or None where it cannot be told")
    return [None if reward is None else float(reward) for reward in found]


def terminal_rewards(values: list[float | None], lengths: torch.Tensor, negative_weight: float = 1.0) -> SparseRewards:
    """One reward per rollout at its last token, as Tango eq. 2 gives it for the answer; None abstains. Raises as
    checked_rewards does."""
    values = checked_rewards(values)
    valid = torch.tensor([v is not None for v in values], dtype=torch.bool)[:, None]
    filled = torch.tensor([0.0 if v is None else v for v in values])[:, None]
    return SparseRewards(filled.to(lengths.device), (lengths - 1).clamp(min=0)[:, None], valid.to(lengths.device),
                         negative_weight=negative_weight)


def step_rewards(step_ends: list[list[int]], verdicts: list[list[float] | None], device,
                 credit: str = "to_go") -> SparseRewards:
    """+1 or -1 at the end token of each step, between them where a verdict, True or False, is a chance that the step is
    right; a key of CREDIT says which tokens that moves. None abstains. Raises ValueError where there is not a verdict
    for each of a rollout's steps."""
    rewards = at_step_ends(step_ends, verdicts, device)
    return CREDIT[credit](replace(rewards, values=(2 * rewards.values - 1).masked_fill(~rewards.valid, 0.0)))


# Which tokens the rewards of steps move: rewards -> rewards

def to_go(rewards: SparseRewards) -> SparseRewards:
    """A token gets the sum over the steps that end at or after it, of which each of K counts 1/K (Tango eq. 3, 6)."""
    K = rewards.valid.sum(dim=1, keepdim=True).clamp(min=1)
    return replace(rewards, values=rewards.values / K)


def own_step(rewards: SparseRewards) -> SparseRewards:
    """A token gets the reward of the step that it is part of (PAV, arXiv 2410.08146, eq. 5)."""
    return replace(rewards, spread="own_step")


def worst_step(rewards: SparseRewards) -> SparseRewards:
    """A solution is worth its worst step, the last of them: its reward alone counts, for all tokens up to its end. That
    is PURE (arXiv 2504.15275) at temperature 0; there a softmax at .1 weighs the steps."""
    values = rewards.values.masked_fill(~rewards.valid, float("inf"))
    places = torch.arange(1, values.shape[1] + 1, device=values.device)
    last = ((values == values.amin(dim=1, keepdim=True)) * places).argmax(dim=1, keepdim=True)  # (N, 1)
    return replace(rewards, **{name: getattr(rewards, name).gather(1, last)
                               for name in ("values", "token_index", "valid")})


CREDIT: dict[str, Callable] = {"to_go": to_go, "own_step": own_step, "min": worst_step}


def at_step_ends(step_ends: list[list[int]], values: list[list[float] | None], device) -> SparseRewards:
    """A value at each step's end token; None abstains. Raises ValueError where there are not as many values."""
    width = max([len(ends) for ends in step_ends] + [1])
    found, token_index, valid = (torch.zeros(len(values), width, dtype=dtype)
                                 for dtype in (torch.float32, torch.long, torch.bool))
    for n, (ends, row) in enumerate(zip(step_ends, values, strict=True)):
        if row:
            K = len(ends)
            if len(row) != K:
                raise ValueError(f"rollout {n} has {K} steps and {len(row)} verdicts")
            found[n, :K] = torch.tensor(row, dtype=torch.float32)
            token_index[n, :K] = torch.tensor(ends)
            valid[n, :K] = True
    return SparseRewards(found.to(device), token_index.to(device), valid.to(device))


def keep_groups(outcomes: list[bool | None], group_id: list[int], low: float, high: float) -> list[int]:
    """The rollouts with an outcome whose group's accuracy over such rollouts is from low to high."""
    inside = {g for g, known in grouped(group_id, outcomes).items() if known and low <= sum(known) / len(known) <= high}
    return [n for n, outcome in enumerate(outcomes) if outcome is not None and group_id[n] in inside]


def format_reward(unmet: tuple[str, ...]) -> float:
    """1, less FORMAT_PENALTY for each unmet criterion of the format, not below 0."""
    return max(0.0, 1.0 - FORMAT_PENALTY * len(unmet))


def verdict_reward(verdict: bool | None, outcome: bool | None, unmet: tuple[str, ...], gamma: float) -> float | None:
    """Tango eq. 8: 1 if the final verdict is the outcome, plus gamma * format reward; None without an outcome."""
    return None if outcome is None else float(verdict == outcome) + gamma * format_reward(unmet)


@dataclass
class ClassWeights:
    """Tango eq. 9: s_c = sqrt(n / (2 n_c)), at most `cap`."""
    right: float = 0.0  # moving averages of how many judged solutions were right, and wrong
    wrong: float = 0.0
    decay: float = 0.8
    cap: float = 4.0
    batches: int = 0

    def observe(self, right: float, wrong: float) -> None:
        """Takes in one batch's counts (over all ranks); the first sets the averages."""
        keep = self.decay if self.batches else 0.0
        self.right = keep * self.right + (1 - keep) * right
        self.wrong = keep * self.wrong + (1 - keep) * wrong
        self.batches += 1

    def weight(self, outcome: bool) -> float:
        """The factor on the advantages of a solution that was in truth right (outcome True) or wrong."""
        count = self.right if outcome else self.wrong
        return min(self.cap, ((self.right + self.wrong) / (2 * count)) ** 0.5) if count > 0 else self.cap


@dataclass
class VerdictTrust:
    """How far step verdicts can be believed, learned from outcomes alone; ours, not the paper's.

    A step that was judged right is right with chance `right_if_right`, one judged wrong with chance `right_if_wrong`. A
    solution whose steps are all right has the right answer, any other with chance `luck`. The three are estimated by
    expectation maximisation over batches.
    """
    right_if_right: float = 0.9
    right_if_wrong: float = 0.4
    luck: float = 0.1
    # expected numbers: right and all of those judged right, of those judged wrong; lucky, with errors
    sums: list[float] | None = None
    decay: float = 0.9  # the share of `sums` that a batch keeps

    def chances(self, verdicts: list[bool], outcome: bool | None) -> list[float]:
        """How likely each step is right, given all verdicts on the solution and its outcome, if that is known."""
        own = [self.right_if_right if v else self.right_if_wrong for v in verdicts]
        if outcome is None:
            return own
        no_error = math.prod(own)
        if outcome:
            known = no_error + self.luck * (1 - no_error)
            return [(no_error + self.luck * (p - no_error)) / known for p in own]
        return [(p - no_error) / (1 - no_error) for p in own]

    def observe(self, verdicts: list[list[bool] | None], outcomes: list[bool | None], reduce: Callable = alone) -> None:
        """Takes in one batch over all ranks. A solution without an outcome or step verdicts says nothing."""
        known = [(row, o) for row, o in zip(verdicts, outcomes, strict=True) if row and o is not None]
        before = self.sums or [0.0] * 6
        for _ in range(EM_ROUNDS):
            new = torch.tensor([self.expected(row, o) for row, o in known], dtype=torch.float64).view(-1, 6).sum(dim=0)
            self.sums = [self.decay * a + b for a, b in zip(before, reduce(new).tolist(), strict=True)]
            self.right_if_right, self.right_if_wrong, self.luck = (
                (part + weight * first) / (whole + weight) for part, whole, (first, weight)
                in zip(self.sums[::2], self.sums[1::2], TRUST_BEFORE, strict=True))

    def expected(self, verdicts: list[bool], outcome: bool) -> list[float]:
        """What one solution adds to `sums`, given the estimates so far."""
        chances = self.chances(verdicts, outcome)
        no_error = math.prod(self.right_if_right if v else self.right_if_wrong for v in verdicts)
        lucky = self.luck * (1 - no_error)
        with_error = lucky / (no_error + lucky) if outcome else 1.0
        of = {kind: [p for p, v in zip(chances, verdicts, strict=True) if v is kind] for kind in (True, False)}
        return [sum(of[True]), len(of[True]), sum(of[False]), len(of[False]), outcome * with_error, with_error]


@dataclass
class VerdictSkill:
    """How much a final verdict tells of the outcome: J, the share of right solutions that are judged right less that of
    wrong ones. In training by its word wrong answers die out where J > 0, and spread where J < 0 (RLVeR, arXiv
    2601.04411). Both shares by Laplace's rule, so that J is 0 without data."""
    sums: list[float] | None = None  # of right solutions those judged right, all; of wrong ones those judged right, all
    decay: float = 0.9  # the share of `sums` that a batch keeps

    def observe(self, verdicts: list[bool | None], outcomes: list[bool | None], reduce: Callable = alone) -> float:
        """Takes in one batch over all ranks. -> J. A solution without an outcome or a final verdict says nothing."""
        known = [(v, o) for v, o in zip(verdicts, outcomes, strict=True) if v is not None and o is not None]
        new = torch.tensor([[o and v, o, not o and v, not o] for v, o in known], dtype=torch.float64)
        new = reduce(new.view(-1, 4).sum(dim=0)).tolist()
        self.sums = [self.decay * a + b for a, b in zip(self.sums or [0.0] * 4, new, strict=True)]
        of_right, right, of_wrong, wrong = self.sums
        return (of_right + 1) / (right + 2) - (of_wrong + 1) / (wrong + 2)
