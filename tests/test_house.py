"""
The house rules that can be checked: imports point down, importing does no work, the README's file tree is true.

    python -m pytest tests/test_house.py
"""
import ast
import functools
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# A module imports from its own package and from those after it.
PACKAGES = ("scripts", "nanochat.recipes", "nanochat.rl.run", "nanochat.rl.report", "nanochat.rl.verify",
            "nanochat.rl.measure", "nanochat.rl.play", "nanochat.rl.learn", "nanochat.rl.credit", "nanochat.rl.records",
            "tasks", "nanochat.supervised", "nanochat.checkpoint", "nanochat.hf", "nanochat", "nanochat.storage",
            "nanochat.kernels", "nanochat.cli", "nanochat.common")  # and all may ask `nanochat` for its version


@functools.cache
def modules() -> dict[str, str]:
    found = {}
    for top in ("nanochat", "tasks", "scripts"):
        for folder, _, names in os.walk(os.path.join(ROOT, top)):
            for name in names:
                path = os.path.join(folder, name)
                module = os.path.relpath(path, ROOT)[:-3].replace(os.sep, ".").removesuffix(".__init__")
                if name.endswith(".py") and os.path.getsize(path):
                    found[module] = path
    return found


@functools.cache
def imports_of(path: str) -> set[str]:
    """Our own modules that a file imports, at any depth of the file."""
    with open(path) as f:
        nodes = list(ast.walk(ast.parse(f.read())))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {f"{node.module}.{a.name}" for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names}
    names |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    return names & modules().keys()


def package_of(module: str) -> str:
    """The innermost of PACKAGES that a module is in."""
    return max((p for p in PACKAGES if f"{module}.".startswith(f"{p}.")), key=len)


def test_imports_point_down_only():
    level = {package: i for i, package in enumerate(PACKAGES)}
    upward = [(module, other) for module, path in modules().items() for other in imports_of(path)
              if other != "nanochat" and level[package_of(other)] < level[package_of(module)]]
    assert not upward


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter({module: imports_of(path) - {module} for module, path in modules().items()}).prepare()


def test_recipes_import_verbs_and_their_family_alone():
    for module, path in modules().items():
        if module.startswith("nanochat.recipes."):
            verbs = ("nanochat.rl.", "nanochat.cli", "nanochat.common", "nanochat.kernels.losses", "tasks.common",
                     "tasks.formats", "nanochat.recipes")
            family = ".".join(module.split(".")[:3])
            others = {other for other in imports_of(path)
                      if not (other in verbs or other.startswith(("nanochat.rl.", f"{family}.")) or other == family)}
            assert not others, module


def test_importing_every_module_does_no_work(tmp_path):
    """No argv or environment is read, no CUDA probe, no seed, socket or signal, no file is written, nothing printed."""
    code = f"""
import sys, importlib, os, signal, socket, torch
def forbidden(*a, **k): raise AssertionError("work at import")
torch.cuda.is_available = torch.cuda.get_device_capability = torch.cuda.init = torch.cuda.is_bf16_supported = forbidden
torch.manual_seed = torch.distributed.init_process_group = socket.socket.connect = signal.signal = forbidden
os.makedirs = os.mkdir = forbidden
sys.argv = ["x", "--no-such-flag"]
for name in {sorted(modules())!r}:
    importlib.import_module(name)
"""
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(tmp_path / "base"), "PYTHONPATH": ROOT, "RANK": "x",
           "NANOCHAT_DTYPE": "nonsense"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-1000:]
    assert os.listdir(tmp_path) == []


def readme() -> str:
    with open(os.path.join(ROOT, "README.md")) as f:
        return f.read()


def test_the_folders_of_the_readme_are_those_there_are():
    """Each line of the tree is `folder/  caption`; every folder with tracked files has one or is in one that has, and
    every one exists."""
    block = re.search(r"## Where things are\n\n.*?```\n(.*?)```", readme(), re.DOTALL)[1]
    listed = {line.split()[0].rstrip("/") for line in block.splitlines() if len(line.split()) > 1}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    folders = {"/".join(f.split("/")[:-1][:2]) for f in tracked} - {""}
    assert listed == {f for f in folders if not f.startswith((".", "dev/", "tests/"))}


def test_every_module_says_what_it_is_for():
    for module, path in modules().items():
        with open(path) as f:
            assert ast.get_docstring(ast.parse(f.read())), module
