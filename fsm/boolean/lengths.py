"""Bounds the length of the texts of a language, in characters, and cuts expressions to texts of certain lengths.

A pattern together with minLength and maxLength is the most frequent intersection. A product would have a state for
every length; most patterns have one part whose length varies much, and its counter can take the bounds over.
"""

import itertools
import math

from ..algebra import ANY_CHARACTER, ANY_TEXT, concat, repeat, union
from ..language import (
    EMPTY_TEXT,
    NOTHING,
    AnyOrder,
    Call,
    Chars,
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

Lengths = tuple[int, int | None]  # least and most; None: without end


def lengths(node: Language) -> Lengths | None:
    """Bounds that no text leaves; None where no text exists. Tight but for intersections and differences.

    Of a language without calls.
    """
    match node:
        case Literal(data):
            count = len(data.decode("utf-8", "replace"))
            return count, count
        case Chars():
            return 1, 1
        case Concat(parts):
            return _added([lengths(part) for part in parts])
        case Union(options):
            return _spanned([lengths(option) for option in options])
        case Repeat(body, least, most):
            return _multiplied(lengths(body), least, most)
        case Dfa():
            return _of_automaton(node)
        case Spelled(body):
            inner = lengths(body)
            return inner and (inner[0], None if inner[1] is None else 6 * inner[1])
        case Intersection(left, right):
            return _shared(lengths(left), lengths(right))
        case Difference(left):
            return lengths(left)
        case Call() | AnyOrder():
            raise AssertionError("the texts of a call have a length in their grammar only")


def _added(parts: list[Lengths | None]) -> Lengths | None:
    least, most = 0, 0
    endless = False
    for part in parts:
        if part is None:
            return None
        least += part[0]
        endless |= part[1] is None
        most += part[1] or 0
    return least, None if endless else most


def _spanned(options: list[Lengths | None]) -> Lengths | None:
    some = [option for option in options if option is not None]
    if not some:
        return None
    mosts = [most for _, most in some]
    return min(least for least, _ in some), None if None in mosts else max(most for most in mosts if most is not None)


def _multiplied(body: Lengths | None, least: int, most: int | None) -> Lengths | None:
    if most is not None and most < least:
        return None
    if body is None:
        return None if least else (0, 0)
    if body[1] == 0:
        return 0, 0
    return least * body[0], None if most is None or body[1] is None else most * body[1]


def _shared(left: Lengths | None, right: Lengths | None) -> Lengths | None:
    if left is None or right is None:
        return None
    mosts = [most for most in (left[1], right[1]) if most is not None]
    least, most = max(left[0], right[0]), min(mosts, default=None)
    return None if most is not None and most < least else (least, most)


def _of_automaton(node: Dfa) -> Lengths:
    """Searches breadth first for the least; the longest path where no cycle is, and every state reaches the end."""
    level, seen, least, depth = [0], {0}, None, 0
    while level and least is None:
        if any(node.accepting[state] for state in level):
            least = depth
        level = [target for state in level for _, target in node.edges[state] if target not in seen]
        level = list(dict.fromkeys(level))
        seen.update(level)
        depth += 1
    assert least is not None, "every state of a Dfa reaches an accepting one"
    return least, _longest(node)


def _longest(node: Dfa) -> int | None:
    """Finds the longest path in Kahn's order of the states; None where a cycle is left over."""
    incoming = [0] * len(node.accepting)
    for edges in node.edges:
        for _, target in edges:
            incoming[target] += 1
    longest = [0] * len(incoming)
    ready = [state for state, count in enumerate(incoming) if not count]
    passed = 0
    while ready:
        state = ready.pop()
        passed += 1
        for _, target in node.edges[state]:
            longest[target] = max(longest[target], longest[state] + 1)
            incoming[target] -= 1
            if not incoming[target]:
                ready.append(target)
    if passed < len(longest):
        return None
    return max(length for length, accepting in zip(longest, node.accepting, strict=True) if accepting)


_MOST_CHOICES = 16  # of lengths of the parts other than the one whose counter takes the bounds
_ENDLESS = math.inf


def as_length_limit(node: Language) -> Lengths | None:
    """Reads least and most off an expression that admits every text of certain lengths and says so by its form."""
    match node:
        case Repeat(body, least, most) if body == ANY_CHARACTER:
            return least, most
        case _:
            return (1, 1) if node == ANY_CHARACTER else None


def with_length(node: Language, least: int, most: int | None) -> Language | None:
    """Returns the texts with at least `least` and at most `most` characters; None where counters cannot say it."""
    if most is not None and most < least:
        return NOTHING
    bounds = lengths(node)
    if bounds is None or (most is not None and bounds[0] > most) or (bounds[1] is not None and bounds[1] < least):
        return NOTHING
    if bounds[0] >= least and (most is None or (bounds[1] is not None and bounds[1] <= most)):
        return node
    match node:
        case Union(options):
            cut = [with_length(option, least, most) for option in options]
            return None if None in cut else union(option for option in cut if option is not None)
        case Concat(parts):
            return _concat_with_length(parts, least, most)
        case Repeat():
            return _repeat_with_length(node, least, most)
        case _:
            return None


def _concat_with_length(parts: tuple[Language, ...], least: int, most: int | None) -> Language | None:
    """Bounds for the part that varies most, for every length that the others together can have.

    https?://.+ of at most 20 characters is http://.{1,13} or https://.{1,12}.
    """
    spans: list[Lengths] = []
    for part in parts:
        bounds = lengths(part)
        assert bounds is not None, "a part without texts leaves the whole without, which was asked before"
        spans.append(bounds)
    main = max(range(len(parts)), key=lambda at: _ENDLESS if (end := spans[at][1]) is None else end - spans[at][0])
    others = [(at, span) for at, span in enumerate(spans) if at != main]
    if any(end is None for _, (_, end) in others):
        return None
    choices = [range(begin, (end or 0) + 1) for _, (begin, end) in others]
    if math.prod(map(len, choices)) > _MOST_CHOICES:
        return None
    options: list[Language] = []
    for lengths_of_others in itertools.product(*choices):
        rest = sum(lengths_of_others)
        exact = [with_length(parts[at], each, each) for (at, _), each in zip(others, lengths_of_others, strict=True)]
        if most is not None and most < rest:
            continue
        cut = with_length(parts[main], max(least - rest, 0), None if most is None else most - rest)
        chosen = [each for each in (*exact[:main], cut, *exact[main:]) if each is not None]
        if len(chosen) < len(parts):
            return None
        options.append(concat(chosen))
    return union(options)


def _repeat_with_length(node: Repeat, least: int, most: int | None) -> Language | None:
    bounds = lengths(node.body)
    if node == ANY_TEXT:
        return repeat(ANY_CHARACTER, least, most)
    if bounds is None:
        return None
    if bounds[0] == bounds[1] and bounds[0] > 0:
        each = bounds[0]
        fewest = max(node.least, -(-least // each))
        allowed = [count for count in (node.most, None if most is None else most // each) if count is not None]
        return NOTHING if allowed and min(allowed) < fewest else repeat(node.body, fewest, min(allowed, default=None))
    if (node.least, node.most) == (0, 1):
        body = with_length(node.body, least, most)
        return None if body is None else union((EMPTY_TEXT, body)) if not least else body
    return None
