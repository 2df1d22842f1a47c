"""
Tables: the rows of a file or of a dataset of the hub, each after its place, for what is said of it.

    read_rows(read_file("train.jsonl"), read, columns=("question", "answer"))
"""
import csv
import glob
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal

from nanochat.common import BadInput
from nanochat.storage.files import BYTE_ORDER_MARK, check_data_file, json_lines, look_for_hub, quiet_datasets, reading


def json_rows(path: str) -> Iterator[tuple[str, object]]:
    """Of json lines, or of one json list. A number with a fraction or an exponent is a Decimal: no digit is lost."""
    with reading(path), open(path, "rb") as f:
        if not f.read(2 ** 12).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
            yield from json_lines(path, parse_float=Decimal)
            return
        f.seek(0)
        rows = json.loads(f.read().decode("utf-8-sig"), parse_float=Decimal)
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def parquet_rows(path: str) -> Iterator[tuple[str, object]]:
    return dataset_rows(path, "parquet", data_files=glob.escape(path), split="train")  # datasets takes it for a pattern


def csv_rows(path: str) -> Iterator[tuple[str, object]]:
    """Of comma-separated values below a line of names. Every value is text, as it is written."""
    with reading(path), open(path, encoding="utf-8-sig", newline="") as f:
        rows = csv.DictReader(f, strict=True)
        try:
            if twice := [name for name, count in Counter(rows.fieldnames or ()).items() if count > 1]:
                raise ValueError(f"the first line names column {twice[0]!r} twice")
            for row in rows:
                if None in row or None in row.values():
                    raise ValueError(f"line {rows.line_num} has {'more' if None in row else 'fewer'} values than the "
                                     f"first line has names")
                yield f"{path}: line {rows.line_num}", row
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num}: {error}") from None


# What reads files of each ending
FILES = {".jsonl": json_rows, ".json": json_rows, ".parquet": parquet_rows, ".csv": csv_rows}


def read_file(path: str) -> Iterator[tuple[str, object]]:
    """The rows of a file that ends in one of FILES, each after its place, "FILE: line 3". Raises BadInput."""
    check_data_file(path)
    yield from FILES[os.path.splitext(path)[1]](path)


def read_hub(where: str, *name: str, split: str) -> Iterator[tuple[str, object]]:
    """The rows of a dataset of the hub, by its name and that of a configuration, each after its place: `where` and its
    number from 1. Raises BadInput."""
    look_for_hub()
    yield from dataset_rows(where, *name, failing=": no such file or folder, and as a dataset", split=split)


def dataset_rows(where: str, *path: str, failing: str = "", **options) -> Iterator[tuple[str, object]]:
    """The rows of what datasets.load_dataset opens. Raises BadInput, with `failing` where it cannot be opened."""
    datasets = quiet_datasets()
    try:
        rows = iter(datasets.load_dataset(*path, **options))
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error).strip() or type(error).__name__
        raise BadInput(f"{where}{failing}: {reason.splitlines()[0]}") from None
    for number in itertools.count(1):
        place = f"{where}: row {number}"
        with reading(place):
            try:
                row = next(rows)
            except StopIteration:
                return
        yield place, row


def read_rows(rows: Iterable[tuple[str, object]], read: Callable, columns: tuple[str, ...] = ()) -> list:
    """read(row) of each row. Raises BadInput, which begins with the place of a row that is none, lacks a column, or
    that `read` refuses."""
    found = []
    for place, row in rows:
        with reading(place):
            if not isinstance(row, dict):
                raise ValueError("is no json object")
            if missing := [column for column in columns if column not in row]:
                raise ValueError(f"has no column {missing[0]!r}, only {', '.join(row)}")
            found.append(read(row))
    return found
