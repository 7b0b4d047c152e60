"""oneOf and if: alternatives that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from .clauses import Clause, Clauses, Demand
from .document import Schema
from .groups import looks_inside
from .keywords import at, branches
from .source import Value, distinct, identity

if TYPE_CHECKING:
    from .meaning import Meaning

MOST_FAILURES = 64  # ways in which the other branches of a oneOf may fail


def exactly_one(meaning: Meaning, schema: Schema, context: Clauses) -> Clauses:
    """Exactly one, of what the context leaves: each branch without the others that could hold beside it."""
    parts = branches(schema, "oneOf")
    ways = [meaning.clauses(Demand(part)) for part in parts]
    if all(clause.only_values for way in ways for clause in way):
        return meaning.product((context, _exactly_one_value(schema, ways)), schema.path)
    found: list[Clause] = []
    overlapping: list[Clause] = []
    for index, way in enumerate(ways):
        mine = meaning.product((context, way), schema.path)
        beside = [
            part
            for other, part in enumerate(parts)
            if other != index and not meaning.emptiness.apart(mine, ways[other])
        ]
        if beside:
            overlapping += mine
            mine = meaning.product((mine, *_failures(meaning, beside, len(mine))), schema.path)
        found += mine
    if overlapping and all(clause.unexpressed for clause in found):
        meaning.ledger.refuse(
            "the branches hold together, and what only one of them admits cannot be expressed; "
            "write anyOf, or tell them apart by a required member with a const",
            at(schema, "oneOf"),
            "oneOf",
        )
        found = overlapping
    return merged(found)


def _failures(meaning: Meaning, parts: list[Schema], count: int) -> list[Clauses]:
    """The ways in which each of some schemas does not hold; where those multiply, a few simple ones, and the others as
    one that is not expressed."""
    groups = [meaning.failing(part) for part in parts]
    if count * prod(map(len, groups)) <= MOST_FAILURES:
        return groups
    most = max(1, int((MOST_FAILURES / count) ** (1 / len(groups))))
    found: list[Clauses] = []
    for part, group in zip(parts, groups, strict=True):
        simple = sorted(group, key=lambda clause: _intricacy(meaning, clause))[:most]
        if len(simple) < len(group):
            simple.append(Clause(part.path, unexpressed=("oneOf", part.path)))
        found.append(tuple(simple))
    return found


def _intricacy(meaning: Meaning, clause: Clause) -> int:
    """0: a type, or a member that is absent; 1: scalars; 2: what needs a look into arrays and objects."""
    demands = [demand for found in (clause.objects.properties if clause.objects else {}).values() for demand in found]
    demands += [asked.demand for asked in (clause.arrays.contains if clause.arrays else ())]
    if all(demand == meaning.nothing for demand in demands):
        return 0
    return 2 if any(looks_inside(demand.schema) for demand in demands) else 1


def _exactly_one_value(schema: Schema, ways: list[Clauses]) -> Clauses:
    values: list[Value] = []
    for way in ways:
        values += distinct([value for clause in way for value in clause.values or ()])
    seen = [identity(value) for value in values]
    counts: dict[object, int] = {}
    for key in seen:
        counts[key] = counts.get(key, 0) + 1
    single = tuple(value for value, key in zip(values, seen, strict=True) if counts[key] == 1)
    return (Clause(schema.path, values=single),) if single else ()


def conditional(meaning: Meaning, schema: Schema, holds: bool) -> Iterator[Clause]:
    """if and then, or neither `if` nor anything against else; the other way round for a schema that must fail."""
    value = schema.value
    if "if" not in value:
        if not holds:
            return
        yield Clause(schema.path)
        return
    for outcome, taken in (("then", True), ("else", False)):
        if outcome not in value and not holds:
            continue
        condition = schema.child("if")
        given = meaning.clauses(Demand(condition)) if taken else meaning.failing(condition)
        behind = meaning.clauses(Demand(schema.child(outcome), holds)) if outcome in value else (Clause(schema.path),)
        yield from meaning.product((given, behind), schema.path)


def merged(clauses: list[Clause]) -> Clauses:
    """Alternatives without repetitions; those that only list values become one list."""
    values = [value for clause in clauses if clause.only_values for value in clause.values or ()]
    found: list[Clause] = []
    listed_values = False
    for clause in {id(clause): clause for clause in clauses}.values():
        if not clause.only_values:
            found.append(clause)
        elif not listed_values:
            listed_values = True
            found.append(replace(clause, values=tuple(distinct(values))))
    return tuple(found)
