"""Loads runs of pages from the tiers of the cache, next to the steps of other requests.

    begin      the names of the pages that are not on the device are looked for, tier by tier, the fastest first
    poll       at each step: what was found is asked for if loading it is faster than computing it; what came is kept
    done       every tier has given what it has; the pages wait for the pool
    late       the deadline has passed: what came so far is used, and the rest is computed

A load belongs to no request. It has the requests that wait for it: several with the same prefix load it once, and one
that ends in the meantime is only taken off. Nothing is written to the pool before the load has ended, so a load that is
given up has changed nothing.

Layers with a window need the keys of the last `reach` tokens only, so their pages are looked for after the others, from
the end of the run backwards. Where one is missing, the run ends there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.instruments import Clock, Counters
from ..tiers.access import PageRun, TierAccess
from ..tiers.rates import GAIN, Rates
from ..tiers.tier import Payload
from .request import Request

_LEAST_WAIT = 0.01  # seconds until a load is late, at least: a step of few rows takes as long
_REST = 1.0  # seconds for which a tier that was late is not asked; doubles each time
_LONGEST_REST = 60.0
_WINDOW_TRIES = 3  # ends of a run for which window pages are looked for


@dataclass(slots=True)
class TierRest:
    """When a tier is asked again that was late.

    Attributes:
        seconds: for which it is not asked when it is late the next time.
        asked_from: on the clock; before that it is not asked.
    """

    seconds: float = _REST
    asked_from: float = 0.0


@dataclass(slots=True, eq=False)
class PageLoad:
    """A run of pages on its way from the tiers.

    Attributes:
        names: of the pages asked for; the first one is page `first` of the sequence.
        window_names: of the window pages of all pages of the sequence up to the last one asked for; empty: no layers
            have windows with slots of their own.
        reach: window pages that are needed before the end of the run.
        waiting: the requests that wait, by number.
        deadline: on the clock.
        payloads: what came, from `first` on, and `media`: the tier of each.
        windows: page → payload of window layers.
        present: pages of the sequence before `first` whose window layers are on the device.
    """

    first: int
    names: Sequence[bytes]
    window_names: Sequence[bytes]
    reach: int
    waiting: dict[int, Request]
    started: float
    deadline: float
    payloads: list[Payload] = field(default_factory=list)
    media: list[str] = field(default_factory=list)
    windows: dict[int, Payload] = field(default_factory=dict)
    present: frozenset[int] = frozenset()
    end: int = 0  # the page after the last one that can be used
    ended: bool = False
    tier: int = 0  # the place of the tier that is asked
    answered: int = 0  # tiers that said what they have
    found: int = 0  # pages, the most that one of them had
    run: PageRun | None = None
    tries: int = 0  # of window pages; 0: the others are not complete

    @property
    def wanted(self) -> range:
        """The window pages without which the run cannot be used up to its end."""
        return range(max(0, self.end - self.reach), self.end)


class PageLoads:
    """Runs all loads of an engine. Used by the engine's thread.

    Args:
        tiers: fastest first.
        token_bytes, window_bytes: of a page, in the payload of each part.
        gone: told the names of pages that no tier has, when all have answered.
    """

    def __init__(
        self,
        tiers: Sequence[TierAccess],
        rates: Rates,
        counters: Counters,
        clock: Clock,
        *,
        page_tokens: int,
        token_bytes: int,
        window_bytes: int,
        gone: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.rates = rates
        self._gone = gone
        self._tiers = tiers
        self._rests = [TierRest() for _ in tiers]
        self._counters = counters
        self._clock = clock
        self._page_tokens = page_tokens
        self._token_bytes = token_bytes
        self._window_bytes = window_bytes
        self._going: list[PageLoad] = []
        self._by_name: dict[bytes, PageLoad] = {}

    @property
    def going(self) -> Sequence[PageLoad]:
        """The loads that have not ended."""
        return self._going

    def join(self, request: Request, name: bytes) -> PageLoad | None:
        """Lets a request wait for the load that brings its next page; None: there is none."""
        load = self._by_name.get(name)
        if load is not None:
            load.waiting[request.number] = request
            self._counters.shared_loads += 1
        return load

    def begin(
        self,
        request: Request,
        first: int,
        names: Sequence[bytes],
        window_names: Sequence[bytes],
        *,
        reach: int,
        present: frozenset[int],
        tokens: int,
    ) -> PageLoad | None:
        """Begins to look for pages; None: no tier is worth to be asked, or it is already known that none has them.

        Args:
            tokens: that need not be computed if all pages come.
        """
        now = self._clock.now()
        size = len(names) * self._token_bytes
        if not any(self._asks(tier, tokens, size) for tier in range(len(self._tiers))):
            self._counters.loads_declined += 1
            return None
        computing = self.rates.computing(tokens)
        deadline = now + (max(_LEAST_WAIT, GAIN * computing) if computing is not None else float("inf"))
        waiting = {request.number: request}
        load = PageLoad(first, names, window_names, reach, waiting, now, deadline, present=present)
        self._advance(load)
        if load.ended:
            return load if load.payloads or load.windows else None
        self._going.append(load)
        self._by_name.update((name, load) for name in names)
        return load

    def poll(self) -> list[PageLoad]:
        """Takes what has come → the loads that have ended."""
        now = self._clock.now()
        ended = []
        for load in self._going:
            self._advance(load)
            if not load.ended and now >= load.deadline:
                self._late(load, now)
            if load.ended:
                ended.append(load)
        for load in ended:
            self._forget(load)
        return ended

    def leave(self, request: Request, load: PageLoad) -> None:
        """Takes a request off; a load for which none waits is given up."""
        load.waiting.pop(request.number, None)
        if not load.waiting and load in self._going:
            if load.run is not None:
                load.run.cancel()
            self._forget(load)

    def _forget(self, load: PageLoad) -> None:
        self._going.remove(load)
        for name in load.names:
            if self._by_name.get(name) is load:
                del self._by_name[name]

    # ------------------------------------------------------------------------------------------ rates

    def _asks(self, tier: int, tokens: int, size: int) -> bool:
        """Returns whether a tier is asked for pages of so many bytes."""
        rested = self._clock.now() >= self._rests[tier].asked_from
        return rested and self.rates.asks(self._tiers[tier].name, tokens, size)

    def _late(self, load: PageLoad, now: float) -> None:
        self._counters.late_loads += 1
        if load.run is not None:
            load.run.cancel()
            self._collect(load)
            rest = self._rests[load.tier]
            rest.asked_from = now + rest.seconds
            rest.seconds = min(2 * rest.seconds, _LONGEST_REST)
        self._end(load)

    # ------------------------------------------------------------------------------------------ one load

    def _advance(self, load: PageLoad) -> None:
        """Goes on as far as the tiers have answered."""
        while not load.ended:
            if load.run is None and not self._ask(load):
                self._end_stage(load)
                continue
            run = load.run
            assert run is not None, "a tier was asked"
            if run.found is None:
                return
            if not run.asked and not run.done:
                if self._pays(load, run.found):
                    run.load(0, run.found, self._window_bytes if load.tries else self._token_bytes)
                elif self.rates.probes(self._tiers[load.tier].name):
                    run.probe()
                else:
                    run.cancel()
            done = run.done
            self._collect(load)
            if not done:
                return
            if run.asked and run.came == run.asked:
                self._rests[load.tier].seconds = _REST
            if not load.tries:
                load.answered += 1
                load.found = max(load.found, len(load.names) - len(run.names) + run.found)
            load.run = None
            load.tier += 1

    def _ask(self, load: PageLoad) -> bool:
        """Asks the next tier for what is missing; False: there is no tier or nothing missing."""
        missing = self._missing(load)
        if not missing or load.tier >= len(self._tiers):
            return False
        pages = len(load.names) - len(load.payloads)
        if not self._asks(load.tier, pages * self._page_tokens, pages * self._token_bytes) and not load.tries:
            load.tier += 1
            return self._ask(load)
        load.run = self._tiers[load.tier].look(missing)
        return True

    def _missing(self, load: PageLoad) -> list[bytes]:
        if not load.tries:
            return list(load.names[len(load.payloads) :])
        return [load.window_names[page] for page in self._missing_windows(load)]

    @staticmethod
    def _missing_windows(load: PageLoad) -> list[int]:
        """Returns the window pages that have not come, the last one first."""
        return [page for page in reversed(load.wanted) if page not in load.windows and page not in load.present]

    def _pays(self, load: PageLoad, found: int) -> bool:
        """Returns whether pages that a tier has are loaded. Window pages are, once the others came."""
        if load.tries:
            return True
        windows = min(load.reach, load.first + found) if load.window_names else 0
        size = found * self._token_bytes + windows * self._window_bytes
        pays = self.rates.worth(self._tiers[load.tier].name, found * self._page_tokens, size)
        self._counters.loads_declined += not pays
        return pays

    def _collect(self, load: PageLoad) -> None:
        """Takes what has come of the tier that is asked."""
        assert load.run is not None, "a tier was asked"
        came = load.run.take()
        if load.tries:
            load.windows.update(zip(self._missing_windows(load), came, strict=False))
        else:
            load.payloads += came
            load.media += [self._tiers[load.tier].name] * len(came)

    def _end_stage(self, load: PageLoad) -> None:
        """Ends the load, or goes on to its window pages, or to a shorter run where one of them is missing."""
        load.tier = 0
        if not load.tries:
            load.end = load.first + len(load.payloads)
            if load.answered == len(self._tiers):
                self._gone(load.names[load.found :])
        if not load.window_names or not load.end:
            self._end(load)
            return
        missing = self._missing_windows(load)
        if load.tries and missing:
            load.end = missing[0]
        elif load.tries:
            self._end(load)
            return
        load.tries += 1
        if load.tries > _WINDOW_TRIES:
            self._end(load)

    def _end(self, load: PageLoad) -> None:
        load.ended = True
        if load.run is not None:
            load.run = None
        if not load.tries:
            load.end = load.first + len(load.payloads)
        if load.window_names and (not load.tries or self._missing_windows(load)):
            load.end = load.first  # without windows no row can go on after the run
            load.payloads.clear()
            load.media.clear()
        del load.payloads[max(0, load.end - load.first) :], load.media[max(0, load.end - load.first) :]
        if load.payloads:
            self._counters.load_seconds += self._clock.now() - load.started
