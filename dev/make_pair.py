"""
Makes the pair that comes with the project, nanochat/pair: the models of a finished run of the main job, before and
after RL, in bf16 under the names pair, pair-gen and pair-ver, with the run's folder and the tokenizer.

    bash runs/runcpu.sh
    NANOCHAT_BASE_DIR=~/.cache/nanochat-tango-cpu python dev/make_pair.py chain-s0

made.json says from what run and commit, and what scripts.demo counts of the models as they ship.
"""
import json
import os
import shutil
from collections import Counter

import torch

from nanochat.checkpoint import fingerprint, load_state_dict, save_atomic
from nanochat.cli import new_parser, parse_flags, script_main
from nanochat.common import print0
from nanochat.rl.report.report import read_run, run_folder
from nanochat.storage.files import (PAIR, STAGE_FOLDERS, json_lines, make_folder, path_of, read_json, whole_file,
                                    whole_folder, write_json)
from scripts import demo

NUM_SCORED = 100  # as scripts.demo does by itself
ROLLOUTS_EVERY = 10  # steps of which one keeps its rollouts
RUN_FILES = ("metrics.jsonl", "rollouts.jsonl", "examples.jsonl")


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("run", help="the finished run")
    return parser


def renamed(value, names: dict[str, str]):
    """A record in which names of a run and of models are others."""
    if isinstance(value, dict):
        return {key: renamed(inner, names) for key, inner in value.items()}
    return names.get(value, value) if isinstance(value, str) else value


def counts() -> dict[str, dict[str, int]]:
    """What scripts.demo counts on NUM_SCORED held-out problems, before and after RL."""
    args = parse_flags(demo.make_parser(), ["pair", "--num-scored", str(NUM_SCORED), "--device-type", "cpu"])
    task, _, solved = demo.solved_again(read_run(run_folder("pair")), args)
    return {when: dict(sum((demo.describe(task, False, *row)[1] for row in rows), Counter()))
            for when, rows in solved.items()}


def copy_model(stage: str, tag: str, step: int, pair: str, name: str, names: dict[str, str]) -> int:
    """Writes a model's weights in bf16, and its meta with the pair's names. -> the fingerprint of what was written."""
    folder = os.path.join(pair, STAGE_FOLDERS[stage], name)
    path = os.path.join(folder, f"model_{step:06d}.pt")
    weights = load_state_dict(path_of(stage, tag, f"model_{step:06d}.pt"))
    save_atomic({key: tensor.to(torch.bfloat16) for key, tensor in weights.items()}, path)
    meta = read_json(path_of(stage, tag, f"meta_{step:06d}.json"))
    write_json(os.path.join(folder, f"meta_{step:06d}.json"), renamed(meta, names))
    return fingerprint(path)


def copy_run(folder: str, pair: str, config: dict, names: dict[str, str]) -> None:
    """Writes a run's folder, with the rollouts of one step in ROLLOUTS_EVERY."""
    to = os.path.join(pair, "runs", "pair")
    make_folder(to)
    for name in RUN_FILES:
        every = ROLLOUTS_EVERY if name == "rollouts.jsonl" else 1
        rows = [row for _, row in json_lines(os.path.join(folder, name)) if row["step"] % every == 0]
        with whole_file(os.path.join(to, name)) as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
    write_json(os.path.join(to, "summary.json"), renamed(read_json(os.path.join(folder, "summary.json")), names))
    write_json(os.path.join(to, "config.json"), renamed(config, names))


def main(args) -> None:
    run = read_run(run_folder(args.run))
    checkpoints = demo.find_checkpoints(run, ["generator", "verifier"])
    tag = checkpoints["before"]["generator"][1]
    names = {run.name: "pair", tag: "pair", f"{run.name}-gen": "pair-gen", f"{run.name}-ver": "pair-ver",
             f"{tag}-ver": "pair-ver"}
    shutil.rmtree(PAIR, ignore_errors=True)
    with whole_folder(PAIR) as pair:
        for when, found in checkpoints.items():
            for role, (stage, tag, step) in found.items():
                mark = copy_model(stage, tag, step, pair, names[tag], names)
                if when == "before":
                    run.config["starts"][role]["fingerprint"] = mark
        copy_run(run_folder(args.run), pair, run.config, names)
        shutil.copytree(path_of("tokenizer"), os.path.join(pair, "tokenizer"))
    made = {"command": "bash runs/runcpu.sh", "run": run.name, "commit": run.config.get("commit"),
            "problems": NUM_SCORED, "demo": counts()}
    write_json(os.path.join(PAIR, "made.json"), made)
    print0(json.dumps(made, indent=2))


if __name__ == "__main__":
    script_main(main, make_parser())
