"""Defines what the parts of the runtime are observed and tested by: a clock, counters, and fault points.

Each part gets them as arguments: the system clock and `no_faults` in production, a virtual clock and a failing hook in
tests and simulations.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from types import TracebackType
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Returns monotonic seconds from an arbitrary zero."""


class SystemClock:
    """Reads `time.monotonic`: deadlines do not move when the wall clock is set."""

    now = staticmethod(time.monotonic)  # a method of our own would take twice as long


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not go back"
        self._now += seconds


@dataclass(slots=True)
class Counters:
    """Counts the engine's work: cumulative and monotonic, so that clients can compute rates and shares from it.

    The paper's cache hit rate is cached_tokens / prompt_tokens; for requests that end well
    prompt_tokens = cached_tokens + computed_prompt_tokens. Hints count as requests. They turn misses of calls into hits
    and are work as well, so the hit rate of the calls alone is 1 − computed_prompt_tokens / prompt tokens of the calls.
    """

    steps: int = 0  # that ran a forward pass
    failed_steps: int = 0
    requests: int = 0  # messages accepted: generate, score and hints
    refused: int = 0  # messages that could not be served
    hints: int = 0
    dropped_hints: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    expired: int = 0
    retractions: int = 0
    aged_admissions: int = 0  # of requests that had waited longer than max_wait
    sibling_admissions: int = 0  # of branches, next to the first of their fork and requests that share more
    fair_admissions: int = 0  # before an older request that was equal but for the usage of its program
    prompt_tokens: int = 0  # of requests when they are first admitted
    cached_tokens: int = 0  # prompt tokens whose keys were found in the tree
    in_step_tokens: int = 0  # cached tokens that another request of the same step was about to compute
    computed_prompt_tokens: int = 0  # prompt rows run, each position of a request counted once
    recomputed_tokens: int = 0  # rows run again after a retraction or a failed step
    duplicate_rows: int = 0  # rows run for their logits although their key was in the pool
    completion_tokens: int = 0
    constrained_tokens: int = 0  # completion tokens under a constraint
    forced_tokens: int = 0  # constrained tokens that the constraint left no choice about
    forward_passes_saved: int = 0  # tokens appended without a step of their own
    closed_texts: int = 0  # texts that took their shortest end because max_tokens was near
    jumps_cut: int = 0  # forced texts whose usual tokens would have changed the token before them
    constraints_opened: int = 0
    constraint_hits: int = 0  # requests whose constraint was open already
    choice_searches: int = 0
    choice_evaluations: int = 0  # token sequences that searches had the model evaluate
    choice_tokens: int = 0  # token sequences that searches weighed
    mask_waits: int = 0  # rows left out of a step because their mask was not finished
    forward_rows: int = 0
    logit_rows: int = 0
    overlapped_steps: int = 0  # launched while the one before had not been read
    memory_shortages: int = 0  # steps that were tried again with fewer rows
    first_steps: int = 0  # launched when there had been nothing to run
    resumed_peeks: int = 0  # looks for the prefix of a waiting request that began where the one before had ended
    late_rows: int = 0  # that chose under a mask which was made while they ran
    dropped_rows: int = 0  # of them: whose mask was not finished in time, or whose token was overruled
    wasted_rows: int = 0  # of texts that had ended when their rows were read
    guessed_prompt_rows: int = 0  # rows of guessed tokens (guesses.py), by source
    accepted_prompt_rows: int = 0  # of these: the guess was right
    guessed_history_rows: int = 0
    accepted_history_rows: int = 0
    guessed_draft_rows: int = 0
    accepted_draft_rows: int = 0
    draft_rows: int = 0  # that the draft has computed itself, prompts among them
    guess_failures: int = 0  # sources that were switched off
    picked_rows: int = 0  # logit rows for which the runner returned the token, not the logits
    snapshots_taken: int = 0  # of recurrent states
    snapshot_hits: int = 0  # requests that went on from one, each time
    snapshot_misses: int = 0  # cached tokens computed again because no snapshot was near
    window_misses: int = 0  # cached tokens computed again because window layers had lost them
    window_slots_reclaimed: int = 0
    loads: int = 0  # runs of pages that came from tiers of the cache
    shared_loads: int = 0  # requests that waited for the load of another one
    late_loads: int = 0  # given up: computing was faster
    loads_declined: int = 0  # runs that a tier has, or may have, and that are computed faster
    loaded_host_tokens: int = 0  # by tier
    loaded_disk_tokens: int = 0
    loaded_shared_tokens: int = 0
    saved_pages: int = 0  # handed to the tiers
    saved_window_pages: int = 0
    save_failures: int = 0  # copies out of the pool that failed
    evicted_tokens: int = 0
    discarded_tokens: int = 0  # because the logits of their rows were not numbers
    cache_events: int = 0  # changes of the tree that were told to the gateway
    pins_placed: int = 0  # = those that hold + released + expired + given way + lost
    pins_refused: int = 0  # longer than all pins together may be, or without a tree
    pins_released: int = 0
    pins_expired: int = 0
    pins_given_way: int = 0  # to requests that found no room, or to newer pins
    pins_lost: int = 0  # with a cache that was flushed, or given up after a failed step
    keeps_placed: int = 0  # prefixes of explicit caching = those that hold + released + expired + lost
    keeps_refused: int = 0  # beyond what kept prefixes may hold, or without a tree
    keeps_released: int = 0
    keeps_expired: int = 0  # that were not released in time
    keeps_lost: int = 0  # as pins_lost
    pool_rebuilds: int = 0  # after failed steps and failed integrity checks
    integrity_failures: int = 0
    idle_checks: int = 0  # of the whole tree and pool, completed in idle time
    prompt_step_rows: int = 0  # of steps that consist of prompts
    decode_step_rows: int = 0  # of steps in which each sequence has one row
    prompt_step_seconds: float = 0.0  # of these steps, from the end of the one before on
    decode_step_seconds: float = 0.0
    load_seconds: float = 0.0  # from the look for pages until they have come, of loads that brought some
    tree_seconds: float = 0.0
    mask_seconds: float = 0.0
    draft_seconds: float = 0.0  # of the draft's passes
    forward_seconds: float = 0.0  # in which the scheduler waited for steps: with overlap, less than they took
    sample_seconds: float = 0.0
    step_seconds: float = 0.0

    def add_loaded(self, tier: str, tokens: int) -> None:
        """Counts tokens that came from a tier."""
        name = f"loaded_{tier}_tokens"
        setattr(self, name, getattr(self, name) + tokens)

    def add_guesses(self, source: str, guessed: int, accepted: int) -> None:
        """Counts rows of guesses of a source."""
        for name, rows in ((f"guessed_{source}_rows", guessed), (f"accepted_{source}_rows", accepted)):
            setattr(self, name, getattr(self, name) + rows)

    def as_dict(self) -> dict[str, float]:
        return dict(zip(_COUNTERS, _read_counters(self), strict=True))  # before every step: a tenth of asdict's time

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, field.default)


_COUNTERS = tuple(field.name for field in fields(Counters))
_read_counters = attrgetter(*_COUNTERS)


class Stopwatch:
    """Adds the time of a `with` block to `seconds`; not re-entrant."""

    __slots__ = ("_clock", "_started", "seconds")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started = 0.0
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = self._clock.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += self._clock.now() - self._started


# Called at named points of the system; it raises what the point is to raise, or returns. The points: gateway.tokenize,
# gateway.send, engine.plan, engine.guess, engine.forward, engine.sample, engine.commit, memory.allocate, engine.start.
FaultHook = Callable[[str], None]


def no_faults(point: str) -> None:
    """Does nothing: in production no point fails on purpose."""


class FailAt:
    """Raises `error` at the k-th visit of one point, once. `visits` counts all points."""

    def __init__(self, point: str, k: int, error: Exception) -> None:
        assert k >= 1, "visits are counted from 1"
        self.point, self.k, self.error = point, k, error
        self.visits: dict[str, int] = {}

    def __call__(self, point: str) -> None:
        self.visits[point] = self.visits.get(point, 0) + 1
        if point == self.point and self.visits[point] == self.k:
            raise self.error
