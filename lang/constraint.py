"""Constraints of a `gen`: its arguments → the spec that travels to the backend, and the way from text to an object.

Only what can be seen without a compiler is checked here; the backend refuses the rest before it generates.
"""

import enum
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from . import checks
from .errors import ConstraintError, ParameterError, UmbelError, shown
from .protocol import ConstraintEngine, ConstraintKind, ConstraintSpec, JsonKeyOrder, JsonWhitespace
from .result import Members, Result
from .typed import name_of, typed

# An open end: after a digit a model has to be able to say that the number is over, and few say so with end-of-sequence.
# The blank stops the text and is not part of it. At most 19 digits, so that no number goes on without end.
ENDINGS = (" ", "\n")
INTEGER = r"(0|-?[1-9][0-9]{0,18})[ \n]?"
NUMBER = r"-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,17})?[ \n]?"
OPEN_ENDED = frozenset({INTEGER, NUMBER})

MAX_DEPTH = 128  # of a schema's nesting; our own automata take less
MAX_SOURCE = 1 << 20  # characters of a regex, schema or grammar; compilers and providers take less
# A rule of a GBNF grammar, at the beginning of a line: `root ::= ...`. Lark's rules have one colon.
_GBNF = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)

KINDS = ("regex", "json_schema", "dtype", "ebnf", "grammar", "choices")  # at most one of them in a gen


@dataclass(frozen=True, slots=True)
class Demand:
    """A constraint as a program gave it. `stops`: stop strings that belong to it."""

    spec: ConstraintSpec
    result: Result
    stops: tuple[str, ...] = ()


def _check_one(given: Mapping[str, Any]) -> None:
    kinds = [name for name in KINDS if given.get(name) is not None]
    if len(kinds) > 1:
        raise ParameterError(f"gen() takes one constraint, got {kinds[0]}= and {kinds[1]}=; remove one of them")


def demand_of(given: Mapping[str, Any]) -> Demand | None:
    """Arguments of `gen` → its demand, or None when there is none.

    Args:
        given: `KINDS` (choices are no demand of their own), json_whitespace, json_key_order,
            allow_unenforced and constraint_engine;
            None means "not given".

    Raises:
        ParameterError: two constraints, an argument of a wrong type, or an option without the constraint it belongs to.
        ConstraintError: a schema that is no JSON.
    """
    _check_one(given)
    demand = _demand(given)
    options: dict[str, Any] = {}
    for name, field, belongs_to, known in (
        ("json_whitespace", "whitespace", "json_schema", get_args(JsonWhitespace)),
        ("json_key_order", "key_order", "json_schema", get_args(JsonKeyOrder)),
        ("allow_unenforced", "allow_unenforced", "json_schema", None),
        ("constraint_engine", "engine", "a constraint", get_args(ConstraintEngine)),
    ):
        value = given.get(name)
        if value is None:
            continue
        if demand is None or (belongs_to == "json_schema" and demand.spec.kind != "json_schema"):
            raise ParameterError(f"{name}={shown(value)} needs {belongs_to}= to apply to; remove it, or give one")
        options[field] = checks.switch(name, value) if known is None else checks.one_of(name, value, known)
    if demand is None or not options:
        return demand
    spec = ConstraintSpec(demand.spec.kind, demand.spec.source, **options)
    return Demand(spec, demand.result, demand.stops)


def _demand(given: Mapping[str, Any]) -> Demand | None:
    if (regex := given.get("regex")) is not None:
        return Demand(_spec("regex", _source("regex", regex, r'r"[a-z]+"')), Result("text", str))
    if (schema := given.get("json_schema")) is not None:
        return _of_schema(schema)
    if (dtype := given.get("dtype")) is not None:
        return _read_type("dtype", dtype, _of_type)
    for name in ("ebnf", "grammar"):
        if (grammar := given.get(name)) is not None:
            source = _source(name, grammar, '\'start: "yes" | "no"\'')
            return Demand(_spec("gbnf" if _GBNF.search(source) else "lark", source), Result("text", str))
    return None


def _spec(kind: ConstraintKind, source: str) -> ConstraintSpec:
    if len(source) > MAX_SOURCE:
        raise ConstraintError(f"{kind}: {len(source)} characters; write at most {MAX_SOURCE}")
    try:
        source.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConstraintError(
            f"{kind}: the character at {error.start} is half of a surrogate pair, which no text holds; write the "
            "whole character"
        ) from None
    return ConstraintSpec(kind, source)


def _source(name: str, value: object, example: str) -> str:
    if isinstance(value, str) and checks.plain(value):
        return checks.plain(value)
    if isinstance(value, re.Pattern):
        raise ParameterError(f"{name}= takes the text of a pattern, without flags; write {name}=pattern.pattern")
    raise ParameterError(f"{name}={shown(value)}; write a non-empty string such as {name}={example}")


# ------------------------------------------------------------------------------------------------- JSON


def _of_schema(schema: object) -> Demand:
    match schema:
        case str():
            return Demand(_spec("json_schema", _checked_json(checks.plain(schema))), Result("JSON", json.loads))
        case bool() | Mapping():
            return Demand(_spec("json_schema", _written(schema)), Result("JSON", json.loads))
        case int() | float() | bytes() | list() | tuple():
            raise ParameterError(
                f"json_schema={shown(schema)}; write a schema as a dict, its JSON text, or a type such as list[int]"
            )
        case _:
            return _read_type("json_schema", schema, _of_json_type)


def _read_type(name: str, annotation: object, read: Callable[[Any], Demand]) -> Demand:
    """Reads a type from any object; looking at it may run code of the object."""
    try:
        return read(annotation)
    except UmbelError:
        raise
    except Exception as error:  # of the object's own code, or it contains itself
        raise ParameterError(
            f"{name}={shown(annotation)} cannot be read as a type ({type(error).__name__}: {error}); write int, float, "
            "bool, str, or a type such as list[int]"
        ) from error


def _of_json_type(annotation: object) -> Demand:
    known = typed(annotation)
    return Demand(_spec("json_schema", known.schema), Result(known.name, known.parse, known.judges))


def _checked_json(text: str) -> str:
    if len(text) > MAX_SOURCE:
        raise ConstraintError(f"json_schema has {len(text)} characters; write at most {MAX_SOURCE}")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"json_schema is no JSON text: {error or 'nested too deep'}") from None
    if isinstance(schema, dict):
        _check_keys(schema, "#")
    if not isinstance(schema, dict | bool):
        raise ConstraintError(f"json_schema={shown(text)}; a JSON Schema is an object, true or false")
    return text


def _written(schema: bool | Mapping[Any, Any]) -> str:
    try:
        _check_keys(schema, "#")
        return json.dumps(dict(schema) if isinstance(schema, Mapping) else schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"json_schema cannot be written as JSON: {error}") from None
    except RecursionError:
        raise ConstraintError("json_schema is nested too deep, or contains itself") from None
    except UmbelError:
        raise
    except Exception as error:  # of the mapping's own code
        raise ConstraintError(f"json_schema cannot be read: {type(error).__name__}: {error}") from error


def _check_keys(value: object, path: str, depth: int = MAX_DEPTH) -> None:
    """json.dumps would turn other keys into strings and say nothing. Compilers walk a schema level by level."""
    if depth == 0:
        raise ConstraintError(f"json_schema is nested more than {MAX_DEPTH} deep, or contains itself; flatten it")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {shown(key)} at {path} is no string")
            _check_keys(inner, f"{path}/{key}", depth - 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner, path, depth - 1)


# ------------------------------------------------------------------------------------------------ types


_NAMED_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


def _of_type(dtype: Any) -> Demand:  # Any: whatever stands in an annotation
    if isinstance(dtype, str):
        named = _NAMED_TYPES.get(checks.plain(dtype))
        if named is None:
            raise ParameterError(f"dtype={shown(dtype)}; write int, float, bool, str, or a type such as list[int]")
        return _of_type(named)
    if dtype is int:
        return Demand(_spec("regex", INTEGER), Result("int", int), ENDINGS)
    if dtype is float:
        return Demand(_spec("regex", NUMBER), Result("float", float), ENDINGS)
    if dtype is bool:  # as Python writes it, and as SGLang does
        return _of_members(dtype, [(True, True), (False, False)])
    if typing.get_origin(dtype) is typing.Literal:
        return _of_members(dtype, [(value, value) for value in typing.get_args(dtype)])
    if isinstance(dtype, type) and issubclass(dtype, enum.Enum):
        return _of_members(dtype, [(member.value, member) for member in dtype])
    return _of_json_type(dtype)


def _of_members(dtype: Any, members: list[tuple[Any, Any]]) -> Demand:
    """One of some values, written without quotes: the text of (value, object) is str(value)."""
    named: dict[str, Any] = {}
    for value, member in members:
        text = str(value)
        if not isinstance(value, str | int | float | None) or not text or text in named:
            why = "written like another one" if text in named else "neither text nor a number"
            raise ParameterError(
                f"dtype={name_of(dtype)}: {shown(value)} is {why}; write json_schema={name_of(dtype)}, which has quotes"
            )
        named[text] = member
    if not named:
        raise ParameterError(f"dtype={name_of(dtype)} has no members; give it at least one")
    choices = json.dumps(list(named), ensure_ascii=False)
    return Demand(_spec("choices", choices), Result(name_of(dtype), Members(named).parse))


def alternatives(texts: Iterable[str]) -> str:
    """The regular expression of exactly these texts."""
    return "|".join(re.sub(r"[\\.^$*+?{}\[\]|()]", r"\\\g<0>", text) for text in texts)
