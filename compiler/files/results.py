"""Writes and reads result types: names of readers that are part of umbel, and never a class.

    "text"  "json"  "int"  "float"
    {"members": [[text, value], ..]}                         Literal and bool: one of some values
    {"typed": form, "definitions": {name: form}}             what `lang.typed` makes of types

Forms: "any", the scalars by name, and {"enum": [value, ..]}, {"array": form, "as": "list"}, {"row": [form, ..]},
{"dictionary": [key form, value form]}, {"either": [form, ..]}, {"object": [[name, form, required], ..], "name": ..}
(a TypedDict, which is a dict), {"reference": name}. Limits of Annotated types are not written: the constraint has them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from ...lang.errors import GraphError
from ...lang.forms import (
    Anything,
    Array,
    Dictionary,
    Either,
    Enumeration,
    Field,
    Foreign,
    Form,
    Object,
    Reference,
    Row,
    Scalar,
)
from ...lang.result import Members, Result
from ...lang.typed import SCALARS, Typed
from ..operations import MAX_NESTING
from . import values as file_values
from .values import Json, expect, members

_PARSERS: Mapping[str, Callable[[str], Any]] = {"text": str, "json": json.loads, "int": int, "float": float}
_SCALARS: Mapping[str, Scalar] = {
    "none" if kind is type(None) else kind.__name__: scalar for kind, scalar in SCALARS.items()
}
_ARRAYS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def written(result: Result) -> Json:
    """Writes a result as JSON.

    Raises:
        GraphError: it makes objects of a class of the user's; the message says what to write instead.
    """
    return {"wanted": result.wanted, "reader": _written_reader(result)}


def _written_reader(result: Result) -> Json:
    if result.check is not None:
        raise GraphError("its validate= is a function of your own, which a file does not hold; leave it away")
    for name, parser in _PARSERS.items():
        if result.parse is parser:
            return name
    match getattr(result.parse, "__self__", None):
        case Members(named):
            return {"members": [[text, _written_member(member)] for text, member in named.items()]}
        case Typed(_, _, form):
            definitions: dict[str, Json] = {}
            whole = _written_form(form, definitions)
            return {"typed": whole, "definitions": definitions}
        case _:
            raise GraphError(f"its result, {result.wanted}, is made by a function of your own; leave the result away")


def _written_member(member: Any) -> Json:
    if isinstance(member, Enum):
        raise GraphError(
            f"its result is a member of your class {type(member).__name__}; write "
            f"dtype=Literal[{', '.join(repr(other.value) for other in type(member))}]"
        )
    return file_values.written(member)


def _written_form(form: Form, definitions: dict[str, Json], depth: int = 0) -> Json:
    if depth > MAX_NESTING:
        raise GraphError(f"the type of its result is nested deeper than {MAX_NESTING}")
    match form:
        case Anything():
            return "any"
        case Scalar(_, accepts, convert):
            return next(
                name for name, known in _SCALARS.items() if known.convert is convert and known.accepts == accepts
            )
        case Enumeration(pairs):
            return {"enum": [_written_member(member) for _, member in pairs]}
        case Array(item, build):
            kind = next(name for name, known in _ARRAYS.items() if known is build)
            return {"array": _written_form(item, definitions, depth + 1), "as": kind}
        case Row(items):
            return {"row": [_written_form(item, definitions, depth + 1) for item in items]}
        case Dictionary(key, value):
            return {"dictionary": [_written_form(part, definitions, depth + 1) for part in (key, value)]}
        case Either(options):
            return {"either": [_written_form(option, definitions, depth + 1) for option in options]}
        case Object(name, fields, build) if build is dict:
            rows = [[field.name, _written_form(field.form, definitions, depth + 1), field.required] for field in fields]
            return {"object": rows, "name": name}
        case Reference(name, forms):
            if name not in definitions:
                definitions[name] = None  # it may contain itself
                definitions[name] = _written_form(forms[name], definitions, depth + 1)
            return {"reference": name}
        case Object(name) | Foreign({"title": str(name)}):
            raise _of_a_class(name)
        case _:
            raise _of_a_class("")


def _of_a_class(name: str) -> GraphError:
    called = f" {name}" if name else ""
    return GraphError(
        f"its result is an object of your class{called}; write a TypedDict with the same keys, or json_schema= with "
        "the schema as a dict, whose results are dicts"
    )


# -------------------------------------------------------------------------------------------- reading


def read(value: Json, schema: str, at: str) -> Result:
    """Reads a result from JSON.

    Args:
        schema: JSON text of the schema that the text satisfies, if any.
        at: where `value` stands, for messages.

    Raises:
        GraphError: it is no result as `written` writes them.
    """
    given = members(value, at, {"wanted": str, "reader": object}, {})
    reader, where = given["reader"], f"{at}.reader"
    if isinstance(reader, str):
        if reader not in _PARSERS:
            raise GraphError(f"{where}: unknown reader {reader!r}; known are {', '.join(_PARSERS)}")
        return Result(given["wanted"], _PARSERS[reader])
    if "members" in expect(reader, dict, where):
        return Result(given["wanted"], Members(_read_members(reader, where)).parse)
    found = members(reader, where, {"typed": object, "definitions": dict}, {})
    forms: dict[str, Form] = {}
    names = found["definitions"].keys()
    whole = _Reading(forms, names).form(found["typed"], f"{where}.typed")
    for name, definition in found["definitions"].items():
        forms[name] = _Reading(forms, names).form(definition, f"{where}.definitions.{name}")
        if isinstance(forms[name], Reference):
            raise GraphError(f"{where}.definitions.{name}: a definition is no reference; write the form itself")
    read_by = Typed(given["wanted"], schema, whole)
    return Result(given["wanted"], read_by.parse, read_by.judges)


def _read_members(reader: Json, at: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for index, pair in enumerate(members(reader, at, {"members": list}, {})["members"]):
        where = f"{at}.members[{index}]"
        if len(expect(pair, list, where)) != 2 or expect(pair[0], str, where) in named:
            raise GraphError(f"{where}: expected a text of its own and its value")
        named[pair[0]] = file_values.read(pair[1], where)
    return named


class _Reading:
    """Forms of one result. `forms` is filled by the caller; `names`: which there will be."""

    def __init__(self, forms: Mapping[str, Form], names: Any) -> None:
        self._forms = forms
        self._names = names

    def form(self, value: Json, at: str) -> Form:
        if isinstance(value, str):
            if value == "any":
                return Anything()
            if value not in _SCALARS:
                raise GraphError(f"{at}: unknown form {value!r}; known are any, {', '.join(_SCALARS)}")
            return _SCALARS[value]
        kind = next((kind for kind in self._KINDS if kind in expect(value, dict, at)), None)
        if kind is None:
            raise GraphError(f"{at}: unknown form; known are {', '.join(self._KINDS)}")
        return self._KINDS[kind](self, value, at)

    def _enumeration(self, value: Json, at: str) -> Form:
        listed = members(value, at, {"enum": list}, {})["enum"]
        plain = [file_values.read(member, at) for member in listed]
        for member in plain:
            if not isinstance(member, str | bool | int | float | None):
                raise GraphError(f"{at}: {member!r} is no scalar of JSON")
        return Enumeration(tuple((member, member) for member in plain))

    def _array(self, value: Json, at: str) -> Form:
        given = members(value, at, {"array": object, "as": str}, {})
        if given["as"] not in _ARRAYS:
            raise GraphError(f"{at}.as: unknown kind {given['as']!r}; known are {', '.join(_ARRAYS)}")
        return Array(self.form(given["array"], f"{at}.array"), _ARRAYS[given["as"]])

    def _row(self, value: Json, at: str) -> Form:
        return Row(self._listed(value, "row", at))

    def _either(self, value: Json, at: str) -> Form:
        return Either(self._listed(value, "either", at))

    def _dictionary(self, value: Json, at: str) -> Form:
        parts = self._listed(value, "dictionary", at)
        if len(parts) != 2:
            raise GraphError(f"{at}.dictionary: expected the form of keys and that of values, found {len(parts)}")
        return Dictionary(*parts)

    def _object(self, value: Json, at: str) -> Form:
        given = members(value, at, {"object": list, "name": str}, {})
        fields: dict[str, Field] = {}
        for index, row in enumerate(given["object"]):
            where = f"{at}.object[{index}]"
            if len(expect(row, list, where)) != 3:
                raise GraphError(f"{where}: expected a name, a form and whether it is required")
            name = expect(row[0], str, where)
            if name in fields:
                raise GraphError(f"{where}: the field {name!r} stands there twice")
            fields[name] = Field(name, self.form(row[1], where), expect(row[2], bool, where))
        return Object(given["name"], tuple(fields.values()), dict)

    def _reference(self, value: Json, at: str) -> Form:
        name = members(value, at, {"reference": str}, {})["reference"]
        if name not in self._names:
            raise GraphError(f"{at}.reference: there is no definition {name!r}")
        return Reference(name, self._forms)

    def _listed(self, value: Json, name: str, at: str) -> tuple[Form, ...]:
        listed = members(value, at, {name: list}, {})[name]
        return tuple(self.form(member, f"{at}.{name}[{index}]") for index, member in enumerate(listed))

    _KINDS: Mapping[str, Callable[["_Reading", Json, str], Form]] = {
        "enum": _enumeration,
        "array": _array,
        "row": _row,
        "dictionary": _dictionary,
        "either": _either,
        "object": _object,
        "reference": _reference,
    }
