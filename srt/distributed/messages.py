"""Defines the messages between rank 0 and the other ranks: typed msgpack over an unnamed pair of sockets.

    rank 0 ──── RankStep, Clear, EnginePicture, EngineForget ────▶ rank 1, 2, …   in the order in which they take effect
    rank 0 ◀─── RankReady, RankFailed ────────────────────────

A step is sent with its slots, so the other ranks have neither scheduler nor tree. Only rank 0 chooses tokens, so the
row requests stay there.
"""

import socket
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...lang.runtime_options import RuntimeOptions
from ..core.batch import Batch, PictureRows
from ..core.messages import EngineForget, EnginePicture

HEADER = 8  # bytes: the length of a message
MOST_BYTES = 1 << 30  # of one message: the slots of a step are four bytes for each key that it may read


class RankStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line a rank reads on its standard input, as JSON; the pipe then is its lifeline."""

    parent: int
    rank: int
    rendezvous: str  # see communicator.TorchCommunicator
    socket: int  # its end of the pair
    options: RuntimeOptions


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    pass


class RankStep(_Message, frozen=True):
    """Carries a `batch.Batch` without row requests: arrays as bytes, the slots of all sequences concatenated."""

    token_ids: bytearray
    positions: bytearray
    write_slots: bytearray
    query_lengths: bytearray
    prefix_lengths: bytearray
    slots: bytearray
    logit_rows: bytearray
    paths: tuple[tuple[tuple[int, int, int], ...], ...]
    generated: bytearray | None
    pictures: tuple[tuple[int, int, int, int], ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]
    token_sources: bytearray | None

    @classmethod
    def of(cls, batch: Batch) -> "RankStep":
        return cls(
            _bytes(batch.token_ids, np.int64),
            _bytes(batch.positions, np.int64),
            _bytes(batch.write_slots, np.int64),
            _bytes(batch.query_lengths, np.int32),
            _bytes(batch.prefix_lengths, np.int32),
            _bytes(np.concatenate(batch.slots), np.int32),
            _bytes(batch.logit_rows, np.int64),
            batch.paths,
            None if batch.generated is None else _bytes(batch.generated, np.int32),
            batch.pictures,
            batch.spans,
            None if batch.token_sources is None else _bytes(batch.token_sources, np.int64),
        )

    def batch(self) -> Batch:
        """Returns the batch; its arrays are the message's memory."""
        query_lengths, prefix_lengths = _ints(self.query_lengths), _ints(self.prefix_lengths)
        ends = np.cumsum(query_lengths + prefix_lengths)
        return Batch(
            token_ids=_longs(self.token_ids),
            positions=_longs(self.positions),
            write_slots=_longs(self.write_slots),
            query_lengths=query_lengths,
            prefix_lengths=prefix_lengths,
            slots=tuple(np.split(_ints(self.slots), ends[:-1])),
            logit_rows=_longs(self.logit_rows),
            paths=self.paths,
            generated=None if self.generated is None else _ints(self.generated),
            pictures=tuple(PictureRows(*rows) for rows in self.pictures),
            spans=self.spans,
            token_sources=None if self.token_sources is None else _longs(self.token_sources),
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


def _ints(content: bytearray) -> NDArray[np.int32]:
    return np.frombuffer(content, dtype=np.int32)


def _longs(content: bytearray) -> NDArray[np.int64]:
    return np.frombuffer(content, dtype=np.int64)
