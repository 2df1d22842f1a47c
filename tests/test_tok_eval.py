"""The compression table, encodings that are not on this machine, and tokenizers that lose text."""
import hashlib
import os

import pytest
import tiktoken

from nanochat import dataloader
from nanochat.cli import script_main
from nanochat.common import BadInput
from nanochat.hf.tokenizer import HFTokenizer
from nanochat.storage.files import path_of
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer
from scripts import hf_random, tok_eval

RANKS = {bytes([i]): i for i in range(256)}
SPECIALS = {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)}


@pytest.fixture
def bytewise(tmp_path, monkeypatch):
    """A tokenizer of bytes in the base directory, and an empty cache of tiktoken's."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})  # what an earlier test has opened
    tokenizer = Tokenizer.train(iter([]), 265)
    tokenizer.save(path_of("tokenizer"))
    return tokenizer


def run(*flags: str) -> None:
    tok_eval.main(tok_eval.make_parser().parse_args(flags))


def test_the_table_by_hand():
    """Ours: a token per byte. The other: one per word, so ours has 11 in place of 2, 450% more; in all 14 in place of
    3, 367% more."""
    lines = tok_eval.compression_table({"a": "hello world", "b": "abc"},
                                       {"ours": lambda text: list(text.encode()), "words": str.split})
    assert [line.replace("|", "").split() for line in lines] == [
        ["text", "bytes", "ours", "bytes/token", "words", "bytes/token", "ours"],
        ["a", "11", "11", "1.00", "2", "5.50", "+450.0%"],
        ["b", "3", "3", "1.00", "1", "3.00", "+200.0%"],
        ["all", "14", "14", "1.00", "3", "4.67", "+366.7%"]]
    assert len({len(line) for line in lines}) == 1


def test_encodings_that_are_not_here_are_named_and_left_out(bytewise, capsys):
    run()
    lines = capsys.readouterr().out.splitlines()
    for line, name in zip(lines, ("gpt2", "cl100k_base"), strict=False):
        assert line.startswith(f"{name}: not on this machine") and "TIKTOKEN_CACHE_DIR" in line
    assert [line.split()[0] for line in lines[2:]] == ["text", *tok_eval.SAMPLES, "all", "ours:"]
    assert "ours: 265 ids" in lines[-1] and "tokens/s" in lines[-1]


def test_a_damaged_file_in_the_cache_counts_as_absent(bytewise, tmp_path):
    url = "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken"
    (tmp_path / "tiktoken").mkdir()
    (tmp_path / "tiktoken" / hashlib.sha1(url.encode()).hexdigest()).write_text("AA== 0\n")
    assert tok_eval.local_encoding("cl100k_base") is None
    assert tiktoken.load.read_file.__module__ == "tiktoken.load"  # put back


def test_files_are_read_byte_for_byte(bytewise, tmp_path, monkeypatch, capsys):
    """One that takes long is told, one that cannot be read is bad input."""
    path = tmp_path / "dos.txt"
    path.write_bytes("a\r\nβ\n".encode())
    run("--data", str(path), "--compare", "")
    assert capsys.readouterr().out.splitlines()[1].split() == [str(path), "6", "|", "6", "1.00"]
    monkeypatch.setattr(dataloader, "LONG", 5)
    run("--data", str(path), "--compare", "")
    line = f"{path}: encoding a document of 5 characters, which takes a while"
    assert capsys.readouterr().out.splitlines()[0] == line
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_bytes(b"")
    for name, complaint in (("latin", "latin.txt: is no text in UTF-8"), ("empty", "empty.txt: is empty"),
                            ("none", "none.txt: No such file")):
        with pytest.raises(BadInput, match=complaint):
            run("--data", str(tmp_path / f"{name}.txt"))
    with pytest.raises(BadInput, match="--compare gpt5: tiktoken has .*gpt2"):
        run("--compare", "gpt5")


def test_a_tokenizer_that_loses_text_ends_with_code_2(bytewise, capsys):
    letters_only = tiktoken.Encoding("nanochat", pat_str=r"\p{L}+", mergeable_ranks=RANKS, special_tokens=SPECIALS)
    Tokenizer(letters_only).save(path_of("tokenizer"))
    with pytest.raises(SystemExit) as stop:
        script_main(tok_eval.main, tok_eval.make_parser(), ["--compare", ""])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the tokenizer does not give back the text english: from byte 3 it has "
                            "b'ferryleftlat'") and error.count("\n") == 1


def test_an_imported_tokenizer_is_taken(bytewise, capsys):
    os.remove(path_of("tokenizer", "tokenizer.pkl"))
    hf_random.make_tokenizer([], 300).save(path_of("tokenizer"))
    run("--compare", "")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["text", *tok_eval.SAMPLES, "all", "ours:"]
    assert lines[1].split()[1] == lines[1].split()[3]  # without merges a byte is a token


class Prefixing(HFTokenizer):
    """Puts a space first, as Llama 2's does, and then what `lost` is put in place of."""
    lost = b"-", b"-"

    def __init__(self):
        pass

    def encode(self, text: str) -> list[int]:
        return list(b" " + text.encode().replace(*self.lost))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def test_the_space_that_an_imported_tokenizer_puts_first_is_no_loss(bytewise):
    tokenizer = Prefixing()
    tok_eval.check_round_trip(tokenizer, "x", "a text")
    tokenizer.lost = b"t", b"u"
    with pytest.raises(BadInput, match="does not give back the text x: from byte 0 it has b' a uexu', not b'a text'"):
        tok_eval.check_round_trip(tokenizer, "x", "a text")
