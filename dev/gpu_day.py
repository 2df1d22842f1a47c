"""
Everything that only a GPU can tell, stage by stage: each has its own time limit, a failed one does not stop the next,
and each adds rows to the table "GPU days" of dev/BENCH.md as soon as it has ended. runs/gpu_day.sh sets up and calls
it.

    python dev/gpu_day.py                             one GPU of 80 GB, at most 30 minutes
    python dev/gpu_day.py --scale tiny                a rehearsal on a CPU, in a few minutes
    python dev/gpu_day.py --stages tests,engine       these alone

Whole outputs go to --out, a folder. The exit code is 1 when a stage failed.
"""
import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BENCH = os.path.join(ROOT, "dev", "BENCH.md")
HEADING = "## GPU days"
HEADER = ["| date | machine | commit | stage | figure | |", "| --- | --- | --- | --- | --- | --- |"]
WIDTH = 60  # characters that a cell shows of a line
GRACE = 20  # seconds

GPU_TESTS = "python -m pytest -q -m gpu $(grep -l mark.gpu tests/*.py)"  # collecting all others takes a while
BIG = "--shape qwen2.5-math-1.5b --dtype bfloat16"
STEP = "--examples-per-step 16 --num-samples 8 --prompt-len 256 --completion-len 512 --steps 2"
PROFILE = "--rows 256 --num-samples 8 --prompt-len 256 --completion-len 512 --examples-per-step 16"
SMALL = "--device-type cpu --vocab-size 512 --depth 2 --n-embd 64 --n-head 2"
TINY_STEP = "--examples-per-step 4 --num-samples 2 --prompt-len 16 --completion-len 16 --steps 1"
RL = "--task chain --model-tag tiny --num-steps 2 --warmup-steps 1 --eval-examples 20 --save-every 2"
ATTENTION = [*(f"results.{name}.{figure}" for name in ("ours", "sdpa", "flex")
               for figure in ("seconds", "useful_tflop_per_s", "peak_bytes")),
             "results.decode: ours.gb_per_s", "results.decode: ours.percent_of_copy"]
REFILL = "--depth 28 --n-embd 1536 --n-head 12 --n-kv-head 2 --vocab-size 32768 --dtype bfloat16 --rows 1024"

# SmolLM2 comes from a package; where there is no registry it must have been imported into base of --out, as smollm2
SMOL = "bash dev/experiments/run.sh smol --out $NANOCHAT_BASE_DIR/smol"

APART = ["smol", "compiled step"]  # name them: the first takes ten minutes, the second compiles for some

SLOWER = 3  # a rehearsal, on two cores, may take so many times the seconds of a stage

# stage: seconds that it may take, its command at full size and as a rehearsal, and what it found: figures of its last
# line (JSON), the last line that starts with these words, or None: the last line
STAGES = {
    "profile": (90, f"python -m dev.bench.kernel_profile {BIG} {PROFILE}",
                f"NANOCHAT_CPU_KERNELS=0 python -m dev.bench.kernel_profile {SMALL} --rows 8 --num-samples 2 "
                "--prompt-len 16 --completion-len 8 --examples-per-step 4",
                [f"results.{part}.{figure}_us" for part in ("token by graph", "token", "refill", "update")
                 for figure in ("wall", "span", "gaps", "floor")]),
    "tests": (240, GPU_TESTS, GPU_TESTS, None),
    "kernels": (120, "python -m dev.bench.kernels --dtype bfloat16 --rows 16384 --n-embd 2048 --vocab-size 151936",
                "python -m dev.bench.kernels --device-type cpu --rows 64 --n-embd 32 --vocab-size 257 --rounds 1",
                ["results.ours.percent_of_products", "results.ours.useful_tflop_per_s", "results.ours.peak_bytes",
                 *(f"results.{name}.percent_of_products"
                   for name in ("linear_logprob", "liger", "cce", "quack", "quack_ce"))]),
    "engine": (150, f"python -m dev.bench.engine {BIG} --rows 256 --num-samples 8 --prompt-len 512 "
                    "--completion-len 256 --rounds 1",
               f"python -m dev.bench.engine {SMALL} --rows 8 --num-samples 2 --prompt-len 16 --completion-len 8 "
               "--rounds 1",
               ["results.ours.decode_tok_per_s", "results.ours.percent_of_bound", "results.ours.prefill_s",
                "results.transformers.decode_tok_per_s"]),
    "step": (150, f"python -m dev.bench.step {BIG} {STEP}", f"python -m dev.bench.step {SMALL} {TINY_STEP}",
             ["s_per_step", "gen_s", "update_s", "floor_s", "completion_tok_per_s", "peak_mem_mb", "planned_mem_mb"]),
    # on CPU nothing is compiled: its rehearsal is the plain step
    "compiled step": (300, f"python -m dev.bench.step {BIG} {STEP} --compile",
                      f"python -m dev.bench.step {SMALL} {TINY_STEP}", ["s_per_step", "update_s", "floor_s"]),
    "tango step": (240, f"python -m dev.bench.step {BIG} {STEP} --role generator --verification-len 256 "
                        "--recompute",
                   f"python -m dev.bench.step {SMALL} {TINY_STEP} --role generator --verification-len 8",
                   ["s_per_step", "gen_s", "verify_s", "update_s", "floor_s", "peak_mem_mb", "planned_mem_mb"]),
    "refill": (120, f"python -m dev.bench.engine {REFILL} --max-rows 256 --num-samples 8 --prompt-len 256 "
                    "--mean-len 128 --completion-len 512 --rounds 1",
               f"python -m dev.bench.engine {SMALL} --rows 32 --max-rows 8 --num-samples 2 --prompt-len 16 "
               "--mean-len 4 --completion-len 16 --rounds 1",
               ["results.ours.decode_tok_per_s", "results.ours.percent_of_bound"]),
    "attention": (120, "python -m dev.bench.attention --dtype bfloat16 --units 4 --rows 8 --n-head 12 "
                       "--n-kv-head 2 --head-dim 128 --prefix-len 1024 --completion-len 512 --decode-units 32 "
                       "--rounds 3",
                  "python -m dev.bench.attention --device-type cpu --rounds 1 --providers ours,sdpa,plain",
                  ATTENTION),
    "speedrun": (420, "SCALE=tiny NPROC=1 DEVICE='--device-type cuda' bash runs/speedrun.sh",
                 "SCALE=tiny NPROC=1 bash runs/speedrun.sh", "generator greedy pass@1, in"),
    "ranks": (150, "torchrun --standalone --nproc_per_node=gpu scripts/tango_rl.py -- --run ranks "
                   f"{RL} $([ $(nvidia-smi -L | wc -l) = 1 ] || echo --shard)",
              f"torchrun --standalone --nproc_per_node=2 scripts/tango_rl.py -- --run ranks --device-type cpu {RL} "
              "--shard", "step "),
    "smol": (600, f"JOBS=9 {SMOL} --device-type cuda --steps 40 --arms 'grpo tango fixed_verifier grpo_tenth'",
             f"{SMOL} --sft-steps 2 --steps 2 --examples 2 --seeds 1 --arms 'grpo tango'", "| tango | sampled"),
}


def run_stage(command: str, limit: float, log: str, env: dict) -> tuple[str, float]:
    """Runs a command with its output in a file, and ends it and its children when time is up. -> what became of it
    ("" when it went well), seconds"""
    started = time.perf_counter()
    with open(log, "w") as f:
        process = subprocess.Popen(["bash", "-c", command], stdout=f, stderr=subprocess.STDOUT, cwd=ROOT, env=env,
                                   start_new_session=True)
        try:
            code = process.wait(limit)
            problem = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"stopped after {limit:.0f} s"
        finally:
            end_group(process)
    return problem, time.perf_counter() - started


def end_group(process: subprocess.Popen) -> None:
    """Ends a process that leads a group, and its children. Told to stop, they have GRACE seconds, in which an
    experiment writes the tables of what is finished."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            process.poll()  # else it counts as there after its end
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def figures_of(text: str, names: list[str] | str | None) -> dict[str, str]:
    """What a stage found (STAGES). Raises ValueError where its last line should be JSON and is not, and where no line
    starts as it should."""
    start = names if isinstance(names, str) else ""
    lines = [line for line in map(str.strip, text.splitlines()) if line and line.startswith(start)]
    if start and not lines:
        raise ValueError(f"no line starts with {start!r}")
    last = lines[-1] if lines else "no output"
    if not isinstance(names, list):
        return {"last line": " ".join(last.split())[:WIDTH]}
    found, shown = json.loads(last), {}
    for name in names:
        value = found
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        shown[name.removeprefix("results.")] = "-" if value is None else str(value)
    return shown


def add_rows(rows: list[list[str]], path: str = BENCH) -> None:
    """Adds rows after the table's last one; the section is made where there is none."""
    with open(path) as f:
        lines = f.read().splitlines()
    if HEADING not in lines:
        lines += ["", HEADING, "", *HEADER]
    end = lines.index(HEADER[1], lines.index(HEADING)) + 1
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    lines[end:end] = ["| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |" for cells in rows]
    with open(f"{path}.new", "w") as f:
        f.write("\n".join(lines) + "\n")
    os.replace(f"{path}.new", path)


def machine() -> str:
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().removeprefix("NVIDIA ")
        return f"{torch.cuda.device_count()} x {name}, torch {torch.__version__.split('+')[0]}"
    return f"CPU, torch {torch.__version__}"


def commit() -> str:
    """The commit that is checked out, "-" where git does not know."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=["full", "tiny"], default="full")
    parser.add_argument("--stages", default=",".join(name for name in STAGES if name not in APART),
                        help=f"of: {', '.join(STAGES)}; ranks goes on from speedrun's models; {', '.join(APART)} are "
                             f"left out unless named")
    parser.add_argument("--minutes", type=float, default=30, help="for all stages together")
    parser.add_argument("--commit", default=commit(), help="what the rows name")
    parser.add_argument("--bench", default=BENCH, help="the page that gets the rows")
    parser.add_argument("--out", default=os.path.join(ROOT, "gpu_day"), help="folder for whole outputs")
    args = parser.parse_args()
    chosen = args.stages.split(",")
    if set(chosen) - STAGES.keys():
        parser.error(f"--stages {args.stages}: choose from {', '.join(STAGES)}")
    if args.scale == "full" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: --scale tiny rehearses on a CPU")
    if not os.path.isfile(args.bench):
        parser.error(f"--bench {args.bench}: there is no such page")
    os.makedirs(args.out, exist_ok=True)
    base = os.path.join(os.path.abspath(args.out), "base")
    env = os.environ | {"NANOCHAT_BASE_DIR": base, "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1",
                        "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
    until, failed = time.perf_counter() + 60 * args.minutes, []
    for name in chosen:
        limit, full, tiny, figures = STAGES[name]
        log = os.path.join(args.out, f"{name.replace(' ', '_')}.log")
        left, command = until - time.perf_counter(), full
        if args.scale == "tiny":
            limit, command = SLOWER * limit, tiny
        problem, seconds = run_stage(command, min(limit, left), log, env) if left > 1 else ("no time left", 0.0)
        found = {"failed": problem} if problem else {}
        if seconds:
            try:
                with open(log) as f:
                    found |= figures_of(f.read(), None if problem else figures)
            except json.JSONDecodeError:
                found = {"failed": "its last line is not JSON"}
            except ValueError as error:
                found = {"failed": str(error)}
        if "failed" in found:
            failed.append(name)
        found |= {"seconds": f"{seconds:.0f}"}
        print(f"{name}: {', '.join(f'{figure} {value}' for figure, value in found.items())}", flush=True)
        about = [datetime.date.today().isoformat(), machine(), args.commit, name]
        add_rows([[*about, figure, value] for figure, value in found.items()], args.bench)
    if failed:
        print(f"failed: {', '.join(failed)}; see {args.out}")
    return int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run_stage then ends its stage
    sys.exit(main())
