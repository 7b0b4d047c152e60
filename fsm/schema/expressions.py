"""Builds the expressions that schemas need: texts, digits, one of many names, anything but them, JSON as written.

A `Style` is the blanks between the parts of a value; constants are spelled in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Literal as OneOf

from ..algebra import ANY_CHARACTER, ANY_TEXT, concat, repeat
from ..errors import ConstraintRefused
from ..language import EMPTY_TEXT, NOTHING, Chars, Dfa, Language, Literal, Ranges, Repeat, Union
from .document import Value

DIGIT = Chars(((0x30, 0x39),))
NONZERO = Chars(((0x31, 0x39),))

_DEEPEST_TRIE = 24  # below, options stand next to each other: nesting costs each walk over the expression


def literal(text: str) -> Literal:
    return Literal(text.encode("utf-8"))


def union(options: Iterable[Language]) -> Language:
    """Unites as `algebra` does, for thousands of options: none is hashed, and single characters stay apart."""
    found: list[Language] = []
    for option in options:
        for piece in option.options if isinstance(option, Union) else (option,):
            if piece not in found[-8:]:  # repetitions cost, they do no harm: a look at the neighbours is enough
                found.append(piece)
    return found[0] if len(found) == 1 else Union(tuple(found))


def optional(body: Language) -> Language:
    return EMPTY_TEXT if body in (NOTHING, EMPTY_TEXT) else Repeat(body, 0, 1)


def digits(low: int, high: int) -> Language:
    """Admits one digit between two, both included."""
    if low > high:
        return NOTHING
    return literal(str(low)) if low == high else Chars(((0x30 + low, 0x30 + high),))


def one_of(texts: Iterable[str]) -> Language:
    """Admits any of the texts. Beginnings that they share are written once: few positions to follow at a time."""
    return _one_of(sorted(set(texts)), 0, 0)


def _one_of(texts: Sequence[str], start: int, depth: int) -> Language:
    """Builds a trie of texts, which are sorted, distinct and equal up to `start`."""
    if len(texts) <= 2 or depth == _DEEPEST_TRIE:
        return union([literal(text[start:]) for text in texts])
    first, last = texts[0], texts[-1]
    common = start
    while common < min(len(first), len(last)) and first[common] == last[common]:
        common += 1
    options: list[Language] = []
    begin = 0
    if len(first) == common:
        options.append(EMPTY_TEXT)
        begin = 1
    while begin < len(texts):
        character = texts[begin][common]
        end = begin + 1
        while end < len(texts) and texts[end][common] == character:
            end += 1
        options.append(_one_of(texts[begin:end], common, depth + 1))
        begin = end
    return concat([literal(first[start:common]), union(options)])


def none_of(texts: Iterable[str]) -> Language:
    """Admits every text but these, as the automaton that it is: a trie whose other ways out all lead to anything."""
    names = sorted(set(texts))
    if not names:
        return ANY_TEXT
    branches: list[dict[str, int]] = [{}]
    final: set[int] = set()
    for name in names:
        state = 0
        for character in name:
            following = branches[state].get(character)
            if following is None:
                following = branches[state][character] = len(branches)
                branches.append({})
            state = following
        final.add(state)
    elsewhere = len(branches)
    edges: list[tuple[tuple[Ranges, int], ...]] = []
    for inner in branches:
        if len(inner) == 1:  # most states of a trie: no sorting
            ((character, target),) = inner.items()
            edges.append(((_point(character), target), (_all_but(character), elsewhere)))
        else:
            ways = ((_point(character), target) for character, target in inner.items())
            edges.append((*ways, (_all_but("".join(sorted(inner))), elsewhere)))
    edges.append(((ANY_CHARACTER.ranges, elsewhere),))
    accepting = (*(state not in final for state in range(elsewhere)), True)
    return Dfa(accepting, tuple(edges))


@lru_cache(maxsize=4_096)
def _point(character: str) -> Ranges:
    return ((ord(character), ord(character)),)


@lru_cache(maxsize=4_096)
def _all_but(characters: str) -> Ranges:
    """Returns the characters but these, which are in order."""
    found: list[tuple[int, int]] = []
    low = 0
    for point in map(ord, characters):
        found.append((low, point - 1))
        low = point + 1
    found.append((low, 0x10FFFF))
    # Surrogates are no characters.
    whole: list[tuple[int, int]] = []
    for begin, end in found:
        if begin <= 0xD7FF:
            whole.append((begin, min(end, 0xD7FF)))
        if end >= 0xE000:
            whole.append((max(begin, 0xE000), end))
    return tuple((begin, end) for begin, end in whole if begin <= end)


Whitespace = OneOf["spaced", "compact", "flexible"]


@dataclass(frozen=True, slots=True)
class Style:
    """The languages between the parts of arrays and objects. An empty one is always `[]` or `{}`."""

    comma: Language
    colon: Language
    padding: Language  # after an opening and before a closing bracket

    @classmethod
    def of(cls, whitespace: Whitespace) -> Style:
        """Raises ConstraintRefused for a name that is none of the three."""
        match whitespace:
            case "spaced":
                return cls(literal(", "), literal(": "), EMPTY_TEXT)
            case "compact":
                return cls(literal(","), literal(":"), EMPTY_TEXT)
            case "flexible":
                # Bounded: models that may write blanks for ever do.
                blanks = concat([optional(literal("\n")), repeat(literal(" "), 0, 20)])
                return cls(concat([literal(","), blanks]), concat([literal(":"), blanks]), blanks)
        raise ConstraintRefused(f"whitespace={whitespace!r} is unknown; write 'spaced', 'compact' or 'flexible'")

    def enclosed(self, opening: str, parts: Sequence[Language], closing: str) -> Language:
        """Puts parts in brackets, with the separators already among them."""
        return concat([literal(opening), self.padding, *parts, self.padding, literal(closing)])

    def spell(self, value: Value) -> Language:
        """Spells a constant as it is written."""
        match value:
            case list():
                if not value:
                    return literal("[]")
                return self.enclosed("[", self.separated(self.spell(item) for item in value), "]")
            case dict():
                if not value:
                    return literal("{}")
                members = (concat([self.key(name), self.spell(item)]) for name, item in value.items())
                return self.enclosed("{", self.separated(members), "}")
        return literal(scalar_text(value))

    def spell_any(self, values: Sequence[Value]) -> Language:
        """Spells any of some constants."""
        scalars = [scalar_text(value) for value in values if not isinstance(value, list | dict)]
        options = [one_of(scalars)] if scalars else []
        return union([*options, *(self.spell(value) for value in values if isinstance(value, list | dict))])

    def key(self, name: str) -> Language:
        """Returns the name of a member and the colon after it."""
        return concat([literal(string_text(name)), self.colon])

    def separated(self, parts: Iterable[Language]) -> list[Language]:
        """Returns the parts with commas between them."""
        found: list[Language] = []
        for part in parts:
            if found:
                found.append(self.comma)
            found.append(part)
        return found

    def members(self, least: int, most: int | None, part: Language) -> Language:
        """Repeats a part `least` to `most` times with commas between; `least` ≥ 1."""
        if part == NOTHING:
            return NOTHING
        rest = repeat(concat([self.comma, part]), least - 1, None if most is None else most - 1)
        return concat([part, rest])


def string_text(text: str) -> str:
    """Writes a string: raw UTF-8, escapes only where needed (the spelling of `language.Spelled`).

    Raises:
        ConstraintRefused: a lone surrogate, which no UTF-8 text holds.
    """
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConstraintRefused(f"{text!r} holds a lone surrogate, which no text can; write the whole character")
    return json.dumps(text, ensure_ascii=False)


def scalar_text(value: Value) -> str:
    """Writes null, a boolean, a number or a string."""
    match value:
        case str():
            return string_text(value)
        case Decimal():
            text = str(value)
            return text if "E" not in text else _exponential(value)
    return json.dumps(value)


def _exponential(value: Decimal) -> str:
    """Writes a number as Python writes a float, where it is one."""
    number = float(value)
    return repr(number) if Decimal(repr(number)) == value else format(value, "f")
