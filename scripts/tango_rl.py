"""
Co-training by reinforcement learning. What is trained, and how, is a recipe: by default RL Tango, a generator and its
generative verifier (Zha et al. 2025, arXiv 2505.15034). --list-recipes shows the others; a file of your own is one too.

One process per GPU holds all roles, samples and trains. The ratio is exactly 1 unless --updates-per-batch is raised.

    python -m scripts.tango_rl --model-tag d4                                                # one CPU or GPU
    python -m scripts.tango_rl --recipe my/own_idea.py --model-tag d4 --help                 # the flags of a recipe
    torchrun --standalone --nproc_per_node=8 scripts/tango_rl.py -- --model-tag d4 --run tango
    torchrun --standalone --nproc_per_node=8 scripts/tango_rl.py -- --model-tag qwen7b --run qwen --shard --recompute --dry-run
"""
import argparse
import os
import time
import zlib
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import torch

from nanochat import recipes
from nanochat.checkpoint import default_tag
from nanochat.common import (BadInput, Diverged, StopRequested, add_run_args, check_choices, check_least, check_name,
                             check_writable, choose_run_name, compute_dtype, describe_versions, finite, flag_defaults,
                             gather_lists, init_device, path_of, print0, rank_and_world, script_main, start_run,
                             uses_wandb, write_json)
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.plan import describe_run
from nanochat.rl.advantages import PRESETS
from nanochat.rl.losses import AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, PolicyLoss
from nanochat.rl.play import Play, apply_update
from nanochat.rl.progress import health_check, print_step, print_table, rollout_records
from nanochat.rl.prompts import check_fit, longest_problem
from nanochat.rl.resume import check_recipe_text, read_config, resolve_resume
from nanochat.rl.roles import find_starts, load_configs, load_roles, short_name, trained_roles
from nanochat.rl.sampling import Sampler
from nanochat.rl.schedules import LR_SCHEDULES
from nanochat.rl.scores import problems_of
from nanochat.rl.state import RunState, check_memory, drop_sets_behind, load_set, save_set, tag_of
from tasks import add_task_args, make_task


# Flags

def make_parser(argv: list[str] | tuple = (), recipe: str = "tango") -> argparse.ArgumentParser:
    """The flags that all recipes share, and those of the recipe that argv names. Raises BadInput for an unknown
    recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    add_run_args(parser)
    parser.add_argument("--recipe", default=recipe,
                        help=f"one of: {', '.join(recipes.names())}; or a file (a path that ends in .py)")
    parser.add_argument("--list-recipes", action="store_true", help="print what each recipe is, and stop")
    add_common_args(parser)
    add_task_args(parser)
    name = recipe_of(argv, recipe)
    add_recipe_args(parser, recipes.load(name), name)
    parser.explain = partial(explain_unknown_flag, name=recipes.short(name))
    return parser


def recipe_of(argv: list[str] | tuple, default: str) -> str:
    """The recipe that the arguments name; what else is wrong with them is said later."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", nargs="?", default=default)
    return parser.parse_known_args(list(argv))[0].recipe or default


def add_recipe_args(parser, recipe, name: str) -> None:
    """The flags of a recipe's roles, and its own."""
    group = parser.add_argument_group(f"recipe {recipes.short(name)}")
    known = parser._option_string_actions
    for role, spec in recipe.ROLES.items():
        if spec.tag not in known:
            group.add_argument(spec.tag, default="",
                               help=f"SFT checkpoint of the {role}; default: <model-tag>{spec.ending}")
        if spec.trained and spec.lr not in known:
            group.add_argument(spec.lr, type=float, default=None, help=f"learning rate of the {role}; default: --lr")
        if spec.shares and "--verifier-shared-layers" not in known:
            group.add_argument("--verifier-shared-layers", type=int, default=0,
                               help=f"lowest layers the {role} shares with the {spec.shares}")
    try:
        if hasattr(recipe, "add_args"):
            recipe.add_args(group)
    except argparse.ArgumentError as error:
        raise BadInput(f"--recipe {name}: {error}") from None


def explain_unknown_flag(message: str, name: str) -> str:
    """argparse's complaint, with the recipes that a flag belongs to."""
    flag = next((word.partition("=")[0] for word in message.split() if word.startswith("--")), "")
    owners = []
    for other in recipes.names() if flag and message.startswith("unrecognized") else []:
        parser = argparse.ArgumentParser(add_help=False)
        add_recipe_args(parser, recipes.load(other), other)
        owners += [other] if flag in parser._option_string_actions else []
    return f"{flag}: a flag of recipe {', '.join(owners)}, not of {name}" if owners else message


def add_common_args(parser) -> None:
    parser.add_argument("--resume-from-step", default="-1",
                        help="continue --run from this step, or from its last with 'auto'; -1 = a fresh run")
    parser.add_argument("--dry-run", action="store_true",
                        help="print the resolved settings, memory per rank, tokens per step and hours, and stop")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints; 0 = at the end only")
    parser.add_argument("--num-steps", type=int, default=200, help="updates of the recipe's first role that is trained")
    models = parser.add_argument_group("models")
    models.add_argument("--model-tag", default="", help="SFT checkpoint of the generator; default: the largest d<N>")
    models.add_argument("--model-step", type=int, default=-1, help="step of the SFT checkpoints; -1 = the last")
    models.add_argument("--shard", action=argparse.BooleanOptionalAction, default=False,
                        help="shard weights, gradients and optimizers over the ranks (FSDP2); changes no result")
    models.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=False,
                        help="run blocks of imported models again in the backward pass instead of keeping their "
                             "activations; changes no result")
    rollout = parser.add_argument_group("rollouts")
    rollout.add_argument("--examples-per-step", type=int, default=32, help="problems per step, over all ranks")
    rollout.add_argument("--num-samples", type=int, default=8, help="G: rollouts per prompt")
    rollout.add_argument("--max-new-tokens", type=int, default=96, help="of a solution")
    rollout.add_argument("--temperature", type=float, default=1.0)
    rollout.add_argument("--top-k", type=int, default=0, help="0 = the full softmax; anything else biases the ratio")
    rollout.add_argument("--max-rows", type=int, default=1024,
                         help="rollouts per rank that decode together; changes memory, no result")
    rollout.add_argument("--calculator", action=argparse.BooleanOptionalAction, default=False,
                         help="solutions may call the calculator (python_start ... python_end); its output is forced "
                              "and not trained")
    loss = parser.add_argument_group("advantages, loss and optimizer")
    loss.add_argument("--advantage", default="grpo", help=f"one of: {', '.join(PRESETS)}")
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
    loss.add_argument("--lr-schedule", default="constant", help=f"one of: {', '.join(LR_SCHEDULES)}")
    loss.add_argument("--max-grad-norm", type=float, default=1.0, help="0 = no clipping")
    loss.add_argument("--micro-batch-tokens", type=int, default=4096,
                      help="tokens that go through a model at once; changes no result")
    loss.add_argument("--prefix-sharing", action=argparse.BooleanOptionalAction, default=True,
                      help="run a group's prompt once per update, not once per rollout; changes no result")
    evals = parser.add_argument_group("evaluation and logs")
    evals.add_argument("--eval-every", type=int, default=0, help="steps between evaluations; 0 = before and after only")
    evals.add_argument("--eval-examples", type=int, default=400, help="problems per test split")
    evals.add_argument("--log-rollouts", type=int, default=4,
                       help="rollouts per update that go to rollouts.jsonl, one of a group")


TABLES = {"advantage": PRESETS, "loss": POLICY_LOSSES, "kl": KL_ESTIMATORS, "aggregation": AGGREGATIONS,
          "lr_schedule": LR_SCHEDULES}
LEAST = {"num_steps": 0, "examples_per_step": 1, "num_samples": 1, "max_rows": 1, "max_new_tokens": 1, "top_k": 0,
         "updates_per_batch": 1, "micro_batch_tokens": 1, "eval_examples": 1, "kl_coef": 0, "lr": 0, "save_every": 0,
         "eval_every": 0, "clip_low": 0, "clip_high": 0, "dual_clip": 1, "model_step": -1, "max_grad_norm": 0,
         "log_rollouts": 0,
         "entropy_coef": 0}


def check_args(args, recipe, task, world: int) -> None:
    """Refuses what cannot work, before anything is loaded or written."""
    check_choices(args, TABLES)
    check_least(args, LEAST | {name: 0 for name in ("verifier_lr", "verifier_shared_layers") if hasattr(args, name)})
    if not args.temperature > 0:
        raise BadInput(f"--temperature {args.temperature}: must be above 0 (evaluation is greedy by itself)")
    if args.shard and world == 1:
        raise BadInput("--shard: there is one rank, so nothing to shard over; start several with torchrun")
    if args.examples_per_step % world or args.eval_examples < world:
        raise BadInput(f"--examples-per-step {args.examples_per_step}: must be a multiple of the {world} ranks (and "
                       f"--eval-examples "
                       f"at least that)")
    if args.num_samples < 2 and PRESETS[args.advantage].scope == "group" and PRESETS[args.advantage].center != "none":
        raise BadInput(f"--num-samples 1: --advantage {args.advantage} compares the rollouts of a group and needs at "
                       f"least 2")
    if hasattr(recipe, "check"):
        recipe.check(args, task)


def complete_args(args, recipe) -> None:
    """Gives the flags of roles their defaults. Raises BadInput."""
    args.model_tag = args.model_tag or default_tag("sft")
    for spec in recipe.ROLES.values():
        name, rate = (flag.removeprefix("--").replace("-", "_") for flag in (spec.tag, spec.lr))
        setattr(args, name, getattr(args, name) or args.model_tag + spec.ending)
        check_name(spec.tag, getattr(args, name))
        if spec.trained and getattr(args, rate) is None:
            setattr(args, rate, args.lr)


def check_problems(args, task, tokenizer, calls: list, configs: dict, device) -> list[str]:
    """The problems' texts, all of a finite task. Raises BadInput where one does not fit a role's context, a split is
    missing or ranks have others."""
    task.problem("test_in", 0)  # what is evaluated must be there
    problems = [task.problem("rl", 0),
                *(problem for split in ("rl", "test_in", "test_out") for problem in problems_of(task, split, -1))]
    checksum = zlib.crc32("\n".join(problem.prompt + problem.answer for problem in problems).encode())
    if len(set(gather_lists([checksum], device))) > 1:
        raise BadInput(f"--task {args.task}: the ranks have loaded different problems; are their files the same?")
    prompts = [problem.prompt for problem in problems]
    longest = longest_problem(tokenizer, prompts)
    for call in calls:
        check_fit(call.role, call.wrap, call.quoted, call.max_new_tokens, configs[call.role].sequence_len, tokenizer,
                  task.fmt, longest)
    return prompts


def check_calls(name: str, specs: dict, calls: list) -> None:
    """Raises BadInput for declarations of a recipe that cannot be."""
    if len({call.label for call in calls}) < len(calls):
        raise BadInput(f"--recipe {name}: its calls() declare a label twice")
    for call in calls:
        if call.role not in specs:
            raise BadInput(f"--recipe {name}: its calls() name a role {call.role}; there are {', '.join(specs)}")
        if min(call.num_prompts, call.num_samples, call.max_new_tokens) < 1:
            raise BadInput(f"--recipe {name}: its calls() declare nothing to sample as {call.label}: prompts, samples and "
                           f"--max-new-tokens must be at least 1")


# The loop

def train(t: Play, recipe) -> None:
    """Steps of the recipe until its first trained role has made --num-steps updates."""
    counted = trained_roles(recipe.ROLES)[0]
    while t.steps[counted] < t.args.num_steps:
        with one_step(t, recipe, counted) as updated:
            for update in recipe.play(t):
                metrics = apply_update(t, update)
                t.log(update.role, metrics)
                updated.append(update)
        if t.args.save_every and t.step % t.args.save_every == 0:
            save_set(t.run, t.state, t.roles, t.args)


@contextmanager
def one_step(t: Play, recipe, counted: str):
    """Around a step: the evaluation that is due before it, and behind it what is counted, logged and shown. A request
    to stop that comes before the first update throws the step away; behind it the step is carried through."""
    t.check_stop()
    before, started, updated = t.state.snapshot(), time.time(), []
    t.num_drawn, t.sampled, t.labels, t.metrics, t.seconds, t.has_moved = 0, 0, set(), {}, {}, False
    try:
        record = evaluate_if_due(t, recipe, counted)
        evaluated = time.time()
        yield updated
    except StopRequested:
        t.state.restore(before)
        raise
    state, ended = t.state, time.time()
    check_memory(state.memory)
    tokens = int(t.reduce(torch.tensor(t.sampled, device=t.device)))
    roles = list(dict.fromkeys(update.role for update in updated))
    if not updated:  # nothing in it to learn from
        state.role_steps[counted] += 1
        t.log(None, {"without_update": 1})
    seconds, first = ended - evaluated, roles[0] if len(roles) == 1 else counted
    record |= {"step": state.step, "role": "+".join(roles) or counted, "phase": first,
               **{f"{short_name(role)}_step": before.role_steps[role] for role in t.roles},
               "sampled_tokens": state.sampled_tokens}
    record |= t.metrics | {f"{short_name(first)}/sampled_tokens": tokens}
    record |= {"timing_s/eval": evaluated - started, **t.seconds, "timing_s/step": seconds,
               "tokens_per_s": tokens / max(seconds, 1e-9)}
    if t.device.type == "cuda":
        record["peak_memory_gb"] = torch.cuda.max_memory_allocated(t.device) / 1e9
    state.step += 1
    state.cursor += t.num_drawn
    state.sampled_tokens += tokens
    state.step_seconds += seconds
    state.eval_seconds += evaluated - started
    t.run.log(record)
    for rollout in [row for update in updated for row in rollout_records(t, update)] if t.run.rank == 0 else []:
        t.run.append("rollouts.jsonl", {"step": record["step"], **rollout})
    print_step(record, roles, getattr(recipe, "SHOWN", {}), seconds_left(t))
    t.has_moved = False
    for role, in_a_row in state.skipped_in_a_row.items():
        if in_a_row >= 3:
            raise Diverged(f"step {record['step']}: loss or gradient of the {role} was not finite three times in a "
                           f"row; "
                           f"look at its learning rate and at the last records of metrics.jsonl")


def evaluate_if_due(t: Play, recipe, counted: str) -> dict:
    """The held-out scores, where --eval-every says that they are due and they were not just taken."""
    now = recipe.eval_step(t) if hasattr(recipe, "eval_step") else t.steps[counted]
    if not t.args.eval_every or now % t.args.eval_every or now == t.state.last_eval:
        return {}
    scores = dict(held_out(t, recipe) if t.step else t.state.before)
    t.state.last_eval = now
    return scores


@contextmanager
def evaluating(t: Play):
    """What is drawn here belongs to no step."""
    t.evaluating = True
    try:
        yield
    finally:
        t.evaluating = False


def held_out(t: Play, recipe) -> dict:
    """The recipe's held-out scores."""
    with evaluating(t):
        scores = recipe.evaluate(t)
    if not isinstance(scores, dict):
        raise ValueError(f"evaluate gives a {type(scores).__name__}, not a dict of scores")
    for name, value in scores.items():
        if not (value is None or isinstance(value, bool | int | float)):
            raise ValueError(f"evaluate gives {name} as a {type(value).__name__}: scores are numbers or None")
    return scores


def seconds_left(t: Play) -> float:
    """Estimate of the steps to come, without evaluations."""
    left = sum(max(0, t.totals[role] - t.steps[role]) for role in t.totals)
    return t.state.step_seconds / max(1, sum(t.steps.values())) * left


def start_state(t: Play, recipe) -> None:
    """The evaluation before RL and the health check."""
    started = time.time()
    t.state.before = held_out(t, recipe)
    solver = next((role for role in ("generator", *t.roles)
                   if any(call.role == role and not call.given for call in t.calls.values())), None)
    if solver:
        with evaluating(t):
            health_check(t, solver)
    t.state.start_seconds = time.time() - started


def main(args) -> None:
    if args.list_recipes:
        print0("\n".join(recipes.describe()))
        return
    rank, world = rank_and_world()
    recipe, task = recipes.load(args.recipe), make_task(args)
    check_args(args, recipe, task, world)
    complete_args(args, recipe)
    choose_run_name(args.run)
    may_change = {spec.lr.removeprefix("--").replace("-", "_") for spec in recipe.ROLES.values()}
    if hasattr(recipe, "text"):  # which is compared, wherever its file is
        may_change.add("recipe")
    resume_step = resolve_resume(args, flag_defaults(make_parser(["--recipe", args.recipe])), may_change)
    config = read_config(args.run) if resume_step is not None else {}
    if resume_step is not None:
        check_recipe_text(args.run, getattr(recipe, "text", None))
    uses_wandb(args.run)
    for path in (path_of("runs", args.run), *(path_of("rl", tag_of(args.run, role)) for role in recipe.ROLES)):
        check_writable(path)
    tokenizer = load_tokenizer(path_of("tokenizer"))
    if args.calculator and not tokenizer.has_calculator:
        raise BadInput("--calculator: an imported tokenizer has no tokens that call it")
    device = init_device(args.device_type)
    dtype = compute_dtype(device)
    starts = find_starts(args, recipe.ROLES, config.get("starts"))
    configs, calls = load_configs(starts), list(recipe.calls(args))
    check_calls(args.recipe, recipe.ROLES, calls)
    totals = recipe.updates(args) if hasattr(recipe, "updates") else dict.fromkeys(trained_roles(recipe.ROLES), args.num_steps)
    prompts = check_problems(args, task, tokenizer, calls, configs, device)
    if args.dry_run:
        print0("\n".join(describe_run(args, recipe.ROLES, configs, calls, totals, tokenizer, task.fmt, prompts, world,
                                      dtype, device)))
        return
    roles = load_roles(args, recipe.ROLES, starts, device, dtype)
    for role in roles.values():
        tokenizer.check_model(role.name, role.model)
    state = load_set(args.run, resume_step, roles, device, args.shard) if resume_step is not None else None

    args.run = gather_lists([choose_run_name(args.run)], device)[0]
    shown = [f"{short_name(role)}/{name}" for role, metrics in getattr(recipe, "SHOWN", {}).items() for name in metrics]
    run = start_run(args, device, {"args": vars(args), "world": world, "shown": shown, "starts": {
        name: asdict(start) for name, start in starts.items()}, **describe_versions()}, resumed=state is not None)
    if state is None:
        run.remove("recipe.py")  # of a run that came to nothing
    if rank == 0 and state is None and hasattr(recipe, "text"):
        with open(os.path.join(run.folder, "recipe.py"), "w", encoding="utf-8") as f:
            f.write(recipe.text)
    sampler = Sampler(task, tokenizer, args.seed, temperature=args.temperature, top_k=args.top_k,
                      calculator=args.calculator,
                      max_rows=args.max_rows)
    loss = PolicyLoss(args.loss, args.clip_low, args.clip_high, args.dual_clip, args.kl, args.kl_coef,
                      args.entropy_coef)
    t = Play(args, run, sampler, roles, {call.label: call for call in calls}, totals,
             state or RunState(role_steps=dict.fromkeys(roles, 0)), loss)
    sampler.should_stop = t.should_stop
    print0(f"run {args.run} in {run.folder}: {recipes.short(args.recipe)} on {world} x {device}"
           + (f", continued behind step {state.step}" if state else ""))
    is_started = state is not None
    try:
        if not is_started:
            start_state(t, recipe)
            is_started = True
        run.trim("metrics.jsonl", t.step)
        run.trim("rollouts.jsonl", t.step)
        drop_sets_behind(run, t.step, roles)
        run.remove("summary.json")  # a finished run that goes on is not finished
        train(t, recipe)
        save_set(run, t.state, roles, args)
        started = time.time()
        after = held_out(t, recipe)
        seconds = t.state.start_seconds + t.state.step_seconds + t.state.eval_seconds + time.time() - started
    except StopRequested:
        if is_started:
            save_set(run, t.state, roles, args)
        run.finish()
        raise StopRequested(f"stopped behind step {t.step}; go on with --run {args.run} --resume-from-step "
                            f"auto") from None
    print_table(t.state.before, after, getattr(recipe, "TABLE", None))
    if rank == 0:
        write_json(os.path.join(run.folder, "summary.json"), {
            "seed": args.seed, "recipe": recipes.short(args.recipe), "minutes": round(seconds / 60, 2), "steps": t.step,
            **{f"{short_name(role)}_steps": t.steps[role] for role in roles}, "sampled_tokens": t.state.sampled_tokens,
            "before": finite(t.state.before), "after": finite(after)})
    run.finish()
    print0(f"\nthe run's folder:\n{run.folder}")


if __name__ == "__main__":
    script_main(main, make_parser)
