"""
Neighbours of MATH's golds: other spellings of them, and answers that only look like them (for dev/check_grading.py).

A maker takes a gold and gives (gold, answer, whether it is right), or nothing where the gold is not of its kind; an
answer may be a whole completion with a box.
"""
import math
import re
from collections.abc import Callable
from fractions import Fraction

NUM_GOLDS = 40  # of each kind


def entries(gold: str) -> list[str]:
    """The entries of a gold that is a list of whole numbers."""
    found = re.split(r" *, *", gold)
    return found if len(found) > 1 and all(re.fullmatch("-?[0-9]+", entry) for entry in found) else []


def lists(gold: str):
    if len(set(entries(gold))) == len(entries(gold)) > 0:
        long = [f"{entry}{217 + k}" for k, entry in enumerate(entries(gold))]  # whose later entries have three digits
        new = ", ".join([entries(gold)[0], *(entry[-3:] for entry in long[1:])])
        for answer in (", ".join(reversed(entries(new))), f"\\{{{new}\\}}", new.replace(", ", r"^\circ, ") + r"^\circ",
                       new.replace(", ", r"\text{ and }")):
            yield new, answer, True
        for answer in (new.replace(", ", ""), f"{entries(new)[0]}000+{entries(new)[1]}", new + "1", new + ", 999",
                       f"{entries(new)[0]}\\,{entries(new)[1]}"):
            yield new, answer, False


INTERVAL = re.compile(r"([(\[])\s*([^,()\[\]]+?)\s*,\s*([^,()\[\]]+?)\s*([)\]])")


def intervals(gold: str) -> list[tuple[str, str, str, str]]:
    plain = re.sub(r"\\(?:left|right)", "", gold)
    found = [match.groups() for match in INTERVAL.finditer(plain)]
    return found if found and not INTERVAL.sub("", plain).replace("\\cup", "").strip() else []


def statements(opening: str, low: str, high: str, closing: str, joint: str) -> str:
    """(a, b] as "x > a and x <= b", or as "a < x <= b" with the joint "chain"."""
    above, after = {"(": (">", "<"), "[": ("\\ge", "\\le")}[opening]
    below = {")": "<", "]": "\\le"}[closing]
    ends = [f"x {above} {low}"] * ("infty" not in low) + [f"x {below} {high}"] * ("infty" not in high)
    if joint == "chain" and len(ends) == 2:
        return f"{low} {after} {ends[1]}"
    return joint.join(ends)


def unions(gold: str):
    found = intervals(gold)
    if len(found) > 1:
        said = [statements(*one, "chain") for one in found]
        for answer in (r"\text{ or }".join(said), " or ".join(reversed(said)), r" \lor ".join(said),
                       f"\\{{x \\mid {' or '.join(said)}\\}}"):
            yield gold, answer, True
            yield answer, gold, True
        other = {"<": "\\le", ">": "\\ge", "\\le": "<", "\\ge": ">"}  # the first end, with or without itself
        strict = re.sub(r"[<>]|\\[lg]e", lambda sign: other[sign[0]], said[0], count=1)
        for answer in (r"\text{ and }".join(said), " or ".join(said[1:]), " or ".join([strict, *said[1:]]),
                       " or ".join(said[:-1]), " or ".join(said).replace("x", "y", 1)):
            yield gold, answer, False
    if gold.count("infty") == len(found) == 2 and found[0][2:] == (found[1][1], ")") and found[1][0] == "(":
        yield gold, f"x \\ne {found[0][2]}", True
        yield gold, f"\\mathbb{{R}} \\setminus \\{{{found[0][2]}\\}}", True
        yield gold, f"x \\ne {found[0][2]} + 1", False


def pairs_of_bounds(gold: str):
    found = intervals(gold)
    if len(found) == 1 and ("infty" not in gold) and not is_ordered_wrongly(*found[0]):
        for joint in (", ", r"\text{ and }", r" \land "):
            yield gold, statements(*found[0], joint), True
        for answer in (statements(*found[0], " or "), statements(*found[0], ", ") + "1",
                       statements(*found[0], ", ").replace("x", "y", 1)):
            yield gold, answer, False


def is_ordered_wrongly(opening: str, low: str, high: str, closing: str) -> bool:
    """Whether this is a point, (3, 1), or may be one."""
    try:
        return not Fraction(low) < Fraction(high)
    except ValueError:
        return True


def upright(gold: str):
    new = re.sub(r"(?<![A-Za-z\\{])([ei])(?![A-Za-z])", r"\\mathrm{\1}", gold)
    new = re.sub(r"\\(sin|cos|tan|ln|log|arctan)(?![a-z])", r"\\operatorname{\1}", new)
    if new != gold and "\\text" not in gold:
        yield gold, new, True
        yield gold, new.replace("operatorname", "mathrm"), True
        yield gold, f"{new}+1", False
        if re.search(r"\\mathrm|\{sin\}", new):
            yield gold, re.sub(r"\\mathrm\{[ei]\}", "2", new).replace("{sin}", "{cos}"), False


def sets_of_points(gold: str):
    point = re.fullmatch(r"\((-?[0-9]+), *(-?[0-9]+)\)", gold)
    if point and point[1] != point[2]:
        x, y = int(point[1]), int(point[2])
        new = f"({x}, {y}), ({y + 3}, {x - 2})"
        for answer in (f"\\{{({x},{y}),({y + 3},{x - 2})\\}}", f"\\{{({y + 3},{x - 2}),({x},{y})\\}}",
                       f"({y + 3},{x - 2}) and ({x},{y})"):
            yield new, answer, True
            yield answer, new, True
        for answer in (f"\\{{({y},{x}),({y + 3},{x - 2})\\}}", f"\\{{({x},{y})\\}}", f"({x},{y + 3}), ({y},{x - 2})",
                       f"\\{{{x},{y},{y + 3},{x - 2}\\}}"):
            yield new, answer, False


def case(gold: str):
    letters = re.findall(r"(?<![A-Za-z\\{])[a-df-hj-zA-DF-HJ-Z](?![A-Za-z])", gold)
    if letters and len(gold) > 1 and "text" not in gold and "_" not in gold and "," not in gold and "=" not in gold:
        new = re.sub(rf"(?<![A-Za-z\\{{]){letters[0]}(?![A-Za-z])", letters[0].swapcase(), gold)
        yield gold, new, False
        yield gold, f" {gold} + 0", True


def words(gold: str):
    if re.fullmatch("[0-9]+", gold):
        for answer in (f"\\text{{{gold} dollars}}", f"\\text{{{gold} apples}}", f"\\text{{{gold} square units}}",
                       f"\\mbox{{{gold} feet}}", f"\\text{{(D) {gold}}}"):
            yield gold, answer, True
        for answer in (f"\\text{{{gold} million}}", f"\\text{{{gold}1 dollars}}", f"\\text{{{gold} or {gold}1}}",
                       f"\\text{{not {gold}}}", f"\\text{{{gold} dozen}}"):
            yield gold, answer, False


BASE_NAMES = dict(zip("23456789", "two three four five six seven eight nine".split(), strict=True))  # noqa: SIM905


def bases(gold: str):
    match = re.fullmatch(r"([0-9.]+)_\{?([2-9])\}?", gold)
    if match:
        digits, base, other = match[1], match[2], "9" if match[2] != "9" else "8"
        for pattern in ("({})_{}", "{}_{{({})}}", r"{}\text{{ (base {})}}", r"{}\text{{ base {}}}", "{} base {}"):
            yield gold, pattern.format(digits, base), True
            yield gold, pattern.format(digits, other), False
        yield gold, f"{digits}_{{\\text{{{BASE_NAMES[base]}}}}}", True
        yield gold, f"{digits}_{{\\text{{{BASE_NAMES[other]}}}}}", False
        yield digits, f"({digits})_{base}", False


def labels(gold: str):
    if re.match(r"[0-9\\-]", gold) and "text" not in gold and "," not in gold:
        labelled = f"\\textbf{{(D)}}\\ {gold}"
        for pair in ((gold, labelled), (gold, f"\\textbf{{(D) }}{gold}"), (labelled, gold), (labelled, "D"),
                     (labelled, r"\text{(D)}"), (gold, f"(D) {gold}")):
            yield *pair, True
        for pair in ((labelled, f"\\textbf{{(C)}}\\ {gold}"), (labelled, "C"), (gold, f"\\textbf{{(D)}}\\ {gold}+1"),
                     (labelled, f"{gold}+1"), (gold, "D")):
            yield *pair, False


def repeating(gold: str):
    match = re.fullmatch(r"\\d?frac\{?([0-9]+)\}?\{?([0-9]+)\}?", gold)
    if not match or not int(match[2]) or math.gcd(int(match[2]), 10) > 1 or int(match[2]) in (1, 0):
        return
    value = Fraction(int(match[1]), int(match[2]))
    period = next((n for n in range(1, 8) if (10 ** n - 1) % value.denominator == 0), None)
    if period:
        whole, part = divmod(value.numerator, value.denominator)
        digits = str(part * (10 ** period - 1) // value.denominator).zfill(period)
        dotted = f"\\dot{{{digits}}}" if period == 1 else f"\\dot{{{digits[0]}}}{digits[1:-1]}\\dot{{{digits[-1]}}}"
        for answer in (f"{whole}.{dotted}", f"{whole}.\\overline{{{digits}}}", f"{whole}.{digits}{dotted}"):
            yield gold, answer, True
        for answer in (f"{whole}.{digits}", f"{whole}.0{dotted}", f"{whole + 1}.{dotted}"):
            yield gold, answer, digits == "0"


def bare_boxes(gold: str):
    if re.fullmatch(r"-?[0-9]+|\\frac\{[^{}]*\}\{[^{}]*\}|-?\\[a-z]+|[a-z]|\\sqrt\{[0-9]+\}", gold):
        for box in (f"\\boxed {gold}", f"$\\boxed{gold}$" if not gold.isalpha() else f"$\\boxed {gold}$",
                    f"\\boxed{{77}}, no: $\\boxed {gold}$."):
            yield gold, box, True
        yield gold, f"\\boxed{{{gold}}}, no: \\boxed 77", False
        yield gold, f"\\boxed {gold} and \\boxed {{77}}", False


KINDS: dict[str, Callable] = {
    "lists": lists, "unions": unions, "pairs of bounds": pairs_of_bounds, "upright letters": upright,
    "sets of points": sets_of_points, "case": case, "words": words, "bases": bases, "labels": labels,
    "repeating decimals": repeating, "boxes without braces": bare_boxes,
}


def neighbours(golds: list[str], make: Callable) -> tuple[int, list[tuple[str, str, bool]]]:
    """How many of the golds are of a kind, at most NUM_GOLDS, and their neighbours."""
    found = [rows for gold in golds if (rows := list(make(gold)))][:NUM_GOLDS]
    return len(found), [row for rows in found for row in rows]
