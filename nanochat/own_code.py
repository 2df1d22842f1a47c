"""
Code of the user's own: a file from outside of the repository that is a recipe or a task, and whose text is kept with
what is made with it.
"""
import contextlib
import functools
import os
import re
import sys
import traceback
from types import ModuleType

from nanochat.common import BadInput, check_defaults
from nanochat.storage.files import whole_file

FLAGS = ("recipe", "task")  # that may name a file


def is_file(name: str) -> bool:
    """Whether a flag names a file, not something of the repository."""
    return name.endswith(".py") or os.sep in name


def short(name: str) -> str:
    """A file's name without its folder and ending; any other name as it is."""
    return os.path.splitext(os.path.basename(name))[0] if is_file(name) else name


def load_file(flag: str, name: str) -> ModuleType:
    """The module in a file, which has its text as `text`. Raises BadInput, which begins with flag and name, for
    whatever the file does wrong."""
    return run_file(flag, name, read_text(flag, name))


@functools.cache
def run_file(flag: str, name: str, text: str) -> ModuleType:
    module = ModuleType(f"{flag.strip('-')}_{re.sub(r'[^0-9A-Za-z]', '_', short(name))}")
    module.__file__, module.text = name, text
    sys.modules[module.__name__] = module  # where dataclasses look for it
    with blaming(f"{flag} {name}", name):
        exec(compile(text, name, "exec"), module.__dict__)
    check_defaults()
    return module


def read_text(flag: str, name: str) -> str:
    """The text of a file. Raises BadInput."""
    try:
        with open(os.path.expanduser(name), encoding="utf-8-sig") as f:
            return f.read()
    except FileNotFoundError:
        raise BadInput(f"{flag} {name}: no such file") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{flag} {name}: cannot be read: {error}") from None


@contextlib.contextmanager
def blaming(where: str, file: str):
    """Around a call of a file's code. Raises BadInput, which begins with `where`, for any error, with its line."""
    try:
        yield
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        at = f" (line {lines[-1]})" if lines else ""
        raise BadInput(f"{where}: {type(error).__name__}: {error}{at}") from None


# The text that is kept

def both_files(before: dict, args) -> set[str]:
    """The flags that named a file and name one now. Its path may be another: texts are compared."""
    return {name for name in FLAGS if is_file(str(before.get(name))) and is_file(str(getattr(args, name, "")))}


def keep_texts(folder: str, texts: dict[str, str | None]) -> None:
    """Writes recipe.py and task.py into a folder, and removes older ones. texts: None of what is no file. Raises
    CannotWrite."""
    for kind, text in texts.items():
        path = os.path.join(folder, f"{kind}.py")
        if text is not None:
            with whole_file(path) as f:
                f.write(text)
        elif os.path.exists(path):
            os.remove(path)


def check_texts(what: str, folder: str, texts: dict[str, str | None]) -> None:
    """Raises BadInput unless files are, word for word, as keep_texts has kept them in the folder of a run or
    checkpoint, which `what` names."""
    for kind, text in texts.items():
        path = os.path.join(folder, f"{kind}.py")
        if not os.path.exists(path):
            if text is not None:
                raise BadInput(f"{path} is missing: nothing tells which text of the {kind} {what} was started with")
            continue
        try:
            with open(path, encoding="utf-8") as f:
                kept = f.read()
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} cannot be read: {error}") from None
        if kept != text:
            raise BadInput(f"{what} was started with another text of this {kind} ({path}); a continued run cannot "
                           f"change it: start a new run, or put the old text back")
