"""
The memory that a co-training run needs on each rank, and the hours it takes, computed before anything is loaded.

Memory is counted tensor by tensor, as the code makes them: what stays (weights, optimizer, reference, the copy to sample from), and what sampling and the
update hold at their peaks. Left out: the CUDA context and libraries (about 1 GB), fragmentation, and buffers of the collectives.
"""
import functools
import json
from dataclasses import dataclass, replace

import torch

from nanochat.engine import COLUMNS_CUDA, COMPACT_BELOW_CUDA, PREFILL_TOKENS
from nanochat.flops import PEAK_FLOPS, decode_floor, flops_per_token, prefill_floor
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder, DecoderConfig
from nanochat.kernels.linear_logprob import rows_of_chunk

BANDWIDTH = {"B200": 8.0e12, "H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}  # bytes/s of a GPU's memory, from the vendor's data sheets
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
    max_rows: int = 1024
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


def model_of(config: Config, dtype: torch.dtype = torch.float32):
    """The model without its weights, on the meta device. dtype: of activations."""
    with torch.device("meta"):
        return (Decoder if isinstance(config, DecoderConfig) else GPT)(config, dtype)


def sizes_of(config: Config) -> Sizes:
    return _sizes(type(config), json.dumps(config.asdict()))


@functools.cache  # laying out a model of 28 layers takes a while, also without its weights
def _sizes(kind, shape: str) -> Sizes:
    config = kind(**json.loads(shape))
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
    return 2 * config.n_layer * config.n_kv_head * config.head_dim * setting.dtype.itemsize


def sampling_bytes(config: Config, setting: Setting, prompts: int, rows: int, prompt_tokens: int, new_tokens: int) -> int:
    """The peak of sampling on one rank: the caches of prompts and rows, logits, and one prefill's activations."""
    rows, per_token, narrow = min(rows, setting.max_rows), cache_bytes_per_token(config, setting), setting.dtype.itemsize
    prompts = min(prompts, rows)
    prefix, logits = prompts * prompt_tokens * per_token, rows * config.vocab_size * (4 + 4 + (narrow if narrow < 4 else 0))
    if setting.device_type == "cuda":
        columns = min(new_tokens, -(-new_tokens // COLUMNS_CUDA) * COLUMNS_CUDA)
        caches = (prefix + rows * columns * per_token) * (1 + COMPACT_BELOW_CUDA)  # compacting holds the old and the new one
    else:
        caches = prefix + rows * new_tokens * per_token * (1 + 2 / (2 * config.n_layer))  # columns move layer by layer
    width = 2 * 4 * config.n_embd if isinstance(config, GPTConfig) else 3 * config.intermediate_size
    prefill = min(PREFILL_TOKENS, prompts * prompt_tokens) * narrow * (width + 4 * config.n_embd)
    joined = 0 if isinstance(config, DecoderConfig) else config.n_layer * config.n_embd * (config.n_head + 2 * config.n_kv_head) * config.head_dim
    return int(max(caches + logits, prefix + prefill) + narrow * joined)  # joined: queries, keys and values as one matrix (GPT.joined_projections)


def block_activations(config: Config, setting: Setting, seen: float) -> float:
    """Numbers that autograd keeps of one token in one block. seen: own and prefix tokens per completion token, which attention on CUDA repeats for each
    row and query head."""
    C, queries, keys = config.n_embd, config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    attention = 3 * queries + 2 * keys
    if setting.device_type == "cuda":
        attention += 2 * seen * queries - 2 * keys
    if isinstance(config, GPTConfig):
        return attention + 3 * C + 2 * 4 * C + 1.5 * keys  # mixing and norms; input of relu^2 and its output; value embeddings
    return attention + 4 * C + 4 * config.intermediate_size + 2 * (queries + keys) * config.qk_norm  # norms; gate, its silu, up, their product


def activation_bytes(config: Config, setting: Setting, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
    """What a micro-batch keeps for its backward pass and what that holds on its way; and its number of trained tokens."""
    rows = max(1, min(setting.num_samples, (setting.micro_batch_tokens - prompt_tokens) // new_tokens))
    units = max(1, setting.micro_batch_tokens // (prompt_tokens + rows * new_tokens))
    prompts, trained = units * prompt_tokens, units * rows * new_tokens
    C, L, keys = config.n_embd, config.n_layer, 2 * config.n_kv_head * config.head_dim
    of_prompt, of_trained = block_activations(config, setting, 1), block_activations(config, setting, (prompt_tokens + new_tokens) / new_tokens)
    passing = 0 if isinstance(config, GPTConfig) else 2 * config.intermediate_size  # gradients inside one block
    if setting.recompute:  # inputs of blocks, keys and values of prompts; one block in full
        kept = (prompts + trained) * L * C + prompts * L * keys + trained * of_trained
    else:  # a prompt's last layer gives keys and values alone
        kept = prompts * ((L - 1) * of_prompt + 2 * C + keys) + trained * L * of_trained
    return int(setting.dtype.itemsize * (kept + trained * (4 * C + passing))), trained


def update_bytes(config: Config, setting: Setting, prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """What the update of a role holds at its peak: gradients (all there from the second micro-batch on), weights gathered or cast, activations, and
    logits with the LM head's gradient."""
    sizes, narrow, L = sizes_of(config), setting.dtype.itemsize, config.n_layer
    activations, trained = activation_bytes(config, setting, prompt_tokens, new_tokens)
    if setting.shard:  # two blocks gathered, one with its gradient, and the rest with its own
        cast = narrow * (2 * sizes.block + sizes.rest) + (narrow + 4) * sizes.block + narrow * sizes.rest
    elif narrow < 4:  # each of the two passes keeps its casts
        cast = narrow * 2 * (sizes.matrices // L if setting.recompute else sizes.matrices) + narrow * sizes.head
    else:
        cast = 0
    on_cuda = setting.device_type == "cuda"
    chunk = min(trained, rows_of_chunk(trained, config.vocab_size, setting.dtype, on_cuda)) * config.vocab_size * (narrow if on_cuda else 16)
    return {"gradients": 4 * sizes.total // setting.shards, "weights gathered or cast": cast, "activations": activations,
            "logits and the head's gradient": max(chunk + 4 * sizes.head, 2 * 4 * sizes.head)}


def step_bytes(config: Config, setting: Setting) -> int:
    """What an optimizer step holds beside the gradients on CUDA: AdamW's square roots; and before it, the sum over ranks of gradients that are not sharded."""
    if setting.device_type != "cuda":
        return 0
    return 4 * sizes_of(config).total // setting.shards


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
        update = update_bytes(models[name], setting, *lengths[name])
        phases[f"updating the {name}"] = max(sum(update.values()), update["gradients"] + step_bytes(models[name], setting))
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


# Time

@dataclass(frozen=True)
class Speed:
    """What a GPU is taken to reach: a share of its peak FLOPs in training, and of the speed that its memory's bandwidth allows in decoding."""
    gpu: str = "H100"
    mfu: float = 0.35
    decode_efficiency: float = 0.2

    @property
    def limits(self) -> tuple[float, float]:
        """FLOP/s and bytes/s."""
        return PEAK_FLOPS[self.gpu], BANDWIDTH[self.gpu]


def gpu_name(device: torch.device) -> str:
    """The name in BANDWIDTH of a CUDA device, H100 where there is none or it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((known for known in BANDWIDTH if known in name), "H100")


@dataclass(frozen=True)
class Lengths:
    """Mean lengths in tokens."""
    prompt: int
    solution: int
    verification: int


def sampling_seconds(model, prompts: float, rows: float, prompt_tokens: int, new_tokens: int, speed: Speed) -> float:
    """Seconds to run prompts and decode rows behind them, on one GPU."""
    floor = decode_floor(model, prompts, rows, prompt_tokens, new_tokens, speed.limits) + prefill_floor(model, prompts, prompt_tokens, speed.limits)
    return floor / speed.decode_efficiency


def tango_seconds(generator, verifier, problems: float, num_samples: int, lengths: Lengths, speed: Speed, context: int | None = None,
                  reference: bool = True, recompute: bool = False) -> dict[str, float]:
    """Seconds of a generator step of GRPO alone and of RL Tango, and of a verifier step, on each of the GPUs that share the work evenly.

    Every generator step samples solutions and one verification of each, every verifier step solutions and a group of verifications. problems: per GPU.
    context: the tokens that attention sees, by default each model's whole context. reference: there is a KL term.
    """
    P, G, judged = problems, num_samples, lengths.prompt + lengths.solution  # judged: what a verifier reads
    passes = (3 + reference + recompute) / 3  # a reference runs forward, as a block that is run again
    train = lambda model, prompt, new: (P * prompt + P * G * new) * flops_per_token(model, context) * passes / (speed.limits[0] * speed.mfu)
    solve = lambda rows: sampling_seconds(generator, P, rows, lengths.prompt, lengths.solution, speed)
    grpo = solve(P * G) + train(generator, lengths.prompt, lengths.solution)
    verify = lambda prompts: sampling_seconds(verifier, prompts, P * G, judged, lengths.verification, speed)
    return {"grpo": grpo, "generator": grpo + verify(P * G), "verifier": solve(P) + verify(P) + train(verifier, judged, lengths.verification)}


def describe_run(args, configs: dict[str, Config], trained: set[str], prompt_lengths: list[int], ranks: int, dtype: torch.dtype,
                 device: torch.device) -> list[str]:
    """What tango_rl --dry-run prints: flags as resolved, memory per rank, tokens per step, hours. configs: of the roles; prompt_lengths: of problems."""
    generator, verifier, speed = configs["generator"], configs.get("verifier"), Speed(gpu_name(device))
    memory_gb = torch.cuda.get_device_properties(device).total_memory / 1e9 if device.type == "cuda" else None
    setting = Setting(ranks, args.shard, args.recompute, dtype, device.type, args.examples_per_step, args.num_samples, max(prompt_lengths),
                      args.max_new_tokens, args.verifier_max_new_tokens, args.micro_batch_tokens, args.max_rows, args.kl_coef > 0)
    lines = ["settings: " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in vars(args).items()), ""]
    lines += show_plan(memory_plan(generator, verifier, setting, trained), memory_gb)
    P, G, limits = args.examples_per_step, args.num_samples, (args.max_new_tokens, args.verifier_max_new_tokens)
    lines += ["", f"tokens per generator step, at most: {P * G * limits[0]:,} of solutions" + f", {P * G * limits[1]:,} of verifications" * bool(verifier)]
    lines += [f"tokens per verifier step, at most: {P * limits[0]:,} of solutions, {P * G * limits[1]:,} of verifications"] * ("verifier" in trained)
    steps = {"generator": args.num_steps if "generator" in trained else 0, "verifier": 0}
    if "verifier" in trained:
        steps["verifier"] = args.warmup_steps + args.num_steps * args.verifier_steps // args.generator_steps if steps["generator"] else args.num_steps
    for share, words in ((2, "half of their limits"), (1, "their limits")):
        lengths = Lengths(sum(prompt_lengths) // len(prompt_lengths), limits[0] // share, limits[1] // share)
        models = [model_of(config, torch.bfloat16) for config in (generator, verifier or generator)]
        context = lengths.prompt + lengths.solution + lengths.verification
        seconds = tango_seconds(*models, P / ranks, G, lengths, speed, context, args.kl_coef > 0, args.recompute)
        per_step = {"generator": seconds["generator" if verifier else "grpo"], "verifier": seconds["verifier"]}
        hours = sum(steps[role] * per_step[role] for role in steps) / 3600
        shown = ", ".join(f"{count} {role} steps of {per_step[role]:.1f}s" for role, count in steps.items() if count)
        lines.append(f"{hours:.2f} hours if completions run to {words}: {shown}, evaluation apart")
    on_disk = sum(4 * sizes_of(config).total * (3 if name in trained else 1) for name, config in configs.items())
    lines.append(f"{on_disk / 1e9:.3f} GB on disk per checkpoint set (weights, and AdamW of what is trained); --save-every {args.save_every}, none is removed")
    return [*lines, f"computed for {ranks} x {speed.gpu} at {100 * speed.mfu:.0f}% of the peak FLOPs in training and {100 * speed.decode_efficiency:.0f}% of "
            f"the bandwidth's speed in decoding; nothing was measured or loaded"]
