"""ARC and MMLU: rows as the hub has them, the text a model is asked, rows that must be refused."""
import json

import pytest

from nanochat.common import BadInput
from tasks.multiple_choice import CHOICE_SETS, Choice, choice_prompt, load_choices

ARC = {"id": "x", "question": "What melts?", "choices": {"text": ["ice", "a stone", "air"], "label": ["A", "B", "C"]},
       "answerKey": "A"}
MMLU = {"question": "2 + 2?", "subject": "elementary_mathematics", "choices": ["1", "2", "3", "4"], "answer": 3}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A folder for what `datasets` makes of files, so that tests leave nothing after."""
    import datasets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


def write(path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_prompt_and_the_sets_are_upstreams():
    """Copied from what upstream's render_mc gives: its models were trained on this text."""
    choice = Choice("What melts?", ("A", "B"), ("ice", "a stone"), "A")
    assert choice_prompt(choice) == (
        "Multiple Choice question: What melts?\n- ice=A\n- a stone=B\n\n"
        "Respond only with the letter of the correct answer.")
    places = {name: "/".join(place[:3]) for name, place in CHOICE_SETS.items()}
    assert places == {"ARC-Easy": "allenai/ai2_arc/ARC-Easy/test",
                      "ARC-Challenge": "allenai/ai2_arc/ARC-Challenge/test", "MMLU": "cais/mmlu/all/test"}


def test_rows_are_read(tmp_path):
    numbered = {**ARC, "choices": {"text": ["wood", "iron"], "label": ["1", "2"]}, "answerKey": "2"}
    choices = load_choices("ARC-Easy", write(tmp_path / "arc.jsonl", [ARC, numbered]))
    assert set(choices) == {Choice("What melts?", ("A", "B", "C"), ("ice", "a stone", "air"), "A"),
                            Choice("What melts?", ("1", "2"), ("wood", "iron"), "2")}
    assert load_choices("MMLU", write(tmp_path / "mmlu.json", [MMLU])) == [
        Choice("2 + 2?", ("A", "B", "C", "D"), ("1", "2", "3", "4"), "D")]


def test_fewer_examples_are_the_first_of_one_random_order(tmp_path):
    path = write(tmp_path / "mmlu.jsonl", [{**MMLU, "question": f"{k}?"} for k in range(50)])
    everything = load_choices("MMLU", path)
    assert sorted(c.question for c in everything) == sorted(f"{k}?" for k in range(50))
    assert (load_choices("MMLU", path, 10) == everything[:10]
            and {c.question for c in everything[:10]} != {f"{k}?" for k in range(10)})
    assert load_choices("MMLU", path, 0) == [] and load_choices("MMLU", path, 99) == everything


@pytest.mark.parametrize("name, row, complaint", [
    ("MMLU", {**MMLU, "answer": 4}, "line 2: answer 4, expected an index from 0 to 3"),
    ("MMLU", {**MMLU, "choices": ["1", "2", "3"]}, "line 2: 3 choices"),
    ("MMLU", {**MMLU, "choices": None}, "line 2: something in it is empty"),
    ("MMLU", {**MMLU, "choices": ["1", "2", "3", ""]}, "line 2: question, letters and choices must be texts"),
    ("MMLU", {**MMLU, "question": None}, "line 2: question, letters and choices must be texts"),
    ("ARC-Challenge", {**ARC, "answerKey": "E"}, "line 2: the answer 'E' is none of A, B, C"),
    ("ARC-Challenge", {**ARC, "choices": {"text": ["a", "b"], "label": ["A"]}}, "line 2: 2 choices and the letters A"),
    ("ARC-Challenge", {**ARC, "choices": {"text": ["a", "b"], "label": ["A", "A"]}},
     "line 2: 2 choices and the letters A, A"),
])
def test_a_malformed_row_is_bad_input_with_its_number(tmp_path, name, row, complaint):
    path = write(tmp_path / "rows.jsonl", [MMLU if name == "MMLU" else ARC, row])
    with pytest.raises(BadInput, match=complaint) as error:
        load_choices(name, path)
    assert str(error.value).startswith(f"{path}: line 2: ") and "\n" not in str(error.value)


def test_files_and_names_that_cannot_be_used_are_bad_input(tmp_path):
    with pytest.raises(BadInput, match="MMLU, nowhere.jsonl: no such file"):
        load_choices("MMLU", "nowhere.jsonl")
    for rows, complaint in (([{"question": "What?"}], "line 1: has no column 'choices', only question"),
                            ([], "is empty"),
                            ([{**ARC, "choices": {"text": ["a", "b"]}}], "line 1: 'label' is missing")):
        with pytest.raises(BadInput, match=f"rows.jsonl: {complaint}"):
            load_choices("ARC-Easy", write(tmp_path / "rows.jsonl", rows))
