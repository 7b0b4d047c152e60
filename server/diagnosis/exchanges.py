"""Keeps the prompts of recent conversations, so that a later one can be compared with one of them by its id.

An exchange has a digest of every block, by which the part that changed is found, and the prompt itself, by which the
backend counts the tokens that two prompts share. The texts lie in this process's memory, never in a log, up to a number
of bytes. An exchange is found under its own salt only.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import getsizeof

import msgspec

from ...lang.conversations.messages import Message, Option
from ...lang.prompt import Generated, Media, Part
from ...lang.tool_calls import Tool
from ..limits import ALL_EXCHANGES, SALT_EXCHANGES

_SMALLEST = 1_024  # bytes that any exchange takes
_DIGEST = 64  # bytes of a digest with its place in a tuple
_TOKEN = 36  # bytes of the id of a generated token
_PART = 128  # bytes of a part of the prompt without its text


@dataclass(frozen=True, slots=True)
class Exchange:
    """A conversation as it was asked.

    Attributes:
        program: that answers; "" for the model.
        tools, system, messages: a digest of every block, in order. `system` are the messages before all others.
        tools_first: the prompt shows the tools before the system text ends.
        prompt: () for a program, which makes its own.
    """

    program: str
    tools: tuple[bytes, ...]
    system: tuple[bytes, ...]
    messages: tuple[bytes, ...]
    options: Mapping[str, Option]
    tools_first: bool
    prompt: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        digests = len(self.tools) + len(self.system) + len(self.messages)
        return _SMALLEST + _DIGEST * digests + sum(map(_part_size, self.prompt))


class Exchanges:
    """The last exchanges of each salt. The oldest give way, first those of their own salt.

    Args:
        salt_bytes: of one salt.
        all_bytes: of all, at least those of one; beyond them the salts that have asked longest ago are given up.
    """

    def __init__(self, salt_bytes: int = SALT_EXCHANGES, all_bytes: int = ALL_EXCHANGES) -> None:
        self._salt_bytes = salt_bytes
        self._all_bytes = all_bytes
        self._salts: OrderedDict[str, OrderedDict[str, Exchange]] = OrderedDict()
        self._sizes: dict[str, int] = {}  # by salt
        self._size = 0  # of all

    def takes(self, exchange: Exchange) -> bool:
        """Returns whether an exchange is small enough to be kept."""
        return exchange.size <= self._salt_bytes

    def keep(self, salt: str, name: str, exchange: Exchange) -> None:
        """Keeps an exchange under the id of its answer, unless it is too large."""
        if not self.takes(exchange):
            return
        kept = self._salts.setdefault(salt, OrderedDict())
        self._salts.move_to_end(salt)
        kept[name] = exchange
        before = self._sizes.get(salt, 0)
        size = before + exchange.size
        while size > self._salt_bytes:
            size -= kept.popitem(last=False)[1].size
        self._sizes[salt] = size
        self._size += size - before
        while self._size > self._all_bytes:
            self._size -= self._sizes.pop(self._salts.popitem(last=False)[0])

    def find(self, salt: str, name: str) -> Exchange | None:
        """Returns the exchange of an answer of this salt; None for one that is not known."""
        kept = self._salts.get(salt)
        return None if kept is None else kept.get(name)


def _part_size(part: Part) -> int:
    match part:
        case Media(data=data):
            return _PART + len(data)
        case Generated(text=text, token_ids=token_ids):
            return _PART + getsizeof(text) + _TOKEN * len(token_ids)
        case _:
            return _PART + getsizeof(part.text)  # a character takes 1 to 4 bytes


def digests_of_messages(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """Returns a digest for the beginning of every message, and for every block and call of it.

    A message to which a block is added keeps the digests that it had. Reasoning is left out, as templates do.
    """
    return tuple(_message_digests(messages))


def digests_of_tools(tools: Sequence[Tool]) -> tuple[bytes, ...]:
    """Returns a digest for every tool, all of its fields included."""
    return tuple(_digest(tool.name, tool.description, msgspec.json.encode(tool.parameters).decode()) for tool in tools)


def _message_digests(messages: Sequence[Message]) -> Iterator[bytes]:
    for message in messages:
        yield _digest("message", message.role, message.name, message.call_id)
        for block in message.content:
            match block:
                case Media(digest=digest):
                    yield _digest("media", digest)
                case Generated(text=text) | str(text):
                    yield _digest("text", text)
        for call in message.calls:
            yield _digest("call", call.name, call.arguments, call.id)


def _digest(*texts: str) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()
