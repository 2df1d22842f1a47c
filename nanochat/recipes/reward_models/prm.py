"""PRM (Lightman et al. 2023): a verifier that scores each reasoning step, trained on step labels. arXiv 2305.20050.

After each step the verifier says how likely it is right: V = sigma(s), s the log-odds of the verdict token. A
solution's chance is made of its steps' (--prm-aggregate). The labels come from a file (--labels): people's or gold
ones, as in the paper, or the shares of a step's continuations that end right (Math-Shepherd, Wang et al. 2024, arXiv
2312.08935). Those are learned as they are (--prm-labels soft), or as whether any ends right (hard). They may also be
progress, from -1 to 1: what a step adds to a prover's chance (PAV, Setlur et al. 2024, arXiv 2410.08146; label_steps
--method pav). Progress A is learned as V = (1 + A) / 2 (progress), so 2V - 1 predicts it.

Departures:
1. The paper's labels are positive, negative and neutral; here a label is a chance.
2. The paper labels steps up to the first error; here all that the file has are learned, but for --until-first-error.
3. --prm-aggregate is min by default, as in Math-Shepherd. The paper's is product.
"""
import argparse
from dataclasses import replace
from functools import partial

from nanochat.common import BadInput
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.verify.judge_evals import add_judged_args, judged_draws, scores_as_judge
from nanochat.rl.verify.labelled import add_label_args, as_rollouts, check_labels, labelled_draw, labelled_of_step
from nanochat.rl.verify.log_odds import (PLACES, bce_coefficients, learn_verdicts, log_judgments, log_odds,
                                         steps_filled, verdict_parts)

STATUS = ("works: on gold labels best of 8 is 15.0 ± 7.8 above an ORM's; as a reward 7.7 ± 4.0 above weighted GRPO at "
          "equal tokens, and before gamed on one seed of three")
ROLES = {"generator": RoleSpec("--model-tag", trained=False), "verifier": RoleSpec("--verifier-tag", "-ver")}
SHOWN = {"verifier": ["bce", "accuracy"]}
evaluate = partial(scores_as_judge, judge="steps")
LABELS = {"soft": lambda label: label, "hard": lambda label: float(label > 0),
          "progress": lambda label: (1 + label) / 2}


def add_args(group) -> None:
    add_label_args(group)
    add_judged_args(group)
    group.add_argument("--prm-labels", default="soft", choices=list(LABELS),
                       help="hard: 1 where above 0; progress: the file's are from -1 to 1")
    group.add_argument("--until-first-error", action=argparse.BooleanOptionalAction, default=False,
                       help="nothing is learned of the steps after the first one whose label is 0")


def check(args, task) -> None:
    is_progress = args.prm_labels == "progress"
    if is_progress and args.until_first_error:
        raise BadInput("--until-first-error: with --prm-labels progress no label says that a step is an error")
    if is_progress and args.prm_aggregate == "product":
        raise BadInput("--prm-aggregate product: with --prm-labels progress it would be a measure of length, as each "
                       "factor is about a half; say min or last")
    check_labels(args, task, kind="progress" if is_progress else "chances")


def draws(args) -> dict[str, Draw]:
    return judged_draws(args, "steps") | {"labelled": labelled_draw(args)}


def learned_labels(labels: list[float], kind: str, until_first_error: bool) -> list[float]:
    """The labels of the steps that are learned from: all, or those up to the first error."""
    made = [LABELS[kind](label) for label in labels]
    return made[: made.index(0.0) + 1] if until_first_error and 0.0 in made else made


def play(t: Play):
    rows = labelled_of_step(t)
    rollouts = as_rollouts(t, "verifier", rows)
    learned = [learned_labels(row.labels, t.args.prm_labels, t.args.until_first_error) for row in rows]
    asked = [replace(solution, step_ends=solution.step_ends[: len(labels)])
             for solution, labels in zip(t.read_solutions(rollouts), learned, strict=True)]
    places, labels = PLACES["steps"](rollouts, asked), steps_filled(rollouts, asked, learned)  # (N, T)
    s = log_odds(t, "verifier", rollouts)
    log_judgments(t, "verifier", s, labels, places)
    coefficients = bce_coefficients(s, labels, places)                                     # y - V
    yield from learn_verdicts(t, "verifier", (verdict_parts(t, rollouts, coefficients), places.sum().item()))
