"""
What SFT learns from: demonstration i of a role, for any i, and conversations among them.
"""
import math
import random
import re

from nanochat.common import BadInput, print0
from nanochat.dataloader import shuffled
from nanochat.rl.records.outcomes import num_problems_of, outcomes_of
from nanochat.rl.records.prompts import DEMOS, generator_prompt, quoting_prompt, refine_prompt
from nanochat.rl.verify.critiques import CRITIQUES
from nanochat.rl.verify.forms import FORMS, form_prompt, judged_together, one_bare
from tasks.common import demo_of
from tasks.conversations import load_conversations

NUM_FIRST = 512  # examples that are looked at before the first step


def demonstration(args, task, tokenizer, index: int, sampled: list, context: int,
                  split: str = "sft") -> tuple[list[int], list[int]]:
    """Ids and loss mask of demonstration `index` of a split: a function of the seed, the role and the index. Of both
    roles by turns, each its own as if it were alone. Raises BadInput when it exceeds the context."""
    role = args.role
    if role == "both":
        role, index = ("generator", "verifier")[index % 2], index // 2
    rng = random.Random(f"{args.seed}-{role}-{index}")
    problem = task.problem(split, index)
    if role == "generator":
        prompt = generator_prompt(tokenizer, task.fmt, problem.prompt)
        completion = demo_of(task, "solution_demo", problem, rng)
        kind = drawn_kind(shares_of(args.demo_shares), rng)
        if kind == "refine":
            prompt = second_attempt(task, tokenizer, problem, rng)
        elif kind:
            prompt, completion = other_demo(task, tokenizer, kind, problem, rng)
    else:
        solution = demo_of(task, "corrupted_solution", problem, rng)
        if sampled and rng.random() < 0.5:
            problem, solution = rng.choice(sampled)
        if args.cut_share and rng.random() < args.cut_share:
            solution = beginning(task.fmt, solution, rng)
        form = FORMS[args.verifier_form]
        solutions = judged_together(task, problem, solution, form.num or args.num_judged, rng)
        if args.bare_share and rng.random() < args.bare_share:
            solutions = one_bare(task.fmt, solutions, rng)
        prompt = form_prompt(tokenizer, task.fmt, args.verifier_form, problem.prompt, solutions)
        completion = form.demo(task, problem, solutions, rng)
    completion = [*tokenizer.encode(completion), tokenizer.assistant_end]
    if len(prompt) + len(completion) > context:
        raise BadInput(f"the context (--sequence-len {context}) is too short: demonstration {index} of {task.name} "
                       f"has {len(prompt) + len(completion)} tokens")
    return prompt + completion, [0] * len(prompt) + [1] * len(completion)


def beginning(fmt, solution: str, rng: random.Random) -> str:
    """A solution up to the end of one of its steps, each as likely; all of one that has none."""
    ends = [end for _, end in fmt.step_spans(solution)]
    return solution[: rng.choice(ends)] if ends else solution


def second_attempt(task, tokenizer, problem, rng: random.Random) -> list[int]:
    """The prompt of a second attempt after a corrupted solution, with a critique of any kind or none."""
    solution = demo_of(task, "corrupted_solution", problem, rng)
    outcome = outcomes_of(task, [problem], [solution])[0]
    critiques = ["", demo_of(task, "verification_demo", problem, solution, rng)]
    critiques += [critique(task, problem, solution, outcome) for critique in CRITIQUES.values() if outcome is not None]
    return refine_prompt(tokenizer, task.fmt, problem.prompt, solution, rng.choice(critiques))


def shares_of(texts: list[str]) -> dict[str, float]:
    """The shares that --demo-shares gives. Raises BadInput."""
    shares = {}
    for text in texts:
        kind, _, share = text.partition(":")
        if kind not in DEMOS or kind in shares:
            raise BadInput(f"--demo-shares {text}: there are {', '.join(DEMOS)}, each once, as in refine:0.5")
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", share) or not 0 <= float(share) <= 1:
            raise BadInput(f"--demo-shares {text}: needs a share from 0 to 1, as in refine:0.5")
        shares[kind] = float(share)
    if sum(shares.values()) > 1 + 1e-9:
        raise BadInput(f"--demo-shares {' '.join(texts)}: together they are more than 1")
    return shares


def check_demos(args, task) -> None:
    """Raises BadInput for kinds of demonstrations that the role or the task does not have."""
    shares = shares_of(args.demo_shares)
    if shares and args.role == "verifier":
        raise BadInput(f"--demo-shares {' '.join(args.demo_shares)}: are shares of the generator's demonstrations")
    for kind in shares:
        if kind != "refine" and not hasattr(task, f"{kind}_demo"):
            raise BadInput(f"--demo-shares {kind}: task {task.name} has no {kind}_demo")


def drawn_kind(shares: dict[str, float], rng: random.Random) -> str:
    """A kind of demonstration, each as often as its share says; "" for a solution. Nothing is drawn without shares."""
    at = rng.random() if shares else 1.0
    for kind, share in shares.items():
        at -= share
        if at < 0:
            return kind
    return ""


def other_demo(task, tokenizer, kind: str, problem, rng: random.Random) -> tuple[list[int], str]:
    """Prompt and completion of a demonstration that is no solution, from the task. Raises BadInput for no text."""
    quoted, completion = getattr(task, f"{kind}_demo")(problem, rng)
    if not all(isinstance(text, str) for text in (completion, *quoted.values())):
        raise BadInput(f"task {task.name}: {kind}_demo() gives no text for problem {problem.index} of {problem.split}")
    return quoting_prompt(tokenizer, task.fmt, problem.prompt, DEMOS[kind], **quoted), completion


def num_bytes(messages: list[dict]) -> int:
    """The size of what a conversation says, in UTF-8."""
    texts = [part["text"] for message in messages for part in (
        [{"text": message["content"]}] if isinstance(message["content"], str) else message["content"])]
    return sum(len(text.encode(errors="replace")) for text in texts)


def held_out(args, task, tokenizer, context: int) -> list[tuple[list[int], list[int]]]:
    """The first --eval-examples demonstrations of test_in, each once. Says why where there are none."""
    if not args.eval_examples:
        return []
    try:
        if args.conversations and args.conversations_share == 1:
            raise BadInput("conversations alone are trained on, all of them")
        num = num_problems_of(task, "test_in", args.eval_examples)
        return [demonstration(args, task, tokenizer, i, [], context, "test_in") for i in range(num)]
    except BadInput as error:
        print0(f"there is no held-out loss: {error}")
        return []


class Examples:
    """Example i, for any i: a conversation or a demonstration, at even distances by --conversations-share. sampled:
    solutions that the verifier's demonstrations judge beside corrupted ones."""

    def __init__(self, args, task, tokenizer, context: int):
        self.sampled: list = []
        self.demonstration = lambda index: demonstration(args, task, tokenizer, index, self.sampled, context)
        self.tokenizer, self.context = tokenizer, context
        self.conversations = load_conversations(args.conversations) if args.conversations else []
        self.share = args.conversations_share if self.conversations else 0.0
        self.row = shuffled(len(self.conversations), args.seed)
        self.names, self.too_long = " ".join(args.conversations), set()  # rows, each of which is looked at once
        # a token stands for so many bytes at most
        self.longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)) if self.share else 0
        # all of a finite task; a verifier's would all be graded
        num_all = task.num_problems("sft") if args.role != "verifier" and hasattr(task, "num_problems") else 0
        num_all *= 1 + (args.role == "both")
        self.num_checked = min(num_all, args.num_steps * args.examples_per_step)

    def check(self) -> list[int]:
        """Trained tokens of the first NUM_FIRST examples. Raises BadInput, now and not in the middle of training, when
        one of these demonstrations, or of all of a finite task, or none of the conversations fits the context."""
        for index in range(NUM_FIRST, self.num_checked):
            self.demonstration(index)
        found = [self(i) for i in range(NUM_FIRST)]
        num_long = found.count(None)
        if num_long and num_long == math.floor(NUM_FIRST * self.share):
            raise BadInput(f"--conversations {self.names}: none of the first {num_long} fits the context of "
                           f"{self.context}")
        return [sum(example[1]) for example in found if example]

    def __call__(self, index: int) -> tuple[list[int], list[int]] | None:
        """Ids and loss mask, None for a conversation longer than the context: to be counted."""
        num_before = math.floor(index * self.share)
        if math.floor((index + 1) * self.share) == num_before:
            return self.demonstration(index - num_before)
        return self.conversation(self.row(num_before))

    def conversation(self, row: int) -> tuple[list[int], list[int]] | None:
        """Ids and loss mask of a conversation, None for one longer than the context. One that is, is encoded once, or
        never, where it would be with the longest of tokens: that of 10 MB takes seconds."""
        if row not in self.too_long:
            messages = self.conversations[row]
            if num_bytes(messages) <= self.longest * self.context:
                ids, mask = self.tokenizer.render_conversation(messages, None)
                if len(ids) <= self.context:
                    return ids, mask
            self.too_long.add(row)
        return None
