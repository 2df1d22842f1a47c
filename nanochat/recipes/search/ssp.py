"""Search Self-Play (Lu et al. 2025): one model asks and answers questions, both with a search. arXiv 2510.18821.

The proposer is shown an answer, searches, and writes a question that has it. The solver searches and answers. The
proposer earns 1 - acc, acc being the share of right answers among G, a solver 1 for the answer. A filter holds the game
to what can be answered: the question is readable, does not show its answer, took at least two different queries and
none twice, and what the proposer found is enough to come to the answer. A question that is filtered earns 0, and an
older one takes its place; the pool is emptied every 10 steps. The solver's advantage is GRPO's; the proposer, with one
question per answer, learns by its raw reward (grpo with n = 1 in verl). Without the filter (--no-filter) the proposer
earns most for what nobody can answer.

Departures:
1. The task itself says whether what was found is enough: the question's keys were all looked up, and its true answer is
   the one that was shown. In the paper a model answers from the proposer's documents and four others.
2. One update for both roles; the script makes one for each in turn (combine_update).
3. The filter's limits are the task's: theirs are 10 words and 1000 characters.
4. Where the pool has no question left the place of a filtered one stays empty. Theirs asks a dummy question there. With
   --no-filter nothing is pooled, for an older question would be read anew and with its true answer.
5. --proposer-reward azr is Absolute Zero's; one_minus and parabola are the script's 1-acc and intermediate_difficulty.
6. Advantages do not see the clip range (theirs: 0.2 and 0.285), for one optimizer step is made of a batch.
"""
import argparse
from dataclasses import replace

from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.recipes.search import search_r1
from nanochat.recipes.search.search_r1 import (ROLES, TABLE, add_search_args, evaluate, log_queries,  # noqa: F401
                                               read_queries, search_of)
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.play.proposals import (BY_ACCURACY, Proposals, accuracies, check as check_proposals, drawn, earns,
                                        gathered, log_proposals, propose, propose_prompt, spread)
from nanochat.rl.records.outcomes import check_task
from tasks.common import Problem

STATUS = "runs: its solver's gain is not shown (+13.2 ± 15.6), but for --proposer-reward parabola (+15.2 ± 11.2)"
SHOWN = {"generator": ["proposals/valid", "proposals/solved", "proposals/queries"]}
POOL_STEPS = 10  # after which the pool is emptied
FILTERED = ("another_answer", "answer_shown", "few_queries", "query_twice", "not_found")


def add_args(group) -> None:
    add_search_args(group)
    group.set_defaults(kl_coef=0.01)
    group.add_argument("--proposer-reward", default="one_minus", choices=list(BY_ACCURACY), help="by acc")
    group.add_argument("--filter", action=argparse.BooleanOptionalAction, default=True,
                       help="questions must have the answer that was shown, and be answerable")
    group.add_argument("--least-queries", type=at_least(0), default=2, help="different queries of a proposer")


def check(args, task) -> None:
    search_r1.check(args, task)
    if args.least_queries > args.most_queries:
        raise BadInput(f"--least-queries {args.least_queries}: more than --most-queries {args.most_queries}, so no "
                       f"question would pass")
    check_proposals(args, task)
    check_task(task, "queries_of")


def draws(args) -> dict[str, Draw]:
    P, limit = args.examples_per_step, args.max_new_tokens
    return {"propose": Draw("generator", P, 1, limit, trained=True, wrap=propose_prompt),
            "solutions": Draw("generator", P, args.num_samples, limit, trained=True)}


def why_filtered(task, problem: Problem, shown: str, text: str, least_queries: int) -> str:
    """Which of FILTERED a question fails first, "" where it passes. shown: the answer that it is to have; text: what
    the proposer wrote, its search included."""
    queries = [query for query, _ in read_queries(task.fmt, text) or []]
    found = set(queries) >= set(task.queries_of(problem.prompt))
    fails = (problem.answer != shown, shown in problem.prompt, len(set(queries)) < least_queries,
             len(set(queries)) < len(queries), not found)
    return FILTERED[fails.index(True)] if True in fails else ""


def filtered(t: Play, found: Proposals) -> Proposals:
    """What passes the filter; without it every readable question, taken to have the answer that was shown."""
    problems, refusals = list(found.problems), list(found.refusals)
    for n, (problem, reference) in enumerate(zip(found.problems, found.rollouts.problems(), strict=True)):
        if problem and t.args.filter:
            refusals[n] = why_filtered(t.task, problem, reference.answer, found.rollouts.texts[n], t.args.least_queries)
            problems[n] = None if refusals[n] else problem
        elif problem:
            problems[n] = replace(problem, answer=reference.answer)
    found.rollouts.columns |= {"refused": refusals}
    return Proposals(found.rollouts, problems, refusals)


def play(t: Play):
    G, pool = t.args.num_samples, [] if t.step % POOL_STEPS == 0 else t.memory.get("pool", [])
    read = propose(t, "generator", t.problems(), 1, "propose", search_of(t))
    proposals = filtered(t, read)
    asked = [new or old for new, old in zip(proposals.problems, drawn(t, pool), strict=True)]
    search = search_of(t)
    solutions = t.solve("solutions", [problem for problem in asked if problem], tool=search)
    outcomes = solutions.columns["outcome"] = t.check(solutions)

    acc = [p if new else None  # of an older question it says nothing about the proposer
           for p, new in zip(spread(accuracies(outcomes, G), asked), proposals.problems, strict=True)]
    earned = [earns(why, p, BY_ACCURACY[t.args.proposer_reward])
              for why, p in zip(proposals.refusals, acc, strict=True)]
    proposals.rollouts.columns |= {"reward": earned, "solved": acc}
    log_questions(t, read, proposals, asked, earned, acc)
    log_queries(t, solutions, [search.num_queries[n] for n in range(len(solutions))])
    log_rewards(t, "generator", solutions, outcomes)
    t.memory["pool"] = pool + gathered(t, proposals, proposals.valid if t.args.filter else [], 1)

    yield Update("generator", [
        (proposals.rollouts, t.advantages(proposals.rollouts, earned, preset="reinforce")),
        (solutions, t.advantages(solutions, outcomes))])


def log_questions(t: Play, read: Proposals, proposals: Proposals, asked: list[Problem | None],
                  earned: list[float | None], acc: list[float | None]) -> None:
    """Logs what the filter does, and how hard and how answerable the questions are that are asked."""
    pairs = [(true, new) for true, new in zip(read.problems, proposals.problems, strict=True) if new]
    log_proposals(t, "generator", proposals, reward=earned, solved=acc,
                  queries=[len(t.task.queries_of(new.prompt)) for _, new in pairs],
                  unsolvable=[true.answer != new.answer for true, new in pairs])
    t.log("generator", {f"proposals/{name}": value for name, value in t.mean({
        **{f"refused/{reason}": [why == reason for why in proposals.refusals] for reason in FILTERED},
        "reused": [old is not None and new is None for old, new in zip(asked, proposals.problems, strict=True)],
        "empty": [problem is None for problem in asked]}).items()})
