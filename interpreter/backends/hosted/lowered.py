"""What a request says so that a provider enforces a constraint, and answers that come inside an object for it."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from .strict_schema import ANSWER

Fields = dict[str, Any]  # of a request's body, as JSON

_OPENING = re.compile(rf'\s*\{{\s*"{ANSWER}"\s*:\s*')
_LONGEST_ESCAPE = len("\\ud83d\\ude0")


@dataclass(frozen=True, slots=True)
class Lowered:
    """Fields that enforce a constraint. `wrapped`: the answer is the member "answer" of an object."""

    fields: Fields
    wrapped: Literal["", "text", "json"] = ""


def unwrap(text: str, how: Literal["text", "json"]) -> str | None:
    """The answer inside an object; None where there is none, as in one that was cut off.

    JSON is cut out as it was written; a text is what its string says.
    """
    try:
        answer = json.loads(text)[ANSWER]
        if how == "text":
            return answer if isinstance(answer, str) else None
        start = _OPENING.match(text)
        if start is None:
            return None
        _, end = json.JSONDecoder().raw_decode(text, start.end())
        return text[start.end() : end]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def beginning(text: str, how: Literal["text", "json"]) -> str:
    """What an object that was cut off has said of its answer."""
    start = _OPENING.match(text)
    if start is None:
        return ""
    if how == "json":
        return text[start.end() :]
    for shorter in range(_LONGEST_ESCAPE + 1):  # it may end inside an escape, or between two that are one character
        answer = unwrap(text[: len(text) - shorter] + '"}', "text")
        if answer is not None and not "\ud800" <= answer[-1:] <= "\udbff":
            return answer
    return ""
