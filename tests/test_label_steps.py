"""
label_steps: formulas by hand, the search against a scan, estimates against exact enumeration, files and refusals.

    python -m pytest tests/test_label_steps.py
"""
import json
import math
import os
from fractions import Fraction
from itertools import product

import pytest
import torch
from conftest import TASK_FLAGS, on_two_ranks, parse
from test_bad_input import files_under

from nanochat.checkpoint import load_model
from nanochat.common import script_main
from nanochat.rl.prefixes import VALUES, Cut, Meter, best_of_chance, complete, completion_logprobs, right_share
from nanochat.rl.prompts import generator_prompt, read_solution
from nanochat.rl.sampling import Sampler
from nanochat.rl.scores import pass_at_k
from nanochat.rl.step_labels import METHODS, agreement, any_right, gains, relative_progress, run_plans, until_error
from nanochat.tokenizer import Tokenizer
from scripts import chat_sft, label_steps
from tasks import make_task

FLAGS = ["--device-type", "cpu", "--generator-tag", "tiny", "--num-problems", "3", "--num-samples", "2",
         "--num-completions", "4"]


def run(out, *flags: str) -> tuple[list[dict], dict]:
    """The lines and the summary that a call writes."""
    label_steps.main(parse(label_steps, [*FLAGS, "--out", str(out), *flags]))
    summary = out.with_name(out.name.replace(".jsonl", ".summary.json"))
    return [json.loads(line) for line in out.read_text().splitlines()], json.loads(summary.read_text())


@pytest.mark.parametrize("method", METHODS)
def test_smoke(base, tmp_path, method):
    rows, summary = run(tmp_path / "a.jsonl", "--method", method)
    print(rows[0], summary)
