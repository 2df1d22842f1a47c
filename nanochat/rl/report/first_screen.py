"""
The report's first screen: did it learn, is it healthy, what does it write now.
"""
from statistics import mean

from nanochat.rl.measure.watched import WATCHED, Watched, watched_in
from nanochat.rl.report.cards import card
from nanochat.rl.report.fields import is_number
from nanochat.rl.report.report import ACCURACY, Run, arms_of, interval
from nanochat.rl.report.titles import difference_of, scores_in, title_of, value_of

JUDGES = ("ver/step_f1_fixed", "ver/balanced_acc_fixed")  # how good a verifier is, by the first that there is
NUM_LATEST = 3


def main_scores(runs: list[Run]) -> list[str]:
    """The scores of runs of one task that tell whether they learned: accuracy, the verifier's, accuracy on the other
    test set. The first three of their own where there is none of these."""
    found = dict.fromkeys(name for run in runs for name in scores_in(run))
    judge = [name for name in JUDGES if name in found][:1]
    return [name for name in (ACCURACY, *judge, "gen/pass1_out") if name in found] or list(found)[:NUM_LATEST]


def progress(runs: list[Run]) -> list[dict]:
    """The main scores of runs of one task, each with a row per arm."""
    return [{"title": title_of(name, runs[0]), "rows": [row for arm, of_arm in arms_of(runs).items()
                                                         if (row := ends_of(arm, of_arm, name))]}
            for name in main_scores(runs)]


def ends_of(arm: str, runs: list[Run], name: str) -> dict | None:
    """A score of an arm's runs at their first evaluation and at the last one so far, as texts: means over seeds, and of
    the change the 95% interval, paired by seed; one seed has none. last: None while there is one evaluation. None where
    no run has the score."""
    curves = [[point[name] for point in run.points if point.get(name) is not None] for run in runs]
    ends, is_first = [(v[0], v[-1]) for v in curves if v], max(map(len, curves)) < 2
    if not ends:
        return None
    change, half = interval([last - first for first, last in ends])
    return {"arm": arm, "first": value_of(name, float(mean(first for first, _ in ends))),
            "last": None if is_first else value_of(name, float(mean(last for _, last in ends))), "seeds": len(ends),
            "change": difference_of(name, change),
            "half": None if half is None else difference_of(name, half, sign="")}


def records_of(run: Run, role: str) -> list[dict]:
    """The steps of a role; all of them for one that makes none."""
    return [record for record in run.records if role in record["role"].split("+")] or run.records


def seen_in(run: Run, role: str) -> dict[Watched, list[tuple[int, float | None]]]:
    """What was watched of a role: (step, value) of each of its records, where some value says something."""
    seen = {}
    for record in records_of(run, role):
        for watched, value in watched_in(record, role):
            if value is None or is_number(value):
                seen.setdefault(watched, []).append((record["step"], value))
    return {watched: values for watched, values in seen.items()
            if any(value is not None or watched.is_bad(value) for _, value in values)}


def warning_of(watched: Watched, values: list[tuple[int, float | None]]) -> dict | None:
    """When a run warned: the last value out of bounds, in how many steps there was one, and whether it is so now, in
    the last tenth of the steps. None where it never was."""
    out = [n for n, (_, value) in enumerate(values) if watched.is_bad(value)]
    if not out:
        return None
    step, value = values[out[-1]]
    shown = "" if value is None else f"{value_of(f'/{watched.name}', value)} "
    return {"now": len(values) - out[-1] <= max(1, len(values) // 10),
            "text": f"{shown}at step {step}, in {len(out)} of {len(values)}"}


def well_and_ill(runs: list[Run]) -> dict:
    """What the runs watch (`WATCHED`), judged step by step as they did. warned: by watched metric and role, the runs
    that warned; fine: what none did of, with its roles where another role's run did."""
    warned, fine = {}, {}
    for run in runs:
        for role in run.roles:
            for watched, values in seen_in(run, role).items():
                told = warned.setdefault((watched, role), [])
                if found := warning_of(watched, values):
                    told.append({"run": run.name, **found})
    warned = dict(sorted(warned.items(), key=lambda item: WATCHED.index(item[0][0])))
    for (watched, role), told in warned.items():
        if not told:
            fine.setdefault(watched, []).append(role)
    ill = {watched for (watched, _), told in warned.items() if told}
    rows = [{"warning": watched.warning, "role": role, "bound": watched.bound, "remedy": watched.remedy,
             "now": any(run["now"] for run in told), "runs": sorted(told, key=lambda run: not run["now"])}
            for (watched, role), told in warned.items() if told]
    return {"warned": sorted(rows, key=lambda row: not row["now"]),
            "fine": [[watched.fine, roles if watched in ill else []] for watched, roles in fine.items()]}


def latest(run: Run) -> dict:
    """What a run writes now: the first problems of its last evaluation, of one that keeps no examples of the last step
    that logged solutions. -> whether they are held out, the step, up to `NUM_LATEST` cards"""
    solved = run.examples or [r for r in run.rollouts if r["role"] == run.solver] or run.rollouts
    step = max((r["step"] for r in solved), default=0)
    last = [r for r in solved if r["step"] == step]
    problems = {r["problem"]: r for r in reversed(last)}  # the first about each
    chosen = [*reversed(problems.values()), *(r for r in last if r is not problems[r["problem"]])]
    return {"held_out": bool(run.examples), "step": step,
            "cards": [card(r, run.solver) for r in chosen[:NUM_LATEST]]}
