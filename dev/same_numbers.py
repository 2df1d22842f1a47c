"""
Whether a change of the code leaves every recipe's numbers as they are: ten steps of each, on one rank or on two, from
models whose weights are written by hand (tests/conftest.py). What is timed is not compared. On one machine, for another
CPU may round differently.

    python dev/same_numbers.py make same                         # models, and the flags of each run: once, as it is now
    python dev/same_numbers.py run same before --checkout ../as-it-was --ranks 2      # another checkout of the project
    python dev/same_numbers.py run same after --ranks 2
    python dev/same_numbers.py compare same/before same/after    # exit code 1 where anything differs
"""
import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["--num-steps", "10", "--save-every", "4", "--eval-every", "4", "--eval-examples", "4", "--max-new-tokens",
         "16", "--kl-coef", "0.01"]
MORE = {  # what is run beside every recipe's defaults
    "tango": (["--step-rewards", "verdicts", "--credit", "to_go", "--negative-weight", "1", "--no-verify-distinct"],
              ["--num-labelled", "6"], ["--verifier-head", "trunk"],
              ["--verifier-head", "prompt", "--verifier-updates", "summed"]),
    "grpo": (["--updates-per-batch", "2", "--lr-schedule", "linear", "--entropy-coef", "0.01"],
             ["--advantage", "rloo", "--aggregation", "token"], ["--calculator"], ["--log-theory", "2"])}


def make(folder: Path) -> None:
    """Writes the models and the flags of each run."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import conftest
    from test_recipes import OPTIONS

    from nanochat import recipes
    folder.mkdir(parents=True)
    fixture = getattr(conftest.sft_base, "__wrapped__", None) or conftest.sft_base.__pytest_wrapped__.obj
    made = fixture(types.SimpleNamespace(mktemp=lambda name: (folder / name).mkdir() or folder / name))
    os.environ["NANOCHAT_BASE_DIR"] = str(made)
    flags = {}
    for recipe in recipes.names():
        for i, more in enumerate(([], *MORE.get(recipe, ()))):
            flags[f"{recipe}-{i}"] = conftest.rl_flags("--recipe", recipe, *SHORT, *OPTIONS.get(recipe, []), *more)
    (folder / "flags.json").write_text(json.dumps(flags, indent=1))


def run(folder: Path, name: str, checkout: Path, ranks: int) -> None:
    """Makes all runs with the code of a checkout."""
    shutil.copytree(folder / "base", folder / name)
    processes = [multiprocessing.get_context("spawn").Process(target=work, args=(folder, name, checkout, rank, ranks))
                 for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def work(folder: Path, name: str, checkout: Path, rank: int, ranks: int) -> None:
    """A rank's part of all runs."""
    base = folder / name
    sys.path.insert(0, str(checkout))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "WANDB_MODE": "disabled",
                   "NANOCHAT_BASE_DIR": str(base)}
    import torch
    torch.set_num_threads(1)
    if ranks > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{base}/store", rank=rank, world_size=ranks)
    common, tango_rl = (importlib.import_module(module) for module in ("nanochat.common", "scripts.tango_rl"))
    parse = getattr(common, "parse_flags", None) or importlib.import_module("nanochat.cli").parse_flags
    for run_name, flags in json.loads((folder / "flags.json").read_text()).items():
        flags = [word.replace(str(folder / "base"), str(base)) for word in flags]
        with open(base / f"{run_name}.{rank}.log", "w") as f, contextlib.redirect_stdout(f):
            tango_rl.main(parse(tango_rl.make_parser(flags), [*flags, "--run", run_name]))
    os._exit(0)  # Gloo's threads may abort the interpreter's shutdown


def compare(one: Path, two: Path) -> int:
    """Prints what differs. -> how many logs do"""
    sys.path.insert(0, str(ROOT))
    from nanochat.storage.run import MEASURED
    read = lambda path: [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)}
                         for line in path.read_text().splitlines()] if path.exists() else None
    paths = sorted(path.relative_to(one) for path in one.glob("runs/*/*.jsonl"))
    different = [path for path in paths if read(one / path) != read(two / path)]
    print("\n".join([*map(str, different), f"{len(paths)} logs compared, {len(different)} differ"]))
    return len(different)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "run", "compare"])
    parser.add_argument("folders", nargs="+", type=Path, help="make: a folder; run: it, and a name; compare: two")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="run: whose code")
    parser.add_argument("--ranks", type=int, default=1, help="run: on how many processes")
    args = parser.parse_args()
    folders = [folder.resolve() for folder in args.folders]
    if args.what == "make":
        make(*folders)
    elif args.what == "run":
        run(folders[0], folders[1].name, args.checkout.resolve(), args.ranks)
    else:
        sys.exit(bool(compare(*folders)))
