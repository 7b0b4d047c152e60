"""A schema that must not hold: negation goes down to the keywords."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .alternatives import conditional, merged
from .assertions import not_format, not_numbers, not_strings
from .clauses import EVERY_TYPE, Clause, Clauses, Demand, of_type, unexpressed
from .containers import not_arrays, not_objects
from .dependencies import not_dependencies
from .document import Draft, Schema
from .groups import constants, groups_of, structure
from .keywords import branches
from .source import Value

if TYPE_CHECKING:
    from .meaning import Meaning


def failing_ways(meaning: Meaning, schema: Schema) -> Clauses:
    value = schema.value
    if isinstance(value, bool):
        return () if value else (Clause(schema.path),)
    if "$ref" in value and meaning.document.draft <= Draft.DRAFT7:
        return meaning.clauses(Demand(meaning.document.target(schema, "$ref"), False))
    found = [clause for group in groups_of(value) for clause in _failing(meaning, schema, group)]
    for keyword, kind in (("unevaluatedProperties", "object"), ("unevaluatedItems", "array")):
        if value.get(keyword, True) is not True:
            found.append(unexpressed(schema.path, keyword, kind))
    lost = [clause.unexpressed for clause in found if clause.unexpressed is not None]
    if lost and len(lost) == len(found):
        keyword, where = lost[-1]
        why = "what does not meet this cannot be expressed; write what is meant instead"
        meaning.ledger.refuse(why, where, keyword)
        return (Clause(schema.path),)
    return merged(found)


def _failing(meaning: Meaning, schema: Schema, group: str) -> Iterable[Clause]:
    match group:
        case "numbers":
            return not_numbers(schema)
        case "strings":
            return not_strings(schema, meaning.find, meaning.ledger)
        case "arrays":
            return not_arrays(schema)
        case "objects":
            return not_objects(schema, meaning.find, meaning.nothing, meaning.ledger)
        case "format":
            return not_format(schema)
        case "type":
            return (of_type(schema.path, EVERY_TYPE - meaning.types(schema)),)
        case "const" | "enum":
            return _not_constants(meaning, schema, constants(schema, group))
        case "$ref" | "$dynamicRef" | "$recursiveRef":
            return meaning.clauses(Demand(meaning.target(schema, group), False))
        case "allOf":
            return (clause for part in branches(schema, group) for clause in meaning.clauses(Demand(part, False)))
        case "anyOf":
            return meaning.product(
                (meaning.clauses(Demand(part, False)) for part in branches(schema, group)), schema.path
            )
        case "oneOf":
            return _not_one_of(meaning, schema)
        case "not":
            return meaning.clauses(Demand(schema.child("not")))
        case "if":
            return conditional(meaning, schema, False)
    return not_dependencies(meaning, schema, group)


def _not_constants(meaning: Meaning, schema: Schema, values: tuple[Value, ...]) -> Clauses:
    scalars = tuple(value for value in values if not isinstance(value, list | dict))
    groups: list[Clauses] = [(Clause(schema.path, excluded=scalars),)] if scalars else []
    for index, value in enumerate(values):
        if isinstance(value, list | dict):
            groups.append(meaning.clauses(Demand(structure(schema, value, f"enum/{index}"), False)))
    return meaning.product(groups, schema.path)


def _not_one_of(meaning: Meaning, schema: Schema) -> Iterator[Clause]:
    parts = branches(schema, "oneOf")
    yield from meaning.product((meaning.clauses(Demand(part, False)) for part in parts), schema.path)
    for index, left in enumerate(parts):
        for right in parts[index + 1 :]:
            yield from meaning.product((meaning.clauses(Demand(left)), meaning.clauses(Demand(right))), schema.path)
