"""Items: positions, counts, uniqueItems, contains."""

import pytest
from umbel.fsm.errors import Unsupported
from umbel.fsm.schema import SchemaOptions, compile_schema

from .texts import admits, automaton


def test_items_and_their_count() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}
    assert admits(schema, [1], [1, 2, 3], [], [1, 2, 3, 4], ["a"]) == [True, True, False, False, False]
    assert admits({"type": "array", "items": False}, [], [1]) == [True, False]


def test_positions_come_before_the_others() -> None:
    schema = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "null"}}
    assert admits(schema, [], [1], [1, "a"], [1, "a", None, None]) == [True] * 4
    assert admits(schema, ["a"], [1, 2], [1, "a", 3]) == [False] * 3


def test_the_older_spelling_of_positions() -> None:
    schema = {"type": "array", "items": [{"type": "integer"}], "additionalItems": False, "minItems": 1}
    assert admits(schema, [1], [], [1, 2]) == [True, False, False]


def test_many_positions_are_followed_one_by_one() -> None:
    schema = {"type": "array", "prefixItems": [{"const": n} for n in range(30)], "items": False, "minItems": 2}
    assert admits(schema, [0], [0, 1], list(range(30)), list(range(31))) == [False, True, True, False]


def test_unique_items_of_few_constants() -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2}
    assert admits(schema, ["b", "a"], ["c", "a", "b"]) == [True, True]
    assert admits(schema, ["a"], ["a", "a"], ["a", "b", "a"], []) == [False] * 4
    pairs = {"type": "array", "items": {"enum": list(range(20))}, "uniqueItems": True, "maxItems": 2}
    assert admits(pairs, [19, 3], [3, 3], [1, 2, 3]) == [True, False, False]
    assert admits({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, [True, False], [True] * 2) == [
        True,
        False,
    ]


def test_unique_items_of_many_constants_and_of_bounded_integers() -> None:
    years = {"type": "integer", "minimum": 1950, "maximum": 2030, "not": {"const": 1999}}
    schema = {"type": "array", "items": years, "uniqueItems": True, "minItems": 1, "maxItems": 3}
    assert admits(schema, [2030], [1950, 2030, 1987], [2001, 2000]) == [True] * 3
    assert admits(schema, [], [1987, 1987], [1999], [1949], [1950, 1951, 1952, 1953], [1987, 1988, 1987]) == [False] * 6
    large = {"type": "array", "items": {"enum": [f"name {i}" for i in range(200)]}, "uniqueItems": True}
    assert admits(large, [], [f"name {i}" for i in range(199, -1, -1)], ["name 1", "name 11"]) == [True] * 3
    assert admits(large, ["name 3", "name 3"], ["name 200"]) == [False] * 2
    with pytest.raises(Unsupported, match="at most 256 constants"):
        automaton({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 256}, "uniqueItems": True})


def test_unique_items_of_anything_are_refused_or_listed() -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    with pytest.raises(Unsupported, match="at most 256 constants") as refusal:
        automaton({"properties": {"tags": schema}})
    assert (refusal.value.keyword, refusal.value.where) == ("uniqueItems", "#/properties/tags/uniqueItems")
    listed = compile_schema(schema, SchemaOptions(allow_unenforced=True))
    assert listed.unenforced == (("uniqueItems", "#/uniqueItems"),)
    assert admits(schema | {"maxItems": 1}, ["a"]) == [True]
    apart = {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "null"}],
        "items": False,
        "uniqueItems": True,
    }
    assert admits(apart, ["a", None]) == [True]


def test_contains() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 10}}
    assert admits(schema, [1, 11, 2], [10], [], [1, 2]) == [True, True, False, False]
    twice = schema | {"minContains": 2, "maxContains": 2, "maxItems": 4}
    assert admits(twice, [10, 1, 11], [11, 12], [10], [10, 11, 12], [1, 1, 10, 11, 1]) == [True, True] + [False] * 3


def test_an_item_that_nothing_meets_ends_the_array_before_it() -> None:
    schema = {"type": "array", "prefixItems": [{"type": "integer"}, {"allOf": [{"type": "null"}, {"type": "string"}]}]}
    assert admits(schema, [], [1], [1, None]) == [True, True, False]
