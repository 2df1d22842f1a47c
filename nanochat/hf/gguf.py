"""
GGUF files, the models of llama.cpp: read into the decoder and the tokenizer that a Hugging Face folder is read into.

A file has metadata, a table of tensors and their numbers; the format stands in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Metadata become what config.json and tokenizer.json would
hold, and the checks of those apply. Tensors are read one by one; the package gguf undoes their quantisation. What is
wrong in a file is told by read_gguf, which names it.
"""
import json
import math
import mmap
import struct
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from nanochat.common import BadInput, dtype_name, print0
from nanochat.hf.decoder import ROPE, Decoder, DecoderConfig
from nanochat.hf.files import ARCHITECTURES, HUB_NAME, STORED, check_names, config_of, licence_of, value_of
from nanochat.hf.shapes import LLAMA31
from nanochat.hf.tokenizer import HFTokenizer
from nanochat.storage.files import reading
from nanochat.weights import allocate

# The file

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # as in struct
TEXT, LIST = 8, 9
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless general.alignment says otherwise


class StoredTensor(NamedTuple):
    kind: int  # a gguf.GGMLQuantizationType: F32, Q4_1, ...
    shape: tuple[int, ...]  # of its numbers
    start: int  # its first byte in the file
    size: int  # bytes


class GGUFFile(NamedTuple):
    metadata: dict
    tensors: dict[str, StoredTensor]
    content: mmap.mmap


class Header:
    """The values at the beginning of a file, one after another."""

    def __init__(self, content: mmap.mmap):
        self.content, self.at = content, 0

    def take(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > len(self.content):
            raise ValueError(f"is truncated: it ends at byte {len(self.content)}, within its header")
        return self.content[start: self.at]

    def number(self, letter: str):
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self):
        """A value of the metadata: a number, a bool, a text, or a list of one of these."""
        kind = self.number("I")
        if kind != LIST:
            return self.plain(kind)
        kind, count = self.number("I"), self.number("Q")
        if kind in NUMBERS:
            size = struct.calcsize(f"<{NUMBERS[kind]}")
            return list(struct.unpack(f"<{count}{NUMBERS[kind]}", self.take(count * size)))
        return [self.plain(kind) for _ in range(count)]

    def plain(self, kind: int):
        return self.text() if kind == TEXT else self.number(NUMBERS[kind])

    def tensor(self) -> tuple[int, tuple[int, ...], int]:
        """Kind, shape and place of a tensor, counted from where tensors begin."""
        dimensions = [self.number("Q") for _ in range(self.number("I"))]
        return self.number("I"), tuple(reversed(dimensions)), self.number("Q")


def gguf_package():
    """The package gguf, which knows the types of tensors. Raises BadInput where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise BadInput(f"a GGUF file is read and written with a package: {error}; run `pip install gguf`") from None
    return gguf


def open_file(path: str) -> GGUFFile:
    """The metadata of a file and where its tensors are. Raises for what is no GGUF file, or not a whole one, and for
    types of tensors that cannot be read."""
    with open(path, "rb") as f:
        content = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)  # the bytes stay in the file until they are read
    header = Header(content)
    if header.take(4) != b"GGUF":
        raise ValueError("is no GGUF file, and no model folder")
    version, num_tensors, num_values = header.number("I"), header.number("Q"), header.number("Q")
    if version not in VERSIONS:
        raise ValueError(f"version {version} of GGUF is not read; there are {VERSIONS[0]} and {VERSIONS[1]}")
    metadata = {header.text(): header.value() for _ in range(num_values)}
    if metadata.get("split.count") not in (None, 0, 1):
        raise ValueError(f"is one part of {metadata['split.count']}: merge them with llama.cpp's gguf-split")
    infos = {header.text(): header.tensor() for _ in range(num_tensors)}
    alignment = metadata.get("general.alignment", ALIGNMENT)
    begin = -(-header.at // alignment) * alignment
    tensors = {name: placed(name, kind, shape, begin + offset) for name, (kind, shape, offset) in infos.items()}
    for name, tensor in tensors.items():
        if tensor.start + tensor.size > len(content):
            raise ValueError(f"is truncated: it ends at byte {len(content)}, "
                             f"and {name} at byte {tensor.start + tensor.size}")
    return GGUFFile(metadata, tensors, content)


def placed(name: str, kind: int, shape: tuple[int, ...], start: int) -> StoredTensor:
    """A tensor with its size in bytes. Raises ValueError for a type that the package gguf cannot read."""
    gguf = gguf_package()
    try:
        kind = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in STORED:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise ValueError(f"{name} is of type {getattr(kind, 'name', kind)}, "
                         f"which the package gguf does not dequantise") from None
    return StoredTensor(kind, shape, start, math.prod(shape) // block * size)


def bytes_of(file: GGUFFile, tensor: StoredTensor) -> np.ndarray:
    return np.frombuffer(file.content, np.uint8, tensor.size, tensor.start)


def numbers_of(file: GGUFFile, name: str) -> torch.Tensor:
    """A tensor, in the dtype that it is stored in; float32 where it is quantised."""
    tensor = file.tensors[name]
    stored = bytes_of(file, tensor)
    if tensor.kind.name in STORED:
        return torch.from_numpy(stored.copy()).view(STORED[tensor.kind.name]).view(tensor.shape)
    with np.errstate(all="ignore"):  # what is not finite is found in the model
        rows = gguf_package().dequantize(stored.reshape(*tensor.shape[:-1], -1), tensor.kind)
    return torch.from_numpy(np.ascontiguousarray(rows, np.float32)).view(tensor.shape)


# The model

SHAPE = {  # of an architecture: the key in a GGUF file -> the key of config.json, and its type
    "context_length": ("max_position_embeddings", int), "block_count": ("num_hidden_layers", int),
    "embedding_length": ("hidden_size", int), "feed_forward_length": ("intermediate_size", int),
    "attention.head_count": ("num_attention_heads", int), "attention.head_count_kv": ("num_key_value_heads", int),
    "attention.key_length": ("head_dim", int), "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
    "rope.freq_base": ("rope_theta", float)}
OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.freq_base")
SCALING = {"rope.scaling.type": "rope_type", "rope.scaling.factor": "factor",
           "rope.scaling.original_context_length": "original_max_position_embeddings"}
HEAD_SIZES = ("rope.dimension_count", "attention.value_length")  # must be that of a head
NEVER_READ = ("tensor_data_layout", "vocab_size", "rope.scaling.finetuned")  # they change nothing
ROPE_FREQS = "rope_freqs.weight"  # of Llama 3: what its scaling divides the frequencies by
MODULES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def stored_name(name: str) -> str:
    """A parameter's name in a GGUF file: blk.0.attn_q.weight of model.layers.0.self_attn.q_proj.weight."""
    module, _, kind = name.rpartition(".")
    if module in MODULES:
        return f"{MODULES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{BLOCK[part]}.{kind}"


def refuse_unknown(file: GGUFFile, architecture: str) -> None:
    """Raises ValueError for a key of the architecture that is not read: it may change the mathematics."""
    known = {*SHAPE, *SCALING, *HEAD_SIZES, *NEVER_READ}
    for key, value in file.metadata.items():
        if key.startswith(f"{architecture}.") and key.split(".", 1)[1] not in known and value:
            raise ValueError(f"{key} is not supported")


def is_tied(file: GGUFFile) -> bool:
    """Whether the head is the embedding: it is not there, or the same bytes."""
    head, embedding = file.tensors.get("output.weight"), file.tensors.get("token_embd.weight")
    return head is None or (embedding is not None and head[:2] == embedding[:2]
                            and np.array_equal(bytes_of(file, head), bytes_of(file, embedding)))


def config_json(file: GGUFFile, architecture: str) -> dict:
    """What config.json would hold."""
    key_of = lambda key: f"{architecture}.{key}"
    given = {name: value_of(file.metadata, key_of(key), kind) for key, (name, kind) in SHAPE.items()
             if key not in OPTIONAL or key_of(key) in file.metadata}
    scaling = {name: file.metadata[key_of(key)] for key, name in SCALING.items() if key_of(key) in file.metadata}
    if scaling.setdefault("rope_type", "linear" if scaling.get("factor") else "none") != "none":
        given["rope_scaling"] = scaling
    return given | {
        "model_type": architecture, "vocab_size": len(file.metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": is_tied(file), "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


def shape_of_file(file: GGUFFile) -> DecoderConfig:
    """The shape that the metadata describe. Raises errors that name a key."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not supported; there are {', '.join(ARCHITECTURES)}")
    refuse_unknown(file, architecture)
    given = config_json(file, architecture)
    config = config_of(given)
    if ROPE_FREQS in file.tensors and architecture == "llama":
        config = config_of(given | {"rope_scaling": llama3_scaling(file, config)})
    for key in (f"{architecture}.{key}" for key in HEAD_SIZES):
        if file.metadata.get(key, config.head_dim) != config.head_dim:
            raise ValueError(f"{key} is {file.metadata[key]!r}, which is not supported with heads of {config.head_dim}")
    return config


def llama3_scaling(file: GGUFFile, config: DecoderConfig) -> dict:
    """The rotary scaling that the tensor ROPE_FREQS shows: that of Llama 3.1 to 3.3, whose factor is the largest of its
    numbers. Raises ValueError for another one."""
    divisors = numbers_of(file, ROPE_FREQS).float()  # (D/2,)
    scaling = {**LLAMA31, "factor": divisors.max().item()}
    config = DecoderConfig(**config.asdict() | {"rope_scaling": scaling})
    expected = ROPE["default"](config)[0] / ROPE["llama3"](config)[0]
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(f"{ROPE_FREQS} is no rotary scaling of Llama 3.1, 3.2 or 3.3, and no other is supported as a "
                         f"tensor")
    return scaling


def find_tensors(path: str, file: GGUFFile, config: DecoderConfig) -> list[str]:
    """The names of the model's tensors. Raises BadInput and ValueError for one that is missing, that the model has no
    place for, or of another shape: before anything is allocated."""
    with torch.device("meta"):
        wanted = {stored_name(name): tuple(p.shape) for name, p in Decoder(config).named_parameters()}
    spare = {"output.weight"} if config.tied else set()
    spare |= {ROPE_FREQS} if config.architecture == "llama" else set()
    check_names(path, config, set(wanted), file.tensors.keys() - spare)
    for name, shape in wanted.items():
        if file.tensors[name].shape != shape:
            raise ValueError(f"{name} is {file.tensors[name].kind.name} {file.tensors[name].shape}, expected {shape}")
    return list(wanted)


def dtype_of(file: GGUFFile, names: list[str]) -> torch.dtype:
    """The embedding's dtype where that holds the numbers of all these tensors, else float32, which does."""
    kind = file.tensors["token_embd.weight"].kind
    dtype = STORED.get(kind.name, torch.float32)
    others = (numbers_of(file, name) for name in names if file.tensors[name].kind != kind)
    return dtype if all(torch.equal(x.to(dtype).to(x.dtype), x) for x in others) else torch.float32


def turned(config: DecoderConfig, name: str) -> int:
    """Of a parameter whose rows the Llama files of llama.cpp have in another order: the number of its heads; else 0."""
    module = name.split(".")[-2] if config.architecture == "llama" else ""
    return {"q_proj": config.n_head, "k_proj": config.n_kv_head}.get(module, 0)


def heads_together(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a projection of queries or keys in Hugging Face's order: the rotary halves of a head one after the other,
    where the Llama files of llama.cpp take turns. x (H D, ...), of the same shape as what comes back."""
    return x.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(x.shape)


@torch.no_grad()
def read_decoder(file: GGUFFile, config: DecoderConfig, names: list[str]) -> Decoder:
    """The model of a file, on the CPU. names: of its tensors."""
    dtype = dtype_of(file, names)
    kinds = Counter(file.tensors[name].kind.name for name in names)
    print0(f"tensors of type {', '.join(f'{kind} ({n})' for kind, n in kinds.most_common())}, "
           f"read as {dtype_name(dtype)}")
    model = allocate(Decoder, config, torch.float32, torch.device("cpu"), dtype)
    for name, p in model.named_parameters():
        x, num_heads = numbers_of(file, stored_name(name)), turned(config, name)
        p.copy_(heads_together(x, num_heads) if num_heads else x)
    return model


# The tokenizer

WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")


def words(digits: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": WORDS.replace("DIGITS", digits)}, "behavior": "Isolated",
            "invert": False}


def byte_level(use_regex: bool) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


# tokenizer.ggml.pre -> how a text is cut, as in the tokenizer.json of SmolLM2, Qwen2 and Llama 3
CUTS = {"smollm": [{"type": "Digits", "individual_digits": True}, byte_level(True)],
        "qwen2": [words(r"\p{N}"), byte_level(False)],
        "llama-bpe": [words(r"\p{N}{1,3}"), byte_level(False)]}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # types of tokens


def cut_of(file: GGUFFile) -> str:
    """The kind of BPE, one of CUTS. Raises ValueError that names another."""
    for key, known in (("tokenizer.ggml.model", ["gpt2"]), ("tokenizer.ggml.pre", list(CUTS))):
        if file.metadata.get(key) not in known:
            raise ValueError(f"{key} {file.metadata.get(key)!r} is not supported; "
                             f"there {'are' if len(known) > 1 else 'is'} {', '.join(known)}")
    return file.metadata["tokenizer.ggml.pre"]


def tokenizer_json(file: GGUFFile) -> dict:
    """What tokenizer.json would hold."""
    cut, tokens, kinds, merges = cut_of(file), *(file.metadata[f"tokenizer.ggml.{key}"]
                                                 for key in ("tokens", "token_type", "merges"))
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": kind != USER_DEFINED}
             for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
             if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}  # these fill the vocabulary up
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
             "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
             "ignore_merges": cut == "llama-bpe", "vocab": vocabulary,
             "merges": [merge.split(" ") for merge in merges]}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "NFC"} if cut == "qwen2" else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": CUTS[cut]},
            "post_processor": begin_of_text(file), "decoder": byte_level(True), "model": model}


def adds_bos(file: GGUFFile) -> bool:
    """Whether a text begins with bos: as the file says, else as Llama 3's does."""
    said = file.metadata.get("tokenizer.ggml.add_bos_token", cut_of(file) == "llama-bpe")
    return "tokenizer.ggml.bos_token_id" in file.metadata and bool(said)


def begin_of_text(file: GGUFFile) -> dict | None:
    """The step of a tokenizer.json that puts bos before a text, or None."""
    if not adds_bos(file):
        return None
    i = file.metadata["tokenizer.ggml.bos_token_id"]
    bos = file.metadata["tokenizer.ggml.tokens"][i]
    text = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": text, "pair": [*text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [i], "tokens": [bos]}}}


def read_tokenizer(path: str, file: GGUFFile) -> HFTokenizer:
    """The tokenizer of a file, with its chat template. Raises BadInput and others."""
    content, tokens = tokenizer_json(file), file.metadata["tokenizer.ggml.tokens"]
    ids = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id")
           for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": adds_bos(file),
              **{name: tokens[ids[key]] for name, key in named.items() if ids[key] is not None}}
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.metadata["tokenizer.chat_template"]
    stop = list(dict.fromkeys(i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None))
    generation = {"bos_token_id": ids["bos"], "eos_token_id": stop}
    written = {"tokenizer.json": content, "tokenizer_config.json": config, "generation_config.json": generation}
    return HFTokenizer({name: json.dumps(values, ensure_ascii=False).encode() for name, values in written.items()},
                       path)


def read_gguf(path: str) -> tuple[HFTokenizer, Decoder]:
    """The tokenizer and the model of a GGUF file. Raises BadInput that names the file and what is wrong in it."""
    with reading(path):
        file = open_file(path)
        config = shape_of_file(file)
        names = find_tensors(path, file, config)
        tokenizer = read_tokenizer(path, file)
    return tokenizer, read_decoder(file, config, names)


# What a file says of its model

HUB, MOST_BASES = "https://huggingface.co/", 8  # models that one is merged from


def origin_of_file(path: str) -> dict:
    """What is known of a file's model, as files.origin_of_folder has it. Raises BadInput."""
    with reading(path):
        metadata = open_file(path).metadata
    text_of = lambda key: metadata[key] if isinstance(metadata.get(key), str) else None
    urls = [text_of(f"general.base_model.{i}.repo_url") or "" for i in range(MOST_BASES)]
    names = [url.removeprefix(HUB).rstrip("/") for url in urls if url.startswith(HUB)]
    return {"name": text_of("general.name"), "base_models": [name for name in names if HUB_NAME.fullmatch(name)],
            **licence_of({key.replace(".", "_"): text_of(f"general.{key}")
                          for key in ("license", "license.name", "license.link")})}
