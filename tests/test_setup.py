"""
The set-up of the scripts in runs/, on a project without packages, and a project that was copied.
"""
import shutil
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
# Stands in for `python -m venv`: installing takes a while and writes down that it was done.
PYTHON = """#!/bin/bash
mkdir -p .venv/bin; touch .venv/bin/activate
cat > .venv/bin/python <<'END'
#!/bin/bash
case "$*" in
    *--version*) ;;
    *install*) sleep .5; echo installed >> installs ;;
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


def start(folder) -> subprocess.Popen:
    command = "set -euo pipefail; PYTHON=$PWD/python; source runs/setup.sh; pwd"
    return subprocess.Popen(["bash", "-c", command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


def installs(folder) -> int:
    return len((folder / "installs").read_text().splitlines())


def test_two_scripts_started_at_once_set_up_once(project):
    both = [start(project) for _ in range(2)]
    outputs = [script.communicate()[0] for script in both]
    assert [script.returncode for script in both] == [0, 0] and installs(project) == 1
    assert all(output.endswith(f"{project}\n") for output in outputs)
    assert start(project).communicate() == (f"{project}\n", "")  # nothing more to do


def test_cdpath_leads_to_no_other_project(project, tmp_path, monkeypatch):
    (tmp_path / "other" / "runs").mkdir(parents=True)
    monkeypatch.setenv("CDPATH", str(tmp_path / "other"))
    assert start(project).communicate()[0].splitlines()[-1] == str(project) and not (tmp_path / "other/.venv").exists()


@pytest.mark.parametrize("broken", ["bin/python", "installed"])
def test_what_is_broken_is_set_up_again(project, broken):
    start(project).communicate()
    (project / ".venv" / broken).unlink()
    if broken == "bin/python":
        (project / ".venv" / broken).symlink_to("/nowhere")  # as after the removal of the system's Python
    assert start(project).wait() == 0 and installs(project) == 2


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
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "scripts" / "plan_memory.py"
    run = lambda path: subprocess.run([sys.executable, script, "--help"], env={"PYTHONPATH": str(path)}, text=True,
                                      capture_output=True)
    done = run(ROOT)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (f"error: {script}: Python takes the package nanochat from {ROOT / 'nanochat'}, not from "
                           f"{tmp_path}: install it with `pip install -e {tmp_path}`, or set PYTHONPATH={tmp_path}\n")
    assert run(tmp_path).returncode == 0
