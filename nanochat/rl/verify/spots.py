"""
Verdicts and choices inside verifications: where a written one stands among the tokens, and how likely it was to be the
other. Q spots among N rollouts of T tokens.
"""
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from nanochat.common import BadInput
from nanochat.rl.play.play import Play
from nanochat.rl.records.prompts import Prompt, Verification
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.log_odds import Parts


class Spot(NamedTuple):
    """A verdict in a completion, which may share tokens with what stands beside it."""
    position: int  # of its first telling token
    right: int     # that token if the verdict is right, or a choice is A
    wrong: int     # and if it is wrong, or B


def spot_of(tokenizer, fmt, tokens: list[int], at: int, marks: tuple[str, str] | None = None) -> Spot | None:
    """The verdict, or one of two `marks`, at byte `at`; None where its tokens are not as the tokenizer writes it."""
    marks = marks or (fmt.correct, fmt.incorrect)
    pieces = [tokenizer.token_bytes(token) for token in tokens]
    ends, text = list(accumulate(map(len, pieces))), b"".join(pieces)
    said = next(mark for mark in marks if text.startswith(mark.encode(), at))
    first, last = bisect_right(ends, at), bisect_right(ends, at + len(said.encode()) - 1)
    before, after = text[ends[first] - len(pieces[first]): at], text[at + len(said.encode()): ends[last]]
    try:
        right, wrong = (tokenizer.encode(before.decode() + mark + after.decode()) for mark in marks)
    except UnicodeDecodeError:
        return None
    k = next(k for k, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b)
    as_written = right if said == marks[0] else wrong
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


def forced(t: Play, role: str, prompts: list[Prompt], marks: tuple[str, str],
           first: list[bool]) -> tuple[Rollouts, list[tuple[int, Spot]]]:
    """Verifications that are a final judgment and nothing else, the first of two marks or the second after each
    prompt, and where it stands in each. Raises BadInput where its tokens are not those of the mark by itself."""
    fmt = t.task.fmt
    opening = fmt.verification_open + fmt.verification_close + fmt.final_open
    texts = [opening + marks[0 if is_first else 1] + fmt.final_close for is_first in first]
    rollouts = t.written(role, prompts, texts)
    spots = [(n, spot_of(t.tokenizer, fmt, tokens, len(opening.encode()), marks))
             for n, tokens in enumerate(rollouts.completions())]
    if unread := [n for n, spot in spots if spot is None]:
        raise BadInput(f"format {fmt.name}: in {texts[unread[0]]!r} this tokenizer writes "
                       f"{marks[0 if first[unread[0]] else 1]!r} in other tokens than by itself")
    return rollouts, spots


def forced_verdicts(t: Play, role: str, solutions: Rollouts,
                    verdicts: list[bool]) -> tuple[Rollouts, list[tuple[int, Spot]]]:
    """Verifications of solutions that are a final verdict and nothing else, and where it stands in each."""
    return forced(t, role, t.verify_prompts(solutions), (t.task.fmt.correct, t.task.fmt.incorrect), verdicts)


def asked_at(rollouts: Rollouts, spots: list[tuple[int, Spot]]) -> tuple[Rollouts, Rollouts]:
    """The rollouts, at each spot, a rollout's number and a verdict in it, asked for its right token, and for its wrong
    one. Nobody drew them there: sampler_logprobs are NaN."""
    where, asked = places_of(spots), []
    for tokens in ([spot.right for _, spot in spots], [spot.wrong for _, spot in spots]):
        targets = rollouts.tokens.clone()
        targets[where] = torch.tensor(tokens, dtype=torch.long, device=targets.device)
        asked.append(replace(rollouts, targets=targets,
                             sampler_logprobs=torch.full_like(rollouts.sampler_logprobs, float("nan"))))
    return asked[0], asked[1]


def places_of(spots: list[tuple[int, Spot]]) -> tuple[list[int], list[int]]:
    """The rows and columns of spots in a tensor (N, T)."""
    return [n for n, _ in spots], [spot.position for _, spot in spots]


def log_odds_at(t: Play, role: str, rollouts: Rollouts, spots: list[tuple[int, Spot]]) -> torch.Tensor:
    """s = log p(right) - log p(wrong) at each spot. -> (Q,)"""
    right, wrong = (t.logprobs(role, asked) for asked in asked_at(rollouts, spots))
    return (right - wrong)[places_of(spots)]


def chances_at(t: Play, role: str, rollouts: Rollouts, spots: list[tuple[int, Spot]]) -> list[float]:
    """p(right) / (p(right) + p(wrong)) at each spot."""
    return torch.sigmoid(log_odds_at(t, role, rollouts, spots)).tolist()


def written_chances(t: Play, role: str, rollouts: Rollouts) -> list[list[float | None]]:
    """p(right) / (p(right) + p(wrong)) at the verdicts on K steps and the final one of verifications that were written,
    None for those that are not there. -> (N, K + 1)"""
    rows = zip(rollouts.completions(), t.read_verifications(rollouts), rollouts.prompt_of(), strict=True)
    spots = [verdict_spots(t.tokenizer, t.task.fmt, tokens, said, len(prompt.solution.step_ends))
             for tokens, said, prompt in rows]
    found = iter(chances_at(t, role, rollouts, [(n, spot) for n, row in enumerate(spots) for spot in row if spot]))
    return [[next(found) if spot else None for spot in row] for row in spots]


def spot_parts(rollouts: Rollouts, spots: list[tuple[int, Spot]], coefficients: torch.Tensor) -> Parts:
    """The parts of an Update that moves s at each spot by its coefficient (Q,): up where that is positive."""
    filled = torch.zeros(rollouts.tokens.shape, device=rollouts.tokens.device)  # (N, T)
    filled[places_of(spots)] = coefficients
    right, wrong = asked_at(rollouts, spots)
    return [(right, filled), (wrong, -filled)]


def spot_places(rollouts: Rollouts, spots: list[tuple[int, Spot]]) -> torch.Tensor:
    """Where the spots are. -> (N, T) bool"""
    places = torch.zeros(rollouts.tokens.shape, dtype=torch.bool, device=rollouts.tokens.device)
    places[places_of(spots)] = True
    return places
