"""
Conversations for SFT beside a task's demonstrations: jsonl files, each line a list of messages or {"messages": [...]},
or a `datasets` name.
"""
import os

from nanochat.common import BadInput
from nanochat.storage.files import json_lines, look_for_hub, quiet_datasets, reading
from nanochat.tokenizer import PARTS


def check_messages(messages: list[dict]) -> list[dict]:
    """The messages, if they are a conversation that render_conversation takes and an assistant speaks in. Raises
    ValueError, TypeError and KeyError where they are not."""
    for number, message in enumerate(messages, 1):
        content, is_own = message["content"], message["role"] == "assistant"
        is_parts = is_own and not isinstance(content, str) and all(
            part["type"] in PARTS and isinstance(part["text"], str) for part in content)  # Tokenizer.render_parts
        if not (isinstance(content, str) or is_parts):
            raise ValueError(f"the content of message {number} must be a text"
                             + f", or parts of type {', '.join(PARTS)} with a text" * is_own)
    turns = [message["role"] for message in messages]
    turns = turns[1:] if turns[:1] == ["system"] else turns
    if len(turns) < 2 or turns != ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]:
        raise ValueError(f"roles must alternate from a user's to an assistant's, not {', '.join(map(str, turns))}")
    return messages


def load_conversations(sources: list[str]) -> list[list[dict]]:
    """All conversations of files and `datasets` names (column messages; owner/name or owner/name:split). A source named
    twice counts twice. Raises BadInput that names the file and line."""
    conversations = []
    for source in sources:
        conversations += _from_file(source) if os.path.exists(source) else _from_hub(source)
    return conversations


def _from_file(path: str) -> list[list[dict]]:
    conversations = []
    for place, row in json_lines(path):
        with reading(place):
            conversations.append(check_messages(row["messages"] if isinstance(row, dict) else row))
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
    conversations = []
    for number, row in enumerate(rows, 1):
        with reading(f"{source}: row {number}"):
            conversations.append(check_messages(row))
    return conversations
