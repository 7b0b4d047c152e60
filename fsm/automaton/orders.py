"""Parts in any order: a node for each set of parts that have not come, made when a text gets there.

{a b c}  ─a─▶  {b c}  ─c─▶  {b}      of the 2ⁿ sets only those that texts pass; two ways to one set meet in it

Remaining    the parts that have not come
Opened       the rest of a part whose first text is written, and then what remains
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from ..language import Arrangement
from .nodes import EMPTY, NEVER, Leaf, Node, Options, Sequence, literal, sequence, single_literal
from .places import ENDLESS, LiteralTrie, Option


class Unfolding(Node):
    """A node that is made out of others when a text gets there. Needs their lengths at all depths."""

    __slots__ = ("_body",)

    def __init__(self, recursive: bool) -> None:
        self._body: Node | None = None
        super().__init__(recursive)

    def body(self) -> Node:
        if self._body is None:
            self._body = self._unfolded()
        return self._body

    def _unfolded(self) -> Node:
        raise NotImplementedError


class Lengths(NamedTuple):
    """Shortest lengths by depth, and the one that they all are; -1: they differ, or no end is reached."""

    levels: tuple[int, ...]
    steady: int

    @classmethod
    def of(cls, levels: Iterable[int]) -> Lengths:
        found = tuple(min(level, ENDLESS) for level in levels)
        return cls(found, found[0] if found[0] < ENDLESS and found.count(found[0]) == len(found) else -1)


class OpenedPart(NamedTuple):
    """A part as its first text, b"" where that is not certain, and what follows it, with its lengths."""

    data: bytes
    rest: tuple[Node, ...]
    lengths: Lengths


class Order:
    """Holds what the nodes of one AnyOrder share: its parts, their openings and lengths."""

    def __init__(self, arrangement: Arrangement, separator: Node, parts: tuple[Node, ...], others: Node | None) -> None:
        self.arrangement = arrangement
        self.separator = separator
        self.parts = parts if others is None else (*parts, others)  # the others after those that have a number
        self.inner = (separator, *self.parts)
        self.recursive = any(node.recursive for node in self.inner)
        self.made = 0  # nodes, beyond those that the grammar was lowered to
        self._known: dict[tuple[int, int], Remaining] = {}
        self._openings: dict[bool, list[OpenedPart]] = {}
        self._lengths: dict[int, Lengths] = {}
        self._required_only = arrangement.required_only

    def remaining(self, left: int, others: int) -> Remaining:
        known = self._known.get((left, others))
        if known is None:
            known = self._known[left, others] = Remaining(self, left, others)
            self.made += 1
        return known

    @cached_property
    def depths(self) -> range:
        """At which the parts have lengths of their own. Known when the grammar is lowered."""
        return range(max(len(node.levels) for node in self.inner))

    def openings(self, begun: bool) -> list[OpenedPart]:
        """Opens the parts, with the separator before them when others have come already."""
        found = self._openings.get(begun)
        if found is None:
            before = _flat(self.separator) if begun else ()
            found = self._openings[begun] = [self._opening((*before, *_flat(part))) for part in self.parts]
        return found

    def _opening(self, nodes: tuple[Node, ...]) -> OpenedPart:
        whole = sequence(nodes)
        parts = _flat(whole)
        data = single_literal(parts[0]) or b""
        rest = parts[1:] if data else parts
        return OpenedPart(data, rest, Lengths.of(sum(node.shortest(depth) for node in rest) for depth in self.depths))

    def lengths_after(self, left: int, others: int) -> Lengths:
        """Returns the lengths of what is left after some part."""
        if not self._required_only:
            return Lengths.of(map(self.remaining(left, others).measure, self.depths))
        required = left & self.arrangement.required
        found = self._lengths.get(required)
        if found is None:
            parts = [part for index, part in enumerate(self.parts) if required >> index & 1]
            found = self._lengths[required] = Lengths.of(
                sum(self.separator.shortest(depth) + part.shortest(depth) for part in parts) for depth in self.depths
            )
        return found


class Remaining(Unfolding):
    """The parts that have not come; see Arrangement for `left` and `others`."""

    __slots__ = ("left", "order", "others")

    def __init__(self, order: Order, left: int, others: int) -> None:
        self.order = order
        self.left = left
        self.others = others
        super().__init__(order.recursive)

    @property
    def begun(self) -> bool:
        return self.others > 0 or self.left.bit_count() < self.order.arrangement.parts

    def shortest_parts(self, depth: int) -> list[Node]:
        """Returns the nodes of a shortest text, in order, each as short as it can be."""
        order, chosen = self.order, self._chosen(depth)
        every = (*order.arrangement.in_order(self.left), order.arrangement.parts)
        parts = [order.parts[index] for index in every if chosen >> index & 1]
        separated = [node for part in parts for node in (order.separator, part)]
        return separated if self.begun else separated[1:]

    def measure(self, depth: int) -> int:
        return min(sum(node.shortest(depth) for node in self.shortest_parts(depth)), ENDLESS)

    def _chosen(self, depth: int) -> int:
        """Chooses the parts of a shortest text: those that have to come, and the shortest others to make up numbers."""
        order, arrangement = self.order, self.order.arrangement
        missing = arrangement.missing(self.left, self.others)
        assert missing is not None, "only what reaches the end is made"
        chosen, spare = self.left & arrangement.required, self.left
        if arrangement.others and not self.others:
            spare |= 1 << arrangement.parts
            chosen |= arrangement.others_least << arrangement.parts
        missing -= chosen.bit_count()
        if missing:
            spare &= ~chosen
            lengths = [(part.shortest(depth), index) for index, part in enumerate(order.parts) if spare >> index & 1]
            for _, index in sorted(lengths)[:missing]:
                chosen |= 1 << index
        return chosen

    def _unfolded(self) -> Node:
        """Puts what begins with text into one trie: where a hundred names may come next, a text stands in one place."""
        order, arrangement = self.order, self.order.arrangement
        openings = order.openings(self.begun)
        trie: list[Option] = []
        found: list[Node] = []
        for index, left, others in arrangement.following(self.left, self.others):
            data, rest, lengths = openings[index]
            after = order.lengths_after(left, others)
            if data and lengths.steady >= 0 and after.steady >= 0:  # a trie knows of no depth
                length = lengths.steady + after.steady
                trie.append((data, Opened(order, rest, left, others, [length]), length))
            else:
                levels = [min(one + other, ENDLESS) for one, other in zip(lengths.levels, after.levels, strict=True)]
                whole = sequence((literal(data), Opened(order, rest, left, others, levels)))
                found.append(_measured(whole, order.depths))
        order.made += 2 * len(found) + len(trie)
        if trie:
            found.append(Leaf(LiteralTrie(trie)))
        if arrangement.missing(self.left, self.others) == 0:
            found.append(EMPTY)
        if len(found) == 1:
            return found[0]
        return _measured(Options(tuple(found)), order.depths) if found else NEVER


class Opened(Unfolding):
    """The rest of a part, and then what remains. levels: its lengths by depth."""

    __slots__ = ("_left", "_order", "_others", "_rest")

    def __init__(self, order: Order, rest: tuple[Node, ...], left: int, others: int, levels: list[int]) -> None:
        self._body = None
        self._order = order
        self._rest = rest
        self._left = left
        self._others = others
        self.recursive = order.recursive
        self.levels = levels

    def _unfolded(self) -> Node:
        remaining = _measured(self._order.remaining(self._left, self._others), self._order.depths)
        self._order.made += 1
        return _measured(sequence((*self._rest, remaining)), self._order.depths)


def _flat(node: Node) -> tuple[Node, ...]:
    return node.parts if type(node) is Sequence else (node,)


def _measured(node: Node, depths: range) -> Node:
    """Gives a node its lengths by depth: it was made after those of the grammar were measured."""
    if node.recursive and not node.levels:
        node.levels += [node.measure(depth) for depth in depths]
    return node
