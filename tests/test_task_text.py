"""Text for rehearsing pretraining is there as a whole or not at all, and nothing that was there is overwritten."""
import os
from pathlib import Path

import pytest
from conftest import TASK_FLAGS, parse
from test_bad_input import refused

from nanochat.common import BadInput, CannotWrite
from scripts import task_text

SHARDS = [f"shard_{i:05d}.jsonl" for i in range(4)]


def write(out, *flags: str) -> None:
    task_text.main(task_text.make_parser().parse_args([*TASK_FLAGS, "--out", str(out), "--num-documents", "9", *flags]))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.fixture
def there(tmp_path) -> Path:
    """A folder with text, beside which nothing is."""
    write(tmp_path / "tx")
    assert names(tmp_path) == ["tx"] and names(tmp_path / "tx") == SHARDS
    return tmp_path / "tx"


def test_a_folder_that_holds_something_is_refused(capsys, there):
    for name in ("shard_00000.jsonl", "shard_00007.parquet", "notes.txt"):
        for file in there.iterdir():
            file.unlink()
        (there / name).write_text("mine")
        line = refused(capsys, there.parent, task_text, "--task", "last_letter", "--out", str(there))
        assert line == f"error: {there} holds {name}: give --out a folder that is empty or not there yet"


@pytest.mark.parametrize("out", ["tx", "tx/", "link", "a/b/tx"])
def test_an_empty_folder_and_one_that_is_not_there_are_filled(tmp_path, out):
    if not out.startswith("a"):
        (tmp_path / "tx").mkdir()
    (tmp_path / "link").symlink_to("tx")
    write(tmp_path / out if out != "tx/" else f"{tmp_path}/tx/")
    assert names(tmp_path / out) == SHARDS and not [name for name in names(tmp_path) if "partial" in name]


def test_two_calls_on_one_folder_do_not_disturb_each_other(tmp_path, monkeypatch, capsys):
    """The second comes while the first writes its last shard. What cannot be written leaves nothing; what a killed call
    left is told."""
    with monkeypatch.context() as patch, pytest.raises(CannotWrite, match=r"/tx cannot be written: No space left"):
        patch.setattr(os, "rename", full)
        write(tmp_path / "tx")
    assert names(tmp_path) == []
    (tmp_path / ".tx-killed.partial").mkdir()
    real, seconds = task_text.whole_file, []

    def in_between(path):
        if path.endswith("shard_00003.jsonl") and not seconds:
            seconds.append("comes")
            write(tmp_path / "tx")
        return real(path)

    monkeypatch.setattr(task_text, "whole_file", in_between)
    with pytest.raises(CannotWrite, match=r"/tx cannot be written: "):
        write(tmp_path / "tx")
    assert f"{tmp_path}/.tx-killed.partial is of another process" in capsys.readouterr().out
    assert seconds and names(tmp_path) == [".tx-killed.partial", "tx"] and names(tmp_path / "tx") == SHARDS
    assert sum(len(path.read_text().splitlines()) for path in (tmp_path / "tx").iterdir()) == 9


def test_without_a_folder_prompts_are_shown_as_a_model_sees_them(base, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("{problem} {{so}}\n")
    shown = lambda *flags: (task_text.main(parse(task_text, list(flags))), capsys.readouterr().out)[1].splitlines()
    lines = shown(*TASK_FLAGS, "--system-prompt", "Be \x1b brief.", "--generator-prompt", str(tmp_path / "mine.txt"))
    problem = lines[3].partition(" ")[0]
    assert lines[1: 4] == ["<|bos|><|user_start|>Be ? brief.", "", f"{problem} {{so}}<|user_end|><|assistant_start|>"]
    solution = lines[5].removesuffix("<|assistant_end|>")
    assert f"{problem}|{solution}|" in lines[9] and lines[11].endswith("<|assistant_end|>")
    assert [line[4:15] for line in lines if line.startswith("---")] == [
        "the generat", "what its SF", "the verifie", "what its SF"]
    rows = tmp_path / "rows.jsonl"  # nobody has shown how it is solved
    rows.write_text('{"question": "1+1?", "answer": "2"}\n')
    assert "<answer>\\boxed{2}</answer>" in " ".join(lines := shown("--task", "rows", "--data", str(rows)))
    assert not [line for line in lines if "SFT" in line]
    with pytest.raises(BadInput, match="--rows-data: is of --task rows, and the task is chain"):
        shown("--data", str(rows))
