"""
Finding the answer in a completion, and reading it: one spelling, then a number, words, a named value or a formula.
"""
import re
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

MAX_ANSWER = 1000  # characters; what is longer is no answer, and no gold
# without braces, \boxed 5, a box holds a number, a command with its arguments, or a letter that begins no text
OPENED_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:\{|(?P<bare>-?[0-9]+(?:[.,/][0-9]+)*"
                        r"|-?\\(?!boxed|fbox)[A-Za-z]+(?:\{(?:[^{}]|\{[^{}]*\})*\}|[0-9])*"
                        r"|[A-Za-z](?![A-Za-z]| [A-Za-z])))")


# Finding the answer in a completion

def boxed(completion: str) -> str | None:
    """What the last \\boxed{...} or \\fbox{...} holds, or \\boxed 5; None where its braces do not close."""
    last = max(OPENED_BOX.finditer(completion), key=re.Match.start, default=None)
    if last is None or last["bare"]:
        return last and last["bare"]
    start, depth = last.end(), 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(completion, start, start + MAX_ANSWER + 1):
        depth += {"{": 1, "}": -1}.get(match[0], 0)  # \{ and \} are signs, not braces
        if depth == 0:
            return completion[start: match.start()]
    return None


def hash_mark(completion: str) -> str | None:
    """What stands after the last "####" on its line; None where there is none."""
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
    """The answer by the first extractor that finds one; None where none does or it is longer than MAX_ANSWER."""
    for name in extract:
        answer = EXTRACTORS[name](completion)
        if answer is not None and answer.strip():
            return answer if len(answer) <= MAX_ANSWER else None
    return None


# One spelling

SIGNS = str.maketrans({"−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "°": "^\\circ ",
                       "∞": "\\infty ", "∪": "\\cup ", "≤": "\\le ", "≥": "\\ge ", "±": "\\pm ", "\u00a0": " ",
                       "′": "'", "%": "\\%", "√": "\\sqrt ", "∅": "\\emptyset ", "€": "", "£": "", "⋅": "\\cdot ",
                       "∈": "\\in ", "≠": "\\ne ", "ℝ": "\\mathbb{R}", "∩": "\\cap ", "∖": "\\setminus ",
                       **{"½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"[k]: f"\\frac{{{'112131234151357'[k]}}}{{{'233445555668888'[k]}}}"
                          for k in range(15)}})
WIDE = {ord("０") + digit: str(digit) for digit in range(10)}
POWERS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
CURRENCIES = [(re.compile(rf"\s*-?\s*{sign}"), unit)
              for sign, unit in ((r"\\\$", "dollar"), (r"(?:€|\\euro(?![a-z]))", "euro"), (r"(?:£|\\pounds)", "pound"))]
SPELLINGS = {
    **dict.fromkeys(["!", "(", ")", "[", "]", "$", "left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr",
                     "Bigl", "Bigr", "middle", "displaystyle", "textstyle", "large", "Large"], ""),
    **dict.fromkeys([",", ":", ";", ">", " ", "\n", "quad", "qquad"], " "),
    **dict.fromkeys(["dfrac", "tfrac", "cfrac"], "\\frac"),
    **dict.fromkeys(["mbox", "mathrm", "mathbf", "mathit", "textbf", "textit", "textrm", "textnormal", "textsf",
                     "mathsf", "texttt", "boldsymbol", "bm", "underline", "operatorname"], "\\text"),
    **dict.fromkeys(["euro", "pounds"], ""), "varnothing": "\\emptyset", "backslash": "\\setminus ",
    **dict.fromkeys(["leq", "leqslant"], "\\le"), **dict.fromkeys(["geq", "geqslant"], "\\ge"), "neq": "\\ne",
    "lt": "<", "gt": ">", "colon": ":", "vert": "|", "bigcup": "\\cup", "imath": "i",
    "lbrace": "\\{", "rbrace": "\\}", "degree": "^\\circ", "%": "%",
}
DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
THOUSANDS = re.compile(r"\s*(?:-?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:, +|\s*$)){2,}")
GROUPED = re.compile(r"((?:(?!\\(?:\{|lbrace))[^,(\[])*?)(?<![0-9.])([1-9][0-9]{0,2}(?:,[0-9]{3})+)(?![0-9])([^,(\[]*)",
                     re.DOTALL)
# what joins two statements without a word; between inequalities a union is an "or"
OR = r"\\(?:lor|vee)(?![A-Za-z])|\\cup\s*(?=[A-Za-z]\s*(?:[<>]|\\(?:[lg]eq?|neq?)(?![a-z])))"
AND = r"\\(?:land|wedge)(?![A-Za-z])"
NESTED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"  # text whose braces close, one within another
REWRITES = [(re.compile(pattern), new) for pattern, new in [
    (r"\s+", " "), (r"\.{3,}", r"\\ldots "),
    # colours, old commands for a font, \mathrm e
    (r"\\(?:text)?color ?\{[^{}]*\}", ""), (r"\\(?:rm|bf|it) ?\{", r"\\text{"),
    (r"\{\\(?:rm|bf|it)(?![A-Za-z]) ?([^{}]*)\}", r"\\text{\1}"), (r"\\text ([A-Za-z])(?![A-Za-z])", r"\\text{\1}"),
    (r"\\text\*?\s*\{\s*([^{}]*?)\s*\}", r"\\text{\1}"), (r"\\not ?=", r"\\ne "),
    (rf"^\{{({NESTED})\}}$", r"\1"), (rf"^\\text\{{(?=[^{{}}]*\\)({NESTED})\}}$", r"\1"),  # around it all
    (r"\(\\text\{([A-Z])\}\)", r"\\text{(\1)}"), (r"\\text\{([0-9]+\.?[0-9]*)\}", r"\1"),
    # the letter of a choice: \text{Option D: }, \text{D. }, D) and (D)
    (r"^\\text\{(?:(?:Option|Choice) \(?([A-H])[).:]?|([A-H])[).:])\}", r"\\text{(\1\2)}"),
    (r"^(?:\(([A-Z])\)$|([A-H])(?:\)|[.:] ))", r"\\text{(\1\2)}"),
    (r"(?<=[)\]}]) ?(?:U|\\text\{(?:U|union)\}) ?(?=[(\[])", r"\\cup "),
    (r"\\text\{(sec|max|gcd|lcm)\}(?= ?[0-9A-Za-z\\({])", r"\\\1 "),
    (r"\\text\{(e|i|sin|cos|tan|cot|csc|arc(?:sin|cos|tan)|(?:sin|cos|tan)h|ln|lg|log|exp)\}",
     lambda match: match[1] if len(match[1]) == 1 else f"\\{match[1]} "),
    (r"(?<=[)\]]) ?(?:\\text\{or\}|or) ?(?=[(\[].*\\infty)", r"\\cup "),
    (rf",?\s*\\text\{{(?:,|,?\s*(?:and|or),?)\}}|,?\s+(?:and|or)\s+|(?:{OR}|{AND})\s*", ","),
    (r"(?<=[A-Za-z^_}])\{([1-9][0-9]{0,2}(?:,[0-9]{3})+)\}", lambda match: match[0].replace(",", "")),
    (r"^(?:\\text\{)?[Aa]ll real(?: number)?s\}?$", r"\\mathbb{R}"),
    (r"^\\text\{[Aa]ll real(?: number)?s (?:except|but)\}(.+)$", r"\\mathbb{R}\\setminus\\{\1\\}"),
    (r"\\text\{((?:\(?[A-Z]\)?, ?)+\(?[A-Z]\)?)\}", r"\1"),
    (r"\\text\{(?:per ?cent|pct)\}|(?<=[0-9])\s*(?:per ?cent|pct)\b", "%"),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ) ?", r"^\\circ "),
    (r"\\text\{([^{}^]*)\^([0-9])\}", r"\\text{\1}^\2"),
    (r"\\log ?_ ?([0-9e])(?![A-Za-z])", r"\\log_{\1}"),
    (r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", ""),  # a space counts in "1 1/2", "two lines" and "\pi r" only
    (rf"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^[0-9])? ?[({{]?)({DECIMAL})\^\\circ ?", r"\1\\frac{\2\\pi}{180}"),
    (r"\\frac ?([0-9]|\\pi) ?([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
    (r"\\frac ?([0-9])(?=\{)", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})([0-9])(?![0-9])", r"\1{\2}"),
    (r"\\sqrt ?([0-9])(?![0-9])", r"\\sqrt{\1}"),
    (r"\\mathbb ?([A-Z])(?![A-Za-z])", r"\\mathbb{\1}"),
    (r"\^\{(\w)\}(?!\w)", r"^\1"), (r"\^e(?![A-Za-z])", "^{(e)}"),
    (r"(?:[0-9]\u0305)+", lambda match: "\\overline{" + match[0].replace("\u0305", "") + "}"),
    (r"([0-9])\u0307", r"\\dot{\1}"),
    (r"\\dot ?\{?([0-9])\}?([0-9]*)\\dot ?\{?([0-9])\}?", r"\\overline{\1\2\3}"),
    (r"\\dot ?(?:\{([0-9]+)\}|([0-9]))", r"\\overline{\1\2}"),
    (r"(\\mathbb\{R\}|[)\]])-(?=\\\{|(?<=\}-)[(\[])", r"\1\\setminus "),
    (r"\^(?:\\prime|\{\\prime\})(?![A-Za-z])", "'"),
    # a product, which math-verify would read as a mixed number
    (r"(?<![\^_0-9.])([0-9]+)(?=\((?:\\frac|[0-9]+/))", r"\1\\cdot "),
    (r"\\pi ?(?=\()", r"\\pi\\cdot "),
    (r"^\\approx|^=", ""),
]]


def tidy(text: str) -> str:
    """An answer in one spelling of spaces, fractions, thousands and wrappers; equal ones mean the same."""
    text = re.sub("⁻?[⁰¹²³⁴-⁹]+", lambda match: f"^{{{match[0]}}}" if match[0][1:] else "^" + match[0],
                  text.translate(WIDE))
    text = text.translate(POWERS)
    text = re.sub(r"√\s*([0-9.]*[0-9]|[A-Za-z])", r"\\sqrt{\1}", text)
    # signs that only thousands have
    text = re.sub(r"(?<=[0-9])(?:\{,\}(?:\\!)?|, ?\\! ?|\\[,;: ]|~)(?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"^\s*\*\*(.*)\*\*\s*$", r"\1", text, flags=re.DOTALL)
    if THOUSANDS.fullmatch(text):  # 10,000, 20,000
        text = re.sub(r"(?<=[0-9]),(?=[0-9])", "", text)
    # the only commas there are, and in no bracket: (1,234) is a point, "1, 234" a list
    if grouped := GROUPED.fullmatch(text):
        text = grouped[1] + grouped[2].replace(",", "") + grouped[3]
    text = re.sub(r"(?<!\\)%", r"\\%", text).translate({sign: new for sign, new in SIGNS.items() if sign != ord("%")})
    text = re.sub(r"\\(\\|[A-Za-z]+|.)", lambda match: SPELLINGS.get(match[1], match[0]), text, flags=re.DOTALL)
    text = re.sub(r"[$~]", " ", text.replace("{,}", ","))
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    return text.strip().rstrip(".,;:")


def stands_in(text: str, answer: str) -> bool:
    """Whether an answer is a part of a text, whatever the spaces: not "2" of "12" or "2.5"."""
    text, answer = (re.sub(r"\s|\\(?:left|right)(?![A-Za-z])", "", one) for one in (text, answer.strip(" $.")))
    return answer != "" and re.search(rf"(?<![\w.\\]){re.escape(answer)}(?!\w|[.,]\d)", text) is not None


def unspaced(text: str) -> str:
    """The text but for spaces at its ends and commas, so that 70,110 may be two angles where a gold has them so."""
    return re.sub(r" *, *", ",", text.strip())


# Reading an answer

NUMBER = re.compile(rf"(?P<sign>[-+]?)(?:(?P<whole>[0-9]+) ?(?=\\frac|(?<= )[0-9]+/))?"
                    rf"(?:\\frac\{{(?P<top>-?{DECIMAL})\}}\{{(?P<bottom>-?{DECIMAL})\}}"
                    rf"|(?P<left>{DECIMAL})(?:/(?P<right>{DECIMAL})|[eE](?P<e>[-+]?[0-9]{{1,3}})"
                    rf"|(?:\\times|\\cdot|\*) ?10\^(?:(?P<ten>[0-9])|\{{(?P<tens>[-+]?[0-9]{{1,3}})\}}))?)"
                    r"(?P<percent>%?)")
EULER = re.compile(r"-?(?:[2-9]|[0-9]{2,})e[-+][0-9]")  # 2e+2 is no 200, as 1e-5, 2.5e-6 and 2e+02 are numbers
REPEATING = re.compile(r"(-?)([0-9]*)\.([0-9]*)\\(?:overline|bar)(?:\{([0-9]+)\}| ?([0-9]))(%?)")
BASES = {word: 2 + k for k, word in enumerate("""two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen""".split())}  # noqa: SIM905
BASED = re.compile(rf"(-?)(?:\\(?:text|overline))?[({{\[]?(-?[0-9A-Za-z.]+)[)}}\]]?"
                   rf"(?:_\{{?(?:\\text\{{)?\(?(?:base)?|,?(?: |\(|\\text\{{)*,? ?(?:in )?base)[ }}-]*"
                   rf"([0-9]{{1,2}}|{'|'.join(BASES)})[)}}]*")
# the letter of a choice, before its value
LABELLED = re.compile(r"(?:\\text\{\(([A-H])\)\}(?!\\text|[_^,=]|$)|\(([A-H])\)(?=[-0-9.\\]))")
SYMBOL = (r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|rho"
          r"|sigma|tau|(?:var)?phi|chi|psi|omega|ell|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega))")
INDEX = r"(?:_\w|_\{[^{}]*\})?"
NAME = re.compile(rf"(?:{SYMBOL}|[A-Z]{{2,3}}){INDEX}'*(?:\({SYMBOL}\))?"
                  rf"|[f-hp-tA-Z]{INDEX}(?:\^\{{-1\}})?'*\((?:{SYMBOL}|-?[0-9]+)\)"
                  rf"|\\(?:vec|bar|hat|overline|text)\{{(?:{SYMBOL}|[A-Z]{{2}})\}}{INDEX}"
                  rf"|m?\\angle ?[A-Z]{{1,3}}|\[[A-Z]{{3,4}}\]|\|[A-Z]{{2}}\||\\frac\{{d{SYMBOL}\}}\{{d{SYMBOL}\}}"
                  rf"|\\(?:sin|cos|tan|cot|sec|csc) ?{SYMBOL}")
EQUALS = re.compile(r"(?<![<>!:])=+(?!>)")
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![a-z])")
TIME = re.compile(r"[0-9]{1,2}(?::[0-9]{2})*[ap]m")
WORDS = re.compile(r"[A-Za-z][A-Za-z ,.'()-]*")
NO_UNIT = set("""and or to of than hundred thousand million billion trillion dozen half
hundreds thousands millions billions trillions dozens halves third thirds fifth fifths sixth sixths seventh sevenths
eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths millionth millionths
fourth fourths eleventh elevenths twelfth twelfths thirteenth thirteenths fourteenth fourteenths fifteenth fifteenths
ppm kilo mega thou grand bil googol googols fold twofold threefold fourfold fivefold tenfold hundredfold thousandfold
sixteenth sixteenths seventeenth seventeenths eighteenth eighteenths nineteenth nineteenths twentieth twentieths
thirtieth thirtieths fortieth fortieths fiftieth fiftieths sixtieth sixtieths tens
quadrillion quadrillions quintillion quintillions lakh lakhs crore crores gross score bn mn mil
doubled tripled trebled quadrupled halved reciprocal inverse inverted
zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty
sixty seventy eighty ninety double triple twice mille permille permil basis base binary octal hex hexadecimal
point plus minus over divided multiplied negative squared cubed factorial root power remainder mod modulo repeating
recurring least most not no never nor neither either maybe perhaps possibly probably but if unless otherwise else except
instead also wrong incorrect false
pi sin cos tan cot sec csc log ln exp max sqrt infinity""".split())  # noqa: SIM905
KNOWN_UNITS = {word: line.split()[0] for line in """\
cm centimeter centimeters centimetre centimetres
mm millimeter millimeters millimetre millimetres
km kilometer kilometers kilometre kilometres
m meter meters metre metres
inch in inches
foot feet ft
yard yards yd
mile miles mi
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
ml milliliter milliliters
dm decimeter decimeters decimetre decimetres
micrometer micrometers micrometre micrometres micron microns
nm nanometer nanometers nanometre nanometres
mg milligram milligrams
ton tons
pint pints
quart quarts
acre acres
radian radians rad rads
celsius
fahrenheit
kelvin kelvins
newton newtons
joule joules
watt watts
volt volts
hertz hz""".splitlines() for word in line.split()}


class Reading(NamedTuple):
    """What an answer says, as far as that is plain to see."""
    body: str                # the tidy answer without label, name and unit
    name: str                # "x" of "x = 5", or ""
    units: frozenset[str]    # the known units that it has
    value: Fraction | None   # the body as a number, a percentage as its number of percents
    percent: bool
    base: tuple[str, int] | None  # ("1010", 2) of "1010_2"
    words: str | None        # the spelling of an answer in words, None where it is none
    either: bool             # whether it has an "or"
    both: bool               # whether it has an "and"
    label: str               # "D" of "(D) 27", or ""


def plain_number(text: str) -> tuple[Fraction, bool] | None:
    """The value of a tidy number and whether it is a percentage; None of anything else. Takes linear time."""
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
    """A tidy answer in words; None of numbers and formulas. Letters alone are words from four on: abc is a product."""
    wrapped = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    longest = max((word for word in re.findall("[A-Za-z]+", text)), key=len, default="")
    if (wrapped or TIME.fullmatch(spelled(text))
            or WORDS.fullmatch(text) and len(longest) > 3 and longest.lower() not in NO_UNIT):
        return spelled(text)
    return None


def without_unit(text: str) -> tuple[str, frozenset[str]]:
    """A tidy answer without the unit at its end, and the known units of that: "5\\text{ sq. cm}" -> ("5", {"cm^2"})."""
    if degrees := re.fullmatch(r"(.*)\^\\circ ?(?:\\text\{[CF]\})?", text):
        return degrees[1], frozenset(["degree"])
    match = (re.fullmatch(r"(.*[^\\ ,(]) ?\\text\{([A-Za-z][A-Za-z ./-]*)\}(?:\^([0-9]))?", text)
             or re.fullmatch(r"(.*[0-9}%)])( ?[A-Za-z][A-Za-z .]*(?:/[A-Za-z]+)?)(?:\^([0-9]))?", text))
    if match is None:
        return text, frozenset()
    unit = match[2].lower().replace("mph", "miles per hour")
    words = re.findall("[a-z]+(?:-[a-z]+)*", unit)
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
    others = {part for before, word in zip(["", *words], words, strict=False)  # not the "squared" of "cm squared"
              if before not in KNOWN_UNITS or word not in ("squared", "cubed")
              for part in (word, word.rpartition("-")[2])}  # "two-thirds", not "two-digit"
    if re.fullmatch("[A-Z]", match[2].strip()):
        return text, frozenset()  # 7M is no seven metres
    is_unit = (is_unit and words[0] != "per" and not words_of(match[1])
               and not any(part in NO_UNIT or re.search("illion(?:th)?s?$", part) for part in others))
    return (match[1], known) if is_unit else (text, frozenset())


def power_of(before: str, after: str) -> str:
    """The power of a unit between these words: "^2" in "sq cm", "cm squared" and "cm^2"."""
    power = ("2" if before in ("sq", "square") or after == "squared"
             else "3" if before in ("cu", "cubic") or after == "cubed" else after)
    return f"^{power}" if power.isdigit() and power != "1" else ""


@lru_cache(maxsize=10_000)
def read(text: str) -> Reading:
    """The reading of an answer, from its raw text."""
    whole = unwrapped(tidy(text))
    joints = [re.search(rf"(?<![A-Za-z\\]){word}(?![A-Za-z])|{sign}", text) is not None
              for word, sign in (("or", OR), ("and", AND))]
    label, whole = labelled(whole)
    if (first := re.match(rf"({NAME.pattern})\\ne ?[^,]+,", whole)) and len(parts(whole, RELATION)) == 2:
        whole = whole.replace(",", f",{first[1]}\\ne ")  # x\ne 2,3
    words = words_of(whole)
    if words is not None:
        return Reading(whole, "", frozenset(), None, False, None, words, *joints, label)
    name, body = named(whole)
    base = based(body)
    body, units = (body, frozenset()) if base else without_units(body)
    body = proportion(body)
    units |= {unit for sign, unit in CURRENCIES if sign.match(text)}
    value, percent = plain_number(body) or (None, False)
    if EULER.fullmatch(body):
        value = None
    return Reading(body, name.casefold(), units, value, percent, base, None, *joints, label)


def unwrapped(text: str) -> str:
    """A tidy answer without the text around numbers and their units, or the braces around a condition on a name:
    "\\text{36 dollars}" -> "36 dollars", "\\{x|x>2\\}" -> "x>2"."""
    if wrapped := re.fullmatch(r"\\text\{([^{}]*)\}(\^[0-9])?", text):
        inner = re.sub(r"(?<=[0-9%]) ?([A-Za-z][A-Za-z ./-]*)$", r"\\text{\1}", tidy(wrapped[1])) + (wrapped[2] or "")
        value = named(labelled(inner)[1])[1]
        is_value = based(value) or all(plain_number(without_unit(part)[0]) for part in parts(value))
        return inner if is_value and not TIME.fullmatch(spelled(value)) else text
    condition = re.fullmatch(rf"\\\{{({SYMBOL})(?:\\in ?\\mathbb\{{R\}})?(?:\||:|\\mid ?)(.*)\\\}}", text)
    return condition[2] if condition and RELATION.search(condition[2]) else text


def labelled(text: str) -> tuple[str, str]:
    """The letter of a choice before its value, or "", and the rest: "\\text{(D)}27" -> ("D", "27")."""
    match = LABELLED.match(text)
    return (match[1] or match[2], text[match.end():]) if match else ("", text)


def based(body: str) -> tuple[str, int] | None:
    """The digits of a number in a base that is named, and the base: "(2430)_5", "2430\\text{ (base five)}"."""
    match = BASED.fullmatch(body)
    if not match:
        return None
    digits, base = (match[1] + match[2]).upper(), BASES.get(match[3]) or int(match[3])
    return (digits, base) if is_based(digits, base) else None


def without_units(body: str) -> tuple[str, frozenset[str]]:
    """A body without its unit; of a list, also where each of its entries has the same one: "60^\\circ,120^\\circ"."""
    items = [without_unit(item) for item in parts(body)]
    units = [units for _, units in items]
    if len(items) > 1 and units[0] and all(others in (units[0], frozenset()) for others in units):
        return ",".join(item for item, _ in items), units[0]
    return without_unit(body)


def proportion(body: str) -> str:
    """A ratio of three or more as the point of what each is to the first: 2:4:6 and 1:2:3 are the same, and no quotient
    of quotients. Any other body as it is."""
    first, *others = parts(body, re.compile(":"))
    if len(others) < 2 or (plain_number(first) or (0,))[0] == 0 and not re.search("[A-Za-z]", first):
        return body
    return "(" + ",".join(f"\\frac{{{other}}}{{{first}}}" for other in others) + ")"


def parts(text: str, sign: re.Pattern = re.compile(",")) -> list[str]:
    """What stands between the signs that are in no brackets: "(1,2),3" -> ["(1,2)", "3"]."""
    found, start, depth = [], 0, 0
    for match in re.finditer(rf"([(\[{{])|([)\]}}])|{sign.pattern}", text):
        if match[1] or match[2]:
            depth += 1 if match[1] else -1
        elif depth == 0:
            found.append(text[start: match.start()])
            start = match.end()
    return [*found, text[start:]]


def is_name(left: str, right: str) -> bool:
    """Whether the left side of an equation is the name of one thing that does not occur on the right."""
    if not NAME.fullmatch(left) or len(parts(right, RELATION)) > 1:
        return False
    head = re.sub(r"'*\(.*|'+$", "", left)
    if len(head) > 1:
        return head not in right
    words = r"\\text\{[^{}]*\}|\\?[A-Za-z]+_(?:\w|\{[^{}]*\})|\\[A-Za-z]+|[A-Za-z]{4,}"  # x_1 is not x
    return head not in re.sub(words, "", without_unit(right)[0])


def named(text: str) -> tuple[str, str]:
    """The name and the body of a tidy answer: "x=5" -> ("x", "5"), "y=2,x=1" -> ("x,y", "(1,2)"), "x=1,x=2" -> ("x",
    "1,2"). The name is "" where there is none, or where an equation is more than a name and a value."""
    if (several := re.match(rf"\(({SYMBOL}(?:,{SYMBOL})+)\)=", text)) and len(parts(text)) > 1:
        names = several[1].split(",")  # of several points
        points = text[several.end():].replace("," + several[0], ",")
        return (several[1], points) if names == sorted(set(names)) else ("", text)
    left, *sides = parts(text, EQUALS)
    if re.fullmatch(rf"\({SYMBOL}(?:,{SYMBOL})+\)", left) and len(sides) == 1 and is_bracketed(sides[0]):
        names, values = left[1:-1].split(","), parts(sides[0][1:-1])
    else:
        items = [parts(item, EQUALS) for item in parts(text[1:-1] if is_bracketed(text) else text)]
        if len(items) == 1 and sides and is_name(left, "=".join(sides)):
            return left, "=".join(sides)
        if len(items[0]) != 2 or not all(len(item) < 3 and is_name(items[0][0] if len(item) < 2 else item[0], item[-1])
                                         for item in items):
            return "", text
        names, values = [item[0] if len(item) == 2 else "" for item in items], [item[-1] for item in items]
    if len(set(names) - {""}) == 1:
        return names[0], ",".join(values)
    if len(set(names)) < len(names) or len(names) != len(values) or "" in names:
        return "", text
    names, values = zip(*sorted(zip(names, values, strict=True)), strict=True)
    return ",".join(names), f"({','.join(values)})"


def is_bracketed(text: str) -> bool:
    """Whether a first bracket, round or square, closes at the end: (1,2) and [0,1), not (1,2),(3,4)."""
    depths = list(accumulate((sign in "([{") - (sign in ")]}") for sign in text))
    return text[:1] in ("(", "[") and 0 in depths and depths.index(0) == len(text) - 1


def is_based(digits: str, base: int) -> bool:
    """Whether these are the digits of a number in this base; a single letter is the name of a variable."""
    try:
        int(digits.replace(".", "", 1), base)
    except ValueError:
        return False
    return any(sign.isdigit() for sign in digits) or digits.isupper() and len(digits) > 1
