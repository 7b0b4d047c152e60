"""Tools, choices of tools, and the spelling of calls."""

import json

import pytest
from umbel.lang.errors import ParameterError
from umbel.lang.tool_calls import (
    FENCED,
    FORMATS,
    HERMES,
    LLAMA_3,
    MISTRAL,
    CallFormat,
    Tool,
    ToolCall,
    ToolChoice,
    call_format_of,
)

# The lines of published templates that write calls.
QWEN_3 = """
{{- "For each function call, return:\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call>" }}
{{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}"""
QWEN_3_CODER = "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }} \"name\" \"arguments\""
GLM = '{{- \'<tool_call>\' + tool_call.name }}<arg_key>{{ k }}</arg_key> "name" "arguments"'
LLAMA_3_1 = """
{%- if message.tool_calls | length != 1 %}{{- raise_exception("only single tool-calls") }}{%- endif %}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}"""
MISTRAL_3 = """{{- "[TOOL_CALLS] [" }}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}{{- ', "id": "' }}"""
MISTRAL_11 = """{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}"""
GEMMA_3 = "{{ '<start_of_turn>' + role + '\\n' + content | trim + '<end_of_turn>\\n' }}"


@pytest.mark.parametrize(
    ("source", "control", "expected"),
    [
        (QWEN_3, (), HERMES),
        (QWEN_3, ("<|im_end|>", ""), HERMES),
        (QWEN_3, ("<tool_call>",), FENCED),
        (QWEN_3, ("</tool_call>",), FENCED),
        (QWEN_3_CODER, (), FENCED),
        (GLM, (), FENCED),
        (LLAMA_3_1, ("<|python_tag|>",), LLAMA_3),
        (MISTRAL_3, (), MISTRAL),
        (MISTRAL_3, ("[TOOL_CALLS]",), FENCED),
        (MISTRAL_11, (), FENCED),
        (GEMMA_3, (), FENCED),
        (None, (), FENCED),
    ],
)
def test_the_format_is_read_off_the_template(
    source: str | None, control: tuple[str, ...], expected: CallFormat
) -> None:
    assert call_format_of(source, control) is expected


def test_calls_are_spelled_as_the_models_were_taught() -> None:
    one, two = ToolCall("a", '{"x": 1}'), ToolCall("b", "{}", id="call_1")
    assert HERMES.spell([one, two]) == (
        '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
    )
    assert LLAMA_3.spell([one]) == '{"name": "a", "parameters": {"x": 1}}'
    assert MISTRAL.spell([one, two]) == (
        '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]'
    )
    assert FENCED.spell([one]) == '```tool_call\n{"name": "a", "arguments": {"x": 1}}\n```'
    assert [form.spell([]) for form in FORMATS.values()] == ["", "", "", ""]


def test_instructions_show_each_tool_and_the_spelling() -> None:
    tools = [Tool("a", "Adds. Ünïcode.", {"type": "object", "properties": {"x": {"type": "integer"}}}), Tool("b")]
    text = FENCED.instructions(tools)
    shown = [
        json.loads(line) for line in text.splitlines() if line.startswith('{"name": "') and "tool_name" not in line
    ]
    assert shown == [
        {"name": "a", "description": "Adds. Ünïcode.", "parameters": dict(tools[0].parameters)},
        {"name": "b", "parameters": {"type": "object", "properties": {}}},
    ]
    assert FENCED.spell([ToolCall("tool_name", "{...}")]) in text


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "ä", "a\n", None, "<tool_call>"])
def test_a_name_of_other_characters_is_refused(name: str) -> None:
    with pytest.raises(ParameterError, match="write 1 to 64 of"):
        Tool(name)


def test_a_wrong_tool_is_refused_without_the_methods_of_its_name() -> None:
    class Unshown(str):
        __format__ = __str__ = __repr__ = None  # type: ignore[assignment]

    with pytest.raises(ParameterError, match="tool look: description must be a string, got 3"):
        Tool(Unshown("look"), 3)  # type: ignore[arg-type]


def test_a_choice_picks_among_the_tools() -> None:
    tools = [Tool("a"), Tool("b"), Tool("c")]
    assert [tool.name for tool in ToolChoice(allowed=("c", "a")).among(tools)] == ["a", "c"]
    assert ToolChoice().among(tools) == tuple(tools)
    assert ToolChoice.only("b") == ToolChoice("required", ("b",), parallel=False)
    for choice, given, words in (
        (ToolChoice.only("d"), tools, "'d' is no tool of this request"),
        (ToolChoice(), [Tool("a"), Tool("a")], "tools: two are called a"),
        (ToolChoice("required"), [], "the request has no tools"),
        (ToolChoice(), [Tool(f"t{n}") for n in range(129)], "at most 128"),
    ):
        with pytest.raises(ParameterError, match=words):
            choice.among(given)
    with pytest.raises(ParameterError, match="allows no tool"):
        ToolChoice(allowed=())
