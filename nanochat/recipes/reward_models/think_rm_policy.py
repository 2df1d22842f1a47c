"""Think-RM's policy (Hong et al. 2025): RL on differences, as a judge of pairs sees them. arXiv 2505.16265.

The generator samples a group of solutions of each problem. A judge of pairs, which does not learn, is shown every pair
of a group and chooses; with --grades graded it also says how much better the chosen one is. Recipe think_rm trains such
a judge. The advantage of a solution is its mean difference from the others, over the standard deviation that the
differences come to (`difference_advantages`). There is no reward, and gold answers are for the log alone. In the
released code (call_gen_prm_binary.py) a binary choice counts 1 / the characters of the judge's whole text, so short
judgments weigh more (--choice-weight length). Graded ones count as they are, from -3 to 3.

Departures:
1. A solution is shown first in about half of its pairs. In the released code the earlier one of a pair is.
2. Differences are means over --verifications choices, in units of the greatest strength, so from -1 to 1.
3. A pair of equal texts is not judged: its difference is 0. So is that of a pair without a readable choice.
4. --choice-weight is equal by default: a binary choice counts 1. With the released weights the epsilon of 1e-6 also
   outweighs the variance of the differences, 1 / (2 L^2), where texts have L > 707 characters: advantages shrink.
5. One optimizer step on a batch, with --kl-coef 1e-3. The released script has four, 4 solutions, and 1e-4.
"""
from functools import partial

import torch

from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.recipes.reward_models.think_rm import FORM
from nanochat.rl.credit.advantages import difference_advantages
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.play.play import Draw, Play, Update, solution_draws
from nanochat.rl.verify.comparing import Scores, all_pairs, verified_together
from nanochat.rl.verify.forms import empty_form_prompt

STATUS = "runs: it learns where its judge judges, which is on two seeds of three"
ROLES = {"generator": RoleSpec("--model-tag"), "verifier": RoleSpec("--verifier-tag", "-ver", trained=False)}
SHOWN = {"generator": ["duels/right_won"]}
evaluate = pass_at_1
CHOICE_WEIGHTS = {"equal": lambda text: 1.0, "length": lambda text: 1 / max(1, len(text))}  # of a judgment's text


def add_args(group) -> None:
    group.add_argument("--grades", default="binary", choices=list(FORM), help="of a choice")
    group.add_argument("--choice-weight", default="equal", choices=list(CHOICE_WEIGHTS),
                       help="what a binary choice counts; length: 1 / the characters of the judgment, as released")
    group.add_argument("--verifications", type=at_least(1), default=1, help="of a pair")
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=192)


def check(args, task) -> None:
    if args.advantage != "grpo":
        raise BadInput(f"--advantage {args.advantage}: the advantages are of differences, and --advantage has no say")
    if args.num_samples < 2:
        raise BadInput(f"--num-samples {args.num_samples}: must be at least 2, to compare them")
    if args.grades == "graded" and args.choice_weight != "equal":
        raise BadInput(f"--choice-weight {args.choice_weight}: graded choices count by their grade")


def draws(args) -> dict[str, Draw]:
    P, G = args.examples_per_step, args.num_samples
    wrap = partial(empty_form_prompt, form=FORM[args.grades], num=2)
    return solution_draws(args) | {
        "verdicts": Draw("verifier", P * G * (G - 1) // 2, args.verifications, args.verifier_max_new_tokens, wrap=wrap,
                         quoted=2 * args.max_new_tokens)}


def differences(pairs: list[list[int]], scores: Scores, num: int, num_votes: int) -> torch.Tensor:
    """How much better each of `num` rollouts is judged than each other, from `num_votes` judgments of each pair: 0
    where there is none. -> (N, N) fp32, d_ij = -d_ji"""
    d = torch.zeros(num, num)
    for q, (a, b) in enumerate(pairs):
        read = [row for row in scores[q * num_votes: (q + 1) * num_votes] if row is not None]
        if read:
            d[a, b] = sum(one - other for one, other in read) / len(read)
            d[b, a] = -d[a, b]
    return d


def play(t: Play):
    G, k, form = t.args.num_samples, t.args.verifications, FORM[t.args.grades]
    solutions = t.solve("solutions", t.problems())
    pairs = all_pairs(solutions.group_id.tolist())
    asked = [[a, b] for a, b in pairs if solutions.texts[a] != solutions.texts[b]]
    judgments, scores = verified_together(t, "verifier", solutions, asked, form, 2, k)
    weights = map(CHOICE_WEIGHTS[t.args.choice_weight], judgments.texts)
    scores = [row and [weight * score for score in row] for weight, row in zip(weights, scores, strict=True)]
    d = differences(asked, scores, len(solutions), k)
    advantages = [difference_advantages(d[i: i + G, i: i + G]) for i in range(0, len(solutions), G)]
    outcomes = t.check(solutions)
    log_rewards(t, "generator", solutions, outcomes)
    t.log("generator", t.mean({
        "duels/equal": [solutions.texts[a] == solutions.texts[b] for a, b in pairs],
        "duels/unread": [row is None for row in scores],
        "duels/right_won": [((d[a, b] > 0) == outcomes[a]).item() for a, b in asked
                            if d[a, b] and {outcomes[a], outcomes[b]} == {True, False}]}))
    advantages = torch.cat([*advantages, torch.zeros(0)]).to(t.device)[:, None].expand_as(solutions.tokens)  # (N, T)
    yield Update("generator", [(solutions, advantages)])
