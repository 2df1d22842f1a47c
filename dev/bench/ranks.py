"""
A step of RL Tango's generator on several GPUs, on paper: where ranks wait for each other, and what would even it out.

Each rank samples the solutions of its problems, waits, verifies them, waits, and updates by FSDP2, whose gathers hold
the ranks together from micro-batch to micro-batch. The seconds are those of dev.bench.clock, of links besides; the
lengths are real ones (dev.bench.lengths) or lognormal. A model, not a measurement.

    python -m dev.bench.ranks --lengths chain.json gsm8k.json
"""
import argparse
import itertools
import json
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dev.bench.clock import CARDS, Card, Policy, Shape, decoding, sampling, seated, seconds, shapes, spread
from nanochat.cli import at_least, script_main
from nanochat.common import BadInput, print0
from nanochat.slots import Slots

# Bytes/s from one H100 or H200 to another, one way: half of the 900 GB/s of the vendor's data sheet
# (nvidia.com/en-us/data-center/h100).
NVLINK = 450e9
WEIGHT, GRADIENT = 2, 4  # bytes of one, as ranks exchange it


class Problem(NamedTuple):
    """Tokens of a problem's prompt and of its G solutions, of what the verifier reads for each, and writes; `known`:
    the mean of other solutions of the same problem."""
    prompt: int
    solutions: list[int]
    read: list[int]
    verifications: list[int]
    known: float


class Step(NamedTuple):
    """Seconds of each phase, in which the slowest rank counts, and the mean seconds that a rank waits in them."""
    took: dict[str, float]
    waited: dict[str, float]

    @property
    def whole(self) -> float:
        return sum(self.took.values())

    @property
    def idle(self) -> float:
        return sum(self.waited.values()) / self.whole


# Dealing

def in_turn(items: Sequence, ranks: int) -> list[list]:
    """As Play.problems deals: item i is of rank i modulo `ranks`."""
    return [list(items[rank::ranks]) for rank in range(ranks)]


def longest_first(items: Sequence, ranks: int, cost: Callable) -> list[list]:
    """The costliest first, each to the rank with the least so far that has not yet its share of the items."""
    dealt, sums, most = [[] for _ in range(ranks)], [0.0] * ranks, -(-len(items) // ranks)
    for item in sorted(items, key=cost, reverse=True):
        rank = min((r for r in range(ranks) if len(dealt[r]) < most), key=lambda r: sums[r])
        dealt[rank].append(item)
        sums[rank] += cost(item)
    return dealt


# Phases: seconds of each rank

def sampled(lengths: list[list[int]], prompts: list[int], max_rows: int, card: Card, shape: Shape) -> float:
    return sum(seconds(sampling(lengths, prompts, max_rows), card, shape).values()) if lengths else 0.0


class Shared(Slots):
    """Slots whose waiting rows are those of all ranks."""
    num_waiting = property(lambda self: sum(len(rows) for _, rows in self.waiting), lambda self, value: None)


def sampled_from_one_queue(lengths: list[list[int]], prompts: list[int], max_rows: int, ranks: int, card: Card,
                           shape: Shape) -> list[float]:
    """Seconds of each rank where all take rows from one queue as they have places, which costs nothing."""
    whole = seated(lengths, prompts, max_rows).waiting
    share, queue = -(-sum(map(len, lengths)) // ranks), deque(whole)
    runs, clocks, graphs = [], [0.0] * ranks, [set() for _ in range(ranks)]
    for _ in range(ranks):
        slots = Shared(list(whole), min(max_rows, share))
        slots.waiting = queue
        runs.append(decoding(slots, lengths, prompts, Policy()))
    while any(runs):
        rank = min((r for r in range(ranks) if runs[r]), key=lambda r: clocks[r])
        event = next(runs[rank], None)
        if event is None:
            runs[rank] = None
            continue
        size = getattr(event, "size", 0)
        clocks[rank] += sum(seconds([event], card, shape, Policy(kept=size in graphs[rank])).values())
        graphs[rank].add(size)
    return clocks


def micro_batches(groups: list[tuple[int, list[int]]], max_tokens: int) -> list[tuple[int, int]]:
    """As rl.learn.packing.pack makes them of groups (tokens of the prompt, of each row). -> of each, the tokens that go
    through the blocks, and those through the head"""
    units = []
    for prompt, rows in groups:
        per_unit = min(len(rows), max(1, (max_tokens - prompt) // max(rows)))
        units += [(prompt, rows[i: i + per_unit], max(rows)) for i in range(0, len(rows), per_unit)]
    units.sort(key=lambda unit: (len(unit[1]), unit[2], unit[0]))
    batches, current = [], []
    for unit in units:
        grown, R = [*current, unit], len(unit[1])
        if current and (len(current[0][1]) != R or padded(grown) > max_tokens):
            batches.append(current)
            grown = [unit]
        current = grown
    batches += [current] if current else []
    return [(sum(prompt + sum(rows) for prompt, rows, _ in batch), sum(sum(rows) for _, rows, _ in batch))
            for batch in batches]


def padded(units: list[tuple[int, list[int], int]]) -> int:
    """Tokens of units (tokens of the prompt, of each row, of the longest), all as wide as the widest."""
    return len(units) * (max(unit[0] for unit in units) + len(units[0][1]) * max(unit[2] for unit in units))


def updated(dealt: list[list[Problem]], max_tokens: int, card: Card, shape: Shape, shard: bool,
            largest_first: bool = True) -> tuple[float, list[float]]:
    """Seconds of an update, and of each rank's own work in it. shard: every micro-batch waits for its slowest rank, and
    lasts as long as the gathers of a forward and a backward pass and the sum of gradients, which run beside it; else
    ranks wait once, and sum all gradients at the end. largest_first: as Play.even orders micro-batches, else as they
    are packed."""
    R, groups = len(dealt), [[(p.prompt, p.solutions) for p in problems] for problems in dealt]
    work = [[8 * ((shape.weights - shape.head) * run + shape.head * trained) / card.train
             for run, trained in micro_batches(rows, max_tokens)] for rows in groups]
    part, own = shape.parameters * (R - 1) / R / NVLINK, [sum(of_rank) for of_rank in work]
    if largest_first:
        work = [sorted(of_rank, reverse=True) for of_rank in work]
    if not shard:
        return max(own) + 2 * GRADIENT * part, own
    took = sum(max((2 * WEIGHT + GRADIENT) * part, *side_by_side)
               for side_by_side in itertools.zip_longest(*work, fillvalue=0.0))
    return took + WEIGHT * part, own  # and the copy that is sampled from


def step(dealt: list[list[Problem]], card: Card, shape: Shape, *, max_rows: int = 1024, max_tokens: int = 16384,
         shard: bool = True, largest_first: bool = True, one_queue: bool = False, verify_evenly: bool = False,
         update_evenly: bool = False, at_once: bool = False) -> Step:
    """A generator step of ranks that were dealt these problems. one_queue: waiting rows go to whoever has a place;
    verify_evenly: solutions change ranks by what the verifier reads; at_once: a rank verifies as soon as it has its own
    solutions; update_evenly: all ranks do the mean of their work in the update, which no exchange can better."""
    R, flat = len(dealt), [p for problems in dealt for p in problems]
    if one_queue:
        solved = sampled_from_one_queue([p.solutions for p in flat], [p.prompt for p in flat], max_rows, R, card, shape)
    else:
        solved = [sampled([p.solutions for p in problems], [p.prompt for p in problems], max_rows, card, shape)
                  for problems in dealt]
    judged = [[pair for p in problems for pair in zip(p.read, p.verifications, strict=True)] for problems in dealt]
    if verify_evenly:
        judged = longest_first([pair for pairs in judged for pair in pairs], R, lambda pair: pair[0])
    verified = [sampled([[written] for _, written in pairs], [read for read, _ in pairs], max_rows, card, shape)
                for pairs in judged]
    by_rank = {"sampling": solved, "verification": verified}
    if at_once:
        by_rank = {"both": [sum(both) for both in zip(solved, verified, strict=True)]}
    took = {name: max(times) for name, times in by_rank.items()}
    took["update"], by_rank["update"] = updated(dealt, max_tokens, card, shape, shard, largest_first)
    if update_evenly:
        took["update"] = statistics.mean(by_rank["update"])
    return Step(took, {name: took[name] - statistics.mean(times) for name, times in by_rank.items()})


# Lengths

def real(path: str) -> list[Problem]:
    """Problems of a file of dev.bench.lengths. Raises BadInput where it is none."""
    names = ("prompts", "solutions", "verifier_prompts", "verifications", "known")
    try:
        with open(path) as f:
            found = json.load(f)
        problems = [Problem(*row) for row in zip(*(found[name] for name in names), strict=True)]
        fine = all(p.solutions and min(p.prompt, *p.solutions, *p.read, *p.verifications) > 0 for p in problems)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"--lengths {path}: is no file of dev.bench.lengths ({type(error).__name__}: {error})") from None
    if not fine:
        raise BadInput(f"--lengths {path}: has a problem without solutions, or lengths below 1")
    return problems


def lognormal(num: int, samples: int, seed: int, median: float = 500, p99: float = 5000, limit: int = 8192,
              between: float = 0.5, prompt: int = 128) -> list[Problem]:
    """Problems whose solutions have lognormal lengths, of whose variance a share is between problems, and
    verifications half as long."""
    rng, problems = random.Random(seed), []
    for _ in range(num):
        common = rng.gauss(0, between ** 0.5)
        draw = lambda scale, common=common: [
            min(limit, max(1, round(scale * (p99 / median) ** ((common + rng.gauss(0, (1 - between) ** 0.5)) / 2.326))))
            for _ in range(samples)]
        solutions, known = draw(median), statistics.mean(draw(median))
        problems.append(Problem(prompt, solutions, [prompt + n for n in solutions], draw(median / 2), known))
    return problems


# The tables of dev/BENCH.md

KNOWN, PROMPT = (lambda p: p.known), (lambda p: p.prompt)
RULES: dict[str, tuple[Callable | None, dict]] = {  # what problems are dealt by, if not in turn; options of `step`
    "by known lengths": (KNOWN, {}), "by prompts": (PROMPT, {}), "one queue": (None, {"one_queue": True}),
    "solutions change ranks": (None, {"verify_evenly": True}), "no wait before verifying": (None, {"at_once": True}),
    "update even": (None, {"update_evenly": True}), "no --shard": (None, {"shard": False}),
    "known, no wait, even": (KNOWN, {"at_once": True, "update_evenly": True}),
    "micro-batches as packed": (None, {"largest_first": False})}


def rows(problems: list[list[Problem]], ranks: int, card: Card, shape: Shape, max_rows: int) -> dict[str, list[float]]:
    """Of several draws of a step's problems: seconds, % of them in which a rank waits, in all and by phase, and % that
    each rule saves."""
    found: dict[str, list[float]] = {}
    for drawn in problems:
        base = step(in_turn(drawn, ranks), card, shape, max_rows=max_rows)
        cells = {"s": base.whole, "idle": 100 * base.idle} | {
            f"in {name}": 100 * seconds / base.whole for name, seconds in base.waited.items()}
        for name, (key, options) in RULES.items():
            dealt = longest_first(drawn, ranks, key) if key else in_turn(drawn, ranks)
            cells[name] = 100 * (1 - step(dealt, card, shape, max_rows=max_rows, **options).whole / base.whole)
        for name, value in cells.items():
            found.setdefault(name, []).append(value)
    return found


def main(args) -> None:
    card, shape = CARDS[args.card], shapes()["1.5B"]
    pools, most = {path: real(path) for path in args.lengths}, max(args.ranks) * args.problems_per_rank
    for path, pool in pools.items():
        if len(pool) < most:
            raise BadInput(f"--lengths {path}: has {len(pool)} problems, and a step takes {most}")
    for path, pool in pools.items():
        for name, lengths in (("solutions", [n for p in pool for n in p.solutions]),
                              ("verifications", [n for p in pool for n in p.verifications])):
            if lengths:
                print0(f"{path}: {name} {statistics.mean(lengths):.0f} tokens, median {statistics.median(lengths):.0f},"
                       f" of 99% at most {sorted(lengths)[len(lengths) * 99 // 100]}, longest {max(lengths)}")
    for name, ranks in itertools.product([*pools, "lognormal"], args.ranks):
        num = ranks * args.problems_per_rank
        drawn = [lognormal(num, 8, seed) if name == "lognormal" else random.Random(seed).sample(pools[name], num)
                 for seed in range(args.seeds)]
        print0(f"{name}, {ranks} ranks: " + ", ".join(
            f"{cell} {spread(values, '{:.2f}' if cell == 's' else '{:.1f}')}"
            for cell, values in rows(drawn, ranks, card, shape, args.max_rows).items()))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--lengths", nargs="*", default=[], metavar="FILE.json", help="files of dev.bench.lengths")
    parser.add_argument("--card", choices=list(CARDS), default="H100")
    parser.add_argument("--ranks", nargs="+", type=at_least(1), default=[2, 4, 8])
    parser.add_argument("--problems-per-rank", type=at_least(1), default=16)
    parser.add_argument("--max-rows", type=at_least(1), default=1024, help="rows of a rank that decode together")
    parser.add_argument("--seeds", type=at_least(1), default=5, help="draws of a step's problems")
    return parser


if __name__ == "__main__":
    script_main(main, make_parser())
