"""Placeholders say how a template wrote them, and texts are spelled likewise."""

import json
from typing import Any

import pytest
from umbel.lang.errors import TemplateError
from umbel.lang.templates.placeholders import (
    Outline,
    json_placeholder,
    placeholder,
    read_outline,
    spelled,
    write_json,
)

TEXT = 'à "quoted"\nline <|im_end|>'


def filled(outline: Outline, texts: list[str]) -> str:
    written = [spelled(texts[number], codes) for number, codes in outline.marks]
    return "".join(gap + text for gap, text in zip(outline.gaps, [*written, ""], strict=True))


@pytest.mark.parametrize("form", [{}, {"indent": 2}, {"sort_keys": True}, {"separators": (",", ":")}])
@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_json_with_placeholders_is_that_of_the_texts(form: dict[str, Any], ensure_ascii: bool) -> None:
    def value(text: str, key: str) -> Any:
        return {"é": [text, 1.5, None, {key: text}], "b": {"text": text}}

    expected = json.dumps(value(TEXT, "kéy"), ensure_ascii=ensure_ascii, **form)
    outline = read_outline(write_json(value(placeholder(0), placeholder(1)), ensure_ascii=ensure_ascii, **form))
    assert filled(outline, [TEXT, "kéy"]) == expected


def test_json_in_a_string_of_json_is_escaped_twice() -> None:
    outline = read_outline(write_json(write_json([placeholder(0)])))
    assert filled(outline, [TEXT]) == json.dumps(json.dumps([TEXT], ensure_ascii=False), ensure_ascii=False)


def test_a_text_that_is_json_is_written_without_quotes() -> None:
    arguments = '{"a":  1.0}'
    once = read_outline(write_json({"arguments": json_placeholder(0)}))
    assert filled(once, [arguments]) == f'{{"arguments": {arguments}}}'
    assert filled(read_outline(json_placeholder(0)), [arguments]) == arguments
    twice = read_outline(write_json(write_json({"arguments": json_placeholder(0)})))
    assert json.loads(filled(twice, [arguments])) == f'{{"arguments": {arguments}}}'


def test_a_placeholder_is_as_long_as_the_ids_that_templates_want() -> None:
    assert len(placeholder(0)) == len(placeholder(9_999_999)) == 9


def test_a_placeholder_in_pieces_is_refused() -> None:
    with pytest.raises(TemplateError, match="a part of a text"):
        read_outline(f"before {placeholder(3)[:5]} after")
