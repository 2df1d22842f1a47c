"""ORM (Cobbe et al. 2021): a verifier that scores whole solutions, trained on their outcomes. arXiv 2110.14168.

The verifier reads a solution after its problem and says how likely the answer is right: V = sigma(s), s the log-odds
of the verdict token. It is asked at the end of the solution (--orm-places end), or after every token (tokens), which
makes a value function of it. The labelled solutions come from a file (--labels); their step labels are not used.

Departures:
1. s is the difference of two rows of the LM head. The paper has a bias and a gain on one special token's logit, which
   differ in initialisation only.
2. By default V is asked for once, by cross-entropy, and no LM loss is added. The paper asks after every token of the
   solution, by the mean squared error, and adds the LM loss unweighted: --orm-places tokens --orm-loss squared
   --lm-coef 1, then --judge tokens where it rewards. The place made no difference that is shown
   (dev/results/verifiers.md). With tokens V is also asked for before the first one.
3. The LM loss is on the right ones of the labelled solutions. The paper's is on the solutions of its training set, as
   many in a batch as labelled ones.
4. The paper takes 100 solutions of each problem and one epoch; here the file and --num-steps decide.
"""
import torch

from nanochat.cli import at_least
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.verify.judge_evals import add_judged_args, judged_draws, scores_as_judge
from nanochat.rl.verify.labelled import add_label_args, as_rollouts, check_outcomes, labelled_draw, labelled_of_step
from nanochat.rl.verify.log_odds import (LOSSES, PLACES, learn_verdicts, likelihood_parts, log_judgments, log_odds,
                                         verdict_parts)

STATUS = "runs: best of 8 is not shown above the majority vote (+4.0 ± 10.6), nor is a gain as a reward"
ROLES = {"generator": RoleSpec("--model-tag", trained=False), "verifier": RoleSpec("--verifier-tag", "-ver")}
SHOWN = {"verifier": ["bce", "accuracy"]}
check = check_outcomes


def add_args(group) -> None:
    add_label_args(group)
    add_judged_args(group)
    group.add_argument("--orm-places", default="end", choices=["end", "tokens"], help="where the outcome is asked for")
    group.add_argument("--orm-loss", default="bce", choices=list(LOSSES), help="of V against the outcome")
    group.add_argument("--lm-coef", type=at_least(0, float), default=0.0, help="of the LM loss on right solutions")


def draws(args) -> dict[str, Draw]:
    return judged_draws(args, args.orm_places) | {"labelled": labelled_draw(args)}


def play(t: Play):
    rows = [row for row in labelled_of_step(t) if row.outcome is not None]
    rollouts = as_rollouts(t, "verifier", rows)
    places = PLACES[t.args.orm_places](rollouts, t.read_solutions(rollouts))               # (N, T)
    labels = places * torch.tensor([[float(row.outcome)] for row in rows], device=t.device).view(-1, 1)
    s = log_odds(t, "verifier", rollouts)
    log_judgments(t, "verifier", s, labels, places)
    losses = [(verdict_parts(t, rollouts, LOSSES[t.args.orm_loss](s, labels, places)), places.sum().item())]
    if t.args.lm_coef:
        right = rollouts.select([n for n, row in enumerate(rows) if row.outcome])
        losses.append((likelihood_parts(right, t.args.lm_coef * right.mask), right.num_trained().sum().item()))
    yield from learn_verdicts(t, "verifier", *losses)


def evaluate(t: Play) -> dict:
    return scores_as_judge(t, t.args.orm_places)
