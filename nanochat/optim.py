"""
Optimizers, learning-rate schedule, gradient all-reduce and clipping.
"""
import math

import torch

from nanochat.common import all_reduce
from nanochat.weights import is_sharded


class Fp32Muon(torch.optim.Muon):
    """torch.optim.Muon with its products in the parameters' dtype. PyTorch's are in bfloat16, which a CPU without
    AVX-512 computes at an eighth of the speed (dev/BENCH.md)."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            momentum, rule = group["momentum"], group["adjust_lr_fn"]
            for p in (p for p in group["params"] if p.grad is not None):
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                average = self.state[p]["momentum_buffer"]
                average.lerp_(p.grad, 1 - momentum)
                update = orthogonal(p.grad.lerp(average, momentum) if group["nesterov"] else average,
                                    group["ns_coefficients"], group["ns_steps"], group["eps"])
                rows, columns = p.shape
                scale = 0.2 * max(p.shape) ** 0.5 if rule == "match_rms_adamw" else max(1, rows / columns) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonal(x: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> torch.Tensor:
    """Near the orthogonal matrix that is closest to x, by Newton-Schulz (Jordan et al. 2024, Muon). (A, B) -> (A, B)"""
    a, b, c = coefficients
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def muon_class(parameters: list[torch.nn.Parameter]) -> type[torch.optim.Muon]:
    """PyTorch's Muon, or Fp32Muon on a CPU for which oneDNN has no products in bfloat16."""
    on_cpu = all(p.device.type == "cpu" for p in parameters)
    return Fp32Muon if on_cpu and not has_bfloat16_products() else torch.optim.Muon


def has_bfloat16_products() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def adamw(parameters, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """AdamW (betas 0.9, 0.95) over the given parameters: the optimizer of RL."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)


def muon_adamw(model, matrix_lr: float, embedding_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embeddings, head, gates and scalars; for SFT, also from scratch.

    Parameters that do not require a gradient are left out.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in trained.items() if ".c_" in name]
    rest = [p for name, p in trained.items() if ".c_" not in name]
    muon = [muon_class(matrices)(matrices, lr=matrix_lr, weight_decay=0.0,
                                 adjust_lr_fn="match_rms_adamw")] if matrices else []
    return [*muon, adamw(rest, embedding_lr)]


def pretraining_optimizers(model, matrix_lr: float, embedding_lr: float, unembedding_lr: float, scalar_lr: float,
                           weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices and gates, AdamW with a group of its own for each other kind of parameter.

    Betas, decays and the ratios between groups are upstream nanochat's, tuned there at width 768; AdamW's learning
    rates of matrices go with 1 / sqrt(width). weight_decay is Muon's.
    """
    scale, parameters = (model.config.n_embd / 768) ** -0.5, dict(model.named_parameters())
    pick = lambda *starts: [p for name, p in parameters.items() if name.startswith(starts)]
    groups = [
        dict(params=pick("lm_head"), lr=unembedding_lr * scale, betas=(0.8, 0.96), weight_decay=0.01),
        dict(params=pick("transformer.wte"), lr=embedding_lr * scale, betas=(0.8, 0.995), weight_decay=0.001),
        dict(params=pick("value_embeds"), lr=0.5 * embedding_lr * scale, betas=(0.8, 0.995), weight_decay=0.01),
        dict(params=pick("resid_lambdas"), lr=0.01 * scalar_lr, betas=(0.8, 0.95), weight_decay=0.05),
        dict(params=pick("x0_lambdas"), lr=scalar_lr, betas=(0.96, 0.95), weight_decay=0.0),
        dict(params=pick("smear", "backout"), lr=0.4 * scalar_lr, betas=(0.8, 0.95), weight_decay=0.0),
    ]
    matrices = pick("transformer.h.")
    muon = muon_class(matrices)(matrices, lr=matrix_lr, weight_decay=weight_decay, momentum=0.95,
                                adjust_lr_fn="original")
    return [muon, torch.optim.AdamW(groups, eps=1e-10)]


def optimize(optimizers: list[torch.optim.Optimizer], parameters: list[torch.nn.Parameter], lr_factor: float,
             max_grad_norm: float) -> float:
    """One step of all optimizers on gradients summed over ranks, clipped, at the initial learning rates times
    lr_factor.

    -> the gradient's norm; where that is not finite no rank steps.
    """
    all_reduce_gradients(parameters)
    grad_norm = clip_gradients(parameters, max_grad_norm)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_factor
        if math.isfinite(grad_norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return grad_norm


def warmup_warmdown(step: int, num_steps: int, warmup_steps: int, warmdown: float, final: float) -> float:
    """Learning-rate factor: linear up over warmup_steps, 1, then linear down to `final` over the last `warmdown` share
    of the steps."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    left = (num_steps - step) / max(1, round(warmdown * num_steps))
    return 1.0 if left >= 1 else left + (1 - left) * final


def warmup_cosine(step: int, num_steps: int, warmup: float = 0.1, final: float = 0.05) -> float:
    """Learning-rate factor: linear over the first `warmup` share of the steps, then a cosine from 1 to `final`."""
    num_warmup = max(1, round(warmup * num_steps))
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def all_reduce_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Sums gradients over ranks, in one collective. A missing gradient counts as 0, so that all ranks reduce the same
    shape. Those of sharded parameters were summed in the backward pass."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if not torch.distributed.is_initialized() or is_sharded(parameters[0]):
        return
    flat = all_reduce(torch.cat([p.grad.flatten() for p in parameters]))
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(grad.view_as(p))


def clip_gradients(parameters: list[torch.nn.Parameter], max_norm: float) -> float:
    """The gradient's norm (not finite if any entry is not); scales gradients down to `max_norm` if larger. 0 = no
    clipping."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else math.inf)
    return float(norm.full_tensor() if is_sharded(norm) else norm)
