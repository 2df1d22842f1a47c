"""
ProcessBench (Zheng et al. 2024, arXiv 2412.06559): solutions of math problems, in each of which people marked the first
wrong step.

A verifier is evaluated on it and never trained, so it is no task. Which answer a solution gives is not in the data,
only whether it is right.
"""
import os
import random
import re
from dataclasses import dataclass

from nanochat.common import BadInput
from tasks.answers import boxed
from tasks.tables import FILES, read_file, read_hub, read_rows

HUB = "Qwen/ProcessBench"
SUBSETS = ("gsm8k", "math", "olympiadbench", "omnimath")  # the hub's splits, as the paper orders them
COLUMNS = ("problem", "steps", "label", "final_answer_correct")


@dataclass(frozen=True)
class LabelledSolution:
    """One solution. label: of its first wrong step, from 0, -1 without one; row: in the subset's table, from 1."""
    problem: str
    steps: tuple[str, ...]
    label: int
    final_answer_correct: bool
    subset: str
    row: int


def read_row(row: dict) -> tuple[str, tuple[str, ...], int, bool]:
    """Problem, steps, label and whether the final answer is correct. Raises ValueError that says what is wrong."""
    problem, steps, label, correct = (row[column] for column in COLUMNS)
    if not isinstance(steps, list) or not steps or not all(isinstance(x, str) and x.strip() for x in (problem, *steps)):
        raise ValueError("problem and steps must be texts that are not empty")
    # True is an int too; -1.0 is -1, since one missing label makes floats of a whole column.
    if isinstance(label, bool) or label not in range(-1, len(steps)):
        raise ValueError(f"label {label} must be from -1 to {len(steps) - 1}, "
                         f"the index of one of {len(steps)} steps or -1")
    if not isinstance(correct, bool):
        raise ValueError(f"final_answer_correct {correct!r} must be true or false")
    return problem, tuple(steps), int(label), correct


def find_tables(source: str, subset: str) -> dict[str, str | None]:
    """Per subset its file, None on the hub. Raises BadInput for what is not there."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        files = [os.path.join(path, name) for name in sorted(os.listdir(path))]
    elif os.path.isfile(path):
        files = [path]
    elif os.path.splitext(path)[1] in FILES or not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", source):
        raise BadInput(f"{source}: no such file or folder")
    else:
        return dict.fromkeys([subset] if subset else SUBSETS)
    stem_of = lambda file: os.path.splitext(os.path.basename(file))[0]
    place = lambda file: (*SUBSETS, stem_of(file)).index(stem_of(file))  # as the paper has them, then others
    found = {stem_of(file): file for file in sorted(files, key=place) if os.path.splitext(file)[1] in FILES}
    if not found:
        raise BadInput(f"{source}: has no <subset>{' or <subset>'.join(FILES)}")
    if subset and subset not in found:
        raise BadInput(f"{source}: has no subset {subset}, only {', '.join(found)}")
    return {subset: found[subset]} if subset else found


def load_processbench(source: str = HUB, subset: str = "", max_examples: int = -1) -> list[LabelledSolution]:
    """The samples of one subset or ("") of all, in the tables' order; of each at most `max_examples` (-1: all), a fixed
    random choice, a larger one holding the smaller, since rows may be sorted by label. source: a dataset on the hub
    whose splits are the subsets; a .jsonl, .json or .parquet file, whose name is its subset's; or a folder of such
    files, one per subset. Raises BadInput, for a malformed row with its place."""
    samples = []
    for name, file in find_tables(source, subset).items():
        table = read_file(file) if file else read_hub(f"{source}, split {name}", source, split=name)
        rows = [LabelledSolution(*row, name, number)
                for number, row in enumerate(read_rows(table, read_row, COLUMNS), 1)]
        if 0 <= max_examples < len(rows):
            order = list(range(len(rows)))
            random.Random(0).shuffle(order)
            rows = [rows[i] for i in sorted(order[:max_examples])]
        samples += rows
    return samples


def without_solution_marks(fmt, text: str) -> str:
    """`text` with every mark of a solution as "?", which no mark holds: a step cannot end itself or the solution."""
    marks = (fmt.think_open, fmt.step_open, fmt.step_close, fmt.think_close, fmt.answer_open, fmt.answer_close)
    return re.sub("|".join(re.escape(mark) for mark in marks if mark), "?", text)


def solution_text(fmt, judged: LabelledSolution) -> str:
    """The sample as a solution in a format. It has exactly len(judged.steps) steps: marks inside of them become "?",
    and so does a blank step where it would be none. Its answer is what the last step has in \\boxed{}, empty where that
    is nothing."""
    steps = [without_solution_marks(fmt, "?" if fmt.is_blank(step) else step) for step in judged.steps]
    return fmt.render_solution(steps, without_solution_marks(fmt, (boxed(judged.steps[-1]) or "").strip()))
