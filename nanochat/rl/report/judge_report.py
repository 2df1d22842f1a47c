"""
What ails a judge: errors that it passes, judgments that cannot be read, that follow a solution's length or its author,
and right verdicts for wrong reasons.

A judged solution is a dict: outcome (bool or None), length (tokens), share (of its verifications that call it CORRECT,
None where it was not verified), verifications, malformed (numbers of them), labels (gold, per step), verdicts (of each
verification), step_verdicts and rationales (a row per verification, an entry per step; a rationale is True where the
analysis after a verdict is right, None where there is none). k verifications, K steps.
"""
from itertools import zip_longest

from nanochat.rl.measure.scores import aligned, correlation, share_of, verdict_scores

SCORES = ("outcome_f1", "balanced_acc", "step_f1", "first_error_f1", "wrong_steps_passed", "right_steps_blamed")


def rationales_of(task, problem, solution: str, verification) -> list[bool | None]:
    """Whether the analysis of each step of a solution is right, by the task (`analysis_labels`), whatever its verdict;
    None for a step without one, and for all of a task that cannot tell. -> (K,)"""
    labels = (task.analysis_labels(problem, solution, analyses_of(task.fmt, verification.text))
              if hasattr(task, "analysis_labels") else [])
    return aligned(labels, len(task.fmt.step_spans(solution)))


def analyses_of(fmt, text: str) -> list[str]:
    """What a verification says of each step before its verdict. COMPACT: "3+5:8T;8*2:5F;=F" -> ["3+5:8", "8*2:5"]."""
    bodies = fmt.judgment_steps(text)
    cut_at = [max(body.rfind(fmt.correct), body.rfind(fmt.incorrect)) for body in bodies]
    return [body[:at] if at >= 0 else body for body, at in zip(bodies, cut_at, strict=True)]


def judge_report(judged: list[dict], own: list[dict] | None = None) -> dict:
    """The scores of a judge on solutions, and on its own ones beside them (own), named in WORDS: all as shares or
    correlations, None where there is nothing to take them of."""
    steps = [(label, said, why) for row in judged for verdicts, reasons in zip(
        row["step_verdicts"], row["rationales"], strict=True)
        for label, said, why in zip(row["labels"], verdicts, reasons, strict=True)]
    num = sum(row["verifications"] for row in judged)
    scores = verdict_scores([[row["outcome"], row["labels"] if said else [], verdict, said, []] for row in judged
                             for verdict, said in zip_longest(row["verdicts"], row["step_verdicts"], fillvalue=[])])
    found = {name: scores[name] for name in SCORES}
    found["parse_fail"] = sum(row["malformed"] for row in judged) / num if num else None
    for name, outcome in (("right", True), ("wrong", False)):
        kind = of_outcome(judged, outcome)
        found[f"length_{name}"] = correlation([row["share"] for row in kind], [float(row["length"]) for row in kind])
    found |= {"verdict_acc": share_of([said is label for label, said, _ in steps]),
              "rationale_acc": share_of([why for _, _, why in steps if why is not None]),
              "wrong_reason": share_of([not why for label, said, why in steps if said is label and why is not None]),
              "rejected_rightly": share_of([why for label, said, why in steps
                                            if label is said is False and why is not None])}
    if own is not None:
        for name, outcome in (("right", True), ("wrong", False)):
            means = [share_of([row["share"] for row in of_outcome(rows, outcome)]) for rows in (own, judged)]
            found[f"own_{name}"] = None if None in means else means[0] - means[1]
        both = found["own_right"], found["own_wrong"]
        found["self_preference"] = None if None in both else sum(both) / 2
    return found


def of_outcome(judged: list[dict], outcome: bool) -> list[dict]:
    """The judged solutions of an outcome that were verified."""
    return [row for row in judged if row["outcome"] is outcome and row["share"] is not None]


WORDS = {
    "outcome_f1": "outcome F1, percent",
    "balanced_acc": "balanced accuracy, percent",
    "step_f1": "step F1, percent",
    "first_error_f1": "first error F1, percent",
    "wrong_steps_passed": "wrong steps passed, percent",
    "right_steps_blamed": "right steps blamed, percent",
    "parse_fail": "malformed verifications, percent",
    "verdict_acc": "step verdicts that are right, percent",
    "rationale_acc": "analyses that are right, percent of those that there are",
    "wrong_reason": "right verdicts after a wrong analysis, percent",
    "rejected_rightly": "rejected wrong steps after a right analysis, percent",
    "length_right": "correlation of CORRECT with length, right solutions",
    "length_wrong": "correlation of CORRECT with length, wrong solutions",
    "own_right": "CORRECT on its own right solutions, less on the generator's, points",
    "own_wrong": "CORRECT on its own wrong solutions, less on the generator's, points",
    "self_preference": "self-preference: the mean of these two, points",
}


def report_lines(report: dict) -> list[str]:
    """A report in lines."""
    shown = lambda name, x: "-" if x is None else f"{x:.2f}" if name.startswith("length") else f"{100 * x:.1f}"
    return [f"{WORDS[name]:72s} {shown(name, report[name]):>8s}" for name in WORDS if name in report]
