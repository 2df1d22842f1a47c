"""
What every task offers, and helpers to make one.

A task is any object with `name`, `fmt` (tasks.formats.Format) and the methods of `tasks.chain.Chain`. Tasks label
text; they never run models.
"""
import functools
import random
import zlib
from dataclasses import dataclass

from nanochat.common import BadInput
from tasks.answers import MAX_ANSWER, OPENED_BOX, boxed, extracted, last_number, plain_number, stands_in, tidy
from tasks.formats import Format
from tasks.grading import grade, said_alike

# Problems are dealt to the splits by a hash of their text: sft, rl and the two test splits have no text in common.
SPLIT_BUCKETS = {"sft": range(0, 4), "rl": range(4, 9), "test_in": range(9, 10), "test_out": range(9, 10)}
BOX = "\\boxed{"


@dataclass(frozen=True)
class Problem:
    """One problem: the text that the generator reads and the gold answer. (split, index) names it for good."""
    split: str
    index: int
    prompt: str
    answer: str


def demo_of(task, part: str, problem: Problem, *args) -> str:
    """What a task's method `part`, such as solution_demo, gives for a problem. Raises BadInput for what is no text."""
    text = getattr(task, part)(problem, *args)
    if not isinstance(text, str):
        raise BadInput(f"task {task.name}: {part}() gives {str(text)[:80]} for problem {problem.index} of "
                       f"{problem.split}, not text")
    return text


def check_problem(where: str, problem, split: str, index: int) -> Problem:
    """What a task gives as a problem, if it is one. Raises BadInput, which begins with `where`."""
    texts = (problem.prompt, problem.answer) if isinstance(problem, Problem) else (None,)
    if not all(isinstance(text, str) and text == text.encode(errors="replace").decode() for text in texts):
        raise BadInput(f"{where}: problem({split!r}, {index}) gives {str(problem)[:80]!a}: it must be a Problem whose "
                       f"prompt and answer are text")
    return problem


def check_range(args, low: str, high: str, least: int, most: int) -> tuple[int, int]:
    """The values of two flags. Raises BadInput unless least <= low <= high <= most."""
    values = getattr(args, low), getattr(args, high)
    if not least <= values[0] <= values[1] <= most:
        flags = " ".join(f"--{flag.replace('_', '-')} {value}" for flag, value in zip((low, high), values, strict=True))
        raise BadInput(f"{flags}: need {least} <= min <= max <= {most}")
    return values


def split_stream(seed: int, split: str, index: int) -> random.Random:
    """The random stream that belongs to problem `index` of a split: the same on every rank and in every run."""
    return random.Random(f"{seed}-{split}-{index}")


def draw_prompt(draw, split: str) -> str:
    """The first text of draw() that belongs to the split. Raises BadInput when a thousand do not."""
    for _ in range(1000):
        prompt = draw()
        if in_split(prompt, split):
            return prompt
    raise BadInput(f"split {split}: 1000 draws like {prompt!r} gave no problem of it; "
                   f"make the task's problems longer or more varied")


def in_split(prompt: str, split: str) -> bool:
    """Whether a problem text belongs to the split."""
    return zlib.crc32(prompt.encode()) % 10 in SPLIT_BUCKETS[split]


@functools.lru_cache(maxsize=16)  # a run is in one epoch per split, at most two where a batch crosses into the next
def epoch_order(seed: int, split: str, epoch: int, size: int) -> tuple[int, ...]:
    """The order in which an epoch goes through `size` problems of a split: each once, another order in every epoch."""
    order = list(range(size))
    random.Random(f"{seed}-{split}-epoch-{epoch}").shuffle(order)
    return tuple(order)


def nth_of_epochs(items: list, seed: int, split: str, index: int):
    """Item `index` of an endless pass over the items of a finite split, epoch after epoch."""
    epoch, position = divmod(index, len(items))
    return items[epoch_order(seed, split, epoch, len(items))[position]]


def answering_part(fmt: Format, solution: str) -> str:
    """The part of a solution whose answer counts, for tasks.grading; "" where none does, as in a text whose last
    <think> is not closed. Where the format's answer tag is there, only what stands in it counts (its last box, or all
    of it where it has none), and it must be the end of the text: "..<answer>\\boxed{18}</answer>" and
    "..<answer>18</answer>" answer 18, "..<answer>\\boxed{18}</answer> or 19" nothing. A text without the tag, as
    pretrained models write it, is read as it is: its last box, else what follows "####"."""
    if solution.rfind("<think>") > solution.rfind("</think>"):
        return ""
    opening, closing = fmt.answer_open.removesuffix(BOX), fmt.answer_close.removeprefix("}")
    _, found, tail = solution.partition(opening)
    if not found:
        return solution
    tail = tail.rstrip()
    answer = tail.removesuffix(closing).strip()
    if not answer or not tail.endswith(closing) or any(mark in answer for mark in (opening, closing) if mark):
        return ""
    if OPENED_BOX.search(answer):
        return answer
    whole = f"{BOX}{answer}}}"
    return whole if boxed(whole) == answer else ""  # "18} or 19" would close the box


def read_answer(fmt: Format, solution: str) -> str | None:
    """What a solution answers, as text; None where nothing can be read."""
    return extracted(answering_part(fmt, solution))


def check_answer(fmt: Format, problem: Problem, solution: str) -> bool | None:
    """Whether a solution's answer is the gold one as mathematics; None where that cannot be scored, False without."""
    return grade(completion=answering_part(fmt, solution), gold=problem.answer)


class GradedSet:
    """What data sets of mathematics have in common: an answer is graded, and nobody has labelled steps. splits: the
    problems of each split, which are endless, in an order of its own in each epoch."""
    has_step_labels = False
    has_numbers = True
    splits: dict[str, list]

    def num_problems(self, split: str) -> int:
        """Problems of a split before they come again; 0 where it has none."""
        return len(self.splits[split])

    def check(self, problem: Problem, solution: str) -> bool | None:
        """The outcome: whether the answer equals the gold one as mathematics; None where that cannot be scored."""
        return check_answer(self.fmt, problem, solution)

    def read_answer(self, solution: str) -> str | None:
        """What a solution answers; None where nothing can be read."""
        return read_answer(self.fmt, solution)

    def same_answer(self, first: str, second: str) -> bool:
        """Whether two answers, as `read_answer` gives them, are equal as mathematics, whichever is the gold one."""
        return first == second or all(boxed(box := f"{BOX}{answer}}}") == answer and grade(completion=box, gold=gold)
                                      for answer, gold in ((first, second), (second, first)))

    def is_copied(self, problem: Problem, solution: str) -> bool:
        """Whether a solution's answer stands in the problem as it is and says it otherwise than the gold one: of
        "Simplify 2^3" 2^3 is equal to the gold 8."""
        answer = self.read_answer(solution)
        return answer is not None and stands_in(problem.prompt, answer) and not said_alike(problem.answer, answer)

    def step_labels(self, problem: Problem, solution: str) -> list[bool]:
        """None are known."""
        return []


def is_last_number(text: str, gold: str) -> bool | None:
    """Whether the last number of a text is the gold one, whatever its format; None where the gold is no plain number.
    Lenient accuracy, as much of what is published counts: "so 9 * 2 = $18." is 18, and "18 of 20" is not. Strict is the
    task's check()."""
    wanted, found = plain_number(tidy(gold)), last_number(text) or ""
    if wanted is None:
        return None
    value = plain_number(tidy(found)) if len(found) <= MAX_ANSWER else None
    return value is not None and value[0] == wanted[0]
