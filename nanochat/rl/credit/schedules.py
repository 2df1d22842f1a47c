"""
How alpha and the learning rate decay, and the learning rate's warm-up.
"""
import math

from nanochat.cli import SHARE


def exponential_decay(start: float, end: float, progress: float) -> float:
    """start * (end/start)^progress, progress from 0 to 1: Tango's alpha. A start or end of 0 gives a constant start."""
    return start * (end / start) ** progress if start > 0 and end > 0 else start


def constant_lr(progress: float) -> float:
    return 1.0


def linear_lr(progress: float) -> float:
    """From 1 to 0.1."""
    return 1.0 - 0.9 * progress


def exponential_lr(progress: float) -> float:
    """From 1 to 0.1, by the same factor in each step (Tango, appendix D.2)."""
    return exponential_decay(1.0, 0.1, progress)


def cosine_lr(progress: float) -> float:
    """From 1 to 0.05 along half a cosine."""
    return 0.05 + (1 - 0.05) * 0.5 * (1 + math.cos(math.pi * progress))


LR_SCHEDULES = {"constant": constant_lr, "linear": linear_lr, "exponential": exponential_lr, "cosine": cosine_lr}


def lr_factor(schedule: str, warmup_ratio: float, step: int, num_steps: int, last: int) -> float:
    """What a step's learning rate is multiplied with: linear up over the first warmup_ratio of the steps, then by a
    schedule whose end is step `last`."""
    num_warmup = max(1, round(warmup_ratio * num_steps)) if warmup_ratio else 0
    if step < num_warmup:
        return (step + 1) / num_warmup
    return LR_SCHEDULES[schedule](min(1.0, (step - num_warmup) / max(1, last - num_warmup)))


def add_schedule_args(group, schedule: str, warmup_ratio: float) -> None:
    """The flags of lr_factor, with these defaults."""
    group.add_argument("--lr-schedule", default=schedule, choices=list(LR_SCHEDULES),
                       help="of the learning rates; linear and exponential: down to a tenth, cosine: to a twentieth")
    group.add_argument("--warmup-ratio", type=SHARE, default=warmup_ratio,
                       help="share of the updates over which the learning rates rise from 0 at first")
