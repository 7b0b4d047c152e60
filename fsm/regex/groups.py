"""What a group is, read from what stands behind its opening parenthesis."""

import string
from dataclasses import dataclass, replace
from enum import Enum

from .source import Flags, Source, refused, unsupported


class GroupKind(Enum):
    PLAIN = "(...)"
    AHEAD = "(?=...)"
    NOT_AHEAD = "(?!...)"
    FLAGS = "(?i)"


@dataclass(frozen=True, slots=True)
class Opening:
    """`flags` hold inside the group; for FLAGS, which has no inside, from here on."""

    kind: GroupKind
    flags: Flags
    name: str = ""


_FIELDS = {"i": "ignore_case", "m": "lines", "s": "dot_all", "x": "verbose", "a": "ascii"}
_LOOKBEHIND = "an automaton reads forward: write what comes before as part of the expression"
_REFUSED = {
    "<=": ("lookbehind", _LOOKBEHIND),
    "<!": ("lookbehind", _LOOKBEHIND),
    ">": ("atomic group", "write (?:...) where what follows cannot begin with what the group matches"),
    "(": ("conditional group", "write both cases out, separated by '|'"),
    "P=": ("backreference", "no automaton remembers what a group held: write the alternatives out"),
}


def opening(source: Source, flags: Flags, start: int) -> Opening:
    """The group whose "(" at `start` has been read; the cursor ends where its inside begins.

    Raises:
        ConstraintRefused: not a group.
        Unsupported: lookbehind, atomic and conditional groups, references to groups.
    """
    if not source.accept("?"):
        return Opening(GroupKind.PLAIN, flags)
    for symbol, (keyword, way_out) in _REFUSED.items():
        if source.accept(symbol):
            raise unsupported(keyword, way_out, start)
    if source.accept(":"):
        return Opening(GroupKind.PLAIN, flags)
    if source.accept("="):
        return Opening(GroupKind.AHEAD, flags)
    if source.accept("!"):
        return Opening(GroupKind.NOT_AHEAD, flags)
    if source.accept("P<") or (source.ecma and source.accept("<")):
        name = source.take_until(">", "the name of a group", start)
        if not name.isidentifier():
            raise refused(f"{name!r} cannot name a group; write a word, as in (?P<year>...)", start)
        return Opening(GroupKind.PLAIN, flags, name)
    if source.next == "<":
        raise refused("groups are named (?P<name>...) here", start)
    return _flagged(source, flags, start)


def _flagged(source: Source, flags: Flags, start: int) -> Opening:
    """(?i) (?i:...) (?i-s:...) (?-s:...)."""
    on = source.take_while(string.ascii_letters, len(source.pattern))
    off = source.take_while(string.ascii_letters, len(source.pattern)) if (minus := source.accept("-")) else ""
    closing = source.take()
    if not (on or off) or closing not in (":", ")") or (minus and (closing == ")" or not off)):
        written = source.pattern[start : source.position]
        raise refused(f"{written!r} begins no group; write '(?:' for a group, '\\(' for a parenthesis", start)
    for flag in on + off:
        if flag not in _FIELDS and (flag != "u" or flag in off):
            raise refused(f"no flag {flag!r} exists here; i, m, s, x and a do", start)
    if ("a" in on and "u" in on) or set(on) & set(off) or "a" in off:
        raise refused("these flags contradict each other, or one of them cannot be turned off", start)
    changed = {_FIELDS[flag]: True for flag in on if flag != "u"} | {_FIELDS[flag]: False for flag in off}
    if "u" in on:
        changed["ascii"] = False
    return Opening(GroupKind.FLAGS if closing == ")" else GroupKind.PLAIN, replace(flags, **changed))
