"""
What every task offers, and helpers to make one.

A task is any object with `name`, `fmt` (nanochat.formats.Format) and the methods of `tasks.chain.Chain`. Tasks label text;
they never run models.
"""
import random
import zlib
from dataclasses import dataclass

from nanochat.common import BadInput, quiet_datasets

# Problems are dealt to the splits by a hash of their text: sft, rl and the two test splits have no text in common.
SPLIT_BUCKETS = {"sft": range(0, 4), "rl": range(4, 9), "test_in": range(9, 10), "test_out": range(9, 10)}


@dataclass(frozen=True)
class Problem:
    """One problem: the text that the generator reads and the gold answer. (split, index) names it for good."""
    split: str
    index: int
    prompt: str
    answer: str


def split_stream(seed: int, split: str, index: int) -> random.Random:
    """The random stream that belongs to problem `index` of a split: the same on every rank and in every run."""
    return random.Random(f"{seed}-{split}-{index}")


def draw_prompt(draw, split: str) -> str:
    """The first text of draw() that belongs to the split. Raises BadInput when a thousand do not: the task has too few problems."""
    for _ in range(1000):
        prompt = draw()
        if in_split(prompt, split):
            return prompt
    raise BadInput(f"split {split}: 1000 draws like {prompt!r} gave no problem of it; make the task's problems longer or more varied")


def in_split(prompt: str, split: str) -> bool:
    """Whether a problem text belongs to the split."""
    return zlib.crc32(prompt.encode()) % 10 in SPLIT_BUCKETS[split]


def read_table(where: str, columns: tuple[str, ...], *path, **options):
    """The table that datasets.load_dataset(*path, **options) opens. Raises BadInput, which begins with `where`, when it cannot or a column is
    missing."""
    datasets = quiet_datasets()
    try:
        table = datasets.load_dataset(*path, **options)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error).strip() or type(error).__name__
        raise BadInput(f"{where}: {reason.splitlines()[0]}") from None
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise BadInput(f"{where}: has no column {missing[0]!r}, only {', '.join(table.column_names)}")
    return table
