"""
A tokenizer of the Hugging Face kind (tokenizer.json and its chat template) after the interface of nanochat.tokenizer.

Text of a message never becomes a control token, whatever it holds. Inside, the control tokens have random names: only
what the chat template itself writes is given these names before encoding, so "<|im_end|>" in a message is text like any
other.
"""
import contextlib
import json
import os
import re
import zlib
from bisect import bisect_right
from itertools import chain
from pathlib import Path
from secrets import token_hex

import tokenizers

from nanochat.common import BadInput
from nanochat.hf.chat_template import ChatTemplate, Fence, any_of, plain_messages
from nanochat.storage.files import make_folder, reading, whole_file
from nanochat.tokenizer import Tokenizer

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
# Base models have no template: texts joined by blank lines, a completion ends with eos.
NO_TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m.content }}"
               "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
               "{% if m.role != 'assistant' or not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}")
# The GPT-2 alphabet, which writes a byte as one character: printable Latin-1 as itself, the other bytes from U+0100 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHER = [b for b in range(256) if b not in PRINTABLE]
BYTE_OF = {chr(b): b for b in PRINTABLE} | {chr(256 + n): b for n, b in enumerate(OTHER)}
PROBE = "probe-4711"
# <start_of_turn> or [INST]; other words and newlines that are added tokens stay text.
TAG = re.compile(r"[^\w\s]\S*\w\S*[^\w\s]")
# Private use plane 16, more than a context holds; the control tokens' inner names are of plane 15.
MARKS = [chr(i) for i in range(0x100000, 0x10FFFE)]


# Files

def read_files(folder: str) -> dict[str, bytes]:
    """The files of a folder's tokenizer, by name. Raises BadInput for an unreadable one, or without tokenizer.json."""
    # As in transformers, config.json is asked for eos and bos only where there is no generation_config.json.
    names = [name for name in FILES if os.path.exists(os.path.join(folder, name))]
    if "tokenizer.json" not in names:
        raise BadInput(f"no tokenizer at {os.path.join(folder, 'tokenizer.json')}")
    names = names[:-1] if names[-2:] == ["generation_config.json", "config.json"] else names
    with reading(folder):
        return {name: Path(folder, name).read_bytes() for name in names}


def parse_tokenizer(content: bytes) -> tuple[tokenizers.Tokenizer, dict, bool]:
    """The tokenizer, its settings as the library writes them, whether it has the alphabet of bytes (else U+2581)."""
    tokenizer = library_tokenizer(content.decode(), "is not a tokenizer")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    settings = json.loads(tokenizer.to_str())
    steps = [settings[name] for name in ("normalizer", "pre_tokenizer", "decoder")]
    model, steps = settings["model"], json.dumps(steps, ensure_ascii=False)
    byte_level = '"ByteLevel"' in steps
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model["type"] != "BPE" or affixes or not byte_level and "\u2581" not in steps:
        raise ValueError(f"a {model['type']} tokenizer of another kind than byte-level BPE or BPE with U+2581 for a "
                         f"space")
    return tokenizer, settings, byte_level


def library_tokenizer(content: str, otherwise: str) -> tokenizers.Tokenizer:
    """The library's tokenizer of a tokenizer.json. Raises ValueError, which begins with `otherwise`."""
    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing more exact
        raise ValueError(f"{otherwise}: {error}") from None


def special_tokens(config: dict) -> tuple[dict[str, str], set[str]]:
    """bos_token, eos_token ... of tokenizer_config.json by name, and the texts of all tokens that it calls special."""
    text = lambda token: token["content"] if isinstance(token, dict) else token
    listed = lambda name: list(config[name].values()) if isinstance(config.get(name), dict) else config.get(name) or []
    named = {name: text(config[name]) for name in NAMED_TOKENS if config.get(name)}
    known = [token for token in listed("added_tokens_decoder") if token["special"]]
    known += [*listed("additional_special_tokens"), *listed("extra_special_tokens")]
    return named, {*named.values(), *map(text, known)}


def chat_template_of(config: dict) -> str | None:
    """The chat template of a tokenizer_config.json, or None. Of several with names, the default one."""
    template = config.get("chat_template")
    return {x["name"]: x["template"] for x in template}["default"] if isinstance(template, list) else template


def token_ids(value, tokens: dict[int, str]) -> list[int]:
    """The ids of an eos_token_id: a number, a list or nothing. Raises ValueError for what is no token's."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if wrong := [i for i in ids if type(i) is not int or i not in tokens]:
        raise ValueError(f"{wrong[0]!r} is no token's id")
    return ids


# The tokenizer

def scalars(text: str) -> str:
    """The text with lone surrogates, which are no characters, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def renamed(settings: dict, inner: dict[str, str]) -> tokenizers.Tokenizer:
    """The tokenizer with other names for some added tokens, ids unchanged: it no longer finds the old names in any
    text. Raises ValueError."""
    settings = {**json.loads(json.dumps(settings)), "post_processor": None}
    model, ids = settings["model"], {token["content"]: token["id"] for token in settings["added_tokens"]}
    # The library numbers added tokens by itself unless the vocabulary holds them.
    unchanged = {text: i for text, i in model["vocab"].items() if text not in inner}
    model["vocab"] = unchanged | {inner.get(name, name): i for name, i in ids.items()}
    model["unk_token"] = inner.get(model["unk_token"], model["unk_token"])
    for token in settings["added_tokens"]:
        token["content"] = inner.get(token["content"], token["content"])
    tokenizer = library_tokenizer(json.dumps(settings), "a special token is part of the merges")
    if any(tokenizer.token_to_id(inner.get(name, name)) != i for name, i in ids.items()):
        raise ValueError("two tokens have one id")
    return tokenizer


def mark_of(files: dict[str, bytes]) -> int:
    """A checksum that tells the files of a tokenizer, its chat template and stop tokens with them, from others."""
    return zlib.crc32(b"\0".join(part for name in sorted(files) for part in (name.encode(), files[name])))


class HFTokenizer:
    """A byte pair tokenizer from a folder in the format of Hugging Face, with the interface of
    nanochat.tokenizer.Tokenizer.

    Control tokens are those that its files call special, and those without that name that the template frames turns
    with. has_template: whether it came with a chat template (a base model's prompt is the text and a blank line). eos,
    bos: ids, bos is None where there is none.
    """
    has_calculator = False

    def __init__(self, files: dict[str, bytes], folder: str):
        self.files, path = files, lambda name: os.path.join(folder, name)
        with reading(path("tokenizer.json")):
            original, self.settings, self._byte_level = parse_tokenizer(files["tokenizer.json"])
        self.ids = original.get_vocab(with_added_tokens=True)  # of every token's text
        self.tokens = {i: text for text, i in self.ids.items()}
        self.vocab_size = max(self.tokens) + 1
        with reading(path("tokenizer_config.json")):
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
            named, special = special_tokens(config)
            eos, bos = (self.ids[named[name]] if name in named else None for name in ("eos_token", "bos_token"))
            template = chat_template_of(config)
        where = "config.json" if "config.json" in files else "generation_config.json"
        with reading(path(where)):
            generation = json.loads(files.get(where, b"{}"))
            eos_ids, bos_ids = (token_ids(generation.get(name), self.tokens)
                                for name in ("eos_token_id", "bos_token_id"))
        if eos is None and not eos_ids:
            raise BadInput(f"{folder}: no eos_token in tokenizer_config.json and no eos_token_id in {where}")
        self.eos = eos_ids[0] if eos is None else eos
        self.bos = next(iter(bos_ids), None) if bos is None else bos

        where, variables = "tokenizer_config.json", named
        if "chat_template.jinja" in files:
            where = "chat_template.jinja"
            with reading(path(where)):
                template = files[where].decode()
        self.has_template = template is not None
        self.adds_bos = self.bos is not None and bool(config.get("add_bos_token", self.bos in original.encode("").ids))
        if not self.has_template:
            template = NO_TEMPLATE
            variables = {"bos_token": self.tokens[self.bos] if self.adds_bos else "",
                         "eos_token": self.tokens[self.eos]}
        self.template = ChatTemplate(template, path(where), variables)
        with reading(path("tokenizer.json")):
            self._set_controls({self.tokens[self.eos], named.get("bos_token")}, special)
        self._set_end(eos_ids)
        self.stop_tokens = list(dict.fromkeys([*eos_ids, self.eos, self.assistant_end]))

    @classmethod
    def load(cls, folder: str) -> "HFTokenizer":
        """Opens tokenizer.json in `folder`, and of the other FILES there those that are beside it. Raises BadInput."""
        return cls(read_files(folder), folder)

    def save(self, folder: str) -> None:
        """Writes the files that it was read from into `folder`, byte for byte, tokenizer.json last: without it a folder
        holds no tokenizer, and is written again. Raises BadInput where another tokenizer's would change their meaning,
        CannotWrite."""
        make_folder(folder)
        if there := [name for name in FILES if name not in self.files and os.path.exists(os.path.join(folder, name))]:
            raise BadInput(f"{os.path.join(folder, there[0])} is of another tokenizer: move it away")
        for name in sorted(self.files, key="tokenizer.json".__eq__):
            with whole_file(os.path.join(folder, name), "wb") as f:
                f.write(self.files[name])

    def _set_controls(self, ends: set, special: set[str]) -> None:
        """Finds the control tokens and makes the tokenizer that knows them by inner names only. ends: eos, bos."""
        added = {token["content"]: token for token in self.settings["added_tokens"]}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        # Special though the file has them among its ordinary tokens.
        words = {*ends, self.settings["model"]["unk_token"]} - {None, *added}
        self.settings["added_tokens"] += [{"id": self.ids[name], "content": name, **plain} for name in sorted(words)]
        added |= {token["content"]: token for token in self.settings["added_tokens"]}
        self._added, self._added_ids = any_of(added), {self.ids[name] for name in added}
        special = special & added.keys() | {name for name, token in added.items() if token["special"]}
        special |= {name for name in self._added.findall(self._frame()) if TAG.fullmatch(name)}
        if short := [name for name in special if len(name) == 1]:
            raise ValueError(f"the special token {short[0]!r} is one character, which no text could hold as text")
        # Random, so that no text can hold them; of one length, so that they cannot be confused after each other.
        self._inner = {name: f"\U000f0000{token_hex(8)}{i:06x}\U000f0001" for i, name in enumerate(sorted(special))}
        self._inner_ids = {inner: self.ids[name] for name, inner in self._inner.items()}
        self._inner_name, self._controls = any_of(self._inner_ids), set(self._inner_ids.values())
        self._fence = Fence(special, self.template.strings)
        self._tokenizer = renamed(self.settings, self._inner)

    def _frame(self) -> str:
        """What the template writes around turns: some files do not call these tokens special. Not what begins the last
        answer: a model may say <think>."""
        turns = [{"role": role, "content": PROBE} for role in ("user", "assistant", "user")]
        try:
            text = self.template.render(turns, True)
        except BadInput:  # a template for one turn
            text = self.template.render(turns[:1], True)
        return text[: text.rfind(PROBE)]

    def _set_end(self, eos_ids: list[int]) -> None:
        """Finds the token that ends what an assistant says: the control token after it, or where the template has none
        the next turn's first, if it is one of eos_ids, at which generation stops, else eos. _tail is what stands after
        an answer without one, and _ending what should."""
        answered = [{"role": role, "content": PROBE} for role in ("user", "assistant")]
        mark, followed = re.compile(rf"\s*({self._inner_name.pattern})"), ""
        alone = self._after_probe(answered)
        with contextlib.suppress(BadInput):  # a template for one turn
            followed = self._after_probe([*answered, {"role": "user", "content": "?"}])
        own, following = mark.match(alone), mark.match(followed)
        found = own or (following if following and self._inner_ids[following[1]] in eos_ids else None)
        self.assistant_end = self._inner_ids[found[1]] if found else self.eos
        self._tail = alone if alone.isspace() else ""
        self._ending = found[0] if found else self._inner[self.tokens[self.eos]]

    def _after_probe(self, messages: list[dict]) -> str:
        """What the template writes after the last message of PROBE, "" where it does not show that."""
        _, found, after = self._render(messages, False).rpartition(PROBE)
        return after if found else ""

    def equals(self, other) -> bool:
        """Whether both give every text the same ids. Chat templates may differ."""
        parts = ("normalizer", "pre_tokenizer", "model", "added_tokens")
        return isinstance(other, HFTokenizer) and all(self.settings[part] == other.settings[part] for part in parts)

    def mark(self) -> int:
        """A number that tells it from others."""
        return mark_of(self.files)

    def tells_apart(self, other: "HFTokenizer") -> list[str]:
        """In words, what differs though texts have the same ids: where a prompt comes from, where an answer ends."""
        found, names = [], lambda tokenizer: " ".join(tokenizer.tokens[i] for i in tokenizer.stop_tokens)
        if (self.template.source, self.template.variables) != (other.template.source, other.template.variables):
            found.append(f"the chat template of {self.template.path} in place of that of {other.template.path}")
        if set(self.stop_tokens) != set(other.stop_tokens):
            found.append(f"the stop tokens {names(self)} in place of {names(other)}")
        return found

    def check_model(self, name: str, model) -> None:
        """Raises BadInput unless a model has an embedding for every token. It may have more, as padding."""
        if model.vocab_size < self.vocab_size:
            raise BadInput(f"the {name} has a vocabulary of {model.vocab_size}, the tokenizer one of "
                           f"{self.vocab_size}: it was trained with another")

    def special(self, name: str) -> int:
        """The id of a special or added token. Raises BadInput where there is none."""
        if self.ids.get(name) not in self._added_ids:
            raise BadInput(f"this tokenizer has no {name}")
        return self.ids[name]

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text: no bos, and a special token's name in it is text."""
        return self._tokenizer.encode(scalars(text), add_special_tokens=False).ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token. A control token or an id without a token is "?": inside a completion it is noise, and
        no mark holds a "?"."""
        text = self.tokens.get(token)
        if token in self._controls or text is None:
            return b"?"
        if self._byte_level:
            spelled = token not in self._added_ids and all(c in BYTE_OF for c in text)
            return bytes(BYTE_OF[c] for c in text) if spelled else text.encode()
        if self.settings["model"]["byte_fallback"] and re.fullmatch("<0x[0-9A-F]{2}>", text):
            return bytes.fromhex(text[3:5])
        return text.replace("\u2581", " ").encode()

    def decode(self, ids: list[int]) -> str:
        """Text of ids. Bytes that are not UTF-8 and control tokens become "?", so that text never grows when quoted."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace").replace("\ufffd", "?")

    def spell(self, ids: list[int]) -> str:
        """Text of ids to be looked at, with control tokens by their names."""
        said = (self.tokens[i].encode() if i in self._controls else self.token_bytes(i) for i in ids)
        return b"".join(said).decode("utf-8", errors="replace")

    def render_prompt(self, user: str, system: str = "") -> list[int]:
        """A one-turn conversation up to where the assistant begins, after a system message unless that is empty."""
        said = [{"role": "system", "content": system}] if system else []
        return self.render_chat([*said, {"role": "user", "content": user}])

    def render_chat(self, messages: list[dict]) -> list[int]:
        """A conversation up to where the assistant begins. Raises as render_conversation does."""
        messages = plain_messages(messages)
        if messages[-1]["role"] != "user":
            raise ValueError(f"the last message is from {messages[-1]['role']}, expected user")
        return self._encode_rendered(self._render(messages, True)).ids

    def render_conversation(self, messages: list[dict], context: int | None) -> tuple[list[int], list[int]]:
        """Token ids of a conversation and the loss mask: 1 on what the assistant says and its end token, 0 on a token
        that the prompt has a part of. A last answer that the template does not end gets an end token. messages:
        {"role": "system"|"user"|"assistant", "content": str} (an assistant's also parts {"type": "text", "text": str}),
        turns alternating from the user's. Raises ValueError for a wrong order; BadInput for a conversation longer than
        `context` (it never cuts), for one that the template refuses, and where the template writes turns otherwise, or
        does not end them, when others follow: what is trained would not be what is sampled."""
        messages = plain_messages(messages)
        answers = {i: self._answer(messages[: i + 1]) for i, m in enumerate(messages) if m["role"] == "assistant"}
        last = len(messages) - 1
        text = answers[last][0] if last in answers else self._render(messages, False)
        for i, (turn, _, end) in answers.items():
            if not text.startswith(turn[:end]):
                raise BadInput(f"{self.template.path}: the chat template rewrites message {i} or an earlier one, or "
                               f"does not end it, when others follow; give one answer at a time")
        encoding = self._encode_rendered(text)
        if context is not None and len(encoding.ids) > context:
            raise BadInput(f"conversation has {len(encoding.ids)} tokens, the context {context}")
        bounds = [bound for _, *span in answers.values() for bound in span]
        return encoding.ids, [bisect_right(bounds, start) % 2 for start, _ in encoding.offsets]

    def _answer(self, messages: list[dict]) -> tuple[str, int, int]:
        """A rendered conversation whose last message is an assistant's, with an end token; where that message begins,
        and where its end token ends. Raises BadInput for a template that begins it otherwise than it asks for one."""
        prompt, text = self._render(messages[:-1], True), self._render(messages, False)
        if not text.startswith(prompt):
            raise BadInput(f"{self.template.path}: the chat template begins the answer, message {len(messages) - 1}, "
                           f"otherwise than when it asks for one")
        ends = [match.end() for match in self._inner_name.finditer(text, len(prompt))
                if self._inner_ids[match[0]] == self.assistant_end]
        if not ends:
            text = text.removesuffix(self._tail) + self._ending
        return text, len(prompt), ends[0] if ends else len(text)

    def _render(self, messages: list[dict], generate: bool) -> str:
        """The rendered conversation, with the inner names of those control tokens that the template wrote. Raises
        BadInput for a template that leaves out a system message."""
        messages = [{**message, "content": scalars(message["content"])} for message in messages]
        used = set(chain(self.template.source, *(message["content"] for message in messages)))
        mark = next(mark for mark in MARKS if mark not in used)
        name_inside = lambda text: self._added.sub(lambda match: self._inner.get(match[0], match[0]), text)
        plain = self.template.render(messages, generate)
        for message in messages:
            if message["role"] == "system" and message["content"].strip() not in plain:
                raise BadInput(f"{self.template.path}: the chat template leaves out the system message "
                               f"{message['content'][:60]!r}")
        fenced = [{**message, "content": self._fence.text(message["content"], mark)} for message in messages]
        fenced = self.template.render(fenced, generate)
        named, without = name_inside(fenced), name_inside(plain)
        # A template may look at the text in a way that sees the marks (its length, say): then without them, if that
        # adds no control token.
        if fenced.replace(mark, "") != plain and self._inner_name.findall(without) == self._inner_name.findall(named):
            return without
        return named.replace(mark, "")

    def _encode_rendered(self, text: str) -> tokenizers.Encoding:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        written = [self._inner_ids[name] for name in self._inner_name.findall(text)]
        unknown = self.ids.get(self.settings["model"]["unk_token"])  # what stands for a character that has no token
        if [i for i in written if i != unknown] != [i for i in encoding.ids if i in self._controls and i != unknown]:
            raise BadInput(f"{self.template.path}: the tokenizer "
                           f"does not find the special tokens of its chat template where that puts them")
        return encoding


def load_tokenizer(folder: str) -> Tokenizer | HFTokenizer:
    """The tokenizer in `folder`, of either kind. Raises BadInput when it holds both or none."""
    has = {name: os.path.exists(os.path.join(folder, name)) for name in ("tokenizer.pkl", "tokenizer.json")}
    if all(has.values()):
        raise BadInput(f"{folder} holds two tokenizers, tokenizer.pkl and tokenizer.json: move one away")
    return HFTokenizer.load(folder) if has["tokenizer.json"] else Tokenizer.load(folder)


def load_own_tokenizer(folder: str) -> Tokenizer:
    """nanochat's own tokenizer in `folder`, which base models have. Raises BadInput where there is another, or none."""
    tokenizer = load_tokenizer(folder)
    if not isinstance(tokenizer, Tokenizer):
        raise BadInput(f"{folder} holds an imported tokenizer, which is for imported models only: set "
                       f"NANOCHAT_BASE_DIR to the folder of a base model, or to a new one")
    return tokenizer
