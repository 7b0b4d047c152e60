"""Members: order, optional ones, other names, counts, dependencies."""

import pytest
from umbel.fsm.errors import ConstraintRefused, Unsupported
from umbel.fsm.schema import SchemaOptions

from .texts import LITERAL, SPACED, admits, automaton, takes

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["age"],
    "additionalProperties": False,
}


def test_members_come_in_the_order_of_the_schema_and_optional_ones_may_be_left_out() -> None:
    assert (
        admits(PERSON, {"age": 1}, {"name": "a", "age": 1}, {"age": 1, "city": "b"}, {"name": "", "age": 0, "city": ""})
        == [True] * 4
    )
    assert admits(PERSON, {}, {"name": "a"}, {"city": "b", "age": 1}, {"age": 1, "x": 2}, []) == [False] * 5


def test_an_object_without_required_members_may_begin_with_any_of_them() -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "null"} for name in "abcdef"},
        "additionalProperties": False,
    }
    assert admits(schema, {}, {"a": None}, {"f": None}, {"b": None, "e": None}) == [True] * 4
    assert admits(schema, {"e": None, "b": None}, {"g": None}) == [False, False]


def test_other_names_are_none_of_the_declared() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    assert admits(schema, {"x": 1}, {"a": 1, "x": [{}]}, {"a": 1, "b": "", "x": None, "y": {"z": [1]}}) == [True] * 3
    assert admits(schema, {"x": 1, "a": 1}, {"x": 1, "b": "", "y": 2, "a": 1}) == [True] * 2
    assert admits(schema, {"b": "", "a": "unchecked"}, {"x": 1, "a": "x"}, {"a": "x"}) == [False] * 3
    assert not takes(automaton(schema), b'{"a": 1, "x": 1, "a": 1}')


def test_other_names_and_what_was_left_out_wait_for_all_that_is_required() -> None:
    schema = {
        "type": "object",
        "properties": {"think": {"type": "string"}, "note": {"type": "string"}, "answer": {"type": "integer"}, "z": {}},
        "required": ["think", "answer"],
    }
    assert admits(schema, {"think": "", "answer": 1, "x": 0, "note": ""}, {"think": "", "answer": 1, "note": ""}) == [
        True,
        True,
    ]
    assert admits(schema, {"answer": 1, "think": ""}, {"x": 0, "think": "", "answer": 1}) == [False, False]
    made = automaton(schema)
    assert made.forced(made.start) == b'{"think": "'  # no name is lost to jumps


def test_any_key_order_is_for_texts_of_others() -> None:
    any_order = SchemaOptions(key_order="any")
    assert admits(PERSON, {"city": "b", "age": 1}, {"age": 1, "name": ""}, options=any_order) == [True, True]
    assert admits(PERSON, {"city": "b"}, {"age": 1, "x": 2}, {"age": "1"}, {}, options=any_order) == [False] * 4
    made = automaton(PERSON, any_order)
    assert made.forced(made.run(made.start, b'{"city": "", "name": "", ')) == b'"age": '
    assert not takes(made, b'{"age": 1, "age": 1}')


def test_numbers_of_members_in_any_order() -> None:
    some = PERSON | {"required": [], "minProperties": 2, "maxProperties": 2}
    options = SchemaOptions(key_order="any")
    assert admits(some, {"age": 1, "name": ""}, {"age": 1}, PERSON["properties"], options=options) == [
        True,
        False,
        False,
    ]
    with_others = {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2, "maxProperties": 3}
    assert admits(with_others, {"b": 1, "x": 1}, {"x": 1, "a": 1}, {"x": 1, "y": 1, "b": 1}) == [True] * 3
    assert admits(with_others, {"x": 1, "y": 1}, {"x": 1, "y": 1, "z": 1}, {"b": 1}) == [False] * 3


def test_a_name_that_begins_like_a_declared_one_is_another_name() -> None:
    schema = {"type": "object", "properties": {"ab": {"type": "integer"}}, "additionalProperties": {"type": "null"}}
    assert admits(schema, {"a": None}, {"abc": None}, {"": None}, {"ab": 1}, {"ab": None}) == [True] * 4 + [False]


def test_names_that_are_only_required_follow_the_declared_ones() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["z", "b", "y"]}
    assert admits(schema, {"b": 1, "z": "any", "y": []}, {"z": "any", "b": 1, "y": []}) == [True, False]


def test_names_of_patterns_have_the_values_of_their_pattern() -> None:
    schema = {
        "type": "object",
        "properties": {"s_1": {"minimum": 3}},
        "patternProperties": {"^s_": {"type": "integer"}, "_b$": {"maximum": 5}},
        "additionalProperties": False,
    }
    assert admits(schema, {"s_1": 3}, {"s_x": -1}, {"a_b": 5}, {"s_b": 4}, options=LITERAL) == [True] * 4
    assert admits(schema, {"s_1": 2}, {"s_x": "a"}, {"a_b": 6}, {"s_b": 6}, {"q": 1}, options=LITERAL) == [False] * 5


def test_property_names_bind_every_name() -> None:
    schema = {"type": "object", "propertyNames": {"pattern": "^[a-z]+$", "maxLength": 3}, "properties": {"A": {}}}
    assert admits(schema, {"abc": 1}, {"ab": 1, "c": 2}, {"A": 1}, {"abcd": 1}, {"a1": 1}) == [True] * 2 + [False] * 3
    assert admits({"type": "object", "propertyNames": {"enum": ["p", "q"]}}, {"q": 1}, {"r": 1}) == [True, False]


def test_counts_of_members() -> None:
    few = PERSON | {"required": [], "minProperties": 2, "maxProperties": 2}
    assert admits(few, {"name": "", "age": 1}, {"age": 1, "city": ""}) == [True, True]
    assert admits(few, {}, {"age": 1}, {"name": "", "age": 1, "city": ""}) == [False] * 3
    some = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}}
    assert admits(some, {"a": None}, {"a": None, "b": None}, {}) == [True, True, False]
    assert admits(some | {"maxProperties": 1}, {"a": None}, {"a": None, "b": None}) == [True, False]


def test_names_that_may_repeat_count_once() -> None:
    with pytest.raises(Unsupported) as refusal:
        automaton({"type": "object", "minProperties": 2})
    assert (refusal.value.keyword, refusal.value.where) == ("minProperties", "#/minProperties")


def test_dependencies() -> None:
    schema = PERSON | {"required": [], "dependentRequired": {"name": ["city"]}}
    assert admits(schema, {"age": 1}, {"name": "", "city": ""}, {"name": ""}) == [True, True, False]
    older = PERSON | {"required": [], "dependencies": {"name": {"properties": {"age": {"minimum": 5}}}}}
    assert admits(older, {"age": 1}, {"name": "", "age": 5}, {"name": "", "age": 4}) == [True, True, False]


def test_closed_is_for_objects_that_declare_members() -> None:
    closed = SchemaOptions(closed=True)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "free": {"type": "object"}}}
    assert admits(schema, {"a": 1, "free": {"x": 1}}, {"b": 1}, options=closed) == [True, False]
    assert admits(schema | {"additionalProperties": True}, {"b": 1}, options=closed) == [True]


def test_unevaluated_members_are_those_that_nothing_beside_has_seen() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {}},
        "anyOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]}, {"required": ["c"], "properties": {"c": {}}}],
        "unevaluatedProperties": False,
    }
    assert admits(schema, {"a": 1, "b": 1}, {"c": 2}, {"a": 1}, {"b": 1, "d": 1}) == [True, True, False, False]


def test_a_hundred_thousand_optional_members_are_refused_and_a_thousand_are_cheap() -> None:
    many = {"type": "object", "properties": {f"member{i}": {"type": "boolean"} for i in range(1_000)}}
    assert takes(automaton(many), b'{"member3": true, "member999": false}')
    with pytest.raises(ConstraintRefused, match="bytes allowed"):
        automaton({"properties": {f"member{i}": {} for i in range(100_000)}})


@pytest.mark.parametrize(
    ("whitespace", "text"),
    [
        ("spaced", '{"a": [1, 2], "b": {}}'),
        ("compact", '{"a":[1,2],"b":{}}'),
        ("flexible", '{\n  "a": [1,\n 2],"b":{}\n}'),
    ],
)
def test_whitespace(whitespace: str, text: str) -> None:
    schema = {"properties": {"a": {"items": {"type": "integer"}}, "b": {"type": "object"}}, "type": "object"}
    styles = {"spaced": SPACED, "compact": SchemaOptions("compact"), "flexible": SchemaOptions("flexible")}
    assert takes(automaton(schema, styles[whitespace]), text.encode())
    assert not takes(automaton(schema, SPACED), b'{"a":[1,2]}')
    assert not takes(automaton(schema, styles[whitespace]), b'{ "a": [1, 2]}') or whitespace == "flexible"
