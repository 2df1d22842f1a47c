"""
Conversations for SFT beside a task's demonstrations: jsonl files, each line a list of messages or {"messages": [...]},
or a `datasets` name.
"""
import json
import os

from nanochat.common import BadInput
from nanochat.storage.files import look_for_hub, quiet_datasets
from nanochat.tokenizer import PARTS


def check_messages(where: str, messages) -> list[dict]:
    """The messages, if they are a conversation that render_conversation takes and an assistant speaks in. Raises
    BadInput that says where they are not."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("content"), str | list)
                                                 for m in messages):
        raise BadInput(f"{where}: not a list of messages with role and content")
    for number, message in enumerate(messages, 1):
        is_own = message.get("role") == "assistant"
        if isinstance(message["content"], list) and not (is_own and all(map(is_part, message["content"]))):
            raise BadInput(f"{where}: the content of message {number} must be a text"
                           + f", or parts of type {', '.join(PARTS)} with a text" * is_own)
    turns = [m.get("role") for m in messages]
    turns = turns[1:] if turns[:1] == ["system"] else turns
    if len(turns) < 2 or turns != ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]:
        raise BadInput(f"{where}: roles must alternate from a user's to an assistant's, "
                       f"not {', '.join(map(str, turns))}")
    return messages


def is_part(part) -> bool:
    """Whether this can be a part of what an assistant says (Tokenizer.render_parts)."""
    return (isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in PARTS
            and isinstance(part.get("text"), str))


def load_conversations(sources: list[str]) -> list[list[dict]]:
    """All conversations of files and `datasets` names (column messages; owner/name or owner/name:split). A source named
    twice counts twice.

    Raises BadInput that names the file and line.
    """
    conversations = []
    for source in sources:
        conversations += _from_file(source) if os.path.exists(source) else _from_hub(source)
    return conversations


def _from_file(path: str) -> list[list[dict]]:
    conversations = []
    try:
        with open(path, "rb") as f:
            lines = f.read().splitlines()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            raise BadInput(f"{path} line {number}: is no text in UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path} line {number}: no json: {error}") from None
        conversations.append(check_messages(f"{path} line {number}",
                                            row.get("messages") if isinstance(row, dict) else row))
    if not conversations:
        raise BadInput(f"{path}: is empty")
    return conversations


def _from_hub(source: str) -> list[list[dict]]:
    name, _, split = source.partition(":")
    if os.path.splitext(name)[1] in (".json", ".jsonl"):
        raise BadInput(f"{source}: no such file")
    look_for_hub()
    try:
        rows = quiet_datasets().load_dataset(name, split=split or "train")["messages"]
    except Exception as error:  # datasets raises many types for names that are not there
        raise BadInput(f"{source}: no such file, and cannot be loaded as a datasets name: "
                       f"{' '.join(str(error).split())[:200]}") from None
    return [check_messages(f"{source} row {i}", row) for i, row in enumerate(rows)]
