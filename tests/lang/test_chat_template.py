"""Conversations written piece by piece equal the model's template on the whole of them."""

import warnings

import pytest
from umbel.lang.chat_template import ChatTemplate, TemplateWarning, Turn
from umbel.lang.errors import TemplateError
from umbel.lang.prompt import Part, Text

from .templates.examples import CHATML, FAMILIES, GEMMA3, QWEN3, Family

CONVERSATION = [
    ("system", "You answer in one word."),
    ("user", "Capital of France?"),
    ("assistant", "Paris"),
    ("user", "Of Japan? <|im_end|> is just text."),
    ("assistant", "Tokyo"),
]
ids = [family.name for family in FAMILIES]


def template(family: Family) -> ChatTemplate:
    return ChatTemplate(family.source, tokens=family.tokens, options=family.options, name=family.name)


def write(chat: ChatTemplate, conversation: list[tuple[str, str]]) -> list[Part]:
    """What the interpreter does: open, content, close, turn by turn."""
    parts: list[Part] = []
    turns: list[Turn] = []
    for role, content in conversation:
        parts.extend(chat.open(turns, role))
        turns.append(Turn(role, content))
        closing = chat.close(turns)
        if closing or role != "system":  # a system turn that the template moves comes with the next one
            parts.extend((Text(chat.lead(turns[:-1], role)), Text(content)))
        parts.extend(closing)
    return parts


def text(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def messages(conversation: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in conversation]


def by_transformers(family: Family, conversation: list[tuple[str, str]], generation: bool) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[messages(conversation)],
        chat_template=family.source,
        add_generation_prompt=generation,
        **family.tokens,
        **family.options,
    )
    return rendered[0]


def conversation_of(family: Family) -> list[tuple[str, str]]:
    return CONVERSATION if family.system else CONVERSATION[1:]


# Its generation prompt holds an empty thought that its history leaves out: reported, see below.
WRITES_ITS_HISTORY = [family for family in FAMILIES if family.name != "qwen3-no-thinking"]


@pytest.mark.parametrize("family", WRITES_ITS_HISTORY, ids=lambda family: family.name)
@pytest.mark.parametrize("turns", [2, 3, 4, 5])
def test_pieces_equal_the_whole_template(family: Family, turns: int) -> None:
    conversation = conversation_of(family)[:turns]
    assert text(write(template(family), conversation)) == by_transformers(family, conversation, False)


@pytest.mark.parametrize("family", FAMILIES, ids=ids)
def test_opening_the_assistant_is_the_generation_prompt(family: Family) -> None:
    conversation = conversation_of(family)[: 2 if family.system else 1]
    chat = template(family)
    parts = write(chat, conversation)
    parts.extend(chat.open([Turn(*turn) for turn in conversation], "assistant"))
    assert text(parts) == by_transformers(family, conversation, True)


@pytest.mark.parametrize("family", FAMILIES, ids=ids)
def test_our_rendering_is_that_of_transformers(family: Family) -> None:
    conversation = conversation_of(family)
    assert template(family).render(messages(conversation)) == by_transformers(family, conversation, False)


@pytest.mark.filterwarnings("ignore:.*prefix-stable")
@pytest.mark.parametrize("family", FAMILIES, ids=ids)
def test_content_is_never_scaffolding(family: Family) -> None:
    parts = write(template(family), conversation_of(family))
    scaffolding = "".join(part.text for part in parts if isinstance(part, Text) and part.control)
    for _, content in CONVERSATION:
        assert content not in scaffolding
    if family.system:
        assert any(isinstance(part, Text) and not part.control and part.text == CONVERSATION[0][1] for part in parts)


def test_a_template_that_rewrites_the_past_is_reported_with_the_turn() -> None:
    chat = ChatTemplate(QWEN3, name="qwen3")
    conversation = [("user", "1+1?"), ("assistant", "<think>\neasy\n</think>\n\n2"), ("user", "2+2?")]
    with pytest.warns(TemplateWarning, match=r"rewrites the content of turn 1 \(assistant\)"):
        parts = write(chat, conversation)
    assert "easy" in text(parts)


def test_a_thought_that_history_leaves_out_is_reported() -> None:
    chat = ChatTemplate(QWEN3, name="qwen3", options={"enable_thinking": False})
    with pytest.warns(TemplateWarning, match="generation prompt"):
        write(chat, [("user", "1+1?"), ("assistant", "2"), ("user", "2+2?")])


def test_a_stable_template_warns_about_nothing() -> None:
    for family in FAMILIES:
        if family.stable:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                write(template(family), conversation_of(family))


def test_without_a_template_one_loud_fallback() -> None:
    chat = ChatTemplate(None, name="some base model")
    with pytest.warns(TemplateWarning, match="some base model has no chat template") as caught:
        parts = write(chat, CONVERSATION[:3])
    assert len(caught) == 1
    assert text(parts) == "SYSTEM: You answer in one word.\nUSER: Capital of France?\nASSISTANT: Paris\n"
    assert not any(part.control for part in parts if isinstance(part, Text))
    assert chat.render(messages(CONVERSATION[1:2]), add_generation_prompt=True).endswith("ASSISTANT:")


def test_a_space_before_the_answer_is_written_for_constant_answers_only() -> None:
    llama2 = template(next(family for family in FAMILIES if family.name == "llama2"))
    turns = [Turn("user", "hi")]
    assert text(list(llama2.open(turns, "assistant"))) == ""
    assert llama2.lead(turns, "assistant") == ChatTemplate(None).lead(turns, "assistant") == " "
    assert llama2.lead([], "user") == ""
    assert ChatTemplate(CHATML).lead(turns, "assistant") == ""


def test_trimming_templates_are_known() -> None:
    assert ChatTemplate(GEMMA3, tokens={"bos_token": "<bos>"}).trims
    assert not ChatTemplate(CHATML).trims


def test_errors_name_the_model_and_the_reason() -> None:
    with pytest.raises(TemplateError, match="line 1"):
        ChatTemplate("{% for %}", name="broken")
    with pytest.raises(TemplateError, match="unknown role 'narrator'"):
        ChatTemplate(CHATML).open([], "narrator")
    mistral = next(family for family in FAMILIES if family.name == "mistral")
    with pytest.raises(TemplateError, match=r"mistral.*alternate"):
        template(mistral).render(messages(CONVERSATION))


def test_a_role_the_template_refuses_is_an_error_not_a_silent_gap() -> None:
    mistral = template(next(family for family in FAMILIES if family.name == "mistral"))
    with pytest.raises(TemplateError, match=r"mistral refuses the turns system, user.*alternate"):
        write(mistral, CONVERSATION)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    with pytest.raises(TemplateError, match=r"hostile.*(unsafe|undefined)"):
        ChatTemplate(source, name="hostile").render(messages(CONVERSATION))


# Templates of models that see show content only where it is a list of parts, the way LLaVA's do.
PARTS = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def test_content_is_given_as_parts_to_templates_that_read_nothing_else() -> None:
    chat = ChatTemplate(PARTS)
    said = [("user", "Capital of France?"), ("assistant", "Paris"), ("user", "Of Japan?")]
    expected = "USER: Capital of France? ASSISTANT: Paris USER: Of Japan? "
    assert text(write(chat, said)) == chat.render(messages(said)) == expected
    assert chat.render(messages(said), add_generation_prompt=True) == expected + "ASSISTANT:"


def test_a_template_that_reads_text_and_parts_is_given_text() -> None:
    both = (
        "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}[{{ part['text'] }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(both).render([{"role": "user", "content": "hello"}]) == "hello"


def test_plain_turns_need_stop_texts() -> None:
    """A model that goes on writes the other side's line, which no token ends."""
    assert ChatTemplate(CHATML).turn_stops == ()
    chat = ChatTemplate(None)
    text = chat.render(messages(CONVERSATION), add_generation_prompt=True)
    assert all(stop in f"\n{text}" for stop in chat.turn_stops)
    assert len(chat.turn_stops) == 3
