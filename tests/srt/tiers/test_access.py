"""A tier in a thread of its own: nothing waits for it, what is late can be given up, and its queues have an end."""

import threading
from collections.abc import Callable, Sequence

import pytest
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.tiers.access import DirectAccess, PageRun, ThreadedAccess
from umbel.srt.tiers.memory import HostMemory
from umbel.srt.tiers.tier import Payload

from .pages import PAGE, chain, pages

WAIT = 60.0  # seconds that a thread may take on a busy machine


class GatedTier(HostMemory):
    """A tier whose calls wait until the test lets them go on."""

    name = "gated"

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.calls: list[str] = []
        self.error: Exception | None = None

    def _pass(self, call: str) -> None:
        self.calls.append(call)
        self.entered.release()
        assert self.gate.wait(WAIT)
        if self.error is not None:
            raise self.error

    def longest(self, names: Sequence[bytes]) -> int:
        self._pass("longest")
        return super().longest(names)

    def load(self, names: Sequence[bytes]) -> list[Payload | None]:
        self._pass(f"load {len(names)}")
        return super().load(names)

    def store(self, names: Sequence[bytes], payloads: Sequence[Payload]) -> None:
        self._pass("store")
        super().store(names, payloads)


class Arrivals:
    """Waits until something has come for a run."""

    def __init__(self) -> None:
        self._came = threading.Condition()

    def __call__(self) -> None:
        with self._came:
            self._came.notify_all()

    def until(self, true: Callable[[], bool]) -> None:
        with self._came:
            assert self._came.wait_for(true, WAIT)


def start(tier: HostMemory, **more: int) -> tuple[ThreadedAccess, Arrivals]:
    arrivals = Arrivals()
    return ThreadedAccess(tier, notify=arrivals, **more), arrivals


def drained(access: ThreadedAccess) -> None:
    access.close(WAIT)
    assert not access._thread.is_alive()


@pytest.mark.parametrize("page_bytes", [0, 1_000])
def test_pages_are_stored_found_and_loaded_in_order(page_bytes: int) -> None:
    access, arrivals = start(HostMemory(1 << 20), page_bytes=page_bytes)
    names = chain("a", 4)
    access.store(names[:3], pages(3, 5))
    while True:  # looks go before stores
        run = access.look(names)
        arrivals.until(lambda run=run: run.found is not None)
        if run.found:
            break
    assert run.found == 3
    run.load(1, 2)
    arrivals.until(lambda: run.done)
    assert [int(page[0]) for page in run.take()] == [6, 7]
    assert run.take() == []
    drained(access)


def test_a_tier_that_stands_still_blocks_nothing_and_is_given_up() -> None:
    tier = GatedTier()
    access, _ = start(tier)
    run = access.look(chain("a", 2))
    assert tier.entered.acquire(timeout=WAIT)
    assert run.found is None
    assert not run.done
    access.store(chain("b", 1), pages(1))
    assert access.facts().queued == 1
    run.cancel()
    assert run.done
    tier.gate.set()
    drained(access)
    assert tier.facts().stored == 1


def test_full_queues_drop_stores_and_answer_looks_with_nothing() -> None:
    tier = GatedTier()
    access, _ = start(tier, most_runs=2, most_stored_bytes=2_500)
    access.look(chain("x", 1))
    assert tier.entered.acquire(timeout=WAIT)
    waiting = [access.look(chain("a", 1)) for _ in range(3)]
    assert [run.found for run in waiting] == [None, None, 0]
    for letter in "abc":
        access.store(chain(letter, 1), pages(1))
    assert access.facts().dropped == 1
    tier.gate.set()
    drained(access)
    assert tier.facts().stored == 2


def test_looks_go_before_stores_and_runs_take_turns() -> None:
    tier = GatedTier()
    HostMemory.store(tier, chain("a", 2), pages(2))
    access, arrivals = start(tier)
    first, second = access.look(chain("a", 2)), access.look(chain("a", 2))
    access.store(chain("b", 1), pages(1))
    tier.gate.set()
    arrivals.until(lambda: first.found == 2 and second.found == 2)
    assert tier.calls[:2] == ["longest", "longest"]
    tier.gate.clear()
    access.look(chain("x", 1))
    first.load(0, 2)
    second.load(0, 2)
    tier.gate.set()
    arrivals.until(lambda: first.done and second.done)
    assert len(first.take()) == len(second.take()) == 2
    assert tier.calls.count("load 1") == 4
    drained(access)


def test_a_page_that_is_gone_ends_the_run_before_it() -> None:
    tier = HostMemory(1 << 20)
    tier.store(chain("a", 3), pages(3))
    access, arrivals = start(tier)
    run = access.look(chain("a", 3))
    arrivals.until(lambda: run.found == 3)
    tier.forget(chain("a", 3)[1:2])  # as another process would
    run.load(0, 3)
    arrivals.until(lambda: run.done)
    assert (len(run.take()), run.came) == (1, 1)
    drained(access)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_page_of_another_size_ends_the_run_before_it(threaded: bool) -> None:
    """What comes after it would otherwise be taken for the page before."""
    tier, arrivals = HostMemory(1 << 20), Arrivals()
    stored = pages(4)
    stored[1] = stored[1][:-1]
    tier.store(chain("a", 4), stored)
    access = ThreadedAccess(tier, notify=arrivals) if threaded else DirectAccess(tier)
    run = access.look(chain("a", 4))
    arrivals.until(lambda: run.found == 4)
    run.load(0, 4, PAGE)
    arrivals.until(lambda: run.done)
    assert [int(page[0]) for page in run.take()] == [0]
    access.close()


def test_a_tier_that_raises_is_a_miss() -> None:
    tier = GatedTier()
    tier.error = RuntimeError("broken")
    tier.gate.set()
    access, arrivals = start(tier)
    run = access.look(chain("a", 2))
    arrivals.until(lambda: run.done)
    assert run.found == 0
    access.store(chain("a", 1), pages(1))
    drained(access)
    assert access.facts().faults == {"unexpected": 2}
    assert access._stored_bytes == 0


def test_after_closing_nothing_is_found_or_stored() -> None:
    access, _ = start(HostMemory(1 << 20))
    drained(access)
    access.store(chain("a", 1), pages(1))
    assert access.look(chain("a", 1)).found == 0


def test_direct_access_answers_at_once() -> None:
    access = DirectAccess(HostMemory(1 << 20))
    names = chain("a", 3)
    access.store(names, pages(3))
    run: PageRun = access.look(names)
    assert run.found == 3
    run.load(1, 2)
    assert run.done
    assert [page.nbytes for page in run.take()] == [1_000, 1_000]
    access.forget(names)
    assert access.look(names).done
    assert access.facts().misses == 0


class ClockedTier(HostMemory):
    """A tier whose calls take time on a virtual clock: a look 0.5 s, a page 2 s."""

    name = "clocked"

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(1 << 20)
        self._clock = clock

    def longest(self, names: Sequence[bytes]) -> int:
        self._clock.advance(0.5)
        return super().longest(names)

    def load(self, names: Sequence[bytes]) -> list[Payload | None]:
        self._clock.advance(2.0 * len(names))
        return super().load(names)

    def sample(self, size: int) -> float | None:
        return 4.0


@pytest.mark.parametrize("threaded", [False, True])
def test_looks_and_loads_are_measured(threaded: bool) -> None:
    clock, arrivals = VirtualClock(), Arrivals()
    tier = ClockedTier(clock)
    tier.store(chain("a", 4), pages(4))
    access = ThreadedAccess(tier, clock=clock, notify=arrivals) if threaded else DirectAccess(tier, clock=clock)
    run = access.look(chain("a", 4))
    arrivals.until(lambda: run.found == 4)
    run.load(0, 4)
    arrivals.until(lambda: run.done)
    facts = access.facts()
    assert (facts.latency, facts.seconds_per_byte, facts.waiting_bytes) == (0.5, 2.0 / PAGE, 0)
    access.close()


def test_a_page_is_measured_at_start_and_what_waits_is_counted() -> None:
    tier = GatedTier()
    tier.gate.set()
    HostMemory.store(tier, chain("a", 3), pages(3))
    access, arrivals = start(tier, page_bytes=PAGE)
    runs = [access.look(chain("a", 3)) for _ in range(2)]
    arrivals.until(lambda: all(run.found == 3 for run in runs))
    tier.gate.clear()
    tier.entered = threading.Semaphore(0)
    for run in runs:
        run.load(0, 3)
    assert tier.entered.acquire(timeout=WAIT)
    assert access.facts().waiting_bytes == 6 * PAGE
    runs[1].cancel()
    tier.gate.set()
    drained(access)
    assert access.facts().waiting_bytes == 0
    clocked = ThreadedAccess(ClockedTier(VirtualClock()), page_bytes=PAGE)
    drained(clocked)
    assert clocked.facts().seconds_per_byte == 4.0 / PAGE


def test_a_probe_loads_one_page_that_is_dropped() -> None:
    clock, arrivals = VirtualClock(), Arrivals()
    tier = ClockedTier(clock)
    tier.store(chain("a", 4), pages(4))
    access = ThreadedAccess(tier, clock=clock, notify=arrivals)
    run = access.look(chain("a", 4))
    arrivals.until(lambda: run.found == 4)
    run.probe()
    assert run.done
    drained(access)
    assert access.facts().seconds_per_byte == 2.0 / PAGE
    assert tier.facts().hits == 1
