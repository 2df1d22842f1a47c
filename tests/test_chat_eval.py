"""chat_eval's scores against naive counts, what it refuses; chat_rl as tango_rl with one role."""
import json
import re
import shutil
from collections import Counter

import pytest
import torch
from conftest import COMMON_RL_FLAGS, scripts_on_two_ranks
from test_chat import CHECKPOINT, RECORDED, chain, change_meta, force_picks, refused, run, tiny

from nanochat.cli import script_main
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records import outcomes
from nanochat.storage.run import MEASURED
from nanochat.tokenizer import Tokenizer
from scripts import chat_eval, chat_rl, tango_rl
from tasks.chain import Chain
from tasks.multiple_choice import choice_prompt, load_choices

MIXTURE = ["--last-letter-max-words", "2", "--last-letter-max-letters", "3"]


@pytest.fixture
def tokenizer(base) -> Tokenizer:
    return Tokenizer.load(str(base / "tokenizer"))


def row(right: int, lenient: list[bool], part: str = "gsm8k", unread: int = 0) -> dict:
    return {"part": part, "right": right, "all_right": None, "vote": bool(right), "ended": 1, "unscorable": 0,
            "uncounted": 0, "unread": unread, "lenient": lenient}


def test_lenient_accuracy_stands_beside_pass_at_1_and_says_of_how_many(capsys):
    rows = [row(1, [True]), row(0, [True])]
    chat_eval.print_rows("gsm8k", rows, 1)
    some = chat_eval.print_rows("math", [*rows, row(0, [], "math", unread=1)], 1)
    assert some == {"pass@1": 1 / 3, "lenient": 1.0, "ended": 1.0, "problems": 3, "unscorable": 0, "uncounted": 0,
                    "unread": 1}
    chat_eval.print_rows("chain", [row | {"lenient": []} for row in rows], 1)
    full, some, none = capsys.readouterr().out.splitlines()
    assert "pass@1  50.0% | lenient 100.0% | ended" in full and "no answer" not in full
    assert "pass@1  33.3% | lenient 100.0% of 2 | ended" in some and some.endswith("| no answer read in 1 of 3")
    assert "lenient" not in none


@pytest.mark.parametrize("rows, hint", [
    ([row(0, [True]), row(0, [False])], "in 0% of the samples"), ([row(0, [False], unread=1)], "in 100% of the"),
    ([row(0, [], unread=1)] * 3 + [row(0, [])], "in 75% of the"),  # without numbers
    ([row(1, [True]), row(0, [True])], ""), ([row(0, [False])], ""), ([row(1, [True], unread=1)], ""), ([], "")])
def test_where_the_form_is_missing_sft_is_named(rows, hint):
    """A model that is merely wrong gets no hint, nor one that is right."""
    found = chat_eval.hint_of(chat_eval.print_rows("gsm8k", rows, 1), 1)
    assert (hint in found and "chat_sft" in found) if hint else found == ""


def test_problems_are_shown_as_the_model_sees_and_writes_them(capsys, base, tokenizer, monkeypatch):
    """An answer with a control character in it, one that cannot be read, and after them the hint."""
    task, said = chain(), ["=\x1b[31m7", "what?\nno"]
    force_picks(monkeypatch, ([*tokenizer.encode(text), tokenizer.assistant_end] for text in said))
    monkeypatch.setattr(chat_eval, "PROMPT_END", 5)
    lines = run(capsys, chat_eval, "-i", "sft", "-x", "1", "--show", "2").splitlines()
    problems = [task.problem(split, 0) for split in ("test_in", "test_out")]
    prompts = [tokenizer.spell(tokenizer.render_prompt(problem.prompt))[-5:] for problem in problems]
    assert lines[2:7] == ["  problem 1, wrong", f"    prompt      | ...{prompts[0]}", "    completion  | =?[31m7",
                          "    answer read | ?[31m7", f"    gold answer | {problems[0].answer}"]
    assert lines[8:14] == ["  problem 1, wrong", f"    prompt      | ...{prompts[1]}", "    completion  | what?",
                           "                | no", "    answer read | none can be read",
                           f"    gold answer | {problems[1].answer}"]
    assert len(lines) == 15 and lines[14].startswith("hint: ") and "in 100% of the samples" in lines[14]


def scores(capsys, *flags: str) -> dict[str, dict[str, str]]:
    """Per line of chat_eval its name and its numbers, as printed."""
    lines = run(capsys, chat_eval, "-i", "sft", *flags).splitlines()[1:]
    return {line[:40].rstrip(): {"number": line[40:].split()[0], **dict(re.findall(r"\| ([^|]+?) +([0-9.]+)%", line))}
            for line in lines}


def percent(part: float, whole: int) -> str:
    return f"{100 * part / whole:.1f}"


def samples(base, task, split: str, num_problems: int, n: int,
            max_new_tokens: int = 28) -> tuple[list[list[str]], list[bool]]:
    """The texts of n samples (one: greedy) of each problem of a split, each problem sampled alone; which ended."""
    sampler = Sampler(task, Tokenizer.load(str(base / "tokenizer")), task.seed, max_new_tokens, 0)
    model, problems = tiny(), [task.problem(split, i) for i in range(num_problems)]
    sampled = [sampler.solve(model, [p], n, ("chat_eval", split), greedy=n == 1) for p in problems]
    ended = [stopped for rollouts, _ in sampled for stopped in rollouts.stopped.tolist()]
    return [[s.text for s in solutions] for _, solutions in sampled], ended


def in_every_step(task, problem, text: str) -> bool:
    labels = task.step_labels(problem, text)
    return bool(labels) and all(labels) and task.check(problem, text)


def test_what_is_printed_can_be_kept_as_json(capsys, base):
    out = base / "new" / "scores.json"
    printed = scores(capsys, "-x", "6", "-t", "1", "-n", "3", "--out", str(out))
    kept = json.loads(out.read_text())
    assert (kept["tag"], kept["step"], kept["seed"]) == ("tiny", 200, 0)
    for name, split in (("chain", "test_in"), ("chain, test_out", "test_out")):
        found = kept["tasks"]["chain"][split]
        assert found.pop("problems") == int(printed[name].pop("number")) == 6 and found.pop("unscorable") == 0
        assert 0 <= found.pop("unread") <= 18 and 0 <= found.pop("uncounted") <= 18
        assert {title: percent(value, 1) for title, value in found.items()} == printed[name]


def test_one_split_alone_has_the_scores_that_it_has_beside_the_other(capsys, base):
    flags = ("-x", "6", "-t", "1", "-n", "3")
    both, alone = scores(capsys, *flags), scores(capsys, *flags, "--split", "test_out")
    assert list(both) == ["chain", "chain, test_out"] and alone == {"chain, test_out": both["chain, test_out"]}


def test_scores_replace_earlier_ones_and_nothing_else(capsys, base):
    out = base / "scores.json"
    for num in ("2", "3"):
        scores(capsys, "-x", num, "--out", str(out))
    assert json.loads(out.read_text())["tasks"]["chain"]["test_in"]["problems"] == 3
    out.write_text("{}")
    assert "no earlier result" in refused(capsys, chat_eval, "-i", "sft", "--out", str(out))
    assert out.read_text() == "{}"
    assert "is a folder" in refused(capsys, chat_eval, "-i", "sft", "--out", str(base))


@pytest.mark.parametrize("flags, words", [
    (["-a", "chain|gsm8k", "--gsm8k-data", "nowhere"], "nowhere"),
    (["-a", "chain|ARC-Easy", "--choices", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (["-a", "ARC-Easy", "--split", "test_in"], "--split test_in: is of tasks"),
    (["-a", "ARC-Easy", "--show", "3"], "--show 3: is of tasks"),
    (["-a", "chain|chain"], "names chain twice"), (["-a", "chain", "--task", "last_letter"], "--task last_letter")])
def test_all_that_is_asked_for_is_checked_before_the_first_is_evaluated(capsys, base, monkeypatch, flags, words):
    monkeypatch.setattr(chat_eval, "solve", None)
    assert words in refused(capsys, chat_eval, "-i", "sft", *flags)


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
    """With 8 tokens an answer after one step is whole, and its end cut off, so that it does not count."""
    change_meta(base, seed=5, chain_answer="final", max_new_tokens=8)
    shown = scores(capsys, "-x", "30", *flags)
    assert set(shown) == {"chain", "chain, test_out"}
    task = chain(*task_flags, seed=seed)
    for split, words in (("test_in", ""), ("test_out", ", test_out")):
        texts, ended = samples(base, task, split, 30, 1, limit)
        answered = [task.check(task.problem(split, i), text) for i, (text,) in enumerate(texts)]
        right, num_ended = [a and b for a, b in zip(answered, ended, strict=True)], sum(ended)
        num_all = sum(r and in_every_step(task, task.problem(split, i), text)
                      for i, ((text,), r) in enumerate(zip(texts, right, strict=True)))
        assert shown["chain" + words] == {"number": "30", "pass@1": percent(sum(right), 30),
                                          "right in every step": percent(num_all, 30), "ended": percent(num_ended, 30)}
        if split == "test_in":
            assert sum(right) < 30 and (num_ended > 0 if limit == 28 else num_ended < 30)
            assert sum(answered) > 0 or "all" in flags  # of one operation there are few problems
            assert sum(answered) > sum(right) or limit == 28


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


@pytest.mark.parametrize("changes, words", [
    *RECORDED, ({"max_new_tokens": "96"}, "max_new_tokens is '96', expected a whole number"),
    ({"chain_modulus": 3.0}, "chain_modulus is 3.0, expected a whole number"),
    ({"chain_share": "x"}, "chain_share is 'x', expected a number"),
    ({"chain_answer": "some"}, "chain_answer is 'some', and there are final, all"),
    ({"math_data": "file"}, "math_data is 'file', expected a list of texts"),
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


def train(base, script, *flags: str) -> list[dict]:
    """A run's log without its timings."""
    script_main(script.main, script.make_parser, [*COMMON_RL_FLAGS, *flags])
    with open(base / "runs" / flags[flags.index("--run") + 1] / "metrics.jsonl") as f:
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)}
                for line in f]


def test_rl_of_the_generator_is_the_recipe_grpo(base):
    log = train(base, chat_rl, "--run", "a", "--num-steps", "2")
    assert log == train(base, tango_rl, "--run", "b", "--num-steps", "2", "--recipe", "grpo")
    assert [record["role"] for record in log] == ["generator"] * 2 and any(record["gen/loss"] for record in log)
