"""Competition mathematics: reading rows of every layout, what is left out, splits, demonstrations; the real files where
they are."""
import argparse
import json
import os
import random

import pytest
from test_multiple_choice import cache, write  # noqa: F401

from nanochat.common import BadInput
from nanochat.rl.records.prompts import parse_verification
from tasks import add_task_args, complete_task_args, make_task
from tasks.competition import SETS, Competition, Row, read_source, solution_steps

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
REAL = os.path.join(os.environ.get("NANOCHAT_DATA") or os.path.join(ROOT, "..", "shared", "data"), "math")
SPLITS = ("sft", "rl", "test_in", "test_out")
WORKED = "Half of 48 is 24.\n48/2 + 48 = 72\nSo it is $\\boxed{72}$."
EURUS = {"data_source": "numina_olympiads", "ability": "math",
         "reward_model": {"ground_truth": "\\frac{1}{2}", "style": "rule"},
         "prompt": [{"role": "system", "content": "Follow the format."},
                    {"role": "user",
                     "content": "Half of one?\n\nPresent the answer in LaTex format: \\boxed{Your answer}"}]}
PROGRAM = {**EURUS, "ability": "code", "reward_model": {"ground_truth": '{"inputs": []}', "style": "rule"}}
OLYMPIAD = {"question": "Which roots?", "final_answer": ["$1$", "$\\frac{1}{2}$"], "solution": ["First.", "Second."],
            "is_multiple_answer": True}


def plain(k: int, part: str = "train") -> dict:
    return {"problem": f"{part}: ${k} + 1$?", "answer": str(k + 1)}


def args_of(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    add_task_args(parser)
    return parser.parse_args(flags)


def task_of(name: str, *sources: str, seed: int = 0) -> Competition:
    return make_task(args_of("--task", name, "--seed", str(seed), f"--{name}-data", *sources))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """MATH with worked solutions: 60 problems to train on, 40 to test on."""
    folder = tmp_path_factory.mktemp("math")
    write(folder / "train.jsonl", [{**plain(k), "solution": f"{WORKED}\n10/3 = 3 and {k}."} for k in range(60)])
    write(folder / "test500.jsonl", [plain(k, "test") for k in range(40)])
    return task_of("math", str(folder))


def prompts(task, split: str) -> set[str]:
    return {task.problem(split, i).prompt for i in range(task.num_problems(split))}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("column", ["problem", "question"])
def test_every_set_can_be_files_of_plain_rows_one_per_part(name, column, tmp_path):
    parts = SETS[name].parts
    files = [write(tmp_path / f"{part}.jsonl", [{column: f"{part} {k}?", "answer": k} for k in range(30)])
             for part in parts]
    task = task_of(name, *files)
    assert task.name == name and task.has_step_labels is False
    # without worked solutions nothing is kept for SFT
    sizes = [task.num_problems(split) for split in SPLITS]
    assert sizes == [0, 30 if parts[0] == "train" else 0, 30, 30]
    for split in SPLITS[1:] if parts[0] == "train" else ("test_in", "test_out"):
        problem = task.problem(split, 4)
        assert (problem.prompt == f"{split if 'test' in split else 'train'} {problem.answer}?"
                and task.step_labels(problem, "") == [])


@pytest.mark.parametrize("name", SETS)
def test_a_folder_stands_for_all_parts(name, tmp_path):
    for file in SETS[name].files:
        write(tmp_path / f"{file}.jsonl", [{"problem": f"{file} {k}?", "answer": "1"} for k in range(30)])
    task = task_of(name, str(tmp_path))
    for part, file in zip(SETS[name].parts, SETS[name].files, strict=False):
        assert all(text.startswith(file) for text in prompts(task, "rl" if part == "train" else part))
    os.remove(tmp_path / f"{SETS[name].files[-1]}.jsonl")
    with pytest.raises(BadInput, match=f"--{name}-data {tmp_path}: has 0 files {SETS[name].files[-1]} that end in"):
        task_of(name, str(tmp_path))


def test_every_kind_of_file_is_read_and_long_problems_are_left_out_of_training_alone(tmp_path):
    """At most 3000 characters to train on; a test set is what it is."""
    rows = [{"problem": letter * size, "answer": "1"} for letter, size in (("a", 3000), ("b", 3001))]
    task = task_of("math", write(tmp_path / "train.jsonl", rows),
                   write(tmp_path / "test.jsonl", [{"problem": "c" * 3001, "answer": "1"}]))
    assert ((task.num_problems("rl"), task.num_problems("test_in"), task.dropped)
            == (1, 1, {("train", "longer than 3000 characters"): 1}))
    import datasets
    datasets.Dataset.from_list([OLYMPIAD]).to_parquet(str(tmp_path / "olympiad.parquet"))
    assert task_of("olympiad", str(tmp_path)).problem("test_in", 0).prompt == "Which roots?"
    (tmp_path / "amc.json").write_text(json.dumps([plain(1), plain(2)]))
    assert task_of("amc", str(tmp_path / "amc.json")).num_problems("test_in") == 2


@pytest.mark.parametrize("name, flags, asked", [
    ("math", [], [(("DigitalLearningGmbH/MATH-lighteval",), "train"), (("HuggingFaceH4/MATH-500",), "test")]),
    ("eurus", [], [(("PRIME-RL/Eurus-2-RL-Data",), "train"), (("PRIME-RL/Eurus-2-RL-Data",), "validation"),
                   (("HuggingFaceH4/MATH-500",), "test")]),
    ("aime", [], [(("HuggingFaceH4/aime_2024",), "train"), (("math-ai/aime25",), "test")]),
    ("amc", [], [(("math-ai/amc23",), "test")]),
    ("olympiad", [], [(("Hothan/OlympiadBench", "OE_TO_maths_en_COMP"), "train")]),
    ("amc", ["--amc-data", "some.one/a-set"], [(("some.one/a-set",), "train")]),
])
def test_names_of_the_hub_are_asked_for_by_configuration_and_split(name, flags, asked, monkeypatch, capsys):
    import datasets
    calls = []

    def load_dataset(*path, split):
        calls.append((path, split))
        return datasets.Dataset.from_list([plain(k, f"{path} {split}") for k in range(20)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = make_task(args_of("--task", name, *flags))
    assert calls == asked
    assert task.problem("test_in", 0).prompt.startswith(str(asked[SETS[name].parts.index("test_in")][0]))
    make_task(args_of("--task", "chain"))
    assert calls == asked  # nothing is loaded for a task that was not chosen


def test_sources_are_recorded_with_a_checkpoint_and_come_back():
    recorded = json.loads(json.dumps(vars(args_of("--task", "aime", "--aime-data", "a.jsonl", "b.jsonl"))))
    args = argparse.Namespace(**dict.fromkeys(recorded))
    complete_task_args(args, recorded)
    assert args.aime_data == ["a.jsonl", "b.jsonl"] and args.math_data == list(SETS["math"].sources)
    # of a checkpoint that knows no such flags
    complete_task_args(args := argparse.Namespace(**dict.fromkeys(recorded)), {"task": "chain"})
    assert args.math_data == list(SETS["math"].sources)


COLUMNS = ["--question-column", "q", "--answer-column", "a"]


@pytest.mark.parametrize("row, flags, read", [
    ({"q": "1+1?", "a": 2}, COLUMNS, ("1+1?", "2", "")),
    ({"question": "no", "q": "1+1?", "a": "2", "how": "1+1 = 2", "solution": "no"},
     [*COLUMNS, "--solution-column", "how"], ("1+1?", "2", "1+1 = 2")),
    ({"question": "1+1?", "answer": "1+1 = <<1+1=2>>2\nSo.\n#### 2"}, [], ("1+1?", "2", "1+1 = 2\nSo.")),
    ({"question": "1+1?", "answer": "so\n#### $1,002", "solution": "of #### its own"}, [],
     ("1+1?", "1002", "of #### its own")),
    ({"question": "1+1?", "solution": "1+1 = 2\n#### \\frac42"}, [], ("1+1?", "\\frac42", "1+1 = 2")),
    ({"problem": "1+1?", "final_answer": "2", "answer": "3"}, ["--answer-column", "final_answer"], ("1+1?", "2", ""))])
def test_rows_of_ones_own_are_read_by_the_names_of_their_columns(tmp_path, row, flags, read):
    """What stands after #### is the answer, and before it the worked solution, as GSM8K has them; also in math."""
    of_part = lambda part: {name: f"{part}: {value}" if value == read[0] else value for name, value in row.items()}
    files = [write(tmp_path / f"{part}.jsonl", [of_part(part)]) for part in ("train", "test")]
    for name in ("rows", "math") if not flags else ("rows",):
        task = make_task(args_of("--task", name, "--data" if name == "rows" else "--math-data", *files, *flags))
        assert task.splits["test_in"] == [(f"test: {read[0]}", read[1])]
        assert task.solutions.get(f"test: {read[0]}", "") == read[2]


@pytest.mark.parametrize("flags, words", [
    ([], "--rows-data: name the files of train, test_in, test_out, or a folder that holds them"),
    (["--data", "FILE", "--answer-column", "gold"], "FILE: line 1: has no column 'gold', only question, answer"),
    (["--data", "FOLDER"], "--rows-data FOLDER: has 0 files train that end in"),
    (["--task", "gsm8k", "--gsm8k-data", "FILE"],
     "--gsm8k-data FILE: is a file; name the folder that holds train.jsonl and test.jsonl, or take --task rows")])
def test_rows_that_are_not_there_are_named(tmp_path, flags, words):
    there = {"FILE": write(tmp_path / "train.jsonl", [{"question": "1+1?", "answer": "2"}]),
             "FOLDER": str(tmp_path / "empty")}
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput) as error:
        make_task(args_of("--task", "rows", *(there.get(flag, flag) for flag in flags)))
    for name, path in there.items():
        words = words.replace(name, path)
    assert words in str(error.value)


def test_rows_may_have_one_step_a_line(tmp_path):
    rows = [{"question": f"{k}+1?", "answer": f"{k}+1={k + 1}\n#### {k + 1}"} for k in range(20)]
    path = write(tmp_path / "train.jsonl", rows)
    task = make_task(args_of("--task", "rows", "--data", path, "--rows-format", "lines"))
    question, answer = (problem := task.problem("sft", 0)).prompt, problem.answer
    assert task.solution_demo(problem, random.Random(0)) == f"{question[:-1]}={answer}\n#### {answer}"


@pytest.mark.parametrize("sources, complaint", [
    (["/no/such.jsonl"], "--math-data /no/such.jsonl: no such file$"),
    (["no/such.jsonl"], "--math-data no/such.jsonl: no such file$"),  # written like a name of the hub
    (["/no/such"], "--math-data /no/such: no such file that ends in .jsonl, .json, .parquet, .csv, and no name"),
    (["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"],
     "--math-data a.jsonl b.jsonl c.jsonl d.jsonl: at most 3 sources, of train, test_in, test_out"),
    (["/tmp", "/tmp"], "--math-data /tmp: no such file that ends in"),
])
def test_sources_that_are_not_there_are_bad_input(sources, complaint):
    with pytest.raises(BadInput, match=complaint) as error:
        task_of("math", *sources)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("row, read", [
    ({"problem": " 1+1? ", "answer": " 2 ", "level": 3}, Row("1+1?", "2", "")),
    ({"question": "1+1?", "answer": 2.0}, Row("1+1?", "2.0", "")),
    ({"id": 7, "problem": "1+1?", "answer": "2", "solution": "One\nmore."}, Row("1+1?", "2", "One\nmore.")),
    ({"problem": "1+1?", "level": "Level 1", "type": "Algebra", "solution": "\\boxed{1}, no, \\boxed{\\frac{4}{2}}."},
     Row("1+1?", "\\frac{4}{2}", "\\boxed{1}, no, \\boxed{\\frac{4}{2}}.")),
    ({"problem": "1+1?", "solution": "Two."}, Row("1+1?", "", "Two.")),
    ({"problem": "1+1?", "answer": ""}, Row("1+1?", "", "")),
    (EURUS, Row("Half of one?", "\\frac{1}{2}", "")),
    (PROGRAM, None),
    (OLYMPIAD, Row("Which roots?", "1, \\frac{1}{2}", "First.\nSecond.")),
    ({"question": "Pay?", "final_answer": ["$\\$3$"], "solution": None}, Row("Pay?", "\\$3", "")),
    ({"question": "Prove it.", "final_answer": None, "solution": ["So."]}, Row("Prove it.", "", "So.")),
])
def test_a_row_of_every_layout_is_read(row, read, tmp_path):
    assert read_source("--x", write(tmp_path / "rows.jsonl", [row])) == [read]


@pytest.mark.parametrize("good, bad, complaint", [
    (plain(1), {"problem": None, "answer": "1"}, "has no text for problem or question"),
    (plain(1), {"problem": "1?", "answer": None}, "has no text for answer"),
    (plain(1), {"problem": "1?", "answer": float("nan")}, "has no text for answer"),
    ({"problem": "1?", "answer": True}, {"problem": "1?", "answer": True}, "has no text for answer"),
    ({"prompt": "1?", "answer": "1"}, {"prompt": "1?", "answer": "1"}, "has no text for problem or question"),
    (EURUS, {**EURUS, "prompt": EURUS["prompt"][:1]}, "list index out of range"),
    (EURUS, {**EURUS, "prompt": None}, "something in it is empty or not of the type"),
    (EURUS, {**EURUS, "reward_model": None}, "something in it is empty or not of the type"),
    (EURUS, {**EURUS, "reward_model": {"ground_truth": None, "style": "rule"}}, "has no text for ground_truth"),
    (OLYMPIAD, {**OLYMPIAD, "question": None}, "has no text for question"),
    ({**OLYMPIAD, "final_answer": "12"}, {**OLYMPIAD, "final_answer": "12"}, "final_answer and solution must be lists"),
])
def test_a_malformed_row_is_bad_input_with_file_and_number(good, bad, complaint, tmp_path):
    path = write(tmp_path / "rows.jsonl", [good, bad])
    number = 2 if good != bad else 1
    with pytest.raises(BadInput, match=complaint) as error:
        task_of("math", path)
    assert str(error.value).startswith(f"{path}: line {number}: ") and "\n" not in str(error.value)


def test_what_is_left_out_is_counted_by_part_and_reason_and_told_once(tmp_path, capsys):
    train = [*(plain(k) for k in range(40)),
             plain(0), {"problem": "train:  $1 + 1$? ", "answer": "2"},  # repeated, one with other white space
             {**plain(2), "answer": "7"},                                # contradicts problem 2: both go
             {"problem": "No answer?", "answer": ""}, {"problem": "No meaning?", "answer": "<?"},
             plain(1, "test"), {"problem": "test:\n$2 + 1$?", "answer": "3"}]  # held out
    task = task_of("math", write(tmp_path / "a.jsonl", train),
                   write(tmp_path / "b.jsonl", [plain(k, "test") for k in range(9)] + [plain(3, "test")]))
    assert task.dropped == {("train", "repeated"): 2, ("train", "repeated with another answer"): 2,
                            ("train", "also in a test part"): 2,
                            ("train", "without an answer that can be graded"): 2, ("test_in", "repeated"): 1}
    assert task.num_dropped == 9 and task.num_problems("test_in") == 9
    assert prompts(task, "sft") | prompts(task, "rl") == {plain(k)["problem"] for k in range(40) if k != 2}
    shown = capsys.readouterr().out
    assert (shown.count("\n") == 1 and shown.startswith("math: ")
            and "9 test_in problems; left out: " in shown and "2 repeated (train)" in shown)


def test_a_problem_of_test_out_is_held_out_too_and_programs_are_left_out(tmp_path):
    asked = [{**EURUS, "prompt": [{"role": "user", "content": plain(k)["problem"]}]} for k in range(20)]
    files = [write(tmp_path / f"{i}.jsonl", rows)
             for i, rows in enumerate(([*asked, PROGRAM, PROGRAM], [EURUS, PROGRAM], [plain(3)]))]
    task = task_of("eurus", *files)
    assert task.dropped == {("train", "no mathematics"): 2, ("train", "also in a test part"): 1,
                            ("test_in", "no mathematics"): 1}
    assert prompts(task, "test_in") == {"Half of one?"} and prompts(task, "test_out") == {plain(3)["problem"]}
    assert len(prompts(task, "sft") | prompts(task, "rl")) == 19


def test_a_split_without_problems_is_bad_input_that_says_why(tmp_path):
    path = write(tmp_path / "rows.jsonl", [plain(1)])
    for name, split in (("aime", "rl"), ("aime", "sft"), ("aime", "test_out"), ("amc", "rl"), ("olympiad", "test_out")):
        assert task_of(name, path).num_problems(split) == 0
        with pytest.raises(BadInput, match=f"task {name}: has no problems for split {split} .*; left out: none"):
            task_of(name, path).problem(split, 0)
    with pytest.raises(BadInput, match=r"task math: .* split rl .*; left out: 1 also in a test part \(train\)"):
        task_of("math", path, write(tmp_path / "test.jsonl", [plain(1)])).problem("rl", 0)


def test_sft_and_rl_share_no_problem_and_test_is_no_part_of_them(task):
    assert len(prompts(task, "sft")) + len(prompts(task, "rl")) == len(prompts(task, "sft") | prompts(task, "rl")) == 60
    assert prompts(task, "test_in") == {plain(k, "test")["problem"] for k in range(40)}


def test_a_problem_is_a_function_of_seed_split_and_index(tmp_path):
    path = write(tmp_path / "rows.jsonl", [plain(k) for k in range(50)])
    first, again, other = (task_of("aime", path, path, seed=seed) for seed in (0, 0, 1))
    problems = [first.problem("test_in", i) for i in range(120)]
    assert (problems == [again.problem("test_in", i) for i in reversed(range(120))][::-1]
            != [other.problem("test_in", i) for i in range(120)])
    assert [(p.split, p.index) for p in problems] == [("test_in", i) for i in range(120)]
    assert [p.prompt for p in problems] != [first.problem("test_out", i).prompt for i in range(120)]


@pytest.mark.parametrize("solution, steps", [
    ("One.\n\n  Two.  \nThree.", ["One.", "Two.", "Three."]),
    ("One is $1$. Two? $x$ it is! \\boxed{2}", ["One is $1$.", "Two?", "$x$ it is!", "\\boxed{2}"]),
    ("About 3.5 of e.g. them.", ["About 3.5 of e.g. them."]),
    ("So\n\\begin{align*}\na &= b \\\\\nc &= d\n\\end{align*}\nand\n\\[\nx = 1.\n\\]",
     ["So", "\\begin{align*} a &= b \\\\ c &= d \\end{align*}", "and", "\\[ x = 1. \\]"]),
    ("[asy]\ndraw(a);\ndraw(b);\n[/asy]\nSeen.", ["[asy] draw(a); draw(b); [/asy]", "Seen."]),
    ("", []),
])
def test_steps_are_lines_or_sentences_and_formulas_stay_whole(solution, steps):
    assert solution_steps(solution) == steps


def test_a_solution_demo_is_the_worked_solution_and_right(task):
    problem = task.problem("sft", 0)
    k = int(problem.answer) - 1
    demo = task.solution_demo(problem, random.Random(0))  # a step of the source is right, whatever its equations
    # \boxed{72} in a step is not the answer
    assert demo == task.fmt.render_solution([*WORKED.split("\n"), f"10/3 = 3 and {k}."], problem.answer)
    assert task.check(problem, demo) is True
    verification = parse_verification(task.fmt, task.verification_demo(problem, demo, random.Random(0)), 4)
    assert verification.unmet == () and verification.step_verdicts == [True] * 4 and verification.verdict is True


def test_a_corrupted_solution_has_another_answer_half_of_the_time(task):
    """Where it is a number, a slip in a plain equation comes with it, and a verification finds it."""
    problem, right = task.problem("rl", 0), 0
    demo = task.solution_demo(problem, random.Random(0))
    for i in range(200):
        solution = task.corrupted_solution(problem, random.Random(i))
        assert task.check(problem, solution) is (solution == demo)
        verification = parse_verification(task.fmt, task.verification_demo(problem, solution, random.Random(0)), 4)
        assert verification.verdict is all(verification.step_verdicts) is (solution == demo)
        right += solution == demo
    assert abs(right / 200 - 0.5) < 0.11  # three standard errors


def test_where_the_answer_is_no_number_the_other_one_is_of_another_problem(tmp_path):
    """Rows without a solution are for RL alone."""
    rows = [{"problem": f"x{k}?", "answer": answer, "solution": "See." * (k % 2)}
            for k, answer in enumerate(["\\sqrt{2}", "\\sqrt{3}", "\\pi"] * 20)]
    task = task_of("math", write(tmp_path / "rows.jsonl", rows))
    assert task.num_problems("sft") > 5 and task.num_problems("sft") + task.num_problems("rl") == 60
    assert all(task.solution_demo(task.problem("sft", i), random.Random(0)) for i in range(task.num_problems("sft")))
    problem = task.problem("sft", 0)
    answers = {task.fmt.answer(task.corrupted_solution(problem, random.Random(i))) for i in range(50)}
    assert answers == {"\\sqrt{2}", "\\sqrt{3}", "\\pi"}


def test_a_verification_works_the_equations_again_and_ends_with_the_outcome(task):
    problem = task.problem("rl", 0)
    solution = task.fmt.render_solution(["1 + 1 = 3", "2*3 = 6", "48/2 + 48 = 72"], problem.answer + "1")
    assert task.verification_demo(problem, solution, random.Random(0)) == task.fmt.render_verification(
        ["1+1=2, not 3", "2*3=6", "48/2+48=72"], [False, True, True], False)


def test_without_worked_solutions_there_is_nothing_to_demonstrate(tmp_path):
    task = task_of("amc", write(tmp_path / "rows.jsonl", [plain(1)]))
    problem, rng = task.problem("test_in", 0), random.Random(0)
    for demo in (task.solution_demo, task.corrupted_solution,
                 lambda *args: task.verification_demo(args[0], "", args[1])):
        with pytest.raises(BadInput, match="task amc: nothing to demonstrate, --amc-data has no worked solution"):
            demo(problem, rng)


@pytest.mark.skipif(not os.path.isdir(REAL), reason=f"{REAL} is absent: set NANOCHAT_DATA")
def test_the_real_files_have_the_known_sizes_and_share_nothing():
    real = task_of("math", REAL)
    lost = real.dropped["train", "without an answer that can be graded"]  # two have none; the rest is up to the parser
    assert 2 <= lost <= 5 and real.dropped == {("train", "repeated"): 2, ("train", "longer than 3000 characters"): 2,
                                                ("train", "without an answer that can be graded"): lost}
    assert real.num_problems("test_in") == 500 and real.num_problems("test_out") == 0 and real.num_problems("rl") > 5300
    texts = [text for split in ("sft", "rl", "test_in") for text in prompts(real, split)]
    assert len({" ".join(text.split()) for text in texts}) == len(texts) == 8890 + 500 - 2 - 2 - lost
