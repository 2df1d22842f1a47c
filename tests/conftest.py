"""Fixtures: a base directory with a tokenizer and a tiny SFT pair, made once per test session."""
import argparse
import os
import shutil

import pytest
import torch

os.environ.setdefault("WANDB_MODE", "disabled")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any module of ours is imported
# The smallest chain that RL can work on: two operations at most, results modulo 3.
TASK_FLAGS = ["--chain-modulus", "3", "--chain-min-steps", "1", "--chain-max-steps", "2"]
COMMON_RL_FLAGS = [*TASK_FLAGS, "--device-type", "cpu", "--model-tag", "tiny", "--max-new-tokens", "28", "--examples-per-step", "4",
                   "--num-samples", "4", "--eval-examples", "8", "--lr", "1e-3", "--num-steps", "4"]
TANGO_FLAGS = [["--verifier-max-new-tokens", "36"], ["--warmup-steps", "2"], ["--generator-steps", "2"], ["--verifier-balance"],
               ["--verifier-replay", "0.5"], ["--alpha-start", "0.5"], ["--alpha-end", "0.05"]]
RL_FLAGS = [*COMMON_RL_FLAGS, *(word for words in TANGO_FLAGS for word in words)]


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def parse(script, flags: list[str]) -> argparse.Namespace:
    """The flags as the script reads them; a trainer's parser depends on the recipe among them."""
    is_trainer = script.__name__ in ("scripts.tango_rl", "scripts.chat_rl")
    return (script.make_parser(flags) if is_trainer else script.make_parser()).parse_args(flags)


def rl_flags(*flags: str) -> list[str]:
    """The flags of a short run, with those of tango's that the recipe named in `flags` knows too."""
    from scripts import tango_rl
    known = tango_rl.make_parser(list(flags))._option_string_actions
    return [*COMMON_RL_FLAGS, *(word for words in TANGO_FLAGS if words[0] in known for word in words), *flags]


@pytest.fixture(scope="session")
def sft_base(tmp_path_factory):
    """A base directory that holds a tokenizer and the SFT checkpoints tiny and tiny-ver: fluent, half right."""
    from scripts import chat_sft, tok_train
    base = tmp_path_factory.mktemp("base")
    old = os.environ.get("NANOCHAT_BASE_DIR")
    os.environ["NANOCHAT_BASE_DIR"] = str(base)
    torch.set_num_threads(1)  # at this size threads only wait for each other
    tok_train.main(parse(tok_train, TASK_FLAGS))
    model = [*TASK_FLAGS, "--device-type", "cpu", "--model-tag", "tiny", "--depth", "2", "--n-embd", "64", "--n-head", "2", "--sequence-len", "128",
             "--examples-per-step", "32", "--max-new-tokens", "28", "--num-sampled", "64"]
    chat_sft.main(parse(chat_sft, ["--role", "generator", "--num-steps", "200", *model]))
    chat_sft.main(parse(chat_sft, ["--role", "verifier", "--num-steps", "200", *model]))
    if old is None:
        del os.environ["NANOCHAT_BASE_DIR"]
    else:
        os.environ["NANOCHAT_BASE_DIR"] = old
    return base


@pytest.fixture
def base(sft_base, tmp_path, monkeypatch):
    """A private copy of sft_base, set as NANOCHAT_BASE_DIR."""
    shutil.copytree(sft_base, tmp_path / "base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"
