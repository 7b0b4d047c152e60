"""Slots of recurrent states: what is evicted first, what stays, and what `check` finds."""

import numpy as np
import pytest
from umbel.srt.cache.radix_cache import Match, RadixCache, RadixNode
from umbel.srt.cache.slot_allocator import IntegrityError, SlotAllocator
from umbel.srt.cache.state_slots import NO_STATE, StateSlots


class Tree:
    """A radix tree with snapshots, and a sequence of its own for each letter."""

    def __init__(self, states: int = 4) -> None:
        self.slots = StateSlots(states + 1)
        self.pool = SlotAllocator(200)
        self.cache = RadixCache(self.pool, states=self.slots)

    def add(self, letter: int, length: int = 3) -> Match:
        tokens = np.arange(letter * 1000, letter * 1000 + length, dtype=np.int32)
        match = self.cache.match(tokens, "")
        self.cache.lock(match)
        rest = tokens[match.length :]
        longer = self.cache.extend(match, rest, self.pool.allocate(len(rest))) if len(rest) else match
        self.cache.unlock(longer)
        return longer

    def snapshot(self, letter: int) -> RadixNode:
        node = self.add(letter).node
        slot = self.slots.allocate()
        assert slot is not None
        self.slots.put(node, slot)
        return node


def test_slots_are_handed_out_once_and_never_the_zeros() -> None:
    slots = StateSlots(4)
    assert {slots.allocate(), slots.allocate(), slots.allocate()} == {1, 2, 3}
    assert slots.allocate() is None


def test_the_least_recently_used_snapshot_goes_first() -> None:
    tree = Tree(states=3)
    first, second, third = (tree.snapshot(letter) for letter in (1, 2, 3))
    tree.slots.use(first)
    assert tree.slots.allocate() is not None
    assert (first.state, second.state, third.state) == (first.state or -1, NO_STATE, third.state or -1)


def test_locked_snapshots_stay_and_pinned_ones_go_last() -> None:
    tree = Tree(states=3)
    locked, pinned, other = (tree.snapshot(letter) for letter in (1, 2, 3))
    tree.slots.lock(locked)
    tree.cache.pin(tree.add(2))
    assert tree.slots.allocate_spare() is not None
    assert other.state == NO_STATE
    assert tree.slots.allocate_spare() is None, "what is pinned gives way to requests only"
    assert tree.slots.allocate() is not None
    assert pinned.state == NO_STATE
    assert tree.slots.allocate() is None
    assert locked.state != NO_STATE


def test_a_snapshot_can_be_taken_over_by_the_only_one_that_locks_it() -> None:
    tree = Tree()
    node = tree.snapshot(1)
    tree.slots.lock(node)
    tree.slots.lock(node)
    assert tree.slots.take_over(node) is None
    tree.slots.unlock(node)
    slot = tree.slots.take_over(node)
    assert slot is not None
    assert node.state == NO_STATE
    tree.slots.check([slot], [])


def test_evicting_a_node_frees_its_snapshot() -> None:
    tree = Tree()
    tree.snapshot(1)
    tree.cache.evict(1)
    assert tree.slots.snapshots == 0
    tree.slots.check([], [])


def test_a_split_leaves_the_snapshot_at_the_end() -> None:
    tree = Tree()
    node = tree.snapshot(1)
    upper = tree.cache.match(np.array([1000, 1001], dtype=np.int32), "").node
    assert upper is node.parent
    assert upper.state == NO_STATE
    assert node.state != NO_STATE
    tree.cache.check([])


def test_a_node_with_a_snapshot_does_not_grow() -> None:
    tree = Tree()
    match = tree.add(1)
    tree.cache.lock(match)
    slot = tree.slots.allocate()
    assert slot is not None
    tree.slots.put(match.node, slot)
    longer = tree.cache.extend(match, np.array([7], dtype=np.int32), tree.pool.allocate(1))
    assert longer.node.parent is match.node


def test_check_finds_a_state_without_owner_and_one_with_two() -> None:
    tree = Tree()
    node = tree.snapshot(1)
    slot = tree.slots.allocate()
    assert slot is not None
    with pytest.raises(IntegrityError, match="lost or has two owners"):
        tree.slots.check([], [])
    with pytest.raises(IntegrityError, match="lost or has two owners"):
        tree.slots.check([slot, node.state], [])
    tree.slots.check([slot], [])


def test_check_finds_a_lock_and_a_node_that_nothing_explains() -> None:
    tree = Tree()
    node = tree.snapshot(1)
    tree.slots.lock(node)
    with pytest.raises(IntegrityError, match="locks"):
        tree.slots.check([], [])
    tree.slots.unlock(node)
    node.state = NO_STATE
    with pytest.raises(IntegrityError, match="0 nodes have a state, and 1 snapshots"):
        tree.cache.check([])
