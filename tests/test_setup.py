"""The set-up of the scripts in runs/, on a project without packages, and a project that was copied."""
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = """
[project]
name = "small"
version = "0"
[project.optional-dependencies]
dev = []
"""
# Stands in for `python -m venv`: installing takes a while and writes down that it was done; where there is a file fails
# it is not.
PYTHON = """#!/bin/bash
mkdir -p .venv/bin; touch .venv/bin/activate
cat > .venv/bin/python <<'END'
#!/bin/bash
case "$*" in
    *--version*) ;;
    *install*) sleep .2; [ ! -e fails ] || exit 1; echo installed >> installs ;;
esac
END
chmod +x .venv/bin/python
"""


@pytest.fixture
def project(tmp_path) -> Path:
    folder = tmp_path / "a b"
    (folder / "runs").mkdir(parents=True)
    shutil.copy(ROOT / "runs" / "setup.sh", folder / "runs")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    return folder


def start(folder, command: str = "set -euo pipefail; source runs/setup.sh; pwd", cwd: Path | None = None,
          **env: str | None) -> subprocess.Popen:
    """A shell that sources it. env: None takes a variable away."""
    env = os.environ | {"PYTHON": f"{folder}/python"} | env
    return subprocess.Popen(["bash", "-c", command], cwd=cwd or folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env={name: value for name, value in env.items() if value is not None})


def installs(folder) -> int:
    return len((folder / "installs").read_text().splitlines())


def test_two_scripts_started_at_once_set_up_once(project, tmp_path, monkeypatch):
    """CDPATH leads to no other project."""
    (tmp_path / "other" / "runs").mkdir(parents=True)
    monkeypatch.setenv("CDPATH", str(tmp_path / "other"))
    both = [start(project) for _ in range(2)]
    outputs = [script.communicate()[0] for script in both]
    assert [script.returncode for script in both] == [0, 0] and installs(project) == 1
    assert all(output.endswith(f"{project}\n") for output in outputs) and not (tmp_path / "other/.venv").exists()
    assert start(project).communicate() == (f"{project}\n", "")  # nothing more to do


@pytest.mark.parametrize("broken", ["bin/python", "installed"])
def test_what_is_broken_is_set_up_again(project, broken):
    start(project).communicate()
    (project / ".venv" / broken).unlink()
    if broken == "bin/python":
        (project / ".venv" / broken).symlink_to("/nowhere")  # as after the removal of the system's Python
    assert start(project).wait() == 0 and installs(project) == 2


@pytest.mark.parametrize("command, code, was_there", [
    ("bash runs/setup.sh", 1, True), ("source runs/setup.sh; echo $?", 0, False),
    ("set -e; source runs/setup.sh; echo on", 1, False)])
def test_an_installation_that_failed_is_not_taken_for_one(project, command, code, was_there):
    if was_there:  # and is older than pyproject.toml
        start(project).communicate()
        os.utime(project / ".venv" / "installed", (0, 0))
    (project / "fails").touch()
    script = start(project, command)
    out, err = script.communicate()
    assert script.returncode == code and out.splitlines()[1:] == (["1"] if code == 0 else [])
    assert err == f"error: {project}/.venv could not be set up, for the reason above: run this again\n"
    assert not (project / ".venv" / "installed").exists()
    (project / "fails").unlink()
    assert start(project).wait() == 0 and installs(project) == 1 + was_there


SHOW = 'set -euo pipefail; source "$0"; printf %s "${NANOCHAT_BASE_DIR-none}"'


def test_a_folder_is_meant_from_where_the_user_is(project, tmp_path):
    start(project).communicate()
    here = tmp_path / "else where"
    here.mkdir()
    for given, meant in {"my base": "{here}/my base", "./b": "{here}/./b", "~/my base": "/home/me&/my base",
                         "~": "/home/me&", "/a b/~/c": "/a b/~/c", "a~/b": "{here}/a~/b", "": "", None: "none"}.items():
        shown = start(project, SHOW.replace("$0", f"{project}/runs/setup.sh"), here, HOME="/home/me&",
                      NANOCHAT_BASE_DIR=given).communicate()
        assert shown == (meant.format(here=here), "")


def test_what_the_environment_cannot_have_is_one_line(project):
    home = "HOME is not set: set it, or NANOCHAT_BASE_DIR to the whole path of a folder"
    for env, said in (
            ({"HOME": None, "NANOCHAT_BASE_DIR": None}, home), ({"HOME": "", "NANOCHAT_BASE_DIR": ""}, home),
            ({"HOME": None, "NANOCHAT_BASE_DIR": "~/b"}, home),
            *(({"NPROC": number}, f"NPROC={number}: must be a number from 1 to 9999")
              for number in ("abc", "0", "-1", "2.5", "1 2", "99999"))):
        script = start(project, **env)
        assert script.communicate() == ("", f"error: {said}\n")
        assert script.returncode == 2 and not (project / ".venv").exists()
    script = start(project, PYTHON="no-such-python")
    err = script.communicate()[1].splitlines()
    assert script.returncode == 1 and "no-such-python" in err[0] and err[1].startswith("error: ")
    assert not (project / ".venv" / "installed").exists()
    assert start(project, HOME=None, NANOCHAT_BASE_DIR="b").wait() == 0  # nothing needs it


def runcpu(folder: Path, code: int) -> subprocess.CompletedProcess:
    """The script, where the tokenizer's training ends with this code."""
    shutil.copy(ROOT / "runs" / "runcpu.sh", folder / "runs")
    (folder / "runs" / "setup.sh").write_text(f"python() {{ return {code}; }}; torchrun() {{ :; }}")
    return subprocess.run(["bash", folder / "runs" / "runcpu.sh"], capture_output=True, text=True)


def test_only_what_goes_on_is_told_to_be_run_again(project):
    assert [(done.returncode, done.stderr) for done in (runcpu(project, code) for code in (0, 2))] == [(0, ""), (2, "")]
    done = runcpu(project, 143)
    assert done.returncode == 143 and done.stderr.startswith("Not finished. Run the same command again")


def smol(folder, **env: str) -> tuple[int, str, str]:
    """runs/smol.sh in a folder; without setup.sh, at which it would stop, where that is not there."""
    (folder / "runs").mkdir(exist_ok=True)
    shutil.copy(ROOT / "runs" / "smol.sh", folder / "runs")
    done = subprocess.run(["bash", folder / "runs" / "smol.sh"], capture_output=True, text=True, env=os.environ | env)
    return done.returncode, done.stdout, done.stderr


def test_smol_refuses_what_it_does_not_know_before_it_sets_up(tmp_path):
    (tmp_path / "train.jsonl").touch()
    for variable, said in (
            ("ARM=none", "there are tango fixed_verifier grpo"), ("TASK=none", "there are gsm_symbolic gsm8k words"),
            ("DATA=my", "is of TASK=gsm8k or TASK=words"), ("STEPS=abc", "must be a number"),
            ("STEPS=08", "must be a number"), ("EVALS=0", "must be at least 1"), ("LR=abc", "must be a number"),
            ("TASK=words", "DATA must name a folder with train.jsonl and test.jsonl"),
            ("SOURCE=none.gguf", "there is no such file"), ("SFT_LR=1e", "must be a number"),
            ("DEVICE=cuda", 'must be as in DEVICE="--device-type cuda"')):
        name, _, value = variable.partition("=")
        assert smol(tmp_path, **{name: value}) == (2, "", f"{variable}: {said}\n")
    assert smol(tmp_path, TASK="gsm8k", DATA=str(tmp_path)) == (2, "", f"DATA={tmp_path}: has no test.jsonl\n")


def test_smol_refuses_a_model_that_has_changed_since_its_import(tmp_path):
    """And a batch that its ranks cannot share."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "setup.sh").touch()
    assert smol(tmp_path, BATCH="9", NPROC="2") == (2, "", "BATCH=9: must be a multiple of NPROC=2\n")
    (tmp_path / "model.gguf").touch()
    mark = subprocess.check_output(["cksum"], input=f"{tmp_path}/model.gguf\n", text=True).split()[0]
    imported = tmp_path / "base" / "chatsft_checkpoints" / f"model-{mark}" / "meta_000000.json"
    imported.parent.mkdir(parents=True)
    imported.touch()
    os.utime(imported, ns=(0, os.stat(tmp_path / "model.gguf").st_mtime_ns - 1))
    assert smol(tmp_path, SOURCE=f"{tmp_path}/model.gguf", NANOCHAT_BASE_DIR=f"{tmp_path}/base") == (
        2, "", f"SOURCE={tmp_path}/model.gguf: has changed since it was imported: "
               f"give another NANOCHAT_BASE_DIR than {tmp_path}/base\n")


def test_a_folder_that_was_copied_or_moved_is_refused(project):
    start(project).communicate()
    shutil.copytree(project, project.parent / "copy")
    script = start(project.parent / "copy")
    assert script.communicate() == ("", f"error: {project.parent}/copy/.venv was set up in {project}: "
                                        "remove it, and run this again\n")
    assert script.returncode == 2
    (project.parent / "link").symlink_to(project)
    assert start(project.parent / "link").wait() == 0  # the same folder by another name


def test_a_script_runs_with_the_package_beside_it(tmp_path):
    """Started by its path, as torchrun does, Python would look for nanochat where it is installed."""
    for folder in ("nanochat", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    script = tmp_path / "scripts" / "plan_memory.py"
    run = lambda path: subprocess.run([sys.executable, script, "--help"], env={"PYTHONPATH": str(path)}, text=True,
                                      capture_output=True)
    done = run(ROOT)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (f"error: {script}: Python takes the package nanochat from {ROOT / 'nanochat'}, not from "
                           f"{tmp_path}: install it with `pip install -e {tmp_path}`, or set PYTHONPATH={tmp_path}\n")
    assert run(tmp_path).returncode == 0


SLOW = """import sys, time
sys.stderr.write("importing\\n"); sys.stderr.flush()
{work}
"""


@pytest.mark.parametrize("command, last", [
    (["-m", "scripts.slow"], "stopped by Ctrl-C"), (["-c", "import scripts.slow"], "KeyboardInterrupt"),
    (["other.py"], "KeyboardInterrupt")])
def test_ctrl_c_while_a_program_imports_is_one_line(tmp_path, command, last):
    """And nothing else changes: neither for other programs that import it nor for other errors. In the background of a
    shell SIGINT is ignored, also by what the suite starts there."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "__init__.py", tmp_path / "scripts")
    (tmp_path / "other.py").write_text("import scripts.slow\n")
    for work, expected in (("time.sleep(60)", last), ("raise ValueError('bad')", "ValueError: bad")):
        (tmp_path / "scripts" / "slow.py").write_text(SLOW.format(work=work))
        program = subprocess.Popen([sys.executable, *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                                   env=os.environ | {"PYTHONPATH": str(tmp_path)},
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        assert program.stderr.readline() == "importing\n"
        if "sleep" in work:
            program.send_signal(signal.SIGINT)
        lines = program.communicate()[1].splitlines()
        assert lines[-1] == expected and program.returncode == (-signal.SIGINT if "sleep" in work else 1)
        assert (len(lines) == 1) == (expected == "stopped by Ctrl-C")


@pytest.mark.parametrize("name", ["runcpu", "smol", "soak", "speedrun", "tango_qwen"])
def test_a_script_without_flags_starts_nothing_where_one_is_given(name):
    done = subprocess.run(["bash", ROOT / "runs" / f"{name}.sh", "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and re.fullmatch("--help: is no flag of .*\n", done.stderr)
