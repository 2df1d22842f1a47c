"""A disk that takes no more: every writer says in one line which file and why, and leaves what was there."""
import contextlib
import os
import resource
import types

import pytest
import torch
from conftest import TASK_FLAGS, parse, rl_flags
from test_report import make_run

from dev.experiments import jobs
from nanochat import own_code
from nanochat.checkpoint import save_atomic
from nanochat.cli import script_main
from nanochat.common import CannotWrite
from nanochat.hf.decoder import Decoder
from nanochat.hf.files import write_model
from nanochat.rl.report.page import draw_curves, write_run_page
from nanochat.rl.report.report import read_run, tidy, write_csv
from nanochat.storage.files import make_folder, path_of, write_json
from nanochat.storage.run import Run, lock_run
from nanochat.tokenizer import Tokenizer
from nanochat.weights import allocate
from scripts import hf_random, tango_rl, task_text


@contextlib.contextmanager
def full_disk():
    """Files end at 10 bytes, as they do on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files_in(folder) -> dict[str, bytes]:
    return {os.path.relpath(os.path.join(parent, name), folder): open(os.path.join(parent, name), "rb").read()
            for parent, _, names in os.walk(folder) for name in names}


def finished_run(folder):
    return read_run(make_run(folder, "chain-tango-s0", 0, [0.1, 0.5]))


# Of each writer: what it needs, made while there is room, and the call that then writes.

def save_tokenizer(folder):
    return lambda tokenizer=Tokenizer.train(iter(()), 265): tokenizer.save("tokenizer")


def save_hf_tokenizer(folder):
    return lambda tokenizer=hf_random.make_tokenizer([], 300): tokenizer.save("tokenizer")


def save_hf_model(folder):
    """Its tokenizer is none, so that the weights are what fails."""
    config = hf_random.replace(hf_random.shape_of("qwen2.5-0.5b"), n_layer=1, vocab_size=300, n_embd=32, head_dim=16,
                               n_head=2, n_kv_head=1, intermediate_size=64)
    state = allocate(Decoder, config, torch.float32, "cpu", torch.float32).state_dict()
    tokenizer = types.SimpleNamespace(save=lambda folder: None, stop_tokens=[1], bos=0)
    return lambda: write_model("model", config, state, torch.float32, tokenizer)


def append_record(folder):
    run = Run("r", torch.device("cpu"), 0, 1, str(folder))
    return lambda: run.append("metrics.jsonl", {"step": 1, "loss": 0.5})


def write_report_page(folder):
    run = finished_run(folder)
    return lambda: write_run_page(f"runs/{run.name}", None)


def write_report_picture(folder):
    runs = [finished_run(folder)]
    draw_curves(runs, "curves.png")  # matplotlib makes its cache
    return lambda: draw_curves(runs, "curves.png")


def write_text(folder):
    args = parse(task_text, [*TASK_FLAGS, "--out", "text", "--num-documents", "4"])
    return lambda: task_text.main(args)


def start_job(folder):
    job = jobs.Job("job", "scripts.tok_train", "folder", "done", "--flags of some length")
    os.makedirs(os.path.dirname(jobs.log_of(job.name)))
    return lambda: jobs.Children().run(job)


WRITERS = {
    save_tokenizer: "tokenizer/token", save_hf_tokenizer: "tokenizer/", save_hf_model: "model",
    append_record: "metrics.jsonl", write_report_page: "report.html", write_report_picture: "curves.png",
    write_text: "text/shard_00000.jsonl", start_job: "job.flags",
    lambda folder: lambda rows=tidy([finished_run(folder)]): write_csv(rows, "curves.csv"): "curves.csv",
    lambda folder: lambda: write_json("x.json", {"some": "numbers"}): "x.json",
    lambda folder: lambda: save_atomic(torch.ones(99), "folder/x.pt"): "folder/x.pt"}


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_full_disk_is_told_in_one_line_and_leaves_what_was_there(writer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    write = writer(tmp_path)
    before = files_in(tmp_path)
    with full_disk(), pytest.raises(CannotWrite) as refusal:
        write()
    assert WRITERS[writer] in str(refusal.value) and "cannot be written: " in str(refusal.value)
    assert "File too large" in str(refusal.value) and "\n" not in str(refusal.value)
    begun = {"metrics.jsonl"} if writer is append_record else set()  # its last line is not counted
    assert {name: text for name, text in files_in(tmp_path).items() if name not in begun} == before


@pytest.mark.parametrize("make", [make_folder, lambda folder: lock_run(os.path.dirname(folder))])
def test_a_folder_that_cannot_be_made_is_told_in_one_line(make, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match=f"{tmp_path}/file/.* cannot be written: Not a directory"):
        make(str(tmp_path / "file" / "folder"))


def test_the_text_of_a_recipe_that_cannot_be_written_is_told_in_one_line(base, tmp_path, monkeypatch, capsys):
    """Other files of a run are long enough to fail before it."""
    recipe = tmp_path / "own.py"
    recipe.write_text("from nanochat.recipes.policy.grpo import *\n")

    def refuse(path, mode="w"):
        assert os.path.basename(path) == "recipe.py"
        raise CannotWrite(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(own_code, "whole_file", refuse)
    with pytest.raises(SystemExit) as stop:
        script_main(tango_rl.main, tango_rl.make_parser, rl_flags("--run", "r", "--recipe", str(recipe)))
    assert stop.value.code == 1
    assert capsys.readouterr().err == (f"stopped: {path_of('runs', 'r', 'recipe.py')} cannot be written: "
                                       f"No space left on device\n")
