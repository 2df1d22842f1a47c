"""
The process in which nanochat.hf.chat_template parses and renders (a program of nanochat.workers):

    {"source": s} -> {"strings": the constants of the template}
    {"source": s, "variables": v, "messages": m, "generate": g} -> {"text": t}
    either, of a template that cannot do it -> {"error": what it says}

It ends by the kernel's timer when a request takes too long, and where the memory does not do.
"""
import json
import os
import resource
import signal
import sys
from datetime import date
from functools import lru_cache

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: nanochat/hf/files.py is nobody's module `files`

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

TIMEOUT = 10.0       # seconds of processor time for one request: a machine that is busy with others does not count
MEMORY = 1 << 30     # bytes of address space
TODAY = date(2024, 7, 26)  # which Llama's templates take where they are not told
LONGEST = 10 ** 7    # characters of a rendered conversation
TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError,
                   TypeError, ValueError)


class Refused(Exception):
    """The template called raise_exception."""


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


def refuse(message) -> None:
    raise Refused(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, with what transformers offers a template. The day is always the same, so that a run which goes on
    tomorrow has the prompts that it began with."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    now = lambda format: TODAY.strftime(format)
    env.globals |= {"raise_exception": refuse, "strftime_now": now, "namespace": Namespace}
    return env


@lru_cache(maxsize=8)
def compiled(source: str) -> tuple[jinja2.Template, list[str]]:
    """The template, and the texts among its constants."""
    env = environment()
    template = env.from_string(source)
    constants = env.parse(source).find_all(jinja2.nodes.Const)
    return template, [node.value for node in constants if isinstance(node.value, str)]


def reply(source: str, messages: list[dict] | None = None, variables: dict | None = None,
          generate: bool = False) -> dict:
    """The reply to a request."""
    try:
        template, strings = compiled(source)
    except TEMPLATE_ERRORS as error:
        return {"error": f"the chat template is broken: {error}"}
    if messages is None:
        return {"strings": strings}
    try:
        text = template.render(**variables, messages=messages, tools=None, documents=None,
                               add_generation_prompt=generate)
    except Refused as error:
        return {"error": f"the chat template refuses: {error}"}
    except TEMPLATE_ERRORS as error:
        return {"error": f"the chat template fails: {error}"}
    if len(text) > LONGEST:
        return {"error": f"the chat template writes {len(text)} characters, and {LONGEST} are the most"}
    return {"text": text}


def main(memory: int, seconds: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a graceful stop of the trainer still renders what it has
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    replies = os.fdopen(os.dup(1), "w")
    print("ready", file=replies, flush=True)
    for standard in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), standard)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, whatever this does meanwhile
        answer = json.dumps(reply(**json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, file=replies, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
