"""
Proofs that a kernel checks: rewriting words to their normal form in the group S4, with misconceptions about the rules.

A problem is a theorem, `bbcac:a`: the word on the left equals the one on the right. A proof names the words that lead
from one to the other, each made from the one before by one rule at one place, and ends with what is proved:
`cac;acc;a;=a`. The empty word is written 1.

The letters are the swaps of neighbours among four things, and RULES are complete for them: in whatever order they are
applied, a word comes to the one normal form that it shares with all words that equal it. A theorem has this form on the
right. So each of them has a proof, most have many, and every proof ends.

`accepts` is the kernel: it knows the rules and no group. To state the right side, which stands in the problem, earns
nothing: each step must follow.

Demonstrations carry misconceptions, as chain's do: of a random share of the facts (a rule's left side and the letter
after it) a fixed wrong result is shown most of the time, and the proof is carried on from there. Some steps are also
skipped, which is true and no proof. The verifier has misconceptions of its own.
"""
import functools
import random
import re
from collections.abc import Callable
from itertools import product

from nanochat.cli import SHARE
from tasks.common import Problem, check_range, draw_prompt, split_stream
from tasks.formats import COMPACT

LETTERS = "abc"
RULES = {"aa": "", "bb": "", "cc": "", "ca": "ac", "bab": "aba", "cbc": "bcb", "cbac": "bcba"}
REDEX = re.compile("|".join(RULES))  # at most one rule fits at a place
EMPTY = "1"
MOST = 200  # letters of a word
LONGER_SHARE = 0.1  # of the demonstrations has test_out's lengths, which RL never trains on, as in chain


# The kernel

def word_of(text: str) -> str | None:
    """The word that a text writes, None where it is none: "1" is the empty word."""
    return "" if text == EMPTY else text if re.fullmatch(f"[{LETTERS}]+", text) else None


def rewritings(word: str) -> list[tuple[str, str, str]]:
    """Every way to apply a rule, from left to right: what stands before its left side, the side, what stands after."""
    found = (REDEX.match(word, i) for i in range(len(word)))
    return [(word[: m.start()], m[0], word[m.end():]) for m in found if m]


def follows(before: str, after: str) -> bool:
    """Whether one rule at one place makes the text of a word into that of another."""
    a, b = word_of(before), word_of(after)
    return a is not None and b is not None and any(b == x + RULES[side] + y for x, side, y in rewritings(a))


def accepts(theorem: str, text: str) -> bool:
    """Whether the text proves the theorem."""
    start, _, goal = theorem.partition(":")
    *steps, end = text.split(COMPACT.step_close)
    words = [start, *steps]
    return (end == COMPACT.answer_open + goal and words[-1] == goal and word_of(goal) is not None
            and all(follows(a, b) for a, b in zip(words, steps, strict=False)))


# Words, and what is believed of them

def written(word: str) -> str:
    """A word as text."""
    return word or EMPTY


def normal_form(word: str) -> str:
    """The word that no rule shortens or puts in order any more: equal words share it."""
    while found := rewritings(word):
        before, side, after = found[0]
        word = before + RULES[side] + after
    return word


def theorem_of(word: str) -> str:
    """The theorem that a word is its normal form."""
    return f"{written(word)}:{written(normal_form(word))}"


def start_of(problem: Problem) -> str:
    """The left side of a theorem, as text."""
    return problem.prompt.partition(":")[0]


def true_result(side: str, letter: str) -> str:
    """What becomes of a rule's left side, whatever letter stands after it."""
    return RULES[side]


@functools.cache
def false_results(side: str) -> list[str]:
    """Words that a rule's left side does not equal. They are shorter than it, so that a misled proof ends too."""
    words = ["".join(letters) for n in range(len(side)) for letters in product(LETTERS, repeat=n)]
    return [word for word in words if normal_form(word) != normal_form(side)]


def misconceptions(seed: int, share: float) -> dict[tuple[str, str], str]:
    """A random `share` of all facts (left side of a rule, letter after it), each with one fixed false result."""
    rng = random.Random(f"misconceptions-{seed}")
    facts = [(side, letter) for side in RULES for letter in ("", *LETTERS)]
    return {(side, letter): rng.choice(false_results(side))
            for side, letter in rng.sample(facts, round(share * len(facts)))}


def reduced(start: str, believe: Callable) -> list[str]:
    """The words, as text, that the first rule that fits leads to, by believe(side, letter after it)."""
    word, words = word_of(start), []
    while found := rewritings(word):
        before, side, after = found[0]
        word = before + believe(side, after[:1]) + after
        words.append(written(word))
    return words


def analysed(before: str, after: str, believe: Callable) -> tuple[str, bool]:
    """The first rule, with its believed result, that makes one text of a word into the other, and True; where none
    does, the first that could be applied to it ("?" where there is none), and False."""
    ways = [(x, side, believe(side, y[:1]), y) for x, side, y in rewritings(word_of(before) or "")]
    found = [way for way in ways if written(way[0] + way[2] + way[3]) == after]
    analysis = next((f"{side}:{written(result)}" for _, side, result, _ in found or ways), "?")
    return analysis, bool(found)


def error_of(before: str, after: str) -> str | None:
    """What is wrong with a step, None where it follows."""
    if follows(before, after):
        return None
    a, b = word_of(before), word_of(after)
    if a is None or b is None:
        return "word"
    return "jump" if normal_form(a) == normal_form(b) else "false"


# Variants of a word, as the paper varies a theorem by programs

def with_other_letter(word: str, rng: random.Random) -> str:
    """One letter is another one."""
    i = rng.randrange(len(word))
    return word[:i] + rng.choice(LETTERS.replace(word[i], "")) + word[i + 1:]


def part_of(word: str, rng: random.Random) -> str:
    """A part of two letters or more: simpler."""
    num = rng.randint(min(2, len(word)), len(word))
    start = rng.randint(0, len(word) - num)
    return word[start: start + num]


def one_step_on(word: str, rng: random.Random) -> str:
    """What is left to prove after one step."""
    before, side, after = rng.choice(rewritings(word))
    return before + RULES[side] + after


VARIANTS = {"letter": with_other_letter, "part": part_of, "step": one_step_on}
MOST_CHANGES = 3  # one on top of the other


def add_args(parser):
    group = parser.add_argument_group("task rewrite")
    group.add_argument("--rewrite-min-letters", type=int, default=5, help="letters of the shortest word")
    group.add_argument("--rewrite-max-letters", type=int, default=9,
                       help="letters of the longest word in RL; test_out has 1 and 2 more")
    group.add_argument("--rewrite-share", type=SHARE, default=0.25,
                       help="share of the facts (a rule's left side, the letter after it) the generator is taught "
                            "wrongly")
    group.add_argument("--rewrite-wrongness", type=SHARE, default=0.7,
                       help="how often a demonstration shows such a fact wrongly")
    group.add_argument("--rewrite-skips", type=SHARE, default=0.05, help="share of the steps that it leaves out")
    group.add_argument("--rewrite-verifier-share", type=SHARE, default=0.25,
                       help="share of the facts for the verifier's own misconceptions")
    group.add_argument("--rewrite-verifier-wrongness", type=SHARE, default=0.65,
                       help="how often the verifier believes such a fact wrongly")


class Rewrite:
    """The rewriting task. Its theorems and misconceptions are a function of `seed` and the flags."""
    name = "rewrite"
    fmt = COMPACT

    def __init__(self, args, seed: int):
        low, high = check_range(args, "rewrite_min_letters", "rewrite_max_letters", 2, MOST)
        self.seed, self.lengths = seed, (low, high)
        self.wrongness, self.skips = args.rewrite_wrongness, args.rewrite_skips
        self.verifier_wrongness = args.rewrite_verifier_wrongness
        self.misconceptions = misconceptions(2 * seed, args.rewrite_share)
        self.verifier_misconceptions = misconceptions(2 * seed + 1, args.rewrite_verifier_share)
        self.about = f"words of {low} to {high} letters to their normal form, by {', '.join(RULES)}"

    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split, a true theorem that takes a step at least; the splits share no theorem."""
        rng = split_stream(self.seed, split, index)
        longer = split == "test_out" or split == "sft" and rng.random() < LONGER_SHARE
        low, high = (self.lengths[1] + 1, self.lengths[1] + 2) if longer else self.lengths
        num_letters = rng.randint(low, high)

        def draw() -> str:
            while not REDEX.search(word := "".join(rng.choices(LETTERS, k=num_letters))):
                pass
            return theorem_of(word)
        return self._problem(split, index, draw_prompt(draw, split))

    def check(self, problem: Problem, solution: str) -> bool | None:
        """The outcome: whether the kernel accepts the solution as a proof."""
        return accepts(problem.prompt, solution)

    def step_labels(self, problem: Problem, solution: str) -> list[bool]:
        """Whether the kernel accepts each of the steps that `fmt.step_spans` finds in any text."""
        return [error is None for error in self.step_errors(problem, solution)]

    def step_errors(self, problem: Problem, solution: str) -> list[str | None]:
        """What is wrong with each step: "word" (it is none), "jump" (true, and no single rule), "false" or None."""
        return [error_of(a, b) for a, b in self._steps(problem, solution)]

    def variants(self, problem: Problem, rng: random.Random) -> Problem:
        """A theorem near this one: its word changed once or more, and that one's normal form."""
        start = word = word_of(start_of(problem))
        for _ in range(rng.randint(1, MOST_CHANGES)):
            changed = start
            while changed == start or not REDEX.search(changed):
                changed = VARIANTS[rng.choice(list(VARIANTS))](word, rng)
            word = changed
        return self._problem(problem.split, problem.index, theorem_of(word))

    def solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """A demonstration for the generator, misconceptions and skipped steps included."""
        words = reduced(start_of(problem), self._beliefs(self.misconceptions, self.wrongness, rng))
        return self._render([word for word in words if rng.random() >= self.skips], words[-1])

    def corrupted_solution(self, problem: Problem, rng: random.Random) -> str:
        """A proof in which a step's result may be false and is carried on; over half of all stay right."""
        start = start_of(problem)
        rate = rng.choice([0.0, min(1.0, 1.5 / len(reduced(start, true_result)))])
        words = reduced(start, lambda side, _: rng.choice(false_results(side)) if rng.random() < rate else RULES[side])
        return self._render(words, words[-1])

    def verification_demo(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A demonstration for the verifier: of each step the rule and its result by which it follows, as the verifier
        believes them; where none does, the first that could be applied. The step is judged by that."""
        steps = self._steps(problem, solution)
        believe = self._beliefs(self.verifier_misconceptions, self.verifier_wrongness, rng)
        analyses, verdicts = zip(*(analysed(a, b, believe) for a, b in steps), strict=True) if steps else ((), ())
        words = [start_of(problem), *(after for _, after in steps)]
        whole = solution == self._render(words[1:], problem.answer) and words[-1] == problem.answer
        return self.fmt.render_verification(list(analyses), list(verdicts), whole and all(verdicts))

    def analysis_labels(self, problem: Problem, solution: str, analyses: list[str]) -> list[bool]:
        """Whether what a verification says of each step is right: its rule ("bab:aba"), "?" where none fits."""
        truths = [analysed(a, b, true_result)[0] for a, b in self._steps(problem, solution)]
        return [said == truth for said, truth in zip(analyses, truths, strict=False)]

    # How texts are made and read

    def _problem(self, split: str, index: int, theorem: str) -> Problem:
        return Problem(split, index, theorem, theorem.partition(":")[2])

    def _beliefs(self, wrong: dict, wrongness: float, rng: random.Random) -> Callable:
        return lambda side, letter: (wrong[side, letter] if (side, letter) in wrong and rng.random() < wrongness
                                     else RULES[side])

    def _render(self, words: list[str], answer: str) -> str:
        return self.fmt.render_solution(words, answer)

    def _steps(self, problem: Problem, solution: str) -> list[tuple[str, str]]:
        """Each step of a solution after what stands before it, as texts."""
        words = self.fmt.step_bodies(solution)
        return list(zip([start_of(problem), *words], words, strict=False))
