"""nanochat/pair, the models that come with the project: they work where a base directory has none, and are what
made.json says of them."""
import json
import os
import re
import shutil

import pytest
from conftest import parse

from nanochat.checkpoint import find_step, load_state_dict
from nanochat.cli import script_main
from nanochat.common import BadInput
from nanochat.rl.report.page import write_page
from nanochat.rl.report.report import compare, read_run, run_folder
from nanochat.storage.files import PAIR, found_at, path_of
from nanochat.tokenizer import Tokenizer
from scripts import chat_cli, chat_sft, demo, tango_rl, verifier_eval

MODELS = [("sft", "pair"), ("sft", "pair-ver"), ("rl", "pair-gen"), ("rl", "pair-ver")]


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A base directory that is not there yet; what comes with the project stays as it is."""
    seen = lambda: {(folder, name, os.stat(os.path.join(folder, name)).st_mtime_ns)
                    for folder, _, names in os.walk(PAIR) for name in names}
    before = seen()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    yield tmp_path / "base"
    assert seen() == before


def run(module, *flags: str) -> None:
    script_main(module.main, module.make_parser(), [*flags, "--device-type", "cpu"])


def test_the_demo_counts_what_made_json_says(base, capsys):
    """Within two problems of each count: another CPU rounds differently, and a greedy choice may be a near tie."""
    with open(os.path.join(PAIR, "made.json")) as f:
        made = json.load(f)
    run(demo)
    out = capsys.readouterr().out
    counts = [made["demo"][when] for when in ("before", "after")]
    words = [f"Of {made['problems']} problems right {{}} -> {{}}", "verdicts right {} -> {}",
             "verdicts on steps right {} of {} -> {} of {}"]
    found = re.search(", ".join(words).replace("{}", r"(\d+)"), out)
    told = [*(count["right"] for count in counts), *(count["hit"] for count in counts),
            *(count[name] for count in counts for name in ("steps_hit", "steps"))]
    assert all(abs(int(number) - count) <= 2 for number, count in zip(found.groups(), told[:4], strict=False))
    assert all(abs(int(number) - count) <= 10 for number, count in zip(found.groups()[4:], told[4:], strict=True))
    assert counts[0]["right"] < counts[1]["right"] and out.count("\nproblem ") == 5
    assert not base.exists()


def test_chat_and_evaluation_and_training_start_from_it(base, capsys):
    run(chat_cli, "-i", "rl", "-g", "pair-gen", "--verifier", "pair-ver", "-p", "3+5*2-4", "-t", "0")
    assert "3+5:8" in capsys.readouterr().out
    run(verifier_eval, "--verifier-tag", "pair-ver", "--generator-tag", "pair", "--max-problems", "2",
        "--num-samples", "2")
    assert "best of 2" in capsys.readouterr().out
    assert not base.exists()
    tango_rl.main(parse(tango_rl, ["--model-tag", "pair", "--run", "r", "--num-steps", "1", "--warmup-steps", "0",
                                   "--examples-per-step", "2", "--num-samples", "2", "--eval-examples", "2",
                                   "--device-type", "cpu"]))
    with open(base / "runs" / "r" / "config.json") as f:
        assert {start["tag"] for start in json.load(f)["starts"].values()} == {"pair", "pair-ver"}
    run(demo, "r", "--num-problems", "1", "--num-scored", "0")  # whose tokenizer is the project's, too
    assert "before RL: generator pair at step" in capsys.readouterr().out


def test_its_run_can_be_reported(base, tmp_path):
    run = read_run(run_folder("pair"))
    write_page([run], compare([run]), str(tmp_path / "report.html"))
    assert '"name":"pair"' in (tmp_path / "report.html").read_text() and len(run.records) == run.summary["steps"]


def test_what_the_base_directory_has_goes_first_and_the_names_are_taken(base, capsys):
    for kind, name in [*MODELS, ("runs", "pair")]:
        assert found_at(kind, name).startswith(PAIR) and found_at(kind, "other") == path_of(kind, "other")
    shutil.copytree(found_at("tokenizer"), base / "tokenizer")
    for module, flags in [(chat_sft, ["--model-tag", "pair", "--role", "generator"]),
                          (tango_rl, ["--model-tag", "pair", "--run", "pair"])]:
        parser = module.make_parser(*([flags] if module is tango_rl else []))
        with pytest.raises(SystemExit):
            script_main(module.main, parser, [*flags, "--device-type", "cpu"])
        assert "take another" in (said := capsys.readouterr().err) and said.count("\n") == 1
        assert "remove" not in said  # what comes with the project
    (base / "chatsft_checkpoints" / "pair").mkdir(parents=True)
    assert found_at("sft", "pair", "x") == str(base / "chatsft_checkpoints" / "pair" / "x")
    with pytest.raises(SystemExit):
        run(chat_cli, "-g", "pair", "-p", "1+1")
    assert "no checkpoint pair in" in capsys.readouterr().err


def test_beside_another_tokenizer_it_is_refused(base, capsys):
    Tokenizer.train(iter(["abab abcabc"] * 9), 267).save(str(base / "tokenizer"))
    with pytest.raises(BadInput, match="with another tokenizer"):  # before its context is looked at
        tango_rl.begin(["--model-tag", "pair", "--device-type", "cpu"])
    with pytest.raises(SystemExit):
        run(demo)
    assert "name another folder with NANOCHAT_BASE_DIR" in (said := capsys.readouterr().err) and said.count("\n") == 1


@pytest.mark.parametrize("stage, tag", MODELS)
def test_models_are_of_two_bytes_a_weight(stage, tag, base):
    weights = load_state_dict(found_at(stage, tag, f"model_{find_step(stage, tag):06d}.pt")).values()
    assert {str(tensor.dtype) for tensor in weights} == {"torch.bfloat16"}
    assert 5e5 < sum(tensor.numel() for tensor in weights) < 2e6


def test_nothing_in_it_names_a_place_on_the_machine_that_made_it():
    for folder, _, names in os.walk(PAIR):
        for name in names:
            if name.endswith((".json", ".jsonl")):
                with open(os.path.join(folder, name), encoding="utf-8") as f:
                    assert not re.search(r"(^|[\"' ])(/\w|~/)", f.read()), name
