"""Parts of a prompt → ids, on the byte tokenizer; and the byte table's file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from umbel.lang.errors import CapabilityError, ModelError
from umbel.lang.prompt import Generated, Media, Text
from umbel.srt.tokenizer.prompt import PromptEncoder
from umbel.srt.tokenizer.tokenizer import ByteTokenizer
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
