"""Python types as constraints: a type → the JSON Schema of its values, and the way back from text to an object.

    class | dataclass | TypedDict | NamedTuple     a closed object, keys in the order of the fields
    Pydantic model | msgspec.Struct                its own schema, closed unless it allows extra keys
    Enum | Literal                                 one of the values
    int float bool str None | Any                  themselves
    date datetime time UUID                        a string in that format
    list tuple set frozenset dict[str, T]          arrays and objects
    A | B | None                                   the first that fits
    Annotated[T, Ge(0), MaxLen(8), Field(...)]     limits of annotated-types, Pydantic or msgspec.Meta, by their names

Pydantic is recognised by what its models can do and never imported here. `msgspec.json.schema` is not used beyond its
own structs: it sorts the keys of a TypedDict, leaves objects open, drops limits of annotated-types and names of keys,
makes an array of a NamedTuple, and refuses enums of mixed values and unions of two classes.
"""

import dataclasses
import datetime
import enum
import functools
import json
import re
import types
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import msgspec.inspect

from . import forms
from .errors import ParameterError, shown
from .forms import (
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
    Schema,
)

Annotation = Any  # a type as it stands in an annotation: a class, list[int], Literal["a"], int | None

LIMITS = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern")


def _date_time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text.upper())  # RFC 3339 allows "t" and "z"


def _time(text: str) -> datetime.time:
    return datetime.time.fromisoformat(text.upper())


def _integer(number: int | float) -> int:
    if int(number) != number:
        raise ValueError("a fraction")
    return int(number)  # 1.0 is an integer of JSON Schema


SCALARS: Mapping[Annotation, Scalar] = {
    int: Scalar({"type": "integer"}, (int, float), _integer),
    float: Scalar({"type": "number"}, (int, float), float),
    bool: Scalar({"type": "boolean"}, (bool,)),
    str: Scalar({"type": "string"}, (str,)),
    type(None): Scalar({"type": "null"}, (type(None),)),
    datetime.datetime: Scalar({"type": "string", "format": "date-time"}, (str,), _date_time),
    datetime.date: Scalar({"type": "string", "format": "date"}, (str,), datetime.date.fromisoformat),
    datetime.time: Scalar({"type": "string", "format": "time"}, (str,), _time),
    uuid.UUID: Scalar({"type": "string", "format": "uuid"}, (str,), uuid.UUID),
}
_ARRAYS: Mapping[Annotation, Callable[[Sequence[Any]], Any]] = {
    list: list,
    Sequence: list,
    set: set,
    frozenset: frozenset,
}


@dataclass(frozen=True, slots=True)
class Typed:
    """A type as a constraint."""

    name: str  # for messages
    schema: str  # JSON text
    form: Form

    @property
    def judges(self) -> bool:
        """Returns whether values of the schema may be refused: by code of a class, or as a date in no calendar."""
        return forms.judges(self.form)

    def parse(self, text: str) -> Any:
        """Text → object.

        Raises:
            ValueError: it is no JSON, not of this form, or the class itself refuses the values.
        """
        return self.form.read(json.loads(text), "$")


def typed(annotation: Annotation) -> Typed:
    """A type → its schema and the way back.

    Raises:
        ParameterError: a type that has no JSON form; the message says which do.
    """
    try:
        return _remembered(annotation)
    except TypeError:  # not hashable
        return _typed(annotation)


def _typed(annotation: Annotation) -> Typed:
    book = _Book()
    form = book.form_of(annotation)
    definitions = {name: definition.schema for name, definition in book.forms.items()}
    schema = form.schema | ({"$defs": definitions | book.borrowed} if definitions or book.borrowed else {})
    return Typed(name_of(annotation), json.dumps(schema, ensure_ascii=False, allow_nan=False), form)


_remembered = functools.lru_cache(maxsize=256)(_typed)


def name_of(annotation: Annotation) -> str:
    """Names a type as the user wrote it, without modules: "Person", "list[int]", "Literal['a']"."""
    plain = isinstance(annotation, type) and not typing.get_args(annotation)
    if not plain and typing.get_origin(annotation) is None:
        return shown(annotation)
    return annotation.__name__ if plain else re.sub(r"\b[\w.]+\.(?=\w)", "", str(annotation))


class _Book:
    """The definitions of one schema.

    Attributes:
        forms: of classes, by the name of their definition.
        borrowed: definitions that schemas of other libraries brought with them.
    """

    def __init__(self) -> None:
        self.forms: dict[str, Form] = {}
        self.borrowed: dict[str, Schema] = {}
        self._names: dict[type, str] = {}

    def form_of(self, annotation: Annotation) -> Form:
        """Raises ParameterError for a type without a JSON form."""
        annotation = _unwrapped(annotation)
        if annotation is Any or annotation is object:
            return Anything()
        if annotation is None:
            return SCALARS[type(None)]
        origin: Any = typing.get_origin(annotation)
        arguments = typing.get_args(annotation)
        if origin is typing.Annotated:
            return self._annotated(arguments[0], arguments[1:])
        if origin is typing.Literal:
            return Enumeration(tuple((_scalar(value), value) for value in arguments))
        if origin in (typing.Union, types.UnionType):
            return Either(tuple(self.form_of(argument) for argument in arguments))
        if origin is not None or annotation in (list, tuple, set, frozenset, dict):
            return self._container(annotation, origin or annotation, arguments)
        if annotation in SCALARS:
            return SCALARS[annotation]
        if isinstance(annotation, type):
            return self._class(annotation)
        raise _no_form(annotation)

    def _annotated(self, annotation: Annotation, metadata: Sequence[object]) -> Form:
        form = self.form_of(annotation)
        limits = _limits(metadata)
        return form.narrowed(limits) if limits else form

    def _container(self, annotation: Annotation, origin: Annotation, arguments: tuple[Annotation, ...]) -> Form:
        if origin in _ARRAYS:
            unique = {"uniqueItems": True} if origin in (set, frozenset) else {}
            return Array(self.form_of(*arguments) if arguments else Anything(), _ARRAYS[origin], unique)
        if origin is tuple:
            if len(arguments) == 2 and arguments[1] is Ellipsis:
                return Array(self.form_of(arguments[0]), tuple)
            if not arguments:  # bare; tuple[()] has none either, and its own spelling
                return Row(()) if annotation is not tuple else Array(Anything(), tuple)
            return Row(tuple(self.form_of(argument) for argument in arguments))
        if origin in (dict, Mapping):
            key, value = map(self.form_of, arguments) if arguments else (SCALARS[str], Anything())
            if not _is_of_strings(key):
                raise ParameterError(f"{annotation}: the keys of a JSON object are strings; write dict[str, ...]")
            return Dictionary(key, value)
        raise _no_form(annotation)

    def _class(self, cls: type) -> Form:
        if issubclass(cls, enum.Enum):
            return Enumeration(tuple((_scalar(member.value), member) for member in cls))
        if cls not in self._names:
            name = self._names[cls] = self._new_name(cls)
            found = _library_schema(cls, name)
            if found is not None:
                self.borrowed |= found.definitions
                self.forms[name] = Foreign(found.schema, found.make, found.judges, cls)
            else:
                self.forms[name] = self._object(cls)
        return Reference(self._names[cls], self.forms)

    def _new_name(self, cls: type) -> str:
        base = cls.__name__ if cls.__name__.isascii() and cls.__name__.isidentifier() else "Type"
        taken = set(self._names.values())
        return next(name for name in (base, *(f"{base}{n}" for n in range(2, len(taken) + 3))) if name not in taken)

    def _object(self, cls: type) -> Object:
        if dataclasses.is_dataclass(cls):
            required = {
                field.name: field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
                for field in dataclasses.fields(cls)
                if field.init
            }
            return self._fields(cls, required, lambda values: cls(**values))
        if typing.is_typeddict(cls):
            needed: frozenset[str] = cls.__dict__["__required_keys__"]
            # The class itself does not see NotRequired in annotations that are strings.
            marks = {key: typing.get_origin(hint) for key, hint in _hints(cls).items()}
            by_mark: dict[Any, bool] = {typing.Required: True, typing.NotRequired: False}
            return self._fields(cls, {key: by_mark.get(mark, key in needed) for key, mark in marks.items()}, dict)
        if issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_field_defaults"):
            required = {key: key not in cls._field_defaults for key in cls._fields}
            return self._fields(cls, required, lambda values: cls(**values))
        raise _no_form(cls)

    def _fields(self, cls: type, required: Mapping[str, bool], build: Callable[[dict[str, Any]], Any]) -> Object:
        hints = _hints(cls)
        if any(isinstance(hint, dataclasses.InitVar) for hint in hints.values()):
            raise ParameterError(f"{cls.__name__} has an InitVar, which is no field; make it a field")
        fields = tuple(Field(name, self.form_of(hints.get(name, Any)), needed) for name, needed in required.items())
        return Object(cls.__name__, fields, build, _has_own_code(cls))


def _hints(cls: type) -> dict[str, Any]:
    """Annotations of a class. Inside of a function it is not found by its name from outside, but it may name itself."""
    try:
        return typing.get_type_hints(cls, localns={cls.__name__: cls}, include_extras=True)
    except (NameError, TypeError) as error:
        raise ParameterError(
            f"the annotations of {cls.__name__} cannot be looked up ({error}); define the classes they name at "
            "the top of a module"
        ) from error


def _has_own_code(cls: type) -> bool:
    """Returns whether making an object runs code of the class itself, not only of `dataclass` and `NamedTuple`."""
    made_by = ("__post_init__", "__new__", "__init__", "__setattr__")
    functions = [vars(base)[name] for base in cls.__mro__[:-1] for name in made_by if name in vars(base)]
    codes = [getattr(getattr(function, "__func__", function), "__code__", None) for function in functions]
    return any(code is not None and not code.co_filename.startswith("<") for code in codes)


def _is_of_strings(form: Form) -> bool:
    match form:
        case Enumeration(members):
            return all(isinstance(value, str) for value, _ in members)
        case Scalar(schema):
            return bool(schema["type"] == "string")
        case _:
            return False


def _unwrapped(annotation: Annotation) -> Annotation:
    """Unwraps type aliases and new types, and the marks of required and optional keys."""
    while True:
        origin: Any = typing.get_origin(annotation)
        if isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif origin in (typing.Required, typing.NotRequired):
            annotation = typing.get_args(annotation)[0]
        elif type(annotation).__name__ == "TypeAliasType":  # `type X = ...` of Python 3.12
            annotation = annotation.__value__
        else:
            return annotation


def _limits(metadata: Sequence[object]) -> dict[str, Any]:
    """Collects the limits in the metadata of an Annotated type, by the names of annotated-types; ignores the rest."""
    found: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, str | bytes | type):
            continue
        nested = getattr(item, "metadata", None)  # of Pydantic's Field
        if isinstance(nested, list | tuple):
            found |= _limits(nested)
        for name in LIMITS:
            limit = getattr(item, name, None)
            limit = limit.pattern if isinstance(limit, re.Pattern) else limit
            if isinstance(limit, int | float | str) and not isinstance(limit, bool):
                found[name] = limit
            elif limit is not None and not callable(limit):
                raise ParameterError(f"Annotated[..., {name}={shown(limit)}]: JSON has no such limit; write a number")
    return found


def _scalar(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, str | bool | int | float):
        return _plain(value)
    raise ParameterError(
        f"{shown(value)} is no JSON value; write strings, numbers, booleans or None in a Literal or Enum"
    )


def _plain(value: str | int | float | bool | None) -> str | int | float | bool | None:
    """Converts a value to its base type: members of IntEnum and StrEnum equal their values in another type."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    return None


def _no_form(annotation: Annotation) -> ParameterError:
    return ParameterError(
        f"{name_of(annotation)} cannot be generated as JSON; write a dataclass, TypedDict, NamedTuple, Pydantic model, "
        "Enum, Literal, int, float, bool, str, None, datetime, date, time, UUID, list, tuple, set, dict[str, ...], a "
        "union of these, or a JSON Schema as a dict"
    )


@dataclass(frozen=True, slots=True)
class ClassSchema:
    """The schema that a library has for one of its classes, and how it makes objects.

    Attributes:
        definitions: schemas it refers to, by names that begin with the class's.
        judges: whether `make` may refuse a value that satisfies the schema.
    """

    schema: Schema
    definitions: dict[str, Schema]
    make: Callable[[Any], Any]  # parsed JSON → object
    judges: bool


def _library_schema(cls: type, name: str) -> ClassSchema | None:
    """Asks the library of a class for its schema; None for a class of no such library. `name`: of its definition.

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
    named = {f"{name}.{key}": _closed(definition) for key, definition in definitions.items()}
    return ClassSchema(_closed(schema), named, make, judges)


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
_STATED_BY_PYDANTIC = (
    *("any", "bool", "default", "definition-ref", "definitions", "dict", "enum", "float", "int", "list", "literal"),
    *("model", "model-field", "model-fields", "none", "nullable", "set", "str", "tagged-union", "tuple", "typed-dict"),
    *("typed-dict-field", "union"),
)
_NO_SCHEMAS = ("computed_fields", "config", "default", "expected", "members", "metadata", "serialization")
_CHANGE_TEXTS = ("str_max_length", "str_min_length", "str_strip_whitespace")  # of a configuration


def _pydantic_judges(cls: type, validate: Any) -> bool:  # Any: a method of the class
    """Returns whether a model may refuse values of its schema. True also for classes with methods of these names."""
    core = getattr(cls, "__pydantic_core_schema__", None)
    if not isinstance(core, Mapping) or not str(getattr(validate, "__module__", "")).startswith("pydantic."):
        return True
    return any(map(_asks_for_more, _core_schemas(core)))


def _core_schemas(core: object) -> Iterator[Mapping[str, Any]]:
    """Yields all core schemas inside of one, itself included; recursive classes are there by reference."""
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


def _asks_for_more(core: Mapping[str, Any]) -> bool:
    """Returns whether a core schema demands more than its JSON Schema; nested schemas are not examined."""
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
            return kind not in _STATED_BY_PYDANTIC


_STATED_BY_MSGSPEC = (
    *(msgspec.inspect.AnyType, msgspec.inspect.BoolType, msgspec.inspect.DictType, msgspec.inspect.EnumType),
    *(msgspec.inspect.Field, msgspec.inspect.FloatType, msgspec.inspect.IntType, msgspec.inspect.ListType),
    *(msgspec.inspect.LiteralType, msgspec.inspect.Metadata, msgspec.inspect.NoneType, msgspec.inspect.SetType),
    *(msgspec.inspect.StrType, msgspec.inspect.StructType, msgspec.inspect.TupleType, msgspec.inspect.UnionType),
    msgspec.inspect.VarTupleType,
)


def _msgspec_judges(cls: type) -> bool:
    """Returns whether a struct may refuse values of its schema."""
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
            case found if not isinstance(found, _STATED_BY_MSGSPEC):
                return True
            case found:
                parts = [getattr(found, name, ()) for name in ("item_type", "item_types", "types")]
                waiting += [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
    return False


_ONE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "if", "then", "else", "not")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def _closed(schema: Any) -> Any:  # Any: a schema is a dict or a bool
    """Closes objects of a schema that do not mention further keys: a class ignores such keys at best."""
    if not isinstance(schema, dict):
        return schema
    result: Schema = {}
    for key, value in schema.items():
        if key in _ONE:
            result[key] = _closed(value)
        elif key in _MANY and isinstance(value, list):
            result[key] = [_closed(item) for item in value]
        elif key in _NAMED and isinstance(value, dict):
            result[key] = {name: _closed(item) for name, item in value.items()}
        else:
            result[key] = value
    if "properties" in result and "additionalProperties" not in result:
        result["additionalProperties"] = False
    return result
