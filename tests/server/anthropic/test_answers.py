"""Blocks of an answer: events of a stream, and the content that they add up to."""

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from jiter import from_json
from umbel.server.anthropic.answers import AnswerBlocks, Event
from umbel.server.conversation import complete_members

CALLS = {"name": "search", "input": {"q": "umbel"}}
JSON = '{"a": "x\\u00e9\\"{,", "b": [1, -2.5e3, {"c": true, "d": null}], "e": {}, "f": "z", "g": [[], [{}]] }'


def added(events: list[Event]) -> list[dict[str, Any]]:
    """The content of a stream, put together as clients do."""
    content: list[dict[str, Any]] = []
    open_block = False
    for event in json.loads(msgspec.json.encode(events)):
        match event["type"]:
            case "content_block_start":
                assert not open_block
                assert event["index"] == len(content)
                content.append(event["content_block"])
                open_block, arguments = True, ""
            case "content_block_delta":
                assert open_block
                assert event["index"] == len(content) - 1
                delta, block = event["delta"], content[-1]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        arguments += delta["partial_json"]
                        block["input"] = from_json(arguments.encode(), partial_mode=True)
            case "content_block_stop":
                assert open_block
                assert event["index"] == len(content) - 1
                open_block = False
    assert not open_block
    return content


def whole(blocks: AnswerBlocks) -> list[dict[str, Any]]:
    return json.loads(msgspec.json.encode(blocks.content))


def test_pieces_of_all_kinds_are_blocks_one_after_the_other() -> None:
    blocks = AnswerBlocks(lambda text: f"signed {text}", "toolu_1")
    events = [
        *blocks.think("a "),
        *blocks.think("thought"),
        *blocks.say("an "),
        *blocks.say("answer"),
        *blocks.begin_call("search"),
        *blocks.add_arguments('{"q": '),
        *blocks.add_arguments('"umbel"}'),
        *blocks.begin_call("search"),
        *blocks.add_arguments("{}"),
        *blocks.say("more"),
        *blocks.end(),
    ]
    assert blocks.end() == []
    assert whole(blocks) == [
        {"type": "thinking", "thinking": "a thought", "signature": "signed a thought"},
        {"type": "text", "text": "an answer", "citations": None},
        {"type": "tool_use", "id": "toolu_1_0", "caller": {"type": "direct"}, **CALLS},
        {"type": "tool_use", "id": "toolu_1_1", "caller": {"type": "direct"}, "name": "search", "input": {}},
        {"type": "text", "text": "more", "citations": None},
    ]
    assert added(events) == whole(blocks)


def test_thinking_that_is_omitted_keeps_its_signature() -> None:
    blocks = AnswerBlocks(lambda text: f"signed {text}", "toolu_1", shows_thinking=False)
    events = [*blocks.think("a thought"), *blocks.end()]
    assert added(events) == whole(blocks) == [{"type": "thinking", "thinking": "", "signature": "signed a thought"}]
    assert "a thought" not in [event.get("delta", {}).get("thinking") for event in events]


def test_a_call_that_is_cut_has_the_members_that_were_complete() -> None:
    blocks = AnswerBlocks(str, "toolu_1")
    events = [*blocks.begin_call("search"), *blocks.add_arguments('{"q": "umbel", "in": ["a", "b'), *blocks.end()]
    assert added(events) == whole(blocks)
    assert whole(blocks)[0]["input"] == {"q": "umbel", "in": ["a"]}


def test_every_cut_of_an_object_reads_as_clients_read_it() -> None:
    assert complete_members(JSON) == json.loads(JSON)
    for end in range(1, len(JSON)):
        assert complete_members(JSON[:end]) == from_json(JSON[:end].encode(), partial_mode=True), JSON[:end]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=2), VALUES, max_size=3), st.data())
def test_any_cut_of_any_object_is_read(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    end = data.draw(st.integers(1, len(text)))
    assert complete_members(text[:end]) == from_json(text[:end].encode(), partial_mode=True)
