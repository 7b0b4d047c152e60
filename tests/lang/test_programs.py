"""Plain values come out of their bytes as they went in, and what is no plain value does not go in."""

import contextlib
import enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.errors import ParameterError
from umbel.lang.programs import MAX_DEPTH, pack_values, unpack_values

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
    | st.binary()
)
KEYS = st.text(st.characters(exclude_categories=("Cs",))) | st.integers(-(2**63), 2**63)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_values_come_out_as_they_went_in(value: Any) -> None:
    again = unpack_values(pack_values(value))
    assert repr(again) == repr(value)  # also the kinds of numbers, and tuples that are no lists


class Colour(enum.StrEnum):
    RED = "red"


class Loud(str):
    def __format__(self, specification: str) -> str:
        return self.upper()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "a object cannot travel"),
        (Colour.RED, "a Colour cannot travel"),
        ([Loud("x")], "a Loud cannot travel"),
        ({1, 2}, "a set cannot travel"),
        ({(1, 2): 3}, "keys that travel are str or int"),
        ({True: 3}, "keys that travel are str or int"),
        ({2**80: 3}, "keys that travel are str or int"),
        ("half \ud800", "decode the input with errors='replace'"),
        (("half \ud800",), "decode the input with errors='replace'"),
    ],
)
def test_what_could_not_come_out_the_same_does_not_go_in(value: Any, says: str) -> None:
    with pytest.raises(ParameterError) as caught:
        pack_values(value)
    assert says in str(caught.value)


def test_nesting_is_bounded() -> None:
    nested: Any = 1
    for _ in range(MAX_DEPTH):
        nested = [nested]
    assert unpack_values(pack_values(nested)) == nested
    with pytest.raises(ParameterError, match="give a flatter one"):
        pack_values([nested])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_whatever_bytes_come_nothing_else_is_raised(data: bytes) -> None:
    with contextlib.suppress(ParameterError):
        unpack_values(data)


@pytest.mark.parametrize("data", [b"\x91" * 100_000, b"\xc7\x01\x07\x00", b"\xc7\x01\x01\x05", b"\xdd\xff\xff\xff\xff"])
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ParameterError):
        unpack_values(data)


def test_nested_extensions_do_not_overflow_the_stack() -> None:
    data = pack_values(())
    for _ in range(3000):
        length = len(data) + 1
        data = b"\xc9" + length.to_bytes(4, "big") + b"\x01" + b"\x91" + data
    with pytest.raises(ParameterError):
        unpack_values(data)
