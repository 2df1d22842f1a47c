"""A judge of a chosen accuracy: what it ties and flips, and that both spoil its ranking as the docstring says."""
import random

import pytest

from nanochat.recipes.policy.simulated_judge import group_auc, judged


def test_what_is_not_known_stays_unknown_and_is_left_out_of_the_ranking():
    assert [judged(outcome, 0, "1+1", "a", 0, 0) for outcome in (True, False, None)] == [1.0, 0.0, None]
    assert [judged(outcome, 0, "1+1", "a", 0, 1) for outcome in (True, False, None)] == [0.0, 1.0, None]
    assert [judged(outcome, 0, "1+1", "a", 1, 1) for outcome in (True, False, None)] == [0.5, 0.5, None]
    assert group_auc([1.0, 0.0, 1.0, 0.5], [True, None, True, False], 2) == [None, 1.0]
    assert group_auc([0.5, 0.5, None, 1.0], [True, False, None, True], 2) == [0.5, None]


def test_ties_are_of_whole_problems_and_flips_of_texts_and_both_are_the_same_each_time():
    texts = [str(n) for n in range(40)]
    rewards = lambda seed, problem, ties, flips: [judged(True, seed, problem, text, ties, flips) for text in texts]
    of_problems = [rewards(0, str(n), 0.5, 0.0) for n in range(40)]
    assert all(set(row) in ({0.5}, {1.0}) for row in of_problems) and 8 < sum(row[0] == 0.5 for row in of_problems) < 32
    flipped = rewards(0, "p", 0.0, 0.5)
    assert 8 < sum(flipped) < 32 and flipped == rewards(0, "p", 0.0, 0.5) != rewards(1, "p", 0.0, 0.5)


@pytest.mark.parametrize("ties,flips", [(0.0, 0.0), (0.5, 0.0), (0.0, 0.25), (0.2, 0.1)])
def test_a_right_solution_is_ranked_above_a_wrong_one_as_often_as_ties_and_flips_say(ties, flips):
    rng, G = random.Random(0), 4
    outcomes = [rng.random() < 0.5 for _ in range(4000 * G)]
    rewards = [judged(outcome, 0, str(n // G), str(n), ties, flips) for n, outcome in enumerate(outcomes)]
    known = [auc for auc in group_auc(rewards, outcomes, G) if auc is not None]
    assert sum(known) / len(known) == pytest.approx((1 - ties) * (1 - flips) + ties / 2, abs=0.015)
    varies = [len(set(rewards[i: i + G])) > 1 for i in range(0, len(rewards), G)]
    assert sum(varies) / len(varies) == pytest.approx((1 - ties) * (1 - 2 / 2 ** G), abs=0.03)
