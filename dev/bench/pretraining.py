"""
One pretraining step (forward, backward, optimizers) of ours and of upstream nanochat, eager and compiled, taking turns.
fp32 on the CPU.

    python dev/bench/pretraining.py --upstream ../nanochat --rounds 3
"""
import argparse
import json
import os
import subprocess
import sys
import time

SHAPES = {  # model, rows, steps
    "small": (dict(sequence_len=256, vocab_size=265, n_layer=4, n_head=4, n_kv_head=4, n_embd=128, window_pattern="L"),
              16, 8),
    "large": (dict(sequence_len=512, vocab_size=4096, n_layer=6, n_head=3, n_kv_head=3, n_embd=384,
                   window_pattern="L"), 8, 4),
}
SIDES = ("ours", "ours compiled", "upstream", "upstream compiled")


def our_step(shape: dict, compiled: bool):
    """A function of ids (B, T + 1) that makes one step of our code."""
    import torch

    from nanochat.common import hold_memory
    from nanochat.gpt import GPTConfig, new_model
    from nanochat.loss_eval import supervised_loss
    from nanochat.optim import optimize, pretraining_optimizers
    hold_memory()
    model = new_model(GPTConfig(**shape), 0, torch.device("cpu"), torch.float32)
    optimizers, parameters = pretraining_optimizers(model, 0.02, 0.3, 0.008, 0.5, 0.0), list(model.parameters())
    trunk = torch.compile(model.trunk, dynamic=False) if compiled else None

    def step(ids):
        supervised_loss(model, ids, None, float(ids[:, 1:].numel()), trunk).backward()
        optimize(optimizers, parameters, 1.0, 1.0)

    return step


def upstream_step(shape: dict, compiled: bool):
    """The same of upstream's code, which PYTHONPATH names."""
    import torch
    from nanochat.gpt import GPT, GPTConfig
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape))
    model.to_empty(device="cpu")
    model.init_weights()
    optimizer = model.setup_optimizer()
    forward = torch.compile(model, dynamic=False) if compiled else model

    def step(ids):
        forward(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return step


def measure(side: str, name: str) -> None:
    """Prints the median tokens per second of one side, after two steps of warm-up."""
    import torch
    shape, rows, num_steps = SHAPES[name]
    make, compiled = our_step if side.startswith("ours") else upstream_step, side.endswith(" compiled")
    step = make(shape, compiled)
    ids = torch.randint(shape["vocab_size"], (rows, shape["sequence_len"] + 1),
                        generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(num_steps + 2):
        started = time.perf_counter()
        step(ids)
        seconds.append(time.perf_counter() - started)
    print(json.dumps(rows * shape["sequence_len"] / sorted(seconds[2:])[num_steps // 2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", required=True, help="a clone of nanochat")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=2, metavar=("SIDE", "SHAPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for name in SHAPES:
        found: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(args.rounds):
            for side in SIDES:
                env = {**os.environ, "PYTHONPATH": ours if side.startswith("ours") else args.upstream}
                command = [sys.executable, os.path.abspath(__file__), "--upstream", args.upstream, "--measure", side,
                           name]
                found[side].append(json.loads(subprocess.run(command, env=env, capture_output=True, text=True,
                                                             check=True).stdout.splitlines()[-1]))
        for side, speeds in found.items():
            speeds.sort()
            print(f"{name:6s} {side:18s} {speeds[len(speeds) // 2]:9,.0f} tokens/s ({speeds[0]:,.0f} - "
                  f"{speeds[-1]:,.0f})", flush=True)


if __name__ == "__main__":
    main()
