"""
95% intervals of scores on a benchmark: how far they would move on other problems of the same kind.

    wilson(shares=[1.0, 0.5, 0.0, 0.25], num_samples=4)    # of pass@1, four samples of each problem

Problems are independent, samples of one problem are not. A trained model's seed is not among what varies here.
"""
import math

import numpy as np

Z = 1.959964  # 97.5% quantile of the normal distribution
NUM_DRAWS = 10000


def wilson(shares: list[float], num_samples: int = 1) -> tuple[float, float]:
    """The interval of the mean over problems of each one's share of right samples: Wilson's (1927), with as many trials
    as independent ones would need to spread the mean as much as the problems do (Kish's design effect). With one sample
    each these are the problems, and it is Wilson's as it is; else from as many as there are problems (also where all
    is right, or nothing) to as many as there are samples."""
    num, mean = len(shares), sum(shares) / len(shares)
    spread, chance = sum((share - mean) ** 2 for share in shares) / num, mean * (1 - mean)
    trials = num * (1 if not chance else min(num_samples, chance / spread) if spread else num_samples)
    centre = (mean + Z ** 2 / (2 * trials)) / (1 + Z ** 2 / trials)
    half = Z / (1 + Z ** 2 / trials) * math.sqrt(chance / trials + Z ** 2 / (4 * trials ** 2))
    return max(0.0, centre - half), min(1.0, centre + half)


def of_mean(values: list[float], intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """The interval of the mean of independent values that have intervals: their distances to the bounds, added as
    squares (Zou and Donner 2008)."""
    mean, num = sum(values) / len(values), len(values)
    below, above = (math.sqrt(sum((value - pair[side]) ** 2 for value, pair in zip(values, intervals, strict=True)))
                    for side in (0, 1))
    return mean - below / num, mean + above / num


def bootstrap_f1(subsets: list[dict], seed: int) -> tuple[float, float] | None:
    """The interval of the mean over subsets of ProcessBench's F1: the percentile bootstrap (Efron 1979), erroneous and
    correct solutions of each subset drawn anew. subsets: error_acc and correct_acc of `first_error_scores`, of n
    solutions, num_error of them erroneous. None where every draw is equal, as with nothing found at all."""
    draw, sums = np.random.default_rng(seed), np.zeros(NUM_DRAWS)
    for row in subsets:
        found, kept = (draw.binomial(num, row[score], NUM_DRAWS) / num for num, score in (
            (row["num_error"], "error_acc"), (row["n"] - row["num_error"], "correct_acc")))
        sums += np.divide(2 * found * kept, found + kept, out=np.zeros(NUM_DRAWS), where=found + kept > 0)
    low, high = np.percentile(sums / len(subsets), [2.5, 97.5]).tolist()
    return None if low == high else (low, high)
