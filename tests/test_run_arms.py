"""
Experiments with arms: the flags and names that follow from the tables, dials, and how jobs are run. Nothing is trained:
a shell script stands in for python.

    python -m pytest tests/test_run_arms.py
"""
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TASK_FLAGS, parse, rl_flags as rl_flags_of_test

from dev.experiments import run_arms
from dev.experiments.arms import DIALS, PAYS, Experiment, all_arms, experiments_of, rl_flags, sft
from nanochat.common import BadInput, script_main
from nanochat.storage.files import path_of
from nanochat.storage.run import lock_run
from scripts import chat_sft, tango_rl

ROOT = Path(__file__).resolve().parent.parent
# Writes down how it was called, and makes what the script would make, an SFT its last step's checkpoint. FAILS: the
# name or tag of what fails; STOPS: the run that has its parent signalled, and then waits; MEET: as many runs wait for
# each other.
STUB = """#!/bin/sh
echo "$*" >> "$CALLS"
module=$2 model= verifier= run= steps=700
while [ $# -gt 0 ]; do
    case $1 in --model-tag) model=$2 ;; --verifier-tag) verifier=$2 ;; --run) run=$2 ;; --num-steps) steps=$2 ;; esac
    shift
done
[ "$module" != scripts.chat_sft ] || run=${verifier:-$model}
[ "$run" != "${FAILS:-none}" ] || { echo "first"; echo "bad luck"; exit 3; }
[ "$run" != "${STOPS:-none}" ] || { kill -"$SIGNAL" $PPID; exec sleep 60; }
cd "$NANOCHAT_BASE_DIR"
case $module in
    scripts.tok_train) mkdir tokenizer; touch tokenizer/tokenizer.pkl ;;
    scripts.chat_sft)
        mkdir -p "chatsft_checkpoints/$run"
        touch "chatsft_checkpoints/$run/meta_$(printf %06d "$steps").json" ;;
    scripts.tango_rl)
        touch "$run.here"
        waited=0
        while [ "$(ls | grep -c here)" -lt "${MEET:-1}" ]; do
            [ $waited -lt 50 ] || exit 4
            waited=$((waited + 1)); sleep 0.1
        done
        mkdir -p "runs/$run"; : > "runs/$run/metrics.jsonl"
        echo '{"args": {"task": "chain", "recipe": "tango", "seed": '"${run##*-s}"'}}' > "runs/$run/config.json"
        case $run in *tango*) final=0.75 ;; *) final=0.25 ;; esac
        echo '{"gen_steps": 9, "ver_steps": 3, "steps": 0, "sampled_tokens": 9, "minutes": 1,
            "before": {"gen/pass1_in": 0.1, "gen/pass1_out": 0.1},
            "after": {"gen/pass1_in": '$final', "gen/pass1_out": 0.1}}' \
            > "runs/$run/summary.json" ;;
    scripts.report) echo "a table" ;;
esac
"""


class World:
    """A base directory, and the calls of the stub."""

    def __init__(self, base: Path, monkeypatch, capsys):
        self.base, self.monkeypatch, self.capsys = base, monkeypatch, capsys
        stub = base / "python"
        stub.write_text(STUB)
        stub.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(stub))
        self.setenv(NANOCHAT_BASE_DIR=base, CALLS=base / "calls", JOBS=1)

    def setenv(self, **values) -> None:
        for name, value in values.items():
            self.monkeypatch.setenv(name, str(value))

    def run(self, *flags: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        flags = [*flags, "--out", str(self.base / "out")]
        self.monkeypatch.setattr(sys, "argv", ["run_arms.py", *flags])
        (self.base / "calls").write_text("")
        code = 0
        try:
            script_main(run_arms.main, run_arms.make_parser())
        except SystemExit as stop:
            code = stop.code
        return code, *self.capsys.readouterr()

    def calls(self, module: str) -> list[str]:
        """The flags of its calls, in order."""
        lines = (self.base / "calls").read_text().splitlines()
        return [line.removeprefix(f"-m scripts.{module} ") for line in lines if line.split()[1] == f"scripts.{module}"]

    def runs(self) -> list[str]:
        return [call.split()[1] for call in self.calls("tango_rl")]


@pytest.fixture
def world(tmp_path, monkeypatch, capsys) -> World:
    return World(tmp_path, monkeypatch, capsys)


def experiments(*flags: str) -> list[Experiment]:
    return [e for group in experiments_of(run_arms.make_parser().parse_args(flags)).values() for e in group]


def one(*flags: str):
    return experiments(*flags)[0]


def value(flags: str, name: str) -> str | None:
    """What counts of a flag that may come several times."""
    return next(iter(re.findall(rf"{name} (\S+)", flags)[::-1]), None)


# Flags and names

PROBLEMS = "--chain-answer final --chain-share 0.45 --chain-min-steps 3 --chain-max-steps 10"
COMMON = f"--seed 1 --device-type cpu --num-steps 60 --eval-every 10 --kl-coef 0 --lr 2e-4 {PROBLEMS}"
ALPHA = "--alpha-start 0.5 --alpha-end 0.05"
PAPER = "--step-rewards verdicts --combine advantages --no-verify-distinct"
JUDGING = "--verifier-balance --verifier-replay 0.5 --verifier-lr 1e-4"


@pytest.mark.parametrize("arm, roles, own", [
    ("tango", f"--verifier-tag chain-s1-ver --warmup-steps 40 {JUDGING} {ALPHA} {PAPER}", "--recipe tango"),
    ("gentle", f"--verifier-tag chain-s1-ver --warmup-steps 40 {JUDGING} {ALPHA} {PAPER}",
     "--recipe tango --verifier-lr 2e-5 --warmup-steps 10"),
    ("fixed_verifier", f"--verifier-tag chain-s1-ver {ALPHA} {PAPER}", "--recipe fixed_verifier"),
    ("fixed_merged", f"--verifier-tag chain-s1-ver {ALPHA} {PAPER}",
     "--recipe fixed_verifier --step-rewards posterior --verify-distinct --combine rewards"),
    ("outcome_verifier", f"--verifier-tag chain-s1-ver --warmup-steps 40 {JUDGING} {ALPHA} --combine advantages "
                         "--no-verify-distinct", "--recipe outcome_verifier"),
    ("fixed_generator", f"--verifier-tag chain-s1-ver {JUDGING}", "--recipe fixed_generator --num-steps 59"),
    ("gold_steps", f"{ALPHA} --combine advantages", "--recipe gold_steps"),
    ("gold_merged", f"{ALPHA} --combine advantages", "--recipe gold_steps --combine rewards"),
    ("grpo", "", "--recipe grpo --lr 4e-4"),
    ("grpo_2e-4", "", "--recipe grpo --lr 4e-4 --lr 2e-4"),
    ("ttrl", "", "--recipe ttrl --lr 2e-4"),
    ("refit_20", f"{ALPHA} --verifier-tag chain-s1", "--recipe refit --refit-every 20 --verifier-lr 1e-3"),
    ("refit_1_1e-4", f"{ALPHA} --verifier-tag chain-s1", "--recipe refit --refit-every 1 --verifier-lr 1e-3 --lr 1e-4"),
    ("small_verifier", f"--verifier-tag chain-s1-ver-small --warmup-steps 40 {JUDGING} {ALPHA} {PAPER}", ""),
    ("alpha_0.05", f"--verifier-tag chain-s1-ver --warmup-steps 40 {JUDGING} {ALPHA} {PAPER}",
     "--alpha-start 0.05 --alpha-end 0.05e-1"),
])
def test_the_flags_of_an_arm_are_its_roles_the_tasks_and_its_own(arm, roles, own):
    assert rl_flags(one(), "1", arm) == " ".join(f"--model-tag chain-s1 {roles} {COMMON} {own}".split())


def test_flags_that_follow_the_number_of_steps():
    e = one("--task", "last_letter", "--start", "refine", "--steps", "20")
    assert value(rl_flags(e, "1", "tango"), "--num-steps") == "20"
    assert value(rl_flags(e, "1", "fixed_generator"), "--num-steps") == "46"  # 40 + 19 // 3
    assert value(rl_flags(e, "1", "score"), "--stage1-steps") == "6"
    assert value(rl_flags(e, "1", "score"), "--model-tag") == "last_letter-s1-refine"


def test_the_flags_of_an_sft():
    e, model = one("--task", "chain"), "--seed 2 --device-type cpu --depth 4 --n-embd 128 --n-head 4 --sequence-len 384"
    made = {kind: (tag, " ".join(flags.split())) for kind in ("sft", "refine", "tango", "large_verifier")
            for tag, flags in [sft(e, "2", kind)]}
    assert made == {
        "sft": ("chain-s2", f"--role generator --model-tag chain-s2 {model} {PROBLEMS}"),
        "refine": ("chain-s2-refine", f"--role generator --model-tag chain-s2-refine --from-stage sft --from-tag "
                   f"chain-s2 {model} {PROBLEMS} --num-steps 200 --demo-shares refine:0.5 --matrix-lr 2e-3 "
                   "--embedding-lr 2e-3"),
        "tango": ("chain-s2-ver", f"--role verifier --model-tag chain-s2 --verifier-tag chain-s2-ver {model} "
                  f"{PROBLEMS}"),
        "large_verifier": ("chain-s2-ver-large", f"--role verifier --model-tag chain-s2 --verifier-tag "
                           f"chain-s2-ver-large {model} {PROBLEMS} --depth 6 --n-embd 192 --n-head 6")}
    mixture = sft(one("--task", "mixture"), "2", "tango")[1]  # its verifier has more steps than its generator
    assert re.findall(r"--num-steps \d+", mixture) == ["--num-steps 1000", "--num-steps 2500"]


@pytest.mark.parametrize("flags, names", [
    ([], ["chain"]),
    (["--steps", "60"], ["chain"]),
    (["--steps", "20"], ["chain_20"]),
    (["--task", "mixture", "--start", "refine", "--steps", "20"], ["mixture_refine_20"]),
    (["--dial", "start", "--settings", "weak strong"], ["small_chain_weak", "small_chain_strong"]),
    (["--dial", "pressure", "--settings", "usual alpha30"], ["small_chain_usual", "small_chain_alpha30"]),
    (["--dial", "pressure", "--settings", "kl0", "--steps", "120"], ["small_chain_kl0"]),
    (["--dial", "labels", "--settings", "n64", "--steps", "30"], ["small_chain_n64_30"]),
])
def test_an_experiment_is_named_after_what_is_not_as_usual(flags, names):
    assert [e.name for e in experiments(*flags)] == names


def test_settings_of_one_name_are_one_setting():
    settings = [(name, setting) for dial in DIALS.values() for name, setting in dial.items()]
    assert all(setting is dict(settings)[name] for name, setting in settings) and len(dict(settings)) == 7
    names = [e.name for dial in DIALS for e in experiments("--dial", dial)]
    assert len(names) == 9 and all(re.fullmatch(r"\w+", name) for name in names)  # what scripts.report groups by


def test_any_arm_comes_with_a_weight_of_the_kl():
    for arm in ("tango", "grpo_2e-4", "small_verifier", "gold_steps", "fixed_verifier"):
        assert rl_flags(one(), "1", f"{arm}_kl0.05") == f"{rl_flags(one(), '1', arm)} --kl-coef 0.05"
        assert sft(one(), "1", f"{arm}_kl0.05") == sft(one(), "1", arm)
    e = one("--dial", "pressure", "--settings", "usual")
    assert rl_flags(e, "1", "gentle_posterior_kl0.2") == rl_flags(e, "1", "gentle_posterior") + " --kl-coef 0.2"


def test_a_weight_of_the_kl_is_a_number_below_one(world):
    for arm in ("tango_kl", "tango_kl1", "tango_kl0.05x", "none_kl0.05"):
        assert world.run("--arms", arm)[0] == 2


# Dials

def usual() -> Experiment:
    return one("--dial", "start", "--settings", "usual")


def parsed(flags: str):
    return tango_rl.make_parser(flags.split()).parse_args(flags.split())


def test_the_dial_start_changes_the_sft_of_the_verifier_and_nothing_else():
    usual_tag, flags_of_usual = sft(usual(), "1", "tango")
    assert usual_tag == "small_chain-s1-ver" and "--chain-verifier-share" not in flags_of_usual
    made = {e.name: e for e in experiments("--dial", "start")}
    for name, own in (("weak", "--chain-verifier-share 0.7"), ("strong", "--chain-verifier-share 0.05")):
        e = made[f"small_chain_{name}"]
        tag, flags = sft(e, "1", "tango")
        assert tag == f"{usual_tag}-{name}"
        assert flags.split() == [*flags_of_usual.replace(usual_tag, tag).split(), *own.split()]
        assert sft(e, "1", "sft") == sft(usual(), "1", "sft")
        for arm in PAYS:
            assert rl_flags(e, "1", arm) == rl_flags(usual(), "1", arm).replace(usual_tag, tag)
            assert ("-ver" in rl_flags(e, "1", arm)) == (arm not in ("grpo", "gold_steps", "gold_merged", "ttrl"))


@pytest.mark.parametrize("setting, alpha, kl", [("alpha30", 0.3, 0.05), ("usual", 0.7, 0.05), ("kl0", 0.7, 0)])
def test_the_dial_pressure_sets_a_constant_alpha_and_the_kl(setting, alpha, kl):
    e = one("--dial", "pressure", "--settings", setting)
    for arm in PAYS:
        args = parsed(rl_flags(e, "1", arm))
        assert (args.num_steps, args.examples_per_step, args.kl_coef) == (120, 16, kl)
        if arm not in ("grpo", "ttrl"):
            assert (args.alpha_start, args.alpha_end) == (alpha, alpha)


@pytest.mark.parametrize("number", ["64", "256"])
def test_the_dial_labels_counts_the_labels_of_every_arm_that_uses_them(number):
    e = one("--dial", "labels", "--settings", f"n{number}")
    flags = {arm: rl_flags(e, "1", arm) for arm in all_arms(e)}
    assert flags.keys() == set(PAYS) - {"gold_steps", "gold_merged"}
    for arm, text in flags.items():
        args = parsed(text)
        assert getattr(args, "num_labelled", 0) == (0 if arm == "ttrl" else int(number))
        assert getattr(args, "alpha_start", 0.7) == 0.7 and args.kl_coef == 0.05


def test_what_runs_at_a_setting_by_default_is_there_beside_what_it_is_compared_with():
    for dial in DIALS.values():
        for setting in dial.values():
            assert {"grpo", "fixed_merged", "gentle_merged"} < set(setting.by_default) <= setting.arms.keys()
            assert ("tango" in setting.by_default) == ("fixed_verifier" in setting.by_default)


@pytest.mark.parametrize("flags, words", [
    (["--dial", "warp"], ["--dial warp", "start", "pressure", "labels"]),
    (["--dial", ""], ["--dial", "empty"]),
    (["--dial", "start", "--settings", "alpha30"], ["--settings alpha30", "weak", "usual", "strong"]),
    (["--dial", "start", "--settings", "weak weak"], ["--settings weak weak", "twice"]),
    (["--dial", "start", "--settings", ""], ["--settings", "empty"]),
    (["--settings", "weak"], ["--settings weak", "--dial"]),
    (["--dial", "start labels", "--settings", "usual"], ["--settings usual", "--dial"]),
    (["--dial", "start start"], ["--dial start start", "twice"]),
    (["--dial", "start labels", "--arms", "gold_steps"], ["--arms gold_steps", "ttrl"]),
    (["--dial", "start", "--task", "mixture"], ["--task mixture", "small_chain"]),
    (["--dial", "labels", "--arms", "gold_steps"], ["--arms gold_steps", "tango", "ttrl"]),
    (["--dial", "start", "--arms", "prime"], ["--arms prime", "grpo", "gentle_posterior"]),
])
def test_a_dial_that_cannot_be_turned_so(world, flags, words):
    code, out, err = world.run(*flags)
    assert (code, out, err.count("\n")) == (2, "", 1) and all(word in err for word in words)
    assert not (world.base / "out").exists() and not (world.base / "logs").exists()


# Jobs

def test_a_run_that_another_process_is_at_work_on_is_not_replaced_by_a_copy(world):
    folder = world.base / "runs" / "small_chain_usual-grpo-s1"
    flags = ["--dial", "start", "--settings", "weak usual", "--seeds", "1", "--arms", "grpo"]
    assert world.run(*flags)[0] == 0
    (folder / "summary.json").unlink()
    held, before = lock_run(str(folder)), sorted(os.listdir(folder))
    code, _, err = world.run(*flags)
    assert (code, err) == (2, f"error: {folder}: another process is at work on this run\n")
    held.close()
    assert sorted(os.listdir(folder)) == before


def test_all_sfts_come_before_all_runs_and_a_dial_gets_one_report(world):
    """GRPO has no verifier: at the second setting its runs are copies of those at the first."""
    code, out, err = world.run("--dial", "start", "--settings", "weak usual", "--seeds", "1 2", "--arms",
                               "tango grpo gentle")
    assert (code, err) == (0, "")
    order = [line.split()[1] for line in (world.base / "calls").read_text().splitlines()]
    assert order == ["scripts.tok_train", *["scripts.chat_sft"] * 6, *["scripts.tango_rl"] * 10,
                     "scripts.report"]
    assert [value(call, "--role") for call in world.calls("chat_sft")] == ["generator"] * 2 + ["verifier"] * 4
    names = [f"small_chain_{setting}-{arm}-s{seed}" for setting in ("weak", "usual")
             for arm in ("tango", "grpo", "gentle") for seed in (1, 2)]
    made = [name for name in names if not name.startswith("small_chain_usual-grpo")]
    assert world.runs() == made == re.findall(r"^\d\d:\d\d (\S+)$", out, re.MULTILINE)
    assert all((world.base / "runs" / name / "summary.json").exists() for name in names)
    assert "\n2 runs are copies " in out
    out_folder = world.base / "out" / "start"
    assert world.calls("report") == [f"--out {out_folder} {' '.join(names)}"]
    text = (out_folder / "start.md").read_text()
    assert text.startswith("`bash dev/experiments/pays.sh --dial start --settings 'weak usual' --seeds '1 2' --arms ")
    assert re.search(r"\d+ cores of .+, 1 runs of one thread .+ took 0 minutes", text)
    assert text.endswith("\n\na table\n") and text in out
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| small_chain_")]
    assert [row[:4] for row in rows] == [
        [f"| small_chain_{setting}", arm, f"{final} {final}", f"{final} ± 0.0"]
        for setting in ("weak", "usual") for arm, final in (("tango", "75.0"), ("grpo", "25.0"), ("gentle", "25.0"))]
    shutil.rmtree(world.base / "runs" / "small_chain_weak-grpo-s1")
    assert world.run("--dial", "start", "--seeds", "1 2", "--arms", "grpo")[0] == 0
    assert world.runs() == []  # a copy is as good as what it is a copy of, at any setting
    assert (world.base / "runs" / "small_chain_strong-grpo-s1" / "summary.json").exists()


def test_dials_share_the_usual_setting_and_each_gets_its_report(world):
    code, out, err = world.run("--dial", "pressure labels", "--seeds", "1", "--arms", "tango fixed_verifier")
    assert (code, err) == (0, "") and len(world.runs()) == len(set(world.runs())) == 10
    names = {dial: [f"small_chain_{setting}-{arm}-s1" for setting in DIALS[dial]
                    for arm in ("tango", "fixed_verifier")] for dial in ("pressure", "labels")}
    assert world.calls("report") == [f"--out {world.base}/out/{dial} {' '.join(runs)}" for dial, runs in names.items()]
    rows = [line for line in (world.base / "out/labels/labels.md").read_text().splitlines() if "| tango |" in line]
    assert len(rows) == 3 and all(" | +50.0 (fixed_verifier) | - | " in row for row in rows)


def names_of(stages: list) -> list[list[str]]:
    return [[job.name for job in stage] for stage in stages]


def test_every_sft_is_made_once_and_after_the_one_that_it_starts_from():
    stages = run_arms.stages_of(experiments("--dial", "pressure", "--settings", "alpha30 usual kl0"), ["1", "2"],
                                [["tango", "gentle"]] * 3)
    assert names_of(stages[:2]) == [[f"sft-small_chain-s{seed}{ending}" for seed in (1, 2)] for ending in ("", "-ver")]
    assert len(stages[2]) == len(set(stages[2])) == 12
    stages = run_arms.stages_of([one("--start", "refine")], ["1"], [["grpo", "score", "tango", "small_verifier"]])
    assert names_of(stages[:2]) == [["sft-chain-s1"],
                                    ["sft-chain-s1-refine", "sft-chain-s1-ver", "sft-chain-s1-ver-small"]]
    stages = run_arms.stages_of([one()], ["1"], [["grpo_2e-4", "ttrl", "gold_steps"]])  # without a verifier of SFT
    assert names_of(stages[:2]) == [["sft-chain-s1"], []]


def test_what_is_finished_is_reused_and_what_was_interrupted_goes_on(world):
    flags = ["--arms", "tango grpo", "--seeds", "1"]
    assert world.run(*flags)[0] == 0 and world.runs() == ["chain-tango-s1", "chain-grpo-s1"]
    (world.base / "runs" / "chain-grpo-s1" / "summary.json").unlink()
    verifier = world.base / "chatsft_checkpoints" / "chain-s1-ver"
    (verifier / "meta_000700.json").rename(verifier / "meta_000015.json")  # stopped after its 15th step
    code, out, _ = world.run(*flags)
    assert code == 0 and re.findall(r"^..:.. (\S+)$", out, re.MULTILINE) == ["chain-tango-s1", "chain-grpo-s1"]
    assert not world.calls("tok_train")
    assert world.calls("chat_sft") == [f"--resume-from-step auto {' '.join(sft(one(), '1', 'tango')[1].split())}"]
    assert world.calls("tango_rl") == [f"--run chain-grpo-s1 --resume-from-step auto {rl_flags(one(), '1', 'grpo')}"]
    assert (world.base / "out" / "chain.md").read_text().startswith(
        "`bash dev/experiments/fig4.sh --arms 'tango grpo' --seeds 1 ")


def test_what_other_flags_made_is_refused_in_any_setting(world):
    assert world.run("--dial", "start", "--arms", "tango", "--seeds", "1")[0] == 0
    path = world.base / "logs" / "sft-small_chain-s1-ver-strong.flags"
    path.write_text(path.read_text().replace("0.05", "0.06"))
    code, _, err = world.run("--dial", "start", "--arms", "tango", "--seeds", "1")
    made = world.base / "chatsft_checkpoints" / "small_chain-s1-ver-strong"
    assert code == 2 and err.startswith(f"error: {made} was made with")
    assert world.run("--dial", "start", "--arms", "tango", "--seeds", "1", "--settings", "weak")[0] == 0


def without_logs(world, job: run_arms.Job | None = None, made_with=lambda args: args) -> tuple[int, str]:
    """Exit code and stderr of a call whose jobs are all done, when the folder of logs is lost. made_with: what this
    job's folder then says of its flags."""
    arms = ["--dial", "start", "--settings", "weak usual", "--arms", "tango grpo", "--seeds", "1"]
    assert world.run(*arms)[0] == 0
    for made in {job for stage in run_arms.stages_of(experiments(*arms[:-4]), ["1"], [["tango", "grpo"]] * 2)
                 for job in stage}:
        args = {**vars(run_arms.flags_of(made)[0]), "run": "another", "resume_from_step": "auto"}
        path = Path(made.folder) / "config.json"
        path.write_text(json.dumps({"args": made_with(args) if made == job else args}))
    shutil.rmtree(world.base / "logs")
    shutil.rmtree(world.base / "runs" / "small_chain_usual-grpo-s1")  # a copy
    code, _, err = world.run(*arms)
    return code, err


def test_what_was_made_alike_goes_on_without_its_log(world):
    assert without_logs(world) == (0, "") and not world.calls("chat_sft") and not world.runs()
    assert (world.base / "runs" / "small_chain_usual-grpo-s1" / "summary.json").exists()


@pytest.mark.parametrize("made_with, words", [
    (lambda args: {**args, "seed": 7}, ["made with other flags", "--seed 1", "started with 7", "NANOCHAT_BASE_DIR"]),
    (lambda args: "none", ["is gone", "does not tell", "move that folder away"])])
@pytest.mark.parametrize("job_of", [run_arms.sft_job, run_arms.rl_job])
def test_without_a_log_what_was_made_with_other_flags_is_refused(world, made_with, words, job_of):
    job = job_of(one("--dial", "start", "--settings", "weak"), "1", "tango")
    code, err = without_logs(world, job, made_with)
    assert code == 2 and err.count("\n") == 1 and all(word in err for word in [job.folder, *words]), err


def test_a_run_that_was_continued_by_hand_is_not_taken_for_what_was_asked(world):
    arms = ["--arms", "grpo", "--seeds", "1"]
    assert world.run(*arms)[0] == 0
    path = world.base / "runs" / "chain-grpo-s1" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"args": config["args"] | {"num_steps": 7}}))
    code, _, err = world.run(*arms)
    assert code == 2 and "chain-grpo-s1 was made with other flags" in err and "was started with 7" in err


def test_the_scripts_write_down_the_flags_that_they_were_started_with(base):
    """What without_logs makes up above."""
    flags = rl_flags_of_test("--num-steps", "1", "--warmup-steps", "1")
    tango_rl.main(parse(tango_rl, [*flags, "--run", "r", "--resume-from-step", "auto"]))
    sft_flags = [*TASK_FLAGS, "--device-type", "cpu", "--role", "verifier", "--model-tag", "tiny", "--verifier-tag",
                 "v", "--depth", "1", "--n-embd", "32", "--n-head", "1", "--sequence-len", "128", "--num-steps", "1",
                 "--max-new-tokens", "28", "--num-sampled", "4"]
    chat_sft.main(parse(chat_sft, [*sft_flags, "--resume-from-step", "auto"]))
    for module, name, folder, argv in (("tango_rl", "r", path_of("runs", "r"), flags),
                                       ("chat_sft", "sft-v", path_of("sft", "v"), sft_flags)):
        job = run_arms.Job(name, f"scripts.{module}", folder, "done", " ".join(argv))
        run_arms.check_made_alike(job)
        with pytest.raises(BadInput, match="--seed 3: it was started with 0"):
            run_arms.check_made_alike(dataclasses.replace(job, flags=f"{job.flags} --seed 3"))


def test_a_run_that_fails_is_left_out_and_the_others_go_on(world):
    world.setenv(FAILS="chain-tango-s1")
    code, out, err = world.run("--arms", "tango grpo", "--seeds", "1 2")
    assert code == 1
    assert re.findall(r"^..:.. (\S+)$", out, re.MULTILINE) == ["chain-tango-s2", "chain-grpo-s1", "chain-grpo-s2"]
    log = world.base / "logs" / "chain-tango-s1.log"
    assert re.match(rf"failed: \S+ -m scripts.tango_rl --run chain-tango-s1 .+ \(see {log}\)\nfirst\nbad luck\n", err)
    assert err.endswith("\nnot finished, left out: chain-tango-s1\n") and log.read_text() == "first\nbad luck\n"
    assert world.calls("report") == [
        f"--out {world.base}/out/ chain-tango-s2 chain-grpo-s1 chain-grpo-s2"]


def test_nothing_starts_from_an_sft_that_failed(world):
    world.setenv(FAILS="chain-s1-ver")
    code, _, err = world.run("--arms", "tango grpo", "--seeds", "1 2")
    assert code == 1 and err.startswith("failed: ") and "bad luck" in err
    assert len(world.calls("chat_sft")) == 4 and world.runs() == world.calls("report") == []


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_stops_the_run_and_starts_nothing_new(world, name):
    world.setenv(STOPS="chain-grpo-s2", SIGNAL=name)
    code, out, err = world.run("--arms", "grpo", "--seeds", "1 2 3")
    assert (code, err) == (143, "") and world.runs() == ["chain-grpo-s1", "chain-grpo-s2"]
    assert re.fullmatch(r"..:.. chain-grpo-s1\nstopped.*\n", out) and world.calls("report") == []
    world.setenv(STOPS="")
    assert world.run("--arms", "grpo", "--seeds", "1 2 3")[0] == 0
    assert world.runs() == ["chain-grpo-s2", "chain-grpo-s3"]


def test_jobs_run_at_the_same_time(world):
    world.setenv(JOBS=3, MEET=3)
    assert world.run("--arms", "grpo", "--seeds", "1 2 3")[0] == 0


# The wrappers

def wrapper(tmp_path, name: str, *flags: str, **env: str) -> subprocess.CompletedProcess:
    """Runs one with a program in python's place that prints its environment and arguments."""
    for folder in ("runs", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "runs" / name, tmp_path / "runs" / name)
    (tmp_path / "runs" / "setup.sh").write_text('cd "$(dirname "${BASH_SOURCE[0]}")/.."\n')
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$OMP_NUM_THREADS $WANDB_MODE $NANOCHAT_BASE_DIR"\npwd\nprintf "%s|" "$@"\n')
    python.chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": "/home/me", **env}
    return subprocess.run(["bash", str(tmp_path / "runs" / name), *flags], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("name, env, shown", [
    ("fig4.sh", {}, "1 disabled /home/me/.cache/nanochat-tango-fig4"),
    ("pays.sh", {"WANDB_MODE": "offline", "NANOCHAT_BASE_DIR": "/base"}, "1 offline /base"),
])
def test_a_wrapper_hands_its_flags_on(tmp_path, name, env, shown):
    done = wrapper(tmp_path, name, "--dial", "start", "--seeds", "1 2", **env)
    assert done.stdout == f"{shown}\n{tmp_path}\n-m|dev.experiments.run_arms|--dial|start|--seeds|1 2|"


@pytest.mark.parametrize("name", ["fig4.sh", "pays.sh"])
def test_help_is_the_head_of_the_wrapper(tmp_path, name):
    done = wrapper(tmp_path, name, "--help")
    head = re.search(r"\n((#.*\n)+)set", (ROOT / "runs" / name).read_text())[1]
    assert done.returncode == 0 and done.stdout.count("\n") > 8
    assert [f"# {line}" for line in done.stdout.splitlines()] == head.splitlines()


def test_pays_turns_all_dials_unless_one_is_named(tmp_path):
    shown = wrapper(tmp_path, "pays.sh", "--seeds", "1").stdout
    assert shown.endswith(f"-m|dev.experiments.run_arms|--dial|{' '.join(DIALS)}|--seeds|1|")
