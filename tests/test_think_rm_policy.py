"""The policy that learns from judged pairs: its differences and its update by hand, and what is refused."""
import pytest
import torch
from test_dpo import random_play, writing

from nanochat.recipes.reward_models import think_rm_policy
from nanochat.rl.credit.advantages import PRESETS, source_advantages
from nanochat.rl.credit.rewards import terminal_rewards
from nanochat.rl.verify.comparing import all_pairs


def test_every_pair_of_a_group_comes_once_and_places_are_shared():
    assert all_pairs([5, 5, 5]) == [[0, 1], [2, 0], [1, 2]]
    assert all_pairs([5, 3, 5, 3]) == [[0, 2], [1, 3]] and all_pairs([1]) == all_pairs([]) == []
    pairs = all_pairs([0] * 8)
    assert {frozenset(pair) for pair in pairs} == {frozenset((i, j)) for i in range(8) for j in range(i)}
    assert {sum(first == i for first, _ in pairs) for i in range(8)} <= {3, 4}


def test_a_difference_is_the_mean_over_readable_choices_and_0_without_one():
    scores = [[1, 0], None, [1, 0], [0, 1], None, None, [2 / 3, 1 / 3], [1, 0]]  # two of each pair
    d = think_rm_policy.differences([[0, 1], [2, 0], [1, 2], [3, 4]], scores, 5, 2)
    assert d[0].tolist() == [0, 1, 0, 0, 0] and d[1].tolist() == [-1, 0, 0, 0, 0]
    assert d[3, 4].item() == pytest.approx(2 / 3) and torch.equal(d, -d.T)


def played(solutions: list[str], verifications: list[str], *flags: str):
    """The advantages of a step on three solutions, its metrics, and what the judge is asked."""
    t = writing(random_play("think_rm_policy", "--num-samples", "3", "--examples-per-step", "1", *flags),
                {"solutions": solutions, "verdicts": verifications or [""]})
    t.task.check = lambda problem, text: text == "=1"
    update, = think_rm_policy.play(t)
    asked = [t.tokenizer.decode(prompt.ids[2:-2]).split("|", 1)[1] for prompt in t.asked["verdicts"]]
    return update.parts[0][1], t.metrics, asked


def test_the_policy_learns_the_differences_of_every_pair(base):
    """Rewards 1, 0 and -2, so strengths 1, 3 and 2: what GRPO makes of the rewards."""
    advantages, metrics, asked = played(["=1", "=0", "=2"], ["=A1", "=B3", "=A2"], "--grades", "graded")
    assert asked == ["=1|=0|AS", "=2|=1|AS", "=0|=2|AS"]
    rewards = terminal_rewards([1.0, 0.0, -2.0], torch.full((3,), 3))
    grpo = source_advantages(rewards, torch.zeros(3, dtype=torch.long), torch.ones(3, 3) > 0, PRESETS["grpo"])
    torch.testing.assert_close(advantages, grpo, rtol=1e-4, atol=1e-4)  # at every token
    assert (metrics["gen/duels/right_won"], metrics["gen/duels/unread"], metrics["gen/duels/equal"]) == (1, 0, 0)


def test_equal_solutions_are_not_judged_and_without_choices_nothing_is_learned(base):
    advantages, metrics, asked = played(["=1", "=1", "=2"], ["=B", "=A"])  # 2 against 0, 1 against 2
    assert asked == ["=2|=1|A", "=1|=2|A"]
    # sums over 3 of the rows 0 0 1, 0 0 1, -1 -1 0; squares 4 over 2 * 3 * 2
    expected = torch.tensor([1 / 3, 1 / 3, -2 / 3]) / (1 / 3) ** 0.5
    torch.testing.assert_close(advantages[:, 0], expected, rtol=1e-4, atol=1e-4)
    assert metrics["gen/duels/equal"] == pytest.approx(1 / 3)
    advantages, metrics, _ = played(["=1", "=0", "=2"], ["no"] * 3)
    assert not advantages.any() and metrics["gen/duels/unread"] == 1 and metrics["gen/duels/right_won"] is None
    assert played(["=1"] * 3, [])[2] == []


def test_by_length_a_binary_choice_counts_one_over_the_characters_of_its_judgment(base):
    """Judgments of 2, 4 and 8 characters: A of (0, 1), (2, 0) and (1, 2), so d_01 = 1/2, d_20 = 1/4 and d_12 = 1/8."""
    advantages, _, asked = played(["=1", "=0", "=2"], ["=A", "+1=A", "+1+1+1=A"], "--choice-weight", "length")
    assert asked == ["=1|=0|A", "=2|=1|A", "=0|=2|A"]
    variance = 2 * (1 / 4 + 1 / 16 + 1 / 64) / (2 * 3 * 2)  # both signs of each, over 2 G (G - 1)
    expected = torch.tensor([1 / 2 - 1 / 4, 1 / 8 - 1 / 2, 1 / 4 - 1 / 8]) / 3 / variance ** 0.5
    torch.testing.assert_close(advantages[:, 0], expected, rtol=1e-4, atol=1e-4)
