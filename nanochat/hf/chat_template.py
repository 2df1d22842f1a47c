"""
Chat templates in Jinja, run in a sandbox, and the fence that keeps a message's text out of the control tokens.
"""
import json
import re
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from nanochat.common import BadInput

TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError,
                   SyntaxError, TypeError, ValueError)


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks for a trainer's mask, which is found in another way here."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Namespace(jinja2.utils.Namespace):
    """jinja's namespace without names like __html__, which python itself would call outside of the sandbox."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def one_line(message) -> str:
    return " ".join(str(message).split())


def any_of(texts) -> re.Pattern:
    """Finds the longest of these texts at the leftmost place, as the library does."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def refuse(message) -> None:
    raise BadInput(f"the chat template refuses: {one_line(message)}")


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled chat template, with what transformers offers one.

    The sandbox refuses attributes that lead out of a template and ranges above 100,000. It bounds neither time nor
    memory: nested loops or "x" * 10 ** 10 hang the process or fill it, so a template from a stranger is to be read
    before it is run.
    """

    def __init__(self, source: str, path: str, variables: dict[str, str]):
        self.source, self.path, self.variables = source, path, variables
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        env.filters["tojson"] = tojson
        now = lambda format: datetime.now().strftime(format)
        env.globals |= {"raise_exception": refuse, "strftime_now": now, "namespace": Namespace}
        try:
            self.compiled = env.from_string(source)
            constants = env.parse(source).find_all(jinja2.nodes.Const)
            self.strings = {node.value for node in constants if isinstance(node.value, str)}
        except TEMPLATE_ERRORS as error:
            raise BadInput(f"{path}: the chat template is broken: {one_line(error)}") from None

    def render(self, messages: list[dict], generate: bool) -> str:
        """The text of a conversation, with the beginning of an assistant's turn if `generate`. Raises BadInput where
        the template fails or refuses."""
        try:
            return self.compiled.render(**self.variables, messages=messages, tools=None, documents=None,
                                        add_generation_prompt=generate)
        except BadInput as error:
            raise BadInput(f"{self.path}: {error}") from None
        except TEMPLATE_ERRORS as error:
            raise BadInput(f"{self.path}: the chat template fails: {one_line(error)}") from None


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
