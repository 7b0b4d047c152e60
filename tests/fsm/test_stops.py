"""Stops, strings or expressions, are found however the text is cut, and nothing that might begin one is shown."""

import itertools
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.errors import ConstraintRefused
from umbel.fsm.stops import StopAutomaton, StopMatch, Stops, stops_of

TEXT = st.text(alphabet="abé\n", max_size=30)
STOPS = st.lists(st.text(alphabet="abé\n", min_size=1, max_size=4), min_size=1, max_size=4)


def earliest(text: bytes, stops: list[str]) -> tuple[int, int] | None:
    """The stop that ends first; of those the longest, by trying every place."""
    found = [
        (at + len(stop.encode()), at)
        for stop in stops
        for at in range(len(text))
        if text[at : at + len(stop.encode())] == stop.encode()
    ]
    return (min(found)[1], min(found)[0]) if found else None


@given(TEXT, STOPS, st.lists(st.integers(0, 40), max_size=6))
def test_however_the_text_is_cut_the_first_stop_is_found(text: str, stops: list[str], cuts: list[int]) -> None:
    data = text.encode()
    matcher = StopAutomaton(stops).matcher()
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, end in pairwise(bounds):
        if matcher.feed(data[start:end]):
            break
    expected = earliest(data, stops)
    assert (matcher.match and (matcher.match.start, matcher.match.end)) == expected


@given(TEXT, STOPS)
def test_pending_is_the_longest_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    data = text.encode()
    matcher = StopAutomaton(stops).matcher()
    if matcher.feed(data):
        assert matcher.pending == 0
        return
    longest = max(n for n in range(len(data) + 1) if any(s.encode().startswith(data[len(data) - n :]) for s in stops))
    assert matcher.pending == longest


def stops(strings: tuple[str, ...] = (), patterns: tuple[str, ...] = ()) -> Stops:
    compiled = stops_of(strings, patterns)
    assert compiled is not None
    return compiled


def first(text: str | bytes, strings: tuple[str, ...] = (), patterns: tuple[str, ...] = ()) -> StopMatch | None:
    data = text.encode() if isinstance(text, str) else text
    return stops(strings, patterns).matcher().feed(data)


def expected(text: str, patterns: tuple[str, ...]) -> tuple[int, int] | None:
    """(start, end) in characters, by `re`."""
    for end in range(1, len(text) + 1):
        starts = [m.start() for p in patterns if (m := re.compile(rf"(?:{p})\Z", re.S).search(text, 0, end))]
        if starts:
            return min(starts), end
    return None


PATTERNS = ["[0-9]+", "a", "ab|b+c", "é.b", "[a-c]{2}1", "(?:a|b)*c", "[^a]b", "1?2"]


@settings(max_examples=200, deadline=None)
@given(
    st.text("abc12é✓ ", max_size=12),
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_it_agrees_with_re_however_the_text_is_cut(text: str, patterns: list[str], places: list[int]) -> None:
    data, matcher = text.encode(), stops((), tuple(patterns)).matcher()
    wanted = expected(text, tuple(patterns))
    cuts = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    found = None
    for begin, end in itertools.pairwise(cuts):
        found = matcher.feed(data[begin:end])
        if found is not None:
            break
        held = len(data[:end]) - matcher.pending
        assert wanted is None or len(text[: wanted[0]].encode()) >= held  # what is shown is never taken back
    if wanted is None:
        assert found is None
    else:
        assert found is not None
        assert (found.start, found.end) == tuple(len(text[:place].encode()) for place in wanted)
        assert re.fullmatch(found.stop, data[found.start : found.end].decode(), re.S)


def test_strings_and_expressions_watch_together() -> None:
    assert first("one two 3", ("two",), ("[0-9]",)) == StopMatch(4, 7, "two")
    assert first("one 2 two", ("two",), ("[0-9]",)) == StopMatch(4, 5, "[0-9]")
    assert first("xaby", ("b",), ("a?b",)) == StopMatch(1, 3, "a?b")
    assert stops_of((), ()) is None


def test_nothing_is_held_back_that_cannot_begin_a_stop() -> None:
    matcher = stops(("zzz",), ("[A-Z][a-z]+:",)).matcher()
    pending = []
    for piece in ("he said ", "Hello", " ", "zz", "Bob", ":"):
        matcher.feed(piece.encode())
        pending.append(matcher.pending)
    assert pending == [0, 5, 0, 2, 3, 0]
    assert matcher.match == StopMatch(16, 20, "[A-Z][a-z]+:")


def test_after_a_match_the_next_one_is_found() -> None:
    for strings, patterns in (((), ("[0-9]",)), (("1", "2"), ("[0-9]",))):
        matcher = stops(strings, patterns).matcher()
        data = b"a1b2c"
        match = matcher.feed(data)
        assert match is not None
        matcher.match = None
        again = matcher.feed(data[match.end :])
        assert again is not None
        assert (again.start, again.end) == (3, 4)


def test_broken_bytes_count_as_what_is_shown_for_them() -> None:
    assert first(b"a\xe2A", (), ("A",)) == StopMatch(2, 3, "A")
    matcher = stops((), ("\ufffd",)).matcher()
    match = matcher.feed(b"a\xe2AB")
    assert match == StopMatch(1, 2, "\ufffd")
    matcher.match = None
    assert matcher.feed(b"AB\xff") == StopMatch(4, 5, "\ufffd")


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(a", r"stop_regex '\(a': position 0"),
        ("a*", "matches the empty text"),
        ("^a", "anchor or lookahead"),
        ("a$", "anchor"),
        ("a(?=b)", "lookahead"),
        (r"(a)\1", "backreference"),
        ("a{300}", "more than 256 states; write smaller repeats"),
        ("[ab]*a[ab]{12}c", "more than 256 states"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(pattern: str, problem: str) -> None:
    with pytest.raises(ConstraintRefused, match=problem):
        stops((), ("fine", pattern))


def test_unicode_classes_need_no_more_states_than_ascii_ones() -> None:
    assert first("naïve: 你好:", (), (r"\w+:",)) == StopMatch(0, 7, r"\w+:")
