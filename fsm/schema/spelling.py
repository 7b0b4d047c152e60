"""How JSON is written: the blanks between its parts, and the text of a value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal as OneOf

from ..algebra import concat, repeat
from ..errors import ConstraintRefused
from ..language import EMPTY_TEXT, NOTHING, Language
from .expressions import literal, one_of, optional, union
from .source import Value

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
        """Parts in brackets, with the separators already among them."""
        return concat([literal(opening), self.padding, *parts, self.padding, literal(closing)])

    def spell(self, value: Value) -> Language:
        """A constant as it is written."""
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
        """Any of some constants."""
        scalars = [scalar_text(value) for value in values if not isinstance(value, list | dict)]
        options = [one_of(scalars)] if scalars else []
        return union([*options, *(self.spell(value) for value in values if isinstance(value, list | dict))])

    def key(self, name: str) -> Language:
        """The name of a member and the colon behind it."""
        return concat([literal(string_text(name)), self.colon])

    def separated(self, parts: Iterable[Language]) -> list[Language]:
        """The parts with commas between them."""
        found: list[Language] = []
        for part in parts:
            if found:
                found.append(self.comma)
            found.append(part)
        return found

    def members(self, least: int, most: int | None, part: Language) -> Language:
        """`least` to `most` times a part with commas between; `least` ≥ 1."""
        if part == NOTHING:
            return NOTHING
        rest = repeat(concat([self.comma, part]), least - 1, None if most is None else most - 1)
        return concat([part, rest])


def string_text(text: str) -> str:
    """A string as it is written: raw UTF-8, escapes only where needed (the spelling of `language.Spelled`).

    Raises:
        ConstraintRefused: a lone surrogate, which no UTF-8 text holds.
    """
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConstraintRefused(f"{text!r} holds a lone surrogate, which no text can; write the whole character")
    return json.dumps(text, ensure_ascii=False)


def scalar_text(value: Value) -> str:
    """null, a boolean, a number or a string as it is written."""
    match value:
        case str():
            return string_text(value)
        case Decimal():
            text = str(value)
            return text if "E" not in text else _exponential(value)
    return json.dumps(value)


def _exponential(value: Decimal) -> str:
    """As Python writes a float, where it is one."""
    number = float(value)
    return repr(number) if Decimal(repr(number)) == value else format(value, "f")
