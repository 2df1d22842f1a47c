"""
Scores: pass@1, pass@k, maj@k of a generator; F1 and balanced accuracy of a verifier; how log-odds of outcomes rank.
"""
from collections import Counter
from math import comb
from statistics import correlation as correlate

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce_with_logits

from nanochat.rl.records.outcomes import labels_of


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased probability that one of k samples is right (Chen et al. 2021)."""
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority(answers: list[str | None]) -> str | None:
    """The most frequent answer, ties going to the earliest; None when no answer could be read."""
    counts = Counter(a for a in answers if a is not None)
    return counts.most_common(1)[0][0] if counts else None


def outcome_of(answer: str | None, answers: list[str | None], outcomes: list[bool | None]) -> bool | None:
    """Whether an answer is right: one who gives it is, else as the first of them; False for none. Who is right may not
    count, since the text was cut, and another who gives the same answer may."""
    found = [outcome for other, outcome in zip(answers, outcomes, strict=True) if other == answer]
    return False if answer is None else True in found or found[0]


def macro_f1(labels: list[bool], verdicts: list[bool | None]) -> float | None:
    """The mean of the F1 of class True and of class False, over those that occur in labels or verdicts; None where
    neither does. A missing verdict is wrong for both."""
    scores = []
    for c in (True, False):
        hits = sum(v is c and l is c for l, v in zip(labels, verdicts, strict=True))
        actual, said = labels.count(c), sum(v is c for v in verdicts)
        scores += [2 * hits / (actual + said)] if actual + said else []
    return sum(scores) / len(scores) if scores else None


def balanced_accuracy(labels: list[bool], verdicts: list[bool | None]) -> float | None:
    """The mean of the accuracy on right and on wrong solutions; None unless both occur. A constant judge has 0.5."""
    if len(set(labels)) < 2:
        return None
    recalls = [sum(v is c for l, v in zip(labels, verdicts, strict=True) if l is c) / labels.count(c)
               for c in (True, False)]
    return sum(recalls) / 2


def first_error(verdicts: list[bool | None]) -> int | None:
    """The first step judged wrong, -1 where all are right (ProcessBench); None where missing verdicts leave it open."""
    return next((k for k, v in enumerate(verdicts) if v is False), None if None in verdicts else -1)


def first_error_scores(labels: list[int], predictions: list[int | None]) -> dict:
    """ProcessBench's scores (Zheng et al. 2024): error_acc, the share of erroneous samples (label >= 0) whose first
    error is found exactly; correct_acc, that of correct ones (-1) with none claimed; f1, their harmonic mean. None
    where a kind does not occur. A prediction None is wrong."""
    a, b = (share_of([l == p for l, p in zip(labels, predictions, strict=True) if (l >= 0) is kind])
            for kind in (True, False))
    return {"error_acc": a, "correct_acc": b,
            "f1": None if a is None or b is None else 2 * a * b / (a + b) if a + b else 0.0}


def first_error_f1(labels: list[list[bool]], verdicts: list[list[bool | None]]) -> float | None:
    """The f1 of `first_error_scores`, of a list per solution."""
    return first_error_scores(list(map(first_error, labels)), list(map(first_error, verdicts)))["f1"]


def aligned(step_verdicts: list[bool | None], num_steps: int) -> list[bool | None]:
    """The verdicts of exactly `num_steps` steps: missing ones are None, those of no step are left out."""
    return (step_verdicts + [None] * num_steps)[:num_steps]


def verdict_row(task, problem, solution: str, outcome: bool | None, verification) -> list:
    """What verdict_scores needs of a verification: outcome, gold step labels, verdict, step verdicts, unmet."""
    return [outcome, labels_of(task, problem, solution), verification.verdict, verification.step_verdicts,
            list(verification.unmet)]


def correlation(xs: list[float], ys: list[float]) -> float | None:
    """Pearson's correlation; None where either is constant."""
    return correlate(xs, ys) if len(set(xs)) > 1 and len(set(ys)) > 1 else None


def ranking_reversed(outcomes: list[bool | None], advantages: list[float], num_samples: int) -> list[bool]:
    """Per group that has right and wrong rollouts: whether a wrong one has a larger mean advantage per token than a
    right one, which step rewards alone may cause, with reason (a lucky answer) or without."""
    reversed_groups = []
    for i in range(0, len(outcomes), num_samples):
        group = list(zip(outcomes[i: i + num_samples], advantages[i: i + num_samples], strict=True))
        right, wrong = ([a for o, a in group if o is kind] for kind in (True, False))
        reversed_groups += [max(wrong) > min(right)] if right and wrong else []
    return reversed_groups


def share_of(hits: list[float]) -> float | None:
    """The share that is True, or the mean of numbers; None of nothing."""
    return sum(hits) / len(hits) if hits else None


def verdict_scores(rows: list[list]) -> dict:
    """A verifier's scores over `verdict_row`s. A missing verdict counts as wrong; solutions without an outcome count
    for steps alone, those whose steps have no gold labels for verdicts alone. wrong_steps_passed: the share of the
    wrong steps that it judges right; right_steps_blamed: of the right steps that it judges wrong."""
    scored = [(outcome, verdict) for outcome, _, verdict, _, _ in rows if outcome is not None]
    outcomes, said = [o for o, _ in scored], [v for _, v in scored]
    labels = [row[1] for row in rows]
    verdicts = [aligned(row[3], len(row[1])) for row in rows]
    step_labels, step_said = [x for row in labels for x in row], [x for row in verdicts for x in row]
    # a task without step labels has none where there are steps
    known = [i for i, row in enumerate(rows) if row[1] or not row[3]]
    on_wrong = [v for o, v in scored if not o]
    judged = [(sum(said) / len(said), float(o)) for o, _, _, said, unmet in rows
              if o is not None and said and "step_count_mismatch" not in unmet and None not in said]
    return {
        "outcome_f1": macro_f1(outcomes, said),
        "balanced_acc": balanced_accuracy(outcomes, said),
        "step_f1": macro_f1(step_labels, step_said),
        "wrong_steps_passed": share_of([v is True for l, v in zip(step_labels, step_said, strict=True) if not l]),
        "right_steps_blamed": share_of([v is False for l, v in zip(step_labels, step_said, strict=True) if l]),
        "first_error_f1": first_error_f1([labels[i] for i in known], [verdicts[i] for i in known]),
        "parse_fail": sum(bool(row[4]) for row in rows) / max(1, len(rows)),
        "step_count_mismatch": sum("step_count_mismatch" in row[4] for row in rows) / max(1, len(rows)),
        "pred_pos_rate": said.count(True) / max(1, len(said)),
        "label_pos_rate": outcomes.count(True) / max(1, len(outcomes)),
        "pos_rate_wrong": share_of([v is True for v in on_wrong]),
        "step_outcome_corr": correlation([x for x, _ in judged], [y for _, y in judged]),
    }


def judgments(log_odds: torch.Tensor, outcomes: list[bool], group_id: list[int]) -> dict[str, list]:
    """Of rollouts whose tokens add up to the log-odds that the answer is right: the cross-entropy with the outcome
    (bce), whether a chance above .5 is the outcome (accuracy), and `pair_wins` (pair_accuracy). log_odds (N, T)"""
    sums, right = log_odds.sum(dim=1), torch.tensor(outcomes, dtype=log_odds.dtype, device=log_odds.device)  # (N,)
    return {"bce": bce_with_logits(sums, right, reduction="none").tolist(),
            "accuracy": ((sums > 0) == (right > 0)).tolist(),
            "pair_accuracy": pair_wins(outcomes, sums.tolist(), group_id)}


def pair_wins(outcomes: list[bool], scores: list[float], group_id: list[int]) -> list[float]:
    """Of each pair of a right and a wrong rollout of a group: 1 if the right one scores higher, .5 if equal, else 0."""
    rows = list(zip(outcomes, scores, group_id, strict=True))
    return [(a > b) + (a == b) / 2 for right, a, g in rows if right for other, b, h in rows if g == h and not other]


def step_sums(labels: list[bool], step_ends: list[int], values: list[float]) -> list[list]:
    """[label, sum of the values of its tokens] of each step; nothing where the steps have no labels."""
    starts = [0, *(end + 1 for end in step_ends)]
    return [[label, sum(values[start: end + 1])] for label, start, end in zip(labels, starts, step_ends, strict=False)]
