"""The engine's access to a tier: it asks, goes on with its steps, and polls what has come.

    engine's thread                     tier's thread
    look(names) ─▶ PageRun  ─────────▶  tier.longest      found = 3
    run.load(0, 3)          ─────────▶  tier.load         chunk by chunk, head first
    run.take() at each step ◀─────────  payloads          until run.done
    store(names, payloads)  ─────────▶  tier.store        after everything that is waited for

A run that is late is cancelled and computed; a queue that is full drops stores and answers looks with nothing. So a
disk that stalls, or a server that is gone, makes loads late and never blocks a step.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ..core.instruments import Clock, SystemClock
from .rates import LoadRate
from .tier import Faults, Payload, Tier, TierFacts

MOST_RUNS = 256  # looked for or loaded at once, from one tier
MOST_STORED_BYTES = 256 << 20  # that wait to be stored
CHUNK_BYTES = 8 << 20  # loaded at once: between two chunks a run can be cancelled, and another one looks
CLOSE_SECONDS = 5.0  # for what waits to be stored


class PageRun:
    """The pages of one sequence in one tier: first looked for, then loaded. Used by the engine's thread.

    Attributes:
        found: pages from the head on that the tier has; None: the answer has not come.
        done: nothing more comes: all asked for has, or a page was gone, or the run was cancelled.
        asked: pages asked for by `load`.
        came: pages that have come, from the first one asked for on, those taken included.
    """

    def __init__(self, names: Sequence[bytes], loader: "Callable[[PageRun], None]") -> None:
        self.names = names
        self.found: int | None = None
        self.done = False
        self.first = self.asked = self.came = 0
        self.cancelled = False
        self._page_bytes = 0
        self._loader = loader
        self._arrived: deque[Payload] = deque()

    def load(self, first: int, count: int, page_bytes: int = 0) -> None:
        """Begins to load pages [first, first + count), once.

        page_bytes: of each payload; one of another size is no page, and ends the run. 0: any.
        """
        assert self.found is not None, "the answer has not come"
        assert not self.asked, "a run is loaded once"
        assert 0 <= first < first + count <= self.found, "asks for what was found"
        if not self.done:
            self.first, self.asked, self._page_bytes = first, count, page_bytes
            self._loader(self)

    def probe(self) -> None:
        """Ends the run; its first page is loaded all the same, and dropped, to measure the tier."""
        assert self.found, "measures what is there"
        assert not self.asked, "a run is loaded once"
        if not self.done:
            self.asked = 1
            self.done = True
            self._loader(self)

    def take(self) -> list[Payload]:
        """Returns the payloads that have come since the last call. Read `done` before: more may come in between."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def cancel(self) -> None:
        """Gives up what has not come. Payloads taken before stay valid."""
        self.cancelled = self.done = True

    # ---- by the access

    def answer(self, found: int) -> None:
        if not found:
            self.done = True
        self.found = found

    def arrive(self, payloads: Sequence[Payload | None]) -> None:
        """Takes a chunk. The first page that is missing, or of another size, ends the run."""
        for payload in payloads:
            if payload is None or (self._page_bytes and payload.nbytes != self._page_bytes):
                self.done = True
                return
            self._arrived.append(payload)
            self.came += 1
        self.done = self.done or self.came >= self.asked


class TierAccess(Protocol):
    """A tier as the engine uses it. Nothing here waits or raises."""

    name: str

    def look(self, names: Sequence[bytes]) -> PageRun:
        """Begins to look for pages of a sequence, given from its head on."""

    def store(self, names: Sequence[bytes], payloads: Sequence[Payload]) -> None:
        """Stores pages, as `Tier.store`, at some time."""

    def forget(self, names: Sequence[bytes]) -> None:
        """Removes pages, at some time."""

    def facts(self) -> TierFacts: ...

    def settle(self, seconds: float) -> None:
        """Waits until nothing waits to be stored, for at most `seconds`. At the end of the engine only."""

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Ends the access; stores what waits, for at most `seconds`."""


class DirectAccess:
    """Implements `TierAccess` in the caller's thread: for host memory, and for tests of the other tiers."""

    def __init__(self, tier: Tier, *, clock: Clock | None = None) -> None:
        self.name = tier.name
        self._tier = tier
        self._clock = clock or SystemClock()
        self._rate = LoadRate()
        tier.open()

    def look(self, names: Sequence[bytes]) -> PageRun:
        run = PageRun(names, self._load)
        before = self._clock.now()
        found = self._tier.longest(names)
        self._rate.looked(self._clock.now() - before)
        run.answer(found)
        return run

    def store(self, names: Sequence[bytes], payloads: Sequence[Payload]) -> None:
        self._tier.store(names, payloads)

    def forget(self, names: Sequence[bytes]) -> None:
        self._tier.forget(names)

    def facts(self) -> TierFacts:
        return replace(self._tier.facts(), latency=self._rate.latency, seconds_per_byte=self._rate.per_byte)

    def settle(self, seconds: float) -> None:
        """Has nothing to wait for: pages are stored at once."""

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        self._tier.close()

    def _load(self, run: PageRun) -> None:
        before = self._clock.now()
        payloads = self._tier.load(run.names[run.first : run.first + run.asked])
        self._rate.loaded(_size(payloads), self._clock.now() - before)
        run.arrive(payloads)


class ThreadedAccess:
    """Implements `TierAccess` with a thread that owns the tier.

    Looks and loads go before stores. Runs are loaded in turns, a chunk each.

    Args:
        page_bytes: of a payload, for chunks, and for one page that is written and read at start to measure the tier;
            0: not known, pages are loaded one by one.
        notify: called in the tier's thread when something has come for a run.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        page_bytes: int = 0,
        notify: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
        most_runs: int = MOST_RUNS,
        most_stored_bytes: int = MOST_STORED_BYTES,
    ) -> None:
        self.name = tier.name
        self._tier = tier
        self._notify = notify
        self._chunk = max(1, CHUNK_BYTES // page_bytes) if page_bytes else 1
        self._most_runs = most_runs
        self._most_stored_bytes = most_stored_bytes
        self._clock = clock or SystemClock()
        self._page_bytes = page_bytes
        self._rate = LoadRate()
        self._faults = Faults(tier.name, self._clock)
        self._looks: deque[PageRun] = deque()
        self._loads: deque[PageRun] = deque()
        self._changes: deque[tuple[Sequence[bytes], Sequence[Payload] | None]] = deque()  # None: forget
        self._stored_bytes = 0  # that wait
        self._asked_pages = 0  # that wait to be loaded
        self._dropped = 0  # pages
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"umbel-{tier.name}-cache", daemon=True)
        self._thread.start()

    def look(self, names: Sequence[bytes]) -> PageRun:
        run = PageRun(names, self._enqueue_load)
        with self._wake:
            if self._closing or not names or len(self._looks) + len(self._loads) >= self._most_runs:
                run.answer(0)
                return run
            self._looks.append(run)
            self._wake.notify_all()
        return run

    def store(self, names: Sequence[bytes], payloads: Sequence[Payload]) -> None:
        size = sum(payload.nbytes for payload in payloads)
        with self._wake:
            if self._closing or self._stored_bytes + size > self._most_stored_bytes:
                self._dropped += len(payloads)
                return
            self._stored_bytes += size
            self._changes.append((names, payloads))
            self._wake.notify_all()

    def forget(self, names: Sequence[bytes]) -> None:
        with self._wake:
            self._changes.append((names, None))
            self._wake.notify_all()

    def facts(self) -> TierFacts:
        facts = self._tier.facts()
        queued = len(self._looks) + len(self._loads) + len(self._changes)
        faults = {**facts.faults, **self._faults.counts}
        return replace(
            facts,
            queued=queued,
            dropped=facts.dropped + self._dropped,
            faults=faults,
            waiting_bytes=self._asked_pages * self._page_bytes,
            latency=self._rate.latency,
            seconds_per_byte=self._rate.per_byte,
        )

    def settle(self, seconds: float) -> None:
        with self._wake:
            self._wake.wait_for(lambda: not self._stored_bytes, seconds)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stores what waits, for at most `seconds`, and drops the rest; a thread in a system call is left alone."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(seconds)
        with self._wake:
            self._dropped += sum(len(payloads) for _, payloads in self._changes if payloads is not None)
            self._changes.clear()

    def _enqueue_load(self, run: PageRun) -> None:
        with self._wake:
            if self._closing:
                run.cancel()
                return
            self._loads.append(run)
            self._asked_pages += run.asked
            self._wake.notify_all()

    # ------------------------------------------------------------------ the tier's thread

    def _work(self) -> None:
        try:
            self._tier.open()
            seconds = self._tier.sample(self._page_bytes) if self._page_bytes else None
            if seconds is not None:
                self._rate.loaded(self._page_bytes, seconds)
        except Exception as error:
            self._unexpected(error)
        while True:
            with self._wake:
                while not (self._looks or self._loads or self._changes or self._closing):
                    self._wake.wait()
                job: PageRun | tuple[Sequence[bytes], Sequence[Payload] | None]
                if self._looks:
                    job = self._looks.popleft()
                elif self._loads:
                    job = self._loads.popleft()
                elif self._changes:
                    job = self._changes.popleft()
                else:
                    break
            self._run(job)
        self._tier.close()

    def _run(self, job: "PageRun | tuple[Sequence[bytes], Sequence[Payload] | None]") -> None:
        """Runs one job. Tiers do not raise; one that does all the same loses this job alone."""
        try:
            if isinstance(job, PageRun):
                self._advance(job)
            elif job[1] is None:
                self._tier.forget(job[0])
            else:
                self._tier.store(job[0], job[1])
        except Exception as error:
            self._unexpected(error)
            if isinstance(job, PageRun):
                with self._wake:
                    self._asked_pages -= job.asked - job.came
                job.answer(0)
                job.cancel()
        if isinstance(job, PageRun):
            self._notify()
        elif job[1] is not None:
            with self._wake:
                self._stored_bytes -= sum(payload.nbytes for payload in job[1])
                self._wake.notify_all()

    def _unexpected(self, error: Exception) -> None:
        self._faults.add("unexpected", f"{type(error).__name__}: {error}")

    def _advance(self, run: PageRun) -> None:
        """Looks for a run, or loads its next chunk."""
        if not run.asked:
            if not run.cancelled:
                before = self._clock.now()
                found = self._tier.longest(run.names)
                self._rate.looked(self._clock.now() - before)
                run.answer(found)
            return
        waited = run.asked - run.came
        if not run.cancelled:
            start = run.first + run.came
            before = self._clock.now()
            payloads = self._tier.load(run.names[start : min(start + self._chunk, run.first + run.asked)])
            self._rate.loaded(_size(payloads), self._clock.now() - before)
            run.arrive(payloads)
        with self._wake:
            if run.done:
                self._asked_pages -= waited
            else:
                self._asked_pages -= waited - (run.asked - run.came)
                self._loads.append(run)


def _size(payloads: Sequence[Payload | None]) -> int:
    return sum(payload.nbytes for payload in payloads if payload is not None)
