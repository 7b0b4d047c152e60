"""Reads the conversation inside a request back from its parts, as chat APIs take it; counts and encodes content.

Hosted models have a chat template of their own that is not published, so the interpreter writes conversations as
ChatML, whose scaffolding is control text and cannot be mistaken:

    <|im_start|>user\\n  ...content...  <|im_end|>\\n<|im_start|>assistant\\n  ...content so far
    ------ control ----                ---------------- control ------------

Everything else is content, also text that spells `<|im_end|>`.

Where a provider has no way to continue a text, the chat model is asked to. The wording is constant: prefix caches hit,
and fakes recognise it.

With the `tiktoken` package the count of an OpenAI model's text is exact. Otherwise a token has at least one byte.
"""

import base64
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ....lang.chat_template import CHATML, ChatTemplate
from ....lang.errors import BackendError, CapabilityError, RequestError
from ....lang.prompt import Media, Part, Text

_SCAFFOLDING = re.compile(r"<\|im_start\|>(\w+)\n|<\|im_end\|>\n")

Content = tuple[Text | Media, ...]  # neighbouring texts are one, and none is empty


@dataclass(frozen=True, slots=True)
class Message:
    """One turn."""

    role: str
    content: Content

    @property
    def text(self) -> str:
        return text_of(self.content)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Closed turns, and the open turn of the assistant.

    Attributes:
        turns: the closed ones, in the program's order.
        begun: the open turn so far; () for an ordinary call.
    """

    turns: tuple[Message, ...]
    begun: Content


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text without roles that is to be continued."""

    content: Content


def template(name: str) -> ChatTemplate:
    """Returns the template whose conversations `read` parses. `name`: of the backend, for messages."""
    return ChatTemplate(CHATML, name=name)


def message(role: str, text: str) -> Message:
    """Makes a turn of text alone."""
    return Message(role, (Text(text),) if text else ())


def text_of(content: Iterable[Part]) -> str:
    """Returns the text of content; media appear as <image> and <video>."""
    return "".join(f"<{part.kind}>" if isinstance(part, Media) else part.text for part in content)


def message_text(content: Sequence[object], backend: str) -> str:
    """Returns the text of a turn of a dialogue, which has no media. Raises RequestError for one that is no text."""
    return sendable_text("".join(part for part in content if isinstance(part, str)), backend)


def sendable_text(text: str, backend: str) -> str:
    """Returns a text that can be sent. Raises RequestError for half of a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt holds {text[error.start]!r}, half of a character, which cannot be sent to {backend}; "
            "decode its source with errors='replace'"
        ) from None
    return text


def read(parts: Iterable[Part], backend: str) -> Conversation | PlainText:
    """Parses a prompt into a conversation.

    White space between turns has no place in a chat request and says nothing to a model: it is left out.

    Args:
        parts: written with the template above.
        backend: its name, for messages.

    Raises:
        CapabilityError: text to be generated, or text that is given, stands where a chat request has no place for it.
    """
    reader = _Reader(backend)
    for part in parts:
        if isinstance(part, Text) and part.control:
            reader.scaffolding(part.text)
        else:
            reader.append(part if isinstance(part, Media) else Text(part.text))
    return reader.end()


def read_beginning(parts: Sequence[Part], backend: str) -> Conversation | PlainText:
    """Parses the beginning of a prompt, which may end anywhere: a turn that is open there counts as closed.

    Raises:
        CapabilityError: as `read`.
    """
    turn_ends = "<|im_end|>\n<|im_start|>assistant\n"
    for ending in ("", "<|im_start|>assistant\n", turn_ends):
        try:
            return read((*parts, Text(ending, control=True)) if ending else parts, backend)
        except CapabilityError:
            if ending == turn_ends:
                raise
    raise AssertionError("the last ending either reads or raises")


class _Reader:
    """Reads a prompt's parts, and keeps the place in the conversation.

    role is None: between turns, `content` stands outside of roles
    otherwise:    inside a turn, `content` is its own
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._turns: list[Message] = []
        self._role: str | None = None
        self._content: list[Text | Media] = []

    def append(self, part: Text | Media) -> None:
        before = self._content[-1] if self._content else None
        if isinstance(part, Text) and isinstance(before, Text):
            self._content[-1] = Text(before.text + part.text)
        elif isinstance(part, Media) or part.text:
            self._content.append(part)

    def scaffolding(self, text: str) -> None:
        end = 0
        for found in _SCAFFOLDING.finditer(text):
            if found.start() != end:
                break
            end = found.end()
            if found[1] is not None:
                self._open(found[1])
            else:
                self._close()
        if end != len(text):
            raise BackendError(
                f"{self._backend} reads conversations that its own chat_template wrote, got scaffolding {text[end:]!r}"
            )

    def _open(self, role: str) -> None:
        self._check_between()
        self._role, self._content = role, []

    def _close(self) -> None:
        if self._role is None:
            raise BackendError(f"{self._backend} was given the end of a turn that had no beginning")
        self._turns.append(Message(self._role, tuple(self._content)))
        self._role, self._content = None, []

    def end(self) -> Conversation | PlainText:
        content = tuple(self._content)
        match self._role:
            case "assistant":
                return Conversation(tuple(self._turns), content)
            case None if not self._turns:
                return PlainText(content)
            case None:
                self._check_between()
                raise CapabilityError(
                    f"{self._backend} answers in an assistant turn, and here the text to be generated stands behind "
                    "the last turn; write assistant(gen(...))"
                )
            case role:
                raise CapabilityError(
                    f"{self._backend} writes assistant turns only, and here the text to be generated stands inside "
                    f"{role}(...); write it inside assistant(...), or run the program on a Runtime or on a completion "
                    "model"
                )

    def _check_between(self) -> None:
        said = text_of(self._content)
        if said.strip():
            raise CapabilityError(
                f"{self._backend} takes turns of a conversation, and the text {said[:60]!r} stands outside of them; "
                "write it inside system(...), user(...) or assistant(...)"
            )


CONTINUE_TURN = (
    "Continue your last message exactly where it stops. Write only what comes next, without repeating anything."
)
CONTINUE_TEXT = (
    "You continue texts. The user gives the beginning of a text; answer with what comes next in it. "
    "Begin exactly where it stops, repeat nothing of it, and write only what comes next."
)


def ask_to_continue_turn(conversation: Conversation) -> tuple[Message, ...]:
    """Writes the turns of a call that continues an assistant turn; of an ordinary call if it is empty."""
    if not conversation.begun:
        return conversation.turns
    return (*conversation.turns, Message("assistant", conversation.begun), message("user", CONTINUE_TURN))


def ask_to_continue_text(text: PlainText) -> tuple[Message, ...]:
    """Writes the turns of a call that continues a text outside of roles."""
    return (message("system", CONTINUE_TEXT), Message("user", text.content))


def asked_to_continue(messages: tuple[Message, ...]) -> Conversation | PlainText:
    """Parses a chat request that asks to continue: the inverse of both."""
    match messages:
        case (Message("system") as asked, Message("user", content)) if asked.text == CONTINUE_TEXT:
            return PlainText(content)
        case (*turns, Message("assistant", content), Message("user") as asked) if asked.text == CONTINUE_TURN:
            return Conversation(tuple(turns), content)
        case _:
            return Conversation(messages, ())


def continuation_warning(backend: str) -> str:
    """Returns the warning, shown once, that a chat model is asked to continue a text."""
    return (
        f"{backend} is a chat model, and this program writes text outside of roles: the model is asked to continue it, "
        "which it does less reliably than a completion model; write user(...) and assistant(gen(...)), or give a "
        "completion model"
    )


_TYPES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


def media_type(part: Media, backend: str) -> str:
    """The MIME type of an image, read from its first bytes.

    Raises:
        CapabilityError: a video, or a format that hosted models do not take.
    """
    if part.kind != "image":
        raise CapabilityError(f"{backend} takes images and no {part.kind}; give single frames with image(...)")
    for beginning, kind in _TYPES:
        if part.data.startswith(beginning):
            return kind
    if part.data[:4] == b"RIFF" and part.data[8:12] == b"WEBP":
        return "image/webp"
    raise CapabilityError(f"{backend} takes PNG, JPEG, GIF and WebP images; convert this one, which is none of them")


def in_base64(part: Media) -> str:
    return base64.b64encode(part.data).decode("ascii")


PER_MESSAGE = 8  # tokens around each: 3 or 4 with OpenAI's models, more with some open ones
_ASKING = len(CONTINUE_TEXT) + len(CONTINUE_TURN) + 2 * PER_MESSAGE  # of a request to continue, in bytes


def token_counter(model: str) -> Callable[[str], int]:
    """Returns a function that counts tokens, exactly if the tokenizer is installed. Blocks: it may read a file."""
    try:
        # Any: an optional package without types. The interpreter's own dependencies do not hold it.
        encoding: Any = importlib.import_module("tiktoken").encoding_for_model(model)
    except Exception:  # not installed, a model that it does not know, or a file that it could not fetch
        return count_bytes
    return lambda text: len(encoding.encode_ordinary(text))


def count_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def conversation_tokens_at_most(parts: Iterable[Part], count: Callable[[str], int], image_tokens: int) -> int:
    """Returns a bound on the tokens of a conversation. It includes a request to continue, unless the prompt ends with
    scaffolding: then an answer begins, and nothing is continued."""
    bound = PER_MESSAGE
    last: Part | None = None
    for part in parts:
        last = part
        if isinstance(part, Media):
            bound += image_tokens
        else:
            bound += count(part.text) + PER_MESSAGE
    return bound if isinstance(last, Text) and last.control else bound + _ASKING


def text_tokens_at_most(parts: Iterable[Part], count: Callable[[str], int]) -> int:
    """Returns a bound on the tokens of a prompt that is sent as it is, to be completed; images are not."""
    return PER_MESSAGE + count("".join(part.text for part in parts if not isinstance(part, Media)))
