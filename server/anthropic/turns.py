"""Turns a body of the Anthropic dialect into messages of a conversation, and finds where its blocks stand in them.

A message of the dialect is one side's turn: results of calls are blocks of the user's, calls are blocks of the model's.
A conversation has a message for each result. Neighbouring messages of one role become one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ...lang.conversations.messages import Message
from ...lang.prompt import Media, media_of
from ...lang.tool_calls import Tool, ToolCall, ToolChoice
from ..bodies import wrong
from ..limits import check_depth, check_schema
from ..marks import TOOLS, CacheControl, Marks
from .fields import (
    Base64Source,
    ChooseAny,
    ChooseAuto,
    ChooseNone,
    ChooseTool,
    ContentBlock,
    ImageContent,
    MessageFields,
    RedactedContent,
    TextContent,
    ThinkingContent,
    ToolResultContent,
    ToolUseContent,
)

FAILED = "Error: "  # before the result of a call that failed


@dataclass(frozen=True, slots=True)
class Turns:
    """A body as a conversation.

    Attributes:
        continues: the last message is the beginning of the answer.
        marks: on tools, system and messages.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    choice: ToolChoice
    continues: bool
    marks: Marks


def read_turns(body: MessageFields) -> Turns:
    """Reads the system text, the messages and the tools of a body.

    Raises:
        HttpError: a block that does not belong to its role, a result of no call, or a picture by its URL.
        ParameterError: two tools of one name, or a choice of a tool that is none.
    """
    collector = _Collector()
    if body.system:
        collector.add_message("system", "system", body.system)
    for number, message in enumerate(body.messages):
        collector.add_message(message.role, f"messages[{number}].content", message.content)
    collector.end_message()
    tools = _tools(body)
    for number, tool in enumerate(body.tools or ()):
        collector.marks.add((TOOLS, number), tool.cache_control)
    continues = body.messages[-1].role == "assistant"
    if continues and collector.messages[-1].calls:
        raise wrong(
            f"messages[{len(body.messages) - 1}]",
            "its calls have no results; add a user message with tool_result blocks",
        )
    if continues and body.schema is not None:
        raise wrong("output_config.format", "a begun answer cannot be held to a schema; end with a user message")
    return Turns(
        tuple(collector.messages),
        tools,
        _choice(body, tools),
        continues,
        collector.marks,
    )


class _Collector:
    """Puts blocks together to messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.marks = Marks()
        self._call_ids: set[str] = set()
        self._role = ""  # of the message that is being put together; "" between two of them
        self._content: list[str | Media] = []
        self._calls: list[ToolCall] = []
        self._thoughts: list[str] = []
        self._content_marks: list[CacheControl | None] = []  # of the content
        self._call_marks: list[CacheControl | None] = []

    def add_message(self, role: str, param: str, content: str | Sequence[ContentBlock]) -> None:
        if isinstance(content, str):
            self._turn(role)
            self._add_content(content, None)
            return
        if not content:
            raise wrong(param, "the list is empty; write a text, or at least one block")
        for index, block in enumerate(content):
            self._add(role, f"{param}[{index}]", block)

    def end_message(self) -> None:
        """Ends the message that is being put together, if there is one."""
        if not self._role:
            return
        number = len(self.messages)
        self.messages.append(
            Message(self._role, tuple(self._content), tuple(self._calls), reasoning="\n".join(self._thoughts))
        )
        marks = self._content_marks + self._call_marks
        for index, mark in enumerate(marks):
            self.marks.add((number, index), mark)
        self._role = ""
        self._content, self._calls, self._thoughts, self._content_marks, self._call_marks = [], [], [], [], []

    def _add(self, role: str, param: str, block: ContentBlock) -> None:
        wanted = _ROLES.get(type(block))
        if wanted not in (None, role):
            raise wrong(
                param, f"this block belongs into {wanted} messages; a message of the role {role} has other ones"
            )
        match block:
            case TextContent(text=text, cache_control=mark):
                self._turn(role)
                self._add_content(text, mark)
            case ImageContent(cache_control=mark):
                self._turn(role)
                self._add_content(_picture(param, block), mark)
            case ToolUseContent(id=id, name=name, cache_control=mark):
                self._turn(role)
                check_depth(f"{param}.input", block.input)
                self._calls.append(ToolCall(name, json.dumps(block.input, ensure_ascii=False), id))
                self._call_marks.append(mark)
                self._call_ids.add(id)
            case ToolResultContent():
                self._add_result(param, block)
            case ThinkingContent(thinking=text):
                self._turn(role)
                if text:  # none where it was omitted
                    self._thoughts.append(text)
            case RedactedContent():
                self._turn(role)

    def _add_result(self, param: str, block: ToolResultContent) -> None:
        if block.tool_use_id not in self._call_ids:
            raise wrong(
                f"{param}.tool_use_id", "no tool_use block before it has this id; send the message with the call"
            )
        self.end_message()
        given = (TextContent(text=block.content),) if isinstance(block.content, str) else block.content or ()
        content = [
            each.text if isinstance(each, TextContent) else _picture(f"{param}.content[{index}]", each)
            for index, each in enumerate(given)
        ]
        marks = [each.cache_control for each in given]
        if not content or (block.is_error and not isinstance(content[0], str)):
            content.insert(0, "")
            marks.insert(0, None)
        if block.is_error:
            content[0] = f"{FAILED}{content[0]}"
        marks[-1] = block.cache_control or marks[-1]
        number = len(self.messages)
        self.messages.append(Message("tool", tuple(content), call_id=block.tool_use_id))
        for index, mark in enumerate(marks):
            self.marks.add((number, index), mark)

    def _turn(self, role: str) -> None:
        if self._role != role:
            self.end_message()
            self._role = role

    def _add_content(self, content: str | Media, mark: CacheControl | None) -> None:
        self._content.append(content)
        self._content_marks.append(mark)


_ROLES = {
    ImageContent: "user",
    ToolResultContent: "user",
    ToolUseContent: "assistant",
    ThinkingContent: "assistant",
    RedactedContent: "assistant",
}


def _picture(param: str, block: ImageContent) -> Media:
    if not isinstance(block.source, Base64Source):
        raise wrong(f"{param}.source", "images are not fetched by URL; send the bytes as a source of the type base64")
    return media_of("image", block.source.data)


def _tools(body: MessageFields) -> tuple[Tool, ...]:
    for number, tool in enumerate(body.tools or ()):
        check_schema(f"tools[{number}].input_schema", tool.input_schema)
    return tuple(Tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ())


def _choice(body: MessageFields, tools: Sequence[Tool]) -> ToolChoice:
    """Returns whether and which tools are called. Without tools none is."""
    match body.tool_choice:
        case None:
            choice = ToolChoice()
        case ChooseAuto(disable_parallel_tool_use=single):
            choice = ToolChoice(parallel=not single)
        case ChooseAny(disable_parallel_tool_use=single):
            choice = ToolChoice("required", parallel=not single)
        case ChooseTool(name=name):
            choice = ToolChoice.only(name)
        case ChooseNone():
            choice = ToolChoice("none")
    choice.among(tools)
    return choice
