"""The gateway's end of one engine process: the process, two sockets, numbered frames."""

import asyncio
import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from ...lang.runtime_options import RuntimeOptions
from ...lang.transport.inlet import Inlet, prepare
from ...lang.transport.link import FrameError, Inbound, Outbound
from ..core.config import MAX_ENGINE_FRAME, MAX_PULSE_FRAME
from ..core.messages import EngineFrame, EngineStart, ToEngine, from_engine_codec, to_engine_codec
from .engine_process import EngineProcess


class EngineClient:
    """Talks to one engine process, on one loop. A restart is another object with other addresses.

    Args:
        on_events: called with the engine's messages; unreadable frames are counted.
        on_heartbeats: called with its heartbeats.
        on_error: called with an exception of reading, or of one of these two.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        folder: Path,
        generation: int,
        *,
        on_events: Callable[["EngineClient", list[EngineFrame]], None],
        on_heartbeats: Callable[["EngineClient", list[EngineFrame]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._lost = 0
        self._paths = folder / f"engine-{generation}", folder / f"pulse-{generation}"
        self._rendezvous = folder / f"ranks-{generation}"
        self._events = prepare(context.socket(zmq.PAIR), MAX_ENGINE_FRAME)
        self._pulse = prepare(context.socket(zmq.PULL), MAX_PULSE_FRAME)
        for socket, path in zip((self._events, self._pulse), self._paths, strict=True):
            socket.bind(f"ipc://{path}")
        inbound: Inbound[EngineFrame] = Inbound(from_engine_codec(), self.counters)
        pulse_inbound: Inbound[EngineFrame] = Inbound(from_engine_codec(), Counter())  # lost beats are not counted
        self._outbound: Outbound[ToEngine] = Outbound(to_engine_codec())
        self._outbox: list[ToEngine] = []
        self._process: EngineProcess | None = None
        self._inlets = (
            Inlet(self._events, lambda messages: on_events(self, _read(messages, inbound)), on_error),
            Inlet(self._pulse, lambda messages: on_heartbeats(self, _read(messages, pulse_inbound)), on_error),
        )

    def start(self, options: RuntimeOptions, process: EngineProcess | None = None, replica: int = 0) -> None:
        """Takes a process that waits for its first line, or starts one. Raises OSError when none can be made.

        Args:
            replica: its number among the engines of the gateway.
        """
        self._process = process or EngineProcess()
        events, pulse = (f"ipc://{path}" for path in self._paths)
        start = EngineStart(os.getpid(), events, pulse, str(self._rendezvous), options, replica)
        self._process.tell(msgspec.json.encode(start))

    @property
    def process_id(self) -> int | None:
        return self._process.process_id if self._process is not None else None

    async def exit_reason(self) -> str:
        """Waits for the exit → the reason, in words."""
        process, loop = self._process, asyncio.get_running_loop()
        assert process is not None, "waiting for a process that was not started"
        exited: asyncio.Future[str] = loop.create_future()

        def note(reason: str) -> None:
            if not exited.done():
                exited.set_result(reason)

        def wait() -> None:
            reason = process.wait()
            with contextlib.suppress(RuntimeError):  # the loop has ended first
                loop.call_soon_threadsafe(note, reason)

        # A thread of its own: a loop that ends waits for the threads of its executor.
        threading.Thread(target=wait, name="engine exit", daemon=True).start()
        return await exited

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    # ------------------------------------------------------------------ messages

    def send(self, message: ToEngine) -> None:
        """Queues a message; `flush` sends the queue as one frame."""
        self._outbox.append(message)

    def flush(self) -> None:
        if self._outbox:
            messages, self._outbox = self._outbox, []
            for frames in self._outbound.write_all(messages):
                try:
                    self._events.send_multipart(frames, flags=zmq.NOBLOCK)  # no high-water mark: it never waits
                except zmq.Again:
                    # The engine is dead. Its exit will be reported soon, and ends its requests.
                    break
            self._inlets[0].look()

    def look(self) -> None:
        """Reads the frames that are there, in case an event of a socket was missed."""
        for inlet in self._inlets:
            inlet.look()

    def lost(self) -> int:
        """Returns the number of frames lost since the last call."""
        before, self._lost = self._lost, self.counters["lost"]
        return self._lost - before

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        for inlet in self._inlets:
            inlet.close()
        for socket in (self._events, self._pulse):
            socket.close(linger=0)
        for path in (*self._paths, self._rendezvous):
            path.unlink(missing_ok=True)


def _read(frames: list[list[bytes]], inbound: Inbound[EngineFrame]) -> list[EngineFrame]:
    messages: list[EngineFrame] = []
    for pair in frames:
        with contextlib.suppress(FrameError):  # counted by the reader
            messages += inbound.read(pair)
    return messages
