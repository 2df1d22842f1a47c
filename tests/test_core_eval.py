"""CORE: prompts as upstream renders them, scores against one plain forward per row, accuracies known by construction,
files that must be refused."""
import functools
import json
import math
import random

import pytest
import torch

from nanochat import core_eval
from nanochat.common import BadInput
from nanochat.core_eval import (CoreTask, centered, continuation_scores, core_metric, evaluate_core_task, is_right,
                                load_core, micro_batches, rows_of)
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(iter([]), 265)


def tiny_model() -> GPT:
    model = GPT(GPTConfig(64, 265, 2, 2, 1, 32, "SL"))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@torch.no_grad()
def random_model() -> GPT:
    """Large random weights, so that predictions differ from place to place."""
    model, generator = tiny_model(), torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.dim() == 2:
            p.normal_(0, 0.5, generator=generator)
    return model


@torch.no_grad()
def cycle_model() -> GPT:
    """Knows "=abcabcabc..." and nothing else. A fresh model's blocks do nothing: its hidden states are functions of the
    token alone, and the row of the head for "b" is the state of "a"."""
    model = tiny_model()
    a, b, c, equals = model.trunk(torch.tensor([list(b"abc=")]))[0]
    model.lm_head.weight.zero_()
    for token, state in ((b"a", c + equals), (b"b", a), (b"c", b)):
        model.lm_head.weight[token[0]] = state
    return model


MODEL, CYCLE = random_model(), cycle_model()
CHOICE = [{"query": f"q{i}?", "choices": [f"no{i}", f"yes{i}"], "gold": i % 2} for i in range(5)]
SCHEMA = [{"context_options": [f"a{i}?", f"b{i}!"], "continuation": f"end{i}", "gold": i % 2} for i in range(5)]
TEXT = [{"context": f" c{i} \n", "continuation": f"w{i}"} for i in range(5)]


def make_task(kind: str, items: list[dict], num_fewshot: int = 0, delimiter: str = ": ") -> CoreTask:
    return CoreTask("task", kind, items, num_fewshot, delimiter, 0.0)


def texts_of(task: CoreTask, index: int = 0) -> list[tuple[str, str]]:
    """Per row of an example: what is given and what is scored."""
    rows = rows_of(TOKENIZER, task, task.items, index)
    assert all(ids[0] == TOKENIZER.bos for ids, _ in rows)
    return [(TOKENIZER.decode(ids[1:start]), TOKENIZER.decode(ids[start:])) for ids, start in rows]


@pytest.mark.parametrize("task, index, rows", [
    (make_task("multiple_choice", CHOICE, 2), 1,
     [("q4?: no4\n\nq3?: yes3\n\nq1?: ", "no1"), ("q4?: no4\n\nq3?: yes3\n\nq1?: ", "yes1")]),
    (make_task("schema", SCHEMA, 1, ", "), 4, [("a0?, end0\n\na4?", ", end4"), ("a0?, end0\n\nb4!", ", end4")]),
    (make_task("language_modeling", TEXT, 2, "\nA: "), 0,  # its first space is not the context's
     [("c4\nA: w4\n\nc1\nA: w1\n\nc0\nA:", " w0")]),
], ids=["multiple_choice", "schema", "language_modeling"])
def test_shots_and_prompts_are_upstreams(task, index, rows):
    """Written down from upstream's templates and draws: of 5 examples, 1 has the shots 4 and 3 of two, 4 has 0 of one,
    0 has 4 and 1 of two."""
    assert texts_of(task, index) == rows


def test_choices_are_scored_from_where_they_differ():
    item = {"query": "q", "choices": ["one", "only", "on"], "gold": 0}
    assert texts_of(make_task("multiple_choice", [item])) == [("q: on", "e"), ("q: on", "ly"), ("q: on", "")]
    item = {"context_options": ["a", "a"], "continuation": "b", "gold": 1}  # nothing is left to score
    assert texts_of(make_task("schema", [item])) == [("a: b", ""), ("a: b", "")]


@pytest.mark.parametrize("kind, item, rows", [
    ("multiple_choice", {"query": " q\n", "choices": [" a ", "b"], "gold": 0}, [(" q\n", " a "), (" q\n", "b")]),
    ("schema", {"context_options": [" a ", "b\n"], "continuation": " c ", "gold": 0}, [(" a ", " c "), ("b\n", " c ")]),
    ("language_modeling", {"context": "\n a b \n", "continuation": " c "}, [("a b", " c ")]),
    ("language_modeling", {"context": 12, "continuation": 1.5}, [("12", "1.5")]),  # a number as it prints
])
def test_white_space_is_kept_but_around_the_context_of_language_modeling(kind, item, rows):
    assert texts_of(make_task(kind, [item], delimiter="")) == rows


@pytest.mark.parametrize("context, continuation, delimiter", [("a", "", ":"), ("", "b", "\n:"), ("a", "b", "")])
def test_a_continuation_without_tokens_of_its_own_is_refused(context, continuation, delimiter):
    """An empty one; one after a context that is stripped in front too; one that a token joins to its context."""
    merging = Tokenizer.train(iter(["ab ab ab ab ab"]), 266)
    task = make_task("language_modeling", [{"context": context, "continuation": continuation}], delimiter=delimiter)
    with pytest.raises(BadInput, match=f"task: the continuation '{continuation}' has no tokens of its own"):
        evaluate_core_task(MODEL, merging, task)


def plain_score(model, ids: list[int], start: int) -> tuple[float, bool]:
    """Mean loss of ids[start:] and whether each is the likeliest, from one forward of one row, token by token."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids]))[0], dim=-1)
    places = range(start, len(ids))
    return (-sum(logprobs[t - 1, ids[t]].item() for t in places) / len(places),
            all(logprobs[t - 1].argmax().item() == ids[t] for t in places))


def greedy(ids: list[int], num: int) -> list[int]:
    for _ in range(num):
        ids = [*ids, MODEL(torch.tensor([ids]))[0, -1].argmax().item()]
    return ids


def test_scores_are_those_of_one_plain_forward_per_row(monkeypatch):
    monkeypatch.setattr(core_eval, "LOGIT_ROWS", 7)
    rng = random.Random(1)
    rows = [([TOKENIZER.bos, *(rng.randrange(256) for _ in range(length))], rng.randint(1, length))
            for length in (1, 2, 9, 9, 30, 17)]
    rows += [(greedy([TOKENIZER.bos, 65 + i], 4 + i), 2) for i in range(3)]
    rows += [([*rows[-1][0][:-1], 65], 2)]  # likeliest but for the last token
    scores, plain = continuation_scores(MODEL, rows), [plain_score(MODEL, *row) for row in rows]
    assert [loss for loss, _ in scores] == pytest.approx([loss for loss, _ in plain], rel=1e-5)
    assert [hit for _, hit in scores] == [hit for _, hit in plain] == [False] * 6 + [True] * 3 + [False]


def test_the_least_loss_is_chosen_and_a_row_without_continuation_has_none():
    (loss, _), (other, _) = continuation_scores(MODEL, [([256, 65, 66], 3), ([256, 65, 66], 1)])
    assert math.isnan(loss) and other == pytest.approx(plain_score(MODEL, [256, 65, 66], 1)[0], rel=1e-5)
    for losses, chosen in (([2.0, 1.0], 1), ([1.0, 1.0], 0), ([2.0, math.nan, 1.0], 2), ([math.nan, 1.0], 0)):
        for gold in range(len(losses)):
            assert is_right(make_task("schema", []), {"gold": gold}, [(x, True) for x in losses]) == (gold == chosen)


def test_micro_batches_keep_examples_whole_and_within_bounds():
    rng = random.Random(0)
    examples = [(i, [([0] * rng.randint(1, 12), 1) for _ in range(rng.randint(1, 3))]) for i in range(40)]
    for max_tokens in (1, 40, 10 ** 6):
        batches = micro_batches(examples, max_tokens)
        assert sorted(example for batch in batches for example in batch) == examples
        for batch in batches:
            lengths = [len(ids) for _, rows in batch for ids, _ in rows]
            assert len(lengths) * max(lengths) <= max_tokens or len(batch) == 1
        assert len(batches) == {1: 40, 10 ** 6: 1}.get(max_tokens, len(batches))


def known_items(num: int) -> list[dict]:
    """Examples for all kinds, of which CYCLE solves every third: the right choice is "=abc", the context before "bc" is
    "=a"."""
    items = []
    for i in range(num):
        right = int(i % 3 == 0)
        items.append({"query": f"{i}", "choices": ["acb", "abc"], "context_options": ["x=b", "x=a"], "context": f"{i}",
                      "gold": right, "continuation": "abca" if right else ("abcb" if i % 3 == 1 else "bca")})
    return items


@pytest.mark.parametrize("num_fewshot", [0, 2])
@pytest.mark.parametrize("kind", core_eval.KINDS)
def test_accuracy_of_a_model_that_knows_one_thing(kind, num_fewshot):
    items = known_items(12)
    if kind == "schema":
        items = [item | {"continuation": "bc"} for item in items]
    task = make_task(kind, items, num_fewshot, "" if kind == "schema" else "=")
    assert evaluate_core_task(CYCLE, TOKENIZER, task) == (4 / 12, 0)


@functools.cache
def random_task(kind: str) -> tuple[CoreTask, list[bool]]:
    """A task of 14 examples, and which of them MODEL solves in the order of the shuffle, by one forward per row."""
    rng, right = random.Random(3), []
    word = lambda: "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(2, 9)))
    items = [{"query": word(), "choices": ["x" + word(), "y" + word(), "z" + word()],
              "context_options": [word() + "x", word() + "y"],
              "continuation": word(), "gold": rng.randrange(2)} for _ in range(14)]
    task, shuffled = make_task(kind, items, num_fewshot=1), list(items)
    random.Random(1337).shuffle(shuffled)
    for i, item in enumerate(shuffled):
        losses = [plain_score(MODEL, *row)[0] for row in rows_of(TOKENIZER, task, shuffled, i)]
        right.append(losses.index(min(losses)) == item["gold"])
    return task, right


@pytest.mark.parametrize("max_tokens, at_once", [(1, 512), (300, 5)])
@pytest.mark.parametrize("kind", ["multiple_choice", "schema"])
def test_accuracy_is_that_of_one_forward_per_row_however_rows_are_batched(kind, max_tokens, at_once, monkeypatch):
    monkeypatch.setattr(core_eval, "EXAMPLES_AT_ONCE", at_once)
    task, right = random_task(kind)
    assert 0 < sum(right) < 14
    assert evaluate_core_task(MODEL, TOKENIZER, task, max_tokens=max_tokens) == (sum(right) / 14, 0)


def test_the_examples_of_a_cut_task_are_upstreams():
    """Its shuffle puts 7 examples in the order 0 5 3 1 2 6 4; of three, only 0 and 3 are solved. Ranks take them in
    turn: without a process group there is nobody to sum with, and each gives the accuracy of its own share."""
    items = [{"context": "c", "continuation": text} for text in ("abc", "b", "b", "abc", "abc", "b", "abc")]
    task = make_task("language_modeling", items, delimiter="=")
    assert evaluate_core_task(CYCLE, TOKENIZER, task, max_examples=3) == (2 / 3, 0)
    for everything in (-1, 0, 7, 100):
        assert evaluate_core_task(CYCLE, TOKENIZER, task, max_examples=everything) == (4 / 7, 0)
    assert [evaluate_core_task(CYCLE, TOKENIZER, task, rank=rank, world=2)[0] for rank in (0, 1)] == [3 / 4, 1 / 3]
    with pytest.raises(BadInput, match="task: 2 examples are too few for 2 shots"):
        evaluate_core_task(MODEL, TOKENIZER, make_task("schema", SCHEMA, 2), max_examples=2)


def test_examples_longer_than_the_context_are_counted_and_not_cut():
    """The context is 64 tokens: <|bos|>, 59 letters, "=" and "abc" fill it, one letter more does not fit; the answer
    stays the same."""
    items = [{"context": "d" * length, "continuation": "abc"} for length in (59, 60, 200)]
    assert evaluate_core_task(CYCLE, TOKENIZER, make_task("language_modeling", items, delimiter="=")) == (1.0, 2)
    both = [{"query": "d" * 200, "choices": ["ab", "ac"], "gold": 0}]  # both rows are too long, which is one example
    assert evaluate_core_task(CYCLE, TOKENIZER, make_task("multiple_choice", both, delimiter="=")) == (1.0, 1)


def test_core_by_hand():
    """Guessing one of four: 25% is 0, 62.5% is half of the way, 0% is -1/3. Mean (0 + 1/2 - 1/3) / 3 = 1/18."""
    results = [centered(0.25, 25), centered(0.625, 25), centered(0.0, 25)]
    assert results == pytest.approx([0, 1 / 2, -1 / 3], rel=1e-12)
    assert core_metric(results) == pytest.approx(1 / 18, rel=1e-12)
    assert centered(0.3, 0) == 0.3 and centered(1.0, 50) == 1.0


YAML = """
icl_tasks:
- {label: choice, icl_task_type: multiple_choice, dataset_uri: a/choice.jsonl, num_fewshot: [2], continuation_delimiter: "\\nAnswer: "}
- {label: schema, icl_task_type: schema, dataset_uri: schema.jsonl, num_fewshot: [0]}
- {label: text, icl_task_type: language_modeling, dataset_uri: text.jsonl, num_fewshot: [1], has_categories: true}
"""  # noqa: E501
CSV = "Eval Task,Task Category,Random baseline\nchoice,x,25.0\nother,x,\nschema,y,50\ntext,z,0\n"


def write_core(folder, **files) -> str:
    """A well-formed folder, with these files instead: yaml, csv, and choice, schema, text, the examples. None: no such
    file."""
    lines = {name: "".join(json.dumps(item) + "\n" for item in items)
             for name, items in (("choice", CHOICE), ("schema", SCHEMA), ("text", TEXT))}
    contents = {"yaml": YAML, "csv": CSV} | lines | files
    paths = {"yaml": "core.yaml", "csv": "eval_meta_data.csv", "choice": "eval_data/a/choice.jsonl"}
    for name, content in contents.items():
        path = folder / paths.get(name, f"eval_data/{name}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def test_a_well_formed_folder(tmp_path):
    """The last line may lack its end, and lines may end as on Windows."""
    assert load_core(write_core(tmp_path)) == [CoreTask("choice", "multiple_choice", CHOICE, 2, "\nAnswer: ", 25.0),
                                               CoreTask("schema", "schema", SCHEMA, 0, " ", 50.0),
                                               CoreTask("text", "language_modeling", TEXT, 1, " ", 0.0)]
    assert load_core(write_core(tmp_path, text='{"context": "a\u2028b", "continuation": "c"}\r\n'
                                               '{"context": "d", "continuation": "e"}'))[2].items == [
        {"context": "a\u2028b", "continuation": "c"}, {"context": "d", "continuation": "e"}]


def entry(text: str) -> str:
    """core.yaml with one task of these fields."""
    return "icl_tasks: [{" + text + "}]"


GOOD_LINE = '{"query": "q", "choices": ["a", "b"], "gold": 0}\n'
MALFORMED = {  # a file of the folder -> contents, None where it is absent, and what the line says
    "yaml": [
        (None, "core.yaml: No such file"), ("a: [\n1", "core.yaml: while parsing"), ("- 1", "core.yaml: "),
        ("", "core.yaml: "), ("icl_tasks: []", "core.yaml: icl_tasks are none"), (b"\xff", "core.yaml: is no text"),
        ("icl_tasks: [1]", "core.yaml: "), (entry("label: text"), "core.yaml: 'icl_task_type'"),
        (YAML.replace("schema, icl", "text, icl"), "core.yaml: .* two of them have one label"),
        (YAML.replace("dataset_uri: schema.jsonl", "dataset_uri: 3"), "core.yaml: "),
        (YAML.replace('"\\nAnswer: "', "3"), "core.yaml: choice: .* continuation_delimiter a text"),
        *((YAML.replace("type: schema", f"type: {kind}"), "core.yaml: schema: icl_task_type must be one of multiple_ch")
          for kind in ("sums", "[1]")),
        *((YAML.replace("[1]", shots), "core.yaml: ") for shots in ("1", "[-1]", "[]", "[true]"))],
    "csv": [
        (None, "eval_meta_data.csv: No such file"), ("", "choice: eval_meta_data.csv has no random baseline"),
        ("Eval Task,b\nx,1\n", "csv: line 2: .*'Random baseline'"), (CSV.replace("50", "100"), "no random baseline"),
        (CSV.replace("50", "half"), "csv: line 4: .* 'half'"), (CSV.replace("50", ""), "schema: .* no random baseline"),
        (CSV.replace("text,z,0\n", ""), "text: .* no random baseline")],
    "text": [
        (None, "text.jsonl: No such file"), ("", "text.jsonl: 0 examples, text needs more than its 1 shots"),
        ('{"context": "c"}', "text.jsonl: line 1 is no example: 'continuation'")],
    "schema": [('{"continuation": "c"}', "'context_options'")],
    "choice": [
        (GOOD_LINE + "{\n", "line 2: is no json"), ("[" * 10 ** 5, "choice.jsonl: line 1: "),
        ("[]", "line 1 is no example"),
        (GOOD_LINE * 2, "choice.jsonl: 2 examples, choice needs more than its 2 shots"),
        (GOOD_LINE + '{"query": null}', "line 2 is no example: 'query' is no text"), ('{"query": "q"}', "'choices'"),
        *((f'{{"query": "q", "choices": {choices}}}', "no list of texts") for choices in ("[]", '[["a"]]', '"ab"')),
        *((GOOD_LINE.replace("0", gold), "line 1 .*: 'gold' is not the index of one of 2 choices")
          for gold in ("2", "-1", '"0"', "0.0", "true", "null"))],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_folder_is_refused_in_one_line(name, tmp_path):
    for k, (content, complaint) in enumerate(MALFORMED[name]):
        with pytest.raises(BadInput, match=complaint) as refusal:
            load_core(write_core(tmp_path / str(k), **{name: content}))
        assert "\n" not in str(refusal.value)
