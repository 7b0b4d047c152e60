"""Compiles arrays to languages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..algebra import any_order, concat, repeat
from ..language import EMPTY_TEXT, NOTHING, AnyOrder, Call, Language
from .conjuncts import (
    Arrays,
    Conjunct,
    Contains,
    Subschema,
    item_subschemas,
    joined,
    least_upper,
    numbers_of,
    scalars_left,
)
from .document import Value, distinct
from .expressions import literal, optional, union

if TYPE_CHECKING:
    from .compiler import Compiler

MOST_CONSTANTS = 256  # that are kept apart for uniqueItems; a state has work for each that may come next
MOST_COUNTS = 2_000  # positions and counts that are followed for contains
FLAT_PREFIX = 8  # optional items that are nested in one expression; more become rules


class Items:
    """Builds the language of one conjunct's arrays; its rules are named after `name`."""

    def __init__(self, compiler: Compiler, arrays: Arrays, name: str) -> None:
        self.compiler = compiler
        self.arrays = arrays
        self.name = name
        self.style = compiler.style
        self.least = arrays.least
        self.most = arrays.most

    def language(self) -> Language:
        arrays = self.arrays
        for index in range(len(arrays.prefix) + 1):
            if self.compiler.unsatisfiable(item_subschemas(arrays, index)):
                self.most = least_upper(self.most, index)
                break
        if self.most is not None and self.most < self.least:
            return NOTHING
        contains = [asked for asked in arrays.contains if asked.least or asked.most is not None]
        if arrays.unique and (self.most is None or self.most > 1) and (found := self._unique(contains)) is not None:
            return found
        if len(contains) > 1:
            self.compiler.deviations.refuse(
                "several contains on one array are not followed; write one", f"{arrays.where}/contains", "contains"
            )
        if contains and (found := self._containing(contains[0])) is not None:
            return found
        return self._plain()

    def _item(self, index: int, *more: Subschema) -> Language:
        return self.compiler.language(joined(item_subschemas(self.arrays, index), more))

    def _whole(self, filled: Language) -> Language:
        """Returns the array from what stands between its brackets, or empty where that is allowed."""
        options: list[Language] = [literal("[]")] if self.least == 0 else []
        if filled not in (NOTHING, EMPTY_TEXT):
            options.append(self.style.enclosed("[", [filled], "]"))
        return union(options) if options else NOTHING

    def _plain(self) -> Language:
        if self.most == 0:
            return self._whole(NOTHING)
        length = len(self.arrays.prefix)
        if not length:
            return self._whole(self.style.members(max(1, self.least), self.most, self._item(0)))
        if self.most is not None:
            length = min(length, self.most)
        room = None if self.most is None else self.most - length
        rest: Language = EMPTY_TEXT
        if room != 0:
            rest = repeat(concat([self.style.comma, self._item(length)]), max(0, self.least - length), room)
        for index in range(length - 1, 0, -1):
            rest = concat([self.style.comma, self._item(index), rest])
            if index >= self.least:
                rest = optional(rest)
                if length > FLAT_PREFIX:
                    rest = self.compiler.add_rule(f"{self.name} from {index}", rest)
        return self._whole(concat([self._item(0), rest]))

    # uniqueItems

    def _unique(self, contains: list[Contains]) -> Language | None:
        """Builds arrays of distinct items; None when the keyword is left unenforced, or holds by itself."""
        arrays = self.arrays
        if arrays.prefix and self.most is not None and self.most <= len(arrays.prefix) and self._all_disjoint():
            return None
        values = None if arrays.prefix or contains else self._finite()
        if values is not None and len(values) <= MOST_CONSTANTS:
            return self._subset(values)
        self.compiler.deviations.refuse(
            f"items are kept apart only where they are of at most {MOST_CONSTANTS} constants or integers; give them an "
            "enum, or integers a minimum and a maximum, set maxItems to 1, or take uniqueItems out",
            f"{arrays.where}/uniqueItems",
            "uniqueItems",
        )
        return None

    def _all_disjoint(self) -> bool:
        normalizer = self.compiler.normalizer
        assert self.most is not None, "a closed array"
        ways = [normalizer.conjunction(self.arrays.prefix[index]) for index in range(self.most)]
        return all(
            normalizer.satisfiability.disjoint(left, right)
            for index, left in enumerate(ways)
            for right in ways[index + 1 :]
        )

    def _finite(self) -> list[Value] | None:
        """Lists all the values that an item may have, when they can be listed."""
        found: list[Value] = []
        if not self.arrays.rest:
            return None
        for conjunct in self.compiler.expressed(self.compiler.normalizer.conjunction(self.arrays.rest)):
            if conjunct.values is not None:
                if any(isinstance(value, list | dict) for value in conjunct.values):
                    return None
                found += scalars_left(conjunct)
            elif conjunct.types is not None and conjunct.types <= {"null", "boolean"}:
                every = tuple(
                    value
                    for value, kind in ((None, "null"), (True, "boolean"), (False, "boolean"))
                    if kind in conjunct.types
                )
                found += scalars_left(Conjunct(conjunct.where, values=every, excluded=conjunct.excluded))
            elif conjunct.types is not None and conjunct.types <= {"integer"}:
                integers = numbers_of(conjunct, frozenset({"integer"})).few_integers(MOST_CONSTANTS)
                if integers is None:
                    return None
                found += integers
            else:
                return None
        return distinct(found)

    def _subset(self, values: list[Value]) -> Language:
        """Admits each constant at most once, in any order: what has come is remembered as a text goes along."""
        parts = tuple(self.style.spell(value) for value in values)
        most = self.most if self.most is not None and self.most < len(parts) else None
        return self._whole(any_order(AnyOrder(parts, self.style.comma, least=max(1, self.least), most=most)))

    # contains

    def _containing(self, asked: Contains) -> Language | None:
        """Adds rules over (items so far, of them so many that count); None when that is left unenforced."""
        arrays, comma = self.arrays, self.style.comma
        denied = Subschema(asked.subschema.schema, not asked.subschema.holds)
        last = self.most if self.most is not None else max(len(arrays.prefix), self.least, 1)
        enough = asked.most if asked.most is not None else asked.least
        if (last + 1) * (enough + 1) > MOST_COUNTS:
            self.compiler.deviations.refuse(
                "contains is followed only in short arrays; set maxItems to a smaller number",
                f"{arrays.where}/contains",
                "contains",
            )
            return None

        def rule(index: int, count: int) -> Call:
            return Call(f"{self.name} item {index} counted {count}")

        whole: Language = NOTHING
        for index in range(last + 1):
            full = self.most is not None and index == last
            for count in range(enough + 1):
                options: list[Language] = []
                if index >= self.least and count >= asked.least and index:
                    options.append(EMPTY_TEXT)
                if not full:
                    lead = [comma] if index else []
                    after = min(index + 1, last)
                    if asked.most is None or count < asked.most:
                        counted = self._item(index, asked.subschema)
                        options.append(concat([*lead, counted, rule(after, min(count + 1, enough))]))
                    plain = self._item(index) if asked.most is None else self._item(index, denied)
                    options.append(concat([*lead, plain, rule(after, count)]))
                language = union([option for option in options if option != NOTHING])
                if index or count:
                    self.compiler.add_rule(rule(index, count).rule, language)
                else:
                    whole = language
        options = [literal("[]")] if not asked.least and not self.least else []
        return union([*options, self.style.enclosed("[", [whole], "]")])
