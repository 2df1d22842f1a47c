"""
The memory that a co-training run needs on each rank, and the hours it takes, computed before anything is loaded.

Memory is counted tensor by tensor, as the code makes them: what stays (weights, optimizer, reference, the copy to sample from), and what sampling and the
update hold at their peaks. Left out: the CUDA context and libraries (about 1 GB), fragmentation, and buffers of the collectives.
"""
from dataclasses import dataclass, replace

import torch

from nanochat.engine import COLUMNS_CUDA, COMPACT_BELOW_CUDA, PREFILL_TOKENS
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf import Decoder, DecoderConfig
from nanochat.kernels.linear_logprob import rows_of_chunk

MAX_ROWS = 1024  # rows that the engine decodes together
Config = GPTConfig | DecoderConfig


@dataclass(frozen=True)
class Setting:
    """What memory depends on besides the models. Lengths in tokens, the largest there are; counts over all ranks, as tango_rl's flags."""
    ranks: int = 1
    shard: bool = False
    recompute: bool = False
    dtype: torch.dtype = torch.bfloat16  # of activations
    device_type: str = "cuda"
    examples_per_step: int = 32
    num_samples: int = 8
    prompt_tokens: int = 200
    max_new_tokens: int = 96
    verifier_max_new_tokens: int = 112
    micro_batch_tokens: int = 4096
    reference: bool = True

    @property
    def shards(self) -> int:
        return self.ranks if self.shard else 1


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters: in all, of one block, of the rest, of the LM head, and of the matrices that are cast to the activations' dtype."""
    total: int
    block: int
    rest: int
    head: int
    matrices: int


def head_dim_of(config: Config) -> int:
    return config.head_dim if isinstance(config, DecoderConfig) else config.n_embd // config.n_head


def model_of(config: Config):
    """The model without its weights, on the meta device."""
    with torch.device("meta"):
        return (Decoder if isinstance(config, DecoderConfig) else GPT)(config)


def sizes_of(config: Config) -> Sizes:
    model = model_of(config)
    total, blocks = (sum(p.numel() for p in part.parameters()) for part in (model, model.blocks))
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    return Sizes(total, blocks // config.n_layer, total - blocks, model.lm_head.weight.numel(), matrices)


def resident_bytes(config: Config, setting: Setting, trained: bool) -> dict[str, int]:
    """What a role holds all the time: fp32 weights, AdamW's two moments, the reference and the copy that is sampled from."""
    total, narrow = sizes_of(config).total, setting.dtype.itemsize
    has_copy = setting.shard or setting.dtype != torch.float32
    return {"weights, fp32": 4 * total // setting.shards, "AdamW": 8 * total // setting.shards if trained else 0,
            "reference": narrow * total // setting.shards if trained and setting.reference else 0, "copy to sample from": narrow * total if has_copy else 0}


def cache_bytes_per_token(config: Config, setting: Setting) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.n_layer * config.n_kv_head * head_dim_of(config) * setting.dtype.itemsize


def sampling_bytes(config: Config, setting: Setting, prompts: int, rows: int, prompt_tokens: int, new_tokens: int) -> int:
    """The peak of sampling on one rank: the caches of prompts and rows, logits, and one prefill's activations."""
    rows, per_token, narrow = min(rows, MAX_ROWS), cache_bytes_per_token(config, setting), setting.dtype.itemsize
    prompts = min(prompts, rows)
    prefix, logits = prompts * prompt_tokens * per_token, rows * config.vocab_size * (4 + 4 + (narrow if narrow < 4 else 0))
    if setting.device_type == "cuda":
        columns = min(new_tokens, -(-new_tokens // COLUMNS_CUDA) * COLUMNS_CUDA)
        caches = (prefix + rows * columns * per_token) * (1 + COMPACT_BELOW_CUDA)  # compacting holds the old and the new one
    else:
        caches = prefix + rows * new_tokens * per_token * (1 + 2 / (2 * config.n_layer))  # columns move layer by layer
    prefill = min(PREFILL_TOKENS, prompts * prompt_tokens) * narrow * 2 * block_activations(config, setting, 0)
    return int(max(caches + logits, prefix + prefill))


def block_activations(config: Config, setting: Setting, seen: float) -> float:
    """Numbers that autograd keeps of one token in one block. seen: own and prefix tokens per completion token, which attention on CUDA repeats for each
    row and query head."""
    C, queries, keys = config.n_embd, config.n_head * head_dim_of(config), config.n_kv_head * head_dim_of(config)
    on_cuda = setting.device_type == "cuda"
    if isinstance(config, GPTConfig):
        norms, mlp, value_embedding = 3 * C, 2 * 4 * C, 1.5 * keys  # mixing; input of relu^2 and its output
    else:
        norms, mlp, value_embedding = (4 if on_cuda else 6) * C, 4 * config.intermediate_size, (queries + keys) * 2 * config.qk_norm
    attention = 3 * queries + 2 * keys
    if on_cuda and seen:
        attention += 2 * seen * queries - 2 * keys
    return norms + mlp + value_embedding + attention


def update_bytes(config: Config, setting: Setting, prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """What the update of a role holds at its peak: gradients, weights gathered or cast, activations, logits and the LM head's gradient."""
    sizes, narrow, L = sizes_of(config), setting.dtype.itemsize, config.n_layer
    rows = max(1, min(setting.num_samples, (setting.micro_batch_tokens - prompt_tokens) // new_tokens))
    unit = prompt_tokens + rows * new_tokens
    units = max(1, setting.micro_batch_tokens // unit)
    tokens, trained = units * unit, units * rows * new_tokens
    kept = block_activations(config, setting, (prompt_tokens + new_tokens) / new_tokens * trained / tokens)
    per_token = kept * L
    if setting.recompute:  # inputs of blocks, keys and values of prompts; one block in full
        per_token = L * (config.n_embd + 2 * config.n_kv_head * head_dim_of(config)) + kept
    ends = 4 * config.n_embd  # hidden states, their gradients, the final norm
    passing = 2 * (4 * config.n_embd if isinstance(config, GPTConfig) else config.intermediate_size)  # gradients inside one block
    activations = tokens * narrow * (per_token + ends + passing)
    if setting.shard:  # two blocks gathered, one with its gradient, and the rest with its own
        cast = narrow * (2 * sizes.block + sizes.rest) + (narrow + 4) * sizes.block + narrow * sizes.rest
    elif narrow < 4:  # each of the two passes keeps its casts
        cast = narrow * 2 * (sizes.matrices if not setting.recompute else sizes.matrices // L) + narrow * (sizes.head + sizes.block)
    else:
        cast = 0
    chunk = min(trained, rows_of_chunk(trained, config.vocab_size, setting.dtype, setting.device_type == "cuda"))
    logits = chunk * config.vocab_size * (narrow if setting.device_type == "cuda" else 16)
    return {"gradients": 4 * sizes.total // setting.shards, "weights gathered or cast": cast, "activations": int(activations),
            "logits and head's gradient": logits + 2 * 4 * sizes.head}


def memory_plan(generator: Config, verifier: Config | None, setting: Setting, trained: set[str]) -> dict:
    """Bytes per rank. -> {"resident": {role: {what: bytes}}, "phases": {what happens: bytes beside what is resident}, "peak": bytes}."""
    models = {"generator": generator} | ({"verifier": verifier} if verifier else {})
    resident = {name: resident_bytes(config, setting, name in trained) for name, config in models.items()}
    P, G = max(1, setting.examples_per_step // setting.ranks), setting.num_samples
    lengths = {"generator": (setting.prompt_tokens, setting.max_new_tokens),
               "verifier": (setting.prompt_tokens + setting.max_new_tokens, setting.verifier_max_new_tokens)}
    phases = {f"sampling {P * G} solutions of {P} problems": sampling_bytes(generator, setting, P, P * G, *lengths["generator"])}
    if verifier:
        phases[f"sampling {P * G} verifications, one each"] = sampling_bytes(verifier, setting, P * G, P * G, *lengths["verifier"])
        phases[f"sampling {P * G} verifications of {P} solutions"] = sampling_bytes(verifier, setting, P, P * G, *lengths["verifier"])
    for name in sorted(trained & models.keys()):
        phases[f"updating the {name}"] = sum(update_bytes(models[name], setting, *lengths[name]).values())
    held = sum(sum(parts.values()) for parts in resident.values())
    return {"resident": resident, "phases": phases, "peak": held + max(phases.values())}


def show_plan(plan: dict, limit_gb: float | None) -> list[str]:
    """A plan in lines. limit_gb: a device's memory, in 10^9 bytes."""
    names = list(plan["resident"])
    lines = [f"{'GB per rank':44s}" + "".join(f"{name:>12s}" for name in names)]
    for what in plan["resident"][names[0]]:
        lines.append(f"{what:44s}" + "".join(f"{plan['resident'][name][what] / 1e9:12.3f}" for name in names))
    lines += [f"{what:44s}{size / 1e9:12.3f}" for what, size in plan["phases"].items()]
    fits = "" if limit_gb is None else f"  {'fits' if plan['peak'] / 1e9 <= limit_gb else 'does not fit'} {limit_gb:g} GB"
    return [*lines, f"{'peak: all that stays and the largest phase':44s}{plan['peak'] / 1e9:12.3f}{fits}"]


def variants(setting: Setting, ranks: list[int]) -> list[Setting]:
    """The setting on other numbers of ranks, with and without sharding and recomputing."""
    found = []
    for n in ranks:
        for shard in (False, True) if n > 1 else (False,):
            found += [replace(setting, ranks=n, shard=shard, recompute=recompute) for recompute in (False, True)]
    return found
