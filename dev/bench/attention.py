"""
Attention's speed and memory: training, forward and backward, rows after shared prefixes; and decoding, one query a
row.

Training is given in useful TFLOP/s: two products forward and four backward over the pairs of queries and keys that are
seen, no credit for scores that are computed again. Memory is the most that was held beyond the inputs. Before anything
is timed, gradients are compared with those of explicit products in fp32. Decoding is given in GB/s of keys and values,
each read once, those of a prefix once for all its rows, and in percent of what a copy of this machine reads and writes.
The last line is JSON.

ours: in training what the models call, kernels/attention.py on CUDA; in decoding kernels/decode_attention.py. sdpa:
scaled_dot_product_attention with a full mask, prefix and keys repeated. flex: flex_attention, compiled, the rows of a
unit as one sequence. plain: decoding in PyTorch.

    python -m dev.bench.attention
    python -m dev.bench.attention --device-type cuda --dtype bfloat16 --units 4 --rows 8 --n-head 12 --n-kv-head 2 \
        --head-dim 128 --prefix-len 1024 --completion-len 512 --decode-units 32
"""
import argparse
import functools
import json
from functools import partial

import torch

from dev.bench.common import COUNT, DTYPES
from dev.bench.kernels import NOT_USABLE, measure, relative_error
from nanochat.attention import PADDING_POSITION, KVCache, Mask, _Attend, _attend_sdpa, attend, bias, make_mask
from nanochat.cli import at_least, script_main
from nanochat.common import BadInput, init_device, print0
from nanochat.flops import machine_speed
from nanochat.kernels.decode_attention import decode_attention, decode_attention_plain
from nanochat.kernels.launch import takes_triton

CALLS = 20  # of decoding in one measurement


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--units", type=COUNT, default=2, help="prefixes U of a training batch")
    parser.add_argument("--rows", type=COUNT, default=4, help="rows R after each prefix")
    parser.add_argument("--decode-units", type=COUNT, default=2, help="prefixes of a decoding batch")
    parser.add_argument("--n-head", type=at_least(1, int, 2 ** 12), default=4, help="query heads")
    parser.add_argument("--n-kv-head", type=at_least(1), default=2, help="key and value heads")
    parser.add_argument("--head-dim", type=at_least(1, int, 256), default=32, help="D")
    parser.add_argument("--prefix-len", type=at_least(1, int, 2 ** 22), default=64,
                        help="tokens of a prefix; every second has half as many")
    parser.add_argument("--completion-len", type=at_least(1, int, 2 ** 22), default=32, help="tokens of a row after it")
    parser.add_argument("--window", type=at_least(0, int, 2 ** 30), default=0,
                        help="tokens before a query that it sees; 0: all")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--rounds", type=COUNT, default=5, help="times that each is run")
    parser.add_argument("--providers", default="ours,sdpa,flex,plain", help="which to run, of these")
    parser.add_argument("--device-type", default="", choices=["", "cuda", "mps", "cpu"])
    parser.add_argument("--seed", type=at_least(0), default=0)
    return parser


def lengths_of(units: int, args, device) -> torch.Tensor:
    """Tokens of each prefix (U,): full and half ones in turn."""
    return torch.tensor([max(1, args.prefix_len >> u % 2) for u in range(units)], device=device)


def make_inputs(args, device) -> dict:
    draw = torch.Generator(device).manual_seed(args.seed)
    normal = lambda *shape: torch.randn(*shape, generator=draw, device=device).to(DTYPES[args.dtype])
    U, H, R, T, D = args.units, args.n_kv_head, args.rows, args.completion_len, args.head_dim
    inputs = dict(q=normal(U, H, R, args.n_head // H, T, D), k=normal(U, H, R, T, D), v=normal(U, H, R, T, D),
                  prefix_k=normal(U, H, args.prefix_len, D), prefix_v=normal(U, H, args.prefix_len, D))
    return inputs | {"grad": normal(*inputs["q"].shape), "lengths": lengths_of(U, args, device)}


def prefix_of(args, lengths) -> tuple[KVCache, torch.Tensor]:
    """A cache with the positions of prefixes; the positions (U*R, T) of the tokens after them."""
    prefix, columns = KVCache(1), torch.arange(args.prefix_len, device=lengths.device)
    prefix.positions = columns.expand(len(lengths), -1).masked_fill(columns >= lengths[:, None], PADDING_POSITION)
    own = torch.arange(args.completion_len, device=lengths.device)
    return prefix, lengths.repeat_interleave(args.rows)[:, None] + own


# Training: (args, inputs) -> a function of q, k, v, prefix_k, prefix_v

def dense_mask(args, lengths, dtype) -> Mask:
    """As make_mask where there is no kernel."""
    columns = torch.arange(args.completion_len, device=lengths.device)
    distance = columns[:, None] - columns
    prefix, positions = prefix_of(args, lengths)
    keys, queries = prefix.positions[:, None], positions.view(len(lengths), args.rows, -1)[:, 0, :, None]
    return Mask(bias((distance >= 0) & (distance <= args.window), dtype),
                bias((keys <= queries) & (queries - keys <= args.window), dtype))


def ours(args, inputs):
    prefix, positions = prefix_of(args, inputs["lengths"])
    mask = make_mask(args.completion_len, args.window, args.window + 1, None, prefix, positions, inputs["q"].dtype)
    return lambda q, k, v, *shared: attend(q, k, v, mask, *shared)


def sdpa(args, inputs):
    mask = dense_mask(args, inputs["lengths"], inputs["q"].dtype)
    return lambda q, k, v, *shared: _attend_sdpa(q, k, v, mask, *shared)


@functools.cache
def compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=False)


def flex(args, inputs):
    from torch.nn.attention.flex_attention import create_block_mask
    lengths, T, Tp, window = inputs["lengths"], args.completion_len, args.prefix_len, args.window
    U, Hkv, R, group, _, D = inputs["q"].shape

    def seen(unit, head, query, key):
        own = key - Tp
        after = query % T + lengths[unit]  # the query's position
        in_prefix = (key < lengths[unit]) & (after - key <= window)
        before = query % T - own % T
        return in_prefix | ((own >= 0) & (own // T == query // T) & (before >= 0) & (before <= window))

    mask = create_block_mask(seen, U, None, R * T, Tp + R * T, device=lengths.device)

    def attention(q, k, v, prefix_k, prefix_v):
        q = q.permute(0, 1, 3, 2, 4, 5).reshape(U, Hkv * group, R * T, D)
        k, v = (torch.cat([x, y.flatten(2, 3)], dim=2) for x, y in ((prefix_k, k), (prefix_v, v)))
        y = compiled_flex()(q, k, v, block_mask=mask, enable_gqa=group > 1)
        return y.view(U, Hkv, group, R, T, D).transpose(2, 3)
    return attention


TRAINING = {"ours": ours, "sdpa": sdpa, "flex": flex}


def gradients(attention, inputs: dict) -> tuple:
    leaves = [inputs[name].detach().requires_grad_() for name in ("q", "k", "v", "prefix_k", "prefix_v")]
    return torch.autograd.grad(attention(*leaves), leaves, inputs["grad"])


def explicit_gradients(args, inputs: dict) -> tuple:
    """By explicit products in fp32."""
    wide = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    mask = dense_mask(args, inputs["lengths"], torch.float32)
    return gradients(lambda q, k, v, *shared: _Attend.apply(q, k, v, mask.own, *shared, mask.prefix), wide)


def usable_providers(args, inputs: dict) -> tuple[dict, dict]:
    """Those asked for whose gradients of the first unit are right, and every gradient error."""
    part = {name: x[:1] for name, x in inputs.items()}
    exact, limit = explicit_gradients(args, part), 1e-4 if args.dtype == "float32" else 3e-2
    usable, errors = {}, {}
    for name in (name for name in args.providers.split(",") if name in TRAINING):
        try:
            errors[name] = relative_error(gradients(TRAINING[name](args, part), part), exact)
            action = partial(gradients, TRAINING[name](args, inputs), inputs)
        except NOT_USABLE as error:
            if name == "ours":
                raise
            print0(f"{name} is left out: {type(error).__name__}: "
                   f"{(str(error) or 'no reason given').splitlines()[0][:150]}")
            continue
        if errors[name] < limit:
            usable[name] = action
        else:
            print0(f"{name} is left out: its gradients are off by {errors[name]:.1e} of their norm")
    return usable, errors


def seen_pairs(args) -> int:
    """Pairs of queries and keys that are seen, of one head."""
    positions = torch.arange(args.completion_len)
    before = [min(args.prefix_len, max(1, args.prefix_len >> u % 2)) for u in range(args.units)]
    return sum(args.rows * int((positions + length + 1).clamp(max=args.window + 1).sum()) for length in before)


# Decoding

def decoding_actions(args, device) -> tuple[dict, int]:
    """What to run CALLS times, on CUDA as a graph; and the bytes of keys and values that one call must read."""
    draw = torch.Generator(device).manual_seed(args.seed)
    normal = lambda *shape: torch.randn(*shape, generator=draw, device=device).to(DTYPES[args.dtype])
    S, H, T, D = args.decode_units, args.n_kv_head, args.completion_len, args.head_dim
    B, lengths = S * args.rows, lengths_of(S, args, device)
    case = dict(q=normal(B, H, args.n_head // H, D), k=normal(B, H, T, D), v=normal(B, H, T, D),
                places=torch.arange(B, device=device), lengths=torch.full((B,), T, device=device),
                prefix_k=normal(S, H, args.prefix_len, D), prefix_v=normal(S, H, args.prefix_len, D),
                prefix_lengths=lengths, slots=torch.arange(S, device=device).repeat_interleave(args.rows),
                window=args.window)
    seen = [min(args.window + 1, T + length) for length in lengths.tolist()]  # of a row, its own first
    tokens = sum(args.rows * min(n, T) + max(0, n - T) for n in seen)
    functions, actions = {"ours": decode_attention, "plain": decode_attention_plain}, {}
    if not takes_triton(case["q"]):
        print0("decode: ours is left out: it is a kernel for CUDA")
        del functions["ours"]
    for name in (name for name in args.providers.split(",") if name in functions):
        action = partial(functions[name], **case)
        if device.type == "cuda" and name == "ours":
            action()  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                action()
            action = graph.replay
        actions[f"decode: {name}"] = partial(repeat, action)
    return actions, 2 * tokens * H * D * DTYPES[args.dtype].itemsize


def repeat(action) -> None:
    for _ in range(CALLS):
        action()


def main(args) -> None:
    if args.n_head % args.n_kv_head:
        raise BadInput(f"--n-head {args.n_head} --n-kv-head {args.n_kv_head}: the heads must be a multiple of the "
                       f"key/value heads")
    unknown = set(args.providers.split(",")) - {"ours", "sdpa", "flex", "plain"}
    if unknown:
        raise BadInput(f"--providers {args.providers}: there is no {', '.join(sorted(unknown))}; choose from ours, "
                       f"sdpa, flex, plain")
    args.window = args.window or args.prefix_len + args.completion_len
    device = init_device(args.device_type)
    inputs = make_inputs(args, device)
    usable, errors = usable_providers(args, inputs)
    training, flops = measure(usable, args.rounds, device), 12 * seen_pairs(args) * args.n_head * args.head_dim
    print0(f"{'':16} {'ms':>10} {'TFLOP/s':>10} {'peak MiB':>9} {'error':>9}")
    for name, result in training.items():
        result |= dict(useful_tflop_per_s=float(f"{flops / result['seconds'] / 1e12:.4g}"), gradient_error=errors[name])
        memory = "-" if result["peak_bytes"] is None else f"{result['peak_bytes'] / 2 ** 20:.0f}"
        print0(f"{name:16} {1e3 * result['seconds']:10.3f} {result['useful_tflop_per_s']:10.3f} {memory:>9} "
               f"{errors[name]:9.1e}")
    with torch.no_grad():
        actions, size = decoding_actions(args, device)
        decoding, (_, speed) = measure(actions, args.rounds, device), machine_speed(device, DTYPES[args.dtype])
    print0(f"{'':16} {'ms':>10} {'GB/s':>10} {'% of a copy':>11}")
    for name, result in decoding.items():
        result["seconds"] = seconds = result["seconds"] / CALLS
        result |= dict(gb_per_s=float(f"{size / seconds / 1e9:.4g}"),
                       percent_of_copy=round(100 * size / seconds / speed, 1))
        print0(f"{name:16} {1e3 * seconds:10.4f} {result['gb_per_s']:10.2f} {result['percent_of_copy']:11.1f}")
    print0(json.dumps({"results": training | decoding, "threads": torch.get_num_threads(), "torch": torch.__version__,
                       "device": str(device), **vars(args)}))


if __name__ == "__main__":
    script_main(main, make_parser())
