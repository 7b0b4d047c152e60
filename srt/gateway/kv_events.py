"""Publishes the cached blocks of all engines to foreign routers: vLLM's events, with replay, and snapshots.

    PUB      [topic][number][batch]                      a batch is [time, events, engine]; numbers go up by one
    ROUTER   [""][number]    ▶ [""][topic][number][batch] …  [""][""][-1][""]          what was published since
             [""]["snapshot"] ▶ [""][topic][resume][batch] …  [""][""][-1][epoch]       all blocks there are

Numbers are 8 bytes, big-endian. The first number of a gateway, its epoch, is the time of its start in microseconds: so
the numbers of the next gateway are all higher, and a subscriber that missed a restart sees a gap. Every batch of a
snapshot carries the number at which the live stream goes on after it. A subscriber with a gap asks for a replay; where
that begins too late it holds its copy for stale until a snapshot came.

Blocks are those of kv_blocks.py. The gateway gives every message of an engine's cache events, and says when an engine
is ready, is gone, or has lost frames. Everything runs on the gateway's loop and waits for nothing: what a slow
subscriber does not take in time is dropped for it alone.
"""

import logging
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

import msgspec
import zmq

from ...lang.errors import ParameterError
from ...lang.transport.inlet import Inlet, prepare
from ..core.messages import CacheCleared, CacheEvents, EnginePicture, ToEngine
from .kv_blocks import AllBlocksCleared, BlockEvent, KVBlocks

TOPIC = b"kv-events"
KEPT_BATCHES = 10_000  # for replay
MOST_QUEUED = 20_000  # messages for one subscriber: a replay and more; what is beyond them is dropped
KEPT_BYTES = 64 << 20  # of all kept batches together
LARGEST_QUESTION = 64  # bytes
SNAPSHOT = b"snapshot"
SNAPSHOT_EVENTS = 256  # of one batch
KNOWN_PICTURES = 1 << 16
_END = (-1).to_bytes(8, "big", signed=True)

log = logging.getLogger("umbel.gateway")


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Holds the events that are published at once."""

    ts: float
    events: Sequence[BlockEvent]
    data_parallel_rank: int | None = None  # the engine


def endpoints(address: str) -> tuple[str, str]:
    """Returns the addresses of the stream and of its questions: the next port, or a second file."""
    if address.isdigit():
        address = f"tcp://127.0.0.1:{address}"
    if address.startswith("ipc://"):
        return address, f"{address}.replay"
    host, _, port = address.rpartition(":")
    return address, f"{host}:{int(port) + 1}"


class KVEventPublisher:
    """Publishes on one address. Made on a running loop.

    Args:
        address: of RuntimeOptions.kv_events.
        now: seconds since 1970.
        on_error: called with an exception of reading questions.

    Raises:
        ParameterError: the address cannot be bound.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        *,
        now: Callable[[], float],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._now = now
        self._epoch = self._next = int(now() * 1e6)
        self._blocks: dict[int, KVBlocks] = {}  # engine → its blocks; none while they are not known
        self._digests: OrderedDict[int, str] = OrderedDict()  # a picture's number → the digest of its pixels
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._pack = msgspec.msgpack.Encoder().encode
        stream, questions = endpoints(address)
        self._stream = prepare(context.socket(zmq.PUB), LARGEST_QUESTION)
        self._questions = prepare(context.socket(zmq.ROUTER), LARGEST_QUESTION)
        for socket, where in ((self._stream, stream), (self._questions, questions)):
            socket.setsockopt(zmq.SNDHWM, MOST_QUEUED)
            socket.setsockopt(zmq.IPV6, int("[" in where))
            try:
                socket.bind(where)
            except zmq.ZMQError as error:
                self._stream.close()
                self._questions.close()
                raise ParameterError(f"kv_events: {where!r} cannot be bound: {error}; write another address") from None
        self._inlet = Inlet(self._questions, self._answer_all, on_error)
        if not re.match(r"ipc://|tcp://(127\.|localhost:|\[::1\])", stream):
            log.warning("kv_events: token ids of all prompts are published to every machine that can reach %s", stream)

    def close(self) -> None:
        self._inlet.close()
        self._stream.close()
        self._questions.close()

    # ------------------------------------------------------------------ the gateway says

    def watched(self, send: Callable[[ToEngine], None]) -> Callable[[ToEngine], None]:
        """Returns a function that sends to an engine, and notes what its pictures are."""

        def noting(message: ToEngine) -> None:
            if isinstance(message, EnginePicture) and message.digest:
                self._digests[message.number] = message.digest.hex()
                self._digests.move_to_end(message.number)
                while len(self._digests) > KNOWN_PICTURES:
                    self._digests.popitem(last=False)
            send(message)

        return noting

    def ready(self, engine: int) -> None:
        """Notes that an engine begins, with an empty cache."""
        self._blocks[engine] = KVBlocks(self._digest_of)
        self._publish(engine, [AllBlocksCleared()])

    def gone(self, engine: int) -> None:
        """Notes that an engine has ended, and its cache with it."""
        if self._blocks.pop(engine, None) is not None:
            self._publish(engine, [AllBlocksCleared()])

    def frames_lost(self, engine: int) -> None:
        """Notes that events of an engine were lost. Nothing is published of it until a snapshot of it came."""
        self._blocks.pop(engine, None)

    def follow(self, engine: int, message: CacheEvents) -> bool:
        """Publishes what the changes of an engine's tree mean for its blocks.

        False: they do not fit. The caller asks the engine for a snapshot, and nothing is published until it came.
        """
        blocks = self._blocks.get(engine)
        if blocks is None:
            if not isinstance(message.events[0], CacheCleared):
                return True
            blocks = self._blocks[engine] = KVBlocks(self._digest_of)
        try:
            events = blocks.follow(message.events)
        except KeyError:
            log.error(
                "the cache events of engine %d do not fit; its blocks are published again after a snapshot", engine
            )
            self.counters["kv_events_misfits"] += 1
            self.frames_lost(engine)
            return False
        if events:
            self._publish(engine, events)
        return True

    # ------------------------------------------------------------------ subscribers

    def _publish(self, engine: int, events: list[BlockEvent]) -> None:
        number, self._next = self._next, self._next + 1
        batch = self._pack(EventBatch(self._now(), events, engine))
        self._stream.send_multipart([TOPIC, number.to_bytes(8, "big"), batch], flags=zmq.NOBLOCK)
        self.counters["kv_event_batches"] += 1
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer_all(self, questions: list[list[bytes]]) -> None:
        for asker, *frames in questions:
            match frames:
                case [b"", question] if question == SNAPSHOT:
                    self.counters["kv_events_snapshots"] += 1
                    answers, end = self._snapshot(), self._epoch.to_bytes(8, "big")
                case [b"", question] if len(question) == 8:
                    self.counters["kv_events_replays"] += 1
                    answers, end = self._since(int.from_bytes(question, "big")), b""
                case _:
                    self.counters["kv_events_malformed"] += 1
                    continue  # without the empty frame the asker's socket would drop the answer
            for number, batch in answers:
                self._questions.send_multipart([asker, b"", TOPIC, number.to_bytes(8, "big"), batch], zmq.NOBLOCK)
            self._questions.send_multipart([asker, b"", b"", _END, end], zmq.NOBLOCK)

    def _since(self, first: int) -> Iterator[tuple[int, bytes]]:
        return ((number, batch) for number, batch in self._kept if number >= first)

    def _snapshot(self) -> Iterator[tuple[int, bytes]]:
        """Yields all blocks of each engine after an AllBlocksCleared, and the number at which the stream goes on."""
        now = self._now()
        for engine, blocks in sorted(self._blocks.items()):
            events: list[BlockEvent] = [AllBlocksCleared()]
            for stored in blocks.snapshot():
                events.append(stored)
                if len(events) == SNAPSHOT_EVENTS:
                    yield self._next, self._pack(EventBatch(now, events, engine))
                    events = []
            if events:
                yield self._next, self._pack(EventBatch(now, events, engine))

    def _digest_of(self, picture: int) -> str:
        """Returns what names a picture in all gateways, or, for one that was evicted from the table, in this one."""
        return self._digests.get(picture) or f"{self._epoch}/{picture}"
