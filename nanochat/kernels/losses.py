"""
Policy losses and KL estimators, as small pure functions chosen by name. A loss gives one number per token.

The kernels compute the same; here it is in PyTorch.
"""
from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 20.0  # exp() of more would overflow; such a token is far outside any clip range


def importance_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """pi / pi_old per token."""
    return torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def reinforce(spec, logprobs, old_logprobs, advantages):
    """-A log pi: plain policy gradient, no ratio."""
    return -advantages * logprobs


def ppo_clip(spec, logprobs, old_logprobs, advantages):
    """-min(rho A, clip(rho, 1-low, 1+high) A) (Tango eq. 1; PPO), optionally bounded by dual_clip * |A| where A < 0."""
    ratio = importance_ratio(logprobs, old_logprobs)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantages)
    if spec.dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -spec.dual_clip * advantages), loss)


def cispo(spec, logprobs, old_logprobs, advantages):
    """-sg(clip(rho, 1-low, 1+high)) A log pi (MiniMax-M1, arXiv 2506.13585, eq. 4): the weight of a token is bounded,
    and its gradient is never lost. The paper has no bound below (clip_low 1)."""
    ratio = importance_ratio(logprobs, old_logprobs).detach()
    return -ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantages * logprobs


POLICY_LOSSES = {"ppo_clip": ppo_clip, "reinforce": reinforce, "cispo": cispo}


def sequence_old_logprobs(logprobs, old_logprobs, rows, num_rows: int):
    """Old logprobs by which every token's ratio is that of its whole sequence, (pi / pi_old)^(1 / length): GSPO (Zheng
    et al. 2025, arXiv 2507.18071, eq. 5).

    logprobs: of the policy as it is, taken for constants. So the slope of the ratio in each token's logprob is the
    ratio, and with --aggregation sequence the gradient is GSPO's. All (M,); rows (M,) int64: the sequence of a token.
    """
    log_ratio = logprobs - old_logprobs
    sums = log_ratio.new_zeros(2, num_rows).index_add_(1, rows, torch.stack([log_ratio, torch.ones_like(log_ratio)]))
    return logprobs - (sums[0] / sums[1].clamp(min=1))[rows]


def k1(logprobs, ref_logprobs):
    """log pi - log ref: unbiased, may be negative. As a loss its expected gradient is 0; for logging and rewards."""
    return logprobs - ref_logprobs


def k2(logprobs, ref_logprobs):
    """(log pi - log ref)^2 / 2: its gradient is the KL's on policy."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs, ref_logprobs):
    """ref/pi - log(ref/pi) - 1: unbiased and never negative (GRPO)."""
    log_ratio = (ref_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.exp(log_ratio) - log_ratio - 1


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of one token: policy term + kl_coef * KL - entropy_coef * entropy. A kernel can read its numbers."""
    name: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    sequence_ratio: bool = False  # what `update` makes of old_logprobs before they come here

    def __call__(self, logprobs, entropy, old_logprobs, ref_logprobs, advantages) -> torch.Tensor:
        """All (N,) fp32; ref_logprobs may be None when kl_coef is 0 -> loss per token (N,)."""
        loss = POLICY_LOSSES[self.name](self, logprobs, old_logprobs, advantages)
        if self.kl_coef:
            loss = loss + self.kl_coef * KL_ESTIMATORS[self.kl](logprobs, ref_logprobs)
        return loss - self.entropy_coef * entropy if self.entropy_coef else loss
