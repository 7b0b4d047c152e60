"""What cannot be: clauses that nothing meets, clauses that nothing meets together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import LimitExceeded
from .clauses import (
    EVERY_TYPE,
    NUMBER,
    Arrays,
    Clause,
    Clauses,
    Demands,
    Objects,
    item_demands,
    meeting,
    member_demands,
    numbers_of,
    scalars_left,
    strings_of,
)
from .source import identity

if TYPE_CHECKING:
    from .meaning import Meaning

MOST_DEPTH = 3  # how far a contradiction is looked for below a required member

_OBJECT = frozenset({"object"})


class Emptiness:
    """A look for contradictions. True is certain everywhere; False may be mistaken."""

    def __init__(self, meaning: Meaning) -> None:
        self._meaning = meaning

    def empty(self, clause: Clause, depth: int = MOST_DEPTH) -> bool:
        """Whether nothing meets the clause."""
        if clause.values is not None:
            # Texts that a format of ours leaves out may be of that format all the same.
            unsure = (list, dict, str) if clause.strings is not None and clause.strings.narrow else (list, dict)
            return not scalars_left(clause) and not any(isinstance(value, unsure) for value in clause.values)
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
        """Whether nothing meets all of them."""
        if any(demand.holds and demand.schema.value is False for demand in demands):
            return True
        if depth <= 0 or not demands or any(demand in self._meaning.open for demand in demands):
            return False
        try:
            ways = self._meaning.together(demands)
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

    def apart(self, left: Clauses, right: Clauses) -> bool:
        """Whether nothing meets both."""
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
        if one.types != _OBJECT or other.types != _OBJECT or one.objects is None or other.objects is None:
            return False
        for name in (*one.objects.required, *other.objects.required):
            left, right = self._tags(one.objects, name), self._tags(other.objects, name)
            if left and right and not left & right:
                return True
        return False

    def _tags(self, objects: Objects, name: str) -> set[object]:
        found: set[object] = set()
        demands = objects.properties.get(name, ())
        if not demands or any(demand in self._meaning.open for demand in demands):
            return found
        for clause in self._meaning.together(demands):
            if clause.values is None:
                return set()
            found.update(identity(value) for value in clause.values)
        return found
