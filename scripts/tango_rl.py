"""
Co-training by reinforcement learning. What is trained, and how, is a recipe: by default RL Tango, a generator and its
generative verifier (Zha et al. 2025, arXiv 2505.15034). --list-recipes shows the others; a file of your own is one too.

One process per GPU holds all roles, samples and trains. The ratio is exactly 1 unless --updates-per-batch is raised.

    python -m scripts.tango_rl --model-tag d4                                                # one CPU or GPU
    python -m scripts.tango_rl --recipe my/own_idea.py --model-tag d4 --help                 # the flags of a recipe
    torchrun --standalone --nproc_per_node=8 scripts/tango_rl.py -- --model-tag d4 --run tango
    torchrun --standalone --nproc_per_node=8 scripts/tango_rl.py -- --model-tag qwen7b --run qwen --shard \\
        --recompute --dry-run
"""
import argparse
import inspect
import json
import math
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial

import torch

from nanochat import recipes
from nanochat.checkpoint import dtype_for, saved_steps, saying_what_is_whole, warn_of_dtype
from nanochat.common import (BadInput, CannotWrite, Diverged, StopRequested, dtype_name, finite, flag_defaults,
                             gather_lists, init_device, print0, process_size, rank_and_world, script_main)
from nanochat.hf.files import read_json
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.kernels.losses import PolicyLoss
from nanochat.rl.learn.roles import (check_configs, check_same_weights, find_starts, load_configs, load_roles, name_of,
                                     short_name, trained_roles)
from nanochat.rl.learn.state import RunState, check_memory, drop_sets_after, load_set, save_set, tag_of
from nanochat.rl.measure.theory import theory_scores
from nanochat.rl.play.play import Play, apply_update, described, is_number
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records.outcomes import problems_digest, texts_digest
from nanochat.rl.report.page import write_run_page
from nanochat.rl.run.flags import (add_common_args, add_role_args, check_args, check_draws, check_problems, check_task,
                                   complete_args, warn_of_starts, with_times)
from nanochat.rl.run.plan import check_plan, check_sizes, describe_run
from nanochat.rl.run.progress import check_apart, count_apart, health_check, print_step, print_table, warn_of_no_signal
from nanochat.rl.run.resume import (check_no_models, check_problems_stayed, check_recipe_text, read_config,
                                    resolve_resume)
from nanochat.rl.run.rollout_log import rollout_records
from nanochat.storage.files import check_writable, path_of, whole_file, write_json
from nanochat.storage.run import (add_run_args, choose_run_name, claim_run_name, describe_versions, look_at, start_run,
                                  uses_wandb)
from nanochat.weights import check_weights
from tasks import add_task_args, make_task
from tasks.few_labels import FewLabels

CHECK_EVERY = 50  # steps between comparisons of the ranks' weights, which are compared before they are saved too


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
    try:
        parser.format_help()
    except (TypeError, ValueError, KeyError) as error:
        raise BadInput(f"--recipe {name}: help of its flags: {error} (a percent sign is written %%)") from None
    parser.explain = partial(explain_unknown_flag, name=recipes.short(name), known=list(parser._option_string_actions))
    return parser


def recipe_of(argv: list[str] | tuple, default: str) -> str:
    """The recipe that the arguments name; what else is wrong with them is said later."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", nargs="?", default=default)
    return parser.parse_known_args(list(argv))[0].recipe or default


def add_recipe_args(parser, recipe, name: str) -> None:
    """The flags of a recipe's roles, and its own."""
    group = parser.add_argument_group(f"recipe {recipes.short(name)}")
    add_role_args(group, recipe.ROLES)
    recipes.ask(name, recipe, "add_args", group)


def explain_unknown_flag(message: str, name: str, known: list[str]) -> str:
    """argparse's complaint, with the recipes that a flag belongs to and the known flags that are like it."""
    flags = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
    if not message.startswith("unrecognized"):
        return message
    owners = {}
    for other in recipes.names():
        parser = argparse.ArgumentParser(add_help=False)
        add_recipe_args(parser, recipes.load(other), other)
        for flag in parser._option_string_actions.keys() & flags:
            owners.setdefault(flag, []).append(other)
    owned = [f"{flag}: a flag of recipe {', '.join(owners[flag])}, not of {name}" for flag in flags if flag in owners]
    unknown = [f"{flag}: unknown" for flag in flags if flag not in owners]
    hints = [f"did you mean {' or '.join(near)}?" for flag in flags if (near := similar(flag, known))]
    return "; ".join([*owned, *unknown, *hints] if owned else [message, *hints])


def similar(flag: str, known: list[str]) -> list[str]:
    """Known flags that begin with this one, else the one that is most like it."""
    begin = [other for other in known if flag != "--" and other.startswith(flag)]
    return begin or get_close_matches(flag, known, 1, cutoff=0.85)


# The loop

def train(t: Play, recipe) -> None:
    """Steps of the recipe until its first trained role has made --num-steps updates. Raises Diverged where it never
    will, and where the ranks' weights have become different."""
    counted = trained_roles(recipe.ROLES)[0]
    most = 10 * (sum(t.totals.values()) + 1)
    while t.steps[counted] < t.args.num_steps:
        if t.step > most:
            raise Diverged(f"in {t.step} steps the {counted} has made {t.steps[counted]} of its {t.args.num_steps} "
                           f"updates; the recipe planned {sum(t.totals.values())} of all roles")
        with one_step(t, recipe, counted) as updated:
            updates = recipe.play(t)
            if not isinstance(updates, Iterator):
                raise BadInput(f"--recipe {t.args.recipe}: play gives a {type(updates).__name__}: it must yield an "
                               f"Update for each optimizer step")
            for update in updates:
                metrics = apply_update(t, update)
                t.log(update.role, metrics)
                updated.append(update)
                if len(updated) > most:
                    raise BadInput(f"--recipe {t.args.recipe}: play has yielded {len(updated)} Updates in one step "
                                   f"and does not end; the recipe planned {sum(t.totals.values())} in all")
        is_saved = t.args.save_every and t.step % t.args.save_every == 0
        if is_saved or t.step % CHECK_EVERY == 0:
            check_same_weights(t.roles, t.step)
        if is_saved:
            save_set(t.run, t.state, t.roles, t.args)
    check_same_weights(t.roles, t.step)


@contextmanager
def one_step(t: Play, recipe, counted: str):
    """Around a step: the evaluation that is due before it, and after it what is counted, logged and shown. A request
    to stop that comes before the first update throws the step away; after it the step is carried through."""
    t.check_stop()
    before, random_state, started, updated = t.state.snapshot(), torch.get_rng_state(), time.time(), []
    # the step has the copy: what its memory shared with weights, a continued run would not share either
    t.state.memory, before.memory = before.memory, t.state.memory
    t.num_drawn, t.sampled, t.done, t.drawn, t.metrics, t.seconds = 0, 0, set(), {}, {}, {}
    t.has_moved, t.moved = False, set()
    try:
        record = evaluate_if_due(t, recipe, counted)
        evaluated = time.time()
        yield updated
    except Exception:
        if not t.has_moved:  # the step is thrown away
            t.state.restore(before)
            torch.set_rng_state(random_state)
        raise
    state, ended, was_evaluated = t.state, time.time(), bool(record)
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
    record |= t.metrics | count_apart(t, roles, t.metrics) | {f"{short_name(first)}/sampled_tokens": tokens}
    record |= {"timing_s/eval": evaluated - started, **t.seconds, "timing_s/step": seconds,
               **t.run.writer.take_record(), "tokens_per_s": tokens / max(seconds, 1e-9), **process_size()}
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
    warn_of_no_signal(t, record)
    print_step(record, roles, getattr(recipe, "SHOWN", {}), seconds_left(t))
    if was_evaluated:
        show_page(t, f"under way, after step {t.step}")
    t.has_moved = False
    for role, in_a_row in state.skipped_in_a_row.items():
        if in_a_row >= 3:
            raise Diverged(f"step {record['step']}: loss or gradient of the {role} was not finite three times in a "
                           f"row; look at its learning rate and at the last records of metrics.jsonl")
    check_apart(t, record)


def evaluate_if_due(t: Play, recipe, counted: str) -> dict:
    """The held-out scores, where --eval-every says that they are due and they were not just taken."""
    now = recipe.eval_step(t) if hasattr(recipe, "eval_step") else t.steps[counted]
    if not isinstance(now, int):
        raise BadInput(f"--recipe {t.args.recipe}: eval_step gives a {type(now).__name__}, not an int")
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
    for name, role in t.roles.items():
        check_weights(role.model, name)
    with evaluating(t):
        scores = recipe.evaluate(t)
    if not isinstance(scores, dict):
        raise BadInput(f"--recipe {t.args.recipe}: evaluate gives a {type(scores).__name__}, not a dict of scores")
    if t.args.log_theory:
        with evaluating(t):
            scores = scores | theory_scores(t)
    t.check_names(scores)
    for name, value in scores.items():
        if not isinstance(name, str):
            raise BadInput(f"--recipe {t.args.recipe}: evaluate names a score {name!r}: names are texts")
        if not is_number(value):
            raise BadInput(f"--recipe {t.args.recipe}: evaluate gives {name} as a {described(value)}: scores are "
                           f"numbers or None")
        if value is not None and not math.isfinite(value) and name not in t.told:
            t.told.add(name)
            print0(f"WARNING: evaluate gives {name} as {value}, which is logged as null; one that cannot be told is "
                   f"None")
    return scores


def seconds_left(t: Play) -> float:
    """Estimate of the steps to come, without evaluations."""
    left = sum(max(0, t.totals[role] - t.steps[role]) for role in t.totals)
    return t.state.step_seconds / max(1, sum(t.steps.values())) * left


def show_page(t: Play, state: str | None, is_alive: bool = True) -> None:
    """Writes the run's report.html; rank 0. state: what the run is doing, None once it is finished; is_alive: whether
    it goes on. A report that fails is told and stops no run."""
    if t.run.rank != 0:
        return
    seconds = t.state.start_seconds + t.state.step_seconds + t.state.eval_seconds
    so_far = state and {"minutes": round(seconds / 60, 2), "before": finite(t.state.before)}
    left = {"state": state, "minutes_left": seconds_left(t) / 60 if t.step and is_alive else None,
            "is_alive": is_alive}
    try:
        write_run_page(t.run.folder, so_far, left if state else None)
    except Exception as error:
        print0(f"report.html was not written: {type(error).__name__}: {error}")


def start_state(t: Play, recipe) -> None:
    """The evaluation before RL and the health check of the first role that samples."""
    started = time.time()
    t.state.before = held_out(t, recipe)
    sampling = {draw.role for draw in t.draws.values() if not draw.teacher_forced}
    solver = next((role for role in ("generator", *t.roles) if role in sampling), None)
    if solver:
        with evaluating(t):
            health_check(t, solver)
    t.state.start_seconds = time.time() - started


# Start and finish

def main(args) -> None:
    if args.list_recipes:
        print0("\n".join(recipes.describe()))
        return
    recipe, task, world = recipes.load(args.recipe), make_task(args), rank_and_world()[1]
    check_args(args, world)
    check_json(args)
    complete_args(args, recipe.ROLES)
    seen = look_at(path_of("runs", choose_run_name(args.run)))
    resume_step, starts = find_start(args, recipe)
    if resume_step is None:
        check_task(args, task, starts)
    recipes.ask(args.recipe, recipe, "check", args, task)  # what it reads fits the task, which is by now the right one
    uses_wandb(args.run)
    for path in (path_of("runs", args.run), *(path_of("rl", tag_of(args.run, role)) for role in recipe.ROLES)):
        check_writable(path)
    tokenizer = load_tokenizer(path_of("tokenizer"))
    problems = [problems_digest(task, tokenizer), texts_digest(task)]
    if resume_step is None:
        check_no_models(args.run, [tag_of(args.run, role) for role in recipe.ROLES])
    else:
        check_problems_stayed(args.run, task.name, problems)
    if args.calculator and not tokenizer.has_calculator:
        raise BadInput("--calculator: an imported tokenizer has no tokens that call it")
    device = init_device(args.device_type)
    torch.manual_seed(args.seed)  # nothing here draws from it; what a recipe draws would else differ from run to run
    configs, draws = load_configs(starts), with_times(args, recipes.ask(args.recipe, recipe, "draws", args))
    dtype = dtype_for(device, *configs.values())
    check_configs(args, recipe.ROLES, configs)
    check_draws(args.recipe, recipe.ROLES, draws)
    if resume_step is None:
        warn_of_starts(starts, draws)
    trained = trained_roles(recipe.ROLES)
    totals = recipes.ask(args.recipe, recipe, "updates", args) or dict.fromkeys(trained, args.num_steps)
    if (not isinstance(totals, dict) or set(totals) != set(trained)
            or not all(isinstance(number, int) and number >= 0 for number in totals.values())):
        raise BadInput(f"--recipe {args.recipe}: its updates() must give a number for each of {', '.join(trained)}")
    check_sizes(args, task, draws, world)
    prompts = check_problems(args, task, tokenizer, draws, configs, device)
    if args.dry_run:
        print0("\n".join(describe_run(args, recipe.ROLES, configs, draws, totals, tokenizer, task.fmt, prompts, world,
                                      dtype, device)))
        return
    check_plan(args, recipe.ROLES, configs, draws, tokenizer, task.fmt, prompts, world, dtype, device)
    roles = load_roles(args, recipe.ROLES, starts, device, dtype)
    for role in roles.values():
        tokenizer.check_model(role.name, role.model)
    state = load_set(args.run, resume_step, roles, device, args.shard) if resume_step is not None else None
    made = state.role_steps[trained[0]] if state else 0
    if made > args.num_steps:
        raise BadInput(f"--num-steps {args.num_steps}: run {args.run} has made {made} updates of the {trained[0]}; "
                       f"continue it with as many or more")
    if state and made == args.num_steps and saved_steps(args.run)[-1] > state.step:
        raise BadInput(f"--resume-from-step {args.resume_from_step}: no step is left to make, and to begin from there "
                       f"would remove the checkpoints after it, up to step {saved_steps(args.run)[-1]}")
    run = open_run(args, recipe, task, problems, starts, device, dtype, world, resume_step, seen)
    run.tokenizer, run.resumed_from = tokenizer.mark(), resume_step
    if args.num_labelled:
        task = FewLabels(task, args.num_labelled, args.labelled_share, args.examples_per_step)
    sampler = Sampler(task, tokenizer, args.seed, temperature=args.temperature, top_k=args.top_k,
                      calculator=args.calculator, max_rows=args.max_rows,
                      max_cached_tokens=args.max_cached_tokens)
    loss = PolicyLoss(args.loss, args.clip_low, args.clip_high, args.dual_clip, args.kl, args.kl_coef,
                      args.entropy_coef, args.sequence_ratio)
    t = Play(args, run, sampler, roles, draws, totals,
             state or RunState(role_steps=dict.fromkeys(roles, 0)), loss)
    sampler.should_stop = t.should_stop
    with saying_what_is_whole(lambda: saved_steps(args.run),
                              f"the same flags, --run {args.run} and --resume-from-step auto"), run.writer:
        carry_out(t, recipe, is_resumed=state is not None)


def check_json(args) -> None:
    """Raises BadInput for a flag of a recipe that config.json could not hold."""
    for name, value in vars(args).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise BadInput(f"--recipe {args.recipe}: its flag --{name.replace('_', '-')} is a {type(value).__name__}: "
                           f"flags are numbers, texts, true or false, and lists of them") from None


def find_start(args, recipe) -> tuple[int | None, dict]:
    """The step that a run is continued from, None for a fresh one, and the SFT checkpoint that each role starts from.
    Raises BadInput."""
    may_change = {name_of(spec.lr) for spec in recipe.ROLES.values()}
    if hasattr(recipe, "text"):  # which is compared, wherever its file is
        may_change.add("recipe")
    tags = {tag_of(args.run, role): spec.trained for role, spec in recipe.ROLES.items()}
    resume_step = resolve_resume(args, flag_defaults(make_parser(["--recipe", args.recipe])), may_change, tags)
    if resume_step is None:
        return None, find_starts(args, recipe.ROLES)
    check_recipe_text(args.run, getattr(recipe, "text", None))
    return resume_step, find_starts(args, recipe.ROLES, read_config(args.run).get("starts"))


def open_run(args, recipe, task, problems: list[int], starts: dict, device, dtype, world: int, step: int | None,
             seen: dict):
    """The run's folder and log, with all that a continued run is compared with. step: where it is continued, None for a
    fresh one; seen: what its folder held when that was decided."""
    is_resumed = step is not None
    args.run = gather_lists([claim_run_name(args.run)] if rank_and_world()[0] == 0 else [], device)[0]
    shown = [f"{short_name(role)}/{name}" for role, metrics in getattr(recipe, "SHOWN", {}).items() for name in metrics]
    config = {"args": vars(args), "world": world, "shown": shown, "about": getattr(task, "about", None),
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
    if not is_resumed:
        run.remove("recipe.py")  # of a run that came to nothing
        if run.rank == 0 and hasattr(recipe, "text"):
            with whole_file(os.path.join(run.folder, "recipe.py")) as f:
                f.write(recipe.text)
    return run


def kept_scores(t: Play) -> dict | None:
    """The scores at the end of a finished run, if no flag was changed since; else None. The first rank reads them."""
    found = []
    if t.run.rank == 0:
        path = os.path.join(t.run.folder, "summary.json")
        is_same = not any(r["changed"] for r in read_config(t.args.run).get("resumed", []) if r["step"] == t.step)
        found = [read_json(path).get("after") if is_same and os.path.exists(path) else None]
    return gather_lists(found, t.device)[0]


def carry_out(t: Play, recipe, is_resumed: bool) -> None:
    """The run from where it is to its end: evaluation, steps, evaluation, summary. A request to stop saves it first."""
    args, run, is_started = t.args, t.run, is_resumed
    print0(f"run {args.run} in {run.folder}: {recipes.short(args.recipe)} on {run.world} x {t.device}, "
           f"{dtype_name(next(iter(t.roles.values())).model.compute_dtype)}"
           + (f", continued after step {t.step}" if is_resumed else ""))
    try:
        drop_sets_after(run, t.step, t.roles)  # first: a set whose records are gone could not be continued
        run.trim("metrics.jsonl", t.step)
        run.trim("rollouts.jsonl", t.step)
        if not is_started:
            start_state(t, recipe)
            is_started = True
        if t.steps[trained_roles(recipe.ROLES)[0]] >= args.num_steps:
            after = kept_scores(t)
            if after:
                print0("all steps are made, with these flags: its scores are as they were")
                return tell_end(t, recipe, after)
            print0("all steps are made: it is evaluated again")
        else:
            run.remove("summary.json")  # a finished run that goes on is not finished
        show_page(t, f"under way, after step {t.step}")
        print0(f"its report, which grows with it, to be opened in a browser: "
               f"{os.path.join(run.folder, 'report.html')}")
        train(t, recipe)
        save_set(run, t.state, t.roles, args)
        started = time.time()
        after = held_out(t, recipe)
        seconds = t.state.start_seconds + t.state.step_seconds + t.state.eval_seconds + time.time() - started
        run.writer.finish()
    except (Diverged, CannotWrite):
        raise
    except SystemExit as error:  # which would pass for the run's end
        raise BadInput(f"--recipe {args.recipe}: it left the run after step {t.step} by exit({error.code})") from None
    except StopRequested:
        if is_started:
            save_set(run, t.state, t.roles, args)
            run.writer.finish()
            show_page(t, f"stopped after step {t.step}", is_alive=False)
        run.finish()
        raise StopRequested(f"stopped after step {t.step}; go on with the same flags, --run {args.run} and "
                            f"--resume-from-step auto") from None
    except Exception:
        if is_started and t.step and not t.has_moved and run.world == 1:  # other ranks would not take part
            with suppress(CannotWrite, Diverged):
                save_set(run, t.state, t.roles, args)
                run.writer.finish()
                print0(f"run {args.run} is saved after step {t.step}; what stopped it:")
        raise
    if run.rank == 0:
        write_json(os.path.join(run.folder, "summary.json"), {
            "seed": args.seed, "recipe": recipes.short(args.recipe), "minutes": round(seconds / 60, 2), "steps": t.step,
            **{f"{short_name(role)}_steps": t.steps[role] for role in t.roles},
            "sampled_tokens": t.state.sampled_tokens, "before": finite(t.state.before), "after": finite(after)})
    show_page(t, None)
    tell_end(t, recipe, after)


def tell_end(t: Play, recipe, after: dict) -> None:
    """Prints the scores of a finished run and where it is, and closes its log."""
    print_table(t.state.before, after, getattr(recipe, "TABLE", None))
    t.run.finish()
    print0(f"\nopen {os.path.join(t.run.folder, 'report.html')} in a browser\nthe run's folder:\n{t.run.folder}")


if __name__ == "__main__":
    script_main(main, make_parser)
