"""
Is it better to sample more solutions and vote, or to verify fewer of them? Accuracy at equal sampled tokens, after
Singhi et al. 2025 (arXiv 2504.01005).

S solutions of each test_in problem and V verifications of each solution are sampled once. The script then looks at
all s up to S and v up to V that are powers of two. Without verifications the most frequent answer is taken (maj).
With them it is the solution with the highest score (bon), or the answer whose solutions have the largest sum of scores
(weighted); a score is the share of v verifications that say CORRECT (--score). Accuracies are means over --num-draws
random orders of solutions and of verifications, of which the first s and v count; ties are broken at random by that.
Tokens per problem are s (solution + v verification), with the problem's mean lengths. Tokens that are only read, as
prompts are, do not count.

A front is the points with more accuracy than all cheaper ones. The crossover is the fewest tokens from which on all
points of the front of verifying are above voting; between two votes voting is read off on a scale of log tokens. Points
of verifying that cost more than S solutions are not compared, but counted. The front is chosen on the problems that it
is scored on, and has more points to choose from than voting, so its lead is a little too high.

Departures from the paper: lengths are measured, where the paper sets a ratio of verification to solution; the vote has
the same S solutions and no more, so --num-samples says how far the comparison goes.

    python -m scripts.verify_or_sample --generator-tag d4 --verifier-tag d4-ver --out curves.json
    torchrun --standalone --nproc_per_node=8 scripts/verify_or_sample.py -- --generator-tag d4 --verifier-tag d4-ver
"""
import argparse
import os
import random
from itertools import accumulate
from math import log
from statistics import mean
from typing import NamedTuple

from nanochat.common import (BadInput, check_least, check_most, check_name, init_device, print0, rank_and_world,
                             script_main)
from nanochat.files import path_of, whole_file, write_json
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.page import COLOURS
from nanochat.rl.report import height_at, interval
from nanochat.rl.voting import SCORES, choose
from scripts.verifier_eval import (add_generator_args, add_verifier_args, check_players, load_players, shown,
                                   verified_solutions)
from tasks import add_task_args, task_flags

VOTE = "maj"
VERIFIED = ("bon", "weighted")
PARTS = {"problems", "problems_left_out", "too_long", "points", "fronts", "crossover", "not_compared", "samples"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    add_verifier_args(parser)
    parser.add_argument("--num-draws", type=int, default=32, help="random orders of each problem's samples")
    add_generator_args(parser.add_argument_group("solutions"), is_needed=True)
    add_task_args(parser)
    parser.set_defaults(num_samples=32, num_verifications=8, temperature=1.0, judge_report=False,
                        **dict.fromkeys(task_flags()))
    return parser


def check_args(args) -> None:
    check_least(args, {"num_draws": 1})
    check_most(args, {"num_draws": 10 ** 5})
    check_name("--generator-tag", args.generator_tag)
    check_players(args, PARTS)
    for name in ("num_samples", "num_verifications"):
        if getattr(args, name) not in powers(getattr(args, name)):
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: must be a power of two")
    picture = picture_path(args.out)
    if args.out and os.path.lexists(picture) and not (os.path.isfile(picture) and os.path.exists(args.out)):
        raise BadInput(f"--out {args.out}: {picture} is there, and not of an earlier result; take another name")


def picture_path(out: str) -> str:
    return out.removesuffix(".json") + ".png"


# The curves

class Point(NamedTuple):
    """What a way to choose comes to. tokens: per problem; half: of the accuracy's 95% interval over problems, None for
    a single one."""
    choice: str  # VOTE, or one of VERIFIED
    solutions: int
    verifications: int
    tokens: float
    accuracy: float
    half: float | None = None


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2 ** i for i in range(most.bit_length())]


def expected(row: dict, num_draws: int, rng: random.Random, score) -> dict[tuple[str, int, int], float]:
    """(choice, s, v) -> how likely one problem is solved so. row: of `verified_solutions`, all outcomes known."""
    n, k = len(row["answers"]), len(row["verdicts"][0])
    hits: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(num_draws):
        order = rng.sample(range(n), n)
        said = [rng.sample(range(k), k) for _ in order]
        answers, outcomes = ([row[name][i] for i in order] for name in ("answers", "outcomes"))
        for v in (0, *powers(k)):
            scores = [score([row["verdicts"][i][g] for g in drawn[:v]], [row["step_verdicts"][i][g] for g in drawn[:v]])
                      if v else 0.0 for i, drawn in zip(order, said, strict=True)]
            for s in powers(n):
                found = choose(answers[:s], outcomes[:s], scores[:s], [0.0] * s)
                for choice in VERIFIED if v else (VOTE,):
                    hits.setdefault((choice, s, v), []).append(found[choice])
    return {key: mean(values) for key, values in hits.items()}


def tokens_of(row: dict, s: int, v: int) -> float:
    """Tokens that s solutions of a problem and v verifications of each cost, in the mean over which they are."""
    verification = mean(length for lengths in row["verification_lengths"] for length in lengths)
    return s * (mean(row["lengths"]) + v * verification)


def grid(rows: list[dict], num_draws: int, seed: int, score) -> list[Point]:
    """All points, as means over problems."""
    solved = [expected(row, num_draws, random.Random(f"{seed}-draws-{row['index']}"), score) for row in rows]
    return [Point(*key, mean(tokens_of(row, *key[1:]) for row in rows), *interval([of_one[key] for of_one in solved]))
            for key in solved[0]]


def front(points: list[Point], choices: tuple[str, ...]) -> list[Point]:
    """Of the points of these choices those with more accuracy than all that cost as much or less, by tokens."""
    kept: list[Point] = []
    for point in sorted((p for p in points if p.choice in choices), key=lambda p: (p.tokens, -p.accuracy)):
        if not kept or point.accuracy > kept[-1].accuracy:
            kept.append(point)
    return kept


def voting_at(points: list[Point], tokens: float) -> float | None:
    """The accuracy of voting with so many tokens: the most that it has with them or fewer, on a line between two points
    in log tokens. None before the first and beyond the last."""
    votes = sorted((p.tokens, p.accuracy) for p in points if p.choice == VOTE)
    best = list(accumulate((y for _, y in votes), max))
    return None if tokens < votes[0][0] else height_at([log(x) for x, _ in votes], best, log(tokens))


def lead(points: list[Point]) -> list[tuple[Point, float | None]]:
    """The front of verifying, each point with its accuracy less that of voting with as many tokens."""
    verified = front(points, VERIFIED)
    voting = [voting_at(points, point.tokens) for point in verified]
    return [(p, None if there is None else p.accuracy - there) for p, there in zip(verified, voting, strict=True)]


def crossover(points: list[Point]) -> float | None:
    """The tokens from which on all compared points of the front of verifying lead; None where the last one does not."""
    reached = None
    for point, ahead in reversed([pair for pair in lead(points) if pair[1] is not None]):
        if ahead <= 0:
            break
        reached = point.tokens
    return reached


# The work

def print_fronts(points: list[Point]) -> None:
    print0(f"{'front':8s} {'solutions':>10s} {'verifications':>14s} {'tokens':>10s} {'accuracy':>10s} {'±':>6s} "
           f"{'lead':>6s}")
    votes = [(point, None) for point in front(points, (VOTE,))]
    for point, ahead in (*votes, *lead(points)):
        print0(f"{point.choice:8s} {point.solutions:>10d} {point.verifications:>14d} {point.tokens:>10.1f} "
               f"{shown(point.accuracy):>10s} {shown(point.half):>6s} {shown(ahead):>6s}")


def draw(points: list[Point], path: str) -> None:
    """Accuracy over tokens: all points, and both fronts as lines. Raises CannotWrite."""
    from matplotlib.figure import Figure  # here, since importing it makes its cache folder
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for title, choices, colour in (("vote", (VOTE,), COLOURS[0]), ("verify", VERIFIED, COLOURS[1])):
        mine, best = [p for p in points if p.choice in choices], front(points, choices)
        axis.scatter([p.tokens for p in mine], [100 * p.accuracy for p in mine], s=8, alpha=0.4, color=colour)
        axis.plot([p.tokens for p in best], [100 * p.accuracy for p in best], marker=".", color=colour, label=title)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("sampled tokens per problem")
    axis.set_ylabel("accuracy, %")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    with whole_file(path, "wb") as f:
        figure.savefig(f, format="png", dpi=120)


def in_words(found: float | None, leads: list[float]) -> str:
    """What the comparison comes to. found: the crossover; leads: of the points that are compared."""
    if not leads:
        return "no point of verifying costs as little as voting: nothing is compared; give a larger --num-samples"
    if found is not None:
        return f"verifying is ahead of voting from {found:.1f} tokens on, up to the dearest point that is compared"
    if max(leads) > 0:
        return "verifying is ahead of voting at some points, but not at the dearest: there is no crossover"
    return "verifying is ahead of voting at no point that is compared"


def main(args) -> None:
    check_args(args)
    tokenizer = load_tokenizer(path_of("tokenizer"))
    device = init_device(args.device_type)
    verifier, generator, task, sampler = load_players(args, tokenizer, device)
    samples = verified_solutions(args, task, generator, verifier, sampler, device)
    rows = [row for row in samples if None not in row["outcomes"]]
    if not rows:
        raise BadInput(f"--task {args.task}: there is no problem of which all solutions can be scored")
    points = grid(rows, args.num_draws, args.seed, SCORES[args.score])
    found, too_long = crossover(points), sum(sum(row["too_long"]) for row in rows)
    not_compared = sum(ahead is None for _, ahead in lead(points))
    print0(f"\nvote or verify, task {args.task}: {len(rows)} problems, up to {args.num_samples} solutions and "
           f"{args.num_verifications} verifications of each, {args.num_draws} draws; percent, tokens per problem; "
           f"±: half of the 95% interval over problems")
    print_fronts(points)
    print0(in_words(found, [ahead for _, ahead in lead(points) if ahead is not None]))
    if not_compared:
        print0(f"{not_compared} points of verifying cost more than {args.num_samples} solutions: not compared")
    if len(rows) < len(samples):
        print0(f"{len(samples) - len(rows)} problems with a solution that cannot be scored are left out")
    if too_long:
        print0(f"{too_long} of {len(rows) * args.num_samples} solutions do not fit the verifier's context: "
               f"not cut, not verified, score 0")
    if args.out and rank_and_world()[0] == 0:
        fronts = {"vote": front(points, (VOTE,)), "verify": front(points, VERIFIED)}
        write_json(args.out, {
            "args": vars(args), "problems": len(rows), "problems_left_out": len(samples) - len(rows),
            "too_long": too_long, "points": [p._asdict() for p in points],
            "fronts": {name: [p._asdict() for p in chosen] for name, chosen in fronts.items()},
            "crossover": found, "not_compared": not_compared, "samples": samples})
        draw(points, picture_path(args.out))
        print0(f"{args.out}, {os.path.basename(picture_path(args.out))}")


if __name__ == "__main__":
    script_main(main, make_parser(), is_shown=True)
