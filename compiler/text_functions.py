"""Pure functions of text that a graph can compute: those that `Apply` may name.

Each takes the value and constants. They are those of `str` that look at nothing but their arguments, and the few that
Python's syntax has: `text[a:b]`, `mapping[key]`, `f"{value:>8}"`, `text * 3`.
"""

from collections.abc import Callable, Mapping
from typing import Any

STR_METHODS = (
    "capitalize",
    "casefold",
    "center",
    "expandtabs",
    "ljust",
    "lower",
    "lstrip",
    "removeprefix",
    "removesuffix",
    "replace",
    "rjust",
    "rstrip",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
)


def _method(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(value: Any, *arguments: Any) -> Any:
        return method(str(value), *arguments)

    return call


def _slice(value: Any, start: int | None, stop: int | None, step: int | None) -> Any:
    return value[start:stop:step]


def _item(value: Any, key: Any) -> Any:
    return value[key]


def _format(value: Any, specification: str) -> str:
    return format(value, specification)


def _multiply(value: Any, times: int) -> Any:
    return value * times


# Name → function of the value and the constants of `Apply.arguments`. The parameters are whatever the function takes.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: _method(name) for name in STR_METHODS},
    "ascii": ascii,
    "format": _format,
    "item": _item,
    "multiply": _multiply,
    "repr": repr,
    "slice": _slice,
    "str": str,
}
