"""Packed batches: no token is lost, the stream goes on exactly where it stopped, ranks share documents, bad files are
named."""
import itertools
import json
import os
import random
import shutil
from itertools import islice

import pytest
import torch

from nanochat import dataloader
from nanochat.common import BadInput
from nanochat.dataloader import Documents, PackedBatches, Shelf, find_files, length_batches, pack_whole, shuffled
from nanochat.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(iter([]), 265)
BOS = TOKENIZER.bos


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setattr(dataloader, "BUFFER", 20)
    monkeypatch.setattr(dataloader, "ENCODE", 8)


def text_of(shard: int, i: int) -> str:
    return f"{shard}-{i}:" + "x" * (7 * i % 41)


@pytest.fixture
def shards(tmp_path) -> list[str]:
    """Three jsonl files of 60 documents of 5 to 45 bytes; rows have a second column that nothing reads."""
    paths = []
    for shard in range(3):
        path = tmp_path / f"s{shard}.jsonl"
        path.write_text("".join(json.dumps({"id": i, "text": text_of(shard, i)}) + "\n" for i in range(60)))
        paths.append(str(path))
    return paths


def take_epoch(documents: Documents) -> list[str]:
    texts = []
    for text in documents:
        if documents.epoch:
            return texts
        texts.append(text)


def pieces_of(rows: list[list[int]]) -> list[bytes]:
    """The documents or parts of documents that rows hold, as bytes."""
    pieces = []
    for row in rows:
        assert row[0] == BOS
        for token in row:
            if token == BOS:
                pieces.append(b"")
            else:
                pieces[-1] += TOKENIZER.token_bytes(token)
    return pieces


def test_a_folder_a_pattern_and_a_list_name_the_same_files(shards, tmp_path):
    shutil.copytree(tmp_path, tmp_path / "a[0]")  # a name that looks like a pattern
    copies = [shard.replace(str(tmp_path), f"{tmp_path}/a[0]") for shard in shards]
    assert find_files([str(tmp_path / "a[0]")]) == copies and find_files(copies) == copies
    (tmp_path / "a0").mkdir()  # what the pattern would name
    (tmp_path / "a0" / os.path.basename(shards[0])).write_text('{"text": "another"}\n')
    first = lambda path: next(iter(Documents([path])))
    assert first(copies[0]) == first(shards[0]) != "another"
    assert find_files([str(tmp_path)]) == find_files([str(tmp_path / "*.jsonl")]) == find_files(shards) == shards


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_share_an_epoch_between_them(shards, world):
    parts = [take_epoch(Documents(shards, rank, world)) for rank in range(world)]
    assert all(parts)
    assert sorted(sum(parts, [])) == sorted(text_of(shard, i) for shard in range(3) for i in range(60))


def test_a_text_file_is_one_document_that_comes_again_and_parquet_gives_its_text_column(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt").write_text("three")
    documents = Documents([str(tmp_path)])
    assert list(islice(documents, 5)) == ["one\n\ntwo\n", "three"] * 2 + ["one\n\ntwo\n"]
    assert documents.epoch == 2
    import pyarrow as pa
    import pyarrow.parquet as pq
    pq.write_table(pa.table({"n": [1, 2, 3], "text": ["a", "b", "c"]}), str(tmp_path / "x.parquet"), row_group_size=2)
    assert take_epoch(Documents([str(tmp_path / "x.parquet")])) == ["a", "b", "c"]


@pytest.mark.parametrize("world, rank", [(1, 0), (3, 2)])
@pytest.mark.parametrize("num_before", [0, 1, 59, 60, 61, 200])
def test_documents_go_on_where_they_stopped(shards, world, rank, num_before):
    straight, stopped = Documents(shards, rank, world), Documents(shards, rank, world)
    expected = list(islice(straight, num_before + 100))[num_before:]
    list(islice(stopped, num_before))
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = Documents(shards, rank, world)
    resumed.load_state_dict(state)
    assert list(islice(resumed, 100)) == expected


@pytest.mark.parametrize("content, ending, complaint", [
    ("", "jsonl", "is empty"), (" \n\n", "jsonl", "is empty"), ("", "txt", "is empty"),
    ('null\n{"text": "a"}\n', "jsonl", "no json of rows: it begins with b'null"),
    ('{"txt": "a"}\n', "jsonl", "no column 'text', but txt"), ("{not json\n", "jsonl", "cannot be read"),
    ("PAR1 not", "parquet", "cannot be read"), ('{"text": "a"}\n{"text": null}\n', "jsonl", "row 1"),
    # a column of nothing but dates is one of times to the library that reads it
    ('{"text": "2024-01-01"}\n', "jsonl", "row 0 of rank 0 in epoch 0 has a datetime and no text"),
    ((json.dumps({"text": "x" * 10 ** 6}) + "\n") * 12 + '{"text": "bro', "jsonl", "cannot be read after row"),
    ("nowhere", "link", "cannot be read: "), ("bad.jsonl", "link", "cannot be read: ")])
def test_bad_files_are_named(tmp_path, content, ending, complaint):
    path = tmp_path / f"bad.{ending.replace('link', 'jsonl')}"
    path.symlink_to(tmp_path / content) if ending == "link" else path.write_text(content)
    with pytest.raises(BadInput) as error:
        list(islice(Documents([str(path)]), 13))
    assert str(path) in str(error.value) and complaint in str(error.value) and "\n" not in str(error.value)


def test_missing_and_mixed_files_are_refused(shards, tmp_path):
    with pytest.raises(BadInput, match="nowhere: no such file"):
        find_files([str(tmp_path / "nowhere")])
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(BadInput, match=r"ending in \.jsonl, \.txt"):
        find_files([str(tmp_path)])
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(BadInput, match=r"\.csv"):
        find_files([str(tmp_path / "a.csv")])


def test_rows_are_full_begin_with_bos_and_lose_no_token(shards):
    """Two epochs' worth of rows: every document of the first epoch is there, whole or in parts that follow bos."""
    documents = Documents(shards)
    batches = PackedBatches(documents, TOKENIZER, 4, 33)
    rows = []
    while documents.epoch < 2:
        batch = batches.next_batch()
        assert batch.shape == (4, 33) and batch.dtype == torch.int64
        rows += batch.tolist()
    pieces = pieces_of(rows)
    whole = [p for p in pieces if p.decode() in {text_of(s, i) for s in range(3) for i in range(60)}]
    num_bytes = sum(len(text_of(s, i)) for s in range(3) for i in range(60))
    waiting = sum(length - 1 for length in batches.shelf.lengths)
    # What came out and what waits is what went in: two epochs and the beginning of a third.
    assert (sum(map(len, pieces)) + waiting >= 2 * num_bytes
            and (sum(map(len, pieces)) + waiting - 2 * num_bytes) <= 8 * 45)
    assert batches.num_cut > 0 and len(whole) > 200


def test_one_long_text_is_read_through_before_it_comes_again(tmp_path):
    """A corpus of one file: every part of it is trained once per pass, not its head again and again."""
    (tmp_path / "a.txt").write_bytes(text := b"".join(b"%04d" % i for i in range(1000)))
    batches = PackedBatches(Documents([str(tmp_path)]), TOKENIZER, 5, 41)
    pieces = pieces_of(sum((batches.next_batch().tolist() for _ in range(20)), []))
    assert b"".join(pieces) == text
    assert batches.documents.epoch == 1 and len(batches.shelf.items) <= 200  # little of the next pass waits


def test_a_document_that_takes_long_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("abc" * 10)
    (tmp_path / "a.jsonl").write_text('{"text": "abcdefg"}\n{"text": "b"}\n')
    text, line = (lambda: PackedBatches(Documents([f"{tmp_path}/a.txt"]), TOKENIZER, 1, 31).next_batch(),
                  lambda: Documents([f"{tmp_path}/a.jsonl"]))
    for work, size, said in (
            (text, 30, f"{tmp_path}/a.txt: encoding a document of 30 characters, which takes a while"),
            (line, 20, f"{tmp_path}/a.jsonl: reading a line of 20 bytes or more, which takes a while")):
        monkeypatch.setattr(dataloader, "LONG", size + 1)
        work()
        assert capsys.readouterr().out == ""
        monkeypatch.setattr(dataloader, "LONG", size)
        work()
        assert capsys.readouterr().out.splitlines()[0] == said


def test_documents_without_text_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": ""}\n')
    batches = PackedBatches(Documents([str(tmp_path)]), TOKENIZER, 1, 9)
    assert pieces_of(batches.next_batch().tolist()) == [b"abc", b"abc", b""]
    # 22 texts were read, for 20 to wait when two were taken; one without text between each
    assert batches.num_empty == 21
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(BadInput, match="no document has text"):
        PackedBatches(Documents([str(tmp_path)]), TOKENIZER, 1, 9).next_batch()


@pytest.mark.parametrize("num_before", [0, 1, 40])
def test_batches_go_on_exactly_where_they_stopped(shards, tmp_path, num_before):
    make = lambda: PackedBatches(Documents(shards, 1, 2), TOKENIZER, 2, 33)
    straight, stopped, resumed = make(), make(), make()
    expected = [straight.next_batch() for _ in range(num_before + 30)][num_before:]
    for _ in range(num_before):
        stopped.next_batch()
    torch.save(stopped.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(torch.equal(resumed.next_batch(), batch) for batch in expected)
    assert resumed.num_cut == straight.num_cut and resumed.documents.epoch == straight.documents.epoch


def test_a_shelf_gives_the_longest_that_fits():
    shelf = Shelf()
    for length, item in [(3, "a"), (5, "b"), (3, "c"), (9, "d")]:
        shelf.add(length, item)
    assert [shelf.take(space) for space in (8, 4, 4, 4, 8, 9)] == ["b", "a", "c", None, None, "d"]


def test_pack_whole_keeps_examples_whole_and_pads_untrained():
    examples = [([i] * n, [0] + [1] * (n - 1)) for i, n in enumerate([4, 7, 3, 10, 2], 1)]
    rows = pack_whole(examples, 10, 0)
    assert [ids for ids, _ in rows] == [[4] * 10, [2] * 7 + [3] * 3, [1] * 4 + [5] * 2 + [0] * 4]
    assert [mask for _, mask in rows] == [[0] + [1] * 9, [0] + [1] * 6 + [0, 1, 1], [0, 1, 1, 1, 0, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize("cost", [0, 3, 20, 2 ** 20])
def test_micro_batches_cost_least(cost):
    """Against all ways to cut eight examples: padded tokens, and `cost` for each micro-batch. One may be an example
    that is too long."""
    examples = [([0] * n, n) for n in (40, 5, 40, 6)]
    assert [[n for _, n in batch] for batch in length_batches(examples, 30)] == [[5, 6], [40], [40]]
    assert length_batches([], 30) == []
    draw = random.Random(cost)
    for _ in range(5):
        examples = [([i] * draw.randint(1, 12), i) for i in range(8)]
        batches = length_batches(examples, 30, cost)
        assert sorted(i for batch in batches for _, i in batch) == list(range(8))
        lengths = sorted(len(ids) for ids, _ in examples)
        assert [len(ids) for batch in batches for ids, _ in batch] == lengths
        costs = []
        for cuts in itertools.product([False, True], repeat=7):
            edges = [0, *(i for i, cut in enumerate(cuts, 1) if cut), 8]
            sizes = [(b - a) * lengths[b - 1] for a, b in itertools.pairwise(edges)]
            if max(sizes) <= 30:
                costs.append(sum(sizes) + cost * len(sizes))
        assert sum(len(batch) * len(batch[-1][0]) + cost for batch in batches) == min(costs)


def test_shuffled_passes_over_all_rows_each_epoch_in_another_order():
    row = shuffled(10, seed=3)
    epochs = [[row(10 * epoch + i) for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert shuffled(10, seed=3)(17) == epochs[1][7]  # a function of the index, whatever was asked before
