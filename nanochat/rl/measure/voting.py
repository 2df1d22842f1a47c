"""
What k verifications of a solution, or n solutions of a problem, decide together, and how far that can be believed.

k verifications, n solutions, K steps. A verdict is True, False or None (unreadable), which never speaks for anything.
"""
from bisect import bisect_left, bisect_right

from nanochat.rl.measure.scores import majority, outcome_of, pass_at_k


def mean_scores(rows: list[dict]) -> dict:
    """The mean of each score over several rows of `first_error_scores`; None where one of them has none."""
    return {name: None if any(row[name] is None for row in rows) else sum(row[name] for row in rows) / len(rows)
            for name in ("error_acc", "correct_acc", "f1")}


# Scores of one solution from its k verifications: verdicts (k), step_verdicts (k, K), aligned

def final_share(verdicts: list[bool | None], step_verdicts: list[list[bool | None]]) -> float:
    """The share of the verifications whose final verdict is CORRECT."""
    return verdicts.count(True) / len(verdicts)


def step_share(verdicts: list[bool | None], step_verdicts: list[list[bool | None]]) -> float:
    """The share of steps judged right, mean over the verifications; 0 without steps."""
    said = [v for row in step_verdicts for v in row]
    return said.count(True) / max(1, len(said))


def min_step(verdicts: list[bool | None], step_verdicts: list[list[bool | None]]) -> float:
    """The share of verifications that judge the weakest step right (Wang et al. 2024); 0 without steps."""
    return min((column.count(True) / len(column) for column in zip(*step_verdicts, strict=True)), default=0.0)


SCORES = {"final": final_share, "steps": step_share, "min_step": min_step}


# Choosing among n solutions

def best_of_n(scores: list[float], tie_breaks: list[float]) -> int:
    """The solution with the highest score (Cobbe et al. 2021); ties go to the higher tie break, then the earliest."""
    return max(range(len(scores)), key=lambda i: (scores[i], tie_breaks[i], -i))


def weighted_vote(answers: list[str | None], scores: list[float]) -> str | None:
    """The answer with the largest sum of scores (Li et al. 2023), ties going to the earliest; None without any."""
    sums: dict[str, float] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            sums[answer] = sums.get(answer, 0.0) + score
    # Rounded, or 1/3 + 2/3 in another order would decide ties.
    return max(sums, key=lambda answer: round(sums[answer], 9), default=None)


def choose(answers: list[str | None], outcomes: list[bool | None], scores: list[float],
           tie_breaks: list[float]) -> dict | None:
    """What one problem's n solutions come to, as shares of right ones: pass@1, maj, bon, weighted, pass@n; and
    "chosen", the answers or (bon) the index. None without an outcome."""
    kept = [i for i, outcome in enumerate(outcomes) if outcome is not None]
    if not kept:
        return None
    answers, outcomes, scores, tie_breaks = ([row[i] for i in kept] for row in (answers, outcomes, scores, tie_breaks))
    n, num_right = len(kept), sum(outcomes)
    vote, best, weighted = majority(answers), best_of_n(scores, tie_breaks), weighted_vote(answers, scores)
    right = lambda answer: float(outcome_of(answer, answers, outcomes))
    return {"pass@1": num_right / n, "maj": right(vote), "bon": float(outcomes[best]), "weighted": right(weighted),
            "pass@n": pass_at_k(n, num_right, n), "chosen": {"maj": vote, "bon": kept[best], "weighted": weighted}}


# Calibration of shares (of k verifications that say CORRECT) as probabilities of being right

def brier(shares: list[float], outcomes: list[bool]) -> float:
    """The mean of (share - outcome)^2 (Brier 1950); 0.25 for one who always says a half."""
    return sum((p - y) ** 2 for p, y in zip(shares, outcomes, strict=True)) / len(shares)


def auroc(shares: list[float], outcomes: list[bool]) -> float | None:
    """The chance that a right solution has a larger share than a wrong one, ties half; None unless both occur."""
    right, wrong = (sorted(p for p, y in zip(shares, outcomes, strict=True) if y is kind) for kind in (True, False))
    if not right or not wrong:
        return None
    return sum(bisect_left(wrong, p) + bisect_right(wrong, p) for p in right) / (2 * len(right) * len(wrong))


def reliability(shares: list[float], outcomes: list[bool]) -> list[dict]:
    """Ten bins of equal width, those that are not empty: low, high, count, mean share, and share of right ones."""
    bins: dict[int, list] = {}
    for p, y in zip(shares, outcomes, strict=True):
        bins.setdefault(min(int(p * 10), 9), []).append((p, y))
    return [{"low": m / 10, "high": (m + 1) / 10, "count": len(pairs),
             "mean_share": sum(p for p, _ in pairs) / len(pairs),
             "right": sum(y for _, y in pairs) / len(pairs)} for m, pairs in sorted(bins.items())]


def expected_calibration_error(bins: list[dict]) -> float:
    """ECE = sum over bins of count / n * |right - mean share| (Guo et al. 2017, eq. 3), from `reliability`."""
    n = sum(row["count"] for row in bins)
    return sum(row["count"] / n * abs(row["right"] - row["mean_share"]) for row in bins)


def calibration(shares: list[float], outcomes: list[bool]) -> dict | None:
    """count, ece, brier, auroc and the bins of `reliability`; None of nothing."""
    if not shares:
        return None
    bins = reliability(shares, outcomes)
    return {"count": len(shares), "ece": expected_calibration_error(bins), "brier": brier(shares, outcomes),
            "auroc": auroc(shares, outcomes), "bins": bins}
