"""Which argument of a run a text comes from, told by its value: the longest one that is there wins."""

from collections.abc import Iterator, Mapping
from typing import Any

_MOST_VALUES = 2000  # of lists and dicts that are looked into
_SURE = 3  # characters; a shorter value stands in any text, unless it is all of the text


def argument_at(arguments: Mapping[str, Any], text: str, start: int, end: int, offset: int) -> str:
    """The name of the argument that `text[offset]` comes from: "question", or "turns[3]" for a member; "" for none.

    Args:
        arguments: of the run.
        text: one piece of a prompt.
        start, end: of the value in it that holds the offset, as far as that is known.
    """
    best, name = 0, ""
    for found, value in _values(arguments):
        length = _overlap(value, text, start, end, offset)
        if length > best:
            best, name = length, found
    return name


def _overlap(value: str, text: str, start: int, end: int, offset: int) -> int:
    """How many characters of the text around the offset are this value's."""
    if not value:
        return 0
    if value == text[start:end]:
        return len(value)
    if len(value) < _SURE:
        return 0
    place = text.find(value, max(0, offset - len(value)))
    if 0 <= place <= offset < place + len(value):
        return len(value)
    said = text[start:end].strip()
    return len(said) if len(said) >= _SURE and said in value else 0


def _values(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts of arguments and of what is in them."""
    for name, value in arguments.items():
        if isinstance(value, str):
            yield name, value
            continue
        if isinstance(value, list | tuple):
            for index, member in enumerate(value[:_MOST_VALUES]):
                yield f"{name}[{index}]", str(member)
        elif isinstance(value, dict):
            for number, (key, member) in enumerate(value.items()):
                if number == _MOST_VALUES:
                    break
                yield f"{name}[{key!r}]", str(member)
        yield name, str(value)
