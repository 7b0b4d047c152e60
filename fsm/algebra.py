"""Builds language nodes, so that what is written in several ways is built in one, and walks over them.

The functions keep the language and take out what an automaton would pay for: nothing and the empty text as parts,
nested concatenations and unions, neighbouring single characters, repeats of repeats. `fold` goes through an expression
from the leaves up, and `rebuilt` builds a node again around other parts.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TypeVar

from .language import (
    ANY,
    EMPTY_TEXT,
    NOTHING,
    AnyOrder,
    Call,
    Chars,
    CharSet,
    Concat,
    Dfa,
    Difference,
    Intersection,
    Language,
    Literal,
    Repeat,
    Spelled,
    Union,
)

ANY_CHARACTER = Chars(ANY.ranges)
ANY_TEXT = Repeat(ANY_CHARACTER)
_LARGEST_COUNT = 1 << 31  # counts that are multiplied stay below; beyond, repeats stay nested


def characters(members: CharSet) -> Language:
    """Returns one character of the set."""
    if not members:
        return NOTHING
    if len(members) == 1:
        return Literal(chr(members.ranges[0][0]).encode())
    return Chars(members.ranges)


def _as_characters(node: Language) -> CharSet | None:
    """Returns the set, of a node that admits texts of one character only and says so by its form."""
    match node:
        case Chars(ranges):
            return CharSet(ranges)
        case Literal(data) if 0 < len(data) <= 4:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                return None
            return CharSet.single(ord(text)) if len(text) == 1 else None
        case _:
            return None


def concat(parts: Iterable[Language]) -> Language:
    """Concatenates; literals that touch become one, repeats of the same body one repeat."""
    flat: list[Language] = []
    for part in parts:
        for each in part.parts if isinstance(part, Concat) else (part,):
            if each == NOTHING:
                return NOTHING
            _append(flat, each)
    if not flat:
        return EMPTY_TEXT
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def _append(flat: list[Language], part: Language) -> None:
    if part == EMPTY_TEXT or (flat and flat[-1] == ANY_TEXT and _may_be_empty(part)):
        return  # any text, and then perhaps something, is any text
    while part == ANY_TEXT and flat and _may_be_empty(flat[-1]):
        flat.pop()
    match (flat[-1] if flat else None), part:
        case Literal(before), Literal(after):
            flat[-1] = Literal(before + after)
        case Repeat(body, least, most), Repeat(same, more_least, more_most) if body == same:
            together = None if most is None or more_most is None else most + more_most
            flat[-1] = Repeat(body, least + more_least, together)
        case Repeat(body, least, most), same if body == same:
            flat[-1] = Repeat(body, least + 1, None if most is None else most + 1)
        case same, Repeat(body, least, most) if body == same:
            flat[-1] = Repeat(body, least + 1, None if most is None else most + 1)
        case _:
            flat.append(part)


def _may_be_empty(node: Language) -> bool:
    """Tells whether the form alone shows that the empty text is admitted, calls or not."""
    match node:
        case Repeat(least=0):
            return True
        case Union(options):
            return any(map(_may_be_empty, options))
        case _:
            return node == EMPTY_TEXT


def union(options: Iterable[Language]) -> Language:
    """Unites; single characters become one set, doubles go."""
    flat = chain.from_iterable(each.options if isinstance(each, Union) else (each,) for each in options)
    kept: dict[Language, None] = dict.fromkeys(flat)
    sets = {node: found for node in kept if (found := _as_characters(node)) is not None}
    if len(sets) > 1:
        together = characters(CharSet.of(range_ for each in sets.values() for range_ in each.ranges))
        first = next(iter(sets))
        kept = dict.fromkeys(together if node is first else node for node in kept if node is first or node not in sets)
    if len(kept) == 2 and EMPTY_TEXT in kept:
        (other,) = (node for node in kept if node != EMPTY_TEXT)
        return repeat(other, 0, 1)
    return next(iter(kept)) if len(kept) == 1 else Union(tuple(kept))


def repeat(body: Language, least: int, most: int | None) -> Language:
    """Repeats `body` from `least` to `most` times; with `most` below `least` nothing."""
    if most is not None and most < least:
        return NOTHING
    if body == EMPTY_TEXT or most == 0:
        return EMPTY_TEXT
    if body == NOTHING:
        return NOTHING if least else EMPTY_TEXT
    if least == most == 1:
        return body
    if isinstance(body, Repeat):
        nested = _repeat_of_repeat(body, least, most)
        if nested is not None:
            return nested
    return Repeat(body, least, most)


def _repeat_of_repeat(inner: Repeat, least: int, most: int | None) -> Language | None:
    """Flattens (x{a,b}){c,d} to x{ac,bd} where the counts leave no gap: with a of 0 or 1 they never do.

    Fixed counts (a = b, c = d) leave none either.
    """
    if inner.most == 0:
        return EMPTY_TEXT
    gapless = inner.least <= 1 or (least == most and inner.least == inner.most)
    together = None if most is None or inner.most is None else most * inner.most
    if not gapless or inner.least * least > _LARGEST_COUNT or (together or 0) > _LARGEST_COUNT:
        return None
    return repeat(inner.body, inner.least * least, together)


def intersection(left: Language, right: Language) -> Language:
    """Returns the texts that both sides admit, without a product where one side decides."""
    if left == NOTHING or right == NOTHING:
        return NOTHING
    if left in (ANY_TEXT, right):
        return right
    if right == ANY_TEXT:
        return left
    for one, other in ((left, right), (right, left)):
        if one == EMPTY_TEXT:
            return EMPTY_TEXT if nullable(other) else NOTHING
    return Intersection(left, right)


def difference(left: Language, right: Language) -> Language:
    """Returns the texts that `left` admits and `right` does not."""
    if left in (NOTHING, right) or right == ANY_TEXT:
        return NOTHING
    if right == NOTHING or (right == EMPTY_TEXT and not nullable(left)):
        return left
    if left == EMPTY_TEXT:
        return NOTHING if nullable(right) else EMPTY_TEXT
    return Difference(left, right)


def nullable(node: Language) -> bool:
    """Tells whether the empty text is admitted. Of a language without calls."""
    match node:
        case Literal(data):
            return not data
        case Chars():
            return False
        case Concat(parts):
            return all(map(nullable, parts))
        case Union(options):
            return any(map(nullable, options))
        case Repeat(body, least):
            return not least or nullable(body)
        case Dfa(accepting):
            return accepting[0]
        case Spelled(body):
            return nullable(body)
        case AnyOrder():
            return False
        case Intersection(left, right):
            return nullable(left) and nullable(right)
        case Difference(left, right):
            return nullable(left) and not nullable(right)
        case _:
            raise AssertionError("a call can be nullable in its grammar only")


def admits_newline(node: Language) -> bool:
    """Tells whether the text of one line feed is admitted. Of a language without calls."""
    match node:
        case Literal(data):
            return data == b"\n"
        case Chars(ranges):
            return 0x0A in CharSet(ranges)
        case Concat(parts):
            solid = [part for part in parts if not nullable(part)]
            return admits_newline(solid[0]) if len(solid) == 1 else not solid and any(map(admits_newline, parts))
        case Union(options):
            return any(map(admits_newline, options))
        case Repeat(body, least):
            return (least <= 1 or nullable(body)) and admits_newline(body)
        case Dfa(accepting, edges):
            return any(accepting[target] and 0x0A in CharSet(ranges) for ranges, target in edges[0])
        case Spelled():
            return False
        case Intersection(left, right):
            return admits_newline(left) and admits_newline(right)
        case Difference(left, right):
            return admits_newline(left) and not admits_newline(right)
        case _:
            raise AssertionError("what a call admits is known in its grammar only")


Result = TypeVar("Result")


def children(node: Language) -> tuple[Language, ...]:
    """Returns the expressions that this one is made of."""
    if isinstance(node, Concat):
        return node.parts
    if isinstance(node, Union):
        return node.options
    if isinstance(node, Repeat | Spelled):
        return (node.body,)
    if isinstance(node, Intersection | Difference):
        return (node.left, node.right)
    if isinstance(node, AnyOrder):
        return (node.separator, *node.parts, *(() if node.others is None else (node.others,)))
    return ()


def size(node: Language) -> int:
    """Counts the nodes that are written out, shared ones as often as they are used."""
    pending, count = [node], 0
    while pending:
        count += 1
        pending.extend(children(pending.pop()))
    return count


def fold(root: Language, combine: Callable[[Language, tuple[Result, ...]], Result], known: dict[int, Result]) -> Result:
    """Calls `combine(node, results of its children)` from the leaves up, once for shared nodes, without recursion.

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
    """Returns the node around other children, put together as above; the node itself where they are its own."""
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
        case Intersection():
            return intersection(*inner)
        case Difference():
            return difference(*inner)
        case AnyOrder():
            return _rearranged(node, inner)
        case _:
            return node


def renamed(language: Language, names: Mapping[str, str], known: dict[int, Language]) -> Language:
    """Returns an expression whose calls go to rules of other names. known: as of `fold`."""

    def combine(node: Language, inner: tuple[Language, ...]) -> Language:
        return Call(names[node.rule]) if isinstance(node, Call) else rebuilt(node, inner)

    return fold(language, combine, known)


def any_order(node: AnyOrder) -> Language:
    """Returns the node without parts that admit nothing; nothing itself where too few are left."""
    return _rearranged(node, children(node))


def _rearranged(node: AnyOrder, inner: tuple[Language, ...]) -> Language:
    """Builds the node around other children. inner: as `children` gives them."""
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
