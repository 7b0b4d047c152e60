"""From schemas to clauses: applicators are multiplied out, references followed, negation pushed to the keywords."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from ..errors import ConstraintRefused, LimitExceeded
from ..language import Language
from ..limits import Limits
from ..regex_parser import search_regex
from .assertions import (
    NUMBER_KEYWORDS,
    STRING_KEYWORDS,
    format_asked,
    not_format,
    not_numbers,
    not_strings,
    numbers_asked,
    strings_asked,
)
from .clauses import (
    EVERY_TYPE,
    NUMBER,
    Arrays,
    Clause,
    Demand,
    Demands,
    Objects,
    OtherMembers,
    item_demands,
    meeting,
    member_demands,
    numbers_of,
    of_type,
    scalars_left,
    strings_of,
    unevaluated,
)
from .containers import (
    ARRAY_KEYWORDS,
    OBJECT_KEYWORDS,
    arrays_asked,
    not_arrays,
    not_objects,
    objects_asked,
    objects_where,
)
from .document import Document, Draft, Schema
from .keywords import Ledger, at, branches, flag, invalid, listed, mapping, names
from .source import Value, distinct, identity

MOST_CLAUSES = 5_000  # ways to meet one schema
MOST_PRODUCTS = 300  # where ways meet ways
MOST_FAILURES = 64  # ways in which the other branches of a oneOf may fail
MOST_DEPTH = 3  # how far a contradiction is looked for below a required member

OBJECT = frozenset({"object"})

Clauses = tuple[Clause, ...]

_GROUPS = (  # keywords of a type, read together at the first of them
    (NUMBER_KEYWORDS, "numbers"),
    (STRING_KEYWORDS, "strings"),
    (ARRAY_KEYWORDS, "arrays"),
    (OBJECT_KEYWORDS, "objects"),
    (frozenset({"if", "then", "else"}), "if"),
)
_GROUP_OF = {keyword: group for keywords, group in _GROUPS for keyword in keywords}
_APPLICATORS = frozenset(
    {
        "type",
        "enum",
        "const",
        "format",
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
    }
)
# A part of an allOf with one of these is read by itself.
_OF_ITS_OWN = ("$ref", "$dynamicRef", "unevaluatedProperties", "unevaluatedItems")
# After the schema's own members, whose order is the order of writing; all others keep their place in the text.
_LATER = ("anyOf", "oneOf", "if", "dependentRequired", "dependentSchemas", "dependencies", "not")


class Meaning:
    """What the schemas of a document mean."""

    def __init__(self, document: Document, limits: Limits, ledger: Ledger) -> None:
        self.document = document
        self.limits = limits
        self.ledger = ledger
        self.nothing = Demand(document.root.derived(False, "nothing"))
        self._known: dict[Demand, Clauses] = {}
        self._together: dict[Demands, Clauses] = {}
        self._open: dict[Demand, None] = {}
        self._patterns: dict[str, Language] = {}

    def find(self, pattern: str) -> Language:
        """The strings in which a pattern is found."""
        found = self._patterns.get(pattern)
        if found is None:
            found = self._patterns[pattern] = search_regex(pattern, self.limits, "ecma")
        return found

    def clauses(self, demand: Demand) -> Clauses:
        """The ways to meet (or not to meet) one schema; none at all when nothing does.

        Raises:
            ConstraintRefused: a keyword has an invalid value, a reference leads nowhere, or back without progress.
            LimitExceeded: too many ways, or references that follow each other too deep.
        """
        found = self._known.get(demand)
        if found is not None:
            return found
        schema, holds = demand
        if demand in self._open:
            raise ConstraintRefused(
                "the schema refers back to itself before it says anything; let it go through properties or items",
                where=schema.path,
                keyword="$ref",
            )
        if len(self._open) >= self.limits.depth:
            raise LimitExceeded(f"references follow each other more than {self.limits.depth} deep", where=schema.path)
        self._open[demand] = None
        try:
            found = self._positive(schema) if holds else self._negative(schema)
        finally:
            del self._open[demand]
        self._known[demand] = found
        return found

    def together(self, demands: Demands) -> Clauses:
        """The ways to meet all of them."""
        if len(demands) == 1:
            return self.clauses(demands[0])
        found = self._together.get(demands)
        if found is None:
            where = demands[0].schema.path if demands else "#"
            found = self._together[demands] = self.product((self.clauses(demand) for demand in demands), where)
        return found

    def product(self, groups: Iterable[Clauses], where: str) -> Clauses:
        """One clause of each group, in all ways that leave something."""
        found: Clauses = (Clause(where),)
        for group in groups:
            if len(found) * len(group) > (MOST_PRODUCTS if len(found) > 1 < len(group) else MOST_CLAUSES):
                raise LimitExceeded(
                    f"{len(found)} alternatives meet {len(group)} others, which is too many; write fewer of them",
                    where=where,
                )
            several = len(found) > 1 or len(group) > 1
            met = (meeting(left, right) for left in found for right in group)
            found = tuple(clause for clause in met if clause is not None and not (several and self.empty(clause)))
        return found

    # What can be

    def empty(self, clause: Clause, depth: int = MOST_DEPTH) -> bool:
        """Whether nothing meets the clause. True is certain, False may be mistaken."""
        if clause.values is not None:
            if scalars_left(clause):
                return False
            return not any(isinstance(value, list | dict) for value in clause.values)
        return not self.types_left(clause, depth)

    def types_left(self, clause: Clause, depth: int = MOST_DEPTH) -> frozenset[str]:
        """The types of which some value may meet the clause."""
        types = EVERY_TYPE if clause.types is None else clause.types
        found = set(types)
        if clause.excluded:
            barred = {identity(value) for value in clause.excluded}
            if identity(None) in barred:
                found.discard("null")
            if {identity(True), identity(False)} <= barred:
                found.discard("boolean")
        if clause.numbers is not None:
            for kind in NUMBER & types:
                if numbers_of(clause, frozenset({kind})).empty:
                    found.discard(kind)
        if clause.strings is not None and strings_of(clause).empty:
            found.discard("string")
        if clause.arrays is not None and self._no_array(clause.arrays, depth):
            found.discard("array")
        if clause.objects is not None and self._no_object(clause.objects, depth):
            found.discard("object")
        return frozenset(found)

    def impossible(self, demands: Demands, depth: int = MOST_DEPTH) -> bool:
        """Whether nothing meets all of them; True is certain."""
        if any(demand.holds and demand.schema.value is False for demand in demands):
            return True
        if depth <= 0 or not demands or any(demand in self._open for demand in demands):
            return False
        try:
            ways = self.together(demands)
        except LimitExceeded:
            return False
        return all(self.empty(clause, depth - 1) for clause in ways)

    def _no_array(self, arrays: Arrays, depth: int) -> bool:
        if arrays.most is not None and arrays.most < arrays.least:
            return True
        checked = range(min(arrays.least, len(arrays.prefix) + 1))
        return any(self.impossible(item_demands(arrays, index), depth) for index in checked)

    def _no_object(self, objects: Objects, depth: int) -> bool:
        if objects.most is not None and objects.most < max(objects.least, len(objects.required)):
            return True
        return any(self.impossible(member_demands(objects, name), depth) for name in objects.required)

    # A schema that holds

    def _positive(self, schema: Schema) -> Clauses:
        value = schema.value
        if isinstance(value, bool):
            return (Clause(schema.path),) if value else ()
        if "$ref" in value and self.document.draft <= Draft.DRAFT7:
            return self.clauses(Demand(self.document.target(schema, "$ref")))
        pairs = _ordered(self._pairs(schema))
        found = self.product((self._holding(part, group) for part, group in pairs if group != "oneOf"), schema.path)
        for part, group in pairs:
            if group == "oneOf":
                found = self._one_of(part, found)
        for keyword, evaluate in (
            ("unevaluatedProperties", self._unevaluated_members),
            ("unevaluatedItems", self._unevaluated_items),
        ):
            if keyword in value:
                rest = Demand(schema.child(keyword))
                found = tuple(clause for old in found if (clause := evaluate(old, rest)) is not None)
        return found

    def _pairs(self, schema: Schema) -> Iterator[tuple[Schema, str]]:
        """The groups of keywords of a schema and of those that hold with it: an allOf is as if it were written here."""
        for group in _groups(schema.value):
            if group != "allOf":
                yield schema, group
                continue
            for part in branches(schema, group):
                value = part.value
                whole = isinstance(value, bool) or any(keyword in value for keyword in _OF_ITS_OWN)
                yield from ((part, "whole"),) if whole else self._pairs(part)

    def _holding(self, schema: Schema, group: str) -> Clauses:
        match group:
            case "numbers":
                return (numbers_asked(schema),)
            case "strings":
                return (strings_asked(schema, self.find, self.ledger),)
            case "arrays":
                return (arrays_asked(schema),)
            case "objects":
                return (objects_asked(schema, self.find, self.ledger),)
            case "format":
                return (format_asked(schema),)
            case "type":
                return (of_type(schema.path, self._types(schema)),)
            case "const" | "enum":
                return (Clause(schema.path, values=_constants(schema, group)),)
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return self.clauses(Demand(self._target(schema, group)))
            case "whole":
                return self.clauses(Demand(schema))
            case "anyOf":
                return _merged([clause for part in branches(schema, group) for clause in self.clauses(Demand(part))])
            case "not":
                return self._not(schema.child("not"))
            case "if":
                return tuple(self._conditional(schema, True))
        return self.product((tuple(ways) for ways in self._dependencies(schema, group)), schema.path)

    def _types(self, schema: Schema) -> frozenset[str]:
        given = schema.value["type"]
        found: set[str] = set()
        for name in given if isinstance(given, list) else [given]:
            if name == "number":
                found |= NUMBER
            elif name in EVERY_TYPE and name != "fraction":
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

    def _target(self, schema: Schema, keyword: str) -> Schema:
        match keyword:
            case "$ref":
                return self.document.target(schema, keyword)
            case "$dynamicRef":
                return self.document.dynamic_target(schema)
        self.ledger.refuse(
            "where it leads depends on the way taken; write $ref to what is meant", at(schema, keyword), keyword
        )
        return schema.derived(True, keyword)

    def _not(self, schema: Schema) -> Clauses:
        return tuple(unevaluated(clause) for clause in self.clauses(Demand(schema, False)))

    def _conditional(self, schema: Schema, holds: bool) -> Iterator[Clause]:
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
            given = self.clauses(Demand(condition)) if taken else self._not(condition)
            behind = self.clauses(Demand(schema.child(outcome), holds)) if outcome in value else (Clause(schema.path),)
            yield from self.product((given, behind), schema.path)

    def _one_of(self, schema: Schema, context: Clauses) -> Clauses:
        """Exactly one, of what the context leaves: each branch without the others that could hold beside it."""
        parts = branches(schema, "oneOf")
        ways = [self.clauses(Demand(part)) for part in parts]
        if all(clause.only_values for way in ways for clause in way):
            return self.product((context, self._one_of_values(schema, ways)), schema.path)
        found: list[Clause] = []
        overlapping: list[Clause] = []
        for index, way in enumerate(ways):
            mine = self.product((context, way), schema.path)
            beside = [part for other, part in enumerate(parts) if other != index and not self.apart(mine, ways[other])]
            if beside:
                overlapping += mine
                mine = self.product((mine, *self._failures(beside, len(mine))), schema.path)
            found += mine
        if not found and overlapping:
            self.ledger.refuse(
                "the branches hold together, and what only one of them admits cannot be expressed; "
                "write anyOf, or tell them apart by a required member with a const",
                at(schema, "oneOf"),
                "oneOf",
            )
            found = overlapping
        return _merged(found)

    def _failures(self, parts: list[Schema], count: int) -> list[Clauses]:
        """The ways in which each of some schemas does not hold; where those multiply, only a few simple ones."""
        groups = [self._not(part) for part in parts]
        if count * prod(map(len, groups)) <= MOST_FAILURES:
            return groups
        most = max(1, int((MOST_FAILURES / count) ** (1 / len(groups))))
        found: list[Clauses] = []
        for part, group in zip(parts, groups, strict=True):
            simple = sorted(group, key=self._intricacy)[:most]
            if len(simple) < len(group):
                self.ledger.narrow(part.path, "oneOf")
            found.append(tuple(simple))
        return found

    def _intricacy(self, clause: Clause) -> int:
        """0: a type, or a member that is absent; 1: scalars; 2: what needs a look into arrays and objects."""
        demands = [
            demand for found in (clause.objects.properties if clause.objects else {}).values() for demand in found
        ]
        demands += [asked.demand for asked in (clause.arrays.contains if clause.arrays else ())]
        if all(demand == self.nothing for demand in demands):
            return 0
        return 2 if any(_looks_inside(demand.schema) for demand in demands) else 1

    def _one_of_values(self, schema: Schema, ways: list[Clauses]) -> Clauses:
        values: list[Value] = []
        for way in ways:
            values += distinct([value for clause in way for value in clause.values or ()])
        seen = [identity(value) for value in values]
        counts: dict[object, int] = {}
        for key in seen:
            counts[key] = counts.get(key, 0) + 1
        single = tuple(value for value, key in zip(values, seen, strict=True) if counts[key] == 1)
        return (Clause(schema.path, values=single),) if single else ()

    def apart(self, left: Clauses, right: Clauses) -> bool:
        """Whether nothing meets both; True is certain."""
        for one in left:
            for other in right:
                if self._tagged_apart(one, other):
                    continue
                both = meeting(one, other)
                if both is not None and not self.empty(both):
                    return False
        return True

    def _tagged_apart(self, one: Clause, other: Clause) -> bool:
        """A quick look for what most unions have: types, or a required member with different constants."""
        if one.types is not None and other.types is not None and not one.types & other.types:
            return True
        if one.types != OBJECT or other.types != OBJECT or one.objects is None or other.objects is None:
            return False
        for name in (*one.objects.required, *other.objects.required):
            left, right = self._tags(one.objects, name), self._tags(other.objects, name)
            if left and right and not left & right:
                return True
        return False

    def _tags(self, objects: Objects, name: str) -> set[object]:
        found: set[object] = set()
        demands = objects.properties.get(name, ())
        if not demands or any(demand in self._open for demand in demands):
            return found
        for clause in self.together(demands):
            if clause.values is None:
                return set()
            found.update(identity(value) for value in clause.values)
        return found

    def _dependencies(self, schema: Schema, keyword: str) -> Iterator[list[Clause]]:
        """For each name: the member is absent, or what depends on it holds."""
        for name, needed in mapping(schema, keyword).items():
            absent = objects_where(schema.path, properties={name: (self.nothing,)})
            present = objects_where(schema.path, required=(name,))
            behind = self.product(((present,), self._dependent(schema, keyword, name, needed)), schema.path)
            if name in schema.value.get("required", ()):
                yield [replace(clause, types=None) for clause in behind]
            else:
                yield [replace(absent, types=None), *behind]

    def _dependent(self, schema: Schema, keyword: str, name: str, needed: Value) -> Clauses:
        if keyword == "dependentRequired" or (keyword == "dependencies" and not isinstance(needed, dict | bool)):
            listed_names = [needed] if isinstance(needed, str) else needed
            return (objects_where(schema.path, required=names(schema, keyword, listed_names)),)
        return self.clauses(Demand(schema.child(keyword, name)))

    def _unevaluated_members(self, clause: Clause, rest: Demand) -> Clause | None:
        objects = clause.objects
        if rest.schema.value is True or (objects is not None and objects.evaluated is None):
            return clause
        seen = objects.evaluated if objects is not None and objects.evaluated is not None else ()
        names_seen = frozenset(name for name in seen if isinstance(name, str))
        patterns = tuple(pattern for pattern in seen if not isinstance(pattern, str))
        asked = Objects(clause.where, {}, others=(OtherMembers(names_seen, patterns, rest),), evaluated=None)
        return meeting(clause, Clause(clause.where, objects=asked))

    def _unevaluated_items(self, clause: Clause, rest: Demand) -> Clause | None:
        arrays = clause.arrays
        if rest.schema.value is True or (arrays is not None and arrays.evaluated is None):
            return clause
        seen = arrays.evaluated if arrays is not None and arrays.evaluated is not None else 0
        asked = Arrays(clause.where, prefix=((),) * seen, rest=(rest,), evaluated=None)
        return meeting(clause, Clause(clause.where, arrays=asked))

    # A schema that does not hold

    def _negative(self, schema: Schema) -> Clauses:
        value = schema.value
        if isinstance(value, bool):
            return () if value else (Clause(schema.path),)
        if "$ref" in value and self.document.draft <= Draft.DRAFT7:
            return self.clauses(Demand(self.document.target(schema, "$ref"), False))
        before = len(self.ledger.narrowed)
        found = [clause for group in _groups(value) for clause in self._failing(schema, group)]
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if value.get(keyword, True) is not True:
                self.ledger.narrow(at(schema, keyword), keyword)
        if not found and len(self.ledger.narrowed) > before:
            keyword, where = next(reversed(self.ledger.narrowed))
            self.ledger.refuse("what does not meet this cannot be expressed; write what is meant instead", where, "not")
            return (Clause(schema.path),)
        return _merged(found)

    def _failing(self, schema: Schema, group: str) -> Iterable[Clause]:
        match group:
            case "numbers":
                return not_numbers(schema)
            case "strings":
                return not_strings(schema, self.find, self.ledger)
            case "arrays":
                return not_arrays(schema, self.ledger)
            case "objects":
                return not_objects(schema, self.find, self.nothing, self.ledger)
            case "format":
                return not_format(schema, self.ledger)
            case "type":
                return (of_type(schema.path, EVERY_TYPE - self._types(schema)),)
            case "const" | "enum":
                return self._not_constants(schema, _constants(schema, group))
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return self.clauses(Demand(self._target(schema, group), False))
            case "allOf":
                return (clause for part in branches(schema, group) for clause in self.clauses(Demand(part, False)))
            case "anyOf":
                return self.product(
                    (self.clauses(Demand(part, False)) for part in branches(schema, group)), schema.path
                )
            case "oneOf":
                return self._not_one_of(schema)
            case "not":
                return self.clauses(Demand(schema.child("not")))
            case "if":
                return self._conditional(schema, False)
        return self._not_dependencies(schema, group)

    def _not_constants(self, schema: Schema, values: tuple[Value, ...]) -> Clauses:
        scalars = tuple(value for value in values if not isinstance(value, list | dict))
        groups: list[Clauses] = [(Clause(schema.path, excluded=scalars),)] if scalars else []
        for index, value in enumerate(values):
            if isinstance(value, list | dict):
                groups.append(self.clauses(Demand(structure(schema, value, f"enum/{index}"), False)))
        return self.product(groups, schema.path)

    def _not_one_of(self, schema: Schema) -> Iterator[Clause]:
        parts = branches(schema, "oneOf")
        yield from self.product((self.clauses(Demand(part, False)) for part in parts), schema.path)
        for index, left in enumerate(parts):
            for right in parts[index + 1 :]:
                yield from self.product((self.clauses(Demand(left)), self.clauses(Demand(right))), schema.path)

    def _not_dependencies(self, schema: Schema, keyword: str) -> Iterator[Clause]:
        for name, needed in mapping(schema, keyword).items():
            present = objects_where(schema.path, required=(name,))
            if isinstance(needed, dict | bool):
                failing = self.clauses(Demand(schema.child(keyword, name), False))
            else:
                wanted = names(schema, keyword, [needed] if isinstance(needed, str) else needed)
                failing = tuple(objects_where(schema.path, properties={other: (self.nothing,)}) for other in wanted)
            yield from self.product(((present,), failing), schema.path)


def _groups(value: dict[str, Value]) -> list[str]:
    """The groups of keywords that a schema has, in the order in which they speak."""
    found: dict[str, None] = {}
    for keyword in value:
        group = _GROUP_OF.get(keyword) or (keyword if keyword in _APPLICATORS else None)
        if group is not None:
            found[group] = None
    return list(found)


def _ordered(pairs: Iterable[tuple[Schema, str]]) -> list[tuple[Schema, str]]:
    """Own members first, in the order of the text; alternatives behind them."""
    found = list(pairs)
    return [pair for pair in found if pair[1] not in _LATER] + [pair for pair in found if pair[1] in _LATER]


def _looks_inside(schema: Schema) -> bool:
    return isinstance(schema.value, dict) and any(
        keyword in schema.value
        for keyword in ("$ref", "allOf", "anyOf", "oneOf", "not", "if", *ARRAY_KEYWORDS, *OBJECT_KEYWORDS)
    )


def _constants(schema: Schema, keyword: str) -> tuple[Value, ...]:
    return (schema.value["const"],) if keyword == "const" else tuple(distinct(listed(schema, "enum")))


def _merged(clauses: list[Clause]) -> Clauses:
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


def structure(schema: Schema, value: Value, name: str) -> Schema:
    """A constant array or object as a schema of its parts, to be met with other demands or negated."""
    if isinstance(value, list):
        parts = [{"const": item} for item in value]
        inner: Value = {"type": "array", "minItems": len(value), "maxItems": len(value)}
        return schema.derived(inner | ({"prefixItems": parts} if parts else {}), name)
    members = {key: {"const": item} for key, item in value.items()}
    closed = {"type": "object", "properties": members, "required": list(value), "additionalProperties": False}
    return schema.derived(closed, name)
