"""Keeps every request from its arrival to its one ending: made from a message, moved between tables, answered.

held ──queue──▶ waiting ──admit──▶ running      a message may have several requests (a score has one for each
                   ▲                  │         choice); it is alive until its last request is done or the
                   └────retract───────┘         first one fails. Held are those whose constraint is being opened,
                                                 and searches that wait for the vocabulary's trie
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...lang.errors import WIRE_ERRORS, CapabilityError, ContextLengthError, EngineError, RequestError, UmbelError
from ...lang.protocol import FinishReason, RequestTimes
from ...lang.status import BOUNDS, bucket_name, count_name
from ..cache.slot_allocator import IntegrityError
from ..constraints.matcher import MatcherCache
from ..core.batch import PICTURE_BASE, PICTURE_END, LogitsError, PictureStore, VectorHead, picture_spans
from ..core.instruments import Clock, Counters, FaultHook
from ..core.messages import (
    NO_ADAPTER,
    Ended,
    EngineChoose,
    EngineEmbed,
    EngineFailed,
    EngineGenerate,
    EngineMark,
    EnginePrefill,
    EngineScore,
    FromEngine,
    Schedule,
    ScoreEnded,
)
from ..multimodal.sequence import NO_PICTURES, SequencePictures
from ..tokenizer.tokenizer import CompiledStops
from .kv_manager import KVManager
from .policy import SchedulerConfig
from .request import Choosing, Embedding, Generation, Job, Phase, Prefilling, Request, ScoreGroup, Scoring, Stop, accept


class Durations:
    """Counts durations by their length. Cumulative: `counters` never fall."""

    def __init__(self, name: str) -> None:
        self._names = (name, *(bucket_name(name, bound) for bound in BOUNDS), count_name(name))
        self._seconds = 0.0
        self._buckets = [0] * (len(BOUNDS) + 1)  # in bucket i: longer than bound i − 1, at most bound i
        self._last, self._times = 0.0, 0  # one that is not in them yet, so many times: tokens of a step have the same

    def add(self, seconds: float, times: int = 1) -> None:
        """Counts a duration, `times` times over."""
        if seconds == self._last:
            self._times += times
            return
        self._put()
        self._last, self._times = seconds, times

    def _put(self) -> None:
        self._seconds += self._last * self._times
        self._buckets[bisect_left(BOUNDS, self._last)] += self._times
        self._times = 0

    def counters(self) -> Iterator[tuple[str, float]]:
        """Returns the sum, the counts up to each bound, and the count of all, by name."""
        self._put()
        return zip(self._names, (self._seconds, *accumulate(self._buckets)), strict=True)


class Timing:
    """Measures the generations of one scheduler."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forgets what was measured."""
        self._queue = Durations("queue_seconds")
        self._first_token = Durations("first_token_seconds")
        self._token = Durations("token_seconds")

    @property
    def counters(self) -> dict[str, float]:
        return dict(chain(self._queue.counters(), self._first_token.counters(), self._token.counters()))

    def admitted(self, request: Request) -> None:
        """Notes the first admission of a request."""
        request.admitted_at = self._clock.now()
        if isinstance(request.job, Generation):
            self._queue.add(request.admitted_at - request.arrival)

    def committed(self, request: Request, generation: Generation, now: float | None = None) -> None:
        """Notes the tokens of a generation that came since the last call, as those of this moment, or of `now`."""
        new = request.length - request.prompt_length - generation.timed
        if new <= 0:
            return
        if now is None:
            now = self._clock.now()
        if generation.first_token_at is None:
            generation.first_token_at = now
            self._first_token.add(now - request.arrival)
            if new > 1:
                self._token.add(0.0, new - 1)
        else:
            self._token.add((now - generation.last_token_at) / new, new)
        generation.last_token_at = now
        generation.timed += new

    def of(self, request: Request, generation: Generation) -> RequestTimes:
        """Returns the times of a generation that ends now."""
        queued_until = self._clock.now() if request.admitted_at is None else request.admitted_at
        first = generation.first_token_at
        return RequestTimes(
            queued=queued_until - request.arrival,
            first_token=None if first is None else first - request.arrival,
            last_token=None if first is None else generation.last_token_at - request.arrival,
        )


def score_ended(message_id: int, group: ScoreGroup) -> ScoreEnded:
    return ScoreEnded(
        message_id,
        [member.job.logprobs for member in group.members if isinstance(member.job, Scoring)],
        sum(member.prompt_length for member in group.members),
        sum(member.cached_tokens for member in group.members),
    )


def failure(message_id: int, error: Exception) -> EngineFailed:
    """Builds the answer to a message that failed.

    An UmbelError keeps its text, under the name of its nearest class in WIRE_ERRORS. Of other errors only the class
    name leaves the engine, because their text may contain private data.
    """
    if isinstance(error, UmbelError):
        kind = next(
            (base.__name__ for base in type(error).__mro__ if base.__name__ in WIRE_ERRORS), EngineError.__name__
        )
        return EngineFailed(message_id, kind, str(error))
    return EngineFailed(message_id, EngineError.__name__, f"the engine's step failed with {type(error).__name__}")


class RequestTable:
    """Keeps held, waiting and running requests, and the events to send. Only it changes a request's phase."""

    def __init__(self, kv: KVManager, counters: Counters, timing: Timing) -> None:
        self.held: dict[int, Request] = {}  # by number
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.alive: dict[int, list[Request]] = {}  # by message: those of its requests that have not ended
        self.events: list[FromEngine] = []
        self.last_failure: Exception | None = None
        self.on_text_end: Callable[[Request], None] | None = None  # called with a generation that ends
        self.changes = 0  # counts arrivals, admissions, retractions and endings
        self._kv = kv
        self._counters = counters
        self._timing = timing

    def add(self, message_id: int, requests: Sequence[Request]) -> None:
        self.alive[message_id] = list(requests)
        self.waiting.update((request.number, request) for request in requests)
        self.changes += 1

    def extend(self, message_id: int, requests: Sequence[Request]) -> None:
        """Adds requests to a message that is alive."""
        self.alive[message_id].extend(requests)
        self.waiting.update((request.number, request) for request in requests)
        self.changes += 1

    def hold(self, request: Request) -> None:
        """Takes a request that cannot be scheduled yet."""
        self.alive[request.message_id] = [request]
        self.held[request.number] = request
        self.changes += 1

    def queue(self, request: Request) -> None:
        """Moves a held request to the waiting ones."""
        del self.held[request.number]
        self.waiting[request.number] = request
        self.changes += 1

    def admit(self, request: Request) -> None:
        """Moves a waiting request to the running ones; the KVManager has opened it."""
        if request.admitted_at is None:
            self._timing.admitted(request)
            self._counters.prompt_tokens += request.prompt_length
        del self.waiting[request.number]
        self.running[request.number] = request
        request.phase = Phase.RUNNING
        self.changes += 1

    def wait_for_load(self, request: Request) -> None:
        """Lets a running request wait for its pages from a tier."""
        request.phase = Phase.LOADING

    def loaded(self, request: Request) -> None:
        """Lets a request run whose load has ended."""
        assert request.phase is Phase.LOADING, "it has waited"
        request.phase = Phase.RUNNING
        self.changes += 1

    def retract(self, request: Request) -> None:
        """Puts a running request back to waiting with all its tokens. Its keys stay in the tree while there is room."""
        self._counters.retractions += 1
        if isinstance(request.job, Prefilling):
            self.drop(request)
            return
        self._kv.close(request)
        self._wait_again(request)

    def retract_all(self) -> None:
        """Puts all running requests back to waiting, after pool and tree were cleared."""
        for request in list(self.running.values()):
            self._kv.detach(request)
            self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        del self.running[request.number]
        self.waiting[request.number] = request
        request.phase = Phase.WAITING
        self.changes += 1

    def release(self, request: Request) -> None:
        """Ends a request and releases all that it holds. Its message is alive until `end`."""
        self._kv.close(request)
        self.held.pop(request.number, None)
        self.waiting.pop(request.number, None)
        self.running.pop(request.number, None)
        self.alive[request.message_id].remove(request)
        request.phase = Phase.ENDED
        self.changes += 1

    def end(self, message_id: int, ending: FromEngine | None) -> None:
        """Ends a message: releases its requests, then answers it (a hint is never answered). No other code does."""
        requests = self.alive[message_id]
        hint = any(isinstance(request.job, Prefilling) for request in requests)
        for request in list(requests):
            self.release(request)
        del self.alive[message_id]
        if ending is not None and not hint:
            self.events.append(ending)

    def end_text(self, request: Request, stop: Stop) -> None:
        """Ends the text of a generation, and its message unless log-probabilities are still to be computed."""
        assert isinstance(request.job, Generation), "only generations have a text"
        request.job.stop = stop
        if not request.owes_logprobs:
            self.finish_text(request, stop)

    def finish_text(self, request: Request, stop: Stop) -> None:
        """Answers a generation whose text has ended and for which all is computed."""
        self._counters.finished += 1
        if self.on_text_end is not None:
            self.on_text_end(request)
        self.end(request.message_id, self._ended(request, stop))

    def aborted(self, request: Request) -> FromEngine:
        """Builds the end of a request that its sender aborts: of a generation, with its text so far."""
        if isinstance(request.job, Generation):
            return self._ended(request, Stop(FinishReason.ABORT, None, request.job.text_bytes))
        return EngineFailed(request.message_id, "CancelledError", "the request was aborted by its sender")

    def _ended(self, request: Request, stop: Stop) -> Ended:
        """Builds the end of a generation, with the tokens that were not streamed."""
        generation = request.job
        assert isinstance(generation, Generation), "only generations end with Ended"
        self._timing.committed(request, generation)  # a text may have forced tokens only
        cursor = generation.cursor
        healed = cursor.healed if cursor is not None else 0
        return Ended(
            id=request.message_id,
            token_ids=request.generated_ids[generation.sent :],
            finish_reason=stop.reason,
            matched_stop=stop.matched,
            text_bytes=stop.text_bytes,
            prompt_tokens=request.prompt_length + (healed > 0),  # the last one was replaced
            cached_tokens=request.cached_tokens,
            completion_tokens=request.generated,
            logprobs=generation.logprobs[generation.sent :],
            prompt_logprobs=generation.prompt_logprobs,
            forced_tokens=cursor.forced if cursor is not None else 0,
            enforced=cursor is not None
            and cursor.accepting
            and (stop.matched is None or stop.matched in cursor.eos_ids),
            healed=healed,
            times=self._timing.of(request, generation),
            loaded=request.loaded if request.loaded and request.cached_tokens else {},
            runs=generation.runs,
        )

    def fail(self, request: Request, error: Exception) -> None:
        """Ends the request's message, with all its requests, with the cause.

        Keys of rows whose logits are not numbers may be wrong: the tree does not keep them.
        """
        self.last_failure = error
        self._counters.failed += 1
        if isinstance(error, LogitsError):
            self._kv.discard(request)
        self.end(request.message_id, failure(request.message_id, error))

    def drop(self, request: Request) -> None:
        """Drops a hint that cannot be served now: losing it is better than delaying other requests."""
        self._counters.dropped_hints += 1
        self.end(request.message_id, None)

    def take_events(self) -> list[FromEngine]:
        """Returns the messages to send, and forgets them."""
        events, self.events = self.events, []
        return events

    def check(self) -> None:
        """Raises IntegrityError when the tables contradict each other."""
        idle = [*self.held.values(), *self.waiting.values()]
        holding = [request for request in idle if request.match is not None]
        if holding:
            raise IntegrityError(f"{len(holding)} waiting requests hold slots")
        alive = sum(map(len, self.alive.values()))
        if alive != len(idle) + len(self.running):
            raise IntegrityError(f"{alive} requests are alive, {len(idle)} wait and {len(self.running)} run")


MOST_SEARCHED = 16_384  # tokens of choices; a step makes a node for each


class RequestFactory:
    """Makes requests from messages. It finds every error in a message before a request holds slots.

    The gateway's RequestValidator has explained the mistakes of clients; here they are asserted. It cannot know the
    pool, the model's vocabulary (a tokenizer may have more tokens) and the pictures that the engine has: what does not
    fit these is refused here.

    Args:
        vocab_size: token ids are below it.
        context_length, pool_size, most_of_salt: a sequence may have as many tokens as the smallest of them.
        eos_ids: tokens with which the model ends its text.
        pictures: the store of pictures that prompts may hold; None: the model reads text only.
        vectors: turns hidden states into vectors; None: texts get none.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        pool_size: int,
        most_of_salt: int,
        eos_ids: frozenset[int],
        pictures: PictureStore | None = None,
        vectors: VectorHead | None = None,
    ) -> None:
        self.longest = min(context_length, pool_size, most_of_salt)
        if context_length == self.longest:
            limit, instead = f"the context of {context_length} tokens", "load a model with a longer context"
        elif pool_size == self.longest:
            limit, instead = f"the KV pool of {pool_size} tokens", "start with a larger pool"
        else:
            limit = f"the {most_of_salt} tokens of the KV pool that one salt may hold"
            instead = "start with a larger pool or salt_share"
        self._too_long = f"more than {limit}; shorten it, or {instead}"
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab_size)  # a model may lack some
        self._pictures = pictures
        self._vectors = vectors
        self._arrived = 0
        self._stops = CompiledStops()

    def generate(self, message: EngineGenerate, now: float) -> Request:
        sampling = msgspec.structs.replace(message.sampling)  # which checks every number again
        tokens, pictures = self._sequence(message.token_ids, "the prompt")
        assert not (message.heal and message.token_ids[-1] >= PICTURE_BASE), "no token can replace a picture"
        room = 1 if sampling.max_tokens else 0
        if len(tokens) + room > self.longest:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens and {room} must fit after it, {self._too_long}"
            )
        self._known("stop_token_ids", sampling.stop_token_ids)
        self._known("logit_bias", tuple(sampling.logit_bias))
        start = sampling.prompt_logprobs_from
        if start is not None and start > len(tokens):
            raise RequestError(
                f"logprob_start_len (prompt_logprobs_from={start}) is past the prompt of {len(tokens)} tokens; "
                f"write 0 to {len(tokens)}"
            )
        # The first token never has one, whatever it is: from 0 and from 1 ask for the same.
        assert start is None or max(start, 1) >= pictures.end, "tokens of a picture have no log-probability"
        assert sampling.seed is not None or sampling.greedy, "the gateway sets a seed for every continuation"
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        job = Generation(
            sampling=sampling,
            seed=sampling.seed or 0,
            stream=message.stream,
            ends=ends,
            stops=self._stops.of(sampling),
            length_limit=min(len(tokens) + sampling.max_tokens, self.longest),
        )
        request = self._request(message.id, tokens, pictures, job, message.schedule, now)
        request.marks = _checked_marks(message.marks, len(tokens) - message.heal)
        return request

    def score(self, message: EngineScore, now: float) -> list[Request]:
        assert message.sequences, "a score has a choice"
        assert message.start >= 1, "the first token has no log-probability"
        group = ScoreGroup(message.start)
        sequences = [self._sequence(ids, f"sequence {i}") for i, ids in enumerate(message.sequences)]
        first = sequences[0][0]
        for i, (tokens, pictures) in enumerate(sequences):
            if len(tokens) > self.longest:
                raise ContextLengthError(f"sequence {i} has {len(tokens)} tokens, {self._too_long}")
            assert message.start >= pictures.end, "tokens of a picture have no log-probability"
            assert len(tokens) >= message.start, "a choice has a token"
            assert np.array_equal(tokens[: message.start], first[: message.start]), "choices share their prompt"
        group.members.extend(
            self._request(message.id, tokens, pictures, Scoring(group), message.schedule, now)
            for tokens, pictures in sequences
        )
        group.members[0].marks = _checked_marks(message.marks, message.start)
        return group.members

    def choose(self, message: EngineChoose, now: float) -> Request:
        """Makes the request that waits for the search; it runs the first choice's tokens."""
        assert message.choices, "a search has a choice"
        assert all(message.choices), "a choice has a token"
        prompt, pictures = self._sequence(message.prompt, "the prompt")
        assert not (message.heal and message.prompt[-1] >= PICTURE_BASE), "no token can replace a picture"
        assert 1 <= message.start <= len(prompt), "choices share a token of the prompt"
        assert message.start >= pictures.end, "tokens of a picture have no log-probability"
        for i, ids in enumerate(message.choices):
            self._known(f"choice {i}", ids)
            length = message.start + len(ids)
            if length > self.longest:
                raise ContextLengthError(f"the prompt with choice {i} has {length} tokens, {self._too_long}")
        total = sum(map(len, message.choices))
        if total > MOST_SEARCHED:
            raise RequestError(
                f"the choices have {total} tokens, and a search takes at most {MOST_SEARCHED}; "
                'give fewer or shorter ones, or write method="token_length_normalized"'
            )
        shared = message.prompt[: message.start]
        tokens = np.array([*shared, *message.choices[0][:-1]], dtype=np.int32)
        request = self._request(message.id, tokens, pictures, Choosing(None, []), message.schedule, now)
        request.marks = _checked_marks(message.marks, message.start)
        return request

    def another(self, request: Request, token_ids: Sequence[int], job: Choosing) -> Request:
        """Makes one more request of the same message. All pictures lie in the prefix that its requests share."""
        tokens = np.array(token_ids, dtype=np.int32)
        return self._request(request.message_id, tokens, request.pictures, job, request.schedule, request.arrival)

    def embed(self, message: EngineEmbed, now: float) -> Request:
        """Raises CapabilityError where nothing turns hidden states into a vector."""
        if self._vectors is None:
            raise CapabilityError("this runtime gives no hidden states of its model, which embeddings are made of")
        tokens, pictures = self._sequence(message.token_ids, "the text")
        if len(tokens) > self.longest:
            raise ContextLengthError(f"the text has {len(tokens)} tokens, {self._too_long}")
        assert 0 <= message.dimensions <= self._vectors.dimensions, "the gateway has checked it"
        job = Embedding(message.dimensions, self._vectors.every_row)
        return self._request(message.id, tokens, pictures, job, message.schedule, now)

    def prefill(self, message: EnginePrefill, now: float) -> Request:
        tokens, pictures = self._sequence(message.token_ids, "the hinted prefix")
        if len(tokens) > self.longest:
            raise ContextLengthError(f"the hinted prefix has {len(tokens)} tokens, {self._too_long}")
        assert message.pin is None or not math.isnan(message.pin), "the clock is compared with it"
        return self._request(message.id, tokens, pictures, Prefilling(message.pin), message.schedule, now)

    def _request(
        self,
        message_id: int,
        tokens: NDArray[np.int32],
        pictures: SequencePictures,
        job: Job,
        schedule: Schedule,
        now: float,
    ) -> Request:
        assert isinstance(schedule.priority, int), "orders compare it"
        assert isinstance(schedule.ahead, int), "orders compare it"
        assert schedule.timeout is None or not math.isnan(schedule.timeout), "the clock is compared with it"
        opened = schedule.private[0][0] if schedule.private else None
        assert schedule.adapter == NO_ADAPTER or opened == 0, "no other prompt shares keys with an adapter's"
        self._arrived += 1
        return Request(self._arrived, message_id, tokens, job, schedule, now, pictures)

    def _sequence(self, ids: Sequence[int], what: str) -> tuple[NDArray[np.int32], SequencePictures]:
        """Checks that `ids` are tokens of the vocabulary and whole pictures, and returns both."""
        assert ids, "a sequence has a token"
        lowest, highest = min(ids), max(ids)
        if highest < PICTURE_BASE:
            self._check_range(what, lowest, highest)
            return np.array(ids, dtype=np.int32), NO_PICTURES
        self._known(what, [token for token in ids if not PICTURE_BASE <= token < PICTURE_END])
        assert self._pictures is not None, "the model reads text only"
        try:
            spans = picture_spans(np.array(ids, dtype=np.int64), self._pictures.tokens, self._pictures.grid)
        except ValueError as error:
            raise RequestError(f"{what}: {error}; send a picture before what holds it, and all of its tokens") from None
        holds = tuple(self._pictures.hold(number) for number in {span.number for span in spans})
        return np.array(ids, dtype=np.int32), SequencePictures(spans, self._pictures.both_ways, holds)

    def _known(self, what: str, ids: Sequence[int]) -> None:
        if ids:
            self._check_range(what, min(ids), max(ids))

    def _check_range(self, what: str, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(f"{what}: token id {wrong} is outside the vocabulary; write 0 to {self._vocab_size - 1}")


def _checked_marks(marks: Sequence[EngineMark] | None, most: int) -> tuple[EngineMark, ...] | None:
    """Checks that marks cover at most so many tokens, and returns them."""
    if marks is None:
        return None
    lengths = [mark.length for mark in marks]
    assert lengths == sorted(lengths), "a longer prefix is kept only if the shorter one is"
    assert not lengths or 1 <= lengths[0] <= lengths[-1] <= most, "marks lie in the prompt"
    assert not any(math.isnan(mark.seconds) for mark in marks), "the clock is compared with it"
    return tuple(marks)


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """Shared state of one scheduler. The Scheduler makes it once and owns all of it.

    Planner, Commit, ConstrainedTexts and ChoiceSearches work on the same requests, pool and counters. Each gets this
    context instead of callbacks.

    Attributes:
        token_bytes: the bytes of a token, b"" for control tokens.
        constraints: opens constraints and has the vocabulary's trie; None: requests that need either are refused.
        vectors: turns hidden states into vectors; None: requests for them are refused.
    """

    config: SchedulerConfig
    kv: KVManager
    table: RequestTable
    factory: RequestFactory
    counters: Counters
    timing: Timing
    clock: Clock
    faults: FaultHook
    token_bytes: Callable[[int], bytes]
    constraints: MatcherCache | None
    vectors: VectorHead | None

    def append_token(self, request: Request, token: int) -> Stop | None:
        """Appends a sampled or forced token to a text; returns a Stop if the text ends with it."""
        self.counters.completion_tokens += 1
        return accept(request, token, self.token_bytes, self.factory.longest)
