"""
What recipes measure: the rewards of a step, and the held-out evaluation. Problems are shared out over ranks and what
comes of them is gathered, so every rank has the scores.
"""
import math
from collections.abc import Callable
from itertools import zip_longest
from statistics import pstdev, variance

import torch

from nanochat.common import BadInput, print0
from nanochat.engine import Tool
from nanochat.rl.credit.advantages import SparseRewards
from nanochat.rl.learn.roles import short_name
from nanochat.rl.measure.scores import judgments, majority, pass_at_k, share_of, step_sums, verdict_row, verdict_scores
from nanochat.rl.measure.voting import auroc
from nanochat.rl.play.play import Play
from nanochat.rl.records.outcomes import answers_of, has_numbers, labels_of, lenient_outcomes
from nanochat.rl.records.prompts import Verification
from nanochat.rl.records.rollouts import Rollouts

SPLITS = {"test_in": "in", "test_out": "out"}  # a finite task may have no test_out


# In a step

def log_rewards(t: Play, role: str, rollouts: Rollouts, rewards: list[float | None]) -> None:
    """Logs the rewards (None = not scorable), their spread within groups, the share of groups without signal, and what
    the completions look like. rollouts.jsonl shows the rewards too."""
    if any(reward is not None and math.isnan(reward) for reward in rewards):
        raise BadInput(f"a reward of the {role} is nan; one that cannot be told is None")
    rollouts.columns["reward"] = [None if reward is None else float(reward) for reward in rewards]
    groups: dict[int, list[float]] = {}
    for g, reward in zip(rollouts.group_id.tolist(), rewards, strict=True):
        groups.setdefault(g, []).extend([] if reward is None else [float(reward)])
    num_rollouts = t.reduce(torch.tensor(len(rewards), device=t.device)).item()
    t.log(role, {"num_rollouts": num_rollouts} | t.mean({
        "reward": rewards, "reward_std": [pstdev(g) for g in groups.values() if g],
        "frac_reward_zero_std": [len(set(g)) < 2 for g in groups.values()],
        "completions/mean_length": rollouts.lengths.tolist(),
        "completions/clipped_ratio": (~rollouts.stopped).tolist()}))


def log_variances(t: Play, role: str, rollouts: Rollouts, sources: dict[str, SparseRewards]) -> None:
    """Logs how far each reward source tells the rollouts of a prompt apart: variance/<source>, the mean over groups of
    the unbiased variance of what a rollout earns from it in all; zero_variance/<source>, the share of groups where that
    is 0.

    A source teaches slowly where it varies little, however accurate it is (Razin et al. 2025, arXiv 2503.15477). Where
    fewer than two rollouts of a group are scorable nothing varies.
    """
    found = {}
    for name, rewards in sources.items():
        sums, known = rewards.values.masked_fill(~rewards.valid, 0.0).sum(dim=1).tolist(), rewards.valid.any(dim=1)
        groups: dict[int, list[float]] = {g: [] for g in rollouts.group_id.tolist()}
        for g, total, is_known in zip(rollouts.group_id.tolist(), sums, known.tolist(), strict=True):
            groups[g] += [total] if is_known else []
        within = [variance(group) if len(group) > 1 else 0.0 for group in groups.values()]
        found |= {f"variance/{name}": within, f"zero_variance/{name}": [v == 0 for v in within]}
    t.log(role, t.mean(found))


def mean_advantages(rollouts: Rollouts, advantages: torch.Tensor) -> list[float]:
    """Each rollout's mean advantage over its tokens. advantages (N, T)."""
    inside = torch.arange(advantages.shape[1], device=advantages.device) < rollouts.lengths[:, None]  # (N, T)
    return ((advantages * inside).sum(dim=1) / rollouts.lengths.clamp(min=1)).tolist()


def gathered_verdict_scores(t: Play, solutions: Rollouts, outcomes: list[bool | None],
                       verifications: list[Verification]) -> dict:
    """`verdict_scores` over all ranks; verifications[i] is of the i-th solution."""
    rows = zip(solutions.problems(), solutions.texts, outcomes, verifications, strict=True)
    return verdict_scores(t.gather([verdict_row(t.task, *row) for row in rows]))


def passed_by_error(t: Play, solutions: Rollouts, verifications: list[Verification]) -> dict[str, float]:
    """Of each kind of error that the task names (`step_errors`): errors/<kind>, its share of all steps, and
    passed/<kind>, the share of its steps that are judged right. Over all ranks; {} where the task names none."""
    if not hasattr(t.task, "step_errors"):
        return {}
    rows = [list(zip_longest(errors, v.step_verdicts[: len(errors)])) for errors, v in zip(
        map(t.task.step_errors, solutions.problems(), solutions.texts), verifications, strict=True)]
    steps = [step for row in t.gather(rows) for step in row]
    kinds = sorted({error for error, _ in steps if error})
    passed = {kind: [verdict is True for error, verdict in steps if error == kind] for kind in kinds}
    return ({f"errors/{kind}": len(hits) / len(steps) for kind, hits in passed.items()}
            | {f"passed/{kind}": sum(hits) / len(hits) for kind, hits in passed.items()})


def log_odds_scores(t: Play, role: str, rollouts: Rollouts, log_odds: torch.Tensor, prefix: str = "") -> None:
    """Logs how well a role judges rollouts (`judgments`), and their steps where those have labels (step_auc).

    log_odds (N, T): a token's share in the log-odds that the answer is right. rollouts: with a column of outcomes.
    """
    scores = t.mean(judgments(log_odds, rollouts.columns["outcome"], rollouts.group_id.tolist()))
    rows = zip(rollouts.problems(), t.read_solutions(rollouts), log_odds.tolist(), strict=True)
    steps = [step_sums(labels_of(t.task, problem, s.text), s.step_ends, values) for problem, s, values in rows]
    labels, sums = ([step[i] for of_rollout in t.gather(steps) for step in of_rollout] for i in (0, 1))
    scores["step_auc"] = auroc(sums, labels)
    t.log(role, {prefix + name: value for name, value in scores.items()})


def verification_columns(verifications: list[Verification]) -> dict[str, list]:
    """What rollouts.jsonl says of verifications."""
    return {"verification": [v.text for v in verifications], "step_verdicts": [v.step_verdicts for v in verifications],
            "verdict": [v.verdict for v in verifications], "unmet": [list(v.unmet) for v in verifications]}


# Held out

def are_right(outcomes: list[bool | None], split: str) -> list[bool]:
    """Whether each outcome is True. Those that are not known count as wrong, and it is said how many they are."""
    if num_unscorable := outcomes.count(None):
        print0(f"WARNING: {num_unscorable} of {len(outcomes)} solutions of {split} cannot be scored and count as wrong")
    return [outcome is True for outcome in outcomes]


def pass_at_1(t: Play, role: str, tool: Callable[[], Tool | None] = lambda: None) -> dict:
    """A role's greedy pass@1 on both test splits, None for one without problems; of a task with numbers the lenient one
    too. tool: makes what solutions may call, anew for each split; the default is that of `Play.solve`."""
    scores = {}
    for split, name in SPLITS.items():
        solutions = t.solve("eval", t.problems(t.args.eval_examples, split), 1, role=role, greedy=True, tool=tool())
        right = are_right(t.gather(t.check(solutions)), split)
        scores[f"{short_name(role)}/pass1_{name}"] = sum(right) / len(right) if right else None
        if has_numbers(t.task):
            lenient = t.gather(lenient_outcomes(t.task, solutions.problems(), solutions.texts))
            scores[f"{short_name(role)}/pass1_lenient_{name}"] = share_of(lenient)
    return scores


def sampled_solutions(t: Play, role: str, split: str, label: str) -> list[list[int]]:
    """One sampled solution of each problem of a split, as token ids."""
    return t.gather(t.solve(label, t.problems(t.args.eval_examples, split), 1, role=role).completions())


def verifier_scores(t: Play, generator: str, verifier: str, split: str, completions: list[list[int]]) -> dict:
    """Scores of greedy verifications of given solutions of a split's problems."""
    problems, mine = t.problems(t.args.eval_examples, split), completions[t.run.rank:: t.run.world]
    solutions = t.written(generator, t.solve_prompts(problems), mine)
    verifications = t.read_verifications(t.verify("eval", solutions, 1, role=verifier, greedy=True))
    return gathered_verdict_scores(t, solutions, t.check(solutions), verifications)


def padded(rows: list[list[int]]) -> torch.Tensor:
    """Token ids of several lengths as one tensor, -1 behind each: lists of ints are slow to copy. -> (N, T) int64"""
    width = max(map(len, rows), default=1)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.long).view(len(rows), width)


def cut(rows: torch.Tensor) -> list[list[int]]:
    """The inverse of `padded`."""
    return [[token for token in row if token >= 0] for row in rows.tolist()]


def scores_of_pair(t: Play, generator: str = "generator", verifier: str = "verifier") -> dict:
    """pass@1 of a generator, and <score>_{fixed,fixed_out,current} of a verifier. fixed: on solutions that the starting
    generator sampled, the same in the whole run; current: on those that the present one samples in distribution."""
    if "fixed_solutions" not in t.memory:
        t.memory["fixed_solutions"] = {split: padded(sampled_solutions(t, generator, split, "fixed"))
                                       for split in SPLITS}
    fixed, scores = {split: cut(rows) for split, rows in t.memory["fixed_solutions"].items()}, pass_at_1(t, generator)
    current = sampled_solutions(t, generator, "test_in", "current")
    judged = {"fixed": ("test_in", fixed["test_in"]), "fixed_out": ("test_out", fixed["test_out"]),
              "current": ("test_in", current)}
    for kind, (split, completions) in judged.items():
        if completions:
            found = verifier_scores(t, generator, verifier, split, completions)
            scores |= {f"{short_name(verifier)}/{name}_{kind}": value for name, value in found.items()}
    return scores


def sampled_scores(t: Play, role: str, num_problems: int) -> dict:
    """pass@1, pass@k, maj@k over k sampled solutions, and how many groups carry no signal: the health of RL's start."""
    k = t.args.num_samples
    rollouts = t.solve("health", t.problems(min(num_problems, t.args.eval_examples), "test_in"), k, role=role)
    outcomes, stopped, rows = t.check(rollouts), rollouts.stopped.tolist(), []
    for i in range(0, len(outcomes), k):
        answers = answers_of(t.task, rollouts.texts[i: i + k])
        vote = majority(answers)
        rows.append([outcomes[i: i + k], None if vote is None else answers.index(vote),
                     sum(stopped[i: i + k])])
    rows = t.gather(rows)
    n, right = len(rows), are_right([outcome for row, _, _ in rows for outcome in row], "test_in")
    groups = [right[i: i + k] for i in range(0, len(right), k)]
    voted = [place is not None and group[place] for group, (_, place, _) in zip(groups, rows, strict=True)]
    lenient = t.gather(lenient_outcomes(t.task, rollouts.problems(), rollouts.texts))
    return {"pass@1": sum(right) / (n * k),
            **({"pass@1_lenient": share_of(lenient)} if has_numbers(t.task) else {}),
            f"pass@{k}": sum(pass_at_k(k, sum(group), k) for group in groups) / n,
            f"maj@{k}": sum(voted) / n,
            "frac_reward_zero_std": sum(sum(group) in (0, k) for group in groups) / n,
            "end_token_rate": sum(s for _, _, s in rows) / (n * k)}
