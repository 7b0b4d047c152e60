"""Writes constraints as request parameters for the API in use, and derives a backend's capabilities."""

import hashlib
import json
import re
from functools import lru_cache
from typing import Literal

from .....lang.errors import CapabilityError
from .....lang.protocol import Capabilities, ConstraintKind, ConstraintSpec
from ..constraint_params import ANSWER, WRAPPING_TOKENS, ConstraintParams, Fields, NotStrict, of_members, strict
from .profiles import Profile

Mode = Literal["chat", "completion"]


@lru_cache(maxsize=512)
def lower(constraint: ConstraintSpec, profile: Profile, mode: Mode) -> ConstraintParams | None:
    """Writes a constraint's parameters; None for one that this server does not enforce."""
    if constraint.engine not in (None, "auto"):
        return None  # the user asks for an engine of the runtime
    match constraint.kind:
        case "json_schema":
            return _schema(constraint.source, profile, mode)
        case "regex":
            return _regex(constraint.source, profile, mode)
        case "choices":
            return _choices(json.loads(constraint.source), profile, mode)
        case "gbnf":
            return _grammar(constraint.source, profile)
        case "lark":
            return None


def kinds(profile: Profile, mode: Mode) -> tuple[ConstraintKind, ...]:
    """Returns the kinds of which the server enforces at least simple constraints."""
    simple = (
        ConstraintSpec("regex", "a"),
        ConstraintSpec("json_schema", '{"type":"boolean"}'),
        ConstraintSpec("choices", '["a","b"]'),
        ConstraintSpec("gbnf", 'root ::= "a"'),
    )
    return tuple(each.kind for each in simple if lower(each, profile, mode) is not None)


def _schema(source: str, profile: Profile, mode: Mode) -> ConstraintParams | None:
    try:
        match profile.schemas, mode:
            case "structured_outputs", _:
                return ConstraintParams({"structured_outputs": {"json": json.loads(source)}})
            case "strict", "chat":
                schema, wrapped = strict(source)
                return ConstraintParams(_response_format(schema), "json" if wrapped else "")
            case "response_format", "chat":
                return ConstraintParams(_response_format(json.loads(source)))
            case "response_format", "completion":
                return ConstraintParams({"json_schema": source})
            case "json_object", "chat":
                strict(source, exact=True)  # what it does not know it would leave out in silence
                return ConstraintParams({"response_format": {"type": "json_object", "schema": json.loads(source)}})
    except NotStrict:
        pass
    return None


def _regex(pattern: str, profile: Profile, mode: Mode) -> ConstraintParams | None:
    match profile.regexes, mode:
        case "structured_outputs", _:
            return ConstraintParams({"structured_outputs": {"regex": pattern}})
        case "regex", _:
            return ConstraintParams({"regex": pattern})
        case "pattern", "chat":
            return _wrapped({"type": "string", "pattern": f"^(?:{pattern})$"})
    return None


def _choices(choices: list[str], profile: Profile, mode: Mode) -> ConstraintParams | None:
    match profile.choices, mode:
        case "structured_outputs", _:
            return ConstraintParams({"structured_outputs": {"choice": choices}})
        case "regex", _:
            return ConstraintParams({"regex": "|".join(f"({_escaped(choice)})" for choice in choices)})
        case "grammar", _:
            return ConstraintParams({"grammar": "root ::= " + " | ".join(map(_quoted, choices))})
        case "enum", "chat" if len(choices) <= 500:  # longer enums have bounds on their characters
            return _wrapped({"type": "string", "enum": choices})
    return None


def _grammar(source: str, profile: Profile) -> ConstraintParams | None:
    match profile.grammars:
        case "structured_outputs":
            return ConstraintParams({"structured_outputs": {"grammar": source}})
        case "grammar" | "ebnf" as field:
            return ConstraintParams({field: source})
        case "":
            return None


def _wrapped(member: Fields) -> ConstraintParams:
    return ConstraintParams(_response_format(of_members({ANSWER: member})), "text")


def _response_format(schema: Fields) -> Fields:
    """Writes a response format. Its name derives from the schema, so that caches hit on every request with it."""
    digest = hashlib.sha256(json.dumps(schema).encode()).hexdigest()[:16]
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": f"answer_{digest}", "strict": True, "schema": schema},
        }
    }


def _escaped(text: str) -> str:
    """Escapes a literal of a regular expression, with escapes that every engine knows."""
    return re.sub(r"([\\\\.^$*+?()\[\]{}|/-])", r"\\\1", text).replace("\n", "\\n").replace("\t", "\\t")


def _quoted(text: str) -> str:
    """Quotes a literal of llama.cpp's grammars."""
    written = "".join(
        {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character, character)
        for character in text
    )
    return f'"{written}"'


AskedMode = Literal["auto", "chat", "completion"]


def mode_of(asked: AskedMode, profile: Profile, backend: str) -> Mode:
    """Chooses the mode. Raises CapabilityError when the model does not have the requested one. `backend`: its name."""
    mode: Mode = "completion" if asked == "completion" or (asked == "auto" and not profile.chat) else "chat"
    if not (profile.chat if mode == "chat" else profile.completion):
        other = "completion" if mode == "chat" else "chat"
        raise CapabilityError(f"{backend} ({profile.name}) has no {mode} API; write mode={other!r}")
    return mode


def capabilities_of(backend: str, model: str, profile: Profile, mode: Mode, max_context: int | None) -> Capabilities:
    """Derives the capabilities. `max_context`: reported by the server; None: the profile's."""
    return Capabilities(
        backend,
        score=profile.scores and mode == "completion",
        images=profile.images and mode == "chat",
        logprobs=profile.top_logprobs >= 0,
        max_context=max_context or profile.max_context,
        cache_minimum=profile.cache_minimum,
        constraints=kinds(profile, mode),
        asks_again=True,
        speculation=True,
        converses=mode == "chat",
        temperature="temperature" in profile.sampling,
        thinking_tokens=profile.thinking_tokens,
        continues=profile.continues or mode == "completion",
        model=model,
        wrapping_tokens=WRAPPING_TOKENS if mode == "chat" else 0,
        most_n=profile.n,
    )
