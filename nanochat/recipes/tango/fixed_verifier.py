"""Fixed verifier: RL Tango's generator with a verifier as SFT left it. arXiv 2505.15034, section 4.3.

The generator is rewarded as in recipe tango, by a verifier that does not learn: beside recipe tango this shows what
training it adds. With --judge the verifier may be of any kind, such as what recipe orm or prm has trained
(--verifier-source rl): the chance that a step is right takes the place of the verdict on it, and that of the whole
where the judge says nothing of steps. Judges of several solutions (pair, graded, solve_pair, scores) are verifiers that
learned this form by SFT (chat_sft --verifier-form), and perhaps by RL in recipe rm_r1, think_rm or spct; give them the
--verifier-max-new-tokens of these. Each solution of a group is judged beside its neighbours, in a ring, and its chance
is its share of duels won, or of the highest score.

Departures: 2, 4 and 5 of recipe tango.
"""
from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.recipes.tango import tango
from nanochat.recipes.tango._judged import asked, verdict_draws, written
from nanochat.recipes.tango.tango import TABLE  # noqa: F401
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1, scores_of_pair
from nanochat.rl.play.play import solution_draws
from nanochat.rl.verify.judge_evals import add_judged_args, scores_as_judge
from nanochat.rl.verify.judges import JUDGES, OF_THE_WHOLE, add_together_args, check_together_args, judge_draws

STATUS = "works: 27.2 ± 8.3 above GRPO with the same weight of wrong answers at equal steps, for 1.7 times the tokens"
ROLES = {"generator": RoleSpec("--model-tag"), "verifier": RoleSpec("--verifier-tag", "-ver", trained=False)}
SHOWN = {"generator": ["alpha", "wrong_passed"]}
WRITTEN = "generative"  # the judge whose verdicts are read, as in the paper


def add_args(group):
    tango.add_alpha_args(group)
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=112)
    tango.add_written_args(group)
    tango.add_step_args(group)
    group.add_argument("--judge", default=WRITTEN, choices=list(JUDGES), help="how the verifier says what is right")
    add_judged_args(group)
    add_together_args(group)


def check(args, task):
    tango.check_alpha(args, task)
    tango.check_written(args, task)
    check_together_args(args)
    if args.judge != WRITTEN and args.step_rewards != "verdicts":
        raise BadInput(f"--judge {args.judge}: gives chances, and --step-rewards {args.step_rewards} makes them of "
                       f"verdicts; say --step-rewards verdicts")
    if args.judge == WRITTEN and args.verifications > 1:
        raise BadInput(f"--verifications {args.verifications}: the judge {WRITTEN} reads one here; see --judge "
                       f"analysed")
    if args.judge != WRITTEN and args.verify_relabelled:
        raise BadInput(f"--verify-relabelled: is for the judge {WRITTEN}, not {args.judge}")


def draws(args):
    found = judge_draws(args, args.judge, args.examples_per_step, args.num_samples)
    return solution_draws(args) | found | verdict_draws(args, found["verdicts"])


def play(t):
    judge = written if t.args.judge == WRITTEN else asked
    yield from tango.generator_step(t, judge, "verdict" if t.args.judge in OF_THE_WHOLE else "steps")


def evaluate(t):
    if t.args.judge == WRITTEN:
        return scores_of_pair(t)
    # Neither the verifier nor what it is scored on changes, but for the present generator's reference.
    if "judged" not in t.memory or "reference" in t.draws:
        t.memory["judged"] = scores_as_judge(t, t.args.judge)
    return pass_at_1(t, "generator") | t.memory["judged"]
