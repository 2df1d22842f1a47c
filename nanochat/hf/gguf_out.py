"""
Imported models as GGUF files, for llama.cpp and its kin: what nanochat.hf.gguf reads, the other way round.

A file is described first. A model or a tokenizer that GGUF has no words for is refused there, before anything is
written: the description of a tokenizer is read again, and must be the tokenizer. Matrices are of the type that is asked
for, all else is float32, as llama.cpp wants it.
"""
import json
import math
import os

import numpy as np
import torch

from nanochat.common import BadInput
from nanochat.hf.decoder import ROPE, DecoderConfig
from nanochat.hf.files import DTYPES, check_range, written_config
from nanochat.hf.gguf import (CONTROL, CUTS, HEAD_SIZES, HUB, NORMAL, ROPE_FREQS, SCALING, SHAPE, UNUSED, USER_DEFINED,
                              GGUFFile, gguf_package, read_tokenizer, stored_name, turned)
from nanochat.hf.shapes import LLAMA31
from nanochat.hf.tokenizer import BYTE_OF, HFTokenizer, special_tokens
from nanochat.storage.files import make_folder, whole_file

KINDS = {"float32": ("F32", 0), "float16": ("F16", 1), "q8_0": ("Q8_0", 7), "bfloat16": ("BF16", 32)}  # file types too
STOPS = ("eos", "eot", "eom")  # tokens that end an answer


# The model

def shape_metadata(config: DecoderConfig) -> dict:
    """The keys of a file that describe a model. Raises ValueError for rotary scaling that they cannot describe."""
    given, scaling, kind = written_config(config, torch.float32, {}), config.rope_scaling or {}, config.architecture
    found = {key: of_type(given[name]) for key, (name, of_type) in SHAPE.items()}
    found |= dict.fromkeys(HEAD_SIZES, config.head_dim)
    if scaling.get("rope_type") == "llama3":
        if scaling != {**LLAMA31, "factor": scaling["factor"]} or kind != "llama":
            raise ValueError("GGUF has no words for its rotary scaling, which is not that of Llama 3.1, 3.2 or 3.3")
    elif lost := {name for name, value in scaling.items() if value is not None} - set(SCALING.values()):
        raise ValueError(f"GGUF has no words for {', '.join(sorted(lost))} of its rotary scaling")
    else:
        found |= {key: scaling[name] for key, name in SCALING.items() if scaling.get(name) is not None}
    return {f"{kind}.{key}": value for key, value in found.items()}


def rope_freqs(config: DecoderConfig) -> dict[str, torch.Tensor]:
    """The tensor that holds Llama 3's rotary scaling, (D/2,) float32, by its name; {} of other models."""
    if (config.rope_scaling or {}).get("rope_type") != "llama3":
        return {}
    return {ROPE_FREQS: ROPE["default"](config)[0] / ROPE["llama3"](config)[0]}


def in_turns(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The inverse of gguf.heads_together."""
    return x.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(x.shape)


def tensors_of(config: DecoderConfig, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file by their names, as llama.cpp orders their rows."""
    found = rope_freqs(config)
    for name, x in state.items():
        if name != "lm_head.weight" or not config.tied:
            num_heads = turned(config, name)
            found[stored_name(name)] = in_turns(x, num_heads) if num_heads else x
    return found


# The tokenizer

def cut_of_settings(settings: dict) -> str:
    """The kind of BPE, one of CUTS, whose way to cut a text is a tokenizer's. Raises ValueError where there is none."""
    steps = lambda given: [{key: value for key, value in step.items() if key != "trim_offsets"} for step in given]
    pre = settings["pre_tokenizer"] or {}
    own = steps(pre.get("pretokenizers", [pre]))
    found = [cut for cut, known in CUTS.items() if steps(known) == own]
    if not found:
        raise ValueError(f"its tokenizer cuts a text in another way than GGUF's {', '.join(CUTS)}")
    return found[0]


def tokenizer_metadata(tokenizer: HFTokenizer, vocab_size: int) -> dict:
    """The keys of a file that describe a tokenizer; unused tokens fill its vocabulary up to the model's. Raises
    ValueError where it would not be the same tokenizer when read."""
    added = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in tokenizer.settings["added_tokens"]}
    ids, tokens = range(vocab_size), tokenizer.tokens
    named, _ = special_tokens(json.loads(tokenizer.files.get("tokenizer_config.json", b"{}")))
    stops = list(dict.fromkeys([tokenizer.eos, *tokenizer.stop_tokens]))
    if not tokenizer.settings["model"]["merges"]:
        raise ValueError("its tokenizer has no merges, without which no program opens a GGUF file")
    if len(stops) > len(STOPS):
        raise ValueError(f"its tokenizer has {len(stops)} tokens that end an answer, and GGUF names {len(STOPS)}")
    special = dict(zip(STOPS, stops, strict=False)) | {"bos": tokenizer.bos}
    special |= {key: tokenizer.ids.get(named.get(name)) for key, name in (("unknown", "unk_token"),
                                                                         ("padding", "pad_token"))}
    found = {"model": "gpt2", "pre": cut_of_settings(tokenizer.settings),
             "tokens": [tokens.get(i, f"[PAD{i}]") for i in ids],
             "token_type": [added.get(i, NORMAL if i in tokens else UNUSED) for i in ids],
             "merges": [" ".join(merge) for merge in tokenizer.settings["model"]["merges"]],
             **{f"{name}_token_id": i for name, i in special.items() if i is not None},
             "add_bos_token": tokenizer.adds_bos}
    found = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    if tokenizer.has_template:
        found["tokenizer.chat_template"] = tokenizer.template.source
    before, after = (meaning_of(t) for t in (tokenizer, read_tokenizer("GGUF", GGUFFile(found, {}, None))))
    if lost := [part for part in before if before[part] != after[part]]:
        raise ValueError(f"GGUF cannot hold its tokenizer: read again it has other {' and other '.join(lost)}")
    return found


def meaning_of(tokenizer: HFTokenizer) -> dict:
    """What makes the ids of texts and prompts, by what it is called."""
    settings, source = tokenizer.settings, tokenizer.template.source
    model, normalizer, has_all_bytes = settings["model"], settings["normalizer"], BYTE_OF.keys() <= tokenizer.ids.keys()
    unused = set() if normalizer else {"normalized"}
    added = [{key: value for key, value in token.items() if key not in unused} for token in settings["added_tokens"]]
    return {"tokens": tokenizer.ids, "merges": model["merges"], "normal forms": normalizer,
            "words that are looked up before they are merged": bool(model.get("ignore_merges")),
            "unknown tokens": has_all_bytes or model["unk_token"],
            "added tokens": sorted(added, key=lambda token: token["id"]),
            "chat templates": (tokenizer.has_template, source),
            "words of its chat template": {k: v for k, v in tokenizer.template.variables.items() if k in source},
            "tokens that end an answer": set(tokenizer.stop_tokens)}


# The file

def origin_metadata(name: str, origin: dict) -> dict:
    """The keys of a file that say what it is and came from. origin: as files.origin_of_folder has it."""
    found = {"type": "model", "name": name, **{key.replace("license_", "license."): value
                                                for key, value in origin.items() if key.startswith("license")}}
    bases = origin.get("base_models", [])
    for i, base in enumerate(bases):
        found |= {f"base_model.{i}.name": base.split("/")[1], f"base_model.{i}.repo_url": HUB + base}
    found |= {"base_model.count": len(bases)} if bases else {}
    return {f"general.{key}": value for key, value in found.items()}


def describe(config: DecoderConfig, tokenizer: HFTokenizer, dtype: str, name: str, origin: dict) -> dict:
    """The metadata of a file. dtype: one of KINDS. Raises BadInput, which begins with the name, for what GGUF cannot
    hold, and without the package gguf."""
    gguf = gguf_package()
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[KINDS[dtype][0]]]
    if width := next((n for n in (config.n_embd, config.intermediate_size, config.n_head * config.head_dim)
                      if n % block), None):
        raise BadInput(f"--dtype {dtype}: needs rows of a multiple of {block} numbers, and {name} has some of {width}")
    try:
        tokenizer.check_model("model", config)
        return (origin_metadata(name, origin)
                | {"general.file_type": KINDS[dtype][1], "general.quantization_version": gguf.GGML_QUANT_VERSION}
                | shape_metadata(config) | tokenizer_metadata(tokenizer, config.vocab_size))
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"{name}: {error}") from None


@torch.no_grad()
def write_gguf(path: str, config: DecoderConfig, state: dict[str, torch.Tensor], dtype: str, metadata: dict) -> None:
    """Writes a file, whole or not at all, tensor by tensor. metadata: of `describe`; dtype: one of KINDS, of the
    matrices. Raises BadInput where that has no such large weights, CannotWrite."""
    gguf = gguf_package()
    value_types, kinds = gguf.GGUFValueType, gguf.GGMLQuantizationType
    types = {bool: value_types.BOOL, int: value_types.UINT32, float: value_types.FLOAT32, str: value_types.STRING,
             list: value_types.ARRAY}
    check_range(state, DTYPES.get(dtype, torch.float32))
    writer, tensors = gguf.GGUFWriter(None, config.architecture), tensors_of(config, state)
    for key, value in metadata.items():
        writer.add_key_value(key, value, types[type(value)])
    kind_of = {name: kinds[KINDS[dtype][0]] if x.dim() == 2 else kinds.F32 for name, x in tensors.items()}
    for name, x in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[kind_of[name]]
        writer.add_tensor_info(name, x.shape, np.dtype(np.float32), math.prod(x.shape) // block * size, kind_of[name])
    make_folder(os.path.dirname(os.path.abspath(path)))
    with whole_file(path, "wb") as f:
        writer.write_header_to_file(f.name)  # which opens the same file
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, x in tensors.items():
            writer.write_tensor_data(gguf.quantize(x.float().contiguous().numpy(), kind_of[name]))
        writer.close()
