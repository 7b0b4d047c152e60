"""Characters as an expression writes them: escapes, and classes in brackets such as [a-z\\d], [^\\s], []x].

Classes of Unicode, and which characters are the same when case is ignored, are found by asking this interpreter once,
when first needed (5 ms each for \\w, \\d, \\s, 40 ms for all general categories). So they are what `re` and
`unicodedata` say here, without tables to keep up to date.

Case is ignored as `re` does: it lowers the character of the text and asks whether the result is among the lowered
members of the set, where a lowered member stands for all that share its upper case as well ("s" for "ſ", "σ" for "ς").
Lowering maps one character to one, so "ß" and "SS" stay different.
"""

import functools
import re
import string
import unicodedata
from dataclasses import dataclass
from typing import Literal as OneOf

import numpy as np

from ..errors import ConstraintRefused, LimitExceeded, Unsupported
from ..language import ANY, CharSet, Ranges

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


OCTAL = "01234567"
_CONTROLS = {"f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)  # halves of a surrogate pair


def folded(characters: CharSet, flags: Flags) -> CharSet:
    """Returns the characters that written ones stand for under the flags i and a."""
    if not flags.ignore_case:
        return characters
    return ignoring_ascii_case(characters) if flags.ascii else ignoring_case(characters)


def class_escape(source: PatternReader, flags: Flags, start: int) -> CharSet | None:
    """Reads \\d \\w \\s \\p{..} and their complements, after the backslash at `start`; None where it is another escape.

    The flag i changes properties only: \\w, \\d and \\s are asked about the character as it is.

    Raises:
        Unsupported: a property that is no general category.
    """
    letter = source.next
    match letter.lower():
        case "d":
            found = ASCII_DIGIT if source.ecma or flags.ascii else digit()
        case "w":
            found = ASCII_WORD if source.ecma or flags.ascii else word()
        case "s" if source.ecma:
            found = ECMA_SPACE
        case "s":
            found = ASCII_SPACE if flags.ascii else space()
        case "p":
            return _property(source, flags, start)
        case _:
            return None
    source.take()
    return ~found if letter.isupper() else found


def _property(source: PatternReader, flags: Flags, start: int) -> CharSet:
    """Reads \\p{Lu} \\P{L} \\p{^Lu} \\pL; the cursor is at the letter."""
    negated = source.take() == "P"
    if source.accept("{"):
        negated ^= source.accept("^")
        name = source.take_until("}", "the name of a \\p{...}", start)
    else:
        name = source.take()
    found = category(name)
    if found is None:
        raise unsupported(
            f"\\p{{{name}}}",
            "write a general category such as \\p{L} or \\p{Lu}, or ranges as in [\\u0370-\\u03ff]",
            start,
        )
    found = folded(found, flags)
    return ~found if negated else found


def character_escape(source: PatternReader, in_class: bool, start: int) -> int:
    """Returns the code point of an escaped character, after the backslash at `start`.

    Raises:
        ConstraintRefused: no such escape, or one that is cut short.
        Unsupported: a reference to a group.
    """
    letter = source.take()
    if not letter:
        raise refused("a backslash ends the expression; write '\\\\' for a literal one", start)
    if letter in _CONTROLS:
        return _CONTROLS[letter]
    if letter in "xuU" and not (source.ecma and letter == "U"):
        return _hexadecimal(source, letter, start)
    if letter in string.digits:
        return _numbered(source, letter, in_class, start)
    if letter == "b" and in_class:
        return 0x08
    if source.ecma:
        if letter == "c" and source.next in string.ascii_letters and source.next:
            return ord(source.take()) % 32
        if letter == "k":
            raise _backreference(start)
    elif letter == "a":
        return 0x07
    elif letter == "N":
        return _named(source, start)
    if letter in string.ascii_letters:
        raise refused(f"no escape '\\{letter}' exists; write {letter!r} for the letter itself", start)
    return ord(letter)


def _hexadecimal(source: PatternReader, letter: str, start: int) -> int:
    if letter == "u" and source.ecma and source.accept("{"):
        digits = source.take_until("}", "the code point of a \\u{...}", start)
        length = len(digits)
    else:
        length = _HEX_LENGTHS[letter]
        digits = source.take_while(string.hexdigits, length)
    if len(digits) != length or not all(digit in string.hexdigits for digit in digits):
        raise refused(f"'\\{letter}' needs {length} hexadecimal digits and has {digits!r}", start)
    code = int(digits, 16)
    if code > 0x10FFFF:
        raise refused(f"'\\{letter}{digits}' is beyond the last character, U+10FFFF", start)
    if source.ecma and code in _HIGH and source.pattern.startswith("\\u", source.position):
        after = source.pattern[source.position + 2 : source.position + 6]
        if len(after) == 4 and all(digit in string.hexdigits for digit in after) and int(after, 16) in _LOW:
            source.position += 6
            return 0x10000 + (code - _HIGH.start) * 0x400 + int(after, 16) - _LOW.start
    return code


def _named(source: PatternReader, start: int) -> int:
    if not source.accept("{"):
        raise refused("'\\N' needs a name in braces, as in \\N{DIGIT ONE}", start)
    name = source.take_until("}", "the name of a \\N{...}", start)
    try:
        return ord(unicodedata.lookup(name))
    except (KeyError, TypeError):
        raise refused(f"no character is called {name!r}", start) from None


def _numbered(source: PatternReader, first: str, in_class: bool, start: int) -> int:
    """Reads octal escapes as `re` has them: \\0, \\07, \\012 and \\123; in a class \\1 and \\12 as well."""
    if source.ecma:
        if first == "0" and source.next not in set(string.digits):
            return 0
        if first == "0" or in_class:
            raise refused("octal escapes do not exist here; write the character as \\x and two digits", start)
        raise _backreference(start)
    if first == "0" or (in_class and first in OCTAL):
        digits = first + source.take_while(OCTAL, 2)
    elif in_class:
        raise refused(f"no escape '\\{first}' exists; write {first!r} for the digit itself", start)
    else:
        ahead = source.pattern[source.position : source.position + 2]
        if not (first in OCTAL and len(ahead) == 2 and all(digit in OCTAL for digit in ahead)):
            raise _backreference(start)
        source.position += 2
        digits = first + ahead
    if int(digits, 8) > 0o377:
        raise refused(f"the octal escape '\\{digits}' is beyond \\377; write it as \\u and four digits", start)
    return int(digits, 8)


def _backreference(start: int) -> Exception:
    return unsupported(
        "backreference",
        "no automaton remembers what a group held: write the alternatives out, as in \"[^\"]*\"|'[^']*'",
        start,
    )


_POSIX_CLASS = re.compile(r"\[:\^?[a-zA-Z]+:\]")


def bracketed(source: PatternReader, flags: Flags, start: int) -> CharSet:
    """Returns the class whose "[" at `start` has been read; the cursor ends after its "]".

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


def _range(source: PatternReader, first: int, last: int, at: int) -> tuple[int, int]:
    if last < first:
        written = source.pattern[at : source.position]
        raise refused(f"the range {written!r} runs backwards; write '\\-' for a literal hyphen", at)
    return first, last


def _member(source: PatternReader, flags: Flags, start: int) -> int | CharSet:
    """Reads one character of a class or an escape."""
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


# All that is assigned, but for private use; the test scans everything.
_ASSIGNED = ((0, 0x33480), (0xE0000, 0xE0200))
_PRIVATE: Ranges = ((0xE000, 0xF8FF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))
ASCII_DIGIT = CharSet.of(((0x30, 0x39),))
ASCII_WORD = CharSet.of(((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
ASCII_SPACE = CharSet.of(((0x09, 0x0D), (0x20, 0x20)))
_ECMA_SPACES = (*range(0x09, 0x0E), 0x20, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F)
ECMA_SPACE = CharSet.of((code, code) for code in (*_ECMA_SPACES, 0x3000, 0xFEFF))
ECMA_LINE_ENDS = CharSet.of(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)))
LINE_END = CharSet.single(0x0A)


def _characters(first: int, end: int) -> str:
    return np.arange(first, end, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")


def _matching(run: str) -> CharSet:
    """Returns the characters of the runs that a fixed expression of ours finds."""
    compiled = re.compile(run)
    return CharSet.of(
        (first + found.start(), first + found.end() - 1)
        for first, end in _ASSIGNED
        for found in compiled.finditer(_characters(first, end))
    )


@functools.cache
def word() -> CharSet:
    return _matching(r"\w+")


@functools.cache
def digit() -> CharSet:
    return _matching(r"\d+")


@functools.cache
def space() -> CharSet:
    return _matching(r"\s+")


_LONG_NAMES = {
    "letter": "L", "casedletter": "LC", "uppercaseletter": "Lu", "lowercaseletter": "Ll", "titlecaseletter": "Lt",
    "modifierletter": "Lm", "otherletter": "Lo", "mark": "M", "combiningmark": "M", "nonspacingmark": "Mn",
    "spacingmark": "Mc", "enclosingmark": "Me", "number": "N", "decimalnumber": "Nd", "letternumber": "Nl",
    "othernumber": "No", "punctuation": "P", "connectorpunctuation": "Pc", "dashpunctuation": "Pd",
    "openpunctuation": "Ps", "closepunctuation": "Pe", "initialpunctuation": "Pi", "finalpunctuation": "Pf",
    "otherpunctuation": "Po", "symbol": "S", "mathsymbol": "Sm", "currencysymbol": "Sc", "modifiersymbol": "Sk",
    "othersymbol": "So", "separator": "Z", "spaceseparator": "Zs", "lineseparator": "Zl",
    "paragraphseparator": "Zp", "other": "C", "control": "Cc", "format": "Cf", "privateuse": "Co",
    "unassigned": "Cn", "punct": "P", "digit": "Nd", "cntrl": "Cc",
}  # fmt: skip
_GROUPS = {"LC": ("Lu", "Ll", "Lt"), "L&": ("Lu", "Ll", "Lt")}


@functools.cache
def _by_category() -> dict[str, CharSet]:
    """Finds every two-letter category; surrogates (Cs) are no characters, Cn is what is left."""
    runs: dict[str, list[tuple[int, int]]] = {"Co": list(_PRIVATE), "Cs": []}
    for first, end in _ASSIGNED:
        begin, current = first, ""
        for code, category in enumerate(map(unicodedata.category, _characters(first, end)), first):
            if category != current:
                if current:
                    runs.setdefault(current, []).append((begin, code - 1))
                begin, current = code, category
        runs.setdefault(current, []).append((begin, end - 1))
    runs.pop("Cn", None)
    found = {category: CharSet.of(ranges) for category, ranges in runs.items()}
    found["Cn"] = ~CharSet.of(range_ for each in found.values() for range_ in each.ranges)
    return found


@functools.lru_cache(maxsize=64)
def category(name: str) -> CharSet | None:
    """Finds a general category by its name ("Lu", "L", "Letter", "gc=Lu"), "Any" or "ASCII"; None: no such."""
    key, _, value = name.rpartition("=")
    plain = value.replace("_", "").replace("-", "").replace(" ", "").lower()
    if key.replace("_", "").lower() not in ("", "gc", "generalcategory"):
        return None
    if not key and plain in ("any", "ascii", "assigned"):
        every = {"any": ANY, "ascii": CharSet.of(((0, 0x7F),))}
        return every.get(plain) or ~_by_category()["Cn"]
    short = _LONG_NAMES.get(plain, plain[:1].upper() + plain[1:].lower() if plain != "lc" else "LC")
    if short in _GROUPS:
        members = [_by_category()[each] for each in _GROUPS[short]]
    else:
        members = [each for two_letters, each in _by_category().items() if short in (two_letters, two_letters[0])]
    return CharSet.of(range_ for each in members for range_ in each.ranges) if members else None


# No character beyond has a case (Adlam ends at U+1E943). The test scans all of them.
_CASED_END = 0x1F000
_ASCII_DISTANCE = ord("a") - ord("A")


def _lower(code: int) -> int:
    """Lowers one character to one: of "İ", whose lower case is two, the first."""
    return ord(chr(code).lower()[0])


@functools.cache
def _orbits() -> dict[int, tuple[int, ...]]:
    """Maps every character that ignoring case changes to those that it then equals, itself among them."""
    by_upper: dict[str, list[int]] = {}
    lowers_to: dict[int, list[int]] = {}
    for code in range(_CASED_END):
        lowered = _lower(code)
        if lowered != code:
            lowers_to.setdefault(lowered, []).append(code)
        elif chr(code).upper() != chr(code):
            by_upper.setdefault(chr(code).upper(), []).append(code)
    equal_lowers = {lowered: alike for alike in by_upper.values() if len(alike) > 1 for lowered in alike}
    orbits = {}
    for lowered in {*lowers_to, *equal_lowers}:
        alike = equal_lowers.get(lowered, [lowered])
        orbit = {code for each in alike for code in (each, *lowers_to.get(each, ()))}
        for code in orbit:
            orbits[code] = tuple(sorted(orbit))
    return orbits


def ignoring_case(characters: CharSet) -> CharSet:
    """Adds everything that equals a member when case is ignored."""
    orbits = _orbits()
    small = len(characters) < len(orbits)
    changed = (
        (code for first, last in characters.ranges for code in range(first, last + 1) if code in orbits)
        if small
        else (code for code in orbits if code in characters)
    )
    return characters | CharSet.of((alike, alike) for code in changed for alike in orbits[code])


def ignoring_ascii_case(characters: CharSet) -> CharSet:
    """Returns the same where only A to Z and a to z have a case: the flag `a`."""
    upper = characters & CharSet(((ord("A"), ord("Z")),))
    lower = characters & CharSet(((ord("a"), ord("z")),))
    return (
        characters
        | CharSet.of((first + _ASCII_DISTANCE, last + _ASCII_DISTANCE) for first, last in upper.ranges)
        | CharSet.of((first - _ASCII_DISTANCE, last - _ASCII_DISTANCE) for first, last in lower.ranges)
    )
