"""
How alpha and the learning rate decay.
"""


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


LR_SCHEDULES = {"constant": constant_lr, "linear": linear_lr, "exponential": exponential_lr}
