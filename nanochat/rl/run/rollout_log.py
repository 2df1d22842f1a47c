"""
Rollouts as rollouts.jsonl keeps them, and held-out solutions as examples.jsonl does.
"""
import codecs

from nanochat.rl.measure.evals import NUM_EXAMPLES
from nanochat.rl.play.play import Play, Update
from nanochat.rl.records.outcomes import labels_of
from nanochat.rl.records.prompts import Solution, read_solution
from nanochat.rl.records.rollouts import Rollouts
from tasks.common import Problem


def rollout_records(t: Play, update: Update) -> list[dict]:
    """All rollouts of the first --log-rollouts problems of each part of an update, for rollouts.jsonl.

    call: the name of its draw, "" of a given text. problem, gold: the problem and its answer; solution: what the
    rollout is, or what its prompt quotes, and then completion is what was written after it. step_spans: characters
    [start, end) of the solution's steps; step_ends: their last tokens, where the solution is the rollout; step_labels:
    gold. token_ends: where each token of the rollout ends in its text, in characters; advantages: of each token. Beside
    these the recipe's columns.
    """
    records = []
    for rollouts, advantages in update.parts:
        for n in of_first_problems(rollouts, t.args.log_rollouts):
            prompt = rollouts.prompts[int(rollouts.group_id[n])]
            tokens = rollouts.tokens[n, : rollouts.lengths[n]].tolist()
            solution = prompt.solution or read_solution(t.tokenizer, t.task.fmt, tokens)
            is_quoted = prompt.solution is not None and "verification" not in rollouts.columns
            records.append({
                "role": update.role, "call": rollouts.draws[n] if rollouts.draws else "",
                **solution_record(t, prompt.problem, solution, bool(rollouts.stopped[n])),
                "token_ends": token_ends(t.tokenizer, tokens),
                "advantages": [round(a, 4) for a in advantages[n, : rollouts.lengths[n]].tolist()],
                **({"completion": rollouts.texts[n]} if is_quoted else {}),
                **{name: values[n] for name, values in rollouts.columns.items()}})
    return records


def example_records(t: Play) -> list[dict]:
    """The held-out solutions that the last evaluation kept, over all ranks: as `rollout_records`, without what is of an
    update. [] for a recipe whose evaluation keeps none."""
    if t.examples is None:
        return []
    kept, rows = t.examples, []
    for n, (problem, solution) in enumerate(zip(kept.problems(), t.read_solutions(kept), strict=True)):
        rows.append({**solution_record(t, problem, solution, bool(kept.stopped[n])), "advantages": [],
                     **{name: values[n] for name, values in kept.columns.items()}})
    return t.gather(rows)[:NUM_EXAMPLES]


def solution_record(t: Play, problem: Problem, solution: Solution, stopped: bool) -> dict:
    """What is kept of every solution."""
    return {"problem": problem.prompt, "gold": problem.answer, "solution": solution.text, "outcome": None,
            "step_labels": labels_of(t.task, problem, solution.text),
            "step_spans": t.task.fmt.step_spans(solution.text), "step_ends": solution.step_ends,
            "finish_reason": "stop" if stopped else "length"}


def of_first_problems(rollouts: Rollouts, most: int) -> list[int]:
    """The rollouts about the first `most` problems."""
    names = [(problem.split, problem.index) for problem in rollouts.problems()]
    first = set(list(dict.fromkeys(names))[:most])
    return [n for n, name in enumerate(names) if name in first]


def token_ends(tokenizer, tokens: list[int]) -> list[int]:
    """Where each token ends in the text that the tokens decode to, in characters. A character is in the token that
    completes it; a token that ends the completion has no text."""
    decoder, ends = codecs.getincrementaldecoder("utf-8")("replace"), []
    for i, token in enumerate(tokens):
        is_end = i == len(tokens) - 1 and token in tokenizer.stop_tokens
        text = decoder.decode(b"" if is_end else tokenizer.token_bytes(token), final=i == len(tokens) - 1)
        ends.append((ends[-1] if ends else 0) + len(text))
    return ends
