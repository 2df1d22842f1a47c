"""Reasoning Gym: the splits of gsm_symbolic's templates, its demonstrations and step labels, other sets and their
scorers, options, and the lenient accuracy."""
import argparse
import random
import sys
from decimal import Decimal
from itertools import combinations
from types import SimpleNamespace

import pytest

from nanochat.cli import script_main
from nanochat.common import BadInput
from nanochat.rl.records.outcomes import labels_of, lenient_outcomes, scores_of
from nanochat.rl.records.prompts import parse_verification
from nanochat.rl.report.judge_report import analyses_of
from scripts import task_text
from tasks import add_task_args, complete_task_args, make_task, task_flags
from tasks.common import Problem, in_split, is_last_number
from tasks.gsm8k import number

pytest.importorskip("reasoning_gym")
from tasks import reasoning_gym as gym  # noqa: E402

SPLITS = ("sft", "rl", "test_in", "test_out")
# sets with numbers, words, a grid, partial scores, and no single answer
OTHERS = ("chain_sum", "spell_backward", "mini_sudoku", "letter_jumble", "graph_color")


def args_of(*flags: str):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    add_task_args(parser)
    return parser.parse_args(["--task", "reasoning_gym", *flags])


def task_of(*flags: str):
    return make_task(args_of(*flags))


@pytest.fixture(scope="module")
def task(request):
    return task_of("--reasoning-gym-format", getattr(request, "param", "paper"))


EVERY_FORMAT = pytest.mark.parametrize("task", ["paper", "lines"], indirect=True)


def solution_of(task, *steps: str, answer: str = "1") -> str:
    return task.fmt.render_solution(list(steps), answer)


@pytest.mark.parametrize("name", ["gsm_symbolic", "chain_sum"])
def test_a_problem_is_a_function_of_seed_split_and_index(name):
    problems = {}
    for seed in ("0", "1"):
        made = task_of("--reasoning-gym-name", name, "--seed", seed)
        problems[seed] = [made.problem(split, i) for split in SPLITS for i in range(5)]
        gym.example_of.cache_clear()
        gym.entry_of.cache_clear()
        assert problems[seed] == [made.problem(split, i) for split in reversed(SPLITS)
                                  for i in reversed(range(5))][::-1]
        assert [(p.split, p.index) for p in problems[seed]] == [(split, i) for split in SPLITS for i in range(5)]
    assert sum(a.prompt == b.prompt for a, b in zip(*problems.values(), strict=True)) < 3


@pytest.mark.parametrize("name, num", [("gsm_symbolic", 100), ("chain_sum", 200), ("spell_backward", 100)])
def test_splits_share_no_problem_whatever_the_seed(name, num):
    prompts = {split: set() for split in SPLITS}
    for seed in ("0", "1"):
        made = task_of("--reasoning-gym-name", name, "--seed", seed)
        for split in SPLITS:
            prompts[split] |= {made.problem(split, i).prompt for i in range(num)}
            assert all(in_split(prompt, split) for prompt in prompts[split])
    for a, b in combinations(SPLITS, 2):
        assert not prompts[a] & prompts[b], (a, b)
    assert all(len(found) > 1.5 * num for found in prompts.values())


def test_test_out_has_templates_that_are_never_seen_and_these_are_the_same_for_every_seed(task):
    seen, unseen = gym.dealt_templates()[True], gym.dealt_templates()[False]
    assert (len(seen), len(unseen), len(gym.BAD_TEMPLATES)) == (55, 20, 10)
    assert not set(seen) & set(unseen) and not gym.BAD_TEMPLATES & {*seen, *unseen}
    assert unseen == [5, 7, 19, 27, 34, 38, 42, 50, 53, 54, 69, 71, 81, 83, 88, 89, 93, 94, 95, 96]
    is_seen = {"Comet": True, " can peel ": True, " slew ": False, "-sided die": False}
    for split in SPLITS:
        prompts = " ".join(task.problem(split, i).prompt for i in range(150))
        assert {words: words in prompts for words in is_seen} == {
            words: seen is (split != "test_out") for words, seen in is_seen.items()}, split


def test_every_template_is_sound_in_all_but_few_draws():
    """Of 20 draws of each: template 3 is unsound in 3% and template 24 in 4%, so 6 is many standard errors away."""
    for template, make in gym.templates().items():
        examples = [gym.read_example(make(random.Random(i), 1.0)) for i in range(20)]
        num_unsound = sum(not gym.is_sound(example) for example in examples)
        assert num_unsound <= (6 if template in (3, 24) else 0), template


def test_a_worked_solution_is_sound_where_it_holds_and_ends_in_the_answer():
    example = gym.Example("How many are 2 boys and 3 girls?", "5", ("2 boys + 3 girls = 5 kids",))
    assert gym.is_sound(example) is True
    for changes in ({"answer": "6"}, {"answer": "-5"}, {"lines": ("2 boys + 3 girls = 6 kids", "so 5")},
                    {"question": "How many are 0.333333 of 15?"}):
        assert gym.is_sound(example._replace(**changes)) is False, changes
    worked = "Let's solve this:\n\n1. Initial amounts:\n   • He has 3.0 jars\n   - So 3.0 × 2 = 6.0\nDone.\n#### 6.0"
    assert gym.worked_lines(worked) == ["He has 3 jars", "So 3 × 2 = 6"]


def test_short_problems_are_those_of_the_templates_with_few_lines():
    short = task_of("--reasoning-gym-most-lines", "2")
    assert [len(gym.chosen_templates(is_seen, 2)) for is_seen in (True, False)] == [19, 6]
    assert [gym.chosen_templates(is_seen, 0) for is_seen in (True, False)] == [*map(gym.dealt_templates().get, (1, 0))]
    for split in SPLITS:
        problems = [short.problem(split, i) for i in range(60)]
        assert all(len(short.fmt.step_spans(short.solution_demo(problem, None))) <= 2 for problem in problems)
        assert short.problem(split, 0) == problems[0]


@EVERY_FORMAT
@pytest.mark.parametrize("split", SPLITS)
def test_demonstrations_end_in_the_gold_answer_and_are_right_in_every_step(task, split):
    for i in range(40):
        problem = task.problem(split, i)
        demo = task.solution_demo(problem, random.Random(0))
        lines = [task.fmt.step_body(demo[s:e]) for s, e in task.fmt.step_spans(demo)]
        assert task.check(problem, demo) is True and task.score(problem, demo) == 1
        assert is_last_number(demo, problem.answer) and number(problem.answer) in gym.numbers_in(lines[-1])
        assert labels_of(task, problem, demo) == [True] * len(lines)
        judged = parse_verification(task.fmt, task.verification_demo(problem, demo, random.Random(0)), len(lines))
        assert judged.unmet == () and judged.verdict is True and all(judged.step_verdicts)


@EVERY_FORMAT
def test_a_corrupted_solution_is_right_or_has_one_slip_that_label_and_verifier_name(task):
    seen, slips = {True: 0, False: 0}, 0
    for i in range(300):
        problem = task.problem("sft", i)
        demo, solution = task.solution_demo(problem, None), task.corrupted_solution(problem, random.Random(i))
        right, labels = task.check(problem, solution), task.step_labels(problem, solution)
        assert right is (solution == demo) and labels.count(False) <= 1
        judged = parse_verification(task.fmt, task.verification_demo(problem, solution, None), len(labels))
        assert judged.unmet == () and judged.verdict is right and judged.step_verdicts == labels
        seen[right] += 1
        slips += False in labels
    assert abs(seen[True] / 300 - 0.5) < 0.09 and slips > 0.9 * seen[False]  # three standard errors


def test_wrong_answers_are_wrong(task):
    problem = task.problem("rl", 0)
    for answer, right in {"{}": True, "{}.0": True, "${}": True, "-{}": False, "1{}": False, "{}, 7": False, "": False,
                          "about": False, "{} or 3": False}.items():
        assert task.check(problem, solution_of(task, answer=answer.replace("{}", problem.answer))) is right


@pytest.mark.parametrize("line, found", [
    ("240 mushroom / 4 mushroom/minute = 60 minutes", [("240/4", "60", True)]),
    ("3 * €10 = €30, and $8 + £11 = 20", [("3*10", "30", True), ("8+11", "20", False)]),
    ("14 skeins per beanie + 4 skeins per pair of mittens = 18 skeins", [("14+4", "18", True)]),
    ("11 sunflowers x $3 = $33", [("11*3", "33", True)]),
    ("The perimeter is 2(32+17) = 98", [("2*(32+17)", "98", True)]),
    ("360 spools / 1440 spools * 100% = 25%", [("360/1440*100%", "25%", True)]),
    ("84 minutes because 27 + 57 = 84", [("27+57", "84", True)]),
    ("It is 85 total students - 14 read - 2 volleyball = 69", [("85-14-2", "69", True)]),
    ("39 yards * (3 feet / 1 yards) = 117 feet", [("39*(3/1)", "117", True)]),
    ("( 3 - 5 ) * 1 = 9", [("(3-5)*1", "9", False)]),
    ("3 cats and 4 dogs = 7", []),               # no sign between them
    ("In 2 years he will be 23*3=69", [("23*3", "69", True)]),
    ("a 40-minute show = 2", []),
])
def test_equations_are_found_among_units(line, found):
    assert [(left, right, holds) for left, _, right, holds in gym.line_equations(line)] == found


@pytest.mark.parametrize("line, error", [
    ("She needs 4 * 8 = 32 eggs", None),
    ("She needs 4 * 8 = 33 eggs", "arithmetic"),   # does not hold
    ("She needs 4 * 9 = 36 eggs", "equation"),     # holds, and is no value of the solution
    ("There are 8 eggs in each of 4 boxes, 4 boxes * 8 eggs/box = 32 eggs", None),
    ("First 4 * 8 = 33, then 40 - 8 = 32", "arithmetic"),
    ("There are 4 - 12 = -8 left", "equation"), ("It is 4 / 4 * 8% = 8%", None),
    ("It is 2 * 4 = 10 - 2", "equation"),
    ("She has 3 + 1 + T = 4 + T = 32 eggs", None), ("She has 3 + 1 + T = 8 + T = 32 eggs", "arithmetic"),
    ("So she has 32 eggs", None), ("So she has 33 eggs", "number"),
    ("So she is done", None),
    ("", None),
])
def test_a_line_is_right_where_it_holds_and_its_result_is_known(line, error):
    assert gym.line_error(line, {Decimal(4), Decimal(8), Decimal(32)}) == error


@pytest.mark.parametrize("line, said", [
    ("She needs 8 * 4 = 32 eggs", "4*8=32"),                       # right in another way
    ("She needs 4 + 8 = 12 eggs", "4*8=32, not 12"),
    ("First 4 * 8 = 33, then 33 - 1 = 32", "4*8=32, not 33"),      # the first that does not hold
    ("So she has 31 eggs", "4*8=32, not 31"), ("She needs 4 * 9 = 32 eggs", "4*9=36, not 32"),
    ("So she is done", "4*8=32"),
])
def test_a_verifier_works_out_a_line_and_says_what_is_wrong(line, said):
    right = gym.line_error(line, {Decimal(4), Decimal(8), Decimal(32)}) is None
    assert gym.analysis_of(line, "4 boxes * 8 eggs/box = 32 eggs", right) == said
    assert gym.analysis_of(line, "She has 32 eggs", right) == said.replace("4*8=", "")


@pytest.mark.parametrize("step, said, is_right", [
    ("4 * 9 = 36", "4*8=32", True), ("4 * 9 = 36", "32", True), ("4 * 9 = 36", "8*4=32, not 36", True),
    ("4 * 9 = 36", "4*9=36", False),                                       # the mistake, copied
    ("4 * 9 = 36", "8*4=32, not 34", False),                               # what does not stand there
    ("4 * 9 = 36", "4*8=34, not 36", False), ("4 * 9 = 36", "4+8=12, not 36", False),
    ("4 * 9 = 36", "36", False), ("4 * 9 = 36", "", False),
    ("4 * 9 = 38", "4*9=36, not 38", True), ("4 * 9 = 38", "4*9=38", False), ("4 * 9 = 38", "4*9=37, not 38", False),
])
def test_what_a_verifier_says_of_a_step_is_right_or_not(step, said, is_right):
    assert gym.is_right_analysis(said, f"She needs {step} eggs", "4 boxes * 8 eggs/box = 32 eggs") is is_right


@EVERY_FORMAT
def test_all_that_demonstrations_say_of_steps_is_right(task):
    rng, wrong = random.Random(0), 0
    for i in range(60):
        problem = task.problem("sft", i)
        solution = task.corrupted_solution(problem, rng)
        said = analyses_of(task.fmt, task.verification_demo(problem, solution, rng))
        assert all(task.analysis_labels(problem, solution, said)) and len(said) == len(task.fmt.step_spans(solution))
        wrong += not all(task.step_labels(problem, solution))
    assert wrong > 10


@EVERY_FORMAT
def test_a_step_is_compared_with_the_worked_line_of_its_result_else_of_its_place(task):
    problem = task.problem("sft", 0)
    worked = [parts[0][0] + "=" + parts[0][2] for parts in map(gym.line_equations, task._lines(problem))]
    second = gym.result_of(task._lines(problem)[1])
    solution = task.fmt.render_solution([f"So it is {second}", "I say 987654", "I say 987654"], "1")
    text = task.verification_demo(problem, solution, None)
    assert text == task.fmt.render_verification(
        [worked[1], f"{worked[1]}, not 987654", f"{worked[min(2, len(worked) - 1)]}, not 987654"],
        [True, False, False], False)


def test_hostile_lines_have_labels_soon(task):
    problem = task.problem("rl", 0)
    for text in ("1" + " a" * 20000, "1 a b " * 5000 + "=", "9" * 20000 + "+1=2", "(" * 9000 + "1=1", "2(" * 9000):
        assert len(labels_of(task, problem, solution_of(task, text))) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_sets_are_scored_by_the_library(name):
    made = task_of("--reasoning-gym-name", name)
    for split in SPLITS:
        problem = made.problem(split, 0)
        if name != "graph_color":
            demo = made.solution_demo(problem, random.Random(0))
            assert made.check(problem, demo) is True and made.score(problem, demo) == 1
            wrong = {made.check(problem, made.corrupted_solution(problem, random.Random(i))) for i in range(12)}
            assert wrong == {True, False}
        for answer in ("", "?", "nan", "[", "1e999999999", "9" * 3000):
            assert made.check(problem, solution_of(made, answer=answer)) is False
        assert made.check(problem, "no answer") is False and made.step_labels(problem, "x") == []


def test_a_part_of_a_score_is_a_reward_and_no_right_answer():
    made = task_of("--reasoning-gym-name", "spell_backward")
    problem = next(p for i in range(20) if len((p := made.problem("rl", i)).answer) > 4)
    near = solution_of(made, answer=problem.answer[:-1] + "?")
    texts, problems = [solution_of(made, answer=problem.answer), near, near], [problem] * 3
    assert made.check(problem, near) is False
    n = len(problem.answer)
    assert scores_of(made, problems, texts, [True, False, None]) == [1, pytest.approx((n - 1) / n), None]
    assert scores_of(SimpleNamespace(name="plain"), problems, texts, [True, False, None]) == [True, False, None]
    for score, words in ((2, "2"), (-0.5, "-0.5"), ("1", "a str"), (10 ** 400, "a number of 1329 bits")):
        with pytest.raises(BadInput, match=f"score\\(\\) gives {words}, not a number from 0 to 1"):
            scores_of(SimpleNamespace(name="odd", score=lambda *_, s=score: s), problems, texts, [True, False, None])


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_one_far_too_long_not_scored():
    for name, answer in (("prime_factorization", "x"), ("boxnet", "null"), ("game_of_life", "{}")):
        made = task_of("--reasoning-gym-name", name)
        assert made.score(made.problem("rl", 0), solution_of(made, answer=answer)) == 0
    made = task_of("--reasoning-gym-name", "chain_sum")
    problem = made.problem("rl", 0)
    scores = [made.score(problem, solution_of(made, answer=problem.answer + " x" * n)) for n in (1, 800)]
    assert 0 < scores[0] < 1 and scores[1] == 0
    made = task_of("--reasoning-gym-name", "graph_color")
    with pytest.raises(BadInput, match="nothing to demonstrate, graph_color has no single answer"):
        made.solution_demo(made.problem("sft", 0), random.Random(0))


def test_out_options_make_test_out_harder():
    made = task_of("--reasoning-gym-name", "chain_sum", "--reasoning-gym-options", "min_terms=2", "max_terms=2",
                   "--reasoning-gym-out-options", "min_terms=5", "max_terms=5")
    terms = lambda split: {sum(made.problem(split, i).prompt.count(sign) for sign in (" + ", " - ")) for i in range(9)}
    assert [terms(split) for split in SPLITS] == [{1}, {1}, {1}, {4}]
    problem = made.problem("test_out", 0)
    assert made.check(problem, made.solution_demo(problem, None)) is True


@pytest.mark.parametrize("flags, words", [
    (["--reasoning-gym-name", "sums"], "--reasoning-gym-name sums: there are ab, "),
    (["--reasoning-gym-name", "countdown"], "countdown: its scorer runs an answer as a program"),
    (["--reasoning-gym-name", "number_sorting"], "number_sorting: its scorer takes NaN for a right number"),
    (["--reasoning-gym-name", "coin_flip"], "coin_flip: its scorer takes hours on a short answer"),
    (["--reasoning-gym-name", "composite"], "composite: it is made of other sets"),
    (["--reasoning-gym-options", "size=3"], "--reasoning-gym-options size=3: expected KEY=VALUE, where KEY is one of: "
                                            "difficulty"),
    (["--reasoning-gym-options", "difficulty"], "difficulty: expected KEY=VALUE"),
    (["--reasoning-gym-options", "difficulty=hard"], "difficulty=hard: cannot be made: '<=' not supported"),
    (["--reasoning-gym-options", "difficulty=2"], "difficulty=2: cannot be made: AssertionError"),
    (["--reasoning-gym-name", "chain_sum", "--reasoning-gym-options", "min_terms=9"],
     "--reasoning-gym-name chain_sum --reasoning-gym-options min_terms=9: cannot be made: max_terms must be"),
    (["--reasoning-gym-name", "chain_sum", "--reasoning-gym-out-options", "terms=9"],
     "--reasoning-gym-out-options terms=9: expected KEY=VALUE"),
    (["--reasoning-gym-out-options", "difficulty=1.0"], "--reasoning-gym-out-options difficulty=1.0: gsm_symbolic has "
                                                        "none"),
    (["--reasoning-gym-name", "chain_sum", "--reasoning-gym-most-lines", "2"],
     "--reasoning-gym-most-lines 2: chain_sum has no worked solutions; give 0"),
    (["--reasoning-gym-most-lines", "1"], "most-lines 1: no problem is as short; the least is 2"),
    (["--reasoning-gym-most-lines", "-1"], "most-lines -1: no problem is as short; the least is 2"),
])
def test_a_set_or_an_option_that_cannot_be_is_one_line(flags, words):
    with pytest.raises(BadInput) as error:
        task_of(*flags)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_without_the_library_there_is_one_line(monkeypatch, capsys, tmp_path):
    assert set(gym.REFUSED) <= sys.modules["reasoning_gym"].factory.DATASETS.keys()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    gym.data_set.cache_clear()
    with pytest.raises(SystemExit) as end:
        script_main(task_text.main, task_text.make_parser(), ["--task", "reasoning_gym", "--out", str(tmp_path / "t")])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    assert "needs the package reasoning-gym, which is not installed: pip install reasoning-gym" in error


def test_options_that_a_checkpoint_was_made_with_are_taken_from_it():
    flags = dict.fromkeys(task_flags())
    args = argparse.Namespace(task=None, seed=None, **{name: None for name in flags if name != "task"})
    complete_task_args(args, {"task": "reasoning_gym", "reasoning_gym_options": [],
                              "reasoning_gym_out_options": ["min_terms=5"]})
    assert (args.reasoning_gym_options, args.reasoning_gym_out_options) == ([], ["min_terms=5"])
    assert task_of("--reasoning-gym-out-options").out_options == ()  # without a value: not the checkpoint's


@pytest.mark.parametrize("text, gold, lenient, strict", [
    ("<think></think><answer>\\boxed{18}</answer>", "18", True, True), ("\\boxed{18}", "18", True, True),
    ("so 9 * 2 = $18.", "18", True, False), ("18 of 20", "18", False, False),  # the format is not kept
    ("#### 1,800", "1800", True, True), ("<answer>\\boxed{18}</answer> or 19", "18", False, False),
    ("<answer>\\boxed{18}</answer> or 18", "18", True, False),
    ("<answer>18 dozen, 216 eggs</answer>", "216", True, False),
    ("<answer>\\boxed{\\frac{36}{2}}</answer>", "18", False, True),  # lenient is not always more
    *((text, gold, True, False) for text, gold in (("it is 18.0 or so", "18"), ("0018", "18"), ("25%", "25"),
                                                   ("1/2", "0.5"), ("-5", "-5"), ("7-5", "5"), ("18\x00", "18"))),
    *((text, "18", False, False) for text in ("", "eighteen", "\u0661\u0668", "9" * 5000, "180")),
    ("is -5.", "5", False, False), ("1e3", "1000", False, False), ("1 000", "1000", False, False)], ids=range(24))
def test_strict_and_lenient(task, text, gold, lenient, strict):
    assert is_last_number(text, gold) is lenient
    assert task.check(Problem("rl", 0, "?", gold), text) is strict


def test_there_is_no_lenient_outcome_without_a_number(task):
    assert is_last_number("x", "x") is is_last_number("1, 2", "1, 2") is None
    problems = [Problem("rl", i, "?", gold) for i, gold in enumerate(("18", "x", "7"))]
    assert lenient_outcomes(task, problems, ["18", "x", "8"]) == [True, False]
    assert lenient_outcomes(SimpleNamespace(), problems, ["18", "x", "8"]) == []


def test_options_under_which_a_later_problem_cannot_be_made_are_one_line(monkeypatch):
    class Breaks(dict):
        def __missing__(self, index):
            raise RuntimeError("no maze of this size")
    monkeypatch.setattr(gym, "data_set", lambda *_: Breaks())
    gym.entry_of.cache_clear()
    with pytest.raises(BadInput, match="maze: a problem cannot be made by these options: no maze of this size"):
        gym.entry_of("maze", (), 0, "rl", 0)
