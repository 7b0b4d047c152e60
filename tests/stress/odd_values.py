"""Values that no caller should give, and some will. Made anew at every draw: no call spoils them for another."""

import datetime
import decimal
import enum
import fractions
import io
import itertools
import math
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import umbel as ul


class OddMethod(Exception):
    """Raised by a method that Python calls unasked. It never reaches a caller of umbel."""


class OddCall(Exception):
    """Raised by a function that was given to be called: it is the caller's own, and goes through."""


def _raises(self: object, *_: object) -> Any:
    raise OddMethod("a method of an odd value")


def _nonsense(self: object, *_: object) -> Any:
    return -1


def _broken(name: str, base: type, *methods: str, does: Callable[..., Any] = _raises) -> type:
    return type(name, (base,), dict.fromkeys(methods, does))


_TEXT = ("__str__", "__repr__", "__format__", "__len__", "__eq__", "__iter__", "__contains__", "strip", "encode")
_NUMBER = ("__str__", "__repr__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__int__", "__index__", "__float__")
_MEMBERS = ("__len__", "__iter__", "__getitem__", "__contains__", "__eq__", "__repr__")
OddText = _broken("OddText", str, *_TEXT)
OddInteger = _broken("OddInteger", int, *_NUMBER)
OddFloat = _broken("OddFloat", float, *_NUMBER)
OddList = _broken("OddList", list, *_MEMBERS)
OddDict = _broken("OddDict", dict, *_MEMBERS, "items", "keys", "values", "get")
for kind in (OddText, OddInteger, OddFloat):
    kind.__hash__ = kind.__mro__[1].__hash__  # type: ignore[method-assign]  # what has __eq__ alone has none


class Member(enum.Enum):
    ONE = 1


class Number(enum.IntEnum):
    THREE = 3


def _itself(container: Any, add: Callable[[Any], object]) -> Any:
    add(container)
    return container


def _deep(wrap: Callable[[Any], Any], levels: int = 5000) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = wrap(value)
    return value


def _endless() -> Iterator[str]:
    while True:
        yield "x"


def _fails(*_: Any, **__: Any) -> Any:
    raise OddCall("a function that was given")


def _own_list() -> list[Any]:
    made: list[Any] = []
    return _itself(made, made.append)


def _own_dict() -> dict[str, Any]:
    made: dict[str, Any] = {}
    return _itself(made, lambda value: made.update(a=value))


ODD: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: False, lambda: 0, lambda: 1, lambda: -1, lambda: -0.0, lambda: 0.5,
    lambda: math.nan, lambda: math.inf, lambda: -math.inf, lambda: 10**400, lambda: -(10**400), lambda: 10**6000,
    lambda: 2**31, lambda: 2**63, lambda: 2**64, lambda: 1e308, lambda: 1e-320, lambda: 1e-38, lambda: 1e18,
    lambda: "", lambda: "x", lambda: " ", lambda: "\x00", lambda: "\ud800", lambda: "a" * 1_000_000,
    lambda: "\n", lambda: "{", lambda: "(" * 3000, lambda: "[" * 100_000, lambda: "9" * 5000, lambda: "true",
    lambda: "é\u202e\ufffe", lambda: "../../etc/passwd", lambda: "{{ x }}", lambda: "%s{}", lambda: b"", lambda: b"x",
    lambda: b"\xff" * 100, lambda: bytearray(b"x"), lambda: memoryview(b"x"), list, lambda: [[]], lambda: [None],
    lambda: ["a", 1], lambda: ["a", "a"], lambda: ["x"] * 200_000, lambda: list(range(1000)), _own_list, _own_dict,
    lambda: _deep(lambda value: [value]), lambda: _deep(lambda value: {"a": value}),
    lambda: _deep(lambda value: (value,)),
    dict, lambda: {1: 2}, lambda: {"a": object()}, lambda: {"a": 1}, lambda: {None: None},
    lambda: dict.fromkeys(range(2000), 1.0), tuple, set, lambda: {1, 2}, frozenset, lambda: range(10**9),
    itertools.count, _endless, lambda: itertools.repeat({}), lambda: iter(()), lambda: map(_fails, [1]), object,
    lambda: int, lambda: str, lambda: object, lambda: (lambda *a, **k: None), lambda: (lambda *a, **k: 3),
    lambda: _fails,
    lambda: Ellipsis, lambda: NotImplemented, lambda: 1 + 2j, lambda: decimal.Decimal("1.5"),
    lambda: fractions.Fraction(1, 3), lambda: np.int64(3), lambda: np.float32(0.5), lambda: np.bool_(True),
    lambda: np.array(3), lambda: np.array([1, 2]), lambda: np.zeros((2, 2)), lambda: np.array(["a"]),
    lambda: np.str_("x"),
    lambda: np.float64("nan"), lambda: np.uint64(2**63), lambda: datetime.datetime(2020, 1, 1),
    lambda: pathlib.Path("nowhere"), lambda: pathlib.Path("/"), lambda: io.StringIO("x"), lambda: ValueError("x"),
    lambda: math, lambda: Member, lambda: Member.ONE, lambda: Number.THREE, MagicMock, lambda: OddText("x"),
    lambda: OddInteger(3), lambda: OddFloat(0.5), lambda: OddList(["a"]), lambda: OddDict(a=1),
    lambda: _broken("OddObject", object, *_TEXT, *_NUMBER, "__bool__", "__hash__")(),
    lambda: _broken("Nonsense", object, "__len__", "__iter__", "__repr__", "__eq__", "__bool__", does=_nonsense)(),
    lambda: _broken("OddIterable", object, "__iter__")(),
    lambda: _broken("OddLength", list, "__len__", does=_nonsense)(),
    lambda: ul.gen("g"), lambda: ul.user("hello"), lambda: ul.Budget(tokens=5), lambda: ul.SamplingParams(),
    lambda: ul.Echo(["x"]), lambda: ul.Price(1, 2), lambda: ul.ChatTemplate(None), lambda: ul.UmbelError,
    lambda: list[int], lambda: dict[int, int], lambda: int | None, lambda: Any,
)  # fmt: skip


def draw(chance: random.Random) -> tuple[int, Any]:
    """The number of an odd value, and the value."""
    number = chance.randrange(len(ODD))
    return number, ODD[number]()
