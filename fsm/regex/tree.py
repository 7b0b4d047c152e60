"""Regular expressions with assertions in them, as a tree.

What holds no assertion is a Language already when it is parsed; `regex_reading` says what the rest comes to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ..algebra import concat, nullable, repeat, union
from ..language import EMPTY_TEXT, NOTHING, Language


@dataclass(frozen=True, slots=True)
class Begin:
    """^ and \\A; `lines`: after a line feed as well."""

    lines: bool
    position: int


class Ending(Enum):
    """What may follow an end anchor."""

    TEXT = "the end"  # \Z, and $ of ECMAScript
    LAST_LINE = "the end, or one line feed and the end"  # $ of Python
    LINE = "the end, or a line feed and anything"  # $ under the flag m


@dataclass(frozen=True, slots=True)
class End:
    ending: Ending


@dataclass(frozen=True, slots=True)
class Ahead:
    """(?=body) and, negative, (?!body)."""

    body: Item
    negative: bool
    position: int


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    body: Item
    least: int
    most: int | None
    position: int


Assertive = Begin | End | Ahead | Sequence | Choice | Repetition
Item = Language | Assertive


def sequence(items: Iterable[Item]) -> Item:
    """One after the other; neighbours without assertions become one language."""
    parts: list[Item] = []
    plain: list[Language] = []
    for item in items:
        for each in item.parts if isinstance(item, Sequence) else (item,):
            if isinstance(each, Assertive):
                if plain:
                    parts.append(concat(plain))
                    plain = []
                parts.append(each)
            else:
                plain.append(each)
    if plain or not parts:
        parts.append(concat(plain))
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def choice(items: Iterable[Item]) -> Item:
    options = tuple(items)
    plain = [option for option in options if not isinstance(option, Assertive)]
    if len(plain) == len(options):
        return union(plain)
    return options[0] if len(options) == 1 else Choice(options)


def repetition(body: Item, least: int, most: int | None, position: int) -> Item:
    """Repeats of repeats that leave no gap between their counts become one."""
    if not isinstance(body, Assertive):
        return repeat(body, least, most)
    if most == 0:
        return EMPTY_TEXT
    if isinstance(body, Repetition) and body.least <= 1:
        together = None if most is None or body.most is None else most * body.most
        return Repetition(body.body, least * body.least, together, position)
    return Repetition(body, least, most, position)


def walk(item: Item) -> Iterable[Item]:
    yield item
    match item:
        case Sequence(parts):
            inner = parts
        case Choice(options):
            inner = options
        case Ahead(body) | Repetition(body):
            inner = (body,)
        case _:
            inner = ()
    for each in inner:
        yield from walk(each)


def looks_back(item: Item) -> bool:
    return isinstance(item, Assertive) and any(isinstance(each, Begin) for each in walk(item))


def is_empty(item: Item) -> bool:
    """An item that takes no text."""
    return isinstance(item, Begin | End | Ahead)


def may_be_empty(item: Item) -> bool:
    match item:
        case Begin() | End() | Ahead():
            return True
        case Sequence(parts):
            return all(map(may_be_empty, parts))
        case Choice(options):
            return any(map(may_be_empty, options))
        case Repetition(body, least):
            return not least or may_be_empty(body)
        case _:
            return nullable(item)


def inside(item: Item) -> Language:
    """What the item matches where text lies before and behind it: anchors match nothing."""
    match item:
        case Begin() | End() | Ahead():
            return NOTHING
        case Sequence(parts):
            return concat(map(inside, parts))
        case Choice(options):
            return union(map(inside, options))
        case Repetition(body, least, most):
            return repeat(inside(body), least, most)
        case _:
            return item
