"""Debate (Arnesen et al. 2024): two copies argue for opposite answers, and a weaker judge decides. arXiv 2409.16636.

Each question has two answers, the gold one and a wrong one. For either the debater samples G arguments, derivations
that come to it (branching samples of one position). The judge reads both sides and chooses; an argument's reward is
its confidence in the argument's answer. The best and the worst argument of a position are a pair, learned by DPO with a
soft target P = sigma(gamma (r_w - r_l)) and a small SFT loss on the better one. With --protocol consultancy one
consultant argues at a time, and for the other answer nothing is said. gamma is 7 in debate and 10 in consultancy, beta
0.5, the weight of the SFT loss 0.005.

What is measured (`debate_scores`): is the judge right more often as the debater wins more? judge_accuracy is of debates
between two copies, single and ensembled accuracy are of consultants. The skill is how often a debater wins against the
start, or a consultant at all. dev/debate_slope.py fits the slope over seeds.

Departures:
1. One turn, so nothing is refuted; the paper has two, and finds its judge as accurate after one. With one turn its
   double consultancy (both sides shown, by a consultant) is judge_accuracy under --protocol consultancy.
2. The judge is a verifier of form pair with misconceptions of its own. It does not learn; in recipe debate_judge it
   does. The paper's is GPT-4 tuned on people's verdicts, then fixed. Its confidence is the chance of its written choice, the mean of both orders; a
   verification without a choice counts a half.
3. The judge sees the problem and the steps of an argument (with --quoted-steps the first ones), and the assigned answer
   in place of the one that was written. In the paper it sees quotes of a story, which the debaters have read.
4. The wrong answer is the most frequent one of the starting model's; a problem without one is not argued about. The
   paper's is the best distractor of a multiple-choice question.
5. Pairs are of the present model in each step, and the reference is the start. The paper samples anew twice.
6. Log-ratios are sums, as in the paper's text; the released code takes means over tokens, and weighs DPO by 1 - 0.005.
7. The other side of a debate is the first argument of the same step for the other answer.
"""
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from nanochat.common import check_choices, check_least
from nanochat.recipes.dpo import add_pair_args, check_pair_args, learn_from_pairs
from nanochat.rl.comparing import Lineup, choice_chances, lineup_prompts, turned, warn_of_form
from nanochat.rl.evals import SPLITS, log_rewards
from nanochat.rl.forms import empty_form_prompt, steps_of
from nanochat.rl.play import Call, Play
from nanochat.rl.prompts import Prompt, quoting_prompt
from nanochat.rl.roles import RoleSpec
from nanochat.rl.rollouts import Rollouts
from nanochat.rl.scores import answers_of, majority, share_of
from tasks.common import Problem

TAGS = dict(family="debate", verifier="generative, pairs, frozen", reward="the judge's confidence",
            credit="pair loss with soft targets")
ROLES = {"generator": RoleSpec("--model-tag"), "opponent": RoleSpec("--model-tag", trained=False),
         "verifier": RoleSpec("--verifier-tag", "-ver", trained=False)}
SHOWN = {"generator": ["judge_accuracy", "assigned", "pair_loss"]}
TABLE = {
    "gen/judge_accuracy_in": "debates in which the judge is for the right answer",
    "gen/win_rate_against_start_in": "debates won against the start, each side argued once",
    "gen/single_accuracy_in": "the judge is right about one consultant",
    "gen/ensembled_accuracy_in": "the judge is right about two consultants, one at a time",
    "gen/consultant_win_rate_in": "consultants whose answer the judge is for",
    "gen/assigned_in": "arguments that come to their assigned answer",
    "gen/unread_in": "verifications without a choice",
    "gen/judge_accuracy_out": "the judge is right in debates, out of distribution",
    "gen/win_rate_against_start_out": "won against the start, out of distribution",
}


class Question(NamedTuple):
    """A problem and the two answers that are argued for, the gold one first."""
    problem: Problem
    answers: tuple[str, str]


class Protocol(NamedTuple):
    """gamma: factor on rewards; against: (arguments, n, G) -> the text that the judge reads beside argument n."""
    gamma: float
    against: Callable[[list[str], int, int], str]


PROTOCOLS = {
    "debate": Protocol(7.0, lambda arguments, n, G: arguments[(n // G ^ 1) * G]),  # positions 2q and 2q + 1 are rivals
    "consultancy": Protocol(10.0, lambda arguments, n, G: ""),
}


def add_args(group) -> None:
    add_pair_args(group)
    group.set_defaults(beta=0.5, kl_coef=0.0, num_samples=4)
    group.add_argument("--protocol", default="debate", help=f"one of: {', '.join(PROTOCOLS)}")
    group.add_argument("--gamma", type=float, default=0.0,
                       help="factor on the rewards in the target P; 0 = 7 in debate, 10 in consultancy")
    group.add_argument("--sft-coef", type=float, default=0.005, help="weight of the SFT loss on the better argument")
    group.add_argument("--num-distractors", type=int, default=4, help="solutions that a wrong answer is taken from")
    group.add_argument("--quoted-steps", type=int, default=0,
                       help="the judge sees so many steps of an argument, the first ones; 0 = all")
    group.add_argument("--verifications", type=int, default=1, help="of a debate in either order")
    group.add_argument("--verifier-max-new-tokens", type=int, default=192)


def check(args, task) -> None:
    check_pair_args(args)
    check_choices(args, {"protocol": PROTOCOLS})
    check_least(args, {"num_samples": 2, "num_distractors": 1, "quoted_steps": 0, "verifications": 1, "gamma": 0,
                       "sft_coef": 0, "verifier_max_new_tokens": 1})


def calls(args) -> list[Call]:
    P, G, limit, times = args.examples_per_step, args.num_samples, args.max_new_tokens, args.num_steps
    return [Call("opponent", "distractors", P, args.num_distractors, limit, times),
            Call("generator", "arguments", 2 * P, G, limit, times, trained=True, quoted=limit, scored=2,
                 wrap=partial(quoting_prompt, template="reference_prompt", answer="")),
            Call("verifier", "verdicts", 4 * P * G, args.verifications, args.verifier_max_new_tokens, times,
                 wrap=partial(empty_form_prompt, form="pair", num=2), quoted=2 * limit, scored=2)]


# The formulas

def preference(better: float, worse: float, gamma: float) -> float:
    """P = sigma(gamma (r_w - r_l)): 0.5 for a draw."""
    return 1 / (1 + math.exp(-gamma * (better - worse)))


def best_and_worst(rewards: list[float], num_samples: int) -> tuple[list[int], list[int]]:
    """The first best and the first worst argument of each group; none of a group that is one draw. -> their indices"""
    groups = [range(i, i + num_samples) for i in range(0, len(rewards), num_samples)]
    pairs = [(max(rows, key=rewards.__getitem__), min(rows, key=rewards.__getitem__)) for rows in groups]
    decided = [(w, l) for w, l in pairs if rewards[w] > rewards[l]]
    return [w for w, _ in decided], [l for _, l in decided]


def won(confidence: float) -> float:
    """1 where the judge is for an answer, 0 where it is against, a half at exactly 0.5."""
    return ((confidence > 0.5) + (confidence >= 0.5)) / 2


def debate_scores(rows: list[list[float]]) -> dict[str, float | None]:
    """Means over questions, None without any. rows: the judge's confidence in the right answer where two copies argue,
    where the start argues for the wrong one, where the start argues for the right one, where a consultant does, where a
    consultant argues for the wrong one; the share of these arguments that come to their answer, that of unread
    verifications."""
    debates, as_right, as_wrong, right, wrong, comes, unread = zip(*rows, strict=True) if rows else [()] * 7
    both = lambda function, *columns: share_of([function(a, b) for a, b in zip(*columns, strict=True)])
    return {"gen/judge_accuracy": share_of(list(map(won, debates))),
            "gen/win_rate_against_start": both(lambda a, b: won((a + 1 - b) / 2), as_right, as_wrong),  # of both rounds
            "gen/single_accuracy": both(lambda a, b: (won(a) + won(b)) / 2, right, wrong),
            "gen/ensembled_accuracy": both(lambda a, b: won((a + b) / 2), right, wrong),
            "gen/consultant_win_rate": both(lambda a, b: (won(a) + won(1 - b)) / 2, right, wrong),
            "gen/assigned": share_of(comes), "gen/unread": share_of(unread)}


# The game

def questions_of(t: Play, problems: list[Problem], label: str) -> list[Question]:
    """The problems that the start has a wrong answer to, and that answer."""
    K, found = t.args.num_distractors, []
    solutions = t.solve("opponent", problems, K, label)
    rows = list(zip(answers_of(t.task, solutions.texts), t.check(solutions), strict=True))
    for i, problem in enumerate(problems):
        wrong = majority([answer if outcome is False else None for answer, outcome in rows[i * K: (i + 1) * K]])
        found += [Question(problem, (problem.answer, wrong))] if wrong is not None else []
    return found


def argue_prompts(t: Play, questions: list[Question]) -> list[Prompt]:
    """The debater's prompts: for the right answer of a question, and for the wrong one behind it."""
    return t.prompts("reference_prompt", [question.problem for question in questions for _ in range(2)],
                     answer=[answer for question in questions for answer in question.answers])


def quoted(t: Play, argument: str, answer: str) -> str:
    """What the judge sees of an argument: steps of it and the answer that it was to come to."""
    return t.task.fmt.render_solution(steps_of(t.task.fmt, argument)[: t.args.quoted_steps or None], answer)


def verify(t: Play, debates: list[tuple[Question, int, str, str]], num_votes: int,
           greedy: bool = False) -> tuple[Rollouts, list[Lineup]]:
    """`num_votes` verifications of each debate in order, then of each in the other order, and what each of them was
    shown. debates: question, side, its argument, the other side's."""
    shown = [Lineup(q.problem, [quoted(t, mine, q.answers[side]), quoted(t, theirs, q.answers[1 - side])], side)
             for q, side, mine, theirs in debates]
    shown += turned(shown)
    rollouts = t.sample("verifier", lineup_prompts(t, "pair", shown), num_votes, "verdicts", greedy=greedy)
    return rollouts, [line for line in shown for _ in range(num_votes)]


def confidences(t: Play, verdicts: Rollouts, num_votes: int) -> tuple[list[float], list[float]]:
    """The judge's confidence in the side of each debate, the mean of its verifications in both orders; and the share of
    these that say nothing, which count a half."""
    chances, D = choice_chances(t, "verifier", verdicts), len(verdicts) // 2
    of_A = [0.5 if chance is None else chance for chance in chances]
    return ([sum(of_A[n] + 1 - of_A[D + n] for n in range(i, i + num_votes)) / (2 * num_votes)
             for i in range(0, D, num_votes)],
            [sum(chances[d + n] is None for d in (0, D) for n in range(i, i + num_votes)) / (2 * num_votes)
             for i in range(0, D, num_votes)])


def play(t: Play):
    """-> the judge's verifications and what each was shown"""
    args, G, protocol = t.args, t.args.num_samples, PROTOCOLS[t.args.protocol]
    questions = questions_of(t, t.problems(), "distractors")
    arguments = t.sample("generator", argue_prompts(t, questions), G, "arguments")
    sides = [(questions[n // (2 * G)], n // G % 2) for n in range(len(arguments))]
    debates = [(*sides[n], text, protocol.against(arguments.texts, n, G)) for n, text in enumerate(arguments.texts)]
    verdicts, shown = verify(t, debates, args.verifications)
    rewards, unread = confidences(t, verdicts, args.verifications)
    log_arguments(t, arguments, sides, rewards, unread)
    chosen, rejected = best_and_worst(rewards, G)                                           # y_w, y_l
    targets = [preference(rewards[w], rewards[l], args.gamma or protocol.gamma)
               for w, l in zip(chosen, rejected, strict=True)]                              # P
    t.log("generator", t.mean({"preference": targets}))
    paired, Q = arguments.select(chosen + rejected), len(chosen)
    yield from learn_from_pairs(t, "generator", paired, list(range(Q)), list(range(Q, 2 * Q)),
                                t.logprobs("opponent", paired), targets=targets, sft_coef=args.sft_coef)
    return verdicts, shown


def assigned(t: Play, texts: list[str], answers: list[str]) -> list[bool]:
    """Whether each argument comes to its answer."""
    return [said == answer for said, answer in zip(answers_of(t.task, texts), answers, strict=True)]


def log_arguments(t: Play, arguments: Rollouts, sides: list[tuple[Question, int]], rewards: list[float],
                  unread: list[float]) -> None:
    """Logs what the judge makes of the arguments, and whether they come to their answers."""
    answers = [question.answers[side] for question, side in sides]
    comes = assigned(t, arguments.texts, answers)
    arguments.columns = {"answer": answers, "side": [("right", "wrong")[side] for _, side in sides], "assigned": comes}
    log_rewards(t, "generator", arguments, rewards)
    t.log("generator", t.mean({
        "judge_accuracy": [won(r if side == 0 else 1 - r) for r, (_, side) in zip(rewards, sides, strict=True)],
        "assigned": comes, "unread": unread}))


# Held out

def held_out(t: Play, split: str) -> list[list]:
    """[index, right answer, wrong answer, the start's argument for either] of a split's questions, over all ranks.
    They are drawn once, as the start does not change, and kept."""
    kept = t.memory.setdefault("held_out", {})
    if split not in kept:
        questions = questions_of(t, t.problems(t.args.eval_examples, split), "held_out")
        texts = t.sample("opponent", argue_prompts(t, questions), 1, "start", greedy=True).texts
        rows = [[q.problem.index, *q.answers, *texts[2 * i: 2 * i + 2]] for i, q in enumerate(questions)]
        kept[split] = sorted(t.gather(rows))
    return kept[split]


def debated(t: Play, split: str) -> list[list[float]]:
    """`debate_scores`' rows of this rank's share of a split's questions; arguments and verifications are greedy."""
    rows = held_out(t, split)[t.run.rank:: t.run.world]
    questions = [Question(t.task.problem(split, index), (right, wrong)) for index, right, wrong, *_ in rows]
    texts = t.sample("generator", argue_prompts(t, questions), 1, "eval", greedy=True).texts
    comes = assigned(t, texts, [answer for question in questions for answer in question.answers])
    debates = []
    for i, (question, (*_, start_right, start_wrong)) in enumerate(zip(questions, rows, strict=True)):
        right, wrong = texts[2 * i: 2 * i + 2]
        debates += [(question, 0, *pair) for pair in ((right, wrong), (right, start_wrong), (start_right, wrong),
                                                      (right, ""), ("", wrong))]
    found, unread = confidences(t, verify(t, debates, 1, greedy=True)[0], 1)
    return [[*found[5 * i: 5 * i + 5], sum(comes[2 * i: 2 * i + 2]) / 2, sum(unread[5 * i: 5 * i + 5]) / 5]
            for i in range(len(questions))]


def evaluate(t: Play) -> dict:
    scores = {}
    for split, name in SPLITS.items():
        found = debate_scores(t.gather(debated(t, split)))
        scores |= {f"{key}_{name}": value for key, value in found.items()}
        warn_of_form(t, "pair", found["gen/unread"])
    return scores
