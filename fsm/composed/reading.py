"""Reads what the captures of a text hold.

The automaton of the whole says first whether the expression admits the text. Then the nodes are followed from left to
right, as a backtracking matcher would: the first option first, another turn of a repeat before its end, the longest
text of a leaf first. A place (node, what is left after it, offset) that has led to nothing is not tried again, so the
work is bounded by the number of places and not by the number of readings.

    _Left      what is left after a node: parts of a sequence, turns of a repeat, the end of a capture; equal ones are
               one object
    trail      the captures that were opened and closed on the way, the last one first
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...lang.errors import ConstraintError
from ..automaton.automaton import Automaton
from ..errors import ConstraintRefused, Limits
from ..language import Grammar
from .grammars import Leaf, expression_grammar, leaf_grammar
from .nodes import (
    Captured,
    Either,
    Node,
    Reference,
    Repeated,
    Run,
    Tree,
    Words,
    children,
    lenient_tree,
    read,
    repeating,
)

MOST_STEPS = 2_000_000  # of one reading: places tried, and bytes that leaves looked at


def captures_of(source: str, text: str, *, lenient: bool = False) -> Mapping[str, Any] | None:
    """Returns what each name holds in a text; None where the expression does not admit it.

    lenient: reads JSON with any blanks and with members in any order, as models elsewhere write it.

    A name that may come once holds a text or None, one that may come several times the list of them, in order.

    Raises:
        ConstraintError: the expression is wrong, or the text takes more than two million steps to read.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return None  # half of a surrogate pair
    try:
        admits, tree, names, many = _opened(source, lenient)
        if not _accepts(admits, data):
            return None
        spans = _Reading(tree, data).spans() if names else []
    except ConstraintRefused as error:
        raise ConstraintError(f"constraint: {error}") from None
    except RecursionError:
        raise ConstraintError("constraint: it is nested too deeply; write a flatter one") from None
    found: dict[str, Any] = {name: [] if name in many else None for name in names}
    for name, start, end in spans:
        held = data[start:end].decode()
        if name in many:
            found[name].append(held)
        else:
            found[name] = held
    return found


@lru_cache(maxsize=256)
def opened_grammar(source: str, *, lenient: bool) -> Grammar:
    """Compiles an expression's grammar, cached. lenient: any blanks in JSON, and members in any order.

    Raises:
        ConstraintError: the source is no expression.
        ConstraintRefused: our automata refuse it.
    """
    return expression_grammar(lenient_tree(read(source)) if lenient else read(source), Limits()).grammar


@lru_cache(maxsize=256)
def _opened(source: str, lenient: bool) -> tuple[Grammar, Tree, tuple[str, ...], frozenset[str]]:
    tree = lenient_tree(read(source)) if lenient else read(source)
    names = dict.fromkeys(name for node in (tree.start, *tree.rules.values()) for name in _names(node))
    return opened_grammar(source, lenient=lenient), tree, tuple(names), repeating(tree)


def _names(node: Node) -> Iterator[str]:
    if isinstance(node, Captured):
        yield node.name
    for each in children(node):
        yield from _names(each)


def _accepts(grammar: Grammar, data: bytes) -> bool:
    automaton = Automaton(grammar)
    state = automaton.run(automaton.start, data)
    return state >= 0 and automaton.accepting(state)


@dataclass(frozen=True, slots=True, eq=False)
class _Left:
    """Holds what is left after a node inside `node`, then after `node` itself.

    Attributes:
        node: a sequence, a repeat or a capture.
        least: of a sequence the next part, of a repeat the turns that have to follow.
        most: turns of a repeat that may follow; None: without end.
        since: where the turn of a repeat began that has to take something; -1: it need not.
        parent: what comes after `node`; None: the end of the text.
    """

    node: Run | Repeated | Captured
    least: int
    most: int | None
    since: int
    parent: _Left | None


_Trail = tuple[tuple[str, bool, int], Any] | None  # a capture's name, whether it opens, where; Any: another _Trail


class _Reading:
    """Reads one text that the expression admits."""

    def __init__(self, tree: Tree, data: bytes) -> None:
        self._rules = tree.rules
        self._start = tree.start
        self._data = data
        self._steps = 0
        self._automata: dict[Leaf, Automaton] = {}
        self._ends: dict[tuple[int, int], list[int]] = {}  # (id of a leaf, offset)
        self._lefts: dict[tuple[int, int, int | None, int, int], _Left] = {}
        self._takes: dict[int, bool] = {}  # id of a repeat's body → whether each of its texts takes something
        self._waiting: list[tuple[Node | None, _Left | None, int, _Trail]] = []

    def spans(self) -> list[tuple[str, int, int]]:
        """Returns (name, start, end) of each capture in bytes, in the order in which they begin.

        Raises:
            ConstraintError: too many steps.
        """
        self._waiting.append((self._start, None, 0, None))
        tried: set[tuple[int, int, int]] = set()
        while self._waiting:
            node, left, at, trail = self._waiting.pop()
            if node is None and left is None:
                if at == len(self._data):
                    return _spans(trail)
                continue
            place = (id(node), id(left), at)
            if place in tried:
                continue
            tried.add(place)
            self._count(1)
            if node is not None:
                self._go_in(node, left, at, trail)
            elif left is not None:
                self._go_on(left, at, trail)
        raise AssertionError("the automaton admits the text, so there is a reading")

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise ConstraintError(
                "constraint: finding its captures in this text takes too many steps; write parts that differ in what "
                "they begin with"
            )

    def _left(
        self, node: Run | Repeated | Captured, least: int, most: int | None, since: int, parent: _Left | None
    ) -> _Left:
        key = (id(node), least, most, since, id(parent))
        known = self._lefts.get(key)
        if known is None:
            known = self._lefts[key] = _Left(node, least, most, since, parent)
        return known

    def _go_in(self, node: Node, left: _Left | None, at: int, trail: _Trail) -> None:
        """Adds what may come next, the first to be tried last."""
        match node:
            case Run(parts):
                self._waiting.append((parts[0], self._left(node, 1, None, -1, left), at, trail))
            case Either(options):
                self._waiting += [(each, left, at, trail) for each in reversed(options)]
            case Repeated(_, least, most):
                self._turn(node, least, most, left, at, trail)
            case Captured(name, body):
                self._waiting.append((body, self._left(node, 0, None, -1, left), at, ((name, True, at), trail)))
            case Reference(rule):
                self._waiting.append((self._rules[rule], left, at, trail))
            case _:
                self._waiting += [(None, left, end, trail) for end in self._leaf_ends(node, at)]

    def _go_on(self, left: _Left, at: int, trail: _Trail) -> None:
        """Adds what may come after a node inside `left.node`."""
        match left.node:
            case Run(parts):
                last = left.least == len(parts) - 1
                after = left.parent if last else self._left(left.node, left.least + 1, None, -1, left.parent)
                self._waiting.append((parts[left.least], after, at, trail))
            case Captured(name):
                self._waiting.append((None, left.parent, at, ((name, False, at), trail)))
            case Repeated():
                if at != left.since:
                    self._turn(left.node, left.least, left.most, left.parent, at, trail)

    def _turn(self, node: Repeated, least: int, most: int | None, parent: _Left | None, at: int, trail: _Trail) -> None:
        """Adds the end of a repeat and, before it, another turn. One that need not come has to take something."""
        if least == 0:
            self._waiting.append((None, parent, at, trail))
        if most != 0:
            since = at if least == 0 and not self._takes_some(node.body) else -1
            following = self._left(node, max(least - 1, 0), None if most is None else most - 1, since, parent)
            self._waiting.append((node.body, following, at, trail))

    def _takes_some(self, body: Node) -> bool:
        known = self._takes.get(id(body))
        if known is None:
            known = self._takes[id(body)] = not self._may_be_empty(body)
        return known

    def _may_be_empty(self, node: Node) -> bool:
        match node:
            case Run(parts):
                return all(map(self._may_be_empty, parts))
            case Either(options):
                return any(map(self._may_be_empty, options))
            case Repeated(body, least):
                return least == 0 or self._may_be_empty(body)
            case Captured(_, body):
                return self._may_be_empty(body)
            case Reference():
                return True  # perhaps: then turns are looked at, which is right for any body
            case Words(text):
                return not text
            case _:
                automaton = self._automaton(node)
                return automaton.accepting(automaton.start)

    def _leaf_ends(self, leaf: Leaf, at: int) -> list[int]:
        """Returns where texts of a leaf end that begin at `at`, ascending."""
        if isinstance(leaf, Words):
            data = leaf.text.encode()
            return [at + len(data)] if self._data.startswith(data, at) else []
        known = self._ends.get((id(leaf), at))
        if known is None:
            known = self._ends[id(leaf), at] = self._found_ends(self._automaton(leaf), at)
        return known

    def _found_ends(self, automaton: Automaton, at: int) -> list[int]:
        state = automaton.start
        ends = [at] if automaton.accepting(state) else []
        for offset in range(at, len(self._data)):
            state = automaton.step(state, self._data[offset])
            if state < 0:
                break
            if automaton.accepting(state):
                ends.append(offset + 1)
        self._count(offset - at if at < len(self._data) else 0)
        return ends

    def _automaton(self, leaf: Leaf) -> Automaton:
        known = self._automata.get(leaf)
        if known is None:
            known = self._automata[leaf] = Automaton(_leaf_grammar(leaf))
        return known


@lru_cache(maxsize=1024)
def _leaf_grammar(leaf: Leaf) -> Grammar:
    return leaf_grammar(leaf, Limits())


def _spans(trail: _Trail) -> list[tuple[str, int, int]]:
    """Returns (name, start, end) of the captures of a trail."""
    events: list[tuple[str, bool, int]] = []
    while trail is not None:
        event, trail = trail
        events.append(event)
    found: list[tuple[str, int, int]] = []
    opened: list[int] = []  # places in `found`, the innermost last
    for name, opens, at in reversed(events):
        if opens:
            opened.append(len(found))
            found.append((name, at, at))
        else:
            place = opened.pop()
            found[place] = (name, found[place][1], at)
    return found
