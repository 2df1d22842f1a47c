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
# A package imports from itself and from those behind it.
PACKAGES = ("scripts", "nanochat.recipes", "nanochat.rl", "tasks", "nanochat")
# import nothing of ours: all may import them
GROUND = ("nanochat.rl.advantages", "nanochat.rl.formats", "nanochat.rl.losses", "nanochat.rl.schedules")


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
    """The first of PACKAGES that a module is in; the ground is of the last."""
    return "nanochat" if module in GROUND else next(p for p in PACKAGES if module == p or module.startswith(p + "."))


def test_imports_point_down_only():
    level = {package: i for i, package in enumerate(PACKAGES)}
    upward = [(module, other) for module, path in modules().items() for other in imports_of(path)
              if level[package_of(other)] < level[package_of(module)]]
    assert not upward


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter({module: imports_of(path) - {module} for module, path in modules().items()}).prepare()


@pytest.mark.parametrize("module", GROUND)
def test_the_ground_imports_nothing_of_ours(module):
    assert imports_of(modules()[module]) == set()


FAMILIES = {"tango": "tango", "grpo": "tango", "gold_steps": "tango", "fixed_verifier": "tango",
            "fixed_generator": "tango", "outcome_verifier": "tango", "spin": "dpo", "dpo": "dpo",
            "critique_grpo_verifier": "critique_grpo", "refit": "tango", "simulated_judge": "tango",
            "think_rm_policy": "think_rm", "coverrl": "ttrl", "self_verify": "tango", "marti": "score",
            "debate": "dpo", "debate_judge": "dpo", "self_rewarding": "dpo", "r1_searcher": "search_r1",
            "ssrl": "search_r1", "ssp": "search_r1"}


def test_recipes_import_verbs_and_siblings_alone():
    for module, path in modules().items():
        if module.startswith("nanochat.recipes."):
            family = lambda other: FAMILIES.get(other.rpartition(".")[2], other.rpartition(".")[2])
            others = ({other for other in imports_of(path) if not other.startswith("nanochat.rl.")}
                      - {"nanochat.common", "nanochat.recipes", "tasks.common"})
            assert not {other for other in others if family(other) != family(module)}, module


def test_importing_every_module_does_no_work(tmp_path):
    """No argv is read, no CUDA probe, no file is written, nothing printed."""
    code = f"""
import sys, importlib, torch
def forbidden(*a, **k): raise AssertionError("CUDA probed at import")
torch.cuda.is_available = torch.cuda.get_device_capability = torch.cuda.init = forbidden
sys.argv = ["x", "--no-such-flag"]
for name in {sorted(modules())!r}:
    importlib.import_module(name)
"""
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(tmp_path / "base"), "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-1000:]
    assert os.listdir(tmp_path) == []


def readme() -> str:
    with open(os.path.join(ROOT, "README.md")) as f:
        return f.read()


def test_the_folders_of_the_readme_are_those_there_are():
    """Each line of the tree is `folder/  caption`; every folder with tracked files has one, and every one exists."""
    block = re.search(r"## Where things are\n\n.*?```\n(.*?)```", readme(), re.DOTALL)[1]
    listed = {line.split()[0].rstrip("/") for line in block.splitlines() if len(line.split()) > 1}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    folders = {os.path.dirname(f) for f in tracked} - {"", ".ci", ".github/workflows"}
    assert listed == {f for f in folders if not f.startswith(("dev/", "tests/"))}


def test_every_module_says_what_it_is_for():
    for module, path in modules().items():
        with open(path) as f:
            assert ast.get_docstring(ast.parse(f.read())), module
