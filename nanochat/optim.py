"""
Optimizers, learning-rate schedule, gradient all-reduce and clipping.
"""
import math

import torch

from nanochat.common import all_reduce


def adamw(parameters, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """AdamW (betas 0.9, 0.95) over the given parameters: the optimizer of RL."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)


def muon_adamw(model, matrix_lr: float, embedding_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embeddings, head, gates and scalars; for training from scratch.

    Parameters that do not require a gradient are left out.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in trained.items() if ".c_" in name]
    rest = [p for name, p in trained.items() if ".c_" not in name]
    muon = [torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")] if matrices else []
    return [*muon, adamw(rest, embedding_lr)]


def warmup_cosine(step: int, num_steps: int, warmup: float = 0.1, final: float = 0.05) -> float:
    """Learning-rate factor: linear over the first `warmup` share of the steps, then a cosine from 1 to `final`."""
    num_warmup = max(1, round(warmup * num_steps))
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def all_reduce_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Sums gradients over ranks, in one collective. A missing gradient counts as 0, so that all ranks reduce the same shape."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if not torch.distributed.is_initialized():
        return
    flat = all_reduce(torch.cat([p.grad.flatten() for p in parameters]))
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(grad.view_as(p))


def clip_gradients(parameters: list[torch.nn.Parameter], max_norm: float) -> float:
    """The gradient's norm (not finite if any entry is not); scales gradients down to `max_norm` if larger. 0 = no clipping."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else math.inf))
