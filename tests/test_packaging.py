"""
What an installation holds, and what the files around the code say: version, license, Python versions.

    python -m pytest tests/test_packaging.py
"""
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from nanochat import __version__

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # pytest brings it there

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
TOP = {"nanochat", "tasks", "scripts"}


def test_the_top_level_packages_are_three():
    assert {package.partition(".")[0] for package in SETUPTOOLS["packages"]} == TOP
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == TOP


def test_the_packages_are_the_folders_with_code():
    folders = {path.relative_to(ROOT).parent for top in TOP for path in (ROOT / top).rglob("*.py")}
    assert sorted(SETUPTOOLS["packages"]) == sorted(".".join(folder.parts) for folder in folders)


def test_a_package_comes_with_all_its_files():
    """What is not Python matches a pattern of the package's data, and every pattern matches something."""
    patterns = SETUPTOOLS["package-data"]
    for package in SETUPTOOLS["packages"]:
        names = [path.name for path in (ROOT / package.replace(".", "/")).iterdir()
                 if path.is_file() and path.suffix != ".py" and not path.name.startswith(".")]
        for name in names:
            assert any(fnmatch(name, pattern) for pattern in patterns.get(package, [])), f"{package}: {name}"
        for pattern in patterns.get(package, []):
            assert any(fnmatch(name, pattern) for name in names), f"{package}: {pattern}"
    assert patterns.keys() <= set(SETUPTOOLS["packages"])


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "nanochat.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def test_the_citation_is_of_this_version_and_license():
    """It is read as text: YAML would be one more dependency."""
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    top = dict(line.split(": ", 1) for line in lines if re.match(r"[a-z-]+: ", line))
    assert top["cff-version"] == "1.2.0" and top["type"] == "software" and top["title"] == PROJECT["project"]["name"]
    assert top["version"] == __version__
    assert top["license"] == PROJECT["project"]["license"] == "MIT"


def test_the_license_names_its_authors_and_upstreams():
    assert PROJECT["project"]["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("MIT License\n\nCopyright (c) 2026 the nanochat-tango authors\n")
    assert text.endswith("\nCopyright (c) 2025 Andrej Karpathy\n")


@pytest.fixture(scope="module")
def workflow() -> str:
    return (ROOT / ".github" / "workflows" / "tests.yml").read_text()


def test_the_workflow_runs_the_tests_on_every_python_that_is_promised(workflow):
    classifiers = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if " :: Python :: " in line]
    assert re.findall(r'"([^"]+)"', re.search(r"python: \[(.*)\]", workflow)[1]) == classifiers
    assert PROJECT["project"]["requires-python"] == f">={classifiers[0]}"


def test_the_workflow_calls_what_ci_runs(workflow):
    assert re.search(r"^      - run: \.ci/run$", workflow, re.MULTILINE)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
