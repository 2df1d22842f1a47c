"""
The seconds that sampling takes on one GPU, on paper: where they go, and what another policy of refilling would save.

The real nanochat.slots.Slots decides who sits where, given the lengths that rows turn out to have. A step of n rows
takes

    launches * launch + bytes / bandwidth + n * FLOPs / products

seconds: the kernels of a replayed graph follow each other in `launch`; weights and cached keys are read once;
`products` is what products of so few rows reach. CARDS says where the constants come from. A model, not a measurement.

    python -m dev.bench.clock
"""
import argparse
import math
import random
import statistics
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import torch

from nanochat import slots as slots_module
from nanochat.cli import at_least, script_main
from nanochat.common import print0
from nanochat.engine import CHECK_EVERY_CUDA, LEAST_ROWS_CUDA, PREFILL_TOKENS, in_pieces, size_of_batch
from nanochat.flops import matrix_weights, prompt_weights
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder
from nanochat.hf.shapes import shape_of
from nanochat.slots import REFILL, Slots


class Card(NamedTuple):
    """What a GPU reaches, in bytes/s, FLOP/s and seconds."""
    bandwidth: float  # of a large copy
    launch: float     # a kernel of a replayed graph: from one to the next, its own work aside
    products: float   # of a decoding step
    prefill: float    # of prompts that are run
    train: float      # of updates, 6 FLOPs a weight and token and 2 more where blocks are recomputed
    eager: float      # a kernel that the host launches, in a step without a graph or in a prefill
    look: float       # that the GPU waits while the host looks which rows have ended


# From the table of GPU days in dev/BENCH.md: bandwidth from the engine stage's floor; launch and products solve that
# stage (255 steps of 256 rows) and the sampling of the Tango step (511 of 128 rows, on the H200 the mean of four);
# prefill is the engine stage's on the H200, and what is left of the Tango step's verifications on the H100; train is
# the Tango step's update. Assumptions: look, and eager, which is the most that the H200's prefill allows. Whatever was
# measured would be as well explained with less of eager and more of something else: the tables have two values of it.
CARDS = {
    "H100": Card(2.96e12, 2.7e-6, 650e12, 420e12, 360e12, 50e-6, 3e-4),
    "H200": Card(3.99e12, 1.8e-6, 416e12, 490e12, 350e12, 50e-6, 3e-4),
}


class Shape(NamedTuple):
    """What of a model's shape a step costs by."""
    weights: int         # that multiply a decoded token: matrices and head
    head: int            # of these the head's
    prompt_weights: int  # that multiply a prompt's token
    parameters: int
    cached: int          # bytes of a token's keys and values
    launches: float      # of a step (dev/bench/count_launches.py)


class Policy(NamedTuple):
    """How places are refilled, and batches cut."""
    refill: float = REFILL           # share of places that must be free
    every: int = CHECK_EVERY_CUDA    # tokens between looks
    sizes: int = 0                   # batches also have i of so many parts of all places; 0: halves alone
    graphs: bool = True              # as on CUDA
    kept: bool = False               # graphs are there from the call before
    late: bool = False               # a look sees what was true one window ago, and nothing waits for it
    ahead: bool = False              # prompts that wait are run beside those that sit down, PREFILL_TOKENS at once


class Fill(NamedTuple):
    """Waiting rows get places: each piece of prompts that run together as (prompts, tokens of the longest)."""
    pieces: list[tuple[int, int]]


class Steps(NamedTuple):
    """`steps` steps of `size` places. Sums over them: places that drew a token, places whose row had ended unseen,
    tokens whose keys were read; waiting: whether rows waited for places."""
    size: int
    steps: int
    drawn: int
    ended: int
    read: int
    waiting: bool


def sampling(lengths: list[list[int]], prompts: list[int], max_rows: int, policy: Policy = Policy()) -> list:
    """What engine.Decoding.run does on CUDA with rows that turn out to have these lengths. lengths (P, G), prompts (P,)
    tokens -> Fill and Steps in their order"""
    with mock.patch.object(slots_module, "REFILL", policy.refill):
        return list(decoding(seated(lengths, prompts, max_rows), lengths, prompts, policy))


def seated(lengths: list[list[int]], prompts: list[int], max_rows: int, kind=Slots) -> Slots:
    """The slots that engine.Decoding makes of prompts that share no start."""
    G, order = len(lengths[0]), sorted(range(len(prompts)), key=lambda p: (-prompts[p], p))
    return kind([(p, range(p * G, (p + 1) * G)) for p in order], min(max_rows, G * len(prompts)))


def decoding(slots: Slots, lengths: list[list[int]], prompts: list[int], policy: Policy) -> Iterator:
    """The same from these slots, one event after the other."""
    flat = [n for group in lengths for n in group]
    longest, places = max(flat) - 1, slots.num_places
    more = [places * i // policy.sizes for i in range(1, policy.sizes)]
    left, own, prompt_of, ready, batch, seen = {}, {}, {}, set(), None, set()
    while True:
        if slots.may_fill():
            ahead = [p for p, _ in slots.waiting]
            rows, taken, _, new = slots.fill()
            prompt_of |= {slot: prompts[p] for p, slot in new}
            to_run = [p for p, _ in new if p not in ready]
            if policy.ahead and to_run:
                ahead = [p for p in ahead if p not in ready and p not in to_run]
                to_run += ahead[: max(0, PREFILL_TOKENS // prompts[to_run[0]] - len(to_run))]
            ready |= set(to_run)
            to_run.reverse()
            yield Fill([(len(some), prompts[some[-1]]) for some in in_pieces(to_run, [prompts[p] for p in to_run])])
            left |= {place: flat[row] - 1 for row, place in zip(rows, taken, strict=True)}
            own |= dict.fromkeys(taken, 1)
            batch = None
        ended = {place for place in slots.live if left[place] <= 0}
        slots.release(sorted(seen if policy.late else ended))
        seen = set()
        if slots.may_fill():
            continue
        if not slots.live:
            return
        size = min([size_of_batch(slots, batch and len(batch), policy.graphs),
                    *(n for n in more if n >= max(len(slots.live), LEAST_ROWS_CUDA))])
        if batch is None or size < len(batch):
            batch = slots.batch(size)
        seen = {place for place in slots.live if left[place] <= 0}
        steps, live = policy.every, [place for place in batch if place in slots.live]
        drawn = sum(min(max(left[place], 0), steps) for place in live)
        read = steps * sum(prompt_of[slot] for slot in {slots.live[place] for place in live})
        read += sum(min(steps * own.get(place, 1) + steps * (steps - 1) // 2, steps * longest) for place in batch)
        yield Steps(size, steps, drawn, steps * len(live) - drawn, read, slots.num_waiting > 0)
        for place in batch:
            left[place], own[place] = left.get(place, 0) - steps, own.get(place, 1) + steps


def step_seconds(card: Card, shape: Shape, rows: int, cached_tokens: float) -> float:
    """A decoding step of so many rows that reads the keys of so many tokens."""
    return (shape.launches * card.launch + (2 * shape.weights + cached_tokens * shape.cached) / card.bandwidth
            + 2 * shape.weights * rows / card.products)


def prefill_seconds(card: Card, shape: Shape, num: int, tokens: int) -> float:
    """Prompts that run together: their products, or the launches of the host if these take longer."""
    return max(2 * shape.prompt_weights * num * tokens / card.prefill, shape.launches * card.eager)


def seconds(events: list, card: Card, shape: Shape, policy: Policy = Policy()) -> dict[str, float]:
    """Seconds by what becomes of the places in them, which sum to the whole: drawing; "ended", not yet seen; "free"
    while rows wait; "tail", free since none waits; and of all places fills, graphs and looks."""
    parts, graphs = dict.fromkeys(("drawing", "ended", "free", "tail", "fills", "graphs", "looks"), 0.0), set()
    places = max((event.size for event in events if isinstance(event, Steps)), default=1)
    for event in events:
        if isinstance(event, Fill):
            parts["fills"] += sum(prefill_seconds(card, shape, *piece) for piece in event.pieces)
            continue
        if event.size not in graphs and not policy.kept:  # a plain step, then a capture
            parts["graphs"] += 2 * shape.launches * card.eager
        graphs.add(event.size)
        took = event.steps * step_seconds(card, shape, event.size, event.read / event.steps)
        drawing, ended = (took * n / (places * event.steps) for n in (event.drawn, event.ended))
        parts["drawing"] += drawing
        parts["ended"] += ended
        parts["free" if event.waiting else "tail"] += took - drawing - ended
        parts["looks"] += 0.0 if policy.late else card.look
    return parts


def shape(model, launches_of_layer: float, other_launches: float) -> Shape:
    """Of a model whose weights are in bf16. Its parameters may be on device meta."""
    config, numbers = model.config, sum(p.numel() for p in model.parameters())
    head = model.lm_head.weight.numel()
    return Shape(matrix_weights(model) + head, head, prompt_weights(model), numbers,
                 2 * 2 * config.n_layer * config.n_kv_head * config.head_dim,
                 launches_of_layer * config.n_layer + other_launches)


def shapes() -> dict[str, Shape]:
    """Of the models of the GPU days, with the launches that a step had on those days (count_launches at 7bbe105)."""
    with torch.device("meta"):
        qwen = Decoder(shape_of("qwen2.5-math-1.5b"), torch.bfloat16)
        gpt = GPT(GPTConfig(768, 32768, 28, 12, 2, 1536, "L"), torch.bfloat16)
    return {"1.5B": shape(qwen, 14, 21), "refill": shape(gpt, 14.5, 28)}


# The tables of dev/BENCH.md

STAGES = {  # shape, prompts, samples of each, tokens of a prompt and a completion; measured seconds on H100 and H200
    "engine, without its prefill": ("1.5B", 32, 8, 512, 256, 65280 / 63278, 65280 / 64833),
    "Tango step, solutions": ("1.5B", 16, 8, 256, 512, 1.68, 1.47),
    "Tango step, verifications": ("1.5B", 128, 1, 768, 256, 1.70, 1.61),
}
REFILL_MEASURED = {"H100": 31170, "H200": 48422}  # tokens/s after the first ones, without a prefill of all prompts
POLICIES = {
    "free before a refill: 1/16": Policy(refill=1 / 16), "1/4": Policy(refill=1 / 4),
    "tokens between looks: 8": Policy(every=8), "32": Policy(every=32),
    "batches of 1/8, 2/8, ... too": Policy(sizes=8), "a look one window late, no wait": Policy(late=True),
    "graphs kept between calls": Policy(kept=True), "prompts run ahead": Policy(ahead=True),
    "the last two, 1/16 free": Policy(kept=True, ahead=True, refill=1 / 16),
}


def geometric(num: int, samples: int, seed: int, mean: int = 128, most: int = 512) -> list[list[int]]:
    """Lengths of which each token may be the last, all alike, as in dev.bench.engine --mean-len."""
    rng = random.Random(seed)
    end = lambda: 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean))
    return [[min(most, end()) for _ in range(samples)] for _ in range(num)]


def refill_seconds(card: Card, of: Shape, seed: int, policy: Policy = Policy(), max_rows: int = 256) -> dict:
    """The refill stage: 128 prompts of 256 tokens x 8."""
    return seconds(sampling(geometric(128, 8, seed), [256] * 128, max_rows, policy), card, of, policy)


def spread(values: list[float], form: str = "{:.1f}") -> str:
    """a (b - c): mean, lowest and highest."""
    return "{} ({} - {})".format(*(form.format(x) for x in (statistics.mean(values), min(values), max(values))))


def main(args) -> None:
    known = shapes()
    for i, (name, card) in enumerate(CARDS.items()):
        for stage, (of, P, G, prompt, completion, *measured) in STAGES.items():
            parts = seconds(sampling([[completion] * G] * P, [prompt] * P, 1024), card, known[of])
            total = sum(parts.values()) - ("without its prefill" in stage) * parts["fills"]
            print0(f"| {name} | {stage} | {measured[i]:.2f} | {total:.2f} |")
        for eager in (10e-6, card.eager):
            this, seeds = card._replace(eager=eager), range(args.seeds)
            base = [refill_seconds(this, known["refill"], seed) for seed in seeds]
            wholes, tokens = [sum(parts.values()) for parts in base], [
                sum(map(sum, geometric(128, 8, seed))) - 1024 for seed in seeds]
            prefill = sum(seconds(sampling([[1] * 8] * 128, [256] * 128, 256), this, known["refill"]).values())
            rates = [n / (whole - prefill) for n, whole in zip(tokens, wholes, strict=True)]
            print0(f"{name}, {eager * 1e6:.0f} us a launch: {spread(rates, '{:,.0f}')} tokens/s, measured "
                   f"{REFILL_MEASURED[name]:,}; % of the seconds: " + ", ".join(
                       f"{part} {100 * statistics.mean(p[part] / sum(p.values()) for p in base):.1f}"
                       for part in base[0]))
            for what, policy in POLICIES.items():
                saved = [100 * (1 - sum(refill_seconds(this, known["refill"], seed, policy).values()) / whole)
                         for seed, whole in zip(seeds, wholes, strict=True)]
                print0(f"| {what} | {spread(saved)} |")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--seeds", type=at_least(1), default=5, help="draws of the lengths")
    return parser


if __name__ == "__main__":
    script_main(main, make_parser())
