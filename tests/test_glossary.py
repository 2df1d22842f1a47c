"""The glossary dev/metrics.md has what is logged, and what it has is logged; for RL test_recipes.py looks."""
import itertools
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import TASK_FLAGS, parse

from nanochat.rl.credit.rewards import FORMAT_PENALTY, ClassWeights
from nanochat.rl.measure.watched import LENIENT, WATCHED
from nanochat.rl.run.progress import LARGEST_GAP
from scripts import base_train, chat_sft, task_text

ROOT = Path(__file__).resolve().parent.parent


class Entry(NamedTuple):
    """A name of the glossary. pattern: what it is logged as; recipes: those that its table names, empty for all."""
    name: str
    pattern: str
    recipes: tuple[str, ...] = ()


# The first cell of a table's head -> which log its names are of; None: words that other names are made of.
HEADS = {"name": "rl", "after a role's prefix": "rl", "where a score stands": "rl", "in summary.json": "summary",
         "in chat_sft": "chat_sft", "in base_train": "base_train", "role prefix": None, "verifier score": None,
         "watched, after a role's prefix": None}
# In the glossary, and in no run of this file: why
UNSEEN = {**dict.fromkeys(("gen/pass1_lenient_in", "gen/pass1_lenient_out"), "needs a task with numbers"),
          "peak_memory_gb": "needs CUDA", "old_files_left": "needs a file that cannot be removed"}


def tables_of(text: str) -> list[tuple[str, list[str]]]:
    found = []
    for block in re.findall(r"^\|.*\n\|[ :|-]+\|\n(?:\|.*\n?)+", text, re.MULTILINE):
        head, _, *rows = [line.strip("|").split(" | ")[0].strip() for line in block.splitlines()]
        found.append((head, [name for row in rows for name in re.findall("`([^`]+)`", row)]))
    return found


def spelled_out(name: str) -> list[str]:
    parts = [part.split(",") if i % 2 else [part] for i, part in enumerate(re.split(r"\{([^}]*)\}", name))]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def glossary_of(text: str) -> dict[str, list[Entry]]:
    tables, entries = tables_of(text), {}
    words = {head: "|".join(name for h, names in tables if h == head for name in names)
             for head in ("role prefix", "verifier score")}
    for head, names in tables:
        of_recipes = re.fullmatch(r"in recipes? ([\w ]+)", head)
        log = "rl" if of_recipes else HEADS[head]
        for name in itertools.chain(*map(spelled_out, names)) if log else ():
            pattern = re.escape(name).replace(r"\*", "[^/]+")
            if head == "after a role's prefix":
                pattern = f"({words['role prefix']})/{pattern}"
            for score in words["verifier score"].split("|") if "<score>" in name else [""]:
                chosen = tuple(of_recipes[1].split(" and ")) if of_recipes else ()
                entries.setdefault(log, []).append(
                    Entry(name.replace("<score>", score), pattern.replace("<score>", score), chosen))
    return entries


GLOSSARY = glossary_of((ROOT / "dev" / "metrics.md").read_text(encoding="utf-8"))


def unexplained(log: str, logged: dict[str, set[str]]) -> set[str]:
    """Names that runs logged and the glossary has not got. logged: run -> names."""
    names = set().union(*logged.values())
    assert len(names) > 5
    return {name for name in names if not any(re.fullmatch(entry.pattern, name) for entry in GLOSSARY[log])}


def unseen(log: str, logged: dict[str, set[str]]) -> set[str]:
    """Names of the glossary that nothing logged: no recipe that its table names, if it names any."""
    return {entry.name for entry in GLOSSARY[log] if entry.name not in UNSEEN
            and not any(re.fullmatch(entry.pattern, name) for run, names in logged.items()
                        if not entry.recipes or run in entry.recipes for name in names)}


def keys_of(path: Path) -> set[str]:
    return {name for line in path.read_text().splitlines() for name in json.loads(line)}


@pytest.mark.parametrize("log", ["chat_sft", "base_train"])
def test_what_sft_and_pretraining_log_is_in_the_glossary(base, log):
    size = ["--device-type", "cpu", "--depth", "1", "--n-embd", "32", "--n-head", "2", "--model-tag", "one",
            "--save-every", "1"]
    if log == "chat_sft":
        chat_sft.main(parse(chat_sft, ["--role", "generator", "--num-steps", "3", "--sequence-len", "128", *TASK_FLAGS,
                                       *size]))
    else:
        task_text.main(parse(task_text, ["--out", str(base / "text"), "--num-documents", "100"]))
        base_train.main(parse(base_train, ["--data", str(base / "text"), "--num-iterations", "3", "--sequence-len",
                                           "32", "--window-pattern", "L", "--total-batch-size", "64",
                                           "--device-batch-size", "2", "--eval-tokens", "64", *size]))
    folder = "chatsft_checkpoints" if log == "chat_sft" else "base_checkpoints"
    logged = {"one": keys_of(base / folder / "one" / "metrics.jsonl")}
    assert unexplained(log, logged) == unseen(log, logged) == set()


def test_a_name_is_explained_once_with_the_figures_of_the_code():
    for entries in GLOSSARY.values():
        names = [entry.pattern for entry in entries]
        assert not {name for name in names if names.count(name) > 1}
    text = " ".join((ROOT / "dev" / "metrics.md").read_text(encoding="utf-8").split())
    fp32, bf16 = LARGEST_GAP[torch.float32], LARGEST_GAP[torch.bfloat16]
    for words in (f"`gen/wrong_passed` is above {LENIENT} |", f"1, less {FORMAT_PENALTY} for each criterion",
                  f"0 to {ClassWeights().cap:.0f} |", f"above {fp32} in fp32 or {bf16} in bf16"):
        assert words in text
    rows = [f"| `{watched.name}` | {watched.bound} | {watched.warning} |" for watched in WATCHED]
    assert f"| warning | | --- | --- | --- | {' '.join(rows)} ## " in text
