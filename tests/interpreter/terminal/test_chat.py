"""The chat in this process, on Echo and fakes of providers: its commands, its errors, its options."""

import json
import re
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.backends import runtime
from umbel.interpreter.backends.echo_tokens import prompt_text
from umbel.interpreter.cli import main
from umbel.interpreter.terminal import chat as chat_module
from umbel.interpreter.terminal import models
from umbel.interpreter.terminal.chat import Chat, check_sees
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.protocol import Capabilities
from umbel.testing import FakeOpenAI


class Shown:
    """What the chat has written."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, text: str, style: str = "") -> None:
        self.text += text


def talk(backend: Any, lines: Sequence[str], **options: Any) -> str:
    shown = Shown()
    Chat(backend, shown, {"max_tokens": 50}, **options).talk(lines)
    return shown.text


def turns(backend: ul.Echo) -> list[str]:
    return [prompt_text(request.prompt) for request in backend.requests]


def test_a_conversation_remembers_and_can_begin_anew() -> None:
    echo = ul.Echo(lambda prompt: f"turns: {prompt.count('user')}")
    text = talk(echo, ["hi", "", "again", "/usage", "/reset", "fresh"], opening="Be short.")
    assert text.startswith("turns: 1\nturns: 2\n2 answers of 6 tokens; ")
    assert text.endswith("The conversation begins anew.\nturns: 1\n")
    assert all("Be short." in prompt for prompt in turns(echo))


def test_an_answer_stays_in_the_cache_for_the_next_message() -> None:
    echo = ul.Echo(["one answer", "two"])
    text = talk(echo, ["hi", "/usage", "again", "/usage"])
    first, second = map(int, re.findall(r"(\d+) of \d+ prompt tokens came from the cache", text))
    assert (first, second > 10) == (0, True)


def test_usage_counts_all_answers_whatever_begins_anew() -> None:
    echo = ul.Echo(["one", "two", "three"], faults=ul.FailCall(2, ul.RequestError("too long")))
    text = talk(echo, ["hi", "refused", "hi", "/reset", "hi", "/usage"])
    assert "\n3 answers of 3 tokens; " in text


def test_usage_says_what_it_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, shown = ul.Gate(), Shown()
    gate.step(2)  # for the call and its first piece
    chat = Chat(ul.Echo(["three four five", "six"], gate=gate), shown, {"max_tokens": 50})

    def interrupted(text: str, style: str = "") -> None:
        shown(text, style)
        if text == "three":
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_write", interrupted)
    chat.talk(["count", "/usage"])
    assert shown.text.endswith("; 1 more, stopped, not counted\n")


@pytest.mark.parametrize("end", ["/quit", "/exit"])
def test_a_command_ends_the_chat(end: str) -> None:
    echo = ul.Echo()
    talk(echo, [end, "never"])
    assert echo.calls == 0


def test_the_system_message_is_shown_and_replaced() -> None:
    echo = ul.Echo(["one", "two"])
    text = talk(echo, ["hi", "/system", "/system You rhyme.", "/system", "hi"])
    assert text == (
        "one\nThere is no system message; write /system TEXT.\n"
        "The conversation begins anew.\nYou rhyme.\ntwo\n"
    )  # fmt: skip
    assert "You rhyme." not in turns(echo)[0]
    assert "You rhyme." in turns(echo)[1]
    assert turns(echo)[1].count("user") == 1


def test_a_file_goes_into_the_next_message(tmp_path: Path) -> None:
    notes = tmp_path / "my notes.txt"
    notes.write_text("Rain on Monday.\n")
    echo = ul.Echo(["one", "two"])
    text = talk(echo, [f"/file '{notes}'", "What is the weather?", "And then?"])
    assert "in your next message\none\n" in text
    assert "my notes.txt:\nRain on Monday.\n\nWhat is the weather?" in turns(echo)[0]
    assert turns(echo)[1].count("Rain on Monday.") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file or directory; write the path of a text"),
        (b"\xff\xfe\x00", "is no text in UTF-8; pictures are for /image"),
        (b"x" * (chat_module.MOST_OF_A_FILE + 1), "has more than 1 MiB"),
    ],
)
def test_a_file_that_cannot_be_said_is_an_answer_and_no_end(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    text = talk(ul.Echo(["hello"]), ["/file", f"/file {path}", "hi"])
    assert text.startswith("/file needs the path of a text; write /file notes.txt\n")
    assert says in text
    assert text.endswith("hello\n")


def test_pictures_go_into_the_next_message(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(b"first")
    (tmp_path / "c.png").write_bytes(b"second")
    echo = ul.Echo(lambda prompt: f"pictures: {prompt.count('<image>')}")
    text = talk(echo, [f"/image '{tmp_path / 'a b.png'}'", f"/image {tmp_path / 'c.png'}", "What are these?", "Now?"])
    assert text.endswith("pictures: 2\npictures: 2\n")
    assert "<image><image>What are these?" in turns(echo)[0]


def test_pictures_of_the_command_line_are_in_the_first_message() -> None:
    echo = ul.Echo(["a", "b"])
    talk(echo, ["Look", "Again"], pictures=[ul.image(b"one")])
    assert [prompt.count("<image>") for prompt in turns(echo)] == [1, 1]


def test_a_text_model_refuses_pictures_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "c.png").write_bytes(b"second")
    words = ul.Echo(["hello"], capabilities=Capabilities("words"))
    text = talk(words, [f"/image {tmp_path / 'c.png'}", "hi"])
    assert text == "words takes no images; start umbel chat with --model and the folder of a vision model\nhello\n"
    with pytest.raises(ul.CapabilityError, match="words takes no images"):
        check_sees(Capabilities("words"))


def test_an_unknown_command_is_not_sent_and_a_path_is() -> None:
    echo = ul.Echo(["sent"])
    text = talk(echo, ["/usag", "/etc/hosts is a file"])
    assert text == "there is no command '/usag'; did you mean '/usage'?\nsent\n"


def test_a_conversation_is_saved_and_nothing_overwritten(tmp_path: Path) -> None:
    lines = ["hi", f"/save {tmp_path}/a.md", f"/save {tmp_path}/a.json", f"/save {tmp_path}/a.md", "/save"]
    text = talk(ul.Echo(["hello"]), lines, opening="Be short.")
    assert (tmp_path / "a.md").read_text() == "## System\n\nBe short.\n\n## User\n\nhi\n\n## Assistant\n\nhello\n"
    assert json.loads((tmp_path / "a.json").read_text()) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
    ]
    assert "a.md exists; write the path of a new file" in text
    assert text.endswith("/save needs the path of a new file; write /save chat.md, or /save chat.json\n")


def test_a_message_that_is_refused_is_taken_back() -> None:
    failing = ul.FailCall(2, ul.RequestError("too long"))
    echo = ul.Echo(["one", "two"], faults=failing)
    text = talk(echo, ["Hi", "Look", "Again"])
    assert text == "one\ntoo long\n(your message was taken back)\ntwo\n"
    assert "Hi" in turns(echo)[-1]
    assert "Look" not in turns(echo)[-1]


def test_an_interrupt_keeps_what_was_shown_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = ul.Echo(["one two three four", "next"])
    shown = Shown()
    chat = Chat(echo, shown, {"max_tokens": 50})
    write = shown.__call__

    def interrupted(text: str, style: str = "") -> None:
        write(text, style)
        if text == " two":
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_write", interrupted)
    chat.talk(["count", "go on"])
    assert shown.text == "one two\n(stopped)\nnext\n"
    assert "one two" in turns(echo)[1]
    assert "three" not in turns(echo)[1]


def test_what_a_model_writes_does_not_steer_the_terminal() -> None:
    assert talk(ul.Echo(["a \033[2J\tb\n\x9b"]), ["hi"]) == "a �[2J\tb\n�\n"


def test_an_answer_that_is_cut_says_so() -> None:
    text = talk(ul.Echo(["word " * 100]), ["hi"])
    assert text.endswith("\n(cut at 50 tokens; --max-tokens takes more)\n")


def test_a_message_of_commands_lists_each_command() -> None:
    text = talk(ul.Echo(), ["/help"])
    assert all(f"{command} " in text for command in chat_module.COMMANDS)


# ------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a model was started")

    monkeypatch.setattr(ul.Runtime, "start", refuse)


@pytest.mark.usefixtures("no_runtime")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-tokens", "-1"], "max_tokens=-1 is out of range"),
        (["--image", "nothing.png"], "there is no such file; pass a path"),
        (["--api-key", "x"], "--api-key is for --url"),
        (["--model", "openai:"], "write --model openai:NAME"),
    ],
)
def test_options_are_checked_before_a_model_is_started(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *arguments]) == 1
    assert says in capsys.readouterr().err


def test_a_chat_with_the_model_of_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(chat_module, "typed_lines", lambda history: iter(["Hi", "/quit"]))
    with FakeOpenAI(lambda *_: "hello from there") as server:
        assert main(["chat", "--url", server.base_url, "--api-key", server.api_key, "--model", "gpt-4o"]) == 0
    printed = capsys.readouterr()
    assert "/help lists the commands" in printed.err  # a pipe gets the answers alone
    assert printed.out == "hello from there\n"


@pytest.mark.parametrize(
    ("arguments", "is_default"), [([], True), (["--model", "default"], True), (["--model", "a/b"], False)]
)
def test_the_default_model_is_said_to_continue_text_and_another_one_is_named(
    arguments: list[str], is_default: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_module, "typed_lines", lambda history: iter([]))
    base = ul.Echo(chat_template=ChatTemplate(None, name="base"))
    monkeypatch.setattr(runtime, "Runtime", lambda *name: base)
    assert main(["chat", *arguments]) == 0
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith("umbel chat --model Qwen/Qwen3-0.6B") == is_default
    assert told.startswith("This model has no chat template") != is_default


def test_a_chat_with_a_hosted_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(chat_module, "typed_lines", lambda history: iter(["Hi"]))
    with FakeOpenAI(lambda *_: "hello") as server:
        hosted = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        monkeypatch.setitem(models.PROVIDERS, "openai", lambda name: hosted)
        assert main(["chat", "--model", "openai:gpt-4o", "--system", "Be short."]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("openai gpt-4o")
    assert printed.out == "hello\n"


def test_a_failed_answer_in_a_pipe_is_an_error_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = ul.Echo(["one"], faults=ul.FailCall(1, ul.RequestError("too long")))
    monkeypatch.setitem(models.PROVIDERS, "openai", lambda name: echo)
    monkeypatch.setattr(chat_module, "typed_lines", lambda history: iter(["Hi", "Again"]))
    assert main(["chat", "--model", "openai:gpt-4o"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "one\n"
    assert printed.err.endswith("\ntoo long\n(your message was taken back)\n")


def test_a_chat_model_behind_a_url_gets_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_module, "typed_lines", lambda history: iter(["Hi"]))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    with FakeOpenAI(lambda *_: "hello") as server:
        given = ["--url", server.base_url, "--api-key", server.api_key, "--model", "gpt-4o", "--system", "Be short."]
        assert main(["chat", *given]) == 0
        asked = server.requests[-1]
    assert asked.body["messages"] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    printed = capsys.readouterr()
    assert printed.out == "hello\n"
    assert "no chat template" not in printed.err


def test_a_chat_with_a_url_sends_no_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    monkeypatch.setattr(chat_module, "typed_lines", lambda history: iter(["Hi"]))
    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        main(["chat", "--url", f"http://127.0.0.1:{server.server_port}", "--model", "gpt-4o"])
        server.shutdown()
    assert len(keys) > 3
    assert not [key for key in keys if key is not None and "environment" in key]
