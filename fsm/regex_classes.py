"""Character classes in brackets: [a-z\\d], [^\\s], []x]."""

import re

from . import case_folding
from .charset import ANY, CharSet
from .regex_escapes import character_escape, class_escape
from .regex_source import Flags, Source, refused, unsupported

_POSIX_CLASS = re.compile(r"\[:\^?[a-zA-Z]+:\]")


def folded(members: CharSet, flags: Flags) -> CharSet:
    """What the set stands for under the flags."""
    if not flags.ignore_case:
        return members
    return case_folding.ignoring_ascii_case(members) if flags.ascii else case_folding.ignoring_case(members)


def bracketed(source: Source, flags: Flags, start: int) -> CharSet:
    """The class whose "[" at `start` has been read; the cursor ends after its "]".

    Raises:
        ConstraintRefused: not closed, or a range that runs backwards.
        Unsupported: [:alpha:] inside, which Python reads as the characters between the brackets.
    """
    negated = source.accept("^")
    ranges: list[tuple[int, int]] = []
    first = not source.ecma  # there [] is the class of nothing and [^] of everything
    while True:
        at = source.position
        if source.next == "]" and not first:
            source.take()
            break
        first = False
        member = _member(source, flags, start)
        if source.next != "-" or source.pattern.startswith("-]", source.position):
            ranges.extend(_ranges(member))
            continue
        source.take()
        last = _member(source, flags, start)
        if isinstance(member, CharSet) or isinstance(last, CharSet):
            if source.ecma:  # [\w-.]: the hyphen stands for itself
                ranges.extend((*_ranges(member), (0x2D, 0x2D), *_ranges(last)))
                continue
            raise refused("a class such as \\w cannot begin or end a range; write the hyphen as '\\-'", at)
        if last < member:
            written = source.pattern[at : source.position]
            raise refused(f"the range {written!r} runs backwards; write '\\-' for a literal hyphen", at)
        ranges.append((member, last))
    members = folded(CharSet.of(ranges), flags)
    return ANY - members if negated else members


def _ranges(member: int | CharSet) -> tuple[tuple[int, int], ...]:
    return member.ranges if isinstance(member, CharSet) else ((member, member),)


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
