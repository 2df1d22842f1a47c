"""
The comparison of verifiers: its jobs, their flags and their order, and the table. Nothing is trained.

    python -m pytest tests/test_run_verifiers.py -q
"""
import json
import os

import pytest
from conftest import parse

from dev.experiments import run_verifiers
from dev.experiments.run_verifiers import reward_job, stages_of, table_of, training_job, training_table
from dev.experiments.verifier_arms import LABELS, VERIFIERS
from nanochat import recipes
from nanochat.common import script_main
from nanochat.rl.verify.judges import JUDGES
from scripts import chat_sft, label_steps, tango_rl

SCRIPTS = {"scripts.chat_sft": chat_sft, "scripts.label_steps": label_steps, "scripts.tango_rl": tango_rl}


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return tmp_path


def test_every_flag_is_known_and_every_judge_and_label_is_there(empty):
    for stage in stages_of(["1"], list(VERIFIERS)):
        for job in stage:
            args = parse(SCRIPTS[job.module], job.flags.split())
            assert args.seed == 1 and job.flags == " ".join(job.flags.split())  # as they are written down and compared
            if job.module == "scripts.tango_rl":
                assert args.recipe in recipes.names()
    for v in VERIFIERS.values():
        assert v.judge in ("", *JUDGES) and v.labels in ("", *LABELS) and (v.judge or not v.recipe)


def test_each_job_comes_after_what_it_reads(empty):
    """A file or checkpoint that a job's flags name is made by a job of an earlier stage."""
    made: set[str] = set()
    for stage in stages_of(["1", "2"], list(VERIFIERS)):
        for job in stage:
            words = job.flags.split()
            given = dict(zip(words, words[1:], strict=False))
            for flag in ("--labels", "--solutions", "--from-tag"):
                assert flag not in given or given[flag] in made, job.name
            if job.module != "scripts.chat_sft":
                tags = {given.get("--generator-tag") or given["--model-tag"], given.get("--verifier-tag")} - {None}
                assert tags <= made, job.name
        for job in stage:
            words = job.flags.split()
            given = dict(zip(words, words[1:], strict=False))
            made |= {given.get("--out"), f"{job.name}-ver", f"{job.name}-gen", given.get("--verifier-tag"),
                     given.get("--model-tag")}


def test_only_what_the_asked_for_verifiers_need_is_made(empty):
    names = [job.name for stage in stages_of(["3"], ["grpo", "orm"]) for job in stage]
    assert names == ["sft-small_chain-s3", "labels-gold-s3", "verifiers-train_orm-s3", "verifiers-grpo-s3",
                     "verifiers-orm-s3"]
    assert [job.name for stage in stages_of(["3"], ["sft", "rm_r1"]) for job in stage] == [
        "sft-small_chain-s3", "sft-small_chain-s3-ver", "sft-small_chain-s3-ver-long",
        "sft-small_chain-s3-ver-solve_pair", "verifiers-train_rm_r1-s3", "verifiers-sft-s3", "verifiers-rm_r1-s3"]
    assert [job.name for stage in stages_of(["3"], ["prm_strong"]) for job in stage] == [
        "sft-small_chain-s3", "labels-gold-s3", "verifiers-oracle-s3", "labels-omega_strong-s3",
        "verifiers-train_prm_strong-s3", "verifiers-prm_strong-s3"]
    assert [job.name for stage in stages_of(["3"], ["grpo"]) for job in stage] == ["sft-small_chain-s3",
                                                                                   "verifiers-grpo-s3"]


def write_summary(job, **values) -> None:
    os.makedirs(job.folder, exist_ok=True)
    with open(os.path.join(job.folder, job.done), "w") as f:
        json.dump(values, f)


def test_the_table_pairs_with_grpo_and_adds_up_what_training_cost(empty):
    judged = {"ver/step_f1_fixed": 0.9, "ver/step_auc_fixed": 0.95, "ver/first_error_f1_fixed": 0.5,
              "ver/outcome_auc_fixed": 0.8, "ver/ece_fixed": 0.1, "ver/maj_fixed": 0.4, "ver/bon_fixed": 0.4,
              "ver/weighted_fixed": 0.5, "ver/tokens_fixed": 7.0}
    for seed, base, gain in (("1", 0.5, 0.1), ("2", 0.6, 0.3)):
        for name, final in (("grpo", base), ("prm_shepherd", base + gain)):
            write_summary(reward_job(seed, name), before=judged if name != "grpo" else {}, sampled_tokens=2_000_000,
                          after={"gen/pass1_in": final, "gen/pass1_out": 0.25})
        write_summary(training_job(seed, "prm_shepherd"), sampled_tokens=1000)
        for labels, tokens in (("gold", 0), ("shepherd", 40_000)):
            write_summary(run_verifiers.label_job(seed, labels), cost={"tokens": tokens}, solution_tokens=9000)
    lines = table_of(["1", "2"], ["grpo", "prm_shepherd", "orm"]).splitlines()
    assert len(lines) == 4  # the title, its line, and two that are finished
    cells = dict(zip(lines[0].strip("| ").split(" | "), lines[3].strip("| ").split(" | "), strict=True))
    assert cells["step F1"] == "90.0 ± 0.0" and cells["tokens per judgment"] == "7.0 ± 0.0"
    assert cells["tokens of its training"] == "50k"      # 9,000 of solutions, 40,000 of completions, 1,000 of its own
    assert cells["final, seeds 1, 2"] == "60.0 90.0" and cells["longer"] == "25.0 ± 0.0"
    assert cells["minus GRPO"].startswith("+20.0 ± ") and cells["tokens"] == "2.00M"
    write_summary(training_job("1", "prm_strong"), sampled_tokens=1000)
    write_summary(run_verifiers.label_job("1", "omega_strong"), cost={"tokens": 30_000}, solution_tokens=9000)
    write_summary(reward_job("1", "oracle"), sampled_tokens=200_000)  # whose generator completes
    assert run_verifiers.training_cost("1", "prm_strong") == 240
    of_grpo = dict(zip(lines[0].strip("| ").split(" | "), lines[2].strip("| ").split(" | "), strict=True))
    assert of_grpo["minus GRPO"] == of_grpo["step F1"] == of_grpo["tokens of its training"] == "-"


def test_the_table_of_training_pairs_after_with_before(empty):
    for seed, before, after in (("1", 0.5, 0.6), ("2", 0.6, 0.8)):
        write_summary(training_job(seed, "rm_r1"), before={"ver/pair_acc_in": before}, after={"ver/pair_acc_in": after})
        write_summary(training_job(seed, "orm"), before={"ver/ece_fixed": 0.1}, after={"ver/ece_fixed": 0.1})
    lines = training_table(["1", "2"], ["grpo", "sft", "orm", "rm_r1", "spct"]).splitlines()
    assert len(lines) == 3 and lines[2].startswith("| rm_r1 | pairs judged rightly | 50.0 60.0 | 60.0 80.0 | +15.0 ± ")
    assert training_table(["1", "2"], ["grpo", "orm"]) == ""


@pytest.mark.parametrize("flags, words", [
    (["--verifiers", "orm nobody"], ["--verifiers nobody", "prm_gold"]), (["--seeds", "x"], ["--seeds x"]),
    (["--verifiers", "orm orm"], ["twice"]),
])
def test_what_there_is_not_is_one_line(empty, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        script_main(run_verifiers.main, run_verifiers.make_parser(), flags)
    line = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and "\n" not in line and all(word in line for word in words)
    assert not os.listdir(empty)


def test_the_list_says_what_each_is(empty, capsys):
    script_main(run_verifiers.main, run_verifiers.make_parser(), ["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(VERIFIERS) and not os.listdir(empty)
