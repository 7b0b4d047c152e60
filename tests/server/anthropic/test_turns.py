"""Bodies of the Anthropic dialect as conversations."""

import base64
import hashlib
from typing import Any

import msgspec
import pytest
from umbel.lang.caching import CacheMark, Caching
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.conversations.messages import Message
from umbel.lang.errors import ParameterError
from umbel.lang.prompt import Media
from umbel.lang.tool_calls import Tool, ToolCall, ToolChoice
from umbel.server.anthropic.fields import MessagesBody
from umbel.server.anthropic.turns import Turns, read_turns
from umbel.server.errors import HttpError
from umbel.server.marks import CacheControl

CALL = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"q": "ü", "n": [1, 2.5]}}
CALLED = ToolCall("search", '{"q": "ü", "n": [1, 2.5]}', "toolu_1")
MARK = {"type": "ephemeral"}
TOOL = {"name": "search", "input_schema": {"type": "object"}, "description": "Finds."}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def result(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}


def image(data: bytes = b"pixels") -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}


def turns(*messages: tuple[str, Any], **fields: Any) -> Turns:
    spoken = [{"role": role, "content": content} for role, content in messages]
    return read_turns(msgspec.convert({"model": "m", "max_tokens": 1, "messages": spoken, **fields}, MessagesBody))


PICTURE = Media("image", hashlib.sha256(b"pixels").hexdigest(), b"pixels")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("user", "a")], [Message("user", ("a",))]),
        ([("user", [text("a"), text("b")]), ("user", "c")], [Message("user", ("a", "b", "c"))]),
        ([("user", [text("a"), image()])], [Message("user", ("a", PICTURE))]),
        (
            [("user", "a"), ("system", "be brief"), ("user", "b")],
            [Message("user", ("a",)), Message("system", ("be brief",)), Message("user", ("b",))],
        ),
        (
            [("user", "a"), ("assistant", [text("b"), CALL]), ("user", [result("c"), text("d")])],
            [
                Message("user", ("a",)),
                Message("assistant", ("b",), (CALLED,)),
                Message("tool", ("c",), call_id="toolu_1"),
                Message("user", ("d",)),
            ],
        ),
        (
            [
                ("assistant", [{"type": "thinking", "thinking": "hm", "signature": "of another"}, text("a")]),
                ("assistant", [{"type": "redacted_thinking", "data": "x"}, text("b")]),
            ],
            [Message("assistant", ("a", "b"), reasoning="hm")],
        ),
    ],
)
def test_messages_of_blocks_are_messages_of_a_conversation(
    messages: list[tuple[str, Any]], expected: list[Message]
) -> None:
    assert list(turns(*messages).messages) == expected


@pytest.mark.parametrize(
    ("given", "content"),
    [
        (result(), ("",)),
        (result([]), ("",)),
        (result("a"), ("a",)),
        (result([text("a"), image()]), ("a", PICTURE)),
        (result("a", is_error=True), ("Error: a",)),
        (result(is_error=True), ("Error: ",)),
        (result([image()], is_error=True), ("Error: ", PICTURE)),
        (result("a", is_error=False), ("a",)),
    ],
)
def test_a_result_says_whether_the_call_failed(given: dict[str, Any], content: tuple[Any, ...]) -> None:
    assert turns(("assistant", [CALL]), ("user", [given])).messages[1].content == content


def test_a_system_text_comes_first() -> None:
    assert turns(("user", "a"), system="s").messages[0] == Message("system", ("s",))
    assert turns(("user", "a"), system=[text("s"), text("t")]).messages[0] == Message("system", ("s", "t"))
    assert turns(("user", "a"), system="").messages[0].role == "user"
    assert turns(("system", "t"), ("user", "a"), system="s").messages[0] == Message("system", ("s", "t"))


def test_a_last_message_of_the_model_is_continued() -> None:
    assert not turns(("user", "a")).continues
    assert turns(("user", "a"), ("assistant", "b")).continues


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", parallel=False)),
        ({"type": "tool", "name": "search"}, ToolChoice.only("search")),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_tools_and_the_choice_among_them(given: dict[str, Any] | None, choice: ToolChoice) -> None:
    found = turns(("user", "a"), tools=[TOOL], tool_choice=given)
    assert found.tools == (Tool("search", "Finds.", {"type": "object"}),)
    assert found.choice == choice


def test_blocks_stand_in_the_order_of_the_prompt() -> None:
    found = turns(
        ("user", [text("a"), text("b", cache_control={**MARK, "ttl": "1h"})]),
        ("assistant", [text("c"), CALL | {"cache_control": MARK}, text("d")]),
        ("user", [result([text("e"), text("f")], cache_control=MARK), text("g")]),
        system=[text("s", cache_control={**MARK, "scope": "global"})],
        tools=[TOOL, TOOL | {"name": "find", "cache_control": MARK}],
    )
    five, hour = 300.0, 3_600.0
    assert tuple(found.marks.blocks) == (
        ((0, 0), five),
        ((1, 0), None),
        ((1, 1), hour),
        ((2, 0), None),
        ((2, 1), None),  # the text after the call: calls are blocks after the content
        ((2, 2), five),
        ((3, 0), None),
        ((3, 1), five),
        ((4, 0), None),
        ((-1, 0), None),
        ((-1, 1), five),
    )


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([("user", [])], {}, "messages[0].content"),
        ([("user", [CALL])], {}, "messages[0].content[0]"),
        ([("assistant", [image()])], {}, "messages[0].content[0]"),
        ([("system", [image()])], {}, "messages[0].content[0]"),
        ([("user", [text("a"), result("b")])], {}, "messages[0].content[1].tool_use_id"),
        (
            [("user", [{"type": "image", "source": {"type": "url", "url": "https://x"}}])],
            {},
            "messages[0].content[0].source",
        ),
        ([("user", "a"), ("assistant", [CALL])], {}, "messages[1]"),
        (
            [("user", "a"), ("assistant", "b")],
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format",
        ),
    ],
)
def test_what_does_not_belong_is_named(messages: list[tuple[str, Any]], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as refused:
        turns(*messages, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_choice_needs_its_tool() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "search"}):
        with pytest.raises(ParameterError):
            turns(("user", "a"), tool_choice=choice)
    nested: dict[str, Any] = {}
    for _ in range(80):
        nested = {"items": nested}
    with pytest.raises(ParameterError, match=r"tools\[0\].input_schema"):
        turns(("user", "a"), tools=[TOOL | {"input_schema": nested}])


def marks_of(*messages: tuple[str, Any], whole: CacheControl | None = None, **fields: Any) -> Caching | None:
    """The marks of a body, whose prompt has a part for each block and one between two messages."""
    found = turns(*messages, **fields)
    written = ChatTemplate("chatml").conversation(found.messages, found.tools)
    return found.marks.caching(written, 16, whole=whole)


def test_marks_stand_at_the_ends_of_their_blocks() -> None:
    question = ("user", [text("a"), text("b", cache_control={**MARK, "ttl": "1h"})])
    found = marks_of(question, ("assistant", "c"), ("user", "d"), system=[text("s", cache_control=MARK)])
    assert found == Caching((CacheMark(2, 300.0), CacheMark(5, 3600.0)), (2, 4, 5, 7, 9), minimum=16)
    assert marks_of(("user", "a")) is None


def test_a_mark_of_the_whole_body_stands_on_its_last_block() -> None:
    hour = CacheControl(type="ephemeral", ttl="1h")
    assert marks_of(("user", "a"), ("assistant", "b"), ("user", "c"), whole=hour) == Caching(
        (CacheMark(6, 3600.0),), (2, 4, 6), minimum=16
    )
    own = marks_of(("user", [text("a", cache_control=MARK)]), whole=hour)
    assert own == Caching((CacheMark(2, 300.0),), (2,), minimum=16)


def test_a_tool_is_marked_where_it_ends() -> None:
    tools = [TOOL, TOOL | {"name": "find", "cache_control": MARK}]
    found = marks_of(("user", "a"), tools=tools)
    assert found is not None
    (mark,) = found.marks
    assert found.blocks.index(mark.place) == 1
