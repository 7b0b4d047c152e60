"""Stop strings are found wherever tokens fall, and nothing that might begin one is shown."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from umbel.fsm.stops import StopAutomaton

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
