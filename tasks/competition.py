"""
Competition mathematics: MATH, Eurus-2 (what RL Tango trains on), and for evaluation only AIME, AMC and OlympiadBench.
Task `rows` is any other set of problems with an answer, by the names of its columns.

A set is a row of SETS, a way to write its rows down is a reader in READERS. The first part of a set to train on is
dealt to sft and rl by a hash of the problem; a problem that a test part has too is left out of it. An epoch goes
through a split's problems in an order of its own, so the splits are endless. Nobody has labelled steps, so
`step_labels` knows none; sources with worked solutions give demonstrations, the others serve RL and evaluation.
"""
import math
import os
import random
import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import NamedTuple

from nanochat.common import BadInput, in_threads, print0
from tasks.answers import boxed
from tasks.common import GradedSet, Problem, in_split, nth_of_epochs
from tasks.formats import IN_WORDS, PAPER
from tasks.grading import readable
from tasks.gsm8k import (ANSWER, STATED_RESULT, add_format_arg, equations, gold_answer, judge_equations, with_slip,
                         without_marks)
from tasks.tables import FILES, read_file, read_hub, read_rows

HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/([\w.-]+))?(?::(\w+))?")
# characters of a problem to train on; of MATH two have more. The longest prompt takes from every completion's room
MAX_PROBLEM = 3000
TO_TRAIN, TO_TEST = ("train", "test_in", "test_out"), ("test_in", "test_out")


class MathSet(NamedTuple):
    """Sources of the parts by default, and their names in a folder, in the order of parts. Last ones may be missing."""
    parts: tuple[str, ...]
    sources: tuple[str, ...]
    files: tuple[str, ...]


MATH_500 = "HuggingFaceH4/MATH-500:test"
SETS = {
    "math": MathSet(TO_TRAIN, ("DigitalLearningGmbH/MATH-lighteval:train", MATH_500), ("train", "test500")),
    "math500": MathSet(TO_TEST, (MATH_500,), ("test500",)),
    "eurus": MathSet(TO_TRAIN, ("PRIME-RL/Eurus-2-RL-Data:train", "PRIME-RL/Eurus-2-RL-Data:validation", MATH_500),
                     ("train", "validation")),
    "aime": MathSet(TO_TEST, ("HuggingFaceH4/aime_2024:train", "math-ai/aime25:test"), ("aime24", "aime25")),
    "amc": MathSet(TO_TEST, ("math-ai/amc23:test",), ("amc23",)),
    "olympiad": MathSet(TO_TEST, ("Hothan/OlympiadBench/OE_TO_maths_en_COMP:train",), ("olympiad",)),
    "rows": MathSet(TO_TRAIN, (), ("train", "test")),
}
COLUMNS = ("question", "answer", "solution")  # of rows, whose names flags give


# Reading rows

@dataclass(frozen=True)
class Row:
    """A problem, its gold answer and its worked solution, "" where the source has none."""
    problem: str
    answer: str
    solution: str


def text_of(row: dict, *columns: str) -> str:
    """The text, or the number as text, in the first of these columns that has one. Raises ValueError where none has."""
    for value in map(row.get, columns):
        is_number = type(value) in (int, float, Decimal) and math.isfinite(value)
        if isinstance(value, str) or is_number:
            return str(value).strip()
    raise ValueError(f"has no text for {' or '.join(columns)}: its columns are {', '.join(map(str, row))}")


def read_plain(row: dict, question: str = "", answer: str = "", solution: str = "") -> Row:
    """{"problem" or "question", "answer", "solution"}, or columns of these names. Without an answer it is the last box
    of the solution. An answer may be worked as GSM8K's are: what stands after its last "####" is the answer, and what
    stands before the solution, where there is no other."""
    asked = text_of(row, *([question] if question else ["problem", "question"]))
    solution, answer = row.get(solution or "solution"), answer or "answer"
    solution = solution.strip() if isinstance(solution, str) else ""
    stated = solution if solution and row.get(answer) is None else text_of(row, answer)
    worked, mark, gold = stated.rpartition("####")
    if mark:
        return Row(asked, gold_answer(stated) or gold.strip(),
                   without_marks(worked).strip() if stated is solution or not solution else solution)
    return Row(asked, (boxed(solution) or "") if stated is solution else stated, solution)


# What Eurus asks after each problem; the format's own prompt says how to answer.
EURUS_TRAILER = "Present the answer in LaTex format: \\boxed{Your answer}"


def read_eurus(row: dict) -> Row | None:
    """{"prompt": messages, "reward_model": {"ground_truth"}, "ability"}; None of the programs that the set has too."""
    if row.get("ability") not in (None, "math"):
        return None
    asked = [message for message in row["prompt"] if message["role"] == "user"]
    return Row(text_of(asked[-1], "content").removesuffix(EURUS_TRAILER).strip(),
               text_of(row["reward_model"], "ground_truth"), "")


def read_olympiad(row: dict) -> Row:
    """{"question", "final_answer": answers, "solution": list}; answers are one list, without dollar signs."""
    answers, solutions = (row.get(column) or [] for column in ("final_answer", "solution"))
    if not isinstance(answers, list) or not isinstance(solutions, list):
        raise ValueError("final_answer and solution must be lists of texts")
    answer = ", ".join(re.sub(r"(?<!\\)\$", "", text).strip() for text in answers)
    return Row(text_of(row, "question"), answer, "\n".join(solutions).strip())


# by a column that only such sources have; others are plain
READERS = {"reward_model": read_eurus, "final_answer": read_olympiad}


def read_row(row: dict) -> Row | None:
    """A row of any of these layouts. Raises ValueError, KeyError and the like where it is malformed."""
    return next((read for column, read in READERS.items() if column in row), read_plain)(row)


def read_source(flag: str, source: str, **columns: str) -> list[Row | None]:
    """The rows of a file or a dataset of the hub, None where one is no mathematics. columns: those of `read_plain` that
    have other names. Raises BadInput."""
    where, path = f"{flag} {source}", os.path.expanduser(source)
    is_table, hub = os.path.splitext(path)[1] in FILES, HUB_NAME.fullmatch(source)
    if is_table and os.path.isfile(path):
        rows = read_file(path)
    elif is_table or not hub:
        raise BadInput(f"{where}: no such file" + f" that ends in {', '.join(FILES)}, and no name of a dataset, "
                                                  f"owner/name" * (not is_table))
    else:
        name, config, split = hub.groups()
        rows = read_hub(where, *([name, config] if config else [name]), split=split or "train")
    return read_rows(rows, partial(read_plain, **columns) if columns else read_row, tuple(columns.values()))


def same_text(problem: str) -> str:
    """What two copies of a problem have in common: its words, whatever the white space between them."""
    return " ".join(problem.split())


def usable(rows: list[Row | None], held_out: set[str], longest: float = math.inf) -> tuple[list[Row], Counter]:
    """The rows to train or test on, in order, and how many others there are, by reason. held_out: `same_text` of
    problems that may not be among them; longest: characters of a problem."""
    dropped, copies = Counter(), {}
    answers = list(dict.fromkeys(row.answer for row in rows if row))
    # Asked again where the answer is no: a worker may have run out of time, and every rank must come to the same
    # problems.
    gradable = dict(zip(answers, in_threads(lambda answer: readable(answer) or readable(answer), answers), strict=True))
    for row in rows:
        if row is None:
            dropped["no mathematics"] += 1
        elif len(row.problem) > longest:
            dropped[f"longer than {longest} characters"] += 1
        elif same_text(row.problem) in held_out:
            dropped["also in a test part"] += 1
        elif not gradable[row.answer]:
            dropped["without an answer that can be graded"] += 1
        else:
            copies.setdefault(same_text(row.problem), []).append(row)
    kept = []
    for first, *others in copies.values():
        # Compared as text: a comparison as mathematics may run out of time, and every rank must come to the same
        # problems.
        agree = all(same_text(row.answer) == same_text(first.answer) for row in others)
        kept += [first] if agree else []
        dropped["repeated" if agree else "repeated with another answer"] += len(others) + (not agree)
    return kept, +dropped


# Worked solutions

BLOCK = re.compile(r"\\begin\{([a-z]+\*?)\}.*?\\end\{\1\}|\\\[.*?\\\]|\$\$.*?\$\$|\[asy\].*?\[/asy\]", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z$\\])")


def solution_steps(solution: str) -> list[str]:
    """The lines of a worked solution, or the sentences of a single one. Displayed formulas are not torn apart."""
    whole = BLOCK.sub(lambda block: " ".join(block[0].split()), solution)
    lines = [line.strip() for line in whole.split("\n") if line.strip()]
    return lines if len(lines) > 1 else [step for line in lines for step in SENTENCE_END.split(line)]


def add_args(parser):
    group = parser.add_argument_group("competition mathematics, and rows of one's own")
    for name, row in SETS.items():
        # of some scripts --data is text to train on
        short = {"--data"} - parser._option_string_actions.keys() if name == "rows" else ()
        group.add_argument(f"--{name}-data", *short, nargs="+", default=list(row.sources), metavar="SOURCE",
                           help=f"{', '.join(row.parts)}: each a {', '.join(FILES)} file or a dataset of the hub "
                                f"(owner/name[/configuration][:split]), "
                                f"last ones may be left out; or one folder with {', '.join(row.files)} as such "
                                f"files; default: {' '.join(row.sources) or 'none'}")
    for column in COLUMNS:
        group.add_argument(f"--rows-{column}-column", f"--{column}-column", default="", metavar="NAME",
                           help=f"of a row; default: {'problem or ' * (column == 'question')}{column}")
    add_format_arg(group, "rows")


class Competition(GradedSet):
    """One of SETS as a task. dropped[part, reason] and num_dropped: rows of its sources that are in no split."""
    fmt, out_words = PAPER, "second test set"

    def __init__(self, name: str, args, seed: int):
        self.name, self.seed, self.flag = name, seed, f"--{name}-data"
        self.fmt = IN_WORDS[getattr(args, f"{name}_format", PAPER.name)]
        given = {column: getattr(args, f"{name}_{column}_column", "") for column in COLUMNS}
        columns = {column: its_name for column, its_name in given.items() if its_name}
        rows = {part: read_source(self.flag, source, **columns)
                for part, source in self._sources(getattr(args, f"{name}_data"))}
        held_out = {same_text(row.problem) for part in rows if part != "train" for row in rows[part] if row}
        self.splits, self.solutions, self.dropped = {"sft": [], "rl": [], "test_in": [], "test_out": []}, {}, Counter()
        for part in rows:
            kept, dropped = usable(rows[part], held_out, MAX_PROBLEM) if part == "train" else usable(rows[part], set())
            self.dropped.update({(part, reason): count for reason, count in dropped.items()})
            for row in kept:  # without a solution there is no SFT, and all is for RL
                split = part if part != "train" else "sft" if row.solution and in_split(row.problem, "sft") else "rl"
                self.splits[split].append((row.problem, row.answer))
                self.solutions |= {row.problem: row.solution} if row.solution else {}
        self.num_dropped = self.dropped.total()
        self.left_out = ", ".join(f"{count} {reason} ({part})" for (part, reason), count in self.dropped.items())
        counts = ", ".join(f"{len(problems)} {split}" for split, problems in self.splits.items() if problems)
        print0(f"{self.name}: {counts or 'no'} problems" + f"; left out: {self.left_out}" * bool(self.dropped))

    def _sources(self, given: list[str]) -> list[tuple[str, str]]:
        """(part, source) of the sources given by flag; those of a folder are its files. Raises BadInput."""
        parts, _, files = SETS[self.name]
        if not given:
            raise BadInput(f"{self.flag}: name the files of {', '.join(parts)}, or a folder that holds them")
        folder = os.path.expanduser(given[0])
        if len(given) == 1 and os.path.isdir(folder):
            given = []
            for file in files:
                found = [path for end in FILES if os.path.isfile(path := os.path.join(folder, file + end))]
                if len(found) != 1:
                    raise BadInput(f"{self.flag} {folder}: has {len(found)} files {file} "
                                   f"that end in {', '.join(FILES)}, needs one")
                given += found
        if len(given) > len(parts):
            raise BadInput(f"{self.flag} {' '.join(given)}: at most {len(parts)} sources, of {', '.join(parts)}")
        return list(zip(parts, given, strict=False))

    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split; the splits are endless. Raises BadInput for a split without problems."""
        if not self.splits[split]:
            needed = "; it takes problems with a worked solution" * (split == "sft")
            raise BadInput(f"task {self.name}: has no problems for split {split} ({self.flag} is "
                           f"{', '.join(SETS[self.name].parts)}; left out: {self.left_out or 'none'}{needed})")
        return Problem(split, index, *nth_of_epochs(self.splits[split], self.seed, split, index))

    def _steps(self, problem: Problem) -> list[str]:
        if problem.prompt not in self.solutions:
            raise BadInput(f"task {self.name}: nothing to demonstrate, {self.flag} has no worked solution (column "
                           f"solution) of {problem.prompt[:40]!r}")
        return solution_steps(self.solutions[problem.prompt])

    def solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """The source's solution, a line or a sentence a step; `rng` is not used. Raises BadInput without one."""
        return self.fmt.render_solution(self._steps(problem), problem.answer)

    def corrupted_solution(self, problem: Problem, rng: random.Random) -> str:
        """The source's solution, half of the time with another problem's answer or, where it is a number, with a slip:
        a wrong number, and where it can be a wrong result of a plain equation that leads there."""
        steps, answer = self._steps(problem), problem.answer
        if rng.random() >= 0.5:
            return self.fmt.render_solution(steps, answer)
        if ANSWER.fullmatch(answer):
            steps, answer = with_slip(steps, answer, rng, STATED_RESULT, equations)
        else:
            others = (rng.choice(self.splits[problem.split])[1] for _ in range(20))
            answer = next((other for other in others if other != answer), answer)
        return self.fmt.render_solution(steps, answer)

    def verification_demo(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A demonstration for the verifier: a step is wrong iff it is none of the source's solution and states an
        equation that does not hold; the final verdict is the outcome. `rng` is not used. Raises BadInput."""
        return judge_equations(self.fmt, solution, set(self._steps(problem)), self.check(problem, solution) is True)
