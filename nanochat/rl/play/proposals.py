"""
Problems that a model proposes: how they are asked for and read, what a proposer earns for them, and a pool of them.

The task says what a proposer is shown of a reference problem, hint_of(problem), and reads what it writes:
read_problem(text, index) gives a Problem of split "proposed" and "", or None and one of the task's `refusals`. A
proposed problem is the same on any number of ranks: its index comes from the reference.
"""
import random
from collections.abc import Callable
from typing import NamedTuple

from nanochat.engine import Tool
from nanochat.rl.play.play import Play
from nanochat.rl.records.outcomes import check_task
from nanochat.rl.records.prompts import quoting_prompt
from nanochat.rl.records.rollouts import Rollouts
from tasks.common import Problem

CUT = "cut"            # refused: the completion did not end
HELD_OUT = "held_out"  # refused: a text of a test split, which nobody could know


# What a proposer earns for a problem of whose solutions a share p is right

def one_minus(p: float) -> float:
    """SSP: the harder the better, also where nobody can solve it."""
    return 1 - p


def azr(p: float) -> float:
    """Absolute Zero: the same, but nothing for what is never solved."""
    return 1 - p if p > 0 else 0.0


def parabola(p: float) -> float:
    """4p(1 - p): 1 where half of the solutions are right, nothing where all or none are."""
    return 4 * p * (1 - p)


BY_ACCURACY = {"one_minus": one_minus, "azr": azr, "parabola": parabola}


def earns(refusal: str, p: float | None, reward: Callable[[float], float]) -> float | None:
    """reward(p), 0 for what is refused; None for a text of a test split and where no outcome is known."""
    if refusal:
        return None if refusal == HELD_OUT else 0.0
    return None if p is None else reward(p)


class Proposals(NamedTuple):
    """N proposals. problems: None where one is refused; refusals: why, "" where it is not."""
    rollouts: Rollouts
    problems: list[Problem | None]
    refusals: list[str]

    @property
    def valid(self) -> list[int]:
        """The places of those that are problems."""
        return [n for n, problem in enumerate(self.problems) if problem is not None]


def spread(values: list, places: list) -> list:
    """The values in order in those places that hold something, None in the others."""
    rest = iter(values)
    return [None if place is None else next(rest) for place in places]


def check(args, task) -> None:
    """A recipe's `check`: raises BadInput for a task that cannot read proposed problems."""
    check_task(task, "read_problem", "hint_of", "refusals")


def propose_prompt(tokenizer, fmt, problem: str) -> list[int]:
    """A proposer's prompt after a problem as long as this one."""
    return quoting_prompt(tokenizer, fmt, problem, "propose_prompt", hint=problem)


def propose(t: Play, role: str, references: list[Problem], num: int, label: str, tool: Tool | None = None) -> Proposals:
    """`num` proposals after each reference problem's hint; their index is its index times `num`, plus 0, 1, ..."""
    prompts = t.prompts("propose_prompt", references, hint=[t.task.hint_of(problem) for problem in references])
    rollouts = t.sample(label, prompts, num, role=role, tool=tool)
    rows = zip(rollouts.problems(), rollouts.texts, rollouts.stopped.tolist(), strict=True)
    found = [t.task.read_problem(text, reference.index * num + n % num) if stopped else (None, CUT)
             for n, (reference, text, stopped) in enumerate(rows)]
    problems, refusals = [problem for problem, _ in found], [why for _, why in found]
    rollouts.columns = {"proposed": [problem and problem.prompt for problem in problems], "refused": refusals}
    return Proposals(rollouts, problems, refusals)


def accuracies(outcomes: list[bool | None], num: int) -> list[float | None]:
    """The share of right solutions of each problem, which has `num` of them; None where no outcome is known."""
    groups = [[o for o in outcomes[i: i + num] if o is not None] for i in range(0, len(outcomes), num)]
    return [sum(group) / len(group) if group else None for group in groups]


def log_proposals(t: Play, role: str, found: Proposals, **values: list) -> None:
    """Logs how many proposals are problems and why others are not, how they look, and the means of further values."""
    t.log(role, {f"proposals/{name}": mean for name, mean in t.mean({
        "valid": [not why for why in found.refusals],
        **{f"refused/{reason}": [why == reason for why in found.refusals] for reason in (CUT, *t.task.refusals)},
        "length": [len(problem.prompt) for problem in found.problems if problem],
        "copied": [problem.prompt == reference.prompt
                   for problem, reference in zip(found.problems, found.rollouts.problems(), strict=True) if problem],
        **values}).items()})
    texts = t.gather([problem and problem.prompt for problem in found.problems])
    texts = [text for text in texts if text is not None]
    t.log(role, {"proposals/distinct": len(set(texts)) / len(texts) if texts else None})


# The pool: [index, text] of what was proposed, in the order in which it came

def gathered(t: Play, found: Proposals, places: list[int], num: int) -> list[list]:
    """The valid proposals in these places, as a pool keeps them, of all ranks in the order of their references."""
    rows = [[[found.problems[n].index, found.rollouts.texts[n]] for n in range(i, i + num) if n in places]
            for i in range(0, len(found.problems), num)]
    return [row for of_reference in t.gather(rows) for row in of_reference]


def drawn(t: Play, pool: list[list]) -> list[Problem | None]:
    """This rank's share of --examples-per-step different texts of a pool, None for each that it has not got."""
    P, rank, world = t.args.examples_per_step, t.run.rank, t.run.world
    different = list({text: [index, text] for index, text in pool}.values())
    rows = random.Random(f"{t.args.seed}-{t.step}").sample(different, min(P, len(different)))
    problems = [t.task.read_problem(text, index)[0] for index, text in rows]
    return (problems + [None] * (P - len(rows)))[rank::world]
