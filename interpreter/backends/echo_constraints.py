"""Echo's answers against the constraints of the requests: a script that a real backend could not have said is reported.

There is no automaton here. A regular expression is applied with `re` (or with the `regex` package, where it is
installed and `re` does not know the syntax), JSON is parsed, and validated where `jsonschema-rs` is installed; blanks
between JSON tokens are not looked at. Grammars are looked at by llguidance, where it is installed.
"""

import importlib.util
import json
import re
from typing import cast

from ...lang.errors import ConstraintError, RequestError, shown
from ...lang.protocol import ConstraintSpec
from ..demands import expressions, schemas

_FLAGS = re.compile(r"(?:\(\?[aimsux]+\))?")  # they stand at the beginning of an expression, or nowhere


def check(text: str, constraint: ConstraintSpec) -> None:
    """Whether a whole answer satisfies the constraint.

    Raises:
        RequestError: it does not; the message says how.
        ConstraintError: the constraint itself is wrong.
        CapabilityError: it cannot be looked at here.
    """
    match constraint.kind:
        case "regex":
            if compiled(constraint.source).fullmatch(text) is None:
                raise RequestError(
                    f"Echo's answer {shown(text)} does not match regex {shown(constraint.source)} as a whole"
                )
        case "json_schema":
            _check_json(text, constraint.source)
        case "choices":
            if text not in json.loads(constraint.source):
                raise RequestError(f"Echo's answer {shown(text)} is none of {shown(constraint.source)}")
        case "lark" | "gbnf":
            if expressions.walk(constraint.kind, constraint.source, text).accepted != len(text):
                raise RequestError(f"Echo's answer {shown(text)} is no text of the grammar {shown(constraint.source)}")


def compiled(pattern: str) -> "re.Pattern[str]":
    """Raises ConstraintError for a pattern that no engine here understands."""
    try:
        return re.compile(pattern)
    except (RecursionError, OverflowError, MemoryError):
        raise ConstraintError(f"regex {shown(pattern)}: it is nested too deep, or repeats too often") from None
    except re.error as error:
        if importlib.util.find_spec("regex") is None:
            raise ConstraintError(f"regex {shown(pattern)}: {error}") from None
    import regex  # type: ignore[import-untyped]

    try:
        return cast("re.Pattern[str]", regex.compile(pattern, flags=regex.VERSION0))  # it has the same methods
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ConstraintError(f"regex {shown(pattern)}: {error}") from None


def _check_json(text: str, schema: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"Echo's answer {shown(text)} is no JSON: {error}") from None
    if importlib.util.find_spec("jsonschema_rs") is not None and (problems := schemas.violations(schema, text)):
        raise RequestError(f"Echo's answer {shown(text)} is not of the schema: {'; '.join(problems)}")


def first_stop(pattern: str, text: str, free: int) -> tuple[int, int] | None:
    """Where the first match of a stop_regex ends, and where it begins: (end, start); None without one.

    The match that ends first counts, and of those that end together the one that begins first. `free`: characters
    at the beginning in which none may end.

    Raises:
        ConstraintError: a pattern that is wrong, or that matches the empty text, which stands everywhere.
    """
    if compiled(pattern).fullmatch("") is not None:
        raise ConstraintError(f"stop_regex {shown(pattern)} matches the empty text; write one that takes a character")
    flags = _FLAGS.match(pattern)
    assert flags is not None, "it matches the empty text too"
    ending = compiled(rf"{flags[0]}(?:{pattern[flags.end() :]})\Z")
    for end in range(free + 1, len(text) + 1):
        found = ending.search(text, 0, end)
        if found is not None:
            return end, found.start()
    return None
