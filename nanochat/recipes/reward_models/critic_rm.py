"""Critic-RM (Yu et al. 2024): a verifier that writes a critique, then scores by a scalar. arXiv 2411.16646.

A step takes a right and a wrong solution of each problem from a file (--labels). The verifier writes --num-samples
critiques of each, the task's usual verifications. Those whose final verdict agrees with the outcome are kept, in pairs:
one of the right and one of the wrong solution. A critique has a score s, the log-odds of the final verdict at its place
in the text. The loss is (1 - lambda) times the LM loss on these critiques, plus lambda times the mean of
-log sigma(s_right - s_wrong) over the pairs. lambda goes from --bt-start to --bt-end over the run: the verifier first
learns to write, then to score. A solution's chance is the mean over --verifications critiques.

Departures:
1. The scalar head is the difference of two rows of the LM head, read where the verdict stands. Theirs is a linear head
   after the critique.
2. The verifier writes what it learns from anew in each step. In the paper it is written once, before training, and also
   refined and ranked.
3. A critique is kept or not by its final verdict. Its verdicts on steps may be anything.
4. The k-th kept critique of the right solution makes a pair with the k-th of the wrong one. Those left over are not
   learned. Otherwise a verifier that calls everything right keeps half of its critiques and is confirmed.
5. lambda is linear in the number of updates.
6. What is averaged over critiques is sigma(s), not s.
"""
from functools import partial

from nanochat.cli import SHARE, at_least
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.observe import log_rewards, verification_columns
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.comparing import warn_of_form
from nanochat.rl.verify.judge_evals import add_judged_args, judged_draws, scores_as_judge
from nanochat.rl.verify.judges import written_draw
from nanochat.rl.verify.labelled import (Labelled, add_label_args, as_rollouts, check_pairs, pairs_of_step,
                                         quoting_labelled)
from nanochat.rl.verify.log_odds import learn_verdicts, likelihood_parts, log_margins, pair_coefficients
from nanochat.rl.verify.spots import Spot, log_odds_at, spot_parts, verdict_spots

STATUS = "runs: its verdicts on steps get worse, by 11.2 ± 8.5 of step F1; no gain of best of 8 is shown"
ROLES = {"generator": RoleSpec("--model-tag", trained=False), "verifier": RoleSpec("--verifier-tag", "-ver")}
SHOWN = {"verifier": ["kept", "pair_loss", "pair_accuracy"]}
check = check_pairs
evaluate = partial(scores_as_judge, judge="analysed")


def add_args(group) -> None:
    add_label_args(group)
    add_judged_args(group)
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=112)
    group.add_argument("--bt-start", type=SHARE, default=0.0, help="lambda, the pair loss's share, at the first update")
    group.add_argument("--bt-end", type=SHARE, default=1.0, help="at the last")


def draws(args) -> dict[str, Draw]:
    critiques = written_draw(args, args.examples_per_step, 2, None)._replace(num_samples=args.num_samples,
                                                                             trained=True, scored=2)
    return judged_draws(args, "analysed") | {"critiques": quoting_labelled(args, critiques)}


def paired_critiques(t: Play, solutions: Rollouts, rows: list[Labelled]) -> tuple[Rollouts, list[Spot]]:
    """--num-samples critiques of each solution, of which those are kept whose final verdict is its outcome. -> the
    kept ones in pairs, and where the verdict stands"""
    G = t.args.num_samples
    rollouts = t.verify("critiques", solutions, copies=[row.copy for row in rows])
    verifications, of_each = t.read_verifications(rollouts), [n for n in range(len(rows)) for _ in range(G)]
    agree = [v.verdict == rows[n].outcome for v, n in zip(verifications, of_each, strict=True)]
    warn_of_form(t, "steps", t.mean({"unread": [v.verdict is None for v in verifications]})["unread"])
    rollouts.columns = verification_columns(verifications)
    log_rewards(t, "verifier", rollouts, agree)
    spots = [verdict_spots(t.tokenizer, t.task.fmt, tokens, v, len(v.step_verdicts))[-1]
             for tokens, v in zip(rollouts.completions(), verifications, strict=True)]
    kept = [i for i, spot in enumerate(spots) if agree[i] and spot]  # without a spot it has no score
    t.log("verifier", {"kept": t.total(len(kept))})
    chosen = [kept[i] for i in in_pairs([of_each[i] for i in kept])]
    return rollouts.select(chosen), [spots[i] for i in chosen]


def in_pairs(of_each: list[int]) -> list[int]:
    """Critiques in pairs: the k-th of a right solution, and after it the k-th of the wrong one. of_each: the number of
    the solution of each, even for a right one, which the wrong one follows."""
    found: dict[int, list[int]] = {}
    for i, n in enumerate(of_each):
        found.setdefault(n, []).append(i)
    return [i for n in found if n % 2 == 0 for pair in zip(found[n], found.get(n + 1, []), strict=False) for i in pair]


def play(t: Play):
    rows = [row for pair in pairs_of_step(t, "verifier") for row in pair]                      # right, wrong, ...
    rollouts, spots = paired_critiques(t, as_rollouts(t, "verifier", rows), rows)
    share = t.args.bt_start + (t.args.bt_end - t.args.bt_start) * t.progress("verifier")       # lambda
    placed = list(enumerate(spots))
    s = log_odds_at(t, "verifier", rollouts, placed)                                           # (N,)
    log_margins(t, "verifier", s[::2] - s[1::2])
    num_pairs, N = len(rollouts) // 2, len(rollouts)
    t.log("verifier", {"bt_share": share, "num_pairs": t.total(num_pairs)})
    losses = []
    if share < 1:
        losses.append((likelihood_parts(rollouts, (1 - share) * rollouts.mask), rollouts.lengths.sum().item()))
    if share > 0:
        pull = pair_coefficients(s, list(range(0, N, 2)), list(range(1, N, 2)))
        losses.append((spot_parts(rollouts, placed, share * pull), num_pairs))
    yield from learn_verdicts(t, "verifier", *losses)
