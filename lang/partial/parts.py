"""Parts of typed values: which object a JSON value that is not complete becomes, by the form of its type.

    class (dataclass, NamedTuple, Pydantic, msgspec)    a Partial: the same attributes, None for what has not come
    TypedDict, dict, a schema without a type            a dict of what has come
    list, tuple, set                                    a list of what has come
    str                                                 the text so far
    numbers, bool, dates, UUID, Enum, Literal           the object, once its text is complete

No code of the program's classes runs for a part: validators see the whole value, once. Where a type is a union, the
keys and constants that have come decide which of its members a part is shown as; until then it is the first that fits.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import UmbelError
from ..forms import (
    Anything,
    Array,
    Dictionary,
    Either,
    Enumeration,
    Foreign,
    Form,
    Json,
    Object,
    Reference,
    Row,
    Scalar,
)
from ..typed import typed

Forms = tuple[Form, ...]  # those that a value may have, neither unions nor references

ANYTHING: Forms = (Anything(),)


class Partial:
    """Shows an object of a class while its text is still being written: what `state.stream_value` yields.

    It has the attributes of the class: fields that have begun as far as they have come, None for the others.
    `vars(part)` is a dict of them. The class's own methods and validators belong to the whole value.

    Args:
        name: of the class.
        fields: the attributes by name.

    Examples:
        >>> from dataclasses import make_dataclass
        >>> Book = make_dataclass("Book", [("title", str), ("year", int)])
        >>> @ul.function
        ... def catalogue(s, note):
        ...     s += note + ul.gen("book", dtype=Book)
        >>> gate = ul.Gate()  # holds the answer back, for this example
        >>> model = ul.Echo(['{"title": "Walden", "year": 1854}'], gate=gate)
        >>> state = catalogue.run("Thoreau's Walden.", stream=True, backend=model)
        >>> books = state.stream_value("book")
        >>> gate.step(9)
        >>> gate.wait_for(10)
        >>> next(books)
        Partial[Book](title='Walden', year=None)
        >>> gate.open()
        >>> list(books)[-1]
        Book(title='Walden', year=1854)
    """

    __slots__ = ("__dict__", "_partial_of")

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self._partial_of = name
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a part of this object has no attribute {name!r}; it has {', '.join(vars(self))}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Partial):
            return NotImplemented
        return self._partial_of == other._partial_of and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # it has mutable fields

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"Partial[{self._partial_of}]({fields})"


def alternatives(forms: Iterable[Form]) -> Forms:
    """Resolves references and unions: returns the forms that a value may have, in order."""
    found: list[Form] = []
    waiting, seen = list(forms), set[int]()
    while waiting:
        match waiting.pop(0):
            case Reference(name, definitions) as form:
                if id(definitions[name]) not in seen:
                    seen.add(id(definitions[name]))
                    waiting.insert(0, definitions[name])
            case Either(options):
                waiting[:0] = options
            case form:
                found.append(form)
    return tuple(found) or ANYTHING


def of_objects(forms: Forms) -> Forms:
    """Returns those whose values are JSON objects; one that takes anything where there is none."""
    return tuple(form for form in forms if isinstance(form, Object | Dictionary | Foreign | Anything)) or ANYTHING


def of_arrays(forms: Forms) -> Forms:
    """Returns those whose values are JSON arrays; one that takes anything where there is none."""
    return tuple(form for form in forms if isinstance(form, Array | Row | Anything)) or ANYTHING


def with_key(forms: Forms, key: str) -> Forms:
    """Returns the forms of objects that have a key, or all where none has it."""
    return tuple(form for form in forms if _member(form, key) is not None) or forms


def with_value(forms: Forms, key: str, value: Json) -> Forms:
    """Returns the forms of objects that admit a value where their type lists all values, or all where none does."""
    return tuple(form for form in forms if _admits(_member(form, key), value)) or forms


def members(forms: Forms, key: str) -> Forms:
    """Returns the forms that the value of a key may have."""
    return alternatives(member for form in forms if (member := _member(form, key)) is not None)


def items(forms: Forms, index: int) -> Forms:
    """Returns the forms that an item of an array may have."""
    found: list[Form] = []
    for form in forms:
        match form:
            case Array(item):
                found.append(item)
            case Row(row) if index < len(row):
                found.append(row[index])
    return alternatives(found)


def grows(forms: Forms) -> bool:
    """Returns whether a string is shown before it is complete: some form takes any text, or none takes a string."""
    taking = [
        form for form in forms if isinstance(form, Enumeration) or (isinstance(form, Scalar) and str in form.accepts)
    ]
    free = any(isinstance(form, Scalar) and "format" not in form.schema for form in taking)
    return free or not taking or any(isinstance(form, Anything | Foreign) for form in forms)


def complete(forms: Forms, value: Json) -> Any:
    """Returns the object of a complete string, number, bool or null; the value itself where no form takes it."""
    for form in forms:
        if isinstance(form, Scalar | Enumeration):
            try:
                return form.read(value, "")
            except ValueError:
                continue
    return value


def part_of_object(forms: Forms, values: Mapping[str, Any]) -> Any:
    """Returns an object with the values that have come, as the first form shows it. It holds a copy of `values`."""
    match forms[0]:
        case Object(name, fields, build) if build is not dict:
            return Partial(name, dict.fromkeys(field.name for field in fields) | dict(values))
        case Foreign(_, _, _, cls) if cls is not None:
            attributes = {key: attribute for key, (attribute, _) in _fields(cls).items()}
            shown = dict.fromkeys(attributes.values())
            shown |= {attributes.get(key, key): value for key, value in values.items()}
            return Partial(cls.__name__, shown)
        case _:
            return dict(values)


def _member(form: Form, key: str) -> Form | None:
    match form:
        case Object(_, fields):
            return next((field.form for field in fields if field.name == key), None)
        case Foreign(_, _, _, cls) if cls is not None:
            known = _fields(cls).get(key)
            return None if known is None else known[1]
        case Dictionary(_, value):
            return value
        case _:
            return ANYTHING[0]


def _admits(form: Form | None, value: Json) -> bool:
    if not isinstance(form, Enumeration):
        return True
    return any(type(known) is type(value) and known == value for known, _ in form.members)


@functools.lru_cache(maxsize=256)
def _fields(cls: type) -> dict[str, tuple[str, Form]]:
    """Returns the fields of a class of Pydantic or msgspec: key in JSON → attribute and form."""
    if issubclass(cls, msgspec.Struct):
        return {field.encode_name: (field.name, _form(field.type)) for field in msgspec.structs.fields(cls)}
    fields: Mapping[str, Any] = getattr(cls, "model_fields", {})
    found = {}
    for name, field in fields.items():
        keys: Sequence[object] = (getattr(field, "validation_alias", None), getattr(field, "alias", None), name)
        key = next(key for key in keys if isinstance(key, str))
        found[key] = (name, _form(field.annotation))
    return found


def _form(annotation: Any) -> Form:  # Any: a type as it stands in an annotation
    """Returns the form of a field; what only its library reads is shown as the JSON that it is."""
    try:
        return typed(annotation).form
    except UmbelError:
        return ANYTHING[0]
