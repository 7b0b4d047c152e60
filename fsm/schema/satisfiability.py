"""Tells what cannot be met: conjuncts that no value meets, conjuncts that no value meets together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import LimitExceeded
from .conjuncts import (
    EVERY_TYPE,
    NUMBER,
    Arrays,
    Conjunct,
    Disjunction,
    Objects,
    Subschemas,
    conjoined,
    item_subschemas,
    member_subschemas,
    numbers_of,
    scalars_left,
    strings_of,
)
from .document import identity

if TYPE_CHECKING:
    from .normalizer import Normalizer

MOST_DEPTH = 3  # how far a contradiction is looked for below a required member

_OBJECT = frozenset({"object"})


class Satisfiability:
    """Looks for contradictions. True is certain everywhere; False may be mistaken."""

    def __init__(self, normalizer: Normalizer) -> None:
        self._meaning = normalizer

    def empty(self, conjunct: Conjunct, depth: int = MOST_DEPTH) -> bool:
        """Tells whether nothing meets the conjunct."""
        if conjunct.values is not None:
            # Texts that a format of ours leaves out may be of that format all the same.
            unsure = (list, dict, str) if conjunct.strings is not None and conjunct.strings.narrow else (list, dict)
            return not scalars_left(conjunct) and not any(isinstance(value, unsure) for value in conjunct.values)
        return not self.types_left(conjunct, depth)

    def types_left(self, conjunct: Conjunct, depth: int = MOST_DEPTH) -> frozenset[str]:
        """Returns the types of which some value may meet the conjunct."""
        types = EVERY_TYPE if conjunct.types is None else conjunct.types
        found = set(types)
        if conjunct.excluded:
            barred = {identity(value) for value in conjunct.excluded}
            if identity(None) in barred:
                found.discard("null")
            if {identity(True), identity(False)} <= barred:
                found.discard("boolean")
        if conjunct.numbers is not None:
            for kind in NUMBER & types:
                if numbers_of(conjunct, frozenset({kind})).empty:
                    found.discard(kind)
        if conjunct.strings is not None and strings_of(conjunct).empty:
            found.discard("string")
        if conjunct.arrays is not None and self._no_array(conjunct.arrays, depth):
            found.discard("array")
        if conjunct.objects is not None and self._no_object(conjunct.objects, depth):
            found.discard("object")
        return frozenset(found)

    def unsatisfiable(self, subschemas: Subschemas, depth: int = MOST_DEPTH) -> bool:
        """Tells whether nothing meets all of them."""
        if any(subschema.holds and subschema.schema.value is False for subschema in subschemas):
            return True
        if depth <= 0 or not subschemas or any(subschema in self._meaning.open for subschema in subschemas):
            return False
        try:
            ways = self._meaning.conjunction(subschemas)
        except LimitExceeded:
            return False
        return all(self.empty(conjunct, depth - 1) for conjunct in ways)

    def _no_array(self, arrays: Arrays, depth: int) -> bool:
        if arrays.most is not None and arrays.most < arrays.least:
            return True
        checked = range(min(arrays.least, len(arrays.prefix) + 1))
        return any(self.unsatisfiable(item_subschemas(arrays, index), depth) for index in checked)

    def _no_object(self, objects: Objects, depth: int) -> bool:
        if objects.most is not None and objects.most < max(objects.least, len(objects.required)):
            return True
        return any(self.unsatisfiable(member_subschemas(objects, name), depth) for name in objects.required)

    def disjoint(self, left: Disjunction, right: Disjunction) -> bool:
        """Tells whether nothing meets both."""
        for one in left:
            for other in right:
                if self._tagged_disjoint(one, other):
                    continue
                both = conjoined(one, other)
                if both is not None and not self.empty(both):
                    return False
        return True

    def _tagged_disjoint(self, one: Conjunct, other: Conjunct) -> bool:
        """Looks quickly for what most unions have: types, or a required member with different constants."""
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
        subschemas = objects.properties.get(name, ())
        if not subschemas or any(subschema in self._meaning.open for subschema in subschemas):
            return found
        for conjunct in self._meaning.conjunction(subschemas):
            if conjunct.values is None:
                return set()
            found.update(identity(value) for value in conjunct.values)
        return found
