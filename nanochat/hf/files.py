"""
Hugging Face model folders: config.json and sharded safetensors, in and out.

Reading goes tensor by tensor onto the target device, so host memory peaks at about one tensor above the model. Writing
gives a folder that transformers opens. What a folder asks for and the decoder does not have is an error that names it.
"""
import contextlib
import glob
import json
import math
import os
import re
import shutil
import tempfile

import torch

from nanochat.common import BadInput, CannotWrite, dtype_name, print0
from nanochat.hf.decoder import ROPE, Decoder, DecoderConfig
from nanochat.storage.files import look_for_hub, make_folder, write_json, writing
from nanochat.weights import allocate

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
IGNORED = re.compile(r".*rotary_emb\.inv_freq")  # old Llama files keep it; it follows from the config
WANTED = ["*.safetensors", "*.json", "*.jinja"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as safetensors call them
SHARD_SIZE = "5GB"
PARTIAL = ".partial"  # ends the name of a folder that is being written


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def find_folder(source: str) -> str:
    """The folder that a path names, or what is downloaded for the name of a model on the hub. Raises BadInput."""
    folder = os.path.expanduser(source)
    if os.path.isdir(folder):
        for name in sorted(os.listdir(folder)):  # a pipe would be waited for
            if not os.path.isdir(path := os.path.join(folder, name)) and not os.path.isfile(path):
                raise BadInput(f"{path}: is no file")
        if not os.path.exists(os.path.join(folder, "config.json")):
            raise BadInput(f"--source {source}: is no model folder: it has no config.json")
        return folder
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        raise BadInput(f"--source {source}: no such folder, and not the name of a model on the hub (owner/name)")
    import huggingface_hub
    look_for_hub()
    try:
        return huggingface_hub.snapshot_download(source, allow_patterns=WANTED)
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.LocalEntryNotFoundError, OSError,
            ValueError) as error:
        raise BadInput(f"--source {source}: no such folder, and the hub gives nothing: {one_line(error)}") from None


def read_json(path: str) -> dict:
    """A json object of a file. Raises BadInput."""
    try:
        with open(path, encoding="utf-8") as f:
            content = json.load(f)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is no json: {error}") from None
    if not isinstance(content, dict):
        raise BadInput(f"{path} holds no json object")
    return content


def value_of(given: dict, key: str, kind: type, where: str, default=None):
    """A value of a config.json: a positive int or float, or a bool. null, or no such key: the default. Raises BadInput
    that names the file and the key."""
    value = default if given.get(key) is None else given[key]
    if value is None:
        raise BadInput(f"{where}: {key} is missing")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or kind is not bool and not 0 < value < (2 ** 31 if kind is int else math.inf):
        expected = {int: "a whole number from 1 to 2^31 - 1", float: "a positive number", bool: "true or false"}[kind]
        raise BadInput(f"{where}: {key} is {value!r}, expected {expected}")
    return value


def rope_of(given: dict, where: str) -> tuple[float, dict | None]:
    """rope_theta and the scaling of a config.json, of transformers 4 (rope_scaling) or 5 (rope_parameters).
    Raises BadInput."""
    parameters = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise BadInput(f"{where}: rotary scaling is {parameters!r}, expected an object")
    parameters = dict(parameters)
    theta = {"rope_theta": parameters.pop("rope_theta", None) or given.get("rope_theta")}
    theta = value_of(theta, "rope_theta", float, where, 10000.0)
    if "type" in parameters:
        parameters.setdefault("rope_type", parameters.pop("type"))
    kind = parameters.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE:
        raise BadInput(f"{where}: rotary scaling {kind!r} is not supported; there are {', '.join(ROPE)}")
    if parameters.pop("partial_rotary_factor", None) not in (None, 1):
        raise BadInput(f"{where}: partial_rotary_factor is not supported")
    if kind in ("llama3", "yarn") and "original_max_position_embeddings" in given:  # some files have it there
        parameters["original_max_position_embeddings"] = given["original_max_position_embeddings"]
    llama3 = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    needed = {"linear": ["factor"], "yarn": ["factor"], "llama3": llama3}.get(kind, [])
    missing = [key for key in needed if parameters.get(key) is None]
    if missing:
        raise BadInput(f"{where}: rotary scaling {kind!r} without {missing[0]}")
    for key, value in parameters.items():
        no_number = key != "rope_type" and value is not None and not (isinstance(value, int | float)
                                                                      and abs(value) < math.inf)
        if no_number or key in needed and not 0 < value < math.inf:
            raise BadInput(f"{where}: {key} of rotary scaling {kind!r} is {value!r}, "
                           f"expected a {'positive ' * (key in needed)}number")
    return theta, None if kind == "default" else parameters


def listed(value) -> list:
    """A list as it is, nothing as an empty one, anything else as its only entry."""
    return value if isinstance(value, list) else [] if value is None else [value]


def refuse_unsupported(given: dict, where: str) -> None:
    """Raises BadInput for options that change the mathematics and are not there."""
    partial_attention = any(kind != "full_attention" for kind in listed(given.get("layer_types")))
    found = [given.get("hidden_act", "silu") != "silu" and f"hidden_act {given.get('hidden_act')!r}",
             given.get("use_sliding_window") and "use_sliding_window",
             partial_attention and "layer_types other than full_attention",
             given.get("quantization_config") and "quantization_config",
             given.get("partial_rotary_factor") not in (None, 1) and "partial_rotary_factor",
             given.get("pretraining_tp") not in (None, 1) and "pretraining_tp"]
    for what in filter(None, found):
        raise BadInput(f"{where}: {what} is not supported")


def read_config(folder: str) -> DecoderConfig:
    """The shape that a folder's config.json describes. Raises BadInput that names the file and the key."""
    path = os.path.join(folder, "config.json")
    return config_of(read_json(path), path)


def config_of(given: dict, path: str) -> DecoderConfig:
    """The shape that the keys of a config.json describe. path: of the file they are from. Raises BadInput that names
    it and the key."""
    kind, named = given.get("model_type"), given.get("architectures")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        shown = kind if not isinstance(kind, str) else named[0] if isinstance(named, list) and named else named or kind
        raise BadInput(f"{path}: architecture {shown!r} is not supported; there are "
                       f"{', '.join(ARCHITECTURES.values())}")
    refuse_unsupported(given, path)
    theta, scaling = rope_of(given, path)

    def count(key: str, default: int | None = None) -> int:
        return value_of(given, key, int, path, default)

    def flag(key: str) -> bool:
        return value_of(given, key, bool, path, False)

    heads, width = count("num_attention_heads"), count("hidden_size")
    config = DecoderConfig(
        architecture=kind, sequence_len=count("max_position_embeddings"), vocab_size=count("vocab_size"),
        n_layer=count("num_hidden_layers"), n_head=heads, n_kv_head=count("num_key_value_heads", heads), n_embd=width,
        head_dim=count("head_dim", width // heads), intermediate_size=count("intermediate_size"),
        norm_eps=value_of(given, "rms_norm_eps", float, path, 1e-6), rope_theta=theta, rope_scaling=scaling,
        qkv_bias=kind == "qwen2" or flag("attention_bias"), out_bias=kind != "qwen2" and flag("attention_bias"),
        mlp_bias=kind == "llama" and flag("mlp_bias"), qk_norm=kind == "qwen3", tied=flag("tie_word_embeddings"))
    if config.norm_eps > 1:  # float32 would make it infinite, and every activation zero
        raise BadInput(f"{path}: rms_norm_eps is {config.norm_eps}, expected at most 1")
    if config.head_dim % 2 or heads % config.n_kv_head:
        raise BadInput(f"{path}: {heads} heads of {config.head_dim} and {config.n_kv_head} key/value heads: "
                       f"need an even head size, and heads a multiple of the key/value heads")
    try:
        frequencies, factor = ROPE[(scaling or {}).get("rope_type", "default")](config)
        are_numbers = bool(frequencies.isfinite().all()) and math.isfinite(factor)
    except (ArithmeticError, RuntimeError, ValueError):
        are_numbers = False
    if not are_numbers:
        raise BadInput(f"{path}: with rope_theta {theta} and rotary scaling {scaling} there are no frequencies")
    return config


def written_config(config: DecoderConfig, dtype: torch.dtype, token_ids: dict) -> dict:
    """config.json of a model, in the keys of transformers 4, which 5 reads too. token_ids: bos_token_id and
    eos_token_id, where known."""
    own = {"llama": {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias},
           "qwen2": {"use_sliding_window": False},
           "qwen3": {"attention_bias": config.qkv_bias, "use_sliding_window": False}}[config.architecture]
    return {
        "architectures": [ARCHITECTURES[config.architecture]], "model_type": config.architecture,
        "hidden_size": config.n_embd, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layer, "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head, "head_dim": config.head_dim, "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.sequence_len, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling, "tie_word_embeddings": config.tied, "attention_dropout": 0.0,
        "torch_dtype": dtype_name(dtype), **own, **token_ids}


def weight_files(folder: str) -> dict[str, str]:
    """tensor name -> the safetensors file that holds it. Raises BadInput."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index):
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict):
            raise BadInput(f"{index} has no weight_map")
        paths = {name: os.path.join(folder, os.path.basename(str(file))) for name, file in files.items()}
        for path in sorted(set(paths.values())):
            if not os.path.exists(path):
                raise BadInput(f"{path} is missing; {index} names it")
        return paths
    path = os.path.join(folder, "model.safetensors")
    if not os.path.exists(path):
        raise BadInput(f"{folder} has neither model.safetensors nor model.safetensors.index.json "
                       f"(only safetensors are read)")
    with opened(path) as f:
        return dict.fromkeys(f.keys(), path)


def check_tensors(folder: str, config: DecoderConfig, files: dict[str, str]) -> None:
    """Raises BadInput for a tensor that is missing, that the model has no place for, or of another shape: before
    anything is allocated."""
    if config.n_layer > 1000 + len(files):  # even without weights a model takes time
        raise BadInput(f"{folder}: tensor model.layers.{config.n_layer - 1}.input_layernorm.weight is missing")
    with torch.device("meta"):
        model = Decoder(config)
    spare = {"lm_head.weight"} if config.tied else set()
    check_names(folder, config, {name for name, _ in model.named_parameters()}, files.keys() - spare)
    for path in sorted(set(files.values())):
        with opened(path) as f:
            there = set(f.keys())
            for name, p in model.named_parameters():
                if files[name] == path and name in there:
                    part = f.get_slice(name)
                    if tuple(part.get_shape()) != tuple(p.shape):
                        stored = STORED.get(part.get_dtype(), part.get_dtype())
                        raise BadInput(f"{path}: {name} is {stored} {tuple(part.get_shape())}, "
                                       f"expected floats of {tuple(p.shape)}")


def check_names(where: str, config: DecoderConfig, wanted: set[str], there: set[str]) -> None:
    """Raises BadInput for a tensor that is missing, or that the model has no place for."""
    missing = sorted(wanted - there)
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise BadInput(f"{where}: tensor {missing[0]} is missing{more}")
    unknown = sorted(name for name in there - wanted if not IGNORED.fullmatch(name))
    if unknown:
        raise BadInput(f"{where}: tensor {unknown[0]} has no place in a {config.architecture} model" +
                       (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""))


@torch.no_grad()
def read_model(folder: str, device, compute_dtype: torch.dtype, dtype: torch.dtype | None = None) -> Decoder:
    """The model of a folder. dtype: of its parameters; by default that of the file's embedding. Raises BadInput that
    names a file or tensor."""
    config, files = read_config(folder), weight_files(folder)
    check_tensors(folder, config, files)
    names_of: dict[str, list[str]] = {}
    for name, path in files.items():
        names_of.setdefault(path, []).append(name)
    if dtype is None:
        path = files["model.embed_tokens.weight"]
        with opened(path) as f:
            stored = f.get_slice("model.embed_tokens.weight").get_dtype()
        if stored not in STORED:
            raise BadInput(f"{path}: model.embed_tokens.weight is {stored}, expected one of {', '.join(STORED)}")
        dtype = STORED[stored]
    model = allocate(Decoder, config, compute_dtype, device, dtype)
    wanted = dict(model.named_parameters())
    for path, names in names_of.items():
        with opened(path) as f:
            for name in names:
                if name in wanted:
                    read_tensor(f, path, name, wanted[name])
    if config.tied and "lm_head.weight" in files:
        path, head = files["lm_head.weight"], model.lm_head.weight
        with opened(path) as f:
            if not torch.equal(f.get_tensor("lm_head.weight").to(head), head):
                raise BadInput(f"{path}: lm_head.weight is not the embedding, "
                               f"though config.json has tie_word_embeddings")
    return model


@contextlib.contextmanager
def opened(path: str):
    """A safetensors file. Raises BadInput that names it where it cannot be read."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="pt") as f:
            yield f
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} cannot be read: {one_line(error)}") from None


def read_tensor(f, path: str, name: str, p: torch.Tensor) -> None:
    """Copies a tensor of a file into a parameter. A function, so that the tensor is gone before the next one is read.
    Raises BadInput."""
    tensor = f.get_tensor(name)
    if tensor.shape != p.shape or not tensor.is_floating_point():
        raise BadInput(f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected floats of {tuple(p.shape)}")
    p.copy_(tensor)


def write_model(folder: str, config: DecoderConfig, state: dict[str, torch.Tensor], dtype: torch.dtype,
                tokenizer) -> None:
    """Writes a model folder, whole or not at all: config, weights in shards, tokenizer files. Raises BadInput where the
    folder is there already or the dtype has no such large weights, CannotWrite."""
    from safetensors import SafetensorError
    if os.path.exists(folder):
        raise BadInput(f"--to {folder}: exists already")
    for weight, x in state.items():
        if x.isfinite().all() and not x.to(dtype).isfinite().all():
            raise BadInput(f"--dtype {dtype_name(dtype)}: has no {x.abs().max():g}, which is in "
                           f"{weight}; bfloat16 and float32 have")
    parent, name = os.path.split(os.path.abspath(folder))
    make_folder(parent)
    for other in glob.glob(f".{glob.escape(name)}-*{PARTIAL}", root_dir=parent):
        print0(f"WARNING: {os.path.join(parent, other)} is of another export to {folder}: remove it, unless that one "
               f"is still at work")
    try:
        with writing(folder):
            partial = tempfile.mkdtemp(dir=parent, prefix=f".{name}-", suffix=PARTIAL)
            try:
                fill_folder(partial, config, state, dtype, tokenizer)
                os.rename(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except SafetensorError as error:  # which has the system's reason in its text alone
        raise CannotWrite(f"{folder} cannot be written: {error}") from error


def fill_folder(folder: str, config: DecoderConfig, state: dict[str, torch.Tensor], dtype: torch.dtype,
                tokenizer) -> None:
    """Writes the files of write_model into a folder that is there."""
    import huggingface_hub
    os.chmod(folder, 0o755)  # mkdtemp makes it for its owner alone
    tokenizer.save(folder)
    stop = tokenizer.stop_tokens
    ids = {"eos_token_id": stop if len(stop) > 1 else stop[0], "bos_token_id": tokenizer.bos}
    # transformers stops at its tokens, not at config.json's.
    generation = os.path.join(folder, "generation_config.json")
    before = read_json(generation) if os.path.exists(generation) else {}
    write_json(os.path.join(folder, "config.json"), written_config(config, dtype, ids))
    write_json(generation, before | ids)
    if config.tied:
        state = {name: x for name, x in state.items() if name != "lm_head.weight"}
    state = {name: x.to(dtype).contiguous() for name, x in state.items()}
    huggingface_hub.save_torch_state_dict(state, folder, max_shard_size=SHARD_SIZE)
