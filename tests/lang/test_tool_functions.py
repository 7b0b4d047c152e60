"""`ul.tool`: what a signature, annotations and a docstring become, and what cannot be a tool."""

import enum
import functools
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import umbel as ul
from pydantic import BaseModel
from umbel.lang.agents.tool_functions import result_text


@dataclass
class Place:
    city: str
    metres: int = 0


class Unit(enum.Enum):
    CELSIUS = "C"
    KELVIN = "K"


@ul.tool
def weather(place: Place, unit: Unit = Unit.CELSIUS, days: Literal[1, 3] = 1, note: str | None = None) -> str:
    """Tells the weather.

    In few words.

    Args:
        place: where it is
            asked for.
        days (int): how many.

    Returns:
        days: not a parameter's line.
    """
    return f"{place.city} {unit.value} {days} {note}"


def test_a_signature_is_a_schema() -> None:
    schema = weather.schema
    assert weather.name == "weather"
    assert weather.description == "Tells the weather.\n\nIn few words."
    assert schema["type"] == "object"
    assert schema["required"] == ["place"]
    assert list(schema["properties"]) == ["place", "unit", "days", "note"]
    assert schema["properties"]["place"]["description"] == "where it is asked for."
    assert schema["properties"]["days"] == {"enum": [1, 3], "description": "how many."}
    assert schema["$defs"]["Place"]["properties"]["city"] == {"type": "string"}


def of_numpy(city: str, days: int = 1) -> str:
    """Tells the weather.

    Parameters
    ----------
    city : str, optional
        where it is
        asked for.
    days
        how many: 1 or 3.

    Returns
    -------
    days : str
        not a parameter's line.
    """
    return ""


def of_sphinx(city: str, days: int = 1) -> str:
    """Tells the weather.

    :param city: where it is
        asked for.
    :type city: str
    :param int days: how many: 1 or 3.
    :raises ValueError: days: not a parameter's line.
    :returns: the weather
    """
    return ""


def of_google(city: str, days: int = 1) -> str:
    """Tells the weather.

    Args:
        city (str, optional): where it is
            asked for.
        days: how many: 1 or 3.

    Returns:
        days: not a parameter's line.
    """
    return ""


@pytest.mark.parametrize("function", [of_numpy, of_sphinx, of_google])
def test_docstrings_of_three_styles_describe_parameters(function: Any) -> None:
    made = ul.tool(function)
    assert made.description == "Tells the weather."
    described = {name: each["description"] for name, each in made.schema["properties"].items()}
    assert described == {"city": "where it is asked for.", "days": "how many: 1 or 3."}


def test_words_that_begin_no_section_stay_in_the_description() -> None:
    def search(query: str) -> str:
        """Searches.

        Returns
        what was found :param or not.
        """
        return ""

    assert ul.tool(search).description == "Searches.\n\nReturns\nwhat was found :param or not."


def test_arguments_become_values_of_their_types() -> None:
    read = weather.read('{"place": {"city": "Oslo"}, "unit": "K"}')
    assert read == {"place": Place("Oslo"), "unit": Unit.KELVIN}
    assert weather(**read) == "Oslo K 1 None"


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"place": "Oslo"}', "{}", '{"place": {"city": "Oslo"}, "x": 1}'])
def test_wrong_arguments_are_refused(arguments: str) -> None:
    with pytest.raises(ValueError):
        weather.read(arguments)


def test_names_and_descriptions_can_be_given() -> None:
    named = ul.tool(name="look-up", description="Finds.")(lambda: 1)
    assert (named.name, named.description, named()) == ("look-up", "Finds.", 1)
    assert named.read("") == {}


def no_annotation(query):  # type: ignore[no-untyped-def]
    return query


def many(*names: str) -> None: ...


def options(**names: str) -> None: ...


def by_place(name: str, /) -> None: ...


def of_a_socket(name: object, other: Annotated[type[int], "x"]) -> None: ...


def unknown_name(name: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821


def yields() -> Iterator[int]:
    yield 1


async def yields_async() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (yields, "tool yields: it yields"),
        (yields_async, "tool yields_async: it yields"),
        (functools.partial(yields), "tool yields: it yields"),
        (min, "tool min: its annotations cannot be read"),
        (no_annotation, "parameter 'query' has no annotation"),
        (many, r"'\*names' takes none"),
        (options, r"'\*\*names' takes none"),
        (by_place, "'name' takes none"),
        (of_a_socket, "tool of_a_socket: "),
        (unknown_name, "cannot be read"),
        (lambda: 1, "tool name '<lambda>'"),
        (3, "write a function"),
        (weather, "write a function"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_at_once(function: Any, said: str) -> None:
    with pytest.raises(ul.ParameterError, match=said):
        ul.tool(function)


def test_results_are_text_json_or_str() -> None:
    assert result_text("plain") == "plain"
    assert result_text({"a": [1, None]}) == '{"a":[1,null]}'
    assert result_text(Place("Oslo", 3)) == '{"city":"Oslo","metres":3}'
    assert result_text(3 + 4j) == "(3+4j)"


class Tree(BaseModel):
    weight: float
    branches: "list[Tree]" = []


def test_results_have_models_inside_and_numbers_that_json_does_not_have() -> None:
    assert result_text(Tree(weight=1)) == '{"weight":1.0,"branches":[]}'
    assert result_text([Tree(weight=2)]) == '[{"weight":2.0,"branches":[]}]'
    assert result_text({"found": Tree(weight=math.nan)}) == '{"found":{"weight":"NaN","branches":[]}}'
    assert result_text([math.inf, -math.inf, {1: math.nan}]) == '["Infinity","-Infinity",{"1":"NaN"}]'


def test_a_partial_and_an_object_that_is_called_are_tools() -> None:
    def multiply(number: int, by: int, note: str = "") -> int:
        """Multiplies a number.

        Args:
            number: any.
        """
        return number * by

    class Adder:
        """Adds."""

        async def __call__(self, number: int) -> int:
            return number + 1

    class Named(Adder):
        async def __call__(self, number: int) -> int:
            """Adds one."""
            return number + 1

    double = ul.tool(functools.partial(multiply, by=2))
    assert (double.name, double.description) == ("multiply", "Multiplies a number.")
    assert double.schema["properties"] == {
        "number": {"type": "integer", "description": "any."},
        "note": {"type": "string"},
    }
    assert double(**double.read('{"number": 4}')) == 8
    of_four = ul.tool(functools.partial(multiply, 4))
    assert list(of_four.schema["properties"]) == ["by", "note"]
    adder, named = ul.tool(Adder()), ul.tool(Named())
    assert (adder.name, adder.description, adder.is_async) == ("Adder", "Adds.", True)
    assert named.description == "Adds one."
    assert adder.schema["properties"] == {"number": {"type": "integer"}}
