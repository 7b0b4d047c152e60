"""Refuses a schema with the keyword and the place that the refusal is about.

Most refusals know both. What is found out later (an intersection has too many states, nothing is admitted) knows a rule
of the grammar or nothing; the keyword is looked for here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..errors import ConstraintRefused
from .document import Value

# Keywords that are blamed for a place, the likeliest first: what multiplies, what restricts strings, the others.
_BLAMED = (
    *("oneOf", "anyOf", "allOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies"),
    *("uniqueItems", "contains", "pattern", "format", "maxLength", "minLength", "enum", "const"),
    *("patternProperties", "propertyNames", "properties", "required", "additionalProperties", "unevaluatedProperties"),
    *("maxProperties", "minProperties", "prefixItems", "items", "additionalItems", "unevaluatedItems", "maxItems"),
    *("minItems", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "$ref", "$dynamicRef"),
    *("then", "else", "type", "$defs", "definitions"),
)
_TRIES = 200_000  # bytes of schemas that are compiled once more to find out which keyword leaves nothing


def placed(error: ConstraintRefused, schema: Value, latest: str) -> ConstraintRefused:
    """Refuses likewise, with a keyword of the schema and the JSON pointer to it. `latest`: the place worked on."""
    where = _place(schema, error.where or latest)
    last = where.rpartition("/")[2]
    if last == error.keyword and last:
        return error
    if error.keyword in _BLAMED and _has(schema, f"{where}/{error.keyword}"):
        keyword, where = error.keyword, f"{where}/{error.keyword}"
    elif last in _BLAMED and error.keyword not in _BLAMED:
        keyword = last
    else:
        keyword, where = _blamed(schema, where)
    if (keyword, where) == (error.keyword, error.where):
        return error
    return type(error)(error.why, where=where, keyword=keyword)


def nothing_left(schema: Value, admits_nothing: Callable[[Value], bool]) -> ConstraintRefused:
    """Refuses a schema that admits nothing, at the innermost keyword without which it would admit something."""
    keys: list[str | int] = []
    value, tries = schema, max(8, _TRIES // (1 + len(str(schema))))
    looking = True
    while looking and isinstance(value, dict | list):
        looking = False
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            tries -= 1
            if tries < 0:
                break
            if not admits_nothing(_without(schema, [*keys, key])):
                keys.append(key)
                value, looking = value[key], True
                break
    where = "/".join(["#", *(_escaped(str(key)) for key in keys)])
    keyword = next((str(key) for key in reversed(keys) if key in _BLAMED), "")
    if not keyword:
        keyword, where = _blamed(schema, where)
    why = "the schema admits nothing; let its bounds, types and enums overlap"
    if keyword != "false":
        why += f" (without {keyword} here it would admit something)" if keys else ""
    return ConstraintRefused(why, where=where, keyword=keyword)


def _without(value: Value, keys: list[str | int]) -> Value:
    """Copies a value in which a member is left out, or an item is true."""
    key, *rest = keys
    if isinstance(value, dict):
        return {
            name: _without(inner, rest) if name == key else inner
            for name, inner in value.items()
            if rest or name != key
        }
    return [(_without(inner, rest) if rest else True) if at == key else inner for at, inner in enumerate(value)]


def _place(schema: Value, where: str) -> str:
    """Returns the longest beginning of the name of a rule, or of a place, that leads somewhere in the schema."""
    while where and not _has(schema, where):
        shorter = max(where.rfind(" "), where.rfind("/"))
        where = where[:shorter] if shorter > 0 else ""
    return where or "#"


def _has(schema: Value, where: str) -> bool:
    return next(iter(_at(schema, where)), None) is not None


def _at(schema: Value, where: str) -> Iterator[tuple[Value]]:
    """Yields the value at a JSON pointer, if there is one."""
    first, *parts = where.split("/")
    if first != "#":
        return
    value = schema
    for part in parts:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return
    yield (value,)


def _blamed(schema: Value, where: str) -> tuple[str, str]:
    """Finds a keyword of the schema at this place, or the nearest one that leads to it."""
    found = next(iter(_at(schema, where)), None)
    if found is not None and isinstance(found[0], dict):
        for keyword in _BLAMED:
            if keyword in found[0]:
                return keyword, f"{where}/{keyword}"
    for part in reversed(where.split("/")[1:]):
        if part in _BLAMED:
            return part, where
    return "false" if schema is False else "type", where


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
