"""A channel that takes its time: what a network between a program and its model would do to it, for simulations."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Delay(Generic[T]):
    """Hands on what it is given after some seconds of the loop's time, in the order in which it came.

    Args:
        seconds: 0 hands it on at once.
        then: gets it.
    """

    def __init__(self, seconds: float, then: Callable[[T], None]) -> None:
        self._seconds = seconds
        self._then = then
        self._waiting: deque[T] = deque()
        self.carried = 0

    def put(self, item: T) -> None:
        self.carried += 1
        if self._seconds == 0.0:
            self._then(item)
        else:  # timers of one moment come in any order, so each takes what is first
            self._waiting.append(item)
            asyncio.get_running_loop().call_later(self._seconds, self._first)

    def _first(self) -> None:
        self._then(self._waiting.popleft())
