"""
What finished runs say together: every number by hand, on run folders made here.

    python -m pytest tests/test_report.py
"""
import json
import math
import os

import pytest

from nanochat.cli import script_main
from nanochat.common import BadInput
from nanochat.rl.report.first_screen import latest, progress, well_and_ill
from nanochat.rl.report.page import axes_of, health, mean_curve, panels_of
from nanochat.rl.report.report import (COLUMNS, EVALS, INDICATORS, Run, area_under, cells, compare, evaluated,
                                       first_reach, height_at, interval, markdown_table, read_run, recovered, tidy)
from scripts import report

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROLLOUT = {"step": 1, "role": "generator", "problem": "3+5*2", "gold": "6", "solution": "3+5:8;8*2:7;=7",
           "outcome": False, "step_labels": [True, False],
           "step_spans": [[0, 6], [6, 12]], "step_ends": [5, 11], "finish_reason": "stop",
           "token_ends": [*range(1, 15), 14], "advantages": [0.5] * 6 + [-1.0] * 6 + [-2.0] * 3,
           "verification": "3+5:8T;8*2:6F;=F", "step_verdicts": [True, False], "verdict": False, "unmet": []}


def make_run(base, name: str, seed: int, accuracies: list[float], step_f1: list[float] | None = None,
             rollouts=(ROLLOUT,), examples=(), every: int = 10, tokens_per_step: int = 100, is_old: bool = False,
             logged: dict | None = None, **flags) -> str:
    """A run's folder with an evaluation every `every` generator steps; the last accuracy is the summary's. is_old: as
    runs were written that named neither their roles nor their number of steps; logged: in every generator step."""
    folder = base / "runs" / name
    folder.mkdir(parents=True)
    scores = [{"gen/pass1_in": a, "gen/pass1_out": a / 2,
               **({} if step_f1 is None else dict.fromkeys((n for n in EVALS if n.startswith("ver/")), f))}
              for a, f in zip(accuracies, step_f1 or accuracies, strict=True)]
    records = []
    for step in range(every * (len(accuracies) - 1)):
        evaluation = scores[step // every] if step % every == 0 else {}
        records.append({"step": step, "role": "generator", "gen_step": step, "ver_step": step // 2,
                        "sampled_tokens": tokens_per_step * step, **evaluation,
                        "gen/reasoning_steps": float(step), "gen/entropy": 0.5, **(logged or {})})
    judged = [{"step": step, "role": "verifier", "gen_step": step, "ver_step": step // 2}
              for step in range(0, len(records), 2)]
    end = {"gen_steps": len(records), "ver_steps": len(records) // 2, "sampled_tokens": tokens_per_step * len(records)}
    named = {} if is_old else {"starts": {"generator": {"tag": "d4"}, "verifier": {"tag": "d4-ver"}}}
    counted = {} if is_old else {"steps": len(records) + len(judged)}
    write_run(folder, {"args": {"task": "chain", "seed": seed, "recipe": "tango", **flags}, **named, "torch": "2"},
              {"seed": seed, "minutes": 1.5, "before": scores[0], "after": scores[-1], **counted, **end},
              records + judged, rollouts, examples)
    return str(folder)


def made(*args, **flags) -> Run:
    """A run of `make_run`, read."""
    return read_run(make_run(*args, **flags))


def rows_of(base) -> dict[str, dict]:
    """The comparison of all runs in a folder, by arm."""
    return {row["arm"]: row for row in compare([read_run(str(f)) for f in (base / "runs").iterdir()])}


def report_on(*args: str) -> None:
    script_main(report.main, report.make_parser(), list(args))


def refusal(capsys, *args: str) -> str:
    """What the script says to input that it refuses."""
    with pytest.raises(SystemExit) as stop:
        report_on(*args)
    assert stop.value.code == 2
    return capsys.readouterr().err.strip()


def write_run(folder, config: dict, summary: dict, records: list[dict], rollouts=(), examples=()) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rollouts))
    if examples:  # older runs have none
        (folder / "examples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in examples))


def make_other_run(base, name: str, roles: tuple[str, ...], first: dict, last: dict, recipe: str = "my/own.py",
                   rollouts=()) -> str:
    """A run of a recipe of its own: 20 steps, each an update of all roles, evaluated at 0, 10 and 20 with scores that
    go evenly from `first` to `last`. Its recipe.py cannot be imported."""
    folder = base / "runs" / name
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text("raise RuntimeError('a report ran it')")
    shorts = [role[:3] for role in roles]
    middle = {n: (first[n] + last[n]) / 2 if isinstance(first[n], float) else first[n] for n in first}
    records = [{"step": i, "role": "+".join(roles), **{f"{s}_step": i for s in shorts}, "sampled_tokens": 100 * i,
                **{f"{s}/margin": float(i) for s in shorts}, **{f"{s}/entropy": 0.5 for s in shorts},
                "timing_s/step": 1.0,
                **({"without_update": 1} if i >= 18 else {}), **({0: first, 10: middle}.get(i, {}))} for i in range(20)]
    config = {"args": {"task": "chain", "seed": 0, "recipe": recipe}, "starts": {role: {"tag": "d4"} for role in roles},
              "shown": [f"{shorts[-1]}/margin"]}
    end = {"steps": 20, **{f"{s}_steps": 20 for s in shorts}, "sampled_tokens": 2000}
    write_run(folder, config, {"seed": 0, "minutes": 1.0, "before": first, "after": last, **end}, records, rollouts)
    return str(folder)


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Two seeds of three arms: the baseline gains 20 and 30 points, the oracle twice as much, tango three quarters of
    the difference."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for seed, gain in ((0, 0.2), (1, 0.3)):
        make_run(tmp_path, f"chain-grpo-s{seed}", seed, [0.1, 0.1 + gain / 2, 0.1 + gain])
        make_run(tmp_path, f"chain-gold_steps-s{seed}", seed, [0.1, 0.1 + gain, 0.1 + 2 * gain])
        make_run(tmp_path, f"chain-tango-s{seed}", seed, [0.1, 0.1 + 0.875 * gain, 0.1 + 1.75 * gain], [0.7, 0.8, 0.9],
                 tokens_per_step=300)
    return tmp_path


@pytest.mark.parametrize("ys, level, expected", [
    ([0.0, 1.0, 1.0], 0.5, 5.0), ([0.0, 0.4, 0.8], 0.5, 12.5), ([0.0, 0.6, 0.2], 0.5, 10 * 5 / 6),
    ([0.5, 0.0, 0.0], 0.5, 0.0), ([0.0, 0.1, 0.2], 0.5, None), ([0.0, 0.2, 0.5], 0.5, 20.0)])
def test_where_a_curve_first_reaches_a_level(ys, level, expected):
    assert first_reach([0.0, 10.0, 20.0], ys, level) == (None if expected is None else pytest.approx(expected))


def test_areas_intervals_and_shares_of_the_oracles_gain_by_hand():
    assert area_under([0, 10, 20], [0.0, 1.0, 1.0]) == pytest.approx(0.75)
    assert area_under([0, 10, 40], [0.0, 1.0, 1.0]) == pytest.approx(0.875)
    # a warm-up: two evaluations at generator step 0
    assert area_under([0, 0, 10], [0.3, 0.5, 0.5]) == pytest.approx(0.5)
    assert area_under([0, 0, 0], [0.3, 0.3, 0.3]) == pytest.approx(0.3)  # a fixed generator
    assert area_under([5], [0.3]) == 0.3 and area_under([], []) is first_reach([], [], 0.5) is None
    middle, half = interval([1.0, 2.0, 3.0])
    assert (middle, half) == (2.0, pytest.approx(4.303 * 1.0 / math.sqrt(3)))
    assert interval([0.4]) == (0.4, None)
    # 16 values of spread 1: t(15) is 2.131 in any table
    values = [(-1.0) ** i for i in range(16)]
    assert interval(values)[1] == pytest.approx(2.1314 * math.sqrt(16 / 15) / 4, rel=1e-3)
    assert recovered({0: 0.1, 1: 0.2}, {0: 0.2, 1: 0.4}) == pytest.approx(0.5)  # gain .3, standard error .1
    assert recovered({0: 0.1, 1: 0.2}, {0: 0.1, 1: 0.32}) is None               # gain .21, standard error .11
    assert recovered({0: 0.1, 1: 0.2}, {0: -0.3, 1: -0.3}) is None
    assert recovered({0: 0.1}, {0: 0.3}) is None
    assert recovered({0: 0.1, 1: 0.2}, {0: 0.2, 1: 0.4, 2: -0.9}) == pytest.approx(0.5)
    assert recovered({0: 0.1, 1: 0.2, 2: 0.9}, {0: 0.2, 1: 0.4}) == pytest.approx(0.5)


def test_indicators_are_means_since_the_evaluation_before():
    records = [{"step": i, "gen_step": i, "gen/reasoning_steps": float(i),
                **({"gen/pass1_in": 0.1} if i in (0, 3) else {})} for i in range(5)]
    points = evaluated(records, {"gen_step": 0, "gen/pass1_in": 0.1}, {"gen_step": 5, "gen/pass1_in": 0.2})
    assert [p["gen/reasoning_steps"] for p in points] == [None, 1.0, 3.5]  # 0 1 2 | 3 4
    assert [p["gen/pass1_in"] for p in points] == [0.1, 0.1, 0.2]


@pytest.mark.parametrize("evaluated_at", [(), (0,), (15,)])
def test_the_first_point_is_the_one_before_training(evaluated_at):
    """Also where no evaluation, or none at step 0, is among the records."""
    records = [{"step": i, "gen_step": i, **({"gen/pass1_in": 0.3} if i in evaluated_at else {})} for i in range(20)]
    points = evaluated(records, {"gen_step": 0, "gen/pass1_in": 0.1}, {"gen_step": 20, "gen/pass1_in": 0.5})
    assert ([(p["gen_step"], p["gen/pass1_in"]) for p in points]
            == [(0, 0.1), *([(15, 0.3)] if evaluated_at == (15,) else []), (20, 0.5)])


@pytest.mark.parametrize("x, expected", [(0.0, 0.0), (5.0, 0.5), (10.0, 1.0), (30.0, 0.75), (40.0, 0.5), (41.0, None)])
def test_the_height_of_a_curve_between_its_points(x, expected):
    assert height_at([0.0, 10.0, 20.0, 40.0], [0.0, 1.0, 1.0, 0.5], x) == expected
    assert height_at([], [], x) is None and height_at([x], [0.3], x) == 0.3


def test_an_older_run_says_the_same_and_one_without_a_verifier_stands_at_its_step_0(tmp_path):
    same = ("chain-tango-s0", 0, [0.1, 0.3, 0.5], [0.7, 0.8, 0.9])
    new, old = (made(tmp_path / part, *same, is_old=part == "old") for part in ("new", "old"))
    assert "starts" not in old.config and "steps" not in old.summary and "steps" in new.summary
    assert old.points == new.points and old.roles == new.roles == ["generator", "verifier"]
    assert tidy([old]) == tidy([new]) and health(old) == health(new)
    scores = {"gen/pass1_in": 0.1}, {"gen/pass1_in": 0.3}
    run = read_run(make_other_run(tmp_path, "chain-grpo-s0", ("generator",), *scores, "grpo"))
    of = lambda point: (point["gen_step"], point["ver_step"], point["gen/pass1_in"])
    assert [of(point) for point in run.points] == [(0, 0, 0.1), (10, 0, 0.2), (20, 0, 0.3)]
    old = made(tmp_path, "chain-grpo-s1", 1, [0.3, 0.4, 0.5], is_old=True)
    assert list(run.points[0])[:2] == list(old.points[0])[:2] == ["gen_step", "ver_step"]


def test_a_role_that_was_not_loaded_is_none_of_the_runs(tmp_path):
    folder = make_other_run(tmp_path, "lookup-mars-s0", ("generator",), {"gen/pass1_in": 0.1}, {"gen/pass1_in": 0.3})
    before = read_run(folder)
    config = before.config | {"starts": before.config["starts"] | {"reader": {"tag": "d4"}}}
    (tmp_path / "runs" / "lookup-mars-s0" / "config.json").write_text(json.dumps(config))
    assert read_run(folder).roles == before.roles == ["generator"] and read_run(folder).points == before.points


@pytest.fixture
def other(tmp_path):
    """A run of a generator and a role that the report does not know, updated together, by a recipe from outside."""
    first = {"gen/pass1_in": 0.1, "gen/pass1_out": None, "prm/auc": 0.5, "prm/first_error_f1_fixed": 0.2,
             "prm/note": "text"}
    last = {**first, "gen/pass1_in": 0.5, "prm/auc": 0.9}
    return read_run(make_other_run(tmp_path, "chain-own-s0", ("generator", "prm"), first, last))


def test_scores_that_the_report_does_not_know_and_what_a_recipe_shows_are_drawn(other):
    assert other.roles == ["generator", "prm"] and other.solver == "generator"
    of = lambda point: (point["gen_step"], point["prm_step"], point["prm/auc"])
    assert [of(point) for point in other.points] == [(0, 0, 0.5), (10, 10, 0.7), (20, 20, 0.9)]
    panels = {metric: (x, curves) for metric, x, curves in panels_of([other])}
    x, curves = panels["prm/auc"]
    line = [(0, 0.5), (10, 0.7), (20, 0.9)]
    assert (x, axes_of([other])[x]) == ("prm_step", "prm step") and [p[:2] for p in curves["own"]] == line
    assert [(r["step"], r["value"]) for r in tidy([other]) if r["metric"] == "prm/auc"] == line
    assert list(panels)[0] == "gen/pass1_in"
    assert not panels.keys() & {"gen/pass1_out", "prm/first_error_f1_fixed", "prm/note"}
    # Its recipe.py would raise.
    assert [p["prm/margin"] for p in other.points] == [None, 4.5, 14.5]
    assert not [name for name in other.points[-1] if name == "gen/margin" or name.startswith("timing")
                or name == "prm/entropy"]
    rows = {row["name"]: (row["early"], row["late"]) for row in health(other)}
    assert rows["gen/entropy"] == rows["prm/entropy"] == (0.5, 0.5)
    assert rows["prm/margin"] == (0.5, 18.5) and rows["without_update"] == (0, 1) and "prm/auc" not in rows


def test_scores_of_a_role_without_updates_stand_at_the_steps_of_the_one_that_solves(tmp_path):
    """A verifier that is frozen or one model with the generator, as whose updates its own are counted."""
    scores = [{"gen/pass1_in": x, "ver/balanced_acc_current": x} for x in (0.1, 0.5)]
    folder = make_other_run(tmp_path, "chain-own-s0", ("generator", "verifier"), *scores)
    run = read_run(folder, watched=["ver/balanced_acc_current"])
    steps = lambda: [row["step"] for row in tidy([run]) if row["metric"] == "ver/balanced_acc_current"]
    for point, own in zip(run.points, (0, 3, 6), strict=True):
        point["ver_step"] = own
    assert steps() == [0, 3, 6]
    for point in run.points:
        point["ver_step"] = 0
    assert steps() == [0, 10, 20]


def test_what_a_recipe_shows_is_drawn_and_the_first_role_solves_where_none_is_called_generator(tmp_path):
    path = tmp_path / "runs" / "chain-tango-s0" / "config.json"
    folder = make_run(tmp_path, "chain-tango-s0", 0, [0.1, 0.2])
    path.write_text(json.dumps({**json.loads(path.read_text()), "shown": ["gen/alpha", "ver/step_f1"]}))
    run = read_run(folder)
    assert {"gen/alpha", "ver/step_f1"} <= run.points[-1].keys()
    assert {metric for metric, _, _ in panels_of([run])} <= EVALS.keys() | INDICATORS.keys()  # it logged none of them
    scores = {"pol/pass1_in": 0.1}, {"pol/pass1_in": 0.5}
    own = read_run(make_other_run(tmp_path, "chain-own-s0", ("policy", "value"), *scores))
    assert [(p["gen_step"], p["gen/pass1_in"]) for p in own.points] == [(0, 0.1), (10, 0.3), (20, 0.5)]
    assert axes_of([own])["gen_step"] == "policy step"
    grpo = made(tmp_path, "chain-grpo-s0", 0, [0.1, 0.2, 0.3])
    row = next(row for row in compare([own, grpo]) if row["arm"] == "own")
    assert row["final_gain"] == pytest.approx([0.2]) and row["steps_ratio"] == pytest.approx([0.5])


def test_a_recipe_without_an_accuracy_is_reported_without_one(tmp_path, capsys):
    folder = make_other_run(tmp_path, "chain-own-s0", ("judge",), {"jud/auc": 0.5}, {"jud/auc": 0.7})
    grpo = make_run(tmp_path, "chain-grpo-s0", 0, [0.1, 0.2, 0.3])
    row = next(row for row in compare([read_run(folder), read_run(grpo)]) if row["arm"] == "own")
    assert [text for text in cells(row)[2:7]] == ["-"] * 5
    report_on(folder)
    report_on(make_other_run(tmp_path, "blind", ("judge",), {}, {}))


def test_arms_are_compared_seed_by_seed(experiment, tmp_path):
    rows = rows_of(experiment)
    assert list(rows) == ["tango", "grpo", "gold_steps"]
    tango, gold = rows["tango"], rows["gold_steps"]
    assert sorted(tango["final_gain"]) == pytest.approx([0.15, 0.225])
    assert gold["steps_ratio"] == pytest.approx([0.5, 0.5]) and tango["steps_ratio"] == pytest.approx([4 / 7, 4 / 7])
    assert tango["tokens_ratio"] == pytest.approx([12 / 7, 12 / 7])  # three times the tokens per step
    assert (tango["final_recovered"], tango["area_recovered"]) == (pytest.approx(0.75), pytest.approx(0.75))
    assert tango["ver/step_f1_fixed"] == [(0.7, 0.9), (0.7, 0.9)] and rows["grpo"]["ver/step_f1_fixed"] == []
    assert COLUMNS[:4] == ("arm", "seeds", "final", "out of distribution")
    assert cells(rows["grpo"])[:4] == ["grpo", "2", "35.0 ± 7.1", "17.5 ± 3.5"]
    at_2000_of_3000 = [0.1 + 0.875 * gain * 2 / 3 for gain in (0.2, 0.3)]
    assert sorted(tango["at_equal_tokens"]) == pytest.approx(at_2000_of_3000)
    assert rows["grpo"]["at_equal_tokens"] == rows["grpo"]["final"]
    assert cells(tango)[4:] == ["31.9 ± 6.2", "+18.8 ± 47.6", "+9.4 ± 23.8", "0.57", "1.71", "24.6 ± 4.1", "75%", "75%",
                                "70.0 -> 90.0", "70.0 -> 90.0"]
    first = [read_run(str(f)) for f in (experiment / "runs").iterdir() if f.name.endswith("s0")]
    assert "One seed: differences have no interval" in markdown_table(compare(first))
    assert "One seed" not in markdown_table(list(rows_of(experiment).values()))
    assert "| oracle's" in markdown_table(list(rows_of(experiment).values()))


def test_what_an_arm_has_not_got_is_counted_not_guessed(experiment):
    make_run(experiment, "chain-slow-s0", 0, [0.1, 0.1, 0.2])
    make_run(experiment, "chain-slow-s1", 1, [0.1, 0.4, 0.4])
    rows = rows_of(experiment)
    assert cells(rows["slow"])[7] == "0.50 (1 of 2 never)"
    assert "| slow |" in markdown_table(list(rows.values()))
    make_run(experiment, "chain-thrifty-s0", 0, [0.1, 0.2, 0.3], tokens_per_step=50)
    make_run(experiment, "chain-thrifty-s1", 1, [0.1, 0.2, 0.4])
    rows = rows_of(experiment)
    assert cells(rows["thrifty"])[COLUMNS.index("final at GRPO's tokens")] == "40.0 (1 of 2 ended before)"
    make_run(experiment, "chain-tango-s2", 2, [0.1, 0.9, 0.9])
    tango = rows_of(experiment)["tango"]
    assert (sorted(tango["final_gain"]) == pytest.approx([0.15, 0.225])
            and tango["final_recovered"] == pytest.approx(0.75))
    assert cells(tango)[1] == "3" and cells(tango)[5].endswith(" (2 pairs)")


def test_a_baseline_that_learned_nothing_gives_no_ratio_and_the_same_arm_and_seed_twice_is_bad_input(tmp_path):
    runs = [made(tmp_path, f"chain-{arm}-s0", 0, ys)
            for arm, ys in (("grpo", [0.3, 0.2, 0.3]), ("tango", [0.3, 0.4, 0.5]))]
    rows = {row["arm"]: row for row in compare(runs)}
    assert rows["tango"]["steps_ratio"] == [] and cells(rows["tango"])[7] == "-"
    runs = [made(tmp_path / part, "chain-tango-s0", 0, [0.1, 0.2]) for part in ("a", "b")]
    with pytest.raises(BadInput, match="task chain: two runs"):
        compare(runs)


def test_pairs_that_differ_in_what_must_be_the_same_are_bad_input(tmp_path):
    grpo = made(tmp_path, "chain-grpo-s0", 0, [0.1, 0.2])
    for flag, value in (("num_steps", 40), ("chain_share", 0.5), ("eval_examples", 7), ("model_tag", "other")):
        tango = made(tmp_path / flag, "chain-tango-s0", 0, [0.1, 0.2], **{flag: value})
        with pytest.raises(BadInput,
                           match=f"chain-tango-s0 and chain-grpo-s0 cannot be compared: --{flag.replace('_', '-')} "
                                 f"{value} and None"):
            compare([grpo, tango])
    fixed = made(tmp_path, "chain-fixed_generator-s0", 0, [0.1, 0.1], num_steps=40, recipe="fixed_generator")
    assert [row["arm"] for row in compare([grpo, fixed])] == ["grpo", "fixed_generator"]  # its steps are another role's


@pytest.mark.parametrize("what, change", [
    ("problems", {"problems": 1}), ("texts of problems", {"texts": 1}),
    ("starting models", {"starts": {"generator": {"tag": "d4", "step": 1, "fingerprint": 1}}})])
def test_pairs_that_differ_in_what_no_flag_says_are_bad_input(tmp_path, what, change):
    runs = [made(tmp_path, f"chain-{arm}-s0", 0, [0.1, 0.2]) for arm in ("grpo", "tango")]
    compare(runs)  # of an older version, which did not say
    runs[0].config |= json.loads(json.dumps(change))
    compare(runs)
    runs[1].config |= json.loads(json.dumps(change).replace("1", "2"))
    with pytest.raises(BadInput, match=f"chain-tango-s0 and chain-grpo-s0 cannot be compared: their {what} differ"):
        compare(runs)
    runs[1].seed = 1
    compare(runs)


def test_two_texts_of_a_recipe_in_one_arm_are_told(tmp_path, capsys):
    runs = [made(tmp_path, f"chain-tango-s{seed}", seed, [0.1, 0.2]) for seed in range(2)]
    for marks, words in (((None, 2), ""), ((2, 2), ""), ((1, 2), "WARNING: runs chain-tango-s1 and chain-tango-s0 of")):
        for run, mark in zip(runs, marks, strict=True):
            run.config["recipe_mark"] = mark
        compare(runs)
        assert capsys.readouterr().out.startswith(words) and (words or not capsys.readouterr().out)


def test_seeds_of_one_arm_have_the_same_flags_and_all_runs_the_same_evaluation(tmp_path):
    first = made(tmp_path, "chain-tango-s0", 0, [0.1, 0.2], lr=1e-4, model_tag="a")
    for flag, value, others in (("lr", 1e-5, {"model_tag": "b"}), ("eval_every", 5, {"lr": 1e-4})):
        second = made(tmp_path / flag, "chain-tango-s1", 1, [0.1, 0.2], **{flag: value, **others})
        with pytest.raises(BadInput,
                           match=f"chain-tango-s1 and chain-tango-s0 cannot be compared: --{flag.replace('_', '-')} "
                                 f"{value} and"):
            compare([first, second])
    compare([first, made(tmp_path / "same", "chain-tango-s1", 1, [0.1, 0.2], lr=1e-4, model_tag="b")])


def test_flags_of_other_recipes_and_checkpoints_of_other_roles_do_not_keep_runs_apart(tmp_path):
    grpo = made(tmp_path, "chain-grpo-s0", 0, [0.1, 0.2], recipe="grpo")
    flags = dict(recipe="own.py", verifier_max_new_tokens=50, margin=0.5)
    first, second = (made(tmp_path, f"chain-own-s{seed}", seed, [0.1, 0.2], prm_tag=f"d4-{seed}", **flags)
                     for seed in (0, 1))
    assert [row["arm"] for row in compare([grpo, first, second])] == ["grpo", "own"]
    tango = made(tmp_path, "chain-tango-s0", 0, [0.1, 0.2], verifier_max_new_tokens=60)
    with pytest.raises(BadInput, match="--verifier-max-new-tokens 60 and 50"):
        compare([first, tango])


def test_what_cannot_be_written_is_one_line(experiment, capsys):
    (experiment / "out" / "report.html").mkdir(parents=True)
    with pytest.raises(SystemExit) as stop:
        report_on("--out", str(experiment / "out"), "chain-tango-s0")
    assert stop.value.code == 1
    assert capsys.readouterr().err == f"stopped: {experiment}/out/report.html cannot be written: Is a directory\n"
    assert "curves.csv" not in [f.name for f in (experiment / "out").iterdir()]


def test_a_name_gives_task_and_arm_only_when_its_seed_is_the_runs(tmp_path):
    for name, task, arm in (("hard-no_class_weights-s3", "hard", "no_class_weights"),
                            ("chain-tango-s4", "chain", "chain-tango-s4"), ("first", "chain", "first")):
        run = made(tmp_path, name, 3, [0.1, 0.2])
        assert (run.task, run.arm, run.seed) == (task, arm, 3)


def test_curves_tidy_rows_and_health_by_hand(tmp_path, experiment):
    runs = [made(tmp_path, "chain-a-s0", 0, [0.1, 0.2, 0.3]), made(tmp_path, "chain-a-s1", 1, [0.3, 0.4])]
    points = mean_curve(runs, "gen/pass1_in", "gen_step")
    assert [(x, pytest.approx(y), n) for x, y, _, n, _ in points] == [(0, 0.2, 2), (10, 0.3, 2), (20, 0.3, 1)]
    assert points[0][2] == pytest.approx(0.2 / math.sqrt(2)) and points[2][2] == 0.0
    rows = tidy([read_run(str(experiment / "runs" / "chain-tango-s0"))])
    assert list(rows[0]) == ["task", "arm", "seed", "step", "sampled_tokens", "metric", "value"]
    of = lambda metric: [(r["step"], r["sampled_tokens"], r["value"]) for r in rows if r["metric"] == metric]
    assert of("gen/pass1_in") == [(0, 0, 0.1), (10, 3000, 0.275), (20, 6000, 0.45)]
    assert of("ver/step_f1_fixed") == [(0, 0, 0.7), (5, 3000, 0.8), (10, 6000, 0.9)]
    assert of("gen/reasoning_steps") == [(10, 3000, 4.5), (20, 6000, 14.5)]
    rows = {row["name"]: row for row in health(read_run(str(experiment / "runs" / "chain-tango-s0")))}
    assert rows["gen/reasoning_steps"] == {"name": "gen/reasoning_steps",
                                           "early": 0.5, "late": 18.5}  # steps 0 1 and 18 19 of 20


def test_curves_of_runs_that_skipped_updates_meet_at_each_evaluation(tmp_path):
    runs = [made(tmp_path, "chain-a-s0", 0, [0.2, 0.5], tokens_per_step=10),
            made(tmp_path, "chain-a-s1", 1, [0.4, 0.7], tokens_per_step=30)]
    runs[1].points[1]["gen_step"] = 7  # the other one has made 10
    assert [row[:2] for row in mean_curve(runs, "gen/pass1_in", "sampled_tokens", in_order=True)] == [
        (0, pytest.approx(0.3)), (200, pytest.approx(0.6))]
    assert len(mean_curve(runs, "gen/pass1_in", "sampled_tokens")) == 3


def test_what_is_watched_is_fine_or_warned_of_now_or_earlier(tmp_path):
    fine = {"gen/num_rollouts": 8, "gen/reward": 0.5, "gen/stepless": 0.2, "gen/wrong_passed": None}
    runs = [made(tmp_path, f"chain-tango-s{seed}", seed, [0.1, 0.2, 0.3], logged=fine) for seed in (0, 1)]
    assert well_and_ill(runs) == {"warned": [], "fine": [[words, []] for words in (
        "rollouts can be scored", "sampling explores", "solutions have steps")]}
    runs[0].records[3]["gen/stepless"] = 0.7
    runs[1].records[18]["gen/reward"] = None  # one of the last tenth
    seen = well_and_ill(runs)
    rows = [(row["now"], row["warning"], row["role"], row["runs"]) for row in seen["warned"]]
    assert seen["fine"] == [["sampling explores", []]] and rows == [
        (True, "no rollout could be scored", "generator",
         [{"run": "chain-tango-s1", "now": True, "text": "at step 18, in 1 of 20"}]),
        (False, "answers without steps", "generator",
         [{"run": "chain-tango-s0", "now": False, "text": "70.0% at step 3, in 1 of 20"}])]


def test_the_first_screen_has_the_scores_that_a_recipe_has_and_three_solutions(tmp_path):
    own = read_run(make_other_run(tmp_path, "chain-own-s0", ("judge",), {"jud/auc": 0.5}, {"jud/auc": 0.75}))
    (score,) = progress([own])
    assert score == {"title": "jud/auc", "rows": [{"arm": "own", "first": "0.500", "last": "0.750", "seeds": 1,
                                                   "change": "+0.250", "half": None}]}
    own.points = own.points[:1]
    assert progress([own])[0]["rows"][0]["last"] is None  # under way
    assert latest(own) == {"held_out": False, "step": 0, "cards": []}
    own.rollouts = [{**ROLLOUT, "role": "judge", "step": step, "problem": problem}
                    for step, problem in ((1, "a"), (2, "b"), (2, "b"), (2, "b"), (2, "c"))]
    assert [card["problem"] for card in latest(own)["cards"]] == ["b", "c", "b"] and latest(own)["step"] == 2
    tango = made(tmp_path, "chain-tango-s0", 0, [0.1, 0.2], [0.7, 0.8])
    assert [score["title"] for score in progress([tango])] == [
        EVALS[name] for name in ("gen/pass1_in", "ver/step_f1_fixed", "gen/pass1_out")]
    assert progress([read_run(make_other_run(tmp_path, "blind", ("judge",), {}, {}))]) == []
