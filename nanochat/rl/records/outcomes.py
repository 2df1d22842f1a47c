"""
What a task says: its problems, the outcome, score, answer and step labels of solutions.
"""
import contextlib
import random
import zlib
from functools import partial
from itertools import chain
from numbers import Real

from nanochat.common import BadInput, described, in_threads
from tasks.common import SPLIT_BUCKETS, check_problem, demo_of, is_last_number

ENDLESS = 400  # problems that stand for all of a task that makes its own


def check_task(task, *parts: str) -> None:
    """Raises BadInput for a task without parts that a recipe needs."""
    if missing := [part for part in parts if not hasattr(task, part)]:
        raise BadInput(f"--task {task.name}: has no {', '.join(missing)}, which this recipe needs")


def num_problems_of(task, split: str, num: int) -> int:
    """How many problems `num` of a split are: at most all, which -1 stands for; ENDLESS where they are made."""
    size = task.num_problems(split) if hasattr(task, "num_problems") else ENDLESS if num < 0 else num
    if not isinstance(size, int) or size < 0:
        raise BadInput(f"task {task.name}: num_problems({split!r}) gives {str(size)[:80]}, not a number from 0")
    return size if num < 0 else min(num, size)


def problems_of(task, split: str, num: int) -> list:
    """The first `num_problems_of` problems of a split. Raises BadInput for one that is none."""
    return [check_problem(f"task {task.name}", task.problem(split, i), split, i)
            for i in range(num_problems_of(task, split, num))]


def problems_digest(task, tokenizer) -> int:
    """A checksum of the tokens of a task's first 16 problems of each split: it changes with nearly any change of the
    data file, of the code that makes problems, or of the tokenizer, and not with the task's check()."""
    found = 0
    for split in SPLIT_BUCKETS:
        with contextlib.suppress(BadInput):  # nothing of this split among what was given
            for i in range(num_problems_of(task, split, 16)):
                problem = check_problem(f"task {task.name}", task.problem(split, i), split, i)
                tokens = tokenizer.encode(problem.prompt), tokenizer.encode(problem.answer)
                found = zlib.crc32(repr((split, tokens)).encode(), found)
    return found


def texts_digest(task) -> int:
    """A checksum of all problems, answers and worked solutions of a finite task, 0 of one that makes its own."""
    found = 0
    for split in SPLIT_BUCKETS if hasattr(task, "num_problems") else ():
        with contextlib.suppress(BadInput):  # nothing of this split, or nothing to demonstrate
            for problem in problems_of(task, split, -1):
                worked = demo_of(task, "solution_demo", problem, random.Random(0)) if split == "sft" else ""
                found = zlib.crc32(repr((split, problem.prompt, problem.answer, worked)).encode(), found)
    return found


def outcomes_of(task, problems: list, texts: list[str], should_stop=lambda: False) -> list[bool | None]:
    """The outcome of each solution, many at a time: grading may wait for worker processes. Raises BadInput where the
    task gives anything but True, False or None."""
    outcomes = in_threads(task.check, problems, texts, should_stop=should_stop)
    for problem, outcome in zip(problems, outcomes, strict=True):
        if not (outcome is None or isinstance(outcome, bool)):
            raise BadInput(f"task {task.name}: check() gives {str(outcome)[:80]} for problem {problem.index} of "
                           f"{problem.split}, not True, False or None")
    return outcomes


def uncounted(task, problems: list, texts: list[str], outcomes: list[bool | None], ended: list[bool],
              count_copies: bool = False) -> list[str | None]:
    """Why a right answer does not count: "cut" where the completion did not end, "copied" where the task says that it
    is the problem's own text (`is_copied`), unless copies count; None of all others."""
    is_copied = None if count_copies else getattr(task, "is_copied", None)
    return [None if outcome is not True else "cut" if not end else
            "copied" if is_copied and is_copied(problem, text) else None
            for problem, text, outcome, end in zip(problems, texts, outcomes, ended, strict=True)]


def counted_outcomes(task, problems: list, texts: list[str], ended: list[bool], count_copies: bool = False,
                     should_stop=lambda: False) -> tuple[list[bool | None], list[str | None]]:
    """The outcome of each solution, False for a right one that does not count; and why that does not (`uncounted`)."""
    outcomes = outcomes_of(task, problems, texts, should_stop)
    reasons = uncounted(task, problems, texts, outcomes, ended, count_copies)
    return [False if reason else outcome for outcome, reason in zip(outcomes, reasons, strict=True)], reasons


def words_of(task) -> dict[str, str]:
    """What tables and pages say of a task in place of the words that are there for all."""
    words = {"out of distribution": task.out_words} if hasattr(task, "out_words") else {}
    return words | ({} if getattr(task, "has_step_labels", True) else {"wrong steps": "wrong solutions"})


def reworded(text: str, words: dict[str, str]) -> str:
    """A text with the words of a task."""
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def has_numbers(task) -> bool:
    """Whether a task's answers are numbers, so that there is a lenient accuracy."""
    return getattr(task, "has_numbers", False)


def lenient_outcomes(task, problems: list, texts: list[str]) -> list[bool]:
    """Whether each text's last number is the gold answer; without texts of problems whose answer is no number."""
    if not has_numbers(task):
        return []
    found = map(is_last_number, texts, (problem.answer for problem in problems))
    return [outcome for outcome in found if outcome is not None]


def scores_of(task, problems: list, texts: list[str], outcomes: list[bool | None]) -> list[float | None]:
    """What each solution earns from 0 to 1: its outcome, or a part of it where the task has a score(). None where there
    is no outcome. Raises BadInput for what is no such score."""
    if not hasattr(task, "score"):
        return outcomes
    rows = zip(problems, texts, outcomes, strict=True)
    scores = [None if outcome is None else task.score(problem, text) for problem, text, outcome in rows]
    for score in scores:
        if score is not None and not (isinstance(score, Real) and 0 <= score <= 1):
            raise BadInput(f"task {task.name}: score() gives {described(score)}, not a number from 0 to 1")
    return scores


def labels_of(task, problem, text: str) -> list[bool]:
    """Gold labels of a solution's steps, [] where they are not known. Raises BadInput where the task gives anything but
    a bool for each step that its format finds."""
    labels, num_steps = task.step_labels(problem, text), len(task.fmt.step_spans(text))
    is_labels = isinstance(labels, list) and all(isinstance(label, bool) for label in labels)
    if not is_labels or labels and len(labels) != num_steps:
        raise BadInput(f"task {task.name}: step_labels() gives {str(labels)[:80]} for problem {problem.index} of "
                       f"{problem.split}, not a list of True and False, one for each of {num_steps} steps")
    return labels


def answers_of(task, texts: list[str], group: int = 1) -> list[str | None]:
    """What solutions answer, as the task reads it or else its format; None where nothing can be read. Of each `group`
    that follow each other equal answers have the spelling of the first of them, so that votes can be counted: equal as
    the task's same_answer() says, else as texts."""
    answers = list(map(getattr(task, "read_answer", task.fmt.answer), texts))
    if group == 1:
        return answers
    groups = [answers[i: i + group] for i in range(0, len(answers), group)]
    return list(chain.from_iterable(in_threads(partial(in_one_spelling, task), groups)))


def are_equal(task, first: str | None, second: str) -> bool:
    """Whether two answers are equal, as the task's same_answer() says, or else as texts. None is no answer."""
    return first == second or first is not None and hasattr(task, "same_answer") and task.same_answer(first, second)


def in_one_spelling(task, answers: list[str | None]) -> list[str | None]:
    """The answers, equal ones as the first of them is written."""
    firsts: dict[str, str] = {}
    for answer in answers:
        if answer is not None and answer not in firsts:
            same = (first for first in dict.fromkeys(firsts.values()) if are_equal(task, first, answer))
            firsts[answer] = next(same, answer)
    return [None if answer is None else firsts[answer] for answer in answers]
