"""Operations in files of graphs: {"op": name} and the attributes that differ from the usual ones.

Attributes are written by their kind: plain ones as they are, values as `values.py` says, `gen` and `select` as
objects of their own. Whether what was read can be meant is for `verify` to say.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, cast

import msgspec

from ...lang import ops
from ...lang.errors import GraphError, ParameterError
from ...lang.protocol import ConstraintSpec
from ..checks.attributes import OPERATIONS
from ..operations import Apply, Choose, Constant, Generate, Operation, Structure
from . import results as file_results
from . import values as file_values
from .values import Json, expect, members


def written(op: Operation) -> dict[str, Json]:
    """An operation as JSON.

    Raises:
        GraphError: an attribute that no file can hold; the message is to stand behind the place of the node.
    """
    return {"op": type(op).__name__, **_written_fields(op)}


def read(value: dict[str, Json], at: str) -> Operation:
    """JSON → the operation. `value`: without the members that belong to the node.

    Raises:
        GraphError: an unknown operation, or members that it does not have.
    """
    name = value.get("op")
    kind = OPERATIONS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise GraphError(f"{at}.op: unknown operation {name!r}; known are {', '.join(OPERATIONS)}")
    given = {key: member for key, member in value.items() if key != "op"}
    return cast(Operation, _read_fields(kind, given, at))


def _written_fields(owner: Any) -> dict[str, Json]:
    """Fields of a dataclass, without those that have their usual value."""
    kind = type(owner)
    result: dict[str, Json] = {}
    for field in fields(owner):
        value, usual = getattr(owner, field.name), _usual(kind, field)
        if type(value) is not type(usual) or value != usual:
            result[field.name] = _CODECS.get((kind, field.name), _PLAIN)[0](value)
    return result


def _read_fields(kind: type, value: dict[str, Json], at: str) -> Any:
    usual = {field.name: _usual(kind, field) for field in fields(kind)}
    required = {name: object for name, value in usual.items() if value is MISSING}
    given = members(value, at, required, {name: object for name in usual if name not in required})
    made = {
        name: _CODECS.get((kind, name), _PLAIN)[1](given[name], f"{at}.{name}") if name in given else standing
        for name, standing in usual.items()
    }
    if kind is ops.Gen and made["result"] is not None:
        schema = made["constraint"].source if made["constraint"] is not None else ""
        made["result"] = file_results.read(made["result"], schema, f"{at}.result")
    return kind(**made)


def _usual(kind: type, field: Field[Any]) -> Any:
    """What stands for a field that is left out; MISSING when it cannot be."""
    if (kind, field.name) == (ops.Select, "choices"):
        return ()  # they are inputs of the node
    return field.default if field.default_factory is MISSING else field.default_factory()


# ------------------------------------------------------------------------------------------ attributes


def _same(value: Any) -> Json:
    return value


def _read_plain(value: Json, at: str) -> Any:
    if isinstance(value, list | dict):
        raise GraphError(f"{at}: expected text, a number, true, false or null")
    return value


def _read_tuple(value: Json, at: str) -> tuple[Any, ...]:
    return tuple(file_values.read(member, at) for member in expect(value, list, at))


def _written_tuple(value: tuple[Any, ...]) -> Json:
    return [file_values.written(member) for member in value]


def _written_sampling(options: Mapping[str, Any]) -> Json:
    return {name: _written_parameter(value) for name, value in options.items()}


def _written_parameter(value: Any) -> Json:
    match value:
        case tuple():
            return list(value)
        case dict():
            return {str(token): bias for token, bias in value.items()}
        case _:
            return value


def _read_sampling(value: Json, at: str) -> dict[str, Any]:
    return {name: _read_parameter(name, member, f"{at}.{name}") for name, member in expect(value, dict, at).items()}


def _read_parameter(name: str, value: Json, at: str) -> Any:
    if name in ("stop", "stop_regex", "stop_token_ids"):
        return tuple(_read_plain(member, at) for member in expect(value, list, at))
    if name == "logit_bias":
        bias = expect(value, dict, at)
        if not all(re.fullmatch("[0-9]{1,18}", token) for token in bias):
            raise GraphError(f"{at}: expected ids of tokens as keys")
        return {int(token): _read_plain(number, at) for token, number in bias.items()}
    return _read_plain(value, at)


def _read_constraint(value: Json, at: str) -> ConstraintSpec | None:
    try:
        return msgspec.convert(value, ConstraintSpec | None)
    except (msgspec.ValidationError, ParameterError) as error:
        raise GraphError(f"{at}: {error}") from None


def _read_later(value: Json, at: str) -> Json:
    return value


_Codec = tuple[Callable[[Any], Json], Callable[[Json, str], Any]]
_PLAIN: _Codec = (_same, _read_plain)
_SAMPLING: _Codec = (_written_sampling, _read_sampling)
_CODECS: Mapping[tuple[type, str], _Codec] = {
    (Generate, "gen"): (_written_fields, lambda value, at: _read_fields(ops.Gen, expect(value, dict, at), at)),
    (Generate, "defaults"): _SAMPLING,
    (Generate, "tags"): (_written_tuple, _read_tuple),
    (Choose, "select"): (_written_fields, lambda value, at: _read_fields(ops.Select, expect(value, dict, at), at)),
    (Choose, "defaults"): _SAMPLING,
    (Constant, "value"): (file_values.written, file_values.read),
    (Apply, "arguments"): (_written_tuple, _read_tuple),
    (Structure, "template"): (file_values.written, file_values.read),
    (ops.Gen, "options"): _SAMPLING,
    (ops.Gen, "constraint"): (msgspec.to_builtins, _read_constraint),
    (ops.Gen, "result"): (file_results.written, _read_later),  # what stands in its constraint is needed for it
}
