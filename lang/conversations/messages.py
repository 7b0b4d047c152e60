"""Messages of a conversation that is given as a whole, and the prompt that they become."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ..chat_template import ROLES, ChatTemplate
from ..errors import ParameterError, shown
from ..prompt import Generated, Media, Part
from ..tool_calls import ToolCall

Generation = bool | Literal["continue"]
Option = bool | int | float | str | None
BlockKey = tuple[int, int]  # number of the message, number of the block in it

_OPTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
_OPTION_TEXT = re.compile(r"[A-Za-z0-9_-]{0,64}", re.ASCII)
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
_MOST_OPTIONS = 16


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation that is given as a whole.

    Attributes:
        role: one of ROLES.
        content: blocks of text and media, one after the other. Text is never taken for special tokens.
        calls: of an assistant turn, after its content; their arguments are JSON objects as text.
        call_id: of a tool turn, the id of the call that it answers.
        name: of a tool turn, the tool's; of any other, the speaker's.
        reasoning: of an assistant turn. Templates that do not read `reasoning_content` leave it out.
    """

    role: str
    content: tuple[str | Generated | Media, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as a prompt.

    Attributes:
        parts: the prompt.
        ends: (message, block) → number of parts up to the block's end. The calls of a message are blocks after those of
            its content. Blocks that the template leaves out are not in it.
        tool_ends: the same for each tool; None for one that the template leaves out.
        tail: the text after the last message: the generation prompt, and the answer that is to be continued.
    """

    parts: tuple[Part, ...]
    ends: Mapping[BlockKey, int]
    tool_ends: tuple[int | None, ...]
    tail: str

    def opens(self, tags: tuple[str, str] | None) -> bool:
        """Returns whether the answer begins inside the model's reasoning: the prompt has the opening tag."""
        return tags is not None and self.tail.rfind(tags[0]) > self.tail.rfind(tags[1])


def check_messages(messages: Sequence[Message], generation: Generation) -> None:
    if not messages:
        raise ParameterError("messages: there is none; write at least one")
    for number, message in enumerate(messages):
        if message.role not in ROLES:
            raise ParameterError(
                f"messages[{number}]: unknown role {shown(message.role)}; write one of {', '.join(ROLES)}"
            )
        if message.calls and message.role != "assistant":
            raise ParameterError(f"messages[{number}]: a {message.role} message makes no tool calls")
        for call in message.calls:
            arguments_of(call)
    if generation == "continue" and (messages[-1].role != "assistant" or messages[-1].calls):
        raise ParameterError(
            'generation="continue" continues an assistant message without tool calls, and the last one is none; '
            "write generation=True"
        )


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Raises ParameterError where the arguments of a call are no JSON object. None at all are an empty one."""
    try:
        return msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        raise ParameterError(
            f"messages: the arguments of a call of {shown(call.name)} must be a JSON object as text, "
            f"got {shown(call.arguments)}"
        ) from None


def checked_options(options: Mapping[str, Option] | None, template: ChatTemplate) -> Mapping[str, Option]:
    """Returns options of one conversation. A caller may have written them, so their texts are words that cannot spell
    a special token."""
    options = options or {}
    if len(options) > _MOST_OPTIONS:
        raise ParameterError(f"options: {len(options)} are given; write at most {_MOST_OPTIONS}")
    for name, value in options.items():
        if not isinstance(name, str) or not _OPTION_NAME.fullmatch(name) or name in {*_RESERVED, *template.tokens}:
            raise ParameterError(f"options: {shown(name)} cannot be set for a conversation")
        if value is None or isinstance(value, bool | int | float):
            continue
        if not isinstance(value, str) or not _OPTION_TEXT.fullmatch(value):
            raise ParameterError(
                f"options: {name}={shown(value)}; write true, false, a number, or a word of A-Z, a-z, 0-9, _, -"
            )
    return options
