"""Pins prefixes: keeps them from eviction for a time, also while no request uses them.

    put ──▶ pinned ─┬─ release     its client no longer needs it
                    ├─ expire      it was not used for its number of seconds
                    ├─ give_way    the oldest, when a request finds no room, or pins hold too much
                    └─ forget      the tree was emptied

A pin never takes slots that a request needs. When a running request would have to be retracted, or a waiting one
cannot be admitted, the oldest pin ends, and its tokens are evicted like all others.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..core.counters import Counters
from .radix_cache import Match, RadixCache


@dataclass(slots=True)
class _Pin:
    match: Match
    seconds: float  # it ends so long after its last use
    ends: float  # on the clock
    used: int  # last use of its last node, as read by the latest `renew`


class Pins:
    """Keeps all pins of one tree, oldest first.

    Args:
        cache: the tree.
        most_tokens: the limit for all pins together; tokens that they share count once.
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
        """Pins the tokens of `match`, which the caller has locked. Older pins give way if together they hold too much.

        A pin that is longer than the limit, or covers no token, is refused and counted as refused.
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
        """Ends a pin, unless it has already ended."""
        if number in self._pins:
            self._remove(number)
            self._counters.pins_released += 1

    def expire(self, now: float) -> None:
        """Ends the pins whose time is over. Called before a step."""
        for number in [number for number, pin in self._pins.items() if now >= pin.ends]:
            self._remove(number)
            self._counters.pins_expired += 1

    def renew(self, now: float) -> None:
        """Restarts the time of pins that the step has used. Called after a step."""
        for pin in self._pins.values():
            if pin.used != pin.match.node.last_use:
                pin.used, pin.ends = pin.match.node.last_use, now + pin.seconds

    def give_way(self) -> bool:
        """Ends the oldest pin; False: there is none."""
        if not self._pins:
            return False
        self._remove(next(iter(self._pins)))
        self._counters.pins_given_way += 1
        return True

    def drop(self) -> None:
        """Ends all pins."""
        for number in list(self._pins):
            self._remove(number)
            self._counters.pins_lost += 1

    def forget(self) -> None:
        """Forgets all pins, after the tree was forgotten."""
        self._counters.pins_lost += len(self._pins)
        self._pins.clear()

    def _remove(self, number: int) -> None:
        self._cache.unpin(self._pins.pop(number).match)
