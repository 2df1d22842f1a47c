"""
Lookup: the chain task with operands that have to be looked up. It shows what a search is worth, and a memory without
one.

A problem is `4+c*g`; a solution is `<c>(7);4+7:1;<g>(3);1*3:3;=3`. `<c>` is a query, `(7)` the information, the answer
is the final result. What the keys stand for is one table of facts, the same for the whole task:

1. With --lookup-hops 2 the value of a key may be another key: `<c>(g);<g>(3);4+3:7;`.
2. With --lookup-noise 2 the information has two entries that were not asked for: `<c>(a2c7k1);`.
3. Demonstrations know the facts from memory, a fixed share of them wrongly. They write the information themselves, and
   a share of the operands is used without a query. So a model trained on them searches by itself (`<c>(9);`), and a
   search that is true has something to give: `tool` forces its information after a query.

Gold labels: a query is right iff its operation needs it and its information has the true value. Arithmetic is right as
in chain, with the true operands, wherever they came from. For a search in turns, information stands in the next
prompt: `reason_demo` writes one turn, `condense_demo` picks a value from a document.
"""
import argparse
import random
import re
from dataclasses import replace
from string import ascii_lowercase

from nanochat.cli import SHARE, at_least
from nanochat.common import BadInput
from nanochat.search import MOST_QUERIES, Search
from tasks.chain import STEP, Chain
from tasks.common import Problem

MOST_ENTRIES = 3  # of one of the documents that a search finds


def add_args(parser):
    group = parser.add_argument_group("task lookup (with the flags of chain; its answer is always the final result)")
    group.add_argument("--lookup-keys", type=at_least(26, int, 26 ** 2), default=26,
                       help="keys of the table of facts; more than 26 have two letters each")
    group.add_argument("--lookup-key-share", type=SHARE, default=0.5,
                       help="share of the operands that are keys; one of each problem always is")
    group.add_argument("--lookup-hops", type=int, default=1, help="queries that the longest look-up takes")
    group.add_argument("--lookup-noise", type=int, default=0, help="entries of the information that nobody asked for")
    group.add_argument("--lookup-share", type=SHARE, default=0.35,
                       help="share of the facts that a memory has wrongly, the generator's and the verifier's each")
    group.add_argument("--lookup-wrongness", type=SHARE, default=0.75,
                       help="how often a demonstration shows such a fact wrongly")
    group.add_argument("--lookup-recall-share", type=SHARE, default=0.3,
                       help="share of the keys that a demonstration uses from memory, without a query")


class Lookup(Chain):
    """The lookup task, a chain task of the same flags and seed. Its facts are a function of the seed and the flags."""
    name = "lookup"
    refusals = ("no_problem", "too_short", "too_long", "held_out")
    # Chain's read digits alone, so this task has none.
    variants = relabelled = violations = principle_of = revise_demo = property()

    def __init__(self, args, seed: int):
        super().__init__(argparse.Namespace(**vars(args) | {"chain_answer": "final"}), seed)
        num_keys, hops, noise = args.lookup_keys, args.lookup_hops, args.lookup_noise
        if hops < 1 or num_keys // hops < self.modulus:
            raise BadInput(f"--lookup-hops {hops}: with --lookup-keys {num_keys} it must be from 1 to "
                           f"{num_keys // self.modulus}, so that every result has a key")
        if not 0 <= noise < num_keys:
            raise BadInput(f"--lookup-noise {noise}: must be from 0 to {num_keys - 1}, one less than --lookup-keys")
        self.key_share, self.noise = args.lookup_key_share, noise
        self.fact_wrongness, self.recall_share = args.lookup_wrongness, args.lookup_recall_share
        self.about = (f"{self.about}; a letter stands for a number that has to be looked up, <c>(7) is a query and "
                      f"what it finds")
        self.facts, self.others = facts_of(seed, num_keys, hops, self.modulus)
        self.key = f"[a-z]{{{len(next(iter(self.facts)))}}}"
        self.value = f"[0-9]|{self.key}"
        self.query = re.compile(re.escape(self.fmt.query_open) + f"({self.key})" + re.escape(self.fmt.query_close)
                                + re.escape(self.fmt.info_open) + "(.*)" + re.escape(self.fmt.info_close))
        self.wrong_facts = self._wrong_facts(2 * seed, args.lookup_share)
        self.verifier_wrong_facts = self._wrong_facts(2 * seed + 1, args.lookup_share)

    def problem(self, split: str, index: int) -> Problem:
        """Problem `index` of a split: chain's, with keys in place of operands. Every key has one value, so problems of
        two splits differ as chain's do."""
        problem = super().problem(split, index)
        rng = random.Random(f"keys-{self.seed}-{split}-{index}")
        operations = self._terms(problem.prompt)
        always, text = rng.randrange(len(operations)), problem.prompt[0]
        for k, (op, operand) in enumerate(operations):
            named = k == always or rng.random() < self.key_share
            text += op + (rng.choice(self._names(operand)) if named else operand)
        return Problem(split, index, text, problem.answer)

    def answer_of(self, prompt: str) -> str | None:
        """The gold answer of any text as a problem, None where it is none: all that is written must be known."""
        digits = f"[0-{self.modulus - 1}]"
        operands = [operand for _, operand in self._terms(prompt)]
        known = all(operand in self.facts or re.fullmatch(digits, operand) for operand in operands)
        if not re.fullmatch(f"{digits}([-+*]({self.value}))+", prompt) or not known:
            return None
        return self.fmt.answer(self._solution(prompt, self.facts.get, self._result, None))

    def hint_of(self, problem: Problem) -> str:
        """What a proposer is shown of a reference problem: the answer that its own one is to have."""
        return problem.answer

    def read_problem(self, text: str, index: int) -> tuple[Problem | None, str]:
        """As chain's. The problem stands where a solution has its answer, after what the proposer searched and worked:
        `<c>(7);4+7:1;=4+c`."""
        prompt = self.fmt.answer(text) or ""
        if self.answer_of(prompt) is None:
            return None, "no_problem"
        digits = "".join(op + self._fetched(operand)[1] for op, operand in self._terms(prompt))
        problem, reason = super().read_problem(prompt[0] + digits, index)
        return problem and replace(problem, prompt=prompt), reason

    def queries_of(self, prompt: str) -> list[str]:
        """The queries that a problem takes, in order."""
        return [key for _, operand in self._terms(prompt) for key, _ in self._fetched(operand)[0]]

    # The search

    @property
    def queries(self) -> list[str]:
        """All that can be asked."""
        return list(self.facts)

    def find(self, query: str) -> str:
        """The information about a key, "" about what is none."""
        return "".join(self.documents(query))

    def documents(self, query: str) -> list[str]:
        """The same in parts, as a search finds documents: each has a few whole entries, one in all is about the key."""
        return self._documents(query, self.facts.get) if query in self.facts else []

    def serves(self, document: str, query: str) -> str:
        """What of a document serves a query: the value that it has for the key, "" where it has none."""
        return self._entry(document, query) or ""

    def tool(self, tokenizer, most: int = MOST_QUERIES) -> Search:
        """A search for the rows of one call of the sampler."""
        return Search(tokenizer, self.fmt, self.find, most)

    # Labels

    def step_errors(self, problem: Problem, solution: str) -> list[str | None]:
        """What is wrong with each step: "operands" (not its own, or it is no step at all), "query" (it asks for what
        its operation does not need), "information" (without the true value), "result" or None."""
        errors = []
        for step in self._read(problem.prompt, solution, self.facts.get):
            match step:
                case "fetch", _, needed, stated:
                    errors.append("query" if needed is None else None if stated == needed else "information")
                case "work", a, op, b, stated:
                    errors.append(None if stated == self._result(a, op, b) else "result")
                case _:
                    errors.append("operands")
        return errors

    def analysis_labels(self, problem: Problem, solution: str, analyses: list[str]) -> list[bool]:
        """Whether what a verification says of each step is right: the fact ("c7"), the step worked again ("3+5:8"), or
        "?" of one that the problem does not need."""
        truths = [self._analysis(step, self._result) for step in self._read(problem.prompt, solution, self.facts.get)]
        return [said == truth for said, truth in zip(analyses, truths, strict=False)]

    # Demonstrations

    def solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """A demonstration for the generator, from its memory."""
        return self._solution(problem.prompt, self._memory(self.wrong_facts, rng), self._generators_work(rng), rng)

    def corrupted_solution(self, problem: Problem, rng: random.Random) -> str:
        """A right solution in which a fact or result may be wrong and is carried on; over half of all stay right."""
        operations = self._terms(problem.prompt)
        num_steps = len(operations) + sum(not operand.isdigit() for _, operand in operations)
        rate = rng.choice([0.0, min(1.0, 1.5 / num_steps)])

        def look(key: str) -> str:
            return rng.choice(self.others[key]) if rng.random() < rate else self.facts[key]

        def work(a: int, op: str, b: int) -> int:
            return (self._result(a, op, b) + (rng.random() < rate) * rng.randrange(1, self.modulus)) % self.modulus

        return self._solution(problem.prompt, look, work, rng)

    def corrupt(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A wrong version of a solution: the result of one step is changed, and the arithmetic after it is worked on
        from there, so that the answer may come out right again. Where steps are missing or unreadable the last digit
        of the text is changed."""
        bodies = self.fmt.step_bodies(solution)
        matches = [STEP.fullmatch(body) for body in bodies]
        worked = [i for i, match in enumerate(matches) if match]
        readable = all(match or self.query.fullmatch(body) for body, match in zip(bodies, matches, strict=True))
        other = lambda result: (result + rng.randrange(1, self.modulus)) % self.modulus
        if not readable or len(worked) != len(self._terms(problem.prompt)):
            return re.sub("[0-9](?=[^0-9]*$)", lambda digit: str(other(int(digit[0]))), solution)
        changed, value = rng.randrange(len(worked)), int(problem.prompt[0])
        for k, i in enumerate(worked):
            a, op, b, stated = matches[i].groups()
            a = value if k > changed else int(a)
            value = int(stated) if k < changed else other(int(stated)) if k == changed else self._result(a, op, int(b))
            bodies[i] = f"{a}{op}{b}:{value}"
        return self.fmt.render_solution(bodies, str(value))

    def verification_demo(self, problem: Problem, solution: str, rng: random.Random) -> str:
        """A demonstration for the verifier: facts and results by the verifier's own beliefs, and judged by them."""
        look = self._memory(self.verifier_wrong_facts, rng)
        work = self._verifiers_work(rng)
        steps = self._read(problem.prompt, solution, look)
        analyses = [self._analysis(step, work) for step in steps]
        verdicts = [said != "?" and said == self._stated(step) for said, step in zip(analyses, steps, strict=True)]
        results = [str(step[4]) for step in steps if step and step[0] == "work"]
        verdict = (len(results) == len(self._terms(problem.prompt)) and all(verdicts)
                   and self.fmt.answer(solution) == results[-1])
        return self.fmt.render_verification(analyses, verdicts, verdict)

    def verifier_solution_demo(self, problem: Problem, rng: random.Random) -> str:
        """A solution by what the verifier believes, for a judge that works the problem itself."""
        return self._solution(problem.prompt, self._memory(self.verifier_wrong_facts, rng), self._verifiers_work(rng),
                              rng)

    def propose_demo(self, problem: Problem, rng: random.Random) -> tuple[dict[str, str], str]:
        """A search that leads to the problem, after the answer that it comes to: ({"hint": "3"},
        "<c>(7);4+7:1;<g>(3);1*3:3;=4+c*g"). By a wrong memory that is not the true answer."""
        steps, mark, answer = self.solution_demo(problem, rng).partition(self.fmt.answer_open)
        return {"hint": answer}, steps + mark + problem.prompt

    def reason_demo(self, problem: Problem, rng: random.Random) -> tuple[dict[str, str], str]:
        """One turn of a solution, up to a query or to the end, after the turns before it and what they found, without
        noise: ({"context": "<c>(7);"}, "4+7:1;<g>")."""
        solution = self._solution(problem.prompt, self._memory(self.wrong_facts, rng), self._generators_work(rng), rng,
                                  noise=0)
        found = re.escape(self.fmt.info_open) + "[^)]*" + re.escape(self.fmt.info_close + self.fmt.step_close)
        parts = re.split(f"({found})", solution)  # turns, and between them what was found
        turn = 2 * rng.randrange(len(parts) // 2 + 1)
        return {"context": "".join(parts[:turn])}, parts[turn]

    def condense_demo(self, problem: Problem, rng: random.Random) -> tuple[dict[str, str], str]:
        """What serves a query, picked from some of the documents that are found, "" where none of these is about it:
        ({"document": "a2c7k1", "query": "c"}, "7"). A wrong memory now and then gets in the way of what is written."""
        query = rng.choice(self.queries_of(problem.prompt))
        documents = self.documents(query)
        read = "".join(rng.sample(documents, rng.randint(1, len(documents))))
        serves = self._entry(read, query) is not None
        return {"document": read, "query": query}, self._memory(self.wrong_facts, rng)(query) if serves else ""

    # How facts and steps are read and written

    def _terms(self, prompt: str) -> list[tuple[str, str]]:
        """The operations of a problem, each with its operand: a digit or a key."""
        return re.findall(f"([-+*])({self.value})", prompt)

    def _names(self, digit: str) -> list[str]:
        """The keys that come to a digit."""
        return [key for key in self.facts if self._fetched(key)[1] == digit]

    def _wrong_facts(self, seed: int, share: float) -> dict[str, str]:
        """A random `share` of the facts, each with one fixed wrong value of the same kind."""
        rng = random.Random(f"wrong-facts-{seed}")
        chosen = rng.sample(list(self.facts), round(share * len(self.facts)))
        return {key: rng.choice(self.others[key]) for key in chosen}

    def _memory(self, wrong: dict[str, str], rng: random.Random):
        """A function key -> what is believed of it this time."""
        return lambda key: wrong[key] if key in wrong and rng.random() < self.fact_wrongness else self.facts[key]

    def _generators_work(self, rng: random.Random):
        return lambda a, op, b: self._believed(a, op, b, self.misconceptions, self.wrongness, rng)

    def _verifiers_work(self, rng: random.Random):
        return lambda a, op, b: self._believed(a, op, b, self.verifier_misconceptions, self.verifier_wrongness, rng)

    def _fetched(self, operand: str, look=None) -> tuple[list[tuple[str, str]], str]:
        """The facts that lead from an operand to a digit, and that. look: key -> value, by default the true one."""
        facts = []
        while not operand.isdigit():
            facts.append((operand, (look or self.facts.get)(operand)))
            operand = facts[-1][1]
        return facts, operand

    def _documents(self, key: str, look, noise: int | None = None, value: str | None = None) -> list[str]:
        """What is found about a key by these facts: its value alone, or a few entries in one fixed order."""
        value = look(key) if value is None else value
        noise = self.noise if noise is None else noise
        if not noise:
            return [value]
        rng = random.Random(f"documents-{self.seed}-{key}")
        keys = rng.sample([other for other in self.facts if other != key], noise) + [key]
        rng.shuffle(keys)
        entries, documents = [k + (value if k == key else look(k)) for k in keys], []
        while entries:
            size = rng.randint(1, MOST_ENTRIES)
            documents.append("".join(entries[:size]))
            entries = entries[size:]
        return documents

    def _entry(self, information: str, key: str) -> str | None:
        """The value that information has for a key: it is the value, or has one entry about it."""
        if re.fullmatch(self.value, information):
            return information
        entry = f"({self.key})({self.value})"
        return dict(re.findall(entry, information)).get(key) if re.fullmatch(f"({entry})+", information) else None

    def _solution(self, prompt: str, look, work, rng: random.Random | None, noise: int | None = None) -> str:
        """A solution by these facts and this arithmetic. rng draws which keys are used without a query; None: none."""
        value, steps, fmt = int(prompt[0]), [], self.fmt
        for op, operand in self._terms(prompt):
            facts, digit = self._fetched(operand, look)
            if facts and (rng is None or rng.random() >= self.recall_share):
                steps += [fmt.query_open + key + fmt.query_close + fmt.info_open
                          + "".join(self._documents(key, look, noise, stated)) + fmt.info_close
                          for key, stated in facts]
            result = work(value, op, int(digit))
            steps.append(f"{value}{op}{digit}:{result}")
            value = result
        return fmt.render_solution(steps, str(value))

    def _read(self, prompt: str, solution: str, look) -> list[tuple | None]:
        """What each step does: ("fetch", key, the value that it needs, what the information has), the value None where
        the operation does not need the key or has it already; ("work", a, op, b, stated result); None where it does not
        copy its operands. look: key -> value, for the operands."""
        operations, value, steps = self._terms(prompt), int(prompt[0]), []
        facts, digit = zip(*[self._fetched(operand, look) for _, operand in operations], strict=True)
        k, needed = 0, dict(facts[0])
        for body in self.fmt.step_bodies(solution):
            query, step = self.query.fullmatch(body), STEP.fullmatch(body)
            if query:
                steps.append(("fetch", query[1], needed.pop(query[1], None), self._entry(query[2], query[1])))
                continue
            stated = (int(step[1]), step[2], int(step[3]), int(step[4])) if step else None
            copied = (stated is not None and k < len(operations) and value is not None
                      and stated[:3] == (value, operations[k][0], int(digit[k])))
            steps.append(("work", *stated) if copied else None)
            k, value = k + 1, stated[3] if stated else None
            needed = dict(facts[k]) if k < len(operations) else {}
        return steps

    def _analysis(self, step: tuple | None, work) -> str:
        """What a verification says of a step that was read."""
        match step:
            case "fetch", key, str(needed), _:
                return f"{key}{needed}"
            case "work", a, op, b, _:
                return f"{a}{op}{b}:{work(a, op, b)}"
        return "?"

    def _stated(self, step: tuple | None) -> str | None:
        """The same as the step itself states it."""
        match step:
            case "fetch", key, _, stated:
                return f"{key}{stated}"
            case "work", a, op, b, stated:
                return f"{a}{op}{b}:{stated}"
        return None


def facts_of(seed: int, num_keys: int, hops: int, modulus: int) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The table of facts, and for each key the wrong values that it could have. The keys are dealt to `hops` levels;
    those of the first stand for a digit, the others for a key of the level below. Each level comes to every digit."""
    rng = random.Random(f"facts-{seed}")
    names = list(ascii_lowercase) if num_keys == 26 else [a + b for a in ascii_lowercase for b in ascii_lowercase]
    keys = rng.sample(names, num_keys)
    facts, others, values = {}, {}, [str(digit) for digit in range(modulus)]
    for level in range(hops):
        mine = keys[level::hops]
        for i, key in enumerate(mine):
            facts[key] = values[i % len(values)]
            others[key] = [value for value in values if value != facts[key]]
        values = mine
    return facts, others
