"""The league's pages, from a store that is written here: the table's numbers, text around it, and the page in a
browser, skipped where there is none."""
import csv
import json
import re
import shlex
from pathlib import Path

import pytest
from test_page import CONTRAST, browser, emulate, find  # noqa: F401  (browser is a fixture)

from dev.experiments import league
from dev.experiments.league_pages import BEGIN, END, write_pages
from dev.experiments.league_table import COLUMNS, places_of
from nanochat.common import BadInput

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = "</script><b>"


def run_of(task: str, system: str, seed: int, after: float, rate: str = "2e-4", budget: int = 10_000, **other) -> dict:
    """A line of runs.csv. other: columns, `__` for a space and `_of_` for a slash."""
    row = dict(task=task, system=system, rate=rate, seed=seed, budget=budget, best=after, steps=7, tokens=150_000,
               minutes=1.0, commit="abc", flags=f"--seed {seed}")
    row |= {"gen/pass1_in before": 0.1, "gen/pass1_in after": after}
    return row | {name.replace("_of_", "/").replace("__", " "): value for name, value in other.items()}


def verified(before: float, after: float, first: float, last: float) -> dict:
    """Columns of the verifier's step F1 and of the generator's reward."""
    return {"ver_of_step_f1_fixed__before": before, "ver_of_step_f1_fixed__after": after,
            "gen_of_reward__before": first, "gen_of_reward__after": last,
            "gen_of_verdicts_of_wrong_steps_passed__before": 0.2, "gen_of_verdicts_of_wrong_steps_passed__after": 0.4}


OUT = "gen_of_pass1_out__after"
RUNS = [
    run_of("misled", "grpo", 1, 0.40), run_of("misled", "ttrl", 1, 0.55, **{OUT: 0.35}),
    run_of("misled", "grpo_tenth", 1, 0.45, **{OUT: 0.20}),
    run_of("chain", "my/few.py", 9, 0.90),                                      # no run of grpo has its seed
    run_of("chain", "grpo", 1, 0.50, tokens=150_000, minutes=1.0, **{OUT: 0.30}),
    run_of("chain", "grpo", 2, 0.60, tokens=152_000, minutes=2.0, **{OUT: 0.40}),
    run_of("chain", "prm", 2, 0.71, **{OUT: 0.36}), run_of("chain", "prm", 1, 0.60, **{OUT: 0.25}),
    # it solves less than the 65% before it, for a reward that rises by just .05
    run_of("chain", "tango", 1, 0.60, best=0.75, gen_of_pass1_in__before=0.65, **verified(0.5, 0.6, 0.20, 0.25)),
    run_of("chain", "tango", 2, 0.80, **verified(0.5, 0.7, 0.20, 0.25)),        # solves more
    run_of("chain", "tango", 3, 0.70, best=0.80, gen_of_pass1_in__before=0.75,  # the reward rises by .04
           **verified(0.5, 0.8, 0.20, 0.24)),
    run_of("chain", "tango", 1, 0.99, rate="4e-4"),                             # a rate with fewer seeds
    run_of("chain", "tango", 101, 0.99, rate="1e-4"), run_of("chain", "tango", 102, 0.99, rate="1e-4"),  # tuning
    run_of("chain", "dapo", 1, 0.99, budget=2000)]
ROWS = """\
chain | tango | answers | 3 | 50.0 | 70.0 ± 10.0 | +15.0 ± 63.5 (2 pairs) | - | - | - | 50.0 -> 70.0 | 20.0 -> 40.0 \
| 150 | 1.0 | reward up, solved down 1/3 | 2e-4
chain | prm | answers, gold steps | 2 | 10.0 | 65.5 ± 7.8 | **+10.5 ± 6.4** | - | -4.5 ± 6.4 | - | - | - | 150 | 1.0 \
| fell 1/2 | 2e-4
chain | grpo | answers | 2 | 10.0 | 55.0 ± 7.1 | - | - | - | - | - | - | 151 | 1.5 | - | 2e-4
chain | `my/few.py` | see the file | 1 | 10.0 | 90.0 | - | - | - | - | - | - | 150 | 1.0 | - | 2e-4
misled | ttrl | nothing | 1 | 10.0 | 55.0 | +15.0 | +10.0 | - | +15.0 | - | - | 150 | 1.0 | - | 2e-4
misled | grpo_tenth | answers | 1 | 10.0 | 45.0 | +5.0 | - | - | - | - | - | 150 | 1.0 | - | 2e-4
misled | grpo | answers | 1 | 10.0 | 40.0 | - | -5.0 | - | - | - | - | 150 | 1.0 | - | 2e-4"""
POINTS = [dict(task="chain", system=system, seed=seed, metric="gen/pass1_in", tokens=tokens, value=value)
          for system, seed, tokens, value in [("tango", 1, 0, 0.1), ("tango", 1, 100, 0.5), ("tango", 2, 0, 0.3),
                                              ("tango", 2, 200, 0.7), ("grpo", 1, 0, 0.1), ("grpo", 1, 150, 0.5),
                                              ("prm", 1, 0, 0.1), ("prm", 1, 50, 0.7), ("prm", 1, 99, 0.6),  # 10 points
                                              ("prm", 2, 0, 0.1), ("prm", 2, 50, 0.709), ("prm", 2, 99, 0.61)]]
SOLVED = dict(task="chain", system="tango", seed="1", problem="3+5*2", gold="6", verification=None)
ROLLOUTS = [{**SOLVED, "step": 0, "solution": "3+5:8;8*2:6;=6", "labels": [True, False]},
            {**SOLVED, "step": 9, "solution": HOSTILE, "labels": [], "verification": HOSTILE},
            {**SOLVED, "step": 0, "problem": HOSTILE, "solution": "1:1;=1", "labels": [True, True]},
            {**SOLVED, "seed": "5", "step": 0, "solution": "of no run", "labels": []}]


def write_store(folder: Path, runs: list[dict], points: list[dict], rollouts: list[dict]) -> None:
    for name, rows in (("runs", runs), ("points", points)):
        with open(folder / f"{name}.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, list({key: None for row in rows for key in row}), restval="")
            writer.writeheader()
            writer.writerows(rows)
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    write_store(folder, RUNS, POINTS, ROLLOUTS)
    return folder, write_pages(str(folder), 10_000, "bash runs/league.sh --budget 10000")


def data_of(folder: Path) -> dict:
    text = (folder / "league.html").read_text(encoding="utf-8")
    assert text.count("</script>") == 2 and HOSTILE not in text and "{{" not in text
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_the_table_has_the_numbers_that_were_worked_out_by_hand(store):
    """tango - grpo: .10 and .20, mean .15, sd .0707; half of the interval 12.706 * .0707 / sqrt(2) = .635."""
    folder, printed = store
    text = (folder / "LEAGUE.md").read_text(encoding="utf-8")
    title, _, *rows = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    assert title == " | ".join(COLUMNS)
    links = dict(re.findall(r"\[(\w+)\]\(([^)]+)\)", "\n".join(rows)))
    assert re.sub(r"\[(\w+)\]\([^)]+\)", r"\1", "\n".join(rows)) == ROWS
    assert {name: (folder / link).resolve().relative_to(ROOT / "nanochat" / "recipes").as_posix()
            for name, link in links.items()} == {"tango": "tango/tango.py", "prm": "reward_models/prm.py",
                                                 "grpo": "policy/grpo.py",
                                                 "grpo_tenth": "policy/grpo.py", "ttrl": "self_play/ttrl.py"}
    assert "- *budget*: 10,000 sampled tokens a run" in text and "- *commits*: abc\n" in text
    assert "- *runs*: 14, of which 2 to tune; 0.2 hours" in text  # 15 minutes
    assert "- tango on chain: shown with rate 2e-4, not 4e-4 (seeds: 1)\n" in text
    assert "- misled: not tuned there, so not to be compared with those that are: grpo, ttrl, grpo_tenth\n" in text
    assert "- *chance*: of 3 intervals of differences about 0 would leave out zero" in text
    assert "`bash runs/league.sh --budget 10000`" in text and "[runs.csv](runs.csv)" in text
    assert printed.splitlines()[1] == "chain   prm         2  65.5 ± 7.8   +10.5 ± 6.4             fell 1/2"
    assert printed.splitlines()[-1].startswith("14 runs, 7 rows: ")


def test_text_around_the_table_stays_and_a_page_without_a_place_for_it_is_refused(tmp_path):
    write_store(tmp_path, RUNS, [], [])
    path = tmp_path / "LEAGUE.md"
    path.write_text(f"# Mine\n\n{BEGIN} old {END}\n\nafter it\n")
    write_pages(str(tmp_path), 10_000, "a")
    first = path.read_text(encoding="utf-8")
    assert first.startswith(f"# Mine\n\n{BEGIN}\n") and first.endswith(f"{END}\n\nafter it\n")
    assert " old " not in first and "| tango " not in first and "[tango]" in first
    write_pages(str(tmp_path), 2000, "b")
    second = path.read_text(encoding="utf-8")
    assert "[dapo]" in second and "[tango]" not in second and second.endswith(f"{END}\n\nafter it\n")
    for text in ("# Mine\n", f"{END} {BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"):
        path.write_text(text)
        (tmp_path / "league.html").unlink(missing_ok=True)
        with pytest.raises(BadInput, match="no place for the table"):
            write_pages(str(tmp_path), 10_000, "a")
        assert path.read_text() == text and not (tmp_path / "league.html").exists()


def test_pages_of_an_empty_store_and_of_one_that_is_not_there(tmp_path, monkeypatch):
    """The store of the repository has its pages in dev."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dev" / "curves" / "league").mkdir(parents=True)
    write_store(tmp_path, [], [], [])
    for out, folder in (("dev/curves/league", "dev"), (".", ".")):
        assert write_pages(out, 10_000, "a").startswith("0 runs, 0 rows: ")
        text = (tmp_path / folder / "LEAGUE.md").read_text(encoding="utf-8")
        assert text.startswith("# The league\n") and "No run with this budget is finished." in text
        assert data_of(tmp_path / folder)["rows"] == []
        assert not [line for line in text.splitlines() if len(line) > 120]


def test_the_page_has_curves_solutions_seeds_and_the_command_of_each_row(store):
    tango, prm, *_ = data_of(store[0])["rows"]
    assert (tango["task"], tango["system"], tango["family"], tango["flags"]) == ("chain", "tango", "tango", "--seed 1")
    assert list(tango["curves"]) == ["gen/pass1_in"]
    accuracy = tango["curves"]["gen/pass1_in"]
    assert accuracy["seeds"] == {"1": [[0, 10], [100, 50]], "2": [[0, 30], [200, 70]]}
    # to where the first ends: (10 + 30) / 2, (30 + 40) / 2, (50 + 50) / 2
    assert [accuracy["mean"][i] for i in (0, 20, 40)] == [[0, 20], [50, 35], [100, 50]]
    assert len(accuracy["mean"]) == 41 and prm["rollouts"] == []
    assert [(r["step"], r["steps"], r["answer"]) for r in tango["rollouts"]] == [
        (0, [["3+5:8;", True], ["8*2:6;", False]], "=6"), (9, [], HOSTILE), (0, [["1:1;", None]], "=1")]
    assert tango["rollouts"][1]["verification"] == HOSTILE == tango["rollouts"][2]["problem"]
    assert tango["seeds"][0] == ["1", "65.0", "60.0", "75.0", "-", "50.0", "60.0", "0.200", "0.250", "7", "150000",
                                 "1.0", "abc"]
    words = shlex.split(tango["rerun"])
    args = league.make_parser().parse_args(words[2:])
    assert words[:2] == ["bash", "runs/league.sh"] and args.again and args.out == str(store[0])
    assert (args.tasks, args.systems, args.seeds, args.budget) == ("chain", "tango", "1 2 3", 10_000)


def test_the_rate_that_tuning_chose_is_shown_where_it_has_runs(tmp_path):
    runs = [run_of("chain", "dpo", seed, after, rate) for rate, seeds in (("2e-4", (101, 102, 103, 1, 2)),
                                                                          ("4e-4", (101, 102, 103, 1)))
            for seed, after in zip(seeds, (0.9, 0.9, 0.2, 0.9, 0.9) if rate == "2e-4" else (0.5, 0.5, 0.4, 0.1),
                                   strict=True)]
    rows = [{name: str(value) for name, value in run.items()} for run in runs]
    place, = places_of(rows).values()
    assert (place.rate, list(place.runs), place.others, place.is_tuned) == ("4e-4", ["1"], {"2e-4": 2}, True)
    write_store(tmp_path, rows, [], [])
    write_pages(str(tmp_path), 10_000, "a")
    text = " ".join((tmp_path / "LEAGUE.md").read_text().split())
    assert "1 of 1 rows have the lowest or" in text and "not tuned there" not in text
    place, = places_of([row for row in rows if (row["rate"], row["seed"]) != ("4e-4", "1")]).values()
    assert (place.rate, list(place.runs), place.is_tuned) == ("2e-4", ["1", "2"], False)


def test_runs_of_a_row_that_were_not_made_alike_are_told(tmp_path):
    runs = [run_of("chain", "grpo", seed, 0.5) | {"flags": f"--model-tag league-s{seed}-both --seed {seed} --lr {lr}"}
            for seed, lr in ((1, 1), (2, 1), (3, 3))]
    write_store(tmp_path, runs[:2], POINTS, [])
    assert "not made alike" not in write_pages(str(tmp_path), 10_000, "a")
    write_store(tmp_path, runs, POINTS, [])
    assert "grpo on chain: its runs were not made alike" in write_pages(str(tmp_path), 10_000, "a")


def test_lines_that_say_which_rate_they_are_of_belong_to_that_run_alone(tmp_path):
    other = [{**point, "rate": "4e-4"} for point in POINTS if point["system"] == "tango"]
    points = [*other, {**other[0], "rate": "2e-4", "value": 0.25}]
    write_store(tmp_path, RUNS, points, [{**ROLLOUTS[0], "rate": "4e-4"}])
    write_pages(str(tmp_path), 10_000, "a")
    tango = data_of(tmp_path)["rows"][0]
    assert tango["curves"]["gen/pass1_in"] == {"seeds": {"1": [[0, 25]]}, "mean": [[0, 25]]}
    assert tango["rollouts"] == []


def test_the_page_is_one_file_without_addresses(store):
    text = (store[0] / "league.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not [word for word in ('src="', "@import", "url(", "fetch(", "XMLHttpRequest", "innerHTML") if word in text]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


# In a browser

@pytest.fixture
def shown(browser, store):  # noqa: F811
    """The page, freshly loaded. Afterwards: nothing but the file was asked for, and the console is empty."""
    browser.get_log("performance")
    browser.get(f"file://{store[0]}/league.html")
    yield browser
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {f"file://{store[0]}/league.html"}
    assert browser.get_log("browser") == []


def systems(browser) -> list[str]:  # noqa: F811
    return [button.text for button in find(browser, "#league tr.row button")]


def choose(browser, **values) -> list[str]:  # noqa: F811
    """Sets controls by id; the systems that are then shown."""
    for name, value in values.items():
        browser.execute_script("const e = document.getElementById(arguments[0]); e.value = arguments[1]; "
                               "e.dispatchEvent(new Event('input'))", name, value)
    return systems(browser)


def click(browser, selector: str) -> None:  # noqa: F811
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def test_rows_are_filtered_and_sorted(shown):
    assert systems(shown) == ["tango", "prm", "grpo", "my/few.py", "ttrl", "grpo_tenth", "grpo"]
    assert choose(shown, family="policy") == ["grpo", "grpo_tenth", "grpo"]
    assert choose(shown, task="misled") == ["grpo_tenth", "grpo"]
    assert find(shown, "#count")[0].text == "2 of 7 rows"
    assert choose(shown, family="", task="", text="GOLD") == ["prm"]
    choose(shown, text="")
    head = lambda name: f"#league th:nth-child({list(COLUMNS).index(name) + 1}) button"
    click(shown, head("solved"))
    assert systems(shown) == ["my/few.py", "tango", "prm", "grpo", "ttrl", "grpo_tenth", "grpo"]
    click(shown, head("solved"))
    assert systems(shown) == ["grpo", "grpo_tenth", "grpo", "ttrl", "prm", "tango", "my/few.py"]
    click(shown, head("longer problems minus GRPO"))  # what has none comes last, whichever way
    assert systems(shown)[:3] == ["grpo", "grpo", "prm"]
    click(shown, head("longer problems minus GRPO"))
    assert systems(shown)[:3] == ["prm", "grpo", "grpo"]
    click(shown, head("system"))
    assert systems(shown)[0] == "grpo" and find(shown, "th[aria-sort=ascending]")[0].text == "system"


def test_a_row_opens_its_curves_solutions_and_command(shown):
    click(shown, "tr.row button")
    (panel,) = find(shown, ".panel")
    assert len(panel.find_elements("css selector", "polyline")) == 5  # two seeds and grpo's one, and their means
    assert panel.find_element("css selector", "svg").get_attribute("aria-label") == (
        "solved: tango 20.0% to 50.0%, grpo 10.0% to 50.0%")
    assert [node.text for node in find(shown, ".legend span")][:2] == ["tango", "grpo"]
    steps = find(shown, ".rollout")[0].find_elements("css selector", ".step")
    assert [(step.text, step.get_attribute("class")) for step in steps] == [
        ("3+5:8;", "step right"), ("8*2:6;", "step wrong"), ("=6", "step")]
    detail = find(shown, ".detail")[0].text
    assert detail.count(HOSTILE) == 3 and find(shown, "b") == []
    assert "--tasks chain --systems tango --seeds '1 2 3' --budget 10000" in detail and "--seed 1" in detail
    click(shown, "tr.row button")
    assert find(shown, ".detail") == []


@pytest.mark.parametrize("width", [1280, 390])
def test_light_and_dark_and_nothing_wider_than_the_page(shown, width):
    click(shown, "tr.row button")
    emulate(shown, width, 800)
    for scheme in ("light", "dark"):
        shown.execute_cdp_cmd("Emulation.setEmulatedMedia",
                              {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        least, text = shown.execute_script(CONTRAST)
        assert least >= 4.5, text
    assert shown.execute_script("return document.documentElement.scrollWidth") <= width
    assert find(shown, ".detail > div")[0].rect["width"] <= width
    shown.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
