"""Classes of characters by what Unicode says of them, and which are the same when case is ignored.

Found by asking this interpreter once, when first needed (5 ms each for \\w, \\d, \\s, 40 ms for all general
categories), so that they are what `re` and `unicodedata` say here, without tables to keep up to date.

Case is ignored as `re` does: it lowers the character of the text and asks whether the result is among the lowered
members of the set, where a lowered member stands for all that share its upper case as well ("s" for "ſ", "σ" for "ς").
Lowering maps one character to one, so "ß" and "SS" stay different.
"""

import functools
import re
import unicodedata

import numpy as np

from ..charset import ANY, CharSet
from ..language import Ranges

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
