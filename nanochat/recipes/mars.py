"""MARS (Chen et al. 2025): two systems of one model, one that reasons and one that reads. arXiv 2510.04935.

System 2 solves a problem in turns (reason_prompt). A turn that ends with a query is answered: the documents that the
search finds are packed into as few prompts as hold them, first-fit decreasing, and System 1 writes down what serves the
query (condense_prompt). That stands in the next turn's prompt. The last turn's answer earns 1 or 0, and the reward is
that of every turn and of everything that System 1 wrote on the way.

Advantages are z-scores within a problem, of each system by itself: System 2's over its trajectories, System 1's over
all that it wrote for them. After that, System 1's samples are drawn to be as many as System 2's trajectories, without
repeats where there are more, with some twice where there are fewer. A sample is drawn with a chance in proportion to
(|A| + 1e-6) ** --balance-eta. 0 is the paper's first version, which draws evenly. The second says "advantage-weighted"
in its abstract; its formula was not found, so what is above 0 is a guess. No code of the authors was found.

Search-o1 (Li et al. 2025, arXiv 2501.05366) has the same turns and the same reader, and trains nothing: it is this
recipe's evaluation with --num-steps 0, and the score before training of every other run. --no-train-condenser learns
from System 2's samples alone. It shares System 1's weights, so that is no frozen System 1.

Departures:
1. A turn is a completion of its own. In the paper a trajectory is one, in which what System 1 wrote is masked. Here it
   stands in a prompt, so no token of it gets a gradient from System 2's samples.
2. A turn asks one query, and there is no purpose beside it. The paper's ask several tools, a Python interpreter among
   them.
3. Both losses are parts of one mean (--aggregation), not a sum of two means.
4. Both systems learn their form by SFT first (chat_sft --demo-shares reason:0.4 condense:0.4). The paper starts from a
   pretrained model without SFT.
"""
import argparse
import random
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from nanochat.common import BadInput, check_least, check_most
from nanochat.rl.advantages import PRESETS, Preset, alone, source_advantages
from nanochat.rl.evals import SPLITS, are_right, log_rewards
from nanochat.rl.play import Call, Play, Update
from nanochat.rl.prompts import quoting_prompt
from nanochat.rl.rewards import terminal_rewards
from nanochat.rl.roles import RoleSpec, short_name
from nanochat.rl.rollouts import Rollouts, join
from tasks.common import Problem

TAGS = dict(family="single model, two prompts, turns", verifier="none", reward="outcome, shared",
            credit="z-score per system")
ROLES = {"generator": RoleSpec("--model-tag")}
SHOWN = {"generator": ["queries", "condensed/right"]}
EPSILON = 1e-6  # so that a sample without an advantage may be drawn


# Flags

def add_args(group) -> None:
    group.add_argument("--most-turns", type=int, default=6, help="turns of a trajectory; the last one has to answer")
    group.add_argument("--condense-tokens", type=int, default=8, help="of what System 1 writes")
    group.add_argument("--bin-size", type=int, default=16,
                       help="characters of documents that System 1 reads at once; a longer one is read alone")
    group.add_argument("--most-bins", type=int, default=4, help="prompts of System 1 that a query may take")
    group.add_argument("--balance", action=argparse.BooleanOptionalAction, default=True,
                       help="draw as many samples of System 1 as there are trajectories")
    group.add_argument("--balance-eta", type=float, default=0.0,
                       help="draw them by |advantage| to this power; 0 draws evenly")
    group.add_argument("--train-condenser", action=argparse.BooleanOptionalAction, default=True,
                       help="System 1's samples are trained")


def check(args, task) -> None:
    check_least(args, {"most_turns": 1, "condense_tokens": 1, "bin_size": 1, "most_bins": 1, "balance_eta": 0})
    check_most(args, {"most_turns": 1000, "balance_eta": 10})
    if not hasattr(task, "documents"):
        raise BadInput(f"--task {args.task}: has no documents to search, which this recipe needs; lookup has them")


def calls(args) -> list[Call]:
    """Each turn, and what System 1 writes behind it. A prompt quotes all turns before it."""
    N, limit, short = args.examples_per_step * args.num_samples, args.max_new_tokens, args.condense_tokens
    found = []
    for k in range(args.most_turns):
        quoted = k * (limit + args.most_bins * short + MARK_TOKENS)
        wrap = partial(quoting_prompt, template="reason_prompt", context="")
        found.append(Call("generator", f"turn{k}", N, 1, limit, args.num_steps, trained=True, wrap=wrap, quoted=quoted,
                          remedy=REMEDY))
        wrap = partial(quoting_prompt, template="condense_prompt", document="", query="")
        found.append(Call("generator", f"condense{k}", N * args.most_bins, 1, short, args.num_steps, trained=True,
                          wrap=wrap, quoted=args.bin_size + limit, remedy=REMEDY))
    return found


MARK_TOKENS = 16  # around what System 1 wrote, at most
REMEDY = "lower --most-turns, --max-new-tokens, --condense-tokens or --most-bins"


# Formulas

def first_fit_decreasing(sizes: list[int], capacity: int) -> list[list[int]]:
    """Bins of places in `sizes`: each goes, the largest first, into the first bin that holds it. One that is too large
    for any is alone."""
    bins: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        room = (b for b in bins if sum(sizes[j] for j in b) + sizes[i] <= capacity)
        fit = next(room, None)
        if fit is None:
            bins.append([i])
        else:
            fit.append(i)
    return bins


def system_advantages(rewards: list[float | None], group_id: list[int], preset: Preset, device="cpu",
                      reduce=alone) -> torch.Tensor:
    """The advantage of each sample of one system: its trajectory's reward, normalised over the samples of its problem
    (--advantage). -> (n,)"""
    groups = torch.tensor(group_id, dtype=torch.long, device=device)
    one = torch.ones_like(groups)
    return source_advantages(terminal_rewards(rewards, one), groups, 1, preset, reduce)[:, 0]


def balanced(advantages: list[float], num: int, eta: float, rng: random.Random) -> list[int]:
    """`num` of these samples, by their places in order: without repeats where there are as many, else each, and some
    again. The chance of each goes with (|A| + EPSILON) ** eta."""
    chances = [(abs(a) + EPSILON) ** eta for a in advantages]
    places = range(len(advantages))
    if not places:
        return []
    if num >= len(places):
        return sorted([*places, *rng.choices(places, chances, k=num - len(places))])
    # the largest of log(u) / chance: a draw without repeats (Efraimidis and Spirakis 2006)
    keys = [-rng.expovariate(1.0) / chance for chance in chances]
    return sorted(sorted(places, key=lambda i: -keys[i])[:num])


def asked(fmt, text: str) -> str | None:
    """The query that a turn ends with, None where it ends with none."""
    before, opened, query = text.rpartition(fmt.query_open)
    closed = opened and query.endswith(fmt.query_close)
    return query.removesuffix(fmt.query_close) if closed else None


# A trajectory

@dataclass
class Episodes:
    """Trajectories, one of each problem. turns, condensed: rollouts of System 2 and System 1, each with the numbers of
    their trajectories, in the order of sampling. last: the last turn's text of each trajectory."""
    problems: list[Problem]
    last: list[str]
    num_queries: list[int]
    turns: list[tuple[Rollouts, list[int]]] = field(default_factory=list)
    condensed: list[tuple[Rollouts, list[int]]] = field(default_factory=list)


def run_episodes(t: Play, problems: list[Problem], greedy: bool = False) -> Episodes:
    """A trajectory of each problem. Every rank goes through all turns, also with none left."""
    episodes, fmt, args = Episodes(problems, [""] * len(problems), [0] * len(problems)), t.task.fmt, t.args
    contexts, live = [""] * len(problems), list(range(len(problems)))
    for k in range(args.most_turns):
        label = (lambda name: "eval") if greedy else (lambda name: f"{name}{k}")
        prompts = t.prompts("reason_prompt", [problems[n] for n in live], context=[contexts[n] for n in live])
        turns = t.sample("generator", prompts, 1, label("turn"), greedy=greedy)      # s_i, (t_i, p_i)
        episodes.turns.append((turns, live))
        for n, text in zip(live, turns.texts, strict=True):
            episodes.last[n] = text
        queries = {n: query for n, text in zip(live, turns.texts, strict=True)
                   if k + 1 < args.most_turns and (query := asked(fmt, text)) is not None}
        live = list(queries)
        bins = [(n, text) for n, query in queries.items() for text in packed(t.task.documents(query), args)]
        prompts = t.prompts("condense_prompt", [problems[n] for n, _ in bins], document=[text for _, text in bins],
                            query=[queries[n] for n, _ in bins])
        written = t.sample("generator", prompts, 1, label("condense"), greedy=greedy)  # o~
        written.columns = {"document": [text for _, text in bins], "query": [queries[n] for n, _ in bins]}
        episodes.condensed.append((written, [n for n, _ in bins]))
        found = {n: "" for n in live}
        for (n, _), tokens in zip(bins, written.completions(), strict=True):
            ended = tokens[-1:] and tokens[-1] in t.tokenizer.stop_tokens
            found[n] += t.tokenizer.decode((tokens[:-1] if ended else tokens)[: args.condense_tokens])
        for n in live:  # c_{i+1}
            contexts[n] += episodes.last[n] + fmt.info_open + found[n] + fmt.info_close + fmt.step_close
            episodes.num_queries[n] += 1
    return episodes


def packed(documents: list[str], args) -> list[str]:
    """Documents as the texts that System 1 reads. Raises BadInput where they are too many."""
    bins = first_fit_decreasing([len(document) for document in documents], args.bin_size)
    if len(bins) > args.most_bins:
        raise BadInput(f"--bin-size {args.bin_size}: what a query finds fills {len(bins)} prompts, and --most-bins is "
                       f"{args.most_bins}")
    return ["".join(documents[i] for i in sorted(b)) for b in bins]


# The algorithm

def play(t: Play):
    G, preset = t.args.num_samples, PRESETS[t.args.advantage]
    problems = [problem for problem in t.problems() for _ in range(G)]
    episodes = run_episodes(t, problems)
    outcomes = outcomes_of_last(t, episodes)                                                   # r^k
    turns, of_turn = together(episodes.turns)
    condensed, of_condensed = together(episodes.condensed)
    rewards = [outcomes[k] for k in of_condensed]                                              # r^{k,j} = r^k
    groups2, groups1 = [k // G for k in range(len(problems))], [k // G for k in of_condensed]
    A2 = system_advantages(outcomes, groups2, preset, t.device, t.reduce)
    A1 = system_advantages(rewards, groups1, preset, t.device, t.reduce)
    turns.columns = {"outcome": [outcomes[k] for k in of_turn], "trajectory": of_turn}
    condensed.columns |= {"outcome": rewards, "trajectory": of_condensed}
    log_systems(t, episodes, turns, condensed, outcomes)

    chosen = list(range(len(of_condensed)))
    if t.args.balance:  # the advantages stand
        chosen = balanced_rows(A1.tolist(), groups1, [p.index for p in problems[::G]], G, t.args.balance_eta,
                               f"{t.args.seed}-{t.step}")
    parts = [(turns, spread(A2[of_turn], turns))]                                              # L_2
    if t.args.train_condenser:
        parts.append((condensed.select(chosen), spread(A1[chosen], condensed)))                # L_1
    log_shares(t, parts)
    yield Update("generator", parts)


def outcomes_of_last(t: Play, episodes: Episodes) -> list[bool | None]:
    """The outcome of each trajectory: that of its last turn. What stands in a prompt does not count."""
    turns, of_turn = together(episodes.turns)
    last = {k: n for n, k in enumerate(of_turn)}  # a later turn takes the place of an earlier one
    return t.check(turns.select([last[k] for k in range(len(episodes.problems))]))


def together(parts: list[tuple[Rollouts, list[int]]]) -> tuple[Rollouts, list[int]]:
    """All rollouts of a system, and the trajectory of each."""
    return join([rollouts for rollouts, _ in parts]), [k for _, numbers in parts for k in numbers]


def balanced_rows(advantages: list[float], group_id: list[int], indices: list[int], num: int, eta: float,
                  seed: str) -> list[int]:
    """The samples of System 1 that are trained: of each problem `num`, if it has any. indices: of the problems, which
    key the draws, so that they are the same on any number of ranks."""
    rows = []
    for g, index in enumerate(indices):
        mine = [n for n, group in enumerate(group_id) if group == g]
        drawn = balanced([advantages[n] for n in mine], num, eta, random.Random(f"{seed}-{index}"))
        rows += [mine[i] for i in drawn]
    return rows


def spread(advantages: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
    """The advantage of each rollout on all its tokens. (n,) -> (n, T)"""
    return advantages[:, None].expand(-1, rollouts.tokens.shape[1])


def log_systems(t: Play, episodes: Episodes, turns: Rollouts, condensed: Rollouts, outcomes: list[bool | None]) -> None:
    """Logs the trajectories, and what either system wrote for them."""
    G, columns = t.args.num_samples, condensed.columns
    of_problem = torch.tensor([k // G for k in turns.columns["trajectory"]], dtype=torch.long, device=t.device)
    log_rewards(t, "generator", replace(turns, group_id=of_problem), turns.columns["outcome"])
    serves = getattr(t.task, "serves", lambda document, query: None)
    served = [serves(*row) for row in zip(columns["document"], columns["query"], strict=True)]
    unanswered = [asked(t.task.fmt, text) is not None for text in episodes.last]
    t.log("generator", t.mean({
        "rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes], "queries": episodes.num_queries,
        "searched": [num > 0 for num in episodes.num_queries], "unanswered": unanswered,
        "unreadable": [t.task.fmt.answer(text) is None for text in episodes.last],
        "condensed/right": [None if best is None else text == best
                            for text, best in zip(condensed.texts, served, strict=True)],
        "condensed/empty": [text == "" for text in condensed.texts],
        "condensed/mean_length": condensed.lengths.tolist()}))


def log_shares(t: Play, parts: list) -> None:
    """Logs how much of the update is System 1's: its share of the samples, and of the advantages' size over trained
    tokens."""
    sizes = torch.zeros(2, 2, device=t.device)
    for i, (rollouts, advantages) in enumerate(parts):
        sizes[i] = torch.stack([rollouts.num_trained().gt(0).sum(), (advantages.abs() * rollouts.mask).sum()])
    samples, weight = t.reduce(sizes).T.tolist()
    share = lambda pair: pair[1] / sum(pair) if sum(pair) else None
    t.log("generator", {"condensed/share_of_samples": share(samples), "condensed/share_of_weight": share(weight)})


def evaluate(t: Play) -> dict:
    """Greedy pass@1 of both systems together."""
    scores = {}
    for split, name in SPLITS.items():
        episodes = run_episodes(t, t.problems(t.args.eval_examples, split), greedy=True)
        right = are_right(t.gather(outcomes_of_last(t, episodes)), split)
        queries = t.gather(episodes.num_queries)
        scores |= {f"{short_name('generator')}/pass1_{name}": sum(right) / len(right) if right else None,
                   f"{short_name('generator')}/queries_{name}": sum(queries) / len(queries) if queries else None}
    return scores
