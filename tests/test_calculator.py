"""The calculator: what it accepts and what it refuses, that nothing can make it raise, run code or work for long, and
its tool calls in a row."""
import ast
import gc
import inspect
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import calculator
from nanochat.calculator import LARGEST, MAX_LENGTH, Calculator, calculate
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:invalid decimal literal")  # Python's, of "1if"
SETTINGS = settings(max_examples=100, deadline=None)

# What upstream's use_calculator gives too: its answers, written down.
AS_UPSTREAM = {
    "12/60": "0.2", "0.2*50": "10.0", "3*4": "12", "2+3*4": "14", "(2+3)*4": "20", "1/3": "0.3333333333333333",
    "1.50": "1.5", "5.": "5.0", ".5": "0.5",
    " 1 + 1 ": "2", "1,000*2": "2000", "1,2": "12", "00": "0", "9" * 100: "9" * 100,
    "7//2": "3", "-7//2": "-4", "7.5//2": "3.0",
    "--5": "5", "+5": "5", "- 5": "-5", "-(2+3)": "-5", "2*-3": "-6", "-0": "0", "-0.0": "-0.0",
    "'strawberry'.count('r')": "3", '"strawberry".count("rr")': "1", "'strawberry' .count('x')": "0",
    "('strawberry').count('r')": "3",
    "'a b c'.count(' ')": "2", "'abc'.count('')": "4", "''.count('a')": "0", "'ab' 'ab'.count('a')": "2",
    "'it_s'.count('_')": "1",
    "'a,b,c'.count(',')": "4",  # commas go first: 'abc'.count('')
    "1/0": None, "1//0": None, "0.0/0.0": None, "2**3": None, "2* *3": None, "007": None, "5%2": None, "1e5": None,
    "0x10": None, "1_000": None,
    "": None, "   ": None, "(": None, "1+": None, "1 2": None, "1(2)": None, "1..2": None, "2*/3": None, "\t1": None,
    "1\n+1": None, "1\x00": None, "\u0661+1": None, "\u00b2": None, "\ud800": None,
    "'abc'": None, "'a-b'.count('-')": None, "'a'.count('a')+1": None, "2*'a'.count('a')": None, "'a'.count(1)": None,
    "'a'.count()": None, "'a'.count": None, "a.count('a')": None, "'a'.count(a)": None, "(1e5) .count('a')": None,
    "'a'.upper()": None, "'\u00e9'.count('e')": None, "'a\\n'.count('a')": None, "'abc.count('a')": None, "True": None,
    "lambda.count(": None, "__import__('os').count('a')": None, "'a'.__class__.count('a')": None,
    "open('a').count('a')": None,
}
REFUSED_BY_US = ["()", "()*3", "...", "9" * 101, "9" * 90 + "*" + "9" * 90, "9" * 150 + "/1", "'.count('",
                 "b'a'.count(b'a')", "f'a'.count('a')",
                 "'abc'.upper().count('A')", "'a'.count('a').real", "1 if 'a'.count('a') else 2", "not 'a'.count('b')",
                 "'a'.count('a') or 2"]
HOSTILE = ["9" * 10 ** 5, "(" * 10 ** 5, "-" * 10 ** 5 + "1", "1" + "-1" * 10 ** 5, "(" * 100 + ")" * 100,
           "(" * 99 + "1" + ")" * 99, "-" * (MAX_LENGTH - 1) + "1", "*".join(["9" * 30] * 6), "*".join(["9" * 8] * 20),
           "1/3" + "*99999999." * 15, "9**9**9", "'a'*10**9", "'a'" * 10 ** 5 + ".count('a')",
           "'a'" + ".count('a')" * 15, "'" * 199, "(lambda.count(" * 10, "'a'.count(*'a')", "'a'.count(**'a')",
           "{}.count()", "'a'.count('a'if 1else 2)"]


def test_results_are_upstreams():
    for expression, result in AS_UPSTREAM.items():
        assert calculate(expression) == result, expression
    for word, part, times in (("direction", "i", "2"), ("profile", "file", "1"), ("medieval", "e", "2")):
        assert calculate(f"'{word}'.count('{part}')") == times  # which upstream takes for code
    for expression in REFUSED_BY_US:  # upstream answers these, by Python's rules: "()", "Ellipsis", inf, True ...
        assert calculate(expression) is None, expression


@SETTINGS
@given(text=st.text() | st.text("0123456789*+-/.() ,") | st.text("abcount'\"().,_ ") | st.sampled_from(HOSTILE))
def test_any_string_gives_a_result_or_none(text):
    result = calculate(text)
    assert result is None or abs(float(result)) <= LARGEST


@SETTINGS
@given(a=st.integers(0, 10 ** 9), b=st.integers(1, 10 ** 9), c=st.floats(0, 1e6).map(lambda x: f"{x:.3f}"),
       op=st.sampled_from(["+", "-", "*", "/", "//"]))
def test_arithmetic_is_pythons(a, b, c, op):
    results = {"+": a + b, "-": a - b, "*": a * b, "/": a / b, "//": a // b}
    assert calculate(f"{a} {op} {b}") == str(results[op])
    assert calculate(f"-({a:,}{op}{b})+{c}") == str(-results[op] + float(c))


def test_nothing_is_run_as_code():
    """Of what could run or compile code, or needs the main thread, the module names nothing."""
    names = {node.id for node in ast.walk(ast.parse(inspect.getsource(calculator))) if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec", "compile", "signal", "getattr", "__import__"}


def test_work_is_bounded(monkeypatch):
    """At most one operation per character of a short text, on numbers of bounded size; a long one is not even
    parsed."""
    parse, operands = ast.parse, []

    def parse_short(text, **kwargs):
        assert len(text) <= MAX_LENGTH
        return parse(text, **kwargs)
    monkeypatch.setattr(calculator.ast, "parse", parse_short)
    monkeypatch.setattr(calculator, "OPERATORS", {
        op: lambda a, b, do=do: operands.append((a, b)) or do(a, b) for op, do in calculator.OPERATORS.items()})
    for expression in HOSTILE:
        operands.clear()
        calculate(expression)
        assert len(operands) <= MAX_LENGTH and all(abs(x) <= LARGEST for pair in operands for x in pair)


def test_length_and_size_have_their_limits():
    assert calculate("1" + "+0" * 99) == "1" and calculate("1" + "+0" * 100) is None  # 199 and 201 characters
    assert calculate(str(LARGEST)) == str(LARGEST) and calculate(f"{LARGEST}+1") is None
    assert calculate(f"-{LARGEST}-1") is None and calculate(f"{LARGEST}*10/10") is None  # on the way, too


class Garbage:
    """A cycle whose end lets other threads run, also in the middle of a parse."""
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0)


def test_threads_may_calculate_while_garbage_is_collected():
    def work(i: int) -> str | None:
        for _ in range(3):
            Garbage()
        return calculate("1+" * 60 + str(i))
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(500))) == [str(60 + i) for i in range(500)]
            assert list(pool.map(calculate, HOSTILE)) == list(map(calculate, HOSTILE))
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


TOKENIZER = Tokenizer.train(iter([]), 265)
SPECIAL = {name.strip("<|>"): TOKENIZER.special(name) for name in SPECIAL_TOKENS}


def ids(*parts: str) -> list[int]:
    """Names of special tokens become them, all else is text."""
    return [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL else TOKENIZER.encode(part))]


def written_by(sampled: list[int]) -> list[int]:
    """A row of a sampler that draws these tokens, where none is forced, until they are used up and none is waiting."""
    tool, row, force, sampled = Calculator(TOKENIZER), [], None, list(sampled)
    while sampled or force is not None:
        row.append(sampled.pop(0) if force is None else force)
        force = tool([0], [row[-1]]).get(0)
    return row


def block(expression: str) -> list[int]:
    return ids("python_start", expression, "python_end")


def test_a_result_is_forced_between_its_marks():
    """A second start begins anew, and a second end is idle."""
    assert written_by(block("12/60") + ids("x")) == block("12/60") + ids("output_start", "0.2", "output_end", "x")
    forced = [*block("1+1"), *ids("output_start", "2", "output_end")]
    assert written_by(block("1+1") + ids(" ") + block("1+1")) == forced + ids(" ") + forced
    sampled = ids("python_start", "5*", "python_start", "1+1", "python_end")
    assert written_by(sampled + ids("python_end")) == sampled + ids("output_start", "2", "output_end", "python_end")


def test_without_a_result_nothing_is_forced():
    for sampled in (block(""), block("1/0"), block("two"), block("9" * 500), block("") + ids("1+1", "python_end"),
                    ids("1+1", "python_end"), ids("python_end", "python_end"), ids("python_start", "1+1"),
                    ids("output_start", "1", "output_end"), ids("python_start", "1+1", "bos", "python_end"),
                    ids("python_start", "1+", "output_start", "1", "python_end"),  # a special token is no text
                    ids("python_start", "1+1", "assistant_end")):
        assert written_by(sampled) == sampled


def test_rows_do_not_mix():
    """Two rows a step apart; row 7 leaves the batch, as rows do that have ended."""
    tool, first, second = Calculator(TOKENIZER), block("2*3"), block("1/0")
    assert tool([7], first[:1]) == {}
    for a, b in zip(first[1:-1], second, strict=False):
        assert tool([7, 4], [a, b]) == {}
    output_start, six, output_end = ids("output_start", "6", "output_end")
    assert tool([4, 7], [second[-2], first[-1]]) == {7: output_start}
    assert tool([7, 4], [output_start, second[-1]]) == {7: six}
    assert tool([4], ids("x")) == {}  # row 4 alone: what waits for row 7 waits
    assert tool([7], [six]) == {7: output_end}
    assert tool([7, 4], [output_end, *ids("python_end")]) == {}
    with pytest.raises(ValueError):
        tool([0, 1], [65])
