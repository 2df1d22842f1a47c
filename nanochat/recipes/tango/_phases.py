"""
Whose turn it is: the verifier's warm-up, then generator and verifier in turn.
"""
from nanochat.cli import at_least
from nanochat.rl.credit.schedules import SCHEDULES, PhaseLengths, next_phase
from nanochat.rl.play.play import Play


def add_schedule_args(group) -> None:
    group.add_argument("--schedule", default="fixed", choices=list(SCHEDULES), help="how long phases last")
    group.add_argument("--generator-steps", type=at_least(1), default=3, help="N_g: generator steps per phase")
    group.add_argument("--verifier-steps", type=at_least(0), default=1, help="N_v: verifier steps per phase")
    group.add_argument("--warmup-steps", type=at_least(0), default=40,
                       help="verifier steps before the first generator step")
    group.add_argument("--balanced-acc-bar", type=float, default=0.9,
                       help="schedule adaptive: verifier phases end at this balanced accuracy")


def phase_of(t: Play) -> tuple[str, int]:
    """The phase of the next step, and how many steps of it are made."""
    lengths = PhaseLengths(t.args.warmup_steps, t.args.generator_steps, t.args.verifier_steps, t.args.balanced_acc_bar)
    before = t.memory.get("phase", "warmup"), t.memory.get("phase_steps", 0)
    return next_phase(*before, t.memory.get("balanced_acc"), lengths, SCHEDULES[t.args.schedule])


def begin_phase(t: Play) -> str:
    """The phase of this step, counted and logged."""
    t.memory["phase"], made = phase_of(t)
    t.memory["phase_steps"] = made + 1
    t.log(None, {"phase": t.memory["phase"]})
    return t.memory["phase"]


def eval_step(t: Play) -> int:
    """Evaluations go by the generator's steps; those of the warm-up are counted down to 0."""
    return t.steps["verifier"] - t.args.warmup_steps if phase_of(t)[0] == "warmup" else t.steps["generator"]
