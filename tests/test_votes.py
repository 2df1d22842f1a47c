"""What counts as an answer in RL, and how equal answers are counted as one vote."""
from types import SimpleNamespace

import pytest
import torch

from nanochat.rl.measure.scores import majority, outcome_of
from nanochat.rl.play.play import Play
from nanochat.rl.records.outcomes import answers_of, are_equal, uncounted
from tasks.common import GradedSet, Problem
from tasks.formats import LINES, PAPER


def graded(fmt=PAPER) -> GradedSet:
    task = GradedSet()
    task.name, task.fmt = "graded", fmt
    return task


def boxes(*answers: str) -> list[str]:
    return [f"so \\boxed{{{answer}}}" for answer in answers]


VOTES = [(["18", " 18", "18 ", "3", "3"], "18"), ([r"\frac{1}{2}", "0.5", r"\dfrac12", "3", "3"], r"\frac{1}{2}"),
         (["3", "18", "x=3", "18.0", "18"], "18"), (["x+1", "2", "1+x", "2", "x+1.0"], "x+1"), (["2", "x", "y"], "2"),
         ([r"1010_2", "1010", "1010"], "1010"),  # which may be the gold 1010_2, but 1010_2 not the gold 1010
         (["{", "{", "4"], "4"), ([r"\{", r"\{", "4"], r"\{")]  # no answer; and what cannot be read, as a text


@pytest.mark.parametrize("answers, vote", VOTES)
def test_votes_are_counted_by_the_graders_equality(answers, vote):
    found = answers_of(graded(), boxes(*answers), len(answers))
    assert majority(found) == vote
    assert answers_of(graded(), boxes(*answers, "7", *answers), len(answers) + 1)[: len(answers)] == found


def test_votes_of_other_problems_and_of_tasks_without_an_equality_are_texts():
    assert answers_of(graded(), boxes("0.5", "1/2", "1/2", "0.5"), 2) == ["0.5", "0.5", "1/2", "1/2"]
    assert answers_of(graded(), boxes("0.5", "1/2")) == ["0.5", "1/2"]
    plain = SimpleNamespace(fmt=LINES)
    assert answers_of(plain, ["#### 0.5", "#### 1/2", "none"], 3) == ["0.5", "1/2", None]
    assert not are_equal(plain, "0.5", "1/2") and not are_equal(plain, None, "4") and are_equal(graded(), "0.5", "1/2")


@pytest.mark.parametrize("fmt", [PAPER, LINES])
def test_an_answer_in_an_open_thought_is_none(fmt):
    problem, check = Problem("rl", 0, "?", "5"), graded(fmt).check
    for text in ("<think>Try \\boxed{5}", "<think>a</think> b <think>Try \\boxed{5}", "\\boxed{5} <think> or",
                 "<think>Try <answer>\\boxed{5}</answer>"):
        assert check(problem, text) is False and graded(fmt).read_answer(text) is None, text
    for text in ("<think>Try 4</think>\\boxed{5}", "Try</think> \\boxed{5}", "\\boxed{5}", "<think>\\boxed{5}</think>"):
        assert check(problem, text) is True, text


COPIES = [("Simplify $2^3 + 1$.", "9", "2^3+1"), ("Write $\\frac{4}{8}$ simpler.", r"\frac{1}{2}", r"\frac{4}{8}"),
          ("Express $0.5$ as a fraction.", r"\frac12", "0.5"), ("Factor $x^2-1$.", "(x-1)(x+1)", "x^2 - 1"),
          ("Find $\\left(2+3\\right)$.", "5", "(2+3)")]
OWN = [("Is 9 prime? How many primes are below 9?", "4", "4"), ("Which is larger, $2$ or $3$?", "3", "3"),
       ("Of 5 cm take 3 cm: what of 5 is left?", r"2\text{ cm}", "2"), ("Simplify $2^3 + 1$.", "9", "9.0"),
       ("Among 125 and 12.5 find a fifth of 62.5", "12.5", r"\frac{25}{2}"), ("(A) 3 (B) 4", r"\text{(B)}", "B"),
       ("Find $x$ if $x=5$", "5", "x=5"), ("How much is 25 over 50?", "0.5", "1/2")]


@pytest.mark.parametrize("prompt, gold, answer", COPIES + OWN)
def test_an_answer_that_stands_in_the_problem_is_copied_unless_it_is_the_golds_text(prompt, gold, answer):
    problem, (text,) = Problem("rl", 0, prompt, gold), boxes(answer)
    assert graded().check(problem, text) is True
    assert graded().is_copied(problem, text) is ((prompt, gold, answer) in COPIES)


def test_a_right_answer_counts_where_it_ended_and_is_not_copied():
    problem, task = Problem("rl", 0, "Simplify $2+3$.", "5"), graded()
    texts = boxes("5", "5", "2+3", "2+3", "6", "2+3")
    rows = [problem] * 6, texts, [True, True, True, True, False, None], [True, False, True, False, False, True]
    assert uncounted(task, *rows) == [None, "cut", "copied", "cut", None, None]
    assert uncounted(task, *rows, count_copies=True) == [None, "cut", None, "cut", None, None]
    assert uncounted(SimpleNamespace(), *rows) == [None, "cut", None, "cut", None, None]
    rollouts = SimpleNamespace(problems=lambda: rows[0], texts=texts, stopped=torch.tensor(rows[3]), columns={})
    for count_copies, outcomes in ((False, [True, False, False, False, False, False]),
                                   (True, [True, False, True, False, False, True])):  # all are scored here
        play = SimpleNamespace(task=task, args=SimpleNamespace(count_copies=count_copies), should_stop=lambda: False,
                               check_stop=lambda: None)
        assert Play.check(play, rollouts) == outcomes
        assert rollouts.columns["uncounted"] == [None, "cut", None if count_copies else "copied", "cut", None,
                                                 None if count_copies else "copied"]
        assert Play.answers(play, rollouts) == ["5", None, "2+3", None, None, "2+3"]


def test_a_vote_is_right_where_one_of_its_voters_is():
    answers = ["5", None, "5", "6", "7"]
    assert outcome_of("5", answers, [False, False, True, None, True]) is True
    assert outcome_of("5", answers, [None, False, False, None, True]) is None
    assert outcome_of("6", answers, [True, True, True, False, True]) is False
    assert outcome_of(None, [None], [True]) is False and outcome_of(None, [], []) is False
