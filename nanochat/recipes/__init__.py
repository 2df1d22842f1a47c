"""
Recipes: one system of the field per module. A recipe is a module with

    TAGS       what kind of system it is, for --list-recipes
    ROLES      role -> RoleSpec
    calls      (args) -> what it samples in a step, at most: a list of Call
    play       (t) -> one step of the algorithm, a generator of Updates
    evaluate   (t) -> held-out scores by name

and where it needs them: add_args(group) for flags of its own, check(args, task) to refuse settings, updates(args) ->
updates of each role in a whole run, eval_step(t) -> the number that --eval-every divides, SHOWN: metrics of the line
per step, TABLE: scores of the final table with their words.
"""
import functools
import importlib
import os
import pkgutil
import re
import sys
from types import ModuleType

from nanochat.common import BadInput
from nanochat.rl.roles import short_name, trained_roles

NEEDED = ("TAGS", "ROLES", "calls", "play", "evaluate")


def names() -> list[str]:
    """The recipes of the repository."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def is_file(name: str) -> bool:
    """Whether --recipe names a file, not a recipe of the repository."""
    return name.endswith(".py") or os.sep in name


def load(name: str) -> ModuleType:
    """The recipe of this name, or in this file. Raises BadInput for one that is unknown or lacks a part."""
    if is_file(name):
        module = run_file(name, read_text(name))
    elif name in names():
        module = importlib.import_module(f"{__name__}.{name}")
    else:
        raise BadInput(f"--recipe {name}: there are {', '.join(names())}, and files (a path that ends in .py)")
    missing = [part for part in NEEDED if not hasattr(module, part)]
    if missing:
        raise BadInput(f"--recipe {name}: has no {', '.join(missing)}")
    roles = list(module.ROLES)
    if len({short_name(role) for role in roles}) < len(roles):
        raise BadInput(f"--recipe {name}: of its roles {', '.join(roles)} two have the same first three letters, "
                       f"under which "
                       f"checkpoints and metrics stand")
    if not trained_roles(module.ROLES):
        raise BadInput(f"--recipe {name}: none of its roles is trained")
    return module


@functools.cache
def run_file(name: str, text: str) -> ModuleType:
    """A module of this text, which it keeps as `text`. Raises BadInput for whatever the text does wrong."""
    module = ModuleType(f"recipe_{re.sub(r'[^0-9A-Za-z]', '_', short(name))}")
    module.__file__, module.text = name, text
    sys.modules[module.__name__] = module  # where dataclasses look for it
    try:
        exec(compile(text, name, "exec"), module.__dict__)
    except Exception as error:
        raise BadInput(f"--recipe {name}: {type(error).__name__}: {error}") from None
    return module


def read_text(name: str) -> str:
    """The text of a file. Raises BadInput."""
    try:
        with open(name, encoding="utf-8") as f:
            return f.read()
    except FileNotFoundError:
        raise BadInput(f"--recipe {name}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--recipe {name}: cannot be read: {error}") from None


def short(name: str) -> str:
    """A recipe's name without its folder and ending."""
    return os.path.splitext(os.path.basename(name))[0] if is_file(name) else name


def describe() -> list[str]:
    """A line per recipe of the repository: its name, the first line of its docstring (with the paper), its tags."""
    lines = []
    for name in names():
        recipe = load(name)
        lines.append(f"{name:18s} {recipe.__doc__.strip().splitlines()[0]}")
        lines.append(f"{'':18s} {', '.join(f'{key}: {value}' for key, value in recipe.TAGS.items())}")
    return lines
