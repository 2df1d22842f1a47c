"""
The pages that dev/make_pages.py writes: they are what it makes now, and what they say is there.

    python -m pytest tests/test_generated_pages.py
"""
import argparse
import importlib.util
import os
import re

import pytest

from nanochat import recipes
from nanochat.common import BadInput, script_main

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGES = ("README.md", "dev/flags.md", "dev/recipes.md")


@pytest.fixture(scope="module")
def make_pages():
    spec = importlib.util.spec_from_file_location("make_pages", os.path.join(ROOT, "dev", "make_pages.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(make_pages) -> dict[str, str]:
    """Path -> text of the pages that need no file."""
    return {"dev/flags.md": make_pages.flags_page(), "dev/recipes.md": make_pages.recipes_page(),
            "README.md": make_pages.readme_table()}


def text_of(path: str) -> str:
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


@pytest.mark.parametrize("path", PAGES)
def test_the_pages_are_what_is_made_now(make_pages, made, path):
    expected = make_pages.with_table(text_of(path)) if path == "README.md" else made[path]
    assert text_of(path) == expected, f"{path} is not up to date: run python dev/make_pages.py"


def test_what_is_made_has_no_long_line_and_no_list_by_accident(make_pages, made):
    a = "a" * 117
    assert make_pages.wrapped(f"{a} - bcd", "", "  ") == f"{a} -\n  bcd"
    for path, text in made.items():
        for line in text.splitlines():
            assert len(line) <= 120, f"{path}: {line}"
            assert not re.match(r"\s+([-+*#]|\d+\.) ", line), f"{path}: {line}"


def test_every_recipe_is_on_every_page_and_has_a_check(make_pages, made):
    names = recipes.names()
    assert sorted(make_pages.RESULTS) == sorted(make_pages.CHECKS) == names
    assert re.findall("^## (.*)$", made["dev/recipes.md"], re.MULTILINE)[1:] == list(make_pages.RESULTS)
    assert re.findall("^### Recipe (.*)$", made["dev/flags.md"], re.MULTILINE) == list(make_pages.RESULTS)
    in_table = re.findall(r"^\| [^|]+ \| `(\w+)` \|", made["README.md"], re.MULTILINE)
    lists = re.search(r"in\s+settings\s+of\s+their\s+own\.(.*?)Not\s+compared:(.*?)\.\s+All:", made["README.md"],
                      re.DOTALL)
    beside, not_compared = (re.findall(r"`(\w+)`", names) for names in lists.groups())
    assert {name for name, arms in make_pages.RESULTS.items() if arms} <= {*in_table, *not_compared}
    assert [name for name in make_pages.RESULTS if name in in_table] == in_table
    assert beside == [name for names in make_pages.BESIDE.values() for name in names]
    assert [name for name in make_pages.RESULTS if name not in (*in_table, *beside)] == not_compared
    assert len({*in_table, *beside, *not_compared}) == len(in_table) + len(beside) + len(not_compared) == len(names)
    assert all(make_pages.CHECKS.values())


def test_every_check_is_a_test_that_exists(make_pages):
    for file, name in (check.split("::") for checks in make_pages.CHECKS.values() for check in checks):
        assert re.search(rf"^def {name}\(", text_of(f"tests/{file}"), re.MULTILINE), f"{file}::{name}"


def test_every_flag_of_a_recipe_is_explained_once(make_pages, made):
    tango = made["dev/flags.md"].partition("### Recipe tango\n")[2].partition("\n### ")[0]
    prime = made["dev/flags.md"].partition("### Recipe prime\n")[2].partition("\n### ")[0]
    assert "- `--alpha-start` (0.3): weight of" in tango and "- as recipe [grpo](#recipe-grpo): `--num-label" in tango
    assert "- `--prm-beta` (0.05): " in prime and "`--advantage` rloo, `--kl-coef` 0.0" in prime
    assert made["dev/flags.md"].count("\n- `--chain-modulus`") == made["dev/flags.md"].count("\n- `--alpha-end`") == 1


def test_a_flags_default_is_said_once_whatever_argparse_adds_to_its_help(make_pages):
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", action=argparse.BooleanOptionalAction, default=True, help="is 5%% of <n>")
    parser.add_argument("--out", default="here", help="folder (default: %(default)s)")
    parser.add_argument("--tag", default="", help="default: as --out")
    parser.add_argument("--many", type=int, nargs="+", default=[1, 2], choices=[1, 2, 3])
    parser.add_argument("--must", required=True)
    assert [make_pages.described(action) for action in parser._actions[1:]] == [
        "`--on`, `--no-on` (on): is 5% of \\<n>", "`--out` (here): folder", "`--tag`: default: as `--out`",
        "`--many` (1 2): one of: 1, 2, 3", "`--must` (needed)"]


# Figures by hand

ROWS = """task,arm,seed,step,sampled_tokens,metric,value
chain,grpo,1,0,0,gen/pass1_in,0.1
chain,grpo,1,10,1000,gen/pass1_in,0.5
chain,grpo,2,0,0,gen/pass1_in,0.2
chain,grpo,2,10,2000,gen/pass1_in,0.7
chain,mine,1,0,0,gen/pass1_in,0.1
chain,mine,1,0,500,gen/pass1_in,0.1
chain,mine,1,10,1500,gen/pass1_in,0.9
chain,mine,1,10,1500,gen/pass1_out,0.3
chain,mine,1,0,0,ver/step_f1_fixed,0.6
chain,mine,1,10,1500,ver/step_f1_fixed,0.8
chain,mine,2,0,0,gen/pass1_in,0.2
chain,mine,2,0,500,gen/pass1_in,0.2
chain,mine,2,10,2500,gen/pass1_in,1.0
chain,mine,2,0,0,ver/step_f1_fixed,0.5
chain,mine,2,10,2500,ver/step_f1_fixed,0.6
chain,short,1,0,0,gen/pass1_in,0.1
chain,short,1,10,1000,gen/pass1_in,0.4
chain,short,2,0,0,gen/pass1_in,0.1
chain,short,2,10,1999,gen/pass1_in,0.9
"""


@pytest.fixture
def arm_of(make_pages, tmp_path):
    """An arm of the csv by hand."""
    (tmp_path / "hand.csv").write_text(ROWS)
    return lambda name, **how: make_pages.Arm(str(tmp_path / "hand"), name, "1e-4", "by hand", **how)


def test_figures_are_as_by_hand(make_pages, arm_of):
    """Seed 1: at 1000 tokens halfway from .1 to .9, so .5, as GRPO. Seed 2: at 2000, three quarters of the way from .2
    to 1, so .8: +.1. Mean +5 points, deviation 10 / sqrt(2), over sqrt(2) 5, times 12.706: 63.5. Finals: mean 95,
    deviation 10 / sqrt(2) = 7.1; tokens 2000."""
    assert make_pages.difference(arm_of("mine")) == "+5.0 ± 63.5"
    assert make_pages.ends(make_pages.runs_of(arm_of("mine"), "mine")) == ["95.0 ± 7.1", "0.00M"]
    assert make_pages.warm_up(arm_of("mine")) == pytest.approx(500 / 1e6)
    assert make_pages.step_f1(arm_of("mine")) == "55.0 -> 70.0" and make_pages.step_f1(arm_of("grpo")) == "-"


def test_a_seed_that_ended_with_fewer_tokens_is_left_out_and_said(make_pages, arm_of):
    """Seed 2 ended one token before GRPO. Seed 1: .4 less .5."""
    assert make_pages.difference(arm_of("short")) == "-10.0 (1 of 2 seeds)"
    assert make_pages.difference(arm_of("grpo", baseline="mine")) == "ended before"


# Bad input

def test_a_csv_or_an_arm_that_is_not_there_is_said(make_pages, arm_of, tmp_path):
    with pytest.raises(BadInput, match="hand.csv: no gen/pass1_in of arm tango"):
        make_pages.difference(arm_of("tango"))
    with pytest.raises(BadInput, match="other.csv: FileNotFoundError"):
        make_pages.difference(make_pages.Arm(str(tmp_path / "other"), "tango", "", ""))
    (tmp_path / "broken.csv").write_text("arm,metric\ngrpo,gen/pass1_in\n")
    with pytest.raises(BadInput, match="broken.csv: KeyError: 'seed'"):
        make_pages.difference(make_pages.Arm(str(tmp_path / "broken"), "grpo", "", ""))


def test_the_table_replaces_what_stands_between_the_markers(make_pages, made):
    text = f"# before\n\n{make_pages.BEGIN}\nold\n{make_pages.END}\n\nafter\n"
    once = make_pages.with_table(text)
    assert once == f"# before\n\n{make_pages.BEGIN}\n{made['README.md']}\n{make_pages.END}\n\nafter\n"
    assert make_pages.with_table(once) == once


def test_the_script_writes_the_three_pages(make_pages, made, monkeypatch, tmp_path):
    (tmp_path / "dev").mkdir()
    os.symlink(os.path.join(ROOT, "dev", "curves"), tmp_path / "dev" / "curves")
    (tmp_path / "README.md").write_text(f"{make_pages.BEGIN}\n{make_pages.END}\n")
    monkeypatch.setattr(make_pages, "ROOT", str(tmp_path))
    make_pages.main(None)
    assert made["README.md"] in (tmp_path / "README.md").read_text()
    assert all((tmp_path / path).read_text() == made[path] for path in PAGES[1:])


@pytest.mark.parametrize("text", ["", "{BEGIN}\n", "{END}\n{BEGIN}\n", "{BEGIN}\n{END}\n{BEGIN}\n{END}\n",
                                  "a {BEGIN}\n{END}\n"])
def test_a_readme_without_its_markers_is_refused_in_one_line_before_anything_is_written(
        make_pages, monkeypatch, tmp_path, capsys, text):
    (tmp_path / "README.md").write_text(text.format(BEGIN=make_pages.BEGIN, END=make_pages.END))
    monkeypatch.setattr(make_pages, "ROOT", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        script_main(make_pages.main, argparse.ArgumentParser(), [])
    line = capsys.readouterr().err
    assert stop.value.code == 2 and line.startswith("error: README.md: needs the line") and line.count("\n") == 1
    assert os.listdir(tmp_path) == ["README.md"]
