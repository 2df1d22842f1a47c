"""
Judges: a verifier's ways to say how likely each reasoning step, and a whole solution, is right.

Those that read log-odds (verify.log_odds) are given the solution as the verifier's own completion after the
generator's prompt. The others are asked by the verifier's prompt, which quotes it, some beside other solutions of its
group. N solutions, T tokens, K steps.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.rl.measure.scores import share_of
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.records.prompts import Verification, empty_verifier_prompt, solve_prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.comparing import (GROUP_SCORES, Candidates, forced_choices, round_robin, turned,
                                          verified_together)
from nanochat.rl.verify.forms import FORMS, MOST_SOLUTIONS, empty_form_prompt
from nanochat.rl.verify.log_odds import end_read, ended, log_odds, steps_read
from nanochat.rl.verify.spots import chances_at, forced_verdicts, written_chances


@dataclass
class Judgment:
    """What a judge says of a solution. Reading the solution costs all judges alike and is not counted."""
    steps: list[float] | None  # the chance that each reasoning step is right, None where nothing is said of steps
    final: float | None        # that the solution is
    tokens: float  # sampled for it, and one for each log-odds; shared by solutions that are judged together
    texts: list[str] = field(default_factory=list, compare=False)  # the verifications of `generative`


AGGREGATES = {"product": math.prod, "min": min, "last": lambda chances: chances[-1]}


# Judges: (t, role, solutions) -> a Judgment of each

def generative(t: Play, role: str, solutions: Rollouts) -> list[Judgment]:
    """Shares of k sampled verifications (--verifications), of the readable ones, that call a step, or all, right."""
    k = t.args.verifications
    rollouts = t.verify("verdicts", solutions, k, role=role)
    said, lengths = t.read_verifications(rollouts), rollouts.lengths.tolist()
    return [shares(said[i: i + k], sum(lengths[i: i + k])) for i in range(0, len(said), k)]


def shares(verifications: list[Verification], tokens: int) -> Judgment:
    """The judgment of several verifications of a solution."""
    steps = [v.usable_steps for v in verifications if v.usable_steps is not None]
    finals = [v.verdict for v in verifications if v.verdict is not None]
    return Judgment([sum(column) / len(steps) for column in zip(*steps, strict=True)] if steps else None,
                    share_of(finals), tokens, [v.text for v in verifications])


def read_by_log_odds(t: Play, role: str, solutions: Rollouts) -> tuple[Rollouts, list[list[float]], list[float]]:
    """The solutions as the role's own completions, and V = sigma(s) after each of their steps and at the end."""
    prompts = [solve_prompt(t.tokenizer, t.task.fmt, problem) for problem in solutions.problems()]
    own = ended(t, role, prompts, solutions)
    chances = torch.sigmoid(log_odds(t, role, own))  # (N, T)
    return own, steps_read(own, t.read_solutions(own), chances), end_read(own, chances).tolist()


def judge_end(t: Play, role: str, solutions: Rollouts) -> list[Judgment]:
    """An outcome model: the log-odds at the end."""
    _, _, finals = read_by_log_odds(t, role, solutions)
    return [Judgment(None, final, 1) for final in finals]


def judge_steps(t: Play, role: str, solutions: Rollouts) -> list[Judgment]:
    """A step model: the log-odds after each step, of which --prm-aggregate makes the solution's, if there are any."""
    _, steps, _ = read_by_log_odds(t, role, solutions)
    return [Judgment(row, AGGREGATES[t.args.prm_aggregate](row) if row else None, len(row)) for row in steps]


def judge_tokens(t: Play, role: str, solutions: Rollouts) -> list[Judgment]:
    """An outcome model at every token (Cobbe et al. 2021), read after steps and at the end."""
    own, steps, finals = read_by_log_odds(t, role, solutions)
    return list(map(Judgment, steps, finals, own.lengths.tolist()))


def judge_verdict(t: Play, role: str, solutions: Rollouts) -> list[Judgment]:
    """GenRM (Zhang et al. 2024): p(T) / (p(T) + p(F)) of the final verdict, asked for at once, without an analysis."""
    rollouts, spots = forced_verdicts(t, role, solutions, [True] * len(solutions))
    return [Judgment(None, chance, 1) for chance in chances_at(t, role, rollouts, spots)]


def analysed(t: Play, role: str, solutions: Rollouts) -> list[Judgment]:
    """GenPRM, GenRM-CoT: p(T) / (p(T) + p(F)) at the place of each verdict in k sampled verifications, the mean over
    them. A verdict that is not there counts .5 (as in GenPRM's code)."""
    k = t.args.verifications
    rollouts = t.verify("verdicts", solutions, k, role=role)
    lengths, chances = rollouts.lengths.tolist(), written_chances(t, role, rollouts)
    said = [[0.5 if chance is None else chance for chance in row] for row in chances]  # (N k, K + 1)
    means = [[sum(column) / k for column in zip(*said[i: i + k], strict=True)] for i in range(0, len(said), k)]
    return [Judgment(row[:-1], row[-1], sum(lengths[n * k: n * k + k])) for n, row in enumerate(means)]


def preferred(t: Play, role: str, solutions: Rollouts) -> list[Judgment]:
    """GRAM (Wang et al. 2025): the chance that a solution is chosen over the present generator's greedy one, the mean
    of both orders. What the greedy one costs counts for the first solution of its problem."""
    problems, N = solutions.problems(), len(solutions)
    distinct = list(dict.fromkeys(problems))
    greedy = t.solve("reference", distinct, greedy=True)
    references, lengths = dict(zip(distinct, greedy.texts, strict=True)), greedy.lengths.tolist()
    pairs = [Candidates(p, [text, references[p]], 0) for p, text in zip(problems, solutions.texts, strict=True)]
    chances = chances_at(t, role, *forced_choices(t, role, pairs + turned(pairs)))
    costs = dict(zip((problems.index(p) for p in distinct), lengths, strict=True))
    return [Judgment(None, (chances[n] + 1 - chances[N + n]) / 2, 2 + costs.get(n, 0)) for n in range(N)]


def together(t: Play, role: str, solutions: Rollouts, form: str) -> list[Judgment]:
    """RM-R1, Think-RM, SPCT: each solution of a group beside those after it (`round_robin`), k times. Its chance is its
    mean share of duels won, or of the highest score. A duel of equal texts is a draw, for which nobody is asked."""
    k, num, texts = t.args.verifications, num_together(t.args, form), solutions.texts
    shares, tokens = [[] for _ in texts], [0.0 for _ in texts]
    is_draw = lambda rows: FORMS[form].num == 2 and texts[rows[0]] == texts[rows[1]]
    shown = round_robin(solutions.group_id.tolist(), num)
    asked = [rows for rows in shown if not is_draw(rows)]
    rollouts, scores = verified_together(t, role, solutions, asked, form, num, k)
    for i, (row, length) in enumerate(zip(scores, rollouts.lengths.tolist(), strict=True)):
        for n, score in zip(asked[i // k], row or [None] * num, strict=True):
            shares[n] += [] if score is None else [score]
            tokens[n] += length / num
    for n in (n for rows in shown if is_draw(rows) for n in rows):
        shares[n] += [0.5] * k
    return [Judgment(None, share_of(row), spent) for row, spent in zip(shares, tokens, strict=True)]


def num_together(args, form: str) -> int:
    """How many solutions a judge of this form is shown."""
    return FORMS[form].num or args.num_judged


JUDGES: dict[str, Callable] = {
    "generative": generative, "steps": judge_steps, "end": judge_end, "tokens": judge_tokens, "verdict": judge_verdict,
    "analysed": analysed, "preferred": preferred, **{form: partial(together, form=form) for form in GROUP_SCORES}}
USED_BY = {"verifications": ("generative", "analysed", *GROUP_SCORES), "prm_aggregate": ("steps",),
           "num_judged": ("scores",)}
OF_THE_WHOLE = ("end", "verdict", "preferred", *GROUP_SCORES)  # judges that say nothing of steps
VERDICT_TOKENS = 32  # of a verdict alone, at most


# What a step gives each judge: (args, problems, solutions of each, times in a run; None as in Draw)

def quoting(args, form: str) -> dict:
    """The fields of a draw whose prompts ask for this form of verification."""
    num = num_together(args, form)
    wrap = empty_verifier_prompt if form == "steps" else partial(empty_form_prompt, form=form, num=num)
    return {"wrap": wrap, "quoted": num * args.max_new_tokens}


def log_odds_draw(args, num_problems: int, num_samples: int, times: int | None) -> Draw:
    return Draw("verifier", num_problems, num_samples, args.max_new_tokens + 1, times, teacher_forced=True, scored=2)


def written_draw(args, num_problems: int, num_samples: int, times: int | None, form: str = "steps",
                 scored: int = 0) -> Draw:
    return Draw("verifier", num_problems * num_samples, args.verifications, args.verifier_max_new_tokens, times,
                scored=scored, **quoting(args, form))


def verdict_draw(args, num_problems: int, num_samples: int, times: int | None, form: str = "steps",
                 orders: int = 1) -> Draw:
    return Draw("verifier", orders * num_problems * num_samples, 1, VERDICT_TOKENS, times, teacher_forced=True,
                scored=2, **quoting(args, form))


JUDGE_DRAWS = {"generative": written_draw, "steps": log_odds_draw, "end": log_odds_draw, "tokens": log_odds_draw,
               "verdict": verdict_draw, "analysed": partial(written_draw, scored=2),
               "preferred": partial(verdict_draw, form="pair", orders=2),
               **{form: partial(written_draw, form=form) for form in GROUP_SCORES}}


def judge_draws(args, judge: str, num_problems: int, num_samples: int, times: int | None = None) -> dict[str, Draw]:
    """What a judge is asked, and what it has the generator sample beside the solutions."""
    asked = {"verdicts": JUDGE_DRAWS[judge](args, num_problems, num_samples, times)}
    reference = {"reference": Draw("generator", num_problems, 1, args.max_new_tokens, times)}
    return asked | reference if judge == "preferred" else asked


def add_judge_args(group) -> None:
    group.add_argument("--verifications", type=at_least(1), default=1, help="of a solution, for judges that write them")
    group.add_argument("--prm-aggregate", default="min", choices=list(AGGREGATES),
                       help="what the steps' chances make of a solution's")


def add_together_args(group) -> None:
    group.add_argument("--num-judged", type=at_least(1, int, MOST_SOLUTIONS), default=2,
                       help="judge scores: solutions that are scored together")


def check_together_args(args) -> None:
    """Raises BadInput for a flag that the judge does not use, and for fewer solutions than it judges together."""
    for name in sorted(USED_BY.keys() & getattr(args, "explicit", set())):
        if args.judge not in USED_BY[name]:
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: the judge {args.judge} has no use for "
                           f"it; {' and '.join(USED_BY[name])} have")
    if args.judge not in GROUP_SCORES:
        return
    for name in ("num_samples", "judged_samples"):
        if getattr(args, name) < (num := num_together(args, args.judge)):
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: the judge {args.judge} is shown {num} "
                           f"solutions of a problem together")
