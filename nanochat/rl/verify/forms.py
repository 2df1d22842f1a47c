"""
The forms of a verification: one solution judged step by step, two of which one is chosen, several that are scored. A
verifier is taught one of them by SFT; what its demonstrations say follows from those for one solution, so that it has
the same misconceptions.

    steps       RL Tango: a verdict on each step and on the whole
    pair        Think-RM, binary: the steps of both solutions judged at length, then a choice
    graded      Think-RM, graded: the same, and how much better the chosen one is, from 1 to 3
    solve_pair  RM-R1: the judge works the problem itself, says where each departs from that, then chooses
    scores      SPCT: principles, a critique of each solution by them, a score of each

These are miniatures. A long chain of thought is here each step worked again, a rubric or a principle the name of what
will be checked, and graded preferences count wrong steps where the papers' are people's.
"""
import random
from collections.abc import Callable
from functools import partial
from string import ascii_uppercase
from typing import NamedTuple

from nanochat.common import BadInput
from nanochat.rl.records.outcomes import outcomes_of
from nanochat.rl.records.prompts import (STRENGTHS, TOP_SCORE, Verification, choice_text, empty_verifier_prompt,
                                         parse_verification, several_prompt, verifier_prompt)
from tasks.common import Problem, demo_of


DRAWS = 32  # of a corrupted solution, until one has the outcome that is wanted
MOST_SOLUTIONS = len(ascii_uppercase)


# Demonstrations: (task, problem, solutions, rng) -> text

def steps_demo(task, problem: Problem, solutions: list[str], rng: random.Random) -> str:
    """A verification of one solution."""
    return demo_of(task, "verification_demo", problem, solutions[0], rng)


def worked_again(task, problem: Problem, solutions: list[str],
                 rng: random.Random) -> tuple[list[str], list[Verification]]:
    """What the task's demonstrations write about each step of solutions, verdict included, below their letters; and
    these verifications."""
    demos = [demo_of(task, "verification_demo", problem, solution, rng) for solution in solutions]
    texts = [text for name, demo in zip(ascii_uppercase, demos, strict=False)
             for text in (name, *task.fmt.judgment_steps(demo))]
    return texts, [parse_verification(task.fmt, demo, len(task.fmt.step_spans(solution)))
                   for demo, solution in zip(demos, solutions, strict=True)]


def num_wrong(verdicts: list[bool | None]) -> int:
    """How many steps are judged wrong."""
    return verdicts.count(False)


def strength(wrong_in_better: int, wrong_in_worse: int) -> int:
    """How much better a solution is, from the numbers of their wrong steps: the difference, from 1 to 3."""
    return min(max(wrong_in_worse - wrong_in_better, STRENGTHS[0]), STRENGTHS[-1])


def preferred(first: Verification, second: Verification, rng: random.Random) -> int:
    """A choice as `parse_choice` gives it, graded: by the final verdicts, then by the wrong steps, then by chance."""
    a, b = num_wrong(first.step_verdicts), num_wrong(second.step_verdicts)
    lead = (first.verdict is True) - (second.verdict is True) or b - a or rng.choice([1, -1])
    return strength(a, b) if lead > 0 else -strength(b, a)


def pair_demo(task, problem: Problem, solutions: list[str], rng: random.Random, graded: bool = False) -> str:
    """The steps of both worked again, then the choice: COMPACT: "A;3+5:8T;B;3+5:8F;=A"."""
    texts, verifications = worked_again(task, problem, solutions, rng)
    return task.fmt.render_judgment(texts, choice_text(task.fmt, preferred(*verifications, rng), graded))


def steps_of(fmt, solution: str) -> list[str]:
    """The step bodies of a solution."""
    return [fmt.step_body(solution[start:end]) for start, end in fmt.step_spans(solution)]


def compared(fmt, solution: str, own: str) -> tuple[bool, int, str]:
    """A solution beside the judge's own one: whether they have the same answer, how many steps they have in common from
    the first on, and what is to be said: the answer that both have, else where the solution departs, with a verdict."""
    steps, answer = steps_of(fmt, solution), fmt.answer(solution)
    same = [a == b for a, b in zip(steps, steps_of(fmt, own), strict=False)]
    num_common = (same + [False]).index(False)
    is_same = answer == fmt.answer(own)
    departs = "" if is_same else "".join(steps[num_common: num_common + 1])
    return is_same, num_common, fmt.quote(departs or answer or "") + (fmt.correct if is_same else fmt.incorrect)


def solve_pair_demo(task, problem: Problem, solutions: list[str], rng: random.Random) -> str:
    """The problem worked by what the verifier believes, both solutions beside that, then the choice: the one with the
    same answer, else the one that departs later, else by chance. COMPACT: "3+5:8;8*2:6;6T;8*2:5F;=A"."""
    fmt, own = task.fmt, demo_of(task, "verifier_solution_demo", problem, rng)
    (same_a, common_a, text_a), (same_b, common_b, text_b) = (compared(fmt, solution, own) for solution in solutions)
    choice = same_a - same_b or common_a - common_b or rng.choice([1, -1])
    return fmt.render_judgment([*steps_of(fmt, own), text_a, text_b], choice_text(fmt, choice))


def scores_demo(task, problem: Problem, solutions: list[str], rng: random.Random) -> str:
    """The task's principles, the steps of each solution worked again, and a score of each: COMPACT:
    "+*;A;3+5:8T;8*2:6T;B;3+5:8T;8*2:5F;=10,4"."""
    texts, verifications = worked_again(task, problem, solutions, rng)
    scores = [believed_score(verification, len(solutions)) for verification in verifications]
    return task.fmt.render_judgment([demo_of(task, "principles_demo", problem), *texts], task.fmt.render_scores(scores))


def believed_score(verification: Verification, num_solutions: int) -> int:
    """The score that a verification comes to: the highest where its final verdict is right, else below it by the share
    of the steps that are wrong; a single solution has 1 or 0."""
    right, said = verification.verdict is True, verification.step_verdicts
    if num_solutions == 1:
        return int(right)
    return TOP_SCORE if right else (TOP_SCORE - 1) * (len(said) - num_wrong(said)) // max(1, len(said))


class Form(NamedTuple):
    """num: solutions that it judges together, 0: as many as one likes; demo: see above; template: of the prompt, a
    field of the format; needs: a method of the task that the demonstrations need, or ""."""
    num: int
    demo: Callable
    template: str
    needs: str = ""


FORMS = {
    "steps": Form(1, steps_demo, "verifier_prompt"),
    "pair": Form(2, pair_demo, "pair_prompt"),
    "graded": Form(2, partial(pair_demo, graded=True), "graded_prompt"),
    "solve_pair": Form(2, solve_pair_demo, "solve_pair_prompt", "verifier_solution_demo"),
    "scores": Form(0, scores_demo, "scores_prompt", "principles_demo"),
}


def form_prompt(tokenizer, fmt, form: str, problem: str, solutions: list[str]) -> list[int]:
    """Token ids of the verifier's prompt for solutions judged in this form."""
    if form == "steps":
        return verifier_prompt(tokenizer, fmt, problem, solutions[0])
    return several_prompt(tokenizer, fmt, FORMS[form].template, problem, solutions)


def empty_form_prompt(tokenizer, fmt, problem: str, form: str, num: int) -> list[int]:
    """The same prompt but for the `num` solutions that it quotes."""
    return form_prompt(tokenizer, fmt, form, problem, [""] * num)


def form_of(wrap: Callable) -> str:
    """The form that a draw's prompts (`Draw.wrap`) ask for; "" where they ask for no verification."""
    if wrap is empty_verifier_prompt:
        return "steps"
    return wrap.keywords["form"] if isinstance(wrap, partial) and wrap.func is empty_form_prompt else ""


def check_form(task, form: str, num: int) -> None:
    """Raises BadInput where a task cannot demonstrate a form, or for a number of solutions that nothing can judge."""
    if FORMS[form].needs and not hasattr(task, FORMS[form].needs):
        raise BadInput(f"--verifier-form {form}: task {task.name} has no {FORMS[form].needs}")
    if not 1 <= num <= MOST_SOLUTIONS:
        raise BadInput(f"--num-judged {num}: must be from 1 to {MOST_SOLUTIONS}")


def judged_together(task, problem: Problem, solution: str, num: int, rng: random.Random) -> list[str]:
    """`num` solutions of a problem in random order, if it can be had one right and the others wrong: the one that is
    given, and corrupted ones. With num 1 the given one, and nothing is drawn."""
    if num == 1:
        return [solution]
    is_right = lambda text: outcomes_of(task, [problem], [text])[0] is True
    wanted = [False] * (num - 1) if is_right(solution) else [True] + [False] * (num - 2)
    solutions = [solution]
    for outcome in wanted:
        drawn = (demo_of(task, "corrupted_solution", problem, rng) for _ in range(DRAWS))
        solutions.append(next((text for text in drawn if is_right(text) is outcome), solution))
    return rng.sample(solutions, num)


def one_bare(fmt, solutions: list[str], rng: random.Random) -> list[str]:
    """The solutions, of which one is left with its answer alone: nobody argues for it."""
    bare = rng.randrange(len(solutions))
    return [fmt.render_solution([], fmt.answer(text) or "") if n == bare else text for n, text in enumerate(solutions)]
