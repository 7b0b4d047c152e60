"""Measures generations by the injected clock: in the queue, until the first token, between tokens.

    arrival ────────────────▶ admission ───────────────▶ first token ──▶ … ──▶ last token
       └──── queue_seconds ──────┘                           │  └ token_seconds, each gap ┘
       └──────────────── first_token_seconds ────────────────┘

Times begin with the arrival of a request at the engine. A token counts from the commit that sends it; tokens of one
commit share the gap before it. So over all generations the sum of `token_seconds` is that of (last − first token), and
its count that of the tokens after the first. Hints, scores and choice searches are not measured.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, chain

from ...lang.protocol import RequestTimes
from ...lang.status import BOUNDS, bucket_name, count_name
from ..core.instruments import Clock
from .request import Generation, Request


class Durations:
    """Counts durations by their length. Cumulative: `counters` never fall."""

    def __init__(self, name: str) -> None:
        self._names = (name, *(bucket_name(name, bound) for bound in BOUNDS), count_name(name))
        self._seconds = 0.0
        self._buckets = [0] * (len(BOUNDS) + 1)  # in bucket i: longer than bound i − 1, at most bound i

    def add(self, seconds: float, times: int = 1) -> None:
        """Counts a duration, `times` times over."""
        self._seconds += seconds * times
        self._buckets[bisect_left(BOUNDS, seconds)] += times

    def counters(self) -> Iterator[tuple[str, float]]:
        """Returns the sum, the counts up to each bound, and the count of all, by name."""
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

    def committed(self, request: Request, generation: Generation) -> None:
        """Notes the tokens of a generation that came since the last call, as those of this moment."""
        new = request.generated - generation.timed
        if new <= 0:
            return
        now = self._clock.now()
        if generation.first_token_at is None:
            generation.first_token_at = now
            self._first_token.add(now - request.arrival)
            if new > 1:
                self._token.add(0.0, new - 1)
        else:
            self._token.add((now - generation.last_token_at) / new, new)
        generation.last_token_at, generation.timed = now, request.generated

    def of(self, request: Request, generation: Generation) -> RequestTimes:
        """Returns the times of a generation that ends now."""
        queued_until = self._clock.now() if request.admitted_at is None else request.admitted_at
        first = generation.first_token_at
        return RequestTimes(
            queued=queued_until - request.arrival,
            first_token=None if first is None else first - request.arrival,
            last_token=None if first is None else generation.last_token_at - request.arrival,
        )
