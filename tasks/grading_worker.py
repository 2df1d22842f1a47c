"""
The processes in which tasks.grading runs math-verify, and the pool of them: WORKERS.ask(request) -> reply.

    {"gold": g, "answer": a} -> True, False, or None where the gold cannot be parsed
    {"gold": g}              -> whether the gold can be parsed

A worker is this file started by path, so that neither torch nor any other file of the project is loaded in it. It reads
a JSON request a line on stdin and writes a JSON reply a line on stdout. It ends when its stdin does, and by the
kernel's alarm when a request takes twice its time: a parent that was killed cannot end it, and a power of powers reads
no stdin.
"""
import atexit
import json
import os
import queue
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from functools import lru_cache

TIMEOUT = 5.0          # seconds that a worker may take for one request
START_TIMEOUT = 120.0  # seconds for a worker to load sympy; it takes one, but disks can be slow and cores shared
MEMORY = 1 << 30       # bytes of address space of one worker
NUM_WORKERS = 2        # NANOCHAT_GRADING_WORKERS overrides it


# In the worker


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


def load():
    """math-verify as two functions: parse(text) -> its sympy objects, none where it has no meaning; equal(gold, answer)
    -> bool."""
    import logging

    logging.disable()  # both functions warn that they have no time limit; here the parent has one
    from latex2sympy2_extended import latex2sympy2
    from math_verify import grader, verify
    from sympy import I, Float, Rational

    read_as_written()
    compare_exactly()
    # Its own units would make 5t, 5m and 5d the number 5.
    reading = latex2sympy2.NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True,
                                               boxed="none", equations=False)

    @lru_cache(maxsize=1000)
    def parsed(text: str) -> list:
        """The text as a whole: math-verify's own parse() searches it for something that can be read."""
        try:
            latex = latex2sympy2.normalize_latex(re.sub(r"(?<![0-9])\\%$", "", text), reading)
            found = latex2sympy2.latex2sympy(latex, is_real=not grader.should_treat_as_complex(latex),
                                             normalization_config=None)
            if re.search(r"[^0-9]\\%$", text):  # which the library reads after numbers alone
                found = latex2sympy2.convert_to_pct(found)
            return [exact(found)]
        except MemoryError:
            raise
        except Exception:  # whatever a parser says of such a text: it is none that can be read
            return []

    def exact(expression):
        """With its decimals as the fractions that they are: differences of floats vanish."""
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
    """The most memory that this program has held, in bytes. Linux's ru_maxrss would begin with what the parent held,
    and a trainer holds much."""
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



# In the parent

class Unscorable(Exception):
    """A worker ran out of time or memory, or died."""


class Worker:
    """A process with math-verify that answers one request at a time. Raises RuntimeError when it cannot be started."""

    def __init__(self):
        # A session of its own keeps it out of the signals to the trainer's process group; a fixed hash seed gives every
        # run the same order of sets.
        command = [sys.executable, os.path.abspath(__file__), str(MEMORY), str(TIMEOUT)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                                        start_new_session=True, env={**os.environ, "PYTHONHASHSEED": "0"})
        try:
            started = self.line(START_TIMEOUT)
        except BaseException:
            self.kill()
            raise
        if started != b"ready\n":
            self.kill()
            raise RuntimeError("a grading worker did not start; what it wrote to stderr says why "
                               "(is math-verify installed?)")

    def line(self, seconds: float) -> bytes:
        """The next line that it writes; what there is of it when the time is over or it has ended."""
        poll, written, deadline = select.poll(), b"", time.monotonic() + seconds
        poll.register(self.process.stdout, select.POLLIN)
        while not written.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                break
            part = os.read(self.process.stdout.fileno(), 4096)
            if not part:
                break
            written += part
        return written

    def ask(self, request: dict) -> bool | None:
        """The reply to a request. Raises Unscorable when there is none in time."""
        try:
            # far less than a pipe holds: it cannot block
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise Unscorable from None
        reply = self.line(TIMEOUT)
        if not reply.endswith(b"\n"):
            raise Unscorable
        return json.loads(reply)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Workers:
    """As many workers as there are requests at a time, up to a limit. They are started when they are needed and end
    with this process."""

    def __init__(self):
        self.lock, self.slots, self.has_hooks = threading.Lock(), None, False

    def open(self) -> queue.LifoQueue:
        """The slots, each with a worker or None."""
        with self.lock:
            if not self.has_hooks:
                atexit.register(self.close)
                os.register_at_fork(after_in_child=self.forget)
                self.has_hooks = True
            if self.slots is None:
                self.slots = queue.LifoQueue()  # the last one back is asked first, so that none is started without need
                for _ in range(int(os.environ.get("NANOCHAT_GRADING_WORKERS") or NUM_WORKERS)):
                    self.slots.put(None)
            return self.slots

    def ask(self, request: dict) -> bool | None:
        """A worker's reply. Raises Unscorable when there is none in time; another worker is started at the next
        request."""
        slots = self.open()
        worker = slots.get()
        try:
            if worker is not None and not worker.is_alive():
                worker = worker.kill()
            worker = worker or Worker()
            return worker.ask(request)
        except BaseException:  # KeyboardInterrupt too: a reply that nobody read would pass for the next one's
            worker = worker and worker.kill()
            raise
        finally:
            slots.put(worker)

    def forget(self):
        """In a forked child: a worker serves one process only."""
        self.lock, self.slots = threading.Lock(), None

    def close(self):
        """Ends the workers that are idle."""
        while self.slots is not None and not self.slots.empty():
            worker = self.slots.get()
            if worker is not None:
                worker.kill()
        self.slots = None


WORKERS = Workers()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
