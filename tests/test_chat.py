"""
Chat models: chat_eval's scores against naive counts, chat_cli's conversations and verdicts, chat_rl as tango_rl with
one role.
"""
import argparse
import io
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from conftest import COMMON_RL_FLAGS, TASK_FLAGS, parse, scripts_on_two_ranks

from nanochat import engine
from nanochat.checkpoint import load_model
from nanochat.cli import script_main
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records import outcomes
from nanochat.storage.run import MEASURED
from nanochat.tokenizer import Tokenizer
from scripts import chat_cli, chat_eval, chat_rl, chat_sft, tango_rl
from tasks import make_task
from tasks.chain import Chain
from tasks.formats import PAPER
from tasks.multiple_choice import choice_prompt, load_choices

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CHECKPOINT = ["--device-type", "cpu", "-g", "tiny"]
MIXTURE = ["--last-letter-max-words", "2", "--last-letter-max-letters", "3"]
ANSI = re.compile("\033\\[[0-9;]*m")


@pytest.fixture
def tokenizer(base) -> Tokenizer:
    return Tokenizer.load(str(base / "tokenizer"))


def run(capsys, script, *flags: str) -> str:
    """What a script prints."""
    capsys.readouterr()
    script_main(script.main, script.make_parser(), [*CHECKPOINT, *flags])
    return capsys.readouterr().out


def refused(capsys, script, *flags: str) -> str:
    """Runs a script that must refuse its input; its one line."""
    with pytest.raises(SystemExit) as stop:
        run(capsys, script, *flags)
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1, line
    return line


def tiny(tag: str = "tiny"):
    return load_model("sft", tag, torch.device("cpu"), torch.float32)[0]


def chain(*flags: str, seed: int = 0):
    return make_task(parse(chat_sft, [*TASK_FLAGS, "--role", "generator", "--seed", str(seed), *flags]))


def change_meta(base, **changes) -> None:
    """Changes what the checkpoint tiny says it was trained with; None takes a flag out, ... makes it null."""
    path = base / "chatsft_checkpoints" / "tiny" / "meta_000200.json"
    meta = json.loads(path.read_text())
    recorded = {name: value for name, value in {**meta["user_config"], **changes}.items() if value is not None}
    path.write_text(json.dumps({**meta, "user_config": {name: None if value is ... else value
                                                        for name, value in recorded.items()}}))


def force_picks(monkeypatch, turns: Iterable[list[int]]) -> None:
    """Makes the sampler draw these tokens, turn by turn, whatever the logits; those that the tool forces take the
    places of what stands there."""
    turns, current = iter(turns), []

    def pick(model, hidden, keys, position, temperature, top_k):
        position = int(position[0])  # the same of all rows here
        if position == 0:
            current[:] = next(turns)
        return torch.full((len(hidden),), current[position]), torch.zeros(len(hidden))
    monkeypatch.setattr(engine, "pick_after", pick)


def test_lenient_accuracy_stands_beside_pass_at_1_and_says_of_how_many(capsys):
    """Rows: part, right, right in every step, vote, ended, cannot be scored, last numbers."""
    rows = [["gsm8k", 1, None, True, 1, 0, [True]], ["gsm8k", 0, None, False, 1, 0, [True]]]
    args = argparse.Namespace(num_samples=1)
    chat_eval.print_rows(args, "gsm8k", rows)
    chat_eval.print_rows(args, "math", [*rows, ["math", 0, None, False, 0, 0, []]])
    chat_eval.print_rows(args, "chain", [row[:6] + [[]] for row in rows])
    full, some, none = capsys.readouterr().out.splitlines()
    assert "pass@1  50.0% | lenient 100.0% | ended" in full
    assert "pass@1  33.3% | lenient 100.0% of 2 | ended" in some and "lenient" not in none


def scores(capsys, *flags: str) -> dict[str, dict[str, str]]:
    """Per line of chat_eval its name and its numbers, as printed."""
    lines = run(capsys, chat_eval, "-i", "sft", *flags).splitlines()[1:]
    return {line[:40].rstrip(): {"number": line[40:].split()[0], **dict(re.findall(r"\| ([^|]+?) +([0-9.]+)%", line))}
            for line in lines}


def percent(part: float, whole: int) -> str:
    return f"{100 * part / whole:.1f}"


def samples(base, task, split: str, num_problems: int, n: int, max_new_tokens: int = 28) -> tuple[list[list[str]], int]:
    """The texts of n samples (one: greedy) of each problem of a split, each problem sampled alone; how many ended."""
    sampler = Sampler(task, Tokenizer.load(str(base / "tokenizer")), task.seed, max_new_tokens, 0)
    model, problems = tiny(), [task.problem(split, i) for i in range(num_problems)]
    sampled = [sampler.solve(model, [p], n, ("chat_eval", split), greedy=n == 1) for p in problems]
    num_ended = sum(int(rollouts.stopped.sum()) for rollouts, _ in sampled)
    return [[s.text for s in solutions] for _, solutions in sampled], num_ended


def in_every_step(task, problem, text: str) -> bool:
    labels = task.step_labels(problem, text)
    return bool(labels) and all(labels) and task.check(problem, text)


def test_what_cannot_be_scored_is_counted(capsys, base, monkeypatch):
    check = Chain.check
    monkeypatch.setattr(Chain, "check", lambda self, problem, text: None if problem.index < 2 else
                        check(self, problem, text))
    lines = run(capsys, chat_eval, "-i", "sft", "-x", "5").splitlines()
    assert lines[1].endswith("| 2 cannot be scored and count as wrong")


@pytest.mark.parametrize("flags, task_flags, seed, limit", [
    ([], ["--chain-answer", "final"], 5, 8), (["--seed", "0"], ["--chain-answer", "final"], 0, 8),
    (["--chain-max-steps", "1", "--chain-answer", "all"], ["--chain-max-steps", "1"], 5, 8),
    (["-m", "28"], ["--chain-answer", "final"], 5, 28)])
def test_greedy_scores_are_a_naive_count_with_the_checkpoints_flags_unless_others_are_given(
        capsys, base, flags, task_flags, seed, limit):
    """With 8 tokens an answer after one step is whole, and its end cut off."""
    change_meta(base, seed=5, chain_answer="final", max_new_tokens=8)
    shown = scores(capsys, "-x", "30", *flags)
    assert set(shown) == {"chain", "chain, test_out"}
    task = chain(*task_flags, seed=seed)
    for split, words in (("test_in", ""), ("test_out", ", test_out")):
        texts, num_ended = samples(base, task, split, 30, 1, limit)
        right = [task.check(task.problem(split, i), text) for i, (text,) in enumerate(texts)]
        num_all = sum(in_every_step(task, task.problem(split, i), text) for i, (text,) in enumerate(texts))
        assert shown["chain" + words] == {"number": "30", "pass@1": percent(sum(right), 30),
                                          "right in every step": percent(num_all, 30), "ended": percent(num_ended, 30)}
        if split == "test_in":
            assert sum(right) < 30 and (num_ended > 0 if limit == 28 else num_ended < 30)
            assert sum(right) > 0 or "all" in flags  # of one operation there are few problems


def test_pass_and_majority_at_k_are_those_of_the_samples(capsys, base):
    shown, task = scores(capsys, "-x", "20", "-n", "4", "-t", "1")["chain"], chain()
    num_right = num_any = num_majority = num_all = 0
    for i, texts in enumerate(samples(base, task, "test_in", 20, 4)[0]):
        problem = task.problem("test_in", i)
        right = [task.check(problem, text) for text in texts]
        answers = [text.partition("=")[2].strip() for text in texts if "=" in text]
        num_right, num_any = num_right + sum(right), num_any + any(right)
        num_majority += bool(answers) and Counter(answers).most_common(1)[0][0] == problem.answer
        num_all += sum(in_every_step(task, problem, text) for text in texts)
    assert 0 < num_right / 4 < num_any < 20 and num_majority != num_any
    assert ((shown["pass@1"], shown["pass@4"], shown["maj@4"])
            == (percent(num_right, 80), percent(num_any, 20), percent(num_majority, 20)))
    assert shown["right in every step"] == percent(num_all, 80)


@pytest.mark.parametrize("change, answered, in_every_step", [
    (lambda text: text, "100.0", "100.0"),
    (lambda text: "=" + text.partition("=")[2], "100.0", "0.0"),  # no steps
    (lambda text: text.replace(":", ":0", 1), "100.0", "0.0"),  # no result that is a digit
    (lambda text: text.partition(";")[0] + ";=" + text.partition("=")[2], "100.0", "100.0"),  # right ones, too few
    (lambda text: text + "0", "0.0", "0.0"),
])
def test_a_right_answer_is_right_in_every_step_where_it_has_some_and_all_are(
        capsys, base, tokenizer, monkeypatch, change, answered, in_every_step):
    """Written solutions: the right one, and changes of it."""
    task = chain()
    problems = [task.problem(split, 0) for split in ("test_in", "test_out")]
    texts = [change(task._render(p.prompt, task._solve(p.prompt, {}, 0.0, None))) for p in problems]
    force_picks(monkeypatch, ([*tokenizer.encode(text), tokenizer.assistant_end] for text in texts))
    monkeypatch.setattr(outcomes, "ENDLESS", 1)  # problems of a task without end, where -x does not say
    for shown in scores(capsys, "-m", "40").values():
        assert shown == {"number": "1", "pass@1": answered, "right in every step": in_every_step, "ended": "100.0"}


def test_a_mixture_is_shown_whole_and_by_part(capsys, base):
    shown = scores(capsys, "-a", "mixture|chain", "-x", "40", *MIXTURE, "--chain-answer", "final")
    assert list(shown)[:4] == ["mixture", "  chain", "  last_letter", "mixture, test_out"] and len(shown) == 8
    assert shown["  chain"] == scores(capsys, "-x", "20", "--chain-answer", "final")["chain"]
    assert shown["  chain"]["number"] == "20"
    assert (2 * float(shown["mixture"]["pass@1"])
            == float(shown["  chain"]["pass@1"]) + float(shown["  last_letter"]["pass@1"]) > 0)
    assert shown["chain"]["number"] == shown["mixture"]["number"] == "40"


def test_stage_tag_and_step_name_the_checkpoint(capsys, base):
    """Step 100 has a head of zeros: token 0 everywhere. d10 is the default before d2, and a copy of it in the RL stage
    scores the same."""
    folder = base / "chatsft_checkpoints"
    for kind in ("model_{:06d}.pt", "meta_{:06d}.json"):
        shutil.copy(folder / "tiny" / kind.format(200), folder / "tiny" / kind.format(100))
    meta = json.loads((folder / "tiny" / "meta_000100.json").read_text())
    (folder / "tiny" / "meta_000100.json").write_text(json.dumps({**meta, "step": 100}))
    state = torch.load(folder / "tiny" / "model_000100.pt", weights_only=True)
    torch.save({**state, "lm_head.weight": 0 * state["lm_head.weight"]}, folder / "tiny" / "model_000100.pt")
    shutil.copytree(folder / "tiny", folder / "d10")
    shutil.copytree(folder / "tiny-ver", folder / "d2")
    shutil.copytree(folder / "tiny", base / "chatrl_checkpoints" / "r-gen")
    last = scores(capsys, "-x", "10")
    assert scores(capsys, "-x", "10", "-g", "") == last == scores(capsys, "-x", "10", "-i", "rl", "-g", "r-gen")
    assert scores(capsys, "-x", "10", "-s", "100")["chain"]["ended"] == "0.0" != last["chain"]["ended"]
    assert "d10 at step 200, seed 0" in run(capsys, chat_eval, "-i", "sft", "-x", "1", "-g", "")
    assert "tiny at step 100, seed 0" in run(capsys, chat_eval, "-i", "sft", "-x", "1", "-s", "100")


def question(text: str, labels: str = "ABCD", answer: str = "") -> dict:
    return {"question": text, "choices": {"text": [f"{k}" for k, _ in enumerate(labels)], "label": list(labels)},
            "answerKey": answer or labels[0]}


@pytest.fixture
def questions(base, tokenizer, tmp_path, monkeypatch) -> str:
    """A file of 24 questions of several lengths and letters, 16 of which the model has right (each asked alone, with
    all its logits looked at), and 2 that are longer than its context."""
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))  # leave nothing after
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))  # for processes that a test starts
    path, model, said, keyed = tmp_path / "arc.jsonl", tiny(), set(), []
    rows = [question("+".join("012"[(i * k) % 3] for k in range(1, 2 + i % 5)), ("ABCD", "120", "012")[i % 3])
            for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for i, choice in enumerate(load_choices("ARC-Easy", str(path))):
        logits = model(torch.tensor([tokenizer.render_prompt(choice_prompt(choice))]))[0, -1].tolist()
        best, *others = sorted(choice.letters, key=lambda letter: -logits[ord(letter)])
        said.add((choice.letters, best))
        keyed.append(question(choice.question, "".join(choice.letters), best if i % 3 else others[0]))
    assert len(said) > 3  # not always one letter of a kind
    path.write_text("".join(json.dumps(row) + "\n" for row in [*keyed, question("?" * 200), question("!" * 200)]))
    return str(path)


def test_multiple_choice_is_the_likeliest_letter_of_each_question_and_long_ones_are_wrong(
        capsys, base, tokenizer, questions):
    line = run(capsys, chat_eval, "-i", "sft", "-a", "ARC-Easy", "--choices", questions).splitlines()[1]
    assert line.split() == (f"ARC-Easy 26 questions | accuracy {100 * 16 / 26:.1f}% "
                            "(chance 25%) | 2 longer than the context").split()
    choices = load_choices("ARC-Easy", questions)
    for max_tokens in (1, 400):  # a question at a time, and a few
        assert chat_eval.letter_accuracy(tiny(), tokenizer, choices, torch.device("cpu"), max_tokens) == (16 / 26, 2)
    first = load_choices("ARC-Easy", questions, 5)
    accuracy, num_long = chat_eval.letter_accuracy(tiny(), tokenizer, first, torch.device("cpu"))
    line = run(capsys, chat_eval, "-i", "sft", "-a", "ARC-Easy", "--choices", questions, "-x", "5").splitlines()[1]
    assert f"5 questions | accuracy {100 * accuracy:5.1f}%" in line and ("longer" in line) == (num_long > 0)


def test_two_ranks_print_the_numbers_of_one(capsys, base, questions):
    flags = ["-i", "sft", "-a", "mixture|ARC-Easy", "-x", "25", "-n", "3", "-t", "1", "--choices", questions, *MIXTURE]
    printed = scripts_on_two_ranks(("scripts.chat_eval", [*CHECKPOINT, *flags]))
    assert printed.splitlines() == run(capsys, chat_eval, *flags).splitlines()
    assert printed.count("\n") == 8 and "longer than the context" in printed


@pytest.mark.parametrize("flags, words", [
    (["-a", "sudoku"], ["-a sudoku", "chain", "ARC-Easy", "MMLU"]),
    (["--task", "sudoku"], ["sudoku", "chain", "gsm8k"]),
    (["-a", "chain|"], ["-a chain|", "''"]), (["-x", "0"], ["-x", "0: must be"]),
    (["-n", "2"], ["-n 2", "greedy", "-t"]),
    (["-n", "0"], ["--num-samples 0"]),
    (["-m", "0"], ["-m", "0: must be"]),
    (["-m", "126"], ["context 128", "--max-new-tokens"]), (["-t", "-1"], ["--temperature -1"]),
    (["-t", "nan"], ["--temperature nan"]),
    (["-a", "MMLU", "--choices", "nowhere.jsonl"], ["MMLU, nowhere.jsonl", "no such file"]),
    (["-a", "chain", "--choices", __file__], ["--choices", "MMLU"]),
    (["-a", "MMLU", "--choices", __file__], ["MMLU", "must end in"]),
    (["-g", "nobody"], ["nobody", "tiny", "tiny-ver"]), (["-g", "../tiny"], ["-g ../tiny"]),
    (["-g", ""], ["d<N>", "tiny"]),
    (["-s", "7"], ["tiny", "no step 7", "200"]), (["-i", "rl"], ["tiny", "chatrl_checkpoints"]),
    (["--chain-modulus", "77"], ["--chain-modulus 77"]), (["--problems", "3"], ["--problems"]),
])
def test_the_evaluation_refuses(capsys, base, flags, words):
    line = refused(capsys, chat_eval, "-i", "sft", *flags)
    assert all(word in line for word in words), line


def test_a_checkpoint_that_names_no_task_is_not_evaluated_on_one_by_default(capsys, base):
    change_meta(base, task=None)
    assert "names no task" in refused(capsys, chat_eval, "-i", "sft")
    assert (scores(capsys, "-x", "2", "-a", "chain").keys()
            == scores(capsys, "-x", "2", "--task", "chain").keys() == {"chain", "chain, test_out"})


RECORDED = [
    ({"task": ["chain"]}, "task is ['chain'], expected a text"), ({"task": 5}, "task is 5, expected a text"),
    ({"task": "nope"}, "task is 'nope', and there are chain, "),
    ({"task": "mixture", "mixture_tasks": 5}, "mixture_tasks is 5, expected a text")]


@pytest.mark.parametrize("changes, words", [
    *RECORDED, ({"max_new_tokens": "96"}, "max_new_tokens is '96', expected a whole number"),
    ({"chain_modulus": "x"}, "chain_modulus is 'x', expected a whole number"),
    ({"chain_modulus": 3.0}, "chain_modulus is 3.0, expected a whole number"),
    ({"chain_share": "x"}, "chain_share is 'x', expected a number"),
    ({"chain_answer": "some"}, "chain_answer is 'some', and there are final, all"),
    ({"math_data": "file"}, "math_data is 'file', expected a list of texts"),
    ({"seed": "x"}, "seed is 'x', expected a whole number"),
    ({"seed": False}, "seed is False, expected a whole number"),
    ({"seed": ...}, "seed is None, expected a whole number"),
    ({"max_new_tokens": ...}, "max_new_tokens is None, expected a whole number")])
def test_what_a_checkpoint_records_is_checked(capsys, base, changes, words):
    change_meta(base, **changes)
    path = base / "chatsft_checkpoints" / "tiny" / "meta_000200.json"
    assert f"{path}: {words}" in refused(capsys, chat_eval, "-i", "sft", "-x", "2")


def test_what_is_given_stands_for_what_is_recorded(capsys, base):
    """An int may be recorded of a share."""
    change_meta(base, task=5, chain_modulus="x", seed="x", max_new_tokens="x", chain_share=1)
    given = ["-a", "chain", "--chain-modulus", "3", "--seed", "0", "-m", "20"]
    assert scores(capsys, "-x", "2", *given).keys() == {"chain", "chain, test_out"}


def talk(capsys, monkeypatch, *flags: str, stdin: str = "") -> list[str]:
    """What chat_cli prints, line by line: greedy, with these lines to read."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    return run(capsys, chat_cli, "-t", "0", *flags).splitlines()


def prompts_heard(monkeypatch) -> list[list[int]]:
    """A list that gets every prompt that the sampler is given."""
    heard, generate = [], chat_cli.generate
    monkeypatch.setattr(
        chat_cli, "generate",
        lambda model, prompts, *args, **options: heard.append(prompts[0]) or generate(model, prompts, *args, **options))
    return heard


@pytest.mark.parametrize("limit", [4, 20])
def test_every_step_is_shown_with_what_the_verifier_says_of_it(capsys, base, tokenizer, monkeypatch, limit):
    """Within 4 tokens no verification ends."""
    task = chain()
    problems = [task.problem(split, i) for split in ("test_in", "test_out") for i in range(16)]
    sampler = Sampler(task, tokenizer, 0, limit, limit)
    rollouts, solutions = sampler.solve(tiny(), problems, 1, (), greedy=True)
    _, verifications = sampler.verify(tiny("tiny-ver"), problems, solutions, 1, (), greedy=True)
    word, blocks = {True: "right", False: "wrong", None: "no verdict"}, []
    for solution, stopped, judged in zip(solutions, rollouts.stopped.tolist(), verifications, strict=True):
        block = [f"Assistant: {solution.text}" + ("" if stopped else f" [cut at {limit} tokens]")]
        steps = solution.text.split("=")[0].split(";")[:-1]
        verdicts = judged.step_verdicts + [None] * len(steps)
        block += [f"  step {k}: {step}  {word[verdict]}"
                  for k, (step, verdict) in enumerate(zip(steps, verdicts, strict=False), 1)]
        block += [f"  verdict: {word[judged.verdict]}"] + ([f"  (malformed: {', '.join(judged.unmet)})"]
                                                           if judged.unmet else [])
        blocks.append(block)
    if limit == 4:
        assert {judged.verdict for judged in verifications} == {None} and not rollouts.stopped.all()
    else:
        assert {verdict for judged in verifications for verdict in judged.step_verdicts} >= {True, False}
        assert {judged.verdict for judged in verifications} >= {True, False} and rollouts.stopped.any()
    flags = ["-m", str(limit), "--verifier", "tiny-ver"]
    lines = talk(capsys, monkeypatch, *flags, stdin="".join(f"{p.prompt}\n" for p in problems))
    assert lines[0].endswith("step 200; problems in the format compact")
    assert [line for line in lines[1:] if line not in ("", "User: ")] == [line for block in blocks for line in block]
    assert talk(capsys, monkeypatch, *flags, "-p", problems[0].prompt)[1:] == ["", *blocks[0]]
    assert talk(capsys, monkeypatch, "-m", str(limit), "-p", problems[0].prompt)[1:] == ["", blocks[0][0]]


def test_colours_are_around_verdicts_and_only_where_they_are_wanted(capsys, base, tokenizer, monkeypatch):
    """A verification that is cut has no verdict, whatever it says: yellow."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    flags = ["--verifier", "tiny-ver", "-m", "20"]
    stdin = "".join(f"{chain().problem('test_in', i).prompt}\n" for i in range(16))
    plain, coloured = (talk(capsys, monkeypatch, *flags, "--colour", c, stdin=stdin) for c in ("never", "always"))
    assert [ANSI.sub("", line) for line in coloured] == plain != coloured
    text = "\n".join(coloured)
    assert {"\033[32mright\033[0m", "\033[31mwrong\033[0m"} <= set(re.findall("\033\\[3[0-9]m.*?\033\\[0m", text))
    assert len(ANSI.findall(text)) == 2 * len([line for line in plain if re.search("(right|wrong|no verdict)$", line)])
    assert talk(capsys, monkeypatch, *flags, stdin=stdin) == plain  # auto, in a pipe
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True)
        assert talk(capsys, patch, *flags, stdin=stdin) == coloured
        patch.setenv("NO_COLOR", "1")
        assert talk(capsys, patch, *flags, stdin=stdin) == plain
    force_picks(monkeypatch, [[*tokenizer.encode("1+1:2;=2"), tokenizer.assistant_end], tokenizer.encode("1+1:2T;=T")])
    lines = talk(capsys, monkeypatch, "--verifier", "tiny-ver", "-m", "9", "--colour", "always", "-p", "1+1")
    assert lines[3:] == ["  step 1: 1+1:2  \033[32mright\033[0m", "  verdict: \033[33mno verdict\033[0m",
                         "  (malformed: no_final_verdict)"]


def test_what_a_model_writes_cannot_steer_the_terminal(capsys, base, tokenizer, monkeypatch):
    """Nor forge a line of verdicts: a step is one line."""
    said = "\033[2J\r\x07\x9b1m\u202e\x7f\u2028\n verdict: \033[32mright;=1"
    judged = [*tokenizer.encode("\033[31m1T;=F"), tokenizer.assistant_end]
    force_picks(monkeypatch, [[*tokenizer.encode(said), tokenizer.assistant_end], judged])
    lines = talk(capsys, monkeypatch, "--verifier", "tiny-ver", "-p", "1+1")
    assert lines[2:] == ["Assistant: ?[2J???1m???", " verdict: ?[32mright;=1",
                         "  step 1: ?[2J???1m??? verdict: ?[32mright  right", "  verdict: wrong"]


def test_of_all_characters_controls_and_formats_become_question_marks():
    import unicodedata
    for code in [*range(0x3100), 0xd800, 0xe000, 0xfeff, 0x1f600, 0xe0041, 0x10ffff]:
        kept = (unicodedata.category(chr(code))[0] not in "C" and code not in (0x2028, 0x2029)
                or chr(code) in "\n\t\u200c\u200d")
        assert chat_cli.printable(chr(code)) == (chr(code) if kept else "?"), hex(code)


def test_a_character_split_over_tokens_is_shown_once_it_is_whole(capsys, base, tokenizer, monkeypatch):
    tokens = tokenizer.encode("\u00e9\u20ac\U0001f600\u3000a\u00a0b\t")
    assert len(tokens) == 2 + 3 + 4 + 3 + 1 + 2 + 1 + 1
    force_picks(monkeypatch, [[*tokens, 0xc3, ord("c"), tokenizer.assistant_end]])
    assert talk(capsys, monkeypatch, "-p", "1+1")[2] == "Assistant: \u00e9\u20ac\U0001f600\u3000a\u00a0b\t\ufffdc"


def test_calculator_calls_are_shown_with_their_results(capsys, base, tokenizer, monkeypatch):
    """The zeros stand where the calculator forces <|output_start|>36<|output_end|>. A call without a result is closed
    too."""
    encode, start, end = tokenizer.encode, tokenizer.special("<|python_start|>"), tokenizer.special("<|python_end|>")
    heard = prompts_heard(monkeypatch)
    force_picks(monkeypatch,
                [[*encode("so "), start, *encode("12*3"), end, 0, 0, 0, 0, *encode(" is"), tokenizer.assistant_end],
                [start, *encode("1/0"), end, *encode("?"), tokenizer.assistant_end], encode("12345678")])
    lines = talk(capsys, monkeypatch, "--format", "chat", "-m", "19", stdin="a\nb\n\n")
    assert [line for line in lines if "Assistant" in line] == ["Assistant: so [12*3 = 36] is", "Assistant: [1/0 = ?]?"]
    answer = [{"type": "text", "text": "so "}, {"type": "python", "text": "12*3"},
              {"type": "python_output", "text": "36"}, {"type": "text", "text": " is"}]
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer},
            {"role": "user", "content": "b"}]
    assert heard[1] == tokenizer.render_chat(said)
    assert talk(capsys, monkeypatch, "-p", "c", "-m", "8")[2] == "Assistant: 12345678 [cut at 8 tokens]"


def test_a_chat_remembers_until_it_is_cleared_and_ends_at_quit(capsys, base, tokenizer, monkeypatch):
    heard = prompts_heard(monkeypatch)
    lines = talk(capsys, monkeypatch, "--format", "chat", "-m", "3", stdin="1+1\n\n  2*2  \nCLEAR\n0-1\nquit\n2+2\n")
    answers = [re.fullmatch(r"Assistant: (.*?)(?: \[cut at 3 tokens\])?", line)[1] for line in lines
               if "Assistant" in line]
    assert len(answers) == len(heard) == 3 and lines[0].endswith("step 200; chat")
    said = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": answers[0]},
            {"role": "user", "content": "2*2"}]
    assert heard == [tokenizer.render_prompt("1+1"), tokenizer.render_chat(said), tokenizer.render_prompt("0-1")]
    assert lines.count("User: ") == 6


def test_every_message_to_a_model_of_a_task_is_a_problem_of_its_own(capsys, base, tokenizer, monkeypatch):
    heard = prompts_heard(monkeypatch)
    talk(capsys, monkeypatch, stdin="1+1\n2*2\n")
    change_meta(base, task="mixture", mixture_tasks="last_letter,chain")
    talk(capsys, monkeypatch, stdin="0-1\nexit\n0-2\n")
    talk(capsys, monkeypatch, "--format", "paper", "-m", "1", "-p", "1")
    assert heard == [tokenizer.render_prompt(text)
                     for text in ("1+1", "2*2", "0-1", PAPER.generator_prompt.format(problem="1"))]


@pytest.mark.parametrize("changes, words", RECORDED)
def test_the_format_is_that_of_a_task_there_is(capsys, base, monkeypatch, changes, words):
    change_meta(base, **changes)
    path = base / "chatsft_checkpoints" / "tiny" / "meta_000200.json"
    assert f"{path}: {words}" in refused(capsys, chat_cli, "-p", "1+1")
    assert "problems in the format compact" in talk(capsys, monkeypatch, "-p", "1", "--format", "compact")[0]


@pytest.mark.parametrize("changes, words", [
    ({"task": "mixture"}, "problems in the format compact"), ({"task": "math"}, "problems in the format paper"),
    ({"task": None}, "chat"), ({"task": 5, "conversations": ["a"], "conversations_share": 1}, "chat")])
def test_a_checkpoints_task_says_how_problems_are_put(capsys, base, monkeypatch, changes, words):
    change_meta(base, **{"mixture_tasks": None, **changes})
    assert talk(capsys, monkeypatch, "-m", "1", "-p", "1")[0].endswith(f"step 200; {words}")


def test_a_conversation_that_no_longer_fits_is_one_line_and_goes_on(capsys, base, monkeypatch):
    lines = talk(capsys, monkeypatch, "--format", "chat", stdin="1+1\n" + "1" * 130 + "\nclear\n1+1\n")
    errors = [line for line in lines if "error" in line]
    assert len(errors) == 1 and re.fullmatch("error: the conversation has [0-9]+ tokens, the context 128: begin anew "
                                             "with clear", errors[0])
    answers = [line for line in lines if "Assistant" in line]
    assert len(answers) == 2 and answers[0] == answers[1]
    assert "134 tokens, the context 128" in refused(capsys, chat_cli, "-p", "1" * 130)
    force_picks(monkeypatch, [[ord("1")] * 20])
    assert "to the verifier, its context 128" in refused(capsys, chat_cli, "-m", "20", "--verifier", "tiny-ver", "-p",
                                                         "1" * 104)


def test_an_interrupted_answer_does_not_end_the_conversation(capsys, base, tokenizer, monkeypatch):
    heard = prompts_heard(monkeypatch)

    def interrupted():
        yield tokenizer.encode("yes")
        raise KeyboardInterrupt
    force_picks(monkeypatch, interrupted())
    lines = talk(capsys, monkeypatch, "--format", "chat", "-m", "3", stdin="1+1\n2+2\nquit\n")
    assert [line for line in lines if "Assistant" in line] == ["Assistant: yes [cut at 3 tokens]",
                                                               "Assistant:  [stopped]"]
    assert len(heard) == 2 and lines[-1] == "User: "


@pytest.mark.parametrize("word", ["clear", "quit", "exit"])
def test_a_message_on_the_command_line_is_never_a_command(capsys, base, tokenizer, monkeypatch, word):
    heard = prompts_heard(monkeypatch)
    assert talk(capsys, monkeypatch, "-p", word, "-m", "4")[2].startswith("Assistant: ")
    assert heard == [tokenizer.render_prompt(word)]


def test_a_verifier_needs_a_format_and_is_of_the_models_stage_or_of_sft(capsys, base, monkeypatch):
    shutil.copytree(base / "chatsft_checkpoints" / "tiny", base / "chatrl_checkpoints" / "r-gen")
    flags = ["--verifier", "tiny-ver", "-p", "1+1"]
    expected = talk(capsys, monkeypatch, *flags)
    change_meta(base, task=None)
    assert "--format paper or lines or compact" in refused(capsys, chat_cli, *flags)
    assert "--format paper or lines or compact" in refused(capsys, chat_cli, *flags, "--format", "chat")
    assert talk(capsys, monkeypatch, *flags, "--format", "compact") == expected
    assert talk(capsys, monkeypatch, "-p", "1+1")[0].endswith("; chat")
    flags = ["-i", "rl", "-g", "r-gen", "-p", "1+1", "--verifier"]
    assert talk(capsys, monkeypatch, *flags, "tiny-ver")[1:] == expected[1:]
    shutil.move(base / "chatsft_checkpoints" / "tiny-ver", base / "chatrl_checkpoints" / "r-ver")
    assert talk(capsys, monkeypatch, *flags, "r-ver")[1:] == expected[1:]


@pytest.mark.parametrize("flags, words", [
    (["-g", "nobody"], ["nobody", "tiny"]), (["-s", "7"], ["no step 7"]), (["-t", "-1"], ["--temperature -1"]),
    (["-m", "0"], ["--max-new-tokens 0"]),
    (["--verifier", "nobody"], ["nobody", "tiny-ver"]), (["--verifier", "../x"], ["--verifier ../x"]),
    (["-p", " "], ["-p"]), (["-p", ""], ["-p"])])
def test_the_conversation_refuses(capsys, base, flags, words):
    line = refused(capsys, chat_cli, "-p", "1+1", *flags)
    assert all(word in line for word in words), line


def test_input_that_is_no_text_is_refused(capsys, base, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert "UTF-8" in refused(capsys, chat_cli)


def train(base, script, *flags: str) -> list[dict]:
    """A run's log without its timings."""
    script_main(script.main, script.make_parser, [*COMMON_RL_FLAGS, *flags])
    with open(base / "runs" / flags[flags.index("--run") + 1] / "metrics.jsonl") as f:
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)}
                for line in f]


def test_rl_of_the_generator_is_the_recipe_grpo(base):
    log = train(base, chat_rl, "--run", "a", "--num-steps", "3")
    assert log == train(base, tango_rl, "--run", "b", "--num-steps", "3", "--recipe", "grpo")
    assert [record["role"] for record in log] == ["generator"] * 3 and any(record["gen/loss"] for record in log)
