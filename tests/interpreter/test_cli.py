"""The command `umbel`, in this process and on the oracle or Echo."""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import umbel as ul
from umbel.interpreter import chat as chat_module
from umbel.interpreter.backends.echo_tokens import prompt_text
from umbel.interpreter.backends.runtime_remote import make_key
from umbel.interpreter.chat import check_sees, conversation
from umbel.interpreter.cli import COMMANDS, main
from umbel.interpreter.run import chosen_backend
from umbel.lang.protocol import Capabilities
from umbel.lang.transport.keys import read_clients, read_key


@pytest.fixture(autouse=True)
def no_default_backend_afterwards() -> Iterator[None]:
    yield
    ul.set_default_backend(None)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"umbel {ul.__version__}\n"


def test_umbel_alone_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(f"\n    {command} " in printed.out for command in COMMANDS)
    assert "umbel COMMAND --help" in printed.out


def test_keys_are_printed_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "server.key"]) == 0
    server = capsys.readouterr().out.strip()
    assert main(["keys", "a.key", "--server", server, "--clients", "clients.toml", "--name", "laptop"]) == 0
    assert capsys.readouterr().out.strip() == read_key("a.key").public
    assert read_key("a.key").server == server
    assert read_clients("clients.toml") == {read_key("a.key").public: "laptop"}
    assert main(["keys", "a.key"]) == 1
    assert "'a.key' exists; write another path" in capsys.readouterr().err
    assert main(["keys", "b.key", "--name", "b"]) == 1
    assert "write --clients LIST, too" in capsys.readouterr().err


def test_no_key_looks_like_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([(b"-" * 40, b"s" * 40), (b"-a" * 20, b"s" * 40), (b"p" * 40, b"s" * 40)])
    monkeypatch.setattr("zmq.curve_keypair", lambda: next(made))
    assert make_key(str(tmp_path / "a.key")).public == "p" * 40


def test_a_missing_file_is_the_only_thing_that_run_misses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run"])
    assert "required: file\n" in capsys.readouterr().err


def test_run_gives_the_file_its_arguments_and_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program.py"
    file.write_text("import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n")
    assert main(["run", "--model", "oracle", str(file), "--", "a", "--b"]) == 0
    assert capsys.readouterr().out == "['a', '--b']\n"
    backend = chosen_backend()
    assert isinstance(backend, ul.Runtime)
    assert backend.options.model == "oracle"


def test_the_model_may_stand_behind_the_file(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("")
    assert main(["run", str(file), "--model", "oracle"]) == 0
    backend = chosen_backend()
    assert isinstance(backend, ul.Runtime)
    assert backend.options.model == "oracle"


def test_arguments_of_the_file_may_stand_behind_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program.py"
    file.write_text("import sys\nprint(sys.argv[1:])\n")
    assert main(["run", str(file), "a", "--model", "oracle", "b"]) == 0
    assert capsys.readouterr().out == "['a', 'b']\n"


def test_an_unknown_option_says_where_those_of_the_file_go(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "program.py", "--fast"])
    assert "unknown argument '--fast'; write -- before the options of the file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["keys", "file", "--json"])
    assert "unknown argument '--json'\n" in capsys.readouterr().err


def test_a_missing_file_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nothing.py"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("umbel: ParameterError: 'nothing.py' is not a file")
    assert "Traceback" not in error


def test_fsm_hands_its_own_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fsm", "--regex", "ab*", "--json"]) == 0
    assert '"kind": "regex"' in capsys.readouterr().out
    assert main(["fsm", "(a"]) == 2
    assert capsys.readouterr().err.startswith("umbel fsm: position 0: ")


def test_a_conversation_remembers_and_can_begin_anew() -> None:
    shown: list[str] = []
    echo = ul.Echo(lambda prompt: f"turns: {prompt.count('user')}")
    state = conversation.run(iter(["hi", "", "again", "/usage", "/reset"]), shown.append, "Be short.", backend=echo)
    assert state.ret_value is True
    text = "".join(shown)
    assert text.startswith("turns: 1\nturns: 2\n")
    assert "Usage(" in text
    assert "Be short." in state.text()
    assert conversation.run(iter(["/quit", "never"]), shown.append, None, backend=echo).ret_value is False


def test_chat_checks_its_options_before_it_starts_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_module, "Runtime", None)
    assert main(["chat", "--max-tokens", "-1"]) == 1
    assert "max_tokens=-1 is out of range" in capsys.readouterr().err


def test_pictures_go_into_the_next_message(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(b"first")
    (tmp_path / "c.png").write_bytes(b"second")
    shown: list[str] = []
    echo = ul.Echo(lambda prompt: f"pictures: {prompt.count('<image>')}")
    lines = [f"/image '{tmp_path / 'a b.png'}'", f"/image {tmp_path / 'c.png'}", "What are these?", "And now?"]
    state = conversation.run(iter(lines), shown.append, None, backend=echo)
    state.sync()
    assert "".join(shown) == "pictures: 2\npictures: 2\n"
    assert state.messages()[0]["content"] == "<image><image>What are these?"
    assert state.messages()[2]["content"] == "And now?"


def test_pictures_of_the_command_line_are_in_the_first_message() -> None:
    shown: list[str] = []
    echo = ul.Echo(lambda prompt: f"pictures: {prompt.count('<image>')}")
    state = conversation.run(iter(["Look"]), shown.append, None, pictures=[ul.image(b"one")], backend=echo)
    state.sync()
    assert state.messages()[0]["content"] == "<image>Look"


def test_a_picture_that_cannot_be_given_is_an_answer_and_no_end(tmp_path: Path) -> None:
    shown: list[str] = []
    lines = ["/image", f"/image {tmp_path / 'no.png'}", "/images", "Hi"]
    conversation.run(iter(lines), shown.append, None, backend=ul.Echo(["unknown", "hello"])).sync()
    assert shown[0] == "/image needs the path of a picture; write /image photo.png\n"
    assert "there is no such file" in shown[1]
    assert "".join(shown[2:]) == "unknown\nhello\n"


def test_a_text_model_refuses_pictures_by_name() -> None:
    with pytest.raises(ul.CapabilityError, match="words takes no images; start umbel chat with --model"):
        check_sees(Capabilities("words"))


def test_chat_looks_for_its_pictures_before_it_starts_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_module, "Runtime", None)
    assert main(["chat", "--image", "nothing.png"]) == 1
    assert "there is no such file; pass a path" in capsys.readouterr().err


class EchoRuntime(ul.Echo):
    """Echo where `umbel chat` starts a runtime."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def wait_ready(self) -> None:
        pass


def test_a_message_that_is_refused_begins_the_chat_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = ul.FailCall(2, ul.RequestError("image() of 9 bytes is broken"))
    echo = EchoRuntime(["one", "two"], faults=failing)
    lines = iter(["Hi", "Look", "Again"])

    def typed(*prompt: object) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(chat_module, "Runtime", lambda model: echo)
    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat"]) == 0
    printed = capsys.readouterr().out
    assert "image() of 9 bytes is broken\nThe conversation begins anew.\n" in printed
    assert "one\n" in printed
    assert "two\n" in printed
    assert "Hi" not in prompt_text(echo.requests[-1].prompt)
