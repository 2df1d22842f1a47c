"""A run's files as the report reads them: under way, damaged, cut; and the script that writes it."""
import csv
import json
import os
import subprocess
import sys

import pytest
from test_report import ROLLOUT, ROOT, experiment, made, make_run, refusal, report_on  # noqa: F401

from nanochat.common import BadInput
from nanochat.rl.report import cards
from nanochat.rl.report.page import axis_of, scale_of, scores_of, title_of, write_page, write_run_page
from nanochat.rl.report.report import compare, comparison, read_run, tidy
from nanochat.storage.files import read_records

# ruff: noqa: F811


def under_way(tmp_path, num_steps: int):
    """The first steps of a run that was to have 20 of its generator, evaluated at 0 and 10."""
    folder = tmp_path / "runs" / "chain-tango-s0"
    make_run(tmp_path, "chain-tango-s0", 0, [0.1, 0.3, 0.5], [0.7, 0.8, 0.9])
    before = json.loads((folder / "summary.json").read_text())["before"]
    (folder / "summary.json").unlink()
    records = [r for _, r in read_records(str(folder / "metrics.jsonl")) if r["role"] == "generator"][:num_steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder, {"minutes": 0.5, "before": before}


@pytest.mark.parametrize("num_steps, expected", [(0, [(0, 0.1)]), (10, [(0, 0.1)]), (11, [(0, 0.1), (10, 0.3)])])
def test_a_run_that_is_under_way_has_the_points_that_are_there(tmp_path, num_steps, expected):
    folder, so_far = under_way(tmp_path, num_steps)
    run = read_run(str(folder), so_far)
    assert [(p["gen_step"], p["gen/pass1_in"]) for p in run.points] == expected
    assert [p["record"] for p in run.points] == [step for step, _ in expected]
    write_run_page(str(folder), so_far, {"state": "under way", "minutes_left": 2.5, "is_alive": True})
    with pytest.raises(BadInput, match=f"chain-tango-s0: the run has not finished, it is at step {num_steps}$"):
        read_run(str(folder))
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(BadInput, match="not finished, it is at step 0$"):
        read_run(str(folder))


def test_advantages_that_were_no_numbers_are_shown_as_none(tmp_path):
    assert cards.mean_of([1.0, None, 2.0]) == 1.5 and cards.mean_of([None]) is cards.mean_of([]) is None
    make_run(tmp_path, "chain-tango-s0", 0, [0.1, 0.3], rollouts=[{**ROLLOUT, "advantages": [None] * 4}])
    assert cards.card({**read_run(str(tmp_path / "runs" / "chain-tango-s0")).rollouts[0]})["advantage"] is None


@pytest.mark.parametrize("key", ["minutes", "sampled_tokens", "gen_steps"])
def test_a_summary_with_wrong_values_is_refused(tmp_path, key):
    folder = make_run(tmp_path, "chain-tango-s0", 0, [0.1, 0.3, 0.5], [0.7, 0.8, 0.9])
    path = tmp_path / "runs" / "chain-tango-s0" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: None}))
    with pytest.raises(BadInput, match=f"summary.json: {key} is None, not a number"):
        read_run(folder)


VALUES = (None, 5, "x", [], {}, [5], True)


def spots(value, path: tuple = ()) -> list[tuple]:
    """Where something stands in a json value: every key of its objects, and the first two places of its lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return [spot for key, x in inside for spot in ((*path, key), *spots(x, (*path, key)))]


def changed(value, path: tuple, new):
    """A copy of a json value with something else in a spot; ...: with nothing there."""
    if not path:
        return new
    copy = list(value) if isinstance(value, list) else dict(value)
    if len(path) == 1 and new is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", ["config.json", "summary.json", "metrics.jsonl", "rollouts.jsonl",
                                  "examples.jsonl"])
def test_a_damaged_run_is_shown_or_refused_in_one_line_that_names_the_file(tmp_path, name):
    """Beside one that is whole; of records the first evaluated one and one between."""
    rollout = {**ROLLOUT, "completion": None, "turns": [["first attempt", "1+1:3;=3"]], "proposed": None, "reward": 0.5,
               "shaped_reward": 0.5}
    folder = make_run(tmp_path, "chain-tango-s0", 0, [0.1, 0.3], rollouts=[rollout], examples=[rollout], every=2,
                      about="sums")
    whole = made(tmp_path, "chain-grpo-s0", 0, [0.1, 0.2], every=2, about="sums")
    path, is_lines = tmp_path / "runs" / "chain-tango-s0" / name, name.endswith("l")
    config = path.parent / "config.json"
    starts = {"generator": {"tag": "d4", "step": 5, "fingerprint": 7}, "verifier": {"tag": "d4-ver"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), "starts": starts, "shown": ["gen/x"],
                                  "about": "sums", "commit": "c", "world": 1}))
    content = [json.loads(line) for line in path.read_text().splitlines()] if is_lines else json.loads(path.read_text())
    number_shown = number_refused = 0
    for spot in [(), *spots(content)]:
        for new in VALUES if not spot else (*VALUES, ...):
            damaged = changed(content, spot, new)
            if is_lines:
                damaged = "".join(json.dumps(line) + "\n" for line in damaged) if isinstance(damaged, list) else "5\n"
            else:
                damaged = json.dumps(damaged)
            path.write_text(damaged)
            try:
                runs = [read_run(folder), whole]
                write_page(runs, compare(runs), str(tmp_path / "report.html"))
                write_page(runs[:1], compare(runs[:1]), str(tmp_path / "report.html"))
                number_shown += 1
            except BadInput as error:
                number_refused += 1
                assert "\n" not in str(error) and "Type" not in str(error), (spot, new, error)
                assert name in str(error) or "cannot be compared" in str(error) or (
                    "but the run made" in str(error)), (spot, new, error)
    assert number_shown > 10 and number_refused > 50


def test_scores_are_the_first_and_last_evaluation_and_columns_that_say_nothing_are_left_out(tmp_path):
    folder, so_far = under_way(tmp_path, 11)
    rows = {name: rest for name, *rest in scores_of(read_run(str(folder), so_far))}
    assert rows["generator pass@1, in distribution"] == ["10.0%", "30.0%", "+20.0"]
    assert rows["verifier balanced accuracy, fixed solutions"] == ["70.0%", "80.0%", "+10.0"]
    assert "steps per solution" not in rows
    run = made(tmp_path, "chain-own-s0", 0, [0.1, 0.2, 0.3])
    columns, table = comparison(compare([run]))
    assert columns == ["arm", "seeds", "final", "out of distribution", "mean height"]
    assert table == [["own", "1", "30.0", "15.0", "20.0"]]
    run.config["words"] = {"out of distribution": "other half", "wrong steps": "wrong solutions"}
    assert comparison(compare([run]))[0][3] == "other half"
    assert title_of("gen/pass1_out", run) == "generator pass@1, other half"
    assert title_of("gen/wrong_passed", run) == "wrong solutions passed, moving average"


@pytest.mark.parametrize("metric, axis", [
    ("gen/pass1_in", (0, 1)), ("ver/step_f1_current", (0, 1)), ("gen/verdicts/wrong_steps_passed", (0, 1)),
    ("ver/step_outcome_corr", (-1, 1)), ("gen/reasoning_steps", None), ("gen/nll", None), ("step", None)])
def test_shares_have_the_same_axis_in_every_report(metric, axis):
    assert axis_of(metric) == axis and scale_of(metric) == (100 if axis == (0, 1) else 1)


def test_the_script_writes_csv_picture_and_page(experiment, capsys):
    out = experiment / "out"
    names = [f.name for f in sorted((experiment / "runs").iterdir())]
    report_on("--out", str(out), *names)
    assert sorted(f.name for f in out.iterdir()) == ["chain.csv", "chain.png", "report.html"]
    with open(out / "chain.csv") as f:
        assert len(list(csv.DictReader(f))) == len(tidy([read_run(str(experiment / "runs" / name)) for name in names]))
    assert (out / "chain.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert ("| tango | 2 |" in printed
            and "6 runs, 9 minutes one after the other; commit None; torch 2; world None" in printed)


def test_a_single_run_is_reported_in_its_own_folder(experiment, capsys, monkeypatch):
    make_run(experiment, "chain-tango-s7", 2, [0.1, 0.2, 0.3])
    for names in (["chain-tango-s7"], ["chain-tango-s0"]):
        report_on(*names)
    assert capsys.readouterr().out.count("chain-tango-s7 has seed 2, not the one that its name says") == 1
    report_on("chain-tango-s0")
    assert {"curves.csv", "curves.png", "report.html"} <= {f.name
                                                           for f in (experiment / "runs" / "chain-tango-s0").iterdir()}
    assert "report.html (" in capsys.readouterr().out
    monkeypatch.chdir(experiment / "runs" / "chain-tango-s0")
    report_on(".")
    with open("curves.csv") as f:
        assert {row["arm"] for row in csv.DictReader(f)} == {"tango"}
    linked = experiment / "runs" / "chain-linked-s0"  # a run that lies elsewhere keeps the name it has here
    linked.symlink_to(experiment / "runs" / "chain-grpo-s0")
    assert read_run(f"{linked}/").arm == "linked"


def test_a_file_is_no_run_and_several_need_a_folder(experiment, capsys):
    path = experiment / "notes.txt"
    path.touch()
    assert refusal(capsys, str(path)) == f"error: {path}: neither a folder nor a run ({path})"
    assert "--out" in refusal(capsys, "chain-tango-s0", "chain-grpo-s0")


def test_curves_are_drawn_whatever_backend_the_environment_names(experiment):
    done = subprocess.run([sys.executable, "-m", "scripts.report", "chain-tango-s0"], capture_output=True, text=True,
                          cwd=ROOT, env={**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"})
    assert (done.returncode, done.stderr) == (0, "")
    assert (experiment / "runs" / "chain-tango-s0" / "curves.png").exists()


def cut_summary(runs) -> None:
    summary = json.loads((runs / "chain-grpo-s0" / "summary.json").read_text())
    del summary["sampled_tokens"]
    (runs / "chain-grpo-s0" / "summary.json").write_text(json.dumps(summary))
    (runs / "chain-tango-s0").rename(runs / "nobody")


def cut_metrics(runs) -> None:
    metrics = runs / "chain-grpo-s0" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:12]))
    (runs / "chain-tango-s0").rename(runs / "nobody")


@pytest.mark.parametrize("damage, words", [
    (lambda runs: None, ["nobody", "neither a folder nor a run"]),
    (lambda runs: (runs / "nobody").mkdir(), ["nobody", "no config.json"]),
    (lambda runs: cut_summary(runs), ["chain-grpo-s0", "summary.json: has no sampled_tokens", "another version"]),
    (lambda runs: cut_metrics(runs), ["metrics.jsonl: 12 records, but the run made 30 steps"]),
    (lambda runs: (runs / "chain-tango-s0").rename(runs / "nobody") / "metrics.jsonl",
     ["metrics.jsonl, line 2", "not a json record"]),
])
def test_what_is_no_finished_run_is_one_line_and_nothing_is_written(experiment, capsys, damage, words):
    broken = damage(experiment / "runs")
    if broken:
        broken.write_text('{"step": 0}\n{"step":\n')
    line = refusal(capsys, "--out", str(experiment / "out"), "chain-grpo-s0", "nobody")
    assert "\n" not in line and all(word in line for word in words)
    assert not (experiment / "out").exists()
