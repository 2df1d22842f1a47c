"""Model folders: what transformers writes is read, what is written transformers reads, and bad folders are one line
that names file and cause."""
import contextlib
import os
import re
import shutil
import weakref
from types import SimpleNamespace

import huggingface_hub
import pytest
import safetensors
import safetensors.torch
import torch
from test_hf import CPU, FAMILIES, ROPES, imported, random_ids, read, reference_model, small_config, write
from test_trainer import packed, random_advantages, role_of, step
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanochat.common import BadInput, CannotWrite
from nanochat.engine import generate
from nanochat.hf import files
from nanochat.hf.decoder import Decoder
from nanochat.hf.files import find_folder, new_path, read_config, read_model, write_model
from nanochat.optim import adamw
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.storage.files import PARTIAL
from nanochat.weights import allocate, fill

EMBEDDING, UP = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"


class Letters:
    """A tokenizer as write_model wants one, that transformers can open: one token per letter."""
    bos, stop_tokens = 3, [5, 7]

    def save(self, folder):
        vocabulary = {chr(97 + i): i for i in range(26)}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
        content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                   "post_processor": None, "decoder": None,
                   "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated",
                                     "invert": False}, "model": model}
        write(folder, "tokenizer.json", content)
        write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def change(folder, name="config.json", drop=(), **values):
    content = {key: value for key, value in read(folder, name).items() if key not in drop}
    write(folder, name, content | values)


def tensors_of(folder):
    return safetensors.torch.load_file(os.path.join(folder, "model.safetensors"))


def write_tensors(folder, tensors):
    safetensors.torch.save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})


@torch.no_grad()
def largest_gap(model, ours):
    ids = random_ids(2, 40, vocab_size=min(ours.vocab_size, 97))
    theirs = model(ids)
    return float((getattr(theirs, "logits", theirs) - ours(ids)).abs().max())


def files_of(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_goes_back_to_transformers(family, tied, tmp_path):
    model = reference_model(family, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True,
                            rope_parameters={**ROPES["yarn"], "rope_theta": 1e4})
    ours = imported(model, tmp_path / "in")
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    out = generate(ours, prompts, 3, max_new_tokens=12, stop_tokens=list(range(20)), keys=list(range(6)))
    rollouts = Rollouts([Prompt(ids) for ids in prompts], torch.arange(6) // 3, out.tokens, out.logprobs, out.lengths,
                        out.stopped)
    metrics = step(role_of(ours, adamw(ours.parameters(), 1e-2)),
                   packed(rollouts, random_advantages(rollouts), max_tokens=40), lr=1e-2, max_grad_norm=1.0)
    assert metrics["skipped"] == 0 and metrics["grad_norm"] > 0 and metrics["rollout_logprobs_diff_max"] < 1e-4
    assert largest_gap(model, ours) > 0.1
    write_model(str(tmp_path / "out"), ours.config, ours.state_dict(), torch.float32, Letters())
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.config.eos_token_id == [5, 7] and back.config.bos_token_id == 3 and back.dtype == torch.float32
    assert largest_gap(back, ours) < 3e-5
    before, after = ours.state_dict(), back.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert ("lm_head.weight" in tensors_of(tmp_path / "out")) != tied
    assert largest_gap(read_model(str(tmp_path / "out"), CPU, torch.float32), ours) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("cab") == [2, 0, 1]


def test_bf16_is_written_and_read_by_both(tmp_path):
    ours = imported(reference_model("llama"), tmp_path / "in")
    write_model(str(tmp_path / "out"), ours.config, ours.state_dict(), torch.bfloat16, Letters())
    rounded = {name: x.bfloat16() for name, x in ours.state_dict().items()}
    back, again = (AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
                   read_model(str(tmp_path / "out"), CPU, torch.float32))
    assert back.dtype == torch.bfloat16
    for state in (tensors_of(tmp_path / "out"), back.state_dict(), again.state_dict()):
        assert state.keys() == rounded.keys() and all(torch.equal(state[name], x) for name, x in rounded.items())


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_folders_are_written_and_read_by_both(tied, tmp_path, monkeypatch):
    model = reference_model("qwen2", tie_word_embeddings=tied)
    ours = imported(model, tmp_path / "in")
    monkeypatch.setattr(files, "SHARD_SIZE", "30KB")
    write_model(str(tmp_path / "out"), ours.config, ours.state_dict(), torch.float32, Letters())
    index = read(tmp_path / "out", "model.safetensors.index.json")["weight_map"]
    assert len(set(index.values())) > 4 and sorted(set(index.values())) == files_of(tmp_path / "out")
    assert ("lm_head.weight" in index) != tied
    assert largest_gap(model, read_model(str(tmp_path / "out"), CPU, torch.float32)) < 3e-5
    assert largest_gap(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), ours) < 3e-5
    model.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert len(files_of(tmp_path / "theirs")) > 4
    assert largest_gap(model, read_model(str(tmp_path / "theirs"), CPU, torch.float32)) < 3e-5


def test_of_a_single_file_and_shards_the_one_of_transformers_is_read(tmp_path, capsys):
    """A folder saved anew: whole over shards, where its index stays, and in shards over a whole file, which stays."""
    for name, sizes in (("whole", ["60KB", "1GB"]), ("shards", ["1GB", "60KB"])):
        for seed, size in enumerate(sizes):
            reference_model("llama", seed=seed).save_pretrained(tmp_path / name, max_shard_size=size)
        ours = read_model(str(tmp_path / name), CPU, torch.float32)
        assert largest_gap(AutoModelForCausalLM.from_pretrained(tmp_path / name), ours) < 3e-5
        assert (f"WARNING: {tmp_path / name}/model.safetensors is read, not the shards of "
                f"{tmp_path / name}/model.safetensors.index.json") in capsys.readouterr().out


class Failing(Letters):
    stop_tokens = [5]

    def __init__(self, error):
        self.error = error

    def save(self, folder):
        super().save(folder)
        raise self.error


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    ours = imported(reference_model("llama"), tmp_path / "in")
    target = str(tmp_path / "out")
    for error, raised in ((OSError(28, "No space left on device"), CannotWrite),
                          (KeyboardInterrupt(), KeyboardInterrupt)):
        with pytest.raises(raised):
            write_model(target, ours.config, ours.state_dict(), torch.float32, Failing(error))
        assert os.listdir(tmp_path) == ["in"]
    save_file, calls = safetensors.torch.save_file, []

    def full_disk(tensors, path, *args, **options):
        calls.append(path)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        save_file(tensors, path, *args, **options)

    monkeypatch.setattr(files, "SHARD_SIZE", "30KB")
    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    with pytest.raises(CannotWrite, match=f"{target} cannot be written: No space"):
        write_model(target, ours.config, ours.state_dict(), torch.float32, Letters())
    assert len(calls) == 3 and os.listdir(tmp_path) == ["in"]


def test_what_a_killed_export_left_is_told_and_a_folder_that_is_there_not_written_over(tmp_path, capsys):
    """Nor are weights written that a dtype does not have."""
    ours = imported(reference_model("llama"), tmp_path / "in")
    state, before = ours.state_dict(), tensors_of(tmp_path / "in")
    huge = state | {"model.norm.weight": torch.full_like(state["model.norm.weight"], -1e5)}
    with pytest.raises(BadInput, match="--dtype float16: has no 100000, which is in model.norm.weight"):
        write_model(str(tmp_path / "out"), ours.config, huge, torch.float16, Letters())
    assert os.listdir(tmp_path) == ["in"]
    (tmp_path / f".out-x{PARTIAL}").mkdir()
    write_model(str(tmp_path / "out"), ours.config, huge, torch.bfloat16, Letters())
    assert f"WARNING: {tmp_path}/.out-x{PARTIAL} is of another process" in capsys.readouterr().out
    assert {"out", f".out-x{PARTIAL}"} < set(os.listdir(tmp_path))
    for target in (f"{tmp_path}/in", f"{tmp_path}/in/", f"{tmp_path}/in/config.json"):
        with pytest.raises(BadInput, match=f"--to {re.escape(target)}: exists already"):
            new_path("--to", target)
    with pytest.raises(CannotWrite):
        write_model(f"{tmp_path}/in", ours.config, huge, torch.float32, Letters())
    assert all(torch.equal(x, before[name]) for name, x in tensors_of(tmp_path / "in").items())


def test_parameters_keep_the_files_dtype_or_take_the_one_asked_for(tmp_path):
    model = reference_model("qwen3").bfloat16()
    model.save_pretrained(tmp_path)
    for asked, dtype in ((None, torch.bfloat16), (torch.float32, torch.float32), (torch.float16, torch.float16)):
        ours = read_model(str(tmp_path), CPU, torch.float32, asked)
        assert ours.compute_dtype == torch.float32
        for name, p in ours.named_parameters():
            assert p.dtype == dtype and p.requires_grad and torch.equal(p, model.get_parameter(name).to(dtype)), name


@pytest.mark.parametrize("tied", [False, True])
def test_one_tensor_of_a_file_is_held_at_a_time(tied, tmp_path, monkeypatch):
    model = reference_model("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    alive, names, opened, safe_open = weakref.WeakSet(), [], [], safetensors.safe_open

    @contextlib.contextmanager
    def counting(path, framework):
        opened.append(path)

        def get_tensor(name):
            assert not alive
            names.append(name)
            tensor = file.get_tensor(name)
            alive.add(tensor)
            return tensor
        with safe_open(path, framework=framework) as file:
            yield SimpleNamespace(get_tensor=get_tensor, get_slice=file.get_slice, keys=file.keys)
    monkeypatch.setattr(safetensors, "safe_open", counting)
    ours = read_model(str(tmp_path), CPU, torch.float32)
    assert not alive and len(set(opened)) > 3
    assert sorted(names) == sorted(dict(model.named_parameters()))
    assert largest_gap(model, ours) < 3e-5


def test_buffers_of_old_files_and_a_repeated_head_are_left_aside(tmp_path):
    model = reference_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    write_tensors(tmp_path, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
                                       "lm_head.weight": tensors[EMBEDDING].clone()})
    ours = read_model(str(tmp_path), CPU, torch.float32)
    assert largest_gap(model, ours) < 3e-5 and ours.lm_head.weight is ours.model.embed_tokens.weight


def test_allocated_weights_are_filled_in_their_own_dtype_and_stay_tied():
    config = small_config("qwen3", tied=True)
    source = Decoder(config)
    source.init_weights(torch.Generator().manual_seed(0))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = allocate(Decoder, config, torch.float32, CPU, dtype)
        assert model.compute_dtype == torch.float32 and model.lm_head.weight is model.model.embed_tokens.weight
        fill(model, source.state_dict())
        for name, p in model.named_parameters():
            assert (p.dtype == dtype and p.device == CPU and p.requires_grad
                    and torch.equal(p, source.get_parameter(name).to(dtype)))


def refused(call, *parts):
    """Asserts that a call raises BadInput of one line that has these parts."""
    with pytest.raises(BadInput) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    for part in parts:
        assert part in message, message


LLAMA3 = {**ROPES["llama3"], "rope_theta": 1e4}
BAD_VALUES = [  # changes of config.json, what the message says
    *[({key: value}, f"{key} is {value!r}") for key in ("num_attention_heads", "num_hidden_layers", "vocab_size")
      for value in (0, -4, "4", 4.0, True, [4])],
    *[({key: value}, f"{key} is {value!r}")
      for key in ("num_key_value_heads", "head_dim", "hidden_size", "intermediate_size") for value in (0, "48")],
    ({"num_hidden_layers": 10 ** 9}, "num_hidden_layers is 1000000000, and 1000 are the most"),
    ({"num_key_value_heads": 3}, "4 heads of 12 and 3 key/value heads"),
    ({"head_dim": 15}, "4 heads of 15"),
    *[({"rms_norm_eps": value}, f"rms_norm_eps is {value!r}")
      for value in ("1e-5", 0.0, -1.0, float("inf"), float("nan"))],
    *[({key: value}, f"{key} is {value!r}") for key in ("tie_word_embeddings", "attention_bias", "mlp_bias")
      for value in ("false", 1)],
    ({"rope_parameters": None, "rope_theta": "1e4"}, "rope_theta is '1e4'"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta is -1"),
    *[({"rope_parameters": {"rope_type": kind, "factor": 2.0}}, f"rotary scaling '{kind}' is not supported")
      for kind in ("dynamic", "longrope", "su")],
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}},
     "rotary scaling 'dynamic' is not supported"),
    *[({"rope_parameters": {**LLAMA3, key: None}}, "something in it is empty or not of the type")
      for key in ROPES["llama3"].keys() - {"rope_type"}],
    *[({"rope_parameters": {"rope_type": kind}}, "'factor' is missing") for kind in ("linear", "yarn")],
    *[({"rope_parameters": {**ROPES["yarn"], "factor": value}}, f"factor of rotary scaling 'yarn' is {value!r}")
      for value in ("4", -1.0, {})],
    ({"rope_parameters": {**ROPES["yarn"], "factor": 0}}, "there are no frequencies"),
    ({"rope_parameters": {**ROPES["yarn"], "attention_factor": "1"}},
     "attention_factor of rotary scaling 'yarn' is '1'"),
    ({"rope_parameters": {**ROPES["yarn"], "attention_factor": float("nan")}}, "attention_factor of rotary scaling"),
    ({"rope_parameters": {"rope_type": ["yarn"], "factor": 2.0}}, "rotary scaling ['yarn'] is not supported"),
    ({"rope_parameters": {**ROPES["yarn"], "rope_theta": 1.0}}, "division by zero"),
    *[({key: 10 ** 40}, f"{key} is 1000") for key in ("max_position_embeddings", "vocab_size")],
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention of rotary scaling 'default'"),
    ({"rope_parameters": ["linear", 2.0]}, "something in it is empty or not of the type"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "partial_rotary_factor is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"use_sliding_window": True}, "use_sliding_window is not supported"),
    ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
     "layer_types other than full_attention is not supported"),
    ({"transformers_weights": "other.safetensors"}, "transformers_weights is not supported"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
    ({"pretraining_tp": 2}, "pretraining_tp is not supported"),
    ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
     "'MistralForCausalLM' is not supported; there are LlamaForCausalLM, Qwen2"),
    ({"model_type": "gpt2", "architectures": None}, "'gpt2' is not supported"),
]


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    reference_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(good_folder, tmp_path):
    """A copy of a good folder, to spoil."""
    target = tmp_path / "folder"
    shutil.copytree(good_folder, target)
    return target


def test_values_and_keys_that_a_configuration_may_not_have_or_lack_are_named(folder):
    good = read(folder)
    read_config(str(folder))
    for values, said in BAD_VALUES:
        write(folder, "config.json", good | values)
        refused(lambda: read_config(str(folder)), str(folder / "config.json"), said)
    for key in ("hidden_size", "max_position_embeddings", "vocab_size", "num_hidden_layers", "num_attention_heads",
                "intermediate_size"):
        write(folder, "config.json", {name: value for name, value in good.items() if name != key})
        refused(lambda: read_config(str(folder)), str(folder / "config.json"), f"'{key}' is missing")
    change(folder, drop=["model_type"], architectures=None)
    refused(lambda: read_config(str(folder)), str(folder / "config.json"), "architecture None is not supported")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_files_that_hold_something_else_are_named(name, folder):
    if name != "config.json":
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    for content, said in ((b"[1, 2]", "holds no json object"), (b"no json", "is no json"), (b"", "is no json"),
                          (b"\xff\xfe\x00", "is no text in UTF-8")):
        (folder / name).write_bytes(content)
        refused(lambda: read_model(str(folder), CPU, torch.float32), str(folder / name), said)
    (folder / name).unlink()
    (folder / name).mkdir()
    refused(lambda: read_model(str(folder), CPU, torch.float32), str(folder / name), "Is a directory")
    (folder / name).rmdir()
    if name == "config.json":
        refused(lambda: read_model(str(folder), CPU, torch.float32), str(folder / name), "No such file")


def without(tensors, *names):
    return {name: x for name, x in tensors.items() if name not in names}


def test_tensors_that_do_not_fit_are_named(folder):
    tensors = tensors_of(folder)
    bias, third = UP.replace("weight", "bias"), UP.replace("layers.1", "layers.3")
    for spoilt, *said in (
            (without(tensors, UP), f"tensor {UP} is missing"), ({}, "is missing (and 29 more)"),
            (without(tensors, UP, "lm_head.weight"), "tensor lm_head.weight is missing (and 1 more)"),
            (tensors | {third: tensors[UP].clone()}, f"tensor {third} has no place in a llama model"),
            (tensors | {bias: torch.ones(80)}, f"tensor {bias} has no place"),
            (tensors | {UP: tensors[UP].T.contiguous()}, "model.safetensors: ",
             f"{UP} is F32 (48, 80), expected (80, 48) of F32, F16, BF16"),
            (tensors | {UP: tensors[UP].to(torch.int8)}, "model.safetensors: ", f"{UP} is I8"),
            (tensors | {EMBEDDING: tensors[EMBEDDING].to(torch.uint8)}, "model.safetensors: ", f"{EMBEDDING} is U8"),
            (tensors | {EMBEDDING: torch.tensor(1.0)}, "model.safetensors: ",
             f"{EMBEDDING} is F32 (), expected")):
        write_tensors(folder, spoilt)
        refused(lambda: read_model(str(folder), CPU, torch.float32), str(folder), *said)
    write_tensors(folder, tensors)
    change(folder, tie_word_embeddings=True)
    refused(lambda: read_model(str(folder), CPU, torch.float32), str(folder / "model.safetensors"),
            "lm_head.weight is not the embedding")


@pytest.mark.parametrize("sharded", [False, True])
def test_damaged_weights_are_named(sharded, good_folder, folder):
    if sharded:
        AutoModelForCausalLM.from_pretrained(good_folder).save_pretrained(folder, max_shard_size="60KB")
        (folder / "model.safetensors").unlink(missing_ok=True)
    path = folder / files_of(folder)[-1]
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content[:5], b"version https://git-lfs.github.com/spec/v1\n", b""):
        path.write_bytes(damaged)
        refused(lambda: read_model(str(folder), CPU, torch.float32), f"{path} cannot be read")
    if not sharded:
        path.rename(folder / "pytorch_model.bin")
        refused(lambda: read_model(str(folder), CPU, torch.float32), str(folder), "neither model.safetensors nor",
                "only safetensors are read")


def test_an_index_that_is_wrong_is_named(folder):
    index, tensors, shard = folder / "model.safetensors.index.json", tensors_of(folder), "model-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    names = dict.fromkeys(tensors, shard)
    for content, said in (({}, f"{index}: 'weight_map' is missing"), ({"weight_map": [1]}, f"{index}: something in it"),
                          ({"weight_map": names | {UP: "model-00002.safetensors"}},
                           f"{folder / 'model-00002.safetensors'} cannot be read: No such file"),
                          ({"weight_map": without(names, UP)}, f"tensor {UP} is missing"),
                          ({"weight_map": names | {UP: 7}}, f"{index}: something in it"),
                          ({"weight_map": names | {UP: "."}}, "cannot be read"),
                          ({"weight_map": names | {"x": shard}}, "tensor x has no place")):
        write(folder, index.name, content)
        refused(lambda: read_model(str(folder), CPU, torch.float32), str(folder), said)
    safetensors.torch.save_file(without(tensors, UP), folder / shard)
    write(folder, index.name, {"weight_map": names})
    refused(lambda: read_model(str(folder), CPU, torch.float32), f"{folder / shard} cannot be read", UP)


def test_an_index_cannot_name_files_outside_of_its_folder(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    names = safetensors.torch.load_file(tmp_path / "outside.safetensors")
    for path in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "x/../../outside.safetensors"):
        write(folder, "model.safetensors.index.json", {"weight_map": dict.fromkeys(names, path)})
        refused(lambda: read_model(str(folder), CPU, torch.float32), f"{folder / 'outside.safetensors'} cannot be read")


def test_a_source_is_a_folder_or_a_name_on_the_hub(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert find_folder(str(tmp_path)) == str(tmp_path) and find_folder("~") == str(tmp_path) and not asked
    assert find_folder("Qwen/Qwen2.5-0.5B_x") == str(tmp_path)
    (name, patterns), = asked
    assert (name == "Qwen/Qwen2.5-0.5B_x" and "*.safetensors" in patterns
            and "*.json" in patterns and not any("bin" in p or p == "*" for p in patterns))
    for source in ("nowhere", "a/b/c", "../absent", "./absent", "/no/such", "~/nothing", "", "a/", "a b/c"):
        refused(lambda source=source: find_folder(source),
                f"--source {source}: no such folder, and not the name of a model")
    assert len(asked) == 1
    for error, said in ((huggingface_hub.errors.LocalEntryNotFoundError("Cannot find\nthe thing"), "Cannot find"),
                        (ConnectionError("off"), "off")):
        def fail(*_, error=error, **__):
            raise error
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        refused(lambda: find_folder("owner/name"), "--source owner/name: no such folder, and the hub gives nothing: ",
                said)
