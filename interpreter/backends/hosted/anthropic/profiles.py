"""Profiles of Claude models by name, and the constraints that their structured outputs enforce.

The first pattern that fits a name counts.

A profile can be given by hand (`Anthropic(model, profile=...)`), for a model that is newer than this table, or is
reached through a gateway. Unknown names get a cautious profile: no prefill (the model is asked to continue) and no
structured outputs (texts are validated and asked again).

Source: the provider's pages on models, migration, structured outputs and prompt caching, as of autumn 2026.
"""

import json
import re
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from .....lang import checks
from .....lang.protocol import ConstraintSpec
from ..constraint_params import ANSWER, ConstraintParams, NotStrict, of_members, strict


class Sampling(Enum):
    """The set of temperature, top_p and top_k that a model takes."""

    ALL = "temperature, top_p and top_k together"
    ONE = "temperature or top_p, not both; and top_k"
    NONE = "none of them"


class Thinking(Enum):
    """A model's thinking by default, and the handling of it in requests."""

    OFF = "the model answers at once"
    SWITCHED_OFF = "it would think first, so requests switch that off"
    ALWAYS = "it thinks first and cannot be kept from it; its thoughts count against max_tokens"


@dataclass(frozen=True, slots=True)
class AnthropicProfile:
    """The abilities of one model.

    Attributes:
        prefill: an assistant message at the end of a request is continued.
        structured: answers can be bound to a JSON Schema.
        images: takes images.
        sampling: parameters that choose among tokens.
        thinking: whether it thinks before it answers.
        cache_minimum: tokens of the shortest prefix that the provider stores.
        max_context: tokens of prompt and answer; None: not known.

    Raises:
        ParameterError: a value of another type.
    """

    prefill: bool = False
    structured: bool = False
    images: bool = True
    sampling: Sampling = Sampling.NONE
    thinking: Thinking = Thinking.OFF
    cache_minimum: int = 1024
    max_context: int | None = None

    def __post_init__(self) -> None:
        checks.record(self)


_THIRD = AnthropicProfile(prefill=True, sampling=Sampling.ALL, max_context=200_000)
_FOURTH = replace(_THIRD, structured=True, sampling=Sampling.ONE)
_SIXTH = AnthropicProfile(structured=True, sampling=Sampling.ONE, max_context=1_000_000)
_EIGHTH = replace(_SIXTH, sampling=Sampling.NONE)
_FIFTH_GENERATION = replace(_EIGHTH, thinking=Thinking.SWITCHED_OFF)

# Names come plain ("claude-opus-4-5"), dated, and with the prefixes and suffixes of clouds, so patterns are searched.
_TABLE: tuple[tuple[str, AnthropicProfile], ...] = (
    (r"claude-3(-5)?-haiku", replace(_THIRD, cache_minimum=2048)),
    (r"claude-3", _THIRD),
    (r"claude-opus-4-1(?!\d)", replace(_THIRD, sampling=Sampling.ONE)),
    (r"claude-sonnet-4-5(?!\d)", _FOURTH),
    (r"claude-(opus|haiku)-4-5(?!\d)", replace(_FOURTH, cache_minimum=4096)),
    (r"claude-sonnet-4-6(?!\d)", _SIXTH),
    (r"claude-opus-4-6(?!\d)", replace(_SIXTH, cache_minimum=4096)),
    (r"claude-opus-4-7(?!\d)", replace(_EIGHTH, cache_minimum=4096)),
    (r"claude-opus-4-8(?!\d)", _EIGHTH),
    (r"claude-(opus|sonnet)-4(-0)?(?!-?\d)|claude-(opus|sonnet)-4-20\d{6}", _THIRD),
    (r"claude-(opus|sonnet)-5-5(?!\d)", replace(_EIGHTH, thinking=Thinking.ALWAYS)),
    (r"claude-haiku-5-5(?!\d)", _FIFTH_GENERATION),
    (r"claude-(opus|sonnet)-5(?!-?\d)", _FIFTH_GENERATION),
    (
        r"claude-(fable|mythos)",
        AnthropicProfile(thinking=Thinking.ALWAYS, cache_minimum=2048, max_context=1_000_000),
    ),
    (r"claude", AnthropicProfile()),
)

# Models of others that speak this dialect take what it has always had.
_OTHERS = AnthropicProfile(sampling=Sampling.ALL)


def profile_of(model: str) -> AnthropicProfile:
    """Returns the profile of a model by its name."""
    return next((profile for pattern, profile in _TABLE if re.search(pattern, model)), _OTHERS)


_DEFINITIONS = ("$defs", "definitions")


@lru_cache(maxsize=512)
def lower(constraint: ConstraintSpec, profile: AnthropicProfile) -> ConstraintParams | None:
    """Returns the fields of a request; None for a constraint that is not enforced: expressions, grammars, and schemas
    with bounds, patterns, formats, optional members, or recursion."""
    if not profile.structured or constraint.engine not in (None, "auto"):
        return None
    match constraint.kind:
        case "json_schema":
            try:
                schema, wrapped = strict(constraint.source, exact=True)
            except NotStrict:
                return None
            return None if _recursive(schema) else ConstraintParams(_format(schema), "json" if wrapped else "")
        case "choices":
            member = {"type": "string", "enum": json.loads(constraint.source)}
            return ConstraintParams(_format(of_members({ANSWER: member})), "text")
        case "regex" | "lark" | "gbnf":
            return None


def _format(schema: Any) -> dict[str, Any]:  # Any: JSON
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def _recursive(schema: Any) -> bool:  # Any: JSON
    """Returns whether a definition refers to itself."""
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
