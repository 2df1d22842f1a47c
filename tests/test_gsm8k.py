"""
GSM8K: reading its files, numbers and equations in text, slips, and the demonstrations of the verifier.

    python -m pytest tests/test_gsm8k.py -q
"""
import argparse
import copy
import inspect
import json
import os
import random
from decimal import Decimal
from itertools import combinations

import pytest
from hypothesis import example, given, settings, strategies as st

from nanochat.common import BadInput
from nanochat.rl.measure.scores import verdict_scores
from nanochat.rl.records.prompts import parse_verification
from tasks.chain import Chain
from tasks.common import Problem
from tasks.formats import IN_WORDS
from tasks.gsm8k import GSM8K, NO_EQUATION, add_args, equations, gold_answer, mistaken, number, worked_lines

DATA = os.environ.get("NANOCHAT_DATA") or os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..",
                                                       "shared", "data")
REAL = os.path.join(DATA, "gsm8k")
SPLITS = ("sft", "rl", "test_in", "test_out")
CLIPS = ("How many clips?",
         "She sold 48/2 = <<48/2=24>>24 clips in May.\n\nIn all 48+24 = <<48+24=72>>72 clips.\n#### 72")
DEMO = ("<think><step>She sold 48/2 = 24 clips in May.</step><step>In all 48+24 = 72 clips.</step></think>"
        "<answer>\\boxed{72}</answer>")


def args_of(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_args(parser)
    return parser.parse_args(flags)


def write_rows(folder, split: str, rows) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))


def worded(k: int, split: str) -> tuple[str, str]:
    return f"{split} {k} + 1?", f"It is {k}+1 = <<{k}+1={k + 1}>>{k + 1}.\n#### {k + 1}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder for what `datasets` makes of files, so that tests leave nothing after."""
    import datasets
    old, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, str(tmp_path_factory.mktemp("datasets"))
    yield
    datasets.config.HF_DATASETS_CACHE = old


@pytest.fixture(scope="module")
def task(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "gsm8k"
    write_rows(folder, "train", [CLIPS, *(worded(k, "train") for k in range(200)), ("No answer?", "It is 3."),
                                 ("No number?", "Yes.\n#### yes")])
    write_rows(folder, "test", [worded(k, "test") for k in range(100)])
    return GSM8K(args_of("--gsm8k-data", str(folder)), 0)


@pytest.fixture(scope="module")
def real(cache):
    if not os.path.isdir(REAL):
        pytest.skip(f"{REAL} is absent; set NANOCHAT_DATA to a folder with gsm8k/train.jsonl and test.jsonl")
    return GSM8K(args_of("--gsm8k-data", REAL), 0)


def problem_of(question_and_worked) -> Problem:
    return Problem("sft", 0, question_and_worked[0], gold_answer(question_and_worked[1]))


# Reading the files

def test_it_has_the_methods_of_chain():
    for method in ("problem", "check", "step_labels", "solution_demo", "corrupted_solution", "verification_demo"):
        assert inspect.signature(getattr(GSM8K, method)) == inspect.signature(getattr(Chain, method)), method


def test_what_is_dropped_is_told(cache, tmp_path, capsys):
    for name in ("train", "test"):
        write_rows(tmp_path / "odd", name, [(f"{name}?", "#### three apples"), *(worded(k, name) for k in range(30))])
    GSM8K(args_of("--gsm8k-data", str(tmp_path / "odd")), 0)
    assert "gsm8k: left out: 2 rows without one gold answer" in capsys.readouterr().out


def test_a_problem_without_a_gold_answer_is_dropped_and_counted(task):
    assert task.num_dropped == 2 and len(task.worked) == 301


def test_a_question_with_two_answers_is_dropped_and_counted(cache, tmp_path):
    question, worked = worded(0, "train")
    write_rows(tmp_path / "two", "train", [(question, worked), *(worded(k, "train") for k in range(1, 30)),
                                           (question, worked + "1"), worded(1, "train")])
    write_rows(tmp_path / "two", "test", [worded(k, "test") for k in range(30)])
    two = GSM8K(args_of("--gsm8k-data", str(tmp_path / "two")), 0)
    assert question not in two.worked and two.num_dropped == 2 and len(two.worked) == 29 + 30


def test_train_is_dealt_to_sft_and_rl_and_test_to_the_test_splits(task):
    assert all(question.startswith("test") == split.startswith("test") for split in SPLITS
               for question in task.splits[split] if question != CLIPS[0])
    assert sum(map(len, task.splits.values())) == len({question for split in SPLITS
                                                       for question in task.splits[split]}) == 301


def test_a_train_problem_that_is_in_the_test_file_too_is_held_out(cache, tmp_path):
    write_rows(tmp_path / "both", "train", [worded(k, "train") for k in range(30)] + [worded(0, "test")])
    write_rows(tmp_path / "both", "test", [worded(k, "test") for k in range(30)])
    both = GSM8K(args_of("--gsm8k-data", str(tmp_path / "both")), 0)
    assert worded(0, "test")[0] not in both.splits["sft"] + both.splits["rl"]


def test_every_epoch_has_each_problem_once_in_an_order_of_its_own(task):
    size = len(task.splits["rl"])
    epochs = [[task.problem("rl", epoch * size + k).prompt for k in range(size)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(task.splits["rl"]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_problem_is_a_function_of_seed_split_and_index(task):
    again, other = (GSM8K.__new__(GSM8K) for _ in range(2))
    for made, seed in ((again, 0), (other, 1)):
        made.__dict__ = {**vars(task), "seed": seed}
    for split in SPLITS:
        problems = [task.problem(split, i) for i in range(150)]
        assert problems == [again.problem(split, i) for i in reversed(range(150))][::-1]
        assert [(p.split, p.index) for p in problems] == [(split, i) for i in range(150)]
        assert problems != [other.problem(split, i) for i in range(150)]


def test_files_that_cannot_be_used_are_bad_input(cache, tmp_path):
    with pytest.raises(BadInput, match="--gsm8k-data /no/such: no such folder"):
        GSM8K(args_of("--gsm8k-data", "/no/such"), 0)
    folder = tmp_path / "half"
    source = args_of("--gsm8k-data", str(folder))
    write_rows(folder, "train", [CLIPS])
    with pytest.raises(BadInput, match="half: has no test.jsonl"):
        GSM8K(source, 0)
    write_rows(folder, "test", [CLIPS])
    with pytest.raises(BadInput, match="left for split sft .*, 1 of the 1 train questions are in test too"):
        GSM8K(source, 0)
    (folder / "train.jsonl").write_text('{"question": "What?", "solution": "3"}\n')
    with pytest.raises(BadInput, match="train.jsonl: has no column 'answer', only question, solution"):
        GSM8K(source, 0)
    (folder / "train.jsonl").write_text('{"question": "What?", "answer": "#### 3"}\n{"question": null, "answer": '
                                        '"#### 3"}\n')
    with pytest.raises(BadInput, match="train.jsonl: row 2 of train has no text for question or answer"):
        GSM8K(source, 0)
    (folder / "train.jsonl").write_bytes('{"question": "é?", "answer": "#### 3"}\n'.encode("latin1"))
    with pytest.raises(BadInput, match="train.jsonl: row 1: is no text in UTF-8"):
        GSM8K(source, 0)
    row = '{"question": "What?", "answer": "#### 3"}\n'
    for lines, said in [("not json\n", "is no json of rows: it begins with b'not json"),
                        (row + "\n" + row[:30], "line 3: is no json: Expecting ':' delimiter, column 31$"),
                        ("\ufeff" + row + "[3]\n", "line 2: is no json object$"),
                        (row + "[" * 10 ** 5, "line 2: ")]:
        (folder / "train.jsonl").write_text(lines)
        with pytest.raises(BadInput, match=f"train.jsonl: {said}"):
            GSM8K(source, 0)


# Numbers and outcomes

@pytest.mark.parametrize("text, value", [
    ("18", 18), ("18.0", 18), ("$18", 18), (" 1,000 ", 1000), ("-$1,234.50", "-1234.5"), (".5", "0.5"), ("18.", 18),
    ("0018", 18), ("9" * 5000, "9" * 5000),
    ("1,00", None), ("1,0000", None), ("18 eggs", None), ("1e3", None), ("", None), (None, None), ("-", None),
    ("$", None), ("$$5", None), ("1/2", None),
    ("\u0663", None), ("nan", None), ("1_000", None), ("2 3", None), (".", None),
])
def test_a_number_is_one_plain_number(text, value):
    assert number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize("answer, right", [
    ("72", True), ("72.00", True), ("$72", True), ("72 ", True), ("72 clips", True), ("\\frac{144}{2}", True),
    ("73", False), ("7,2", False), ("72 or 73", False), ("", False), ("-72", False), ("clips", False),
])
def test_the_outcome_is_the_number(task, answer, right):
    assert task.check(problem_of(CLIPS), f"<think></think><answer>\\boxed{{{answer}}}</answer>") is right


def test_a_box_or_a_mark_is_read_where_the_format_is_not_kept(task):
    assert task.check(problem_of(CLIPS), "In all \\boxed{72}.") is task.check(problem_of(CLIPS), CLIPS[1]) is True
    assert (task.check(problem_of(CLIPS), "In all 72.")
            is task.check(problem_of(CLIPS), "\\boxed{72} <answer>\\boxed{24}</answer>") is False)


def test_a_gold_answer_has_no_commas_and_no_dollar_sign():
    assert gold_answer("a\n#### $1,234.5") == "1234.5" and gold_answer("#### x #### 7") == "7"
    assert gold_answer("7") is gold_answer("#### seven") is gold_answer("") is None


# Equations

@pytest.mark.parametrize("text, found", [
    ("so 48 / 2 = $26", [("48/2", "26", False)]),
    ("80,000+50,000=$130,000, then 3 x $4 = 12.", [("80000+50000", "130000", True), ("3*4", "12", True)]),
    ("2 * (3 + 4) = 14", [("2*(3+4)", "14", True)]),
    ("5 × 4 ÷ 2 – 1 = 9", [("5*4/2-1", "9", True)]),
    ("2+3 = 6-1 = 5", [("2+3", "6-1", True), ("6-1", "5", True)]),
    ("2*5=10+3=13", [("2*5", "10+3", True), ("10+3", "13", True)]),  # carried on in one line: each is right by itself
    ("20% * 50 = 10; 5/10 = 50%; 100*5/10 = 50%",
     [("20%*50", "10", True), ("5/10", "50%", True), ("100*5/10", "50%", True)]),
    ("10/3 = 3.33; 10/3 = 3.4; 20/3 = 6.67; 20/3 = 6.66; 10/3 = 3",
     [("10/3", "3.33", True), ("10/3", "3.4", True), ("20/3", "6.67", True), ("20/3", "6.66", True),
      ("10/3", "3", False)]),
    (".1+.1 = .3", [(".1+.1", ".3", False)]),
    ("0.1*3=0.3", [("0.1*3", "0.3", True)]),
    ("007+1=8", [("7+1", "8", True)]),
    ("-36+13+-15 = -38", [("-36+13+-15", "-38", True)]),
    ("3 cats + 4 + 5 = 12", []),         # cut off by a word
    ("1 1/2 + 2 = 3 1/2", []),           # mixed numbers
    ("6:30+20 = 6:50", []),
    ("2*9 = 18 000", []),
    ("5 / 0 = 3", []),
    ("x = 6", []), ("6 = 6", []), ("2**3 = 8", []), ("1 boxes + 2 = 3", []),
    ("((((1+1)))) = 2", []), ("(1+1 = 2", []),
])
def test_plain_equations_are_found_and_worked_out(text, found):
    assert [(left, right, holds) for left, _, right, holds in equations(text)] == found


@pytest.mark.parametrize("shown", ["24", "0", "7", "1,000", "0.2", "100", "-5", "11"])
def test_a_slip_is_another_number_of_the_same_form(shown):
    slips = {mistaken(shown, random.Random(i)) for i in range(60)}
    assert (len(slips) > 1 or slips == {"1"}) and all(number(slip) is not None and number(slip) != number(shown)
                                                      for slip in slips)
    assert shown.startswith("-") or not any(slip.startswith("-") for slip in slips)
    assert shown != "24" or slips == {"23", "25", "240", "42"}
    assert shown != "1,000" or {"999", "1,001", "10,000"} <= slips


# Demonstrations

def test_a_solution_demo_is_the_worked_solution_without_marks(task):
    assert task.solution_demo(problem_of(CLIPS), random.Random(0)) == DEMO


def test_in_lines_a_demonstration_is_written_as_the_data_set_is(task):
    task, problem = copy.copy(task), problem_of(CLIPS)
    task.fmt = IN_WORDS[args_of("--gsm8k-format", "lines").gsm8k_format]
    solution = "She sold 48/2 = 24 clips in May.\nIn all 48+24 = 72 clips.\n#### 72"
    assert task.solution_demo(problem, None) == solution and task.check(problem, solution)
    assert task.check(problem, solution.replace("#### 72", "#### 27")) is False
    assert task.verification_demo(problem, solution, None) == "48/2=24[CORRECT]\n48+24=72[CORRECT]\n#### [CORRECT]"
    for i in range(50):
        slipped = task.corrupted_solution(problem, random.Random(i))
        judged = parse_verification(task.fmt, task.verification_demo(problem, slipped, None), 2)
        assert judged.unmet == () and judged.verdict is (slipped == solution)


def test_step_labels_are_unknown_and_scores_leave_them_out(task):
    assert task.step_labels(problem_of(CLIPS), DEMO) == []
    scores = verdict_scores([[True, [], True, [True, False], []], [False, [], True, [True, True], []]])
    assert scores["step_f1"] is scores["first_error_f1"] is None and scores["outcome_f1"] is not None


def test_a_corrupted_solution_is_right_or_has_one_slip(task):
    problem, seen = problem_of(CLIPS), {True: 0, False: 0}
    for i in range(400):
        solution = task.corrupted_solution(problem, random.Random(i))
        right = task.check(problem, solution)
        assert right is (solution == DEMO)
        wrong = [a != b for a, b in zip(task.fmt.step_spans(solution), task.fmt.step_spans(DEMO), strict=True)]
        assert right or len(wrong) == 2 and solution.split("<answer>")[0] != DEMO.split("<answer>")[0]
        # then the slip is the last result: the answer follows it
        if not right and "24 clips" in solution.split("</step>")[0]:
            assert task.fmt.answer(solution) == solution.split("24 = ")[1].split(" ")[0].replace(",", "")
        seen[right] += 1
    assert abs(seen[True] / 400 - 0.5) < 0.08  # three standard errors


def test_without_plain_equations_only_the_answer_slips(task):
    task.worked["How old?"] = "Twice <<2*4=8>>8 is 16.\n#### 16"
    solutions = {task.corrupted_solution(Problem("sft", 0, "How old?", "16"), random.Random(i)) for i in range(50)}
    assert ({solution.split("</think>")[0] for solution in solutions} == {"<think><step>Twice 8 is 16.</step>"}
            and len(solutions) > 2)
    del task.worked["How old?"]


@pytest.mark.parametrize("body, answer, judged", [
    (["She sold 48/2 = 24 clips in May.", "In all 48+24 = 72 clips."], "72",
     [("48/2=24", True), ("48+24=72", True), True]),
    (["She sold 48/2 = 26 clips in May.", "In all 48+24 = 72 clips."], "72",
     [("48/2=24, not 26", False), ("48+24=72", True), True]),
    (["Half is 24.", "48 + 24 = 73"], "73", [(NO_EQUATION, True), ("48+24=72, not 73", False), False]),
    (["48/2=24 and 1+1=3"], "72", [("48/2=24; 1+1=2, not 3", False), True]),
    ([], "7", [False]),
])
def test_a_verification_works_the_equations_again(task, body, answer, judged):
    solution = task.fmt.render_solution(body, answer)
    analyses, verdicts = [a for a, _ in judged[:-1]], [v for _, v in judged[:-1]]
    assert (task.verification_demo(problem_of(CLIPS), solution, random.Random(0))
            == task.fmt.render_verification(analyses, verdicts, judged[-1]))


def test_a_line_of_the_dataset_is_right_whatever_its_equations(task):
    task.worked["How many buses?"] = "10/3 = <<10/3=3>>3 buses are full.\n#### 3"
    verification = task.verification_demo(Problem("sft", 0, "How many buses?", "3"),
                                          "<step>10/3 = 3 buses are full.</step>", random.Random(0))
    assert verification.startswith("<step_verification><step>10/3=3\\boxed{CORRECT}</step>")
    del task.worked["How many buses?"]


PIECES = ("<think>", "<step>", "</step>", "</think>", "<answer>\\boxed{", "}</answer>", "\\boxed{CORRECT}", "4/2=",
          "3", " ")


@settings(max_examples=150, deadline=None)
@given(st.text() | st.text("0123456789+-*/x×=().,%$ ").map("<step>{}</step>".format)
       | st.lists(st.sampled_from(PIECES)).map("".join))
@example("<step>" + "9" * 5000 + "+1=2</step>")
@example("<step>" + "1+" * 3000 + "1=2</step>")
@example("<step>" + "(" * 4000 + "1+1" + ")" * 4000 + "=2</step>")
@example("<step>1" + " " * 20000 + "+ 1 = 2 / 0 = 5 - - 3</step>")
def test_any_text_gets_a_verification_in_format(task, solution):
    problem = problem_of(CLIPS)
    num_steps = len(task.fmt.step_spans(solution))
    verification = parse_verification(task.fmt, task.verification_demo(problem, solution, random.Random(0)), num_steps)
    assert verification.unmet == () and verification.verdict is task.check(problem, solution)


# The real files

def test_all_real_golds_are_read_and_the_splits_share_nothing(real):
    assert real.num_dropped == 0 and len(real.worked) == 7473 + 1319
    for a, b in combinations(SPLITS, 2):
        assert not set(real.splits[a]) & set(real.splits[b])
    assert len(real.splits["test_in"]) + len(real.splits["test_out"]) == 1319


def test_real_demonstrations_are_right_and_slips_are_found(real):
    right, changed = 0, 0
    for split in SPLITS:
        for i in range(300):
            problem = real.problem(split, i)
            demo = real.solution_demo(problem, random.Random(0))
            num_steps = len(worked_lines(real.worked[problem.prompt]))
            assert real.check(problem, demo) is True and "<<" not in demo
            verification = parse_verification(real.fmt, real.verification_demo(problem, demo, random.Random(0)),
                                              num_steps)
            assert (verification.unmet == () and verification.step_verdicts == [True] * num_steps
                    and verification.verdict is True)
            solution = real.corrupted_solution(problem, random.Random(f"{split}{i}"))
            judged = parse_verification(real.fmt, real.verification_demo(problem, solution, random.Random(0)),
                                        num_steps)
            assert judged.unmet == () and judged.verdict is real.check(problem, solution) is (solution == demo)
            slipped = [solution[s:e] != demo[a:b]
                       for (s, e), (a, b) in zip(real.fmt.step_spans(solution), real.fmt.step_spans(demo), strict=True)]
            assert [not verdict for verdict in judged.step_verdicts] == slipped and sum(slipped) <= 1
            right += judged.verdict
            changed += any(slipped)
    # Half of 1200 are wrong, 0.84 of them by a step; three standard errors of the half are 52.
    assert abs(right - 600) < 52 and 440 < changed < 570
