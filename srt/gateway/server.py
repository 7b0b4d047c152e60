"""The gateway process: sockets, the tokenizer, and the supervision of engines around a `Gateway`.

    program ── DEALER ──▶ ROUTER ┐                     ┌ PAIR ◀─▶ PAIR ── engine process, one for each replica
    program ── DEALER ──▶        ├─ Gateway (one loop) ┤
                                 ┘                     └ PULL ◀── PUSH    its heartbeats

Everything runs on one event loop, so one thread uses the `Gateway`. There is no polling: sockets are event-driven, and
the supervision sleeps until the next deadline. The process ends when its standard input is closed, that is, when its
parent closes it or dies, and removes the folder of the sockets.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from ...lang import __version__
from ...lang.chat_template import ChatTemplate
from ...lang.errors import BackendError, CapabilityError, EngineError, OverloadedError, ParameterError, UmbelError
from ...lang.programs import RunProgram
from ...lang.protocol import Abort, Failure, Hint, Release, VectorInfo
from ...lang.runtime_options import CLIENTS_SOCKET, SAVE_SECONDS, GatewayStart, RuntimeOptions
from ...lang.status import EngineState
from ...lang.transport.exchange import Outgoing
from ...lang.transport.keys import Listen
from ...lang.transport.lifeline import read_line, watch
from ...lang.transport.link import (
    Bye,
    FrameError,
    FromGateway,
    Hello,
    Ping,
    Pong,
    Progress,
    StartFailed,
    ToGateway,
    Welcome,
)
from ..constraints.compiler import CompiledCache
from ..constraints.compiler_process import CompilerProcess
from ..core.config import CompilerLimits, GatewayLimits, PictureLimits, SupervisionLimits
from ..core.environment import fault_hook
from ..core.instruments import SystemClock
from ..core.messages import (
    CacheEvents,
    EngineFrame,
    EnginePhase,
    EngineReady,
    EngineSnapshot,
    EngineStartFailed,
    Heartbeat,
)
from ..launch import fetch_model, may_be_remote, open_tokenizer
from ..multimodal.cache import PictureCache, ThreadedDigests
from ..multimodal.decode import DecoderProcess
from ..multimodal.format import PictureFormat, most_tokens
from ..tokenizer.prompt import CACHE_BYTES
from ..tokenizer.tokenizer import Tokenizer, vocabulary_info
from .calls import Client
from .clients import Clients, Connection, LongPrompts, Received, Router
from .engine_process import EngineProcess
from .engine_slot import EngineSlot
from .gateway import Gateway
from .kv_events import KVEventPublisher
from .programs import Programs, capabilities_of
from .remote import Admission, CurveRouter, Ownership, of_the_owner, open_port
from .supervisor import StartFailure


class Startup:
    """Tracks the start of the runtime, and answers the clients that wait for its end."""

    def __init__(self, clients: Clients, options: RuntimeOptions, limits: GatewayLimits) -> None:
        self._clients = clients
        self._options = options
        self._limits = limits
        self._phase, self._downloading = "starting the engine", False
        self._model = ""
        self._tokenizer: Tokenizer | None = None
        self._image_tokens = 0
        self._vectors = VectorInfo()
        self.engine: EngineReady | None = None  # of an engine that runs; of several any
        self.failure: StartFailure | None = None  # why there will be no engine
        self.listens_on = ""

    def greet(self, connection: Connection) -> None:
        """Answers a client that asks whether the runtime is ready, now or when it is known."""
        connection.waits_for_welcome = True
        self._clients.deliver(connection.client.identity, Progress(self._phase, self._downloading))
        self._answer()

    def enter(self, phase: str, *, downloading: bool = False) -> None:
        """Reports another phase of the start to the clients that wait."""
        self._phase, self._downloading = phase, downloading
        for connection in self._clients.waiting():
            self._clients.deliver(connection.client.identity, Progress(phase, downloading))

    def tokenizer_loaded(self, model: str, tokenizer: Tokenizer, image_tokens: int, vectors: VectorInfo) -> None:
        """Takes the model. `image_tokens`: of a picture at most; 0 for a model that reads text only."""
        self._model, self._tokenizer, self._image_tokens = model, tokenizer, image_tokens
        self._vectors = vectors
        self._answer()

    def engine_ready(self, ready: EngineReady) -> None:
        """Takes the facts of an engine, when the gateway is ready."""
        self.engine = ready
        self._answer()

    def engines_gone(self) -> None:
        """Notes that no engine is ready any more."""
        self.engine = None
        self.enter("starting the engine again")

    def fail(self, failure: StartFailure) -> None:
        """Reports that there will be no engine."""
        self.failure = failure
        self._answer()

    def _answer(self) -> None:
        """Tells each waiting client once whether the runtime is ready, or why it failed; nothing while it starts."""
        answer: FromGateway
        if self.failure is not None:
            answer = StartFailed(self.failure.kind, self.failure.message)
        elif self.engine is not None and self._tokenizer is not None:
            answer = Welcome(
                model=self._model,
                context_length=self.engine.context_length,
                vocabulary=vocabulary_info(self._tokenizer, self.engine.vocab_size),
                pool_tokens=self.engine.pool_tokens,
                max_queue=self._limits.max_queue,
                request_timeout=self._limits.request_timeout,
                chat_template=self._tokenizer.chat_template,
                template_tokens=self._tokenizer.template_tokens,
                max_programs=self._limits.max_programs,
                image_tokens=self._image_tokens,
                options=self._options,
                listens_on=self.listens_on,
                vectors=self._vectors,
            )
        else:
            return
        for connection in self._clients.waiting():
            connection.waits_for_welcome = False
            self._clients.deliver(connection.client.identity, answer)


log = logging.getLogger("umbel.gateway")
END_GRACE = 1.0  # seconds that engines have beyond SAVE_SECONDS, before they are killed


class GatewayServer:
    """Connects one `Gateway` to its clients and its engines. Made on a running loop.

    It is ready when its engines are: at the first start all of them, or those that are within some seconds after the
    first; later any. An engine that cannot start is given up alone.

    Args:
        umask: of the user, for a model that is downloaded into a cache that other programs share.
        waiting: a process for the first engine.
    """

    def __init__(self, start: GatewayStart, umask: int, waiting: EngineProcess | None) -> None:
        self._options = start.options
        self._program_host = start.program_host
        self._listen = start.listen
        self._admission: Admission | None = None  # with the port
        self._folder = Path(start.folder)
        self._clock = SystemClock()
        self._limits = GatewayLimits(max_queue=start.options.max_queue, request_timeout=start.options.request_timeout)
        self._supervision = SupervisionLimits(start_timeout=start.startup_timeout)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._clients = Clients(
            self._context,
            self._folder / CLIENTS_SOCKET,
            self._limits.max_clients,
            clock=self._clock,
            on_frames=self._on_client_frames,
            on_error=_end_process,
        )
        self._core: Gateway | None = None  # once the tokenizer is loaded
        self._publisher: KVEventPublisher | None = None  # with kv_events
        self._long_prompts: LongPrompts | None = None  # with the core
        self._programs: Programs | None = None  # with the core
        self._compiler = CompilerProcess(CompilerLimits(), self._flush)
        self._decoder = DecoderProcess(PictureLimits(), self._flush)
        self._startup = Startup(self._clients, self._options, self._limits)
        self._engines = self._new_slots(waiting)
        self._umask = umask
        self._model_is_here = not may_be_remote(start.options)  # no engine starts before
        self._stirred = asyncio.Event()  # wakes the supervision
        self._looks_at = 0.0  # when it wakes by itself
        self._finish: Callable[[], None] | None = None  # ends the process; set once it was asked to end

    def child_process_ids(self) -> list[int]:
        """Returns the ids of the processes of engines, constraint compilers and the picture decoder that run."""
        engines = [engine.process_id for engine in self._engines]
        found = [*engines, *self._compiler.process_ids, self._decoder.process_id]
        return [process_id for process_id in found if process_id is not None]

    async def run(self) -> None:
        """Runs until the process ends. A task that fails ends the process: its parent sees that at once."""
        if self._listen is not None:
            self._open_port(self._listen)
        if self._options.kv_events is not None:
            self._open_publisher(self._options.kv_events)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._load_tokenizer())
            group.create_task(self._supervise())

    def _open_port(self, listen: Listen) -> None:
        """Lets clients of other machines in. A port that cannot be opened fails the start."""
        try:
            self._admission = Admission(self._context, listen.clients, self._clients.counters, _end_process)
            socket, self._startup.listens_on = open_port(self._context, listen)
        except ParameterError as error:
            self._give_up(StartFailure(type(error).__name__, str(error)))
        else:
            self._clients.add(Router(CurveRouter(socket), Ownership()))

    def _open_publisher(self, address: str) -> None:
        """Publishes cached blocks. An address that cannot be bound fails the start."""
        try:
            self._publisher = KVEventPublisher(self._context, address, now=time.time, on_error=_end_process)
        except ParameterError as error:
            self._give_up(StartFailure(type(error).__name__, str(error)))

    # ------------------------------------------------------------------ clients

    def _on_client_frames(self, frames: list[Received]) -> None:
        for received in frames:
            if received.error is not None:
                self._refuse(received.connection.client, received.error)
            for message in received.messages:
                self._on_client_message(received.connection, message)
        self._flush()

    def _refuse(self, client: Client, error: FrameError) -> None:
        """Fails the requests in a frame that could not be read, as far as their ids can be read."""
        log.warning("a frame of a client could not be read")
        for label in error.labels:
            client.deliver(Failure(label, ParameterError.__name__, f"the request could not be read: {error}"))

    def _on_client_message(self, connection: Connection, message: ToGateway) -> None:
        client = connection.client
        match message:
            case Ping():
                self._clients.deliver(client.identity, self._pong())
            case Hello(version) if version != __version__:
                reason = f"the runtime is umbel {__version__} and this program umbel {version[:40]}; install the same"
                self._clients.deliver(client.identity, StartFailed(BackendError.__name__, reason))
            case Hello():
                self._startup.greet(connection)
            case Bye():
                self._clients.forget(client)
                self.client_lost(client)
            case _ if connection.router.owned is not None and (what := of_the_owner(message)) is not None:
                reason = f"{what} is not for clients of other machines: it concerns all of them; let the owner do it"
                client.deliver(Failure(message.id, CapabilityError.__name__, reason))
            case _:
                self.receive(client, message)

    # ------------------------------------------------------------------ requests of every front end

    def receive(self, client: Client, message: Outgoing) -> None:
        """Passes programs to `Programs`, and all other requests to the gateway.

        The answer comes by `client.deliver`; the caller flushes."""
        match message:
            case RunProgram() if self._programs is not None:
                self._programs.receive(client, message)
            case Abort(label) if self._programs is not None and self._programs.abort(client, label):
                pass
            case _ if self._long_prompts is not None and not isinstance(message, RunProgram):
                self._long_prompts.receive(client, message)
            case Hint() | Release() | Abort():
                pass  # a hint is optional, and there is nothing yet to release or to abort
            case _:
                reason = "the runtime is starting; send the request again when it is ready"
                client.deliver(Failure(message.id, OverloadedError.__name__, reason))

    def client_lost(self, client: Client) -> None:
        """Aborts the requests and programs of a client that is gone."""
        if self._long_prompts is not None and self._programs is not None:
            self._long_prompts.client_lost(client)
            self._programs.client_lost(client)

    def _pong(self) -> Pong:
        """Makes a sign of life with the state of the engines."""
        core = self._core
        return Pong(EngineState.STARTING) if core is None else Pong(core.state, core.heartbeat_age, core.states)

    def _flush(self) -> None:
        """Sends all queued messages, one frame for each receiver."""
        for client in self._clients.flush():
            log.info("a client is gone; its requests are aborted")
            self.client_lost(client)
        for engine in self._engines:
            engine.flush()
        if self._core is not None and self._core.next_deadline < self._looks_at:
            self._stirred.set()

    # ------------------------------------------------------------------ the start

    async def _load_tokenizer(self) -> None:
        try:
            await self._fetch_model()
            model, tokenizer, form, vectors = await asyncio.to_thread(open_tokenizer, self._options)
        except UmbelError as error:
            self._give_up(StartFailure(type(error).__name__, str(error)))
            return
        except Exception as error:
            log.exception("the tokenizer could not be loaded")
            what = f"the tokenizer could not be loaded: {type(error).__name__}: {str(error)[:500]}"
            self._give_up(StartFailure(EngineError.__name__, what))
            return
        publisher = self._publisher
        self._core = Gateway(
            tokenizer,
            model=model,
            to_engines=[
                engine.send if publisher is None else publisher.watched(engine.send) for engine in self._engines
            ],
            clock=self._clock,
            limits=self._limits,
            faults=fault_hook(),
            seed=self._options.seed,
            adapters=tuple(self._options.adapters),
            token_cache_bytes=CACHE_BYTES if self._options.incremental_tokenization else 0,
            constraints=CompiledCache(
                self._compiler,
                self._options.constraint_engine,
                entries=self._options.constraint_cache,
                most_bytes=CompilerLimits().kept_bytes,
            ),
            pictures=None if form is None else self._picture_cache(form),
            vectors=vectors,
            placement=self._options.placement,
        )
        if publisher is not None:
            publisher.counters = self._core.counters
        image_tokens = 0 if form is None else most_tokens(form)
        self._long_prompts = LongPrompts(self._core, after=self._flush)
        self._programs = Programs(
            capabilities_of(f"runtime {model}", image_tokens, self._options.adapters),
            lambda: ChatTemplate(tokenizer.chat_template, tokens=tokenizer.template_tokens, name=model, checked=False),
            host=self._program_host,
            to_gateway=self._long_prompts.receive,
            limits=self._limits,
            after=self._flush,
            counters=self._core.counters,
        )
        for engine in self._engines:
            if engine.ready is not None:
                self._core.engine_ready(engine.ready.context_length, engine.index, engine.ready.tiers)
            elif (failure := engine.failure or self._startup.failure) is not None:
                self._core.engine_given_up(failure.message, engine.index)
        self._compiler.start()  # while the engine loads, so that it is ready for the first constraint
        self._startup.tokenizer_loaded(model, tokenizer, image_tokens, vectors.info)
        self._announce()
        self._flush()

    async def _fetch_model(self) -> None:
        """Downloads a model of the hub that is not on this machine, and lets the engine start. Raises `ModelError`."""
        if self._model_is_here:
            return
        loop = asyncio.get_running_loop()

        def report(name: str) -> None:
            phase = f"downloading {name}"
            loop.call_soon_threadsafe(lambda: self._startup.enter(phase, downloading=True))

        private = os.umask(self._umask)  # nothing else makes files outside the private folder until the engine starts
        try:
            if await asyncio.to_thread(fetch_model, self._options, report):
                self._startup.enter("starting the engine")
        finally:
            os.umask(private)
        self._model_is_here = True
        self._stirred.set()

    def _picture_cache(self, form: PictureFormat) -> PictureCache:
        digests = ThreadedDigests(self._flush)
        return PictureCache(form, self._decoder, digests, PictureLimits(), self._options.replicas)

    def _give_up(self, failure: StartFailure) -> None:
        """Reports that there will be no engine at all."""
        if self._core is not None:
            for engine in self._engines:
                self._core.engine_given_up(failure.message, engine.index)
        self._startup.fail(failure)
        self._clients.tell_all(self._pong())
        self._flush()

    # ------------------------------------------------------------------ the engines

    def end(self, finish: Callable[[], None]) -> None:
        """Lets the engines save their caches and end, for some seconds, then ends the process by `finish`.

        Their calls get no answer: the clients that share this gateway see that it has ended.
        """
        if self._finish is not None:
            return
        self._finish = finish
        ending = [engine.end() for engine in self._engines]
        if any(ending):
            asyncio.get_running_loop().call_later(SAVE_SECONDS + END_GRACE, finish)
        else:
            finish()

    def _new_slots(self, waiting: EngineProcess | None) -> list[EngineSlot]:
        generations = itertools.count(1)
        return [
            EngineSlot(
                index,
                self._context,
                self._folder,
                self._options,
                clock=self._clock,
                limits=self._supervision,
                generations=generations,
                waiting=waiting if index == 0 else None,
                on_frames=self._on_engine_frames,
                on_heartbeats=self._on_heartbeats,
                on_gone=self._on_engine_gone,
                on_error=_end_process,
            )
            for index in range(self._options.replicas)
        ]

    async def _supervise(self) -> None:
        """Checks the engines and the deadlines: when one passes, when it is woken, and at regular intervals."""
        while True:
            self._stirred.clear()
            for engine in self._engines:
                engine.look()  # its messages count before the system's readings
            await asyncio.sleep(0)
            for engine in self._engines:
                engine.supervise(may_start=self._startup.failure is None and self._model_is_here)
            if self._core is not None:
                self._core.tick()
                self._announce()
            self._clients.probe(self._limits.client_silence, self._pong())
            self._clients.look()
            self._looks_at = self._next_look()
            self._flush()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), max(0.0, self._looks_at - self._clock.now()))

    def _next_look(self) -> float:
        """Returns the time of the next check: the deadline, within bounds; a tick while an engine is down."""
        now = self._clock.now()
        if any(engine.is_down for engine in self._engines):
            return now + self._supervision.tick
        deadline = self._core.next_deadline if self._core is not None else float("inf")
        return min(now + self._supervision.look, max(deadline, now + self._supervision.tick))

    def _on_engine_frames(self, engine: EngineSlot, lost: int, messages: list[EngineFrame]) -> None:
        if lost and self._publisher is not None:
            self._publisher.frames_lost(engine.index)
            engine.send(EngineSnapshot())
        if lost and self._core is not None:
            self._core.events_lost(lost, engine.index)
        for message in messages:
            self._on_engine_frame(engine, message)
        self._flush()

    def _on_heartbeats(self, engine: EngineSlot, beats: list[Heartbeat]) -> None:
        for beat in beats:
            if self._core is not None:
                self._core.engine_event(beat, engine.index)

    def _on_engine_frame(self, engine: EngineSlot, message: EngineFrame) -> None:
        if self._publisher is not None:
            if isinstance(message, EngineReady):
                self._publisher.ready(engine.index)
            elif isinstance(message, CacheEvents) and not self._publisher.follow(engine.index, message):
                engine.send(EngineSnapshot())
        match message:
            case EnginePhase(phase):
                self._startup.enter(phase)
            case EngineReady():
                if self._core is not None:
                    self._core.engine_ready(message.context_length, engine.index, message.tiers)
                self._announce()
                self._clients.tell_all(self._pong())  # each engine shows, also during the first start
            case EngineStartFailed():
                pass  # the slot has noted it; its exit follows
            case _ if self._core is not None:
                self._core.engine_event(message, engine.index)
            case _:
                pass  # there is no gateway yet, so no call that it could belong to

    def _announce(self) -> None:
        """Tells the clients that wait for the start that it is over, when the gateway is ready."""
        if self._startup.engine is not None or self._core is None or self._core.state is not EngineState.READY:
            return
        self._startup.engine_ready(next(engine.ready for engine in self._engines if engine.ready is not None))
        self._clients.tell_all(self._pong())

    def _on_engine_gone(self, engine: EngineSlot, reason: str, was_ready: bool) -> None:
        if self._finish is not None:
            if not any(each.ready for each in self._engines):
                self._finish()
            return
        if not any(each.ready for each in self._engines):
            self._startup.engines_gone()
        if self._publisher is not None:
            self._publisher.gone(engine.index)
        if was_ready and self._core is not None:
            self._core.engine_lost(reason, engine.index)
        if engine.failure is not None:
            self._engine_given_up(engine, engine.failure)
            self._announce()
        self._clients.tell_all(self._pong())
        self._flush()
        self._stirred.set()

    def _engine_given_up(self, engine: EngineSlot, failure: StartFailure) -> None:
        """Goes on without an engine that cannot be started; reports the failure when it was the last one."""
        if all(each.failure is not None for each in self._engines):
            self._give_up(failure)
            return
        log.error("engine %d cannot be started and is given up, the others go on: %s", engine.index, failure.message)
        if self._core is not None:
            self._core.engine_given_up(failure.message, engine.index)


def _end_process(error: BaseException) -> None:
    """Exits at once, after an error that leaves clients unanswered: the parent sees the exit."""
    log.critical("the gateway ends", exc_info=error)
    os._exit(1)


def run(umask: int, waiting: EngineProcess | None) -> None:
    """Runs the gateway until the process ends. Arguments: as `GatewayServer`."""
    start = msgspec.json.decode(read_line(), type=GatewayStart)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program; this process ends when it ends
    logging.basicConfig(
        level=start.options.log_level.upper(),
        stream=sys.stderr,
        format="umbel gateway[%(process)d] %(levelname)s %(message)s",
    )
    server: list[GatewayServer] = []

    def before_exit() -> None:
        for process in server[0].child_process_ids() if server else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(start.folder, ignore_errors=True)

    def finish() -> None:
        before_exit()
        os._exit(0)

    async def serve() -> None:
        server.append(GatewayServer(start, umask, waiting))
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.call_soon_threadsafe(server[0].end, finish)

        watch(start.parent, before_exit, on_end=end)
        await server[0].run()

    try:
        asyncio.run(serve())
    finally:
        before_exit()
        os._exit(1)  # `serve` ends only by an error, which has been printed
