"""
What a run's files must hold for a report. Where they do not, one line names the file and the field.
"""
import math
import re

from nanochat.cli import MOST
from nanochat.common import BadInput
from nanochat.rl.report.cards import SHOWN

# Kinds of values, as they are told; after every one may stand " or null".
KINDS = {
    "a text": lambda value: isinstance(value, str),
    "a word": lambda value: isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) is not None,  # names files
    "a whole number": lambda value: type(value) is int and abs(value) <= MOST,
    "a number": lambda value: is_number(value),
    "a number or a text": lambda value: is_number(value) or isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "an object": lambda value: isinstance(value, dict),
    "a list of texts": lambda value: is_list(value, "a text"),
    "a list of whole numbers": lambda value: is_list(value, "a whole number"),
    "a list of numbers and nulls": lambda value: is_list(value, "a number or null"),
    "a list of true, false and null": lambda value: is_list(value, "true or false or null"),
    "a list of pairs of whole numbers": lambda value: is_list(value, "a list of whole numbers") and are_pairs(value),
    "a list of pairs of texts": lambda value: is_list(value, "a list of texts") and are_pairs(value),
}
CONFIG = {"args": "an object", "starts": "an object or null", "shown": "a list of texts or null",
          "about": "a text or null"}
ARGS = {"task": "a word", "seed": "a whole number", "recipe": "a text or null", "run": "a text or null"}
START = {"tag": "a word", "step": "a whole number", "fingerprint": "a whole number"}
RECORD = {"role": "a text", "without_update": "a number or null"}


def is_number(value) -> bool:
    return isinstance(value, int) and abs(value) <= MOST or isinstance(value, float) and math.isfinite(value)


def fits(value, kind: str) -> bool:
    """Whether a value is of one of KINDS."""
    plain = kind.removesuffix(" or null")
    return value is None and plain != kind or KINDS[plain](value)


def is_list(value, kind: str) -> bool:
    """Whether a value is a list of one of KINDS."""
    return isinstance(value, list) and all(fits(x, kind) for x in value)


def are_pairs(lists: list[list]) -> bool:
    return all(len(pair) == 2 for pair in lists)


def check_fields(where: str, record: dict, kinds: dict[str, str]) -> None:
    """Raises BadInput, which begins with `where`, for the first field that is missing or not of its kind."""
    for name, kind in kinds.items():
        if not fits(record.get(name), kind):
            raise BadInput(f"{where}: {name} is {record[name]!r:.80}, expected {kind}" if name in record else
                           f"{where}: has no {name}; was it made by another version?")


def check_config(path: str, config: dict) -> None:
    """Raises BadInput where a run's config.json does not hold what is used of it."""
    check_fields(path, config, CONFIG)
    check_fields(f"{path}, args", config["args"], ARGS)
    starts = config.get("starts") or {}
    check_fields(f"{path}, starts", starts, dict.fromkeys(starts, "an object"))
    for role, start in starts.items():
        check_fields(f"{path}, starts, {role}", start, {name: START[name] for name in START if name in start})


def check_scores(where: str, record: dict, counts) -> None:
    """Raises BadInput, which begins with `where`, for what can neither be logged nor stand in an evaluation. counts:
    the names that are never without a number."""
    check_fields(where, record, dict.fromkeys(record, "a number or a text or null")
                 | dict.fromkeys(record.keys() & set(counts), "a number"))


def check_rollout(where: str, rollout: dict) -> None:
    """Raises BadInput, which begins with `where`, for a rollout that no card can show."""
    check_fields(where, rollout, SHOWN)
    num_spans, num_ends = len(rollout["step_spans"]), len(rollout["step_ends"])
    if num_ends < num_spans:
        raise BadInput(f"{where}: {num_spans} step_spans, but {num_ends} step_ends")
