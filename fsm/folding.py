"""Walking expressions from the leaves up, and building them again around other parts."""

from collections.abc import Callable
from typing import TypeVar

from .algebra import both, concat, repeat, union, without
from .language import EMPTY_TEXT, NOTHING, AnyOrder, Both, Concat, Language, Repeat, Spelled, Union, Without

Result = TypeVar("Result")


def children(node: Language) -> tuple[Language, ...]:
    """The expressions that this one is made of."""
    if isinstance(node, Concat):
        return node.parts
    if isinstance(node, Union):
        return node.options
    if isinstance(node, Repeat | Spelled):
        return (node.body,)
    if isinstance(node, Both | Without):
        return (node.left, node.right)
    if isinstance(node, AnyOrder):
        return (node.separator, *node.parts, *(() if node.others is None else (node.others,)))
    return ()


def size(node: Language) -> int:
    """How many nodes are written out, shared ones as often as they are used."""
    pending, count = [node], 0
    while pending:
        count += 1
        pending.extend(children(pending.pop()))
    return count


def fold(root: Language, combine: Callable[[Language, tuple[Result, ...]], Result], known: dict[int, Result]) -> Result:
    """`combine(node, results of its children)` from the leaves up, once for nodes that are shared, without recursion.

    `known` maps ids of nodes to results; who keeps it between calls keeps the nodes alive.
    """
    pending = [(root, False)]
    while pending:
        node, ready = pending.pop()
        if id(node) in known:
            continue
        inner = children(node)
        if ready or not inner:
            known[id(node)] = combine(node, tuple(known[id(each)] for each in inner))
        else:
            pending.append((node, True))
            pending.extend((each, False) for each in inner)
    return known[id(root)]


def rebuilt(node: Language, inner: tuple[Language, ...]) -> Language:
    """The node around other children, put together as above; the node itself where they are its own."""
    same = all(new is old for new, old in zip(inner, children(node), strict=True)) and NOTHING not in inner
    if same and not (isinstance(node, Repeat) and node.most is not None and node.most < max(node.least, 1)):
        return node
    match node:
        case Concat():
            return concat(inner)
        case Union():
            return union(inner)
        case Repeat(_, least, most):
            return repeat(inner[0], least, most)
        case Spelled():
            return inner[0] if inner[0] in (NOTHING, EMPTY_TEXT) else Spelled(inner[0])
        case Both():
            return both(*inner)
        case Without():
            return without(*inner)
        case AnyOrder():
            return _rearranged(node, inner)
        case _:
            return node


def any_order(node: AnyOrder) -> Language:
    """The node without parts that admit nothing; nothing itself where too few are left."""
    return _rearranged(node, children(node))


def _rearranged(node: AnyOrder, inner: tuple[Language, ...]) -> Language:
    """inner: as `children` gives them."""
    separator, parts = inner[0], inner[1 : len(node.parts) + 1]
    others = None if node.others is None or inner[-1] == NOTHING else inner[-1]
    if any(parts[index] == NOTHING for index in node.required):
        return NOTHING
    kept = [index for index, part in enumerate(parts) if part != NOTHING]
    found = AnyOrder(
        tuple(parts[index] for index in kept),
        separator,
        others,
        tuple(place for place, index in enumerate(kept) if index in node.required),
        sum(index < node.ordered for index in kept),
        node.least,
        node.most,
        node.others_least,
    )
    arrangement = found.arrangement
    return found if arrangement.reaches_the_end(*arrangement.start) else NOTHING
