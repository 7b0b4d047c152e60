"""Forms: how a JSON value has to look to become an object of a Python type, and how it becomes one.

A form says both, so they cannot disagree: `schema` is what the text is constrained by, `read` turns the parsed text
into the object. `typed.form_of` makes forms of types.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from .errors import ParameterError, shown
from .result import words_of

Schema = dict[str, Any]  # Any: a JSON Schema is whatever JSON it is
Json = Any  # what json.loads gives


class Mismatch(ValueError):
    """A JSON value is not of the form that was asked for. The message says where: "$.items[2]: ..."."""

    def __init__(self, at: str, wanted: str, value: Json) -> None:
        super().__init__(f"{at}: expected {wanted}, found {shown(value)}")


class Form(Protocol):
    """The shape of a JSON value, and the object that it becomes."""

    @property
    def schema(self) -> Schema: ...

    def read(self, value: Json, at: str) -> Any:
        """The object that `value` stands for. `at`: where it stands in the text, for messages.

        Raises:
            Mismatch: it is not of this form.
        """

    def narrowed(self, limits: Mapping[str, Any]) -> "Form":
        """The same with `ge`, `max_length`, ... of an Annotated type.

        Raises:
            ParameterError: a limit that values of this form do not have.
        """


class Plain:
    """A form without limits of its own."""

    __slots__ = ()

    def narrowed(self, limits: Mapping[str, Any]) -> Form:
        raise _no_limits(limits, type(self).__name__.lower())


@dataclass(frozen=True, slots=True)
class Anything(Plain):
    """Any JSON value, as json.loads gives it."""

    schema: Schema = field(default_factory=dict)

    def read(self, value: Json, at: str) -> Any:
        return value


# Limits of Annotated types → keywords of the schema, by the JSON type.
_OF_NUMBERS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_OF_STRINGS = {"min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"}
_OF_ARRAYS = {"min_length": "minItems", "max_length": "maxItems"}
_OF_OBJECTS = {"min_length": "minProperties", "max_length": "maxProperties"}


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number, a string, true, false or null.

    Attributes:
        schema: with its "type".
        accepts: Python types that json.loads gives for it; a bool is no int here.
        convert: parsed value → object; a ValueError says that it is none.
    """

    schema: Schema
    accepts: tuple[type, ...]
    convert: Callable[[Any], Any] = lambda value: value

    def read(self, value: Json, at: str) -> Any:
        wanted = self.schema.get("format") or self.schema["type"]
        if not isinstance(value, self.accepts) or (isinstance(value, bool) and bool not in self.accepts):
            raise Mismatch(at, str(wanted), value)
        try:
            return self.convert(value)
        except (ValueError, OverflowError):
            raise Mismatch(at, str(wanted), value) from None

    def narrowed(self, limits: Mapping[str, Any]) -> Form:
        known = {"integer": _OF_NUMBERS, "number": _OF_NUMBERS, "string": _OF_STRINGS}.get(self.schema["type"], {})
        return replace(self, schema=self.schema | _keywords(limits, known, str(self.schema["type"])))


@dataclass(frozen=True, slots=True)
class Enumeration(Plain):
    """One of some values. `members`: (JSON value, object) in order; values differ by type too: 1 is not true."""

    members: tuple[tuple[Json, Any], ...]

    @property
    def schema(self) -> Schema:
        return {"enum": [value for value, _ in self.members]}

    def read(self, value: Json, at: str) -> Any:
        for candidate, member in self.members:
            if type(candidate) is type(value) and candidate == value:
                return member
        raise Mismatch(at, f"one of {json.dumps(self.schema['enum'], ensure_ascii=False)}", value)


@dataclass(frozen=True, slots=True)
class Array:
    """Values of one form. `build`: list, tuple, set or frozenset of them."""

    item: Form
    build: Callable[[Sequence[Any]], Any] = list
    keywords: Schema = field(default_factory=dict)

    @property
    def schema(self) -> Schema:
        return {"type": "array", "items": self.item.schema, **self.keywords}

    def read(self, value: Json, at: str) -> Any:
        if not isinstance(value, list):
            raise Mismatch(at, "an array", value)
        return self.build([self.item.read(item, f"{at}[{index}]") for index, item in enumerate(value)])

    def narrowed(self, limits: Mapping[str, Any]) -> Form:
        return replace(self, keywords=self.keywords | _keywords(limits, _OF_ARRAYS, "array"))


@dataclass(frozen=True, slots=True)
class Row(Plain):
    """A fixed number of values, each with its form: tuple[int, str]."""

    items: tuple[Form, ...]

    @property
    def schema(self) -> Schema:
        size = len(self.items)
        places = {"prefixItems": [item.schema for item in self.items]} if self.items else {}
        return {"type": "array", **places, "items": False, "minItems": size, "maxItems": size}

    def read(self, value: Json, at: str) -> Any:
        if not isinstance(value, list) or len(value) != len(self.items):
            raise Mismatch(at, f"an array of {len(self.items)}", value)
        items = zip(self.items, value, strict=True)
        return tuple(form.read(item, f"{at}[{index}]") for index, (form, item) in enumerate(items))


@dataclass(frozen=True, slots=True)
class Dictionary:
    """An object with keys of one form, which are strings, and values of another."""

    key: Form
    value: Form
    keywords: Schema = field(default_factory=dict)

    @property
    def schema(self) -> Schema:
        names = self.key.schema
        narrower = {} if names == {"type": "string"} else {"propertyNames": names}
        return {"type": "object", **narrower, "additionalProperties": self.value.schema, **self.keywords}

    def read(self, value: Json, at: str) -> Any:
        if not isinstance(value, dict):
            raise Mismatch(at, "an object", value)
        return {self.key.read(key, at): self.value.read(item, f"{at}.{key}") for key, item in value.items()}

    def narrowed(self, limits: Mapping[str, Any]) -> Form:
        return replace(self, keywords=self.keywords | _keywords(limits, _OF_OBJECTS, "object"))


@dataclass(frozen=True, slots=True)
class Either(Plain):
    """The first of some forms that fits."""

    options: tuple[Form, ...]

    @property
    def schema(self) -> Schema:
        return {"anyOf": [option.schema for option in self.options]}

    def read(self, value: Json, at: str) -> Any:
        problems = []
        for option in self.options:
            try:
                return option.read(value, at)
            except (ValueError, AssertionError) as problem:  # also one of a class that refuses the values
                problems.append(words_of(problem))
        raise Mismatch(at, f"one of {len(self.options)} forms ({'; '.join(problems)})", value)

    def narrowed(self, limits: Mapping[str, Any]) -> Form:
        """The limits of `Annotated[int | None, Ge(0)]` are those of the options that have such limits."""
        narrowed, refusal = [], None
        for option in self.options:
            try:
                narrowed.append(option.narrowed(limits))
            except ParameterError as error:
                narrowed.append(option)
                refusal = error
        if refusal is not None and narrowed == list(self.options):
            raise refusal
        return Either(tuple(narrowed))


@dataclass(frozen=True, slots=True)
class Field:
    """One key of an object."""

    name: str
    form: Form
    required: bool


@dataclass(frozen=True, slots=True)
class Object(Plain):
    """A closed object: the keys of a class, and no others. `build`: values by key → object. `judges`: by code of the
    class, which may refuse them."""

    name: str
    fields: tuple[Field, ...]
    build: Callable[[dict[str, Any]], Any]
    judges: bool = False

    @property
    def schema(self) -> Schema:
        return {
            "type": "object",
            "properties": {field.name: field.form.schema for field in self.fields},
            "required": [field.name for field in self.fields if field.required],
            "additionalProperties": False,
        }

    def read(self, value: Json, at: str) -> Any:
        if not isinstance(value, dict):
            raise Mismatch(at, f"an object ({self.name})", value)
        known = {field.name for field in self.fields}
        missing = [field.name for field in self.fields if field.required and field.name not in value]
        if missing or not known.issuperset(value):
            wrong = f"without {missing[0]!r}" if missing else f"with {next(key for key in value if key not in known)!r}"
            raise Mismatch(at, f"the keys of {self.name}, not {wrong}", value)
        values = {f.name: f.form.read(value[f.name], f"{at}.{f.name}") for f in self.fields if f.name in value}
        return self.build(values)


@dataclass(frozen=True, slots=True)
class Foreign(Plain):
    """A class of a library that knows its own schema and makes its own objects. `judges`: as of `Object`. `cls`: the
    class, for its fields."""

    schema: Schema
    make: Callable[[Json], Any]
    judges: bool
    cls: type | None = None

    def read(self, value: Json, at: str) -> Any:
        """Raises the library's own errors, which are ValueErrors."""
        return self.make(value)


@dataclass(frozen=True, slots=True)
class Reference(Plain):
    """A class by its name among the definitions, which may be about to be written: classes contain themselves."""

    name: str
    forms: Mapping[str, Form] = field(repr=False, compare=False)

    @property
    def schema(self) -> Schema:
        return {"$ref": f"#/$defs/{self.name}"}

    def read(self, value: Json, at: str) -> Any:
        return self.forms[self.name].read(value, at)


def judges(form: Form) -> bool:
    """Returns whether reading may refuse a value that satisfies the schema: it is converted, or built by a class."""
    waiting, seen = [form], set[str]()
    while waiting:
        match waiting.pop():
            case Foreign(_, _, own):
                if own:
                    return True
            case Object(_, fields, _, own):
                if own:
                    return True
                waiting += [field.form for field in fields]
            case Scalar(schema):
                if "format" in schema:
                    return True
            case Array(item):
                waiting.append(item)
            case Row(items):
                waiting += items
            case Dictionary(key, value):
                waiting += [key, value]
            case Either(options):
                waiting += options
            case Reference(name, forms) if name not in seen:
                seen.add(name)
                waiting.append(forms[name])
    return False


def _keywords(limits: Mapping[str, Any], known: Mapping[str, str], kind: str) -> Schema:
    if not known.keys() >= limits.keys():
        raise _no_limits({name: limit for name, limit in limits.items() if name not in known}, kind)
    return {known[name]: limit for name, limit in limits.items()}


def _no_limits(limits: Mapping[str, Any], kind: str) -> ParameterError:
    name, limit = next(iter(limits.items()))
    return ParameterError(f"Annotated[..., {name}={shown(limit)}] limits something that a JSON {kind} does not have")
