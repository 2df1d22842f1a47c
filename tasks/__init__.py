"""Tasks by name. Each module has add_args(parser) for its flags and a class that takes (args, seed)."""
import argparse
import random
from functools import partial

from nanochat.common import BadInput
from tasks import brittle, chain, competition, gsm8k, halves, last_letter, lookup, mixture, reasoning_gym, rewrite
from tasks.common import SPLIT_BUCKETS, check_problem, demo_of
from tasks.formats import Format

TASKS = {"chain": chain.Chain, "brittle": brittle.Brittle, "halves": halves.Halves, "lookup": lookup.Lookup,
         "last_letter": last_letter.LastLetter, "mixture": mixture.Mixture, "rewrite": rewrite.Rewrite,
         "gsm8k": gsm8k.GSM8K, "reasoning_gym": reasoning_gym.ReasoningGym,
         **{name: partial(competition.Competition, name) for name in competition.SETS}}
MODULES = (chain, brittle, halves, lookup, last_letter, mixture, rewrite, gsm8k, reasoning_gym, competition)
# tasks whose flags a task has beside its own; mixture may have those of all
RESTS_ON = {"brittle": ("chain",), "halves": ("chain",), "lookup": ("chain",)}
# of a recorded flag, by its default
EXPECTED = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list of texts"}
METHODS = ("problem", "check", "step_labels", "solution_demo", "corrupted_solution", "verification_demo")  # of a task


class ChooseTask(argparse.Action):
    """Takes a task's name; what --help shows after it are the flags of this task alone."""
    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, values)
        others = flags_of_others(values)
        for action, text in self.helps.items():
            action.help = argparse.SUPPRESS if action.dest.startswith(others) else text


def add_task_args(parser) -> None:
    """--task and the flags of every task, of which --help shows those of the chosen one."""
    choose = parser.add_argument("--task", default="chain", choices=list(TASKS), action=ChooseTask,
                                 help="--task NAME --help shows its flags")
    num_before = len(parser._actions)
    for module in MODULES:
        module.add_args(parser)
    choose.helps = {action: action.help for action in parser._actions[num_before:]}
    choose(parser, argparse.Namespace(), choose.default)


def task_actions() -> list[argparse.Action]:
    """What add_task_args adds to a parser."""
    parser = argparse.ArgumentParser(add_help=False)
    add_task_args(parser)
    return parser._actions


def task_flags() -> dict:
    """The flags of add_task_args and their defaults."""
    return {action.dest: action.default for action in task_actions()}


def flags_of_others(task: str) -> tuple[str, ...]:
    """What the names of the flags begin with that belong to other tasks than this one."""
    own = (task, *RESTS_ON.get(task, ()))
    return () if task == "mixture" else tuple(f"{name}_" for name in TASKS
                                              if not any(f"{mine}_".startswith(f"{name}_") for mine in own))


def recorded_value(recorded: dict, name: str, default, where: str):
    """What a checkpoint or run was made with under a flag's name; the default where it does not know the flag. Raises
    BadInput, which begins with `where`, unless it is of the default's type (an int may stand for a float) and one of
    the flag's choices."""
    value, kind = recorded.get(name, default), type(default)
    if type(value) is not kind and (kind, type(value)) != (float, int):
        raise BadInput(f"{where}: {name} is {value!r:.80}, expected {EXPECTED[kind]}")
    action = None if value == default else {action.dest: action for action in task_actions()}.get(name)
    if action and action.choices and value not in action.choices:
        raise BadInput(f"{where}: {name} is {value!r:.80}, and there are {', '.join(action.choices)}")
    return value


def complete_task_args(args, recorded: dict, where: str = "the checkpoint") -> None:
    """Gives the task flags (and the seed) that are None in args the values recorded with a checkpoint or run, or their
    defaults. Raises BadInput, which begins with `where`, for a recorded value that the flag cannot have."""
    args.task = recorded_value(recorded, "task", "", where) or "chain" if args.task is None else args.task
    for name, default in (task_flags() | {"seed": 0}).items():
        if getattr(args, name) is None:
            setattr(args, name, recorded_value(recorded, name, default, where))


def make_task(args):
    """The task that --task names. Raises BadInput for flags that do not fit."""
    task = TASKS[args.task](args, args.seed)
    check_parts(args.task, task)
    return task


def check_parts(name: str, task) -> None:
    """Raises BadInput for the first part that a task lacks, and where what it gives as a problem is none."""
    if not isinstance(getattr(task, "name", None), str) or not isinstance(getattr(task, "fmt", None), Format):
        raise BadInput(f"--task {name}: its class needs a name (text) and a fmt (a Format of tasks.formats)")
    if missing := [part for part in METHODS if not callable(getattr(task, part, None))]:
        raise BadInput(f"--task {name}: its class has no method {missing[0]}")
    for split in SPLIT_BUCKETS:
        try:
            problem = task.problem(split, 0)
        except BadInput:  # nothing of this split among what was given: who draws from it is told
            continue
        check_problem(f"--task {name}", problem, split, 0)


def task_texts(task, num_problems: int, seed: int):
    """Three texts per problem: what the verifier reads (problem and solution), the solution, a verification."""
    for index in range(num_problems):
        rng = random.Random(f"tok-{seed}-{index}")
        problem = task.problem("sft", index)
        solution = demo_of(task, "solution_demo", problem, rng)
        read = task.fmt.verifier_prompt.format(problem=problem.prompt, solution=solution,
                                               num_steps=len(task.fmt.step_spans(solution)))
        yield read, solution, demo_of(task, "verification_demo", problem, solution, rng)
