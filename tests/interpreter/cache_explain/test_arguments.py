"""Which argument a text comes from."""

import pytest
from umbel.interpreter.cache_explain.report import argument_at


def found(arguments: dict[str, object], text: str, marked: str) -> str:
    return argument_at(arguments, text, 0, len(text), text.index(marked))


@pytest.mark.parametrize(
    ("arguments", "text", "marked", "name"),
    [
        ({"question": "Why is it?"}, "Q: Why is it?\nA:", "is", "question"),
        ({"question": "Why is it?"}, "Q: Why is it?\nA:", "Q", ""),
        ({"question": "Why is it?"}, "Why", "h", "question"),  # a part of it was said
        ({"short": "Why", "long": "Why is it?"}, "Q: Why is it?", "Why", "long"),
        ({"turns": ["One?", "Two?"]}, "Two?", "o", "turns[1]"),
        ({"person": {"name": "Ann Lee"}}, "I am Ann Lee.", "Lee", "person['name']"),
        ({"number": 12345}, "No. 12345", "3", "number"),
        ({"letter": "a"}, "a cat and a dog", "a", ""),  # it stands everywhere
        ({"letter": "a"}, "a", "a", "letter"),
        ({"empty": ""}, "text", "t", ""),
        ({}, "text", "t", ""),
    ],
)
def test_the_longest_value_that_is_there_wins(arguments: dict[str, object], text: str, marked: str, name: str) -> None:
    assert found(arguments, text, marked) == name


def test_a_value_that_stands_in_its_place_alone_is_sure() -> None:
    assert argument_at({"letter": "a"}, "is it a?", 6, 7, 6) == "letter"
