"""MARS (Chen et al. 2025): two systems of one model, one that reasons and one that reads. arXiv 2510.04935.

System 2 solves a problem in turns (reason_prompt). A turn that ends with a query is answered: the documents that the
search finds are packed into as few prompts as hold them, first-fit decreasing, and System 1 writes down what serves the
query (condense_prompt). That stands in the next turn's prompt. The last turn's answer earns 1 or 0, and the reward is
that of every turn and of everything that System 1 wrote on the way.

Advantages are z-scores within a problem, of each system by itself: System 2's over its trajectories, System 1's over
all that it wrote for them. After that, System 1's samples are drawn to be as many as System 2's, without repeats where
there are more, with some twice where there are fewer. They are drawn evenly, as in the paper's first version and in
public notes on the second, whose abstract says "advantage-weighted". No formula and no code of the authors was found.
By the same notes there is no KL, and models of 8B have 16 samples and a rate of 1e-6.

What the paper compares itself with is --system1 frozen: a copy of the start reads, and System 2 alone learns. With
--system1 shared System 1's samples are left out of the update too, but it is System 2's model, and so it changes with
it. Search-o1 (Li et al. 2025, arXiv 2501.05366) has the same turns and the same reader, and trains nothing: it is this
recipe's evaluation with --num-steps 0.

Departures:
1. A turn is a completion of its own. In the paper a trajectory is one, in which what System 1 wrote is masked. Here it
   stands in a prompt, so no token of it gets a gradient from System 2's samples. System 2's samples are turns, and a
   trajectory weighs as much as it has turns. In the paper all weigh the same.
2. A turn asks one query. The paper's ask several tools, a Python interpreter among them, with a purpose beside it.
3. Both losses are parts of one mean (--aggregation), not a sum of two means. The draw gives them equal numbers of
   samples, but for problems of which no trajectory asks.
4. Both systems learn their form by SFT first (chat_sft --demo-shares reason:0.4 condense:0.4), in the paper without.
"""
import argparse
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.recipes.search import search_r1
from nanochat.rl.credit.advantages import PRESETS, Preset, source_advantages
from nanochat.rl.credit.rewards import terminal_rewards
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import SPLITS, are_right
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.measure.scores import share_of
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.prompts import quoting_prompt
from nanochat.rl.records.rollouts import Rollouts, join
from tasks.common import Problem

STATUS = ("runs: no gain over a frozen reader is shown (-3.3 ± 8.3; longer problems +14.3 ± 20.1); its reader gets no "
          "better")
ROLES = {"generator": RoleSpec("--model-tag"), "reader": RoleSpec("--model-tag", trained=False)}
SHOWN = {"generator": ["queries", "condensed/right"]}
MARK_TOKENS = 16  # around what System 1 wrote, at most


class Reader(NamedTuple):
    """Who is System 1."""
    role: str
    learns: bool  # from what it writes


SYSTEM1 = {"trained": Reader("generator", True), "shared": Reader("generator", False),
           "frozen": Reader("reader", False)}
REMEDY = "lower --most-turns, --max-new-tokens, --condense-tokens or --most-bins"


def add_args(group) -> None:
    group.add_argument("--most-turns", type=at_least(1, int, 1000), default=6,
                       help="turns of a trajectory; the last one has to answer")
    group.add_argument("--condense-tokens", type=at_least(1), default=8, help="of what System 1 writes")
    group.add_argument("--bin-size", type=at_least(1), default=16,
                       help="characters of documents that System 1 reads at once, at least those of the longest one")
    group.add_argument("--most-bins", type=at_least(1), default=4, help="prompts of System 1 that a query may take")
    group.add_argument("--balance", action=argparse.BooleanOptionalAction, default=True,
                       help="draw as many samples of System 1 as System 2 has turns")
    group.add_argument("--system1", default="trained", choices=list(SYSTEM1),
                       help="who reads. trained, shared: the model itself, which learns from it or not; frozen: the "
                       "model that it starts from")
    group.set_defaults(kl_coef=0.0)


def check(args, task) -> None:
    search_r1.check(args, task, "documents")
    if PRESETS[args.advantage].scope != "group":
        raise BadInput(f"--advantage {args.advantage}: is over tokens, and MARS compares the samples of a problem")
    for query in getattr(task, "queries", ()):
        packed(task.documents(query), args)  # refuses what some step would


def draws(args) -> dict[str, Draw]:
    """Each turn, and what System 1 writes after it. A prompt quotes all turns before it."""
    N, limit, short = args.examples_per_step * args.num_samples, args.max_new_tokens, args.condense_tokens
    reader = SYSTEM1[args.system1]
    found = {}
    for k in range(args.most_turns):
        quoted = k * (limit + args.most_bins * short + MARK_TOKENS)
        wrap = partial(quoting_prompt, template="reason_prompt", context="")
        found[f"turn{k}"] = Draw("generator", N, 1, limit, trained=True, wrap=wrap, quoted=quoted, remedy=REMEDY)
        wrap = partial(quoting_prompt, template="condense_prompt", document="", query="")
        found[f"condense{k}"] = Draw(reader.role, N * args.most_bins, 1, short, trained=reader.learns, wrap=wrap,
                                     quoted=args.bin_size + limit, remedy=REMEDY)
    return found


def first_fit_decreasing(sizes: list[int], capacity: int) -> list[list[int]]:
    """Bins of places in `sizes`: each goes, the largest first, into the first bin that holds it, or a new one."""
    bins: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fit = next((b for b in bins if sum(sizes[j] for j in b) + sizes[i] <= capacity), None)
        if fit is None:
            bins.append([i])
        else:
            fit.append(i)
    return bins


def system_advantages(rewards: list[float | None], group_id: list[int], preset: Preset, negative_weight: float = 1.0,
                      device="cpu") -> torch.Tensor:
    """The advantage of each sample of one system: its trajectory's reward, normalised over the samples of its problem
    (--advantage). -> (n,)"""
    groups = torch.tensor(group_id, dtype=torch.long, device=device)
    one = torch.ones_like(groups)
    return source_advantages(terminal_rewards(rewards, one, negative_weight), groups, one[:, None] > 0, preset)[:, 0]


def balanced(samples: list[int], num: int, rng: random.Random) -> list[int]:
    """`num` of these samples, in order: without repeats where there are as many, else each, and some again."""
    if num >= len(samples):
        return sorted([*samples, *rng.choices(samples, k=num - len(samples))]) if samples else []
    keys = {n: rng.expovariate(1.0) for n in samples}
    return sorted(sorted(samples, key=keys.get)[:num])


def asked(fmt, text: str) -> str | None:
    """The query that a turn ends with, None where it ends with none."""
    _, opened, query = text.rpartition(fmt.query_open)
    return query.removesuffix(fmt.query_close) if opened and query.endswith(fmt.query_close) else None


def run_episodes(t: Play, problems: list[Problem], greedy: bool = False) -> tuple[Rollouts, Rollouts]:
    """A trajectory of each problem: System 2's turns and what System 1 wrote, in the order of sampling, each with the
    number of its trajectory. Every rank goes through all turns, also with none left."""
    fmt, args, turns, condensed = t.task.fmt, t.args, [], []
    contexts, live = [""] * len(problems), list(range(len(problems)))
    for k in range(args.most_turns):
        prompts = t.prompts("reason_prompt", [problems[n] for n in live], context=[contexts[n] for n in live])
        said = t.sample(f"turn{k}", prompts, greedy=greedy)            # s_i, (t_i, p_i)
        said.columns = {"trajectory": live, "turns": [[["so far", contexts[n]]] if k else [] for n in live]}
        texts = dict(zip(live, said.texts, strict=True))
        queries = {n: query for n, text in texts.items()
                   if k + 1 < args.most_turns and (query := asked(fmt, text)) is not None}
        bins = [(n, text) for n, query in queries.items() for text in packed(t.task.documents(query), args)]
        columns = {"trajectory": [n for n, _ in bins], "document": [text for _, text in bins],
                   "query": [queries[n] for n, _ in bins]}
        prompts = t.prompts("condense_prompt", [problems[n] for n, _ in bins], document=columns["document"],
                            query=columns["query"])
        written = t.sample(f"condense{k}", prompts, greedy=greedy)     # o~
        written.columns = columns
        live, found = list(queries), dict.fromkeys(queries, "")
        for (n, _), text in zip(bins, written.texts, strict=True):
            found[n] += text
        for n in live:                                                                 # c_{i+1}
            contexts[n] += texts[n] + fmt.info_open + found[n] + fmt.info_close + fmt.step_close
        turns.append(said)
        condensed.append(written)
    return join(turns), join(condensed)


def last_turns(turns: Rollouts) -> Rollouts:
    """The last turn of each trajectory."""
    return turns.select(list({k: n for n, k in enumerate(turns.columns["trajectory"])}.values()))


def num_queries(turns: Rollouts) -> list[int]:
    """How many queries of each trajectory were answered: after each another turn follows."""
    return [num - 1 for num in Counter(turns.columns["trajectory"]).values()]


def packed(documents: list[str], args) -> list[str]:
    """Documents as the texts that System 1 reads. Raises BadInput where one is too long, or they are too many."""
    sizes = [len(document) for document in documents]
    if max(sizes, default=0) > args.bin_size:
        raise BadInput(f"--bin-size {args.bin_size}: a document has {max(sizes)} characters")
    bins = first_fit_decreasing(sizes, args.bin_size)
    if len(bins) > args.most_bins:
        raise BadInput(f"--bin-size {args.bin_size}: what a query finds fills {len(bins)} prompts, and --most-bins is "
                       f"{args.most_bins}")
    return ["".join(documents[i] for i in sorted(b)) for b in bins]


def play(t: Play):
    G, preset = t.args.num_samples, PRESETS[t.args.advantage]
    problems = t.problems()
    turns, condensed = run_episodes(t, [problem for problem in problems for _ in range(G)])
    of_turn, of_condensed = turns.columns["trajectory"], condensed.columns["trajectory"]
    outcomes = t.check(last_turns(turns))                                                      # r^k
    turns.columns["outcome"] = [outcomes[k] for k in of_turn]
    condensed.columns["outcome"] = [outcomes[k] for k in of_condensed]                         # r^{k,j} = r^k
    groups2, groups1 = [k // G for k in range(len(outcomes))], [k // G for k in of_condensed]
    system = partial(system_advantages, preset=preset, negative_weight=t.args.negative_weight, device=t.device)
    A2 = system(outcomes, groups2)
    log_systems(t, turns, condensed, outcomes)
    parts = [(turns, spread(A2[of_turn], turns))]                                              # L_2
    if SYSTEM1[t.args.system1].learns:
        A1 = system(condensed.columns["outcome"], groups1)
        chosen = list(range(len(of_condensed)))
        if t.args.balance:  # the advantages stand
            chosen = balanced_rows(groups1, [problem.index for problem in problems], Counter(k // G for k in of_turn),
                                   f"{t.args.seed}-{t.step}")
        parts.append((condensed.select(chosen), spread(A1[chosen], condensed)))                # L_1
    log_shares(t, parts)
    yield Update("generator", parts)


def balanced_rows(group_id: list[int], indices: list[int], nums: dict[int, int], seed: str) -> list[int]:
    """The samples of System 1 that are trained: of each problem `nums` of them, if it has any. indices: of the
    problems, which key the draws, so that they are the same on any number of ranks."""
    return [n for g, index in enumerate(indices) for n in balanced(
        [n for n, group in enumerate(group_id) if group == g], nums[g], random.Random(f"{seed}-{index}"))]


def spread(advantages: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
    """The advantage of each rollout on all its tokens. (n,) -> (n, T)"""
    return advantages[:, None].expand(-1, rollouts.tokens.shape[1])


def log_systems(t: Play, turns: Rollouts, condensed: Rollouts, outcomes: list[bool | None]) -> None:
    """Logs the trajectories, and what either system wrote for them."""
    G, columns = t.args.num_samples, condensed.columns
    of_problem = torch.tensor([k // G for k in turns.columns["trajectory"]], dtype=torch.long, device=t.device)
    log_rewards(t, "generator", replace(turns, group_id=of_problem), turns.columns["outcome"])
    serves = getattr(t.task, "serves", lambda document, query: None)
    served = [serves(*row) for row in zip(columns["document"], columns["query"], strict=True)]
    last, nums = last_turns(turns).texts, num_queries(turns)
    t.log("generator", t.mean({
        "rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes], "queries": nums,
        "searched": [num > 0 for num in nums], "unanswered": [asked(t.task.fmt, text) is not None for text in last],
        "unreadable": [t.task.fmt.answer(text) is None for text in last],
        "condensed/right": [None if best is None else text == best
                            for text, best in zip(condensed.texts, served, strict=True)],
        "condensed/empty": [text == "" for text in condensed.texts],
        "condensed/mean_length": condensed.lengths.tolist()}))


def log_shares(t: Play, parts: list) -> None:
    """Logs System 1's share of the update: of the samples, and of the advantages' size over trained tokens."""
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
        turns, _ = run_episodes(t, t.problems(t.args.eval_examples, split), greedy=True)
        right = are_right(t.gather(t.check(last_turns(turns))), split)
        scores |= {f"gen/pass1_{name}": share_of(right), f"gen/queries_{name}": share_of(t.gather(num_queries(turns)))}
    return scores
