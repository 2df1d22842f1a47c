"""RL Tango (Zha et al. 2025): a generator and its generative verifier, trained in turns by GRPO. arXiv 2505.15034.

The verifier reads a solution, and writes a verdict on each step and on the whole. The generator is rewarded by its
answers and by the verdicts on its steps. The verifier is rewarded by whether its final verdicts are right, and by their
form; no step label is used. Equations, sections and the algorithm are the paper's.

Departures:
1. Verifier batches can be balanced between right and wrong solutions (--verifier-balance) and hold past ones
   (--verifier-replay).
2. The warm-up may end at a bar of balanced accuracy instead of a count (--schedule adaptive).
3. alpha decays from 0.3 to 0.03, not from 0.1 to 0.001.
4. Format reward: 1, less 0.25 per unmet criterion; class weights: sqrt(n / 2n_c), at most 4.
5. Step rewards take the outcome into account (--step-rewards posterior), both rewards are added before normalising
   (--combine rewards), and solutions of a problem that are alike share one verification (--verify-distinct). The
   paper's way is --step-rewards verdicts --combine advantages --no-verify-distinct.
6. Only some problems may have gold answers (--num-labelled).
"""
import argparse
import math
import random
import sys
from dataclasses import asdict

import torch

from nanochat.common import BadInput, check_choices, check_least, wide_dtype
from nanochat.recipes.tango._pool import choose_solutions, completions_of, extended, scored_solutions
from nanochat.rl.credit.advantages import COMBINE, PRESETS
from nanochat.rl.credit.rewards import (ClassWeights, VerdictTrust, format_reward, outcome_rewards, step_rewards,
                                        terminal_rewards, verdict_reward)
from nanochat.rl.credit.schedules import SCHEDULES, PhaseLengths, exponential_decay, next_phase
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import (gathered_verdict_scores, log_rewards, log_variances, mean_advantages,
                                       passed_by_error, scores_of_pair, verification_columns)
from nanochat.rl.measure.scores import ranking_reversed
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.outcomes import answers_of, labels_of, scores_of
from nanochat.rl.records.prompts import Verification, count_copies, empty_verifier_prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.judge_evals import judge_scores
from nanochat.rl.verify.judges import JUDGES
from tasks.common import Problem

TAGS = dict(family="generator-verifier", verifier="generative, RL on outcomes", reward="outcome + process",
            credit="z-score of the sum")
ROLES = {"generator": RoleSpec("--model-tag"),
         "verifier": RoleSpec("--verifier-tag", "-ver", lr="--verifier-lr", shares="generator")}
SHOWN = {"generator": ["alpha", "wrong_passed"], "verifier": ["balanced_acc", "step_f1"]}
TABLE = {
    "gen/pass1_in": "generator greedy pass@1, in distribution",
    "gen/pass1_out": "generator greedy pass@1, out of distribution",
    "gen/pass1_lenient_in": "the same by the last number, in distribution",
    "gen/pass1_lenient_out": "the same by the last number, out of distribution",
    "ver/outcome_f1_fixed": "verifier outcome F1 (macro), fixed solutions",
    "ver/balanced_acc_fixed": "verifier balanced accuracy, fixed solutions",
    "ver/step_f1_fixed": "verifier step F1 (macro, gold labels), fixed solutions",
    "ver/step_f1_fixed_out": "verifier step F1, fixed solutions, out of distribution",
    "ver/step_f1_current": "verifier step F1, current generator's solutions",
    "ver/wrong_steps_passed_fixed": "wrong steps that it passes, fixed solutions",
    "ver/wrong_steps_passed_current": "wrong steps that it passes, current generator's solutions",
    "ver/parse_fail_fixed": "verifier parse failures",
}
MOVING_DECAY = 0.8  # of the verifier's scores that decide over phases and warnings
WRITTEN = "generative"  # the judge whose verdicts are read from one verification, as in the paper
LENIENT = 0.3  # a run warns while more than this share of the generator's wrong steps passes


# What steps are worth: (t, solutions with their outcomes, step verdicts) -> how likely each step is right, None for a
# solution without verdicts

def as_judged(t: Play, solutions: Rollouts, verdicts: list[list[bool] | None]) -> list[list[bool] | None]:
    """The verdicts themselves (eq. 3)."""
    return verdicts


def posterior(t: Play, solutions: Rollouts, verdicts: list[list[bool] | None]) -> list[list[float] | None]:
    """The chance given all verdicts on the solution and its outcome, and how far verdicts could be believed before. In
    a wrong solution of which nothing is blamed every step is doubted. Blame in a right one counts for less. A solution
    without an answer may lack steps and have no wrong one, so its outcome says nothing."""
    answers = answers_of(t.task, solutions.texts)
    outcomes = [None if answer is None else outcome
                for outcome, answer in zip(solutions.columns["outcome"], answers, strict=True)]
    trust = VerdictTrust(**t.memory.get("trust", {}))
    trust.observe(verdicts, outcomes, lambda x: t.reduce(x.to(t.device, wide_dtype(t.device))))
    t.memory["trust"] = asdict(trust)
    t.log("generator", {f"trust/{name}": getattr(trust, name) for name in ("right_if_right", "right_if_wrong", "luck")})
    chances = [row and trust.chances(row, outcome) for row, outcome in zip(verdicts, outcomes, strict=True)]
    solutions.columns["step_chances"] = chances
    return chances


STEP_REWARDS = {"verdicts": as_judged, "posterior": posterior}


# Flags

def add_args(group) -> None:
    add_pair_args(group)
    add_step_args(group)


def add_pair_args(group) -> None:
    add_schedule_args(group)
    group.add_argument("--verifier-updates", default="interleaved",
                       help=f"one of: {', '.join(VERIFIER_UPDATES)}; summed, for --verifier-head prompt: a verifier "
                       "step is no update of its own, its loss is added to that of the next generator step")
    add_label_args(group)
    add_alpha_args(group)
    add_verifier_args(group)
    add_distinct_args(group)


def add_schedule_args(group) -> None:
    group.add_argument("--schedule", default="fixed", help=f"one of: {', '.join(SCHEDULES)}")
    group.add_argument("--generator-steps", type=int, default=3, help="N_g: generator steps per phase")
    group.add_argument("--verifier-steps", type=int, default=1, help="N_v: verifier steps per phase")
    group.add_argument("--warmup-steps", type=int, default=40, help="verifier steps before the first generator step")
    group.add_argument("--balanced-acc-bar", type=float, default=0.9,
                       help="schedule adaptive: verifier phases end at this balanced accuracy")


def add_label_args(group) -> None:
    group.add_argument("--num-labelled", type=int, default=0,
                       help="only the first so many problems of RL have gold answers, and these come again and again; "
                            "with a verifier half of each batch is of the others, which its verdicts alone reward; 0 = "
                            "all have them")


def add_alpha_args(group) -> None:
    group.add_argument("--alpha-start", type=float, default=0.3,
                       help="weight of the verifier's rewards, or with --combine advantages of their advantage, at the "
                       "start (eq. 7; there 0.1)")
    group.add_argument("--alpha-end", type=float, default=0.03,
                       help="and at the end, decaying exponentially (there 0.001)")
    group.add_argument("--combine", default="rewards",
                       help="what the outcome and the verifier's rewards are combined as, one of: "
                       f"{', '.join(COMBINE)}; rewards are normalised together, advantages, the paper's way (eq. 7), "
                       "each by itself")


def add_verdict_args(group) -> None:
    group.add_argument("--verifier-max-new-tokens", type=int, default=112)


def add_distinct_args(group) -> None:
    group.add_argument("--verify-distinct", action=argparse.BooleanOptionalAction, default=True,
                       help="solutions of a problem that are alike share one verification, which counts for each")


def add_step_args(group) -> None:
    group.add_argument("--step-rewards", default="posterior",
                       help=f"one of: {', '.join(STEP_REWARDS)}; posterior: how likely each step is right, given all "
                       "verdicts on the solution, its outcome, and how far verdicts could be believed before; verdicts "
                       "is the paper's (eq. 3)")


def add_verifier_args(group) -> None:
    add_verdict_args(group)
    group.add_argument("--gamma", type=float, default=0.8, help="weight of the verifier's format reward (eq. 8)")
    group.add_argument("--class-weights", action=argparse.BooleanOptionalAction, default=True,
                       help="class-aware verifier advantages (eq. 9)")
    group.add_argument("--verifier-balance", action=argparse.BooleanOptionalAction, default=False,
                       help="judge as many right as wrong solutions, drawing on past ones")
    group.add_argument("--verifier-replay", type=float, default=0.0, help="share of past solutions in verifier batches")
    group.add_argument("--replay-size", type=int, default=2048, help="past solutions kept")


VERIFIER_UPDATES = ("interleaved", "summed")


LEAST = {"generator_steps": 1, "verifier_steps": 0, "warmup_steps": 0, "verifier_max_new_tokens": 1, "alpha_start": 0,
         "alpha_end": 0, "gamma": 0, "verifier_replay": 0, "replay_size": 0, "num_labelled": 0}


def check(args, task) -> None:
    """Raises BadInput for settings of this family that cannot work."""
    given, tables = vars(args), {"schedule": SCHEDULES, "combine": COMBINE, "step_rewards": STEP_REWARDS,
                                 "verifier_updates": VERIFIER_UPDATES}
    check_choices(args, {name: table for name, table in tables.items() if name in given})
    check_least(args, {name: low for name, low in LEAST.items() if name in given})
    if max(given.get(name, 0) for name in ("alpha_start", "alpha_end", "verifier_replay")) > 1:
        raise BadInput("--alpha-start, --alpha-end and --verifier-replay are shares: at most 1")
    if given.get("alpha_start", 0) > 0 and given["alpha_end"] == 0:
        raise BadInput("--alpha-end 0: an exponential decay never gets there; give a small number, or --alpha-start "
                       "0 for no step rewards")
    if given.get("verifier_updates") == "summed" and (args.verifier_head, args.verifier_steps) != ("prompt", 1):
        raise BadInput("--verifier-updates summed: needs --verifier-head prompt, for there is one model, and "
                       "--verifier-steps 1")
    N = given.get("num_labelled", 0)
    num_others = task.num_problems("rl") - N if hasattr(task, "num_problems") else args.examples_per_step
    if N and min(N, num_others) < args.examples_per_step:
        raise BadInput(f"--num-labelled {N}: with and without a gold answer there must be at least --examples-per-step "
                       f"{args.examples_per_step} problems each")


# What a run is made of

def updates(args) -> dict[str, int]:
    phases = max(0, args.num_steps - 1) // args.generator_steps  # of the verifier: the run ends with a generator step
    return {"generator": args.num_steps, "verifier": args.warmup_steps + phases * args.verifier_steps}


def solution_draws(args) -> dict[str, Draw]:
    """What a generator step samples without a verifier: a group of solutions of each problem."""
    return {"solutions": Draw("generator", args.examples_per_step, args.num_samples, args.max_new_tokens, trained=True)}


def generator_draws(args) -> dict[str, Draw]:
    """What a generator step samples: solutions, and one verification of each."""
    num_solutions = args.examples_per_step * args.num_samples
    return {**solution_draws(args),
            "verdicts": Draw("verifier", num_solutions, 1, args.verifier_max_new_tokens, wrap=empty_verifier_prompt,
                             quoted=args.max_new_tokens)}


def verifier_draws(args, times: int | None = None) -> dict[str, Draw]:
    """What a verifier step samples: a solution of each problem, and a group of verifications of it."""
    P, G = args.examples_per_step, args.num_samples
    return {"judged": Draw("generator", P, 1, args.max_new_tokens, times),
            "verifications": Draw("verifier", P, G, args.verifier_max_new_tokens, times, trained=True,
                                  wrap=empty_verifier_prompt, quoted=args.max_new_tokens)}


def draws(args) -> dict[str, Draw]:
    return generator_draws(args) | verifier_draws(args, updates(args)["verifier"])


# Algorithm 1

def labelled_problems(t: Play, and_others: bool = False) -> list[Problem]:
    """This rank's problems of a step, all with gold answers; and_others: with --num-labelled only every second one."""
    problems, N = t.problems(), vars(t.args).get("num_labelled", 0)
    if not N:
        return problems
    num_others = getattr(t.task, "num_problems", lambda split: sys.maxsize)("rl") - N
    places = [p.index for p in problems]
    if and_others:
        places = [N + i // 2 % num_others if i % 2 else i // 2 % N for i in places]
    else:
        places = [i % N for i in places]
    return [t.task.problem("rl", i) for i in places]


def known_outcomes(t: Play, solutions: Rollouts, gold: list[bool | None]) -> list[bool | None]:
    """The outcomes by the gold answers that there are; None without one. gold: as if all were known."""
    N = vars(t.args).get("num_labelled", 0) or math.inf
    return [outcome if problem.index < N else None
            for problem, outcome in zip(solutions.problems(), gold, strict=True)]


def play(t: Play, reward: str = "steps"):
    """N_g generator steps, then N_v verifier steps, behind a warm-up of the verifier alone."""
    phase, phase_steps = phase_of(t)
    t.memory["phase"], t.memory["phase_steps"] = phase, phase_steps + 1
    t.log(None, {"phase": phase})
    if phase == "generator":
        yield from generator_step(t, judge="verifier", reward=reward)
    elif phase == "verifier" and t.args.verifier_updates == "summed":
        yield summed(verifier_step(t), generator_step(t, judge="verifier", reward=reward))
    else:
        yield from verifier_step(t)


def summed(*steps) -> Update:
    """The update of the last of these steps with the rollouts of all: each rollout counts the same."""
    updates = [update for step in steps for update in step]
    return updates[-1]._replace(parts=[part for update in updates for part in update.parts])


def generator_step(t: Play, judge: str | None, reward: str = "steps"):
    """M solutions of each problem, one verification of each, and an update of the generator (section 2).

    judge: who says which steps are right: "verifier", "gold" (an oracle) or None; reward: what it adds to the outcome,
    its verdicts on the "steps" or its final "verdict". --judge: how the verifier says it.
    """
    problems = labelled_problems(t, and_others=judge == "verifier")
    solutions = t.solve("solutions", problems)
    gold = t.check(solutions)
    outcomes, steps = known_outcomes(t, solutions, gold), t.read_solutions(solutions)
    labels = [labels_of(t.task, problem, text)
              for problem, text in zip(solutions.problems(), solutions.texts, strict=True)]
    solutions.columns = {"outcome": outcomes}
    earned = scores_of(t.task, solutions.problems(), solutions.texts, outcomes)
    verifications, verdicts, finals = None, labels, None
    if judge == "verifier":
        verifications, verdicts, finals = judged(t, solutions)
    chances = verdicts
    if judge == "verifier" and reward == "steps":
        chances = STEP_REWARDS[vars(t.args).get("step_rewards", "verdicts")](t, solutions, verdicts)
    alpha = exponential_decay(t.args.alpha_start, t.args.alpha_end, t.progress("generator")) if judge else 0.0
    sources = [(1 - alpha, outcome_rewards(earned, solutions.lengths))]                                         # eq. 2
    if judge and reward == "steps":
        sources.append((alpha, step_rewards([s.step_ends for s in steps], chances, t.device)))                  # eq. 3
    elif judge:
        sources.append((alpha, outcome_rewards(finals, solutions.lengths)))
    combine, preset = COMBINE[t.args.combine if judge else "advantages"], PRESETS[t.args.advantage]
    advantages = combine(sources, solutions.group_id, solutions.tokens.shape[1], preset, t.reduce)            # eq. 4-7
    log_rewards(t, "generator", solutions, earned)
    log_variances(t, "generator", solutions, dict(zip(("outcome", reward), (s for _, s in sources), strict=False)))
    t.log("generator", {"alpha": alpha} | t.mean({
        "rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes],
        "reasoning_steps": [len(s.step_ends) for s in steps],
        "step_length": [(s.step_ends[-1] + 1) / len(s.step_ends) for s in steps if s.step_ends],
        "frac_ranking_reversed": ranking_reversed(outcomes, mean_advantages(solutions, advantages), t.args.num_samples),
        "step_abstained": [v is None for v in verdicts] if judge else [],
        "rewards/step/mean": [x for v in chances if v and judge for x in v],
        "step_label_mean": [x for v in labels for x in v]}))
    if verifications:
        scores = gathered_verdict_scores(t, solutions, outcomes, verifications)
        scores |= passed_by_error(t, solutions, verifications)
        t.log("generator", {f"verdicts/{name}": value for name, value in scores.items()})
        watch_leniency(t, scores)
        if vars(t.args).get("num_labelled"):  # the gold answers of the others enter the log alone
            hidden = [(v.verdict, g) for v, o, g in zip(verifications, outcomes, gold, strict=True)
                      if o is None and g is not None]
            t.log("generator", t.mean({"unlabelled/outcome/mean": [g for _, g in hidden],
                                       "unlabelled/verdict_accuracy": [v == g for v, g in hidden]}))
    if wants_pool(t.args):
        t.memory["pool"] = extended(t.memory.get("pool"), scored_solutions(t, solutions, outcomes), t.args.replay_size)
    yield Update("generator", [(solutions, advantages)])                                                        # eq. 1


def judged(t: Play, solutions: Rollouts) -> tuple[list[Verification] | None, list[list | None], list[float | None]]:
    """What the verifier says as --judge: its verifications (None where it is asked for chances), for each solution of
    its steps, and of the whole."""
    judge = vars(t.args).get("judge", WRITTEN)
    if judge == WRITTEN:
        verifications = verifications_of(t, solutions)
        solutions.columns |= verification_columns(verifications)
        return verifications, [v.usable_steps for v in verifications], [v.verdict for v in verifications]
    judgments = JUDGES[judge](t, "verifier", solutions)
    steps, finals = [j.steps for j in judgments], [j.final for j in judgments]
    solutions.columns |= {"step_chances": steps, "chance": finals}
    scores = judge_scores(t, judgments, solutions, t.args.num_samples)
    t.log("generator", {f"verdicts/{name}": value for name, value in scores.items()})
    return None, steps, finals


def verifications_of(t: Play, solutions: Rollouts) -> list[Verification]:
    """A verification of each solution; with --verify-distinct solutions of a problem that are alike share one."""
    keys, first = list(zip(solutions.group_id.tolist(), solutions.texts, strict=True)), {}
    if not t.args.verify_distinct:
        keys = list(range(len(solutions)))
    for n, key in enumerate(keys):
        first.setdefault(key, n)
    rows = list(first.values())
    verifications = t.read_verifications(t.verify("verdicts", solutions.select(rows)))
    of_key = dict(zip(first, verifications, strict=True))
    t.log("generator", t.mean({"verified": [first[key] == n for n, key in enumerate(keys)]}))
    return [of_key[key] for key in keys]


def verifier_step(t: Play):
    """One solution of each problem (or past ones), a group of verifications of each, and an update of the verifier
    (section 3)."""
    G = t.args.num_samples
    fresh_solutions = t.solve("judged", labelled_problems(t))
    fresh = scored_solutions(t, fresh_solutions, t.check(fresh_solutions))
    num_fresh, pool = len(fresh["problem"]), t.memory.get("pool")
    candidates = extended(fresh, pool, num_fresh + t.args.replay_size) if pool else fresh
    outcomes = candidates["outcome"].tolist()
    chosen = choose_solutions(outcomes[:num_fresh], outcomes[num_fresh:], t.args.examples_per_step,
                              t.args.verifier_replay, t.args.verifier_balance, random.Random(f"{t.args.seed}-{t.step}"))
    copies = count_copies(candidates["problem"][chosen].tolist())[t.run.rank:: t.run.world]
    chosen = chosen[t.run.rank:: t.run.world]
    problems = [t.task.problem("rl", index) for index in candidates["problem"][chosen].tolist()]
    solutions = t.written("generator", t.solve_prompts(problems), completions_of(candidates, chosen))
    rollouts = t.verify("verifications", solutions, copies=copies)
    solutions = solutions.select([n for n in range(len(solutions)) for _ in range(G)])
    verifications, outcomes = t.read_verifications(rollouts), [outcomes[n] for n in chosen for _ in range(G)]
    pairs = list(zip(verifications, outcomes, strict=True))
    rewards = [verdict_reward(v.verdict, o, v.unmet, t.args.gamma) for v, o in pairs]                           # eq. 8
    advantages = t.advantages(rollouts, rewards)
    if t.args.class_weights:                                                                                     # eq. 9
        weights = ClassWeights(**t.memory.get("class_weights", {}))
        counts = torch.tensor([outcomes.count(True) / G, outcomes.count(False) / G], device=t.device)
        weights.observe(*t.reduce(counts).tolist())
        advantages = advantages * torch.tensor([[weights.weight(o)] for o in outcomes], device=t.device).view(-1, 1)
        t.memory["class_weights"] = asdict(weights)
        t.log("verifier", {"class_weight/right": weights.weight(True), "class_weight/wrong": weights.weight(False)})
    rollouts.columns = {"outcome": outcomes} | verification_columns(verifications)
    scores = gathered_verdict_scores(t, solutions, outcomes, verifications)
    t.log("verifier", scores)
    log_rewards(t, "verifier", rollouts, rewards)
    parts = {"verdict": [v.verdict == o for v, o in pairs], "format": [format_reward(v.unmet) for v in verifications]}
    log_variances(t, "verifier", rollouts, {name: terminal_rewards(values, rollouts.lengths)
                                            for name, values in parts.items()})
    t.log("verifier", t.mean({f"rewards/{name}/mean": values for name, values in parts.items()}))
    move_average(t, "balanced_acc", scores["balanced_acc"])
    if wants_pool(t.args):
        t.memory["pool"] = extended(t.memory.get("pool"), fresh, t.args.replay_size)
    yield Update("verifier", [(rollouts, advantages)])


def watch_leniency(t: Play, scores: dict) -> None:
    """Logs what share of the wrong steps has passed lately (wrong_passed), of the wrong solutions where the task has no
    step labels, and whether that is too much (lenient)."""
    has_labels = getattr(t.task, "has_step_labels", True)
    passed = move_average(t, "wrong_passed", scores["wrong_steps_passed" if has_labels else "pos_rate_wrong"])
    t.log("generator", {"wrong_passed": passed, "lenient": passed is not None and passed > LENIENT})


def move_average(t: Play, name: str, now: float | None) -> float | None:
    """A moving average that is saved with the run; None before its first value."""
    before = t.memory.get(name)
    if now is not None:
        t.memory[name] = now if before is None else MOVING_DECAY * before + (1 - MOVING_DECAY) * now
    return t.memory.get(name)


def wants_pool(args) -> bool:
    """Whether a run keeps past solutions."""
    given = vars(args)
    return bool(given.get("replay_size") and (given["verifier_balance"] or given["verifier_replay"]))


def phase_of(t: Play) -> tuple[str, int]:
    """The phase of the next step, and how many steps of it are made."""
    lengths = PhaseLengths(t.args.warmup_steps, t.args.generator_steps, t.args.verifier_steps, t.args.balanced_acc_bar)
    before = t.memory.get("phase", "warmup"), t.memory.get("phase_steps", 0)
    return next_phase(*before, t.memory.get("balanced_acc"), lengths, SCHEDULES[t.args.schedule])


# Evaluation

def eval_step(t: Play) -> int:
    """Evaluations go by the generator's steps; those of the warm-up are counted down to 0."""
    return t.steps["verifier"] - t.args.warmup_steps if phase_of(t)[0] == "warmup" else t.steps["generator"]


def evaluate(t: Play) -> dict:
    return scores_of_pair(t)
