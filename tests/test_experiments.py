"""Experiments: the flags of their tables, how jobs are run, the table by hand. A shell script stands in for python."""
import csv
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TASK_FLAGS, parse, rl_flags as rl_flags_of_test

from dev.experiments import arms_questions, arms_selfplay, arms_smol, arms_verifiers, run, table
from dev.experiments.arms import (ALONE, DIALS, LISTS, PAYS, TASKS, Setup, all_arms, arms_of, experiment, has_arm,
                                  setups_of, starts_of)
from dev.experiments.jobs import Job, check_made_alike, job_of, keep_flags, log_of, runs_of, stages_of
from nanochat import recipes
from nanochat.cli import parse_flags, script_main
from nanochat.common import BadInput
from nanochat.rl.report.page import draw_curves
from nanochat.rl.report.report import Run
from nanochat.rl.run.flags import ask, check_args, complete_args
from nanochat.storage.files import path_of
from scripts import chat_sft, label_steps, tango_rl
from tasks import make_task

SCRIPTS = {f"scripts.{script.__name__.partition('.')[2]}": script for script in (chat_sft, label_steps, tango_rl)}
# Writes down how it was called, and makes what the script would make, an SFT its last step's checkpoint. FAILS: the
# name or tag of what fails; STOPS: the run that has its parent signalled, and then waits.
STUB = """#!/bin/sh
echo "$*" >> "$CALLS"
module=$2 role= model= verifier= run= out= splits= steps=700
while [ $# -gt 0 ]; do
    case $1 in --role) role=$2 ;; --model-tag) model=$2 ;; --verifier-tag) verifier=$2 ;; --run) run=$2 ;;
        --num-steps) steps=$2 ;; --out) out=${2%/*} ;;
        --split) splits=$2 ;; esac; shift
done
[ "$role" != verifier ] || verifier=${verifier:-$model-ver}
[ "$module" != scripts.chat_sft ] || run=${verifier:-$model}
case ${FAILS:-none} in "$run" | "${module#scripts.}") echo "first"; echo "bad luck"; exit 3 ;; esac
[ "$run" != "${STOPS:-none}" ] || { kill -"$SIGNAL" $PPID; exec sleep 60; }
cd "$NANOCHAT_BASE_DIR"
case $module in
    scripts.tok_train) mkdir tokenizer; touch tokenizer/tokenizer.pkl ;;
    scripts.label_steps) mkdir -p "$out"
        echo '{"cost": {"tokens": 40000}, "solution_tokens": 9000}' > "$out/labels.summary.json" ;;
    scripts.chat_eval) mkdir -p "$out"
        case $out in *tango*) right=0.5 ;; *_108/*) right=0.4 ;; *) right=0.2 ;; esac
        one='"test_in": {"problems": 10, "pass@1": '$right', "lenient": 0.9}'
        none='"test_out": {"problems": 30, "pass@1": 0, "lenient": 0.1}'
        case $splits in test_in) none= ;; test_out) one= ;; *) one="$one," ;; esac
        echo '{"tasks": {"name": {'$one' '$none'}}}' > "$out/scores.json" ;;
    scripts.chat_sft) mkdir -p "chatsft_checkpoints/$run"
        touch "chatsft_checkpoints/$run/meta_$(printf %06d "$steps").json" ;;
    scripts.tango_rl) mkdir -p "runs/$run"; : > "runs/$run/metrics.jsonl"
        echo '{"args": {"task": "chain", "run": "'"$run"'", "seed": '"${run##*-s}"'}}' > "runs/$run/config.json"
        case $run in *tango*|*shepherd*) final=0.75 ;; *) final=0.25 ;; esac
        echo '{"gen_steps": 9, "ver_steps": 3, "steps": 0, "sampled_tokens": 1000, "minutes": 1, "before":
            {"gen/pass1_in": 0.1, "ver/step_f1_fixed": 0.9, "ver/tokens_fixed": 7, "ver/pair_acc_in": 0.5},
            "after": {"gen/pass1_in": '$final', "ver/pair_acc_in": 0.6}}' > "runs/$run/summary.json" ;;
esac
"""


class World:
    """A base directory, and the calls of the stub."""

    def __init__(self, base: Path, monkeypatch, capsys):
        self.base, self.monkeypatch, self.capsys = base, monkeypatch, capsys
        (base / "python").write_text(STUB)
        (base / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(base / "python"))
        monkeypatch.setattr(table, "draw_curves", lambda runs, path, watched: Path(path).touch())
        for name, value in (("NANOCHAT_BASE_DIR", base), ("CALLS", base / "calls"), ("JOBS", 1)):
            monkeypatch.setenv(name, str(value))

    def run(self, *flags: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        flags = [*flags, "--out", str(self.base / "out")]
        self.monkeypatch.setattr(sys, "argv", ["run.py", *flags])
        (self.base / "calls").write_text("")
        code = 0
        try:
            script_main(run.main, run.make_parser())
        except SystemExit as stop:
            code = stop.code
        return code, *self.capsys.readouterr()

    def change_config(self, name: str, **values) -> None:
        path = self.base / "runs" / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def calls(self, module: str) -> list[str]:
        """The flags of its calls, in order."""
        found = (line.partition(f"-m scripts.{module} ") for line in (self.base / "calls").read_text().splitlines())
        return [flags for _, call, flags in found if call]

    def runs(self) -> list[str]:
        return [call.split()[1] for call in self.calls("tango_rl")]

    def table(self, name: str) -> list[dict[str, str]]:
        return rows_of((self.base / "out" / f"{name}.md").read_text())

    def csv(self, name: str) -> list[dict[str, str]]:
        return list(csv.DictReader((self.base / "out" / f"{name}.csv").read_text().splitlines()))


def rows_of(text: str) -> list[dict[str, str]]:
    """The rows of the table in a text."""
    titles, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
                        if line.startswith("|"))
    return [dict(zip(titles, row, strict=True)) for row in rows]


@pytest.fixture
def world(tmp_path, monkeypatch, capsys) -> World:
    return World(tmp_path, monkeypatch, capsys)


def setups(*flags: str) -> list[Setup]:
    return [e for group in setups_of(run.make_parser().parse_args(["fig4", *flags])).values() for e in group]


one = lambda *flags: setups(*flags)[0]


def rl_flags(e: Setup, arm: str) -> str:
    return runs_of(experiment(e, [arm]), ["1"])[0].flags


def sft_flags(e: Setup, name: str) -> str:
    return job_of(experiment(e, []), starts_of(e)[name], "1").flags


def of_smol(arms: list[str]):
    args = run.make_parser().parse_args(["smol", "--arms", " ".join(arms)])
    return run.tables_of_smol(args)[0].experiments[0]


def every_family_verifier_and_question() -> list:
    return [arms_verifiers.experiment(list(arms_verifiers.VERIFIERS)),
            arms_questions.experiment(list(arms_questions.ARMS)),
            *(arms_selfplay.experiment(name, list(of.arms)) for name, of in arms_selfplay.FAMILIES.items())]


PROBLEMS = "--chain-answer final --chain-share 0.45 --chain-min-steps 3 --chain-max-steps 10"
COMMON = f"--seed 1 --device-type cpu --num-steps 60 --eval-every 10 --kl-coef 0 --lr 2e-4 {PROBLEMS}"
ALPHA = "--alpha-start 0.5 --alpha-end 0.05"
TO_GO = "--negative-weight 1 --credit to_go"
PAPER = f"--step-rewards verdicts --combine advantages {TO_GO} --no-verify-distinct"
JUDGING = "--verifier-balance --verifier-replay 0.5 --verifier-lr 1e-4"


@pytest.mark.parametrize("arm, roles, own", [
    ("tango", f"--verifier-tag chain-s1-ver --warmup-steps 40 {JUDGING} {ALPHA} {PAPER}", "--recipe tango"),
    ("fixed_merged", f"--verifier-tag chain-s1-ver {ALPHA} {PAPER}",
     "--recipe fixed_verifier --step-rewards posterior --verify-distinct --combine rewards"),
    ("grpo_2e-4", "", "--recipe grpo --lr 4e-4 --lr 2e-4"),
    ("refit_1_1e-4", f"{ALPHA} --combine rewards {TO_GO} --verifier-tag chain-s1",
     "--recipe refit --refit-every 1 --verifier-lr 1e-3 --lr 1e-4"),
    ("gold_weighted_own_step_0.3", f"{ALPHA} --combine advantages {TO_GO}",
     "--recipe gold_steps --negative-weight 0.3 --credit own_step --examples-per-step 16 --eval-every 20 "
     "--alpha-start 0.3 --alpha-end 0.3e-1"),
    ("small_verifier_kl0.05", f"--verifier-tag chain-s1-ver-small --warmup-steps 40 {JUDGING} {ALPHA} {PAPER}",
     "--kl-coef 0.05"),
])
def test_the_flags_of_an_arm_are_its_roles_the_tasks_and_its_own(arm, roles, own):
    assert rl_flags(one(), arm) == " ".join(f"--model-tag chain-s1 {roles} {COMMON} {own}".split())


def test_flags_that_follow_the_number_of_steps():
    e = one("--task", "last_letter", "--start", "refine", "--steps", "20")
    score, tango = rl_flags(e, "score"), rl_flags(e, "tango")
    assert e.name == "last_letter_refine_20" and tango.count("--num-steps 20 ") == tango.count("--num-steps") == 1
    assert score.startswith("--model-tag last_letter-s1-refine ") and score.endswith(" --stage1-steps 6")
    assert rl_flags(e, "fixed_generator").endswith(" --num-steps 46")  # 40 + 19 // 3


def test_the_flags_of_an_sft():
    model = "--seed 1 --device-type cpu --depth 4 --n-embd 128 --n-head 4 --sequence-len 384"
    assert sft_flags(one(), "refine") == (
        f"--role generator --model-tag chain-s1-refine --from-stage sft --from-tag chain-s1 {model} {PROBLEMS} "
        "--num-steps 200 --demo-shares refine:0.5 --matrix-lr 2e-3 --embedding-lr 2e-3")
    assert sft_flags(one(), "large_verifier") == (
        f"--role verifier --model-tag chain-s1 --verifier-tag chain-s1-ver-large {model} {PROBLEMS} --depth 6 --n-embd "
        "192 --n-head 6")


def test_the_dial_start_changes_the_sft_of_the_verifier_and_nothing_else():
    (weak, usual, strong), tag = setups("--dial", "start"), "small_chain-s1-ver"
    for e, name, share in ((weak, "weak", 0.7), (strong, "strong", 0.05)):
        own = f"{sft_flags(usual, 'ver').replace(tag, f'{tag}-{name}')} --chain-verifier-share {share}"
        assert sft_flags(e, "ver") == own and sft_flags(e, "gen") == sft_flags(usual, "gen")
        for arm in PAYS:
            assert rl_flags(e, arm) == rl_flags(usual, arm).replace(tag, f"{tag}-{name}")
            assert ("-ver" in rl_flags(e, arm)) == (arm not in (*ALONE, "gold_steps", "gold_merged"))


@pytest.mark.parametrize("dial, setting, alpha, kl, num", [
    ("pressure", "alpha30", 0.3, 0.05, 0), ("pressure", "usual", 0.7, 0.05, 0), ("pressure", "kl0", 0.7, 0, 0),
    ("labels", "n64", 0.7, 0.05, 64), ("labels", "n256", 0.7, 0.05, 256)])
def test_a_setting_sets_a_constant_alpha_the_kl_and_the_labels_of_all_arms(dial, setting, alpha, kl, num):
    e = one("--dial", dial, "--settings", setting)
    assert set(all_arms(e)) == set(PAYS) - ({"gold_steps", "gold_merged"} if num else set())
    for arm in all_arms(e):
        args = parse(tango_rl, rl_flags(e, arm).split())
        assert (args.num_steps, args.examples_per_step, args.kl_coef) == (120, 16, kl)
        assert arm in ALONE or args.alpha_start == args.alpha_end == alpha
        assert args.num_labelled == (0 if arm == "ttrl" else num)
        assert args.labelled_share == (1 if num and args.recipe == "grpo" else 0.5)  # others teach it nothing


@functools.cache
def parser_of(script, recipe: str):
    return script.make_parser(["--recipe", recipe]) if script is tango_rl else script.make_parser()


def test_every_job_has_flags_that_its_script_takes():
    made = [*every_family_verifier_and_question(), of_smol(list(arms_smol.ARMS))]
    for e in [one("--task", task) for task in TASKS]:
        made.append(experiment(e, arms_of(e, None)))
    for e in (one(), one("--start", "refine"), *setups("--dial", " ".join(DIALS))):
        arms = dict.fromkeys([*all_arms(e), *(arm for names in LISTS.values() for arm in names)])
        made.append(experiment(e, [arm for arm in arms if has_arm(e, arm)]))
    jobs = {job for stage in stages_of(made, ["1"]) for job in stage}
    assert len(jobs) > 300 and len({job.folder for job in jobs}) == len(jobs)
    for job in jobs:
        if job.module not in SCRIPTS:
            assert job.name in ("import-smollm2", "import-smollm2-low")
            continue
        flags = job.flags.split()
        args = parse_flags(parser_of(SCRIPTS[job.module], recipes.recipe_of(flags, "tango")), flags)
        if job.module == "scripts.tango_rl":
            recipe = recipes.load(args.recipe)
            check_args(args, 1)
            complete_args(args, recipe.ROLES)
            for part, given in (("check", [args, make_task(args)]), ("draws", [args])):
                if not getattr(args, "labels", ""):  # a file that is not there yet
                    ask(args.recipe, recipe, part, *given)
        elif job.module == "scripts.chat_sft":
            chat_sft.check_demos(args, make_task(args))


def test_each_job_comes_after_what_it_reads():
    """A file, checkpoint or run that a job's flags name is made by a job of an earlier stage."""
    own = experiment(one("--start", "refine"), ["score", "shared_half", "grpo_both", "refit_1"])
    made: set[str] = set()
    for stage in stages_of([own, of_smol(list(arms_smol.ARMS)), *every_family_verifier_and_question()], ["1", "2"]):
        pairs = [(job, dict(zip(words, words[1:], strict=False))) for job in stage for words in [job.flags.split()]]
        for job, given in pairs:
            read = {given.get(flag) for flag in ("--labels", "--solutions", "--from-tag", "--generator-tag")}
            if job.module == "scripts.tango_rl":
                read |= {given["--model-tag"], given.get("--verifier-tag")}
            elif given.get("--role") == "verifier":  # judges the generator's solutions, and is saved under its own tag
                read.add(given["--model-tag"])
            assert read - {None} <= made, job.name
        for job, given in pairs:
            made |= {given.get("--out"), re.sub("^(sft|import)-", "", job.name), f"{job.name}-ver", f"{job.name}-gen",
                     given.get("--verifier-tag"), given.get("--model-tag")}


@pytest.mark.parametrize("make, names", [
    (lambda: arms_selfplay.experiment("debates", ["debate"]),
     [["sft-debates-gen-s3"], ["sft-debates-ver-s3"], ["sft-debates-pair-s3"], ["debates-debate-s3"]]),
    (lambda: arms_verifiers.experiment(["sft", "rm_r1"]),
     [["sft-small_chain-s3"], ["sft-small_chain-s3-ver", "sft-small_chain-s3-ver-long"],
      ["sft-small_chain-s3-ver-solve_pair"], ["verifiers-train_rm_r1-s3"], ["verifiers-sft-s3", "verifiers-rm_r1-s3"]]),
    (lambda: of_smol(["other_tango", "one_trunk"]),
     [["import-smollm2"], ["sft-smol-s0", "sft-smol-s1"], ["sft-smol-s0-ver", "sft-smol-s0-both"], ["smol-tango-s1"],
      ["smol-other_tango-s3", "smol-one_trunk-s3"]]),
    (lambda: arms_verifiers.experiment(["prm_strong"]),
     [["sft-small_chain-s3"], ["verifiers-oracle-s3", "labels-gold-s3"], ["labels-omega_strong-s3"],
      ["verifiers-train_prm_strong-s3"], ["verifiers-prm_strong-s3"]]),
])
def test_only_what_the_arms_need_is_made(make, names):
    assert [{job.name for job in stage} for stage in stages_of([make()], ["3"])] == list(map(set, names))


def test_a_dial_is_run_and_reported_together(world):
    """GRPO has no verifier: one run stands for both settings."""
    code, out, err = world.run("pays", "--dial", "start", "--settings", "weak usual", "--seeds", "1 2", "--arms",
                               "tango grpo fixed_verifier")
    assert (code, err) == (0, "")
    order = [line.split()[1] for line in (world.base / "calls").read_text().splitlines()]
    assert order == ["scripts.tok_train", *["scripts.chat_sft"] * 6, *["scripts.tango_rl"] * 10]
    assert world.runs() == [f"small_chain_{setting}-{arm}-s{seed}" for setting in ("weak", "usual")
                            for arm in ("tango", "grpo", "fixed_verifier") for seed in (1, 2)
                            if (setting, arm) != ("usual", "grpo")] == re.findall(r"^..:.. (\S+)$", out, re.M)
    text = (world.base / "out" / "start" / "start.md").read_text()
    assert text.startswith("`bash dev/experiments/run.sh pays --dial start --settings 'weak usual' ") and text in out
    assert "10 runs, 10 minutes one after the other" in text
    columns = ("setting", "arm", "pass@1, seeds 1 2", "minus grpo", "minus its partner")
    assert [tuple(row[name] for name in columns) for row in world.table("start/start")] == [
        (f"small_chain_{setting}", *rest) for setting in ("weak", "usual") for rest in (
            ("tango", "75.0 75.0", "+50.0 ± 0.0", "+50.0 ± 0.0 (fixed_verifier)"), ("grpo", "25.0 25.0", "-", "-"),
            ("fixed_verifier", "25.0 25.0", "+0.0 ± 0.0", "-"))]
    ends = {(row["task"], row["arm"], row["seed"]): row["value"] for row in world.csv("start/small_chain_usual")
            if row["metric"] == "gen/pass1_in"}
    assert len(ends) == 6 and ends["small_chain_usual", "grpo", "2"] == "0.25"
    assert world.run("--dial", "start", "--seeds", "1 2", "--arms", "grpo")[0] == 0 and world.runs() == []


def test_dials_share_the_usual_setting_and_without_one_all_are_turned(world):
    assert world.run("pays", "--seeds", "1", "--arms", "tango fixed_verifier")[0] == 0
    assert len(world.runs()) == len(set(world.runs())) == 14
    assert [len(world.table(f"{dial}/{dial}")) for dial in DIALS] == [6, 6, 6]


def test_what_is_finished_is_reused_and_what_was_interrupted_goes_on(world):
    flags = ["--arms", "tango grpo", "--seeds", "1"]
    assert world.run(*flags)[0] == 0 and world.runs() == ["chain-tango-s1", "chain-grpo-s1"]
    (world.base / "runs" / "chain-grpo-s1" / "summary.json").unlink()
    verifier = world.base / "chatsft_checkpoints" / "chain-s1-ver"
    (verifier / "meta_000700.json").rename(verifier / "meta_000015.json")  # stopped after its 15th step
    assert world.run(*flags)[0] == 0 and not world.calls("tok_train")
    assert world.calls("chat_sft") == [f"--resume-from-step auto {sft_flags(one(), 'ver')}"]
    assert world.calls("tango_rl") == [f"--run chain-grpo-s1 --resume-from-step auto {rl_flags(one(), 'grpo')}"]
    assert "One seed: differences have no interval" in (world.base / "out" / "chain.md").read_text()


def test_a_family_is_reported_by_what_it_watches(world):
    world.monkeypatch.setattr(table, "draw_curves", draw_curves)
    assert world.run("selfplay", "--families", "no_labels", "--arms", "ttrl", "--seeds", "1")[0] == 0
    assert world.runs() == ["no_labels-grpo-s1", "no_labels-ttrl-s1"]  # the baseline comes along
    _, row = world.table("no_labels")
    assert (row["minus grpo"], row["pass@1, first -> last"]) == ("+0.0", "10.0 -> 25.0")
    assert {row["metric"] for row in world.csv("no_labels")} == {"gen/pass1_in"}
    assert "ver/balanced_acc_fixed" in arms_selfplay.FAMILIES["no_labels"].watched  # which the results cite
    assert (world.base / "out" / "no_labels.png").read_bytes()[:4] == b"\x89PNG"


def test_an_arm_is_one_run_for_all_questions_that_have_it(world):
    """The verifier of tango is given on to another generator. What a run costs stands in the csv."""
    world.monkeypatch.setattr(arms_questions, "flops_by_step", lambda run: [2e12])
    code, _, err = world.run("questions", "--questions", "transfer interleaving proposing", "--seeds", "41")
    assert (code, err) == (0, "") and sorted(world.runs()) == sorted(f"questions-{arm}-s41" for arm in (
        "tango", "new_grpo", "new_fixed", "new_tango", "best_of_fixed", "best_of_tango", "fixed", "ng_1", "ng_10",
        "adaptive", "proposer"))
    assert world.runs()[0] == "questions-tango-s41"
    given_on, = (call for call in world.calls("tango_rl") if "questions-new_tango" in call)
    assert "--verifier-tag questions-tango-s41-ver --verifier-source rl" in given_on
    assert [row["arm"] for row in world.table("proposing")] == ["tango", "proposer"]
    assert {row["minus its partner"] for row in world.table("transfer")} == {"-", "+50.0 (new_fixed)",
                                                                           "+50.0 (best_of_fixed)"}
    assert {row["task"] for row in world.csv("interleaving")} == {"interleaving"}
    assert {row["value"] for row in world.csv("interleaving") if row["metric"] == "cost/teraflops"} == {"2.0"}


def test_verifiers_are_told_as_judges_and_what_their_training_cost(world):
    assert world.run("verifiers", "--arms", "grpo prm_shepherd prm_strong", "--seeds", "1 2")[0] == 0
    grpo, shepherd, strong = world.table("verifiers")
    assert (shepherd["minus grpo"], shepherd["step F1"]) == ("+50.0 ± 0.0", "90.0 ± 0.0")
    assert (shepherd["what it is"][:12], shepherd["tokens per judgment"]) == ("after steps,", "7.0 ± 0.0")
    assert shepherd["choosing, before -> after its training"] == "pairs 50.0 -> 60.0 (+10.0 ± 0.0)"
    assert shepherd["tokens of its training"] == "90k"  # 9,000 of solutions, twice 40,000 of labels, 1,000 of its own
    assert strong["tokens of its training"] == "91k"    # and 1,000 of the oracle's run, whose generator completes
    assert grpo["tokens of its training"] == grpo["minus grpo"] == "-"


def test_what_a_verifiers_training_came_to_and_arms_without_rewards_stand_in_a_csv(world):
    """A row per arm, seed, step and metric: of the training of think_rm and rm_r1, and of the runs of the other two."""
    arms = "think_rm rm_r1 think_rm_policy supervisor"
    assert world.run("verifiers", "--arms", arms, "--seeds", "1 2")[0] == 0
    found = [(row["arm"], row["seed"], row["step"], row["value"]) for row in world.csv("verifiers_training")
             if row["metric"] == "ver/pair_acc_in"]
    assert found == [(arm, seed, step, value) for arm in ("think_rm", "rm_r1") for seed in "12"
                     for step, value in (("0", "0.5"), ("3", "0.6"))]
    rows = {(row["arm"], row["seed"]) for row in world.csv("verifiers")}
    assert rows == {(arm, seed) for arm in arms.split() for seed in "12"}
    judge = next(call for call in world.calls("tango_rl") if "--run verifiers-think_rm_policy-s2 " in call)
    assert " --recipe think_rm_policy " in judge and "--verifier-tag verifiers-train_think_rm-s2-ver " in judge


@pytest.fixture
def smol(world):
    """SmolLM2 stands there, as if it were imported; problems in GSM8K's form."""
    imported = world.base / "chatsft_checkpoints" / "smollm2"
    imported.mkdir(parents=True)
    (imported / "meta_000000.json").touch()
    for part, more in (("train", 100), ("test", 0)):
        rows = [{"question": f"What is {k + more} + 1?", "answer": f"{k + more}+1={k + more + 1}\n#### {k + more + 1}"}
                for k in range(40)]
        (world.base / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return world


def test_smollm2_is_scored_after_its_runs_and_grpo_also_after_as_many_tokens(smol):
    flags = ["smol", "--arms", "grpo tango one_trunk", "--seeds", "1 2"]
    assert smol.run(*flags)[0] == 0
    assert smol.runs() == [f"smol-{arm}-s{seed}" for arm in ("grpo", "tango", "one_trunk") for seed in (1, 2)]
    scored = [call.partition(" --num-samples ")[0] for call in smol.calls("chat_eval")]
    end = "--device-type cpu --temperature 1 -a reasoning_gym --split"
    arms = ("grpo", "tango", "one_trunk")
    assert scored == [f"{which} --seed {seed} {end} {split}" for arm in arms for seed in (1, 2)
                      for which in (f"-i sft -g smol-s0{'-both' * (arm == 'one_trunk')}",
                                    f"-i rl -g smol-{arm}-s{seed}-gen -s 60", f"-i rl -g smol-{arm}-s{seed}-gen")
                      if (arm, which[:6]) != ("tango", "-i sft") and (arm == "grpo" or "-s 60" not in which)
                      for split in ("test_in", "test_out")]
    rows = {(row["arm"], row["of"]): row for row in smol.table("smol")}
    seen, form = "sampled, templates of training", "sampled, problems in GSM8K's form"
    grpo, longer, tango = (rows[arm, seen] for arm in ("grpo", "longer", "tango"))
    assert grpo["percent, seeds 1 2"] == "20.0 20.0" and grpo["minus longer"] == "-20.0 ± 0.0"
    assert longer["minus grpo"] == "+20.0 ± 0.0" and ("tango", form) not in rows
    assert tango["minus grpo"] == "+30.0 ± 0.0" and tango["minus longer"] == "+10.0 ± 0.0"
    assert rows["one_trunk", seen]["minus grpo"] == rows["one_trunk", seen]["minus longer"] == "-"  # another start
    assert smol.run(*flags, "--gsm8k-data", str(smol.base))[0] == 0 and smol.runs() == []
    assert {re.findall(r"-a (\S+)", call)[0] for call in smol.calls("chat_eval")} == {"gsm8k"}
    rows = {(row["arm"], row["of"]): row for row in smol.table("smol")}
    assert rows["tango", form]["percent"] == "12.5 ± 0.0"  # of 10 and 30 problems
    values = {(row["arm"], row["metric"]): row["value"] for row in smol.csv("smol")}
    assert values["tango", "gen/sampled_words_lenient"] == "0.3" and values["longer", "gen/sampled_in"] == "0.4"
    assert smol.run(*flags, "--gsm8k-data", str(smol.base))[0] == 0 and not smol.calls("chat_eval")


def test_each_run_is_scored_right_after_it_and_a_stop_leaves_the_table(smol):
    smol.monkeypatch.setenv("STOPS", "smol-tango-s1")
    smol.monkeypatch.setenv("SIGNAL", "TERM")
    assert smol.run("smol", "--arms", "grpo tango", "--seeds", "1")[0] == 143
    assert len(smol.calls("chat_eval")) == 6
    rows = [(row["arm"], row["percent"]) for row in smol.table("smol") if row["of"] == "sampled, templates of training"]
    assert rows == [("grpo", "20.0"), ("longer", "40.0")]


def test_grpo_of_other_problems_than_the_arms_beside_it_is_refused(smol):
    flags = ["smol", "--arms", "grpo tango", "--seeds", "1"]
    assert smol.run(*flags)[0] == 0
    smol.change_config("smol-grpo-s1", problems=2)
    smol.change_config("smol-tango-s1", problems=1)
    assert "cannot be compared: their problems differ" in smol.run(*flags)[2]


@pytest.mark.parametrize("change, words", [
    (lambda base: (base / "test.jsonl").unlink(), "test.jsonl"),
    (lambda base: (base / "train.jsonl").write_text("{}\n"), "train.jsonl"),
    (lambda base: (base / "test.jsonl").write_text((base / "test.jsonl").read_text().split("\n")[0]), "no problem is"),
])
def test_problems_that_nothing_can_be_scored_on_are_refused_before_any_run(smol, change, words):
    change(smol.base)
    code, _, err = smol.run("smol", "--gsm8k-data", str(smol.base))
    assert code == 2 and words in err and err.count("\n") == 1 and not (smol.base / "logs").exists()


def test_what_other_flags_made_is_refused_in_any_setting(world):
    flags = ["--dial", "start", "--arms", "tango", "--seeds", "1"]
    assert world.run(*flags)[0] == 0
    path = world.base / "logs" / "sft-small_chain-s1-ver-strong.flags"
    path.write_text(path.read_text().replace("0.05", "0.06"))
    assert "/chatsft_checkpoints/small_chain-s1-ver-strong was made with other flags" in world.run(*flags)[2]
    assert world.run(*flags, "--settings", "weak")[0] == 0


def test_the_scripts_write_down_the_flags_that_they_were_started_with(base):
    """Without the notes in logs, what a script wrote down tells whether it was made alike."""
    flags = rl_flags_of_test("--num-steps", "1", "--warmup-steps", "1")
    tango_rl.main(parse(tango_rl, [*flags, "--run", "r", "--resume-from-step", "auto"]))
    of_sft = [*TASK_FLAGS, "--device-type", "cpu", "--role", "verifier", "--model-tag", "tiny", "--verifier-tag", "v",
              "--depth", "1", "--n-embd", "32", "--n-head", "1", "--sequence-len", "128", "--num-steps", "1",
              "--max-new-tokens", "28", "--num-sampled", "4"]
    chat_sft.main(parse(chat_sft, [*of_sft, "--resume-from-step", "auto"]))
    for module, folder, argv in (("tango_rl", path_of("runs", "r"), flags), ("chat_sft", path_of("sft", "v"), of_sft)):
        job = Job("r", f"scripts.{module}", folder, "done", " ".join(argv))
        check_made_alike(job)
        with pytest.raises(BadInput, match="--seed 3: it was started with 0"):
            check_made_alike(job._replace(flags=f"{job.flags} --seed 3"))


def test_runs_that_cannot_be_compared_or_were_continued_by_hand_are_refused(world):
    flags = ["--arms", "tango grpo", "--seeds", "1"]
    assert world.run(*flags)[0] == 0
    world.change_config("chain-tango-s1", problems=1)
    world.change_config("chain-grpo-s1", problems=2)
    assert "cannot be compared: their problems differ" in world.run(*flags)[2]
    world.change_config("chain-grpo-s1", args={"num_steps": 7})
    code, _, err = world.run(*flags)
    assert code == 2 and "chain-grpo-s1 was made with other flags" in err and "was started with 7" in err


def test_a_run_that_fails_is_told_and_left_out_and_the_others_go_on(world):
    world.monkeypatch.setenv("FAILS", "chain-tango-s1")
    code, out, err = world.run("--arms", "tango grpo", "--seeds", "1 2")
    assert code == 1 and re.findall(r"^..:.. (\S+)$", out, re.M) == ["chain-tango-s2", "chain-grpo-s1", "chain-grpo-s2"]
    assert re.match(r"failed: .+ --run chain-tango-s1 .+/logs/chain-tango-s1.log\)\nfirst\nbad luck\n", err)
    assert err.endswith("\nnot finished, left out: chain-tango-s1\n")
    assert [row["pass@1, seeds 1 2"] for row in world.table("chain")] == ["- 75.0", "25.0 25.0"]


def test_nothing_starts_from_an_sft_that_failed(world):
    world.monkeypatch.setenv("FAILS", "chain-s1-ver")
    code, _, err = world.run("--arms", "tango grpo", "--seeds", "1 2")
    assert code == 1 and err.startswith("failed: ") and err.endswith("\nnot finished, left out: chain-tango-s1\n")
    assert len(world.calls("chat_sft")) == 4 and world.runs() == ["chain-tango-s2", "chain-grpo-s1", "chain-grpo-s2"]


def test_a_verifier_whose_training_failed_is_left_out(world):
    world.monkeypatch.setenv("FAILS", "verifiers-train_prm_shepherd-s2")
    code, _, err = world.run("verifiers", "--arms", "grpo prm_shepherd", "--seeds", "1 2")
    assert code == 1 and err.endswith("\nnot finished, left out: verifiers-prm_shepherd-s2\n")
    assert [row["pass@1, seeds 1 2"] for row in world.table("verifiers")] == ["25.0 25.0", "75.0 -"]


def test_a_stop_while_a_start_is_made_leaves_the_table(smol):
    """A run that another arm starts from, with the next seed, comes before all arms."""
    for name, value in (("STOPS", "smol-tango-s1"), ("SIGNAL", "TERM")):
        smol.monkeypatch.setenv(name, value)
    assert smol.run("smol", "--arms", "tango grpo other_tango", "--seeds", "2 3")[0] == 143
    assert smol.runs() == ["smol-tango-s3", "smol-tango-s1"]
    assert smol.table("smol")[0]["percent, seeds 3"] == "50.0"


def test_a_base_that_was_moved_with_all_that_is_in_it_was_made_alike(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "old"))
    job = lambda: Job("score", "scripts.chat_eval", path_of("scores"), "scores.json", f"--out {path_of('scores')}/x")
    os.makedirs(path_of("scores"))
    os.makedirs(log_of(""))
    keep_flags(job())
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "new"))
    check_made_alike(job())
    with pytest.raises(BadInput, match="other flags"):
        check_made_alike(job()._replace(flags="--seed 1"))


def test_paths_with_spaces_are_refused_before_any_run(world):
    world.monkeypatch.setenv("NANOCHAT_BASE_DIR", str(world.base / "my runs"))
    code, _, err = world.run("--arms", "grpo")
    assert code == 2 and "my runs: cannot be a path with spaces" in err and not (world.base / "my runs").exists()


def test_a_device_that_is_not_there_is_refused_before_any_run(smol, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = smol.run("smol", "--device-type", "cuda")
    assert code == 2 and "--device-type cuda: available are" in err and not (smol.base / "logs").exists()


def test_a_score_of_the_start_alone_is_no_change():
    scored = table.Table("small", [], baseline="base", watched={}, compared={"gen/s": "score"})
    first = {"sampled_tokens": 0, "gen/s": 0.2}
    runs = [Run("", "small", arm, 1, {}, {}, [first, {"sampled_tokens": 1} | last], [], [], [], ["generator"])
            for arm, last in (("base", {"gen/s": 0.5}), ("other", {}))]
    assert [row["score, first -> last"] for row in rows_of(table.table_of(scored, runs))] == ["20.0 -> 50.0", "-"]


def test_runs_that_are_not_scored_yet_have_a_line(smol):
    flags = ("smol", "--arms", "tango", "--seeds", "1")
    assert smol.run(*flags)[0] == 0
    shutil.rmtree(smol.base / "runs" / "smol-tango-s1" / "scores_60")
    smol.monkeypatch.setenv("FAILS", "chat_eval")
    assert smol.run(*flags)[0] != 0
    row, = smol.table("smol")
    assert row["arm"] == "tango" and "percent" not in row


def test_damaged_scores_are_one_line(smol):
    assert smol.run("smol", "--arms", "tango", "--seeds", "1")[0] == 0
    scores = smol.base / "runs" / "smol-tango-s1" / "scores_60" / "seen" / "scores.json"
    assert smol.table("smol")[0]["sampled, templates of training, first -> last"] == "20.0 -> 50.0"
    scores.write_text('{"tasks": {}}')
    code, _, err = smol.run("smol", "--arms", "tango", "--seeds", "1")
    assert code == 2 and "seen/scores.json: is damaged" in err and err.count("\n") == 1


def test_what_is_watched_by_thirds():
    logged = [{"gen/verdicts/wrong_steps_passed": x} for x in (0.5, 0.7, 0.0, 0.0, 0.1, 0.2)]
    first, last = arms_smol.thirds_of([{"gen/reward": 1}, *logged])
    assert first == {"thirds/wrong_steps_passed": pytest.approx(0.6)}
    assert last == {"thirds/wrong_steps_passed": pytest.approx(0.15)}


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_stops_the_run_and_starts_nothing_new(world, name):
    world.monkeypatch.setenv("STOPS", "chain-grpo-s2")
    world.monkeypatch.setenv("SIGNAL", name)
    code, out, err = world.run("--arms", "grpo", "--seeds", "1 2 3")
    assert code == 143 and world.runs() == ["chain-grpo-s1", "chain-grpo-s2"]
    assert err == "".join(f"not finished, left out: chain-grpo-s{seed}\n" for seed in (2, 3))
    assert re.fullmatch(r"..:.. chain-grpo-s1\n.*\| grpo \|.*\nstopped.*\n", out, re.S)
    world.monkeypatch.delenv("STOPS")
    assert world.run("--arms", "grpo", "--seeds", "1 2 3")[0] == 0
    assert world.runs() == ["chain-grpo-s2", "chain-grpo-s3"]


@pytest.mark.parametrize("flags, words", [
    (["fig5"], ["fig5: there are fig4, pays"]), (["--seeds", "x"], ["--seeds x"]), (["--list", "all"], ["ablations"]),
    (["--arms", "tango_kl1"], ["--arms tango_kl1"]), (["--families", "votes"], ["--families", "fig4"]),
    (["--dial", "start", "--settings", "alpha30"], ["--settings alpha30", "weak, usual, strong"]),
    (["pays", "--settings", "weak"], ["--settings weak", "--dial"]), (["--dial", "start start"], ["twice"]),
    (["pays", "--dial", "labels", "--arms", "gold_steps"], ["--arms gold_steps", "tango", "ttrl"]),
    (["selfplay", "--families", "nobody"], ["--families nobody", "no_labels"]),
    (["selfplay", "--families", "votes kernel", "--arms", "ttrl"], ["of which family"]),
    (["questions", "--questions", "why"], ["--questions why", "transfer"]),
    (["questions", "--arms", "tango"], ["of which question"]), (["--questions", "lookup"], ["--questions", "fig4"]),
    (["verifiers", "--arms", "orm nobody"], ["--arms nobody", "prm_gold"]),
    (["smol", "--gsm8k-data", "a b"], ["with spaces"]), (["smol", "--gsm8k-data", ""], ["--gsm8k-data"]),
    (["--seeds", "1", "smol"], ["smol: stands before all flags"]), (["--gsm8k-data", "x"], ["--gsm8k-data: fig4"]),
])
def test_what_there_is_not_is_one_line(world, flags, words):
    code, out, err = world.run(*flags)
    assert (code, out, err.count("\n")) == (2, "", 1) and all(word in err for word in words), err
    assert not (world.base / "out").exists() and not (world.base / "logs").exists()


def test_lists_make_nothing(world):
    assert world.run("--list", "ablations")[1].split() == LISTS["ablations"]
    flags = dict(line.split(" ", 1) for line in world.run("--list", "flags", "--seeds", "1")[1].splitlines())
    assert flags["tango"] == rl_flags(one(), "tango") and len(flags) > 50
    assert {"sft-votes-gen", "votes-ttrl"} < set(world.run("selfplay", "--list")[1].split())
    assert not (world.base / "logs").exists()


def test_the_table_pairs_with_the_baseline_at_the_end_and_at_its_tokens():
    small = table.Table("small", [], baseline="base", watched={"gen/pass1_in": "solved", "gen/shown": "shown"},
                  partners={"other": "gold_steps"})
    runs = []
    for arm, seed, final, tokens, shown in (
            ("base", 1, 0.5, 1, 0.3), ("base", 2, 0.6, 1, 0.4), ("other", 1, 0.8, 2, 0.1), ("other", 2, 1.0, 0.5, 0.1),
            ("gold_steps", 1, 0.9, 1, 0.1), ("gold_steps", 2, 1.0, 1, 0.1)):
        points = [{"sampled_tokens": 0, "gen/pass1_in": 0.2},
                  {"sampled_tokens": 1e6 * tokens, "gen/pass1_in": final, "gen/shown": shown}]
        runs.append(Run("", "small", arm, seed, {}, {}, points, [], [], [], ["generator"]))
    base, other, gold = rows_of(table.table_of(small, runs))
    assert "setting" not in base and base["minus base"] == base["minus base at its tokens"] == "-"
    assert base["solved, seeds 1 2"] == "50.0 60.0" and base["solved"] == "55.0 ± 7.1"
    assert other["minus base"] == "+35.0 ± 63.5"  # 0.8 - 0.5 and 1.0 - 0.6: deviation 0.0707, t 12.706
    assert other["minus base at its tokens"] == "+0.0 (1 pairs)"  # seed 1: 0.5 at 1M; seed 2 ended at 0.5M
    assert other["minus its partner"] == "-5.0 ± 63.5 (gold_steps)" and gold["minus its partner"] == "-"
    assert other["share of the oracle's gain"] == "88%"  # 0.35 of 0.4
    assert other["solved, first -> last"] == "20.0 -> 90.0" and base["shown, first -> last"] == "35.0 -> 35.0"
    assert other["tokens"] == "1.25M"


@pytest.mark.parametrize("words, env, shown", [
    (["verifiers", "--seeds", "1 2"], {}, "1 disabled /home/me/.cache/nanochat-tango-verifiers"),
    ([], {"WANDB_MODE": "offline", "NANOCHAT_BASE_DIR": "/base"}, "1 offline /base"),
])
def test_the_wrapper_hands_its_flags_on(tmp_path, words, env, shown):
    """With a program in python's place that prints its environment and arguments."""
    python = '#!/bin/sh\necho "$OMP_NUM_THREADS $WANDB_MODE $NANOCHAT_BASE_DIR"\npwd\nprintf "%s|" "$@"\n'
    for path, text in (("bin/python", python), ("runs/setup.sh", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."\n'),
                       ("dev/experiments/run.sh", Path(run.__file__).with_name("run.sh").read_text())):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "bin" / "python").chmod(0o755)
    done = subprocess.run(["bash", str(tmp_path / "dev/experiments/run.sh"), *words], capture_output=True, text=True,
                          env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": "/home/me", **env})
    assert done.stdout == f"{shown}\n{tmp_path}\n{'|'.join(['-m', 'dev.experiments.run', *words])}|"
