"""The counts of what a verifier passes, from rollouts made by hand."""
import random

import pytest

from dev.experiments import verdict_kinds
from nanochat.common import BadInput
from nanochat.rl.report.report import Run

FLAGS = {"task": "chain", "seed": 0, "chain_verifier_share": 0.0}  # demonstrations of verifications are all right


def run_of(rollouts: list[dict]) -> Run:
    return Run("r", "chain", "tango", 1, {"args": FLAGS}, {}, [], [], rollouts, [], ["generator", "verifier"])


def rollout(task, index: int, step: int, lenient: bool, rng: random.Random) -> tuple[dict, list]:
    """A corrupted solution with the verification that is right, or with one that passes all; and its errors."""
    problem = task.problem("rl", index)
    solution = task.corrupted_solution(problem, rng)
    errors = task.step_errors(problem, solution)
    said = task.verification_demo(problem, solution, rng)
    if lenient:
        said = task.fmt.render_verification([body.rpartition(":")[0] + ":x" for body in task.fmt.step_bodies(solution)],
                                            [True] * len(errors), True)
    return {"step": step, "role": "generator", "problem": problem.prompt, "solution": solution,
            "verification": said}, errors


@pytest.fixture
def task():
    return verdict_kinds.task_of(run_of([]))


def test_steps_are_counted_by_their_error_in_the_first_and_the_last_third(task):
    """A verifier that is right at first and at last passes all, with analyses that are wrong."""
    rng, made = random.Random(0), []
    for k in range(60):
        made.append(rollout(task, k, k, k >= 40, rng))
    other = {"step": 200, "role": "verifier", "problem": "none", "solution": "", "verification": ""}
    steps = verdict_kinds.judged_steps(run_of([row for row, _ in made] + [other]))
    rows = {(kind, third): rest for kind, third, *rest in verdict_kinds.lines_of(steps)}
    for third, some in (("first", made[:20]), ("last", made[40:])):
        wrong = sum(error == "result" for _, errors in some for error in errors)
        right, late = sum(map(len, (errors for _, errors in some))) - wrong, third == "last"
        shares = [f"{100 * n / (right + wrong):.0f}" for n in (right, wrong)]
        assert rows["right", third] == [str(right), shares[0], "100", "0", "100" if late else "0"]
        assert wrong and rows["result", third] == [str(wrong), shares[1], *(["100", "0", "-"] if late else "000")]


def test_rollouts_of_other_problems_are_refused(task):
    row = {"step": 0, "role": "generator", "problem": "1+1", "solution": "=", "verification": ""}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BadInput, match="r, its rollouts: a problem is none"):
        patch.setattr(verdict_kinds, "MOST_PROBLEMS", 5)
        verdict_kinds.judged_steps(run_of([row]))


@pytest.mark.parametrize("rollouts, words", [
    ([], "none has a verdict"), ([{"step": 0, "role": "generator", "problem": "1+1", "solution": "="}], "none has"),
    ([{"step": 0, "role": "generator", "verification": ""}], "has no problem")])
def test_a_run_without_verdicts_is_refused(rollouts, words):
    with pytest.raises(BadInput, match=words):
        verdict_kinds.judged_steps(run_of(rollouts))


def test_a_run_is_counted_once():
    with pytest.raises(BadInput, match="r: is named twice"):
        verdict_kinds.main(verdict_kinds.make_parser().parse_args(["r", "r"]))
