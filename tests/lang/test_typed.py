"""Python types as constraints: the schema of a type, and every value of it back from its JSON."""

import dataclasses
import datetime
import enum
import json
import typing
import uuid
from typing import Any, NamedTuple, NewType

import jsonschema
import msgspec
import pydantic
import pytest
from annotated_types import Ge, Len, Lt, MaxLen, MinLen
from umbel.lang.errors import ParameterError
from umbel.lang.typed import typed


class Colour(enum.Enum):
    RED = "red"
    TWO = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Node:
    value: int
    children: list["Node"] = dataclasses.field(default_factory=list)
    colour: Colour = Colour.RED
    computed: int = dataclasses.field(default=0, init=False)


class Movie(typing.TypedDict):
    title: str
    year: typing.NotRequired[int]


class Later(Movie, total=False):
    seen: "typing.Required[bool]"
    mood: "typing.NotRequired[str]"


class Point(NamedTuple):
    x: float
    y: float = 0.0


class Person(pydantic.BaseModel):
    name: typing.Annotated[str, pydantic.Field(min_length=1)]
    born: datetime.date | None = None
    friends: list["Person"] = []


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="allow")
    born: datetime.date


class Entry(msgspec.Struct):
    key: str
    size: int = 0


Id = NewType("Id", int)
KEY = uuid.UUID("12345678-1234-5678-1234-567812345678")
NOON = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)

VALUES: list[tuple[Any, str, object]] = [
    (int, "7", 7),
    (int, "7.0", 7),
    (float, "7", 7.0),
    (bool, "true", True),
    (str, '"a\\u00e9"', "aé"),
    (None, "null", None),
    (Any, '{"a": [1, null]}', {"a": [1, None]}),
    (Id, "3", 3),
    (int | None, "null", None),
    (typing.Optional[str], '"x"', "x"),  # noqa: UP045
    (float | int, "1", 1.0),
    (list[int], "[1, 2]", [1, 2]),
    (list, '[1, "a"]', [1, "a"]),
    (tuple[int, ...], "[1, 2]", (1, 2)),
    (tuple[int, str], '[1, "a"]', (1, "a")),
    (tuple[()], "[]", ()),
    (set[Colour], '["red", 2]', {Colour.RED, Colour.TWO}),
    (frozenset[int], "[1]", frozenset([1])),
    (dict[str, float], '{"a": 1}', {"a": 1.0}),
    (dict, '{"a": 1}', {"a": 1}),
    (dict[typing.Literal["a", "b"], int], '{"b": 1}', {"b": 1}),
    (dict[uuid.UUID, None], f'{{"{KEY}": null}}', {KEY: None}),
    (Colour, "2", Colour.TWO),
    (Level, "1", Level.LOW),
    (typing.Literal["a", 1, True, None], "true", True),
    (typing.Literal["a", 1, True, None], "1", 1),
    (datetime.date, '"2024-02-29"', datetime.date(2024, 2, 29)),
    (datetime.time, '"12:30:00Z"', datetime.time(12, 30, tzinfo=datetime.UTC)),
    (datetime.datetime, '"2026-11-21t12:00:00z"', NOON),
    (uuid.UUID, f'"{KEY}"', KEY),
    (Node, '{"value": 1, "children": [{"value": 2, "colour": 2}]}', Node(1, [Node(2, [], Colour.TWO)])),
    (Movie, '{"title": "M"}', {"title": "M"}),
    (Later, '{"title": "M", "seen": true}', {"title": "M", "seen": True}),
    (Point, '{"x": 1}', Point(1.0)),
    (Person, '{"name": "A", "friends": [{"name": "B"}]}', Person(name="A", friends=[Person(name="B")])),
    (list[Person], '[{"name": "A", "born": "2000-01-02"}]', [Person(name="A", born=datetime.date(2000, 1, 2))]),
    (Strict, '{"born": "2000-01-02"}', Strict(born=datetime.date(2000, 1, 2))),
    (Entry, '{"key": "a"}', Entry("a")),
    (Node | Movie, '{"title": "M"}', {"title": "M"}),
    (dict[str, Person | Entry], '{"a": {"key": "k"}}', {"a": Entry("k")}),
]


@pytest.mark.parametrize(("annotation", "text", "value"), VALUES, ids=[f"{typed(v[0]).name} {v[1]}" for v in VALUES])
def test_a_text_of_the_schema_becomes_the_object(annotation: Any, text: str, value: object) -> None:
    known = typed(annotation)
    schema = json.loads(known.schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(text), schema, format_checker=None)
    parsed = known.parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


WRONG: list[tuple[Any, str, str]] = [
    (int, '"7"', r"\$: expected integer, found '7'"),
    (int, "7.5", "expected integer"),
    (int, "true", "expected integer"),
    (float, "1" + "0" * 400, "expected number"),
    (list[int], "[1, null]", r"\$\[1\]: expected integer, found None"),
    (Node, '{"value": 1, "extra": 2}', r"the keys of Node, not with 'extra'"),
    (Node, '{"children": []}', "not without 'value'"),
    (Node, '{"value": 1, "children": [{"value": "a"}]}', r"\$\.children\[0\]\.value: expected integer"),
    (tuple[int, str], "[1]", "an array of 2"),
    (Colour, '"blue"', r'one of \["red", 2\]'),
    (int | None, '"a"', r"one of 2 forms .*expected integer.*expected null"),
    (datetime.date, '"2023-02-29"', "expected date"),
    (Person, '{"name": ""}', "at least 1 character"),
    (Entry, '{"key": 1}', "Expected `str`"),
    (int, "", "Expecting value"),
]


@pytest.mark.parametrize(("annotation", "text", "problem"), WRONG, ids=[w[2][:30] for w in WRONG])
def test_another_text_is_refused_with_its_place(annotation: Any, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        typed(annotation).parse(text)


def test_objects_of_classes_are_closed_and_keep_the_order_of_the_fields() -> None:
    def root(annotation: Any) -> dict[str, Any]:
        schema: dict[str, Any] = json.loads(typed(annotation).schema)
        while "$ref" in schema:
            schema = json.loads(typed(annotation).schema)["$defs"][schema["$ref"].rpartition("/")[2]]
        return schema

    for annotation in (Node, Movie, Point, Person, Entry):
        assert root(annotation)["additionalProperties"] is False
    assert root(Strict)["additionalProperties"] is True
    assert list(root(Node)["properties"]) == ["value", "children", "colour"]
    assert root(Node)["required"] == ["value"]
    assert root(Movie)["required"] == ["title"]
    assert root(Later)["required"] == ["title", "seen"]


def test_every_reference_leads_to_a_definition() -> None:
    schema = json.loads(typed(dict[str, Person | Entry | Node]).schema)

    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [v for k, v in value.items() if k == "$ref"] + [r for v in value.values() for r in references(v)]
        return [r for v in value for r in references(v)] if isinstance(value, list) else []

    found = set(references(schema))
    assert found
    assert {reference.removeprefix("#/$defs/") for reference in found} <= set(schema["$defs"])


def test_two_classes_of_one_name_are_two_definitions() -> None:
    def make(kind: type) -> type:
        return dataclasses.make_dataclass("Same", [("x", kind)])

    known = typed(tuple[make(int), make(str)])  # type: ignore[misc]
    assert set(json.loads(known.schema)["$defs"]) == {"Same", "Same2"}
    first, second = known.parse('[{"x": 1}, {"x": "a"}]')
    assert (first.x, second.x) == (1, "a")


@pytest.mark.parametrize(
    ("annotation", "keywords"),
    [
        (typing.Annotated[int, Ge(0), Lt(9)], {"minimum": 0, "exclusiveMaximum": 9}),
        (
            typing.Annotated[float, pydantic.Field(gt=0, le=1, description="a share")],
            {"exclusiveMinimum": 0, "maximum": 1},
        ),
        (typing.Annotated[str, MinLen(1), MaxLen(3)], {"minLength": 1, "maxLength": 3}),
        (typing.Annotated[str, pydantic.StringConstraints(pattern="^a+$")], {"pattern": "^a+$"}),
        (typing.Annotated[list[int], Len(1, 2)], {"minItems": 1, "maxItems": 2}),
        (typing.Annotated[dict[str, int], MaxLen(2)], {"maxProperties": 2}),
        (dict[typing.Annotated[str, MaxLen(2)], int], {"propertyNames": {"type": "string", "maxLength": 2}}),
        (typing.Annotated[int, msgspec.Meta(multiple_of=5), "a comment"], {"multipleOf": 5}),
    ],
)
def test_limits_of_annotated_types_are_keywords(annotation: Any, keywords: dict[str, Any]) -> None:
    assert json.loads(typed(annotation).schema).items() >= keywords.items()


def test_limits_reach_the_options_that_have_them() -> None:
    schema = json.loads(typed(typing.Annotated[int | None, Ge(0)]).schema)
    assert schema == {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [
        (complex, "complex cannot be generated as JSON; write a dataclass"),
        (list[bytes], "bytes cannot be generated"),
        (dict[int, str], r"dict\[int, str\]: the keys of a JSON object are strings"),
        (typing.Literal[b"a"], "b'a' is no JSON value"),
        (typing.Annotated[bool, Ge(0)], "ge=0.*boolean"),
        (typing.Annotated[bool | None, Ge(0)], "ge=0"),
        (typing.Annotated[int, Ge(datetime.date(2000, 1, 1))], "JSON has no such limit"),
        (dataclasses.make_dataclass("Lost", [("x", "Nowhere")]), "annotations of Lost cannot be looked up"),
        (dataclasses.make_dataclass("Init", [("x", dataclasses.InitVar[int])]), "InitVar"),
        (typing.Callable[[int], int], "Callable.*cannot be generated"),
    ],
)
def test_what_has_no_json_form_is_refused_by_name(annotation: Any, problem: str) -> None:
    with pytest.raises(ParameterError, match=problem):
        typed(annotation)


@pytest.mark.parametrize(
    "annotation",
    [
        *(int, float, bool, str, None, Any, Id, int | None, float | int, list[int], tuple[int, ...], tuple[int, str]),
        *(frozenset[int], dict[str, float], datetime.date, uuid.UUID, list[bool], dict[str, list[int | None]]),
        typing.Annotated[int, msgspec.Meta(multiple_of=5)],
    ],
)
def test_msgspec_has_the_same_schema_where_it_says_everything(annotation: Any) -> None:
    """Of classes, enums, limits and tables with keys of a kind it says less, or sorts what stands in order here."""
    assert json.loads(typed(annotation).schema) == msgspec.json.schema(annotation)


def test_a_type_is_looked_at_once() -> None:
    assert typed(list[int]) is typed(list[int])
    assert typed(list[typing.Literal[1]]).schema != typed(list[typing.Literal[True]]).schema  # 1 == True
