"""What users give as json, or as csv: one reader for all of it, and numbers as they are written."""
import json
from types import SimpleNamespace

import pytest

from nanochat import core_eval
from nanochat.common import BadInput
from nanochat.rl.verify.labelled import solution_rows
from tasks.common import Problem
from tasks.competition import Row, read_source
from tasks.conversations import load_conversations
from tasks.gsm8k import read_split
from tasks.multiple_choice import load_choices
from tasks.processbench import load_processbench

MMLU = {"question": "1+1?", "choices": ["1", "2", "3", "4"], "answer": 1}
JUDGED = {"problem": "1+1?", "steps": ["2"], "label": -1, "final_answer_correct": True}
CHAT = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
TASK = SimpleNamespace(name="one", problem=lambda split, index: Problem(split, index, "1+1?", "2"))
READERS = {  # of a folder's train.jsonl, and a good row of it
    "mathematics": (lambda folder: read_source("--x", f"{folder}/train.jsonl"), {"problem": "1+1?", "answer": "2"}),
    "gsm8k": (lambda folder: read_split(str(folder), "train"), {"question": "1+1?", "answer": "#### 2"}),
    "multiple choice": (lambda folder: load_choices("MMLU", f"{folder}/train.jsonl"), MMLU),
    "ProcessBench": (lambda folder: load_processbench(f"{folder}/train.jsonl"), JUDGED),
    "conversations": (lambda folder: load_conversations([f"{folder}/train.jsonl"]), CHAT),
    "CORE": (lambda folder: core_eval.read_items(f"{folder}/train.jsonl", "multiple_choice"),
             {"query": "1+1?", "choices": ["1", "2"], "gold": 1}),
    "solutions": (lambda folder: [row for _, row in solution_rows("--x", f"{folder}/train.jsonl", TASK)],
                  {"split": "rl", "index": 0, "prompt": "1+1?", "solution": "2"}),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_byte_order_mark_and_blank_lines_are_no_rows_and_a_bad_line_has_its_number(tmp_path, reader):
    """Lines may end as on Windows, the last one not at all, and hold what some take for the end of a line."""
    read, row = READERS[reader]
    line, path = json.dumps(row | {"more": "a\u2028b"}, ensure_ascii=False), tmp_path / "train.jsonl"
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    plain = read(tmp_path)
    path.write_bytes(f"\ufeff{line}\r\n\r\n \t\n{line}".encode())
    assert read(tmp_path) == plain and len(plain) == 2
    for bad, said in ((b"[{", "is no json"), (b'{"a": "\xff"}', "is no text in UTF-8"), (b"null", ""), (b"{}", "")):
        path.write_bytes(f"\ufeff{line}\n\n".encode() + bad)
        with pytest.raises(BadInput, match=f"train.jsonl: line 3.*{said}"):
            read(tmp_path)


NUMBERS = {"9007199254740993": "9007199254740993", "0.5": "0.5", "10000000000000000000000007": f"{10 ** 25 + 7}",
           "-3": "-3", "1.10": "1.10", "3.14159265358979323846": "3.14159265358979323846", "1e25": "1E+25"}


@pytest.mark.parametrize("name, text", [
    ("a.jsonl", "\n".join), ("a.json", "\n".join), ("a.json", lambda rows: f"\ufeff\n [{', '.join(rows)}]\n"),
    ("a.jsonl", lambda rows: "[" + ",\n".join(rows) + "]")])
def test_every_number_keeps_all_its_digits_whatever_stands_beside_it(tmp_path, name, text):
    (tmp_path / name).write_text(text([f'{{"problem": "p", "answer": {number}}}' for number in NUMBERS]),
                                 encoding="utf-8")
    rows = read_source("--x", str(tmp_path / name))
    assert [row.answer for row in rows] == list(NUMBERS.values())


def test_rows_of_a_list_are_numbered(tmp_path):
    path = tmp_path / "a.json"
    for rows, said in (([{"problem": "p"}, {"problem": "p", "answer": 1}], "row 1: has no text for answer"),
                       ([{"problem": "p", "answer": 1}, 3], "row 2: is no json object")):
        path.write_text(json.dumps(rows, indent=1))
        with pytest.raises(BadInput, match=f"a.json: {said}"):
            read_source("--x", str(path))
    path.write_text('[{"problem": "p",\n "answer": }]')
    with pytest.raises(BadInput, match="a.json: is no json: Expecting value: line 2 column 12"):
        read_source("--x", str(path))


def test_values_of_csv_are_as_they_are_written(tmp_path):
    (path := tmp_path / "a.csv").write_text('\ufeffproblem,answer,solution\r\n"1, 2\nor 3?",007,\r\n\r\n'
                                            f'b?,{10 ** 25 + 7},"say ""b"""\r\nc?,1.50,NA\r\n', encoding="utf-8")
    assert read_source("--x", str(path)) == [Row("1, 2\nor 3?", "007", ""), Row("b?", f"{10 ** 25 + 7}", 'say "b"'),
                                             Row("c?", "1.50", "NA")]
    for rows, said in ((b"a,b,c\n", "line 2: has no text for problem"), (b"a,1,2,3\n", "line 2 has more values"),
                       (b"a\n", "line 2 has fewer values"), (b'"a,1,\n', "line .: unexpected end of data"),
                       (b"\xff,1,2\n", "is no text in UTF-8")):
        path.write_bytes((b"a,b,c\n" if b"b,c" in rows else b"problem,answer,solution\n") + rows)
        with pytest.raises(BadInput, match=f"a.csv: {said}"):
            read_source("--x", str(path))
    path.write_text("problem,answer,answer\na,1,2\n")
    with pytest.raises(BadInput, match="a.csv: the first line names column 'answer' twice"):
        read_source("--x", str(path))
