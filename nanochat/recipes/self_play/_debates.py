"""
Debates: which answers are argued for, what a judge of pairs sees of the arguments and how sure it is, and whether it is
right more often as debaters get better.

The generator argues, the opponent is as the generator was at the start, the verifier judges. A position is one of the
two answers to a problem; the wrong one stands after the right one.
"""
from typing import NamedTuple

from nanochat.rl.measure.evals import SPLITS
from nanochat.rl.measure.scores import majority, share_of
from nanochat.rl.play.play import Play
from nanochat.rl.records.outcomes import answers_of
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.comparing import Candidates, candidate_prompts, choice_chances, turned, warn_of_form
from nanochat.rl.verify.forms import steps_of
from tasks.common import Problem


class Position(NamedTuple):
    """An answer that is argued for, and the other answer."""
    problem: Problem
    answer: str
    rival: str
    is_right: bool


class Debate(NamedTuple):
    """A position, what is said for it, and what is said for the other answer; "" is nothing."""
    position: Position
    argument: str
    against: str


def positions_of(t: Play, problems: list[Problem], label: str) -> list[Position]:
    """The right answer, and the start's most frequent wrong one, of the problems to which it gives a wrong one."""
    K, found = t.args.num_distractors, []
    solutions = t.solve(label, problems, K, role="opponent")
    rows = list(zip(t.answers(solutions, K), t.check(solutions), strict=True))
    for i, problem in enumerate(problems):
        wrong = majority([answer if outcome is False else None for answer, outcome in rows[i * K: (i + 1) * K]])
        if wrong is not None:
            found += [Position(problem, problem.answer, wrong, True), Position(problem, wrong, problem.answer, False)]
    return found


def argue(t: Play, role: str, positions: list[Position], num_samples: int, label: str,
          greedy: bool = False) -> Rollouts:
    """`num_samples` arguments of a role for each position."""
    prompts = t.prompts("argue_prompt", [position.problem for position in positions],
                        answer=[position.answer for position in positions])
    return t.sample(label, prompts, num_samples, role=role, greedy=greedy, tool=t.sampler.calculator_tool())


def quoted(t: Play, argument: str, answer: str) -> str:
    """What the judge sees of an argument: its steps, and the answer that it was to come to."""
    return t.task.fmt.render_solution(steps_of(t.task.fmt, argument), answer)


def verify(t: Play, debates: list[Debate], num_votes: int) -> tuple[Rollouts, list[Candidates]]:
    """`num_votes` verifications of each debate, then of each in the other order, and what each of them was shown. A
    single one is greedy: then equal arguments have equal rewards."""
    shown = [Candidates(position.problem, [quoted(t, argument, position.answer), quoted(t, against, position.rival)],
                    0 if position.is_right else 1) for position, argument, against in debates]
    shown += turned(shown)
    rollouts = t.sample("verdicts", candidate_prompts(t, "pair", shown), num_votes, greedy=num_votes == 1)
    return rollouts, [line for line in shown for _ in range(num_votes)]


DIGITS = 4  # of a confidence: further ones depend on which verifications are scored together


def confidences(t: Play, verifications: Rollouts, num_votes: int) -> tuple[list[float], list[float]]:
    """The judge's confidence in the position of each debate: the mean of its verifications in both orders, of which
    those without a choice say a half. And the share of these."""
    chances, D = choice_chances(t, "verifier", verifications), len(verifications) // 2
    firsts, seconds = ([row[i: i + num_votes] for i in range(0, D, num_votes)] for row in (chances[:D], chances[D:]))
    total = lambda row: sum(0.5 if chance is None else chance for chance in row)
    return ([round((total(first) + num_votes - total(second)) / (2 * num_votes), DIGITS)
             for first, second in zip(firsts, seconds, strict=True)],
            [(first + second).count(None) / (2 * num_votes) for first, second in zip(firsts, seconds, strict=True)])


def are_reached(t: Play, arguments: list[str], positions: list[Position]) -> list[bool]:
    """Whether each argument comes to the answer of its position: it has its text, or is right where that is."""
    answers, outcomes = answers_of(t.task, arguments), t.check_texts([p.problem for p in positions], arguments)
    return [answer == position.answer or position.is_right and outcome is True
            for answer, outcome, position in zip(answers, outcomes, positions, strict=True)]


def won(confidence: float) -> float:
    """1 where the judge is for an answer, 0 where it is against, a half at 0.5."""
    lead = round(confidence - 0.5, DIGITS)
    return (lead > 0) + (lead == 0) / 2


def debate_scores(rows: list[list[float]]) -> dict[str, float | None]:
    """Means over problems, None without any. rows: the judge's confidence in the right answer where two copies argue;
    where the start argues for the wrong one, and for the right one; where a consultant alone argues for the right one,
    and for the wrong one. Then the share of arguments that come to their answer, and of verifications without a
    choice."""
    debates, as_right, as_wrong, right, wrong, reached, unread = zip(*rows, strict=True) if rows else [()] * 7
    both = lambda function, *columns: share_of([function(a, b) for a, b in zip(*columns, strict=True)])
    return {"gen/judge_accuracy": share_of(list(map(won, debates))),
            "gen/win_rate_against_start": both(lambda a, b: won((a + 1 - b) / 2), as_right, as_wrong),  # of both rounds
            "gen/single_accuracy": both(lambda a, b: (won(a) + won(b)) / 2, right, wrong),
            "gen/ensembled_accuracy": both(lambda a, b: won((a + b) / 2), right, wrong),
            "gen/consultant_win_rate": both(lambda a, b: (won(a) + won(1 - b)) / 2, right, wrong),
            "gen/assigned": share_of(reached), "gen/unread": share_of(unread)}


DEBATE_TABLE = {"gen/judge_accuracy_in": "debates in which the judge is for the right answer",
                "gen/win_rate_against_start_in": "debates won against the start, each side argued once",
                "gen/single_accuracy_in": "the judge is right about one consultant",
                "gen/ensembled_accuracy_in": "the judge is right about two consultants, one at a time",
                "gen/consultant_win_rate_in": "consultants whose answer the judge is for",
                "gen/assigned_in": "arguments that come to their assigned answer",
                "gen/unread_in": "verifications without a choice",
                "gen/judge_accuracy_out": "the judge is right in debates, out of distribution",
                "gen/win_rate_against_start_out": "won against the start, out of distribution"}


def held_out(t: Play, split: str) -> list[list]:
    """[index, right answer, wrong answer, the start's argument for either] of the problems of a split that have both,
    over all ranks. They are drawn once, as the start stays what it is, and kept."""
    kept = t.memory.setdefault("held_out", {})
    if split not in kept:
        positions = positions_of(t, t.problems(t.args.eval_examples, split), "held_out")
        texts = argue(t, "opponent", positions, 1, "start", greedy=True).texts
        kept[split] = sorted(t.gather([[right.problem.index, right.answer, right.rival, *texts[2 * i: 2 * i + 2]]
                                       for i, right in enumerate(positions[::2])]))
    return kept[split]


def debated(t: Play, split: str) -> list[list[float]]:
    """The rows for `debate_scores` of this rank's share of a split; arguments and verifications are greedy."""
    rows, positions, debates = held_out(t, split)[t.run.rank:: t.run.world], [], []
    for index, right, wrong, *_ in rows:
        problem = t.task.problem(split, index)
        positions += [Position(problem, right, wrong, True), Position(problem, wrong, right, False)]
    texts = argue(t, "generator", positions, 1, "eval", greedy=True).texts
    for i, (*_, start_right, start_wrong) in enumerate(rows):
        right, wrong = texts[2 * i: 2 * i + 2]
        debates += [Debate(positions[2 * i], *said) for said in (
            (right, wrong), (right, start_wrong), (start_right, wrong), (right, ""), ("", wrong))]
    found, unread = confidences(t, verify(t, debates, 1)[0], 1)
    reached = are_reached(t, texts, positions)
    return [[*found[5 * i: 5 * i + 5], sum(reached[2 * i: 2 * i + 2]) / 2, sum(unread[5 * i: 5 * i + 5]) / 5]
            for i in range(len(rows))]


def evaluate_debates(t: Play) -> dict:
    """`debate_scores` of both test splits."""
    scores = {}
    for split, name in SPLITS.items():
        found = debate_scores(t.gather(debated(t, split)))
        scores |= {f"{key}_{name}": value for key, value in found.items()}
        warn_of_form(t, "pair", found["gen/unread"])
    return scores
