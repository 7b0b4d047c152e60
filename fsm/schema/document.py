"""The schemas of one document, and where a reference leads. Nothing is ever fetched."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from urllib.parse import unquote, urldefrag, urljoin

from ..errors import ConstraintRefused, Unsupported
from .source import Value, kind_of

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
    """What a document says it is written in; comparable by age."""

    DRAFT4 = 4
    DRAFT6 = 6
    DRAFT7 = 7
    DRAFT2019 = 2019
    DRAFT2020 = 2020

    @classmethod
    def of(cls, identifier: object) -> Draft:
        """By "$schema". What is unknown or unsaid is read as the newest."""
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
        """The schema below; every object on the way that has an id begins a resource."""
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
        """A schema that stands nowhere in the document, made out of this one."""
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
        """The id that a schema gives itself, by the rules of its draft."""
        if not isinstance(value, dict) or ("$ref" in value and self.draft <= Draft.DRAFT7):
            return None
        found = value.get("id" if self.draft == Draft.DRAFT4 else "$id")
        return found if isinstance(found, str) else None

    def target(self, schema: Schema, keyword: str) -> Schema:
        """Where the reference that `schema` holds under `keyword` leads.

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
        """Of "$dynamicRef", where it can only lead to one place.

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
        """A JSON pointer (RFC 6901), percent-encoded as in a URI, from the root of a resource."""
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
        """Every id and anchor of the document, absolute; found at the first reference that needs one."""
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
    """The schemas directly below, where the standard puts schemas."""
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
