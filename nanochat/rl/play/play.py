"""
What a recipe may do in one step: sample, score, check, learn. It knows roles by their names and no algorithm.

P prompts, N rollouts, T tokens.
"""
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from nanochat.cli import MOST
from nanochat.common import BadInput, all_reduce, check_defaults, described, gather_lists, mean_over_ranks, print0
from nanochat.engine import Tool
from nanochat.kernels.losses import PolicyLoss
from nanochat.rl.credit.advantages import PRESETS, source_advantages
from nanochat.rl.credit.rewards import terminal_rewards
from nanochat.rl.learn.packing import MicroBatch, pack, pad_batches
from nanochat.rl.learn.roles import Role, short_name
from nanochat.rl.learn.state import RunState
from nanochat.rl.learn.trainer import score
from nanochat.rl.play.sampling import Sampler, read_solutions, read_verifications
from nanochat.rl.records.outcomes import answers_of, counted_outcomes, num_problems_of, outcomes_of, scores_of
from nanochat.rl.records.prompts import (LOWER_LIMITS, Prompt, Solution, Verification, empty_verifier_prompt,
                                         generator_prompt, numbered, quoting_prompt, refine_prompt, solve_prompt,
                                         verify_prompts)
from nanochat.rl.records.rollouts import Rollouts, padded
from nanochat.storage.run import Run
from nanochat.weights import copy_weights, refresh
from tasks.common import Problem, check_problem


class Draw(NamedTuple):
    """What a recipe samples or gives in a step under one name. Context check, memory and hours follow from it."""
    role: str
    num_prompts: int              # over all ranks
    num_samples: int              # of each prompt
    max_new_tokens: int           # of each sample
    times: int | None = None      # steps of a run in which it happens; None: --num-steps
    trained: bool = False         # an update learns from it
    teacher_forced: bool = False  # it is given, not sampled
    wrap: Callable = generator_prompt  # the prompt is wrap(tokenizer, fmt, problem) ...
    quoted: int = 0               # ... and so many tokens of completions that stand in it
    scored: int = 0               # times that Play.logprobs is called on it, those of a reference apart
    split: str = "rl"             # where its problems are from
    remedy: str = LOWER_LIMITS    # what would shorten it where it does not fit


def solution_draws(args) -> dict[str, Draw]:
    """The `draws` of a recipe that learns from a group of solutions of each problem."""
    return {"solutions": Draw("generator", args.examples_per_step, args.num_samples, args.max_new_tokens, trained=True)}


# What draws were called when the published runs were made: their noise is still that of the old name.
NOISE = {"solutions": "generator", "verifications": "verifier", "reviews": "verifications"}


class Update(NamedTuple):
    """What a recipe yields; the loop makes one optimizer step of it. None: as the flags say."""
    role: str
    parts: list[tuple[Rollouts, torch.Tensor]]  # rollouts and their advantages (N, T), which share the step
    loss: PolicyLoss | None = None
    aggregation: str | None = None  # one of AGGREGATIONS
    lr: float | None = None
    num_updates: int | None = None  # optimizer steps on it


@dataclass
class Play:
    """One run as a recipe sees it. All ranks call the same verbs in the same order, also with empty lists: they wait
    for each other. What a recipe draws itself comes from random.Random of the seed and the step, not from torch's
    global generator. What a step draws and logs is collected here until it is over."""
    args: object
    run: Run
    sampler: Sampler
    roles: dict[str, Role]
    draws: dict[str, Draw]    # what the recipe declares that it samples
    totals: dict[str, int]    # updates of each role in a whole run
    state: RunState
    loss: PolicyLoss
    evaluating: bool = False  # draws then belong to no step, and are not counted
    examples: Rollouts | None = None  # an evaluation's first solutions in distribution, for examples.jsonl
    has_moved: bool = False   # weights were changed in this step: it is carried through
    moved: set[int] = field(default_factory=set)   # ids of the parameters that were
    num_drawn: int = 0        # problems taken in this step
    sampled: int = 0          # tokens of this rank in this step
    done: set[str] = field(default_factory=set)    # draws that were made in this step
    drawn: dict[str, object] = field(default_factory=dict)  # draw -> model, where it had the trainer's distribution
    told: set[str] = field(default_factory=set)    # warnings that are given once
    page_due: float = float("inf")                 # when the report is to be written anew, as of time.time()
    metrics: dict = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def task(self):
        return self.sampler.task

    @property
    def tokenizer(self):
        return self.sampler.tokenizer

    @property
    def device(self) -> torch.device:
        return self.run.device

    @property
    def memory(self) -> dict:
        """Plain values and tensors on CPU that are saved with the run: pools, averages, the phase."""
        return self.state.memory

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def steps(self) -> dict[str, int]:
        """Updates that each role has made."""
        return self.state.role_steps

    def is_over(self, counted: str) -> bool:
        """Whether this role has made --num-steps updates, or --token-budget is spent."""
        budget = self.args.token_budget
        return self.steps[counted] >= self.args.num_steps or 0 < budget <= self.state.sampled_tokens

    def position(self, role: str) -> tuple[int, int, int]:
        """How far a role is in the run, in updates: those made, all, and made at its last. With --token-budget in
        tokens, which all roles sample."""
        if budget := self.args.token_budget:
            return self.state.sampled_tokens, budget, budget
        return self.steps[role], self.totals[role], self.totals[role] - 1

    def progress(self, role: str) -> float:
        """The same as a number, from 0 at its first update to 1 at its last."""
        made, _, last = self.position(role)
        return min(1.0, made / max(1, last))

    def begin_step(self) -> None:
        """Forgets what a step has drawn and logged. The state is left as it is: the same draws come again."""
        self.num_drawn, self.sampled, self.done, self.drawn, self.metrics, self.seconds = 0, 0, set(), {}, {}, {}
        self.has_moved, self.moved = False, set()

    # Problems and prompts

    def problems(self, num: int | None = None, split: str = "rl", labelled: bool = False) -> list[Problem]:
        """This rank's share of the next `num` problems (default: --examples-per-step), which in an evaluation stay the
        next, or of the first of another split. labelled: with --num-labelled, of those alone with a gold answer."""
        rank, world = self.run.rank, self.run.world
        num = self.args.examples_per_step if num is None else num
        if split != "rl":
            places = range(rank, num_problems_of(self.task, split, num), world)
        else:
            first = self.state.cursor + self.num_drawn
            self.num_drawn += 0 if self.evaluating else num
            places = range(first + rank, first + num, world)
            if hasattr(self.task, "index_of"):
                places = [self.task.index_of(i, labelled) for i in places]
        return self.each(lambda i: check_problem(f"task {self.task.name}", self.task.problem(split, i), split, i),
                         places)

    def each(self, function: Callable, items) -> list:
        """function(item) of each item. A request to stop ends it early."""
        found = []
        for item in items:
            if self.should_stop():
                break
            found.append(function(item))
        self.check_stop()
        return found

    def solve_prompts(self, problems: list[Problem], copies: list[int] | None = None) -> list[Prompt]:
        """The generator's prompts. copies: how often each problem has come before; None counts on this rank."""
        prompts = self.each(lambda problem: solve_prompt(self.tokenizer, self.task.fmt, problem), problems)
        return numbered(prompts, copies)

    def verify_prompts(self, solutions: Rollouts, copies: list[int] | None = None) -> list[Prompt]:
        """The verifier's prompts, one for each solution. copies: see `numbered`."""
        return verify_prompts(self.tokenizer, self.task.fmt, solutions.problems(), self.read_solutions(solutions),
                              copies)

    def prompts(self, template: str, problems: list[Problem], **quoted: list[str]) -> list[Prompt]:
        """Prompts of one of the format's templates, one for each problem, and what each of them quotes."""
        rows = [dict(zip(quoted, texts, strict=True)) for texts in zip(*quoted.values(), strict=True)]
        pairs = zip(problems, rows or [{} for _ in problems], strict=True)
        return numbered(self.each(lambda pair: Prompt(
            quoting_prompt(self.tokenizer, self.task.fmt, pair[0].prompt, template, **pair[1]), pair[0]), pairs))

    # Sampling

    def sample(self, draw: str, prompts: list[Prompt], num_samples: int | None = None, *, role: str = "",
               greedy: bool = False, tool: Tool | None = None, wrap: Callable | None = None) -> Rollouts:
        """Completions of each prompt, by the draw of this name that the recipe declares: from its role, as many of each
        and as long as it says. num_samples, role: others. In an evaluation any name will do, with both; for the limit
        see `_limit`, to which `wrap` is given. Raises BadInput for more than was declared."""
        started, declared = time.time(), self.draws.get(draw)
        role = role or (declared.role if declared else "")
        num_samples = num_samples or (declared.num_samples if declared else 1)
        limit = self._limit(draw, role, wrap, len(prompts), num_samples)
        noise = NOISE.get(draw, draw)
        stream = (noise,) if self.evaluating else (noise, self.step)
        rollouts = self.sampler.sample(self.roles[role].model, prompts, num_samples, stream, limit, greedy, tool)
        rollouts.draws = [draw] * len(rollouts)
        self.check_stop()
        if not self.evaluating:
            if not (greedy or self.sampler.top_k):
                self.drawn[draw] = self.roles[role].model
            self.sampled += int(rollouts.lengths.sum())
            self.add_seconds(short_name(role), started)
        return rollouts

    def solve(self, draw: str, problems: list[Problem], num_samples: int | None = None, *, role: str = "",
              greedy: bool = False, tool: Tool | None = None, copies: list[int] | None = None) -> Rollouts:
        """`sample` of solutions, with a tool: by default the calculator, where --calculator says so."""
        return self.sample(draw, self.solve_prompts(problems, copies), num_samples, role=role, greedy=greedy,
                           tool=tool or self.sampler.calculator_tool(), wrap=generator_prompt)

    def refine(self, draw: str, solutions: Rollouts, critiques: list[str], num_samples: int | None = None, *,
               role: str = "", greedy: bool = False) -> Rollouts:
        """Further attempts after each solution and its critique, with the calculator as in `solve`."""
        rows = zip(solutions.problems(), self.read_solutions(solutions), critiques, strict=True)
        prompts = numbered([Prompt(refine_prompt(self.tokenizer, self.task.fmt, problem.prompt, first.text, critique),
                                   problem, solution=first) for problem, first, critique in rows])
        return self.sample(draw, prompts, num_samples, role=role, greedy=greedy, tool=self.sampler.calculator_tool(),
                           wrap=refine_prompt)

    def verify(self, draw: str, solutions: Rollouts, num_samples: int | None = None, *, role: str = "",
               greedy: bool = False, copies: list[int] | None = None) -> Rollouts:
        """Verifications of each solution."""
        return self.sample(draw, self.verify_prompts(solutions, copies), num_samples, role=role, greedy=greedy,
                           wrap=empty_verifier_prompt)

    def written(self, role: str, prompts: list[Prompt], completions: list[str] | list[list[int]]) -> Rollouts:
        """Given completions as rollouts of a role, one for each prompt. Text is encoded as ordinary text and ended;
        token ids stand as they are. Raises BadInput for one that does not fit the role's context."""
        end, context = self.tokenizer.assistant_end, self.roles[role].model.config.sequence_len
        rows = [[*self.tokenizer.encode(c), end] if isinstance(c, str) else c for c in completions]
        for prompt, row in zip(prompts, rows, strict=True):
            if len(prompt.ids) + len(row) > context:
                raise BadInput(f"a given completion of {len(row)} tokens after a prompt of {len(prompt.ids)}, for "
                               f"{prompt.problem.prompt[:40]!r}: the {role}'s context is {context}")
        tokens = padded(rows, device=self.device)
        stopped = [row[-1] in self.tokenizer.stop_tokens for row in rows]
        unknown = torch.full(tokens.shape, float("nan"), device=self.device)
        texts = [self.tokenizer.decode(row[:-1] if ended else row) for row, ended in zip(rows, stopped, strict=True)]
        limit = max(draw.max_new_tokens for draw in self.draws.values() if draw.role == role)
        return Rollouts(prompts, torch.arange(len(rows), device=self.device), tokens, unknown,
                        torch.tensor(list(map(len, rows)), dtype=torch.long, device=self.device),
                        torch.tensor(stopped, dtype=torch.bool, device=self.device), limit=limit, texts=texts)

    def _limit(self, name: str, role: str, wrap: Callable | None, num_prompts: int, num_samples: int) -> int:
        """Tokens that a completion may have: as the draw of this name says; in an evaluation else as the role's draws
        with this `wrap`, or all of the role's. Raises BadInput for what the recipe has not declared."""
        draw = self.draws.get(name)
        if role not in self.roles:
            raise BadInput(f"the recipe samples {name!r} of a role {role!r}: there are {', '.join(self.roles)}, and "
                           f"its draws() declare {draw or 'no such name'}")
        if self.evaluating:
            of_role = [other for other in self.draws.values() if other.role == role]
            alike = [draw] if draw in of_role else [other for other in of_role if other.wrap is wrap]
            return max((other.max_new_tokens for other in alike or of_role), default=0)
        if name in self.done:
            raise BadInput(f"the recipe samples {name!r} twice in a step: the second draw would have the first "
                           f"one's noise")
        self.done.add(name)
        most = -(-draw.num_prompts // self.run.world) if draw else 0
        if draw is None or draw.role != role or num_prompts > most or num_samples > draw.num_samples:
            raise BadInput(f"the recipe samples {num_prompts} x {num_samples} of {role} as {name!r}, and its "
                           f"draws() declare {draw or 'no such name'}")
        return draw.max_new_tokens

    # Reading

    def check(self, rollouts: Rollouts) -> list[bool | None]:
        """The outcome of each solution by the task's gold check; None where it cannot be scored. A right answer that is
        `uncounted` is False, and the reason becomes a column."""
        outcomes, rollouts.columns["uncounted"] = counted_outcomes(
            self.task, rollouts.problems(), rollouts.texts, rollouts.stopped.tolist(), self.args.count_copies,
            self.should_stop)
        self.check_stop()
        return outcomes

    def answers(self, rollouts: Rollouts, group: int = 1) -> list[str | None]:
        """What solutions answer, None where nothing can be read or the completion did not end; see `answers_of`."""
        answers = answers_of(self.task, rollouts.texts, group)
        return [answer if ended else None for answer, ended in zip(answers, rollouts.stopped.tolist(), strict=True)]

    def check_texts(self, problems: list[Problem], texts: list[str]) -> list[bool | None]:
        """The same of given texts, one for each problem."""
        outcomes = outcomes_of(self.task, problems, texts, self.should_stop)
        self.check_stop()
        return outcomes

    def rewards(self, solutions: Rollouts) -> list[float | None]:
        """What each solution earns, see `scores_of` (Tango eq. 2). The outcomes become a column."""
        solutions.columns["outcome"] = outcomes = self.check(solutions)
        return scores_of(self.task, solutions.problems(), solutions.texts, outcomes)

    def read_solutions(self, rollouts: Rollouts) -> list[Solution]:
        """The completions read as solutions."""
        return read_solutions(self.tokenizer, self.task.fmt, rollouts)

    def read_verifications(self, rollouts: Rollouts) -> list[Verification]:
        """The completions read as verifications."""
        return read_verifications(self.task.fmt, rollouts)

    # Credit, scoring and weights

    def advantages(self, rollouts: Rollouts, rewards: list[float | None], *, preset: str = "",
                   groups: torch.Tensor | None = None) -> torch.Tensor:
        """Advantages of one reward at the end of each rollout, by --advantage and --negative-weight, or by a preset
        alone. None takes no part. groups (N,): in place of the prompts' groups. -> (N, T). Raises ValueError unless
        there are N rewards."""
        if len(rewards) != len(rollouts):
            raise ValueError(f"{len(rewards)} rewards of {len(rollouts)} rollouts: one for each is needed")
        negative_weight = 1.0 if preset else self.args.negative_weight
        return source_advantages(terminal_rewards(rewards, rollouts.lengths, negative_weight),
                                 rollouts.group_id if groups is None else groups, rollouts.mask,
                                 PRESETS[preset or self.args.advantage], self.reduce)

    def micro_batches(self, rollouts: Rollouts, advantages: torch.Tensor, weights: torch.Tensor,
                      keep_idle: bool) -> list[MicroBatch]:
        """Rollouts as micro-batches."""
        return pack(rollouts, advantages, weights, self.args.micro_batch_tokens, keep_idle, self.args.prefix_sharing)

    def even(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """With --shard as many micro-batches as any rank has; those that are added train nothing. Ranks wait for each
        other in each: the largest of all are run side by side, and so on."""
        if not self.args.shard:
            return batches
        most = int(self.reduce(torch.tensor(len(batches), device=self.device), "max"))
        size = lambda batch: batch.prompt_ids.numel() + len(batch.index)
        return pad_batches(sorted(batches, key=size, reverse=True), most, self.device)

    def logprobs(self, role: str, rollouts: Rollouts, *, reference: bool = False) -> torch.Tensor:
        """Logprobs of the tokens, or of the targets in their places, under a role or its starting weights; no gradient.
        -> (N, T) fp32 in the order of the rollouts, 0 where a token is not trained"""
        model = self.roles[role].reference if reference else self.roles[role].model
        out = torch.zeros(rollouts.tokens.shape, device=self.device)
        for batch in self.even(self.micro_batches(rollouts, out, out[:, 0], keep_idle=True)):
            if self.breaks_off():
                break
            logprobs = score(model, batch, self.args.temperature)
            places = torch.zeros(batch.tokens.numel(), device=self.device)
            if len(batch.index):  # an added micro-batch is of no rollout
                places[batch.index] = logprobs
                out[batch.rows, : batch.tokens.shape[1]] = places.view_as(batch.tokens)
        self.check_stop()
        return out

    def copy_weights(self, source: str, target: str) -> None:
        """Gives a role another's present weights, saved with the run. The step is then carried through."""
        self.check_stop()
        self.has_moved = True
        copy_weights(self.roles[target].model, self.roles[source].model)
        refresh(self.roles[target].model)
        self.moved |= ids_of(self.roles[target].model.parameters())

    # Over ranks, and the log

    def reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """The sum or max over ranks, in place."""
        return all_reduce(tensor, op)

    def total(self, num: int) -> int:
        """The sum of a number over ranks."""
        return int(self.reduce(torch.tensor(num, device=self.device)))

    def gather(self, rows: list) -> list:
        """Rows (json values) of all ranks, which dealt them out in turn, back in the order of the whole."""
        self.check_stop()
        world, rank = self.run.world, self.run.rank
        numbered = gather_lists([[i * world + rank, row] for i, row in enumerate(rows)], self.device)
        return [row for _, row in sorted(numbered, key=lambda pair: pair[0])]

    def mean(self, values: dict[str, list]) -> dict[str, float | None]:
        """The mean of each list over all ranks, None left out."""
        return mean_over_ranks(values, self.device)

    def log(self, role: str | None, values: dict) -> None:
        """Adds to the step's record in metrics.jsonl, under the role's prefix."""
        for name, value in values.items():
            if not (is_number(value) or isinstance(value, str)):
                raise BadInput(f"{name} of the {role or 'step'} is {described(value)}: numbers and texts are logged")
        if role is not None and role not in self.roles:
            raise BadInput(f"metrics of a role {role!r}: there are {', '.join(self.roles)}")
        if role is None:
            self.check_names(values)
        prefix = f"{short_name(role)}/" if role else ""
        self.metrics |= {f"{prefix}{name}": value for name, value in values.items()}

    def check_names(self, values: dict) -> None:
        """Raises BadInput where a recipe gives what the loop itself says of a step."""
        own = {"step", "role", "sampled_tokens", *(f"{short_name(name)}_step" for name in self.roles)}
        if taken := own & set(values):
            raise BadInput(f"a recipe logs {min(taken)!r} of the step, which the loop does itself")

    def add_seconds(self, name: str, started: float) -> None:
        """Adds the time since `started` to what the step logs as timing_s/<name>."""
        self.seconds[f"timing_s/{name}"] = self.seconds.get(f"timing_s/{name}", 0.0) + time.time() - started

    def check_stop(self) -> None:
        """Stops the run on all ranks if any was told to, unless an update of this step was made. Raises BadInput where
        the recipe has changed torch's defaults."""
        check_defaults()
        if not self.has_moved:
            self.run.check_stop()

    def should_stop(self) -> bool:
        """Whether this rank may break off what it samples."""
        return not self.has_moved and self.run.should_stop()

    def breaks_off(self) -> bool:
        """Whether this rank leaves out the micro-batches to come; after them all ranks call check_stop. With --shard
        all ranks gather weights in each, and stop together here."""
        if self.args.shard:
            self.check_stop()
            return False
        return self.should_stop()


def warn_once(t: Play, text: str) -> None:
    """Prints a warning that this run has not had yet."""
    if text not in t.told:
        t.told.add(text)
        print0(f"WARNING: {text}")


def ids_of(parameters) -> set[int]:
    return {id(p) for p in parameters}


def is_number(value) -> bool:
    """Whether a value can be logged as a number: None, where it cannot be told, is one."""
    return value is None or isinstance(value, float) or isinstance(value, int) and abs(value) <= MOST
