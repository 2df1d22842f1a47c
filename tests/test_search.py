"""The search tool in rows of tokens: what it forces and when, marks that straddle tokens, and what is not trained."""
from dataclasses import replace
from itertools import chain

import pytest
import torch
from test_dpo import moved_by, random_play
from test_tasks import task_of

from nanochat import engine
from nanochat.kernels.losses import PolicyLoss
from nanochat.recipes.search.search_r1 import unmasked
from nanochat.rl.play.play import Update
from nanochat.search import Search
from nanochat.tokenizer import Tokenizer
from tasks import task_texts
from tasks.formats import COMPACT, PAPER

BYTES = Tokenizer.train(iter([]), 265)
FACTS = {"c": "7", "g": "3"}


def find(query: str) -> str:
    return FACTS.get(query, "")


def written_by(tool: Search, sampled: list[int]) -> tuple[str, str]:
    """The text of a row whose sampler draws these tokens where none is forced, and the forced part of it."""
    force, row, forced, sampled = None, [], [], list(sampled)
    while sampled or force is not None:
        row.append(sampled.pop(0) if force is None else force)
        forced += [] if force is None else [force]
        force = tool([5], [row[-1]]).get(5)
    return tool.tokenizer.decode(row), tool.tokenizer.decode(forced)


@pytest.mark.parametrize("fmt, sampled, text, forced", [
    (COMPACT, "<c>;4+7:1;<g>;", "<c>(7);4+7:1;<g>(3);", "(7)(3)"),
    (PAPER, "a<q>c</q>b", "a<q>c</q><i>7</i>b", "<i>7</i>"),
    (COMPACT, "<x>;", "<x>();", "()"),          # an unknown key
    (COMPACT, "<>;", "<>();", "()"),
    (COMPACT, "c>;<c;", "c>;<c;", ""),          # no query is closed
    (COMPACT, "c><c>", "c><c>(7)", "(7)"),      # a stray mark does not hide the next query
    (COMPACT, "<a<c>", "<a<c>(7)", "(7)"),      # the last opening counts
    (PAPER, "<q>c<q>g</q>", "<q>c<q>g</q><i>3</i>", "<i>3</i>"),
])
def test_information_is_forced_after_a_closed_query(fmt, sampled, text, forced):
    assert written_by(Search(BYTES, fmt, find), BYTES.encode(sampled)) == (text, forced)


def test_forced_marks_are_no_query_and_after_the_last_one_nothing_is_forced():
    """What is found may look like a query: only what the row wrote itself counts."""
    tool = Search(BYTES, COMPACT, lambda query: "<g>")
    assert written_by(tool, BYTES.encode("<c>")) == ("<c>(<g>)", "(<g>)") and tool.num_queries == {5: 1}
    tool = Search(BYTES, COMPACT, find, 2)
    assert written_by(tool, BYTES.encode("<c>;<g>;<c>;")) == ("<c>(7);<g>(3);<c>;", "(7)(3)")


def test_rows_do_not_mix_and_each_has_its_own_count():
    tool = Search(BYTES, COMPACT, find, most=1)
    ids = lambda text: BYTES.encode(text)
    for a, b in zip(ids("<c"), ids("<g"), strict=True):
        assert tool([1, 2], [a, b]) == {}
    assert tool([2, 1], ids(">>")) == {2: ids("(")[0], 1: ids("(")[0]}
    assert tool([1, 2], ids("((")) == {1: ids("7")[0], 2: ids("3")[0]}
    assert tool([2], ids("3")) == {2: ids(")")[0]}  # row 1 has left
    assert tool([2], ids(")")) == {} and tool.num_queries == {1: 1, 2: 1}
    with pytest.raises(ValueError):
        tool([1, 2], [65])


def vocabulary(*texts: str) -> Tokenizer:
    """A tokenizer that has these texts as tokens."""
    import tiktoken
    from nanochat.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN
    ranks = {bytes([i]): i for i in range(256)} | {text.encode(): 256 + i for i, text in enumerate(texts)}
    specials = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
    return Tokenizer(tiktoken.Encoding("test", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials))


@pytest.mark.parametrize("straddling, sampled, text, forced", [
    (">(", ["<c", ">(", ";"], "<c>(7);", "7)"),         # the information is begun: the rest is forced
    ("><", ["<c", "><", "g", ">", ";"], "<c><(7)g>;", "(7)"),
    (">;", ["<c", ">;", "="], "<c>;(7)=", "(7)"),       # what stands after the mark cannot be taken back
    (">()", ["<c", ">()", ";"], "<c>()(7);", "(7)"),    # what a row wrote itself is no information
    ("<c>", ["1", "<c>", ";"], "1<c>(7);", "(7)"),
])
def test_a_token_that_straddles_a_mark(straddling, sampled, text, forced):
    tokenizer = vocabulary(straddling)
    whole = tokenizer.encoding.encode_single_token(straddling.encode())
    drawn = [token for piece in sampled for token in ([whole] if piece == straddling else tokenizer.encode(piece))]
    assert written_by(Search(tokenizer, COMPACT, find), drawn) == (text, forced)


def test_bytes_that_are_no_text_and_special_tokens_break_nothing():
    tool = Search(BYTES, COMPACT, find)
    for token in (255, BYTES.bos, *BYTES.encode("<c"), 200):
        assert tool([0], [token]) == {}
    assert BYTES.decode(list(tool([0], BYTES.encode(">")).values())) == "("  # about what is no key


def test_the_vocabulary_of_the_task_merges_marks_and_the_search_still_fits():
    """tok_train on this task gives tokens such as ">(". A model that was shown them begins the information itself."""
    task = task_of("lookup", "--lookup-share", "0", "--lookup-hops", "2", "--lookup-noise", "2")
    tokenizer = Tokenizer.train(chain.from_iterable(task_texts(task, 300, 0)), 330)
    assert b">(" in {tokenizer.token_bytes(i) for i in range(256, 320)}
    key = next(iter(task.facts))
    text, _ = written_by(task.tool(tokenizer), tokenizer.encode(f"<{key}>("))
    assert text == f"<{key}>({task.find(key)})"


def writing_only(words: str, monkeypatch, recipe: str, *flags: str):
    """A step of random models on task lookup that write these characters, or end."""
    t, pick = random_play(recipe, "--task", "lookup", *flags), engine.pick
    keep = torch.full((t.tokenizer.vocab_size,), float("-inf"))
    keep[t.tokenizer.encode(words) + t.tokenizer.stop_tokens[:1]] = 0.0
    monkeypatch.setattr(engine, "pick", lambda logits, *rest: pick(0.1 * logits + keep, *rest))
    return t


@pytest.fixture
def searched(base, monkeypatch):
    """A step of search_r1, and solutions that write queries."""
    t = writing_only("<>abcde()", monkeypatch, "search_r1", "--max-new-tokens", "12", "--num-samples", "4")
    solutions = t.solve("solutions", t.problems(), tool=t.task.tool(t.tokenizer))
    assert solutions.forced.any() and not (solutions.mask & solutions.forced).any()
    return t, solutions


def test_what_the_search_wrote_gets_no_gradient(searched):
    """The gradient is the same whatever advantage the forced tokens are given, and not so without the mask."""
    t, solutions = searched
    loss, ones = PolicyLoss("reinforce"), torch.ones(solutions.tokens.shape, dtype=torch.float64)
    strange = ones.masked_fill(solutions.forced, 100.0)

    def gradient(rollouts, advantages):
        state = {name: x.clone() for name, x in t.roles["generator"].model.state_dict().items()}
        moved = moved_by(t, Update("generator", [(rollouts, advantages.float())], loss))
        t.roles["generator"].model.load_state_dict(state)
        return torch.cat([x.flatten() for x in moved.values()])

    masked = gradient(solutions, ones)
    torch.testing.assert_close(masked, gradient(solutions, strange), rtol=0, atol=0)
    trained = unmasked(solutions)
    assert trained.num_trained().sum() > solutions.num_trained().sum()
    assert trained.sampler_logprobs[solutions.forced].isnan().all()
    assert (gradient(trained, strange) - masked).abs().max() > 1e-3
    assert replace(trained, forced=solutions.forced).num_trained().tolist() == solutions.num_trained().tolist()
