"""
The held-out evaluation. Problems are shared out over ranks and what comes of them is gathered, so every rank has the
scores.
"""
from collections.abc import Callable

import torch

from nanochat.common import print0
from nanochat.engine import Tool
from nanochat.rl.learn.roles import short_name
from nanochat.rl.measure.observe import gathered_verdict_scores, verification_columns
from nanochat.rl.measure.scores import majority, outcome_of, pass_at_k, share_of
from nanochat.rl.play.play import Play
from nanochat.rl.records.outcomes import has_numbers, lenient_outcomes
from nanochat.rl.records.rollouts import padded

SPLITS = {"test_in": "in", "test_out": "out"}  # a finite task may have no test_out
NUM_EXAMPLES = 10  # problems whose solutions are kept at each evaluation
PASS_AT_1 = {  # for a recipe's TABLE
    "gen/pass1_in": "generator greedy pass@1, in distribution",
    "gen/pass1_out": "generator greedy pass@1, out of distribution",
    "gen/pass1_lenient_in": "the same by the last number, in distribution",
    "gen/pass1_lenient_out": "the same by the last number, out of distribution",
}
PAIR_TABLE = PASS_AT_1 | {  # of `scores_of_pair`
    "ver/outcome_f1_fixed": "verifier outcome F1 (macro), fixed solutions",
    "ver/balanced_acc_fixed": "verifier balanced accuracy, fixed solutions",
    "ver/step_f1_fixed": "verifier step F1 (macro, gold labels), fixed solutions",
    "ver/step_f1_fixed_out": "verifier step F1, fixed solutions, out of distribution",
    "ver/step_f1_current": "verifier step F1, current generator's solutions",
    "ver/wrong_steps_passed_fixed": "wrong steps that it passes, fixed solutions",
    "ver/wrong_steps_passed_current": "wrong steps that it passes, current generator's solutions",
    "ver/parse_fail_fixed": "verifier parse failures",
}


def are_right(outcomes: list[bool | None], split: str) -> list[bool]:
    """Whether each outcome is True. Those that are not known count as wrong, and it is said how many they are."""
    if num_unscorable := outcomes.count(None):
        print0(f"WARNING: {num_unscorable} of {len(outcomes)} solutions of {split} cannot be scored and count as wrong")
    return [outcome is True for outcome in outcomes]


def pass_at_1(t: Play, role: str = "generator", tool: Callable[[], Tool | None] = lambda: None) -> dict:
    """A role's greedy pass@1 on both test splits, None for one without problems; of a task with numbers the lenient one
    too. Keeps the first examples. tool: makes what solutions may call, anew for each split; the default is that of
    `Play.solve`."""
    scores = {}
    for split, name in SPLITS.items():
        solutions = t.solve("eval", t.problems(t.args.eval_examples, split), 1, role=role, greedy=True, tool=tool())
        solutions.columns["outcome"] = outcomes = t.check(solutions)
        right = are_right(t.gather(outcomes), split)
        scores[f"{short_name(role)}/pass1_{name}"] = share_of(right)
        lost = [reason is not None for reason in t.gather(solutions.columns["uncounted"])]
        scores[f"{short_name(role)}/uncounted_{name}"] = share_of(lost)
        if any(lost):
            print0(f"{sum(lost)} of {len(lost)} solutions of {split} are right but cut, or copied from the problem, "
                   f"and count as wrong")
        if has_numbers(t.task):
            lenient = t.gather(lenient_outcomes(t.task, solutions.problems(), solutions.texts))
            scores[f"{short_name(role)}/pass1_lenient_{name}"] = share_of(lenient)
        if t.examples is None:
            t.examples = solutions.select(list(range(min(len(solutions), -(-NUM_EXAMPLES // t.run.world)))))
            t.examples.columns["role"] = [role] * len(t.examples)
    return scores


def sampled_solutions(t: Play, role: str, split: str, label: str) -> list[list[int]]:
    """One sampled solution of each problem of a split, as token ids."""
    return t.gather(t.solve(label, t.problems(t.args.eval_examples, split), 1, role=role).completions())


def kept(rows: list[list[int]]) -> torch.Tensor:
    """Token ids as a run's memory holds them: lists of ints are slow to copy. -> (N, T) int64, -1 after each"""
    return padded(rows, -1)


def cut(rows: torch.Tensor) -> list[list[int]]:
    """The inverse of `kept`."""
    return [[token for token in row if token >= 0] for row in rows.tolist()]


def scores_of_pair(t: Play, generator: str = "generator", verifier: str = "verifier") -> dict:
    """pass@1 of a generator, and <score>_{fixed,fixed_out,current} of a verifier. fixed: on solutions that the starting
    generator sampled, the same in the whole run; current: on those that the present one samples in distribution."""
    if "fixed_solutions" not in t.memory:
        t.memory["fixed_solutions"] = {split: kept(sampled_solutions(t, generator, split, "fixed")) for split in SPLITS}
    fixed, scores = {split: cut(rows) for split, rows in t.memory["fixed_solutions"].items()}, pass_at_1(t, generator)
    verifications = t.read_verifications(t.verify("eval", t.examples, 1, role=verifier, greedy=True))
    t.examples.columns |= verification_columns(verifications)
    judged = {"fixed": ("test_in", fixed["test_in"]), "fixed_out": ("test_out", fixed["test_out"]),
              "current": ("test_in", sampled_solutions(t, generator, "test_in", "current"))}
    for kind, (split, completions) in judged.items():
        if completions:
            prompts = t.solve_prompts(t.problems(t.args.eval_examples, split))
            solutions = t.written(generator, prompts, completions[t.run.rank:: t.run.world])
            verifications = t.read_verifications(t.verify("eval", solutions, 1, role=verifier, greedy=True))
            found = gathered_verdict_scores(t, solutions, t.check(solutions), verifications)
            scores |= {f"{short_name(verifier)}/{name}_{kind}": value for name, value in found.items()}
    return scores


def sampled_scores(t: Play, role: str, num_problems: int) -> dict:
    """pass@1, pass@k, maj@k over k sampled solutions, and how many groups carry no signal: the health of RL's start."""
    k = t.args.num_samples
    rollouts = t.solve("health", t.problems(min(num_problems, t.args.eval_examples), "test_in"), k, role=role)
    outcomes, said, stopped, rows = t.check(rollouts), t.answers(rollouts, k), rollouts.stopped.tolist(), []
    for i in range(0, len(outcomes), k):
        answers, found = said[i: i + k], outcomes[i: i + k]
        rows.append([found, outcome_of(majority(answers), answers, found) is True, sum(stopped[i: i + k])])
    rows = t.gather(rows)
    n, right = len(rows), are_right([outcome for row, _, _ in rows for outcome in row], "test_in")
    groups = [right[i: i + k] for i in range(0, len(right), k)]
    lenient = t.gather(lenient_outcomes(t.task, rollouts.problems(), rollouts.texts))
    return {"pass@1": sum(right) / (n * k),
            **({"pass@1_lenient": share_of(lenient)} if has_numbers(t.task) else {}),
            f"pass@{k}": sum(pass_at_k(k, sum(group), k) for group in groups) / n,
            f"maj@{k}": sum(voted for _, voted, _ in rows) / n,
            "frac_reward_zero_std": sum(sum(group) in (0, k) for group in groups) / n,
            "end_token_rate": sum(s for _, _, s in rows) / (n * k)}
