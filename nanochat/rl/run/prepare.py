"""
From flags to a run that is about to begin or to go on: all that is refused is refused here, before any work or write.
"""
import inspect
import json
import os
import zlib
from dataclasses import asdict

import torch

from nanochat.checkpoint import dtype_for, saved_steps, warn_of_dtype
from nanochat.common import BadInput, dtype_name, gather_lists, init_device, print0, rank_and_world
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.kernels.losses import PolicyLoss
from nanochat.own_code import check_texts, keep_texts
from nanochat.rl.learn.roles import (check_configs, find_starts, load_configs, load_roles, name_of, needed, short_name,
                                     trained_roles)
from nanochat.rl.learn.state import RunState, load_set, tag_of
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records.outcomes import problems_digest, texts_digest, words_of
from nanochat.rl.run.flags import (ask, check_args, check_draws, check_problems, check_task, complete_args,
                                   warn_of_starts, with_times)
from nanochat.rl.run.plan import (check_plan, check_sizes, describe_run, held_by, plan_of, planned, prompt_lengths,
                                  setting_of)
from nanochat.rl.run.resume import (check_no_models, check_problems_stayed, read_config, resolve_resume)
from nanochat.storage.files import check_writable, found_at, path_of, write_json
from nanochat.storage.run import choose_run_name, claim_run_name, describe_versions, look_at, start_run, uses_wandb
from tasks import make_task, text_of
from tasks.few_labels import FewLabels


def prepare(args, recipe, defaults: dict) -> Play | None:
    """A run, ready for its next step; None for --dry-run. defaults: of all flags. Raises BadInput."""
    task, world = make_task(args), rank_and_world()[1]
    check_args(args, world)
    check_json(args)
    complete_args(args, recipe.ROLES)
    seen = look_at(path_of("runs", choose_run_name(args.run)))
    step, starts, said = find_start(args, recipe, defaults)
    if step is None:
        check_task(args, task, starts)
    ask(args.recipe, recipe, "check", args, task)  # what it reads fits the task, which is by now the right one
    uses_wandb(args.run)
    for path in (path_of("runs", args.run), *(path_of("rl", tag_of(args.run, role)) for role in recipe.ROLES)):
        check_writable(path)
    tokenizer = load_tokenizer(found_at("tokenizer"))
    digests = check_same_problems(args, recipe, task, tokenizer, step)
    device = init_device(args.device_type)
    torch.manual_seed(args.seed)  # nothing here draws from it; what a recipe draws would else differ from run to run
    configs = load_configs(starts)
    dtype = dtype_for(device, *configs.values())
    check_configs(args, recipe.ROLES, configs)
    draws, totals = declared(args, recipe)
    if step is None:
        warn_of_starts(starts, draws)
    check_sizes(args, task, draws, world)
    prompts = check_problems(args, task, tokenizer, draws, configs, device)
    if args.num_labelled:
        task = FewLabels(task, args.num_labelled, args.labelled_share, args.examples_per_step)
    specs = needed(recipe.ROLES, draws)
    configs = {name: configs[name] for name in specs}
    setting, held = setting_of(args, world, dtype, device), held_by(args, specs, configs)
    lengths = prompt_lengths(tokenizer, task.fmt, prompts)
    plan = plan_of(configs, held, planned(draws, lengths[0]), setting)
    if args.dry_run:
        lines = describe_run(args, configs, held, draws, totals, setting, plan, lengths, device)
        print0("\n".join([said] * bool(said) + lines))
        return None
    check_plan(plan, device)
    roles = load_roles(args, specs, starts, device, dtype)
    for role in roles.values():
        tokenizer.check_model(role.name, role.model)
    state = load_state(args, recipe, step, roles, device)
    run = open_run(args, recipe, task, digests, starts, device, dtype, world, step, seen)
    if said:
        print0(said)
    run.tokenizer, run.resumed_from = tokenizer.mark(), step
    sampler = Sampler(task, tokenizer, args.seed, temperature=args.temperature, top_k=args.top_k,
                      calculator=args.calculator, max_rows=args.max_rows, max_cached_tokens=args.max_cached_tokens)
    loss = PolicyLoss(args.loss, args.clip_low, args.clip_high, args.dual_clip, args.kl, args.kl_coef,
                      args.entropy_coef, args.sequence_ratio)
    t = Play(args, run, sampler, roles, draws, totals, state, loss)
    sampler.should_stop = t.should_stop
    return t


def check_json(args) -> None:
    """Raises BadInput for a flag of a recipe that config.json could not hold."""
    for name, value in vars(args).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise BadInput(f"--recipe {args.recipe}: its flag --{name.replace('_', '-')} is a {type(value).__name__}: "
                           f"flags are numbers, texts, true or false, and lists of them") from None


def find_start(args, recipe, defaults: dict) -> tuple[int | None, dict, str]:
    """The step that a run is continued from (None: afresh), each role's starting checkpoint, and what is to be said of
    it. Raises BadInput."""
    may_change = {name_of(spec.lr) for spec in recipe.ROLES.values()}
    tags = {tag_of(args.run, role): spec.trained for role, spec in recipe.ROLES.items()}
    step, said = resolve_resume(args, defaults, may_change, tags)
    if step is None:
        return None, find_starts(args, recipe.ROLES), said
    check_texts(f"run {args.run}", path_of("runs", args.run), own_texts(args, recipe))
    return step, find_starts(args, recipe.ROLES, read_config(args.run).get("starts")), said


def check_same_problems(args, recipe, task, tokenizer, step: int | None) -> list[int]:
    """Digests of the task's problems and texts; those of a continued run must be as they were."""
    digests = [problems_digest(task, tokenizer), texts_digest(task)]
    if step is None:
        check_no_models(args.run, [tag_of(args.run, role) for role in recipe.ROLES])
    else:
        check_problems_stayed(args.run, task.name, digests)
    if args.calculator and not tokenizer.has_calculator:
        raise BadInput("--calculator: an imported tokenizer has no tokens that call it")
    return digests


def declared(args, recipe) -> tuple[dict[str, Draw], dict[str, int]]:
    """What the recipe samples in a step, and the updates of each role in a whole run."""
    draws = ask(args.recipe, recipe, "draws", args)
    check_draws(args.recipe, recipe.ROLES, draws)
    trained = trained_roles(recipe.ROLES)
    totals = ask(args.recipe, recipe, "updates", args) or dict.fromkeys(trained, args.num_steps)
    if (not isinstance(totals, dict) or set(totals) != set(trained)
            or not all(isinstance(number, int) and number >= 0 for number in totals.values())):
        raise BadInput(f"--recipe {args.recipe}: its updates() must give a number for each of {', '.join(trained)}")
    return with_times(args, draws), totals


def load_state(args, recipe, step: int | None, roles: dict, device) -> RunState:
    """The state that a run begins with, or that it had at a step. Raises BadInput where no step is left to make."""
    if step is None:
        return RunState(role_steps=dict.fromkeys(roles, 0))
    state, counted = load_set(args.run, step, roles, device, args.shard), trained_roles(recipe.ROLES)[0]
    made = state.role_steps[counted]
    if made > args.num_steps:
        raise BadInput(f"--num-steps {args.num_steps}: run {args.run} has made {made} updates of the {counted}; "
                       f"continue it with as many or more")
    if made == args.num_steps and saved_steps(args.run)[-1] > state.step:
        raise BadInput(f"--resume-from-step {args.resume_from_step}: no step is left to make, and to begin from there "
                       f"would remove the checkpoints after it, up to step {saved_steps(args.run)[-1]}")
    return state


def open_run(args, recipe, task, problems: list[int], starts: dict, device, dtype, world: int, step: int | None,
             seen: dict):
    """The run's folder and log, with all that a continued run is compared with. step: where it is continued, None for a
    fresh one; seen: what its folder held when that was decided."""
    is_resumed = step is not None
    args.run = gather_lists([claim_run_name(args.run)] if rank_and_world()[0] == 0 else [], device)[0]
    shown = [f"{short_name(role)}/{name}" for role, metrics in getattr(recipe, "SHOWN", {}).items() for name in metrics]
    config = {"args": vars(args), "world": world, "shown": shown, "about": getattr(task, "about", None),
              "words": words_of(task),
              "recipe_mark": zlib.crc32((getattr(recipe, "text", None) or inspect.getsource(recipe)).encode()),
              "problems": problems[0], "texts": problems[1], "dtype": dtype_name(dtype),
              "starts": {name: asdict(start) for name, start in starts.items()}, **describe_versions()}
    run = start_run(args, device, config, seen, resumed=is_resumed)
    if is_resumed and run.rank == 0:  # what changed is true from here on
        before = read_config(args.run)
        warn_of_dtype(f"run {args.run}", before.get("dtype"), dtype)
        before["dtype"] = config["dtype"]
        if before.get("recipe_mark") not in (None, config["recipe_mark"]):  # None: of an older version
            print0(f"WARNING: the text of recipe {args.recipe} is no longer what run {args.run} was started with")
        changed = {name: [before["args"].get(name), value] for name, value in vars(args).items()
                   if before["args"].get(name) != value and name != "resume_from_step"}
        resumed = [*before.get("resumed", []), {"step": step, "changed": changed}]
        write_json(os.path.join(run.folder, "config.json"), before | {"args": vars(args), "resumed": resumed})
    if not is_resumed and run.rank == 0:
        keep_texts(run.folder, own_texts(args, recipe))
    return run


def own_texts(args, recipe) -> dict[str, str | None]:
    """The texts of a recipe and a task from outside of the repository, None of those in it."""
    return {"recipe": getattr(recipe, "text", None), "task": text_of(args.task)}
