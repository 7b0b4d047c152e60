"""References: inside a document, into itself, to nowhere."""

import pytest
from umbel.fsm.errors import ConstraintRefused, LimitExceeded, Limits
from umbel.fsm.schema import compile_schema

from .texts import admits, automaton

TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}


def test_recursion() -> None:
    assert admits(
        TREE,
        {"value": 1},
        {"value": 1, "children": [{"value": 2, "children": []}, {"value": 3}]},
        {"value": 1, "children": [{"children": []}]},
    ) == [True, True, False]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "integer"}}},
        {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "integer"}}},
        {"$id": "http://example.com/root", "$ref": "part", "$defs": {"x": {"$id": "part", "type": "integer"}}},
        {"$id": "http://a.b/root", "$ref": "http://a.b/root#/$defs/x", "$defs": {"x": {"type": "integer"}}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://x.y/z", "$ref": "#/definitions/x",
         "definitions": {"x": {"type": "integer"}}},
        {"$dynamicRef": "#n", "$defs": {"x": {"$dynamicAnchor": "n", "type": "integer"}}},
        {"$ref": "#/unknown/place/0", "unknown": {"place": [{"type": "integer"}]}},
        {"$ref": "#/$defs/id",
         "$defs": {"id": {"$id": "http://a.b/c", "$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}}},
    ],
)  # fmt: skip
def test_ways_to_refer(schema: dict[str, object]) -> None:
    assert admits(schema, 1, "a") == [True, False]


def test_what_stands_beside_a_reference_counts_since_2019() -> None:
    schema = {"$ref": "#/$defs/x", "maximum": 5, "$defs": {"x": {"type": "integer"}}}
    assert admits(schema, 4, 6) == [True, False]
    older = schema | {"$schema": "http://json-schema.org/draft-07/schema#"}
    assert admits(older, 4, 6) == [True, True]


@pytest.mark.parametrize(
    ("reference", "advice"),
    [
        ("#/$defs/y", "no such place"),
        ("#nowhere", "no such place"),
        ("http://example.com/schema.json", "nothing is fetched"),
        ("other.json#/a", "nothing is fetched"),
    ],
)
def test_references_to_nowhere_are_refused(reference: str, advice: str) -> None:
    with pytest.raises(ConstraintRefused, match=advice) as refusal:
        automaton({"properties": {"a": {"$ref": reference}}})
    assert (refusal.value.where, refusal.value.keyword) == ("#/properties/a/$ref", "$ref")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        {"not": {"$ref": "#"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_references_without_progress_are_refused(schema: dict[str, object]) -> None:
    with pytest.raises(ConstraintRefused, match="refers back to itself"):
        automaton(schema)


def test_recursion_that_never_ends_admits_nothing() -> None:
    with pytest.raises(ConstraintRefused, match="admits nothing"):
        automaton({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})


def test_long_chains_and_deep_nests_are_refused_by_limits() -> None:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3_000)} | {"d3000": {"type": "null"}}
    with pytest.raises(LimitExceeded, match="deep"):
        compile_schema({"$ref": "#/$defs/d0", "$defs": chain})
    with pytest.raises(LimitExceeded, match="deeper than 64"):
        compile_schema('{"items": ' * 10_000)
    nested: dict[str, object] = {}
    for _ in range(5_000):
        nested = {"not": nested}
    with pytest.raises(LimitExceeded):
        compile_schema(nested, limits=Limits())


def test_alternatives_may_come_again_inside_themselves() -> None:
    schema = {
        "$ref": "#/$defs/service",
        "$defs": {
            "service": {
                "properties": {
                    "networks": {
                        "oneOf": [
                            {"type": "array"},
                            {"type": "object", "patternProperties": {"^[a-z]+$": {"$ref": "#"}}},
                        ]
                    }
                },
                "dependentRequired": {"limit": []},
            }
        },
    }
    assert admits(schema, {"networks": [1]}, {"networks": {"a": {"networks": {}}}}, {"networks": 1}) == [
        True,
        True,
        False,
    ]
