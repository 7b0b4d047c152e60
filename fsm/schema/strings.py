"""Strings of a schema as languages of characters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from ..algebra import ANY_CHARACTER, concat, difference, intersection, repeat
from ..language import NOTHING, Concat, Language, Literal, Spelled
from .expressions import none_of, one_of, union
from .membership import admits


@dataclass(frozen=True, slots=True)
class Strings:
    """What is asked of a string: its length in characters, and languages that it is, or is not, one of."""

    least: int = 0
    most: int | None = None
    languages: tuple[Language, ...] = ()
    barred: tuple[Language, ...] = ()
    excluded: tuple[str, ...] = ()
    narrow: bool = False  # a language among them is inside what is meant: what is outside it may be meant as well

    @property
    def empty(self) -> bool:
        """Whether the lengths leave nothing. Languages are left to whoever intersects them."""
        return self.most is not None and self.most < self.least

    def holds(self, text: str) -> bool:
        """Whether a string is one of these."""
        return (
            len(text) >= self.least
            and (self.most is None or len(text) <= self.most)
            and text not in self.excluded
            and all(admits(language, text) for language in self.languages)
            and not any(admits(language, text) for language in self.barred)
        )

    def characters(self) -> Language:
        """The strings as they are, without quotes or escapes."""
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
    """A JSON string of these characters."""
    if characters == NOTHING:
        return NOTHING
    if isinstance(characters, Concat | Literal) and (text := _plain(characters)) is not None:
        return Literal(b'"' + text + b'"')
    return concat([Literal(b'"'), Spelled(characters), Literal(b'"')])


def _plain(language: Language) -> bytes | None:
    """The text of a literal that is written inside a JSON string as it is."""
    if not isinstance(language, Literal):
        return None
    return language.data if all(byte >= 0x20 and byte not in b'"\\' for byte in language.data) else None
