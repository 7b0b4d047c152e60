"""Lowers a grammar to nodes: one walk without recursion in Python, about a microsecond for each part of the grammar."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ..algebra import children
from ..errors import ConstraintRefused, Limits
from ..language import (
    AnyOrder,
    Arrangement,
    Call,
    Chars,
    Concat,
    Dfa,
    Grammar,
    Language,
    Literal,
    Repeat,
    Spelled,
    Union,
)
from .characters import character_automaton, characters, spell
from .nodes import (
    Leaf,
    Loop,
    Nested,
    Node,
    Options,
    Order,
    Remaining,
    Sequence,
    literal,
    loop,
    options,
    sequence,
    without_empty_text,
)
from .places import ENDLESS

_NODE_BYTES = 600  # measured


@dataclass(frozen=True, slots=True)
class Lowered:
    """A grammar as nodes.

    root: of its start; nodes: how many were made; orders: make further ones as texts need them.
    """

    root: Node
    nodes: int
    orders: tuple[Order, ...]

    @property
    def nbytes(self) -> int:
        """About how much memory the nodes take that there are by now."""
        return _NODE_BYTES * (self.nodes + sum(order.made for order in self.orders))


def lower(grammar: Grammar, limits: Limits) -> Lowered:
    """Returns the grammar as nodes.

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
    return Lowered(root, lowering.made, tuple(lowering.orders))


class _Lowering:
    """Lowers in one walk, parts before what holds them. nested: the recursive calls, by rule."""

    def __init__(self, grammar: Grammar) -> None:
        self.nested: dict[str, Nested] = {}
        self.orders: list[Order] = []
        self._rules = grammar.rules
        self._open: set[str] = set()  # rules whose lowering has begun
        self._done: dict[int, Node] = {}  # by identity: the grammar keeps its parts alive
        self._done_spelled: dict[int, Node] = {}
        self._equal: dict[Hashable, Node] = {}

    @property
    def made(self) -> int:
        return len(self._equal)

    def lower(self, start: Language) -> Node:
        root = self._tree(start, self._done, spelled=False)
        for rule, call in self.nested.items():
            call.target = self._done[id(self._rules[rule])]
        return root

    def _tree(self, start: Language, done: dict[int, Node], *, spelled: bool) -> Node:
        """Branches on types and not by `match`: every part of every constraint comes through here."""
        waiting = [start]
        opened: set[int] = set()  # what has its parts above it on the stack
        while waiting:
            language = waiting[-1]
            identity = id(language)
            if identity in done:
                waiting.pop()
            elif type(language) is Literal:
                done[identity] = self._once(literal, spell(language.data) if spelled else language.data)
            elif type(language) is Chars:
                done[identity] = self._once(Leaf, characters(language.ranges, spelled))
            elif type(language) is Dfa:
                done[identity] = self._once(_automaton_leaf, language, spelled)
            elif type(language) is Spelled:
                assert not spelled, "text is spelled once"
                done[identity] = self._tree(language.body, self._done_spelled, spelled=True)
            elif type(language) is Call:
                assert not spelled, "spelled text holds no call"
                self._call(language.rule, identity, waiting)
            elif identity not in opened:
                opened.add(identity)
                waiting += _parts_of(language)
            else:
                done[identity] = self._branch(language, done)
        return done[id(start)]

    def _branch(self, language: Language, done: dict[int, Node]) -> Node:
        """Returns a node whose parts are done."""
        if type(language) is Concat:
            return self._once(sequence, tuple([done[id(part)] for part in language.parts]))
        if type(language) is Union:
            return self._once(options, tuple([done[id(option)] for option in language.options]))
        if type(language) is AnyOrder:
            return self._once(self._order, language.arrangement, *[done[id(part)] for part in children(language)])
        assert type(language) is Repeat, "the other nodes have no parts"
        return self._once(
            loop, done[id(language.body)], language.least, ENDLESS if language.most is None else language.most
        )

    def _order(self, arrangement: Arrangement, separator: Node, *parts: Node) -> Node:
        inner, others = (parts[:-1], parts[-1]) if arrangement.others else (parts, None)
        self.orders.append(Order(arrangement, separator, inner, others))
        return self.orders[-1].remaining(*arrangement.start)

    def _call(self, rule: str, identity: int, waiting: list[Language]) -> None:
        """Finds the rule's own node; a call while that is being made is recursive."""
        body = self._rules.get(rule)
        if body is None:
            raise ConstraintRefused(f"the rule {rule!r} is called and is not defined", keyword=rule)
        if id(body) in self._done:
            self._done[identity] = self._done[id(body)]
        elif rule in self._open:
            self._done[identity] = self.nested.setdefault(rule, Nested(rule))
        else:
            self._open.add(rule)
            waiting.append(body)

    def _once(self, make: Callable[..., Node], *arguments: Hashable) -> Node:
        """Makes equal parts of a grammar one node: what is ambiguous between them is not ambiguous any more."""
        key = (make, arguments)
        node = self._equal.get(key)
        if node is None:
            node = self._equal[key] = make(*arguments)
        return node


def _parts_of(language: Language) -> tuple[Language, ...]:
    if type(language) is Concat:
        return language.parts
    if type(language) is Union:
        return language.options
    if type(language) is Repeat:
        return (language.body,)
    if type(language) is AnyOrder:
        return children(language)
    raise AssertionError("an automaton reads grammars that boolean.resolution.resolve has been through")


def _automaton_leaf(dfa: Dfa, spelled: bool) -> Leaf:
    return Leaf(character_automaton(dfa, spelled))


def _measure(recursive: list[Node], depth: int) -> None:
    """Measures shortest lengths by the number of nested recursive calls, until one more call changes nothing."""
    calls = [node for node in recursive if type(node) is Nested]
    for node in recursive:
        node.levels = []
    for level in range(depth + 1):
        for node in recursive:
            node.levels.append(node.measure(level))
        if level and all(call.levels[-1] == call.levels[-2] for call in calls):
            break


def _rewrite_nullable_bodies(recursive: list[Node]) -> bool:
    """Gives loops whose body may be empty a body that may not; adds the nodes that this makes to `recursive`."""
    nullable = [node for node in recursive if type(node) is Loop and node.body.nullable]
    if not nullable:
        return False
    nested: dict[Node, Nested] = {}
    made: list[Node] = []
    for node in nullable:
        node.body, node.least = without_empty_text(node.body, nested), 0
        made.append(node.body)
    pending = dict(nested)
    while pending:
        target, call = pending.popitem()
        before = set(nested)
        call.target = without_empty_text(target, nested)
        made.append(call.target)
        pending.update({key: nested[key] for key in nested.keys() - before})
    recursive[:] = _ordered([*made, *recursive])
    return True


def _ordered(roots: list[Node]) -> list[Node]:
    """Returns all recursive nodes below `roots`, parts before what holds them; a call is no part of what it calls."""
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
        case Remaining():
            return node.order.inner
        case _:
            return ()
