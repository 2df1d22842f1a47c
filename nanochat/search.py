"""
The search that a model may use while it samples: a look-up in what a task knows.

A model writes a query between the format's marks, `<c>`, and the sampler forces the information after it, `(7)`.
Marks are ordinary text, so that a token may hold a part of one, or one and more.
"""
import functools
from collections import Counter, deque
from collections.abc import Callable

MOST_QUERIES = 8  # of a row


class Search:
    """Which tokens to force on the rows of one call of the sampler, from the tokens that they get.

    find(query) gives the information, "" where there is none. Where a row closes a query, the information is forced
    between its marks, a token at a time; after `most` queries of a row nothing is forced. Where the token that closes
    the query has already begun the information, as `>(` does, only the rest of it is forced.
    """

    def __init__(self, tokenizer, fmt, find: Callable[[str], str], most: int = MOST_QUERIES):
        self.tokenizer, self.fmt, self.find, self.most = tokenizer, fmt, find, most
        self.num_queries: Counter[int] = Counter()
        self.written: dict[int, bytes] = {}       # row -> what it wrote itself since its last information
        self.waiting: dict[int, deque[int]] = {}  # row -> forced tokens that it has yet to get

    @functools.cached_property
    def triggers(self) -> list[int]:
        """Tokens after which alone it begins to force others: those that may end the mark that closes a query."""
        last = self.fmt.query_close.encode()[-1:]
        return [token for token in range(self.tokenizer.vocab_size) if last in self.tokenizer.token_bytes(token)]

    def __call__(self, rows: list[int], tokens: list[int]) -> dict[int, int]:
        """The token that each of these rows must get next, for those that must. tokens: what each just got."""
        for row, token in zip(rows, tokens, strict=True):
            if self.waiting.get(row):
                self.waiting[row].popleft()
                continue
            self.written[row] = self.written.get(row, b"") + self.tokenizer.token_bytes(token)
            if self.num_queries[row] < self.most and (forced := self.answer(row)):
                self.waiting[row] = deque(forced)
        return {row: self.waiting[row][0] for row in rows if self.waiting.get(row)}

    def answer(self, row: int) -> list[int]:
        """The tokens that follow what a row wrote; none unless it has just closed a query."""
        text = self.written[row].decode("utf-8", errors="replace")
        before, closed, after = text.partition(self.fmt.query_close)
        if not closed:
            return []
        _, opened, query = before.rpartition(self.fmt.query_open)
        self.written[row] = b"" if opened else after.encode()
        if not opened:
            return []
        self.num_queries[row] += 1
        information = self.fmt.info_open + self.find(query) + self.fmt.info_close
        return self.tokenizer.encode(information.removeprefix(after))
