"""
CORE: accuracy of a base model on in-context learning tasks from local files (DCLM, arXiv 2406.11794), with upstream's
prompts and numbers.

    tasks = load_core(folder)
    accuracies = {task.label: evaluate_core_task(model, tokenizer, task)[0] for task in tasks}
    core_metric([centered(accuracies[task.label], task.baseline) for task in tasks])

An example becomes rows (ids, start): token ids and where in them the continuation starts that is scored, up to their
end. A multiple_choice has a row per choice, a schema one per context with the same continuation, language_modeling a
single one. B rows, T tokens, M scored tokens, C width.
"""
import csv
import io
import os
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.common import BadInput, all_reduce, wide_dtype
from nanochat.engine import pad_prompts
from nanochat.storage.files import json_lines, read_text

# Per kind of task, the fields of an example that are text, and the one that is a list of options, with the index of the
# right one in "gold".
KINDS = {"multiple_choice": (["query"], "choices"), "schema": (["continuation"], "context_options"),
         "language_modeling": (["context", "continuation"], None)}
EXAMPLES_AT_ONCE = 512  # examples in token ids at a time; sorted by length among themselves
LOGIT_ROWS = 1024       # rows of logits at a time


@dataclass
class CoreTask:
    """One task. num_fewshot: solved examples before each question; delimiter: between question and continuation;
    baseline: a guesser's accuracy in percent."""
    label: str
    kind: str
    items: list[dict]
    num_fewshot: int
    delimiter: str
    baseline: float


# Files

def load_core(folder: str) -> list[CoreTask]:
    """The tasks of folder/core.yaml, with folder/eval_data and folder/eval_meta_data.csv. Raises BadInput."""
    import yaml
    path, baselines = os.path.join(folder, "core.yaml"), read_baselines(os.path.join(folder, "eval_meta_data.csv"))
    try:
        tasks = [read_task(folder, entry, baselines) for entry in yaml.safe_load(read_text(path))["icl_tasks"]]
        if not tasks or len({task.label for task in tasks}) < len(tasks):
            raise ValueError("icl_tasks are none, or two of them have one label")
    except BadInput:  # of another file
        raise
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: {' '.join(str(error).split())}") from None
    return tasks


def read_baselines(path: str) -> dict[str, float]:
    """Accuracy in percent of a guesser, by task label. Rows of tasks without one are left out."""
    rows = csv.DictReader(io.StringIO(read_text(path)))
    try:
        return {row["Eval Task"]: float(row["Random baseline"] or "nan") for row in rows}
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: line {rows.line_num}: no Eval Task with a Random baseline: {error}") from None


def read_task(folder: str, entry: dict, baselines: dict[str, float]) -> CoreTask:
    """An entry of core.yaml's list, with its examples. Raises KeyError, TypeError or ValueError."""
    label, kind, (shots, *_) = entry["label"], entry["icl_task_type"], entry["num_fewshot"]
    delimiter = entry.get("continuation_delimiter", " ")
    if kind not in list(KINDS) or type(shots) is not int or shots < 0 or not isinstance(delimiter, str):
        raise ValueError(f"{label}: icl_task_type must be one of {', '.join(KINDS)}, num_fewshot a list that starts "
                         f"with a number, continuation_delimiter a text")
    if not 0 <= baselines.get(label, -1) < 100:
        raise ValueError(f"{label}: eval_meta_data.csv has no random baseline from 0 to below 100 for it")
    data = os.path.join(folder, "eval_data", entry["dataset_uri"])
    task = CoreTask(label, kind, read_items(data, kind), shots, delimiter, baselines[label])
    if len(task.items) <= task.num_fewshot:
        raise BadInput(f"{data}: {len(task.items)} examples, {label} needs more than its {task.num_fewshot} shots")
    return task


def read_items(path: str, kind: str) -> list[dict]:
    """The examples of a jsonl file, one a line. Raises BadInput."""
    items = []
    for place, item in json_lines(path):
        try:
            check_item(item, kind)
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{place} is no example: {error}") from None
        items.append(item)
    return items


def check_item(item: dict, kind: str) -> None:
    """Raises KeyError, TypeError or ValueError for what is no example of this kind."""
    texts, options = KINDS[kind]
    is_text = lambda value: isinstance(value, (str, int, float))  # a number is rendered as it prints
    for key in texts:
        if not is_text(item[key]):
            raise ValueError(f"{key!r} is no text")
    if options is None:
        return
    if not isinstance(item[options], list) or not item[options] or not all(map(is_text, item[options])):
        raise ValueError(f"{options!r} is no list of texts")
    if type(item["gold"]) is not int or not 0 <= item["gold"] < len(item[options]):
        raise ValueError(f"'gold' is not the index of one of {len(item[options])} {options}")


# Prompts

def question_and_answer(task: CoreTask, item: dict, option: int | None) -> str:
    """One example as text, with this one of its options."""
    if task.kind == "multiple_choice":
        return f"{item['query']}{task.delimiter}{item['choices'][option]}"
    if task.kind == "schema":
        return f"{item['context_options'][option]}{task.delimiter}{item['continuation']}"
    return f"{str(item['context']).strip()}{task.delimiter}{item['continuation']}"


def shots_of(task: CoreTask, items: list[dict], index: int) -> str:
    """The solved examples that stand before example `index`, drawn from all others by its index."""
    chosen = random.Random(1234 + index).sample(range(len(items) - 1), task.num_fewshot)
    others = [items[i + (i >= index)] for i in chosen]
    return "".join(question_and_answer(task, item, item.get("gold")) + "\n\n" for item in others)


def rows_of(tokenizer, task: CoreTask, items: list[dict], index: int) -> list[tuple[list[int], int]]:
    """The rows (ids, start) of example `index`.

    A choice starts where the rows first differ, so that of a choice which another one continues nothing is left to
    score; the continuation of a schema is what the rows have in common at their ends, as tokens. Raises BadInput where
    the continuation of language_modeling is empty or its first token straddles the context.
    """
    item, shots = items[index], shots_of(task, items, index)
    options = KINDS[task.kind][1]
    texts = [shots + question_and_answer(task, item, option)
             for option in (range(len(item[options])) if options else [None])]
    rows = [[tokenizer.bos, *tokenizer.encode(text)] for text in texts]
    if task.kind == "multiple_choice":
        return [(ids, common_length(rows)) for ids in rows]
    if task.kind == "schema":
        common = common_length([ids[::-1] for ids in rows])
        return [(ids, len(ids) - common or len(ids)) for ids in rows]  # contexts all the same: nothing to score
    before = [tokenizer.bos, *tokenizer.encode(f"{shots}{str(item['context']).strip()}{task.delimiter}".strip())]
    if len(before) >= len(rows[0]) or rows[0][: len(before)] != before:
        raise BadInput(f"{task.label}: the continuation {item['continuation']!r} "
                       f"has no tokens of its own after its context")
    return [(rows[0], len(before))]


def common_length(rows: list[list[int]]) -> int:
    """How many tokens all rows begin with alike."""
    shortest = min(map(len, rows))
    return next((t for t in range(shortest) if len({row[t] for row in rows}) > 1), shortest)


# Evaluation

@torch.no_grad()
def continuation_scores(model, rows: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
    """Per row the mean loss of its continuation's tokens (nan where it has none) and whether each is the likeliest."""
    device = model.lm_head.weight.device
    # (B, T); padding stands after, where no token of the row looks
    ids, _ = pad_prompts([ids for ids, _ in rows], device)
    columns = torch.arange(1, ids.shape[1], device=device)  # of targets
    starts, ends = torch.tensor([[start, len(ids)] for ids, start in rows], device=device).T[:, :, None]  # (B, 1) each
    scored = (starts <= columns) & (columns < ends)  # (B, T-1)
    hidden, targets = model.trunk(ids)[:, :-1][scored], ids[:, 1:][scored]  # (M, C), (M,)
    losses, hits = [], []
    for states, tokens in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        logits = model.head(states)
        losses.append(F.cross_entropy(logits, tokens, reduction="none"))
        hits.append(logits.argmax(dim=-1) == tokens)
    lengths = [len(ids) - start for ids, start in rows]
    parts = zip(torch.cat(losses).cpu().split(lengths), torch.cat(hits).cpu().split(lengths), strict=True)
    return [(loss.mean().item(), bool(hit.all())) for loss, hit in parts]


def is_right(task: CoreTask, item: dict, scores: list[tuple[float, bool]]) -> bool:
    """Whether the model solves an example: the gold option has the least loss, or greedy decoding gives the
    continuation. Of equals the first option counts; one without tokens (nan) is chosen if it is the first and never
    otherwise, as upstream does."""
    if task.kind == "language_modeling":
        return scores[0][1]
    losses = [loss for loss, _ in scores]
    return losses.index(min(losses)) == item["gold"]


def micro_batches(examples: list[tuple[int, list]], max_tokens: int) -> list[list[tuple[int, list]]]:
    """(index, rows) pairs by length, cut into batches of at most max_tokens tokens, padding included."""
    longest = lambda rows: max(len(ids) for ids, _ in rows)
    batches, num_rows = [], 0
    for index, rows in sorted(examples, key=lambda example: longest(example[1])):
        num_rows += len(rows)
        if not batches or num_rows * longest(rows) > max_tokens:
            batches.append([])
            num_rows = len(rows)
        batches[-1].append((index, rows))
    return batches


def evaluate_core_task(model, tokenizer, task: CoreTask, max_examples: int = -1, rank: int = 0, world: int = 1,
                       max_tokens: int = 16384) -> tuple[float, int]:
    """Accuracy of a model on a task, and how many of its examples have a row longer than the model's context.

    max_examples: so many, chosen by a fixed shuffle, shots among them; below 1 all. Ranks take examples in turn and get
    the same result. max_tokens: that go through the model at once. Long rows are not cut. Raises BadInput.
    """
    items = list(task.items)
    random.Random(1337).shuffle(items)
    items = items[:max_examples] if max_examples > 0 else items
    if len(items) <= task.num_fewshot:
        raise BadInput(f"{task.label}: {len(items)} examples are too few for {task.num_fewshot} shots")
    num_right, num_long = 0, 0
    mine = range(rank, len(items), world)
    for first in range(0, len(mine), EXAMPLES_AT_ONCE):
        examples = [(index, rows_of(tokenizer, task, items, index)) for index in mine[first: first + EXAMPLES_AT_ONCE]]
        num_long += sum(any(len(ids) > model.config.sequence_len for ids, _ in rows) for _, rows in examples)
        for batch in micro_batches(examples, max_tokens):
            scores = iter(continuation_scores(model, [row for _, rows in batch for row in rows]))
            num_right += sum(is_right(task, items[index], [next(scores) for _ in rows]) for index, rows in batch)
    device = model.lm_head.weight.device
    num_right, num, num_long = all_reduce(torch.tensor([num_right, len(mine), num_long], dtype=wide_dtype(device),
                                                       device=device)).tolist()
    return num_right / num, int(num_long)


def centered(accuracy: float, baseline_percent: float) -> float:
    """Accuracy on a scale on which a guesser has 0 and a perfect model 1."""
    guess = 0.01 * baseline_percent
    return (accuracy - guess) / (1 - guess)


def core_metric(results: list[float]) -> float:
    """CORE: the mean of the tasks' centered accuracies."""
    return sum(results) / len(results)
