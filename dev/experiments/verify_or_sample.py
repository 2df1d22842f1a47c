"""
Is it better to sample more solutions and vote, or to verify fewer of them? Accuracy at equal sampled tokens, after
Singhi et al. 2025 (arXiv 2504.01005).

S solutions of each test_in problem and V verifications of each solution are sampled once. The script then looks at
all s up to S and v up to V that are powers of two. Without verifications the most frequent answer is taken (maj).
With them it is the solution with the highest score (bon), or the answer whose solutions have the largest sum of scores
(weighted); a score is the share of v verifications that say CORRECT (--score). Those whose verdict cannot be read are
dropped from it, as in the paper's code (0 where none is left), but are paid for. Accuracies are means over --num-draws
random orders of solutions and of verifications, of which the first s and v count; ties are broken at random by that.
Tokens per problem are s (solution + v verification), with the problem's mean lengths. Tokens that are only read, as
prompts are, do not count.

Both are compared at each number of tokens that some s and v cost, up to that of S solutions. What verifying comes to
there is its best choice, s and v that cost no more. There are far more of these than of votes, so the best of them is
in part the luckiest, and looks too good on the problems that it was chosen on. So the problems are dealt at random into
two halves: the best is chosen on one half and scored on the other, both ways. Voting has few points. It may use fewer
solutions than it could pay for where that is better on all problems, which favours voting, if anything. Between two
powers of two it is a line in log tokens. So each problem has a lead: verifying less voting, at equal tokens. Printed
are the mean lead and half of its 95% interval over problems, for what was chosen.

The crossover is the fewest of these numbers of tokens from which on the mean lead is above 0 at all of them. It says
nothing beyond the last one.

Departures from the paper: lengths are measured, where the paper sets a ratio of verification to solution; the vote has
the same S solutions and no more, so --num-samples says how far the comparison goes, and what of verifying costs more is
not compared, but counted.

    python -m dev.experiments.verify_or_sample --generator-tag d4 --verifier-tag d4-ver --out curves.json
    torchrun --standalone --nproc_per_node=8 dev/experiments/verify_or_sample.py -- --generator-tag d4 \\
        --verifier-tag d4-ver
"""
import os
import random
from itertools import takewhile
from math import log
from statistics import mean
from typing import NamedTuple

from nanochat.cli import at_least, check_name, new_parser, script_main
from nanochat.common import BadInput, init_device, print0, rank_and_world
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.measure.voting import SCORES, choose
from nanochat.rl.report.page import COLOURS
from nanochat.rl.report.report import height_at, interval
from nanochat.storage.files import path_of, whole_file, write_json
from scripts.verifier_eval import (add_generator_args, add_verifier_args, check_players, load_players, share_malformed,
                                   shown, verified_solutions, warn_of_malformed)
from tasks import add_task_args, task_flags

VOTE = "maj"
VERIFIED = ("bon", "weighted")
PARTS = {"problems", "problems_left_out", "too_long", "parse_fail", "points", "leads", "crossover", "not_compared",
         "samples"}


def make_parser():
    parser = new_parser(__doc__)
    add_verifier_args(parser)
    parser.add_argument("--num-draws", type=at_least(1, int, 10 ** 5), default=32,
                        help="random orders of each problem's samples")
    add_generator_args(parser.add_argument_group("solutions"), is_needed=True)
    add_task_args(parser)
    parser.set_defaults(num_samples=32, num_verifications=8, temperature=1.0, judge_report=False,
                        **dict.fromkeys(task_flags()))
    return parser


def check_args(args) -> None:
    check_name("--generator-tag", args.generator_tag)
    check_players(args, PARTS)
    if args.max_problems == 1:
        raise BadInput("--max-problems 1: it takes two, one to choose on and one to score")
    if args.num_samples == 1:
        raise BadInput("--num-samples 1: nothing could be verified for the tokens of one solution; take at least 2")
    for name in ("num_samples", "num_verifications"):
        if getattr(args, name) not in powers(getattr(args, name)):
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: must be a power of two")
    picture = picture_path(args.out)
    if args.out and os.path.lexists(picture) and not (os.path.isfile(picture) and os.path.exists(args.out)):
        raise BadInput(f"--out {args.out}: {picture} is there, and not of an earlier result; take another name")


def picture_path(out: str) -> str:
    return out.removesuffix(".json") + ".png"


# The points

class Point(NamedTuple):
    """What a way to choose comes to on all problems. tokens: per problem; half: of the accuracy's 95% interval over
    problems, None for a single one."""
    choice: str  # VOTE, or one of VERIFIED
    solutions: int
    verifications: int
    tokens: float
    accuracy: float
    half: float | None = None


Way = tuple[str, int, int]  # the first three of a point


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2 ** i for i in range(most.bit_length())]


def expected(row: dict, num_draws: int, rng: random.Random, score) -> dict[Way, float]:
    """(choice, s, v) -> how likely one problem is solved so. row: of `verified_solutions`, all outcomes known."""
    n, k = len(row["answers"]), len(row["verdicts"][0])
    hits: dict[Way, list[float]] = {}
    for _ in range(num_draws):
        order = rng.sample(range(n), n)
        said = [rng.sample(range(k), k) for _ in order]
        answers, outcomes = ([row[name][i] for i in order] for name in ("answers", "outcomes"))
        for v in (0, *powers(k)):
            scores = [score_of_read(row["verdicts"][i], row["step_verdicts"][i], drawn[:v], score)
                      for i, drawn in zip(order, said, strict=True)]
            for s in powers(n):
                found = choose(answers[:s], outcomes[:s], scores[:s], [0.0] * s)
                for choice in VERIFIED if v else (VOTE,):
                    hits.setdefault((choice, s, v), []).append(found[choice])
    return {key: mean(values) for key, values in hits.items()}


def score_of_read(verdicts: list[bool | None], step_verdicts: list[list], drawn: list[int], score) -> float:
    """A solution's score from those of the drawn verifications whose verdict can be read; 0 without any."""
    read = [g for g in drawn if verdicts[g] is not None]
    return score([verdicts[g] for g in read], [step_verdicts[g] for g in read]) if read else 0.0


def tokens_of(row: dict, s: int, v: int) -> float:
    """Tokens that s solutions of a problem and v verifications of each cost, in the mean over which they are."""
    verification = mean(length for lengths in row["verification_lengths"] for length in lengths)
    return s * (mean(row["lengths"]) + v * verification)


def points_of(solved: list[dict[Way, float]], cost: dict[Way, float]) -> list[Point]:
    """All points, as means over problems. solved: of each problem, how likely each way solves it."""
    return [Point(*way, tokens, *interval([of_one[way] for of_one in solved])) for way, tokens in cost.items()]


# Verifying against voting, at equal tokens

class Lead(NamedTuple):
    """Accuracies with so many tokens per problem. lead: of verifying over voting; half: of its 95% interval; chosen:
    the ways to verify that were best on the one half of the problems and on the other."""
    tokens: float
    voted: float
    verified: float
    lead: float
    half: float
    chosen: list[Way]


def dealt(solved: list, seed: int) -> tuple[list, list]:
    """Two halves of the problems."""
    order = random.Random(f"{seed}-halves").sample(solved, len(solved))
    return order[: len(order) // 2], order[len(order) // 2:]


def best_way(points: list[Point], choices: tuple[str, ...], tokens: float) -> Way:
    """The most accurate that costs no more, of equals the cheapest."""
    affordable = [p for p in points if p.choice in choices and p.tokens <= tokens]
    return max(affordable, key=lambda p: (p.accuracy, -p.tokens))[:3]


def voting_at(of_one: dict[Way, float], ways: dict[float, Way], tokens: float) -> float | None:
    """How likely a vote solves a problem, on a line in log tokens. ways: the best with each number of tokens that a
    vote costs."""
    return height_at([log(x) for x in ways], [of_one[way] for way in ways.values()], log(tokens))


def leads(solved: list[dict[Way, float]], cost: dict[Way, float], seed: int) -> list[Lead]:
    """The leads, by tokens: of ways to verify that are chosen on one half of the problems and scored on the other, over
    the votes that are best on all."""
    votes = sorted(tokens for way, tokens in cost.items() if way[0] == VOTE)
    compared = sorted({tokens for way, tokens in cost.items() if way[0] in VERIFIED and tokens <= votes[-1]})
    voting = {tokens: best_way(points_of(solved, cost), (VOTE,), tokens) for tokens in votes}
    one, other = dealt(solved, seed)
    found: dict[float, list[tuple]] = {tokens: [] for tokens in compared}
    for chosen_on, scored_on in ((one, other), (other, one)):
        points = points_of(chosen_on, cost)
        for tokens in compared:
            way = best_way(points, VERIFIED, tokens)
            found[tokens] += [(way, voting_at(of_one, voting, tokens), of_one[way]) for of_one in scored_on]
    return [lead_of(tokens, rows) for tokens, rows in found.items()]


def lead_of(tokens: float, rows: list[tuple[Way, float, float]]) -> Lead:
    """rows: of each problem the way that verifies, and how likely voting and verifying solve it."""
    ways, voted, verified = zip(*rows, strict=True)
    # Rounded, or a line through equal heights would decide who leads.
    lead, half = interval([round(y - x, 9) for x, y in zip(voted, verified, strict=True)])
    return Lead(tokens, mean(voted), mean(verified), lead, half, [ways[0], ways[-1]])


def crossover(found: list[Lead]) -> dict:
    """Where verifying leads. result: one of RESULTS; from: the tokens of the crossover, None without one; up_to: the
    most that were compared; ahead, surely: at how many of the compared ones its lead, and its whole 95% interval, is
    above 0."""
    ahead = [one.lead > 0 for one in found]
    last = len(list(takewhile(bool, reversed(ahead))))  # so many at the end
    result = "ahead" if last else "ahead, then not" if any(ahead) else "never ahead" if found else "not compared"
    return {"result": result, "from": found[-last].tokens if last else None,
            "up_to": found[-1].tokens if found else None, "compared": len(found), "ahead": sum(ahead),
            "surely": sum(one.lead > one.half for one in found)}


RESULTS = {
    "not compared": "nothing is compared: all verifying costs more than the most solutions that vote; give a larger "
                    "--num-samples",
    "never ahead": "verifying is never ahead of voting at equal tokens, up to {up_to:.1f} tokens per problem",
    "ahead, then not": "verifying is ahead of voting at {ahead} of {compared} compared numbers of tokens, but not at "
                       "the last, {up_to:.1f} tokens per problem",
    "ahead": "verifying is ahead of voting from {from:.1f} tokens per problem on, up to {up_to:.1f}, the most that are "
             "compared"}


# The work

def print_leads(found: list[Lead]) -> None:
    print0(f"{'tokens':>10s} {'vote':>6s} {'verify':>6s} {'lead':>6s} {'±':>6s}  chosen on each half, solutions x "
           f"verifications")
    for one in found:
        numbers = " ".join(f"{shown(x):>6s}" for x in (one.voted, one.verified, one.lead, one.half))
        ways = dict.fromkeys(f"{choice} {s}x{v}" for choice, s, v in one.chosen)
        print0(f"{one.tokens:>10.1f} {numbers}  {', '.join(ways)}")


def print_result(found: list[Lead]) -> None:
    """What the leads come to, in words."""
    result = crossover(found)
    print0(RESULTS[result["result"]].format(**result))
    if result["ahead"]:
        print0(f"its lead is above 0 by more than ± at {result['surely']} of {result['compared']} compared")


def draw(points: list[Point], found: list[Lead], path: str) -> None:
    """Accuracy over tokens: all points on all problems, and as lines what is compared. Raises CannotWrite."""
    from matplotlib.figure import Figure  # here, since importing it makes its cache folder
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for title, choices, colour, heights in (("vote", (VOTE,), COLOURS[0], [one.voted for one in found]),
                                            ("verify", VERIFIED, COLOURS[1], [one.verified for one in found])):
        mine = [p for p in points if p.choice in choices]
        axis.scatter([p.tokens for p in mine], [100 * p.accuracy for p in mine], s=8, alpha=0.4, color=colour)
        axis.plot([one.tokens for one in found], [100 * y for y in heights], marker=".", color=colour, label=title)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("sampled tokens per problem")
    axis.set_ylabel("accuracy, %")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    with whole_file(path, "wb") as f:
        figure.savefig(f, format="png", dpi=120)


def counted(num: int, noun: str) -> str:
    return f"{num} {noun}{'s' * (num != 1)}"


def main(args) -> None:
    check_args(args)
    tokenizer = load_tokenizer(path_of("tokenizer"))
    device = init_device(args.device_type)
    verifier, generator, task, sampler = load_players(args, tokenizer, device)
    samples = verified_solutions(args, task, generator, verifier, sampler, device)
    rows = [row for row in samples if None not in row["outcomes"]]
    if len(rows) < 2:
        raise BadInput(f"--task {args.task}: of {counted(len(rows), 'problem')} all solutions can be scored, and it "
                       f"takes two: one to choose on and one to score")
    solved = [expected(row, args.num_draws, random.Random(f"{args.seed}-draws-{row['index']}"), SCORES[args.score])
              for row in rows]
    cost = {way: mean(tokens_of(row, *way[1:]) for row in rows) for way in solved[0]}
    points, found = points_of(solved, cost), leads(solved, cost, args.seed)
    too_long, malformed = sum(sum(row["too_long"]) for row in rows), share_malformed(samples, args.num_verifications)
    not_compared = len({way[1:] for way, tokens in cost.items() if tokens > cost[VOTE, args.num_samples, 0]})
    print0(f"\nvote or verify, task {args.task}: {counted(len(rows), 'problem')}, up to "
           f"{counted(args.num_samples, 'solution')} and {counted(args.num_verifications, 'verification')} of each, "
           f"{counted(args.num_draws, 'draw')}, parse failures {shown(malformed)}; percent, tokens per problem; ±: "
           f"half of the lead's 95% interval over problems")
    print_leads(found)
    print_result(found)
    warn_of_malformed(malformed)
    if not_compared:
        print0(f"beyond the tokens of {counted(args.num_samples, 'solution')}, not compared: "
               f"{counted(not_compared, 'pair')} of solutions and verifications")
    if len(rows) < len(samples):
        print0(f"left out: {counted(len(samples) - len(rows), 'problem')} with a solution that cannot be scored")
    if too_long:
        print0(f"{too_long} of {len(rows) * args.num_samples} solutions do not fit the verifier's context: "
               f"not cut, not verified, score 0")
    if args.out and rank_and_world()[0] == 0:
        write_json(args.out, {
            "args": vars(args), "problems": len(rows), "problems_left_out": len(samples) - len(rows),
            "too_long": too_long, "parse_fail": malformed, "points": [p._asdict() for p in points],
            "leads": [one._asdict() for one in found], "crossover": crossover(found), "not_compared": not_compared,
            "samples": samples})
        draw(points, found, picture_path(args.out))
        print0(f"{args.out}, {os.path.basename(picture_path(args.out))}")


if __name__ == "__main__":
    script_main(main, make_parser(), is_shown=True)
