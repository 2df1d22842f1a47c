"""
Whether an answer is the gold one: grade(completion="... so \\boxed{0.5}", gold="\\frac{1}{2}") is True.

Answers are compared as text, then as numbers, both here and at once, then by math-verify in worker processes with a
time and a memory limit. What is decided for all of them:

- A number stands for itself: 0.333333 is not 1/3 (and 3.14 is not pi); 1,000, 1000.0 and 10^3 are the same.
- A percent sign is a unit or a hundredth: 50\\% is 50 and is 1/2. Other units, degrees and currencies are left out, but
  two known ones that
  differ, or differ in their power, are different answers (5 cm, 5 inches, 5 cm^2).
- A base is part of a gold: 10_2 is not 10_3 and not 2; an answer may leave it out. An answer of another base than a
  plain gold's ten is wrong.
- "x = 5" and "5" are the same, "x = 5" and "y = 5" are not.
- Words are compared as words, case aside: \\text{(B)}, B and (b) are the same; a time of day is words. So are two
  answers of letters only: AB is not BA.
- i is the imaginary unit where that makes two answers equal.
"""
import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from tasks.grading_worker import WORKERS, Unscorable

MAX_ANSWER = 1000  # characters; what is longer is no answer, and no gold


# Finding the answer in a completion

def boxed(completion: str) -> str | None:
    """What the last \\boxed{...} or \\fbox{...} holds; None where its braces do not close."""
    start = max((match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", completion)), default=None)
    if start is None:
        return None
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(completion, start, start + MAX_ANSWER + 1):
        depth += {"{": 1, "}": -1}.get(match[0], 0)  # \{ and \} are signs, not braces
        if depth == 0:
            return completion[start: match.start()]
    return None


def hash_mark(completion: str) -> str | None:
    """What stands behind the last "####" on its line; None where there is none."""
    _, mark, rest = completion.rpartition("####")
    return rest.strip().partition("\n")[0] if mark else None


def last_number(completion: str) -> str | None:
    """The last plain number or fraction of two: "it is 3 or 1/2." -> "1/2". None where there is none."""
    found = re.findall(r"(?:(?<![\w.)\]}])-)?"
                       r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
                       r"(?:/[0-9]+)?", completion)
    return found[-1] if found else None


EXTRACTORS = {"boxed": boxed, "hash": hash_mark, "number": last_number}


def extracted(completion: str, extract: tuple[str, ...] = ("boxed", "hash")) -> str | None:
    """The answer by the first of these extractors that finds one; None where none does or it is longer than
    MAX_ANSWER."""
    for name in extract:
        answer = EXTRACTORS[name](completion)
        if answer is not None and answer.strip():
            return answer if len(answer) <= MAX_ANSWER else None
    return None


# One spelling

SIGNS = str.maketrans({"−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "°": "^\\circ ",
                       "∞": "\\infty ", "∪": "\\cup ", "≤": "\\le ", "≥": "\\ge ", "±": "\\pm ", "\u00a0": " ",
                       "′": "'", "%": "\\%", "√": "\\sqrt ", "∅": "\\emptyset ", "€": "", "£": "",
                       **{"½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"[k]: f"\\frac{{{'112131234151357'[k]}}}{{{'233445555668888'[k]}}}"
                          for k in range(15)}})
WIDE = {ord("０") + digit: str(digit) for digit in range(10)}
POWERS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
CURRENCIES = [(re.compile(rf"\s*-?\s*{sign}"), unit)
              for sign, unit in ((r"\\\$", "dollar"), (r"(?:€|\\euro(?![a-z]))", "euro"), (r"(?:£|\\pounds)", "pound"))]
SPELLINGS = {
    **dict.fromkeys(["!", "(", ")", "[", "]", "$", "left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr",
                     "Bigl", "Bigr", "displaystyle", "textstyle"], ""),
    **dict.fromkeys([",", ":", ";", ">", " ", "\n", "quad", "qquad"], " "),
    **dict.fromkeys(["dfrac", "tfrac", "cfrac"], "\\frac"),
    **dict.fromkeys(["mbox", "mathrm", "mathbf", "mathit", "textbf", "textit", "textrm", "textnormal", "textsf",
                     "mathsf"], "\\text"),
    **dict.fromkeys(["euro", "pounds"], ""), "varnothing": "\\emptyset",
    "leq": "\\le", "geq": "\\ge", "neq": "\\ne", "lbrace": "\\{", "rbrace": "\\}", "degree": "^\\circ", "%": "%",
}
DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
GROUPED = re.compile(r"([^,(\[]*?)(?<![0-9.])([1-9][0-9]{0,2}(?:,[0-9]{3})+)(?![0-9])([^,(\[]*)", re.DOTALL)
REWRITES = [(re.compile(pattern), new) for pattern, new in [
    (r"\s+", " "),
    (r"\\text\s*\{\s*([^{}]*?)\s*\}", r"\\text{\1}"),
    (r",?\s*\\text\{,?\s*(?:and|or)\}|,?\s+(?:and|or)\s+", ","),
    (r"\\text\{(?:percent|pct)\}|(?<=[0-9])\s*(?:percent|pct)\b", "%"),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ) ?", r"^\\circ "),
    (r"\\text\{([^{}^]*)\^([0-9])\}", r"\\text{\1}^\2"),
    (r"\\log ?_ ?([0-9])", r"\\log_{\1}"),
    (r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", ""),  # a space counts in "1 1/2", "two lines" and "\pi r" only
    (rf"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^[0-9])? ?[({{]?)({DECIMAL})\^\\circ ?", r"\1\\frac{\2\\pi}{180}"),
    (r"\\frac ?([0-9]|\\pi) ?([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
    (r"\\frac ?([0-9])(?=\{)", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})([0-9])(?![0-9])", r"\1{\2}"),
    (r"\\sqrt ?([0-9])(?![0-9])", r"\\sqrt{\1}"),
    (r"\^\{(\w)\}(?!\w)", r"^\1"),
    (r"^\\approx|^=", ""),
]]


def tidy(text: str) -> str:
    """An answer in one spelling of spaces, fractions, thousands and wrappers; equal ones mean the same."""
    text = re.sub("⁻?[⁰¹²³⁴-⁹]+", lambda match: f"^{{{match[0]}}}" if match[0][1:] else "^" + match[0],
                  text.translate(WIDE))
    text = text.translate(POWERS)
    text = re.sub(r"√\s*([0-9.]*[0-9]|[A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=[0-9])(?:\{,\}|,\\! ?|\\,)(?=[0-9]{3}(?![0-9]))", "", text)  # signs that only thousands have
    text = re.sub(r"^\s*\*\*(.*)\*\*\s*$", r"\1", text, flags=re.DOTALL)
    # the only commas there are, and in no bracket: (1,234) is a point, "1, 234" a list
    if grouped := GROUPED.fullmatch(text):
        text = grouped[1] + grouped[2].replace(",", "") + grouped[3]
    text = re.sub(r"(?<!\\)%", r"\\%", text).translate({sign: new for sign, new in SIGNS.items() if sign != ord("%")})
    text = re.sub(r"\\(\\|[A-Za-z]+|.)", lambda match: SPELLINGS.get(match[1], match[0]), text, flags=re.DOTALL)
    text = re.sub(r"[$~]", " ", text.replace("{,}", ","))
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    return text.strip().rstrip(".,;:")


def unspaced(text: str) -> str:
    """The text as it is but for spaces at its ends and at commas, so that 70,110 may be two angles where a gold has
    them so."""
    return re.sub(r" *, *", ",", text.strip())


# Reading an answer

NUMBER = re.compile(rf"(?P<sign>[-+]?)(?:(?P<whole>[0-9]+) ?(?=\\frac|(?<= )[0-9]+/))?"
                    rf"(?:\\frac\{{(?P<top>-?{DECIMAL})\}}\{{(?P<bottom>-?{DECIMAL})\}}"
                    rf"|(?P<left>{DECIMAL})(?:/(?P<right>{DECIMAL})|[eE](?P<e>[-+]?[0-9]{{1,3}})"
                    rf"|(?:\\times|\\cdot|\*) ?10\^(?:(?P<ten>[0-9])|\{{(?P<tens>[-+]?[0-9]{{1,3}})\}}))?)"
                    r"(?P<percent>%?)")
REPEATING = re.compile(r"(-?)([0-9]*)\.([0-9]*)\\(?:overline|bar)(?:\{([0-9]+)\}|([0-9]))(%?)")
BASED = re.compile(r"(?:\\text\{)?(-?[0-9A-Za-z.]+)\}?_\{?([0-9]{1,2})\}?")
NAMED = re.compile(r"((?:\\[a-z]+|[A-Za-z]{1,2})(?:_\w|_\{\w+\})?|[a-z]\([a-z]\))=([^=<>]+)")
TIME = re.compile(r"[0-9]{1,2}(?::[0-9]{2})*[ap]m")
WORDS = re.compile(r"[A-Za-z][A-Za-z ,.'()-]*")
NO_UNIT = set("""and or to of than hundred thousand million billion trillion dozen half
pi sin cos tan cot sec csc log ln exp mod max sqrt infinity""".split())  # noqa: SIM905
KNOWN_UNITS = {word: line.split()[0] for line in """\
cm centimeter centimeters centimetre centimetres
mm millimeter millimeters millimetre millimetres
km kilometer kilometers kilometre kilometres
m meter meters metre metres
inch in inches
foot feet ft
yard yards yd
mile miles mi mph
second seconds sec s
minute minutes min
hour hours hr hrs h
day days
week weeks
month months
year years
cent cents
dollar dollars usd
euro euros
degree degrees
g gram grams gm
kg kilogram kilograms
pound pounds lb lbs
ounce ounces oz
gallon gallons
liter liters litre litres
ml milliliter milliliters""".splitlines() for word in line.split()}


class Reading(NamedTuple):
    """What an answer says, as far as that is plain to see."""
    body: str                # the tidy answer without name and unit
    name: str                # "x" of "x = 5", or ""
    units: frozenset[str]    # the known units that it has
    value: Fraction | None   # the body as a number, a percentage as its number of percents
    percent: bool
    base: tuple[str, int] | None  # ("1010", 2) of "1010_2"
    words: str | None        # the spelling of an answer in words, None where it is none


def plain_number(text: str) -> tuple[Fraction, bool] | None:
    """The value of a tidy number and whether it has a percent sign; None where it is anything else. Takes time linear
    in the text."""
    if match := REPEATING.fullmatch(text):
        sign, whole, start, *period, percent = match.groups("")
        period = "".join(period)
        value = Fraction(int(whole + start + period) - int(whole + start or 0),
                         10 ** len(start) * (10 ** len(period) - 1))
        return -value if sign else value, bool(percent)
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    exponent = int(match["e"] or match["ten"] or match["tens"] or 0)
    top, bottom = (Fraction(match[a] or match[b] or 1) for a, b in (("top", "left"), ("bottom", "right")))
    if bottom == 0 or match["whole"] and not 0 < top < bottom:
        return None  # 2\frac{5}{2} may be meant as a product
    value = Fraction(match["whole"] or 0) + top / bottom * Fraction(10) ** exponent
    return -value if match["sign"] == "-" else value, bool(match["percent"])


def spelled(text: str) -> str:
    """Words in one spelling: "\\text{(B)}" -> "b", "1:03 \\text{ P.M.}" -> "1:03pm"."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).casefold()
    text = re.sub(r"(?<![0-9]) | (?![0-9])|\.(?![0-9])|['\"]", "", text)
    return text[1:-1] if re.fullmatch(r"\([^()]*\)", text) else text


def words_of(text: str) -> str | None:
    """The spelling of a tidy answer in words; None of numbers and formulas. Letters alone are words from four on: abc
    may be a product."""
    wrapped = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    longest = max((word for word in re.findall("[A-Za-z]+", text)), key=len, default="")
    if (wrapped or TIME.fullmatch(spelled(text))
            or WORDS.fullmatch(text) and len(longest) > 3 and longest.lower() not in NO_UNIT):
        return spelled(text)
    return None


def without_unit(text: str) -> tuple[str, frozenset[str]]:
    """A tidy answer without the unit at its end, and the known units of that: "5\\text{ sq. cm}" -> ("5", {"cm^2"})."""
    if text.endswith("^\\circ"):
        return text[: -len("^\\circ")], frozenset(["degree"])
    match = (re.fullmatch(r"(.*[^\\ ,(]) ?\\text\{([A-Za-z][A-Za-z ./-]*)\}(?:\^([0-9]))?", text)
             or re.fullmatch(r"(.*[0-9}%)])( ?[A-Za-z][A-Za-z .]*(?:/[A-Za-z]+)?)(?:\^([0-9]))?", text))
    if match is None:
        return text, frozenset()
    words = re.findall("[a-z]+", match[2].lower())
    known = frozenset(KNOWN_UNITS[word] + power_of(before, after) for before, word, after in
                      zip(["", *words], words, [*words[1:], match[3] or ""], strict=False) if word in KNOWN_UNITS)
    # 5x, 5 ab and 5m are products unless they are marked as text; "5 eggs" and "5cm" are not
    if "\\text" in match[0][match.end(1):]:
        is_unit = known or len(words[0]) > 1
    elif known:
        is_unit = len(words[0]) > 1 and ("/" not in match[2] or words[-1] in KNOWN_UNITS)
    else:
        is_unit = (len(words[0]) > 2 and "/" not in match[2] and match[0][match.end(1):] == match[2]
                   and match[2][0] == " " and plain_number(match[1]))
    return (match[1], known) if is_unit and not NO_UNIT.intersection(words) else (text, frozenset())


def power_of(before: str, after: str) -> str:
    """The power of a unit between these words, the last of them its exponent: "^2" in "sq cm", "cm squared" and
    "cm^2"."""
    power = ("2" if before in ("sq", "square") or after == "squared"
             else "3" if before in ("cu", "cubic") or after == "cubed" else after)
    return f"^{power}" if power.isdigit() and power != "1" else ""


@lru_cache(maxsize=10_000)
def read(text: str) -> Reading:
    """The reading of an answer, from its raw text."""
    whole = tidy(text)
    if (wrapped := re.fullmatch(r"\\text\{([^{}]*)\}", whole)) and plain_number(wrapped[1]):
        whole = wrapped[1]
    words = words_of(whole)
    if words is not None:
        return Reading(whole, "", frozenset(), None, False, None, words)
    name, body = match.groups() if (match := NAMED.fullmatch(whole)) else ("", whole)
    body, units = without_unit(body)
    units |= {unit for sign, unit in CURRENCIES if sign.match(text)}
    based = BASED.fullmatch(body)
    base = (based[1].upper(), int(based[2])) if based and is_based(based[1], int(based[2])) else None
    value, percent = plain_number(body) or (None, False)
    return Reading(body, name.casefold(), units, value, percent, base, None)


def is_based(digits: str, base: int) -> bool:
    """Whether these are the digits of a number in this base; a single letter is the name of a variable."""
    try:
        int(digits.replace(".", "", 1), base)
    except ValueError:
        return False
    return any(sign.isdigit() for sign in digits) or digits.isupper() and len(digits) > 1


# Comparing

def compare(gold: Reading, answer: Reading) -> bool | None:
    """Whether the answer is the gold one as far as that can be told here, None where it takes math-verify. What it
    tells is final."""
    if gold.words is not None:
        return gold.words == (answer.words if answer.words is not None else spelled(answer.body))
    if answer.words is not None and (gold.value is not None or gold.base):
        return False
    if (re.fullmatch("[A-Za-z]{2,}", gold.body) and not gold.name
            and (answer.words is not None or re.fullmatch("[A-Za-z]{2,}", answer.body))):
        # words, or points and names of two or three letters: no products
        return spelled(gold.body) == spelled(answer.body)
    if gold.units - answer.units and answer.units - gold.units:
        return False
    same_name = not (gold.name and answer.name) or gold.name == answer.name
    if gold.base:
        return (same_name and answer.base in (gold.base, None)
                and (answer.base or (answer.body.upper(), gold.base[1])) == gold.base)
    if answer.base and gold.value is not None:
        return same_name and answer.base[1] == 10 and plain_number(answer.base[0]) == (gold.value, False)
    if gold.body == answer.body and same_name:
        return True
    if gold.value is not None and answer.value is not None:
        factors = {1} if gold.percent == answer.percent else {1, Fraction(1, 100) if answer.percent else 100}
        return same_name and any(gold.value == answer.value * factor for factor in factors)
    return False if surely_different(gold, answer) else None


def surely_different(gold: Reading, answer: Reading) -> bool:
    """Whether two answers differ in a way that math-verify does not see."""
    if re.search("[0-9] [0-9]", answer.body):
        return True  # "1 2" is nothing, least of all 3
    if gold.value is not None and re.search("[0-9]_", answer.body):
        return True  # 3_2 is no number, and it would drop the base
    lists = ["," in re.sub(r"[(\[{][^()\[\]{}]*[)\]}]", "", reading.body) for reading in (gold, answer)]
    if lists[0] and answer.value is not None or lists[1] and gold.value is not None:
        return True  # "5,5" and "1, 234" are no numbers
    kinds = {"set" if body.startswith("\\{") and body.endswith("\\}") else "point"
             if re.fullmatch(r"[(\[].*[)\]]", body) else ""
             for body in (gold.body, answer.body)}
    return kinds == {"set", "point"}  # \{1,2\} is not (1,2)


def grade(*, completion: str, gold: str, extract: tuple[str, ...] = ("boxed", "hash")) -> bool | None:
    """Whether the answer of a completion is the gold one: True, False, or None where nobody can tell.

    extract: the EXTRACTORS to try, in this order. A completion without an answer that can be read (no box, brackets
    that do not close, nothing in them, more than MAX_ANSWER characters) is False: silence must not pay. None: the gold
    cannot be parsed, or the worker ran out of time or memory or died. Such a None is not remembered: the same pair is
    tried again. May be called from several threads; each call takes at most TIMEOUT seconds of a worker, plus its start
    where it must be replaced.
    """
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
    verdict = compare(gold_reading, answer_reading)
    if verdict is not None:
        return verdict
    try:
        return verified(gold=for_worker(gold_reading), answer=for_worker(answer_reading))
    except Unscorable:
        return None


ORDINARY = re.compile(r"(?:\\frac(?=\{[^{}]+(?:\{[^{}]+\}[^{}]*)*\}\{[^{}])|\\sqrt(?=\{[^{}])"
                      r"|\\(?:pi|infty|cup|circ|pm|sin|cos|tan|cot|theta|le)(?![A-Za-z])"
                      r"|\\(?:begin|end)\{pmatrix\}|\\[\\{}]"
                      r"|[-+](?![-+*/^_=,:&!)\]}]|$)|[*/^_=,:&](?![*/^_=,:&!)\]}]|$)|[0-9A-Za-z.{}()\[\] ])+")


def readable(gold: str) -> bool:
    """Whether a gold can be graded: it can be written in a box, and is words, a number, or what math-verify can parse.

    math-verify takes tens of milliseconds, so it is only asked about what holds other than well-known commands and
    signs, in order and closed.
    """
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
        return parsable(gold=for_worker(reading))
    except Unscorable:
        return False


def is_ordinary(body: str) -> bool:
    """Whether a formula is of the common kind that math-verify is known to parse."""
    return is_closed(body) and ORDINARY.fullmatch(body) is not None


def is_closed(text: str) -> bool:
    """Whether a tidy answer has as many opening brackets as closing ones, [0,1) counted as closed."""
    return all(sum(map(text.count, opening)) == sum(map(text.count, closing))
               for opening, closing in (("([", ")]"), ("{", "}")))


def for_worker(reading: Reading) -> str:
    body = reading.body.replace("%", "\\%")
    return f"{reading.name}={body}" if reading.name else body


@lru_cache(maxsize=10_000)  # an Unscorable is not kept
def verified(*, gold: str, answer: str) -> bool | None:
    """math-verify's word, None where it cannot parse the gold."""
    return WORKERS.ask({"gold": gold, "answer": answer})


@lru_cache(maxsize=10_000)
def parsable(*, gold: str) -> bool:
    return WORKERS.ask({"gold": gold})
