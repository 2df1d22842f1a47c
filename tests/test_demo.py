"""scripts/demo.py: what is printed of solutions and verdicts before and after RL, against the task's own check."""
import json
import os
import re
import shutil

import pytest
import torch
from conftest import TASK_FLAGS, crafted_model, parse, rl_flags
from test_chat import force_picks

from nanochat.checkpoint import load_model
from nanochat.cli import script_main
from nanochat.rl.play.sampling import Sampler
from nanochat.tokenizer import Tokenizer
from scripts import demo, tango_rl
from tasks import make_task

ANSI = re.compile("\033\\[[0-9;]*m")
WORD = {True: "right", False: "wrong", None: "-"}
SETTINGS = ["--seed", "3", "--chain-answer", "final", "--eval-examples", "24"]
FLAGS = {"r": ["--num-steps", "1", "--warmup-steps", "1"], "grpo": ["--num-steps", "2", "--recipe", "grpo"]}


@pytest.fixture(scope="module")
def finished(sft_base, tmp_path_factory):
    """A base directory with two runs: r of tango, and after it grpo, which has no verifier. What RL made of the models
    is replaced by other crafted ones, so that both times differ whatever was learned."""
    base = tmp_path_factory.mktemp("finished") / "base"
    shutil.copytree(sft_base, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        for run, flags in FLAGS.items():
            tango_rl.main(parse(tango_rl, rl_flags("--run", run, *SETTINGS, *flags)))
    os.utime(base / "runs" / "grpo" / "summary.json", (1, 1))
    tokenizer = Tokenizer.load(str(base / "tokenizer"))
    for tag, role in (("r-gen", "generator"), ("r-ver", "verifier"), ("grpo-gen", "generator")):
        path = base / "chatrl_checkpoints" / tag / "model_000002.pt"
        torch.save(crafted_model(tokenizer, role, 100).state_dict(), path)
    return base


@pytest.fixture
def base(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


def show(capsys, *flags: str) -> list[str]:
    """The lines that the script prints."""
    capsys.readouterr()
    script_main(demo.main, demo.make_parser(), [*flags, "--device-type", "cpu"])
    return capsys.readouterr().out.splitlines()


def refused(capsys, *flags: str) -> str:
    """The one line of a script that must refuse its input."""
    with pytest.raises(SystemExit) as stop:
        show(capsys, *flags)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert "problem 1" not in printed.out
    return printed.err


def load(stage: str, tag: str):
    return load_model(stage, tag, torch.device("cpu"), torch.float32, 200 if stage == "sft" else 2)[0]


def task():
    """The runs' task."""
    return make_task(parse(tango_rl, [*TASK_FLAGS, *SETTINGS]))


def change_args(base, run: str, **changes) -> None:
    """Changes what a run says it was made with."""
    path = base / "runs" / run / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "args": config["args"] | changes}))


def blocks_of(lines: list[str]) -> list[tuple[str, str, list[str], list[str]]]:
    """Of each problem: its text, its gold answer, the lines before and those after RL."""
    found = []
    for line in lines:
        if line.startswith("problem "):
            found.append([line.partition(": ")[2]])
        elif line.startswith("gold answer: "):
            found[-1].append(line.partition(": ")[2])
        elif re.fullmatch("  (before|after) RL", line):
            found[-1].append([])
        elif line.startswith("    "):
            found[-1][-1].append(line.strip())
    return [tuple(block) for block in found]


MODELS = {"r": [[("sft", "tiny"), ("sft", "tiny-ver")], [("rl", "r-gen"), ("rl", "r-ver")]],
          "grpo": [[("sft", "tiny")], [("rl", "grpo-gen")]]}


def said_of(chain, problem, text: str, ended: bool, judged) -> tuple[list[str], list[int]]:
    """The lines of a solution of the chain; whether it is right, whether its verdict is, how many of its steps'
    verdicts are, of how many steps."""
    head, found, answer = (part.strip() for part in text.partition("="))
    bodies, labels = head.split(";")[:-1], chain.step_labels(problem, text)
    verdicts = (judged.step_verdicts + [None] * len(labels))[: len(labels)] if judged else labels
    lines = [f"{WORD[v]:5s}  {body}" + (f"  <- mistaken: the step is {WORD[label]}" if v is (not label) else "")
             for body, v, label in zip(bodies, verdicts, labels, strict=True)]
    rest = text[len("".join(f"{body};" for body in bodies)):]
    lines += [f"-      {rest}"] if rest and not (found and bodies) else []
    right = bool(found) and answer == problem.answer
    last = (f"answer {answer}: " if found else "no answer: ") + WORD[right] + ("" if ended else " (cut)")
    if judged:
        last += "; verdict: " + WORD[judged.verdict].replace("-", "none")
        last += "  <- mistaken" if judged.verdict is (not right) else ""
    hits = sum(v is label for v, label in zip(verdicts, labels, strict=True))
    return [*lines, last], [right, judged is not None and judged.verdict is right, hits, len(labels)]


def scores_of(lines: list[str]) -> str:
    """The line with the counts."""
    return next(line for line in lines if line.startswith("Of "))


@pytest.mark.parametrize("run, split, limit", [("r", "test_in", 28), ("r", "test_out", 28), ("grpo", "test_in", 8)])
def test_each_solution_is_shown_step_by_step_with_what_is_said_of_it(capsys, base, run, split, limit):
    """Everything again, each problem solved and verified alone: lines, notes and the counts of the last line. Within 8
    tokens some solutions do not end."""
    change_args(base, run, max_new_tokens=limit)
    lines, chain = show(capsys, run, "--num-problems", "24", "--split", split), task()
    shown, held_out = blocks_of(lines), [chain.problem(split, i) for i in range(24)]
    assert sorted(block[:2] for block in shown) == sorted((p.prompt, p.answer) for p in held_out)
    problems, counts = {p.prompt: p for p in held_out}, []
    sampler = Sampler(chain, Tokenizer.load(str(base / "tokenizer")), 0, limit, 36)
    for time, (generator, *verifier) in enumerate([load(*name) for name in names] for names in MODELS[run]):
        counts.append([0] * 4)
        for prompt, _, *told in shown:
            problem, judged = problems[prompt], [None]
            rollouts, solutions = sampler.solve(generator, [problem], 1, (), greedy=True)
            if verifier:
                judged = sampler.verify(verifier[0], [problem], solutions, 1, (), greedy=True)[1]
            expected, marks = said_of(chain, problem, solutions[0].text, bool(rollouts.stopped[0]), judged[0])
            assert told[time] == expected
            counts[-1] = [a + b for a, b in zip(counts[-1], marks, strict=True)]
    before, after = ([str(a), str(b), f"{c} of {d}"] for a, b, c, d in counts)
    pairs = list(zip(before, after, strict=True))[: 3 if run == "r" else 1]
    assert re.findall(r"(\d+(?: of \d+)?) -> (\d+(?: of \d+)?)", scores_of(lines)) == pairs
    assert scores_of(lines).startswith("Of 24 problems right ")
    assert any(before != after for _, _, before, after in shown) and 0 < sum(count[0] for count in counts) < 48
    assert (run == "r") == any("mistaken" in line for line in lines)
    assert run == "r" or any("(cut)" in line for line in lines)


def test_the_newest_finished_run_is_the_default_and_a_folder_is_as_good_as_a_name(capsys, base, monkeypatch):
    by_name = show(capsys, "r")
    with monkeypatch.context() as patch:
        patch.chdir(base / "runs" / "r")
        assert show(capsys, ".") == by_name
    assert by_name[0] == "before RL: generator tiny at step 200, verifier tiny-ver at step 200"
    assert by_name[1] == "after RL:  generator r-gen at step 2, verifier r-ver at step 2"
    assert show(capsys, str(base / "runs" / "r")) == by_name
    assert show(capsys) == ["the newest finished run: r; the project's own is called pair", *by_name]
    os.remove(base / "runs" / "r" / "summary.json")
    assert show(capsys)[:3] == ["the newest finished run: grpo; the project's own is called pair",
                                "before RL: generator tiny at step 200",
                                "after RL:  generator grpo-gen at step 2"]


def test_which_problems_and_tables_are_shown(capsys, base):
    held_out = [task().problem("test_in", i).prompt for i in range(24)]
    shown = [[prompt for prompt, *_ in blocks_of(show(capsys, "r", "--num-problems", "3", "--seed", str(seed)))]
             for seed in (0, 0, 1)]
    assert shown[0] == shown[1] != shown[2] and {*shown[0], *shown[2]} <= set(held_out)
    few, more = (show(capsys, "r", "--num-problems", "3", "--num-scored", num) for num in ("0", "9"))
    assert blocks_of(few) == blocks_of(more) and len(blocks_of(few)) == 3
    assert scores_of(few).startswith("Of 3 problems right ") and scores_of(more).startswith("Of 9 problems right ")
    # all that there are
    assert scores_of(show(capsys, "r", "--num-problems", "3")).startswith("Of 24 problems right ")
    folder = base / "runs" / "r"
    (folder / "report.html").unlink(missing_ok=True)
    last = show(capsys, "r")[-1]
    assert last == f"More of the run: {folder / 'summary.json'}"
    (folder / "report.html").touch()
    assert show(capsys, "r")[-1] == f"{last}, {folder / 'report.html'}"


def test_colours_say_what_the_words_say(capsys, base):
    plain, coloured = (show(capsys, "r", "--num-problems", "24", "--colour", c) for c in ("never", "always"))
    assert [ANSI.sub("", line) for line in coloured] == plain != coloured
    colours = {"right": "32", "wrong": "31", "-": "90", "none": "90"}
    painted = re.findall("\033\\[(\\d+)m([^\\s\033]+).*?\033\\[0m", "\n".join(coloured))
    assert painted and all(colours[word] == colour for colour, word in painted)
    assert {word for _, word in painted} >= {"right", "wrong"}


HOSTILE = "\033[2J\r\x07\x9b1m\u202e\n    right  forged"
CLEAN = "?[2J???1m? right forged"


@pytest.mark.parametrize("said, shown", [
    (f"{HOSTILE};={HOSTILE}", [f"right  {CLEAN}  <- mistaken: the step is wrong",
                               f"answer {CLEAN}: wrong; verdict: right  <- mistaken"]),
    (HOSTILE, [f"-      {CLEAN}", "no answer: wrong; verdict: right  <- mistaken"]),
    (f"0;{HOSTILE}", ["right  0  <- mistaken: the step is wrong", f"-      {CLEAN}",
                      "no answer: wrong; verdict: right  <- mistaken"])])
def test_what_a_model_writes_cannot_steer_the_terminal(capsys, base, monkeypatch, said, shown):
    """Nor forge a line: a step is one line, and so is what is no step."""
    tokenizer = Tokenizer.load(str(base / "tokenizer"))
    change_args(base, "r", max_new_tokens=90, verifier_max_new_tokens=9)
    solved, judged = ([*tokenizer.encode(text), tokenizer.assistant_end] for text in (said, "T;=T"))
    monkeypatch.setattr(demo, "find_checkpoints", lambda run, roles: dict.fromkeys(
        ("before", "after"), {role: ("sft", "tiny", 200) for role in roles}))
    force_picks(monkeypatch, 2 * [solved, judged])
    lines = show(capsys, "r", "--num-problems", "2")
    assert [times for _, _, *times in blocks_of(lines)] == 2 * [[shown, shown]]
    assert all(c.isprintable() for line in lines for c in line)


def damage(base, what: str) -> None:
    folder, run = base / "chatrl_checkpoints", base / "runs" / "r"
    if what == "unfinished":
        os.remove(run / "summary.json")
    elif what == "no RL checkpoint":
        shutil.rmtree(folder / "r-ver")
    elif what == "an earlier RL checkpoint":
        os.rename(folder / "r-gen" / "model_000002.pt", folder / "r-gen" / "model_000001.pt")
        os.rename(folder / "r-gen" / "meta_000002.json", folder / "r-gen" / "meta_000001.json")
    elif what == "no SFT checkpoint":
        shutil.rmtree(base / "chatsft_checkpoints" / "tiny")
    elif what == "another SFT":
        path = base / "chatsft_checkpoints" / "tiny-ver" / "model_000200.pt"
        torch.save({name: x + 1 for name, x in torch.load(path, weights_only=True).items()}, path)
    elif what == "older":
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "starts": None}))
    elif what == "elsewhere":
        shutil.copytree(run, base / "copies" / "r")


@pytest.mark.parametrize("what, flags, words", [
    ("", ["nobody"], "nobody: neither a folder nor a run"), ("", ["{base}/runs/r/config.json"], "neither a folder nor"),
    ("unfinished", ["r"], "runs/r: the run has not finished, it is at step [1-9]"),
    ("no RL checkpoint", ["r"], "no checkpoint r-ver"), ("an earlier RL checkpoint", ["r"], "r-gen .* no step 2"),
    ("no SFT checkpoint", ["r"], "no checkpoint tiny"), ("another SFT", ["r"], "tiny-ver.* is not what run r"),
    ("older", ["r"], "does not say where it started from"), ("elsewhere", ["{base}/copies/r"], "NANOCHAT_BASE_DIR"),
    ("", ["r", "--num-problems", "0"], "--num-problems 0"),
    ("", ["r", "--num-problems", "25"], "the run has 24 problems of test_in"), ("", ["r", "--split", "rl"], "--split")])
def test_what_cannot_be_shown_is_refused(capsys, base, what, flags, words):
    damage(base, what)
    assert re.search(words, refused(capsys, *(flag.format(base=base) for flag in flags)))


@pytest.mark.parametrize("changes, words", [
    ({"eval_examples": "x"}, "eval_examples is 'x', expected a whole number"),
    ({"max_new_tokens": "x"}, "max_new_tokens is 'x', expected a whole number"),
    ({"verifier_max_new_tokens": True}, "verifier_max_new_tokens is True, expected a whole number"),
    ({"seed": "a"}, "seed is 'a', not a number"),
    ({"calculator": 1}, "calculator is 1, expected true or false"),
    ({"task": "nope"}, "task is 'nope', and there are chain, "),
])
def test_a_configuration_with_wrong_values_is_refused(capsys, base, changes, words):
    change_args(base, "r", **changes)
    line = refused(capsys, "r")
    assert f"{base}/runs/r/config.json" in line and words in line


@pytest.mark.parametrize("changes, words", [
    ({"tag": 5}, "config.json: is damaged"), ({"tag": "../tiny"}, "config.json: is damaged"),
    ({"step": "x"}, "step is 'x', not a number"), ({"fingerprint": [1]}, "fingerprint is [1], not a number"),
    ({"more": 1}, "does not say where"),
])
def test_a_start_with_wrong_values_is_refused(capsys, base, changes, words):
    path = base / "runs" / "r" / "config.json"
    config = json.loads(path.read_text())
    config["starts"]["generator"] |= changes
    path.write_text(json.dumps(config))
    assert words in refused(capsys, "r")


def test_fewer_problems_than_the_default_are_all_shown(capsys, base):
    change_args(base, "r", eval_examples=4)
    lines = show(capsys, "r")
    assert "the run has 4 problems of test_in, which are all shown" in lines and len(blocks_of(lines)) == 4
    assert "--num-problems 5: the run has 4 problems" in refused(capsys, "r", "--num-problems", "5")
