"""Halves: what two agents' texts make together, conventions, hostile halves, demonstrations."""
import random

import pytest
from test_tasks import task_of

from tasks import flags_of_others
from tasks.common import Problem

PROBLEM = Problem("rl", 0, "3+5*2,4-1*7", "6,1")  # 8*2 = 16 and 3*7 = 21, modulo 10
FIRST, SECOND = "a3+5:8;8*2:6;=6", "a4-1:3;3*7:1;=1"
BOTH = "a3+5:8;8*2:6;,a4-1:3;3*7:1;=6,1"
SURE = ["--chain-share", "0", "--chain-verifier-share", "0"]


@pytest.mark.parametrize("first, second, right, halves, agree", [
    (FIRST, SECOND, True, [True, True], True), ("b" + FIRST[1:], "b" + SECOND[1:], True, [True, True], True),
    ("a=6", "a=1", True, [True, True], True),                        # the results count, as in chain
    (FIRST, "b" + SECOND[1:], False, [True, True], False),           # two conventions, no letter, one of none
    (FIRST[1:], SECOND, False, [True, True], False), (FIRST[1:], SECOND[1:], False, [True, True], False),
    ("c" + FIRST[1:], "c" + SECOND[1:], False, [True, True], False),
    (FIRST[:-1] + "5", SECOND, False, [False, True], True), (FIRST, SECOND[:-1] + "0", False, [True, False], True),
    (SECOND, FIRST, False, [False, False], True), (FIRST, "", False, [True, False], False),
    ("", SECOND, False, [False, True], False), ("", "", False, [False, False], False),
    (BOTH, "", False, [False, False], False), (BOTH, SECOND, False, [False, True], True),  # one agent cannot write both
    ("a3+5:8;,4-1:3;=6", SECOND, True, [True, True], True),          # its mark between halves is none
    ("aa3+5:8;=6", SECOND, False, [False, True], True),
    ("a3+5:8;a8*2:6;=6", "4-1:3;=1", False, [False, True], False),   # a letter for the other
    ("a3+5:8;8*2:6;=6=6", SECOND, False, [False, True], True), ("a3+5:8;8*2:6;=06", SECOND, False, [False, True], True),
    ("a3+5:8;8*2:6;6", SECOND, False, [False, True], True),
])
def test_what_two_texts_make_together(first, second, right, halves, agree):
    task = task_of("halves")
    solution = task.joint(first, second)
    assert solution == BOTH or (first, second) != (FIRST, SECOND)
    assert (task.check(PROBLEM, solution), task.half_outcomes(PROBLEM, solution)) == (right, halves)
    assert task.agrees(solution) is agree


@pytest.mark.parametrize("solution, errors", [
    (BOTH, [None] * 4),
    ("b3+5:8;8*2:6;,b4-1:3;3*7:1;=6,1", [None] * 4),
    ("a3+5:8;8*2:6;,b4-1:3;3*7:1;=6,1", [None, None, "convention", None]),
    ("3+5:8;8*2:6;,a4-1:3;3*7:1;=6,1", ["convention", None, "convention", None]),
    ("c3+5:8;8*2:6;,c4-1:3;3*7:1;=6,1", ["convention", None, "convention", None]),
    ("a3+5:9;9*2:8;,a4-1:3;3*7:2;=8,2", ["result", None, None, "result"]),
    ("a4-1:3;3*7:1;,a3+5:8;8*2:6;=1,6", ["operands"] * 4),
    ("b3+5:9;8*2:6;,a4-2:3;3*7:1;=6,1", ["result", "operands", "operands", None]),  # an error of chain's comes first
    ("a3+5:8;a8*2:6;,a4-1:3;=6,1", [None, "operands", None]),
    ("a3+5:8;8*2:6;a4-1:3;3*7:1;=61", [None, None, "operands", "operands"]),         # no mark: all is the first half
    (",a4-1:3;3*7:1;=,1", ["convention", None]),
    ("", []), (",", []), ("a", []), ("=", [])])
def test_what_is_wrong_with_a_step(solution, errors):
    task = task_of("halves")
    assert task.step_errors(PROBLEM, solution) == errors
    assert task.step_labels(PROBLEM, solution) == [error is None for error in errors]


@pytest.mark.parametrize("solution, verification", [
    (BOTH, "3+5:8T;8*2:6T;4-1:3T;3*7:1T;=T"),
    ("a3+5:8;8*2:6;,b4-1:3;3*7:1;=6,1", "3+5:8T;8*2:6T;4-1:3F;3*7:1T;=F"),
    ("a3+5:8;8*2:6;,a4-1:2;2*7:4;=6,4", "3+5:8T;8*2:6T;4-1:3F;2*7:4T;=F"),
    ("a3+5:8;8*2:6;,a4-1:3;3*7:1;=6,2", "3+5:8T;8*2:6T;4-1:3T;3*7:1T;=F"),
    ("a3+5:8;8*2:6;,a4-1:3;=6,3", "3+5:8T;8*2:6T;4-1:3T;=F"),
    (",", "=F"), ("a=6,1", "=F")])
def test_verifications_written_by_hand(solution, verification):
    assert task_of("halves", *SURE).verification_demo(PROBLEM, solution, random.Random(0)) == verification


def test_demonstrations_draw_a_letter_and_are_right_in_what_they_were_taught():
    task, halves = task_of("halves", *SURE), []
    for i in range(200):
        problem = task.problem("sft", i)
        (quoted, first), (_, second) = (demo(problem, random.Random(f"{i}-{demo}"))
                                        for demo in (task.first_demo, task.second_demo))
        solution = task.joint(first, second)
        assert quoted == {} and task.half_outcomes(problem, solution) == [True, True]
        halves.append((first[0], second[0]))
        assert task.check(problem, solution) is (first[0] == second[0]) is task.agrees(solution)
        assert task.check(problem, task.solution_demo(problem, random.Random(i))) is True  # one text keeps its letter
    agree = [a == b for a, b in halves]
    assert {letter for pair in halves for letter in pair} == {"a", "b"}
    assert abs(sum(agree) / len(agree) - 0.5) < 0.14  # four standard errors


def test_demonstrations_of_halves_carry_the_misconceptions_of_chain():
    task = task_of("halves", "--chain-wrongness", "1")
    wrong = 0
    for i in range(100):
        problem = task.problem("sft", i)
        solution = task.joint(task.first_demo(problem, random.Random(i))[1],
                              task.second_demo(problem, random.Random(-i))[1])
        errors = task.step_errors(problem, solution)
        assert set(errors) <= {None, "result", "convention"}
        wrong += errors.count("result")
    assert wrong > 100


def test_a_corrupted_solution_is_right_or_wrong_in_either_way():
    task, found = task_of("halves"), set()
    for i in range(300):
        problem = task.problem("sft", i)
        solution = task.corrupted_solution(problem, random.Random(i))
        found.add((all(task.half_outcomes(problem, solution)), task.agrees(solution)))
    assert found == {(True, True), (True, False), (False, True), (False, False)}


def test_a_problem_is_two_of_chains_and_without_letters_there_is_nothing_to_agree_on():
    task = task_of("halves", "--chain-answer", "all")
    chain = task_of("chain", "--chain-answer", "final")
    for i in range(20):
        left, right = chain.problem("rl", 2 * i), chain.problem("rl", 2 * i + 1)
        assert task.problem("rl", i) == Problem("rl", i, f"{left.prompt},{right.prompt}",
                                                f"{left.answer},{right.answer}")
    others = flags_of_others("halves")  # the flags of chain are its own
    assert "chain_" not in others and "halves_" not in others and "brittle_" in others
    for letters, letter, other in (("1", "a", ""), ("0", "", "a")):
        task = task_of("halves", *SURE, "--halves-letters", letters)
        problem = task.problem("sft", 0)
        first, second = (demo(problem, random.Random(0))[1] for demo in (task.first_demo, task.second_demo))
        assert [text.rstrip("0123456789+-*:;=") for text in (first, second)] == [letter, letter]
        assert task.check(problem, task.joint(first, second)) is True
        assert task.check(problem, task.joint(other + first[len(letter):], second)) is False
