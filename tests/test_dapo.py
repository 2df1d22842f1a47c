"""DAPO: its formulas by hand, what is drawn and thrown away on one rank and on two, the update, flags."""
import math
from dataclasses import replace

import pytest
import torch
from test_dpo import parsed, random_play, writing

from nanochat import recipes
from nanochat.recipes.policy.dapo import KINDS, dynamic_sampling, length_penalty
from nanochat.rl.credit.aggregation import AGGREGATIONS
from nanochat.storage.run import Run

dapo = recipes.load("dapo")


def test_the_length_penalty_by_hand():
    """A buffer of 4 tokens: up to 20 - 4 nothing. Without one length costs nothing."""
    assert [length_penalty(n, 20, 4) for n in (1, 16, 17, 18, 20, 21)] == [0, 0, -0.25, -0.5, -1, -1]
    assert length_penalty(20, 20, 0) == 0 and length_penalty(5, 20, 20) == -0.25


# Of each batch 4 problems with 2 solutions: 1 is right, 0 wrong, ? not scorable
HARD = ["00", "00", "0?", "10"]   # one mixed group
EASY = ["11", "01", "11", "10"]   # two of them
SOME = ["??", "10", "01", "10"]   # three
OUTCOMES = {"1": True, "0": False, "?": None}


def play_of(*batches: list[str], more: tuple = (), run: Run | None = None):
    """A step whose problems are solved like this, batch by batch."""
    t = random_play("dapo", "--examples-per-step", "4", "--num-samples", "2", "--max-batches", str(len(batches)), *more)
    t.run = run or t.run
    order, world, rank = dapo.labels(t.args), t.run.world, t.run.rank
    t.task.check = lambda problem, text: OUTCOMES[text]
    return writing(t, {draw: [text for group in batch[rank::world] for text in group]
                       for draw, batch in zip(order, batches, strict=True)})


def test_batches_are_drawn_until_there_are_as_many_mixed_groups_as_wanted(base):
    t = play_of(HARD, EASY, SOME, SOME)
    kept = dynamic_sampling(t)
    # 1 + 2 mixed groups, and of the third batch the first; its two others are more than is wanted.
    assert kept.texts == ["1", "0", "0", "1", "1", "0", "1", "0"]
    assert [p.problem.index for p in kept.prompts] == [3, 5, 7, 9] and t.num_drawn == 12
    assert list(t.asked) == ["solutions", "batch_2", "batch_3"]
    found = {name: t.metrics[f"gen/{name}"] for name in (
        "batches", "ran_out", "dropped/right", "dropped/wrong", "dropped/unknown", "dropped/surplus")}
    assert found == {"batches": 3, "ran_out": 0, "dropped/right": 2 / 12, "dropped/wrong": 3 / 12,
                     "dropped/unknown": 1 / 12, "dropped/surplus": 2 / 12}
    assert t.metrics["gen/dropped/tokens"] == pytest.approx(16 / 24)  # every solution has as many
    assert t.metrics["gen/rewards/outcome/mean"] == pytest.approx((1 + 6 + 3) / (7 + 8 + 6))  # of all that were drawn
    assert t.metrics["gen/unscorable"] == pytest.approx(3 / 24)


def test_where_the_draws_run_out_what_there_is_is_trained_on_and_it_is_said(base):
    t = play_of(HARD, HARD)
    update, = dapo.play(t)
    assert update.parts[0][0].texts == ["1", "0", "1", "0"]
    assert (t.metrics["gen/batches"], t.metrics["gen/ran_out"]) == (2, 1)
    t = play_of(["11", "00", "??", "1?"])
    assert list(dapo.play(t)) == [] and t.metrics["gen/ran_out"] == 1 and t.metrics["gen/dropped/tokens"] == 1


def test_a_solution_that_cannot_be_scored_is_no_part_of_a_mixed_group(base):
    t = play_of(["0?1", "101", "10?", "011"], more=("--num-samples", "3"))
    assert dynamic_sampling(t).texts == [*"01", *"101", *"10", *"011"]


def test_a_long_right_solution_earns_less_than_a_short_one(base):
    """Lengths 2, 2 and 6 tokens of at most 8, buffer 4: 1, -1 and 1 - 2 / 4 = .5. Mean 1/6, unbiased std 1.040833."""
    t = play_of(["101"] * 4, more=("--num-samples", "3", "--max-new-tokens", "8", "--overlong-buffer", "4"))
    solve = t.solve
    t.solve = lambda *args: replace(solve(*args), lengths=torch.tensor([2, 2, 6] * 4), tokens=torch.ones(
        12, 6, dtype=torch.long), sampler_logprobs=torch.zeros(12, 6))
    update, = dapo.play(t)
    rollouts, advantages = update.parts[0]
    assert rollouts.columns["reward"][:3] == [1, -1, 0.5] and t.metrics["gen/rewards/overlong/mean"] == -0.5 / 3
    std = math.sqrt(((1 - 1 / 6) ** 2 + (1 + 1 / 6) ** 2 + (0.5 - 1 / 6) ** 2) / 2)
    expected = torch.tensor([(r - 1 / 6) / std for r in (1, -1, 0.5)])
    torch.testing.assert_close(advantages[:3, 0], expected, rtol=1e-5, atol=1e-5)
    assert t.metrics["gen/variance/overlong"] == pytest.approx(1 / 12)


@pytest.mark.parametrize("rank, kept", [(0, []), (1, [3, 5, 7, 9])])
def test_two_ranks_keep_the_groups_that_one_keeps(base, rank, kept):
    """Those of the first of the tests above; each rank is told of the other's groups."""
    batches = iter([HARD, EASY, SOME])
    t = play_of(HARD, EASY, SOME, SOME, run=Run("r", torch.device("cpu"), rank, 2, ""))
    t.gather = lambda kinds: [KINDS["1" in group, "0" in group] for group in next(batches)]
    assert [p.problem.index for p in dynamic_sampling(t).prompts] == kept
    assert list(t.asked) == ["solutions", "batch_2", "batch_3"] and t.metrics["gen/dropped/surplus"] == 2 / 12


def test_the_defaults_are_the_papers():
    args = parsed("dapo")
    assert (args.clip_low, args.clip_high, args.aggregation, args.kl_coef, args.max_batches) == (
        0.2, 0.28, "token", 0, 10)
    assert AGGREGATIONS["token"](torch.tensor([2.0, 8.0]), 10, 2, 8).tolist() == pytest.approx([0.1, 0.1])
