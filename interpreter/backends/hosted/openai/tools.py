"""Writes a dialogue with tools as fields of a chat request."""

import json
from collections.abc import Sequence
from typing import Any

from .....lang.agents.dialogue import Dialogue
from .....lang.conversations.messages import Message
from .....lang.errors import RequestError
from .....lang.tool_calls import Tool, ToolCall, ToolChoice
from ..constraint_params import Fields, NotStrict, strict
from ..conversation import message_text
from .profiles import CallsWay


def fields(dialogue: Dialogue, backend: str, way: CallsWay) -> tuple[Fields, bool]:
    """Writes messages, tools and the choice among them.

    Args:
        dialogue: to be answered.
        backend: its name, for messages.
        way: how the server enforces calls.

    Returns:
        The fields, and whether the server enforces the calls of the answer.

    Raises:
        RequestError: a text that cannot be sent.
    """
    choice = dialogue.choice
    tools = [_tool(tool, way) for tool in dialogue.tools]
    written: Fields = {
        "messages": [_message(message, backend) for message in dialogue.messages],
        "tools": tools,
        "tool_choice": _choice(choice),
    }
    if not choice.parallel and choice.allowed is None:  # models that call one at a time refuse the field
        written["parallel_tool_calls"] = False
    functions = [each["function"] for each in tools]
    able = [each for each in functions if choice.allowed is None or each["name"] in choice.allowed]
    strictly = not choice.parallel and all(each.get("strict") for each in able)  # of several at once it may break some
    return written, way == "always" or (way == "strict" and strictly)


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


def names_of_results(messages: Sequence[Fields]) -> dict[str, str]:
    """Returns ids of the calls that messages have the results of → names of their tools.

    Raises:
        RequestError: a result without its call.
    """
    names = {call["id"]: call["function"]["name"] for each in messages for call in each.get("tool_calls") or ()}
    for each in messages:
        if each["role"] == "tool" and each["tool_call_id"] not in names:
            raise RequestError(
                f"the result of the call {each['tool_call_id']!r} has no message with this call before it; give the "
                "assistant's message that made it, too"
            )
    return names


def _tool(tool: Tool, way: CallsWay) -> Fields:
    function: dict[str, Any] = {"name": tool.name, "parameters": dict(tool.parameters)}  # Any: JSON
    if tool.description:
        function["description"] = tool.description
    if way == "strict":
        try:
            schema, wrapped = strict(json.dumps(dict(tool.parameters)))
        except NotStrict:
            return {"type": "function", "function": function}
        if not wrapped:
            function |= {"parameters": schema, "strict": True}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | Fields:
    if choice.allowed is not None:
        return {"type": "function", "function": {"name": choice.allowed[0]}}
    return choice.mode
