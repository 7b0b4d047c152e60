"""Chat formats by name and by file: what `chat_template=` may be, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.lang.chat_template import ChatTemplate, Turn, chat_template_by_name, read_chat_template
from umbel.lang.errors import ParameterError, TemplateError
from umbel.lang.prompt import Text
from umbel.lang.templates.formats import NAMES

from .examples import CHATML, FAMILIES

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
# The names that programs for SGLang use.
OF_SGLANG = (
    *("default", "claude", "chatml", "chatml-llava", "qwen", "qwen2-vl", "vicuna_v1.1", "llama-2-chat"),
    *("llama-3-instruct", "llama-3-instruct-llava", "llama-4", "minicpmv", "minicpmo", "janus-pro", "yi-1.5", "yi-vl"),
    *("gemma-it", "dbrx-instruct", "c4ai-command-r", "granite-3-instruct", "deepseek-v3"),
)


@pytest.mark.parametrize("name", NAMES)
def test_every_named_format_writes_the_conversation(name: str) -> None:
    chat = chat_template_by_name(name)
    text = chat.render(CONVERSATION, add_generation_prompt=True)
    places = [text.index(message["content"]) for message in CONVERSATION]
    assert places == sorted(places)
    assert chat.render(CONVERSATION[1:3]) != chat.render(CONVERSATION[1:2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("error")
def test_every_named_format_can_be_written_turn_by_turn(name: str) -> None:
    chat = chat_template_by_name(name)
    written, turns = "", list[Turn]()
    for message in CONVERSATION:
        role, content = message["role"], message["content"]
        written += "".join(part.text for part in chat.open(turns, role) if isinstance(part, Text))
        turns.append(Turn(role, content))
        if chat.shows(turns):
            written += chat.lead(turns[:-1], role) + content
            written += "".join(part.text for part in chat.close(turns) if isinstance(part, Text))
    assert written == chat.render(CONVERSATION)


def test_the_names_of_sglang_are_known() -> None:
    assert set(OF_SGLANG) <= set(NAMES)


def test_formats_are_those_of_their_models() -> None:
    families = {family.name: family for family in FAMILIES}
    for name, family in (("chatml", "chatml"), ("llama-3-instruct", "llama3"), ("gemma-it", "gemma3")):
        published = families[family]
        expected = ChatTemplate(published.source, tokens=published.tokens).render(CONVERSATION)
        assert chat_template_by_name(name).render(CONVERSATION) == expected.removeprefix(
            published.tokens.get("bos_token", "")
        )
    llama = families["llama2"]
    text = ChatTemplate(llama.source, tokens=llama.tokens).render(CONVERSATION)
    assert "<s>" + chat_template_by_name("llama-2-chat").render(CONVERSATION) == text


def test_a_name_is_no_source() -> None:
    assert ChatTemplate("chatml").render(CONVERSATION) == ChatTemplate(CHATML).render(CONVERSATION)
    for wrong in ("chat-ml", "llama2", "", "hello"):
        with pytest.raises(TemplateError, match=r"did you mean .*'(chatml|llama-2-chat)|known names are c4ai"):
            ChatTemplate(wrong)
        with pytest.raises(TemplateError):
            chat_template_by_name(wrong)


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML)
    for given in (file, str(file)):
        assert read_chat_template(given, name="mine").source == CHATML
    (tmp_path / "plain.jinja").write_text("chatml")
    with pytest.raises(TemplateError, match="holds no Jinja source"):
        read_chat_template(tmp_path / "plain.jinja", name="mine")
    (tmp_path / "bytes.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(TemplateError, match="cannot be read"):
        read_chat_template(tmp_path / "bytes.jinja", name="mine")
    for missing in (tmp_path / "none.jinja", "none.jinja", "a\0b", "~nobody-of-this-name/x.jinja", "x" * 100_000):
        with pytest.raises(TemplateError) as caught:
            read_chat_template(missing, name="mine")
        assert len(str(caught.value)) < 2_000
    with pytest.raises(ParameterError, match="got int"):
        read_chat_template(7, name="mine")  # type: ignore[arg-type]


def test_the_template_of_a_model_never_names_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret.jinja").write_text(CHATML)
    with pytest.raises(TemplateError, match="text without"):
        ChatTemplate(str(tmp_path / "secret.jinja"), name="downloaded")


BACKENDS: list[Callable[[Any], Any]] = [
    lambda given: ul.Echo(chat_template=given),
    lambda given: ul.Runtime("oracle", chat_template=given, progress=False),
    lambda given: ul.OpenAI("m", base_url="http://127.0.0.1:9/v1", chat_template=given, mode="completion"),
]


@pytest.mark.parametrize("make", BACKENDS, ids=["Echo", "Runtime", "OpenAI"])
def test_every_backend_takes_names_and_files(make: Callable[[Any], Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML)
    for given in ("chatml", str(file), file, ul.ChatTemplate("chatml")):
        assert make(given).chat_template.render(CONVERSATION) == ChatTemplate(CHATML).render(CONVERSATION)
    for wrong in ("chatmll", "mine.jinja", "hello"):
        with pytest.raises(TemplateError):
            make(wrong)
