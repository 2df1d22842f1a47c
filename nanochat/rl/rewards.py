"""
Reward sources: what happened -> sparse (token, value) rewards; and the class weights of the verifier.
"""
from dataclasses import dataclass

import torch

from nanochat.rl.advantages import SparseRewards

FORMAT_PENALTY = 0.25  # taken off the format reward for each unmet criterion


def terminal_rewards(values: list[float | None], lengths: torch.Tensor) -> SparseRewards:
    """One reward per rollout at its last token; None abstains."""
    valid = torch.tensor([v is not None for v in values], dtype=torch.bool)[:, None]
    filled = torch.tensor([0.0 if v is None else float(v) for v in values])[:, None]
    return SparseRewards(filled.to(lengths.device), (lengths - 1).clamp(min=0)[:, None], valid.to(lengths.device))


def outcome_rewards(outcomes: list[bool | None], lengths: torch.Tensor) -> SparseRewards:
    """Tango eq. 2: 1 if the answer is right, else 0."""
    return terminal_rewards(outcomes, lengths)


def step_rewards(step_ends: list[list[int]], verdicts: list[list[bool] | None], device) -> SparseRewards:
    """Tango eq. 3: +1/K or -1/K at the end token of each of a rollout's K steps; None abstains. Raises ValueError
    where there are not K verdicts."""
    width = max([len(ends) for ends in step_ends] + [1])
    values, token_index = torch.zeros(len(verdicts), width), torch.zeros(len(verdicts), width, dtype=torch.long)
    valid = torch.zeros(len(verdicts), width, dtype=torch.bool)
    for n, (ends, judged) in enumerate(zip(step_ends, verdicts, strict=True)):
        if judged:
            K = len(ends)
            if len(judged) != K:
                raise ValueError(f"rollout {n} has {K} steps and {len(judged)} verdicts")
            values[n, :K] = torch.tensor([1.0 if v else -1.0 for v in judged]) / K
            token_index[n, :K] = torch.tensor(ends)
            valid[n, :K] = True
    return SparseRewards(values.to(device), token_index.to(device), valid.to(device))


def keep_groups(outcomes: list[bool | None], group_id: list[int], low: float, high: float) -> list[int]:
    """The rollouts with an outcome whose group's accuracy over such rollouts is from low to high."""
    groups: dict[int, list[bool]] = {}
    for outcome, g in zip(outcomes, group_id, strict=True):
        groups.setdefault(g, []).extend([] if outcome is None else [outcome])
    inside = {g for g, known in groups.items() if known and low <= sum(known) / len(known) <= high}
    return [n for n, outcome in enumerate(outcomes) if outcome is not None and group_id[n] in inside]


def format_reward(unmet: tuple[str, ...]) -> float:
    """1, less FORMAT_PENALTY for each unmet criterion of the format, not below 0."""
    return max(0.0, 1.0 - FORMAT_PENALTY * len(unmet))


def verdict_reward(verdict: bool | None, outcome: bool | None, unmet: tuple[str, ...], gamma: float) -> float | None:
    """Tango eq. 8: 1 if the final verdict agrees with the outcome, plus gamma * format reward; None where there is no
    outcome."""
    return None if outcome is None else float(verdict == outcome) + gamma * format_reward(unmet)


@dataclass
class ClassWeights:
    """Tango eq. 9: s_c = sqrt(n / (2 n_c)), at most `cap`, over moving averages of how many judged solutions were right
    and wrong."""
    right: float = 0.0
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
