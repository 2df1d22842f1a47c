"""
The supervised loss of next tokens, and bits per byte.
"""
import math
from collections.abc import Callable, Iterable

import torch

from nanochat.common import all_reduce, wide_dtype
from nanochat.kernels.linear_logprob import linear_logprob
from nanochat.kernels.linear_policy_loss import linear_policy_loss
from nanochat.kernels.losses import PolicyLoss


def supervised_loss(model, ids: torch.Tensor, mask: torch.Tensor | None, num_tokens: float,
                    trunk: Callable | None = None) -> torch.Tensor:
    """The cross-entropy of next tokens, summed and divided by num_tokens. ids (B, T + 1) int64; mask (B, T + 1): 1
    where a token is trained, None for all. Logits never exist as a whole: it is the fused policy loss "reinforce" with
    advantages of 1. trunk: the model's, compiled."""
    inputs, targets, run = ids[:, :-1], ids[:, 1:].flatten(), trunk or model.trunk
    if mask is None:
        hidden = run(inputs).flatten(0, 1)  # (B * T, C)
    else:
        trained = mask[:, 1:].flatten().nonzero().squeeze(1)
        hidden, targets = run(inputs, kept=trained), targets[trained]  # (M, C), (M,)
    ones = torch.ones(len(targets), device=ids.device)
    return linear_policy_loss(hidden, model.lm_head.weight, targets, ones, ones / num_tokens,
                              loss=PolicyLoss("reinforce"), **model.head_options())[0]


@torch.no_grad()
def bits_per_byte(model, batches: Iterable[torch.Tensor], token_bytes: torch.Tensor) -> float:
    """The negative log2-likelihood of text per byte of it, over all ranks: comparable between tokenizers.

    batches: (B, T + 1) int64 each; every rank gives the same number. token_bytes (V,): bytes per token, 0 for special
    tokens, which do not count.
    """
    device = model.lm_head.weight.device
    sums = torch.zeros(2, dtype=wide_dtype(device), device=device)
    token_bytes = token_bytes.to(device)
    for ids in batches:
        ids = ids.to(device)
        targets = ids[:, 1:].flatten()
        num_bytes = token_bytes[targets]
        hidden = model.trunk(ids[:, :-1]).flatten(0, 1)
        logprobs = linear_logprob(hidden, model.lm_head.weight, targets, **model.head_options())[0]
        sums += torch.stack([-(logprobs * (num_bytes > 0)).sum().to(sums.dtype), num_bytes.sum().to(sums.dtype)])
    nats, num_bytes = all_reduce(sums).tolist()
    return nats / math.log(2) / num_bytes if num_bytes else math.inf
