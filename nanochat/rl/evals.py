"""
Scores: pass@1, pass@k, maj@k of a generator; F1 and balanced accuracy of a verifier.
"""
from collections import Counter
from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased probability that one of k samples is right, from `num_samples` of which `num_correct` are (Chen et al. 2021)."""
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority(answers: list[str | None]) -> str | None:
    """The most frequent answer, ties going to the earliest; None when no answer could be read."""
    counts = Counter(a for a in answers if a is not None)
    return counts.most_common(1)[0][0] if counts else None


def macro_f1(labels: list[bool], verdicts: list[bool | None]) -> float:
    """The mean of the F1 of class True and of class False. A missing verdict is wrong for both. A class that occurs neither in
    labels nor in verdicts has F1 1."""
    scores = []
    for c in (True, False):
        hits = sum(v is c and l is c for l, v in zip(labels, verdicts, strict=True))
        actual, said = labels.count(c), sum(v is c for v in verdicts)
        scores.append(2 * hits / (actual + said) if actual + said else 1.0)
    return sum(scores) / 2


def balanced_accuracy(labels: list[bool], verdicts: list[bool | None]) -> float | None:
    """The mean of the accuracy on right and on wrong solutions; None unless both occur. A constant judge has 0.5."""
    if len(set(labels)) < 2:
        return None
    recalls = [sum(v is c for l, v in zip(labels, verdicts, strict=True) if l is c) / labels.count(c) for c in (True, False)]
    return sum(recalls) / 2


def first_error(verdicts: list[bool | None]) -> int:
    """Index of the first step judged wrong, -1 where none is (ProcessBench)."""
    return next((k for k, v in enumerate(verdicts) if v is False), -1)


def first_error_f1(labels: list[list[bool]], verdicts: list[list[bool | None]]) -> float | None:
    """Harmonic mean of the share of erroneous solutions whose first error is found and the share of correct ones with none claimed
    (ProcessBench); None unless both kinds occur."""
    hits: dict[bool, list[bool]] = {True: [], False: []}
    for l, v in zip(labels, verdicts, strict=True):
        hits[first_error(l) == -1].append(first_error(l) == first_error(v))
    if not hits[True] or not hits[False]:
        return None
    a, b = (sum(h) / len(h) for h in hits.values())
    return 2 * a * b / (a + b) if a + b else 0.0
