"""Keeps every request from its arrival to its one ending, and builds the last answer to a message.

held ──let_go──▶ waiting ──admit──▶ running      a message may have several requests (a score has one for each
                    ▲                  │         choice); it is alive until its last request is done or the
                    └────retract───────┘         first one fails. Held are those whose constraint is being opened,
                                                 and searches that wait for the vocabulary's trie
"""

from collections.abc import Sequence

from ...lang.errors import WIRE_ERRORS, EngineError, UmbelError
from ...lang.protocol import FinishReason
from ..cache.slot_allocator import IntegrityError
from ..core.batch import LogitsError
from ..core.counters import Counters
from ..core.messages import Ended, EngineFailed, FromEngine, ScoreEnded
from .kv_manager import KVManager
from .request import Generation, Phase, Prefilling, Request, ScoreGroup, Scoring
from .stopping import Stop


def ended(request: Request, stop: Stop) -> Ended:
    """Builds the end of a generation, with the tokens that were not streamed."""
    generation = request.job
    assert isinstance(generation, Generation), "only generations end with Ended"
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
        enforced=cursor is not None and cursor.accepting and (stop.matched is None or stop.matched in cursor.eos_ids),
        healed=healed,
    )


def score_ended(message_id: int, group: ScoreGroup) -> ScoreEnded:
    return ScoreEnded(
        message_id,
        [member.job.logprobs for member in group.members if isinstance(member.job, Scoring)],
        sum(member.prompt_length for member in group.members),
        sum(member.cached_tokens for member in group.members),
    )


def aborted(request: Request) -> FromEngine:
    if isinstance(request.job, Generation):
        return ended(request, Stop(FinishReason.ABORT, None, request.job.text_bytes))
    return EngineFailed(request.message_id, "CancelledError", "the request was aborted by its sender")


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

    def __init__(self, kv: KVManager, counters: Counters) -> None:
        self.held: dict[int, Request] = {}  # by number
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.alive: dict[int, list[Request]] = {}  # by message: those of its requests that have not ended
        self.events: list[FromEngine] = []
        self.last_failure: Exception | None = None
        self.changes = 0  # counts arrivals, admissions, retractions and endings
        self._kv = kv
        self._counters = counters

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

    def let_go(self, request: Request) -> None:
        """Moves a held request to the waiting ones."""
        del self.held[request.number]
        self.waiting[request.number] = request
        self.changes += 1

    def admit(self, request: Request) -> None:
        """Moves a waiting request to the running ones; the KVManager has opened it."""
        if not request.admitted:
            request.admitted = True
            self._counters.prompt_tokens += request.prompt_length
        del self.waiting[request.number]
        self.running[request.number] = request
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
        self.end(request.message_id, ended(request, stop))

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
