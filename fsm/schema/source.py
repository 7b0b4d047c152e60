"""Reading a schema: from text or from Python values to plain JSON values, within limits.

Numbers stay what was written (int or Decimal, never float), the order of keys is kept, a key that stands twice is
refused: whoever reads the schema with another parser would see another schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

from ..errors import ConstraintRefused, LimitExceeded
from ..limits import Limits

# A JSON value. Recursive aliases and Any meet here only: everything that leaves a keyword is checked and typed.
Value: TypeAlias = Any

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)  # strings are passed over whole

LARGEST_EXPONENT = 400  # of a number in a schema; doubles end at 308, and 1e999999999 must not become digits


def read_schema(source: str | bytes | Mapping[str, object] | bool, limits: Limits) -> Value:
    """The schema as JSON values.

    Raises:
        LimitExceeded: the text has more bytes, or nests deeper, than `limits` allow.
        ConstraintRefused: it is not JSON, a key stands twice, or it is neither an object nor a boolean.
    """
    if isinstance(source, bytes):
        try:
            source = source.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConstraintRefused(f"the schema is not UTF-8: {error}; encode it as UTF-8") from None
    value = _read_text(source, limits) if isinstance(source, str) else _read_value(source, limits)
    if not isinstance(value, dict | bool):
        raise ConstraintRefused(f"a schema is an object or a boolean, not {kind_of(value)}; write {{}} for any value")
    return value


def _read_text(text: str, limits: Limits) -> Value:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limits.schema_bytes:
        raise LimitExceeded(f"the schema has {size} bytes, more than the {limits.schema_bytes} allowed; split it")
    _check_depth(text, limits.depth)
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_decimal,
            parse_constant=_no_constant,
        )
    except json.JSONDecodeError as error:
        raise ConstraintRefused(
            f"the schema is not JSON: {error.msg}; check it with a JSON parser",
            where=f"line {error.lineno} column {error.colno}",
        ) from None


def _check_depth(text: str, depth: int) -> None:
    """Before the parser, which recurses. Brackets inside strings do not count."""
    level = 0
    for found in _BRACKETS.finditer(text):
        bracket = found.group()
        if bracket in "[{":
            level += 1
            if level > depth:
                raise _too_deep(depth)
        elif bracket in "]}":
            level -= 1


def _too_deep(depth: int) -> LimitExceeded:
    return LimitExceeded(f"the schema nests deeper than {depth} levels; move inner schemas to $defs and refer to them")


def _unique(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ConstraintRefused(f"the key {key!r} stands twice in one object of the schema; keep one of them")
            seen.add(key)
    return found


def _integer(text: str) -> int:
    if len(text) > LARGEST_EXPONENT:
        raise LimitExceeded(f"a number of {len(text)} digits in the schema; write at most {LARGEST_EXPONENT}")
    return int(text)


def _decimal(text: str) -> Decimal:
    return _bounded(Decimal(text))


def _bounded(number: Decimal) -> Decimal:
    if number and not -LARGEST_EXPONENT <= number.adjusted() <= LARGEST_EXPONENT:
        raise LimitExceeded(f"the number {number} in the schema has an exponent beyond {LARGEST_EXPONENT}")
    return number


def _no_constant(name: str) -> Value:
    raise ConstraintRefused(f"{name} in the schema is not JSON; write a number")


def _read_value(source: object, limits: Limits) -> Value:
    """Python values, as json.loads gives them: sizes are counted as if they were written."""
    budget = limits.schema_bytes

    def read(value: object, depth: int) -> Value:
        nonlocal budget
        budget -= len(value) + 2 if isinstance(value, str) else 2
        if budget < 0:
            raise LimitExceeded(f"the schema has more than the {limits.schema_bytes} bytes allowed; split it")
        if depth > limits.depth:
            raise _too_deep(limits.depth)
        match value:
            case None | bool() | str() | int():
                return value
            case Decimal():
                return _bounded(value)
            case float():
                if not math.isfinite(value):
                    raise ConstraintRefused(f"{value} in the schema is not JSON; write a number")
                return Decimal(repr(value))
            case Mapping():
                for key in value:
                    if not isinstance(key, str):
                        raise ConstraintRefused(f"the key {key!r} of the schema is not a string; write {str(key)!r}")
                    budget -= len(key) + 2
                return {key: read(inner, depth + 1) for key, inner in value.items()}
            case Sequence():
                return [read(inner, depth + 1) for inner in value]
        raise ConstraintRefused(f"{value!r} in the schema is no JSON value; write what json.dumps accepts")

    return read(source, 0)


def kind_of(value: Value) -> str:
    """The JSON type of a value, with its article, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | Decimal():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def identity(value: Value) -> Hashable:
    """Equal for equal JSON values: 1 and 1.0 are one, true and 1 are two, the order of keys does not count."""
    match value:
        case bool():
            return ("boolean", value)
        case int() | Decimal():
            return ("number", value)
        case list():
            return ("array", tuple(identity(item) for item in value))
        case dict():
            return ("object", frozenset((key, identity(item)) for key, item in value.items()))
    return ("text", value)  # or null


def distinct(values: Sequence[Value]) -> list[Value]:
    """The values without repetitions, in order."""
    return list({identity(value): value for value in reversed(values)}.values())[::-1]
