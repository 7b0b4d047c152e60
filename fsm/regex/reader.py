"""A cursor over the text of a regular expression, and the refusals of what it finds there."""

from dataclasses import dataclass
from typing import Literal as OneOf

from ..errors import ConstraintRefused, LimitExceeded, Unsupported

Dialect = OneOf["python", "ecma"]


@dataclass(frozen=True, slots=True)
class Flags:
    """The inline flags in force at a place."""

    ignore_case: bool = False  # i
    lines: bool = False  # m: ^ and $ at every line
    dot_all: bool = False  # s
    verbose: bool = False  # x
    ascii: bool = False  # a


class PatternReader:
    """A cursor over the pattern. Positions count characters from 0."""

    def __init__(self, pattern: str, dialect: Dialect) -> None:
        self.pattern = pattern
        self.ecma = dialect == "ecma"
        self.position = 0

    @property
    def next(self) -> str:
        """The character to come, "" at the end."""
        return self.pattern[self.position : self.position + 1]

    def take(self) -> str:
        character = self.next
        self.position += len(character)
        return character

    def accept(self, text: str) -> bool:
        """Passes `text` where it comes next."""
        found = self.pattern.startswith(text, self.position)
        self.position += len(text) * found
        return found

    def take_while(self, allowed: str, most: int) -> str:
        start = self.position
        while self.position - start < most and self.next and self.next in allowed:
            self.position += 1
        return self.pattern[start : self.position]

    def take_until(self, end: str, what: str, start: int) -> str:
        """Takes what comes before `end`, which is passed; `start` is where the construct began.

        Raises:
            ConstraintRefused: `end` does not come, or comes at once.
        """
        at = self.pattern.find(end, self.position)
        if at <= self.position:
            raise refused(f"{what} is not closed: write {end!r} after it" if at < 0 else f"{what} is missing", start)
        found = self.pattern[self.position : at]
        self.position = at + len(end)
        return found


def refused(why: str, position: int) -> ConstraintRefused:
    return ConstraintRefused(why, where=f"position {position}")


def unsupported(keyword: str, way_out: str, position: int) -> Unsupported:
    """Refuses a construct that is valid and not honoured; `way_out` says what to write instead."""
    return Unsupported(f"{keyword} is not supported; {way_out}", where=f"position {position}", keyword=keyword)


def exceeded(why: str, position: int) -> LimitExceeded:
    return LimitExceeded(why, where=f"position {position}")
