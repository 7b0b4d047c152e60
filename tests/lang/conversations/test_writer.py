"""Whole conversations equal the template on the whole of them, whatever is said in them."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter.position import Position
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.conversations import writer
from umbel.lang.conversations.messages import Conversation, Message
from umbel.lang.errors import ParameterError, TemplateError
from umbel.lang.prompt import Generated, Media, Part, Text
from umbel.lang.tool_calls import FENCED, HERMES, Tool, ToolCall
from umbel.srt.tokenizer.prompt import PromptEncoder
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..templates.examples import CHATML, FAMILIES, GEMMA3, QWEN3, Family
from ..templates.tool_examples import DEEPSEEK, LLAMA, QWEN, TAGS, TOOL_FAMILIES, ToolFamily

TOOLS = [
    Tool(
        "get_weather",
        'Says how "warm" it is.\nAnd how wet.',
        {
            "type": "object",
            "properties": {
                "when": {"type": ["string", "null"], "enum": ["now", "à l'aube"], "default": "now"},
                "City": {"type": "string", "title": "Where", "description": "A city", "examples": ["Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 5},
            },
            "required": ["City"],
        },
    ),
    Tool("stop", "", {"type": "object", "properties": {"n": {"type": "number", "minimum": 0.5}}}),
]
CALL = ToolCall("get_weather", '{"City": "Paris", "when": "à l\'aube", "days": 2}', "call00001")
SECOND = ToolCall("stop", "{}", "call00002")
IMAGE = Media("image", "0" * 64, b"")


def template(family: Family | ToolFamily) -> ChatTemplate:
    options = family.options if isinstance(family, Family) else None
    return ChatTemplate(family.source, tokens=family.tokens, options=options, name=family.name)


def talk(*contents: str, system: bool) -> list[Message]:
    """A system turn if there may be one, then user and assistant in turn."""
    roles = itertools.chain(["system"] * system, itertools.cycle(["user", "assistant"]))
    return [Message(role, (content,)) for role, content in zip(roles, contents, strict=False)]


def with_tools(family: ToolFamily) -> list[Message]:
    calls = (CALL, SECOND) if family.parallel else (CALL,)
    results = [Message("tool", (f'{{"of": "{call.name}"}}',), call_id=call.id, name=call.name) for call in calls]
    start = talk("Be brief.", "Weather?", system=True) if family.system else talk("Weather?", system=False)
    return [*start, Message("assistant", calls=calls), *results]


def text_of(parts: Sequence[Part]) -> str:
    return "".join(f"<{part.kind}>" if isinstance(part, Media) else part.text for part in parts)


def joined(parts: Sequence[Part]) -> list[Part]:
    """Parts, with neighbours of one kind as one: where they are cut makes no difference to their tokens."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, Text) and isinstance(last, Text) and last.control == part.control:
            result[-1] = Text(last.text + part.text, part.control)
        elif not isinstance(part, Text) or part.text:
            result.append(part)
    return result


def as_json(message: Message, habits: Any) -> dict[str, Any]:
    """A message as transformers takes it."""
    said = "".join(block for block in message.content if isinstance(block, str))
    result: dict[str, Any] = {"role": message.role, "content": said}
    if message.calls:
        result["content"] = said or habits.no_content
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments if as_text else json.loads(call.arguments)},
            }
            for call in message.calls
            for as_text in [habits.no_content is None]
        ]
    if message.call_id:
        result |= {"tool_call_id": message.call_id, "name": message.name}
    if message.reasoning:
        result["reasoning_content"] = message.reasoning
    return result


def by_transformers(
    chat: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = True
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    functions = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools]
    rendered, _ = render_jinja_template(
        conversations=[[as_json(message, chat.writer.habits) for message in messages]],
        tools=[{"type": "function", "function": function} for function in functions] or None,
        chat_template=chat.source,
        add_generation_prompt=generation,
        **chat.tokens,
        **chat.options,
    )
    return str(rendered[0])


# ---------------------------------------------------------------------------- equal to the whole template


@pytest.mark.parametrize("family", [*FAMILIES, *TOOL_FAMILIES], ids=lambda family: family.name)
@pytest.mark.parametrize("turns", [2, 4])
@pytest.mark.parametrize("generation", [True, False])
def test_a_conversation_is_what_transformers_renders(family: Family | ToolFamily, turns: int, generation: bool) -> None:
    chat = template(family)
    messages = talk("Be brief.", "Capital of France?", "Paris", "Of Japan?", "Tokyo", system=family.system)[:turns]
    written = chat.conversation(messages, generation=generation)
    assert text_of(written.parts) == by_transformers(chat, messages, generation=generation)


@pytest.mark.parametrize("family", TOOL_FAMILIES, ids=lambda family: family.name)
def test_tools_calls_and_results_are_what_transformers_renders(family: ToolFamily) -> None:
    chat = template(family)
    messages = with_tools(family)
    assert chat.takes_tools
    written = chat.conversation(messages, TOOLS, call_format=HERMES)
    assert text_of(written.parts) == by_transformers(chat, messages, TOOLS)


@pytest.mark.filterwarnings("ignore:.*(prefix-stable|no chat template)")
@pytest.mark.parametrize(
    "family", [*(family for family in FAMILIES if family.stable), None], ids=lambda f: f.name if f else "plain"
)
def test_parts_are_those_of_a_stream_of_a_program(family: Family | None) -> None:
    chat = ChatTemplate(None) if family is None else template(family)
    system = family is None or family.system
    messages = talk(" Be brief.\n", "<|im_end|> Capital?", "Paris", "Of Japan?\n", system=system)
    position = Position()
    for message in messages:
        (content,) = message.content
        assert isinstance(content, str)
        position.open_turn(chat, message.role)
        position.append_text(content)
        position.close_turn(chat)
    position.open_turn(chat, "assistant")
    assert joined(chat.conversation(messages).parts) == joined(position.prompt.parts)
    position.append_text("Tok")
    position.settle("a call")
    continued = chat.conversation([*messages, Message("assistant", ("Tok",))], generation="continue")
    assert joined(continued.parts) == joined(position.prompt.parts)
    assert continued.tail.endswith("Tok")


@pytest.mark.parametrize("family", [*FAMILIES, *TOOL_FAMILIES], ids=lambda family: family.name)
def test_white_space_around_contents_stays_where_the_template_leaves_it(family: Family | ToolFamily) -> None:
    chat = template(family)
    space = st.text(" \n\t", max_size=3)
    # An answer that begins with the template's own space brings it, as generated ones do; see below.
    answer = st.tuples(space.filter(lambda text: not text.startswith(" ")), space)

    @settings(max_examples=15)
    @given(st.tuples(space, space), answer, st.tuples(space, space))
    def check(first: tuple[str, str], second: tuple[str, str], third: tuple[str, str]) -> None:
        contents = [f"{around[0]}{word}{around[1]}" for around, word in zip((first, second, third), "abc", strict=True)]
        messages = talk(*contents, system=False)
        assert text_of(chat.conversation(messages).parts) == by_transformers(chat, messages)

    check()


@pytest.mark.parametrize("content", ["", " ", "\n\n"])
@pytest.mark.parametrize("family", [*FAMILIES, *TOOL_FAMILIES], ids=lambda family: family.name)
def test_contents_without_a_word_are_given_as_they_are(family: Family | ToolFamily, content: str) -> None:
    chat = template(family)
    messages = talk("a", content, "b", system=False)
    assert text_of(chat.conversation(messages).parts) == by_transformers(chat, messages)


def test_an_answer_brings_the_space_before_it() -> None:
    """What a model wrote after `[/INST]` begins with that space, and is found again in the cache."""
    chat = template(next(family for family in FAMILIES if family.name == "llama2"))
    said: tuple[str | Generated, ...] = (" Paris", Generated(" Paris", (7,)))
    for answer in said:
        parts = chat.conversation([*talk("Capital?", system=False), Message("assistant", (answer,))]).parts
        assert "[/INST] Paris </s>" in text_of(parts)


def test_generated_text_keeps_its_tokens() -> None:
    answer = Generated(" Paris\n", (7, 8))
    for source in (CHATML, GEMMA3):
        chat = ChatTemplate(source, tokens={"bos_token": "<bos>"})
        said = [Message("user", ("Capital?",)), Message("assistant", (answer,)), Message("user", ("And?",))]
        assert answer in chat.conversation(said).parts


# ---------------------------------------------------------------------------- what callers write is text


SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def callers_texts(text: str) -> list[tuple[list[Message], list[Tool]]]:
    """A conversation for each field that a caller writes, with `text` in it."""
    schemas = [
        {"type": "object", "properties": {text: {"type": "string"}}, "required": [text]},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": text}}},
        {"type": "object", "properties": {"a": {"type": "string", "title": text, "$comment": text}}},
        {"type": "object", "properties": {"a": {"enum": [text, {text: [text]}]}}},
        {"type": "object", "properties": {"a": {"const": text, "default": {text: text}, "examples": [text]}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"description": text}, {"$ref": text}]}}},
        {"type": "object", "properties": {"a": {"type": text}, "b": {"type": ["string", text]}}},
        {"type": "object", "properties": {}, "$defs": {text: {"description": text}}, text: {text: text}},
        {"type": "object", "properties": {"a": {"format": text}}, "dependentRequired": {text: [text]}},
    ]
    call = ToolCall("a", "{}", "call00001")
    ask = Message("user", ("Weather?",))

    def made(calls: ToolCall, result: Message) -> list[Message]:
        return [ask, Message("assistant", calls=(calls,)), result]

    told = Message("tool", ("result",), call_id="call00001")
    return [
        ([Message("user", (text,))], []),
        ([Message("user", ("a", f" {text}\n"))], []),
        ([Message("user", ("a",), name=text)], []),
        ([ask, Message("assistant", (text,), reasoning=text)], []),
        ([ask], [Tool("a", text)]),
        *(([ask], [Tool("a", "b", schema)]) for schema in schemas),
        (made(ToolCall(text, "{}", "call00001"), told), []),
        (made(ToolCall("a", json.dumps({text: text}, ensure_ascii=False), "call00001"), told), []),
        (made(ToolCall("a", "{}", text), Message("tool", ("result",), call_id=text)), []),
        (made(call, Message("tool", (text,), call_id="call00001", name=text)), []),
    ]


@pytest.mark.parametrize("family", [*TOOL_FAMILIES, None], ids=lambda family: family.name if family else "plain")
def test_no_text_of_a_caller_becomes_a_control_token(family: ToolFamily | None) -> None:
    """Every special name in every field: the control tokens are those of the same conversation without it."""
    tokenizer = ByteTokenizer()
    assert set(SPECIAL) == tokenizer.special_ids.keys()
    chat = ChatTemplate(None) if family is None else template(family)
    encoder = PromptEncoder(tokenizer)

    def control_ids(messages: list[Message], tools: list[Tool], call_format: Any) -> list[int]:
        ids = encoder.encode(chat.conversation(messages, tools, call_format=call_format).parts)
        return [token for token in ids if token in tokenizer.special_ids.values()]

    harmless = callers_texts("harmless")
    for name in SPECIAL:
        for number, (messages, tools) in enumerate(callers_texts(f"{name}x {name}")):
            for call_format in (HERMES, FENCED):
                expected = control_ids(*harmless[number], call_format)
                assert control_ids(messages, tools, call_format) == expected, (name, number)


def test_a_conversation_has_the_tokens_of_the_rendered_template() -> None:
    tokenizer = ByteTokenizer()
    encoder = PromptEncoder(tokenizer)
    for source in (CHATML, QWEN):
        chat = ChatTemplate(source)
        messages = talk("Be brief.", "Capital?", "Paris", "Of Japan?", system=True)
        rendered = Text(by_transformers(chat, messages), control=True)
        assert encoder.encode(chat.conversation(messages).parts) == encoder.encode((rendered,))


def test_a_template_that_cuts_or_forges_what_it_is_given_is_refused() -> None:
    messages = [Message("user", ("a long question",))]
    cut = ChatTemplate("{% for m in messages %}{{ m.role + m.content[:5] }}{% endfor %}", name="cutter")
    with pytest.raises(TemplateError, match="a part of a text"):
        cut.conversation(messages)
    forged = ChatTemplate("{{ messages[0].content }}\ue0000000009\ue001", name="forger")
    with pytest.raises(TemplateError, match=r"forger.* a text it was not given"):
        forged.conversation(messages)
    copies = ChatTemplate("{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}", name="copier")
    with pytest.raises(TemplateError, match=r"copier.*more than 4 times"):
        copies.conversation([Message("user", ("x" * 10_000,))])


def test_a_message_that_the_template_leaves_out_is_an_error() -> None:
    chat = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", name="deaf")
    with pytest.raises(TemplateError, match=r"deaf leaves out turn 0 \(system\)"):
        chat.conversation([Message("system", ("Be brief.",)), Message("user", ("hi",))])


# ---------------------------------------------------------------------------- ends of blocks


def test_the_ends_of_blocks_are_ends_of_parts() -> None:
    chat = ChatTemplate(QWEN)
    messages = [
        Message("system", ("One.", "Two.")),
        Message("user", ("Look: ", IMAGE, " what is it?")),
        Message("assistant", ("Let me see.",), (CALL, SECOND)),
        Message("tool", ("a cat",), call_id="call00001"),
        Message("tool", ("",), call_id="call00002"),
    ]
    written = chat.conversation(messages, TOOLS, call_format=HERMES)
    upto = {block: text_of(written.parts[:end]) for block, end in written.ends.items()}
    ends = {
        (0, 0): "One.",
        (0, 1): "One.Two.",
        (1, 0): "Look: ",
        (1, 1): "Look: <image>",
        (1, 2): "<image> what is it?",
        (2, 0): "Let me see.",
        (2, 1): f'"arguments": {CALL.arguments}',
        (2, 2): '{"name": "stop", "arguments": {}',
        (3, 0): "<tool_response>\na cat",
    }
    assert upto.keys() == ends.keys()
    for block, end in ends.items():
        assert upto[block].endswith(end)
    first, second = [text_of(written.parts[:end]) for end in written.tool_ends if end is not None]
    assert first.endswith('"maximum": 5}}, "required": ["City"]}}}')
    assert second.endswith('"n": {"type": "number", "minimum": 0.5}}}}}')


@pytest.mark.parametrize("source", [LLAMA, TAGS, DEEPSEEK, None])
def test_a_tool_ends_before_the_next_one_begins(source: str | None) -> None:
    """Then a mark at its end covers what stays the same whatever tools follow."""
    chat = ChatTemplate(source, tokens={"bos_token": "<s>"})
    ask = [Message("user", ("Weather?",))]
    ends = []
    for tools in (TOOLS, [TOOLS[0], Tool("other", "Does else.")], TOOLS[:1]):
        written = chat.conversation(ask, tools, call_format=HERMES)
        assert written.tool_ends[0] is not None
        ends.append(text_of(written.parts[: written.tool_ends[0]]))
    assert ends[0] == ends[1] == ends[2]
    assert "City" in ends[0]


# ---------------------------------------------------------------------------- our own words


def test_a_template_without_tools_is_given_them_in_our_words() -> None:
    chat = ChatTemplate(CHATML)
    assert not chat.takes_tools
    messages = [
        Message("system", ("Be brief.",)),
        Message("user", ("Weather?",)),
        Message("assistant", ("Let me see.",), (CALL, SECOND)),
        Message("tool", ("warm",), call_id="call00001"),
        Message("tool", ("done",), call_id="call00002"),
        Message("user", ("Thanks.",)),
    ]
    text = text_of(chat.conversation(messages, TOOLS).parts)
    system, user, assistant, answer = text.split("<|im_start|>")[1:5]
    assert system == f"system\n{FENCED.instructions(TOOLS)}\n\nBe brief.<|im_end|>\n"
    assert user == "user\nWeather?<|im_end|>\n"
    assert assistant == f"assistant\nLet me see.\n{FENCED.spell((CALL, SECOND))}<|im_end|>\n"
    results = [FENCED.spell_result("get_weather", "warm"), FENCED.spell_result("stop", "done")]
    assert answer == "user\n" + "\n".join([*results, "Thanks."]) + "<|im_end|>\n"


def test_without_a_system_turn_our_words_come_with_the_first_question() -> None:
    for name in ("mistral", "gemma3"):
        chat = template(next(family for family in FAMILIES if family.name == name))
        messages = [Message("user", ("Weather?",)), Message("assistant", calls=(CALL,)), Message("tool", ("warm",))]
        text = text_of(chat.conversation(messages, TOOLS).parts)
        assert f"{FENCED.instructions(TOOLS)}\n\nWeather?" in text.replace(" [/INST]", "")
        assert FENCED.spell((CALL,)) in text
    assert not template(next(family for family in FAMILIES if family.name == "mistral")).writer.takes_system


def test_our_own_format_wins_over_a_template_that_shows_tools() -> None:
    """Its calls begin with a control token, say, which no grammar can admit."""
    text = text_of(ChatTemplate(QWEN).conversation([Message("user", ("hi",))], TOOLS, call_format=FENCED).parts)
    assert FENCED.instructions(TOOLS) in text
    assert "<tools>" not in text


def test_the_words_of_calls_are_those_of_the_model() -> None:
    """A call is shown as the model wrote it, white space and numbers included, so its tokens are found again."""
    call = ToolCall("get_weather", '{"days":2.0,  "City":"Paris"}', "call00001")
    said = [Message("user", ("Weather?",)), Message("assistant", calls=(call,)), Message("tool", ("warm",))]
    for source in (QWEN, LLAMA):
        chat = ChatTemplate(source, tokens={"bos_token": "<s>"})
        assert call.arguments in text_of(chat.conversation(said, TOOLS, call_format=HERMES).parts)


# ---------------------------------------------------------------------------- options and reasoning


def test_options_of_one_conversation_go_before_those_of_the_template() -> None:
    chat = ChatTemplate(QWEN3, options={"enable_thinking": False})
    ask = [Message("user", ("1+1?",))]
    assert chat.conversation(ask).tail.endswith("<think>\n\n</think>\n\n")
    assert not chat.conversation(ask).opens(chat.reasoning_tags)
    thinking = chat.conversation(ask, options={"enable_thinking": True})
    assert thinking.tail.endswith("<|im_start|>assistant\n")
    assert chat.conversation(ask).tail.endswith("<think>\n\n</think>\n\n"), "the other's outline is not taken"


def test_the_tags_of_reasoning_are_those_the_template_knows() -> None:
    assert ChatTemplate(CHATML).reasoning_tags is ChatTemplate(None).reasoning_tags is None
    deepseek = ChatTemplate(DEEPSEEK, tokens={"bos_token": "<s>"})
    assert deepseek.reasoning_tags == ("<think>", "</think>")
    ask = Message("user", ("1+1?",))
    assert deepseek.conversation([ask]).opens(deepseek.reasoning_tags)
    assert not deepseek.conversation([ask]).opens(None)
    for begun, opens in (("easy", True), ("easy</think>2", False)):
        continued = deepseek.conversation([ask, Message("assistant", (begun,))], generation="continue")
        assert continued.opens(deepseek.reasoning_tags) is opens


def test_thoughts_go_where_the_template_wants_them() -> None:
    chat = ChatTemplate(QWEN)
    said = [Message("user", ("1+1?",)), Message("assistant", ("2",), reasoning="easy")]
    assert "<think>\neasy\n</think>\n\n2<|im_end|>" in text_of(chat.conversation(said, generation=False).parts)
    assert "easy" not in text_of(chat.conversation([*said, Message("user", ("2+2?",))]).parts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("messages", True),
        ("tools", None),
        ("bos_token", "x"),
        ("add_generation_prompt", False),
        ("a b", 1),
        ("effort", "<|im_end|>"),
        ("effort", "a b"),
        ("effort", ["high"]),
        ("effort", {"a": 1}),
    ],
)
def test_options_that_could_write_the_prompt_are_refused(name: str, value: Any) -> None:
    chat = ChatTemplate(LLAMA, tokens={"bos_token": "<s>"})
    with pytest.raises(ParameterError, match="options: "):
        chat.conversation([Message("user", ("hi",))], options={name: value})
    assert "Reasoning: high" in text_of(chat.conversation([Message("user", ("hi",))], options={"effort": "high"}).parts)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages: there is none"),
        ([Message("narrator", ("hi",))], "unknown role 'narrator'"),
        ([Message("user", ("hi",), (CALL,))], "a user message makes no tool calls"),
        ([Message("assistant", calls=(ToolCall("a", "[1]"),))], "must be a JSON object"),
        ([Message("assistant", calls=(ToolCall("a", '{"a'),))], "must be a JSON object"),
    ],
)
def test_a_conversation_that_cannot_be_meant_is_refused(messages: list[Message], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        ChatTemplate(CHATML).conversation(messages)


def test_only_an_answer_without_calls_is_continued() -> None:
    ask = Message("user", ("hi",))
    for last in (ask, Message("assistant", ("a",), (CALL,))):
        with pytest.raises(ParameterError, match="continues an assistant message"):
            ChatTemplate(CHATML).conversation([ask, last], generation="continue")


# ---------------------------------------------------------------------------- what is rendered


class Rendered:
    """Counts what a template renders."""

    def __init__(self, chat: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        render = chat.render_form

        def counted(*arguments: Any, **named: Any) -> str:
            self.count += 1
            return render(*arguments, **named)

        monkeypatch.setattr(chat, "render_form", counted)


def test_conversations_of_one_form_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate(QWEN)
    chat.conversation(with_tools(TOOL_FAMILIES[0]), TOOLS, call_format=HERMES)
    rendered = Rendered(chat, monkeypatch)
    other = ToolCall("stop", '{"n": [1, {"deep": "er"}]}', "call_of_another_length")
    messages = with_tools(TOOL_FAMILIES[0])
    messages[1:3] = [Message("user", ("Something else?",)), Message("assistant", calls=(other, CALL))]
    chat.conversation(messages, TOOLS, call_format=HERMES)
    assert rendered.count == 0
    forty = talk(*map(str, range(40)), system=True)
    chat.conversation(forty)
    assert rendered.count == 1
    chat.conversation(forty, generation=False)
    chat.conversation(forty, TOOLS, call_format=HERMES)
    chat.conversation(forty, TOOLS[:1], call_format=HERMES)
    chat.conversation(forty, options={"enable_thinking": False})
    assert rendered.count == 5


def test_outlines_are_given_up_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MOST_KEPT", 2)
    chat = ChatTemplate(CHATML)
    contents = ("a", "b", "c", "d", "e")
    for turns in (1, 2, 1, 3):
        chat.conversation(talk(*contents[:turns], system=False))
    rendered = Rendered(chat, monkeypatch)
    chat.conversation(talk("a", system=False))
    assert rendered.count == 0, "used last"
    chat.conversation(talk("a", "b", system=False))
    assert rendered.count == 1


def test_an_event_loop_waits_for_no_other_process_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate(QWEN)
    assert chat.is_foreign
    away = []
    to_thread = asyncio.to_thread

    async def noted(*arguments: Any, **named: Any) -> Any:
        away.append(arguments)
        return await to_thread(*arguments, **named)

    monkeypatch.setattr(asyncio, "to_thread", noted)

    async def write(content: str) -> Conversation:
        return await chat.conversation_away([Message("user", (content,))], TOOLS, call_format=HERMES)

    first = asyncio.run(write("hi"))
    assert len(away) == 1
    assert asyncio.run(write("hi")) == first == chat.conversation([Message("user", ("hi",))], TOOLS, call_format=HERMES)
    asyncio.run(write("hello"))
    assert len(away) == 1
    asyncio.run(write(" hello"))  # white space is shown to the template
    assert len(away) == 2
