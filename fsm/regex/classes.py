"""Characters as an expression writes them: escapes, and classes in brackets such as [a-z\\d], [^\\s], []x]."""

import re
import string
import unicodedata

from ..charset import CharSet
from . import unicode_classes as unicode
from .reader import Flags, PatternReader, refused, unsupported

OCTAL = "01234567"
_CONTROLS = {"f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)  # halves of a surrogate pair


def folded(characters: CharSet, flags: Flags) -> CharSet:
    """Returns the characters that written ones stand for under the flags i and a."""
    if not flags.ignore_case:
        return characters
    return unicode.ignoring_ascii_case(characters) if flags.ascii else unicode.ignoring_case(characters)


def class_escape(source: PatternReader, flags: Flags, start: int) -> CharSet | None:
    """Reads \\d \\w \\s \\p{..} and their complements, after the backslash at `start`; None where it is another escape.

    The flag i changes properties only: \\w, \\d and \\s are asked about the character as it is.

    Raises:
        Unsupported: a property that is no general category.
    """
    letter = source.next
    match letter.lower():
        case "d":
            found = unicode.ASCII_DIGIT if source.ecma or flags.ascii else unicode.digit()
        case "w":
            found = unicode.ASCII_WORD if source.ecma or flags.ascii else unicode.word()
        case "s" if source.ecma:
            found = unicode.ECMA_SPACE
        case "s":
            found = unicode.ASCII_SPACE if flags.ascii else unicode.space()
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
    found = unicode.category(name)
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
