"""A grammar to nodes: one walk without recursion in Python, about a microsecond for each part of the grammar."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush
from typing import assert_never

from .errors import ConstraintRefused
from .language import (
    Both,
    Call,
    Chars,
    Concat,
    Dfa,
    Grammar,
    Language,
    Literal,
    Ranges,
    Repeat,
    Spelled,
    Union,
    Without,
)
from .limits import Limits
from .nodes import (
    Leaf,
    Loop,
    Nested,
    Node,
    Options,
    Sequence,
    beyond_the_empty_text,
    literal,
    loop,
    options,
    sequence,
)
from .places import END, ENDLESS, Character, Place, characters, covers_plain, shortest_character, spell


def lower(grammar: Grammar, limits: Limits) -> Node:
    """The node of the grammar's start.

    Raises:
        ConstraintRefused: nothing is admitted, or nothing within `limits.depth` nested recursive calls.
    """
    lowering = _Lowering(grammar)
    root = lowering.lower(grammar.start)
    if lowering.nested:
        recursive = _ordered([root, *(call.body() for call in lowering.nested.values())])
        _measure(recursive, limits.depth)
        if _rewrite_nullable_bodies(recursive):
            _measure(recursive, limits.depth)
    if root.shortest(limits.depth) >= ENDLESS:
        raise ConstraintRefused(
            f"no text satisfies this constraint within {limits.depth} levels of nesting; write a constraint that "
            "admits a text"
        )
    return root


class _Lowering:
    """One walk, parts before what holds them."""

    def __init__(self, grammar: Grammar) -> None:
        self._rules = grammar.rules
        self._done: tuple[dict[int, Node], dict[int, Node]] = ({}, {})  # by identity; the second: spelled
        self._open: set[tuple[str, bool]] = set()  # rules that are being lowered
        self.nested: dict[tuple[str, bool], Nested] = {}  # recursive calls by rule, spelled or not
        self._equal: dict[Hashable, Node] = {}

    def lower(self, start: Language) -> Node:
        waiting: list[tuple[Language, bool]] = [(start, False)]
        while waiting:
            language, spelled = waiting[-1]
            done = self._done[spelled]
            if id(language) in done:
                waiting.pop()
                continue
            missing = self._missing(language, spelled)
            if missing:
                waiting += reversed(missing)
                continue
            waiting.pop()
            done[id(language)] = self._node(language, spelled)
        for (rule, spelled), call in self.nested.items():
            call.target = self._done[spelled][id(self._rules[rule])]
        return self._done[False][id(start)]

    def _missing(self, language: Language, spelled: bool) -> list[tuple[Language, bool]]:
        """Parts that have to be lowered before this one."""
        parts: tuple[Language, ...]
        match language:
            case Literal() | Chars() | Dfa():
                return []
            case Concat():
                parts = language.parts
            case Union():
                parts = language.options
            case Repeat():
                parts = (language.body,)
            case Spelled():
                parts, spelled = (language.body,), True
            case Call():
                if (language.rule, spelled) in self._open:
                    return []
                self._open.add((language.rule, spelled))
                parts = (self._rule(language.rule),)
            case Both() | Without():
                raise AssertionError("an automaton reads grammars that boolean.resolve has been through")
            case _:
                assert_never(language)
        done = self._done[spelled]
        return [(part, spelled) for part in parts if id(part) not in done]

    def _rule(self, name: str) -> Language:
        try:
            return self._rules[name]
        except KeyError:
            raise ConstraintRefused(f"the rule {name!r} is called and is not defined", keyword=name) from None

    def _node(self, language: Language, spelled: bool) -> Node:
        done = self._done[spelled]
        match language:
            case Literal(data):
                return self._once(literal, spell(data) if spelled else data)
            case Chars(ranges):
                return self._once(Leaf, characters(ranges, spelled))
            case Dfa():
                return self._once(_automaton_leaf, language, spelled)
            case Concat(parts):
                return self._once(sequence, tuple([done[id(part)] for part in parts]))
            case Union(given):
                return self._once(options, tuple([done[id(option)] for option in given]))
            case Repeat(body, least, most):
                return self._once(loop, done[id(body)], least, ENDLESS if most is None else most)
            case Spelled(body):
                return self._done[True][id(body)]
            case Call(rule):
                return done.get(id(self._rules[rule])) or self._call(rule, spelled)
            case Both() | Without():
                raise AssertionError("an automaton reads grammars that boolean.resolve has been through")
            case _:
                assert_never(language)

    def _once(self, make: Callable[..., Node], *arguments: Hashable) -> Node:
        """Equal parts of a grammar are one node: what is ambiguous between them is not ambiguous any more."""
        key = (make, arguments)
        node = self._equal.get(key)
        if node is None:
            node = self._equal[key] = make(*arguments)
        return node

    def _call(self, rule: str, spelled: bool) -> Nested:
        call = self.nested.get((rule, spelled))
        if call is None:
            call = self.nested[rule, spelled] = Nested(rule)
        return call


def _automaton_leaf(dfa: Dfa, spelled: bool) -> Leaf:
    return Leaf(character_automaton(dfa, spelled))


def character_automaton(dfa: Dfa, spelled: bool) -> Place:
    """The place before state 0; shortest lengths by Dijkstra's algorithm from the accepting states."""
    into: list[list[tuple[int, int]]] = [[] for _ in dfa.edges]  # [states]: (state before, bytes of a character)
    for state, edges in enumerate(dfa.edges):
        for ranges, target in edges:
            into[target].append((state, shortest_character(ranges, spelled)))
    shortest = [0 if accepting else ENDLESS for accepting in dfa.accepting]
    queue = [(0, state) for state, accepting in enumerate(dfa.accepting) if accepting]
    heapify(queue)
    while queue:
        length, state = heappop(queue)
        if length > shortest[state]:
            continue
        for before, step in into[state]:
            if length + step < shortest[before]:
                shortest[before] = length + step
                heappush(queue, (length + step, before))
    labelled: list[list[tuple[int, int, Place]]] = [[] for _ in dfa.edges]
    places = [
        END if accepting and not edges else Character(label, length, spelled=spelled, accepting=accepting, plain=plain)
        for label, edges, length, accepting, plain in zip(
            labelled, dfa.edges, shortest, dfa.accepting, _plain_runs(dfa), strict=True
        )
    ]
    for label, edges in zip(labelled, dfa.edges, strict=True):
        behind = [(ranges, places[target]) for ranges, target in edges if shortest[target] < ENDLESS]
        label += sorted(((first, last, place) for ranges, place in behind for first, last in ranges), key=_first)
    return places[0]


def _first(item: tuple[int, int, Place]) -> int:
    return item[0]


def _plain_runs(dfa: Dfa) -> list[int]:
    """For each state, how many plain characters are certain to be taken, whichever they are."""
    covered = [covers_plain(_united(edges)) for edges in dfa.edges]
    runs = [ENDLESS if full else 0 for full in covered]
    if not any(covered):
        return runs
    into: list[list[int]] = [[] for _ in dfa.edges]
    for state, edges in enumerate(dfa.edges):
        for ranges, target in edges:
            if covered[state] and _meets_plain(ranges):
                into[target].append(state)
    layer = [state for state, full in enumerate(covered) if not full]
    length = 0
    while layer:  # breadth first against the edges: a run ends where the nearest state does not cover
        length += 1
        layer = [before for state in layer for before in into[state] if runs[before] == ENDLESS]
        for state in layer:
            runs[state] = length
        layer = list(dict.fromkeys(layer))
    return runs


def _united(edges: tuple[tuple[Ranges, int], ...]) -> list[tuple[int, int]]:
    return sorted(item for ranges, _ in edges for item in ranges)


def _meets_plain(ranges: Ranges) -> bool:
    return any(last >= 0x20 and not (first == last and first in (0x22, 0x5C, 0x7F)) for first, last in ranges)


def _measure(recursive: list[Node], depth: int) -> None:
    """Shortest lengths by the number of nested recursive calls, until one more call changes nothing."""
    calls = [node for node in recursive if type(node) is Nested]
    for node in recursive:
        node.levels = []
    for level in range(depth + 1):
        for node in recursive:
            node.levels.append(node.measure(level))
        if level and all(call.levels[-1] == call.levels[-2] for call in calls):
            break


def _rewrite_nullable_bodies(recursive: list[Node]) -> bool:
    """Loops whose body may be empty get a body that may not; `recursive` gets the nodes that this makes."""
    nullable = [node for node in recursive if type(node) is Loop and node.body.nullable]
    if not nullable:
        return False
    nested: dict[Node, Nested] = {}
    made: list[Node] = []
    for node in nullable:
        node.body, node.least = beyond_the_empty_text(node.body, nested), 0
        made.append(node.body)
    pending = dict(nested)
    while pending:
        target, call = pending.popitem()
        before = set(nested)
        call.target = beyond_the_empty_text(target, nested)
        made.append(call.target)
        pending.update({key: nested[key] for key in nested.keys() - before})
    recursive[:] = _ordered([*made, *recursive])
    return True


def _ordered(roots: list[Node]) -> list[Node]:
    """All recursive nodes below `roots`, parts before what holds them; a call is no part of what it calls."""
    ordered: dict[Node, None] = {}
    waiting = list(reversed(roots))
    while waiting:
        node = waiting[-1]
        missing = [part for part in _parts(node) if part.recursive and part not in ordered]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        if node.recursive:
            ordered[node] = None
    return list(ordered)


def _parts(node: Node) -> tuple[Node, ...]:
    match node:
        case Sequence():
            return node.parts
        case Options():
            return node.options
        case Loop():
            return (node.body,)
        case _:
            return ()
