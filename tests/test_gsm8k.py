"""GSM8K: reading its files, numbers and equations in text, slips, and the demonstrations of the verifier."""
import argparse
import copy
import json
import os
import random
from decimal import Decimal
from itertools import combinations

import pytest
from hypothesis import example, given, settings, strategies as st
from test_multiple_choice import cache  # noqa: F401

from nanochat.common import BadInput
from nanochat.rl.measure.scores import verdict_scores
from nanochat.rl.records.prompts import parse_verification
from tasks.common import Problem
from tasks.formats import IN_WORDS
from tasks.gsm8k import GSM8K, NO_EQUATION, add_args, equations, gold_answer, mistaken, number

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
REAL = os.path.join(os.environ.get("NANOCHAT_DATA") or os.path.join(ROOT, "..", "shared", "data"), "gsm8k")
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
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "gsm8k"
    write_rows(folder, "train", [CLIPS, *(worded(k, "train") for k in range(200)), ("No answer?", "It is 3."),
                                 ("No number?", "Yes.\n#### yes")])
    write_rows(folder, "test", [worded(k, "test") for k in range(100)])
    return GSM8K(args_of("--gsm8k-data", str(folder)), 0)


def problem_of(question_and_worked) -> Problem:
    return Problem("sft", 0, question_and_worked[0], gold_answer(question_and_worked[1]))


def test_what_is_dropped_is_told(task, tmp_path, capsys):
    """No gold answer, two of them; a train problem that is in the test file too is held out."""
    (question, worked), held = worded(0, "train"), worded(0, "test")
    write_rows(tmp_path / "odd", "train", [(question, worked), *(worded(k, "train") for k in range(1, 30)), held,
                                           ("Three?", "#### three apples"), (question, worked + "1"),
                                           worded(1, "train")])
    write_rows(tmp_path / "odd", "test", [("Four?", "#### four"), *(worded(k, "test") for k in range(30))])
    odd = GSM8K(args_of("--gsm8k-data", str(tmp_path / "odd")), 0)
    assert "gsm8k: left out: 4 rows without one gold answer" in capsys.readouterr().out
    assert question not in odd.worked and odd.num_dropped == 4 and len(odd.worked) == 29 + 30
    assert held[0] not in odd.splits["sft"] + odd.splits["rl"]
    assert task.num_dropped == 2 and len(task.worked) == 301


def test_a_problem_is_a_function_of_seed_split_and_index(task):
    assert all(question.startswith("test") == split.startswith("test") for split in SPLITS
               for question in task.splits[split] if question != CLIPS[0])
    assert sum(map(len, task.splits.values())) == len({question for split in SPLITS
                                                       for question in task.splits[split]}) == 301
    again, other = (GSM8K.__new__(GSM8K) for _ in range(2))
    for made, seed in ((again, 0), (other, 1)):
        made.__dict__ = {**vars(task), "seed": seed}
    for split in SPLITS:
        problems = [task.problem(split, i) for i in range(150)]
        assert problems == [again.problem(split, i) for i in reversed(range(150))][::-1]
        assert [(p.split, p.index) for p in problems] == [(split, i) for i in range(150)]
        assert problems != [other.problem(split, i) for i in range(150)]


def test_files_that_cannot_be_used_are_bad_input(tmp_path):
    folder, row = tmp_path / "half", '{"question": "What?", "answer": "#### 3"}\n'

    def refuses(message: str, train: str | bytes | None = None, source=folder) -> None:
        if train is not None:
            (folder / "train.jsonl").write_bytes(train if isinstance(train, bytes) else train.encode())
        with pytest.raises(BadInput, match=message):
            GSM8K(args_of("--gsm8k-data", str(source)), 0)
    refuses("--gsm8k-data /no/such: no such folder", source="/no/such")
    write_rows(folder, "train", [CLIPS])
    refuses("half: has no test.jsonl")
    write_rows(folder, "test", [CLIPS])
    refuses("left for split sft .*, 1 of the 1 train questions are in test too")
    for message, train in (
            ("line 1: has no column 'answer', only question, solution", '{"question": "What?", "solution": "3"}\n'),
            ("line 2: something in it is empty", row + row.replace('"What?"', "null")),
            ("line 2: has no text for question or answer", row + row.replace('"What?"', '" "')),
            ("line 1: is no text in UTF-8", row.replace("What", "é").encode("latin1")),
            ("is no json of rows: it begins with b'not json", "not json\n"),
            ("line 3: is no json: Expecting ':' delimiter: column 31", row + "\n" + row[:30]),
            ("line 2: is no json object$", "\ufeff" + row + "[3]\n"), ("line 2: ", row + "[" * 10 ** 5)):
        refuses(f"train.jsonl: {message}", train)


def test_a_number_is_one_plain_number():
    for text, value in {"18": 18, "18.0": 18, "$18": 18, " 1,000 ": 1000, "-$1,234.50": "-1234.5", ".5": "0.5",
                        "18.": 18, "0018": 18, "9" * 5000: "9" * 5000}.items():
        assert number(text) == Decimal(value)
    for text in ("1,00", "1,0000", "18 eggs", "1e3", "", None, "-", "$", "$$5", "1/2", "\u0663", "nan", "1_000", "2 3",
                 "."):
        assert number(text) is None
    assert gold_answer("a\n#### $1,234.5") == "1234.5" and gold_answer("#### x #### 7") == "7"
    assert gold_answer("7") is gold_answer("#### seven") is gold_answer("") is None


def test_the_outcome_is_the_number(task):
    """A box or a mark is read where the format is not kept."""
    problem, box = problem_of(CLIPS), "<think></think><answer>\\boxed{{{}}}</answer>".format
    for text in (*map(box, ("72", "72.00", "$72", "72 ", "72 clips", "\\frac{144}{2}")), "In all \\boxed{72}.",
                 CLIPS[1]):
        assert task.check(problem, text) is True, text
    for text in (*map(box, ("73", "7,2", "72 or 73", "", "-72", "clips")), "In all 72.",
                 "\\boxed{72} <answer>\\boxed{24}</answer>"):
        assert task.check(problem, text) is False, text


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
    (".1+.1 = .3", [(".1+.1", ".3", False)]), ("0.1*3=0.3", [("0.1*3", "0.3", True)]),
    ("007+1=8", [("7+1", "8", True)]),
    ("-36+13+-15 = -38", [("-36+13+-15", "-38", True)]),
    # cut off by a word, mixed numbers
    ("3 cats + 4 + 5 = 12", []), ("1 1/2 + 2 = 3 1/2", []), ("6:30+20 = 6:50", []), ("2*9 = 18 000", []),
    ("5 / 0 = 3", []), ("x = 6", []), ("6 = 6", []), ("2**3 = 8", []), ("1 boxes + 2 = 3", []),
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


def test_a_solution_demo_is_the_worked_solution_without_marks(task):
    """Whose steps have no labels: scores leave them out."""
    assert task.solution_demo(problem_of(CLIPS), random.Random(0)) == DEMO
    assert task.step_labels(problem_of(CLIPS), DEMO) == []
    scores = verdict_scores([[True, [], True, [True, False], []], [False, [], True, [True, True], []]])
    assert scores["step_f1"] is scores["first_error_f1"] is None and scores["outcome_f1"] is not None


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


def test_a_corrupted_solution_is_right_or_has_one_slip(task):
    problem, seen = problem_of(CLIPS), {True: 0, False: 0}
    for i in range(200):
        solution = task.corrupted_solution(problem, random.Random(i))
        right = task.check(problem, solution)
        assert right is (solution == DEMO)
        wrong = [a != b for a, b in zip(task.fmt.step_spans(solution), task.fmt.step_spans(DEMO), strict=True)]
        assert right or len(wrong) == 2 and solution.split("<answer>")[0] != DEMO.split("<answer>")[0]
        # then the slip is the last result: the answer follows it
        if not right and "24 clips" in solution.split("</step>")[0]:
            assert task.fmt.answer(solution) == solution.split("24 = ")[1].split(" ")[0].replace(",", "")
        seen[right] += 1
    assert abs(seen[True] / 200 - 0.5) < 0.11  # three standard errors


def test_without_plain_equations_only_the_answer_slips_and_a_line_of_the_dataset_is_right(task, monkeypatch):
    monkeypatch.setitem(task.worked, "How old?", "Twice <<2*4=8>>8 is 16.\n#### 16")
    solutions = {task.corrupted_solution(Problem("sft", 0, "How old?", "16"), random.Random(i)) for i in range(50)}
    assert ({solution.split("</think>")[0] for solution in solutions} == {"<think><step>Twice 8 is 16.</step>"}
            and len(solutions) > 2)
    monkeypatch.setitem(task.worked, "How many buses?", "10/3 = <<10/3=3>>3 buses are full.\n#### 3")
    verification = task.verification_demo(Problem("sft", 0, "How many buses?", "3"),
                                          "<step>10/3 = 3 buses are full.</step>", random.Random(0))
    assert verification.startswith("<step_verification><step>10/3=3\\boxed{CORRECT}</step>")


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


@pytest.mark.skipif(not os.path.isdir(REAL), reason=f"{REAL} is absent: set NANOCHAT_DATA")
def test_all_real_golds_are_read_and_the_splits_share_nothing():
    real = GSM8K(args_of("--gsm8k-data", REAL), 0)
    assert real.num_dropped == 0 and len(real.worked) == 7473 + 1319
    for a, b in combinations(SPLITS, 2):
        assert not set(real.splits[a]) & set(real.splits[b])
    assert len(real.splits["test_in"]) + len(real.splits["test_out"]) == 1319
