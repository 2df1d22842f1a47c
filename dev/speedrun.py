"""
The judge of the boards of dev/SPEEDRUN.md: starts an attempt from nothing for each seed, on two cores, and scores what
it leaves. Not runs/speedrun.sh, which is a pipeline.

    python dev/speedrun.py dev/speedrun/main_job.sh               # five seeds, and the row of the board
    python dev/speedrun.py my/attempt.sh --seeds 20               # a try, on a seed for tuning
    python dev/speedrun.py my/attempt.sh --board points           # the other board
    python dev/speedrun.py --page                                 # the page's boards, from dev/speedrun.csv

An attempt is a shell script. It is run in the project's root, with SEED and NANOCHAT_BASE_DIR, an empty folder (on the
board `points` with the imported model smollm2 in it), and ends with a generator: the rl checkpoint speedrun-gen, as
`tango_rl --run speedrun` writes it. The exit code is 1 where a seed fails.
"""
import csv
import datetime
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from nanochat.checkpoint import load_state_dict, steps_in  # noqa: E402
from nanochat.cli import at_least, new_parser, script_main  # noqa: E402
from nanochat.common import BadInput, print0  # noqa: E402
from nanochat.hf.files import read_json  # noqa: E402
from nanochat.rl.report.report import read_run, tidy, write_csv  # noqa: E402
from tasks import task_flags  # noqa: E402

PAGE, TABLE = ROOT / "dev" / "SPEEDRUN.md", ROOT / "dev" / "speedrun.csv"
CURVES = ROOT / "dev" / "curves" / "speedrun"  # of the records
COLUMNS = ["date", "board", "entry", "command", "commit", "machine", "seconds", "before", "after", "figure"]
GENERATOR = "speedrun-gen"
NUM_CORES = 2
MOST_CPU = 1.02          # of the seconds that two cores have: more were used than was allowed
MOST_PARAMETERS = 950_402  # of a generator made from nothing: the main job's
WANTED = 90.0            # percent


class Failed(Exception):
    """Why an attempt does not count, in one line."""


class Result(NamedTuple):
    """What an attempt took and reached. before: the start's score, None where it starts from nothing; in percent."""
    seconds: float
    cpu_seconds: float
    before: float | None
    after: float


# Scores

def chain_flags() -> list[str]:
    """All flags of task chain at their defaults: a checkpoint's own do not count."""
    return [word for name, value in task_flags().items() if name.startswith("chain_")
            for word in (f"--{name.replace('_', '-')}", str(value))]


def score(base: Path, which: list[str], flags: list[str], seed: int) -> float:
    """pass@1 of a generator by scripts.chat_eval, in percent. Raises Failed."""
    out, env = base.parent / "scores.json", {**os.environ, "NANOCHAT_BASE_DIR": str(base), "PYTHONPATH": str(ROOT)}
    out.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, "-m", "scripts.chat_eval", *which, "--seed", str(seed), "--device-type",
                           "cpu", *flags, "--out", str(out)], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"it cannot be scored: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
    (of_task,) = read_json(str(out))["tasks"].values()
    (of_split,) = of_task.values()
    return 100 * of_split["pass@1"]


def left_behind(base: Path) -> Path:
    """The weights of the generator that an attempt has left. Raises Failed."""
    folder = base / "chatrl_checkpoints" / GENERATOR
    steps = steps_in(str(folder), r"model_(\d+)\.pt")
    if not steps:
        raise Failed(f"it leaves no rl checkpoint {GENERATOR}")
    return folder / f"model_{max(steps):06d}.pt"


def score_on_chain(base: Path, seed: int) -> float:
    """Greedy pass@1 on the 400 held-out problems of the main job's gen/pass1_in. Raises Failed."""
    try:
        size = sum(weights.numel() for weights in load_state_dict(str(left_behind(base))).values())
    except BadInput as error:
        raise Failed(str(error)) from None
    if size > MOST_PARAMETERS:
        raise Failed(f"its generator has {size:,} parameters; {MOST_PARAMETERS:,} are allowed")
    after = score(base, ["-i", "rl", "-g", GENERATOR],
                  ["-a", "chain", *chain_flags(), "--split", "test_in", "-x", "400", "-m", "96"], seed)
    if after < WANTED:
        raise Failed(f"its generator solves {after:.2f}% of the held-out problems; {WANTED:.0f}% are wanted")
    return after


WORDS = ["-a", "reasoning_gym", "--reasoning-gym-name", "gsm_symbolic", "--reasoning-gym-options",
         "--reasoning-gym-format", "lines", "--reasoning-gym-most-lines", "2", "--split", "test_out", "-x", "200",
         "-m", "96", "-t", "1", "-n", "2"]


def score_on_words(base: Path, seed: int) -> float:
    """pass@1 of two samples each of 200 problems, of templates that nobody trains on. Raises Failed."""
    left_behind(base)
    return score(base, ["-i", "rl", "-g", GENERATOR], WORDS, seed)


def start_on_words(base: Path, seed: int) -> float:
    return score(base, ["-i", "sft", "-g", "smollm2"], WORDS, seed)


def points_of(base: Path, entry: str, seed: int) -> list[dict]:
    """The evaluations of an attempt's run, as `report.tidy` has them; none where its own code has left no such run.
    Raises Failed."""
    folder = base / "runs" / "speedrun"
    if not (folder / "summary.json").is_file():
        return []
    try:
        run = read_run(str(folder))
    except BadInput as error:
        raise Failed(str(error)) from None
    return [{**row, "arm": Path(entry).stem, "seed": seed} for row in tidy([run])]


# Boards

class Board(NamedTuple):
    """What is measured. minutes: an attempt that takes longer has failed; after, before: the score of a base directory
    with a seed, before of the imported model that an attempt starts from, None where there is none; middle: of the
    figures of the seeds."""
    seeds: tuple[int, ...]
    minutes: float
    after: Callable
    before: Callable | None
    figure: Callable[[Result], float]
    middle: Callable
    is_better: Callable[[float, float], bool]
    unit: str


BOARDS = {
    "minutes": Board((0, 1, 2, 3, 4), 60, score_on_chain, None, lambda r: r.seconds, statistics.median,
                     lambda new, old: new < old, "s"),
    "points": Board((0, 1, 2), 30, score_on_words, start_on_words, lambda r: r.after - r.before, statistics.mean,
                    lambda new, old: new >= old + 1, "points"),
}


# Attempts

def environment(folder: Path, seed: int) -> dict[str, str]:
    """All that an attempt is told. Caches of home and of temporary files are as empty as the base directory."""
    for name in ("base", "home", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "LANG": os.environ.get("LANG", "C.UTF-8"), "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"),
            "NANOCHAT_BASE_DIR": str(folder / "base"), "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled",
            "SEED": str(seed)}


def cpu_seconds() -> float:
    """Of all children that have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_entry(entry: Path, seed: int, cores: list[int], folder: Path, minutes: float) -> tuple[float, float]:
    """Runs an attempt on these cores, with its output in log.txt. -> wall seconds, CPU seconds. Raises Failed."""
    env, used, started = environment(folder, seed), cpu_seconds(), time.perf_counter()
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(["bash", str(entry)], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log,
                                   stderr=subprocess.STDOUT, start_new_session=True,
                                   preexec_fn=lambda: os.sched_setaffinity(0, cores))
        try:
            code = process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            raise Failed(f"it has not ended after {minutes:g} minutes") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has left running
            process.wait()
    seconds, cpu = time.perf_counter() - started, cpu_seconds() - used
    if code:
        raise Failed(f"it ends with exit code {code}: {last_line(folder / 'log.txt')}")
    if cpu > MOST_CPU * len(cores) * seconds + 1:
        raise Failed(f"it used {cpu:.0f} s of CPU in {seconds:.0f} s: more than {len(cores)} cores")
    return seconds, cpu


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def judge(board: Board, entry: Path, seed: int, cores: list[int], folder: Path, start: Path | None) -> Result:
    """One attempt in an empty folder, but for the start. Raises Failed."""
    base = folder / "base"
    base.mkdir(parents=True)
    if start:
        shutil.copytree(start, base, dirs_exist_ok=True)
    before = board.before(base, seed) if board.before else None
    seconds, cpu = run_entry(entry, seed, cores, folder, board.minutes)
    return Result(seconds, cpu, before, board.after(base, seed))


def make_start(folder: Path) -> Path:
    """A base directory with the imported model, which no clock measures."""
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "runs/import_smollm2.sh", "smollm2"], cwd=ROOT, env=env, capture_output=True,
                          text=True)
    if done.returncode:
        raise BadInput(f"smollm2 cannot be imported: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
    shutil.rmtree(folder / "download", ignore_errors=True)
    return folder


# Rows of the table, and the page

def commit() -> str:
    """What is checked out, with "-dirty" where files differ from it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=ROOT, capture_output=True,
                          text=True)
    return done.stdout.strip() or "-"


def machine() -> str:
    """The model of the CPU, and how many cores there are."""
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{' '.join(found[1].split()) if found else 'CPU'} ({NUM_CORES} of {os.cpu_count()} cores)"


def shown(values: list[float | None], digits: int) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values if value is not None)


def row_of(name: str, entry: str, results: list[Result], when: str) -> dict[str, str]:
    board, flags = BOARDS[name], "" if name == "minutes" else f" --board {name}"
    return dict(zip(COLUMNS, [
        when, name, entry, f"python dev/speedrun.py {entry}{flags}", commit(), machine(),
        shown([r.seconds for r in results], 1), shown([r.before for r in results], 2),
        shown([r.after for r in results], 2), f"{board.middle([board.figure(r) for r in results]):.2f}"], strict=True))


def read_rows(path: Path = TABLE) -> list[dict[str, str]]:
    """The records, oldest first. Raises BadInput."""
    with open(path, newline="", encoding="utf-8") as f:
        reader = csv.DictReader(f)
        if reader.fieldnames != COLUMNS:
            raise BadInput(f"{path}: its columns must be {', '.join(COLUMNS)}")
        rows = list(reader)
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values() or row["board"] not in BOARDS:
            raise BadInput(f"{path}, line {number}: has not {len(COLUMNS)} columns, or a board that is none of "
                           f"{', '.join(BOARDS)}")
    return rows


def write_rows(rows: list[dict[str, str]], path: Path = TABLE) -> None:
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def title_of(entry: str) -> str:
    """What an attempt's first comment says it is. "" without one."""
    lines = (ROOT / entry).read_text(encoding="utf-8").splitlines() if (ROOT / entry).is_file() else []
    return next((line[1:].strip().rstrip(".") for line in lines if re.match("# ", line)), "")


def curves_of(entry: str) -> Path:
    return CURVES / f"{Path(entry).stem}.csv"


def board_table(name: str, rows: list[dict[str, str]]) -> str:
    """A board in Markdown, newest last."""
    if name == "minutes":
        head, line = "| # | minutes, median | seconds of seeds 0 to 4 | percent solved |", "{middle:.2f}"
    else:
        head, line = "| # | points, mean | before, seeds 0 to 2 | after |", "{middle:.2f}"
    lines = [f"{head} what | commit | date |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for number, row in enumerate((row for row in rows if row["board"] == name), 1):
        middle = float(row["figure"]) / (60 if name == "minutes" else 1)
        first = " ".join(f"{float(x):.0f}" if name == "minutes" else f"{float(x):.2f}" for x in
                         row["seconds" if name == "minutes" else "before"].split())
        after = " ".join(f"{float(x):.{1 if name == 'minutes' else 2}f}" for x in row["after"].split())
        curves = curves_of(row["entry"])
        what = f"`{Path(row['entry']).name}`: {title_of(row['entry'])}"
        what += f" ([curves]({curves.relative_to(PAGE.parent).as_posix()}))" if curves.is_file() else ""
        lines.append(f"| {number} | {line.format(middle=middle)} | {first} | {after} | {what} | {row['commit']} | "
                     f"{row['date']} |")
    return "\n".join(lines)


def with_boards(text: str, rows: list[dict[str, str]]) -> str:
    """The page with its boards as the rows have them. Raises BadInput where it lacks the marks around one."""
    for name in BOARDS:
        begin, end = f"<!-- board {name} -->\n", "<!-- end of it -->"
        before, mark, rest = text.partition(begin)
        _, end_mark, after = rest.partition(end)
        if not (mark and end_mark):
            raise BadInput(f"{PAGE}: has no {begin.strip()} and {end} after it")
        text = f"{before}{begin}{board_table(name, rows)}\n{end}{after}"
    return text


# The command line

def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("entry", nargs="?", default="", help="a shell script: the attempt")
    parser.add_argument("--board", default="minutes", choices=list(BOARDS))
    parser.add_argument("--seeds", type=at_least(0, int, 10 ** 6), nargs="+", default=[],
                        help="default: the board's; tune on others, such as 20 to 22")
    parser.add_argument("--cores", type=at_least(0, int, 10 ** 4), nargs=NUM_CORES, default=[],
                        help="two numbers; default: the first two that this process may use")
    parser.add_argument("--record", action="store_true", help="add the row to dev/speedrun.csv and to the page")
    parser.add_argument("--page", action="store_true", help="judge nothing: write the page's boards anew")
    return parser


def cores_of(asked: list[int]) -> list[int]:
    """The two cores to run on. Raises BadInput."""
    allowed = sorted(os.sched_getaffinity(0))
    cores = asked or allowed[:NUM_CORES]
    if len(set(cores)) < NUM_CORES or not set(cores) <= set(allowed):
        raise BadInput(f"--cores {' '.join(map(str, cores))}: must be {NUM_CORES} different ones of "
                       f"{' '.join(map(str, allowed))}")
    return cores


def check_record(args, entry: Path) -> None:
    """Raises BadInput for what cannot become a row of the board."""
    if tuple(args.seeds) not in ((), BOARDS[args.board].seeds):
        raise BadInput(f"--record: is of the board's seeds {' '.join(map(str, BOARDS[args.board].seeds))}")
    if ROOT / "dev" / "speedrun" not in entry.parents:
        raise BadInput(f"--record: {args.entry} must be in dev/speedrun, and committed")
    if commit().endswith("-dirty"):
        raise BadInput("--record: files are not as they were committed: a record needs its commit")
    read_rows()
    with_boards(PAGE.read_text(encoding="utf-8"), [])


def run(args) -> None:
    """Judges an attempt on each seed."""
    entry, board, cores = Path(args.entry).resolve(), BOARDS[args.board], cores_of(args.cores)
    if not entry.is_file():
        raise BadInput(f"{args.entry}: there is no such file" if args.entry else "name a shell script: the attempt")
    if args.record:
        check_record(args, entry)
    name = str(entry.relative_to(ROOT)) if ROOT in entry.parents else str(entry)
    results, points, failures = [], [], 0
    seeds = args.seeds or board.seeds
    print0(f"{name} on cores {cores[0]} and {cores[1]}, {machine()}, {commit()}")
    with tempfile.TemporaryDirectory(prefix="speedrun-") as folder:
        start = make_start(Path(folder) / "start") if board.before else None
        for seed in seeds:
            try:
                results.append(judge(board, entry, seed, cores, Path(folder) / f"seed-{seed}", start))
                points += points_of(Path(folder) / f"seed-{seed}" / "base", name, seed)
            except Failed as failure:
                failures += 1
                print0(f"seed {seed}: failed: {failure}")
                continue
            finally:
                shutil.rmtree(Path(folder) / f"seed-{seed}", ignore_errors=True)
            done = results[-1]
            start_words = "" if done.before is None else f"{done.before:.2f} -> "
            print0(f"seed {seed}: {done.seconds:.1f} s, {done.cpu_seconds:.1f} s of CPU, {start_words}"
                   f"{done.after:.2f}%")
    if failures:
        print0(f"{failures} of {len(seeds)} seeds failed: no entry")
        sys.exit(1)
    row = row_of(args.board, name, results, datetime.date.today().isoformat())
    print0(f"{board.middle.__name__} {row['figure']} {board.unit}")
    csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n").writerow(row)
    if args.record:
        add_record(row, points)


def add_record(row: dict[str, str], points: list[dict]) -> None:
    """Adds a row to the table and the page, and its curves, if it is better than the last of its board."""
    rows, board = read_rows(), BOARDS[row["board"]]
    same = [old for old in rows if old["board"] == row["board"]]
    earlier = [float(old["figure"]) for old in same]
    if same and same[-1]["machine"] != row["machine"]:
        print0(f"no record: the last one is of another machine ({same[-1]['machine']}), on which both must run")
        return
    if earlier and not board.is_better(float(row["figure"]), earlier[-1]):
        print0(f"no record: the last one is {earlier[-1]} {board.unit}")
        return
    if points:
        CURVES.mkdir(parents=True, exist_ok=True)
        write_csv(points, str(curves_of(row["entry"])))
    write_rows([*rows, row])
    write_page()


def write_page() -> None:
    text = with_boards(PAGE.read_text(encoding="utf-8"), read_rows())
    PAGE.write_text(text, encoding="utf-8")
    print0(f"{PAGE} has the boards of {TABLE}")


def main(args) -> None:
    if args.page:
        write_page()
    else:
        run(args)


if __name__ == "__main__":
    script_main(main, make_parser(), is_shown=True)
