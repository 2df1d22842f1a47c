"""The judge report: its numbers by hand, and a judge whose faults are planted."""
import random

import pytest
from conftest import TASK_FLAGS, parse

from nanochat.rl.records.prompts import parse_verification
from nanochat.rl.report.judge_report import WORDS, analyses_of, judge_report, rationales_of, report_lines
from scripts import chat_sft
from tasks import make_task
from tasks.common import Problem
from tasks.formats import COMPACT, PAPER

CHAIN = Problem("test_in", 0, "1+2*2", "01")  # modulo 3: 1+2:0, 0*2:0


def task_of(*flags: str):
    return make_task(parse(chat_sft, ["--role", "verifier", *flags]))


def row(outcome, share, length=4, labels=(), step_verdicts=(), rationales=(), malformed=0, k=1) -> dict:
    return {"outcome": outcome, "share": share, "length": length, "verifications": k, "malformed": malformed,
            "verdicts": [] if share is None else [share >= 0.5] * k, "labels": list(labels),
            "step_verdicts": [list(x) for x in step_verdicts], "rationales": [list(x) for x in rationales]}


@pytest.mark.parametrize("fmt, text, analyses", [
    (COMPACT, "3+5:8T;8*2:5F;=F", ["3+5:8", "8*2:5"]),
    (COMPACT, "3+5:8;T;=T", ["3+5:8", ""]),
    (COMPACT, "T;", [""]),
    (COMPACT, "", []),
    (PAPER, "<step_verification><step>fine \\boxed{CORRECT}</step></step_verification><final_verification>"
            "\\boxed{CORRECT}</final_verification>", ["fine "])])
def test_an_analysis_is_what_stands_before_a_steps_verdict(fmt, text, analyses):
    assert analyses_of(fmt, text) == analyses


@pytest.mark.parametrize("solution, text, rationales", [
    ("1+2:0;0*2:0;=00", "1+2:0T;0*2:0T;=T", [True, True]),
    ("1+2:0;0*2:0;=00", "1+2:1F;0*2:0F;=F", [False, True]),     # whatever the verdicts are
    ("1+2:1;1*2:2;=12", "1+2:0F;1*2:2T;=F", [True, True]),      # a step goes on from what the one before it states
    ("1+2:1;1*2:2;=12", "1+2:0F;0*2:0T;=F", [True, False]),
    ("1+1:2;2*2:1;=21", "?F;2*2:1T;=F", [True, True]),          # it does not copy its operands
    ("1+1:2;2*2:1;=21", "1+1:2F;=F", [False, None]),            # and a step is left out
    ("1+2:0;0*2:0;=00", "1+2:0T;0*2:0T;0*2:0T;=T", [True, True])])
def test_the_chain_tells_right_analyses_whatever_the_verdict(solution, text, rationales):
    task = task_of(*TASK_FLAGS)
    verification = parse_verification(task.fmt, text, len(task.fmt.step_spans(solution)))
    assert rationales_of(task, CHAIN, solution, verification) == rationales
    cannot_tell = type("Task", (), {"fmt": task.fmt})()
    assert set(rationales_of(cannot_tell, CHAIN, solution, verification)) == {None}


def test_last_letter_and_the_mixture_tell_them_too():
    letters, problem = task_of("--task", "last_letter"), Problem("rl", 0, "ab cd", "bd")
    assert letters.analysis_labels(problem, "ab:b;cd:bx;e:bd;=bx", ["ab:b", "cd:bx", "?"]) == [True, False, True]
    assert letters.analysis_labels(problem, "ab:b;", ["?"]) == [False]
    mixture = task_of("--task", "mixture")
    for index, part in enumerate(mixture.parts):
        problem = mixture.problem("rl", index)
        solution = mixture.solution_demo(problem, random.Random(0))
        said = [step for step in solution.split(";")[:-1]]
        assert mixture.analysis_labels(problem, solution, said) == part.analysis_labels(problem, solution, said) != []


def test_a_report_by_hand():
    found = judge_report([row(True, 1.0, labels=[True] * 4, step_verdicts=[[True, True, False, True]],
                              rationales=[[True, False, False, None]])])
    assert found["verdict_acc"] == 3 / 4
    assert found["rationale_acc"] == 1 / 3   # of three analyses
    assert found["wrong_reason"] == 1 / 2    # of the two right verdicts that have one
    assert found["right_steps_blamed"] == 1 / 4 and found["wrong_steps_passed"] is found["rejected_rightly"] is None
    assert found["step_f1"] == (6 / 7 + 0) / 2
    found = judge_report([row(False, 0.0, labels=[False, False, False, True], rationales=[[True, True, False, True]],
                              step_verdicts=[[True, False, False, False]]), row(True, 1.0)])
    assert found["wrong_steps_passed"] == 1 / 3 and found["rejected_rightly"] == 1 / 2
    assert found["outcome_f1"] == found["balanced_acc"] == 1
    # Own solutions get .3 more where they are right and .1 more where they are wrong.
    others = [row(True, 0.2, 10), row(True, 0.4, 20), row(True, 0.6, 30), row(False, 0.5, 10), row(False, 0.1, 20)]
    own = [row(True, 0.7), row(False, 0.4), row(None, 1.0), row(True, None)]
    found = judge_report(others, own)
    assert found["length_right"] == pytest.approx(1.0) and found["length_wrong"] == pytest.approx(-1.0)
    assert found["own_right"] == pytest.approx(0.3) and found["own_wrong"] == pytest.approx(0.1)
    assert found["self_preference"] == pytest.approx(0.2)
    found = judge_report([row(None, None, k=0)], [])
    assert set(found) == set(WORDS) and all(value is None for value in found.values())
    assert all(line.endswith(" -") for line in report_lines(found)) and len(report_lines(found)) == len(WORDS)
    assert "self_preference" not in judge_report([])
    # malformed verifications are a share of all
    assert judge_report([row(True, 1.0, malformed=1, k=4), row(False, 0.0, k=4)])["parse_fail"] == 1 / 8
