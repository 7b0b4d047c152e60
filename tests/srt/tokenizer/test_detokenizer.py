"""The detokenizer: pieces add up, nothing is taken back, no character and no stop string is cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from umbel.fsm.stops import StopAutomaton
from umbel.srt.tokenizer.tokenizer import Detokenizer

TEXTS = st.text(alphabet="aEND é漢🙂\n", max_size=30)
STOPS = st.lists(st.text(alphabet="aEND é漢", min_size=1, max_size=4), max_size=3, unique=True)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Bytes as tokens that end anywhere."""
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def detokenizer(tokens: list[bytes], stops: list[str] | None = None) -> Detokenizer:
    return Detokenizer(tokens.__getitem__, StopAutomaton(stops) if stops else None)


@given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
def test_pieces_of_any_bytes_add_up_to_the_decoded_whole(data: bytes, places: list[int]) -> None:
    tokens = cut(data, places)
    subject = detokenizer(tokens)
    pieces = [subject.feed([index]) for index in range(len(tokens))]
    pieces.append(subject.finish([], len(data)))
    assert "".join(pieces) == subject.text == data.decode("utf-8", "replace")


@given(TEXTS, st.lists(st.integers(0, 100)))
def test_no_piece_of_valid_text_holds_a_replacement_character(text: str, places: list[int]) -> None:
    tokens = cut(text.encode(), places)
    subject = detokenizer(tokens)
    assert all("�" not in subject.feed([index]) for index in range(len(tokens)))


@given(TEXTS, STOPS, st.lists(st.integers(0, 100)))
def test_what_is_shown_never_holds_the_beginning_of_the_stop_that_ends_the_text(
    text: str, stops: list[str], places: list[int]
) -> None:
    tokens = cut(text.encode(), places)
    subject = detokenizer(tokens, stops)
    matcher = StopAutomaton(stops).matcher()
    for index, token in enumerate(tokens):
        match = matcher.feed(token)
        if match is not None:
            subject.finish([index], match.start)  # asserts that no more than this was shown
            assert subject.text == text.encode()[: match.start].decode("utf-8", "replace")
            return
        subject.feed([index])
    subject.finish([], len(text.encode()))
    assert subject.text == text


@given(TEXTS, STOPS, st.lists(st.integers(0, 100)), st.integers(0, 30))
def test_stops_overruled_by_min_tokens_leave_room_for_the_one_that_counts(
    text: str, stops: list[str], places: list[int], minimum: int
) -> None:
    """The engine searches on behind an overruled stop; what is shown never reaches into the one that counts."""
    tokens = cut(text.encode(), places)
    subject = detokenizer(tokens, stops)
    automaton = StopAutomaton(stops)
    matcher, base, seen = automaton.matcher(), 0, 0
    for index, token in enumerate(tokens):
        rest = token
        while stops and (match := matcher.feed(rest)) is not None:
            if index + 1 >= minimum:
                subject.finish([index], base + match.start)
                assert subject.text == text.encode()[: base + match.start].decode("utf-8", "replace")
                return
            base += match.end
            rest = token[base - seen :]
            matcher = automaton.matcher()
        seen += len(token)
        subject.feed([index])
    subject.finish([], seen)
    assert subject.text == text


@given(TEXTS, st.lists(st.integers(0, 100)), st.integers(0, 100))
def test_kept_tokens_and_tail_spell_the_text_and_no_more_tokens_fit(text: str, places: list[int], place: int) -> None:
    data = text.encode()
    tokens = cut(data, places)
    end = len(text[: place % (len(text) + 1)].encode())
    subject = detokenizer(tokens)
    subject.finish(range(len(tokens)), end)
    kept = subject.kept(end, ends_with_stop_token=False)
    assert b"".join(tokens[: kept.count]).decode() + kept.tail == subject.text
    longer = b"".join(tokens[: kept.count + 1])
    if kept.count < len(tokens) and len(longer) <= end:  # one more would have fitted by bytes: it splits a character
        assert "�" in longer.decode("utf-8", "replace")


def test_an_end_token_is_not_kept_and_a_control_token_inside_is() -> None:
    tokens = [b"a", b"", b"b", b""]
    subject = detokenizer(tokens)
    assert subject.finish([0, 1, 2, 3], 2) == "ab"
    assert subject.kept(2, ends_with_stop_token=True).count == 3
    assert subject.kept(2, ends_with_stop_token=False).count == 4


def test_an_unfinished_character_appears_only_at_the_end_and_as_replacement() -> None:
    subject = detokenizer([b"a\xe2\x82"])
    assert subject.feed([0]) == "a"
    assert subject.finish([], 3) == "�"
