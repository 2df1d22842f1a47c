"""
Few labels: a task of which only the first problems have a gold answer.
"""
import math

from nanochat.common import BadInput


class FewLabels:
    """Another task, whose outcome is None for all problems of RL but the first `num`. These come again and again: they
    are a share of what is drawn, the rest are the others, in turn. In all else it is that task.

    hidden(problem, text): the outcome that is not told, for the log. Raises BadInput where there are not `least`
    problems of either kind.
    """

    def __init__(self, task, num: int, share: float, least: int):
        num_others = task.num_problems("rl") - num if hasattr(task, "num_problems") else math.inf
        if min(num, num_others) < least:
            raise BadInput(f"--num-labelled {num}: with and without a gold answer there must be at least "
                           f"--examples-per-step {least} problems each")
        self.task, self.num, self.num_others, self.share = task, num, num_others, share

    def __getattr__(self, name: str):
        return getattr(self.task, name)

    def index_of(self, place: int, labelled: bool = False) -> int:
        """Which problem of RL is drawn in this place, from 0; labelled: of those alone that have a gold answer."""
        before, after = (math.ceil((place + k) * self.share) for k in (0, 1))  # labelled ones up to here, and with it
        if labelled or after > before:
            return (place if labelled else before) % self.num
        return self.num + int((place - before) % self.num_others)

    def has_label(self, problem) -> bool:
        return problem.split != "rl" or problem.index < self.num

    def check(self, problem, text: str) -> bool | None:
        return self.task.check(problem, text) if self.has_label(problem) else None

    def hidden(self, problem, text: str) -> bool | None:
        return None if self.has_label(problem) else self.task.check(problem, text)
