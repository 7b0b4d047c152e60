"""Calls of tools in generated text: the same, however the text is cut into pieces."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter.tool_reader import (
    ArgumentsPiece,
    CallBegins,
    CallEnds,
    CallEvent,
    ReadAnswer,
    ToolCallReader,
    gathered,
    read_answer,
)
from umbel.lang.tool_calls import FENCED, FORMATS, HERMES, LLAMA_3, MISTRAL, CallFormat, ToolCall

NAMES = ("get", "get_weather", "b-2")
ONE = ToolCall("get_weather", '{"city": "Rome }]</tool_call> \\"```", "n": [{"a": {}}, 1.5]}')
TWO = ToolCall("get", "{}")


def streamed(call_format: CallFormat, pieces: Sequence[str]) -> list[CallEvent]:
    reader = ToolCallReader(call_format, NAMES)
    events = [event for piece in pieces for event in reader.feed(piece)]
    return [*events, *reader.finish()]


@pytest.mark.parametrize("call_format", FORMATS.values(), ids=lambda each: each.name)
def test_what_is_spelled_is_read(call_format: CallFormat) -> None:
    calls = (ONE, TWO) if call_format.parallel else (ONE,)
    assert read_answer(call_format, NAMES, call_format.spell(calls)) == ReadAnswer("", calls, cut=False)
    before = "I look it up." if call_format.has_mark else ""
    for newlines in ("", "\n", "\n\n"):
        after = "\n" if call_format.has_mark else ""
        read = read_answer(call_format, NAMES, before + newlines + call_format.spell(calls) + after)
        assert read == ReadAnswer(before, calls, cut=False)


def test_events_come_as_soon_as_they_are_certain() -> None:
    text = "Let me see.\n" + HERMES.spell([ONE, TWO])
    reader = ToolCallReader(HERMES, NAMES)
    seen = [(event, length) for length, letter in enumerate(text, 1) for event in reader.feed(letter)]
    begins = [(event, length) for event, length in seen if isinstance(event, CallBegins)]
    header = 'get_weather", "arguments": {'
    assert begins[0] == (CallBegins(0, "get_weather"), text.index(header) + len(header))
    arguments = [length for event, length in seen if event == ArgumentsPiece(0, "R")]
    assert arguments == [text.index("Rome") + 1]  # no character of arguments is held back
    assert [event for event, _ in seen if isinstance(event, CallEnds)] == [CallEnds(0), CallEnds(1)]


@pytest.mark.parametrize("call_format", [HERMES, FENCED, MISTRAL], ids=lambda each: each.name)
@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        "a < b, \n\n\n<tool, ```python\nprint([TOOL_CALLS])\n```\n",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '```tool_call\n{"name": "get", "arguments": []}\n```',
        '[TOOL_CALLS] [{"name": "get" }]',
        '{"name": "get", "arguments": {}}',
        "ends like a mark: <tool_ca",
        "\n\n",
    ],
)
def test_text_that_resembles_a_call_is_content(call_format: CallFormat, text: str) -> None:
    assert read_answer(call_format, NAMES, text) == ReadAnswer(text, (), cut=False)


def test_without_a_mark_a_call_is_the_whole_answer() -> None:
    spelled = LLAMA_3.spell([ONE])
    assert read_answer(LLAMA_3, NAMES, "\n\n" + spelled).calls == (ONE,)
    others = ("x" + spelled, "\n\n\n" + spelled, " " + spelled, spelled.replace("get_weather", "got"))
    for text in (*others, spelled[:12]):
        assert read_answer(LLAMA_3, NAMES, text) == ReadAnswer(text, (), cut=False)


def test_arguments_that_were_cut_are_reported() -> None:
    whole = "Hm. " + HERMES.spell([TWO, ONE])
    begun = whole.index(ONE.arguments)
    for length in range(begun + 1, begun + len(ONE.arguments)):
        read = read_answer(HERMES, NAMES, whole[:length])
        assert read.cut
        assert read.calls == (TWO, ToolCall(ONE.name, ONE.arguments[: length - begun]))
    assert not read_answer(HERMES, NAMES, whole[: begun + len(ONE.arguments)]).cut
    mark = whole.rindex("<tool_call>")  # a call of which not even the name is known
    assert read_answer(HERMES, NAMES, whole[: mark + 20]) == ReadAnswer("Hm. ", (TWO,), cut=False)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.text('a"\\{}[]<>`\n', max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text('k{"', max_size=2), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.builds(
    lambda name, value: ToolCall(name, json.dumps({"v": value})), st.sampled_from((*NAMES, "unknown")), VALUES
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[CallFormat, str, list[str]]:
    """A format, a text with calls, parts of calls and text that looks like them, and the same text in pieces."""
    call_format = draw(st.sampled_from(list(FORMATS.values())))
    spelled = st.lists(CALLS, min_size=1, max_size=3).map(call_format.spell)
    marks = [call_format.mark, "\n", "\n\n", "<tool_call>\n", "}", '{"name": "get', "```", "[TOOL_CALLS] [", "<", "é"]
    fragment = st.one_of(st.sampled_from(marks), spelled, spelled.map(lambda text: text[: len(text) // 2]))
    text = "".join(draw(st.lists(fragment, max_size=6)))
    text = text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return call_format, text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=60)
@given(answers())
def test_the_pieces_of_a_text_do_not_matter(answer: tuple[CallFormat, str, list[str]]) -> None:
    call_format, text, pieces = answer
    whole = streamed(call_format, [text])
    for chopped in (pieces, list(text)):
        events = streamed(call_format, chopped)
        assert gathered(events) == gathered(whole) == read_answer(call_format, NAMES, text)
        kinds = [event for event in events if isinstance(event, CallBegins | CallEnds)]
        assert kinds == [event for event in whole if isinstance(event, CallBegins | CallEnds)]


@settings(max_examples=25)
@given(answers())
def test_no_more_is_held_back_than_the_beginning_of_a_call(answer: tuple[CallFormat, str, list[str]]) -> None:
    call_format, text, _ = answer
    longest = (
        2
        + len(call_format.after_arguments + call_format.between + call_format.open)
        + len(call_format.header("get_weather") + "{")
    )
    reader = ToolCallReader(call_format, NAMES)
    for letter in text:
        reader.feed(letter)
        assert len(reader._held) < longest


@settings(max_examples=25)
@given(answers())
def test_text_without_the_beginning_of_a_call_is_not_changed(answer: tuple[CallFormat, str, list[str]]) -> None:
    call_format, text, _ = answer
    text = text.replace("name", "nume").replace(call_format.mark or "{", "·")
    assert read_answer(call_format, NAMES, text) == ReadAnswer(text, (), cut=False)
