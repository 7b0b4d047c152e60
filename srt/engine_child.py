"""One life of the engine as the gateway sees it: a process, two sockets, numbered frames."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from ..lang.link import FrameError, Inbound, Outbound
from ..lang.runtime_options import RuntimeOptions
from .config import engine_environment
from .engine_protocol import ToEngine
from .wire import EngineFrame, EngineStart, from_engine_codec, to_engine_codec

READ_AT_ONCE = 256  # frames; then others get their turn
POLL = 200  # milliseconds: no receive without a timeout


class EngineChild:
    """Started once, closed once. A restart is another object with other addresses."""

    def __init__(self, context: zmq.asyncio.Context, folder: Path, generation: int, counters: Counter[str]) -> None:
        self.counters = counters
        self._lost = counters["lost"]
        self._paths = folder / f"engine-{generation}", folder / f"pulse-{generation}"
        self._events = context.socket(zmq.PAIR)
        self._pulse = context.socket(zmq.PULL)
        for socket, path in zip((self._events, self._pulse), self._paths, strict=True):
            for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
                socket.setsockopt(option, 0)
            socket.bind(f"ipc://{path}")
        self._inbound: Inbound[EngineFrame] = Inbound(from_engine_codec(), counters)
        self._pulse_inbound: Inbound[EngineFrame] = Inbound(from_engine_codec(), Counter())  # a lost beat is none
        self._outbound: Outbound[ToEngine] = Outbound(to_engine_codec())
        self._outbox: list[ToEngine] = []
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, options: RuntimeOptions) -> None:
        """Raises OSError when no process can be made."""
        events, pulse = (f"ipc://{path}" for path in self._paths)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "umbel.srt.engine_process"),
            stdin=asyncio.subprocess.PIPE,
            env=engine_environment(),
            stdout=2,  # what libraries print is no part of the program's output
        )
        assert self._process.stdin is not None
        start = EngineStart(os.getpid(), events, pulse, options)
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def exit_reason(self) -> str:
        """Waits for the exit → what it was, in words."""
        assert self._process is not None, "waiting for a process that was not started"
        code = await self._process.wait()
        if code >= 0:
            return f"its process ended with status {code}"
        name = signal.Signals(-code).name
        hint = " (out of memory, perhaps)" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}"

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    # ------------------------------------------------------------------ messages

    def send(self, message: ToEngine) -> None:
        """Queue a message; `flush` sends what is queued as one frame."""
        self._outbox.append(message)

    def flush(self) -> None:
        if self._outbox:
            frames, self._outbox = self._outbound.write(self._outbox), []
            self._events.send_multipart(frames, flags=zmq.NOBLOCK)  # no high-water mark: it never waits

    async def events(self) -> list[EngineFrame]:
        """What the engine says next; empty when it has been silent for a moment. Unreadable frames are counted."""
        return await _read(self._events, self._inbound)

    def lost(self) -> int:
        """Frames that did not arrive, since this was asked last."""
        before, self._lost = self._lost, self.counters["lost"]
        return self._lost - before

    async def beats(self) -> list[EngineFrame]:
        return await _read(self._pulse, self._pulse_inbound)

    def close(self) -> None:
        for socket in (self._events, self._pulse):
            socket.close(linger=0)
        for path in self._paths:
            path.unlink(missing_ok=True)


async def _read(socket: zmq.asyncio.Socket, inbound: Inbound[EngineFrame]) -> list[EngineFrame]:
    messages: list[EngineFrame] = []
    if not await socket.poll(POLL):
        return messages
    for _ in range(READ_AT_ONCE):
        try:
            frames = await socket.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            break
        with contextlib.suppress(FrameError):  # counted by the reader
            messages += inbound.read(frames)
    return messages
