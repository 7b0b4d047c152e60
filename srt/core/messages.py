"""Messages between gateway and engine, and the frames they travel in: token ids down, token ids back.

    gateway ──── [number][list of ToEngine] ────▶ engine          one PAIR per life of the engine,
    gateway ◀─── [number][list of EngineFrame] ── engine          so nothing of a dead one is ever read

Frames are typed msgpack, capped in size and counted. An unreadable frame is counted and loses its messages only: the
requests whose messages were lost end by their deadline.

Every `EngineGenerate`, `EngineScore`, `EngineChoose`, `EngineEmbed`, `EngineControl` and `EngineSurvey` is ended
exactly once, by `Ended`, `ScoreEnded`, `ChooseEnded`, `EmbedEnded`, `ControlEnded`, `EngineSurveyed` or `EngineFailed`
with its id. Ids are made by the gateway and never reused.
"""

from typing import Literal

import msgspec

from ...lang.errors import RequestError
from ...lang.prompt import Borders
from ...lang.protocol import Facts, Failure, FinishReason, JsonWhitespace, RequestTimes, TextOrigin
from ...lang.runtime_options import RuntimeOptions
from ...lang.sampling import SamplingParams
from ...lang.status import PoolGauges, TreeSurvey
from ...lang.transport.link import MAX_FRAME, Codec, FromGateway, ToGateway
from .config import MAX_ENGINE_FRAME

NO_ADAPTER = -1  # place of an adapter: the model is used as it is

EnforcedBy = Literal["fsm", "llguidance"]


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    pass


class Schedule(msgspec.Struct, frozen=True, array_like=True):
    """Facts by which the scheduler orders and isolates requests.

    `private`: places of tokens at which private namespaces open; before the first one the namespace is `salt`.
    `adapter`: computes all rows, by its place in `RuntimeOptions.adapters`; its namespace opens at place 0.
    """

    program_id: str = ""
    fork_group: str = ""
    salt: str = ""
    priority: int = 0
    timeout: float | None = None  # seconds from arrival at the engine
    ahead: int = 0  # see lang.protocol.Origin
    private: Borders = ()
    adapter: int = NO_ADAPTER


# ---- to the engine


class EngineConstraint(msgspec.Struct, frozen=True, array_like=True):
    """A constraint that the gateway has compiled. The engine caches the opened one by `digest` and salt."""

    digest: str
    engine: EnforcedBy
    kind: Literal["regex", "json_schema", "lark", "tools", "expression"]
    data: bytes  # for "fsm" an `fsm.language.Grammar` as msgpack, for "llguidance" the source
    whitespace: JsonWhitespace = "spaced"  # of JSON, for llguidance
    why: str = ""  # our own automata do not support it
    nbytes: int = 0  # memory that llguidance was measured to take for it


class EngineMark(msgspec.Struct, frozen=True, array_like=True):
    """A prefix of a prompt to keep from eviction: explicit caching.

    It ends with an EngineRelease of its id. Should none come, it ends `seconds` after it was placed or renewed.
    """

    id: int  # of the kept prefix; the gateway gives no message the same
    length: int  # tokens, at least 1
    seconds: float


class EngineGenerate(_Wire, frozen=True):
    """Asks for one continuation (the gateway splits `n`; `seed` is always set). max_tokens=0 computes the prompt only.

    `heal`: the last token of the prompt is plain text and may be replaced by a longer one that begins with it.
    `marks`: prefixes to keep once the prompt is computed, by length; then MarksPlaced is sent, also where there is
    nothing to keep. None: neither. Healing never replaces a token before a mark.
    """

    id: int
    token_ids: list[int]
    sampling: SamplingParams
    stream: bool  # send Tokens as they come, else only with Ended
    schedule: Schedule = Schedule()
    constraint: EngineConstraint | None = None
    heal: bool = False
    marks: list[EngineMark] | None = None


class EngineScore(_Wire, frozen=True):
    """Asks for log-probabilities of tokens [start, len) of each sequence; all of them share tokens [0, start).

    `marks`: as in EngineGenerate, of the shared tokens.
    """

    id: int
    sequences: list[list[int]]
    start: int
    schedule: Schedule = Schedule()
    marks: list[EngineMark] | None = None


class EngineChoose(_Wire, frozen=True):
    """Asks for the probability that a prompt goes on with each of some texts, summed over all their tokenizations.

    `prompt[:start]` is shared by all; `choices`: the usual tokens of the rest of the prompt with each choice appended.
    `heal`: the prompt ends in plain text, and a choice may begin inside its last token. `search`: look for other tokens
    than the usual ones, until the bounds are close. `marks`: as in EngineGenerate, of the shared tokens.
    """

    id: int
    prompt: list[int]
    choices: list[list[int]]
    start: int
    heal: bool
    search: bool
    schedule: Schedule = Schedule()
    marks: list[EngineMark] | None = None


class EngineEmbed(_Wire, frozen=True):
    """Asks for the vector of a text: an embedding, or the logits of a classifier. `dimensions`: 0 is all of them."""

    id: int
    token_ids: list[int]
    dimensions: int = 0
    schedule: Schedule = Schedule()


class EnginePrefill(_Wire, frozen=True):
    """Asks to compute a prefix and keep it: a hint. Never answered. `pin`: see lang.protocol.Hint.

    What it computes counts as computed by the first request that finds it, not as cached.
    """

    id: int
    token_ids: list[int]
    schedule: Schedule = Schedule()
    pin: float | None = None


class EngineRelease(_Wire, frozen=True):
    """Ends the pin of the EnginePrefill, or the kept prefix of the EngineMark, with this id. Never answered.

    A pin ends also when it is still to come.
    """

    id: int


class EngineRenew(_Wire, frozen=True):
    """Lets the kept prefix with this id end `seconds` from now at the earliest. Never answered."""

    id: int
    seconds: float


class EngineAbort(_Wire, frozen=True):
    id: int


class EnginePicture(_Wire, frozen=True):
    """Brings a picture that later messages may use, by `batch.picture_tokens`, until it is forgotten. Never answered.

    `width` and `height` are those of the original; `columns` × `rows` is how it was cut into tiles (anyres), 0 × 0 when
    it was not. The tiles that the model's tower sees: an overview, then those of the grid, row by row.

    A part of a clip has several frames of one size in place of tiles. `time`: as of `batch.PictureGrid`.

    `digest`: SHA-256 of the decoded pixels, their shape and their preparation, made by the gateway (`stills.key_of`):
    the number is this gateway's own, the digest is the same everywhere. Empty: no page is named by the picture.
    """

    number: int
    tokens: int
    width: int
    height: int
    columns: int
    rows: int
    tile_height: int
    tile_width: int
    pixels: bytes  # uint8 RGB [tiles or frames, tile_height, tile_width, 3]
    frames: int = 1
    time: int | None = None
    digest: bytes = b""


class EngineForget(_Wire, frozen=True):
    """Says that no later message uses the picture of this number. Never answered."""

    number: int


class EngineControl(_Wire, frozen=True):
    """Asks for an action on the engine. verb: "flush_cache" or "info"."""

    id: int
    verb: str


class EngineSurvey(_Wire, frozen=True):
    """Asks for up to `most` nodes of the radix tree, each with its first `shown` tokens."""

    id: int
    most: int
    shown: int


class EngineSnapshot(_Wire, frozen=True):
    """Asks for the whole radix tree: the next CacheEvents begin with CacheCleared and tell all nodes.

    The gateway sends it after frames of the engine were lost; its copy is stale until a CacheCleared comes. An engine
    that tells no cache events ignores it.
    """


class EngineEnd(_Wire, frozen=True):
    """Asks the engine's process to save pages of its cache for the next start, and to end. Requests get no answer."""


ToEngine = (
    EngineGenerate
    | EngineScore
    | EngineChoose
    | EngineEmbed
    | EnginePrefill
    | EngineRelease
    | EngineRenew
    | EngineAbort
    | EnginePicture
    | EngineForget
    | EngineControl
    | EngineSurvey
    | EngineSnapshot
    | EngineEnd
)

# ---- from the engine


class IdLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Tokens(_Wire, frozen=True):
    """Brings new tokens of a streaming request, in order. `healed`: as in Ended."""

    id: int
    token_ids: list[int]
    logprobs: list[IdLogprob] = []
    healed: int = 0


class TokenRun(msgspec.Struct, frozen=True, array_like=True):
    """Generated tokens [first, end) of one origin.

    `origin`: "forced", the constraint left no choice about them; or "guessed", the runtime guessed them right, so that
    their rows ran in the step of a token before them.
    """

    origin: TextOrigin
    first: int
    end: int


class Ended(_Wire, frozen=True):
    """Ends an EngineGenerate.

    `token_ids` are those not sent by `Tokens`. End-of-sequence and stop tokens are the last of them when they
    ended the text. `text_bytes`: length in bytes of the whole generated text without the stop string.
    `forced_tokens`: tokens that the constraint left no choice about. `enforced`: the text satisfies the request's
    constraint. `healed`: bytes of the first token that repeat the end of the prompt; `text_bytes` does not count
    them. `loaded`: cached tokens that came from each tier. `runs`: generated tokens that took no step of their own.
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
    times: RequestTimes = RequestTimes()
    loaded: dict[str, int] = {}
    runs: list[TokenRun] = []


class ScoreEnded(_Wire, frozen=True):
    """Ends an EngineScore with the log-probabilities of tokens [start, len) of each sequence."""

    id: int
    logprobs: list[list[float]]
    prompt_tokens: int  # summed over the sequences
    cached_tokens: int


class ChooseEnded(_Wire, frozen=True):
    """Ends an EngineChoose with bounds of each choice's log-probability (natural logarithm).

    It is the probability that the prompt goes on with this choice and with no longer one. Without a search `upper` is
    empty: `lower` counts the usual tokens, and tokens that go past their end.

    `logprobs`: of the tokens of each choice, as in ScoreEnded.
    """

    id: int
    lower: list[float]
    upper: list[float]
    logprobs: list[list[float]]
    evaluations: int  # token sequences that the model was asked about
    prompt_tokens: int  # of the prompt, and of the tokens that were asked about beyond it
    cached_tokens: int  # those of the prompt that were found


class EmbedEnded(_Wire, frozen=True):
    """Ends an EngineEmbed. `vector`: float32, little-endian."""

    id: int
    vector: bytes
    prompt_tokens: int
    cached_tokens: int


class ControlEnded(_Wire, frozen=True):
    id: int
    result: Facts


class EngineSurveyed(_Wire, frozen=True):
    """Ends an EngineSurvey. `shown`: the first tokens of each node, if they were asked for."""

    id: int
    survey: TreeSurvey
    shown: list[list[int]] = []


class EngineFailed(_Wire, frozen=True):
    """Ends a request with an error. `kind` names a class of lang.errors.WIRE_ERRORS."""

    id: int
    kind: str
    message: str


class MarksPlaced(_Wire, frozen=True):
    """Says that the prompt of a request whose `marks` are not None is computed, before any of its tokens and its end.

    `placed`: for each mark whether its prefix is kept. `prompt_tokens`, `cached_tokens`: of the prompt, or of the first
    sequence; as in Ended.
    """

    id: int
    placed: list[bool]
    prompt_tokens: int
    cached_tokens: int


class KeepsEnded(_Wire, frozen=True):
    """Says that kept prefixes ended without a release: the cache was flushed or given up, or their seconds passed."""

    ids: list[int]


class Heartbeat(_Wire, frozen=True):
    """Shows that the engine lives. Sent when it is ready, then at least once a second, also during long steps.

    `counters` are cumulative; see `Scheduler.counters`. `pool`: its gauges between two steps.
    """

    step: int
    running: int
    waiting: int
    counters: dict[str, float] = {}
    pool: PoolGauges = PoolGauges()


class NodeAdded(_Wire, frozen=True):
    """A node of the radix tree came into being below `parent`; 0: below the root of `salt`.

    `salt`: the namespace of the node, which differs from that of its parent where the edge opens one. `root`: the salt
    of the root, where the edge from the root itself opens `salt`; None elsewhere. `tokens`: int32, little-endian.
    """

    id: int
    parent: int
    salt: str
    tokens: bytes
    root: str | None = None


class NodeExtended(_Wire, frozen=True):
    """A node grew at its end. `tokens`: int32, little-endian."""

    id: int
    tokens: bytes


class NodeSplit(_Wire, frozen=True):
    """The first `length` tokens of a node are now those of `upper`, its new parent, which is in its namespace."""

    id: int
    upper: int
    length: int


class NodeTookUp(_Wire, frozen=True):
    """The first `count` tokens of `child`, not all of them, moved to the end of its parent `id`."""

    id: int
    child: int
    count: int


class NodeRemoved(_Wire, frozen=True):
    """A leaf is gone."""

    id: int


class CacheCleared(_Wire, frozen=True):
    """All nodes are gone, or about to be told again: what comes after it is the whole tree.

    So a copy is exact from here on, whatever was lost before.
    """


CacheEvent = NodeAdded | NodeExtended | NodeSplit | NodeTookUp | NodeRemoved | CacheCleared


class CacheEvents(_Wire, frozen=True):
    """Says how the radix tree of the engine changed, in order: a reader of all of them has an exact copy.

    A step sends its changes before its tokens and endings. So a prompt that was expected to come into the tree is there
    when its request ends, and no reader sees a moment at which it is neither. What came and went within a step is not
    told. A step that brings very many tokens sends several messages, which are to be read together.

    Ids of nodes are those of RadixCache, from 1 on; none is used for two nodes in one life of an engine.
    """

    events: list[CacheEvent]


FromEngine = (
    Tokens
    | Ended
    | ScoreEnded
    | ChooseEnded
    | EmbedEnded
    | ControlEnded
    | EngineSurveyed
    | EngineFailed
    | MarksPlaced
    | KeepsEnded
    | Heartbeat
    | CacheEvents
)


class EngineStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Starts an engine: the first line on its standard input, as JSON. The pipe then is its lifeline."""

    parent: int
    events: str  # address of the gateway's PAIR
    pulse: str  # address of the gateway's PULL for heartbeats
    rendezvous: str  # path of a file to be made: where the ranks of tensor_parallel meet
    options: RuntimeOptions
    replica: int = 0  # its number among the engines of the gateway


class _Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    """Base of the messages of an engine that starts."""


class EnginePhase(_Start, frozen=True):
    """Reports the phase of the start, in words for a person."""

    phase: str


class TierRooms(_Wire, frozen=True):
    """Says how many tokens the slower tiers of an engine hold at most, in pages of `page` tokens; 0: there is none.

    `host`: its own memory. `lasting`: disk and shared store, which the engines of a gateway have in common.
    """

    host: int = 0
    lasting: int = 0
    page: int = 1


NO_TIERS = TierRooms()


class EngineReady(_Start, frozen=True):
    """Reports that the engine takes requests: the warm-up has made a real token."""

    context_length: int
    vocab_size: int
    pool_tokens: int
    tiers: TierRooms = NO_TIERS


class EngineStartFailed(_Start, frozen=True):
    """Reports a failed start. The engine waits to be ended. `kind`: a class of WIRE_ERRORS, or MissingExtraError."""

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
    """Makes the failure sent in place of an answer larger than a frame, such as millions of log-probabilities."""
    label = getattr(message, "id", "")
    return Failure(
        label,
        RequestError.__name__,
        f"the answer has {size} bytes and a frame holds {MAX_FRAME}; ask for fewer tokens, continuations or "
        "log-probabilities at once",
    )


def too_large_for_gateway(message: EngineFrame | msgspec.Raw, size: int) -> EngineFrame:
    """Makes the failure that the engine sends in place of an answer larger than a frame."""
    label = getattr(message, "id", 0)
    reason = f"the answer has {size} bytes and {MAX_ENGINE_FRAME} are accepted; ask for fewer log-probabilities"
    return EngineFailed(label, RequestError.__name__, reason)
