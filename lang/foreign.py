"""Classes of other libraries that know their own JSON Schema: Pydantic models, by what they can do, and msgspec
structs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from .errors import ParameterError
from .forms import Schema


@dataclass(frozen=True, slots=True)
class Found:
    """What a library says of a class. `definitions`: schemas it refers to, by names that begin with the class's."""

    schema: Schema
    definitions: dict[str, Schema]
    make: Callable[[Any], Any]  # parsed JSON → object


def foreign(cls: type, name: str) -> Found | None:
    """A class that a library describes, or None. `name`: of its definition among others.

    Raises:
        ParameterError: the library itself has no schema for the class.
    """
    describe = getattr(cls, "model_json_schema", None)
    validate = getattr(cls, "model_validate_json", None)
    make: Callable[[Any], Any]
    try:
        if callable(describe) and callable(validate):
            schema = dict(describe(ref_template=f"#/$defs/{name}.{{model}}"))
            definitions = schema.pop("$defs", {})
            make = _validator(validate)
        elif issubclass(cls, msgspec.Struct):
            (schema,), definitions = msgspec.json.schema_components([cls], ref_template=f"#/$defs/{name}.{{name}}")
            make = _converter(cls)
        else:
            return None
    except Exception as error:  # each library has its own errors, and the user needs to see them
        raise ParameterError(f"{cls.__name__} has no JSON Schema: {error}") from error
    named = {f"{name}.{key}": closed(definition) for key, definition in definitions.items()}
    return Found(closed(schema), named, make)


def _validator(validate: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A strict model takes a date as a string from JSON text, and from nothing else."""
    return lambda value: validate(json.dumps(value))


def _converter(cls: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:  # Any: parsed JSON
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error

    return convert


_ONE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "if", "then", "else", "not")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def closed(schema: Any) -> Any:  # Any: a schema is a dict or a bool
    """The same schema, with objects that say nothing of further keys closed to them: a class ignores them at best."""
    if not isinstance(schema, dict):
        return schema
    result: Schema = {}
    for key, value in schema.items():
        if key in _ONE:
            result[key] = closed(value)
        elif key in _MANY and isinstance(value, list):
            result[key] = [closed(item) for item in value]
        elif key in _NAMED and isinstance(value, dict):
            result[key] = {name: closed(item) for name, item in value.items()}
        else:
            result[key] = value
    if "properties" in result and "additionalProperties" not in result:
        result["additionalProperties"] = False
    return result
