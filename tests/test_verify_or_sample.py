"""
verify_or_sample: expected accuracies against enumeration; costs, fronts and the crossover by hand; runs of tiny models.

    python -m pytest tests/test_verify_or_sample.py
"""
import json
import random
from itertools import permutations, product
from statistics import mean

import pytest
from test_verifier_eval import VERIFIER

from nanochat.common import script_main
from nanochat.rl.voting import SCORES, final_share
from scripts import verifier_eval, verify_or_sample
from scripts.verify_or_sample import Point, crossover, expected, front, grid, lead, powers, tokens_of, voting_at
from tasks import TASKS
from tasks.chain import Chain

# Solutions 1 and 3 are right. The verifier always passes 1, never 2; of 3 one verification cannot be read.
ROW = {"index": 0, "answers": ["a", "b", "a"], "outcomes": [True, False, True], "lengths": [10, 20, 30],
       "verdicts": [[True, True], [False, False], [True, None]], "step_verdicts": [[[], []]] * 3,
       "verification_lengths": [[2, 4], [6, 8], [0, 10]]}


def vote(tokens: float, accuracy: float) -> Point:
    return Point("maj", 1, 0, tokens, accuracy)


def verified(tokens: float, accuracy: float, choice: str = "bon") -> Point:
    return Point(choice, 1, 1, tokens, accuracy)


# The grid

def test_counts_are_powers_of_two():
    assert [powers(most) for most in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def naive(choice: str, s: int, v: int) -> float:
    """The share of all orders of solutions and of each one's verifications in which ROW is solved."""
    right, orders = [], list(product(permutations(range(3)), *[list(permutations(range(2)))] * 3))
    for order, *said in orders:
        first = order[:s]
        scores = [sum(ROW["verdicts"][i][g] is True for g in said[i][:v]) / v if v else 1.0 for i in first]
        if choice == "bon":
            winner = first[scores.index(max(scores))]
        else:
            sums = {}
            for i, score in zip(first, scores, strict=True):
                sums[ROW["answers"][i]] = sums.get(ROW["answers"][i], 0) + score
            winner = ROW["answers"].index(max(sums, key=sums.get))
        right.append(ROW["outcomes"][winner])
    return mean(right)


def test_expected_accuracies_are_those_of_all_orders():
    found = expected(ROW, 4000, random.Random(0), final_share)
    names = [("maj", s, 0) for s in (1, 2)] + [(c, s, v) for c in ("bon", "weighted") for s in (1, 2) for v in (1, 2)]
    assert found.keys() == set(names)
    for name in names:
        assert found[name] == pytest.approx(naive(*name), abs=0.03), name
    # One of three is wrong. Of two with one verification: 1 beats 2, and 3 does so at every second draw.
    assert naive("maj", 1, 0) == naive("bon", 1, 2) == pytest.approx(2 / 3)
    assert naive("bon", 2, 1) == pytest.approx(1 / 3 + 1 / 3 + 1 / 3 * 3 / 4)
    assert naive("bon", 2, 2) == 1


def test_with_all_samples_every_draw_is_the_same():
    row = {**ROW, **{name: [*ROW[name], ROW[name][0]] for name in ROW if name != "index"}}  # four solutions
    found = expected(row, 5, random.Random(0), final_share)
    assert found["maj", 4, 0] == found["bon", 4, 2] == found["weighted", 4, 2] == 1


def test_tokens_by_hand():
    """A solution has 20 in the mean, a verification 5."""
    assert [tokens_of(ROW, s, v) for s, v in ((1, 0), (4, 0), (1, 1), (2, 2))] == [20, 80, 25, 60]


def test_points_are_means_over_problems():
    """Of the second problem, with solutions twice as long, nothing is right. Its orders are drawn apart."""
    wrong = {**ROW, "index": 1, "outcomes": [False] * 3, "lengths": [20, 40, 60]}
    points = {point[:3]: point for point in grid([ROW, wrong], 50, 7, final_share)}
    assert points["bon", 2, 2][3:5] == (mean([60, 100]), 0.5) and points["maj", 2, 0].tokens == mean([40, 80])
    assert points["bon", 2, 2].half == pytest.approx(12.706 * 0.5 ** 0.5 / 2 ** 0.5, rel=1e-3)  # Student's t, 2 values
    assert list(points.values()) == grid([ROW, wrong], 50, 7, final_share) != grid([ROW, wrong], 50, 8, final_share)
    assert [p.half for p in grid([ROW], 1, 0, final_share)] == [None] * len(points)


# Fronts and the crossover

def test_a_front_is_more_accurate_than_all_that_is_as_cheap():
    points = [vote(40, 0.5), vote(10, 0.2), vote(20, 0.2), vote(10, 0.1), vote(30, 0.6), verified(5, 0.9)]
    assert front(points, ("maj",)) == [vote(10, 0.2), vote(30, 0.6)]
    both = [verified(5, 0.3), verified(5, 0.4, "weighted"), verified(9, 0.4)]
    assert front(both, ("bon", "weighted")) == [both[1]] and front(both, ("maj",)) == []


def test_voting_is_interpolated_in_log_tokens():
    votes = [vote(10, 0.2), vote(40, 0.6), verified(20, 0.9)]
    assert [voting_at(votes, x) for x in (10, 20, 40)] == pytest.approx([0.2, 0.4, 0.6])
    assert voting_at(votes, 9.9) is None and voting_at(votes, 40.1) is None
    # who has 20 tokens and does better with 10 spends 10
    assert voting_at([*votes, vote(20, 0.1)], 20) == pytest.approx(0.2)
    assert voting_at([vote(10, 0.2), vote(20, 0.1)], 20) == 0.2


VOTES = [vote(10, 0.2), vote(40, 0.6), vote(160, 0.6)]


@pytest.mark.parametrize("points, reached", [
    ([verified(20, 0.3), verified(80, 0.7)], 80),                      # behind .4, then ahead of .6
    ([verified(20, 0.5), verified(80, 0.7)], 20),
    ([verified(20, 0.5), verified(40, 0.6), verified(80, 0.7)], 80),   # level is not ahead
    ([verified(20, 0.5), verified(80, 0.55)], None),                   # ahead, and behind again
    ([verified(20, 0.5), verified(90, 0.4)], 20),                      # the second is not of the front
    ([verified(20, 0.3), verified(161, 0.9)], None),                   # costs more than any vote: not compared
    ([verified(20, 0.5), verified(161, 0.51)], 20)])
def test_the_crossover_by_hand(points, reached):
    assert crossover([*VOTES, *points]) == reached


def test_a_lead_is_the_accuracy_less_that_of_voting_there():
    points = [*VOTES, verified(20, 0.3), verified(80, 0.7, "weighted"), verified(161, 0.9)]
    (_, first), (second, last), (_, beyond) = lead(points)
    assert (first, last, beyond) == (pytest.approx(-0.1), pytest.approx(0.1), None) and second.choice == "weighted"


# Runs

FLAGS = [*VERIFIER, "--generator-tag", "tiny", "--max-problems", "6", "--num-samples", "4", "--num-verifications", "2"]


def run(*flags: str) -> None:
    script_main(verify_or_sample.main, verify_or_sample.make_parser(), [*FLAGS, "--num-draws", "8", *flags])


def refused(capsys, *flags: str) -> str:
    """Runs with input that must be refused before any work; its one line."""
    with pytest.raises(SystemExit) as stop:
        run(*flags)
    done = capsys.readouterr()
    assert stop.value.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1
    assert "percent" not in done.out
    return done.err


def test_a_run_is_on_the_samples_of_verifier_eval(base, tmp_path, capsys):
    out, other = tmp_path / "curves.json", tmp_path / "other.json"
    run("--out", str(out))
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(out.read_text())
    script_main(verifier_eval.main, verifier_eval.make_parser(), [*FLAGS, "--temperature", "1", "--out", str(other)])
    samples = json.loads(other.read_text())["best_of_n"]["samples"]
    assert [{**row, "choice": None} for row in found["samples"]] == [{**row, "choice": None} for row in samples]
    assert len(found["points"]) == 3 + 2 * 3 * 2 and found["problems"] == 6
    points = [Point(**point) for point in found["points"]]
    assert points == grid(samples, 8, 0, SCORES["final"]) and found["crossover"] == crossover(points)
    assert [Point(**p) for p in found["fronts"]["verify"]] == [point for point, _ in lead(points)]
    lengths = [length for row in samples for length in row["lengths"]]
    assert points[0][:4] == ("maj", 1, 0, pytest.approx(mean(lengths)))
    written = sum(length > 0 for row in samples for of_one in row["verification_lengths"] for length in of_one)
    assert written == 6 * 4 * 2 and (tmp_path / "curves.png").stat().st_size > 5000
    assert any(line.startswith("vote or verify, task chain: 6 problems, up to 4 solutions") for line in lines)
    assert any(line.startswith("verifying is ") for line in lines)
    run("--out", str(out))  # an earlier result is replaced
    assert json.loads(out.read_text()) == found


def test_problems_that_cannot_be_scored_are_left_out_and_counted(base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Chain, "check", lambda task, problem, solution, check=Chain.check: None if problem.index == 2
                        else check(task, problem, solution))
    monkeypatch.setitem(TASKS, "chain", Chain)
    run("--out", str(tmp_path / "o.json"))
    found = json.loads((tmp_path / "o.json").read_text())
    assert (found["problems"], found["problems_left_out"]) == (5, 1) and len(found["samples"]) == 6
    assert "1 problems with a solution that cannot be scored are left out" in capsys.readouterr().out
    monkeypatch.setattr(Chain, "check", lambda *_: None)
    assert "no problem of which all solutions can be scored" in refused(capsys)


def test_solutions_that_do_not_fit_the_verifier_are_counted_and_cost_no_verification(base, tmp_path, capsys):
    run("--verifier-max-new-tokens", "106", "--out", str(tmp_path / "o.json"))
    found = json.loads((tmp_path / "o.json").read_text())
    assert 0 < found["too_long"] == sum(sum(row["too_long"]) for row in found["samples"]) < 24
    assert f"{found['too_long']} of 24 solutions do not fit the verifier's context" in capsys.readouterr().out
    for row in found["samples"]:
        for is_long, lengths in zip(row["too_long"], row["verification_lengths"], strict=True):
            assert (lengths == [0, 0]) == is_long


@pytest.mark.parametrize("flags, words", [
    (["--num-samples", "6"], "--num-samples 6: must be a power of two"),
    (["--num-verifications", "3"], "--num-verifications 3: must be a power of two"),
    (["--num-draws", "0"], "--num-draws 0"), (["--temperature", "0"], "--temperature above 0"),
    (["--verifier-tag", "nobody"], "nobody"), (["--generator-tag", "nobody"], "nobody"),
    (["--generator-tag", ""], "--generator-tag"), (["--out", "/proc/o.json"], "--out /proc/o.json: cannot be written")])
def test_the_script_refuses(base, capsys, flags, words):
    assert words in refused(capsys, *flags)


def test_another_file_is_not_replaced(base, tmp_path, capsys):
    path = tmp_path / "o.json"
    path.write_text(json.dumps({"args": {"verifier_tag": "tiny-ver"}, "best_of_n": {}}))  # verifier_eval's
    assert "no earlier result of this script" in refused(capsys, "--out", str(path))
    (tmp_path / "mine.png").write_text("mine")
    assert "mine.png is there, and not of an earlier result" in refused(capsys, "--out", str(tmp_path / "mine.json"))


@pytest.mark.parametrize("found, leads, words", [
    (None, [], "nothing is compared"), (None, [0.1, -0.1], "at some points"), (None, [-0.1, 0.0], "at no point"),
    (150.0, [-0.1, 0.1], "from 150.0 tokens on")])
def test_what_there_is_no_crossover_for_is_said(found, leads, words):
    assert words in verify_or_sample.in_words(found, leads)
