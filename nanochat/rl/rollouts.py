"""
Rollouts: sampling them, and packing them into micro-batches whose rows share their prompts.

P prompts, G samples each, N = P*G rollouts, T tokens; a micro-batch has U units of R rows: unit u is (part of) one group, whose prompt is
run once.
"""
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanochat.calculator import Calculator
from nanochat.engine import generate, pad_prompts, row_key
from nanochat.rl.losses import AGGREGATIONS
from nanochat.rl.prompts import Solution, Verification, generator_prompt, parse_verification, read_solution, verifier_prompt


@dataclass
class Rollouts:
    """N sampled completions of P prompts. tokens (N, T) int64, sampler_logprobs (N, T) fp32, lengths (N,), stopped (N,) bool (finish reason
    "stop", else "length"), group_id (N,) int64: the prompt of each; forced (N, T) bool: tokens that came from the calculator, never trained, or None."""
    prompts: list[list[int]]
    group_id: torch.Tensor
    tokens: torch.Tensor
    sampler_logprobs: torch.Tensor
    lengths: torch.Tensor
    stopped: torch.Tensor
    forced: torch.Tensor | None = None

    def num_trained(self) -> torch.Tensor:
        """Sampled tokens of each rollout: its length without what was forced. -> (N,) int64"""
        return self.lengths if self.forced is None else self.lengths - self.forced.sum(dim=1)

    def completions(self) -> list[list[int]]:
        """Token ids of each rollout, end token included."""
        lengths = self.lengths.tolist()
        return [row[:n] for row, n in zip(self.tokens.tolist(), lengths, strict=True)]


def count_copies(names: list) -> list[int]:
    """How often each entry has occurred before in the list: ["a", "b", "a"] -> [0, 0, 1]."""
    seen: Counter = Counter()
    copies = []
    for name in names:
        copies.append(seen[name])
        seen[name] += 1
    return copies


@dataclass
class Sampler:
    """What all sampling of a run shares. Noise is keyed by (seed, stream, problem, copy, sample): the same on one rank and on many."""
    task: object
    tokenizer: object
    seed: int
    max_new_tokens: int
    verifier_max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    should_stop: Callable[[], bool] = lambda: False
    calculator: bool = False  # for solutions
    max_rows: int = 1024      # that decode together

    def solve(self, model, problems: list, num_samples: int, stream: tuple, greedy: bool = False) -> tuple[Rollouts, list[Solution]]:
        """`num_samples` solutions of each of P problems. stream names the occasion, for example ("generator", step)."""
        prompts = [generator_prompt(self.tokenizer, self.task.fmt, problem.prompt) for problem in problems]
        tool = Calculator(self.tokenizer) if self.calculator else None
        rollouts = self._sample(model, problems, prompts, num_samples, stream, self.max_new_tokens, greedy, tool=tool)
        return rollouts, [read_solution(self.tokenizer, self.task.fmt, tokens) for tokens in rollouts.completions()]

    def verify(self, model, problems: list, solutions: list[Solution], num_samples: int, stream: tuple,
               greedy: bool = False, copies: list[int] | None = None) -> tuple[Rollouts, list[Verification]]:
        """`num_samples` verifications of each solution; problems[i] is what solutions[i] solves. copies[i] tells solutions of one problem
        apart for the noise; by default they are counted here."""
        fmt = self.task.fmt
        prompts = [verifier_prompt(self.tokenizer, fmt, p.prompt, s.text) for p, s in zip(problems, solutions, strict=True)]
        rollouts = self._sample(model, problems, prompts, num_samples, stream, self.verifier_max_new_tokens, greedy, copies)
        num_steps = [len(s.step_ends) for s in solutions for _ in range(num_samples)]
        stopped = rollouts.stopped.tolist()
        texts = [self.tokenizer.decode(c[:-1] if ended else c) for c, ended in zip(rollouts.completions(), stopped, strict=True)]
        return rollouts, [parse_verification(fmt, *row) for row in zip(texts, num_steps, stopped, strict=True)]

    def _sample(self, model, problems, prompts, num_samples, stream, max_new_tokens, greedy, copies=None, tool=None) -> Rollouts:
        copies = count_copies(problems) if copies is None else copies
        keys = [row_key(self.seed, *stream, problem.split, problem.index, copy, g)
                for problem, copy in zip(problems, copies, strict=True) for g in range(num_samples)]
        temperature, top_k = (0.0, 0) if greedy else (self.temperature, self.top_k)
        out = generate(model, prompts, num_samples, max_new_tokens=max_new_tokens, stop_tokens=self.tokenizer.stop_tokens, keys=keys,
                       temperature=temperature, top_k=top_k, max_rows=self.max_rows, should_stop=self.should_stop, tool=tool)
        group_id = torch.arange(len(prompts), device=out.tokens.device).repeat_interleave(num_samples)
        return Rollouts(prompts, group_id, out.tokens, out.logprobs, out.lengths, out.stopped, out.forced)


@dataclass
class MicroBatch:
    """U units of R rows. prompt_ids, prompt_positions (U, Tp); tokens (U*R, T) int64; mask (U*R, T) bool: sampled tokens, all trained, M in number;
    index (M,) int64: their places, row by row; advantages, weights, sampler_logprobs (U*R, T) fp32; old_logprobs, ref_logprobs (M,) fp32 or None."""
    prompt_ids: torch.Tensor
    prompt_positions: torch.Tensor
    tokens: torch.Tensor
    mask: torch.Tensor
    index: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sampler_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None

    def of_samples(self, x: torch.Tensor) -> torch.Tensor:
        """The entries of x (U*R, T, ...) at sampled tokens. Unlike x[mask] it does not wait for the device. -> (M, ...)"""
        return x.flatten(0, 1).index_select(0, self.index)


def token_weights(lengths: torch.Tensor, aggregation: str, max_new_tokens: int, reduce) -> torch.Tensor:
    """The weight of each trained token of a rollout, from the sizes of the whole batch over all ranks. lengths (N,) int64: trained tokens -> (N,) fp32."""
    sizes = reduce(torch.stack([lengths.sum(), torch.tensor(len(lengths), device=lengths.device)]).float())
    num_tokens, num_rollouts = sizes.clamp(min=1).tolist()
    return AGGREGATIONS[aggregation](lengths.float(), num_tokens, num_rollouts, max_new_tokens)


def pack(rollouts: Rollouts, advantages: torch.Tensor, weights: torch.Tensor, max_tokens: int, keep_idle: bool,
         prefix_sharing: bool = True) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` tokens (one unit may exceed it), sorted by length. Without prefix_sharing every unit is one row,
    and a group's prompt is run once per rollout; the gradient is the same.

    advantages (N, T), weights (N,). Groups whose advantages are all 0 teach nothing and are left out, unless keep_idle (a loss with KL
    or entropy terms). The weights were taken over the whole batch before, so neither this nor the split changes the gradient.
    """
    lengths, widths = rollouts.lengths.tolist(), [len(p) for p in rollouts.prompts]
    idle = (advantages == 0).all(dim=1).tolist()
    groups: dict[int, list[int]] = {}
    for n, g in enumerate(rollouts.group_id.tolist()):
        groups.setdefault(g, []).append(n)
    units = []  # (rows, tokens of a prompt, tokens of the longest completion, group)
    for g, rows in groups.items():
        if keep_idle or not all(idle[n] for n in rows):
            longest = max(lengths[n] for n in rows)
            per_unit = min(len(rows), max(1, (max_tokens - widths[g]) // longest)) if prefix_sharing else 1
            units += [(rows[i: i + per_unit], widths[g], longest, g) for i in range(0, len(rows), per_unit)]
    units.sort(key=lambda unit: (len(unit[0]), unit[2], unit[1]))
    batches, current = [], []
    for unit in units:
        grown = current + [unit]
        R = len(unit[0])
        size = len(grown) * (max(u[1] for u in grown) + R * max(u[2] for u in grown))
        if current and (len(current[0][0]) != R or size > max_tokens):
            batches.append(current)
            grown = [unit]
        current = grown
    batches += [current] if current else []
    return [_micro_batch(rollouts, batch, lengths, advantages, weights) for batch in batches]


def even_out(batches: list[MicroBatch], num: int, device) -> list[MicroBatch]:
    """Adds micro-batches of one token that is not trained until there are `num`: ranks that shard weights must run as many as each other."""
    token, zero = torch.zeros(1, 1, dtype=torch.long, device=device), torch.zeros(1, 1, device=device)
    return batches + [MicroBatch(token, token, token, token.bool(), token[0, :0], zero, zero, zero) for _ in range(num - len(batches))]


def _micro_batch(rollouts, units, lengths, advantages, weights) -> MicroBatch:
    device = rollouts.tokens.device
    rows = [n for unit in units for n in unit[0]]
    T = max(lengths[n] for n in rows)
    mask = torch.arange(T) < torch.tensor([[lengths[n]] for n in rows])  # (U*R, T)
    if rollouts.forced is not None:
        mask &= ~rollouts.forced[rows, :T].cpu()
    index = mask.flatten().nonzero().squeeze(1)
    rows, mask, index = torch.tensor(rows, device=device), mask.to(device), index.to(device)
    prompts = [rollouts.prompts[g] for *_, g in units]
    ids, positions = pad_prompts(prompts, device)
    return MicroBatch(ids, positions, rollouts.tokens[rows, :T], mask, index, advantages[rows, :T], weights[rows, None].expand(-1, T),
                      rollouts.sampler_logprobs[rows, :T])
