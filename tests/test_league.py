"""The league: who has a row, the flags of every process, the rule that settings are chosen by, and the store."""
import csv
import sys

import pytest
from conftest import parse
from test_experiments import STUB, World

from dev.experiments import league
from dev.experiments.jobs import job_of, runs_of, stages_of
from dev.experiments.league_systems import (LEFT_OUT, RATES, SYSTEMS, TASKS, TUNING_SEEDS, allowances, experiment,
                                            family_of, recipe_of, system_of)
from nanochat import recipes
from nanochat.cli import script_main
from nanochat.common import BadInput
from nanochat.rl.verify.judges import check_together_args
from scripts import chat_sft, label_steps, tango_rl

SCRIPTS = {"scripts.chat_sft": chat_sft, "scripts.label_steps": label_steps, "scripts.tango_rl": tango_rl}
BUDGET = 20_000
OWN = '''"""An idea of one's own."""
from nanochat.recipes.tango.fixed_verifier import ROLES, add_args, draws, evaluate, play
'''


@pytest.fixture
def world(tmp_path, monkeypatch, capsys) -> World:
    monkeypatch.setattr(league.league_pages, "write_pages", lambda *_: "pages")
    return World(tmp_path, monkeypatch, capsys)


def play(world, *flags: str) -> tuple[int, str, str]:
    flags = [*([] if "--out" in flags else ["--out", str(world.base / "out")]), *flags, "--budget", str(BUDGET)]
    world.monkeypatch.setattr(sys, "argv", ["league.py", *flags])
    (world.base / "calls").write_text("")
    code = 0
    try:
        script_main(league.main, league.make_parser())
    except SystemExit as stop:
        code = stop.code
    return code, *world.capsys.readouterr()


def stored(world) -> list[dict]:
    with open(world.base / "out" / "runs.csv", newline="") as f:
        return list(csv.DictReader(f))


def test_every_recipe_has_a_row_or_a_reason():
    assert {recipe_of(name) for name in SYSTEMS} | set(LEFT_OUT) == set(recipes.names())
    assert not {recipe_of(name) for name in SYSTEMS} & set(LEFT_OUT)
    for task in TASKS:  # what all are compared with
        assert task in system_of("grpo").tasks


@pytest.mark.parametrize("task", TASKS)
def test_every_process_has_flags_that_its_script_takes_and_all_begin_from_one_checkpoint(task):
    names = [name for name in SYSTEMS if task in system_of(name).tasks]
    e = experiment(task, BUDGET, [(name, system_of(name).rates[0]) for name in names])
    stages = stages_of([e], ["1"])
    for job in [job for stage in stages for job in stage]:
        if job.module in SCRIPTS:
            args = parse(SCRIPTS[job.module], job.flags.split())
            if "judge" in vars(args) and job.module == "scripts.tango_rl":
                check_together_args(args)
    generators = {parse(tango_rl, job.flags.split()).model_tag for job in stages[-1]}
    assert generators == {job_of(e, e.starts["start"], "1").name.removeprefix("sft-")}


@pytest.mark.parametrize("name", [name for name in SYSTEMS if "chain" in system_of(name).tasks])
def test_every_system_has_three_tries_and_the_same_budget_its_judge_included(name):
    assert len(set(system_of(name).rates)) == len(RATES)
    e = experiment("chain", BUDGET, [(name, rate) for rate in system_of(name).rates])
    labels, sampling = allowances(name, BUDGET)
    for job in runs_of(e, ["1"]):
        args = parse(tango_rl, job.flags.split())
        assert args.token_budget + labels + sampling == BUDGET and args.kl_coef == 0 and args.examples_per_step == 16
    if system_of(name).judge:
        training = parse(tango_rl, job_of(e, e.starts[f"train_{name}"], "1").flags.split())
        assert training.recipe == name and training.token_budget == sampling
        assert (training.num_steps < 1000) == (sampling == 0)  # one that samples nothing is bounded by its steps


def test_tries_run_on_the_tuning_seeds_and_the_best_one_on_those_that_count(world):
    best = STUB.replace("*tango*|*shepherd*) final=0.75", "*dapo_2e-4-s102) final=0.9")
    (world.base / "python").write_text(best)
    assert play(world, "--tasks", "chain", "--systems", "dapo", "--seeds", "1 2")[0] == 0
    tuning = [f"league_chain_{BUDGET}-{name}_{rate}-s{seed}" for seed in TUNING_SEEDS for name in ("grpo", "dapo")
              for rate in RATES]
    finals = [f"league_chain_{BUDGET}-{name}-s{seed}" for seed in (1, 2) for name in ("grpo_1e-4", "dapo_2e-4")]
    assert world.runs() == tuning + finals  # of equal tries the best in the mean, then the first
    assert len(stored(world)) == len(tuning + finals)
    row = next(row for row in stored(world) if (row["system"], row["rate"], row["seed"]) == ("dapo", "2e-4", "102"))
    assert (row["gen/pass1_in before"], row["gen/pass1_in after"], row["tokens"]) == ("0.1", "0.9", "1000")
    assert play(world, "--tasks", "chain", "--systems", "dapo", "--seeds", "1 2")[0] == 0
    assert world.runs() == []


def test_a_rate_that_collapses_on_one_tuning_seed_is_not_taken(world):
    ends = "*grpo_1e-4*) final=0.6 ;; *grpo_2e-4-s102) final=0.5 ;; *grpo_2e-4*) final=0.9"
    (world.base / "python").write_text(STUB.replace("*tango*|*shepherd*) final=0.75", ends))
    assert play(world, "--tasks", "chain", "--systems", "grpo", "--seeds", "1")[0] == 0
    assert world.runs()[-1] == f"league_chain_{BUDGET}-grpo_1e-4-s1"


def test_what_is_stored_is_not_made_again_where_its_folders_are_gone(world):
    assert play(world, "--tasks", "lookup", "--systems", "ssrl", "--seeds", "1")[0] == 0
    rows = stored(world)
    for folder in ("runs", "chatsft_checkpoints", "logs"):
        for path in (world.base / folder).iterdir():
            path.rename(world.base / f"gone-{folder}-{path.name}")
    assert play(world, "--tasks", "lookup", "--systems", "ssrl", "--seeds", "1")[0] == 0
    assert world.runs() == [] and world.calls("chat_sft") == [] and stored(world) == rows
    path = world.base / "out" / "runs.csv"
    path.write_text(path.read_text().replace("--recipe ssrl", "--recipe ssrl --old"))
    assert play(world, "--tasks", "lookup", "--systems", "ssrl", "--seeds", "1")[0] == 0
    assert len(world.runs()) == len(RATES) * len(TUNING_SEEDS) + 1  # those with other flags
    assert stored(world) == rows


def test_a_judge_s_training_and_its_labels_are_paid_from_the_budget(world):
    world.monkeypatch.setattr(league, "TUNING_SEEDS", ("101",))
    labels = "echo '{\"cost\": {\"tokens\": 0}, \"solution_tokens\": 2600}'"
    stub = STUB.replace("echo '{\"cost\": {\"tokens\": 40000}, \"solution_tokens\": 9000}'", labels)
    supervised = "scripts.tango_rl) tokens=1000; case $run in *train_prm*) tokens=0 ;; esac; mkdir"
    stub = stub.replace("scripts.tango_rl) mkdir", supervised).replace('"sampled_tokens": 1000',
                                                                       '"sampled_tokens": \'$tokens\'')
    (world.base / "python").write_text(stub)
    assert play(world, "--tasks", "chain", "--systems", "prm genprm", "--seeds", "1")[0] == 0
    tokens = {row["system"]: row["tokens"] for row in stored(world)}
    assert tokens == {"grpo": "1000", "prm": "3600", "genprm": "4600"}  # its labels; its labels and its training
    minutes = {row["system"]: row["minutes"] for row in stored(world)}
    assert minutes == {"grpo": "1.0", "prm": "2.0", "genprm": "2.0"}
    (world.base / "python").write_text(STUB)
    for path in (world.base / "labels").glob("*/labels.summary.json"):
        path.write_text('{"cost": {"tokens": 0}, "solution_tokens": 2626}')
    (world.base / "out" / "runs.csv").unlink()
    code, _, err = play(world, "--tasks", "chain", "--systems", "prm", "--seeds", "1")
    assert code == 2 and "2626 tokens of labelled solutions, and prm may take 2500" in err


def test_a_recipe_of_one_s_own_enters_by_its_path_and_a_changed_text_is_run_again(world):
    path = world.base / "idea.py"
    path.write_text(OWN)
    assert family_of(str(path)) == "outside"
    assert play(world, "--tasks", "chain", "--systems", str(path), "--seeds", "1")[0] == 0
    own = [call for call in world.calls("tango_rl") if f"--recipe {path}" in call]
    assert len(own) == len(RATES) * len(TUNING_SEEDS) + 1
    assert all("--verifier-tag league_chain-s" in call for call in own)
    assert play(world, "--tasks", "chain", "--systems", str(path), "--seeds", "1")[0] == 0
    assert world.runs() == []


def test_a_system_that_fails_is_left_out_and_the_others_go_on(world):
    world.monkeypatch.setenv("FAILS", f"league_chain_{BUDGET}-dapo_2e-4-s101")
    code, _, err = play(world, "--tasks", "chain", "--systems", "dapo", "--seeds", "1")
    assert code == 1 and "bad luck" in err
    assert [run for run in world.runs() if run.endswith("-s1")] == [f"league_chain_{BUDGET}-grpo_1e-4-s1"]


@pytest.mark.parametrize("flags, words", [
    (("--systems", "debate"), "debate has no row: its models argue"), (("--systems", "nobody"), "there are grpo"),
    (("--tasks", "gsm8k"), "there are chain"), (("--tasks", "chain words"), "words: it has a tokenizer of its own"),
    (("--seeds", "1 101"), "settings are tuned on 101, 102, 103"),
    (("--report", "--again"), "take one of them"),
    (("--systems", "grpo", "--again"), "has no run of grpo at chain with seed 1 and"),
    (("--systems", "tango search_r1", "--tasks", "chain"), "--systems search_r1: it is for lookup, not for chain"),
    (("--systems", "dapo", "--tasks", "chain rewrite"), "--tasks rewrite: none of dapo is for it"),
    (("--systems", "none.py"), "--systems none.py: no such file"), (("--report",), "--report: no finished run is in"),
    (("--out", league.OUT), "are of 150000; give another --out"),
    (("--systems", "my/grpo.py"), "its runs would have the names of grpo's")])
def test_what_cannot_be_is_one_line_before_any_run(world, flags, words):
    (world.base / "my").mkdir()
    (world.base / "my" / "grpo.py").write_text(OWN)
    flags = [str(world.base / flag) if flag == "my/grpo.py" else flag for flag in flags]
    code, _, err = play(world, *flags)
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1 and world.runs() == []


def test_a_row_is_made_again_beside_what_is_stored(world):
    play(world, "--tasks", "lookup", "--systems", "ssrl", "--seeds", "1")
    rows = stored(world)
    stub = (world.base / "python").read_text().replace("final=0.25", "final=0.35")
    (world.base / "python").write_text(stub)
    code, out, _ = play(world, "--tasks", "lookup", "--systems", "ssrl", "--seeds", "1", "--again")
    assert code == 0 and "lookup ssrl seed 1: solved 0.25 stored, 0.35 now; tokens 1000 and 1000" in out
    assert stored(world) == rows and len(world.runs()) == 1
    code, _, err = play(world, "--tasks", "lookup", "--systems", "ssrl", "--seeds", "1 9", "--again")
    assert code == 2 and "no run of ssrl at lookup with seed 9" in err and world.runs() == []


def test_systems_are_played_at_the_tasks_that_they_are_for():
    assert league.tasks_and_systems(None, "ssrl")[0] == ["lookup"]
    assert league.tasks_and_systems(None, None)[0] == league.GENERATED


def imported(world):
    """The base directory of words, where the real model was imported before."""
    folder = world.base / "words" / "chatsft_checkpoints" / "smollm2"
    folder.mkdir(parents=True)
    (folder / "meta_000000.json").touch()
    return world.base / "words"


def test_a_real_model_is_scored_by_sampling_and_has_one_rate(world):
    of_words = imported(world)
    assert play(world, "--tasks", "words", "--systems", "tango", "--seeds", "1 2")[0] == 0
    assert not world.calls("tok_train") and (of_words / "runs").exists() and not (world.base / "runs").exists()
    assert [run.partition("-")[2] for run in world.runs()] == [
        f"{name}_1.5e-5-s{seed}" for seed in (1, 2) for name in ("grpo", "tango")]
    assert len(world.calls("chat_eval")) == 2 + 4  # the start once for each seed
    assert all("league_words-s0-both" in call for call in world.calls("tango_rl"))
    row = next(row for row in stored(world) if (row["system"], row["seed"]) == ("tango", "2"))
    assert (row["gen/pass1_in before"], row["gen/pass1_in after"], row["gen/pass1_out after"]) == ("0.2", "0.5", "0")


def test_no_two_processes_score_one_start(world):
    imported(world)
    scored, carried = [], league.carry_out_all

    def carry_out_all(jobs, at_once, after=None):
        scored.extend(score for scores in (after or {}).values() for score in scores)
        return carried(jobs, at_once, after)
    world.monkeypatch.setattr(league, "carry_out_all", carry_out_all)
    assert play(world, "--tasks", "words", "--systems", "tango", "--seeds", "1")[0] == 0
    assert len(scored) == len(set(scored)) == 3  # the start's, and two ends'


def test_unreadable_stores_are_one_line(world):
    (world.base / "out").mkdir()
    for text, words in (("a,b\n1,2\n", "after 0 lines that can be read: columns are missing"),
                        ("task,system,seed\nchain,grpo,1\n", "runs.csv has no column 'rate'"),
                        ("task,system,seed,best\nchain,grpo,1,.5\nchain,grpo,2,nan\n", "after 1 lines"),
                        ("task,system,seed\nchain,grpo\n", "columns are missing")):
        (world.base / "out" / "runs.csv").write_text(text)
        code, _, err = play(world, "--report", "--tasks", "lookup")
        assert code == 2 and words in err and len(err.strip().splitlines()) == 1


def test_bad_rows_are_refused_by_name():
    with pytest.raises(BadInput, match="there are grpo"):
        system_of("grpoo")
