"""What comes between steps: messages become requests or are refused, questions are answered, and whatever was aborted
or is too late ends.
"""

from collections.abc import Callable
from typing import assert_never

from ...lang.errors import CapabilityError, DeadlineError, ParameterError, UmbelError
from ..core.batch import PictureStore
from ..core.clock import Clock
from ..core.counters import Counters
from ..core.messages import (
    ControlEnded,
    EngineAbort,
    EngineChoose,
    EngineControl,
    EngineForget,
    EngineGenerate,
    EnginePicture,
    EnginePrefill,
    EngineRelease,
    EngineScore,
    FromEngine,
    ToEngine,
)
from .choice_search import ChoiceSearches
from .constrained import ConstrainedTexts
from .endings import aborted, failure
from .kv_manager import KVManager
from .request import Prefilling
from .request_table import RequestTable
from .validation import RequestFactory

Info = dict[str, str | int | float | bool | list[int | str] | None]


class Inbox:
    """Used by the scheduler alone.

    Args:
        pictures: None: the model reads text only.
        info: answers the control "info".
    """

    def __init__(
        self,
        factory: RequestFactory,
        table: RequestTable,
        kv: KVManager,
        counters: Counters,
        clock: Clock,
        *,
        pictures: PictureStore | None,
        constrained: ConstrainedTexts,
        searches: ChoiceSearches,
        info: Callable[[], Info],
    ) -> None:
        self._factory = factory
        self._table = table
        self._kv = kv
        self._counters = counters
        self._clock = clock
        self._pictures = pictures
        self._constrained = constrained
        self._searches = searches
        self._info = info
        self._aborts: list[int] = []
        self._controls: list[EngineControl] = []

    @property
    def empty(self) -> bool:
        """Nothing waits for `read`."""
        return not (self._aborts or self._controls)

    def submit(self, message: ToEngine) -> None:
        """As `Scheduler.submit`."""
        match message:
            case EngineAbort(id=message_id):
                self._aborts.append(message_id)
            case EngineControl():
                self._controls.append(message)
            case EngineRelease(id=message_id):
                self._release(message_id)
            case EnginePicture():
                self._take_picture(message)
            case EngineForget(number):
                if self._pictures is not None:
                    self._pictures.forget(number)
            case EngineGenerate() | EngineScore() | EngineChoose() | EnginePrefill():
                if message.id in self._table.alive:
                    raise ParameterError(f"request id {message.id} is in use; give every request its own")
                self._accept(message)
            case _:
                assert_never(message)

    def read(self) -> None:
        """Before a step: what was asked is answered, and what is to end ends."""
        self._answer_controls()
        self._end_aborted()
        self._end_expired()

    def _accept(self, message: EngineGenerate | EngineScore | EngineChoose | EnginePrefill) -> None:
        now = self._clock.now()
        try:
            match message:
                case EngineGenerate():
                    requests = [self._factory.generate(message, now)]
                    if message.constraint is not None:
                        self._constrained.hold(requests[0], message)
                case EngineScore():
                    requests = self._factory.score(message, now)
                case EngineChoose():
                    requests = [self._factory.choose(message, now)]
                    self._searches.hold(requests[0], message)
                case EnginePrefill():
                    requests = [self._factory.prefill(message, now)]
                case _:
                    assert_never(message)
        except Exception as error:
            self._counters.refused += 1
            if not isinstance(error, UmbelError):
                self._table.last_failure = error
            if isinstance(message, EnginePrefill):
                self._counters.dropped_hints += 1  # a hint is never answered
            else:
                self._table.events.append(failure(message.id, error))
            return
        self._counters.requests += 1
        self._counters.hints += isinstance(message, EnginePrefill)
        if isinstance(message, EngineChoose) or (
            isinstance(message, EngineGenerate) and message.constraint is not None
        ):
            self._table.hold(requests[0])
        else:
            self._table.add(message.id, requests)

    def _take_picture(self, picture: EnginePicture) -> None:
        """Messages that hold a picture which could not be taken are refused when they come."""
        try:
            if self._pictures is None:
                raise CapabilityError("the model reads text only")
            self._pictures.put(picture)
        except Exception as error:
            self._table.last_failure = error

    def _release(self, message_id: int) -> None:
        """Ends a pin, or the hint that would have placed it."""
        requests = self._table.alive.get(message_id)
        if requests is None:
            self._kv.pins.release(message_id)
        elif isinstance(requests[0].job, Prefilling):
            self._table.drop(requests[0])

    def _answer_controls(self) -> None:
        controls, self._controls = self._controls, []
        for control in controls:
            match control.verb:
                case "flush_cache":
                    answer: FromEngine = ControlEnded(
                        control.id, {"evicted": self._kv.flush(), "kept": self._kv.cache.total_tokens}
                    )
                case "info":
                    answer = ControlEnded(control.id, self._info())
                case _:
                    error = ParameterError(f'unknown verb {control.verb!r}; write "flush_cache" or "info"')
                    answer = failure(control.id, error)
            self._table.events.append(answer)

    def _end_aborted(self) -> None:
        aborts, self._aborts = self._aborts, []
        for message_id in aborts:
            if message_id in self._table.alive:  # else it has ended already, and was answered by that
                self._counters.aborted += 1
                request = self._table.alive[message_id][0]
                try:
                    ending = aborted(request)
                except Exception as error:
                    self._table.fail(request, error)
                else:
                    self._table.end(message_id, ending)

    def _end_expired(self) -> None:
        now = self._clock.now()
        expired = [
            (message_id, requests[0])
            for message_id, requests in self._table.alive.items()
            if requests[0].deadline is not None and now >= requests[0].deadline
        ]
        for message_id, request in expired:
            self._counters.expired += 1
            seconds, tokens = request.schedule.timeout, request.generated
            error = DeadlineError(f"the deadline of {seconds:g} s passed after {tokens} tokens")
            self._table.end(message_id, failure(message_id, error))
