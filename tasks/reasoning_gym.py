"""
Reasoning Gym: the data sets of that library (Stojanovski et al. 2025), by name; gsm_symbolic above all.

gsm_symbolic is word problems like those of GSM8K, made from templates with names and numbers of their own and a worked
solution (Mirzadeh et al. 2024). A step is one line of the solution. sft, rl and test_in share 55 templates and no
problem: test_in has new numbers in templates that were trained on. test_out has 20 templates that were never seen. The
split of the templates is the same for every seed.

The library has 100 templates and draws from 85 of them. 10 more are left out here, because many of their worked
solutions are wrong: of 1000 draws of each, under 95% are `sound`, or they state an equation like "24=24". The rest is
sound in all draws but for 3% of template 3 and 4% of template 24, which are drawn again.
"""
import functools
import random
import re
from typing import NamedTuple

from nanochat.common import BadInput
from nanochat.rl.formats import PAPER
from tasks.common import Problem, check_answer, draw_prompt, read_answer, split_stream
from tasks.gsm8k import equations, judge_equations, mistaken, number

# Templates whose worked solutions are wrong too often: rounded down without a word (2, 4, 49, 75, 99), fractions or
# hours of 16 digits (46, 52, 66), a product that the signs do not give (60), "24=24" (82).
BAD_TEMPLATES = {2, 4, 46, 49, 52, 60, 66, 75, 82, 99}
NUM_UNSEEN = 20  # templates of test_out

UNIT = re.compile(r"(?<=[0-9%])(?:[ /](?!x\b)[A-Za-z][A-Za-z'’-]*){1,8}(?= ?[-–−+*/x×÷=])")
SHOWN_RESULT = re.compile(r"(?<== )\$?([0-9][0-9,]*(?:\.[0-9]+)?)|(?<==)\$?([0-9][0-9,]*(?:\.[0-9]+)?)")
MANY_DECIMALS = re.compile(r"\.[0-9]{5}")


# Lines and their equations

def without_units(line: str) -> str:
    """A line with what stands between numbers and signs left out: "12 balls * $6/ball = $72" -> "12 * $6 = $72"."""
    line = re.sub(r"(?<=[0-9])\((?=[0-9])", "*(", re.sub("[€£]", "$", line))  # 2(11) is a product
    return UNIT.sub("", line)


def line_equations(line: str) -> list[tuple[str, float, str, bool]]:
    """The equations of a line, units left out: as tasks.gsm8k.equations."""
    return equations(without_units(line))


def tidy(text: str) -> str:
    """Text without the zero that floats leave: "29.0*14=406.0" -> "29*14=406"."""
    return re.sub(r"(?<=[0-9])\.0(?![0-9])", "", text)


def worked_lines(worked: str) -> list[str]:
    """The lines of a worked solution that have a number, without bullets; no headings and no answer."""
    lines = [line.strip(" •-") for line in tidy(worked).rpartition("####")[0].split("\n")]
    return [line for line in lines if re.search("[0-9]", line) and not line.endswith(":")]


# Problems

class Example(NamedTuple):
    """A problem of gsm_symbolic."""
    template: int
    question: str
    answer: str
    lines: tuple[str, ...]


def import_library():
    """The library. Raises BadInput where it is not installed."""
    try:
        import reasoning_gym
    except ImportError:
        raise BadInput("--task reasoning_gym: needs the package reasoning-gym, which is not installed: "
                       "pip install reasoning-gym") from None
    return reasoning_gym


@functools.cache
def templates() -> dict:
    """The templates of gsm_symbolic, number -> what makes a problem of it."""
    made = import_library().create_dataset("gsm_symbolic", seed=0, size=1).generators
    from reasoning_gym.arithmetic.gsm_symbolic import gsm_symbolic
    return {number: made[number] for number in gsm_symbolic.tasks_ok if number not in BAD_TEMPLATES}


@functools.cache
def dealt_templates() -> dict[bool, list[int]]:
    """The numbers of the templates that are trained on (True) and of those that are never seen (False)."""
    unseen = set(random.Random("unseen templates").sample(sorted(templates()), NUM_UNSEEN))
    return {is_seen: [number for number in sorted(templates()) if (number not in unseen) is is_seen]
            for is_seen in (True, False)}


def read_example(template: int, rng: random.Random) -> Example:
    """The next problem of a template."""
    made = templates()[template](rng, 1.0)
    return Example(template, tidy(made["question"]), made["answer"],
                   tuple(worked_lines(made["metadata"]["answer_cot"])))


def is_sound(example: Example) -> bool:
    """Whether a worked solution ends in the answer, all of its equations hold, and no number has many decimals."""
    gold, texts = number(example.answer), (example.question, *example.lines)
    return (gold is not None and gold >= 0 and not any(MANY_DECIMALS.search(text) for text in texts)
            and all(holds for line in example.lines for *_, holds in line_equations(line))
            and gold in numbers_in(example.lines[-1]))


def numbers_in(line: str) -> list:
    return [number(text) for text in re.findall(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?", line)]


@functools.lru_cache(maxsize=4096)
def example_of(seed: int, split: str, index: int) -> Example:
    """Problem `index` of a split of gsm_symbolic."""
    rng, drawn = split_stream(seed, split, index), {}

    def draw() -> str:
        template = rng.choice(dealt_templates()[split != "test_out"])
        example = next(e for _ in range(1000) if is_sound(e := read_example(template, rng)))
        drawn[example.question] = example
        return example.question
    return drawn[draw_prompt(draw, split)]


def add_args(parser):
    group = parser.add_argument_group("task reasoning_gym")
    group.add_argument("--reasoning-gym-name", default="gsm_symbolic", metavar="NAME",
                       help="a data set of the library Reasoning Gym")


class ReasoningGym:
    """A data set of the library as a task."""
    name = "reasoning_gym"
    fmt = PAPER

    def __init__(self, args, seed: int):
        import_library()
        if args.reasoning_gym_name != "gsm_symbolic":
            raise BadInput(f"--reasoning-gym-name {args.reasoning_gym_name}: there is gsm_symbolic")
        self.seed = seed

    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split; the splits are endless and share no problem."""
        example = example_of(self.seed, split, index)
        return Problem(split, index, example.question, example.answer)

    def check(self, problem: Problem, solution: str) -> bool | None:
        """The outcome: whether the answer is the gold one; None where it cannot be scored."""
        return check_answer(self.fmt, problem, solution)

    def read_answer(self, solution: str) -> str | None:
        """What a solution answers; None where nothing can be read."""
        return read_answer(self.fmt, solution)

    def step_labels(self, problem: Problem, solution: str) -> list[bool]:
        """Gold labels of the steps: right where all equations hold and the last result (of a line without an equation:
        its last number) is one of the worked solution's numbers."""
        known = {value for line in self._lines(problem) for value in numbers_in(line)}
        return [is_right_line(self.fmt.step_body(solution[s:e]), known) for s, e in self.fmt.step_spans(solution)]

    def _lines(self, problem: Problem) -> list[str]:
        return list(example_of(self.seed, problem.split, problem.index).lines)

    def solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """The worked solution, one line a step; `rng` is not used."""
        return self.fmt.render_solution(self._lines(problem), problem.answer)

    def corrupted_solution(self, problem: Problem, rng: random.Random) -> str:
        """The worked solution, half of the time with a wrong answer, and where it can be with one slip that leads
        there: a wrong result of an equation. Later lines stay as they are."""
        lines, answer = self._lines(problem), problem.answer
        if rng.random() < 0.5:
            answer = mistaken(problem.answer, rng)
            results = [(k, match) for k, line in enumerate(lines) for match in SHOWN_RESULT.finditer(line)]
            for k, match in rng.sample(results, len(results)):
                shown, (start, end) = match[1] or match[2], match.span(1 if match[1] else 2)
                slip = mistaken(shown, rng)
                line = lines[k][:start] + slip + lines[k][end:]
                if not all(holds for *_, holds in line_equations(line)):
                    is_answer = (k, match) == results[-1] and number(shown) == number(problem.answer)
                    lines[k], answer = line, slip.replace(",", "") if is_answer else answer
                    break
        return self.fmt.render_solution(lines, answer)

    def verification_demo(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A demonstration for the verifier: a step is wrong iff it is no line of the worked solution and states an
        equation that does not hold; the final verdict is the outcome. `rng` is not used."""
        return judge_equations(self.fmt, solution, set(self._lines(problem)), self.check(problem, solution) is True,
                               line_equations)


def is_right_line(line: str, known: set) -> bool:
    """Whether all equations of a line hold and its result is among known numbers."""
    found = line_equations(line)
    results = numbers_in(found[-1][2] if found else line)
    return all(holds for *_, holds in found) and (not results or results[-1] in known)
