"""SCoRe: rewards of two turns, the update of either stage against its loss, and the evaluation."""
import statistics

import pytest
from test_dpo import assert_learns, drawn_by, random_play, token_logprobs

from nanochat import recipes
from nanochat.kernels.losses import PolicyLoss
from nanochat.recipes.policy import score
from nanochat.recipes.policy.score import changes, turn_rewards
from nanochat.rl.records.prompts import generator_prompt

OUTCOMES = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize("stage, credit, rewards", [
    (1, "own", [(0, 0), (0, 1), (0, 0), (0, 1)]),      # eq. 3: the second attempt alone is rewarded
    (1, "total", [(0, 0), (1, 1), (0, 0), (1, 1)]),
    (2, "own", [(0, 0), (0, 11), (1, -10), (1, 1)]),   # 1 + 10 * (1 - 0), 0 + 10 * (0 - 1), 1 + 10 * (1 - 1)
    (2, "total", [(0, 0), (11, 11), (-9, -10), (2, 1)]),
])
def test_rewards_of_both_turns_by_hand(stage, credit, rewards):
    assert [turn_rewards(a, b, stage, 10.0, credit) for a, b in OUTCOMES] == rewards


def test_an_episode_that_cannot_be_scored_earns_nothing_and_is_no_change():
    assert turn_rewards(None, True, 1, 10.0) == turn_rewards(True, None, 2, 10.0) == (None, None)
    found = changes([*OUTCOMES, (None, True), (True, None)])
    assert found == {"delta": [0, 1, -1, 0], "wrong_to_right": [False, True, False, False],
                     "right_to_wrong": [False, False, True, False]}


def rloo(values: list[float | None]) -> list[float]:
    """Each value less the mean of the others; 0 for one that is None or alone."""
    result = []
    for n, value in enumerate(values):
        others = [v for m, v in enumerate(values) if m != n and v is not None]
        result.append(value - statistics.mean(others) if value is not None and others else 0.0)
    return result


def played(stage: int, *flags: str):
    """A step of a stage, its update, and what was drawn."""
    t = random_play("score", "--stage1-steps", "1", *flags)
    t.steps["generator"] = stage - 1
    drawn = drawn_by(t)
    update, = score.play(t)
    return t, update, drawn


@pytest.mark.parametrize("stage, credit", [(1, "own"), (2, "own"), (2, "total")])
def test_either_stage_takes_the_gradient_of_its_loss(base, stage, credit):
    """REINFORCE and k2 on sums over tokens, baselines over a problem, mean over the attempts of both turns. In stage I
    nothing but the KL, ten times as strong, holds the first attempt."""
    t, update, drawn = played(stage, "--credit", credit)
    (first, _), (second, _) = update.parts
    generator, outcome, losses = t.roles["generator"], (lambda text: t.task.check(None, text)), []
    assert first.texts == drawn["solutions"].texts and second.texts == drawn["second"].texts
    assert (update.loss, t.metrics["gen/stage"]) == (PolicyLoss("reinforce"), stage)
    for n, (one, two) in enumerate(zip(first.prompt_of(), second.prompt_of(), strict=True)):
        assert one.problem == two.problem and one.ids == generator_prompt(t.tokenizer, t.task.fmt, one.problem.prompt)
        assert two.ids == t.tokenizer.render_prompt(f"{first.texts[n]}||{two.problem.prompt}")
    pairs = [(outcome(a), outcome(b)) for a, b in zip(first.texts, second.texts, strict=True)]
    assert list(zip(second.columns["outcome"], second.columns["second_outcome"], strict=True)) == pairs
    for turn, rollouts in enumerate((first, second)):
        rewards = [turn_rewards(*pair, stage, 10.0, credit)[turn] for pair in pairs]
        A = [a for i in range(0, 32, 8) for a in rloo(rewards[i: i + 8])]
        beta = 0.1 if (stage, turn) == (1, 0) else 0.01
        assert any(A) == ((stage, turn) != (1, 0))
        now, start = (token_logprobs(model, rollouts) for model in (generator.model, generator.reference))
        losses += [-a * x.sum() + beta / 2 * ((x - ref.detach()) ** 2).sum()
                   for a, x, ref in zip(A, now, start, strict=True)]
    assert_learns(t, update, sum(losses) / len(losses))


def test_what_is_logged_agrees_with_what_was_drawn(base):
    t, update, drawn = played(2)
    texts = [drawn[draw].texts for draw in ("solutions", "second")]
    one, two = ([t.task.check(None, text) for text in turn] for turn in texts)
    known = [(a, b) for a, b in zip(one, two, strict=True) if None not in (a, b)]
    mean = lambda values: pytest.approx(sum(values) / len(values))
    found = {name.removeprefix("gen/"): value for name, value in t.metrics.items()}
    assert found["reward"] == mean([a for a in one if a is not None])
    assert found["turn2/accuracy"] == mean([b for b in two if b is not None])
    assert found["turn2/wrong_to_right"] == mean([b > a for a, b in known])
    assert found["turn2/right_to_wrong"] == mean([a > b for a, b in known])
    assert found["turn2/shaped_reward"] == mean([b + 10 * (b - a) for a, b in known])
    assert found["turn2/copied"] == mean([a == b for a, b in zip(*texts, strict=True)])
    assert found["unscorable"] == mean([pair not in known for pair in zip(one, two, strict=True)])
    generator = t.roles["generator"]
    for turn, (rollouts, _) in enumerate(update.parts, 1):
        now, start = (token_logprobs(model, rollouts) for model in (generator.model, generator.reference))
        assert found[f"turn{turn}/kl"] == pytest.approx(
            sum((a - b).sum().item() for a, b in zip(now, start, strict=True)) / len(now), rel=1e-4)


def test_the_first_attempt_is_evaluated_as_in_other_recipes(base):
    found = {}
    for recipe in ("grpo", "score"):
        t = random_play(recipe, "--eval-examples", "32")
        t.evaluating = True
        found[recipe] = recipes.load(recipe).evaluate(t)
    for split in ("in", "out"):
        names = ("pass1", "turn2", "delta", "wrong_to_right", "right_to_wrong")
        scores = {name: found["score"][f"gen/{name}_{split}"] for name in names}
        assert scores["pass1"] == found["grpo"][f"gen/pass1_{split}"] and scores["wrong_to_right"] > 0
        assert scores["delta"] == pytest.approx(scores["turn2"] - scores["pass1"])
        assert scores["delta"] == pytest.approx(scores["wrong_to_right"] - scores["right_to_wrong"])
