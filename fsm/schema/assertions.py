"""What the keywords of one type say, as clauses: numbers and strings.

Each function reads all keywords of its type in one schema, so that bounds which contradict each other are an error of
that schema, and not a silent absence. The `not_` twin gives the clauses of which one holds when the keywords do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..errors import ConstraintRefused, LimitExceeded, Unsupported
from ..language import Language
from .clauses import NUMBER, Clause, unexpressed
from .decimals import Bound, Number
from .document import Schema
from .formats import format_language, is_format
from .keywords import Ledger, at, count, invalid, number, text
from .numbers import Numbers
from .strings import Strings

NUMBER_KEYWORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
STRING_KEYWORDS = frozenset({"minLength", "maxLength", "pattern"})

# Of OpenAPI.
_RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}

Patterns = Callable[[str], Language]  # the names or strings in which a pattern is found


def numbers_asked(schema: Schema) -> Clause:
    """minimum, maximum, exclusiveMinimum, exclusiveMaximum (also the booleans of draft 4), multipleOf."""
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
    return Clause(schema.path, numbers=Numbers(least, most, numbers.multiple))


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


def not_numbers(schema: Schema) -> Iterator[Clause]:
    """The ways to miss what `numbers_asked` asks."""
    least, most = bounds(schema)
    step = _step(schema)
    if least is not None:
        yield _numeric(schema, Numbers(most=Bound(least.value, not least.open)))
    if most is not None:
        yield _numeric(schema, Numbers(least=Bound(most.value, not most.open)))
    if step is not None:
        yield _numeric(schema, Numbers(not_multiples=(step,)))


def _numeric(schema: Schema, numbers: Numbers) -> Clause:
    return Clause(schema.path, types=NUMBER, numbers=numbers)


def strings_asked(schema: Schema, find: Patterns, ledger: Ledger) -> Clause:
    """minLength, maxLength, pattern."""
    least, most = count(schema, "minLength") or 0, count(schema, "maxLength")
    if most is not None and most < least:
        raise ConstraintRefused(
            f"no string has at least {least} and at most {most} characters; raise maxLength or lower minLength",
            where=at(schema, "minLength"),
            keyword="minLength",
        )
    pattern = pattern_of(schema, find, ledger)
    return Clause(schema.path, strings=Strings(least, most, (pattern,) if pattern is not None else ()))


def pattern_of(schema: Schema, find: Patterns, ledger: Ledger) -> Language | None:
    source = text(schema, "pattern")
    return None if source is None else found_pattern(source, at(schema, "pattern"), "pattern", find, ledger)


def found_pattern(source: str, where: str, keyword: str, find: Patterns, ledger: Ledger) -> Language | None:
    """The strings that a pattern is found in; None when it is not honoured and that is allowed.

    Raises:
        ConstraintRefused: the pattern is no regular expression, or one too large; `where` says which.
    """
    try:
        return find(source)
    except Unsupported as error:
        ledger.refuse(f"the pattern {source!r} is not honoured: {error}", where, keyword)
        return None
    except LimitExceeded as error:
        raise LimitExceeded(f"the pattern {source[:80]!r}: {error}", where=where, keyword=keyword) from None
    except ConstraintRefused as error:
        raise ConstraintRefused(f"the pattern {source!r}: {error}", where=where, keyword=keyword) from None


def not_strings(schema: Schema, find: Patterns, ledger: Ledger) -> Iterator[Clause]:
    """The ways to miss what `strings_asked` asks."""
    least, most = count(schema, "minLength") or 0, count(schema, "maxLength")
    if least:
        yield _textual(schema, Strings(most=least - 1))
    if most is not None:
        yield _textual(schema, Strings(least=most + 1))
    pattern = pattern_of(schema, find, ledger)
    if pattern is not None:
        yield _textual(schema, Strings(barred=(pattern,)))


def _textual(schema: Schema, strings: Strings) -> Clause:
    return Clause(schema.path, types=frozenset({"string"}), strings=strings)


def format_asked(schema: Schema, ledger: Ledger) -> Clause:
    """format. Names that no specification has are annotations, as they are for validators."""
    name = text(schema, "format")
    assert name is not None, "asked where it is"
    if name in _RANGES:
        low, high = _RANGES[name]
        return Clause(schema.path, numbers=Numbers(Bound(low, False), Bound(high, False)))
    if is_format(name):
        ledger.narrow(at(schema, "format"), "format", "rare spellings of the format are left out")
        return Clause(schema.path, strings=Strings(languages=(format_language(name),), narrow=True))
    return Clause(schema.path)


def not_format(schema: Schema) -> Iterator[Clause]:
    """The ways to miss a format.

    Strings are not expressed: our languages of formats are inside the standards', so that what is outside may be valid.
    """
    name = text(schema, "format")
    if name in _RANGES:
        low, high = _RANGES[name]
        yield _numeric(schema, Numbers(most=Bound(low, True)))
        yield _numeric(schema, Numbers(least=Bound(high, True)))
    elif name is not None and is_format(name):
        yield unexpressed(schema.path, "format", "string")
