"""
Rollouts: completions with the prompts that they stand after.

P prompts, N rollouts, T tokens.
"""
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch.nn.functional import pad

from nanochat.rl.records.prompts import Prompt
from tasks.common import Problem


@dataclass
class Rollouts:
    """N completions of P prompts."""
    prompts: list[Prompt]
    group_id: torch.Tensor               # (N,) int64: the prompt of each
    tokens: torch.Tensor                 # (N, T) int64, the end token included
    sampler_logprobs: torch.Tensor       # (N, T) fp32 as drawn, NaN where not drawn from a role after this prompt
    lengths: torch.Tensor                # (N,) int64
    stopped: torch.Tensor                # (N,) bool: it ended itself (finish reason "stop", else "length")
    forced: torch.Tensor | None = None   # (N, T) bool: tokens that a tool put there, never trained
    targets: torch.Tensor | None = None  # (N, T) int64: what each position is to predict, None: the tokens themselves
    limit: int = 0                       # tokens that a completion may have
    texts: list[str] = field(default_factory=list)  # without the end token
    draws: list[str] = field(default_factory=list)  # the name of each one's draw, "" where it was given
    columns: dict[str, list] = field(default_factory=dict)  # what rollouts.jsonl says of each beside the usual

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def mask(self) -> torch.Tensor:
        """Tokens that are trained: all up to the length but those that were forced. -> (N, T) bool"""
        inside = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]
        return inside if self.forced is None else inside & ~self.forced

    def num_trained(self) -> torch.Tensor:
        """Trained tokens of each rollout. -> (N,) int64"""
        return self.lengths if self.forced is None else self.lengths - self.forced.sum(dim=1)

    def completions(self) -> list[list[int]]:
        """Token ids of each rollout, end token included."""
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]

    def prompt_of(self) -> list[Prompt]:
        """The prompt of each rollout."""
        return [self.prompts[g] for g in self.group_id.tolist()]

    def problems(self) -> list[Problem]:
        """The problem that each rollout is about."""
        return [prompt.problem for prompt in self.prompt_of()]

    def select(self, rows: list[int]) -> "Rollouts":
        """These rollouts, in this order; prompts that lose all theirs are left out."""
        index = torch.tensor(rows, dtype=torch.long, device=self.tokens.device)
        taken = {name: None if getattr(self, name) is None else getattr(self, name)[index] for name in PER_ROLLOUT}
        columns = {name: [values[n] for n in rows] for name, values in self.columns.items()}
        texts, draws = ([values[n] for n in rows] if values else [] for values in (self.texts, self.draws))
        chosen = replace(self, **taken, texts=texts, draws=draws, columns=columns)
        return chosen.with_prompts(chosen.prompt_of())

    def with_prompts(self, prompts: list[Prompt]) -> "Rollouts":
        """The same completions after other prompts, one for each rollout; equal prompts about one problem make a group.
        Where a prompt changes, the completion was not drawn from there: its sampler_logprobs become NaN."""
        groups: dict[tuple, int] = {}
        distinct, group_id, device = [], [], self.tokens.device
        for prompt in prompts:
            key = (tuple(prompt.ids), prompt.problem, prompt.copy)
            if key not in groups:
                distinct.append(prompt)
            group_id.append(groups.setdefault(key, len(groups)))
        moved = torch.tensor([new.ids != old.ids for new, old in zip(prompts, self.prompt_of(), strict=True)],
                             dtype=torch.bool, device=device)
        return replace(self, prompts=distinct, group_id=torch.tensor(group_id, dtype=torch.long, device=device),
                       sampler_logprobs=self.sampler_logprobs.masked_fill(moved[:, None], float("nan")))


# tensors, a row each
PER_ROLLOUT = ("group_id", "tokens", "sampler_logprobs", "lengths", "stopped", "forced", "targets")


def join(parts: list[Rollouts]) -> Rollouts:
    """All rollouts of the parts, one after the other; those after equal prompts about one problem are one group."""
    width = max(part.tokens.shape[1] for part in parts)

    def stacked(name: str) -> torch.Tensor | None:
        rows = [getattr(part, name) for part in parts]
        if all(row is None for row in rows):
            return None
        missing = {"forced": lambda part: torch.zeros_like(part.tokens, dtype=torch.bool),
                   "targets": lambda part: part.tokens}
        rows = [missing[name](part) if row is None else row for row, part in zip(rows, parts, strict=True)]
        return torch.cat([pad(row, (0, width - row.shape[1])) if row.dim() == 2 else row for row in rows])

    group_id = torch.cat([part.group_id + sum(len(other.prompts) for other in parts[:i])
                          for i, part in enumerate(parts)])
    shared = [name for name in parts[0].columns if all(name in part.columns for part in parts)]
    whole = Rollouts([prompt for part in parts for prompt in part.prompts], group_id,
                     **{name: stacked(name) for name in PER_ROLLOUT if name != "group_id"},
                     limit=max(part.limit for part in parts), texts=[text for part in parts for text in part.texts],
                     draws=[draw for part in parts for draw in part.draws or [""] * len(part)],
                     columns={name: [value for part in parts for value in part.columns[name]] for name in shared})
    return whole.with_prompts(whole.prompt_of())


def grouped(keys: Iterable, values: Iterable) -> dict:
    """The values of each key, in the order in which keys first come; None is left out."""
    groups: dict = {}
    for key, value in zip(keys, values, strict=True):
        groups.setdefault(key, []).extend([] if value is None else [value])
    return groups


def padded(rows: list[list[int]], fill: int = 0, device=None) -> torch.Tensor:
    """Token ids of several lengths as one tensor, `fill` after each. -> (N, T) int64"""
    width = max(map(len, rows), default=1)
    filled = [row + [fill] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.long, device=device).view(len(rows), width)
