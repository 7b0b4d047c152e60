"""Turns the keywords of one type into conjuncts: numbers, strings, arrays, objects.

Each function reads all keywords of its type in one schema, so that bounds which contradict each other are an error of
that schema, and not a silent absence. `not_...` gives the conjuncts of which one holds when the keywords do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..errors import ConstraintRefused, LimitExceeded, Unsupported
from ..language import Language
from .conjuncts import (
    NUMBER,
    Arrays,
    Conjunct,
    Contains,
    Objects,
    OtherMembers,
    PatternMembers,
    Subschema,
    inexpressible,
)
from .document import Schema
from .keywords import Deviations, at, branches, count, flag, invalid, mapping, names, number, text
from .numbers import Bound, Number, Numbers
from .strings import Strings, format_language, is_format

# Of OpenAPI.
_RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}

Patterns = Callable[[str], Language]  # the names or strings in which a pattern is found


def numbers_asked(schema: Schema) -> Conjunct:
    """Reads minimum, maximum, exclusiveMinimum, exclusiveMaximum (also the booleans of draft 4), multipleOf."""
    least, most = bounds(schema)
    numbers = Numbers(least, most, _step(schema), whole=True if schema.value.get("type") == "integer" else None)
    if numbers.empty:
        assert least, "empty by its bounds"
        assert most, "empty by its bounds"
        raise ConstraintRefused(
            f"no number is {'above' if least.open else 'at least'} {least.value} and "
            f"{'below' if most.open else 'at most'} {most.value}; raise the upper bound or lower the other",
            where=schema.path,
            keyword="minimum" if "minimum" in schema.value else "exclusiveMinimum",
        )
    return Conjunct(schema.path, numbers=Numbers(least, most, numbers.multiple))


def bounds(schema: Schema) -> tuple[Bound | None, Bound | None]:
    return _bound(schema, "minimum", "exclusiveMinimum", True), _bound(schema, "maximum", "exclusiveMaximum", False)


def _bound(schema: Schema, inclusive: str, exclusive: str, lower: bool) -> Bound | None:
    value = number(schema, inclusive)
    switch = schema.value.get(exclusive)
    if isinstance(switch, bool):
        return None if value is None else Bound(value, switch)
    strict = number(schema, exclusive)
    if strict is None:
        return None if value is None else Bound(value, False)
    if value is None or (strict >= value if lower else strict <= value):
        return Bound(strict, True)
    return Bound(value, False)


def _step(schema: Schema) -> Number | None:
    step = number(schema, "multipleOf")
    if step is not None and step <= 0:
        raise invalid(schema, "multipleOf", "a number above 0")
    return step


def not_numbers(schema: Schema) -> Iterator[Conjunct]:
    """Yields the ways to miss what `numbers_asked` asks."""
    least, most = bounds(schema)
    step = _step(schema)
    if least is not None:
        yield _numeric(schema, Numbers(most=Bound(least.value, not least.open)))
    if most is not None:
        yield _numeric(schema, Numbers(least=Bound(most.value, not most.open)))
    if step is not None:
        yield _numeric(schema, Numbers(not_multiples=(step,)))


def _numeric(schema: Schema, numbers: Numbers) -> Conjunct:
    return Conjunct(schema.path, types=NUMBER, numbers=numbers)


def strings_asked(schema: Schema, find: Patterns, deviations: Deviations) -> Conjunct:
    """Reads minLength, maxLength, pattern."""
    least, most = count(schema, "minLength") or 0, count(schema, "maxLength")
    if most is not None and most < least:
        raise ConstraintRefused(
            f"no string has at least {least} and at most {most} characters; raise maxLength or lower minLength",
            where=at(schema, "minLength"),
            keyword="minLength",
        )
    pattern = pattern_of(schema, find, deviations)
    return Conjunct(schema.path, strings=Strings(least, most, (pattern,) if pattern is not None else ()))


def pattern_of(schema: Schema, find: Patterns, deviations: Deviations) -> Language | None:
    source = text(schema, "pattern")
    return None if source is None else found_pattern(source, at(schema, "pattern"), "pattern", find, deviations)


def found_pattern(source: str, where: str, keyword: str, find: Patterns, deviations: Deviations) -> Language | None:
    """Returns the strings that a pattern is found in; None when it is not honoured and that is allowed.

    Raises:
        ConstraintRefused: the pattern is no regular expression, or one too large; `where` says which.
    """
    try:
        return find(source)
    except Unsupported as error:
        deviations.refuse(f"the pattern {source!r} is not honoured: {error}", where, keyword)
        return None
    except LimitExceeded as error:
        raise LimitExceeded(f"the pattern {source[:80]!r}: {error}", where=where, keyword=keyword) from None
    except ConstraintRefused as error:
        raise ConstraintRefused(f"the pattern {source!r}: {error}", where=where, keyword=keyword) from None


def not_strings(schema: Schema, find: Patterns, deviations: Deviations) -> Iterator[Conjunct]:
    """Yields the ways to miss what `strings_asked` asks."""
    least, most = count(schema, "minLength") or 0, count(schema, "maxLength")
    if least:
        yield _textual(schema, Strings(most=least - 1))
    if most is not None:
        yield _textual(schema, Strings(least=most + 1))
    pattern = pattern_of(schema, find, deviations)
    if pattern is not None:
        yield _textual(schema, Strings(barred=(pattern,)))


def _textual(schema: Schema, strings: Strings) -> Conjunct:
    return Conjunct(schema.path, types=frozenset({"string"}), strings=strings)


def format_asked(schema: Schema, deviations: Deviations) -> Conjunct:
    """Reads format. Names that no specification has are annotations, as they are for validators."""
    name = text(schema, "format")
    assert name is not None, "asked where it is"
    if name in _RANGES:
        low, high = _RANGES[name]
        return Conjunct(schema.path, numbers=Numbers(Bound(low, False), Bound(high, False)))
    if is_format(name):
        deviations.narrow(at(schema, "format"), "format", "rare spellings of the format are left out")
        return Conjunct(schema.path, strings=Strings(languages=(format_language(name),), narrow=True))
    return Conjunct(schema.path)


def not_format(schema: Schema) -> Iterator[Conjunct]:
    """Yields the ways to miss a format.

    Strings are not expressed: our languages of formats are inside the standards', so that what is outside may be valid.
    """
    name = text(schema, "format")
    if name in _RANGES:
        low, high = _RANGES[name]
        yield _numeric(schema, Numbers(most=Bound(low, True)))
        yield _numeric(schema, Numbers(least=Bound(high, True)))
    elif name is not None and is_format(name):
        yield inexpressible(schema.path, "format", "string")


def _items(schema: Schema) -> tuple[list[Schema], Schema | None]:
    """Returns the schemas of the first items, and that of the others."""
    value = schema.value
    if isinstance(value.get("items"), list):  # before 2020-12
        first = [schema.child("items", position) for position in range(len(value["items"]))]
        return first, schema.child("additionalItems") if "additionalItems" in value else None
    first = branches(schema, "prefixItems") if "prefixItems" in value else []
    return first, schema.child("items") if "items" in value else None


def _contains(schema: Schema) -> Contains | None:
    if "contains" not in schema.value:
        return None
    least = count(schema, "minContains")
    return Contains(Subschema(schema.child("contains")), 1 if least is None else least, count(schema, "maxContains"))


def _sizes(schema: Schema, least_word: str, most_word: str, things: str) -> tuple[int, int | None]:
    least, most = count(schema, least_word) or 0, count(schema, most_word)
    if most is not None and most < least:
        raise ConstraintRefused(
            f"nothing has at least {least} and at most {most} {things}; raise {most_word} or lower {least_word}",
            where=at(schema, least_word),
            keyword=least_word,
        )
    return least, most


def arrays_asked(schema: Schema) -> Conjunct:
    """Reads prefixItems, items, additionalItems, contains, min- and maxContains, min- and maxItems, uniqueItems."""
    first, others = _items(schema)
    least, most = _sizes(schema, "minItems", "maxItems", "items")
    contains = _contains(schema)
    arrays = Arrays(
        schema.path,
        tuple((Subschema(item),) for item in first),
        (Subschema(others),) if others is not None else (),
        least,
        most,
        flag(schema, "uniqueItems"),
        (contains,) if contains is not None else (),
        None if others is not None else len(first),
    )
    return Conjunct(schema.path, arrays=arrays)


def not_arrays(schema: Schema) -> Iterator[Conjunct]:
    """Yields the ways to miss what `arrays_asked` asks; two of them are no regular language, or need a far look."""

    def asked(**parts: object) -> Conjunct:
        return Conjunct(schema.path, types=frozenset({"array"}), arrays=Arrays(schema.path, **parts))  # type: ignore[arg-type]

    first, others = _items(schema)
    for position, item in enumerate(first):
        yield asked(prefix=(*((),) * position, (Subschema(item, False),)), least=position + 1)
    if others is not None and others.value is not True:
        if others.value is False:
            yield asked(least=len(first) + 1)
        elif not first:
            yield asked(contains=(Contains(Subschema(others, False), 1, None),))
        else:
            longer = Arrays(schema.path, least=len(first) + 1)
            yield inexpressible(schema.path, "items", "array", arrays=longer)
    contains = _contains(schema)
    if contains is not None:
        if contains.least:
            yield asked(contains=(Contains(contains.subschema, 0, contains.least - 1),))
        if contains.most is not None:
            yield asked(contains=(Contains(contains.subschema, contains.most + 1, None),))
    least, most = _sizes(schema, "minItems", "maxItems", "items")
    if least:
        yield asked(most=least - 1)
    if most is not None:
        yield asked(least=most + 1)
    if flag(schema, "uniqueItems"):
        yield inexpressible(schema.path, "uniqueItems", "array", arrays=Arrays(schema.path, least=2))


def _patterns(schema: Schema, find: Patterns, deviations: Deviations) -> list[PatternMembers]:
    found: list[PatternMembers] = []
    for source in mapping(schema, "patternProperties"):
        inner = schema.child("patternProperties", source)
        language = found_pattern(source, inner.path, "patternProperties", find, deviations)
        if language is not None:
            found.append(PatternMembers(language, Subschema(inner)))
    return found


def _required(schema: Schema) -> tuple[str, ...]:
    return names(schema, "required", schema.value.get("required", []))


def objects_asked(schema: Schema, find: Patterns, deviations: Deviations) -> Conjunct:
    """Reads properties, patternProperties, additionalProperties, required, propertyNames, min- and maxProperties."""
    value = schema.value
    properties = {name: (Subschema(schema.child("properties", name)),) for name in mapping(schema, "properties")}
    patterns = _patterns(schema, find, deviations)
    least, most = _sizes(schema, "minProperties", "maxProperties", "members")
    others: tuple[OtherMembers, ...] = ()
    evaluated: tuple[str | Language, ...] | None = (*properties, *(pattern.names for pattern in patterns))
    if "additionalProperties" in value:
        subschema = Subschema(schema.child("additionalProperties"))
        others = (OtherMembers(frozenset(properties), tuple(pattern.names for pattern in patterns), subschema),)
        evaluated = None
    objects = Objects(
        schema.path,
        dict(properties),
        _required(schema),
        tuple(patterns),
        others,
        (Subschema(schema.child("propertyNames")),) if "propertyNames" in value else (),
        least,
        most,
        evaluated,
    )
    return Conjunct(schema.path, objects=objects)


def objects_where(where: str, **parts: object) -> Conjunct:
    """Makes a conjunct of objects only, that asks these parts of `Objects`."""
    parts.setdefault("properties", {})
    return Conjunct(where, types=frozenset({"object"}), objects=Objects(where, **parts))  # type: ignore[arg-type]


def not_objects(schema: Schema, find: Patterns, nothing: Subschema, deviations: Deviations) -> Iterator[Conjunct]:
    """Yields the ways to miss what `objects_asked` asks; those that speak of a member of any name are no language."""
    value = schema.value
    for name in _required(schema):
        yield objects_where(schema.path, properties={name: (nothing,)})
    properties = mapping(schema, "properties")
    for name in properties:
        inner = schema.child("properties", name)
        if inner.value is not True:
            yield objects_where(schema.path, properties={name: (Subschema(inner, False),)}, required=(name,))
    least, most = _sizes(schema, "minProperties", "maxProperties", "members")
    if least:
        yield objects_where(schema.path, most=least - 1)
    if most is not None:
        yield objects_where(schema.path, least=most + 1)
    patterns = _patterns(schema, find, deviations)
    if value.get("additionalProperties") is False:
        languages = tuple(pattern.names for pattern in patterns)
        yield objects_where(schema.path, others=(OtherMembers(frozenset(properties), languages, None),))
    elif value.get("additionalProperties", True) is not True:
        yield _some_member(schema, "additionalProperties")
    if any(inner is not True for inner in mapping(schema, "patternProperties").values()):
        yield _some_member(schema, "patternProperties")
    if value.get("propertyNames", True) is not True:
        yield _some_member(schema, "propertyNames")


def _some_member(schema: Schema, keyword: str) -> Conjunct:
    """Objects with a member, whichever it is, that breaks the keyword."""
    return inexpressible(schema.path, keyword, "object", objects=Objects(schema.path, {}, least=1))
