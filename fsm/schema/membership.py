"""Whether a text is of a language: for the few names and constants that a compiler has to decide about itself."""

from __future__ import annotations

from bisect import bisect_right

from ..errors import LimitExceeded
from ..language import (
    AnyOrder,
    Call,
    Chars,
    Concat,
    Dfa,
    Difference,
    Intersection,
    Language,
    Literal,
    Ranges,
    Repeat,
    Spelled,
    Union,
)

LONGEST_TEXT = 1_000  # characters that are matched while a schema is compiled


def admits(language: Language, text: str) -> bool:
    """`language` is over characters: no Call, no Spelled.

    Raises:
        LimitExceeded: the text is long; the time is polynomial in its length.
    """
    if len(text) > LONGEST_TEXT:
        raise LimitExceeded(
            f"a constant or name of {len(text)} characters would have to be matched; {LONGEST_TEXT} are allowed"
        )
    return len(text) in _ends(language, text, 0, {})


def _ends(node: Language, text: str, start: int, known: dict[tuple[int, int], frozenset[int]]) -> frozenset[int]:
    """Where a text of `node` that begins at `start` may end."""
    key = (id(node), start)
    found = known.get(key)
    if found is None:
        found = known[key] = frozenset(_walk(node, text, start, known))
    return found


def _walk(node: Language, text: str, start: int, known: dict[tuple[int, int], frozenset[int]]) -> set[int]:
    match node:
        case Literal(data):
            expected = data.decode("utf-8")
            return {start + len(expected)} if text.startswith(expected, start) else set()
        case Chars(ranges):
            return {start + 1} if start < len(text) and _holds(ranges, text[start]) else set()
        case Concat(parts):
            here = {start}
            for part in parts:
                here = {end for begin in here for end in _ends(part, text, begin, known)}
            return here
        case Union(options):
            return {end for option in options for end in _ends(option, text, start, known)}
        case Repeat(body, least, most):
            return _repeat_ends(body, least, most, text, start, known)
        case Dfa():
            return _dfa_ends(node, text, start)
        case Intersection(left, right):
            return set(_ends(left, text, start, known) & _ends(right, text, start, known))
        case Difference(left, right):
            return set(_ends(left, text, start, known) - _ends(right, text, start, known))
        case Call() | Spelled() | AnyOrder():
            raise AssertionError("a language of characters calls nothing and spells nothing")


def _repeat_ends(
    body: Language,
    least: int,
    most: int | None,
    text: str,
    start: int,
    known: dict[tuple[int, int], frozenset[int]],
) -> set[int]:
    found: set[int] = set()
    here = {start}
    count = 0
    # A round that adds nothing new after `least` rounds will never add anything: ends are at most len(text) many.
    while here and (most is None or count <= most):
        if count >= least:
            fresh = here - found
            if not fresh:
                break
            found |= fresh
            here = fresh
        following = {end for begin in here for end in _ends(body, text, begin, known)}
        if count < least and following == here:
            count = least  # only empty rounds are left
            continue
        here = following
        count += 1
    return found


def _dfa_ends(node: Dfa, text: str, start: int) -> set[int]:
    found: set[int] = set()
    state: int | None = 0
    for position in range(start, len(text) + 1):
        if state is None:
            break
        if node.accepting[state]:
            found.add(position)
        if position < len(text):
            character = text[position]
            state = next((target for ranges, target in node.edges[state] if _holds(ranges, character)), None)
    return found


def _holds(ranges: Ranges, character: str) -> bool:
    index = bisect_right(ranges, (ord(character), 0x110000)) - 1
    return index >= 0 and ranges[index][0] <= ord(character) <= ranges[index][1]
