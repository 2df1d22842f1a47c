"""
A mixture of tasks in one run: problem i is the one of task i modulo their number. All must have the same text format.
"""
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


def of_part(name: str):
    """This method of the task that a problem comes from."""
    return lambda self, problem, *args: getattr(self.part(problem), name)(problem, *args)


class Mixture:
    """Several tasks as one. Each part has its own flags; a part named twice has twice the share."""
    name = "mixture"
    check, step_labels = of_part("check"), of_part("step_labels")
    solution_demo, corrupted_solution = of_part("solution_demo"), of_part("corrupted_solution")
    verification_demo, analysis_labels = of_part("verification_demo"), of_part("analysis_labels")

    def __init__(self, args, seed: int):
        names = args.mixture_tasks.split(",")
        if unknown := [name for name in names if name not in PARTS]:
            raise BadInput(f"--mixture-tasks {args.mixture_tasks}: {unknown[0]!r} is not a task; "
                           f"there are {', '.join(PARTS)}")
        self.parts = [PARTS[name](args, seed) for name in names]
        self.fmt = self.parts[0].fmt

    def part(self, problem: Problem):
        """The task that a problem comes from."""
        return self.parts[problem.index % len(self.parts)]

    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split."""
        # Every part counts through all of its own problems: index // parts, not every second one.
        return replace(self.parts[index % len(self.parts)].problem(split, index // len(self.parts)), index=index)

    def step_errors(self, problem: Problem, solution: str) -> list[str | None]:
        """What is wrong with each step: as the problem's task names it, else the task's name; None where nothing is."""
        part = self.part(problem)
        if hasattr(part, "step_errors"):
            return part.step_errors(problem, solution)
        return [None if label else part.name for label in part.step_labels(problem, solution)]
