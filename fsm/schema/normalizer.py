"""Brings schemas to disjunctive normal form: unions of conjuncts.

Applicators are multiplied out, references followed, negation is pushed down to the keywords (negation normal form). The
functions at the end read the applicators with cases: oneOf, if, what depends on the presence of a member, and what is
left unevaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from ..errors import ConstraintRefused, LimitExceeded, Limits
from ..language import Language
from ..regex.parser import search_regex
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
    objects_where,
    strings_asked,
)
from .conjuncts import (
    EVERY_TYPE,
    NUMBER,
    Arrays,
    Conjunct,
    Disjunction,
    Objects,
    OtherMembers,
    Subschema,
    Subschemas,
    conjoined,
    inexpressible,
    of_type,
    unevaluated,
)
from .document import Document, Draft, Schema, Value, distinct, identity
from .keywords import (
    Deviations,
    at,
    branches,
    constants,
    flag,
    groups_of,
    invalid,
    looks_inside,
    mapping,
    names,
    ordered,
    structure,
)
from .satisfiability import Satisfiability

MOST_CONJUNCTS = 5_000  # ways to meet one schema
MOST_PRODUCTS = 300  # where ways meet ways
# A part of an allOf with one of these is read by itself.
_OF_ITS_OWN = ("$ref", "$dynamicRef", "unevaluatedProperties", "unevaluatedItems")
MOST_FAILURES = 64  # ways in which the other branches of a oneOf may fail


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


def exactly_one(normalizer: Normalizer, schema: Schema, context: Disjunction) -> Disjunction:
    """Normalizes oneOf to what the context leaves: each branch without the others that could hold as well."""
    parts = branches(schema, "oneOf")
    ways = [normalizer.disjunction(Subschema(part)) for part in parts]
    if all(conjunct.only_values for way in ways for conjunct in way):
        return normalizer.product((context, _exactly_one_value(schema, ways)), schema.path)
    found: list[Conjunct] = []
    overlapping: list[Conjunct] = []
    for index, way in enumerate(ways):
        mine = normalizer.product((context, way), schema.path)
        others = [
            part
            for other, part in enumerate(parts)
            if other != index and not normalizer.satisfiability.disjoint(mine, ways[other])
        ]
        if others:
            overlapping += mine
            mine = normalizer.product((mine, *_failures(normalizer, others, len(mine))), schema.path)
        found += mine
    if overlapping and all(conjunct.inexpressible for conjunct in found):
        normalizer.deviations.refuse(
            "the branches hold together, and what only one of them admits cannot be expressed; "
            "write anyOf, or tell them apart by a required member with a const",
            at(schema, "oneOf"),
            "oneOf",
        )
        found = overlapping
    return merged(found)


def _failures(normalizer: Normalizer, parts: list[Schema], count: int) -> list[Disjunction]:
    """Lists the ways in which each of some schemas does not hold; where those multiply, a few simple ones, others as
    one that is not expressed."""
    groups = [normalizer.failing(part) for part in parts]
    if count * prod(map(len, groups)) <= MOST_FAILURES:
        return groups
    most = max(1, int((MOST_FAILURES / count) ** (1 / len(groups))))
    found: list[Disjunction] = []
    for part, group in zip(parts, groups, strict=True):
        simple = sorted(group, key=lambda conjunct: _intricacy(normalizer, conjunct))[:most]
        if len(simple) < len(group):
            simple.append(Conjunct(part.path, inexpressible=("oneOf", part.path)))
        found.append(tuple(simple))
    return found


def _intricacy(normalizer: Normalizer, conjunct: Conjunct) -> int:
    """Ranks a conjunct.

    0: a type, or a member that is absent; 1: scalars; 2: what needs a look into arrays and objects.
    """
    subschemas = [
        subschema for found in (conjunct.objects.properties if conjunct.objects else {}).values() for subschema in found
    ]
    subschemas += [asked.subschema for asked in (conjunct.arrays.contains if conjunct.arrays else ())]
    if all(subschema == normalizer.nothing for subschema in subschemas):
        return 0
    return 2 if any(looks_inside(subschema.schema) for subschema in subschemas) else 1


def _exactly_one_value(schema: Schema, ways: list[Disjunction]) -> Disjunction:
    values: list[Value] = []
    for way in ways:
        values += distinct([value for conjunct in way for value in conjunct.values or ()])
    seen = [identity(value) for value in values]
    counts: dict[object, int] = {}
    for key in seen:
        counts[key] = counts.get(key, 0) + 1
    single = tuple(value for value, key in zip(values, seen, strict=True) if counts[key] == 1)
    return (Conjunct(schema.path, values=single),) if single else ()


def conditional(normalizer: Normalizer, schema: Schema, holds: bool) -> Iterator[Conjunct]:
    """Yields if with then, and the failing `if` with else; the other way round for a schema that must fail."""
    value = schema.value
    if "if" not in value:
        if not holds:
            return
        yield Conjunct(schema.path)
        return
    for outcome, taken in (("then", True), ("else", False)):
        if outcome not in value and not holds:
            continue
        condition = schema.child("if")
        given = normalizer.disjunction(Subschema(condition)) if taken else normalizer.failing(condition)
        consequence = (
            normalizer.disjunction(Subschema(schema.child(outcome), holds))
            if outcome in value
            else (Conjunct(schema.path),)
        )
        yield from normalizer.product((given, consequence), schema.path)


def merged(conjuncts: list[Conjunct]) -> Disjunction:
    """Alternatives without repetitions; those that only list values become one list."""
    values = [value for conjunct in conjuncts if conjunct.only_values for value in conjunct.values or ()]
    found: list[Conjunct] = []
    listed_values = False
    for conjunct in {id(conjunct): conjunct for conjunct in conjuncts}.values():
        if not conjunct.only_values:
            found.append(conjunct)
        elif not listed_values:
            listed_values = True
            found.append(replace(conjunct, values=tuple(distinct(values))))
    return tuple(found)


def dependencies(normalizer: Normalizer, schema: Schema, keyword: str) -> Iterator[list[Conjunct]]:
    """Yields, for each name: the member is absent, or what depends on it holds."""
    for name, needed in mapping(schema, keyword).items():
        absent = objects_where(schema.path, properties={name: (normalizer.nothing,)})
        present = objects_where(schema.path, required=(name,))
        # What is needed first: members that are not declared come in this order.
        holding = normalizer.product((_dependent(normalizer, schema, keyword, name, needed), (present,)), schema.path)
        if name in schema.value.get("required", ()):
            yield [replace(conjunct, types=None) for conjunct in holding]
        else:
            yield [replace(absent, types=None), *holding]


def _dependent(normalizer: Normalizer, schema: Schema, keyword: str, name: str, needed: Value) -> Disjunction:
    if keyword == "dependentRequired" or (keyword == "dependencies" and not isinstance(needed, dict | bool)):
        listed_names = [needed] if isinstance(needed, str) else needed
        return (objects_where(schema.path, required=names(schema, keyword, listed_names)),)
    return normalizer.disjunction(Subschema(schema.child(keyword, name)))


def not_dependencies(normalizer: Normalizer, schema: Schema, keyword: str) -> Iterator[Conjunct]:
    for name, needed in mapping(schema, keyword).items():
        present = objects_where(schema.path, required=(name,))
        if isinstance(needed, dict | bool):
            failing = normalizer.disjunction(Subschema(schema.child(keyword, name), False))
        else:
            wanted = names(schema, keyword, [needed] if isinstance(needed, str) else needed)
            failing = tuple(objects_where(schema.path, properties={other: (normalizer.nothing,)}) for other in wanted)
        yield from normalizer.product(((present,), failing), schema.path)


def unevaluated_members(conjunct: Conjunct, rest: Subschema) -> Conjunct | None:
    objects = conjunct.objects
    if objects is not None and objects.evaluated is None:
        return conjunct
    seen = objects.evaluated if objects is not None and objects.evaluated is not None else ()
    names_seen = frozenset(name for name in seen if isinstance(name, str))
    patterns = tuple(pattern for pattern in seen if not isinstance(pattern, str))
    asked = Objects(conjunct.where, {}, others=(OtherMembers(names_seen, patterns, rest),), evaluated=None)
    return conjoined(conjunct, Conjunct(conjunct.where, objects=asked))


def unevaluated_items(conjunct: Conjunct, rest: Subschema) -> Conjunct | None:
    arrays = conjunct.arrays
    if arrays is not None and arrays.evaluated is None:
        return conjunct
    seen = arrays.evaluated if arrays is not None and arrays.evaluated is not None else 0
    asked = Arrays(conjunct.where, prefix=((),) * seen, rest=(rest,), evaluated=None)
    return conjoined(conjunct, Conjunct(conjunct.where, arrays=asked))
