"""Tasks: problems and splits, gold answers, gold step labels, demonstrations."""
import argparse
import inspect
import random
import re
import threading
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from nanochat.common import BadInput
from nanochat.rl.records.outcomes import outcomes_of
from nanochat.rl.records.prompts import parse_verification
from tasks import METHODS as TASK_METHODS, MODULES, TASKS, add_task_args, flags_of_others, make_task
from tasks.common import Problem, check_answer, epoch_order, nth_of_epochs
from tasks.competition import COLUMNS, Competition
from tasks.formats import COMPACT, PAPER, Format

SPLITS = ("sft", "rl", "test_in", "test_out")
# the others need their data or library: test_gsm8k.py, test_competition.py, test_reasoning_gym.py
GENERATED = ["chain", "brittle", "halves", "lookup", "last_letter", "mixture", "rewrite"]
EVERY_TASK = pytest.mark.parametrize("name", GENERATED)
# of these, which state last results alone, a wrong solution may be right by luck
LUCKY = ("brittle", "halves", "lookup")
WITHOUT_LUCK = pytest.mark.parametrize("name", [name for name in GENERATED if name not in LUCKY])
ALWAYS_RIGHT = {"chain": ["--chain-share", "0", "--chain-verifier-share", "0"],
                "rewrite": ["--rewrite-share", "0", "--rewrite-skips", "0", "--rewrite-verifier-share", "0"],
               "last_letter": ["--last-letter-verifier-error", "0"]}
EIGHT_STEPS = {"chain": ["--chain-min-steps", "8", "--chain-max-steps", "8"],
               "last_letter": ["--last-letter-min-words", "8", "--last-letter-max-words", "8"]}
for by_task in (ALWAYS_RIGHT, EIGHT_STEPS):
    by_task["mixture"] = by_task["chain"] + by_task["last_letter"]
    by_task["brittle"] = [*by_task["chain"], "--brittle-short-share", "0"]
    by_task["halves"] = by_task["chain"]
    by_task["lookup"] = [*by_task["chain"], "--lookup-share", "0", "--lookup-recall-share", "1"]

PIECES = ("3+5:8;", "8*2:6;", "9*2:8;", "grape:e;", "lemon:en;", "fig:eng;", ";", "=", "=86", "=eng", "T", "F")
ANY_TEXT = (st.binary().map(lambda sampled: sampled.decode("utf-8", errors="replace")) | st.text("0123459+-*:;=TF|,ab")
            | st.text("grapelmonfi:;= TF|") | st.text("abc1;=") | st.lists(st.sampled_from(PIECES)).map("".join))

CHAIN = Problem("rl", 0, "3+5*2", "86")  # 3+5 = 8; 8*2 = 16, modulo 10 that is 6
WORDS = Problem("rl", 0, "grape lemon fig", "eng")
OF_TASK = {"last_letter": WORDS, "halves": Problem("rl", 0, "3+5*2,4-1*7", "6,1"),
           "rewrite": Problem("rl", 0, "bbcac:a", "a")}  # of the others CHAIN


def task_of(name: str, *flags: str, seed: int = 0):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    add_task_args(parser)
    return make_task(parser.parse_args(["--task", name, "--seed", str(seed), *flags]))


@EVERY_TASK
def test_a_task_has_a_name_and_a_format_and_its_flags_begin_with_its_name(name):
    task = task_of(name)
    assert task.name == name and isinstance(task.fmt, Format)
    parser = argparse.ArgumentParser(add_help=False)
    next(module for module in MODULES if module.__name__ == TASKS[name].__module__).add_args(parser)
    flags = [action.option_strings[0] for action in parser._actions]
    assert flags and all(flag.startswith(f"--{name.replace('_', '-')}-") for flag in flags)


@pytest.mark.parametrize("kind", [TASKS[name] for name in (*GENERATED, "gsm8k", "reasoning_gym")
                                  if name not in ("brittle", "mixture")] + [Competition])
def test_a_task_has_the_methods_of_chain(kind):
    for name in TASK_METHODS:
        assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(TASKS["chain"], name)), name


@pytest.mark.parametrize("name", [name for name in TASKS if name not in (*GENERATED, "reasoning_gym")])
def test_a_task_of_a_data_set_has_one_flag_for_its_sources(name):
    parser = argparse.ArgumentParser(add_help=False)
    add_task_args(parser)
    flags = {flag for flag in parser._option_string_actions if flag.startswith(f"--{name}-")}
    columns = {f"--rows-{column}-column" for column in COLUMNS if name == "rows"}
    assert flags - {f"--{name}-format"} == {f"--{name}-data"} | columns


@EVERY_TASK
def test_a_problem_is_a_function_of_seed_split_and_index(name):
    """And demonstrations of the random stream."""
    first, again, other_seed = task_of(name), task_of(name), task_of(name, seed=1)
    other_seed.problem("sft", 99)  # what was asked before does not matter
    for split in SPLITS:
        backwards = [again.problem(split, i) for i in reversed(range(50))]
        problems = [first.problem(split, i) for i in range(50)]
        assert problems == backwards[::-1]
        assert [(p.split, p.index) for p in problems] == [(split, i) for i in range(50)]
        assert sum(p.prompt == other_seed.problem(split, p.index).prompt for p in problems) < 5
    for i, problem in enumerate(problems):
        a, b = random.Random(i), random.Random(i)
        assert first.solution_demo(problem, a) == again.solution_demo(problem, b)
        corrupted = first.corrupted_solution(problem, a)
        assert corrupted == again.corrupted_solution(problem, b)
        assert first.verification_demo(problem, corrupted, a) == again.verification_demo(problem, corrupted, b)


@pytest.mark.parametrize("name, flags, least", [
    *((name, [], 200) for name in GENERATED),
    ("chain", ["--chain-modulus", "3", "--chain-max-steps", "2"], 1),  # 3^5 problems in RL
    ("last_letter", ["--last-letter-max-words", "2", "--last-letter-min-letters", "1",
                     "--last-letter-max-letters", "1"], 1)])           # 26^2
def test_splits_share_no_problem(name, flags, least):
    task = task_of(name, *flags)
    prompts = {split: {task.problem(split, i).prompt for i in range(400)} for split in SPLITS}
    assert all(len(texts) > least for texts in prompts.values())
    for a, b in combinations(SPLITS, 2):
        assert not prompts[a] & prompts[b], (a, b)


@EVERY_TASK
@settings(max_examples=60, deadline=None)
@given(solution=ANY_TEXT)
def test_any_text_gets_one_label_per_step_and_a_verification_in_format(name, solution):
    task, problem = task_of(name, *ALWAYS_RIGHT[name]), OF_TASK.get(name, CHAIN)
    labels = task.step_labels(problem, solution)
    assert len(labels) == len(task.fmt.step_spans(solution)) and all(type(label) is bool for label in labels)
    assert type(task.check(problem, solution)) is bool
    verification = parse_verification(task.fmt, task.verification_demo(problem, solution, random.Random(0)),
                                      len(labels))
    assert verification.unmet == () and verification.step_verdicts == labels


def test_the_order_of_an_epoch_is_a_function_of_seed_split_epoch_and_size():
    """Written down once: checkpoints hold the place in this order."""
    assert epoch_order(0, "rl", 0, 7) == (3, 5, 2, 6, 0, 1, 4)
    assert epoch_order(0, "rl", 1, 7) == (6, 2, 0, 1, 4, 3, 5)
    assert epoch_order(3, "test_in", 0, 7) == (0, 2, 5, 6, 4, 3, 1)
    assert "".join(nth_of_epochs(list("abcdefg"), 0, "rl", i) for i in range(14)) == "dfcgabe" + "gcabedf"


def answered(answer: str) -> str:
    return PAPER.render_solution(["So \\boxed{5}."], answer)


ANSWERS = {  # gold -> solutions that are right; that are wrong
    "72": ([*map(answered, ("72", " 72.00 ", "72 clips")), answered("72") + " \n",  # what stands in the answer counts
            # not as the format wants it, and plain all the same
            "<answer>72</answer>", "<answer>\n\\boxed{72}\n</answer>", "<answer>It is \\boxed{72}.</answer>",
            "It is 5. <answer> $72$ </answer>", "<answer>\\boxed {72}</answer>", "<answer>\\fbox{72}</answer>",
            # without the tag: the last box, else ####
            "\\boxed{5}<answer>\\boxed{72}</answer>", "It is 72, \\boxed{72}.", "\\boxed{5}, no, \\boxed{72}",
            "So\n#### 72", "\\boxed{72}</answer>"],
           [*map(answered, ("-72", "7,2", "72 or 73", "72, 73", "\\{72, 73\\}", "72} or \\boxed{73")),  # one guess
            "<answer>72} or 73</answer>", "<answer>72}</answer>", "<answer>72\\} or 73</answer>",
            answered("72") + answered("73"), answered("73") + answered("72"), answered("72") + " or 73", "72", "",
            "\\boxed{72", "<ANSWER>72</ANSWER>"]),
    "73": ([], [answered("72") + " or \\boxed{73}</answer>"]),
    "\\frac{1}{2}": ([answered("0.5")], []), "1/2": (["<answer>\\frac{1}{2}</answer>"], []),
    "\\{1, 2\\}": (["<answer>\\{2, 1\\}</answer>"], []), "(1,2)": ([], [answered("(2, 1)")]),
    # nothing that can be read, and boxes before the answer are none
    "5": ([], [answered("72"), answered(""), "\\boxed{5}<answer></answer>", "\\boxed{5}<answer>", "<answer>\\boxed{5}",
               "<answer>\\boxed{5</answer>", "\\boxed{5}</answer><answer>", "\\boxed{5}, no, \\boxed{72}"]),
}


def test_an_answer_is_checked_as_mathematics_where_the_format_has_it():
    """A gold that says nothing is None; other formats have their answers checked too."""
    for gold, (right, wrong) in ANSWERS.items():
        assert [text for text in right if check_answer(PAPER, Problem("rl", 0, "?", gold), text) is not True] == []
        assert [text for text in wrong if check_answer(PAPER, Problem("rl", 0, "?", gold), text) is not False] == []
    assert [check_answer(PAPER, Problem("rl", 0, "?", gold), answered("x")) for gold in ("<?", "")] == [None, None]
    for text, right in {"3+5:8;8*2:6;=86": True, "=086.0": True, "3+5:8;=8": False, "=85=86": False,
                        "=": False}.items():
        assert check_answer(COMPACT, CHAIN, text) is right


def test_a_task_s_flags_are_its_own_though_its_name_begins_with_another_s(monkeypatch):
    monkeypatch.setitem(TASKS, "chain_two", None)
    assert "chain_" not in flags_of_others("chain_two") and "gsm8k_" in flags_of_others("chain_two")
    assert "chain_two_" in flags_of_others("chain") and "chain_" not in flags_of_others("chain")


def test_many_solutions_are_checked_in_order_and_at_the_same_time():
    meeting = threading.Barrier(4, timeout=20)

    class Slow:
        def check(self, problem, solution):
            meeting.wait()  # passes only when four wait together
            return {"right": True, "wrong": False, "?": None}[solution]

    texts = ["right", "wrong", "?", "right"] * 3
    assert outcomes_of(Slow(), [CHAIN] * 12, texts) == [True, False, None, True] * 3
    assert outcomes_of(Slow(), [], []) == []
    with pytest.raises(ValueError):
        outcomes_of(Slow(), [CHAIN], texts[:2])
    with pytest.raises(AttributeError):  # what goes wrong in a check
        outcomes_of(task_of("chain"), [None], ["=1"])


@EVERY_TASK
def test_a_demonstration_without_misconceptions_is_right_in_answer_and_steps(name):
    task = task_of(name, *ALWAYS_RIGHT[name])
    for split in SPLITS:
        for i in range(50):
            problem = task.problem(split, i)
            solution = task.solution_demo(problem, random.Random(i))
            num_steps = len(re.findall("[-+*]", problem.prompt)) or len(problem.prompt.split())
            if name == "rewrite":  # where a problem does not say how many
                num_steps = len(task.fmt.step_spans(solution))
            assert task.step_labels(problem, solution) == [True] * num_steps
            assert task.check(problem, solution) is True


@pytest.mark.parametrize("name", [name for name in EIGHT_STEPS if name not in LUCKY])
def test_a_corrupted_solution_is_all_right_about_half_of_the_time(name):
    task = task_of(name, *EIGHT_STEPS[name])
    all_right = 0
    for i in range(600):
        problem = task.problem("rl", i)
        solution = task.corrupted_solution(problem, random.Random(i))
        labels = task.step_labels(problem, solution)
        assert len(labels) == 8
        assert task.check(problem, solution) is all(labels)
        all_right += all(labels)
    # Half have no errors at all, the others each step with chance 1.5 / 8: 0.5 + 0.5 * (6.5 / 8)^8 = 0.595; three
    # standard errors
    assert abs(all_right / 600 - 0.595) < 0.06


@WITHOUT_LUCK
def test_a_verifier_without_misconceptions_judges_as_gold_does(name):
    task = task_of(name, *ALWAYS_RIGHT[name])
    verdicts = []
    for i in range(150):
        problem = task.problem("sft", i)
        solution = task.corrupted_solution(problem, random.Random(i))
        verification = parse_verification(task.fmt, task.verification_demo(problem, solution, random.Random(i)),
                                          len(task.fmt.step_spans(solution)))
        assert verification.unmet == ()
        assert verification.step_verdicts == task.step_labels(problem, solution)
        assert verification.verdict is task.check(problem, solution)
        verdicts.append(verification.verdict)
    assert 30 < sum(verdicts) < 120  # both verdicts occur


@pytest.mark.parametrize("name, flags", [
    ("chain", ["--chain-max-steps", "1"]), ("last_letter", ["--last-letter-max-words", "1"]),
    ("last_letter", ["--last-letter-max-letters", "2"]), ("last_letter", ["--last-letter-words", "/nowhere/words.txt"]),
    ("last_letter", ["--last-letter-words", "/"])])
def test_flags_that_do_not_go_together_are_bad_input_that_names_one(name, flags):
    with pytest.raises(BadInput) as caught:
        task_of(name, *flags)
    assert f"{flags[0]} {flags[1]}" in str(caught.value) and "\n" not in str(caught.value)


def test_a_split_without_problems_is_an_error_and_no_endless_loop():
    """Modulo 2 there are 12 problems of one step, none of them in test_in."""
    task = task_of("chain", "--chain-modulus", "2", "--chain-min-steps", "1", "--chain-max-steps", "1")
    with pytest.raises(BadInput, match="split test_in"):
        task.problem("test_in", 0)


def test_a_mixture_deals_its_parts_in_turn_and_each_judges_its_own():
    mixed, chain, words = task_of("mixture"), task_of("chain"), task_of("last_letter")
    for i in range(20):
        part = chain if i % 2 == 0 else words
        problem, original = mixed.problem("rl", i), part.problem("rl", i // 2)
        assert (problem.prompt, problem.answer, problem.index) == (original.prompt, original.answer, i)
        solution = part.corrupted_solution(original, random.Random(i))
        assert mixed.step_labels(problem, solution) == part.step_labels(original, solution) != []
        assert mixed.check(problem, solution) == part.check(original, solution)
    with pytest.raises(BadInput, match="--mixture-tasks chain,sorting: 'sorting' is not a task"):
        task_of("mixture", "--mixture-tasks", "chain,sorting")


def test_what_is_wrong_with_a_step_is_named():
    """3+5 is worked out as 7; the next step carries that on; then other operands stand there, rightly worked out; then
    no step at all. A mixture names errors by task where a task does not."""
    task, problem = task_of("chain", "--chain-answer", "final"), Problem("rl", 0, "3+5*2-1+4", "0")
    solution = "3+5:7;7*2:4;4-2:2;x;=2"
    assert task.step_errors(problem, solution) == ["result", None, "operands", "operands"]
    assert task.step_labels(problem, solution) == [False, True, False, False]
    task = task_of("mixture")
    chain, words = task.problem("rl", 0), task.problem("rl", 1)
    assert set(task.step_errors(words, task.solution_demo(words, random.Random(0)))) == {None}
    assert task.step_errors(words, "ab;=ab") == ["last_letter"] and task.step_errors(chain, "x;") == ["operands"]
