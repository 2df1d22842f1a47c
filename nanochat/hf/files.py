"""
Hugging Face model folders: config.json and sharded safetensors, in and out.

Reading goes tensor by tensor onto the target device, so host memory peaks at about one tensor above the model. Writing
gives a folder that transformers opens. What a folder asks for and the decoder does not have is an error that names it.
"""
import contextlib
import math
import os
import re

import torch

from nanochat.common import BadInput, CannotWrite, dtype_name, one_line, print0
from nanochat.gpt import check_layers
from nanochat.hf.decoder import ROPE, Decoder, DecoderConfig
from nanochat.storage.files import check_writable, look_for_hub, read_json, reading, whole_folder, write_json
from nanochat.weights import allocate

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
IGNORED = re.compile(r".*rotary_emb\.inv_freq")  # old Llama files keep it; it follows from the config
WANTED = ["*.safetensors", "*.json", "*.jinja", "README.md"]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)  # of a model on the hub
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as safetensors call them
SHARD_SIZE = "5GB"


def find_folder(source: str) -> str:
    """The folder that a path names, or what is downloaded for the name of a model on the hub. Raises BadInput."""
    folder = os.path.expanduser(source)
    if os.path.isdir(folder):
        return folder
    if not HUB_NAME.fullmatch(source):
        raise BadInput(f"--source {source}: no such folder, and not the name of a model on the hub (owner/name)")
    import huggingface_hub
    look_for_hub()
    try:
        return huggingface_hub.snapshot_download(source, allow_patterns=WANTED)
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.LocalEntryNotFoundError, OSError,
            ValueError) as error:
        raise BadInput(f"--source {source}: no such folder, and the hub gives nothing: {one_line(error)}") from None


def licence_of(given: dict) -> dict[str, str]:
    """license, license_name and license_link of these, as the hub calls them: those that are there and are text."""
    return {key: given[key] for key in ("license", "license_name", "license_link") if isinstance(given.get(key), str)}


def origin_of_folder(folder: str, name: str | None) -> dict:
    """What is known of a folder's model. name: on the hub, None where it is not from there. -> {"name", "base_models":
    names on the hub of what it was made from, or its own, and of licence_of}, the last two from the head of README.md.
    One that cannot be read is told, and says nothing."""
    import huggingface_hub
    path, said = os.path.join(folder, "README.md"), None
    if os.path.exists(path):
        try:
            said = huggingface_hub.metadata_load(path)
        except Exception as error:  # of many types, YAML's among them
            print0(f"WARNING: {path}: its head cannot be read, so the model's licence is not known: {one_line(error)}")
    said = said or {}
    bases = said.get("base_model") if isinstance(said.get("base_model"), list) else [said.get("base_model")]
    bases = [base for base in bases if isinstance(base, str) and HUB_NAME.fullmatch(base)]
    return {"name": name, "base_models": [name] if name else bases, **licence_of(said)}


def value_of(given: dict, key: str, kind: type, default=None):
    """A value of a config.json: a positive int or float, or a bool. null, or no such key: the default. Raises KeyError
    and ValueError that name the key."""
    value = default if given.get(key) is None else given[key]
    if value is None:
        raise KeyError(key)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or kind is not bool and not 0 < value < (2 ** 31 if kind is int else math.inf):
        expected = {int: "a whole number from 1 to 2^31 - 1", float: "a positive number", bool: "true or false"}[kind]
        raise ValueError(f"{key} is {value!r}, expected {expected}")
    return value


def rope_parameters(given: dict) -> dict:
    """What a config.json says of rotary positions, as transformers 5 calls it, or 4: where both are there, that of 4
    counts alone, in transformers too."""
    return given.get("rope_scaling") or given.get("rope_parameters") or {}


def rope_of(given: dict) -> tuple[float, dict | None]:
    """rope_theta and the scaling of a config.json."""
    parameters = dict(rope_parameters(given))
    theta = parameters.pop("rope_theta", None) or given.get("rope_theta")
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    kind = parameters["rope_type"]
    if kind not in list(ROPE):
        raise ValueError(f"rotary scaling {kind!r} is not supported; there are {', '.join(ROPE)}")
    if kind in ("llama3", "yarn") and "original_max_position_embeddings" in given:  # some files have it there
        parameters["original_max_position_embeddings"] = given["original_max_position_embeddings"]
    for key, value in parameters.items():
        if key != "rope_type" and value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ValueError(f"{key} of rotary scaling {kind!r} is {value!r}, expected a positive number")
    return value_of({"rope_theta": theta}, "rope_theta", float, 10000.0), None if kind == "default" else parameters


def refuse_unsupported(given: dict) -> None:
    """Raises ValueError for options that change what is computed and are not there."""
    found = [given.get("hidden_act", "silu") != "silu" and f"hidden_act {given.get('hidden_act')!r}",
             given.get("use_sliding_window") and "use_sliding_window",
             set(given.get("layer_types") or ()) - {"full_attention"} and "layer_types other than full_attention",
             given.get("quantization_config") and "quantization_config",
             any(x.get("partial_rotary_factor") not in (None, 1)
                 for x in (given, rope_parameters(given))) and "partial_rotary_factor",
             given.get("transformers_weights") and "transformers_weights",  # weights of another file
             given.get("pretraining_tp") not in (None, 1) and "pretraining_tp"]
    for what in filter(None, found):
        raise ValueError(f"{what} is not supported")


def read_config(folder: str) -> DecoderConfig:
    """The shape that a folder's config.json describes. Raises BadInput that names the file and the key."""
    path = os.path.join(folder, "config.json")
    with reading(path):
        return config_of(read_json(path))


def config_of(given: dict) -> DecoderConfig:
    """The shape that the keys of a config.json describe. To be called under `reading`, like all that it calls."""
    kind = given.get("model_type")
    if kind not in list(ARCHITECTURES):
        raise ValueError(f"architecture {(given.get('architectures') or [kind])[0]!r} is not supported; there are "
                         f"{', '.join(ARCHITECTURES.values())}")
    refuse_unsupported(given)
    theta, scaling = rope_of(given)
    count = lambda key, default=None: value_of(given, key, int, default)
    flag = lambda key: value_of(given, key, bool, False)
    heads, width = count("num_attention_heads"), count("hidden_size")
    config = DecoderConfig(
        architecture=kind, sequence_len=count("max_position_embeddings"), vocab_size=count("vocab_size"),
        n_layer=count("num_hidden_layers"), n_head=heads, n_kv_head=count("num_key_value_heads", heads), n_embd=width,
        head_dim=count("head_dim", width // heads), intermediate_size=count("intermediate_size"),
        norm_eps=value_of(given, "rms_norm_eps", float, 1e-6), rope_theta=theta, rope_scaling=scaling,
        qkv_bias=kind == "qwen2" or flag("attention_bias"), out_bias=kind != "qwen2" and flag("attention_bias"),
        mlp_bias=kind == "llama" and flag("mlp_bias"), qk_norm=kind == "qwen3", tied=flag("tie_word_embeddings"))
    check_layers("num_hidden_layers", config.n_layer)
    if config.head_dim % 2 or heads % config.n_kv_head:
        raise ValueError(f"{heads} heads of {config.head_dim} and {config.n_kv_head} key/value heads: "
                         f"need an even head size, and heads a multiple of the key/value heads")
    frequencies, factor = ROPE[(scaling or {}).get("rope_type", "default")](config)
    if not (frequencies.isfinite().all() and math.isfinite(factor)):
        raise ValueError(f"with rope_theta {theta} and rotary scaling {scaling} there are no frequencies")
    return config


def written_config(config: DecoderConfig, dtype: torch.dtype, token_ids: dict) -> dict:
    """config.json in the keys of transformers 4, which 5 reads too. token_ids: bos_token_id, eos_token_id, if known."""
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
    """tensor name -> the safetensors file that holds it: where there is a single file, an index of shards beside it is
    of another model, and does not count, in transformers too. Raises BadInput."""
    index, path = (os.path.join(folder, f"model.safetensors{end}") for end in (".index.json", ""))
    if os.path.exists(path):
        if os.path.exists(index):
            print0(f"WARNING: {path} is read, not the shards of {index}; remove those that are not wanted")
        with opened(path) as f:
            return dict.fromkeys(f.keys(), path)
    if not os.path.exists(index):
        raise BadInput(f"{folder} has neither model.safetensors nor model.safetensors.index.json "
                       f"(only safetensors are read)")
    with reading(index):
        return {name: os.path.join(folder, os.path.basename(file))  # none outside of the folder
                for name, file in read_json(index)["weight_map"].items()}


def check_tensors(folder: str, config: DecoderConfig, files: dict[str, str]) -> None:
    """Raises BadInput for a tensor that is missing, has no place, or another shape: before anything is allocated."""
    with torch.device("meta"):
        wanted = {name: p.shape for name, p in Decoder(config).named_parameters()}
    check_names(folder, config, set(wanted), files.keys() - ({"lm_head.weight"} if config.tied else set()))
    for path in sorted(set(files.values())):
        with opened(path) as f:
            for name in (name for name in wanted if files[name] == path):
                part = f.get_slice(name)
                shape, kind = tuple(part.get_shape()), part.get_dtype()
                if shape != tuple(wanted[name]) or kind not in STORED:
                    raise BadInput(f"{path}: {name} is {kind} {shape}, expected {tuple(wanted[name])} of "
                                   f"{', '.join(STORED)}")


def check_names(where: str, config: DecoderConfig, wanted: set[str], there: set[str]) -> None:
    """Raises BadInput for a tensor that is missing, or that the model has no place for."""
    unknown = [name for name in there - wanted if not IGNORED.fullmatch(name)]
    for names, what in ((wanted - there, "is missing"), (unknown, f"has no place in a {config.architecture} model")):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise BadInput(f"{where}: tensor {min(names)} {what}{more}")


@torch.no_grad()
def read_model(folder: str, device, compute_dtype: torch.dtype, dtype: torch.dtype | None = None) -> Decoder:
    """The model of a folder. dtype: of its parameters; by default that of the file's embedding. Raises BadInput."""
    config, files = read_config(folder), weight_files(folder)
    check_tensors(folder, config, files)
    if dtype is None:
        with opened(files["model.embed_tokens.weight"]) as f:
            dtype = STORED[f.get_slice("model.embed_tokens.weight").get_dtype()]
    model = allocate(Decoder, config, compute_dtype, device, dtype)
    for path in dict.fromkeys(files.values()):
        with opened(path) as f:
            for name, p in model.named_parameters():
                if files[name] == path:
                    p.copy_(f.get_tensor(name))
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


def new_path(flag: str, given: str) -> str:
    """The folder or file that a flag names, ~ expanded. Raises BadInput where it is there already or cannot be made."""
    path = os.path.expanduser(given)
    if not path or os.path.exists(path):
        raise BadInput(f"{flag} {given}: {'exists already' if path else 'is empty'}")
    check_writable(path)
    return path


def check_range(state: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Raises BadInput for a weight that is too large for the dtype."""
    for weight, x in state.items():
        if x.isfinite().all() and not x.to(dtype).isfinite().all():
            raise BadInput(f"--dtype {dtype_name(dtype)}: has no {x.abs().max():g}, which is in "
                           f"{weight}; bfloat16 and float32 have")


def write_model(folder: str, config: DecoderConfig, state: dict[str, torch.Tensor], dtype: torch.dtype,
                tokenizer) -> None:
    """Writes a model folder, whole or not at all: config, weights in shards, tokenizer files. Raises BadInput where the
    dtype has no such large weights, CannotWrite."""
    from safetensors import SafetensorError
    check_range(state, dtype)
    try:
        with whole_folder(folder) as partial:
            fill_folder(partial, config, state, dtype, tokenizer)
    except SafetensorError as error:  # which has the system's reason in its text alone
        raise CannotWrite(f"{folder} cannot be written: {error}") from error


def fill_folder(folder: str, config: DecoderConfig, state: dict[str, torch.Tensor], dtype: torch.dtype,
                tokenizer) -> None:
    """Writes the files of write_model into a folder that is there."""
    import huggingface_hub
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
