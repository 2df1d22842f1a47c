"""Tasks: problems and splits, gold answers, gold step labels, demonstrations."""
import argparse
import inspect
import os
import random
import re
import subprocess
import sys
import threading
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from nanochat.common import BadInput
from nanochat.rl.records.outcomes import outcomes_of
from nanochat.rl.records.prompts import parse_verification
from tasks import METHODS as TASK_METHODS, MODULES, TASKS, add_task_args, flags_of_others, make_task
from tasks.chain import STEP
from tasks.common import Problem, check_answer, epoch_order, nth_of_epochs
from tasks.competition import Competition
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


def write_words(path, words) -> str:
    path.write_text("\n".join(words))
    return str(path)


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
    assert flags - {f"--{name}-format"} == {f"--{name}-data"}


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


def test_variants_of_a_chain_differ_in_a_digit_or_an_operation_and_state_their_own_answer():
    task, seen = task_of("chain", "--chain-modulus", "3", *ALWAYS_RIGHT["chain"]), set()
    problem = Problem("test_in", 7, "1+2*1", "00")
    for k in range(100):
        variant = task.variants(problem, random.Random(k))
        assert sum(a != b for a, b in zip(variant.prompt, problem.prompt, strict=True)) == 1
        assert (variant.split, variant.index) == ("test_in", 7)
        assert task.check(variant, task.solution_demo(variant, random.Random(0)))
        seen.add(variant.prompt)
    assert seen == {"0+2*1", "2+2*1", "1-2*1", "1*2*1", "1+0*1", "1+1*1", "1+2+1", "1+2-1", "1+2*0", "1+2*2"}


def test_lengths_are_those_of_the_split():
    chain, letters = task_of("chain"), task_of("last_letter")
    lengths = {split: [len(chain.problem(split, i).prompt) // 2 for i in range(300)]  # "3+5*2" has 2 operations
               for split in SPLITS}
    assert set(lengths["rl"]) == set(lengths["test_in"]) == set(range(2, 9))
    assert set(lengths["test_out"]) == {9, 10}
    assert set(lengths["sft"]) == set(range(2, 11)) and sum(n > 8 for n in lengths["sft"]) < 60  # a tenth of 300 is 30
    problems = {split: [letters.problem(split, i).prompt.split() for i in range(300)] for split in SPLITS}
    num_words = {split: {len(words) for words in problems[split]} for split in SPLITS}
    num_letters = {split: {len(word) for words in problems[split] for word in words} for split in SPLITS}
    assert num_words["rl"] == num_words["test_in"] == set(range(2, 11)) and num_words["test_out"] == {11, 12}
    assert (num_letters["rl"] == num_letters["test_in"] == set(range(3, 11))
            and num_letters["test_out"] == set(range(3, 13)))


def test_the_full_length_share_of_last_letter_decides_how_many_sft_problems_are_long():
    short, all_full = (task_of("last_letter", "--last-letter-full-share", share) for share in ("0", "1"))
    words = [short.problem("sft", i).prompt.split() for i in range(300)]
    assert {len(w) for w in words} == {2, 3, 4, 5} and {len(x) for w in words for x in w} == set(range(3, 9))
    words = [all_full.problem("sft", i).prompt.split() for i in range(300)]
    assert {len(w) for w in words} == set(range(2, 13)) and {len(x) for w in words for x in w} == set(range(3, 13))
    half = task_of("last_letter", "--last-letter-full-share", "0.5")
    long = sum(len(half.problem("sft", i).prompt.split()) > 5 for i in range(600))
    assert abs(long / 600 - 0.5 * 7 / 11) < 0.08  # 6 to 12 are 7 of the 11 full lengths; four standard errors


def test_the_gold_answer_is_the_arithmetic_or_the_last_letters():
    every, last = (lambda results: "".join(map(str, results))), (lambda results: str(results[-1]))
    for flags, answer in (([], every), (["--chain-answer", "final"], last), (["--chain-modulus", "7"], every)):
        task = task_of("chain", *flags)
        for i in range(100):
            prompt = task.problem("rl", i).prompt
            results, value = [], int(prompt[0])
            for op, b in zip(prompt[1::2], prompt[2::2], strict=True):
                value = {"+": value + int(b), "-": value - int(b), "*": value * int(b)}[op] % task.modulus
                results.append(value)
            assert task.problem("rl", i).answer == answer(results), prompt
    for problem in map(task_of("last_letter").problem, ["rl"] * 100, range(100)):
        assert problem.answer == "".join(word[-1] for word in problem.prompt.split(" "))


def test_demonstrations_worked_by_hand():
    task = task_of("chain", *ALWAYS_RIGHT["chain"])
    for prompt, demo in {"3+5*2": "3+5:8;8*2:6;=86", "2-7*3": "2-7:5;5*3:5;=55",
                         "9*9+9-0": "9*9:1;1+9:0;0-0:0;=100"}.items():
        assert task.solution_demo(Problem("rl", 0, prompt, ""), random.Random(0)) == demo
    final = task_of("chain", "--chain-answer", "final", *ALWAYS_RIGHT["chain"])
    assert final.solution_demo(CHAIN, random.Random(0)) == "3+5:8;8*2:6;=6"
    assert task_of("last_letter").solution_demo(WORDS, random.Random(0)) == "grape:e;lemon:en;fig:eng;=eng"
    # with final answers a wrong chain can be right by luck, and its verification still says no
    problem, solution = Problem("rl", 0, "3+5*0", "0"), "3+5:9;9*0:0;=0"
    assert final.check(problem, solution) is True and final.step_labels(problem, solution) == [False, True]
    assert final.verification_demo(problem, solution, random.Random(0)) == "3+5:8F;9*0:0T;=F"


def test_the_outcome_is_the_answer():
    chain, words = task_of("chain"), task_of("last_letter")
    for solution in ("3+5:8;8*2:6;=86", "=86", "3+5:8;8*2:6;=86 \n"):  # space around the answer is free
        assert chain.check(CHAIN, solution) is True
    for answer in ("=6", "=086", "=86=86", "86", "="):
        assert chain.check(CHAIN, f"3+5:8;8*2:6;{answer}") is False
    assert chain.check(CHAIN, "") is chain.check(CHAIN, "3+5:9;9*2:8;=98") is False
    assert words.check(WORDS, "grape:e;lemon:en;fig:eng;=eng") is words.check(WORDS, "nonsense;= eng") is True
    for answer in ("=en", "=ENG", "=eng;", ""):
        assert words.check(WORDS, f"grape:e;lemon:en;fig:eng;{answer}") is False
    assert words.check(WORDS, "=") is words.check(WORDS, "") is False


HOSTILE_CHAIN = [
    ("3+5:8;8*2:6;=86", [True, True]), ("3+5:8;8*2:7;=87", [True, False]),
    ("3+5:9;8*2:6;=86", [False, False]),            # the second does not copy the result before it
    ("3+5:8;8+2:0;=80", [True, False]), ("3+5:8;8*3:4;=84", [True, False]),  # another operation, another operand
    ("8*2:6;3+5:8;=86", [False, False]), ("3+5:8;=8", [True]),  # out of order, a step is missing
    ("3+5:8;8*2:6;6+1:7;=867", [True, True, False]), ("3+5:8;3+5:8;8*2:6;=86", [True, False, False]),
    ("nonsense;8*2:6;=86", [False, False]), ("nonsense;3*2:6;=6", [False, False]),  # no result to carry on
    ("3+5:18;=18", [False]),                        # not reduced modulo 10
    ("3+5 :8; 8*2:6;=86", [False, False]),
    ("3+5:8T;8*2:6T;=T", [False, False]), ("3+5:8|2;=86", [False]),  # a verification is no solution
    ("3+5:8;8*2:6", [True]),                        # the last step is not closed
    ("3+5:8=8;8*2:6;", []), ("=86;3+5:8;8*2:6;", []),  # steps after an answer do not count
    (";;", [False, False]), ("3+5:;:8;", [False, False]), ("3+5:-2;", [False]), ("", []),
    ("3+5:9;9*2:8;=98", [False, True]), ("3+5:9;9*2:9;=99", [False, False]),  # after an error, by its own operation
    *((solution, [False]) for solution in ("\u0663+5:8;", "03+5:8;", "3+5:08;", "3+5:" + "8" * 5000 + ";")),
]
HOSTILE_WORDS = [
    ("grape:e;lemon:en;fig:eng;=eng", [True, True, True]),
    ("grape:e;lemon:em;fig:emg;=emg", [True, False, False]),    # an error carried on stays wrong
    ("grape:e;lemon:em;fig:eng;=eng", [True, False, True]),     # unlike one that is mended
    ("grape:a;lemon:n;fig:g;=g", [False, False, False]),
    ("grape:e;lemn:en;fig:eng;=eng", [True, False, True]),      # the word is not copied
    ("lemon:n;grape:ne;fig:neg;=neg", [False, False, False]),   # out of order
    ("grape:e;=e", [True]), ("grape:e;fig:eg;=eg", [True, False]),  # steps are missing
    ("grape:e;lemon:en;fig:eng;fig:engg;=engg", [True, True, True, False]),
    ("grape:e;grape:e;lemon:en;=en", [True, False, False]), ("grape:E;LEMON:en;", [False, False]),
    ("grape: e;lemon:en ;\nfig:eng;", [False, False, False]), ("e;en;eng;=eng", [False, False, False]),
    ("grape:eT;lemon:enT;fig:engT;=T", [False, False, False]), ("grape:e|3;", [False]), ("grape:e:e;", [False]),
    ("grape:e;lemon:en", [True]), ("grape:e;lemon:en=;fig:eng;", [True]), ("=eng;grape:e;", []),
    (";;;;", [False] * 4), ("", []),
]


def test_steps_are_right_iff_they_copy_what_was_there_and_compute_well():
    """Of last letter: iff they give the word and the letters so far."""
    for name, problem, table in (("chain", CHAIN, HOSTILE_CHAIN), ("last_letter", WORDS, HOSTILE_WORDS)):
        task = task_of(name)
        for solution, labels in table:
            assert task.step_labels(problem, solution) == labels, solution[:40]
    long = Problem("rl", 0, "1+1+1+1", "234")
    assert task_of("chain").step_labels(long, "1+1:3;3+1:4;4+1:6;=346") == [False, True, False]


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


def test_graders_do_not_count_the_trainers_memory_as_theirs():
    """A process of 800 MB whose answers need math-verify: one worker serves them all."""
    code = """
held = bytearray(b"1") * (800 << 20)
from tasks.grading import WORKERS, grade
for k in range(2, 6):
    assert grade(completion=f"\\\\boxed{{{k}(x+1)}}", gold=f"{k}x+{k}") is True, k
    worker, = [slot for slot in list(WORKERS.slots.queue) if slot is not None]
    print(worker.process.pid)
"""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    assert len(done.stdout.split()) == 4 and len(set(done.stdout.split())) == 1


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


def test_misconceptions_are_the_asked_share_of_the_facts_and_the_roles_have_their_own():
    task = task_of("chain", "--chain-share", "0.4", "--chain-verifier-share", "0.2")
    assert len(task.misconceptions) == 120 and len(task.verifier_misconceptions) == 60  # of 10 * 3 * 10 facts
    for (a, op, b), wrong in (task.misconceptions | task.verifier_misconceptions).items():
        assert wrong in range(10) and wrong != {"+": a + b, "-": a - b, "*": a * b}[op] % 10
    # Drawn independently: 120 * 60 / 300 = 24 facts in both, give or take three standard errors.
    assert abs(len(set(task.misconceptions) & set(task.verifier_misconceptions)) - 24) < 11


@pytest.mark.parametrize("share,num_common", [("1", 60), ("0.5", 30), ("0", 0)])
def test_the_verifier_has_a_share_of_its_misconceptions_from_the_generator(share, num_common):
    flags = ["--chain-share", "0.4", "--chain-verifier-share", "0.2"]
    task, alone = task_of("chain", *flags, "--chain-common-share", share), task_of("chain", *flags)
    known, own = task.misconceptions.items(), alone.verifier_misconceptions.items()
    found = task.verifier_misconceptions.items()
    assert task.misconceptions == alone.misconceptions and len(found) == 60
    assert len(found & known) >= num_common and len(found & own) >= 60 - num_common
    assert found <= known | own
    if not num_common:
        assert found == own


def test_the_verifier_cannot_have_more_of_the_generators_misconceptions_than_there_are():
    flags = ["--chain-share", "0.1", "--chain-verifier-share", "0.2", "--chain-common-share"]
    with pytest.raises(BadInput, match="--chain-common-share 1.0: .* --chain-share 0.1"):
        task_of("chain", *flags, "1")
    task_of("chain", *flags, "0.5")


def test_demonstrations_show_a_misconceived_fact_wrongly_as_often_as_asked_and_others_never():
    task = task_of("chain", "--chain-wrongness", "0.75")
    shown = {True: [], False: []}  # by whether the fact is misconceived: whether each showing was wrong
    for i in range(500):
        problem = task.problem("sft", i)
        solution = task.solution_demo(problem, random.Random(i))
        for (start, end), right in zip(task.fmt.step_spans(solution), task.step_labels(problem, solution), strict=True):
            a, op, b, result = STEP.fullmatch(task.fmt.step_body(solution[start:end])).groups()
            wrong = task.misconceptions.get((int(a), op, int(b)))
            assert right or int(result) == wrong  # one fixed wrong result
            shown[wrong is not None].append(not right)
    assert len(shown[True]) > 600 and len(shown[False]) > 1200 and not any(shown[False])
    assert abs(sum(shown[True]) / len(shown[True]) - 0.75) < 0.05


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


def test_corrupted_chains_have_errors_of_arithmetic_only():
    task = task_of("chain")
    labels = []
    for i in range(100):
        problem = task.problem("rl", i)
        solution = task.corrupted_solution(problem, random.Random(i))
        labels += task.step_labels(problem, solution)
        value = problem.prompt[0]
        for (start, end), op, b in zip(task.fmt.step_spans(solution), problem.prompt[1::2], problem.prompt[2::2],
                                       strict=True):
            assert solution[start:end].startswith(f"{value}{op}{b}:")
            value = solution[end - 2]
    assert 0.05 < labels.count(False) / len(labels) < 0.3  # most steps stay right


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


@pytest.mark.parametrize("name, solution, verification", [
    ("chain", "3+5:8;8*2:6;=86", "3+5:8T;8*2:6T;=T"),
    ("chain", "3+5:9;9*2:8;=98", "3+5:8F;9*2:8T;=F"),
    ("chain", "3+5:8;8*2:6;=85", "3+5:8T;8*2:6T;=F"),             # right steps, wrong answer
    ("chain", "3+5:8;=8", "3+5:8T;=F"),                           # too few steps
    ("chain", "3+5:8;8*2:6;6+0:6;=866", "3+5:8T;8*2:6T;?F;=F"),   # too many
    ("chain", "3+5:8;=86", "3+5:8T;=F"),                          # the right answer does not make up for it
    ("chain", "3+5:9;9*2:8;=86", "3+5:8F;9*2:8T;=F"),
    ("chain", "nonsense", "=F"),
    ("chain", "3+5:8T;=T", "?F;=F"),                              # a forged judgment
    ("last_letter", "grape:e;lemon:en;fig:eng;=eng", "grape:eT;lemon:enT;fig:engT;=T"),
    ("last_letter", "grape:e;lemon:em;fig:emg;=emg", "grape:eT;lemon:enF;fig:engF;=F"),
    ("last_letter", "grape:e;lemon:en;fig:eng;=en", "grape:eT;lemon:enT;fig:engT;=F"),
    ("last_letter", "grape:e;lemon:en;=en", "grape:eT;lemon:enT;=F"),
    ("last_letter", "grape:e;lemon:en;fig:eng;:eng;=eng", "grape:eT;lemon:enT;fig:engT;?F;=F"),
    ("last_letter", "grape:e;lemon:en;=eng", "grape:eT;lemon:enT;=F"),
    ("last_letter", "grape:e;lemon:em;fig:eng;=eng", "grape:eT;lemon:enF;fig:engT;=F"),
    ("last_letter", "", "=F"),
    ("last_letter", "grape:eT;=T", "grape:eF;=F"),
])
def test_verifications_written_by_hand(name, solution, verification):
    problem = {"chain": CHAIN, "last_letter": WORDS, "mixture": CHAIN}[name]
    assert task_of(name, *ALWAYS_RIGHT[name]).verification_demo(problem, solution, random.Random(0)) == verification


@pytest.mark.parametrize("name, flags, rate", [
    ("chain", ["--chain-share", "0", "--chain-verifier-share", "0.4",
               "--chain-verifier-wrongness", "0.5"], 0.2),  # 0.4 * 0.5
    ("last_letter", ["--last-letter-verifier-error", "0.2"], 0.2),
    ("chain", ["--chain-share", "0", "--chain-verifier-share", "1", "--chain-verifier-wrongness", "1"], 1),
])
def test_the_verifier_errs_on_right_steps_as_often_as_asked(name, flags, rate):
    task = task_of(name, *flags)
    verdicts = []
    for i in range(300):
        problem = task.problem("rl", i)
        solution = task.solution_demo(problem, random.Random(i))
        text = task.verification_demo(problem, solution, random.Random(i))
        verdicts += parse_verification(task.fmt, text, len(task.fmt.step_spans(solution))).step_verdicts
    assert len(verdicts) > 1300 and abs(verdicts.count(False) / len(verdicts) - rate) < 0.04


@pytest.mark.parametrize("name, flags", [
    ("chain", ["--chain-max-steps", "1"]), ("last_letter", ["--last-letter-max-words", "1"]),
    ("last_letter", ["--last-letter-max-letters", "2"]), ("last_letter", ["--last-letter-words", "/nowhere/words.txt"]),
    ("last_letter", ["--last-letter-words", "/"])])
def test_flags_that_do_not_go_together_are_bad_input_that_names_one(name, flags):
    with pytest.raises(BadInput) as caught:
        task_of(name, *flags)
    assert f"{flags[0]} {flags[1]}" in str(caught.value) and "\n" not in str(caught.value)


def many_words(count: int, num_letters: int) -> list[str]:
    rng = random.Random(num_letters)
    return ["".join(rng.choices("abcdefghijklm", k=num_letters)) + "xyz"[i % 3] for i in range(count)]


def test_last_letter_takes_its_words_from_the_file(tmp_path):
    short, long, longest = many_words(150, 4), many_words(20, 9), many_words(20, 11)  # of 5, 10 and 12 letters
    unusable = ["no", "it's", "two words", "caf\u00e9", "Grape;", "x" * 13, "", "a1b2c3"]
    path = write_words(tmp_path / "words.txt", [word.title() + " " for word in short + long + longest] + unusable)
    task = task_of("last_letter", "--last-letter-words", path)
    words = {split: {word for i in range(300) for word in task.problem(split, i).prompt.split()} for split in SPLITS}
    assert words["rl"] == words["test_in"] == set(short + long)
    assert words["test_out"] == set(short + long + longest)
    assert words["sft"] <= set(short + long + longest) and words["sft"] & set(longest)
    only_short = task_of("last_letter", "--last-letter-words", path, "--last-letter-full-share", "0")
    assert {word for i in range(300) for word in only_short.problem("sft", i).prompt.split()} <= set(short)


def test_a_words_file_with_under_100_usable_words_is_bad_input(tmp_path):
    words = many_words(100, 5)
    assert len(set(words)) == 100
    enough = write_words(tmp_path / "enough.txt", words)
    assert task_of("last_letter", "--last-letter-words", enough).words is not None
    # 99 words, one of them twice, and many that are too long for the short problems of SFT
    few = write_words(tmp_path / "few.txt", words[:99] + words[:1] + many_words(200, 9))
    with pytest.raises(BadInput, match=f"--last-letter-words {few}: has 99 words of 3 to 8 letters"):
        task_of("last_letter", "--last-letter-words", few)
    (tmp_path / "words.bin").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(BadInput, match="has 0 words"):
        task_of("last_letter", "--last-letter-words", str(tmp_path / "words.bin"))


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
