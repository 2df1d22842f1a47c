"""
Every flag of every script with values that it cannot mean: each is refused in one line with nothing written, or taken
and the work begins. Never a traceback, and never a size that no machine has.

    python -m pytest tests/test_bad_flags.py
"""
import argparse
import functools
import json
import os
import shutil

import pytest
import torch
from conftest import COMMON_RL_FLAGS, TASK_FLAGS, parse, rl_flags
from test_bad_input import files_under
from test_recipes import OPTIONS

from dev.bench import attention as bench_attention, engine as bench_engine, kernels as bench_kernels, step as bench_step
from dev.experiments import run as run_experiment, step_retry, verify_or_sample
from nanochat import dataloader, recipes
from nanochat.checkpoint import load_model, save_model
from nanochat.cli import script_main
from nanochat.dataloader import open_rows
from nanochat.hf.files import read_model
from nanochat.rl.learn import roles
from nanochat.rl.run import prepare
from scripts import (base_eval, base_train, chat_cli, chat_eval, chat_rl, chat_sft, demo, eval_suite, hf_export,
                     hf_import, hf_random, label_steps, plan_cost, plan_memory, report, tango_rl, task_text, tok_eval,
                     tok_train, verifier_eval)
from tasks import TASKS, task_flags

HUGE = str(10 ** 15)
INTEGERS = ["", "1.5", "-1", "0", HUGE, "9" * 30, "nan", "ü💥"]
FLOATS = [*INTEGERS, "-0.5", "1e300", "inf"]
TEXTS = ["", "x", "-1", HUGE, "ü💥", "../../etc", "/", "a\0b", "\udcff", "a" * 250, "a" * 5000, "'", "a,b", "*", "[",
         "FILE", "FILE/x", "BINARY", "FOLDER"]
# Integers that take no room, however large: where something ends, how often it is done, what is drawn.
ONLY_NUMBERS = {"seed", "num_steps", "num_iterations", "warmup_steps", "save_every", "eval_every", "sample_every",
                "eval_tokens", "split_tokens", "max_per_task", "max_examples", "max_chars", "doc_cap",
                "num_scored", "max_rollouts", "max_rows", "max_cached_tokens", "top_k", "micro_batch_tokens",
                "rows_per_chunk", "from_step", "own_step", "prover_step", "supervisor_step", "max_new_tokens",
                "verifier_shared_layers", "first", "keep"}
FEW = ["-1", "0", HUGE, "ü💥", "FILE"]  # of a flag that was tried with all values in another recipe
TASK_PREFIXES = tuple(name for name in TASKS if name != "chain")


class Begun(BaseException):
    """The flags were taken: here the work would begin."""


def begin(*_, **__):
    raise Begun


# Of each script: the flags of a call that it takes, and the names in it where its work begins.
CPU = ["--device-type", "cpu"]
NEW = [*CPU, "--model-tag", "new", "--depth", "1", "--n-embd", "32", "--n-head", "1", "--sequence-len", "64"]
CALLS = {
    base_eval: ([*CPU, "--model-tag", "base"], ["generate", "bits_per_byte", "evaluate_core_task"]),
    base_train: ([*NEW, "--data", "texts", "--total-batch-size", "512", "--num-iterations", "1"], ["begin_run"]),
    bench_attention: (CPU, ["make_inputs"]),
    bench_engine: (CPU, ["transformers"]),
    bench_kernels: (CPU, ["make_inputs"]),
    bench_step: (CPU, ["one_step"]),
    chat_cli: ([*CPU, "-g", "tiny", "-p", "1+2"], ["generate"]),
    chat_eval: ([*CPU, "-g", "tiny", "-i", "sft", "-x", "1"], ["Sampler", "letter_accuracy"]),
    chat_sft: ([*TASK_FLAGS, *NEW, "--role", "generator"], ["begin_run"]),
    demo: (["r", *CPU], ["solve"]),
    eval_suite: ([*CPU, "-g", "tiny", "-i", "sft", "-x", "1", "--verifier-tag", "tiny-ver", "--benchmarks",
                  "last_letter", "processbench"], ["solved_row", "judged_row"]),
    hf_export: (["--model-tag", "imported", "--stage", "sft", "--to", "to"], ["claim_repo", "load_model"]),
    hf_import: (["--source", "model", "--model-tag", "new"], ["keep_tokenizer"]),
    hf_random: (["--to", "to", "--n-layer", "1", "--n-embd", "32", "--vocab-size", "300"], ["allocate"]),
    label_steps: ([*CPU, "--generator-tag", "tiny", "--num-problems", "1", "--out", "to.jsonl"], ["sampled"]),
    plan_cost: ([], ["rl_rows"]),
    plan_memory: (["--generator", "qwen2.5-0.5b"], []),
    report: (["r"], ["write_page"]),
    run_experiment: (["--seeds", "1"], ["carry_out_all"]),
    step_retry: ([*CPU, "--verifier-tag", "tiny-ver", "--generator-tag", "tiny", "--max-problems", "2"],
                 ["solved_rows"]),
    task_text: ([*TASK_FLAGS, "--out", "to", "--num-documents", "9"], []),
    tok_eval: ([], ["compression_table"]),
    tok_train: ([*TASK_FLAGS, "--num-texts", "2", "--vocab-size", "266"], ["check_models"]),
    verifier_eval: ([*CPU, "--verifier-tag", "tiny-ver", "--generator-tag", "tiny", "--max-problems", "1"],
                    ["evaluate_best_of_n", "evaluate_processbench"]),
    verify_or_sample: ([*CPU, "--verifier-tag", "tiny-ver", "--generator-tag", "tiny", "--max-problems", "2"],
                       ["verified_solutions"]),
}


@pytest.fixture(scope="module")
def furnished(sft_base, tmp_path_factory):
    """A folder with all that the calls need: checkpoints of every stage, a finished run, text, a model of the hub's
    form."""
    folder = tmp_path_factory.mktemp("furnished")
    shutil.copytree(sft_base, folder / "base")
    (folder / "texts").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / "texts" / name).write_text((json.dumps({"text": "some words " * 20}) + "\n") * 200)
    (folder / "FILE").write_text("plain text\n")
    (folder / "BINARY").write_bytes(bytes(range(256)) * 4)
    (folder / "FOLDER").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder / "base"))
        patch.chdir(folder)
        model, meta = load_model("sft", "tiny", torch.device("cpu"), torch.float32)
        save_model("base", "base", 1, model, {})
        tango_rl.main(parse(tango_rl, rl_flags("--run", "r", "--num-steps", "1", "--warmup-steps", "1")))
        hf_random.main(parse(hf_random, ["--n-layer", "1", "--n-embd", "32", "--vocab-size", "300", "--to", "model"]))
        save_model("sft", "imported", 0, read_model("model", torch.device("cpu"), torch.float32), {})
    return folder


@pytest.fixture
def place(furnished, tmp_path, monkeypatch):
    """A copy of it, from whose depth no path of the tests leads out."""
    folder = tmp_path / "deep" / "down"
    shutil.copytree(furnished, folder)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder / "base"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.snapshot_download", begin)
    monkeypatch.setattr(dataloader, "BUFFER", 8)
    monkeypatch.setattr(argparse.ArgumentParser, "format_help", lambda self: "")  # which the trainer tries
    read, known = roles.fingerprint, {}

    def fingerprint_once(path):
        key = path, os.stat(path).st_mtime_ns if os.path.exists(path) else None
        if key not in known:
            known[key] = read(path)
        return known[key]
    monkeypatch.setattr(roles, "fingerprint", fingerprint_once)
    monkeypatch.setattr(verifier_eval, "load_model", functools.cache(verifier_eval.load_model))
    opened = functools.cache(lambda *sources: open_rows(list(sources)))
    monkeypatch.setattr(dataloader, "open_rows", lambda sources: opened(*sources))
    return tmp_path


def kind_of(action) -> type | None:
    """int or float, of a type that has bounds too."""
    return getattr(action.type, "kind", action.type)


def calls_of(parser, flags: list[str], is_tested, was_tried) -> list[tuple]:
    """(flag, value, whole call) for every value of every flag that takes one, of those that were tried elsewhere for a
    few. A flag of a task goes with the task."""
    calls = []
    for action in parser._actions:
        if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction) or not is_tested(action.dest):
            continue
        task = next((["--task", name] for name in TASK_PREFIXES if action.dest.startswith(f"{name}_")), [])
        for value in {int: INTEGERS, float: FLOATS}.get(kind_of(action), TEXTS):
            if was_tried(action.dest) and value not in FEW:
                continue
            words = ([*flags, *task, f"{action.option_strings[-1]}={value}"] if action.option_strings
                     else [value, *flags[1:]])
            calls.append((action, value, words))
    return calls


def outcome(script, parser, flags: list[str], place, capsys, files: dict) -> str:
    """"taken", "refused", or in words what else became of a call. files: what is in the place, {} where that is not
    known; kept up to date."""
    before = files.copy() or files_under(place)
    files.clear()
    try:
        script_main(script.main, parser, flags)
    except Begun:
        return "taken"
    except SystemExit as stop:
        err = capsys.readouterr().err
        if stop.code != 2 or not err.startswith("error: ") or err.count("\n") != 1:
            return f"exit code {stop.code}: {err}"
        files |= files_under(place)
        return "refused" if files == before else "refused, but something was written"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def failures(script, parser, flags: list[str], place, capsys, is_tested=lambda name: True,
             takes_room=lambda name: False, was_tried=lambda name: False) -> list[str]:
    """What is wrong with what became of the calls, a line for each."""
    files, found = {}, []
    assert outcome(script, parser, flags, place, capsys, files) == "taken"
    for action, value, words in calls_of(parser, flags, is_tested, was_tried):
        became = outcome(script, parser, words, place, capsys, files)
        capsys.readouterr()
        is_huge = kind_of(action) is int and value == HUGE and takes_room(action.dest)
        if became != "refused" and (is_huge or became != "taken"):
            found.append(f"{action.dest} {value[:40]!r}: {became}")
    return found


@pytest.mark.parametrize("script", CALLS, ids=lambda script: script.__name__)
def test_every_flag_is_taken_or_refused_in_one_line(script, place, monkeypatch, capsys):
    flags, beginnings = CALLS[script]
    for name in beginnings:
        monkeypatch.setattr(script, name, begin)
    is_tested = (lambda name: True) if script is task_text else lambda name: name not in task_flags()
    takes_room = lambda name: name not in ONLY_NUMBERS and script is not plan_memory  # which only multiplies
    assert failures(script, script.make_parser(), flags, place, capsys, is_tested, takes_room) == []


def no_folder(base) -> None:
    shutil.rmtree(base)
    base.touch()


def no_tokenizer(base) -> None:
    (base / "tokenizer" / "tokenizer.pkl").unlink()
    (base / "tokenizer" / "tokenizer.pkl").mkdir()


def no_stages(base) -> None:
    for name in ("base_checkpoints", "chatsft_checkpoints", "chatrl_checkpoints", "runs", "logs"):
        shutil.rmtree(base / name, ignore_errors=True)
        (base / name).touch()


@pytest.mark.parametrize("damage", [no_folder, no_tokenizer, no_stages])
def test_a_base_folder_that_is_none_is_no_traceback(damage, place, monkeypatch, capsys):
    for script, (_, beginnings) in CALLS.items():
        for name in beginnings:
            monkeypatch.setattr(script, name, begin)
    damage(place / "deep" / "down" / "base")
    became = {script.__name__: outcome(script, script.make_parser(), flags, place, capsys, {})
              for script, (flags, _) in CALLS.items()}
    assert set(became.values()) == {"taken", "refused"}, became
    if damage is no_folder:
        needed = {"base_eval", "base_train", "chat_cli", "chat_eval", "chat_sft", "demo", "eval_suite", "hf_export",
                  "hf_import", "label_steps", "report", "run", "step_retry", "tok_eval", "tok_train", "verifier_eval",
                  "verify_or_sample"}
        assert {name.rpartition(".")[2] for name in became if became[name] == "refused"} == needed


@functools.cache
def first_recipes() -> dict[str, str]:
    """Flag -> the first recipe that has it: there all values are tried."""
    found: dict[str, str] = {}
    for recipe in ("tango", *recipes.names()):
        for action in tango_rl.make_parser(["--recipe", recipe])._actions:
            found.setdefault(action.dest, recipe)
    return found


@pytest.mark.parametrize("recipe", recipes.names())
def test_every_flag_of_every_recipe_is_taken_or_refused_in_one_line(recipe, place, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "check_problems", begin)
    flags = rl_flags("--recipe", recipe, *OPTIONS.get(recipe, []))
    shared = set() if recipe == "tango" else {action.dest for action in chat_rl.make_parser()._actions} - {"lr"}
    is_tested = lambda name: name not in shared and name not in task_flags() and name != "recipe"
    was_tried = lambda name: first_recipes()[name] != recipe
    assert failures(tango_rl, tango_rl.make_parser(flags), flags, place, capsys, is_tested, was_tried=was_tried) == []


@pytest.mark.parametrize("name", TEXTS)
def test_any_name_of_a_recipe_is_taken_or_refused_in_one_line(name, place, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "check_problems", begin)
    assert outcome(tango_rl, tango_rl.make_parser, [*COMMON_RL_FLAGS, "--recipe", name], place, capsys, {}) == "refused"
