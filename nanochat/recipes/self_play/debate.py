"""Debate (Arnesen et al. 2024): two copies argue for opposite answers, and a weaker judge decides. arXiv 2409.16636.

A problem has two answers, the gold one and a wrong one. For either the debater samples G arguments, derivations that
come to it (branching samples of one position, 2 in the paper). The judge reads both sides and chooses; an argument's
reward is its confidence in the argument's answer. The best and the worst argument of a position are a pair, unless they
are a draw. It is learned by DPO with a soft target P = sigma(gamma (r_w - r_l)) and a small SFT loss on the better one:
--advantage, --loss, --aggregation, --kl-coef and --entropy-coef have no say. With --protocol consultancy one consultant
argues at a time, and for the other answer nothing is said.

What is measured (_debates.py): is the judge right more often as the debater wins more? judge_accuracy is of debates
between two copies, but in a step under --protocol consultancy of one consultant. The skill is how often a debater wins
against the start, or a consultant at all. dev/experiments/debate_slope.py fits the slope over seeds.

Departures:
1. One turn, so nothing is refuted. The paper has two, and finds its judge as accurate after one. With one turn its
   double consultancy (a consultant on either side, both shown) is judge_accuracy under --protocol consultancy.
2. The judge is a verifier of form pair with misconceptions of its own, which stays as it is (recipe debate_judge trains
   it). The paper's is GPT-4, tuned on people's verdicts and then fixed.
3. The judge sees the problem, the steps of an argument, and the assigned answer in place of the written one. In the
   paper it sees quotes of a story that the debaters have read.
4. Its confidence is the chance of the choice that it writes, the mean of both orders; no choice counts a half.
5. The wrong answer is the most frequent one of the starting model's, and a problem without one is left out. The paper's
   is the best distractor of a multiple-choice question.
6. Pairs are of the present model in each step, and the reference is the start. The paper samples twice in all.
7. Log-ratios are sums, as in the paper's text. The released code has means over tokens, and weighs DPO by 1 - 0.005.
"""
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from nanochat.cli import at_least
from nanochat.recipes.self_play._debates import (DEBATE_TABLE, Debate, are_reached, argue, confidences,
                                                 evaluate_debates, positions_of, verify, won)
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.play.pairs import add_pair_args, best_and_worst, check, learn_from_pairs  # noqa: F401
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.records.prompts import quoting_prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.forms import empty_form_prompt

STATUS = "runs: that the judge is righter where debaters win more is not shown (slope +0.48 ± 1.28)"
ROLES = {"generator": RoleSpec("--model-tag"), "opponent": RoleSpec("--model-tag", trained=False),
         "verifier": RoleSpec("--verifier-tag", "-ver", trained=False)}
SHOWN = {"generator": ["judge_accuracy", "assigned", "pair_loss"]}
TABLE = DEBATE_TABLE
SFT_COEF = 0.005  # weight of the SFT loss on the better argument
evaluate = evaluate_debates


class Protocol(NamedTuple):
    """gamma: factor on rewards; against: (arguments, n, G) -> what is said against argument n of groups of G."""
    gamma: float
    against: Callable[[list[str], int, int], str]


PROTOCOLS = {
    # the first argument for the other answer: positions 2q and 2q + 1 are rivals
    "debate": Protocol(7.0, lambda arguments, n, G: arguments[(n // G ^ 1) * G]),
    "consultancy": Protocol(10.0, lambda arguments, n, G: ""),
}


def add_args(group) -> None:
    add_pair_args(group)
    group.set_defaults(beta=0.5, kl_coef=0.0, num_samples=4)
    group.add_argument("--protocol", default="debate", choices=list(PROTOCOLS))
    group.add_argument("--num-distractors", type=at_least(1), default=4, help="solutions that may give a wrong answer")
    group.add_argument("--verifications", type=at_least(1), default=1, help="of a debate in either order; 1 is greedy")
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=192)


def draws(args) -> dict[str, Draw]:
    P, G, limit = args.examples_per_step, args.num_samples, args.max_new_tokens
    return {"distractors": Draw("opponent", P, args.num_distractors, limit),
            "arguments": Draw("generator", 2 * P, G, limit, trained=True, quoted=limit, scored=2,
                              wrap=partial(quoting_prompt, template="argue_prompt", answer="")),
            "verdicts": Draw("verifier", 4 * P * G, args.verifications, args.verifier_max_new_tokens, scored=2,
                             wrap=partial(empty_form_prompt, form="pair", num=2), quoted=2 * limit)}


def play(t: Play):
    """-> the verifications and what each was shown"""
    args, G, protocol = t.args, t.args.num_samples, PROTOCOLS[t.args.protocol]
    positions = positions_of(t, t.problems(), "distractors")
    arguments = argue(t, "generator", positions, G, "arguments")
    debates = [Debate(positions[n // G], text, protocol.against(arguments.texts, n, G))
               for n, text in enumerate(arguments.texts)]
    verifications, shown = verify(t, debates, args.verifications)
    rewards, unread = confidences(t, verifications, args.verifications)
    log_arguments(t, arguments, debates, verifications.texts, rewards)
    chosen, rejected = best_and_worst(rewards, arguments.group_id.tolist())  # y_w, y_l
    targets = [1 / (1 + math.exp(-protocol.gamma * (rewards[w] - rewards[l])))
               for w, l in zip(chosen, rejected, strict=True)]                 # P(y_w > y_l)
    t.log("generator", t.mean({"unread": unread, "preference": targets}))
    paired, Q = arguments.select(chosen + rejected), len(chosen)
    yield from learn_from_pairs(t, "generator", paired, list(range(Q)), list(range(Q, 2 * Q)),
                                t.logprobs("opponent", paired), targets=targets, sft_coef=SFT_COEF)
    return verifications, shown


def log_arguments(t: Play, arguments: Rollouts, debates: list[Debate], verdicts: list[str],
                  rewards: list[float]) -> None:
    """Logs what the judge makes of the arguments, and whether they come to their answers. The outcome of an argument is
    whether its answer is the right one. verdicts: what the judge wrote, first of all debates, then of all turned."""
    positions, D = [debate.position for debate in debates], len(debates)
    votes = [verdicts[i: i + t.args.verifications] for i in range(0, len(verdicts), t.args.verifications)]
    reached = are_reached(t, arguments.texts, positions)
    arguments.columns = {"outcome": [position.is_right for position in positions],
                         "answer": [position.answer for position in positions],
                         "against": [debate.against for debate in debates], "assigned": reached,
                         "judge": [first + turned for first, turned in zip(votes[:D], votes[D:], strict=True)]}
    log_rewards(t, "generator", arguments, rewards)
    judged = [won(reward if position.is_right else 1 - reward)
              for reward, position in zip(rewards, positions, strict=True)]
    t.log("generator", t.mean({"judge_accuracy": judged, "assigned": reached}))
