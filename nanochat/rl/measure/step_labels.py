"""
Labels of reasoning steps: which prefixes of a solution a method asks about, and how their values become a number per
step. No model is run here.

A solution of K steps has K + 1 prefixes: prefix k ends with step k, prefix 0 is empty. A method's plan is a generator:
it yields numbers of prefixes, is sent their values in that order, yields again or returns the K labels. So a search
asks for little at a time, and the searches of many solutions run side by side (`run_plans`).
"""
from collections.abc import Callable, Generator
from itertools import pairwise
from typing import NamedTuple

from nanochat.rl.measure.scores import first_error_f1, macro_f1, share_of
from nanochat.rl.measure.voting import auroc

Plan = Generator[list[int], list[float], list[float]]

def any_right(values: list[float]) -> list[float]:
    """1 for each step after which any completion is right (Math-Shepherd's hard estimate, Wang et al. 2023, eq. 3)."""
    return [float(value > 0) for value in values]


def relative_progress(values: list[float]) -> list[float]:
    """GenPRM's relative progress estimate (Zhao et al. 2025): 1 for each step t with MC_t / MC_{t-1} >= .8, 0 for all
    after an MC of 0. values: MC_0 to MC_K."""
    labels, alive = [], True
    for before, after in pairwise(values):
        alive = alive and before > 0
        labels.append(float(alive and after / before > 0.8 - 1e-9))  # .32 / .4 is below .8
    return labels


def gains(values: list[float]) -> list[float]:
    """What each step adds: values[k] - values[k - 1]. Under a prover's chances the progress of process advantage
    verifiers (Setlur et al. 2024); under log-probabilities of the answer the information gain of a step (Ton et al.
    2024)."""
    return [after - before for before, after in pairwise(values)]


def scan(first: int, formula: Callable[[list[float]], list[float]]) -> Callable[[int], Plan]:
    """A plan that asks for all prefixes from `first` on at once."""
    def plan(num_steps: int) -> Plan:
        return formula((yield list(range(first, num_steps + 1)) if num_steps else []))
    return plan


def first_error_search(num_steps: int) -> Plan:
    """OmegaPRM's binary search for the first step after which no completion is right (Luo et al. 2024), of at most
    ceil(log2(K + 1)) prefixes: 1 for steps before it, else 0. Where values of 0 do not stay 0, some such step. Without
    the tree that it is a part of there (scripts/label_steps.py)."""
    right, wrong = 0, num_steps + 1  # prefixes: one that can still end right, and one after the error
    while wrong - right > 1:
        middle = (right + wrong) // 2
        (value,) = yield [middle]
        right, wrong = (middle, wrong) if value > 0 else (right, middle)
    return [float(k < wrong) for k in range(1, num_steps + 1)]


class Method(NamedTuple):
    """How steps are labelled."""
    plan: Callable[[int], Plan]  # see above, of the number of steps
    value: str    # asked after a prefix: "gold" (label of its last step), "share" (of completions that are right),
    #               "best_of" (chance that the best of so many is right) or "logprob" (of the gold answer)
    least: float  # a step is taken for right where its label is at least this


METHODS = {
    "gold": Method(scan(1, list), "gold", 0.5),
    "math_shepherd": Method(scan(1, any_right), "share", 0.5),
    "math_shepherd_soft": Method(scan(1, list), "share", 0.5),
    "omega_prm": Method(first_error_search, "share", 0.5),
    "rpe": Method(scan(0, relative_progress), "share", 0.5),
    "pav": Method(scan(0, gains), "best_of", 0.0),
    "information_gain": Method(scan(0, gains), "logprob", 0.0),
}


def run_plans(plans: list[Plan], values_of: Callable[[list[tuple[int, int]]], list[float | None]]) -> list:
    """What each plan returns; None where a value that it asked for is None. values_of(asked): the values of all
    prefixes that the plans ask for in one round, (number of the plan, prefix)."""
    labels: list[list[float] | None] = [None] * len(plans)
    waiting: dict[int, list[int]] = {}

    def go_on(n: int, values: list[float | None] | None) -> None:
        waiting.pop(n, None)
        if values is not None and None in values:
            return
        try:
            waiting[n] = plans[n].send(values)
        except StopIteration as done:
            labels[n] = done.value

    for n in range(len(plans)):
        go_on(n, None)
    while waiting:
        rounds = list(waiting.items())
        values = iter(values_of([(n, k) for n, prefixes in rounds for k in prefixes]))
        for n, prefixes in rounds:
            go_on(n, [next(values) for _ in prefixes])
    return labels


def agreement(gold: list[list[bool]], labels: list[list[float]], least: float) -> dict:
    """How labels agree with gold ones, a list per solution; None where there is nothing to count. rescued: the share of
    wrong steps labelled right; failed: of right ones labelled wrong; auc: how the labels rank them."""
    said = [[label >= least for label in row] for row in labels]
    steps = [x for row in gold for x in row]
    verdicts, numbers = ([x for row in rows for x in row] for rows in (said, labels))
    pairs = list(zip(steps, verdicts, strict=True))
    return {"steps": len(steps), "accuracy": share_of([g is v for g, v in pairs]),
            "macro_f1": macro_f1(steps, verdicts), "first_error_f1": first_error_f1(gold, said),
            "rescued": share_of([v for g, v in pairs if not g]), "failed": share_of([not v for g, v in pairs if g]),
            "auc": auroc(numbers, steps)}


def until_error(rows: list[list], gold: list[list[bool]]) -> list[list]:
    """Each row up to the first step that is wrong by gold, that step included: what comes after an error is judged
    differently by a label of the step and by one of the prefix."""
    return [row[: g.index(False) + 1] if False in g else row for row, g in zip(rows, gold, strict=True)]
