"""
Recipes: one system of the field per module, in a folder per family. A recipe is a module with

    ROLES      role -> RoleSpec
    draws      (args) -> what it samples in a step, at most: name -> Draw
    play       (t) -> one step of the algorithm, a generator of Updates
    evaluate   (t) -> held-out scores by name

and where it needs them: add_args(group) for flags of its own, check(args, task) to refuse settings, updates(args) ->
updates of each role in a whole run, eval_step(t) -> the number that --eval-every divides, SHOWN: metrics of the line
per step, TABLE: scores of the final table, which are shares, with their words. A recipe of the repository has a STATUS,
what is shown of it, for --list-recipes.

A recipe's docstring says where it departs from its paper. All depart in this: models are tiny, AdamW has a constant
--lr (or --lr-schedule), and sampling has temperature 1 (or --temperature).
"""
import argparse
import functools
import importlib
import pkgutil
import re
from types import ModuleType

from nanochat.cli import flags_in, hints_of
from nanochat.common import BadInput, takes
from nanochat.own_code import is_file, load_file, short
from nanochat.rl.learn.roles import RoleSpec, short_name, trained_roles
from nanochat.rl.run.flags import add_role_args, ask

NEEDED = ("ROLES", "draws", "play", "evaluate")
FUNCTIONS = {"add_args": "group", "check": "args, task", "draws": "args", "updates": "args", "play": "t",
             "evaluate": "t", "eval_step": "t"}  # what each is given


@functools.cache
def modules() -> dict[str, str]:
    """The recipes of the repository: name -> module. What a family's recipes share is in modules that begin with _."""
    found = [module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.") if not module.ispkg]
    return {name.rpartition(".")[2]: name for name in sorted(found) if "._" not in name}


def names() -> list[str]:
    """The names of the recipes of the repository."""
    return sorted(modules())


def load(name: str) -> ModuleType:
    """The recipe of this name, or in this file. Raises BadInput for one that is unknown or lacks a part."""
    if is_file(name):
        module = load_file("--recipe", name)
    elif name in modules():
        module = importlib.import_module(modules()[name])
    else:
        raise BadInput(f"--recipe {name}: there are {', '.join(names())}, and files (a path that ends in .py)")
    missing = [part for part in NEEDED if not hasattr(module, part)]
    if missing:
        raise BadInput(f"--recipe {name}: has no {', '.join(missing)}")
    check_roles(name, module.ROLES)
    for part, given in FUNCTIONS.items():
        if hasattr(module, part) and not takes(getattr(module, part), len(given.split(", "))):
            raise BadInput(f"--recipe {name}: {part} must be a function of ({given})")
    shown, table = getattr(module, "SHOWN", {}), getattr(module, "TABLE", {})
    are_texts = lambda values: all(isinstance(value, str) for value in values)
    if not (isinstance(shown, dict) and all(isinstance(keys, list) and are_texts(keys) for keys in shown.values())):
        raise BadInput(f"--recipe {name}: SHOWN must be a dict of lists of metrics' names")
    if not (isinstance(table, dict) and are_texts(table.values())):
        raise BadInput(f"--recipe {name}: TABLE must be a dict of texts")
    return module


def check_roles(name: str, roles: dict[str, RoleSpec]) -> None:
    """Raises BadInput for roles that cannot be."""
    if not isinstance(roles, dict) or not all(isinstance(spec, RoleSpec) for spec in roles.values()):
        raise BadInput(f"--recipe {name}: ROLES must be a dict of names and RoleSpecs")
    for role, spec in roles.items():
        if not re.fullmatch("[a-z][a-z0-9_]*", str(role)):
            raise BadInput(f"--recipe {name}: the role {role!r} needs a name of lower-case letters, digits and _")
        if not all(re.fullmatch("--[a-z][a-z0-9-]*", str(flag)) for flag in (spec.tag, spec.lr)):
            raise BadInput(f"--recipe {name}: the flags {spec.tag} and {spec.lr} of {role} must be like --model-tag")
    if len({short_name(role) for role in roles}) < len(roles):
        raise BadInput(f"--recipe {name}: of its roles {', '.join(roles)} two have the same first three letters, "
                       f"under which checkpoints and metrics stand")
    if not trained_roles(roles):
        raise BadInput(f"--recipe {name}: none of its roles is trained")
    endings = {"--model-tag": ""}
    for i, (role, spec) in enumerate(roles.items()):
        if spec.shares is not None and spec.shares not in list(roles)[:i]:
            raise BadInput(f"--recipe {name}: {role} shares layers with {spec.shares}, which is no role before it")
        if endings.setdefault(spec.tag, spec.ending) != spec.ending:
            raise BadInput(f"--recipe {name}: the ending {spec.ending!r} of {role} needs a tag flag of its own, "
                           f"not {spec.tag}")


# Flags

def recipe_of(argv: list[str] | tuple, default: str) -> str:
    """The recipe that the arguments name; what else is wrong with them is said later."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", nargs="?", default=default)
    return parser.parse_known_args(list(argv))[0].recipe or default


def add_recipe_args(parser, recipe, name: str) -> None:
    """The flags of a recipe's roles, and its own."""
    group = parser.add_argument_group(f"recipe {short(name)}")
    add_role_args(group, recipe.ROLES)
    ask(name, recipe, "add_args", group)


def explain_unknown_flag(message: str, name: str, known: list[str]) -> str:
    """argparse's complaint, with the recipes that a flag belongs to and the known flags that are like it."""
    flags = flags_in(message)
    if not message.startswith("unrecognized"):
        return message
    owners = {}
    for other in names():
        parser = argparse.ArgumentParser(add_help=False)
        add_recipe_args(parser, load(other), other)
        for flag in parser._option_string_actions.keys() & flags:
            owners.setdefault(flag, []).append(other)
    owned = [f"{flag}: a flag of recipe {', '.join(owners[flag])}, not of {name}" for flag in flags if flag in owners]
    unknown = [f"{flag}: unknown" for flag in flags if flag not in owners]
    hints = hints_of(flags, known)
    return "; ".join([*owned, *unknown, *hints] if owned else [message, *hints])


INTRODUCTION = """
`python -m scripts.tango_rl --recipe NAME` runs one; `--help` with it shows its flags. Written by `--list-recipes`.

- *works*: the main claim of its paper, or what a control is for, was shown here: an interval without zero, three seeds
  or more. *runs*: its formulas are tested, and that was not shown. Evidence: [results.md](results.md).
- Figures are percentage points unless they have a name; ± is half of a 95% interval.
- Systems without a recipe: [field.md](field.md).
"""


def cited(recipe: ModuleType) -> str:
    """A recipe's system and its paper, as its docstring begins, in Markdown."""
    first_line = recipe.__doc__.splitlines()[0]
    system, paper = first_line.partition(":")[0], re.search(r"arXiv (\d{4}\.\d{5})", first_line)[1]
    return f"{system}, [{paper}](https://arxiv.org/abs/{paper})"


def describe() -> list[str]:
    """All recipes as markdown, a table per family and a line per recipe: dev/recipes.md."""
    families: dict[str, list[str]] = {}
    for name, module in modules().items():
        recipe = load(name)
        status, _, result = recipe.STATUS.partition(": ")
        file, trained = f"../{module.replace('.', '/')}.py", ", ".join(trained_roles(recipe.ROLES))
        families.setdefault(module.rpartition(".")[0], []).append(
            f"| [{name}]({file}) | {cited(recipe)} | {trained} | {status} | {result} |")
    lines = ["# Recipes", "", *INTRODUCTION.strip().splitlines()]
    for family, rows in families.items():
        lines += ["", f"**{family.rpartition('.')[2]}**: {importlib.import_module(family).__doc__}", "",
                  "| recipe | system | trained | status | result |", "| --- | --- | --- | --- | --- |", *rows]
    return lines
