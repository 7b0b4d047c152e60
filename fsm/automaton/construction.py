"""Nodes put together: neighbouring literals joined, options that begin alike taken together, empty turns left out."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many

from .nodes import Leaf, Loop, Nested, Node, Options, Sequence, dead
from .places import Choice, Option, Text


def literal(data: bytes) -> Leaf:
    return Leaf(Text(data))


EMPTY = literal(b"")
NEVER = Options(())


def single_literal(node: Node) -> bytes | None:
    """The bytes of a node that is a literal."""
    return node.place.data if type(node) is Leaf and type(node.place) is Text else None


def sequence(parts: Many[Node]) -> Node:
    """Neighbouring literals are joined; one part is itself."""
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
    """Options without recursion that begin with literals become one trie; options that admit nothing go.

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
        others.insert(0, Leaf(Choice(trie)))
    else:
        others = replaced + others
    if len(others) == 1:
        return others[0]
    return Options(tuple(others)) if others else NEVER


_FACTORED = 16  # levels of common beginnings inside common beginnings


def _factored(nodes: list[Node], factored: int) -> list[Node]:
    """Sequences with a common beginning become one: p q | p r = p (q | r)."""
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
    """Equal for equal literals, which `sequence` makes anew, and for one and the same node."""
    data = single_literal(node)
    return node if data is None else data


def _flattened(given: Many[Node]) -> list[Node]:
    """Options of options, each once, without those that admit nothing."""
    flat: dict[Node, None] = {}
    for node in given:
        if type(node) is Options:
            flat.update(dict.fromkeys(node.options))
        elif not dead(node):
            flat[node] = None
    return list(flat)


def _beginning(node: Node) -> Many[Option] | None:
    """A node as options of a trie: byte strings with what follows each."""
    if type(node) is Leaf:
        if type(node.place) is Text:
            return [(node.place.data, None, 0)]
        return node.place.options if type(node.place) is Choice else None
    if type(node) is Sequence and not node.recursive:
        data = single_literal(node.parts[0])
        if data:
            rest = sequence(node.parts[1:])
            return [(data, rest, rest.shortest(0))]
    return None


def loop(body: Node, least: int, most: int) -> Node:
    """A body that may be empty is repeated without its empty text, which lets every count down to zero in."""
    if most == 0:
        return EMPTY
    if dead(body):
        return EMPTY if least == 0 else NEVER
    if not body.recursive and body.nullable:
        body, least = beyond_the_empty_text(body), 0
        if dead(body):
            return EMPTY
    return body if least == most == 1 else Loop(body, least, most)


def beyond_the_empty_text(node: Node, nested: dict[Node, Nested] | None = None) -> Node:
    """The texts of a node but for the empty one.

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
        done[current] = _beyond(current, done, nested)
    return done[node]


def _nullable_parts(node: Node) -> tuple[Node, ...]:
    if not node.nullable or type(node) is Leaf:
        return ()
    if type(node) is Sequence:
        return node.parts
    if type(node) is Options:
        return tuple(option for option in node.options if option.nullable)
    return ()


def _beyond(node: Node, done: dict[Node, Node], nested: dict[Node, Nested] | None) -> Node:
    if not node.nullable:
        return node
    match node:
        case Leaf():
            if type(node.place) is Text:
                return NEVER
            if type(node.place) is not Choice:
                return Leaf(node.place.beyond_the_empty_text())
            kept = [option for option in node.place.options if option[0]]
            # A rest of a trie stands behind at least one byte: `_beginning` takes no empty literal.
            return Leaf(Choice(kept)) if kept else NEVER
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
