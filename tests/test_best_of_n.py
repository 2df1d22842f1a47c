"""
verifier_eval among several solutions of a problem: its numbers against those of texts that are sampled here; the
verifiers that it asks, and those that it refuses.
"""
import json

import pytest
from test_chat import chain
from test_verifier_eval import ON_TASK, SAMPLED, changed, refused, run, sampled, written

from nanochat import recipes
from nanochat.rl.measure.scores import aligned
from nanochat.rl.measure.voting import SCORES, choose
from nanochat.rl.records import outcomes
from nanochat.rl.verify.judges import JUDGES
from scripts import verifier_eval
from tasks import TASKS
from tasks.chain import Chain


def best_of_n(capsys, tmp_path, *flags: str) -> tuple[dict, list[str]]:
    """All numbers of a best-of-n run, and what it prints."""
    lines = run(capsys, "--generator-tag", "tiny", "--out", str(tmp_path / "o.json"), *flags)
    return json.loads((tmp_path / "o.json").read_text()), lines


@pytest.mark.parametrize("score", list(SCORES))
def test_best_of_n_chooses_among_texts_sampled_by_hand(capsys, base, tmp_path, score):
    """4 solutions of each of 40 problems, 3 verifications of each."""
    got, lines = best_of_n(capsys, tmp_path, *SAMPLED, "--num-samples", "4", "--max-problems", "40", "--score", score)
    got, task, names = got["best_of_n"], chain(), [(i, j) for i in range(40) for j in range(4)]
    problems = [task.problem("test_in", i) for i, _ in names]
    texts = [text for text, _ in sampled("tiny", [p.prompt for p in problems],
                                         [(0, "best_of_n", "test_in", i, 0, j) for i, j in names], False, 28)]
    nums = [text.split("=")[0].count(";") for text in texts]
    prompts = [f"{p.prompt}|{''.join('?' if c in 'TF|' else c for c in text)}|{n}"
               for p, text, n in zip(problems, texts, nums, strict=True) for _ in range(3)]
    keys = [(0, "best_of_n", "verify", "test_in", i, j, g) for i, j in names for g in range(3)]
    said = written(prompts, [n for n in nums for _ in range(3)], keys, greedy=False)
    answers = [text.partition("=")[2].strip() if "=" in text else None for text in texts]
    of_each = [said[3 * i: 3 * i + 3] for i in range(len(nums))]
    judged = [([v.verdict for v in own], [aligned(v.step_verdicts, n) for v in own])
              for own, n in zip(of_each, nums, strict=True)]
    columns = (answers, [task.check(*pair) for pair in zip(problems, texts, strict=True)],
               [SCORES[score](*row) for row in judged], [SCORES["steps"](*row) for row in judged])
    table = [choose(*(column[i: i + 4] for column in columns)) for i in range(0, 160, 4)]
    assert [row["choice"] for row in got["samples"]] == table
    names = ["pass@1", "maj", "bon", "weighted", "pass@n"]
    means = [sum(row[name] for row in table) / 40 for name in names]
    assert [got[name] for name in names] == pytest.approx(means) and 0 < means[0] < means[4] < 1
    assert len({tuple(row[name] for row in table) for name in names}) >= 4  # the ways to choose differ on some problems
    assert " | ".join(
        f"{name} {100 * x:.1f}"
        for name, x in zip(("pass@1", "maj@4", "bon@4", "weighted@4", "pass@4"), means, strict=True)) in lines[-1]
    assert lines[-1].startswith("40 problems | ") and got["too_long"] == got["unscorable"] == 0
    assert 0 < got["unread_answers"] == answers.count(None) / 160


def test_the_judge_report_is_of_the_same_solutions(capsys, base, tmp_path):
    """The crafted verifier writes no analyses, so none is right; judged as its own, the generator's solutions are
    preferred by nothing."""
    got, lines = best_of_n(capsys, tmp_path, *SAMPLED, "--num-samples", "4", "--max-problems", "10", "--judge-report",
                           "--own-tag", "tiny")
    report, hits = got["judge_report"], []
    for row in got["best_of_n"]["samples"]:
        for labels, verdicts in zip(row["labels"], row["step_verdicts"], strict=True):
            hits += [said is label for of_one in verdicts for label, said in zip(labels, of_one, strict=True)]
    assert report["verdict_acc"] == pytest.approx(sum(hits) / len(hits))
    assert report["parse_fail"] == got["best_of_n"]["parse_fail"] > 0
    assert report["rationale_acc"] == 0 and report["wrong_reason"] == 1
    assert report["own_right"] == report["own_wrong"] == report["self_preference"] == 0
    assert any(line.startswith("judge report, 40 solutions") for line in lines)
    assert lines[-1].startswith("self-preference") and lines[-1].endswith(" 0.0")


def test_the_task_comes_from_the_generators_checkpoint_unless_given(capsys, base, tmp_path, monkeypatch):
    monkeypatch.setattr(outcomes, "ENDLESS", 3)
    flags = ["--num-samples", "1", "--generator-temperature", "0"]
    numbers, _ = best_of_n(capsys, tmp_path, *flags)
    expected = {"task": "chain", "chain_modulus": 3, "seed": 0, "max_new_tokens": 28, "step": 200}
    assert expected.items() <= numbers["args"].items() and len(numbers["best_of_n"]["samples"]) == 3
    expected = {"chain_modulus": 4, "seed": 7, "max_new_tokens": 20}
    other, _ = best_of_n(capsys, tmp_path, *flags, "--max-problems", "4", *(
        word for name, value in expected.items() for word in (f"--{name.replace('_', '-')}", str(value))))
    expected["chain_max_steps"] = 2
    assert expected.items() <= other["args"].items() and len(other["best_of_n"]["samples"]) == 4


def test_what_cannot_be_scored_is_left_out_and_counted_and_a_finite_split_ends(capsys, base, tmp_path, monkeypatch):
    class Partly(Chain):
        """Three problems; answers that begin with 1 cannot be scored, of the first problem none can."""
        def num_problems(self, split):
            return 3

        def check(self, problem, solution):
            return None if problem.index == 0 or "=1" in solution else super().check(problem, solution)
    monkeypatch.setitem(TASKS, "chain", Partly)
    got, lines = best_of_n(capsys, tmp_path, "--num-samples", "6", *SAMPLED)
    got = got["best_of_n"]
    outcomes = [row["outcomes"] for row in got["samples"]]
    assert len(outcomes) == 3 and got["problems_left_out"] == sum(set(row) == {None} for row in outcomes) >= 1
    assert got["unscorable"] == sum(row.count(None) for row in outcomes) > 6
    kept = [[o for o in row if o is not None] for row in outcomes]
    assert got["pass@1"] == pytest.approx(sum(sum(row) / len(row) for row in kept if row) / sum(map(bool, kept)))
    assert (f"{got['unscorable']} solutions cannot be scored and are left out, "
            f"with them {got['problems_left_out']} whole problems" in lines)
    assert got["samples"][0]["choice"] is None
    for asked, there_are in (("9", 3), ("2", 2)):
        assert run(capsys, "--generator-tag", "tiny", "--num-samples", "2", "--max-problems", asked)[-2].startswith(
            f"{there_are} problems | ")


def test_solutions_that_do_not_fit_the_verifier_are_counted_and_score_nothing(capsys, base, tmp_path):
    got, lines = best_of_n(capsys, tmp_path, "--num-samples", "4", "--max-problems", "10", *SAMPLED,
                           "--verifier-max-new-tokens", "106")
    got = got["best_of_n"]
    too_long = [long for row in got["samples"] for long in row["too_long"]]
    assert 0 < got["too_long"] == sum(too_long) < 40
    for row in got["samples"]:
        for long, verdicts, score in zip(row["too_long"], row["verdicts"], row["scores"], strict=True):
            assert not long or verdicts == [None] * 3 and score == 0
    assert any(line.startswith(f"{got['too_long']} of 40 solutions do not fit") for line in lines)
    assert got["parse_fail"] == sum(sum(row["malformed"]) for row in got["samples"]) / (3 * (40 - got["too_long"]))


def test_a_generator_that_names_no_task_needs_one(capsys, base):
    path = base / "chatsft_checkpoints" / "tiny" / "meta_000200.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "user_config": {}}))
    assert "names no task" in refused(capsys, *ON_TASK)
    assert run(capsys, *ON_TASK, "--task", "chain", "--max-problems", "1", "--max-new-tokens", "20")[-1].startswith(
        "1 problems | ")


RL_VERIFIER = ["--verifier-source", "rl", "--verifier-tag", "r-ver", "--generator-tag", "tiny", "--max-problems", "2"]


@pytest.mark.parametrize("recipe, judge", [("prm", "steps"), ("prime", "")])
def test_a_verifier_that_writes_no_verifications_is_refused(capsys, base, recipe, judge):
    changed(base, "rl", "r-ver", 200, "prm" if recipe == "prime" else "verifier", recipe=recipe)
    line = refused(capsys, *RL_VERIFIER)
    assert f"recipe {recipe} has trained it to write no verifications" in line
    assert f"tango_rl --recipe {recipe}" in line
    assert ("fixed_verifier --judge" in line) == bool(judge) and line.endswith(f"{judge or recipe}\n")


@pytest.mark.parametrize("recipe, role", [("tango", "verifier"), (["orm"], "verifier"), ("refit", "generator")])
def test_others_are_asked_to_write(capsys, base, recipe, role):
    """A refitted generator writes: it is only warned of. A recipe that is no text is of no use here."""
    changed(base, "rl", "r-ver", 200, role, recipe=recipe)
    lines = run(capsys, *RL_VERIFIER)
    assert any("was trained as a generator" in line for line in lines) == (role == "generator")


def test_every_judge_that_is_named_is_one():
    assert {verifier_eval.UNWRITTEN[name] for name in ("orm", "genrm", "gram", "refit")} == {"end", "verdict",
                                                                                             "preferred", "steps"}
    assert set(verifier_eval.UNWRITTEN) <= set(recipes.names())
    assert set(verifier_eval.UNWRITTEN.values()) <= {"", *JUDGES}
