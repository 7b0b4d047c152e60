"""Applicators with cases: oneOf, if, what depends on the presence of a member, and what is left unevaluated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from .assertions import objects_where
from .conjuncts import Arrays, Conjunct, Disjunction, Objects, OtherMembers, Subschema, conjoined
from .document import Schema, Value, distinct, identity
from .keywords import at, branches, looks_inside, mapping, names

if TYPE_CHECKING:
    from .normalizer import Normalizer


if TYPE_CHECKING:
    from .normalizer import Normalizer


MOST_FAILURES = 64  # ways in which the other branches of a oneOf may fail


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
