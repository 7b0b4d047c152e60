"""The changes of a tree, as they are told: a copy made of them equals it, and what cancels is not told."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from umbel.srt.cache.radix_cache import Match, RadixCache
from umbel.srt.cache.slot_allocator import SlotAllocator
from umbel.srt.cache.state_slots import StateSlots
from umbel.srt.cache.tree_journal import MOST_TOLD, TreeJournal
from umbel.srt.core.messages import (
    CacheCleared,
    NodeAdded,
    NodeExtended,
    NodeRemoved,
    NodeSplit,
    NodeTookUp,
)

from ..tree_copy import TreeCopy, nodes_of, read
from .test_radix_cache import Model, Tree, array


class Journalled(Tree):
    """A tree with a journal, and a copy that follows it."""

    def __init__(self, slots: int = 1000, states: int = 3) -> None:
        super().__init__(slots, states)
        self.states = StateSlots(states + 1)
        self.journal = TreeJournal()
        self.cache = RadixCache(self.pool, self.lru, states=self.states, listener=self.journal)
        self.copy = TreeCopy()

    def take(self) -> list[object]:
        """Ends a step → its events, in order; the copy follows them and must equal the tree."""
        messages = self.journal.take()
        for message in messages:
            self.copy.apply(message)
        assert self.copy.nodes() == nodes_of(self.cache)
        assert not self.journal
        return [event for message in messages for event in message.events]


def told(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def test_a_tree_that_did_not_change_tells_nothing() -> None:
    tree = Journalled()
    tree.serve([1, 2, 3])
    tree.take()
    tree.serve([1, 2, 3])
    assert tree.take() == []


def test_nodes_are_told_with_their_parent_and_salt() -> None:
    tree = Journalled()
    tree.serve([1, 2, 3], "a")
    tree.serve([1, 2, 4, 5], "a")
    (first, split, second) = tree.take()
    assert isinstance(first, NodeAdded)
    assert first == NodeAdded(first.id, 0, "a", told([1, 2, 3]))
    assert isinstance(split, NodeSplit)
    assert split == NodeSplit(first.id, split.upper, 2)
    assert isinstance(second, NodeAdded)
    assert second == NodeAdded(second.id, split.upper, "a", told([4, 5]))


def test_an_edge_that_opens_a_namespace_tells_both() -> None:
    tree = Journalled()
    for borders, tokens in (((0, "s@sql"),), [1, 2]), (((1, "s/x"),), [1, 2]):
        match = tree.cache.match(array(tokens), "s", borders)
        tree.cache.lock(match)
        tree.cache.unlock(tree.cache.extend(match, array(tokens), tree.pool.allocate(2), borders=borders))
    whole, shared, private = tree.take()
    assert isinstance(shared, NodeAdded)
    assert (whole.root, whole.parent, whole.salt) == ("s", 0, "s@sql")  # type: ignore[attr-defined]
    assert (shared.root, shared.parent, shared.salt) == (None, 0, "s")
    assert (private.root, private.parent, private.salt) == (None, shared.id, "s/x")  # type: ignore[attr-defined]


def test_a_leaf_that_grows_is_one_event_of_a_step() -> None:
    tree = Journalled()
    match = tree.hold([1, 2])
    match = tree.cache.extend(match, array([3]), tree.pool.allocate(1))
    assert tree.take() == [NodeAdded(match.node.id, 0, "", told([1, 2, 3]))]
    match = tree.cache.extend(match, array([4]), tree.pool.allocate(1))
    match = tree.cache.extend(match, array([5, 6]), tree.pool.allocate(2))
    assert tree.take() == [NodeExtended(match.node.id, told([4, 5, 6]))]


def test_tokens_that_move_up_are_told_by_their_number() -> None:
    tree = Journalled()
    tree.serve([1, 2, 3, 4])
    match = tree.hold([1])
    (child,) = match.node.children.values()
    tree.take()
    after = tree.cache.advance(match, array([1, 2, 3]))
    assert after.node is match.node
    assert tree.take() == [NodeTookUp(match.node.id, child.id, 2)]


def test_a_node_that_came_and_went_within_a_step_is_not_told() -> None:
    tree = Journalled()
    tree.serve([1, 2])
    tree.take()
    match = tree.hold([1, 2, 3])
    tree.cache.unlock(tree.cache.extend(match, array([4]), tree.pool.allocate(1)))
    assert tree.cache.evict(1) == 2
    assert tree.take() == []
    assert tree.journal.cancelled


def test_of_a_leaf_that_grew_and_went_only_the_end_is_told() -> None:
    tree = Journalled()
    match = tree.hold([1, 2])
    tree.take()
    tree.cache.unlock(tree.cache.extend(match, array([3]), tree.pool.allocate(1)))
    tree.cache.evict(1)
    assert tree.take() == [NodeRemoved(match.node.id)]


def test_a_new_leaf_that_was_split_goes_by_its_own_events() -> None:
    tree = Journalled()
    tree.serve([1, 2, 3])
    tree.serve([1, 4])
    tree.cache.evict(4)
    assert [type(event) for event in tree.take()] == [NodeAdded, NodeSplit, NodeRemoved, NodeRemoved]


def test_a_new_leaf_whose_beginning_moved_up_goes_by_its_own_events() -> None:
    tree = Journalled()
    match = tree.hold([1, 2])
    tree.take()
    other = tree.cache.match(array([1, 2]), "")
    tree.cache.lock(other)
    tree.cache.unlock(tree.cache.extend(other, array([3, 4]), tree.pool.allocate(2)))
    match = tree.cache.advance(match, array([1, 2, 3]))
    tree.cache.evict(1)
    assert [type(event) for event in tree.take()] == [NodeAdded, NodeTookUp, NodeRemoved]


def test_a_leaf_that_took_tokens_up_grows_after_that() -> None:
    tree = Journalled()
    match = tree.hold([1])
    other = tree.cache.match(array([1]), "")
    tree.cache.lock(other)
    tree.cache.unlock(tree.cache.extend(other, array([2, 3]), tree.pool.allocate(2)))
    match = tree.cache.advance(match, array([1, 2, 4]))
    tree.cache.evict(1)
    match = tree.cache.extend(match, array([4]), tree.pool.allocate(1))
    assert [type(event) for event in tree.take()] == [NodeAdded, NodeAdded, NodeTookUp, NodeRemoved, NodeExtended]


def test_a_new_leaf_whose_children_came_and_went_comes_and_goes_with_them() -> None:
    tree = Journalled()
    tree.serve([1])
    tree.serve([1, 2])
    tree.serve([1, 3])
    tree.cache.evict(3)
    assert tree.take() == []


def test_a_new_leaf_whose_child_is_told_is_told() -> None:
    tree = Journalled()
    tree.serve([1])
    tree.serve([1, 2, 3])
    tree.serve([1, 2])
    tree.cache.evict(4)
    assert [type(event) for event in tree.take()] == [NodeAdded, NodeAdded, NodeSplit, *[NodeRemoved] * 3]


def test_an_emptied_tree_is_told_in_one_event_whatever_came_before() -> None:
    tree = Journalled()
    tree.serve([1, 2])
    tree.take()
    tree.serve([1, 3])
    tree.pool.clear()
    tree.cache.forget()
    assert tree.take() == [CacheCleared()]


def test_a_snapshot_is_the_whole_tree_with_its_ids() -> None:
    tree = Journalled()
    for tokens, salt in ([1, 2, 3], ""), ([1, 2, 4], ""), ([1], "a"):
        tree.serve(tokens, salt)
    tree.take()
    tree.serve([5])
    tree.journal.snapshot(tree.cache)
    cleared, *nodes = tree.take()
    assert cleared == CacheCleared()
    assert {node.id: read(node.tokens) for node in nodes} == {  # type: ignore[attr-defined]
        number: tokens for number, (_, _, _, tokens) in nodes_of(tree.cache).items()
    }


def test_what_a_frame_could_not_hold_is_several_messages() -> None:
    tree = Journalled(slots=3 * MOST_TOLD // 4)
    size = MOST_TOLD // 4
    for first in range(3):
        tree.serve([first, *range(size - 1)])
    messages = tree.journal.take()
    assert [len(message.events) for message in messages] == [1, 1, 1]
    for message in messages:
        tree.copy.apply(message)
    assert tree.copy.nodes() == nodes_of(tree.cache)


def test_a_tree_without_a_listener_says_nothing_to_anyone() -> None:
    pool = SlotAllocator(9)
    cache = RadixCache(pool)
    match = cache.match(array([1]), "")
    cache.lock(match)
    cache.unlock(cache.extend(match, array([1]), pool.allocate(1)))
    assert cache.clear() == 1


class JournalledModel(Model):
    """The tree's own model, with steps that end at any time, and all other ways to lose nodes."""

    @initialize()
    def start(self) -> None:
        super().start()
        self.tree: Journalled = Journalled(slots=24)

    @rule()
    def end_step(self) -> None:
        self.tree.take()

    @rule()
    def end_step_whose_frame_is_lost(self) -> None:
        self.tree.journal.take()
        self.tree.journal.snapshot(self.tree.cache)

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """A request fails: its path goes, with what others have computed below it."""
        if self.held:
            match, *_ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.tree.cache.unlock(match)
            self._drop(match)

    def _drop(self, match: Match) -> None:
        self.tree.cache.discard(match)
        alive = self.paths()
        self.slots = {key: slot for key, slot in self.slots.items() if key in alive}

    @rule()
    def clear(self) -> None:
        """The cache is flushed."""
        self.tree.cache.clear()
        alive = self.paths()
        self.slots = {key: slot for key, slot in self.slots.items() if key in alive}

    @rule()
    def rebuild(self) -> None:
        """A step failed: pool and tree are emptied."""
        self.tree.pool.clear()
        self.tree.cache.forget()
        self.tree.states.clear()
        self.held.clear()
        self.slots.clear()

    @invariant()
    def a_snapshot_can_be_taken_at_any_time(self) -> None:
        apart = TreeJournal()
        apart.snapshot(self.tree.cache)
        copy = TreeCopy()
        for message in apart.take():
            copy.apply(message)
        assert copy.nodes() == nodes_of(self.tree.cache)

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            self.tree.take()


JournalledModel.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestJournalledModel = JournalledModel.TestCase
