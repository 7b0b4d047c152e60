"""Thinking and answer, apart, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from umbel.interpreter.reasoning import ReasoningTags, Split, Splitter, split_reasoning

TAGS = ReasoningTags("<think>", "</think>")


@pytest.mark.parametrize(
    ("tail", "text", "expected"),
    [
        ("", "<think>\nhm\n</think>\n\nyes ", Split("hm", "yes ")),
        ("", " <think>hm</think>yes", Split("hm", "yes")),
        ("assistant\n<think>\n", "hm</think>yes", Split("hm", "yes")),
        ("", "hm</think>yes", Split("hm", "yes")),
        ("", "just yes", Split("", "just yes")),
        ("", "<think>cut off ", Split("cut off", "")),
        ("<think>", "cut off", Split("cut off", "")),
        ("", "<think></think>yes", Split("", "yes")),
        ("", "<think>a</think>b</think>c", Split("a", "b</think>c")),
        ("", "", Split("", "")),
    ],
)
def test_a_whole_text_is_split(tail: str, text: str, expected: Split) -> None:
    assert split_reasoning(TAGS, tail, text) == expected


@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "/", "th", "ink>", "a", " ", "\n", "b c"]), max_size=12
    ),
    tail=st.sampled_from(["", "<think>\n"]),
    opened=st.booleans(),
    data=st.data(),
)
def test_pieces_add_up_to_the_split_of_the_whole(
    pieces: list[str], tail: str, opened: bool, data: st.DataObject
) -> None:
    text = "".join(pieces)
    splitter = Splitter(TAGS, tail, opened=opened)
    reasoning = answer = ""
    rest = text
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        part = splitter.feed(rest[:cut])
        reasoning, answer, rest = reasoning + part.reasoning, answer + part.answer, rest[cut:]
    last = splitter.finish()
    assert Split(reasoning + last.reasoning, answer + last.answer) == split_reasoning(TAGS, tail, text, opened=opened)


def test_thinking_is_given_out_before_it_ends() -> None:
    splitter = Splitter(TAGS, "")
    assert splitter.feed("<think>one ") == Split("one", "")
    assert splitter.feed("two</th") == Split(" two", "")
    assert splitter.feed("ink> yes") == Split("", "yes")


@pytest.mark.parametrize(
    ("tail", "text", "expected"),
    [
        ("", "\n<think>\nhm\n</think>\n\nyes", Split("hm", "yes")),
        ("<think>", "hm</think>yes", Split("hm", "yes")),
        ("", "yes</think> no", Split("", "yes</think> no")),
        ("", "yes <think>no</think>", Split("", "yes <think>no</think>")),
        ("", " <thi", Split("", "<thi")),
        ("", "<think>cut off ", Split("cut off", "")),
    ],
)
def test_reasoning_that_has_its_opening_tag_is_told_by_it(tail: str, text: str, expected: Split) -> None:
    assert split_reasoning(TAGS, tail, text, opened=True) == expected


def test_an_answer_without_reasoning_is_given_out_from_its_first_token_on() -> None:
    splitter = Splitter(TAGS, "", opened=True)
    assert splitter.feed("\n<") == Split("", "")
    assert splitter.feed("b") == Split("", "<b")
    assert splitter.feed("> </think>") == Split("", "> </think>")
    assert Splitter(TAGS, "", opened=True).feed("Yes") == Split("", "Yes")
