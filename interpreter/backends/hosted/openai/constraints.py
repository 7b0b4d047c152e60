"""A constraint → what a request says so that the server enforces it."""

import hashlib
import json
import re
from functools import lru_cache
from typing import Literal

from .....lang.protocol import ConstraintKind, ConstraintSpec
from ..lowered import Fields, Lowered
from ..strict_schema import ANSWER, NotStrict, of_members, strict
from .profiles import Profile

Mode = Literal["chat", "completion"]


@lru_cache(maxsize=512)
def lower(constraint: ConstraintSpec, profile: Profile, mode: Mode) -> Lowered | None:
    """None for a constraint that this server does not enforce."""
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
    """The kinds of which the server enforces at least the simple ones."""
    simple = (
        ConstraintSpec("regex", "a"),
        ConstraintSpec("json_schema", '{"type":"boolean"}'),
        ConstraintSpec("choices", '["a","b"]'),
        ConstraintSpec("gbnf", 'root ::= "a"'),
    )
    return tuple(each.kind for each in simple if lower(each, profile, mode) is not None)


def _schema(source: str, profile: Profile, mode: Mode) -> Lowered | None:
    try:
        match profile.schemas, mode:
            case "structured_outputs", _:
                return Lowered({"structured_outputs": {"json": json.loads(source)}})
            case "strict", "chat":
                schema, wrapped = strict(source)
                return Lowered(_response_format(schema), "json" if wrapped else "")
            case "response_format", "chat":
                return Lowered(_response_format(json.loads(source)))
            case "response_format", "completion":
                return Lowered({"json_schema": source})
            case "json_object", "chat":
                strict(source, exact=True)  # what it does not know it would leave out in silence
                return Lowered({"response_format": {"type": "json_object", "schema": json.loads(source)}})
    except NotStrict:
        pass
    return None


def _regex(pattern: str, profile: Profile, mode: Mode) -> Lowered | None:
    match profile.regexes, mode:
        case "structured_outputs", _:
            return Lowered({"structured_outputs": {"regex": pattern}})
        case "regex", _:
            return Lowered({"regex": pattern})
        case "pattern", "chat":
            return _wrapped({"type": "string", "pattern": f"^(?:{pattern})$"})
    return None


def _choices(choices: list[str], profile: Profile, mode: Mode) -> Lowered | None:
    match profile.choices, mode:
        case "structured_outputs", _:
            return Lowered({"structured_outputs": {"choice": choices}})
        case "regex", _:
            return Lowered({"regex": "|".join(f"({_escaped(choice)})" for choice in choices)})
        case "grammar", _:
            return Lowered({"grammar": "root ::= " + " | ".join(map(_quoted, choices))})
        case "enum", "chat" if len(choices) <= 500:  # longer enums have bounds on their characters
            return _wrapped({"type": "string", "enum": choices})
    return None


def _grammar(source: str, profile: Profile) -> Lowered | None:
    match profile.grammars:
        case "structured_outputs":
            return Lowered({"structured_outputs": {"grammar": source}})
        case "grammar" | "ebnf" as field:
            return Lowered({field: source})
        case "":
            return None


def _wrapped(member: Fields) -> Lowered:
    return Lowered(_response_format(of_members({ANSWER: member})), "text")


def _response_format(schema: Fields) -> Fields:
    """The name is the schema's own: the same for every request with it, so that caches find it again."""
    digest = hashlib.sha256(json.dumps(schema).encode()).hexdigest()[:16]
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": f"answer_{digest}", "strict": True, "schema": schema},
        }
    }


def _escaped(text: str) -> str:
    """A literal of regular expressions, with no more backslashes than every engine knows."""
    return re.sub(r"([\\\\.^$*+?()\[\]{}|/-])", r"\\\1", text).replace("\n", "\\n").replace("\t", "\\t")


def _quoted(text: str) -> str:
    """A literal of llama.cpp's grammars."""
    written = "".join(
        {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character, character)
        for character in text
    )
    return f'"{written}"'
