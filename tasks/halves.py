"""
Halves: two chains in one problem, for two agents who each write one and must follow the same convention unseen.

A problem is `3+5*2,4-1*7`. The first agent works the left chain, the second one the right chain. Both read the whole
problem, and neither sees what the other writes. A half begins with a letter, one of a few: `a3+5:8;8*2:6;=6`. `joint`
puts two halves together: `a3+5:8;8*2:6;,a4-1:3;3*7:1;=6,1`. That is right iff both results are and both letters are the
same. No letter is better than another one.

Demonstrations carry chain's misconceptions, and draw the letter at random. So two agents that were taught by them agree
by chance, half of the time with two letters. Against a partner who stays as it is no letter pays more than another: a
convention can only be found where both learn. --halves-letters 1 gives them the convention, and 0 leaves the letters
out.
"""
import argparse
import random
import re
from dataclasses import replace
from string import ascii_lowercase

from nanochat.cli import at_least
from tasks.chain import Chain
from tasks.common import Problem

MARK = ","  # between the halves of a problem, of a joint solution's steps and of its answer
HALF = re.compile("[a-z]?[^a-z=]*=([0-9])")


def add_args(parser):
    group = parser.add_argument_group("task halves (with the flags of chain, for either half; a half's answer is its "
                                      "final result)")
    group.add_argument("--halves-letters", type=at_least(0, int, len(ascii_lowercase)), default=2,
                       help="letters that a half may begin with; 0: there is none, and nothing to agree on")


class Halves:
    """The task of two halves, around a chain task of the same flags and seed."""
    name = "halves"

    def __init__(self, args, seed: int):
        self.chain = Chain(argparse.Namespace(**vars(args) | {"chain_answer": "final"}), seed)
        self.fmt = self.chain.fmt
        self.letters = list(ascii_lowercase[: args.halves_letters]) or [""]
        self.about = f"{self.chain.about}; two expressions, whose solutions begin with the same letter"

    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split: two of chain's."""
        left, right = (self.chain.problem(split, 2 * index + i) for i in range(2))
        return Problem(split, index, left.prompt + MARK + right.prompt, left.answer + MARK + right.answer)

    def joint(self, first: str, second: str) -> str:
        """The solution that two halves make. Where one holds the mark between halves, it is replaced."""
        (steps, _, result), (more, _, second_result) = (half.replace(MARK, "?").partition(self.fmt.answer_open)
                                                        for half in (first, second))
        return f"{steps}{MARK}{more}{self.fmt.answer_open}{result}{MARK}{second_result}"

    def check(self, problem: Problem, solution: str) -> bool | None:
        """The outcome of a joint solution: whether both results are right and both halves begin with one letter."""
        return self.agrees(solution) and all(self.half_outcomes(problem, solution))

    def half_outcomes(self, problem: Problem, solution: str) -> list[bool]:
        """Whether the result of each half of a joint solution is right."""
        found = [HALF.fullmatch(half) for half in self._halves(solution)]
        return [half is not None and half[1] == answer
                for half, answer in zip(found, problem.answer.split(MARK), strict=True)]

    def agrees(self, solution: str) -> bool:
        """Whether both halves of a joint solution begin with the same letter, one that they may begin with."""
        first, second = (letter for letter, _ in self._lettered(solution))
        return first == second and first in self.letters

    def step_labels(self, problem: Problem, solution: str) -> list[bool]:
        """Gold labels of a joint solution's steps."""
        return [error is None for error in self.step_errors(problem, solution)]

    def step_errors(self, problem: Problem, solution: str) -> list[str | None]:
        """What is wrong with each step, as chain says, or "convention": a half begins without its letter."""
        errors = []
        for half, (_, text), unlettered in zip(self._problems(problem), self._lettered(solution),
                                               self._unlettered(solution), strict=True):
            found = self.chain.step_errors(half, text)
            errors += [error or "convention" if k == 0 and unlettered else error for k, error in enumerate(found)]
        return errors

    def first_demo(self, problem: Problem, rng: random.Random) -> tuple[dict[str, str], str]:
        """A demonstration for the first agent, misconceptions included."""
        return {}, rng.choice(self.letters) + self.chain.solution_demo(self._problems(problem)[0], rng)

    def second_demo(self, problem: Problem, rng: random.Random) -> tuple[dict[str, str], str]:
        """The same for the second one."""
        return {}, rng.choice(self.letters) + self.chain.solution_demo(self._problems(problem)[1], rng)

    def solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """Both halves by one generator, which keeps to its letter."""
        letter = rng.choice(self.letters)
        return self.joint(*(letter + self.chain.solution_demo(half, rng) for half in self._problems(problem)))

    def corrupted_solution(self, problem: Problem, rng: random.Random) -> str:
        """Chain's of each half, right or wrong; in one of ten the second half draws a letter of its own."""
        first, second = self._problems(problem)
        letter = rng.choice(self.letters)
        other = rng.choice(self.letters) if rng.random() < 0.1 else letter
        return self.joint(letter + self.chain.corrupted_solution(first, rng),
                          other + self.chain.corrupted_solution(second, rng))

    def verification_demo(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A demonstration for the verifier: chain's of each half, and the letters are judged with the first steps."""
        steps, verdicts = [], [self.agrees(solution)]
        for half, (_, text), unlettered in zip(self._problems(problem), self._lettered(solution),
                                               self._unlettered(solution), strict=True):
            verification = self.chain.verification_demo(half, text, rng)
            found = self.fmt.judgment_steps(verification)
            if found and unlettered:
                found[0] = found[0][: -len(self.fmt.correct)] + self.fmt.incorrect  # the marks are as long
            steps += found
            verdicts.append(verification.endswith(self.fmt.correct))
        return self.fmt.render_judgment(steps, self.fmt.correct if all(verdicts) else self.fmt.incorrect)

    # The halves of a text

    def _problems(self, problem: Problem) -> list[Problem]:
        prompts, answers = problem.prompt.split(MARK), problem.answer.split(MARK)
        return [replace(problem, prompt=p, answer=a) for p, a in zip(prompts, answers, strict=True)]

    def _halves(self, solution: str) -> list[str]:
        """The two halves of any text, each with its result."""
        steps, _, answer = solution.partition(self.fmt.answer_open)
        (first, _, second), (result, _, second_result) = steps.partition(MARK), answer.partition(MARK)
        return [first + self.fmt.answer_open + result, second + self.fmt.answer_open + second_result]

    def _lettered(self, solution: str) -> list[tuple[str, str]]:
        """(letter, the half without it) of each half; "" where it begins with none."""
        return [(half[:1], half[1:]) if half[:1] in {*ascii_lowercase} else ("", half)
                for half in self._halves(solution)]

    def _unlettered(self, solution: str) -> list[bool]:
        """Whether each half lacks its letter: one of those that there are, and for the second half the first one's."""
        first, second = (letter for letter, _ in self._lettered(solution))
        return [first not in self.letters, second not in self.letters or second != first]
