"""
One arm minus another, seed by seed, out of a csv of curves: the mean and half of its 95% interval (Student's t).

    python -m dev.experiments.minus dev/curves/credit/chain.csv tango_tenth_own_step_0.3 grpo_tenth
    python -m dev.experiments.minus dev/curves/credit/chain.csv tango_tenth_own_step_0.3 grpo_tenth --at-its-tokens
    python -m dev.experiments.minus dev/curves/chain.csv tango --metric ver/step_f1_fixed   # its end minus its start
    python -m dev.experiments.minus dev/curves/stricter/small_chain_kl0.csv fixed_new --falls

The figures of dev/results/questions.md are such differences.
"""
import argparse
import csv

from nanochat.cli import new_parser, script_main
from nanochat.common import BadInput, print0
from nanochat.rl.report.report import ACCURACY, height_at, paired

FALL = 0.1  # below its best evaluation: a run that ends there has fallen
COST = "cost/teraflops"  # of run.sh questions
Curves = dict[int, list[tuple[float, float]]]  # seed -> (tokens sampled in all, or cost; value) of each evaluation


def curves_of(path: str, arm: str, metric: str = ACCURACY, over_cost: bool = False) -> Curves:
    """An arm's curves in a csv of scripts.report. Raises BadInput where there are none."""
    found: dict[str, dict[int, dict[float, float]]] = {metric: {}, COST: {}}  # seed -> tokens -> value
    try:
        with open(path, newline="", encoding="utf-8") as f:
            for row in csv.DictReader(f):
                if row["arm"] == arm and row["metric"] in found:
                    points = found[row["metric"]].setdefault(int(row["seed"]), {})
                    points[float(row["sampled_tokens"])] = float(row["value"])
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: is no csv of curves ({type(error).__name__}: {error})") from None
    for name in (metric, COST) if over_cost else (metric,):
        if not found[name]:
            raise BadInput(f"{path}: has no {name} of an arm {arm}")
    return {seed: [(found[COST][seed][tokens] if over_cost else tokens, value) for tokens, value in points.items()]
            for seed, points in found[metric].items()}


def minus(arm: Curves, other: Curves | None, at_its_tokens: bool = False) -> dict[int, float]:
    """The last value less the other's, of each seed that both have; at_its_tokens: what the arm has when it has sampled
    as many tokens as the other in all, or has cost as much, on the line between evaluations. Without an other: less its
    own first value."""
    if other is None:
        return {seed: points[-1][1] - points[0][1] for seed, points in arm.items()}
    found = {}
    for seed in sorted(arm.keys() & other.keys()):
        tokens, last = other[seed][-1]
        value = height_at(*zip(*arm[seed], strict=True), tokens) if at_its_tokens else arm[seed][-1][1]
        if value is not None:
            found[seed] = value - last
    return found


def falls(arm: Curves) -> dict[int, float]:
    """How far below its best evaluation each seed ends."""
    return {seed: max(value for _, value in points) - points[-1][1] for seed, points in arm.items()}


def told(differences: dict[int, float]) -> str:
    return paired(list(differences.values()), len(differences))


def told_falls(drops: dict[int, float]) -> str:
    return f"{sum(drop >= FALL - 1e-9 for drop in drops.values())} of {len(drops)}"


def main(args) -> None:
    equal = args.at_its_tokens or args.at_its_cost
    if args.falls and (args.other or equal):
        raise BadInput("--falls: is about one arm alone")
    if equal and not args.other:
        raise BadInput("--at-its-tokens, --at-its-cost: of which other arm?")
    read = lambda arm: curves_of(args.curves, arm, args.metric, args.at_its_cost)
    arm = read(args.arm)
    found = falls(arm) if args.falls else minus(arm, read(args.other) if args.other else None, equal)
    by_seed = ", ".join(f"{seed}: {100 * value:+.1f}" for seed, value in found.items())
    print0(f"{(told_falls if args.falls else told)(found)}  ({by_seed or 'no pairs'})")


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("curves", help="a csv of scripts.report or of run.sh")
    parser.add_argument("arm")
    parser.add_argument("other", nargs="?", help="what is subtracted; without it, the arm's own first value")
    parser.add_argument("--metric", default=ACCURACY, help="default: %(default)s")
    parser.add_argument("--at-its-tokens", action="store_true", help="where the arm had sampled the other's tokens")
    parser.add_argument("--at-its-cost", action="store_true", help="where it had cost as many FLOPs as the other, of "
                        "run.sh questions")
    parser.add_argument("--falls", action="store_true", help="seeds that end 10 points or more below their best "
                        "evaluation, and how far below")
    return parser


if __name__ == "__main__":
    script_main(main, make_parser())
