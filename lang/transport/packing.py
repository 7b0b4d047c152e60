"""Plain values, packed: what a program is given, and facts about its variables, come out exactly as they went in.

Msgpack knows no tuples and no integers beyond 64 bits; both matter, since programs write values into prompts. They
travel as extensions:

    1   a tuple: its members, packed as a list
    2   an integer: two's complement, big end first
"""

from typing import Any

import msgspec

from ..errors import ParameterError, shown

MAX_DEPTH = 64  # of lists in lists; deeper ones are a mistake, or an attack on their reader

_TUPLE, _INTEGER = 1, 2
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1  # what msgpack itself has room for

_encoder = msgspec.msgpack.Encoder()


def pack(value: Any) -> bytes:  # Any: a plain value, or one that is refused
    """Packs None, bool, int, float, str, bytes, and lists, tuples and dicts (with keys of str or int) of them.

    Raises:
        ParameterError: anything else, subclasses included, whose `str` may be their own; a text that holds half of a
            surrogate pair; nesting beyond `MAX_DEPTH`.
    """
    try:
        return _encoder.encode(_packable(value, MAX_DEPTH))
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"the text holds {error.object[error.start]!r}, which is no character; decode the input with "
            "errors='replace'"
        ) from None


def unpack(data: bytes) -> Any:
    """Raises ParameterError, and nothing else, whatever the bytes are."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
        raise ParameterError(f"the values cannot be read: {error}") from None


def _packable(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is str or kind is float or kind is bool or kind is bytes or value is None:
        return value
    if kind is int:
        return value if _SMALLEST <= value <= _LARGEST else _large(value)
    if depth == 0:
        raise ParameterError(f"a value has lists in lists in lists, more than {MAX_DEPTH} deep; give a flatter one")
    if kind is list:
        return [_packable(item, depth - 1) for item in value]
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, _encoder.encode([_packable(item, depth - 1) for item in value]))
    if kind is dict:
        for key in value:
            if type(key) is not str and (type(key) is not int or not _SMALLEST <= key <= _LARGEST):
                raise ParameterError(f"a dict has the key {shown(key)}; keys that travel are str or int")
        return {key: _packable(item, depth - 1) for key, item in value.items()}
    raise ParameterError(
        f"a {kind.__name__} cannot travel: {shown(value)}; give str, int, float, bool, bytes, None, or lists, tuples "
        "and dicts of them"
    )


def _large(value: int) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _extension(code: int, data: memoryview) -> Any:
    match code:
        case 1:
            members = _decoder.decode(data)
            if not isinstance(members, list):
                raise ValueError("a tuple that is no list of members")
            return tuple(members)
        case 2:
            return int.from_bytes(data, "big", signed=True)
        case _:
            raise ValueError(f"an extension {code}, which stands for nothing")


_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)
