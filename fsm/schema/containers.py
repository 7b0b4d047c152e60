"""Compiles arrays and objects of a schema to languages.

    { a  b?  c  d?  e?                                       }     no others: in the order of the schema
    { a  b?  c   then what is left of b, d, e, and others     }     in any order, once all that is required has come

Where other members may come, no name is certain any more: keeping the optional ones in order would force no text, and
would have a model that is late with `b` call it something else. With key_order "any" no member waits for another.

Each declared member comes once. That the same other name does not come twice is no regular language; JSON parsers take
the last, which is as valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from typing import TYPE_CHECKING

from ..algebra import any_order, concat, difference, intersection, repeat
from ..language import EMPTY_TEXT, NOTHING, AnyOrder, Call, Language
from .conjuncts import (
    Arrays,
    Conjunct,
    Contains,
    Objects,
    Subschema,
    Subschemas,
    conjoined,
    is_other,
    item_subschemas,
    joined,
    least_upper,
    member_subschemas,
    numbers_of,
    scalars_left,
    strings_of,
)
from .document import Value, distinct
from .expressions import literal, none_of, one_of, optional, union
from .strings import admits, quoted

if TYPE_CHECKING:
    from .compiler import Compiler

MOST_CONSTANTS = 256  # that are kept apart for uniqueItems; a state has work for each that may come next
MOST_ITEM_STATES = 2_000  # positions and counts that are followed for contains
FLAT_PREFIX = 8  # optional items that are nested in one expression; more become rules
MOST_COUNTS = 4_000  # positions and counts that are followed for minProperties and maxProperties
MOST_OVERLAPS = 3  # patterns of names of which every combination is followed; more: one at a time
FLAT_MEMBERS = 3  # optional members that are written out; more become rules


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
        if (last + 1) * (enough + 1) > MOST_ITEM_STATES:
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A declared member: its name, colon and value."""

    required: bool
    language: Language


class Members:
    """Builds the language of one conjunct's objects; its rules are named after `name`.

    alone: no other objects may come in their place. Alternatives begin alike, and have to be read together until they
        part: what each of them has left out is not remembered then, and does not come late.
    """

    def __init__(self, compiler: Compiler, objects: Objects, name: str, *, alone: bool = True) -> None:
        self.compiler = compiler
        self.objects = objects
        self.name = name
        self.alone = alone
        self.style = compiler.style
        self.declared = tuple(dict.fromkeys((*objects.properties, *objects.required)))

    def language(self) -> Language:
        if any(others.subschema is None for others in self.objects.others):
            return self._with_undeclared()
        return self._language(others_least=0)

    def _with_undeclared(self) -> Language:
        """Admits objects with a member that the first `OtherMembers` without a subschema needs: required, or last."""
        objects = self.objects
        needed = next(others for others in objects.others if others.subschema is None)
        kept = replace(objects, others=tuple(others for others in objects.others if others is not needed))
        known = [name for name in self.declared if is_other(needed, name)]
        if any(name in objects.required for name in known):
            return Members(self.compiler, kept, self.name).language()
        if any(others.subschema is None for others in kept.others) or needed.patterns:
            how = "objects with a member beyond several patterns are left out"
            self.compiler.deviations.lose(f"{objects.where}/additionalProperties", "additionalProperties", how)
            return NOTHING
        options = [
            Members(
                self.compiler,
                replace(kept, required=(*objects.required, name)),
                self.compiler.rule_name(f"{self.name} with {name}"),
            ).language()
            for name in known
        ]
        # The names that are known may come as well as the one that is not.
        named = dict.fromkeys(sorted(needed.names), ()) | dict(objects.properties)
        last = Members(
            self.compiler,
            replace(kept, properties={**objects.properties, **named}),
            self.compiler.rule_name(f"{self.name} with others"),
        )
        options.append(last._language(others_least=1))
        return union(options)

    def _language(self, *, others_least: int) -> Language:
        objects = self.objects
        entries = self._entries()
        if entries is None:
            return NOTHING
        other = self._others()
        if other == NOTHING and others_least:
            return NOTHING
        self._note_narrowing(entries, other)
        least = max(objects.least, sum(entry.required for entry in entries), others_least)
        most = objects.most
        if most is not None and other == NOTHING and most >= len(entries):
            most = None
        if other != NOTHING or self.compiler.key_order == "any":
            found = self._in_any_order(entries, other, most, others_least)
        elif most is None and least <= max(1, sum(entry.required for entry in entries)):
            found = self._in_order(entries)
        else:
            found = self._counted(entries, objects.least, most)
        return self._whole(found, least)

    def _note_narrowing(self, entries: list[Entry], other: Language) -> None:
        objects, deviations = self.objects, self.compiler.deviations
        keyword = "properties" if objects.properties else "required"
        required = [index for index, entry in enumerate(entries) if entry.required]
        ordered = len(entries) if other == NOTHING else required[-1] + 1 if required else 0
        if self.compiler.key_order == "declared" and ordered > 1:
            how = "members come in the order of the schema"
            deviations.narrow(f"{objects.where}/{keyword}", keyword, how if other == NOTHING else f"required {how}")
        if other != NOTHING and objects.least > max(1, len(required)):
            how = "members of other names count as one"
            deviations.narrow(f"{objects.where}/minProperties", "minProperties", how)

    def _whole(self, filled: Language, least: int) -> Language:
        options: list[Language] = [literal("{}")] if not least else []
        if filled not in (NOTHING, EMPTY_TEXT):
            options.append(self.style.enclosed("{", [filled], "}"))
        return union(options) if options else NOTHING

    # Declared members

    def _entries(self) -> list[Entry] | None:
        """Builds the declared members; None when a required one cannot be."""
        found: list[Entry] = []
        for name in self.declared:
            required = name in self.objects.required
            value = self._value(name)
            if value != NOTHING:
                found.append(Entry(required, concat([self.style.key(name), value])))
            elif required:
                return None
        return found

    def _value(self, name: str) -> Language:
        subschemas = member_subschemas(self.objects, name)
        if not self._is_name(name) or self.compiler.unsatisfiable(subschemas):
            return NOTHING
        return self.compiler.language(subschemas)

    def _is_name(self, name: str) -> bool:
        """Tells whether propertyNames admits a name."""
        if not self.objects.names:
            return True
        given = Conjunct(self.objects.where, values=(name,))
        ways = (conjoined(conjunct, given) for conjunct in self.compiler.normalizer.conjunction(self.objects.names))
        return any(way is not None and way.inexpressible is None and scalars_left(way) for way in ways)

    # Members of other names

    def _others(self) -> Language:
        """Builds name, colon and value of a member that is not declared."""
        options: list[Language] = []
        for names, subschemas in self._kinds():
            if self.compiler.unsatisfiable(subschemas):
                continue
            value = self.compiler.language(subschemas)
            options.append(concat([quoted(names), self.style.colon, value]))
        return union([option for option in options if option != NOTHING])

    def _kinds(self) -> Iterator[tuple[Language, Subschemas]]:
        """Yields names by the patterns that they are of, with what is asked of the values."""
        objects = self.objects
        patterns: list[Language] = []
        for pattern in (
            *(members.names for members in objects.patterns),
            *(p for o in objects.others for p in o.patterns),
        ):
            if pattern not in patterns:
                patterns.append(pattern)
        overlaps = len(patterns) if len(patterns) <= MOST_OVERLAPS else 1
        if len(patterns) > MOST_OVERLAPS:
            how = "names that several of more than three patterns match are left out"
            self.compiler.deviations.lose(f"{objects.where}/patternProperties", "patternProperties", how)
        closed = self.compiler.closed and (objects.properties or patterns) and not objects.others
        if closed:
            how = "no members other than the declared ones"
            self.compiler.deviations.narrow(f"{objects.where}/properties", "additionalProperties", how)
        for size in range(int(bool(closed)), overlaps + 1):
            for chosen in combinations(patterns, size):
                subschemas: Subschemas = tuple(
                    members.subschema for members in objects.patterns if members.names in chosen
                )
                for others in objects.others:
                    if others.subschema is not None and not any(pattern in chosen for pattern in others.patterns):
                        subschemas = joined(subschemas, (others.subschema,))
                outside = [pattern for pattern in patterns if pattern not in chosen]
                yield self._names(list(chosen), outside), subschemas

    def _names(self, inside: list[Language], outside: list[Language]) -> Language:
        inside = inside + self._name_languages()
        # A name that is not of the languages anyway need not be taken out of them.
        taken = [name for name in self.declared if all(admits(language, name) for language in inside)]
        taken = [name for name in taken if not any(admits(language, name) for language in outside)]
        if not inside:
            return difference(none_of(taken), union(outside))
        return difference(reduce(intersection, inside), union([*outside, *([one_of(taken)] if taken else [])]))

    def _name_languages(self) -> list[Language]:
        """Returns the names that propertyNames admits, as one language; none when it is not there."""
        if not self.objects.names:
            return []
        options: list[Language] = []
        for conjunct in self.compiler.expressed(self.compiler.normalizer.conjunction(self.objects.names)):
            if conjunct.types is not None and "string" not in conjunct.types:
                continue
            if conjunct.values is not None:
                texts = [value for value in scalars_left(conjunct) if isinstance(value, str)]
                options += [one_of(texts)] if texts else []
            else:
                options.append(strings_of(conjunct).characters())
        return [union(options) if options else NOTHING]

    # Sequences

    def _in_order(self, entries: list[Entry]) -> Language:
        """Admits one or more members, as they are declared."""
        comma = self.style.comma
        first = next((index for index, entry in enumerate(entries) if entry.required), None)
        if first is not None:
            parts: list[Language] = [
                *(optional(concat([entry.language, comma])) for entry in entries[:first]),
                entries[first].language,
                *(self._following(entry) for entry in entries[first + 1 :]),
            ]
            return concat(parts)
        options: list[Language] = []
        after: Language = EMPTY_TEXT
        for index in range(len(entries) - 1, -1, -1):
            options.append(concat([entries[index].language, after]))
            after = concat([self._following(entries[index]), after])
            if index and len(entries) > FLAT_MEMBERS:
                after = self.compiler.add_rule(f"{self.name} after {index}", after)
        return union(reversed(options)) if options else NOTHING

    def _following(self, entry: Entry) -> Language:
        member = concat([self.style.comma, entry.language])
        return member if entry.required else optional(member)

    def _counted(self, entries: list[Entry], least: int, most: int | None) -> Language:
        """Adds rules over (declared members passed, members written so far)."""
        cap = max(1, least, most or 0)
        if (len(entries) + 1) * (cap + 1) > MOST_COUNTS:
            self._refuse_count("is followed only for small numbers; write a smaller one")
            return self._in_order(entries)
        following: list[Language] = [EMPTY_TEXT if count >= least else NOTHING for count in range(cap + 1)]
        for index in range(len(entries) - 1, -1, -1):
            entry = entries[index]
            here: list[Language] = []
            for count in range(cap + 1):
                options = [] if entry.required else [following[count]]
                if most is None or count < most:
                    lead = [self.style.comma] if count else []
                    options.append(concat([*lead, entry.language, following[min(count + 1, cap)]]))
                language = union([option for option in options if option != NOTHING])
                plain = index == 0 or language in (NOTHING, EMPTY_TEXT)
                here.append(
                    language
                    if plain
                    else self.compiler.add_rule(f"{self.name} member {index} counted {count}", language)
                )
            following = here
        return following[0]

    def _in_any_order(
        self, entries: list[Entry], other: Language, most: int | None, others_least: int, *, counted: bool = True
    ) -> Language:
        """Builds members in any order. Other names may repeat; a parser counts them once: one member for `least`."""
        required = tuple(index for index, entry in enumerate(entries) if entry.required)
        ordered = required[-1] + 1 if self.compiler.key_order == "declared" and required else 0
        least = self.objects.least if counted else 0
        if ordered and not self.alone and least <= len(required) and not (counted and most) and not others_least:
            late = self._in_any_order(entries[ordered:], other, None, 0, counted=False)
            return concat([self._in_order(entries[:ordered]), optional(concat([self.style.comma, late]))])
        if not entries:
            found = self._others_alone(other, max(1, least), most if counted else None)
        else:
            found = any_order(
                AnyOrder(
                    tuple(entry.language for entry in entries),
                    self.style.comma,
                    None if other == NOTHING else other,
                    required,
                    ordered,
                    max(1, least),
                    most if counted else None,
                    others_least,
                )
            )
        if found == NOTHING and other != NOTHING and counted and self.objects.least > 1:
            self._refuse_count("counts members that may be repeated; declare them in properties")
            return self._in_any_order(entries, other, most, others_least, counted=False)
        return found

    def _others_alone(self, other: Language, least: int, most: int | None) -> Language:
        """Repeats members where nothing is declared: a repeat remembers less."""
        return NOTHING if least > 1 or most == 0 else self.style.members(1, most, other)

    def _refuse_count(self, why: str) -> None:
        keyword = "minProperties" if self.objects.least > 1 else "maxProperties"
        self.compiler.deviations.refuse(f"{keyword} {why}", f"{self.objects.where}/{keyword}", keyword)
