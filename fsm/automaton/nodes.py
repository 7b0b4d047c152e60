"""A grammar as the automaton reads it: nodes with their shortest lengths, nothing expanded.

    Leaf        a byte automaton: literals (many at once, as a trie), a set of characters, a character automaton
    Sequence    parts, one after the other
    Options     one of several
    Loop        a body that takes at least one byte, counted in the frame and not here
    Nested      a call of a rule that is being defined: recursion
    Remaining   parts in any order: those that have not come
    Opened      the rest of a part whose first text is written, and then what remains

Calls that do not recurse are the node of the rule itself, spelled text is spelled here. The functions that build nodes
join neighbouring literals, leave empty turns out, and take options that begin alike together, so that
`{"type": "a", ...}` and `{"type": "b", ...}` part where they differ.

Parts in any order have a node for each set of parts that have not come, made when a text gets there:

    {a b c}  ─a─▶  {b c}  ─c─▶  {b}      of the 2ⁿ sets only those that texts pass; two ways to one set meet in it
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Many
from functools import cached_property
from typing import NamedTuple

from ..language import Arrangement
from .places import ENDLESS, LiteralTrie, Option, Place, Text


class Node:
    """A part of a grammar, with its shortest lengths.

    shortest(depth): bytes of the shortest text that nests at most `depth` recursive calls; ENDLESS: there is none.

    recursive: a recursive call lies somewhere inside, and the shortest length depends on the depth.
    """

    __slots__ = ("levels", "recursive")

    def __init__(self, recursive: bool) -> None:
        self.recursive = recursive
        self.levels: list[int] = [] if recursive else [self.measure(0)]

    def shortest(self, depth: int) -> int:
        levels = self.levels
        return levels[depth] if depth < len(levels) else levels[-1]

    def measure(self, depth: int) -> int:
        """Returns the shortest length, from those of the parts."""
        raise NotImplementedError

    @property
    def nullable(self) -> bool:
        return self.levels[-1] == 0


class Leaf(Node):
    __slots__ = ("place",)

    def __init__(self, place: Place) -> None:
        self.place = place
        super().__init__(False)

    def measure(self, depth: int) -> int:
        return self.place.shortest


class Sequence(Node):
    __slots__ = ("_suffixes", "parts")

    def __init__(self, parts: tuple[Node, ...]) -> None:
        self.parts = parts
        self._suffixes: dict[int, list[int]] = {}
        super().__init__(any(part.recursive for part in parts))

    def measure(self, depth: int) -> int:
        return min(sum(part.shortest(depth) for part in self.parts), ENDLESS)

    def shortest_from(self, index: int, depth: int) -> int:
        """Returns the shortest length of the parts from `index` on."""
        level = min(depth, len(self.levels) - 1)
        suffixes = self._suffixes.get(level)
        if suffixes is None:
            total = 0
            suffixes = [0]
            for part in reversed(self.parts):
                total += part.shortest(level)
                suffixes.append(total)
            self._suffixes[level] = suffixes
        return suffixes[len(self.parts) - index]


class Options(Node):
    __slots__ = ("options",)

    def __init__(self, options: tuple[Node, ...]) -> None:
        self.options = options
        super().__init__(any(option.recursive for option in options))

    def measure(self, depth: int) -> int:
        return min((option.shortest(depth) for option in self.options), default=ENDLESS)


class Loop(Node):
    """Repeats `body` `least` to `most` times; most = ENDLESS: without end. The body takes at least one byte."""

    __slots__ = ("body", "least", "most")

    def __init__(self, body: Node, least: int, most: int) -> None:
        self.body = body
        self.least = least
        self.most = most
        super().__init__(body.recursive)

    def measure(self, depth: int) -> int:
        return min(self.least * self.body.shortest(depth), ENDLESS) if self.least else 0


class Nested(Node):
    """A recursive call.

    `target` is set once its rule is lowered: the only part of a node that changes after its birth.
    """

    __slots__ = ("rule", "target")

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.target: Node | None = None
        super().__init__(True)

    def body(self) -> Node:
        assert self.target is not None, f"the rule {self.rule!r} was never lowered"
        return self.target

    def measure(self, depth: int) -> int:
        return ENDLESS if depth == 0 else self.body().shortest(depth - 1)


def dead(node: Node) -> bool:
    """Tells whether nothing is admitted, whatever the depth."""
    return not node.recursive and node.levels[0] >= ENDLESS


def literal(data: bytes) -> Leaf:
    return Leaf(Text(data))


EMPTY = literal(b"")
NEVER = Options(())


def single_literal(node: Node) -> bytes | None:
    """Returns the bytes of a node that is a literal."""
    return node.place.data if type(node) is Leaf and type(node.place) is Text else None


def sequence(parts: Many[Node]) -> Node:
    """Joins neighbouring literals; one part is itself."""
    joined: list[Node] = []
    text = b""
    for part in parts:
        if dead(part):
            return NEVER
        data = single_literal(part)
        if data is not None:
            text += data
            continue
        if text:
            joined.append(literal(text))
            text = b""
        joined.append(part)
    if text:
        joined.append(literal(text))
    if len(joined) > 1:
        return Sequence(tuple(joined))
    return joined[0] if joined else EMPTY


def options(given: Many[Node], factored: int = 0) -> Node:
    """Makes options without recursion that begin with literals one trie; drops options that admit nothing.

    Sequences that begin with the same nodes are taken together: text that may be the beginning of several would
    otherwise be read in as many ways, and in a recursive rule in as many ways again at each level.

    factored: how often this was done around these options already.
    """
    trie: list[Option] = []
    others: list[Node] = []
    replaced: list[Node] = []
    for node in _flattened(given):
        beginning = _beginning(node)
        if beginning is None:
            others.append(node)
        else:
            trie += beginning
            replaced.append(node)
    if len(others) > 1 and factored < _FACTORED:
        others = _factored(others, factored)
    if len(replaced) > 1:
        others.insert(0, Leaf(LiteralTrie(trie)))
    else:
        others = replaced + others
    if len(others) == 1:
        return others[0]
    return Options(tuple(others)) if others else NEVER


_FACTORED = 16  # levels of common beginnings inside common beginnings


def _factored(nodes: list[Node], factored: int) -> list[Node]:
    """Factors a common beginning of sequences out: p q | p r = p (q | r)."""
    groups: dict[Hashable, list[Node]] = {}
    for node in nodes:
        groups.setdefault(_content(node.parts[0] if type(node) is Sequence else node), []).append(node)
    if len(groups) == len(nodes):
        return nodes
    found: list[Node] = []
    for group in groups.values():
        if len(group) == 1:
            found.append(group[0])
            continue
        parts = [node.parts if type(node) is Sequence else (node,) for node in group]
        common = 0
        while all(len(part) > common for part in parts) and len({_content(part[common]) for part in parts}) == 1:
            common += 1
        rests = options([sequence(part[common:]) for part in parts], factored + 1)
        found.append(sequence([*parts[0][:common], rests]))
    return found


def _content(node: Node) -> Hashable:
    """Gives a key that is equal for equal literals, which `sequence` makes anew, and for one and the same node."""
    data = single_literal(node)
    return node if data is None else data


def _flattened(given: Many[Node]) -> list[Node]:
    """Flattens options of options, each once, without those that admit nothing."""
    flat: dict[Node, None] = {}
    for node in given:
        if type(node) is Options:
            flat.update(dict.fromkeys(node.options))
        elif not dead(node):
            flat[node] = None
    return list(flat)


def _beginning(node: Node) -> Many[Option] | None:
    """Returns a node as options of a trie: byte strings with what follows each."""
    if type(node) is Leaf:
        if type(node.place) is Text:
            return [(node.place.data, None, 0)]
        return node.place.options if type(node.place) is LiteralTrie else None
    if type(node) is Sequence and not node.recursive:
        data = single_literal(node.parts[0])
        if data:
            rest = sequence(node.parts[1:])
            return [(data, rest, rest.shortest(0))]
    return None


def loop(body: Node, least: int, most: int) -> Node:
    """Repeats a body; one that may be empty without its empty text, which lets every count down to zero in."""
    if most == 0:
        return EMPTY
    if dead(body):
        return EMPTY if least == 0 else NEVER
    if not body.recursive and body.nullable:
        body, least = without_empty_text(body), 0
        if dead(body):
            return EMPTY
    return body if least == most == 1 else Loop(body, least, most)


def without_empty_text(node: Node, nested: dict[Node, Nested] | None = None) -> Node:
    """Returns the texts of a node but for the empty one.

    nested: collects the recursive calls met, with the nodes that shall stand for what they call: their targets are
        left to the caller. Needed for nodes that hold recursive calls.
    """
    done: dict[Node, Node] = {}
    waiting = [node]
    while waiting:
        current = waiting[-1]
        parts = _nullable_parts(current)
        missing = [part for part in parts if part not in done]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        done[current] = _without_empty(current, done, nested)
    return done[node]


def _nullable_parts(node: Node) -> tuple[Node, ...]:
    if not node.nullable or type(node) is Leaf:
        return ()
    if type(node) is Sequence:
        return node.parts
    if type(node) is Options:
        return tuple(option for option in node.options if option.nullable)
    return ()


def _without_empty(node: Node, done: dict[Node, Node], nested: dict[Node, Nested] | None) -> Node:
    if not node.nullable:
        return node
    match node:
        case Leaf():
            if type(node.place) is Text:
                return NEVER
            if type(node.place) is not LiteralTrie:
                return Leaf(node.place.without_empty_text())
            kept = [option for option in node.place.options if option[0]]
            # A rest of a trie comes after at least one byte: `_beginning` takes no empty literal.
            return Leaf(LiteralTrie(kept)) if kept else NEVER
        case Options():
            return options([done.get(option, option) for option in node.options])
        case Sequence():
            # p₁p₂p₃ without ε = p₁'p₂p₃ | p₂'p₃ | p₃', where p' is p without ε; shared from the right.
            tail: Node = NEVER
            rest: Node = EMPTY
            for part in reversed(node.parts):
                tail = options([sequence([done[part], rest]), tail])
                rest = sequence([part, rest])
            return tail
        case Loop():
            return Loop(node.body, 1, node.most) if node.most > 1 else node.body
        case Nested():
            assert nested is not None, "a recursive call outside a recursive node"
            if node.body() not in nested:
                nested[node.body()] = Nested(node.rule)
            return nested[node.body()]
        case _:
            raise AssertionError(f"no node: {node!r}")


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
        self.required_only = arrangement.required_only

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
        if not self.required_only:
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
        if self.begun and self.order.required_only and not self.recursive:
            return self.order.lengths_after(self.left, self.others).levels[0]  # found once for many of these
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
        if not self._rest:
            return remaining
        self._order.made += 1
        return _measured(Sequence((*self._rest, remaining)), self._order.depths)  # a part's literals are joined


def _flat(node: Node) -> tuple[Node, ...]:
    return node.parts if type(node) is Sequence else (node,)


def _measured(node: Node, depths: range) -> Node:
    """Gives a node its lengths by depth: it was made after those of the grammar were measured."""
    if node.recursive and not node.levels:
        node.levels += [node.measure(depth) for depth in depths]
    return node
