"""What an installation holds, and what the files around the code say: version, license, Python versions."""
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

from nanochat import __version__

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # pytest brings it there

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
PACKAGES = find_namespace_packages(ROOT, **SETUPTOOLS["packages"]["find"])
PAIR = ROOT / "nanochat" / "pair"  # models, in folders that hold no code
TOP = {"nanochat", "tasks", "scripts"}


def test_the_packages_are_the_folders_with_code():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == TOP
    folders = {path.relative_to(ROOT).parent for top in TOP for path in (ROOT / top).rglob("*.py")}
    assert sorted(PACKAGES) == sorted(".".join(folder.parts) for folder in folders)


def test_a_package_comes_with_all_its_files():
    patterns = SETUPTOOLS["package-data"]
    for package in PACKAGES:
        folder = ROOT / package.replace(".", "/")
        names = [path.name for path in folder.iterdir()
                 if path.is_file() and path.suffix != ".py" and not path.name.startswith(".")]
        names += [str(path.relative_to(folder)) for path in PAIR.rglob("*") if path.is_file() and PAIR.parent == folder]
        for name in names:
            assert any(fnmatch(name, pattern) for pattern in patterns.get(package, [])), f"{package}: {name}"
        for pattern in patterns.get(package, []):
            assert any(fnmatch(name, pattern) for name in names), f"{package}: {pattern}"
    assert patterns.keys() <= set(PACKAGES)


def test_the_citation_is_of_the_packages_version_which_stands_in_one_place():
    """It is read as text: YAML would be one more dependency."""
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "nanochat.__version__"}
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    top = dict(line.split(": ", 1) for line in lines if re.match(r"[a-z-]+: ", line))
    assert (top["title"], top["version"]) == (PROJECT["project"]["name"], __version__)
    assert top["license"] == PROJECT["project"]["license"] == "MIT"
    assert "Andrej Karpathy" in (ROOT / PROJECT["project"]["license-files"][0]).read_text()


def test_the_changelog_begins_with_what_is_to_come_and_the_version():
    headings = re.findall("^## (.+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading.split()[0] for heading in headings if heading != "Unreleased"]
    assert released[0] == __version__ and "Unreleased" not in headings[1:]


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()), ids=lambda path: path.name)
def test_a_form_for_issues_is_one_that_github_shows(path):
    """Its fields have a kind that there is, a name and a label each; at least one must be filled in."""
    form = pytest.importorskip("yaml").safe_load(path.read_text())
    assert form.keys() == {"name", "description", "labels", "body"}
    for field in form["body"]:
        assert field["type"] in ("input", "textarea") and field["attributes"]["label"]
        assert set(field["attributes"]) <= {"label", "description", "placeholder", "render"}
    names = [field["id"] for field in form["body"]]
    assert len(set(names)) == len(names)
    assert any(field.get("validations", {}).get("required") is True for field in form["body"])


def test_the_workflow_runs_the_tests_on_every_python_that_is_promised():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    classifiers = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if " :: Python :: " in line]
    assert re.findall(r'"([^"]+)"', re.search(r"python: \[(.*)\]", workflow)[1]) == classifiers
    assert PROJECT["project"]["requires-python"] == f">={classifiers[0]}"
    assert re.search(r"^      - run: \.ci/run$", workflow, re.MULTILINE)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
