"""A clause: what one way of meeting a schema asks of a value, type by type.

A schema means the union of its clauses. Two clauses meet in one that asks both. What is asked of the parts of a value
(members, items) stays a reference to schemas: so recursion costs nothing here, and sharing is kept.

    {"type": ["string", "null"], "maxLength": 3, "anyOf": [A, B]}   →   type, length and A  |  type, length and B
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..language import Language
from .document import Schema
from .membership import admits
from .numbers import Numbers, common_multiple, meet
from .source import Value, identity
from .strings import Strings

# JSON's types, with numbers parted: a schema may ask for integers, or (by negation) for what is no integer.
TYPES = ("null", "boolean", "integer", "fraction", "string", "array", "object")
EVERY_TYPE = frozenset(TYPES)
NUMBER = frozenset({"integer", "fraction"})


class Demand(NamedTuple):
    """A schema that a value has to meet, or (`holds` False) must not meet."""

    schema: Schema
    holds: bool = True


Demands = tuple[Demand, ...]


@dataclass(frozen=True, slots=True)
class Contains:
    """At least and at most so many items meet a demand."""

    demand: Demand
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Arrays:
    """What is asked of an array. `evaluated`: how many items the schema has looked at; None: every one."""

    where: str
    prefix: tuple[Demands, ...] = ()
    rest: Demands = ()
    least: int = 0
    most: int | None = None
    unique: bool = False
    contains: tuple[Contains, ...] = ()
    evaluated: int | None = 0


@dataclass(frozen=True, slots=True)
class PatternMembers:
    """What is asked of the members whose name is of a language."""

    names: Language
    demand: Demand


@dataclass(frozen=True, slots=True)
class OtherMembers:
    """What is asked of the members that have none of these names, and whose name is of none of these languages.

    `demand` None: there is at least one such member.
    """

    names: frozenset[str]
    patterns: tuple[Language, ...]
    demand: Demand | None


@dataclass(frozen=True, slots=True)
class Objects:
    """What is asked of an object. `properties` is in the order of writing; never changed.

    `evaluated`: the members that the schema has looked at (for "unevaluatedProperties"); None: every one.
    """

    where: str
    properties: dict[str, Demands]
    required: tuple[str, ...] = ()
    patterns: tuple[PatternMembers, ...] = ()
    others: tuple[OtherMembers, ...] = ()
    names: Demands = ()
    least: int = 0
    most: int | None = None
    evaluated: tuple[str | Language, ...] | None = ()  # a name, or a language of names


@dataclass(frozen=True, slots=True)
class Clause:
    """What is asked of a value. A part that is None asks nothing of its type; `types` None: of any type.

    `unexpressed`: (keyword, place) of something that is asked besides, and that no language gives. So the clause is met
    by all the values that are meant, and by others: whether it is met at all can be told, and nothing is written by it.
    """

    where: str
    types: frozenset[str] | None = None
    values: tuple[Value, ...] | None = None  # one of these
    excluded: tuple[Value, ...] = ()  # scalars only
    numbers: Numbers | None = None
    strings: Strings | None = None
    arrays: Arrays | None = None
    objects: Objects | None = None
    unexpressed: tuple[str, str] | None = None

    @property
    def asks_nothing(self) -> bool:
        return (
            self.types is None
            and self.values is None
            and not self.excluded
            and self.numbers is None
            and self.strings is None
            and self.arrays is None
            and self.objects is None
            and self.unexpressed is None
        )

    @property
    def spoken_of(self) -> frozenset[str]:
        """The types that keywords of one type only speak about."""
        found: set[str] = set()
        if self.numbers is not None:
            found |= NUMBER
        for name, part in (("string", self.strings), ("array", self.arrays), ("object", self.objects)):
            if part is not None:
                found.add(name)
        return frozenset(found)

    @property
    def only_values(self) -> bool:
        return self.values is not None and not (self.types or self.excluded or self.spoken_of or self.unexpressed)


Clauses = tuple[Clause, ...]  # alternatives: one of them is met


def unexpressed(where: str, keyword: str, kind: str, **parts: Any) -> Clause:
    """A way to miss a keyword that no language gives: some of the values of this type. `parts`: of the clause."""
    return Clause(where, types=frozenset({kind}), unexpressed=(keyword, f"{where}/{keyword}"), **parts)


def of_type(where: str, types: Iterable[str]) -> Clause:
    return Clause(where, types=frozenset(types))


def type_of(value: Value) -> str:
    """Which of TYPES a value is of."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "integer" if value == int(value) else "fraction"


def meeting(left: Clause, right: Clause) -> Clause | None:
    """What meets both; None where types or values already leave nothing."""
    if left.asks_nothing:
        return right
    if right.asks_nothing:
        return left
    types = left.types if right.types is None else right.types if left.types is None else left.types & right.types
    values = left.values if right.values is None else right.values
    if left.values is not None and right.values is not None:
        allowed = {identity(value) for value in right.values}
        values = tuple(value for value in left.values if identity(value) in allowed)
    if types is not None and values is not None:
        values = tuple(value for value in values if type_of(value) in types)
    if values == () or (types is not None and not types):
        return None
    return Clause(
        left.where,
        types,
        values,
        left.excluded + right.excluded,
        _numbers(left.numbers, right.numbers),
        _strings(left.strings, right.strings),
        _arrays(left.arrays, right.arrays),
        _objects(left.objects, right.objects),
        left.unexpressed or right.unexpressed,
    )


def _numbers(left: Numbers | None, right: Numbers | None) -> Numbers | None:
    if left is None or right is None:
        return left or right
    return Numbers(
        meet(left.least, right.least, True),
        meet(left.most, right.most, False),
        common_multiple(left.multiple, right.multiple),
        left.not_multiples + right.not_multiples,
    )


def _strings(left: Strings | None, right: Strings | None) -> Strings | None:
    if left is None or right is None:
        return left or right
    return Strings(
        max(left.least, right.least),
        least_of(left.most, right.most),
        left.languages + tuple(language for language in right.languages if language not in left.languages),
        left.barred + right.barred,
        narrow=left.narrow or right.narrow,
    )


def _arrays(left: Arrays | None, right: Arrays | None) -> Arrays | None:
    if left is None or right is None:
        return left or right
    length = max(len(left.prefix), len(right.prefix))
    prefix = tuple(joined(item_demands(left, index), item_demands(right, index)) for index in range(length))
    return Arrays(
        left.where,
        prefix,
        joined(left.rest, right.rest),
        max(left.least, right.least),
        least_of(left.most, right.most),
        left.unique or right.unique,
        left.contains + right.contains,
        None if left.evaluated is None or right.evaluated is None else max(left.evaluated, right.evaluated),
    )


def _objects(left: Objects | None, right: Objects | None) -> Objects | None:
    if left is None or right is None:
        return left or right
    properties = dict(left.properties)
    for name, demands in right.properties.items():
        properties[name] = joined(properties.get(name, ()), demands)
    return Objects(
        left.where,
        properties,
        tuple(dict.fromkeys(left.required + right.required)),
        left.patterns + right.patterns,
        left.others + right.others,
        joined(left.names, right.names),
        max(left.least, right.least),
        least_of(left.most, right.most),
        None if left.evaluated is None or right.evaluated is None else left.evaluated + right.evaluated,
    )


def item_demands(arrays: Arrays, index: int) -> Demands:
    """What is asked of the item at a position."""
    return arrays.prefix[index] if index < len(arrays.prefix) else arrays.rest


def member_demands(objects: Objects, name: str) -> Demands:
    """What is asked of the value of a member."""
    found = objects.properties.get(name, ())
    for pattern in objects.patterns:
        if admits(pattern.names, name):
            found = joined(found, (pattern.demand,))
    for others in objects.others:
        if others.demand is not None and is_other(others, name):
            found = joined(found, (others.demand,))
    return found


def is_other(others: OtherMembers, name: str) -> bool:
    return name not in others.names and not any(admits(pattern, name) for pattern in others.patterns)


def joined(left: Demands, right: Demands) -> Demands:
    """Both, without repetitions."""
    return left + tuple(demand for demand in right if demand not in left) if left else right


def least_of(left: int | None, right: int | None) -> int | None:
    """The stricter of two upper bounds."""
    if left is None or right is None:
        return left if right is None else right
    return min(left, right)


def unevaluated(clause: Clause) -> Clause:
    """The clause as if nobody had looked at the parts: what a negated schema looks at does not count."""
    return replace(
        clause,
        arrays=clause.arrays and replace(clause.arrays, evaluated=0),
        objects=clause.objects and replace(clause.objects, evaluated=()),
    )


def scalars_left(clause: Clause) -> tuple[Value, ...]:
    """The scalars among a clause's values that meet everything else it asks."""
    assert clause.values is not None, "asked of a clause without values"
    barred = {identity(value) for value in clause.excluded}
    return tuple(value for value in clause.values if identity(value) not in barred and _admitted(clause, value))


def _admitted(clause: Clause, value: Value) -> bool:
    kind = type_of(value)
    if clause.types is not None and kind not in clause.types:
        return False
    match kind:
        case "integer" | "fraction":
            return clause.numbers is None or clause.numbers.holds(value)
        case "string":
            return clause.strings is None or clause.strings.holds(value)
        case "array" | "object":
            return False
    return True


def numbers_of(clause: Clause, types: frozenset[str]) -> Numbers:
    """What the clause asks of numbers, when it is one of `types`."""
    whole = None if types >= NUMBER else "integer" in types
    excluded = tuple(value for value in clause.excluded if type_of(value) in NUMBER)
    return replace(clause.numbers or Numbers(), whole=whole, excluded=excluded)


def strings_of(clause: Clause) -> Strings:
    """What the clause asks of strings."""
    excluded = tuple(value for value in clause.excluded if isinstance(value, str))
    return replace(clause.strings or Strings(), excluded=excluded)
