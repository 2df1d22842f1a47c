"""
Whether an answer is the gold one: grade(completion="... so \\boxed{0.5}", gold="\\frac{1}{2}") is True.

Answers are compared as text, then as numbers, both here and at once, then by math-verify in worker processes with a
time and a memory limit. What is decided for all of them:

- A number stands for itself: 0.333333 is not 1/3 (and 3.14 is not pi); 1,000, 1000.0 and 10^3 are the same.
- A percent sign is a unit or a hundredth: 50\\% is 50 and is 1/2. Other units, degrees and currencies are left out, but
  two known ones that differ, or differ in their power, are different answers (5 cm, 5 inches, 5 cm^2).
- A base is part of a gold: 10_2 is not 10_3 and not 2; an answer may leave it out. An answer of another base than a
  plain gold's ten is wrong.
- "x = 5" and "5" are the same, "x = 5" and "y = 5" are not. A left side is left out where it is the name of one thing
  (x, f(x), \\angle ABC, \\sin x) that does not occur on the right. Any other equation with more sides than the gold has
  is a chain: all of its sides must be the gold.
- A list has as many entries as the gold's, each as often. Several named values are compared by name. A comma without a
  space before three digits is of a number, 60,120; in brackets and with a space it is of a list.
- Inequalities on one name are the numbers that they leave: x<-2 or x>3, a union; x>2, x<5, the interval, as a comma is
  an "and" unless nothing is left.
- Words are compared as words, case aside: \\text{(B)}, B and (b) are the same; a time of day is words. So are two
  answers of letters only: AB is not BA. In a formula R and r are two letters. The letter of a choice before a value,
  (D) 27, is left out, or must be the gold's; a gold with one may be answered by either.
- i is the imaginary unit where that makes two answers equal.
- What has the gold's value is right, in whatever form: the expression that was to be simplified, copied, too, which
  RL does not count (`is_copied` in tasks/common.py). But an inequality that is not solved is no interval.
"""
import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache

import tasks.grading_worker as grading_worker  # `from tasks` would be the package, which imports this
from nanochat.workers import NoReply, Workers
from tasks.answers import (DECIMAL, EQUALS, MAX_ANSWER, NAME, RELATION, SYMBOL, Reading, boxed, extracted, is_bracketed,
                           parts, plain_number, read, spelled, tidy, unspaced)

NUM_WORKERS = 2
WORKERS = Workers(grading_worker, NUM_WORKERS, "NANOCHAT_GRADING_WORKERS")


def compare(gold: Reading, answer: Reading) -> bool | None:
    """Whether the answer is the gold one, as far as it is plain here; None where it takes math-verify."""
    if gold.label and answer.label and gold.label != answer.label:
        return False
    if gold.label and spelled(answer.body) == gold.label.lower():
        return True
    if answer.label and not gold.label and re.fullmatch("[a-h]", spelled(gold.body)):
        return False  # neither "A) B" nor "(B) 5" is the choice B
    if gold.words is not None:
        if len(gold.words) == 1 and (answer.name or "'" in answer.body):
            return False  # neither "A=B" nor "B'" is the choice B
        return gold.words == (answer.words if answer.words is not None else spelled(answer.body))
    if answer.words is not None and (gold.value is not None or gold.base):
        return False
    if (re.fullmatch("[A-Za-z]{2,}", gold.body) and not gold.name
            and apart(gold.body, answer.body) == [gold.body, answer.body]  # Rr is a product
            and (answer.words is not None or re.fullmatch("[A-Za-z]{2,}", answer.body))):
        # words, or points and names of two or three letters: no products
        return spelled(gold.body) == spelled(answer.body)
    if gold.units - answer.units and answer.units - gold.units:
        return False
    if gold.units < answer.units and not gold.units <= {"dollar", "cent", "euro", "pound"} and gold.units:
        return False  # 5 cm/s is not 5 cm; prices leave out what they are of
    if gold.percent and answer.units or answer.percent and gold.units:
        return False
    same_name = not (gold.name and answer.name) or gold.name == answer.name
    if gold.base:
        return (same_name and answer.base in (gold.base, None) and not answer.units
                and (answer.base or (answer.body.upper(), gold.base[1])) == gold.base)
    if answer.base and gold.value is not None:
        return same_name and answer.base[1] == 10 and plain_number(answer.base[0]) == (gold.value, False)
    if is_bracketed(gold.body) and (answer.either and not gold.either or answer.name and parts(answer.body)[1:]):
        return False  # "1 or 2" and "x=1, x=2" are no point
    if RELATION.search(gold.body) and gold.either != answer.either and (gold.both or answer.both):
        return False  # x<1 or x>2 is not x<1 and x>2
    if gold.body == answer.body and same_name:
        return True
    if gold.value is not None and answer.value is not None:
        factors = {1} if gold.percent == answer.percent else {1, Fraction(1, 100) if answer.percent else 100}
        if answer.percent and not gold.percent and abs(gold.value) < 1:
            factors.remove(1)  # 0.5 is 50\\%, and 50 may be; 0.5\\% is less
        return same_name and any(gold.value == answer.value * factor for factor in factors)
    return False if surely_different(gold, answer) else None


# what an answer can only have where its gold does: it goes on, implies, denies, is something of the right one, has a
# base or is transposed, which math-verify would drop; a derivative, which it would take
ONLY_LIKE_GOLD = re.compile(
    r"\\[lcv]?dots(?![a-z])|\\(?:Rightarrow|rightarrow|Leftrightarrow|implies|iff|to|ne|not|neg|notin|equiv)(?![a-z])"
    r"|\\frac\{d[A-Za-z]?\}\{d|\^\{?T|\^\\circ ?(?=[0-9A-Za-z(])"
    r"|(?<=[0-9%)\]])['\"]+$|\[-\\infty|\\infty ?\]|\\\{[^{}]*\\\{|(?<=[0-9})])_\{?\w*")


PRIMED = re.compile(r"(?<=[A-Za-z}])'+")
# what a gold has that is more than some values: of an interval, a region, a condition
MORE_THAN_VALUES = re.compile(r"[(\[<>]|\\(?:le|ge|ne|cup|cap|setminus|infty|mid|mathbb)(?![a-z])")
CAPITALS = re.compile(r"\\(?:Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega)(?![a-z])")


def surely_different(gold: Reading, answer: Reading) -> bool:
    """Whether two answers differ in a way that math-verify does not see."""
    if set(CAPITALS.findall(gold.body)) != set(CAPITALS.findall(answer.body)):
        return True
    if re.search(r"""[0-9](?: |\\text\{\}|['"])+[0-9]""", answer.body):
        return True  # "1 2" and "1'2" are nothing, least of all 3 and 12
    if (set(PRIMED.findall(gold.body)) != set(PRIMED.findall(answer.body))
            or gold.name and answer.name and gold.name.count("'") != answer.name.count("'")):
        return True
    if re.search(r"[<>]|\\(?:le|ge|ne|infty)(?![a-z])", answer.body) and not MORE_THAN_VALUES.search(gold.body):
        return True
    if EQUALS.search(gold.body) and re.search(r"\\emptyset|\\\{\\\}", answer.body):
        return True  # an equation without a real solution
    if not RELATION.search(gold.body) and any(is_unsolved(part) for part in parts(answer.body)):
        return True  # math-verify solves x^2<4, which is then (-2,2)
    if "\\pm" in gold.body and is_bracketed(answer.body) and not is_bracketed(gold.body):
        return True  # (-1,1) is no pair of values
    names = bounded(answer.body)
    if names and (bounded(gold.body) not in (names, set()) or answer.either and answer.both):
        return True  # nor is it known what is joined first in x<1 or x>2 and x>3
    golds, marks = ({mark.replace("{", "") for mark in ONLY_LIKE_GOLD.findall(side.body)} for side in (gold, answer))
    if marks - golds - ({"\\ne"} if names else set()):
        return True
    if re.search(r"\\in ?[(\[]", answer.body) and not re.search(r"[(\[<>]|\\[lg]e(?![a-z])", gold.body):
        return True  # of an interval there are more than two
    if (EQUALS.search(answer.body) and not EQUALS.search(gold.body) and not is_region(answer.body)
            and not (gold.name and parts(answer.body, EQUALS)[1:])):
        return True  # an equation within a list or a set
    return differ_as_lists(gold, answer)


def is_region(body: str) -> bool:
    """Whether several statements, an inequality among them, are said of one name."""
    items = parts(body)
    return (len(items) > 1 and len(bounded(body)) == 1
            and all(RELATION.search(item) or EQUALS.search(item) for item in items))


def bounded(body: str) -> set[str]:
    """The names that inequalities are about: "x<1,x>2" -> {"x"}."""
    sides = [side.strip() for item in parts(body) if RELATION.search(item) for side in parts(item, RELATION)]
    return {side for side in sides if NAME.fullmatch(side)}


def is_unsolved(text: str) -> bool:
    """Whether an inequality is anything but one name with its bounds: x^2<4 and x<2x are, 1<x<2 and x>1 are not."""
    sides = [side.strip() for side in parts(re.sub("(?<=[<>])=", "", text), RELATION)]
    names = [side for side in sides if NAME.fullmatch(side)]
    if len(sides) == 1 or len(names) != 1:
        return len(sides) > 1
    sides.remove(names[0])
    return re.search(rf"(?<![A-Za-z\\]){re.escape(names[0])}(?![A-Za-z])", ",".join(sides)) is not None


def differ_as_lists(gold: Reading, answer: Reading) -> bool:
    """Whether two answers of which one at least is a list, a set, or a point differ in what can be counted."""
    golds, answers = parts(gold.body), parts(answer.body)
    is_list = [len(golds) > 1, len(answers) > 1]
    if is_list[0] and answer.value is not None or is_list[1] and gold.value is not None:
        return True  # "5,5" and "1, 234" are no numbers
    if "," in gold.name + answer.name and gold.name and answer.name and gold.name != answer.name:
        return True
    if is_list[0] and "\\pm" not in gold.body + answer.body:
        if is_list[1] and len(golds) != len(answers) and not bounded(gold.body):
            return True
        inner = answers if is_list[1] else parts(re.sub(r"^(?:\\?\{|\()|(?:\\?\}|\))$", "", answer.body))
        if len(set(golds)) < len(golds) and Counter(map(plain_or_text, golds)) != Counter(map(plain_or_text, inner)):
            return True
    if answer.either and "," in answer.body and not is_list[1] and "\\cup" not in answer.body:
        return True  # \{1 or 2\} has one of them
    if is_list[1] and "\\{" in answer.body and not (is_list[0] and "\\{" in gold.body):
        return True  # \{1\},\{2\} is two sets
    bodies = [re.sub(rf"^{SYMBOL}\\in(?![a-z]) ?", "", body) for body in (gold.body, answer.body)]
    kinds = {"set" if body.startswith("\\{") and body.endswith("\\}") else "point"
             if is_bracketed(body) else ""
             for body in bodies}
    return kinds == {"set", "point"}  # \{1,2\} is not (1,2)


def plain_or_text(text: str) -> Fraction | str:
    return (plain_number(text) or (text, False))[0]


def links(gold: Reading, answer: Reading) -> list[Reading]:
    """What must all be the gold: the answer, or the sides of its equation where it has more of them than the gold."""
    sides = [answer.body] if is_region(answer.body) else parts(answer.body, EQUALS)
    num_of_gold = bool(gold.name) + len(parts(gold.body, EQUALS))
    return [answer] if len(sides) == 1 or bool(answer.name) + len(sides) <= num_of_gold else [*map(read, sides)]


def grade(*, completion: str, gold: str, extract: tuple[str, ...] = ("boxed", "hash")) -> bool | None:
    """Whether the answer of a completion is the gold one: True, False, or None where nobody can tell. extract: the
    EXTRACTORS to try, in this order. A completion without an answer that can be read (no box, brackets that do not
    close, nothing in them, more than MAX_ANSWER characters) is False: silence must not pay. None: the gold cannot be
    parsed, or the worker ran out of time or memory or died. Such a None is not remembered: the same pair is tried
    again. May be called from several threads; each call takes at most TIMEOUT seconds of a worker, plus its start where
    it must be replaced."""
    answer = extracted(completion, extract)
    if answer is None or not tidy(answer):
        return False
    if len(gold) > MAX_ANSWER or not tidy(gold):
        return None
    if unspaced(gold) == unspaced(answer):
        return True
    if not is_closed(tidy(answer)):
        return False
    if not is_closed(tidy(gold)):
        return None
    gold_reading, answer_reading = read(gold), read(answer)
    chain = links(gold_reading, answer_reading)
    verdicts = [compare(gold_reading, link) for link in chain]
    if False in verdicts or any(compare(chain[0], link) is False for link in chain[1:]):
        return False
    try:
        verdicts = [verified(*apart(for_worker(gold_reading), for_worker(link))) if verdict is None else verdict
                    for link, verdict in zip(chain, verdicts, strict=True)]
    except NoReply:
        return None
    return False if False in verdicts else None if None in verdicts else True


def said_alike(gold: str, answer: str) -> bool:
    """Whether an answer is the gold's text, but for spelling, name, unit, base and label."""
    golds, answers = read(gold), read(answer)
    return (answers.body in (golds.body, golds.base and golds.base[0])
            or golds.words is not None and golds.words == spelled(answers.body))


ORDINARY = re.compile(r"(?:\\frac(?=\{[^{}]+(?:\{[^{}]+\}[^{}]*)*\}\{[^{}])|\\sqrt(?=\{[^{}])"
                      r"|\\(?:pi|infty|cup|circ|pm|sin|cos|tan|cot|theta|le)(?![A-Za-z])"
                      r"|\\(?:begin|end)\{pmatrix\}|\\[\\{}]"
                      r"|[-+](?![-+*/^_=,:&!)\]}]|$)|[*/^_=,:&](?![*/^_=,:&!)\]}]|$)|[0-9A-Za-z.{}()\[\] ])+")


def readable(gold: str) -> bool:
    """Whether a gold can be graded: it can be written in a box, and is words, a number, or what math-verify can parse.
    math-verify takes tens of milliseconds, so it is only asked about what holds other than well-known commands and
    signs, in order and closed."""
    if len(gold) > MAX_ANSWER or boxed(f"\\boxed{{{gold}}}") != gold or not tidy(gold) or not is_closed(tidy(gold)):
        return False
    reading = read(gold)
    if reading.words is not None or reading.value is not None or reading.base:
        return reading.words != ""
    if re.search("[0-9] [0-9]", reading.body):
        return False
    if is_ordinary(reading.body):
        return True
    try:
        return verified(for_worker(reading))
    except NoReply:
        return False


def is_ordinary(body: str) -> bool:
    """Whether a formula is of the common kind that math-verify is known to parse."""
    return is_closed(body) and ORDINARY.fullmatch(body) is not None


def is_closed(text: str) -> bool:
    """Whether a tidy answer has as many opening brackets as closing ones, [0,1) counted as closed."""
    return all(sum(map(text.count, opening)) == sum(map(text.count, closing))
               for opening, closing in (("([", ")]"), ("{", "}")))


TOKEN = re.compile(r"\\(?:math[a-z]+|text|operatorname|begin|end)\{(?![A-Za-z]\})[^{}]*\}|\\[A-Za-z]+|([A-Za-z])")
FREE_LETTERS = "quvwkbjzpyxthmncars"  # that are the names of no functions and constants


def apart(gold: str, answer: str) -> list[str]:
    """Both texts with other letters for capitals that stand beside their small ones, in one of them or one in each:
    math-verify takes R and r for the same. Of a single letter the case is free. And for d where nothing is derived or
    integrated: it takes dt for a differential."""
    letters = {match[1] for text in (gold, answer) for match in TOKEN.finditer(text) if match[1]}
    alone = len(gold) == len(answer) == 1
    capitals = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters and not alone)
    small = {letter.lower() for letter in letters}
    if "d" in small and not re.search(r"\\int|\\frac\{d", gold + answer):
        capitals.append("d")
    new = dict(zip(capitals, [letter for letter in FREE_LETTERS if letter not in small], strict=False))
    return [TOKEN.sub(lambda match: new.get(match[1], match[0]), text) for text in (gold, answer)]


def for_worker(reading: Reading) -> str:
    body = reading.body
    if reading.value is not None and not re.fullmatch(rf"-?{DECIMAL}%?", body):  # which it may not be able to read
        body = f"\\frac{{{reading.value.numerator}}}{{{reading.value.denominator}}}" + "%" * reading.percent
    items = [both_signs(part) for part in parts(body)]
    if is_region(body) and reading.either != reading.both:
        return (" \\lor " if reading.either else " \\land ").join(items)
    body = ",".join(items).replace("%", "\\%").replace(",", ", ")  # 60,120 would be a number
    return f"{reading.name}={body}" if reading.name and not parts(body)[1:] and "," not in reading.name else body


def both_signs(text: str) -> str:
    """A text with its plus-minus signs as two values: math-verify sees those alone that are in no fraction."""
    if "\\pm" not in text or text.startswith("\\{"):
        return text
    return ",".join(re.sub(r"\\mp(?![a-z]) ?", below, re.sub(r"\\pm(?![a-z]) ?", above, text))
                    for above, below in ("+-", "-+"))


@lru_cache(maxsize=10_000)  # a NoReply is not kept
def verified(gold: str, answer: str | None = None) -> bool | None:
    """math-verify's word, None where it cannot parse the gold; without an answer, whether it can."""
    return WORKERS.ask({"gold": gold, "answer": answer}, grading_worker.TIMEOUT)
