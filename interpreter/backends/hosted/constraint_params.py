"""Writes a constraint as request parameters that a provider enforces, and unwraps answers inside an object.

JSON Schemas are written in the subset that strict structured outputs enforce. A schema is rewritten only where the
rewritten one admits nothing that the original does not, and no text of the original that names known members is lost:
every member is required already, and members that are not named are left out, as our own automata do. Whatever cannot
be written so is not enforceable there.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

Json = Any  # a schema as parsed JSON

_NOTES = {"title", "description"}  # kept: the model reads them
_SILENT = {"default", "examples", "$schema", "$comment", "deprecated", "readOnly", "writeOnly"}  # constrain nothing
_NUMBERS = {"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_OF_TYPE: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"pattern", "format"},
    "number": _NUMBERS,
    "integer": _NUMBERS,
    "boolean": set(),
    "null": set(),
}
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
_DEFINITION = re.compile(r"#/(\$defs|definitions)/[^/]+")
_TYPE_OF_VALUE = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}

MOST_LEVELS = 10
MOST_MEMBERS = 5000
MOST_VALUES = 1000
ANSWER = "answer"  # the member that holds what is no object itself
WRAPPING_TOKENS = 16  # of that object, at most


class NotStrict(Exception):
    """The schema says something that strict structured outputs do not enforce."""


def strict(source: str, *, exact: bool = False) -> tuple[Json, bool]:
    """Rewrites a schema in the strict subset. Returns it, and whether answers are wrapped as {"answer": ...}.

    Args:
        source: as JSON text; its order of members is kept.
        exact: leave out bounds, patterns and formats as well: some servers drop them in silence.

    Raises:
        NotStrict: there is no such schema.
    """
    schema = json.loads(source)
    if not isinstance(schema, dict):
        raise NotStrict("the schema is no object")
    whole = _Rewriting(exact).whole(schema)
    if whole.get("type") == "object" and "anyOf" not in whole:
        return whole, False
    definitions = {name: whole.pop(name) for name in ("$defs", "definitions") if name in whole}
    return {**of_members({ANSWER: whole}), **definitions}, True


# Keywords of Google's `response_json_schema`, and those of a schema that demand nothing. `format` is taken and not
# enforced, and `oneOf` is read as `anyOf`, so neither is here.
_BY_GOOGLE = {
    *("type", "enum", "items", "prefixItems", "minItems", "maxItems", "minimum", "maximum", "anyOf", "properties"),
    *("additionalProperties", "required", "title", "description"),
}
_SILENT = {"default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment", "$defs"}


def for_google(source: str) -> Json:
    """Returns a schema as Google's models enforce it, without what demands nothing.

    Raises:
        NotStrict: a keyword that they ignore, a reference next to others, or a schema that contains itself.
    """
    schema = json.loads(source)
    if not isinstance(schema, dict):
        raise NotStrict("the schema is no object")
    definitions = schema.get("$defs", {})
    whole = _for_google(schema, definitions, ())
    if definitions:
        whole["$defs"] = {name: _for_google(each, definitions, (name,)) for name, each in definitions.items()}
    return whole


def _for_google(schema: Json, definitions: Json, inside: tuple[str, ...]) -> Json:
    if not isinstance(schema, dict):
        raise NotStrict(f"{schema} is no schema of Google's")
    written = {key: value for key, value in schema.items() if key not in _SILENT}
    if "$ref" in written:
        name = str(written["$ref"]).removeprefix("#/$defs/")
        if len(written) > 1 or name not in definitions or name in inside:
            raise NotStrict(f"the reference to {name}")
        _for_google(definitions[name], definitions, (*inside, name))
        return written
    if unknown := written.keys() - _BY_GOOGLE:
        raise NotStrict(f"the keyword {min(unknown)}")
    if any(isinstance(value, bool) or not isinstance(value, str | int | float) for value in written.get("enum", ())):
        raise NotStrict("an enum of other values than strings and numbers")
    for key in ("prefixItems", "anyOf"):
        if key in written:
            written[key] = [_for_google(each, definitions, inside) for each in written[key]]
    if "properties" in written:
        written["properties"] = {n: _for_google(each, definitions, inside) for n, each in written["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in written and not isinstance(written[key], bool):
            written[key] = _for_google(written[key], definitions, inside)
    return written


def of_members(members: dict[str, Json]) -> Json:
    """Returns the schema of an object with exactly these members."""
    return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}


def _listed(kinds: Json) -> list[Json]:
    return kinds if isinstance(kinds, list) else [kinds]


class _Rewriting:
    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._members = self._values = 0

    def whole(self, schema: Json) -> Json:
        definitions = {
            name: {key: self.part(each, 1) for key, each in schema[name].items()}
            for name in ("$defs", "definitions")
            if isinstance(schema.get(name), dict)
        }
        rest = {key: value for key, value in schema.items() if key not in definitions}
        return {**self.part(rest, 0), **definitions}

    def part(self, schema: Json, level: int) -> Json:
        if not isinstance(schema, dict) or level > MOST_LEVELS:
            raise NotStrict("a schema that is no object, or nested too deep")
        schema = {key: value for key, value in schema.items() if key not in _SILENT}
        notes = {key: value for key, value in schema.items() if key in _NOTES}
        said = {key: value for key, value in schema.items() if key not in _NOTES}
        match said:
            case {"$ref": str(reference)} if len(said) == 1 and _DEFINITION.fullmatch(reference):
                return said  # with nothing next to it, as the provider demands
            case {"anyOf": [*options]} if len(said) == 1 and options:
                return {**notes, "anyOf": [self.part(option, level + 1) for option in options]}
            case {"const": value, **others}:
                return {**notes, **self._one_of([value], others)}
            case {"enum": [*values], **others}:
                return {**notes, **self._one_of(values, others)}
            case {"type": str(kind), **others} if kind in _OF_TYPE:
                return {**notes, "type": kind, **self._of_type(kind, others, level)}
            case {"type": [*kinds], **others} if kinds and all(kind in _OF_TYPE for kind in kinds):
                allowed = {word for kind in kinds for word in _OF_TYPE[kind]}
                if not set(others) <= allowed:
                    raise NotStrict(f"{sorted(set(others) - allowed)} next to types {kinds}")
                options = [
                    self.part({"type": kind, **{k: v for k, v in others.items() if k in _OF_TYPE[kind]}}, level + 1)
                    for kind in kinds
                ]
                return {**notes, "anyOf": options}
        raise NotStrict(f"{sorted(said)} together")

    def _one_of(self, values: list[Json], others: Json) -> Json:
        kinds = {_TYPE_OF_VALUE.get(type(value)) for value in values}
        named = others.get("type", list(kinds))
        if not values or None in kinds or set(others) - {"type"} or not kinds <= set(_listed(named)):
            raise NotStrict("values of an enum that are no plain ones, or not of its type")
        self._values += len(values)
        if self._values > MOST_VALUES:
            raise NotStrict(f"more than {MOST_VALUES} values in enums")
        kind = sorted(str(kind) for kind in kinds)
        return {"type": kind[0] if len(kind) == 1 else kind, "enum": values}

    def _of_type(self, kind: str, said: Json, level: int) -> Json:
        unknown = set(said) - _OF_TYPE[kind]
        if unknown:
            raise NotStrict(f"{sorted(unknown)} of type {kind}")
        if kind == "object":
            return self._object(said, level)
        if kind == "array":
            if "items" not in said:
                raise NotStrict("an array of anything")
            if self._exact and len(said) > 1:
                raise NotStrict("bounds of an array")
            return {**said, "items": self.part(said["items"], level + 1)}
        if said and (self._exact or said.get("format", "uuid") not in _FORMATS):
            raise NotStrict(f"{sorted(said)} of type {kind}")
        return said

    def _object(self, said: Json, level: int) -> Json:
        members = said.get("properties")
        closed = said.get("additionalProperties", False) is False
        if not isinstance(members, dict) or not closed or set(said.get("required", ())) != set(members):
            raise NotStrict("an object with members that may be left out, or that are not named")
        self._members += len(members)
        if self._members > MOST_MEMBERS:
            raise NotStrict(f"more than {MOST_MEMBERS} members")
        return {
            "properties": {name: self.part(member, level + 1) for name, member in members.items()},
            "required": list(members),
            "additionalProperties": False,
        }


Fields = dict[str, Any]  # of a request's body, as JSON

_OPENING = re.compile(rf'\s*\{{\s*"{ANSWER}"\s*:\s*')
_LONGEST_ESCAPE = len("\\ud83d\\ude0")


@dataclass(frozen=True, slots=True)
class ConstraintParams:
    """Fields that enforce a constraint. `wrapped`: the answer is the member "answer" of an object."""

    fields: Fields
    wrapped: Literal["", "text", "json"] = ""


def unwrap(text: str, how: Literal["text", "json"]) -> str | None:
    """Returns the answer inside an object; None where there is none, as in a truncated one.

    JSON is cut out as it was written; a text is what its string says.
    """
    try:
        answer = json.loads(text)[ANSWER]
        if how == "text":
            return answer if isinstance(answer, str) else None
        start = _OPENING.match(text)
        if start is None:
            return None
        _, end = json.JSONDecoder().raw_decode(text, start.end())
        return text[start.end() : end]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def beginning(text: str, how: Literal["text", "json"]) -> str:
    """Returns the beginning of the answer inside a truncated object."""
    start = _OPENING.match(text)
    if start is None:
        return ""
    if how == "json":
        return text[start.end() :]
    for shorter in range(_LONGEST_ESCAPE + 1):  # it may end inside an escape, or between two that are one character
        answer = unwrap(text[: len(text) - shorter] + '"}', "text")
        if answer is not None and not "\ud800" <= answer[-1:] <= "\udbff":
            return answer
    return ""
