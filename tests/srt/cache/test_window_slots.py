"""Window slots: who has one, which go first, and what `check` finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from umbel.srt.cache.slot_allocator import IntegrityError, SlotAllocator, Slots
from umbel.srt.cache.window_slots import WindowSlots
from umbel.srt.core.batch import WindowPool

REACH = 4


def pools(window_slots: int = 16, slots: int = 60) -> tuple[SlotAllocator, WindowSlots]:
    windows = WindowSlots(slots + 1, WindowPool(window_slots + 1, REACH))
    return SlotAllocator(slots + 1, windows=windows), windows


def at(windows: WindowSlots, *parts: Slots) -> NDArray[np.bool_]:
    """A map of slots: True for those in `parts`."""
    found = windows.none()
    for part in parts:
        found[part] = True
    return found


def reclaim(windows: WindowSlots, count: int, held: tuple[Slots, ...] = (), spared: tuple[Slots, ...] = ()) -> int:
    return windows.reclaim(count, held=at(windows, *held), spared=at(windows, *spared))


def test_slots_come_and_go_with_their_window_slots() -> None:
    pool, windows = pools()
    first, second = pool.allocate(10), pool.allocate(6)
    assert windows.free == 0
    assert sorted([*windows.of(first), *windows.of(second)]) == list(range(1, 17))
    pool.release(first)
    assert windows.free == 10
    assert not windows.of(first).any()
    pool.check([second])


def test_tokens_inside_texts_go_first_then_the_least_recently_used_windows() -> None:
    pool, windows = pools(window_slots=15)
    texts = [pool.allocate(5) for _ in range(3)]
    for text in (texts[1], texts[0]):
        windows.use(text[-3:])
    gone = []
    while windows.free < 15:
        assert reclaim(windows, 1) == 1
        gone.append([int(np.count_nonzero(windows.of(text))) for text in texts])
    assert gone[8] == [3, 3, 0], "the tokens in no window"
    assert gone[11] == [3, 0, 0]
    assert gone[14] == [0, 0, 0]


def test_what_is_held_stays_and_what_is_spared_goes_last() -> None:
    pool, windows = pools(window_slots=15)
    texts = [pool.allocate(5) for _ in range(3)]
    windows.use(texts[2])
    assert reclaim(windows, 99, held=(texts[0], texts[1])) == 5
    assert not windows.of(texts[2]).any()
    assert reclaim(windows, 5, spared=(texts[0],)) == 5
    assert windows.of(texts[0]).all()
    assert reclaim(windows, 1, spared=(texts[0],)) == 1
    assert reclaim(windows, 99, held=tuple(texts)) == 0


def test_some_are_reclaimed_ahead_but_none_of_those_that_are_spared() -> None:
    pool, windows = pools(window_slots=160, slots=400)
    text = pool.allocate(160)
    assert reclaim(windows, 1) == 10, "a sixteenth of the pool"
    rest = text[windows.of(text) != 0]
    assert reclaim(windows, 1, spared=(rest,)) == 1


def test_equal_tokens_give_their_window_slots_to_those_without() -> None:
    pool, windows = pools(window_slots=12)
    cached = pool.allocate(6)
    reclaim(windows, 6)
    windows.attach(cached[4:])
    own = pool.allocate(6)
    before = windows.of(own).copy()
    kept = windows.of(cached[4:]).copy()
    windows.move(own, cached)
    assert np.array_equal(windows.of(cached), [*before[:4], *kept])
    pool.release(own)
    assert windows.free == 12 - 6
    pool.check([cached])


@pytest.mark.parametrize(
    ("present", "usable"),
    [("xxxxxx", 6), ("...xxx", 6), ("....xx", 0), ("xx.xx", 2), ("xx.xxx", 6), ("xx.xxx.x", 6), ("", 0), ("....", 0)],
)
def test_a_prefix_is_usable_where_the_window_before_its_end_is_whole(present: str, usable: int) -> None:
    pool, windows = pools(window_slots=16)
    slots = pool.allocate(len(present))
    windows.detach(slots[[letter == "." for letter in present]])
    assert windows.usable(slots, REACH) == usable


def test_check_finds_maps_that_disagree() -> None:
    pool, windows = pools()
    slots = pool.allocate(5)
    windows._of[slots[0]] = windows._of[slots[1]]
    with pytest.raises(IntegrityError, match="disagree"):
        pool.check([slots])


def test_check_finds_a_window_slot_of_a_free_slot() -> None:
    pool, windows = pools()
    slots = pool.allocate(5)
    pool.release(slots)
    windows.attach(slots[:2])
    with pytest.raises(IntegrityError, match="2 free slots have a window slot"):
        pool.check([])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("arrud"), st.integers(1, 9), st.integers(0, 1 << 30)), max_size=40))
def test_no_slot_is_lost_or_has_two_owners(steps: list[tuple[str, int, int]]) -> None:
    pool, windows = pools(window_slots=20, slots=50)
    texts: list[Slots] = []
    for kind, count, seed in steps:
        chosen = texts[seed % len(texts)] if texts else None
        if kind == "a" and count <= pool.free and count <= windows.free:
            texts.append(pool.allocate(count))
        elif kind == "r":
            held = () if chosen is None else (chosen,)
            before = None if chosen is None else windows.of(chosen).copy()
            free = windows.free
            given_back = reclaim(windows, count, held=held)
            assert windows.free == free + given_back
            assert chosen is None or np.array_equal(windows.of(chosen), before)
        elif kind == "u" and chosen is not None:
            windows.use(chosen[-REACH:])
        elif kind == "d" and chosen is not None:
            pool.release(texts.pop(seed % len(texts)))
        pool.check(texts)
