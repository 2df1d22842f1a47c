"""
Recipes: one system of the field per module. A recipe is a module with

    TAGS       what kind of system it is, for --list-recipes
    ROLES      role -> RoleSpec
    calls      (args) -> what it samples in a step, at most: a list of Call
    play       (t) -> one step of the algorithm, a generator of Updates
    evaluate   (t) -> held-out scores by name

and where it needs them: add_args(group) for flags of its own, check(args, task) to refuse settings, updates(args) -> updates
of each role in a whole run, eval_step(t) -> the number that --eval-every divides, SHOWN: metrics of the line per step, TABLE:
scores of the final table with their words.
"""
import importlib.util
import os
import pkgutil
import re
from types import ModuleType

from nanochat.common import BadInput

NEEDED = ("TAGS", "ROLES", "calls", "play", "evaluate")


def names() -> list[str]:
    """The recipes of the repository."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def is_file(name: str) -> bool:
    """Whether --recipe names a file, not a recipe of the repository."""
    return name.endswith(".py") or os.sep in name


def load(name: str) -> ModuleType:
    """The recipe of this name, or in this file. Raises BadInput for one that is unknown or lacks a part."""
    if not is_file(name):
        if name not in names():
            raise BadInput(f"--recipe {name}: there are {', '.join(names())}, and files (a path that ends in .py)")
        return importlib.import_module(f"{__name__}.{name}")
    if not os.path.isfile(name):
        raise BadInput(f"--recipe {name}: no such file")
    spec = importlib.util.spec_from_file_location(f"recipe_{re.sub(r'[^0-9A-Za-z]', '_', short(name))}", name)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file does wrong
        raise BadInput(f"--recipe {name}: {type(error).__name__}: {error}") from None
    missing = [part for part in NEEDED if not hasattr(module, part)]
    if missing:
        raise BadInput(f"--recipe {name}: has no {', '.join(missing)}")
    return module


def text_of(name: str) -> str | None:
    """The text of a recipe outside of the repository, None for one of it."""
    if not is_file(name):
        return None
    with open(name, encoding="utf-8") as f:
        return f.read()


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
