"""
The text formats of a solution and of a verification, as data.

A solution is a list of reasoning steps and an answer; a verification is one judgment per step and a final one. Where
several solutions are judged together, the final judgment is a choice or a list of scores. `PAPER` uses the tags of RL
Tango (section 3). `LINES` has one step a line and "####" before the answer, as GSM8K is written: three quarters of a
solution's tokens, half of a verification's. `COMPACT` spends one character per mark, for tiny models with short
contexts. Marks are ordinary text, never special tokens.
"""
import re
from dataclasses import dataclass, replace
from string import Formatter

from nanochat.common import BadInput

# What flags can say in other words: a message before every prompt, and templates, each with all of its fields
PROMPTS = {"system_prompt": None, "generator_prompt": ("problem",),
           "verifier_prompt": ("problem", "solution", "num_steps")}


@dataclass(frozen=True)
class Format:
    """The marks of one format. Text between marks is free; an empty mark is absent."""
    name: str
    think_open: str
    step_open: str
    step_close: str
    think_close: str
    answer_open: str
    answer_close: str
    verification_open: str
    verification_close: str
    final_open: str
    final_close: str
    correct: str
    incorrect: str
    reserved: tuple[str, ...]  # what quoted text may not contain: the marks that only a verification has
    generator_prompt: str      # template with {problem}
    verifier_prompt: str       # template with {problem}, {solution} and {num_steps}
    refine_prompt: str         # template with {problem}, {solution} and {critique}: a second attempt
    reference_prompt: str      # template with {problem} and {answer}: a solution after it is scored against the answer
    # several solutions judged together
    choices: tuple[str, str]   # a final judgment that solution A, or B, is the better one
    scores_open: str           # around the scores in a final judgment
    scores_close: str
    listed: str                # template with {name} and {solution}: one of several in a prompt, named A, B, ...
    pair_prompt: str           # templates with {problem} and {solutions}: which of two is better
    solve_pair_prompt: str     # the same, after a solution of one's own
    graded_prompt: str         # which of two is better, and by how much
    scores_prompt: str         # a score of each
    # further roles: templates with {problem} and what else they name
    argue_prompt: str          # a solution that comes to a given {answer}
    propose_prompt: str        # a problem of one's own, after a {hint}: a problem to vary, or the answer it is to have
    first_prompt: str          # of two agents that work on one problem, what the first one is to write
    second_prompt: str         # and the second
    reason_prompt: str         # the next turn of a solution, after the {context} of the turns before
    condense_prompt: str       # what of a {document} serves a {query}
    # a search, in a solution or in a turn of one
    query_open: str
    query_close: str
    info_open: str
    info_close: str
    system_prompt: str = ""    # the system message before every prompt; "" for none

    def render_solution(self, steps: list[str], answer: str) -> str:
        """The text of a solution with these step bodies and this answer."""
        body = "".join(self.step_open + step + self.step_close for step in steps)
        return self.think_open + body + self.think_close + self.answer_open + answer + self.answer_close

    def render_verification(self, analyses: list[str], verdicts: list[bool], verdict: bool) -> str:
        """The text of a verification: per step its analysis and verdict, then the final verdict."""
        mark = {True: self.correct, False: self.incorrect}
        return self.render_judgment([a + mark[v] for a, v in zip(analyses, verdicts, strict=True)], mark[verdict])

    def render_judgment(self, analyses: list[str], final: str) -> str:
        """The text of a verification with these step bodies and this final judgment."""
        body = "".join(self.step_open + a + self.step_close for a in analyses)
        return (self.verification_open + body + self.verification_close + self.final_open + final + self.final_close)

    def render_scores(self, scores: list[int]) -> str:
        """Scores as a final judgment: "10,3"."""
        return self.scores_open + ",".join(map(str, scores)) + self.scores_close

    def step_spans(self, solution: str) -> list[tuple[int, int]]:
        """Character spans [start, end) of the reasoning steps, marks included, in order. Total: any text gives a list.
        Only steps that are closed and stand before the end of thinking and before the answer count."""
        ends = [solution.find(mark) for mark in (self.think_close, self.answer_open) if mark]
        return self.closed_steps(solution[: min((end for end in ends if end >= 0), default=len(solution))],
                                 self.think_open)

    def is_blank(self, body: str) -> bool:
        """Whether this is no step: a blank line, where a step is a line."""
        return self.step_close == "\n" and not body.strip(" \t\r")

    def closed_steps(self, text: str, opening: str) -> list[tuple[int, int]]:
        """Spans of the closed steps of `text` after the mark `opening`."""
        at, spans = text.find(opening) + len(opening) if opening in text else 0, []
        while (start := text.find(self.step_open, at)) >= 0:
            close = text.find(self.step_close, start + len(self.step_open))
            if close < 0:
                break
            at = close + len(self.step_close)
            if not self.is_blank(text[start:close]):
                spans.append((start, at))
        return spans

    def judgment_steps(self, text: str) -> list[str]:
        """The step bodies of a verification, verdicts included. COMPACT: "3+5:8T;8*2:5F;=F" -> ["3+5:8T", "8*2:5F"]."""
        body = text[: text.rfind(self.final_open)] if self.final_open in text else text
        return [self.step_body(body[start:end]) for start, end in self.closed_steps(body, self.verification_open)]

    def step_body(self, step: str) -> str:
        """A step's text without its marks."""
        return step[len(self.step_open): len(step) - len(self.step_close)]

    def step_bodies(self, solution: str) -> list[str]:
        """The texts of the steps that `step_spans` finds."""
        return [self.step_body(solution[start:end]) for start, end in self.step_spans(solution)]

    def answer(self, solution: str) -> str | None:
        """The answer: what stands between the first answer mark and the end of the text, or None. COMPACT:
        answer("3+5:8;8*2:6;=6") == "6". Text after the closing mark makes the answer unreadable (None)."""
        at = solution.find(self.answer_open)
        tail = solution[at + len(self.answer_open):].rstrip() if at >= 0 else None
        if tail is None or not tail.endswith(self.answer_close):
            return None
        return tail[: len(tail) - len(self.answer_close)].strip()

    def quote(self, text: str) -> str:
        """`text` with every reserved mark replaced by "?", so that quoted text can never forge a judgment. No mark
        holds a "?", so what is left cannot join up to a new one."""
        return re.sub("|".join(map(re.escape, self.reserved)), "?", text)


def with_prompts(fmt: Format, flags: dict) -> Format:
    """The format with those of PROMPTS that flags give. Raises BadInput for a template that lacks a field or has
    another one."""
    given = {name: flags[name] for name in PROMPTS if flags.get(name)}
    for name in given.keys() - {"system_prompt"}:
        check_template(f"--{name.replace('_', '-')}", given[name], PROMPTS[name])
    return replace(fmt, **given) if given else fmt


def check_template(where: str, text: str, fields: tuple[str, ...]) -> None:
    """Raises BadInput, which begins with `where`, for a template that has not just these fields, as plain names."""
    doubled = "a brace that is text is written {{ or }}"
    try:
        found = [(name, *how) for _, name, *how in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise BadInput(f"{where}: {error}: {doubled}") from None
    if other := [name for name, spec, conversion in found if name not in fields or spec or conversion]:
        raise BadInput(f"{where}: {{{other[0]}}} in it is none of {{{'}, {'.join(fields)}}}, without more; {doubled}")
    if missing := [name for name in fields if name not in {name for name, *_ in found}]:
        raise BadInput(f"{where}: has no {{{missing[0]}}}")


def prompts_in_words(solution_form: str, judgment_form: tuple[str, str], correct: str, incorrect: str) -> dict:
    """The templates of a format whose prompts are sentences. solution_form: how a solution looks; judgment_form: what
    stands before and after a final judgment; both, and the two marks, with braces doubled."""
    before, after = judgment_form
    return {
        "generator_prompt": f"{{problem}}\n\nSolve this step by step, in this form: {solution_form}",
        "verifier_prompt": "Problem: {problem}\n\nSolution: {solution}\n\nThe solution has {num_steps} steps. Analyse "
                           f"each, end each analysis with {correct} or {incorrect}, then judge the whole, in this "
                           f"form: {before}{correct.replace('CORRECT', '...')}{after}",
        "refine_prompt": "Problem: {problem}\n\nAn attempt that may be wrong: {solution}\n\n{critique}\n\nSolve the "
                         f"problem again, step by step, in this form: {solution_form}",
        "reference_prompt": "{problem}\n\nReference answer: {answer}\n\nA solution to compare with it:",
        "pair_prompt": "Problem: {problem}\n\n{solutions}Which solution is better? Analyse the steps of both, then "
                       f"choose, in this form: {before}[[A]] or [[B]]{after}",
        "solve_pair_prompt": "Problem: {problem}\n\n{solutions}Which solution is better? First solve the problem "
                             "yourself, compare both with what you found, then choose, in this form: "
                             f"{before}[[A]] or [[B]]{after}",
        "graded_prompt": "Problem: {problem}\n\n{solutions}Which solution is better, and is it slightly (1), clearly "
                         "(2) or much (3) better? Analyse the steps of both, then choose, in this form: "
                         f"{before}[[A]]2{after}",
        "scores_prompt": "Problem: {problem}\n\n{solutions}Name the principles to judge by, criticise each solution by "
                         "them, then score each from 0 to 10, or a single one 1 if it is right and 0 if not, in this "
                         f"form: {before}\\boxed{{{{...,...}}}}{after}",
        "argue_prompt": "{problem}\n\nArgue that the answer is {answer}: write a derivation that comes to it, step by "
                        f"step, in this form: {solution_form}",
        "propose_prompt": "{hint}\n\nWrite a new problem that fits what stands above: one that can be solved, has one "
                          "answer, and does not give it away. Write the problem alone.",
        "first_prompt": "{problem}\n\nYou and a partner solve this together, each without seeing what the other "
                        "writes. Write the first half.",
        "second_prompt": "{problem}\n\nYou and a partner solve this together, each without seeing what the other "
                         "writes. Write the second half.",
        "reason_prompt": "{problem}\n\nSo far: {context}\n\nGo on: either ask for what you need, <q>like this</q>, and "
                         f"stop, or solve the problem, in this form: {solution_form}",
        "condense_prompt": "{document}\n\nFrom this document, write down what serves the query {query}, and nothing "
                           "else.",
    }


PAPER = Format(
    name="paper",
    think_open="<think>", step_open="<step>", step_close="</step>", think_close="</think>",
    answer_open="<answer>\\boxed{", answer_close="}</answer>",
    verification_open="<step_verification>", verification_close="</step_verification>",
    final_open="<final_verification>", final_close="</final_verification>",
    correct="\\boxed{CORRECT}", incorrect="\\boxed{INCORRECT}",
    reserved=("<step_verification>", "</step_verification>", "<final_verification>", "</final_verification>",
              "\\boxed{CORRECT}", "\\boxed{INCORRECT}", "[[A]]", "[[B]]"),
    choices=("[[A]]", "[[B]]"), scores_open="\\boxed{", scores_close="}",
    listed="Solution {name}: {solution}\n\n",
    query_open="<q>", query_close="</q>", info_open="<i>", info_close="</i>",
    **prompts_in_words("<think><step>...</step>...</think><answer>\\boxed{{...}}</answer>",
                       ("<step_verification><step>...</step>...</step_verification><final_verification>",
                        "</final_verification>"), "\\boxed{{CORRECT}}", "\\boxed{{INCORRECT}}"),
)

LINES = replace(
    PAPER, name="lines",
    think_open="", step_open="", step_close="\n", think_close="", answer_open="#### ", answer_close="",
    verification_open="", verification_close="", final_open="#### ", final_close="",
    correct="[CORRECT]", incorrect="[INCORRECT]", reserved=("[CORRECT]", "[INCORRECT]", "[[A]]", "[[B]]"),
    **prompts_in_words("one step a line, then #### and the answer", ("one step a line, then #### ", ""), "[CORRECT]",
                       "[INCORRECT]"),
)

COMPACT = Format(
    name="compact",
    think_open="", step_open="", step_close=";", think_close="", answer_open="=", answer_close="",
    verification_open="", verification_close="", final_open="=", final_close="",
    correct="T", incorrect="F", reserved=("T", "F", "A", "B", "|"),
    generator_prompt="{problem}", verifier_prompt="{problem}|{solution}|{num_steps}",
    refine_prompt="{solution}|{critique}|{problem}",  # the problem last, as a first attempt has it
    reference_prompt="{answer}|{problem}",
    choices=("A", "B"), scores_open="", scores_close="", listed="|{solution}",
    pair_prompt="{problem}{solutions}|A", solve_pair_prompt="{problem}{solutions}|WA",
    graded_prompt="{problem}{solutions}|AS", scores_prompt="{problem}{solutions}|S",
    argue_prompt="{answer}|{problem}", propose_prompt="{hint}|P",
    first_prompt="{problem}|L", second_prompt="{problem}|R",
    reason_prompt="{context}|G|{problem}", condense_prompt="{document}|{query}|C",
    query_open="<", query_close=">", info_open="(", info_close=")",
)

FORMATS = {fmt.name: fmt for fmt in (PAPER, LINES, COMPACT)}
IN_WORDS = {fmt.name: fmt for fmt in (PAPER, LINES)}
