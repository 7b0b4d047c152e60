"""Who is alive: every request from its arrival to its one ending.

held ──let_go──▶ waiting ──admit──▶ running      a message may have several requests (a score has one for each
                    ▲                  │         choice); it is alive until its last request is done or the
                    └────retract───────┘         first one fails. Held are those whose constraint is being opened,
                                                 and searches that wait for the vocabulary
"""

from collections.abc import Sequence

from ..cache.slot_allocator import IntegrityError
from ..core.batch import LogitsError
from ..core.counters import Counters
from ..core.messages import FromEngine
from .endings import failure
from .kv_manager import KVManager
from .request import Phase, Prefilling, Request


class RequestTable:
    """The tables of held, waiting and running requests, and what is to be sent. Only it changes a request's phase."""

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
        """More requests of a message that is alive."""
        self.alive[message_id].extend(requests)
        self.waiting.update((request.number, request) for request in requests)
        self.changes += 1

    def hold(self, request: Request) -> None:
        """A request that cannot wait for its turn yet."""
        self.alive[request.message_id] = [request]
        self.held[request.number] = request
        self.changes += 1

    def let_go(self, request: Request) -> None:
        """A held request waits for its turn from now on."""
        del self.held[request.number]
        self.waiting[request.number] = request
        self.changes += 1

    def admit(self, request: Request) -> None:
        """The request, whose place is open, runs from now on."""
        if not request.admitted:
            request.admitted = True
            self._counters.prompt_tokens += request.prompt_length
        del self.waiting[request.number]
        self.running[request.number] = request
        request.phase = Phase.RUNNING
        self.changes += 1

    def retract(self, request: Request) -> None:
        """Back to waiting with all its tokens. Its keys stay in the tree as long as nobody needs the room."""
        self._counters.retractions += 1
        if isinstance(request.job, Prefilling):
            self.drop(request)
            return
        self._kv.close(request)
        self._wait_again(request)

    def retract_all(self) -> None:
        """Everybody waits again: pool and tree have been cleared."""
        for request in list(self.running.values()):
            self._kv.detach(request)
            self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        del self.running[request.number]
        self.waiting[request.number] = request
        request.phase = Phase.WAITING
        self.changes += 1

    def release(self, request: Request) -> None:
        """The request holds nothing any more. Its message is alive until `end`."""
        self._kv.close(request)
        self.held.pop(request.number, None)
        self.waiting.pop(request.number, None)
        self.running.pop(request.number, None)
        self.alive[request.message_id].remove(request)
        request.phase = Phase.ENDED
        self.changes += 1

    def end(self, message_id: int, ending: FromEngine | None) -> None:
        """The one place where a message ends: what it holds is given back, then it is answered (hints never are)."""
        requests = self.alive[message_id]
        hint = any(isinstance(request.job, Prefilling) for request in requests)
        for request in list(requests):
            self.release(request)
        del self.alive[message_id]
        if ending is not None and not hint:
            self.events.append(ending)

    def fail(self, request: Request, error: Exception) -> None:
        """Ends the request's message, all its requests, with the cause. Keys behind which the model's logits are not
        numbers may be wrong: the tree does not keep them."""
        self.last_failure = error
        self._counters.failed += 1
        if isinstance(error, LogitsError):
            self._kv.discard(request)
        self.end(request.message_id, failure(request.message_id, error))

    def drop(self, request: Request) -> None:
        """A hint that cannot be served now: to lose it is better than to let it cost others time."""
        self._counters.dropped_hints += 1
        self.end(request.message_id, None)

    def check(self) -> None:
        """Raises IntegrityError when the tables contradict each other."""
        idle = [*self.held.values(), *self.waiting.values()]
        holding = [request for request in idle if request.match is not None]
        if holding:
            raise IntegrityError(f"{len(holding)} waiting requests hold slots")
        alive = sum(map(len, self.alive.values()))
        if alive != len(idle) + len(self.running):
            raise IntegrityError(f"{alive} requests are alive, {len(idle)} wait and {len(self.running)} run")
