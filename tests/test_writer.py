"""Checkpoints that are written while training goes on, and how many are kept."""
import errno
import json
import os
import shutil
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from conftest import TASK_FLAGS, on_two_ranks, parse, rl_flags
from test_damage import outcome_of
from test_tango_rl import assert_same_weights, gen_weights, records

from nanochat import checkpoint
from nanochat.checkpoint import begun_steps, drop_old_sets, list_steps, saved_steps
from nanochat.cli import check_unchanged
from nanochat.common import BadInput, CannotWrite, Diverged, StopRequested
from nanochat.rl.learn import state
from nanochat.storage import writer
from nanochat.storage.run import Run
from nanochat.storage.writer import Writer
from nanochat.supervised import resumable_steps
from scripts import base_train, chat_sft, tango_rl

CPU = torch.device("cpu")
GRPO = ["--recipe", "grpo", "--run", "r", "--save-every", "1", "--num-steps", "4"]


def train(*flags: str) -> None:
    tango_rl.main(parse(tango_rl, rl_flags(*flags)))


@pytest.fixture(scope="module")
def straight(sft_base, tmp_path_factory):
    """A run r of four steps, each of them saved, that keeps all."""
    folder = shutil.copytree(sft_base, tmp_path_factory.mktemp("straight") / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder))
        train(*GRPO)
    return folder


def files_of(base, run: str = "r") -> list[str]:
    """The files of a run's sets, of one role."""
    names = [*os.listdir(base / "runs" / run), *os.listdir(base / "chatrl_checkpoints" / f"{run}-gen")]
    return sorted(name for name in names if name.startswith(("state_", "model_", "meta_", "optim_", "begun_")))


def set_of(*steps: int) -> list[str]:
    return sorted(name for step in steps for name in (
        f"state_{step:06d}.pt", f"model_{step:06d}.pt", f"meta_{step:06d}.json", f"optim_{step:06d}_rank0.pt"))


def test_what_is_written_is_what_was_there_when_it_was_saved():
    """Training changes weights in place while the thread has not begun to write."""
    weights, wait, w, written = torch.ones(4), threading.Event(), Writer(CPU), []
    with w.saving():
        copied = w.to_host(weights)
        w.start(lambda: wait.wait() and [written.append(copied.clone())], lambda told: None)
    weights += 1
    assert w.is_busy() and not written
    wait.set()
    w.finish()
    assert torch.equal(written[0], torch.ones(4)) and not w.is_busy()


def test_a_save_waits_for_the_one_before_and_says_for_how_long(capsys, monkeypatch):
    monkeypatch.setattr(writer, "TOLD_FROM", 0.1)
    w, order = Writer(CPU), []
    for name in "ab":
        with w.saving():
            w.start(lambda name=name: time.sleep(0.3) or [name], lambda told: order.append(told))
        record = w.take_record()
        assert (record["timing_s/save_wait"] > 0.2) == (record["timing_s/save"] > 0.2) == (name == "b")
    assert record["timing_s/write"] > 0.2 and order == [["a"]]  # of the first one
    w.finish()
    assert order == [["a"], ["b"]]
    assert capsys.readouterr().out.count("a checkpoint waited 0.") == 1


def fail():
    raise CannotWrite("x.pt cannot be written: No space left on device")


@pytest.mark.parametrize("error", [None, StopRequested("stop"), Diverged("loss"), KeyError("mistake")])
def test_whatever_ends_a_run_lets_the_writer_end(error, capsys):
    """A write that fails is told, and does not hide what ended the run."""
    for write, is_whole in ((lambda: time.sleep(0.1) or [1], True), (fail, False)):
        w, marked = Writer(CPU), []
        expected = error or (None if is_whole else CannotWrite())
        try:
            with w:
                w.start(write, marked.append)
                if error:
                    raise error
            assert expected is None
        except Exception as raised:
            assert type(raised) is type(expected)
        assert marked == [[1]] * is_whole and not w.is_busy()
    assert ("WARNING: x.pt cannot be written" in capsys.readouterr().out) == (error is not None)


def on_each_rank(folder: str) -> None:
    """One set of which rank 1 is slow, and one that it cannot write."""
    rank = dist.get_rank()
    run, ends = Run("r", CPU, rank, 2, folder), []
    run.writer.start(lambda: time.sleep(0.5 * rank) or [rank], lambda told: ends.append(told))
    polls = 0
    while not ends:
        run.check_stop()
        time.sleep(0.02)
        polls += 1
    ends.append(polls > 5)
    run.writer.start(lambda: fail() if rank else [rank], lambda told: ends.append("whole"))
    try:
        while True:
            run.check_stop()
    except CannotWrite as error:
        ends.append(str(error))
    with open(f"{folder}/{rank}.json", "w") as f:
        json.dump(ends, f)


def test_a_set_counts_once_all_ranks_have_written_and_never_where_one_could_not(tmp_path):
    on_two_ranks(on_each_rank, str(tmp_path))
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [
            [0, 1], True, "x.pt cannot be written: No space left on device"]


@pytest.mark.gpu
def test_copies_from_a_gpu_are_page_locked_and_their_memory_is_used_again():
    w, weights = Writer(torch.device("cuda")), torch.randn(1000, 333, device="cuda")
    places = []
    for _ in range(2):
        expected, seen = weights.cpu(), []
        with w.saving():
            copied = w.to_host(weights)
            w.start(lambda copied=copied, seen=seen: seen.append(copied.clone()) or [], lambda told: None)
        weights += 1
        w.finish()
        assert torch.equal(seen[0], expected) and copied.is_pinned()
        places.append(copied.data_ptr())
    assert places[0] == places[1]


def test_a_disk_that_fills_up_in_the_background_stops_the_run_in_one_line(base, monkeypatch, capsys):
    save = checkpoint.save_atomic

    def full(obj, path):
        if threading.current_thread() is not threading.main_thread() and "optim_000003" in path:
            time.sleep(0.3)  # training goes on meanwhile
            with checkpoint.writing(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(obj, path)
    monkeypatch.setattr(checkpoint, "save_atomic", full)
    code, line = outcome_of(capsys, *GRPO, "--num-steps", "30")
    assert code == 1 and line.endswith(
        "optim_000003_rank0.pt cannot be written: No space left on device; the checkpoint of step 2 is whole: make "
        "room, and go on with the same flags, --run r and --resume-from-step auto")
    assert saved_steps("r") == [1, 2] and not (base / "runs" / "r" / "summary.json").exists()


def slowly(monkeypatch, step: int, action) -> None:
    """Makes the write of a step's optimizer do `action` first."""
    save = state.save_optimizer

    def slow(stage, tag, number, *rest):
        if number == step:
            action()
        return save(stage, tag, number, *rest)
    monkeypatch.setattr(state, "save_optimizer", slow)


def test_sigterm_while_a_set_is_written_saves_it_and_the_last_step(base, straight, monkeypatch):
    def told():
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    with monkeypatch.context() as patch:
        slowly(patch, 2, told)
        with pytest.raises(StopRequested, match="stopped after step"):
            train(*GRPO, "--save-every", "2")
    steps = saved_steps("r")
    assert steps[0] == 2 and len(records(base, "r")) == steps[-1] and files_of(base) == set_of(*steps)
    train(*GRPO, "--resume-from-step", "auto", "--save-every", "2")
    assert_same_weights(gen_weights(straight, 4), gen_weights(base, 4))
    assert records(base, "r") == records(straight, "r")


@pytest.mark.parametrize("num_whole", [0, 1])
def test_sigkill_while_a_set_is_written_leaves_the_one_before(base, straight, monkeypatch, num_whole):
    """All of its models and optimizers are there and training has logged further steps: a set that never was is not
    taken for one whose state was lost."""
    child = os.fork()
    if child == 0:
        append = Run.append

        def watched(self, name, record):
            append(self, name, record)
            if name == "metrics.jsonl" and record["step"] == num_whole + 1:
                self.writer.thread.join()
                os.kill(os.getpid(), signal.SIGKILL)
        monkeypatch.setattr(Run, "append", watched)
        monkeypatch.setattr(Writer, "is_busy", lambda self: len(saved_steps("r")) == num_whole)
        train(*GRPO)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert saved_steps("r") == [1][:num_whole] and len(records(base, "r")) == num_whole + 2
    assert begun_steps("r") == {num_whole + 1} == {max(list_steps("rl", "r-gen"))}
    train(*GRPO, "--resume-from-step", "auto")
    assert_same_weights(gen_weights(straight, 4), gen_weights(base, 4))
    assert records(base, "r") == records(straight, "r") and not begun_steps("r")


def test_the_last_sets_are_kept_and_an_older_one_goes_once_a_newer_one_is_whole(base, straight, monkeypatch,
                                                                                            capsys):
    before = {path: path.read_bytes() for path in (base / "chatsft_checkpoints").rglob("*") if path.is_file()}
    rename, seen = os.rename, []

    def watched(path, other):
        last = saved_steps("r")[-1]
        state.load_state("r", last)
        seen.append((os.path.basename(path), last, set_of(last)[-1] in files_of(base)))
        rename(path, other)
    monkeypatch.setattr(os, "rename", watched)
    train(*GRPO, "--keep", "2")
    assert files_of(base) == set_of(3, 4)
    assert seen == [("state_000001.pt", 3, True), ("state_000002.pt", 4, True)]
    assert not [name for name in os.listdir(base / "runs" / "r") if name.endswith(".old")]
    assert before == {path: path.read_bytes() for path in before}
    assert_same_weights(gen_weights(straight, 4), gen_weights(base, 4))
    assert records(base, "r") == records(straight, "r")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("on disk: ")]
    model, run = base / "chatrl_checkpoints" / "r-gen", base / "runs" / "r"
    size = sum(path.stat().st_size for path in model.iterdir())
    assert said[0] == f"on disk: {size / 1e6:.1f} MB in {model} (step 3, 4)" and said[1].endswith(f" MB in {run}")


def test_what_this_start_or_another_run_began_with_is_kept(straight, tmp_path, monkeypatch):
    base = shutil.copytree(straight, tmp_path / "base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    train("--recipe", "grpo", "--run", "other", "--num-steps", "1", "--save-every", "1", "--model-tag", "r-gen",
          "--model-source", "rl", "--model-step", "1")
    others = files_of(base, "other")
    train(*GRPO, "--num-steps", "6", "--resume-from-step", "2", "--keep", "1")
    assert files_of(base) == set_of(1, 2, 6) and files_of(base, "other") == others == set_of(1)
    train(*GRPO, "--num-steps", "7", "--resume-from-step", "auto", "--keep", "1")
    assert files_of(base) == set_of(1, 7)  # what `auto` went on from is like any older one


def test_the_last_set_alone_is_kept_unless_a_run_has_kept_more():
    flags = parse(tango_rl, ["--recipe", "grpo", "--model-tag", "tiny"])
    assert flags.keep == 1 == parse(chat_sft, ["--role", "generator"]).keep
    for recorded, kept in (({"keep": 0}, 0), ({"keep": 3}, 3), ({}, 0)):  # {}: of a version without --keep
        check_unchanged("run r", {**vars(flags), "keep": 1} | recorded if recorded else
                        {name: value for name, value in vars(flags).items() if name != "keep"}, flags, {"keep"}, {})
        assert flags.keep == kept
    given = parse(tango_rl, ["--recipe", "grpo", "--model-tag", "tiny", "--keep", "1"])
    assert check_unchanged("run r", vars(flags), given, {"keep"}, {}) == ["--keep 0 -> 1"] and given.keep == 1


def test_a_file_that_cannot_be_removed_is_told_counted_and_tried_again(base, monkeypatch, capsys):
    remove, refused = os.remove, []

    def guarded(path):
        if "model_000001" in str(path) and len(refused) < 2:
            refused.append(path)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        remove(path)
    monkeypatch.setattr(os, "remove", guarded)
    train(*GRPO, "--keep", "1")
    out = capsys.readouterr().out
    assert len(refused) == 2 and out.count("WARNING: 1 files of old checkpoints cannot be removed, first ") == 2
    assert f"{refused[0]}: Permission denied" in out
    assert files_of(base) == set_of(4) and os.path.exists(base / "runs" / "r" / "summary.json")
    # one or two records have it: what is left is written down beside the steps, and two may fall before one record
    assert {record["old_files_left"] for record in records(base, "r") if "old_files_left" in record} == {1}


def dropped(folder, kept: int, last: int, needed: set[int]) -> tuple[set[str], Run]:
    """The files that drop_old_sets removes of a folder."""
    run, before = Run("r", CPU, 0, 1, str(folder)), set(os.listdir(folder))
    drop_old_sets(run, str(folder / "meta_{}.json"), [str(folder)], kept, last, needed)
    return before - set(os.listdir(folder)), run


def test_a_set_whose_mark_cannot_be_renamed_stays_whole(tmp_path, monkeypatch, capsys):
    for step in (1, 2, 3):
        for name in ("meta_{:06d}.json", "model_{:06d}.pt"):
            (tmp_path / name.format(step)).touch()
    rename = os.rename

    def guarded(old, new):
        if "meta_000001" in old:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), old)
        rename(old, new)
    monkeypatch.setattr(os, "rename", guarded)
    gone, run = dropped(tmp_path, 1, 3, set())
    assert gone == {"meta_000002.json", "model_000002.pt"}
    assert run.writer.take_record() == {"old_files_left": 1}
    assert "meta_000001.json: Permission" in capsys.readouterr().out


def test_sets_of_later_steps_and_files_of_no_set_stay(tmp_path):
    """As where training goes on from an earlier step of a folder with later ones; only whole sets are counted."""
    for name in ("meta_000001.json", "model_000001.pt", "meta_000002.json", "model_000002.pt", "train_000002_rank1.pt",
                 "model_000003.pt", "meta_000004.json", "model_000004.pt", "meta_000009.json", "model_000009.pt",
                 "model_0000021.pt", "notes_000002.json", "meta_000011.json"):
        (tmp_path / name).touch()
    assert dropped(tmp_path, 0, 4, set())[0] == set()
    assert dropped(tmp_path, 1, 4, {1})[0] == {"meta_000002.json", "model_000002.pt", "train_000002_rank1.pt"}


SMALL = ["--device-type", "cpu", "--model-tag", "new", "--depth", "1", "--n-embd", "32", "--n-head", "1",
         "--sequence-len", "128", "--keep", "2", "--save-every", "1"]


def test_pretraining_keeps_the_last_ones(base, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"some text {name} that is read\n" * 200)
    base_train.main(parse(base_train, [*SMALL, "--data", str(tmp_path / "a.txt"), "--val-data",
                                       str(tmp_path / "b.txt"), "--num-iterations", "4", "--device-batch-size", "1",
                                       "--total-batch-size", "128", "--eval-tokens", "128"]))
    assert list_steps("base", "new") == resumable_steps("base", "new") == [3, 4]
    assert len(list((base / "base_checkpoints" / "new").glob("*.pt"))) == 4


def test_sft_keeps_the_last_ones_and_what_rl_started_from(base):
    flags = [*SMALL, *TASK_FLAGS, "--role", "generator"]
    chat_sft.main(parse(chat_sft, [*flags, "--num-steps", "3", "--keep", "0"]))
    train("--recipe", "grpo", "--run", "r", "--num-steps", "0", "--model-tag", "new", "--model-step", "2")
    with pytest.raises(BadInput, match="--num-steps 6: .* was started with 3"):
        chat_sft.main(parse(chat_sft, [*flags, "--num-steps", "6", "--resume-from-step", "1"]))
    chat_sft.main(parse(chat_sft, [*flags, "--num-steps", "3", "--keep", "1", "--resume-from-step", "1"]))
    assert list_steps("sft", "new") == resumable_steps("sft", "new") == [1, 2, 3]
    shutil.rmtree(base / "runs" / "r")
    chat_sft.main(parse(chat_sft, [*flags, "--num-steps", "3", "--keep", "1", "--resume-from-step", "2"]))
    assert list_steps("sft", "new") == resumable_steps("sft", "new") == [2, 3]
