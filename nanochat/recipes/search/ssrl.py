"""SSRL (Fan et al. 2025): a policy that is its own search engine in training, and later has one. arXiv 2508.10874.

A solution asks, and writes the information itself, from what it knows. It earns 0.9 for a right answer and 0.1 times
its form: 0 unless each query has information that is not empty and the one answer stands at the end, else 1 where it
asked at all and 0.5 where it did not. Information is masked from the loss, although the policy wrote it. pass1 is that
of the policy's own memory, search_pass1 that with the real search, which no update has seen (sim2real).

Departures:
1. The released form counts blocks of thinking: half a point for each of two, less where they are not one more than
   the queries, and 0 above 8 of them. A block is here what stands before, between and after queries, so there is
   always one more. Their number is not bounded.
2. The released mask finds information by its text, and misses one that has a line break. Here a token is masked that
   begins in information, the marks included.
3. A tiny model knows facts and marks by SFT (task lookup), some of them wrongly.
"""
import re
from dataclasses import replace
from itertools import accumulate

import torch

from nanochat.recipes.search.search_r1 import (ROLES, add_search_args, answers_once, check, draws, learn,  # noqa: F401
                                               log_queries, named, read_queries, search_of)
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.play.play import Play
from nanochat.rl.records.rollouts import Rollouts

STATUS = "runs: with the real search it is 24.7 ± 6.4 above GRPO from memory, on its own memory 15.5 ± 14.3 below it"
SHOWN = {"generator": ["queries", "rewards/format/mean"]}
TABLE = {"gen/pass1_in": "greedy pass@1 from memory, in distribution",
         "gen/pass1_out": "greedy pass@1 from memory, out of distribution",
         "gen/search_pass1_in": "greedy pass@1 with the search, in distribution",
         "gen/search_pass1_out": "greedy pass@1 with the search, out of distribution"}
OUTCOME, FORM = 0.9, 0.1  # what the answer and the form count
add_args = add_search_args


def form_reward(fmt, text: str, stopped: bool) -> float:
    """0 unless the solution has the form, else half a point for each block of thinking, at most 1."""
    queries = read_queries(fmt, text)
    formed = queries is not None and all(q and info for q, info in queries) and answers_once(fmt, text, stopped)
    return min(1.0, (len(queries) + 1) / 2) if formed else 0.0


def information_mask(tokenizer, fmt, rollouts: Rollouts) -> torch.Tensor:
    """The tokens that begin in closed information, its marks included. -> (N, T) bool"""
    mask = torch.zeros(rollouts.tokens.shape, dtype=torch.bool)
    pattern = re.compile(f"{re.escape(fmt.info_open)}.*?{re.escape(fmt.info_close)}", re.DOTALL)
    for n, tokens in enumerate(rollouts.completions()):
        pieces = [tokenizer.token_bytes(token) for token in tokens]
        starts = [0, *accumulate(map(len, pieces))]
        for found in pattern.finditer(b"".join(pieces).decode("latin-1")):  # marks are ASCII: a character is a byte
            for k in range(len(tokens)):
                mask[n, k] |= found.start() <= starts[k] < found.end()
    return mask.to(rollouts.tokens.device)


def play(t: Play):
    solutions = t.solve("solutions", t.problems())
    outcomes = solutions.columns["outcome"] = t.check(solutions)
    fmt = t.task.fmt
    forms = [form_reward(fmt, *row) for row in zip(solutions.texts, solutions.stopped.tolist(), strict=True)]
    solutions = replace(solutions, forced=information_mask(t.tokenizer, fmt, solutions))
    log_queries(t, solutions, [text.count(fmt.query_close) for text in solutions.texts])
    t.log("generator", t.mean({"rewards/format/mean": forms}))
    yield learn(t, solutions, [None if outcome is None else OUTCOME * outcome + FORM * form
                               for outcome, form in zip(outcomes, forms, strict=True)])


def evaluate(t: Play) -> dict:
    """pass@1 from memory, and with the search."""
    return pass_at_1(t) | named(pass_at_1(t, tool=lambda: search_of(t)), "search")
