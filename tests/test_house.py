"""
The house rules that can be checked: imports point down, importing does no work, the README's file tree is true.

    python -m pytest tests/test_house.py
"""
import ast
import importlib
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# A module imports from lower levels, or from its own where a line below says so. Level by level, from the ground up.
LEVELS = [
    {"nanochat.common", "nanochat.formats", "nanochat.kernels.launch", "nanochat.kernels.cpu", "nanochat.calculator", "nanochat.weights",
     "nanochat.flops", "tasks.grading_worker"},
    {"nanochat.hf.chat_template", "nanochat.ops", "nanochat.tokenizer", "nanochat.optim", "nanochat.dataloader", "tasks.grading"},
    {"nanochat.attention", "nanochat.hf.tokenizer", "tasks.common", "tasks.conversations"},
    {"nanochat.gpt", "tasks.chain", "tasks.last_letter", "tasks.gsm8k", "tasks.multiple_choice"},
    {"nanochat.hf.decoder", "tasks.mixture", "tasks.competition", "tasks.processbench"},
    {"nanochat.engine", "nanochat.checkpoint", "nanochat.hf.files", "nanochat.hf.shapes", "nanochat.kernels.linear_logprob",
     "tasks"},
    {"nanochat.kernels.linear_policy_loss"},
    {"nanochat.rl.prompts", "nanochat.rl.advantages", "nanochat.rl.losses", "nanochat.rl.schedules"},
    {"nanochat.rl.rewards", "nanochat.bench", "nanochat.loss_eval", "nanochat.core_eval"},
    {"nanochat.rl.rollouts", "nanochat.rl.roles", "nanochat.plan"},
    {"nanochat.rl.trainer", "nanochat.rl.evals", "nanochat.rl.progress", "nanochat.rl.state", "nanochat.rl.report"},
    {"nanochat.rl.page", "nanochat.rl.voting"},
    {"scripts.tok_train", "scripts.tok_eval", "scripts.task_text", "scripts.base_train", "scripts.base_eval", "scripts.chat_sft", "scripts.chat_eval",
     "scripts.chat_cli", "scripts.tango_rl", "scripts.report", "scripts.bench_step", "scripts.bench_kernels", "scripts.bench_engine",
     "scripts.hf_import", "scripts.hf_export", "scripts.hf_random", "scripts.verifier_eval",
     "scripts.plan_memory"},
    {"scripts.chat_rl", "scripts.plan_cost"},  # tango_rl with one role; what the others' flags cost
]
ONLY_TORCH = ("nanochat.rl.advantages", "nanochat.rl.losses", "nanochat.rl.schedules")


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


def imports_of(path: str) -> set[str]:
    """Our own modules that a file imports, at any depth of the file."""
    with open(path) as f:
        nodes = list(ast.walk(ast.parse(f.read())))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {f"{node.module}.{a.name}" for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names}
    names |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    return names & modules().keys()


def test_every_module_has_a_level():
    assert set().union(*LEVELS) == set(modules())


def test_imports_point_down_only():
    level = {module: i for i, names in enumerate(LEVELS) for module in names}
    upward = [(module, other) for module, path in modules().items() for other in imports_of(path) if other != module and level[other] >= level[module]]
    assert not upward


@pytest.mark.parametrize("module", ONLY_TORCH)
def test_the_formulas_import_nothing_of_ours_but_kernels(module):
    assert {name for name in imports_of(modules()[module]) if not name.startswith("nanochat.kernels.")} == set()


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


def test_the_file_tree_of_the_readme_is_the_tree():
    """Each line of the tree is `path  caption`; every tracked file but plain data has one, and every one exists."""
    block = re.search(r"## Where things are\n\n```\n(.*?)```", readme(), re.DOTALL)[1]
    listed, folder = set(), ""
    for line in block.splitlines():
        if not line.startswith(" "):
            folder = ""
        entry, caption = re.match(r"\s*(\S+)\s*(.*)", line).groups()
        if entry.endswith("/"):
            folder = entry.removeprefix("./")
            continue
        assert caption, line
        listed.add(folder + entry)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    ignored = re.compile(r"(^|/)(__init__\.py|\.gitignore)$|^dev/curves/|^LICENSE$")
    expected = {f for f in tracked if not ignored.search(f)} | {"tasks/__init__.py"}
    assert listed == expected


def test_flags_and_metrics_of_the_readme_exist():
    parsers = [module.make_parser() for name in modules() if name.startswith("scripts.") for module in [importlib.import_module(name)]]
    known = {flag for parser in parsers for flag in parser._option_string_actions} | {"--upstream"}
    known |= {"--standalone", "--nproc_per_node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--help"}
    with open(os.path.join(ROOT, "runs", "fig4.sh")) as f:
        known |= set(re.findall(r" (--[a-z]+)\) [A-Z\[]", f.read()))  # the cases of its argument loop
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", readme())) <= known


def test_files_and_functions_stay_readable():
    """The usual sizes: files to 450 lines, functions to 70 (argument parsers aside)."""
    for module, path in modules().items():
        with open(path) as f:
            source = f.read()
        assert source.count("\n") <= 450, module
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name != "make_parser":
                assert node.end_lineno - node.lineno < 70, (module, node.name)
