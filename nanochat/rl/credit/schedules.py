"""
Who moves next, and how alpha and the learning rate decay.

A run is a verifier warm-up, then generator and verifier phases in turn. A schedule says whether the phase that is under
way is over.
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class PhaseLengths:
    """Optimizer steps of each phase: warm-up W, N_g generator steps, N_v verifier steps; `bar` is a balanced
    accuracy."""
    warmup: int
    generator: int
    verifier: int
    bar: float = 1.0


def fixed(phase: str, phase_steps: int, balanced_acc: float | None, lengths: PhaseLengths) -> bool:
    """A phase is over after its number of steps (Tango algorithm 1)."""
    return phase_steps >= getattr(lengths, phase)


def adaptive(phase: str, phase_steps: int, balanced_acc: float | None, lengths: PhaseLengths) -> bool:
    """As fixed, but a verifier's phase also ends, after one step at least, once its balanced accuracy (a moving
    average) is at the bar."""
    reached = phase != "generator" and phase_steps > 0 and balanced_acc is not None and balanced_acc >= lengths.bar
    return reached or fixed(phase, phase_steps, balanced_acc, lengths)


SCHEDULES = {"fixed": fixed, "adaptive": adaptive}
FOLLOWS = {"warmup": "generator", "generator": "verifier", "verifier": "generator"}


def next_phase(phase: str, phase_steps: int, balanced_acc: float | None, lengths: PhaseLengths,
               schedule=fixed) -> tuple[str, int]:
    """The phase of the next optimizer step and the steps already done in it; phases that are over at once are passed
    by."""
    for _ in FOLLOWS:
        if not schedule(phase, phase_steps, balanced_acc, lengths):
            return phase, phase_steps
        phase, phase_steps = FOLLOWS[phase], 0
    return ("generator", 0) if lengths.generator else ("verifier", 0)


def exponential_decay(start: float, end: float, progress: float) -> float:
    """start * (end/start)^progress, progress from 0 to 1: Tango's alpha. A start or end of 0 gives a constant start."""
    return start * (end / start) ** progress if start > 0 and end > 0 else start


def constant_lr(progress: float) -> float:
    return 1.0


def linear_lr(progress: float) -> float:
    """From 1 to 0.1."""
    return 1.0 - 0.9 * progress


LR_SCHEDULES = {"constant": constant_lr, "linear": linear_lr}
