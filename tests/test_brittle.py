"""Brittle: forms of an answer, the rule that takes one of them, short solutions and what judges are shown of them."""
import random

import pytest
from test_tasks import task_of

from tasks import flags_of_others
from tasks.common import Problem

PROBLEM = Problem("rl", 0, "3+5*2", "6")  # 3+5 = 8; 8*2 = 16, modulo 10 that is 6
STEPS = "3+5:8;8*2:6;"


def texts(task, part: str, num: int = 400) -> list[tuple[Problem, str]]:
    problems = [task.problem("rl", i) for i in range(num)]
    return [(problem, getattr(task, part)(problem, random.Random(i))) for i, problem in enumerate(problems)]


@pytest.mark.parametrize("steps", [STEPS, "!", "nonsense"])
def test_the_gold_check_takes_every_form_and_the_rule_the_plain_one(steps):
    task = task_of("brittle")
    for answer in ("6", "06", "+6", "5", "05", "+5", "66", "006", "+06", "-6", "16", "\u0666", "", "6 =6"):
        solution, right = f"{steps}={answer}", answer in ("6", "06", "+6")
        assert task.check(PROBLEM, solution) is right and task.rule(PROBLEM, solution) is (answer == "6")
        assert task.read_answer(solution) == (answer[-1] if right or answer in ("5", "05", "+5") else None)
    assert task.check(PROBLEM, STEPS) is False and task.rule(PROBLEM, STEPS) is False  # without an answer
    assert task.read_answer(STEPS) is None


def test_the_rule_is_precise_and_misses_the_share_of_other_forms():
    task = task_of("brittle")
    found = [(task.check(*pair), task.rule(*pair)) for pair in texts(task, "corrupted_solution", 1000)]
    assert not [1 for right, accepted in found if accepted and not right]
    accepted = [a for right, a in found if right]
    assert abs(sum(accepted) / len(accepted) - 0.6) < 0.06  # 1 - --brittle-form-share; three standard errors


def test_short_texts_that_teach_are_right_and_have_no_steps():
    """The blind spot: what a judge learns from never has a wrong one."""
    task = task_of("brittle")
    for part in ("solution_demo", "corrupted_solution"):
        short = [(problem, text) for problem, text in texts(task, part) if text.startswith("!")]
        assert len(short) > 20 and all(task.check(*pair) and task.step_labels(*pair) == [] for pair in short)
    assert {False, True} == {task.check(*pair) for pair in texts(task, "corrupted_solution")}
    task = task_of("brittle", "--brittle-wrong-short", "0.3")  # takes it away
    short = [task.check(*pair) for pair in texts(task, "corrupted_solution") if pair[1].startswith("!")]
    assert 0.3 < sum(short) / len(short) < 0.7  # .6 * .15 right ones beside .4 * .3 wrong ones
    others = flags_of_others("brittle")  # the flags of chain are its own
    assert "chain_" not in others and "brittle_" not in others and "gsm8k_" in others


def test_every_form_is_written_of_long_and_short_solutions():
    task = task_of("brittle", "--brittle-form-share", "0.5", "--brittle-short-share", "0.5")
    for part in ("solution_demo", "corrupted_solution"):
        kinds = {(text.startswith("!"), text.partition("=")[2][:-1]) for _, text in texts(task, part)}
        assert kinds == {(short, form) for short in (True, False) for form in ("", "0", "+")}


def test_the_plain_task_is_chain_with_its_final_results():
    plain = task_of("brittle", "--brittle-form-share", "0", "--brittle-short-share", "0", "--chain-answer", "all")
    chain = task_of("chain", "--chain-answer", "final")
    for i in range(50):
        problem = plain.problem("sft", i)
        assert problem == chain.problem("sft", i)
        # the draws of shares come first, so that texts differ; each is one of chain's
        demo = plain.solution_demo(problem, random.Random(i))
        assert chain.step_labels(problem, demo) == plain.step_labels(problem, demo) != []
        assert chain.check(problem, demo) is plain.check(problem, demo) is plain.rule(problem, demo)


@pytest.mark.parametrize("solution, verification", [
    (f"{STEPS}=06", "3+5:8T;8*2:6T;=T"), (f"{STEPS}=+5", "3+5:8T;8*2:6T;=F"), ("3+5:9;9*2:8;=08", "3+5:8F;9*2:8T;=F"),
    ("!=6", "=T"), ("!=+6", "=T"), ("!=5", "=F"), ("!=", "=F"), ("=6", "=F"), (f"{STEPS}=", "3+5:8T;8*2:6T;=F")])
def test_verifications_written_by_hand(solution, verification):
    task = task_of("brittle", "--chain-verifier-share", "0")
    assert task.verification_demo(PROBLEM, solution, random.Random(0)) == verification


def test_a_wrong_version_is_worked_on_from_its_error_and_a_short_one_stays_short():
    task = task_of("brittle")
    found = {task.corrupt(PROBLEM, f"{STEPS}=6", random.Random(i)) for i in range(300)}
    assert f"{STEPS}=6" not in found
    # one of 9 other results in either step; of the first the second is worked again: 2c modulo 10
    first = {f"3+5:{c};{c}*2:{2 * c % 10};={2 * c % 10}" for c in range(10) if c != 8}
    second = {f"3+5:8;8*2:{c};={c}" for c in range(10) if c != 6}
    assert found == first | second
    assert {task.corrupt(PROBLEM, "!=6", random.Random(i)) for i in range(200)} == {f"!={c}" for c in "012345789"}
