"""Keeps the state of a request in the gateway until it ends: a call, and the client it answers.

A call owns one or more engine requests (`n` continuations; a score with and without the prompt), turns the engine's
events into messages for the program, and tracks which of them have ended. It sends nothing itself.

    HELD        the engine is starting, a constraint is being compiled, or pictures are being decoded: it waits
    DISPATCHED  sent to the engine; HELD again, once, when the engine is lost before the client got a part of it
    (gone)      ended; the gateway forgets the call and drops late events

Sampling is keyed by seed and position, so a repeated request gets the same answer.

Of several engines, the replicas, one computes a call (`place`); a BroadcastCall asks all of them.
"""

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol, assert_never

import msgspec

from ...fsm.stops import Stops
from ...lang.caching import Begun, CacheObject
from ...lang.errors import CancelledError, OverloadedError, UmbelError
from ...lang.programs import FromPrograms
from ...lang.prompt import Borders
from ...lang.protocol import (
    Caches,
    Chunk,
    Completion,
    ConstraintSpec,
    Done,
    Facts,
    Failure,
    Final,
    FinishReason,
    FromBackend,
    Placed,
    RequestTimes,
    Scored,
    ScoredChoice,
    Surveyed,
    TextOrigin,
    TokenLogprob,
    Usage,
)
from ...lang.status import PoolGauges, TreeSurvey
from ..constraints.compiler import Compiled, CompileInquiry
from ..core.messages import (
    ChooseEnded,
    ControlEnded,
    Ended,
    EngineChoose,
    EngineControl,
    EngineEmbed,
    EngineGenerate,
    EngineMark,
    EngineScore,
    EngineSurvey,
    EngineSurveyed,
    FromEngine,
    IdLogprob,
    ScoreEnded,
    ToEngine,
    TokenRun,
    Tokens,
)
from ..multimodal.cache import Picture
from ..tokenizer.tokenizer import Detokenizer
from .caches import MarkedPrompt
from .replicas import CallPlace

Answer = FromBackend | FromPrograms


class FrontEnd(Protocol):
    """Delivers answers to the clients that ask through it. All requests enter the gateway through front ends.

        clients.Clients            ZeroMQ sockets of programs on this machine ─┐
        programs.Programs          programs that run next to the gateway      ─┼─ receive(client, message) ─▶ Gateway
        in_process.LocalBackend    the caller's own process                   ─┘ ◀─ client.deliver(message) ─

    A front end gives each of its clients an identity, passes their requests on with a `Client`, and reports a client
    that is gone (`client_lost`). Everything else, such as frames, connections and protocols, is its own. Another front
    end, such as an HTTP server, needs these three things and no change here.
    """

    def deliver(self, identity: bytes, message: Answer) -> None:
        """Sends a message to a client, now or soon; drops it when the client is gone. Must not raise."""


@dataclass(frozen=True, slots=True)
class Client:
    """Identifies the sender of a request: one client of one front end."""

    front_end: FrontEnd
    identity: bytes  # unique within its front end

    def deliver(self, message: Answer) -> None:
        self.front_end.deliver(self.identity, message)


# The engine messages that have an ending.
Bounded = EngineGenerate | EngineScore | EngineChoose | EngineEmbed | EngineControl | EngineSurvey
TokenBytes = Callable[[int], bytes]


class CallPhase(Enum):
    HELD = auto()
    DISPATCHED = auto()


class ProtocolBreach(Exception):
    """An answer of the engine that does not fit the call: a mistake of ours, which ends this call."""


@dataclass(slots=True, eq=False)
class PendingCall(ABC):
    """Tracks one request of one client."""

    client: Client
    request_id: str  # the client's id for it; means nothing but to the client
    messages: tuple[Bounded, ...]  # the engine requests of the call
    deadline: float  # on the gateway's clock
    open: set[int] = field(init=False)  # ids of engine requests without an ending
    phase: CallPhase = field(default=CallPhase.HELD, init=False)
    pictures: tuple[Picture, ...] = field(default=(), init=False)  # held in the picture cache for this call
    losses: list[str] = field(default_factory=list, init=False)  # the reasons, one for each engine that lost its work
    aborted: bool = field(default=False, init=False)  # by its client; the engine knows
    marked: MarkedPrompt | None = field(default=None, init=False)  # marks of its prompt, for its first engine request
    place: CallPlace | None = field(default=None, init=False)  # the engine that has it; None: not placed

    def __post_init__(self) -> None:
        self.open = {message.id for message in self.messages}

    @property
    def placed(self) -> Placed | None:
        """Says where it was computed, and why there; None where there is one engine."""
        place = self.place
        if place is None or not place.reason:
            return None
        return Placed(place.replica, place.reason, len(self.losses), place.kind, place.cached)

    @property
    def replica(self) -> int | None:
        return None if self.place is None else self.place.replica

    @property
    def work(self) -> int:
        """Tokens that it may generate."""
        return 0

    def is_at(self, replica: int) -> bool:
        """Returns whether an engine has it, or has begun with its prompt."""
        return self.replica == replica

    def targets(self) -> tuple[tuple[int, int], ...]:
        """Returns (id, engine) of the requests that were sent and have not ended."""
        assert self.place is not None, "it was sent"
        return tuple((id, self.place.replica) for id in self.open)

    @property
    def waits_for(self) -> str:
        """Condition to meet before the call can be sent to the engine; "" for none."""
        return ""

    def failure(self, error: UmbelError) -> FromBackend | None:
        """Makes the message for its client when the call cannot be served."""
        return Failure(self.request_id, type(error).__name__, str(error))

    def outgoing(self, now: float) -> tuple[Bounded, ...]:
        """Returns the engine messages without an ending, with the remaining time, to send now."""
        waiting = (message for message in self.messages if message.id in self.open)
        return tuple(_with_timeout(message, self.deadline - now) for message in waiting)

    def mark(self, grant: Callable[[MarkedPrompt, Sequence[int], Borders], list[EngineMark]]) -> None:
        """Adds the marks that are granted to its first engine request, unless that has ended.

        Args:
            grant: finds the marks for the tokens that begin with the prompt, and for its private namespaces.
        """
        first, *others = self.messages
        if self.marked is None or first.id not in self.open:
            return
        assert isinstance(first, EngineGenerate | EngineScore | EngineChoose), "nothing else has marks"
        marks = grant(self.marked, prompt_of(first), first.schedule.private)
        self.messages = (msgspec.structs.replace(first, marks=marks), *others)

    @property
    def repeatable(self) -> bool:
        """Whether another engine may be asked: the client has seen no part of the unfinished requests."""
        return True

    def repeat(self, ids: Iterator[int]) -> None:
        """Gives the unfinished requests new ids, to be sent again."""
        self.messages = tuple(self._renewed(message, next(ids)) for message in self.messages)
        self.phase, self.place = CallPhase.HELD, None

    def _renewed(self, message: Bounded, id: int) -> Bounded:
        if message.id not in self.open:
            return message
        self.open.remove(message.id)
        self.open.add(id)
        return msgspec.structs.replace(message, id=id)

    @abstractmethod
    def accept(self, event: FromEngine) -> list[FromBackend]:
        """Takes one event of one of its engine requests → the messages for the client."""


def _with_timeout(message: Bounded, seconds: float) -> Bounded:
    if isinstance(message, EngineControl | EngineSurvey):
        return message
    schedule = msgspec.structs.replace(message.schedule, timeout=max(seconds, 0.0))
    return msgspec.structs.replace(message, schedule=schedule)


def prompt_of(message: EngineGenerate | EngineScore | EngineChoose | EngineEmbed) -> Sequence[int]:
    """Returns the tokens that a request has in common with others like it."""
    match message:
        case EngineGenerate(token_ids=token_ids) | EngineChoose(prompt=token_ids) | EngineEmbed(token_ids=token_ids):
            return token_ids
        case EngineScore(sequences=sequences):
            return sequences[0]
        case _:
            assert_never(message)


# ------------------------------------------------------------------------------------------ generate


@dataclass(slots=True, eq=False)
class Continuation:
    """Collects one of the `n` texts of a GenRequest."""

    index: int
    detokenizer: Detokenizer
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sent: int = 0  # tokens sent in chunks
    told_logprobs: int = 0
    ended: Ended | None = None


@dataclass(slots=True, eq=False)
class GenCall(PendingCall):
    """Answers a GenRequest: chunks as they come, then a Final with all continuations."""

    stream: bool
    token_bytes: TokenBytes
    stops: Stops | None
    spec: ConstraintSpec | None = None
    tells_begun: bool = False  # its first chunk has the figures of the prompt
    compiled: Compiled | None = field(default=None, init=False)
    inquiry: CompileInquiry | None = field(default=None, init=False)  # while the constraint is being compiled
    hint: int | None = field(default=None, init=False)  # the engine's id for its prompt, computed ahead meanwhile
    begun: Begun | None = field(default=None, init=False)  # for the next chunk
    continuations: dict[int, Continuation] = field(init=False)

    def __post_init__(self) -> None:
        PendingCall.__post_init__(self)
        self.continuations = {
            message.id: Continuation(index, Detokenizer(self.token_bytes, self.stops))
            for index, message in enumerate(self.messages)
        }

    @property
    def waits_for(self) -> str:
        return "its constraint to be compiled" if self.spec is not None and self.compiled is None else ""

    @property
    def repeatable(self) -> bool:
        return not any(self.continuations[id].sent for id in self.open)

    def _renewed(self, message: Bounded, id: int) -> Bounded:
        if message.id in self.open:
            old = self.continuations.pop(message.id)
            self.continuations[id] = Continuation(old.index, Detokenizer(self.token_bytes, self.stops))
        return PendingCall._renewed(self, message, id)

    @property
    def work(self) -> int:
        return sum(message.sampling.max_tokens for message in self.messages if isinstance(message, EngineGenerate))

    def constrain(self, compiled: Compiled) -> None:
        """Adds the compiled constraint to its engine requests."""
        self.compiled, self.inquiry = compiled, None
        self.messages = tuple(
            msgspec.structs.replace(message, constraint=compiled.constraint)
            if isinstance(message, EngineGenerate)
            else message
            for message in self.messages
        )

    def accept(self, event: FromEngine) -> list[FromBackend]:
        match event:
            case Tokens():
                return self._grow(event)
            case Ended():
                return self._end(event)
            case _:
                raise ProtocolBreach(f"a {type(event).__name__} for a generate request")

    def _grow(self, event: Tokens) -> list[FromBackend]:
        continuation = self.continuations[event.id]
        continuation.logprobs += self._texts(event.logprobs)
        continuation.detokenizer.skip(event.healed)
        text = continuation.detokenizer.feed(event.token_ids)
        return self._chunk(continuation, text) if self.stream else []

    def _end(self, event: Ended) -> list[FromBackend]:
        continuation = self.continuations[event.id]
        continuation.logprobs += self._texts(event.logprobs)
        continuation.detokenizer.skip(event.healed)
        text = continuation.detokenizer.finish(event.token_ids, event.text_bytes)
        continuation.ended = event
        self.open.discard(event.id)
        out = self._chunk(continuation, text) if self.stream else []
        if not self.open:
            out.append(self._final())
        return out

    def _chunk(self, continuation: Continuation, text: str) -> list[FromBackend]:
        if not text:
            return []
        token_ids = continuation.detokenizer.token_ids
        chunk = Chunk(
            self.request_id,
            continuation.index,
            text,
            tuple(token_ids[continuation.sent :]),
            tuple(continuation.logprobs[continuation.told_logprobs :]),
            self.begun,
        )
        self.begun = None
        continuation.sent = len(token_ids)
        continuation.told_logprobs = len(continuation.logprobs)
        return [chunk]

    def _final(self) -> Final:
        continuations = sorted(self.continuations.values(), key=lambda item: item.index)
        ends = [item.ended for item in continuations if item.ended is not None]
        assert len(ends) == len(continuations), "a call ends when its last continuation has"
        caching = None if self.marked is None else self.marked.usage
        usage = Usage(
            prompt_tokens=ends[0].prompt_tokens,
            # Continuations share one prompt: the tokens computed for the first of them were not cached.
            cached_tokens=min(end.cached_tokens for end in ends),
            completion_tokens=sum(end.completion_tokens for end in ends),
            calls=1,
            loaded_tokens=ends[0].loaded,
        )
        completions = tuple(_completion(item, self.compiled) for item in continuations)
        prompt_logprobs = tuple(self._texts(ends[0].prompt_logprobs))
        times = _times([end.times for end in ends])
        return Final(self.request_id, completions, usage.marked(caching), prompt_logprobs, times, caching, self.placed)

    def _texts(self, logprobs: Sequence[IdLogprob]) -> list[TokenLogprob]:
        return [self._described(item) for item in logprobs]

    def _described(self, item: IdLogprob) -> TokenLogprob:
        data = self.token_bytes(item.token_id)
        top_data = tuple(self.token_bytes(token_id) for token_id, _ in item.top)
        top = tuple(
            (token_id, spelled.decode("utf-8", "replace"), logprob)
            for (token_id, logprob), spelled in zip(item.top, top_data, strict=True)
        )
        return TokenLogprob(item.token_id, data.decode("utf-8", "replace"), item.logprob, top, data, top_data)


def _times(all_times: Sequence[RequestTimes]) -> RequestTimes:
    """Returns the times of a call from those of its continuations."""
    firsts = [times.first_token for times in all_times if times.first_token is not None]
    lasts = [times.last_token for times in all_times if times.last_token is not None]
    return RequestTimes(min(times.queued for times in all_times), min(firsts, default=None), max(lasts, default=None))


def _completion(continuation: Continuation, compiled: Compiled | None) -> Completion:
    ended = continuation.ended
    assert ended is not None
    detokenizer = continuation.detokenizer
    stopped = ended.finish_reason is FinishReason.STOP and isinstance(ended.matched_stop, int)
    kept = detokenizer.kept(ended.text_bytes, ends_with_stop_token=stopped)
    return Completion(
        text=detokenizer.text,
        token_ids=tuple(detokenizer.token_ids),
        kept=kept.count,
        tail=kept.tail,
        finish_reason=ended.finish_reason,
        matched_stop=ended.matched_stop,
        logprobs=tuple(continuation.logprobs),
        forced_tokens=ended.forced_tokens,
        guarantee="enforced" if ended.enforced else "",
        unenforced=compiled.unenforced if compiled is not None else (),
        narrowed=compiled.narrowed if compiled is not None else (),
        guessed_tokens=sum(run.end - run.first for run in ended.runs if run.origin == "guessed"),
        spans=tuple(_spans(detokenizer, ended.runs)),
    )


def _spans(detokenizer: Detokenizer, runs: Sequence[TokenRun]) -> Iterator[tuple[TextOrigin, int, int]]:
    """Yields the characters that runs of tokens spell."""
    places = iter(detokenizer.characters_before(place for run in runs for place in (run.first, run.end)))
    for run, start, end in zip(runs, places, places, strict=True):
        if start < end:
            yield run.origin, start, end


# --------------------------------------------------------------------------------------------- score


@dataclass(slots=True, eq=False)
class ScoreCall(PendingCall):
    """Answers a ScoreRequest: scores the choices or searches them, optionally also without the prompt."""

    choices: tuple[tuple[int, ...], ...]  # tokens of each choice after those that all share with the prompt
    answers: dict[int, ScoreEnded | ChooseEnded] = field(default_factory=dict, init=False)

    def accept(self, event: FromEngine) -> list[FromBackend]:
        if not isinstance(event, ScoreEnded | ChooseEnded):
            raise ProtocolBreach(f"a {type(event).__name__} for a score request")
        if [len(row) for row in event.logprobs] != [len(choice) for choice in self.choices]:
            raise ProtocolBreach("the log-probabilities do not fit the choices")
        self.answers[event.id] = event
        self.open.discard(event.id)
        return [] if self.open else [self._scored()]

    def _scored(self) -> Scored:
        answers = [self.answers[message.id] for message in self.messages]
        given = answers[0]
        unconditional = answers[1].logprobs if len(answers) > 1 else [[] for _ in self.choices]
        nothing: list[float | None] = [None] * len(self.choices)
        found = given if isinstance(given, ChooseEnded) else None
        caching = None if self.marked is None else self.marked.usage
        lower, upper = (found.lower, found.upper or nothing) if found is not None else (nothing, nothing)
        rows = zip(self.choices, given.logprobs, unconditional, lower, upper, strict=True)
        return Scored(
            self.request_id,
            tuple(
                ScoredChoice(ids, tuple(logprobs), tuple(alone), least, most)
                for ids, logprobs, alone, least, most in rows
            ),
            _usage(self.messages, answers).marked(caching),
            found.evaluations if found is not None else 0,
            caching,
            self.placed,
        )


def _usage(messages: Sequence[ToEngine], answers: Sequence[ScoreEnded | ChooseEnded]) -> Usage:
    """Returns what the answers used; what the sequences of a message share counts once."""
    prompt = cached = 0
    for message, answer in zip(messages, answers, strict=True):
        prompt += answer.prompt_tokens
        found = answer.cached_tokens
        if isinstance(message, EngineScore):
            others = len(message.sequences) - 1
            prompt -= others * message.start
            found -= others * (message.start - 1)  # the last shared token is computed again: it predicts the choice
        cached += max(0, found)
    return Usage(prompt, min(prompt, cached), calls=1)


# --------------------------------------------------------------------------------------------- cache


@dataclass(slots=True, eq=False)
class CacheCall(PendingCall):
    """Answers a CreateCache, whose prompt it computes without an answer.

    Attributes:
        find: returns the cache that was created; None when it could not be kept.
    """

    find: Callable[[], CacheObject | None]

    def accept(self, event: FromEngine) -> list[FromBackend]:
        if not isinstance(event, Ended) or self.marked is None:
            raise ProtocolBreach(f"a {type(event).__name__} for a cache")
        self.open.discard(event.id)
        found = self.find() if self.marked.held else None
        if found is not None:
            caching = self.marked.usage
            usage = Usage(event.prompt_tokens, event.cached_tokens, 0, 1).marked(caching)
            return [Caches(self.request_id, (found,), usage, caching)]
        if event.finish_reason is FinishReason.ABORT:
            error: UmbelError = CancelledError("the request was cancelled before the cache was created")
        else:
            error = OverloadedError(
                f"{event.prompt_tokens} tokens find no room in the share of the KV pool for explicit caches; "
                "delete some, wait for their end, or start the runtime with a larger pool or pin_share"
            )
        return [Failure(self.request_id, type(error).__name__, str(error))]


# ------------------------------------------------------------------------------------------- control


BroadcastEnded = ControlEnded | EngineSurveyed


@dataclass(slots=True, eq=False)
class BroadcastCall(PendingCall):
    """Asks every engine that is ready the same, and answers when each has answered or is gone.

    It has one message, which `spread` copies for each of the engines when the call is sent.
    """

    asked: dict[int, int] = field(default_factory=dict, init=False)  # id → engine, of those that have not answered
    answers: dict[int, BroadcastEnded] = field(default_factory=dict, init=False)  # by engine

    def spread(self, replicas: Sequence[int], ids: Iterator[int]) -> None:
        """Asks these engines."""
        question, *_ = self.messages
        self.messages = tuple(msgspec.structs.replace(question, id=next(ids)) for _ in replicas)
        self.asked = {message.id: replica for message, replica in zip(self.messages, replicas, strict=True)}
        self.open = set(self.asked)

    def is_at(self, replica: int) -> bool:
        return replica in self.asked.values()

    def targets(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.asked.items())

    def without(self, replica: int) -> FromBackend | None:
        """Goes on without an engine that is gone → the answer, if all the others have given theirs."""
        for id in [id for id, asked in self.asked.items() if asked == replica]:
            del self.asked[id]
            self.open.discard(id)
        return self._answer() if self.answers and not self.open else None

    def note(self, event: BroadcastEnded) -> list[FromBackend]:
        """Takes the answer of one engine → that of the call, if it was the last one."""
        self.answers[self.asked.pop(event.id)] = event
        self.open.discard(event.id)
        return [] if self.open else [self._answer()]

    @abstractmethod
    def _answer(self) -> FromBackend:
        """Makes the answer from those of the engines."""


@dataclass(slots=True, eq=False)
class ControlCall(BroadcastCall):
    """Answers a Control with the engines' answers and the gateway's own facts. Numbers of several engines are added.

    Attributes:
        alone: returns the gateway's facts for `info`, the whole answer where there is no engine.
    """

    alone: Callable[[], Facts] | None

    def accept(self, event: FromEngine) -> list[FromBackend]:
        if not isinstance(event, ControlEnded):
            raise ProtocolBreach(f"a {type(event).__name__} for a control request")
        return self.note(event)

    def _answer(self) -> FromBackend:
        results = [ended.result for ended in self.answers.values() if isinstance(ended, ControlEnded)]
        return Done(self.request_id, {**(self.alone() if self.alone is not None else {}), **merged_facts(results)})


EACH = frozenset({"max_running", "chunk_size"})  # numbers that say how each of several engines is set


def merged_facts(results: Sequence[Facts]) -> Facts:
    """Adds up the counts in the facts of several engines; of all other facts the first one's are kept."""
    merged: Facts = {}
    for facts in results:
        for name, fact in facts.items():
            former = merged.get(name)
            counts = type(fact) in (int, float) and type(former) in (int, float) and name not in EACH
            merged[name] = former + fact if counts else merged.get(name, fact)  # type: ignore[operator]  # numbers
    return merged


@dataclass(slots=True, eq=False)
class SurveyCall(BroadcastCall):
    """Answers a Survey, with the texts of the nodes where they were asked for.

    Attributes:
        most: nodes of all engines together.
        text: characters of each.
        spell: returns the text of token ids.
    """

    most: int
    text: int
    spell: Callable[[Sequence[int]], str]

    def accept(self, event: FromEngine) -> list[FromBackend]:
        if not isinstance(event, EngineSurveyed):
            raise ProtocolBreach(f"a {type(event).__name__} for a survey")
        return self.note(event)

    def _answer(self) -> FromBackend:
        surveys = [self._survey(replica, ended) for replica, ended in sorted(self.answers.items())]
        share = _share([len(survey.nodes) for survey in surveys], self.most)  # parents are before their children
        nodes = tuple(node for survey in surveys for node in survey.nodes[:share])
        total, pool = sum(survey.total_nodes for survey in surveys), PoolGauges.sum_of([s.pool for s in surveys])
        return Surveyed(self.request_id, TreeSurvey(nodes, total, pool))

    def _survey(self, replica: int, ended: BroadcastEnded) -> TreeSurvey:
        """Returns one engine's survey, with texts, and with ids of nodes that no other engine has."""
        assert isinstance(ended, EngineSurveyed), "`accept` takes nothing else"
        survey = ended.survey
        texts = [self.spell(ids)[: self.text] for ids in ended.shown] if self.text else [""] * len(survey.nodes)
        nodes = tuple(
            msgspec.structs.replace(
                node,
                id=_distinct(node.id, replica),
                parent=None if node.parent is None else _distinct(node.parent, replica),
                text=text,
                replica=replica,
            )
            for node, text in zip(survey.nodes, texts, strict=True)
        )
        return msgspec.structs.replace(survey, nodes=nodes)


def _share(lengths: Sequence[int], most: int) -> int:
    """Returns how much each list may keep so that all together keep `most`; 1 at least, so that none is left out."""
    rest = most
    for left, length in zip(range(len(lengths), 0, -1), sorted(lengths), strict=True):
        share = max(1, rest // left)
        if length > share:
            return share
        rest -= length
    return most


def _distinct(node: int, replica: int) -> int:
    """Returns the id of an engine's node among those of all engines: of the first engine its own."""
    return node + (replica << 40)


_CLEARED_AT = 1_024  # entries of the heap, of calls that have ended among them


class CallIndex:
    """Finds the calls of a gateway that have not ended, in order of arrival.

    engine request id ──▶ call ◀── (client, request id)     held from the call's arrival to its one ending
                           ▲
         deadline heap ── number                            a heap entry of an ended call is a time and a number only
    """

    def __init__(self) -> None:
        self._live: dict[PendingCall, int] = {}  # in order of arrival, with the number of its heap entry
        self._by_request: dict[int, PendingCall] = {}
        self._by_request_id: dict[tuple[Client, str], list[PendingCall]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._watched: dict[int, PendingCall] = {}  # by the number of its heap entry
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, call: PendingCall) -> bool:
        return call in self._live

    def __iter__(self) -> Iterator[PendingCall]:
        """Iterates in order of arrival; calls may be removed meanwhile."""
        return iter(tuple(self._live))

    def add(self, call: PendingCall) -> None:
        for message in call.messages:
            self._by_request[message.id] = call
        self._by_request_id.setdefault((call.client, call.request_id), []).append(call)
        self.watch(call, call.deadline)

    def remove(self, call: PendingCall) -> None:
        self._watched.pop(self._live.pop(call), None)
        for message in call.messages:
            self._by_request.pop(message.id, None)
        key = (call.client, call.request_id)
        calls = self._by_request_id[key]
        calls.remove(call)
        if not calls:
            del self._by_request_id[key]
        if len(self._deadlines) > _CLEARED_AT and len(self._deadlines) > 4 * len(self._live):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._watched]
            heapq.heapify(self._deadlines)

    def repeat(self, call: PendingCall, ids: Iterator[int]) -> None:
        """Gives the unfinished requests of a call new ids. Events of the former ids count as late from now on."""
        for id in call.open:
            self._by_request.pop(id, None)
        call.repeat(ids)
        for id in call.open:
            self._by_request[id] = call

    def spread(self, call: BroadcastCall, replicas: Sequence[int], ids: Iterator[int]) -> None:
        """Gives a call a request for each of these engines."""
        for id in call.open:
            self._by_request.pop(id, None)
        call.spread(replicas, ids)
        for id in call.open:
            self._by_request[id] = call

    def of_request(self, id: int) -> PendingCall | None:
        """Returns the call of an engine request that has not ended."""
        return self._by_request.get(id)

    def request_ended(self, id: int) -> None:
        """Forgets an engine request that has ended; its call may have others."""
        self._by_request.pop(id, None)

    def with_id(self, client: Client, request_id: str) -> tuple[PendingCall, ...]:
        return tuple(self._by_request_id.get((client, request_id), ()))

    def of_client(self, client: Client) -> tuple[PendingCall, ...]:
        return tuple(call for call in self._live if call.client == client)

    @property
    def next_due(self) -> float:
        """Time at which `due` may next return a call; infinite when there is none."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def watch(self, call: PendingCall, when: float) -> None:
        """Makes `due` return the call at this time, and at no earlier one that it was watched for."""
        if call in self._live:
            self._watched.pop(self._live[call], None)
        number = self._live[call] = next(self._numbers)
        self._watched[number] = call
        heapq.heappush(self._deadlines, (when, number))

    def due(self, now: float) -> Iterator[PendingCall]:
        """Yields the calls whose time has come and that have not ended, each once per `watch`."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            call = self._watched.pop(number, None)
            if call is not None:
                yield call
