"""A task of one's own, and its mistakes: what it gives wrongly is named, what it cannot score is counted."""
import argparse
import json
import os
import re
from dataclasses import replace

import pytest
import torch
from conftest import COMMON_RL_FLAGS, TASK_FLAGS, parse, rl_flags, train

from nanochat import recipes
from nanochat.cli import script_main
from nanochat.common import BadInput
from nanochat.rl.measure.evals import PAIR_TABLE
from nanochat.rl.records.outcomes import labels_of, outcomes_of, problems_of, texts_digest, words_of
from nanochat.rl.report.report import read_run
from nanochat.rl.run.flags import warn_of_shared
from nanochat.rl.run.progress import print_table
from nanochat.storage.files import read_records
from scripts import chat_cli, chat_eval, chat_sft, label_steps, tango_rl, tok_train
from tasks import TASKS
from tasks.chain import Chain
from tasks.common import SPLIT_BUCKETS, Problem, demo_of

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROBLEM = Problem("rl", 7, "1+2", "3")


def refusal(capsys, *flags: str, script=tango_rl) -> str:
    with pytest.raises(SystemExit) as stop:
        script_main(script.main, script.make_parser if script is tango_rl else script.make_parser(), list(flags))
    line = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and "\n" not in line
    return line


def chain(**changes):
    return type("Changed", (Chain,), changes)(parse(tango_rl, rl_flags()), 0)


@pytest.mark.parametrize("recipe", recipes.names())
def test_a_task_that_can_score_nothing_is_warned_of_once_and_the_run_goes_on(base, monkeypatch, capsys, recipe):
    monkeypatch.setattr(Chain, "check", lambda self, problem, solution: None)
    monkeypatch.setattr(tango_rl, "held_out", lambda t, recipe: {})  # the scores at the end; those before are taken
    flags = ["--recipe", recipe, "--run", "r", "--save-every", "1", "--max-new-tokens", "16", "--eval-examples", "2"]
    train(*flags, "--num-steps", "2" if recipe == "grpo" else "1")
    told = capsys.readouterr().out.count("WARNING: no rollout of the generator could be scored")
    metrics = str(base / "runs" / "r" / "metrics.jsonl")
    first = [record for _, record in read_records(metrics)]
    unscored = [r for r in first if r.get("gen/num_rollouts") and r["gen/reward"] is None]
    assert told == (1 if unscored else 0)
    if recipe == "grpo":
        assert len(unscored) == 2 and all(r["gen/frac_reward_zero_std"] == 1 for r in unscored)
    if recipe in ("tango", "coverrl", "multi_agent_evolve", "ppo"):  # what they keep has seen no outcome
        train(*flags, "--num-steps", "2", "--resume-from-step", "auto")
        assert len(read_records(metrics)) > len(first)


def test_a_score_is_the_reward_and_a_last_number_is_counted_beside_the_outcome(base, monkeypatch):
    """Whatever a solution answers it earns a quarter, and the last number of each is the gold one."""
    monkeypatch.setattr(Chain, "score", lambda self, problem, solution: 0.25, raising=False)
    monkeypatch.setattr(Chain, "has_numbers", True, raising=False)
    monkeypatch.setattr("nanochat.rl.records.outcomes.is_last_number", lambda text, gold: True)
    train("--recipe", "grpo", "--run", "r", "--num-steps", "1", "--max-new-tokens", "8", "--eval-examples", "4")
    (_, record), = read_records(str(base / "runs" / "r" / "metrics.jsonl"))
    after = json.loads((base / "runs" / "r" / "summary.json").read_text())["after"]
    assert record["gen/reward"] == 0.25 and record["gen/rewards/outcome/mean"] < 0.25
    assert after["gen/pass1_in"] < 1 and after["gen/pass1_lenient_in"] == after["gen/pass1_lenient_out"] == 1


@pytest.mark.parametrize("outcome", [0.7, 1, "yes", torch.tensor(True), [True]])
def test_an_outcome_that_is_none_is_named_with_the_task(outcome):
    task = chain(check=lambda self, problem, solution: outcome)
    with pytest.raises(BadInput, match=r"task chain: check\(\) gives .* for problem 7 of rl, not True, False or None"):
        outcomes_of(task, [PROBLEM], ["1+2:3;=3"])


@pytest.mark.parametrize("labels, words", [
    ([True, False], "one for each of 1 steps"), ([1], r"gives \[1\] .* not a list"),
    (None, "gives None .* not a list"), ((True,), "not a list"), ([None], "not a list"), ("T", "not a list")])
def test_step_labels_of_the_wrong_number_or_kind_are_named_with_the_task(labels, words):
    task = chain(step_labels=lambda self, problem, solution: labels)
    with pytest.raises(BadInput, match=rf"task chain: step_labels\(\) .*{words}"):
        labels_of(task, PROBLEM, "1+2:3;=3")
    assert labels_of(chain(step_labels=lambda self, problem, solution: []), PROBLEM, "1+2:3;=3") == []  # unknown


@pytest.mark.parametrize("method, value, words", [
    ("check", 0.7, "check() gives 0.7"), ("step_labels", [True] * 9, "one for each of 1 steps"),
    ("solution_demo", None, "error: task chain: solution_demo() gives None for problem 0 of sft, not text")])
def test_a_tasks_mistake_ends_a_script_with_one_line(base, monkeypatch, capsys, method, value, words):
    monkeypatch.setattr(Chain, method, lambda self, problem, *args: value)
    sft = ["--role", "generator", "--model-tag", "new", "--depth", "1", "--device-type", "cpu"]
    for script, flags in (((chat_sft, sft), (tok_train, ["--num-texts", "2"])) if method == "solution_demo" else
                          ((tango_rl, rl_flags("--run", "r")), (chat_eval, ["-i", "sft", "-g", "tiny", "-x", "4"]))):
        assert words in refusal(capsys, *flags, script=script)


@pytest.mark.parametrize("value", [None, Problem("rl", 3, "1+1", 2), Problem("rl", 3, "\ud800", "2"), ("1+1", "2")])
def test_a_problem_that_is_none_is_named_whatever_its_number(value):
    problem = Chain.problem
    task = chain(problem=lambda self, split, index: value if index == 3 else problem(self, split, index))
    with pytest.raises(BadInput, match=r"task chain: problem\('rl', 3\) gives .*: it must be a Problem whose prompt"):
        problems_of(task, "rl", 5)
    for number in (None, "9", -1, 2.0):
        with pytest.raises(BadInput, match=r"chain: num_problems\('rl'\) gives .*, not a number from 0"):
            problems_of(chain(num_problems=lambda self, split, number=number: number), "rl", 5)


def test_the_texts_of_a_finite_task_are_told_from_others():
    problem, demo, finite = Chain.problem, Chain.solution_demo, dict(num_problems=lambda self, split: 40)
    whole = texts_digest(chain(**finite))
    last = chain(**finite, problem=lambda self, split, index: (  # another answer of the last problem of rl
        replace(problem(self, split, index), **({"answer": "9"} if (split, index) == ("rl", 39) else {}))))
    worked = chain(**finite, solution_demo=lambda self, problem, rng: (
        demo(self, problem, rng) + " " * (problem.index == 39)))
    assert texts_digest(chain(**finite)) == whole != texts_digest(last) and whole != texts_digest(worked)
    assert texts_digest(chain()) == 0


@pytest.mark.parametrize("value", [None, 5, ["a"]])
@pytest.mark.parametrize("part", ["solution_demo", "corrupted_solution", "verification_demo"])
def test_a_demonstration_that_is_no_text_is_named(part, value):
    task = chain(**{part: lambda self, problem, *args: value})
    with pytest.raises(BadInput, match=rf"task chain: {part}\(\) gives .* for problem 7 of rl, not text"):
        demo_of(task, part, PROBLEM, *([] if part != "verification_demo" else ["1+2:3;=3"]), None)


def test_splits_that_share_problems_are_warned_of(capsys):
    problems = lambda split, texts: [Problem(split, i, text, "") for i, text in enumerate(texts)]
    warn_of_shared({split: problems(split, texts) for split, texts in
                    (("rl", "ab"), ("test_in", "bcc"), ("test_out", "d"))})
    out = capsys.readouterr().out
    assert out.count("WARNING") == 1
    assert "splits rl and test_in share 1 of the 2 problems that were looked at, for example 'b'" in out


def skeleton() -> str:
    with open(os.path.join(ROOT, "dev", "your_own.md"), encoding="utf-8") as f:
        return re.search(r"## A task\n.*?```python\n(.*?)```", f.read(), re.DOTALL)[1]


def test_the_skeleton_has_a_docstring_and_splits_without_common_problems():
    names: dict = {}
    exec(compile(skeleton(), "mine.py", "exec"), names)
    assert names["__doc__"]
    task = names["Mine"](argparse.Namespace(), 0)
    texts = {split: {task.problem(split, i).prompt for i in range(200)} for split in SPLIT_BUCKETS}
    assert len(texts) == 4 and all(not texts[a] & texts[b] for a in texts for b in texts if a != b)
    problem = task.problem("rl", 3)
    assert problem == task.problem("rl", 3) and eval(problem.prompt) == int(problem.answer)
    exec(compile(skeleton().replace("(0, 1000)", "(0, 1)"), "mine.py", "exec"), names)  # too few: it does not loop
    with pytest.raises(BadInput, match="1000 draws like '0\\+0' gave no problem"):
        for split in ("sft", "rl", "test_in"):
            names["Mine"](argparse.Namespace(), 0).problem(split, 0)


def test_a_checkpoint_of_another_task_is_refused_unless_the_task_is_said(base, capsys):
    chat_sft.main(parse(chat_sft, ["--task", "last_letter", "--role", "generator", "--model-tag", "words", "--depth",
                                   "1", "--n-embd", "64", "--n-head", "2", "--sequence-len", "512", "--num-steps",
                                   "1", "--device-type", "cpu"]))
    capsys.readouterr()
    flags = ["--recipe", "grpo", "--model-tag", "words", "--num-steps", "1", "--examples-per-step", "2",
             "--num-samples", "2", "--eval-examples", "2", "--max-new-tokens", "24", "--device-type", "cpu"]
    line = refusal(capsys, *flags)
    assert "checkpoint words was trained on task last_letter" in line and "--task chain" in line
    script_main(tango_rl.main, tango_rl.make_parser, [*flags, "--task", "chain"])
    assert os.listdir(base / "runs") == ["dummy-1"]


def test_a_checkpoint_of_other_problems_is_refused_unless_they_are_said(base, capsys):
    # without --chain-modulus 3
    flags = [*COMMON_RL_FLAGS[len(TASK_FLAGS):], *TASK_FLAGS[2:], "--recipe", "grpo", "--num-steps", "1"]
    line = refusal(capsys, *flags)
    assert "checkpoint tiny was trained with --chain-modulus 3, and this run has 10 by default" in line
    script_main(tango_rl.main, tango_rl.make_parser, [*flags, "--chain-modulus", "3", "--chain-share", "0.1"])
    capsys.readouterr()
    assert "--chain-answer" not in refusal(capsys, *flags)


@pytest.mark.parametrize("tag, is_warned", [("tiny", False), ("tiny-ver", True)])
def test_a_checkpoint_of_another_role_is_warned_of(base, capsys, tag, is_warned):
    for role, name in (("generator", "tiny"), ("verifier", "tiny-ver")):
        path = base / "chatsft_checkpoints" / name / "meta_000200.json"
        meta = json.loads(path.read_text())
        path.write_text(json.dumps(meta | {"user_config": meta["user_config"] | {"role": role}}))
    capsys.readouterr()
    train("--recipe", "grpo", "--num-steps", "1", "--model-tag", tag)
    told = [capsys.readouterr().out]
    chat_eval.main(parse(chat_eval, ["-i", "sft", "-g", tag, "-x", "2"]))
    told.append(capsys.readouterr().out)
    warning = "WARNING: tiny-ver was trained as a verifier, and is the generator here"
    assert [warning in text for text in told] == [is_warned] * 2


@pytest.mark.parametrize("flags, words", [
    (["--num-samples", "999999999999"], "--num-samples 999999999999: a step holds"),
    (["--examples-per-step", "4000000000"], "--examples-per-step 4000000000"),
    (["--eval-examples", "1000000000"], "--eval-examples 1000000000: 1,000,000,000 problems per split"),
    (["--max-rows", "100000000", "--num-samples", "10000000"], "GB")])
def test_sizes_that_no_memory_holds_are_refused_with_the_number(base, capsys, flags, words):
    line = refusal(capsys, *rl_flags(*flags))
    assert words in line
    assert re.search(r"need.* at least [\d,]+ GB; there are [\d,]+ GB|needs [\d,.]+ GB per rank", line)
    assert not (base / "runs").exists()


def test_a_micro_batch_of_all_there_is_is_no_size(base):
    train("--recipe", "grpo", "--num-steps", "1", "--micro-batch-tokens", "1000000000000")


def test_a_stop_is_looked_for_while_problems_are_built(base, capsys, monkeypatch):
    problem, made = Chain.problem, []

    def counted(self, split, index):
        if split == "rl" and index >= 1000:
            made.append(index)
            if len(made) == 3:
                os.kill(os.getpid(), 15)
        return problem(self, split, index)
    monkeypatch.setattr(Chain, "problem", counted)
    with pytest.raises(SystemExit) as stop:
        script_main(tango_rl.main, tango_rl.make_parser, rl_flags("--recipe", "grpo", "--run", "r",
                                                                  "--examples-per-step", "100000"))
    assert stop.value.code == 143 and len(made) < 10 and "stopped after step 0" in capsys.readouterr().out


@pytest.mark.parametrize("changes, words", [
    ({"fmt": "x"}, "needs a name (text) and a fmt"), ({"name": None}, "needs a name (text) and a fmt"),
    ({"problem": lambda self, split, index: Problem(split, index, "\udcff", "3")}, "prompt and answer are text"),
    ({"check": None}, "has no method check"), ({"verification_demo": 3}, "has no method verification_demo"),
    ({"problem": lambda self, split, index: Problem(split, index, "1+2", 3)}, "prompt and answer are text"),
    ({"problem": lambda self, split, index: "1+2"}, "problem('sft', 0) gives '1+2'")])
def test_a_part_that_a_task_lacks_is_named_before_any_work(base, monkeypatch, capsys, changes, words):
    monkeypatch.setitem(TASKS, "mine", type("Mine", (Chain,), changes))
    line = refusal(capsys, *rl_flags("--task", "mine"))
    assert "--task mine: " in line and words in line and not (base / "runs").exists()


OWN = skeleton().replace("        return [...]", "        return [True] * len(self.fmt.step_spans(solution))").replace(
    "name, fmt = \"mine\", PAPER", "name = \"mine\"").replace("import PAPER", "import COMPACT").replace(
    "self.seed = seed", "self.seed, self.most, self.fmt = seed, args.most, COMPACT") + '''
    def solution_demo(self, problem, rng):
        return self.fmt.render_solution([problem.prompt], problem.answer)

    corrupted_solution = solution_demo

    def verification_demo(self, problem, solution, rng):
        return self.fmt.render_verification([""], [True], self.check(problem, solution))


def add_args(parser):
    parser.add_argument("--most", type=int, default=7, help="of something")
'''
MODEL = ["--model-tag", "mine", "--depth", "1", "--n-embd", "32", "--n-head", "1", "--sequence-len", "64",
         "--device-type", "cpu"]


def test_a_file_is_a_task_everywhere_and_its_text_is_kept_and_compared(base, tmp_path, capsys):
    """With flags of its own, which a checkpoint has too; a moved file is the same task, a changed one is not."""
    own, again = tmp_path / "mine.py", ["--resume-from-step", "1"]
    own.write_text(OWN)
    flags = ["--task", str(own), "--most", "9"]
    sft = ["--role", "generator", *MODEL, "--num-steps", "2", "--save-every", "1", "--keep", "9"]
    chat_sft.main(parse(chat_sft, [*sft, *flags]))
    folder = base / "chatsft_checkpoints" / "mine"
    recorded = json.loads((folder / "meta_000002.json").read_text())["user_config"]
    assert (folder / "task.py").read_text() == OWN and (recorded["task"], recorded["most"]) == (str(own), 9)
    capsys.readouterr()
    label_steps.main(parse(label_steps, ["--generator-tag", "mine", "--num-problems", "1", "--num-samples", "1",
                                         "--max-new-tokens", "4", "--method", "gold", "--task", str(own), "--out",
                                         str(tmp_path / "o.jsonl")]))
    for more in (["-a", f"chain|{own}"], ["--task", str(own)]):
        chat_eval.main(parse(chat_eval, ["-i", "sft", "-g", "mine", "-x", "2", "-m", "4", *more]))
        assert re.search(f"^{own} +2 problems", capsys.readouterr().out, re.MULTILINE)
    for script, more in ((chat_eval, ["-i", "sft"]), (chat_cli, ["-p", "1+2"])):  # a checkpoint runs no code
        line = refusal(capsys, *more, "-g", "mine", "--device-type", "cpu", script=script)
        assert f"its task is of a file, '{own}', whose code is run where you name it: --" in line
    rl = [*MODEL[:2], "--recipe", "grpo", "--device-type", "cpu", "--run", "r", "--examples-per-step", "2",
          "--num-samples", "2", "--eval-examples", "2", "--max-new-tokens", "4", "--save-every", "1", "--keep", "9"]
    tango_rl.main(parse(tango_rl, [*rl, *flags, "--num-steps", "1"]))
    assert (base / "runs" / "r" / "task.py").read_text() == OWN
    assert read_run(str(base / "runs" / "r")).task == "mine" and (base / "runs" / "r" / "report.html").exists()
    moved = tmp_path / "elsewhere.py"
    own.rename(moved)
    assert refusal(capsys, *sft, *again, *flags, script=chat_sft) == f"error: --task {own}: no such file"
    flags[1] = str(moved)
    tango_rl.main(parse(tango_rl, [*rl, *flags, "--num-steps", "2", *again]))
    moved.write_text(OWN + "\n# another idea\n")
    for script, call in ((tango_rl, [*rl, *flags, "--num-steps", "3", "--resume-from-step", "2"]),
                         (chat_sft, [*sft, *flags, *again])):
        assert "was started with another text of this task" in refusal(capsys, *call, script=script)


@pytest.mark.parametrize("text, words", [
    ("class A\n", "SyntaxError"), ("x = 1\n", "needs one class with a method problem, and has 0"),
    (OWN + "\nclass Two(Mine): pass\n", "and has 2"), (OWN.replace("args.most", "args.no"), "'no' (line "),
    (OWN.replace('"--most"', '"--seed"'), "add_args(): ArgumentError"),
    (OWN.replace("something", "50% x"), "add_args(): "),
    (OWN.replace("step_labels(self", "labels(self"), "its class has no method step_labels"),
    (OWN.replace("return Problem(", "return 1 / 0, Problem("), "ZeroDivisionError: division by zero (line ")])
def test_a_file_that_is_no_task_is_refused_in_one_line(base, tmp_path, capsys, text, words):
    (tmp_path / "own.py").write_text(text)
    line = refusal(capsys, *rl_flags("--task", str(tmp_path / "own.py")))
    assert line.startswith(f"error: --task {tmp_path / 'own.py'}: ") and words in line


def recorded_with(base, **changes) -> None:
    for tag in ("tiny", "tiny-ver"):
        path = base / "chatsft_checkpoints" / tag / "meta_000200.json"
        meta = json.loads(path.read_text())
        path.write_text(json.dumps(meta | {"user_config": meta["user_config"] | changes}))


def test_prompts_are_the_checkpoints_and_others_are_warned_of(base, tmp_path, capsys):
    evaluate = ["-i", "sft", "-g", "tiny", "-x", "2", "-m", "4"]
    (tmp_path / "t.txt").write_text("Solve {problem}")
    recorded_with(base, system_prompt="Be brief.", verifier_prompt="{problem} {solution} {num_steps}")
    chat_eval.main(parse(chat_eval, evaluate))
    assert "WARNING" not in capsys.readouterr().out
    chat_eval.main(parse(chat_eval, [*evaluate, "--generator-prompt", str(tmp_path / "t.txt")]))
    assert ("WARNING: tiny was trained with another --generator-prompt: '', and here it is 'Solve {problem}'"
            in capsys.readouterr().out)
    train("--dry-run", "--run", "r")
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "another --" in line] == [
        "WARNING: tiny was trained with another --system-prompt: 'Be brief.', and here it is ''",
        "WARNING: tiny-ver was trained with another --system-prompt: 'Be brief.', and here it is ''",
        "WARNING: tiny-ver was trained with another --verifier-prompt: '{problem} {solution} {num_steps}', and here it "
        "is ''"]
    line = refusal(capsys, "-g", "tiny", "-i", "sft", "--verifier-prompt", str(tmp_path / "t.txt"), script=chat_eval)
    assert line == "error: --verifier-prompt: has no {solution}"
    (tmp_path / "t.txt").write_text(" \n")
    line = refusal(capsys, "-g", "tiny", "-i", "sft", "--generator-prompt", str(tmp_path / "t.txt"), script=chat_eval)
    assert line.endswith("t.txt: is empty")
    recorded_with(base, system_prompt="x" * 128)
    assert "its context 128" in refusal(capsys, *evaluate, script=chat_eval)
    recorded_with(base, system_prompt="", generator_prompt="{problem.__class__}")
    assert "{problem.__class__} in it is none of {problem}" in refusal(capsys, *evaluate, script=chat_eval)


@pytest.mark.parametrize("changes, words", [
    ({}, ["pass@1, out of distribution", "wrong steps that it passes, fixed"]),
    ({"out_words": "other half", "has_step_labels": False}, ["pass@1, other half", "wrong solutions that it passes"])])
def test_the_table_of_the_end_is_in_the_words_of_the_task_and_without_rows_of_nothing(capsys, changes, words):
    before = {"gen/pass1_in": 0.5, "gen/pass1_out": None, "ver/step_f1_fixed": None,
              "ver/wrong_steps_passed_fixed": 0.1}
    print_table(before, before | {"gen/pass1_out": 0.25}, PAIR_TABLE, words_of(chain(**changes)))
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 3 and all(word in line for word, line in zip(words, lines[1:], strict=True))
    assert lines[1].split()[-4:] == ["-", "->", "25.0", "-"]
