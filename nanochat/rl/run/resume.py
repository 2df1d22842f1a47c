"""
What a run may be continued with.
"""
import json
import os
import re
from collections import Counter

from nanochat.checkpoint import begun_steps, list_steps, saved_steps
from nanochat.cli import check_unchanged, continuing
from nanochat.common import BadInput
from nanochat.hf.files import read_json
from nanochat.own_code import both_files
from nanochat.storage.files import found_at, path_of, read_records

# Flags that may differ between a run and its continuation; any other would make it another run.
MAY_CHANGE = {"num_steps", "resume_from_step", "device_type", "save_every", "keep", "eval_every", "log_rollouts",
              "micro_batch_tokens", "lr", "prefix_sharing", "max_grad_norm", "recompute", "max_rows",
              "max_cached_tokens", "dry_run"}


def resolve_resume(args, defaults: dict, may_change: set[str], tags: dict[str, bool]) -> tuple[int | None, str]:
    """The step that --resume-from-step means for --run: None for a fresh start; and what is to be said of it once
    nothing is refused any more. may_change: flags beside MAY_CHANGE; tags: of the roles' checkpoints, and whether they
    are trained. Raises BadInput for what cannot be continued."""
    folder, steps, asked = path_of("runs", args.run), saved_steps(args.run), args.resume_from_step
    if asked == "-1":
        if steps or has_records(folder):
            saved = f"its last checkpoint is of step {steps[-1]}" if steps else "it has no checkpoint"
            afresh = "" if steps or models_saved(args.run, tags) else ", which starts it afresh"
            raise BadInput(f"--run {args.run}: {folder} exists, {saved}; take another name, or continue it with "
                           f"--resume-from-step auto{afresh}")
        return None, ""
    if args.run == "dummy":
        raise BadInput(f"--resume-from-step {asked}: name the run to continue with --run (a dummy run's is dummy-<n>)")
    if not re.fullmatch("auto|[0-9]{1,18}", asked):
        raise BadInput(f"--resume-from-step {asked}: must be -1 (off), auto or a step")
    if asked == "auto":
        check_last_set(args.run, folder, steps, tags)
        if not steps:
            check_records(args.run, folder, 0)
            return None, f"run {args.run} has no checkpoint: it starts from step 0"
    step = steps[-1] if asked == "auto" else int(asked)
    if step not in steps:
        raise BadInput(f"run {args.run} has no complete checkpoint of step {step}; there are: "
                       f"{', '.join(map(str, steps)) or 'none'}")
    check_records(args.run, folder, step)
    before = read_config(args.run)["args"]
    may_change = may_change | both_files(before, args)
    if before.get("recipe", args.recipe) != args.recipe and "recipe" not in may_change:
        raise BadInput(f"--recipe {args.recipe}: run {args.run} is of recipe {before['recipe']}; a continued run "
                       f"cannot change it")
    changed = [words for words in check_unchanged(f"run {args.run}", before, args, MAY_CHANGE | may_change, defaults)
               if not words.startswith("--resume-from-step ")]
    said = continuing(f"run {args.run}", step, changed, args, defaults)
    if before.get("num_steps", args.num_steps) != args.num_steps:
        said += (f"\nwhat is scheduled over all steps, as --lr-schedule and a recipe's weights are, goes on as in a "
                 f"run of {args.num_steps} steps")
    return step, said


def check_no_models(run_name: str, tags: list[str]) -> None:
    """Raises BadInput where a run that starts afresh would remove the models of an older one, whose folder is gone."""
    if os.path.exists(path_of("runs", run_name, "config.json")):
        return
    for tag in tags:
        if steps := list_steps("rl", tag):
            raise BadInput(f"--run {run_name}: {found_at('rl', tag)} holds step {steps[-1]} of an older run of this "
                           f"name; take another name" + ", or remove it" * os.path.exists(path_of("rl", tag)))


def check_problems_stayed(run_name: str, task_name: str, digests: list[int]) -> None:
    """Raises BadInput where problems_digest or texts_digest are not those that the run was started with."""
    config = read_config(run_name)
    if [config.get("problems", digests[0]), config.get("texts", digests[1])] != digests:  # older runs do not tell
        raise BadInput(f"run {run_name} was started with other problems of task {task_name} or another tokenizer: "
                       f"put its data file, its code or the tokenizer back as it was, or start a new run")


def check_last_set(run_name: str, folder: str, steps: list[int], tags: dict[str, bool]) -> None:
    """Raises BadInput where a run has lost the state that its last models were saved with: to go on would do the steps
    after an earlier one again, and remove what is left of the last. tags: as in resolve_resume."""
    # without records it is check_no_models' to tell
    saved = max(models_saved(run_name, tags), default=0) if has_records(folder) else 0
    if steps and not has_records(folder, saved):
        saved = 0  # a kill in a save of an older version leaves models without a state too
    made = max(finished_step(folder), saved)
    if made > max(steps, default=0):
        name = os.path.join(folder, f"state_{made:06d}.pt")
        raise BadInput(f"run {run_name} was saved after step {made}, and {name} is missing: put it back, or "
                       + (f"name the step to go on from; there are: {', '.join(map(str, steps))}" if steps else
                          f"remove {', '.join(path_of('rl', tag) for tag in tags)} to start afresh"))


def finished_step(folder: str) -> int:
    """The step after which a run was finished, 0 where no summary tells."""
    try:
        with open(os.path.join(folder, "summary.json"), encoding="utf-8") as f:
            return int(json.load(f)["steps"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0


def models_saved(run_name: str, tags: dict[str, bool]) -> set[int]:
    """The steps at which all roles have a model, and those that are trained an optimizer, but for those of a set that
    was being written when the run was cut off."""
    return set.intersection(*({step for step in list_steps("rl", tag) if not is_trained
                               or os.path.exists(path_of("rl", tag, f"optim_{step:06d}_rank0.pt"))}
                              for tag, is_trained in tags.items())) - begun_steps(run_name)


def check_records(run_name: str, folder: str, step: int) -> None:
    """Raises BadInput unless metrics.jsonl has each step before this one once, and the other logs are readable."""
    path, *others = (os.path.join(folder, name) for name in ("metrics.jsonl", "rollouts.jsonl", "examples.jsonl"))
    counts = Counter(record["step"] for _, record in read_records(path)) if os.path.exists(path) else {}
    if twice := [number for number, count in counts.items() if count > 1]:
        raise BadInput(f"{path} has step {twice[0]} twice: two processes were at work on the run; take one record out")
    for other in filter(os.path.exists, others):
        read_records(other)
    if missing := set(range(step)) - counts.keys():
        raise BadInput(f"{path} has no record of step {min(missing)}, and run {run_name} would go on from step {step}: "
                       f"the file was cut; put it back, or take another name")


def has_records(folder: str, step: int = 0) -> bool:
    """Whether a run has a record of this step or a later one."""
    path = os.path.join(folder, "metrics.jsonl")
    return os.path.exists(path) and any(record["step"] >= step for _, record in read_records(path))


def read_config(run_name: str) -> dict:
    """A run's config.json. Raises BadInput where it is none."""
    path = path_of("runs", run_name, "config.json")
    config = read_json(path)
    try:
        starts = (config.get("starts") or {}).values()
        is_whole = (isinstance(config["args"], dict) and isinstance(config.get("resumed", []), list)
                    and all(isinstance(start["step"], int) and "fingerprint" in start for start in starts))
    except (AttributeError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise BadInput(f"{path} is no run's configuration, or not as it was written")
    return config
