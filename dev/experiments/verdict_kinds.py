"""
What a verifier passes, by the kind of error, and whether its reasons are right: counts from the rollouts that runs of
recipe tango or fixed_verifier logged, in the first and the last third of the generator's steps.

    python -m dev.experiments.verdict_kinds smol-tango-s1 smol-tango-s2 smol-tango-s3
"""
import argparse
from collections import Counter

from nanochat.cli import script_main
from nanochat.common import BadInput, print0
from nanochat.rl.measure.scores import aligned
from nanochat.rl.records.prompts import parse_verification
from nanochat.rl.report.fields import as_written
from nanochat.rl.report.judge_report import rationales_of
from nanochat.rl.report.report import Run, read_run, run_folder
from tasks import complete_task_args, make_task, task_flags

MOST_PROBLEMS = 100_000  # of RL, in which those of the rollouts are looked up
TITLES = ("steps", "run's third", "number", "of all, percent", "judged right, percent", "unread, percent",
          "verdict right, its reason wrong, percent")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="finished runs, or folders of them")
    return parser


def task_of(run: Run):
    args = argparse.Namespace(**dict.fromkeys([*task_flags(), "task", "seed"]))
    complete_task_args(args, run.config["args"], run.name)
    task = make_task(args)
    if not (hasattr(task, "step_errors") and getattr(task, "has_step_labels", True)):
        raise BadInput(f"{run.name}: task {task.name} does not name the errors of steps")
    return task


def problems_of_rl(task, rollouts: list[dict]) -> dict:
    """The problems of rollouts, by their texts. Raises BadInput for one that is none of the task's."""
    wanted, found = {row["problem"] for row in rollouts}, {}
    for i in range(MOST_PROBLEMS):
        if not wanted:
            return found
        problem = task.problem("rl", i)
        if problem.prompt in wanted:
            found[problem.prompt] = problem
            wanted.remove(problem.prompt)
    raise BadInput(f"a problem is none of the first {MOST_PROBLEMS} of the task")


def judged_steps(run: Run) -> list[tuple]:
    """Of each step of the generator's logged solutions: which third of the generator's steps has it (0 to 2), its error
    ("right" without one), the verdict on it, whether the analysis before that is right. Raises BadInput for a run that
    has no verdicts."""
    task, steps = task_of(run), []
    with as_written(f"{run.name}, its rollouts"):
        rows = [row for row in run.rollouts if row["role"] == "generator" and "verification" in row]
        if not rows:
            raise BadInput("none has a verdict")
        problems, when = problems_of_rl(task, rows), sorted({row["step"] for row in rows})
        for row in rows:
            third, problem = 3 * when.index(row["step"]) // len(when), problems[row["problem"]]
            errors = task.step_errors(problem, row["solution"])
            said = parse_verification(task.fmt, row["verification"], len(errors))
            reasons = rationales_of(task, problem, row["solution"], said)
            verdicts = aligned(said.step_verdicts, len(errors))
            steps += [(third, error or "right", *told) for error, *told in zip(errors, verdicts, reasons, strict=True)]
    return steps


def lines_of(steps: list[tuple]) -> list[list[str]]:
    """The rows of the table."""
    percent = lambda part, whole: f"{100 * part / whole:.0f}" if whole else "-"
    counts, rows = Counter(third for third, *_ in steps), []
    for kind in sorted({error for _, error, *_ in steps}, key=lambda kind: (kind != "right", kind)):
        for third, words in ((0, "first"), (2, "last")):
            mine = [(verdict, reason) for at, error, verdict, reason in steps if (at, error) == (third, kind)]
            hit = [reason for verdict, reason in mine if verdict is (kind == "right") and reason is not None]
            rows.append([kind, words, str(len(mine)), percent(len(mine), counts[third]),
                         percent(sum(verdict is True for verdict, _ in mine), len(mine)),
                         percent(sum(verdict is None for verdict, _ in mine), len(mine)),
                         percent(hit.count(False), len(hit))])
    return rows


def main(args) -> None:
    if twice := [name for name, count in Counter(args.runs).items() if count > 1]:
        raise BadInput(f"{twice[0]}: is named twice")
    steps = [step for name in args.runs for step in judged_steps(read_run(run_folder(name)))]
    print0("\n".join(f"| {' | '.join(row)} |" for row in [TITLES, ["---"] * len(TITLES), *lines_of(steps)]))


if __name__ == "__main__":
    script_main(main, make_parser())
