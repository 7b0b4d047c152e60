"""The program's end of the socket to a gateway, on one event loop.

The link tracks three things that the socket does not tell: whether the runtime is ready, whether the gateway is
alive, and whether a frame was lost. When the gateway is gone, every request in flight ends with
ConnectionLostError at once.

It samples a gateway that owes an answer (`GatewayHandle.sample`). One that hangs is given up, so that the next request
finds or starts another.
"""

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Callable
from functools import cache

import msgspec
import zmq

from ...lang import __version__
from ...lang.errors import WIRE_ERRORS, BackendError, ConnectionLostError, MissingExtraError, RequestError, UmbelError
from ...lang.status import EngineState, RuntimeHealth, RuntimeState
from ...lang.transport.exchange import Exchange
from ...lang.transport.inlet import Inlet, prepare
from ...lang.transport.link import (
    FRAME_HEADER,
    MAX_FRAME,
    MOST_MESSAGES,
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
from ...lang.transport.process_life import TimeSpent, machine_in_words, read_this_thread
from .runtime_gateway import GatewayHandle

PERIOD = 0.5  # seconds between two samples of a gateway that owes an answer; every other one sends a ping
EXIT_LOOKS = 3  # per period, where the system does not report a process's end

MakeError = Callable[[], UmbelError]


@cache
def _context_of(process_id: int) -> "zmq.Context[zmq.Socket[bytes]]":
    return zmq.Context()


def context() -> "zmq.Context[zmq.Socket[bytes]]":
    """Returns the context of this process, never ended: that would wait for sockets whose loops may be gone."""
    return _context_of(os.getpid())


class Link:
    """Owns one socket to one gateway. Made on a running loop; used and closed on it.

    Args:
        show: called with the phases of the start.
    """

    def __init__(self, gateway: GatewayHandle, show: Callable[[str], None]) -> None:
        self.gateway = gateway
        self._show = show
        self._socket = prepare(context().socket(zmq.DEALER), MAX_FRAME)
        gateway.attach(self._socket)
        self._loop = asyncio.get_running_loop()
        self._counters: Counter[str] = Counter()
        self._codec: Codec[ToGateway] = Codec(ToGateway)
        self._outbound: Outbound[ToGateway] = Outbound(self._codec)
        self._inbound: Inbound[FromGateway] = Inbound(Codec(FromGateway), self._counters)
        self._outbox: list[msgspec.Raw] = []  # messages of this turn of the loop
        self._outbox_bytes = 0
        self._owed = False  # an answer is due since the last ping
        self._stay = TimeSpent()  # since then
        self._phase, self._phase_since = "starting the gateway", self._loop.time()
        self._downloading = False  # the model, which takes as long as it takes
        self._limits: dict[asyncio.Timeout, float] = {}  # of those that wait for the start → seconds
        self._heard = self._loop.time()
        self._pong: Pong | None = None  # the last one, which came at `_ponged`
        self._ponged = self._heard
        self._broken: MakeError | None = None
        self.exchange: Exchange | None = None  # set when the runtime is ready
        self.welcome: Welcome | None = None
        self._decided = asyncio.Event()  # ready, or broken
        self._ended = asyncio.Event()  # broken
        self._inlet = Inlet(self._socket, self._read, self._failed)
        self._exit_descriptor = gateway.exit_descriptor()
        if self._exit_descriptor is not None:
            self._loop.add_reader(self._exit_descriptor, self._look)
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._task_done)
        self._send(Hello(__version__))

    @property
    def broken(self) -> bool:
        return self._broken is not None

    async def ready(self, seconds: float) -> Exchange:
        """Waits until the runtime has made a token.

        Args:
            seconds: at most. They begin anew when a download of the model ends, and do not pass during one.

        Raises:
            TimeoutError: it took longer.
            UmbelError: the runtime could not start.
        """
        async with asyncio.timeout(None if self._downloading else seconds) as limit:
            self._limits[limit] = seconds
            try:
                await self._decided.wait()
            finally:
                del self._limits[limit]
        if self._broken is not None:
            raise self._broken()
        assert self.exchange is not None, "decided and not broken is ready"
        return self.exchange

    async def ended(self) -> None:
        """Waits until the link is broken: its gateway is lost, or it was closed."""
        await self._ended.wait()

    def start_in_words(self) -> str:
        """Returns the phase of the start and its share of the machine, in words for errors."""
        seconds = self._loop.time() - self._phase_since
        share = self.gateway.start_in_words()
        return f"it has been {self._phase} for {seconds:.0f} s, {share}, and {machine_in_words()}"

    def health(self) -> RuntimeHealth:
        """Returns the health of the runtime as this link knows it. Any thread may ask."""
        now = self._loop.time()
        silence = now - self._heard
        if self._broken is not None:
            return RuntimeHealth(RuntimeState.BROKEN, str(self._broken()), silence)
        if self.welcome is None:
            engines = () if self._pong is None else self._pong.replicas
            return RuntimeHealth(RuntimeState.STARTING, f"it is {self._phase}", silence, replicas=engines)
        if self._pong is None:
            return RuntimeHealth(RuntimeState.READY, silence=silence)
        age = self._pong.heartbeat_age
        age = None if age is None else age + now - self._ponged
        replicas = self._pong.replicas
        match self._pong.engine:
            case EngineState.READY:
                return RuntimeHealth(RuntimeState.READY, "", silence, age, replicas)
            case EngineState.STARTING:
                cause = "its engine is gone, and another one starts"
                return RuntimeHealth(RuntimeState.RESTARTING, cause, silence, None, replicas)
            case EngineState.FAILED:
                cause = "its engine could not be started again"
                return RuntimeHealth(RuntimeState.FAILED, cause, silence, None, replicas)

    def break_off(self, make_error: MakeError) -> None:
        """Ends every request, present and later, with this error, and stops reading. The first error counts."""
        if self._broken is not None:
            return
        self._broken = make_error
        self._stop_listening()
        self._decided.set()
        self._ended.set()
        if self.exchange is not None:
            self.exchange.fail(make_error)

    async def close(self) -> None:
        """Tells the gateway and closes. Requests in flight end with an error."""
        if not self.broken:
            self._send(Bye())
            self._flush()
        self.break_off(lambda: BackendError("the runtime was closed"))
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self._socket.close(linger=0)

    def abandon(self) -> None:
        """Frees the socket when its loop is gone."""
        if self._exit_descriptor is not None:
            os.close(self._exit_descriptor)
            self._exit_descriptor = None
        if not self._socket.closed:
            self._socket.close(linger=0)

    # ------------------------------------------------------------------ how

    def _send(self, message: ToGateway) -> None:
        """Queues a message. The messages of one turn of the loop go out as one frame, at its end.

        Raises:
            RequestError: the message is too large for a frame.
            ParameterError: it holds a string that is no text.
            ConnectionLostError: the runtime cannot be reached.
        """
        if self._broken is not None:
            raise self._broken()
        payload = self._codec.encode_one(message)
        size = len(payload) + FRAME_HEADER
        if size > self._codec.max_bytes:
            raise RequestError(
                f"the request has {len(payload)} bytes and {self._codec.max_bytes} are accepted; shorten the prompt, "
                "or make its pictures smaller"
            )
        if self._outbox_bytes + size > self._codec.max_bytes or len(self._outbox) == MOST_MESSAGES:
            self._flush()
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(payload)
        self._outbox_bytes += size

    def _flush(self) -> None:
        if not self._outbox or self._socket.closed:
            return
        messages, self._outbox, self._outbox_bytes = self._outbox, [], 0
        try:
            self._socket.send_multipart(self._outbound.write(messages), flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            reason = str(error)
            self.break_off(lambda: ConnectionLostError(f"the runtime cannot be reached: {reason}"))
        else:
            self._inlet.look()

    def _read(self, frames: list[list[bytes]]) -> None:
        self._owed = False
        self._stay.begin()
        self._heard = self._loop.time()
        for pair in frames:
            try:
                messages = self._inbound.read(pair)
            except FrameError as error:
                self._unreadable(str(error))
                return
            if self._counters["lost"]:  # it is unknown whose answers the frames held
                self.break_off(lambda: ConnectionLostError("messages of the runtime were lost; run again"))
            for message in messages:
                self._hear(message)

    def _hear(self, message: FromGateway) -> None:
        match message:
            case Pong():
                self._pong, self._ponged = message, self._loop.time()
            case Progress(phase, downloading):
                self._set_downloading(downloading)
                if phase != self._phase:
                    self._phase, self._phase_since = phase, self._loop.time()
                self._show(phase)
            case Welcome():
                self.gateway.was_ready = True
                self.welcome, self._pong = message, None
                self.exchange = Exchange(
                    self._send,
                    window=message.max_queue,
                    programs=message.max_programs,
                    longest=message.request_timeout,
                )
                self._decided.set()
            case StartFailed(kind, text):
                self.break_off(lambda: _start_error(kind, text))
            case _ if self.exchange is not None:
                self.exchange.deliver(message)
            case _:
                pass  # it belongs to no request: none is sent before the welcome

    def _set_downloading(self, downloading: bool) -> None:
        """Stops the clocks of those that wait while the model is downloaded, and starts them anew afterwards."""
        if downloading == self._downloading:
            return
        self._downloading = downloading
        for limit, seconds in self._limits.items():
            if limit.expired():
                continue
            limit.reschedule(None if downloading else self._loop.time() + seconds)

    async def _watch(self) -> None:
        """Sends pings, and samples the process of a gateway that owes an answer."""
        looks = 1 if self._exit_descriptor is not None else EXIT_LOOKS
        for turn in itertools.count():
            self._inlet.look()  # this program may have been stopped itself, and the answer be there
            await asyncio.sleep(0)  # it is read first
            if self._owed:
                self._examine()
            elif turn % 2 == 1 and not self.broken:
                self._owed = True
                self._send(Ping())
                self._inlet.look()
            for _ in range(looks):
                self._look()
                if self.broken:
                    return
                await asyncio.sleep(PERIOD / looks)

    def _examine(self) -> None:
        self._stay.look(self._loop.time(), self.gateway.sample(), read_this_thread())
        reason = self.gateway.trouble(self._stay)
        if reason is not None:
            self.gateway.end_hung(f"{reason}; {machine_in_words()}")
            self._look()

    def _look(self) -> None:
        reason = self.gateway.exit_reason()
        if reason is not None:
            self._gone(reason)

    def _unreadable(self, reason: str) -> None:
        self.break_off(lambda: ConnectionLostError(f"the runtime said something unreadable: {reason}"))

    def _stop_listening(self) -> None:
        self._inlet.close()
        if self._exit_descriptor is not None:
            self._loop.remove_reader(self._exit_descriptor)
            os.close(self._exit_descriptor)
            self._exit_descriptor = None

    def _task_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Breaks the link after an error of reading or watching: no request would be answered any more."""
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
