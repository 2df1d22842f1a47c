"""
Chat templates in Jinja, run in a sandbox, and the fence that keeps a message's text out of the control tokens.
"""
import contextlib
import json
import os
import re
import subprocess
import sys
import threading

from nanochat.common import BadInput, one_line
from nanochat.hf import template_worker


def any_of(texts) -> re.Pattern:
    """Finds the longest of these texts at the leftmost place, as the library does."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


class Worker:
    """The process that renders (nanochat.hf.template_worker), started when it is first asked and again when it has
    ended. It ends with this one."""

    def __init__(self):
        self.lock, self.process, self.owner = threading.Lock(), None, None

    def ask(self, request: dict) -> dict:
        """The reply to a request; {} where the process ended over it. Raises RuntimeError where none can be started."""
        with self.lock:
            if self.process is None or self.owner != os.getpid():  # a forked child has one of its own
                self.start()
            try:
                self.process.stdin.write(json.dumps(request).encode() + b"\n")
                self.process.stdin.flush()
                line = self.process.stdout.readline()
            except BrokenPipeError:
                line = b""
            except BaseException:  # a reply that nobody read would pass for the next one's
                self.end()
                raise
            if not line.endswith(b"\n"):
                self.end()
                return {}
            return json.loads(line)

    def start(self) -> None:
        """Starts the process. Raises RuntimeError where it cannot be."""
        # A session of its own keeps it out of the signals to the trainer's process group.
        command = [sys.executable, template_worker.__file__, str(template_worker.MEMORY), str(template_worker.SECONDS)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.owner = os.getpid()
        if self.process.stdout.readline() != b"ready\n":
            self.end()
            raise RuntimeError("the process for chat templates did not start; what it wrote to stderr says why")

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # something may be left in it
            self.process.stdin.close()
        self.process = None


WORKER = Worker()


class ChatTemplate:
    """A chat template, with what transformers offers one. The sandbox refuses attributes that lead out of it; it is
    rendered in a process of its own, whose time and memory are bounded."""

    def __init__(self, source: str, path: str, variables: dict[str, str]):
        self.source, self.path, self.variables = source, path, variables
        self.strings = set(self.ask()["strings"])

    def ask(self, **request) -> dict:
        """The worker's reply. Raises BadInput where the template is at fault."""
        reply = WORKER.ask({"source": self.source, **request}) or {
            "error": f"the chat template takes more than {template_worker.SECONDS:.0f} s or "
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
    """Roles and texts of a conversation; an assistant's parts are joined. Raises ValueError for a wrong order, BadInput
    for parts that are no text."""
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
