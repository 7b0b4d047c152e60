"""The nodes of an expression, as they travel in the source of a constraint of the kind "expression".

    {"start": {"type": "sequence", "parts": [{"type": "regex", "pattern": "[0-9]+"}, {"type": "text", "text": " a"}]}}

A node says which texts it admits; `grammars` makes automata of it. Rules are what recursive expressions refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec

from ...lang.errors import ConstraintError
from ...lang.protocol import JsonKeyOrder, JsonWhitespace

MOST_SOURCE_BYTES = 256 << 10
MOST_LEVELS = 100  # of nodes inside each other, without rules
MOST_TURNS = 1 << 20  # of a repeat


class _Part(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    pass


class Words(_Part, frozen=True, tag="text"):
    """Exactly this text."""

    text: str


class Pattern(_Part, frozen=True, tag="regex"):
    """The texts that a regular expression matches from end to end; it sees nothing of what stands around them."""

    pattern: str


class Values(_Part, frozen=True, tag="json"):
    """JSON of a schema, which is given as JSON text."""

    schema: str
    whitespace: JsonWhitespace = "spaced"
    key_order: JsonKeyOrder = "declared"


class Run(_Part, frozen=True, tag="sequence"):
    """The parts one after the other."""

    parts: tuple[Node, ...]


class Either(_Part, frozen=True, tag="either"):
    """One of the options."""

    options: tuple[Node, ...]


class Repeated(_Part, frozen=True, tag="repeat"):
    """`body` at least `least` and at most `most` times; None: without end."""

    body: Node
    least: Annotated[int, msgspec.Meta(ge=0, le=MOST_TURNS)] = 0
    most: Annotated[int, msgspec.Meta(ge=0, le=MOST_TURNS)] | None = None


class Captured(_Part, frozen=True, tag="capture"):
    """`body`, whose text gets a name."""

    name: str
    body: Node


class Reference(_Part, frozen=True, tag="rule"):
    """A rule of the expression."""

    rule: str


class Excerpt(_Part, frozen=True, tag="substring"):
    """One or more pieces that follow each other; together they are the text that is quoted from."""

    pieces: tuple[str, ...]


class UpTo(_Part, frozen=True, tag="until"):
    """Any text that ends with `mark`, and in which no mark of `among` ends before. `mark` is one of them."""

    mark: str
    among: tuple[str, ...]


class Without(_Part, frozen=True, tag="without"):
    """Any text in which no mark occurs; the empty one is such a text."""

    marks: tuple[str, ...]


Node = Words | Pattern | Values | Run | Either | Repeated | Captured | Reference | Excerpt | UpTo | Without
Rules = Mapping[str, Node]


class Tree(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A whole expression: its first node, and the rules that the nodes refer to."""

    start: Node
    rules: dict[str, Node] = {}


def children(node: Node) -> tuple[Node, ...]:
    """Returns the nodes directly inside this one; of a reference none."""
    match node:
        case Run(parts):
            return parts
        case Either(options):
            return options
        case Repeated(body) | Captured(_, body):
            return (body,)
        case _:
            return ()


def written(tree: Tree) -> str:
    """Returns the source of an expression.

    Raises:
        ConstraintError: it is longer than 256 KiB.
    """
    source = msgspec.json.encode(tree)
    if len(source) > MOST_SOURCE_BYTES:
        raise ConstraintError(
            f"constraint: its expression has {len(source)} bytes; at most {MOST_SOURCE_BYTES} are allowed: write "
            "shorter texts, or what repeats with .repeat()"
        )
    return source.decode()


def read(source: str) -> Tree:
    """Reads the source of an expression.

    Raises:
        ConstraintError: it is too long, not of this shape, nested too deep, or refers to a rule that it does not have.
    """
    if len(source.encode("utf-8", "surrogatepass")) > MOST_SOURCE_BYTES:
        raise ConstraintError(f"constraint: the source has more than {MOST_SOURCE_BYTES} bytes; write a shorter one")
    try:
        tree = msgspec.json.decode(source, type=Tree)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"constraint: {error}; umbel's expressions write the source") from None
    for node in (tree.start, *tree.rules.values()):
        check(node, tree.rules)
    return tree


def check(node: Node, rules: Rules) -> None:
    """Raises ConstraintError for a node that is nested too deep, or refers to a rule that is not there."""
    waiting = [(node, 1)]
    while waiting:
        at, level = waiting.pop()
        if level > MOST_LEVELS:
            raise ConstraintError(
                f"constraint: the expression is nested more than {MOST_LEVELS} deep; write ul.recursive() for what "
                "nests without end"
            )
        if isinstance(at, Reference) and at.rule not in rules:
            raise ConstraintError(
                "constraint: the argument of a ul.recursive() is used outside of it; use what ul.recursive() returns"
            )
        waiting += [(each, level + 1) for each in children(at)]


def rebuilt(node: Node, change: Callable[[Node], Node]) -> Node:
    """Returns a node in which `change` was made to each leaf and each reference."""
    match node:
        case Run(parts):
            return Run(tuple(rebuilt(each, change) for each in parts))
        case Either(options):
            return Either(tuple(rebuilt(each, change) for each in options))
        case Repeated(body, least, most):
            return Repeated(rebuilt(body, change), least, most)
        case Captured(name, body):
            return Captured(name, rebuilt(body, change))
        case _:
            return change(node)


def lenient_tree(tree: Tree) -> Tree:
    """Returns an expression that admits JSON with any blanks, and with members in any order."""

    def relaxed(node: Node) -> Node:
        return Values(node.schema, "flexible", "any") if isinstance(node, Values) else node

    return Tree(rebuilt(tree.start, relaxed), {name: rebuilt(node, relaxed) for name, node in tree.rules.items()})


def repeating(tree: Tree) -> frozenset[str]:
    """Returns the names of captures that one text may hold several times: in repeats, in rules, and in several parts
    of a sequence."""
    counts = _captures(tree.start)
    several = {name for name, count in counts.items() if count > 1}
    return frozenset(several.union(*map(_captures, tree.rules.values())))


def certain(tree: Tree) -> frozenset[str]:
    """Returns the names of captures that every text holds exactly once."""
    return frozenset(_certain(tree.start) - repeating(tree))


def _certain(node: Node) -> set[str]:
    """Returns names that every text of a node holds; of rules none is known."""
    inner = [_certain(each) for each in children(node)]
    match node:
        case Either():
            return set.intersection(*inner) if inner else set()
        case Repeated(_, 0):
            return set()
        case Captured(name):
            return {name}.union(*inner)
    return set().union(*inner)


def capture_names(tree: Tree) -> frozenset[str]:
    """Returns the names of all captures."""
    return frozenset(name for node in (tree.start, *tree.rules.values()) for name in _captures(node))


def captured_schema(tree: Tree, name: str) -> str:
    """Returns the schema of the JSON that a name captures; "" where it captures anything else."""
    waiting = [tree.start, *tree.rules.values()]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Captured) and node.name == name and isinstance(node.body, Values):
            return node.body.schema
        waiting += children(node)
    return ""


def _captures(node: Node) -> dict[str, int]:
    """Returns how often each name may come, 2 for more than once."""
    inner = [_captures(each) for each in children(node)]
    counts: dict[str, int] = {}
    for each in inner:
        for name, count in each.items():
            known = counts.get(name, 0)
            counts[name] = max(known, count) if isinstance(node, Either) else min(known + count, 2)
    match node:
        case Repeated(_, _, most) if most is None or most > 1:
            return dict.fromkeys(counts, 2)
        case Captured(name):
            return {**counts, name: min(counts.get(name, 0) + 1, 2)}
    return counts


def spelled(tree: Tree) -> str:
    """Writes an expression for people and for models: "text", /regular expression/, JSON(schema), ( a | b )."""
    rules = [f"{name} = {_spelled(node)}" for name, node in tree.rules.items()]
    return "\nwhere ".join([_spelled(tree.start), *rules])


def _spelled(node: Node) -> str:
    match node:
        case Words(text):
            return _quoted(text)
        case Pattern(pattern):
            return f"/{pattern}/"
        case Values(schema):
            return f"JSON({schema})"
        case Run(parts):
            return " ".join(map(_spelled, parts))
        case Either(options):
            return f"( {' | '.join(map(_spelled, options))} )"
        case Repeated(body, 0, 1):
            return f"( {_spelled(body)} | nothing )"
        case Repeated(body, least, most):
            return f"( {_spelled(body)} ){{{least},{'' if most is None else most}}}"
        case Captured(_, body):
            return _spelled(body)
        case Reference(rule):
            return rule
        case Excerpt(pieces):
            return f"( a part of {_quoted(''.join(pieces))} )"
        case UpTo(mark, among):
            others = [each for each in among if each != mark]
            without = f" and without {' or '.join(map(_quoted, others))}" if others else ""
            return f"( anything up to the first {_quoted(mark)}{without} )"
        case Without(marks):
            return f"( anything without {' or '.join(map(_quoted, marks))} )"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
