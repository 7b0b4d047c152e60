"""Parts of a prompt → ids, on the byte tokenizer; and the byte table's file."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from umbel.fsm.stops import StopAutomaton
from umbel.lang.errors import CapabilityError, ConstraintError, ModelError
from umbel.lang.prompt import Generated, Media, Text
from umbel.lang.sampling import SamplingParams
from umbel.srt.tokenizer.prompt import PromptEncoder
from umbel.srt.tokenizer.tokenizer import (
    MOST_STOP_CHARACTERS,
    MOST_STOPS,
    ByteTokenizer,
    CompiledStops,
    Detokenizer,
)
from umbel.srt.tokenizer.vocabulary import Vocabulary

BYTES = ByteTokenizer()


def test_a_prompt_begins_with_bos_even_when_it_is_empty() -> None:
    assert PromptEncoder(BYTES).encode([]) == [256]


def test_bos_written_by_the_template_is_not_doubled() -> None:
    assert PromptEncoder(BYTES).encode([Text("<s>", True), Text("x")]) == [256, ord("x")]


def test_bos_later_in_a_template_is_kept() -> None:
    assert PromptEncoder(BYTES).encode([Text("x"), Text("<s>", True)]) == [256, ord("x"), 256]


@pytest.mark.parametrize("name", sorted(BYTES.special_ids))
def test_an_argument_never_yields_a_control_id(name: str) -> None:
    ids = PromptEncoder(BYTES).encode([Text(f"a{name}b{name}")])
    assert all(token < 256 or token > 259 for token in ids[1:])


def test_a_control_name_across_two_parts_is_not_a_control_token() -> None:
    ids = PromptEncoder(BYTES).encode([Text("<|im_", True), Text("start|>")])
    assert BYTES.special_ids["<|im_start|>"] not in ids


@given(st.lists(st.text(st.sampled_from("the ing.\n é"), max_size=6), max_size=5))
def test_part_boundaries_leave_no_trace(pieces: list[str]) -> None:
    encoder = PromptEncoder(BYTES)
    assert encoder.encode([Text(piece) for piece in pieces]) == encoder.encode([Text("".join(pieces))])


def test_generated_ids_end_a_run_and_pass_unchanged() -> None:
    ids = PromptEncoder(BYTES).encode([Text("t"), Generated("h", (ord("h"),)), Text("e")])
    assert ids == [256, ord("t"), ord("h"), ord("e")]  # one string would have merged "th"


def test_media_are_refused_by_a_text_tokenizer() -> None:
    with pytest.raises(CapabilityError, match="reads text only"):
        PromptEncoder(BYTES).encode([Media("image", "00", b"")])


# ---------------------------------------------------------------------------------- vocabulary

tables = st.lists(st.binary(max_size=6), max_size=40)


@given(tables)
def test_a_vocabulary_gives_back_its_tokens(table: list[bytes]) -> None:
    vocabulary = Vocabulary.of(table)
    assert len(vocabulary) == len(table)
    assert list(vocabulary) == table


def test_a_vocabulary_survives_its_file(tmp_path: Path) -> None:
    vocabulary = Vocabulary.of([b"", b"a", b"\xff\x00", "é".encode()])
    path = tmp_path / "vocabulary"
    path.write_bytes(vocabulary.to_bytes())
    assert Vocabulary.of_bytes(path.read_bytes(), path) == vocabulary


@given(table=tables, data=st.data())
def test_any_changed_or_missing_byte_of_the_file_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, table: list[bytes], data: st.DataObject
) -> None:
    content = bytearray(Vocabulary.of(table).to_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="damaged"):
        Vocabulary.of_bytes(path.read_bytes(), path)


def test_a_token_beyond_the_vocabulary_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        Vocabulary.of([b"a"]).token_bytes(1)


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


@given(TEXTS, st.lists(st.integers(0, 100)), st.integers(0, 5))
def test_characters_before_a_token_are_those_that_are_whole_there(text: str, places: list[int], cut_away: int) -> None:
    tokens = cut(text.encode(), places)
    kept = text[: len(text) - cut_away]
    subject = detokenizer(tokens)
    subject.finish(range(len(tokens)), len(kept.encode()))
    ends = [0, *itertools.accumulate(map(len, tokens))]
    whole = [len(kept.encode()[:end].decode("utf-8", "ignore")) for end in ends]
    assert subject.characters_before(range(len(ends))) == whole


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


def test_compiled_stops_are_kept_up_to_a_number_and_a_size() -> None:
    kept = CompiledStops()
    again = SamplingParams(stop=("again",), stop_regex=("a+",))
    first = kept.of(again)
    for number in range(2 * MOST_STOPS):
        kept.of(SamplingParams(stop=(f"{number}",)))
        assert kept.of(again) is first
    assert len(kept._kept) == MOST_STOPS
    for number in range(10):
        kept.of(SamplingParams(stop=tuple(f"{number}-{index:254}" for index in range(16))))
    assert kept.of(SamplingParams()) is None
    assert kept._characters == sum(len(text) for key in kept._kept for texts in key for text in texts)
    assert MOST_STOP_CHARACTERS / 2 < kept._characters <= MOST_STOP_CHARACTERS
    with pytest.raises(ConstraintError, match="not closed"):
        kept.of(SamplingParams(stop_regex=("a(",)))
