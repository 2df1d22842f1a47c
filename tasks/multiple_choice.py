"""
Multiple-choice sets, ARC and MMLU: what upstream's base and chat models are scored on. They are evaluated, never
trained on, so they are no tasks.

A model reads `choice_prompt(choice)` and is asked for one letter; whoever scores it compares the letters' logits.
"""
import os
import random
from dataclasses import dataclass

from nanochat.common import BadInput
from tasks.tables import FILES, read_file, read_hub, read_rows

RANDOM_BASELINE = 0.25  # accuracy of guessing; nearly every question has four choices


@dataclass(frozen=True)
class Choice:
    """One question: letters[k] names choices[k], `answer` is the letter of the right one."""
    question: str
    letters: tuple[str, ...]
    choices: tuple[str, ...]
    answer: str


def arc_choice(row: dict) -> Choice:
    """ARC: {"question", "choices": {"text": [...], "label": [...]}, "answerKey": a label}."""
    return Choice(row["question"], tuple(row["choices"]["label"]), tuple(row["choices"]["text"]), row["answerKey"])


def mmlu_choice(row: dict) -> Choice:
    """MMLU: {"question", "choices": four texts, "answer": index of the right one}."""
    if row["answer"] not in range(4):
        raise ValueError(f"answer {row['answer']!r}, expected an index from 0 to 3")
    return Choice(row["question"], tuple("ABCD"), tuple(row["choices"]), "ABCD"[row["answer"]])


# name -> the hub's dataset, its configuration and split, the columns needed and the reader of a row
CHOICE_SETS = {
    "ARC-Easy": ("allenai/ai2_arc", "ARC-Easy", "test", ("question", "choices", "answerKey"), arc_choice),
    "ARC-Challenge": ("allenai/ai2_arc", "ARC-Challenge", "test", ("question", "choices", "answerKey"), arc_choice),
    "MMLU": ("cais/mmlu", "all", "test", ("question", "choices", "answer"), mmlu_choice),
}


def checked(choice: Choice) -> Choice:
    """The question. Raises ValueError unless all is text, letters differ, and the answer is one of them."""
    if not all(isinstance(text, str) and text for text in (choice.question, *choice.letters, *choice.choices)):
        raise ValueError("question, letters and choices must be texts that are not empty")
    letters = ", ".join(choice.letters)
    if not len(choice.choices) == len(choice.letters) == len(set(choice.letters)) >= 2:
        raise ValueError(f"{len(choice.choices)} choices and the letters {letters}")
    if choice.answer not in choice.letters:
        raise ValueError(f"the answer {choice.answer!r} is none of {letters}")
    return choice


def load_choices(name: str, data: str = "", max_examples: int = -1) -> list[Choice]:
    """The questions of a set in one fixed random order, the first `max_examples` of it (-1: all). data: a .jsonl, .json
    or .parquet file with the hub's columns, read instead of the hub. The order is random because MMLU's rows are sorted
    by subject. Raises BadInput, for a malformed row with its place."""
    hub, config, split, columns, read = CHOICE_SETS[name]
    where = f"{name}, {data or hub}"
    if data:
        is_table = os.path.splitext(data)[1] in FILES
        if not (is_table and os.path.isfile(data)):
            raise BadInput(f"{where}: {'no such file' if is_table else 'must end in ' + ', '.join(FILES)}")
    rows = read_file(data) if data else read_hub(where, hub, config, split=split)
    choices = read_rows(rows, lambda row: checked(read(row)), columns)
    random.Random(0).shuffle(choices)
    return choices if max_examples < 0 else choices[:max_examples]


def choice_prompt(choice: Choice) -> str:
    """What the model is asked, to the character as upstream asks it. The letter stands after its choice, where small
    models bind it better, and without a space before it, since " A" is another token than the "A" to answer with."""
    listed = "".join(f"- {text}={letter}\n" for letter, text in zip(choice.letters, choice.choices, strict=True))
    return f"Multiple Choice question: {choice.question}\n{listed}\nRespond only with the letter of the correct answer."
