"""Random schemas: what is admitted is valid, what is sampled is valid, negation is a complement.

The judge is jsonschema with its format checker.
"""

import json
import random
import re
from decimal import Decimal
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from umbel.fsm.automaton.automaton import Automaton
from umbel.fsm.errors import ConstraintRefused

from .texts import LITERAL, SPACED, automaton, sample, takes, written

NAMES = st.sampled_from(["a", "b", "c", "ab"])
SCALARS = (
    st.none() | st.booleans() | st.integers(-20, 20) | st.sampled_from([0.5, 2.25, -3.75]) | st.text("ab1", max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def objects(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=optional)


def schemas() -> st.SearchStrategy[Any]:
    numbers = objects(
        type=st.sampled_from(["integer", "number"]),
        minimum=st.integers(-20, 0),
        exclusiveMaximum=st.sampled_from([0.25, 3, 20]),
        multipleOf=st.sampled_from([1, 2, 3, 0.25]),
    )
    strings = objects(
        type=st.just("string"),
        minLength=st.integers(0, 2),
        maxLength=st.integers(2, 4),
        pattern=st.sampled_from(["a", "^a*b?$", "1$", "[^1]"]),
        format=st.sampled_from(["date", "ipv4", "uuid", "invented"]),
    )
    constants = objects(enum=st.lists(VALUES, min_size=1, max_size=4)) | objects(const=VALUES)
    types = objects(
        type=st.lists(st.sampled_from(["null", "boolean", "string", "integer", "array", "object"]), min_size=1)
    )

    def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, min_size=1, max_size=3)
        members = objects(
            type=st.just("object"),
            properties=st.dictionaries(NAMES, inner, max_size=3),
            required=st.lists(NAMES, unique=True, max_size=2),
            additionalProperties=st.booleans() | inner,
            patternProperties=st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=1),
            minProperties=st.integers(0, 1),
            maxProperties=st.integers(1, 3),
            dependentRequired=st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=1),
        )
        items = objects(
            type=st.just("array"),
            items=inner,
            prefixItems=several,
            minItems=st.integers(0, 1),
            maxItems=st.integers(1, 3),
            contains=inner,
            uniqueItems=st.booleans(),
        )
        combined = objects(anyOf=several, oneOf=several, allOf=several)
        negated = st.builds(lambda part, other: part | {"not": other}, types | strings | numbers, inner)
        conditional = st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner)
        return members | items | combined | negated | conditional

    return st.recursive(numbers | strings | constants | types, larger, max_leaves=6)


def exact(schema: Any) -> Draft202012Validator:
    return Draft202012Validator(schema, format_checker=FormatChecker(["date", "ipv4", "uuid"]))


def compiled(schema: Any, options: Any) -> Automaton | None:
    try:
        return automaton(json.dumps(schema), options)
    except ConstraintRefused:
        return None


def beyond_doubles(text: str) -> bool:
    """It holds a fraction that is another number once a parser has rounded it: the judge sees that one."""
    fractions = re.findall(r"-?\d+\.\d+(?:[eE][+-]?\d+)?", text)
    return any(Decimal(fraction) != Decimal(repr(float(fraction))) for fraction in fractions)


@settings(max_examples=80, deadline=None)
@given(schema=schemas(), values=st.lists(VALUES, min_size=4, max_size=8))
def test_what_is_admitted_is_valid(schema: Any, values: list[Any]) -> None:
    admitted, judge = compiled(schema, LITERAL), exact(schema)
    if admitted is None:
        return
    for value in values:
        if takes(admitted, written(value)):
            assert judge.is_valid(value), value


@settings(max_examples=80, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_what_is_sampled_is_valid(schema: Any, seed: int) -> None:
    for options in (SPACED, LITERAL):
        admitted, judge = compiled(schema, options), exact(schema)
        if admitted is None:
            continue
        choose = random.Random(seed)
        for _ in range(4):
            text = sample(admitted, choose)
            assert judge.is_valid(json.loads(text)) or beyond_doubles(text), text


@settings(max_examples=120, deadline=None)
@given(schema=schemas(), values=st.lists(SCALARS, min_size=6, max_size=10))
def test_scalars_are_admitted_exactly_when_they_are_valid(schema: Any, values: list[Any]) -> None:
    admitted, judge = compiled(schema, LITERAL), exact(schema)
    if admitted is None or "uniqueItems" in str(schema) or "format" in str(schema):
        return
    for value in values:
        if isinstance(value, float) and "multipleOf" in str(schema):
            continue  # 3.0 is an integer to JSON Schema, and is not written so here
        assert takes(admitted, written(value)) == judge.is_valid(value), value
