"""JSON text of files of graphs, as strictly as a file from anywhere has to be read.

JSON holds no halves of surrogate pairs, and Python texts do. They are written as U+0000 and four hexadecimal digits,
and so is U+0000 itself: "\\u0000d83d", "\\u00000000".
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from ...lang.errors import GraphError

MAX_BYTES = 64 << 20  # some thousand times the largest program that a person writes; pictures lie inside
MAX_NESTING = 128  # a value nested as deep as values may be takes three levels each

# Possessive, and with a string that never ends up to the end: no text makes the search go back.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
_ESCAPED = re.compile("\0(.{0,4})", re.DOTALL)

Json = Any  # what json.loads gives


def written(value: Json, *, sort_keys: bool = False) -> str:
    """JSON on one line, with every character that UTF-8 has as it is."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    text = encoder.encode(value)
    if "\\u0000" not in text and not _UNWRITABLE.search(text):
        return text
    return encoder.encode(_mapped(value, _escaped))


def read(data: bytes) -> Json:
    """UTF-8 → JSON.

    Raises:
        GraphError: it is none, is too large or nested too deep, has a key twice or a number that is none.
    """
    if len(data) > MAX_BYTES:
        raise GraphError(f"it has {len(data)} bytes; at most {MAX_BYTES} are read")
    _check_nesting(data)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise GraphError(f"it is no UTF-8: byte {error.start} is {data[error.start]:#04x}") from None
    except json.JSONDecodeError as error:
        raise GraphError(f"it is no JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError as error:  # a number of too many digits
        raise GraphError(f"it is no JSON: {error}") from None
    return _mapped(value, _unescaped) if b"\\u" in data else value


def _check_nesting(data: bytes) -> None:
    """Ahead of the parser, whose own limit is the stack of whoever reads."""
    depth = 0
    for bracket in _STRINGS.sub(b"", data).translate(None, _OTHERS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_NESTING:
            raise GraphError(f"it is nested deeper than {MAX_NESTING}")


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise GraphError(f"the key {key!r} stands twice in one object")
    return result


def _no_number(name: str) -> NoReturn:
    raise GraphError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise GraphError(f"the number {text[:40]} is too large")
    return number


def _mapped(value: Json, change: Callable[[str], str]) -> Json:
    match value:
        case str():
            return change(value)
        case list():
            return [_mapped(member, change) for member in value]
        case dict():
            return {change(key): _mapped(member, change) for key, member in value.items()}
        case _:
            return value


def _escaped(text: str) -> str:
    return _UNWRITABLE.sub(lambda found: f"\0{ord(found[0]):04x}", text)


def _unescaped(text: str) -> str:
    if "\0" not in text:
        if _UNWRITABLE.search(text):
            raise GraphError(f"{text[:40]!r} has half of a surrogate pair; write it as \\u0000 and four digits")
        return text
    return _ESCAPED.sub(_character, text)


def _character(found: re.Match[str]) -> str:
    digits = found[1]
    if not re.fullmatch("0000|d[89a-f][0-9a-f]{2}", digits):
        raise GraphError(f"\\u0000 is followed by {digits!r}; write 0000, or d800 to dfff")
    return chr(int(digits, 16))
