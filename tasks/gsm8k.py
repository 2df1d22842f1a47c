"""
GSM8K: grade-school word problems (Cobbe et al. 2021), with their worked solutions and the number each asks for.

A step is one line of the solution. Nobody has labelled steps, so `step_labels` knows none; the verifier's
demonstrations judge a step by the equations it states. The train file is dealt to sft and rl by a hash of the question,
the test file to test_in and test_out by another, so that both test splits are held out; test_out is no harder than
test_in, it is a second sample. An epoch goes through a split's problems in an order of its own, so the splits are
endless.
"""
import os
import random
import re
import zlib
from collections.abc import Callable
from decimal import Decimal

from nanochat.calculator import calculate
from nanochat.common import BadInput, print0
from tasks.common import GradedSet, Problem, in_split, nth_of_epochs
from tasks.formats import IN_WORDS, Format
from tasks.tables import read_file, read_hub, read_rows

INTEGER = "(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
ANSWER = re.compile(rf"-?{INTEGER}(?:\.[0-9]*)?|-?\.[0-9]+")
CALCULATOR = re.compile("<<[^<>]*>>")  # how the dataset marks what a calculator may work out: 48/2 = <<48/2=24>>24
SHOWN_RESULT = re.compile(CALCULATOR.pattern + rf"({INTEGER}(?:\.[0-9]+)?)")
STATED_RESULT = re.compile(r"(?<==)(?: ?\$?)([0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?)")  # of an equation without marks
NO_EQUATION = "no equation"

# Plain equations in text. Bounds on digits, operands and parentheses keep the search linear and the values small on any
# text.
DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{1,12})(?:\.[0-9]{1,9})?|\.[0-9]{1,9})(?![0-9])"
NUMBER = rf"-?\$?{DIGITS}%?"
OPERAND = rf"\({{0,3}}{NUMBER}\){{0,3}}"
SIGNS = "-–−+*/x×÷"
EXPRESSION = rf"{OPERAND}(?: ?(?:[-–−+*/×÷]|x(?! ?-)) ?{OPERAND})"
# The right side is looked ahead at, so that in "2+3 = 6-1 = 5" the search goes on with 6-1. It must not go on in words
# or as "1 1/2", "18 000".
EQUATION = re.compile(rf"(?<![0-9.,$%])({EXPRESSION}{{1,10}}) ?= ?"
                      rf"(?=({EXPRESSION}{{0,10}})(?! ?[-–−+*×÷] ?[A-Za-z]| [0-9]))")


def read_split(source: str, split: str) -> list[tuple[str, str]]:
    """The (question, worked solution) rows of train or test, from a folder's <split>.jsonl or a dataset of the hub."""
    folder, where = os.path.expanduser(source), f"--gsm8k-data {source}"
    path = os.path.join(folder, f"{split}.jsonl")
    if os.path.isdir(folder):
        if not os.path.isfile(path):
            raise BadInput(f"{where}: has no {split}.jsonl")
        rows = read_file(path)
    elif os.path.isfile(folder):
        raise BadInput(f"{where}: is a file; name the folder that holds train.jsonl and test.jsonl, or take --task "
                       f"rows --data {source} and a file to test on")
    elif re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", source):
        rows = read_hub(where, source, "main", split=split)
    else:
        raise BadInput(f"{where}: no such folder")
    return read_rows(rows, read_row, ("question", "answer"))


def read_row(row: dict) -> tuple[str, str]:
    question, worked = row["question"].strip(), row["answer"]
    if not question or not worked.strip():
        raise ValueError("has no text for question or answer")
    return question, worked


def number(text: str | None) -> Decimal | None:
    """The number that an answer states: number("$1,000.0") == 1000. None where it is anything but one plain number."""
    plain = "" if text is None else text.strip().replace("$", "", 1)
    return Decimal(plain.replace(",", "")) if ANSWER.fullmatch(plain) else None


def gold_answer(worked: str) -> str | None:
    """The number after the last "####", without commas and dollar signs; None where there is none."""
    _, mark, gold = worked.rpartition("####")
    return gold.strip().replace("$", "").replace(",", "") if mark and number(gold) is not None else None


def worked_lines(worked: str) -> list[str]:
    """The lines of a worked solution before its answer, calculator marks left in, blank ones left out."""
    return [line.strip() for line in worked.rpartition("####")[0].split("\n") if line.strip()]


def without_marks(line: str) -> str:
    return CALCULATOR.sub("", line)


def mistaken(shown: str, rng: random.Random) -> str:
    """Another number, as a slip would give it: 23, 25, 240 or 42 in place of 24."""
    value = Decimal(shown.replace(",", ""))
    k = rng.randrange(max(1, len(shown) - 1))
    swapped = shown[:k] + shown[k: k + 2][::-1] + shown[k + 2:]
    slips = [value + 1, value - 1, value * 10, *([Decimal(swapped)] if re.fullmatch(r"-?[0-9]+", swapped) else [])]
    slip = rng.choice([s for s in slips if s != value and (s >= 0 or value < 0)])
    return f"{slip:,f}" if "," in shown else f"{slip:f}"


def with_slip(lines: list[str], answer: str, rng: random.Random, shown: re.Pattern,
              equations_of: Callable) -> tuple[list[str], str]:
    """Lines of which one has a wrong result, if one states an equation, and a wrong answer. Where the last result is
    the answer and wrong, that is the answer. shown: finds the results of a line."""
    slipped, wrong = list(lines), mistaken(answer, rng)
    results = [(k, match) for k, line in enumerate(lines) for match in shown.finditer(line)]
    for k, match in rng.sample(results, len(results)):
        slip = mistaken(match[1], rng)
        slipped[k] = lines[k][: match.start(1)] + slip + lines[k][match.end(1):]
        if not all(holds for *_, holds in equations_of(slipped[k])):
            is_answer = (k, match) == results[-1] and number(match[1]) == number(answer)
            return slipped, slip.replace(",", "") if is_answer else wrong
        slipped[k] = lines[k]
    return slipped, wrong


# Equations in text

def evaluate(expression: str) -> float | None:
    """The value of + - * / and parentheses over decimal numbers and percentages; None where it has none."""
    result = calculate(re.sub(r"([0-9.]+)%", r"(\1/100)", expression))
    return None if result is None else float(result)


def plain(expression: str) -> str:
    """An expression of a text in Python's signs: "$1,200 x 3" -> "1200*3"."""
    return re.sub(r"(?<![0-9.])0+(?=[0-9])", "", re.sub("[$, ]", "", expression)).translate(
        str.maketrans("x×÷–−", "**/--"))


def is_result(stated: str, value: float) -> bool:
    """Whether a result, maybe rounded or cut, is this value; a percentage may be meant as a number of percents."""
    decimals = len(stated.rstrip("%").partition(".")[2])
    distances = [abs(value - read) for text in (stated, stated.rstrip("%")) if (read := evaluate(text)) is not None]
    # Less than one in the last decimal, and less by more than what floats lose: .3 is not .2.
    return any(d <= 1e-9 * abs(value) or decimals and d * 10 ** decimals < 1 - 1e-6 for d in distances)


def equations(text: str) -> list[tuple[str, float, str, bool]]:
    """The plain equations of a text: (left side, its value, the stated result, whether it holds). Total. "so 48 / 2 =
    $26" -> [("48/2", 24.0, "26", False)]. What a word interrupts is no plain equation: in "3 cats + 4 + 5 = 12" there
    is none."""
    text, found = re.sub(r"\s+", " ", text), []
    for match in EQUATION.finditer(text):
        left, right = plain(match[1]), plain(match[2])
        value, before = evaluate(left), text[: match.start()]
        if value is None or before.endswith(":") or before.rstrip()[-1:] in (*SIGNS, *"0123456789"):
            continue  # what stands before belongs to it, as in "3 cats + 4 + 5", "6:30+20" and "1 1/2+2"
        first = plain(re.match(NUMBER, match[2].lstrip("("))[0])
        found.append((left, value, right, is_result(first, value) or is_result(right, value)))
    return found


def decimal_text(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


def judge_equations(fmt: Format, solution: str, gold: set[str], verdict: bool) -> str:
    """A verification: a step is wrong iff it is none of the gold steps and states an equation that does not hold."""
    analyses, verdicts = [], []
    for step in fmt.step_bodies(solution):
        known, found = step in gold, equations(step)
        parts = [f"{left}={stated}" if holds or known else f"{left}={decimal_text(value)}, not {stated}"
                 for left, value, stated, holds in found]
        analyses.append("; ".join(parts) or NO_EQUATION)
        verdicts.append(known or all(holds for *_, holds in found))
    return fmt.render_verification(analyses, verdicts, verdict)


def add_args(parser):
    group = parser.add_argument_group("task gsm8k")
    group.add_argument("--gsm8k-data", default="openai/gsm8k", metavar="SOURCE",
                       help="a folder with train.jsonl and test.jsonl (columns question, answer), "
                            "or the name of a dataset on the hub")
    add_format_arg(group, "gsm8k")


def add_format_arg(group, name: str) -> None:
    """--<name>-format, for tasks in words."""
    group.add_argument(f"--{name}-format", choices=list(IN_WORDS), default="paper",
                       help="how solutions and verifications are written: in the tags of RL Tango, or one step a "
                            "line, which takes fewer tokens")


class GSM8K(GradedSet):
    """The GSM8K task. The order of its problems is a function of `seed`; num_dropped: how many rows had no readable
    gold answer, or another one than a row with the same question."""
    name, out_words = "gsm8k", "other half of the test file"

    def __init__(self, args, seed: int):
        self.seed, self.fmt = seed, IN_WORDS[args.gsm8k_format]
        rows = {name: read_split(args.gsm8k_data, name) for name in ("train", "test")}
        golds: dict[str, set] = {}
        for name in rows:
            for question, worked in rows[name]:
                golds.setdefault(question, set()).add(gold_answer(worked))
        is_kept = lambda question: len(golds[question]) == 1 and None not in golds[question]
        self.worked = {question: worked for name in rows for question, worked in rows[name] if is_kept(question)}
        self.num_dropped = sum(not is_kept(question) for name in rows for question, _ in rows[name])
        if self.num_dropped:
            print0(f"gsm8k: left out: {self.num_dropped} rows without one gold answer that can be read")
        held_out = {question for question, _ in rows["test"]}
        self.splits = {"sft": [], "rl": [], "test_in": [], "test_out": []}
        for question in self.worked:
            odd = zlib.crc32(question.encode()) % 2
            split = (("test_out" if odd else "test_in") if question in held_out
                     else "sft" if in_split(question, "sft") else "rl")
            self.splits[split].append(question)
        num_known = sum(question in held_out for question, _ in rows["train"])
        for split, questions in self.splits.items():
            if not questions:
                raise BadInput(f"--gsm8k-data {args.gsm8k_data}: no problem is left for split {split} "
                               f"({self.num_dropped} without one gold answer, {num_known} of the {len(rows['train'])} "
                               f"train questions are in test too)")

    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split; the splits are endless and share no problem."""
        question = nth_of_epochs(self.splits[split], self.seed, split, index)
        return Problem(split, index, question, gold_answer(self.worked[question]))

    def solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """The dataset's own solution, one line a step; `rng` is not used."""
        lines = worked_lines(self.worked[problem.prompt])
        return self.fmt.render_solution([without_marks(line) for line in lines], problem.answer)

    def corrupted_solution(self, problem: Problem, rng: random.Random) -> str:
        """The dataset's solution, half of the time with a wrong answer, and where it can be with one slip that leads
        there: a wrong result of a plain equation. Later lines stay as they are."""
        lines, answer = worked_lines(self.worked[problem.prompt]), problem.answer
        if rng.random() < 0.5:
            lines, answer = with_slip(lines, answer, rng, SHOWN_RESULT, lambda line: equations(without_marks(line)))
        return self.fmt.render_solution([without_marks(line) for line in lines], answer)

    def verification_demo(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A demonstration for the verifier: a step is wrong iff it is no line of the dataset's solution and states an
        equation that does not hold; the final verdict is the outcome. `rng` is not used."""
        gold = {without_marks(line) for line in worked_lines(self.worked.get(problem.prompt, ""))}
        return judge_equations(self.fmt, solution, gold, self.check(problem, solution) is True)
