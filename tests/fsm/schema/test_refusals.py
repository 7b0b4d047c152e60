"""Invalid schemas, contradictions, limits: refused with the place and what to write."""

import re

import pytest
from umbel.fsm.errors import ConstraintRefused, LimitExceeded, Unsupported
from umbel.fsm.limits import Limits
from umbel.fsm.schema import SchemaOptions, compile_schema

from .texts import automaton


@pytest.mark.parametrize(
    ("schema", "where", "says"),
    [
        ({"minLength": "3"}, "#/minLength", "minLength is '3'; write a number"),
        ({"minLength": -1}, "#/minLength", "0 or more"),
        ({"properties": {"a": {"maximum": True}}}, "#/properties/a/maximum", "maximum is True; write a number"),
        ({"type": "text"}, "#/type", "type is 'text'; write null"),
        ({"required": "a"}, "#/required", 'write an array of names, such as ["id"]'),
        ({"enum": []}, "#/enum", "at least one entry"),
        ({"anyOf": {}}, "#/anyOf", "anyOf is an object; write an array"),
        ({"multipleOf": 0}, "#/multipleOf", "above 0"),
        ({"properties": {"a": 3}}, "#/properties/a", "a schema is an object or a boolean, not a number"),
        ({"items": {"pattern": "("}}, "#/items/pattern", "pattern '('"),
        ({"uniqueItems": 1}, "#/uniqueItems", "true or false"),
        ({"minimum": 5, "maximum": 4}, "#", "at least 5 and at most 4"),
        ({"type": "integer", "exclusiveMinimum": 5, "maximum": 5}, "#", "above 5 and at most 5"),
        ({"minLength": 5, "maxLength": 4}, "#/minLength", "raise maxLength or lower minLength"),
        ({"minItems": 5, "maxItems": 4}, "#/minItems", "raise maxItems"),
        ({"type": "object", "minProperties": 2, "maxProperties": 1}, "#/minProperties", "raise maxProperties"),
    ],
)
def test_invalid_keywords(schema: dict[str, object], where: str, says: str) -> None:
    with pytest.raises(ConstraintRefused, match=re.escape(says)) as refusal:
        automaton(schema)
    assert refusal.value.where == where


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"not": {}},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "integer", "enum": ["a"]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False, "required": ["b"]},
        {"type": "string", "allOf": [{"minLength": 3}, {"maxLength": 2}]},
        {"type": "string", "pattern": "^a$", "minLength": 2},
        {"type": "array", "items": {"not": {}}, "minItems": 1},
        {"const": "a", "maxLength": 0},
    ],
)
def test_schemas_that_admit_nothing(schema: dict[str, object] | bool) -> None:
    with pytest.raises(ConstraintRefused, match="admits nothing"):
        automaton(schema)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"type": }', "line 1 column 10: the schema is not JSON"),
        ('{"type": "null", "type": "string"}', "'type' stands twice"),
        ('{"properties": {"a": {}, "b": {}, "a": {}}}', "'a' stands twice"),
        ("[]", "not an array"),
        ("3", "not a number"),
        ('{"const": NaN}', "NaN in the schema is not JSON"),
        ('{"const": "\\ud800"}', "lone surrogate"),
        ('{"maximum": 1e999999999}', "exponent beyond"),
        ('{"maximum": ' + "9" * 5_000 + "}", "5000 digits"),
    ],
)
def test_texts_that_are_no_schema(text: str, says: str) -> None:
    with pytest.raises(ConstraintRefused, match=says):
        automaton(text)


def test_python_values_are_checked_like_text() -> None:
    with pytest.raises(ConstraintRefused, match="write '1'"):
        compile_schema({1: {}})  # type: ignore[dict-item]
    with pytest.raises(ConstraintRefused, match="no JSON value"):
        compile_schema({"const": {1, 2}})
    with pytest.raises(ConstraintRefused, match="not JSON"):
        compile_schema({"const": float("nan")})
    with pytest.raises(ConstraintRefused, match="not UTF-8"):
        compile_schema(b"\xff")
    cycle: dict[str, object] = {}
    cycle["items"] = cycle
    with pytest.raises(LimitExceeded, match="deeper"):
        compile_schema(cycle)


def test_limits_are_arguments() -> None:
    with pytest.raises(LimitExceeded, match="more than the 20 allowed"):
        compile_schema('{"type": "string", "minLength": 1}', limits=Limits(schema_bytes=20))
    with pytest.raises(LimitExceeded, match="bytes allowed"):
        compile_schema({"enum": ["word"] * 100_000})


def test_what_is_not_honoured_is_named_or_listed() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "(a)\\1"}, "b": {"type": "array", "uniqueItems": True}},
    }
    with pytest.raises(Unsupported) as refusal:
        compile_schema(schema)
    assert (refusal.value.keyword, refusal.value.where) == ("pattern", "#/properties/a/pattern")
    listed = compile_schema(schema, SchemaOptions(allow_unenforced=True))
    assert listed.unenforced == (
        ("pattern", "#/properties/a/pattern"),
        ("uniqueItems", "#/properties/b/uniqueItems"),
    )
    assert listed.schema == schema


def test_an_unknown_whitespace_is_refused() -> None:
    with pytest.raises(ConstraintRefused, match="write 'spaced', 'compact' or 'flexible'"):
        compile_schema(True, SchemaOptions(whitespace="pretty"))  # type: ignore[arg-type]
