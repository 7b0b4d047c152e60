"""The values of keywords, checked: a schema that says `"minLength": "3"` is refused, with what to write."""

from __future__ import annotations

from decimal import Decimal

from ..errors import ConstraintRefused, Unsupported
from .decimals import Number
from .document import Schema
from .source import Value, kind_of


class Ledger:
    """Keywords that are not honoured: refused, or noted where the caller asked for that.

    Args:
        allow: note them in `unenforced` as (keyword, path) instead of raising.
    """

    def __init__(self, *, allow: bool) -> None:
        self.allow = allow
        self.unenforced: dict[tuple[str, str], None] = {}
        self.narrowed: dict[tuple[str, str], str] = {}
        self.lost: tuple[str, str] | None = None  # the (keyword, path) of which values were left out last

    def refuse(self, why: str, where: str, keyword: str) -> None:
        """Raises Unsupported, or returns after a note: the caller goes on without the keyword."""
        if not self.allow:
            raise Unsupported(why, where=where, keyword=keyword)
        self.unenforced[keyword, where] = None

    def narrow(self, where: str, keyword: str, how: str) -> None:
        """The keyword is read more narrowly than it is meant; `how` says which texts are left."""
        self.narrowed[keyword, where] = how

    def lose(self, where: str, keyword: str, how: str) -> None:
        """Some values that the keyword admits cannot be expressed, and are left out: perhaps all."""
        self.narrow(where, keyword, how)
        self.lost = (keyword, where)


def at(schema: Schema, keyword: str) -> str:
    return f"{schema.path}/{keyword}"


def invalid(schema: Schema, keyword: str, instead: str) -> ConstraintRefused:
    """The error for a keyword with a value of the wrong kind."""
    value = schema.value[keyword]
    shown = repr(value) if isinstance(value, str | bool | int | Decimal) else kind_of(value)
    return ConstraintRefused(f"{keyword} is {shown}; write {instead}", where=at(schema, keyword), keyword=keyword)


def count(schema: Schema, keyword: str) -> int | None:
    """A non-negative integer, or None when the keyword is absent."""
    value = schema.value.get(keyword)
    if value is None and keyword not in schema.value:
        return None
    if isinstance(value, Decimal) and value == value.to_integral_value():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise invalid(schema, keyword, "a number without a fraction, 0 or more, such as 3")
    return value


def number(schema: Schema, keyword: str) -> Number | None:
    value = schema.value.get(keyword)
    if value is None and keyword not in schema.value:
        return None
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise invalid(schema, keyword, "a number, such as 3")
    return value


def flag(schema: Schema, keyword: str) -> bool:
    """true or false; false when absent."""
    value = schema.value.get(keyword, False)
    if not isinstance(value, bool):
        raise invalid(schema, keyword, "true or false")
    return value


def text(schema: Schema, keyword: str) -> str | None:
    value = schema.value.get(keyword)
    if value is None and keyword not in schema.value:
        return None
    if not isinstance(value, str):
        raise invalid(schema, keyword, "a string")
    return value


def names(schema: Schema, keyword: str, value: Value) -> tuple[str, ...]:
    """A list of member names, given as `value` somewhere under the keyword."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise invalid(schema, keyword, 'an array of names, such as ["id"]')
    return tuple(dict.fromkeys(value))


def mapping(schema: Schema, keyword: str) -> dict[str, Value]:
    """An object; empty when absent."""
    value = schema.value.get(keyword, {})
    if not isinstance(value, dict):
        raise invalid(schema, keyword, "an object")
    return value


def listed(schema: Schema, keyword: str) -> list[Value]:
    """An array that is not empty."""
    value = schema.value[keyword]
    if not isinstance(value, list) or not value:
        raise invalid(schema, keyword, "an array with at least one entry")
    return value


def branches(schema: Schema, keyword: str) -> list[Schema]:
    """The schemas of allOf, anyOf, oneOf, prefixItems."""
    return [schema.child(keyword, position) for position in range(len(listed(schema, keyword)))]
