"""Tasks by name, or by the file of one's own that has one. Each module has add_args(parser) for its flags and a class
that takes (args, seed)."""
import argparse
import contextlib
import random
from functools import partial

from nanochat.common import BadInput, print0
from nanochat.own_code import blaming, is_file, load_file, read_text, short
from tasks import brittle, chain, competition, gsm8k, halves, last_letter, lookup, mixture, reasoning_gym, rewrite
from tasks.common import SPLIT_BUCKETS, check_problem, demo_of
from tasks.formats import FORMATS, PROMPTS, Format, with_prompts

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


def is_task(name: str) -> bool:
    """Whether this is the name of a task, or of a file, which may be one."""
    return name in TASKS or is_file(name)


class Names(tuple):
    """The names of tasks, to be listed; in it are those of all files too."""
    def __contains__(self, name) -> bool:
        return is_task(name)


def class_of(name: str):
    """What makes the task of this name, or the one in this file, from (args, seed). Raises BadInput."""
    if not is_task(name):
        raise BadInput(f"--task {name}: there are {', '.join(TASKS)}, and files (a path that ends in .py)")
    if name in TASKS:
        return TASKS[name]
    module = load_file("--task", name)
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__
             and hasattr(kind, "problem")]
    if len(found) != 1:
        raise BadInput(f"--task {name}: needs one class with a method problem, and has {len(found)}")
    return found[0]


def text_of(name: str) -> str | None:
    """The text of a task's file, None of a task of the repository. Raises BadInput."""
    return load_file("--task", name).text if is_file(name) else None


def own_flags(names: str) -> dict:
    """The flags, and their defaults, of those of the tasks, separated by |, that are files. Raises BadInput."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in filter(is_file, names.split("|")):
        add_own_args(parser, name)
    return {action.dest: action.default for action in parser._actions}


def add_own_args(parser, name: str) -> None:
    """The flags of a task's file. Raises BadInput."""
    module = load_file("--task", name)
    if hasattr(module, "add_args"):
        with blaming(f"--task {name}: add_args()", name):
            module.add_args(parser.add_argument_group(f"task {short(name)}"))
            parser.format_help()


class ChooseTask(argparse.Action):
    """Takes a task's name; what --help shows after it are the flags of this task alone."""
    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, values)
        others = flags_of_others(values)
        for action, text in self.helps.items():
            action.help = argparse.SUPPRESS if action.dest.startswith(others) else text


def add_task_args(parser) -> None:
    """--task and the flags of every task, of which --help shows those of the chosen one."""
    choose = parser.add_argument("--task", default="chain", choices=Names([*TASKS, "FILE.py"]), action=ChooseTask,
                                 help="or a file (a path that ends in .py); --task NAME --help shows its flags")
    group = parser.add_argument_group("prompts")
    group.add_argument("--system-prompt", default="", help="a system message before every prompt of every role")
    for role in ("generator", "verifier"):
        fields = "}, {".join(PROMPTS[f"{role}_prompt"])
        group.add_argument(f"--{role}-prompt", type=prompt_file, default="", metavar="FILE",
                           help=f"a template with {{{fields}}}, in place of the format's; its last line's end is left "
                                f"out (python -m scripts.task_text shows prompts)")
    num_before = len(parser._actions)
    for module in MODULES:
        module.add_args(parser)
    choose.helps = {action: action.help for action in parser._actions[num_before:]}
    choose(parser, argparse.Namespace(), choose.default)
    added = set()

    def add_more(argv: list[str]) -> None:
        names = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        names.add_argument("--task", nargs="?")
        name = names.parse_known_args(argv)[0].task or ""
        if is_file(name) and name not in added:
            added.add(name)
            add_own_args(parser, name)
            if parser.get_default("task") is None:  # a checkpoint has them
                parser.set_defaults(**dict.fromkeys(own_flags(name)))
    parser.add_more = add_more


def prompt_file(path: str) -> str:
    """A type for argparse: the text of a file, "" of none."""
    try:
        text = read_text("file", path).removesuffix("\n") if path else ""
    except BadInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if path and not text.strip():
        raise argparse.ArgumentTypeError(f"file {path}: is empty")
    return text


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
    if default is not None and type(value) is not kind and (kind, type(value)) != (float, int):
        raise BadInput(f"{where}: {name} is {value!r:.80}, expected {EXPECTED[kind]}")
    action = None if value == default else {action.dest: action for action in task_actions()}.get(name)
    if action and action.choices and value not in action.choices:
        raise BadInput(f"{where}: {name} is {value!r:.80}, and there are {', '.join(action.choices)}")
    return value


def complete_task_args(args, recorded: dict, where: str = "the checkpoint") -> None:
    """Gives the task flags (and the seed) that are None in args the values recorded with a checkpoint or run, or their
    defaults. Raises BadInput, which begins with `where`, for a recorded value that the flag cannot have, and for a
    file as its task: whose checkpoint is opened does not choose what code is run."""
    if args.task is None:
        args.task = recorded_value(recorded, "task", "", where) or "chain"
        check_no_file(args.task, where, f"--task {args.task}")
    for name, default in (task_flags() | own_flags(args.task) | {"seed": 0}).items():
        if getattr(args, name, None) is None:
            setattr(args, name, recorded_value(recorded, name, default, where))


def check_no_file(task: str, where: str, remedy: str) -> None:
    """Raises BadInput for a task of a file, which nobody has named."""
    if is_file(task):
        raise BadInput(f"{where}: its task is of a file, {task!r:.200}, whose code is run where you name it: {remedy}")


def format_of(recorded: dict, where: str) -> Format | None:
    """The format of the task that a checkpoint was trained on, None where there was none. recorded: the flags that it
    was trained with. Raises BadInput, which begins with `where`."""
    if recorded.get("conversations") and recorded.get("conversations_share") == 1:
        return None  # it has never seen the task
    task = recorded_value(recorded, "task", "", where)
    if task == "mixture":
        task = recorded_value(recorded, "mixture_tasks", task_flags()["mixture_tasks"], where).split(",")[0]
    if not task:
        return None
    check_no_file(task, where, "--format says how problems are put")
    prompts = {name: recorded_value(recorded, name, "", where) for name in PROMPTS}
    if f"{task}_format" in task_flags():
        return with_prompts(FORMATS[recorded_value(recorded, f"{task}_format", "paper", where)], prompts)
    kind = class_of(task)
    return with_prompts(getattr(kind, "func", kind).fmt, prompts)  # a set of problems has its class under func


def warn_of_prompts(tag: str, recorded: dict, args, role: str) -> None:
    """Says so where a checkpoint was trained on a task, and with another of PROMPTS, or another format of the same
    task, than it is asked with here."""
    defaults, of_task = task_flags(), f"{args.task}_format" if recorded.get("task") == args.task else ""
    for name in ("system_prompt", f"{role}_prompt", of_task):
        if recorded.get("task") and name in defaults and (before := recorded.get(name, defaults[name])) != (
                now := getattr(args, name)):
            print0(f"WARNING: {tag} was trained with another --{name.replace('_', '-')}: {before!a:.60}, and here it "
                   f"is {now!a:.60}")


def make_task(args):
    """The task that --task names. Raises BadInput for flags that do not fit, and for any error of a file."""
    if args.task != "rows" and (lost := [name for name in getattr(args, "explicit", ()) if name.startswith("rows_")]):
        raise BadInput(f"--{min(lost).replace('_', '-')}: is of --task rows, and the task is {args.task}")
    args = argparse.Namespace(**own_flags(args.task) | vars(args))
    with blaming(f"--task {args.task}", args.task) if is_file(args.task) else contextlib.nullcontext():
        task = class_of(args.task)(args, args.seed)
        check_parts(args.task, task)
        if any(getattr(args, name, "") for name in PROMPTS):
            task.fmt = with_prompts(task.fmt, vars(args))
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
