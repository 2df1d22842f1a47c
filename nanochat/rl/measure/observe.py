"""
What a step says of itself in metrics.jsonl and rollouts.jsonl. Nothing here changes what is learned.
"""
from functools import partial
from itertools import zip_longest
from statistics import pstdev, variance

import torch

from nanochat.common import BadInput
from nanochat.rl.credit.advantages import SparseRewards
from nanochat.rl.credit.rewards import checked_rewards, terminal_rewards
from nanochat.rl.measure.scores import judgments, ranking_reversed, step_sums, verdict_row, verdict_scores
from nanochat.rl.measure.voting import auroc
from nanochat.rl.play.play import Play
from nanochat.rl.records.outcomes import labels_of
from nanochat.rl.records.prompts import Verification
from nanochat.rl.records.rollouts import Rollouts, grouped


def observe(t: Play, role: str, solutions: Rollouts, rewards: list[float | None], advantages: torch.Tensor,
            sources: dict[str, SparseRewards] | None = None) -> None:
    """Logs a step of solving: rewards and their variance by source, outcomes, reasoning steps and their gold labels,
    and how often the advantages (N, T) rank a wrong solution above a right one. sources: by default the rewards."""
    if "outcome" not in solutions.columns:
        raise BadInput(f"observe of the {role}: its solutions need a column outcome, which t.rewards makes, or t.check "
                       f"gives; log_rewards needs none")
    outcomes, read = solutions.columns["outcome"], t.read_solutions(solutions)
    labels = list(map(partial(labels_of, t.task), solutions.problems(), solutions.texts))
    inside = torch.arange(advantages.shape[1], device=advantages.device) < solutions.lengths[:, None]  # (N, T)
    means = ((advantages * inside).sum(dim=1) / solutions.lengths.clamp(min=1)).tolist()
    log_rewards(t, role, solutions, rewards)
    log_variances(t, role, solutions, sources or {"outcome": terminal_rewards(rewards, solutions.lengths)})
    t.log(role, t.mean({
        "rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes],
        "reasoning_steps": [len(s.step_ends) for s in read],
        "step_length": [(s.step_ends[-1] + 1) / len(s.step_ends) for s in read if s.step_ends],
        "frac_ranking_reversed": ranking_reversed(outcomes, means, t.args.num_samples),
        "step_label_mean": [x for row in labels for x in row]}))


def log_rewards(t: Play, role: str, rollouts: Rollouts, rewards: list[float | None]) -> None:
    """Logs the rewards (None = not scorable), their spread within groups, the share of groups without signal, and what
    the completions look like. rollouts.jsonl shows the rewards too. Raises as checked_rewards does."""
    rollouts.columns["reward"] = rewards = checked_rewards(rewards, f" of the {role}")
    groups = grouped(rollouts.group_id.tolist(), rewards)
    num_rollouts = t.reduce(torch.tensor(len(rewards), device=t.device)).item()
    t.log(role, {"num_rollouts": num_rollouts} | t.mean({
        "reward": rewards, "reward_std": [pstdev(g) for g in groups.values() if g],
        # as float32, which advantages are: 1e8 and 1e8 + 1 are equal
        "frac_reward_zero_std": [len(set(torch.tensor(g, dtype=torch.float32).tolist())) < 2 for g in groups.values()],
        "completions/mean_length": rollouts.lengths.tolist(),
        "completions/clipped_ratio": (~rollouts.stopped).tolist(),
        **{f"uncounted/{reason}": [found == reason for found in rollouts.columns["uncounted"]]
           for reason in ("cut", "copied") if "uncounted" in rollouts.columns}}))


def log_variances(t: Play, role: str, rollouts: Rollouts, sources: dict[str, SparseRewards]) -> None:
    """Logs how far each reward source tells the rollouts of a prompt apart: variance/<source>, the mean over groups of
    the unbiased variance of what a rollout earns from it, 0 with fewer than two; zero_variance/<source>, the share of
    groups where it is 0. A source that varies little teaches slowly, however accurate it is (Razin et al. 2025, arXiv
    2503.15477)."""
    found = {}
    for name, rewards in sources.items():
        sums = rewards.values.masked_fill(~rewards.valid, 0.0).sum(dim=1).tolist()
        known = [total if is_known else None
                 for total, is_known in zip(sums, rewards.valid.any(dim=1).tolist(), strict=True)]
        within = [variance(group) if len(group) > 1 else 0.0
                  for group in grouped(rollouts.group_id.tolist(), known).values()]
        found |= {f"variance/{name}": within, f"zero_variance/{name}": [v == 0 for v in within]}
    t.log(role, t.mean(found))


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
    """Logs how well a role judges rollouts (`judgments`), and their steps where those have labels (step_auc). log_odds
    (N, T): a token's share in the log-odds that the answer is right."""
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
