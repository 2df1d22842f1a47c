"""The trainer end to end on a tiny pair: what a run leaves, resume, signals, ranks."""
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import RL_FLAGS, TASK_FLAGS, parse, scripts_on_two_ranks, train

from nanochat.checkpoint import list_steps, saved_steps
from nanochat.common import BadInput, Diverged, StopRequested
from nanochat.recipes.tango._observe import LENIENT, watch_leniency
from nanochat.rl.learn import state
from nanochat.rl.measure import evals
from nanochat.rl.play.play import Play
from nanochat.rl.play.updates import apply_update
from nanochat.rl.run import prepare, steps
from nanochat.storage.run import MEASURED, lock_run
from scripts import chat_sft, tango_rl
from tasks.chain import Chain
from tasks.common import epoch_order, nth_of_epochs

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EVERY = ["--run", "r", "--save-every", "1", "--eval-every", "2"]
AT_THE_END = ["--run", "r", "--save-every", "0", "--eval-every", "2"]


def records(base, run: str, name: str = "metrics.jsonl") -> list[dict]:
    """A run's log without its timings; no rollouts where no step had an update."""
    path = base / "runs" / run / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)} for line in lines]


def weights(base, run: str, step: int) -> dict:
    tensors = {}
    for role in ("gen", "ver"):
        load = lambda name, role=role: torch.load(base / "chatrl_checkpoints" / f"{run}-{role}" / name,
                                                  weights_only=True)
        tensors |= {f"{role}/{name}": t for name, t in load(f"model_{step:06d}.pt").items()}
        tensors |= {f"{role}/{i}/{name}": t for i, entry in load(f"optim_{step:06d}_rank0.pt")["state"].items()
                    for name, t in entry.items()}
    return tensors


def copy_run(base, name: str, copy: str) -> None:
    shutil.copytree(base / "runs" / name, base / "runs" / copy)
    for folder in (base / "chatrl_checkpoints").glob(f"{name}-*"):
        shutil.copytree(folder, base / "chatrl_checkpoints" / folder.name.replace(f"{name}-", f"{copy}-", 1))
    path = base / "runs" / copy / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "args": {**config["args"], "run": copy}}))


def assert_same_weights(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def summary_of(base) -> dict:
    return json.loads((base / "runs" / "r" / "summary.json").read_text())


def assert_same_run(a, b) -> None:
    assert_same_weights(weights(a, "r", 7), weights(b, "r", 7))
    for name in ("metrics.jsonl", "rollouts.jsonl", "examples.jsonl"):
        assert records(a, "r", name) == records(b, "r", name)
    assert all(summary_of(a)[name] == summary_of(b)[name] for name in ("before", "after"))


@pytest.fixture(scope="module")
def straight(sft_base, tmp_path_factory):
    """A run from start to end that saves every step: 2 warm-up steps, then g g v g g."""
    base = tmp_path_factory.mktemp("straight") / "base"
    shutil.copytree(sft_base, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        train(*EVERY)
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
    summary, log, total = summary_of(straight), records(straight, "r"), 0
    keys = {"gen/pass1_in", "gen/pass1_out", "ver/outcome_f1_fixed", "ver/balanced_acc_fixed", "ver/step_f1_fixed",
            "ver/step_f1_fixed_out", "ver/step_f1_current", "ver/parse_fail_fixed"}
    assert summary["seed"] == 0 and summary["minutes"] > 0
    assert keys <= summary["before"].keys() and keys <= summary["after"].keys()
    assert [r["step"] for r in log] == list(range(7))
    assert [(r["gen_step"], r["ver_step"]) for r in log if "gen/pass1_in" in r] == [(0, 0), (0, 2), (2, 2)]
    for record in log:
        get = lambda name, record=record: record[f"{'gen' if record['role'] == 'generator' else 'ver'}/{name}"]
        assert get("rollout_logprobs_diff_max") < 1e-4 and get("clip_ratio/low") == get("clip_ratio/high") == 0
        # of both roles: solutions and their verifications, or judged solutions and verifications
        assert record["sampled_tokens"] == total
        assert get("sampled_tokens") > get("completions/mean_length") * get("num_rollouts")
        total += get("sampled_tokens")
    assert summary["sampled_tokens"] == total
    rollouts = records(straight, "r", "rollouts.jsonl")
    assert len(rollouts) == 7 * 2 * 4 and len({r["problem"] for r in rollouts if r["step"] == 3}) == 2
    for rollout in rollouts:
        own = rollout["solution"] if rollout["role"] == "generator" else rollout["verification"]
        assert len(rollout["token_ends"]) == len(rollout["advantages"]) and rollout["token_ends"][-1] == len(own)
        assert rollout["reward"] == rollout["outcome"] or rollout["role"] == "verifier"
        assert len(rollout["step_verdicts"]) == len(rollout["step_labels"]) or "step_count_mismatch" in rollout["unmet"]
    examples = records(straight, "r", "examples.jsonl")
    assert [example["step"] for example in examples] == [*[0] * 8, *[2] * 8, *[4] * 8, *[7] * 8]
    asked = [example["problem"] for example in examples]
    assert asked == asked[:8] * 4
    assert all(len(example["step_verdicts"]) == len(example["step_labels"]) or "step_count_mismatch" in example["unmet"]
               for example in examples)
    # past solutions are kept: of two warm-up steps and one of the generator
    pool = torch.load(straight / "runs" / "r" / "state_000003.pt", weights_only=True)["memory"]["pool"]
    assert pool["tokens"].dtype == torch.int64 and len(pool["outcome"]) == 2 * 4 + 16


@pytest.mark.parametrize("step", [1, 3, 4, 5])
def test_resume_continues_bit_for_bit(straight, straight_copy, step):
    """Within the warm-up, a generator phase, before a verifier phase and an evaluation, after both."""
    train(*EVERY, "--resume-from-step", str(step))
    assert_same_run(straight, straight_copy)


def test_resume_goes_on_bit_for_bit_over_the_ends_of_epochs(base, monkeypatch):
    """6 problems, 4 a step: an epoch ends within step 1 and after step 2."""
    problem = Chain.problem
    few = lambda split, index: nth_of_epochs(list(range(6)), 0, split, index) if split == "rl" else index
    monkeypatch.setattr(Chain, "problem", lambda self, split, index: problem(self, split, few(split, index)))
    flags = ["--recipe", "grpo", "--run", "r", "--save-every", "1"]
    train(*flags)
    final, log = gen_weights(base, 4), (records(base, "r"), records(base, "r", "rollouts.jsonl"))
    assert torch.load(base / "runs" / "r" / "state_000004.pt", weights_only=True)["cursor"] == 16
    for step in (3, 1):
        epoch_order.cache_clear()
        train(*flags, "--resume-from-step", str(step))
        assert_same_weights(final, gen_weights(base, 4))
        assert log == (records(base, "r"), records(base, "r", "rollouts.jsonl"))


def gen_weights(base, step: int) -> dict:
    return torch.load(base / "chatrl_checkpoints" / "r-gen" / f"model_{step:06d}.pt", weights_only=True)


def test_a_finished_run_is_evaluated_again_only_where_a_flag_has_changed(straight, straight_copy, monkeypatch, capsys):
    table = lambda: [line for line in capsys.readouterr().out.split("\n") if re.search(r" -> .* [-+]", line)]
    calls, evaluate = [], tango_rl.held_out
    monkeypatch.setattr(tango_rl, "held_out", lambda *args: calls.append(1) or evaluate(*args))
    train(*EVERY, "--resume-from-step", "auto")
    kept = table()
    assert not calls and kept
    train("--run", "r", "--eval-every", "2", "--resume-from-step", "auto", "--save-every", "2")
    assert calls and table() == kept
    os.remove(straight_copy / "runs" / "r" / "summary.json")
    train(*EVERY, "--resume-from-step", "auto")
    assert_same_run(straight, straight_copy)


def test_what_a_continued_run_changes_is_written_down(straight_copy):
    path = straight_copy / "runs" / "r" / "config.json"
    before = json.loads(path.read_text())
    train("--run", "r", "--resume-from-step", "auto", "--num-steps", "5")
    after = json.loads(path.read_text())
    assert after["args"]["num_steps"] == 5 and (before["args"]["eval_every"], after["args"]["eval_every"]) == (2, 0)
    changed = {"num_steps": [4, 5], "save_every": [1, after["args"]["save_every"]], "eval_every": [2, 0]}
    assert after.pop("resumed") == [{"step": 7, "changed": changed}]
    assert after | {"args": 0} == before | {"args": 0}


def test_a_finished_run_that_is_stopped_in_its_evaluation_stays_finished_but_not_in_a_step(straight_copy, monkeypatch):
    path = straight_copy / "runs" / "r" / "summary.json"
    summary = path.read_text()
    monkeypatch.setattr(tango_rl, "train", lambda t, recipe: (t.run.on_signal(), t.check_stop()))
    for flags in (AT_THE_END, [*AT_THE_END, "--num-steps", "6"]):
        assert path.read_text() == summary
        with pytest.raises(StopRequested):
            train(*flags, "--resume-from-step", "auto")
    assert not path.exists()


def interrupt_at(monkeypatch, owner, name: str, call: int) -> None:
    """Makes this process receive SIGTERM when owner.name is called for the `call`-th time."""
    original, calls = getattr(owner, name), itertools.count(1)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: (
        next(calls) == call and os.kill(os.getpid(), signal.SIGTERM), original(*args, **kwargs))[1])


@pytest.mark.parametrize("owner, name, call, flags, saved", [
    (steps, "health_check", 1, EVERY, [[]]),           # at start-up: the next run starts afresh
    (Play, "verify", 6, AT_THE_END, [[1]]),            # in a verifier step that has changed the pool
    (Play, "verify", 11, AT_THE_END, [[2]]),           # in a generator step, after its evaluation
    (evals, "pass_at_1", 2, AT_THE_END, [[2]]),        # in that evaluation
    (steps, "apply_update", 4, AT_THE_END, [[3]]),     # before an update
    (steps, "finish_step", 4, AT_THE_END, [[4]]),      # after it
    (state, "save_model", 4, ["--save-every", "2", "--eval-every", "2"], [[2, 4], [2, 4, 5]]),  # in the save of step 4
    (tango_rl, "held_out", 1, AT_THE_END, [[7]])])     # in the last evaluation
def test_sigterm_saves_one_set_and_the_next_run_goes_on(base, straight, monkeypatch, owner, name, call, flags, saved):
    """The evaluation at the start has the first four calls of verify. A save ends."""
    with monkeypatch.context() as patch:
        interrupt_at(patch, owner, name, call)
        with pytest.raises(StopRequested, match="--resume-from-step auto"):
            train("--run", "r", *flags)
    assert saved_steps("r") in saved and not (base / "runs" / "r" / "summary.json").exists()
    for step in saved_steps("r"):
        assert_same_weights(weights(straight, "r", step), weights(base, "r", step))
    train("--run", "r", *flags, "--resume-from-step", "auto")
    assert_same_run(straight, base)


def test_sigterm_before_the_run_is_open_ends_the_process_and_leaves_nothing(base):
    code = ("import os, signal; from conftest import *; from nanochat.rl.run import prepare; "
            "from scripts import tango_rl; "
            "prepare.load_roles = lambda *args: os.kill(os.getpid(), signal.SIGTERM); "
            "tango_rl.main(parse(tango_rl, rl_flags('--run', 'r')))")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.path.join(ROOT, "tests")])}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "") and not (base / "runs").exists()


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
    assert records(straight, "r", "examples.jsonl") == records(base, "r", "examples.jsonl")
    # AdamW's first moments are a tenth of the gradients
    a, b = ({k: t for k, t in weights(folder, "r", 4).items() if k.endswith("exp_avg")} for folder in (straight, base))
    assert len(a) > 20
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-2, atol=1e-5)


def test_what_is_not_the_run_that_was_saved_is_refused_and_stays(straight_copy, monkeypatch):
    runs, models, before = straight_copy / "runs", straight_copy / "chatrl_checkpoints", records(straight_copy, "r")
    load_roles, problem, flags = prepare.load_roles, Chain.problem, [*EVERY, "--resume-from-step", "3"]
    def refused(words: str, *flags: str) -> None:
        with pytest.raises(BadInput, match=words):
            train(*flags)
    held = lock_run(str(runs / "r"))
    refused("another process", *flags)
    held.close()
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "load_roles", lambda *args: (os.utime(runs / "r" / "metrics.jsonl"),
                                                            load_roles(*args))[1])
        refused("another process was at work on this run until just now", *flags)
    with monkeypatch.context() as patch:
        patch.setattr(Chain, "problem", lambda self, split, index: problem(self, split, index + 1))
        refused("run r was started with other problems of task chain", *flags)
    path = models / "r-gen" / "meta_000003.json"
    text, meta = path.read_text(), json.loads(path.read_text())
    for change in ({"step": 2}, {"role": "verifier"},
                   {"model_config": meta["model_config"] | {"sequence_len": 2 * meta["model_config"]["sequence_len"]}}):
        path.write_text(json.dumps(meta | change))
        refused(f"{path}: is of step . of a ", *flags)
    path.write_text(text)
    for missing in ("r-ver/optim_000003_rank0.pt", "r-gen/model_000003.pt"):
        os.remove(models / missing)
        refused(os.path.basename(missing), *flags)
    assert records(straight_copy, "r") == before and saved_steps("r")[-1] == 7
    (runs / "r").rename(runs / "s")
    refused("--run s: run s was started with r; a continued run cannot change it", "--run", "s", *flags[2:])
    saved = list_steps("rl", "r-gen")
    for more in ((), ("--resume-from-step", "auto")):
        refused("--run r: .*r-gen holds step 7 of an older run of this name", "--run", "r", *more)
    assert list_steps("rl", "r-gen") == saved and not (runs / "r").exists()


def test_another_dtype_is_told(straight_copy, monkeypatch, capsys):
    for old, new in (("float32", "bfloat16"), ("bfloat16", "float32")):
        monkeypatch.setenv("NANOCHAT_DTYPE", new)
        train(*EVERY, "--resume-from-step", "6")
        assert f"WARNING: run r was in {old} and goes on in {new}" in capsys.readouterr().out


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


SHORT = ["--save-every", "1", "--warmup-steps", "2", "--generator-steps", "1", "--num-steps", "2", "--eval-examples",
         "2", "--kl-coef", "0.1"]  # two steps of warm-up, then generator, verifier, generator


@pytest.mark.parametrize("head, optimizer, num_shared", [("frozen", "", 1), ("trunk", "shared", 2), ("trunk", "own", 1),
                                                         ("prompt", "shared", 2), ("prompt", "own", 2)])
def test_a_shared_trunk_is_one_and_resumes(base, head, optimizer, num_shared):
    """The shared blocks are one, and have moved in the warm-up where the verifier trains them."""
    if head == "frozen":
        shutil.rmtree(base / "chatsft_checkpoints" / "tiny-ver")
        chat_sft.main(parse(chat_sft, [
            *TASK_FLAGS, "--device-type", "cpu", "--model-tag", "tiny", "--depth", "2", "--n-embd", "64", "--n-head",
            "2", "--sequence-len", "128", "--max-new-tokens", "28", "--num-sampled", "16", "--role", "verifier",
            "--num-steps", "3", "--verifier-shared-layers", "1"]))
    flags = [*SHORT, "--verifier-head", head, *(["--verifier-optimizer", optimizer] if optimizer else []),
             *(["--verifier-shared-layers", str(num_shared)] if head != "prompt" else [])]
    train("--run", "a", *flags)
    copy_run(base, "a", "b")
    train("--run", "b", "--resume-from-step", "3", *flags)
    final, warm = weights(base, "a", 5), weights(base, "a", 2)
    assert_same_weights(final, weights(base, "b", 5))
    start = torch.load(base / "chatsft_checkpoints" / "tiny" / "model_000200.pt", weights_only=True)
    for i, name in enumerate(map("transformer.h.{}.mlp.c_fc.weight".format, range(2))):
        assert torch.equal(final[f"gen/{name}"], final[f"ver/{name}"]) == (i < num_shared)
        assert (final["gen/resid_lambdas"][i] == final["ver/resid_lambdas"][i]) == (i < num_shared)
        assert torch.equal(warm[f"gen/{name}"], start[name]) == (i >= num_shared or head == "frozen")
    assert torch.equal(final["gen/transformer.wte.weight"], final["ver/transformer.wte.weight"])
    assert torch.equal(final["gen/lm_head.weight"], final["ver/lm_head.weight"]) == (head == "prompt")


def test_summed_updates_make_one_step_of_both_roles_rollouts(base, monkeypatch):
    """The third generator step's update has the verifier's rollouts too; the warm-up stays the verifier's alone."""
    seen = []
    monkeypatch.setattr(steps, "apply_update", lambda t, u, real=apply_update: (
        seen.append((u.role, [len(rollouts) for rollouts, _ in u.parts])), real(t, u))[1])
    train("--run", "s", "--verifier-head", "prompt", "--verifier-updates", "summed")
    assert seen == [*[("verifier", [16])] * 2, *[("generator", rows) for rows in ([16], [16], [16, 16], [16])]]
    assert [r["phase"] for r in records(base, "s")] == ["warmup"] * 2 + ["generator"] * 2 + ["verifier", "generator"]


def test_roles_may_start_from_rl(base):
    train("--run", "first", "--num-steps", "1")
    trained = weights(base, "first", 3)
    train("--run", "second", "--num-steps", "0", "--model-tag", "first-gen", "--model-source", "rl", "--verifier-tag",
          "first-ver", "--verifier-source", "rl")
    same = weights(base, "second", 0)
    models = [name for name in same if "transformer" in name or "lm_head" in name]
    assert models and all(torch.equal(same[name], trained[name]) for name in models)
    starts = json.loads((base / "runs" / "second" / "config.json").read_text())["starts"]
    assert [[s["tag"], s["source"], s["step"]] for s in starts.values()] == [[f"first-{x}", "rl", 3] for x in
                                                                             ("gen", "ver")]


def test_wandb_offline_needs_no_network(base, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    train("--run", "w", "--recipe", "grpo", "--num-steps", "1")
    assert os.listdir(base / "runs" / "w" / "wandb")
    assert len(records(base, "w")) == 1


def test_a_lenient_verifier_is_told_of(straight):
    log, average = [r for r in records(straight, "r") if r["role"] == "generator"], None
    for record in log:
        now = record["gen/verdicts/wrong_steps_passed"]
        average = now if average is None else 0.8 * average + 0.2 * now
        assert record["gen/wrong_passed"] == pytest.approx(average) and 0 < average < 1
        assert record["gen/lenient"] == (average > LENIENT)
    for has_labels in (True, False):
        told: list = []
        t = SimpleNamespace(task=SimpleNamespace(has_step_labels=has_labels), memory={},
                            log=lambda role, values, told=told: told.append(values))
        for passed in (0.2, None, 1.0):
            watch_leniency(t, {"wrong_steps_passed" if has_labels else "pos_rate_wrong": passed,
                               "pos_rate_wrong" if has_labels else "wrong_steps_passed": 0.9})
        assert [values["wrong_passed"] for values in told] == pytest.approx([0.2, 0.2, 0.36])
        assert [values["lenient"] for values in told] == [False, False, True]


def test_a_budget_of_tokens_ends_the_run_and_paces_what_is_scheduled(straight, base):
    made = records(straight, "r")
    budget = made[4]["sampled_tokens"]  # what is sampled before the fifth step
    train(*AT_THE_END, "--token-budget", str(budget - 1), "--num-steps", "1000")
    found = records(base, "r")
    assert [r["sampled_tokens"] for r in found] == [r["sampled_tokens"] for r in made[:4]]  # spent in the fourth step
    assert summary_of(base)["sampled_tokens"] == budget
    alphas = [r["gen/alpha"] for r in found if "gen/alpha" in r]
    flags = parse(tango_rl, RL_FLAGS)
    spent = [r["sampled_tokens"] / (budget - 1) for r in found if "gen/alpha" in r]
    decay = flags.alpha_end / flags.alpha_start
    assert len(alphas) == 2 and alphas == pytest.approx([flags.alpha_start * decay ** x for x in spent])
    train(*AT_THE_END, "--token-budget", str(budget - 1), "--num-steps", "1000", "--resume-from-step", "auto")
    assert len(records(base, "r")) == 4  # nothing is left to make


def test_a_rate_s_schedule_follows_the_tokens_where_they_end_the_run():
    t = SimpleNamespace(args=SimpleNamespace(token_budget=1000), state=SimpleNamespace(sampled_tokens=250),
                        steps={"generator": 7}, totals={"generator": 8})
    assert Play.position(t, "generator") == (250, 1000, 1000)
    t.args.token_budget = 0
    assert Play.position(t, "generator") == (7, 8, 7)
