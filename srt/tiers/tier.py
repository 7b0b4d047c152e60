"""Defines a tier of the cache, and what tiers share: payloads, facts, faults.

    names     h0  h1  h2  h3  h4            of one sequence, head first
    a tier    ■   ■   ■   ·   ■             longest(names) = 3: a page after a gap is of no use

A tier never raises to its caller. What goes wrong is a miss, a count by kind, and a line in the log.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.instruments import Clock

# The bytes of a page, contiguous. A tier owns what it was given: neither side changes it any more.
Payload = NDArray[np.uint8]

_log = logging.getLogger("umbel.engine")


@dataclass(frozen=True, slots=True)
class TierFacts:
    """The state of a tier. All but `pages`, `bytes` and the rates are cumulative.

    Attributes:
        hits, misses: pages that were asked for by `load` and found, or not.
        faults: kind → how often; each was a miss or a page that was not stored.
        waiting_bytes: that were asked for and have not come.
        latency: seconds of a look, measured; 0 where none was answered yet.
        seconds_per_byte: of loading, measured; 0 where nothing was loaded yet.
    """

    name: str
    pages: int = 0
    bytes: int = 0
    limit: int = 0  # bytes; 0: the tier's server decides
    hits: int = 0
    misses: int = 0
    stored: int = 0  # pages
    evicted: int = 0  # pages
    dropped: int = 0  # pages that were not stored: no room in the queue, or no page before them in the tier
    faults: dict[str, int] = field(default_factory=dict)
    queued: int = 0  # jobs that wait for the tier's thread
    waiting_bytes: int = 0
    latency: float = 0.0
    seconds_per_byte: float = 0.0


class Tier(Protocol):
    """Maps names to payloads. Used from one thread: the engine's for host memory, the tier's own for others."""

    name: str

    def open(self) -> None:
        """Prepares what takes time, such as an index. Called once, before everything else."""

    def longest(self, names: Sequence[bytes]) -> int:
        """Returns how many pages from the head on the tier has. They count as used; the tail is evicted first."""

    def load(self, names: Sequence[bytes]) -> list[Payload | None]:
        """Returns the payloads; None for each page that the tier has not, or not whole."""

    def store(self, names: Sequence[bytes], payloads: Sequence[Payload]) -> None:
        """Stores pages of a sequence.

        Args:
            names: of its pages, from the head to the last one stored.
            payloads: those of the last `len(payloads)` names. A page is stored only where the one before it is there:
                after a gap it would never be read.
        """

    def forget(self, names: Sequence[bytes]) -> None:
        """Removes pages; ignores those it has not."""

    def sample(self, size: int) -> float | None:
        """Writes a page of `size` bytes and reads it → the seconds of reading, before any page was loaded.

        Returns None where it could not, or where there is nothing to measure."""

    def facts(self) -> TierFacts:
        """Returns counts and sizes. May be called from any thread."""

    def close(self) -> None:
        """Ends connections and files. The pages stay where they outlive a process."""


class LoadCounts:
    """Counts the pages that were loaded or were missing."""

    def __init__(self) -> None:
        self.hits = self.misses = 0

    def take(self, pages: Iterable[Payload | None], count: int) -> list[Payload | None]:
        """Returns `count` pages up to the first that is missing; None for the others: after a gap none is of use.

        Args:
            pages: read one by one; none after the gap.
        """
        found: list[Payload | None] = [None] * count
        for place, payload in enumerate(pages):
            if payload is None:
                self.misses += 1
                break
            found[place] = payload
            self.hits += 1
        return found


_SECONDS_BETWEEN_LINES = 60.0


class Faults:
    """Counts faults by kind, and logs each kind when it first comes, then at most once a minute."""

    def __init__(self, tier: str, clock: Clock) -> None:
        self.counts: Counter[str] = Counter()
        self._tier = tier
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}  # kind → when the last line was written, and the count then

    def add(self, kind: str, what: str) -> None:
        """Counts a fault.

        Args:
            what: it was, for the log; never content of a prompt.
        """
        self.counts[kind] += 1
        count = self.counts[kind]
        now = self._clock.now()
        before, known = self._said.get(kind, (now - _SECONDS_BETWEEN_LINES, 0))
        if now - before >= _SECONDS_BETWEEN_LINES:
            self._said[kind] = (now, count)
            more = f" ({count - known} times since the last line)" if count - known > 1 else ""
            _log.warning("%s cache: %s; its pages are computed%s", self._tier, what, more)


class Breaker:
    """Leaves alone what fails: after `failures` in a row nothing is tried for `pause` seconds, then one call is.

        CLOSED ── failures in a row ──▶ OPEN ── pause ──▶ one call ── well ──▶ CLOSED
                                          ▲────── failed ────┘

    Not for several threads.
    """

    def __init__(self, clock: Clock, *, failures: int, pause: float) -> None:
        self._clock = clock
        self._most = failures
        self._pause = pause
        self._failures = 0
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Returns whether it has tripped, and no call went well since."""
        return self._failures >= self._most

    def allows(self) -> bool:
        """Returns whether a call may be tried. While it is open, one call is allowed a pause."""
        if not self.open:
            return True
        now = self._clock.now()
        if now < self._until:
            return False
        self._until = now + self._pause
        return True

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self) -> None:
        self._failures += 1
        if self.open:
            self._until = self._clock.now() + self._pause
