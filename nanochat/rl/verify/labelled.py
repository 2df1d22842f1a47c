"""
Labelled solutions: a file of solutions with an outcome and a label for each reasoning step, dealt out to steps.

The file is jsonl, a solution a line; scripts/label_steps.py writes it:

    {"split": "rl", "index": 12, "prompt": "3+5*2", "solution": "3+5:8;8*2:6;=6", "outcome": true, "labels": [1.0, 0.5]}

outcome is null where it is not known. A label is a number: the chance that a step is right, or for values of other
kinds any finite one. method, where it is there, says by which of step_labels.METHODS. More fields may stand there.
Solutions that are yet to be labelled need the first four alone.
"""
import functools
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nanochat.common import BadInput, gather_lists
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.credit.aggregation import check_one_update
from nanochat.rl.measure.evals import SPLITS
from nanochat.rl.measure.step_labels import METHODS
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.records.prompts import count_copies, longest_problem, solve_prompt
from nanochat.rl.records.rollouts import Rollouts, grouped
from nanochat.rl.verify.comparing import one_right
from nanochat.storage.files import found_at, json_lines
from tasks.common import SPLIT_BUCKETS, Problem, check_problem, nth_of_epochs

OF_SOLUTION = {"split": (str,), "index": (int,), "prompt": (str,), "solution": (str,)}
OF_LABELS = {"outcome": (bool, type(None)), "labels": (list,)}
LEAST = {"chances": 0, "progress": -1}  # of each kind of labels that is learned
KIND_OF_VALUE = {"best_of": "progress", "logprob": "information gains"}  # of a Method: else its labels are chances


@dataclass(frozen=True, eq=False)
class Labelled:
    """A solution of a problem."""
    problem: Problem
    solution: str
    outcome: bool | None  # None: not known
    labels: list[float]   # one for each of its reasoning steps
    copy: int = 0         # how many solutions of this problem stand before it in the step: tells noise apart
    method: str = ""      # which made the labels, where the file says so


def solution_rows(flag: str, path: str, task, fields: dict[str, tuple] = OF_SOLUTION) -> Iterator[tuple[str, dict]]:
    """The lines of a file of solutions: where each stands, for complaints about it, and its fields, with the `problem`.
    Raises BadInput for the first that is none of the task's, and for a file without any."""
    place = ""
    for place, row in json_lines(path):
        where = f"{flag} {place}"
        yield where, solution_of(where, row, task, fields)
    if not place:
        raise BadInput(f"{flag} {path}: has no solutions")


def solution_of(where: str, row: dict, task, fields: dict[str, tuple]) -> dict:
    """The fields of one line of such a file. Raises BadInput, which begins with `where`."""
    try:
        "".join(row[name] for name, kinds in fields.items() if kinds == (str,)).encode()  # not half a surrogate pair
        is_whole = all(type(row[name]) in kinds for name, kinds in fields.items())
    except (KeyError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        raise BadInput(f"{where}: is no json object with {', '.join(fields)} as label_steps writes them")
    split, index = row["split"], row["index"]
    try:
        problem = task.problem(split, index) if split in SPLIT_BUCKETS and index >= 0 else None
    except (BadInput, KeyError, IndexError, ValueError):
        problem = None
    if problem is None or check_problem(where, problem, split, index).prompt != row["prompt"]:
        raise BadInput(f"{where}: its prompt is not that of problem {str(index)[:20]} of {split[:40]} of task "
                       f"{task.name}, but {row['prompt'][:40]!r}: was the file made with other flags or another seed? "
                       f"Those of label_steps stand beside its FILE.jsonl, in FILE.summary.json")
    return row | {"problem": problem}


@functools.lru_cache(maxsize=4)
def read_labelled(path: str, task) -> list[Labelled]:
    """The labelled solutions of a file. Raises BadInput, with the line, for what does not fit the task."""
    rows = []
    for where, row in solution_rows("--labels", path, task, OF_SOLUTION | OF_LABELS):
        if row["split"] in SPLITS:
            raise BadInput(f"{where}: problem {row['index']} is of {row['split']}, on which a run is evaluated; "
                           "nothing is learned from test problems")
        labels, num_steps = row["labels"], len(task.fmt.step_spans(row["solution"]))
        if len(labels) != num_steps:
            raise BadInput(f"{where}: has {len(labels)} labels, and the solution {num_steps} steps")
        if not all(type(label) in (int, float) and abs(label) <= sys.float_info.max for label in labels):
            raise BadInput(f"{where}: has a label that is no finite number")
        method = str(row.get("method", ""))
        rows.append(Labelled(row["problem"], row["solution"], row["outcome"], list(map(float, labels)),
                             method=method if method in METHODS else ""))
    return rows


def check_kind(path: str, rows: list[Labelled], kind: str) -> None:
    """Raises BadInput where labels are not of a kind, by the method that made them, where the file says it, and by
    their range: chances, from 0 to 1, or progress, from -1 to 1."""
    least = LEAST[kind]
    for row in rows:
        where = f"--labels {path}: problem {row.problem.index} of {row.problem.split}"
        made = KIND_OF_VALUE.get(METHODS[row.method].value, "chances") if row.method else kind
        if made != kind:
            raise BadInput(f"{where} has labels of method {row.method}, which are {made}, and {kind} are learned here; "
                           f"progress (method pav) is learned by recipe prm with --prm-labels progress")
        if wrong := [label for label in row.labels if not least <= label <= 1]:
            raise BadInput(f"{where} has the label {wrong[0]}; labels are from {least} to 1 here")


def add_label_args(group) -> None:
    group.add_argument("--labels", default="", metavar="FILE.jsonl", help="labelled solutions, see label_steps")


def check_labels(args, task, kind: str | None = None) -> None:
    """A recipe's `check`: raises BadInput unless --labels names labelled solutions of this task's problems, for one
    update of a batch. kind: see `check_kind`, of the labels of steps, where these are used; there must be one."""
    check_one_update(args)
    if not args.labels:
        raise BadInput("--labels: name the labelled solutions to learn from")
    rows = read_labelled(args.labels, task)
    if kind:
        check_kind(args.labels, rows, kind)
        if not any(row.labels for row in rows):
            raise BadInput(f"--labels {args.labels}: has no solution with a step")


def check_outcomes(args, task) -> None:
    """The same, and there must be a solution whose outcome is known."""
    check_labels(args, task)
    if all(row.outcome is None for row in read_labelled(args.labels, task)):
        raise BadInput(f"--labels {args.labels}: has no solution whose outcome is known")


@functools.lru_cache(maxsize=4)
def longest_labelled(path: str) -> tuple[int, str]:
    """Tokens of the longest solution of a checked file, with its end token, and the remedy for too many."""
    rows = [row for _, row in json_lines(path)]
    owners = {row["solution"]: f"problem {row['index']} of {row['split']}" for row in rows}
    tokenizer = load_tokenizer(found_at("tokenizer"))
    longest = longest_problem(tokenizer, list(owners))
    num = len(tokenizer.encode(longest)) + 1
    return num, f"leave the longest solutions out of --labels {path} (that of {owners[longest]} has {num} tokens)"


def labelled_draw(args) -> Draw:
    """The labelled solutions of a step, given to the verifier as its own completions, and learned from."""
    longest, remedy = longest_labelled(args.labels)
    return Draw("verifier", args.examples_per_step, 1, longest, trained=True, teacher_forced=True, scored=2,
                remedy=remedy)


def quoting_labelled(args, draw: Draw, num: int = 1) -> Draw:
    """A draw whose prompts quote `num` labelled solutions."""
    longest, remedy = longest_labelled(args.labels)
    return draw._replace(quoted=num * longest, remedy=remedy)


def labelled_of_run(t: Play) -> list[Labelled]:
    """All labelled solutions. Raises BadInput where the ranks' files differ, or the file is no longer the run's."""
    rows = read_labelled(t.args.labels, t.task)
    now = zlib.crc32(repr([(r.problem, r.solution, r.outcome, r.labels) for r in rows]).encode())
    if "labels" not in t.memory and len(set(gather_lists([now], t.device))) > 1:
        raise BadInput(f"--labels {t.args.labels}: the ranks have read different files")
    if t.memory.setdefault("labels", now) != now:
        raise BadInput(f"--labels {t.args.labels}: is no longer the file that the run began with")
    return rows


def dealt(t: Play, items: list) -> list:
    """The --examples-per-step items of a step, of all ranks: each epoch has all of them, in an order of its own."""
    P = t.args.examples_per_step
    return [nth_of_epochs(items, t.args.seed, "labels", i) for i in range(t.step * P, (t.step + 1) * P)]


def with_copies(rows: list[Labelled]) -> list[Labelled]:
    """The solutions of a step with their `copy`."""
    copies = count_copies([row.problem for row in rows])
    return [replace(row, copy=copy) for row, copy in zip(rows, copies, strict=True)]


def labelled_of_step(t: Play) -> list[Labelled]:
    """This rank's share of a step's labelled solutions."""
    return with_copies(dealt(t, labelled_of_run(t)))[t.run.rank:: t.run.world]


def by_problem(rows: list[Labelled]) -> list[list[Labelled]]:
    """The solutions of each problem, wherever in the file they stand."""
    return list(grouped((row.problem for row in rows), rows).values())


def right_and_wrong(rows: list[Labelled]) -> list[list[Labelled]]:
    """Of each problem that has both its first right and its first wrong solution."""
    chosen = [(group, one_right([row.outcome for row in group], 2)) for group in by_problem(rows)]
    return [[group[i] for i in places] for group, places in chosen if places]


def check_pairs(args, task) -> None:
    """The same as `check_labels`, and there must be a pair."""
    check_labels(args, task)
    if not right_and_wrong(read_labelled(args.labels, task)):
        raise BadInput(f"--labels {args.labels}: has no problem with a right and a wrong solution")


def pairs_of_step(t: Play, role: str) -> list[list[Labelled]]:
    """This rank's share of a step's pairs of a right and a wrong solution. Logs how many problems have none."""
    rows = labelled_of_run(t)
    pairs = right_and_wrong(rows)
    t.log(role, {"unpaired": len(by_problem(rows)) - len(pairs)})
    chosen = with_copies([row for pair in dealt(t, pairs) for row in pair])
    return [chosen[i: i + 2] for i in range(0, len(chosen), 2)][t.run.rank:: t.run.world]


def as_rollouts(t: Play, role: str, rows: list[Labelled]) -> Rollouts:
    """Labelled solutions as a role's own completions after the generator's prompts."""
    prompts = [solve_prompt(t.tokenizer, t.task.fmt, row.problem) for row in rows]
    rollouts = t.written(role, prompts, [row.solution for row in rows]).with_prompts(prompts)
    rollouts.columns = {"outcome": [row.outcome for row in rows], "labels": [row.labels for row in rows]}
    return rollouts
