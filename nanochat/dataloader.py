"""
Packed token batches: documents from text, jsonl or parquet files (or a `datasets` name), streamed and resumable at the
exact batch.

Every row begins with bos. Documents longer than a row are cut into rows; the others are packed by best fit, and where
none fits, the longest is cut and its rest begins with bos as a document of its own: no token is lost, and no row is
padded.
"""
import contextlib
import glob
import os
import random
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import zip_longest

import torch

from nanochat.common import BadInput, print0
from nanochat.storage.files import check_data_file, look_for_hub, quiet_datasets

FORMATS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}
BUFFER = 1000     # documents that wait for a row they fit
ENCODE = 128      # documents that are encoded at once, or fewer
ENCODE_CHARS = 2 ** 18  # as soon as they have so many characters
BLOCK, BLOCKS = 2 ** 20, 64  # of mark_of: bytes, and how many
LONG = 5_000_000  # characters of a document: about a second of reading and of encoding
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::(\w+))?")  # owner/name, and a split after a colon


def find_files(sources: list[str]) -> list[str]:
    """The files that paths, folders (all known files in them) and patterns name, in order. Raises BadInput."""
    files = []
    for source in sources:
        path = glob.escape(source) if os.path.exists(source) else source  # a name may look like a pattern
        found = ([name for ending in FORMATS for name in glob.glob(os.path.join(path, f"*{ending}"))]
                 if os.path.isdir(source) else glob.glob(path))
        if not found:
            raise BadInput(f"{source}: no such file, or a folder without {', '.join(FORMATS)} files")
        files += sorted(found)
    endings = {os.path.splitext(name)[1] for name in files}
    if len(endings) > 1 or endings - FORMATS.keys():
        raise BadInput(f"{', '.join(sources)}: has files ending in {', '.join(sorted(endings))}; "
                       f"give one format of {', '.join(FORMATS)}")
    return files


def mark_files(sources: list[str]) -> dict[str, list[int]]:
    """The files that sources stand for, each with its mark; a hub name has none. Raises BadInput."""
    return {} if is_hub_name(sources) else {file: mark_of(file) for file in find_files(sources)}


def mark_of(file: str) -> list[int]:
    """The size of a file in bytes, and a checksum of BLOCKS evenly spaced blocks: of all of it up to 64 MiB."""
    size, found = os.path.getsize(file), 0
    step = max(BLOCK, size // BLOCKS)
    with open(file, "rb") as f:
        for start in range(0, size, step):
            f.seek(start)
            found = zlib.crc32(f.read(BLOCK), found)
    return [size, found]


def check_same_files(before: dict[str, list[int]], now: dict[str, list[int]], what: str) -> None:
    """Raises BadInput where text is not what training was begun with, wherever its files are now. before, now:
    mark_files, of which older ones have sizes alone."""
    as_list = lambda mark: mark if isinstance(mark, list) else [mark]
    before, now = ([(os.path.basename(file), as_list(mark)) for file, mark in marks.items()] for marks in (before, now))
    for (file, was), (name, mark) in zip_longest(before, now, fillvalue=("", [])):
        if file != name or was != mark[: len(was)]:
            words = lambda file, mark: f"{file} of {mark[0]} bytes" if file else "no more files"
            same_size = " with another text" * (file == name and was[:1] == mark[:1])
            raise BadInput(f"{words(name, mark)}{same_size}: there was {words(file, was)} when {what} was saved: the "
                           f"text must stay as it was")


def is_hub_name(sources: list[str]) -> bool:
    return len(sources) == 1 and not glob.glob(sources[0]) and HUB_NAME.fullmatch(sources[0]) is not None


@contextlib.contextmanager
def reading(sources: list[str], where: str = ""):
    """Around what `datasets` does, which raises many types for what is damaged or not there. Raises BadInput."""
    try:
        yield
    except Exception as error:
        raise BadInput(f"{', '.join(sources)}: cannot be read{where}: "
                       f"{' '.join(str(error).split())[:200] or type(error).__name__}") from None


def open_rows(sources: list[str]):
    """A streaming `datasets` dataset of files or of a hub name, its column `text` alone. Raises BadInput."""
    datasets = quiet_datasets()
    files = [] if is_hub_name(sources) else find_files(sources)
    for name in files:
        check_data_file(name)
        if name.endswith(".jsonl"):
            with open(name, "rb") as f:
                if len(f.readline(LONG)) == LONG:
                    print0(f"{name}: reading a line of {LONG:,} bytes or more, which takes a while")
    with reading(sources):
        if files:
            kind = FORMATS[os.path.splitext(files[0])[1]]
            options = {"sample_by": "document"} if kind == "text" else {}
            names = [glob.escape(name) for name in files]  # datasets takes them for patterns
            rows = datasets.load_dataset(kind, data_files=names, split="train", streaming=True, **options)
        else:
            look_for_hub()
            name, split = HUB_NAME.fullmatch(sources[0]).groups()
            rows = datasets.load_dataset(name, split=split or "train", streaming=True)
        columns = rows.column_names or list(next(iter(rows)))
    if "text" not in columns:
        raise BadInput(f"{', '.join(sources)}: has no column 'text', but {', '.join(columns)}")
    return rows.select_columns(["text"])


class Documents:
    """An endless stream of texts, of which every rank reads its share; an epoch is a pass, a .txt file one document."""

    def __init__(self, sources: list[str], rank: int = 0, world: int = 1):
        self.sources, self.rank, self.world, self.epoch = sources, rank, world, 0
        self.rows = self._open()
        self.iterator = self._texts(nothing_yet=True)

    def _open(self):
        from datasets.distributed import split_dataset_by_node
        return split_dataset_by_node(open_rows(self.sources), self.rank, self.world)

    def _texts(self, nothing_yet: bool) -> Iterator[str]:
        while True:
            rows, i = iter(self.rows), -1
            while (row := self._next(rows, i)) is not None:
                i += 1
                if not isinstance(row["text"], str):
                    raise BadInput(f"{', '.join(self.sources)}: row {i} of rank {self.rank} in epoch {self.epoch} "
                                   f"has a {type(row['text']).__name__} and no text")
                nothing_yet = False
                yield row["text"]
            if nothing_yet:
                raise BadInput(f"{', '.join(self.sources)}: no documents for rank {self.rank} of {self.world}")
            self.epoch += 1
            self.rows = self._open()

    def _next(self, rows, i: int) -> dict | None:
        with reading(self.sources, f" after row {i}"):
            return next(rows, None)

    def __iter__(self) -> Iterator[str]:
        return self.iterator

    def state_dict(self) -> dict:
        """Where the stream is: the next text comes first after load_state_dict."""
        return {"epoch": self.epoch, "rows": self.rows.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.rows = state["epoch"], self._open()
        self.rows.load_state_dict(state["rows"])
        self.iterator = self._texts(nothing_yet=False)  # it may have stopped at the end of an epoch


class Shelf:
    """Items kept by length, of which the longest that fits is taken; among equals the first to come goes first."""

    def __init__(self):
        self.lengths: list[int] = []  # ascending
        self.items: list = []

    def add(self, length: int, item) -> None:
        at = bisect_left(self.lengths, length)  # before its equals: the end of a run is taken first
        self.lengths.insert(at, length)
        self.items.insert(at, item)

    def take(self, space: int):
        """The longest of at most `space`, or None."""
        at = bisect_right(self.lengths, space) - 1
        if at < 0:
            return None
        del self.lengths[at]
        return self.items.pop(at)


def tell_long(sources: list[str], texts: list[str]) -> None:
    """Says of texts that take long to encode that this is what goes on."""
    for text in texts:
        if len(text) >= LONG:
            print0(f"{', '.join(sources)}: encoding a document of {len(text):,} characters, which takes a while")


class PackedBatches:
    """Endless batches (B, T + 1) int64 of packed documents: inputs and targets of T tokens per row.

    num_cut, num_empty: how often a document was cut over rows, and documents without text, which are left out.
    """

    def __init__(self, documents: Documents, tokenizer, rows: int, width: int):
        self.documents, self.tokenizer, self.rows, self.width = documents, tokenizer, rows, width
        self.shelf, self.num_cut, self.num_empty = Shelf(), 0, 0

    def _refill(self) -> None:
        first_epoch, num_before = self.documents.epoch, len(self.shelf.items)
        while len(self.shelf.items) < BUFFER:
            texts, num_chars, epoch = [], 0, self.documents.epoch
            while len(texts) < ENCODE and num_chars < ENCODE_CHARS and self.documents.epoch == epoch:
                texts.append(next(self.documents.iterator))
                num_chars += len(texts[-1])
            tell_long(self.documents.sources, texts)
            for tokens in self.tokenizer.encode_batch(texts):
                self._add(tokens)
            if len(self.shelf.items) == num_before and self.documents.epoch > first_epoch + 1:
                raise BadInput(f"{', '.join(self.documents.sources)}: no document has text")

    def _add(self, tokens: list[int]) -> None:
        """Puts a document on the shelf, one longer than a row in parts."""
        room = self.width - 1  # of a row, after bos
        self.num_empty += not tokens
        self.num_cut += len(tokens) > room
        for start in range(0, len(tokens), room):
            part = [self.tokenizer.bos, *tokens[start: start + room]]
            self.shelf.add(len(part), part)

    def _row(self) -> list[int]:
        row: list[int] = []
        while (space := self.width - len(row)) > 0:
            self._refill()
            tokens = self.shelf.take(space)
            if tokens is None:
                tokens = self.shelf.take(self.shelf.lengths[-1])
                self.shelf.add(len(tokens) - space + 1, [self.tokenizer.bos, *tokens[space:]])
                tokens = tokens[:space]
                self.num_cut += 1
            row += tokens
        return row

    def next_batch(self) -> torch.Tensor:
        return torch.tensor([self._row() for _ in range(self.rows)])

    def state_dict(self) -> dict:
        """Everything the next batch depends on. The waiting documents are one tensor and their lengths."""
        return {"documents": self.documents.state_dict(), "num_cut": self.num_cut, "num_empty": self.num_empty,
                "lengths": list(self.shelf.lengths),
                "tokens": torch.tensor([t for tokens in self.shelf.items for t in tokens], dtype=torch.int32)}

    def load_state_dict(self, state: dict) -> None:
        self.documents.load_state_dict(state["documents"])
        self.num_cut, self.num_empty, self.shelf.lengths = state["num_cut"], state["num_empty"], list(state["lengths"])
        self.shelf.items = [part.tolist() for part in state["tokens"].split(state["lengths"])]


def pack_whole(examples: list[tuple[list[int], list[int]]], width: int, pad: int) -> list[tuple[list[int], list[int]]]:
    """Rows of exactly `width` tokens, of whole examples (ids, loss mask), none longer, packed by best fit; the rest of
    a row is `pad`, not trained."""
    shelf, rows = Shelf(), []
    for example in examples:
        shelf.add(len(example[0]), example)
    while shelf.items:
        ids, mask = [], []
        while (example := shelf.take(width - len(ids))) is not None:
            ids, mask = ids + example[0], mask + example[1]
        space = width - len(ids)
        rows.append((ids + [pad] * space, mask + [0] * space))
    return rows


def length_batches(examples: list, max_tokens: int, tokens_per_batch: int = 2 ** 20) -> list[list]:
    """The examples by length, cut into micro-batches of at most max_tokens tokens, padding included, so that padding
    and what the micro-batches cost, each as much as tokens_per_batch tokens, is least."""
    examples = sorted(examples, key=lambda example: len(example[0]))
    costs, starts = [0], [0]  # of the first n examples: the least cost, and where its last micro-batch starts
    for end, (ids, *_) in enumerate(examples, 1):
        most = max(1, max_tokens // max(1, len(ids)))
        costs_from = [(costs[start] + (end - start) * len(ids) + tokens_per_batch, start)
                      for start in range(max(0, end - most), end)]
        cost, start = min(costs_from)
        costs.append(cost)
        starts.append(start)
    batches, end = [], len(examples)
    while end:
        batches.insert(0, examples[starts[end]: end])
        end = starts[end]
    return batches


def shuffled(num: int, seed: int) -> Callable[[int], int]:
    """index -> row: endless passes over `num` rows, each in an order of its own."""
    orders: dict[int, list[int]] = {}

    def row(index: int) -> int:
        epoch, position = divmod(index, num)
        if epoch not in orders:
            orders.clear()
            orders[epoch] = random.Random(f"{seed}-epoch-{epoch}").sample(range(num), num)
        return orders[epoch][position]

    return row
