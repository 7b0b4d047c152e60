"""`umbel chat`: a conversation in the terminal.

The conversation is a state of the language: a message is said to a copy of it, which becomes the conversation when the
answer is whole. So a message that is refused leaves no trace, and what was computed is found in the cache by token.
Ctrl-C stops the run of an answer; the turns so far are then said to a new run.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...lang.chat_template import TemplateWarning
from ...lang.errors import CapabilityError, ParameterError, UmbelError, remedy, shown
from ...lang.generation import gen
from ...lang.ops import Image, assistant, image, system, user
from ...lang.protocol import Backend, Capabilities, Cost
from ...lang.runtime_options import DEFAULT
from ...lang.state import State
from .. import media
from ..body import sampling_defaults
from ..loop import streams
from ..program import Program, maker
from .help import has_colours
from .lines import history_path, short_path, typed_lines
from .models import add_model_options, chosen_model, conversing

MOST_OF_A_FILE = 1 << 20  # bytes; more is no message
_TEMPERATURE = 0.7
_Style = Literal["", "faint", "strong", "error"]
_CONTROLS = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

COMMANDS = {
    "/file": "/file PATH puts the text of a file into your next message",
    "/image": "/image PATH puts a picture into your next message",
    "/system": "/system TEXT begins anew with this system message; alone it shows the present one",
    "/reset": "/reset begins anew",
    "/save": "/save PATH writes the conversation: .json as messages, all else as Markdown",
    "/usage": "/usage counts the tokens so far",
    "/help": "/help lists these commands",
    "/quit": "/quit ends, as Ctrl-D does",
}
_KEYS = "Ctrl-C stops an answer. A line that ends in \\ goes on in the next one. Arrow keys find earlier messages."
_OF_DEFAULT = (
    "The default model is a small base model, which continues text and seldom answers; another one: "
    "umbel chat --model Qwen/Qwen3-0.6B"
)
HINT = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel chat",
        description="A conversation with a model. /help lists the commands of the chat: a file or a picture in a "
        "message, another system message, the conversation saved. Ctrl-C stops an answer, Ctrl-D ends. Messages are "
        f"kept for the arrow keys in {short_path(history_path())}, for you alone; not those that begin with a blank.",
    )
    add_model_options(made)
    made.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    made.add_argument(
        "--temperature",
        type=float,
        help=f"0 for the likeliest answer; default: {_TEMPERATURE}, where a model takes one",
    )
    made.add_argument("--max-tokens", type=int, default=256, help="of one answer; default: 256")
    made.add_argument(
        "--image", action="append", default=[], metavar="PATH", help="a picture for the first message; may be repeated"
    )
    made.add_argument("--no-history", action="store_true", help="read no earlier messages, and keep none")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs until the user leaves. Returns the exit status: 1 if an answer failed that no person was there to see fail.

    Raises:
        CapabilityError: there are images, and the model takes none.
        ParameterError: an option, or a path that is no file.
    """
    options = parser().parse_args(arguments)
    settings = sampling_defaults({"temperature": options.temperature, "max_tokens": options.max_tokens})
    pictures = [picture(path) for path in options.image]  # all of it before a model is loaded
    backend = chosen_model(options)
    if backend is None:
        from ..backends.runtime import Runtime

        backend = Runtime()
    try:
        streams.run(backend.start())
        backend = streams.run(conversing(backend, options))
        if pictures:
            check_sees(backend.capabilities)
        if "temperature" not in settings and backend.capabilities.temperature:
            settings["temperature"] = _TEMPERATURE
        chat = Chat(backend, _write, settings, options.system, pictures)
        chat.greet(is_default=options.url is None and options.model in (None, DEFAULT))
        history = None if options.no_history else history_path()
        chat.talk(typed_lines(history))
    finally:
        streams.run(backend.close())
    return 1 if chat.failed and not sys.stdin.isatty() else 0


def _write(text: str, style: _Style = "") -> None:
    """Writes to the terminal at once, in a style where it shows colours. A pipe gets what is said; remarks and errors
    go to stderr then."""
    out = sys.stderr if style and not sys.stdout.isatty() else sys.stdout
    if style in ("faint", "strong") and has_colours(out):
        text = f"\033[{2 if style == 'faint' else 1}m{text}\033[0m"
    out.write(text)
    out.flush()


# -------------------------------------------------------------------------------------- the conversation


@dataclasses.dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message: its role, its text, and the pictures in it."""

    role: Literal["user", "assistant"]
    text: str
    pictures: tuple[Image, ...] = ()


@maker(Program)
def conversation(s: State, opening: str | None, turns: Sequence[ChatTurn]) -> None:
    """Says what has been said so far; the chat goes on with the state that it leaves."""
    if opening:
        s += system(opening)
    for turn in turns:
        s += user([*turn.pictures, turn.text]) if turn.role == "user" else assistant(turn.text)


class Chat:
    """A conversation with one backend.

    Args:
        backend: has started.
        write: takes the pieces of what is shown, with a style.
        settings: sampling parameters of every answer.
        opening: the system message.
        pictures: of the first message.

    Attributes:
        failed: a message was taken back, or a command refused, for an error.
    """

    def __init__(
        self,
        backend: Backend,
        write: Callable[..., None],
        settings: dict[str, Any],
        opening: str | None = None,
        pictures: Sequence[Image] = (),
    ) -> None:
        self._backend = backend
        self._write = write
        self._settings = settings
        self._opening = opening
        self._pictures = list(pictures)  # of the next message
        self._files: list[str] = []  # texts of the next message
        self._turns: list[ChatTurn] = []
        self._spent = Cost()  # by the runs before the present one
        self.failed = False
        self._state = self._said()

    def greet(self, *, is_default: bool = False) -> None:
        """Shows the name of the model, and how to find the commands.

        Args:
            is_default: the model is the one that a user gets who names none.
        """
        self._write(self._backend.capabilities.name, "strong")
        self._write(f"  {HINT}\n", "faint")
        if not self._backend.capabilities.converses and self._backend.chat_template.source is None:
            warnings.simplefilter("ignore", TemplateWarning)  # said here, better
            plain = "This model has no chat template: turns are written as plain lines."
            self._write(f"{_OF_DEFAULT if is_default else plain}\n", "faint")

    def talk(self, lines: Iterable[str]) -> None:
        """Answers line by line, until there are no more of them, or one of them ends the chat."""
        for line in lines:
            text = line.strip()
            word = text.split(maxsplit=1)[0] if text else ""
            if word in ("/quit", "/exit"):
                return
            if word.startswith("/") and word[1:].isalpha():
                self._command(word, text.removeprefix(word).strip())
            elif text or self._files:
                self.say(text)

    def say(self, text: str) -> None:
        """Says a message and shows the answer as it comes.

        Ctrl-C stops it: what was shown of it stays in the conversation. An error is shown, and the message taken back.
        """
        message = ChatTurn("user", "\n\n".join([*self._files, *([text] if text else [])]), tuple(self._pictures))
        pieces: list[str] = []
        try:
            attempt = self._state.copy()
            attempt += user([*message.pictures, message.text])
            attempt += assistant(gen("reply"))
            for piece in attempt.text_iter("reply"):
                pieces.append(piece)
                self._write(piece.translate(_CONTROLS))
            self._write("\n")
            self._note_end(attempt)
            self._keep(message, attempt["reply"])
            self._state = attempt
        except KeyboardInterrupt:
            answer = "".join(pieces)
            if answer.strip():
                self._keep(message, answer)
            self._write("\n(stopped)\n" if answer.strip() else "\n(stopped; your message was taken back)\n", "faint")
            self._begin_run()
        except UmbelError as error:
            self.failed = True
            self._write("\n" if pieces else "")
            self._write(f"{error}\n", "error")
            self._write("(your message was taken back)\n", "faint")
            self._begin_run()

    def _keep(self, message: ChatTurn, answer: str) -> None:
        self._turns += [message, ChatTurn("assistant", answer)]
        self._files, self._pictures = [], []

    def _begin_run(self) -> None:
        """Ends the run, if there is one, and says the turns so far to a new one."""
        self._state.cancel()
        self._spent += self._state.cost
        self._state = self._said()

    def _said(self) -> State:
        """Begins a run and says the turns so far. What is wrong with them is raised by the next answer."""
        stops = self._backend.chat_template.turn_stops
        stop = {"stop": stops} if stops else {}
        state: State = conversation.run(
            self._opening,
            tuple(self._turns),
            backend=self._backend,
            stream=True,  # or an answer could come whole, where it is asked for before it is read
            record=False,
            **self._settings,
            **stop,
        )
        with contextlib.suppress(UmbelError):
            for _ in state.text_iter():  # ends when the body does: the chat goes on where it ended
                pass
        return state

    def _note_end(self, attempt: State) -> None:
        if attempt.get_meta_info("reply")["finish_reason"] == "length":
            self._write(f"(cut at {self._settings['max_tokens']} tokens; --max-tokens takes more)\n", "faint")

    # ---------------------------------------------------------------------------------- commands

    def _command(self, word: str, rest: str) -> None:
        try:
            match word:
                case "/file":
                    self._files.append(attached_file(rest))
                    self._write(f"{rest}: in your next message\n", "faint")
                case "/image":
                    check_sees(self._backend.capabilities)
                    self._pictures.append(picture(rest))
                    self._write(f"{rest}: in your next message\n", "faint")
                case "/system":
                    self._system(rest)
                case "/reset":
                    self._begin_anew()
                case "/save":
                    self._save(rest)
                case "/usage":
                    self._write(f"{_counted(self._spent + self._state.cost)}\n")
                case "/help":
                    self._write("\n".join([*COMMANDS.values(), _KEYS, ""]))
                case _:
                    raise ParameterError(f"there is no command {shown(word)}; {remedy(word, COMMANDS)}")
        except (CapabilityError, ParameterError, OSError) as error:
            self.failed = True
            self._write(f"{error}\n", "error")

    def _system(self, text: str) -> None:
        if text:
            self._opening = text
            self._begin_anew()
        else:
            self._write(f"{self._opening or 'There is no system message; write /system TEXT.'}\n")

    def _begin_anew(self) -> None:
        self._turns, self._files, self._pictures = [], [], []
        self._begin_run()
        self._write("The conversation begins anew.\n", "faint")

    def _save(self, path: str) -> None:
        if not path:
            raise ParameterError("/save needs the path of a new file; write /save chat.md, or /save chat.json")
        opening = [("system", self._opening)] if self._opening else []
        said = [*opening, *((turn.role, turn.text) for turn in self._turns)]
        if path.endswith(".json"):
            messages = [{"role": role, "content": text} for role, text in said]
            content = msgspec.json.format(msgspec.json.encode(messages)).decode()
        else:
            content = "\n\n".join(f"## {role.capitalize()}\n\n{text}" for role, text in said)
        try:
            with open(os.path.expanduser(path), "x", encoding="utf-8") as file:
                file.write(f"{content}\n")
        except FileExistsError:
            raise ParameterError(f"{path} exists; write the path of a new file") from None
        self._write(f"{len(self._turns)} messages are in {path}\n", "faint")


def _counted(cost: Cost) -> str:
    usage = cost.usage
    cached = f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from the cache"
    answers = "1 answer" if usage.calls == 1 else f"{usage.calls} answers"
    left_out = f"; {cost.cancelled_calls} more, stopped, not counted" if cost.cancelled_calls else ""
    return f"{answers} of {usage.completion_tokens} tokens; {cached}{left_out}"


def _path_of(command: str, given: str, example: str) -> str:
    """Reads a path, which may be quoted, as terminals write a file dropped on them. Raises ParameterError."""
    bare = given.strip()
    if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\"":
        bare = bare[1:-1]
    if not bare:
        raise ParameterError(f"{command} needs {example}")
    return os.path.expanduser(bare)


def picture(path: str) -> Image:
    """Reads a picture by its path.

    Raises:
        ParameterError: there is no path, no such file, or it is too large.
    """
    op = image(_path_of("/image", path, "the path of a picture; write /image photo.png"))
    media.check(op)
    return op


def attached_file(path: str) -> str:
    """Returns the text of a file, under its name.

    Raises:
        ParameterError: there is no path, no such file, it is too large, or it is no text in UTF-8.
    """
    file = Path(_path_of("/file", path, "the path of a text; write /file notes.txt"))
    try:
        if file.stat().st_size > MOST_OF_A_FILE:
            raise ParameterError(f"{file} has more than {MOST_OF_A_FILE >> 20} MiB; write the path of a smaller file")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"{file}: {error.strerror}; write the path of a text") from None
    except UnicodeDecodeError:
        raise ParameterError(f"{file} is no text in UTF-8; pictures are for /image") from None
    return f"{file.name}:\n{text.rstrip()}"


def check_sees(capabilities: Capabilities) -> None:
    """Raises CapabilityError when pictures would be refused later, in the middle of a conversation."""
    if not capabilities.images:
        raise CapabilityError(
            f"{capabilities.name} takes no images; start umbel chat with --model and the folder of a vision model"
        )
