"""
Labelled solutions: a file of solutions with an outcome and a label for each reasoning step, dealt out to steps.

The file is jsonl, a solution a line; scripts/label_steps.py writes it:

    {"split": "rl", "index": 12, "prompt": "3+5*2", "solution": "3+5:8;8*2:6;=6", "outcome": true, "labels": [1.0, 0.5]}

outcome is null where it is not known. A label is a number: the chance that a step is right, or for values of other
kinds any finite one. More fields may stand there.
"""
import functools
import json
import math
import zlib
from dataclasses import dataclass, replace

from nanochat.common import BadInput, gather_lists
from nanochat.rl.play import Play
from nanochat.rl.prompts import count_copies, solve_prompt
from nanochat.rl.rollouts import Rollouts
from tasks.common import Problem, nth_of_epochs

FIELDS = {"split": str, "index": int, "prompt": str, "solution": str, "outcome": bool | None, "labels": list}


@dataclass(frozen=True, eq=False)
class Labelled:
    """A solution of a problem, its outcome (None: not known) and a label for each of its reasoning steps. copy: how
    many solutions of this problem stand before it in the step, which tells them apart for the noise."""
    problem: Problem
    solution: str
    outcome: bool | None
    labels: list[float]
    copy: int = 0


@functools.lru_cache(maxsize=4)
def read_labelled(path: str, task) -> list[Labelled]:
    """The labelled solutions of a file. Raises BadInput, with the line, for what does not fit the task."""
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--labels {path}: cannot be read: {error}") from None
    rows = [read_line(f"--labels {path}: line {n}", line, task) for n, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise BadInput(f"--labels {path}: has no lines")
    return rows


def read_line(where: str, line: str, task) -> Labelled:
    """One line of such a file. Raises BadInput, which begins with `where`."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{where}: is no json: {error}") from None
    for name, kind in FIELDS.items():
        if not (isinstance(row, dict) and name in row and isinstance(row[name], kind)):
            raise BadInput(f"{where}: has no {name!r} that could be read")
    try:
        problem = task.problem(row["split"], row["index"])
    except (BadInput, KeyError, IndexError, ValueError):
        problem = None
    if problem is None or problem.prompt != row["prompt"]:
        raise BadInput(f"{where}: its prompt is not that of problem {row['index']} of {row['split']} of task "
                       f"{task.name}: were the labels made with other flags or another seed?")
    labels, num_steps = row["labels"], len(task.fmt.step_spans(row["solution"]))
    if len(labels) != num_steps:
        raise BadInput(f"{where}: has {len(labels)} labels, and the solution {num_steps} steps")
    if not all(isinstance(label, int | float) and math.isfinite(label) for label in labels):
        raise BadInput(f"{where}: has a label that is no finite number")
    return Labelled(problem, row["solution"], row["outcome"], [float(label) for label in labels])


def check_chances(path: str, rows: list[Labelled]) -> None:
    """Raises BadInput where a label is no chance."""
    for row in rows:
        if wrong := [label for label in row.labels if not 0 <= label <= 1]:
            raise BadInput(f"--labels {path}: problem {row.problem.index} of {row.problem.split} has the label "
                           f"{wrong[0]}; this recipe learns from chances, from 0 to 1")


def add_label_args(group) -> None:
    group.add_argument("--labels", default="", metavar="FILE.jsonl", help="labelled solutions, see label_steps")


def check_labels(args, task, are_chances: bool = True) -> None:
    """Raises BadInput unless --labels names solutions of this task's problems, labelled with chances where they have to
    be."""
    if not args.labels:
        raise BadInput("--labels: name the labelled solutions to learn from")
    rows = read_labelled(args.labels, task)
    if are_chances:
        check_chances(args.labels, rows)


def digest(rows: list[Labelled]) -> int:
    """A number that tells labelled solutions from others."""
    return zlib.crc32(repr([(r.problem, r.solution, r.outcome, r.labels) for r in rows]).encode())


def labelled_of_step(t: Play) -> list[Labelled]:
    """This rank's share of the --examples-per-step labelled solutions of a step: an epoch goes through all of them, in
    an order of its own. Raises BadInput where the ranks' files differ, or the file is no longer the run's."""
    rows, P = read_labelled(t.args.labels, t.task), t.args.examples_per_step
    now = digest(rows)
    if "labels" not in t.memory and len(set(gather_lists([now], t.device))) > 1:
        raise BadInput(f"--labels {t.args.labels}: the ranks have read different files")
    if t.memory.setdefault("labels", now) != now:
        raise BadInput(f"--labels {t.args.labels}: is no longer the file that the run began with")
    chosen = [nth_of_epochs(rows, t.args.seed, "labels", i) for i in range(t.step * P, (t.step + 1) * P)]
    copies = count_copies([row.problem for row in chosen])
    chosen = [replace(row, copy=copy) for row, copy in zip(chosen, copies, strict=True)]
    return chosen[t.run.rank:: t.run.world]


def as_rollouts(t: Play, role: str, rows: list[Labelled]) -> Rollouts:
    """Labelled solutions as a role's own completions behind the generator's prompts, which solutions of one problem
    share."""
    prompts = [solve_prompt(t.tokenizer, t.task.fmt, row.problem) for row in rows]
    rollouts = t.written(role, prompts, [row.solution for row in rows]).behind(prompts)
    rollouts.columns = {"outcome": [row.outcome for row in rows], "labels": [row.labels for row in rows]}
    return rollouts
