"""
Verdict tokens as a scalar verifier: where they are asked, and the coefficients of losses of their log-odds by hand. The
updates are those of the recipes (test_supervised, test_refit, test_cooper).
"""
import math
from dataclasses import replace

import pytest
import torch
from test_dpo import random_play, verdict_odds

from nanochat.common import BadInput
from nanochat.rl.records.prompts import Prompt, Solution
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.log_odds import (PLACES, after_steps, bce_coefficients, end_read, ended, log_odds,
                                         pair_coefficients, squared_coefficients, steps_filled, steps_read,
                                         verdict_tokens)
from nanochat.tokenizer import Tokenizer
from tasks.common import Problem
from tasks.formats import COMPACT, PAPER

BYTES = Tokenizer.train(iter([]), 265)
# Three solutions: their lengths, and where their steps end. Each is ended after its steps.
LENGTHS, STEPS = [5, 3, 6], [Solution("", [1, 3]), Solution("", []), Solution("", [0, 2, 4])]


def rollouts_of(lengths=LENGTHS, seed: int = 0) -> Rollouts:
    """Random rollouts, after two prompts in turn."""
    draw = torch.Generator().manual_seed(seed)
    N, T = len(lengths), max(lengths)
    prompts = [Prompt(torch.randint(265, (n,), generator=draw).tolist(), Problem("rl", n, "p", "")) for n in (3, 4)]
    tokens = torch.randint(265, (N, T), generator=draw)
    return Rollouts(prompts, torch.arange(N) % 2, tokens, torch.zeros(N, T), torch.tensor(lengths),
                    torch.ones(N, dtype=torch.bool), limit=T, texts=["x"] * N)


def test_verdict_tokens_are_the_first_in_which_the_verdicts_differ_if_they_do():
    assert verdict_tokens(BYTES, COMPACT) == (ord("T"), ord("F"))
    right, wrong = verdict_tokens(BYTES, PAPER)
    assert (chr(right), chr(wrong)) == ("C", "I")
    with pytest.raises(BadInput, match="format compact: of 'T' and 'Th'"):
        verdict_tokens(BYTES, replace(COMPACT, incorrect="Th"))


def test_verdicts_are_asked_and_labels_stand_after_the_last_token_of_what_they_are_about():
    places = {name: [row.nonzero()[:, 0].tolist() for row in find(rollouts_of(), STEPS)]
              for name, find in PLACES.items()}
    assert places["end"] == [[4], [2], [5]]          # the end token's place: after all of the solution
    assert places["steps"] == [[2, 4], [], [1, 3, 5]]
    assert places["tokens"] == [[0, 1, 2, 3, 4], [0, 1, 2], [0, 1, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match="rollout 0 has 5 tokens, and its last step ends with the last of them"):
        after_steps(rollouts_of(), [Solution("", [4]), *STEPS[1:]])
    filled = steps_filled(rollouts_of(), STEPS, [[0.25, 1.0], [], [1.0, 0.5, 0.0]])
    assert filled.tolist() == [[0, 0, 0.25, 0, 1, 0], [0] * 6, [0, 1, 0, 0.5, 0, 0]]
    assert steps_read(rollouts_of(), STEPS, filled) == [[0.25, 1.0], [], [1.0, 0.5, 0.0]]
    shared = [Solution("", [1, 1]), STEPS[1], Solution("", [2, 2])]  # of steps that end in one token the least counts
    filled = steps_filled(rollouts_of(), shared, [[0.0, 1.0], [], [1.0, 0.5]])
    assert filled[0, 2] == 0 and filled[2, 3] == 0.5 and filled.sum() == 0.5
    assert end_read(rollouts_of(), torch.arange(18.0).view(3, 6)).tolist() == [4.0, 6 + 2, 12 + 5]


def test_a_solution_that_was_cut_gets_an_end_token(base):
    t, solutions = random_play("refit"), rollouts_of()
    solutions.stopped = torch.tensor([True, False, True])
    whole = ended(t, "verifier", solutions.prompt_of(), solutions)
    assert whole.completions()[0] == solutions.completions()[0]
    assert whole.completions()[1] == [*solutions.completions()[1], t.tokenizer.assistant_end]


@pytest.mark.parametrize("temperature", ["1", "0.5"])
def test_log_odds_are_the_difference_of_two_logits_at_the_sampling_temperature(base, temperature):
    t, rollouts = random_play("refit", "--temperature", temperature), rollouts_of()
    s = log_odds(t, "verifier", rollouts)
    for found, row, length in zip(s, verdict_odds(t, "verifier", rollouts), LENGTHS, strict=True):
        torch.testing.assert_close(found[:length].double(), row.detach(), rtol=1e-4, atol=1e-4)
        assert (found[length:] == 0).all()


def test_coefficients_by_hand():
    s, places = torch.tensor([[0.0, 0.0, math.log(3), 40.0, -40.0]]), torch.tensor([[1, 1, 1, 1, 0]]).bool()
    labels = torch.tensor([[1.0, 0.0, 0.5, 0.0, 1.0]])
    # V = .5, .5, .75, 1: y - V, and times V (1 - V) = .25, .25, .1875, 0
    torch.testing.assert_close(bce_coefficients(s, labels, places), torch.tensor([[0.5, -0.5, -0.25, -1.0, 0.0]]))
    torch.testing.assert_close(squared_coefficients(s, labels, places),
                               torch.tensor([[0.125, -0.125, -0.25 * 0.1875, 0.0, 0.0]]))
    scores = torch.tensor([0.0, 0.0, math.log(3), 50.0])
    # equal: 1/2; log 3 apart the right way: 1 / (1 + 3); far apart the wrong way: 1
    torch.testing.assert_close(pair_coefficients(scores, [0], [1]), torch.tensor([0.5, -0.5, 0.0, 0.0]))
    torch.testing.assert_close(pair_coefficients(scores, [2], [1]), torch.tensor([0.0, -0.25, 0.25, 0.0]))
    torch.testing.assert_close(pair_coefficients(scores, [0, 0], [3, 1]), torch.tensor([1.5, -0.5, 0.0, -1.0]))
    assert pair_coefficients(scores, [], []).tolist() == [0, 0, 0, 0]
