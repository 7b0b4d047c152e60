"""Frames between gateway and engine: typed msgpack, capped in size, counted.

    gateway ──── [number][list of ToEngine] ────▶ engine          one PAIR per life of the engine,
    gateway ◀─── [number][list of EngineFrame] ── engine          so nothing of a dead one is ever read

A frame that cannot be read costs what was in it and nothing else: it is counted, the reader lives on,
and requests whose messages were lost end by their deadline.
"""

import msgspec

from ...lang.errors import RequestError
from ...lang.protocol import Failure
from ...lang.runtime_options import RuntimeOptions
from ...lang.transport.link import MAX_FRAME, Codec, FromGateway, ToGateway
from .config import MAX_ENGINE_FRAME
from .messages import EngineFailed, FromEngine, ToEngine


class EngineStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line an engine reads on its standard input, as JSON; the pipe then is its lifeline."""

    parent: int
    events: str  # address of the gateway's PAIR
    pulse: str  # address of the gateway's PULL for signs of life
    rendezvous: str  # a file that is not there yet: where the ranks of tensor_parallel meet
    options: RuntimeOptions


class _Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    """Base of what an engine says before it takes requests."""


class EnginePhase(_Start, frozen=True):
    """How far the start has come, in words for a person."""

    phase: str


class EngineReady(_Start, frozen=True):
    """A real token came out of the warm-up."""

    context_length: int
    vocab_size: int
    pool_tokens: int


class EngineStartFailed(_Start, frozen=True):
    """`kind` names a class of lang.errors.WIRE_ERRORS, or MissingExtraError. The engine waits to be ended."""

    kind: str
    message: str


EngineFrame = FromEngine | EnginePhase | EngineReady | EngineStartFailed


def to_engine_codec() -> Codec[ToEngine]:
    return Codec(ToEngine, MAX_ENGINE_FRAME)


def from_engine_codec() -> Codec[EngineFrame]:
    return Codec(EngineFrame, MAX_ENGINE_FRAME)


def to_gateway_codec() -> Codec[ToGateway]:
    return Codec(ToGateway)


def from_gateway_codec() -> Codec[FromGateway]:
    return Codec(FromGateway)


def too_large_for_client(message: FromGateway | msgspec.Raw, size: int) -> FromGateway:
    """What a client is told in place of an answer that no frame holds, such as millions of log-probabilities."""
    label = getattr(message, "id", "")
    return Failure(
        label,
        RequestError.__name__,
        f"the answer has {size} bytes and a frame holds {MAX_FRAME}; ask for fewer tokens, continuations or "
        "log-probabilities at once",
    )


def too_large_for_gateway(message: EngineFrame | msgspec.Raw, size: int) -> EngineFrame:
    """As `too_large_for_client`, of the engine."""
    label = getattr(message, "id", 0)
    reason = f"the answer has {size} bytes and {MAX_ENGINE_FRAME} are accepted; ask for fewer log-probabilities"
    return EngineFailed(label, RequestError.__name__, reason)
