"""Runs steps on all ranks: the scheduler's runner on rank 0 sends each step to the other ranks, then computes its part.

    rank 0 ──── RankStep, Clear, EnginePicture, EngineForget ────▶ rank 1, 2, …   in the order in which they take effect
    rank 0 ◀─── RankReady, RankFailed ────────────────────────

Messages are typed msgpack over an unnamed pair of sockets. A step is sent with its slots, so the other ranks have
neither scheduler nor tree: of a sequence that was in the step before, those that are new (`SentSlots`, `KnownSlots`).
Only rank 0 chooses tokens, so the row requests stay there.

Each rank plans attention for its own heads, which are as many on all ranks, so all plans are equal. Where 256 sequences
of 4,096 keys decode, rank 0 writes a step in 0.14 ms (19 kB; whole, its slots are 4.2 MB and 0.74 ms), another rank
reads it in 0.29 ms, and a plan takes each 0.10 ms, at the same time (two cores, AVX-512). To broadcast inputs and plan
from device to device would save the others that time, and would add an exchange to every step, next to the message that
says how large the step is. So the one exchange of a step outside of its layers is that of tokens which rank 0 has
chosen and not read (`CudaRunner`).

Steps reach the others in the order in which they are computed here, so all ranks make the same exchanges in the same
order. If a step fails on one rank, the next exchange would no longer match: the engine ends (`RanksApart`), and its
supervisor starts it again.
"""

import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeVar, assert_never

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...fsm.tokens.masks import Walk
from ...lang.runtime_options import RuntimeOptions
from ..core.batch import (
    AsyncRunner,
    Batch,
    Chooser,
    LaunchedStep,
    Logits,
    PictureGrid,
    PictureRows,
    PictureStore,
    Runner,
)
from ..core.messages import EngineForget, EnginePicture

HEADER = 8  # bytes: the length of a message
MOST_BYTES = 1 << 30  # of one message: slots are four bytes for each key that a step may read
LEAST_ROOM = 256  # slots of tokens to come that another rank keeps room for; else a quarter of those that there are


class RankStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line a rank reads on its standard input, as JSON; the pipe then is its lifeline."""

    parent: int
    rank: int
    rendezvous: str  # see communicator.TorchCommunicator
    socket: int  # its end of the pair
    options: RuntimeOptions
    replica: int = 0  # number of its engine


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    pass


class SentSlots:
    """Says which slots of a step the other ranks lack. They know those of the sequences of the step before."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # number of a sequence → positions whose slots were sent

    def lacking(self, batch: Batch) -> NDArray[np.int32]:
        """Returns the first position of each sequence whose slot is to be sent, [B]. Called once for each step."""
        numbers, changed = batch.sequences, batch.changed
        if numbers is None or changed is None:
            self._ends = {}
            return np.zeros_like(batch.prefix_lengths)
        names = numbers.tolist()
        sent = np.array([self._ends.get(name, 0) for name in names], dtype=np.int32)
        self._ends = dict(zip(names, (batch.prefix_lengths + batch.query_lengths).tolist(), strict=True))
        return np.minimum(np.minimum(changed, batch.prefix_lengths), sent)


class KnownSlots:
    """Keeps the slots of the sequences of the last step, and completes those of the next one."""

    def __init__(self) -> None:
        self._slots: dict[int, NDArray[np.int32]] = {}  # number of a sequence → its slots, and room for more

    def complete(
        self, numbers: NDArray[np.int64] | None, first: NDArray[np.int32], ends: NDArray[np.int32], sent: bytearray
    ) -> tuple[NDArray[np.int32], ...]:
        """Returns the slots [0, end) of each sequence, valid until the next call.

        Positions before a window keep the slots that they had, where rank 0 has 0: no row sees them.

        Args:
            numbers: of the sequences [B]; None: the slots of all are sent whole.
            first: the first position of each whose slot was sent, [B].
            sent: slots [first, end) of all sequences, concatenated.
        """
        new = _ints(sent)
        if numbers is None:
            self._slots = {}
            return tuple(np.split(new, np.cumsum(ends - first)[:-1]))
        known: dict[int, NDArray[np.int32]] = {}
        done = 0
        for name, begin, end in zip(numbers.tolist(), first.tolist(), ends.tolist(), strict=True):
            slots = self._slots.get(name)
            if slots is None or len(slots) < end:
                longer = np.empty(end + max(LEAST_ROOM, end // 4), dtype=np.int32)
                if slots is not None:
                    longer[:begin] = slots[:begin]
                slots = longer
            slots[begin:end] = new[done : done + end - begin]
            done += end - begin
            known[name] = slots
        self._slots = known
        return tuple([slots[:end] for slots, end in zip(known.values(), ends.tolist(), strict=True)])


class RankStep(_Message, frozen=True):
    """Carries a `batch.Batch` without row requests: arrays as bytes, slots as `SentSlots` says, concatenated."""

    token_ids: bytearray
    positions: bytearray
    write_slots: bytearray
    query_lengths: bytearray
    prefix_lengths: bytearray
    first_slots: bytearray
    slots: bytearray
    logit_rows: bytearray
    paths: tuple[tuple[tuple[int, int, int], ...], ...]
    generated: bytearray | None
    pictures: tuple[tuple[int, int, int, int], ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]
    rope_positions: bytearray | None
    token_sources: bytearray | None
    hidden_rows: bytearray | None
    window_slots: bytearray | None
    window_write_slots: bytearray | None
    sequences: bytearray | None
    changed: bytearray | None

    @classmethod
    def of(cls, batch: Batch, sent: SentSlots) -> "RankStep":
        first = sent.lacking(batch)
        return cls(
            _bytes(batch.token_ids, np.int64),
            _bytes(batch.positions, np.int64),
            _bytes(batch.write_slots, np.int64),
            _bytes(batch.query_lengths, np.int32),
            _bytes(batch.prefix_lengths, np.int32),
            _bytes(first, np.int32),
            _bytes(_tails(batch.slots, first), np.int32),
            _bytes(batch.logit_rows, np.int64),
            batch.paths,
            None if batch.generated is None else _bytes(batch.generated, np.int32),
            batch.pictures,
            batch.spans,
            None if batch.rope_positions is None else _bytes(batch.rope_positions, np.int64),
            None if batch.token_sources is None else _bytes(batch.token_sources, np.int64),
            None if batch.hidden_rows is None else _bytes(batch.hidden_rows, np.int64),
            None if batch.window_slots is None else _bytes(_tails(batch.window_slots, first), np.int32),
            None if batch.window_write_slots is None else _bytes(batch.window_write_slots, np.int64),
            None if batch.sequences is None else _bytes(batch.sequences, np.int64),
            None if batch.changed is None else _bytes(batch.changed, np.int32),
        )

    def batch(self, known: KnownSlots, window: KnownSlots) -> Batch:
        """Returns the batch; its arrays are the message's memory.

        known, window: have the slots of the step before, on all layers, or on those with a window.
        """
        query_lengths, prefix_lengths = _ints(self.query_lengths), _ints(self.prefix_lengths)
        sequences = None if self.sequences is None else _longs(self.sequences)
        sent = sequences, _ints(self.first_slots), query_lengths + prefix_lengths
        return Batch(
            token_ids=_longs(self.token_ids),
            positions=_longs(self.positions),
            write_slots=_longs(self.write_slots),
            query_lengths=query_lengths,
            prefix_lengths=prefix_lengths,
            slots=known.complete(*sent, self.slots),
            logit_rows=_longs(self.logit_rows),
            paths=self.paths,
            generated=None if self.generated is None else _ints(self.generated),
            pictures=tuple(PictureRows(*rows) for rows in self.pictures),
            spans=self.spans,
            rope_positions=None if self.rope_positions is None else _longs(self.rope_positions).reshape(3, -1),
            token_sources=None if self.token_sources is None else _longs(self.token_sources),
            hidden_rows=None if self.hidden_rows is None else _longs(self.hidden_rows),
            window_slots=None if self.window_slots is None else window.complete(*sent, self.window_slots),
            window_write_slots=None if self.window_write_slots is None else _longs(self.window_write_slots),
            sequences=sequences,
            changed=None if self.changed is None else _ints(self.changed),
        )


class Clear(_Message, frozen=True):
    """Clears the KV pool."""


ToRank = RankStep | Clear | EnginePicture | EngineForget


class RankReady(_Message, frozen=True):
    """Reports that the model is loaded and the pool allocated."""

    num_slots: int


class RankFailed(_Message, frozen=True):
    """Reports that the rank cannot start. `kind` names a class of lang.errors.WIRE_ERRORS, or MissingExtraError."""

    kind: str
    message: str


FromRank = RankReady | RankFailed

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)

Message = TypeVar("Message")


def encode(message: ToRank | FromRank) -> bytes:
    """Encodes a message, with its length before it."""
    content = _encoder.encode(message)
    return len(content).to_bytes(HEADER, "little") + content


def to_rank(end: socket.socket) -> Iterator[ToRank]:
    """Reads the messages of rank 0 until it has ended. Raises ValueError for data that is no message."""
    return _messages(end, _to_rank)


def from_rank(end: socket.socket) -> Iterator[FromRank]:
    """Reads the messages of a rank until it has ended. Raises ValueError for data that is no message."""
    return _messages(end, _from_rank)


def _messages(end: socket.socket, decoder: msgspec.msgpack.Decoder[Message]) -> Iterator[Message]:
    with end.makefile("rb") as source:
        while len(header := source.read(HEADER)) == HEADER:
            size = int.from_bytes(header, "little")
            if size > MOST_BYTES:
                raise ValueError(f"a message of {size} bytes is larger than the limit of {MOST_BYTES}")
            content = source.read(size)
            if len(content) < size:
                return
            yield decoder.decode(content)


def _bytes(array: NDArray[np.integer], kind: type[np.integer]) -> bytearray:
    return bytearray(np.ascontiguousarray(array, dtype=kind).data)


def _tails(slots: tuple[NDArray[np.int32], ...], first: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate([own[begin:] for own, begin in zip(slots, first.tolist(), strict=True)])


def _ints(content: bytearray) -> NDArray[np.int32]:
    return np.frombuffer(content, dtype=np.int32)


def _longs(content: bytearray) -> NDArray[np.int64]:
    return np.frombuffer(content, dtype=np.int64)


class RanksApart(BaseException):
    """Ranks may wait for each other in different exchanges. No `Exception`, so that no handler ends only a request."""


class OtherRanks(Protocol):
    """The other ranks, see launch.py."""

    ranks: int  # all of them, including this one

    def send(self, message: ToRank) -> None:
        """Sends a message to all of them. Raises OSError when one has ended."""


class _Sender:
    """Sends messages to the other ranks, from any thread. Pictures to forget are sent before the next message."""

    def __init__(self, others: OtherRanks) -> None:
        self._others = others
        self._lock = threading.Lock()
        self._gone: deque[int] = deque()

    def send(self, message: ToRank) -> None:
        with self._lock:
            while self._gone:
                self._others.send(EngineForget(self._gone.popleft()))
            self._others.send(message)

    def forget_later(self, number: int) -> None:
        """Notes a picture to forget. Takes no lock: finalizers call it, in any thread."""
        self._gone.append(number)


class LeaderStore:
    """Implements `batch.PictureStore` on rank 0.

    The others keep a picture as long as rank 0 does: until it is forgotten and no request holds it.
    """

    def __init__(self, store: PictureStore, sender: _Sender) -> None:
        self.both_ways = store.both_ways
        self._store = store
        self._sender = sender
        self._uploaded: set[int] = set()  # pictures that the others have

    def put(self, picture: EnginePicture) -> None:
        self._store.put(picture)
        if picture.number in self._uploaded:  # forgotten, and still held by a request
            return
        self._uploaded.add(picture.number)
        self._sender.send(picture)
        going = weakref.finalize(self._store.hold(picture.number), self._discard, picture.number)
        going.atexit = False

    def forget(self, number: int) -> None:
        self._store.forget(number)

    def tokens(self, number: int) -> int | None:
        return self._store.tokens(number)

    def grid(self, number: int) -> PictureGrid | None:
        return self._store.grid(number)

    def digest(self, number: int) -> bytes | None:
        return self._store.digest(number)

    def hold(self, number: int) -> object:
        return self._store.hold(number)

    def _discard(self, number: int) -> None:
        self._uploaded.discard(number)
        self._sender.forget_later(number)


class LeaderRunner:
    """Implements `batch.Runner` on all ranks.

    Args:
        runner: computes the part of rank 0.
        others: the other ranks.
        sums: how parts are added up, in words.
    """

    def __init__(self, runner: Runner, others: OtherRanks, *, sums: str) -> None:
        self._runner = runner
        self._sums = sums
        self._ranks = others.ranks
        self._sender = _Sender(others)
        self._sent = SentSlots()
        self._pictures = None if runner.pictures is None else LeaderStore(runner.pictures, self._sender)
        self.vocab_size = runner.vocab_size
        self.context_length = runner.context_length
        self.num_slots = runner.num_slots
        self.num_states = runner.num_states
        self.window_pool = runner.window_pool

    @property
    def pictures(self) -> PictureStore | None:
        return self._pictures

    @property
    def pages(self) -> None:
        """None: each rank has a part of every page, and only rank 0 could save its own."""

    @property
    def chooser(self) -> Chooser | None:
        return self._runner.chooser

    @property
    def trie_walk(self) -> Walk | None:
        return self._runner.trie_walk

    def forward(self, batch: Batch) -> Logits:
        try:
            self._sender.send(RankStep.of(batch, self._sent))
            return self._runner.forward(batch)
        except Exception as error:
            raise RanksApart("a step failed on rank 0, and the others may be in the middle of it") from error

    def facts(self) -> Mapping[str, str | int | float]:
        return {**self._runner.facts(), "ranks": self._ranks, "sums": self._sums}

    def clear(self) -> None:
        self._sender.send(Clear())
        self._runner.clear()


class LeaderAsyncRunner(LeaderRunner):
    """Implements `batch.AsyncRunner` on all ranks: a step that fails after its launch has made all its exchanges."""

    def __init__(self, runner: AsyncRunner, others: OtherRanks, *, sums: str) -> None:
        super().__init__(runner, others, sums=sums)
        self._async_runner = runner

    def launch(self, batch: Batch) -> LaunchedStep:
        try:
            self._sender.send(RankStep.of(batch, self._sent))
            return self._async_runner.launch(batch)
        except Exception as error:
            raise RanksApart("a step failed on rank 0, and the others may be in the middle of it") from error


def lead(runner: Runner, others: OtherRanks, *, sums: str) -> LeaderRunner:
    """Returns a runner of all ranks, asynchronous if that of rank 0 is; see `LeaderRunner`."""
    if isinstance(runner, AsyncRunner):
        return LeaderAsyncRunner(runner, others, sums=sums)
    return LeaderRunner(runner, others, sums=sums)


def follow(runner: Runner, messages: Iterable[ToRank]) -> None:
    """Runs the messages of rank 0 on another rank, in their order, until there are no more.

    This rank's logits are not read, so it never waits for a step.
    """
    known, window = KnownSlots(), KnownSlots()
    for message in messages:
        match message:
            case RankStep() if isinstance(runner, AsyncRunner):
                runner.launch(message.batch(known, window))
            case RankStep():
                runner.forward(message.batch(known, window))
            case Clear():
                runner.clear()
            case EnginePicture():
                assert runner.pictures is not None, "rank 0 has the same model"
                runner.pictures.put(message)
            case EngineForget(number=number):
                assert runner.pictures is not None, "rank 0 has the same model"
                runner.pictures.forget(number)
            case _:
                assert_never(message)
