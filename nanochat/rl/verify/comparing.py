"""
Solutions that are judged together: which ones, in what order, what a judge of them earns and how good it is; and what
its judgments are worth to the solutions.

Candidates are n solutions of one problem, of which one is right and the others are wrong. The right one stands in every
place equally often. Pairs are candidates of two. A choice is above 0 for the first solution of a pair, A, below 0 for
B, None where it cannot be read.
"""
import random
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import NamedTuple

import torch

from nanochat.cli import at_least
from nanochat.rl.measure.evals import SPLITS
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.measure.scores import share_of
from nanochat.rl.play.play import Draw, Play, Update, warn_once
from nanochat.rl.records.prompts import (STRENGTHS, Prompt, numbered, parse_choice, parse_scores, read_solution,
                                         top_score)
from nanochat.rl.records.rollouts import Rollouts, grouped
from nanochat.rl.verify.forms import empty_form_prompt, form_prompt
from nanochat.rl.verify.spots import Spot, chances_at, forced, spot_of
from tasks.common import Problem


class Candidates(NamedTuple):
    """Solutions of a problem that are judged together."""
    problem: Problem
    texts: list[str]  # in the order in which they are shown
    right: int = -1   # the place of the right one, -1 where there is none or nobody knows


def one_right(outcomes: list[bool | None], num: int) -> list[int] | None:
    """The places of the first right and the first num - 1 wrong entries, or None; with num 1 of the first known."""
    places = {kind: [i for i, outcome in enumerate(outcomes) if outcome is kind] for kind in (True, False)}
    if num == 1:
        return sorted(places[True] + places[False])[:1] or None
    chosen = places[True][:1] + places[False][: num - 1]
    return chosen if places[True] and len(chosen) == num else None


def lined_up(solutions: list[str], place: int) -> list[str]:
    """The solutions with the first of them moved to a place: (a b c, 1) -> b a c."""
    first, *others = solutions
    return [*others[:place], first, *others[place:]]


def balanced_places(num: int, num_places: int, rng: random.Random | None) -> list[int]:
    """Places for `num` candidates, each equally often up to one, in random order; in turn without a generator."""
    places = [i % num_places for i in range(num)]
    return places if rng is None else rng.sample(places, num)


def candidates(t: Play, solutions: Rollouts, num: int, rng: random.Random | None) -> list[Candidates]:
    """At most one set of each group of solutions, over all ranks, in the order of their problems, which were dealt out
    over ranks: the same however many ranks there are."""
    outcomes, problems, rows, size = t.check(solutions), solutions.problems(), [], t.args.num_solutions
    for start in range(0, len(solutions), size):
        chosen = one_right(outcomes[start: start + size], num)
        rows.append(chosen and [problems[start].split, problems[start].index, outcomes[start + chosen[0]],
                                [solutions.texts[start + i] for i in chosen]])
    rows = [row for row in t.gather(rows) if row]
    places = balanced_places(len(rows), num, rng)
    return [Candidates(t.task.problem(split, index), lined_up(texts, place), place if is_right else -1)
            for (split, index, is_right, texts), place in zip(rows, places, strict=True)]


def candidate_prompts(t: Play, form: str, shown: list[Candidates]) -> list[Prompt]:
    """The verifier's prompts, one for each set. Logs show the first solution as the one that is quoted."""
    prompts = []
    for line in shown:
        ids = form_prompt(t.tokenizer, t.task.fmt, form, line.problem.prompt, line.texts)
        first = read_solution(t.tokenizer, t.task.fmt, t.tokenizer.encode(line.texts[0]))
        prompts.append(Prompt(ids, line.problem, solution=first))
    return numbered(prompts)


def candidate_columns(shown: list[Candidates]) -> dict[str, list]:
    """What rollouts.jsonl says of the candidates of each verification."""
    return {"turns": [[[f"solution {n}", text] for n, text in enumerate(line.texts, 1)] for line in shown],
            "right": [line.right for line in shown]}


def turned(shown: list[Candidates]) -> list[Candidates]:
    """The same pairs in the other order."""
    return [Candidates(line.problem, line.texts[::-1], 1 - line.right) for line in shown]


def forced_choices(t: Play, role: str, shown: list[Candidates]) -> tuple[Rollouts, list[tuple[int, Spot]]]:
    """Verifications of form pair that choose the right one at once, and where. Log-odds are of A against B."""
    return forced(t, role, candidate_prompts(t, "pair", shown), t.task.fmt.choices, [line.right == 0 for line in shown])


# A step of a judge

def add_candidate_args(group, least: int = 2) -> None:
    group.add_argument("--num-solutions", type=at_least(least), default=4,
                       help="that the generator samples of each problem; those judged together are chosen from them")


def add_judge_args(group, least: int = 2) -> None:
    add_candidate_args(group, least)
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=192)


def candidate_draws(args, form: str, num: int) -> dict[str, Draw]:
    """What a step samples: solutions, and a group of verifications of one set of each problem."""
    P = args.examples_per_step
    return {"judged": Draw("generator", P, args.num_solutions, args.max_new_tokens),
            "verifications": Draw("verifier", P, args.num_samples, args.verifier_max_new_tokens, trained=True,
                                  wrap=partial(empty_form_prompt, form=form, num=num),
                                  quoted=num * args.max_new_tokens)}


def judge(t: Play, form: str, num: int) -> tuple[Rollouts, list[Candidates]]:
    """This rank's share of the step's verifications, a group of each set of `num`, and the candidates of each."""
    solutions = t.solve("judged", t.problems(), t.args.num_solutions)
    shown = candidates(t, solutions, num, random.Random(f"{t.args.seed}-{t.step}-places"))
    t.log("verifier", {"num_lineups": len(shown)})
    mine = shown[t.run.rank:: t.run.world]
    rollouts = t.sample("verifications", candidate_prompts(t, form, mine))
    of_each = [mine[g] for g in rollouts.group_id.tolist()]
    rollouts.columns = candidate_columns(of_each)
    return rollouts, of_each


def read_choices(t: Play, rollouts: Rollouts, graded: bool = False) -> list[int | None]:
    """The choice that each verification ends with."""
    return [parse_choice(t.task.fmt, text, stopped, graded)
            for text, stopped in zip(rollouts.texts, rollouts.stopped.tolist(), strict=True)]


def choice_chances(t: Play, role: str, rollouts: Rollouts) -> list[float | None]:
    """How likely each verification was to choose A, and not B, where its choice stands; None without a choice."""
    tokenizer, fmt, spots = t.tokenizer, t.task.fmt, []
    for n, (tokens, choice) in enumerate(zip(rollouts.completions(), read_choices(t, rollouts), strict=True)):
        if choice is not None:
            # Marks are ASCII: as latin-1 one character is one byte.
            text = b"".join(map(tokenizer.token_bytes, tokens)).decode("latin-1")
            at = text.index(fmt.choices[choice < 0], text.rfind(fmt.final_open) + len(fmt.final_open))
            spots.append((n, spot_of(tokenizer, fmt, tokens, at, fmt.choices)))
    spots = [(n, spot) for n, spot in spots if spot is not None]
    found = dict(zip((n for n, _ in spots), chances_at(t, role, rollouts, spots), strict=True))
    return [found.get(n) for n in range(len(rollouts))]


def read_scores(t: Play, rollouts: Rollouts, num: int) -> list[list[int] | None]:
    """The scores that each verification ends with."""
    return [parse_scores(t.task.fmt, text, num, stopped)
            for text, stopped in zip(rollouts.texts, rollouts.stopped.tolist(), strict=True)]


def chose_right(choice: int | None, right: int) -> bool:
    """Whether a choice is readable and for the solution in place `right` of a pair."""
    return choice is not None and (choice > 0) == (right == 0)


def learn_to_judge(t: Play, rollouts: Rollouts, rewards: list[float]):
    """The update of the verifier by --advantage on these rewards; none where no rank has candidates."""
    log_rewards(t, "verifier", rollouts, rewards)
    if not int(t.reduce(torch.tensor(len(rollouts), device=t.device))):
        return
    advantages = t.advantages(rollouts, rewards)  # (N, T)
    yield Update("verifier", [(rollouts, advantages)])


# Held out

def held_out_candidates(t: Play, num: int, split: str) -> list[Candidates]:
    """The candidates of a test split, over all ranks. They are drawn once, as the generator does not learn."""
    kept = t.memory.setdefault("held_out", {})
    if split not in kept:
        solutions = t.solve("fixed", t.problems(t.args.eval_examples, split), t.args.num_solutions, role="generator")
        kept[split] = [[line.problem.index, line.texts, line.right] for line in candidates(t, solutions, num, None)]
    return [Candidates(t.task.problem(split, index), texts, right) for index, texts, right in kept[split]]


def warn_of_form(t: Play, form: str, parse_fail: float | None) -> None:
    """Says, once, that most verifications cannot be read, and the likely cause."""
    if parse_fail is not None and parse_fail > 0.5:
        warn_once(t, f"most verifications cannot be read: was the verifier taught this form (chat_sft --verifier-form "
                     f"{form})?")


CHOICES_TABLE = {  # of `scores_of_choices`, for a recipe's TABLE
    "ver/pair_acc_in": "pairs judged rightly, both orders",
    "ver/pair_acc_out": "the same, out of distribution",
    "ver/swap_consistent_in": "pairs of which both orders give the same solution",
    "ver/first_chosen_in": "choices of the solution that is shown first",
    "ver/parse_fail_in": "verifications without a choice",
}


def scores_of_pairs(t: Play, form: str, graded: bool = False) -> dict:
    """`scores_of_choices` of greedy verifications."""
    def written(shown: list[Candidates]) -> list[int | None]:
        rollouts = t.sample("eval", candidate_prompts(t, form, shown), 1, role="verifier", greedy=True)
        return read_choices(t, rollouts, graded)
    found = scores_of_choices(t, written)
    for name in SPLITS.values():
        warn_of_form(t, form, found[f"ver/parse_fail_{name}"])
    return found


def scores_of_choices(t: Play, choose: Callable[[list[Candidates]], list[int | None]]) -> dict:
    """`pair_scores` of `choose` on held-out pairs, <score>_in and <score>_out: each pair in both orders."""
    found = {}
    for split, name in SPLITS.items():
        mine = held_out_candidates(t, 2, split)[t.run.rank:: t.run.world]
        choices = choose(mine + turned(mine))
        rows = t.gather([[line.right, choices[i], choices[len(mine) + i]] for i, line in enumerate(mine)])
        found |= {f"ver/{key}_{name}": value for key, value in pair_scores(rows).items()}
    return found


def pair_scores(rows: list[list]) -> dict:
    """Scores of a judge of pairs. rows: the place of the right solution, the choice, the choice in the other order. An
    unreadable choice is wrong, and consistent with none. None without pairs."""
    choices = [choice for _, *both in rows for choice in both]
    return {"pair_acc": share_of([chose_right(choice, place) for right, one, two in rows
                                  for choice, place in ((one, right), (two, 1 - right))]),
            "swap_consistent": share_of([None not in (one, two) and (one > 0) != (two > 0) for _, one, two in rows]),
            "first_chosen": share_of([choice > 0 for choice in choices if choice is not None]),
            "parse_fail": share_of([choice is None for choice in choices]),
            "num_pairs": len(rows)}


# What judgments are worth to the solutions

def round_robin(group_id: list[int], num: int) -> list[list[int]]:
    """Rollouts that are shown together: each with those after it, in a ring, so that it stands in every place once."""
    return [[rows[(i + place) % len(rows)] for place in range(num)] for rows in members(group_id)
            for i in range(len(rows))]


def all_pairs(group_id: list[int]) -> list[list[int]]:
    """Every pair of each group once. A rollout is shown first in about half of its pairs."""
    return [[a, b] if (i + j) % 2 else [b, a] for rows in members(group_id)
            for (i, a), (j, b) in combinations(enumerate(rows), 2)]


def members(group_id: list[int]) -> list[list[int]]:
    """The rollouts of each group."""
    return list(grouped(group_id, range(len(group_id))).values())


Scores = list[list[float] | None]  # of verifications: what each gives to the solutions that it was shown


def scores_of_choice(t: Play, rollouts: Rollouts, num: int, graded: bool = False) -> Scores:
    """What each verification gives the two solutions of its pair: 1 and 0, graded less far from a half the less better
    the chosen one is. None where it cannot be read."""
    most = STRENGTHS[-1] if graded else 1
    return [choice and [(1 + choice / most) / 2, (1 - choice / most) / 2]
            for choice in read_choices(t, rollouts, graded)]


def shares_of_scores(t: Play, rollouts: Rollouts, num: int) -> Scores:
    """What each verification gives the solutions of its set: their shares of the highest score that there is."""
    return [scores and [score / top_score(num) for score in scores] for scores in read_scores(t, rollouts, num)]


# form -> (t, verifications, solutions of each) -> what each gives to each
GROUP_SCORES = {"pair": scores_of_choice, "graded": partial(scores_of_choice, graded=True),
                "solve_pair": scores_of_choice, "scores": shares_of_scores}


def verified_together(t: Play, role: str, solutions: Rollouts, shown: list[list[int]], form: str, num: int,
                      num_samples: int) -> tuple[Rollouts, Scores]:
    """`num_samples` verifications of each set of `num` of these solutions, and what each gives to each of them."""
    texts, problems = solutions.texts, solutions.problems()
    prompts = candidate_prompts(t, form, [Candidates(problems[rows[0]], [texts[n] for n in rows]) for rows in shown])
    rollouts = t.sample("verdicts", prompts, num_samples, role=role)
    scores = GROUP_SCORES[form](t, rollouts, num)
    warn_of_form(t, form, t.mean({"unread": [row is None for row in scores]})["unread"])
    return rollouts, scores


def mean_vote(votes: list[list[int] | None], num: int) -> list[float | None]:
    """Each of `num` solutions' mean score over the readable votes; None where there is none."""
    read = [scores for scores in votes if scores is not None]
    return [sum(column) / len(read) for column in zip(*read, strict=True)] if read else [None] * num
