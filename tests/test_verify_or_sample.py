"""
verify_or_sample: expected accuracies against enumeration; costs, leads and the crossover by hand; runs of tiny
models.
"""
import json
import random
from itertools import permutations, product
from statistics import mean

import pytest
from test_verifier_eval import VERIFIER

from dev.experiments import verify_or_sample
from dev.experiments.verify_or_sample import (RESULTS, VERIFIED, Lead, Point, best_way, crossover, dealt, expected,
                                              leads, points_of, powers, print_result, score_of_read, tokens_of,
                                              voting_at)
from nanochat.cli import script_main
from nanochat.rl.measure.voting import SCORES, final_share
from scripts import verifier_eval
from tasks import TASKS
from tasks.chain import Chain

# Solutions 1 and 3 are right. The verifier always passes 1, never 2; of 3 one verification cannot be read.
ROW = {"index": 0, "answers": ["a", "b", "a"], "outcomes": [True, False, True], "lengths": [10, 20, 30],
       "verdicts": [[True, True], [False, False], [True, None]], "step_verdicts": [[[], []]] * 3,
       "verification_lengths": [[2, 4], [6, 8], [0, 10]]}


def test_counts_are_powers_of_two():
    assert [powers(most) for most in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def naive(choice: str, s: int, v: int) -> float:
    """The share of all orders of solutions and of each one's verifications in which ROW is solved."""
    right, orders = [], list(product(permutations(range(3)), *[list(permutations(range(2)))] * 3))
    for order, *said in orders:
        first = order[:s]
        read = [[ROW["verdicts"][i][g] for g in said[i][:v] if ROW["verdicts"][i][g] is not None] for i in first]
        scores = [mean(verdicts) if verdicts else float(not v) for verdicts in read]
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
    row = {**ROW, **{name: [*ROW[name], ROW[name][0]] for name in ROW if name != "index"}}  # four solutions
    found = expected(row, 5, random.Random(0), final_share)
    assert found["maj", 4, 0] == found["bon", 4, 2] == found["weighted", 4, 2] == 1


def test_an_unread_verification_is_dropped_and_does_not_count_against():
    """One verdict for the right solution, and one that cannot be read; one for and one against the wrong solution. The
    right one scores 1 and not 1/2, so that no tie is left; with one verification it is unread in half of the draws."""
    row = {**ROW, "answers": ["a", "b"], "outcomes": [True, False], "verdicts": [[True, None], [True, False]],
           "step_verdicts": [[[True], []], [[True], [False]]]}
    found = expected(row, 4000, random.Random(0), final_share)
    assert found["bon", 2, 2] == found["weighted", 2, 2] == 1
    assert found["bon", 2, 1] == pytest.approx(1 / 4 + 1 / 8 + 1 / 8, abs=0.03)  # 1 : 0, and the ties 1 : 1 and 0 : 0
    assert expected(row, 4, random.Random(0), SCORES["steps"])["bon", 2, 2] == 1
    assert score_of_read([None, None], [[], []], [0, 1], final_share) == 0


def test_tokens_and_points_by_hand():
    """A solution has 20 in the mean, a verification 5."""
    assert [tokens_of(ROW, s, v) for s, v in ((1, 0), (4, 0), (1, 1), (2, 2))] == [20, 80, 25, 60]
    solved = [{("maj", 1, 0): 1.0, ("bon", 1, 1): 0.5}, {("maj", 1, 0): 0.0, ("bon", 1, 1): 0.5}]
    vote, verified = points_of(solved, {("maj", 1, 0): 10.0, ("bon", 1, 1): 20.0})
    assert vote[:5] == ("maj", 1, 0, 10.0, 0.5) and verified == ("bon", 1, 1, 20.0, 0.5, 0.0)
    assert vote.half == pytest.approx(12.706 * 0.5 ** 0.5 / 2 ** 0.5, rel=1e-3)  # Student's t, 2 values
    assert points_of(solved[:1], {("maj", 1, 0): 10.0})[0].half is None


VOTES = {("maj", 1, 0): 10.0, ("maj", 2, 0): 40.0}


def test_the_best_way_costs_no_more_and_voting_is_interpolated_in_log_tokens():
    points = [Point("bon", 1, 1, 20, 0.4), Point("bon", 1, 2, 30, 0.6), Point("weighted", 2, 1, 25, 0.6),
              Point("bon", 2, 2, 60, 0.7), Point("maj", 1, 0, 10, 0.9)]
    assert [best_way(points, VERIFIED, x) for x in (20, 24, 30, 59, 60)] == [
        ("bon", 1, 1), ("bon", 1, 1), ("weighted", 2, 1), ("weighted", 2, 1), ("bon", 2, 2)]
    ways, of_one = {tokens: way for way, tokens in VOTES.items()}, {("maj", 1, 0): 0.2, ("maj", 2, 0): 0.6}
    assert [voting_at(of_one, ways, x) for x in (10, 20, 40)] == pytest.approx([0.2, 0.4, 0.6])
    assert voting_at(of_one, ways, 40.1) is None


def test_what_is_chosen_on_one_half_is_scored_on_the_other():
    """One way to verify solves the one half of the problems, another of the same cost the other half."""
    one, _ = dealt(list(range(4)), 7)
    solved = [{("maj", 1, 0): 0.5, ("maj", 2, 0): 1.0, ("bon", 1, 1): float(i in one),
               ("bon", 1, 2): float(i not in one), ("bon", 2, 2): 1.0} for i in range(4)]
    cost = {**VOTES, ("bon", 1, 1): 20.0, ("bon", 1, 2): 20.0, ("bon", 2, 2): 41.0}  # the last is not compared
    (found,) = leads(solved, cost, 7)
    assert found == (20.0, pytest.approx(0.75), 0.0, -0.75, 0.0, [("bon", 1, 1), ("bon", 1, 2)])


def test_voting_spends_no_more_than_is_best_on_all_problems():
    """Two votes are worse than one in the mean, though not on the second problem: who has 40 tokens spends 10."""
    solved = [{("maj", 1, 0): 0.5, ("maj", 2, 0): two, ("bon", 1, 1): verified}
              for two, verified in ((0.2, 0.5), (0.7, 1.0))]
    (found,) = leads(solved, {**VOTES, ("bon", 1, 1): 40.0}, 0)
    assert found[1:4] == pytest.approx((0.5, 0.75, 0.25))
    assert found.half == pytest.approx(12.706 * 0.125 ** 0.5 / 2 ** 0.5, rel=1e-3)  # of the two differences 0 and .5


def test_the_luckiest_of_many_ways_has_no_lead():
    """All solve a problem by the toss of a coin. The luckiest of 24 seems to lead by far where it was chosen."""
    seeming, fair = [], []
    for seed in range(40):
        rng, ways = random.Random(seed), [("bon", s, v) for s in range(1, 5) for v in range(1, 7)]
        solved = [{way: float(rng.random() < 0.5) for way in [*VOTES, *ways]} for _ in range(40)]
        cost = {**VOTES, **dict.fromkeys(ways, 10.0)}
        best = best_way(points_of(solved, cost), VERIFIED, 10.0)
        seeming.append(mean(row[best] - row["maj", 1, 0] for row in solved))
        fair += [found.lead for found in leads(solved, cost, seed)]
    assert mean(seeming) > 0.12 and abs(mean(fair)) < 0.04 and len(fair) == 40


@pytest.mark.parametrize("ahead, result, start", [
    ([], "not compared", None),
    ([-0.1, 0.0], "never ahead", None),          # level is not ahead
    ([-0.1, 0.1], "ahead", 80),
    ([0.1, 0.1], "ahead", 20),
    ([0.1, 0.0, 0.1], "ahead", 320),
    ([0.1, -0.1], "ahead, then not", None)])
def test_the_crossover_by_hand(capsys, ahead, result, start):
    found = [Lead(20.0 * 4 ** i, 0.5, 0.5 + lead, lead, 0.0, []) for i, lead in enumerate(ahead)]
    got = crossover(found)
    assert (got["result"], got["from"]) == (result, start) and result in RESULTS
    assert got["up_to"] == (found[-1].tokens if found else None)
    assert (got["compared"], got["ahead"]) == (len(ahead), sum(x > 0 for x in ahead)) and got["surely"] == got["ahead"]
    print_result(found)
    assert (f"up to {got['up_to']}" in capsys.readouterr().out) == (result in ("ahead", "never ahead"))


def test_results_are_told_apart():
    known = {"from": 20.0, "up_to": 80.0, "ahead": 1, "compared": 2}
    assert len({words.format(**known) for words in RESULTS.values()}) == 4
    found = crossover([Lead(20.0, 0.5, 0.6, 0.1, 0.2, []), Lead(40.0, 0.5, 0.8, 0.3, 0.2, [])])
    assert (found["from"], found["ahead"], found["surely"]) == (20.0, 2, 1)


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
    solved = [expected(row, 8, random.Random(f"0-draws-{row['index']}"), SCORES["final"]) for row in samples]
    cost = {way: mean(tokens_of(row, *way[1:]) for row in samples) for way in solved[0]}
    points, expected_leads = points_of(solved, cost), leads(solved, cost, 0)
    assert [Point(**point) for point in found["points"]] == points and expected_leads
    assert found["leads"] == json.loads(json.dumps([lead._asdict() for lead in expected_leads]))
    assert found["crossover"] == crossover(expected_leads)
    assert found["parse_fail"] == sum(sum(row["malformed"]) for row in samples) / 48
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
    assert "left out: 1 problem with a solution that cannot be scored" in capsys.readouterr().out
    monkeypatch.setattr(Chain, "check", lambda *_: None)
    assert "of 0 problems all solutions can be scored, and it takes two" in refused(capsys)


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
    (["--max-problems", "1"], "--max-problems 1: it takes two"),
    (["--num-samples", "1"], "--num-samples 1: nothing could be verified"),
    (["--num-draws", "0"], "--num-draws 0"), (["--temperature", "0"], "--temperature above 0"),
    (["--verifier-tag", "nobody"], "nobody"), (["--generator-tag", "nobody"], "nobody"),
    (["--generator-tag", ""], "--generator-tag"), (["--out", "/proc/o.json"], "cannot write to /proc")])
def test_the_script_refuses(base, capsys, flags, words):
    assert words in refused(capsys, *flags)


def test_another_file_is_not_replaced(base, tmp_path, capsys):
    path = tmp_path / "o.json"
    path.write_text(json.dumps({"args": {"verifier_tag": "tiny-ver"}, "best_of_n": {}}))  # verifier_eval's
    assert "no earlier result of this script" in refused(capsys, "--out", str(path))
    (tmp_path / "mine.png").write_text("mine")
    assert "mine.png is there, and not of an earlier result" in refused(capsys, "--out", str(tmp_path / "mine.json"))
