"""What is read more narrowly than it is meant: it is told, and the page about constraints has it."""

import re
from pathlib import Path

import pytest
from umbel.fsm.schema import SchemaOptions, resolved_schema
from umbel.fsm.schema.keywords import KEYWORDS
from umbel.fsm.schema.strings import FORMATS

PAGE = Path(__file__).parents[3] / "docs" / "constraints.md"
OF_PARTS = {"minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems", "nullable"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
PAIR = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["a", "b"], "additionalProperties": False}


def told(schema: object, options: SchemaOptions = SchemaOptions()) -> list[tuple[str, str]]:  # noqa: B008 (frozen)
    narrowed = resolved_schema(schema, options).narrowed  # type: ignore[arg-type]
    assert all(how for _, _, how in narrowed)
    return [(keyword, place) for keyword, place, _ in narrowed]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (PAIR, [("properties", "#/properties")]),
        ({**PAIR, "additionalProperties": DIGIT}, [("properties", "#/properties")]),
        ({"type": "object", "required": ["a", "b"], "additionalProperties": DIGIT}, [("required", "#/required")]),
        ({"type": "array", "items": {"maxLength": 2}}, [("type", "#/items")]),
        ({"type": "array", "items": {"type": "integer"}}, [("type", "#/items/type")]),
        ({"type": "number", "minimum": 0, "maximum": 1}, [("type", "#/type")]),
        ({"type": "string", "format": "date"}, [("format", "#/format")]),
        ({"type": ["string", "null"], "not": {"type": "string", "format": "date"}}, [("format", "#/not/format")]),
        (
            {"type": "object", "minProperties": 2, "properties": {"a": DIGIT}, "additionalProperties": DIGIT},
            [("minProperties", "#/minProperties")],
        ),
        (
            {"type": "array", "contains": DIGIT, "maxItems": 2, "items": True, "unevaluatedItems": DIGIT},
            [("unevaluatedItems", "#/unevaluatedItems")],
        ),
    ],
)
def test_every_narrowing_is_told_with_keyword_and_place(
    schema: dict[str, object], expected: list[tuple[str, str]]
) -> None:
    assert [each for each in told(schema) if each[1] != "#"] == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "maxLength": 3, "pattern": "^a"},
        {"enum": ["a", "b", None]},
        {"type": "array", "items": DIGIT, "maxItems": 3},
        {"type": "object", "properties": {"a": DIGIT}, "additionalProperties": False},
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        {"type": "string", "not": {"enum": ["a"]}},
    ],
)
def test_nothing_is_told_where_every_value_can_come(schema: dict[str, object]) -> None:
    assert told(schema) == []


def test_members_in_any_order_narrow_nothing() -> None:
    assert told(PAIR, SchemaOptions(key_order="any")) == []


def test_the_page_has_the_keywords_and_formats_that_the_code_reads() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("| keyword |")[2].partition("\n\n")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    assert {keyword for cell in cells for keyword in re.findall(r"`([^`]+)`", cell)} == KEYWORDS | OF_PARTS
    formats = re.findall(r"`([^`]+)`", page.partition("Formats: ")[2].partition("\n\n")[0])
    assert sorted(formats) == sorted(FORMATS | {"int32", "int64"})
