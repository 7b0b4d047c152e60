"""Whether a text satisfies a constraint that nobody enforced.

regex         by our automata, as the runtime reads it; what they do not honour by llguidance, where it is installed
json_schema   parsed, then by the schema; blanks between JSON tokens and the order of keys are not looked at
choices       by equality
lark, gbnf    by llguidance
"""

import json
import re

from ...lang.constraint import OPEN_ENDED
from ...lang.errors import ConstraintError
from ...lang.protocol import ConstraintSpec
from . import expressions, schemas

_BLANK = re.compile("[ \n]")
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


def check(constraint: ConstraintSpec) -> None:
    """Whether texts can be looked at; before anything is asked. May take long: it compiles.

    Raises:
        ConstraintError: the constraint is wrong.
        CapabilityError, MissingExtraError: a package that is needed is not installed.
    """
    match constraint.kind:
        case "regex" | "lark" | "gbnf":
            expressions.check(constraint.kind, constraint.source)
        case "json_schema":
            schemas.check(constraint.source)
        case "choices":
            _choices(constraint)


def holds(constraint: ConstraintSpec, text: str) -> list[str]:
    """What `text` breaks of a constraint, a sentence each; empty when it holds. Raises as `check`."""
    match constraint.kind:
        case "regex" | "lark" | "gbnf":
            walk = expressions.walk(constraint.kind, constraint.source, text)
            return [] if walk.accepted == len(text) else [_where(text, walk)]
        case "json_schema":
            return schemas.violations(constraint.source, text)
        case "choices":
            return [] if text in _choices(constraint) else ["the text is none of the choices"]


def begins(constraint: ConstraintSpec, text: str) -> bool:
    """Whether a text that satisfies the constraint begins with this one; False where a schema does not tell. Raises as
    `check`."""
    match constraint.kind:
        case "choices":
            return any(choice.startswith(text) for choice in _choices(constraint))
        case "json_schema":
            try:
                return expressions.walk("json_schema", constraint.source, text).read == len(text)
            except ConstraintError:  # more than automata take: the validator needs whole texts
                return False
    return expressions.walk(constraint.kind, constraint.source, text).read == len(text)


def longest(constraint: ConstraintSpec, text: str) -> int | None:
    """Characters of the longest beginning of `text` that satisfies the constraint and could not be longer, whatever
    comes behind `text`; None where there is none. Raises as `check`.

    The blank that a number may end with (see `lang.constraint.NUMBER`) is counted.
    """
    match constraint.kind:
        case "regex" | "lark" | "gbnf":
            walk = expressions.walk(constraint.kind, constraint.source, text)
            return None if walk.read == len(text) and walk.extendable else walk.accepted
        case "choices":
            choices = _choices(constraint)
            if any(choice.startswith(text) and choice != text for choice in choices):
                return None
            return max((len(choice) for choice in choices if text.startswith(choice)), default=None)
        case "json_schema":
            return _json_end(constraint.source, text)


def tidied(constraint: ConstraintSpec, text: str) -> str:
    """`text`, or what is left of it without what models like to put around an answer, if that satisfies the
    constraint and `text` does not: white space, and around JSON a lone code fence. Raises as `check`."""
    stripped = text.strip()
    candidates = [text, stripped]
    if constraint.source in OPEN_ENDED:
        candidates = [_BLANK.split(stripped, maxsplit=1)[0]]  # a number ends at a blank, which is no part of it
    if constraint.kind == "json_schema":
        candidates.reverse()  # JSON ignores white space around it, and a variable need not hold it
        fenced = _FENCED.fullmatch(stripped)
        if fenced is not None:
            candidates.append(fenced[1].strip())
    return next((candidate for candidate in dict.fromkeys(candidates) if not holds(constraint, candidate)), text)


def _choices(constraint: ConstraintSpec) -> list[str]:
    choices: list[str] = json.loads(constraint.source)
    return choices


def _json_end(schema: str, text: str) -> int | None:
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if end == len(text) and isinstance(value, int | float) and not isinstance(value, bool):
        return None  # a digit may follow
    return end if not schemas.violations(schema, text[:end]) else None


def _where(text: str, walk: expressions.Walk) -> str:
    """Where a text leaves its expression."""
    if walk.read == len(text):
        return f"the text ends too early, behind {text[-40:]!r}" if text else "the text is empty"
    rest, said = text[walk.read : walk.read + 40], text[: walk.read][-40:]
    return f"no such text goes on with {rest!r} behind {said!r}" if said else f"no such text begins with {rest!r}"
