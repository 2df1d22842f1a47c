"""
Critiques by rule of a solution that was right or wrong: (task, problem, solution, outcome) -> text.
"""
from nanochat.rl.measure.scores import first_error
from nanochat.rl.records.outcomes import labels_of


def simple(task, problem, solution: str, outcome: bool) -> str:
    """Whether it is right: "F"."""
    return task.fmt.correct if outcome else task.fmt.incorrect


def simple_gt(task, problem, solution: str, outcome: bool) -> str:
    """Whether it is right, and the gold answer: "F=6"."""
    gold = task.fmt.answer_open + problem.answer + task.fmt.answer_close
    return simple(task, problem, solution, outcome) + gold


def steps(task, problem, solution: str, outcome: bool) -> str:
    """Whether it is right, after the number of the first step that is wrong by its gold label: "2F"."""
    wrong = -1 if outcome else first_error(labels_of(task, problem, solution))  # -1 too where only the answer is wrong
    return (str(wrong + 1) if wrong >= 0 else "") + simple(task, problem, solution, outcome)


CRITIQUES = {"simple": simple, "simple_gt": simple_gt, "steps": steps}
