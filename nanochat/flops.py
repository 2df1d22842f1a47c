"""
What a model's work and memory traffic cost: FLOPs per token, and the seconds that sampling takes at least; and what
this machine reaches.
"""
import time
from collections import Counter
from collections.abc import Iterable

import torch

from nanochat.common import all_reduce
from nanochat.kernels.ops import matmul

# Dense bf16 FLOP/s (half of what is printed with sparsity) by what a device's name holds, the longest name first. From
# the vendor's data sheets: nvidia.com/en-us/data-center/{gb200-nvl72, hgx, h200, h100, a100, l40s}; the 4090's from the
# Ada white paper (fp32 accumulation).
PEAK_FLOPS = {"GB200": 2.5e15, "B200": 2.25e15, "H200 NVL": 835e12, "H200": 989e12, "H100 NVL": 835e12,
              "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def matrix_parameters(model) -> int:
    """Weights that multiply every token (nanochat's scaling parameters): the blocks' matrices and the LM head."""
    looked_up = ("transformer.wte", "value_embeds", "model.embed_tokens")
    tied = model.lm_head.weight.numel() if getattr(model.config, "tied", False) else 0
    return tied + sum(p.numel() for name, p in model.named_parameters()
                      if p.dim() == 2 and not name.startswith(looked_up))


def tokens_seen(length: int, window: int) -> float:
    """How many tokens a token attends to, itself and at most `window` before it, in the mean over a row of `length`."""
    window = min(window, length - 1)
    return window + 1 - window * (window + 1) / 2 / length


def flops_per_token(model, length: int | None = None) -> float:
    """FLOPs that forward and backward need per token: 6 per weight that multiplies it, and 12 * heads * head size for
    each token that it attends to (PaLM, appendix B, which counts the future ones too). What is computed and masked, or
    computed again, is not counted. length: of the rows, by default the context."""
    config = model.config
    seen = sum(tokens_seen(length or config.sequence_len, window) for window in model.windows)
    return 6 * matrix_parameters(model) + 12 * config.n_head * config.head_dim * seen


def muon_flops(shapes: Iterable[tuple[int, int]], ranks: int = 1) -> int:
    """FLOPs of an optimizer step of Muon on the rank that has most to do, for matrices of these shapes: five iterations
    of A x B x A, A x A x A and A x A x B (optim.Muon)."""
    num = Counter(tuple(sorted(shape)) for shape in shapes)
    return sum(-(-n // ranks) * 5 * (4 * a * a * b + 2 * a ** 3) for (a, b), n in num.items())


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 FLOP/s by its name, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


# Floors of sampling. speed: FLOP/s and bytes/s.

def is_matrix(name: str) -> bool:
    """Whether a parameter of this name is one of a block's matrices, in nanochat's names or Hugging Face's."""
    return (".c_" in name or "_proj." in name) and name.endswith("weight")


def matrix_weights(model) -> int:
    """Weights of the blocks' matrix products."""
    return sum(p.numel() for name, p in model.blocks.named_parameters() if is_matrix(f".{name}"))


def prompt_weights(model) -> int:
    """Of these, what every token of a prompt needs: the last layer gives keys and values alone."""
    last, keys_and_values = f"{model.config.n_layer - 1}.", (".c_k.", ".c_v.", "k_proj", "v_proj")
    needed = lambda name: not name.startswith(last) or any(part in name for part in keys_and_values)
    return sum(p.numel() for name, p in model.blocks.named_parameters() if is_matrix(f".{name}") and needed(name))


def prefill_floor(model, prompts: int, prompt_len: int, speed: tuple[float, float]) -> float:
    """Seconds that running prompts takes at least: their matrix products."""
    return 2 * prompt_weights(model) * prompts * prompt_len / speed[0]


def decode_floor(model, prompts: int, rows: int, prompt_len: int, completion_len: int,
                 speed: tuple[float, float], own: int = 0) -> float:
    """Seconds that decoding takes at least: per step, the rows' products, or reading the weights and every cached token
    once (prompts are cached once for all their rows). own: tokens of a row that stand after its prompt already."""
    config, itemsize = model.config, model.compute_dtype.itemsize
    weights = matrix_weights(model) + model.lm_head.weight.numel()
    cached = 2 * config.n_layer * config.n_kv_head * config.head_dim * itemsize  # bytes per token
    seconds = 0.0
    for t in range(own, own + completion_len):
        read = weights * itemsize + cached * (prompts * prompt_len + rows * t)
        work = rows * (2 * weights + 4 * config.n_layer * config.n_head * config.head_dim * (prompt_len + t))
        seconds += max(read / speed[1], work / speed[0])
    return seconds


# This machine

def synchronize(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def seconds_of(action, device) -> float:
    synchronize(device)
    started = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started


def machine_speed(device, dtype) -> tuple[float, float]:
    """FLOP/s of a large product and bytes/s (read and written) of a large copy, of all ranks together."""
    size, length = (8192, 2 ** 30) if device.type == "cuda" else (1536, 2 ** 26)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(length, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    product = min(seconds_of(lambda: matmul(a, b), device) for _ in range(5))
    copy = min(seconds_of(lambda: target.copy_(source), device) for _ in range(5))
    return tuple(all_reduce(torch.tensor([2 * size ** 3 / product, 2 * length / copy], device=device)).tolist())
