"""Writes and reads values of programs in files of graphs.

They are JSON for what JSON has, and an object that names the type for the rest:

    None, True, 3, 1.5, "text", [..]     themselves
    {"tuple": [..]}  {"set": [..]}  {"frozenset": [..]}
    {"dict": [[key, value], ..]}         keys of any kind, in order
    {"bytes": "base64"}
    {"path": "cat.png"}
    {"float": "nan"}                     also "inf" and "-inf"
    {"leaf": 0}                          in the template of a `Structure`: the input with this number

Reading runs no code of the file. The JSON text is read as strictly as a file from anywhere has to be. JSON holds no
halves of surrogate pairs, and Python texts do: they are written as U+0000 and four hexadecimal digits, and so is U+0000
itself: "\\u0000d83d", "\\u00000000".
"""

import base64
import binascii
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, NoReturn

from ...lang.errors import GraphError
from ..operations import MAX_NESTING, Leaf

Json = Any  # what json.loads gives
Value = Any  # what a user's program holds

MAX_BYTES = 64 << 20  # some thousand times the largest program that a person writes; pictures lie inside
MAX_JSON_NESTING = 128  # a value nested as deep as values may be takes three levels each

# Possessive, and with a string that never ends up to the end: no text makes the search go back.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
_ESCAPED = re.compile("\0(.{0,4})", re.DOTALL)
_FLOATS = ("nan", "inf", "-inf")


def written(value: Value, depth: int = 0) -> Json:
    """Writes a value as JSON.

    Raises:
        GraphError: an object of another type than those above, or one nested too deep. The message begins with what
            the value is, to follow "cannot be kept in a file: ".
    """
    if depth > MAX_NESTING:
        raise GraphError(f"it is nested deeper than {MAX_NESTING}, or contains itself")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return _written_integer(value)
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [written(member, depth + 1) for member in value]
    if kind is tuple:
        return {"tuple": [written(member, depth + 1) for member in value]}
    if kind in (set, frozenset):
        return {kind.__name__: sorted((written(member, depth + 1) for member in value), key=_order)}
    if kind is dict:
        pairs = [[written(key, depth + 1), written(member, depth + 1)] for key, member in value.items()]
        return {"dict": pairs}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if kind is Leaf:
        return {"leaf": value.index}
    raise GraphError(
        f"it is an object of the class {kind.__name__}; write what it is made of: text, numbers, bytes, or lists and "
        "dicts of these"
    )


def _written_integer(value: int) -> int:
    if value.bit_length() > 4096:  # Python reads no more than 4300 digits
        raise GraphError(f"it is a number of {value.bit_length()} bits; at most 4096 can be read back")
    return value


def _order(member: Json) -> str:
    return json.dumps(member)


def read(value: Json, at: str) -> Value:
    """Reads a value from JSON. `at`: where it stands, for messages.

    Raises:
        GraphError: it is no value as `written` writes them.
    """
    if isinstance(value, list):
        return [read(member, f"{at}[{index}]") for index, member in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise GraphError(f"{at}: expected an object with one key, the type of a value; found {len(value)} keys")
    ((kind, inner),) = value.items()
    reader = _READERS.get(kind)
    if reader is None:
        raise GraphError(f"{at}: unknown type {kind!r} of a value; known are {', '.join(_READERS)}")
    return reader(inner, f"{at}.{kind}")


def expect(value: Json, kind: type, at: str) -> Any:  # Any: of that kind
    """Returns `value`, when it is of this kind; True is no int.

    Raises:
        GraphError: it is of another.
    """
    if type(value) is not kind:
        raise GraphError(f"{at}: expected {_NAMES[kind]}, found {_shown(value)}")
    return value


def members(value: Json, at: str, required: Mapping[str, type], optional: Mapping[str, type]) -> dict[str, Json]:
    """Returns the members of an object, when they are these.

    Raises:
        GraphError: one is missing, unknown or of another kind; `object` stands for any.
    """
    given: dict[str, Json] = expect(value, dict, at)
    for name in required:
        if name not in given:
            raise GraphError(f"{at}: {name!r} is missing")
    for name, member in given.items():
        kind = required.get(name) or optional.get(name)
        if kind is None:
            raise GraphError(f"{at}: unknown field {name!r}; known are {', '.join((*required, *optional))}")
        if kind is not object:
            expect(member, kind, f"{at}.{name}")
    return given


_NAMES: Mapping[type, str] = {
    bool: "true or false",
    dict: "an object",
    float: "a number with a point",
    int: "an integer",
    list: "a list",
    str: "a string",
}


def _shown(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_members(value: Json, at: str) -> list[Value]:
    return [read(member, f"{at}[{index}]") for index, member in enumerate(expect(value, list, at))]


def _read_set(build: Callable[[list[Value]], Value]) -> Callable[[Json, str], Value]:
    def reader(value: Json, at: str) -> Value:
        found = _read_members(value, at)
        try:
            built = build(found)
        except TypeError as error:
            raise GraphError(f"{at}: {error}") from None
        if len(built) < len(found):
            raise GraphError(f"{at}: a member stands in it twice")
        return built

    return reader


def _read_dict(value: Json, at: str) -> dict[Value, Value]:
    result: dict[Value, Value] = {}
    for index, pair in enumerate(expect(value, list, at)):
        where = f"{at}[{index}]"
        if len(expect(pair, list, where)) != 2:
            raise GraphError(f"{where}: expected a key and its value, found {len(pair)} things")
        key = read(pair[0], where)
        try:
            repeated = key in result
        except TypeError as error:
            raise GraphError(f"{where}: {error}") from None
        if repeated:
            raise GraphError(f"{where}: the key {key!r} stands there twice")
        result[key] = read(pair[1], where)
    return result


def _read_bytes(value: Json, at: str) -> bytes:
    try:
        return base64.b64decode(expect(value, str, at), validate=True)
    except (binascii.Error, ValueError) as error:
        raise GraphError(f"{at}: no base64: {error}") from None


def _read_float(value: Json, at: str) -> float:
    if value not in _FLOATS:
        raise GraphError(f"{at}: expected one of {', '.join(_FLOATS)}, found {_shown(value)}")
    return float(value)


def _read_path(value: Json, at: str) -> Path:
    return Path(expect(value, str, at))


def _read_leaf(value: Json, at: str) -> Leaf:
    return Leaf(expect(value, int, at))


_READERS: Mapping[str, Callable[[Json, str], Value]] = {
    "bytes": _read_bytes,
    "dict": _read_dict,
    "float": _read_float,
    "frozenset": _read_set(frozenset),
    "leaf": _read_leaf,
    "path": _read_path,
    "set": _read_set(set),
    "tuple": lambda value, at: tuple(_read_members(value, at)),
}


# ------------------------------------------------------------------------------------ JSON text


def json_text(value: Json, *, sort_keys: bool = False) -> str:
    """Writes JSON on one line, with every character that UTF-8 has as it is."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    text = encoder.encode(value)
    if "\\u0000" not in text and not _UNWRITABLE.search(text):
        return text
    return encoder.encode(_mapped(value, _escaped))


def read_json(data: bytes) -> Json:
    """Reads JSON from UTF-8.

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
    """Checks the nesting before the parser does, whose own limit is the stack of its caller."""
    depth = 0
    for bracket in _STRINGS.sub(b"", data).translate(None, _OTHERS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_NESTING:
            raise GraphError(f"it is nested deeper than {MAX_JSON_NESTING}")


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
