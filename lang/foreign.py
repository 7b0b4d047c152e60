"""Classes of other libraries that know their own JSON Schema: Pydantic models, by what they can do, and msgspec
structs.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import msgspec.inspect

from .errors import ParameterError
from .forms import Schema


@dataclass(frozen=True, slots=True)
class Found:
    """What a library says of a class.

    Attributes:
        definitions: schemas it refers to, by names that begin with the class's.
        judges: whether `make` may refuse a value that satisfies the schema.
    """

    schema: Schema
    definitions: dict[str, Schema]
    make: Callable[[Any], Any]  # parsed JSON → object
    judges: bool


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
            make, judges = _validator(validate), _pydantic_judges(cls, validate)
        elif issubclass(cls, msgspec.Struct):
            (schema,), definitions = msgspec.json.schema_components([cls], ref_template=f"#/$defs/{name}.{{name}}")
            make, judges = _converter(cls), _msgspec_judges(cls)
        else:
            return None
    except Exception as error:  # each library has its own errors, and the user needs to see them
        raise ParameterError(f"{cls.__name__} has no JSON Schema: {error}") from error
    named = {f"{name}.{key}": closed(definition) for key, definition in definitions.items()}
    return Found(closed(schema), named, make, judges)


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


# Kinds of Pydantic's core schemas whose JSON Schema says all that they ask for. Functions and dates are not among them.
_PLAIN = (
    *("any", "bool", "default", "definition-ref", "definitions", "dict", "enum", "float", "int", "list", "literal"),
    *("model", "model-field", "model-fields", "none", "nullable", "set", "str", "tagged-union", "tuple", "typed-dict"),
    *("typed-dict-field", "union"),
)
_NO_SCHEMAS = ("computed_fields", "config", "default", "expected", "members", "metadata", "serialization")
_CHANGE_TEXTS = ("str_max_length", "str_min_length", "str_strip_whitespace")  # of a configuration


def _pydantic_judges(cls: type, validate: Any) -> bool:  # Any: a method of the class
    """True also of a class that only has the methods of Pydantic, or says nothing of what it does."""
    core = getattr(cls, "__pydantic_core_schema__", None)
    if not isinstance(core, Mapping) or not str(getattr(validate, "__module__", "")).startswith("pydantic."):
        return True
    return any(map(_has_code, _core_schemas(core)))


def _core_schemas(core: object) -> Iterator[Mapping[str, Any]]:
    """All core schemas inside of one, itself included; classes that contain themselves are there by reference."""
    waiting = [core]
    while waiting:
        match waiting.pop():
            case Mapping() as found:
                if isinstance(found.get("type"), str):
                    yield found
                    waiting += [value for key, value in found.items() if key not in _NO_SCHEMAS]
                else:  # of names
                    waiting += found.values()
            case list() | tuple() as found:
                waiting += found


def _has_code(core: Mapping[str, Any]) -> bool:
    """Whether a core schema asks for more than the JSON Schema of it, not looking inside."""
    match core["type"]:
        case "model":
            own = core.get("post_init") and getattr(core["cls"].model_post_init, "__name__", "")
            changed = any(core.get("config", {}).get(key) for key in _CHANGE_TEXTS)
            return bool(core.get("custom_init") or changed or (own and own != "init_private_attributes"))
        case "dict":
            return bool(core.get("keys_schema", {}).get("type", "any") not in ("any", "str"))
        case "str":
            return bool(core.get("strip_whitespace"))
        case "tagged-union":
            return callable(core["discriminator"])
        case kind:
            return kind not in _PLAIN


_PLAIN_OF_MSGSPEC = (
    *(msgspec.inspect.AnyType, msgspec.inspect.BoolType, msgspec.inspect.DictType, msgspec.inspect.EnumType),
    *(msgspec.inspect.Field, msgspec.inspect.FloatType, msgspec.inspect.IntType, msgspec.inspect.ListType),
    *(msgspec.inspect.LiteralType, msgspec.inspect.Metadata, msgspec.inspect.NoneType, msgspec.inspect.SetType),
    *(msgspec.inspect.StrType, msgspec.inspect.StructType, msgspec.inspect.TupleType, msgspec.inspect.UnionType),
    msgspec.inspect.VarTupleType,
)


def _msgspec_judges(cls: type) -> bool:
    waiting, seen = [msgspec.inspect.type_info(cls)], set[type]()
    while waiting:
        match waiting.pop():
            case msgspec.inspect.StructType(found, fields):
                if hasattr(found, "__post_init__"):
                    return True
                waiting += [field.type for field in fields] if found not in seen else []
                seen.add(found)
            case msgspec.inspect.DictType(key, value):
                if type(key) is not msgspec.inspect.StrType:
                    return True
                waiting += [key, value]
            case msgspec.inspect.Metadata(inner):
                waiting.append(inner)
            case found if not isinstance(found, _PLAIN_OF_MSGSPEC):
                return True
            case found:
                parts = [getattr(found, name, ()) for name in ("item_type", "item_types", "types")]
                waiting += [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
    return False


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
