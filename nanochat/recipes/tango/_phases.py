"""
Whose turn it is: the verifier's warm-up, then generator and verifier in turn.
"""
from nanochat.cli import at_least
from nanochat.rl.play.play import Play

FOLLOWS = {"warmup": "generator", "generator": "verifier", "verifier": "generator"}


def add_schedule_args(group) -> None:
    group.add_argument("--generator-steps", type=at_least(1), default=3, help="N_g: generator steps per phase")
    group.add_argument("--verifier-steps", type=at_least(0), default=1, help="N_v: verifier steps per phase")
    group.add_argument("--warmup-steps", type=at_least(0), default=40,
                       help="verifier steps before the first generator step")


def next_phase(phase: str, made: int, lengths: dict[str, int]) -> tuple[str, int]:
    """The phase of the next step, and the steps already made in it (algorithm 1). Empty phases are passed by."""
    while made >= lengths[phase]:
        phase, made = FOLLOWS[phase], 0
    return phase, made


def phase_of(t: Play) -> tuple[str, int]:
    lengths = {"warmup": t.args.warmup_steps, "generator": t.args.generator_steps, "verifier": t.args.verifier_steps}
    return next_phase(t.memory.get("phase", "warmup"), t.memory.get("phase_steps", 0), lengths)


def begin_phase(t: Play) -> str:
    """The phase of this step, counted and logged."""
    t.memory["phase"], made = phase_of(t)
    t.memory["phase_steps"] = made + 1
    t.log(None, {"phase": t.memory["phase"]})
    return t.memory["phase"]


def eval_step(t: Play) -> int:
    """Evaluations go by the generator's steps; those of the warm-up are counted down to 0."""
    return t.steps["verifier"] - t.args.warmup_steps if phase_of(t)[0] == "warmup" else t.steps["generator"]
