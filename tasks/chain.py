"""
Chained modular arithmetic with misconceptions: the default task.

A problem is `3+5*2`, worked from left to right modulo m, one operation per step: `3+5:8;8*2:6;=6` (m = 10). A step is
right iff it copies its operands and its own operation is right, also after an earlier error, so gold step labels are
local and free.

Demonstrations carry misconceptions: a fixed random share of the facts (a, op, b) is shown with one fixed wrong result
most of the time, and the chain is carried on from there. The generator's and the verifier's misconceptions are drawn
independently. A model trained on them starts RL like a pretrained one: fluent, right on most facts, confidently wrong
on some, with the right result alive among its samples. With --chain-common-share 1 all misconceptions of the verifier
are among the generator's, with the same wrong results. Those that only the generator has it is still taught rightly.
"""
import itertools
import math
import random
import re
from dataclasses import replace

from nanochat.cli import SHARE, at_least
from nanochat.common import BadInput
from tasks.common import Problem, check_range, draw_prompt, in_split, split_stream
from tasks.formats import COMPACT

OPS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
# Tiny models do not generalise to positions they never saw: this share of the demonstrations has test_out's lengths,
# which RL never trains on.
LONGER_SHARE = 0.1
MOST_STEPS = 1000  # of a problem, before its test_out
STEP = re.compile("([0-9])([-+*])([0-9]):([0-9])")
EXPRESSION = re.compile("[0-9]([-+*][0-9])*")
SPOILED_SHARE = 0.2  # of the demonstrations that propose a problem: what they propose is refused


def misconceptions(seed: int, share: float, modulus: int) -> dict[tuple[int, str, int], int]:
    """A random `share` of all facts (a, op, b), each with one fixed wrong result."""
    rng = random.Random(f"misconceptions-{seed}")
    facts = [(a, op, b) for a in range(modulus) for op in OPS for b in range(modulus)]
    chosen = rng.sample(facts, round(share * len(facts)))
    return {(a, op, b): (OPS[op](a, b) + rng.randrange(1, modulus)) % modulus for a, op, b in chosen}


def in_common(own: dict, others: dict, share: float, seed: int) -> dict:
    """Misconceptions of which a random `share` is another one's, wrong results included. As many as before."""
    taken = random.Random(f"in-common-{seed}").sample(list(others), round(share * len(own)))
    kept = [fact for fact in own if fact not in taken][: len(own) - len(taken)]
    return {fact: others[fact] for fact in taken} | {fact: own[fact] for fact in kept}


def add_args(parser):
    group = parser.add_argument_group("task chain")
    group.add_argument("--chain-modulus", type=at_least(2, int, 10), default=10,
                       help="results are taken modulo this, so they are single digits")
    group.add_argument("--chain-min-steps", type=int, default=2, help="operations of the shortest problem")
    group.add_argument("--chain-max-steps", type=int, default=8,
                       help="operations of the longest problem in RL; test_out has 1 and 2 more")
    group.add_argument("--chain-answer", choices=["final", "all"], default="all",
                       help="what the answer states: the final result only "
                            "(a wrong chain can be right by luck) or all results")
    group.add_argument("--chain-share", type=SHARE, default=0.35,
                       help="share of the facts the generator is taught wrongly")
    group.add_argument("--chain-wrongness", type=SHARE, default=0.75,
                       help="how often a demonstration shows such a fact wrongly")
    group.add_argument("--chain-verifier-share", type=SHARE, default=0.35,
                       help="the same for the verifier's own misconceptions")
    group.add_argument("--chain-verifier-wrongness", type=SHARE, default=0.65,
                       help="the same for the verifier's own misconceptions")
    group.add_argument("--chain-common-share", type=SHARE, default=0.0,
                       help="share of the verifier's misconceptions that are the generator's, wrong results included")


class Chain:
    """The chain task. Its problems and misconceptions are a function of `seed` and the flags."""
    name = "chain"
    fmt = COMPACT
    refusals = ("no_problem", "with_answer", "too_short", "too_long", "held_out")  # of a proposed problem
    principles = ("operands", "results", "complete")  # of a solution: see `violations`

    def __init__(self, args, seed: int):
        self.seed, self.modulus, self.answer_kind = seed, args.chain_modulus, args.chain_answer
        self.lengths = check_range(args, "chain_min_steps", "chain_max_steps", 1, MOST_STEPS)
        self.wrongness, self.verifier_wrongness = args.chain_wrongness, args.chain_verifier_wrongness
        said = "all results" if self.answer_kind == "all" else "the last result"
        self.about = (f"an expression is worked from left to right, modulo {self.modulus}, one operation per step "
                      f"(a-b:c is a step); the answer is {said}")
        self.misconceptions = misconceptions(2 * seed, args.chain_share, self.modulus)
        self.verifier_misconceptions = misconceptions(2 * seed + 1, args.chain_verifier_share, self.modulus)
        if round(args.chain_common_share * len(self.verifier_misconceptions)) > len(self.misconceptions):
            raise BadInput(f"--chain-common-share {args.chain_common_share}: with --chain-verifier-share "
                           f"{args.chain_verifier_share} that is more than the generator has, --chain-share "
                           f"{args.chain_share}")
        self.verifier_misconceptions = in_common(self.verifier_misconceptions, self.misconceptions,
                                                 args.chain_common_share, seed)

    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split; the splits are endless and share no problem text."""
        rng = split_stream(self.seed, split, index)
        longer = split == "test_out" or split == "sft" and rng.random() < LONGER_SHARE
        low, high = (self.lengths[1] + 1, self.lengths[1] + 2) if longer else self.lengths
        num_steps = rng.randint(low, high)
        prompt = draw_prompt(lambda: self._expression(num_steps, rng), split)
        return Problem(split, index, prompt, self._answer(self._solve(prompt, {}, 0.0, rng)))

    def hint_of(self, problem: Problem) -> str:
        """What a proposer is shown of a reference problem."""
        return problem.prompt

    def read_problem(self, text: str, index: int) -> tuple[Problem | None, str]:
        """A proposed problem as problem `index` of split "proposed", its gold answer worked out; or None, and which of
        `refusals` is the reason. Total: any text gives one of the two. It must be an expression and nothing else, as
        long as those of RL, and not of a test split's texts."""
        expression = re.split("[=:;]", text, maxsplit=1)[0]  # what stands before anything of a solution
        is_one = EXPRESSION.fullmatch(expression) and all(int(digit) < self.modulus for digit in expression[::2])
        num_steps = len(self._operations(expression))
        wrong = (not is_one, expression != text, num_steps < self.lengths[0], num_steps > self.lengths[1],
                 in_split(text, "test_in"))
        if True in wrong:
            return None, Chain.refusals[wrong.index(True)]
        return Problem("proposed", index, text, self._answer(self._solve(text, {}, 0.0, random.Random(0)))), ""

    def check(self, problem: Problem, solution: str) -> bool | None:
        """The outcome: whether the solution's answer equals the gold answer."""
        return self.fmt.answer(solution) == problem.answer

    def step_labels(self, problem: Problem, solution: str) -> list[bool]:
        """Gold labels of the steps of any text."""
        return [error is None for error in self.step_errors(problem, solution)]

    def step_errors(self, problem: Problem, solution: str) -> list[str | None]:
        """What is wrong with each step: "operands" (not its own, or it is no step at all), "result" or None."""
        return ["operands" if fact is None else None if self._result(*fact[:3]) == fact[3] else "result"
                for fact in self._facts(problem.prompt, solution)]

    def violations(self, problem: Problem, solution: str) -> list[str]:
        """The principles that a solution breaks: each step copies its operands, each result follows from them, and no
        step is skipped."""
        errors = self.step_errors(problem, solution)
        broken = "operands" in errors, "result" in errors, len(errors) < len(self._operations(problem.prompt))
        return list(itertools.compress(self.principles, broken))

    def principle_of(self, analysis: str) -> str:
        """Which principle a step breaks that a verification calls wrong with this analysis."""
        return "operands" if analysis.startswith("?") else "results"

    def solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """A demonstration for the generator, misconceptions included."""
        return self._render(problem.prompt, self._solve(problem.prompt, self.misconceptions, self.wrongness, rng))

    def corrupted_solution(self, problem: Problem, rng: random.Random) -> str:
        """A right solution in which a step's result may be wrong and is carried on; over half of all stay right."""
        operations = self._operations(problem.prompt)
        rate = rng.choice([0.0, min(1.0, 1.5 / len(operations))])
        value, results = int(problem.prompt[0]), []
        for op, b in operations:
            value = self._result(value, op, b)
            if rng.random() < rate:
                value = (value + rng.randrange(1, self.modulus)) % self.modulus
            results.append(value)
        return self._render(problem.prompt, results)

    def corrupt(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A wrong version of a solution: the result of one step is changed, and what comes after it is worked on from
        there, so that the answer may come out right again. Where steps are missing or unreadable the last digit of the
        text is changed."""
        operations = self._operations(problem.prompt)
        results = self._stated_results(solution)
        other = lambda result: (result + rng.randrange(1, self.modulus)) % self.modulus
        if len(results) != len(operations) or None in results:
            return re.sub("[0-9](?=[^0-9]*$)", lambda digit: str(other(int(digit[0]))), solution)
        changed = rng.randrange(len(results))
        worked = [*results[:changed], other(results[changed])]
        for op, b in operations[changed + 1:]:
            worked.append(self._result(worked[-1], op, b))
        return self._render(problem.prompt, worked)

    def variants(self, problem: Problem, rng: random.Random) -> Problem:
        """A problem near this one, under its split and index: one digit or operation is another one."""
        prompt, i = problem.prompt, rng.randrange(len(problem.prompt))
        others = OPS if prompt[i] in OPS else map(str, range(self.modulus))
        varied = prompt[:i] + rng.choice([other for other in others if other != prompt[i]]) + prompt[i + 1:]
        return replace(problem, prompt=varied, answer=self._answer(self._solve(varied, {}, 0.0, rng)))

    def relabelled(self, problem: Problem, solution: str, rng: random.Random) -> tuple[Problem, str]:
        """The same problem and solution about other numbers: all but the right operands of * are multiplied by one unit
        modulo m. As u(a + b) = ua + ub and u(ab) = (ua)b, each step and the answer of any text are as right as before.
        Every fact is another one, unless what is multiplied stays as it is (for m = 10: 0 and 5)."""
        units = [u for u in range(1, self.modulus) if math.gcd(u, self.modulus) == 1]
        unit = rng.choice(units[1:] or units)
        digits = {str(a): str(unit * a % self.modulus) for a in range(self.modulus)}
        prompt, text = (re.sub("(?<![*])[0-9]", lambda digit: digits.get(digit[0], digit[0]), written)
                        for written in (problem.prompt, solution))
        answer = self._answer(self._solve(prompt, {}, 0.0, rng))
        return replace(problem, prompt=prompt, answer=answer), text

    def argue_demo(self, problem: Problem, rng: random.Random) -> tuple[dict[str, str], str]:
        """A solution that comes to an answer that was given, right or wrong, and that answer."""
        solution = self.corrupted_solution(problem, rng)
        return {"answer": self.fmt.answer(solution) or ""}, solution

    def propose_demo(self, problem: Problem, rng: random.Random) -> tuple[dict[str, str], str]:
        """A new problem after a reference problem. A share of them is to be refused."""
        low, high = self.lengths
        spoiled = rng.choice(("too_long", "no_problem", "with_answer")) if rng.random() < SPOILED_SHARE else ""
        num_steps = high + 1 if spoiled == "too_long" else rng.randint(low, high)
        text = draw_prompt(lambda: self._expression(num_steps, rng), "sft")
        if spoiled == "no_problem":
            text = text[:-1]
        elif spoiled == "with_answer":
            text += self.fmt.answer_open + self._answer(self._solve(text, {}, 0.0, rng))
        return {"hint": self.hint_of(problem)}, text

    def revise_demo(self, problem: Problem, rng: random.Random) -> tuple[dict[str, str], str]:
        """A solution; the number of the step where it first breaks a principle by what the verifier believes, "" where
        it does not; and its revision, worked from there on by what the verifier believes."""
        solution, principle = self._flawed(problem, rng), rng.choice(self.principles)
        facts, beliefs = self._facts(problem.prompt, solution), (self.verifier_misconceptions, self.verifier_wrongness)
        broken = ["operands" if fact is None else
                  "" if self._believed(*fact[:3], *beliefs, rng) == fact[3] else "results" for fact in facts]
        broken += ["complete"] * (len(facts) < len(self._operations(problem.prompt)))
        if principle not in broken:
            return {"solution": solution, "critique": ""}, solution
        k = broken.index(principle)
        steps = self.fmt.step_bodies(solution)[:k]
        results = [int(step[-1]) for step in steps]  # a flawed step ends in a result too
        rest = f"{results[-1] if steps else problem.prompt[0]}{problem.prompt[1 + 2 * k:]}"
        worked = self._solve(rest, *beliefs, rng)
        revised = self.fmt.render_solution(steps + self._steps(rest, worked), self._answer(results + worked))
        return {"solution": solution, "critique": str(k + 1)}, revised

    def verification_demo(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A demonstration for the verifier: each step worked again and judged by the verifier's own beliefs."""
        analyses, verdicts = [], []
        for fact in self._facts(problem.prompt, solution):
            if fact is None:
                analyses.append("?")
                verdicts.append(False)
                continue
            a, op, b, result = fact
            believed = self._believed(a, op, b, self.verifier_misconceptions, self.verifier_wrongness, rng)
            analyses.append(f"{a}{op}{b}:{believed}")
            verdicts.append(believed == result)
        results = self._stated_results(solution)
        complete = len(results) == len(self._operations(problem.prompt)) and None not in results
        verdict = complete and all(verdicts) and self.fmt.answer(solution) == self._answer(results)
        return self.fmt.render_verification(analyses, verdicts, verdict)

    def verifier_solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """A solution by what the verifier believes, for a judge that works the problem itself."""
        return self._render(problem.prompt, self._solve(problem.prompt, self.verifier_misconceptions,
                                                        self.verifier_wrongness, rng))

    def principles_demo(self, problem: Problem) -> str:
        """What to check in a solution, in place of principles: the operations that the problem has, each once."""
        return "".join(dict.fromkeys(re.findall("[-+*]", problem.prompt)))

    def analysis_labels(self, problem: Problem, solution: str, analyses: list[str]) -> list[bool]:
        """Whether what a verification says of each step is right: the step worked again without an error ("3+5:8"), or
        "?" of one that does not copy its operands."""
        truths = ["?" if fact is None else f"{fact[0]}{fact[1]}{fact[2]}:{self._result(*fact[:3])}"
                  for fact in self._facts(problem.prompt, solution)]
        return [said == truth for said, truth in zip(analyses, truths, strict=False)]

    # How the arithmetic is done

    def _expression(self, num_steps: int, rng: random.Random) -> str:
        digit = lambda: str(rng.randrange(self.modulus))
        return digit() + "".join(rng.choice("+-*") + digit() for _ in range(num_steps))

    def _operations(self, prompt: str) -> list[tuple[str, int]]:
        return [(op, int(b)) for op, b in re.findall("([-+*])([0-9])", prompt)]

    def _result(self, a: int, op: str, b: int) -> int:
        return OPS[op](a, b) % self.modulus

    def _believed(self, a, op, b, wrong: dict, wrongness: float, rng: random.Random) -> int:
        mistaken = (a, op, b) in wrong and rng.random() < wrongness
        return wrong[a, op, b] if mistaken else self._result(a, op, b)

    def _solve(self, prompt: str, wrong: dict, wrongness: float, rng: random.Random) -> list[int]:
        value, results = int(prompt[0]), []
        for op, b in self._operations(prompt):
            value = self._believed(value, op, b, wrong, wrongness, rng)
            results.append(value)
        return results

    def _answer(self, results: list[int]) -> str:
        return "".join(map(str, results)) if self.answer_kind == "all" else str(results[-1])

    def _render(self, prompt: str, results: list[int]) -> str:
        return self.fmt.render_solution(self._steps(prompt, results), self._answer(results))

    def _steps(self, prompt: str, results: list[int]) -> list[str]:
        return [f"{value}{op}{b}:{result}" for value, (op, b), result in
                zip([prompt[0], *results], self._operations(prompt), results, strict=False)]

    def _flawed(self, problem: Problem, rng: random.Random) -> str:
        """A demonstration for the generator; one in three skips steps at the end, one in three has a wrong operand."""
        results = self._solve(problem.prompt, self.misconceptions, self.wrongness, rng)
        steps, kind = self._steps(problem.prompt, results), rng.randrange(3)
        if kind == 0 and len(steps) > 1:
            steps = steps[: rng.randrange(1, len(steps))]
        if kind == 1:
            k = rng.randrange(len(steps))
            steps[k] = str((int(steps[k][0]) + rng.randrange(1, self.modulus)) % self.modulus) + steps[k][1:]
        return self.fmt.render_solution(steps, self._answer(results[: len(steps)]))

    def _stated_results(self, solution: str) -> list[int | None]:
        matches = map(STEP.fullmatch, self.fmt.step_bodies(solution))
        return [match and int(match[4]) for match in matches]

    def _facts(self, prompt: str, solution: str) -> list[tuple[int, str, int, int] | None]:
        """Per step (a, op, b, stated result), or None where the step does not copy its operands."""
        operations, value, facts = self._operations(prompt), int(prompt[0]), []
        for k, match in enumerate(map(STEP.fullmatch, self.fmt.step_bodies(solution))):
            fact = (int(match[1]), match[2], int(match[3]), int(match[4])) if match else None
            copied = (fact is not None and k < len(operations) and value is not None
                      and fact[:3] == (value, *operations[k]))
            facts.append(fact if copied else None)
            value = fact[3] if fact else None
        return facts
