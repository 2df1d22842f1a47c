"""GGUF files against transformers, which reads the same ones: weights, logits, greedy text and token ids of every type
of tensor; then files that must be refused."""
import copy
import dataclasses
import functools
import itertools
import json
import re
import struct
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Library, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf = pytest.importorskip("gguf")

from nanochat.checkpoint import load_model  # noqa: E402
from nanochat.engine import generate  # noqa: E402
from nanochat.hf.decoder import ROPE, DecoderConfig  # noqa: E402
from nanochat.common import BadInput  # noqa: E402
from nanochat.hf.files import config_of  # noqa: E402
from nanochat.hf.gguf import (STORED, GGUFFile, StoredTensor, open_file, origin_of_file, read_gguf,  # noqa: E402
                              read_tokenizer, shape_of_file, stored_name)
from nanochat.hf.gguf_out import describe, write_gguf  # noqa: E402
from nanochat.hf.shapes import LLAMA31, SHAPES, shape_of  # noqa: E402
from nanochat.hf.tokenizer import HFTokenizer, load_tokenizer  # noqa: E402
from scripts import hf_export, hf_import  # noqa: E402
from test_bad_input import refused  # noqa: E402
from test_hf import CPU, FAMILIES, reference_model  # noqa: E402
from test_hf_tokenizer import KINDS as FOLDERS, LLAMA3, QWEN25, TEXT, llama3, qwen, trained  # noqa: E402
from test_qwen import run  # noqa: E402

Type, Value = gguf.GGMLQuantizationType, gguf.GGUFValueType
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
VALUE_TYPES = {bool: Value.BOOL, int: Value.UINT32, float: Value.FLOAT32, str: Value.STRING}


def smollm():
    """Like SmolLM2's: digits one by one, then GPT-2's way to cut, special tokens first."""
    library = trained(r"\p{N}", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [])
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return library


KINDS = {  # tokenizer.ggml.pre: the original tokenizer, its chat template, eos, bos
    "smollm": (smollm, QWEN25, "<|im_end|>", "<|im_start|>"),
    "qwen2": (qwen, QWEN25, "<|im_end|>", "<|endoftext|>"),
    "llama-bpe": (llama3, LLAMA3, "<|eot_id|>", "<|begin_of_text|>"),
}
KIND_OF = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}


@functools.cache
def tokenizer_metadata(kind: str, num_tokens: int | None = None) -> dict:
    """What a file holds of a tokenizer; unused tokens fill its vocabulary up."""
    make, template, eos, bos = KINDS[kind]
    library = make()
    settings = json.loads(library.to_str())
    tokens = sorted(library.get_vocab(), key=library.get_vocab().get)
    special = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in settings["added_tokens"]}
    types = [special.get(token, NORMAL) for token in tokens]
    padding = [f"[PAD{i}]" for i in range(len(tokens), num_tokens or len(tokens))]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": kind, "tokenizer.ggml.tokens": tokens + padding,
            "tokenizer.ggml.token_type": types + [UNUSED] * len(padding),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in settings["model"]["merges"]],
            "tokenizer.ggml.eos_token_id": library.token_to_id(eos),
            "tokenizer.ggml.bos_token_id": library.token_to_id(bos), "tokenizer.chat_template": template}


def interleaved(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a Llama's queries or keys as llama.cpp writes them: x (H D, ...), the two halves of a head by turns."""
    return x.reshape(num_heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


@functools.cache
def random_blocks(kind: Type) -> np.ndarray:
    """Blocks of a quantised type, (n, bytes): random ones, of those whose numbers a weight could have."""
    drawn = np.random.default_rng(0).integers(256, size=(4096, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        largest = np.abs(gguf.dequantize(drawn, kind)).max(axis=1)
    fit = drawn[(largest > 0.01) & (largest < 0.5)]
    assert len(fit) > 8
    return fit


def as_stored(x: np.ndarray, kind: Type, seed: int) -> np.ndarray:
    """A matrix in a type: rounded to floats of it, or random blocks of its shape."""
    if kind.name in STORED:
        return x if kind == Type.F32 else gguf.quantize(x, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random_blocks(kind)
    drawn = np.random.default_rng(seed).integers(len(blocks), size=x.size // block)
    return blocks[drawn].reshape(x.shape[0], x.shape[1] // block * size)


def model_metadata(config, **changes) -> dict:
    """The metadata of a model of transformers, keys of its architecture alone."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {"context_length": config.max_position_embeddings, "block_count": config.num_hidden_layers,
              "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
              "attention.head_count": config.num_attention_heads,
              "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": head_dim,
              "attention.value_length": head_dim, "rope.dimension_count": head_dim,
              "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
              "rope.freq_base": config.rope_parameters["rope_theta"]}
    return {f"{config.model_type}.{key}": value for key, value in (values | changes).items() if value is not None}


def model_tensors(model, *kinds: Type) -> dict:
    """name -> (numbers or bytes, type): matrices in these types by turns, the rest in float32."""
    config, found, kinds = model.config, {}, itertools.cycle(kinds or [Type.F32])
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for i, (name, p) in enumerate(model.named_parameters()):
        x, module = p.detach().numpy(), name.split(".")[-2]
        x = interleaved(x, heads[module]) if config.model_type == "llama" and module in heads else x
        kind = next(kinds) if x.ndim == 2 else Type.F32
        found[stored_name(name)] = as_stored(x, kind, i), kind
    return found


def ones(*shape: int) -> tuple:
    return np.ones(shape, np.float32), Type.F32


def write(path, architecture: str, metadata: dict, tensors: dict):
    """A GGUF file; the type of a value follows from Python's."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_key_value(key, value, Value.ARRAY, VALUE_TYPES[type(value[0])])
        else:
            writer.add_key_value(key, value, VALUE_TYPES[type(value)])
    for name, (x, kind) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(x), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


@functools.cache
def small_model(family: str, **options):
    """Rows are whole blocks of every type; Qwen3's head size is the one that transformers takes without config.json."""
    options = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 640,
               "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128 if family == "qwen3" else 64,
               "tie_word_embeddings": True} | options
    return reference_model(family, **options)


def write_model(path, model, *kinds: Type, **changes):
    config = model.config
    return write(path, config.model_type, model_metadata(config, **changes)
                 | tokenizer_metadata(KIND_OF[config.model_type], config.vocab_size), model_tensors(model, *kinds))


QUANTISED = [kind for kind in Type if kind.name not in STORED and kind in gguf.quants._type_traits]
CASES = [*zip(FAMILIES, [[Type[name]] for name in STORED], strict=True),
         *zip(FAMILIES, (QUANTISED[i::3] for i in range(3)), strict=True)]
assert len(QUANTISED) >= 20 and {Type.Q4_0, Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.IQ4_XS} <= set(QUANTISED)


@torch.no_grad()
@pytest.mark.parametrize("family, kinds", CASES, ids=range(len(CASES)))
def test_weights_logits_and_greedy_text_are_those_of_transformers(family, kinds, tmp_path):
    """A file of each type that is not quantised, then of a few that are: all types, two files of each family."""
    write_model(tmp_path / "m.gguf", small_model(family), *kinds)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    tokenizer, ours = read_gguf(str(tmp_path / "m.gguf"))
    expected, state = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == state.keys()
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []
    ids = torch.randint(600, (2, 40), generator=torch.Generator().manual_seed(1))
    assert (ours(ids) - theirs(ids).logits).abs().max() < 1e-3 and ours(ids).std() > 0.1  # by different products
    out = generate(ours, [ids[0].tolist()], 1, max_new_tokens=8, stop_tokens=[639], keys=[0], temperature=0)
    text = theirs.generate(ids[:1], max_new_tokens=8, do_sample=False, eos_token_id=639, pad_token_id=639)
    length = int(out.lengths[0])
    assert out.tokens[0, :length].tolist() == text[0, 40: 40 + length].tolist()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_of_its_own_and_biases_are_read(family, tmp_path):
    """transformers has no biases of a GGUF file's Llama and Qwen3: the model that was written is the reference."""
    model = small_model(family, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    assert sum(name.endswith("bias") for name, _ in model.named_parameters()) > 4
    _, ours = read_gguf(str(write_model(tmp_path / "m.gguf", model)))
    state = ours.state_dict()
    assert not ours.config.tied and all(torch.equal(state[name], x) for name, x in model.state_dict().items())
    ids = torch.arange(60).view(2, 30)
    assert (ours(ids) - model(ids).logits).abs().max() < 1e-4


def test_a_head_that_repeats_the_embedding_is_tied(tmp_path):
    for kind in (Type.F32, Type.Q8_0):
        model = small_model("qwen2")
        metadata, tensors = model_metadata(model.config) | tokenizer_metadata("qwen2", 640), model_tensors(model, kind)
        repeated = tensors | {"output.weight": tensors["token_embd.weight"]}
        _, ours = read_gguf(str(write(tmp_path / "m.gguf", "qwen2", metadata, repeated)))
        assert ours.config.tied and ours.lm_head.weight is ours.model.embed_tokens.weight


def test_numbers_keep_their_dtype_where_all_fit(tmp_path):
    """Scales of 1 and 0.5 fit into every dtype; 1 + 2^-10 into float16 and not bfloat16; 1 + 2^-20 into float32."""
    model = copy.deepcopy(small_model("llama"))
    for p in (p for p in model.parameters() if p.dim() == 1):
        p.data.fill_(0.5)
    dtype_of = lambda kind: next(read_gguf(str(write_model(tmp_path / "m.gguf", model, kind)))[1].parameters()).dtype
    for scale, of_f16, of_bf16 in ((1.0, torch.float16, torch.bfloat16),
                                   (1 + 2 ** -10, torch.float16, torch.float32),
                                   (1 + 2 ** -20, torch.float32, torch.float32)):
        model.model.norm.weight.data[3] = scale
        assert (dtype_of(Type.F16), dtype_of(Type.BF16)) == (of_f16, of_bf16)
    model.model.norm.weight.data.fill_(1.0)
    assert dtype_of(Type.Q8_0) == torch.float32


def frequencies(config: DecoderConfig) -> torch.Tensor:
    return ROPE[(config.rope_scaling or {}).get("rope_type", "default")](config)[0]


def test_rotary_scaling_is_read(tmp_path):
    model = small_model("qwen2")
    scaled = lambda **values: shape_of_file(open_file(str(write_model(
        tmp_path / "m.gguf", model, **{f"rope.scaling.{key}": value for key, value in values.items()}))))
    plain = scaled()
    assert plain.rope_scaling is None and scaled(type="none") == plain
    for linear in (scaled(type="linear", factor=4.0), scaled(factor=4.0)):  # llama.cpp's default
        assert torch.equal(frequencies(linear), frequencies(plain) / 4)
    yarn = scaled(type="yarn", factor=4.0, original_context_length=64, finetuned=True)
    assert yarn.rope_scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_scaling_is_known_by_its_tensor(factor, tmp_path):
    model = copy.deepcopy(small_model("llama"))
    for p in model.parameters():
        p.data = p.data.half().float()
    plain = shape_of_file(open_file(str(write_model(tmp_path / "m.gguf", model, **{"rope.freq_base": 500000.0}))))
    scaling = {**LLAMA31, "factor": factor}
    divisors = frequencies(plain) / frequencies(DecoderConfig(**plain.asdict() | {"rope_scaling": scaling}))
    tensors = model_tensors(model, Type.F16) | {"rope_freqs.weight": (divisors.numpy(), Type.F32)}
    metadata = model_metadata(model.config, **{"rope.freq_base": 500000.0}) | tokenizer_metadata("llama-bpe", 640)
    _, ours = read_gguf(str(write(tmp_path / "m.gguf", "llama", metadata, tensors)))
    assert ours.config.rope_scaling == scaling and ours.lm_head.weight.dtype == torch.float16


TEXTS = [*TEXT[:5], "x  12", "  1234567  89,5\n\n 0", "tabs\t\tand\r\nlines\n\n\n", "don't I'LL they've it'S",
         "naïve café", "東京都 Привет ١٢٣ ½ ²", "🙂👩\u200d👩\u200d👧", "def f(x):\n    return x[0] + 1  # one\n",
         "a\u00a0b\u2003c ", "e\u0301 \u1e9b\u0323", "", " ", "<think>2</think>", "[PAD0] [PAD641]"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file without a tensor for every kind of tokenizer."""
    folder = tmp_path_factory.mktemp("gguf")
    for kind in KINDS:
        write(folder / f"{kind}.gguf", "llama", model_metadata(small_model("llama").config)
              | tokenizer_metadata(kind, 700), {"token_embd.weight": ones(1, 1)})
    return folder


def tokenizer_of(path) -> HFTokenizer:
    return read_tokenizer(str(path), open_file(str(path)))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_prompts_are_those_of_the_original_tokenizer_and_of_transformers(kind, files):
    """Reading a GGUF file, transformers leaves out three things that the original tokenizers have: SmolLM2's way with
    digits, Qwen2's normal form, and Llama 3's words that are looked up before they are merged (there are none here)."""
    library, ours = KINDS[kind][0](), tokenizer_of(files / f"{kind}.gguf")
    again = Library.from_str(ours.files["tokenizer.json"].decode())
    theirs = AutoTokenizer.from_pretrained(files, gguf_file=f"{kind}.gguf")
    if kind == "smollm":
        theirs.backend_tokenizer.pre_tokenizer = smollm().pre_tokenizer
    for text in TEXTS:
        assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids, text
        # Also where no merge of this small vocabulary shows it.
        assert again.pre_tokenizer.pre_tokenize_str(text) == library.pre_tokenizer.pre_tokenize_str(text), text
        if kind != "qwen2" or "\u0301" not in text:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
    assert ours.vocab_size == library.get_vocab_size()  # what fills the vocabulary up is no token
    messages = [{"role": "user", "content": "What is 12 * 12?"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert kind == "llama-bpe" or ours.render_chat(messages) == expected  # its template writes today's date
    assert ours.tokens[ours.stop_tokens[0]] == KINDS[kind][2] and ours.tokens[ours.bos] == KINDS[kind][3]
    assert ours.decode(ours.encode("naïve 東京 🙂\n 12")) == "naïve 東京 🙂\n 12"


def test_words_of_llama_3_are_looked_up_first_and_a_text_begins_with_bos_unless_the_file_says_otherwise(tmp_path):
    metadata, tensors = dict(tokenizer_metadata("llama-bpe")), {"x": ones(1, 1)}
    del metadata["tokenizer.chat_template"]
    bos = [metadata["tokenizer.ggml.bos_token_id"]]
    for said, prompt in (({}, bos), ({"tokenizer.ggml.add_bos_token": False}, [])):
        ours = tokenizer_of(write(tmp_path / "m.gguf", "llama", metadata | said, tensors))
        assert not ours.has_template and ours.render_prompt("the cat") == prompt + ours.encode("the cat\n\n")
    metadata = copy.deepcopy(tokenizer_metadata("llama-bpe"))
    i = metadata["tokenizer.ggml.tokens"].index("<|eot_id|>")
    metadata["tokenizer.ggml.tokens"][i - 1: i - 1] = ["zqzq"]  # no merges lead to it
    metadata["tokenizer.ggml.token_type"][i - 1: i - 1] = [NORMAL]
    metadata["tokenizer.ggml.eos_token_id"] += 1
    ours = tokenizer_of(write(tmp_path / "m.gguf", "llama", metadata, tensors))
    assert [ours.tokens[token] for token in ours.encode("zqzq")] == ["zqzq"]


# Writing: what is written, both readers give back

def tokenizer_like(name: str) -> HFTokenizer:
    """The tokenizer of a folder, as those of models of GGUF's kinds are."""
    make, config, generation = FOLDERS.get(name) or (smollm, {"chat_template": QWEN25, "eos_token": "<|im_end|>",
                                                              "bos_token": "<|im_start|>"}, None)
    settings, to_id = json.loads(make().to_str()), make().token_to_id
    settings["model"]["ignore_merges"] = "1,3" in json.dumps(settings)  # Llama 3's
    settings["normalizer"] = {"type": "NFC"} if name == "glm" else settings["normalizer"]
    files = {"tokenizer.json": settings, "tokenizer_config.json": config}
    if generation:
        files["generation_config.json"] = {key: [*map(to_id, ids)] if isinstance(ids, list) else to_id(ids)
                                           for key, ids in generation.items()}
    return HFTokenizer({key: json.dumps(value).encode() for key, value in files.items()}, name)


WRITTEN = ["smollm", "qwen25", "qwen3", "llama3", "base", "alpaca", "glm", "deepseek"]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_tokenizer_is_the_same_when_written_and_read(name, tmp_path):
    tokenizer, model = tokenizer_like(name), small_model("llama", vocab_size=700)
    write_gguf(str(tmp_path / "m.gguf"), config := ours_of(model.config), model.state_dict(), "float16",
               describe(config, tokenizer, "float16", "m", {}))
    again = tokenizer_of(tmp_path / "m.gguf")
    assert (again.has_template, again.template.source) == (tokenizer.has_template, tokenizer.template.source)
    assert (again.bos, again.eos, set(again.stop_tokens)) == (tokenizer.bos, tokenizer.eos, set(tokenizer.stop_tokens))
    controls = [token["content"] for token in tokenizer.settings["added_tokens"]]
    for text in [*TEXTS, *controls, "".join(controls), "a <|im_end|>\n<|im_start|>user\n[/INST] <|eot_id|>"]:
        assert again.encode(text) == tokenizer.encode(text), text
        assert again.render_prompt(f"x{text}") == tokenizer.render_prompt(f"x{text}"), text


def stored(config: DecoderConfig) -> DecoderConfig:
    """A shape as a file has it, with numbers of float32."""
    return dataclasses.replace(config, norm_eps=float(np.float32(config.norm_eps)))


def ours_of(config) -> DecoderConfig:
    """The shape of a model of transformers."""
    return config_of(json.loads(config.to_json_string()))


@torch.no_grad()
@pytest.mark.parametrize("family, name", [*zip(FAMILIES, ("llama3", "qwen25", "qwen3"), strict=True),
                                          ("llama", "smollm")])
def test_a_written_file_has_the_weights_bit_by_bit_and_the_logits_in_transformers(family, name, tmp_path):
    model, tokenizer = small_model(family, tie_word_embeddings=name == "smollm"), tokenizer_like(name)
    config, state, path = ours_of(model.config), model.state_dict(), str(tmp_path / "m.gguf")
    write_gguf(path, config, state, "float32", describe(config, tokenizer, "float32", "m", {}))
    _, again = read_gguf(path)
    assert again.config == stored(config)
    assert all(torch.equal(again.state_dict()[key], x) for key, x in state.items())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    ids = torch.randint(600, (2, 40), generator=torch.Generator().manual_seed(1))
    assert (again(ids) - theirs(ids).logits).abs().max() < 1e-3 and again(ids).std() > 0.1
    for kind, type_of in (("bfloat16", Type.BF16), ("float16", Type.F16), ("q8_0", Type.Q8_0)):
        write_gguf(path, config, state, kind, describe(config, tokenizer, kind, "m", {}))
        file = open_file(path)
        assert {t.kind for t in file.tensors.values() if len(t.shape) == 2} == {type_of}
        found = read_gguf(path)[1].state_dict()
        for key, x in state.items():
            rounded = gguf.dequantize(gguf.quantize(x.numpy(), type_of), type_of) if x.dim() == 2 else x.numpy()
            if family != "llama" or not re.search("[qk]_proj", key):  # whose rows are in another order
                assert np.array_equal(found[key].float().numpy(), rounded), key
            assert (found[key].float() - x).abs().max() < 0.02 * x.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shape_of_a_known_model_is_written_and_read(shape):
    """Llama 3's scaling is a tensor, which a test above reads."""
    config = shape_of(shape)
    plain = dataclasses.replace(config, rope_scaling=None, vocab_size=700)
    name = {"llama": "llama3", "qwen2": "qwen25", "qwen3": "qwen3"}[config.architecture]
    metadata = described(dataclasses.replace(config, vocab_size=700), name)
    metadata["general.architecture"] = config.architecture
    tensors = {} if config.tied else {"output.weight": None}
    if config.qkv_bias:
        tensors["blk.0.attn_q.bias"] = None
    read = shape_of_file(GGUFFile(metadata, {key: StoredTensor(0, (1,), 0, 0) for key in tensors}, None))
    assert read == plain


@functools.cache
def known_tokenizer(name: str) -> HFTokenizer:
    return tokenizer_like(name)


def described(config: DecoderConfig, name: str, dtype: str = "float32", **origin) -> dict:
    return describe(config, known_tokenizer(name), dtype, "m", origin)


def scaled(**scaling) -> DecoderConfig:
    return dataclasses.replace(ours_of(small_model("llama").config), vocab_size=700, rope_scaling=scaling or None)


@pytest.mark.parametrize("scaling", [
    {"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, {**LLAMA31, "factor": 8.0},
    {**LLAMA31, "factor": 32.0}])
def test_rotary_scaling_is_written(scaling, tmp_path):
    config = dataclasses.replace(scaled(**scaling), vocab_size=640)
    path, state = str(tmp_path / "m.gguf"), small_model("llama").state_dict()
    write_gguf(path, config, state, "float32", described(config, "llama3"))
    again = read_gguf(path)[1].config
    assert again.rope_scaling == scaling and torch.equal(frequencies(again), frequencies(config))


@pytest.mark.parametrize("call, words", [
    (lambda: described(scaled(**LLAMA31 | {"factor": 8.0, "low_freq_factor": 2.0}), "llama3"), "not that of Llama 3.1"),
    (lambda: described(scaled(rope_type="yarn", factor=4.0, attention_factor=1.3), "llama3"),
     "no words for attention_factor of its rotary scaling"),
    (lambda: described(scaled(), "llama2"), "cuts a text in another way than GGUF's smollm, qwen2, llama-bpe"),
    (lambda: describe(scaled(), changed_tokenizer(normalizer=None), "float32", "m", {}), "it has other normal forms"),
    (lambda: describe(scaled(), changed_tokenizer(stops=range(4)), "float32", "m", {}),
     "has 5 tokens that end an answer, and GGUF names 3"),
    (lambda: describe(scaled(), changed_tokenizer(merges=[]), "float32", "m", {}), "its tokenizer has no merges"),
    (lambda: described(dataclasses.replace(scaled(), vocab_size=9), "llama3"), "has a vocabulary of 9"),
    (lambda: described(dataclasses.replace(scaled(), intermediate_size=80), "llama3", "q8_0"),
     "--dtype q8_0: needs rows of a multiple of 32 numbers, and m has some of 80"),
])
def test_what_gguf_cannot_hold_is_one_line(call, words):
    with pytest.raises(BadInput, match=re.escape(words)):
        call()


def changed_tokenizer(normalizer=..., merges=None, stops=()) -> HFTokenizer:
    """Qwen's with another normalizer, other merges, or so many stop tokens more."""
    files = dict(known_tokenizer("qwen25").files)
    settings = json.loads(files["tokenizer.json"])
    if normalizer is not ...:
        settings["normalizer"] = normalizer
    if merges is not None:
        settings["model"]["merges"] = merges
    if stops:
        files["generation_config.json"] = json.dumps({"eos_token_id": [*stops]}).encode()
    return HFTokenizer(files | {"tokenizer.json": json.dumps(settings).encode()}, "changed")


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A folder with a base directory in it, which is not there yet."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path


def test_a_file_becomes_a_checkpoint_that_transformers_opens_when_exported(base, capsys):
    path = write_model(base / "m.gguf", small_model("llama"), Type.Q8_0)
    run(hf_import, "--source", path, "--model-tag", "g")
    assert "tensors of type Q8_0 (15), F32 (5), read as float32" in capsys.readouterr().out
    ours, tokenizer = load_model("sft", "g", CPU, torch.float32)[0], load_tokenizer(str(base / "base" / "tokenizer"))
    run(hf_export, "--stage", "sft", "--model-tag", "g", "--to", base / "out", "--dtype", "float32")
    theirs, names = AutoModelForCausalLM.from_pretrained(base / "out"), AutoTokenizer.from_pretrained(base / "out")
    assert all(torch.equal(ours.state_dict()[name], x) for name, x in theirs.state_dict().items())
    assert names.encode("the cat 1234") == [tokenizer.bos, *tokenizer.encode("the cat 1234")]
    run(hf_import, "--source", path, "--model-tag", "g-ver")


def changed(changes: dict, tensors: dict | None = None, drop: tuple = ()):
    """Writes a good Llama file but for these metadata and tensors."""
    def make(path):
        model = small_model("llama")
        metadata = model_metadata(model.config) | tokenizer_metadata("llama-bpe", 640) | changes
        found = model_tensors(model) | (tensors or {})
        architecture = metadata.pop("general.architecture", "llama")
        write(path, architecture, {key: x for key, x in metadata.items() if key not in drop},
              {name: x for name, x in found.items() if name not in drop})
    return make


def cut(size: int):
    """Writes the first bytes of a file; less than 0: all but the last ones."""
    def make(path):
        changed({})(path)
        path.write_bytes(path.read_bytes()[:size])
    return make


def written(*parts: bytes):
    return lambda path: path.write_bytes(b"".join(parts))


def patched(old: bytes, new: bytes):
    def make(path):
        changed({})(path)
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, 1))
    return make


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
NAME = struct.pack("<Q", 1) + b"k"
SCALING = "llama.rope.scaling"
NO_SCALING = "rope_freqs.weight is no rotary scaling"
OF_TEXT = struct.pack("<I", 8) + struct.pack("<Q", 5) + b"llama"  # the type, length and text of the architecture
LAST = b"output_norm.weight" + struct.pack("<IQI", 1, 256, 0)
BAD = [  # what is written, what the line says
    (written(), "cannot mmap an empty file"), (written(b"PK\3\4 and more"), "is no GGUF file"),
    (written(b"GGUF", struct.pack("<IQQ", 1, 0, 0)), "version 1 of GGUF is not read; there are 2 and 3"),
    (written(b"GGUF", struct.pack(">IQQ", 3, 0, 0)), "version 50331648 of GGUF"),  # of a big-endian machine
    (cut(3), "is truncated"), (cut(17), "is truncated: it ends at byte 17, within its header"),
    (cut(3000), "is truncated: it ends at byte 3000, within its header"),
    (cut(-40), "is truncated: it ends at byte .*and output_norm.weight at byte"),
    # texts, lists and tensors of 2^60
    (written(HEADER, struct.pack("<Q", 2 ** 60)), "is truncated"),
    (written(HEADER, NAME, struct.pack("<IIQ", 9, 4, 2 ** 60)), "is truncated"),
    (written(HEADER, NAME, struct.pack("<IIQ", 9, 8, 2 ** 60)), "is truncated"),
    (written(b"GGUF", struct.pack("<IQQ", 3, 2 ** 60, 0)), "is truncated"),
    (written(HEADER, NAME, struct.pack("<IIQIQ", 9, 9, 1, 9, 1)), "9 is missing"),
    (written(HEADER, struct.pack("<Q", 2) + b"\xff\xfe"), "is no text in UTF-8"),
    (written(b"GGUF", struct.pack("<IQQ", 3, 0, 0)), "architecture None is not supported"),
    (changed({"split.count": 3}), "is one part of 3"),
    (changed({"general.architecture": "gemma2"}),
     "architecture 'gemma2' is not supported; there are llama, qwen2, qwen3"),
    (patched(OF_TEXT, struct.pack("<IIQ", 9, 0, 5) + b"llam"), "is truncated"),
    (changed({"llama.expert_count": 8}), "llama.expert_count is not supported"),
    (changed({}, drop=("llama.block_count",)), "'llama.block_count' is missing"),
    (changed({"llama.block_count": 3}), "tensor blk.2.attn_k.weight is missing"),
    (changed({"llama.context_length": "long"}), "llama.context_length is 'long'"),
    (changed({"llama.attention.head_count_kv": [2, 1]}), r"llama.attention.head_count_kv is \[2, 1\]"),
    (changed({"llama.attention.head_count_kv": 3}), "4 heads of 64 and 3 key/value heads"),
    (changed({"llama.rope.dimension_count": 32}), "llama.rope.dimension_count is 32"),
    (changed({"llama.attention.value_length": 32}), "llama.attention.value_length is 32"),
    (changed({f"{SCALING}.type": "longrope", f"{SCALING}.factor": 2.0}), "rotary scaling 'longrope' is not supported"),
    (changed({f"{SCALING}.type": "linear"}), "'factor' is missing"),
    (changed({f"{SCALING}.attn_factor": 2.0}), f"{SCALING}.attn_factor is not supported"),
    (changed({}, {"rope_freqs.weight": (np.full(32, 2, np.float32), Type.F32)}), NO_SCALING),
    (changed({}, {"rope_freqs.weight": ones(3)}), NO_SCALING),
    (changed({}, {"blk.0.ffn_gate_exps.weight": ones(4, 4)}),
     "tensor blk.0.ffn_gate_exps.weight has no place in a llama model"),
    (changed({}, {"blk.2.attn_norm.weight": ones(256)}), "blk.2.attn_norm.weight has no place"),
    (changed({}, drop=("blk.1.ffn_up.weight",)), "tensor blk.1.ffn_up.weight is missing"),
    (changed({}, drop=("token_embd.weight",)), "tensor token_embd.weight is missing"),
    (changed({}, {"blk.1.ffn_up.weight": ones(256, 128)}),
     r"blk.1.ffn_up.weight is F32 \(256, 128\), expected \(256, 256\)"),
    (changed({}, {"token_embd.weight": ones(639, 256)}), r"expected \(640, 256\)"),
    (changed({}, {"output_norm.weight": (np.ones(256, np.int32), Type.I32)}),
     "output_norm.weight is of type I32, which the package gguf does not dequantise"),
    (patched(LAST, LAST[:-4] + struct.pack("<I", 999)), "output_norm.weight is of type 999"),
    (changed({}, {"output_norm.weight": (np.full(256, np.inf, np.float32), Type.F32)}),
     "norm.weight holds numbers that are not finite"),
    (changed({"tokenizer.ggml.model": "llama"}), "tokenizer.ggml.model 'llama' is not supported"),
    (changed({"tokenizer.ggml.pre": "tekken"}),
     "tokenizer.ggml.pre 'tekken' is not supported; there are smollm, qwen2, llama-bpe"),
    (changed({}, drop=("tokenizer.ggml.pre",)), "tokenizer.ggml.pre None is not supported"),
    (changed({}, drop=("tokenizer.ggml.tokens",)), "'tokenizer.ggml.tokens' is missing"),
    (changed({"tokenizer.ggml.token_type": [1]}), "is shorter than"),
    (changed({"tokenizer.ggml.merges": ["a qqqq"]}), "tokenizer.json: is not a tokenizer"),
    (changed({}, drop=("tokenizer.ggml.eos_token_id",)), "no eos_token in tokenizer_config.json"),
    (changed({"tokenizer.ggml.eos_token_id": 640}), "list index out of range"),
    (changed({"tokenizer.chat_template": "{% if"}), "tokenizer_config.json: "),
    (changed({"tokenizer.chat_template": "{{ messages.__class__.__mro__ }}"}), "unsafe"),
    (changed({"tokenizer.chat_template": 7}), "the chat template is broken"),
]


@pytest.mark.parametrize("make, line", BAD, ids=range(len(BAD)))
def test_bad_files_are_one_line(make, line, base, capsys):
    path = base / "bad.gguf"
    make(path)
    said = refused(capsys, base, hf_import, "--source", str(path), "--model-tag", "g")
    assert said.startswith(f"error: {path}") and "\n" not in said and len(said) < 400
    assert re.search(line, said), said


def test_an_export_to_a_file_knows_what_the_import_knew_and_comes_back(base, capsys, monkeypatch):
    """A licence and a name on the hub go from a file through a checkpoint into a file."""
    model = small_model("qwen2")
    said = {"general.name": "Small \n# One", "general.license": "other", "general.license.name": "own: [x",
            "general.base_model.count": 1, "general.base_model.0.repo_url": "https://huggingface.co/Qwen/Qwen2.5-0.5B"}
    config, tokenizer, source = ours_of(model.config), tokenizer_like("qwen25"), str(base / "m.gguf")
    write_gguf(source, config, model.state_dict(), "float32", describe(config, tokenizer, "float32", "m", {}) | said)
    run(hf_import, "--source", source, "--model-tag", "g")
    assert "its licence: `other`, `own: [x`" in capsys.readouterr().out
    target = base / "new" / "out.gguf"
    run(hf_export, "--stage", "sft", "--model-tag", "g", "--to", target, "--dtype", "float32")
    out = capsys.readouterr().out
    assert "began as: `Small # One`\n- which was made from: `Qwen/Qwen2.5-0.5B`\n- licence of that: `other`" in out
    assert origin_of_file(str(target)) == {**origin_of_file(source), "name": "g"}
    assert origin_of_file(source)["base_models"] == ["Qwen/Qwen2.5-0.5B"]
    again = read_gguf(str(target))[1].state_dict()
    assert all(torch.equal(again[key], x) for key, x in model.state_dict().items())
    monkeypatch.setitem(sys.modules, "gguf", None)
    line = refused(capsys, base, hf_export, "--stage", "sft", "--model-tag", "g", "--to", str(base / "x.gguf"))
    assert line.startswith("error: a GGUF file is read and written") and line.endswith("; run `pip install gguf`")


def test_a_file_that_is_not_there_or_a_package_is_one_line(base, capsys, monkeypatch):
    for source in ("models/none.gguf", str(base)):
        line = refused(capsys, base, hf_import, "--source", source + "/x.gguf", "--model-tag", "g")
        assert line == f"error: {source}/x.gguf: No such file or directory"
    changed({})(base / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    line = refused(capsys, base, hf_import, "--source", str(base / "m.gguf"), "--model-tag", "g")
    assert line.startswith("error: a GGUF file is read") and line.endswith("; run `pip install gguf`")
