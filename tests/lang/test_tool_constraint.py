"""The source of constraints on tool calls: what it holds, and what is refused."""

import json
from typing import Any

import pytest
from umbel.lang.errors import ConstraintError, ParameterError
from umbel.lang.protocol import ConstraintSpec
from umbel.lang.tool_calls import FENCED, HERMES, LLAMA_3, Tool, ToolChoice
from umbel.lang.tool_constraint import MOST_TOOL_BYTES, Thinking, read_tool_grammar, tools_constraint

SEARCH = Tool("search", "Finds pages.", {"type": "object", "properties": {"q": {"type": "string"}}})


def source(*tools: Tool, **options: Any) -> Any:  # Any: JSON, and options of the constraint
    return json.loads(tools_constraint(tools, options.pop("choice", ToolChoice()), HERMES, **options).source)


def test_the_source_holds_the_tools_that_may_be_called() -> None:
    choice = ToolChoice("required", ("search",), parallel=False)
    assert source(Tool("other"), SEARCH, choice=choice, thinking=Thinking("<think>", "</think>", True)) == {
        "format": "hermes",
        "tools": [{"name": "search", "schema": SEARCH.parameters}],
        "choice": "required",
        "parallel": False,
        "thinking": {"open": "<think>", "close": "</think>", "begun": True},
    }


def test_what_is_written_is_read() -> None:
    spec = tools_constraint([SEARCH], ToolChoice("none"), LLAMA_3, answer={"type": "integer"})
    grammar = read_tool_grammar(spec.source)
    assert (grammar.call_format, grammar.choice, grammar.thinking) == (LLAMA_3, "none", None)
    assert grammar.answer is not None
    assert json.loads(bytes(grammar.answer.schema)) == {"type": "integer"}


def test_annotations_are_left_out_and_properties_called_like_them_stay() -> None:
    schema = {
        "title": "Arguments",
        "properties": {
            "description": {"type": "string", "description": "a property", "default": "x"},
            "title": {"anyOf": [{"const": {"title": 1}, "title": "kept as a value"}, {"enum": [{"default": 1}]}]},
        },
        "$defs": {"examples": {"items": {"examples": [1], "type": "null"}}},
        "additionalProperties": {"$comment": "no", "type": "integer"},
    }
    (tool,) = source(Tool("f", "", schema))["tools"]
    assert tool["schema"] == {
        "properties": {
            "description": {"type": "string"},
            "title": {"anyOf": [{"const": {"title": 1}}, {"enum": [{"default": 1}]}]},
        },
        "$defs": {"examples": {"items": {"type": "null"}}},
        "additionalProperties": {"type": "integer"},
        "type": "object",
    }


@pytest.mark.parametrize(
    ("tools", "options", "words"),
    [
        ([], {}, "at least one"),
        ([Tool("f", "", {"type": "string"})], {}, "tools: f: the arguments are one JSON object"),
        ([Tool("f", "", {"type": ["string", "null"]})], {}, "tools: f: the arguments are one JSON object"),
        ([Tool("f", "", {"enum": [float("nan")]})], {}, "tools: f: .* cannot be written as JSON"),
        ([Tool(f"f{n}", "", {"enum": ["x" * 1000]}) for n in range(70)], {}, "give fewer tools"),
        ([SEARCH], {"call_format": LLAMA_3, "answer": True}, "without a mark"),
    ],
)
def test_what_cannot_be_enforced_is_refused(tools: list[Tool], options: dict[str, Any], words: str) -> None:
    call_format = options.pop("call_format", FENCED)
    with pytest.raises((ParameterError, ConstraintError), match=words):
        tools_constraint(tools, ToolChoice(), call_format, **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "tools: "),
        ('{"format": "hermes", "tools": []}', "there is none to call"),
        ('{"format": "hermes", "tools": [{"name": "f", "schema": {}}], "mode": "auto"}', "mode"),
        ('{"format": "other", "tools": [{"name": "f", "schema": {}}]}', "'other' is not known"),
        ('{"format": "hermes", "tools": [{"name": "f\\"", "schema": {}}]}', "is not allowed"),
        ('{"format": "hermes", "tools": [{"name": "f", "schema": {}}, {"name": "f", "schema": {}}]}', "one name"),
        ('{"format": "hermes", "tools": [{"name": "f", "schema": {}}], "choice": "maybe"}', "choice"),
        (json.dumps({"format": "x" * MOST_TOOL_BYTES}), "bytes"),
        ("[" * 10_000, "tools: "),
    ],
)
def test_a_source_of_another_shape_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConstraintError, match=words):
        read_tool_grammar(ConstraintSpec("tools", text).source)
