"""
A mixture of tasks in one run: problem i is the one of task i modulo their number. All must have the same text format.
"""
import random
from dataclasses import replace

from nanochat.common import BadInput
from tasks.chain import Chain
from tasks.common import Problem
from tasks.last_letter import LastLetter

PARTS = {"chain": Chain, "last_letter": LastLetter}


def add_args(parser):
    group = parser.add_argument_group("task mixture")
    group.add_argument("--mixture-tasks", default="chain,last_letter",
                       help=f"tasks, separated by commas, of: {', '.join(PARTS)}")


class Mixture:
    """Several tasks as one. Each part has its own flags; a part named twice has twice the share."""
    name = "mixture"

    def __init__(self, args, seed: int):
        names = args.mixture_tasks.split(",")
        unknown = [name for name in names if name not in PARTS]
        if unknown:
            raise BadInput(f"--mixture-tasks {args.mixture_tasks}: {unknown[0]!r} is not a task; "
                           f"there are {', '.join(PARTS)}")
        self.parts = [PARTS[name](args, seed) for name in names]
        self.fmt = self.parts[0].fmt
        if any(part.fmt != self.fmt for part in self.parts):
            raise BadInput(f"--mixture-tasks {args.mixture_tasks}: the tasks have different text formats")

    def part(self, problem: Problem):
        """The task that a problem comes from."""
        return self.parts[problem.index % len(self.parts)]

    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split."""
        # Every part counts through all of its own problems: index // parts, not every second one.
        return replace(self.parts[index % len(self.parts)].problem(split, index // len(self.parts)), index=index)

    def check(self, problem: Problem, solution: str) -> bool | None:
        """The outcome, as the problem's task sees it."""
        return self.part(problem).check(problem, solution)

    def step_labels(self, problem: Problem, solution: str) -> list[bool]:
        """Gold labels of the steps."""
        return self.part(problem).step_labels(problem, solution)

    def step_errors(self, problem: Problem, solution: str) -> list[str | None]:
        """What is wrong with each step: as the problem's task names it, else the task's name; None where nothing is."""
        part = self.part(problem)
        if hasattr(part, "step_errors"):
            return part.step_errors(problem, solution)
        return [None if label else part.name for label in part.step_labels(problem, solution)]

    def solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """A demonstration for the generator."""
        return self.part(problem).solution_demo(problem, rng)

    def corrupted_solution(self, problem: Problem, rng: random.Random) -> str:
        """A solution with mistakes."""
        return self.part(problem).corrupted_solution(problem, rng)

    def verification_demo(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A demonstration for the verifier."""
        return self.part(problem).verification_demo(problem, solution, rng)

    def analysis_labels(self, problem: Problem, solution: str, analyses: list[str]) -> list[bool]:
        """Whether what a verification says of each step is right."""
        return self.part(problem).analysis_labels(problem, solution, analyses)
