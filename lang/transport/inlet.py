"""Reads a ZeroMQ socket on an event loop as messages arrive, without polling.

Both ends of the link read this way, so it is in `lang`; the socket is an argument. A plain socket with its descriptor
on the loop costs a third of what the asyncio wrapper's futures and timers do, and nothing at all while it is silent.

The descriptor is an edge, not a level: it becomes readable once, and reading or sending on the socket may swallow
that. So `Inlet` reads until nothing is left when it is woken, and looks again after a send.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

READ_AT_ONCE = 256  # messages; then others get their turn


# Of zmq's constants, so that this module does without the library.
_DESCRIPTOR, _EVENTS, _POLLIN, _NOBLOCK = 14, 15, 1, 1
_LINGER, _LARGEST_FRAME, _SEND_QUEUE, _RECEIVE_QUEUE = 17, 22, 23, 24


class Configurable(Protocol):
    """The part of a new `zmq.Socket` that is used here."""

    def setsockopt(self, option: int, value: int) -> None: ...


SocketType = TypeVar("SocketType", bound=Configurable)


def prepare(socket: SocketType, largest: int) -> SocketType:
    """A new socket with the settings that every socket of ours has: nothing is dropped for a full queue, closing never
    waits, and a peer that announces a frame of more than `largest` bytes is cut off before the frame is read."""
    for option in (_SEND_QUEUE, _RECEIVE_QUEUE, _LINGER):
        socket.setsockopt(option, 0)
    socket.setsockopt(_LARGEST_FRAME, largest)
    return socket


class Readable(Protocol):
    """The part of a `zmq.Socket` that is used here."""

    def getsockopt(self, option: int) -> Any: ...  # Any: as the library has it

    def recv_multipart(self, flags: int = 0) -> list[Any]: ...  # Any: bytes, unless asked otherwise

    @property
    def closed(self) -> bool: ...


class Inlet:
    """Reads a socket on the running loop, from now until `close`.

    Args:
        take: is given the socket messages that have come, at most READ_AT_ONCE of them, at least one.
        failed: is given an exception of reading or of `take`; nothing is read after it.
    """

    def __init__(
        self, socket: Readable, take: Callable[[list[list[bytes]]], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._socket = socket
        self._take = take
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(_DESCRIPTOR))
        self._open = True
        self._look_again = False
        self._loop.add_reader(self._descriptor, self._read)
        self.look()

    def look(self) -> None:
        """Read soon if something has come: to be called after a send, and now and then for safety."""
        if self._open and not self._look_again and self._socket.getsockopt(_EVENTS) & _POLLIN:
            self._look_again = True
            self._loop.call_soon(self._read_again)

    def close(self) -> None:
        """Read no more. Before the socket is closed, on its loop."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)

    def _read_again(self) -> None:
        self._look_again = False
        self._read()

    def _read(self) -> None:
        try:
            messages: list[list[bytes]] = []
            while self._open and self._socket.getsockopt(_EVENTS) & _POLLIN:
                messages.append(self._socket.recv_multipart(_NOBLOCK))
                if len(messages) == READ_AT_ONCE:
                    break
            if messages:
                self._take(messages)
                self.look()  # what is said in answer may have swallowed the edge
        except Exception as error:
            self.close()
            self._failed(error)
