"""A gate for tests: Echo's calls wait at it until the test lets them pass. No sleeps, no timing."""

import asyncio
import contextlib
import threading
from collections import deque

from ...lang import checks

_MOST = 10**9  # calls
_PATIENCE = 30.0  # seconds a test waits for what it expects before it fails


class Gate:
    """Closed at first. Every call to the backend, and every streamed piece, passes it once.

    `step` lets so many through, in the order in which they came; `open` lets everything through.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._permits = 0
        self._open = False
        self._arrived = 0

    @property
    def waiting(self) -> int:
        """Number of calls that wait at the gate."""
        with self._condition:
            return len(self._waiting)

    @property
    def arrived(self) -> int:
        """Number of calls that have come to the gate, passed ones included."""
        with self._condition:
            return self._arrived

    def step(self, count: int = 1) -> None:
        """Lets `count` calls, 1 or more, pass: waiting ones, then later ones."""
        permits = checks.integer("Gate.step(): count", count, 1, _MOST)
        with self._condition:
            self._permits += permits
            self._release()

    def open(self) -> None:
        with self._condition:
            self._open = True
            self._release()

    def close(self) -> None:
        with self._condition:
            self._open = False

    def wait_for(self, arrived: int) -> None:
        """Blocks until so many calls have come to the gate in all.

        Raises:
            AssertionError: they do not come.
        """
        arrived = checks.integer("Gate.wait_for(): arrived", arrived, 0, _MOST)
        with self._condition:
            if not self._condition.wait_for(lambda: self._arrived >= arrived, _PATIENCE):
                raise AssertionError(f"{self._arrived} came to the gate, {arrived} were expected")

    async def passes(self) -> None:
        """Waits to pass, on the backend's loop. A cancelled call gives its place up."""
        loop = asyncio.get_running_loop()
        with self._condition:
            self._arrived += 1
            self._condition.notify_all()
            if self._open:
                return
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, future))
            self._release()
        try:
            await future
        finally:
            with self._condition, contextlib.suppress(ValueError):
                self._waiting.remove((loop, future))

    def _release(self) -> None:
        while self._waiting and (self._open or self._permits):
            loop, future = self._waiting.popleft()
            self._permits -= 0 if self._open else 1
            loop.call_soon_threadsafe(_settle, future)


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
