"""allOf, anyOf, oneOf, not, if: what is merged, told apart, negated."""

import pytest
from umbel.fsm.errors import ConstraintRefused, Unsupported
from umbel.fsm.schema import SchemaOptions, compile_schema

from .texts import LITERAL, admits, automaton


def test_all_of_merges() -> None:
    schema = {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 3}, "b": {"type": "string", "minLength": 1}}},
            {"properties": {"b": {"maxLength": 2}}},
        ]
    }
    assert admits(schema, {"a": 3}, {"a": 4, "b": "xy"}, {"a": 2}, {"a": 3, "b": ""}, {"a": 3, "b": "xyz"}, {}) == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_closed_parts_of_all_of_bind_each_other() -> None:
    closed = {"properties": {"a": {}}, "additionalProperties": False}
    schema = {"type": "object", "allOf": [closed, {"properties": {"b": {}}}]}
    assert admits(schema, {}, {"a": 1}, {"b": 1}) == [True, True, False]


def test_any_of_beside_other_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    assert admits(schema, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {}) == [True, True, True, False]


@pytest.mark.parametrize(
    ("schema", "one", "none_or_several"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None, 1.5]),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, [1, 5.5], [7, 1.5]),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, [1, 3], [2]),
        (
            {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "maxLength": 2}]},
            ["abc", "xy"],
            ["ab", "xyz"],
        ),
        (
            {
                "type": "object",
                "oneOf": [
                    {"properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind"]},
                    {"properties": {"kind": {"const": "b"}}, "required": ["kind"]},
                ],
            },
            [{"kind": "a", "x": 1}, {"kind": "b"}, {"kind": "b", "x": "any"}],
            [{"kind": "a", "x": "s"}, {"kind": "c"}, {}],
        ),
        (
            {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            [{"a": 1}, {"b": 1}],
            [{"a": 1, "b": 1}, {}, {"b": 1, "a": 1}],
        ),
        (
            {
                "oneOf": [
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "array", "items": {"type": "integer"}},
                ]
            },
            [["a"], [1]],
            [[], ["a", 1]],
        ),
    ],
)
def test_one_of_means_exactly_one(schema: dict[str, object], one: list[object], none_or_several: list[object]) -> None:
    assert admits(schema, *one) == [True] * len(one)
    assert admits(schema, *none_or_several) == [False] * len(none_or_several)


def test_one_of_that_cannot_be_told_apart_is_refused_or_listed() -> None:
    schema = {"type": "object", "oneOf": [{"patternProperties": {"a": {"type": "null"}}}, {"type": "object"}]}
    with pytest.raises(Unsupported) as refusal:
        automaton(schema)
    assert refusal.value.keyword
    assert compile_schema(schema, SchemaOptions(allow_unenforced=True)).unenforced


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"not": {"type": ["string", "object", "array"]}}, [1, 1.5, None, True], ["a", {}, []]),
        ({"type": "string", "not": {"enum": ["a", "b"]}}, ["c", "", "ab"], ["a", "b"]),
        ({"type": "string", "not": {"pattern": "^-+$"}}, ["a-", ""], ["-", "---"]),
        ({"type": "integer", "not": {"const": 3}}, [2, 33], [3]),
        ({"type": "number", "not": {"multipleOf": 2}}, [1, 3], [2, 4]),
        ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
        ({"type": "object", "not": {"required": ["a", "b"]}}, [{"a": 1}, {"b": 1}, {}], [{"a": 1, "b": 1}]),
        (
            {"type": "object", "properties": {"k": {"type": "string"}}, "not": {"properties": {"k": {"const": "x"}}}},
            [{"k": "y"}],
            [{"k": "x"}, {}],
        ),
        ({"not": {"const": {"a": 1}}, "type": "object"}, [{}, {"a": 2}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"not": {"not": {"type": "null"}}}, [None], [1]),
        ({"type": "array", "not": {"minItems": 2}}, [[], [1]], [[1, 2]]),
    ],
)
def test_not(schema: dict[str, object], right: list[object], wrong: list[object]) -> None:
    assert admits(schema, *right) == [True] * len(right)
    assert admits(schema, *wrong) == [False] * len(wrong)


def test_conditions() -> None:
    schema = {
        "type": "object",
        "properties": {"country": {"enum": ["US", "NL", "FR"]}, "code": {"type": "string"}},
        "required": ["country"],
        "if": {"properties": {"country": {"const": "US"}}},
        "then": {"properties": {"code": {"pattern": "^[0-9]{5}$"}}},
        "else": {"properties": {"code": {"maxLength": 2}}},
    }
    assert admits(schema, {"country": "US", "code": "12345"}, {"country": "NL", "code": "ab"}) == [True, True]
    assert admits(schema, {"country": "US", "code": "ab"}, {"country": "FR", "code": "12345"}) == [False, False]


def test_constants_meet_the_rest_of_their_schema() -> None:
    values = [1, 1.5, "a", "abc", None, True, {"a": 1}, {"a": "x"}, [1], [1, 2]]
    assert admits({"enum": values, "type": "object"}, {"a": 1}, 1) == [True, False]
    schema = {"enum": values, "minimum": 1.2, "minLength": 2, "properties": {"a": {"type": "integer"}}, "maxItems": 1}
    assert admits(schema, *values) == [False, True, False, True, True, True, True, False, True, False]


def test_what_a_schema_without_type_means_is_a_choice() -> None:
    schema = {"properties": {"a": {"type": "integer"}}}
    assert admits(schema, {"a": 1}, "text", {"a": "x"}) == [True, False, False]
    assert admits(schema, {"a": 1}, "text", {"a": "x"}, options=LITERAL) == [True, True, False]


def test_nullable_is_openapi() -> None:
    assert admits({"type": "string", "nullable": True}, "a", None) == [True, True]
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string", "nullable": True}
    assert admits(dialect, "a", None) == [True, False]


def test_alternatives_that_multiply_are_refused() -> None:
    parts = [{"anyOf": [{"minLength": 3 * n + m} for m in range(3)]} for n in range(12)]
    with pytest.raises(ConstraintRefused):
        automaton({"type": "string", "allOf": [{"anyOf": [*part["anyOf"]] * 9} for part in parts]})
