"""Programs that clients ship: they run here, next to the engine, and their variables stream back.

    client ── RunProgram ──▶ Programs ──▶ GraphCache                    read, checked, planned; once per graph
                                 └──────▶ a task: HostedProgram ─▶ ProgramBackend ─▶ Exchange ─▶ Gateway ─▶ engine
           ◀── variables ────────────────────────┘

The module that reads and runs programs (`host`) is an option of the gateway's start, by name: the runtime imports no
compiler. It is loaded when the first program comes. Every program gets exactly one ending, unless its client is
gone.
"""

import asyncio
import importlib
import logging
import sys
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Generic, TypeVar, cast, get_args

from ...lang.chat_template import ChatTemplate
from ...lang.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    DeadlineError,
    GraphError,
    OverloadedError,
    ParameterError,
    UmbelError,
)
from ...lang.programs import (
    FromPrograms,
    GraphWanted,
    HostedProgram,
    ProgramEvent,
    ProgramHost,
    RunProgram,
    digest_of,
    trouble_of,
)
from ...lang.prompt import Part, tokens_at_most
from ...lang.protocol import (
    Capabilities,
    Chunk,
    ConstraintKind,
    Done,
    Failure,
    Final,
    GenRequest,
    Hint,
    Scored,
    ScoreRequest,
    ToBackend,
)
from ...lang.transport.exchange import Exchange, Outgoing
from ..core.config import GatewayLimits
from .calls import Answer, Client

log = logging.getLogger("umbel.gateway")


class Programs:
    """Runs programs of all clients on one loop, and is the front end of their calls.

    Args:
        capabilities: the runtime's, as its clients see them.
        make_template: makes the chat template when it is first needed.
        host: name of the module that reads and runs programs, a `ProgramHost`.
        to_gateway: carries a message of `calls_client` to the gateway, which answers it by `deliver`.
        after: called when programs have sent something, to flush it.
        counters: receives the counts.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        make_template: Callable[[], ChatTemplate],
        *,
        host: str,
        to_gateway: Callable[[Client, ToBackend], None],
        limits: GatewayLimits,
        after: Callable[[], None],
        counters: Counter[str],
    ) -> None:
        self._host = host
        self._to_gateway = to_gateway
        self._limits = limits
        self._after = after
        self.counters = counters
        window = max(1, int(limits.max_queue * limits.program_share))
        self._exchange = Exchange(self._ask, window=window, longest=limits.request_timeout)
        self.calls_client = Client(self, b"")  # client of the calls of programs; clients of programs get variables
        self._backend = ProgramBackend(self._exchange, capabilities, make_template)
        self._graphs: GraphCache[HostedProgram] | None = None  # from the first program on
        self._opening = asyncio.Lock()
        self._running: dict[tuple[Client, str], RunningProgram] = {}
        self._argument_bytes = 0
        self._stirred = False  # `after` will be called in this turn of the loop

    @property
    def in_flight(self) -> int:
        """Programs without an ending."""
        return len(self._running)

    # ------------------------------------------------------------------ from clients

    def receive(self, client: Client, request: RunProgram) -> None:
        """Starts a program. Every content ends with an answer, never with an exception."""
        self.counters["programs"] += 1
        try:
            self._check(client, request)
        except UmbelError as error:
            self.counters["programs_refused"] += 1
            client.deliver(_failure(request.id, error))
            return
        running = RunningProgram(request)
        self._running[client, request.id] = running
        self._argument_bytes += len(request.arguments)
        running.task = asyncio.get_running_loop().create_task(self._serve(client, running), name="a shipped program")
        running.task.add_done_callback(lambda task: self._done(client, running, task))

    def abort(self, client: Client, request_id: str) -> bool:
        """Cancels a program of a client → whether there is one."""
        running = self._running.get((client, request_id))
        if running is None:
            return False
        running.stop(CancelledError("the program was cancelled"))
        return True

    def client_lost(self, client: Client) -> None:
        """Stops the programs of a client that is gone."""
        for (owner, _), running in tuple(self._running.items()):
            if owner == client:
                running.stop(None)
                self.counters["programs_orphaned"] += 1

    # ------------------------------------------------------------------ from the gateway

    def deliver(self, identity: bytes, message: Answer) -> None:
        """Passes an answer of the gateway on to the call of a program that waits for it."""
        self._exchange.deliver(message)

    # ------------------------------------------------------------------ how

    def _check(self, client: Client, request: RunProgram) -> None:
        limits = self._limits
        if len(request.id) > limits.max_label_length:
            raise ParameterError(f"id has {len(request.id)} characters; write at most {limits.max_label_length}")
        if (client, request.id) in self._running:
            raise ParameterError(f"program id {request.id!r} is in use; give every program its own id")
        timeout = request.origin.timeout
        if timeout is not None and not 0 <= timeout < float("inf"):
            raise ParameterError(f"timeout={timeout} is not a number of seconds; write at least 0, or None")
        if len(self._running) >= limits.max_programs:
            raise OverloadedError(
                f"{limits.max_programs} programs are running, the most this runtime runs; try again when some end"
            )
        if self._argument_bytes + len(request.arguments) > limits.max_argument_bytes:
            raise OverloadedError(
                f"the arguments of the programs that run have {self._argument_bytes} bytes, and with these more than "
                f"the {limits.max_argument_bytes} that this runtime holds; try again when some have ended"
            )

    async def _serve(self, client: Client, running: "RunningProgram") -> None:
        """Runs a program and sends its ending; `_done` does that when the task is cancelled."""
        request = running.request
        try:
            ending = await self._run(client, running)
        except TimeoutError:
            ending = _failure(request.id, DeadlineError("the deadline passed before the program was complete"))
        except UmbelError as error:
            ending = _failure(request.id, error)
        except Exception as error:
            log.exception("internal error while running a program")
            self.counters["internal_errors"] += 1
            ending = _failure(request.id, error)
        self._end(client, running, ending)

    async def _run(self, client: Client, running: "RunningProgram") -> FromPrograms:
        """Runs a program → its ending. Raises TimeoutError when its time is over."""
        request = running.request

        def notify(event: ProgramEvent) -> None:
            if running.notifies:
                self._send(client, event)

        longest = self._limits.program_timeout
        seconds = longest if request.origin.timeout is None else min(request.origin.timeout, longest)
        async with asyncio.timeout(seconds):
            graphs = await self._opened()
            shipped = await graphs.find(request.digest, request.graph)
            if shipped is None:
                return GraphWanted(request.id)
            return await shipped.execute(request, self._backend, seconds, notify)

    async def _opened(self) -> "GraphCache[HostedProgram]":
        """Returns the graphs; loads the program host first, in a thread, which takes 0.1 s."""
        async with self._opening:
            if self._graphs is None:
                # A module that another thread still loads is in sys.modules already, without what it defines.
                if not hasattr(sys.modules.get(self._host), "read"):
                    await asyncio.to_thread(importlib.import_module, self._host)
                host = cast(ProgramHost, sys.modules[self._host])
                self._graphs = GraphCache(self._limits, host.read, self.counters)
        return self._graphs

    def _end(self, client: Client, running: "RunningProgram", ending: FromPrograms | None) -> None:
        """Removes a program and sends its ending. No other place removes programs."""
        request = running.request
        running.notifies = False
        if self._running.get((client, request.id)) is not running:
            return
        del self._running[client, request.id]
        self._argument_bytes -= len(request.arguments)
        if ending is not None:
            self._send(client, ending)

    def _done(self, client: Client, running: "RunningProgram", task: "asyncio.Task[None]") -> None:
        """Ends the program of a task that was cancelled or failed by a mistake of ours."""
        error: UmbelError | None = running.reason
        if not task.cancelled() and (failed := task.exception()) is not None:
            log.critical("a program's task failed", exc_info=failed)
            error = BackendError("internal error while running the program; see the log")
        self._end(client, running, None if error is None else _failure(running.request.id, error))

    def _ask(self, message: Outgoing) -> None:
        assert not isinstance(message, RunProgram), "programs ship no programs"
        self._to_gateway(self.calls_client, message)
        self._will_stir()

    def _send(self, client: Client, message: FromPrograms) -> None:
        client.deliver(message)
        self._will_stir()

    def _will_stir(self) -> None:
        if not self._stirred:
            self._stirred = True
            asyncio.get_running_loop().call_soon(self._stir)

    def _stir(self) -> None:
        self._stirred = False
        self._after()


class RunningProgram:
    """Tracks one program of one client."""

    __slots__ = ("notifies", "reason", "request", "task")

    def __init__(self, request: RunProgram) -> None:
        self.request = request
        self.task: asyncio.Task[None] | None = None
        self.reason: UmbelError | None = None  # sent to its client when it is cancelled; None: not sent
        self.notifies = True  # its client receives its variables

    def stop(self, reason: UmbelError | None) -> None:
        if self.task is not None and not self.task.done():
            self.reason, self.notifies = reason, False
            self.task.cancel()


def _failure(request_id: str, error: BaseException) -> Failure:
    trouble = trouble_of(error)
    return Failure(request_id, trouble.kind, trouble.message)


T = TypeVar("T")


class GraphCache(Generic[T]):
    """Keeps graphs that clients sent, ready to be run: read, checked and planned once. Evicts the least recently used.

    A graph is found by the digest of its bytes, which is computed here, so no client can replace another's graph.

    Args:
        read: bytes → a runnable graph. Called in a thread for long graphs, one at a time; may raise anything.
        counters: receives the counts.
    """

    def __init__(self, limits: GatewayLimits, read: Callable[[bytes], T], counters: Counter[str]) -> None:
        self._limits = limits
        self._read = read
        self._graphs: OrderedDict[str, tuple[T, int]] = OrderedDict()  # with its length in bytes
        self._reading: dict[str, asyncio.Task[T]] = {}
        self._bytes = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="umbel-graphs")
        self.counters = counters

    async def find(self, digest: str, data: bytes) -> T | None:
        """Returns the graph of this digest, read from `data` if need be; None when it is unknown and `data` is empty.

        Raises:
            GraphError: the bytes are no graph, not that of the digest, or too many.
        """
        kept = self._graphs.get(digest)
        if kept is not None:
            self._graphs.move_to_end(digest)
            self.counters["graphs_found"] += 1
            return kept[0]
        reading = self._reading.get(digest)
        if reading is None:
            if not data:
                self.counters["graphs_wanted"] += 1
                return None
            if len(data) > self._limits.max_graph_bytes:
                raise GraphError(
                    f"the graph has {len(data)} bytes and {self._limits.max_graph_bytes} are accepted; run the program "
                    "with program.run(...), or split it"
                )
            if len(data) <= self._limits.long_graph:
                return self._keep(digest, self._opened(digest, data), len(data))
            reading = self._reading[digest] = asyncio.create_task(self._open_aside(digest, data), name="a long graph")
            reading.add_done_callback(lambda _: self._reading.pop(digest, None))
        return await asyncio.shield(reading)  # other programs may wait for it, too

    async def _open_aside(self, digest: str, data: bytes) -> T:
        graph = await asyncio.get_running_loop().run_in_executor(self._pool, self._opened, digest, data)
        return self._keep(digest, graph, len(data))

    def _opened(self, digest: str, data: bytes) -> T:
        self.counters["graphs_read"] += 1
        if digest_of(data) != digest:
            raise GraphError(f"the graph's bytes have another digest than {digest[:64]!r}")
        try:
            return self._read(data)
        except UmbelError:
            raise
        except Exception as error:  # any error is the fault of the bytes, which come from a client
            log.warning("a graph could not be read", exc_info=error)
            raise GraphError(f"the graph cannot be read: {type(error).__name__}") from error

    def _keep(self, digest: str, graph: T, length: int) -> T:
        if digest not in self._graphs:
            self._graphs[digest] = graph, length
            self._bytes += length
        while len(self._graphs) > self._limits.kept_graphs or self._bytes > self._limits.kept_graph_bytes:
            _, (_, gone) = self._graphs.popitem(last=False)
            self._bytes -= gone
        return graph


class ProgramBackend:
    """Gives programs access to the gateway.

    Args:
        exchange: to the gateway, as one client.
        capabilities: those that clients see, so that a program is refused the same things here.
        make_template: the model's chat template, compiled when a program first needs it.
    """

    def __init__(
        self, exchange: Exchange, capabilities: Capabilities, make_template: Callable[[], ChatTemplate]
    ) -> None:
        self._exchange = exchange
        self._capabilities = capabilities
        self._make_template = make_template

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return self._make_template()

    async def start(self) -> None:
        """Does nothing: the gateway takes programs once it knows its model."""

    def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        return self._exchange.generate(request)

    async def score(self, request: ScoreRequest) -> Scored:
        return await self._exchange.score(request)

    def hint(self, hint: Hint) -> None:
        raise CapabilityError("a program that runs in the gateway gives no hints")

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return tokens_at_most(prompt, self._capabilities.image_tokens)

    async def control(self, verb: str) -> Done:
        raise CapabilityError(f"a program that runs in the gateway cannot ask it to {verb}; ask from the client")

    async def close(self) -> None:
        """Does nothing: the gateway owns the exchange."""


def capabilities_of(name: str, image_tokens: int = 0, adapters: Iterable[str] = ()) -> Capabilities:
    """Returns the capabilities of a runtime, as a program inside of it sees them.

    It takes no hints. The calls of a fork's branches arrive in the next turn of the loop, and share their prefix in the
    step that computes it; a hint before them would take a step of its own.

    Args:
        name: the name that its clients use, for messages.
        image_tokens: of a picture at most; 0 for a model that reads text only.
        adapters: their names.
    """
    return Capabilities(
        name=name,
        score=True,
        token_ids=True,
        caching=True,
        logprobs=True,
        constraints=get_args(ConstraintKind),
        probability=True,
        stop_regex=True,
        images=image_tokens > 0,
        image_tokens=image_tokens,
        adapters=tuple(adapters),
    )
