"""Learning to Self-Verify (Chen et al. 2026): one model learns to solve and to verify, in turns. arXiv 2602.07594.

A generator step is GRPO on solutions. A verifier step is GRPO on verifications of the model's own solutions, as many
right as wrong ones; a verification earns 1 for the right verdict. The paper's claim is that learning to verify helps
solving, and that learning to solve does not help verifying. Runs from one checkpoint (chat_sft --role both) show it, as
both scores are in every evaluation: in turns (--generator-steps 5 --verifier-steps 1, the default and that of the
released script), generation alone (--verifier-steps 0), verification alone (--num-steps N --warmup-steps N) and
verification first (--warmup-steps W --verifier-steps 0). There is one model, so --num-steps counts both kinds of steps.

Departures:
1. A verifier step does not come on top of a generator step: it takes the place of one.
2. What is judged are whole solutions. In the released code of the turns it is their final answer alone.
3. A verifier step samples one solution of each problem, and takes past ones where right or wrong ones are missing. The
   code takes one right and one wrong one of each group of the generator steps before, then others, but none of a group
   without a right one.
4. A step of each kind is one optimizer step, where nothing is clipped; the script has four, clips from 0.8 to 1.28 and
   at 10 (--clip-high 0.28 --dual-clip 10), and warms the rate up for 10 steps.
5. Every solution weighs the same, and there is a KL. In the script every token does (--aggregation token), without a KL
   (--kl-coef 0).
"""
from nanochat.common import BadInput
from nanochat.recipes.tango import tango
from nanochat.recipes.tango._phases import add_schedule_args, begin_phase
from nanochat.recipes.tango._pool import keep
from nanochat.recipes.tango.tango import TABLE, evaluate  # noqa: F401
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.observe import observe
from nanochat.rl.play.play import Draw, Play, Update, solution_draws

STATUS = ("works: verifying alone lifts solving by 5.2 ± 4.7; turns lift verifying (+5.3 ± 4.3), not solving "
          "(+1.5 ± 3.3)")
ROLES = {"generator": RoleSpec("--model-tag"), "verifier": RoleSpec("--model-tag", shares="generator")}


def add_args(group) -> None:
    add_schedule_args(group)
    tango.add_verifier_args(group)
    group.set_defaults(verifier_head="prompt", generator_steps=5, warmup_steps=0, gamma=0.0, class_weights=False,
                       verifier_balance=True)


def check(args, task) -> None:
    if args.verifier_head != "prompt":
        raise BadInput(f"--verifier-head {args.verifier_head}: this recipe is about one model, which is prompt")
    if args.verifier_optimizer != "shared":
        raise BadInput(f"--verifier-optimizer {args.verifier_optimizer}: both kinds of steps are updates of one role")


def updates(args) -> dict[str, int]:
    return {"generator": args.num_steps, "verifier": 0}


def draws(args) -> dict[str, Draw]:
    return solution_draws(args) | tango.verifier_draws(args)


def play(t: Play):
    steps = {"warmup": tango.verifier_step, "verifier": tango.verifier_step, "generator": solve}
    for update in steps[begin_phase(t)](t):
        yield update._replace(role="generator")


def solve(t: Play):
    solutions = t.solve("solutions", t.problems())
    rewards = t.rewards(solutions)
    advantages = t.advantages(solutions, rewards)
    observe(t, "generator", solutions, rewards, advantages)
    keep(t, solutions)
    yield Update("generator", [(solutions, advantages)])
