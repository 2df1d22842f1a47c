"""
What is read from a run's files. Where that fails, one line names the file and the field.
"""
import math
from contextlib import contextmanager

from nanochat.cli import MOST
from nanochat.common import BadInput


@contextmanager
def as_written(path: str):
    """Makes one line, which names the file, of what fails because it lacks something or has it of another kind."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except KeyError as error:
        raise BadInput(f"{path}: has no {error.args[0]}; was it made by another version?") from None
    except (AttributeError, IndexError, TypeError, ValueError):
        raise BadInput(f"{path}: is damaged, or was made by another version") from None


def number(record: dict, name: str) -> float:
    """A number of a file. Raises BadInput."""
    if not is_number(record[name]):
        raise BadInput(f"{name} is {record[name]!r:.80}, not a number")
    return record[name]


def is_number(value) -> bool:
    return isinstance(value, int) and abs(value) <= MOST or isinstance(value, float) and math.isfinite(value)
