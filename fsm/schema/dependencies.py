"""What depends on the presence of a member, and what is asked of the parts that nothing has looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from .clauses import Arrays, Clause, Clauses, Demand, Objects, OtherMembers, meeting
from .containers import objects_where
from .document import Schema
from .keywords import mapping, names
from .source import Value

if TYPE_CHECKING:
    from .meaning import Meaning


def dependencies(meaning: Meaning, schema: Schema, keyword: str) -> Iterator[list[Clause]]:
    """For each name: the member is absent, or what depends on it holds."""
    for name, needed in mapping(schema, keyword).items():
        absent = objects_where(schema.path, properties={name: (meaning.nothing,)})
        present = objects_where(schema.path, required=(name,))
        # What is needed first: members that nobody declared come in this order.
        behind = meaning.product((_dependent(meaning, schema, keyword, name, needed), (present,)), schema.path)
        if name in schema.value.get("required", ()):
            yield [replace(clause, types=None) for clause in behind]
        else:
            yield [replace(absent, types=None), *behind]


def _dependent(meaning: Meaning, schema: Schema, keyword: str, name: str, needed: Value) -> Clauses:
    if keyword == "dependentRequired" or (keyword == "dependencies" and not isinstance(needed, dict | bool)):
        listed_names = [needed] if isinstance(needed, str) else needed
        return (objects_where(schema.path, required=names(schema, keyword, listed_names)),)
    return meaning.clauses(Demand(schema.child(keyword, name)))


def not_dependencies(meaning: Meaning, schema: Schema, keyword: str) -> Iterator[Clause]:
    for name, needed in mapping(schema, keyword).items():
        present = objects_where(schema.path, required=(name,))
        if isinstance(needed, dict | bool):
            failing = meaning.clauses(Demand(schema.child(keyword, name), False))
        else:
            wanted = names(schema, keyword, [needed] if isinstance(needed, str) else needed)
            failing = tuple(objects_where(schema.path, properties={other: (meaning.nothing,)}) for other in wanted)
        yield from meaning.product(((present,), failing), schema.path)


def unevaluated_members(clause: Clause, rest: Demand) -> Clause | None:
    objects = clause.objects
    if objects is not None and objects.evaluated is None:
        return clause
    seen = objects.evaluated if objects is not None and objects.evaluated is not None else ()
    names_seen = frozenset(name for name in seen if isinstance(name, str))
    patterns = tuple(pattern for pattern in seen if not isinstance(pattern, str))
    asked = Objects(clause.where, {}, others=(OtherMembers(names_seen, patterns, rest),), evaluated=None)
    return meeting(clause, Clause(clause.where, objects=asked))


def unevaluated_items(clause: Clause, rest: Demand) -> Clause | None:
    arrays = clause.arrays
    if arrays is not None and arrays.evaluated is None:
        return clause
    seen = arrays.evaluated if arrays is not None and arrays.evaluated is not None else 0
    asked = Arrays(clause.where, prefix=((),) * seen, rest=(rest,), evaluated=None)
    return meeting(clause, Clause(clause.where, arrays=asked))
