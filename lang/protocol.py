"""The one page that programs and backends agree on, in process or on the wire.

Requests go down, events come back. Every request ends exactly once: with `Final`, `Scored`,
`Done` or `Failure`. Chunks may come before, in order. All structs are msgpack (msgspec), unknown
fields are refused, and nothing here is ever pickled.

Usage adds up to the cost of a run. Costs are values: one that was read does not change any more.

    state = program.run(question)
    state.cost.usage.total_tokens, state.cost.dollars

    states = program.run_batch(questions)
    whole = sum(state.cost for state in states)
"""

import struct
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Annotated, Literal, Protocol, assert_never, get_args, runtime_checkable

import msgspec

from . import notebook
from .caching import CACHE_MINIMUM, CACHE_SECONDS, Begun, CacheObject, Caching, CachingUsage
from .chat_template import ChatTemplate
from .errors import WIRE_ERRORS, BackendError, ParameterError, UmbelError, shown
from .prompt import MAX_PARTS, Part, Parts, TokenIds
from .sampling import MAX_N, SamplingParams
from .status import RuntimeStatus, TreeSurvey
from .tool_calls import ToolCall


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """Base of everything that travels."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts the tokens and calls of one request, or of a run; see `State.usage`. Usages add up, `sum` included.

    What our runtime caches without marks is in neither `cache_write_tokens` nor `cache_read_tokens`, and is free.

    Attributes:
        prompt_tokens: number of tokens of prompts, cached or not.
        cached_tokens: those of the prompt tokens whose KV was reused; 0 is 0, never "unknown". What a hint computed
            ahead, such as the beginning of a fork's branches, counts as computed by the first call that finds it.
        completion_tokens: number of generated tokens.
        calls: number of requests.
        cache_write_tokens: those of the prompt tokens that explicit caching has stored: that marks created (`Caching`),
            or that a hosted backend charged for storing.
        long_write_tokens: those of the `cache_write_tokens` that marks keep for an hour or longer, or that a hosted
            backend stores for longer than its shortest time, which costs more.
        cache_read_tokens: those of the prompt tokens that explicit caching has read: that marks found kept, or that a
            hosted backend charged as read.
        loaded_tokens: those of the cached tokens that came from a tier of the cache, by tier: "host", "disk" or
            "shared". The others were on the device.

    Examples:
        >>> @ul.function
        ... def ask(s, manual, question):
        ...     s += manual + question + ul.gen("answer", max_tokens=4)
        >>> manual = "To open the lid, press the button, wait for the light and turn the lid to the left. "
        >>> model = ul.Echo(lambda prompt: " Yes.")
        >>> first = ask.run(manual, "Is it easy?", backend=model).usage
        >>> second = ask.run(manual, "Is it quick?", backend=model).usage
        >>> second.prompt_tokens, second.cached_tokens, second.completion_tokens, second.calls
        (25, 23, 2, 1)
        >>> (first + second).total_tokens
        54
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0
    cache_write_tokens: int = 0
    long_write_tokens: int = 0
    cache_read_tokens: int = 0
    loaded_tokens: dict[str, int] = {}

    @property
    def total_tokens(self) -> int:
        """Number of tokens of prompts and of generated tokens, cached or not."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        if not isinstance(other, Usage):
            return NotImplemented
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.calls + other.calls,
            self.cache_write_tokens + other.cache_write_tokens,
            self.long_write_tokens + other.long_write_tokens,
            self.cache_read_tokens + other.cache_read_tokens,
            {
                tier: self.loaded_tokens.get(tier, 0) + other.loaded_tokens.get(tier, 0)
                for tier in {**self.loaded_tokens, **other.loaded_tokens}
            },
        )

    def __radd__(self, other: int) -> "Usage":
        """Adds to the 0 that `sum()` begins with."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def _repr_html_(self) -> str:
        """Describes the usage for a notebook: calls, tokens, and the part of the prompts that was cached."""
        return notebook.table([(notebook.escaped(name), value) for name, value in self._told().items()])

    def _told(self) -> dict[str, str]:
        share = f" ({self.cached_tokens / self.prompt_tokens:.0%})" if self.prompt_tokens else ""
        told = {
            "calls": f"{self.calls:,}",
            "prompt tokens": f"{self.prompt_tokens:,}",
            "cached": f"{self.cached_tokens:,}{share}",
            "generated": f"{self.completion_tokens:,}",
        }
        stored = ("cache_write_tokens", "long_write_tokens", "cache_read_tokens")
        told |= {name.replace("_", " "): f"{getattr(self, name):,}" for name in stored if getattr(self, name)}
        return told | {f"loaded from {tier}": f"{tokens:,}" for tier, tokens in self.loaded_tokens.items()}

    def marked(self, caching: CachingUsage | None) -> "Usage":
        """Returns these tokens with the figures of the request's marks; called by the runtime's gateway.

        Args:
            caching: the figures; None for a request without marks.
        """
        if caching is None:
            return self
        return msgspec.structs.replace(
            self,
            cache_write_tokens=caching.created,
            long_write_tokens=caching.long_created,
            cache_read_tokens=caching.read,
        )


MAX_PRIORITY = 1_000_000  # either side of 0


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """The program and the place in it that a request comes from, for scheduling and isolation.

    `ahead`: about how many tokens its program still has to generate one after the other from this call on. Among the
    calls of one program that are equal otherwise the one with more ahead goes first; other programs lose nothing by it.

    `adapter`: computes the prompt; in a GenRequest `sampling.adapter` wins over it. "" is the model as it is.
    """

    program_id: str = ""
    fork_group: str = ""  # siblings of one fork share it
    salt: str = ""  # a namespace of the prefix cache, never shared with another
    priority: int = 0  # higher runs earlier
    timeout: float | None = None  # seconds left when the request was sent
    ahead: int = 0
    adapter: str = ""


# ---------------------------------------------------------------------------------------------- down

ConstraintKind = Literal["regex", "json_schema", "lark", "gbnf", "choices", "tools", "expression"]
ConstraintEngine = Literal["auto", "fsm", "llguidance", "outlines-core", "interegular"]
JsonWhitespace = Literal["spaced", "compact", "flexible"]
JsonKeyOrder = Literal["declared", "any"]


class ConstraintSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A constraint of a generated text, as the program wrote it.

    Attributes:
        kind: how `source` is read. A regex is matched as a whole, as by `re.fullmatch`.
        source: the regex, the JSON Schema as JSON text (its order of keys is the order of the answer's), the Lark or
            GBNF grammar, a JSON array of the texts to choose from, the tools that may be called as
            `tool_constraint.ToolGrammar`, or the parts of an expression as `fsm.composed.nodes.Tree`.
        whitespace: of JSON: "spaced" (", " and ": "), "compact" ("," and ":") or "flexible" (bounded blanks).
        allow_unenforced: schema keywords that cannot be enforced are reported in `Completion.unenforced`, and the
            request is served; False refuses them.
        engine: who enforces it; None leaves it to the runtime's option.
        key_order: of JSON objects: "declared" writes the members in the order of the schema (of objects that take
            others, optional ones may come late), "any" as the model likes.

    Raises:
        ParameterError: a value that is none of those.
    """

    kind: ConstraintKind
    source: str
    whitespace: JsonWhitespace = "spaced"
    allow_unenforced: bool = False
    engine: ConstraintEngine | None = None
    key_order: JsonKeyOrder = "declared"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("kind", self.kind, get_args(ConstraintKind)),
            ("whitespace", self.whitespace, get_args(JsonWhitespace)),
            ("key_order", self.key_order, get_args(JsonKeyOrder)),
            ("engine", self.engine, (None, *get_args(ConstraintEngine))),
        ):
            if not isinstance(value, str | None) or value not in known:
                written = ", ".join(repr(choice) for choice in known)
                raise ParameterError(f"constraint {name}={shown(value)} is not known; write one of {written}")
        if not isinstance(self.source, str):
            raise ParameterError(
                f"a constraint's source is text, got {type(self.source).__name__} {shown(self.source)}"
            )
        if not isinstance(self.allow_unenforced, bool):
            raise ParameterError(f"allow_unenforced must be True or False, got {shown(self.allow_unenforced)}")


MAX_SENT_CHOICES = 1 << 16  # of a message; how many a backend scores is its own matter


class GenRequest(_Wire, frozen=True):
    """Continue a prompt. Answered by `Chunk`s (when `stream`) and one `Final`.

    `token_healing`: the last token of the prompt may be replaced by a longer one that begins with its text. None: for
    constraints only, calls of tools excepted (an answer without a call is the one without tools). The text that comes
    back never repeats what the prompt says.

    `caching`: marks that keep the beginning of the prompt for later requests; `Final.caching` has their figures.

    `begun`: asks for `Chunk.begun`. Takes `stream` and `sampling.n` of 1.
    """

    id: str
    prompt: Parts
    sampling: SamplingParams = SamplingParams()
    stream: bool = False
    origin: Origin = Origin()
    constraint: ConstraintSpec | None = None
    token_healing: bool | None = None
    caching: Caching | None = None
    begun: bool = False


class ScoreRequest(_Wire, frozen=True):
    """Log-probabilities of each choice as a continuation of one prompt. Answered by one `Scored`.

    `unconditional` asks also for the log-probability of every choice token without the prompt
    (after the BOS token alone), which the unconditional-normalised method needs.

    `probability` asks how probable each choice is: "overshoot" by its usual tokens and those that go past its end,
    "exact" by all tokens that spell it, within bounds.

    `caching`: marks as in `GenRequest`; `Scored.caching` has their figures.
    """

    id: str
    prompt: Parts
    choices: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_SENT_CHOICES)]
    unconditional: bool = False
    origin: Origin = Origin()
    probability: Literal["", "overshoot", "exact"] = ""
    caching: Caching | None = None


MAX_TEXTS = 2_048  # of one request for vectors or ranks


class EmbedRequest(_Wire, frozen=True):
    """Asks for the embedding of each text. Answered by one `Embedded`.

    `dimensions`: keeps the first so many numbers of each, for models that are trained for it; 0 keeps all.
    `first`: the place of the first text among those that were given, for messages.
    """

    id: str
    texts: Annotated[tuple[Parts, ...], msgspec.Meta(max_length=MAX_TEXTS)]
    dimensions: int = 0
    origin: Origin = Origin()
    first: int = 0


class RankRequest(_Wire, frozen=True):
    """Asks how relevant a text is to a query, for each prompt that holds both as the model wants it.

    Answered by one `Ranked`. `first`: as in EmbedRequest.
    """

    id: str
    prompts: Annotated[tuple[Parts, ...], msgspec.Meta(max_length=MAX_TEXTS)]
    origin: Origin = Origin()
    first: int = 0


class Hint(_Wire, frozen=True):
    """This prefix will be needed by several requests soon: compute it once. Never answered.

    `pin`: seconds after its last use for which its keys are kept from eviction, or until the sender's `Release` of this
    id. A pin is no promise: it gives way to a request that finds no other room, and ends with the connection. To a
    hosted backend it says that the program has a cache point here, and its TTL.
    """

    id: str
    prompt: Parts
    origin: Origin = Origin()
    pin: float | None = None


class Release(_Wire, frozen=True):
    """Unpins what the sender's Hint with exactly this id has pinned. Never answered."""

    id: str


class Abort(_Wire, frozen=True):
    """Stop the sender's request with exactly this id. Answered by the request's own ending."""

    id: str


class Control(_Wire, frozen=True):
    """An administrative question, by verb: "flush_cache" or "info". Answered by `Done`."""

    id: str
    verb: str


class Locate(_Wire, frozen=True):
    """Asks where tokens of this prompt begin in its text, and how many tokens at its beginning it shares with others.

    Sent when a person asks, never on the way of a call. Answered by `Located`.

    Attributes:
        tokens: their indices, counted from 0.
        others: prompts that this one is compared with.
    """

    id: str
    prompt: Parts
    tokens: TokenIds
    others: Annotated[tuple[Parts, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()
    origin: Origin = Origin()


class Tokenize(_Wire, frozen=True):
    """Asks for the token ids of a prompt, BOS included. Answered by `Tokenized`, without the engine.

    Media have no ids: a prompt with media is refused, and `Locate` counts its tokens.
    """

    id: str
    prompt: Parts
    origin: Origin = Origin()


MAX_DETOKENIZED = 1 << 18  # ids of one Detokenize


class Detokenize(_Wire, frozen=True):
    """Asks for the text of token ids. Answered by `Detokenized`, without the engine.

    Bytes that are no character become U+FFFD.

    Attributes:
        control: writes the names of control tokens; they have no text otherwise.
    """

    id: str
    token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DETOKENIZED)]
    control: bool = False


class ReadStatus(_Wire, frozen=True):
    """Asks for the state of the runtime. Answered by `StatusRead` at once: no engine and no queue is in its way."""

    id: str


class Survey(_Wire, frozen=True):
    """Asks for the radix tree. Answered by `Surveyed` between two steps.

    Attributes:
        most: nodes, up to status.MOST_NODES.
        text: characters of the text of each node, up to status.MOST_SHOWN.
    """

    id: str
    most: int
    text: int = 0


class CreateCache(_Wire, frozen=True):
    """Keeps a prompt under a name of the salt, for requests whose prompt begins with it. Answered by one `Caches`.

    What is kept are its tokens that stay the same whatever follows. A later request reads them by a mark at the same
    place (`Caching`).

    Attributes:
        name: new to the salt.
        ttl: seconds; a hit restarts them.
        minimum: tokens; a shorter prompt is refused.
        record: given back by ReadCaches for this name.
    """

    id: str
    name: str
    prompt: Parts
    ttl: float = CACHE_SECONDS
    minimum: int = CACHE_MINIMUM
    record: bytes = b""
    origin: Origin = Origin()


class ReadCaches(_Wire, frozen=True):
    """Asks for the cache of a name, or with name="" for all of the salt, without records. Answered by `Caches`.

    Looking at a cache is no hit.
    """

    id: str
    name: str = ""
    origin: Origin = Origin()


class ExtendCache(_Wire, frozen=True):
    """Gives a cache another TTL, which begins now. Answered by `Caches`: none where the salt has no such name."""

    id: str
    name: str
    ttl: float
    origin: Origin = Origin()


class DeleteCache(_Wire, frozen=True):
    """Ends a cache. Answered by `Caches` with what it was: none where the salt has no such name."""

    id: str
    name: str
    origin: Origin = Origin()


CacheRequest = CreateCache | ReadCaches | ExtendCache | DeleteCache

ToBackend = (
    GenRequest
    | ScoreRequest
    | EmbedRequest
    | RankRequest
    | CacheRequest
    | Hint
    | Release
    | Abort
    | Control
    | Locate
    | Tokenize
    | Detokenize
    | ReadStatus
    | Survey
)

# ---------------------------------------------------------------------------------------------- back


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence, a stop string or a stop token
    LENGTH = "length"  # max_tokens, or the end of the context
    LENGTH_CLOSED = "length_closed"  # max_tokens was near, and the constrained text was led to its shortest end
    ABORT = "abort"  # cancelled by its sender


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token, its log-probability (natural logarithm) and the most likely alternatives.

    A token may hold a part of a character. Its `text` has U+FFFD there; the bytes of neighbours join to the character.

    Attributes:
        token_id: -1 where a hosted backend does not say it.
        top: (id, text, log-probability) of the alternatives, the most likely first.
        data: the token's bytes; b"" for control tokens, and of hosted backends.
        top_data: the bytes of each alternative, in the order of `top`; () of hosted backends.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()
    data: bytes = b""
    top_data: tuple[bytes, ...] = ()


class Chunk(_Wire, frozen=True):
    """More text of one continuation. Text is never cut inside a character, nor inside a possible stop string.

    `begun`: on the first chunk of a request that asks for it; its figures are those of the Final. `reasoning`: more of
    the model's reasoning, from a provider that gives it in a field of its own.
    """

    id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    begun: Begun | None = None
    reasoning: str = ""


TextOrigin = Literal["forced", "guessed"]  # of generated text that took no step of its own


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished continuation.

    `text` is all of it, the stop string cut away. The first `kept` of `token_ids` are exactly the
    tokens that lie wholly inside `text`; their KV can be reused when the text is sent again as
    `Generated`. What of `text` comes after them is `tail` (a stop string that began inside a token; all of the text
    when its first token begins inside the prompt's last one).

    `forced_tokens`: how many of `token_ids` the constraint left no choice about. `guessed_tokens`: how many the runtime
    guessed right and computed along with the token before them; None where this is not told. `spans`: characters
    [start, end) of `text` that these tokens spell, in order.
    `calls`: of tools, in the provider's own fields; they stand at the end of `text` as well. `reasoning`: what the
    model thought before `text`, where the provider gives it in a field of its own.
    `guarantee`: "enforced" when the text had to satisfy a constraint, else "". `unenforced`: (keyword, path) of the
    schema's demands that were not enforced; possible only with `allow_unenforced`. `narrowed`: (keyword, path, how)
    where fewer texts could come than the schema admits.
    """

    text: str
    token_ids: tuple[int, ...]
    kept: int
    tail: str
    finish_reason: FinishReason
    matched_stop: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    forced_tokens: int = 0
    guarantee: Literal["", "enforced"] = ""
    unenforced: tuple[tuple[str, str], ...] = ()
    narrowed: tuple[tuple[str, str, str], ...] = ()
    calls: tuple[ToolCall, ...] = ()
    guessed_tokens: int | None = None
    spans: tuple[tuple[TextOrigin, int, int], ...] = ()
    reasoning: str = ""


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of a generation in the engine, in seconds since it came there.

    Of `n` continuations: the first admission, the first token and the last token of all. Work before the engine, such
    as tokenizing, decoding pictures and compiling a constraint, is not in them. Where an engine died, they are those of
    the next one.

    Attributes:
        queued: until it was admitted, or ended without.
        first_token, last_token: None for a generation without a token.
    """

    queued: float = 0.0
    first_token: float | None = None
    last_token: float | None = None


class PlaceKind(StrEnum):
    """Tells why a call went to one of several engines, without the load of others."""

    KEPT = "kept"
    TOGETHER = "together"
    CACHED = "cached"
    COLD = "cold"

    @property
    def words(self) -> str:
        match self:
            case PlaceKind.KEPT:
                return "a prefix that is kept for it lies there"
            case PlaceKind.TOGETHER:
                return "other calls of its fork group or program are there"
            case PlaceKind.CACHED:
                return "a part of its prompt is cached there, or will be"
            case PlaceKind.COLD:
                return "nothing of its prompt is cached there"
            case _:
                assert_never(self)


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Says which of several engines computed a call, and why that one.

    Attributes:
        replica: its number, from 0 on.
        reason: in words, with the load of all callers in figures: for the owner of the runtime, never for clients of a
            server.
        moved: how often the call went elsewhere because its engine was lost.
        cached: tokens of its prompt that were cached there when it was placed, by the gateway's copy of the tree.
    """

    replica: int
    reason: str
    moved: int = 0
    kind: PlaceKind = PlaceKind.COLD
    cached: int = 0


class Final(_Wire, frozen=True):
    """The end of a GenRequest: its continuations in order, and what they cost.

    `times`: None where the backend measures none.
    `caching`: what the marks of the request have read and created; None for one without marks.
    `placed`: None where there is one engine.
    """

    id: str
    completions: tuple[Completion, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    times: RequestTimes | None = None
    caching: CachingUsage | None = None
    placed: Placed | None = None


class Caches(_Wire, frozen=True):
    """The end of a CacheRequest: the caches that it is about, as they are now.

    `usage`, `caching`: of a CreateCache.
    """

    id: str
    caches: tuple[CacheObject, ...]
    usage: Usage = Usage()
    caching: CachingUsage | None = None


class ScoredChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens of one choice after those it shares with the prompt, and their log-probabilities.

    `unconditional` has one number per token when it was asked for, else it is empty.

    `lower`, `upper`: bounds of the log-probability (natural logarithm) that the text goes on with this choice and with
    no longer one of the choices; "overshoot" knows the lower one only.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] = ()
    lower: float | None = None
    upper: float | None = None


class Scored(_Wire, frozen=True):
    """The end of a ScoreRequest: one entry per choice, in order.

    `usage`: summed over the sequences that were computed, each of which begins with the prompt.
    `evaluations`: token sequences that the model was asked about for `probability`.
    `caching`: what the marks of the request have read and created, once; None for one without marks.
    `placed`: None where there is one engine.
    """

    id: str
    choices: tuple[ScoredChoice, ...]
    usage: Usage
    evaluations: int = 0
    caching: CachingUsage | None = None
    placed: Placed | None = None


class Embedded(_Wire, frozen=True):
    """The end of an EmbedRequest: a vector for each text, in order, as float32 in little-endian bytes."""

    id: str
    vectors: tuple[bytes, ...]
    usage: Usage


def floats_of(vector: bytes) -> list[float]:
    """Returns the numbers of a vector."""
    return [number for (number,) in struct.iter_unpack("<f", vector)]


class Ranked(_Wire, frozen=True):
    """The end of a RankRequest: for each prompt a relevance between 0 and 1, in order."""

    id: str
    scores: tuple[float, ...]
    usage: Usage


Facts = dict[str, str | int | float | bool | list[int | str] | None]  # a JSON-like mapping


class Done(_Wire, frozen=True):
    """The end of a Control: the answer as a JSON-like mapping."""

    id: str
    result: Facts = {}


class Located(_Wire, frozen=True):
    """The end of a Locate.

    Attributes:
        characters: of the prompt's text where each of the tokens begins; its length for a token after the last one.
        tokens: how many the prompt has.
        shared: how many it has in common with the beginning of each of the others.
    """

    id: str
    characters: tuple[int, ...]
    tokens: int
    shared: tuple[int, ...] = ()


class Tokenized(_Wire, frozen=True):
    """The end of a Tokenize."""

    id: str
    token_ids: tuple[int, ...]


class Detokenized(_Wire, frozen=True):
    """The end of a Detokenize."""

    id: str
    text: str


class StatusRead(_Wire, frozen=True):
    """The end of a ReadStatus."""

    id: str
    status: RuntimeStatus


class Surveyed(_Wire, frozen=True):
    """The end of a Survey."""

    id: str
    survey: TreeSurvey


class Failure(_Wire, frozen=True):
    """The end of any request that could not be served. `kind` names a class of `errors.WIRE_ERRORS`."""

    id: str
    kind: str
    message: str

    def error(self) -> UmbelError:
        return WIRE_ERRORS.get(self.kind, BackendError)(self.message)


Ending = (
    Final
    | Scored
    | Embedded
    | Ranked
    | Caches
    | Done
    | Located
    | Tokenized
    | Detokenized
    | StatusRead
    | Surveyed
    | Failure
)
FromBackend = Chunk | Ending

# ------------------------------------------------------------------------------------------- the seam


class VocabularyInfo(msgspec.Struct, frozen=True):
    """Describes the tokens of a model, for the checks of a server.

    Attributes:
        size: ids are 0 to size - 1.
        bos_id: begins every sequence; None where the model has none.
        eos_ids: end a text, in ascending order.
        control: names of control tokens → ids.
    """

    size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    control: dict[str, int]


class VectorInfo(msgspec.Struct, frozen=True):
    """Describes what a model makes of texts other than more text.

    Attributes:
        dimensions: of an embedding; 0: it makes none.
        ranks: it tells how relevant texts are to a query.
        generates: it continues texts.
    """

    dimensions: int = 0
    ranks: bool = False
    generates: bool = True


class Capabilities(msgspec.Struct, frozen=True):
    """The abilities of a backend. The interpreter checks before it sends; nothing is dropped in silence."""

    name: str  # for messages: "runtime gemma3-270m", "openai gpt-4o"
    score: bool = False  # log-probabilities of given choices
    hint: bool = False  # a prefix can be computed ahead
    pins: bool = False  # ... and kept from eviction; the backend is a `Pinning`
    token_ids: bool = False  # accepts Generated parts by id
    prefix_cache: bool = True  # keeps what it has computed of prompts
    cache_minimum: int = 0  # tokens of the shortest prompt that it keeps something of
    cache_maximum: int = 0  # tokens that it keeps of all prompts together; 0 where that is not known
    caching: bool = False  # keeps what marks cover: `GenRequest.caching`
    images: bool = False
    image_tokens: int = 0  # of an image, or of a frame of a clip, at most; 0 where the backend counts them itself
    logprobs: bool = False
    max_context: int | None = None  # tokens of a prompt and its answer; a KV pool that is smaller is the limit
    constraints: tuple[ConstraintKind, ...] = ()  # kinds that are enforced
    asks_again: bool = False  # other kinds are validated by the interpreter, and the model is asked again
    speculation: bool = False  # calls are paid for one by one: text past a stop is kept for what the program says next
    continues: bool = True  # goes on with a begun assistant turn itself; otherwise the model is asked to
    model: str = ""  # for the price table; "" costs nothing
    probability: bool = False  # of given choices, over all their tokens: "overshoot" and "exact"
    stop_regex: bool = False  # ends texts at regular expressions
    converses: bool = False  # answers conversations: it is asked to continue a text that stands outside of roles
    temperature: bool = True  # takes a temperature; otherwise it draws in its own way
    thinking_tokens: int = 0  # that it may need, out of max_tokens, before it answers
    wrapping_tokens: int = 0  # that a constrained text may cost on top of its own, for what a provider wraps it in
    most_n: int = MAX_N  # continuations of one request; the interpreter asks for more of them one by one
    programs: bool = False  # runs whole programs, see `lang.programs`
    made_up: bool = False  # its texts only count: what they say is not looked at
    adapters: tuple[str, ...] | None = ()  # names that requests may give; None: any
    embeds: bool = False  # makes embeddings of texts; the backend is an `Embedding`
    tools: bool = False  # takes a `Dialogue`: its provider has fields for tools, calls and results
    ranks: bool = False  # tells how relevant texts are to a query; the backend is a `Ranking`


@runtime_checkable
class Backend(Protocol):
    """Runs requests. All calls are made on the interpreter's event loop.

    The fake is `umbel.interpreter.backends.echo.Echo`. `tests/conformance.py` exercises every hook.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def chat_template(self) -> ChatTemplate: ...

    async def start(self) -> None:
        """Make ready (idempotent). Called before the first request; may take seconds and show progress."""

    def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        """Chunks when `request.stream`, then exactly one Final. Raises an UmbelError instead of Final.

        Closing the iterator early aborts the request.
        """

    async def score(self, request: ScoreRequest) -> Scored: ...

    def hint(self, hint: Hint) -> None:
        """Returns at once; a backend without the capability is never called."""

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        """A bound on the tokens of a prompt: exact where it is cheap, else never less than they are."""

    async def control(self, verb: str) -> Done: ...

    async def close(self) -> None: ...


@runtime_checkable
class Pinning(Protocol):
    """A backend with the capability `pins`."""

    def release(self, pinned: str) -> None:
        """Lets go of what the hint with this id has pinned. Returns at once."""


@runtime_checkable
class CacheKeeping(Protocol):
    """A backend with the capability `caching` that also keeps prefixes under names."""

    async def caches(self, request: CacheRequest) -> Caches: ...


@runtime_checkable
class Locating(Protocol):
    """A backend that knows its tokens."""

    async def locate(self, question: Locate) -> Located: ...


@runtime_checkable
class Embedding(Protocol):
    """A backend with the capability `embeds`.

    Raises (its method):
        CapabilityError: the model makes no embeddings, or not of so many dimensions.
        ContextLengthError: a text is too long.
    """

    async def embed(self, request: EmbedRequest) -> Embedded: ...


@runtime_checkable
class Ranking(Protocol):
    """A backend with the capability `ranks`. Its method raises as `Embedding.embed`."""

    async def rank(self, request: RankRequest) -> Ranked: ...


@runtime_checkable
class Aborting(Protocol):
    """A backend that ends single requests early and gives what there is of them."""

    def abort(self, request_id: str) -> bool:
        """Ends the request with this id → whether it was in flight. Returns at once.

        Its reader gets a Final whose texts end with `FinishReason.ABORT`; or CancelledError, when the engine did not
        have it yet."""


@runtime_checkable
class Tokenizing(Protocol):
    """A backend that converts between text and token ids.

    Raises (both methods):
        ParameterError: ids outside the vocabulary; text that is no Unicode.
    """

    @property
    def vocabulary(self) -> VocabularyInfo:
        """Describes the model's tokens. Raises BackendError before the backend has started."""

    async def tokenize(self, question: Tokenize) -> Tokenized: ...

    async def detokenize(self, question: Detokenize) -> Detokenized: ...


# -------------------------------------------------------------------------------- costs


class Speculation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts what speculation saved and wasted: a `gen` requests more text than it needs, for those that follow.

    `@ul.function(num_api_spec_tokens=...)` and `speculate="auto"` switch speculation on; `state.cost.speculation` has
    the counts.

    Attributes:
        calls_saved: number of calls that were not made, since the text was there already, less those that were made in
            vain.
        input_tokens_saved: prompt tokens of those calls; estimated from the text where a provider counts none.
        output_tokens_wasted: generated tokens after the `gen` that asked for them, of which no variable was made.
        tokens_speculated: generated tokens beyond what the `gen` itself needed.
        hits: number of gens that were answered from text at hand.
        misses: number of gens that found some text at hand that did not fit.

    Examples:
        >>> import msgspec
        >>> paid = msgspec.structs.replace(ul.Echo().capabilities, speculation=True)  # as hosted ones
        >>> @ul.function(stop=".", num_api_spec_tokens=32)
        ... def card(s, name):
        ...     s += name + " Job:" + ul.gen("job", max_tokens=8)
        ...     s += ". Home:" + ul.gen("home", max_tokens=8)
        >>> model = ul.Echo({"Robin Hood Job:": " archer. Home: Sherwood."}, capabilities=paid)
        >>> state = card.run("Robin Hood", backend=model)
        >>> state["job"], state["home"], state.cost.usage.calls, state.cost.speculation.calls_saved
        (' archer', ' Sherwood', 1, 1)
    """

    calls_saved: int = 0
    input_tokens_saved: int = 0
    output_tokens_wasted: int = 0
    tokens_speculated: int = 0
    hits: int = 0
    misses: int = 0

    def __add__(self, other: "Speculation") -> "Speculation":
        if not isinstance(other, Speculation):
            return NotImplemented
        return Speculation(
            self.calls_saved + other.calls_saved,
            self.input_tokens_saved + other.input_tokens_saved,
            self.output_tokens_wasted + other.output_tokens_wasted,
            self.tokens_speculated + other.tokens_speculated,
            self.hits + other.hits,
            self.misses + other.misses,
        )

    def __radd__(self, other: int) -> "Speculation":
        """Adds to the 0 that `sum()` begins with."""
        return self if isinstance(other, int) and other == 0 else NotImplemented


class Cost(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds the cost of a run so far, or of several runs added up; see `State.cost`.

    Attributes:
        usage: tokens and calls.
        dollars: by `umbel.prices`, 0 for a model that runs here; None when a call went to a model without a price.
        speculation: what `num_api_spec_tokens` and `speculate` did.
        dollars_saved: by speculation: its saved prompt tokens at their full price less its wasted tokens, so below 0
            where it did not pay; None as for `dollars`.
        cancelled_calls: number of calls that were cancelled, or that cancelled branches did not make.
        tokens_saved: number of tokens that these could still have generated, by their `max_tokens`: at most so many
            were saved.
        read: tokens and calls that a journal has answered: they cost nothing now. `read.calls` counts them, as
            `usage.calls` counts those that were made.
        dollars_read: what they have cost when they were made; None where one had no price.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += country + ":" + ul.gen("city", max_tokens=4)
        >>> countries = [("France",), ("Italy",)]
        >>> model = ul.Echo({"France": " Paris", "Italy": " Rome"})
        >>> _ = capital.run_batch(countries[:1], journal="run.jsonl", backend=model)
        >>> states = capital.run_batch(countries, journal="run.jsonl", backend=model)
        >>> cost = sum(state.cost for state in states)
        >>> cost.usage.calls, cost.read.calls, cost.dollars  # a call made, a call read from the journal
        (1, 1, 0.0)
    """

    usage: Usage = Usage()
    dollars: float | None = 0.0
    speculation: Speculation = Speculation()
    dollars_saved: float | None = 0.0
    cancelled_calls: int = 0
    tokens_saved: int = 0
    read: Usage = Usage()
    dollars_read: float | None = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(
            self.usage + other.usage,
            _sum(self.dollars, other.dollars),
            self.speculation + other.speculation,
            _sum(self.dollars_saved, other.dollars_saved),
            self.cancelled_calls + other.cancelled_calls,
            self.tokens_saved + other.tokens_saved,
            self.read + other.read,
            _sum(self.dollars_read, other.dollars_read),
        )

    def __radd__(self, other: int) -> "Cost":
        """Adds to the 0 that `sum()` begins with."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def _repr_html_(self) -> str:
        """Describes the cost for a notebook: what is not at its default."""
        told = self.usage._told() if self.usage.calls else {}
        more = {name: getattr(self, name) for name in ("dollars", "cancelled_calls", "tokens_saved", "dollars_read")}
        told |= {name.replace("_", " "): f"{value:,}" for name, value in more.items() if value}
        if self.read.calls:
            told |= {f"{name}, read from a journal": value for name, value in self.read._told().items()}
        rows = [(notebook.escaped(name), notebook.escaped(value)) for name, value in told.items()]
        dollars = "without a price" if self.dollars is None else f"${self.dollars:.6f}" if self.dollars else "$0"
        return notebook.folded(f"cost: {self.usage.calls} calls, {dollars}", notebook.table(rows), is_open=True)


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other
