"""Decides whether loading pages beats computing them, from rates that are measured as both happen.

    seconds ▲            computing
            │          ／
            │        ／  ___--- loading = latency + bytes · seconds a byte
            │    __-／--
            │ --  ／
            └───────┴────────▶ pages
                    crossing: from here on loading pays

On a CPU with a small model a disk wins ten times; on a large GPU the same disk loses. So nothing is assumed: until a
rate is known, a run is loaded, which measures it. A tier that lost is asked for one page now and then, next to the
computing that was chosen, and is found again when it has become fast.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..core.instruments import Clock
from .tier import TierFacts

_SMOOTHING = 0.25  # weight of the latest sample
_LEAST_TOKENS = 16  # of a step whose time says something about prompts
GAIN = 0.8  # loading must take at most this part of the time of computing, to be begun
_STAYS = 1.0  # and this part, where it has paid before: figures that waver decide nothing twice
_PROBE_SECONDS = 5.0  # between two pages of a tier that lost
_MOST_PROBE_SECONDS = 60.0


class Ewma:
    """A moving average whose latest samples weigh most; None before the first."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + _SMOOTHING * (sample - self.value)


class LoadRate:
    """Measures the loads of one tier. Written by the tier's thread, read by the engine's."""

    def __init__(self) -> None:
        self._latency = Ewma()
        self._per_byte = Ewma()

    def looked(self, seconds: float) -> None:
        """Takes a look into account: what a load takes before its first byte."""
        self._latency.add(seconds)

    def loaded(self, size: int, seconds: float) -> None:
        """Takes a chunk of `size` bytes into account; 0: it was waited for, and was not there."""
        if size:
            self._per_byte.add(seconds / size)
        else:
            self._latency.add(seconds)

    @property
    def latency(self) -> float:
        return self._latency.value or 0.0

    @property
    def per_byte(self) -> float:
        return self._per_byte.value or 0.0

    @property
    def known(self) -> bool:
        return self._per_byte.value is not None


@dataclass(slots=True)
class _Standing:
    """Keeps the last decision about a tier.

    Attributes:
        pays: it was loaded from.
        probe_at: on the clock: when one page of it is loaded to measure it, while it does not pay.
        pause: seconds between two such pages; doubles while the tier stays slow.
    """

    pays: bool = True
    probe_at: float = 0.0
    pause: float = _PROBE_SECONDS


class Rates:
    """Compares loading with computing. Used by the engine's thread.

    Args:
        page_tokens: of a page.
        facts_of: the name of a tier → its facts.
    """

    def __init__(self, page_tokens: int, facts_of: Mapping[str, Callable[[], TierFacts]], clock: Clock) -> None:
        self._page_tokens = page_tokens
        self._facts_of = facts_of
        self._clock = clock
        self._token = Ewma()
        self._standings = {name: _Standing() for name in facts_of}

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds of computing a token of a prompt; None: not measured yet."""
        return self._token.value

    def computed(self, tokens: int, seconds: float) -> None:
        """Takes a step into account that ran so many rows of prompts."""
        if tokens >= _LEAST_TOKENS and seconds > 0:
            self._token.add(seconds / tokens)

    def computing(self, tokens: int) -> float | None:
        """Returns the seconds in which tokens are computed; None: not measured yet."""
        return None if self._token.value is None else tokens * self._token.value

    def loading(self, tier: str, size: int) -> float:
        """Returns the seconds in which `size` bytes are loaded, after all that is asked for before; 0: not measured."""
        facts = self._facts_of[tier]()
        return facts.latency + (facts.waiting_bytes + size) * facts.seconds_per_byte

    def worth(self, tier: str, tokens: int, size: int) -> bool:
        """Returns whether `size` bytes of a tier are loaded faster than `tokens` tokens are computed."""
        standing = self._standings[tier]
        computing = self.computing(tokens)
        pays = computing is None or self.loading(tier, size) <= (_STAYS if standing.pays else GAIN) * computing
        if pays:
            standing.pays, standing.pause = True, _PROBE_SECONDS
        elif standing.pays:
            standing.pays = False
            standing.probe_at = self._clock.now() + standing.pause
        return pays

    def asks(self, tier: str, tokens: int, size: int) -> bool:
        """Returns whether to look for pages: loads would pay, or the tier is to be measured anew."""
        return self.worth(tier, tokens, size) or self._clock.now() >= self._standings[tier].probe_at

    def probes(self, tier: str) -> bool:
        """Returns whether one page of a tier that does not pay is to be loaded now (`PageRun.probe`)."""
        standing = self._standings[tier]
        now = self._clock.now()
        if standing.pays or now < standing.probe_at:
            return False
        standing.pause = min(2 * standing.pause, _MOST_PROBE_SECONDS)
        standing.probe_at = now + standing.pause
        return True

    def crossing(self, tier: str, page_bytes: int) -> str:
        """Says from how many pages on loads from a tier pay, by the rates of now."""
        facts = self._facts_of[tier]()
        computing = self.computing(self._page_tokens)
        load = page_bytes * facts.seconds_per_byte
        if computing is None or not facts.seconds_per_byte:
            return f"loads from {tier}: not measured yet"
        before = f" ({_time(facts.latency)} before the first)" if facts.latency else ""
        figures = f"a page takes {_time(load)}{before}, computing it {_time(computing)}"
        gain = GAIN * computing - load
        if gain <= 0:
            return f"loads from {tier} do not pay: {figures}"
        pages = max(1, math.ceil(facts.latency / gain))
        return f"loads from {tier} pay from {pages} {'page' if pages == 1 else 'pages'} on: {figures}"

    def lines(self, tiers: Sequence[str], page_bytes: int) -> list[str]:
        """Returns the crossings of tiers, a line each."""
        return [self.crossing(tier, page_bytes) for tier in tiers]


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
