"""Caches prefixes: maps token sequences to KV slots in a radix tree (the paper's section 3, RadixAttention).

A node owns a run of tokens and the slots of their keys and values; children are keyed by their first token.
Locked nodes (lock count > 0) are never evicted; a lock covers the whole path, so ancestors have at least the
locks of their children. Pins and keeps do the same without a request. They are counted separately: pins can be taken
back when a request finds no room, keeps cannot (kv_manager.py). An EvictionPolicy chooses the next leaf to evict when
the pool runs out.

    root(salt) ── "You are helpful." ─┬─ "Hello" ── "Hi!"          every salt has a root of its own:
                                      ├─ "What is 2+2?"            two salts never share a node
                                      ├▶ salt/acme   "Hello"       an edge that opens a private namespace: found
                                      └▶ salt/globex "Hello"       by its name and its first token

Models with a recurrent state have snapshots of it at nodes: the state after the last token of the node. A state
cannot be cut, so the end of such a node never moves; state_slots.py has the slots and their own order of eviction.

A sequence may have borders: places of tokens from which on it lies in a private namespace. Before the first border all
sequences of a salt share nodes; after it only those with the same borders do.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ...lang.prompt import Borders, parting
from .prefix_cache import PrefixCache, Seen, SlotPool
from .slot_allocator import IdleCheck, IntegrityError, SlotAllocator, Slots, require_node
from .state_slots import NO_STATE, StateSlots

Tokens = NDArray[np.int32]
_Edge = int | tuple[str, int]  # the key of a child: its first token, with its namespace where the edge opens that


class RadixNode:
    """One edge of the tree with the node it leads to. Changed only by RadixCache."""

    __slots__ = (
        "children",
        "id",
        "keeps",
        "last_use",
        "locks",
        "parent",
        "pins",
        "pool",
        "priority",
        "root",
        "salt",
        "slots",
        "state",
        "tokens",
        "tree",
    )

    def __init__(
        self,
        tree: PrefixCache,
        node_id: int,
        salt: str,
        parent: RadixNode | None,
        tokens: Tokens,
        slots: Slots,
        pool: SlotPool,
    ) -> None:
        self.tree = tree
        self.id = node_id
        self.salt = salt  # the namespace: that of its root, or a private one below
        self.parent = parent  # None: a root, or no longer in the tree
        self.root: RadixRoot = parent.root if parent is not None else cast(RadixRoot, self)
        self.tokens = tokens
        self.slots = slots  # of the pool in `place`
        self.pool = pool
        self.children: dict[_Edge, RadixNode] = {}
        self.locks = 0
        self.pins = 0
        self.keeps = 0
        self.last_use = 0
        self.priority = 0  # lower ones are evicted first
        self.state = NO_STATE  # slot of the snapshot at its end; changed only by StateSlots

    @property
    def is_root(self) -> bool:
        return not len(self.tokens)

    @property
    def opens(self) -> bool:
        """Returns whether the edge to it opens a namespace."""
        return self.parent is not None and self.parent.salt != self.salt

    @property
    def edge(self) -> _Edge:
        """The key of the node among its parent's children."""
        first = int(self.tokens[0])
        return (self.salt, first) if self.opens else first

    @property
    def held(self) -> bool:
        """Returns whether a request, a pin or a keep holds the node."""
        return bool(self.locks or self.pins or self.keeps)

    @property
    def evictable(self) -> bool:
        return not self.held and not self.children and self.parent is not None


class RadixRoot(RadixNode):
    """The root of a salt. It counts what the salt has in the pool, private parts included.

    Attributes:
        cached: tokens in nodes of the tree.
        held_tokens: those of nodes with a lock, a pin or a keep.
        kept_tokens: those of nodes with a keep.
        private_slots: slots of running requests that are not in the tree yet; their owner counts them.
        leaves: the salt's own order of eviction; None where only the order of all is asked for.
    """

    __slots__ = ("cached", "held_tokens", "kept_tokens", "leaves", "private_slots")

    def __init__(self, tree: PrefixCache, node_id: int, salt: str, pool: SlotPool, *, ordered: bool) -> None:
        super().__init__(tree, node_id, salt, None, _NO_TOKENS, _NO_TOKENS, pool)
        self.cached = self.held_tokens = self.kept_tokens = self.private_slots = 0
        self.leaves = LeastRecentlyUsed() if ordered else None

    @property
    def owned(self) -> int:
        """Slots of the salt."""
        return self.cached + self.private_slots

    @property
    def evictable_tokens(self) -> int:
        return self.cached - self.held_tokens


class EvictionPolicy(Protocol):
    """Decides the order in which leaves are evicted. The implementation is `LeastRecentlyUsed`.

    The tree owns the nodes. It adds a leaf that nothing holds, and pops the next leaf to remove. A leaf that is locked,
    grows children or is used after it was added stays in the policy: `pop` skips leaves that are not evictable.
    """

    operations: int  # cumulative, each of O(log n) at most; tests bound them by the number of uses and evictions

    def add(self, node: RadixNode) -> None:
        """Adds a node that has become evictable. The policy may have it already."""

    def pop(self) -> RadixNode | None:
        """Removes and returns the next evictable node; None: there is none."""

    def knows(self, node: RadixNode) -> bool:
        """Returns whether `pop` will return the node at some time, if it stays evictable."""

    def clear(self) -> None:
        """Forgets all nodes."""


class TreeListener(Protocol):
    """Receives every change of the nodes of a tree, right after the change. The implementation is `TreeJournal`.

    The changes and the tokens of the nodes give the tree: parents come before their children, leaves go before their
    parents. The tree reports no change of a root, and never uses an id twice.
    """

    def added(self, node: RadixNode) -> None:
        """A leaf came into the tree."""

    def extended(self, node: RadixNode, tokens: Tokens) -> None:
        """A leaf grew at its end, by `tokens`."""

    def split(self, node: RadixNode, upper: RadixNode) -> None:
        """The beginning of a node became a node of its own, its new parent."""

    def took_up(self, node: RadixNode, child: RadixNode, count: int) -> None:
        """The first `count` tokens of a child moved to the end of its parent `node`."""

    def removed(self, node: RadixNode, parent: RadixNode) -> None:
        """A leaf below `parent` left the tree."""

    def cleared(self) -> None:
        """All nodes left the tree."""


_LEAST_SWEPT = 64  # entries of a heap


class LeastRecentlyUsed:
    """Evicts leaves of the lowest priority first, and of these the least recently used.

    A heap has one entry for each node, checked when it is popped: O(log n) for each eviction, and at most one more
    correction for each use.
    """

    def __init__(self) -> None:
        self.operations = 0
        self._heap: list[tuple[int, int, int, RadixNode]] = []  # (priority, last use, node id, node)
        self._known: set[int] = set()  # ids of nodes in the heap
        self._swept_at = _LEAST_SWEPT  # entries

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, node: RadixNode) -> None:
        if node.id not in self._known:
            if len(self._heap) >= self._swept_at:
                self._sweep()
            self._known.add(node.id)
            heapq.heappush(self._heap, (node.priority, node.last_use, node.id, node))
            self.operations += 1

    def pop(self) -> RadixNode | None:
        while self._heap:
            _, last_use, number, node = heapq.heappop(self._heap)
            self.operations += 1
            self._known.discard(number)
            if not node.evictable:
                continue  # held, grown children or gone since; it is added again when that ends
            if node.last_use == last_use:
                return node
            self.add(node)  # used since: at most once per use
        return None

    def knows(self, node: RadixNode) -> bool:
        return node.id in self._known

    def clear(self) -> None:
        self._heap.clear()
        self._known.clear()

    def _sweep(self) -> None:
        """Drops entries of nodes that are not evictable now: discarded ones would pile up while nothing is evicted.

        The heap may then double before the next sweep, so each entry is visited once on average.
        """
        self._heap = [entry for entry in self._heap if entry[-1].evictable]
        heapq.heapify(self._heap)
        self._known = {number for _, _, number, _ in self._heap}
        self._swept_at = max(_LEAST_SWEPT, 2 * len(self._heap))


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix, which ends at the end of `node`. Lock it before anything else changes the tree.

    `fresh`: the holder made `node` itself, so while no other request uses it, it may grow in place.
    """

    node: RadixNode
    length: int  # tokens from the root to the end of node
    fresh: bool = False

    @property
    def last_use(self) -> int:
        """The cache's count of uses at the latest use of the whole match."""
        return self.node.last_use

    @property
    def path(self) -> tuple[tuple[int, int, int], ...]:
        """Root first: (node id, position of its first token, number of tokens). Valid until `tree.splits` grows."""
        steps = []
        end = self.length
        for node in ascend(self.node):
            steps.append((node.id, end - len(node.tokens), len(node.tokens)))
            end -= len(node.tokens)
        return tuple(reversed(steps))

    def slots(self, start: int = 0) -> Slots:
        """Returns the slots of tokens [start, length)."""
        runs = []
        end = self.length
        for node in ascend(self.node):
            if end <= start:
                break
            first = end - len(node.tokens)
            runs.append(node.slots[max(0, start - first) :])
            end = first
        return np.concatenate(runs[::-1]) if runs else np.empty(0, dtype=np.int32)


def ascend(node: RadixNode) -> Iterator[RadixNode]:
    """Yields the node and its ancestors, without the root."""
    current: RadixNode | None = node
    while current is not None and not current.is_root:
        yield current
        current = current.parent


def common_length(left: Tokens, right: Tokens) -> int:
    """Returns the length of the common prefix of two sequences."""
    length = min(len(left), len(right))
    if not length or left.item(0) != right.item(0):
        return 0
    different = left[:length] != right[:length]
    first = int(different.argmax())  # 0 where nothing differs
    return first if different[first] else length


def _part(array: Tokens, start: int, end: int | None = None) -> Tokens:
    """Returns array[start:end], which a node is to own.

    A view keeps the whole array alive, of which all other parts may have been evicted. So it is copied where it is less
    than half of that array: nodes take at most twice the memory of their tokens and slots.
    """
    part = array[start:end]
    whole = array if array.base is None else array.base
    return part if 2 * len(part) >= len(whole) else part.copy()


def shared_length(left: Tokens, left_borders: Borders, right: Tokens, right_borders: Borders) -> int:
    """Returns how many tokens of two sequences of one salt share nodes: common ones before borders that differ."""
    return parting(left_borders, right_borders, common_length(left, right))


def _edge(tokens: Tokens, position: int, borders: Borders) -> tuple[_Edge, int]:
    """Returns the key of the edge on which a sequence goes on, and the place where its namespace ends."""
    first = int(tokens[position])
    key: _Edge = first
    for place, name in borders:
        if place > position:
            return key, place
        if place == position:
            key = (name, first)
    return key, len(tokens)


_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)
MOST_GROWN = 1024  # tokens of a leaf that may still grow; leaves are evicted whole
CHAIN = 2  # nodes with one child each before a leaf that grows


class RadixCache:
    """The radix tree. It takes slots over from the caller in `extend` and releases them to the pool in `evict`.

    Costs: match and extend O(tokens compared + nodes on the path); lock and unlock O(nodes on the path);
    evict one operation of the eviction policy per node, O(log n) (no walk of the tree).

    Args:
        pool: takes back the slots of evicted nodes.
        eviction: chooses the next leaf to evict; least recently used first by default.
        by_salt: keeps an order of eviction for each salt, too, for `evict_of`.
        states: has the snapshots at nodes, which end with their node; None: the model has no recurrent state.
        listener: receives the changes of the nodes; None: that costs nothing.
    """

    page = 1  # tokens; prefixes of any length are cached

    def __init__(
        self,
        pool: SlotAllocator,
        eviction: EvictionPolicy | None = None,
        *,
        by_salt: bool = False,
        states: StateSlots | None = None,
        listener: TreeListener | None = None,
    ) -> None:
        self._pool = pool
        self._states = states
        self._listener: TreeListener | None = None
        self._by_salt = by_salt
        self.eviction = eviction if eviction is not None else LeastRecentlyUsed()
        self.idle_check = IdleCheck(pool, self.eviction)
        self._next_id = 0
        self._time = 0  # counts uses; the order is all that matters
        self.before_eviction: Callable[[RadixNode], None] | None = (
            None  # called with a leaf whose slots are still there
        )
        self.evicted_tokens = 0  # cumulative
        self.splits = 0  # cumulative; each changes the paths through the node that was split
        self.forget()
        self._listener = listener  # of a tree that has been empty so far

    def forget(self) -> None:
        """Empties the tree. Slots are not released: the caller clears the pool too, or has counted them."""
        self._roots: dict[str, RadixRoot] = {}
        self.eviction.clear()
        self._tokens = 0
        self._held_tokens = 0  # in nodes with a lock, a pin or a keep
        self._pinned_tokens = 0  # in nodes with a pin or a keep
        self._kept_tokens = 0  # in nodes with a keep
        self.idle_check.forget()
        if self._listener is not None:
            self._listener.cleared()

    @property
    def total_tokens(self) -> int:
        return self._tokens

    @property
    def node_count(self) -> int:
        return len(self.idle_check)

    @property
    def evictable_tokens(self) -> int:
        """Tokens in nodes without lock, pin and keep. Evicting leaf after leaf frees all of them."""
        return self._tokens - self._held_tokens

    @property
    def pinned_tokens(self) -> int:
        """Tokens in nodes with a pin or a keep; tokens that these share count once."""
        return self._pinned_tokens

    @property
    def kept_tokens(self) -> int:
        """Tokens in nodes with a keep; tokens that keeps share count once."""
        return self._kept_tokens

    # ------------------------------------------------------------------------------------------ find

    def peek(self, tokens: Tokens, salt: str, borders: Borders = (), seen: Seen | None = None) -> int:
        """Returns the length of the longest cached prefix; this is no use, and changes nothing.

        seen: of earlier calls for this sequence, which may have become longer. The tree is walked from there on.
        """
        root = self._roots.get(salt)
        if root is None:
            if seen is not None:
                seen.node, seen.length, seen.resumed = None, 0, False
            return 0
        node: RadixNode = root
        position = inside = 0  # tokens that are found, and how many `node` has after those
        known = None if seen is None else seen.node
        if known is not None and (known.parent is None or known.root is not root):
            known = None  # it left the tree
        if seen is not None and known is not None:
            node, position = known, min(seen.length, len(tokens))
            end = sum([len(above.tokens) for above in ascend(node)])
            while end - len(node.tokens) >= position and node.parent is not None:  # it was split since
                node, end = node.parent, end - len(node.tokens)
            inside = end - position
        while position < len(tokens):
            if inside:
                start = len(node.tokens) - inside
                limit = next((place for place, _ in borders if place >= position), len(tokens))
            else:
                edge, limit = _edge(tokens, position, borders)
                child = node.children.get(edge)
                if child is None:
                    break
                node, start = child, 0
            shared = common_length(node.tokens[start:], tokens[position:limit])
            position += shared
            inside = len(node.tokens) - start - shared
            if inside:
                break
        if seen is not None:
            seen.node, seen.length, seen.resumed = (None if node is root else node), position, known is not None
        return position

    def match(self, tokens: Tokens, salt: str, borders: Borders = ()) -> Match:
        """Finds the longest cached prefix; this counts as a use. A node that is matched in part is split there."""
        return self.advance(Match(self._root(salt), 0), tokens, borders)

    def advance(self, match: Match, tokens: Tokens, borders: Borders = ()) -> Match:
        """Continues `match` (locked by the caller) along `tokens`, the whole sequence from its beginning."""
        node, position = match.node, match.length
        self._time += 1
        for used in ascend(node):
            used.last_use = self._time
        while position < len(tokens):
            edge, end = _edge(tokens, position, borders)
            child = node.children.get(edge)
            if child is None:
                break
            shared = common_length(child.tokens, tokens[position:end])
            if shared < len(child.tokens):
                if node is match.node and node.locks == 1 and self._may_take_from(node, child):
                    self._move_up(node, child, shared)
                    return Match(node, position + shared, fresh=match.fresh)
                child = self._split(child, shared)
            child.last_use = self._time
            node = child
            position += shared
        return match if node is match.node else Match(node, position)

    # ---------------------------------------------------------------------------------------- change

    def extend(self, match: Match, tokens: Tokens, slots: Slots, *, borders: Borders = (), priority: int = 0) -> Match:
        """Appends `tokens` to a match that ends where the tree does not know the next token.

        The tree takes the slots over. The caller holds a lock on `match`; the result is locked in its place.
        """
        assert len(tokens) == len(slots) > 0, "every token has one slot"
        start = match.length
        cuts = [0, *(place - start for place, _ in borders if 0 < place - start < len(tokens)), len(tokens)]
        self._time += 1
        for first, end in pairwise(cuts):
            salt = next((name for place, name in reversed(borders) if place <= match.length), match.node.root.salt)
            match = self._append(match, tokens[first:end], slots[first:end], salt, priority)
        return match

    def _append(self, match: Match, tokens: Tokens, slots: Slots, salt: str, priority: int) -> Match:
        """Appends tokens of one namespace."""
        node = match.node
        inside = salt == node.salt
        if inside and self._may_grow(match, priority):
            self.idle_check.changes(node)
            node.tokens = np.concatenate([node.tokens, tokens])
            node.slots = np.concatenate([node.slots, slots])
            node.last_use = self._time
            self._add(node.root, len(tokens))
            if self._listener is not None:
                self._listener.extended(node, tokens)
            return Match(node, match.length + len(tokens), fresh=True)
        leaf = self._node(salt, node, tokens.copy(), slots.copy())
        leaf.last_use = self._time
        leaf.priority = priority
        assert leaf.edge not in node.children, "advance the match first: the tree knows this token"
        node.children[leaf.edge] = leaf
        self.idle_check.added(leaf)
        leaf.locks = 1  # the caller's lock reaches one node further; the ancestors have it already
        self._add(leaf.root, len(tokens))
        if self._listener is not None:
            self._listener.added(leaf)
        return Match(leaf, match.length + len(tokens), fresh=True)

    @staticmethod
    def _may_grow(match: Match, priority: int) -> bool:
        """Returns whether the leaf that a match ends with takes the tokens after it, instead of a new leaf.

        Its holder must be the only one. A leaf of an earlier request grows at the end of a chain of only children, up
        to MOST_GROWN tokens: a session that goes on and on would otherwise add a node with each call, and each call
        passes all nodes.
        """
        node = match.node
        if node.locks != 1 or node.pins or node.keeps or node.children or node.state:
            return False
        if match.fresh:
            return True
        before = [above for above in islice(ascend(node), 1, 1 + CHAIN) if len(above.children) == 1]
        return len(before) == CHAIN and len(node.tokens) < MOST_GROWN and node.priority == priority

    def _add(self, root: RadixRoot, count: int) -> None:
        """Counts tokens that their holder has appended."""
        self._tokens += count
        root.cached += count
        self._hold(root, count)

    def _hold(self, root: RadixRoot, count: int) -> None:
        """Counts tokens that are held from now on; below 0 those that are not any more."""
        self._held_tokens += count
        root.held_tokens += count

    def lock(self, match: Match) -> None:
        """Keeps the path from eviction until `unlock`."""
        root = match.node.root
        for node in ascend(match.node):
            if not node.held:
                self._hold(root, len(node.tokens))
            node.locks += 1
        root.locks += 1
        self._roots[root.salt] = root

    def unlock(self, match: Match) -> None:
        root = match.node.root
        for node in ascend(match.node):
            assert node.locks > 0, "unlock without lock"
            node.locks -= 1
            if not node.held:
                self._hold(root, -len(node.tokens))
                self._offer(node)
        assert root.locks > 0, "unlock without lock"
        root.locks -= 1
        self._drop_if_empty(root)

    def pin(self, match: Match) -> None:
        """Keeps the path from eviction until `unpin`."""
        for node in ascend(match.node):
            self._put(node)
            node.pins += 1

    def unpin(self, match: Match) -> None:
        for node in ascend(match.node):
            assert node.pins > 0, "unpin without pin"
            self.idle_check.changes(node)
            node.pins -= 1
            self._taken_off(node)

    def keep(self, match: Match) -> None:
        """Keeps the path from eviction until `end_keep`, as a pin that is never taken back."""
        for node in ascend(match.node):
            if not node.keeps:
                self._kept_tokens += len(node.tokens)
                node.root.kept_tokens += len(node.tokens)
            self._put(node)
            node.keeps += 1

    def end_keep(self, match: Match) -> None:
        for node in ascend(match.node):
            assert node.keeps > 0, "end of a keep that was not put"
            self.idle_check.changes(node)
            node.keeps -= 1
            if not node.keeps:
                self._kept_tokens -= len(node.tokens)
                node.root.kept_tokens -= len(node.tokens)
            self._taken_off(node)

    def unkept(self, match: Match) -> int:
        """Returns the number of tokens of the path that no keep covers yet."""
        return sum(len(node.tokens) for node in ascend(match.node) if not node.keeps)

    def move_lock(self, held: Match, wanted: Match) -> None:
        """Moves a lock from `held` to `wanted`; the nodes that both share stay locked throughout."""
        if held.node is not wanted.node:
            self.lock(wanted)
            self.unlock(held)

    def evict(self, count: int) -> int:
        """Evicts at least `count` tokens, if so many are not held, and returns the number of evicted tokens.

        Whole leaves are evicted, in the order of the eviction policy.
        """
        return self._evict(count, self.eviction)

    def make_room(self, count: int) -> int:
        """Evicts until `count` slots can be allocated, and returns the number of evicted tokens."""
        return self.evict(count - self._pool.free) if count > self._pool.free else 0

    def evict_of(self, root: RadixRoot, count: int) -> int:
        """Evicts at least `count` tokens of one salt, as `evict` does of all."""
        assert root.leaves is not None, "the tree keeps an order for each salt"
        return self._evict(count, root.leaves)

    def _evict(self, count: int, order: EvictionPolicy) -> int:
        given = 0
        while given < count and (leaf := order.pop()) is not None:
            if self.before_eviction is not None:
                self.before_eviction(leaf)
            given += self._remove(leaf)
        self.evicted_tokens += given
        return given

    def discard(self, match: Match) -> int:
        """Removes the path's nodes below its last held one, with their subtrees; returns the number of tokens."""
        top: RadixNode | None = None
        for node in ascend(match.node):
            if node.held:
                break
            top = node
        if top is None:
            return 0
        subtree = [top]
        for node in subtree:
            subtree.extend(node.children.values())
        return sum(self._remove(node) for node in reversed(subtree))

    def clear(self) -> int:
        """Evicts all nodes that are not held, without `before_eviction`: what is emptied on purpose is not saved."""
        told, self.before_eviction = self.before_eviction, None
        try:
            return self.evict(self.evictable_tokens)
        finally:
            self.before_eviction = told

    # ---------------------------------------------------------------------------------------- inside

    def _put(self, node: RadixNode) -> None:
        """Counts a node that is about to get a pin or a keep."""
        if not node.held:
            self._hold(node.root, len(node.tokens))
        if not (node.pins or node.keeps):
            self._pinned_tokens += len(node.tokens)
        self.idle_check.changes(node)

    def _taken_off(self, node: RadixNode) -> None:
        """Counts a node that has lost a pin or a keep."""
        if not (node.pins or node.keeps):
            self._pinned_tokens -= len(node.tokens)
        if not node.held:
            self._hold(node.root, -len(node.tokens))
            self._offer(node)

    def _node(self, salt: str, parent: RadixNode, tokens: Tokens, slots: Slots) -> RadixNode:
        self._next_id += 1
        return RadixNode(self, self._next_id, salt, parent, tokens, slots, self._pool)

    def _root(self, salt: str) -> RadixRoot:
        root = self._roots.get(salt)
        if root is None:
            self._next_id += 1
            root = self._roots[salt] = RadixRoot(self, self._next_id, salt, self._pool, ordered=self._by_salt)
        return root

    def _drop_if_empty(self, root: RadixRoot) -> None:
        """Removes a root without children and locks: clients choose salts, so roots would pile up."""
        if not root.children and not root.locks:
            self._roots.pop(root.salt, None)

    @staticmethod
    def _may_take_from(node: RadixNode, child: RadixNode) -> bool:
        """Returns whether the boundary between both may move: a text that is generated again moves it by tokens."""
        fixed = node.is_root or node.pins or node.keeps or node.state
        return not (fixed or child.held or len(node.children) > 1 or child.opens)

    def _move_up(self, node: RadixNode, child: RadixNode, count: int) -> None:
        """Moves the first `count` tokens of a child to the end of its parent, which only the caller holds."""
        self.idle_check.changes(node)
        self.idle_check.changes(child)
        del node.children[int(child.tokens[0])]
        node.tokens = np.concatenate([node.tokens, child.tokens[:count]])
        node.slots = np.concatenate([node.slots, child.slots[:count]])
        child.tokens, child.slots = _part(child.tokens, count), _part(child.slots, count)
        node.children[int(child.tokens[0])] = child
        self._hold(node.root, count)
        self.splits += 1
        if self._listener is not None:
            self._listener.took_up(node, child, count)

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Splits a node: parent ── node becomes parent ── upper ── node. Matches that end at `node` stay valid."""
        assert node.parent is not None
        self.splits += 1
        self.idle_check.changes(node)
        tokens, slots = _part(node.tokens, 0, length), _part(node.slots, 0, length)
        upper = self._node(node.salt, node.parent, tokens, slots)
        upper.locks, upper.pins, upper.keeps = node.locks, node.pins, node.keeps
        upper.last_use, upper.priority = node.last_use, node.priority
        upper.children[int(node.tokens[length])] = node
        node.parent.children[node.edge] = upper
        node.parent = upper
        node.tokens, node.slots = _part(node.tokens, length), _part(node.slots, length)
        self.idle_check.added(upper)
        if self._listener is not None:
            self._listener.split(node, upper)
        return upper

    def _remove(self, leaf: RadixNode) -> int:
        parent = leaf.parent
        assert parent is not None, "a leaf that left the tree is never evictable"
        assert not leaf.held, "evicting a locked node frees slots in use"
        del parent.children[leaf.edge]
        leaf.parent = None
        if leaf.state:
            assert self._states is not None, "only it puts snapshots at nodes"
            self._states.drop(leaf)
        self.idle_check.removed(leaf)
        self._tokens -= len(leaf.tokens)
        leaf.root.cached -= len(leaf.tokens)
        leaf.pool.release(leaf.slots)
        if self._listener is not None:
            self._listener.removed(leaf, parent)
        if parent.is_root:
            self._drop_if_empty(parent.root)
        else:
            self._offer(parent)
        return len(leaf.tokens)

    def _offer(self, node: RadixNode) -> None:
        if node.evictable:
            self.eviction.add(node)
            if node.root.leaves is not None:
                node.root.leaves.add(node)

    # ------------------------------------------------------------------------------------------ look

    def walk(self) -> Iterator[tuple[int, RadixNode]]:
        """Yields (depth, node) of every node without the roots, parents before children."""
        stack = [(0, child) for root in reversed(self._roots.values()) for child in reversed(root.children.values())]
        while stack:
            depth, node = stack.pop()
            yield depth, node
            stack.extend((depth + 1, child) for child in reversed(node.children.values()))

    def held_slots(self) -> list[Slots]:
        """Returns the slots of all nodes."""
        return [node.slots for _, node in self.walk()]

    @property
    def salts(self) -> Iterable[RadixRoot]:
        """The salts that have nodes or running requests."""
        return self._roots.values()

    def survey(self, most: int) -> tuple[list[RadixNode], int]:
        """Returns up to `most` nodes, parents before their children, and the number of uses up to now.

        The most recently used branch comes first, and of those used together the largest node. Only nodes next to those
        returned are looked at, so a survey of a large tree costs what it returns, and its siblings.
        """
        found: list[RadixNode] = []
        fringe = [_recent(child) for root in self._roots.values() for child in root.children.values()]
        heapq.heapify(fringe)
        while fringe and len(found) < most:
            node = heapq.heappop(fringe)[-1]
            found.append(node)
            for child in node.children.values():
                heapq.heappush(fringe, _recent(child))
        return found, self._time

    def check_some(self, pinned: Iterable[Match], kept: Iterable[Match] = ()) -> bool:
        """Runs a slice of `check` while no lock is held; True: with it everything has been checked.

        Raises:
            IntegrityError: names the node.
        """
        if self.idle_check.visit_some():
            return False
        self.idle_check.end(
            tokens=self._tokens,
            held=self._held_tokens,
            pinned=self._pinned_tokens,
            kept=self._kept_tokens,
            pins=_counted(pinned),
            keeps=_counted(kept),
        )
        return True

    def check(self, holders: list[Match], pinned: Iterable[Match] = (), kept: Iterable[Match] = ()) -> None:
        """Checks the tree and its sums, and that its locks, pins and keeps are exactly those of the arguments.

        Raises:
            IntegrityError: names the node.
        """
        locks, pins, keeps = _counted(holders), _counted(pinned), _counted(kept)
        tokens = held = under_pins = under_keeps = nodes = 0
        for _, node in self.walk():
            tokens += len(node.tokens)
            held += len(node.tokens) if node.held else 0
            under_pins += len(node.tokens) if node.pins or node.keeps else 0
            under_keeps += len(node.tokens) if node.keeps else 0
            if node.locks != locks.pop(node.id, 0):
                raise IntegrityError(f"node {node.id} has {node.locks} locks that its holders do not explain")
            if node.pins != pins.pop(node.id, 0):
                raise IntegrityError(f"node {node.id} has {node.pins} pins that were not put there")
            if node.keeps != keeps.pop(node.id, 0):
                raise IntegrityError(f"node {node.id} has {node.keeps} keeps that were not put there")
            require_node(node, self.eviction)
            if node not in self.idle_check:
                raise IntegrityError(f"node {node.id} is not known to the check of idle time")
            nodes += 1
        if nodes != len(self.idle_check):
            raise IntegrityError(f"the tree has {nodes} nodes, and {len(self.idle_check)} are known to the idle check")
        if locks or pins or keeps:
            raise IntegrityError(f"locked, pinned or kept nodes {sorted({*locks, *pins, *keeps})} are not in the tree")
        found = (tokens, held, under_pins, under_keeps)
        sums = (self._tokens, self._held_tokens, self._pinned_tokens, self._kept_tokens)
        if found != sums:
            raise IntegrityError(f"the tree has (tokens, held, pinned, kept) = {found}; its sums say {sums}")
        self._check_salts()
        if self._states is not None:
            self._states.check_nodes([node for _, node in self.walk() if node.state])

    def _check_salts(self) -> None:
        """Checks the counts of each salt, and its own order of eviction."""
        counts: dict[RadixRoot, tuple[int, int, int]] = dict.fromkeys(self._roots.values(), (0, 0, 0))
        for _, node in self.walk():
            cached, held, kept = counts[node.root]
            size = len(node.tokens)
            counts[node.root] = (cached + size, held + size * bool(node.held), kept + size * bool(node.keeps))
            if node.evictable and node.root.leaves is not None and not node.root.leaves.knows(node):
                raise IntegrityError(f"leaf {node.id} is not in the order of its salt")
        for root, found in counts.items():
            if found != (root.cached, root.held_tokens, root.kept_tokens):
                raise IntegrityError(
                    f"salt {root.salt!r} has (tokens, held, kept) = {found}; its sums say "
                    f"{(root.cached, root.held_tokens, root.kept_tokens)}"
                )


def _recent(node: RadixNode) -> tuple[int, int, int, RadixNode]:
    """Returns the key that orders nodes: the latest use first, then the most tokens."""
    return -node.last_use, -len(node.tokens), node.id, node


def _counted(matches: Iterable[Match]) -> dict[int, int]:
    """Returns node id → number of matches whose path contains the node."""
    return Counter(node.id for match in matches for node in ascend(match.node))
