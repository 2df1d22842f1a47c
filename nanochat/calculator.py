"""
The calculator that a model may use while it samples: what upstream's tool accepts, read as a syntax tree and never run
as code.

A model writes <|python_start|>12/60<|python_end|>, and the sampler forces <|output_start|>0.2<|output_end|> after it.
"""
import ast
import operator
import string
import threading
from collections import deque

MAX_LENGTH = 200     # characters of an expression; bounds its depth too
LARGEST = 10 ** 100  # magnitude of any number, those on the way included
ARITHMETIC = set("0123456789*+-/.() ")
COUNTING = set(string.ascii_letters + string.digits + "'\"()._ ")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv}
# Python 3.11 counts the depth of all threads' trees together: where one stops in the middle, it raises SystemError.
PARSING = threading.Lock()


def number(node: ast.expr) -> int | float:
    """The value of a tree of numbers, signs and + - * / //. Raises ValueError for others, and beyond LARGEST."""
    match node:
        case ast.Constant(value=int() | float() as value):
            pass
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = number(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -number(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](number(left), number(right))
        case _:
            raise ValueError("no arithmetic")
    if not abs(value) <= LARGEST:  # so written that inf and nan fail too
        raise ValueError("too large a number")
    return value


def count(node: ast.expr) -> int:
    """The value of 'text'.count('part'). Raises ValueError for any other tree."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as text), attr="count"),
                      args=[ast.Constant(value=str() as part)], keywords=[]):
            return text.count(part)
    raise ValueError("no count")


def calculate(expression: str) -> str | None:
    """The result of an expression as text, None where it has none. Total: any string gives one of the two, at once.

    Either arithmetic with + - * / // and parentheses, or one 'text'.count('part') with letters, digits and spaces in
    the strings. Commas are taken out first, everywhere, as upstream does: "1,000*2" -> "2000".
    """
    text = expression.replace(",", "")
    if len(text) > MAX_LENGTH or not (set(text) <= ARITHMETIC or set(text) <= COUNTING):
        return None
    try:
        with PARSING:
            tree = ast.parse(text.strip(), mode="eval").body
        return str(number(tree) if set(text) <= ARITHMETIC else count(tree))
    except (SyntaxError, ValueError, ArithmeticError,
            RecursionError, MemoryError):  # the last two: the parser's word for too deep
        return None


class Calculator:
    """Which tokens to force on the rows of one call of the sampler, from the tokens that they get.

    At <|python_end|> what the row wrote since <|python_start|> is calculated; a result is forced between
    <|output_start|> and <|output_end|>, a token at a time, and where there is none the row goes on by itself. A second
    <|python_start|> begins anew.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.python_start, self.python_end, self.output_start, self.output_end = map(
            tokenizer.special, ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"))
        self.triggers = [self.python_end]  # tokens after which alone it begins to force others
        self.written: dict[int, list[int]] = {}  # row -> tokens of its open block
        self.waiting: dict[int, deque[int]] = {}  # row -> tokens still to be forced

    def __call__(self, rows: list[int], tokens: list[int]) -> dict[int, int]:
        """The token that each of these rows must get next, for those that must. tokens: what each just got."""
        for row, token in zip(rows, tokens, strict=True):
            if token == self.python_start:
                self.written[row] = []
            elif token == self.python_end and row in self.written:
                self.waiting[row] = deque(self.output(self.written.pop(row)))
            elif row in self.written:
                self.written[row].append(token)
        return {row: self.waiting[row].popleft() for row in rows if self.waiting.get(row)}

    def output(self, written: list[int]) -> list[int]:
        """The tokens that follow a block; none when it has no result."""
        result = calculate(self.tokenizer.decode(written))
        return [] if result is None else [self.output_start, *self.tokenizer.encode(result), self.output_end]
