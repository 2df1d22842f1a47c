"""What every script shares: how it ends, what trackers are shown, the version and commit that a run records."""
import argparse
import importlib.util
import json
import mmap
import os
import re
import socket
import subprocess
import sys
import types

import pytest
import torch
from conftest import RL_FLAGS, TASK_FLAGS, parse, rl_flags

from nanochat import __version__, common
from nanochat.cli import script_main
from nanochat.common import BadInput, CannotWrite, StopRequested, process_size
from nanochat.storage import files
from nanochat.storage.files import is_alone, whole_file
from nanochat.storage.run import PROJECT, Run, describe_versions, lock_run, start_trackio, uses_wandb
from scripts import base_train, chat_sft, tango_rl, tok_train

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def drawn(folder) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every scalar in a run's event files, with no help of a reader that purges."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False).Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def logged(folder) -> dict[str, list[tuple[int, float]]]:
    """The same of the numbers in its metrics.jsonl, in the precision of event files."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                found.setdefault(name, []).append((record["step"], torch.tensor(value, dtype=torch.float32).item()))
    return found


def new_run(folder, step: int, rank: int = 0) -> Run:
    run = Run("r", torch.device("cpu"), rank, 1, str(folder), wants_events=True)
    run.trim("metrics.jsonl", step)
    return run


def test_event_files_hold_the_finite_numbers_alone(tmp_path):
    run = new_run(tmp_path, 0)
    run.log({"step": 3, "loss": 0.5, "count": 2, "lenient": True, "role": "verifier", "none": None,
             "nan": float("nan"), "inf": float("inf")})
    assert drawn(tmp_path) == {"loss": [(3, 0.5)], "count": [(3, 2.0)], "lenient": [(3, 1.0)]}  # before the run ends
    run.finish()


def test_records_that_are_dropped_leave_the_event_files_too(tmp_path):
    run = new_run(tmp_path, 0)
    for step in range(5):
        run.log({"step": step, "loss": float(step)} | ({"late": 1.0} if step == 3 else {}))
    run.finish()
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "lo')  # cut by a crash
    run = new_run(tmp_path, 2)
    assert drawn(tmp_path) == {"loss": [(0, 0.0), (1, 1.0)]}  # also where nothing is logged after it
    run.log({"step": 2, "loss": 12.0})
    run.finish()
    assert drawn(tmp_path) == {"loss": [(0, 0.0), (1, 1.0), (2, 12.0)]}


def test_rank_0_alone_writes_event_files(tmp_path):
    run = new_run(tmp_path, 0, rank=1)
    run.log({"step": 0, "loss": 1.0})
    run.finish()
    assert os.listdir(tmp_path) == []
    run = Run("r", torch.device("cpu"), 0, 1, str(tmp_path), events=Failing())
    with pytest.raises(CannotWrite, match="tensorboard cannot be written: No space left on device"):
        run.log({"step": 0, "loss": 1.0})


class TrackioRun:
    """What trackio keeps of a run, by the signatures of trackio 0.43."""

    def __init__(self, name: str, config: dict | None):
        self.name, self.config, self.shown = name, config, {}  # name of a number -> its steps and values

    def log(self, metrics: dict, step: int | None = None) -> None:
        for name, value in metrics.items():
            self.shown.setdefault(name, []).append((step, torch.tensor(value, dtype=torch.float32).item()))

    def finish(self) -> None:
        pass


@pytest.fixture
def trackio(monkeypatch):
    """A package trackio that keeps its runs in a list, .kept."""
    module = types.ModuleType("trackio")
    module.kept = []

    def init(project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None,
             config=None, resume="never", settings=None, private=None, embed=True, auto_log_gpu=None,
             gpu_log_interval=10.0, auto_log_cpu=None, cpu_log_interval=10.0):
        assert (project, resume, space_id, server_url) == (PROJECT, "never", None, None)
        module.kept.append(run := TrackioRun(name, config))
        run.delete = lambda: module.kept.remove(run)
        return run

    def runs(project):
        if not module.kept:
            raise ValueError(f"Project '{project}' does not exist")
        return list(module.kept)
    module.init, module.Api = init, lambda: types.SimpleNamespace(runs=runs)
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_a_run_may_be_continued_with_trackers_and_without(base, trackio):
    """Started without, continued from its middle with, and again without TensorBoard; its event files are as
    metrics.jsonl was, and trackio has one run, as it is."""
    pytest.importorskip("tensorboard")
    folder = base / "runs" / "r"
    train = lambda *flags: tango_rl.main(parse(tango_rl, rl_flags("--run", "r", "--recipe", "grpo", *flags)))
    train("--num-steps", "2", "--save-every", "1")
    assert not (folder / "tensorboard").exists()
    assert json.loads((folder / "config.json").read_text())["version"] == __version__
    train("--num-steps", "3", "--save-every", "1", "--resume-from-step", "1", "--tensorboard", "--trackio")
    events = drawn(folder)
    assert [step for step, _ in events["gen/reward"]] == [0, 1, 2]
    assert events == logged(folder) == trackio.kept[0].shown
    train("--num-steps", "4", "--resume-from-step", "auto", "--trackio")
    assert len(logged(folder)["gen/reward"]) == 4 and drawn(folder) == events
    assert [(run.name, run.shown) for run in trackio.kept] == [("runs/r", logged(folder))]
    assert trackio.kept[0].config["args"]["recipe"] == "grpo"


def test_a_run_of_trackio_takes_the_place_of_what_it_showed_before_alone(trackio, monkeypatch):
    """Not that of a run of its name in another base directory. What does not start is refused."""
    for started in ("monday", "tuesday", "monday"):
        start_trackio("runs/r", {"started": started})
    start_trackio("runs/other", {"started": "monday"})
    assert [(run.name, run.config["started"]) for run in trackio.kept] == [
        ("runs/r", "tuesday"), ("runs/r", "monday"), ("runs/other", "monday")]
    monkeypatch.setattr(trackio, "init", lambda *_, **options: refuse("no login"))
    with pytest.raises(BadInput, match="--trackio: it does not start: no login"):
        start_trackio("runs/r", {"started": "monday"})


def refuse(text: str):
    raise ValueError(text)


def test_sft_writes_event_files_beside_its_checkpoints(base):
    pytest.importorskip("tensorboard")
    model = ["--role", "generator", "--model-tag", "new", "--depth", "2", "--n-embd", "64", "--n-head", "2",
             "--sequence-len", "128", "--device-type", "cpu", "--num-steps", "2"]
    chat_sft.main(parse(chat_sft, [*TASK_FLAGS, *model, "--tensorboard"]))
    folder = base / "chatsft_checkpoints" / "new"
    assert [step for step, _ in drawn(folder)["loss"]] == [0, 1] and drawn(folder) == logged(folder)


@pytest.mark.parametrize("script, flags", [(tango_rl, RL_FLAGS), (chat_sft, []), (base_train, []), (tok_train, [])])
def test_a_tracker_without_its_package_is_refused(capsys, monkeypatch, tmp_path, script, flags):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for name in ("tensorboard", "torch.utils.tensorboard", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    for tracker in ("tensorboard", "trackio"):
        with pytest.raises(SystemExit, match="2"):
            script_main(script.main, script.make_parser if script is tango_rl else script.make_parser(),
                        [*flags, f"--{tracker}"])
        assert re.fullmatch(f"error: --{tracker}: .*`pip install {tracker}`\n", capsys.readouterr().err)
    assert os.listdir(tmp_path) == []


def test_the_commit_is_that_of_a_checkout_and_of_no_repository_around_it(monkeypatch, tmp_path):
    git = lambda *words: subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=tmp_path,
                                        capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "run.py").touch()
    monkeypatch.setattr("nanochat.storage.run.__file__", str(tmp_path / "nanochat" / "run.py"))
    assert describe_versions()["commit"] is None
    git("init")
    git("commit", "--allow-empty", "-m", "another project")
    assert describe_versions()["commit"] is None
    git("add", ".")
    git("commit", "-m", "a checkout")
    commit = git("rev-parse", "HEAD")
    assert describe_versions()["commit"] == commit
    (tmp_path / "nanochat" / "run.py").write_text("edited")
    assert describe_versions()["commit"] == f"{commit}-dirty"


def test_the_size_of_the_process_is_what_it_holds(monkeypatch, tmp_path):
    before = process_size()
    if before["resident_gb"] is None:
        pytest.skip("no /proc")
    block, files = mmap.mmap(-1, 2 * 10 ** 8), [open(tmp_path / str(i), "w") for i in range(3)]
    for start in range(0, len(block), 10 ** 6):  # pages of its own, where freed memory would serve an array
        block[start: start + 10 ** 6] = b"x" * 10 ** 6
    held = process_size()
    assert held["open_files"] == before["open_files"] + 3
    assert held["resident_gb"] - before["resident_gb"] == pytest.approx(len(block) / 1e9, rel=0.1)
    for f in files:
        f.close()
    assert process_size()["open_files"] == before["open_files"]

    def missing(*_):
        raise FileNotFoundError
    monkeypatch.setattr(os, "listdir", missing)
    assert process_size() == {"resident_gb": None, "open_files": None}


def test_products_of_many_shapes_leave_no_memory_after(monkeypatch):
    """oneDNN keeps a plan for each shape; without a bound, half a GB of them."""
    names = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    common.init_device("cpu")
    assert all(0 < int(os.environ[name]) <= 64 for name in names)


def refused(capsys, work, flags=(), code=2, **options) -> str:
    """A script that does this work ends with the code; its line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    with pytest.raises(SystemExit) as stop:
        script_main(lambda args: work(), parser, list(flags), **options)
    out, err = capsys.readouterr()
    assert stop.value.code == code and not out and err.count("\n") == 1
    return err


def fail(text: str):
    raise BadInput(text)


def interrupted():
    raise KeyboardInterrupt


def test_what_ends_a_script_is_one_line(capsys, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for work, code, line in (
            (lambda: torch.empty(10 ** 15), 1, "stopped: there is not enough memory: .*"),
            (lambda: [0] * 10 ** 15, 1, "stopped: there is not enough memory:"),
            (lambda: open("/"), 2, "error: /: Is a directory"),
            (lambda: open("/dev/null/x"), 2, "error: /dev/null/x: Not a directory"),
            (lambda: open(tmp_path / "loop"), 2, f"error: {tmp_path}/loop: Too many levels of symbolic links"),
            (interrupted, 130, "stopped by Ctrl-C")):
        assert re.fullmatch(line + "\n", refused(capsys, work, code=code))
    assert refused(capsys, lambda: fail("\033[31ma\nb\u202e\u200fc")) == "error: ?[31ma b??c\n"
    for value, words in (("1e31", "must be from -1e+30 to 1e+30"), ("-1e308", "must be from -1e+30"),
                         ("inf", "inf: must be from")):
        assert words in refused(capsys, print, [f"--lr={value}"])


def shout(args):
    print(sys.stdin.read() * 10 ** 5, flush=True)
    print("error", file=sys.stderr, flush=True)


def as_script(folder, main, options: dict, closed: str, out: str) -> None:
    """The rest of this process is a script that main is, with the streams of a new process."""
    code, (read, unread) = 120, os.pipe()
    os.close(read)
    stdout = {"full": "/dev/full", "unread": unread}.get(out, folder / "out")
    for fd, (name, mode, file) in enumerate((("stdin", "r", folder / "in"), ("stdout", "w", stdout),
                                             ("stderr", "w", folder / "err"))):
        if str(fd) in closed:
            os.close(fd)
            setattr(sys, name, None)
        else:
            with open(file, mode) as f:
                os.dup2(f.fileno(), fd)
            setattr(sys, name, open(fd, mode, encoding="latin-1" if out == "latin-1" else None, closefd=False))
    try:
        script_main(main, argparse.ArgumentParser(), [], **options)
        sys.stdout.flush()  # as Python does in the end
        code = 0
    except SystemExit as stop:
        sys.stdout.flush()
        code = stop.code
    finally:
        os._exit(code)


CLOSED = "WARNING: nothing more is shown: stdout: I/O operation on closed file.\n"
LOST = "WARNING: nothing more is shown: stdout: No space left on device\n"
SHOWN = {"is_shown": True}  # a script that is run for what it prints
full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="is Linux's")


@pytest.mark.parametrize("main, options, closed, out, code, printed, err", [
    (lambda args: common.print0("\u20ac\udcff", "x"), {}, "", "latin-1", 0, "\\u20ac? x\n", ""),
    (lambda args: sys.stdout.close() or common.print0("x"), {}, "", "", 0, "", CLOSED),
    pytest.param(lambda args: print("x", flush=True), {}, "", "full", 1, None,
                 "stopped: the output cannot be written: No space left on device\n", marks=full),
    pytest.param(lambda args: common.print0("x"), {}, "", "full", 0, None, LOST, marks=full),
    pytest.param(lambda args: common.print0("x"), SHOWN, "", "full", 1, None, LOST, marks=full),
    (shout, {}, "1", "", 0, None, "error\n"), (shout, {}, "012", "", 0, None, None),
    (shout, {}, "", "unread", 141, None, "")], ids=range(8))
def test_what_a_script_prints_may_be_lost_and_its_streams_be_closed(tmp_path, main, options, closed, out, code,
                                                                    printed, err):
    """And it ends quietly when nobody reads on."""
    (tmp_path / "in").write_text("text")
    if not (child := os.fork()):
        as_script(tmp_path, main, options, closed, out)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    for name, text in (("out", printed), ("err", err)):
        assert text is None or (tmp_path / name).read_text() == text


@pytest.mark.parametrize("env, words", [
    ({"RANK": "x"}, "RANK=x: must be a number"), ({"WORLD_SIZE": ""}, "WORLD_SIZE=: must be a number"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: several ranks are started with torchrun"),
    ({"RANK": "1"}, "RANK=1: must be below WORLD_SIZE=1"),
    ({"NANOCHAT_GRADING_WORKERS": "-1"}, "NANOCHAT_GRADING_WORKERS=-1: must be a number"),
    ({"NANOCHAT_GRADING_WORKERS": "00"}, "NANOCHAT_GRADING_WORKERS=00: must be at least 1"),
    ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: must be at most 65535"),
    ({"WORLD_SIZE": "9" * 5000}, f"WORLD_SIZE={'9' * 100}: must be a number"),
])
def test_a_rank_that_cannot_be_is_refused(monkeypatch, capsys, env, words):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    sets = "" if "NANOCHAT" in words else "torchrun sets it, or "
    assert refused(capsys, print) == f"error: the environment has {words}; {sets}unset it\n"


def test_a_file_that_another_process_is_writing_is_left_to_it(tmp_path):
    """What a killed one left is written over; one that was renamed before it was locked is not written to."""
    path, half = tmp_path / "file", tmp_path / "file.tmp"
    with whole_file(str(path)) as first:
        first.write("the first one's")
        first.flush()
        with pytest.raises(CannotWrite, match=f"{path} cannot be written: another process"), whole_file(str(path)):
            pass
    assert os.listdir(tmp_path) == ["file"] and path.read_text() == "the first one's"
    half.write_text("longer than what comes")
    with whole_file(str(path), "wb") as f:
        f.write(b"short")
    assert os.listdir(tmp_path) == ["file"] and path.read_text() == "short"
    half.write_text("whole")
    with open(half, "r+") as f:
        os.replace(half, path)
        assert not is_alone(f.fileno(), str(half))
        half.write_text("the next one")
        assert not is_alone(f.fileno(), str(half)) and is_alone(f.fileno(), str(path))


def test_a_run_takes_its_lock_again_or_stops(tmp_path):
    run = Run("r", torch.device("cpu"), 0, 1, str(tmp_path), lock=lock_run(str(tmp_path)))
    run.log({"step": 0})
    os.remove(tmp_path / "lock")
    run.log({"step": 1})
    with pytest.raises(BadInput, match="another process is at work on this run"):
        lock_run(str(tmp_path))
    os.remove(tmp_path / "lock")
    other = lock_run(str(tmp_path))
    with pytest.raises(BadInput, match="another process is at work on this run"):
        run.log({"step": 2})
    other.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_forked_process_neither_holds_a_runs_lock_nor_goes_on_with_it(tmp_path):
    """One that stays after its parent; one that comes back into the run."""
    run, (told, tell) = Run("r", torch.device("cpu"), 0, 1, str(tmp_path), lock=lock_run(str(tmp_path))), os.pipe()
    (ends, end), child = os.pipe(), os.fork()
    if not child:
        os.close(end)
        try:
            run.log({"step": 0})
        except BadInput as error:
            os.write(tell, str(error).encode())
        os.read(ends, 1)  # until the parent is through
        os._exit(0)
    os.close(ends)
    said = os.read(told, 1000).decode()
    assert said.startswith(f"{tmp_path}: a forked process went on with this run")
    with pytest.raises(BadInput, match="another process is at work on this run"):
        lock_run(str(tmp_path))
    run.log({"step": 0})
    run.finish()
    lock_run(str(tmp_path)).close()
    os.close(end)
    os.waitpid(child, 0)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_process_reads_its_base_directory_once(tmp_path, monkeypatch):
    """Whatever a recipe does later; conftest has taken that off for all other tests."""
    spec = importlib.util.spec_from_file_location("files_again", files.__file__)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "base")
    assert module.path_of("runs", "r") == str(tmp_path / "base" / "runs" / "r")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/other")
    monkeypatch.chdir("/")
    assert module.path_of("runs", "r") == str(tmp_path / "base" / "runs" / "r")


def test_a_rank_whose_torchrun_has_ended_before_it_does_not_wait_for_it(monkeypatch):
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as store:
        monkeypatch.setenv("MASTER_PORT", str(store.getsockname()[1]))
        common.check_agent()
    with pytest.raises(StopRequested, match="torchrun, which started this rank, does not answer: Connection refused"):
        common.check_agent()


class Failing:
    """What a run is shown to, and whose process was killed."""
    calls = 0

    def log(self, record, step):
        Failing.calls += 1
        raise ConnectionResetError("Connection lost")

    def add_scalar(self, *_):
        raise OSError(28, "No space left on device")


def test_a_tracker_that_fails_is_told_once_and_stops_no_run(tmp_path, capsys, monkeypatch):
    """And a mode that wandb does not know is refused."""
    runs = [Run("r", torch.device("cpu"), rank, 2, str(tmp_path), wandb=Failing(), trackio=Failing())
            for rank in range(2)]
    for step in range(3):
        for run in runs:
            run.log({"step": step})
    runs[0].finish()
    assert capsys.readouterr().out == "".join(
        f"WARNING: {name} is told nothing more: ConnectionResetError: Connection lost\n"
        for name in ("wandb", "trackio"))
    assert Failing.calls == 2 and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    monkeypatch.setenv("WANDB_MODE", "off")
    with pytest.raises(BadInput, match="WANDB_MODE=off: must be one of online, offline"):
        uses_wandb("r")
