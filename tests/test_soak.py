"""The comparison of a run that was killed with one that was not: it finds a flipped bit and nothing else."""
import importlib.util
import json
import math
import os
import shlex
import shutil
import sys

import pytest
import torch
from conftest import parse, rl_flags

from nanochat.common import BadInput
from scripts import tango_rl

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
spec = importlib.util.spec_from_file_location("soak", os.path.join(ROOT, "dev", "soak.py"))
soak = importlib.util.module_from_spec(spec)
spec.loader.exec_module(soak)


def test_differences_are_those_of_bits():
    x = torch.tensor([1.0, math.nan, 0.0])
    a = {"x": x, "y": [1, 2.5, "t", None, math.nan], "z": (True, {"n": torch.tensor(3)})}
    assert soak.differences(a, {**a, "x": x.clone()}, "a") == []
    assert soak.differences(a, {**a, "x": torch.tensor([1.0, math.nan, -0.0])}, "a") == ["a['x']"]
    assert soak.differences(a, {**a, "x": x.double()}, "a") == ["a['x']"]
    assert soak.differences(a, {**a, "y": [1, 2.5, "t", None, 0.0]}, "a") == ["a['y'][4]"]
    assert soak.differences(a, {**a, "z": (1, {"n": torch.tensor(3)})}, "a") == ["a['z'][0]"]
    assert soak.differences(a, {"x": x}, "a") == ["a"]


def test_the_commands_of_the_script_are_read_as_they_are_meant():
    with open(os.path.join(ROOT, "runs", "soak.sh")) as f:
        lines = f.read().replace("\\\n", " ").splitlines()
    calls = [parse(soak, shlex.split(line.replace("$MINUTES", "5"))[2:])
             for line in lines if line.startswith("python dev/soak.py")]
    assert [args.what for args in calls] == ["kill", "plot", "compare"]
    assert calls[0].minutes == 5 and calls[0].words[:3] == ["python", "-m", "scripts.tango_rl"]


def test_two_runs_are_the_same_until_a_bit_is_flipped(base):
    """Of the same flags, one of them stopped and continued."""
    train = lambda *flags: tango_rl.main(parse(tango_rl, rl_flags("--save-every", "1", "--recipe", "grpo", *flags)))
    train("--run", "one", "--num-steps", "2")
    train("--run", "two", "--num-steps", "1")
    train("--run", "two", "--num-steps", "2", "--resume-from-step", "auto")
    assert "are the same, bit for bit, at 2 saved steps up to 2, and in the 2 records" in soak.compare("one", "two")
    soak.plot("one", str(base / "out"))
    header, first, _ = (base / "out" / "one.csv").read_text().splitlines()
    assert header == "step,role,resident_gb,open_files,timing_s/step" and first.startswith("0,generator,")
    assert (base / "out" / "one.png").stat().st_size > 1000
    path = base / "chatrl_checkpoints" / "two-gen" / "optim_000002_rank0.pt"
    shutil.copy(path, base / "kept.pt")
    state = torch.load(path, weights_only=True)
    moments = state["state"][max(state["state"])]["exp_avg"]
    moments.view(torch.int32).flatten()[0] ^= 1
    torch.save(state, path)
    with pytest.raises(BadInput, match="differ: gen/optim_000002_rank0.pt.*exp_avg"):
        soak.compare("one", "two")
    shutil.copy(base / "kept.pt", path)
    log = base / "runs" / "two" / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[1]["gen/loss"] = math.nextafter(lines[1]["gen/loss"], math.inf)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(BadInput, match=r"differ: metrics.jsonl\[1\]\['gen/loss'\]"):
        soak.compare("one", "two")


def test_what_is_killed_comes_to_its_end(monkeypatch, capsys):
    monkeypatch.setattr(soak.random.Random, "uniform", lambda self, low, high: 30.0)
    soak.kill([sys.executable, "-c", "pass"], 1, 0)
    assert capsys.readouterr().out == "1 x ended by itself with 0\n"
    soak.kill([sys.executable, "-c", "import sys; sys.exit(2)"], 1, 0)
    assert capsys.readouterr().out == "1 x ended by itself with 2\n"


def test_a_run_seeds_torchs_generator_for_what_a_recipe_draws(base):
    torch.manual_seed(12345)
    tango_rl.main(parse(tango_rl, rl_flags("--recipe", "grpo", "--num-steps", "1", "--seed", "7")))
    assert torch.initial_seed() == 7
