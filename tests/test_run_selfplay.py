"""
The comparison of self-play and its relatives: its jobs, their flags and their order, and the table. Nothing is trained.

    python -m pytest tests/test_run_selfplay.py -q
"""
import os

import pytest
from conftest import parse

from nanochat import recipes

from dev.experiments import run_selfplay, selfplay_arms
from dev.experiments.run_selfplay import stages_of, table_of
from dev.experiments.selfplay_arms import FAMILIES, Family, needed, starts_of
from nanochat.common import script_main
from nanochat.rl.report.page import mean_curve
from nanochat.rl.report.report import Run
from scripts import chat_sft, tango_rl
from tasks import make_task

SCRIPTS = {"scripts.chat_sft": chat_sft, "scripts.tango_rl": tango_rl}
ALL = {name: list(family.arms) for name, family in FAMILIES.items()}


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return tmp_path


def test_every_flag_is_known_and_fits_its_recipe_and_task(empty):
    for stage in stages_of(ALL, ["1"]):
        for job in stage:
            args = parse(SCRIPTS[job.module], job.flags.split())
            assert args.seed == 1 and job.flags == " ".join(job.flags.split()), job.name
            if job.module == "scripts.tango_rl":
                recipe, task = recipes.load(args.recipe), make_task(args)
                tango_rl.check_args(args, 1)
                recipes.ask(args.recipe, recipe, "check", args, task)
            else:
                chat_sft.check_demos(args, make_task(args))


def test_every_family_has_its_baseline_and_what_it_starts_from():
    for name, family in FAMILIES.items():
        assert family.baseline in family.arms and family.watched, name
        order = list(family.starts)
        for start, flags in family.starts.items():
            assert all(order.index(other) < order.index(start) for other in starts_of(flags)), (name, start)
        for arm, flags in family.arms.items():
            assert starts_of(flags) and set(starts_of(flags)) <= set(order), (name, arm)


def test_each_job_comes_after_what_it_reads(empty):
    made: set[str] = set()
    for stage in stages_of(ALL, ["1", "2"]):
        given = [dict(zip(words, words[1:], strict=False)) for words in (job.flags.split() for job in stage)]
        for job, flags in zip(stage, given, strict=True):
            needed_tags = {flags.get("--from-tag"), flags.get("--verifier-tag")} - {None}
            if job.module == "scripts.tango_rl":
                needed_tags.add(flags["--model-tag"])
            elif flags["--role"] == "verifier":  # judges the generator's solutions and is saved under a tag of its own
                needed_tags = {flags["--model-tag"]} | ({flags.get("--from-tag")} - {None})
            assert needed_tags <= made, job.name
        for flags in given:
            made |= {flags.get("--verifier-tag"), flags.get("--model-tag")}


SMALL = Family("two arms", "", {"gen": "--role generator", "both": "--from-tag {gen}", "more": "--from-tag {both}"},
               {"base": "--model-tag {gen}", "other": "--model-tag {both}", "third": "--model-tag {more}"}, "base",
               {"gen/pass1_in": "solved", "gen/shown": "shown"})


def test_only_what_the_arms_need_is_made(empty, monkeypatch):
    monkeypatch.setitem(selfplay_arms.FAMILIES, "small", SMALL)
    assert needed(SMALL, ["base"]) == ["gen"] and needed(SMALL, ["third"]) == ["gen", "both", "more"]
    names = [[job.name for job in stage] for stage in stages_of({"small": ["base", "other"]}, ["3"])]
    assert names == [["sft-small-gen-s3"], ["sft-small-both-s3"], ["small-base-s3", "small-other-s3"]]


def run_of(arm: str, seed: int, finals: tuple, tokens: tuple, shown: tuple) -> Run:
    points = [{"gen_step": i, "record": i, "sampled_tokens": t, "gen/pass1_in": f, "gen/pass1_out": None,
               "gen/shown": s}
              for i, (f, t, s) in enumerate(zip(finals, tokens, shown, strict=True))]
    return Run(f"small-{arm}-s{seed}", "small", arm, seed, {}, {}, points, [], [], ["generator"])


def test_the_table_pairs_with_the_baseline_at_the_end_and_at_its_tokens(monkeypatch):
    monkeypatch.setitem(selfplay_arms.FAMILIES, "small", SMALL)
    runs = [run_of("base", 1, (0.2, 0.5), (0, 100), (None, 0.3)), run_of("base", 2, (0.2, 0.6), (0, 100), (None, 0.4)),
            run_of("other", 1, (0.2, 0.8), (0, 200), (None, 0.1)), run_of("other", 2, (0.2, 1.0), (0, 50), (None, 0.1))]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table_of("small", runs).splitlines()]
    base, other = (dict(zip(lines[0], line, strict=True)) for line in lines[2:])
    assert base["solved, by seed"] == "50.0 60.0" and other["solved, by seed"] == "80.0 100.0"
    assert base["minus base"] == base["at base's tokens"] == "-"
    assert other["minus base"].startswith("+35.0 ± ")         # 0.8 - 0.5 and 1.0 - 0.6
    assert other["at base's tokens"] == "+0.0 (1 pairs)"      # seed 1: 0.5 at 100 tokens; seed 2 ended at 50
    assert other["solved, first -> last"] == "20.0 -> 90.0" and base["shown, first -> last"] == "35.0 -> 35.0"


def test_curves_of_runs_that_skipped_updates_meet_at_each_evaluation():
    runs = [run_of("base", 1, (0.2, 0.5), (0, 100), (None, 0.3)), run_of("base", 2, (0.4, 0.7), (0, 300), (None, 0.5))]
    runs[1].points[1]["gen_step"] = 7  # the other one has made 1
    assert [row[:2] for row in mean_curve(runs, "gen/pass1_in", "sampled_tokens", in_order=True)] == [
        (0, pytest.approx(0.3)), (200, pytest.approx(0.6))]
    assert len(mean_curve(runs, "gen/pass1_in", "sampled_tokens")) == 3
    assert mean_curve(runs, "gen/shown", "sampled_tokens", in_order=True)[0][:2] == (200, pytest.approx(0.4))


@pytest.mark.parametrize("flags, words", [
    (["--families", "nobody"], ["--families nobody", "no_labels"]), (["--seeds", "x"], ["--seeds x"]),
    (["--families", "no_labels small", "--arms", "ttrl"], ["of which family"]),
    (["--families", "no_labels", "--arms", "x"], ["--arms x", "ttrl"])])
def test_what_there_is_not_is_one_line(empty, capsys, monkeypatch, flags, words):
    monkeypatch.setitem(selfplay_arms.FAMILIES, "small", SMALL)
    with pytest.raises(SystemExit) as stop:
        script_main(run_selfplay.main, run_selfplay.make_parser(), flags)
    line = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and "\n" not in line and all(word in line for word in words)
    assert not os.listdir(empty)


def test_the_list_gives_every_process_and_makes_nothing(empty, capsys):
    script_main(run_selfplay.main, run_selfplay.make_parser(), ["--list"])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {f"{name}-{arm}" for name, arms in ALL.items() for arm in arms} < listed and not os.listdir(empty)
