"""chat_cli's conversations and verdicts."""
import io
import json
import re
import shutil
import sys
from collections.abc import Iterable

import pytest
import torch
from conftest import TASK_FLAGS, parse

from nanochat import engine
from nanochat.checkpoint import load_model
from nanochat.cli import script_main
from nanochat.common import printable
from nanochat.rl.play.sampling import Sampler
from nanochat.tokenizer import Tokenizer
from scripts import chat_cli, chat_sft
from tasks import make_task
from tasks.formats import PAPER

CHECKPOINT = ["--device-type", "cpu", "-g", "tiny"]
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


RECORDED = [
    ({"task": ["chain"]}, "task is ['chain'], expected a text"), ({"task": 5}, "task is 5, expected a text"),
    ({"task": "nope"}, "task is 'nope', and there are chain, "),
    ({"task": "mixture", "mixture_tasks": 5}, "mixture_tasks is 5, expected a text")]


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
    problems = [task.problem(split, i) for split in ("test_in", "test_out") for i in range(8)]
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
    stdin = "".join(f"{chain().problem('test_in', i).prompt}\n" for i in range(8))
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
        assert printable(chr(code)) == (chr(code) if kept else "?"), hex(code)


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
    assert refused(capsys, chat_cli, "-p", "1" * 130) == "error: the message has 134 tokens, the context 128\n"
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


@pytest.mark.parametrize("role", ["verifier", "critic"])
def test_a_model_that_was_trained_to_judge_says_so(capsys, base, monkeypatch, role):
    change_meta(base, role=role)
    lines = talk(capsys, monkeypatch, "-m", "1", "-p", "1")
    assert lines[0] == f"WARNING: tiny was trained as a {role}, and is the generator here"


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
