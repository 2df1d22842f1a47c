"""
What each role reads and writes: prompts, reasoning steps with their token positions, verdicts.
"""
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from string import ascii_uppercase

from nanochat.common import BadInput
from tasks.common import Problem


@dataclass
class Solution:
    """A generator's completion, read."""
    text: str
    step_ends: list[int]  # of each reasoning step, the index of its last token in the completion


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a model is asked."""
    ids: list[int]
    problem: Problem | None = None    # whose (split, index) keys the sampling noise
    copy: int = 0                     # tells prompts about one problem apart for the noise
    solution: Solution | None = None  # that it quotes


def count_copies(names: list) -> list[int]:
    """How often each entry has occurred before in the list: ["a", "b", "a"] -> [0, 0, 1]."""
    seen: Counter = Counter()
    copies = []
    for name in names:
        copies.append(seen[name])
        seen[name] += 1
    return copies


def numbered(prompts: list[Prompt], copies: list[int] | None = None) -> list[Prompt]:
    """The prompts with `copies`; by default prompts about one problem are counted as they come."""
    copies = count_copies([prompt.problem for prompt in prompts]) if copies is None else copies
    return [replace(prompt, copy=copy) for prompt, copy in zip(prompts, copies, strict=True)]


def solve_prompt(tokenizer, fmt, problem: Problem) -> Prompt:
    """The generator's prompt for a problem, not yet told apart from others for it."""
    return Prompt(generator_prompt(tokenizer, fmt, problem.prompt), problem)


def verify_prompts(tokenizer, fmt, problems: list[Problem], solutions: list[Solution],
                   copies: list[int] | None = None) -> list[Prompt]:
    """The verifier's prompts; solutions[i] solves problems[i]."""
    pairs = zip(problems, solutions, strict=True)
    prompts = [Prompt(verifier_prompt(tokenizer, fmt, p.prompt, s.text), p, solution=s) for p, s in pairs]
    return numbered(prompts, copies)


def rendered(tokenizer, fmt, text: str) -> list[int]:
    """Token ids of a prompt of this text, after the format's system prompt."""
    return tokenizer.render_prompt(text, fmt.system_prompt)


def refine_prompt(tokenizer, fmt, problem: str, solution: str = "", critique: str = "") -> list[int]:
    """Token ids of the prompt for a second attempt. No judgment is read from it, so marks may stand in it."""
    return rendered(tokenizer, fmt, fmt.refine_prompt.format(problem=problem, solution=solution, critique=critique))


def reference_prompt(tokenizer, fmt, problem: str, answer: str = "") -> list[int]:
    """Token ids of the prompt after which a solution is scored against the gold answer."""
    return rendered(tokenizer, fmt, fmt.reference_prompt.format(problem=problem, answer=answer))


def quoting_prompt(tokenizer, fmt, problem: str, template: str, **quoted: str) -> list[int]:
    """Token ids of a prompt of one of the format's templates; no marks of a judgment stand in what it quotes."""
    texts = {name: fmt.quote(text) for name, text in quoted.items()}
    return rendered(tokenizer, fmt, getattr(fmt, template).format(problem=problem, **texts))


# Kinds of demonstrations beside solutions (chat_sft --demo-shares), and the template that they stand after
DEMOS = {"refine": "refine_prompt", "revise": "refine_prompt", "propose": "propose_prompt", "argue": "argue_prompt",
         "first": "first_prompt", "second": "second_prompt", "reason": "reason_prompt", "condense": "condense_prompt"}


def template_of(wrap: Callable) -> str:
    """The name of the template that a draw's prompts (`Draw.wrap`) have."""
    return wrap.keywords.get("template", "") if isinstance(wrap, partial) else wrap.__name__


def generator_prompt(tokenizer, fmt, problem: str) -> list[int]:
    """Token ids of the generator's prompt."""
    return rendered(tokenizer, fmt, fmt.generator_prompt.format(problem=problem))


def verifier_prompt(tokenizer, fmt, problem: str, solution: str) -> list[int]:
    """Token ids of the verifier's prompt: the problem, the solution and its number of steps (Tango section 3)."""
    return rendered(tokenizer, fmt, fmt.verifier_prompt.format(
        problem=fmt.quote(problem), solution=fmt.quote(solution), num_steps=len(fmt.step_spans(solution))))


def several_prompt(tokenizer, fmt, template: str, problem: str, solutions: list[str]) -> list[int]:
    """Token ids of the verifier's prompt for several solutions together. template: a field of the format, such as
    "pair_prompt". The marks of a judgment cannot stand in what is quoted."""
    text = getattr(fmt, template).format(problem=fmt.quote(problem), solutions=listed(fmt, solutions))
    return rendered(tokenizer, fmt, text)


def listed(fmt, solutions: list[str]) -> str:
    """Several solutions below their letters, quoted."""
    return "".join(fmt.listed.format(name=name, solution=fmt.quote(solution))
                   for name, solution in zip(ascii_uppercase[: len(solutions)], solutions, strict=True))


def longest_problem(tokenizer, problems: list[str]) -> str:
    """The problem with the most tokens."""
    longest, most = "", -1
    for problem in sorted(set(problems), key=lambda problem: len(problem.encode()), reverse=True):
        if len(problem.encode()) <= most:  # a token has at least one byte: none of the rest has more tokens
            break
        if (num_tokens := len(tokenizer.encode(problem))) > most:
            longest, most = problem, num_tokens
    return longest


def empty_verifier_prompt(tokenizer, fmt, problem: str) -> list[int]:
    """The verifier's prompt but for the solution that it quotes."""
    return verifier_prompt(tokenizer, fmt, problem, "")


LOWER_LIMITS = "lower --max-new-tokens or --verifier-max-new-tokens"


def check_fit(role: str, wrap: Callable, quoted: int, max_new_tokens: int, context: int, tokenizer, fmt,
              problem: str, remedy: str = LOWER_LIMITS) -> None:
    """Raises BadInput when the prompt wrap(tokenizer, fmt, problem) of the longest problem, `quoted` tokens that stand
    in it and its completion exceed a role's context. remedy: what would shorten it."""
    length = len(wrap(tokenizer, fmt, problem)) + quoted + max_new_tokens
    if length > context:
        raise BadInput(f"the {role}'s longest prompt and completion have up to {length} tokens, its context {context}; "
                       f"{remedy}, or train with a larger --sequence-len")


def check_prompts_fit(tokenizer, fmt, problems: list[str], contexts: dict[str, int], max_new_tokens: int,
                      verifier_max_new_tokens: int) -> None:
    """`check_fit` of solutions and of their verifications. contexts: of the generator and the verifier."""
    longest = longest_problem(tokenizer, problems)
    asked = {"generator": (generator_prompt, 0, max_new_tokens),
             "verifier": (empty_verifier_prompt, max_new_tokens, verifier_max_new_tokens)}
    for role, context in contexts.items():
        check_fit(role, *asked[role], context, tokenizer, fmt, longest)


def read_solution(tokenizer, fmt, tokens: list[int]) -> Solution:
    """Reads a completion (end token included or not). Total: any ids give a solution. A step's end token I(k) is the
    one that holds the last byte of its closing mark, also when a token straddles it."""
    if tokens and tokens[-1] in tokenizer.stop_tokens:
        tokens = tokens[:-1]
    pieces = [tokenizer.token_bytes(t) for t in tokens]
    byte_ends = list(accumulate(map(len, pieces)))  # token i holds bytes byte_ends[i-1] .. byte_ends[i]-1
    # Marks are ASCII: as latin-1 one character is one byte, and the spans are byte offsets.
    spans = fmt.step_spans(b"".join(pieces).decode("latin-1"))
    return Solution(tokenizer.decode(tokens), [bisect_right(byte_ends, end - 1) for _, end in spans])


@dataclass
class Verification:
    """A verifier's completion, read."""
    step_verdicts: list[bool | None]  # one per judged step, None where a step has no verdict
    verdict: bool | None              # the final one
    unmet: tuple[str, ...]            # which criteria of the format it fails, from UNMET
    text: str = ""                    # what was read

    @property
    def usable_steps(self) -> list[bool] | None:
        """The step verdicts, or None when any of them is missing or their number is wrong."""
        unusable = {"missing_tags", "step_without_verdict", "step_count_mismatch"} & set(self.unmet)
        return None if unusable else self.step_verdicts


UNMET = ("missing_tags", "step_without_verdict", "step_count_mismatch", "no_final_verdict")


def parse_verification(fmt, text: str, num_steps: int, stopped: bool = True) -> Verification:
    """Reads a verification of a solution with `num_steps` steps: the verifier's own completion, never its prompt.
    Total: any text gives verdicts or None, with the reasons. COMPACT: "3+5:8T;8*2:5F;=F" -> [True, False], False."""
    final_at = text.rfind(fmt.final_open)
    body, tail = (text[:final_at], text[final_at + len(fmt.final_open):].strip()) if final_at >= 0 else (text, "")
    spans = fmt.closed_steps(body, fmt.verification_open)
    step_verdicts = [_last_verdict(fmt, body[start:end]) for start, end in spans]
    rest = body[spans[-1][1] if spans else 0:].strip()  # what stands between the last step and the final judgment
    expected_rest = fmt.verification_close if spans else fmt.verification_open + fmt.verification_close
    said = _last_verdict(fmt, tail)
    # Without a closing mark the verdict must be all there is.
    closed = tail.endswith(fmt.final_close) if fmt.final_close else said is None or tail in (fmt.correct, fmt.incorrect)
    verdict = said if closed and stopped else None
    tags_there = final_at >= 0 and closed and fmt.verification_open in body and rest == expected_rest
    unmet = (not tags_there, None in step_verdicts, len(step_verdicts) != num_steps, verdict is None)
    return Verification(step_verdicts, verdict,
                        tuple(name for name, failed in zip(UNMET, unmet, strict=True) if failed), text)


STRENGTHS = (1, 2, 3)  # of a graded choice
TOP_SCORE = 10


def top_score(num: int) -> int:
    """The highest score of one of `num` solutions; a single one is right, 1, or not."""
    return TOP_SCORE if num > 1 else 1


def final_judgment(fmt, text: str, stopped: bool) -> str | None:
    """What stands between the last mark of a final judgment and the text's end; None where either is missing."""
    _, mark, tail = text.rpartition(fmt.final_open)
    tail = tail.strip()
    if not mark or not stopped or not tail.endswith(fmt.final_close):
        return None
    return tail[: len(tail) - len(fmt.final_close)].strip()


def choice_text(fmt, choice: int, graded: bool = False) -> str:
    """A choice as text: COMPACT: 1 -> "A", -1 -> "B"; graded, -3 -> "B3"."""
    return fmt.choices[choice < 0] + (str(abs(choice)) if graded else "")


def parse_choice(fmt, text: str, stopped: bool = True, graded: bool = False) -> int | None:
    """Which of two solutions a verification finally prefers: above 0 for A, below 0 for B, its size the strength where
    it is graded. Total. COMPACT: "3+5:8;=A" -> 1; graded, "=B3" -> -3; what is no choice alone, "=B", -> None."""
    sizes = STRENGTHS if graded else (1,)
    readable = {choice_text(fmt, sign * size, graded): sign * size for sign in (1, -1) for size in sizes}
    return readable.get(final_judgment(fmt, text, stopped))


def parse_scores(fmt, text: str, num: int, stopped: bool = True) -> list[int] | None:
    """The scores of `num` solutions that a verification ends with. Total: None unless they are exactly `num` whole
    numbers from 0 to top_score(num). COMPACT: "...;=10,3" -> [10, 3]."""
    said = final_judgment(fmt, text, stopped) or ""
    found = re.fullmatch(f"{re.escape(fmt.scores_open)}([0-9 ,]*){re.escape(fmt.scores_close)}", said)
    parts = [part.strip() for part in found[1].split(",")] if found else []
    scores = [int(part) for part in parts if re.fullmatch("[0-9]{1,2}", part)]
    readable = len(scores) == len(parts) == num and all(score <= top_score(num) for score in scores)
    return scores if readable else None


def _last_verdict(fmt, text: str) -> bool | None:
    correct, incorrect = text.rfind(fmt.correct), text.rfind(fmt.incorrect)
    return None if correct == incorrect else correct > incorrect
