"""Makes what a template is given of a conversation: placeholders for every text that a caller chose."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..templates.placeholders import json_placeholder, placeholder
from ..tool_calls import ToolCall
from .messages import BlockKey, Option, arguments_of
from .shown_tools import FIRST_TEXT, NO_SHOWN_TOOLS, ShownTools, outline_of_data
from .turns import Piece, WrittenTurn


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
    tools: ShownTools = NO_SHOWN_TOOLS
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
    tools: ShownTools,
    generation: bool,
    options: Mapping[str, Option],
    habits: ToolHabits,
) -> ConversationForm:
    """Returns what the template is given of these turns, and of tools in its own way.

    Raises:
        ParameterError: arguments of a call are no JSON object, or a schema is nested too deeply.
    """
    form = ConversationForm(turns, generation, options, habits, tools=tools)
    for number, turn in enumerate(turns):
        if turn.space is None:
            form.wanted[number] = f"turn {number} ({turn.role})"
    form.more.extend(_more(turn, form) for turn in turns)
    for index, number in enumerate(tools.names):
        form.wanted[number] = f"tool {index} ({tools.texts[number - FIRST_TEXT][0]})"
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
