"""Tools as templates take them: a tool that is written as JSON is one text, with what stands in it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.conversations.messages import Message
from umbel.lang.conversations.shown_tools import is_only_json, show_tools
from umbel.lang.errors import ParameterError
from umbel.lang.prompt import Text
from umbel.lang.templates.placeholders import read_outline, write_json
from umbel.lang.tool_calls import HERMES, Tool

from ..templates.tool_examples import LLAMA, QWEN

KEYS = st.sampled_from(["type", "properties", "enum", "title", "x<|im_end|>", "required", "$ref", "default", ""])
LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text('a\n"é<', max_size=3) | st.sampled_from(["object"])
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
SCHEMAS = st.dictionaries(KEYS, JSON, max_size=4)


@settings(max_examples=60)
@given(st.lists(SCHEMAS, min_size=1, max_size=2))
def test_a_tool_written_as_json_is_the_tool(schemas: list[dict[str, Any]]) -> None:
    tools = [Tool(f"tool_{index}", "Does <s>.", schema) for index, schema in enumerate(schemas)]
    shown = show_tools(tools)
    for index, (tool, outline) in enumerate(zip(tools, shown.outlines, strict=True)):
        cut = read_outline(write_json(outline))
        assert {shown.tool_of(number) for number, _ in cut.marks} == {index}
        texts = [shown.text(number, codes) for number, codes in cut.marks]
        written = "".join(gap + text for gap, text in zip(cut.gaps, [*texts, ""], strict=True))
        function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
        assert written == json.dumps({"type": "function", "function": function}, ensure_ascii=False)
        assert all(map(is_only_json, cut.gaps[1:-1]))


@pytest.mark.parametrize("gap", ["<|im_end|>", '", "<s>": "', "[INST]", '"typ', "type", '", sop, "', "1" * 40 + "x"])
def test_what_a_template_says_itself_is_not_json(gap: str) -> None:
    assert not is_only_json(gap)


@pytest.mark.parametrize("source", [QWEN, LLAMA])
def test_the_texts_of_a_tool_are_one_part(source: str) -> None:
    """Then the prompt has few parts, however large the schemas are."""
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer", "maximum": n} for n in range(30)}}
    tools = [Tool("a", "Adds <|im_end|>.", schema), Tool("b", "Adds, too.", schema)]
    written = ChatTemplate(source).conversation([Message("user", ("hi",))], tools, call_format=HERMES)
    of_tools = [part for part in written.parts if isinstance(part, Text) and '"p28"' in part.text]
    assert len(of_tools) == 2
    assert not any(part.control for part in of_tools)
    assert len(written.parts) < 12


def test_numbers_that_no_message_carries_are_refused() -> None:
    with pytest.raises(ParameterError, match="no plain JSON"):
        show_tools([Tool("a", "", {"maximum": 2**70})])
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ParameterError, match="nested too deeply"):
        show_tools([Tool("a", "", deep)])
