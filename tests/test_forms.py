"""
The forms of a verification: what demonstrations of them say, and which solutions stand in them.
"""
import random
from types import SimpleNamespace

import pytest
from conftest import TASK_FLAGS, parse

from nanochat.common import BadInput
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.records.prompts import Verification, parse_choice, parse_scores, parse_verification
from nanochat.rl.verify import demonstrations
from nanochat.rl.verify.forms import (FORMS, believed_score, check_form, form_prompt, judged_together, one_bare,
                                      preferred, strength)
from nanochat.storage.files import path_of
from scripts import chat_sft
from tasks import make_task
from tasks.chain import Chain
from tasks.common import Problem

PROBLEM = Problem("sft", 0, "1+1*2", "1")  # from left to right modulo 3: 1+1 = 2, 2*2 = 1
RIGHT, WRONG, WORSE = "1+1:2;2*2:1;=1", "1+1:2;2*2:0;=0", "1+1:0;0*2:2;=2"
SOUND = ["--chain-answer", "final", "--chain-verifier-share", "0"]


def task_of(*flags: str):
    return make_task(parse(chat_sft, [*TASK_FLAGS, "--role", "verifier", *flags]))


def demo(form: str, *solutions: str, seed: int = 0, flags=SOUND) -> str:
    return FORMS[form].demo(task_of(*flags), PROBLEM, list(solutions), random.Random(seed))


@pytest.mark.parametrize("form, solutions, text", [
    ("steps", [WRONG], "1+1:2T;2*2:1F;=F"),
    ("pair", [RIGHT, WRONG], "A;1+1:2T;2*2:1T;B;1+1:2T;2*2:1F;=A"),
    ("graded", [WORSE, RIGHT], "A;1+1:2F;0*2:0F;B;1+1:2T;2*2:1T;=B2"),
    ("graded", [RIGHT, WRONG], "A;1+1:2T;2*2:1T;B;1+1:2T;2*2:1F;=A1"),
    ("solve_pair", [WRONG, RIGHT], "1+1:2;2*2:1;2*2:0F;1T;=B"),
    ("solve_pair", [WRONG, WORSE], "1+1:2;2*2:1;2*2:0F;1+1:0F;=A"),       # neither: the one that departs later
    ("solve_pair", ["1+1:0;0*2:1;=1", WRONG], "1+1:2;2*2:1;1T;2*2:0F;=A"),  # the same answer by luck
    ("scores", [WRONG, RIGHT], "+*;A;1+1:2T;2*2:1F;B;1+1:2T;2*2:1T;=4,10"),  # 9 * 1 / 2
    ("scores", [WORSE, WRONG, RIGHT], "+*;A;1+1:2F;0*2:0F;B;1+1:2T;2*2:1F;C;1+1:2T;2*2:1T;=0,4,10"),
    ("scores", [RIGHT], "+*;A;1+1:2T;2*2:1T;=1"), ("scores", [WRONG], "+*;A;1+1:2T;2*2:1F;=0"),
])
def test_demonstrations_by_hand(form, solutions, text):
    assert demo(form, *solutions) == text


def test_what_the_verifier_believes_decides_its_choice_and_no_answer_agrees_with_nothing():
    """It takes 2*2 for 0: the wrong solution is the one that it finds."""
    task = task_of(*SOUND)
    task.verifier_misconceptions, task.verifier_wrongness = {(2, "*", 2): 0}, 1.0
    said = {form: FORMS[form].demo(task, PROBLEM, [RIGHT, WRONG], random.Random(0)) for form in FORMS}
    assert said["solve_pair"] == "1+1:2;2*2:0;2*2:1F;0T;=B"
    assert said["pair"].endswith("=B") and said["graded"].endswith("=B1") and said["scores"].endswith("=4,10")
    assert demo("solve_pair", "1+1:2;", RIGHT) == "1+1:2;2*2:1;F;1T;=B"
    assert demo("solve_pair", "=T", RIGHT) == "1+1:2;2*2:1;?F;1T;=B"
    assert demo("solve_pair", "1+1:T;=A", RIGHT) == "1+1:2;2*2:1;1+1:?F;1T;=B"
    for form in ("pair", "solve_pair"):
        assert {demo(form, RIGHT, RIGHT, seed=seed)[-1] for seed in range(20)} == {"A", "B"}


def test_every_form_ends_with_what_its_parser_reads():
    task = task_of()
    for index in range(40):
        problem, rng = task.problem("sft", index), random.Random(index)
        solutions = judged_together(task, problem, task.corrupted_solution(problem, rng), 2, rng)
        said = {form: FORMS[form].demo(task, problem, solutions, rng) for form in FORMS if form != "steps"}
        assert parse_choice(task.fmt, said["pair"]) and parse_choice(task.fmt, said["solve_pair"])
        assert parse_choice(task.fmt, said["graded"], graded=True) and parse_scores(task.fmt, said["scores"], 2)


def test_strengths_and_believed_scores():
    assert [strength(*pair) for pair in ((0, 0), (0, 1), (0, 2), (1, 4), (0, 9), (2, 0))] == [1, 1, 2, 3, 3, 1]
    for steps, verdict, num, score in (("TTTT", True, 2, 10), ("TTTT", False, 2, 9), ("TTTF", False, 2, 6),
                                       ("FF", False, 2, 0), ("", None, 2, 0), ("TT", True, 1, 1), ("TT", False, 1, 0)):
        assert believed_score(verification(steps, verdict), num) == score


def verification(steps: str, verdict: bool | None) -> Verification:
    return Verification([mark == "T" for mark in steps], verdict, ())


@pytest.mark.parametrize("first, second, expected", [
    (("TTT", True), ("TFF", False), 2), (("TFF", False), ("TTT", True), -2),
    (("TTF", False), ("FFF", False), 2),   # neither is right: fewer wrong steps
    (("TFF", True), ("TTT", False), 1),    # the final verdict goes first, and the least strength is 1
    (("FFFF", False), ("TTTT", None), -3)])
def test_the_preferred_one_by_verdicts_then_by_steps(first, second, expected):
    assert preferred(verification(*first), verification(*second), random.Random(0)) == expected


def test_of_solutions_judged_together_one_is_right_if_it_can_be_had():
    task, rng = task_of(*SOUND), random.Random(0)
    for given in (RIGHT, WRONG):
        places = set()
        for seed in range(60):
            solutions = judged_together(task, PROBLEM, given, 3, random.Random(seed))
            outcomes = [task.check(PROBLEM, solution) for solution in solutions]
            assert given in solutions and outcomes.count(True) == 1
            places.add(outcomes.index(True))
        assert places == {0, 1, 2}
    stubborn = SimpleNamespace(name="mine", check=lambda problem, text: True, corrupted_solution=lambda p, rng: "x")
    assert judged_together(stubborn, PROBLEM, "y", 2, random.Random(0)) == ["y", "y"]
    assert judged_together(task, PROBLEM, WRONG, 1, rng) == [WRONG]  # a single one draws nothing: demonstrations stay
    assert rng.random() == random.Random(0).random()


def test_of_a_pair_one_may_be_left_with_its_answer_alone_and_wins_where_an_error_is_found():
    fmt = task_of().fmt
    bare = {tuple(one_bare(fmt, [RIGHT, WRONG], random.Random(seed))) for seed in range(20)}
    assert bare == {("=1", WRONG), (RIGHT, "=0")}
    assert one_bare(fmt, ["2*2"], random.Random(0)) == ["="]  # no answer can be read
    assert demo("pair", RIGHT, "=0") == "A;1+1:2T;2*2:1T;B;=A" and demo("pair", "=1", WRONG).endswith("=A")


def demonstration(*flags: str) -> str:
    args = parse(chat_sft, [*TASK_FLAGS, "--role", "verifier", *flags])
    tokenizer = load_tokenizer(path_of("tokenizer"))
    ids, mask = demonstrations.demonstration(args, make_task(args), tokenizer, 3, [], 256)
    return "".join(tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m == part][2 * (1 - part): -1])
                   for part in (0, 1))


def test_sft_shows_the_form_that_is_asked_for(base):
    asked = {form: demonstration("--verifier-form", form) for form in FORMS}
    for form, mark in (("pair", "|A"), ("graded", "|AS"), ("solve_pair", "|WA"), ("scores", "|S")):
        assert mark in asked[form] and asked[form].count("|") == 3
    assert asked["steps"] == demonstration() and asked["steps"].count("|") == 2
    assert demonstration("--verifier-form", "scores", "--num-judged", "3").count("|") == 4
    ids = form_prompt(load_tokenizer(path_of("tokenizer")), Chain.fmt, "steps", "1+1", ["1+1:2;=2"])
    assert bytes(ids[2:-2]) == b"1+1|1+1:2;=2|1"


@pytest.mark.parametrize("words, flags", [
    ("--verifier-form solve_pair: task last_letter has no verifier_solution_demo",
     ["--verifier-form", "solve_pair", "--task", "last_letter"]),
    ("--num-judged 27: must be from 1 to 26", ["--verifier-form", "scores", "--num-judged", "27"]),
    ("--bare-share 0.5: is of --verifier-form pair", ["--bare-share", "0.5"]),
    ("--bare-share 0.5: is of --verifier-form pair", ["--bare-share", "0.5", "--verifier-form", "scores"]),
    ("--cut-share 0.5: is of a verifier's demonst", ["--cut-share", "0.5", "--verifier-form", "pair"]),
    ("--cut-share 0.5: is of a verifier's demonst", ["--cut-share", "0.5", "--role", "generator"])])
def test_what_a_form_or_a_task_does_not_have_is_refused(words, flags):
    args = parse(chat_sft, [*TASK_FLAGS, "--role", "verifier", *flags])
    with pytest.raises(BadInput, match=words):
        chat_sft.check_args(args, make_task(args), 1)


def test_other_tasks_show_pairs_too():
    task = task_of("--task", "last_letter", "--last-letter-verifier-error", "0")
    problem = Problem("sft", 0, "grape lemon", "en")
    check_form(task, "pair", 2)
    text = FORMS["pair"].demo(task, problem, ["grape:e;lemon:en;=en", "grape:e;lemon:em;=em"], random.Random(0))
    assert text == "A;grape:eT;lemon:enT;B;grape:eT;lemon:enF;=A"


def test_a_beginning_ends_after_any_of_the_steps():
    fmt = task_of().fmt
    cut = {demonstrations.beginning(fmt, "1+1:2;2*2:4;=4", random.Random(seed)) for seed in range(20)}
    assert cut == {"1+1:2;", "1+1:2;2*2:4;"}
    assert demonstrations.beginning(fmt, "=4", random.Random(0)) == "=4"  # no step to end after


@pytest.mark.parametrize("task", ["chain", "last_letter", "lookup", "rewrite"])
def test_all_steps_of_a_beginning_are_judged_and_as_a_whole_it_is_wrong(base, task):
    whole, cut = demonstration("--task", task), demonstration("--task", task, "--cut-share", "1")
    solution, beginning = whole.split("|")[1], cut.split("|")[1]
    fmt = task_of("--task", task).fmt
    num_steps = len(fmt.step_spans(beginning))
    assert solution.startswith(beginning) and num_steps > 0 and fmt.answer(beginning) is None
    said = parse_verification(fmt, cut.split("|")[2][1:], num_steps)
    assert said.unmet == () and said.verdict is False
