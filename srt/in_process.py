"""Runs the whole runtime in the caller's process: gateway and schedulers on one event loop, no sockets.

For tests, simulations and tiny uses. By default it runs the oracle model, which fails loudly when the engine reuses a
wrong key. Steps of a real model run in an EngineThread, so that the loop stays responsive; steps of the oracle run on
the loop, so that a test is deterministic.
"""

import asyncio
import contextlib
import gc
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar, Unpack, get_args

from ..lang.chat_template import ChatTemplate
from ..lang.errors import BackendError, EngineError, ParameterError
from ..lang.programs import PROGRAM_HOST, ProgramEvent, RunProgram
from ..lang.prompt import Part, tokens_at_most
from ..lang.protocol import (
    Abort,
    CacheRequest,
    Caches,
    Capabilities,
    Chunk,
    ConstraintKind,
    Detokenize,
    Detokenized,
    Done,
    Embedded,
    EmbedRequest,
    Final,
    GenRequest,
    Hint,
    Locate,
    Located,
    Ranked,
    RankRequest,
    ReadStatus,
    Scored,
    ScoreRequest,
    Survey,
    Tokenize,
    Tokenized,
    VectorInfo,
    VocabularyInfo,
)
from ..lang.runtime_options import ORACLE, KeywordOptions, options_of
from ..lang.status import EngineState, RuntimeHealth, RuntimeState, RuntimeStatus, TreeSurvey
from ..lang.transport.exchange import Exchange, Outgoing
from .constraints.compiler import CompiledCache, InlineCompiler
from .constraints.matcher import OPENING_POLL
from .core.config import CompilerLimits, GatewayLimits, PictureLimits
from .core.instruments import Clock, FaultHook, SystemClock, no_faults
from .core.messages import FromEngine, ToEngine
from .core.vectors import NO_VECTORS
from .gateway.calls import Answer, Client
from .gateway.gateway import Gateway
from .gateway.programs import Programs, capabilities_of
from .launch import Engine, LoadedModel, ModelReading, open_engine, open_tokenizer
from .multimodal.cache import InlineDigests, PictureCache
from .multimodal.decode import InlineDecoder
from .multimodal.format import PictureFormat, most_tokens
from .tokenizer.prompt import CACHE_BYTES
from .tokenizer.tokenizer import vocabulary_info

if TYPE_CHECKING:  # the scheduler needs torch, which importers of this module may not
    from .scheduler.scheduler import Scheduler


MOST_STEPS = 4  # in a row; then the loop checks deadlines


class EngineThread:
    """Runs all steps in one thread: the libraries below a model keep memory for each thread that calls them.

    Args:
        news: returns whether there are messages for the scheduler. Called in the thread.
        turn: held during the steps.
    """

    def __init__(self, scheduler: "Scheduler", news: Callable[[], bool], turn: threading.Lock) -> None:
        self._scheduler = scheduler
        self._news = news
        self._turn = turn
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local engine")

    async def advance(self) -> list[FromEngine]:
        """Runs some steps. A cancelled caller still waits for them: they use the engine's memory."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._some_steps)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def close(self) -> None:
        """Ends the thread, which holds the objects of its last step. No caller may wait for steps."""
        self._thread.shutdown()

    def _some_steps(self) -> list[FromEngine]:
        """Runs up to MOST_STEPS steps, until there are events or messages.

        A return to the loop and back costs a millisecond without any step."""
        scheduler = self._scheduler
        with self._turn:
            for _ in range(MOST_STEPS):
                events = scheduler.step()
                resting = scheduler.idle and not scheduler.unchecked
                if events or self._news() or resting or scheduler.opening:
                    return events
        return []


class LocalEngine:
    """Runs one engine on the loop of its caller, as long as it has work.

    Args:
        on_events: called after every step with its events.
        on_lost: called with the reason when a step fails, which ends the engine.
        step_seconds: what a step takes, in the loop's time; steps run on the loop then. None: they run in a thread.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_events: Callable[[list[FromEngine]], None],
        on_lost: Callable[[str], None],
        step_seconds: float | None,
    ) -> None:
        self.engine = engine
        self._on_events = on_events
        self._on_lost = on_lost
        self._step_seconds = step_seconds
        self._inbox: deque[ToEngine] = deque()
        self._turn = threading.Lock()  # a pump has it while it uses the scheduler or the gateway
        self._thread = EngineThread(engine.scheduler, lambda: bool(self._inbox), self._turn)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump: asyncio.Task[None] | None = None
        self._left: list[FromEngine] = []  # events of the last steps on a former loop

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs on another loop from now on. The former one may still run in its thread, with a step after the last
        answer: its pump uses nothing any more when this returns."""
        with self._turn:
            self._loop, self._pump = loop, None

    def send(self, message: ToEngine) -> None:
        self._inbox.append(message)
        self._go_on()

    def _go_on(self) -> None:
        if self._loop is not None and (self._pump is None or self._pump.done()):
            self._pump = self._loop.create_task(self._run(), name="local engine")

    async def close(self) -> None:
        """Ends the step that runs, the engine and its threads."""
        pump, self._pump, self._loop = self._pump, None, None
        if pump is not None:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        del pump  # its exception may hold the engine
        self.engine.close()
        self._thread.close()
        self._inbox.clear()

    async def _run(self) -> None:
        """Steps until no work is left, or until another loop runs the engine. No two threads ever use the gateway or
        the scheduler at once."""
        loop, scheduler = asyncio.get_running_loop(), self.engine.scheduler
        events: list[FromEngine] = []
        stepped = False
        try:
            while True:
                with self._turn:
                    if self._loop is not loop:
                        self._leave(events)
                        return
                    if stepped or self._left:
                        came, self._left = [*self._left, *events], []
                        self._on_events(came)
                    if not (self._inbox or not scheduler.idle or scheduler.unchecked):
                        return
                    while self._inbox:
                        scheduler.handle_message(self._inbox.popleft())
                    resting, stepped = scheduler.idle, True
                    events = scheduler.step() if self._step_seconds is not None else []
                if self._step_seconds is not None:
                    await asyncio.sleep(0 if resting else self._step_seconds)  # other tasks run between two steps
                else:
                    events = await self._thread.advance()
                    if scheduler.opening:
                        await asyncio.sleep(OPENING_POLL)
        except Exception as error:  # it belongs to no request: the engine is lost, like a process
            self._on_lost(f"{type(error).__name__}: {error}")
            raise EngineError("the local engine ended") from error

    def _leave(self, events: list[FromEngine]) -> None:
        """Leaves the events of a last step to the loop that runs the engine now."""
        self._left += events
        if events and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended, too
                self._loop.call_soon_threadsafe(self._go_on)


T = TypeVar("T")


class Delay(Generic[T]):
    """Delivers items after some seconds of the loop's time, in order.

    Args:
        seconds: 0 delivers at once.
        then: called with each item.
    """

    def __init__(self, seconds: float, then: Callable[[T], None]) -> None:
        self._seconds = seconds
        self._then = then
        self._waiting: deque[T] = deque()
        self.carried = 0

    def put(self, item: T) -> None:
        self.carried += 1
        if self._seconds == 0.0:
            self._then(item)
        else:  # timers of one moment fire in any order, so each takes the first item
            self._waiting.append(item)
            asyncio.get_running_loop().call_later(self._seconds, self._first)

    def _first(self) -> None:
        self._then(self._waiting.popleft())


class LocalBackend:
    """A `protocol.Backend` without processes.

    Args:
        model: as for `Runtime`; "oracle" by default.
        chat_template: Jinja source, or the name of a format; replaces the model's own.
        clock, faults: for tests.
        latency: seconds that a message takes between caller and gateway, each way.
        loaded: a model in memory, in place of `model`. No other backend may use it.
        step_seconds: duration of a step of the oracle, in the loop's time; on a loop with virtual time it simulates a
            slow model. The steps of several replicas run at the same time.
        options: as for `Runtime`. With the oracle every step is checked unless `debug` is given.
    """

    def __init__(
        self,
        model: str = ORACLE,
        *,
        chat_template: str | None = None,
        loaded: LoadedModel | None = None,
        clock: Clock | None = None,
        faults: FaultHook = no_faults,
        latency: float = 0.0,
        step_seconds: float = 0.0,
        **options: Unpack[KeywordOptions],
    ) -> None:
        if loaded is not None:
            model = loaded.name
            if options.get("replicas", 1) != 1:
                raise ParameterError("replicas: a loaded model is one engine's; leave replicas out")
        if model == ORACLE:
            debug = options.get("debug", {})
            if isinstance(debug, Mapping):
                options["debug"] = {"check_every_step": True, **debug}
        self.options = options_of("LocalBackend()", model, options)
        if self.options.kv_events is not None:
            raise ParameterError(
                "kv_events: a runtime in this process publishes nothing; write ul.Runtime(kv_events=...)"
            )
        self._limits = GatewayLimits(max_queue=self.options.max_queue, request_timeout=self.options.request_timeout)
        self._clock = clock or SystemClock()
        self._faults = faults
        self._step_seconds = step_seconds
        self.down: Delay[Outgoing] = Delay(latency, self._receive)
        self.up: Delay[Answer] = Delay(latency, self._arrived)
        self._client = Client(self, b"local")
        self._given_template = chat_template
        self._loaded = loaded
        self._template: ChatTemplate | None = None
        self._name = model
        self._image_tokens = 0  # of a picture at most; 0: the model reads text only, or is not open yet
        self._vectors = VectorInfo()  # nothing until it is open
        self._engines: tuple[LocalEngine, ...] = ()
        self._gateway: Gateway | None = None
        self._exchange: Exchange | None = None
        self._programs: Programs | None = None  # with the exchange
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------ Backend

    @property
    def capabilities(self) -> Capabilities:
        runner = self._engines[0].engine.runner if self._engines else None
        return Capabilities(
            name=f"local {self._name}",
            score=True,
            hint=True,
            pins=self.options.radix_cache,
            token_ids=True,
            prefix_cache=self.options.radix_cache,
            cache_maximum=0 if runner is None else runner.num_slots - 1,
            caching=self.options.radix_cache,
            logprobs=True,
            max_context=self._engines[0].engine.scheduler.kv.longest if self._engines else None,
            constraints=get_args(ConstraintKind),
            probability=True,
            stop_regex=True,
            adapters=tuple(self.options.adapters),
            programs=True,
            images=self._image_tokens > 0,
            image_tokens=self._image_tokens,
            embeds=self._vectors.dimensions > 0,
            ranks=self._vectors.ranks,
        )

    @property
    def chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise BackendError("the backend has not started; await backend.start() first")
        return self._template

    @property
    def vocabulary(self) -> VocabularyInfo:
        engine, gateway = self.engine, self._gateway
        assert gateway is not None, "it comes before the engine"
        return vocabulary_info(gateway.encoder.tokenizer, engine.runner.vocab_size)

    @property
    def engine(self) -> Engine:
        """The scheduler and its model, of several the first one's, for tests that inspect them."""
        return self.engines[0]

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Returns the engines of all replicas."""
        if not self._engines:
            raise BackendError("the backend has not started; await backend.start() first")
        return tuple(local.engine for local in self._engines)

    async def start(self) -> None:
        if not self._engines:
            if self.options.model == ORACLE:
                self._open()
            else:
                if self._opening is None or self._opening.done():  # the first of several callers opens for all
                    self._opening = asyncio.ensure_future(asyncio.to_thread(self._open))
                await asyncio.shield(self._opening)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a new loop, such as the next asyncio.run of a test
            assert self._gateway is not None
            self._loop = loop
            for local in self._engines:
                local.move_to(loop)
            self._gateway.client_lost(self._client)
            if self._programs is not None:
                self._gateway.client_lost(self._programs.calls_client)
            self._exchange = Exchange(
                self.down.put,
                window=self.options.max_queue,
                programs=self._limits.max_programs,
                longest=self.options.request_timeout,
            )
            self._programs = self._new_programs(self._gateway)

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        await self.start()
        async with aclosing(self._calls.generate(request)) as events:
            async for event in events:
                yield event

    async def run_program(self, request: RunProgram) -> AsyncGenerator[ProgramEvent, None]:
        await self.start()
        async with aclosing(self._calls.program(request)) as events:
            async for event in events:
                yield event

    async def score(self, request: ScoreRequest) -> Scored:
        await self.start()
        return await self._calls.score(request)

    async def embed(self, request: EmbedRequest) -> Embedded:
        await self.start()
        return await self._calls.embed(request)

    async def rank(self, request: RankRequest) -> Ranked:
        await self.start()
        return await self._calls.rank(request)

    def hint(self, hint: Hint) -> None:
        if self._exchange is not None:
            self._exchange.hint(hint)

    def release(self, pinned: str) -> None:
        if self._exchange is not None:
            self._exchange.release(pinned)

    def abort(self, request_id: str) -> bool:
        return self._exchange is not None and self._exchange.abort(request_id)

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return tokens_at_most(prompt, self._image_tokens)

    async def locate(self, question: Locate) -> Located:
        await self.start()
        return await self._calls.locate(question)

    async def caches(self, request: CacheRequest) -> Caches:
        await self.start()
        return await self._calls.caches(request)

    async def tokenize(self, question: Tokenize) -> Tokenized:
        await self.start()
        return await self._calls.tokenize(question)

    async def detokenize(self, question: Detokenize) -> Detokenized:
        await self.start()
        return await self._calls.detokenize(question)

    async def control(self, verb: str) -> Done:
        await self.start()
        return await self._calls.control(verb)

    def health(self) -> RuntimeHealth:
        gateway = self._gateway
        if gateway is None or not self._engines:
            return RuntimeHealth(RuntimeState.STOPPED, "it has not been started")
        if gateway.state is EngineState.FAILED:
            return RuntimeHealth(RuntimeState.FAILED, "its engine ended", replicas=gateway.states)
        return RuntimeHealth(RuntimeState.READY, "", 0.0, gateway.heartbeat_age, gateway.states)

    async def status(self) -> RuntimeStatus:
        """Reads gauges and counters, with the engine as it is at this moment. Raises BackendError before `start`."""
        if self._exchange is None:
            raise BackendError("the backend has not started; await backend.start() first")
        return await self._exchange.status()

    async def survey(self, most: int = 1_000, text: int = 0) -> TreeSurvey:
        await self.start()
        return await self._calls.survey(Survey("", most, text))

    async def close(self) -> None:
        """Ends the running requests, and frees the model unless it was `loaded`. The next `start` begins anew."""
        if self._gateway is not None and self._programs is not None:
            self._gateway.client_lost(self._client)
            self._programs.client_lost(self._client)
        if self._exchange is not None:
            self._exchange.fail(lambda: BackendError("the backend was closed"))
        await self._close_engines()
        self._gateway = self._exchange = self._programs = self._loop = None
        if self.options.model != ORACLE:
            # An engine has reference cycles, which only a collection frees. A few objects may hold all of a device's
            # memory. Callbacks of awaited steps hold the engine until the loop has called them.
            await asyncio.sleep(0)
            gc.collect()

    # ------------------------------------------------------------------ how

    @property
    def _calls(self) -> Exchange:
        assert self._exchange is not None, "start() made it"
        return self._exchange

    async def _close_engines(self) -> None:
        """Ends them. It holds none of them afterwards: `close` collects what they leave."""
        engines, self._engines = self._engines, ()
        for local in engines:
            await local.close()

    def _open(self) -> None:
        loaded = self._loaded
        if loaded is None:
            reading = open_tokenizer(self.options)
        else:
            reading = ModelReading(loaded.name, loaded.tokenizer, None, NO_VECTORS)
        self._name, tokenizer, form, vectors = reading
        self._vectors = vectors.info
        self._image_tokens = 0 if form is None else most_tokens(form)
        engines = tuple(
            LocalEngine(
                open_engine(
                    self.options,
                    clock=self._clock,
                    faults=self._faults,
                    phase=lambda _: None,
                    loaded=loaded,
                    replica=index,
                ),
                on_events=partial(self._on_events, index),
                on_lost=partial(self._on_lost, index),
                step_seconds=self._step_seconds if self.options.model == ORACLE else None,
            )
            for index in range(self.options.replicas)
        )
        source = self._given_template if self._given_template is not None else tokenizer.chat_template
        self._template = ChatTemplate(source, tokens=tokenizer.template_tokens, name=self._name, checked=False)
        self._gateway = Gateway(
            tokenizer,
            model=self._name,
            to_engines=[partial(self._to_engine, local) for local in engines],
            clock=self._clock,
            limits=self._limits,
            faults=self._faults,
            seed=self.options.seed,
            adapters=tuple(self.options.adapters),
            token_cache_bytes=CACHE_BYTES if self.options.incremental_tokenization else 0,
            constraints=CompiledCache(
                InlineCompiler(),
                self.options.constraint_engine,
                entries=self.options.constraint_cache,
                most_bytes=CompilerLimits().kept_bytes,
            ),
            pictures=None if form is None else self._picture_cache(form),
            vectors=vectors,
            placement=self.options.placement,
        )
        for index, local in enumerate(engines):
            self._gateway.engine_ready(local.engine.runner.context_length, index, local.engine.tiers)
        self._engines = engines  # last: other tasks in `start` take it as the sign that all of this is ready

    def _picture_cache(self, form: PictureFormat) -> PictureCache:
        return PictureCache(form, InlineDecoder(), InlineDigests(), PictureLimits(), self.options.replicas)

    def _new_programs(self, gateway: Gateway) -> Programs:
        return Programs(
            capabilities_of(self.capabilities.name, self._image_tokens, self.options.adapters),
            lambda: self.chat_template,
            host=PROGRAM_HOST,
            to_gateway=gateway.receive,
            limits=self._limits,
            after=lambda: None,
            counters=gateway.counters,
        )

    def _receive(self, message: Outgoing) -> None:
        gateway, programs = self._gateway, self._programs
        if gateway is None or programs is None:  # closed while the message was on its way
            return
        match message:
            case RunProgram():
                programs.receive(self._client, message)
            case Abort(label) if programs.abort(self._client, label):
                pass
            case ReadStatus():
                for index, engine in enumerate(self.engines):
                    gateway.engine_event(engine.heartbeat(), index)
                gateway.receive(self._client, message)
            case _:
                gateway.receive(self._client, message)

    def deliver(self, identity: bytes, message: Answer) -> None:
        """Carries an answer of the gateway to the caller, after the latency."""
        self.up.put(message)

    def _arrived(self, message: Answer) -> None:
        if self._exchange is not None:
            self._exchange.deliver(message)

    def _to_engine(self, local: LocalEngine, message: ToEngine) -> None:
        local.send(message)

    def _on_events(self, replica: int, events: list[FromEngine]) -> None:
        if self._gateway is not None:
            for event in events:
                self._gateway.engine_event(event, replica)
            self._gateway.tick()

    def _on_lost(self, replica: int, reason: str) -> None:
        """Goes on without an engine that failed; no other one takes its place."""
        if self._gateway is not None:
            self._gateway.engine_lost(reason, replica)
            self._gateway.engine_given_up(reason, replica)
