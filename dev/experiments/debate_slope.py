"""
Is a judge right more often as debaters get better? The slope of its accuracy on their skill over the evaluations of
recipe debate's runs, with a 95% interval over seeds.

    bash dev/experiments/run.sh selfplay --families debates
    python -m dev.experiments.debate_slope dev/curves/selfplay/debates.csv
"""
import argparse
import csv
from statistics import mean

from nanochat.cli import script_main
from nanochat.common import BadInput, print0
from nanochat.rl.report.report import interval

DEBATER, CONSULTANT = "gen/win_rate_against_start_in", "gen/consultant_win_rate_in"
PAIRS = {  # what an accuracy is of -> (skill, accuracy)
    "debate": (DEBATER, "gen/judge_accuracy_in"),
    "single consultancy": (CONSULTANT, "gen/single_accuracy_in"),
    "ensembled consultancy": (CONSULTANT, "gen/ensembled_accuracy_in"),
    "double consultancy": (CONSULTANT, "gen/judge_accuracy_in"),  # by a consultant: both sides shown
}
Points = list[tuple[float, float]]  # (skill, accuracy) of the evaluations of a run


def slope(seeds: list[Points]) -> float | None:
    """The least-squares slope with an intercept of each seed's own; None where no seed's skill varies."""
    products = squares = 0.0
    for points in seeds:
        x, y = (mean(column) for column in zip(*points, strict=True))
        products += sum((a - x) * (b - y) for a, b in points)
        squares += sum((a - x) ** 2 for a, _ in points)
    return products / squares if squares > 0 else None


def half_width(seeds: list[Points]) -> float | None:
    """Of the slope's 95% interval: Student's t of the jackknife's pseudo-values, which leave out a seed each; None
    where that cannot be done."""
    whole, without = slope(seeds), [slope(seeds[:i] + seeds[i + 1:]) for i in range(len(seeds))]
    if len(seeds) < 2 or whole is None or None in without:
        return None
    return interval([len(seeds) * whole - (len(seeds) - 1) * left for left in without])[1]


def points_of(path: str) -> dict[str, dict[int, dict[int, dict[str, float]]]]:
    """arm -> seed -> tokens sampled until an evaluation -> its scores, from a csv of scripts.report. Raises
    BadInput."""
    found: dict = {}
    try:
        with open(path, newline="", encoding="utf-8") as f:
            for row in csv.DictReader(f):
                scores = found.setdefault(row["arm"], {}).setdefault(int(row["seed"]), {})
                scores.setdefault(int(row["sampled_tokens"]), {})[row["metric"]] = float(row["value"])
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: is no csv of curves ({type(error).__name__}: {error})") from None
    if not any(name in row for runs in found.values() for run in runs.values() for row in run.values()
               for _, name in PAIRS.values()):
        raise BadInput(f"{path}: has no judge's accuracy, so no run of recipe debate")
    return found


def main(args) -> None:
    curves = points_of(args.curves)
    print0(f"{'arm':24s} {'accuracy of':24s} {'first':>6s} {'last':>6s} {'skill':>14s}  slope, 95% interval")
    for arm, runs in curves.items():
        for name, (skill, accuracy) in PAIRS.items():
            seeds = [[(row[skill], row[accuracy]) for _, row in sorted(run.items()) if skill in row and accuracy in row]
                     for run in runs.values()]
            seeds = [points for points in seeds if points]
            if not seeds:
                continue
            first, last = ([mean(points[i][k] for points in seeds) for k in (0, 1)] for i in (0, -1))
            value, half = slope(seeds), half_width(seeds)
            told = "-" if value is None else f"{value:+.2f}" + (f" ± {half:.2f}" if half is not None else "")
            print0(f"{arm:24s} {name:24s} {first[1]:6.3f} {last[1]:6.3f} {first[0]:6.3f}->{last[0]:6.3f}  {told}, "
                   f"{len(seeds)} seeds")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", help="a csv of scripts.report")
    return parser


if __name__ == "__main__":
    script_main(main, make_parser())
