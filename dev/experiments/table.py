"""
The one table of all experiments: arms seed by seed, and their differences from a baseline in pairs, with intervals.

A pair is the same seed: the same SFT checkpoints, held-out problems and order of problems in RL, of which the steps of
a verifier that is trained take some. All is in percent and points but tokens. ± after a mean is the standard deviation
over seeds, after a difference half of its 95% interval (Student's t).
"""
import os
from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

from dev.experiments.arms import Experiment
from dev.experiments.jobs import Job
from nanochat.rl.report.page import draw_curves
from nanochat.rl.report.report import (ORACLE, Run, at_equal_tokens, change, curve, filled, paired, provenance,
                                       recovered, share, spread, tidy, write_csv)
from nanochat.storage.files import whole_file

# metric: words
WATCHED = {"gen/pass1_in": "pass@1", "gen/pass1_out": "pass@1, longer problems", "ver/step_f1_fixed": "step F1",
           "ver/outcome_f1_fixed": "outcome F1", "gen/verdicts/wrong_steps_passed": "wrong steps passed"}


class Table(NamedTuple):
    """What a table is about. name: of its file; folder: below --out; words: what it compares; watched: metrics that are
    shown, first and last; compared: those that are compared, by default the first of these; all_metrics: the csv has
    those of every report, too, and so have the curves without `compared`; partners: another arm to compare an arm with;
    longer: the baseline with as many tokens as the dearest arm, where an arm's curve does not tell where it was at the
    baseline's; titles, own: columns of its own, and their texts for an arm and its seeds; scorings: (a run's name) ->
    jobs that score it when it is finished; rows: (run) -> the runs that it is in the table; alike: arms whose runs must
    be comparable by their flags; apart: arms of another start, which are compared with their partner alone; training:
    (seeds) -> the runs that trained what the arms use, whose points go into <name>_training.csv; kept: metrics that the
    csv has beside what is watched."""
    name: str
    experiments: list[Experiment]
    folder: str = ""
    words: str = ""
    baseline: str = "grpo"
    watched: dict[str, str] = WATCHED
    compared: dict[str, str] = {}
    all_metrics: bool = True
    partners: dict[str, str] = {}
    longer: str = ""
    titles: tuple[str, ...] = ()
    own: Callable[[str, list[int]], list[str]] = lambda arm, seeds: []
    scorings: Callable[[str], list[Job]] = lambda run: []
    rows: Callable[[Run], list[Run]] = lambda run: [run]
    alike: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    training: Callable[[list[str]], list[Run]] = lambda seeds: []
    kept: tuple[str, ...] = ()


def less(values: dict[int, float | None], others: dict[int, float | None]) -> dict[int, float]:
    """Differences, seed by seed, where both have a value."""
    return {seed: value - others[seed] for seed, value in values.items() if None not in (value, others.get(seed))}


def by_seed(values: dict[int, float | None], seeds: list[int]) -> str:
    """In percent; - for a seed without a value."""
    return " ".join("-" if values.get(seed) is None else f"{100 * values[seed]:.1f}" for seed in seeds)


def compared_of(table: Table) -> dict[str, str]:
    """The metrics that are compared, and their words."""
    return table.compared or dict(list(table.watched.items())[:1])


def shown_of(table: Table) -> dict[str, str]:
    """The metrics whose first and last values are shown."""
    return {**table.compared, **table.watched}


def titles_of(table: Table, seeds: list[int]) -> list[str]:
    words = "percent" if table.compared else next(iter(table.watched.values()))
    at_its_tokens = table.longer or f"{table.baseline} at its tokens"
    return ["setting", "arm", *table.titles, "of", f"{words}, seeds {' '.join(map(str, seeds))}", words,
            f"minus {table.baseline}", "minus its partner", f"minus {at_its_tokens}", "share of the oracle's gain",
            *(f"{words}, first -> last" for words in shown_of(table).values()), "tokens"]


def rows_of(table: Table, arm: str, of_arm: dict[str, dict[int, Run]], seeds: list[int]) -> list[list[str]]:
    """An arm's lines at one setting, one for each metric that is compared. What is not of one metric stands in the
    first: means over seeds of the first and the last value; of what is measured per step, up to the first evaluation
    and from the last but one to the last."""
    mine, metrics = of_arm[arm], compared_of(table)
    # what is compared is scored when a run is finished: a start's score alone is no change
    curves = [[curve(run, metric, "sampled_tokens")[1] for run in mine.values()
               if metric not in table.compared or run.points[-1].get(metric) is not None] for metric in shown_of(table)]
    tokens = mean(run.points[-1]["sampled_tokens"] for run in mine.values())
    of_all = [*(change([(values[0], values[-1]) for values in found if values]) for found in curves),
              f"{tokens / 1e6:.2f}M"]
    measured = [metric for metric in metrics  # not of a test that was not given
                if any(metric in run.points[-1] for runs in of_arm.values() for run in runs.values())]
    rows = []
    for metric in measured or list(metrics)[:1]:  # one line, too, where no run is scored yet
        of = metrics[metric] if table.compared else "-"
        own, last = (["-"] * len(table.titles), ["-"] * len(of_all)) if rows else (table.own(arm, list(mine)), of_all)
        rows.append([arm, *own, of, *compared_row(table, arm, of_arm, seeds, metric), *last])
    return rows


def compared_row(table: Table, arm: str, of_arm: dict[str, dict[int, Run]], seeds: list[int], metric: str) -> list[str]:
    """An arm's last values of a metric, and their differences from the baseline, its partner, and the baseline with as
    many tokens."""
    mine = of_arm[arm]
    finals = {name: {seed: run.points[-1].get(metric) for seed, run in runs.items()} for name, runs in of_arm.items()}
    baseline = of_arm.get(table.baseline, {}) if arm not in (table.baseline, *table.apart) else {}
    of_baseline, partner = finals.get(table.baseline, {}), table.partners.get(arm)
    gains = less(finals[arm], of_baseline) if baseline else {}
    equal = {seed: at_equal_tokens(run, baseline[seed], metric) for seed, run in mine.items() if seed in baseline}
    told = lambda differences: paired(list(differences.values()), len(mine))
    of_partner = told(less(finals[arm], finals.get(partner, {})))
    if table.longer:
        at_its_tokens = {} if arm in (table.longer, *table.apart) else less(finals[arm], finals.get(table.longer, {}))
    else:
        at_its_tokens = less(equal, of_baseline)
    oracle = less(finals.get(ORACLE, {}), of_baseline)
    return [by_seed(finals[arm], seeds), spread(list(finals[arm].values())), told(gains),
            of_partner if of_partner == "-" else f"{of_partner} ({partner})", told(at_its_tokens),
            share(recovered(gains, oracle), {"arm": arm, "has_oracle": bool(oracle and gains)})]


def table_of(table: Table, runs: list[Run]) -> str:
    """One line per arm and setting, without columns that say nothing. runs: those that are finished."""
    settings, seeds = dict.fromkeys(run.task for run in runs), sorted({run.seed for run in runs})
    rows = []
    for setting in settings:
        of_arm: dict[str, dict[int, Run]] = {}
        for run in runs:
            if run.task == setting:
                of_arm.setdefault(run.arm, {})[run.seed] = run
        rows += [[setting if len(settings) > 1 else "-", *row] for arm in of_arm
                 for row in rows_of(table, arm, of_arm, seeds)]
    titles, rows = filled(titles_of(table, seeds), rows)
    lines = [f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows]]
    alone = ["", "One seed: differences have no interval, and show no order."] if len(seeds) == 1 else []
    return "\n".join([*lines, *alone])


def write_all(table: Table, runs: list[Run], out: str, first_line: str) -> str:
    """Writes <setting>.csv, <setting>.png and <name>.md, whose text it returns. Raises CannotWrite."""
    for setting in dict.fromkeys(run.task for run in runs):
        of_setting = [run for run in runs if run.task == setting]
        path, rows = os.path.join(out, setting), tidy(of_setting)
        write_csv([row for row in rows if table.all_metrics or row["metric"] in (*table.watched, *table.kept)],
                  f"{path}.csv")
        draw_curves(of_setting, f"{path}.png", None if table.all_metrics and not table.compared else shown_of(table))
    about = f"{table.name}: {table.words}" if table.words else ""
    text = "\n\n".join(filter(None, [first_line, about, table_of(table, runs), provenance(runs)])) + "\n"
    with whole_file(os.path.join(out, f"{table.name}.md")) as f:
        f.write(text)
    return text
