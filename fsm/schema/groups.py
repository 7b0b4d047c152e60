"""Which keywords of a schema are read together, and in what order they speak."""

from __future__ import annotations

from collections.abc import Iterable

from .assertions import NUMBER_KEYWORDS, STRING_KEYWORDS
from .containers import ARRAY_KEYWORDS, OBJECT_KEYWORDS
from .document import Schema
from .keywords import listed
from .source import Value, distinct

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
KEYWORDS = frozenset(_GROUP_OF) | _APPLICATORS  # that are read, beside those of parts: minContains, unevaluatedItems

# After the schema's own members, whose order is the order of writing; all others keep their place in the text.
_LATER = ("anyOf", "oneOf", "if", "dependentRequired", "dependentSchemas", "dependencies", "not")


def groups_of(value: dict[str, Value]) -> list[str]:
    """The groups of keywords that a schema has, in the order in which they speak."""
    found: dict[str, None] = {}
    for keyword in value:
        group = _GROUP_OF.get(keyword) or (keyword if keyword in _APPLICATORS else None)
        if group is not None:
            found[group] = None
    return list(found)


def ordered(pairs: Iterable[tuple[Schema, str]]) -> list[tuple[Schema, str]]:
    """Own members first, in the order of the text; alternatives behind them."""
    found = list(pairs)
    return [pair for pair in found if pair[1] not in _LATER] + [pair for pair in found if pair[1] in _LATER]


def looks_inside(schema: Schema) -> bool:
    """Whether a schema speaks of more than scalars."""
    return isinstance(schema.value, dict) and any(
        keyword in schema.value
        for keyword in ("$ref", "allOf", "anyOf", "oneOf", "not", "if", *ARRAY_KEYWORDS, *OBJECT_KEYWORDS)
    )


def constants(schema: Schema, keyword: str) -> tuple[Value, ...]:
    """The values of const or enum."""
    return (schema.value["const"],) if keyword == "const" else tuple(distinct(listed(schema, "enum")))


def structure(schema: Schema, value: Value, name: str) -> Schema:
    """A constant array or object as a schema of its parts, to be met with other demands or negated."""
    if isinstance(value, list):
        parts = [{"const": item} for item in value]
        inner: Value = {"type": "array", "minItems": len(value), "maxItems": len(value)}
        return schema.derived(inner | ({"prefixItems": parts} if parts else {}), name)
    members = {key: {"const": item} for key, item in value.items()}
    closed = {"type": "object", "properties": members, "required": list(value), "additionalProperties": False}
    return schema.derived(closed, name)
