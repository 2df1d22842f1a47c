"""
Model cards: Markdown with a head in YAML that the hub reads. What comes from outside stands in code spans and blocks,
from which it cannot get out.
"""
import re

from nanochat.common import one_line, printable

UNKNOWN = "not known: nothing that was imported names it"


def code(text) -> str:
    """Any text as a code span on one line, also in a table."""
    text = one_line(text).replace("|", "\u2502")  # which a table would take for the end of a cell
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`" if text else "(empty)"


def block(text: str) -> list[str]:
    """Any text as the lines of an indented code block, a blank line before it."""
    return ["", *(f"    {line}".rstrip() for line in printable(text).split("\n"))]


def head(origin: dict, tags: list[str]) -> str:
    """The card's head. origin: of the model that training began with (files.origin_of_folder); a licence that is not
    one of the hub's short names is left to the text."""
    from huggingface_hub import ModelCardData
    named = re.fullmatch(r"[a-z0-9][a-z0-9.-]*", origin.get("license", ""))
    licence = {key: value for key, value in origin.items() if key.startswith("license")} if named else {}
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=tags,
                         base_model=origin.get("base_models") or None, **licence)
    return f"---\n{data.to_yaml()}\n---\n"


def licence_text(origin: dict) -> str:
    """The licence of the model that training began with, in words."""
    said = [code(origin[key]) for key in ("license", "license_name", "license_link") if origin.get(key)]
    return ", ".join(said) or UNKNOWN


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table, a blank line before it. Cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return ["", *(f"| {' | '.join(cells)} |" for cells in lines)]
