"""
Packing rollouts into micro-batches whose rows share their prompts.

A micro-batch has U units of R rows: unit u is (part of) one group, whose prompt is run once. T tokens.
"""
from dataclasses import dataclass

import torch

from nanochat.common import BadInput
from nanochat.engine import pad_prompts
from nanochat.rl.credit.aggregation import AGGREGATIONS
from nanochat.rl.records.rollouts import Rollouts, grouped


@dataclass
class MicroBatch:
    """U units of R rows."""
    prompt_ids: torch.Tensor        # (U, Tp)
    prompt_positions: torch.Tensor  # (U, Tp)
    tokens: torch.Tensor            # (U*R, T) int64
    targets: torch.Tensor           # (U*R, T) int64: what each position is asked to predict
    index: torch.Tensor             # (M,) int64: the places of the M trained tokens, row by row
    rows: torch.Tensor              # (U*R,) int64: which rollouts these are
    advantages: torch.Tensor        # (U*R, T) fp32
    weights: torch.Tensor           # (U*R, T) fp32
    sampler_logprobs: torch.Tensor  # (U*R, T) fp32
    old_logprobs: torch.Tensor | None = None  # (M,) fp32
    ref_logprobs: torch.Tensor | None = None  # (M,) fp32

    @property
    def mask(self) -> torch.Tensor:
        """Where trained tokens are. -> (U*R, T) bool"""
        places = torch.zeros(self.tokens.numel(), dtype=torch.bool, device=self.tokens.device)
        return places.index_fill(0, self.index, True).view_as(self.tokens)

    def at_trained(self, x: torch.Tensor) -> torch.Tensor:
        """The entries of x (U*R, T, ...) at trained tokens, without waiting for the device. -> (M, ...)"""
        return x.flatten(0, 1).index_select(0, self.index)


def batch_sizes(lengths: torch.Tensor, reduce) -> tuple[float, float]:
    """Trained tokens and rollouts of the whole batch over all ranks, at least 1. lengths (N,) int64: trained tokens."""
    sizes = reduce(torch.stack([lengths.sum(), torch.tensor(len(lengths), device=lengths.device)]).float())
    return tuple(sizes.clamp(min=1).tolist())


def token_weights(lengths: torch.Tensor, aggregation: str, max_new_tokens: int, reduce) -> torch.Tensor:
    """Each rollout's weight per trained token, in the batch of all ranks. lengths (N,): of these -> (N,) fp32"""
    return AGGREGATIONS[aggregation](lengths.float(), *batch_sizes(lengths, reduce), max_new_tokens)


def pack(rollouts: Rollouts, advantages: torch.Tensor, weights: torch.Tensor, max_tokens: int, keep_idle: bool,
         prefix_sharing: bool = True) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` tokens (one unit may exceed it), sorted by length. Without prefix_sharing
    every unit is one row, whose prompt is run for it alone.

    advantages (N, T), weights (N,): of the whole batch, so that the split does not change the gradient. Groups whose
    advantages are all 0 teach nothing and are left out, unless keep_idle (a loss with KL or entropy terms). Raises
    BadInput where advantages or targets are not of the tokens' shape.
    """
    for name, x in (("advantages", advantages), ("targets", rollouts.targets)):
        if x is not None and x.shape != rollouts.tokens.shape:
            raise BadInput(f"{name} have the shape {tuple(x.shape)}, the rollouts' tokens "
                           f"{tuple(rollouts.tokens.shape)}")
    lengths, widths = rollouts.lengths.tolist(), [len(prompt.ids) for prompt in rollouts.prompts]
    idle = (advantages == 0).all(dim=1).tolist()
    units = []  # (rows, tokens of a prompt, tokens of the longest completion, group)
    for g, rows in grouped(rollouts.group_id.tolist(), range(len(lengths))).items():
        if keep_idle or not all(idle[n] for n in rows):
            longest = max(lengths[n] for n in rows)
            per_unit = min(len(rows), max(1, (max_tokens - widths[g]) // longest)) if prefix_sharing else 1
            units += [(rows[i: i + per_unit], widths[g], longest, g) for i in range(0, len(rows), per_unit)]
    units.sort(key=lambda unit: (len(unit[0]), unit[2], unit[1]))
    batches, current = [], []
    for unit in units:
        grown, R = current + [unit], len(unit[0])
        size = len(grown) * (max(u[1] for u in grown) + R * max(u[2] for u in grown))
        if current and (len(current[0][0]) != R or size > max_tokens):
            batches.append(current)
            grown = [unit]
        current = grown
    batches += [current] if current else []
    mask = rollouts.mask.cpu()
    return [_micro_batch(rollouts, batch, lengths, mask, advantages, weights) for batch in batches]


def pad_batches(batches: list[MicroBatch], num: int, device) -> list[MicroBatch]:
    """Adds micro-batches of one untrained token until there are `num`: ranks that shard weights run equally many."""
    token, zero = torch.zeros(1, 1, dtype=torch.long, device=device), torch.zeros(1, 1, device=device)
    none, row = token[0, :0], token[0]
    return batches + [MicroBatch(token, token, token, token, none, row, zero, zero, zero)
                      for _ in range(num - len(batches))]


def _micro_batch(rollouts, units, lengths, mask, advantages, weights) -> MicroBatch:
    device = rollouts.tokens.device
    rows = [n for unit in units for n in unit[0]]
    T = max(lengths[n] for n in rows)
    index = mask[rows, :T].flatten().nonzero().squeeze(1).to(device)
    ids, positions = pad_prompts([rollouts.prompts[g].ids for *_, g in units], device)
    rows = torch.tensor(rows, device=device)
    targets = rollouts.tokens if rollouts.targets is None else rollouts.targets
    return MicroBatch(ids, positions, rollouts.tokens[rows, :T], targets[rows, :T], index, rows, advantages[rows, :T],
                      weights[rows, None].expand(-1, T), rollouts.sampler_logprobs[rows, :T])
