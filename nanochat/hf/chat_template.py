"""
Chat templates in Jinja, run in a sandbox, and the fence that keeps a message's text out of the control tokens.
"""
import re

from nanochat.common import BadInput, one_line
from nanochat.hf import template_worker
from nanochat.workers import NoReply, Workers


def any_of(texts) -> re.Pattern:
    """Finds the longest of these texts at the leftmost place, as the library does."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


WORKERS = Workers(template_worker)


class ChatTemplate:
    """A chat template, with what transformers offers one. The sandbox refuses attributes that lead out of it; it is
    rendered in a process of its own, whose time and memory are bounded."""

    def __init__(self, source: str, path: str, variables: dict[str, str]):
        self.source, self.path, self.variables = source, path, variables
        self.strings = set(self.ask()["strings"])

    def ask(self, **request) -> dict:
        """The worker's reply. Raises BadInput where the template is at fault."""
        try:
            reply = WORKERS.ask({"source": self.source, **request})
        except NoReply:
            reply = {"error": f"the chat template takes more than {template_worker.TIMEOUT:.0f} s or "
                              f"{template_worker.MEMORY >> 20} MiB"}
        if "error" in reply:
            raise BadInput(f"{self.path}: {one_line(reply['error'])}")
        return reply

    def render(self, messages: list[dict], generate: bool) -> str:
        """The text of a conversation, with the beginning of an assistant's turn if `generate`. Raises BadInput where
        the template fails or refuses, or takes too much time or memory."""
        return self.ask(variables=self.variables, messages=messages, generate=generate)["text"]


class Fence:
    """Copies of texts out of which no control token can arise, also not together with what a template writes around
    them.

    A mark stands around every character but whitespace, which templates trim, and but the strings that the template
    looks for, such as "</think>": those that can share no character with a control token.
    """

    def __init__(self, controls: set[str], strings: set[str]):
        beginnings = {name[:n] for name in controls for n in range(1, len(name))}
        endings = {name[n:] for name in controls for n in range(1, len(name))}
        inside, control = "\0".join(controls), any_of(controls)
        touches = lambda s: any(s[n:] in beginnings or s[:n] in endings for n in range(1, len(s)))
        whole = [s for s in strings if len(s) > 1 and not (s in inside or control.search(s) or touches(s))]
        self.whole = re.compile(f"({any_of(whole).pattern})")

    def text(self, text: str, mark: str) -> str:
        fenced = lambda match: mark + mark.join(match[0]) + mark
        return "".join(part if i % 2 else re.sub(r"\S+", fenced, part) for i, part in enumerate(self.whole.split(text)))


def plain_messages(messages: list[dict]) -> list[dict]:
    """Roles and texts, an assistant's parts joined. Raises ValueError for a wrong order, BadInput for other parts."""
    first = int(bool(messages) and messages[0]["role"] == "system")
    if len(messages) == first:
        raise ValueError("a conversation without a user's turn")
    texts = []
    for i, message in enumerate(messages):
        role = "system" if i < first else ("user", "assistant")[(i - first) % 2]
        if message["role"] != role:
            raise ValueError(f"message {i} is from {message['role']}, expected {role}")
        content = message["content"]
        if role == "assistant" and not isinstance(content, str):
            for part in content:
                if part["type"] != "text":
                    raise BadInput(f"message {i} has a part of type {part['type']!r}: "
                                   f"with an imported tokenizer there is only text")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ValueError(f"message {i} is a {role}'s and no text")
        texts.append({"role": role, "content": content})
    return texts
