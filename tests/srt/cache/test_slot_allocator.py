"""The slot pool conserves its slots."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.srt.cache.slot_allocator import IntegrityError, SlotAllocator
from umbel.srt.core.instruments import FailAt


def test_slots_come_in_ascending_runs_and_never_the_dummy() -> None:
    pool = SlotAllocator(11)
    assert pool.total == pool.free == 10
    assert pool.allocate(4).tolist() == [1, 2, 3, 4]
    assert pool.allocate(6).tolist() == [5, 6, 7, 8, 9, 10]


def test_released_slots_are_merged_into_runs() -> None:
    pool = SlotAllocator(9)
    slots = pool.allocate(8)
    pool.release(slots[[5, 1]])
    pool.release(slots[[3, 2]])
    assert pool.allocate(4).tolist() == [2, 3, 4, 6]


def test_releasing_twice_is_found_at_once() -> None:
    pool = SlotAllocator(5)
    slots = pool.allocate(2)
    pool.release(slots)
    with pytest.raises(IntegrityError, match="released twice"):
        pool.release(slots[:1])


def test_asking_for_more_than_is_free_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="5 slots asked for, 4 are free"):
        SlotAllocator(5).allocate(5)


def test_a_failing_allocation_takes_nothing() -> None:
    pool = SlotAllocator(5, FailAt("memory.allocate", 1, MemoryError("injected")))
    with pytest.raises(MemoryError):
        pool.allocate(2)
    pool.check([])


@pytest.mark.parametrize(
    ("held", "message"), [([[1]], "1 lost, 0 held twice"), ([[1, 2], [2]], "held twice"), ([[0, 1, 2]], "dummy")]
)
def test_check_says_what_is_wrong(held: list[list[int]], message: str) -> None:
    pool = SlotAllocator(5)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match=message):
        pool.check([np.array(slots, dtype=np.int32) for slots in held])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-6, 12), max_size=60))
def test_slots_are_conserved_under_any_order_of_taking_and_giving(moves: list[int]) -> None:
    pool = SlotAllocator(40)
    held: list[np.ndarray] = []
    for move in moves:
        if move >= 0 and move <= pool.free:
            slots = pool.allocate(move)
            assert (np.diff(slots) > 0).all()
            held.append(slots)
        elif move < 0 and held:
            pool.release(held.pop(move % len(held)))
        pool.check(held)
        assert pool.free + sum(map(len, held)) == pool.total
