"""Differences of arms out of csvs, by hand; and every figure of the page of open questions, out of its csv."""
import re
from pathlib import Path

import pytest

from dev.experiments import minus
from nanochat.cli import parse_flags
from nanochat.common import BadInput

PAGE = Path(__file__).resolve().parent.parent / "dev" / "results" / "questions.md"
# What stands after a row's csv: `arm` - `other` or its start, perhaps a metric, perhaps at its tokens or cost; or falls
SAYS = re.compile(r"\[csv\]\((?P<csv>[^)]+)\): `(?P<arm>[^`]+)` (?:- (?:`(?P<other>[^`]+)`|its start)"
                  r"(?:, `(?P<metric>[^`]+)`)?(?: at its (?P<equal>tokens|cost))?|(?P<falls>falls))")
CURVES = {  # arm -> seed -> (tokens, value)
    "long": {1: [(0, 0.1), (100, 0.5), (200, 0.4)], 2: [(0, 0.2), (100, 0.3), (300, 0.7)]},
    "short": {1: [(0, 0.1), (150, 0.4)], 2: [(0, 0.2), (200, 0.3)], 3: [(0, 0.0), (150, 0.9)]}}


@pytest.fixture
def path(tmp_path) -> str:
    rows = [f"t,{arm},{seed},0,{tokens},gen/pass1_in,{value}" for arm, seeds in CURVES.items()
            for seed, points in seeds.items() for tokens, value in points]
    rows += [f"t,{arm},{seed},0,{tokens},cost/teraflops,{tokens / 100 if arm == 'long' else tokens / 150}"
             for arm, seeds in CURVES.items() for seed, points in seeds.items() for tokens, _ in points]
    (tmp_path / "t.csv").write_text("\n".join(["task,arm,seed,step,sampled_tokens,metric,value", *rows]))
    return str(tmp_path / "t.csv")


def printed(capsys, *flags: str) -> str:
    minus.main(parse_flags(minus.make_parser(), list(flags)))
    return capsys.readouterr().out.strip()


def test_an_arm_less_another_at_the_end_at_its_tokens_and_less_its_start(path, capsys):
    # ends .4 - .4 and .7 - .3: mean .2, deviation .2828, times 12.706 / sqrt 2
    assert printed(capsys, path, "long", "short") == "+20.0 ± 254.1  (1: +0.0, 2: +40.0)"
    # at 150 tokens .45, at 200 tokens .5: +.05 and +.2
    assert printed(capsys, path, "long", "short", "--at-its-tokens") == "+12.5 ± 95.3  (1: +5.0, 2: +20.0)"
    # at a cost of 1, 100 tokens, .5, and of 1.333, 133 tokens, .3 + .0667: less .4 and .3
    assert printed(capsys, path, "long", "short", "--at-its-cost").endswith("(1: +10.0, 2: +6.7)")
    assert printed(capsys, path, "long") == "+40.0 ± 127.1  (1: +30.0, 2: +50.0)"
    assert printed(capsys, path, "short", "long", "--at-its-tokens") == "-  (no pairs)"  # it ended before


def test_a_run_that_ends_ten_points_below_its_best_has_fallen(path, capsys):
    assert printed(capsys, path, "long", "--falls") == "1 of 2  (1: +10.0, 2: +0.0)"


@pytest.mark.parametrize("flags, words", [
    (["long", "--metric", "gen/entropy"], "has no gen/entropy of an arm long"), (["none"], "of an arm none"),
    (["long", "short", "--falls"], "about one arm alone"), (["long", "--at-its-tokens"], "of which other arm"),
    (["long", "--at-its-cost"], "of which other arm")])
def test_what_there_is_not_is_one_line(path, flags, words):
    with pytest.raises(BadInput, match=words):
        minus.main(parse_flags(minus.make_parser(), [path, *flags]))


def test_a_file_that_is_no_csv_of_curves_is_one_line(tmp_path):
    (tmp_path / "x.csv").write_text("arm,seed\na,1\n")
    for name, words in (("x.csv", "is no csv of curves"), ("y.csv", "No such file")):
        with pytest.raises(BadInput, match=words):
            minus.curves_of(str(tmp_path / name), "a")


def rows_of_the_page() -> list[list[str]]:
    text, *_ = PAGE.read_text(encoding="utf-8").split("\n## ")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines][2:]  # not the titles


def test_every_figure_of_the_open_questions_is_what_its_csv_says():
    """A row has a figure that its csv gives, from as many seeds as it says; or says that it was not measured."""
    rows, wrong = rows_of_the_page(), []
    for question, answer, _, seeds, figure, evidence in rows:
        if figure == "-":
            assert answer.startswith("Not measured") and not seeds and evidence == "-", question
        elif not evidence.endswith("no csv"):
            said = SAYS.search(evidence)
            assert said and said.end() == len(evidence), f"{question}: {evidence}"
            path, metric, equal = str(PAGE.parent / said["csv"]), said["metric"] or minus.ACCURACY, said["equal"]
            arm = minus.curves_of(path, said["arm"], metric, equal == "cost")
            other = minus.curves_of(path, said["other"], metric, equal == "cost") if said["other"] else None
            found = minus.falls(arm) if said["falls"] else minus.minus(arm, other, bool(equal))
            told = minus.told_falls(found) if said["falls"] else minus.told(found)
            if (told, num_of(seeds)) != (figure, len(found)):
                wrong.append(f"{question}: {figure} of seeds {seeds}, the csv says {told} of {len(found)}")
    assert len(rows) > 30 and not wrong


def num_of(seeds: str) -> int:
    """How many seeds are meant by "1 to 5" or "1, 2"."""
    first, to, last = seeds.partition(" to ")
    return int(last) - int(first) + 1 if to else len(seeds.split(","))
