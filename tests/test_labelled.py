"""
Labelled solutions: what is read, what is refused in one line, and who learns from which in a step.
"""
import json
import math
from types import SimpleNamespace

import pytest
from conftest import parse, rl_flags

from nanochat.common import BadInput
from nanochat.rl.verify import labelled as labelled_module
from nanochat.rl.verify.labelled import (Labelled, by_problem, check_kind, check_labels, check_outcomes,
                                         labelled_of_step, pairs_of_step, read_labelled, right_and_wrong)
from scripts import tango_rl
from tasks import make_task
from tasks.common import Problem

LINE = {"split": "rl", "index": 3, "solution": "1+1:2;2*2:1;=21", "outcome": True, "labels": [1.0, 0.25]}


@pytest.fixture(scope="module")
def task():
    return make_task(parse(tango_rl, ["--chain-modulus", "3", "--chain-min-steps", "2", "--chain-max-steps", "2"]))


@pytest.fixture
def write(tmp_path, task):
    """(changes of a good line) -> the path of a file with a line for each."""
    def of(*changes: dict, name: str = "l") -> str:
        path, rows = tmp_path / f"{name}.jsonl", [LINE | change for change in changes]
        path.write_text("".join(json.dumps({"prompt": task.problem("rl", row["index"]).prompt} | row) + "\n"
                                for row in rows))
        return str(path)
    return of


def test_a_line_is_a_solution_with_its_outcome_and_a_label_of_its_kind_for_each_step(write, task):
    path = write({}, {"index": 4, "outcome": None, "labels": [1, -3]}, {"gold": []})
    rows = read_labelled(path, task)
    assert [row.outcome for row in rows] == [True, None, True]
    assert [row.labels for row in rows] == [[1.0, 0.25], [1.0, -3.0], [1.0, 0.25]]
    assert rows[1].problem == task.problem("rl", 4) and rows[1].solution == LINE["solution"]
    for kind, methods in (("chances", ["gold", "rpe", "somebody's", None, ["pav"]]), ("progress", ["pav", "", 3])):
        path = write(*({"method": method} for method in methods), name=kind)
        check_kind(path, read_labelled(path, task), kind)


@pytest.mark.parametrize("change, words", [
    ({"prompt": "1+1"}, "its prompt is not that of problem 3 of rl of task chain"),
    ({"labels": [1.0]}, "has 1 labels, and the solution 2 steps"),
    ({"labels": [1.0, "x"]}, "a label that is no finite number"),
    ({"labels": [1.0, math.nan]}, "a label that is no finite number"),
    ({"labels": [1.0, 10 ** 400]}, "a label that is no finite number"),
    ({"labels": [1.0, True]}, "a label that is no finite number"),
    *((change, "is no json object with split, index, prompt, solution, outcome, labels as") for change in (
        {"labels": None}, {"outcome": 1}, {"index": "3", "prompt": ""}, {"index": True}, {"prompt": "\ud800"},
        {"solution": "1+1:2;2*2:1;=2\ud800"})),
    ({"index": 10 ** 400}, "its prompt is not that of problem 10000000000000000000 of rl"),
    ({"split": "no" * 99, "prompt": ""}, f"its prompt is not that of problem 3 of {'no' * 20} of task"),
    ({"prompt": "1"}, "was the file made with other flags or another seed? Those of label_steps stand beside"),
    ({"split": "no", "prompt": ""}, "its prompt is not that of problem 3 of no")])
def test_a_line_that_does_not_fit_is_refused_with_its_number(tmp_path, task, change, words):
    good = {"prompt": task.problem("rl", 3).prompt}
    path = tmp_path / "l.jsonl"
    path.write_text("".join(json.dumps(LINE | good | more) + "\n" for more in ({}, change)))
    with pytest.raises(BadInput) as refused:
        read_labelled(str(path), task)
    assert str(refused.value).startswith(f"--labels {path}: line 2: ") and words in str(refused.value)


def test_a_file_that_is_none_is_refused(tmp_path, task):
    path = tmp_path / "l.jsonl"
    for text, words in ((None, "l.jsonl: No such file"), ("{\n", "line 1: is no json: "),
                        ("[1]\n", "line 1: is no json object"), ("\n", "has no solutions")):
        if text:
            path.write_text(text)
        with pytest.raises(BadInput, match=words):
            read_labelled(str(path), task)


@pytest.mark.parametrize("split, index, words", [
    *((split, 3, f"problem 3 is of {split}, on which a run is evaluated") for split in ("test_in", "test_out")),
    ("rl", -1, "its prompt is not that of problem -1 of rl")])
def test_nothing_is_learned_from_test_problems_or_what_is_before_the_first(write, task, split, index, words):
    change = {"split": split, "index": index, "prompt": task.problem(split, index).prompt}
    with pytest.raises(BadInput, match=f"line 2: {words}"):
        read_labelled(write({}, change), task)


@pytest.mark.parametrize("change, kind, words", [
    ({"labels": [1.0, 1.5]}, "chances", "the label 1.5; labels are from 0 to 1 here"),
    ({"method": "gold"}, "progress", "labels of method gold, which are chances, and progress are learned here"),
    ({"method": "pav"}, "chances", "labels of method pav, which are progress, and chances are learned here; progress "
                                   ".method pav. is learned by recipe prm with --prm-labels progress"),
    ({"method": "information_gain"}, "progress", "labels of method information_gain, which are information gains")])
def test_labels_of_another_kind_are_refused(write, task, change, kind, words):
    """By their range, or where that tells nothing by what the file says has made them."""
    rows = read_labelled(write({}, change), task)
    with pytest.raises(BadInput, match=f"--labels l.jsonl: problem 3 of rl has {words}"):
        check_kind("l.jsonl", rows, kind)
    check_kind("l.jsonl", rows[:1], kind)  # made by nobody knows what


def test_a_file_from_which_nothing_can_be_learned_is_refused(write, task):
    nothing = {"solution": "=21", "labels": [], "outcome": None}
    none, one = (SimpleNamespace(labels=write(*rows, name=str(n)), updates_per_batch=1)
                 for n, rows in enumerate(([nothing, nothing], [nothing, {}])))
    with pytest.raises(BadInput, match="has no solution with a step"):
        check_labels(none, task, "chances")
    with pytest.raises(BadInput, match="has no solution whose outcome is known"):
        check_outcomes(none, task)
    check_labels(none, task)
    check_labels(one, task, "chances")
    check_outcomes(one, task)


def play_of(path: str, task, step: int = 0, rank: int = 0, world: int = 1, memory=None):
    args = SimpleNamespace(labels=path, examples_per_step=4, seed=5)
    logged = {}
    return SimpleNamespace(args=args, task=task, step=step, memory={} if memory is None else memory, device="cpu",
                           run=SimpleNamespace(rank=rank, world=world), logged=logged,
                           log=lambda role, values: logged.update({(role, name): v for name, v in values.items()}))


def test_an_epoch_goes_through_all_of_them_and_ranks_share_a_step_out(write, task):
    path = write(*({"index": i} for i in range(8)))
    seen = [[row.problem.index for row in labelled_of_step(play_of(path, task, step))] for step in range(4)]
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == list(range(8))
    assert seen[0] + seen[1] != seen[2] + seen[3] and seen[0] + seen[1] != list(range(8))
    again = labelled_of_step(play_of(path, task, 3))
    assert [row.problem.index for row in again] == seen[3]  # a function of seed and step
    path = write(*({"outcome": outcome} for outcome in (True, False, None, True)), name="copies")
    whole = labelled_of_step(play_of(path, task))
    parts = [labelled_of_step(play_of(path, task, rank=rank, world=2)) for rank in (0, 1)]
    named = lambda rows: [(row.outcome, row.copy) for row in rows]
    assert named(parts[0]) == named(whole)[::2] and named(parts[1]) == named(whole)[1::2]
    assert [row.copy for row in whole] == [0, 1, 2, 3]  # of one problem


def test_a_run_goes_on_with_the_file_that_it_began_with_on_all_ranks(write, task, monkeypatch):
    path, memory = write({}), {}
    labelled_of_step(play_of(path, task, memory=memory))
    write({"labels": [1.0, 0.5]})
    read_labelled.cache_clear()  # another process
    with pytest.raises(BadInput, match="no longer the file that the run began with"):
        labelled_of_step(play_of(path, task, memory=memory))
    monkeypatch.setattr(labelled_module, "gather_lists", lambda rows, device: [*rows, 1])
    with pytest.raises(BadInput, match="the ranks have read different files"):
        labelled_of_step(play_of(write({}), task))


def test_labels_are_asked_for_before_anything_is_written(base):
    with pytest.raises(BadInput, match="--labels: name the labelled solutions"):
        tango_rl.main(parse(tango_rl, [*rl_flags("--recipe", "orm", "--run", "r"), "--labels", ""]))
    assert not (base / "runs").exists()


def row_of(index: int, outcome: bool | None, solution: str = "") -> Labelled:
    return Labelled(Problem("rl", index, "p", ""), solution, outcome, [])


def test_a_problem_with_a_right_and_a_wrong_solution_makes_a_pair_wherever_they_stand():
    rows = [row_of(3, False, "a"), row_of(1, True, "b"), row_of(3, None, "c"), row_of(2, False, "d"),
            row_of(3, True, "e"), row_of(1, True, "f"), row_of(3, True, "g"), row_of(3, False, "h")]
    assert [[row.solution for row in group] for group in by_problem(rows)] == [
        ["a", "c", "e", "g", "h"], ["b", "f"], ["d"]]
    assert [[row.solution for row in pair] for pair in right_and_wrong(rows)] == [["e", "a"]]  # the first of either
    assert right_and_wrong([]) == []


def test_the_pairs_of_a_step_are_shared_out_and_problems_without_one_are_counted(write, task):
    path = write({"outcome": True}, {"outcome": None}, {"index": 1}, {"outcome": False})
    whole = play_of(path, task)
    pairs = pairs_of_step(whole, "verifier")
    assert [[(row.problem.index, row.outcome) for row in pair] for pair in pairs] == [[(3, True), (3, False)]] * 4
    assert [[row.copy for row in pair] for pair in pairs] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert whole.logged == {("verifier", "unpaired"): 1}
    parts = [pairs_of_step(play_of(path, task, rank=rank, world=2), "verifier") for rank in (0, 1)]
    copies = lambda chosen: [[row.copy for row in pair] for pair in chosen]
    assert copies(parts[0]) == copies(pairs)[::2] and copies(parts[1]) == copies(pairs)[1::2]
