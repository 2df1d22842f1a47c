"""
Scores: pass@1, pass@k, maj@k of a generator; F1 and balanced accuracy of a verifier.
"""
from collections import Counter
from math import comb
from statistics import correlation as correlate
from statistics import pstdev

import torch

from nanochat.common import all_reduce, gather_lists, in_threads, mean_over_ranks
from nanochat.rl.prompts import read_solution


ENDLESS = 400  # problems that stand for all of a task that makes its own


def problems_of(task, split: str, num: int) -> list:
    """The first `num` problems of a split (-1: all, ENDLESS where they are made), or as many as a finite one has: none is counted twice."""
    size = task.num_problems(split) if hasattr(task, "num_problems") else ENDLESS if num < 0 else num
    return [task.problem(split, i) for i in range(size if num < 0 else min(num, size))]


def outcomes_of(task, problems: list, solutions: list) -> list[bool | None]:
    """The outcome of each solution, many at a time: grading may wait for worker processes."""
    return in_threads(lambda problem, solution: task.check(problem, solution.text), problems, solutions)


def answers_of(task, solutions: list) -> list[str | None]:
    """What solutions answer, for votes: as the task reads it, else as its format does. None where nothing can be read."""
    read = getattr(task, "read_answer", task.fmt.answer)
    return [read(solution.text) for solution in solutions]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased probability that one of k samples is right, from `num_samples` of which `num_correct` are (Chen et al. 2021)."""
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority(answers: list[str | None]) -> str | None:
    """The most frequent answer, ties going to the earliest; None when no answer could be read."""
    counts = Counter(a for a in answers if a is not None)
    return counts.most_common(1)[0][0] if counts else None


def macro_f1(labels: list[bool], verdicts: list[bool | None]) -> float | None:
    """The mean of the F1 of class True and of class False, over those that occur in labels or verdicts; None where neither does. A missing
    verdict is wrong for both."""
    scores = []
    for c in (True, False):
        hits = sum(v is c and l is c for l, v in zip(labels, verdicts, strict=True))
        actual, said = labels.count(c), sum(v is c for v in verdicts)
        scores += [2 * hits / (actual + said)] if actual + said else []
    return sum(scores) / len(scores) if scores else None


def balanced_accuracy(labels: list[bool], verdicts: list[bool | None]) -> float | None:
    """The mean of the accuracy on right and on wrong solutions; None unless both occur. A constant judge has 0.5."""
    if len(set(labels)) < 2:
        return None
    recalls = [sum(v is c for l, v in zip(labels, verdicts, strict=True) if l is c) / labels.count(c) for c in (True, False)]
    return sum(recalls) / 2


def first_error(verdicts: list[bool | None]) -> int | None:
    """Index of the first step judged wrong, -1 where all are judged right (ProcessBench); None where missing verdicts leave it open."""
    return next((k for k, v in enumerate(verdicts) if v is False), None if None in verdicts else -1)


def first_error_f1(labels: list[list[bool]], verdicts: list[list[bool | None]]) -> float | None:
    """Harmonic mean of the share of erroneous solutions whose first error is found and the share of correct ones with none claimed
    (ProcessBench); None unless both kinds occur."""
    hits: dict[bool, list[bool]] = {True: [], False: []}
    for l, v in zip(labels, verdicts, strict=True):
        hits[first_error(l) == -1].append(first_error(l) == first_error(v))
    if not hits[True] or not hits[False]:
        return None
    a, b = (sum(h) / len(h) for h in hits.values())
    return 2 * a * b / (a + b) if a + b else 0.0


def judged_row(task, problem, solution, outcome: bool | None, verification) -> list:
    """What judge_scores needs of one verification, as plain values: outcome, gold step labels, final verdict, step verdicts, unmet."""
    return [outcome, task.step_labels(problem, solution.text), verification.verdict, verification.step_verdicts,
            list(verification.unmet)]


def correlation(xs: list[float], ys: list[float]) -> float | None:
    """Pearson's correlation; None where either is constant."""
    return correlate(xs, ys) if len(set(xs)) > 1 and len(set(ys)) > 1 else None


def ranking_reversed(outcomes: list[bool | None], advantages: list[float], num_samples: int) -> list[bool]:
    """Per group that has right and wrong rollouts: whether a wrong one has a larger mean advantage per token than a right one. The outcome reward
    alone never does that; the step reward may, with reason (a lucky answer) or without."""
    reversed_groups = []
    for i in range(0, len(outcomes), num_samples):
        group = list(zip(outcomes[i: i + num_samples], advantages[i: i + num_samples], strict=True))
        right, wrong = ([a for o, a in group if o is kind] for kind in (True, False))
        reversed_groups += [max(wrong) > min(right)] if right and wrong else []
    return reversed_groups


def judge_scores(rows: list[list]) -> dict:
    """A verifier's scores over `judged_row`s. A missing verdict counts as wrong; solutions without an outcome count for steps alone, those whose steps
    have no gold labels for verdicts alone."""
    scored = [(outcome, verdict) for outcome, _, verdict, _, _ in rows if outcome is not None]
    outcomes, said = [o for o, _ in scored], [v for _, v in scored]
    labels = [row[1] for row in rows]
    verdicts = [(row[3] + [None] * len(row[1]))[: len(row[1])] for row in rows]
    known = [i for i, row in enumerate(rows) if row[1] or not row[3]]  # a task without step labels has none where there are steps
    on_wrong = [v for o, v in scored if not o]
    judged = [(sum(said) / len(said), float(o)) for o, _, _, said, unmet in rows
              if o is not None and said and "step_count_mismatch" not in unmet and None not in said]
    return {
        "outcome_f1": macro_f1(outcomes, said),
        "balanced_acc": balanced_accuracy(outcomes, said),
        "step_f1": macro_f1([x for row in labels for x in row], [x for row in verdicts for x in row]),
        "first_error_f1": first_error_f1([labels[i] for i in known], [verdicts[i] for i in known]),
        "parse_fail": sum(bool(row[4]) for row in rows) / max(1, len(rows)),
        "step_count_mismatch": sum("step_count_mismatch" in row[4] for row in rows) / max(1, len(rows)),
        "pred_pos_rate": said.count(True) / max(1, len(said)),
        "label_pos_rate": outcomes.count(True) / max(1, len(outcomes)),
        "pos_rate_wrong": on_wrong.count(True) / len(on_wrong) if on_wrong else None,
        "step_outcome_corr": correlation([x for x, _ in judged], [y for _, y in judged]),
    }


def reward_metrics(rewards: list[float | None], num_samples: int, rollouts, device) -> dict:
    """reward, its spread within groups, the share of groups without signal, and what the completions look like."""
    groups = [[float(r) for r in rewards[i: i + num_samples] if r is not None] for i in range(0, len(rewards), num_samples)]
    num_rollouts = all_reduce(torch.tensor(len(rewards), device=device)).item()
    return {"num_rollouts": num_rollouts} | mean_over_ranks({"reward": rewards, "reward_std": [pstdev(g) for g in groups if g],
                            "frac_reward_zero_std": [len(set(g)) < 2 for g in groups],
                            "completions/mean_length": rollouts.lengths.tolist(),
                            "completions/clipped_ratio": (~rollouts.stopped).tolist()}, device)


class Evaluation:
    """The held-out evaluation of a run. Problems are sharded over ranks, what comes of them is gathered, so every rank has the scores.

    fixed: per split completions of the starting generator, which never change; the verifier's progress is measured on them.
    """

    def __init__(self, sampler, run, num_examples: int, num_samples: int):
        self.sampler, self.run, self.task, self.num_samples = sampler, run, sampler.task, num_samples
        self.splits = {name: problems_of(self.task, name, num_examples) for name in ("test_in", "test_out")}  # a finite task may have no test_out

    def _shard(self, items: list) -> list:
        return items[self.run.rank:: self.run.world]

    def _gather(self, items: list) -> list:
        """What each rank made of its shard, back in the order of the whole."""
        self.run.check_stop()
        items = [[i * self.run.world + self.run.rank, item] for i, item in enumerate(items)]
        return [item for _, item in sorted(gather_lists(items, self.run.device), key=lambda pair: pair[0])]

    def sampled_solutions(self, generator, split: str, stream: tuple) -> list[list[int]]:
        """One sampled completion of each problem of a split, as token ids."""
        rollouts, _ = self.sampler.solve(generator, self._shard(self.splits[split]), 1, stream)
        return self._gather(rollouts.completions())

    def generator_scores(self, generator) -> dict:
        """Greedy pass@1 on both splits, None for one without problems."""
        scores = {}
        for split, name in (("test_in", "gen/pass1_in"), ("test_out", "gen/pass1_out")):
            problems = self._shard(self.splits[split])
            _, solutions = self.sampler.solve(generator, problems, 1, ("eval",), greedy=True)
            right = self._gather(outcomes_of(self.task, problems, solutions))
            scores[name] = sum(r is True for r in right) / len(right) if right else None
        return scores

    def sampled_scores(self, generator, num_problems: int) -> dict:
        """pass@1, pass@k, maj@k over k sampled solutions, and how many groups carry no signal; the health of RL's starting point."""
        problems, k = self._shard(self.splits["test_in"][:num_problems]), self.num_samples
        rollouts, solutions = self.sampler.solve(generator, problems, k, ("health",))
        repeated = [p for p in problems for _ in range(k)]
        right = [r is True for r in outcomes_of(self.task, repeated, solutions)]
        rows = []
        for i in range(0, len(right), k):
            answers = answers_of(self.task, solutions[i: i + k])
            vote = majority(answers)
            rows.append([sum(right[i: i + k]), vote is not None and right[i + answers.index(vote)], int(rollouts.stopped[i: i + k].sum())])
        rows = self._gather(rows)
        n = len(rows)
        return {"pass@1": sum(c for c, _, _ in rows) / (n * k), f"pass@{k}": sum(pass_at_k(k, c, k) for c, _, _ in rows) / n,
                f"maj@{k}": sum(m for _, m, _ in rows) / n, "frac_reward_zero_std": sum(c in (0, k) for c, _, _ in rows) / n,
                "end_token_rate": sum(s for _, _, s in rows) / (n * k)}

    def fixed_solutions(self, generator) -> dict[str, list[list[int]]]:
        """One sampled completion of each problem of both splits."""
        return {split: self.sampled_solutions(generator, split, ("fixed",)) for split in self.splits}

    def verifier_scores(self, verifier, split: str, completions: list[list[int]]) -> dict:
        """Greedy verifications of given completions of a split's problems."""
        problems, completions = self._shard(self.splits[split]), self._shard(completions)
        solutions = [read_solution(self.sampler.tokenizer, self.task.fmt, tokens) for tokens in completions]
        _, verifications = self.sampler.verify(verifier, problems, solutions, 1, ("eval",), greedy=True)
        outcomes = outcomes_of(self.task, problems, solutions)
        return judge_scores(self._gather([judged_row(self.task, *row) for row in zip(problems, solutions, outcomes, verifications, strict=True)]))

    def __call__(self, roles: dict, fixed: dict[str, list[list[int]]]) -> dict:
        """All scores that a run reports, by their names in the log: gen/pass1_{in,out} and ver/<score>_{fixed,fixed_out,current}; the verifier's are
        left out when there is none. current: on solutions that the present generator samples in distribution."""
        generator = roles["generator"].model
        scores = self.generator_scores(generator)
        if "verifier" not in roles:
            return scores
        current = self.sampled_solutions(generator, "test_in", ("current",))
        for kind, split, completions in (("fixed", "test_in", fixed["test_in"]), ("fixed_out", "test_out", fixed["test_out"]), ("current", "test_in", current)):
            if self.splits[split]:
                judged = self.verifier_scores(roles["verifier"].model, split, completions)
                scores |= {f"ver/{name}_{kind}": value for name, value in judged.items()}
        return scores
