"""
The judge of the speedrun boards: what an attempt is given, what fails it, and that page and table agree.

    python -m pytest tests/test_record.py
"""
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_report import make_run

from nanochat.cli import script_main
from nanochat.common import BadInput
from nanochat.gpt import GPTConfig, new_model

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("record_judge", ROOT / "dev" / "speedrun.py")
judge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(judge)

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are given on Linux")
ENTRIES = sorted((ROOT / "dev" / "speedrun").glob("*.sh"))


def attempt(folder: Path, body: str, minutes: float = 1) -> tuple[float, float]:
    """Runs a script of this text as an attempt."""
    folder.mkdir(exist_ok=True)
    (folder / "entry.sh").write_text(body)
    return judge.run_entry(folder / "entry.sh", 7, sorted(os.sched_getaffinity(0))[:1], folder, minutes)


def row(board: str = "minutes", figure: str = "90.00", **others) -> dict[str, str]:
    known = {"date": "2026-01-02", "board": board, "entry": "dev/speedrun/main_job.sh", "command": "c", "commit": "abc",
             "machine": "m", "seconds": "91.0 90.0 89.0", "before": "" if board == "minutes" else "1.00 2.00 3.00",
             "after": "90.00 95.25 99.00", "figure": figure}
    return {**known, **others}


def called(*argv: str) -> int:
    """The exit code of the command line."""
    try:
        script_main(judge.main, judge.make_parser(), list(argv))
    except SystemExit as stop:
        return stop.code
    return 0


# What an attempt is given

def test_an_attempt_gets_its_seed_and_empty_folders_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    attempt(tmp_path, 'env > "$NANOCHAT_BASE_DIR/env"; ls -A "$HOME" "$TMPDIR" > "$NANOCHAT_BASE_DIR/listed"; pwd')
    found = dict(line.split("=", 1) for line in (tmp_path / "base" / "env").read_text().splitlines() if "=" in line)
    assert found.keys() - {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"} == {
        "PATH", "LANG", "HOME", "TMPDIR", "NANOCHAT_BASE_DIR", "PYTHONPATH", "WANDB_MODE", "SEED"}
    assert found["SEED"] == "7" and found["NANOCHAT_BASE_DIR"] == str(tmp_path / "base")
    assert found["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    listed = (tmp_path / "base" / "listed").read_text().split()
    assert listed == [f"{tmp_path}/home:", f"{tmp_path}/tmp:"]
    assert (tmp_path / "log.txt").read_text() == f"{ROOT}\n"


def test_an_attempt_runs_on_the_cores_that_it_is_given(tmp_path):
    core = sorted(os.sched_getaffinity(0))[-1]
    tell = "import os; print(os.sched_getaffinity(0))"
    (tmp_path / "entry.sh").write_text(f'python -c "{tell}" > "$NANOCHAT_BASE_DIR/on"')
    judge.run_entry(tmp_path / "entry.sh", 7, [core], tmp_path, 1)
    assert (tmp_path / "base" / "on").read_text() == f"{{{core}}}\n"


def test_wall_and_cpu_seconds_are_the_attempts(tmp_path):
    seconds, cpu = attempt(tmp_path, "sleep 0.3")
    assert 0.3 <= seconds < 5 and cpu < 0.3
    seconds, cpu = attempt(tmp_path, 'python -c "import time\nwhile time.process_time() < 0.3: pass"')
    assert cpu >= 0.3


# What fails it

@pytest.mark.parametrize(("body", "reason"), [
    ("echo one; echo it is late; exit 3", "ends with exit code 3: it is late"),
    ("exit 1", "exit code 1: it printed nothing"),
    ("no_such_command", "exit code 127: .*no_such_command"),
    ("sleep 60", "has not ended after 0.005 minutes")])
def test_an_attempt_that_does_not_end_well_has_failed(tmp_path, body, reason):
    started = time.perf_counter()
    with pytest.raises(judge.Failed, match=reason):
        attempt(tmp_path, body, minutes=0.005)
    assert time.perf_counter() - started < 10


def test_what_an_attempt_leaves_running_is_ended(tmp_path):
    attempt(tmp_path, 'sleep 60 & echo $! > "$NANOCHAT_BASE_DIR/pid"')
    pid = (tmp_path / "base" / "pid").read_text().strip()
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("it still runs")


def test_more_cpu_than_the_cores_have_fails_an_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "MOST_CPU", -10.0)  # a second is allowed for rounding
    with pytest.raises(judge.Failed, match="more than 1 cores"):
        attempt(tmp_path, "sleep 0.3")


def test_an_attempt_that_makes_nothing_has_failed(tmp_path):
    with pytest.raises(judge.Failed, match="leaves no rl checkpoint speedrun-gen"):
        judge.score_on_chain(tmp_path, 0)
    (tmp_path / "chatrl_checkpoints" / "speedrun-gen").mkdir(parents=True)
    with pytest.raises(judge.Failed, match="leaves no rl checkpoint"):
        judge.score_on_words(tmp_path, 0)


def test_a_generator_is_at_most_as_large_as_the_main_jobs(tmp_path):
    """The last step counts. The bound is the shape of runs/runcpu.sh with the tokenizer's 265 ids."""
    main_job = GPTConfig(vocab_size=265, n_layer=4, n_head=4, n_kv_head=4, n_embd=128)
    model = new_model(main_job, 0, "cpu", torch.float32)
    assert sum(weights.numel() for weights in model.state_dict().values()) == judge.MOST_PARAMETERS
    folder = tmp_path / "chatrl_checkpoints" / "speedrun-gen"
    folder.mkdir(parents=True)
    torch.save({"w": torch.zeros(3)}, folder / "model_000002.pt")
    torch.save({"w": torch.zeros(950_402), "b": torch.zeros(1)}, folder / "model_000010.pt")
    with pytest.raises(judge.Failed, match="has 950,403 parameters; 950,402 are allowed"):
        judge.score_on_chain(tmp_path, 0)


def test_a_record_is_of_one_machine_with_the_last_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(judge.read_rows, "__defaults__", (tmp_path / "speedrun.csv",))
    judge.write_rows([row()], tmp_path / "speedrun.csv")
    judge.add_record(row(figure="50.00", machine="another"), [])
    assert "no record: the last one is of another machine (m)" in capsys.readouterr().out


def test_a_checkpoint_that_is_none_fails_an_attempt(tmp_path):
    folder = tmp_path / "chatrl_checkpoints" / "speedrun-gen"
    folder.mkdir(parents=True)
    (folder / "model_000002.pt").write_bytes(b"no checkpoint")
    with pytest.raises(judge.Failed, match="model_000002.pt"):
        judge.score_on_chain(tmp_path, 0)


def test_a_checkpoint_that_cannot_be_read_fails_an_attempt_in_one_line(tmp_path):
    folder = tmp_path / "base" / "chatrl_checkpoints" / "speedrun-gen"
    folder.mkdir(parents=True)
    torch.save({"w": torch.zeros(3)}, folder / "model_000002.pt")
    with pytest.raises(judge.Failed, match="cannot be scored: error: .*"):
        judge.score_on_chain(tmp_path / "base", 0)


def test_every_flag_of_the_chain_is_given_at_its_default():
    flags = judge.chain_flags()
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given["--chain-share"] == "0.35" and given["--chain-answer"] == "all" and given["--chain-max-steps"] == "8"
    text = (ROOT / "tasks" / "chain.py").read_text()
    assert given.keys() == set(re.findall(r'add_argument\("(--chain-[a-z-]+)"', text))


# From the script to the row

def test_the_pair_that_comes_with_the_project_passes_and_its_start_does_not(tmp_path, capsys, monkeypatch):
    """Its generator after RL solves 96.5% of seed 0, before it 14.5%."""
    pair, tag = ROOT / "nanochat" / "pair", "chatrl_checkpoints/speedrun-gen"
    script = f'set -e; cd {pair}; cp -r tokenizer "$NANOCHAT_BASE_DIR"; mkdir "$NANOCHAT_BASE_DIR/chatrl_checkpoints"\n'
    (tmp_path / "after.sh").write_text(f'{script}cp -r chatrl_checkpoints/pair-gen "$NANOCHAT_BASE_DIR/{tag}"')
    (tmp_path / "before.sh").write_text(f'{script}cp -r chatsft_checkpoints/pair "$NANOCHAT_BASE_DIR/{tag}"')
    assert called(str(tmp_path / "after.sh"), "--seeds", "0") == 0
    printed = capsys.readouterr().out
    assert float(re.search(r"^seed 0: .* s, .* s of CPU, (.*)%$", printed, re.MULTILINE)[1]) > 95
    assert re.search(rf"^\d{{4}}-\d\d-\d\d,minutes,{tmp_path}/after.sh,", printed, re.MULTILINE)
    assert called(str(tmp_path / "before.sh"), "--seeds", "0") == 1
    printed = capsys.readouterr().out
    assert re.search(r"^seed 0: failed: its generator solves 1\d\.\d\d% of the held-out problems; 90% are wanted$",
                     printed, re.MULTILINE)
    assert "1 of 1 seeds failed: no entry" in printed and "median" not in printed


def test_a_row_has_the_middle_of_the_seeds():
    results = [judge.Result(s, 1.0, None, a) for s, a in ((61.26, 90.0), (59.0, 99.5), (100.0, 95.25))]
    made = judge.row_of("minutes", "dev/speedrun/main_job.sh", results, "2026-01-02")
    assert list(made) == judge.COLUMNS
    assert (made["seconds"], made["before"], made["after"]) == ("61.3 59.0 100.0", "", "90.00 99.50 95.25")
    assert made["figure"] == "61.26" and made["command"] == "python dev/speedrun.py dev/speedrun/main_job.sh"
    gains = [judge.Result(1.0, 1.0, b, a) for b, a in ((0.5, 2.0), (1.0, 1.0))]
    made = judge.row_of("points", "x.sh", gains, "2026-01-02")
    assert made["figure"] == "0.75" and made["before"] == "0.50 1.00" and made["command"].endswith("--board points")


def test_only_what_beats_the_last_record_is_added(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(judge, "TABLE", tmp_path / "speedrun.csv")
    monkeypatch.setattr(judge, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(judge, "CURVES", tmp_path / "curves")
    monkeypatch.setattr(judge.read_rows, "__defaults__", (judge.TABLE,))
    monkeypatch.setattr(judge.write_rows, "__defaults__", (judge.TABLE,))
    judge.PAGE.write_text("".join(f"<!-- board {name} -->\n<!-- end of it -->\n" for name in judge.BOARDS))
    judge.write_rows([])
    for board, figures in (("minutes", ("90.00", "91.00", "89.99", "89.99")), ("points", ("1.00", "1.99", "2.00"))):
        for figure in figures:
            judge.add_record(row(board, figure), [{"seed": 0, "figure": figure}] if board == "minutes" else [])
    assert [r["figure"] for r in judge.read_rows()] == ["90.00", "89.99", "1.00", "2.00"]
    assert capsys.readouterr().out.count("no record") == 3
    assert judge.PAGE.read_text() == judge.with_boards(judge.PAGE.read_text(), judge.read_rows())
    assert "| 2 | 1.50 | 91 90 89 | 90.0 95.2 99.0 |" in judge.PAGE.read_text()
    curves, = judge.CURVES.iterdir()
    assert curves.read_text().split() == ["seed,figure", "0,89.99"]  # of the record, not of what came after it
    assert f"([curves](curves/{curves.name}))" in judge.PAGE.read_text()


def test_the_evaluations_of_an_attempt_s_run_are_its_curves(tmp_path):
    assert judge.points_of(tmp_path, "dev/speedrun/x.sh", 3) == []
    make_run(tmp_path, "speedrun", 9, [0.25, 0.5])
    points = judge.points_of(tmp_path, "dev/speedrun/x.sh", 3)
    assert {(p["arm"], p["seed"]) for p in points} == {("x", 3)}
    assert [(p["step"], p["value"]) for p in points if p["metric"] == "gen/pass1_in"] == [(0, 0.25), (10, 0.5)]


# Bad input

@pytest.mark.parametrize(("flags", "said"), [
    (["no/such.sh"], "no/such.sh: there is no such file"),
    ([], "name a shell script"),
    (["tests"], "tests: there is no such file"),
    (["x.sh", "--board", "hours"], "hours"),
    (["x.sh", "--seeds", "-1"], "--seeds -1: must be at least 0"),
    (["x.sh", "--cores", "3", "3"], "--cores 3 3: must be 2 different ones"),
    (["x.sh", "--cores", "0", "9999"], "--cores 0 9999: must be 2 different ones"),
    ([str(ROOT / "runs" / "runcpu.sh"), "--record", "--seeds", "1"], "--record: is of the board's seeds 0 1 2 3 4"),
    ([str(ROOT / "runs" / "runcpu.sh"), "--record"], "must be in dev/speedrun")])
def test_bad_input_is_one_line_and_exit_code_2(flags, said, capsys):
    assert called(*flags) == 2
    line, = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and said in line


def test_a_record_needs_a_clean_checkout(tmp_path, monkeypatch):
    run = lambda *words: subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    run("init", "-q")
    run("-c", "user.name=x", "-c", "user.email=x@x", "commit", "--allow-empty", "-qm", "first")
    monkeypatch.setattr(judge, "ROOT", tmp_path)
    assert re.fullmatch("[0-9a-f]{7,}", judge.commit())
    entry = tmp_path / "dev" / "speedrun" / "x.sh"
    entry.parent.mkdir(parents=True)
    entry.touch()
    run("add", ".")
    args = judge.make_parser().parse_args([str(entry), "--record"])
    with pytest.raises(BadInput, match="a record needs its commit"):
        judge.check_record(args, entry)


def test_a_damaged_table_is_told(tmp_path):
    path = tmp_path / "speedrun.csv"
    path.write_text("date,board\n")
    with pytest.raises(BadInput, match="its columns must be"):
        judge.read_rows(path)
    head = ",".join(judge.COLUMNS)
    for line in ("2026-01-02,minutes", "2026-01-02,hours,,,,,,,,", ",".join(["minutes"] * 11)):
        path.write_text(f"{head}\n{line}\n")
        with pytest.raises(BadInput, match="line 2"):
            judge.read_rows(path)
    with pytest.raises(BadInput, match="has no <!-- board minutes -->"):
        judge.with_boards("nothing", [])


# The page

def test_the_page_has_the_boards_of_the_table():
    text = judge.PAGE.read_text(encoding="utf-8")
    assert judge.with_boards(text, judge.read_rows()) == text


def test_each_record_beats_the_one_before_on_all_seeds_of_its_board():
    for name, board in judge.BOARDS.items():
        rows = [r for r in judge.read_rows() if r["board"] == name]
        figures = [float(r["figure"]) for r in rows]
        assert all(board.is_better(new, old) for old, new in zip(figures, figures[1:], strict=False))
        for r in rows:
            seconds, before, after = (list(map(float, r[column].split())) for column in ("seconds", "before", "after"))
            assert len(seconds) == len(after) == len(board.seeds) and len(before) in (0, len(after))
            results = [judge.Result(s, 0.0, b, a) for s, b, a in
                       zip(seconds, before or [None] * len(after), after, strict=True)]
            assert abs(board.middle([board.figure(x) for x in results]) - float(r["figure"])) < 0.06
            assert max(seconds) <= 60 * board.minutes and (name != "minutes" or min(after) >= judge.WANTED)
            assert (ROOT / r["entry"]) in ENTRIES and not r["commit"].endswith("-dirty")


def test_entries_are_shell_with_a_title_and_rules_are_ten_lines():
    assert ENTRIES
    for path in ENTRIES:
        done = subprocess.run([shutil.which("bash"), "-n", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert judge.title_of(str(path.relative_to(ROOT))), path
    rules = judge.PAGE.read_text().partition("### Rules")[2].partition("\n#")[0]
    assert re.findall(r"^([0-9]+)\. ", rules, re.MULTILINE) == [str(n) for n in range(1, 11)]
