"""
Where the time of sampling and training goes, kernel by kernel, and what fills the distance to this machine's bounds.

Four parts of one random-init model are run under torch.profiler: one decoding token of --rows rows by CUDA graph, the
same without a graph, one refill (free places get waiting rows, while others decode) and one update of
--examples-per-step prompts. Rows are in the middle of their completions. Each part has four tables: its kernels; their
kinds, with the bytes and FLOPs that they cannot do without, and the floor that these set; its longest gaps; and what
fills the distance to the floor. A kernel's kind follows from its name, by RULES. Kinds without a floor could be nothing
at all, as could gaps. *Wall* is the median time of a part without the profiler.

On CPU operations take the place of kernels, by their own time. Kernels in C are gaps there: NANOCHAT_CPU_KERNELS=0
shows PyTorch's in their place. The last line is JSON, in microseconds.

    python -m dev.bench.kernel_profile --shape qwen2.5-math-1.5b --dtype bfloat16 --rows 256 --num-samples 8 \\
        --prompt-len 256 --completion-len 512 --examples-per-step 16
"""
import argparse
import json
import math
import os
import re
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from dev.bench.common import COUNT, DTYPES, add_model_args
from dev.bench.step import check_compile, make_role, train, update_flops
from nanochat.cli import at_least, script_main
from nanochat.common import BadInput, init_device, print0
from nanochat.engine import Decoding, Graphs, row_key, uses_graphs
from nanochat.flops import machine_speed, matrix_weights, prompt_weights, seconds_of, synchronize
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.slots import REFILL
from nanochat.weights import inference_model

# kind: what the names of its kernels hold, CUDA's and those of PyTorch's operations; the first that fits
RULES = {
    "attention": r"attention_forward|query_gradients|key_gradients|decode_rows|join_splits|flash|fmha|dot_product",
    "head": r"policy_rows|logprob_rows|segment_statistics|draw_rows",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|splitK|aten::(mm|addmm|bmm|baddbmm)_?$|mkldnn::_linear",
    "optimizer": r"[Aa]dam|multi_tensor_apply|LpNorm|_foreach_",
    "block": r"norm_rows|head_rows|gate_rows|(advance|record)_rows|^elements|rms_?norm|RMSNorm|layer_norm|silu",
    "copies": r"(?i)memcpy|memset|copy|CatArray|Fill|aten::(cat|clone|zero_|contiguous)$",
    "indexing": r"(?i)index|gather|scatter|embedding|cub::|scan|sort",
    "elementwise": r"elementwise|reduce_kernel|[Ss]oftmax|aten::(add|sub|mul|div|exp|log|sum|amax)_?$",
    "autograd": r"autograd::|Backward",
}
OTHER = "other"            # no rule fits
PRODUCTS_AFTER_LOSS = 2    # of the LM head: the gradients of hidden states and of its weights
LEAST_SHARE = 0.002        # of a part's time: kernels with less are one line
RUNS = 3                   # of a part without the profiler, after two that warm up
WIDTH = 64                 # characters of a kernel's name
NOISE = re.compile(r"void |at::native::|\(anonymous namespace\)::|at::|c10::|std::|gpu_kernel_impl(_nocast)?<")


class Event(NamedTuple):
    """A kernel's run, in microseconds. busy: its own time, on CPU without that of what it calls."""
    name: str
    start: float
    end: float
    busy: float


class Part(NamedTuple):
    """prepare() is not timed. work: of a kind of kernels, bytes and FLOPs."""
    title: str
    prepare: Callable[[], object]
    action: Callable[[], object]
    work: dict[str, tuple[float, float]]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--rows", type=COUNT, default=256, help="that decode together")
    parser.add_argument("--num-samples", type=at_least(1, int, 10 ** 5), default=8, help="rows that share a prompt")
    parser.add_argument("--prompt-len", type=COUNT, default=64)
    parser.add_argument("--completion-len", type=at_least(4, int, 10 ** 6), default=128)
    parser.add_argument("--examples-per-step", type=COUNT, default=16, help="prompts of an update")
    parser.add_argument("--micro-batch-tokens", type=at_least(1), default=16384)
    parser.add_argument("--recompute", action="store_true",
                        help="run blocks again in the backward pass; for --shape alone")
    parser.add_argument("--compile", action="store_true", help="of the update, as dev/bench/step.py's")
    parser.add_argument("--trace", default="", help="a folder for Chrome traces, one a part; default: none are kept")
    add_model_args(parser)
    return parser


# From events to tables

def kind_of(name: str) -> str:
    return next((kind for kind, pattern in RULES.items() if re.search(pattern, name)), OTHER)


def kinds_of(events: list[Event]) -> list[str]:
    """The kind of each event, in the order of time. BLAS kernels do not tell whose product they are: the last one
    before a kernel of the head is the head's, and those after the loss's are (PRODUCTS_AFTER_LOSS)."""
    kinds, last_product, due = [], None, 0
    for i, event in enumerate(events):
        kind = kind_of(event.name)
        if kind == "products" and "splitK" in event.name:  # a second kernel of the product before
            kind = kinds[last_product] if last_product is not None else kind
        elif kind == "products":
            last_product, kind, due = i, "head" if due else kind, max(0, due - 1)
        elif kind == "head":
            due = PRODUCTS_AFTER_LOSS if "policy_rows" in event.name else 0
            if last_product is not None:
                kinds[last_product] = "head"
        kinds.append(kind)
    return kinds


def short_name(name: str) -> str:
    """What tells a kernel from others, without namespaces and wrappers."""
    return NOISE.sub("", name)[:WIDTH]


def floor_us(work: tuple[float, float], speed: tuple[float, float]) -> float:
    """Microseconds that so many bytes and FLOPs take at least. speed: FLOP/s, bytes/s."""
    return 1e6 * max(work[0] / speed[1], work[1] / speed[0])


def merged(work: dict, found) -> dict:
    """The work with that of kinds that were not found, whose products nothing tells apart, put to the products."""
    apart = {kind: done for kind, done in work.items() if kind in found or kind == "products"}
    return apart | {"products": tuple(sum(work[kind][i] for kind in work if kind not in apart or kind == "products")
                                      for i in range(2))}


def summary(events: list[Event], work: dict, speed: tuple[float, float]) -> dict:
    """What a part took, by kind. events: in the order of time. span_us: from the start of the first to the end of the
    last; gaps_us: what of it is not the time of any."""
    found = {}
    for event, kind in zip(events, kinds_of(events), strict=True):
        entry = found.setdefault(kind, {"launches": 0, "us": 0.0})
        entry["launches"], entry["us"] = entry["launches"] + 1, entry["us"] + event.busy
    for kind, done in merged(work, found).items():
        found.setdefault(kind, {"launches": 0, "us": 0.0}).update(
            bytes=done[0], flops=done[1], floor_us=floor_us(done, speed))
    span = max(event.end for event in events) - events[0].start
    busy = sum(entry["us"] for entry in found.values())
    return {"span_us": span, "gaps_us": span - busy, "launches": len(events),
            "floor_us": sum(entry.get("floor_us", 0.0) for entry in found.values()), "kinds": found}


def kernel_lines(events: list[Event], span: float):
    """Lines of the table of kernels, those that take most first."""
    rows: dict[tuple[str, str], list] = {}
    for event, kind in zip(events, kinds_of(events), strict=True):
        row = rows.setdefault((short_name(event.name), kind), [0, 0.0])
        row[0], row[1] = row[0] + 1, row[1] + event.busy
    line = lambda kind, n, us, name: f"{kind:12} {n:8} {us:12.1f} {100 * us / span:7.1f}%  {name}"
    yield f"{'kind':12} {'launches':>8} {'us':>12} {'share':>8}  kernel"
    small = {key: row for key, row in rows.items() if row[1] < LEAST_SHARE * span}
    for (name, kind), (n, us) in sorted(rows.items(), key=lambda item: -item[1][1]):
        if (name, kind) not in small:
            yield line(kind, n, us, name)
    if small:
        n, us = map(sum, zip(*small.values(), strict=True))
        yield line("", n, us, f"{len(small)} kernels with less than {100 * LEAST_SHARE:g}% each")


def unknown_lines(names: set[str]):
    """Names that no rule fits, and the rules."""
    if names:
        yield f"no rule says of what kind these are: {'; '.join(sorted(names))}"
        yield from (f"rule for {kind}: {pattern}" for kind, pattern in RULES.items())


def kind_lines(found: dict):
    """Lines of the table of kinds (summary): what each must do, and how often it took the time of that."""
    yield f"{'kind':12} {'launches':>8} {'us':>12} {'MB':>10} {'GFLOP':>10} {'floor us':>12} {'ratio':>7}"
    for kind, entry in sorted(found["kinds"].items(), key=lambda item: -item[1]["us"]):
        line = f"{kind:12} {entry['launches']:8} {entry['us']:12.1f}"
        if "floor_us" in entry:
            line += (f" {entry['bytes'] / 1e6:10.1f} {entry['flops'] / 1e9:10.1f} {entry['floor_us']:12.1f} "
                     f"{entry['us'] / entry['floor_us']:7.2f}")
        yield line


def gap_lines(events: list[Event], most: int = 5):
    """Lines of the longest gaps, and between which kernels they are."""
    end, before, gaps = events[0].end, events[0], []
    for event in events[1:]:
        if event.start > end:
            gaps.append((event.start - end, before.name, event.name))
        if event.end > end:
            end, before = event.end, event
    for us, before, after in sorted(gaps, reverse=True)[:most]:
        yield f"gap of {us:.1f} us between {short_name(before)} and {short_name(after)}"


def distances(found: dict) -> dict[str, tuple[float, float]]:
    """Microseconds and floor: of each kind that has one, of all other kernels together, of the gaps and of all."""
    bounded = {kind: (entry["us"], entry["floor_us"]) for kind, entry in found["kinds"].items() if "floor_us" in entry}
    others = sum(entry["us"] for entry in found["kinds"].values() if "floor_us" not in entry)
    return bounded | {"other kernels": (others, 0.0), "gaps": (found["gaps_us"], 0.0),
                      "all": (found["span_us"], found["floor_us"])}


def distance_lines(found: dict):
    rows = distances(found)
    whole = rows["all"][0] - rows["all"][1]
    yield f"{'what fills the distance':24} {'us':>12} {'floor us':>12} {'distance':>12} {'share':>8}"
    for name, (us, floor) in rows.items():
        yield f"{name:24} {us:12.1f} {floor:12.1f} {us - floor:12.1f} {100 * (us - floor) / whole:7.1f}%"


# What parts cannot do without: bytes and FLOPs by kind

def head_work(model, rows: int) -> tuple[int, int]:
    """Of drawing a token for each row: the LM head is read, logits stay where they are made."""
    numbers = model.lm_head.weight.numel()
    return numbers * model.compute_dtype.itemsize, 2 * numbers * rows


def token_work(model, prompts: int, rows: int, prompt: int, own: int) -> dict:
    """Of a token of rows that have `own` tokens after their prompts, whose keys and values are read once for all their
    rows."""
    config, itemsize, weights = model.config, model.compute_dtype.itemsize, matrix_weights(model)
    cached = 2 * config.n_layer * config.n_kv_head * config.head_dim * itemsize  # bytes per token
    pairs = rows * (prompt + own) * config.n_layer
    return {"products": (weights * itemsize, 2 * weights * rows), "head": head_work(model, rows),
            "attention": (cached * (prompts * prompt + rows * own), 4 * config.n_head * config.head_dim * pairs)}


def refill_work(model, prompts: int, rows: int, prompt: int) -> dict:
    """Of running prompts, and of the first tokens of their rows. The last layer attends from the last tokens alone."""
    config, itemsize, tokens = model.config, model.compute_dtype.itemsize, prompts * prompt
    weights, D = prompt_weights(model), config.head_dim
    pairs = prompts * ((config.n_layer - 1) * prompt * (prompt + 1) / 2 + prompt)
    kept = 2 * config.n_layer * (config.n_head + config.n_kv_head) * D * itemsize  # queries, keys, values, outputs
    return {"products": (weights * itemsize, 2 * weights * tokens), "head": head_work(model, rows),
            "attention": (kept * tokens, 4 * config.n_head * D * pairs)}


def update_work(model, prompts: int, rows: int, prompt: int, completion: int) -> dict:
    """Of an update: products and attention forward and backward, and AdamW, which reads weights, gradients and two
    moments and writes all but the gradients."""
    config, itemsize = model.config, model.compute_dtype.itemsize
    flops, tokens = update_flops(model, prompts, rows, prompt, completion), prompts * prompt + rows * completion
    # forward: q, k, v, out; backward: these, the output's gradient, and those of q, k and v
    moved = 6 * (config.n_head + config.n_kv_head) * config.head_dim * config.n_layer * tokens
    moved_bytes = {"products": 3 * matrix_weights(model) * itemsize, "attention": moved * itemsize,
                   "head": 3 * model.lm_head.weight.numel() * itemsize}
    return {kind: (moved_bytes[kind], work) for kind, work in flops.items()} | {
        "optimizer": (sum(7 * p.numel() * p.element_size() for p in model.parameters()), 0)}


# Running them

def sampling_parts(args, model, device):
    """Yields the parts of sampling, of rows that are in the middle of their completions."""
    G, length = args.num_samples, args.completion_len
    refilled = min(args.rows, G * math.ceil(REFILL * args.rows / G))
    prompts = -(-(args.rows + (RUNS + 3) * refilled) // G)  # each run of a refill takes some that wait
    draw = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(args.vocab_size, (prompts, args.prompt_len), generator=draw).tolist()
    decoding = Decoding(model, ids, G, length, [], [row_key(args.seed, n) for n in range(prompts * G)], 1.0, 0,
                        args.rows, None)
    decoding.fill()
    batch = torch.tensor(decoding.slots.batch(args.rows), device=device)
    halfway = lambda: decoding.drawn.fill_(length // 2)
    work = token_work(model, args.rows // G, args.rows, args.prompt_len, length // 2)
    if uses_graphs(device):
        graphs = Graphs(decoding.step)
        yield Part("token by graph", halfway, lambda: graphs(batch), work)
    yield Part("token", halfway, lambda: decoding.step(batch), work)

    def end_some():
        """As if these rows had ended."""
        places = decoding.slots.batch(args.rows)[:refilled]
        decoding.row[torch.tensor(places, device=device)] = decoding.num_rows
        decoding.slots.release(places)
    yield Part("refill", end_some, decoding.fill, refill_work(model, refilled // G, refilled, args.prompt_len))


def update_part(args, role, device) -> Part:
    """An update on random rollouts, all of full length."""
    P, N = args.examples_per_step, args.examples_per_step * args.num_samples
    prompt, completion = args.prompt_len, args.completion_len
    draw = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(args.vocab_size, (P, prompt), generator=draw).tolist()
    tokens = torch.randint(args.vocab_size, (N, completion), generator=draw).to(device)
    rollouts = Rollouts([Prompt(x) for x in ids], torch.arange(P, device=device).repeat_interleave(args.num_samples),
                        tokens, torch.zeros(N, completion, device=device),
                        torch.full((N,), completion, device=device),
                        torch.zeros(N, dtype=torch.bool, device=device))
    return Part("update", lambda: None, lambda: train(args, role, rollouts, draw, device),
                update_work(role.model, P, N, prompt, completion))


def events_of(profiler, device) -> list[Event]:
    """The kernels that ran, in the order of time; on CPU the operations."""
    on_cuda, events = device.type == "cuda", []
    for event in profiler.events():
        span = event.time_range
        busy = span.elapsed_us() if on_cuda else event.self_cpu_time_total
        is_kernel = (event.device_type == torch.autograd.DeviceType.CUDA) == on_cuda and not event.is_user_annotation
        if is_kernel and busy > 0:
            events.append(Event(event.name, span.start, span.end, busy))
    return sorted(events, key=lambda event: event.start)


def measure(part: Part, speed, device, trace: str, unknown: set[str]) -> dict:
    """Runs a part, and prints its tables. -> its summary. unknown: gets the names that no rule fits"""
    seconds = []
    for _ in range(2 + RUNS):
        part.prepare()
        seconds.append(seconds_of(part.action, device))
    part.prepare()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]) as profiler:
        part.action()
        synchronize(device)
    if trace:
        os.makedirs(trace, exist_ok=True)
        profiler.export_chrome_trace(os.path.join(trace, f"{part.title.replace(' ', '_')}.json"))
    events = events_of(profiler, device)
    unknown |= {short_name(event.name) for event in events if kind_of(event.name) == OTHER}
    found = {"wall_us": 1e6 * statistics.median(seconds[2:])} | summary(events, part.work, speed)
    print0(f"\n{part.title}: {found['launches']} launches, {found['span_us']:.1f} us from the first to the last; wall "
           f"{found['wall_us']:.1f} us")
    for lines in (kernel_lines(events, found["span_us"]), kind_lines(found), gap_lines(events), distance_lines(found)):
        print0("\n" + "\n".join(lines))
    return found


def rounded(found: dict) -> dict:
    """The numbers of a summary with at most five digits."""
    return {key: rounded(x) if isinstance(x, dict) else x if isinstance(x, int) else float(f"{x:.5g}")
            for key, x in found.items()}


def main(args) -> None:
    if args.rows % args.num_samples:
        raise BadInput(f"--rows {args.rows}: must be a multiple of --num-samples {args.num_samples}")
    device = init_device(args.device_type)
    check_compile(args, device)
    role = make_role(args, "generator", args.prompt_len + args.completion_len, device)
    speed, unknown = machine_speed(device, DTYPES[args.dtype]), set()
    print0(f"this machine: {speed[0] / 1e12:.4g} TFLOP/s of products, {speed[1] / 1e9:.4g} GB/s of copies")
    run = lambda part: measure(part, speed, device, args.trace, unknown)
    model = inference_model(role.model)
    with torch.inference_mode(), model.joined_projections():
        results = {part.title: run(part) for part in sampling_parts(args, model, device)}
    results["update"] = run(update_part(args, role, device))
    print0("\n".join(unknown_lines(unknown)))
    print0(json.dumps({"results": rounded(results), "matmul_gflop_per_s": round(speed[0] / 1e9),
                       "copy_gb_per_s": round(speed[1] / 1e9, 1), "threads": torch.get_num_threads(),
                       "torch": torch.__version__, "device": str(device), **vars(args)}))


if __name__ == "__main__":
    script_main(main, make_parser())
