"""
Solutions cut after their steps: what a model completes from there, and how likely it finds the gold answer there.

Prefixes are token ids, never text that is encoded again: the problem's prompt and the solution's tokens up to and
including the last one of a step.
"""
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from nanochat.engine import row_key
from nanochat.rl.learn.packing import pack
from nanochat.rl.learn.trainer import score
from nanochat.rl.measure.scores import pass_at_k
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records.outcomes import outcomes_of
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts, padded
from tasks.common import Problem

SCORED_TOKENS = 8192  # that go through the model at once


@dataclass
class Cut:
    """A solution with its prefixes."""
    problem: Problem
    prompt: list[int]     # the generator's
    ids: list[int]        # the solution's tokens
    text: str
    step_ends: list[int]  # of each step the index of its last token
    outcome: bool | None = None
    gold: list[bool] = field(default_factory=list)            # labels of its steps, [] where they are not known
    values: list[float | None] = field(default_factory=list)  # found after each prefix, None where nothing was asked
    rollouts: int = 0     # what that cost
    tokens: int = 0

    def begin(self, k: int) -> list[int]:
        """The solution's tokens up to the end of step k; none for 0."""
        return self.ids[: self.step_ends[k - 1] + 1] if k else []


class Found(NamedTuple):
    """The value after a prefix, None where it cannot be told; what it cost."""
    value: float | None
    rollouts: int = 0
    tokens: int = 0
    prompt_tokens: int = 0  # run before the first of the `tokens`, the problem's prompt included
    own_tokens: int = 0     # the same where no longer prefix holds it


Asked = list[tuple[Cut, int]]  # prefix k of a solution


def prompt_after(prompt: list[int], problem: Problem, begun: list[int]) -> Prompt:
    """The prompt and the tokens of a solution that is begun, to be gone on from. Its noise belongs to what it says."""
    return Prompt(prompt + begun, problem, copy=row_key(*begun))


def complete(asked: Asked, model, sampler: Sampler, num: int) -> Rollouts:
    """`num` completions from each prefix. Their noise belongs to the problem and to what the prefix says, so that equal
    prefixes have equal completions, whichever solution they are cut from."""
    prompts = [prompt_after(cut.prompt, cut.problem, cut.begin(k)) for cut, k in asked]
    rollouts = sampler.sample(model, prompts, num, ("labels",), sampler.max_new_tokens, tool=sampler.calculator_tool())
    whole = zip((pair for pair in asked for _ in range(num)), rollouts.completions(), rollouts.stopped.tolist(),
                strict=True)
    rollouts.texts = [sampler.tokenizer.decode(cut.begin(k) + tokens[: len(tokens) - stopped])
                      for (cut, k), tokens, stopped in whole]  # from the solution's first token on
    return rollouts


def share_right(num: int, right: int) -> float:
    """Of `num` completions the share that is right: an unbiased estimate of the policy's chance from there."""
    return right / num


def counted(chance: Callable[[int, int], float], asked: Asked, model, sampler: Sampler, num: int,
            least: int = 1) -> list[Found]:
    """chance(scorable, right) of the completions from each prefix; None where fewer than `least` can be scored."""
    rollouts, found = complete(asked, model, sampler, num), []
    outcomes, lengths = outcomes_of(sampler.task, rollouts.problems(), rollouts.texts), rollouts.lengths.tolist()
    sizes = [len(prompt.ids) for prompt in rollouts.prompts]
    for p, (size, held) in enumerate(zip(sizes, are_held([prompt.ids for prompt in rollouts.prompts]), strict=True)):
        mine = slice(p * num, (p + 1) * num)
        known = [outcome for outcome in outcomes[mine] if outcome is not None]
        value = chance(len(known), sum(known)) if len(known) >= least else None
        found.append(Found(value, num, sum(lengths[mine]), size, 0 if held else size))
    return found


def are_held(prompts: list[list[int]]) -> list[bool]:
    """Whether another prompt begins with each, and so holds its keys; of equal ones the last is not counted."""
    held, order = [False] * len(prompts), sorted(range(len(prompts)), key=prompts.__getitem__)
    for p, following in pairwise(order):  # what begins with a prompt stands right after it
        held[p] = prompts[following][: len(prompts[p])] == prompts[p]
    return held


def forced_answer(tokenizer, fmt, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of what opens an answer after any step, and of the answer with what closes and ends it. The opening is
    given and the rest is scored, so that what counts is which answer comes, not whether one is due."""
    return (tokenizer.encode(fmt.think_close + fmt.answer_open),
            [*tokenizer.encode(answer + fmt.answer_close), tokenizer.assistant_end])


def forced_after(tokenizer, fmt, cut: Cut, k: int) -> tuple[list[int], list[int]]:
    """Token ids of prefix k of a solution with what opens an answer, and of the gold answer that is forced there."""
    opening, answer = forced_answer(tokenizer, fmt, cut.problem.answer)
    return cut.begin(k) + opening, answer


def completion_logprobs(model, prompts: list[list[int]], completions: list[list[int]]) -> list[float]:
    """The log-probability of each whole completion after its prompt, at temperature 1."""
    device = model.lm_head.weight.device
    tokens = padded(completions, device=device)  # (N, T)
    zeros = torch.zeros(tokens.shape, device=device)
    rollouts = Rollouts([Prompt(ids) for ids in prompts], torch.arange(len(prompts), device=device), tokens, zeros,
                        torch.tensor(list(map(len, completions)), device=device), zeros[:, 0] > 0)
    sums = torch.zeros(len(prompts), device=device)
    for batch in pack(rollouts, zeros, zeros[:, 0], SCORED_TOKENS, keep_idle=True):
        rows = batch.rows[batch.index // batch.tokens.shape[1]]  # (M,): the rollout of each token
        sums.index_add_(0, rows, score(model, batch, temperature=1.0))
    return sums.tolist()


# What a method may ask for, by the names of step_labels.Method. The last two arguments: completions per prefix, and of
# how many of them the best one counts.

def gold_label(asked: Asked, model, sampler: Sampler, num: int, best_of: int) -> list[Found]:
    """The task's label of the prefix's last step."""
    return [Found(float(cut.gold[k - 1])) for cut, k in asked]


def right_share(asked: Asked, model, sampler: Sampler, num: int, best_of: int) -> list[Found]:
    """The share of `num` completions that are right."""
    return counted(share_right, asked, model, sampler, num)


def best_of_chance(asked: Asked, model, sampler: Sampler, num: int, best_of: int) -> list[Found]:
    """Q of the prover that keeps the best of `best_of`, 1 - (1 - q)^best_of, without bias from `num` of them."""
    chance = lambda scorable, right: pass_at_k(scorable, right, best_of)
    return counted(chance, asked, model, sampler, num, least=best_of)


def answer_logprob(asked: Asked, model, sampler: Sampler, num: int, best_of: int) -> list[Found]:
    """log p of the gold answer that is forced after the prefix. Its tokens are read and count as one rollout."""
    forced = [forced_after(sampler.tokenizer, sampler.task.fmt, cut, k) for cut, k in asked]
    prompts = [cut.prompt + begun for (cut, _), (begun, _) in zip(asked, forced, strict=True)]
    answers = [answer for _, answer in forced]
    rows = zip(completion_logprobs(model, prompts, answers), prompts, answers, strict=True)
    return [Found(value, 1, len(answer), len(prompt), len(prompt)) for value, prompt, answer in rows]


VALUES = {"gold": gold_label, "share": right_share, "best_of": best_of_chance, "logprob": answer_logprob}


@dataclass
class Meter:
    """Values of prefixes, each measured once: equal prefixes of a problem, of whichever solution, share theirs, and the
    first to ask has its costs (OmegaPRM's tree). asked: rollouts that it would have taken without that."""
    measure: Callable[[Asked], list[Found]]
    known: dict[tuple, Found] = field(default_factory=dict)
    asked: int = 0

    def costs(self) -> list[int]:
        """What all took: rollouts without reuse, prompt tokens, and as many where prefixes of a round share keys."""
        found = self.known.values()
        return [self.asked, sum(f.prompt_tokens for f in found), sum(f.own_tokens for f in found)]

    def __call__(self, asked: Asked) -> list[float | None]:
        keys = [(cut.problem.split, cut.problem.index, tuple(cut.begin(k))) for cut, k in asked]
        new: dict[tuple, tuple[Cut, int]] = {}
        for key, pair in zip(keys, asked, strict=True):
            if key not in self.known:
                new.setdefault(key, pair)
        for (key, (cut, _)), found in zip(new.items(), self.measure(list(new.values())) if new else [], strict=True):
            self.known[key] = found
            cut.rollouts += found.rollouts
            cut.tokens += found.tokens
        for key, (cut, k) in zip(keys, asked, strict=True):
            cut.values[k] = self.known[key].value
            self.asked += self.known[key].rollouts
        return [self.known[key].value for key in keys]
