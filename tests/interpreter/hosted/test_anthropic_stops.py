"""Stops that the provider looks for and stops that are looked for here end a text as all of them together do."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from umbel.interpreter.backends.echo_answers import cut
from umbel.interpreter.backends.hosted.stops import Lead, StopCutter, sendable
from umbel.lang.sampling import MAX_TOKENS, SamplingParams

TEXT = st.text("ab \n", max_size=12)
STOPS = st.lists(st.text("ab \n", min_size=1, max_size=3), max_size=4, unique=True)
BLANKS = st.text(" \n", max_size=3)


def ended(text: str, stops: tuple[str, ...]) -> tuple[str, object]:
    completion, _ = cut(text, SamplingParams(max_tokens=MAX_TOKENS, stop=stops))
    return completion.text, completion.matched_stop


@given(TEXT, STOPS, BLANKS)
@example("\na", ["a", "\na"], "\n")
@settings(max_examples=400, deadline=None)
def test_stops_of_both_sides_end_a_text_where_all_of_them_do(text: str, stops: list[str], lead: str):
    expected = ended(text, tuple(stops))
    sent, here = sendable(stops, lead)
    assert all(stop.strip() for stop in sent)
    said, matched = ended(lead + text, sent)  # the model writes the white space that the request has left out
    taker, cutter = Lead(lead), StopCutter(here)
    told = "".join(cutter.feed(taker.take_from(character)) for character in said)
    if cutter.matched is None:
        told += cutter.end()
    assert told == expected[0]
    if not _several_end_together(stops):
        assert (cutter.matched or matched) == expected[1]


def _several_end_together(stops: list[str]) -> bool:
    """Which one of those matched is told may differ then; the text does not."""
    return any(one != other and one.endswith(other) for one in stops for other in stops)
