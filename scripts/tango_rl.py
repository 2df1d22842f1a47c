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
import os
import time
from contextlib import suppress
from functools import partial
from types import ModuleType

from nanochat import recipes
from nanochat.checkpoint import describe_disk, saved_steps, saying_what_is_whole
from nanochat.cli import flag_defaults, new_parser, read_flags, script_main
from nanochat.common import BadInput, CannotWrite, Diverged, StopRequested, dtype_name, finite, gather_lists, print0
from nanochat.hf.files import read_json
from nanochat.rl.learn.roles import check_same_weights, short_name, trained_roles
from nanochat.rl.learn.state import drop_sets_after, save_set, tag_of
from nanochat.rl.play.play import Play
from nanochat.rl.records.outcomes import words_of
from nanochat.rl.run.flags import add_common_args
from nanochat.rl.run.prepare import prepare
from nanochat.rl.run.progress import print_table
from nanochat.rl.run.resume import read_config
from nanochat.rl.run.steps import held_out, make_step, show_page, start_state
from nanochat.storage.files import path_of, write_json
from nanochat.storage.run import add_run_args
from tasks import add_task_args

CHECK_EVERY = 50  # steps between comparisons of the ranks' weights, which are compared before they are saved too


# Flags

def make_parser(argv: list[str] | tuple = (), recipe: str = "tango"):
    """The flags that all recipes share, and those of the recipe that argv names. Raises BadInput."""
    parser = new_parser(__doc__)
    add_run_args(parser)
    parser.add_argument("--recipe", default=recipe,
                        help=f"one of: {', '.join(recipes.names())}; or a file (a path that ends in .py)")
    parser.add_argument("--list-recipes", action="store_true", help="print what each recipe is, and stop")
    add_common_args(parser)
    add_task_args(parser)
    name = recipes.recipe_of(argv, recipe)
    recipes.add_recipe_args(parser, recipes.load(name), name)
    try:
        parser.format_help()
    except (TypeError, ValueError, KeyError) as error:
        raise BadInput(f"--recipe {name}: help of its flags: {error} (a percent sign is written %%)") from None
    parser.explain = partial(recipes.explain_unknown_flag, name=recipes.short(name),
                             known=list(parser._option_string_actions))
    return parser


def main(args) -> None:
    if args.list_recipes:
        print0("\n".join(recipes.describe()))
        return
    t, recipe = prepared(args)
    if t is not None:
        carry_out(t, recipe)


# In a program or a notebook: t, recipe = begin(["--model-tag", "d4"]), and carry_out(t, recipe)

def begin(flags: list[str]) -> tuple[Play | None, ModuleType]:
    """The run that these flags ask for, ready for its first step, and its recipe. The run is None with --dry-run.
    Raises BadInput."""
    return prepared(read_flags(make_parser, flags))


def prepared(args) -> tuple[Play | None, ModuleType]:
    """The same of parsed flags."""
    recipe = recipes.load(args.recipe)
    return prepare(args, recipe, flag_defaults(make_parser(["--recipe", args.recipe]))), recipe


def carry_out(t: Play, recipe) -> None:
    """The run from where it is to its end: evaluation, steps, evaluation, summary. A request to stop saves it first."""
    how = f"the same flags, --run {t.args.run} and --resume-from-step auto"
    with saying_what_is_whole(lambda: saved_steps(t.args.run), how), t.run.writer:
        _carry_out(t, recipe)


# The loop

def train(t: Play, recipe) -> None:
    """Steps of the recipe until its first trained role has made --num-steps updates, or --token-budget is spent. Raises
    Diverged where it never will, and where the ranks' weights have become different."""
    counted, most = trained_roles(recipe.ROLES)[0], 10 * (sum(t.totals.values()) + 1)
    while not t.is_over(counted):
        if t.step > most:
            raise Diverged(f"in {t.step} steps the {counted} has made {t.steps[counted]} of its {t.args.num_steps} "
                           f"updates; the recipe planned {sum(t.totals.values())} of all roles")
        make_step(t, recipe, counted, most)
        is_saved = t.args.save_every and t.step % t.args.save_every == 0
        if is_saved or t.step % CHECK_EVERY == 0:
            check_same_weights(t.roles, t.step)
        if is_saved:
            save_set(t.run, t.state, t.roles, t.args)
    check_same_weights(t.roles, t.step)


def _carry_out(t: Play, recipe) -> None:
    args, run, is_resumed = t.args, t.run, t.run.resumed_from is not None
    print0(f"run {args.run} in {run.folder}: {recipes.short(args.recipe)} on {run.world} x {t.device}, "
           f"{dtype_name(next(iter(t.roles.values())).model.compute_dtype)}"
           + (f", continued after step {t.step}" if is_resumed else ""))
    is_started = is_resumed
    try:
        drop_sets_after(run, t.step, t.roles)  # first: a set whose records are gone could not be continued
        run.trim("metrics.jsonl", t.step)
        run.trim("rollouts.jsonl", t.step)
        run.trim("examples.jsonl", t.step + 1)  # an evaluation after the last step is not made again
        if not is_started:
            start_state(t, recipe)
            is_started = True
        after, seconds = finished_scores(t, recipe), None
        if after is None:
            after, seconds = run_to_the_end(t, recipe)
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
    if seconds is not None:
        write_summary(t, after, seconds)
    print_table(t.state.before, after, getattr(recipe, "TABLE", None), words_of(t.task))
    run.finish()
    if run.rank == 0:
        print0(describe_disk([*(path_of("rl", tag_of(args.run, role)) for role in t.roles), run.folder]))
    print0(f"\nopen {os.path.join(run.folder, 'report.html')} in a browser\nthe run's folder:\n{run.folder}")


def run_to_the_end(t: Play, recipe) -> tuple[dict, float]:
    """The steps that are left, and the evaluation after them. -> its scores, and the seconds of the whole run"""
    show_page(t, f"under way, after step {t.step}")
    print0(f"its report, which grows with it, to be opened in a browser: {os.path.join(t.run.folder, 'report.html')}")
    train(t, recipe)
    save_set(t.run, t.state, t.roles, t.args)
    started = time.time()
    after = held_out(t, recipe)
    t.run.writer.finish()
    return after, t.state.start_seconds + t.state.step_seconds + t.state.eval_seconds + time.time() - started


def finished_scores(t: Play, recipe) -> dict | None:
    """The scores at the end of a run that has made all steps, if no flag was changed since. None where it goes on, or
    is evaluated again. The first rank reads them."""
    if not t.is_over(trained_roles(recipe.ROLES)[0]):
        t.run.remove("summary.json")  # a finished run that goes on is not finished
        return None
    found = []
    if t.run.rank == 0:
        path = os.path.join(t.run.folder, "summary.json")
        is_same = not any(r["changed"] for r in read_config(t.args.run).get("resumed", []) if r["step"] == t.step)
        found = [read_json(path).get("after") if is_same and os.path.exists(path) else None]
    after = gather_lists(found, t.device)[0]
    print0("all steps are made, with these flags: its scores are as they were" if after else
           "all steps are made: it is evaluated again")
    return after or None


def write_summary(t: Play, after: dict, seconds: float) -> None:
    """summary.json and the finished run's page."""
    if t.run.rank == 0:
        write_json(os.path.join(t.run.folder, "summary.json"), {
            "seed": t.args.seed, "recipe": recipes.short(t.args.recipe), "minutes": round(seconds / 60, 2),
            "steps": t.step, **{f"{short_name(role)}_steps": t.steps[role] for role in t.roles},
            "sampled_tokens": t.state.sampled_tokens, "before": finite(t.state.before), "after": finite(after)})
    show_page(t, None)


if __name__ == "__main__":
    script_main(main, make_parser)
