"""
The process in which tasks.grading runs math-verify (a program of nanochat.workers):

    {"gold": g, "answer": a} -> True, False, or None where the gold cannot be parsed
    {"gold": g}              -> whether the gold can be parsed

It ends by the kernel's alarm when a request takes twice its time: a parent that was killed cannot end it, and a power
of powers reads no stdin.
"""
import json
import os
import re
import resource
import signal
import sys
from functools import lru_cache

TIMEOUT = 5.0     # seconds for one request
MEMORY = 1 << 30  # bytes of address space
MAX_BITS = 100_000  # of a number, 30,000 digits, or terms of a sum: an expression that has more is not worked out


def is_proper(latex: str) -> bool:
    """Whether this is the fraction of a mixed number."""
    match = re.fullmatch(r"\\frac\{([0-9]+)\}\{([0-9]+)\}", latex)
    return match is not None and 0 < int(match[1]) < int(match[2])


def read_as_written() -> None:
    """Changes how latex2sympy reads products and functions."""
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
    from sympy import Expr, MatrixBase, MatrixExpr, log

    in_order = _Latex2Sympy.convert_postfix_list

    def product(self, factors: list, i: int = 0):
        """What stands side by side is multiplied, but for a mixed number as it is printed, 3\\frac{1}{2}. The library
        adds any two numbers, so that it reads 3(2) and (3)(2) as 5, and drops what stands after a set."""
        first, texts, used = self.convert_postfix(factors[i]), [factor.getText() for factor in factors[i:]], 1
        if isinstance(first, list):  # the d/dx of a derivative
            return in_order(self, factors, i)
        if len(texts) > 1 and texts[0].isdigit() and is_proper(texts[1]):
            first, used = first + self.convert_postfix(factors[i + 1]), 2
        if used == len(texts):
            return first
        if not isinstance(first, Expr | MatrixBase):
            raise ValueError(f"{texts[0]} is multiplied")
        others = self.convert_postfix_list(factors, i + used)
        are_matrices = any(isinstance(x, MatrixBase | MatrixExpr) for x in (first, others))
        return (self.mat_mul_flat if are_matrices else self.mul_flat)(first, others)

    _Latex2Sympy.convert_postfix_list = product

    by_name = _Latex2Sympy.convert_func

    def function(self, func):
        """A function without brackets is of what stands beside it, and not of what that is multiplied with by a sign:
        \\log_2 16\\cdot 4 is 16. A logarithm to a base is a quotient: sympy.exp would drop the base."""
        value = by_name(self, func)
        if isinstance(value, Expr):
            value = value.replace(lambda x: isinstance(x, log) and len(x.args) == 2,
                                  lambda x: log(x.args[0]) / log(x.args[1]))
        alone = func.func_single_arg_noparens() if func.func_normal_single_arg() else None
        for factor in reversed(argument_and_factors(alone)[1]) if alone else ():
            value = self.mul_flat(value, self.convert_mp(factor))
        return value

    def argument(self, arg):
        return self.convert_expr(arg.expr()) if hasattr(arg, "expr") else self.convert_mp(argument_and_factors(arg)[0])

    def argument_and_factors(arg) -> tuple:
        node, factors = arg.mp_nofunc(), []
        while node.MUL() or node.CMD_TIMES() or node.CMD_CDOT():
            factors.append(node.mp_nofunc(1))
            node = node.mp_nofunc(0)
        return node, factors

    _Latex2Sympy.convert_func, _Latex2Sympy.convert_func_arg = function, argument


def compare_exactly() -> None:
    """Changes how math-verify compares numbers and equations."""
    from math_verify import grader
    from sympy import Eq, Expr, Float, Integer, simplify, solve

    by_solutions = grader.sympy_solve_and_compare

    def same_equation(gold, answer, *precision) -> bool:
        """Two equations without a solution are not the same for that, but when one is a multiple of the other."""
        if isinstance(gold, Eq) and isinstance(answer, Eq) and not solve(gold, gold.free_symbols):
            ratio = simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
            return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)
        return by_solutions(gold, answer, *precision)

    grader.sympy_solve_and_compare = same_equation

    by_rounding = grader.sympy_numeric_eq

    def same_number(a, b, *precision) -> bool:
        """Two numbers are the same when they are exactly so: rounded, as the library does it, any two tiny ones are
        alike. Formulas with variables are left to what comes next, which simplifies."""
        if (not all(isinstance(x, Expr) and not x.is_Matrix for x in (a, b))
                or all(grader.is_atomic_or_pct_atomic(x, Integer) for x in (a, b))):
            return by_rounding(a, b, *precision)  # a matrix's numbers come here one by one; 9 is 9%
        a, b = a.doit(), b.doit()
        difference = a - b
        if difference.is_Rational or difference.free_symbols:
            return difference == 0
        value = difference.evalf()
        digits = [number._prec for number in value.atoms(Float)]  # 1 bit: none of 100 digits tells it from zero
        return value == 0 or digits != [] and set(digits) == {1}

    grader.sympy_numeric_eq = same_number


def refuse_towers() -> None:
    """Makes what would take minutes an error at once: powers, factorials and binomials of more than MAX_BITS bits, and
    powers of sums that would have as many terms."""
    from sympy import Integer, Pow, Rational, binomial, factorial

    def bounded(owner, name: str, bits) -> None:
        work = getattr(owner, name)  # a method, or a class method that is bound already

        def checked(*args, **options):
            if bits(*args) > MAX_BITS:
                raise ValueError("a number of too many digits")
            return work(*args, **options)
        setattr(owner, name, staticmethod(checked) if hasattr(work, "__self__") else checked)

    def of_power(base, exponent, *_) -> int:
        small = not exponent.is_Integer or base in (-1, 0, 1)
        return 0 if small else abs(int(exponent)) * max(int(base.p).bit_length(), int(base.q).bit_length())

    for number in (Integer, Rational):
        bounded(number, "_eval_power", of_power)
    bounded(Pow, "_eval_expand_multinomial", lambda power, **_: int(power.exp) * len(power.base.args) ** 2
            if power.exp.is_Integer and power.base.is_Add else 0)
    bounded(factorial, "eval", lambda n: int(n) * int(n).bit_length() if n.is_Integer and n > 0 else 0)
    bounded(binomial, "eval", lambda n, k: min(int(n), abs(int(k))) * int(n).bit_length()
            if n.is_Integer and k.is_Integer and n > 0 else 0)


def statements_as_sets():
    """Two functions: region(what was read) -> the same, or the set that its inequalities leave; solutions(statement) ->
    the set of the numbers for which it holds."""
    from sympy import And, Complement, Eq, FiniteSet, Intersection, Interval, Ne, Set, Symbol, Union
    from sympy.core.function import AppliedUndef
    from sympy.core.relational import Relational

    def region(found):
        """Several statements on one name, an inequality among them, as the numbers for which all hold; where there are
        none, as those for which one holds. x != 2 as all numbers but that one."""
        if isinstance(found, Interval | Union | Complement):
            return found.doit()  # \frac{\pi}{2} comes as a quotient that is not worked out
        statements = [*map(plain, found.args if isinstance(found, FiniteSet) else [found])]
        several = len(statements) > 1 and all(isinstance(x, Relational | And) for x in statements)
        if ((isinstance(found, Ne | And) or several and not all(isinstance(x, Eq) for x in statements))
                and len(set().union(*(x.free_symbols for x in statements))) == 1):
            sets = [solutions(statement) for statement in statements]
            return Union(*sets) if Intersection(*sets).is_empty else Intersection(*sets)
        return found

    def solutions(statement) -> Set:
        """The numbers for which a statement on one name holds: of x = 5, x > 5, 1 < x < 5, g(x) > 5, x in (1, 5)."""
        statement = plain(statement)
        if isinstance(statement, Eq) and isinstance(statement.rhs, Set):
            return statement.rhs
        return statement if isinstance(statement, Set) else statement.as_set()

    def plain(statement):
        """With a name for each value of an unknown function: f(1) < f(2) is on two."""
        return statement.xreplace({value: Symbol(str(value), real=True) for value in statement.atoms(AppliedUndef)})

    return region, solutions


def load():
    """math-verify as two functions: parse(text) -> its sympy objects, none where it has no meaning; equal(gold, answer)
    -> bool."""
    import logging

    logging.disable()  # both functions warn that they have no time limit; here the parent has one
    from latex2sympy2_extended import latex2sympy2
    from math_verify import grader, verify
    from sympy import Eq, Float, I, Intersection, Rational, Set, Union

    read_as_written()
    compare_exactly()
    refuse_towers()
    region, solutions = statements_as_sets()
    # Its own units would make 5t, 5m and 5d the number 5.
    reading = latex2sympy2.NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True,
                                               boxed="none", equations=False)

    @lru_cache(maxsize=1000)
    def parsed(text: str) -> list:
        """The text as a whole: math-verify's own parse() searches it for something that can be read."""
        try:
            for sign, joined in ((" \\lor ", Union), (" \\land ", Intersection)):
                if sign in text:
                    return [joined(*(solutions(*parsed(part)) for part in text.split(sign)))]
            latex = latex2sympy2.normalize_latex(re.sub(r"(?<![0-9])\\%$", "", text), reading)
            found = latex2sympy2.latex2sympy(latex, is_real=not grader.should_treat_as_complex(latex),
                                             normalization_config=None)
            if re.search(r"[^0-9]\\%$", text):  # which the library reads after numbers alone
                found = latex2sympy2.convert_to_pct(found)
            return [region(exact(found))]
        except MemoryError:
            raise
        except Exception:  # whatever a parser says of such a text: it is none that can be read
            return []

    def exact(expression):
        """With its decimals as the fractions that they are: differences of floats vanish."""
        if isinstance(expression, Eq) and isinstance(expression.rhs, Set):
            return Eq(expression.lhs, exact(expression.rhs), evaluate=False)  # of x \in [1.5,2)
        return expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})

    def imaginary(expression):
        return expression.subs({symbol: I for symbol in expression.free_symbols if symbol.name == "i"})

    def equal(gold: list, answer: list) -> bool:
        return (same(gold, answer)
                or any(symbol.name == "i" for expression in [*gold, *answer]
                       for symbol in getattr(expression, "free_symbols", ()))
                and same(gold, answer, imaginary))

    def same(gold: list, answer: list, change=lambda expression: expression) -> bool:
        try:
            return verify([*map(change, gold)], [*map(change, answer)], allow_set_relation_comp=True,
                          timeout_seconds=None, raise_on_error=True)
        except MemoryError:
            raise
        except Exception:  # sympy cannot compare them, so it has not found them equal
            return False

    return parsed, equal


def judge(parsed, equal, gold: str, answer: str | None = None) -> bool | None:
    """The reply to a request."""
    golds = parsed(gold)
    if answer is None:
        return bool(golds)
    return equal(golds, parsed(answer)) if golds else None


def peak() -> int:
    """The most bytes that this program has held. Linux's ru_maxrss would begin with what the parent held."""
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(memory: int, seconds: float):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a graceful stop of the trainer still grades what it has
    here = os.path.dirname(os.path.abspath(__file__))
    # tasks/common.py is nobody's module `common`
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    parsed, equal = load()
    judge(parsed, equal, "\\frac{1}{2}", "\\sqrt{2}")  # builds the parser's tables before anybody waits for them
    replies = os.fdopen(os.dup(1), "w")
    for standard in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), standard)  # the parser prints what it dislikes
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        before = peak()
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        verdict = judge(parsed, equal, **json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        # math-verify swallows a MemoryError and goes on as if the two differed, so a "no" that took much memory is no
        # answer
        if verdict is False and peak() - before > memory // 8:
            raise MemoryError
        print(json.dumps(verdict), file=replies, flush=True)
        if peak() > memory // 2:
            return  # what sympy keeps adds up; the next answer gets a fresh process


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
