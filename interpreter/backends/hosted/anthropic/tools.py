"""Writes a dialogue with tools as the blocks and the fields of a Messages request."""

from typing import Any

from .....lang.agents.dialogue import Dialogue
from .....lang.conversations.messages import Message
from .....lang.tool_calls import Tool, ToolCall, ToolChoice
from ..conversation import message_text
from ..places import Block, ToolResult


def fields(dialogue: Dialogue) -> dict[str, Any]:  # Any: JSON
    """Returns `tools` and `tool_choice`."""
    return {"tools": [_tool(tool) for tool in dialogue.tools], "tool_choice": _choice(dialogue.choice)}


def _tool(tool: Tool) -> dict[str, Any]:
    written = {"name": tool.name, "input_schema": dict(tool.parameters)}
    return written | ({"description": tool.description} if tool.description else {})


def _choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.mode == "none":
        return {"type": "none"}
    if choice.allowed is not None:
        written: dict[str, Any] = {"type": "tool", "name": choice.allowed[0]}
    else:
        written = {"type": "any" if choice.mode == "required" else "auto"}
    return written if choice.parallel else {**written, "disable_parallel_tool_use": True}


def blocks(dialogue: Dialogue, backend: str) -> list[Block]:
    """Returns the blocks of all turns, those of the system first. Blank texts, which it refuses, are left out.

    Args:
        backend: its name, for messages.

    Raises:
        RequestError: a text that cannot be sent.
    """
    system: list[Block] = []
    others: list[Block] = []
    for message in dialogue.messages:
        is_system = message.role in ("system", "developer")
        role = "system" if is_system else "assistant" if message.role == "assistant" else "user"
        contents = _contents(message, backend)
        for number, content in enumerate(contents):
            block = Block(role, content, opens=number == 0, closes=number == len(contents) - 1)
            (system if is_system else others).append(block)
    return system + others


def _contents(message: Message, backend: str) -> list[str | ToolCall | ToolResult]:
    text = message_text(message.content, backend)
    if message.role == "tool":
        return [ToolResult(message.call_id, text)]
    return [*([text] if text.strip() else []), *message.calls]
