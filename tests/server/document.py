"""The OpenAPI document as tests use it: its schemas resolved, checked, and filled with values that fit or do not."""

from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
from umbel.server.app import ENDPOINTS, document

DOCUMENT = document(ENDPOINTS)
Path = tuple[str | int, ...]  # to a place in a body
LONGEST = 5_000  # characters, or entries, of a value that is too long


def resolved(schema: Any) -> Any:
    """The schema that a reference names."""
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def variants(schema: Any) -> list[Any]:
    """The schemas of which a value fits one; null is left out."""
    schema = resolved(schema)
    found = [leaf for each in schema["anyOf"] for leaf in variants(each)] if "anyOf" in schema else [schema]
    return [each for each in found if each.get("type") != "null"]


def problem(schema: Any, value: Any) -> str:
    """What is wrong with a value; "" where it fits."""
    whole = {"components": DOCUMENT["components"], **schema}
    return next((each.message for each in jsonschema.Draft202012Validator(whole).iter_errors(value)), "")


def least(schema: Any) -> Any:
    """A small value that fits."""
    (schema, *_) = variants(schema) or [{"type": "null"}]
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {name: least(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            first = schema.get("prefixItems", ())
            rest = range(schema.get("minItems", 0) - len(first))
            return [least(each) for each in first] + [least(schema["items"]) for _ in rest]
        case "string":
            return "eA==" if "contentEncoding" in schema else "x" * max(1, schema.get("minLength", 0))
        case "integer" | "number":
            return max(schema.get("minimum", 0), 1)
        case "boolean":
            return True
        case _:
            return None


def misfits(schema: Any) -> Iterator[Any]:
    """Values that do not fit: one of another type, and ones that are out of each range."""
    found = variants(schema)
    yield from [value for value in (True, [{}], 0.5, "no such value", {"no": 1}) if problem(schema, value)][:1]
    for each in found:
        for value in _out_of_range(each):
            if problem(schema, value):
                yield value


def _out_of_range(schema: Any) -> Iterator[Any]:
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"]
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if "minLength" in schema:
        yield ""
    if schema.get("maxLength", LONGEST) < LONGEST:
        yield "a" * (schema["maxLength"] + 1)
    if "pattern" in schema:
        yield "\n"
    if "enum" in schema:
        yield from ("no such value", True, False)
    if "minItems" in schema:
        yield []
    if schema.get("maxItems", LONGEST) < LONGEST:
        yield [least(schema.get("items") or {})] * (schema["maxItems"] + 1)
    if schema.get("additionalProperties") is False:
        yield {**least(schema), "no_such_field": 1}
    if any(len(schema["properties"][name].get("enum", ())) != 1 for name in schema.get("required", ())):
        yield {}


def fields(
    schema: Any, body: Any, path: Path = (), seen: frozenset[str] = frozenset()
) -> Iterator[tuple[Any, Path, Any]]:
    """Every field of the objects of a schema: a body that holds its object, the path to it, and its schema."""
    for name, field in schema.get("properties", {}).items():
        here = (*path, name)
        yield with_value(body, here, None), here, field
        for variant in variants(field):
            yield from _within(variant, body, here, seen)
            if variant.get("items"):  # false for arrays of a fixed form
                for item in variants(variant["items"]):
                    yield from _within(item, with_value(body, here, [None]), (*here, 0), seen)


def _within(schema: Any, body: Any, path: Path, seen: frozenset[str]) -> Iterator[tuple[Any, Path, Any]]:
    title = schema.get("title", "")
    if "properties" in schema and title not in seen:
        yield from fields(schema, with_value(body, path, least(schema)), path, seen | {title})


def with_value(body: Any, path: Sequence[str | int], value: Any) -> Any:
    """A body with another value at a place."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(body, list):
        return [with_value(each, rest, value) if number == first else each for number, each in enumerate(body)]
    return {**body, first: with_value(body.get(first), rest, value)}


def spelled(path: Path) -> str:
    """A path as errors write it: messages[0].content."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path).lstrip(".")
