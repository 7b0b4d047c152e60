"""Compiles conjuncts to a grammar: scalars stand where they are used, arrays and objects become rules.

A refusal says the keyword and the place that it is about. Most know both when they are raised. What is found out later
(an intersection has too many states, nothing is admitted) knows a rule of the grammar or nothing: `placed` and
`nothing_left` look for the keyword in the source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal as OneOf

from ..boolean.resolution import NothingAdmitted, resolve
from ..errors import ConstraintRefused, LimitExceeded, Limits, Unsupported
from ..language import NOTHING, Call, Grammar, Language, Literal, Union
from .conjuncts import (
    EVERY_TYPE,
    NUMBER,
    Arrays,
    Conjunct,
    Disjunction,
    Objects,
    Subschema,
    Subschemas,
    conjoined,
    numbers_of,
    scalars_left,
    strings_of,
    type_of,
)
from .containers import Items, Members
from .document import Document, Value, read_schema
from .expressions import Style, Whitespace, literal, union
from .keywords import Deviations, structure
from .normalizer import Normalizer
from .numbers import Numbers
from .strings import Strings, quoted

MOST_RULES = 50_000
KeyOrder = OneOf["declared", "any"]
ANY = "any value"
ANY_ARRAY = "any array"
ANY_OBJECT = "any object"


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """Options of how a schema is read and its values are written.

    Args:
        whitespace: between the parts of a value: `{"a": 1, "b": 2}` ("spaced"), `{"a":1,"b":2}` ("compact"), or at
            most one newline and 20 blanks at each place ("flexible").
        allow_unenforced: keywords that are not honoured are listed in `SchemaGrammar.unenforced` instead of refused;
            the caller validates the values again.
        closed: objects with declared members that do not mention others have no others, which is a narrowing.
        key_order: of members that are declared: "declared" keeps them in the order of the schema, but for optional ones
            of objects with other members, which may come late; "any" takes them as they come, for texts that
            were not written here.
        infer_types: a schema without `type` means the types that its other keywords speak about. Without this it
            means what it says: `{"properties": ...}` admits every string.
    """

    whitespace: Whitespace = "spaced"
    allow_unenforced: bool = False
    closed: bool = False
    key_order: KeyOrder = "declared"
    infer_types: bool = True


@dataclass(frozen=True, slots=True)
class SchemaGrammar:
    """A schema as a grammar of JSON texts; `boolean.resolution.resolve` makes it ready for an automaton.

    Args:
        schema: as it was read: numbers are int or Decimal.
        unenforced: (keyword, path) of what the grammar does not honour; empty unless that was allowed.
        narrowed: (keyword, path, how) where fewer texts are admitted than the schema means.
    """

    grammar: Grammar
    schema: Value
    unenforced: tuple[tuple[str, str], ...] = ()
    narrowed: tuple[tuple[str, str, str], ...] = ()


def compile_schema(
    source: str | bytes | Mapping[str, object] | bool,
    options: SchemaOptions = SchemaOptions(),
    limits: Limits = Limits(),  # noqa: B008
) -> SchemaGrammar:
    """Returns the texts of the values that a JSON Schema admits.

    Keys come in the order of the schema: `properties` first, then names that are only `required`. In objects that have
    others, those come once all required ones have, and with them, in any order, what is left of the declared ones.

    Raises:
        Unsupported: a keyword that is not honoured; `keyword` and `where` name it.
        LimitExceeded: the schema, or what it unfolds to, is too large or too deep.
        ConstraintRefused: it is no valid schema, refers to nowhere, or admits nothing.
    """
    schema = read_schema(source, limits)
    try:
        return _compiled(schema, options, limits)
    except NothingLeft:
        raise _nothing_left(schema, options, limits) from None


def resolved_schema(
    source: str | bytes | Mapping[str, object] | bool,
    options: SchemaOptions = SchemaOptions(),
    limits: Limits = Limits(),  # noqa: B008
) -> SchemaGrammar:
    """Runs `compile_schema`, and makes its grammar ready for an automaton. Raises as that does."""
    compiled = compile_schema(source, options, limits)
    try:
        return replace(compiled, grammar=resolve(compiled.grammar, limits))
    except NothingAdmitted:
        raise _nothing_left(compiled.schema, options, limits) from None
    except ConstraintRefused as error:
        raise placed(error, compiled.schema, "#") from None


def _compiled(schema: Value, options: SchemaOptions, limits: Limits) -> SchemaGrammar:
    """Raises NothingLeft, and what `compile_schema` raises."""
    deviations = Deviations(allow=options.allow_unenforced)
    latest = "#"
    try:
        compiler = Compiler(Document(schema), options, limits, deviations)
        try:
            grammar = compiler.grammar()
        finally:
            latest = compiler.normalizer.latest
    except NothingLeft:
        if deviations.lost is not None:  # values may be left that are not expressed
            keyword, where = deviations.lost
            why = "what the schema leaves here cannot be expressed; write what is meant instead"
            raise placed(Unsupported(why, where=where, keyword=keyword), schema, where) from None
        raise
    except ConstraintRefused as error:
        raise placed(error, schema, latest) from None
    except RecursionError:
        raise placed(LimitExceeded("the schema nests or refers too deep; flatten it"), schema, latest) from None
    return SchemaGrammar(grammar, schema, tuple(deviations.unenforced), _listed(deviations.narrowed))


def _listed(narrowed: Mapping[tuple[str, str], str]) -> tuple[tuple[str, str, str], ...]:
    return tuple((keyword, where, how) for (keyword, where), how in narrowed.items())


def _nothing_left(schema: Value, options: SchemaOptions, limits: Limits) -> ConstraintRefused:
    def admits_nothing(value: Value) -> bool:
        try:
            resolve(_compiled(value, options, limits).grammar, limits)
        except (NothingLeft, NothingAdmitted):
            return True
        except ConstraintRefused:
            return True  # refused for another reason: removing the keyword does not help
        return False

    return nothing_left(schema, admits_nothing)


class NothingLeft(ConstraintRefused):
    """The schema admits nothing."""

    def __init__(self) -> None:
        super().__init__("the schema admits nothing")


class Compiler:
    """Builds the rules of one grammar."""

    def __init__(self, document: Document, options: SchemaOptions, limits: Limits, deviations: Deviations) -> None:
        self.normalizer = Normalizer(document, limits, deviations)
        self.deviations = deviations
        self.style = Style.of(options.whitespace)
        self.closed = options.closed
        self.key_order = options.key_order
        self._infer = options.infer_types
        self._document = document
        self._rules: dict[str, Language] = {}
        self._names: dict[str, int] = {}
        self._languages: dict[Subschemas, Language] = {}
        # By identity; the conjunct is kept so that it stays one.
        self._conjunct_languages: dict[int, tuple[Conjunct, Language]] = {}
        self._alternatives: dict[int, Objects] = {}  # by identity, likewise: one alternative of several
        self._scalars: dict[Hashable, Language] = {}
        self._pending: deque[tuple[str, Arrays | Objects]] = deque()

    def grammar(self) -> Grammar:
        root = Subschema(self._document.root)
        start = self.language((root,))
        while self._pending:
            name, part = self._pending.popleft()
            self.normalizer.latest = part.where
            if isinstance(part, Arrays):
                self.add_rule(name, Items(self, part, name).language())
            else:
                self.add_rule(name, Members(self, part, name, alone=id(part) not in self._alternatives).language())
        if start == NOTHING or (isinstance(start, Call) and self._rules[start.rule] == NOTHING):
            raise NothingLeft()
        return Grammar(start, self._rules)

    # Rules

    def rule_name(self, wanted: str) -> str:
        """Makes a name that no other rule has."""
        count = self._names[wanted] = self._names.get(wanted, 0) + 1
        return wanted if count == 1 else f"{wanted} ({count})"

    def add_rule(self, name: str, language: Language) -> Call:
        if len(self._rules) >= MOST_RULES:
            raise LimitExceeded(f"the schema unfolds to more than {MOST_RULES} rules; write fewer alternatives")
        self._rules[name] = language
        return Call(name)

    def _later(self, wanted: str, part: Arrays | Objects) -> Call:
        name = self.rule_name(wanted)
        self._pending.append((name, part))
        return Call(name)

    # Languages

    def unsatisfiable(self, subschemas: Subschemas) -> bool:
        return self.normalizer.satisfiability.unsatisfiable(subschemas)

    def language(self, subschemas: Subschemas) -> Language:
        """Returns the texts of the values that meet all subschemas."""
        found = self._languages.get(subschemas)
        if found is None:
            ways = self.expressed(self._ways(subschemas))
            if len(ways) > 1:
                self._alternatives.update({id(way.objects): way.objects for way in ways if way.objects is not None})
            found = union([self._conjunct(conjunct) for conjunct in ways])
            # Alternatives that call rules are one too: what is shared is called, and may come again inside itself.
            if isinstance(found, Union) and any(isinstance(option, Call) for option in found.options):
                found = self.add_rule(self.rule_name(f"{subschemas[0].schema.path} any of"), found)
            self._languages[subschemas] = found
        return found

    def _ways(self, subschemas: Subschemas) -> tuple[Conjunct, ...]:
        try:
            return self.normalizer.conjunction(subschemas)
        except LimitExceeded:
            # A subschema that must not hold is one way of several to meet a `not` or a oneOf: without it fewer values.
            failing = next((subschema for subschema in subschemas if not subschema.holds), None)
            if failing is None:
                raise
            self.deviations.lose(failing.schema.path, "not", "the ways to miss this are too many; values are left out")
            return ()

    def expressed(self, disjunction: Disjunction) -> Disjunction:
        """Keeps those that languages give, and notes the others."""
        for conjunct in disjunction:
            if conjunct.inexpressible is not None:
                keyword, where = conjunct.inexpressible
                self.deviations.lose(where, keyword, "no automaton gives what misses this; such values are left out")
        return tuple(conjunct for conjunct in disjunction if conjunct.inexpressible is None)

    def _conjunct(self, conjunct: Conjunct) -> Language:
        known = self._conjunct_languages.get(id(conjunct))
        if known is None:
            language = self._any() if conjunct.asks_nothing else self._asked(conjunct)
            known = self._conjunct_languages[id(conjunct)] = (conjunct, language)
        return known[1]

    def _any(self) -> Call:
        """Returns the rule of any JSON value; how deep it may nest is up to the automaton."""
        if ANY not in self._rules:
            call = self.add_rule(ANY, NOTHING)
            self._rules[ANY] = self._of_types(Conjunct(ANY), EVERY_TYPE)
            return call
        return Call(ANY)

    def _asked(self, conjunct: Conjunct) -> Language:
        if conjunct.values is not None:
            return self._values(conjunct)
        types = conjunct.types
        if types is None:
            types = (self._infer and conjunct.implied_types) or EVERY_TYPE
            if types != EVERY_TYPE:
                kinds = ", ".join(sorted("number" if types >= NUMBER and kind in NUMBER else kind for kind in types))
                self.deviations.narrow(conjunct.where, "type", f"no type is given, and its keywords speak of: {kinds}")
        return self._of_types(conjunct, types & self.normalizer.satisfiability.types_left(conjunct))

    def _of_types(self, conjunct: Conjunct, types: frozenset[str]) -> Language:
        words = tuple(value for value, kind in ((None, "null"), (True, "boolean"), (False, "boolean")) if kind in types)
        words = scalars_left(Conjunct(conjunct.where, values=words, excluded=conjunct.excluded))
        options: list[Language] = [literal({None: "null", True: "true", False: "false"}[word]) for word in words]
        if types & NUMBER:
            options.append(self._number(numbers_of(conjunct, types), conjunct.where))
        if "string" in types:
            options.append(self._string(strings_of(conjunct), conjunct.where))
        if "array" in types:
            options.append(self._array(conjunct))
        if "object" in types:
            options.append(self._object(conjunct))
        return union([option for option in options if option != NOTHING])

    def _number(self, numbers: Numbers, where: str) -> Language:
        if not numbers.exact:
            place = f"{where}/type" if where != ANY else "#"
            self.deviations.narrow(place, "type", "numbers have a limited number of digits")
        if numbers == Numbers(whole=numbers.whole):
            name = "any integer" if numbers.whole else "any number"
            return self._shared(numbers, name, numbers.language)
        try:
            return numbers.language()
        except Unsupported as error:
            self.deviations.refuse(error.why, f"{where}/{error.keyword}", error.keyword)
            return Numbers(excluded=numbers.excluded, whole=numbers.whole).language()

    def _string(self, strings: Strings, where: str) -> Language:
        """Makes one rule for all strings of which the same is asked: formats and patterns are large, and come again."""
        name = "any string" if strings == Strings() else f"{where} string"
        return self._shared(strings, name, lambda: quoted(strings.characters()))

    def _shared(self, key: Hashable, name: str, build: Callable[[], Language]) -> Language:
        known = self._scalars.get(key)
        if known is None:
            language = build()
            small = isinstance(language, Literal | Call) or language == NOTHING
            known = self._scalars[key] = language if small else self.add_rule(self.rule_name(name), language)
        return known

    def _array(self, conjunct: Conjunct) -> Language:
        if conjunct.arrays is not None:
            return self._later(f"{conjunct.arrays.where} array", conjunct.arrays)
        if ANY_ARRAY not in self._rules:
            self.add_rule(ANY_ARRAY, NOTHING)
            self._rules[ANY_ARRAY] = Items(self, Arrays(ANY_ARRAY), ANY_ARRAY).language()
        return Call(ANY_ARRAY)

    def _object(self, conjunct: Conjunct) -> Language:
        if conjunct.objects is not None:
            return self._later(f"{conjunct.objects.where} object", conjunct.objects)
        if ANY_OBJECT not in self._rules:
            self.add_rule(ANY_OBJECT, NOTHING)
            self._rules[ANY_OBJECT] = Members(self, Objects(ANY_OBJECT, {}), ANY_OBJECT).language()
        return Call(ANY_OBJECT)

    def _values(self, conjunct: Conjunct) -> Language:
        """Returns the constants that meet everything else; arrays and objects are met part by part."""
        assert conjunct.values is not None, "asked of constants"
        plain: list[Value] = list(scalars_left(conjunct))
        options: list[Language] = []
        for value in conjunct.values:
            if not isinstance(value, list | dict) or (
                conjunct.types is not None and type_of(value) not in conjunct.types
            ):
                continue
            if (conjunct.arrays if isinstance(value, list) else conjunct.objects) is None:
                plain.append(value)
                continue
            parts = structure(self._document.root, value, self.rule_name("constant"))
            for way in self.normalizer.disjunction(Subschema(parts)):
                both = conjoined(replace(conjunct, values=None), way)
                if both is not None:
                    options.append(self._conjunct(both))
        return union([*([self.style.spell_any(plain)] if plain else []), *options])


# Keywords that are blamed for a place, the likeliest first: what multiplies, what restricts strings, the others.
_BLAMED = (
    *("oneOf", "anyOf", "allOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies"),
    *("uniqueItems", "contains", "pattern", "format", "maxLength", "minLength", "enum", "const"),
    *("patternProperties", "propertyNames", "properties", "required", "additionalProperties", "unevaluatedProperties"),
    *("maxProperties", "minProperties", "prefixItems", "items", "additionalItems", "unevaluatedItems", "maxItems"),
    *("minItems", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "$ref", "$dynamicRef"),
    *("then", "else", "type", "$defs", "definitions"),
)
_TRIES = 200_000  # bytes of schemas that are compiled once more to find out which keyword leaves nothing


def placed(error: ConstraintRefused, schema: Value, latest: str) -> ConstraintRefused:
    """Refuses likewise, with a keyword of the schema and the JSON pointer to it. `latest`: the place worked on."""
    where = _place(schema, error.where or latest)
    last = where.rpartition("/")[2]
    if last == error.keyword and last:
        return error
    if error.keyword in _BLAMED and _has(schema, f"{where}/{error.keyword}"):
        keyword, where = error.keyword, f"{where}/{error.keyword}"
    elif last in _BLAMED and error.keyword not in _BLAMED:
        keyword = last
    else:
        keyword, where = _blamed(schema, where)
    if (keyword, where) == (error.keyword, error.where):
        return error
    return type(error)(error.why, where=where, keyword=keyword)


def nothing_left(schema: Value, admits_nothing: Callable[[Value], bool]) -> ConstraintRefused:
    """Refuses a schema that admits nothing, at the innermost keyword without which it would admit something."""
    keys: list[str | int] = []
    value, tries = schema, max(8, _TRIES // (1 + len(str(schema))))
    looking = True
    while looking and isinstance(value, dict | list):
        looking = False
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            tries -= 1
            if tries < 0:
                break
            if not admits_nothing(_without(schema, [*keys, key])):
                keys.append(key)
                value, looking = value[key], True
                break
    where = "/".join(["#", *(_escaped(str(key)) for key in keys)])
    keyword = next((str(key) for key in reversed(keys) if key in _BLAMED), "")
    if not keyword:
        keyword, where = _blamed(schema, where)
    why = "the schema admits nothing; let its bounds, types and enums overlap"
    if keyword != "false":
        why += f" (without {keyword} here it would admit something)" if keys else ""
    return ConstraintRefused(why, where=where, keyword=keyword)


def _without(value: Value, keys: list[str | int]) -> Value:
    """Copies a value in which a member is left out, or an item is true."""
    key, *rest = keys
    if isinstance(value, dict):
        return {
            name: _without(inner, rest) if name == key else inner
            for name, inner in value.items()
            if rest or name != key
        }
    return [(_without(inner, rest) if rest else True) if at == key else inner for at, inner in enumerate(value)]


def _place(schema: Value, where: str) -> str:
    """Returns the longest beginning of the name of a rule, or of a place, that leads somewhere in the schema."""
    while where and not _has(schema, where):
        shorter = max(where.rfind(" "), where.rfind("/"))
        where = where[:shorter] if shorter > 0 else ""
    return where or "#"


def _has(schema: Value, where: str) -> bool:
    return next(iter(_at(schema, where)), None) is not None


def _at(schema: Value, where: str) -> Iterator[tuple[Value]]:
    """Yields the value at a JSON pointer, if there is one."""
    first, *parts = where.split("/")
    if first != "#":
        return
    value = schema
    for part in parts:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return
    yield (value,)


def _blamed(schema: Value, where: str) -> tuple[str, str]:
    """Finds a keyword of the schema at this place, or the nearest one that leads to it."""
    found = next(iter(_at(schema, where)), None)
    if found is not None and isinstance(found[0], dict):
        for keyword in _BLAMED:
            if keyword in found[0]:
                return keyword, f"{where}/{keyword}"
    for part in reversed(where.split("/")[1:]):
        if part in _BLAMED:
            return part, where
    return "false" if schema is False else "type", where


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
