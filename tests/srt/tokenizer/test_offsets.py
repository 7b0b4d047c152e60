"""Where tokens stand in the text of a prompt."""

from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.errors import ParameterError
from umbel.lang.prompt import Generated, Media, Part, Text
from umbel.lang.protocol import Failure, Locate, Located, Origin
from umbel.srt.tokenizer.prompt import PromptEncoder, text_of, token_places
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..gateway_harness import Harness

TOKENIZER = ByteTokenizer()


class Spaced(ByteTokenizer):
    """Puts a space before the first text of a sequence, as SentencePiece does."""

    name = "spaced"

    def encode(self, text: str, *, first: bool) -> list[int]:
        return super().encode(" " + text if first else text, first=first)


def places(parts: tuple[Part, ...], tokenizer: ByteTokenizer = TOKENIZER) -> list[tuple[int, bytes]]:
    """Every token's place and its bytes."""
    ids = PromptEncoder(tokenizer).encode(parts)
    found = token_places(tokenizer, text_of(parts), ids, range(len(ids)))
    return list(zip(found, map(tokenizer.token_bytes, ids), strict=True))


@settings(max_examples=60)
@given(st.lists(st.text("the an<>s/é☂ .\n", max_size=12), max_size=5))
def test_every_token_begins_where_its_bytes_stand(texts: list[str]) -> None:
    parts = tuple(Text(text) for text in texts)
    whole = "".join(texts)
    data = whole.encode()
    for place, spelled in places(parts):
        start = len(whole[:place].encode())
        inside = place < len(whole) and data[start : start + 1] > b"\x7f"  # a byte inside of a character
        assert inside or data.startswith(spelled, start)


def test_control_tokens_stand_where_the_template_wrote_them() -> None:
    parts = (Text("<|im_start|>", control=True), Text("user\nhi"), Text("<|im_end|>", control=True), Text("x"))
    found = places(parts)
    assert [place for place, spelled in found if not spelled] == [0, 0, 19]  # BOS, which no text holds, and the two
    assert found[-1] == (29, b"x")


def test_a_bos_that_the_template_writes_is_one_token() -> None:
    assert places((Text("<s>", control=True), Text("a")))[:2] == [(0, b""), (3, b"a")]


def test_generated_ids_are_found_in_their_text() -> None:
    parts = (Text("a"), Generated("the", (116, 104, 101)), Text("z"))  # not as the tokenizer would write it
    assert [place for place, _ in places(parts)] == [0, 0, 1, 2, 3, 4]


def test_a_space_that_the_tokenizer_adds_moves_nothing() -> None:
    assert [place for place, _ in places((Text("The cat The dog"),), Spaced())][-1] == len("The cat The do")


def test_media_have_names_that_tell_them_apart() -> None:
    assert text_of((Text("a"), Media("image", "0123456789" * 6, b""))) == "a<image 01234567>"


def ask(question: Locate) -> Located | Failure:
    harness = Harness()
    harness.send(question)
    (answer,) = harness.answers()
    assert isinstance(answer, Located | Failure)
    return answer


def test_the_gateway_answers_without_the_engine() -> None:
    harness = Harness(ready=False)
    harness.send(Locate("a", (Text("abc"),), (0, 1, 3, 99), ((Text("abx"),), (Text("q"),)), Origin(salt="s")))
    assert harness.answers() == [Located("a", (0, 0, 2, 3), 4, (3, 1))]
    assert harness.to_engine == []


def test_what_is_wrong_with_a_question_is_said() -> None:
    answer = ask(Locate("a", (Text("abc"),), (-1,)))
    assert isinstance(answer, Failure)
    assert (answer.id, answer.kind) == ("a", ParameterError.__name__)
    assert "counted from 0" in answer.message
    assert isinstance(ask(Locate("a", (Media("image", "0" * 64, b""),), (0,))), Failure)
