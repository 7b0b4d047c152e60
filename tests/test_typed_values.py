"""From a Python type to an object of it, through the whole system: language, gateway, automaton, engine, and back.

The oracle says anything with equal probability, so what it says is held together by the constraint alone.
"""

import dataclasses
import datetime
import enum
import json
import re
import typing
import uuid
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jsonschema
import pydantic
import pytest
import umbel as ul
from annotated_types import Ge, Le, MaxLen, MinLen
from umbel.lang.typed import typed
from umbel.srt.in_process import LocalBackend

PATIENCE = 60.0
Short = typing.Annotated[str, MaxLen(6)]


class Colour(enum.Enum):
    RED = "red"
    TWO = 2


@dataclasses.dataclass
class Node:
    value: typing.Annotated[int, Ge(0), Le(99)]
    children: typing.Annotated[list["Node"], MaxLen(1)] = dataclasses.field(default_factory=list)
    colour: Colour = Colour.RED


class Movie(typing.TypedDict):
    title: Short
    year: typing.NotRequired[typing.Annotated[int, Ge(1890), Le(2030)]]


class Point(NamedTuple):
    x: float
    y: float = 0.0


class Person(pydantic.BaseModel):
    name: typing.Annotated[str, pydantic.Field(min_length=1, max_length=9)]
    born: datetime.date | None = None
    code: typing.Annotated[str, pydantic.Field(pattern=r"^[a-z]-[0-9]{2}$")] = "a-00"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    good: bool


class Owner(pydantic.BaseModel):
    pet: typing.Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


TYPES: list[Any] = [
    int, float, bool, Short, int | None, list[bool], tuple[int, bool], set[Colour], dict[Short, bool], Colour,
    Literal["a", 1, True, None], datetime.date, datetime.datetime, uuid.UUID, Node, Movie, Point, Person, Node | Movie,
    Owner, typing.Annotated[list[int], MinLen(2), MaxLen(2)],
]  # fmt: skip


@pytest.fixture(scope="module")
def runtime() -> Iterator[LocalBackend]:
    backend = LocalBackend(seed=1)
    with ul.default_backend(backend):
        yield backend


@ul.function
def ask(s, **options):
    s += "A value: " + ul.gen("x", **options)


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("annotation", TYPES, ids=lambda annotation: typed(annotation).name)
@pytest.mark.sampled(4)
def test_every_answer_is_an_object_of_the_type(annotation: Any) -> None:
    known = typed(annotation)
    for seed, most in ((1, 160), (2, 90)):
        state = ask.run(json_schema=annotation, max_tokens=most, seed=seed, timeout=PATIENCE)
        value, text = state.value("x"), state["x"]
        jsonschema.validate(json.loads(text), json.loads(known.schema), format_checker=jsonschema.FormatChecker())
        assert value == known.parse(text)
        assert state.meta("x")["guarantee"] == "enforced"
        if isinstance(annotation, type) and not typing.get_args(annotation) and annotation is not Movie:
            assert isinstance(value, annotation)


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [
        (int, r"0|-?[1-9][0-9]{0,18}"),
        (float, r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"),
        (bool, "True|False"),
        (str, r'".*"'),
        (Literal["a.b", "c|d", "(e)"], r"a\.b|c\|d|\(e\)"),
        (Colour, "red|2"),
    ],
)
def test_plain_values_are_written_plainly(dtype: Any, pattern: str) -> None:
    for seed in range(3):
        state = ask.run(dtype=dtype, max_tokens=24, seed=seed, timeout=PATIENCE)
        assert re.fullmatch(pattern, state["x"], re.DOTALL)
        assert state.meta("x")["guarantee"] == "enforced"
        assert state.value("x") is not None


@pytest.mark.usefixtures("runtime")
def test_a_budget_below_the_shortest_text_names_the_number_and_spares_the_rest() -> None:
    @ul.function
    def program(s):
        s += "x" + ul.gen("before", max_tokens=2)
        s += ul.gen("person", json_schema=Person, max_tokens=5)

    state = program.run(timeout=PATIENCE)
    with pytest.raises(ul.ConstraintError, match=r"max_tokens=5.*write max_tokens=13 or more"):
        state.value("person")
    assert state["before"]
    tight = ask.run(json_schema=Person, max_tokens=13, timeout=PATIENCE)
    assert isinstance(tight.value("x"), Person)


@pytest.mark.usefixtures("runtime")
def test_what_the_schema_cannot_have_enforced_is_named_or_validated() -> None:
    schema = {"type": "array", "items": {"type": "string", "pattern": "^[0-9]$"}, "uniqueItems": True}
    with pytest.raises(ul.ConstraintError, match="uniqueItems"):
        ask.run(json_schema=schema, constraint_engine="fsm", timeout=PATIENCE)["x"]
    state = ask.run(json_schema=schema | {"minItems": 12}, allow_unenforced=True, max_tokens=120, timeout=PATIENCE)
    facts = state.meta("x")
    assert facts["guarantee"] == "violated"  # twelve digits repeat
    assert "uniqueItems" in {keyword for keyword, _ in facts["unenforced"]}
    with pytest.raises(ul.ResultError, match="non-unique"):
        state.value("x")


@pytest.mark.usefixtures("runtime")
def test_a_lark_grammar_is_a_constraint_of_its_own() -> None:
    pytest.importorskip("llguidance")
    brackets = 'start: pair\npair: "(" [pair] ")"'
    text = ask.run(ebnf=brackets, max_tokens=64, seed=1, timeout=PATIENCE)["x"]
    depth = len(text) // 2
    assert text == "(" * depth + ")" * depth
    assert depth >= 1
