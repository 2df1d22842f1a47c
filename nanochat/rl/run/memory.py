"""
The memory that a co-training run needs on each rank, computed before anything is loaded.

It is counted tensor by tensor, as the code makes them: what stays (weights, optimizer, reference, the copy to sample
from), and what sampling and the update hold at their peaks. Left out: the CUDA context and libraries (about 1 GB),
fragmentation, and buffers of the collectives.
"""
import functools
import json
from dataclasses import dataclass

import torch

from nanochat.decode_step import decoder_numbers_per_row, numbers_per_row
from nanochat.engine import PREFILL_TOKENS
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder, DecoderConfig
from nanochat.kernels import cpu, tiles
from nanochat.kernels.launch import round_up
from nanochat.kernels.linear_logprob import rows_of_chunk
from nanochat.slots import num_places, num_slots

Config = GPTConfig | DecoderConfig


@dataclass(frozen=True)
class Setting:
    """What memory and time depend on besides the models and what is sampled; as tango_rl's flags."""
    ranks: int = 1
    shard: bool = False
    recompute: bool = False
    dtype: torch.dtype = torch.bfloat16  # of products; of activations too, unless is_narrow
    device_type: str = "cuda"
    micro_batch_tokens: int = 4096
    max_rows: int = 1024
    max_cached_tokens: int = 0
    updates_per_batch: int = 1
    sequence_ratio: bool = False
    repeats_keys: bool = False  # attention on CUDA without its kernels

    @property
    def shards(self) -> int:
        return self.ranks if self.shard else 1


@dataclass(frozen=True)
class Held:
    """What a role holds."""
    trained: bool = True        # with an optimizer
    reference: bool = True
    own: int | None = None      # how many of its parameters are not another role's too; None = all
    moments: int | None = None  # for how many it has AdamW's moments of its own; None = for all


@dataclass(frozen=True)
class PlannedDraw:
    """What a step draws from a role under one name, at most."""
    role: str
    name: str
    prompts: int                  # over all ranks
    samples: int                  # of each
    prompt_tokens: int            # of the longest prompt
    new_tokens: int               # of the longest completion
    times: int = 1                # steps of a run in which it happens
    trained: bool = False         # an update learns from it
    teacher_forced: bool = False  # it is not sampled
    scored: int = 0               # forward passes over it besides the update's and a reference's


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters."""
    total: int
    block: int     # of one block
    rest: int      # outside of the blocks
    head: int      # of the LM head
    matrices: int  # of the blocks, which are cast to the dtype of products


def model_of(config: Config, dtype: torch.dtype = torch.float32):
    """The model without its weights, on the meta device: one for all that ask, to be looked at. dtype: of products."""
    return _model(type(config), json.dumps(config.asdict()), dtype)


@functools.lru_cache(16)  # laying out a model of 28 layers takes a while, also without its weights
def _model(kind, shape: str, dtype: torch.dtype):
    with torch.device("meta"):
        return (Decoder if kind is DecoderConfig else GPT)(kind(**json.loads(shape)), dtype)


def sizes_of(config: Config) -> Sizes:
    return _sizes(type(config), json.dumps(config.asdict()))


@functools.cache
def _sizes(kind, shape: str) -> Sizes:
    config = kind(**json.loads(shape))
    model = model_of(config)
    total, blocks = (sum(p.numel() for p in part.parameters()) for part in (model, model.blocks))
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    return Sizes(total, blocks // config.n_layer, total - blocks, model.lm_head.weight.numel(), matrices)


def is_narrow(config: Config, setting: Setting) -> bool:
    """Whether products alone are in bf16, and activations in fp32: of imported models on CPU (kernels.tiles)."""
    return (setting.device_type == "cpu" and setting.dtype == torch.bfloat16) and isinstance(config, DecoderConfig)


def activation_size(config: Config, setting: Setting) -> int:
    """Bytes of a number of hidden states, keys and values."""
    return 4 if is_narrow(config, setting) else setting.dtype.itemsize


def has_panels(config: Config, setting: Setting) -> bool:
    """Whether the layers of such a model run by their kernels, with weights in panels (Decoder's Block.layer)."""
    return (is_narrow(config, setting) and not (config.qk_norm or config.out_bias or config.mlp_bias)
            and tiles.takes(config.n_embd, config.head_dim, config.intermediate_size))


def resident_bytes(config: Config, setting: Setting, held: Held) -> dict[str, int]:
    """What a role holds all the time. A trained one: fp32 weights, AdamW's two moments and, where sampling does not
    read these weights, the copy that it reads; another one: weights of the dtype of products, whole on each rank."""
    everything, narrow = sizes_of(config).total, setting.dtype.itemsize
    total = everything if held.own is None else held.own
    moments = everything if held.moments is None else held.moments
    reads_weights = setting.dtype == torch.float32 or is_narrow(config, setting)
    has_copy = held.trained and (setting.shard or not reads_weights)
    shards = setting.shards if held.trained else 1
    return {"weights": (4 if held.trained else narrow) * total // shards,
            "AdamW": 8 * moments // shards if held.trained else 0,
            "reference": narrow * total // shards if held.reference else 0,
            "copy to sample from": narrow * total if has_copy else 0}


def sampling_bytes(config: Config, setting: Setting, prompts: int, samples: int, prompt_tokens: int,
                   new_tokens: int) -> int:
    """The peak of sampling on one rank: keys and values of all places and slots, from the start on; the results; and
    the logits of a decoding step or what prompts that are run hold, on CUDA both: the graphs keep theirs."""
    rows, size, C = prompts * samples, activation_size(config, setting), config.n_embd
    by_kernel = setting.device_type == "cuda" or fuses(config, setting)
    places = num_places(prompts, samples, prompt_tokens, new_tokens, setting.max_rows, setting.max_cached_tokens)
    per_token = 2 * config.n_layer * config.n_kv_head * config.head_dim * size  # keys and values
    # The CPU kernel reads a prompt's keys in vectors of 16.
    of_slot = prompt_tokens if setting.device_type == "cuda" else round_up(prompt_tokens, 16)
    cached = per_token * (num_slots(prompts, places, samples) * of_slot + places * max(1, new_tokens - 1))
    results = rows * new_tokens * (8 + 4)
    # In fp32, and two on the way through the softcap, or one for a temperature; for kernels as the head gives them.
    numbers = 4 * (3 if isinstance(config, GPTConfig) else 2) if not by_kernel else size
    logits = places * config.vocab_size * numbers
    # of a token in an MLP: inside; the residual stream and its norm at both ends, what attention added, a GPT's first x
    if isinstance(config, GPTConfig):
        width = 4 * C + 6 * C if fuses(config, setting) else 2 * 4 * C + 6 * C
    elif has_panels(config, setting):  # a layer's input and output, queries, what attention gives
        width = 2 * C + 2 * config.n_head * config.head_dim
    else:  # gate, up, their product; on CPU gate's silu too
        width = (3 if setting.device_type == "cuda" else 4) * config.intermediate_size + 4 * C
    # New prompts fill at most all places with their rows.
    piece = max(prompt_tokens, min(PREFILL_TOKENS, -(-places // samples) * prompt_tokens))
    running = piece * (size * width + per_token)
    # queries, keys and values as one matrix, and a layer's weights as its kernels want them (GPT.joined_projections)
    heads = 0 if isinstance(config, DecoderConfig) else (config.n_head + 2 * config.n_kv_head) * config.head_dim
    joined, step = size * config.n_layer * C * heads, 0
    if isinstance(config, GPTConfig) and fuses(config, setting):
        joined += size * config.n_layer * C * (heads + 9 * C)
        step = size * places * numbers_per_row(config, 4 * C)
    elif has_panels(config, setting) and tiles.takes(config.vocab_size):  # Decoder.joined_projections
        joined = 2 * sizes_of(config).matrices + head_rounded(config)
        step = size * places * decoder_numbers_per_row(config)
    elif is_narrow(config, setting):
        step = head_rounded(config)
    # made by the first decoding step: prompts that are run later find it there
    logits, running = logits + step, running + (step if places < rows else 0)
    return cached + results + (logits + running if setting.device_type == "cuda" else max(logits, running)) + joined


def head_rounded(config: Config) -> int:
    """Bytes of an LM head in bf16: in panels, or where no kernel takes it on the way through fp32."""
    return (2 if tiles.takes(config.vocab_size, config.n_embd) else 2 + 4) * sizes_of(config).head


def fuses(config: Config, setting: Setting) -> bool:
    """Whether CPU kernels draw tokens, and run a GPT's layers (layer.before_attention, after_attention)."""
    is_wide = setting.dtype == torch.float32 or is_narrow(config, setting)
    return setting.device_type == "cpu" and is_wide and cpu.library() is not None


def block_activations(config: Config, setting: Setting, seen: float) -> float:
    """Numbers that autograd keeps of one token in one block. seen: own and prefix tokens per completion token, which
    attention on CUDA without Triton repeats for each row and query head."""
    C, queries, keys = config.n_embd, config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    attention = 3 * queries + 2 * keys
    if setting.device_type == "cuda":
        lse = 4 / setting.dtype.itemsize * config.n_head  # fp32, of the kernel
        attention += 2 * seen * queries - 2 * keys if setting.repeats_keys else lse
    if isinstance(config, GPTConfig) and fuses(config, setting):
        # input, mixed, with attention added; input of relu^2; value embeddings
        return attention - queries + 3 * C + 4 * C + 0.5 * keys
    if isinstance(config, GPTConfig):
        # mixing and norms; input of relu^2 and its output; value embeddings
        return attention + 3 * C + 2 * 4 * C + 1.5 * keys
    if has_panels(config, setting):  # input, with attention added; gate and up in bf16; lse; both norms' 1 / rms
        return attention - queries + 2 * C + config.intermediate_size + config.n_head + 2
    # norms; gate, its silu, up, their product
    return attention + 4 * C + 4 * config.intermediate_size + 2 * (queries + keys) * config.qk_norm


def activation_bytes(config: Config, setting: Setting, samples: int, prompt_tokens: int,
                     new_tokens: int) -> tuple[int, int]:
    """What a micro-batch keeps, and holds on its way, for the backward pass; its trained tokens."""
    rows = max(1, min(samples, (setting.micro_batch_tokens - prompt_tokens) // new_tokens))
    units = max(1, setting.micro_batch_tokens // (prompt_tokens + rows * new_tokens))
    prompts, trained = units * prompt_tokens, units * rows * new_tokens
    C, L, keys = config.n_embd, config.n_layer, 2 * config.n_kv_head * config.head_dim
    of_prompt = block_activations(config, setting, 1)
    of_trained = block_activations(config, setting, (prompt_tokens + new_tokens) / new_tokens)
    passing = 0 if isinstance(config, GPTConfig) else 2 * config.intermediate_size  # gradients inside one block
    if has_panels(config, setting):  # and what they are multiplied with, in bf16
        passing = (3 * C + 3 * config.intermediate_size + config.n_head * config.head_dim) / 2
    if setting.recompute:
        # inputs of blocks, keys and values of prompts; one block in full, whose prompts take less than the logits that
        # are gone by then
        kept = (prompts + trained) * L * C + prompts * L * keys + trained * of_trained
    else:  # a prompt's last layer gives keys and values alone
        kept = prompts * ((L - 1) * of_prompt + 2 * C + keys) + trained * L * of_trained
    return int(activation_size(config, setting) * (kept + trained * (4 * C + passing))), trained


def update_bytes(config: Config, setting: Setting, samples: int, prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """What the update of a role on groups of `samples` holds at its peak: gradients (all there from the second
    micro-batch on), weights gathered or cast, activations, and logits with the LM head's gradient."""
    sizes, narrow, L = sizes_of(config), setting.dtype.itemsize, config.n_layer
    on_cuda, rounds = setting.device_type == "cuda", is_narrow(config, setting)
    activations, trained = activation_bytes(config, setting, samples, prompt_tokens, new_tokens)
    if setting.shard:  # two blocks gathered, one with its gradient, and the rest with its own
        cast = narrow * (2 * sizes.block + sizes.rest) + (narrow + 4) * sizes.block + narrow * sizes.rest
    elif rounds:  # a layer's panels
        cast = narrow * sizes.matrices // L
    elif narrow < 4:  # each of the two passes keeps its casts
        cast = narrow * 2 * (sizes.matrices // L if setting.recompute else sizes.matrices) + narrow * sizes.head
    else:
        cast = 0
    rows = min(trained, rows_of_chunk(trained, config.vocab_size, setting.dtype, on_cuda, rounds))
    # the logits or their gradient, and where these are rounded in bf16, without a kernel on the way through fp32
    by_kernel = rounds and tiles.takes(config.vocab_size, config.n_embd)
    chunk = rows * config.vocab_size * (narrow if on_cuda else 4 + 2 if by_kernel else 4 + 6 if rounds else 16)
    if rounds:  # the head for both its products
        chunk += (2 if by_kernel else 1) * head_rounded(config)
    return {"gradients": 4 * sizes.total // setting.shards, "weights gathered or cast": cast,
            "activations": activations,
            "logits and the head's gradient": max(chunk + 4 * sizes.head, 2 * 4 * sizes.head)}


def saved_bytes(configs: dict[str, Config], held: dict[str, Held], setting: Setting) -> tuple[int, int]:
    """Bytes of a checkpoint set that rank 0 writes, and that each other rank writes, copied to the host first: fp32
    weights, whole, of rank 0; AdamW's two moments, of sharded models each rank's part."""
    weights = sum(4 * sizes_of(config).total for config in configs.values())
    moments = sum(8 * sizes_of(config).total for name, config in configs.items() if held[name].trained)
    return weights + moments // setting.shards, moments // setting.shards if setting.shard else 0


def memory_plan(configs: dict[str, Config], held: dict[str, Held], draws: list[PlannedDraw], setting: Setting) -> dict:
    """Bytes per rank: {"resident": {role: {what: bytes}}, "phases": {what happens: bytes beside what is resident},
    "copy": of a checkpoint, where that is in the same memory, "peak"}."""
    resident = {name: resident_bytes(config, setting, held[name]) for name, config in configs.items()}
    phases: dict[str, int] = {}
    for draw in (draw for draw in draws if not draw.teacher_forced):
        P = max(1, draw.prompts // setting.ranks)
        size = sampling_bytes(configs[draw.role], setting, P, draw.samples, draw.prompt_tokens, draw.new_tokens)
        phases[f"sampling {draw.name}: {P} x {draw.samples} of the {draw.role}"] = size
    for draw in draws:
        if draw.trained:
            parts = update_bytes(configs[draw.role], setting, draw.samples, draw.prompt_tokens, draw.new_tokens)
            # on CUDA a step has AdamW's square roots beside the gradients, and before them what ranks sum of gradients
            step = parts["gradients"] if setting.device_type == "cuda" else 0
            size = max(sum(parts.values()), parts["gradients"] + step)
            name = f"updating the {draw.role}"
            phases[name] = max(phases.get(name, 0), size)
    total = sum(sum(parts.values()) for parts in resident.values())
    copied = saved_bytes(configs, held, setting)[0] if setting.device_type == "cpu" else 0
    return {"resident": resident, "phases": phases, "copy": copied, "peak": total + copied + max(phases.values())}
