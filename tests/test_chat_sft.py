"""SFT: what is trained, conversations beside demonstrations, packing, starting from a checkpoint, going on after a
stop."""
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import TASK_FLAGS, parse, scripts_on_two_ranks
from conftest import train as train_by_rl

from nanochat import storage
from nanochat.checkpoint import list_steps, load_model, save_model
from nanochat.cli import script_main
from nanochat.common import BadInput
from nanochat.gpt import GPT, GPTConfig
from nanochat.rl.records.prompts import generator_prompt
from nanochat.rl.report.report import check_finished
from nanochat.rl.verify import demonstrations
from nanochat.storage.files import path_of
from nanochat.tokenizer import Tokenizer
from scripts import chat_sft, tok_train
from tasks import make_task
from tasks.chain import Chain
from tasks.conversations import load_conversations
from tasks.formats import COMPACT

ROOT = Path(__file__).resolve().parent.parent
MODEL = [*TASK_FLAGS, "--device-type", "cpu", "--depth", "1", "--n-embd", "32", "--n-head", "2", "--sequence-len",
         "128", "--examples-per-step", "8", "--max-new-tokens", "28", "--num-sampled", "16", "--num-steps", "6",
         "--keep", "0", "--eval-examples", "4"]
CHATS = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
         {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12/60?"},
                       {"role": "assistant", "content": [
             {"type": "text", "text": "It is "}, {"type": "python", "text": "12/60"},
             {"type": "python_output", "text": "0.2"}, {"type": "text", "text": "."}]}]},
         [{"role": "user", "content": "long " * 40}, {"role": "assistant", "content": "no"}]]


def train(*more: str, role: str = "generator") -> None:
    chat_sft.main(parse(chat_sft, ["--role", role, *MODEL, *more]))


def weights(tag: str, step: int | None = None):
    return list(load_model("sft", tag, torch.device("cpu"), torch.float32, step)[0].parameters())


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def metrics_of(base, tag: str) -> list[dict]:
    return [json.loads(line)
            for line in (base / "chatsft_checkpoints" / tag / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def chats(tmp_path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    return str(path)


def examples_of(*more: str, context: int = 128) -> chat_sft.Examples:
    args = parse(chat_sft, ["--role", "generator", *MODEL, *more])
    return chat_sft.Examples(args, make_task(args), Tokenizer.load(path_of("tokenizer")), context)


def test_one_model_learns_the_demonstrations_of_either_role_by_turns(base):
    """Each those that the role's own SFT has, in its order; the verifier's judge sampled solutions too."""
    both, generator, verifier = examples_of("--role", "both"), examples_of(), examples_of("--role", "verifier")
    task = make_task(parse(chat_sft, ["--role", "both", *MODEL]))
    sampled = [(task.problem("sft", i), "1+1:0;=0") for i in range(4)]
    both.sampled.extend(sampled)
    verifier.sampled.extend(sampled)
    assert [both(i) for i in range(40)] == [role(i // 2) for i in range(0, 40, 2) for role in (generator, verifier)]


def test_conversations_come_at_even_distances_and_demonstrations_in_between(base, chats):
    plain, mixed = examples_of(), examples_of("--conversations", chats, "--conversations-share", "0.25")
    tokenizer, kinds, num_demonstrations = mixed.tokenizer, [], 0
    rendered = [tokenizer.render_conversation(c["messages"] if isinstance(c, dict) else c, None) for c in CHATS]
    for i in range(48):
        example = mixed(i)
        is_chat = example is None or example in rendered
        kinds.append(is_chat)
        if not is_chat:
            assert example == plain(num_demonstrations)  # the same demonstrations, in the same order
            num_demonstrations += 1
    assert kinds == [False, False, False, True] * 12
    chosen = [mixed(i) for i in range(3, 48, 4)]
    # each pass has every conversation once; the one of 220 tokens does not fit 128 and gives None
    for epoch in range(4):
        assert sorted(map(str, chosen[3 * epoch: 3 * epoch + 3])) == sorted(map(str, [*rendered[:2], None]))


def test_a_share_of_the_demonstrations_are_second_attempts(base):
    """They stand after "solution|critique|problem" and are what stands after the problem without --demo-shares."""
    plain, mixed, second = (examples_of("--demo-shares", f"refine:{share}") for share in ("0", "0.5", "1"))
    num_second, critiques = 0, set()
    for i in range(64):
        (ids, mask), (ids_of_second, mask_of_second) = plain(i), second(i)
        assert mixed(i) in (plain(i), second(i))
        num_second += mixed(i) == second(i)
        at, at_second = mask.index(1), mask_of_second.index(1)
        assert ids_of_second[at_second:] == ids[at:] and 0 not in mask_of_second[at_second:]
        said = plain.tokenizer.decode(ids_of_second[2: at_second - 2])  # between the tokens that open and close a turn
        _, critique, problem = said.split("|")
        assert problem == plain.tokenizer.decode(ids[2: at - 2])
        critiques.add(critique)
    assert 16 < num_second < 48 and {"", "T", "F"} < critiques and len(critiques) > 6


def test_other_kinds_of_demonstrations_stand_after_their_own_prompts(base):
    """argue: "answer|problem", and a solution that comes to the answer; the rest are the solutions that they were."""
    plain, mixed = examples_of("--demo-shares", "argue:0"), examples_of("--demo-shares", "argue:0.5")
    num_argued = 0
    for i in range(64):
        (ids, mask), other = mixed(i), plain(i)
        if (ids, mask) == other:
            continue
        num_argued += 1
        at = mask.index(1)
        answer, problem = plain.tokenizer.decode(ids[2: at - 2]).split("|")
        assert problem == plain.tokenizer.decode(other[0][2: other[1].index(1) - 2])
        assert COMPACT.answer(plain.tokenizer.decode(ids[at:-1])) == answer
    assert 16 < num_argued < 48


def test_what_the_assistant_says_is_trained_and_the_calculators_output_is_not(base):
    tokenizer = Tokenizer.load(path_of("tokenizer"))
    ids, mask = tokenizer.render_conversation(CHATS[1]["messages"], None)
    special = tokenizer.special
    trained = [special("<|python_start|>"), *tokenizer.encode("12/60"), special("<|python_end|>")]
    expected = [(tokenizer.bos, 0), (special("<|user_start|>"), 0),
                *((t, 0) for t in tokenizer.encode("Be brief.\n\n12/60?")), (special("<|user_end|>"), 0),
                (special("<|assistant_start|>"), 0), *((t, 1) for t in tokenizer.encode("It is ")),
                *((t, 1) for t in trained),
                (special("<|output_start|>"), 0), *((t, 0) for t in tokenizer.encode("0.2")),
                (special("<|output_end|>"), 0), *((t, 1) for t in tokenizer.encode(".")), (tokenizer.assistant_end, 1)]
    assert list(zip(ids, mask, strict=True)) == expected
    with pytest.raises(ValueError, match="part of type 'code'"):
        tokenizer.render_parts([{"type": "code", "text": "x"}])
    with pytest.raises(ValueError, match="message 0 is a user's and no text"):
        tokenizer.render_conversation([{"role": "user", "content": [{"type": "text", "text": "x"}]}], None)


@pytest.mark.parametrize("line, complaint", [
    ("{", "line 2: is no json"),
    ('"text"', "line 2: something in it is empty or not of the type"),
    ('{"conversation": []}', "line 2: 'messages' is missing"),
    ('[{"role": "user", "content": "a"}]', "roles must alternate"),
    ('[{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]', "roles must alternate"),
    ('[{"role": "user", "content": 3}, {"role": "assistant", "content": "a"}]',
     "line 2: the content of message 1 must be a text"),
    ('[{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "a"}]',
     "line 2: the content of message 1 must be a text"),
    *[('[{"role": "user", "content": "a"}, {"role": "assistant", "content": [' + part + "]}]", words)
      for part, words in (('"a"', "line 2: something in it is"), ('{"type": "text"}', "line 2: 'text' is missing"),
                          ('{"text": "a"}', "line 2: 'type' is missing"),
                          ('{"type": ["text"], "text": "a"}', "line 2: something in it is"),
                          *((part, "line 2: the content of message 2 must be a text, or parts of type text, python, "
                                   "python_output with a text")
                            for part in ('{"type": "image", "text": "a"}', '{"type": "text", "text": 5}')))],
])
def test_a_bad_line_of_conversations_is_named(tmp_path, line, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(CHATS[0]) + "\n" + line + "\n")
    with pytest.raises(BadInput) as error:
        load_conversations([str(path)])
    assert str(path) in str(error.value) and complaint in str(error.value)


def test_a_file_named_twice_counts_twice(chats):
    assert load_conversations([chats, chats]) == 2 * load_conversations([chats])


def nll_of(model, examples: list) -> list[float]:
    """Of each trained token, by plain forwards."""
    return [nll for ids, mask in examples for nll, is_trained in zip(
        F.cross_entropy(model(torch.tensor([ids[:-1]]))[0], torch.tensor(ids[1:]), reduction="none").tolist(), mask[1:],
        strict=True) if is_trained]


def test_the_losses_are_the_mean_over_trained_tokens_of_what_is_trained_on_and_of_what_is_not(base, capsys):
    """Before the step of its examples, after it of the first problems of test_in, three of which are shown."""
    train("--model-tag", "a", "--num-steps", "1", "--seed", "5", "--eval-examples", "5")
    out = capsys.readouterr().out
    args = parse(chat_sft, ["--role", "generator", *MODEL, "--model-tag", "a", "--seed", "5"])
    tokenizer = Tokenizer.load(path_of("tokenizer"))
    model, _ = chat_sft.start_model(args, tokenizer, torch.device("cpu"))
    examples, task = chat_sft.Examples(args, make_task(args), tokenizer, 128), make_task(args)
    losses, record = nll_of(model, [examples(i) for i in range(8)]), metrics_of(base, "a")[0]
    assert record["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert record["trained_tokens"] == len(losses)
    demos = [task.solution_demo(task.problem("test_in", i), random.Random(f"5-generator-{i}")) for i in range(5)]
    prompts = [generator_prompt(tokenizer, task.fmt, task.problem("test_in", i).prompt) for i in range(5)]
    rests = [[*tokenizer.encode(demo), tokenizer.assistant_end] for demo in demos]
    trained = load_model("sft", "a", torch.device("cpu"), torch.float32)[0]
    losses = nll_of(trained, [(prompt + rest, [0] * len(prompt) + [1] * len(rest))
                              for prompt, rest in zip(prompts, rests, strict=True)])
    assert record["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert f"| held-out {record['val_loss']:.4f} |" in out and out.count("  sample: ...") == 3
    for prompt, rest in list(zip(prompts, rests, strict=True))[:3]:
        assert f"  sample: ...{tokenizer.spell(prompt)[-60:]!r} -> '" in out
        assert f"it was: {tokenizer.spell(rest)!r}" in out


def test_conversations_that_do_not_fit_are_counted(base, chats, capsys):
    train("--model-tag", "a", "--conversations", chats, "--conversations-share", "1")
    # 6 steps of 8 are 16 passes over 3 conversations, one of which is too long
    assert metrics_of(base, "a")[-1]["conversations_too_long"] == 16
    out = capsys.readouterr().out
    assert "16 conversations were longer than the context and left out" in out
    assert "there is no held-out loss: conversations alone" in out and metrics_of(base, "a")[-1]["val_loss"] is None
    assert out.count("  sample: ...") == 2 and "it was: 'hello<|assistant_end|>'" in out  # of those that it learned


def test_a_conversation_that_is_too_long_is_encoded_once_and_a_huge_one_never(base, tmp_path, monkeypatch):
    """A token of nanochat's own is a byte here: of 128 tokens there are 128 bytes at most."""
    path, encoded = tmp_path / "chats.jsonl", []
    rows = [[{"role": "user", "content": "a" * num}, {"role": "assistant", "content": "b"}]
            for num in (1, 126, 10 ** 6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    render = Tokenizer.render_conversation
    monkeypatch.setattr(Tokenizer, "render_conversation", lambda self, messages, context: (
        encoded.append(len(messages[0]["content"])) or render(self, messages, context)))
    examples = examples_of("--conversations", str(path), "--conversations-share", "1")
    assert [examples.conversation(row) is None for row in (0, 1, 2) * 3] == [False, True, True] * 3
    assert sorted(encoded) == [1, 1, 1, 126]


def test_conversations_none_of_which_fits_are_refused(base, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps(CHATS[2]) + "\n")
    num = demonstrations.NUM_FIRST // 2  # every other one is a conversation
    with pytest.raises(BadInput, match=f"long.jsonl: none of the first {num} fits the context of 128"):
        train("--model-tag", "a", "--conversations", str(path))
    assert list_steps("sft", "a") == []


def test_packed_rows_are_whole_contexts_and_learn(base, monkeypatch):
    shapes = []
    loss = chat_sft.supervised_loss
    monkeypatch.setattr(
        chat_sft, "supervised_loss",
        lambda model, ids, mask, n: shapes.append((ids.shape, int(mask.sum()))) or loss(model, ids, mask, n))
    train("--model-tag", "a", "--pack", "--num-steps", "12", "--micro-batch-tokens", "256", "--eval-examples",
          "0")
    records = metrics_of(base, "a")
    assert {shape[1] for shape, _ in shapes} == {128} and max(shape[0] for shape, _ in shapes) == 2
    # no example is lost in packing
    assert sum(trained for _, trained in shapes) == sum(r["trained_tokens"] for r in records)
    assert records[-1]["loss"] < records[0]["loss"]


def test_micro_batches_change_no_result(base, monkeypatch):
    shapes, loss = [], chat_sft.supervised_loss
    monkeypatch.setattr(chat_sft, "supervised_loss",
                        lambda model, ids, *rest: shapes.append(tuple(ids.shape)) or loss(model, ids, *rest))
    for tag, cost in (("a", 2 ** 20), ("b", 0)):
        monkeypatch.setattr(chat_sft, "TOKENS_PER_BATCH", {torch.float32: cost})
        train("--model-tag", tag, "--num-steps", "3", "--eval-examples", "0")
        assert len(shapes) > 3 if tag == "b" else len(shapes) == 3
        shapes.clear()
    for a, b in zip(metrics_of(base, "a"), metrics_of(base, "b"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_it_starts_from_a_base_model(base):
    model = GPT(GPTConfig(96, 265, 2, 2, 2, 32, "L"))
    model.init_weights(torch.Generator().manual_seed(1))
    save_model("base", "b", 30, model, {"user_config": {}})
    start = ["--model-tag", "a", "--from-stage", "base", "--from-tag", "b", "--matrix-lr", "0", "--embedding-lr", "0",
             "--num-steps", "1"]
    with pytest.raises(BadInput, match="--depth 1: the base model has 2, and keeps its shape"):
        train(*start)
    start += ["--depth", "2", "--sequence-len", "96"]
    train(*start)
    assert equal(weights("a"), list(model.parameters()))
    assert load_model("sft", "a", torch.device("cpu"), torch.float32)[0].config == model.config
    train("--model-tag", "a", "--from-stage", "sft", "--num-steps", "1", "--from-step", "1", "--depth", "2",
          "--sequence-len", "96", role="verifier")
    assert list_steps("sft", "a-ver") == [1] and not equal(weights("a-ver"), weights("a"))


@pytest.mark.parametrize("role", ["generator", "verifier", "both"])
def test_a_stopped_run_goes_on_to_the_same_weights(base, role, monkeypatch):
    more = {"generator": ["--model-tag", "whole"], "verifier": ["--model-tag", "tiny", "--verifier-tag", "whole"],
            "both": ["--model-tag", "whole", "--from-stage", "sft", "--from-tag", "first"]}[role]
    if role == "both":
        train("--model-tag", "first")
    train(*more, role=role)
    step = chat_sft.train_step

    def stopping(t, examples):
        if t.state["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(t, examples)

    monkeypatch.setattr(chat_sft, "train_step", stopping)
    again = [flag.replace("whole", "two") for flag in more]
    with pytest.raises(SystemExit) as exit_code:
        script_main(chat_sft.main, chat_sft.make_parser(), ["--role", role, *MODEL, *again])
    assert exit_code.value.code == 143 and list_steps("sft", "two") == [4]
    monkeypatch.setattr(chat_sft, "train_step", step)
    train(*again, "--resume-from-step", "auto", role=role)
    assert equal(weights("two"), weights("whole")) and list_steps("sft", "two") == [4, 6]
    same = ("step", "loss", "grad_norm", "trained_tokens")
    assert ([[r[k] for k in same] for r in metrics_of(base, "two")]
            == [[r[k] for k in same] for r in metrics_of(base, "whole")])


def test_what_was_trained_before_a_demonstration_that_does_not_fit_is_saved(base, monkeypatch, capsys):
    problem = Chain.problem
    train("--model-tag", "whole")
    with monkeypatch.context() as other:
        other.setattr(chat_sft.Examples, "check", lambda self: [])  # it looks at the first ones
        other.setattr(Chain, "solution_demo", lambda self, problem, rng: "1" * 200 if problem.index == 20 else "1=1;")
        with pytest.raises(BadInput, match="too short: demonstration 20 of .*; the model after step 2 is saved$"):
            train("--model-tag", "a")
    assert list_steps("sft", "a") == [2] and Chain.problem is problem
    train("--model-tag", "a", "--resume-from-step", "auto")
    assert list_steps("sft", "a") == [2, 6]


def test_a_sampled_solution_that_cannot_be_checked_is_left_out(base, monkeypatch, capsys):
    check = Chain.check
    monkeypatch.setattr(Chain, "check", lambda self, problem, text: (
        None if problem.index == chat_sft.SAMPLED_FROM + 1 else check(self, problem, text)))
    monkeypatch.setattr(storage.run, "TELL_EVERY", 0.0)
    train("--model-tag", "tiny", "--verifier-tag", "a", "--num-sampled", "4", role="verifier")
    out = capsys.readouterr().out
    assert "sampling 4 solutions to judge" in out and "step 0: 0 of 1 micro-batches are done" in out
    assert all(f"step    {step}/6 | loss" in out for step in range(6))  # where each takes longer than ten seconds
    assert "1 of 4 sampled solutions could not be checked and are left out" in out


def test_a_verifier_goes_on_with_the_generator_that_it_began_with_alone(base):
    more = ["--model-tag", "g", "--verifier-tag", "v", "--save-every", "2"]
    train("--model-tag", "g")
    train(*more, role="verifier")
    shutil.rmtree(base / "chatsft_checkpoints" / "g")
    train("--model-tag", "g", "--embedding-lr", "0.1")
    with pytest.raises(BadInput, match="g is not the generator whose solutions .*v was trained on: its SFT was done"):
        train(*more, "--resume-from-step", "2", role="verifier")


def test_without_a_generator_both_roles_learn_from_corrupted_solutions_alone(base, capsys):
    train("--model-tag", "a", "--num-steps", "1", role="both")
    assert "nothing is sampled without --from-stage sft" in capsys.readouterr().out and list_steps("sft", "a") == [1]


def test_a_tokenizer_that_is_in_use_is_not_replaced(base, monkeypatch):
    """Neither under training, which has no checkpoint yet; nor after its back, which its checkpoint tells."""
    step, seen = chat_sft.train_step, []
    other = ["--vocab-size", "266", *TASK_FLAGS]

    def replacing(*args):
        if not seen:
            for folder in (base / "chatsft_checkpoints").iterdir():
                if folder.name != "a":
                    shutil.rmtree(folder)  # models that were made before
            with pytest.raises(BadInput, match="chatsft_checkpoints/a, which is being made, and this would"):
                tok_train.main(parse(tok_train, other))
            shutil.rmtree(base / "tokenizer")
            seen.append(tok_train.main(parse(tok_train, other)))
        return step(*args)

    monkeypatch.setattr(chat_sft, "train_step", replacing)
    train("--model-tag", "a")
    with pytest.raises(BadInput, match="meta_000006.json: its model was made with another tokenizer than the one in"):
        train("--model-tag", "a", "--verifier-tag", "b", role="verifier")


def test_checkpoints_on_the_way_and_a_finished_run(base, capsys):
    train("--model-tag", "a", "--save-every", "2")
    assert list_steps("sft", "a") == [2, 4, 6]
    whole = weights("a")
    train("--model-tag", "a", "--resume-from-step", "2")
    out = capsys.readouterr().out
    assert f"continuing {base / 'chatsft_checkpoints' / 'a'} after step 2 with --save-every 2 -> -1\nits flags: " in out
    assert " --chain-modulus 3 " in out and " --role generator --model-tag a " in out and "--matrix-lr" not in out
    assert equal(weights("a"), whole)
    train("--model-tag", "a", "--resume-from-step", "auto")
    assert "is finished at step 6" in capsys.readouterr().out
    with pytest.raises(BadInput, match="--matrix-lr 0.1: .* was started with 0.004"):
        train("--model-tag", "a", "--resume-from-step", "auto", "--matrix-lr", "0.1")


def test_what_another_process_trained_meanwhile_stays(base, monkeypatch):
    """Two fresh starts at once: the first has ended when the second takes the lock."""
    muon_adamw = chat_sft.muon_adamw

    def slowly(*args):
        monkeypatch.setattr(chat_sft, "muon_adamw", muon_adamw)
        train("--model-tag", "a")
        return muon_adamw(*args)

    monkeypatch.setattr(chat_sft, "muon_adamw", slowly)
    with pytest.raises(BadInput, match="another process was at work on this run until just now"):
        train("--model-tag", "a", "--seed", "5")
    assert list_steps("sft", "a") == [6] and len(metrics_of(base, "a")) == 6


def test_other_problems_and_conversations_are_refused(base, tmp_path, monkeypatch):
    chats, problem = tmp_path / "chats.jsonl", Chain.problem
    chats.write_text('[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]\n')
    flags = ["--model-tag", "a", "--save-every", "2", "--conversations", str(chats)]
    train(*flags)
    with monkeypatch.context() as other:
        other.setattr(Chain, "problem", lambda self, split, index: problem(self, split, index + 1))
        with pytest.raises(BadInput, match="a was trained on other problems of task chain"):
            train(*flags, "--resume-from-step", "2")
    chats.write_text(chats.read_text() * 2)
    with pytest.raises(BadInput, match=r"chats.jsonl of 148 bytes: there was .* of 74 bytes when step 2 of a was"):
        train(*flags, "--resume-from-step", "2")


def test_a_named_run_has_its_logs_in_a_folder_of_its_own_which_no_other_run_takes(base):
    named = ["--model-tag", "a", "--run", "r", "--save-every", "2"]
    train(*named, "--num-steps", "4", "--lr-schedule", "linear", "--warmup-ratio", "0.5")
    folder, files = base / "chatsft_checkpoints" / "a", ("config.json", "metrics.jsonl")
    assert not any((folder / name).exists() for name in files) and (folder / "lock").exists()
    read = lambda: [json.loads(line) for line in (base / "runs" / "r" / "metrics.jsonl").read_text().splitlines()]
    before = read()
    assert [record["lr_factor"] for record in before] == pytest.approx([0.5, 1.0, 1.0, 0.55])
    assert json.loads((base / "runs" / "r" / "config.json").read_text())["model"] == "chatsft_checkpoints/a"
    train(*named, "--num-steps", "4", "--lr-schedule", "linear", "--warmup-ratio", "0.5", "--resume-from-step", "2")
    same = ("step", "loss", "val_loss")
    assert [[r.get(k) for k in same] for r in read()] == [[r.get(k) for k in same] for r in before]
    with pytest.raises(BadInput, match="--run r: .*r has the logs of chatsft_checkpoints/a: take another name"):
        train("--model-tag", "b", "--run", "r")
    with pytest.raises(BadInput, match="--run r: .*r has the logs of chatsft_checkpoints/a: take another name"):
        train_by_rl("--recipe", "grpo", "--run", "r", "--resume-from-step", "auto")
    with pytest.raises(BadInput, match="r: has the log of SFT or pretraining; there are reports of RL alone"):
        check_finished(str(base / "runs" / "r"))


def test_two_ranks_go_on_from_one(base):
    """What one rank saved, two continue: the examples are the same, and the losses agree to rounding."""
    train("--model-tag", "a", "--save-every", "2")
    losses = [r["loss"] for r in metrics_of(base, "a")]
    scripts_on_two_ranks(("scripts.chat_sft", ["--role", "generator", *MODEL, "--model-tag", "a", "--save-every", "2",
                                               "--resume-from-step", "2"]))
    assert [r["loss"] for r in metrics_of(base, "a")] == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("more, complaint", [
    (["--from-stage", "base"], "no checkpoint a in"),
    (["--conversations", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (["--conversations-share", "2"], "--conversations-share 2"),
    (["--demo-shares", "refine:1.5"], "--demo-shares refine:1.5: needs a share"),
    (["--demo-shares", "refine:nan"], "refine:nan: needs a share"), (["--demo-shares", "x:0.5"], "x:0.5: there are"),
    (["--demo-shares", "refine:0.6", "propose:0.6"], "together they are more"),
    (["--demo-shares", "refine:0.5", "refine:0.2"], "refine:0.2: there are"),
    (["--demo-shares", "reason:0.5"], "task chain has no reason_demo"),
    (["--role", "verifier", "--demo-shares", "refine:0.5"], "--demo-shares refine:0.5: are shares"),
    (["--from-tag", "../x"], "--from-tag ../x"),
    (["--role", "both", "--verifier-shared-layers", "1"], "--verifier-shared-layers 1: is of --role verifier"),
    (["--resume-from-step", "5"], "no step 5"),
])
def test_bad_input_is_one_line_before_anything_is_written(base, capsys, monkeypatch, more, complaint):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as exit_code:
        script_main(chat_sft.main, chat_sft.make_parser(), ["--role", "generator", *MODEL, "--model-tag", "a", *more])
    err = capsys.readouterr().err.strip().splitlines()
    assert exit_code.value.code == 2 and complaint in err[-1] and err[-1].startswith("error: ")
    assert not (base / "chatsft_checkpoints" / "a").exists()


def test_another_dtype_is_told(base, monkeypatch, capsys):
    train("--model-tag", "a", "--save-every", "2")
    monkeypatch.setenv("NANOCHAT_DTYPE", "bfloat16")
    train("--model-tag", "a", "--save-every", "2", "--resume-from-step", "2")
    assert "WARNING: step 2 of a was in float32 and goes on in bfloat16" in capsys.readouterr().out


def test_demonstrations_that_the_model_could_not_write_are_said(base, capsys):
    train("--model-tag", "a", "--max-new-tokens", "60", "--num-steps", "1")
    assert "longer than" not in capsys.readouterr().out
    train("--model-tag", "b", "--max-new-tokens", "9", "--num-steps", "1")
    examples = examples_of()
    long = sum(sum(examples(i)[1]) > 9 for i in range(demonstrations.NUM_FIRST))
    assert (f"{long} of the first {demonstrations.NUM_FIRST} demonstrations are longer than the --max-new-tokens 9 "
            in capsys.readouterr().out)
