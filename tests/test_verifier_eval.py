"""
verifier_eval on ProcessBench: its numbers against those of texts that are sampled here, what it refuses, what it
writes. How they are scored is tested by hand in test_processbench.
"""
import json
import os
import random

import datasets
import pytest
import torch
from conftest import scripts_on_two_ranks
from test_chat import chain

from nanochat.checkpoint import load_model
from nanochat.cli import script_main
from nanochat.engine import generate, row_key
from nanochat.rl.measure.scores import aligned, first_error, first_error_scores, majority
from nanochat.rl.measure.voting import calibration, mean_scores
from nanochat.rl.play import sampling
from nanochat.rl.records.prompts import Verification, parse_verification
from nanochat.tokenizer import Tokenizer
from scripts import verifier_eval
from tasks.chain import COMPACT

VERIFIER = ["--device-type", "cpu", "--verifier-tag", "tiny-ver", "--verifier-max-new-tokens", "36"]
SAMPLED = ["--num-verifications", "3", "--temperature", "1"]


def chain_rows(indices) -> list[dict]:
    """Samples of chain solutions: each problem's corrupted solution with its gold step labels."""
    task, rows = chain(), []
    for i in indices:
        problem = task.problem("test_in", i)
        text = task.corrupted_solution(problem, random.Random(i))
        labels = task.step_labels(problem, text)
        rows.append({"problem": problem.prompt, "steps": text.split(";")[:-1],
                     "final_answer_correct": task.check(problem, text),
                     "label": labels.index(False) if False in labels else -1})
    return rows


def write(path, rows: list[dict]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def bench(base, tmp_path, monkeypatch) -> dict[str, list[dict]]:
    """A folder of two subsets of unlike size, named by $BENCH; its rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))  # leave nothing after
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))  # for processes that a test starts
    monkeypatch.setenv("BENCH", str(tmp_path / "bench"))
    rows = {"gsm8k": chain_rows(range(20)), "math": chain_rows(range(20, 47))}
    for name, part in rows.items():
        for row in part[::4]:  # a wrong step may end in a right answer, and a misread answer stand after right ones
            row["final_answer_correct"] = not row["final_answer_correct"]
        write(tmp_path / "bench" / f"{name}.jsonl", part)
        assert ({row["label"] for row in part} == {-1, 0, 1}
                and {row["final_answer_correct"] for row in part} == {True, False})
    return rows


def run(capsys, *flags: str) -> list[str]:
    capsys.readouterr()
    script_main(verifier_eval.main, verifier_eval.make_parser(), [*VERIFIER, *flags])
    return capsys.readouterr().out.splitlines()


def on_bench(capsys, tmp_path, *flags: str) -> tuple[dict, list[str]]:
    """The numbers of a ProcessBench run, and what it prints."""
    out = str(tmp_path / "out.json")
    lines = run(capsys, "--processbench", os.environ["BENCH"], "--format", "compact", "--out", out, *flags)
    with open(out) as f:
        return json.load(f)["processbench"], lines


def changed(base, stage: str, tag: str, step: int, role: str = "", **flags) -> None:
    """Another record of the tiny pair's checkpoint, of this stage and step: with these flags of its training."""
    before, after = base / "chatsft_checkpoints" / tag.replace("r-", "tiny-"), base / f"chat{stage}_checkpoints" / tag
    after.mkdir(parents=True, exist_ok=True)
    meta = json.loads((before / "meta_000200.json").read_text())
    meta |= {"step": step, "user_config": meta["user_config"] | flags} | ({"role": role} if role else {})
    (after / f"meta_{step:06d}.json").write_text(json.dumps(meta))
    (after / f"model_{step:06d}.pt").write_bytes((before / "model_000200.pt").read_bytes())


def refused(capsys, *flags: str) -> str:
    """Runs with input that must be refused before any work; its one line."""
    with pytest.raises(SystemExit) as stop:
        run(capsys, *flags)
    done = capsys.readouterr()
    assert stop.value.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    assert "percent" not in done.out
    return done.err


def sampled(tag: str, prompts: list[str], keys: list[tuple], greedy: bool, limit: int) -> list[tuple[str, bool]]:
    """The text that a tiny model writes after each prompt, and whether it ended."""
    tokenizer = Tokenizer.load(os.path.join(os.environ["NANOCHAT_BASE_DIR"], "tokenizer"))
    model, _ = load_model("sft", tag, torch.device("cpu"), torch.float32)
    out = generate(model, [tokenizer.render_prompt(prompt) for prompt in prompts], 1, max_new_tokens=limit,
                   stop_tokens=tokenizer.stop_tokens,
                   keys=[row_key(*key) for key in keys], temperature=0.0 if greedy else 1.0)
    rows = zip(out.tokens.tolist(), out.lengths.tolist(), out.stopped.tolist(), strict=True)
    return [(tokenizer.decode(tokens[: n - ended]), ended) for tokens, n, ended in rows]


def written(prompts: list[str], num_steps: list[int], keys: list[tuple], greedy: bool) -> list[Verification]:
    """The verifications that the tiny verifier writes after these prompts."""
    return [parse_verification(COMPACT, text, steps, ended)
            for (text, ended), steps in zip(sampled("tiny-ver", prompts, keys, greedy, 36), num_steps, strict=True)]


def three(scores: dict) -> list[float]:
    return [scores["error_acc"], scores["correct_acc"], scores["f1"]]


@pytest.mark.parametrize("k", [1, 3])
def test_processbench_is_scored_by_texts_sampled_by_hand(capsys, bench, tmp_path, k):
    got, lines = on_bench(capsys, tmp_path, *(SAMPLED if k == 3 else []))
    averages, unlike_single = [], 0
    for subset, rows in bench.items():
        nums, labels = [len(row["steps"]) for row in rows], [row["label"] for row in rows]
        prompts = [f"{row['problem']}|{''.join(step + ';' for step in row['steps'])}=|{n}"
                   for row, n in zip(rows, nums, strict=True) for _ in range(k)]
        keys = [(0, "processbench", subset, number, 0, g) for number in range(1, len(rows) + 1) for g in range(k)]
        said = written(prompts, [n for n in nums for _ in range(k)], keys, greedy=k == 1)
        of_each = [said[i: i + k] for i in range(0, len(said), k)]
        found = [[first_error(aligned(v.step_verdicts, n)) for v in row] for row, n in zip(of_each, nums, strict=True)]
        assert [(s["row"], s["label"], s["predictions"], s["verdicts"], s["malformed"], s["prediction"])
                for s in got["samples"] if s["subset"] == subset] == [
            (number, label, predictions, [v.verdict for v in row], sum(bool(v.unmet) for v in row),
             majority(predictions))
            for number, (label, predictions, row) in enumerate(zip(labels, found, of_each, strict=True), 1)]
        scores = got["subsets"][subset]
        averages.append(first_error_scores(labels, [majority(predictions) for predictions in found]))
        assert three(scores) == three(averages[-1]) and (scores["n"], scores["too_long"]) == (len(rows), 0)
        single = mean_scores([first_error_scores(labels, [row[g] for row in found]) for g in range(k)])
        assert three(scores["single"]) == pytest.approx(three(single))
        unlike_single += three(single) != three(scores)
        assert scores["votes"] == pytest.approx(sum(p is not None for row in found for p in row) / len(rows))
        assert scores["parse_fail"] == pytest.approx(sum(bool(v.unmet) for v in said) / len(said))
        assert 0 < scores["parse_fail"] < 1  # the crafted verifier writes both kinds
        (line,) = [line for line in lines if line.startswith(subset) and "." in line.split()[2]][:1]
        assert line.split()[:5] == [subset, str(len(rows)), *(f"{100 * x:.1f}" for x in three(scores))]
    average = three(mean_scores(averages))
    assert three(got["average"]) == pytest.approx(average) and average[2] > 0
    assert ["average", *(f"{100 * x:.1f}" for x in average)] in [line.split()[:4] for line in lines]
    assert (unlike_single > 0) == (k == 3) and len({p for s in got["samples"] for p in s["predictions"]}) >= 3


def test_calibration_is_of_the_shares_of_correct_final_verdicts(capsys, bench, tmp_path):
    got, lines = on_bench(capsys, tmp_path, *SAMPLED)
    pairs = [(sum(v is True for v in s["verdicts"]) / 3, s["final_answer_correct"]) for s in got["samples"]]
    whole = got["calibration"]
    assert len({p for p, _ in pairs}) == 4 and whole == calibration(*map(list, zip(*pairs, strict=True)))
    assert [got["subsets"][s]["calibration"]["count"] for s in bench] == [20, 27] and whole["count"] == 47
    assert (["all", "47", *(f"{whole[name]:.3f}" for name in ("ece", "brier", "auroc"))]
            in [line.split() for line in lines])
    alone, lines = on_bench(capsys, tmp_path)
    assert (alone["calibration"] is None
            and "calibration of the final verdict needs --num-verifications above 1" in lines)


def test_seed_temperature_subset_and_limit_choose_verdicts_and_rows(capsys, bench, tmp_path):
    rows = lambda *flags: on_bench(capsys, tmp_path, *flags)[0]["samples"]
    greedy, drawn = rows(), rows("--temperature", "1")
    assert rows("--temperature", "1") == drawn != greedy == rows("--seed", "1")
    assert rows("--temperature", "1", "--seed", "1") != drawn
    part = rows("--temperature", "1", "--subset", "math", "--max-examples", "5")
    assert len(part) == 5 and all(row in drawn and row["subset"] == "math" for row in part)


def test_a_sample_longer_than_the_context_is_counted_and_wrong_and_one_that_just_fits_is_read(
        capsys, bench, base, tmp_path):
    """A prompt of at most 128 - 36 = 92 tokens fits. A bytewise tokenizer."""
    tokenizer, rows = Tokenizer.load(str(base / "tokenizer")), chain_rows(range(4))
    room = 92 - len(tokenizer.render_prompt("|1+1:2;=|1"))
    rows += [{"problem": "1" * length, "steps": ["1+1:2"], "label": -1, "final_answer_correct": True}
             for length in (room, room + 1, room + 2)]
    write(tmp_path / "bench" / "math.jsonl", rows)
    got, lines = on_bench(capsys, tmp_path, *SAMPLED, "--subset", "math")
    assert ([s["too_long"] for s in got["samples"]] == [False] * 5 + [True] * 2
            and got["subsets"]["math"]["too_long"] == 2)
    for s in got["samples"][5:]:
        assert (s["prediction"], s["predictions"], s["verdicts"]) == (None, [None] * 3, [None] * 3)
    right = [s["prediction"] == -1 for s in got["samples"] if s["label"] == -1]
    assert got["subsets"]["math"]["correct_acc"] == sum(right) / len(right) and len(right) >= 4
    assert got["calibration"]["count"] == 5 and any("2 of 7 do not fit the verifier's context 128 with 36 new "
                                                    "tokens" in line for line in lines)
    assert got["subsets"]["math"]["parse_fail"] == sum(s["malformed"] for s in got["samples"]) / 15
    # Nothing else moves: the others' verdicts are those without the long ones.
    write(tmp_path / "bench" / "math.jsonl", rows[:5])
    assert on_bench(capsys, tmp_path, *SAMPLED, "--subset", "math")[0]["samples"] == got["samples"][:5]
    write(tmp_path / "bench" / "math.jsonl", [rows[-1] | {"label": label} for label in (0, -1)])  # where nothing fits
    got, _ = on_bench(capsys, tmp_path, *SAMPLED, "--subset", "math")
    assert (three(got["average"]) == [0, 0, 0] and got["calibration"] is None
            and got["subsets"]["math"]["parse_fail"] is None)


def test_marks_inside_steps_reach_the_verifier_as_question_marks(capsys, bench, tmp_path, monkeypatch):
    heard, sample = [], sampling.generate
    monkeypatch.setattr(
        sampling, "generate",
        lambda model, prompts, *args, **options: heard.extend(prompts) or sample(model, prompts, *args, **options))
    steps = ["1+1:2;1*1:1", "=2", "|9T;=T"]
    write(tmp_path / "bench" / "math.jsonl",
          [{"problem": "1+1|F", "steps": steps, "label": 2, "final_answer_correct": False}])
    got, _ = on_bench(capsys, tmp_path, "--subset", "math")
    tokenizer = Tokenizer.load(os.path.join(os.environ["NANOCHAT_BASE_DIR"], "tokenizer"))
    assert heard == [tokenizer.render_prompt("1+1??|1+1:2?1*1:1;?2;?9????;=|3")]
    assert got["subsets"]["math"]["correct_acc"] is None and got["average"]["f1"] is None


def test_stage_and_step_name_the_verifier_and_rl_says_how_long_it_may_write(capsys, bench, base, tmp_path):
    changed(base, "rl", "r-ver", 5)
    changed(base, "rl", "r-ver", 9, verifier_max_new_tokens=30)
    flags = ["--verifier-source", "rl", "--verifier-tag", "r-ver", "--max-examples", "5"]
    assert on_bench(capsys, tmp_path, *flags)[0] == on_bench(capsys, tmp_path, "--max-examples", "5")[0]
    for more, step, limit in (([], 9, 30), (["--step", "5"], 5, 64)):  # half of the context 128
        on_bench(capsys, tmp_path, *flags, "--verifier-max-new-tokens", "-1", *more)
        args = json.loads((tmp_path / "out.json").read_text())["args"]
        assert (args["step"], args["verifier_max_new_tokens"]) == (step, limit)


def test_two_ranks_print_and_write_the_numbers_of_one(capsys, bench, base, tmp_path):
    # fewer samples than ranks, and none that fits
    write(tmp_path / "bench" / "omnimath.jsonl", [{**chain_rows([3])[0], "problem": "1" * 200}])
    flags = ["--processbench", os.environ["BENCH"], "--format", "compact", *SAMPLED, "--generator-tag", "tiny",
             "--num-samples", "3", "--max-problems", "7", "--out"]
    printed = scripts_on_two_ranks(("scripts.verifier_eval", [*VERIFIER, *flags, str(tmp_path / "two.json")]))
    assert printed.splitlines() == run(capsys, *flags, str(tmp_path / "one.json"))
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert one.pop("args")["out"] != two.pop("args")["out"] and one == two
    assert len(one["processbench"]["samples"]) == 48 and len(one["best_of_n"]["samples"]) == 7
    assert not [name for name in os.listdir(tmp_path) if ".tmp" in name or "trial" in name]


ON_TASK = ["--generator-tag", "tiny"]


@pytest.mark.parametrize("flags, words", [
    ([], ["--processbench", "--generator-tag"]), (["--processbench", "none.jsonl"], ["none.jsonl: no such file"]),
    (["--processbench", "BENCH", "--subset", "algebra"], ["no subset algebra", "gsm8k, math"]),
    ([*ON_TASK, "--subset", "math"], ["--subset math"]),
    (["--processbench", "BENCH", "--judge-report"], ["--judge-report", "--generator-tag"]),
    ([*ON_TASK, "--own-tag", "tiny"], ["--own-tag tiny", "--judge-report"]),
    ([*ON_TASK, "--own-step", "3"], ["--own-step 3", "are for --own-tag"]),
    (["--processbench", "BENCH", "--num-verifications", "2"], ["--num-verifications 2", "--temperature above 0"]),
    ([*ON_TASK, "--generator-temperature", "0"], ["--num-samples 8", "--generator-temperature above 0"]),
    (["--processbench", "BENCH", "--task", "chain"], ["--task chain: is for --generator-tag"]),
    (["--processbench", "BENCH", "--verifier-max-new-tokens", "128"],
     ["--verifier-max-new-tokens 128", "context is 128"]),
    (["--processbench", "BENCH", "--verifier-tag", "nobody"], ["nobody", "tiny-ver"]),
    (["--processbench", "BENCH", "--step", "7"], ["no step 7"]),
    (["--generator-tag", "nobody"], ["nobody", "tiny"]), ([*ON_TASK, "--generator-step", "7"], ["no step 7"]),
    ([*ON_TASK, "--max-new-tokens", "126"], ["context 128", "--max-new-tokens"]),
])
def test_the_evaluation_refuses(capsys, bench, flags, words):
    line = refused(capsys, *[os.environ["BENCH"] if flag == "BENCH" else flag for flag in flags])
    assert all(word in line for word in words), line


def test_a_malformed_row_is_refused_before_a_model_is_asked_for(capsys, bench, tmp_path):
    path = write(tmp_path / "bench" / "math.jsonl", [*chain_rows([1]), {**chain_rows([1])[0], "label": 9}])
    assert f"{path}: line 2: label 9" in asked_of_nobody(capsys, tmp_path / "o.json")


def asked_of_nobody(capsys, out) -> str:
    """The refusal of a file, before the tag of a verifier that is not there is looked at; else that of the tag."""
    return refused(capsys, "--processbench", os.environ["BENCH"], "--verifier-tag", "nobody", "--out", str(out))


def test_a_link_is_written_through_and_a_run_that_fails_leaves_what_was_there(capsys, bench, tmp_path, monkeypatch):
    (tmp_path / "out.json").symlink_to(tmp_path / "target.json")
    (tmp_path / "target.json.trial0").write_text("mine")
    on_bench(capsys, tmp_path, "--max-examples", "1")
    before = (tmp_path / "target.json").read_text()
    assert (tmp_path / "out.json").is_symlink() and "processbench" in json.loads(before)
    assert (tmp_path / "target.json.trial0").read_text() == "mine"
    monkeypatch.setattr(verifier_eval, "print_calibration", lambda scores: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        on_bench(capsys, tmp_path, *SAMPLED)
    assert (tmp_path / "target.json").read_text() == before


def test_a_file_that_cannot_be_written_is_refused_and_nothing_is_left(capsys, bench, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # stands for a device
    for path, words in ((tmp_path / "none" / "o.json", "its folder is not there"),
                        (tmp_path / "folder", "is there, and no earlier result"),
                        (tmp_path / "pipe", "is there, and no earlier result"), ("/proc/o.json", "cannot write to")):
        assert words in asked_of_nobody(capsys, path)
    there_were = sorted(os.listdir(tmp_path))
    assert "nobody" in asked_of_nobody(capsys, tmp_path / "o.json")
    assert sorted(os.listdir(tmp_path)) == there_were


def test_only_an_earlier_result_is_replaced(capsys, bench, tmp_path):
    """Neither its own input, nor another file of the user's."""
    for name, text in (("bench/gsm8k.jsonl", (tmp_path / "bench" / "gsm8k.jsonl").read_text()), ("notes.txt", "mine"),
                       ("list.json", "[1]"), ("config.json", '{"args": {"task": "chain"}}'), ("empty.json", ""),
                       ("more.json", '{"args": {"verifier_tag": "x"}, "mine": 1}')):
        (tmp_path / name).write_text(text)
        line = asked_of_nobody(capsys, tmp_path / name)
        assert "is there, and no earlier result of this script" in line and (tmp_path / name).read_text() == text
    numbers = [on_bench(capsys, tmp_path, "--max-examples", n) [0] for n in "231"]
    assert [len(found["samples"]) for found in numbers] == [4, 6, 2]


def test_a_verifier_whose_texts_are_mostly_malformed_is_warned_of(capsys, bench, base):
    """One token is no verification."""
    flags = ["--verifier-max-new-tokens", "1", "--processbench", os.environ["BENCH"], "--format", "compact",
             "--generator-tag", "tiny", "--max-problems", "2", "--max-examples", "2"]
    warned = [line for line in run(capsys, *flags) if line.startswith("WARNING: 100.0% of the verifications are")]
    assert len(warned) == 2  # of ProcessBench, and of best of n
    verifier_eval.warn_of_malformed(0.5)
    verifier_eval.warn_of_malformed(None)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("tag, changes, flags, words", [
    ("tiny", {"chain_modulus": "x"}, ["--generator-tag", "tiny"], "chain_modulus is 'x', expected a whole number"),
    ("tiny-ver", {"verifier_max_new_tokens": "x"}, ["--processbench", "BENCH", "--verifier-max-new-tokens", "-1"],
     "verifier_max_new_tokens is 'x', expected a whole number"),
])
def test_what_a_checkpoint_records_is_checked(capsys, bench, base, tag, changes, flags, words):
    path = base / "chatsft_checkpoints" / tag / "meta_000200.json"
    changed(base, "sft", tag, 200, **changes)
    line = refused(capsys, *(os.environ["BENCH"] if flag == "BENCH" else flag for flag in flags))
    assert f"{path}: {words}" in line
