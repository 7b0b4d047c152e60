"""Character classes in brackets: [a-z\\d], [^\\s], []x]."""

import re

from ..charset import CharSet
from .escapes import character_escape, class_escape, folded
from .source import Flags, Source, refused, unsupported

_POSIX_CLASS = re.compile(r"\[:\^?[a-zA-Z]+:\]")


def bracketed(source: Source, flags: Flags, start: int) -> CharSet:
    """The class whose "[" at `start` has been read; the cursor ends after its "]".

    Raises:
        ConstraintRefused: not closed, or a range that runs backwards.
        Unsupported: [:alpha:] inside, which Python reads as the characters between the brackets.
    """
    negated = source.accept("^")
    ranges: list[tuple[int, int]] = []  # written as characters: what the flag i asks about
    classes = CharSet()
    first = not source.ecma  # there [] is the class of nothing and [^] of everything
    while True:
        at = source.position
        if source.next == "]" and not first:
            source.take()
            break
        first = False
        member = _member(source, flags, start)
        if source.next != "-" or source.pattern.startswith("-]", source.position):
            members = [member]
        else:
            source.take()
            last = _member(source, flags, start)
            if isinstance(member, int) and isinstance(last, int):
                ranges.append(_range(source, member, last, at))
                continue
            if not source.ecma:
                raise refused("a class such as \\w cannot begin or end a range; write the hyphen as '\\-'", at)
            members = [member, 0x2D, last]  # [\w-.]: the hyphen stands for itself
        for each in members:
            if isinstance(each, CharSet):
                classes |= each
            else:
                ranges.append((each, each))
    found = folded(CharSet.of(ranges), flags) | classes
    return ~found if negated else found


def _range(source: Source, first: int, last: int, at: int) -> tuple[int, int]:
    if last < first:
        written = source.pattern[at : source.position]
        raise refused(f"the range {written!r} runs backwards; write '\\-' for a literal hyphen", at)
    return first, last


def _member(source: Source, flags: Flags, start: int) -> int | CharSet:
    """One character of a class or an escape."""
    at = source.position
    if _POSIX_CLASS.match(source.pattern, at):
        raise unsupported(
            source.pattern[at : source.pattern.index("]", at) + 1],
            "write the characters, as in [A-Za-z], or a property, as in \\p{L}; '\\[' is a literal bracket",
            at,
        )
    character = source.take()
    if not character:
        raise refused("this class is not closed; write ']' at its end, or '\\[' for a literal bracket", start)
    if character != "\\":
        return ord(character)
    found = class_escape(source, flags, at)
    return character_escape(source, True, at) if found is None else found
