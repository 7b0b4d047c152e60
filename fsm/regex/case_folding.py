"""Which characters are the same when case is ignored, as Python's `re` has it.

`re` lowers the character of the text and asks whether the result is among the lowered members of the set, where a
lowered member stands for all that share its upper case as well ("s" for "ſ", "σ" for "ς"). Lowering maps one
character to one, so "ß" and "SS" stay different.
"""

import functools

from ..charset import CharSet

# No character beyond has a case (Adlam ends at U+1E943). The test scans all of them.
_CASED_END = 0x1F000
_ASCII_DISTANCE = ord("a") - ord("A")


def _lower(code: int) -> int:
    """One character for one: of "İ", whose lower case is two, the first."""
    return ord(chr(code).lower()[0])


@functools.cache
def _orbits() -> dict[int, tuple[int, ...]]:
    """Of every character that ignoring case changes: what it then equals, itself among them."""
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
    """Everything that equals a member when case is ignored."""
    orbits = _orbits()
    small = len(characters) < len(orbits)
    changed = (
        (code for first, last in characters.ranges for code in range(first, last + 1) if code in orbits)
        if small
        else (code for code in orbits if code in characters)
    )
    return characters | CharSet.of((alike, alike) for code in changed for alike in orbits[code])


def ignoring_ascii_case(characters: CharSet) -> CharSet:
    """The same where only A to Z and a to z have a case: the flag `a`."""
    upper = characters & CharSet(((ord("A"), ord("Z")),))
    lower = characters & CharSet(((ord("a"), ord("z")),))
    return (
        characters
        | CharSet.of((first + _ASCII_DISTANCE, last + _ASCII_DISTANCE) for first, last in upper.ranges)
        | CharSet.of((first - _ASCII_DISTANCE, last - _ASCII_DISTANCE) for first, last in lower.ranges)
    )
