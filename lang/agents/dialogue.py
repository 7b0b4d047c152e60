"""A conversation with tools as data, for providers that have fields of their own for tools, calls and results.

    user ─▶ assistant with calls ─▶ tool, tool (one result for each call) ─▶ assistant
            Message.calls           Message.call_id

Such a request has the same conversation as a prompt too, with tools and calls as text: budgets count it, journals find
answers by it, and the view shows it. The answer's calls are in `Completion.calls`, and at the end of its text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..conversations.messages import Message
from ..protocol import GenRequest
from ..tool_calls import FENCED, Tool, ToolCall, ToolChoice


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation that a model is to answer, in text or with calls.

    Attributes:
        messages: turns of text; those of the role "tool" answer calls of the assistant turn before them.
        tools: all that were shown.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    choice: ToolChoice


class DialogueRequest(GenRequest, frozen=True, kw_only=True):
    """Asks for the answer of a dialogue. Sent to backends with the capability `tools`, which are never on a wire."""

    dialogue: Dialogue


def dialogue_of(request: GenRequest) -> Dialogue | None:
    """Returns the dialogue of a request; None for one of a plain prompt."""
    return request.dialogue if isinstance(request, DialogueRequest) else None


def with_calls(content: str, calls: Sequence[ToolCall]) -> str:
    """Returns the text of an answer: its content, and its calls in our fence."""
    return "\n".join(filter(None, (content, FENCED.spell(calls))))


def without_calls(text: str, calls: Sequence[ToolCall]) -> str:
    """Returns the content of an answer of `with_calls`."""
    return text.removesuffix(FENCED.spell(calls)).removesuffix("\n") if calls else text


def with_dialogue(request: GenRequest, dialogue: Dialogue | None) -> GenRequest:
    """Returns the request with a dialogue; without one, as it is."""
    if dialogue is None:
        return request
    given = {name: getattr(request, name) for name in request.__struct_fields__}
    return DialogueRequest(**given, dialogue=dialogue)
