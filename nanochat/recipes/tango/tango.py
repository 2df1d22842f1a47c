"""RL Tango (Zha et al. 2025): a generator and its generative verifier, trained in turns by GRPO. arXiv 2505.15034.

The verifier reads a solution, and writes a verdict on each step and on the whole. The generator is rewarded by its
answers and by the verdicts on its steps. The verifier is rewarded by whether its final verdicts are right, and by their
form; no step label is used. Equations, sections and the algorithm are the paper's.

Departures:
1. Verifier batches can be balanced between right and wrong solutions (--verifier-balance) and hold past ones
   (--verifier-replay).
2. alpha decays from 0.3 to 0.03, not from 0.1 to 0.001.
3. Format reward: 1, less 0.25 per unmet criterion; class weights: sqrt(n / 2n_c), at most 4.
4. A step's reward takes the outcome into account (--step-rewards posterior) and moves its own tokens alone (--credit
   own_step). Wrong answers weigh less than right ones (--negative-weight 0.1). Solutions of a problem that are alike
   share one verification (--verify-distinct). The paper's way is --step-rewards verdicts --credit to_go
   --negative-weight 1 --no-verify-distinct.
5. Both models start from SFT, the verifier's on verdicts on steps, of which a share teaches what is wrong (in the
   main job 700 steps, with 65% of its facts right). In the paper's runs on math the verifier starts from the base
   model. A learning rate is constant, --lr-schedule exponential is appendix D.2's.

Verdicts may be stricter, or count for less, as in later systems: see the help of --verify-relabelled and --weigh-by-j.
"""
import argparse

from nanochat.cli import SHARE, at_least
from nanochat.common import BadInput
from nanochat.recipes.tango._judged import EARN, STEP_REWARDS, verdict_draws, verdict_skill, written
from nanochat.recipes.tango._observe import observe_judged, observe_verifier
from nanochat.recipes.tango._phases import add_schedule_args, begin_phase, eval_step  # noqa: F401
from nanochat.recipes.tango._pool import class_weights, keep, solutions_to_judge
from nanochat.rl.credit.advantages import COMBINE, PRESETS, check_combine
from nanochat.rl.credit.rewards import CREDIT, terminal_rewards, verdict_reward
from nanochat.rl.credit.schedules import exponential_decay
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import PAIR_TABLE, scores_of_pair
from nanochat.rl.measure.observe import observe
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.prompts import empty_verifier_prompt
from tasks.common import Problem

STATUS = ("works: against GRPO at equal steps, 19.4 ± 7.4 above it in the paper's use, and 24.5 ± 9.8 with the "
          "defaults, where both weigh wrong answers .1, for two to three times the tokens; the paper's other claim, "
          "that training the verifier pays, is not shown (-2.7 ± 7.7)")
ROLES = {"generator": RoleSpec("--model-tag"),
         "verifier": RoleSpec("--verifier-tag", "-ver", lr="--verifier-lr", shares="generator")}
SHOWN = {"generator": ["alpha", "wrong_passed"], "verifier": ["balanced_acc", "step_f1"]}
TABLE = PAIR_TABLE
evaluate = scores_of_pair


# Algorithm 1

def play(t: Play, earn: str = "steps"):
    """N_g generator steps, then N_v verifier steps, after a warm-up of the verifier alone."""
    phase = begin_phase(t)
    if phase == "generator":
        yield from generator_turn(t, earn)
    elif phase == "verifier" and t.args.verifier_updates == "summed":
        yield from summed(t, earn)
    else:
        yield from verifier_step(t)


def generator_turn(t: Play, earn: str):
    """A generator step, whose solutions are kept for the verifier's steps to come."""
    for update in generator_step(t, written, earn):
        keep(t, update.parts[0][0])
        yield update


def generator_step(t: Play, judge, earn: str = "steps", problems: list[Problem] | None = None):
    """M solutions of each problem, what a judge says of them, and an update of the generator (section 2). earn: what
    that adds to the outcome, a reward for the "steps" or for the final "verdict". problems: default: the next ones."""
    solutions = t.solve("solutions", t.problems() if problems is None else problems)
    rewards = t.rewards(solutions)                                                                             # eq. 2
    judged = judge(t, solutions)
    alpha = exponential_decay(t.args.alpha_start, t.args.alpha_end, t.progress("generator"))
    if t.args.weigh_by_j:
        alpha *= max(0.0, verdict_skill(t, solutions, judged))
    # What the answer earns, and what the judge's word does: eq. 3 with --step-rewards verdicts --credit to_go.
    sources = {"outcome": terminal_rewards(rewards, solutions.lengths, t.args.negative_weight),
               earn: EARN[earn](t, solutions, judged)}
    # Both as advantages, weighed 1 - alpha to alpha: eq. 4 to 7.
    advantages = COMBINE[t.args.combine](list(zip((1 - alpha, alpha), sources.values(), strict=True)),
                                         solutions.group_id, solutions.mask, PRESETS[t.args.advantage], t.reduce)
    observe(t, "generator", solutions, rewards, advantages, sources)
    observe_judged(t, solutions, judged, alpha)
    yield Update("generator", [(solutions, advantages)])                                                       # eq. 1


def verifier_step(t: Play):
    """One solution of each problem, or past ones, a group of verifications of each, and an update (section 3)."""
    solutions, outcomes, copies = solutions_to_judge(t)
    rollouts = t.verify("verifications", solutions, copies=copies)
    verifications = t.read_verifications(rollouts)
    outcomes = [outcome for outcome in outcomes for _ in range(t.args.num_samples)]
    rewards = [verdict_reward(v.verdict, outcome, v.unmet, t.args.gamma)                                       # eq. 8
               for v, outcome in zip(verifications, outcomes, strict=True)]
    advantages = t.advantages(rollouts, rewards, preset=t.args.advantage)
    if t.args.class_weights:                                                                                   # eq. 9
        advantages = advantages * class_weights(t, outcomes)[:, None]
    observe_verifier(t, solutions, rollouts, verifications, outcomes, rewards)
    yield Update("verifier", [(rollouts, advantages)])


def summed(t: Play, earn: str):
    """The update of a generator step with the rollouts of a verifier step beside its own: each counts the same."""
    *first, last = [*verifier_step(t), *generator_turn(t, earn)]
    yield last._replace(parts=[part for update in (*first, last) for part in update.parts])


# What a run is made of

def updates(args) -> dict[str, int]:
    phases = max(0, args.num_steps - 1) // args.generator_steps  # of the verifier: the run ends with a generator step
    return {"generator": args.num_steps, "verifier": args.warmup_steps + phases * args.verifier_steps}


def draws(args) -> dict[str, Draw]:
    P, G, limit = args.examples_per_step, args.num_samples, args.max_new_tokens
    verdict = Draw("verifier", P * G, 1, args.verifier_max_new_tokens, wrap=empty_verifier_prompt, quoted=limit)
    return {"solutions": Draw("generator", P, G, limit, trained=True), **verdict_draws(args, verdict),
            **verifier_draws(args, updates(args)["verifier"])}


def verifier_draws(args, times: int | None = None) -> dict[str, Draw]:
    P, G, limit = args.examples_per_step, args.num_samples, args.max_new_tokens
    return {"judged": Draw("generator", P, 1, limit, times),
            "verifications": Draw("verifier", P, G, args.verifier_max_new_tokens, times, trained=True,
                                  wrap=empty_verifier_prompt, quoted=limit)}


# Flags, in the groups that other recipes of the family take

def add_args(group) -> None:
    add_pair_args(group)
    add_step_args(group)


def add_pair_args(group) -> None:
    add_schedule_args(group)
    group.add_argument("--verifier-updates", default="interleaved", choices=["interleaved", "summed"],
                       help="summed, for --verifier-head prompt: a verifier step is no update of its own, its loss is "
                       "added to that of the next generator step")
    add_alpha_args(group)
    add_verifier_args(group)
    add_written_args(group)


def add_alpha_args(group) -> None:
    group.add_argument("--alpha-start", type=SHARE, default=0.3,
                       help="weight of the verifier's word at the start (eq. 7; there 0.1)")
    group.add_argument("--alpha-end", type=SHARE, default=0.03,
                       help="and at the end, decaying exponentially (there 0.001)")
    group.add_argument("--combine", default="advantages", choices=list(COMBINE),
                       help="how the outcome and the verifier's rewards make one advantage: each normalised by itself "
                       "(advantages, eq. 7), or both together (rewards); stratified: verdicts rank right solutions "
                       "among each other, and wrong ones; filtered: they choose which solutions are learned from, "
                       "whatever alpha is")
    group.set_defaults(negative_weight=0.1)


def add_written_args(group) -> None:
    group.add_argument("--verify-distinct", action=argparse.BooleanOptionalAction, default=True,
                       help="solutions of a problem that are alike share one verification, which counts for each")
    group.add_argument("--verify-relabelled", action=argparse.BooleanOptionalAction, default=False,
                       help="verify each solution about other numbers too, where what is right stays right; only what "
                       "passes both is right (isomorphic tests, arXiv 2604.15149)")
    group.add_argument("--weigh-by-j", action=argparse.BooleanOptionalAction, default=False,
                       help="alpha times J, the share of right solutions that are judged right less that of wrong "
                       "ones, at least 0, over the batches so far (RLVeR, arXiv 2601.04411)")


def add_step_args(group) -> None:
    add_credit_args(group)
    group.add_argument("--step-rewards", default="posterior", choices=list(STEP_REWARDS),
                       help="posterior: how likely each step is right, given all verdicts on the solution, its "
                       "outcome, and how far verdicts could be believed before; verdicts is the paper's (eq. 3)")


def add_credit_args(group) -> None:
    group.add_argument("--credit", default="own_step", choices=list(CREDIT),
                       help="which tokens a step's reward moves: to_go, its own and all before (eq. 6); own_step, its "
                       "own; min, those up to the end of the worst step, which alone has a reward")


def add_verifier_args(group) -> None:
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=112)
    group.add_argument("--gamma", type=at_least(0, float), default=0.8, help="of the verifier's format reward (eq. 8)")
    group.add_argument("--class-weights", action=argparse.BooleanOptionalAction, default=True,
                       help="class-aware verifier advantages (eq. 9)")
    group.add_argument("--verifier-balance", action=argparse.BooleanOptionalAction, default=False,
                       help="judge as many right as wrong solutions, drawing on past ones")
    group.add_argument("--verifier-replay", type=SHARE, default=0.0, help="share of past solutions in verifier batches")
    group.add_argument("--replay-size", type=at_least(0), default=2048, help="past solutions kept")


def check(args, task) -> None:
    check_alpha(args, task)
    check_written(args, task)
    if args.verifier_updates == "summed" and (args.verifier_head, args.verifier_steps) != ("prompt", 1):
        raise BadInput("--verifier-updates summed: needs --verifier-head prompt, for there is one model, and "
                       "--verifier-steps 1")


def check_alpha(args, task) -> None:
    if args.alpha_start > 0 and args.alpha_end == 0:
        raise BadInput("--alpha-end 0: an exponential decay never gets there; give a small number, or --alpha-start "
                       "0 for no step rewards")
    check_combine(args)


def check_written(args, task) -> None:
    if args.verify_relabelled and not hasattr(task, "relabelled"):
        raise BadInput(f"--verify-relabelled: nothing can be relabelled in task {task.name}")
