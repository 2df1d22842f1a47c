"""
SCoRe: rewards of two turns, the KL in the weights, what an update is made of in either stage, and the evaluation.

    python -m pytest tests/test_score_recipe.py -q
"""
import json
import statistics

import pytest
import torch
from test_critique_grpo import (assert_close, by_text, moved, padded, parsed, plain_logprobs, random_rollouts, records,
                                tiny_model, train, update_gradient, watched)

from nanochat.common import BadInput
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.kernels.losses import PolicyLoss, k2
from nanochat.recipes.policy import score
from nanochat.recipes.policy.score import changes, turn_rewards, with_kl
from nanochat.rl.records.prompts import generator_prompt
from scripts import tango_rl
from tasks import make_task
from tasks.chain import Chain

OUTCOMES = [(False, False), (False, True), (True, False), (True, True)]


# The formulas

@pytest.mark.parametrize("stage, credit, rewards", [
    (1, "own", [(0, 0), (0, 1), (0, 0), (0, 1)]),      # eq. 3: the second attempt alone is rewarded
    (1, "total", [(0, 0), (1, 1), (0, 0), (1, 1)]),
    (2, "own", [(0, 0), (0, 11), (1, -10), (1, 1)]),   # 1 + 10 * (1 - 0), 0 + 10 * (0 - 1), 1 + 10 * (1 - 1)
    (2, "total", [(0, 0), (11, 11), (-9, -10), (2, 1)]),
])
def test_rewards_of_both_turns_by_hand(stage, credit, rewards):
    assert [turn_rewards(a, b, stage, 10.0, credit) for a, b in OUTCOMES] == rewards


def test_alpha_0_leaves_both_outcomes():
    assert [turn_rewards(a, b, 2, 0.0) for a, b in OUTCOMES] == OUTCOMES


def test_an_episode_that_cannot_be_scored_earns_nothing():
    assert turn_rewards(None, True, 1, 10.0) == turn_rewards(True, None, 2, 10.0) == (None, None)


def test_the_kl_in_the_weights_is_the_gradient_of_k2():
    logprobs = torch.tensor([[-0.1, -2.0, -3.5]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-0.4, -2.0, -1.0]], dtype=torch.float64)
    A = torch.tensor([[1.5, -0.5, 0.0]], dtype=torch.float64)
    (-A * logprobs + 0.1 * k2(logprobs, ref)).sum().backward()
    torch.testing.assert_close(-with_kl(A, logprobs.detach() - ref, 0.1), logprobs.grad)
    # by hand: log ratios .3, 0, -2.5
    kl = torch.tensor([[0.03, 0.0, -0.25]], dtype=torch.float64)
    torch.testing.assert_close(with_kl(A, logprobs.detach() - ref, 0.1), A - kl)


def test_one_update_on_two_turns_is_the_gradient_of_the_loss():
    """REINFORCE and k2 on sums over tokens, strong on the first turn; mean over the attempts of both turns."""
    model, reference = tiny_model(), tiny_model(1)
    turns = random_rollouts([7], [5, 3], seed=1), random_rollouts([4, 9], [2, 6], seed=2)  # two episodes
    A, betas = torch.tensor([[0.0, 0.0], [1.0, -1.0]]).double(), (0.1, 0.01)
    parts, loss = [], 0.0
    for rollouts, advantages, beta in zip(turns, A, betas, strict=True):
        now, start = plain_logprobs(model, rollouts), [row.detach() for row in plain_logprobs(reference, rollouts)]
        for a, row, ref in zip(advantages, now, start, strict=True):
            loss = loss + (-a * row.sum() + beta * k2(row, ref).sum()) / 4
        T = int(rollouts.lengths.max())
        parts.append((rollouts, with_kl(advantages[:, None].expand(-1, T), padded(now, T) - padded(start, T), beta)))
    found = update_gradient(model, parts, "rollout")
    assert_close(found, torch.autograd.grad(loss, list(model.parameters())), 1e-5)


def test_changes_between_attempts():
    found = changes([*OUTCOMES, (None, True), (True, None)])
    assert found == {"delta": [0, 1, -1, 0], "wrong_to_right": [False, True, False, False],
                     "right_to_wrong": [False, False, True, False]}


@pytest.mark.parametrize("flags", [["--credit", "mine"], ["--alpha", "nan"], ["--beta2", "-1"],
                                   ["--stage1-steps", "-1"], ["--updates-per-batch", "2"], ["--num-samples", "1"]])
def test_settings_that_cannot_work_are_refused(flags):
    args = parsed("--recipe", "score", *flags)
    with pytest.raises(BadInput, match=flags[0]):
        score.check(args, make_task(args))


# Runs

def rloo(values: list[float | None]) -> list[float]:
    """Each value less the mean of the others; 0 for one that is None or alone."""
    result = []
    for n, value in enumerate(values):
        others = [v for m, v in enumerate(values) if m != n and v is not None]
        result.append(value - statistics.mean(others) if value is not None and others else 0.0)
    return result


def test_the_stages_reward_and_hold_the_turns_as_they_should(base, monkeypatch):
    """Two steps of stage I and two of stage II: prompts, baselines over a problem, KL per turn and stage."""
    monkeypatch.setattr(Chain, "check", lambda self, problem, solution: by_text(solution))
    updates, drawn = watched(monkeypatch)
    train("--recipe", "score", "--num-steps", "4", "--stage1-steps", "2")
    task, tokenizer = make_task(parsed()), load_tokenizer(str(base / "tokenizer"))
    assert [r["gen/stage"] for r in records(base)] == [1, 1, 2, 2]
    for step, ((wanted, now, start), draws) in enumerate(zip(updates, drawn, strict=True)):
        stage = 1 if step < 2 else 2
        assert (wanted.role, wanted.loss, wanted.aggregation) == ("generator", PolicyLoss("reinforce"), "rollout")
        first, second = wanted.parts[0][0], wanted.parts[1][0]
        assert first.texts == draws["solutions"].texts and second.texts == draws["second"].texts
        for n, (one, two) in enumerate(zip(first.prompt_of(), second.prompt_of(), strict=True)):
            assert one.problem == two.problem and one.ids == generator_prompt(tokenizer, task.fmt, one.problem.prompt)
            assert two.ids == tokenizer.render_prompt(f"{first.texts[n]}||{two.problem.prompt}")
        pairs = [(by_text(a), by_text(b)) for a, b in zip(first.texts, second.texts, strict=True)]
        for turn, (rollouts, found) in enumerate(wanted.parts):
            beta = 0.1 if (stage, turn) == (1, 0) else 0.01
            rewards = [turn_rewards(*pair, stage, 10.0)[turn] for pair in pairs]
            expected = [a for i in range(0, 16, 4) for a in rloo(rewards[i: i + 4])]
            log_ratio = now[turn] - start[turn]
            assert (float(log_ratio.abs().max()) > 1e-3) == (step > 0)
            for n, length in enumerate(rollouts.lengths.tolist()):
                wanted_row = expected[n] - beta * log_ratio[n, :length]
                torch.testing.assert_close(found[n, :length], wanted_row, rtol=1e-4, atol=1e-5)
        if stage == 1:  # nothing but the KL holds the first attempt
            torch.testing.assert_close(wanted.parts[0][1], -0.1 * (now[0] - start[0]), rtol=1e-4, atol=1e-6)


def test_the_first_attempt_is_evaluated_as_in_other_recipes(base):
    found = {}
    for recipe in ("grpo", "score"):
        train("--recipe", recipe, "--num-steps", "0", "--eval-examples", "32", "--run", recipe)
        found[recipe] = json.loads((base / "runs" / recipe / "summary.json").read_text())["before"]
    for split in ("in", "out"):
        names = ("pass1", "turn2", "delta", "wrong_to_right", "right_to_wrong")
        scores = {name: found["score"][f"gen/{name}_{split}"] for name in names}
        assert scores["pass1"] == found["grpo"][f"gen/pass1_{split}"]
        assert scores["delta"] == pytest.approx(scores["turn2"] - scores["pass1"])
        assert scores["delta"] == pytest.approx(scores["wrong_to_right"] - scores["right_to_wrong"])


def test_what_is_logged_agrees_with_what_was_drawn(base, monkeypatch):
    monkeypatch.setattr(Chain, "check", lambda self, problem, solution: by_text(solution))
    _, drawn = watched(monkeypatch)
    train("--recipe", "score", "--num-steps", "1", "--stage1-steps", "0")
    record, texts = records(base)[0], [drawn[0][draw].texts for draw in ("solutions", "second")]
    one, two = ([by_text(text) for text in turn] for turn in texts)
    known = [(a, b) for a, b in zip(one, two, strict=True) if None not in (a, b)]
    mean = lambda values: pytest.approx(sum(values) / len(values))
    assert record["gen/reward"] == mean([a for a in one if a is not None])
    assert record["gen/turn2/accuracy"] == mean([b for b in two if b is not None])
    assert record["gen/turn2/wrong_to_right"] == mean([b > a for a, b in known])
    assert record["gen/turn2/right_to_wrong"] == mean([a > b for a, b in known])
    assert record["gen/turn2/shaped_reward"] == mean([b + 10 * (b - a) for a, b in known])
    assert record["gen/turn2/copied"] == mean([a == b for a, b in zip(*texts, strict=True)])
    assert record["gen/unscorable"] == mean([pair not in known for pair in zip(one, two, strict=True)])
    assert record["gen/turn1/kl"] == record["gen/turn2/kl"] == pytest.approx(0, abs=1e-4)  # the start is the reference
    assert record["gen/stage"] == 2


def test_only_the_generator_is_there_and_it_moves(base, monkeypatch):
    monkeypatch.setattr(Chain, "check", lambda self, problem, solution: by_text(solution))
    train("--recipe", "score", "--num-steps", "2", "--stage1-steps", "1", "--credit", "total")
    assert moved(base, "tiny", "gen") and not (base / "chatrl_checkpoints" / "r-ver").exists()
    # a record of a second attempt shows the first, whether it was right, and the second
    rows = [json.loads(line) for line in (base / "runs" / "r" / "rollouts.jsonl").read_text().splitlines()]
    seconds = [row for row in rows if "completion" in row]
    assert len(seconds) == len(rows) // 2
    for row in seconds:
        assert row["outcome"] == by_text(row["solution"]) and row["second_outcome"] == by_text(row["completion"])
