"""Reading JSON in pieces: values grow, nothing is taken back, the last is the whole, and the work is linear."""

import dataclasses
import datetime
import enum
import json
import random
from typing import Any, Literal, NamedTuple, TypedDict

import hypothesis.strategies as st
import msgspec
import pydantic
import pytest
from hypothesis import given
from umbel.lang.forms import Anything
from umbel.lang.generation import demand_of
from umbel.lang.partial.parts import Partial
from umbel.lang.partial.reader import NOTHING, JsonReader, TextReader, WholeReader, reader_of
from umbel.lang.typed import typed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def values_of(annotation: Any, text: str, cuts: list[int] | None = None) -> list[Any]:
    """All values of a text that is cut into pieces; without `cuts` into characters."""
    reader = JsonReader(typed(annotation).form)
    places = range(len(text) + 1) if cuts is None else sorted({0, *cuts, len(text)})
    pieces = [text[start:end] for start, end in zip(places, [*places[1:], len(text)], strict=True)]
    return [reader.value() for piece in pieces if reader.read(piece)]


def grown(earlier: Any, later: Any) -> bool:
    """Whether `later` has all that `earlier` has."""
    match earlier, later:
        case str(), str():
            return later.startswith(earlier)
        case list(), list():
            return len(earlier) <= len(later) and all(map(grown, earlier, later))
        case dict(), dict():
            return earlier.keys() <= later.keys() and all(grown(earlier[key], later[key]) for key in earlier)
        case Partial(), Partial():
            return grown(vars(earlier), vars(later))
        case None, _:
            return True
        case _:
            return bool(earlier == later)


@given(VALUES, st.lists(st.integers(0, 300)), st.booleans(), st.sampled_from([None, 2]))
def test_any_value_in_any_pieces_grows_to_itself(
    value: Any, cuts: list[int], ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent) + "\n"
    values = values_of(Any, text, [cut for cut in cuts if cut < len(text)])
    assert values[-1] == json.loads(text)
    assert all(map(grown, values, values[1:]))


@given(st.text(alphabet='{}[]",:\\u0a1dDn-. tre', max_size=30))
def test_a_text_reads_as_json_reads_it_or_stops(text: str) -> None:
    reader = JsonReader(Anything())
    for character in text + "\n":
        reader.read(character)
    try:
        expected = json.loads(text)
    except ValueError:
        return
    assert reader.value() == expected


def test_characters_are_read_once_and_a_long_array_shares_its_items() -> None:
    text = json.dumps([{"name": f"n{index}", "sizes": [index, index + 1]} for index in range(2000)])
    reader = JsonReader(Anything())
    before: Any = None
    for place in range(0, len(text), 7):
        if reader.read(text[place : place + 7]):
            value = reader.value()
            if before is not None and len(before) > 1:
                assert value[0] is before[0], "what is complete is not made again"
            before = value
    assert reader.characters == len(text)
    assert before == json.loads(text)


def test_work_is_linear_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    step = JsonReader._step

    def counted(reader: JsonReader, text: str, place: int) -> int:
        nonlocal steps
        steps += 1
        return step(reader, text, place)

    monkeypatch.setattr(JsonReader, "_step", counted)
    text = json.dumps({f"key {index}": ["x" * 50, index] for index in range(3000)})
    reader = JsonReader(Anything())
    for character in text:
        reader.read(character)
    assert len(text) <= steps <= 2 * len(text)


class Chapter(pydantic.BaseModel):
    name: str
    pages: int


class Book(pydantic.BaseModel):
    title: str
    year: int | None = None
    chapters: list[Chapter]
    notes: dict[str, str] = {}
    made_by: str = pydantic.Field("", alias="madeBy")


def test_parts_of_a_pydantic_model_have_its_attributes() -> None:
    text = '{"title": "Dune", "year": 1965, "chapters": [{"name": "I", "pages": 12}, {"name": "II"'
    last = values_of(Book, text)[-1]
    assert (last.title, last.year, last.notes, last.made_by) == ("Dune", 1965, None, None)
    first, second = last.chapters
    assert (first.name, first.pages, second.name, second.pages) == ("I", 12, "II", None)
    assert values_of(Book, text[:13])[-1] == values_of(Book, '{"title": "Du')[-1]
    assert values_of(Book, '{"madeBy": "Ann", "notes": {"a": "b')[-1].made_by == "Ann"
    assert values_of(Book, '{"notes": {"a": "b')[-1].notes == {"a": "b"}


@dataclasses.dataclass
class Song:
    title: str
    minutes: float
    day: datetime.date
    items: list[str]


class Pair(NamedTuple):
    x: int
    y: str


class Card(msgspec.Struct, rename="camel"):
    first_name: str
    size: int


class Row(TypedDict):
    title: str
    tags: list[str]


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("annotation", "text", "shown"),
    [
        (Song, '{"title": "A\\n', {"title": "A\n", "minutes": None, "day": None, "items": None}),
        (Song, '{"minutes": 3', {"title": None, "minutes": None, "day": None, "items": None}),
        (Song, '{"minutes": 3,', {"title": None, "minutes": 3.0, "day": None, "items": None}),
        (Song, '{"day": "2024-0', {"title": None, "minutes": None, "day": None, "items": None}),
        (
            Song,
            '{"day": "2024-01-02"',
            {"title": None, "minutes": None, "day": datetime.date(2024, 1, 2), "items": None},
        ),
        (Song, '{"day": "2024-13-02"', {"title": None, "minutes": None, "day": "2024-13-02", "items": None}),
        (Pair, '{"x": 1, "y": "', {"x": 1, "y": ""}),
        (Card, '{"firstName": "An', {"first_name": "An", "size": None}),
    ],
)
def test_parts_of_classes(annotation: Any, text: str, shown: dict[str, Any]) -> None:
    part = values_of(annotation, text)[-1]
    assert isinstance(part, Partial)
    assert vars(part) == shown


@pytest.mark.parametrize(
    ("annotation", "text", "shown"),
    [
        (Row, '{"title": "A", "tags": ["x", "y', {"title": "A", "tags": ["x", "y"]}),
        (
            dict[str, Song],
            '{"a": {"title": "T',
            {"a": Partial("Song", {"title": "T", "minutes": None, "day": None, "items": None})},
        ),
        (tuple[int, str], '[1, "a', [1, "a"]),
        (set[str], '["a", "b', ["a", "b"]),
        (list[Colour], '["red", "re', [Colour.RED]),
        (list[Colour | str], '["red", "re', [Colour.RED, "re"]),
        (str, '"ab', "ab"),
        (list[Any], "[nul", []),
    ],
)
def test_parts_of_other_types(annotation: Any, text: str, shown: Any) -> None:
    assert values_of(annotation, text)[-1] == shown


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    bites: bool


def test_a_union_is_decided_by_the_keys_and_constants_that_have_come() -> None:
    parts = values_of(list[Cat | Dog], '[{"kind": "dog", "bites": true}, {"lives": 9')
    assert repr(parts[0]) == "[]"
    assert repr(parts[-1]) == "[Partial[Dog](kind='dog', bites=True), Partial[Cat](kind=None, lives=None)]"


class Tree(pydantic.BaseModel):
    name: str
    inner: list["Tree"] = []


def test_classes_may_contain_themselves() -> None:
    part = values_of(Tree, '{"name": "a", "inner": [{"name": "b", "inner": [{"name": "c')[-1]
    assert part.inner[0].inner[0].name == "c"


def test_what_is_no_json_ends_the_reading_and_keeps_the_value() -> None:
    reader = JsonReader(Anything())
    assert reader.read('{"a": [1, 2')
    assert reader.read("}, 3")
    assert reader.value() == {"a": [1, 2]}
    assert not reader.read("]}")


def test_a_part_names_its_attributes_where_one_is_unknown() -> None:
    with pytest.raises(AttributeError, match="no attribute 'titel'; it has title, tags"):
        Partial("X", {"title": None, "tags": None}).titel  # noqa: B018
    assert Partial("X", {"a": 1}) != Partial("Y", {"a": 1})


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"regex": "[a-z]+"}, TextReader),
        ({"json_schema": {"type": "object"}}, JsonReader),
        ({"dtype": list[int]}, JsonReader),
        ({"dtype": int}, WholeReader),
        ({"dtype": Literal["a", "b"]}, WholeReader),
    ],
)
def test_readers_by_what_a_gen_asks_for(given: dict[str, Any], kind: type) -> None:
    demand = demand_of(given)
    assert demand is not None
    assert type(reader_of(demand.result)) is kind
    assert type(reader_of(None)) is TextReader


def test_nothing_is_there_before_the_text() -> None:
    reader = JsonReader(Anything())
    assert not reader.read("  \n")
    assert reader.value() is NOTHING


@pytest.mark.parametrize("seed", range(3))
def test_a_typed_value_in_random_pieces_shows_only_what_has_come(seed: int) -> None:
    text = (
        '{"title": "Du\\u00e9\\ud83d\\ude00", "year": 12, "chapters": [{"name": "x", "pages": 3}], "notes": {"k": "v"}}'
    )
    cuts = random.Random(seed).sample(range(len(text)), 20)
    parts = values_of(Book, text, cuts)
    assert all(map(grown, parts, parts[1:]))
    assert parts[-1].title == Book.model_validate_json(text).title
