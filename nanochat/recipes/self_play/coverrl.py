"""CoVerRL (Pan et al. 2026): votes teach one model to verify, and its verdicts filter the votes. arXiv 2603.17775.

One model has both roles, and no gold answer enters an update. The most frequent answer of the votes is a problem's
label, as in recipe ttrl. The first votes for it get one verification each, at most --verifications. One of the other
votes, of the rarest answer, gets as many. A verification earns 1 for a readable verdict and 1 for agreeing with the
label, and all on one side of a vote are a group, whichever solutions they are of (the paper's answer anchors). A label
is kept if most verdicts on its own side are for it; else all rollouts of its problem are left out. A solution earns 1
for a readable answer and 1 for the label's. Second attempts after verdicts against a solution can be trained too.

As in the released code labels are kept unverified where all votes agree, one vote is for the label, or none can be
read. The released script has 32 votes, 16 of them trained on, 8 verifications a side and 6 refinements.

Departures:
1. --refinements is 0: a tiny model has to be shown their form first (chat_sft --demo-shares refine:0.2). Their prompt
   quotes the solution and the verification, where the code goes on with one conversation.
2. A verdict that cannot be read is one against the label. The code takes such a text for a verdict in favour, unless it
   has a word such as "wrong".
3. Verifications of unreadable votes are a group for each problem. In the code they are one group of all problems.
4. One optimizer step for all rollouts, with the KL of all recipes; the code has one for every 256. With --verifier-head
   own there are two models, and a step for each.
5. Departure 2 of recipe ttrl.
"""
import math
from collections import Counter
from dataclasses import replace

import torch

from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.recipes.self_play import ttrl
from nanochat.recipes.self_play.ttrl import votes_per_problem
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import scores_of_pair
from nanochat.rl.measure.observe import gathered_verdict_scores, log_rewards, verification_columns
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.outcomes import are_equal
from nanochat.rl.records.prompts import Verification, empty_verifier_prompt, refine_prompt
from nanochat.rl.records.rollouts import Rollouts

STATUS = "works: 48.0 ± 9.9 above TTRL where wrong answers have the majority; its verifier gets no better"
ROLES = {"generator": RoleSpec("--model-tag"), "verifier": RoleSpec("--verifier-tag", "-ver", shares="generator")}
SHOWN = {"generator": ["label_accuracy", "kept_label_accuracy", "kept"]}
TABLE = {"gen/pass1_in": "solving: greedy pass@1, in distribution",
         "gen/pass1_out": "solving: greedy pass@1, out of distribution",
         "ver/balanced_acc_fixed": "verifying: balanced accuracy, solutions of the start",
         "ver/balanced_acc_current": "verifying: balanced accuracy, present solutions",
         "ver/parse_fail_current": "verifying: parse failures"}
evaluate = scores_of_pair


def add_args(group) -> None:
    ttrl.add_args(group)
    group.add_argument("--verifications", type=at_least(2), default=8, help="of either side of a vote, at most")
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=112)
    group.add_argument("--refinements", type=at_least(2, also=0), default=0,
                       help="second attempts after each verdict against a vote, which are compared")
    group.set_defaults(verifier_head="prompt")


def check(args, task) -> None:
    ttrl.check(args, task)
    if args.verifier_head not in ("prompt", "own"):
        raise BadInput(f"--verifier-head {args.verifier_head}: both roles learn from each step; give prompt, for one "
                       f"model, or own, for two")
    if args.verifier_optimizer != "shared":
        raise BadInput(f"--verifier-optimizer {args.verifier_optimizer}: one model learns from both roles at once")


def updates(args) -> dict[str, int]:
    return {"generator": args.num_steps, "verifier": 0 if args.verifier_head == "prompt" else args.num_steps}


def draws(args) -> dict[str, Draw]:
    limit, critique = args.max_new_tokens, args.verifier_max_new_tokens
    num_judged = 2 * args.examples_per_step * args.verifications
    found = {"reviews": Draw("verifier", num_judged, 1, critique, trained=True, wrap=empty_verifier_prompt,
                             quoted=limit)}
    if args.refinements:
        found["refinements"] = Draw("generator", num_judged, args.refinements, limit, trained=True, wrap=refine_prompt,
                                    quoted=limit + critique)
    return ttrl.draws(args) | found


def to_verify(answers: list[str | None], label: str | None, most: int) -> tuple[list[int], list[int]]:
    """Which votes of a problem are verified: the first ones for its label, `most` or else an even number of them; and
    as many times one of the others, of the answer with the fewest votes, ties going to the earliest. It is one that
    cannot be read only where none can. Nothing where there are no others, or fewer than two for the label."""
    agree = [n for n, answer in enumerate(answers) if answer is not None and answer == label]
    others = [n for n in range(len(answers)) if n not in agree]
    num = most if len(agree) >= most else len(agree) // 2 * 2
    if not num or not others:
        return [], []
    counts = Counter(answers)
    rarest = min(others, key=lambda n: math.inf if answers[n] is None else counts[answers[n]])
    return agree[:num], [rarest] * num


def is_kept(verdicts: list[bool | None]) -> bool:
    """Whether a label stays, given the verdicts on votes for it: more for it than against it, or none at all."""
    return not verdicts or 2 * verdicts.count(True) > len(verdicts)


def with_form(answered: list[str | bool | None], agrees: list[bool]) -> list[float]:
    """1 for each text from which an answer or verdict can be read, and 1 for each that agrees with the label."""
    return [(answer is not None) + float(agree) for answer, agree in zip(answered, agrees, strict=True)]


def play(t: Play):
    N, M = votes_per_problem(t.args), t.args.num_samples
    votes, labels = ttrl.cast_votes(t)
    judged, verifications, of_label = verified(t, votes, labels)
    verdicts, agrees = verifications.columns["verdict"], [reward == 1 for reward in judged.columns["majority_reward"]]
    kept = [is_kept([v for j, agree, v in zip(of_label, agrees, verdicts, strict=True) if j == i and agree])
            for i in range(len(labels))]
    log_filter(t, votes, kept, of_label)

    solutions = votes.select([n for n in range(len(votes)) if n % N < M and kept[n // N]])
    rewards = with_form(solutions.columns["answer"], solutions.columns["majority_reward"])
    log_rewards(t, "generator", solutions, rewards)
    parts = {"generator": [(solutions, t.advantages(solutions, rewards))]}
    trained = [q for q, i in enumerate(of_label) if kept[i]]
    if t.args.refinements:
        blamed = [q for q in trained if verdicts[q] is False]
        parts["generator"].append(second_attempts(t, judged.select(blamed), verifications.select(blamed)))
    learned = verifications.select(trained)
    rewards = with_form(learned.columns["verdict"], [verdicts[q] == agrees[q] for q in trained])
    anchors = torch.tensor([2 * of_label[q] + agrees[q] for q in trained], dtype=torch.long, device=t.device)
    log_rewards(t, "verifier", replace(learned, group_id=anchors), rewards)
    parts["verifier"] = [(learned, t.advantages(learned, rewards, groups=anchors))]
    yield from learn(t, parts)


def verified(t: Play, votes: Rollouts, labels: list[str | None]) -> tuple[Rollouts, Rollouts, list[int]]:
    """The votes that are verified, as often as they are; their verifications; and of which label each is."""
    N, answers = votes_per_problem(t.args), votes.columns["answer"]
    places = [(i, i * N + n) for i, label in enumerate(labels)
              for side in to_verify(answers[i * N: (i + 1) * N], label, t.args.verifications) for n in side]
    judged = votes.select([n for _, n in places])
    verifications = t.verify("reviews", judged)
    read = t.read_verifications(verifications)
    verifications.columns = {"outcome": judged.columns["outcome"]} | verification_columns(read)
    log_verifications(t, judged, read)
    return judged, verifications, [i for i, _ in places]


def second_attempts(t: Play, first: Rollouts, verifications: Rollouts) -> tuple[Rollouts, torch.Tensor]:
    """A group of second attempts after each of these solutions and its verification, rewarded by the label."""
    R = t.args.refinements
    second = t.refine("refinements", first, verifications.texts, R)
    answers, outcomes = t.answers(second), t.check(second)
    labels = [label for label in first.columns["pseudo_label"] for _ in range(R)]
    agree = [a is not None and are_equal(t.task, label, a) for a, label in zip(answers, labels, strict=True)]
    rewards = with_form(answers, agree)
    second.columns = {"outcome": [o for o in first.columns["outcome"] for _ in range(R)], "second_outcome": outcomes,
                      "answer": answers, "pseudo_label": labels, "reward": rewards}
    t.log("generator", t.mean({"second/accuracy": outcomes, "second/reward": rewards}))
    return second, t.advantages(second, rewards)


def learn(t: Play, parts: dict[str, list[tuple[Rollouts, torch.Tensor]]]):
    """One update of the one model on the rollouts of both roles, or one of each of two; none where no rank has any."""
    if t.args.verifier_head == "prompt":
        parts = {"generator": [part for own in parts.values() for part in own]}
    for role, own in parts.items():
        if t.total(sum(len(rollouts) for rollouts, _ in own)):
            yield Update(role, own)


# The log alone knows gold answers.

def log_filter(t: Play, votes: Rollouts, kept: list[bool], of_label: list[int]) -> None:
    """How many labels are kept, and how far they are right; recipe ttrl logs the same of all."""
    N, rewarded = votes_per_problem(t.args), votes.columns["majority_reward"]
    right, stays = votes.columns["label_outcome"][::N], [k for k in kept for _ in range(N)]
    t.log("generator", t.mean({
        "labels_verified": [i in of_label for i in range(len(kept))], "kept": kept,
        "kept_label_accuracy": [outcome for outcome, k in zip(right, kept, strict=True) if k],
        "dropped_label_accuracy": [outcome for outcome, k in zip(right, kept, strict=True) if not k],
        "kept_reward_accuracy": [reward == outcome for reward, outcome, k in
                                 zip(rewarded, votes.columns["outcome"], stays, strict=True)
                                 if k and outcome is not None]}))


def log_verifications(t: Play, judged: Rollouts, read: list[Verification]) -> None:
    """How far verdicts are right, and how far the labels that they are to agree with."""
    outcomes = judged.columns["outcome"]
    rows = list(zip([v.verdict for v in read], outcomes, judged.columns["majority_reward"], strict=True))
    t.log("verifier", gathered_verdict_scores(t, judged, outcomes, read))
    t.log("verifier", t.mean({
        "verdict_accuracy": [verdict == outcome for verdict, outcome, _ in rows if outcome is not None],
        "agrees_with_label": [verdict == agree for verdict, _, agree in rows],
        "reward_accuracy": [outcome == agree for _, outcome, agree in rows if outcome is not None]}))
