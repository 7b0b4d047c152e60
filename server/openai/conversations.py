"""Holds what chat completions and responses share: tools, formats, and the parts of a question that they make."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from ...lang.conversations.messages import Option
from ...lang.tool_calls import Tool, ToolChoice
from ..bodies import Body, Json, wrong
from ..limits import check_schema

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Detail = Literal["auto", "low", "high", "original"]
Verbosity = Literal["low", "medium", "high"]
ToolWord = Literal["none", "auto", "required"]
ANY_OBJECT: Json = {"type": "object"}  # as a schema
CONVERSATION_NOT_OFFERED = {
    "service_tier": "there is one tier; leave it out",
    "prompt_cache_retention": "the cache is in memory; leave it out",
    "moderation": "nothing is moderated; leave it out",
}


class RefusalBlock(Body, frozen=True, tag="refusal", tag_field="type"):
    """Text with which an earlier answer refused."""

    refusal: str


class TextFormat(Body, frozen=True, tag="text", tag_field="type"):
    """Free text."""

    @property
    def schema(self) -> None:
        """None: text follows no schema."""


class JsonFormat(Body, frozen=True, tag="json_object", tag_field="type"):
    """Any JSON object."""

    @property
    def schema(self) -> Json:
        """The schema of any object."""
        return ANY_OBJECT


class Chosen(Protocol):
    """A choice of tools by their names."""

    def choice(self, parallel: bool) -> ToolChoice: ...


def choice_of(chosen: ToolWord | Chosen | None, parallel: bool | None, tools: Sequence[Tool]) -> ToolChoice:
    """Returns the choice of tools. Raises HttpError for a choice without tools."""
    if not tools:
        if chosen not in (None, "none", "auto"):
            raise wrong("tool_choice", "there are no tools that are offered here; give functions, or leave it out")
        return ToolChoice("none")
    if chosen is None or isinstance(chosen, str):
        return ToolChoice(chosen or "auto", None, parallel is not False)
    return chosen.choice(parallel is not False)


def tool_of(name: str, description: str | None, parameters: Mapping[str, Any] | None, param: str) -> Tool:
    """Returns a function in the words of the language.

    Raises:
        ParameterError: the schema of its parameters, the field `param`, is too large.
    """
    found = parameters or {"type": "object", "properties": {}}
    check_schema(param, found)
    return Tool(name, description or "", found)


def options_of(effort: Effort | None, given: Mapping[str, Option] | None = None) -> dict[str, Option]:
    """Returns variables of the chat template: an effort, and the switch that most templates have for it."""
    options: dict[str, Option] = {}
    if effort is not None:
        options = {"reasoning_effort": effort, "enable_thinking": effort not in ("none", "minimal")}
    return options | dict(given or {})


def warn_of_hints(
    verbosity: Verbosity | None, param: str, details: Iterable[Detail | None], warnings: list[str]
) -> None:
    """Warns of hints that change nothing.

    Args:
        verbosity: of the answer. param: its field.
        details: of the pictures.
    """
    if verbosity not in (None, "medium"):
        warnings.append(f"{param}: it changes nothing; ask for short or long answers in a message")
    if any(detail not in (None, "auto") for detail in details):
        warnings.append("detail: it changes nothing; pictures are seen as they are")
