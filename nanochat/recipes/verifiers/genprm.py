"""GenPRM (Zhao et al. 2025): a verifier that learns analyses whose verdicts agree with labels. arXiv 2504.00891.

It analyses each step before its verdict. It writes --num-samples verifications of each labelled solution. Those whose
verdicts on all steps, and on the whole, agree with the labels are kept, and it is trained on them as SFT. A chance is
p(T) / (p(T) + p(F)) at the place of a verdict in a sampled text, the mean over --verifications texts. The labels come
from a file (--labels). With outcomes alone in mind this is GenRM-CoT.

Departures:
1. The verifier itself writes what it learns from, anew in each step. In the paper a larger model writes it, once.
2. No code is written or run.
3. A solution with several kept verifications counts for each.
4. The paper labels a step by its progress relative to the one before, at least .8 of it: that is label_steps' work. A
   step is right here where its label is at least --label-bar.
"""
from functools import partial

from nanochat.cli import above, at_least
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.observe import log_rewards, verification_columns
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.records.prompts import Verification
from nanochat.rl.verify.comparing import warn_of_form
from nanochat.rl.verify.judge_evals import add_judged_args, judged_draws, scores_as_judge
from nanochat.rl.verify.judges import written_draw
from nanochat.rl.verify.labelled import (Labelled, add_label_args, as_rollouts, check_labels, labelled_of_step,
                                         quoting_labelled)
from nanochat.rl.verify.log_odds import learn_likelihood

STATUS = ("runs: it is not shown ahead of a PRM on the same labels (best of 8 -2.3 ± 3.8); as a reward it is "
          "18.2 ± 17.0 above GRPO at equal steps, and at equal tokens 16.8 ± 8.8 below weighted GRPO")
ROLES = {"generator": RoleSpec("--model-tag", trained=False), "verifier": RoleSpec("--verifier-tag", "-ver")}
SHOWN = {"verifier": ["kept", "reward"]}
check = partial(check_labels, kind="chances")
evaluate = partial(scores_as_judge, judge="analysed")


def add_args(group) -> None:
    add_label_args(group)
    add_judged_args(group)
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=112)
    group.add_argument("--label-bar", type=above(0, 1), default=0.5, help="least label of a step that is right")


def draws(args) -> dict[str, Draw]:
    analyses = written_draw(args, args.examples_per_step, 1, None)._replace(num_samples=args.num_samples, trained=True)
    return judged_draws(args, "analysed") | {"analyses": quoting_labelled(args, analyses)}


def agrees(verification: Verification, row: Labelled, bar: float) -> bool:
    """Whether the verdicts on all steps are those of the labels, and the final one is the outcome, if known."""
    return (verification.usable_steps == [label >= bar for label in row.labels] and verification.verdict is not None
            and row.outcome in (None, verification.verdict))


def play(t: Play):
    rows, G = labelled_of_step(t), t.args.num_samples
    rollouts = t.verify("analyses", as_rollouts(t, "verifier", rows), copies=[row.copy for row in rows])
    verifications = t.read_verifications(rollouts)
    agree = [agrees(v, rows[n // G], t.args.label_bar) for n, v in enumerate(verifications)]
    unread = [v.usable_steps is None or v.verdict is None for v in verifications]
    warn_of_form(t, "steps", t.mean({"unread": unread})["unread"])
    rollouts.columns = verification_columns(verifications)
    log_rewards(t, "verifier", rollouts, agree)
    kept = rollouts.select([n for n, is_kept in enumerate(agree) if is_kept])              # consensus filtering
    t.log("verifier", {"kept": t.total(len(kept))})
    yield from learn_likelihood(t, "verifier", kept)
