"""The radix tree against a set of prefixes, and its costs counted."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from umbel.srt.cache.prefix_cache import Seen
from umbel.srt.cache.radix_cache import (
    MOST_GROWN,
    Borders,
    LeastRecentlyUsed,
    Match,
    RadixCache,
    RadixNode,
    common_length,
    shared_length,
)
from umbel.srt.cache.slot_allocator import IntegrityError, SlotAllocator
from umbel.srt.cache.state_slots import StateSlots

SALTS = ["", "a", "b"]


def array(tokens: object) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


class Tree:
    """A cache and its pool with one verb for what a request does."""

    def __init__(self, slots: int = 1000, states: int = 3) -> None:
        self.pool = SlotAllocator(slots + 1)
        self.lru = LeastRecentlyUsed()
        self.states = StateSlots(states + 1)
        self.cache = RadixCache(self.pool, self.lru, states=self.states)

    def hold(self, tokens: list[int], salt: str = "", *, priority: int = 0) -> Match:
        """Computes what is missing and keeps the lock."""
        match = self.cache.match(array(tokens), salt)
        self.cache.lock(match)
        rest = array(tokens[match.length :])
        if len(rest):
            match = self.cache.extend(match, rest, self.pool.allocate(len(rest)), priority=priority)
        return match

    def serve(self, tokens: list[int], salt: str = "", *, priority: int = 0) -> None:
        self.cache.unlock(self.hold(tokens, salt, priority=priority))

    def shape(self) -> list[tuple[int, list[int]]]:
        return [(depth, node.tokens.tolist()) for depth, node in self.cache.walk()]


def test_a_partial_match_splits_the_node() -> None:
    tree = Tree()
    tree.serve([1, 2, 3, 4])
    tree.serve([1, 2, 9])
    assert tree.shape() == [(0, [1, 2]), (1, [3, 4]), (1, [9])]


def test_a_holder_grows_its_own_leaf_and_a_later_one_appends_a_node() -> None:
    tree = Tree()
    match = tree.hold([1, 2])
    match = tree.cache.extend(match, array([3]), tree.pool.allocate(1))
    tree.cache.unlock(match)
    tree.serve([1, 2, 3, 4])
    assert tree.shape() == [(0, [1, 2, 3]), (1, [4])]


def test_a_session_adds_no_node_with_each_call() -> None:
    tree = Tree(slots=3000)
    text = list(range(1, 3001))
    for end in range(10, 3001, 10):
        tree.serve(text[:end])
        tree.cache.check([])
    depths = [len(tokens) for _, tokens in tree.shape()]
    assert depths == [10, 10, MOST_GROWN + 6, MOST_GROWN + 6, 920]
    assert tree.cache.peek(array(text), "") == 3000


def test_a_session_grows_no_leaf_that_is_held_kept_or_not_alone() -> None:
    def session(priority: int = 0) -> Tree:
        tree = Tree()
        for end in (2, 4, 6):
            tree.serve(list(range(1, end + 1)), priority=priority)
        return tree

    longer = list(range(1, 9))
    tree = session()
    tree.serve(longer)
    assert [len(tokens) for _, tokens in tree.shape()] == [2, 2, 4]
    for hold in ("lock", "pin", "keep"):
        tree = session()
        match = tree.cache.match(array(longer), "")
        getattr(tree.cache, hold)(match)
        tree.serve(longer)
        assert [len(tokens) for _, tokens in tree.shape()] == [2, 2, 2, 2], hold
    tree = session()
    tree.serve(longer, priority=1)
    assert [len(tokens) for _, tokens in tree.shape()] == [2, 2, 2, 2], "priority"
    tree = session()
    tree.serve([1, 2, 9])
    tree.serve(longer)
    assert [len(tokens) for _, tokens in tree.shape()] == [2, 2, 2, 2, 1], "a branch"


def test_a_leaf_that_somebody_else_holds_does_not_grow_under_him() -> None:
    tree = Tree()
    mine = tree.hold([1, 2])
    theirs = tree.cache.match(array([1, 2]), "")
    tree.cache.lock(theirs)
    longer = tree.cache.extend(mine, array([3]), tree.pool.allocate(1))
    assert theirs.slots().tolist() == longer.slots().tolist()[:2]
    tree.cache.unlock(longer)
    tree.cache.check([theirs])


def test_locks_last_use_and_priority_survive_a_split() -> None:
    tree = Tree()
    held = tree.hold([1, 2, 3, 4], priority=3)
    before = held.slots().tolist()
    tree.cache.match(array([1, 2]), "")
    upper = held.node.parent
    assert upper is not None
    assert (upper.locks, upper.priority, upper.tokens.tolist()) == (1, 3, [1, 2])
    assert held.slots().tolist() == before
    assert held.slots(start=1).tolist() == before[1:]
    tree.cache.check([held])
    tree.cache.unlock(held)
    tree.cache.check([])


def again(tree: Tree, text: list[int], start: int) -> Match:
    """A text that is known is generated once more: its holder goes on a token at a time."""
    match = tree.cache.match(array(text[:start]), "")
    tree.cache.lock(match)
    for end in range(start + 1, len(text) + 1):
        following = tree.cache.advance(match, array(text[:end]))
        tree.cache.move_lock(match, following)
        match = following
        tree.cache.check([match])
    return match


def test_a_text_that_is_generated_again_leaves_no_node_for_each_token() -> None:
    tree = Tree()
    text = list(range(10, 30))
    first = tree.hold(text)
    slots = first.slots().tolist()
    tree.cache.unlock(first)
    match = again(tree, text[:18], 4)
    assert tree.shape() == [(0, text[:18]), (1, text[18:])]
    assert (match.length, match.slots().tolist()) == (18, slots[:18])
    tree.cache.unlock(match)
    tree.cache.check([])


@pytest.mark.parametrize("who", ["another holder", "a pin", "another text"])
def test_a_boundary_that_is_somebodys_stays(who: str) -> None:
    tree = Tree()
    text = list(range(10, 20))
    tree.serve(text)
    boundary = tree.cache.match(array(text[:4]), "")
    held = []
    if who == "another holder":
        tree.cache.lock(boundary)
        held = [boundary]
    elif who == "a pin":
        tree.cache.pin(boundary)
    else:
        tree.serve([*text[:4], 99])
    match = tree.cache.match(array(text[:4]), "")
    tree.cache.lock(match)
    following = tree.cache.advance(match, array(text[:6]))
    tree.cache.move_lock(match, following)
    assert (0, text[:4]) in tree.shape()
    assert (1, text[4:6]) in tree.shape()
    assert boundary.slots().tolist() == following.slots().tolist()[:4]
    if who == "a pin":
        tree.cache.unpin(boundary)
    tree.cache.check([*held, following])


def test_a_match_names_its_path_root_first() -> None:
    tree = Tree()
    tree.serve([1, 2, 3, 4])
    match = tree.hold([1, 2, 5])
    assert [step[1:] for step in match.path] == [(0, 2), (2, 1)]
    assert [step[0] for step in match.path] == [match.node.parent.id, match.node.id]


def test_peek_changes_nothing() -> None:
    tree = Tree()
    tree.serve([1, 2, 3, 4])
    tree.serve([7, 7])
    assert (tree.cache.peek(array([1, 2, 9]), ""), tree.cache.peek(array([1]), "other")) == (2, 0)
    assert tree.shape() == [(0, [1, 2, 3, 4]), (0, [7, 7])]
    tree.cache.evict(1)
    assert tree.shape() == [(0, [7, 7])], "a peek is not a use"


def test_least_recently_used_leaves_go_first_and_parents_after_their_children() -> None:
    tree = Tree()
    for tokens in ([1, 2, 3], [1, 2, 4], [8, 8]):
        tree.serve(tokens)
    tree.serve([1, 2, 3])
    assert tree.cache.evict(1) == 1
    assert tree.shape() == [(0, [1, 2]), (1, [3]), (0, [8, 8])]
    assert tree.cache.evict(3) == 3
    assert tree.shape() == [(0, [1, 2])]
    assert tree.cache.evict(100) == 2
    assert tree.pool.free == tree.pool.total


def test_lower_priority_is_evicted_first() -> None:
    tree = Tree()
    tree.serve([1, 1], priority=1)
    tree.serve([2, 2], priority=0)
    tree.cache.evict(1)
    assert tree.shape() == [(0, [1, 1])]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.sampled_from(SALTS)), max_size=12),
    st.integers(1, 9),
)
def test_a_survey_has_the_latest_branches_and_no_node_without_its_parent(
    texts: list[tuple[list[int], str]], most: int
) -> None:
    tree = Tree()
    for tokens, salt in texts:
        tree.serve(tokens, salt)
    everything = {node.id for _, node in tree.cache.walk()}
    whole, _ = tree.cache.survey(len(everything) + 1)
    assert {node.id for node in whole} == everything
    found, now = tree.cache.survey(most)
    assert found == whole[:most]
    seen: set[int] = set()
    for node in found:
        assert node.parent is not None
        assert node.parent.is_root or node.parent.id in seen
        assert node.last_use <= now
        seen.add(node.id)
    tops = [node for node in whole if node.parent is not None and node.parent.is_root]
    assert [node.last_use for node in tops] == sorted((node.last_use for node in tops), reverse=True)


def test_of_nodes_used_together_the_largest_comes_first_in_a_survey() -> None:
    tree = Tree()
    tree.serve([1, 2, 3, 4, 5])
    tree.serve([1, 9])
    tree.cache.match(array([1, 2, 3, 4, 5]), "")
    found, _ = tree.cache.survey(2)
    assert [node.tokens.tolist() for node in found] == [[1], [2, 3, 4, 5]]


def test_locked_paths_stay() -> None:
    tree = Tree()
    tree.serve([1, 2, 9])
    held = tree.hold([1, 2, 3])
    assert tree.cache.evict(100) == 1
    assert tree.cache.clear() == 0
    assert tree.shape() == [(0, [1, 2]), (1, [3])]
    tree.cache.unlock(held)
    assert tree.cache.clear() == 3


def test_another_salt_never_hits_and_the_same_one_always_does() -> None:
    """Reliability note I1: 500 pairs, those among them that joined strings would confuse."""
    pairs = [
        ("a", "bc"),
        ("ab", "c"),
        ("", "0"),
        ("x/y", "x"),
        *((f"tenant-{i}", f"tenant-{i + 1}") for i in range(496)),
    ]
    for mine, theirs in pairs:
        tree = Tree(slots=8)
        tree.serve([1, 2, 3], mine)
        assert (tree.cache.peek(array([1, 2, 3]), theirs), tree.cache.peek(array([1, 2, 3]), mine)) == (0, 3)


def test_an_empty_salt_leaves_nothing_behind() -> None:
    tree = Tree()
    for salt in ("a", "b", "c"):
        tree.serve([1, 2], salt)
        tree.cache.unlock(tree.hold([], salt))
    tree.cache.clear()
    tree.cache.unlock(tree.hold([], "d"))
    assert tree.cache._roots == {}, "salts come from callers and must not pile up"


def test_check_finds_a_lock_that_nobody_holds() -> None:
    tree = Tree()
    tree.hold([1, 2])
    with pytest.raises(IntegrityError, match="1 locks"):
        tree.cache.check([])


def test_check_finds_a_missing_token() -> None:
    tree = Tree()
    held = tree.hold([1, 2])
    held.node.tokens = held.node.tokens[:1]
    with pytest.raises(IntegrityError, match="1 tokens and 2 slots"):
        tree.cache.check([held])


def test_eviction_costs_a_logarithm_not_a_walk() -> None:
    """Queue operations, each O(log n), stay proportional to evictions and uses, however large the tree is."""
    per_eviction = {}
    for leaves in (50, 800):
        tree = Tree(slots=4 * leaves)
        for i in range(leaves):
            tree.serve([i, 1])
        before = tree.cache.eviction.operations
        for _ in range(40):
            tree.cache.evict(2)
        per_eviction[leaves] = (tree.cache.eviction.operations - before) / 40
    assert per_eviction == {50: 1.0, 800: 1.0}


def test_uses_cost_at_most_one_more_queue_entry_each() -> None:
    tree = Tree(slots=1000)
    for i in range(100):
        tree.serve([i, 1])
    before = tree.cache.eviction.operations
    for _ in range(5):
        for i in range(100):
            tree.serve([i, 1])
    assert tree.cache.eviction.operations == before, "a node has one entry, corrected when it is taken"
    tree.cache.evict(2)
    assert tree.cache.eviction.operations - before <= 2 * 100 + 1
    assert len(tree.lru) <= 100


def test_the_queue_stays_small_and_cheap_over_many_operations() -> None:
    """A request pushes its leaf once and pops it once at its eviction; one use more is one correction more."""
    dice = np.random.default_rng(0)
    per_request = {}
    for families in (10, 100):
        tree = Tree(slots=200 * families)
        stems = dice.integers(0, 9, (families, 12))
        held: list[Match] = []
        for _ in range(3000):
            tokens = [*stems[dice.integers(families)].tolist(), *dice.integers(0, 99, 6).tolist()]
            tree.cache.evict(max(0, len(tokens) - tree.pool.free))
            held.append(tree.hold(tokens))
            if len(held) > 8:
                tree.cache.unlock(held.pop(int(dice.integers(8))))
        tree.cache.check(held)
        per_request[families] = tree.cache.eviction.operations / 3000
        assert len(tree.lru) <= sum(1 for _ in tree.cache.walk())
    assert max(per_request.values()) < 3, "whatever the size of the tree"


def test_a_path_changes_only_with_a_split() -> None:
    tree = Tree()
    held = tree.hold([1, 2, 3, 4])
    before = tree.cache.splits
    tree.serve([8, 8])
    tree.cache.evict(2)
    assert tree.cache.splits == before
    path = held.path
    tree.serve([1, 2, 9])
    assert tree.cache.splits == before + 1
    assert [step[1:] for step in path] == [(0, 4)]
    assert [step[1:] for step in held.path] == [(0, 2), (2, 2)]


@pytest.mark.parametrize(("left", "right", "shared"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1)])
def test_common_length(left: list[int], right: list[int], shared: int) -> None:
    assert common_length(array(left), array(right)) == shared


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        ((), (), 5),
        (((2, "/x"),), ((2, "/x"),), 5),
        (((2, "/x"),), (), 2),
        (((2, "/x"),), ((2, "/y"),), 2),
        (((2, "/x"),), ((3, "/x"),), 2),
        (((2, "/x"), (4, "/x/y")), ((2, "/x"),), 4),
        (((9, "/x"),), ((9, "/y"),), 5),
    ],
)
def test_sequences_share_nodes_up_to_borders_that_differ(left: Borders, right: Borders, shared: int) -> None:
    tokens = array([1, 2, 3, 4, 5])
    assert shared_length(tokens, left, tokens, right) == shared_length(tokens, right, tokens, left) == shared
    tree = Tree()
    match = tree.cache.match(tokens, "", left)
    tree.cache.lock(match)
    tree.cache.extend(match, tokens, tree.pool.allocate(5), borders=left)
    assert tree.cache.peek(tokens, "", right) == shared


@pytest.mark.parametrize(
    ("before", "after", "lengths"),
    [
        ([(0, 1, 1, 5)], [(0, 1, 2)], (2, 3)),  # where they part the node is split
        ([(0, 1, 1, 5)], [(0, 1), (0, 9)], (2, 2)),  # the same, and before that
        ([(0, 1, 2, 3, 4)], [(0, 1)], (5, 5)),
        ([(0, 1)], [(0, 1, 2)], (2, 3)),
        ([(0, 1)], [(0, 1, 2, 3), (0, 1, 2, 9)], (2, 4)),
        ([(7,)], [(0, 1, 2)], (0, 3)),
    ],
)
def test_a_prefix_is_looked_for_from_where_it_ended(
    before: list[tuple[int, ...]], after: list[tuple[int, ...]], lengths: tuple[int, int]
) -> None:
    tree, seen, asked = Tree(), Seen(), array([0, 1, 2, 3, 4])
    for texts, length in zip((before, after), lengths, strict=True):
        for text in texts:
            match = tree.cache.match(array(text), "")
            tree.cache.lock(match)
            if match.length < len(text):
                rest = array(text[match.length :])
                match = tree.cache.extend(match, rest, tree.pool.allocate(len(rest)))
            tree.cache.unlock(match)
        assert tree.cache.peek(asked, "", (), seen) == tree.cache.peek(asked, "") == length
    assert seen.resumed is (lengths[0] > 0)
    tree.cache.evict(tree.pool.total)
    assert tree.cache.peek(asked, "", (), seen) == 0
    assert not seen.resumed


Sequence = tuple[tuple[str, int], ...]  # (namespace, token); the namespace of the first one's parent is the salt


def named(tokens: tuple[int, ...], salt: str, borders: Borders) -> Sequence:
    """Returns each token with its namespace."""
    spaces = [([salt] + [name for place, name in borders if place <= i])[-1] for i in range(len(tokens))]
    return tuple(zip(spaces, tokens, strict=True))


class Model(RuleBasedStateMachine):
    """The tree against a dictionary: (salt, prefix of tokens with their namespaces) → slot of its last token."""

    @initialize()
    def start(self) -> None:
        self.tree = Tree(slots=60)
        self.slots: dict[tuple[str, Sequence], int] = {}
        self.held: list[tuple[Match, str, tuple[int, ...], Borders]] = []
        self.snapshots: dict[int, tuple[int, ...]] = {}  # slot of a state → the tokens that it has taken
        self.seen: dict[tuple[tuple[int, ...], str, Borders], Seen] = {}

    sequences = st.lists(st.integers(0, 2), max_size=9).map(tuple)
    salts = st.sampled_from(SALTS)
    # None, one or two borders, the second inside of the first; the tenants' names are few, so they meet again.
    private = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("xy")), max_size=2, unique_by=lambda each: each[0])

    @staticmethod
    def borders(salt: str, private: list[tuple[int, str]]) -> Borders:
        names = itertools.accumulate((tenant for _, tenant in sorted(private)), "{}/{}".format, initial=salt)
        return tuple(zip(sorted(place for place, _ in private), itertools.islice(names, 1, None), strict=True))

    def known(self, salt: str, sequence: Sequence) -> int:
        length = 0
        while length < len(sequence) and (salt, sequence[: length + 1]) in self.slots:
            length += 1
        return length

    @rule(tokens=sequences, salt=salts, private=private)
    def peek(self, tokens: tuple[int, ...], salt: str, private: list[tuple[int, str]]) -> None:
        borders = self.borders(salt, private)
        known = self.known(salt, named(tokens, salt, borders))
        assert self.tree.cache.peek(array(tokens), salt, borders) == known
        seen = self.seen.setdefault((tokens, salt, borders), Seen())
        assert self.tree.cache.peek(array(tokens), salt, borders, seen) == known

    @invariant()
    def is_found_from_where_it_was_seen(self) -> None:
        """Each sequence that was looked for is found as from the root, and so is one that it has become since."""
        for (tokens, salt, borders), seen in self.seen.items():
            known = self.known(salt, named(tokens, salt, borders))
            longer = replace(seen)
            assert self.tree.cache.peek(array(tokens), salt, borders, seen if len(tokens) % 2 else longer) == known
            after = (*tokens, 1)
            whole = self.known(salt, named(after, salt, borders))
            assert self.tree.cache.peek(array(after), salt, borders, longer) == whole

    @rule(tokens=sequences, salt=salts, private=private, priority=st.integers(0, 1))
    def compute(self, tokens: tuple[int, ...], salt: str, private: list[tuple[int, str]], priority: int) -> None:
        cache, pool = self.tree.cache, self.tree.pool
        borders = self.borders(salt, private)
        sequence = named(tokens, salt, borders)
        match = cache.match(array(tokens), salt, borders)
        assert match.length == self.known(salt, sequence)
        assert match.slots().tolist() == [self.slots[salt, sequence[: i + 1]] for i in range(match.length)]
        cache.lock(match)
        rest = tokens[match.length :]
        if len(rest) > pool.free:
            self.evict(len(rest) - pool.free)
        if len(rest) > pool.free:
            cache.unlock(match)
            return
        if rest:
            slots = pool.allocate(len(rest))
            for i, slot in enumerate(slots.tolist()):
                self.slots[salt, sequence[: match.length + i + 1]] = slot
            match = cache.extend(match, array(rest), slots, borders=borders, priority=priority)
        self.held.append((match, salt, tokens, borders))

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=3), data=st.data())
    def go_on(self, tokens: list[int], data: st.DataObject) -> None:
        """A holder computes more tokens, as decoding and the next chunk of a prompt do."""
        if not self.held or self.tree.pool.free < len(tokens):
            return
        index = data.draw(st.integers(0, len(self.held) - 1))
        match, salt, before, borders = self.held[index]
        cache, after = self.tree.cache, (*before, *tokens)
        sequence = named(after, salt, borders)
        reached = cache.advance(match, array(after), borders)
        cache.move_lock(match, reached)
        assert reached.length == self.known(salt, sequence)
        if reached.length < len(after):
            slots = self.tree.pool.allocate(len(after) - reached.length)
            for i, slot in enumerate(slots.tolist()):
                self.slots[salt, sequence[: reached.length + i + 1]] = slot
            reached = cache.extend(reached, array(after[reached.length :]), slots, borders=borders)
        self.held[index] = (reached, salt, after, borders)

    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        """A holder leaves a snapshot somewhere on its path."""
        if not self.held:
            return
        match, salt, tokens, borders = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        place = data.draw(st.integers(0, match.length))
        node = self.tree.cache.match(array(tokens[:place]), salt, borders).node
        if not node.is_root and not node.state:
            slot = self.tree.states.allocate()
            assert slot is not None, "nothing locks a snapshot here"
            self.tree.states.put(node, slot)
            self.snapshots[slot] = tokens[:place]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            match, *_ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.tree.cache.unlock(match)

    @rule(count=st.integers(1, 20))
    def evict(self, count: int) -> None:
        evictable = self.tree.cache.evictable_tokens
        given = self.tree.cache.evict(count)
        assert given >= min(count, evictable)
        alive = self.paths()
        self.slots = {key: slot for key, slot in self.slots.items() if key in alive}
        for _, salt, tokens, borders in self.held:
            sequence = named(tokens, salt, borders)
            assert self.known(salt, sequence) == len(tokens), "a held prefix was evicted"

    def paths(self) -> set[tuple[str, Sequence]]:
        """Every (salt, prefix) in the tree."""
        found = set()
        stack: list[Sequence] = []
        for depth, node in self.tree.cache.walk():
            del stack[depth:]
            prefix = stack[-1] if stack else ()
            for token in node.tokens.tolist():
                prefix = (*prefix, (node.salt, token))
                found.add((node.root.salt, prefix))
            stack.append(prefix)
        return found

    @invariant()
    def whole(self) -> None:
        cache, pool = self.tree.cache, self.tree.pool
        cache.check([match for match, *_ in self.held])
        pool.check([node.slots for _, node in cache.walk()])
        assert self.paths() == set(self.slots)
        assert pool.free + cache.total_tokens == pool.total
        held = {
            (salt, named(tokens, salt, borders)[: i + 1])
            for _, salt, tokens, borders in self.held
            for i in range(len(tokens))
        }
        assert cache.evictable_tokens <= cache.total_tokens - len(held)

    @invariant()
    def snapshots_are_where_they_were_taken(self) -> None:
        self.tree.states.check([], [])
        stack: list[tuple[int, ...]] = []
        for depth, node in self.tree.cache.walk():
            del stack[depth:]
            stack.append((*(stack[-1] if stack else ()), *node.tokens.tolist()))
            assert not node.state or self.snapshots[node.state] == stack[-1]


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase


class NewestFirst:
    """A fake: the leaf that became evictable last goes first. `operations` counts nothing here."""

    operations = 0

    def __init__(self) -> None:
        self._nodes: dict[int, RadixNode] = {}

    def add(self, node: RadixNode) -> None:
        self._nodes.pop(node.id, None)
        self._nodes[node.id] = node

    def pop(self) -> RadixNode | None:
        while self._nodes:
            _, node = self._nodes.popitem()
            if node.evictable:
                return node
        return None

    def knows(self, node: RadixNode) -> bool:
        return node.id in self._nodes

    def clear(self) -> None:
        self._nodes.clear()


def serve(cache: RadixCache, pool: SlotAllocator, tokens: list[int]) -> None:
    sequence = np.array(tokens, dtype=np.int32)
    match = cache.match(sequence, "")
    cache.lock(match)
    missing = len(sequence) - match.length
    if missing:
        cache.evict(missing - pool.free)
        match = cache.extend(match, sequence[match.length :], pool.allocate(missing))
    cache.unlock(match)


def left_after_one_eviction(cache: RadixCache, pool: SlotAllocator) -> list[list[int]]:
    for tokens in ([1, 1], [2, 2], [3, 3]):
        serve(cache, pool, tokens)
    cache.evict(1)
    return sorted(node.tokens.tolist() for _, node in cache.walk())


def test_the_policy_says_which_leaf_goes() -> None:
    pool = SlotAllocator(20)
    assert left_after_one_eviction(RadixCache(pool, LeastRecentlyUsed()), pool) == [[2, 2], [3, 3]]
    pool = SlotAllocator(20)
    assert left_after_one_eviction(RadixCache(pool, NewestFirst()), pool) == [[1, 1], [2, 2]]


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), max_size=20), size=st.integers(6, 20))
def test_tree_and_pool_agree_under_any_policy(batch: list[list[int]], size: int) -> None:
    pool = SlotAllocator(size + 1)
    cache = RadixCache(pool, NewestFirst())
    for tokens in batch:
        serve(cache, pool, tokens)
        cache.check([])
        pool.check([node.slots for _, node in cache.walk()])
    cache.clear()
    assert (cache.total_tokens, pool.free) == (0, size)


def test_a_node_knows_the_pool_of_its_slots() -> None:
    pool = SlotAllocator(20)
    cache = RadixCache(pool)
    serve(cache, pool, [1, 2, 3])
    serve(cache, pool, [1, 2, 9])
    assert {node.pool for _, node in cache.walk()} == {pool}


# ------------------------------------------------------------------------------------------ memory


def owned(array_: np.ndarray) -> int:
    """Returns the length of the array that this one keeps alive."""
    return len(array_ if array_.base is None else array_.base)


@settings(max_examples=20)
@given(st.data())
def test_nodes_keep_at_most_twice_the_memory_of_their_tokens(data: st.DataObject) -> None:
    """However often long prompts are split, and whatever of them was evicted since."""
    tree = Tree(200)
    for _ in range(data.draw(st.integers(1, 12))):
        head = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        tail = list(range(3, 3 + data.draw(st.integers(0, 90))))
        tokens = head + tail
        tree.cache.evict(max(0, len(tokens) - tree.pool.free))
        tree.serve(tokens)
    for _, node in tree.cache.walk():
        assert owned(node.tokens) <= 2 * len(node.tokens)
        assert owned(node.slots) <= 2 * len(node.slots)


def test_what_is_left_of_evicted_prompts_does_not_keep_all_of_them() -> None:
    tree = Tree(1_000)
    for number in range(50):
        tree.serve([number, *range(100, 900)])
        for other in range(number + 1):
            tree.serve([other, 1_000])  # splits the prompt after its first token, and was used last
        tree.cache.evict(900 - tree.pool.free)
    assert tree.cache.total_tokens == 100
    assert sum(owned(node.tokens) for _, node in tree.cache.walk()) == 100


def test_discarded_nodes_do_not_pile_up_in_the_queue_of_evictions() -> None:
    tree = Tree(10)
    for number in range(5_000):
        match = tree.hold([number, 1, 2])
        tree.cache.unlock(match)
        tree.cache.discard(match)
    assert len(tree.lru) <= 1_024
    tree.serve([1, 2, 3])
    assert tree.cache.evict(3) == 3


def test_ten_thousand_salts_leave_roots_for_what_is_cached_only() -> None:
    tree = Tree(100)
    for number in range(10_000):
        tree.cache.evict(max(0, 4 - tree.pool.free))
        tree.serve([1, 2, 3], f"salt {number}")
        tree.cache.peek(array([1, 2]), f"never {number}")
    assert len(tree.cache._roots) == len(tree.shape()) <= 34
    tree.cache.clear()
    assert not tree.cache._roots
