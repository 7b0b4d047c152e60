"""Invalid schemas, contradictions, limits: refused with the place and what to write."""

import re

import jsonschema
import pytest
from umbel.fsm.errors import ConstraintRefused, LimitExceeded, Limits, Unsupported
from umbel.fsm.schema import SchemaOptions, compile_schema, resolved_schema

from .texts import admits, automaton


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
        ({"minimum": 5, "maximum": 4}, "#/minimum", "at least 5 and at most 4"),
        ({"type": "integer", "exclusiveMinimum": 5, "maximum": 5}, "#/exclusiveMinimum", "above 5 and at most 5"),
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
    with pytest.raises(ConstraintRefused, match="admits nothing") as refusal:
        automaton(schema)
    assert refusal.value.keyword
    assert refusal.value.where.startswith("#")


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


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        (
            {"properties": {"a": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["a"]},
            "#/properties/a/allOf/0/type",
        ),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "#/properties/a"),
        ({"const": "a", "maxLength": 0}, "#/const"),
        ({"$ref": "#/$defs/a", "$defs": {"a": False}}, "#/$ref"),
    ],
)
def test_a_schema_that_admits_nothing_is_refused_at_the_innermost_keyword(
    schema: dict[str, object], where: str
) -> None:
    with pytest.raises(ConstraintRefused, match="admits nothing") as refusal:
        resolved_schema(schema)
    assert refusal.value.where == where


# Ways to meet a `not` that no automaton gives: what is left of it may be nothing, and the schema admits much.
MISSED: list[dict[str, object]] = [
    {"type": "array", "uniqueItems": True},
    {"type": "array", "prefixItems": [True], "items": {"type": "string"}},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {"type": "object", "patternProperties": {"^a": {"type": "string"}}},
    {"type": "object", "propertyNames": {"maxLength": 2}},
    {"type": "string", "format": "date"},
    {"type": "object", "properties": {"a": True}, "unevaluatedProperties": False},
]


@pytest.mark.parametrize("missed", MISSED)
def test_what_is_left_of_a_not_and_cannot_be_written_is_not_called_nothing(missed: dict[str, object]) -> None:
    """The refusal names the keyword that cannot be missed, and does not say that no value satisfies the schema."""
    rest = {key: value for key, value in missed.items() if key != "type"}
    for schema in (
        {"type": missed["type"], "not": rest},
        {"type": "array", "items": {"type": missed["type"], "not": rest}, "minItems": 1},
    ):
        with pytest.raises(Unsupported, match="cannot be expressed") as refusal:
            resolved_schema(schema)
        assert refusal.value.keyword in rest
        assert refusal.value.where.endswith(f"/{refusal.value.keyword}")


VALUES = [
    [],
    [1],
    [1, 1],
    [1, "a"],
    ["a"],
    [["a"]],
    {},
    {"a": 1},
    {"a": "x"},
    {"aa": 1, "b": 2},
    {"abc": "x"},
    "x",
    "2026-01-02",
    None,
]


@pytest.mark.parametrize("missed", MISSED)
@pytest.mark.parametrize(
    "beside",
    [
        {"minItems": 1, "type": "array"},
        {"required": ["a"], "type": "object"},
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
    ],
)
def test_branches_are_not_taken_for_apart_because_one_of_them_is_not_written(
    missed: dict[str, object], beside: dict[str, object]
) -> None:
    """A branch of which only some values are written holds for the others as well: they satisfy no oneOf beside it."""
    schema: dict[str, object] = {
        "oneOf": [beside, {"not": {**missed, "minProperties": 1, "minItems": 1, "minLength": 1}}]
    }
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    try:
        taken = admits(schema, *VALUES)
    except Unsupported:
        return
    assert not [value for value, admitted in zip(VALUES, taken, strict=True) if admitted and not judge.is_valid(value)]


SMALL = Limits(dfa_states=500)


def test_limits_name_the_keyword_and_the_place() -> None:
    many: dict[str, object] = {"oneOf": [{"type": "object", "required": [f"a{i}", f"b{i}"]} for i in range(40)]}
    far: dict[str, object] = {"type": "string", "pattern": "^(a|b)*a(a|b){30}$", "allOf": [{"pattern": "b.{40}$"}]}
    for schema in (far, {"type": "array", "items": {"not": many}}):
        with pytest.raises(LimitExceeded) as refusal:
            resolved_schema({"type": "object", "properties": {"deep": schema}, "required": ["deep"]}, limits=SMALL)
        assert refusal.value.where.startswith("#/properties/deep")
        assert refusal.value.where.endswith(refusal.value.keyword)
