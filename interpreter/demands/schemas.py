"""JSON texts against JSON Schemas: for what no backend enforced of them.

The validator is jsonschema's, with two differences: patterns are matched by our automata, which do not backtrack, and
references to elsewhere are never fetched.
"""

import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from ...lang.errors import ConstraintError, MissingExtraError
from .expressions import stands_in

MOST = 10  # violations that are told

Json = Any  # what json.loads gives
Validator = Any  # jsonschema has no types


def check_installed() -> None:
    """Raises MissingExtraError without the package that validates."""
    if importlib.util.find_spec("jsonschema") is None:
        raise MissingExtraError("jsonschema", "openai")


def check(schema: str) -> None:
    """Whether texts can be looked at with this schema.

    Args:
        schema: as JSON text.

    Raises:
        ConstraintError: it is no schema, has a pattern that is not honoured, or a reference to nothing in it.
        MissingExtraError: as `check_installed`.
    """
    check_installed()
    _check(schema)


@lru_cache(maxsize=256)
def _check(schema: str) -> None:
    """Remembered for schemas that are right: a program's are the same in every run."""
    import jsonschema  # type: ignore[import-untyped]

    parsed = json.loads(schema)
    try:
        # Without its formats: expressions are ours to judge, below.
        _class_for(schema).check_schema(parsed, format_checker=jsonschema.FormatChecker(formats=()))
    except jsonschema.SchemaError as error:
        raise ConstraintError(f"json_schema: {error.json_path}: {_shortened(error.message)}") from None
    except RecursionError:
        raise ConstraintError("json_schema: it is nested too deeply; write a flatter one") from None
    _check_references(parsed)
    for pattern in _patterns(parsed):
        stands_in(pattern, "")
    if _uses(parsed, "unevaluatedProperties") and _uses(parsed, "patternProperties"):
        raise ConstraintError(
            "json_schema: unevaluatedProperties beside patternProperties is not looked at; write additionalProperties"
        )


def _check_references(parsed: Json) -> None:
    """Raises ConstraintError for one that leads nowhere: no text would ever satisfy the schema."""
    import referencing
    import referencing.jsonschema

    if any(keyword == "$id" for inner in _inner(parsed) for keyword, _ in _keywords(inner)):
        return  # what a reference is relative to is not seen from here
    known = referencing.Resource.from_contents(parsed, default_specification=referencing.jsonschema.DRAFT202012)
    resolver = referencing.Registry().resolver_with_root(known)
    for keyword, reference in _keywords(parsed):
        if keyword == "$ref" and isinstance(reference, str):
            try:
                resolver.lookup(reference)
            except referencing.exceptions.Unresolvable:
                raise ConstraintError(
                    f"json_schema: $ref {reference!r} leads to nothing in the schema, and nothing is fetched from "
                    "elsewhere; write the definition under $defs and refer to it as '#/$defs/name'"
                ) from None


def violations(schema: str, text: str) -> list[str]:
    """What `text` breaks of a JSON Schema, one sentence each; formats are checked, references to elsewhere fail.

    Args:
        schema: as JSON text.
    """
    check_installed()
    import jsonschema
    import referencing

    try:
        instance = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [f"the text is no JSON: {error}"]
    # A registry of our own: without one the package would fetch what it does not know.
    validator = _class_for(schema)(
        json.loads(schema), registry=referencing.Registry(), format_checker=jsonschema.FormatChecker()
    )
    found = []
    try:
        for problem in itertools.islice(validator.iter_errors(instance), MOST):
            found.append(f"{problem.json_path}: {_shortened(problem.message)}")
    except (referencing.exceptions.Unresolvable, RecursionError, ConstraintError) as error:
        found.append(f"the schema cannot be applied: {error}")
    return found


@lru_cache(maxsize=64)
def _class_for(schema: str) -> Validator:
    """The validator of the draft that the schema names, with our patterns."""
    import jsonschema

    known = jsonschema.validators.validator_for(json.loads(schema), default=jsonschema.Draft202012Validator)
    ours = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    }
    return jsonschema.validators.extend(known, ours)


def _shortened(message: str) -> str:
    """A message begins with the value and ends with what is wrong with it."""
    return message if len(message) <= 200 else f"{message[:100]} … {message[-98:]}"


# ---------------------------------------------------------------------------- keywords that hold patterns


def _pattern(validator: Validator, pattern: str, instance: Json, schema: Json) -> Iterator[Any]:
    if isinstance(instance, str) and not stands_in(pattern, instance):
        yield _error(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Validator, patterns: Mapping[str, Json], instance: Json, schema: Json
) -> Iterator[Any]:
    for key, value in instance.items() if isinstance(instance, dict) else ():
        for pattern, inner in patterns.items():
            if stands_in(pattern, key):
                yield from validator.descend(value, inner, path=key, schema_path=pattern)


def _additional_properties(validator: Validator, allowed: Json, instance: Json, schema: Json) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, value in instance.items():
        if key in named or any(stands_in(pattern, key) for pattern in patterns):
            continue
        if allowed is False:
            yield _error(f"the key {key!r} is not allowed")
        else:
            yield from validator.descend(value, allowed, path=key)


def _error(message: str) -> Exception:
    import jsonschema

    return jsonschema.ValidationError(message)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------ what a schema uses

_DATA = ("const", "default", "enum", "examples")  # keywords whose values are no schemas


def _patterns(schema: Json) -> Iterator[str]:
    for keyword, value in _keywords(schema):
        if keyword == "pattern" and isinstance(value, str):
            yield value
        elif keyword == "patternProperties" and isinstance(value, dict):
            yield from value


def _uses(schema: Json, keyword: str) -> bool:
    return any(found == keyword for found, _ in _keywords(schema))


def _inner(schema: Json) -> Iterator[Json]:
    return iter(schema.values()) if isinstance(schema, dict) else iter(())


def _keywords(schema: Json) -> Iterator[tuple[str, Json]]:
    """(keyword, value) anywhere in a schema. A property that has the name of a keyword may be among them."""
    if isinstance(schema, list):
        for inner in schema:
            yield from _keywords(inner)
    elif isinstance(schema, dict):
        for keyword, value in schema.items():
            if keyword not in _DATA:
                yield keyword, value
                yield from _keywords(value)
