"""Sets of characters against Python's sets, classes and case against `re` and `unicodedata` over all of Unicode."""

import re
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from umbel.fsm.language import ANY, CharSet
from umbel.fsm.regex import classes
from umbel.fsm.regex.classes import _orbits, category, ignoring_ascii_case, ignoring_case

SCALARS = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
CODES = st.one_of(st.integers(0, 20), st.integers(0xD7FA, 0xE005), st.integers(0x10FFF0, 0x10FFFF))
RANGES = st.lists(st.tuples(CODES, CODES), max_size=6)


def members(characters: CharSet) -> list[int]:
    return [code for first, last in characters.ranges for code in range(first, last + 1)]


def of_text(text: str) -> CharSet:
    return CharSet.of((ord(character), ord(character)) for character in text)


@given(RANGES, RANGES)
def test_sets_act_as_sets(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = CharSet.of(left), CharSet.of(right)
    probes = {code + near for first, last in left + right for code in (first, last) for near in (-1, 0, 1)} | {
        0,
        0xD800,
    }
    for code in probes:
        in_a = any(first <= code <= last for first, last in left) and not 0xD800 <= code < 0xE000
        in_b = any(first <= code <= last for first, last in right) and not 0xD800 <= code < 0xE000
        assert (code in a) == in_a
        assert (code in a | b) == (in_a or in_b)
        assert (code in a & b) == (in_a and in_b)
        assert (code in a - b) == (in_a and not in_b)
        assert (code in ~a) == (not in_a and 0 <= code <= 0x10FFFF and not 0xD800 <= code < 0xE000)
    assert ~~a == a
    assert len(a) + len(~a) == len(ANY) == len(SCALARS)


@given(RANGES)
def test_ranges_are_normal(ranges: list[tuple[int, int]]) -> None:
    found = CharSet.of(ranges).ranges
    assert all(first <= last for first, last in found)
    assert all(before[1] + 1 < after[0] for before, after in pairwise(found))


@pytest.mark.parametrize(
    ("found", "pattern"),
    [
        (classes.word(), r"\w"),
        (classes.digit(), r"\d"),
        (classes.space(), r"\s"),
        (classes.ASCII_WORD, r"(?a)\w"),
        (classes.ASCII_DIGIT, r"(?a)\d"),
        (classes.ASCII_SPACE, r"(?a)\s"),
    ],
)
@pytest.mark.sampled(4)
def test_classes_are_those_of_re(found: CharSet, pattern: str) -> None:
    text = "".join(map(chr, SCALARS))
    assert members(found) == [ord(character) for character in re.findall(pattern, text)]


def test_categories_are_those_of_unicodedata() -> None:
    by_category: dict[str, list[int]] = {}
    for code in SCALARS:
        by_category.setdefault(unicodedata.category(chr(code)), []).append(code)
    for name, codes in by_category.items():
        assert members(category(name)) == codes, name
    letters = sorted(code for name in ("Lu", "Ll", "Lt", "Lm", "Lo") for code in by_category[name])
    assert members(category("L")) == members(category("Letter")) == members(category("gc=L")) == letters
    assert category("Cased_Letter") == category("LC") == category("Lu") | category("Ll") | category("Lt")
    assert category("Any") == ANY
    assert category("ASCII") == CharSet.of(((0, 127),))
    assert category("Assigned") == ~category("Cn")


@pytest.mark.parametrize("name", ["Greek", "Script=Greek", "Lx", "", "XYZ", "sc=L", "Cased"])
def test_other_properties_are_unknown(name: str) -> None:
    assert category(name) is None


def test_case_is_ignored_as_re_ignores_it() -> None:
    orbits = _orbits()
    changed = "".join(map(chr, sorted(orbits)))
    assert [code for code in SCALARS if chr(code).lower() != chr(code) and code not in orbits] == []
    for code, orbit in orbits.items():
        found = re.findall("(?i)" + re.escape(chr(code)), changed)
        assert tuple(map(ord, found)) == orbit, hex(code)


def test_case_of_ascii_only() -> None:
    assert ignoring_ascii_case(of_text("aZ1ſé")) == of_text("aAzZ1ſé")
    assert ignoring_case(of_text("sé")) == of_text("sSſéÉ")
