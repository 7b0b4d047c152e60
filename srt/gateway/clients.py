"""The front end of programs: ZeroMQ ROUTERs, with numbered frames on each connection.

One router is for programs on this machine. Another one, for those on other machines, may be added (remote.py).

Messages to a client are collected and go out as one frame per `flush`. Sending never waits: there is no high-water
mark, and a client that is gone is an error of the send, not a silent loss.
"""

import asyncio
import errno
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import zmq

from ...lang.protocol import ToBackend
from ...lang.transport.inlet import Inlet, Readable, prepare
from ...lang.transport.link import MAX_FRAME, FrameError, FromGateway, Inbound, Outbound, Pong, ToGateway
from ..core.instruments import Clock
from ..core.messages import from_gateway_codec, to_gateway_codec, too_large_for_client
from ..tokenizer.prompt import Prompted
from .calls import Client
from .gateway import Gateway


class RouterSocket(Readable, Protocol):
    """The part of a ROUTER that is used here. The first frame of a message is the identity of its client."""

    def send_multipart(self, msg_parts: Sequence[bytes], flags: int = 0) -> object: ...


Owned = Callable[[bytes, list[ToGateway]], list[ToGateway]]  # given the identity of a client and its messages


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """A ROUTER that clients connect to.

    `owned`: binds what messages say of their sender to the client; None where every client is the same user.
    """

    socket: RouterSocket
    owned: Owned | None = None


@dataclass(slots=True, eq=False)
class Connection:
    """Numbers and queues the frames of one client."""

    client: Client  # its identity is made by the router, so no client can take another's
    router: Router
    inbound: Inbound[ToGateway]
    outbound: Outbound[FromGateway]
    last_seen: float  # on the gateway's clock: a frame came, or the client was probed
    outbox: list[FromGateway] = field(default_factory=list)
    waits_for_welcome: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """One frame of one client: its messages, or why it could not be read."""

    connection: Connection
    messages: list[ToGateway]
    error: FrameError | None = None


class Clients:
    """Owns the ROUTER of programs on this machine, and all connections. Made on a running loop.

    Args:
        path: the socket's file, in a private folder.
        max_connections: frames of further clients are dropped and counted.
        clock: tells when a client was last seen.
        on_frames: called with the received frames.
        on_error: called with an exception of reading or of `on_frames`; nothing is read after it.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        path: Path,
        max_connections: int,
        *,
        clock: Clock,
        on_frames: Callable[[list[Received]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        socket = prepare(context.socket(zmq.ROUTER), MAX_FRAME)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(f"ipc://{path}")
        self._max_connections = max_connections
        self._clock = clock
        self._on_frames = on_frames
        self._connections: dict[bytes, Connection] = {}
        self._unsent: dict[bytes, Connection] = {}  # connections with a non-empty outbox
        self._incoming, self._outgoing = to_gateway_codec(), from_gateway_codec()
        self.counters: Counter[str] = Counter()
        self._on_error = on_error
        self._inlets: list[Inlet] = []
        self.add(Router(socket))

    def add(self, router: Router) -> None:
        """Serves the clients of another router, too. Its identities are others than those of the routers before."""
        self._inlets.append(Inlet(router.socket, partial(self._receive, router), self._on_error))

    def _receive(self, router: Router, messages: list[list[bytes]]) -> None:
        now = self._clock.now()
        received: list[Received] = []
        for identity, *frames in messages:
            connection = self._connection(router, identity, now)
            if connection is None:
                continue
            try:
                read = connection.inbound.read(frames)
                received.append(Received(connection, read if router.owned is None else router.owned(identity, read)))
            except FrameError as error:
                received.append(Received(connection, [], error))
        self._on_frames(received)

    def look(self) -> None:
        """Reads the frames that are there, in case an event of the socket was missed."""
        for inlet in self._inlets:
            inlet.look()

    def deliver(self, identity: bytes, message: FromGateway) -> None:
        """Queues a message for the next `flush`; drops it when the client is gone."""
        connection = self._connections.get(identity)
        if connection is not None:
            connection.outbox.append(message)
            self._unsent[identity] = connection

    def flush(self) -> list[Client]:
        """Sends the queued messages → the clients found gone, which are forgotten."""
        if not self._unsent:
            return []
        unsent, self._unsent = self._unsent, {}
        gone = []
        for identity, connection in unsent.items():
            messages, connection.outbox = connection.outbox, []
            try:
                for frames in connection.outbound.write_all(messages):
                    connection.router.socket.send_multipart((identity, *frames), flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self.forget(connection.client)
                gone.append(connection.client)
        self.look()
        return gone

    def forget(self, client: Client) -> None:
        self._connections.pop(client.identity, None)

    def tell_all(self, message: FromGateway) -> None:
        """Queues a message for every client."""
        for identity in self._connections:
            self.deliver(identity, message)

    def probe(self, silence: float, message: Pong) -> None:
        """Sends a message to clients that were silent for `silence` seconds; `flush` then finds those that are gone.

        A program that is stopped or busy is not gone."""
        now = self._clock.now()
        for identity, connection in self._connections.items():
            if now - connection.last_seen > silence:
                connection.last_seen = now
                self.deliver(identity, message)

    def waiting(self) -> list[Connection]:
        """Returns the connections that asked whether the runtime is ready and have no answer yet."""
        return [connection for connection in self._connections.values() if connection.waits_for_welcome]

    def _connection(self, router: Router, identity: bytes, now: float) -> Connection | None:
        """Finds or makes the connection of a frame; None when there are too many."""
        connection = self._connections.get(identity)
        if connection is None:
            if len(self._connections) >= self._max_connections:
                self.counters["clients_refused"] += 1
                return None
            inbound = Inbound(self._incoming, self.counters)
            outbound = Outbound(self._outgoing, too_large_for_client)
            client = Client(self, identity)
            connection = self._connections[identity] = Connection(client, router, inbound, outbound, now)
        connection.last_seen = now
        return connection


log = logging.getLogger("umbel.gateway")


class LongPrompts:
    """Tokenizes long prompts in a thread before the gateway receives them.

    A hundred pages take the tokenizer tens of milliseconds, in which no other client would be answered. So such a text
    is encoded by a thread first, and its tokens are there when the gateway asks for them. Later messages of the same
    request wait for it: an abort never overtakes its request. Other requests do not wait, also those of the same
    client, which may be a server with many clients of its own. Long texts take turns, so that requests with one new
    text have it encoded once.

    Args:
        after: called when messages that waited have been received, to flush the answers.
    """

    def __init__(self, gateway: Gateway, after: Callable[[], None]) -> None:
        self._gateway = gateway
        self._after = after
        self._waiting: dict[Client, dict[str, deque[ToBackend]]] = {}  # by the id of a request with a long text
        self._tasks: set[asyncio.Task[None]] = set()
        # One thread: more of them would take the cores from the model.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="umbel-tokenizer")
        self._turn = asyncio.Lock()
        self.counters: Counter[str] = Counter()

    def receive(self, client: Client, message: ToBackend) -> None:
        """Passes a message to the gateway, now or after the earlier ones of its request."""
        queue = self._waiting.get(client, {}).get(message.id)
        if queue is not None:
            queue.append(message)
        elif self._gateway.is_long(message):
            queue = self._waiting.setdefault(client, {})[message.id] = deque([message])
            work = self._work_off(client, message.id, queue)
            task = asyncio.get_running_loop().create_task(work, name="a long prompt")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._gateway.receive(client, message)

    def client_lost(self, client: Client) -> None:
        """Drops the waiting messages of a client that is gone."""
        self._waiting.pop(client, None)
        self._gateway.client_lost(client)

    async def _work_off(self, client: Client, request_id: str, queue: deque[ToBackend]) -> None:
        while queue:
            async with self._turn:
                if self._gone(client, request_id, queue):
                    return
                await self._prepare(queue[0])
            if self._gone(client, request_id, queue):
                return
            self._gateway.receive(client, queue.popleft())
            self._after()
        del self._waiting[client][request_id]
        if not self._waiting[client]:
            del self._waiting[client]

    def _gone(self, client: Client, request_id: str, queue: deque[ToBackend]) -> bool:
        """Returns whether the client has gone meanwhile."""
        return self._waiting.get(client, {}).get(request_id) is not queue

    async def _prepare(self, message: ToBackend) -> None:
        """Tokenizes the text. An error comes again when the gateway receives the message, and is answered there."""
        if not isinstance(message, Prompted) or not self._gateway.is_long(message):
            return
        encoder = self._gateway.encoder.of(message)
        try:
            texts = encoder.new_texts(message.prompt)
            ids = await asyncio.get_running_loop().run_in_executor(self._pool, encoder.encode_texts, texts)
            encoder.learn(texts, ids)
            self.counters["tokenized_in_a_thread"] += 1
        except Exception as error:
            log.info("a long text was not prepared: %s", type(error).__name__)
