"""Messages between a program's process and the gateway: those of `protocol`, and a few of the link itself.

A frame is one msgpack list of messages, preceded by its number. Both directions are typed, capped in
size and refuse unknown fields; nothing is pickled. The link adds what a socket does not tell: that the
other side is alive, how far its start has come, and that it leaves.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ..errors import ParameterError
from ..programs import GraphWanted, ProgramEvent, RunProgram
from ..protocol import FromBackend, ToBackend, VectorInfo, VocabularyInfo
from ..runtime_options import RuntimeOptions
from ..status import EngineState

MAX_FRAME = 32 * 2**20  # bytes
MOST_MESSAGES = 1 << 14  # of one frame; what is read of them is a hundred bytes each, whatever they are
LONGEST_LABEL = 256  # characters
SEQUENCE_BYTES = 8
FRAME_HEADER = 5  # bytes of a frame before its messages, at most: how many they are


class _Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


# ---- to the gateway


class Hello(_Link, frozen=True):
    """Asks for the gateway. Answered by `Progress` until the engine has made a token, then by `Welcome` or
    `StartFailed`.

    `version`: of umbel at the client. Another one than the gateway's is answered by `StartFailed`, which all versions
    read: their other messages differ.
    """

    version: str = ""


class Ping(_Link, frozen=True):
    """I am alive and listening. Answered by `Pong`."""


class Bye(_Link, frozen=True):
    """I leave: abort my requests. Never answered, and nothing depends on its arrival."""


ToGateway = ToBackend | RunProgram | Hello | Ping | Bye

# ---- from the gateway


class Progress(_Link, frozen=True):
    """A phase of the start, in words for a person.

    Attributes:
        downloading: the model is fetched from the network, which no time limit of the start counts.
    """

    phase: str
    downloading: bool = False


class Welcome(_Link, frozen=True):
    """The runtime is ready."""

    model: str
    context_length: int
    vocabulary: VocabularyInfo
    pool_tokens: int
    max_queue: int
    request_timeout: float
    chat_template: str | None
    template_tokens: dict[str, str]
    max_programs: int
    image_tokens: int = 0  # of a picture at most, see `Capabilities`; 0: the model reads text only
    options: RuntimeOptions = RuntimeOptions()  # of the owner, for clients that have joined
    listens_on: str = ""  # the TCP address with its port, if there is one
    vectors: VectorInfo = VectorInfo()


class StartFailed(_Link, frozen=True):
    """The runtime cannot start. `kind` names a class of `errors.WIRE_ERRORS`."""

    kind: str
    message: str


class Pong(_Link, frozen=True):
    """I am alive, and so is the engine or not. Answers a `Ping`; also sent when the state of the engine changes, and to
    clients that were silent for long.

    `heartbeat_age`: seconds since the last heartbeat of the engine; None while none is ready.
    `replicas`: the states of several engines, one by one.
    """

    engine: EngineState
    heartbeat_age: float | None = None
    replicas: tuple[EngineState, ...] = ()


FromGateway = FromBackend | GraphWanted | ProgramEvent | Progress | Welcome | StartFailed | Pong

# ---- frames

T = TypeVar("T")


class FrameError(Exception):
    """A frame that is not what its type says. Carries the labels of the messages in it, as far as they can be read."""

    def __init__(self, reason: str, labels: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.labels = labels


class _Labelled(msgspec.Struct, frozen=True):
    """Reads only the id of a message. Other fields are skipped."""

    id: str = ""


class Codec(Generic[T]):
    """Encodes and decodes frames of one direction.

    Args:
        kind: the union of message types; given as an object, because a union is not a class.
        max_bytes: a larger frame is refused before it is decoded.
    """

    def __init__(self, kind: Any, max_bytes: int = MAX_FRAME) -> None:  # Any: a union type is no `type`
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[kind])
        self.max_bytes = max_bytes

    def encode(self, messages: Sequence[T | msgspec.Raw]) -> bytes:
        """Raises ParameterError when a text holds half of a surrogate pair, which has no bytes."""
        return self._encoded(messages)

    def encode_one(self, message: T) -> msgspec.Raw:
        """A message that will travel in a frame with others. Raises as `encode` does, for this message alone."""
        return msgspec.Raw(self._encoded(message))

    def _encoded(self, what: object) -> bytes:
        try:
            return self._encoder.encode(what)
        except UnicodeEncodeError as error:
            raise ParameterError(
                f"the text holds {error.object[error.start]!r}, which is no character; "
                "decode the input with errors='replace'"
            ) from None

    def decode(self, frame: bytes) -> list[T]:
        """Raises FrameError, and nothing else, whatever the bytes are."""
        if len(frame) > self.max_bytes:
            raise FrameError(f"a frame of {len(frame)} bytes is larger than the limit of {self.max_bytes}")
        if _count(frame) > MOST_MESSAGES:
            raise FrameError(f"a frame of {_count(frame)} messages; the limit is {MOST_MESSAGES}")
        try:
            messages: list[T] = self._decoder.decode(frame)
        except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
            raise FrameError(str(error), _labels(frame)) from None
        return messages


def _count(frame: bytes) -> int:
    """Reads the number of messages off the first bytes of a frame; 0 where it is no list."""
    first = frame[0] if frame else 0
    match first:
        case 0xDC:
            return int.from_bytes(frame[1:3], "big")
        case 0xDD:
            return int.from_bytes(frame[1:5], "big")
        case _:
            return first & 0x0F if first >> 4 == 0x9 else 0


_cut = msgspec.msgpack.Decoder(list[msgspec.Raw])
_labelled = msgspec.msgpack.Decoder(_Labelled)


def _labels(frame: bytes) -> tuple[str, ...]:
    """The ids in a frame that does not fit its type, so that its sender can be told which request failed.

    No objects are made of the rest of a message: a frame of empty maps would become a hundred times as
    large.
    """
    labels: list[str] = []
    try:
        messages = _cut.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError):
        return ()
    for message in messages:
        with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError, MemoryError):
            labels.append(_labelled.decode(message).id)
    return tuple(dict.fromkeys(label for label in labels if 0 < len(label) <= LONGEST_LABEL))


def encode_sequence(number: int) -> bytes:
    """The frame's number, counted from 0 per direction and peer."""
    return number.to_bytes(SEQUENCE_BYTES, "big")


def decode_sequence(data: bytes) -> int:
    """Raises FrameError when the data is no frame number."""
    if len(data) != SEQUENCE_BYTES:
        raise FrameError(f"a frame number of {len(data)} bytes")
    return int.from_bytes(data, "big")


class Inbound(Generic[T]):
    """The reading end of one direction of one peer: order, repetition, loss, malformed frames.

    Attributes:
        counters: "malformed", "repeated", "lost" frames.
    """

    def __init__(self, codec: Codec[T], counters: Counter[str]) -> None:
        self._codec = codec
        self._next = 0
        self.counters = counters

    def read(self, frames: Sequence[bytes]) -> list[T]:
        """Frames of one socket message → its messages. A repeated frame has none.

        Raises:
            FrameError: and nothing else; with the labels of the messages as far as they can be read.
        """
        try:
            if len(frames) != 2:
                raise FrameError(f"a message of {len(frames)} frames instead of a number and a payload")
            number = decode_sequence(frames[0])
            if number < self._next:
                self.counters["repeated"] += 1
                return []
            messages = self._codec.decode(frames[1])
        except FrameError:
            self.counters["malformed"] += 1
            raise
        self.counters["lost"] += number - self._next
        self._next = number + 1
        return messages


class Outbound(Generic[T]):
    """The writing end of one direction of one peer.

    Args:
        instead: what is sent in place of a message that is larger than a frame may be, which its reader would not
            take. It is given the message and its bytes.
    """

    def __init__(self, codec: Codec[T], instead: Callable[[T | msgspec.Raw, int], T] | None = None) -> None:
        self._codec = codec
        self._instead = instead
        self._next = 0

    def write(self, messages: Sequence[T | msgspec.Raw]) -> tuple[bytes, bytes]:
        """Messages → the frames of one socket message."""
        return self._numbered(self._codec.encode(messages))

    def write_all(self, messages: Sequence[T | msgspec.Raw]) -> Iterator[tuple[bytes, bytes]]:
        """Messages → one socket message, or as many as it takes to keep each frame below the limit of its reader."""
        payload = self._codec.encode(messages)
        if len(payload) <= self._codec.max_bytes and len(messages) <= MOST_MESSAGES:
            yield self._numbered(payload)
            return
        if len(messages) == 1:
            assert self._instead is not None, f"a message of {len(payload)} bytes is larger than a frame"
            yield self._numbered(self._codec.encode([self._instead(messages[0], len(payload))]))
            return
        middle = len(messages) // 2
        yield from self.write_all(messages[:middle])
        yield from self.write_all(messages[middle:])

    def _numbered(self, payload: bytes) -> tuple[bytes, bytes]:
        frames = encode_sequence(self._next), payload
        self._next += 1
        return frames
