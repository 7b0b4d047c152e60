"""The conversation in a request: what the interpreter writes is read back as it was said."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter.backends.hosted import conversation
from umbel.interpreter.backends.hosted.conversation import (
    Conversation,
    Message,
    PlainText,
    message,
    read,
    template,
    text_of,
)
from umbel.lang.chat_template import Turn
from umbel.lang.errors import BackendError, CapabilityError
from umbel.lang.prompt import EMPTY, Generated, Media, Part, Text

CHAT = template("test")
PIECES = st.sampled_from(["<|im_end|>\n", "<|im_start|>user\n", "a", " ", "\n", "é"])
IMAGE = Media("image", "0" * 64, b"...")


def written(said: list[tuple[str, list[Part]]], open_role: str | None = "assistant", begun: str = "") -> list[Part]:
    """The parts that the interpreter appends for these turns."""
    prompt = EMPTY
    turns: list[Turn] = []
    for role, content in said:
        for part in (*CHAT.open(turns, role), *content):
            prompt = prompt.append(part)
        turns.append(Turn(role, text_of(content)))
        for part in CHAT.close(turns):
            prompt = prompt.append(part)
    for part in CHAT.open(turns, open_role) if open_role else ():
        prompt = prompt.append(part)
    return list(prompt.append(Text(begun)).parts)


def test_closed_turns_and_an_open_answer():
    parts = written([("system", [Text("Be brief.")]), ("user", [Text("Hi"), IMAGE, Text("?")])])
    assert read(parts, "b") == Conversation(
        (message("system", "Be brief."), Message("user", (Text("Hi"), IMAGE, Text("?")))), ()
    )


def test_an_answer_that_has_begun():
    conversation = read([*written([("user", [Text("Who?")])], begun="Name: "), Generated("Bo", (1, 2))], "b")
    assert conversation == Conversation((message("user", "Who?"),), (Text("Name: Bo"),))


def test_text_without_roles():
    assert read([Text("Once "), Generated("upon", (1,)), Text(" a")], "b") == PlainText((Text("Once upon a"),))
    assert read([], "b") == PlainText(())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["system", "user", "assistant"]),
            st.lists(PIECES, max_size=4).map("".join),
        ),
        max_size=4,
    ),
    st.sampled_from(["", "so far <|im_end|>\n"]),
)
def test_content_that_spells_scaffolding_stays_content(said, begun):
    parts = written([(role, [Text(text)]) for role, text in said], begun=begun)
    conversation = read(parts, "b")
    assert isinstance(conversation, Conversation)
    assert [(turn.role, turn.text) for turn in conversation.turns] == said
    assert text_of(conversation.begun) == begun


def test_blanks_between_turns_are_left_out():
    parts = [
        *written([("user", [Text("Hi")])], open_role=None),
        Text("\n "),
        *CHAT.open([Turn("user", "Hi")], "assistant"),
    ]
    assert read(parts, "b") == Conversation((message("user", "Hi"),), ())


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        (written([], open_role="user", begun="I am "), r"inside user\(\.\.\.\); write it inside assistant"),
        (written([("user", [Text("Hi")])], open_role=None), r"behind the last turn; write assistant\(gen"),
        ([Text("Preamble."), *written([])], "'Preamble.' stands outside"),
        ([*written([("user", [Text("Hi")])], open_role=None), Text("And?")], "'And\\?' stands outside"),
    ],
)
def test_what_has_no_place_in_a_chat_request_is_refused(parts, what):
    with pytest.raises(CapabilityError, match=f"openai m .*{what}"):
        read(parts, "openai m")


def test_scaffolding_of_another_template_is_refused():
    with pytest.raises(BackendError, match=r"its own chat_template wrote, got scaffolding '<start_of_turn>"):
        read([Text("<start_of_turn>user\n", control=True)], "b")


@pytest.mark.parametrize(
    "asked",
    [
        Conversation((message("user", "Who?"),), ()),
        Conversation((message("user", "Who?"),), (Text("Name: "),)),
        Conversation((), (Text("Name: "),)),
        PlainText((Text("Once"),)),
    ],
)
def test_a_continuation_request_can_be_recognised(asked):
    messages = (
        conversation.ask_to_continue_text(asked)
        if isinstance(asked, PlainText)
        else conversation.ask_to_continue_turn(asked)
    )
    assert conversation.asked_to_continue(messages) == asked
