"""Messages between gateway and engine, and the frames they travel in: token ids down, token ids back.

    gateway ──── [number][list of ToEngine] ────▶ engine          one PAIR per life of the engine,
    gateway ◀─── [number][list of EngineFrame] ── engine          so nothing of a dead one is ever read

Frames are typed msgpack, capped in size and counted. One that cannot be read costs its messages and nothing else: it is
counted, the reader lives on, and requests whose messages were lost end by their deadline.

Every `EngineGenerate`, `EngineScore`, `EngineChoose` and `EngineControl` is ended exactly once, by `Ended`,
`ScoreEnded`, `ChooseEnded`, `ControlEnded` or `EngineFailed` with its id. Ids are made by the gateway and never reused.
"""

from typing import Literal

import msgspec

from ...lang.errors import RequestError
from ...lang.protocol import Facts, Failure, FinishReason, JsonWhitespace
from ...lang.runtime_options import RuntimeOptions
from ...lang.sampling import SamplingParams
from ...lang.transport.link import MAX_FRAME, Codec, FromGateway, ToGateway
from .config import MAX_ENGINE_FRAME

EnforcedBy = Literal["fsm", "llguidance"]


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    pass


class Schedule(msgspec.Struct, frozen=True, array_like=True):
    """What the scheduler may use to order and to isolate requests."""

    program_id: str = ""
    fork_group: str = ""
    salt: str = ""
    priority: int = 0
    timeout: float | None = None  # seconds from arrival at the engine
    ahead: int = 0  # see lang.protocol.Origin


# ---- to the engine


class EngineConstraint(msgspec.Struct, frozen=True, array_like=True):
    """A constraint that the gateway has compiled. The engine keeps what it makes of it by `digest` and salt."""

    digest: str
    engine: EnforcedBy
    kind: Literal["regex", "json_schema", "lark"]
    data: bytes  # for "fsm" an `fsm.language.Grammar` as msgpack, for "llguidance" the source
    whitespace: JsonWhitespace = "spaced"  # of JSON, for llguidance
    why: str = ""  # our own automata do not honour it
    nbytes: int = 0  # that llguidance was seen to take for it


class EngineGenerate(_Wire, frozen=True):
    """One continuation (the gateway splits `n`; `seed` is always set). max_tokens=0 computes the prompt only.

    `heal`: the last token of the prompt is plain text and may be replaced by a longer one that begins with it.
    """

    id: int
    token_ids: list[int]
    sampling: SamplingParams
    stream: bool  # send Tokens as they come, else only with Ended
    schedule: Schedule = Schedule()
    constraint: EngineConstraint | None = None
    heal: bool = False


class EngineScore(_Wire, frozen=True):
    """Log-probabilities of tokens [start, len) of each sequence; all of them share tokens [0, start)."""

    id: int
    sequences: list[list[int]]
    start: int
    schedule: Schedule = Schedule()


class EngineChoose(_Wire, frozen=True):
    """How probable it is that a prompt goes on with each of some texts, over all their tokens.

    `prompt[:start]` is what all share; `choices`: the usual tokens of the rest of the prompt with each choice behind
    it. `heal`: the prompt ends in plain text, and a choice may begin inside its last token. `search`: look for other
    tokens than the usual ones, until the bounds are close.
    """

    id: int
    prompt: list[int]
    choices: list[list[int]]
    start: int
    heal: bool
    search: bool
    schedule: Schedule = Schedule()


class EnginePrefill(_Wire, frozen=True):
    """A hint: compute this prefix and keep it. Never answered. `pin`: see lang.protocol.Hint."""

    id: int
    token_ids: list[int]
    schedule: Schedule = Schedule()
    pin: float | None = None


class EngineRelease(_Wire, frozen=True):
    """The end of what the EnginePrefill with this id has pinned, or is about to pin. Never answered."""

    id: int


class EngineAbort(_Wire, frozen=True):
    id: int


class EnginePicture(_Wire, frozen=True):
    """A picture that messages behind this one may hold, see pictures/numbers.py, until it is forgotten. Never answered.

    `width` and `height` are those of the original; `columns` × `rows` is how it was cut into tiles (anyres), 0 × 0 when
    it was not. The tiles that the model's tower sees: an overview, then those of the grid, row by row.
    """

    number: int
    tokens: int
    width: int
    height: int
    columns: int
    rows: int
    tile_height: int
    tile_width: int
    pixels: bytes  # uint8 RGB [tiles, tile_height, tile_width, 3]


class EngineForget(_Wire, frozen=True):
    """No message behind this one holds the picture of this number. Never answered."""

    number: int


class EngineControl(_Wire, frozen=True):
    """verb: "flush_cache" or "info"."""

    id: int
    verb: str


ToEngine = (
    EngineGenerate
    | EngineScore
    | EngineChoose
    | EnginePrefill
    | EngineRelease
    | EngineAbort
    | EnginePicture
    | EngineForget
    | EngineControl
)

# ---- from the engine


class IdLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Tokens(_Wire, frozen=True):
    """New tokens of a streaming request, in order. `healed`: as in Ended."""

    id: int
    token_ids: list[int]
    logprobs: list[IdLogprob] = []
    healed: int = 0


class Ended(_Wire, frozen=True):
    """The end of an EngineGenerate.

    `token_ids` are those not sent by `Tokens`. End-of-sequence and stop tokens are the last of them when they
    ended the text. `text_bytes`: length in bytes of the whole generated text without the stop string.
    `forced_tokens`: about so many of them the constraint left no choice. `enforced`: the text satisfies the request's
    constraint. `healed`: so many bytes of the first token repeat the end of the prompt; `text_bytes` does not count
    them.
    """

    id: int
    token_ids: list[int]
    finish_reason: FinishReason
    matched_stop: str | int | None
    text_bytes: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    logprobs: list[IdLogprob] = []
    prompt_logprobs: list[IdLogprob] = []
    forced_tokens: int = 0
    enforced: bool = False
    healed: int = 0


class ScoreEnded(_Wire, frozen=True):
    """Per sequence the log-probabilities of tokens [start, len)."""

    id: int
    logprobs: list[list[float]]
    prompt_tokens: int  # summed over the sequences
    cached_tokens: int


class ChooseEnded(_Wire, frozen=True):
    """Per choice, in natural logarithms: how probable it is that the prompt goes on with it and with no longer one of
    the choices. Without a search `upper` is empty: `lower` counts the usual tokens, and what goes past their end.

    `logprobs`: of the tokens of each choice, as in ScoreEnded.
    """

    id: int
    lower: list[float]
    upper: list[float]
    logprobs: list[list[float]]
    evaluations: int  # token sequences that the model was asked about
    prompt_tokens: int  # summed over them
    cached_tokens: int


class ControlEnded(_Wire, frozen=True):
    id: int
    result: Facts


class EngineFailed(_Wire, frozen=True):
    """`kind` names a class of lang.errors.WIRE_ERRORS."""

    id: int
    kind: str
    message: str


class Heartbeat(_Wire, frozen=True):
    """Sent when the engine is ready, then at least once a second also during long steps' gaps.

    `counters` are cumulative; see `Scheduler.counters`.
    """

    step: int
    running: int
    waiting: int
    counters: dict[str, float] = {}


FromEngine = Tokens | Ended | ScoreEnded | ChooseEnded | ControlEnded | EngineFailed | Heartbeat


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
