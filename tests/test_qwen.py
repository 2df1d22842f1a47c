"""Imported models through the scripts: a random model of Qwen2.5's shape is written, imported, trained, continued,
exported, and opened by transformers."""
import itertools
import json
import os
import shutil

import pytest
import torch
from conftest import TASK_FLAGS, parse
from safetensors.torch import load_file, save_file
from test_bad_input import refused
from test_tango_rl import assert_same_weights, records, weights

from nanochat.checkpoint import list_steps, load_meta, load_model, save_model
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder
from nanochat.hf.tokenizer import HFTokenizer, load_tokenizer
from nanochat.storage.files import path_of
from scripts import (base_eval, base_train, chat_cli, chat_eval, chat_sft, hf_export, hf_import, hf_random, tango_rl,
                     tok_train, verifier_eval)

DATA = os.environ.get("NANOCHAT_DATA") or os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..",
                                                       "shared", "data")
REAL, CPU = os.path.join(DATA, "gsm8k"), torch.device("cpu")
SHAPE = ["--shape", "qwen2.5-0.5b", "--n-layer", "2", "--n-embd", "64"]
# A random model is never right and never in form, so rewards teach nothing: what moves the weights is the entropy
# bonus, and then the KL term.
RL = ["--task", "gsm8k", "--device-type", "cpu", "--model-tag", "q", "--max-new-tokens", "12",
      "--verifier-max-new-tokens", "12", "--examples-per-step", "2", "--num-samples", "2", "--eval-examples", "2",
      "--warmup-steps", "1", "--generator-steps", "1", "--num-steps", "2", "--save-every", "1", "--lr", "1e-3",
      "--entropy-coef", "0.01", "--keep", "0"]
ROLES = {"gen": "q", "ver": "q-ver"}  # and the tags that they start from
LAST = 4                              # v g v g
TEXTS = ["Weng earns $12 an hour.\n\nHow much for 50 minutes?", " 12/60 = 0.2; 0.2*50 = 10", "naïve 東京 🙂",
         "a <|im_end|> in a text"]
CHAIN = [*TASK_FLAGS, "--device-type", "cpu", "--model-tag", "c", "--max-new-tokens", "28", "--num-steps", "1",
         "--examples-per-step", "4"]
FROM_C = [*CHAIN, "--model-tag", "new", "--from-stage", "sft", "--from-tag", "c"]
TANGO = [*CHAIN, "--eval-examples", "4", "--num-samples", "4"]


def run(script, *flags) -> None:
    script.main(parse(script, [str(flag) for flag in flags]))


def model_of(stage: str, tag: str, step: int | None = None) -> Decoder:
    return load_model(stage, tag, CPU, torch.float32, step)[0]


def state_of(stage: str, tag: str, step: int | None = None) -> dict[str, torch.Tensor]:
    return model_of(stage, tag, step).state_dict()


def losses_of(base, tag: str) -> list[float]:
    return [json.loads(line)["loss"]
            for line in (base / "chatsft_checkpoints" / tag / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with two random models, and a base directory (NANOCHAT_BASE_DIR) with both imported and a run of them on
    some of GSM8K that saved every step."""
    if not os.path.isdir(REAL):
        pytest.skip(f"{REAL} is absent; set NANOCHAT_DATA to a folder with gsm8k/train.jsonl and test.jsonl")
    import datasets
    folder = tmp_path_factory.mktemp("qwen")
    for name in ("train", "test"):
        with open(f"{REAL}/{name}.jsonl") as f:
            (folder / f"{name}.jsonl").write_text("".join(itertools.islice(f, 300)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "datasets"))
        patch.setenv("NANOCHAT_BASE_DIR", str(folder / "base"))
        for seed, (role, tag) in enumerate(ROLES.items()):
            run(hf_random, *SHAPE, "--vocab-size", 1024, "--sequence-len", 1024, "--texts", folder / "train.jsonl",
                "--to", folder / role, "--seed", seed)
            run(hf_import, "--source", folder / role, "--model-tag", tag)
        run(tango_rl, *RL, "--gsm8k-data", folder, "--run", "r", "--recompute")
        yield folder


@pytest.fixture
def trained_copy(trained, tmp_path, monkeypatch):
    """A private copy of its base directory, set as NANOCHAT_BASE_DIR."""
    shutil.copytree(trained / "base", tmp_path / "base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


def test_an_import_has_the_weights_and_the_tokenizer_of_its_folder(trained):
    for role, tag in ROLES.items():
        stored = torch.load(path_of("sft", tag, "model_000000.pt"), weights_only=True)
        expected = load_file(trained / role / "model.safetensors")
        assert (stored.keys() - expected.keys() == {"lm_head.weight"}
                and torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"]))
        assert all(x.dtype == torch.bfloat16 and torch.equal(x, stored[name]) for name, x in expected.items())
    assert not torch.equal(state_of("sft", "q")["lm_head.weight"], state_of("sft", "q-ver")["lm_head.weight"])
    tokenizer, source = load_tokenizer(path_of("tokenizer")), HFTokenizer.load(str(trained / "gen"))
    assert (900 < tokenizer.vocab_size <= 1024 and tokenizer.equals(source)
            and tokenizer.render_prompt(TEXTS[0]) == source.render_prompt(TEXTS[0]))
    assert len(tokenizer.encode(TEXTS[0])) < 0.6 * len(TEXTS[0])  # it has learnt merges


def test_roles_move_in_turns_and_every_tensor_moves(trained):
    log = records(trained / "base", "r")
    assert [record["role"] for record in log] == ["verifier", "generator"] * 2
    for record in log:
        prefix, other = ("gen", "ver") if record["role"] == "generator" else ("ver", "gen")
        assert (record[f"{prefix}/grad_norm"] > 0 and record[f"{prefix}/skipped"] == 0
                and record[f"{prefix}/rollout_logprobs_diff_max"] < 1e-4)
        before, after = (state_of("rl", f"r-{other}", step) if step else state_of("sft", ROLES[other])
                         for step in (record["step"], record["step"] + 1))
        assert_same_weights(before, after)
    for role, tag in ROLES.items():
        before, after = state_of("sft", tag), state_of("rl", f"r-{role}", LAST)
        assert [name for name in before if torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("flag", ["--recompute", "--no-recompute"])
def test_resume_continues_bit_for_bit_also_with_activations_kept(trained, trained_copy, flag):
    run(tango_rl, *RL, "--gsm8k-data", trained, "--run", "r", flag, "--resume-from-step", 2)
    assert len(records(trained_copy, "r")) == LAST and records(trained_copy, "r") == records(trained / "base", "r")
    assert records(trained_copy, "r", "rollouts.jsonl") == records(trained / "base", "r", "rollouts.jsonl")
    assert_same_weights(weights(trained_copy, "r", LAST), weights(trained / "base", "r", LAST))


@pytest.mark.parametrize("head, layers", [("frozen", 1), ("prompt", None)])
def test_an_imported_model_is_both_roles_on_one_trunk(trained, trained_copy, head, layers):
    """With a tied head too, which the verifier unties where it has one of its own; and the run goes on bit for bit."""
    flags = [*RL, "--gsm8k-data", trained, "--run", "one", "--verifier-tag", "q", "--verifier-head", head, "--kl-coef",
             "0.01", *(["--verifier-shared-layers", layers] if layers else [])]
    run(tango_rl, *flags)
    final = weights(trained_copy, "one", LAST)
    for i in range(2):
        name = f"model.layers.{i}.mlp.up_proj.weight"
        assert torch.equal(final[f"gen/{name}"], final[f"ver/{name}"]) == (i < (layers or 2))
    ours, theirs = final["gen/model.embed_tokens.weight"], final["ver/model.embed_tokens.weight"]
    assert torch.equal(ours, theirs)
    assert torch.equal(final["gen/lm_head.weight"], ours)  # tied
    assert torch.equal(final["ver/lm_head.weight"], theirs) == (head == "prompt")
    log = records(trained_copy, "one")
    run(tango_rl, *flags, "--resume-from-step", 2)
    assert records(trained_copy, "one") == log
    assert_same_weights(weights(trained_copy, "one", LAST), final)


@pytest.mark.parametrize("role", ROLES)
def test_transformers_opens_an_export(trained, trained_copy, tmp_path, role):
    """Its logits, ids and chat turns are those of the checkpoint; imported again it is the checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder = tmp_path / "export"
    run(hf_export, "--model-tag", f"r-{role}", "--to", folder, "--dtype", "float32")
    theirs, model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), model_of("rl", f"r-{role}")
    their_tokenizer, tokenizer = AutoTokenizer.from_pretrained(folder), load_tokenizer(path_of("tokenizer"))
    assert type(theirs).__name__ == "Qwen2ForCausalLM"
    assert (theirs.generation_config.eos_token_id == tokenizer.stop_tokens
            == [tokenizer.ids[name] for name in ("<|im_end|>", "<|endoftext|>")])
    for text in TEXTS:
        assert tokenizer.encode(text) == their_tokenizer.encode(text, add_special_tokens=False,
                                                                split_special_tokens=True)
    chat = [{"role": "user", "content": TEXTS[0]}]
    prompt = tokenizer.render_prompt(TEXTS[0])
    assert prompt == their_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        ids = torch.tensor([prompt])
        logits, at_start = model(ids), model_of("sft", ROLES[role])(ids)
        assert (logits - theirs(ids).logits).abs().max() < 1e-5 < 1e-2 < (logits - at_start).abs().max()
    run(hf_import, "--source", folder, "--model-tag", "again")
    assert_same_weights(torch.load(path_of("sft", "again", "model_000000.pt"), weights_only=True), model.state_dict())
    run(hf_import, "--source", folder, "--model-tag", "low", "--num-layers", 1)
    from transformers import AutoConfig
    low = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, num_hidden_layers=1))
    low.load_state_dict({name: x for name, x in theirs.state_dict().items() if ".layers.1." not in name})
    with torch.no_grad():
        assert (model_of("sft", "low")(ids) - low(ids).logits).abs().max() < 1e-5


def test_an_export_of_an_earlier_step_is_in_bf16_unless_told_otherwise(trained, trained_copy, tmp_path, capsys):
    run(hf_export, "--model-tag", "r-gen", "--step", 2, "--to", tmp_path / "export")
    said, _, card = capsys.readouterr().out.partition("\n\n")
    assert said == f"{path_of('rl', 'r-gen')} at step 2, float32 -> {tmp_path / 'export'}, bfloat16"
    assert card == (tmp_path / "export" / "README.md").read_text() + "\n" and "The system message" not in card
    assert "to the generator:\n\n    {problem}\n\n    Solve this step" in card and "to the verifier" not in card
    assert "None were measured at this step" in card
    exported, expected = load_file(tmp_path / "export" / "model.safetensors"), state_of("rl", "r-gen", 2)
    assert all(x.dtype == torch.bfloat16 and torch.equal(x, expected[name].bfloat16()) for name, x in exported.items())
    assert len(exported) == len(expected) - 1  # the head is the embedding
    run(hf_export, "--stage", "sft", "--model-tag", "q", "--to", tmp_path / "untrained")
    assert "trained on no task" in (tmp_path / "untrained" / "README.md").read_text()
    assert ((tmp_path / "untrained" / "model.safetensors").read_bytes()
            == (trained / "gen" / "model.safetensors").read_bytes())


def test_the_card_of_a_run_tells_what_was_trained_on_what_and_its_scores(trained, trained_copy):
    meta, _ = load_meta(path := path_of("rl", "r-ver", f"meta_{LAST:06d}.json"))
    assert [(record["stage"], record["tag"]) for record in meta["history"]] == [("sft", "q-ver")]
    card, origin = hf_export.model_card("rl", "r-ver", meta, path)
    assert origin == {"name": None, "base_models": []} and meta["history"][0]["imported_from"] == str(trained / "ver")
    for words in ("- began as: `ver`", "**RL** of `r-ver`, step 4: reinforcement learning, recipe `tango` (RL Tango",
                  "https://arxiv.org/abs/2505.15034", "- role: `verifier`", "- task: `gsm8k`", "- seed: `0`",
                  f"- commit: `{meta['commit']}`", "\n    --max-new-tokens 12\n", "on at most 2 held-out problems",
                  "\n| `verifier parse failures` | ", "to the verifier:\n\n    Problem: {problem}"):
        assert words in card, words
    assert "to the generator" not in card and "--seed" not in card


def test_all_scripts_take_an_imported_model(tmp_path, monkeypatch, capsys):
    """SFT of both roles, stopped halfway and continued; RL; then chat_eval, verifier_eval and chat_cli."""
    base = tmp_path / "base"
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    run(hf_random, *SHAPE, "--vocab-size", 512, "--sequence-len", 256, "--to", tmp_path / "random")
    run(hf_import, "--source", tmp_path / "random", "--model-tag", "start")
    before = state_of("sft", "start")
    sft = [*CHAIN, "--from-stage", "sft", "--from-tag", "start", "--num-sampled", 8, "--examples-per-step", 8,
           "--keep", 0]
    run(chat_sft, *sft, "--role", "generator", "--num-steps", 3, "--save-every", 2)
    losses, straight = losses_of(base, "c"), state_of("sft", "c", 3)
    assert list_steps("sft", "c") == [2, 3] and not any(torch.equal(before[name], straight[name]) for name in before)
    os.remove(path_of("sft", "c", "model_000003.pt"))
    run(chat_sft, *sft, "--role", "generator", "--num-steps", 3, "--save-every", 2, "--resume-from-step", "auto",
        "--recompute")
    assert losses_of(base, "c") == losses and len(losses) == 3
    assert_same_weights(state_of("sft", "c", 3), straight)
    run(chat_sft, *sft, "--role", "verifier", "--num-steps", 1)

    run(tango_rl, *TANGO, "--run", "g", "--recipe", "grpo", "--num-steps", 2, "--lr", "1e-3")
    history = load_meta(path_of("rl", "g-gen", "meta_000002.json"))[0]["history"]
    assert [(record["tag"], record["step"]) for record in history] == [("start", 0), ("c", 3)]
    assert history[0]["imported_from"] == str(tmp_path / "random") and history[1]["user_config"]["role"] == "generator"
    log = records(base, "g")
    assert [record["role"] for record in log] == ["generator"] * 2 and all(record["gen/skipped"] == 0 for record in log)
    capsys.readouterr()
    run(chat_eval, "-i", "rl", "-g", "g-gen", "-x", 4, "--device-type", "cpu")
    out = capsys.readouterr().out
    assert "g-gen at step 2" in out and "4 problems | pass@1" in out
    run(verifier_eval, "--verifier-tag", "c-ver", "--generator-tag", "g-gen", "--generator-source", "rl",
        "--num-samples", 2, "--max-problems", 2,
        "--verifier-max-new-tokens", 20, "--device-type", "cpu", "--out", tmp_path / "scores.json")
    assert json.loads((tmp_path / "scores.json").read_text())["best_of_n"]
    capsys.readouterr()
    run(chat_cli, "-i", "rl", "-g", "g-gen", "--verifier", "c-ver", "-p", "1+2", "-m", 20, "-t", 0, "--device-type",
        "cpu")
    out = capsys.readouterr().out
    assert "format compact" in out and "Assistant: " in out and "verdict: " in out


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base directory with an imported pair, whose tokens are bytes, and a model of nanochat's own; the pair's folder
    beside it."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder / "base"))
        run(hf_random, *SHAPE, "--vocab-size", 512, "--sequence-len", 256, "--to", folder / "random")
        for tag in ("c", "c-ver"):
            run(hf_import, "--source", folder / "random", "--model-tag", tag)
        save_model("sft", "own", 0, GPT(GPTConfig(sequence_len=256, vocab_size=300, n_layer=1, n_head=2, n_kv_head=2,
                                                  n_embd=32, window_pattern="L")), {})
        for name, text in (("a.txt", "ever and ever and ever\n" * 20), ("b.txt", "never and never\n" * 20)):
            (folder / name).write_text(text)
        run(hf_random, *SHAPE, "--vocab-size", 512, "--texts", folder / "a.txt", "--to", folder / "other")
    return folder


@pytest.fixture
def made_copy(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "made")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "made" / "base"))
    return tmp_path / "made"


def test_weights_that_are_not_finite_are_not_imported(capsys, made_copy):
    path = made_copy / "random" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    line = refused(capsys, made_copy, hf_import, "--source", str(made_copy / "random"), "--model-tag", "d")
    assert "norm.weight holds numbers that are not finite" in line


@pytest.mark.parametrize("script, flags, words", [
    (hf_import, ["--source", "random", "--model-tag", "c"], ["--model-tag c", "has a checkpoint already"]),
    (hf_import, ["--source", "other", "--model-tag", "d"], ["other", "its tokenizer is not the one in"]),
    (hf_import, ["--source", "nowhere", "--model-tag", "d"], ["nowhere", "no such folder"]),
    (hf_import, ["--source", "random", "--model-tag", "d", "--num-layers", "3"], ["--num-layers 3", "has 2"]),
    (tango_rl, [*TANGO, "--calculator"], ["--calculator", "imported"]),
    (tango_rl, [*TANGO, "--verifier-tag", "own", "--recompute"], ["--recompute", "verifier is nanochat's own"]),
    (hf_export, ["--stage", "sft", "--model-tag", "own", "--to", "new"], ["--model-tag own", "nanochat's own model"]),
    (hf_export, ["--stage", "sft", "--model-tag", "c", "--to", "other"], ["--to ", "exists already"]),
    (hf_export, ["--model-tag", "c", "--to", "new"], ["no checkpoint c"]),
    (hf_random, [*SHAPE, "--to", "other"], ["--to ", "exists already"]),
    (hf_random, [*SHAPE, "--to", "new", "--texts", "nothing.txt"], ["nothing.txt", "no such file"]),
    (chat_sft, [*FROM_C, "--role", "generator", "--n-embd", "128"],
     ["--n-embd 128", "the sft model has 64"]),
    (chat_sft, [*FROM_C, "--role", "generator", "--depth", "3"],
     ["--depth 3", "the sft model has 2"]),
    (chat_sft, [*CHAIN, "--role", "generator", "--model-tag", "new", "--recompute"], ["--recompute", "nanochat's own"]),
    (tok_train, TASK_FLAGS, ["imported", "tokenizer"]),
    (base_eval, ["--device-type", "cpu", "--model-tag", "c"], ["base/tokenizer holds an imported tokenizer"]),
    (chat_eval, ["-i", "sft", "-g", "c", "--device-type", "cpu"], ["c: the checkpoint names no task"]),
    (base_train, ["--data", "a.txt", "b.txt", "--depth", "1", "--device-type", "cpu"], ["imported", "tokenizer"]),
])
def test_what_does_not_go_with_imported_models_is_one_line(capsys, made_copy, monkeypatch, script, flags, words):
    monkeypatch.chdir(made_copy)
    line = refused(capsys, made_copy, script, *flags)
    assert line.startswith("error: ") and "\n" not in line
    for word in words:
        assert word in line, line


def test_a_second_import_says_which_template_and_stop_tokens_are_not_taken(capsys, made_copy):
    kept, other = made_copy / "base" / "tokenizer", made_copy / "random"
    import_it = lambda tag: run(hf_import, "--source", other, "--model-tag", tag)
    capsys.readouterr()
    import_it("same")
    assert "WARNING" not in capsys.readouterr().out
    path = other / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ messages[0].content }}"}))
    for template in other.glob("chat_template.jinja"):
        template.unlink()
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    import_it("changed")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING"))
    for words in (f"--source {other}", f"the tokenizer in {kept} is kept", f"the chat template of {path} in place of",
                  str(kept / "tokenizer_config.json"), "the stop tokens"):
        assert words in line, line
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before and list_steps("sft", "changed") == [0]


def test_an_import_that_was_killed_is_made_again(capsys, made_copy, monkeypatch):
    """One into a directory with a tokenizer of ours is refused."""
    folder = made_copy / "base" / "tokenizer"
    expected = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "tokenizer.json").rename(folder / "tokenizer.json.tmp")
    (folder / "tokenizer_config.json").write_text("half")
    run(hf_import, "--source", made_copy / "random", "--model-tag", "d")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(made_copy / "fresh"))
    run(tok_train, *TASK_FLAGS)
    capsys.readouterr()
    assert "its tokenizer is not the one in" in refused(capsys, made_copy, hf_import, "--source",
                                                        str(made_copy / "random"), "--model-tag", "c")
