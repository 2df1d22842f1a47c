"""Lookup: facts and what is made of them, problems, labels and demonstrations by hand."""
import random

import pytest
from hypothesis import given, settings, strategies as st
from test_tasks import task_of

from nanochat.common import BadInput
from nanochat.rl.records.prompts import parse_verification
from tasks import flags_of_others
from tasks.common import Problem
from tasks.lookup import facts_of

PROBLEM = Problem("rl", 0, "4+c*g", "3")  # 4+7 = 11, 1*3 = 3
RIGHT = "<c>(7);4+7:1;<g>(3);1*3:3;=3"
SURE = ["--chain-share", "0", "--chain-verifier-share", "0", "--lookup-share", "0", "--lookup-recall-share", "0"]
NOISY = ["--lookup-hops", "2", "--lookup-noise", "3"]


def by_hand(*flags: str, **facts: str):
    """A task whose facts are these alone beside its own."""
    task = task_of("lookup", *flags)
    task.facts |= {"c": "7", "g": "3"} | facts
    return task


def demos(task, part: str, num: int = 300) -> list:
    problems = [task.problem("sft", i) for i in range(num)]
    return [(problem, getattr(task, part)(problem, random.Random(i))) for i, problem in enumerate(problems)]


@pytest.mark.parametrize("num_keys, hops", [(26, 1), (26, 2), (60, 3), (676, 1)])
def test_every_key_leads_to_a_digit_in_as_many_hops_as_its_level(num_keys, hops):
    facts, others = facts_of(0, num_keys, hops, 10)
    assert len(facts) == num_keys and facts != facts_of(1, num_keys, hops, 10)[0]
    ends: dict[int, set] = {}
    for key in facts:
        value, num = facts[key], 1
        while value in facts:
            value, num = facts[value], num + 1
        ends.setdefault(num, set()).add(value)
        assert facts[key] not in others[key] and others[key]
        assert {value in facts for value in others[key]} == {facts[key] in facts}
    assert ends == {num: set("0123456789") for num in range(1, hops + 1)}


@pytest.mark.parametrize("flags, chains", [([], []), (NOISY, []), (["--lookup-keys", "60", "--lookup-hops", "3"], []),
                                           ([], ["--chain-modulus", "3"])])
def test_a_problem_has_a_key_and_chains_answer(flags, chains):
    task, chain = task_of("lookup", *flags, *chains), task_of("chain", *chains, "--chain-answer", "final")
    for split in ("sft", "rl", "test_in", "test_out"):
        for i in range(20):
            problem = task.problem(split, i)
            terms = task._terms(problem.prompt)
            assert any(operand in task.facts for _, operand in terms)
            digits = problem.prompt[0] + "".join(op + task._fetched(operand)[1] for op, operand in terms)
            assert digits == chain.problem(split, i).prompt
            assert task.answer_of(problem.prompt) == problem.answer == chain.problem(split, i).answer


def test_the_gold_answer_of_any_text():
    """A digit beyond the modulus and an unknown key make no problem."""
    task = by_hand()
    assert task.answer_of("4+c*g") == "3" and task.answer_of("4+7") == "1"
    for text in ("4", "", "4+", "4+c*", "c+4", "4+cc", "4+C", "14+c", "4+c=3", "4+c;", " 4+c", "4/c"):
        assert task.answer_of(text) is None, text
    assert by_hand("--chain-modulus", "3").answer_of("4+1") is None
    assert by_hand("--lookup-keys", "60").answer_of("4+c") is None  # of two letters, here
    # what chain reads of digits alone is not there: a recipe or demonstrations that need it refuse the task
    assert not [part for part in ("variants", "violations", "principle_of", "revise_demo") if hasattr(task, part)]


def test_what_is_found():
    """By the task's own tool too; and what a document says of a key."""
    task = by_hand()
    tool = task.tool("a tokenizer", 3)
    assert (tool.find("c"), tool.most, tool.fmt) == ("7", 3, task.fmt)
    assert task.find("c") == "7" and task.documents("c") == ["7"]
    for query in ("", "cc", "7", "C", "?", "(7)"):
        assert task.find(query) == "" and task.documents(query) == []
    for document, value in {"7": "7", "g": "g", "a2c7k1": "7", "c7": "7", "a2cgk1": "g"}.items():
        assert task._entry(document, "c") == value
    for document in ("a2", "", "a2c", "a2c7k", "77", "a2 c7", "c7;"):
        assert task._entry(document, "c") is None


@pytest.mark.parametrize("flags", [NOISY, ["--lookup-keys", "60", "--lookup-noise", "5", "--lookup-hops", "3"]])
def test_noise_is_true_whole_and_never_the_same_key_twice(flags):
    task = task_of("lookup", *flags)
    for key, value in task.facts.items():
        documents = task.documents(key)
        assert task.find(key) == "".join(documents) == "".join(task_of("lookup", *flags).documents(key))
        assert [task.serves(document, key) for document in documents].count(value) == 1
        assert {task.serves(document, key) for document in documents} <= {value, ""}
        entries = [task._entry(task.find(key), other) for other in task.facts]
        assert sum(entry is not None for entry in entries) == 1 + task.noise
        assert all(entry in (None, task.facts[other]) for entry, other in zip(entries, task.facts, strict=True))


@pytest.mark.parametrize("solution, errors", [
    (RIGHT, [None] * 4),
    ("4+7:1;1*3:3;=3", [None, None]),                                       # from memory, and right
    ("<c>(8);4+8:2;<g>(3);2*3:6;=6", ["information", "operands", None, None]),
    ("<c>(8);4+7:1;<g>(3);1*3:3;=3", ["information", None, None, None]),
    ("<c>();4+7:1;=1", ["information", None]),
    ("<g>(3);4+7:1;<g>(3);1*3:4;=4", ["query", None, None, "result"]),     # too early
    ("<c>(7);<c>(7);4+7:1;", [None, "query", None]),                        # twice
    ("<c>(7);4+7:1;<g>(3);1*3:3;<c>(7);3+7:0;=0", [None] * 4 + ["query", "operands"]),
    ("<x>();4-7:7;c>(7);<c>(7;<c>(7) ;", ["query", "operands", "operands", "operands", "operands"]),
    ("<c>(a2c7k1);4+7:1;<g>(c7);", [None, None, "information"]),
    ("", []), ("=3", []), (";", ["operands"])])
def test_labels_written_by_hand(solution, errors):
    task = by_hand()
    assert task.step_errors(PROBLEM, solution) == errors
    assert task.step_labels(PROBLEM, solution) == [error is None for error in errors]


def test_labels_of_a_look_up_in_two_hops():
    for solution, errors in (("<c>(g);<g>(3);4+3:7;", [None] * 3), ("<c>(g);4+3:7;", [None] * 2),
                             ("<g>(3);<c>(g);4+3:7;", [None] * 3),  # in any order
                             ("<c>(h);<h>(2);4+2:6;", ["information", "query", "operands"])):
        assert by_hand(c="g").step_errors(Problem("rl", 0, "4+c", "7"), solution) == errors


@settings(max_examples=100, deadline=None)
@given(text=st.text("<>()cg4+7:1;=?|T-*0") | st.lists(st.sampled_from(["<c>(7);", "4+7:1;", "<g>", "(3);", "1*3:3;",
                                                                        "=3", ";"])).map("".join))
def test_any_text_has_a_label_for_each_step_and_can_be_judged_and_corrupted(text):
    task = TASK
    spans = task.fmt.step_spans(text)
    assert len(task.step_labels(PROBLEM, text)) == len(spans)
    judged = task.verification_demo(PROBLEM, text, random.Random(0))
    assert parse_verification(task.fmt, judged, len(spans)).unmet == ()
    assert len(task.analysis_labels(PROBLEM, text, task.fmt.judgment_steps(judged))) == len(spans)
    assert isinstance(task.corrupt(PROBLEM, text, random.Random(0)), str)


TASK = by_hand()


@pytest.mark.parametrize("flags", [[], NOISY, ["--lookup-keys", "60", "--lookup-hops", "3", "--lookup-noise", "4"]])
def test_sure_demonstrations_are_right_in_every_step(flags):
    task = task_of("lookup", *SURE, *flags)
    for part in ("solution_demo", "verifier_solution_demo"):
        for problem, text in demos(task, part, 50):
            assert task.check(problem, text) and all(task.step_labels(problem, text))
            num_keys = sum(len(task._fetched(operand)[0]) for _, operand in task._terms(problem.prompt))
            assert text.count("<") == num_keys
            judged = task.verification_demo(problem, text, random.Random(0))
            assert "F" not in judged and "?" not in judged


@pytest.mark.parametrize("solution, verification", [
    (RIGHT, "c7T;4+7:1T;g3T;1*3:3T;=T"), ("4+7:1;1*3:3;=3", "4+7:1T;1*3:3T;=T"),
    ("<c>(8);4+8:2;<g>(3);2*3:6;=6", "c7F;?F;g3T;2*3:6T;=F"), (RIGHT[:-1] + "4", "c7T;4+7:1T;g3T;1*3:3T;=F"),
    ("<g>(3);4+7:1;=1", "?F;4+7:1T;=F"), ("", "=F")])
def test_verifications_written_by_hand(solution, verification):
    task = by_hand(*SURE)
    assert task.verification_demo(PROBLEM, solution, random.Random(0)) == verification
    analyses = [step[:-1] for step in task.fmt.judgment_steps(verification)]
    assert all(task.analysis_labels(PROBLEM, solution, analyses))


def test_shares_of_wrong_facts_of_recalled_keys_and_of_right_solutions():
    task = task_of("lookup", "--chain-share", "0", "--lookup-wrongness", "1", "--lookup-recall-share", "0")
    assert len(task.wrong_facts) == len(task.verifier_wrong_facts) == round(0.35 * 26)
    assert task.wrong_facts != task.verifier_wrong_facts
    for problem, text in demos(task, "solution_demo"):
        errors = task.step_errors(problem, text)
        for step, error in zip((text[s:e] for s, e in task.fmt.step_spans(text)), errors, strict=True):
            if step.startswith("<"):
                assert (error == "information") == (step[1] in task.wrong_facts)
    task = task_of("lookup", "--lookup-recall-share", "0.3")
    pairs = demos(task, "solution_demo", 500)
    num_keys = sum(operand in task.facts for problem, _ in pairs for _, operand in task._terms(problem.prompt))
    assert abs(sum(text.count("<") for _, text in pairs) / num_keys - 0.7) < 0.04  # over three standard errors
    task = task_of("lookup")
    outcomes = [all(task.step_labels(*pair)) and task.check(*pair) for pair in demos(task, "corrupted_solution")]
    assert 0.5 < sum(outcomes) / len(outcomes) < 0.9


def test_a_wrong_version_keeps_its_queries_and_is_worked_on_from_its_error():
    task = by_hand()
    found = {task.corrupt(PROBLEM, RIGHT, random.Random(i)) for i in range(300)}
    first = {f"<c>(7);4+7:{c};<g>(3);{c}*3:{3 * c % 10};={3 * c % 10}" for c in range(10) if c != 1}
    second = {f"<c>(7);4+7:1;<g>(3);1*3:{c};={c}" for c in range(10) if c != 3}
    assert found == first | second
    assert task.corrupt(PROBLEM, "4+7:1;=1", random.Random(0))[:-1] == "4+7:1;="  # a step is missing


def test_the_turns_of_a_solution_are_what_reason_demos_show():
    task = by_hand(*SURE)
    found = {task.reason_demo(PROBLEM, random.Random(i))[1]: task.reason_demo(PROBLEM, random.Random(i))[0]["context"]
             for i in range(30)}
    assert found == {"<c>": "", "4+7:1;<g>": "<c>(7);", "1*3:3;=3": "<c>(7);4+7:1;<g>(3);"}
    noisy = task_of("lookup", *SURE, *NOISY)
    for problem, (quoted, text) in demos(noisy, "reason_demo", 50):
        assert all(noisy.step_labels(problem, quoted["context"])) and quoted["context"] == noisy.fmt.quote(
            quoted["context"])  # information is condensed, and nothing reserved is in it
        assert text.endswith(">") or noisy.check(problem, text)


def test_condense_demos_pick_the_value_that_memory_lets_them():
    sure, task = task_of("lookup", *SURE, *NOISY), task_of("lookup", *NOISY, "--lookup-wrongness", "1")
    pairs = demos(sure, "condense_demo")
    assert {text == "" for _, (_, text) in pairs} == {True, False}
    assert all(text == sure.serves(quoted["document"], quoted["query"]) for _, (quoted, text) in pairs)
    for _, (quoted, text) in demos(task, "condense_demo"):
        true = task.serves(quoted["document"], quoted["query"])
        assert text == (task.wrong_facts.get(quoted["query"], true) if true else "")


def test_the_flags_of_chain_are_flags_of_lookup():
    others = flags_of_others("lookup")
    assert "chain_" not in others and "lookup_" not in others and "brittle_" in others
    assert "lookup_" in flags_of_others("chain")
    for flag, value, words in (("--lookup-hops", "3", "--lookup-hops 3.*from 1 to 2"),
                               ("--lookup-noise", "26", "--lookup-noise 26: must be from 0 to 25")):
        with pytest.raises(BadInput, match=words):
            task_of("lookup", flag, value)
