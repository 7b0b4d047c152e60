"""Writes a dialogue with tools as fields of a chat request."""

from collections.abc import Sequence
from typing import Any

from .....lang.agents.dialogue import Dialogue
from .....lang.conversations.messages import Message
from .....lang.tool_calls import Tool, ToolCall, ToolChoice
from ..constraint_params import Fields
from ..conversation import message_text


def fields(dialogue: Dialogue, backend: str) -> Fields:
    """Returns messages, tools and the choice among them. `backend`: its name, for messages.

    Raises:
        RequestError: a text that cannot be sent.
    """
    choice = dialogue.choice
    written: Fields = {
        "messages": [_message(message, backend) for message in dialogue.messages],
        "tools": [_tool(tool) for tool in dialogue.tools],
        "tool_choice": _choice(choice),
    }
    if not choice.parallel and choice.allowed is None:  # models that call one at a time refuse the field
        written["parallel_tool_calls"] = False
    return written


def _message(message: Message, backend: str) -> Fields:
    content = message_text(message.content, backend)
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.call_id, "content": content}
    if not message.calls:
        return {"role": message.role, "content": content}
    return {"role": message.role, "content": content or None, "tool_calls": [_call(call) for call in message.calls]}


def _call(call: ToolCall) -> Fields:
    written: Fields = {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    if call.signature:  # it came from such a server, in this field
        written["extra_content"] = {"google": {"thought_signature": call.signature}}
    return written


def names_of_calls(messages: Sequence[Fields]) -> dict[str, str]:
    """Returns ids of the calls in messages → names of their tools."""
    return {call["id"]: call["function"]["name"] for each in messages for call in each.get("tool_calls") or ()}


def _tool(tool: Tool) -> Fields:
    function: dict[str, Any] = {"name": tool.name, "parameters": dict(tool.parameters)}  # Any: JSON
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | Fields:
    if choice.allowed is not None:
        return {"type": "function", "function": {"name": choice.allowed[0]}}
    return choice.mode
