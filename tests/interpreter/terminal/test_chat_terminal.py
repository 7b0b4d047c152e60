"""The chat in a terminal: keys, Ctrl-C, Ctrl-D and the history of several chats, through a pseudo-terminal.

This file is also the program of the child: a chat on Echo, whose first answer stops after two words.
"""

import codecs
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import umbel as ul
from umbel.interpreter.terminal import chat as chat_module
from umbel.interpreter.terminal.lines import MOST_LINES, _read

PATIENCE = 60.0  # seconds without output after which a test fails
UP, END_OF_INPUT, INTERRUPT = "\x1b[A", "\x04", "\x03"
PROMPT = "> "


class Terminal:
    """A chat in a process of its own, with a terminal in between."""

    def __init__(self, home: Path, *arguments: str, hangs: bool = False) -> None:
        master, slave = pty.openpty()
        variables = {"HOME": str(home), "TERM": "xterm", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
        environment = {name: value for name, value in os.environ.items() if name != "XDG_STATE_HOME"} | variables
        self._master = master
        self._seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "hangs" if hangs else "answers", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt_until(self, marker: str) -> None:
        """Types Ctrl-C, and again where nothing comes of it for a second.

        Python waits for a key in `select`, and does not see a signal that came between its prompt and this wait.
        """
        self.type(INTERRUPT)
        for _ in range(int(PATIENCE)):
            while marker not in self._seen and select.select([self._master], [], [], 1)[0]:
                self._read(marker)
            if marker in self._seen:
                break
            self.type(INTERRUPT)
        self.read_until(marker)

    def read_until(self, marker: str) -> str:
        """Returns what is shown up to a marker, with it."""
        while marker not in self._seen:
            if not select.select([self._master], [], [], PATIENCE)[0]:
                raise AssertionError(f"{marker!r} was not shown, but {self._seen!r}")
            self._read(marker)
        found, _, self._seen = self._seen.partition(marker)
        return found + marker

    def _read(self, marker: str) -> None:
        try:
            data = os.read(self._master, 4096)
        except OSError:  # the other end is closed
            data = b""
        if not data:
            raise AssertionError(f"the chat ended before {marker!r}: {self._seen!r}")
        self._seen += self._decoder.decode(data)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._master)


@contextmanager
def chatting(home: Path, *arguments: str, hangs: bool = False) -> Iterator[Terminal]:
    terminal = Terminal(home, *arguments, hangs=hangs)
    try:
        terminal.read_until(PROMPT)
        yield terminal
    finally:
        terminal.close()


@pytest.mark.processes
def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    with chatting(tmp_path, hangs=True) as terminal:
        terminal.type("first message\r")
        terminal.read_until("you said")
        terminal.type(INTERRUPT)
        terminal.read_until("(stopped)")
        terminal.read_until(PROMPT)
        terminal.interrupt_until("(Ctrl-D or /quit ends)")
        terminal.read_until(PROMPT)
        terminal.type("second message\r")
        assert "[2 turns]" in terminal.read_until("turns]")
        terminal.read_until(PROMPT)
        terminal.type(END_OF_INPUT)
        assert terminal.process.wait(PATIENCE) == 0


@pytest.mark.processes
def test_arrow_keys_find_messages_of_earlier_chats(tmp_path: Path) -> None:
    with chatting(tmp_path) as terminal:
        terminal.type("remember me\r")
        terminal.read_until("you said remember me [1 turns]")
        terminal.read_until(PROMPT)
        terminal.type(" not me\r")
        terminal.read_until("[2 turns]")
        terminal.read_until(PROMPT)
        terminal.type(END_OF_INPUT)
        assert terminal.process.wait(PATIENCE) == 0
    history = tmp_path / ".local" / "state" / "umbel" / "chat_history"
    assert history.read_text() == "remember me\n"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700
    with chatting(tmp_path) as terminal:
        terminal.type(f"{UP}\r")
        terminal.read_until("you said remember me [1 turns]")


@pytest.mark.processes
def test_without_a_history_nothing_is_kept(tmp_path: Path) -> None:
    with chatting(tmp_path, "--no-history") as terminal:
        terminal.type("goes \\\r")
        terminal.read_until("… ")
        terminal.type("on\r")
        terminal.read_until("you said goes \r\non [1 turns]")
        terminal.read_until(PROMPT)
        terminal.type(f"{UP}\r")  # of this chat
        terminal.read_until("you said on [2 turns]")
    assert list(tmp_path.iterdir()) == []


def test_old_lines_are_dropped_and_others_cannot_read_the_file(tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.write_text("".join(f"line {number}\n" for number in range(3 * MOST_LINES)))
    history.chmod(0o644)
    lines = _read(history)
    assert lines[0] == f"line {2 * MOST_LINES}"
    assert history.read_text().splitlines() == lines
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_history_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert _read(tmp_path) == []
    assert _read(None) == []


def child(mode: str, arguments: list[str]) -> int:
    os.close(os.open(os.ttyname(0), os.O_RDWR))  # becomes the terminal of this session: Ctrl-C is a signal then
    gate = ul.Gate()
    if mode == "hangs":
        gate.step(3)  # the call and two pieces
    else:
        gate.open()

    write = chat_module._write

    def open_after_the_stop(text: str, style: str = "") -> None:
        if "(stopped" in text:
            gate.open()
        write(text, style)

    def answer(prompt: str) -> str:
        said = prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
        return f"you said {said} [{prompt.count('<|im_start|>user')} turns]"

    chat_module._write = open_after_the_stop
    echo = ul.Echo(answer, gate=gate)
    chat_module.chosen_model = lambda options: echo
    return chat_module.main(arguments)


if __name__ == "__main__":
    raise SystemExit(child(sys.argv[1], sys.argv[2:]))
