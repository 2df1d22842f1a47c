"""
Checkpoints: what is written comes back bit for bit, and what is missing, damaged or hostile is named.

    python -m pytest tests/test_checkpoint.py -q
"""
import json
import os

import pytest
import torch

from nanochat import checkpoint
from nanochat.checkpoint import (default_tag, find_step, list_steps, list_tags, load_file, load_model, load_optimizer,
                                 load_state, save_atomic, save_model, save_optimizer, save_state, saved_steps)
from nanochat.common import BadInput, CannotWrite
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import adamw
from nanochat.storage.files import path_of
from nanochat.weights import local_optimizer_state

FP32 = torch.float32


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return tmp_path


def tiny_model(seed=0, n_layer=2, n_embd=48, window_pattern="SL"):
    model = GPT(GPTConfig(64, 265, n_layer, 2, 1, n_embd, window_pattern))
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draw)
    return model


def saved_model(tag="d2", step=7, stage="sft", **shape):
    model = tiny_model(**shape)
    save_model(stage, tag, step, model, {"user_config": {"seed": 3}})
    return model


def edit_file(path, change):
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def refusal(call, *args):
    """The one line of the BadInput that the call raises."""
    with pytest.raises(BadInput) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_comes_back_bit_for_bit(base):
    model = saved_model()
    assert sorted(os.listdir(base / "chatsft_checkpoints" / "d2")) == ["meta_000007.json", "model_000007.pt"]
    loaded, meta = load_model("sft", "d2", "cpu", FP32)
    assert loaded.config == model.config and list(loaded.state_dict()) == list(model.state_dict())
    assert all(torch.equal(p, model.state_dict()[name]) for name, p in loaded.state_dict().items())
    assert meta["step"] == 7 and meta["user_config"] == {"seed": 3}
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids), model(ids))


def test_the_meta_holds_upstreams_model_config(base):
    saved_model()
    meta = json.loads((base / "chatsft_checkpoints" / "d2" / "meta_000007.json").read_text())
    assert meta["model_config"] == {"sequence_len": 64, "vocab_size": 265, "n_layer": 2, "n_head": 2, "n_kv_head": 1,
                                    "n_embd": 48, "window_pattern": "SL"}


@pytest.mark.parametrize("stage, folder",
                         [("base", "base_checkpoints"), ("sft", "chatsft_checkpoints"), ("rl", "chatrl_checkpoints")])
def test_stages_keep_upstreams_folders(base, stage, folder):
    saved_model(stage=stage)
    assert (base / folder / "d2" / "model_000007.pt").exists() and list_tags(stage) == ["d2"]


def test_bf16_weights_become_fp32_masters_and_activations_the_asked_dtype(base):
    model = saved_model()
    edit_file(base / "chatsft_checkpoints/d2/model_000007.pt",
              lambda state: state.update({name: p.bfloat16() for name, p in state.items()}))
    loaded, _ = load_model("sft", "d2", "cpu", torch.bfloat16)
    assert all(torch.equal(p, model.state_dict()[name].bfloat16().float()) for name, p in loaded.state_dict().items())
    assert loaded.trunk(torch.tensor([[1]])).dtype == torch.bfloat16


def test_names_written_by_torch_compile_are_understood(base):
    model = saved_model()
    path = base / "chatsft_checkpoints/d2/model_000007.pt"
    torch.save({f"_orig_mod.{name}": p for name, p in model.state_dict().items()}, path)
    loaded, _ = load_model("sft", "d2", "cpu", FP32)
    assert all(torch.equal(p, model.state_dict()[name]) for name, p in loaded.state_dict().items())


ALL_NAMES = list(tiny_model().state_dict())


@pytest.mark.parametrize("name", [name for name in ALL_NAMES if name not in ("resid_lambdas", "x0_lambdas")])
def test_a_missing_tensor_is_named(base, name):
    saved_model()
    edit_file(base / "chatsft_checkpoints/d2/model_000007.pt", lambda state: state.pop(name))
    message = refusal(load_model, "sft", "d2", "cpu", FP32)
    assert f"{name} is missing" in message and "model_000007.pt" in message


def test_older_checkpoints_may_lack_three_keys(base):
    model = saved_model()
    folder = base / "chatsft_checkpoints/d2"
    edit_file(folder / "model_000007.pt", lambda state: (state.pop("resid_lambdas"), state.pop("x0_lambdas")))
    meta = json.loads((folder / "meta_000007.json").read_text())
    del meta["model_config"]["window_pattern"]
    (folder / "meta_000007.json").write_text(json.dumps(meta))
    loaded, _ = load_model("sft", "d2", "cpu", FP32)
    assert (loaded.resid_lambdas.tolist() == [1, 1] and loaded.x0_lambdas.tolist() == [0, 0]
            and loaded.config.window_pattern == "L")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("key", ["model_config", "n_layer", "n_head", "sequence_len"])
def test_a_meta_without_a_needed_key_is_refused_by_name(base, key):
    saved_model()  # with 2 heads: under GPTConfig's 6 its tensors have the same shapes
    path = base / "chatsft_checkpoints/d2/meta_000007.json"
    meta = json.loads(path.read_text())
    (meta if key in meta else meta["model_config"]).pop(key)
    path.write_text(json.dumps(meta))
    message = refusal(load_model, "sft", "d2", "cpu", FP32)
    assert key in message and "meta_000007.json" in message


@pytest.mark.parametrize("change, words", [
    ({"step": None}, "step must be a number"), ({"user_config": None}, "step must be a number, and user_config"),
    ({"n_head": 0}, "n_head 0: must be a number from 1 to"), ({"n_layer": -1}, "n_layer -1: must be"),
    ({"sequence_len": 10 ** 30}, "sequence_len 10{30}: must be"), ({"n_embd": "x"}, "n_embd 'x': must be"),
    ({"window_pattern": 5}, "model_config describes no model"),
])
def test_a_meta_of_no_model_is_refused(base, change, words):
    saved_model()
    path = path_of("sft", "d2", "meta_000007.json")
    with open(path) as f:
        meta = json.load(f)
    part = meta if change.keys() <= meta.keys() else meta["model_config"]
    part |= change
    with open(path, "w") as f:
        json.dump(meta, f)
    with pytest.raises(BadInput, match=f"meta_000007.json.*{words}"):
        load_model("sft", "d2", "cpu", FP32)


def test_a_damaged_meta_is_refused_by_name(base):
    saved_model()
    (base / "chatsft_checkpoints/d2/meta_000007.json").write_text('{"step": 7,')
    assert "meta_000007.json" in refusal(load_model, "sft", "d2", "cpu", FP32)


def test_an_extra_tensor_is_named(base):
    saved_model()
    gate = {"transformer.h.0.attn.ve_gate.weight": torch.zeros(1, 12)}
    edit_file(base / "chatsft_checkpoints/d2/model_000007.pt", lambda state: state.update(gate))
    assert "transformer.h.0.attn.ve_gate.weight" in refusal(load_model, "sft", "d2", "cpu", FP32)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(base):
    saved_model()
    edit_file(base / "chatsft_checkpoints/d2/model_000007.pt",
              lambda state: state.update({"smear_gate.weight": torch.zeros(1, 12)}))
    message = refusal(load_model, "sft", "d2", "cpu", FP32)
    assert all(part in message for part in ("smear_gate.weight", "(1, 12)", "(1, 24)"))


class Payload:
    """Pickles as a call that creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: {"lm_head.weight": evil},
                                  lambda evil: [torch.zeros(2), evil]])
def test_a_hostile_file_is_refused_and_runs_nothing(base, wrap):
    saved_model()
    path = base / "chatsft_checkpoints/d2/model_000007.pt"
    torch.save(wrap(Payload(base / "owned")), path)
    assert str(path) in refusal(load_file, str(path))
    assert str(path) in refusal(load_model, "sft", "d2", "cpu", FP32)
    assert not (base / "owned").exists()
    torch.load(path, weights_only=False)
    assert (base / "owned").exists()  # the payload is a real one


@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[:100],
                                    lambda whole: whole[: len(whole) // 2], lambda whole: b"\n" * 500])
def test_a_damaged_file_is_refused_by_name(base, damage):
    saved_model()
    path = base / "chatsft_checkpoints/d2/model_000007.pt"
    path.write_bytes(damage(path.read_bytes()))
    assert str(path) in refusal(load_model, "sft", "d2", "cpu", FP32)


def test_a_file_that_holds_no_state_dict_is_refused_by_name(base):
    saved_model()
    path = base / "chatsft_checkpoints/d2/model_000007.pt"
    for content in ([1, 2], {"step": 3, "model": {}}):
        torch.save(content, path)
        assert str(path) in refusal(load_model, "sft", "d2", "cpu", FP32)


def test_an_absent_file_is_named(base):
    assert refusal(load_file, str(base / "no.pt")) == f"{base / 'no.pt'} is missing"


def test_the_default_tag_is_the_deepest_and_no_verifier():
    for tag in ("d4", "d12", "d8", "d20-ver", "d30x", "mine"):
        saved_model(tag)
    assert default_tag("sft") == "d12"  # the largest number, not the last word


def test_without_a_default_tag_the_error_lists_what_there_is(base):
    message = refusal(default_tag, "sft")
    assert "none" in message and str(base / "chatsft_checkpoints") in message
    saved_model("d4-ver")
    saved_model("mine")
    message = refusal(default_tag, "sft")
    assert "d4-ver, mine" in message


def test_an_unknown_tag_is_refused_with_those_there_are():
    saved_model("d4")
    saved_model("mine")
    message = refusal(load_model, "sft", "d5", "cpu", FP32)
    assert "d5" in message and "d4, mine" in message
    assert "none" in refusal(load_model, "rl", "d4", "cpu", FP32)


def test_the_latest_step_is_taken_and_an_unknown_one_refused():
    models = {step: saved_model(step=step, seed=step) for step in (900, 1000, 20, 21, 300, 7, 5, 22)}
    assert list_steps("sft", "d2") == [5, 7, 20, 21, 22, 300, 900, 1000] and find_step("sft", "d2") == 1000
    for asked, step in [(None, 1000), (20, 20)]:
        assert torch.equal(load_model("sft", "d2", "cpu", FP32, asked)[0].lm_head.weight, models[step].lm_head.weight)
    message = refusal(load_model, "sft", "d2", "cpu", FP32, 23)
    assert "step 23" in message and "5, 7, 20, 21, 22, 300, 900, 1000" in message


def test_a_model_without_its_meta_does_not_count(base):
    saved_model(step=1)
    saved_model(step=2)
    os.remove(base / "chatsft_checkpoints/d2/meta_000002.json")
    assert list_steps("sft", "d2") == [1] and find_step("sft", "d2") == 1
    os.remove(base / "chatsft_checkpoints/d2/meta_000001.json")
    assert list_tags("sft") == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(base, monkeypatch):
    path = base / "folder" / "file.pt"
    save_atomic({"x": torch.ones(2)}, str(path))

    def full_disk(obj, f):
        f.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full_disk)
    with pytest.raises(CannotWrite, match="cannot be written: No space left"):
        save_atomic({"x": torch.zeros(2)}, str(path))
    with pytest.raises(CannotWrite, match="cannot be written: No space left"):
        save_atomic({"x": torch.zeros(2)}, str(base / "folder" / "new.pt"))
    assert load_file(str(path))["x"].tolist() == [1, 1]
    assert os.listdir(base / "folder") == ["file.pt"]


def test_a_failed_model_write_makes_no_checkpoint(monkeypatch):
    def full_disk(obj, f):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full_disk)
    with pytest.raises(CannotWrite, match="cannot be written: No space left"):
        saved_model()
    assert list_tags("sft") == []


def trained(model, num_steps=2):
    optimizer = adamw(model.parameters(), 1e-3)
    for _ in range(num_steps):
        model(torch.tensor([[1, 2, 3]])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_an_optimizer_comes_back_bit_for_bit(base):
    model = tiny_model()
    optimizer = trained(model)
    save_optimizer("rl", "run-gen", 5, local_optimizer_state(optimizer))
    assert os.listdir(base / "chatrl_checkpoints/run-gen") == ["optim_000005_rank0.pt"]
    restored = adamw(model.parameters(), 1e-3)
    load_optimizer("rl", "run-gen", 5, restored)
    before, after = optimizer.state_dict(), restored.state_dict()
    assert after["param_groups"] == before["param_groups"] and len(after["state"]) == len(list(model.parameters()))
    for index, entry in before["state"].items():
        assert entry["step"] == 2 and all(torch.equal(value, after["state"][index][key])
                                          for key, value in entry.items())


def test_a_missing_optimizer_is_named():
    assert "optim_000005_rank0.pt is missing" in refusal(load_optimizer, "rl", "run-gen", 5,
                                                         adamw(tiny_model().parameters(), 1e-3))


@pytest.mark.parametrize("other", [dict(n_layer=3), dict(n_embd=64)])
def test_an_optimizer_of_other_parameters_is_refused(other):
    save_optimizer("rl", "run-gen", 5, local_optimizer_state(trained(tiny_model())))
    assert "optim_000005_rank0.pt" in refusal(load_optimizer, "rl", "run-gen", 5,
                                              adamw(tiny_model(**other).parameters(), 1e-3))


def test_a_runs_state_comes_back_and_makes_its_step_valid():
    assert saved_steps("tango") == []
    state = {"step": 12, "judged_pool": [[3, [1, 2], True]], "torch_rng": torch.get_rng_state(), "balanced_acc": None}
    for step in (12, 3):
        save_state("tango", step, state)
    assert saved_steps("tango") == [3, 12]
    loaded = load_state("tango", 12)
    assert torch.equal(loaded.pop("torch_rng"), state.pop("torch_rng")) and loaded == state


def test_an_unknown_step_of_a_run_is_refused_with_those_there_are():
    assert "none" in refusal(load_state, "tango", 4)
    for step in (3, 12):
        save_state("tango", step, {})
    message = refusal(load_state, "tango", 4)
    assert "step 4" in message and "3, 12" in message


# Where things are

LAYOUTS = {
    "today's": ({},
                {"sft": "chatsft_checkpoints/d2/model_000007.pt", "base": "base_checkpoints/d2",
                 "rl": "chatrl_checkpoints/d2", "runs": "runs/x"},
                "tokenizer"),
    "announced": ({"NANOCHAT_EXPERIMENT": "mine"},
                  {"sft": "experiments/mine/d2/sft/model_000007.pt", "base": "experiments/mine/d2/base",
                   "rl": "experiments/mine/d2/rl", "runs": "experiments/mine/runs/x"},
                  "experiments/mine/tokenizer"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_function_knows_both_layouts(tmp_path, monkeypatch, name):
    """The announced one is upstream's pull request 800: experiments/<name>/<tag>/<stage>."""
    environment, expected, tokenizer = LAYOUTS[name]
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    got = {"sft": path_of("sft", "d2", "model_000007.pt"), "base": path_of("base", "d2"), "rl": path_of("rl", "d2"),
           "runs": path_of("runs", "x")}
    assert got == {kind: str(tmp_path / path) for kind, path in expected.items()}
    assert path_of("tokenizer") == str(tmp_path / tokenizer)


def test_the_announced_layout_is_listed_loaded_and_kept_apart(base, monkeypatch):
    model = saved_model()
    monkeypatch.setenv("NANOCHAT_EXPERIMENT", "mine")
    assert list_tags("sft") == []
    save_model("sft", "d3", 5, model, {})
    save_model("base", "d4", 5, model, {})
    os.makedirs(path_of("runs", "d9"))
    assert (list_tags("sft"), list_tags("base"), default_tag("sft")) == (["d3"], ["d4"], "d3")
    loaded, meta = load_model("sft", "d3", "cpu", FP32)
    assert meta["step"] == 5 and all(torch.equal(a, b)
                                     for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    monkeypatch.setenv("NANOCHAT_EXPERIMENTS_DIR", str(base / "elsewhere"))
    assert list_tags("sft") == [] and path_of("base", "d1") == str(base / "elsewhere" / "mine" / "d1" / "base")
    monkeypatch.setenv("NANOCHAT_EXPERIMENT", "../x")
    with pytest.raises(BadInput, match="NANOCHAT_EXPERIMENT ../x"):
        path_of("tokenizer")
