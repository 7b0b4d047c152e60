"""Maps token sequences to the replicas that have them cached: one radix tree for all replicas (the paper's A.4).

A node has a run of tokens, the set of replicas that hold it (bits of an int), and the calls in flight that will bring
it to a replica. A replica that holds a node holds all nodes above it.

    root(salt) ── "You are helpful." {0, 1, 2} ─┬─ "Hello" {0} ── "Hi!" {0}
                                                ├─ "What is 2+2?" {1}, two calls bring it to 2
                                                └▶ salt/acme  "Hello" {2}     found by its namespace and first token

What a replica holds is learned in one of two ways:

* `apply` reads the events of an engine (core/messages.py) and keeps an exact copy of its RadixCache. A node of the
  engine is a chain of nodes here, because the trees of other replicas part at other places.
* `insert` and `evict` guess it from where calls were placed, least recently used first, where engines tell nothing.

Tokens are bytes, an int32 each, little-endian, so that a whole node is compared by one `startswith`: 0.2 µs. Costs:
`lengths`, `expect`, `forget`, `insert` O(nodes on the path), and one operation for each replica whose prefix ends on
the way; `apply` O(nodes of the chain that changes). One thread uses a tree.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...lang.prompt import Borders
from ..core.messages import (
    CacheCleared,
    CacheEvent,
    NodeAdded,
    NodeExtended,
    NodeRemoved,
    NodeSplit,
    NodeTookUp,
)

Counts = NDArray[np.int64]
_Edge = bytes | tuple[str, bytes]  # the key of a child: its first token, with its namespace where the edge opens that

TOKEN_BYTES = 4
_MANY = 6  # replicas; more are written as an array of bits
_LEAST_SWEPT = 64  # entries of a heap


def packed(token_ids: Iterable[int]) -> bytes:
    """Returns tokens as the tree takes them: int32, little-endian."""
    values = tuple(token_ids)
    return struct.pack(f"<{len(values)}i", *values)


class CopyError(ValueError):
    """An event does not fit the copy of a replica's tree: events before it were lost. Drop the copy."""


class CorruptTreeError(AssertionError):
    """The tree does not fit its own sums; `MetaTree.check` names the node."""


class MetaNode:
    """One edge of the tree with the node it leads to. Changed only by MetaTree."""

    __slots__ = ("children", "coming", "counts", "ends", "held", "number", "parent", "salt", "tokens", "used")

    def __init__(self, number: int, tokens: bytes, salt: str, parent: MetaNode | None) -> None:
        self.number = number
        self.tokens = tokens
        self.salt = salt  # the namespace
        self.parent = parent  # None: a root, or no longer in the tree
        self.children: dict[_Edge, MetaNode] = {}
        self.held = 0  # bit r: replica r holds the node
        self.coming = 0  # bit r: a call in flight brings it to replica r
        self.counts: dict[int, int] = {}  # replica → calls in flight that bring the node
        self.used: dict[int, int] = {}  # replica → last use, of replicas whose holdings are guessed
        self.ends = 0  # nodes of engines, and calls in flight, that end at its end

    @property
    def opens(self) -> bool:
        """Returns whether the edge to it opens a namespace."""
        return self.parent is not None and self.parent.salt != self.salt

    @property
    def edge(self) -> _Edge:
        first = self.tokens[:TOKEN_BYTES]
        return (self.salt, first) if self.opens else first


class _EngineNode:
    """A node of an engine's tree: the chain that ends at `end` and begins below the end of its parent."""

    __slots__ = ("children", "end", "parent")

    def __init__(self, end: MetaNode, parent: int) -> None:
        self.end = end
        self.parent = parent  # its id; 0: below a root
        self.children = 0


class Expectation:
    """A prefix that a call in flight brings to a replica."""

    __slots__ = ("end", "replica")

    def __init__(self, replica: int, end: MetaNode | None) -> None:
        self.replica = replica
        self.end = end  # None: forgotten, or without tokens


@dataclass(frozen=True, slots=True)
class Lengths:
    """Gives for each replica the length of the longest prefix of a sequence that it has, in tokens.

    Attributes:
        held: it is cached there.
        coming: it is cached there or calls in flight bring it; at least `held`.
    """

    held: Counts
    coming: Counts


@dataclass(frozen=True, slots=True)
class CopiedNode:
    """A node of an engine's tree as the copy has it. `parent` 0: below the root of a salt."""

    id: int
    parent: int
    salt: str
    tokens: bytes


class _Recency:
    """Orders the leaves of one replica by last use. Entries are checked when they are popped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, MetaNode]] = []
        self._known: set[int] = set()
        self._swept_at = _LEAST_SWEPT

    def add(self, node: MetaNode, replica: int) -> None:
        if node.number not in self._known:
            if len(self._heap) >= self._swept_at:
                self._sweep(replica)
            self._known.add(node.number)
            heapq.heappush(self._heap, (node.used[replica], node.number, node))

    def pop(self, replica: int) -> MetaNode | None:
        while self._heap:
            used, number, node = heapq.heappop(self._heap)
            self._known.discard(number)
            if not _is_leaf_of(node, replica):
                continue  # removed or grown since; it is added again when it is a leaf
            if node.used[replica] == used:
                return node
            self.add(node, replica)
        return None

    def _sweep(self, replica: int) -> None:
        """Drops entries of nodes that are no leaves now; the heap may double before the next sweep."""
        self._heap = [entry for entry in self._heap if _is_leaf_of(entry[-1], replica)]
        heapq.heapify(self._heap)
        self._known = {number for _, number, _ in self._heap}
        self._swept_at = max(_LEAST_SWEPT, 2 * len(self._heap))


def _is_leaf_of(node: MetaNode, replica: int) -> bool:
    bit = 1 << replica
    return bool(node.held & bit) and not any(child.held & bit for child in node.children.values())


def _edge(tokens: bytes, position: int, borders: Borders) -> tuple[_Edge, int]:
    """Returns the key of the edge on which a sequence goes on, and the place where its namespace ends, in bytes."""
    first = tokens[position : position + TOKEN_BYTES]
    key: _Edge = first
    for place, name in borders:
        at = place * TOKEN_BYTES
        if at > position:
            return key, min(at, len(tokens))
        if at == position:
            key = (name, first)
    return key, len(tokens)


def _common(node: bytes, tokens: bytes, position: int, end: int) -> int:
    """Returns how many bytes of whole tokens `tokens[position:end]` has in common with the beginning of a node."""
    size = min(len(node), end - position)
    if tokens.startswith(node if size == len(node) else node[:size], position):
        return size
    count = size // TOKEN_BYTES
    here = np.frombuffer(node, np.int32, count)
    there = np.frombuffer(tokens, np.int32, count, position)
    return TOKEN_BYTES * int((here != there).argmax())


def _ascend(node: MetaNode) -> Iterator[MetaNode]:
    """Yields the node and its ancestors, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _write(lengths: Counts, replicas: int, value: int) -> None:
    """Sets the length of each replica of a set."""
    if replicas.bit_count() > _MANY:
        bits = np.frombuffer(replicas.to_bytes((len(lengths) + 7) // 8, "little"), np.uint8)
        lengths[np.unpackbits(bits, bitorder="little", count=len(lengths)).view(bool)] = value
        return
    while replicas:
        lowest = replicas & -replicas
        lengths[lowest.bit_length() - 1] = value
        replicas ^= lowest


class MetaTree:
    """The tree of all replicas. Replicas are numbers from 0 on, the places of bits; a number may be used again."""

    def __init__(self) -> None:
        self._roots: dict[str, MetaNode] = {}
        self._numbers = 0
        self._time = 0  # counts uses
        self._tokens: Counts = np.zeros(1, np.int64)  # replica → tokens that it holds
        self._engines: dict[int, dict[int, _EngineNode]] = {}  # replica → its engine's nodes, by id
        self._recency: dict[int, _Recency] = {}
        self._expectations = 0
        self.nodes = 0  # without roots
        self.operations = 0  # cumulative: nodes that were visited; tests bound them

    @property
    def total_tokens(self) -> int:
        """Tokens in nodes; those that several replicas hold count once."""
        return sum(len(node.tokens) for node in self._walk()) // TOKEN_BYTES

    def tokens_of(self, replica: int) -> int:
        """Returns how many tokens a replica holds."""
        return int(self._tokens[replica]) if replica < len(self._tokens) else 0

    def all_tokens(self, replicas: int) -> Counts:
        """Returns how many tokens each of the replicas 0 … `replicas` - 1 holds; not to be changed."""
        self._make_room(replicas)
        return self._tokens[:replicas]

    def _make_room(self, replicas: int) -> None:
        if replicas > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(replicas, np.int64)])

    # ------------------------------------------------------------------------------------------ find

    def lengths(self, tokens: bytes, salt: str, borders: Borders = (), *, replicas: int) -> Lengths:
        """Finds for each of the replicas 0 … `replicas` - 1 the longest prefix that it has; changes nothing."""
        held = coming = np.zeros(replicas, np.int64)  # one array as long as both are the same
        node = self._roots.get(salt)
        position, end_of_all = 0, len(tokens)
        holders = known = (1 << replicas) - 1
        while node is not None and position < end_of_all:
            self.operations += 1
            edge, end = _edge(tokens, position, borders)
            node = node.children.get(edge)
            now_held = holders & node.held if node is not None else 0
            now_known = known & (node.held | node.coming) if node is not None else 0
            if coming is held and now_held != now_known:
                coming = held.copy()
            if position and holders != now_held:
                _write(held, holders & ~now_held, position // TOKEN_BYTES)
            if position and coming is not held and known != now_known:
                _write(coming, known & ~now_known, position // TOKEN_BYTES)
            holders, known = now_held, now_known
            if node is None or not known:
                break
            shared = _common(node.tokens, tokens, position, end)
            position += shared
            if shared < len(node.tokens):
                break
        if position:
            _write(held, holders, position // TOKEN_BYTES)
            if coming is not held:
                _write(coming, known, position // TOKEN_BYTES)
        return Lengths(held, coming)

    # ------------------------------------------------------------------------------------------ calls in flight

    def expect(self, replica: int, tokens: bytes, salt: str, borders: Borders = ()) -> Expectation:
        """Says that a call in flight brings a sequence to a replica, until `forget`."""
        if not tokens:
            return Expectation(replica, None)
        end = self._grow(self._root(salt), tokens, borders)
        for node in _ascend(end):
            self.operations += 1
            node.counts[replica] = node.counts.get(replica, 0) + 1
            node.coming |= 1 << replica
        end.ends += 1
        self._expectations += 1
        return Expectation(replica, end)

    def forget(self, expectation: Expectation) -> None:
        """Ends an expectation: events tell of the sequence now, or it will not come. Once more does nothing."""
        end, expectation.end = expectation.end, None
        if end is None:
            return
        replica = expectation.replica
        for node in _ascend(end):
            self.operations += 1
            node.counts[replica] -= 1
            if not node.counts[replica]:
                del node.counts[replica]
                node.coming &= ~(1 << replica)
        end.ends -= 1
        self._expectations -= 1
        self._tidy_up(end, None)

    # ------------------------------------------------------------------------------------------ guessed holdings

    def insert(self, replica: int, tokens: bytes, salt: str, borders: Borders = ()) -> None:
        """Says that a replica has a sequence from now on, because a call was placed there; this counts as a use."""
        assert replica not in self._engines, "the events of the replica's engine say what it holds"
        if not tokens:
            return
        end = self._grow(self._root(salt), tokens, borders)
        self._time += 1
        for node in _ascend(end):
            self.operations += 1
            self._hold(node, replica)
            node.used[replica] = self._time
        self._recency.setdefault(replica, _Recency()).add(end, replica)

    def evict(self, replica: int, most_tokens: int) -> int:
        """Takes leaves from a replica, least recently used first, until it holds at most `most_tokens`.

        Returns:
            The number of tokens taken.
        """
        recency = self._recency.get(replica)
        before = self.tokens_of(replica)
        while recency is not None and self.tokens_of(replica) > most_tokens:
            leaf = recency.pop(replica)
            if leaf is None:
                break
            self.operations += 1
            parent = leaf.parent
            assert parent is not None, "a node that left the tree is held by no replica"
            self._let_go(leaf, replica)
            if parent.parent is not None and _is_leaf_of(parent, replica):
                recency.add(parent, replica)
            self._tidy_up(leaf, parent)
        return before - self.tokens_of(replica)

    # ------------------------------------------------------------------------------------------ exact copies

    def apply(self, replica: int, event: CacheEvent) -> None:
        """Changes the copy of a replica's tree as its engine changed the tree.

        Raises:
            CopyError: names the event that does not fit. The copy is to be dropped.
        """
        assert replica not in self._recency, "what the replica holds was guessed so far: drop it first"
        nodes = self._engines.setdefault(replica, {})
        match event:
            case NodeAdded():
                self._add(replica, nodes, event)
            case NodeExtended(number, tokens):
                self._extend(replica, self._known(nodes, number), tokens)
            case NodeSplit(number, upper, length):
                self._split_engine_node(nodes, number, upper, length)
            case NodeTookUp(number, child, count):
                self._take_up(nodes, number, child, count)
            case NodeRemoved(number):
                self._remove_engine_node(replica, nodes, number)
            case CacheCleared():
                self.drop(replica)

    @staticmethod
    def _known(nodes: dict[int, _EngineNode], number: int) -> _EngineNode:
        found = nodes.get(number)
        if found is None:
            raise CopyError(f"an event names node {number}, which the copy does not have")
        return found

    def _start(self, nodes: dict[int, _EngineNode], node: _EngineNode) -> MetaNode | None:
        """Returns the node above the chain; None: its root."""
        return nodes[node.parent].end if node.parent else None

    def _add(self, replica: int, nodes: dict[int, _EngineNode], event: NodeAdded) -> None:
        if event.id in nodes or event.id <= 0 or not event.tokens or len(event.tokens) % TOKEN_BYTES:
            raise CopyError(f"node {event.id} was added with {len(event.tokens)} bytes, or twice")
        if event.parent:
            start = self._known(nodes, event.parent).end
        else:
            start = self._root(event.salt if event.root is None else event.root)
        borders: Borders = ((0, event.salt),) if event.salt != start.salt else ()
        there = start.children.get(_edge(event.tokens, 0, borders)[0])
        if there is not None and there.held >> replica & 1:
            raise CopyError(f"node {event.id} begins with a token that the copy has there already")
        end = self._grow(start, event.tokens, borders)
        self._hold_chain(replica, end, start)
        end.ends += 1
        nodes[event.id] = _EngineNode(end, event.parent)
        if event.parent:
            nodes[event.parent].children += 1

    def _extend(self, replica: int, node: _EngineNode, tokens: bytes) -> None:
        if not tokens or len(tokens) % TOKEN_BYTES or node.children:
            raise CopyError(f"a node was extended by {len(tokens)} bytes, or has children")
        end = node.end
        if end.held == 1 << replica and end.ends == 1 and not end.children and not end.coming:
            end.tokens += tokens
            self._tokens[replica] += len(tokens) // TOKEN_BYTES
            self.operations += 1
            return
        grown = self._grow(end, tokens, ())
        self._hold_chain(replica, grown, end)
        self._move_end(node, grown)

    def _move_end(self, node: _EngineNode, end: MetaNode) -> None:
        before, node.end = node.end, end
        end.ends += 1
        before.ends -= 1
        self._tidy(before)

    def _split_engine_node(self, nodes: dict[int, _EngineNode], number: int, upper: int, length: int) -> None:
        node = self._known(nodes, number)
        if upper in nodes or upper <= 0:
            raise CopyError(f"node {number} was split at node {upper}, which the copy has already")
        cut = self._cut(node.end, self._start(nodes, node), length)
        cut.ends += 1
        nodes[upper] = made = _EngineNode(cut, node.parent)
        made.children = 1
        node.parent = upper

    def _take_up(self, nodes: dict[int, _EngineNode], number: int, child: int, count: int) -> None:
        node, below = self._known(nodes, number), self._known(nodes, child)
        if below.parent != number or node.children != 1:
            raise CopyError(f"node {number} took tokens of node {child}, which is not its only child")
        self._move_end(node, self._cut(below.end, node.end, count))

    def _remove_engine_node(self, replica: int, nodes: dict[int, _EngineNode], number: int) -> None:
        node = self._known(nodes, number)
        if node.children:
            raise CopyError(f"node {number} was removed, and has children in the copy")
        start = self._start(nodes, node)
        del nodes[number]
        if node.parent:
            nodes[node.parent].children -= 1
        node.end.ends -= 1
        for part in _ascend(node.end):
            if part is start:
                break
            self._let_go(part, replica)
            self.operations += 1
        self._tidy_up(node.end, start)

    def _cut(self, end: MetaNode, start: MetaNode | None, length: int) -> MetaNode:
        """Returns the node that ends `length` tokens below `start`, on the chain to `end`; it is made where needed."""
        chain = []
        for node in _ascend(end):
            if node is start:
                break
            chain.append(node)
        rest = length * TOKEN_BYTES
        if not 0 < rest < sum(len(node.tokens) for node in chain):
            raise CopyError(
                f"a node was cut after {length} of {sum(len(n.tokens) for n in chain) // TOKEN_BYTES} tokens"
            )
        for node in reversed(chain):
            self.operations += 1
            if rest < len(node.tokens):
                return self._split(node, rest)
            rest -= len(node.tokens)
            if not rest:
                return node
        raise AssertionError("the chain is longer than the cut")

    def drop(self, replica: int) -> None:
        """Forgets what a replica holds. What calls in flight bring to it stays expected."""
        for copied in self._engines.pop(replica, {}).values():
            copied.end.ends -= 1
        self._recency.pop(replica, None)
        if not self.tokens_of(replica):
            return
        bit = 1 << replica
        found = [child for root in self._roots.values() for child in root.children.values() if child.held & bit]
        for node in found:
            found.extend(child for child in node.children.values() if child.held & bit)
        for node in found:
            self._let_go(node, replica)
        for node in reversed(found):
            parent = node.parent
            self._tidy(node)
            if parent is not None and parent.parent is None:
                self._tidy(parent)
            self.operations += 1

    # ------------------------------------------------------------------------------------------ inside

    def _root(self, salt: str) -> MetaNode:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = self._node(b"", salt, None)
            self.nodes -= 1
        return root

    def _node(self, tokens: bytes, salt: str, parent: MetaNode | None) -> MetaNode:
        self._numbers += 1
        self.nodes += 1
        return MetaNode(self._numbers, tokens, salt, parent)

    def _grow(self, start: MetaNode, tokens: bytes, borders: Borders) -> MetaNode:
        """Returns the node at which a sequence below `start` ends; parts that are missing are made, held by none."""
        node, position = start, 0
        while position < len(tokens):
            self.operations += 1
            edge, end = _edge(tokens, position, borders)
            child = node.children.get(edge)
            if child is None:
                salt = edge[0] if isinstance(edge, tuple) else node.salt
                child = node.children[edge] = self._node(tokens[position:end], salt, node)
                node, position = child, end
                continue
            shared = _common(child.tokens, tokens, position, end)
            node = child if shared == len(child.tokens) else self._split(child, shared)
            position += shared
        return node

    def _split(self, node: MetaNode, length: int) -> MetaNode:
        """Splits a node after `length` bytes: parent ── node becomes parent ── upper ── node."""
        parent = node.parent
        assert parent is not None, "a root has no tokens"
        upper = self._node(node.tokens[:length], node.salt, parent)
        upper.held, upper.coming = node.held, node.coming
        upper.counts, upper.used = dict(node.counts), dict(node.used)
        parent.children[node.edge] = upper
        node.parent, node.tokens = upper, node.tokens[length:]
        upper.children[node.tokens[:TOKEN_BYTES]] = node
        return upper

    def _hold(self, node: MetaNode, replica: int) -> None:
        bit = 1 << replica
        if not node.held & bit:
            node.held |= bit
            self._make_room(replica + 1)
            self._tokens[replica] += len(node.tokens) // TOKEN_BYTES

    def _hold_chain(self, replica: int, end: MetaNode, start: MetaNode) -> None:
        node = end
        while node is not start:
            self.operations += 1
            self._hold(node, replica)
            assert node.parent is not None, "the chain begins below its start"
            node = node.parent

    def _let_go(self, node: MetaNode, replica: int) -> None:
        node.held &= ~(1 << replica)
        node.used.pop(replica, None)
        self._tokens[replica] -= len(node.tokens) // TOKEN_BYTES

    def _tidy_up(self, end: MetaNode, start: MetaNode | None) -> None:
        """Tidies the nodes from `end` up to `start` (None: the root), both included."""
        node: MetaNode | None = end
        while node is not None:
            parent = node.parent
            self._tidy(node)
            if node is start:
                return
            node = parent

    def _tidy(self, node: MetaNode) -> None:
        """Removes a node without a purpose, and joins one to its only child where nothing parts them.

        So nodes that nothing needs any more do not pile up.
        """
        if node.parent is None:
            if not node.children and not node.tokens:
                self._roots.pop(node.salt, None)
        elif not node.children:
            if not node.held and not node.coming:
                assert not node.ends, "a node of an engine ends at a node that its replica does not hold"
                del node.parent.children[node.edge]
                node.parent = None
                self.nodes -= 1
        elif len(node.children) == 1 and not node.ends:
            (child,) = node.children.values()
            if child.held == node.held and child.counts == node.counts and not child.opens:
                node.parent.children[node.edge] = child
                child.tokens = node.tokens + child.tokens
                child.parent, node.parent = node.parent, None
                node.held = node.coming = 0
                self.nodes -= 1

    def _walk(self) -> Iterator[MetaNode]:
        """Yields every node without the roots, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # ------------------------------------------------------------------------------------------ look

    def nodes_of(self, replica: int) -> Iterator[CopiedNode]:
        """Yields the nodes of a replica's engine as the copy has them, to be compared with its tree."""
        nodes = self._engines.get(replica, {})
        for number, node in nodes.items():
            start = self._start(nodes, node)
            parts = []
            for part in _ascend(node.end):
                if part is start:
                    break
                parts.append(part.tokens)
            yield CopiedNode(number, node.parent, node.end.salt, b"".join(reversed(parts)))

    def check(self) -> None:
        """Checks that holders of a node hold what is above it, that sums and ends fit, and that no node is useless.

        Raises:
            CorruptTreeError: names the node.
        """
        tokens = [0] * len(self._tokens)
        ends: dict[int, int] = {}
        nodes = in_flight = 0
        for node in self._walk():
            nodes += 1
            self._check_node(node)
            for replica in range(len(tokens)):
                tokens[replica] += (node.held >> replica & 1) * (len(node.tokens) // TOKEN_BYTES)
            ends[node.number] = node.ends
            below = sum(sum(child.counts.values()) for child in node.children.values())
            in_flight += sum(node.counts.values()) - below
        if tokens != self._tokens.tolist():
            raise CorruptTreeError(f"replicas hold {tokens} tokens; the sums say {self._tokens.tolist()}")
        if (nodes, in_flight) != (self.nodes, self._expectations):
            raise CorruptTreeError(
                f"the tree has {nodes} nodes and {in_flight} calls; the sums say {self.nodes} and {self._expectations}"
            )
        for replica, engine in self._engines.items():
            self._check_engine(replica, engine, ends)
        if sum(ends.values()) != self._expectations:
            raise CorruptTreeError(f"{sum(ends.values())} ends belong to {self._expectations} calls in flight")
        if any(not root.children for root in self._roots.values()):
            raise CorruptTreeError("a root has no children")

    def _check_node(self, node: MetaNode) -> None:
        parent = node.parent
        assert parent is not None, "the walk leaves roots out"
        if parent.children.get(node.edge) is not node or not node.tokens:
            raise CorruptTreeError(f"node {node.number} is not found by its edge")
        if parent.parent is not None and (node.held & ~parent.held or node.coming & ~parent.coming):
            raise CorruptTreeError(f"a replica has node {node.number} and not its parent {parent.number}")
        if node.coming != sum(1 << replica for replica in node.counts) or any(n <= 0 for n in node.counts.values()):
            raise CorruptTreeError(f"node {node.number} has the counts {node.counts} and the bits {node.coming:b}")
        if not node.held and not node.coming:
            raise CorruptTreeError(f"no replica has node {node.number}")

    def _check_engine(self, replica: int, engine: dict[int, _EngineNode], ends: dict[int, int]) -> None:
        """Checks one exact copy, and takes its ends from `ends`."""
        length, children = 0, dict.fromkeys(engine, 0)
        for number, node in engine.items():
            if node.parent:
                children[node.parent] += 1
            if node.end.number not in ends:
                raise CorruptTreeError(f"node {number} of replica {replica} ends outside of the tree")
            ends[node.end.number] -= 1
            start = self._start(engine, node)
            last: MetaNode | None = None
            for last in _ascend(node.end):
                if last is start:
                    break
                length += len(last.tokens) // TOKEN_BYTES
            if start is not None and last is not start:
                raise CorruptTreeError(f"node {number} of replica {replica} is not below its parent")
        if children != {number: node.children for number, node in engine.items()}:
            raise CorruptTreeError(f"the children of the nodes of replica {replica} are not those that were counted")
        if length != self.tokens_of(replica):
            raise CorruptTreeError(
                f"the nodes of replica {replica} have {length} tokens; it holds {self.tokens_of(replica)}"
            )
