"""runs/speedrun.sh: both scales give every script flags that it takes, in the order of the stages, and the computed
figures of dev/stack.md are its own."""
import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from nanochat.common import BadInput
from scripts import plan_cost

ROOT = Path(__file__).resolve().parent.parent
STAGES = ["tok_train", "tok_eval", "base_train", "base_eval", "chat_sft", "chat_eval", "chat_sft", "tango_rl",
          "report", "chat_eval", "chat_cli"]
# Stands in for runs/setup.sh: the programs write down how they were called.
SETUP = """
cd "$(dirname "${BASH_SOURCE[0]}")/.."
record() { printf '%s\\037' "$@" >> "$CALLS"; printf '\\036' >> "$CALLS"; }
python() { record python "$@"; }
torchrun() { record torchrun "$@"; }
hf() { record hf "$@"; }
"""


def speedrun(tmp_path, scale: str) -> subprocess.CompletedProcess:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "speedrun.sh").write_text((ROOT / "runs" / "speedrun.sh").read_text())
    (tmp_path / "runs" / "setup.sh").write_text(SETUP)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SCALE": scale,
           "NANOCHAT_BASE_DIR": str(tmp_path / "base"), "CALLS": str(tmp_path / "calls")}
    return subprocess.run(["bash", "runs/speedrun.sh"], cwd=tmp_path, env=env, capture_output=True, text=True)


def calls_of(tmp_path, scale: str, shard: str = "shard_00003.jsonl") -> list[list[str]]:
    """The commands that the script runs, with text already there up to this shard."""
    for folder in ("text", "base_data_climbmix"):
        (tmp_path / "base" / folder).mkdir(parents=True)
        (tmp_path / "base" / folder / shard).touch()
    done = speedrun(tmp_path, scale)
    assert done.returncode == 0, done.stderr
    return [call.split("\x1f")[:-1] for call in (tmp_path / "calls").read_text().split("\x1e")[:-1]]


def script_and_flags(call: list[str]) -> tuple[str, list[str]]:
    if call[0] == "python":
        assert call[1] == "-m"
        return call[2].removeprefix("scripts."), call[3:]
    at = call.index("--")
    return re.fullmatch(r"scripts/(\w+)\.py", call[at - 1])[1], call[at + 1:]


def refuse(message: str):
    raise BadInput(message)


@pytest.mark.parametrize("scale", ["full", "tiny"])
def test_every_stage_takes_its_flags(tmp_path, scale):
    calls = calls_of(tmp_path, scale)
    stages = [script_and_flags(call) for call in calls if call[0] != "hf"]
    names = [name for name, _ in stages]
    assert names == (["plan_cost", *STAGES] if scale == "full" else STAGES)
    for name, flags in stages:
        parser = importlib.import_module(f"scripts.{name}").make_parser()
        parser.error = refuse
        args = parser.parse_args(flags)
        if name in ("base_train", "chat_sft", "tango_rl"):
            assert args.resume_from_step == "auto" and args.save_every > 0, name
    assert (calls[1][0] == "hf") == (scale == "full")


def test_text_that_is_not_whole_is_made_again_and_an_unknown_scale_refused(tmp_path):
    names = [script_and_flags(call)[0] for call in calls_of(tmp_path, "tiny", "shard_00002.jsonl")]
    assert names == ["task_text", *STAGES]
    (tmp_path / "new").mkdir()
    done = speedrun(tmp_path / "new", "huge")
    assert done.returncode == 2 and done.stderr.strip() == "SCALE=huge: full or tiny"
    assert os.listdir(tmp_path / "new") == ["runs"]


def test_the_figures_of_the_page_are_computed(tmp_path, capsys):
    """The stage table's hours and dollars are what plan_cost makes of the script's own flags."""
    flags = next(flags for name, flags in map(script_and_flags,
                                              (call for call in calls_of(tmp_path, "full") if call[0] != "hf"))
                 if name == "plan_cost")
    plan_cost.main(plan_cost.make_parser().parse_args(flags))
    rows = {name: (hours, dollars) for name, hours, dollars in re.findall(
                r"^(.*?)  +([\d.]+) h  \$ *([\d.]+)", capsys.readouterr().out, re.MULTILINE)}
    stages = {"pretraining": "`base_train`", "base_eval, bits per byte": "`base_eval`",
              "SFT of the generator": "`chat_sft --role generator`",
              "SFT of the verifier": "`chat_sft --role verifier`", "RL Tango": "`tango_rl`",
              "chat_eval": "`chat_eval`", "chat_rl in its place": "`chat_rl`"}
    assert rows.keys() == {*stages, "in all, of these"}
    page = (ROOT / "dev" / "stack.md").read_text()
    shown = {stage: re.search(rf"^\| {re.escape(stage)} \|.*\| ([\d.]+) h, \$([\d.]+)[^|]*\|$", page,
                              re.MULTILINE).groups() for stage in stages.values()}
    shown["in all"] = re.search(r"in all ([\d.]+) h, \$([\d.]+)\.", page).groups()
    for name, computed in rows.items():
        for figure, value in zip(shown[stages.get(name, "in all")], computed, strict=True):
            assert (abs(float(figure) - float(value))
                    <= 0.51 * 10 ** -len(figure.partition(".")[2]) + 5e-4), (name, figure, value)
