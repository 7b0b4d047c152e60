"""Makes what a template is given of a conversation: placeholders for every text that a caller chose.

Templates compare the keywords of a schema and the types of JSON, and look up names of properties in `required`. So
keywords and types stay, and equal texts of one tool have the same placeholder. Texts are numbered in the order of
Jinja's `dictsort`, which some templates write properties in.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..errors import ParameterError
from ..templates.placeholders import json_placeholder, placeholder
from ..tool_calls import Tool, ToolCall
from .messages import BlockKey, Option, arguments_of
from .turns import TOOLS, Piece, WrittenTurn

_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_DATA = frozenset({"const", "default", "enum", "example", "examples"})
_NAMED = frozenset({"$defs", "definitions", "dependentRequired", "dependentSchemas", "patternProperties", "properties"})
_KEYWORDS = _DATA | _NAMED | {
    "$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id", "$ref", "$schema", "$vocabulary",
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "contentEncoding", "contentMediaType",
    "contentSchema", "dependencies", "deprecated", "description", "else", "exclusiveMaximum", "exclusiveMinimum",
    "format", "if", "items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains",
    "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "nullable", "oneOf", "pattern",
    "prefixItems", "propertyNames", "readOnly", "required", "strict", "then", "title", "type", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems", "writeOnly",
}  # fmt: skip

Give = Callable[[str], str]  # a caller's text → its placeholder


class ArgumentsForm(Enum):
    """The form in which a template takes the arguments of calls."""

    TEXT = "text"  # which it writes as it is, so the model reads what it wrote
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class ToolHabits:
    """Says how a template that shows tools takes earlier calls.

    Attributes:
        arguments: TEXT where both forms give the same text.
        no_content: the content of an assistant turn that has calls only.
    """

    arguments: ArgumentsForm
    no_content: str | None


NO_TOOLS = ToolHabits(ArgumentsForm.TEXT, "")


@dataclass(slots=True)
class ConversationForm:
    """A conversation as the template is given it, and the texts that its placeholders stand for.

    Attributes:
        turns: placeholder i stands for the content of turn i.
        habits: of a template that is given tools or calls.
        more: of each turn, what the template is given next to role and content.
        fillings: the texts of the placeholders after those of contents, and the block that each belongs to.
        wanted: numbers of placeholders that the template has to write, and words for them.
        rest: pieces of the last message, which is continued.
    """

    turns: list[WrittenTurn]
    generation: bool
    options: Mapping[str, Option]
    habits: ToolHabits
    more: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON
    tools: list[dict[str, Any]] = field(default_factory=list)
    fillings: list[tuple[str, BlockKey | None]] = field(default_factory=list)
    wanted: dict[int, str] = field(default_factory=dict)
    rest: list[Piece] = field(default_factory=list)

    def number(self, text: str, block: BlockKey | None = None, wanted: str = "") -> int:
        """Returns the number of a new placeholder for a text."""
        number = len(self.turns) + len(self.fillings)
        self.fillings.append((text, block))
        if wanted:
            self.wanted[number] = wanted
        return number

    def messages(self, *, spaced: bool) -> list[dict[str, Any]]:
        """Returns the turns for the template; with the white space around their contents if `spaced`."""
        messages = []
        for number, (turn, more) in enumerate(zip(self.turns, self.more, strict=True)):
            content: str | None = turn.space
            if content is None:
                before, after = turn.around if spaced else ("", "")
                content = before + placeholder(number) + after
            elif not content and turn.calls:
                content = self.habits.no_content
            messages.append({"role": turn.role, "content": content, **more})
        return messages

    @property
    def has_space(self) -> bool:
        return any(turn.space is None and turn.around != ("", "") for turn in self.turns)


def form_of(
    turns: list[WrittenTurn],
    tools: Sequence[Tool],
    generation: bool,
    options: Mapping[str, Option],
    habits: ToolHabits,
) -> ConversationForm:
    """Returns what the template is given of these turns, and of tools in its own way.

    Raises:
        ParameterError: arguments of a call are no JSON object, or a schema is nested too deeply.
    """
    form = ConversationForm(turns, generation, options, habits)
    for number, turn in enumerate(turns):
        if turn.space is None:
            form.wanted[number] = f"turn {number} ({turn.role})"
    form.more.extend(_more(turn, form) for turn in turns)
    for index, tool in enumerate(tools):
        first = len(turns) + len(form.fillings)
        outline, texts = outline_of(tool, first)
        form.tools.append(outline)
        form.fillings.extend((text, (TOOLS, index)) for text in texts)
        form.wanted[first + texts.index(tool.name)] = f"the tool {tool.name}"
    return form


def _more(turn: WrittenTurn, form: ConversationForm) -> dict[str, Any]:  # Any: JSON
    """Returns what the template is given of a turn next to its role and content."""
    more: dict[str, Any] = {}
    if turn.reasoning:
        more["reasoning_content"] = placeholder(form.number(turn.reasoning))
    if turn.calls:
        more["tool_calls"] = [_call(call, index, turn, form) for index, call in enumerate(turn.calls)]
    if turn.call_id:
        more["tool_call_id"] = placeholder(form.number(turn.call_id))
    if turn.name:
        more["name"] = placeholder(form.number(turn.name))
    return more


def _call(call: ToolCall, index: int, turn: WrittenTurn, form: ConversationForm) -> dict[str, Any]:
    assert turn.number is not None, "calls are those of a message"
    content = sum(block is not None for _, block in turn.pieces)
    block = (turn.number, content + index)
    words = f"call {index} of turn {turn.number}"

    def give(text: str) -> str:
        return placeholder(form.number(text, block, words))

    name = give(call.name)
    arguments: Any = None
    if form.habits.arguments is ArgumentsForm.OBJECT:
        arguments = outline_of_data(arguments_of(call), give)
    else:
        arguments = json_placeholder(form.number(call.arguments or "{}", block, words))
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": placeholder(form.number(call.id)), **made} if call.id else made


# ---------------------------------------------------------------------------- tools


def outline_of(tool: Tool, first: int) -> tuple[dict[str, Any], list[str]]:  # Any: JSON
    """Returns a tool as templates take it, and its texts, whose placeholders are numbered from `first` on.

    Raises:
        ParameterError: the schema is nested too deeply.
    """
    texts = set[str]()

    def collect(text: str) -> str:
        texts.add(text)
        return text

    try:
        _function(tool, collect)
        ordered = sorted(texts, key=lambda text: (text.lower(), text))
        numbers = {text: placeholder(number) for number, text in enumerate(ordered, first)}
        return _function(tool, numbers.__getitem__), ordered
    except RecursionError:
        raise ParameterError(
            f"tool {tool.name}: the parameters are nested too deeply; write a flatter schema"
        ) from None


def outline_of_data(value: Any, give: Give) -> Any:  # Any: JSON
    """Returns JSON with placeholders for all of its strings and keys."""
    match value:
        case Mapping():
            return {give(str(key)): outline_of_data(item, give) for key, item in value.items()}
        case list() | tuple():
            return [outline_of_data(item, give) for item in value]
        case str() if value:  # templates ask whether there is any text
            return give(value)
        case _:
            return value


def length_of_rest(tool: Mapping[str, Any], gap: str) -> int:
    """Returns the length of what still belongs to a tool in the scaffolding after its last placeholder: numbers and
    brackets; 0 where the template writes tools in its own way. White space between them does not count."""
    for whole in (tool, tool["function"]):
        rest = "".join(json.dumps(whole, ensure_ascii=False).rpartition("\ue001")[2].split())
        position = 0
        for character in gap:
            if not rest:
                return position
            if character == rest[0]:
                rest = rest[1:]
            elif not character.isspace():
                break
            position += 1
        if not rest:
            return position
    return 0


def _function(tool: Tool, give: Give) -> dict[str, Any]:
    description = give(tool.description) if tool.description else ""
    parameters = _schema(tool.parameters, give)
    return {
        "type": "function",
        "function": {"name": give(tool.name), "description": description, "parameters": parameters},
    }


def _schema(value: Any, give: Give) -> Any:
    match value:
        case Mapping():
            return {
                key if key in _KEYWORDS else give(str(key)): _of_keyword(key, item, give) for key, item in value.items()
            }
        case list() | tuple():
            return [_schema(item, give) for item in value]
        case _:
            return outline_of_data(value, give)


def _of_keyword(keyword: str, value: Any, give: Give) -> Any:
    if keyword == "type":
        if isinstance(value, str) and value in _TYPES:
            return value
        if isinstance(value, list) and all(isinstance(kind, str) and kind in _TYPES for kind in value):
            return value
    if keyword in _DATA:
        return outline_of_data(value, give)
    if keyword in _NAMED and isinstance(value, Mapping):
        return {give(str(name)): _schema(item, give) for name, item in value.items()}
    return _schema(value, give)
