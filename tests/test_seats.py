"""
Who sits where: any prompts, places and ends.

    python -m pytest tests/test_seats.py -q
"""
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.seats import REFILL, SLOTS, Seats, num_places, num_slots


@st.composite
def prompts_of(draw):
    """Prompts, in any order, with their rows: numbers that follow one another, of unlike counts or all alike."""
    count = draw(st.integers(1, 12))
    sizes = draw(st.one_of(st.lists(st.integers(1, 9), min_size=count, max_size=count),
                           st.integers(1, 9).map(lambda size: [size] * count)))
    starts = [sum(sizes[:i]) for i in range(count)]
    return draw(st.permutations([(p, range(a, a + n)) for p, (a, n) in enumerate(zip(starts, sizes, strict=True))]))


def slots_allowed(prompts, num_places):
    """As many prompts as there are, as places, as four for each that places full of whole prompts would hold."""
    return min(len(prompts), num_places, 4 * math.ceil(num_places / max(len(rows) for _, rows in prompts)))


@settings(max_examples=300, deadline=None)
@given(prompts=prompts_of(), num_places=st.integers(1, 30), data=st.data())
def test_every_row_sits_once_whatever_ends_when(prompts, num_places, data):
    seats = Seats(prompts, num_places)
    assert seats.num_slots == slots_allowed(prompts, num_places) and SLOTS == 4
    prompt_of, total = {row: p for p, rows in prompts for row in rows}, sum(len(rows) for _, rows in prompts)
    seated, ended = [], set()   # rows in the order in which they sat down
    at, slot_of = {}, {}        # place -> its live row; prompt that has a slot -> which
    known = set()               # prompts that have been run
    for _ in range(10 * total + 10):
        waiting = total - len(seated)
        half = waiting and prompt_of[seated[-1]] if seated else None
        opened = seated and waiting and 0 < sum(prompt_of[r] == half for r in seated) < len(dict(prompts)[half])
        enough = min(waiting, math.ceil(REFILL * num_places))
        may = seats.may_admit()
        assert may == (0 < enough <= num_places - len(at) and bool(opened or len(slot_of) < seats.num_slots))
        assert may or at or not waiting  # no deadlock
        if may:
            rows, places, slots, new = seats.admit()
            assert len(rows) == len(places) == len(slots) > 0 and len(set(places)) == len(places)
            assert not set(places) & set(at) and set(places) <= set(range(num_places))
            for prompt, slot in new:
                assert prompt not in known and slot not in slot_of.values() and 0 <= slot < seats.num_slots
                known.add(prompt)
                slot_of[prompt] = slot
            assert slots == [slot_of[prompt_of[row]] for row in rows]
            seated += rows
            at |= zip(places, rows, strict=True)
            # as many as can be: no place, no row or no slot is left
            assert len(at) == num_places or len(seated) == total or len(slot_of) == seats.num_slots
        assert seats.num_waiting == total - len(seated) and len(at) <= num_places
        assert seats.live == {place: slot_of[prompt_of[row]] for place, row in at.items()}
        if not at:
            break
        size = data.draw(st.integers(len(at), num_places))
        batch = seats.batch(size)
        assert len(batch) == len(set(batch)) == size and set(at) == set(batch[: len(at)])
        of_batch = [seats.live[place] for place in batch[: len(at)]]
        assert of_batch == sorted(of_batch) and set(batch) <= set(range(num_places))  # rows of a slot side by side
        gone = data.draw(st.lists(st.sampled_from(sorted(at)), unique=True))
        seats.release(gone)
        ended |= {at.pop(place) for place in gone}
        # A prompt keeps its slot while a row of it lives or waits behind others that sat down.
        for prompt in list(slot_of):
            rows = set(dict(prompts)[prompt])
            if rows <= ended:
                del slot_of[prompt]
        if not gone and not seats.may_admit():  # else this might take for ever
            place = min(at)
            seats.release([place])
            row = at.pop(place)
            ended.add(row)
            if set(dict(prompts)[prompt_of[row]]) <= ended:
                del slot_of[prompt_of[row]]
    assert seated == [row for _, rows in prompts for row in rows]  # in order, each once
    assert ended == set(range(total)) and not seats.live and not seats.may_admit()


def test_rows_of_a_prompt_sit_down_at_different_times():
    seats = Seats([(7, range(0, 3)), (3, range(3, 6))], 4)
    assert seats.num_slots == 2 and seats.may_admit()
    assert seats.admit() == ([0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 0, 1], [(7, 0), (3, 1)])
    assert not seats.may_admit() and seats.batch(4) == [0, 1, 2, 3]
    seats.release([3])  # all rows of prompt 3 that sit have ended; two wait, so that its slot is its own
    assert seats.may_admit() and seats.admit() == ([4], [3], [1], [])
    seats.release([0, 1])
    assert seats.admit() == ([5], [1], [1], []) and seats.batch(3) == [2, 1, 3] and seats.batch(4) == [2, 1, 3, 0]
    seats.release([2])
    assert seats.free_slots == [0] and not seats.may_admit()


def test_waiting_rows_sit_down_several_at_a_time():
    seats = Seats([(p, range(p, p + 1)) for p in range(40)], 16)
    assert seats.admit()[0] == list(range(16))
    seats.release([5])
    assert not seats.may_admit()  # one place of 16; two are an eighth
    seats.release([9])
    assert seats.may_admit()
    assert sorted(seats.admit()[1]) == [5, 9]
    last = Seats([(p, range(p, p + 1)) for p in range(17)], 16)
    last.admit()
    last.release([5])
    assert last.may_admit()  # all that wait


def test_slots_bound_the_prompts_that_are_kept():
    # 8 places hold two prompts of four rows: eight slots are their prompts'. A row that does not end keeps its slot.
    seats = Seats([(p, range(4 * p, 4 * p + 4)) for p in range(50)], 8)
    assert seats.num_slots == 8
    held, kept = set(), {}
    for _ in range(200):
        if seats.may_admit():
            rows, places, slots, _ = seats.admit()
            for row, place, slot in zip(rows, places, slots, strict=True):
                kept.setdefault(row // 4, place)
                held.add(slot)
        stay = set(list(kept.values())[:7])
        seats.release([place for place in seats.live if place not in stay])
    assert held == set(range(8)) and len(seats.live) == 7


def test_no_prompts():
    seats = Seats([], 0)
    assert seats.num_slots == 0 and not seats.may_admit() and seats.batch(0) == [] and not seats.live


@settings(max_examples=200, deadline=None)
@given(num_prompts=st.integers(1, 40), num_samples=st.integers(1, 12), prompt=st.integers(1, 300),
       new=st.integers(1, 300), max_rows=st.integers(1, 600), budget=st.integers(1, 10 ** 5))
def test_a_budget_of_cached_tokens_is_kept_and_used(num_prompts, num_samples, prompt, new, max_rows, budget):
    held = lambda places: num_slots(num_prompts, places, num_samples) * prompt + places * max(1, new - 1)
    free = num_places(num_prompts, num_samples, prompt, new, max_rows)
    places = num_places(num_prompts, num_samples, prompt, new, max_rows, budget)
    assert free == min(max_rows, num_prompts * num_samples) and 1 <= places <= free
    assert places == 1 or held(places) <= budget
    assert places == free or held(places + 1) > budget
    waiting = [(p, range(p * num_samples, (p + 1) * num_samples)) for p in range(num_prompts)]
    assert Seats(waiting, places).num_slots == num_slots(num_prompts, places, num_samples)
