"""Brings schemas to disjunctive normal form: unions of conjuncts.

Applicators are multiplied out, references followed, negation is pushed down to the keywords (negation normal form).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..errors import ConstraintRefused, LimitExceeded
from ..language import Language
from ..limits import Limits
from ..regex.parser import search_regex
from .applicators import (
    conditional,
    dependencies,
    exactly_one,
    merged,
    not_dependencies,
    unevaluated_items,
    unevaluated_members,
)
from .assertions import (
    arrays_asked,
    format_asked,
    not_arrays,
    not_format,
    not_numbers,
    not_objects,
    not_strings,
    numbers_asked,
    objects_asked,
    strings_asked,
)
from .conjuncts import (
    EVERY_TYPE,
    NUMBER,
    Conjunct,
    Disjunction,
    Subschema,
    Subschemas,
    conjoined,
    inexpressible,
    of_type,
    unevaluated,
)
from .document import Document, Draft, Schema, Value
from .keywords import Deviations, at, branches, constants, flag, groups_of, invalid, ordered, structure
from .satisfiability import Satisfiability

if TYPE_CHECKING:
    pass


MOST_CONJUNCTS = 5_000  # ways to meet one schema
MOST_PRODUCTS = 300  # where ways meet ways

# A part of an allOf with one of these is read by itself.
_OF_ITS_OWN = ("$ref", "$dynamicRef", "unevaluatedProperties", "unevaluatedItems")


class Normalizer:
    """Normalizes the schemas of one document; remembers what it has normalized."""

    def __init__(self, document: Document, limits: Limits, deviations: Deviations) -> None:
        self.document = document
        self.limits = limits
        self.deviations = deviations
        self.nothing = Subschema(document.root.derived(False, "nothing"))
        self._known: dict[Subschema, Disjunction] = {}
        self._conjunctions: dict[Subschemas, Disjunction] = {}
        self.open: dict[Subschema, None] = {}
        self.latest = "#"  # the place that is worked on, for refusals
        self._patterns: dict[str, Language] = {}
        self.satisfiability = Satisfiability(self)

    def find(self, pattern: str) -> Language:
        """Returns the strings in which a pattern is found."""
        found = self._patterns.get(pattern)
        if found is None:
            found = self._patterns[pattern] = search_regex(pattern, self.limits, "ecma")
        return found

    def disjunction(self, subschema: Subschema) -> Disjunction:
        """Returns the normal form of one schema or of its negation: the ways to meet it, none when nothing does.

        Raises:
            ConstraintRefused: a keyword has an invalid value, a reference leads nowhere, or back without progress.
            LimitExceeded: too many ways, or references that follow each other too deep.
        """
        found = self._known.get(subschema)
        if found is not None:
            return found
        schema, holds = subschema
        self.latest = schema.path
        if subschema in self.open:
            raise ConstraintRefused(
                "the schema refers back to itself before it says anything; let it go through properties or items",
                where=schema.path,
                keyword="$ref",
            )
        if len(self.open) >= self.limits.depth:
            raise LimitExceeded(f"references follow each other more than {self.limits.depth} deep", where=schema.path)
        self.open[subschema] = None
        try:
            found = self._holding_ways(schema) if holds else failing_ways(self, schema)
        finally:
            del self.open[subschema]
        self._known[subschema] = found
        return found

    def conjunction(self, subschemas: Subschemas) -> Disjunction:
        """Returns the normal form of all of them together."""
        if len(subschemas) == 1:
            return self.disjunction(subschemas[0])
        found = self._conjunctions.get(subschemas)
        if found is None:
            where = subschemas[0].schema.path if subschemas else "#"
            found = self._conjunctions[subschemas] = self.product(
                (self.disjunction(subschema) for subschema in subschemas), where
            )
        return found

    def product(self, groups: Iterable[Disjunction], where: str) -> Disjunction:
        """Conjoins one conjunct of each group, in all ways that leave something."""
        found: Disjunction = (Conjunct(where),)
        for group in groups:
            if len(found) * len(group) > (MOST_PRODUCTS if len(found) > 1 < len(group) else MOST_CONJUNCTS):
                raise LimitExceeded(
                    f"{len(found)} alternatives meet {len(group)} others, which is too many; write fewer of them",
                    where=where,
                )
            several = len(found) > 1 or len(group) > 1
            met = (conjoined(left, right) for left in found for right in group)
            found = tuple(
                conjunct
                for conjunct in met
                if conjunct is not None and not (several and self.satisfiability.empty(conjunct))
            )
        return found

    def _holding_ways(self, schema: Schema) -> Disjunction:
        value = schema.value
        if isinstance(value, bool):
            return (Conjunct(schema.path),) if value else ()
        if "$ref" in value and self.document.draft <= Draft.DRAFT7:
            return self.disjunction(Subschema(self.document.target(schema, "$ref")))
        pairs = ordered(self._pairs(schema))
        found = self.product((self._holding(part, group) for part, group in pairs if group != "oneOf"), schema.path)
        for part, group in pairs:
            if group == "oneOf":
                found = exactly_one(self, part, found)
        for keyword, evaluate in (
            ("unevaluatedProperties", unevaluated_members),
            ("unevaluatedItems", unevaluated_items),
        ):
            if keyword in value:
                rest = Subschema(schema.child(keyword))
                if keyword == "unevaluatedItems" and any(each.arrays and each.arrays.contains for each in found):
                    self.deviations.narrow(at(schema, keyword), keyword, "what contains finds counts as unevaluated")
                found = tuple(conjunct for old in found if (conjunct := evaluate(old, rest)) is not None)
        return found

    def _pairs(self, schema: Schema) -> Iterator[tuple[Schema, str]]:
        """Yields the groups of keywords of a schema and of what holds with it: an allOf is as if written here."""
        for group in groups_of(schema.value):
            if group != "allOf":
                yield schema, group
                continue
            for part in branches(schema, group):
                value = part.value
                whole = isinstance(value, bool) or any(keyword in value for keyword in _OF_ITS_OWN)
                yield from ((part, "whole"),) if whole else self._pairs(part)

    def _holding(self, schema: Schema, group: str) -> Disjunction:
        match group:
            case "numbers":
                return (numbers_asked(schema),)
            case "strings":
                return (strings_asked(schema, self.find, self.deviations),)
            case "arrays":
                return (arrays_asked(schema),)
            case "objects":
                return (objects_asked(schema, self.find, self.deviations),)
            case "format":
                return (format_asked(schema, self.deviations),)
            case "type":
                return (of_type(schema.path, self.types(schema)),)
            case "const" | "enum":
                return (Conjunct(schema.path, values=constants(schema, group)),)
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return self.disjunction(Subschema(self.target(schema, group)))
            case "whole":
                return self.disjunction(Subschema(schema))
            case "anyOf":
                return merged(
                    [conjunct for part in branches(schema, group) for conjunct in self.disjunction(Subschema(part))]
                )
            case "not":
                return self.failing(schema.child("not"))
            case "if":
                return tuple(conditional(self, schema, True))
        return self.product((tuple(ways) for ways in dependencies(self, schema, group)), schema.path)

    def types(self, schema: Schema) -> frozenset[str]:
        given = schema.value["type"]
        found: set[str] = set()
        for name in given if isinstance(given, list) else [given]:
            if name == "number":
                found |= NUMBER
            elif isinstance(name, str) and name in EVERY_TYPE and name != "fraction":
                found.add(name)
            elif name == "any" and self.document.draft == Draft.DRAFT4:  # of draft 3
                return EVERY_TYPE
            else:
                raise invalid(
                    schema, "type", "null, boolean, integer, number, string, array or object, or an array of these"
                )
        # OpenAPI's word; a document that names its dialect means what that says.
        if "nullable" in schema.value and not self.document.names_dialect and flag(schema, "nullable"):
            found.add("null")
        return frozenset(found)

    def target(self, schema: Schema, keyword: str) -> Schema:
        match keyword:
            case "$ref":
                return self.document.target(schema, keyword)
            case "$dynamicRef":
                return self.document.dynamic_target(schema)
        self.deviations.refuse(
            "where it leads depends on the way taken; write $ref to what is meant", at(schema, keyword), keyword
        )
        return schema.derived(True, keyword)

    def failing(self, schema: Schema) -> Disjunction:
        """Returns the normal form of a negated schema among others; what it looks at does not count as evaluated."""
        return tuple(unevaluated(conjunct) for conjunct in self.disjunction(Subschema(schema, False)))


def failing_ways(normalizer: Normalizer, schema: Schema) -> Disjunction:
    value = schema.value
    if isinstance(value, bool):
        return () if value else (Conjunct(schema.path),)
    if "$ref" in value and normalizer.document.draft <= Draft.DRAFT7:
        return normalizer.disjunction(Subschema(normalizer.document.target(schema, "$ref"), False))
    found = [conjunct for group in groups_of(value) for conjunct in _failing(normalizer, schema, group)]
    for keyword, kind in (("unevaluatedProperties", "object"), ("unevaluatedItems", "array")):
        if value.get(keyword, True) is not True:
            found.append(inexpressible(schema.path, keyword, kind))
    lost = [conjunct.inexpressible for conjunct in found if conjunct.inexpressible is not None]
    if lost and len(lost) == len(found):
        keyword, where = lost[-1]
        why = "what does not meet this cannot be expressed; write what is meant instead"
        normalizer.deviations.refuse(why, where, keyword)
        return (Conjunct(schema.path),)
    return merged(found)


def _failing(normalizer: Normalizer, schema: Schema, group: str) -> Iterable[Conjunct]:
    match group:
        case "numbers":
            return not_numbers(schema)
        case "strings":
            return not_strings(schema, normalizer.find, normalizer.deviations)
        case "arrays":
            return not_arrays(schema)
        case "objects":
            return not_objects(schema, normalizer.find, normalizer.nothing, normalizer.deviations)
        case "format":
            return not_format(schema)
        case "type":
            return (of_type(schema.path, EVERY_TYPE - normalizer.types(schema)),)
        case "const" | "enum":
            return _not_constants(normalizer, schema, constants(schema, group))
        case "$ref" | "$dynamicRef" | "$recursiveRef":
            return normalizer.disjunction(Subschema(normalizer.target(schema, group), False))
        case "allOf":
            return (
                conjunct
                for part in branches(schema, group)
                for conjunct in normalizer.disjunction(Subschema(part, False))
            )
        case "anyOf":
            return normalizer.product(
                (normalizer.disjunction(Subschema(part, False)) for part in branches(schema, group)), schema.path
            )
        case "oneOf":
            return _not_one_of(normalizer, schema)
        case "not":
            return normalizer.disjunction(Subschema(schema.child("not")))
        case "if":
            return conditional(normalizer, schema, False)
    return not_dependencies(normalizer, schema, group)


def _not_constants(normalizer: Normalizer, schema: Schema, values: tuple[Value, ...]) -> Disjunction:
    scalars = tuple(value for value in values if not isinstance(value, list | dict))
    groups: list[Disjunction] = [(Conjunct(schema.path, excluded=scalars),)] if scalars else []
    for index, value in enumerate(values):
        if isinstance(value, list | dict):
            groups.append(normalizer.disjunction(Subschema(structure(schema, value, f"enum/{index}"), False)))
    return normalizer.product(groups, schema.path)


def _not_one_of(normalizer: Normalizer, schema: Schema) -> Iterator[Conjunct]:
    parts = branches(schema, "oneOf")
    yield from normalizer.product((normalizer.disjunction(Subschema(part, False)) for part in parts), schema.path)
    for index, left in enumerate(parts):
        for right in parts[index + 1 :]:
            yield from normalizer.product(
                (normalizer.disjunction(Subschema(left)), normalizer.disjunction(Subschema(right))), schema.path
            )
