"""A grammar as the automaton reads it: nodes with their shortest lengths, nothing expanded.

    Leaf        a byte automaton: literals (many at once, as a trie), a set of characters, a character automaton
    Sequence    parts, one after the other
    Options     one of several
    Loop        a body that takes at least one byte, counted in the frame and not here
    Nested      a call of a rule that is being defined: recursion

Calls that do not recurse are the node of the rule itself, spelled text is spelled here, options that begin with
literals are one trie: `{"type": "a", ...}` and `{"type": "b", ...}` part where they differ.
"""

from __future__ import annotations

from .places import ENDLESS, Place


class Node:
    """shortest(depth): bytes of the shortest text that nests at most `depth` recursive calls; ENDLESS: there is none.

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
        """The shortest length, from those of the parts."""
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
        """The shortest length of the parts from `index` on."""
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
    """`body` `least` to `most` times; most = ENDLESS: without end. The body takes at least one byte."""

    __slots__ = ("body", "least", "most")

    def __init__(self, body: Node, least: int, most: int) -> None:
        self.body = body
        self.least = least
        self.most = most
        super().__init__(body.recursive)

    def measure(self, depth: int) -> int:
        return min(self.least * self.body.shortest(depth), ENDLESS) if self.least else 0


class Nested(Node):
    """`target` is set once its rule is lowered: the only part of a node that changes after its birth."""

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
    """Nothing is admitted, whatever the depth."""
    return not node.recursive and node.levels[0] >= ENDLESS
