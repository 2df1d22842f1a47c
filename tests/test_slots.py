"""Who sits where: any prompts, places and ends."""
import math

from hypothesis import given, settings, strategies as st

from nanochat.slots import REFILL, SHARED, SLOTS, Slots, common_starts, num_places, num_slots


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
    slots = Slots(prompts, num_places)
    assert slots.num_slots == slots_allowed(prompts, num_places) and SLOTS == 4
    prompt_of, total = {row: p for p, rows in prompts for row in rows}, sum(len(rows) for _, rows in prompts)
    seated, ended = [], set()   # rows in the order in which they sat down
    at, slot_of = {}, {}        # place -> its live row; prompt that has a slot -> which
    known = set()               # prompts that have been run
    for _ in range(10 * total + 10):
        waiting = total - len(seated)
        half = waiting and prompt_of[seated[-1]] if seated else None
        opened = seated and waiting and 0 < sum(prompt_of[r] == half for r in seated) < len(dict(prompts)[half])
        enough = min(waiting, math.ceil(REFILL * num_places))
        may = slots.may_fill()
        assert may == (0 < enough <= num_places - len(at) and bool(opened or len(slot_of) < slots.num_slots))
        assert may or at or not waiting  # no deadlock
        if may:
            rows, places, at_slots, new = slots.fill()
            assert len(rows) == len(places) == len(at_slots) > 0 and len(set(places)) == len(places)
            assert not set(places) & set(at) and set(places) <= set(range(num_places))
            for prompt, slot in new:
                assert prompt not in known and slot not in slot_of.values() and 0 <= slot < slots.num_slots
                known.add(prompt)
                slot_of[prompt] = slot
            assert at_slots == [slot_of[prompt_of[row]] for row in rows]
            seated += rows
            at |= zip(places, rows, strict=True)
            # as many as can be: no place, no row or no slot is left
            assert len(at) == num_places or len(seated) == total or len(slot_of) == slots.num_slots
        assert slots.num_waiting == total - len(seated) and len(at) <= num_places
        assert slots.live == {place: slot_of[prompt_of[row]] for place, row in at.items()}
        if not at:
            break
        size = data.draw(st.integers(len(at), num_places))
        batch = slots.batch(size)
        assert len(batch) == len(set(batch)) == size and set(at) == set(batch[: len(at)])
        of_batch = [slots.live[place] for place in batch[: len(at)]]
        assert of_batch == sorted(of_batch) and set(batch) <= set(range(num_places))  # rows of a slot side by side
        gone = data.draw(st.lists(st.sampled_from(sorted(at)), unique=True))
        slots.release(gone)
        ended |= {at.pop(place) for place in gone}
        # A prompt keeps its slot while a row of it lives or waits after others that sat down.
        for prompt in list(slot_of):
            rows = set(dict(prompts)[prompt])
            if rows <= ended:
                del slot_of[prompt]
        if not gone and not slots.may_fill():  # else this might take for ever
            place = min(at)
            slots.release([place])
            row = at.pop(place)
            ended.add(row)
            if set(dict(prompts)[prompt_of[row]]) <= ended:
                del slot_of[prompt_of[row]]
    assert seated == [row for _, rows in prompts for row in rows]  # in order, each once
    assert ended == set(range(total)) and not slots.live and not slots.may_fill()


def test_rows_of_a_prompt_sit_down_at_different_times():
    slots = Slots([(7, range(0, 3)), (3, range(3, 6))], 4)
    assert slots.num_slots == 2 and slots.may_fill()
    assert slots.fill() == ([0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 0, 1], [(7, 0), (3, 1)])
    assert not slots.may_fill() and slots.batch(4) == [0, 1, 2, 3]
    slots.release([3])  # all rows of prompt 3 that sit have ended; two wait, so that its slot is its own
    assert slots.may_fill() and slots.fill() == ([4], [3], [1], [])
    slots.release([0, 1])
    assert slots.fill() == ([5], [1], [1], []) and slots.batch(3) == [2, 1, 3] and slots.batch(4) == [2, 1, 3, 0]
    slots.release([2])
    assert slots.free_slots == [0] and not slots.may_fill()


def test_no_prompts():
    slots = Slots([], 0)
    assert slots.num_slots == 0 and not slots.may_fill() and slots.batch(0) == [] and not slots.live


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
    assert Slots(waiting, places).num_slots == num_slots(num_prompts, places, num_samples)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=9)), min_size=1,
                max_size=12), st.integers(1, 12))
def test_common_starts_cut_every_prompt_once_and_save_tokens(given, places):
    families, prompts = zip(*given, strict=True)
    starts = common_starts(list(prompts), list(families), min(places, len(prompts)))
    if not starts:
        return
    assert sorted(p for _, its in starts for p in its) == list(range(len(prompts)))
    for start, its in starts:
        assert len({families[p] for p in its}) == 1
        assert all(prompts[p][: len(start)] == start and len(prompts[p]) > len(start) > 0 for p in its)
    saved = sum(len(start) * (len(its) - 1) for start, its in starts)
    assert saved >= SHARED * sum(map(len, prompts))


def test_common_starts_of_families():
    prompts, alone = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 8, 9], [7, 8]], [9, 8, 7, 6]
    assert common_starts([*prompts, alone], [0, 0, 1, 1, 2], 5) == [
        ([1, 2, 3], [0, 1]), ([7], [2, 3]), ([9, 8, 7], [4])]  # the last tokens are always their own
    assert common_starts(prompts[:2], [0, 1], 2) == []      # nothing is shared
    assert common_starts([[1, *range(2, 20)], [1, *range(30, 60)]], [0, 0], 2) == []  # one token of 50
    assert common_starts([[1], [1, 2]], [0, 0], 2) == []    # no start, where one is a whole prompt
    # Long starts of one family, long rests of another: beside each other they would hold more than whole prompts.
    long = [[1] * 30 + [2], [1] * 30 + [3], [4] * 4 + [5] * 27, [4] * 4 + [6] * 27]
    assert common_starts(long, [0, 0, 1, 1], 4) == [] != common_starts(long[:2], [0, 0], 2)
    # A large family and many alone: as few slots as the large one needs would leave places empty.
    uneven = [[1] * 9 + [p] for p in range(20)] + [[2, p, *range(9)] for p in range(40)]
    assert common_starts(uneven, [0] * 20 + list(range(1, 41)), 40) == []
    assert common_starts(uneven[:20], [0] * 20, 20) != []
