"""What the keywords of arrays and objects say, as clauses; each with its `not_` twin, as in `assertions`."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import ConstraintRefused
from ..language import Language
from .assertions import Patterns, found_pattern
from .clauses import Arrays, Clause, Contains, Demand, Objects, OtherMembers, PatternMembers, unexpressed
from .document import Schema
from .keywords import Ledger, at, branches, count, flag, mapping, names

ARRAY_KEYWORDS = frozenset(
    {"prefixItems", "items", "additionalItems", "contains", "minItems", "maxItems", "uniqueItems"}
)
OBJECT_KEYWORDS = frozenset(
    {
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "propertyNames",
        "minProperties",
        "maxProperties",
    }
)


def _items(schema: Schema) -> tuple[list[Schema], Schema | None]:
    """The schemas of the first items, and that of the others."""
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
    return Contains(Demand(schema.child("contains")), 1 if least is None else least, count(schema, "maxContains"))


def _sizes(schema: Schema, least_word: str, most_word: str, things: str) -> tuple[int, int | None]:
    least, most = count(schema, least_word) or 0, count(schema, most_word)
    if most is not None and most < least:
        raise ConstraintRefused(
            f"nothing has at least {least} and at most {most} {things}; raise {most_word} or lower {least_word}",
            where=at(schema, least_word),
            keyword=least_word,
        )
    return least, most


def arrays_asked(schema: Schema) -> Clause:
    """prefixItems, items, additionalItems, contains, minContains, maxContains, minItems, maxItems, uniqueItems."""
    first, others = _items(schema)
    least, most = _sizes(schema, "minItems", "maxItems", "items")
    contains = _contains(schema)
    arrays = Arrays(
        schema.path,
        tuple((Demand(item),) for item in first),
        (Demand(others),) if others is not None else (),
        least,
        most,
        flag(schema, "uniqueItems"),
        (contains,) if contains is not None else (),
        None if others is not None else len(first),
    )
    return Clause(schema.path, arrays=arrays)


def not_arrays(schema: Schema) -> Iterator[Clause]:
    """The ways to miss what `arrays_asked` asks; two of them are no regular language, or need a far look."""

    def asked(**parts: object) -> Clause:
        return Clause(schema.path, types=frozenset({"array"}), arrays=Arrays(schema.path, **parts))  # type: ignore[arg-type]

    first, others = _items(schema)
    for position, item in enumerate(first):
        yield asked(prefix=(*((),) * position, (Demand(item, False),)), least=position + 1)
    if others is not None and others.value is not True:
        if others.value is False:
            yield asked(least=len(first) + 1)
        elif not first:
            yield asked(contains=(Contains(Demand(others, False), 1, None),))
        else:
            longer = Arrays(schema.path, least=len(first) + 1)
            yield unexpressed(schema.path, "items", "array", arrays=longer)
    contains = _contains(schema)
    if contains is not None:
        if contains.least:
            yield asked(contains=(Contains(contains.demand, 0, contains.least - 1),))
        if contains.most is not None:
            yield asked(contains=(Contains(contains.demand, contains.most + 1, None),))
    least, most = _sizes(schema, "minItems", "maxItems", "items")
    if least:
        yield asked(most=least - 1)
    if most is not None:
        yield asked(least=most + 1)
    if flag(schema, "uniqueItems"):
        yield unexpressed(schema.path, "uniqueItems", "array", arrays=Arrays(schema.path, least=2))


def _patterns(schema: Schema, find: Patterns, ledger: Ledger) -> list[PatternMembers]:
    found: list[PatternMembers] = []
    for source in mapping(schema, "patternProperties"):
        inner = schema.child("patternProperties", source)
        language = found_pattern(source, inner.path, "patternProperties", find, ledger)
        if language is not None:
            found.append(PatternMembers(language, Demand(inner)))
    return found


def _required(schema: Schema) -> tuple[str, ...]:
    return names(schema, "required", schema.value.get("required", []))


def objects_asked(schema: Schema, find: Patterns, ledger: Ledger) -> Clause:
    """properties, patternProperties, additionalProperties, required, propertyNames, minProperties, maxProperties."""
    value = schema.value
    properties = {name: (Demand(schema.child("properties", name)),) for name in mapping(schema, "properties")}
    patterns = _patterns(schema, find, ledger)
    least, most = _sizes(schema, "minProperties", "maxProperties", "members")
    others: tuple[OtherMembers, ...] = ()
    evaluated: tuple[str | Language, ...] | None = (*properties, *(pattern.names for pattern in patterns))
    if "additionalProperties" in value:
        demand = Demand(schema.child("additionalProperties"))
        others = (OtherMembers(frozenset(properties), tuple(pattern.names for pattern in patterns), demand),)
        evaluated = None
    objects = Objects(
        schema.path,
        dict(properties),
        _required(schema),
        tuple(patterns),
        others,
        (Demand(schema.child("propertyNames")),) if "propertyNames" in value else (),
        least,
        most,
        evaluated,
    )
    return Clause(schema.path, objects=objects)


def objects_where(where: str, **parts: object) -> Clause:
    """A clause of objects only, that asks these parts of `Objects`."""
    parts.setdefault("properties", {})
    return Clause(where, types=frozenset({"object"}), objects=Objects(where, **parts))  # type: ignore[arg-type]


def not_objects(schema: Schema, find: Patterns, nothing: Demand, ledger: Ledger) -> Iterator[Clause]:
    """The ways to miss what `objects_asked` asks; those that speak of a member of any name are no language."""
    value = schema.value
    for name in _required(schema):
        yield objects_where(schema.path, properties={name: (nothing,)})
    properties = mapping(schema, "properties")
    for name in properties:
        inner = schema.child("properties", name)
        if inner.value is not True:
            yield objects_where(schema.path, properties={name: (Demand(inner, False),)}, required=(name,))
    least, most = _sizes(schema, "minProperties", "maxProperties", "members")
    if least:
        yield objects_where(schema.path, most=least - 1)
    if most is not None:
        yield objects_where(schema.path, least=most + 1)
    patterns = _patterns(schema, find, ledger)
    if value.get("additionalProperties") is False:
        languages = tuple(pattern.names for pattern in patterns)
        yield objects_where(schema.path, others=(OtherMembers(frozenset(properties), languages, None),))
    elif value.get("additionalProperties", True) is not True:
        yield _some_member(schema, "additionalProperties")
    if any(inner is not True for inner in mapping(schema, "patternProperties").values()):
        yield _some_member(schema, "patternProperties")
    if value.get("propertyNames", True) is not True:
        yield _some_member(schema, "propertyNames")


def _some_member(schema: Schema, keyword: str) -> Clause:
    """Objects with a member, whichever it is, that breaks the keyword."""
    return unexpressed(schema.path, keyword, "object", objects=Objects(schema.path, {}, least=1))
