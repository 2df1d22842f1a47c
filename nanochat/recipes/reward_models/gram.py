"""GRAM (Wang et al. 2025): a judge of pairs that chooses at once, pretrained on pairs without labels. arXiv 2506.14175.

The verifier is shown a right and a wrong solution of a problem and answers with A or B, without an analysis. In the
first --pretrain-steps it learns to write two solutions of a problem, the second after the first, as a language model:
no label is used, so solutions whose outcome is null serve too. Then it learns to choose: a cross-entropy over the two
choices alone, on s = log p(A) - log p(B), with labels smoothed to 1 - epsilon/2 and epsilon/2 (--label-smoothing). With
D the log-odds of the right choice this is -log sigma(D) + (epsilon/2) D, the Bradley-Terry loss with a term that keeps
D small. The solutions come from a file (--labels). Recipe fixed_verifier rewards a generator (--judge preferred).

Departures:
1. Pairs are a right and a wrong solution, one pair of each problem that has both. The paper's are people's preferences.
2. The first stage learns from pairs of the same file, of problems with two solutions or more. The paper has a larger
   set for it.
3. Right solutions stand first in half of a step's pairs, in random order.
4. The log-odds are taken at the sampling temperature.
5. --judge preferred gives the mean chance of both orders. Theirs is that of one order.
"""
import random
from functools import partial

import torch

from nanochat.cli import SHARE, at_least
from nanochat.common import BadInput
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.records.prompts import listed, numbered, solve_prompt
from nanochat.rl.verify.comparing import (CHOICES_TABLE, Candidates, add_candidate_args, balanced_places,
                                          candidate_columns, forced_choices, lined_up, scores_of_choices)
from nanochat.rl.verify.forms import empty_form_prompt
from nanochat.rl.verify.judges import VERDICT_TOKENS
from nanochat.rl.verify.labelled import (Labelled, add_label_args, by_problem, check_labels, check_pairs, dealt,
                                         labelled_of_run, longest_labelled, pairs_of_step, quoting_labelled,
                                         read_labelled)
from nanochat.rl.verify.log_odds import bce_coefficients, learn_likelihood, learn_verdicts, log_margins
from nanochat.rl.verify.spots import log_odds_at, spot_parts

STATUS = "runs: it judges pairs about as well as chance before training and after it (-0.5 ± 19.9)"
ROLES = {"generator": RoleSpec("--model-tag", trained=False), "verifier": RoleSpec("--verifier-tag", "-ver")}
SHOWN = {"verifier": ["solution_nll", "pair_loss", "pair_accuracy"]}
TABLE = CHOICES_TABLE


def add_args(group) -> None:
    add_label_args(group)
    add_candidate_args(group)
    group.add_argument("--pretrain-steps", type=at_least(0), default=40,
                       help="the first of --num-steps, which learn to write two solutions and use no label; as many "
                       "as there are: nothing else is learned")
    group.add_argument("--label-smoothing", type=SHARE, default=0.1,
                       help="epsilon: the right choice counts 1 - epsilon/2, the other one epsilon/2")


def check(args, task) -> None:
    check_labels(args, task)
    if args.pretrain_steps and not with_two(read_labelled(args.labels, task)):
        raise BadInput(f"--labels {args.labels}: has no problem with two solutions, which --pretrain-steps learns from")
    if args.pretrain_steps < args.num_steps:
        check_pairs(args, task)


def draws(args) -> dict[str, Draw]:
    P, num_pretrain = args.examples_per_step, min(args.pretrain_steps, args.num_steps)
    longest, remedy = longest_labelled(args.labels)
    pair = dict(teacher_forced=True, wrap=partial(empty_form_prompt, form="pair", num=2))
    chosen = Draw("verifier", P, 1, VERDICT_TOKENS, args.num_steps - num_pretrain, trained=True, scored=2, **pair)
    return {"judged": Draw("generator", P, args.num_solutions, args.max_new_tokens, 0),
            "held_out": chosen._replace(times=0, trained=False, quoted=2 * args.max_new_tokens),
            "listed": Draw("verifier", P, 1, 2 * longest, num_pretrain, trained=True, scored=1, remedy=remedy, **pair),
            "chosen": quoting_labelled(args, chosen, 2)}


def play(t: Play):
    yield from pretrain(t) if t.step < t.args.pretrain_steps else choose(t)


def with_two(rows: list[Labelled]) -> list[list[Labelled]]:
    """The solutions of each problem that has at least two."""
    return [group for group in by_problem(rows) if len(group) > 1]


def pretrain(t: Play):
    """Two solutions of each problem, listed as the pair's prompt lists them, learned after the problem alone."""
    rng = random.Random(f"{t.args.seed}-{t.step}-two")
    twos = [rng.sample(group, 2) for group in dealt(t, with_two(labelled_of_run(t)))][t.run.rank:: t.run.world]
    prompts = numbered([solve_prompt(t.tokenizer, t.task.fmt, one.problem) for one, _ in twos])
    rollouts = t.written("verifier", prompts, [listed(t.task.fmt, [one.solution, two.solution]) for one, two in twos])
    t.log("verifier", t.mean({"solution_nll": (-t.logprobs("verifier", rollouts))[rollouts.mask].tolist()}))
    yield from learn_likelihood(t, "verifier", rollouts)


def smoothed_coefficients(s: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """-dloss/ds of the cross-entropy against smoothed labels, y' - sigma(s) with y' = (1 - epsilon) y + epsilon/2: 0
    where the right choice has the chance 1 - epsilon/2. labels: 1 where A is right, 0 where B is. All (Q,)."""
    return bce_coefficients(s, (1 - smoothing) * labels + smoothing / 2, torch.ones_like(s))


def choose(t: Play):
    """The choice between a right and a wrong solution, of which either may be A."""
    pairs = pairs_of_step(t, "verifier")
    places = balanced_places(t.args.examples_per_step, 2, random.Random(f"{t.args.seed}-{t.step}-places"))
    shown = [Candidates(pair[0].problem, lined_up([row.solution for row in pair], place), place)
             for pair, place in zip(pairs, places[t.run.rank:: t.run.world], strict=True)]
    rollouts, spots = forced_choices(t, "verifier", shown)
    rollouts.columns = candidate_columns(shown)
    s = log_odds_at(t, "verifier", rollouts, spots)                                            # (Q,)
    labels = torch.tensor([float(line.right == 0) for line in shown], device=t.device)
    log_margins(t, "verifier", s * (2 * labels - 1))                                           # D
    coefficients = smoothed_coefficients(s, labels, t.args.label_smoothing)
    yield from learn_verdicts(t, "verifier", (spot_parts(rollouts, spots, coefficients), len(shown)))


def likelier(t: Play, shown: list[Candidates]) -> list[int | None]:
    """A, above 0, or B, below, whichever is likelier; None where they are equally likely."""
    s = log_odds_at(t, "verifier", *forced_choices(t, "verifier", shown)).tolist()
    return [(x > 0) - (x < 0) or None for x in s]


def evaluate(t: Play) -> dict:
    return scores_of_choices(t, partial(likelier, t))
