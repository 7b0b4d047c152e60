"""Pins: prefixes that are kept from eviction though no request runs on them, until their time is over.

    put ──▶ pinned ─┬─ release     its client needs it no more
                    ├─ expire      it has not been used for its seconds
                    ├─ give_way    the oldest, when a request finds no room, or pins hold too much
                    └─ forget      the tree was emptied

A pin takes no memory that a request needs: it holds its tokens until a running request would have to be retracted, or
a waiting one could not be admitted. Then the oldest pin ends, and its tokens are evicted like all others.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..core.counters import Counters
from .radix_cache import Match, RadixCache


@dataclass(slots=True)
class _Pin:
    match: Match
    seconds: float  # that it holds after its last use
    ends: float  # on the clock
    used: int  # last use of its end, when it was looked at


class Pins:
    """All pins of one tree, oldest first.

    Args:
        cache: the tree they hold on to.
        most_tokens: that all of them together may hold, what they share counted once.
    """

    def __init__(self, cache: RadixCache, counters: Counters, most_tokens: int) -> None:
        self._cache = cache
        self._counters = counters
        self._most_tokens = most_tokens
        self._pins: dict[int, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def matches(self) -> Iterator[Match]:
        return (pin.match for pin in self._pins.values())

    def put(self, number: int, match: Match, *, seconds: float, now: float) -> None:
        """Pins what `match`, locked by the caller, covers. Older pins give way if they hold too much together.

        One that is longer than all pins may be, or covers nothing, is refused, and counted so.
        """
        assert number not in self._pins, "a message pins once"
        if not 0 < match.length <= self._most_tokens:
            self._counters.pins_refused += 1
            return
        self._cache.pin(match)
        self._pins[number] = _Pin(match, seconds, now + seconds, match.node.last_use)
        self._counters.pins_placed += 1
        while self._cache.pinned_tokens > self._most_tokens:
            self.give_way()

    def release(self, number: int) -> None:
        """Nothing happens for a pin that has ended by itself."""
        if number in self._pins:
            self._remove(number)
            self._counters.pins_released += 1

    def expire(self, now: float) -> None:
        """Before a step."""
        for number in [number for number, pin in self._pins.items() if now >= pin.ends]:
            self._remove(number)
            self._counters.pins_expired += 1

    def renew(self, now: float) -> None:
        """After a step: the time of those that it has used begins again."""
        for pin in self._pins.values():
            if pin.used != pin.match.node.last_use:
                pin.used, pin.ends = pin.match.node.last_use, now + pin.seconds

    def give_way(self) -> bool:
        """The oldest pin ends; False: there is none."""
        if not self._pins:
            return False
        self._remove(next(iter(self._pins)))
        self._counters.pins_given_way += 1
        return True

    def drop(self) -> None:
        """All pins end."""
        for number in list(self._pins):
            self._remove(number)
            self._counters.pins_lost += 1

    def forget(self) -> None:
        """The tree has been forgotten, and the pins with it."""
        self._counters.pins_lost += len(self._pins)
        self._pins.clear()

    def _remove(self, number: int) -> None:
        self._cache.unpin(self._pins.pop(number).match)
