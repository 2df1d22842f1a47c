"""
Who sits where while rows decode: which rows wait, which have a place, which prompts have a slot.
"""
import bisect
import math
import os
from collections import deque
from collections.abc import Hashable

REFILL = 1 / 8  # share of the places that must be free before waiting rows get them: prompts are run in batches
SLOTS = 4       # prompts that have a slot, for each that places full of whole prompts would hold
SHARED = 1 / 8  # share of the prompts' tokens that must be saved before a common start is run by itself


def num_slots(num_prompts: int, num_places: int, num_samples: int) -> int:
    """Prompts that are held at once beside so many places."""
    return min(num_prompts, num_places, SLOTS * -(-num_places // num_samples))


def num_places(num_prompts: int, num_samples: int, prompt_tokens: int, new_tokens: int, max_rows: int,
               max_cached_tokens: int = 0) -> int:
    """The most rows that may decode together: of all, max_rows, and what keeps the tokens whose keys and values are
    held within max_cached_tokens (0: no bound), whatever the rows do; at least one. prompt_tokens, new_tokens: the
    longest."""
    most = min(max_rows, num_prompts * num_samples)
    if max_cached_tokens:
        held = lambda places: (num_slots(num_prompts, places, num_samples) * prompt_tokens
                               + places * max(1, new_tokens - 1))
        most = bisect.bisect_right(range(1, most + 1), max_cached_tokens, key=held)  # held grows with places
    return max(1, most)


def common_starts(prompts: list[list[int]], families: list[Hashable],
                  num_places: int) -> list[tuple[list[int], list[int]]]:
    """Prompts of one family (a problem, say) begin alike: such a start is run once, and takes the slot that one prompt
    would have. What follows it in a prompt, at least a token, is then its row's own.

    A prompt that is alone in its family is cut where the longest start ends. -> (start, the prompts that begin with
    it); nothing where a family has no common start, where too little is saved, and where more tokens would be held or
    fewer places be filled than without.
    """
    assert len(families) == len(prompts)
    members: dict[Hashable, list[int]] = {}
    for p, family in enumerate(families):
        members.setdefault(family, []).append(p)
    shared = {family: min(len(os.path.commonprefix([prompts[p] for p in its])), min(len(prompts[p]) for p in its) - 1)
              for family, its in members.items() if len(its) > 1}
    longest = max(shared.values(), default=0)
    starts = [(prompts[its[0]][:n], its) for family, its in members.items()
              for n in [shared.get(family, min(longest, len(prompts[its[0]]) - 1))]]
    if not starts or not all(start for start, _ in starts):
        return []
    saved = sum(len(start) * (len(its) - 1) for start, its in starts)
    rest = max(len(prompts[p]) - len(start) for start, its in starts for p in its)
    sizes = sorted(len(its) for _, its in starts)
    slots = num_slots(len(starts), num_places, sizes[-1])
    pays = saved >= SHARED * sum(map(len, prompts))
    fits = slots * longest + num_places * rest <= num_slots(len(prompts), num_places, 1) * max(map(len, prompts))
    fills = sum(sizes[:slots]) >= min(num_places, len(prompts))  # even if the smallest families have all the slots
    return starts if pays and fits and fills else []


class Slots:
    """Works on the host, on numbers alone.

    prompts: (prompt, its rows), in the order in which they sit down; num_places: rows that decode together. The rows of
    a prompt may sit down at different times; its slot is its own until the last of them has ended.
    """

    def __init__(self, prompts: list[tuple[int, range]], num_places: int):
        self.waiting, self.num_waiting = deque(prompts), sum(len(rows) for _, rows in prompts)
        self.num_places = num_places
        self.num_slots = num_slots(len(prompts), num_places, max((len(rows) for _, rows in prompts), default=1))
        self.free_places, self.free_slots = (list(range(n))[::-1] for n in (num_places, self.num_slots))
        self.live: dict[int, int] = {}        # place -> slot
        self.num_rows = [0] * self.num_slots  # live ones of each slot
        self.open_slot: int | None = None     # that of the first waiting prompt, when some of its rows sit already

    def may_fill(self) -> bool:
        """Whether so many places are free that waiting rows are to get them."""
        enough = min(self.num_waiting, math.ceil(REFILL * self.num_places))
        return 0 < enough <= len(self.free_places) and (self.open_slot is not None or len(self.free_slots) > 0)

    def fill(self) -> tuple[list[int], list[int], list[int], list[tuple[int, int]]]:
        """Slots as many rows as can be. -> the rows, their places, their slots; new prompts, each with its slot"""
        rows, places, slots, new = [], [], [], []
        while self.waiting and self.free_places and (self.open_slot is not None or self.free_slots):
            prompt, left = self.waiting.popleft()
            if self.open_slot is None:
                self.open_slot = self.free_slots.pop()
                new.append((prompt, self.open_slot))
            taken = left[: len(self.free_places)]
            rows += taken
            places += (self.free_places.pop() for _ in taken)
            slots += [self.open_slot] * len(taken)
            self.num_rows[self.open_slot] += len(taken)
            if len(taken) < len(left):
                self.waiting.appendleft((prompt, left[len(taken):]))
            else:
                self.open_slot = None
        self.num_waiting -= len(rows)
        self.live |= zip(places, slots, strict=True)
        return rows, places, slots, new

    def release(self, places: list[int]) -> None:
        """Frees places whose rows have ended."""
        for place in places:
            slot = self.live.pop(place)
            self.free_places.append(place)
            self.num_rows[slot] -= 1
            if self.num_rows[slot] == 0 and slot != self.open_slot:
                self.free_slots.append(slot)

    def batch(self, size: int) -> list[int]:
        """The live places, those of a slot side by side, and free ones up to `size`."""
        live = sorted(self.live, key=lambda place: (self.live[place], place))
        return live + self.free_places[: max(0, size - len(live))]
