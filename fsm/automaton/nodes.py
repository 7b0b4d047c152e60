"""A grammar as the automaton reads it: nodes with their shortest lengths, nothing expanded.

    Leaf        a byte automaton: literals (many at once, as a trie), a set of characters, a character automaton
    Sequence    parts, one after the other
    Options     one of several
    Loop        a body that takes at least one byte, counted in the frame and not here
    Nested      a call of a rule that is being defined: recursion

Calls that do not recurse are the node of the rule itself, spelled text is spelled here. The functions below the classes
build nodes: they join neighbouring literals, leave empty turns out, and take options that begin alike together, so that
`{"type": "a", ...}` and `{"type": "b", ...}` part where they differ.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many

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
