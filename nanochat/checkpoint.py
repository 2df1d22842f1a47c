"""
Checkpoints in upstream's layout: <stage folder>/<tag>/model_{step:06d}.pt, meta_{step:06d}.json,
optim_{step:06d}_rank{r}.pt.

Every file is written whole or not at all. A co-training run's set of a step (both roles' models and optimizers, and the
run's state) is valid once its state file exists: that one is written last. So is a supervised step's meta.
"""
import contextlib
import json
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import fields

import torch

from nanochat.common import BadInput, CannotWrite, compute_dtype, dtype_name, print0
from nanochat.gpt import GPT, GPTConfig, check_layers
from nanochat.hf.decoder import Decoder, DecoderConfig
from nanochat.hf.tokenizer import mark_of, read_files
from nanochat.kernels.tiles import has_bf16, takes
from nanochat.storage.files import PAIR, STAGE_FOLDERS, found_at, make_folder, path_of, whole_file, write_json, writing
from nanochat.tokenizer import Tokenizer
from nanochat.weights import allocate, fill, not_finite, with_shards

# sizes of a configuration
SIZES = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "intermediate_size")
NARROW_FROM = 512  # width of an imported model from which products in bf16 are taken to be the faster ones
MAY_BE_MISSING = {"resid_lambdas": 1.0, "x0_lambdas": 0.0}  # from older upstream checkpoints, with what they stood for


def save_atomic(obj, path: str) -> None:
    """torch.save that leaves either the whole file or none. Raises CannotWrite."""
    make_folder(os.path.dirname(path))
    with whole_file(path, "wb") as f:
        torch.save(obj, f)


def load_file(path: str, mmap: bool = False):
    """torch.load of tensors and plain containers; with mmap, tensors stay in the file until read. Raises BadInput."""
    if not os.path.exists(path):
        raise BadInput(f"{path} is missing")
    try:
        check_whole(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:  # torch's text goes on with advice to allow what was refused
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise BadInput(f"{path} holds more than tensors and plain values{f' ({named[1]})' if named else ''}: it is "
                       f"damaged or hostile, and was not loaded") from None
    except Exception as error:  # of many types, where a file is damaged
        raise BadInput(f"{path} is damaged or no checkpoint: "
                       f"{' '.join(str(error).split())[:200] or type(error).__name__}") from None


def check_whole(path: str) -> None:
    """Raises unless the records of a .pt file, a zip file with a checksum of each, are those that were written. PyTorch
    compresses none, and would take one with attributes for a folder."""
    with zipfile.ZipFile(path) as archive:
        strange = [record.filename for record in archive.infolist()
                   if record.compress_type != zipfile.ZIP_STORED or record.external_attr]
        if damaged := strange[0] if strange else archive.testzip():
            raise ValueError(f"{damaged} is not what was written")


def checksum(path: str) -> int:
    """A number that stands for all that a .pt file holds: of the names, sizes and checksums of its records."""
    with zipfile.ZipFile(path) as archive:
        return zlib.crc32(repr([(r.filename, r.file_size, r.CRC) for r in archive.infolist()]).encode())


def list_tags(stage: str) -> list[str]:
    """Tags that hold a checkpoint of the stage."""
    folder = path_of(stage)
    return sorted(tag for tag in os.listdir(folder) if list_steps(stage, tag)) if os.path.isdir(folder) else []


def steps_in(folder: str, name: str) -> list[int]:
    """The steps of a folder's files of such a name, a pattern with the step's digits in parentheses; ascending."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(match[1]) for match in map(re.compile(name).fullmatch, names) if match)


def list_steps(stage: str, tag: str) -> list[int]:
    """Steps at which the tag has a model and its meta, ascending."""
    folder = found_at(stage, tag)
    with_meta = set(steps_in(folder, r"meta_(\d+)\.json"))
    return [step for step in steps_in(folder, r"model_(\d+)\.pt") if step in with_meta]


def default_tag(stage: str) -> str:
    """The largest d<N>; verifiers (-ver) do not count. Raises BadInput when there is none."""
    depths = [int(tag[1:]) for tag in list_tags(stage) if re.fullmatch(r"d\d+", tag)]
    if not depths:
        raise BadInput(f"no checkpoint d<N> in {path_of(stage)}; there are: {tags_there_are(stage)}; "
                       f"name one with --model-tag{base_dir_hint()}")
    return f"d{max(depths)}"


def tags_there_are(stage: str) -> str:
    """In words, the tags of a stage in the base directory, and those that come with the project."""
    folder = os.path.join(PAIR, STAGE_FOLDERS[stage])
    shipped = f"; with the project come {', '.join(sorted(os.listdir(folder)))}" if os.path.isdir(folder) else ""
    return (", ".join(list_tags(stage)) or "none") + shipped


def base_dir_hint() -> str:
    """What to look at where a checkpoint is missing."""
    return "" if os.environ.get("NANOCHAT_BASE_DIR") else " (NANOCHAT_BASE_DIR, which says where they are, is not set)"


def find_step(stage: str, tag: str, step: int | None = None) -> int:
    """The step to load: the given one or the latest. Raises BadInput that lists what exists."""
    steps = list_steps(stage, tag)
    if not steps:
        raise BadInput(f"no checkpoint {tag} in {path_of(stage)}; there are: {tags_there_are(stage)}"
                       f"{base_dir_hint()}")
    if step is not None and step not in steps:
        raise BadInput(f"checkpoint {tag} in {path_of(stage)} has no step {step}; "
                       f"there are: {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def save_model(stage: str, tag: str, step: int, model: GPT | Decoder, meta: dict, state: dict | None = None) -> str:
    """Writes a model, and its meta, which makes the pair valid. state: whole tensors, of a model that is sharded. ->
    its path. Raises CannotWrite."""
    path = path_of(stage, tag, f"model_{step:06d}.pt")
    save_atomic(model.state_dict() if state is None else state, path)
    save_meta(stage, tag, step, model, meta)
    return path


def save_meta(stage: str, tag: str, step: int, model: GPT | Decoder, meta: dict) -> None:
    """Writes a model's meta. Raises CannotWrite."""
    write_json(path_of(stage, tag, f"meta_{step:06d}.json"),
               {"step": step, "model_config": model.config.asdict(), **meta})


def history_of(stage: str, tag: str, meta: dict) -> list[dict]:
    """How a checkpoint came about, for the meta of what is trained from it: a record of each stage, the oldest first,
    the checkpoint's own last."""
    kept = ("step", "imported_from", "origin", "role", "run", "commit", "user_config")
    return [*meta.get("history", []), {"stage": stage, "tag": tag, **{key: meta[key] for key in kept if key in meta}}]


def check_tokenizer(meta: dict, path: str) -> None:
    """Raises BadInput where a model was made with another tokenizer, whose mark stands in its meta, than the base
    directory has: it would read and write nonsense. Older metas, and a directory that has none, do not tell."""
    folder, before, now = found_at("tokenizer"), meta.get("tokenizer"), None
    with contextlib.suppress(BadInput, OSError):
        is_imported = os.path.exists(os.path.join(folder, "tokenizer.json"))
        now = mark_of(read_files(folder)) if is_imported else Tokenizer.load(folder).mark()
    if None not in (before, now) and before != now:
        raise BadInput(f"{path}: its model was made with another tokenizer than the one in {folder}: put that one "
                       f"back, or name another folder with NANOCHAT_BASE_DIR")


def load_meta(path: str) -> tuple[dict, GPTConfig | DecoderConfig]:
    """A model's meta and its configuration: a GPT's, or with an "architecture" an imported decoder's; only a GPT's
    window_pattern may be missing ("L"). Raises BadInput that names the file and the key."""
    try:
        with open(path) as f:
            meta = json.load(f)
        given = dict(meta["model_config"])
        kind = DecoderConfig if "architecture" in given else GPTConfig
        if kind is GPTConfig and "window_pattern" not in given:
            print0(f"{path}: has no window_pattern, taken as L")
            given["window_pattern"] = "L"
        known = {field.name for field in fields(kind)}
        for names, what in ((known - given.keys(), "has no"), (given.keys() - known, "has the unknown")):
            if names:
                raise ValueError(f"model_config {what} {', '.join(sorted(names))}")
        config = kind(**given)
        if "step" not in meta:  # upstream's RL has none
            meta["step"] = int(re.search(r"meta_(\d+)\.json$", path)[1])
        if not isinstance(meta["step"], int) or not isinstance(meta.setdefault("user_config", {}), dict):
            raise ValueError("step must be a number, and user_config the flags it was made with")
    except FileNotFoundError:
        raise BadInput(f"{path} is missing") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is no model's meta: {error}") from None
    check_config(config, path)
    return meta, config


def check_config(config: GPTConfig | DecoderConfig, path: str) -> None:
    """Raises BadInput where no model can be made from a configuration; makes one without memory."""
    for name in config.asdict().keys() & set(SIZES):
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value < 2 ** 31:
            raise BadInput(f"{path}: model_config has {name} {value!r}: must be a number from 1 to {2 ** 31 - 1}")
    try:
        check_layers("n_layer", config.n_layer)
        with torch.device("meta"):
            (GPT if isinstance(config, GPTConfig) else Decoder)(config)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: model_config describes no model: {error}") from None


def dtype_for(device, *configs: GPTConfig | DecoderConfig) -> torch.dtype:
    """The compute dtype of models of these shapes: common.compute_dtype's, but where $NANOCHAT_DTYPE does not say
    otherwise bfloat16 too for imported models of some width on a CPU that multiplies it faster."""
    gains = lambda config: (isinstance(config, DecoderConfig) and config.n_embd >= NARROW_FROM
                            and not (config.qk_norm or config.out_bias or config.mlp_bias)
                            and takes(config.n_embd, config.vocab_size, config.intermediate_size, config.head_dim))
    if (device.type == "cpu" and not os.environ.get("NANOCHAT_DTYPE") and configs and all(map(gains, configs))
            and has_bf16()):
        return torch.bfloat16
    return compute_dtype(device)


def load_model(stage: str, tag: str, device, dtype: torch.dtype | None = None, step: int | None = None,
               sharded: bool = False, trained: bool = True) -> tuple[GPT | Decoder, dict]:
    """A model and its meta. dtype: what it computes in, None: dtype_for its shape. Its weights are fp32 whatever the
    file has, or where it is not trained of the compute dtype, which is what sampling casts them to. sharded: over all
    ranks. Raises BadInput for what is missing, naming it."""
    step = find_step(stage, tag, step)
    meta_path = found_at(stage, tag, f"meta_{step:06d}.json")
    meta, config = load_meta(meta_path)
    check_tokenizer(meta, meta_path)
    path = found_at(stage, tag, f"model_{step:06d}.pt")
    state, kind = weights_in(path, config), GPT if isinstance(config, GPTConfig) else Decoder
    dtype = dtype or dtype_for(torch.device(device), config)
    with torch.device("meta"):
        check_state(state, kind(config), path)
    model = allocate(kind, config, dtype, device, torch.float32 if trained else dtype, sharded)
    fill(model, state)
    check_loaded(model, path)
    return model, meta


def weights_in(path: str, config: GPTConfig | DecoderConfig) -> dict[str, torch.Tensor]:
    """The tensors of a model file under the names of a model's parameters; what older files lack is filled in."""
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in load_state_dict(path).items()}
    for name in MAY_BE_MISSING.keys() - state.keys() if isinstance(config, GPTConfig) else ():
        print0(f"{path}: has no {name}, taken as {MAY_BE_MISSING[name]}")
        state[name] = torch.full((config.n_layer,), MAY_BE_MISSING[name])
    return state


def warn_of_role(tag: str, meta: dict, role: str) -> None:
    """Says so where a checkpoint is the generator or the verifier and was trained in another role."""
    trained = meta.get("role") or meta["user_config"].get("role")
    if role in ("generator", "verifier") and trained not in (None, "both", role):
        print0(f"WARNING: {tag} was trained as a {trained}, and is the {role} here")


def warn_of_dtype(what: str, before: str | None, dtype: torch.dtype) -> None:
    """Says so where training goes on with products of another dtype. before: as it was, None of older versions."""
    if before not in (None, dtype_name(dtype)):
        print0(f"WARNING: {what} was in {before} and goes on in {dtype_name(dtype)}, which rounds differently")


def check_loaded(model, path: str) -> None:
    """Raises BadInput where weights of a file are not finite."""
    if name := not_finite(model):
        raise BadInput(f"{path}: {name} holds numbers that are not finite (NaN or infinite)")


def fingerprint(path: str) -> int:
    """A checksum of the names, shapes and first values of a model file's tensors, which tells them from others."""
    found = 0
    for name, tensor in sorted(load_state_dict(path).items()):
        first = tensor.flatten()[:256].float().tolist()
        found = zlib.crc32(f"{name.removeprefix('_orig_mod.')} {tuple(tensor.shape)} {first}".encode(), found)
    return found


def load_state_dict(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a model file, which stay in it until they are read. Raises BadInput for anything else."""
    state = load_file(path, mmap=True)
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise BadInput(f"{path} holds no state dict")
    return state


def check_state(state: dict, model, path: str) -> None:
    """Raises BadInput for the first tensor that is missing, integer, of another shape, or none of the model's."""
    expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    for name in sorted(expected.keys() | state.keys()):
        got = tuple(state[name].shape) if name in state else None
        if got != expected.get(name):
            raise BadInput(f"{path}: {name} is {got or 'missing'}, expected {expected.get(name) or 'no such tensor'}")
        if not state[name].is_floating_point():
            raise BadInput(f"{path}: {name} holds {state[name].dtype}: weights are floating-point numbers")


def restore_model(model, state: dict, path: str) -> None:
    """Gives a model, sharded or not, the weights of a state dict. Raises BadInput where it does not fit."""
    check_state(state, model, path)
    fill(model, state)
    check_loaded(model, path)


def save_optimizer(stage: str, tag: str, step: int, state: dict, rank: int = 0) -> str:
    """Writes local_optimizer_state, of a sharded model each rank's. -> the file's path. Raises CannotWrite."""
    path = path_of(stage, tag, f"optim_{step:06d}_rank{rank}.pt")
    save_atomic(state, path)
    return path


def load_optimizer(stage: str, tag: str, step: int, optimizer, rank: int = 0) -> str:
    """Restores an optimizer; its path. Raises BadInput."""
    path = path_of(stage, tag, f"optim_{step:06d}_rank{rank}.pt")
    restore_optimizer(optimizer, load_file(path, mmap=True), path)
    return path


def restore_optimizer(optimizer, saved: dict, path: str) -> None:
    """Gives an optimizer a saved state. Raises BadInput where it was made for other parameters, or as other parts."""
    ways = [group.get("fused") for group in optimizer.param_groups]  # how a step is made is not the state's to say
    try:
        optimizer.load_state_dict(with_shards(saved, optimizer))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadInput(f"{path} does not fit: {error}") from None
    for group, fused in zip(optimizer.param_groups, ways, strict=True):
        if "fused" in group:
            group["fused"] = fused
    for p, entry in optimizer.state.items():  # torch compares numbers of parameters, not their shapes
        if any(tensor.dim() and tensor.shape != p.shape for tensor in entry.values()
               if isinstance(tensor, torch.Tensor)):
            raise BadInput(f"{path} does not fit: it was made for parameters of other shapes")


def drop_old_sets(run, mark: str, folders: list[str], keep: int, newest: int, spared: set[int]) -> None:
    """Of a run's sets up to its newest, which is whole on the disk, removes all but the last `keep` and those that are
    spared; 0 keeps all. mark: path of the file that makes a set count, with {} for the step's digits; folders: where
    the set's other files are. Files that cannot be removed are told, counted in the log, and tried again after the
    next set.

    The mark is renamed first: from then on the set does not count, and what is left of it is known to be old.
    """
    if not keep:
        return
    folder, name = os.path.split(mark)
    number = re.compile(re.escape(name).replace(r"\{\}", r"(\d+)") + r"(\.old)?")
    marks = [match for match in map(number.fullmatch, os.listdir(folder)) if match]
    whole, old = ({int(match[1]): os.path.join(folder, match[0]) for match in marks if bool(match[2]) == is_old}
                  for is_old in (False, True))
    left: list[OSError] = []

    def attempt(do, *paths: str) -> bool:
        try:
            do(*paths)
        except OSError as error:
            left.append(error)
            return False
        return True

    for step in sorted(step for step in whole if step <= newest)[:-keep]:
        if step not in spared and attempt(os.rename, whole[step], whole[step] + ".old"):
            old[step] = whole.pop(step) + ".old"
    for step, path in old.items():
        part = re.compile(rf"(model|meta|optim|train)_0*{step}(_rank\d+)?\.(pt|json)")
        files = [os.path.join(where, name) for where in folders if step not in whole  # else it was saved once more
                 for name in filter(part.fullmatch, os.listdir(where))]
        if all([attempt(os.remove, file) for file in files]):
            attempt(os.remove, path)
    if left:
        run.writer.record["old_files_left"] = len(left)
        print0(f"WARNING: {len(left)} files of old checkpoints cannot be removed, first {left[0].filename}: "
               f"{left[0].strerror}")


def spared_steps(run, resume_from_step: str, stage: str, tags: list[str]) -> set[int]:
    """Steps of these tags that are not removed as old: the one that this start was told by its number to go on from,
    and those that co-training runs started from, which they need to go on."""
    found, folder = set() if resume_from_step == "auto" else {run.resumed_from} - {None}, path_of("runs")
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        with (contextlib.suppress(OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError),
              open(os.path.join(folder, name, "config.json"), encoding="utf-8") as f):
            found |= {start["step"] for start in json.load(f)["starts"].values()
                      if start["tag"] in tags and start.get("source", "sft") == stage}
    return found


def describe_disk(folders: list[str]) -> str:
    """In words, a line each, how much lies in these folders, and the steps of their models."""
    lines = []
    for folder in folders:
        with os.scandir(folder) as files:
            size = sum(file.stat().st_size for file in files if file.is_file())
        steps = ", ".join(map(str, steps_in(folder, r"model_(\d+)\.pt")))
        amount = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        lines.append(f"on disk: {amount} in {folder}" + f" (step {steps})" * bool(steps))
    return "\n".join(lines)


@contextlib.contextmanager
def saying_what_is_whole(steps: Callable[[], list[int]], how: str):
    """Around what trains and saves: a CannotWrite also says which step is whole, and how to go on from there."""
    try:
        yield
    except CannotWrite as error:
        left = steps()
        words = (f"the checkpoint of step {left[-1]} is whole: make room, and go on with {how}" if left
                 else "no checkpoint was saved before")
        raise CannotWrite(f"{error}; {words}") from error


def begin_set(run_name: str, step: int) -> None:
    """Leaves begun_{step} beside a run's states until the set of that step is valid: a set without a state was lost
    where it is not there, and never came to be where it is. Raises CannotWrite."""
    path = path_of("runs", run_name, f"begun_{step:06d}")
    make_folder(os.path.dirname(path))
    with writing(path):
        open(path, "w").close()


def begun_steps(run_name: str) -> set[int]:
    """Steps at which a run was saving a set when it was cut off."""
    return set(steps_in(path_of("runs", run_name), r"begun_(\d+)"))


def save_state(run_name: str, step: int, state: dict) -> None:
    """Writes a run's state_{step}.pt, which makes the set of that step valid."""
    save_atomic(state, path_of("runs", run_name, f"state_{step:06d}.pt"))
    with contextlib.suppress(OSError):
        os.remove(path_of("runs", run_name, f"begun_{step:06d}"))


def saved_steps(run_name: str) -> list[int]:
    """Steps at which a run has a complete set, ascending."""
    return steps_in(path_of("runs", run_name), r"state_(\d+)\.pt")


def load_state(run_name: str, step: int) -> dict:
    """A run's state at a step. Raises BadInput that lists the steps there are."""
    steps = saved_steps(run_name)
    if step not in steps:
        raise BadInput(f"run {run_name} has no complete checkpoint of step {step}; there are: "
                       f"{', '.join(map(str, steps)) or 'none'}")
    return load_file(path_of("runs", run_name, f"state_{step:06d}.pt"))
