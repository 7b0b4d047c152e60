"""The tree of all replicas: exact copies of RadixCaches that random requests drive, and sets of prefixes otherwise."""

from collections.abc import Iterable, Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.prompt import Borders, parting
from umbel.srt.cache.radix_cache import Match, RadixCache, Tokens
from umbel.srt.cache.slot_allocator import SlotAllocator, Slots
from umbel.srt.cache.tree_journal import TreeJournal
from umbel.srt.core.messages import (
    CacheEvent,
    NodeAdded,
    NodeExtended,
    NodeRemoved,
    NodeSplit,
    NodeTookUp,
)
from umbel.srt.placement.meta_tree import CopyError, CorruptTreeError, Expectation, MetaTree, packed

SALTS = ["", "a", "ab"]


class Engine:
    """A cache with holders that grow, and the copy of it in a MetaTree."""

    def __init__(self, tree: MetaTree, replica: int, slots: int = 60) -> None:
        self.tree, self.replica = tree, replica
        self.pool = SlotAllocator(slots + 1)
        self.journal = TreeJournal()
        self.cache = RadixCache(self.pool, listener=self.journal)
        self.queue: list[CacheEvent] = []  # of steps that have ended
        self.held: list[tuple[Match, list[int], str, Borders]] = []

    def _slots(self, count: int) -> Slots | None:
        if self.pool.free < count:
            self.cache.evict(count - self.pool.free)
        return self.pool.allocate(count) if self.pool.free >= count else None

    def serve(self, tokens: list[int], salt: str, borders: Borders) -> None:
        """Computes a prompt and goes on holding it."""
        match = self.cache.match(array(tokens), salt, borders)
        self.cache.lock(match)
        rest = array(tokens[match.length :])
        if len(rest):
            slots = self._slots(len(rest))
            if slots is None:
                self.cache.unlock(match)
                return
            match = self.cache.extend(match, rest, slots, borders=borders)
        self.held.append((match, tokens, salt, borders))

    def generate(self, index: int, token: int) -> None:
        """Lets a holder make one more token, which the tree may know."""
        if not self.held:
            return
        index %= len(self.held)
        match, tokens, salt, borders = self.held[index]
        longer = [*tokens, token]
        following = self.cache.advance(match, array(longer), borders)
        self.cache.move_lock(match, following)
        self.held[index] = (following, tokens, salt, borders)
        if following.length < len(longer):
            slots = self._slots(1)
            if slots is None:
                return
            following = self.cache.extend(following, array([token]), slots, borders=borders)
        self.held[index] = (following, longer, salt, borders)

    def make_again(self, tokens: list[int], salt: str, borders: Borders) -> None:
        """Generates a text of which the tree may know a part, token by token."""
        self.serve(tokens[:1], salt, borders)
        for token in tokens[1:]:
            self.generate(len(self.held) - 1, token)

    def release(self, index: int) -> None:
        if self.held:
            self.cache.unlock(self.held.pop(index % len(self.held))[0])

    def clear(self) -> None:
        """Gives everything up, as after a failed step."""
        self.held.clear()
        self.cache.forget()
        self.pool.clear()

    def end_step(self) -> None:
        self.queue.extend(event for message in self.journal.take() for event in message.events)

    def deliver(self) -> None:
        for event in self.queue:
            self.tree.apply(self.replica, event)
        self.queue.clear()

    def nodes(self) -> set[tuple[int, int, str, bytes]]:
        return {
            (node.id, 0 if node.parent.is_root else node.parent.id, node.salt, packed(node.tokens.tolist()))
            for _, node in self.cache.walk()
            if node.parent is not None
        }

    def copied(self) -> set[tuple[int, int, str, bytes]]:
        return {(node.id, node.parent, node.salt, node.tokens) for node in self.tree.nodes_of(self.replica)}


def array(tokens: object) -> Tokens:
    return np.array(tokens, dtype=np.int32)


tokens_lists = st.lists(st.integers(1, 3), min_size=1, max_size=12)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], str, Borders]:
    """Returns tokens, their salt, and up to two private namespaces."""
    tokens, salt = draw(tokens_lists), draw(st.sampled_from(SALTS))
    places = sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=2)))
    name, borders = salt, []
    for place in places:
        name = f"{name}/{draw(st.sampled_from(['x', 'y']))}"
        borders.append((place, name))
    return tokens, salt, tuple(borders)


VERBS = {
    "serve": 9,
    "make_again": 6,
    "generate": 9,
    "release": 6,
    "end_step": 6,
    "deliver": 4,
    "expect": 4,
    "forget": 3,
    "evict": 3,
}
RARE = {"clear": 1, "drop": 1}  # parts of a hundred


def some_sequence(random: Random) -> tuple[list[int], str, Borders]:
    """Returns a sequence that often shares its beginning with others."""
    tokens = [random.choice((1, 1, 2)) for _ in range(random.randint(1, 12))]
    salt = random.choice(("", "", "", "a", "ab"))
    if random.random() < 0.7:
        return tokens, salt, ()
    name, borders = salt, []
    for place in sorted({random.choice((0, 2, 5)) for _ in range(2)}):
        name = f"{name}/{random.choice('xy')}"
        borders.append((place, name))
    return tokens, salt, tuple(borders)


def some_work(random: Random, count: int) -> Iterator[tuple[int, str, object]]:
    for _ in range(count):
        kinds = RARE if random.random() < 0.02 else VERBS
        verb = random.choices(list(kinds), list(kinds.values()))[0]
        what: object = random.randint(0, 9)
        if verb in ("serve", "make_again", "expect"):
            what = some_sequence(random)
        elif verb == "generate":
            what = (random.randint(0, 9), random.choice((1, 1, 2)))
        yield random.randint(0, 2), verb, what


def drive(engines: list[Engine], work: Iterable[tuple[int, str, object]]) -> list[Expectation]:
    """Runs random steps; the copies of engines that were dropped are rebuilt from a snapshot."""
    tree = engines[0].tree
    expected: list[Expectation] = []
    for replica, verb, what in work:
        engine = engines[replica]
        if verb == "serve":
            engine.serve(*what)
        elif verb == "make_again":
            engine.make_again(*what)
        elif verb == "generate":
            engine.generate(*what)
        elif verb == "release":
            engine.release(what)
        elif verb == "end_step":
            engine.end_step()
        elif verb == "deliver":
            engine.deliver()
        elif verb == "expect":
            expected.append(tree.expect(replica, packed(what[0]), what[1], what[2]))
        elif verb == "forget":
            if expected:
                tree.forget(expected.pop(what % len(expected)))
        elif verb == "evict":
            engine.cache.evict(what)
        elif verb == "clear":
            engine.clear()
        elif verb == "drop":
            tree.drop(replica)
            engine.journal.snapshot(engine.cache)
            engine.queue.clear()
        else:
            raise AssertionError(verb)
        tree.check()
    return expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_copies_are_the_trees_of_the_engines(seed: int) -> None:
    random = Random(seed)
    tree = MetaTree()
    engines = [Engine(tree, replica) for replica in range(3)]
    expected = drive(engines, some_work(random, 150))
    for engine in engines:
        engine.end_step()
        engine.deliver()
        tree.check()
        assert engine.copied() == engine.nodes()
        assert tree.tokens_of(engine.replica) == engine.cache.total_tokens
    asked = [some_sequence(random) for _ in range(10)]
    for tokens, salt, borders in [*asked, *(held[1:] for engine in engines for held in engine.held)]:
        known = [engine.cache.peek(array(tokens), salt, borders) for engine in engines]
        assert tree.lengths(packed(tokens), salt, borders, replicas=3).held.tolist() == known
    for expectation in expected:
        tree.forget(expectation)
    for engine in engines:
        tree.drop(engine.replica)
    tree.check()
    assert (tree.nodes, tree.total_tokens) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), sequences(), st.booleans()), max_size=20), sequences())
def test_lengths_are_the_longest_common_prefixes(
    inserted: list[tuple[int, tuple[list[int], str, Borders], bool]], asked: tuple[list[int], str, Borders]
) -> None:
    """Sequences that are held and sequences that calls bring are told apart; namespaces part what tokens share."""
    tree = MetaTree()
    held, coming = [0, 0, 0], [0, 0, 0]
    for replica, (tokens, salt, borders), real in inserted:
        if real:
            tree.insert(replica, packed(tokens), salt, borders)
        else:
            tree.expect(replica, packed(tokens), salt, borders)
        shared = 0
        if salt == asked[1]:
            same = next((i for i, (a, b) in enumerate(zip(tokens, asked[0], strict=False)) if a != b), None)
            shared = parting(borders, asked[2], min(len(tokens), len(asked[0])) if same is None else same)
        held[replica] = max(held[replica], shared if real else 0)
        coming[replica] = max(coming[replica], shared)
        tree.check()
    found = tree.lengths(packed(asked[0]), asked[1], asked[2], replicas=3)
    assert (found.held.tolist(), found.coming.tolist()) == (held, coming)


def test_salts_and_namespaces_share_nothing() -> None:
    tree = MetaTree()
    tokens = packed(range(1, 9))
    tree.insert(0, tokens, "a", ((4, "a/bc"),))
    for salt, borders, shared in [
        ("ab", ((4, "ab/c"),), 0),
        ("a", ((4, "a/b"),), 4),
        ("a", (), 4),
        ("a", ((3, "a/bc"),), 3),
        ("a", ((4, "a/bc"),), 8),
        ("", (), 0),
    ]:
        assert tree.lengths(tokens, salt, borders, replicas=1).held.tolist() == [shared]


def test_an_event_that_does_not_fit_is_named() -> None:
    known = NodeAdded(1, 0, "", packed([1, 2, 3]))
    below = NodeAdded(2, 1, "", packed([4]))
    for event in [
        known,
        NodeAdded(3, 0, "", packed([1, 9])),
        NodeAdded(3, 9, "", packed([1])),
        NodeAdded(3, 0, "", b""),
        NodeAdded(3, 0, "", b"123"),
        NodeExtended(1, packed([9])),
        NodeExtended(9, packed([9])),
        NodeSplit(1, 2, 1),
        NodeSplit(1, 3, 3),
        NodeSplit(1, 3, 0),
        NodeTookUp(1, 2, 1),
        NodeTookUp(2, 1, 1),
        NodeRemoved(1),
        NodeRemoved(9),
    ]:
        tree = MetaTree()
        tree.apply(0, known)
        tree.apply(0, below)
        with pytest.raises(CopyError):
            tree.apply(0, event)
        tree.drop(0)
        tree.check()
        assert tree.nodes == 0


def test_the_check_finds_a_node_that_lost_its_holder() -> None:
    tree = MetaTree()
    tree.insert(0, packed([1, 2]), "")
    tree.insert(1, packed([1, 3]), "")
    tree.check()
    (node,) = tree._roots[""].children.values()
    node.held = 1
    with pytest.raises(CorruptTreeError, match="parent"):
        tree.check()


def test_guessed_holdings_leave_least_recently_used_first() -> None:
    tree = MetaTree()
    for first in range(1, 6):
        tree.insert(0, packed([7, first, first]), "")
        tree.insert(1, packed([7, first, first]), "")
    tree.insert(0, packed([7, 1, 1]), "")
    assert tree.evict(0, 5) == 6
    tree.check()
    left = [int(tree.lengths(packed([7, first, first]), "", replicas=2).held[0]) for first in range(1, 6)]
    assert left == [3, 1, 1, 1, 3]
    assert (tree.tokens_of(0), tree.tokens_of(1)) == (5, 11)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), tokens_lists, st.integers(0, 30)), max_size=30))
def test_evictions_keep_the_tree_whole(work: list[tuple[int, list[int], int]]) -> None:
    tree = MetaTree()
    for replica, tokens, most in work:
        tree.insert(replica, packed(tokens), "")
        before = tree.tokens_of(replica)
        assert before - tree.evict(replica, most) == tree.tokens_of(replica) <= most
        tree.check()


def test_a_join_of_nodes_leaves_as_many_as_forks_need() -> None:
    """Boundaries of one engine part the nodes of another; when it has let go they are one node again."""
    tree = MetaTree()
    tree.apply(0, NodeAdded(1, 0, "", packed(range(100))))
    tree.apply(1, NodeAdded(1, 0, "", packed(range(50))))
    for token in range(50, 90):
        tree.apply(1, NodeAdded(token, token - 1 if token > 50 else 1, "", packed([token])))
    assert tree.nodes == 42
    for token in reversed(range(50, 90)):
        tree.apply(1, NodeRemoved(token))
    tree.apply(1, NodeRemoved(1))
    tree.check()
    assert tree.nodes == 1


def test_a_generated_token_changes_one_node() -> None:
    tree = MetaTree()
    tree.apply(0, NodeAdded(1, 0, "", packed(range(100))))
    before = tree.operations
    for token in range(1000):
        tree.apply(0, NodeExtended(1, packed([token])))
    assert (tree.nodes, tree.tokens_of(0)) == (1, 1100)
    assert tree.operations - before == 1000
