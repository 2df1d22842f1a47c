"""
Byte-level BPE: rustbpe trains, tiktoken runs. Nine special tokens take the last ids, as upstream.

Text is always encoded as ordinary text: a special string inside it stays text and can forge nothing.
"""
import os
import pickle
import zlib
from collections.abc import Iterator

import tiktoken
import torch

from nanochat.common import BadInput
from nanochat.storage.files import make_folder, whole_file

SPECIAL_TOKENS = ["<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>",
                  "<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"]
SPLIT_PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")  # noqa: E501
# What an assistant's message is made of: the tokens around it, and whether it is trained.
PARTS = {"text": (None, 1), "python": (("<|python_start|>", "<|python_end|>"), 1),
         "python_output": (("<|output_start|>", "<|output_end|>"), 0)}
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)  # bytes without merges


class _EncodingState:
    """Stands in for tiktoken.Encoding while unpickling: holds its state, runs nothing, downloads nothing."""

    def __setstate__(self, state):
        self.state = state


class _EncodingUnpickler(pickle.Unpickler):
    """Unpickles a tiktoken Encoding and refuses every other class or function."""

    def find_class(self, module, name):
        if (module, name) == ("tiktoken.core", "Encoding"):
            return _EncodingState
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a tokenizer file")


def check_encoding(ranks: dict[bytes, int], specials: dict[str, int]) -> None:
    """Raises ValueError unless ids are 0..V-1, every byte has one, and the nine special tokens take the last."""
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("token ids are not 0, 1, 2, ...")
    if not all(bytes([i]) in ranks for i in range(256)):
        raise ValueError("a single byte has no token")
    if specials != {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}:
        raise ValueError(f"the last ids are not {', '.join(SPECIAL_TOKENS)}")


class Tokenizer:
    """A tiktoken encoding with nanochat's special tokens and conversation format."""
    has_calculator = True  # tokens that call it

    def __init__(self, encoding: tiktoken.Encoding):
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.bos, self.assistant_end = self.special("<|bos|>"), self.special("<|assistant_end|>")
        self.stop_tokens = [self.assistant_end, self.bos]  # a sampled bos ends a row too, as upstream
        self._first_special = self.vocab_size - len(SPECIAL_TOKENS)

    @classmethod
    def train(cls, texts: Iterator[str], vocab_size: int) -> "Tokenizer":
        """A tokenizer of so many ids; MIN_VOCAB_SIZE is bytes alone. Raises BadInput where the text gives fewer."""
        ranks = {bytes([i]): i for i in range(256)}
        if vocab_size > MIN_VOCAB_SIZE:
            import rustbpe
            trainer = rustbpe.Tokenizer()
            trainer.train_from_iterator(texts, vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
            ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
            if len(ranks) < vocab_size - len(SPECIAL_TOKENS):
                raise BadInput(f"--vocab-size {vocab_size}: the text gives no more than "
                               f"{len(ranks) + len(SPECIAL_TOKENS)}")
        specials = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        return cls(tiktoken.Encoding("nanochat", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials))

    @classmethod
    def load(cls, folder: str) -> "Tokenizer":
        """Opens `folder`/tokenizer.pkl. Raises BadInput when it is absent or holds anything but a tiktoken Encoding."""
        path = os.path.join(folder, "tokenizer.pkl")
        if not os.path.exists(path):
            raise BadInput(f"no tokenizer at {path}: run scripts.tok_train first")
        with open(path, "rb") as f:
            try:
                state = _EncodingUnpickler(f).load().state
                check_encoding(state["mergeable_ranks"], state["special_tokens"])
                return cls(tiktoken.Encoding(**{key: state[key]
                                                for key in ("name", "pat_str", "mergeable_ranks", "special_tokens")}))
            except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, MemoryError, OverflowError,
                    TypeError, ValueError) as error:
                raise BadInput(f"{path} is not a tokenizer: {error}") from None

    def save(self, folder: str) -> None:
        """Writes tokenizer.pkl and token_bytes.pt (num_bytes) into a folder. Raises CannotWrite."""
        make_folder(folder)
        with (whole_file(os.path.join(folder, "tokenizer.pkl"), "wb") as encoding,
              whole_file(os.path.join(folder, "token_bytes.pt"), "wb") as sizes):
            pickle.dump(self.encoding, encoding)
            torch.save(self.num_bytes(), sizes)

    def num_bytes(self) -> torch.Tensor:
        """Bytes of each token, 0 of the special ones. -> (V,) int32"""
        sizes = [len(self.token_bytes(i)) if i < self._first_special else 0 for i in range(self.vocab_size)]
        return torch.tensor(sizes, dtype=torch.int32)

    def _parts(self) -> tuple[str, list[bytes]]:
        """All that the ids of a text depend on."""
        return self.encoding._pat_str, [self.encoding.decode_single_token_bytes(i) for i in range(self.vocab_size)]

    def equals(self, other: "Tokenizer") -> bool:
        """Whether both give every text the same ids."""
        return isinstance(other, Tokenizer) and self._parts() == other._parts()

    def mark(self) -> int:
        """A number that is the same for tokenizers that are equal: a checksum."""
        return zlib.crc32(repr(self._parts()).encode())

    def check_model(self, name: str, model) -> None:
        """Raises BadInput unless a model was made for this tokenizer's vocabulary."""
        if model.vocab_size != self.vocab_size:
            raise BadInput(f"the {name} has a vocabulary of {model.vocab_size}, the tokenizer one of "
                           f"{self.vocab_size}: it was trained with another")

    def special(self, name: str) -> int:
        return self.encoding.encode_single_token(name)

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """encode of each text, in a few threads."""
        return self.encoding.encode_ordinary_batch(texts, num_threads=4)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token. A special one is "?": inside a completion it is noise, and no mark holds a "?"."""
        return self.encoding.decode_single_token_bytes(token) if token < self._first_special else b"?"

    def decode(self, ids: list[int]) -> str:
        """Text of ids. Bytes that are not UTF-8 and special tokens become "?", so that text never grows when quoted."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace").replace("\ufffd", "?")

    def spell(self, ids: list[int]) -> str:
        """Text of ids to be looked at, with special tokens by their names."""
        return b"".join(map(self.encoding.decode_single_token_bytes, ids)).decode("utf-8", errors="replace")

    def render_prompt(self, user: str, system: str = "") -> list[int]:
        """A one-turn conversation up to where the assistant begins, after a system message unless that is empty."""
        said = [{"role": "system", "content": system}] if system else []
        return self.render_chat([*said, {"role": "user", "content": user}])

    def render_chat(self, messages: list[dict]) -> list[int]:
        """A conversation that ends with the user's turn, up to where the assistant begins."""
        return [*self.render_conversation(messages, None)[0], self.special("<|assistant_start|>")]

    def render_parts(self, content: str | list[dict]) -> tuple[list[int], list[int]]:
        """Ids and loss mask of what an assistant said: text, or a list of {"type": "text"|"python"|"python_output",
        "text": str}. What came from the calculator is not trained. Raises ValueError for another type."""
        ids, mask = [], []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] not in PARTS:
                raise ValueError(f"part of type {part['type']!r}: there are {', '.join(PARTS)}")
            marks, trained = PARTS[part["type"]]
            text = self.encode(part["text"])
            text = [self.special(marks[0]), *text, self.special(marks[1])] if marks else text
            ids, mask = ids + text, mask + [trained] * len(text)
        return ids, mask

    def render_conversation(self, messages: list[dict], context: int | None) -> tuple[list[int], list[int]]:
        """Token ids of a conversation and the loss mask: 1 on what the assistant says and its end token.

        messages: {"role": "system"|"user"|"assistant", "content": str} (an assistant's also parts, see render_parts),
        turns alternating from the user's; a system message is joined to the first user turn. Raises ValueError for a
        wrong order, BadInput for a conversation longer than `context`; never cuts.
        """
        if messages and messages[0]["role"] == "system":
            if len(messages) < 2 or messages[1]["role"] != "user":
                raise ValueError("a system message must be followed by a user turn")
            messages = [{"role": "user", "content": messages[0]["content"] + "\n\n" + messages[1]["content"]},
                        *messages[2:]]
        ids, mask = [self.bos], [0]
        for i, message in enumerate(messages):
            role = "user" if i % 2 == 0 else "assistant"
            if message["role"] != role:
                raise ValueError(f"message {i} is from {message['role']}, expected {role}")
            if role == "user" and not isinstance(message["content"], str):
                raise ValueError(f"message {i} is a user's and no text")
            text, trained = self.render_parts(message["content"])
            ids += [self.special(f"<|{role}_start|>"), *text, self.special(f"<|{role}_end|>")]
            mask += [0, *trained, 1] if role == "assistant" else [0] * (len(text) + 2)
        if context is not None and len(ids) > context:
            raise BadInput(f"conversation has {len(ids)} tokens, the context {context}")
        return ids, mask
