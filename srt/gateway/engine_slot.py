"""The place of one engine: a process after the other, each with its client, and the supervision of all of them.

GatewayServer ─┬─ EngineSlot 0 ── EngineClient ◀─▶ engine process     replaced when it ends or hangs
               └─ EngineSlot 1 ── EngineClient ◀─▶ engine process
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from ...lang.runtime_options import RuntimeOptions
from ...lang.transport.process_life import machine_in_words, read_process, read_this_thread
from ..core.config import SupervisionLimits
from ..core.instruments import Clock
from ..core.messages import EngineEnd, EngineFrame, EngineReady, EngineStartFailed, Heartbeat, ToEngine
from .engine_client import EngineClient
from .engine_process import EngineProcess
from .supervisor import EngineLife, Kill, Start, StartFailure, Supervisor

log = logging.getLogger("umbel.gateway")


class EngineSlot:
    """Starts, observes and replaces the engine of one place. Made on a running loop.

    Args:
        index: its number among the engines.
        generations: numbers for engines, of which no two of any slot are equal: sockets are named by them.
        waiting: a process for the first engine.
        on_frames: called with the number of frames that were lost, and with messages of the engine.
        on_heartbeats: called with its heartbeats.
        on_gone: called when a process has ended, with the reason and with whether it was ready.
        on_error: called with an exception that leaves clients unanswered.
    """

    def __init__(
        self,
        index: int,
        context: "zmq.Context[zmq.Socket[bytes]]",
        folder: Path,
        options: RuntimeOptions,
        *,
        clock: Clock,
        limits: SupervisionLimits,
        generations: Iterator[int],
        waiting: EngineProcess | None,
        on_frames: Callable[["EngineSlot", int, list[EngineFrame]], None],
        on_heartbeats: Callable[["EngineSlot", list[Heartbeat]], None],
        on_gone: Callable[["EngineSlot", str, bool], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.index = index
        self.ready: EngineReady | None = None  # of the engine that runs
        self._context = context
        self._folder = folder
        self._options = options
        self._supervisor = Supervisor(clock, limits)
        self._generations = generations
        self._waiting = waiting
        self._on_frames = on_frames
        self._on_heartbeats = on_heartbeats
        self._on_gone = on_gone
        self._on_error = on_error
        self._client: EngineClient | None = None
        self._ended_because: str | None = None  # set when the gateway ended it
        self._is_ending = False  # it was asked to end
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def process_id(self) -> int | None:
        process = self._client or self._waiting
        return None if process is None else process.process_id

    @property
    def is_down(self) -> bool:
        """Whether there is no process, and another one is to be started."""
        return self._supervisor.life is EngineLife.DOWN

    @property
    def failure(self) -> StartFailure | None:
        """Why no more engine will be started here; None while one may be."""
        return self._supervisor.failure

    # ------------------------------------------------------------------ messages

    def send(self, message: ToEngine) -> None:
        """Queues a message; `flush` sends it."""
        assert self._client is not None, "the core sends only to an engine that is ready"
        self._client.send(message)

    def flush(self) -> None:
        if self._client is not None:
            self._client.flush()

    def end(self) -> bool:
        """Asks an engine that is ready to save its cache and to end → whether there is one. Nothing starts after it."""
        self._is_ending = True
        if self._client is None or self.ready is None:
            return False
        self._client.send(EngineEnd())
        self._client.flush()
        return True

    def look(self) -> None:
        """Reads the messages that are there."""
        if self._client is not None:
            self._client.look()

    def _read(self, client: EngineClient, messages: list[EngineFrame]) -> None:
        if self._client is not client:
            return
        for message in messages:
            if isinstance(message, EngineReady):
                self._supervisor.ready()
                self.ready = message
            elif isinstance(message, EngineStartFailed):
                self._supervisor.start_failed(StartFailure(message.kind, message.message))
        self._on_frames(self, client.lost(), messages)

    def _read_heartbeats(self, client: EngineClient, messages: list[EngineFrame]) -> None:
        if self._client is not client:
            return
        beats = [message for message in messages if isinstance(message, Heartbeat)]
        for beat in beats:
            self._supervisor.heartbeat(beat.step, busy=beat.running + beat.waiting > 0)
        self._on_heartbeats(self, beats)

    # ------------------------------------------------------------------ supervision

    def supervise(self, *, may_start: bool) -> None:
        """Samples the process where that is needed, and carries out what the supervisor decides."""
        if self._client is not None and self._supervisor.wants_readings and self._client.process_id is not None:
            self._supervisor.observe(read_process(self._client.process_id), read_this_thread())
        match self._supervisor.decide():
            case Start() if may_start and not self._is_ending:
                self._start()
            case Kill(reason):
                assert self._client is not None, "an engine that is up has a process"
                self._ended_because = f"{reason}; {machine_in_words()}"
                self._client.kill()
            case Start() | None:
                pass

    def _start(self) -> None:
        self._ended_because = None
        client = self._client = EngineClient(
            self._context,
            self._folder,
            next(self._generations),
            on_events=self._read,
            on_heartbeats=self._read_heartbeats,
            on_error=self._on_error,
        )
        self._supervisor.started()
        process, self._waiting = self._waiting, None
        try:
            client.start(self._options, process, self.index)
        except OSError as error:
            self._gone(client, f"no process could be made: {error.strerror}")
            return
        task = asyncio.create_task(self._wait_for_exit(client))
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_error(error)

    async def _wait_for_exit(self, client: EngineClient) -> None:
        reason = await client.exit_reason()
        self._gone(client, self._ended_because or reason)

    def _gone(self, client: EngineClient, reason: str) -> None:
        explained = self._supervisor.start_explained or self._is_ending
        level = logging.INFO if explained else logging.ERROR  # the clients get the reason then
        which = f" {self.index}" if self._options.replicas > 1 else ""
        log.log(level, "the engine%s is gone: %s", which, reason)
        was_ready = self._supervisor.life is EngineLife.READY
        self._client = self.ready = None
        client.close()
        self._supervisor.exited(reason)
        self._on_gone(self, reason, was_ready)
