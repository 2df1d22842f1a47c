"""
Sampling rollouts. Noise is keyed by (seed, occasion, problem, copy, sample): the same on one rank and on many.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanochat.calculator import Calculator
from nanochat.engine import Tool, generate, row_key
from nanochat.rl.records.prompts import (Prompt, Solution, Verification, numbered, parse_verification, read_solution,
                                         solve_prompt, verify_prompts)
from nanochat.rl.records.rollouts import Rollouts


@dataclass
class Sampler:
    """What all sampling of a run shares. The limits are those of `solve` and `verify`; `sample` is given its own."""
    task: object
    tokenizer: object
    seed: int
    max_new_tokens: int = 0
    verifier_max_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    should_stop: Callable[[], bool] = lambda: False
    calculator: bool = False  # for solutions
    max_rows: int = 1024      # that decode together
    max_cached_tokens: int = 0  # whose keys and values are held; 0: no bound but max_rows

    def sample(self, model, prompts: list[Prompt], num_samples: int, stream: tuple, max_new_tokens: int,
               greedy: bool = False, tool: Tool | None = None) -> Rollouts:
        """`num_samples` completions of each prompt. stream names the occasion, for example ("generator", step)."""
        keys = [row_key(self.seed, *stream, prompt.problem.split, prompt.problem.index, prompt.copy, g)
                for prompt in prompts for g in range(num_samples)]
        temperature, top_k = (0.0, 0) if greedy else (self.temperature, self.top_k)
        out = generate(model, [prompt.ids for prompt in prompts], num_samples, max_new_tokens=max_new_tokens,
                       stop_tokens=self.tokenizer.stop_tokens, keys=keys, temperature=temperature, top_k=top_k,
                       max_rows=self.max_rows, max_cached_tokens=self.max_cached_tokens, should_stop=self.should_stop,
                       tool=tool, families=[(prompt.problem.split, prompt.problem.index) for prompt in prompts])
        group_id = torch.arange(len(prompts), device=out.tokens.device).repeat_interleave(num_samples)
        rollouts = Rollouts(prompts, group_id, out.tokens, out.logprobs, out.lengths, out.stopped, out.forced,
                            limit=max_new_tokens)
        ended = zip(rollouts.completions(), out.stopped.tolist(), strict=True)
        rollouts.texts = [self.tokenizer.decode(tokens[:-1] if stopped else tokens) for tokens, stopped in ended]
        return rollouts

    def calculator_tool(self) -> Tool | None:
        """The tool that solutions may call, if they may."""
        return Calculator(self.tokenizer) if self.calculator else None

    def solve(self, model, problems: list, num_samples: int, stream: tuple,
              greedy: bool = False) -> tuple[Rollouts, list[Solution]]:
        """`num_samples` solutions of each of P problems."""
        prompts = numbered([solve_prompt(self.tokenizer, self.task.fmt, problem) for problem in problems])
        rollouts = self.sample(model, prompts, num_samples, stream, self.max_new_tokens, greedy, self.calculator_tool())
        return rollouts, read_solutions(self.tokenizer, self.task.fmt, rollouts)

    def verify(self, model, problems: list, solutions: list[Solution], num_samples: int, stream: tuple,
               greedy: bool = False, copies: list[int] | None = None) -> tuple[Rollouts, list[Verification]]:
        """`num_samples` verifications of each solution, of problems[i]. copies: see `numbered`."""
        prompts = verify_prompts(self.tokenizer, self.task.fmt, problems, solutions, copies)
        rollouts = self.sample(model, prompts, num_samples, stream, self.verifier_max_new_tokens, greedy)
        return rollouts, read_verifications(self.task.fmt, rollouts)


def read_solutions(tokenizer, fmt, rollouts: Rollouts) -> list[Solution]:
    """The completions read as solutions."""
    return [read_solution(tokenizer, fmt, tokens) for tokens in rollouts.completions()]


def read_verifications(fmt, rollouts: Rollouts) -> list[Verification]:
    """The completions read as verifications of the solutions that their prompts quote."""
    rows = zip(rollouts.texts, rollouts.prompt_of(), rollouts.stopped.tolist(), strict=True)
    return [parse_verification(fmt, text, len(prompt.solution.step_ends), stopped) for text, prompt, stopped in rows]
