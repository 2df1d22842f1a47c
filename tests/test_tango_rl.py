"""
The trainer end to end on a tiny pair: what a run leaves, resume, signals, ranks, recipes.

    python -m pytest tests/test_tango_rl.py
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import RL_FLAGS, TASK_FLAGS, parse, rl_flags, scripts_on_two_ranks
from test_dpo import random_play, weights_of

from nanochat.checkpoint import list_steps, saved_steps
from nanochat.common import BadInput, Diverged, StopRequested
from nanochat.recipes.tango import tango
from nanochat.rl.learn import state
from nanochat.rl.measure import evals
from nanochat.rl.play.play import Play, apply_update
from nanochat.rl.records.prompts import Verification
from nanochat.storage.run import MEASURED, lock_run
from scripts import chat_sft, tango_rl
from tasks.chain import Chain
from tasks.common import epoch_order, nth_of_epochs

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def train(*flags: str) -> None:
    tango_rl.main(parse(tango_rl, rl_flags(*flags)))


def records(base, run: str, name: str = "metrics.jsonl") -> list[dict]:
    """A run's log without its timings."""
    with open(base / "runs" / run / name) as f:
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)} for line in f]


def weights(base, run: str, step: int) -> dict:
    """All tensors of a run's set of a step: both models and both optimizers."""
    tensors = {}
    for role in ("gen", "ver"):
        folder = base / "chatrl_checkpoints" / f"{run}-{role}"
        for name, t in torch.load(folder / f"model_{step:06d}.pt", weights_only=True).items():
            tensors[f"{role}/{name}"] = t
        optimizer = torch.load(folder / f"optim_{step:06d}_rank0.pt", weights_only=True)
        for i, entry in optimizer["state"].items():
            tensors |= {f"{role}/{i}/{name}": t for name, t in entry.items()}
    return tensors


def copy_run(base, name: str, copy: str) -> None:
    """A run under another name, with all of its sets."""
    shutil.copytree(base / "runs" / name, base / "runs" / copy)
    for role in ("gen", "ver"):
        shutil.copytree(base / "chatrl_checkpoints" / f"{name}-{role}", base / "chatrl_checkpoints" / f"{copy}-{role}")
    path = base / "runs" / copy / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "args": {**config["args"], "run": copy}}))


def assert_same_weights(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


@pytest.fixture(scope="module")
def straight(sft_base, tmp_path_factory):
    """A run from start to end that saves every step: 2 warm-up steps, then g g v g g."""
    base = tmp_path_factory.mktemp("straight") / "base"
    shutil.copytree(sft_base, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        train("--run", "r", "--save-every", "1", "--eval-every", "2")
    return base


@pytest.fixture
def straight_copy(straight, tmp_path, monkeypatch):
    shutil.copytree(straight, tmp_path / "base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


def test_roles_move_in_turns_and_only_the_trained_one_changes(straight):
    roles = [r["role"] for r in records(straight, "r")]
    assert roles == ["verifier"] * 2 + ["generator"] * 2 + ["verifier"] + ["generator"] * 2
    for step, role in enumerate(roles[1:], start=1):
        before, after = weights(straight, "r", step), weights(straight, "r", step + 1)
        moved = {name.split("/")[0] for name in before if not torch.equal(before[name], after[name])}
        assert moved <= {"gen" if role == "generator" else "ver"}
    first, last = weights(straight, "r", 1), weights(straight, "r", 7)
    assert {name.split("/")[0] for name in first if not torch.equal(first[name], last[name])} == {"gen", "ver"}


def test_a_run_leaves_what_it_promises(straight):
    folder = straight / "runs" / "r"
    summary = json.loads((folder / "summary.json").read_text())
    keys = {"gen/pass1_in", "gen/pass1_out", "ver/outcome_f1_fixed", "ver/balanced_acc_fixed", "ver/step_f1_fixed",
            "ver/step_f1_fixed_out", "ver/step_f1_current", "ver/parse_fail_fixed"}
    assert summary["seed"] == 0 and summary["minutes"] > 0
    assert keys <= summary["before"].keys() and keys <= summary["after"].keys()
    log = records(straight, "r")
    assert [r["step"] for r in log] == list(range(7))
    common = {"reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio",
              "entropy", "kl", "clip_ratio/low", "clip_ratio/high", "grad_norm", "lr", "rollout_probs_diff_mean"}
    for record in log:
        prefix = "gen" if record["role"] == "generator" else "ver"
        assert {f"{prefix}/{name}" for name in common} <= record.keys()
    assert {"ver/outcome_f1", "ver/balanced_acc", "ver/step_f1", "ver/pred_pos_rate", "ver/label_pos_rate",
            "ver/parse_fail", "ver/step_count_mismatch"} <= log[0].keys()
    assert [(r["gen_step"], r["ver_step"]) for r in log if "gen/pass1_in" in r] == [(0, 0), (0, 2), (2, 2)]
    rollouts = records(straight, "r", "rollouts.jsonl")
    assert len(rollouts) == 7 * 2 * 4 and len({r["problem"] for r in rollouts if r["step"] == 3}) == 2
    for rollout in rollouts:
        own = rollout["solution"] if rollout["role"] == "generator" else rollout["verification"]
        assert len(rollout["token_ends"]) == len(rollout["advantages"]) and rollout["token_ends"][-1] == len(own)
        assert rollout["reward"] == rollout["outcome"] or rollout["role"] == "verifier"
        assert len(rollout["step_verdicts"]) == len(rollout["step_labels"]) or "step_count_mismatch" in rollout["unmet"]
    assert json.loads((folder / "config.json").read_text())["args"]["lr"] == 1e-3


def test_sampler_and_trainer_agree_on_policy(straight):
    for record in records(straight, "r"):
        prefix = "gen" if record["role"] == "generator" else "ver"
        assert record[f"{prefix}/rollout_logprobs_diff_max"] < 1e-4
        assert record[f"{prefix}/clip_ratio/low"] == record[f"{prefix}/clip_ratio/high"] == 0


@pytest.mark.parametrize("step", range(1, 7))
def test_resume_continues_bit_for_bit(straight, straight_copy, step):
    """From within the warm-up (1) and its end (2), a generator phase (3, 6), before a verifier phase (4) and after one
    (5). An evaluation comes right after 2 and 4 and is just over at 3 and 5."""
    train("--run", "r", "--save-every", "1", "--eval-every", "2", "--resume-from-step", str(step))
    assert_same_weights(weights(straight, "r", 7), weights(straight_copy, "r", 7))
    assert records(straight, "r") == records(straight_copy, "r")
    assert records(straight, "r", "rollouts.jsonl") == records(straight_copy, "r", "rollouts.jsonl")
    before, after = (json.loads((b / "runs" / "r" / "summary.json").read_text()) for b in (straight, straight_copy))
    assert (before["before"], before["after"]) == (after["before"], after["after"])


def test_resume_goes_on_bit_for_bit_over_the_ends_of_epochs(base, monkeypatch):
    """6 problems, 4 a step: an epoch ends within step 1 and after step 2."""
    problem = Chain.problem
    few = lambda split, index: nth_of_epochs(list(range(6)), 0, split, index) if split == "rl" else index
    monkeypatch.setattr(Chain, "problem", lambda self, split, index: problem(self, split, few(split, index)))
    flags = ["--recipe", "grpo", "--run", "r", "--save-every", "1"]
    train(*flags)
    final, log = gen_weights(base, 4), (records(base, "r"), records(base, "r", "rollouts.jsonl"))
    assert torch.load(base / "runs" / "r" / "state_000004.pt", weights_only=True)["cursor"] == 16
    for step in (3, 2, 1):
        epoch_order.cache_clear()
        train(*flags, "--resume-from-step", str(step))
        assert_same_weights(final, gen_weights(base, 4))
        assert log == (records(base, "r"), records(base, "r", "rollouts.jsonl"))


def gen_weights(base, step: int) -> dict:
    return torch.load(base / "chatrl_checkpoints" / "r-gen" / f"model_{step:06d}.pt", weights_only=True)


def test_resume_at_the_last_step_trains_nothing_and_reports_the_same(straight, straight_copy):
    os.remove(straight_copy / "runs" / "r" / "summary.json")
    train("--run", "r", "--save-every", "1", "--eval-every", "2", "--resume-from-step", "auto")
    assert records(straight, "r") == records(straight_copy, "r")
    assert (json.loads((straight_copy / "runs" / "r" / "summary.json").read_text())["after"]
            == json.loads((straight / "runs" / "r" / "summary.json").read_text())["after"])


def test_a_finished_run_is_evaluated_again_only_where_a_flag_has_changed(straight_copy, monkeypatch, capsys):
    flags = ["--run", "r", "--eval-every", "2", "--resume-from-step", "auto", "--save-every"]
    table = lambda: [line for line in capsys.readouterr().out.split("\n") if re.search(r" -> .* [-+]", line)]
    calls, evaluate = [], tango_rl.held_out
    monkeypatch.setattr(tango_rl, "held_out", lambda *args: calls.append(1) or evaluate(*args))
    train(*flags, "1")
    kept = table()
    assert not calls and kept
    train(*flags, "2")
    assert calls and table() == kept


def test_what_a_continued_run_changes_is_written_down(straight_copy):
    """The report compares runs by config.json: it must say what the last steps were made with."""
    path = straight_copy / "runs" / "r" / "config.json"
    before = json.loads(path.read_text())
    train("--run", "r", "--resume-from-step", "auto", "--num-steps", "5")
    after = json.loads(path.read_text())
    assert after["args"]["num_steps"] == 5 and (before["args"]["eval_every"], after["args"]["eval_every"]) == (2, 0)
    changed = {"num_steps": [4, 5], "save_every": [1, after["args"]["save_every"]], "eval_every": [2, 0]}
    assert after["resumed"] == [{"step": 7, "changed": changed}]
    assert {name: value for name, value in after.items() if name not in ("args", "resumed")} == {
        name: value for name, value in before.items() if name != "args"}


def test_a_finished_run_that_goes_on_and_is_stopped_is_not_finished(straight_copy, monkeypatch):
    monkeypatch.setattr(tango_rl, "train", lambda *args: (_ for _ in ()).throw(StopRequested()))
    with pytest.raises(StopRequested):
        train("--run", "r", "--num-steps", "6", "--resume-from-step", "auto")
    assert not (straight_copy / "runs" / "r" / "summary.json").exists()


@pytest.mark.parametrize("missing",
                         ["chatrl_checkpoints/r-ver/optim_000003_rank0.pt", "chatrl_checkpoints/r-gen/model_000003.pt"])
def test_resume_with_a_file_missing_is_an_error_that_names_it(straight_copy, missing):
    os.remove(straight_copy / missing)
    with pytest.raises(BadInput, match=os.path.basename(missing)):
        train("--run", "r", "--save-every", "1", "--resume-from-step", "3")


def interrupt_at(monkeypatch, owner, name: str, call: int) -> None:
    """Makes this process receive SIGTERM when owner.name is called for the `call`-th time."""
    original, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)
    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("where, name, call", [
    ("rollout", "solve", 10), ("verification", "verify", 6), ("update", "apply_update", 4),
    ("evaluation", "pass_at_1", 2)])
def test_sigterm_saves_one_set_and_the_next_run_goes_on(base, straight, monkeypatch, where, name, call):
    """solve and verify also serve the evaluation at the start; the calls were chosen to hit the loop."""
    owner = {"apply_update": tango_rl, "pass_at_1": evals}.get(name, Play)
    with monkeypatch.context() as patch:
        interrupt_at(patch, owner, name, call)
        with pytest.raises(StopRequested, match="--resume-from-step auto"):
            train("--run", "r", "--save-every", "0", "--eval-every", "2")
    saved = [f for f in os.listdir(base / "runs" / "r") if f.startswith("state_")]
    assert len(saved) == 1 and 0 < int(saved[0][6:12]) < 7
    train("--run", "r", "--save-every", "0", "--eval-every", "2", "--resume-from-step", "auto")
    assert_same_weights(weights(straight, "r", 7), weights(base, "r", 7))
    assert records(straight, "r") == records(base, "r")


@pytest.mark.parametrize("name, call", [("save_model", 4), ("save_state", 2)])
def test_sigterm_in_a_save_lets_it_end_and_stops_after_it(base, straight, monkeypatch, name, call):
    """Both come in the save of step 4, the second of this run; by then the next step may have made its update."""
    with monkeypatch.context() as patch:
        interrupt_at(patch, state, name, call)
        with pytest.raises(StopRequested, match="stopped after step [45]"):
            train("--run", "r", "--save-every", "2", "--eval-every", "2")
    assert saved_steps("r") in ([2, 4], [2, 4, 5])
    assert_same_weights(weights(straight, "r", 4), weights(base, "r", 4))
    train("--run", "r", "--save-every", "2", "--eval-every", "2", "--resume-from-step", "auto")
    assert_same_weights(weights(straight, "r", 7), weights(base, "r", 7))
    assert records(straight, "r") == records(base, "r")


@pytest.mark.parametrize("owner, name", [(evals, "pass_at_1"), (tango_rl, "health_check")])
def test_sigterm_at_start_up_saves_nothing_and_the_next_run_starts_afresh(base, straight, monkeypatch, owner, name):
    with monkeypatch.context() as patch:
        interrupt_at(patch, owner, name, 1)
        with pytest.raises(StopRequested, match="stopped after step 0"):
            train("--run", "r", "--save-every", "1", "--eval-every", "2")
    assert saved_steps("r") == []
    train("--run", "r", "--save-every", "1", "--eval-every", "2", "--resume-from-step", "auto")
    assert_same_weights(weights(straight, "r", 7), weights(base, "r", 7))
    assert records(straight, "r") == records(base, "r")


def test_sigterm_before_the_run_is_open_ends_the_process_and_leaves_nothing(base):
    """Nothing is lost then, and the default of the signal stands."""
    code = ("import os, signal; from conftest import *; from scripts import tango_rl; "
            "tango_rl.load_roles = lambda *args: os.kill(os.getpid(), signal.SIGTERM); "
            "tango_rl.main(parse(tango_rl, rl_flags('--run', 'r')))")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.path.join(ROOT, "tests")])}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "") and not (base / "runs").exists()


def test_sigterm_in_the_last_evaluation_keeps_the_last_set(base, straight, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tango_rl, "train", lambda t, recipe, original=tango_rl.train: (
            original(t, recipe), os.kill(os.getpid(), signal.SIGTERM)))
        with pytest.raises(StopRequested, match="stopped after step 7"):
            train("--run", "r", "--save-every", "0", "--eval-every", "2")
    assert saved_steps("r") == [7] and not (base / "runs" / "r" / "summary.json").exists()
    train("--run", "r", "--save-every", "0", "--eval-every", "2", "--resume-from-step", "auto")
    assert_same_weights(weights(straight, "r", 7), weights(base, "r", 7))
    before, after = (json.loads((b / "runs" / "r" / "summary.json").read_text()) for b in (straight, base))
    assert before["after"] == after["after"]


def test_three_updates_that_are_not_finite_stop_the_run(base, monkeypatch):
    monkeypatch.setattr("nanochat.rl.run.flags.MOST_LR", 1e31)
    with pytest.raises(Diverged, match="not finite three times in a row"):
        train("--run", "r", "--lr", "1e30")
    assert [r.get("gen/skipped", r.get("ver/skipped")) for r in records(base, "r")][-3:] == [1, 1, 1]


def test_two_ranks_draw_the_rollouts_of_one_and_take_its_steps(base, straight):
    scripts_on_two_ranks(("scripts.tango_rl", [*RL_FLAGS, "--run", "r", "--save-every", "1", "--eval-every", "2"]))
    one, two = records(straight, "r"), records(base, "r")
    for a, b in zip(one, two, strict=True):
        prefix = "gen" if a["role"] == "generator" else "ver"
        for name in ("reward", "reward_std", "completions/mean_length", "loss", "grad_norm"):
            assert a[f"{prefix}/{name}"] == pytest.approx(b[f"{prefix}/{name}"], rel=1e-3, abs=1e-5), (a["step"], name)
    # AdamW's first step is the sign of the gradient, whatever its size: compare its first moments, a tenth of the
    # gradients.
    a, b = ({k: t for k, t in weights(folder, "r", 4).items() if k.endswith("exp_avg")} for folder in (straight, base))
    assert len(a) > 20
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-2, atol=1e-5)


def test_two_processes_never_work_on_one_run(straight_copy):
    held = lock_run(str(straight_copy / "runs" / "r"))
    before = records(straight_copy, "r")
    with pytest.raises(BadInput, match="another process"):
        train("--run", "r", "--save-every", "1", "--resume-from-step", "3")
    assert records(straight_copy, "r") == before
    held.close()


def test_what_another_process_did_while_models_were_loaded_stays(straight_copy, monkeypatch):
    """The other one went on from step 3 as well, and has ended when this one takes the lock."""
    before, load_roles = records(straight_copy, "r"), tango_rl.load_roles

    def slowly(*args):
        os.utime(straight_copy / "runs" / "r" / "metrics.jsonl")
        return load_roles(*args)

    monkeypatch.setattr(tango_rl, "load_roles", slowly)
    with pytest.raises(BadInput, match="another process was at work on this run until just now"):
        train("--run", "r", "--save-every", "1", "--resume-from-step", "3")
    assert records(straight_copy, "r") == before and saved_steps("r")[-1] == 7


def test_other_problems_are_refused(straight_copy, monkeypatch):
    problem = Chain.problem
    monkeypatch.setattr(Chain, "problem", lambda self, split, index: problem(self, split, index + 1))
    with pytest.raises(BadInput, match="run r was started with other problems of task chain"):
        train("--run", "r", "--save-every", "1", "--resume-from-step", "3")


def test_models_of_an_older_run_are_not_removed(straight_copy):
    shutil.rmtree(straight_copy / "runs" / "r")  # tidied away, the models were kept
    before = list_steps("rl", "r-gen")
    for more in ((), ("--resume-from-step", "auto")):
        with pytest.raises(BadInput, match="--run r: .*r-gen holds step 7 of an older run of this name"):
            train("--run", "r", *more)
    assert list_steps("rl", "r-gen") == before and not (straight_copy / "runs" / "r").exists()


def test_another_dtype_is_told(straight_copy, monkeypatch, capsys):
    monkeypatch.setenv("NANOCHAT_DTYPE", "bfloat16")
    train("--run", "r", "--save-every", "1", "--resume-from-step", "6")
    assert "WARNING: run r was in float32 and goes on in bfloat16" in capsys.readouterr().out
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    train("--run", "r", "--save-every", "1", "--resume-from-step", "6")
    assert "WARNING: run r was in bfloat16 and goes on in float32" in capsys.readouterr().out


def test_a_finished_run_that_is_stopped_in_its_evaluation_stays_finished(straight_copy, monkeypatch):
    summary = (straight_copy / "runs" / "r" / "summary.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(tango_rl, "train", lambda t, recipe: t.run.on_signal())
        with pytest.raises(StopRequested):
            train("--run", "r", "--save-every", "0", "--eval-every", "2", "--resume-from-step", "auto")
    assert (straight_copy / "runs" / "r" / "summary.json").read_text() == summary


def test_a_run_that_was_renamed_is_told_its_name(straight_copy):
    (straight_copy / "runs" / "r").rename(straight_copy / "runs" / "s")
    with pytest.raises(BadInput, match="runs/s is of a run that was called r: give the folder and its models"):
        train("--run", "s", "--save-every", "0", "--eval-every", "2", "--resume-from-step", "7")


def test_models_of_another_shape_or_step_are_refused(straight_copy):
    path = straight_copy / "chatrl_checkpoints" / "r-gen" / "meta_000007.json"
    meta = json.loads(path.read_text())
    for change in ({"step": 3}, {"role": "verifier"},
                   {"model_config": meta["model_config"] | {"sequence_len": 2 * meta["model_config"]["sequence_len"]}}):
        path.write_text(json.dumps(meta | change))
        with pytest.raises(BadInput, match=f"{path}: is of step . of a "):
            train("--run", "r", "--save-every", "0", "--eval-every", "2", "--resume-from-step", "auto")


def test_sigterm_to_torchrun_saves_on_two_ranks(base):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "scripts/tango_rl.py", "--", *RL_FLAGS, "--run", "r", "--save-every", "0", "--num-steps", "1000"]
    process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step    2"):
            process.send_signal(signal.SIGTERM)
            break
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "stopped after step" in out
    saved, = (int(name[6:12]) for name in os.listdir(base / "runs" / "r") if name.startswith("state_"))
    assert 3 <= saved == len(records(base, "r"))
    weights(base, "r", saved)  # the set is whole


@pytest.mark.parametrize("num_shared", [1, 2])
def test_a_verifier_on_the_generators_trunk_trains_and_resumes(base, num_shared):
    """One shared layer of two, and both: the shared blocks are the generator's at the end, and a continued run equals a
    straight one."""
    shared = ["--verifier-shared-layers", str(num_shared)]
    flags = [*TASK_FLAGS, "--device-type", "cpu", "--model-tag", "tiny", "--depth", "2", "--n-embd", "64",
             "--n-head", "2", "--sequence-len", "128", "--max-new-tokens", "28", "--num-sampled", "16",
             "--role", "verifier", "--num-steps", "3", *shared]
    shutil.rmtree(base / "chatsft_checkpoints" / "tiny-ver")
    chat_sft.main(parse(chat_sft, flags))
    shared = ["--verifier-head", "frozen", *shared]
    train("--run", "a", "--save-every", "1", *shared)
    copy_run(base, "a", "b")
    train("--run", "b", "--save-every", "1", "--resume-from-step", "4", *shared)
    final = weights(base, "a", 7)
    assert_same_weights(final, weights(base, "b", 7))
    for i in range(2):
        same = torch.equal(final[f"gen/transformer.h.{i}.mlp.c_fc.weight"],
                           final[f"ver/transformer.h.{i}.mlp.c_fc.weight"])
        assert same == (i < num_shared)
        assert (final["gen/resid_lambdas"][i] == final["ver/resid_lambdas"][i]) == (i < num_shared)
    assert torch.equal(final["gen/transformer.wte.weight"], final["ver/transformer.wte.weight"])
    assert not torch.equal(final["gen/lm_head.weight"], final["ver/lm_head.weight"])


@pytest.mark.parametrize("head, optimizer, num_shared", [("trunk", "shared", 2), ("trunk", "own", 1),
                                                         ("prompt", "shared", 2), ("prompt", "own", 2)])
def test_a_trunk_that_both_roles_train_is_one_and_resumes(base, head, optimizer, num_shared):
    """The shared blocks are the same in both roles' files and differ from those of a run whose verifier does not train
    them; a continued run equals a straight one."""
    flags = ["--verifier-head", head, "--verifier-optimizer", optimizer, "--save-every", "1", "--kl-coef", "0.1",
             *(["--verifier-shared-layers", str(num_shared)] if head == "trunk" else [])]
    train("--run", "a", *flags)
    copy_run(base, "a", "b")
    train("--run", "b", "--resume-from-step", "4", *flags)
    final = weights(base, "a", 7)
    assert_same_weights(final, weights(base, "b", 7))
    block = "transformer.h.{}.mlp.c_fc.weight".format
    start = torch.load(base / "chatsft_checkpoints" / "tiny" / "model_000200.pt", weights_only=True)
    warm = weights(base, "a", 2)  # after the warm-up, in which the verifier alone is trained
    for i in range(2):
        is_one = torch.equal(final[f"gen/{block(i)}"], final[f"ver/{block(i)}"])
        assert is_one == (i < num_shared)
        assert torch.equal(warm[f"gen/{block(i)}"], start[block(i)]) != is_one
    assert torch.equal(final["gen/lm_head.weight"], final["ver/lm_head.weight"]) == (head == "prompt")


def test_summed_updates_make_one_step_of_both_roles_rollouts(base, monkeypatch):
    """After two generator steps comes one whose update also has the verifier's rollouts, which the planned 4 steps have
    once; the warm-up stays the verifier's alone."""
    seen = []
    monkeypatch.setattr(tango_rl, "apply_update", lambda t, u, real=tango_rl.apply_update: (
        seen.append((u.role, [len(rollouts) for rollouts, _ in u.parts])), real(t, u))[1])
    train("--run", "s", "--verifier-head", "prompt", "--verifier-updates", "summed")
    assert seen == [("verifier", [16])] * 2 + [("generator", [16])] * 2 + [("generator", [16, 16]),
                                                                           ("generator", [16])]
    assert [r["phase"] for r in records(base, "s")] == ["warmup"] * 2 + ["generator"] * 2 + ["verifier", "generator"]


def test_roles_may_start_from_rl(base):
    """A run goes on from the pair that another one has trained, whose references it then keeps; its config.json says
    so."""
    train("--run", "first", "--num-steps", "1")
    trained = weights(base, "first", 3)
    train("--run", "second", "--num-steps", "0", "--model-tag", "first-gen", "--model-source", "rl", "--verifier-tag",
          "first-ver", "--verifier-source", "rl")
    same = weights(base, "second", 0)
    models = [name for name in same if "transformer" in name or "lm_head" in name]
    assert models and all(torch.equal(same[name], trained[name]) for name in models)
    starts = json.loads((base / "runs" / "second" / "config.json").read_text())["starts"]
    assert [(s["tag"], s["source"], s["step"]) for s in starts.values()] == [("first-gen", "rl", 3),
                                                                             ("first-ver", "rl", 3)]


def test_wandb_offline_needs_no_network(base, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    train("--run", "w", "--recipe", "grpo", "--num-steps", "1")
    assert os.listdir(base / "runs" / "w" / "wandb")
    assert len(records(base, "w")) == 1


@pytest.mark.parametrize("flags", [
    ["--recipe", "grpo"], ["--recipe", "gold_steps", "--advantage", "rloo"],
    ["--recipe", "fixed_verifier", "--advantage", "reinforce++"],
    ["--recipe", "fixed_generator", "--advantage", "dr_grpo", "--aggregation", "constant"],
    ["--recipe", "outcome_verifier"], ["--combine", "advantages"],
    ["--updates-per-batch", "2", "--kl-coef", "0.1", "--kl", "k2", "--entropy-coef", "0.01", "--dual-clip", "3"],
    ["--schedule", "adaptive", "--balanced-acc-bar", "0.1", "--loss", "reinforce", "--aggregation", "token",
     "--lr-schedule", "linear"]])
def test_recipes_and_variants_run(base, flags):
    train("--run", "r", "--num-steps", "2", *flags)
    log = records(base, "r")
    trained = {"grpo": {"generator"}, "gold_steps": {"generator"}, "fixed_verifier": {"generator"},
               "fixed_generator": {"verifier"}, "outcome_verifier": {"generator", "verifier"}}
    if flags[0] == "--recipe":
        assert {r["role"] for r in log} == trained[flags[1]]
    assert all(r.get("gen/skipped", r.get("ver/skipped")) == 0 for r in log)


def test_outcome_verifier_rewards_the_final_verdict_and_no_step(base):
    """At alpha 1 an advantage is the verdict against those of the group: one number per rollout, not below 0 where the
    verdict is "correct"."""
    train("--run", "r", "--recipe", "outcome_verifier", "--alpha-start", "1", "--alpha-end", "1", "--log-rollouts",
          "8", "--warmup-steps", "0")
    rollouts = [r for r in records(base, "r", "rollouts.jsonl") if r["role"] == "generator"]
    assert {r["verdict"] for r in rollouts} >= {True, False} and any(r["advantages"][0] for r in rollouts)
    for r in rollouts:
        assert len(set(r["advantages"])) == 1
        assert (r["advantages"][0] >= 0 if r["verdict"]
                else r["advantages"][0] <= 0 if r["verdict"] is False else r["advantages"][0] == 0)


def test_a_step_counts_the_tokens_of_both_roles(straight):
    """sampled_tokens: of solutions and their verifications in a generator step, of judged solutions and verifications
    in a verifier step."""
    log, total = records(straight, "r"), 0
    for record in log:
        assert record["sampled_tokens"] == total
        prefix = "gen" if record["role"] == "generator" else "ver"
        own = record[f"{prefix}/completions/mean_length"] * record[f"{prefix}/num_rollouts"]
        assert record[f"{prefix}/sampled_tokens"] > own
        total += record[f"{prefix}/sampled_tokens"]
    assert json.loads((straight / "runs" / "r" / "summary.json").read_text())["sampled_tokens"] == total
    assert ({"gen/step_length", "gen/frac_ranking_reversed", "gen/verdicts/pos_rate_wrong",
             "gen/verdicts/step_outcome_corr"}
            <= next(r for r in log if r["role"] == "generator").keys())


# Few gold answers, and a verifier that passes too much

def solved_problems(monkeypatch) -> list[tuple[str, list[int]]]:
    """(label, indices of the problems) of everything that is solved in steps from here on."""
    solved, solve = [], Play.solve

    def noted(self, role, problems, *args, **flags):
        if not self.evaluating:
            solved.append((args[1], [p.index for p in problems]))
        return solve(self, role, problems, *args, **flags)
    monkeypatch.setattr(Play, "solve", noted)
    return solved


def test_with_few_labelled_problems_half_of_a_batch_has_no_outcome(base, monkeypatch):
    """Every second problem of a generator step has index 6 or more and no outcome, and never comes again; a verifier
    step judges labelled ones alone, which do."""
    solved = solved_problems(monkeypatch)
    train("--run", "few", "--num-labelled", "6")
    drawn = {label: [i for name, places in solved if name == label for i in places]
             for label in ("generator", "judged")}
    assert len(drawn["judged"]) == 3 * 4 and set(drawn["judged"]) == set(range(6))
    labelled, others = ([i for i in drawn["generator"] if (i < 6) is kind] for kind in (True, False))
    assert len(labelled) == len(others) == 4 * 2 and len(set(others)) == 8
    log = [r for r in records(base, "few") if r["role"] == "generator"]
    assert [r["gen/unscorable"] for r in log] == [0.5] * 4
    outcomes = [r["outcome"] for r in records(base, "few", "rollouts.jsonl") if r["role"] == "generator"]
    assert outcomes.count(None) == 16 and len(outcomes) == 32


def test_unlabelled_problems_of_a_finite_task_come_again(base, monkeypatch):
    """A task of 11 problems, 6 of them labelled: the 5 others come in turn, and no other does."""
    monkeypatch.setattr(Chain, "num_problems", lambda self, split: 11, raising=False)
    solved = solved_problems(monkeypatch)
    train("--run", "few", "--num-labelled", "6", "--num-steps", "6")
    places = [i for label, places in solved if label == "generator" for i in places]
    assert set(places) <= set(range(11)) and {i for i in places if i >= 6} == set(range(6, 11))


def test_a_start_that_was_not_taught_what_it_is_asked_for_is_warned_of(base, capsys):
    """The pair's generator has learned solutions alone."""
    train("--run", "r", "--recipe", "multi_agent_evolve", "--dry-run")
    out = capsys.readouterr().out
    assert "WARNING: the SFT of tiny had no verifications (chat_sft --role both)" in out
    assert "WARNING: the SFT of tiny had no demonstrations of kind propose (chat_sft --demo-shares)" in out
    train("--run", "r", "--recipe", "self_rewarding", "--dry-run")  # two roles from one checkpoint
    assert capsys.readouterr().out.count("had no verifications") == 1
    train("--run", "r", "--recipe", "marti", "--dry-run")
    assert "kind refine or revise" in capsys.readouterr().out
    train("--run", "r", "--dry-run")
    assert "the SFT of" not in capsys.readouterr().out


@pytest.mark.parametrize("reward", ["steps", "verdict"])
def test_no_gold_answer_of_an_unlabelled_problem_enters_an_update(base, reward):
    """A check that finds all of them right, or wrong, gives the same weights; one of labelled ones gives others."""
    def moved(labelled: bool, others: bool) -> dict[str, torch.Tensor]:
        t = random_play("tango", "--num-labelled", "4", "--verifier-max-new-tokens", "36")
        t.task.check = lambda problem, text: len(text) % 2 == 0 if problem.index < 4 and labelled else others
        num_steps = lambda rollouts: [len(prompt.solution.step_ends) for prompt in rollouts.prompt_of()]
        said = lambda n, text: Verification([len(text) % 3 > 0] * n, len(text) % 2 == 0, ())
        t.read_verifications = lambda rollouts: list(map(said, num_steps(rollouts), rollouts.texts))
        update, = tango.generator_step(t, judge="verifier", reward=reward)
        assert {p.index < 4 for p in update.parts[0][0].problems()} == {True, False}
        solutions = update.parts[0][0]
        hidden = [verdict for problem, verdict in zip(solutions.problems(), solutions.columns["verdict"], strict=True)
                  if problem.index >= 4]
        assert t.metrics["gen/unlabelled/outcome/mean"] == others
        assert t.metrics["gen/unlabelled/verdict_accuracy"] == pytest.approx(hidden.count(others) / len(hidden))
        apply_update(t, update)
        return weights_of(t.roles["generator"].model)

    plain, same, other = moved(True, True), moved(True, False), moved(False, True)
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    assert any(not torch.equal(plain[name], other[name]) for name in plain)


def test_grpo_sees_labelled_problems_alone(base, monkeypatch):
    solved = solved_problems(monkeypatch)
    train("--run", "few", "--recipe", "grpo", "--num-labelled", "5")
    assert {i for _, places in solved for i in places} == set(range(5))
    assert records(base, "few")[0]["gen/unscorable"] == 0


@pytest.mark.parametrize("num", ["3", "-1", "8"])
def test_too_few_problems_with_or_without_labels_are_refused(base, monkeypatch, num):
    monkeypatch.setattr(Chain, "num_problems", lambda self, split: 11, raising=False)
    with pytest.raises(BadInput, match="num-labelled"):
        train("--run", "few", "--num-labelled", num)


def test_a_lenient_verifier_is_warned_of(straight, base, capsys, monkeypatch):
    """The moving average of the wrong steps that pass, by hand; above a bar the line of the step says so."""
    log = [r for r in records(straight, "r") if r["role"] == "generator"]
    average = None
    for record in log:
        now = record["gen/verdicts/wrong_steps_passed"]
        average = now if average is None else 0.8 * average + 0.2 * now
        assert record["gen/wrong_passed"] == pytest.approx(average)
        assert record["gen/lenient"] == (average > tango.LENIENT)
    assert 0 < log[0]["gen/wrong_passed"] < 1
    for bar, is_warned in ((0.0, True), (1.0, False)):
        monkeypatch.setattr(tango, "LENIENT", bar)
        train("--run", f"bar{bar}", "--num-steps", "1")
        assert ("WARNING: lenient verifier" in capsys.readouterr().out) == is_warned


def test_without_step_labels_wrong_solutions_that_pass_are_watched(base, monkeypatch):
    monkeypatch.setattr(Chain, "has_step_labels", False, raising=False)
    train("--run", "r", "--num-steps", "1")
    record = [r for r in records(base, "r") if r["role"] == "generator"][0]
    assert record["gen/wrong_passed"] == record["gen/verdicts/pos_rate_wrong"]
    assert record["gen/wrong_passed"] != record["gen/verdicts/wrong_steps_passed"]


# Step rewards given outcomes

def test_posterior_step_rewards_learn_trust_and_resume_bit_for_bit(base):
    """What is logged is what one batch after the other says to a fresh estimate, and a run that goes on has it."""
    flags = ["--step-rewards", "posterior", "--save-every", "1", "--log-rollouts", "100", "--num-samples", "32"]
    train("--run", "p", *flags)
    log = [r for r in records(base, "p") if r["role"] == "generator"]
    names = ("right_if_right", "right_if_wrong", "luck")
    trusts = [[r[f"gen/trust/{name}"] for name in names] for r in log]
    assert all(0 < value < 1 for trust in trusts for value in trust) and trusts[0] != trusts[-1]
    state = torch.load(base / "runs" / "p" / "state_000007.pt", weights_only=True)
    assert [state["memory"]["trust"][name] for name in names] == trusts[-1]
    before = weights(base, "p", 7)
    train("--run", "p", *flags, "--resume-from-step", "4")
    assert_same_weights(before, weights(base, "p", 7))
    assert [r for r in records(base, "p") if r["role"] == "generator"] == log


def test_step_rewards_given_outcomes_change_what_the_generator_learns(base):
    for kind in ("posterior", "verdicts"):
        train("--run", kind, "--step-rewards", kind, "--num-samples", "32")
    assert any(not torch.equal(a, b) for a, b in zip(weights(base, "posterior", 7).values(),
                                                     weights(base, "verdicts", 7).values(), strict=True))


@pytest.mark.parametrize("has_answer", [True, False])
def test_a_solution_without_an_answer_says_nothing_of_its_steps(base, monkeypatch, has_answer):
    """One that is cut off may lack steps and have no wrong ones: its steps are believed as far as verdicts are."""
    monkeypatch.setattr(tango, "answers_of", lambda task, texts: ["1" if has_answer else None] * len(texts))
    train("--run", "p", "--step-rewards", "posterior", "--log-rollouts", "64", "--num-steps", "1",
          "--examples-per-step", "64")
    rows = [r for r in records(base, "p", "rollouts.jsonl") if r["role"] == "generator" and r["step_chances"]]
    log = [r for r in records(base, "p") if r["role"] == "generator"][0]
    believed = [[log[f"gen/trust/right_if_{'right' if v else 'wrong'}"] for v in r["step_verdicts"]] for r in rows]
    assert rows and ([r["step_chances"] for r in rows] == believed) == (not has_answer)


def test_solutions_that_are_alike_are_verified_once(base, monkeypatch):
    flags, seen, verify = ["--num-steps", "2", "--temperature", "0.4", "--num-samples", "8"], [], tango.verifications_of

    def watched(t, solutions):
        seen.append((list(zip(solutions.group_id.tolist(), solutions.texts, strict=True)), verify(t, solutions)))
        return seen[-1][1]

    monkeypatch.setattr(tango, "verifications_of", watched)
    train("--run", "all", *flags, "--no-verify-distinct")
    train("--run", "one", *flags)
    shares = [r["gen/verified"] for run in ("all", "one") for r in records(base, run) if r["role"] == "generator"]
    for i, (keys, verifications) in enumerate(seen):
        groups = {key: {v.text for k, v in zip(keys, verifications, strict=True) if k == key} for key in keys}
        assert len(groups) < len(keys)
        assert shares[i] == pytest.approx(1 if i < 2 else len(groups) / len(keys))
        assert (max(map(len, groups.values())) == 1) == (i >= 2)
    tokens = [next(r for r in records(base, run) if r["role"] == "generator")["gen/sampled_tokens"]
              for run in ("all", "one")]
    assert seen[0][0] == seen[2][0] and tokens[1] < tokens[0]


def test_unknown_step_rewards_are_refused(base):
    with pytest.raises(BadInput, match="--step-rewards believed: .*verdicts, posterior"):
        train("--run", "p", "--step-rewards", "believed")
