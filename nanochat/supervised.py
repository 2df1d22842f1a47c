"""
What pretraining and SFT have in common: their checkpoints, how a run begins, and how it ends.

A training `t` has args, stage, tag, model, optimizers, state (with the step), run, save() and save_after_bad_input().
Its files of a step are the model, its meta, and what training goes on from (train_{step:06d}_rank{r}.pt), whose name
upstream's scripts do not take for an optimizer of theirs.
"""
import contextlib
import copy
import os
import re

from nanochat.checkpoint import (drop_old_sets, list_steps, load_file, load_meta, restore_optimizer, save_atomic,
                                 save_meta, saying_what_is_whole, spared_steps)
from nanochat.cli import at_least, check_unchanged, continuing, in_words
from nanochat.common import BadInput, CannotWrite, Diverged, StopRequested, dtype_name, print0, rank_and_world
from nanochat.engine import generate, row_key
from nanochat.own_code import both_files
from nanochat.storage.files import check_writable, found_at, path_of
from nanochat.storage.run import add_keep_arg, describe_versions, look_at, start_run, uses_wandb
from nanochat.weights import check_weights, is_sharded, local_optimizer_state, refresh, whole_state


def add_checkpoint_args(parser, may_change: set[str]) -> None:
    parser.add_argument("--resume-from-step", default="-1",
                        help=f"continue from this step, or from the last one with 'auto'; -1 = a fresh start; "
                             f"{in_words(may_change)}")
    parser.add_argument("--save-every", type=at_least(-1), default=-1,
                        help="steps between checkpoints; -1 = at the end only")
    add_keep_arg(parser)


def save_training(t, state: dict, meta: dict, *, per_rank: bool) -> None:
    """Copies a model and what its training goes on from to the host, and has them written in the background: rank 0 the
    model and the optimizers (of a sharded model each rank its part), and where they differ (per_rank) every rank its
    own state. The model's meta goes last and makes the step valid; steps older than the last --keep are removed then. A
    collective. Raises Diverged where weights are not finite."""
    check_weights(t.model, "model")
    run, step, folder = t.run, t.state["step"], path_of(t.stage, t.tag)
    with run.writer.saving():
        to_host, rank, files = run.writer.to_host, run.rank, {}
        weights = whole_state(t.model, rank == 0, to_host)
        if rank == 0 or per_rank:
            is_mine = rank == 0 or is_sharded(t.model)
            states = [local_optimizer_state(optimizer, to_host) for optimizer in t.optimizers] if is_mine else []
            files[f"train_{step:06d}_rank{rank}.pt"] = {
                "optimizers": states, "world": run.world, "dtype": dtype_name(t.model.compute_dtype),
                "state": dict(t.state), **copy.deepcopy(state)}
        if rank == 0:
            files[f"model_{step:06d}.pt"] = weights

        def write() -> list:
            for name, held in files.items():
                save_atomic(held, os.path.join(folder, name))
            return []

        def mark(_) -> None:
            if rank == 0:
                save_meta(t.stage, t.tag, step, t.model, meta)
                spared = spared_steps(run, t.args.resume_from_step, t.stage, [t.tag])
                drop_old_sets(run, os.path.join(folder, "meta_{}.json"), [folder], t.args.keep, step, spared)
        run.writer.start(write, mark)


def load_training(t, step: int, *, per_rank: bool, parts: tuple[str, ...] = ()) -> dict:
    """Restores the optimizers and the state of a training; what else this rank saved, which has these parts. per_rank:
    states, or parts of sharded optimizers, differ, so the number of ranks may not. Raises BadInput."""
    path = path_of(t.stage, t.tag, f"train_{step:06d}_rank0.pt")
    saved, (rank, world) = load_file(path), rank_and_world()
    if not isinstance(saved, dict) or not {"optimizers", "world", "state", *parts} <= saved.keys():
        raise BadInput(f"{path} is not what training goes on from: it lacks {', '.join(['state', *parts])} or "
                       f"optimizers")
    if per_rank and saved["world"] != world:
        raise BadInput(f"{path}: was saved by {saved['world']} ranks and can be continued by as many, not by {world}")
    mine = load_file(path_of(t.stage, t.tag, f"train_{step:06d}_rank{rank}.pt")) if per_rank and rank else saved
    states = mine["optimizers"] or saved["optimizers"]
    if len(states) != len(t.optimizers):
        raise BadInput(f"{path} does not fit: it has {len(states)} optimizers, not {len(t.optimizers)}")
    for optimizer, state in zip(t.optimizers, states, strict=True):
        restore_optimizer(optimizer, state, path)
    t.state = mine["state"]
    return mine


def resumable_steps(stage: str, tag: str) -> list[int]:
    """Steps after which training can go on, ascending."""
    return [step for step in list_steps(stage, tag)
            if os.path.exists(path_of(stage, tag, f"train_{step:06d}_rank0.pt"))]


def resume_step(stage: str, tag: str, args, may_change: set[str],
                defaults: dict) -> tuple[int | None, dict[str, int], str]:
    """The step that --resume-from-step means, None for a fresh start; what was seen of the folder before (run.look_at);
    and what is to be said of it once nothing is refused any more. args must be those of the checkpoint's meta but for
    may_change; defaults are of flags that it may not know. Raises BadInput for what cannot be continued, or not be
    written."""
    uses_wandb(args.run)
    wanted, folder = args.resume_from_step, found_at(stage, tag)
    check_writable(folder)
    seen = look_at(folder)
    steps, saved = resumable_steps(stage, tag), list_steps(stage, tag)
    if wanted == "-1" and saved:
        raise BadInput(f"{folder} holds a model, of step {saved[-1]}: take another tag"
                       + ", or continue it with --resume-from-step auto" * bool(steps))
    if wanted == "-1" or wanted == "auto" and not saved:
        return None, seen, ""
    if wanted == "auto" and not steps:  # a model that is not finished is refused later
        steps = saved
    if wanted != "auto" and not re.fullmatch("[0-9]{1,18}", wanted):
        raise BadInput(f"--resume-from-step {wanted}: must be -1 (off), auto or a step")
    step = steps[-1] if wanted == "auto" else int(wanted)
    if step not in steps:
        raise BadInput(f"{folder} has no step {step} to continue from; there are: "
                       f"{', '.join(map(str, steps)) or 'none'}")
    meta, _ = load_meta(found_at(stage, tag, f"meta_{step:06d}.json"))
    before = meta["user_config"]
    changed = [words for words in check_unchanged(folder, before, args, may_change | both_files(before, args), defaults)
               if not words.startswith("--resume-from-step ")]
    return step, seen, continuing(folder, step, changed, args, defaults)


def begin_run(t, device, seen: dict[str, int], resumed: int | None, said: str) -> None:
    """Opens the run of a training at its step, and says what resume_step has to say. seen, and what is refused: as in
    start_run."""
    t.run = start_run(t.args, device, {"args": vars(t.args), "world": rank_and_world()[1], **describe_versions()}, seen,
                      resumed is not None, path_of(t.stage, t.tag))
    t.run.resumed_from = resumed
    if said:
        print0(said)
    t.run.trim("metrics.jsonl", t.state["step"])


def check_skipped(state: dict) -> None:
    """Raises Diverged where three steps in a row moved nothing."""
    if state["skipped"] == 3:
        raise Diverged(f"step {state['step'] - 1}: loss or gradient was not finite three times in a row; lower the "
                       f"learning rates")


def greedy_texts(model, tokenizer, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
    """What the model writes after each prompt, likeliest token by likeliest token. A collective where it is sharded."""
    refresh(model)
    out = generate(model, prompts, 1, max_new_tokens=max_new_tokens, stop_tokens=tokenizer.stop_tokens,
                   keys=[row_key(i) for i in range(len(prompts))], temperature=0)
    rows = zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)
    return [tokenizer.decode(row[:length]) for row, length in rows]


@contextlib.contextmanager
def writing_checkpoints(t):
    """Around a run: what is being written is written to its end, and a CannotWrite says what is whole."""
    with saying_what_is_whole(lambda: resumable_steps(t.stage, t.tag),
                              "the same flags and --resume-from-step auto"), t.run.writer:
        yield


@contextlib.contextmanager
def saved_when_stopped(t):
    """Around the steps of a run: what stops them saves what there is."""
    run = t.run
    try:
        yield
    except CannotWrite:  # the log, where its folder was moved: the model may be written all the same
        if run.world == 1 and t.state["step"]:
            with contextlib.suppress(CannotWrite):
                t.save()
                run.writer.finish()
        raise
    except BadInput as error:
        if step := t.state["step"]:
            error = BadInput(f"{error}; the model after step {step} is saved{t.save_after_bad_input()}")
        run.writer.finish()
        run.finish()
        raise error from None
    except StopRequested:
        if t.state["step"]:
            t.save()
        run.writer.finish()
        run.finish()
        raise StopRequested(f"stopped after step {t.state['step']}; go on with the same flags and "
                            f"--resume-from-step auto") from None
