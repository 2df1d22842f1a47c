"""
The one table of all experiments: arms seed by seed, and their differences from a baseline in pairs, with intervals.

A pair is the same seed: the same SFT checkpoints and problems. All is in percent and points but tokens. ± after a mean
is the standard deviation over seeds, after a difference half of its 95% interval (Student's t).
"""
import os
from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

from dev.experiments.arms import Experiment
from nanochat.rl.report.page import draw_curves
from nanochat.rl.report.report import (ORACLE, Run, at_equal_tokens, change, curve, filled, paired, provenance,
                                       recovered, share, spread, tidy, write_csv)
from nanochat.storage.files import whole_file

# metric: words
WATCHED = {"gen/pass1_in": "pass@1", "gen/pass1_out": "pass@1, longer problems", "ver/step_f1_fixed": "step F1",
           "ver/outcome_f1_fixed": "outcome F1", "gen/verdicts/wrong_steps_passed": "wrong steps passed"}


class Table(NamedTuple):
    """What a table is about. name: of its file; folder: below --out; words: what it compares; watched: metrics, of
    which the first one is compared; all_metrics: the csv and the curves have those of every report, too; partners:
    another arm to compare an arm with; titles, own: columns of its own, and their texts for an arm and its seeds;
    alike: arms whose runs must be comparable by their flags; training: (seeds) -> the runs that trained what the arms
    use, whose points go into <name>_training.csv."""
    name: str
    experiments: list[Experiment]
    folder: str = ""
    words: str = ""
    baseline: str = "grpo"
    watched: dict[str, str] = WATCHED
    all_metrics: bool = True
    partners: dict[str, str] = {}
    titles: tuple[str, ...] = ()
    own: Callable[[str, list[int]], list[str]] = lambda arm, seeds: []
    alike: tuple[str, ...] = ()
    training: Callable[[list[str]], list[Run]] = lambda seeds: []


def less(values: dict[int, float | None], others: dict[int, float | None]) -> dict[int, float]:
    """Differences, seed by seed, where both have a value."""
    return {seed: value - others[seed] for seed, value in values.items() if None not in (value, others.get(seed))}


def by_seed(values: dict[int, float | None], seeds: list[int]) -> str:
    """In percent; - for a seed without a value."""
    return " ".join("-" if values.get(seed) is None else f"{100 * values[seed]:.1f}" for seed in seeds)


def titles_of(table: Table, seeds: list[int]) -> list[str]:
    compared, *_ = table.watched.values()
    return ["setting", "arm", *table.titles, f"{compared}, seeds {' '.join(map(str, seeds))}", compared,
            f"minus {table.baseline}", "minus its partner", f"minus {table.baseline} at its tokens",
            "share of the oracle's gain", *(f"{words}, first -> last" for words in table.watched.values()), "tokens"]


def row_of(table: Table, arm: str, of_arm: dict[str, dict[int, Run]], seeds: list[int]) -> list[str]:
    """An arm's line at one setting. Its last columns: means over seeds of the first and the last value; of what is
    measured per step, up to the first evaluation and from the last but one to the last."""
    compared, mine = next(iter(table.watched)), of_arm[arm]
    finals = {name: {seed: run.points[-1].get(compared) for seed, run in runs.items()} for name, runs in of_arm.items()}
    baseline = of_arm.get(table.baseline, {}) if arm != table.baseline else {}
    of_baseline, partner = finals.get(table.baseline, {}), table.partners.get(arm)
    gains = less(finals[arm], of_baseline) if baseline else {}
    equal = {seed: at_equal_tokens(run, baseline[seed], compared) for seed, run in mine.items() if seed in baseline}
    told = lambda differences: paired(list(differences.values()), len(mine))
    of_partner = told(less(finals[arm], finals.get(partner, {})))
    oracle = less(finals.get(ORACLE, {}), of_baseline)
    curves = [[curve(run, metric, "sampled_tokens")[1] for run in mine.values()] for metric in table.watched]
    tokens = mean(run.points[-1]["sampled_tokens"] for run in mine.values())
    return [arm, *table.own(arm, list(mine)), by_seed(finals[arm], seeds), spread(list(finals[arm].values())),
            told(gains), of_partner if of_partner == "-" else f"{of_partner} ({partner})",
            told(less(equal, of_baseline)),
            share(recovered(gains, oracle), {"arm": arm, "has_oracle": bool(oracle and gains)}),
            *(change([(values[0], values[-1]) for values in found if values]) for found in curves),
            f"{tokens / 1e6:.2f}M"]


def table_of(table: Table, runs: list[Run]) -> str:
    """One line per arm and setting, without columns that say nothing. runs: those that are finished."""
    settings, seeds = dict.fromkeys(run.task for run in runs), sorted({run.seed for run in runs})
    rows = []
    for setting in settings:
        of_arm: dict[str, dict[int, Run]] = {}
        for run in runs:
            if run.task == setting:
                of_arm.setdefault(run.arm, {})[run.seed] = run
        rows += [[setting if len(settings) > 1 else "-", *row_of(table, arm, of_arm, seeds)] for arm in of_arm]
    titles, rows = filled(titles_of(table, seeds), rows)
    lines = [f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows]]
    alone = ["", "One seed: differences have no interval, and show no order."] if len(seeds) == 1 else []
    return "\n".join([*lines, *alone])


def write_all(table: Table, runs: list[Run], out: str, first_line: str) -> str:
    """Writes <setting>.csv, <setting>.png and <name>.md, whose text it returns. Raises CannotWrite."""
    for setting in dict.fromkeys(run.task for run in runs):
        of_setting = [run for run in runs if run.task == setting]
        path, rows = os.path.join(out, setting), tidy(of_setting)
        write_csv([row for row in rows if table.all_metrics or row["metric"] in table.watched], f"{path}.csv")
        draw_curves(of_setting, f"{path}.png", None if table.all_metrics else table.watched)
    about = f"{table.name}: {table.words}" if table.words else ""
    text = "\n\n".join(filter(None, [first_line, about, table_of(table, runs), provenance(runs)])) + "\n"
    with whole_file(os.path.join(out, f"{table.name}.md")) as f:
        f.write(text)
    return text
