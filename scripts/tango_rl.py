"""
RL Tango: a generator and its generative verifier trained together by interleaved GRPO (Zha et al. 2025, arXiv 2505.15034).

How this departs from the paper:
1. One process per GPU holds both roles, samples and trains; one optimizer step per batch of rollouts, so the ratio is exactly 1 unless
   --updates-per-batch is raised.
2. Verifier batches can be balanced between right and wrong solutions (--verifier-balance) and hold past ones (--verifier-replay).
3. The warm-up may end at a bar of balanced accuracy instead of a count (--schedule adaptive).
4. alpha decays from 0.3 to 0.03, not from 0.1 to 0.001: dev/LOG.md has the ablation.
5. Format reward: 1, less 0.25 per unmet criterion; class weights: sqrt(n / 2n_c), at most 4.

    python -m scripts.tango_rl --model-tag d4                                                # one CPU or GPU
    torchrun --standalone --nproc_per_node=8 scripts/tango_rl.py -- --model-tag d4 --run tango
    torchrun --standalone --nproc_per_node=8 scripts/tango_rl.py -- --model-tag qwen7b --run qwen --shard --recompute --dry-run
"""
import argparse
import os
import random
import time
import zlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from nanochat.checkpoint import default_tag
from nanochat.common import (BadInput, Diverged, StopRequested, add_run_args, all_reduce, check_least, check_name, check_writable,
                             choose_run_name, compute_dtype, describe_versions, flag_defaults, gather_lists, init_device, mean_over_ranks, path_of, print0,
                             rank_and_world, script_main, start_run, uses_wandb, write_json)
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.plan import describe_run
from nanochat.rl.advantages import COMBINE, PRESETS, source_advantages
from nanochat.rl.evals import Evaluation, judge_scores, judged_row, outcomes_of, problems_of, ranking_reversed, reward_metrics
from nanochat.rl.losses import AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, PolicyLoss
from nanochat.rl.prompts import check_prompts_fit, generator_prompt, longest_problem, read_solution
from nanochat.rl.progress import health_check, print_step, print_table, rollout_records
from nanochat.rl.rewards import ClassWeights, format_reward, outcome_rewards, step_rewards, terminal_rewards, verdict_reward
from nanochat.rl.roles import copy_shared_lambdas, load_configs, load_roles
from nanochat.rl.rollouts import Rollouts, Sampler, count_copies, even_out, pack, token_weights
from nanochat.rl.schedules import LR_SCHEDULES, SCHEDULES, PhaseLengths, exponential_decay
from nanochat.rl.state import PREFIX, RunState, choose_judged, drop_sets_behind, gather_judgeable, load_set, resolve_resume, save_set
from nanochat.rl.trainer import score, update
from tasks import add_task_args, make_task

PROGRESS = {"generator": "gen_step", "verifier": "ver_step"}  # the counter that --num-steps bounds


class Recipe(NamedTuple):
    """Who is trained; who judges the generator's solutions: verifier, gold (an oracle) or None; what is rewarded besides the outcome: the judge's
    verdicts on the steps, or its final verdict."""
    trained: set[str]
    judge: str | None = None
    reward: str = "steps"


RECIPES = {
    "tango": Recipe({"generator", "verifier"}, "verifier"),
    "grpo": Recipe({"generator"}),
    "gold_steps": Recipe({"generator"}, "gold"),                                 # the upper bound
    "fixed_verifier": Recipe({"generator"}, "verifier"),
    "fixed_generator": Recipe({"verifier"}),
    "outcome_verifier": Recipe({"generator", "verifier"}, "verifier", "verdict"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_run_args(parser)
    parser.add_argument("--resume-from-step", default="-1", help="continue --run from this step, or from its last with 'auto'; -1 = a fresh run")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved settings, memory per rank, tokens per step and hours, and stop")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints; 0 = at the end only")
    add_task_args(parser)
    models = parser.add_argument_group("models")
    models.add_argument("--model-tag", default="", help="SFT checkpoint of the generator; default: the largest d<N>")
    models.add_argument("--verifier-tag", default="", help="SFT checkpoint of the verifier; default: <model-tag>-ver")
    models.add_argument("--model-step", type=int, default=-1, help="step of the SFT checkpoints; -1 = the last")
    models.add_argument("--verifier-shared-layers", type=int, default=0, help="lowest layers the verifier shares with the generator")
    models.add_argument("--shard", action=argparse.BooleanOptionalAction, default=False,
                        help="shard weights, gradients and optimizers over the ranks (FSDP2); changes no result")
    models.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=False,
                        help="run blocks of imported models again in the backward pass instead of keeping their activations; changes no result")
    play = parser.add_argument_group("schedule")
    play.add_argument("--recipe", default="tango", help=f"one of: {', '.join(RECIPES)}")
    play.add_argument("--num-steps", type=int, default=200, help="generator steps (verifier steps where the generator is fixed)")
    play.add_argument("--schedule", default="fixed", help=f"one of: {', '.join(SCHEDULES)}")
    play.add_argument("--generator-steps", type=int, default=3, help="N_g: generator steps per phase")
    play.add_argument("--verifier-steps", type=int, default=1, help="N_v: verifier steps per phase")
    play.add_argument("--warmup-steps", type=int, default=40, help="verifier steps before the first generator step")
    play.add_argument("--balanced-acc-bar", type=float, default=0.9, help="schedule adaptive: verifier phases end at this balanced accuracy")
    rollout = parser.add_argument_group("rollouts")
    rollout.add_argument("--examples-per-step", type=int, default=32, help="problems per step, over all ranks")
    rollout.add_argument("--num-samples", type=int, default=8, help="G: rollouts per problem; verifications per solution in verifier steps")
    rollout.add_argument("--max-new-tokens", type=int, default=96)
    rollout.add_argument("--verifier-max-new-tokens", type=int, default=112)
    rollout.add_argument("--temperature", type=float, default=1.0)
    rollout.add_argument("--top-k", type=int, default=0, help="0 = the full softmax; anything else biases the ratio")
    rollout.add_argument("--max-rows", type=int, default=1024, help="rollouts per rank that decode together; changes memory, no result")
    rollout.add_argument("--calculator", action=argparse.BooleanOptionalAction, default=False,
                         help="solutions may call the calculator (python_start ... python_end); its output is forced and not trained")
    rewards = parser.add_argument_group("rewards and advantages")
    rewards.add_argument("--advantage", default="grpo", help=f"one of: {', '.join(PRESETS)}")
    rewards.add_argument("--alpha-start", type=float, default=0.3, help="weight of the step advantage at the start (Tango eq. 7; there 0.1)")
    rewards.add_argument("--alpha-end", type=float, default=0.03, help="and at the end, decaying exponentially (there 0.001)")
    rewards.add_argument("--combine", default="advantages", help="what the outcome and the step reward are combined as, one of: "
                         f"{', '.join(COMBINE)}; the paper found rewards, normalised together, worse")
    rewards.add_argument("--gamma", type=float, default=0.8, help="weight of the verifier's format reward (Tango eq. 8)")
    rewards.add_argument("--class-weights", action=argparse.BooleanOptionalAction, default=True, help="class-aware verifier advantages (Tango eq. 9)")
    rewards.add_argument("--verifier-balance", action=argparse.BooleanOptionalAction, default=False,
                         help="judge as many right as wrong solutions, drawing on past ones")
    rewards.add_argument("--verifier-replay", type=float, default=0.0, help="share of past solutions in verifier batches")
    rewards.add_argument("--replay-size", type=int, default=2048, help="past solutions kept")
    loss = parser.add_argument_group("loss and optimizer")
    loss.add_argument("--loss", default="ppo_clip", help=f"one of: {', '.join(POLICY_LOSSES)}")
    loss.add_argument("--clip-low", type=float, default=0.2)
    loss.add_argument("--clip-high", type=float, default=0.2)
    loss.add_argument("--dual-clip", type=float, default=None)
    loss.add_argument("--kl", default="k3", help=f"one of: {', '.join(KL_ESTIMATORS)}")
    loss.add_argument("--kl-coef", type=float, default=1e-3, help="beta: weight of the KL to the starting weights")
    loss.add_argument("--entropy-coef", type=float, default=0.0)
    loss.add_argument("--aggregation", default="sequence", help=f"one of: {', '.join(AGGREGATIONS)}")
    loss.add_argument("--updates-per-batch", type=int, default=1, help="optimizer steps on each batch of rollouts")
    loss.add_argument("--lr", type=float, default=1e-4, help="AdamW; 1e-6 for pretrained 7B models")
    loss.add_argument("--verifier-lr", type=float, default=None, help="default: --lr")
    loss.add_argument("--lr-schedule", default="constant", help=f"one of: {', '.join(LR_SCHEDULES)}")
    loss.add_argument("--max-grad-norm", type=float, default=1.0, help="0 = no clipping")
    loss.add_argument("--micro-batch-tokens", type=int, default=4096, help="tokens that go through a model at once; changes no result")
    loss.add_argument("--prefix-sharing", action=argparse.BooleanOptionalAction, default=True,
                      help="run a group's prompt once per update, not once per rollout; changes no result")
    evals = parser.add_argument_group("evaluation and logs")
    evals.add_argument("--eval-every", type=int, default=0, help="generator (or warm-up) steps between evaluations; 0 = before and after only")
    evals.add_argument("--eval-examples", type=int, default=400, help="problems per test split")
    evals.add_argument("--log-rollouts", type=int, default=4, help="rollouts per step that go to rollouts.jsonl, one of a group")
    return parser


def check_args(args, world: int) -> None:
    """Refuses what cannot work, before anything is loaded or written."""
    tables = {"recipe": RECIPES, "schedule": SCHEDULES, "advantage": PRESETS, "combine": COMBINE, "loss": POLICY_LOSSES, "kl": KL_ESTIMATORS,
              "aggregation": AGGREGATIONS, "lr_schedule": LR_SCHEDULES}
    for name, table in tables.items():
        if getattr(args, name) not in table:
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: there are {', '.join(table)}")
    check_least(args, {
        "num_steps": 0, "generator_steps": 1, "verifier_steps": 0, "warmup_steps": 0, "examples_per_step": 1, "num_samples": 1, "max_rows": 1,
        "max_new_tokens": 1, "verifier_max_new_tokens": 1, "top_k": 0, "updates_per_batch": 1, "micro_batch_tokens": 1,
        "eval_examples": 1, "replay_size": 0, "gamma": 0, "kl_coef": 0, "alpha_start": 0, "alpha_end": 0, "lr": 0,
        "verifier_lr": 0, "verifier_replay": 0, "save_every": 0, "eval_every": 0, "clip_low": 0, "clip_high": 0, "dual_clip": 1,
        "model_step": -1, "max_grad_norm": 0, "log_rollouts": 0, "verifier_shared_layers": 0, "entropy_coef": 0})
    if not args.temperature > 0:
        raise BadInput(f"--temperature {args.temperature}: must be above 0 (evaluation is greedy by itself)")
    if args.alpha_start > 1 or args.alpha_end > 1 or args.verifier_replay > 1:
        raise BadInput("--alpha-start, --alpha-end and --verifier-replay are shares: at most 1")
    if args.alpha_start > 0 and args.alpha_end == 0:
        raise BadInput("--alpha-end 0: an exponential decay never gets there; give a small number, or --alpha-start 0 for no step rewards")
    if args.shard and world == 1:
        raise BadInput("--shard: there is one rank, so nothing to shard over; start several with torchrun")
    if args.examples_per_step % world or args.eval_examples < world:
        raise BadInput(f"--examples-per-step {args.examples_per_step}: must be a multiple of the {world} ranks (and --eval-examples at least that)")
    if args.num_samples < 2 and PRESETS[args.advantage].scope == "group" and PRESETS[args.advantage].center != "none":
        raise BadInput(f"--num-samples 1: --advantage {args.advantage} compares the rollouts of a group and needs at least 2")


def next_problems(args, run, state, task) -> list:
    """This rank's share of the step's problems."""
    indices = range(state.cursor + run.rank, state.cursor + args.examples_per_step, run.world)
    return [task.problem("rl", i) for i in indices]


@dataclass
class Experience:
    """What one step learns from: rollouts and their advantages (N, T); what it leaves: metrics, judgeable solutions [problem index,
    completion, outcome] of all ranks for the pool, records for rollouts.jsonl, and the class weights after it."""
    rollouts: Rollouts
    advantages: torch.Tensor
    metrics: dict
    judgeable: list
    records: list
    class_weights: ClassWeights
    seconds: dict


def count_tokens(sampled: list[Rollouts]) -> int:
    """Tokens of these completions over all ranks."""
    return int(all_reduce(torch.stack([rollouts.lengths.sum() for rollouts in sampled]).sum()))


def mean_advantages(rollouts: Rollouts, advantages: torch.Tensor) -> list[float]:
    """Each rollout's mean advantage over its tokens. advantages (N, T)."""
    inside = torch.arange(advantages.shape[1], device=advantages.device) < rollouts.lengths[:, None]  # (N, T)
    return ((advantages * inside).sum(dim=1) / rollouts.lengths.clamp(min=1)).tolist()


def generator_rollouts(args, run, state, sampler, roles):
    """Solutions of a batch of problems, one verification each, and their advantages (Tango section 2)."""
    task, G, recipe, started = sampler.task, args.num_samples, RECIPES[args.recipe], time.time()
    problems = next_problems(args, run, state, task)
    rollouts, solutions = sampler.solve(roles["generator"].model, problems, G, ("generator", state.step))
    run.check_stop()
    solved = time.time()
    problems = [p for p in problems for _ in range(G)]
    outcomes = outcomes_of(task, problems, solutions)                                                         # eq. 2
    labels = [task.step_labels(p, s.text) for p, s in zip(problems, solutions, strict=True)]
    sampled, verifications, verdicts = [rollouts], None, labels
    if recipe.judge == "verifier":
        written, verifications = sampler.verify(roles["verifier"].model, problems, solutions, 1, ("verdicts", state.step))
        run.check_stop()
        sampled.append(written)
        verdicts = [v.usable_steps for v in verifications]
    verified = time.time()
    alpha = exponential_decay(args.alpha_start, args.alpha_end, state.gen_step / max(1, args.num_steps - 1)) if recipe.judge else 0.0
    sources = [(1 - alpha, outcome_rewards(outcomes, rollouts.lengths))]
    if recipe.judge and recipe.reward == "steps":
        sources.append((alpha, step_rewards([s.step_ends for s in solutions], verdicts, run.device)))         # eq. 3
    elif recipe.judge:
        sources.append((alpha, outcome_rewards([v.verdict for v in verifications], rollouts.lengths)))
    advantages = COMBINE[args.combine](sources, rollouts.group_id, rollouts.tokens.shape[1], PRESETS[args.advantage], all_reduce)  # eq. 4-7
    metrics = {"alpha": alpha, "sampled_tokens": count_tokens(sampled)} | reward_metrics(outcomes, G, rollouts, run.device)
    metrics |= mean_over_ranks({"rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes],
                                "reasoning_steps": [len(s.step_ends) for s in solutions],
                                "step_length": [(s.step_ends[-1] + 1) / len(s.step_ends) for s in solutions if s.step_ends],
                                "frac_ranking_reversed": ranking_reversed(outcomes, mean_advantages(rollouts, advantages), G),
                                "step_abstained": [v is None for v in verdicts] if recipe.judge else [],
                                "rewards/step/mean": [x for v in verdicts if v and recipe.judge for x in v],
                                "step_label_mean": [x for v in labels for x in v]}, run.device)
    if verifications:
        rows = [judged_row(task, *row) for row in zip(problems, solutions, outcomes, verifications, strict=True)]
        metrics |= {f"verdicts/{name}": value for name, value in judge_scores(gather_lists(rows, run.device)).items()}
    judged = [[p.index, c, o] for p, c, o in zip(problems, rollouts.completions(), outcomes, strict=True)]
    records = rollout_records("generator", task.fmt, problems, solutions, verifications, rollouts, advantages, outcomes, labels,
                              range(0, len(outcomes), G)[: args.log_rollouts])
    return Experience(rollouts, advantages, metrics, gather_judgeable(judged, run.device), records, state.class_weights,
                      {"gen": solved - started, "verify": verified - solved, "reward": time.time() - verified})


def verifier_rollouts(args, run, state, sampler, roles):
    """One solution of each problem (or past ones), a group of verifications of it, and their advantages (Tango section 3)."""
    task, G, started = sampler.task, args.num_samples, time.time()
    problems = next_problems(args, run, state, task)
    fresh_rollouts, solutions = sampler.solve(roles["generator"].model, problems, 1, ("judged", state.step))
    outcomes = outcomes_of(task, problems, solutions)
    run.check_stop()
    solved = time.time()
    fresh = [[p.index, c, o] for p, c, o in zip(problems, fresh_rollouts.completions(), outcomes, strict=True)]
    judgeable = gather_judgeable(fresh, run.device)
    chosen = choose_judged(judgeable, state.judged_pool, args.examples_per_step, args.verifier_replay, args.verifier_balance,
                           random.Random(f"{args.seed}-{state.step}"))
    copies = count_copies([index for index, _, _ in chosen])[run.rank:: run.world]
    chosen = chosen[run.rank:: run.world]
    problems = [task.problem("rl", index) for index, _, _ in chosen]
    solutions = [read_solution(sampler.tokenizer, task.fmt, completion) for _, completion, _ in chosen]
    rollouts, verifications = sampler.verify(roles["verifier"].model, problems, solutions, G, ("verifier", state.step), copies=copies)
    run.check_stop()
    verified = time.time()
    problems, solutions = ([x for x in row for _ in range(G)] for row in (problems, solutions))
    outcomes = [outcome for _, _, outcome in chosen for _ in range(G)]
    rewards = [verdict_reward(v.verdict, o, v.unmet, args.gamma) for v, o in zip(verifications, outcomes, strict=True)]      # eq. 8
    advantages = source_advantages(terminal_rewards(rewards, rollouts.lengths), rollouts.group_id, rollouts.tokens.shape[1],
                                   PRESETS[args.advantage], all_reduce)
    class_weights = replace(state.class_weights)
    if args.class_weights:                                                                                                   # eq. 9
        num_right, num_wrong = all_reduce(torch.tensor([outcomes.count(True) / G, outcomes.count(False) / G], device=run.device)).tolist()
        class_weights.observe(num_right, num_wrong)
        advantages = advantages * torch.tensor([[class_weights.weight(o)] for o in outcomes], device=run.device)
    rows = [judged_row(task, *row) for row in zip(problems, solutions, outcomes, verifications, strict=True)]
    metrics = {"sampled_tokens": count_tokens([fresh_rollouts, rollouts])}
    metrics |= judge_scores(gather_lists(rows, run.device)) | reward_metrics(rewards, G, rollouts, run.device)
    metrics |= mean_over_ranks({"rewards/verdict/mean": [v.verdict == o for v, o in zip(verifications, outcomes, strict=True)],
                                "rewards/format/mean": [format_reward(v.unmet) for v in verifications]}, run.device)
    metrics |= {"class_weight/right": class_weights.weight(True), "class_weight/wrong": class_weights.weight(False)} if args.class_weights else {}
    records = rollout_records("verifier", task.fmt, problems, solutions, verifications, rollouts, advantages, outcomes,
                              [row[1] for row in rows], range(0, len(outcomes), G)[: args.log_rollouts])
    return Experience(rollouts, advantages, metrics, judgeable, records, class_weights,
                      {"gen": solved - started, "verify": verified - solved, "reward": time.time() - verified})


def even_batches(args, run, batches: list) -> list:
    """With --shard as many micro-batches as any rank has; those that are added train nothing."""
    return even_out(batches, int(all_reduce(torch.tensor(len(batches), device=run.device), "max")), run.device) if args.shard else batches


def learn(args, run, state, role, experience, loss) -> dict:
    """The policy-gradient step(s) on one batch of rollouts (Tango eq. 1)."""
    progress = (state.gen_step if role.name == "generator" else state.ver_step) / max(1, args.num_steps - 1)
    base_lr, limit = (args.lr, args.max_new_tokens) if role.name == "generator" else (args.verifier_lr, args.verifier_max_new_tokens)
    rollouts = experience.rollouts
    weights = token_weights(rollouts.num_trained(), args.aggregation, limit, all_reduce)
    keep_idle = loss.kl_coef > 0 or loss.entropy_coef > 0
    batches = pack(rollouts, experience.advantages, weights, args.micro_batch_tokens, keep_idle, args.prefix_sharing)
    batches = even_batches(args, run, batches)
    if args.updates_per_batch > 1:
        for batch in batches:
            batch.old_logprobs = score(role.model, batch, args.temperature)
    for i in range(args.updates_per_batch):
        check_stop = run.check_stop if i == 0 else lambda: None  # once the weights have moved, the step is carried through
        metrics = update(role, batches, loss, lr=base_lr * LR_SCHEDULES[args.lr_schedule](min(1.0, progress)), max_grad_norm=args.max_grad_norm,
                         temperature=args.temperature, device=run.device, check_stop=check_stop)
    return metrics


def steps_left(args, state, leader: str, lengths: PhaseLengths) -> float:
    """Estimate of the optimizer steps to come: the rest of the warm-up, and the leader's with the other role's share."""
    left = args.num_steps - getattr(state, PROGRESS[leader])
    if leader == "verifier":
        return left
    warmup_left = lengths.warmup - state.phase_steps if state.phase == "warmup" else 0
    return left * (1 + lengths.verifier / lengths.generator) + warmup_left


def train(args, run, state, sampler, roles, evaluate) -> None:
    """Algorithm 1: interleaved updates of generator and verifier."""
    trained = RECIPES[args.recipe].trained
    leader = "generator" if "generator" in trained else "verifier"
    lengths = PhaseLengths(args.warmup_steps if "verifier" in trained else 0, args.generator_steps if "generator" in trained else 0,
                           args.verifier_steps if "verifier" in trained else 0, args.balanced_acc_bar)
    loss = PolicyLoss(args.loss, args.clip_low, args.clip_high, args.dual_clip, args.kl, args.kl_coef, args.entropy_coef)
    play = {"generator": generator_rollouts, "verifier": verifier_rollouts}
    while (done := getattr(state, PROGRESS[leader])) < args.num_steps:
        run.check_stop()
        started = time.time()
        name = state.enter_phase(lengths, SCHEDULES[args.schedule])
        record, evaluated_at = {}, state.last_eval
        # Evaluations go by the leader's steps, and by the warm-up's counted down to 0.
        clock = state.ver_step - lengths.warmup if state.phase == "warmup" and leader == "generator" else done
        if args.eval_every and clock % args.eval_every == 0 and clock != state.last_eval:
            record, evaluated_at = dict(evaluate(roles, state.fixed_solutions) if state.step else state.before), clock
        evaluated = time.time()
        experience = play[name](args, run, state, sampler, roles)
        sampled = time.time()
        metrics = experience.metrics | learn(args, run, state, roles[name], experience, loss)

        # The weights have moved: until the state has too, nothing may stop this step.
        if name == "generator" and "verifier" in roles:
            copy_shared_lambdas(roles["generator"].model, roles["verifier"].model, args.verifier_shared_layers)
        updated = time.time()
        record |= {"step": state.step, "role": name, "phase": state.phase, "gen_step": state.gen_step, "ver_step": state.ver_step,
                   "sampled_tokens": state.sampled_tokens}
        record |= {f"{PREFIX[name]}/{key}": value for key, value in metrics.items()}
        record |= {"timing_s/eval": evaluated - started, **{f"timing_s/{key}": value for key, value in experience.seconds.items()},
                   "timing_s/update": updated - sampled, "timing_s/step": updated - started,
                   **({"peak_memory_gb": torch.cuda.max_memory_allocated(run.device) / 1e9} if run.device.type == "cuda" else {}),
                   "tokens_per_s": metrics["completions/mean_length"] * metrics["num_rollouts"] / (updated - evaluated)}
        state.last_eval, state.class_weights = evaluated_at, experience.class_weights
        state.judged_pool = (state.judged_pool + experience.judgeable)[-args.replay_size:] if args.replay_size else []
        state.observe_balanced_acc(metrics["balanced_acc"] if name == "verifier" else None)
        state.advance(name, args.examples_per_step, metrics["sampled_tokens"], bool(metrics["skipped"]), updated - started)
        run.log(record)
        for rollout in experience.records if run.rank == 0 else []:
            run.append("rollouts.jsonl", {"step": record["step"], **rollout})
        print_step(record, name, state.seconds / state.step * steps_left(args, state, leader, lengths))
        if state.skipped_in_a_row == 3:
            raise Diverged(f"step {record['step']}: loss or gradient of the {name} was not finite three times in a row; "
                           f"look at its learning rate and at the last records of metrics.jsonl")
        if args.save_every and state.step % args.save_every == 0:
            save_set(run, state, roles, args)


def start(args, run, roles, evaluate) -> RunState:
    """The state of a fresh run: fixed solutions, the evaluation before RL, and the health check."""
    started = time.time()
    fixed = evaluate.fixed_solutions(roles["generator"].model)
    state = RunState(fixed_solutions=fixed, before=evaluate(roles, fixed))
    problems = [evaluate.task.problem("rl", i) for i in range(4)]
    rollouts, _ = evaluate.sampler.solve(roles["generator"].model, problems, args.num_samples, ("health",))
    run.check_stop()
    ones = torch.ones_like(rollouts.sampler_logprobs)
    batches = even_batches(args, run, pack(rollouts, ones, ones[:, 0], args.micro_batch_tokens, True))
    gaps = [score(roles["generator"].model, b, args.temperature) - b.of_samples(b.sampler_logprobs) for b in batches]
    gap = torch.cat(gaps).abs().max().item()
    health_check(state.before, evaluate.sampled_scores(roles["generator"].model, 64), gap)
    state.start_seconds = time.time() - started
    return state


def check_problems(args, task, tokenizer, configs: dict, device) -> list[str]:
    """The problems' texts, all of a finite task. Raises BadInput where one does not fit a role's context, a split is missing or ranks have others."""
    task.problem("test_in", 0)  # what is evaluated must be there
    problems = [task.problem("rl", 0), *(problem for split in ("rl", "test_in", "test_out") for problem in problems_of(task, split, -1))]
    if len(set(gather_lists([zlib.crc32("\n".join(problem.prompt + problem.answer for problem in problems).encode())], device))) > 1:
        raise BadInput(f"--task {args.task}: the ranks have loaded different problems; are their files the same?")
    prompts, contexts = [problem.prompt for problem in problems], {name: config.sequence_len for name, config in configs.items()}
    check_prompts_fit(tokenizer, task.fmt, prompts, contexts, args.max_new_tokens, args.verifier_max_new_tokens)
    return prompts


def main(args) -> None:
    rank, world = rank_and_world()
    check_args(args, world)
    task = make_task(args)
    if RECIPES[args.recipe].judge == "gold" and not getattr(task, "has_step_labels", True):
        raise BadInput(f"--recipe {args.recipe}: task {task.name} has no gold labels of steps")
    args.model_tag = args.model_tag or default_tag("sft")
    args.verifier_tag = args.verifier_tag or f"{args.model_tag}-ver"
    check_name("--model-tag", args.model_tag)
    check_name("--verifier-tag", args.verifier_tag)
    args.verifier_lr = args.lr if args.verifier_lr is None else args.verifier_lr
    choose_run_name(args.run)
    resume_step = resolve_resume(args, flag_defaults(make_parser()))
    uses_wandb(args.run)
    check_writable(path_of("runs", args.run))
    check_writable(path_of("rl", f"{args.run}-gen"))
    tokenizer = load_tokenizer(path_of("tokenizer"))
    if args.calculator and not tokenizer.has_calculator:
        raise BadInput("--calculator: an imported tokenizer has no tokens that call it")
    device = init_device(args.device_type)
    recipe = RECIPES[args.recipe]
    needs_verifier = recipe.judge == "verifier" or "verifier" in recipe.trained
    configs = load_configs(args, needs_verifier)
    prompts = check_problems(args, task, tokenizer, configs, device)
    if args.dry_run:
        lengths = [len(generator_prompt(tokenizer, task.fmt, prompt)) for prompt in (*prompts[:1000], longest_problem(tokenizer, prompts))]
        print0("\n".join(describe_run(args, configs, recipe.trained, lengths, world, compute_dtype(device), device)))
        return
    roles = load_roles(args, recipe.trained, needs_verifier, device, compute_dtype(device))
    for role in roles.values():
        tokenizer.check_model(role.name, role.model)
    state = load_set(args.run, resume_step, roles, device, args.shard) if resume_step is not None else None

    args.run = gather_lists([choose_run_name(args.run)], device)[0]
    run = start_run(args, device, {"args": vars(args), "world": world, **describe_versions()}, resumed=state is not None)
    sampler = Sampler(task, tokenizer, args.seed, args.max_new_tokens, args.verifier_max_new_tokens, args.temperature, args.top_k, run.should_stop,
                      args.calculator, args.max_rows)
    evaluate = Evaluation(sampler, run, args.eval_examples, args.num_samples)
    print0(f"run {args.run} in {run.folder}: {args.recipe} on {world} x {device}" + (f", continued behind step {state.step}" if state else ""))
    try:
        state = state or start(args, run, roles, evaluate)
        run.trim("metrics.jsonl", state.step)
        run.trim("rollouts.jsonl", state.step)
        drop_sets_behind(run, state.step)
        run.remove("summary.json")  # a finished run that goes on is not finished
        train(args, run, state, sampler, roles, evaluate)
        save_set(run, state, roles, args)
        started = time.time()
        after = evaluate(roles, state.fixed_solutions)
        minutes = (state.start_seconds + state.seconds + time.time() - started) / 60
    except StopRequested:
        if state:
            save_set(run, state, roles, args)
        run.finish()
        raise StopRequested(f"stopped behind step {state.step if state else 0}; go on with --run {args.run} --resume-from-step auto") from None
    print_table(state.before, after)
    if rank == 0:
        write_json(os.path.join(run.folder, "summary.json"), {
            "seed": args.seed, "recipe": args.recipe, "minutes": round(minutes, 2), "gen_steps": state.gen_step,
            "ver_steps": state.ver_step, "sampled_tokens": state.sampled_tokens, "before": state.before, "after": after})
    run.finish()
    print0(f"\nthe run's folder:\n{run.folder}")


if __name__ == "__main__":
    script_main(main, make_parser())
