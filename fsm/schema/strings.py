"""Strings of a schema as languages of characters, and whether a text is of such a language."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import reduce

from ..algebra import ANY_CHARACTER, concat, difference, intersection, repeat
from ..errors import LimitExceeded
from ..language import (
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
    Ranges,
    Repeat,
    Spelled,
    Union,
)
from .expressions import none_of, one_of, union


@dataclass(frozen=True, slots=True)
class Strings:
    """The strings of certain lengths, in characters, that are of some languages, and not of others."""

    least: int = 0
    most: int | None = None
    languages: tuple[Language, ...] = ()
    barred: tuple[Language, ...] = ()
    excluded: tuple[str, ...] = ()
    narrow: bool = False  # a language among them is inside what is meant: what is outside it may be meant as well

    @property
    def empty(self) -> bool:
        """Tells whether the lengths leave nothing. The languages are intersected later, by `boolean`."""
        return self.most is not None and self.most < self.least

    def holds(self, text: str) -> bool:
        """Tells whether a string is one of these."""
        return (
            len(text) >= self.least
            and (self.most is None or len(text) <= self.most)
            and text not in self.excluded
            and all(admits(language, text) for language in self.languages)
            and not any(admits(language, text) for language in self.barred)
        )

    def characters(self) -> Language:
        """Returns the strings as they are, without quotes or escapes."""
        if self.empty:
            return NOTHING
        parts = list(self.languages)
        if self.least or self.most is not None or not (parts or self.excluded):
            parts.insert(0, repeat(ANY_CHARACTER, self.least, self.most))
        if self.excluded and not self.languages:
            parts.append(none_of(self.excluded))
            return difference(reduce(intersection, parts), union(self.barred))
        return difference(
            reduce(intersection, parts), union([*self.barred, *([one_of(self.excluded)] if self.excluded else [])])
        )


def quoted(characters: Language) -> Language:
    """Writes a JSON string of these characters."""
    if characters == NOTHING:
        return NOTHING
    if isinstance(characters, Concat | Literal) and (text := _plain(characters)) is not None:
        return Literal(b'"' + text + b'"')
    return concat([Literal(b'"'), Spelled(characters), Literal(b'"')])


def _plain(language: Language) -> bytes | None:
    """Returns the text of a literal that is written inside a JSON string as it is."""
    if not isinstance(language, Literal):
        return None
    return language.data if all(byte >= 0x20 and byte not in b'"\\' for byte in language.data) else None


LONGEST_TEXT = 1_000  # characters that are matched while a schema is compiled


def admits(language: Language, text: str) -> bool:
    """Tells whether a text is of a language, which is over characters: no Call, no Spelled.

    Raises:
        LimitExceeded: the text is long; the time is polynomial in its length.
    """
    if len(text) > LONGEST_TEXT:
        raise LimitExceeded(
            f"a constant or name of {len(text)} characters would have to be matched; {LONGEST_TEXT} are allowed"
        )
    return len(text) in _ends(language, text, 0, {})


def _ends(node: Language, text: str, start: int, known: dict[tuple[int, int], frozenset[int]]) -> frozenset[int]:
    """Returns the places at which a text of `node` that begins at `start` may end."""
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
