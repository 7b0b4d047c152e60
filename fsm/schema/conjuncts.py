"""Conjuncts: what one way of meeting a schema asks of a value, type by type.

A schema is brought to disjunctive normal form: a union of conjuncts, one of which is met. Two conjuncts are conjoined
in one that asks both. What is asked of the parts of a value (members, items) stays a reference to subschemas: so
recursion costs nothing here, and sharing is kept.

    {"type": ["string", "null"], "maxLength": 3, "anyOf": [A, B]}   →   type, length and A  |  type, length and B
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..language import Language
from .document import Schema, Value, identity
from .numbers import Numbers, common_multiple, meet
from .strings import Strings, admits

# JSON's types, with numbers parted: a schema may ask for integers, or (by negation) for what is no integer.
TYPES = ("null", "boolean", "integer", "fraction", "string", "array", "object")
EVERY_TYPE = frozenset(TYPES)
NUMBER = frozenset({"integer", "fraction"})


class Subschema(NamedTuple):
    """A schema that a value has to meet, or (`holds` False) must not meet: a literal of the normal form."""

    schema: Schema
    holds: bool = True


Subschemas = tuple[Subschema, ...]


@dataclass(frozen=True, slots=True)
class Contains:
    """Asserts that at least and at most so many items meet a subschema."""

    subschema: Subschema
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Arrays:
    """Asserts something of an array. `evaluated`: how many items the schema has looked at; None: every one."""

    where: str
    prefix: tuple[Subschemas, ...] = ()
    rest: Subschemas = ()
    least: int = 0
    most: int | None = None
    unique: bool = False
    contains: tuple[Contains, ...] = ()
    evaluated: int | None = 0


@dataclass(frozen=True, slots=True)
class PatternMembers:
    """Applies a subschema to the members whose name is of a language."""

    names: Language
    subschema: Subschema


@dataclass(frozen=True, slots=True)
class OtherMembers:
    """Applies a subschema to the members that have none of these names, nor a name of one of these languages.

    `subschema` None: there is at least one such member.
    """

    names: frozenset[str]
    patterns: tuple[Language, ...]
    subschema: Subschema | None


@dataclass(frozen=True, slots=True)
class Objects:
    """Asserts something of an object. `properties` is in the order of writing; never changed.

    `evaluated`: the members that the schema has looked at (for "unevaluatedProperties"); None: every one.
    """

    where: str
    properties: dict[str, Subschemas]
    required: tuple[str, ...] = ()
    patterns: tuple[PatternMembers, ...] = ()
    others: tuple[OtherMembers, ...] = ()
    names: Subschemas = ()
    least: int = 0
    most: int | None = None
    evaluated: tuple[str | Language, ...] | None = ()  # a name, or a language of names


@dataclass(frozen=True, slots=True)
class Conjunct:
    """Asserts something of a value. A part that is None asks nothing of its type; `types` None: of any type.

    `inexpressible`: (keyword, place) of something that is asked as well, and that no language gives. So the conjunct is
    met by all the values that are meant, and by others: whether it is met at all can be told, and nothing is written by
    it.
    """

    where: str
    types: frozenset[str] | None = None
    values: tuple[Value, ...] | None = None  # one of these
    excluded: tuple[Value, ...] = ()  # scalars only
    numbers: Numbers | None = None
    strings: Strings | None = None
    arrays: Arrays | None = None
    objects: Objects | None = None
    inexpressible: tuple[str, str] | None = None

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
            and self.inexpressible is None
        )

    @property
    def implied_types(self) -> frozenset[str]:
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
        return self.values is not None and not (self.types or self.excluded or self.implied_types or self.inexpressible)


Disjunction = tuple[Conjunct, ...]  # a schema in disjunctive normal form: one of them is met


def inexpressible(where: str, keyword: str, kind: str, **parts: Any) -> Conjunct:
    """Makes a conjunct that misses a keyword in a way that no language gives. `parts`: of the conjunct."""
    return Conjunct(where, types=frozenset({kind}), inexpressible=(keyword, f"{where}/{keyword}"), **parts)


def of_type(where: str, types: Iterable[str]) -> Conjunct:
    return Conjunct(where, types=frozenset(types))


def type_of(value: Value) -> str:
    """Returns the one of TYPES that a value is of."""
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


def conjoined(left: Conjunct, right: Conjunct) -> Conjunct | None:
    """Returns the conjunct that asks what both ask; None where types or values already leave nothing."""
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
    return Conjunct(
        left.where,
        types,
        values,
        left.excluded + right.excluded,
        _numbers(left.numbers, right.numbers),
        _strings(left.strings, right.strings),
        _arrays(left.arrays, right.arrays),
        _objects(left.objects, right.objects),
        left.inexpressible or right.inexpressible,
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
        least_upper(left.most, right.most),
        left.languages + tuple(language for language in right.languages if language not in left.languages),
        left.barred + right.barred,
        narrow=left.narrow or right.narrow,
    )


def _arrays(left: Arrays | None, right: Arrays | None) -> Arrays | None:
    if left is None or right is None:
        return left or right
    length = max(len(left.prefix), len(right.prefix))
    prefix = tuple(joined(item_subschemas(left, index), item_subschemas(right, index)) for index in range(length))
    return Arrays(
        left.where,
        prefix,
        joined(left.rest, right.rest),
        max(left.least, right.least),
        least_upper(left.most, right.most),
        left.unique or right.unique,
        left.contains + right.contains,
        None if left.evaluated is None or right.evaluated is None else max(left.evaluated, right.evaluated),
    )


def _objects(left: Objects | None, right: Objects | None) -> Objects | None:
    if left is None or right is None:
        return left or right
    properties = dict(left.properties)
    for name, subschemas in right.properties.items():
        properties[name] = joined(properties.get(name, ()), subschemas)
    return Objects(
        left.where,
        properties,
        tuple(dict.fromkeys(left.required + right.required)),
        left.patterns + right.patterns,
        left.others + right.others,
        joined(left.names, right.names),
        max(left.least, right.least),
        least_upper(left.most, right.most),
        None if left.evaluated is None or right.evaluated is None else left.evaluated + right.evaluated,
    )


def item_subschemas(arrays: Arrays, index: int) -> Subschemas:
    """Returns the subschemas that the item at a position has to meet."""
    return arrays.prefix[index] if index < len(arrays.prefix) else arrays.rest


def member_subschemas(objects: Objects, name: str) -> Subschemas:
    """Returns the subschemas that the value of a member has to meet."""
    found = objects.properties.get(name, ())
    for pattern in objects.patterns:
        if admits(pattern.names, name):
            found = joined(found, (pattern.subschema,))
    for others in objects.others:
        if others.subschema is not None and is_other(others, name):
            found = joined(found, (others.subschema,))
    return found


def is_other(others: OtherMembers, name: str) -> bool:
    return name not in others.names and not any(admits(pattern, name) for pattern in others.patterns)


def joined(left: Subschemas, right: Subschemas) -> Subschemas:
    """Joins both, without repetitions."""
    return left + tuple(subschema for subschema in right if subschema not in left) if left else right


def least_upper(left: int | None, right: int | None) -> int | None:
    """Returns the stricter of two upper bounds."""
    if left is None or right is None:
        return left if right is None else right
    return min(left, right)


def unevaluated(conjunct: Conjunct) -> Conjunct:
    """Returns the conjunct as if no keyword had looked at the parts: what a negated schema looks at does not count."""
    return replace(
        conjunct,
        arrays=conjunct.arrays and replace(conjunct.arrays, evaluated=0),
        objects=conjunct.objects and replace(conjunct.objects, evaluated=()),
    )


def scalars_left(conjunct: Conjunct) -> tuple[Value, ...]:
    """Returns the scalars among a conjunct's values that meet everything else it asks."""
    assert conjunct.values is not None, "asked of a conjunct without values"
    barred = {identity(value) for value in conjunct.excluded}
    return tuple(value for value in conjunct.values if identity(value) not in barred and _admitted(conjunct, value))


def _admitted(conjunct: Conjunct, value: Value) -> bool:
    kind = type_of(value)
    if conjunct.types is not None and kind not in conjunct.types:
        return False
    match kind:
        case "integer" | "fraction":
            return conjunct.numbers is None or conjunct.numbers.holds(value)
        case "string":
            return conjunct.strings is None or conjunct.strings.holds(value)
        case "array" | "object":
            return False
    return True


def numbers_of(conjunct: Conjunct, types: frozenset[str]) -> Numbers:
    """Returns the numbers that the conjunct admits, when it is one of `types`."""
    whole = None if types >= NUMBER else "integer" in types
    excluded = tuple(value for value in conjunct.excluded if type_of(value) in NUMBER)
    return replace(conjunct.numbers or Numbers(), whole=whole, excluded=excluded)


def strings_of(conjunct: Conjunct) -> Strings:
    """Returns the strings that the conjunct admits."""
    excluded = tuple(value for value in conjunct.excluded if isinstance(value, str))
    return replace(conjunct.strings or Strings(), excluded=excluded)
