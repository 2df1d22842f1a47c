"""
Verdicts inside verifications: where a written verdict stands among the tokens, and how likely it was to be the other.
"""
from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

import torch

from nanochat.rl.play import Play
from nanochat.rl.prompts import Verification
from nanochat.rl.rollouts import Rollouts


class Spot(NamedTuple):
    """A verdict in a completion: the position at which its first telling token stands, and that token if the verdict is
    right and if it is wrong. In its context a verdict may share tokens with what stands beside it."""
    position: int
    right: int
    wrong: int


def spot_of(tokenizer, fmt, tokens: list[int], at: int) -> Spot | None:
    """The verdict whose mark begins at byte `at` of a completion; None where the tokens are not those in which the
    tokenizer writes it."""
    pieces = [tokenizer.token_bytes(token) for token in tokens]
    ends, text = list(accumulate(map(len, pieces))), b"".join(pieces)
    said = next(mark for mark in (fmt.correct, fmt.incorrect) if text.startswith(mark.encode(), at))
    first, last = bisect_right(ends, at), bisect_right(ends, at + len(said.encode()) - 1)
    before, after = text[ends[first] - len(pieces[first]): at], text[at + len(said.encode()): ends[last]]
    try:
        right, wrong = (tokenizer.encode(before.decode() + mark + after.decode())
                        for mark in (fmt.correct, fmt.incorrect))
    except UnicodeDecodeError:
        return None
    k = next(k for k, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b)
    as_written = right if said == fmt.correct else wrong
    return Spot(first + k, right[k], wrong[k]) if tokens[first: last + 1] == as_written else None


def verdict_spots(tokenizer, fmt, tokens: list[int], verification: Verification, num_steps: int) -> list[Spot | None]:
    """The verdicts on K steps and the final one of a verification, None for those that are not there. -> K + 1"""
    # Marks are ASCII: as latin-1 one character is one byte.
    text = b"".join(map(tokenizer.token_bytes, tokens)).decode("latin-1")
    final_at = text.rfind(fmt.final_open)
    last = lambda start, end: max(text.rfind(mark, start, end) for mark in (fmt.correct, fmt.incorrect))
    steps, final = [None] * num_steps, None
    if verification.usable_steps is not None:
        steps = [last(*span) for span in fmt.closed_steps(text[:final_at], fmt.verification_open)]
    if verification.verdict is not None:
        final = last(final_at, len(text))
    return [None if at is None else spot_of(tokenizer, fmt, tokens, at) for at in (*steps, final)]


def forced_verdicts(t: Play, role: str, solutions: Rollouts,
                    verdicts: list[bool]) -> tuple[Rollouts, list[tuple[int, Spot]]]:
    """Verifications of solutions that are a final verdict and nothing else, and where it stands in each."""
    fmt = t.task.fmt
    opening = fmt.verification_open + fmt.verification_close + fmt.final_open
    texts = [opening + (fmt.correct if verdict else fmt.incorrect) + fmt.final_close for verdict in verdicts]
    rollouts = t.written(role, t.verify_prompts(solutions), texts)
    spots = [(n, spot_of(t.tokenizer, fmt, tokens, len(opening.encode())))
             for n, tokens in enumerate(rollouts.completions())]
    return rollouts, spots


def chances_at(t: Play, role: str, rollouts: Rollouts, spots: list[tuple[int, Spot]]) -> list[float]:
    """p(right) / (p(right) + p(wrong)) at each spot, a rollout's number and a verdict in it."""
    where = ([n for n, _ in spots], [spot.position for _, spot in spots])
    targets = [rollouts.tokens.clone(), rollouts.tokens.clone()]
    for asked, tokens in zip(targets, ([spot.right for _, spot in spots], [spot.wrong for _, spot in spots]),
                             strict=True):
        asked[where] = torch.tensor(tokens, dtype=torch.long, device=asked.device)
    right, wrong = (t.logprobs(role, rollouts, targets=asked) for asked in targets)
    return torch.sigmoid(right - wrong)[where].tolist()


def spot_places(rollouts: Rollouts, spots: list[tuple[int, Spot]]) -> torch.Tensor:
    """Where the spots are. -> (N, T) bool"""
    places = torch.zeros(rollouts.tokens.shape, dtype=torch.bool)
    for n, spot in spots:
        places[n, spot.position] = True
    return places.to(rollouts.tokens.device)
