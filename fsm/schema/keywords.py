"""The values of keywords, checked, and which keywords are read together.

A schema that says `"minLength": "3"` is refused, with what to write.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from ..errors import ConstraintRefused, Unsupported
from .document import Schema, Value, distinct, kind_of
from .numbers import Number


class Deviations:
    """Records where the grammar deviates from the schema, or refuses to: keywords that are not honoured, or narrowed.

    Args:
        allow: note them in `unenforced` as (keyword, path) instead of raising.
    """

    def __init__(self, *, allow: bool) -> None:
        self.allow = allow
        self.unenforced: dict[tuple[str, str], None] = {}
        self.narrowed: dict[tuple[str, str], str] = {}
        self.lost: tuple[str, str] | None = None  # the (keyword, path) of which values were left out last

    def refuse(self, why: str, where: str, keyword: str) -> None:
        """Raises Unsupported, or returns after a note: the caller goes on without the keyword."""
        if not self.allow:
            raise Unsupported(why, where=where, keyword=keyword)
        self.unenforced[keyword, where] = None

    def narrow(self, where: str, keyword: str, how: str) -> None:
        """Notes that a keyword is read more narrowly than it is meant; `how` says which texts are left."""
        self.narrowed[keyword, where] = how

    def lose(self, where: str, keyword: str, how: str) -> None:
        """Notes that values which the keyword admits cannot be expressed, and are left out: perhaps all."""
        self.narrow(where, keyword, how)
        self.lost = (keyword, where)


def at(schema: Schema, keyword: str) -> str:
    return f"{schema.path}/{keyword}"


def invalid(schema: Schema, keyword: str, instead: str) -> ConstraintRefused:
    """Returns the error for a keyword with a value of the wrong kind."""
    value = schema.value[keyword]
    shown = repr(value) if isinstance(value, str | bool | int | Decimal) else kind_of(value)
    return ConstraintRefused(f"{keyword} is {shown}; write {instead}", where=at(schema, keyword), keyword=keyword)


def count(schema: Schema, keyword: str) -> int | None:
    """Reads a non-negative integer, or None when the keyword is absent."""
    value = schema.value.get(keyword)
    if value is None and keyword not in schema.value:
        return None
    if isinstance(value, Decimal) and value == value.to_integral_value():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise invalid(schema, keyword, "a number without a fraction, 0 or more, such as 3")
    return value


def number(schema: Schema, keyword: str) -> Number | None:
    value = schema.value.get(keyword)
    if value is None and keyword not in schema.value:
        return None
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise invalid(schema, keyword, "a number, such as 3")
    return value


def flag(schema: Schema, keyword: str) -> bool:
    """Reads true or false; false when absent."""
    value = schema.value.get(keyword, False)
    if not isinstance(value, bool):
        raise invalid(schema, keyword, "true or false")
    return value


def text(schema: Schema, keyword: str) -> str | None:
    value = schema.value.get(keyword)
    if value is None and keyword not in schema.value:
        return None
    if not isinstance(value, str):
        raise invalid(schema, keyword, "a string")
    return value


def names(schema: Schema, keyword: str, value: Value) -> tuple[str, ...]:
    """Reads a list of member names, given as `value` somewhere under the keyword."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise invalid(schema, keyword, 'an array of names, such as ["id"]')
    return tuple(dict.fromkeys(value))


def mapping(schema: Schema, keyword: str) -> dict[str, Value]:
    """Reads an object; empty when absent."""
    value = schema.value.get(keyword, {})
    if not isinstance(value, dict):
        raise invalid(schema, keyword, "an object")
    return value


def listed(schema: Schema, keyword: str) -> list[Value]:
    """Reads an array that is not empty."""
    value = schema.value[keyword]
    if not isinstance(value, list) or not value:
        raise invalid(schema, keyword, "an array with at least one entry")
    return value


def branches(schema: Schema, keyword: str) -> list[Schema]:
    """Returns the schemas of allOf, anyOf, oneOf, prefixItems."""
    return [schema.child(keyword, position) for position in range(len(listed(schema, keyword)))]


NUMBER_KEYWORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
STRING_KEYWORDS = frozenset({"minLength", "maxLength", "pattern"})

ARRAY_KEYWORDS = frozenset(
    {"prefixItems", "items", "additionalItems", "contains", "minItems", "maxItems", "uniqueItems"}
)
OBJECT_KEYWORDS = frozenset(
    {
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "propertyNames",
        "minProperties",
        "maxProperties",
    }
)

_GROUPS = (  # keywords of a type, read together at the first of them
    (NUMBER_KEYWORDS, "numbers"),
    (STRING_KEYWORDS, "strings"),
    (ARRAY_KEYWORDS, "arrays"),
    (OBJECT_KEYWORDS, "objects"),
    (frozenset({"if", "then", "else"}), "if"),
)
_GROUP_OF = {keyword: group for keywords, group in _GROUPS for keyword in keywords}
_APPLICATORS = frozenset(
    {
        "type",
        "enum",
        "const",
        "format",
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
    }
)
KEYWORDS = frozenset(_GROUP_OF) | _APPLICATORS  # that are read, but for those of parts: minContains, unevaluatedItems

# After the schema's own members, whose order is the order of writing; all others keep their place in the text.
_LATER = ("anyOf", "oneOf", "if", "dependentRequired", "dependentSchemas", "dependencies", "not")


def groups_of(value: dict[str, Value]) -> list[str]:
    """Returns the groups of keywords that a schema has, in the order in which they speak."""
    found: dict[str, None] = {}
    for keyword in value:
        group = _GROUP_OF.get(keyword) or (keyword if keyword in _APPLICATORS else None)
        if group is not None:
            found[group] = None
    return list(found)


def ordered(pairs: Iterable[tuple[Schema, str]]) -> list[tuple[Schema, str]]:
    """Sorts own members first, in the order of the text; alternatives after them."""
    found = list(pairs)
    return [pair for pair in found if pair[1] not in _LATER] + [pair for pair in found if pair[1] in _LATER]


def looks_inside(schema: Schema) -> bool:
    """Tells whether a schema speaks of more than scalars."""
    return isinstance(schema.value, dict) and any(
        keyword in schema.value
        for keyword in ("$ref", "allOf", "anyOf", "oneOf", "not", "if", *ARRAY_KEYWORDS, *OBJECT_KEYWORDS)
    )


def constants(schema: Schema, keyword: str) -> tuple[Value, ...]:
    """Returns the values of const or enum."""
    return (schema.value["const"],) if keyword == "const" else tuple(distinct(listed(schema, "enum")))


def structure(schema: Schema, value: Value, name: str) -> Schema:
    """Writes a constant array or object as a schema of its parts, to be met with other subschemas or negated."""
    if isinstance(value, list):
        parts = [{"const": item} for item in value]
        inner: Value = {"type": "array", "minItems": len(value), "maxItems": len(value)}
        return schema.derived(inner | ({"prefixItems": parts} if parts else {}), name)
    members = {key: {"const": item} for key, item in value.items()}
    closed = {"type": "object", "properties": members, "required": list(value), "additionalProperties": False}
    return schema.derived(closed, name)
