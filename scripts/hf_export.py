"""
Exports a checkpoint of an imported model, generator or verifier: to a folder that transformers opens, and the hub takes
with --push, or to a GGUF file that llama.cpp runs. What it was trained on, its scores and how it is to be asked are
printed, and stand in the folder's README.md.

    python -m scripts.hf_export --model-tag tango-gen --to ~/models/tango-generator
    python -m scripts.hf_export --model-tag tango-gen --to ~/models/tango-generator --push owner/tango-generator
    python -m scripts.hf_export --model-tag tango-gen --to ~/models/tango-generator.gguf --dtype q8_0
"""
import os

import torch

from nanochat import recipes
from nanochat.checkpoint import find_step, history_of, load_meta, load_model, load_state_dict
from nanochat.cli import check_name, flag_defaults, new_parser, script_main, shown_flag
from nanochat.common import BadInput, dtype_name, print0
from nanochat.hf.card import block, code, head, licence_text, table
from nanochat.hf.decoder import DecoderConfig
from nanochat.hf.files import DTYPES, new_path, write_model
from nanochat.hf.gguf_out import describe, write_gguf
from nanochat.hf.hub import check_repo_name, claim_repo, push_folder
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.own_code import is_file, short
from nanochat.rl.run.progress import score_rows
from nanochat.storage.files import found_at, path_of, read_json, read_records, reading, whole_file
from scripts import chat_sft, tango_rl
from tasks import format_of
from tasks.formats import PROMPTS, Format

HIDDEN = {*PROMPTS, "seed", "recipe", "task", "role"}  # flags that a card has elsewhere


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("--stage", choices=["sft", "rl"], default="rl", help="stage of the checkpoint")
    parser.add_argument("--model-tag", required=True, help="its tag; of a run: <run>-gen or <run>-ver")
    parser.add_argument("--step", type=int, default=-1, help="-1 = the last")
    parser.add_argument("--to", required=True, help="the folder to make, or the file, whose name ends in .gguf")
    parser.add_argument("--dtype", choices=[*DTYPES, "q8_0"], default="bfloat16",
                        help="of the weights; q8_0: a GGUF file's, quantised to 8 bits")
    parser.add_argument("--push", default="", metavar="OWNER/NAME",
                        help="also send the folder to the hub, as a new private model or into an empty one")
    return parser


# The card

def own_words(value):
    """A flag's value, the home folder in it as ~: cards are shown to others."""
    if isinstance(value, list):
        return [own_words(one) for one in value]
    return value.replace(os.path.expanduser("~"), "~") if isinstance(value, str) else value


def flags_of(record: dict) -> list[str]:
    """The flags of a stage that are not the defaults, as they stand on a command line; all those that a file of the
    user's has added. record: of a history."""
    given, recipe = record["user_config"], record["user_config"].get("recipe")
    argv = ["--recipe", recipe if recipe in recipes.names() else "grpo"]  # which has no flags of its own
    defaults = flag_defaults(chat_sft.make_parser() if record["stage"] == "sft" else tango_rl.make_parser(argv))
    return [shown_flag(name, own_words(value)) for name, value in given.items()
            if name not in HIDDEN and (name not in defaults or value != defaults[name])]


def stage_lines(record: dict) -> list[str]:
    """What a card says of one stage of training. record: of a history."""
    given, recipe = record["user_config"], record["user_config"].get("recipe")
    role = record.get("role") or given.get("role")
    system = "supervised fine-tuning" if record["stage"] == "sft" else "reinforcement learning"
    if recipe:
        cited = recipes.cited(recipes.load(recipe)) if recipe in recipes.names() else "a recipe of its own"
        system += f", recipe {code(short(recipe))} ({cited})"
    flags = flags_of(record)
    return ["", f"**{record['stage'].upper()}** of {code(record['tag'])}, step {record['step']}: {system}.", "",
            f"- role: {code(role) if role else 'not known'}", f"- task: {code(own_words(given.get('task') or 'none'))}",
            f"- seed: {code(given.get('seed', 'not known'))}", f"- commit: {code(record.get('commit') or 'not known')}",
            "", *(["Flags that differ from the defaults:", *block("\n".join(flags))] if flags else
                  ["All other flags are the defaults."])]


def score_lines(stage: str, tag: str, meta: dict) -> list[str]:
    """What a card says of a checkpoint's held-out scores: those that its run measured at this step."""
    given, step = meta["user_config"], meta["step"]
    if stage == "sft":
        path = path_of("sft", tag, "metrics.jsonl")
        found = [r for _, r in read_records(path) if r["step"] == step - 1] if os.path.exists(path) else []
        losses = [r["val_loss"] for r in found if isinstance(r.get("val_loss"), float)]
        return [f"Loss per token on {given.get('eval_examples')} held-out demonstrations: {losses[-1]:.4f}."
                ] if losses else ["None were measured at this step."]
    folder = path_of("runs", str(meta.get("run")))
    summary, config = (read_json(path) if os.path.exists(path) else {}
                       for path in (os.path.join(folder, name) for name in ("summary.json", "config.json")))
    if summary.get("steps") != step:
        return ["None were measured at this step, or the run's summary is not there."]
    recipe = given.get("recipe")
    names = getattr(recipes.load(recipe), "TABLE", None) if recipe in recipes.names() else None
    (_, shares), (_, others) = score_rows(summary["before"], summary["after"], names, config.get("words", {}))
    cell = lambda value, scale: "-" if value is None else f"{scale * value:.{1 if scale == 100 else 3}f}"
    rows = [[code(label), cell(old, scale), cell(new, scale)] for part, scale in ((shares, 100), (others, 1))
            for label, old, new in part]
    return [f"Of the run {code(meta['run'])}, before its first step and after this one, on at most "
            f"{given.get('eval_examples')} held-out problems of each split. Shares are in percent.",
            *table(["score", "before", "after"], rows)]


def prompt_lines(role: str | None, fmt: Format | None) -> list[str]:
    """How a checkpoint is to be asked. role: that it was trained in, None where nobody knows."""
    if fmt is None:
        return ["It was trained on no task there, so it has no prompt of its own."]
    lines = ["It was trained on these messages, in the chat template of its tokenizer."]
    for name, fields in PROMPTS.items():
        of_others = {"generator": "verifier_prompt", "verifier": "generator_prompt"}.get(role)
        if getattr(fmt, name) and name != of_others:
            text = getattr(fmt, name)
            text = text.format(**{field: f"{{{field}}}" for field in fields}) if fields else text
            lines += ["", f"The user's message, to the {name[:-7]}:" if fields else "The system message:", *block(text)]
    return lines


def model_card(stage: str, tag: str, meta: dict, path: str) -> tuple[str, dict]:
    """A checkpoint's card, and what is known of the model that training began with. path: of its meta. To be called
    under `reading`."""
    history, recorded = history_of(stage, tag, meta), meta["user_config"]
    first, trained = history[0], [record for record in history if record.get("user_config")]
    origin, role, recipe = first.get("origin", {}), meta.get("role") or recorded.get("role"), recorded.get("recipe")
    start = origin.get("name") or os.path.basename(first.get("imported_from", "").rstrip("/"))
    bases = [base for base in origin.get("base_models", []) if base != start]
    tags = ["nanochat-tango", *filter(None, [role, recipe if recipe in recipes.names() else None])]
    asked = ([f"How it is asked is in the task's file, {code(own_words(recorded['task']))}."]
             if is_file(str(recorded.get("task"))) else prompt_lines(role, format_of(recorded, path)))
    lines = [f"# {tag}, step {meta['step']}", "", "Made with nanochat-tango.", "",
             f"- began as: {code(start) if start else 'not known'}",
             *([f"- which was made from: {', '.join(map(code, bases))}"] if bases else []),
             f"- licence of that: {licence_text(origin)}", "",
             "## Training", *[line for record in trained for line in stage_lines(record)],
             *([] if trained else ["", "None: it is as it was imported."]),
             "", "## Scores", "", *score_lines(stage, tag, meta), "", "## Prompts", "", *asked, ""]
    return head(origin, tags) + "\n" + "\n".join(lines), origin


def check_target(args) -> tuple[str, bool]:
    """The folder or file to make, and whether it is a GGUF file. Raises BadInput."""
    check_name("--model-tag", args.model_tag)
    path, is_gguf = new_path("--to", args.to), args.to.endswith(".gguf")
    if args.dtype not in DTYPES and not is_gguf:
        raise BadInput(f"--dtype {args.dtype}: is of GGUF files, and --to {args.to} does not end in .gguf")
    if args.push:
        check_repo_name(args.push)
        if is_gguf:
            raise BadInput(f"--push {args.push}: sends a folder, and --to {args.to} is a file")
    return path, is_gguf


def main(args) -> None:
    target, is_gguf = check_target(args)
    step = find_step(args.stage, args.model_tag, None if args.step < 0 else args.step)
    path = found_at(args.stage, args.model_tag, f"meta_{step:06d}.json")
    meta, config = load_meta(path)
    if not isinstance(config, DecoderConfig):
        raise BadInput(f"--model-tag {args.model_tag}: is nanochat's own model, which transformers does not know; "
                       f"only imported ones can be exported")
    with reading(path):
        card, origin = model_card(args.stage, args.model_tag, meta, path)
    tokenizer = load_tokenizer(path_of("tokenizer"))
    described = describe(config, tokenizer, args.dtype, args.model_tag, origin) if is_gguf else None
    address = claim_repo(args.push) if args.push else None
    model, _ = load_model(args.stage, args.model_tag, torch.device("cpu"), torch.float32, step)
    if is_gguf:
        write_gguf(target, model.config, model.state_dict(), args.dtype, described)
    else:
        write_model(target, model.config, model.state_dict(), DTYPES[args.dtype], tokenizer)
        with whole_file(os.path.join(target, "README.md")) as f:
            f.write(card)
    held = load_state_dict(path_of(args.stage, args.model_tag, f"model_{step:06d}.pt")).values()
    kinds = " and ".join(sorted({dtype_name(tensor.dtype) for tensor in held}))
    print0(f"{path_of(args.stage, args.model_tag)} at step {step}, {kinds} -> {target}, {args.dtype}\n")
    print0(card)
    if address:
        size = push_folder(target, args.push)
        print0(f"sent {len(os.listdir(target))} files, {size / 1e6:.1f} MB, to {address}; a model that this made is "
               f"private until its settings there say otherwise")


if __name__ == "__main__":
    script_main(main, make_parser())
