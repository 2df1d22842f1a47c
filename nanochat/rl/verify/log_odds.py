"""
A scalar verifier as a verdict token: the log-odds s = log p(T) - log p(F) of the LM head, asked for at places in a
solution.

T and F are the tokens in which a format's two verdicts first differ. The softmax's normaliser cancels, so s is the
difference of two logits: a linear head on the hidden state that reads the difference of two rows of the LM head, but
for the softcap and the sampling temperature, at which logprobs are taken here. V = sigma(s) = p(T) / (p(T) + p(F)). A
softcap of S bounds s to +-2S / temperature.

Any loss of s is a weighted log-likelihood of the two tokens: -dloss/ds on target T and its negative on target F, exact
for one optimizer step. N rollouts, T tokens, Q pairs. Position t is asked after token t - 1.
"""
from dataclasses import replace

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce_with_logits, logsigmoid

from nanochat.common import BadInput
from nanochat.kernels.losses import PolicyLoss
from nanochat.rl.credit.aggregation import check_one_update
from nanochat.rl.play.play import Play, Update
from nanochat.rl.records.prompts import Prompt, Solution
from nanochat.rl.records.rollouts import Rollouts


def verdict_tokens(tokenizer, fmt) -> tuple[int, int]:
    """T and F: the first tokens in which the format's verdicts differ. Raises BadInput where none does."""
    for right, wrong in zip(tokenizer.encode(fmt.correct), tokenizer.encode(fmt.incorrect), strict=False):
        if right != wrong:
            return right, wrong
    raise BadInput(f"format {fmt.name}: of {fmt.correct!r} and {fmt.incorrect!r} one begins like the other in this "
                   f"tokenizer, so no token tells them apart")


def end_mask(rollouts: Rollouts, solutions: list[Solution]) -> torch.Tensor:
    """After the whole solution: its end token's place (an outcome model). -> (N, T) bool"""
    return torch.arange(rollouts.tokens.shape[1], device=rollouts.tokens.device) == (rollouts.lengths - 1)[:, None]


def steps_mask(rollouts: Rollouts, solutions: list[Solution]) -> torch.Tensor:
    """After the last token of each reasoning step (a step model), which two may share. -> (N, T) bool"""
    places = torch.zeros(rollouts.tokens.shape, dtype=torch.bool)
    for n, ends in enumerate(after_steps(rollouts, solutions)):
        places[n, ends] = True
    return places.to(rollouts.tokens.device)


def tokens_mask(rollouts: Rollouts, solutions: list[Solution]) -> torch.Tensor:
    """After the prompt and every token of the solution (Cobbe et al. 2021; a critic). -> (N, T) bool"""
    return rollouts.mask


PLACES = {"end": end_mask, "steps": steps_mask, "tokens": tokens_mask}


def after_steps(rollouts: Rollouts, solutions: list[Solution]) -> list[list[int]]:
    """The position after each step of each rollout. Raises ValueError for one that is not ended after its steps."""
    after = [[end + 1 for end in solution.step_ends] for solution in solutions]
    for n, (ends, length) in enumerate(zip(after, rollouts.lengths.tolist(), strict=True)):
        if ends and ends[-1] >= length:
            raise ValueError(f"rollout {n} has {length} tokens, and its last step ends with the last of them")
    return after


def ended(t: Play, role: str, prompts: list[Prompt], solutions: Rollouts) -> Rollouts:
    """The same solutions as completions of a role after these prompts, one for each, with an end token where they were
    cut: so there is a place after every step and at the end."""
    end = t.tokenizer.assistant_end
    rows = zip(solutions.completions(), solutions.stopped.tolist(), strict=True)
    return t.written(role, prompts, [row if stopped else [*row, end] for row, stopped in rows]).with_prompts(prompts)


def steps_filled(rollouts: Rollouts, solutions: list[Solution], values: list[list[float]]) -> torch.Tensor:
    """A value for each reasoning step in its place, the least of steps that share one; else 0. -> (N, T) fp32"""
    filled = torch.zeros(rollouts.tokens.shape)
    for n, (ends, row) in enumerate(zip(after_steps(rollouts, solutions), values, strict=True)):
        for end, value in sorted(zip(ends, row, strict=True), key=lambda pair: -pair[1]):
            filled[n, end] = value
    return filled.to(rollouts.tokens.device)


def steps_read(rollouts: Rollouts, solutions: list[Solution], values: torch.Tensor) -> list[list[float]]:
    """What stands after each reasoning step. values (N, T)"""
    rows = zip(after_steps(rollouts, solutions), values.tolist(), strict=True)
    return [[row[end] for end in ends] for ends, row in rows]


def end_read(rollouts: Rollouts, values: torch.Tensor) -> torch.Tensor:
    """What stands at the end token's place. values (N, T) -> (N,)"""
    return values.gather(1, (rollouts.lengths - 1)[:, None]).squeeze(1)


def asked_for(rollouts: Rollouts, token: int) -> Rollouts:
    """The rollouts, each position asked for this token. Nobody drew it there: sampler_logprobs are NaN."""
    return replace(rollouts, targets=torch.full_like(rollouts.tokens, token),
                   sampler_logprobs=torch.full_like(rollouts.sampler_logprobs, float("nan")))


def log_odds(t: Play, role: str, rollouts: Rollouts) -> torch.Tensor:
    """s at every trained position, under a role. -> (N, T) fp32, 0 off the mask"""
    right, wrong = (t.logprobs(role, asked_for(rollouts, token)) for token in verdict_tokens(t.tokenizer, t.task.fmt))
    return right - wrong


def log_judgments(t: Play, role: str, s: torch.Tensor, labels: torch.Tensor, places: torch.Tensor) -> None:
    """Logs how well s tells the labels: the mean cross-entropy over places (bce), the share of those whose label is not
    .5 that are on the right side of .5 (accuracy), the mean label and its prediction. All (N, T)."""
    s, labels = s[places], labels[places]
    told = labels != 0.5
    t.log(role, {"num_labels": t.reduce(places.sum().float()).item()} | t.mean({
        "bce": bce_with_logits(s, labels, reduction="none").tolist(),
        "accuracy": ((s > 0) == (labels > 0.5))[told].tolist(),
        "label_mean": labels.tolist(), "chance_mean": torch.sigmoid(s).tolist()}))


def log_margins(t: Play, role: str, margins: torch.Tensor) -> None:
    """Logs how pairs are ranked. margins (Q,): log-odds of the right one less the wrong one's."""
    t.log(role, t.mean({"pair_loss": (-logsigmoid(margins)).tolist(), "pair_accuracy": (margins > 0).tolist(),
                        "margin": margins.tolist()}))


# Losses of s, as coefficients -dloss/ds

def bce_coefficients(s: torch.Tensor, labels: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Of the cross-entropy -y log V - (1 - y) log(1 - V) at each place: y - V. labels from 0 to 1. All (N, T)."""
    return (labels - torch.sigmoid(s)) * places


def squared_coefficients(s: torch.Tensor, labels: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Of the squared error (V - y)^2 / 2 at each place: (y - V) V (1 - V). All (N, T)."""
    V = torch.sigmoid(s)
    return (labels - V) * V * (1 - V) * places


LOSSES = {"bce": bce_coefficients, "squared": squared_coefficients}


def pair_coefficients(scores: torch.Tensor, chosen: list[int], rejected: list[int]) -> torch.Tensor:
    """Of the Bradley-Terry loss -log sigma(s_w - s_l), summed over pairs: sigma(-(s_w - s_l)) for the chosen, its
    negative for the rejected. A rollout may be in several pairs. scores (N,) -> (N,)"""
    pull = torch.sigmoid(scores[rejected] - scores[chosen])  # (Q,)
    index = torch.tensor(chosen + rejected, dtype=torch.long, device=scores.device)
    return torch.zeros_like(scores).index_add(0, index, torch.cat([pull, -pull]))


Parts = list[tuple[Rollouts, torch.Tensor]]


def verdict_parts(t: Play, rollouts: Rollouts, coefficients: torch.Tensor) -> Parts:
    """The parts of an Update that moves s by its coefficients (N, T): up where they are positive."""
    right, wrong = verdict_tokens(t.tokenizer, t.task.fmt)
    return [(asked_for(rollouts, right), coefficients), (asked_for(rollouts, wrong), -coefficients)]


def likelihood_parts(rollouts: Rollouts, weights: torch.Tensor) -> Parts:
    """The parts of an Update on -weight * log pi of each token: SFT on given rollouts. weights (N, T), also bool."""
    not_sampled = torch.full_like(rollouts.sampler_logprobs, float("nan"))
    return [(replace(rollouts, sampler_logprobs=not_sampled), weights.float() * rollouts.mask)]


def sum_of(t: Play, *losses: tuple[Parts, float]) -> Parts:
    """The parts of one Update per "rollout" whose loss is the sum of these, each averaged over its own number over
    ranks. (The update by itself averages over the rollouts of all parts: that is undone.) losses: parts and this rank's
    number."""
    num_rollouts = float(sum(len(rollouts) for parts, _ in losses for rollouts, _ in parts))
    sizes = t.reduce(torch.tensor([num_rollouts, *(float(num) for _, num in losses)], device=t.device)).tolist()
    return [(rollouts, coefficients * (sizes[0] / max(1.0, num)))
            for (parts, _), num in zip(losses, sizes[1:], strict=True) for rollouts, coefficients in parts]


def learn_verdicts(t: Play, role: str, *losses: tuple[Parts, float]):
    """The update of a role on `sum_of` these losses, or none where no rank has anything to learn."""
    nums = t.reduce(torch.tensor([float(num) for _, num in losses], device=t.device))
    check_one_update(t.args)
    if nums.any():
        yield Update(role, sum_of(t, *losses), PolicyLoss("reinforce"), aggregation="rollout")


def learn_likelihood(t: Play, role: str, rollouts: Rollouts):
    """SFT: the update of a role on the mean -log pi of the rollouts' tokens over all ranks, if there are any."""
    yield from learn_verdicts(t, role, (likelihood_parts(rollouts, rollouts.mask), rollouts.num_trained().sum().item()))
