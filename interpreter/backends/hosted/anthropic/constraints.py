"""A constraint → the form that a Claude model is held to, where its structured outputs have one."""

import json
from functools import lru_cache
from typing import Any

from .....lang.protocol import ConstraintSpec
from ..lowered import Lowered
from ..strict_schema import ANSWER, NotStrict, of_members, strict
from .profiles import AnthropicProfile

_DEFINITIONS = ("$defs", "definitions")


@lru_cache(maxsize=512)
def lower(constraint: ConstraintSpec, profile: AnthropicProfile) -> Lowered | None:
    """Fields of a request; None for a constraint that is not enforced: expressions, grammars, and schemas with bounds,
    patterns, formats, members that may be left out, or recursion."""
    if not profile.structured or constraint.engine not in (None, "auto"):
        return None
    match constraint.kind:
        case "json_schema":
            try:
                schema, wrapped = strict(constraint.source, exact=True)
            except NotStrict:
                return None
            return None if _recursive(schema) else Lowered(_format(schema), "json" if wrapped else "")
        case "choices":
            member = {"type": "string", "enum": json.loads(constraint.source)}
            return Lowered(_format(of_members({ANSWER: member})), "text")
        case "regex" | "lark" | "gbnf":
            return None


def _format(schema: Any) -> dict[str, Any]:  # Any: JSON
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def _recursive(schema: Any) -> bool:  # Any: JSON
    """Whether a definition leads back to itself."""
    leads = {
        f"#/{group}/{name}": _references(definition)
        for group in _DEFINITIONS
        for name, definition in schema.get(group, {}).items()
    }
    for start in leads:
        seen: set[str] = set()
        ahead = list(leads[start])
        while ahead:
            reference = ahead.pop()
            if reference == start:
                return True
            if reference not in seen:
                seen.add(reference)
                ahead.extend(leads.get(reference, ()))
    return False


def _references(schema: Any) -> set[str]:  # Any: JSON
    match schema:
        case {"$ref": str(reference)}:
            return {reference}
        case dict():
            return set().union(*map(_references, schema.values()))
        case list():
            return set().union(*map(_references, schema))
        case _:
            return set()
