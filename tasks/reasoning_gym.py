"""
Reasoning Gym: the data sets of that library (Stojanovski et al. 2025), by name; gsm_symbolic above all.

gsm_symbolic is word problems like those of GSM8K, made from templates with names and numbers of their own and a worked
solution (Mirzadeh et al. 2024). A step is one line of the solution. sft, rl and test_in share 55 templates and no
problem: test_in has new numbers in templates that were trained on. test_out has 20 templates that were never seen. The
split of the templates is the same for every seed. --reasoning-gym-most-lines 2 leaves 19 and 6, of two steps each. The
library's remark to give no units is left out of the problems: the format says how to answer.

The library has 100 templates and draws from 85 of them. BAD_TEMPLATES are left out here: under 93% of 1000 draws of
each are `is_sound`, or the worked solution states "24=24". Draws of the others that are not sound are drawn again: of
1000 of each that is 54 of template 24 (an age below 0), 19 of template 3 (rounded down), 1 of template 40.

Step labels were compared with 200 lines that were judged by reading, 80 of a small model and 120 worked lines, most of
them made wrong. Of 60 right lines all were labelled right, of 140 wrong ones 6 too: a sentence that contradicts its
equation, or a number that belongs to another step. Before parentheses, units in them and signs of results were read as
they are now it was 11.

Of any other set test_in and test_out are both held out and of one kind, unless --reasoning-gym-out-options makes those
of test_out harder. Its solutions are scored by the library, and only a score of 1 is right. There are no worked
solutions: a demonstration is the answer alone. REFUSED are the sets whose scorer cannot be trusted with a model's text.
"""
import functools
import json
import math
import random
import re
import zlib
from dataclasses import MISSING, fields
from decimal import Decimal
from typing import NamedTuple

from nanochat.common import BadInput
from tasks.answers import MAX_ANSWER
from tasks.common import Problem, check_answer, draw_prompt, in_split, read_answer, split_stream
from tasks.formats import IN_WORDS
from tasks.gsm8k import (STATED_RESULT, add_format_arg, decimal_text, equations, judge_equations, number,
                         with_slip)

# Worked solutions are rounded down without a word (2, 4, 49, 75, 99), have fractions or hours of 16 digits (46, 52,
# 66), have a product that its signs do not give (60) or "24=24" (82).
BAD_TEMPLATES = {2, 4, 46, 49, 52, 60, 66, 75, 82, 99}
WORDED = "gsm_symbolic"
NUM_UNSEEN = 20  # templates of test_out

RUNS_TEXT = "its scorer runs an answer as a program"
TAKES_NAN = "its scorer takes NaN for a right number"
NO_END = "its scorer takes hours on a short answer"
REFUSED = {**dict.fromkeys(("binary_matrix", "countdown", "intermediate_integration", "n_queens",
                            "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
                            "string_insertion"), RUNS_TEXT),
           **dict.fromkeys(("complex_arithmetic", "number_sorting"), TAKES_NAN),
           **dict.fromkeys(("coin_flip", "rubiks_cube", "rush_hour"), NO_END),
           "acre": "it makes all of its problems before the first one",
           "word_ladder": "it has too few words for a million problems",
           "game_of_life_halting": "its scorer takes any answer for right",
           "codeio": "it runs programs that a model wrote", "composite": "it is made of other sets; name one of them"}
SIZE = 10 ** 6  # problems that a set is made with; those that are asked for are made when they are
# what sets raise on options that do not fit, and scorers on answers that they cannot read
ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
          ValueError)

UNIT = re.compile(r"(?<=[0-9%])(?:[ /](?!x\b)[A-Za-z][A-Za-z'’-]*){1,8}(?= ?[-–−+*/x×÷=)])")
UNKNOWN = re.compile(r"(?<=[0-9]) ?\+ ?[A-Z]\b")
MANY_DECIMALS = re.compile(r"\.[0-9]{5}")
PLAIN = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")


# Lines and their equations

def without_units(line: str) -> str:
    """A line without the words between numbers and signs, and without an unknown that is added: "12 balls * €6/ball =
    €72" -> "12 * $6 = $72", "70 + 43 + T = 113 + T = 219" -> "70 + 43 = 113 = 219"."""
    line = UNKNOWN.sub("", re.sub("[€£]", "$", line))
    line = re.sub(r"(?<=\() +| +(?=\))", "", UNIT.sub("", line))
    return re.sub(r"(?<=[0-9])\((?=[0-9])", "*(", line)  # 2(11) is a product


def line_equations(line: str) -> list[tuple[str, float, str, bool]]:
    """The equations of a line, units left out: as tasks.gsm8k.equations."""
    return equations(without_units(line))


def numbers_in(line: str) -> list[Decimal]:
    """The plain numbers of a line, in order."""
    return [number(text) for text in PLAIN.findall(line)]


def result_of(line: str) -> Decimal | None:
    """The result of a line's last equation, without one its last number; None where there is no plain number."""
    found = line_equations(line)
    results = [number(found[-1][2].rstrip("%"))] if found else numbers_in(line)
    return results[-1] if results else None


def line_error(line: str, known: set[Decimal]) -> str | None:
    """What is wrong with a line: "arithmetic" (an equation does not hold), "equation" (it holds, and its result is not
    a known number) or "number" (that without an equation). None of a right line, and of one without a number."""
    found = line_equations(line)
    if not all(holds for *_, holds in found):
        return "arithmetic"
    if result_of(line) in known or not numbers_in(line):
        return None
    return "equation" if found else "number"


def analysis_of(line: str, worked: str, is_right: bool) -> str:
    """What a verifier writes about a line: what the worked solution has in its place, and what is wrong."""
    found = line_equations(line)
    parts = [f"{left}={stated}" for left, _, stated, _ in line_equations(worked)]
    text = "; ".join(parts) or PLAIN.findall(worked)[-1]
    if is_right:
        return text
    for left, value, stated, holds in found:
        if not holds:  # 3*13=36, where 3*12=36 belongs
            return f"{left}={decimal_text(value)}, not {stated}" if number(stated) == result_of(worked) else (
                f"{text}, not {stated}")
    return f"{text}, not {found[-1][2] if found else PLAIN.findall(line)[-1]}"


def is_right_analysis(analysis: str, step: str, worked: str) -> bool:
    """Whether what a verifier writes about a step is right: its equations hold, and come to what the worked line comes
    to, or work out an equation of the step that does not hold; and what it says to be wrong stands in the step. Of
    "3 * 12 = 38 pens" that is so for "3*12=36, not 38", and not for "3*12=34, not 38"."""
    said, _, instead_of = analysis.partition(", not ")
    found, slips = line_equations(said), {left for left, *_, holds in line_equations(step) if not holds}
    return (all(holds for *_, holds in found) and bool(numbers_in(said))
            and set(numbers_in(instead_of)) <= set(numbers_in(step))
            and (result_of(said) == result_of(worked) or any(left in slips for left, *_ in found)))


def tidy(text: str) -> str:
    """Text without the zero that floats leave: "29.0*14=406.0" -> "29*14=406"."""
    return re.sub(r"(?<=[0-9])\.0(?![0-9])", "", text)


def worked_lines(worked: str) -> list[str]:
    """The lines of a worked solution that have a number, without bullets; no headings and no answer."""
    lines = [line.strip(" •-") for line in tidy(worked).rpartition("####")[0].split("\n")]
    return [line for line in lines if re.search("[0-9]", line) and not line.endswith(":")]


# The library

class Example(NamedTuple):
    """A problem, the lines of its solution, and what the library's scorer is given; None where it is not asked."""
    question: str
    answer: str
    lines: tuple[str, ...]
    entry: dict | None = None


def import_library():
    """The library. Raises BadInput where it is not installed."""
    try:
        import reasoning_gym
    except ImportError:
        raise BadInput("--task reasoning_gym: needs the package reasoning-gym, which is not installed: "
                       "pip install reasoning-gym==0.1.25") from None
    return reasoning_gym


def read_options(flag: str, config: type, given: tuple[str, ...]) -> dict:
    """key=value texts as the fields of a set's config, by name. Values are JSON, or else text. Raises BadInput."""
    defaults = {field.name: field.default if field.default_factory is MISSING else field.default_factory()
                for field in fields(config) if field.name not in ("seed", "size")}
    found = {}
    for text in given:
        key, _, value = text.partition("=")
        if "=" not in text or key not in defaults:
            raise BadInput(f"{flag} {text}: expected KEY=VALUE, where KEY is one of: {', '.join(defaults)}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
        found[key] = tuple(found[key]) if isinstance(defaults[key], tuple) else found[key]
    return found


@functools.lru_cache(maxsize=4)
def data_set(name: str, given: tuple[str, ...] = (), flag: str = "--reasoning-gym-options"):
    """A data set of the library with options, KEY=VALUE each. Raises BadInput."""
    library = import_library()
    known = library.factory.DATASETS
    if name not in known or name in REFUSED:
        reason = REFUSED.get(name, f"there are {', '.join(sorted(known.keys() - REFUSED))}")
        raise BadInput(f"--reasoning-gym-name {name}: {reason}")
    options = read_options(flag, known[name][1], given)
    try:
        made = library.create_dataset(name, seed=0, size=SIZE, **options)
        made[0]
    except ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f"--reasoning-gym-name {name} {flag} {' '.join(given)}: cannot be made: {reason}") from None
    return made


def belongs(question: str, split: str) -> bool:
    """Whether a problem of any other set than gsm_symbolic is in a split: the held-out ones are halved."""
    is_odd = zlib.crc32(question.encode()) // 10 % 2 == 1
    return in_split(question, split) and (split not in ("test_in", "test_out") or is_odd is (split == "test_out"))


@functools.lru_cache(maxsize=4096)
def entry_of(name: str, given: tuple[str, ...], seed: int, split: str, index: int) -> Example:
    """Problem `index` of a split of any other set than gsm_symbolic. Raises BadInput where a set has too few."""
    rng, made = split_stream(seed, split, index), data_set(name, given)
    for _ in range(1000):
        try:
            entry = made[rng.randrange(SIZE)]
        except ERRORS as error:
            raise BadInput(f"--reasoning-gym-name {name}: a problem cannot be made by these options: "
                           f"{error}") from None
        if belongs(entry["question"], split):
            answer = entry["answer"] or ""  # some sets have no single one
            return Example(entry["question"], answer, (answer,), entry)
    raise BadInput(f"--reasoning-gym-name {name}: 1000 draws gave no problem of split {split}")


# Templates of gsm_symbolic

@functools.cache
def templates() -> dict:
    """The templates of gsm_symbolic, number -> what makes a problem of it."""
    made = data_set(WORDED).generators
    from reasoning_gym.arithmetic.gsm_symbolic import gsm_symbolic
    return {number: made[number] for number in gsm_symbolic.tasks_ok if number not in BAD_TEMPLATES}


@functools.cache
def dealt_templates() -> dict[bool, list[int]]:
    """The numbers of the templates that are trained on (True) and of those that are never seen (False)."""
    unseen = set(random.Random("unseen templates").sample(sorted(templates()), NUM_UNSEEN))
    return {is_seen: [number for number in sorted(templates()) if (number not in unseen) is is_seen]
            for is_seen in (True, False)}


def read_example(made: dict) -> Example:
    """What a template made."""
    return Example(tidy(made["question"]), made["answer"], tuple(worked_lines(made["metadata"]["answer_cot"])))


def is_sound(example: Example) -> bool:
    """Whether a worked solution ends in the answer, all of its equations hold, and no number has many decimals."""
    gold, texts = number(example.answer), (example.question, *example.lines)
    return (gold in numbers_in(example.lines[-1]) and not any(MANY_DECIMALS.search(text) for text in texts)
            and all(holds for line in example.lines for *_, holds in line_equations(line)))


@functools.cache
def chosen_templates(is_seen: bool, most_lines: int) -> list[int]:
    """Those of dealt_templates whose worked solutions have at most so many lines, as drawn 20 times; 0 = all."""
    most = lambda n: max(len(read_example(templates()[n](random.Random(i), 1.0)).lines) for i in range(20))
    return [number for number in dealt_templates()[is_seen] if not most_lines or most(number) <= most_lines]


@functools.lru_cache(maxsize=4096)
def example_of(seed: int, split: str, index: int, most_lines: int = 0) -> Example:
    """Problem `index` of a split of gsm_symbolic."""
    rng, drawn = split_stream(seed, split, index), {}

    def draw() -> str:
        template = templates()[rng.choice(chosen_templates(split != "test_out", most_lines))]
        example = next(e for _ in range(1000) if is_sound(e := read_example(template(rng, 1.0))))
        drawn[example.question] = example
        return example.question
    return drawn[draw_prompt(draw, split)]


def add_args(parser):
    group = parser.add_argument_group("task reasoning_gym")
    group.add_argument("--reasoning-gym-name", default=WORDED, metavar="NAME",
                       help="a data set of the library Reasoning Gym")
    group.add_argument("--reasoning-gym-options", nargs="*", default=[], metavar="KEY=VALUE",
                       help="options of that set, values as in JSON; a wrong one is answered with those there are")
    group.add_argument("--reasoning-gym-out-options", nargs="*", default=[], metavar="KEY=VALUE",
                       help=f"further options of its test_out, for harder problems; {WORDED} has none")
    group.add_argument("--reasoning-gym-most-lines", type=int, default=0,
                       help=f"of {WORDED}: lines that a worked solution has at most; 0 = all")
    add_format_arg(group, "reasoning-gym")


class ReasoningGym:
    """A data set of the library as a task."""
    name, has_numbers = "reasoning_gym", True

    def __init__(self, args, seed: int):
        self.seed, self.set_name, self.fmt = seed, args.reasoning_gym_name, IN_WORDS[args.reasoning_gym_format]
        self.options, out = tuple(args.reasoning_gym_options), tuple(args.reasoning_gym_out_options)
        self.has_step_labels = self.is_worded = self.set_name == WORDED
        data_set(self.set_name, self.options)
        self.most_lines = args.reasoning_gym_most_lines
        if self.is_worded and out:
            raise BadInput(f"--reasoning-gym-out-options {' '.join(out)}: {WORDED} has none, as its test_out is other "
                           f"templates; give the flag no value")
        if self.most_lines and not self.is_worded:
            raise BadInput(f"--reasoning-gym-most-lines {self.most_lines}: {self.set_name} has no worked solutions; "
                           f"give 0")
        if self.is_worded and not all(chosen_templates(is_seen, self.most_lines) for is_seen in (True, False)):
            raise BadInput(f"--reasoning-gym-most-lines {self.most_lines}: no problem is as short; the least is 2")
        self.out_options = self.options + out
        data_set(self.set_name, self.out_options, "--reasoning-gym-out-options")
        self.about = f"{self.set_name} of Reasoning Gym"
        if not (self.is_worded or out):  # else test_out is other templates, or harder
            self.out_words = "second held-out sample"

    def _given(self, split: str) -> tuple[str, ...]:
        return self.out_options if split == "test_out" else self.options

    def _example(self, split: str, index: int) -> Example:
        return (example_of(self.seed, split, index, self.most_lines) if self.is_worded else
                entry_of(self.set_name, self._given(split), self.seed, split, index))

    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split; the splits are endless and share no problem."""
        example = self._example(split, index)
        return Problem(split, index, example.question, example.answer)

    def score(self, problem: Problem, solution: str) -> float | None:
        """What a solution earns, from 0 to 1, by the library's scorer; None where it cannot be scored."""
        if self.is_worded:
            outcome = check_answer(self.fmt, problem, solution)
            return None if outcome is None else float(outcome)
        answer = self.read_answer(solution)
        if not answer or len(answer) > max(MAX_ANSWER, 2 * len(problem.answer)):
            return 0.0
        entry = self._example(problem.split, problem.index).entry
        try:
            found = float(data_set(self.set_name, self._given(problem.split)).score_answer(answer, entry))
        except ERRORS:  # how some scorers say that they cannot read it
            return 0.0
        return min(1.0, max(0.0, found)) if math.isfinite(found) else 0.0

    def check(self, problem: Problem, solution: str) -> bool | None:
        """The outcome: whether a solution earns 1; None where it cannot be scored."""
        score = self.score(problem, solution)
        return None if score is None else score == 1

    def read_answer(self, solution: str) -> str | None:
        """What a solution answers; None where nothing can be read. Grids and the like as the format has them."""
        return read_answer(self.fmt, solution) if self.is_worded else self.fmt.answer(solution)

    def step_labels(self, problem: Problem, solution: str) -> list[bool]:
        """Gold labels of the steps of gsm_symbolic."""
        return [error is None for error in self.step_errors(problem, solution)]

    def step_errors(self, problem: Problem, solution: str) -> list[str | None]:
        """What is wrong with each step of gsm_symbolic (line_error). Known are the numbers of the worked solution."""
        if not self.is_worded:
            return []
        known = {value for line in self._lines(problem) for value in numbers_in(line)}
        return [line_error(step, known) for step in self.fmt.step_bodies(solution)]

    def _lines(self, problem: Problem) -> list[str]:
        if not problem.answer:
            raise BadInput(f"task {self.name}: nothing to demonstrate, {self.set_name} has no single answer")
        return list(self._example(problem.split, problem.index).lines)

    def solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """The worked solution, a line a step; the answer alone where there is none. Raises BadInput."""
        return self.fmt.render_solution(self._lines(problem), problem.answer)

    def corrupted_solution(self, problem: Problem, rng: random.Random) -> str:
        """The solution, half of the time with a wrong answer, and where it can be with one slip that leads there: a
        wrong result of an equation. Later lines stay as they are. The wrong answer of other sets is another
        problem's. Raises BadInput."""
        if rng.random() >= 0.5:
            return self.solution_demo(problem, rng)
        if not self.is_worded:
            answer = self.problem(problem.split, rng.randrange(SIZE)).answer
            return self.fmt.render_solution([answer], answer)
        return self.fmt.render_solution(*with_slip(self._lines(problem), problem.answer, rng, STATED_RESULT,
                                                   line_equations))

    def verification_demo(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A demonstration for the verifier, with the outcome as its final verdict. Of gsm_symbolic: it works out each
        step itself, as the line of the worked solution with the same result or else the one in its place, and
        compares; its step verdicts are the gold labels. `rng` is not used. Raises BadInput."""
        verdict = self.check(problem, solution) is True
        if not self.is_worded:
            return judge_equations(self.fmt, solution, set(self._lines(problem)), verdict)
        labels = self.step_labels(problem, solution)
        analyses = list(map(analysis_of, *self._beside_worked(problem, solution), labels))
        return self.fmt.render_verification(analyses, labels, verdict)

    def _beside_worked(self, problem: Problem, solution: str) -> tuple[list[str], list[str]]:
        """The steps of a solution, and the worked lines that they are compared with: one of the same result, or else
        that in their place."""
        worked, steps = self._lines(problem), self.fmt.step_bodies(solution)
        same = {result_of(line): line for line in reversed(worked)}
        return steps, [same.get(result_of(step), worked[min(k, len(worked) - 1)]) for k, step in enumerate(steps)]

    def analysis_labels(self, problem: Problem, solution: str, analyses: list[str]) -> list[bool]:
        """Whether what a verification says of each step of gsm_symbolic is right (is_right_analysis)."""
        return [is_right_analysis(analysis, step, worked) for analysis, step, worked in zip(
            analyses, *self._beside_worked(problem, solution), strict=False)] if self.is_worded else []
