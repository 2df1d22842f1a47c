"""
Last-letter concatenation: the experiment of RL Tango that needs no pretrained weights (section 4.3, appendix D.2).

A problem is `grape lemon`; step k copies the k-th word and gives the last letters of the first k words joined:
`grape:e;lemon:en;=en`. A step is right iff it says just that, so gold step labels are free; unlike chain's they are not
local: an error carried on stays wrong.

SFT shows mostly short problems. Tiny models do not generalise to positions they never saw, so a share of the
demonstrations has any length up to test_out's, which RL never trains on.
"""
import random
import re
from string import ascii_lowercase

from nanochat.cli import SHARE
from nanochat.common import BadInput
from nanochat.storage.files import reading
from tasks.common import Problem, check_range, draw_prompt, split_stream
from tasks.formats import COMPACT

MOST = 1000  # words of a problem, and letters of a word
MIN_USABLE_WORDS = 100  # of a words file, for the split with the shortest words


def read_words(path: str) -> list[str]:
    """The distinct a-z words of a file, one a line, lower-cased and sorted. Raises BadInput."""
    with reading(f"--last-letter-words {path}"), open(path, encoding="utf-8", errors="replace") as f:
        lines = {line.strip().lower() for line in f}
    return sorted(word for word in lines if re.fullmatch("[a-z]+", word))


def other_letter(letter: str, rng: random.Random) -> str:
    """A letter that is not this one."""
    return rng.choice(ascii_lowercase.replace(letter, ""))


def add_args(parser):
    group = parser.add_argument_group("task last_letter")
    group.add_argument("--last-letter-min-words", type=int, default=2, help="words of the shortest problem")
    group.add_argument("--last-letter-max-words", type=int, default=10,
                       help="words of the longest problem in RL; test_out has 1 and 2 more")
    group.add_argument("--last-letter-min-letters", type=int, default=3, help="letters of the shortest word")
    group.add_argument("--last-letter-max-letters", type=int, default=10,
                       help="letters of the longest word in RL; up to 2 more in test_out")
    group.add_argument("--last-letter-words", default="", metavar="FILE",
                       help="text file with one word a line; default: random letters")
    group.add_argument("--last-letter-full-share", type=SHARE, default=0.2,
                       help="share of the SFT problems that have any length up to test_out's; "
                            "the others have at most half of RL's words")
    group.add_argument("--last-letter-verifier-error", type=SHARE, default=0.1,
                       help="how often a verifier demonstration believes a step's new letter wrongly, "
                            "so that SFT leaves the verifier unsure")


class LastLetter:
    """The last-letter task. Its problems are a function of `seed` and the flags."""
    name = "last_letter"
    fmt = COMPACT

    def __init__(self, args, seed: int):
        low, high = check_range(args, "last_letter_min_words", "last_letter_max_words", 2, MOST)
        short, long = check_range(args, "last_letter_min_letters", "last_letter_max_letters", 1, MOST)
        self.seed, self.min_letters = seed, short
        self.full_share, self.verifier_error = args.last_letter_full_share, args.last_letter_verifier_error
        # (fewest words, most words, most letters of a word); sft_full is the full-length share of sft
        self.sizes = {"sft": (low, max(low, high // 2), max(short, long - 2)), "sft_full": (low, high + 2, long + 2),
                      "rl": (low, high, long), "test_in": (low, high, long), "test_out": (high + 1, high + 2, long + 2)}
        self.words = self._words_by_size(args.last_letter_words) if args.last_letter_words else None

    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split; the splits are endless and share no problem text."""
        rng = split_stream(self.seed, split, index)
        fewest, most, max_letters = self.sizes["sft_full" if split == "sft" and rng.random() < self.full_share
                                               else split]
        num_words = rng.randint(fewest, most)
        prompt = draw_prompt(lambda: " ".join(self._word(max_letters, rng) for _ in range(num_words)), split)
        return Problem(split, index, prompt, self._joined(prompt)[-1])

    def check(self, problem: Problem, solution: str) -> bool | None:
        """The outcome: whether the solution's answer equals the gold answer."""
        return self.fmt.answer(solution) == problem.answer

    def step_labels(self, problem: Problem, solution: str) -> list[bool]:
        """Gold labels of the steps that `fmt.step_spans` finds in any text."""
        return self._judged(self._steps(problem.prompt, self._joined(problem.prompt)), solution)

    def solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """A demonstration for the generator; always right, so `rng` is not used."""
        return self._render(problem.prompt, self._joined(problem.prompt))

    def corrupted_solution(self, problem: Problem, rng: random.Random) -> str:
        """A right solution in which a step's new letter may be wrong and is carried on; over half of all stay right."""
        words = problem.prompt.split()
        rate = rng.choice([0.0, 1.5 / len(words)])
        letters, joined = "", []
        for word in words:
            letters += other_letter(word[-1], rng) if rng.random() < rate else word[-1]
            joined.append(letters)
        return self._render(problem.prompt, joined)

    def verification_demo(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A demonstration for the verifier: each step worked again, now and then wrongly, and judged by that."""
        believed = [letters[:-1] + other_letter(letters[-1], rng) if rng.random() < self.verifier_error else letters
                    for letters in self._joined(problem.prompt)]
        steps = self._steps(problem.prompt, believed)
        verdicts = self._judged(steps, solution)
        analyses = (steps + ["?"] * len(verdicts))[: len(verdicts)]
        verdict = len(verdicts) == len(steps) and all(verdicts) and self.fmt.answer(solution) == believed[-1]
        return self.fmt.render_verification(analyses, verdicts, verdict)

    def analysis_labels(self, problem: Problem, solution: str, analyses: list[str]) -> list[bool]:
        """Whether what a verification says of each step is right: the step as it should be, or "?" of one too many."""
        num_steps = len(self.fmt.step_spans(solution))
        truths = self._steps(problem.prompt, self._joined(problem.prompt)) + ["?"] * num_steps
        return [said == truth for said, truth in zip(analyses, truths[:num_steps], strict=False)]

    # How words become steps

    def _words_by_size(self, path: str) -> dict[int, list[str]]:
        """The words of a file that fit, by the most letters a word may have."""
        words = read_words(path)
        by_size = {most: [word for word in words if self.min_letters <= len(word) <= most]
                   for _, _, most in self.sizes.values()}
        shortest = min(by_size)
        if len(by_size[shortest]) < MIN_USABLE_WORDS:
            raise BadInput(f"--last-letter-words {path}: has {len(by_size[shortest])} words "
                           f"of {self.min_letters} to {shortest} letters a-z, need at least {MIN_USABLE_WORDS}")
        return by_size

    def _word(self, max_letters: int, rng: random.Random) -> str:
        if self.words is not None:
            return rng.choice(self.words[max_letters])
        return "".join(rng.choices(ascii_lowercase, k=rng.randint(self.min_letters, max_letters)))

    def _joined(self, prompt: str) -> list[str]:
        """Per k the last letters of the first k words."""
        letters = "".join(word[-1] for word in prompt.split())
        return [letters[:k] for k in range(1, len(letters) + 1)]

    def _steps(self, prompt: str, joined: list[str]) -> list[str]:
        return [f"{word}:{letters}" for word, letters in zip(prompt.split(), joined, strict=True)]

    def _render(self, prompt: str, joined: list[str]) -> str:
        return self.fmt.render_solution(self._steps(prompt, joined), joined[-1])

    def _judged(self, steps: list[str], solution: str) -> list[bool]:
        """Per step of the solution whether it is, to the letter, the one in its place in `steps`."""
        return [k < len(steps) and step == steps[k] for k, step in enumerate(self.fmt.step_bodies(solution))]
