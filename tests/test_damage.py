"""
What is on the disk is whole or refused: processes killed and disks filled at every write of a save, flipped bytes,
truncated, exchanged and hostile files, weights that are not finite.

    python -m pytest tests/test_damage.py
"""
import builtins
import errno
import json
import os
import re
import shutil
import signal
import sys

import pytest
import torch
from conftest import TASK_FLAGS, parse, rl_flags

from nanochat.checkpoint import load_file, load_model, save_atomic, saved_steps
from nanochat.common import BadInput, CannotWrite, Diverged, script_main
from nanochat.rl.learn.roles import find_starts, load_roles
from nanochat.rl.learn.state import load_set, save_set
from nanochat.rl.play.play import Play, play
from nanochat.storage.files import read_records
from nanochat.storage.run import Run, choose_run_name
from scripts import base_train, chat_sft, tango_rl

GRPO = ["--recipe", "grpo", "--run", "r", "--save-every", "1"]


def train(*flags: str) -> None:
    tango_rl.main(parse(tango_rl, rl_flags(*flags)))


def outcome_of(capsys, *flags: str) -> tuple[int, str]:
    """Exit code and stderr of the trainer."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        script_main(tango_rl.main, tango_rl.make_parser, rl_flags(*flags))
    return stop.value.code, capsys.readouterr().err.strip()


@pytest.fixture(scope="module")
def trained_base(sft_base, tmp_path_factory):
    """A base folder with a run r of two steps, each of them saved."""
    folder = shutil.copytree(sft_base, tmp_path_factory.mktemp("trained") / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder))
        train(*GRPO, "--num-steps", "2")
    return folder


@pytest.fixture
def trained(trained_base, tmp_path, monkeypatch):
    """A private copy of trained_base, set as NANOCHAT_BASE_DIR."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return shutil.copytree(trained_base, tmp_path / "base")


# Every write of a save

WRITES = {"open": (builtins, "open"), "fsync": (os, "fsync"), "replace": (os, "replace")}


def fail_at(monkeypatch, place: int, action) -> list[str]:
    """Makes the place-th call that writes do `action` instead; the calls so far, by name."""
    seen = []

    def guarded(name, call):
        def instead(*args, **kwargs):
            mode = kwargs.get("mode", args[1] if len(args) > 1 else "r") if name == "open" else "w"
            if any(sign in mode for sign in "wa"):
                seen.append(name)
                if len(seen) == place:
                    action()
            return call(*args, **kwargs)
        return instead
    for name, (module, attribute) in WRITES.items():
        monkeypatch.setattr(module, attribute, guarded(name, getattr(module, attribute)))
    return seen


def run_of_step_2(base):
    """Run r's roles, state and flags after step 2, as they are in the middle of a run, and how to save step 3."""
    args = parse(tango_rl, rl_flags(*GRPO, "--model-tag", "tiny"))
    args.lr, specs = 1e-3, tango_rl.recipes.load("grpo").ROLES
    roles = load_roles(args, specs, find_starts(args, specs), torch.device("cpu"), torch.float32)
    state = load_set("r", 2, roles, torch.device("cpu"), False)
    run = Run("r", torch.device("cpu"), 0, 1, "")
    with torch.no_grad():
        for p in roles["generator"].model.parameters():
            p.add_(1.0)
    state.step = 3

    def save():
        save_set(run, state, roles, args)
        run.writer.finish()
    return roles, save


def weights_of(base, step: int) -> dict:
    return torch.load(base / "chatrl_checkpoints" / "r-gen" / f"model_{step:06d}.pt", weights_only=True)


def check_what_is_there(base, before: dict, after: dict) -> None:
    """Every step that counts as saved loads, and has its weights."""
    for step in saved_steps("r"):
        roles, _ = run_of_step_2(base)
        load_set("r", step, roles, torch.device("cpu"), False)
        expected = before if step == 2 else after if step == 3 else weights_of(base, step)
        assert all(torch.equal(p, expected[name]) for name, p in roles["generator"].model.state_dict().items())


def test_a_save_writes_four_files_each_whole_or_not_at_all(trained, monkeypatch):
    seen = fail_at(monkeypatch, 0, None)
    run_of_step_2(trained)[1]()
    assert seen == ["open"] + ["open", "fsync", "replace"] * 4  # that it began; model, meta, optimizer, state


@pytest.mark.parametrize("place", range(1, 14))
def test_a_full_disk_at_any_write_of_a_save_is_one_line_and_loses_nothing(trained, monkeypatch, place):
    roles, save = run_of_step_2(trained)
    before, after = weights_of(trained, 2), dict(roles["generator"].model.state_dict())

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        fail_at(patch, place, full)
        with pytest.raises(CannotWrite, match=r"/\w+_000003[\w.]* cannot be written: No space left on device$"):
            save()
    assert saved_steps("r") == [1, 2]
    assert not [name for _, _, names in os.walk(trained) for name in names if name.endswith(".tmp")]
    check_what_is_there(trained, before, after)
    save()  # there is room again
    check_what_is_there(trained, before, after)
    assert saved_steps("r") == [1, 2, 3]


@pytest.mark.parametrize("place", range(1, 14))
def test_a_kill_at_any_write_of_a_save_leaves_whole_sets(trained, monkeypatch, place):
    roles, save = run_of_step_2(trained)
    before, after = weights_of(trained, 2), dict(roles["generator"].model.state_dict())
    child = os.fork()
    if child == 0:
        fail_at(monkeypatch, place, lambda: os.kill(os.getpid(), signal.SIGKILL))
        save()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert saved_steps("r") == [1, 2]
    check_what_is_there(trained, before, after)
    save()
    assert saved_steps("r") == [1, 2, 3]
    check_what_is_there(trained, before, after)


def test_a_run_on_a_full_disk_says_what_is_whole(trained, monkeypatch, capsys):
    append, told = Run.append, []

    def full(self, name, record):
        if record["step"] == 3:
            told.append(name)
            raise CannotWrite(f"{name} cannot be written: No space left on device")
        append(self, name, record)
    monkeypatch.setattr(Run, "append", full)
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "auto", "--num-steps", "5")
    assert code == 1 and told == ["metrics.jsonl"]
    assert line == ("stopped: metrics.jsonl cannot be written: No space left on device; the checkpoint of step 3 is "
                    "whole: make room, and go on with the same flags, --run r and --resume-from-step auto")


# Damaged files

def damaged(path, place: int, bit: int = 4):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path):
    """A bit of every byte; every bit of the directory's first entry, which others are like, and of its last and end."""
    path, copy = tmp_path / "a.pt", tmp_path / "b.pt"
    saved = {"x": torch.randn(8, generator=torch.Generator().manual_seed(0)), "y": [1, 2.5, "text", None]}
    save_atomic(saved, str(path))
    refused, whole = 0, path.read_bytes()
    entries = [match.start() for match in re.finditer(rb"PK\x01\x02", whole)]
    assert len(entries) > 4
    for place, bit in [(i, bit) for i in range(len(whole))
                       for bit in (range(8) if entries[0] <= i < entries[1] or i >= entries[-1] else [i % 8])]:
        data = bytearray(whole)
        data[place] ^= 1 << bit
        copy.write_bytes(data)
        try:
            found = load_file(str(copy))
        except BadInput as error:
            assert str(copy) in str(error) and "\n" not in str(error)
            refused += 1
        else:
            assert torch.equal(found["x"], saved["x"]) and found["y"] == saved["y"], place
    assert refused > len(whole) // 2  # the rest is padding, times and the like


@pytest.mark.parametrize("name", ["chatrl_checkpoints/r-gen/model_000002.pt", "runs/r/state_000002.pt",
                                  "chatrl_checkpoints/r-gen/optim_000002_rank0.pt"])
@pytest.mark.parametrize("damage, word", [
    (lambda path: damaged(path, path.stat().st_size // 2), "damaged"),
    (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged"),
    (lambda path: path.write_bytes(b""), "damaged"),
    (lambda path: path.unlink(), ""),
])
def test_a_damaged_file_of_a_set_is_named(trained, capsys, name, damage, word):
    damage(trained / name)
    before = sorted(os.listdir(trained / "runs" / "r"))
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "2", "--num-steps", "3")
    assert code == 2 and line.startswith("error: ") and "\n" not in line and word in line and "Errno" not in line
    assert (trained / name).name in line or "step 2" in line
    assert sorted(os.listdir(trained / "runs" / "r")) == before


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-100]),
                                    lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_a_damaged_meta_of_a_set_is_named(trained, capsys, damage):
    damage(trained / "chatrl_checkpoints" / "r-gen" / "meta_000002.json")
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert code == 2 and "r-gen/meta_000002.json is " in line and "\n" not in line


def test_fewer_steps_than_were_made_are_refused_and_leave_the_run_as_it_was(trained, capsys):
    config = (trained / "runs" / "r" / "config.json").read_bytes()
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "auto", "--num-steps", "1")
    assert code == 2 and "--num-steps 1: run r has made 2 updates of the generator" in line and "\n" not in line
    assert (trained / "runs" / "r" / "config.json").read_bytes() == config


@pytest.mark.parametrize("name", ["model_{}.pt", "optim_{}_rank0.pt"])
def test_a_file_of_another_step_is_noticed(trained, capsys, name):
    folder = trained / "chatrl_checkpoints" / "r-gen"
    shutil.copy(folder / name.format("000001"), folder / name.format("000002"))
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "2", "--num-steps", "3")
    assert code == 2 and name.format("000002") in line and "is not the file that was saved" in line


def test_a_set_without_checksums_loads_with_a_note(trained, capsys):
    path = trained / "runs" / "r" / "state_000002.pt"
    state = torch.load(path, weights_only=True)
    assert set(state.pop("checksums")) == {"generator/model_000002.pt", "generator/optim_000002_rank0.pt"}
    torch.save(state, path)
    train(*GRPO, "--resume-from-step", "2", "--num-steps", "3")
    assert "was saved without checksums" in capsys.readouterr().out


def test_pytorchs_advice_to_allow_a_hostile_file_is_not_passed_on(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/done",)
    torch.save({"x": Hostile()}, tmp_path / "a.pt")
    with pytest.raises(BadInput) as error:
        load_file(str(tmp_path / "a.pt"))
    assert "weights_only" not in str(error.value) and "posix.system" in str(error.value)
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"args": 3}', "\udcff\udcfe", '{"starts": {}}'])
def test_a_damaged_config_is_one_line(trained, capsys, text):
    (trained / "runs" / "r" / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert code == 2 and "config.json" in line and "\n" not in line


@pytest.mark.parametrize("garbage", [b"what?\n", b"\xff\xfe\n", b"3\n", b"{}\n", b'{"step": "1"}\n', b"\n"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
def test_garbage_between_records_is_one_line_that_says_where(trained, capsys, name, garbage):
    path = trained / "runs" / "r" / name
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], garbage, *lines[1:]]))
    before = {other.name: other.read_bytes() for other in path.parent.glob("*.jsonl")}
    for step in ("auto", "1"):  # of an earlier step, records are dropped
        code, line = outcome_of(capsys, *GRPO, "--resume-from-step", step, "--num-steps", "3")
        assert code == 2 and f"{name}, line 2" in line and "\n" not in line
        assert {other.name: other.read_bytes() for other in path.parent.glob("*.jsonl")} == before
        assert saved_steps("r") == [1, 2]


def test_a_record_that_was_cut_by_a_kill_is_none(trained):
    path = trained / "runs" / "r" / "metrics.jsonl"
    with open(path, "a") as f:
        f.write('{"step": 2, "ro')
    assert [record["step"] for _, record in read_records(str(path))] == [0, 1]
    train(*GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert [record["step"] for _, record in read_records(str(path))] == [0, 1, 2]


# Weights that are not finite

@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_at_load(base, capsys, value):
    path = base / "chatsft_checkpoints" / "tiny" / "model_000200.pt"
    state = torch.load(path, weights_only=True)
    state["transformer.h.1.mlp.c_fc.weight"][3, 5] = value
    torch.save(state, path)
    code, line = outcome_of(capsys, "--run", "r")
    assert code == 2 and "model_000200.pt: transformer.h.1.mlp.c_fc.weight" in line and "not finite" in line
    assert not (base / "runs").exists()


def test_weights_that_are_integers_are_refused_at_load(base, capsys):
    path = base / "chatsft_checkpoints" / "tiny" / "model_000200.pt"
    state = torch.load(path, weights_only=True)
    torch.save(state | {"lm_head.weight": state["lm_head.weight"].long()}, path)
    code, line = outcome_of(capsys, "--run", "r")
    assert code == 2 and "lm_head.weight holds torch.int64: weights are floating-point numbers" in line


def break_weights(model) -> None:
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")


def test_weights_that_are_not_finite_are_neither_evaluated_nor_saved(base, capsys, monkeypatch):
    """The verifier's go in step 1, while the generator's steps stay healthy."""
    log = Play.log

    def broken(self, role, values):
        if role == "generator" and self.step == 1 and "grad_norm" in values:
            break_weights(self.roles["verifier"].model)
        log(self, role, values)
    monkeypatch.setattr(Play, "log", broken)
    flags = ["--run", "r", "--save-every", "1", "--warmup-steps", "0", "--generator-steps", "3"]
    code, line = outcome_of(capsys, *flags)
    assert code == 1 and "the verifier has weights that are not finite (lm_head.weight)" in line and "\n" not in line
    assert saved_steps("r") == [1] and not (base / "runs" / "r" / "summary.json").exists()
    with pytest.raises(Diverged, match="verifier"):
        train("--run", "e", *flags[2:], "--save-every", "0", "--eval-every", "2")
    assert [record["step"] for _, record in read_records(str(base / "runs" / "e" / "metrics.jsonl"))] == [0, 1]


def test_a_healthy_role_does_not_hide_one_whose_steps_are_skipped(base, capsys, monkeypatch):
    """Every generator step is skipped; each verifier step between is fine."""
    update = play.update

    def failing(role, batches, *args, **kwargs):
        metrics = update(role, batches, *args, **kwargs)
        return metrics | {"skipped": int(role.name == "generator")}
    monkeypatch.setattr(play, "update", failing)
    code, line = outcome_of(capsys, "--run", "r", "--num-steps", "40", "--generator-steps", "1", "--warmup-steps", "0")
    assert code == 1 and "the generator was not finite three times in a row" in line
    roles = [record["role"] for _, record in read_records(str(base / "runs" / "r" / "metrics.jsonl"))]
    assert roles == ["generator", "verifier"] * 2 + ["generator"]


def test_supervised_training_saves_no_weights_that_are_not_finite(base, monkeypatch):
    flags = [*TASK_FLAGS, "--device-type", "cpu", "--model-tag", "new", "--depth", "1", "--n-embd", "64", "--n-head",
             "2", "--sequence-len", "128", "--num-steps", "2", "--role", "generator"]
    step = chat_sft.train_step

    def broken(args, model, *rest):
        done = step(args, model, *rest)
        break_weights(model)
        return done
    monkeypatch.setattr(chat_sft, "train_step", broken)
    monkeypatch.setattr(chat_sft, "supervised_loss", lambda model, *rest: model.lm_head.weight[1].sum())
    with pytest.raises(Diverged, match="generator has weights that are not finite"):
        chat_sft.main(parse(chat_sft, flags))
    assert not [name for name in os.listdir(base / "chatsft_checkpoints" / "new") if name.endswith(".pt")]


def test_pretraining_neither_saves_nor_evaluates_weights_that_are_not_finite(base, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text that is read\n" * 200)
    (tmp_path / "b.txt").write_text("some other text to be read\n" * 50)
    monkeypatch.setattr(base_train, "train", lambda args, run, model, *rest: break_weights(model))
    flags = ["--data", str(tmp_path / "a.txt"), "--val-data", str(tmp_path / "b.txt"), "--depth", "1", "--n-embd",
             "64", "--n-head", "2", "--sequence-len", "64", "--num-iterations", "1", "--device-batch-size", "1",
             "--total-batch-size", "64", "--model-tag", "new", "--device-type", "cpu"]
    with pytest.raises(Diverged, match="model has weights that are not finite"):
        base_train.main(parse(base_train, flags))
    assert not [name for name in os.listdir(base / "base_checkpoints" / "new") if name.endswith(".pt")]


def test_older_weights_are_as_they_were(trained):
    """What load_model gives is what the file holds."""
    model, _ = load_model("rl", "r-gen", "cpu", torch.float32, 2)
    assert all(torch.equal(p, model.state_dict()[name]) for name, p in weights_of(trained, 2).items())
    assert json.loads((trained / "chatrl_checkpoints" / "r-gen" / "meta_000002.json").read_text())["step"] == 2


# What a hostile reader found

def test_a_lost_state_of_a_finished_run_is_not_taken_for_a_fresh_start(trained, capsys):
    os.remove(trained / "runs" / "r" / "state_000002.pt")
    left = sorted(os.listdir(trained / "chatrl_checkpoints" / "r-gen"))
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert code == 2 and "saved after step 2" in line and "state_000002.pt is missing" in line and "\n" not in line
    assert sorted(os.listdir(trained / "chatrl_checkpoints" / "r-gen")) == left
    train(*GRPO, "--resume-from-step", "1", "--num-steps", "2")  # a step that is named is gone on from
    assert saved_steps("r") == [1, 2]


def test_records_that_were_cut_are_noticed_before_the_run_goes_on(trained, capsys):
    path = trained / "runs" / "r" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:100])
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert code == 2 and "metrics.jsonl has no record of step 0" in line and "\n" not in line
    assert path.stat().st_size == 100


def test_a_stdout_that_fails_stops_no_run(base, monkeypatch, capsys):
    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def flush(self):
            pass
    monkeypatch.setattr(sys, "stdout", Full())
    train(*GRPO, "--num-steps", "1")
    assert saved_steps("r") == [1] and (base / "runs" / "r" / "summary.json").exists()
    assert capsys.readouterr().err.count("nothing more is shown: stdout: No space left on device") == 1


def test_a_terminal_that_is_closed_stops_the_run_as_sigterm_does(base, monkeypatch, capsys):
    log = Run.log

    def hang_up(self, record):
        log(self, record)
        os.kill(os.getpid(), signal.SIGHUP)
    monkeypatch.setattr(Run, "log", hang_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite that nohup started would not hear it
    try:
        code, _ = outcome_of(capsys, "--recipe", "grpo", "--run", "r", "--save-every", "0", "--num-steps", "9")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 143 and saved_steps("r") == [1]


def test_lost_states_of_a_run_that_was_cut_off_are_not_taken_for_a_fresh_start(trained, capsys):
    folder, models = trained / "runs" / "r", trained / "chatrl_checkpoints" / "r-gen"
    os.remove(folder / "summary.json")
    before, kept = sorted(os.listdir(models)), (folder / "metrics.jsonl").read_bytes()
    for lost in (2, 1):
        (folder / f"state_{lost:06d}.pt").rename(trained / f"{lost}.pt")
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert code == 2 and "saved after step 2" in line and "r-gen to start afresh" in line and "\n" not in line
    os.rename(trained / "1.pt", folder / "state_000001.pt")  # a kill in the save of step 2 leaves the same
    assert sorted(os.listdir(models)) == before and (folder / "metrics.jsonl").read_bytes() == kept
    train(*GRPO, "--resume-from-step", "auto", "--num-steps", "2")
    assert saved_steps("r") == [1, 2]


def test_a_lost_state_in_the_middle_of_a_run_is_noticed(trained, capsys):
    folder = trained / "runs" / "r"
    train(*GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    for lost in ("summary.json", "state_000003.pt", "state_000002.pt"):
        os.remove(folder / lost)
    for lost in ("model", "meta"):
        os.remove(next((trained / "chatrl_checkpoints" / "r-gen").glob(f"{lost}_000003.*")))
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert code == 2 and "saved after step 2" in line and "there are: 1" in line


def test_a_step_that_two_processes_logged_is_named(trained, capsys):
    path = trained / "runs" / "r" / "metrics.jsonl"
    path.write_text(path.read_text() * 2)
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert code == 2 and "metrics.jsonl has step 0 twice: two processes were at work" in line


def test_to_evaluate_an_earlier_step_again_removes_no_later_one(trained, capsys):
    before = sorted(os.listdir(trained / "chatrl_checkpoints" / "r-gen"))
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "1", "--num-steps", "1")
    assert code == 2 and "no step is left to make, and to begin from there would remove the checkpoints" in line
    assert sorted(os.listdir(trained / "chatrl_checkpoints" / "r-gen")) == before


@pytest.mark.parametrize("state", [torch.ones(2), 3, [], {}, {"memory": {}}, {"memory": {}, "roles": ["generator"]},
                                   {"memory": {}, "roles": ["generator"], "torch_rng": torch.get_rng_state(),
                                    "of_tomorrow": 1}])
def test_a_state_of_another_kind_is_one_line(trained, capsys, state):
    save_atomic(state, str(trained / "runs" / "r" / "state_000002.pt"))
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert code == 2 and "run r " in line.replace("run r:", "run r ") and "\n" not in line


def test_a_run_without_its_config_is_not_written_over(trained, capsys):
    os.remove(trained / "runs" / "r" / "config.json")
    before = sorted(os.listdir(trained / "runs" / "r"))
    code, line = outcome_of(capsys, *GRPO, "--num-steps", "3")
    assert code == 2 and "its last checkpoint is of step 2" in line
    assert sorted(os.listdir(trained / "runs" / "r")) == before


@pytest.mark.parametrize("change", [{"starts": {"generator": 5}}, {"starts": [1]}, {"resumed": {}},
                                    {"starts": {"other": {"step": 1, "fingerprint": 2}}}])
def test_a_config_whose_parts_are_changed_is_one_line(trained, capsys, change):
    path = trained / "runs" / "r" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert code == 2 and "config.json" in line and "\n" not in line


def test_a_dummy_run_takes_no_name_that_models_have(trained):
    assert choose_run_name("dummy") == "dummy-1"
    (trained / "chatrl_checkpoints" / "dummy-1-gen").mkdir()
    assert choose_run_name("dummy") == "dummy-2"
    (trained / "runs" / "dummy").mkdir()
    (trained / "runs" / "dummy" / "note.json").write_text("{}")
    train("--recipe", "grpo", "--num-steps", "1")
    assert saved_steps("dummy-2") == [1]
