"""
A tokenizer of the Hugging Face kind (tokenizer.json and its chat template) behind the interface of nanochat.tokenizer.

Text of a message never becomes a control token, whatever it holds. Inside, the control tokens have random names: only what the chat template itself
writes is given these names before encoding, so "<|im_end|>" in a message is text like any other.
"""
import json
import os
import re
from bisect import bisect_right
from datetime import datetime
from itertools import chain
from secrets import token_hex

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from nanochat.common import BadInput
from nanochat.tokenizer import Tokenizer

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
# Base models have no template: texts joined by blank lines, a completion ends with eos.
NO_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}" \
              "{% if m.role != 'assistant' or not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
# The GPT-2 alphabet, which writes a byte as one character: printable Latin-1 as itself, the other bytes from U+0100 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(b): b for b in PRINTABLE} | {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in PRINTABLE)}
PROBE = "probe-4711"
MARKS = range(0x100000, 0x10FFFE)  # private use plane 16: fences; plane 15 holds the control tokens' inner names
TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError, TypeError, ValueError)


# Chat templates

class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks for a trainer's mask, which is found in another way here."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Namespace(jinja2.utils.Namespace):
    """jinja's namespace without names like __html__, which python itself would call outside of the sandbox."""

    def __init__(*args, **kwargs):
        self, *args = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        jinja2.utils.Namespace.__setitem__(self, name, value)


def refuse(message) -> None:
    raise BadInput(f"the chat template refuses: {one_line(message)}")


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def one_line(message) -> str:
    return " ".join(str(message).split())


class ChatTemplate:
    """A compiled chat template, with what transformers offers one.

    The sandbox refuses attributes that lead out of a template and ranges above 100,000. It bounds neither time nor memory: nested loops or
    "x" * 10 ** 10 hang the process or fill it, so a template from a stranger is to be read before it is run.
    """

    def __init__(self, source: str, path: str, variables: dict[str, str]):
        self.source, self.path, self.variables = source, path, variables
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        env.filters["tojson"] = tojson
        env.globals |= {"raise_exception": refuse, "strftime_now": lambda format: datetime.now().strftime(format), "namespace": Namespace,
                        "dict": lambda *args, **kwargs: dict(*args, **kwargs)}
        try:
            self.compiled = env.from_string(source)
            self.strings = {node.value for node in env.parse(source).find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        except TEMPLATE_ERRORS as error:
            raise BadInput(f"{path}: the chat template is broken: {one_line(error)}") from None

    def render(self, messages: list[dict], generate: bool) -> str:
        """The text of a conversation, with the beginning of an assistant's turn if `generate`. Raises BadInput where the template fails or refuses."""
        copies = [dict(message) for message in messages]
        try:
            return self.compiled.render(**self.variables, messages=copies, tools=None, documents=None, add_generation_prompt=generate)
        except BadInput as error:
            raise BadInput(f"{self.path}: {error}") from None
        except TEMPLATE_ERRORS as error:
            raise BadInput(f"{self.path}: the chat template fails: {one_line(error)}") from None


class Fence:
    """Makes copies of messages out of which no control token can arise, also not together with what the template writes around them.

    A mark stands around every character but whitespace (templates trim it) and but the strings that the template looks for, such as "</think>".
    Of those, only such as can share no character with a control token are left whole.
    """

    def __init__(self, controls: set[str], strings: set[str]):
        beginnings = {name[:n] for name in controls for n in range(1, len(name))}
        endings = {name[n:] for name in controls for n in range(1, len(name))}
        inside = "\0".join(controls)

        def apart(string: str) -> bool:
            parts = range(1, len(string))
            return not (string in inside or any(name in string for name in controls)
                        or any(string[n:] in beginnings or string[:n] in endings for n in parts))

        whole = sorted((s for s in strings if len(s) > 1 and apart(s)), key=len, reverse=True)
        self.whole = re.compile(f"({'|'.join(map(re.escape, whole)) or '(?!)'})")

    def text(self, text: str, mark: str) -> str:
        fenced = lambda match: mark + mark.join(match[0]) + mark
        return "".join(part if i % 2 else re.sub(r"\S+", fenced, part) for i, part in enumerate(self.whole.split(text)))


def plain_messages(messages: list[dict]) -> list[dict]:
    """Roles and texts of a conversation; an assistant's parts are joined. Raises ValueError for a wrong order, BadInput for parts that are no text."""
    if not messages:
        raise ValueError("a conversation without messages")
    first = int(messages[0]["role"] == "system")
    if first and (len(messages) < 2 or messages[1]["role"] != "user"):
        raise ValueError("a system message must be followed by a user turn")
    texts = []
    for i, message in enumerate(messages):
        role = "system" if i < first else ("user", "assistant")[(i - first) % 2]
        if message["role"] != role:
            raise ValueError(f"message {i} is from {message['role']}, expected {role}")
        content = message["content"]
        if role == "assistant" and not isinstance(content, str):
            for part in content:
                if part["type"] != "text":
                    raise BadInput(f"message {i} has a part of type {part['type']!r}: with an imported tokenizer there is only text")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ValueError(f"message {i} is a {role}'s and no text")
        texts.append({"role": role, "content": content})
    return texts


# Files

def read_files(folder: str) -> dict[str, bytes]:
    """The files of a tokenizer that `folder` holds, by name. Raises BadInput for one that cannot be read, or without tokenizer.json."""
    files = {}
    for name in FILES:
        # As in transformers, config.json is asked for eos and bos only where there is no generation_config.json.
        if os.path.exists(os.path.join(folder, name)) and not (name == "config.json" and "generation_config.json" in files):
            try:
                with open(os.path.join(folder, name), "rb") as f:
                    files[name] = f.read()
            except OSError as error:
                raise BadInput(f"{os.path.join(folder, name)}: {error.strerror}") from None
    if "tokenizer.json" not in files:
        raise BadInput(f"no tokenizer at {os.path.join(folder, 'tokenizer.json')}")
    return files


def parse_text(path: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is no text in UTF-8: {one_line(error)}") from None


def parse_json(path: str, content: bytes) -> dict:
    """The object of a json file. Raises BadInput."""
    try:
        parsed = json.loads(parse_text(path, content))
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"{path} is damaged: {one_line(error)}") from None
    if not isinstance(parsed, dict):
        raise BadInput(f"{path}: expected an object, found {type(parsed).__name__}")
    return parsed


def parse_tokenizer(path: str, content: bytes) -> tuple[tokenizers.Tokenizer, dict, bool]:
    """The tokenizer of a tokenizer.json, its settings as the library writes them, and whether tokens are in the alphabet of bytes or else hold
    U+2581 for a space. Raises BadInput, also for a third kind."""
    content = parse_text(path, content)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing more exact
        raise BadInput(f"{path} is not a tokenizer: {one_line(error)}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    settings = json.loads(tokenizer.to_str())
    model, steps = settings["model"], json.dumps([settings[name] for name in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
    byte_level = '"ByteLevel"' in steps
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model["type"] != "BPE" or affixes or not byte_level and "\u2581" not in steps:
        raise BadInput(f"{path}: a {model['type']} tokenizer of another kind than byte-level BPE or BPE with U+2581 for a space")
    return tokenizer, settings, byte_level


def token_text(token) -> str | None:
    """The text of a special token in tokenizer_config.json: a string or an object with `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def chat_template_of(path: str, config: dict) -> str | None:
    """The chat template of a tokenizer_config.json, or None. Of several with names, the default one. Raises BadInput."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if "default" not in named:
            raise BadInput(f"{path}: of the chat templates {', '.join(map(str, named))} none is named default")
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise BadInput(f"{path}: chat_template is {type(template).__name__}, not text")
    return template


def token_ids(path: str, value, tokens: dict[int, str]) -> list[int]:
    """The ids of an eos_token_id or bos_token_id: a number, a list or nothing. Raises BadInput for what is no token's."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    wrong = [i for i in ids if type(i) is not int or i not in tokens]
    if wrong:
        raise BadInput(f"{path}: {wrong[0]!r} is no token's id")
    return ids


# The tokenizer

def any_of(texts) -> re.Pattern:
    """Finds the longest of these texts at the leftmost place, as the library does."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def renamed(path: str, settings: dict, inner: dict[str, str]) -> tokenizers.Tokenizer:
    """The tokenizer with other names for some added tokens, ids unchanged: it no longer finds the old names in any text. Raises BadInput."""
    settings = {**json.loads(json.dumps(settings)), "post_processor": None}
    model, ids = settings["model"], {token["content"]: token["id"] for token in settings["added_tokens"]}
    for name in ids.keys() & inner.keys():
        model["vocab"].pop(name, None)
    # The library numbers added tokens by itself unless the vocabulary holds them.
    model["vocab"] |= {inner.get(name, name): i for name, i in ids.items()}
    model["unk_token"] = inner.get(model["unk_token"], model["unk_token"])
    for token in settings["added_tokens"]:
        token["content"] = inner.get(token["content"], token["content"])
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(settings))
    except Exception as error:  # the library raises nothing more exact
        raise BadInput(f"{path}: a special token is part of the merges: {one_line(error)}") from None
    if any(tokenizer.token_to_id(inner.get(name, name)) != i for name, i in ids.items()):
        raise BadInput(f"{path}: two tokens have one id")
    return tokenizer


class HFTokenizer:
    """A byte pair tokenizer from a folder in the format of Hugging Face, with the interface of nanochat.tokenizer.Tokenizer.

    Control tokens are those that its files call special, and those without that name that the template frames turns with. has_template: whether it
    came with a chat template (a base model's prompt is the text and a blank line). eos, bos: ids, bos is None where there is none.
    """

    def __init__(self, files: dict[str, bytes], folder: str):
        self.files, path = files, lambda name: os.path.join(folder, name)
        original, self.settings, self._byte_level = parse_tokenizer(path("tokenizer.json"), files["tokenizer.json"])
        self.ids = original.get_vocab(with_added_tokens=True)  # of every token's text
        self.tokens = {i: text for text, i in self.ids.items()}
        self.vocab_size = max(self.tokens) + 1
        config = parse_json(path("tokenizer_config.json"), files.get("tokenizer_config.json", b"{}"))
        named = {name: text for name in NAMED_TOKENS if (text := token_text(config.get(name)))}
        for name in ("bos_token", "eos_token"):
            if name in named and named[name] not in self.ids:
                raise BadInput(f"{path('tokenizer_config.json')}: {name} is {named[name]!r}, which tokenizer.json lacks")
        where = path("config.json" if "config.json" in files else "generation_config.json")
        generation = parse_json(where, files.get(os.path.basename(where), b"{}"))
        eos_ids, bos_ids = (token_ids(where, generation.get(name), self.tokens) for name in ("eos_token_id", "bos_token_id"))
        if "eos_token" not in named and not eos_ids:
            raise BadInput(f"{folder}: no eos_token in tokenizer_config.json and no eos_token_id in {os.path.basename(where)}")
        self.eos = self.ids[named["eos_token"]] if "eos_token" in named else eos_ids[0]
        self.bos = self.ids[named["bos_token"]] if "bos_token" in named else next(iter(bos_ids), None)

        self.template = self._load_template(path, config, named, original)
        special = {*named.values(), self.tokens.get(self.eos), *map(token_text, config.get("additional_special_tokens") or [])}
        special |= {token_text(token) for token in (config.get("added_tokens_decoder") or {}).values() if token.get("special")}
        self._set_controls(path("tokenizer.json"), special & self.ids.keys())
        self.assistant_end = self._find_assistant_end()
        self.stop_tokens = list(dict.fromkeys([*eos_ids, self.eos, self.assistant_end]))

    @classmethod
    def load(cls, folder: str) -> "HFTokenizer":
        """Opens tokenizer.json in `folder`, and beside it, where they exist: tokenizer_config.json, chat_template.jinja, generation_config.json or
        else config.json. Raises BadInput."""
        return cls(read_files(folder), folder)

    def save(self, folder: str) -> None:
        """Writes the files that it was read from into `folder`, byte for byte. Raises BadInput where another tokenizer's would change their meaning."""
        os.makedirs(folder, exist_ok=True)
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            if name not in self.files and os.path.exists(os.path.join(folder, name)):
                raise BadInput(f"{os.path.join(folder, name)} is of another tokenizer: move it away")
        for name, content in self.files.items():
            with open(os.path.join(folder, name + ".tmp"), "wb") as f:
                f.write(content)
            os.replace(os.path.join(folder, name + ".tmp"), os.path.join(folder, name))

    def _load_template(self, path, config: dict, named: dict, original: tokenizers.Tokenizer) -> ChatTemplate:
        in_config = "chat_template.jinja" not in self.files
        where = path("tokenizer_config.json" if in_config else "chat_template.jinja")
        source = chat_template_of(where, config) if in_config else parse_text(where, self.files["chat_template.jinja"])
        self.has_template = source is not None
        if self.has_template:
            return ChatTemplate(source, where, named)
        adds_bos = self.bos is not None and config.get("add_bos_token", self.bos in original.encode("").ids)
        return ChatTemplate(NO_TEMPLATE, where, {"bos_token": self.tokens[self.bos] if adds_bos else "", "eos_token": self.tokens[self.eos]})

    def _set_controls(self, path: str, special: set[str]) -> None:
        added = {token["content"]: token for token in self.settings["added_tokens"]}
        plain = {"id": 0, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        self.settings["added_tokens"] += [{**plain, "id": self.ids[name], "content": name} for name in special - added.keys()]
        added |= {token["content"]: token for token in self.settings["added_tokens"]}
        self._added = any_of(added)
        special |= {name for name, token in added.items() if token["special"]}
        special |= set(self._added.findall(self._frame()))
        short = [name for name in special if len(name) == 1]
        if short:
            raise BadInput(f"{path}: the special token {short[0]!r} is one character, which no text could hold as text")
        # Random: no text can hold them. Behind each other they cannot be confused, all have one length.
        self._inner = {name: f"\U000f0000{token_hex(8)}{i:06x}\U000f0001" for i, name in enumerate(sorted(special))}
        self._inner_ids = {inner: self.ids[name] for name, inner in self._inner.items()}
        self._inner_name = any_of(self._inner.values())
        self._controls = set(self._inner_ids.values())
        self._fence = Fence(special, self.template.strings)
        self._tokenizer = renamed(path, self.settings, self._inner)
        self._added_ids = {self.ids[name] for name in added}

    def _frame(self) -> str:
        """What the template writes around turns: some files do not call these tokens special. What stands before the last answer is left out, as it may
        be <think>, which a model may say."""
        turns = [{"role": role, "content": PROBE} for role in ("user", "assistant", "user")]
        try:
            text = self.template.render(turns, True)
        except BadInput:  # a template for one turn
            text = self.template.render(turns[:1], True)
        return text[: text.rfind(PROBE)]

    def _find_assistant_end(self) -> int:
        """The control token behind what an assistant says, or eos where the template has none."""
        text = self._render([{"role": role, "content": PROBE} for role in ("user", "assistant")], False)
        behind = self._inner_name.match(text[text.rfind(PROBE) + len(PROBE):].lstrip())
        return self._inner_ids[behind[0]] if PROBE in text and behind else self.eos

    def equals(self, other) -> bool:
        """Whether both give every text the same ids. Chat templates may differ."""
        names = ("normalizer", "pre_tokenizer", "model", "added_tokens")
        return isinstance(other, HFTokenizer) and all(self.settings[name] == other.settings[name] for name in names)

    def check_model(self, name: str, model) -> None:
        """Raises BadInput unless a model has an embedding for every token. It may have more: vocabularies are padded."""
        if model.vocab_size < self.vocab_size:
            raise BadInput(f"the {name} has a vocabulary of {model.vocab_size}, the tokenizer one of {self.vocab_size}: it was trained with another")

    def special(self, name: str) -> int:
        """The id of a special or added token. Raises BadInput where there is none."""
        if self.ids.get(name) not in self._added_ids:
            raise BadInput(f"this tokenizer has no {name}")
        return self.ids[name]

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text: no bos, and a special token's name in it is text."""
        return self._tokenizer.encode(scalars(text), add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """encode of each text, in a few threads."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(map(scalars, texts)), add_special_tokens=False)]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token. A control token or an id without a token is "?": inside a completion it is noise, and no mark holds a "?"."""
        if token in self._controls or token not in self.tokens:
            return b"?"
        text = self.tokens[token]
        if token in self._added_ids:
            return text.encode()
        if self._byte_level:
            return bytes(BYTE_OF[c] for c in text) if all(c in BYTE_OF for c in text) else text.encode()
        if self.settings["model"]["byte_fallback"] and re.fullmatch("<0x[0-9A-F]{2}>", text):
            return bytes.fromhex(text[3:5])
        return text.replace("\u2581", " ").encode()

    def decode(self, ids: list[int]) -> str:
        """Text of ids. Bytes that are not UTF-8 and control tokens become "?", so that text never grows when quoted."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace").replace("\ufffd", "?")

    def render_prompt(self, user: str) -> list[int]:
        """A one-turn conversation up to where the assistant begins."""
        return self.render_chat([{"role": "user", "content": user}])

    def render_chat(self, messages: list[dict]) -> list[int]:
        """A conversation that ends with the user's turn, up to where the assistant begins. Raises as render_conversation does."""
        messages = plain_messages(messages)
        if messages[-1]["role"] != "user":
            raise ValueError(f"the last message is from {messages[-1]['role']}, expected user")
        return self._encode_rendered(self._render(messages, True)).ids

    def render_conversation(self, messages: list[dict], context: int | None) -> tuple[list[int], list[int]]:
        """Token ids of a conversation and the loss mask: 1 on what the assistant says and its end token, 0 on a token that the prompt has a part of.

        messages: {"role": "system"|"user"|"assistant", "content": str} (an assistant's also parts {"type": "text", "text": str}), turns alternating from
        the user's. Raises ValueError for a wrong order; BadInput for a conversation longer than `context` (it never cuts), for one that the template
        refuses, and where the template writes turns otherwise when others follow: what is trained would not be what is sampled.
        """
        messages = plain_messages(messages)
        text = self._render(messages, False)
        encoding = self._encode_rendered(text)
        if context is not None and len(encoding.ids) > context:
            raise BadInput(f"conversation has {len(encoding.ids)} tokens, the context {context}")
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        bounds = list(chain.from_iterable(self._span(messages, i, text) for i in said))
        return encoding.ids, [bisect_right(bounds, start) % 2 for start, _ in encoding.offsets]

    def _span(self, messages: list[dict], i: int, text: str) -> tuple[int, int]:
        """Where in the rendered `text` message i, an assistant's, begins and ends, its end token included. Raises BadInput for a template that rewrites."""
        prompt, turn = self._render(messages[:i], True), self._render(messages[: i + 1], False)
        ends = [match.end() for match in self._inner_name.finditer(turn, len(prompt)) if self._inner_ids[match[0]] == self.assistant_end]
        end = ends[0] if ends else len(turn)
        if not turn.startswith(prompt):
            raise BadInput(f"{self.template.path}: the chat template begins the answer, message {i}, otherwise than when it asks for one")
        if not text.startswith(turn[:end]):
            raise BadInput(f"{self.template.path}: the chat template rewrites message {i} or an earlier one when others follow; give one answer at a time")
        return len(prompt), end

    def _render(self, messages: list[dict], generate: bool) -> str:
        """The rendered conversation, with the inner names of those control tokens that the template wrote."""
        messages = [{**message, "content": scalars(message["content"])} for message in messages]
        used = set("".join(message["content"] for message in messages) + self.template.source)
        mark = next((chr(i) for i in MARKS if chr(i) not in used), None)
        if mark is None:
            raise BadInput("a conversation holds every character of the last private use plane")
        name_inside = lambda text: self._added.sub(lambda match: self._inner.get(match[0], match[0]), text)
        plain = self.template.render(messages, generate)
        fenced = self.template.render([{**m, "content": self._fence.text(m["content"], mark)} for m in messages], generate)
        named = name_inside(fenced)
        if fenced.replace(mark, "") != plain:
            # The template looks at the text in a way that sees the marks (its length, say): without them, if that adds no control token.
            without = name_inside(plain)
            if self._inner_name.findall(without) == self._inner_name.findall(named):
                return without
        return named.replace(mark, "")

    def _encode_rendered(self, text: str) -> tokenizers.Encoding:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        written = [self._inner_ids[name] for name in self._inner_name.findall(text)]
        unknown = self._tokenizer.token_to_id(self.settings["model"]["unk_token"] or "")
        if [i for i in written if i != unknown] != [i for i in encoding.ids if i in self._controls and i != unknown]:
            raise BadInput(f"{self.template.path}: the tokenizer does not find the special tokens of its chat template where that puts them")
        return encoding


def scalars(text: str) -> str:
    """The text with lone surrogates, which are no characters, replaced by U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def load_tokenizer(folder: str) -> Tokenizer | HFTokenizer:
    """The tokenizer in `folder`, of either kind. Raises BadInput when it holds both or none."""
    has = {name: os.path.exists(os.path.join(folder, name)) for name in ("tokenizer.pkl", "tokenizer.json")}
    if all(has.values()):
        raise BadInput(f"{folder} holds two tokenizers, tokenizer.pkl and tokenizer.json: move one away")
    return HFTokenizer.load(folder) if has["tokenizer.json"] else Tokenizer.load(folder)
