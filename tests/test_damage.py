"""What is on the disk is whole or refused: processes killed and disks filled at every write of a save, flipped bytes,
truncated, exchanged and hostile files, weights that are not finite."""
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

from nanochat.checkpoint import load_file, save_atomic, saved_steps
from nanochat.cli import script_main
from nanochat.common import BadInput, CannotWrite, Diverged
from nanochat.rl.learn.roles import find_starts, load_roles
from nanochat.rl.learn.state import load_set, save_set
from nanochat.rl.play import updates
from nanochat.rl.play.play import Play
from nanochat.storage.files import read_records
from nanochat.storage.run import Run, choose_run_name
from scripts import chat_sft, tango_rl

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


@pytest.mark.parametrize("fault", ["full disk", "kill"])
def test_a_fault_at_any_write_of_a_save_loses_nothing(trained, monkeypatch, fault):
    """That the save begins, then model, meta, optimizer and state, each opened, synced and replaced; each time with
    what the fault before has left. A full disk is told in one line."""
    roles, save = run_of_step_2(trained)
    before, after = weights_of(trained, 2), dict(roles["generator"].model.state_dict())

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for place in range(1, 14):
        if fault == "kill":
            child = os.fork()
            if child == 0:
                fail_at(monkeypatch, place, lambda: os.kill(os.getpid(), signal.SIGKILL))
                save()
                os._exit(0)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        else:
            with monkeypatch.context() as patch:
                fail_at(patch, place, full)
                with pytest.raises(CannotWrite, match=r"/\w+_000003[\w.]* cannot be written: No space left on device$"):
                    save()
            assert not [name for _, _, names in os.walk(trained) for name in names if name.endswith(".tmp")]
        assert saved_steps("r") == [1, 2]
        check_what_is_there(trained, before, after)
    seen = fail_at(monkeypatch, 0, None)
    save()  # there is room again
    assert seen == ["open"] + ["open", "fsync", "replace"] * 4 and saved_steps("r") == [1, 2, 3]
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


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path) -> None:
    path.write_bytes(b"")


def of_step_1(path) -> None:
    shutil.copy(str(path).replace("000002", "000001"), path)


def holds(content):
    """Damage: the file holds this, a configuration changed so, or a state of another kind."""
    def write(path):
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".json":
            path.write_text(json.dumps(json.loads(path.read_text()) | content))
        else:
            save_atomic(content, str(path))
    return write


def after_first(garbage: bytes):
    def write(path):
        first, *rest = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([first, garbage, *rest]))
    return write


RUN, MODELS = "runs/r/", "chatrl_checkpoints/r-gen/"
STATE, CONFIG, LOG = f"{RUN}state_000002.pt", f"{RUN}config.json", f"{RUN}metrics.jsonl"
MODEL, META, OPTIM = (f"{MODELS}{name}" for name in ("model_000002.pt", "meta_000002.json", "optim_000002_rank0.pt"))
OTHER_STATES = (torch.ones(2), 3, [], {}, {"memory": {}}, {"memory": {}, "roles": ["generator"]},
                {"memory": {}, "roles": ["generator"], "torch_rng": torch.get_rng_state(), "of_tomorrow": 1})
DAMAGES = [  # a file, what became of it, what the line says; from which step to go on
    *((name, damage, (name.rpartition("/")[2], "damaged"), "2")
      for name, damage in ((MODEL, flip), (MODEL, cut), (OPTIM, flip), (OPTIM, empty), (STATE, flip), (STATE, empty))),
    *((name, os.remove, ("step 2",) if name == STATE else (name.rpartition("/")[2],), "2")
      for name in (MODEL, OPTIM, STATE)),
    *((META, damage, ("r-gen/meta_000002.json is ",), "auto") for damage in (cut, empty, os.remove)),
    *((name, of_step_1, (name.rpartition("/")[2], "is not the file that was saved"), "2") for name in (MODEL, OPTIM)),
    *((CONFIG, holds(content), ("config.json",), "auto")
      for content in (b"", b"{", b"[1]", b'{"args": 3}', b"\xff\xfe", b'{"starts": {}}', {"starts": {"generator": 5}},
                      {"starts": [1]}, {"resumed": {}}, {"starts": {"other": {"step": 1, "fingerprint": 2}}})),
    *((STATE, holds(state), ("run r",), "auto") for state in OTHER_STATES),
    *((f"{RUN}{name}.jsonl", after_first(garbage), (f"{name}.jsonl, line 2",), step) for name, garbage, step in (
        ("metrics", b"what?\n", "auto"), ("metrics", b"\xff\xfe\n", "auto"), ("metrics", b"3\n", "1"),
        ("rollouts", b"{}\n", "auto"), ("rollouts", b'{"step": "1"}\n', "1"), ("metrics", b"\n", "auto"))),
    (LOG, lambda path: path.write_bytes(path.read_bytes()[:100]), ("metrics.jsonl has no record of step 0",), "auto"),
    (LOG, lambda path: path.write_text(path.read_text() * 2),
     ("metrics.jsonl has step 0 twice: two processes were at work",), "auto"),
    (STATE, os.remove, ("saved after step 2", "state_000002.pt is missing"), "auto"),
]


def files_under(folder) -> dict:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def refused(base, capsys, *words: str, step: str = "auto", num: str = "3") -> None:
    """Going on is refused in one line with these words, and no file is changed."""
    before = files_under(base)
    code, line = outcome_of(capsys, *GRPO, "--resume-from-step", step, "--num-steps", num)
    assert code == 2 and line.startswith("error: ") and "\n" not in line and "Errno" not in line, line
    assert all(word in line for word in words), line
    assert files_under(base) == before


@pytest.mark.parametrize("name, damage, words, step", DAMAGES)
def test_a_damaged_file_of_a_run_is_named(trained, capsys, name, damage, words, step):
    damage(trained / name)
    refused(trained, capsys, *words, step=step)


def test_fewer_steps_than_were_made_are_refused(trained, capsys):
    refused(trained, capsys, "--num-steps 1: run r has made 2 updates of the generator", num="1")
    refused(trained, capsys, "no step is left to make, and to begin from there would remove the checkpoints",
            step="1", num="1")


def test_a_run_is_said_to_go_on_once_nothing_refuses_it(trained, capsys):
    flags = [*GRPO, "--resume-from-step", "auto", "--num-steps"]
    with pytest.raises(BadInput, match="has made 2 updates"):
        train(*flags, "1")
    assert "continuing" not in capsys.readouterr().out
    train(*flags, "3")
    out = capsys.readouterr().out
    assert "continuing run r after step 2 with --num-steps 2 -> 3\nits flags: --run r --device-type cpu --recipe" in out
    assert " --lr 0.001 " in out and "\nwhat is scheduled" in out and "--temperature" not in out  # a default


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path):
    """A bit of every byte of the first file and of every third byte after; every bit of the directory's first entry,
    which others are like, and of its last and end."""
    path, copy = tmp_path / "a.pt", tmp_path / "b.pt"
    saved = {"x": torch.randn(8, generator=torch.Generator().manual_seed(0)), "y": [1, 2.5, "text", None]}
    save_atomic(saved, str(path))
    refused, whole = 0, path.read_bytes()
    entries = [match.start() for match in re.finditer(rb"PK\x01\x02", whole)]
    assert len(entries) > 4
    second = whole.index(b"PK\x03\x04", 1)
    for place, bit in [(i, bit) for i in range(len(whole))
                       for bit in (range(8) if entries[0] <= i < entries[1] or i >= entries[-1] else
                                   [i % 8] if i < second or i % 3 == 0 else [])]:
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
    assert refused > len(whole) // 4  # the rest is padding, times and the like


def test_a_set_without_checksums_loads_with_a_note(trained, capsys):
    state = torch.load(trained / STATE, weights_only=True)
    assert set(state.pop("checksums")) == {"generator/model_000002.pt", "generator/optim_000002_rank0.pt"}
    torch.save(state, trained / STATE)
    train(*GRPO, "--resume-from-step", "2", "--num-steps", "3")
    assert "was saved without checksums" in capsys.readouterr().out


def test_a_record_that_was_cut_by_a_kill_is_none(trained):
    with open(trained / LOG, "a") as f:
        f.write('{"step": 2, "ro')
    assert [record["step"] for _, record in read_records(str(trained / LOG))] == [0, 1]
    train(*GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert [record["step"] for _, record in read_records(str(trained / LOG))] == [0, 1, 2]


def test_lost_states_are_not_taken_for_a_fresh_start(trained, capsys):
    """Of a finished run: a step that is named is gone on from. Of one that was cut off, and in the middle of one."""
    folder = trained / "runs" / "r"
    (trained / STATE).rename(trained / "2.pt")
    train(*GRPO, "--resume-from-step", "1", "--num-steps", "2")
    assert saved_steps("r") == [1, 2]
    os.remove(folder / "summary.json")
    for lost in (2, 1):
        (folder / f"state_{lost:06d}.pt").rename(trained / f"{lost}.pt")
    refused(trained, capsys, "saved after step 2", "r-gen to start afresh")
    os.rename(trained / "1.pt", folder / "state_000001.pt")  # a kill in the save of step 2 leaves the same
    train(*GRPO, "--resume-from-step", "auto", "--num-steps", "3")
    assert saved_steps("r") == [1, 2, 3]
    for lost in (folder / "summary.json", folder / "state_000003.pt", folder / "state_000002.pt",
                 trained / MODELS / "model_000003.pt", trained / MODELS / "meta_000003.json"):
        os.remove(lost)
    refused(trained, capsys, "saved after step 2", "there are: 1")


def test_a_run_without_its_config_is_not_written_over(trained, capsys):
    os.remove(trained / CONFIG)
    before = files_under(trained)
    code, line = outcome_of(capsys, *GRPO, "--num-steps", "3")
    assert code == 2 and "its last checkpoint is of step 2" in line and files_under(trained) == before


def test_a_dummy_run_takes_no_name_that_models_have(trained):
    assert choose_run_name("dummy") == "dummy-1"
    (trained / "chatrl_checkpoints" / "dummy-1-gen").mkdir()
    (trained / "runs" / "dummy").mkdir()
    (trained / "runs" / "dummy" / "note.json").write_text("{}")
    train("--recipe", "grpo", "--num-steps", "1")
    assert saved_steps("dummy-2") == [1]


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


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), None])
def test_weights_that_are_not_finite_or_integers_are_refused_at_load(base, capsys, value):
    path, name = base / "chatsft_checkpoints" / "tiny" / "model_000200.pt", "transformer.h.1.mlp.c_fc.weight"
    state = torch.load(path, weights_only=True)
    if value is None:
        state[name] = state[name].long()
    else:
        state[name][3, 5] = value
    torch.save(state, path)
    code, line = outcome_of(capsys, "--run", "r")
    assert code == 2 and (f"{name} holds torch.int64: weights are floating-point numbers" in line if value is None
                          else f"model_000200.pt: {name}" in line and "not finite" in line)
    assert not (base / "runs").exists()


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
    update = updates.update

    def failing(role, batches, *args, **kwargs):
        metrics = update(role, batches, *args, **kwargs)
        return metrics | {"skipped": int(role.name == "generator")}
    monkeypatch.setattr(updates, "update", failing)
    code, line = outcome_of(capsys, "--run", "r", "--num-steps", "40", "--generator-steps", "1", "--warmup-steps", "0")
    assert code == 1 and "the generator was not finite three times in a row" in line
    roles = [record["role"] for _, record in read_records(str(base / "runs" / "r" / "metrics.jsonl"))]
    assert roles == ["generator", "verifier"] * 2 + ["generator"]


def test_supervised_training_saves_no_weights_that_are_not_finite(base, monkeypatch):
    flags = [*TASK_FLAGS, "--device-type", "cpu", "--model-tag", "new", "--depth", "1", "--n-embd", "64", "--n-head",
             "2", "--sequence-len", "128", "--num-steps", "2", "--role", "generator"]
    step = chat_sft.train_step

    def broken(t, examples):
        done = step(t, examples)
        break_weights(t.model)
        return done
    monkeypatch.setattr(chat_sft, "train_step", broken)
    monkeypatch.setattr(chat_sft, "supervised_loss", lambda model, *rest: model.lm_head.weight[1].sum())
    with pytest.raises(Diverged, match="the model has weights that are not finite"):
        chat_sft.main(parse(chat_sft, flags))
    assert not [name for name in os.listdir(base / "chatsft_checkpoints" / "new") if name.endswith(".pt")]
