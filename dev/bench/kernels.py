"""
Times linear_policy_loss, forward and backward, and linear_logprob against other implementations and against bare matrix
products.

All get the same random hidden states (N, C), LM head (V, C), targets, advantages, old and reference logprobs, and
compute the mean PPO loss plus 0.04 KL (k3), but for quack_ce. First each one's gradients on up to 1024 rows are
compared with naive PyTorch in fp32; one that is wrong or missing is left out with a note. Then they take turns, and
medians are shown, as useful TFLOP/s (6NCV, 2NCV for scoring: recomputing logits earns nothing) and as the percentage of
the speed of the bare products of the same shapes (three, one for scoring). Memory is the most that was held beyond the
inputs. The last line is JSON.

naive: autograd on (N, V) fp32 logits. compiled: torch.compile of it. liger: LigerFusedLinearGRPOLoss of liger-kernel,
one token per sequence, since it takes one advantage per sequence; it has no softcap. trl: ChunkedLogProbFunction of TRL
1.16, the loss by autograd on its logprobs. cce: cut-cross-entropy, likewise; it leaves out gradients below its
threshold, and has no temperature. quack: QuACK's cross entropy of whole rows of logits, likewise; it has no softcap
either. quack_ce: QuACK's chunked one, the mean cross entropy alone, without advantages, clipping or KL: what such a
loss could take. The last three run on CUDA alone.

For a machine without network: `pip download --no-deps -d wheels cut-cross-entropy quack-kernels liger-kernel`, and
there `pip install --no-deps --no-index wheels/*`. QuACK also wants nvidia-cutlass-dsl with its packages -libs-base,
-libs-core and -libs-cu12 (or -cu13), apache-tvm-ffi, torch-c-dlpack-ext, cuda-bindings, cuda-pathfinder and einops.

| wheels | MiB |
| --- | --- |
| cut-cross-entropy 25.1.1 | 0.02 |
| quack-kernels 0.6.5 | 0.7 |
| what it also wants, for CUDA 12 and Python 3.11 | 103.4, of which one wheel is 87.5 |

    python -m dev.bench.kernels
    python -m dev.bench.kernels --device-type cuda --dtype bfloat16 --rows 16384 --n-embd 2048 --vocab-size 151936
"""
import argparse
import ctypes
import functools
import gc
import json
import statistics
from functools import partial

import torch
import torch.nn.functional as F

from dev.bench.common import COUNT, DTYPES
from nanochat.cli import at_least, script_main
from nanochat.common import BadInput, init_device, print0
from nanochat.flops import seconds_of, synchronize
from nanochat.kernels.linear_logprob import linear_logprob
from nanochat.kernels.linear_policy_loss import linear_policy_loss
from nanochat.kernels.losses import PolicyLoss

LOSS = PolicyLoss(kl_coef=0.04)
NOT_USABLE = Exception  # of many types: raised by other packages, in versions that we do not know


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--rows", type=at_least(1, int, 10 ** 8), default=1024, help="tokens N")
    parser.add_argument("--n-embd", type=at_least(1, int, 2 ** 17), default=128, help="width C")
    parser.add_argument("--vocab-size", type=at_least(2, int, 2 ** 24), default=8192, help="vocabulary V")
    parser.add_argument("--softcap", type=at_least(0, float), default=0.0,
                        help="softcap of the logits; 0: none, as Liger has none")
    parser.add_argument("--temperature", type=at_least(1e-6, float), default=1.0)
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--rows-per-chunk", type=at_least(0), default=0, help="of ours; 0: as it chooses itself")
    parser.add_argument("--rounds", type=COUNT, default=5, help="times that each is run")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="which to run, of these")
    parser.add_argument("--device-type", default="", choices=["", "cuda", "mps", "cpu"])
    parser.add_argument("--seed", type=int, default=0)
    return parser


def make_inputs(args, device) -> dict:
    """Logits of standard deviation 2; ratios mostly within the clip range."""
    draw = torch.Generator(device).manual_seed(args.seed)
    normal = partial(torch.randn, generator=draw, device=device)
    N, C, V = args.rows, args.n_embd, args.vocab_size
    hidden, weight = normal(N, C).to(DTYPES[args.dtype]), (normal(V, C) * 2 * C ** -0.5).to(DTYPES[args.dtype])
    targets = torch.randint(V, (N,), generator=draw, device=device)
    logprobs, _ = linear_logprob(hidden, weight, targets, **head_of(args))
    return dict(hidden=hidden, weight=weight, targets=targets, advantages=normal(N),
                old_logprobs=logprobs + 0.1 * normal(N), ref_logprobs=logprobs + 0.1 * normal(N))


def head_of(args) -> dict:
    return dict(vocab_size=args.vocab_size, softcap=args.softcap or None, temperature=args.temperature)


# Providers: (args, hidden, weight, targets, advantages, old_logprobs, ref_logprobs) -> scalar loss

def ours(args, hidden, weight, targets, advantages, old_logprobs, ref_logprobs):
    weights = torch.full_like(advantages, 1 / len(advantages))
    return linear_policy_loss(hidden, weight, targets, advantages, weights, loss=LOSS, old_logprobs=old_logprobs,
                              ref_logprobs=ref_logprobs, rows_per_chunk=args.rows_per_chunk or None, **head_of(args))[0]


def naive(args, hidden, weight, targets, advantages, old_logprobs, ref_logprobs):
    logits = (hidden @ weight.t()).float()  # (N, V)
    if args.softcap:
        logits = args.softcap * torch.tanh(logits / args.softcap)
    logprobs = torch.log_softmax(logits / args.temperature, dim=1).gather(1, targets[:, None]).squeeze(1)
    return LOSS(logprobs, None, old_logprobs, ref_logprobs, advantages).mean()


@functools.cache
def compiled_naive():
    return torch.compile(naive, dynamic=False)


def compiled(args, **inputs):
    return compiled_naive()(args, **inputs)


def liger(args, hidden, weight, targets, advantages, old_logprobs, ref_logprobs):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    if args.softcap:
        raise NotImplementedError("it has no softcap")
    loss = LigerFusedLinearGRPOLoss(beta=LOSS.kl_coef, use_ref_model=True, chunk_size=4096, epsilon_low=LOSS.clip_low,
                                    epsilon_high=LOSS.clip_high, loss_type="grpo", temperature=args.temperature)
    return loss(hidden[:, None], weight, targets[:, None], torch.ones_like(targets)[:, None], advantages,
                ref_per_token_logps=ref_logprobs[:, None], old_per_token_logps=old_logprobs[:, None])[0]


def trl(args, hidden, weight, targets, advantages, old_logprobs, ref_logprobs):
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    logprobs, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, targets, args.temperature, 8192,
                                                args.softcap or None, 1.0, ("entropy",))
    return LOSS(logprobs, None, old_logprobs, ref_logprobs, advantages).mean()


def cce(args, hidden, weight, targets, advantages, old_logprobs, ref_logprobs):
    from cut_cross_entropy import linear_cross_entropy
    if args.temperature != 1:
        raise NotImplementedError("it has no temperature")
    logprobs = -linear_cross_entropy(hidden, weight, targets, softcap=args.softcap or None, reduction="none")
    return LOSS(logprobs, None, old_logprobs, ref_logprobs, advantages).mean()


def quack(args, hidden, weight, targets, advantages, old_logprobs, ref_logprobs):
    from quack.linear_cross_entropy import linear_cross_entropy_func
    if args.softcap or args.temperature != 1:
        raise NotImplementedError("it has no softcap and no temperature")
    logprobs = -linear_cross_entropy_func(hidden, weight, None, targets, reduction="none", inplace_backward=True)
    return LOSS(logprobs, None, old_logprobs, ref_logprobs, advantages).mean()


def quack_ce(args, hidden, weight, targets, **_):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy
    if args.softcap or args.temperature != 1:
        raise NotImplementedError("it has no softcap and no temperature")
    return chunked_linear_cross_entropy(hidden, weight, targets)


def naive_ce(args, hidden, weight, targets, **_):
    return F.cross_entropy(hidden @ weight.t(), targets)


PROVIDERS = {"ours": ours, "naive": naive, "compiled": compiled, "liger": liger, "trl": trl, "cce": cce,
             "quack": quack, "quack_ce": quack_ce}
EXACT = {"quack_ce": naive_ce}  # what gradients are compared with, where that is not naive


# Bare matrix products

def three_products(inputs) -> None:
    hidden, weight = inputs["hidden"], inputs["weight"]
    z = hidden @ weight.t()  # (N, V)
    torch.mm(z, weight)
    torch.mm(z.t(), hidden)


def one_product(inputs) -> None:
    torch.mm(inputs["hidden"], inputs["weight"].t())


# Measuring

def gradients(provider, args, inputs: dict) -> tuple:
    """-> gradients of hidden and weight"""
    hidden, weight = (inputs[name].detach().requires_grad_() for name in ("hidden", "weight"))
    return torch.autograd.grad(provider(args, **{**inputs, "hidden": hidden, "weight": weight}), (hidden, weight))


def relative_error(actual: tuple, expected: tuple) -> float:
    """The larger of the two gradients' |difference| / |expected|."""
    return max(float((a.float() - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True))


def usable_providers(args, inputs: dict) -> tuple[dict, dict]:
    """Those asked for whose gradients on the first rows are right, and every gradient error."""
    part = {name: x if name == "weight" else x[:1024] for name, x in inputs.items()}
    wide = {**part, "hidden": part["hidden"].float(), "weight": part["weight"].float()}
    exact = {provider: gradients(provider, args, wide) for provider in (naive, *EXACT.values())}
    limit = 1e-4 if args.dtype == "float32" else 5e-2
    usable, errors = {}, {}
    for name in args.providers.split(","):
        try:
            errors[name] = relative_error(gradients(PROVIDERS[name], args, part), exact[EXACT.get(name, naive)])
        except NOT_USABLE as error:
            if name == "ours":
                raise
            print0(f"{name} is left out: {type(error).__name__}: "
                   f"{(str(error) or 'no reason given').splitlines()[0][:150]}")
            continue
        if errors[name] < limit:
            usable[name] = partial(gradients, PROVIDERS[name], args, inputs)
        else:
            print0(f"{name} is left out: its gradients are off by {errors[name]:.1e} of their norm")
    return usable, errors


def resident(field: str) -> int:
    """Bytes of this process' memory by /proc/self/status."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field + ":"))


def peak_memory(action, device) -> int | None:
    """The most bytes held while the action runs, beyond those held before: by the allocator on CUDA, resident on Linux,
    None elsewhere."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        synchronize(device)
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # gives back what earlier runs have freed
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # resets VmHWM
        before = resident("VmRSS")
        action()
        return max(0, resident("VmHWM") - before)
    except (OSError, AttributeError, StopIteration):  # not Linux, not glibc, or not allowed
        return None


def measure(actions: dict, rounds: int, device) -> dict:
    """Per action the median of its seconds and its peak memory. They take turns, so that a slow minute is
    everybody's."""
    memory = {name: peak_memory(action, device) for name, action in actions.items()}  # and a warm-up
    seconds = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            seconds[name].append(seconds_of(action, device))
    return {name: dict(seconds=round(statistics.median(seconds[name]), 6), peak_bytes=memory[name]) for name in actions}


def rows_of_table(results: dict, errors: dict, floor: str, flops: float):
    """Fills in what follows from the times; yields the table's lines."""
    for name, result in results.items():
        result["useful_tflop_per_s"] = float(f"{flops / result['seconds'] / 1e12:.4g}")
        result["percent_of_products"] = round(100 * results[floor]["seconds"] / result["seconds"], 1)
        result["gradient_error"] = errors.get(name)
        memory = "-" if result["peak_bytes"] is None else f"{result['peak_bytes'] / 2 ** 20:.0f}"
        error = "-" if result["gradient_error"] is None else f"{result['gradient_error']:.1e}"
        yield (f"{name:16} {1e3 * result['seconds']:10.2f} {result['useful_tflop_per_s']:10.3f} "
               f"{result['percent_of_products']:11.1f} {memory:>9} {error:>9}")


def main(args) -> None:
    unknown = set(args.providers.split(",")) - PROVIDERS.keys()
    if unknown:
        raise BadInput(f"--providers {args.providers}: there is no {', '.join(sorted(unknown))}; choose from "
                       f"{', '.join(PROVIDERS)}")
    device = init_device(args.device_type)
    inputs = make_inputs(args, device)
    usable, errors = usable_providers(args, inputs)
    scoring = partial(linear_logprob, inputs["hidden"], inputs["weight"], inputs["targets"],
                      rows_per_chunk=args.rows_per_chunk or None, **head_of(args))
    work = args.rows * args.n_embd * args.vocab_size
    print0(f"{'':16} {'ms':>10} {'TFLOP/s':>10} {'% products':>11} {'peak MiB':>9} {'error':>9}")
    results = {}
    tables = (("three products", {**usable, "three products": partial(three_products, inputs)}, 6 * work),
              ("one product", {"linear_logprob": scoring, "one product": partial(one_product, inputs)}, 2 * work))
    for floor, actions, flops in tables:
        part = measure(actions, args.rounds, device)
        for line in rows_of_table(part, errors, floor, flops):
            print0(line)
        results |= part
    print0(json.dumps({"results": results, "threads": torch.get_num_threads(), "torch": torch.__version__,
                       "device": str(device), **vars(args)}))


if __name__ == "__main__":
    script_main(main, make_parser())
