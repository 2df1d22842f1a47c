"""
Is it better to write a rejected step again, or to sample whole solutions and vote? Accuracy at equal sampled tokens,
with the loop that SmolSolver plans (its readme, github.com/nishant-ai/SmolSolver; no code of it was found).

The generator writes one step, and the verifier judges it. What it rejects is written again, up to --retries times, and
the last one stays. What cannot be read is no rejection, and is counted. The solution ends with its answer, which is not
judged. Each test_in problem is solved --num-attempts times so, for each of the --retries, and --num-samples times in a
single pass, of which s = 1, 2, 4, ... vote as in verify_or_sample.

Tokens are those that are sampled: of a step and of its judgment up to the end of either. What this script draws after
that it throws away, where another would stop. Judgments of steps that stay are given to the verifier as the beginning
of what it writes, so each is paid for once. The lead is the retry loop's accuracy less that of voting with as many
tokens, which lies on a line in log tokens between two numbers of votes; ± is half of its 95% interval over problems.

Departures:
1. In the plan a rejected step stays in the conversation, with the verifier's words, and the generator is told to try
   again. Here it tries again after the steps before: it was never taught to read a rejection.
2. The plan names no limit for retries and compares with a single pass at whatever tokens.
3. A verifier that was shown whole solutions alone rejects most beginnings: chat_sft --cut-share shows it some.
4. Both models are small ones from chat_sft. The plan's are QLoRAs of Phi-2 or Phi-3, of GSM8K and of PRM800K.

    python -m dev.experiments.step_retry --generator-tag d4 --verifier-tag d4-ver --retries 1 2 4 --out retries.json
    torchrun --standalone --nproc_per_node=8 dev/experiments/step_retry.py -- --generator-tag d4 --verifier-tag d4-ver
"""
import random
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import mean

from dev.experiments.verify_or_sample import (VOTE, Lead, Way, best_way, expected, lead_of, points_of, powers,
                                              tokens_of, voting_at)
from nanochat.cli import at_least, check_name, new_parser, script_main
from nanochat.common import BadInput, init_device, print0, rank_and_world
from nanochat.engine import row_key
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.measure.voting import SCORES
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records.outcomes import answers_of, outcomes_of, problems_of
from nanochat.rl.records.prompts import (Prompt, check_prompts_fit, generator_prompt, parse_verification, read_solution,
                                         verifier_prompt)
from nanochat.storage.files import path_of, write_json
from scripts.verifier_eval import (add_generator_args, add_verifier_args, check_players, gathered, load_players, shown,
                                   warn_of_malformed)
from tasks import add_task_args, task_flags
from tasks.common import Problem

RETRY, MOST_RETRIES = "retry", 1000
PARTS = {"problems", "problems_left_out", "single", "leads", "judgments", "samples"}


def make_parser():
    parser = new_parser(__doc__)
    add_verifier_args(parser)
    parser.add_argument("--retries", type=int, nargs="+", default=[1, 2, 4], help="of a step that is rejected, at most")
    parser.add_argument("--num-attempts", type=at_least(1, int, 10 ** 4), default=4,
                        help="solutions of each problem by steps")
    parser.add_argument("--num-draws", type=at_least(1, int, 10 ** 5), default=32,
                        help="random orders of each problem's votes")
    add_generator_args(parser.add_argument_group("solutions"), is_needed=True)
    add_task_args(parser)
    parser.set_defaults(num_samples=32, num_verifications=1, calculator=False, **dict.fromkeys(task_flags()))
    return parser


def check_args(args) -> None:
    check_name("--generator-tag", args.generator_tag)
    if not 1 <= min(args.retries) <= max(args.retries) <= MOST_RETRIES or len(set(args.retries)) < len(args.retries):
        raise BadInput(f"--retries {' '.join(map(str, args.retries))}: must be numbers from 1 to {MOST_RETRIES}, each "
                       f"once; a single pass is there without being named")
    if not args.generator_temperature:
        raise BadInput("--generator-temperature 0: what is written again would be the same")
    for name, only, reason in (("num_verifications", 1, "each step has one judgment"),
                               ("score", "final", "a step has a verdict, and no score"),
                               ("calculator", False, "steps are written without tools")):
        if getattr(args, name) != only:
            raise BadInput(f"--{name.replace('_', '-')}: {reason}")
    if args.max_problems == 1:
        raise BadInput("--max-problems 1: the interval of a lead takes at least two problems")
    check_players(args, PARTS)
    if args.num_samples not in powers(args.num_samples):
        raise BadInput(f"--num-samples {args.num_samples}: must be a power of two")


# The loop

@dataclass
class Attempt:
    """A solution that is being written. prompt: the generator's; ids: the steps that stay; judged: the judgments of
    them, as tokens; tries: how often the next step was rejected; spent: sampled tokens; said: the verdicts."""
    problem: Problem
    number: int
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    num_steps: int = 0
    tries: int = 0
    spent: int = 0
    said: list[bool | None] = field(default_factory=list)
    is_done: bool = False

    def copy(self) -> int:
        """Tells the noise of what is drawn next from that of all else about the problem."""
        return row_key(self.number, self.tries, *self.ids)


def judgment_ends(tokenizer, fmt, tokens: list[int]) -> list[int]:
    """Behind which token each step's judgment in a verification ends."""
    pieces = [tokenizer.token_bytes(token) for token in tokens]
    byte_ends, text = list(accumulate(map(len, pieces))), b"".join(pieces).decode("latin-1")
    body = text[: text.rfind(fmt.final_open)] if fmt.final_open in text else text
    return [bisect_right(byte_ends, end - 1) + 1 for _, end in fmt.closed_steps(body, fmt.verification_open)]


def take_step(tokenizer, fmt, attempt: Attempt, drawn: list[int], limit: int) -> list[int] | None:
    """The tokens of the next step among those that were drawn; None where there is none any more, and the attempt is
    ended with all of them. limit: tokens of a whole solution."""
    whole = (attempt.ids + drawn)[:limit]
    ends = read_solution(tokenizer, fmt, whole).step_ends
    if len(ends) <= attempt.num_steps:
        attempt.spent += len(whole) - len(attempt.ids)
        attempt.ids, attempt.is_done = whole, True
        return None
    step = whole[len(attempt.ids): ends[attempt.num_steps] + 1]
    attempt.spent += len(step)
    return step


def take_verdict(tokenizer, fmt, attempt: Attempt, step: list[int], drawn: list[int], retries: int) -> None:
    """Reads the judgment of a step, and keeps the step or not."""
    whole, k = attempt.judged + drawn, attempt.num_steps
    ends = judgment_ends(tokenizer, fmt, whole)
    judged = whole[: ends[k]] if len(ends) > k else whole
    said = parse_verification(fmt, tokenizer.decode(judged), k + 1).step_verdicts
    is_read = len(said) > k and len(ends) > k  # a final judgment may stand before that of the step
    verdict = said[k] if is_read else None
    attempt.spent += len(judged) - len(attempt.judged)
    attempt.said.append(verdict)
    if verdict is False and attempt.tries < retries:
        attempt.tries += 1
        return
    attempt.ids = attempt.ids + step
    attempt.judged = judged if is_read else []  # what is unread: the verifier begins anew with the next step
    attempt.num_steps, attempt.tries = k + 1, 0


def solve_by_steps(problems: list[Problem], num: int, retries: int, generator, verifier, solver: Sampler,
                   judge: Sampler, greedy: bool = False) -> list[Attempt]:
    """`num` attempts at each problem. solver, judge: how either model is sampled; greedy: the verifier is not."""
    tokenizer, fmt = solver.tokenizer, solver.task.fmt
    attempts = [Attempt(problem, n, generator_prompt(tokenizer, fmt, problem.prompt)) for problem in problems
                for n in range(num)]
    while active := [attempt for attempt in attempts if not attempt.is_done]:
        prompts = [Prompt(a.prompt + a.ids, a.problem, a.copy()) for a in active]
        steps = [take_step(tokenizer, fmt, a, drawn, solver.max_new_tokens)
                 for a, drawn in zip(active, drawn_after(generator, prompts, solver, "write"), strict=True)]
        asked = [(a, step) for a, step in zip(active, steps, strict=True) if step is not None]
        texts = [tokenizer.decode(a.ids + step) for a, step in asked]
        prompts = [Prompt(verifier_prompt(tokenizer, fmt, a.problem.prompt, text) + a.judged, a.problem, a.copy())
                   for (a, _), text in zip(asked, texts, strict=True)]
        for (a, step), drawn in zip(asked, drawn_after(verifier, prompts, judge, "judge", greedy), strict=True):
            take_verdict(tokenizer, fmt, a, step, drawn, retries)
    return attempts


def drawn_after(model, prompts: list[Prompt], sampler: Sampler, stream: str, greedy: bool = False) -> list[list[int]]:
    """A completion of each prompt, with its end token if it ended itself. Raises BadInput where there is no room."""
    room = model.config.sequence_len - max((len(prompt.ids) for prompt in prompts), default=0)
    limit = min(sampler.max_new_tokens, room)
    if limit < 1:
        raise BadInput("a prompt with what was written after it fills the model's context: lower --max-new-tokens")
    return sampler.sample(model, prompts, 1, ("step_retry", stream), limit, greedy).completions()


# What it comes to

def solved_rows(args, task, generator, verifier, sampler: Sampler, device) -> list[dict]:
    """Per test_in problem, over all ranks: answers, outcomes and lengths of single passes; of each number of retries
    the outcomes, the tokens and the verdicts of the attempts."""
    rank, world = rank_and_world()
    task.problem("test_in", 0)  # there must be some
    problems = problems_of(task, "test_in", args.max_problems)
    check_prompts_fit(sampler.tokenizer, task.fmt, [p.prompt for p in problems],
                      {"generator": generator.config.sequence_len, "verifier": verifier.config.sequence_len},
                      args.max_new_tokens, args.verifier_max_new_tokens)
    mine, n, k = problems[rank::world], args.num_samples, args.num_attempts
    solver = replace(sampler, temperature=args.generator_temperature)
    judge = replace(sampler, max_new_tokens=args.verifier_max_new_tokens)
    solved, solutions = solver.solve(generator, mine, n, ("best_of_n",))
    texts, lengths = [solution.text for solution in solutions], solved.lengths.tolist()
    single = list(zip(answers_of(task, texts), outcomes_of(task, solved.problems(), texts), lengths, strict=True))
    rows = []
    for i, problem in enumerate(mine):
        answers, outcomes, of_problem = map(list, zip(*single[i * n: (i + 1) * n], strict=True))
        rows.append({"index": problem.index, "answers": answers, "outcomes": outcomes, "lengths": of_problem,
                     "verdicts": [[]] * n, "step_verdicts": [[]] * n, "verification_lengths": [[0]] * n, RETRY: {}})
    for retries in args.retries:
        attempts = solve_by_steps(mine, k, retries, generator, verifier, solver, judge, args.temperature == 0)
        texts = [read_solution(sampler.tokenizer, task.fmt, a.ids).text for a in attempts]
        outcomes = outcomes_of(task, [a.problem for a in attempts], texts)
        for i, row in enumerate(rows):
            own = slice(i * k, (i + 1) * k)
            row[RETRY][str(retries)] = {"texts": texts[own], "outcomes": outcomes[own],
                                        "tokens": [a.spent for a in attempts[own]],
                                        "said": [a.said for a in attempts[own]]}
    return gathered(rows, "index", device)


def leads(args, rows: list[dict]) -> tuple[float, list[Lead]]:
    """The accuracy of a single pass, and of each number of retries the lead over votes at equal tokens. Voting spends
    no more than is best on all problems, as in verify_or_sample."""
    solved = [expected(row, args.num_draws, random.Random(f"{args.seed}-draws-{row['index']}"), SCORES["final"])
              for row in rows]
    cost: dict[Way, float] = {(VOTE, s, 0): mean(tokens_of(row, s, 0) for row in rows)
                              for s in powers(args.num_samples)}
    points = points_of(solved, cost)
    voting = {tokens: best_way(points, (VOTE,), tokens) for tokens in cost.values()}
    found = []
    for retries in args.retries:
        tried = [row[RETRY][str(retries)] for row in rows]
        tokens = mean(mean(one["tokens"]) for one in tried)
        if tokens > max(voting):
            raise BadInput(f"--num-samples {args.num_samples}: so many votes cost {max(voting):.0f} tokens per "
                           f"problem, and --retries {retries} {tokens:.0f}; there must be at least as many")
        inside = max(tokens, min(voting))  # a loop may be cheaper than a single pass, where it stops early
        found.append(lead_of(tokens, [((RETRY, 1, retries), voting_at(of_one, voting, inside), mean(one["outcomes"]))
                                      for of_one, one in zip(solved, tried, strict=True)]))
    return points[0].accuracy, found


def judgments_of(rows: list[dict], retries: int) -> dict[str, float | None]:
    """Judgments per attempt, and the shares of them that reject a step, and that cannot be read."""
    attempts = [said for row in rows for said in row[RETRY][str(retries)]["said"]]
    verdicts = [verdict for said in attempts for verdict in said]
    share = lambda kind: verdicts.count(kind) / len(verdicts) if verdicts else None
    return {"per_attempt": len(verdicts) / len(attempts), "rejected": share(False), "unread": share(None)}


def main(args) -> None:
    check_args(args)
    tokenizer = load_tokenizer(path_of("tokenizer"))
    device = init_device(args.device_type)
    verifier, generator, task, sampler = load_players(args, tokenizer, device)
    samples = solved_rows(args, task, generator, verifier, sampler, device)
    rows = [row for row in samples if None not in row["outcomes"] + [o for one in row[RETRY].values()
                                                                     for o in one["outcomes"]]]
    if len(rows) < 2:
        raise BadInput(f"--task {args.task}: all solutions can be scored of {len(rows)} problems, and it takes two")
    single, found = leads(args, rows)
    judgments = {str(retries): judgments_of(rows, retries) for retries in args.retries}
    single_tokens = mean(tokens_of(row, 1, 0) for row in rows)
    print0(f"\nsteps written again, task {args.task}: {len(rows)} problems, percent; a single pass is right in "
           f"{shown(single)} with {single_tokens:.1f} tokens per problem")
    print0(f"{'retries':>8s} {'tokens':>8s} {'retry':>6s} {'vote':>6s} {'lead':>6s} {'±':>6s} {'rejected':>9s} "
           f"{'unread':>7s}")
    for retries, one in zip(args.retries, found, strict=True):
        numbers = " ".join(f"{shown(x):>6s}" for x in (one.verified, one.voted, one.lead, one.half))
        said = judgments[str(retries)]
        print0(f"{retries:>8d} {one.tokens:>8.1f} {numbers} {shown(said['rejected']):>9s} {shown(said['unread']):>7s}")
    warn_of_malformed(max(said["unread"] or 0 for said in judgments.values()))
    if len(rows) < len(samples):
        print0(f"left out: {len(samples) - len(rows)} problems with a solution that cannot be scored")
    if args.out and rank_and_world()[0] == 0:
        write_json(args.out, {"args": vars(args), "problems": len(rows), "problems_left_out": len(samples) - len(rows),
                              "single": {"accuracy": single, "tokens": single_tokens},
                              "leads": [one._asdict() for one in found], "judgments": judgments, "samples": samples})
        print0(args.out)


if __name__ == "__main__":
    script_main(main, make_parser(), is_shown=True)
