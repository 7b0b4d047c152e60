"""A program's end of the socket to the gateway, on one event loop.

It knows three things the socket does not tell: whether the runtime is ready, whether the gateway is
still alive (its process, and its answers), and whether a frame was lost. When the gateway is gone,
every request in flight ends with ConnectionLostError at once.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import zmq
import zmq.asyncio

from ...lang.errors import WIRE_ERRORS, BackendError, ConnectionLostError, MissingExtraError, RequestError, UmbelError
from ...lang.exchange import Exchange
from ...lang.link import (
    Bye,
    Codec,
    FrameError,
    FromGateway,
    Hello,
    Inbound,
    Outbound,
    Ping,
    Pong,
    Progress,
    StartFailed,
    ToGateway,
    Welcome,
)
from .runtime_process import GatewayProcess

POLL = 500  # milliseconds: no receive without a timeout
READ_AT_ONCE = 256
LOOK = 0.2  # seconds between looks at the process
PING_EVERY = 5  # looks
SILENT_LOOKS = 100  # looks without any answer: hung. Counted, not timed: a stopped program is not a dead gateway

MakeError = Callable[[], UmbelError]


@cache
def _context_of(process_id: int) -> zmq.asyncio.Context:
    return zmq.asyncio.Context()


def _context() -> zmq.asyncio.Context:
    """One per process, never ended: ending one waits for sockets whose loops may be gone. None survives a fork."""
    return _context_of(os.getpid())


class Link:
    """One socket to one gateway. Made on a running loop; used and closed on it.

    Args:
        show: told the phases of the start.
    """

    def __init__(self, process: GatewayProcess, show: Callable[[str], None]) -> None:
        self.process = process
        self._show = show
        self._socket = _context().socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.connect(process.address)
        self._counters: Counter[str] = Counter()
        self._codec: Codec[ToGateway] = Codec(ToGateway)
        self._outbound: Outbound[ToGateway] = Outbound(self._codec)
        self._inbound: Inbound[FromGateway] = Inbound(Codec(FromGateway), self._counters)
        self._silent = 0  # looks since the last answer
        self._broken: MakeError | None = None
        self.exchange: Exchange | None = None  # from when the runtime is ready
        self.welcome: Welcome | None = None
        self._decided = asyncio.Event()  # ready, or broken
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._task_done)
        self._send(Hello())

    @property
    def broken(self) -> bool:
        return self._broken is not None

    async def ready(self) -> Exchange:
        """Waits until the runtime has made a token. Raises the error that kept it from starting."""
        await self._decided.wait()
        if self._broken is not None:
            raise self._broken()
        assert self.exchange is not None, "decided and not broken is ready"
        return self.exchange

    def break_off(self, make_error: MakeError) -> None:
        """From now on every request ends with this error. The first one counts."""
        if self._broken is not None:
            return
        self._broken = make_error
        self._decided.set()
        if self.exchange is not None:
            self.exchange.fail(make_error)

    async def close(self) -> None:
        """Leave. What is in flight ends with an error."""
        if not self.broken:
            self._send(Bye())
        self.break_off(lambda: BackendError("the runtime was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=0)

    def abandon(self) -> None:
        """Free the socket when its loop is gone."""
        if not self._socket.closed:
            zmq.Socket.close(self._socket, linger=0)  # the asyncio part of it needs a loop that lives

    # ------------------------------------------------------------------ how

    def _send(self, message: ToGateway) -> None:
        number, payload = self._outbound.write([message])
        if len(payload) > self._codec.max_bytes:
            raise RequestError(
                f"the request has {len(payload)} bytes and {self._codec.max_bytes} are accepted; shorten the prompt"
            )
        sending: Any = self._socket.send_multipart((number, payload), flags=zmq.NOBLOCK)  # Any: a future
        if sending.done() and (error := sending.exception()) is not None:
            raise ConnectionLostError(f"the runtime cannot be reached: {error}")

    async def _receive(self) -> None:
        while True:
            if not await self._socket.poll(POLL):
                continue
            for _ in range(READ_AT_ONCE):
                try:
                    frames = await self._socket.recv_multipart(flags=zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._read(frames)

    def _read(self, frames: list[bytes]) -> None:
        self._silent = 0
        try:
            messages = self._inbound.read(frames)
        except FrameError as error:
            reason = str(error)
            self.break_off(lambda: ConnectionLostError(f"the runtime said something unreadable: {reason}"))
            return
        if self._counters["lost"]:  # nobody knows whose answers they held
            self.break_off(lambda: ConnectionLostError("messages of the runtime were lost; run again"))
        for message in messages:
            self._hear(message)

    def _hear(self, message: FromGateway) -> None:
        match message:
            case Pong():
                pass
            case Progress(phase):
                self._show(phase)
            case Welcome():
                self.welcome = message
                self.exchange = Exchange(self._send, window=message.max_queue, longest=message.request_timeout)
                self._decided.set()
            case StartFailed(kind, text):
                self.break_off(lambda: _start_error(kind, text))
            case _ if self.exchange is not None:
                self.exchange.deliver(message)
            case _:
                pass  # an answer to nobody: nothing is asked before the welcome

    async def _watch(self) -> None:
        looks = 0
        while not self.broken:
            reason = self.process.exit_reason()
            if reason is None and self._silent > SILENT_LOOKS:
                reason = f"it has not answered for {SILENT_LOOKS * LOOK:.0f} s"
            if reason is not None:
                self._gone(reason)
                self._tasks[0].cancel()  # nothing will be read any more
                return
            looks += 1
            self._silent += 1
            if looks % PING_EVERY == 0:
                self._send(Ping())
            await asyncio.sleep(LOOK)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """Without these tasks nothing would ever be answered: their failure is the link's."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            reason = f"{type(error).__name__}: {error}"
            self.break_off(lambda: ConnectionLostError(f"the link to the runtime failed: {reason}"))

    def _gone(self, reason: str) -> None:
        when = "while it started" if self.welcome is None else "while requests were running"
        self.break_off(lambda: ConnectionLostError(f"the runtime's gateway is gone {when}: {reason}; run it again"))


def _start_error(kind: str, message: str) -> UmbelError:
    if kind == MissingExtraError.__name__:
        error = MissingExtraError.__new__(MissingExtraError, message)  # its message is made already
        return error
    return WIRE_ERRORS.get(kind, BackendError)(message)
