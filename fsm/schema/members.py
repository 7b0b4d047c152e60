"""Compiles objects to languages.

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

from ..algebra import any_order, concat, difference, intersection
from ..language import EMPTY_TEXT, NOTHING, AnyOrder, Language
from .conjuncts import (
    Conjunct,
    Objects,
    Subschemas,
    conjoined,
    is_other,
    joined,
    member_subschemas,
    scalars_left,
    strings_of,
)
from .expressions import literal, none_of, one_of, optional, union
from .strings import admits, quoted

if TYPE_CHECKING:
    from .compiler import Compiler

MOST_COUNTS = 4_000  # positions and counts that are followed for minProperties and maxProperties
MOST_OVERLAPS = 3  # patterns of names of which every combination is followed; more: one at a time
FLAT_MEMBERS = 3  # optional members that are written out; more become rules


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
