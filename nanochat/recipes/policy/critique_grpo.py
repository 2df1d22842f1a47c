"""Critique-GRPO (Zhang et al. 2025): GRPO with a refinement in each group, written after a critique. arXiv 2506.03106.

G solutions of each problem are criticised and each is refined once. The first right refinement takes the place of the
group's first solution. It is trained after the problem alone, with the loss -A pi / (pi + c), which spares tokens that
are very likely or very unlikely there. Defaults are those of recipe grpo, so that the two differ by that alone. The
authors' script has --kl-coef 0, --entropy-coef 1e-3 and --lr 1e-6.

Departures:
1. One optimizer step per batch (theirs: two), so the ratio of the sampled tokens is 1.
2. A rule's critique is written with the marks of the task's format: "F=6" where theirs is a sentence. Kind `steps` is
   ours. Their kind `text` is by GPT-4o; recipe critique_grpo_verifier has a verifier's.
3. A refinement keeps the tokens that were sampled. Theirs is decoded, encoded again and always ended.
4. As theirs, a wrong refinement takes the slot where none is right; --right-refinements-only is ours.
5. A tiny model learns the form of a refinement by SFT first (chat_sft --demo-shares refine:0.5).
"""
from dataclasses import replace

import torch

from nanochat.cli import above
from nanochat.common import BadInput
from nanochat.recipes.policy.grpo import ROLES, evaluate  # noqa: F401
from nanochat.rl.credit.aggregation import check_one_update
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.prompts import refine_prompt
from nanochat.rl.records.rollouts import Rollouts, join
from nanochat.rl.verify.critiques import CRITIQUES

STATUS = "runs: 0.7 ± 26.4 above GRPO at equal steps and below it at equal tokens: no use of a refinement is shown"
SHOWN = {"generator": ["refined/accuracy", "refined/rescued"]}
CRITIQUE_TOKENS = 32  # that the context check counts for a rule's critique; sampling refuses a prompt that does not fit


def by_rule(t: Play, solutions: Rollouts, outcomes: list[bool | None]) -> list[str]:
    """A critique of each solution, of the kind that --critique names; "" where the outcome is not known."""
    rows = zip(solutions.problems(), solutions.texts, outcomes, strict=True)
    return ["" if row[2] is None else CRITIQUES[t.args.critique](t.task, *row) for row in rows]


def add_args(group) -> None:
    group.add_argument("--critique", default="simple_gt", choices=list(CRITIQUES), help="what it says")
    add_refinement_args(group)


def add_refinement_args(group) -> None:
    group.add_argument("--shaping", type=above(0), default=0.1, help="c of a refinement's weight pi / (pi + c)")
    group.add_argument("--right-refinements-only", action="store_true", help="a wrong refinement replaces no solution")


def check(args, task) -> None:
    if getattr(args, "critique", None) == "steps" and not getattr(task, "has_step_labels", True):
        raise BadInput(f"--critique steps: task {task.name} has no gold labels of steps")
    check_one_update(args)


def draws(args, critique_tokens: int = CRITIQUE_TOKENS) -> dict[str, Draw]:
    P, G, limit = args.examples_per_step, args.num_samples, args.max_new_tokens
    return {"solutions": Draw("generator", P, G, limit, trained=True),
            "refined": Draw("generator", P * G, 1, limit, wrap=refine_prompt, quoted=limit + critique_tokens,
                            scored=1)}  # one refinement of each group is, in fact


def first_best(outcomes: list[bool | None], num_samples: int) -> list[int]:
    """The place of each group's first right entry, else of its first wrong one, else of its first. -> one per group"""
    value, starts = {True: 2, False: 1, None: 0}, range(0, len(outcomes), num_samples)
    return [max(range(i, i + num_samples), key=lambda n: value[outcomes[n]]) for i in starts]


def shaped(advantages: torch.Tensor, logprobs: torch.Tensor, c: float) -> torch.Tensor:
    """A c pi / (pi + c)^2: the gradient of A pi / (pi + c) with respect to log pi, largest where pi = c. Any shape."""
    probs = logprobs.exp()
    return advantages * c * probs / (probs + c) ** 2


def play(t: Play, criticise=by_rule):
    """criticise(t, solutions, outcomes) -> a text for each solution."""
    G = t.args.num_samples
    solutions = t.solve("solutions", t.problems())
    outcomes = t.check(solutions)
    critiques = criticise(t, solutions, outcomes)
    refined = t.refine("refined", solutions, critiques)
    refined_outcomes = t.check(refined)

    best = first_best(refined_outcomes, G)  # (P)
    replaced = [p for p, n in enumerate(best) if refined_outcomes[n] is True or not t.args.right_refinements_only]
    # the prompt without the critique
    off_policy = refined.select(best).with_prompts(solutions.select(best).prompt_of())
    rows = list(range(len(solutions)))
    for p in replaced:
        rows[p * G] = len(solutions) + p
    mixed = join([solutions, off_policy]).select(rows)  # (N, T)
    mixed_outcomes = [(outcomes + [refined_outcomes[n] for n in best])[row] for row in rows]

    advantages = t.advantages(mixed, mixed_outcomes).clone()
    logprobs, slots = t.logprobs("generator", off_policy), [p * G for p in replaced]  # before the update
    width = logprobs.shape[1]
    advantages[slots, :width] = shaped(advantages[slots, :width], logprobs[replaced], t.args.shaping)

    refines = {p * G: best[p] for p in replaced}  # row of a refinement -> the solution that it refines
    mixed.columns = {"outcome": mixed_outcomes, "turns": [
        [["first attempt", solutions.texts[refines[n]]], ["critique", critiques[refines[n]]]] if n in refines else []
        for n in range(len(rows))]}
    log_rewards(t, "generator", solutions, outcomes)
    log_refinements(t, outcomes, refined_outcomes, mixed_outcomes)
    t.log("generator", t.mean({
        "refined/replaced": [p in replaced for p in range(len(best))],
        "refined/chosen_right": [refined_outcomes[n] for n in best],
        "refined/prob": logprobs.exp()[off_policy.mask].tolist()}))
    yield Update("generator", [(mixed, advantages)], loss=replace(t.loss, name="reinforce"))


def log_refinements(t: Play, outcomes: list, refined: list, mixed: list) -> None:
    """Logs what refinements change. rescued: of groups without a right solution those with a right refinement."""
    G, pairs = t.args.num_samples, list(zip(outcomes, refined, strict=True))
    groups = [slice(i, i + G) for i in range(0, len(outcomes), G)]
    t.log("generator", t.mean({
        "unscorable": [o is None for o in outcomes],
        "refined/accuracy": refined,
        "refined/accuracy_of_wrong": [new for old, new in pairs if old is False],
        "refined/rescued": [True in refined[group] for group in groups if True not in outcomes[group]],
        "refined/frac_reward_zero_std": [len(set(mixed[group]) - {None}) < 2 for group in groups]}))
