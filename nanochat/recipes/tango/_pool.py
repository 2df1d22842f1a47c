"""
What a verifier is trained on: solutions, gathered over ranks, kept for later, balanced; and the weights of their
classes.
"""
import random
from dataclasses import asdict

import torch
from torch.nn.functional import pad

from nanochat.common import all_reduce, gather_tensor
from nanochat.rl.credit.rewards import ClassWeights
from nanochat.rl.play.play import Play
from nanochat.rl.records.prompts import count_copies
from nanochat.rl.records.rollouts import Rollouts


def scored_solutions(t: Play, solutions: Rollouts, outcomes: list[bool | None]) -> dict[str, torch.Tensor]:
    """The solutions of all ranks that have an outcome, in the order of their problems.

    -> problem (M,) int64: indices in the rl split; tokens (M, T) int64; lengths (M,) int64; outcome (M,) bool, on CPU
    """
    kept = [n for n, outcome in enumerate(outcomes) if outcome is not None]
    index = torch.tensor(kept, dtype=torch.long, device=t.device)
    problems = solutions.problems()
    width = int(all_reduce(torch.tensor(solutions.tokens.shape[1], device=t.device), "max"))
    tokens = pad(solutions.tokens[index], (0, width - solutions.tokens.shape[1]))
    numbers = torch.tensor([[problems[n].index, outcomes[n]] for n in kept], dtype=torch.long,
                           device=t.device).view(-1, 2)
    rows = gather_tensor(torch.cat([numbers, solutions.lengths[index, None], tokens], dim=1)).cpu()
    rows = rows[rows[:, 0].argsort(stable=True)]
    return {"problem": rows[:, 0], "outcome": rows[:, 1].bool(), "lengths": rows[:, 2], "tokens": rows[:, 3:]}


def extended(pool: dict[str, torch.Tensor] | None, new: dict[str, torch.Tensor], most: int) -> dict[str, torch.Tensor]:
    """A pool with new solutions after the old ones, of which the last `most` are kept."""
    if not pool:
        return {name: x[-most:].clone() for name, x in new.items()}
    width = max(pool["tokens"].shape[1], new["tokens"].shape[1])
    widen = lambda x: pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x
    return {name: torch.cat([widen(pool[name]), widen(new[name])])[-most:].clone() for name in pool}


def completions_of(pool: dict[str, torch.Tensor], rows: list[int]) -> list[list[int]]:
    """Token ids of solutions of a pool."""
    return [pool["tokens"][n, : pool["lengths"][n]].tolist() for n in rows]


def choose_solutions(fresh: list[bool], past: list[bool], num: int, replay: float, balance: bool,
                     rng: random.Random) -> list[int]:
    """Which solutions a verifier step judges: `num` places in fresh + past, of which the outcomes are given. A share
    `replay` is past, the rest fresh. With balance, half are right and half wrong as far as both have them. Without
    either this is the first `num` fresh ones (Tango algorithm 1)."""
    outcomes, new = fresh + past, list(range(len(fresh)))
    num_replayed = min(round(replay * num), len(past))
    old = rng.sample(range(len(fresh), len(outcomes)), len(past)) if num_replayed or balance else []
    if not balance:
        return new[: num - num_replayed] + old[:num_replayed]
    first, rest = new[: num - num_replayed] + old[:num_replayed], old[num_replayed:] + new[num - num_replayed:]
    half = {True: num // 2, False: num - num // 2}
    chosen, left_over = [], []
    for place in first + rest:
        if half[outcomes[place]] > 0:
            half[outcomes[place]] -= 1
            chosen.append(place)
        else:
            left_over.append(place)
    return chosen + left_over[: num - len(chosen)]


def wants_pool(args) -> bool:
    """Whether a run keeps past solutions."""
    return bool(args.replay_size and (args.verifier_balance or args.verifier_replay))


def keep(t: Play, solutions: Rollouts) -> None:
    """Keeps the solutions of a generator step for verifier steps to come."""
    if wants_pool(t.args):
        new = scored_solutions(t, solutions, solutions.columns["outcome"])
        t.memory["pool"] = extended(t.memory.get("pool"), new, t.args.replay_size)


def solutions_to_judge(t: Play) -> tuple[Rollouts, list[bool], list[int]]:
    """One new solution of each problem, or past ones in place of some (`choose_solutions`). -> this rank's share of
    them, their outcomes, and how often the problem of each came before"""
    args, pool = t.args, t.memory.get("pool")
    sampled = t.solve("judged", t.problems(labelled=True))
    fresh = scored_solutions(t, sampled, t.check(sampled))
    num_fresh = len(fresh["problem"])
    candidates = extended(fresh, pool, num_fresh + args.replay_size) if pool else fresh
    outcomes = candidates["outcome"].tolist()
    chosen = choose_solutions(outcomes[:num_fresh], outcomes[num_fresh:], args.examples_per_step, args.verifier_replay,
                              args.verifier_balance, random.Random(f"{args.seed}-{t.step}"))
    mine = slice(t.run.rank, None, t.run.world)
    copies, chosen = count_copies(candidates["problem"][chosen].tolist())[mine], chosen[mine]
    problems = [t.task.problem("rl", index) for index in candidates["problem"][chosen].tolist()]
    solutions = t.written("generator", t.solve_prompts(problems), completions_of(candidates, chosen))
    if wants_pool(args):
        t.memory["pool"] = extended(pool, fresh, args.replay_size)
    return solutions, [outcomes[n] for n in chosen], copies


def class_weights(t: Play, outcomes: list[bool]) -> torch.Tensor:
    """The weight of each verification by the class of what it judges, over moving averages of all batches. -> (N,)"""
    weights, G = ClassWeights(**t.memory.get("class_weights", {})), t.args.num_samples
    counts = torch.tensor([outcomes.count(True) / G, outcomes.count(False) / G], device=t.device)
    weights.observe(*t.reduce(counts).tolist())
    t.memory["class_weights"] = asdict(weights)
    t.log("verifier", {"class_weight/right": weights.weight(True), "class_weight/wrong": weights.weight(False)})
    return torch.tensor([weights.weight(outcome) for outcome in outcomes], device=t.device)
