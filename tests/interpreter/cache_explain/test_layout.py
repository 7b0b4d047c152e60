"""A prompt's text with who put what into it, and where two texts part."""

from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter.cache_explain.history import Asked, Intent, common_length, of_call, with_answer
from umbel.lang.prompt import EMPTY, Generated, Media, Part, Source, SourceKind, Text

HERE = Source(SourceKind.TEXT, None, "here")
THERE = Source(SourceKind.TEXT, None, "there")


def asked(*said: tuple[Part, Source | None], sent: tuple[Part, ...] | None = None, answer: str = "") -> Asked:
    prompt = EMPTY
    for part, source in said:
        prompt = prompt.append(part, source)
    return Asked(Intent("gen", "x", prompt, HERE), sent, "", 1, 0, answer=answer)


@settings(max_examples=200)
@given(st.text("ab", max_size=12), st.text("ab", max_size=12))
def test_the_common_beginning_is_the_longest_one(left: str, right: str) -> None:
    length = common_length(left, right)
    assert left[:length] == right[:length]
    assert left[length : length + 1] != right[length : length + 1] or length == min(len(left), len(right))


def test_pieces_know_their_sources() -> None:
    layout = of_call(
        asked(
            (Text("Q: "), HERE),
            (Text(""), THERE),
            (Generated("yes", (1,)), THERE),
            (Media("image", "0" * 64, b""), HERE),
        )
    )
    assert layout.text == "Q: yes<image 00000000>"
    assert [(piece.start, piece.text) for piece in layout.pieces] == [(0, "Q: "), (3, "yes"), (6, "<image 00000000>")]
    at = layout.at(4)
    assert at is not None
    assert (at.text, at.source) == ("yes", THERE)
    assert layout.at(22) is layout.at(-1) is None


def test_the_answer_belongs_to_what_is_cached() -> None:
    layout = with_answer(asked((Text("Q: "), HERE), answer="yes"))
    assert layout.text == "Q: yes"
    assert layout.pieces[-1].source == Source(SourceKind.GENERATED, None, "x")


def test_what_is_added_to_a_prompt_is_told_apart() -> None:
    said = ((Text("Please: "), HERE), (Text("count."), THERE))
    layout = of_call(asked(*said, sent=(Text("Please: (digits) "), Text("count."))))
    assert layout.text == "Please: (digits) count."
    assert [(piece.text, piece.source) for piece in layout.pieces] == [
        ("Please: ", HERE),
        ("(digits) ", None),
        ("count.", THERE),
    ]


@settings(max_examples=100)
@given(st.lists(st.text("ab", max_size=5), max_size=4), st.text("ab", max_size=5), st.integers(0, 20))
def test_whatever_is_added_the_text_is_what_was_sent(texts: list[str], added: str, place: int) -> None:
    whole = "".join(texts)
    sent = whole[:place] + added + whole[place:]
    layout = of_call(asked(*((Text(text), HERE) for text in texts), sent=(Text(sent),)))
    assert layout.text == sent
    assert "".join(piece.text for piece in layout.pieces) == sent
