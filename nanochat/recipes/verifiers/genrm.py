"""GenRM (Zhang et al. 2024): verification as next-token prediction, by an LM that may solve as well. arXiv 2408.15240.

The verifier reads a problem and a solution in its prompt and answers with a verdict at once; it is trained on the
verdict's token alone, as SFT. A solution's chance is p(T) / (p(T) + p(F)). The labelled solutions come from a file
(--labels); their step labels are not used. GenRM-CoT is recipe genprm, or any verifier of chat_sft read by the judge
"analysed".

Departures:
1. The paper's score is p("Yes"); here it is divided by the mass of both verdicts.
2. The solutions of the solution loss are the right ones of the file, one epoch with the verdicts.
"""
from functools import partial

from nanochat.cli import at_least
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.verify.judge_evals import add_judged_args, judged_draws, scores_as_judge
from nanochat.rl.verify.judges import verdict_draw
from nanochat.rl.verify.labelled import (add_label_args, as_rollouts, check_outcomes, labelled_draw,
                                         labelled_of_step, quoting_labelled)
from nanochat.rl.verify.log_odds import learn_verdicts, likelihood_parts
from nanochat.rl.verify.spots import forced_verdicts, spot_places

STATUS = "runs: best of 8 is not shown above the majority vote (+7.2 ± 7.5), nor above an ORM's (+3.2 ± 3.6)"
ROLES = {"generator": RoleSpec("--model-tag", trained=False), "verifier": RoleSpec("--verifier-tag", "-ver")}
SHOWN = {"verifier": ["nll"]}
check = check_outcomes
evaluate = partial(scores_as_judge, judge="verdict")


def add_args(group) -> None:
    add_label_args(group)
    add_judged_args(group)
    group.add_argument("--solution-coef", type=at_least(0, float), default=0.0,
                       help="lambda: weight of SFT on right solutions beside SFT on verdicts")


def draws(args) -> dict[str, Draw]:
    taught = verdict_draw(args, args.examples_per_step, 1, None)._replace(trained=True, scored=1)
    return judged_draws(args, "verdict") | {"labelled": labelled_draw(args), "taught": quoting_labelled(args, taught)}


def play(t: Play):
    rows = [row for row in labelled_of_step(t) if row.outcome is not None]
    solutions = as_rollouts(t, "verifier", rows)
    verdicts, spots = forced_verdicts(t, "verifier", solutions, [row.outcome for row in rows])
    places = spot_places(verdicts, spots)                                                  # (N, T)
    nll = -t.logprobs("verifier", verdicts)[places]
    t.log("verifier", t.mean({"nll": nll.tolist(), "label_mean": [row.outcome for row in rows]}))
    losses = [(likelihood_parts(verdicts, places), len(rows))]                             # L_verify: -log p(T | x, y)
    if t.args.solution_coef:
        right = solutions.select([n for n, row in enumerate(rows) if row.outcome])
        losses.append((likelihood_parts(right, t.args.solution_coef * right.mask), right.num_trained().sum().item()))
    yield from learn_verdicts(t, "verifier", *losses)                                      # + lambda L_solve
