"""Reads a schema, within limits, and finds where its references lead. Nothing is ever fetched.

Numbers stay what was written (int or Decimal, never float), the order of keys is kept, a key that stands twice is
refused: a program that reads the schema with another parser would see another schema.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

from ..errors import ConstraintRefused, LimitExceeded, Limits, Unsupported

# A JSON value. Recursive aliases and Any meet here only: everything that leaves a keyword is checked and typed.
Value: TypeAlias = Any

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)  # strings are passed over whole

LARGEST_EXPONENT = 400  # of a number in a schema; doubles end at 308, and 1e999999999 must not become digits


def read_schema(source: str | bytes | Mapping[str, object] | bool, limits: Limits) -> Value:
    """Returns the schema as JSON values.

    Raises:
        LimitExceeded: the text has more bytes, or nests deeper, than `limits` allow.
        ConstraintRefused: it is not JSON, a key stands twice, or it is neither an object nor a boolean.
    """
    if isinstance(source, bytes):
        try:
            source = source.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConstraintRefused(f"the schema is not UTF-8: {error}; encode it as UTF-8") from None
    value = _read_text(source, limits) if isinstance(source, str) else _read_value(source, limits)
    if not isinstance(value, dict | bool):
        raise ConstraintRefused(f"a schema is an object or a boolean, not {kind_of(value)}; write {{}} for any value")
    return value


def _read_text(text: str, limits: Limits) -> Value:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limits.schema_bytes:
        raise LimitExceeded(f"the schema has {size} bytes, more than the {limits.schema_bytes} allowed; split it")
    _check_depth(text, limits.depth)
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_decimal,
            parse_constant=_no_constant,
        )
    except json.JSONDecodeError as error:
        raise ConstraintRefused(
            f"the schema is not JSON: {error.msg}; check it with a JSON parser",
            where=f"line {error.lineno} column {error.colno}",
        ) from None


def _check_depth(text: str, depth: int) -> None:
    """Bounds the depth before the parser, which recurses. Brackets inside strings do not count."""
    level = 0
    for found in _BRACKETS.finditer(text):
        bracket = found.group()
        if bracket in "[{":
            level += 1
            if level > depth:
                raise _too_deep(depth)
        elif bracket in "]}":
            level -= 1


def _too_deep(depth: int) -> LimitExceeded:
    return LimitExceeded(f"the schema nests deeper than {depth} levels; move inner schemas to $defs and refer to them")


def _unique(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ConstraintRefused(f"the key {key!r} stands twice in one object of the schema; keep one of them")
            seen.add(key)
    return found


def _integer(text: str) -> int:
    if len(text) > LARGEST_EXPONENT:
        raise LimitExceeded(f"a number of {len(text)} digits in the schema; write at most {LARGEST_EXPONENT}")
    return int(text)


def _decimal(text: str) -> Decimal:
    return _bounded(Decimal(text))


def _bounded(number: Decimal) -> Decimal:
    if number and not -LARGEST_EXPONENT <= number.adjusted() <= LARGEST_EXPONENT:
        raise LimitExceeded(f"the number {number} in the schema has an exponent beyond {LARGEST_EXPONENT}")
    return number


def _no_constant(name: str) -> Value:
    raise ConstraintRefused(f"{name} in the schema is not JSON; write a number")


def _read_value(source: object, limits: Limits) -> Value:
    """Reads Python values, as json.loads gives them: sizes are counted as if they were written."""
    budget = limits.schema_bytes

    def read(value: object, depth: int) -> Value:
        nonlocal budget
        budget -= len(value) + 2 if isinstance(value, str) else 2
        if budget < 0:
            raise LimitExceeded(f"the schema has more than the {limits.schema_bytes} bytes allowed; split it")
        if depth > limits.depth:
            raise _too_deep(limits.depth)
        match value:
            case None | bool() | str() | int():
                return value
            case Decimal():
                return _bounded(value)
            case float():
                if not math.isfinite(value):
                    raise ConstraintRefused(f"{value} in the schema is not JSON; write a number")
                return Decimal(repr(value))
            case Mapping():
                for key in value:
                    if not isinstance(key, str):
                        raise ConstraintRefused(f"the key {key!r} of the schema is not a string; write {str(key)!r}")
                    budget -= len(key) + 2
                return {key: read(inner, depth + 1) for key, inner in value.items()}
            case Sequence():
                return [read(inner, depth + 1) for inner in value]
        raise ConstraintRefused(f"{value!r} in the schema is no JSON value; write what json.dumps accepts")

    return read(source, 0)


def kind_of(value: Value) -> str:
    """Returns the JSON type of a value, with its article, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | Decimal():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def identity(value: Value) -> Hashable:
    """Gives a key, equal for equal JSON values: 1 and 1.0 are one, true and 1 are two, keys have no order."""
    match value:
        case bool():
            return ("boolean", value)
        case int() | Decimal():
            return ("number", value)
        case list():
            return ("array", tuple(identity(item) for item in value))
        case dict():
            return ("object", frozenset((key, identity(item)) for key, item in value.items()))
    return ("text", value)  # or null


def distinct(values: Sequence[Value]) -> list[Value]:
    """Returns the values without repetitions, in order."""
    return list({identity(value): value for value in reversed(values)}.values())[::-1]


_MAPS = ("properties", "patternProperties", "definitions", "$defs", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = (
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
)


class Draft(enum.IntEnum):
    """The draft that a document says it is written in; comparable by age."""

    DRAFT4 = 4
    DRAFT6 = 6
    DRAFT7 = 7
    DRAFT2019 = 2019
    DRAFT2020 = 2020

    @classmethod
    def of(cls, identifier: object) -> Draft:
        """Reads "$schema". What is unknown or unsaid is read as the newest."""
        text = identifier if isinstance(identifier, str) else ""
        for marker, draft in (
            ("draft-03", cls.DRAFT4),
            ("draft-04", cls.DRAFT4),
            ("draft-06", cls.DRAFT6),
            ("draft-07", cls.DRAFT7),
            ("2019-09", cls.DRAFT2019),
        ):
            if marker in text:
                return draft
        return cls.DRAFT2020


class Schema:
    """One schema of a document: its value, its path there, and the resource (the part with an id of its own) it is of.

    One object for one path: schemas compare by identity.
    """

    __slots__ = ("document", "path", "resource", "uri", "value")

    def __init__(self, value: Value, path: str, document: Document, resource: Schema | None) -> None:
        if not isinstance(value, dict | bool):
            raise ConstraintRefused(f"a schema is an object or a boolean, not {kind_of(value)}", where=path)
        self.value: Value = value
        self.path = path
        self.document = document
        identifier = document.identifier(value)
        if resource is None or (identifier is not None and not identifier.startswith("#")):
            self.resource = self
            self.uri: str = urldefrag(urljoin(resource.uri if resource else "", identifier or ""))[0]
        else:
            self.resource = resource
            self.uri = resource.uri

    def __repr__(self) -> str:
        return f"Schema({self.path})"

    def child(self, *keys: str | int) -> Schema:
        """Returns the schema below; every object on the way that has an id begins a resource."""
        schema = self
        value: Value = self.value
        path = self.path
        for position, key in enumerate(keys, start=1):
            value = value[key]
            path = f"{path}/{_escape(str(key))}"
            known = self.document.schemas.get(path)
            if known is not None:
                schema = known
            elif position == len(keys):
                schema = self.document.schemas[path] = Schema(value, path, self.document, schema.resource)
        return schema

    def derived(self, value: Value, name: str) -> Schema:
        """Makes a schema that stands nowhere in the document, out of this one."""
        return Schema(value, f"{self.path}/{name}", self.document, self.resource)


class Document:
    """A whole schema document."""

    def __init__(self, value: Value) -> None:
        self.draft = Draft.of(value.get("$schema") if isinstance(value, dict) else None)
        self.names_dialect = isinstance(value, dict) and "$schema" in value
        self.schemas: dict[str, Schema] = {}
        self.root = self.schemas["#"] = Schema(value, "#", self, None)
        self._index: dict[str, Schema] | None = None
        self._dynamic: dict[str, list[Schema]] = {}

    def identifier(self, value: Value) -> str | None:
        """Returns the id that a schema gives itself, by the rules of its draft."""
        if not isinstance(value, dict) or ("$ref" in value and self.draft <= Draft.DRAFT7):
            return None
        found = value.get("id" if self.draft == Draft.DRAFT4 else "$id")
        return found if isinstance(found, str) else None

    def target(self, schema: Schema, keyword: str) -> Schema:
        """Follows the reference that `schema` holds under `keyword`.

        Raises:
            ConstraintRefused: to nowhere, or out of the document.
        """
        where = f"{schema.path}/{keyword}"
        reference = schema.value[keyword]
        if not isinstance(reference, str):
            raise ConstraintRefused(f"a reference is a string, not {kind_of(reference)}", where=where, keyword=keyword)
        found = self._resolve(schema, reference)
        if found is None:
            advice = (
                "nothing is fetched: put the schema into $defs and refer to it there"
                if "://" in reference or not reference.startswith("#")
                else "no such place in the schema; write a path such as #/$defs/name"
            )
            raise ConstraintRefused(
                f"the reference {reference!r} leads nowhere: {advice}", where=where, keyword=keyword
            )
        return found

    def dynamic_target(self, schema: Schema) -> Schema:
        """Follows "$dynamicRef", where it can only lead to one place.

        Raises:
            Unsupported: more than one place has the anchor, so where it leads depends on the way taken.
        """
        reference = schema.value["$dynamicRef"]
        self._ids()
        name = reference.rpartition("#")[2] if isinstance(reference, str) else ""
        anchored = self._dynamic.get(name, [])
        if len(anchored) > 1:
            raise Unsupported(
                f"{reference!r} leads to {len(anchored)} places, depending on the way taken; write $ref",
                where=f"{schema.path}/$dynamicRef",
                keyword="$dynamicRef",
            )
        return self.target(schema, "$dynamicRef")

    def _resolve(self, schema: Schema, reference: str) -> Schema | None:
        if reference == "#":
            return schema.resource
        if reference.startswith("#/"):
            return self._follow(schema.resource, reference[1:]) or self._follow(self.root, reference[1:])
        uri, fragment = urldefrag(urljoin(schema.uri, reference))
        index = self._ids()
        if fragment and not fragment.startswith("/"):
            return index.get(f"{uri}#{fragment}")
        resource = index.get(uri)
        if resource is None or not fragment:
            return resource
        return self._follow(resource, fragment)

    def _follow(self, resource: Schema, pointer: str) -> Schema | None:
        """Follows a JSON pointer (RFC 6901), percent-encoded as in a URI, from the root of a resource."""
        value: Value = resource.value
        keys: list[str | int] = []
        for part in unquote(pointer).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
                keys.append(key)
            elif isinstance(value, list) and key.isascii() and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
                keys.append(int(key))
            else:
                return None
        # Step by step, so that ids on the way begin their resources.
        schema = resource
        pending: list[str | int] = []
        for depth, step_key in enumerate(keys, start=1):
            pending.append(step_key)
            inner: Value = schema.value
            for step in pending:
                inner = inner[step]
            if depth == len(keys) or self.identifier(inner) is not None:
                schema, pending = schema.child(*pending), []
        return schema

    def _ids(self) -> dict[str, Schema]:
        """Indexes every id and anchor of the document, absolute; found at the first reference that needs one."""
        if self._index is None:
            index = self._index = {self.root.uri: self.root}
            pending = [self.root]
            while pending:
                schema = pending.pop()
                value = schema.value
                if not isinstance(value, dict):
                    continue
                if schema.resource is schema:
                    index.setdefault(schema.uri, schema)
                identifier = self.identifier(value)
                if identifier is not None and identifier.startswith("#"):
                    index.setdefault(f"{schema.uri}{identifier}", schema)
                for keyword in ("$anchor", "$dynamicAnchor"):
                    if isinstance(value.get(keyword), str):
                        index.setdefault(f"{schema.uri}#{value[keyword]}", schema)
                if isinstance(value.get("$dynamicAnchor"), str):
                    self._dynamic.setdefault(value["$dynamicAnchor"], []).append(schema)
                pending.extend(_below(schema))
        return self._index


def _below(schema: Schema) -> Iterator[Schema]:
    """Yields the schemas directly below, where the standard puts schemas."""
    value = schema.value
    for keyword in _MAPS:
        if isinstance(value.get(keyword), dict):
            for name, inner in value[keyword].items():
                if isinstance(inner, dict | bool):
                    yield schema.child(keyword, name)
    for keyword in _LISTS:
        if isinstance(value.get(keyword), list):
            for position, inner in enumerate(value[keyword]):
                if isinstance(inner, dict | bool):
                    yield schema.child(keyword, position)
    for keyword in _SINGLES:
        if isinstance(value.get(keyword), dict | bool):
            yield schema.child(keyword)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
