"""From schemas to clauses: applicators are multiplied out, references followed, negation pushed to the keywords."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import ConstraintRefused, LimitExceeded
from ..language import Language
from ..limits import Limits
from ..regex.parser import search_regex
from .alternatives import conditional, exactly_one, merged
from .assertions import format_asked, numbers_asked, strings_asked
from .clauses import EVERY_TYPE, NUMBER, Clause, Clauses, Demand, Demands, meeting, of_type, unevaluated
from .containers import arrays_asked, objects_asked
from .dependencies import dependencies, unevaluated_items, unevaluated_members
from .document import Document, Draft, Schema
from .emptiness import Emptiness
from .groups import constants, groups_of, ordered
from .keywords import Ledger, at, branches, flag, invalid
from .negation import failing_ways

MOST_CLAUSES = 5_000  # ways to meet one schema
MOST_PRODUCTS = 300  # where ways meet ways

# A part of an allOf with one of these is read by itself.
_OF_ITS_OWN = ("$ref", "$dynamicRef", "unevaluatedProperties", "unevaluatedItems")


class Meaning:
    """What the schemas of a document mean."""

    def __init__(self, document: Document, limits: Limits, ledger: Ledger) -> None:
        self.document = document
        self.limits = limits
        self.ledger = ledger
        self.nothing = Demand(document.root.derived(False, "nothing"))
        self._known: dict[Demand, Clauses] = {}
        self._together: dict[Demands, Clauses] = {}
        self.open: dict[Demand, None] = {}
        self.latest = "#"  # the place that is worked on, for refusals
        self._patterns: dict[str, Language] = {}
        self.emptiness = Emptiness(self)

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
        self.latest = schema.path
        if demand in self.open:
            raise ConstraintRefused(
                "the schema refers back to itself before it says anything; let it go through properties or items",
                where=schema.path,
                keyword="$ref",
            )
        if len(self.open) >= self.limits.depth:
            raise LimitExceeded(f"references follow each other more than {self.limits.depth} deep", where=schema.path)
        self.open[demand] = None
        try:
            found = self._holding_ways(schema) if holds else failing_ways(self, schema)
        finally:
            del self.open[demand]
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
            found = tuple(
                clause for clause in met if clause is not None and not (several and self.emptiness.empty(clause))
            )
        return found

    def _holding_ways(self, schema: Schema) -> Clauses:
        value = schema.value
        if isinstance(value, bool):
            return (Clause(schema.path),) if value else ()
        if "$ref" in value and self.document.draft <= Draft.DRAFT7:
            return self.clauses(Demand(self.document.target(schema, "$ref")))
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
                rest = Demand(schema.child(keyword))
                if keyword == "unevaluatedItems" and any(each.arrays and each.arrays.contains for each in found):
                    self.ledger.narrow(at(schema, keyword), keyword, "what contains finds counts as unevaluated")
                found = tuple(clause for old in found if (clause := evaluate(old, rest)) is not None)
        return found

    def _pairs(self, schema: Schema) -> Iterator[tuple[Schema, str]]:
        """The groups of keywords of a schema and of those that hold with it: an allOf is as if it were written here."""
        for group in groups_of(schema.value):
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
                return (format_asked(schema, self.ledger),)
            case "type":
                return (of_type(schema.path, self.types(schema)),)
            case "const" | "enum":
                return (Clause(schema.path, values=constants(schema, group)),)
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return self.clauses(Demand(self.target(schema, group)))
            case "whole":
                return self.clauses(Demand(schema))
            case "anyOf":
                return merged([clause for part in branches(schema, group) for clause in self.clauses(Demand(part))])
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
        self.ledger.refuse(
            "where it leads depends on the way taken; write $ref to what is meant", at(schema, keyword), keyword
        )
        return schema.derived(True, keyword)

    def failing(self, schema: Schema) -> Clauses:
        """The ways in which a schema beside others does not hold; what it looks at does not count as evaluated."""
        return tuple(unevaluated(clause) for clause in self.clauses(Demand(schema, False)))
