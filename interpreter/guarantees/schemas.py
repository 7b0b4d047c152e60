"""Validates JSON texts against JSON Schemas that no backend enforced.

The validator is jsonschema-rs: compiled, light to import, and offline. Patterns are matched by our automata, as the
runtime matches them, so nothing backtracks: `pattern` under a keyword of our own, names of `patternProperties` in a
syntax that the validator reads as we do.
"""

import importlib.util
import itertools
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ...lang.errors import ConstraintError, MissingExtraError
from .expressions import common_pattern, stands_in

MOST = 10  # violations that are reported

Json = Any  # what json.loads gives
Validator = Any  # jsonschema_rs.Validator, which is one class of several

_PATTERN = "umbel:pattern"  # instead of `pattern`: the validator would read it in a dialect of its own
_DATA = ("const", "default", "enum", "examples")  # keywords whose values are no schemas
_MAPS = ("properties", "$defs", "definitions", "dependentSchemas", "dependencies")  # of names, which are no keywords
_DRAFTS = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")


def check_installed() -> None:
    """Raises MissingExtraError without the package that validates."""
    if importlib.util.find_spec("jsonschema_rs") is None:
        raise MissingExtraError("jsonschema-rs", "openai")


def check(schema: str) -> None:
    """Checks that texts can be validated with this schema.

    Args:
        schema: as JSON text.

    Raises:
        ConstraintError: it is no schema, or has an unsupported pattern or a dangling reference.
        MissingExtraError: as `check_installed`.
    """
    check_installed()
    _validator(schema)


def violations(schema: str, text: str) -> list[str]:
    """Returns the violations of a JSON Schema by `text`, one sentence each. Checks formats; external references fail.

    Args:
        schema: as JSON text.
    """
    check_installed()
    try:
        instance = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return [f"the text is no JSON: {error}"]
    try:
        problems = itertools.islice(_validator(schema).iter_errors(instance), MOST)
        return [f"{_path(problem.instance_path)}: {_shortened(_reworded(problem.message))}" for problem in problems]
    except (ConstraintError, RecursionError, ValueError) as error:
        return [f"the schema cannot be applied: {error}"]


@lru_cache(maxsize=256)
def _validator(schema: str) -> Validator:
    """Compiles a validator, cached: a program's schemas are the same in every run. Raises ConstraintError."""
    import jsonschema_rs

    try:
        parsed = _rewritten(json.loads(schema))
        if isinstance(parsed, dict) and not any(draft in str(parsed.get("$schema", "")) for draft in _DRAFTS):
            parsed.pop("$schema", None)  # of no draft that is known: read as the newest
        return jsonschema_rs.validator_for(parsed, keywords={_PATTERN: _Pattern}, validate_formats=True, offline=True)
    except RecursionError:
        raise ConstraintError("json_schema: it is nested too deeply; write a flatter one") from None
    except jsonschema_rs.ValidationError as error:
        raise ConstraintError(f"json_schema: {_path(error.instance_path)}: {_reason(error.message)}") from None
    except ValueError as error:
        raise ConstraintError(f"json_schema: {_reason(str(error))}") from None


def _reworded(message: str) -> str:
    return message.replace("False schema does not allow", "the schema allows no such value or member:")


def _reason(message: str) -> str:
    if message.startswith(("Pointer ", "Resource ", "Anchor ")):
        return (
            f"a $ref leads to nothing in the schema, and nothing is fetched from elsewhere ({_shortened(message)}); "
            "write the definition under $defs and refer to it as '#/$defs/name'"
        )
    return _shortened(message)


def _rewritten(schema: Json) -> Json:
    """Rewrites patterns for the validator. Raises ConstraintError for an unsupported one."""
    if isinstance(schema, list):
        return [_rewritten(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Json] = {}
    for keyword, value in schema.items():
        if keyword in _DATA:
            found[keyword] = value
        elif keyword in _MAPS and isinstance(value, dict):
            found[keyword] = {name: _rewritten(inner) for name, inner in value.items()}
        elif keyword == "pattern" and isinstance(value, str):
            stands_in(value, "")
            found[_PATTERN] = value
        elif keyword == "patternProperties" and isinstance(value, dict):
            found[keyword] = {common_pattern(pattern): _rewritten(inner) for pattern, inner in value.items()}
        else:
            found[keyword] = _rewritten(value)
    return found


class _Pattern:
    """The keyword `_PATTERN`, as jsonschema-rs calls it."""

    def __init__(self, parent: Json, pattern: str, path: list[str | int]) -> None:
        self._pattern = pattern

    def validate(self, instance: Json) -> None:
        """Raises ValueError, whose message is the violation."""
        for problem in self.iter_errors(instance):
            raise problem

    def iter_errors(self, instance: Json) -> Iterator[ValueError]:
        if isinstance(instance, str) and not stands_in(self._pattern, instance):
            yield ValueError(f"{instance!r} does not match {self._pattern!r}")


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is no JSON number")


def _path(keys: list[str | int]) -> str:
    """Formats keys as a JSONPath: $.people[0].name"""
    steps = (f"[{key}]" if isinstance(key, int) else f".{key}" if key.isidentifier() else f"['{key}']" for key in keys)
    return "$" + "".join(steps)


def _shortened(message: str) -> str:
    """Shortens a message in its middle: it begins with the value and ends with the problem."""
    return message if len(message) <= 200 else f"{message[:100]} … {message[-98:]}"
