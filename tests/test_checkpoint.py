"""Checkpoints: what is written comes back bit for bit, and what is missing, damaged or hostile is named."""
import json
import os
import re

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


FOLDER = "chatsft_checkpoints/d2"


def saved_model(tag="d2", step=7, stage="sft", **shape):
    model = tiny_model(**shape)
    save_model(stage, tag, step, model, {"user_config": {"seed": 3}})
    return model


def edit_model(base, change):
    path = base / FOLDER / "model_000007.pt"
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def edit_meta(base, change):
    """Makes `change` to the part of the meta that has such keys."""
    path = base / FOLDER / "meta_000007.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def load(step=None):
    return load_model("sft", "d2", "cpu", FP32, step)[0]


def same(a, b) -> bool:
    return all(torch.equal(p, b[name]) for name, p in a.items())


def refusal(call, *args):
    """The one line of the BadInput that the call raises."""
    with pytest.raises(BadInput) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_comes_back_bit_for_bit(base):
    """In upstream's folders, its configuration as upstream's."""
    model = saved_model()
    assert sorted(os.listdir(base / FOLDER)) == ["meta_000007.json", "model_000007.pt"]
    loaded, meta = load_model("sft", "d2", "cpu", FP32)
    assert loaded.config == model.config and list(loaded.state_dict()) == list(model.state_dict())
    assert same(loaded.state_dict(), model.state_dict())
    assert meta["step"] == 7 and meta["user_config"] == {"seed": 3}
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids), model(ids))
    assert meta["model_config"] == {"sequence_len": 64, "vocab_size": 265, "n_layer": 2, "n_head": 2, "n_kv_head": 1,
                                    "n_embd": 48, "window_pattern": "SL"}
    for stage, folder in (("base", "base_checkpoints"), ("rl", "chatrl_checkpoints")):
        saved_model(stage=stage)
        assert (base / folder / "d2" / "model_000007.pt").exists() and list_tags(stage) == ["d2"]


def test_bf16_weights_become_fp32_masters_and_activations_the_asked_dtype(base):
    """And names that torch.compile wrote are understood."""
    model = saved_model()
    edit_model(base, lambda state: state.update({name: p.bfloat16() for name, p in state.items()}))
    loaded, _ = load_model("sft", "d2", "cpu", torch.bfloat16)
    assert all(torch.equal(p, model.state_dict()[name].bfloat16().float()) for name, p in loaded.state_dict().items())
    assert loaded.trunk(torch.tensor([[1]])).dtype == torch.bfloat16
    torch.save({f"_orig_mod.{name}": p for name, p in model.state_dict().items()}, base / FOLDER / "model_000007.pt")
    assert same(load().state_dict(), model.state_dict())


def test_a_missing_tensor_is_named(base):
    for name in tiny_model().state_dict():
        if name not in ("resid_lambdas", "x0_lambdas"):
            saved_model()
            edit_model(base, lambda state, name=name: state.pop(name))
            message = refusal(load)
            assert f"{name} is missing" in message and "model_000007.pt" in message


def test_older_checkpoints_may_lack_three_keys(base):
    model = saved_model()
    edit_model(base, lambda state: (state.pop("resid_lambdas"), state.pop("x0_lambdas")))
    edit_meta(base, lambda meta: meta["model_config"].pop("window_pattern"))
    loaded = load()
    assert (loaded.resid_lambdas.tolist() == [1, 1] and loaded.x0_lambdas.tolist() == [0, 0]
            and loaded.config.window_pattern == "L")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("change, words", [
    *((lambda meta, key=key: (meta if key in meta else meta["model_config"]).pop(key), key)  # of 2 heads: with 6 its
      for key in ("model_config", "n_layer", "n_head", "sequence_len")),                     # tensors are the same
    *((lambda meta, new=new: (meta if new.keys() <= meta.keys() else meta["model_config"]).update(new), words)
      for new, words in [
          ({"step": None}, "step must be a number"), ({"user_config": None}, "step must be a number, and user_config"),
          ({"n_layer": 10 ** 9}, "describes no model: n_layer is 1000000000, and 1000 are the most"),
          ({"evil": 1, "n_evil": 1}, "no model's meta: model_config has the unknown evil, n_evil"),
          ({"n_head": 0}, "n_head 0: must be a number from 1 to"), ({"n_layer": -1}, "n_layer -1: must be"),
          ({"sequence_len": 10 ** 30}, "sequence_len 10{30}: must be"), ({"n_embd": "x"}, "n_embd 'x': must be"),
          ({"window_pattern": 5}, "model_config describes no model")])])
def test_a_meta_of_no_model_is_refused_by_name(base, change, words):
    saved_model()
    edit_meta(base, change)
    assert re.search(f"meta_000007.json.*{words}", refusal(load))


def test_other_tensors_are_named_with_their_shapes(base):
    for name, shape, words in (("transformer.h.0.attn.ve_gate.weight", (1, 12), ()),
                               ("smear_gate.weight", (1, 12), ("(1, 12)", "(1, 24)"))):
        saved_model()
        edit_model(base, lambda state, extra={name: torch.zeros(*shape)}: state.update(extra))
        assert all(part in refusal(load) for part in (name, *words))


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
    for message in (refusal(load_file, str(path)), refusal(load)):  # without PyTorch's advice to allow it
        assert str(path) in message and "io.open" in message and "weights_only" not in message
    assert not (base / "owned").exists()
    torch.load(path, weights_only=False)
    assert (base / "owned").exists()  # the payload is a real one


def test_a_damaged_file_is_refused_by_name(base):
    saved_model()
    path = base / FOLDER / "model_000007.pt"
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[: len(whole) // 2], b"\n" * 500):
        path.write_bytes(damaged)
        assert str(path) in refusal(load)
    for content in ([1, 2], {"step": 3, "model": {}}):  # no state dict
        torch.save(content, path)
        assert str(path) in refusal(load)
    (base / FOLDER / "meta_000007.json").write_text('{"step": 7,')
    assert "meta_000007.json" in refusal(load)
    assert refusal(load_file, str(base / "no.pt")) == f"{base / 'no.pt'} is missing"


def test_the_default_tag_is_the_deepest_and_no_verifier(base):
    """Without one the error lists what there is, as it does where a tag is unknown."""
    message = refusal(default_tag, "sft")
    assert "none" in message and str(base / "chatsft_checkpoints") in message
    saved_model("d4-ver")
    saved_model("mine")
    assert "d4-ver, mine" in refusal(default_tag, "sft")
    message = refusal(load_model, "sft", "d5", "cpu", FP32)
    assert "d5" in message and "d4-ver, mine" in message
    assert "none" in refusal(load_model, "rl", "d4", "cpu", FP32)
    for tag in ("d4", "d12", "d8", "d20-ver", "d30x"):
        saved_model(tag)
    assert default_tag("sft") == "d12"  # the largest number, not the last word


def test_the_latest_step_is_taken_and_an_unknown_one_refused():
    models = {step: saved_model(step=step, seed=step) for step in (900, 1000, 20, 21, 300, 7, 5, 22)}
    assert list_steps("sft", "d2") == [5, 7, 20, 21, 22, 300, 900, 1000] and find_step("sft", "d2") == 1000
    for asked, step in [(None, 1000), (20, 20)]:
        assert torch.equal(load(asked).lm_head.weight, models[step].lm_head.weight)
    message = refusal(load, 23)
    assert "step 23" in message and "5, 7, 20, 21, 22, 300, 900, 1000" in message


def test_a_model_without_its_meta_does_not_count(base):
    saved_model(step=1)
    saved_model(step=2)
    os.remove(base / "chatsft_checkpoints/d2/meta_000002.json")
    assert list_steps("sft", "d2") == [1] and find_step("sft", "d2") == 1
    os.remove(base / "chatsft_checkpoints/d2/meta_000001.json")
    assert list_tags("sft") == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(base, monkeypatch):
    """And a failed model makes no checkpoint."""
    path = base / "folder" / "file.pt"
    save_atomic({"x": torch.ones(2)}, str(path))

    def full_disk(obj, f):
        f.write(b"half of it")
        raise OSError("No space left on device")
    monkeypatch.setattr(checkpoint.torch, "save", full_disk)
    for write in (lambda: save_atomic({"x": torch.zeros(2)}, str(path)), saved_model,
                  lambda: save_atomic({"x": torch.zeros(2)}, str(base / "folder" / "new.pt"))):
        with pytest.raises(CannotWrite, match="cannot be written: No space left"):
            write()
    assert load_file(str(path))["x"].tolist() == [1, 1] and list_tags("sft") == []
    assert os.listdir(base / "folder") == ["file.pt"]


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


def test_an_optimizer_that_is_missing_or_of_other_parameters_is_refused():
    of = lambda **shape: refusal(load_optimizer, "rl", "run-gen", 5, adamw(tiny_model(**shape).parameters(), 1e-3))
    assert "optim_000005_rank0.pt is missing" in of()
    save_optimizer("rl", "run-gen", 5, local_optimizer_state(trained(tiny_model())))
    assert "optim_000005_rank0.pt" in of(n_layer=3) and "optim_000005_rank0.pt" in of(n_embd=64)


def test_a_runs_state_comes_back_and_makes_its_step_valid():
    assert saved_steps("tango") == [] and "none" in refusal(load_state, "tango", 4)
    state = {"step": 12, "judged_pool": [[3, [1, 2], True]], "torch_rng": torch.get_rng_state(), "balanced_acc": None}
    for step in (12, 3):
        save_state("tango", step, state)
    assert saved_steps("tango") == [3, 12]
    message = refusal(load_state, "tango", 4)
    assert "step 4" in message and "3, 12" in message
    loaded = load_state("tango", 12)
    assert torch.equal(loaded.pop("torch_rng"), state.pop("torch_rng")) and loaded == state


def test_one_function_knows_the_layout(base):
    assert [path_of("sft", "d2", "model_000007.pt"), path_of("base", "d2"), path_of("rl", "d2"), path_of("runs", "x"),
            path_of("tokenizer")] == [str(base / path) for path in (
                "chatsft_checkpoints/d2/model_000007.pt", "base_checkpoints/d2", "chatrl_checkpoints/d2", "runs/x",
                "tokenizer")]
